"""Fewer and simpler steps that show the same kind of fault.

What lives here: which steps to leave out and which arguments to make simpler. What never lives
here: running them (see :mod:`.search`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .faults import AllocatorFault
from .rules import Rule

__all__ = ["Example", "Step", "shorten"]

Step = tuple[Rule, dict[str, Any]]
"""A rule and the arguments of its call."""


@dataclass(frozen=True, slots=True)
class Example:
    """What ran: the steps that were taken, the lines that came of them, and the fault, if any."""

    steps: list[Step]
    lines: list[str]
    fault: AllocatorFault | None

    def shows(self, fault: AllocatorFault | None) -> bool:
        """Whether it has a fault of this kind."""
        return self.fault is not None and type(self.fault) is type(fault)

    def length(self) -> tuple[int, int]:
        """What to keep small: lines, then steps."""
        return len(self.lines), len(self.steps)


def shorten(replay: Callable[[Sequence[Step]], Example], example: Example) -> Example:
    """The shortest example found with the same kind of fault: leaving out any one step, or giving
    any one argument a simpler value, does not show that any more, or only in more lines.

    Steps are left out in stretches that halve, after delta debugging (Zeller and Hildebrandt, IEEE
    TSE 28(2), 2002), from the last on: what came early is what the fault needs.

    Args:
        replay: takes steps on a new allocator; those that make no sense may be missing from what
            comes of it.
        example: what showed the fault.
    """
    found = _Shortest(replay, example)
    while found.with_fewer_steps() or found.with_simpler_arguments():
        pass
    return found.example


class _Shortest:
    """The shortest example so far."""

    def __init__(self, replay: Callable[[Sequence[Step]], Example], example: Example) -> None:
        self.replay, self.example = replay, example

    def with_fewer_steps(self) -> bool:
        """Leaves out what can be left out; whether anything could."""
        before = length = len(self.example.steps)
        while length:
            end = len(self.example.steps)
            while end > 0:
                start, steps = max(end - length, 0), self.example.steps
                self._takes([*steps[:start], *steps[end:]])
                end = min(start, len(self.example.steps))
            length //= 2
        return len(self.example.steps) < before

    def with_simpler_arguments(self) -> bool:
        """Takes the first simpler value of an argument that will do; whether there is one."""
        for i, (rule, arguments) in enumerate(self.example.steps):
            for name, values in rule.arguments.items():
                for value in values[: values.index(arguments[name])]:
                    steps = list(self.example.steps)
                    steps[i] = (rule, arguments | {name: value})
                    if self._takes(steps):
                        return True
        return False

    def _takes(self, steps: Sequence[Step]) -> bool:
        """Whether these steps show the fault as well, in no more lines."""
        other = self.replay(steps)
        shows = other.shows(self.example.fault) and len(other.lines) <= len(self.example.lines)
        if shows:
            self.example = other
        return shows
