"""Which call comes next: the Hypothesis state machine.

What lives here: one rule a call, with when it makes sense and how its arguments are drawn. What
never lives here: what a call should do (see :mod:`.trial`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import MissingExtra

try:
    from hypothesis import strategies as st
    from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
except ImportError as error:
    raise MissingExtra(
        "this needs hypothesis: pip install 'kvmmu[testing]'", extra="testing"
    ) from error

from .trial import Claim, Trial

__all__ = ["AllocatorMachine"]

MAX_CLAIMS = 12
PROMPTS = 2
LONGEST = 4
"""Most blocks of a prompt, and of one append."""

any_index = st.integers(0, 2 * MAX_CLAIMS)
"""Chooses one of what is there, counted round."""


def can(*methods: str) -> Callable[[Any], Any]:
    """The rule needs these methods of the allocator."""
    return precondition(lambda self: self.trial.has.issuperset(methods))


def when(condition: Callable[[Trial], Any]) -> Callable[[Any], Any]:
    """The rule needs this state."""
    return precondition(lambda self: bool(condition(self.trial)))


def has_room(trial: Trial) -> bool:
    return len(trial.claims) < MAX_CLAIMS


class AllocatorMachine(RuleBasedStateMachine):
    """Random calls on an allocator; the rules of the methods that it lacks are never run."""

    def __init__(
        self, factory: Callable[[], Any], refuses: tuple[type[Exception], ...] | None = None
    ) -> None:
        super().__init__()
        self.trial = Trial(factory, refuses)

    def teardown(self) -> None:
        """Gives everything back and takes stock, unless a fault has been found."""
        if self.trial.fault is None:
            self.trial.finish()

    def _choose(self, which: int, fits: Callable[[Claim], Any] = lambda claim: True) -> int | None:
        """The index of a claim that fits, if any does."""
        fitting = [i for i, claim in enumerate(self.trial.claims) if fits(claim)]
        return fitting[which % len(fitting)] if fitting else None

    # -- every allocator -----------------------------------------------------------------------

    @rule()
    def be_idle(self) -> None:
        """Nothing: the simplest step, so that Hypothesis shrinks a step that is not needed to no
        line. It takes rules without arguments for the simplest, in the order of their names."""

    @when(has_room)
    @rule(n=st.integers(0, 5))
    def claim(self, n: int) -> None:
        """A few blocks."""
        self.trial.claim(n)

    @when(has_room)
    @rule(beyond=st.integers(-1, 2))
    def claim_the_rest(self, beyond: int) -> None:
        """About as many as are free: the end of the pool."""
        if self.trial.free + beyond >= 0:
            self.trial.claim(self.trial.free + beyond)

    @when(lambda trial: trial.claims)
    @rule(which=any_index, start=st.integers(0, 3), length=st.sampled_from([8, 1, 2, 3]))
    def release(self, which: int, start: int, length: int) -> None:
        """A claim or, of ids, a part of one."""
        index = which % len(self.trial.claims)
        blocks = len(self.trial.claims[index].blocks)
        start = 0 if length == 8 else min(start, max(blocks - 1, 0))
        self.trial.release(index, start, min(start + length, blocks) if length < 8 else blocks)

    @when(lambda trial: not trial.deals_in_sequences and len(trial.claims) > 1)
    @rule(which=any_index, other=any_index)
    def release_together(self, which: int, other: int) -> None:
        """Two claims of ids in one call, of the same blocks if any are: a block listed twice."""
        index = which % len(self.trial.claims)
        one = self.trial.claims[index]
        second = self._choose(
            other, lambda claim: claim is not one and not set(one.blocks).isdisjoint(claim.blocks)
        )
        if second is None:
            second = self._choose(other, lambda claim: claim is not one)
        assert second is not None
        self.trial.release_together(index, second)

    # -- sharing and growing -------------------------------------------------------------------

    @precondition(lambda self: self.trial.has & {"retain", "fork"})
    @when(lambda trial: trial.claims and has_room(trial))
    @rule(which=any_index, start=st.integers(0, 3), length=st.sampled_from([8, 1, 2]))
    def share(self, which: int, start: int, length: int) -> None:
        """A second claim on the same blocks."""
        index = self._choose(which, lambda claim: claim.written)
        if index is not None:
            blocks = len(self.trial.claims[index].blocks)
            start = 0 if length == 8 else min(start, max(blocks - 1, 0))
            self.trial.share(index, start, min(start + length, blocks))

    @can("append")
    @when(lambda trial: trial.claims)
    @rule(which=any_index, n=st.integers(1, LONGEST))
    def append(self, which: int, n: int) -> None:
        """A sequence grows."""
        index = self._choose(which, lambda claim: claim.written)
        if index is not None:
            self.trial.append(index, n)

    @can("truncate")
    @when(lambda trial: trial.claims)
    @rule(which=any_index, n=st.integers(0, LONGEST))
    def truncate(self, which: int, n: int) -> None:
        """A sequence is cut."""
        index = self._choose(which, lambda claim: claim.written and len(claim.blocks) >= n)
        if index is not None:
            self.trial.truncate(index, n)

    # -- moving and caching --------------------------------------------------------------------

    @can("compact")
    @rule()
    def compact(self) -> None:
        """Blocks move."""
        self.trial.compact()

    @can("claim_prompt", "publish")
    @when(has_room)
    @rule(
        prompt=st.integers(0, PROMPTS - 1),
        n=st.integers(1, LONGEST),
        then=st.sampled_from(["", "publish", "publish and release"]),
    )
    def claim_prompt(self, prompt: int, n: int, then: str) -> None:
        """A prompt that may be cached, and often its whole life."""
        trial, before = self.trial, len(self.trial.claims)
        trial.claim_prompt(prompt, n)
        if then and len(trial.claims) > before:
            if not trial.claims[-1].written:
                trial.publish(before)
            if then != "publish":
                trial.release(before)

    @can("claim_prompt", "publish")
    @when(lambda trial: trial.claims)
    @rule(which=any_index)
    def publish(self, which: int) -> None:
        """A prompt has been computed."""
        index = self._choose(which, lambda claim: not claim.written and claim.prompt is not None)
        if index is not None:
            self.trial.publish(index)

    @can("evict")
    @rule(n=st.sampled_from([1, 2, 3, 100]))
    def evict(self, n: int) -> None:
        """Cached blocks are forgotten."""
        self.trial.evict(n)

    # -- what must be refused ------------------------------------------------------------------

    @when(lambda trial: not trial.subject.trusts_caller)
    @rule(how=st.integers(0, 3), which=any_index, near=st.integers(-2, 1))
    def misuse(self, how: int, which: int, near: int) -> None:
        """What is not held is released, shared or extended."""
        trial, by_id = self.trial, not self.trial.deals_in_sequences
        gone = which % len(trial.gone) if trial.gone else None
        if how == 0 and gone is not None:
            trial.release_again(gone)
        elif how == 1 and by_id:
            block = (
                near
                if near < 0
                else trial.num_blocks + (trial.subject.null_block is not None) + near
            )
            trial.release_foreign(block, self._choose(which) if which % 2 else None)
        elif how == 2 and by_id:
            held = trial.held
            index = self._choose(which, lambda claim: held[claim.blocks[0]] == 1)
            if index is not None:
                trial.release_doubled(index)
        elif how == 3 and gone is not None:
            trial.use_again(gone)
