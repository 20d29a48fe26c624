"""Which calls there are: when each makes sense, and what its arguments are drawn from.

What lives here: one rule a call, as data that every driver reads (:mod:`.machine`,
:mod:`.search`). What never lives here: chance, and what a call should do (see :mod:`.trial`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .trial import Claim, Trial

__all__ = ["RULES", "Rule"]

MAX_CLAIMS = 12
PROMPTS = 2
LONGEST = 4
"""Most blocks of a prompt, and of one append."""

ANY = range(2 * MAX_CLAIMS + 1)
"""Chooses one of what is there, counted round."""


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A call that a driver may make next.

    Attributes:
        call: makes it; takes the trial, and the arguments by name.
        fits: whether an allocator has what the call needs, which never changes.
        when: whether it makes sense in the state that the trial is in.
        arguments: for each argument the values to draw from, the simplest first.
    """

    call: Callable[..., None]
    fits: Callable[[Trial], Any]
    when: Callable[[Trial], Any]
    arguments: Mapping[str, Sequence[Any]]

    @property
    def name(self) -> str:
        """Of the call, in Python."""
        return self.call.__name__


RULES: list[Rule] = []


def always(trial: Trial) -> bool:
    """Every allocator, or every state."""
    return True


def has(*methods: str) -> Callable[[Trial], bool]:
    """Allocators with these methods."""
    return lambda trial: trial.has.issuperset(methods)


def has_claims(trial: Trial) -> bool:
    """Somebody holds something."""
    return bool(trial.claims)


def has_room(trial: Trial) -> bool:
    """There are few enough claims for one more."""
    return len(trial.claims) < MAX_CLAIMS


def rule(
    *,
    fits: Callable[[Trial], Any] = always,
    when: Callable[[Trial], Any] = always,
    **arguments: Sequence[Any],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a rule of a function."""

    def enter(call: Callable[..., None]) -> Callable[..., None]:
        RULES.append(Rule(call, fits, when, arguments))
        return call

    return enter


def _choose(
    trial: Trial, which: int, fits: Callable[[Claim], Any] = lambda claim: True
) -> int | None:
    """The index of a claim that fits, if any does."""
    fitting = [i for i, claim in enumerate(trial.claims) if fits(claim)]
    return fitting[which % len(fitting)] if fitting else None


# -- every allocator -------------------------------------------------------------------------


@rule(when=has_room, n=range(6))
def claim(trial: Trial, n: int) -> None:
    """A few blocks."""
    trial.claim(n)


@rule(when=has_room, beyond=(0, 1, -1, 2))
def claim_the_rest(trial: Trial, beyond: int) -> None:
    """About as many as are free: the end of the pool."""
    if trial.free + beyond >= 0:
        trial.claim(trial.free + beyond)


@rule(when=has_claims, which=ANY, start=range(4), length=(8, 1, 2, 3))
def release(trial: Trial, which: int, start: int, length: int) -> None:
    """A claim or, of ids, a part of one."""
    index = which % len(trial.claims)
    blocks = len(trial.claims[index].blocks)
    start = 0 if length == 8 else min(start, max(blocks - 1, 0))
    trial.release(index, start, min(start + length, blocks) if length < 8 else blocks)


@rule(
    fits=lambda trial: not trial.deals_in_sequences,
    when=lambda trial: len(trial.claims) > 1,
    which=ANY,
    other=ANY,
)
def release_together(trial: Trial, which: int, other: int) -> None:
    """Two claims of ids in one call, of the same blocks if any are: a block listed twice."""
    index = which % len(trial.claims)
    one = trial.claims[index]
    second = _choose(
        trial,
        other,
        lambda claim: claim is not one and not set(one.blocks).isdisjoint(claim.blocks),
    )
    if second is None:
        second = _choose(trial, other, lambda claim: claim is not one)
    assert second is not None
    trial.release_together(index, second)


# -- sharing and growing ---------------------------------------------------------------------


@rule(
    fits=lambda trial: trial.has & {"retain", "fork"},
    when=lambda trial: trial.claims and has_room(trial),
    which=ANY,
    start=range(4),
    length=(8, 1, 2),
)
def share(trial: Trial, which: int, start: int, length: int) -> None:
    """A second claim on the same blocks."""
    index = _choose(trial, which, lambda claim: claim.written)
    if index is not None:
        blocks = len(trial.claims[index].blocks)
        start = 0 if length == 8 else min(start, max(blocks - 1, 0))
        trial.share(index, start, min(start + length, blocks))


@rule(fits=has("append"), when=has_claims, which=ANY, n=range(1, LONGEST + 1))
def append(trial: Trial, which: int, n: int) -> None:
    """A sequence grows."""
    index = _choose(trial, which, lambda claim: claim.written)
    if index is not None:
        trial.append(index, n)


@rule(fits=has("truncate"), when=has_claims, which=ANY, n=range(LONGEST + 1))
def truncate(trial: Trial, which: int, n: int) -> None:
    """A sequence is cut."""
    index = _choose(trial, which, lambda claim: claim.written and len(claim.blocks) >= n)
    if index is not None:
        trial.truncate(index, n)


# -- moving and caching ----------------------------------------------------------------------


@rule(fits=has("compact"))
def compact(trial: Trial) -> None:
    """Blocks move."""
    trial.compact()


@rule(
    fits=has("claim_prompt", "publish"),
    when=has_room,
    prompt=range(PROMPTS),
    n=range(1, LONGEST + 1),
    then=("", "publish", "publish and release"),
)
def claim_prompt(trial: Trial, prompt: int, n: int, then: str) -> None:
    """A prompt that may be cached, and often its whole life."""
    before = len(trial.claims)
    trial.claim_prompt(prompt, n)
    if then and len(trial.claims) > before:
        if not trial.claims[-1].written:
            trial.publish(before)
        if then != "publish":
            trial.release(before)


@rule(fits=has("claim_prompt", "publish"), when=has_claims, which=ANY)
def publish(trial: Trial, which: int) -> None:
    """A prompt has been computed."""
    index = _choose(trial, which, lambda claim: not claim.written and claim.prompt is not None)
    if index is not None:
        trial.publish(index)


@rule(fits=has("evict"), n=(1, 2, 3, 100))
def evict(trial: Trial, n: int) -> None:
    """Cached blocks are forgotten."""
    trial.evict(n)


# -- what must be refused --------------------------------------------------------------------


@rule(
    fits=lambda trial: not trial.subject.trusts_caller,
    how=range(4),
    which=ANY,
    near=(0, 1, -1, -2),
)
def misuse(trial: Trial, how: int, which: int, near: int) -> None:
    """What is not held is released, shared or extended."""
    by_id = not trial.deals_in_sequences
    gone = which % len(trial.gone) if trial.gone else None
    if how == 0 and gone is not None:
        trial.release_again(gone)
    elif how == 1 and by_id:
        block = (
            near if near < 0 else trial.num_blocks + (trial.subject.null_block is not None) + near
        )
        trial.release_foreign(block, _choose(trial, which) if which % 2 else None)
    elif how == 2 and by_id:
        held = trial.held
        index = _choose(trial, which, lambda claim: held[claim.blocks[0]] == 1)
        if index is not None:
            trial.release_doubled(index)
    elif how == 3 and gone is not None:
        trial.use_again(gone)
