"""The driver that draws by itself: random examples from a seed, hundreds or thousands a second.

What lives here: what every search has (:class:`Search`), and the one that draws from the rules
alone. What never lives here: the rules (see :mod:`.rules`), how a fault that was found becomes
shorter (:mod:`.shorten`), and Hypothesis (:mod:`.machine`).
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from time import monotonic
from typing import Any

from ..errors import InvalidConfig
from .faults import AllocatorFault
from .rules import RULES
from .shorten import Example, Step, shorten
from .subject import Refuses, name_of
from .trial import Trial

__all__ = ["NOT_ALWAYS", "RandomSearch", "Search"]

NOT_ALWAYS = "not on every run: the allocator does not always do the same"
"""Note of a fault that the same calls did not show again."""

AGAIN = 300
"""Examples that are looked at for a shorter one, once there is a fault."""


class Search(ABC):
    """Examples until a fault is found, so many have run, or the time is up; at least one.

    Args:
        factory, refuses: as for :class:`~.trial.Trial`.
        steps: calls an example, at most.
        seed: of everything that is drawn.
        max_examples, seconds: when to stop; None: no limit.
        shrink: whether to look for a shorter sequence.
        watch: called after each example with how many ran, and whether a fault has been found and
            is being shortened.

    Attributes:
        examples: how many ran; with a fault, the last one is the first that had it.
        calls: lines in all of them.

    Raises:
        InvalidConfig: the factory makes no allocator, or the same one each time.
    """

    def __init__(
        self,
        factory: Callable[[], Any],
        refuses: Refuses | None,
        steps: int,
        seed: int,
        max_examples: int | None,
        seconds: float | None,
        shrink: bool,
        watch: Callable[[int, bool], None],
    ) -> None:
        one, other = (Trial(factory, refuses).allocator for _ in range(2))
        if one is other:
            raise InvalidConfig(
                f"{name_of(factory)} made the same {type(one).__name__} twice; each example needs "
                "a new one"
            )
        self.factory, self.refuses = factory, refuses
        self.steps, self.seed = steps, seed
        self.max_examples, self.shrink, self.watch = max_examples, shrink, watch
        self.examples = self.calls = 0
        self._end = None if seconds is None else monotonic() + seconds

    @abstractmethod
    def run(self) -> AllocatorFault | None:
        """The fault found; None without one."""

    def _enough(self) -> bool:
        """Whether a limit has been reached."""
        if self.max_examples is not None and self.examples >= self.max_examples:
            return True
        return self._end is not None and monotonic() >= self._end


class RandomSearch(Search):
    """Draws each example from the seed and its number, with nothing but ``random.random``, whose
    numbers Python promises to keep: the same seed runs the same examples with the same code.

    In each example some calls are left out, as many as another number says, which finds what a mix
    of all calls hides: swarm testing (Groce et al., ISSTA 2012).
    """

    def run(self) -> AllocatorFault | None:
        while True:
            example = self._example(self.examples, self.steps)
            self.examples += 1
            self.calls += len(example.lines)
            self.watch(self.examples, example.fault is not None)
            if example.fault is not None or self._enough():
                break
        if self.shrink and example.fault is not None:
            example = self._shortest(example, example.fault)
        return example.fault and example.fault.with_traceback(None)

    def _drawn(self, trial: Trial, number: int, most: int) -> Iterator[Step]:
        """Steps, each drawn when the one before has been taken."""
        draw = random.Random(self.seed * 2**32 + number).random
        rules = [rule for rule in RULES if rule.fits(trial)]
        left_out = draw()
        chosen = [rule for rule in rules if draw() >= left_out]
        for _ in range(most):
            # What was left out comes in where nothing else makes sense.
            possible = [rule for rule in chosen if rule.when(trial)] or [
                rule for rule in rules if rule.when(trial)
            ]
            rule = possible[int(draw() * len(possible))]
            yield (
                rule,
                {
                    name: values[int(draw() * len(values))]
                    for name, values in rule.arguments.items()
                },
            )

    def _example(self, number: int, most: int) -> Example:
        trial = Trial(self.factory, self.refuses)
        return _play(trial, self._drawn(trial, number, most))

    def _replay(self, steps: Sequence[Step]) -> Example:
        """These steps again, without those that make no sense."""
        self.watch(self.examples, True)
        trial = Trial(self.factory, self.refuses)
        return _play(trial, ((rule, drawn) for rule, drawn in steps if rule.when(trial)))

    def _shortest(self, example: Example, fault: AllocatorFault) -> Example:
        """The shortest example found for a kind of fault: this one, shortened, or one of those that
        come next, of no more steps."""
        best = example
        try:
            if not self._replay(example.steps).shows(fault):
                fault.add_note(NOT_ALWAYS)
                return example
            best = shorten(self._replay, example)
            for number in range(self.examples, self.examples + AGAIN):
                other = self._example(number, len(best.steps))
                if other.shows(fault):
                    best = min(best, shorten(self._replay, other), key=Example.length)
        except InvalidConfig:  # the factory has gone bad, but there is a fault already
            pass
        return best


def _play(trial: Trial, steps: Iterable[Step]) -> Example:
    """One trial: takes steps one by one, up to the first fault or the end of the trial."""
    taken: list[Step] = []
    fault = None
    try:
        trial.begin()
        for rule, arguments in steps:
            taken.append((rule, arguments))
            rule.call(trial, **arguments)
        trial.finish()
    except AllocatorFault as found:
        fault = found
    return Example(taken, trial.script.lines, fault)
