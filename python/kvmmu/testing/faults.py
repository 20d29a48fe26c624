"""Every kind of fault that the kit reports.

What lives here: the classes, each an ``AssertionError`` that carries the calls which show it. What
never lives here: the checks (see :mod:`.model` and :mod:`.trial`).
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AllocatorFault",
    "BadMove",
    "ChangedByFailure",
    "Crashed",
    "DoubleHandOut",
    "ForeignRelease",
    "Invalid",
    "LostBlock",
    "LostContents",
    "LostMapping",
    "Overcommitted",
    "ReleasedTwice",
    "StaleCache",
    "UnknownBlock",
    "UsedAfterRelease",
    "WrongCount",
    "WrongReferences",
    "WrongStatistics",
]


class AllocatorFault(AssertionError):
    """Base of all kinds.

    Attributes:
        message: what is wrong, in one sentence.
        sequence: Python source, complete with imports, that ends in the failure.
    """

    def __init__(self, message: str, sequence: str) -> None:
        super().__init__(f"{message}\n\n{sequence}")
        self.message = message
        self.sequence = sequence

    def __reduce__(self) -> Any:
        return type(self), (self.message, self.sequence)


class DoubleHandOut(AllocatorFault):
    """A block was handed out while somebody held it, or twice in one call."""


class UnknownBlock(AllocatorFault):
    """What was handed out is no block of this pool, or no list of blocks at all."""


class WrongCount(AllocatorFault):
    """A call handed out more or fewer blocks than it was asked for."""


class Overcommitted(AllocatorFault):
    """More blocks were asked for than were free, and the call did not refuse."""


class LostBlock(AllocatorFault):
    """A call was refused although enough blocks were free: a leak."""


class ChangedByFailure(AllocatorFault):
    """A call raised and changed something all the same."""


class ReleasedTwice(AllocatorFault):
    """A release of more references than there were was accepted."""


class ForeignRelease(AllocatorFault):
    """A release of something that was never handed out was accepted."""


class UsedAfterRelease(AllocatorFault):
    """A call that shares or extends what was released was accepted."""


class WrongStatistics(AllocatorFault):
    """A count is wrong, although the blocks are all there."""


class WrongReferences(AllocatorFault):
    """A block has more or fewer references than claims hold it."""


class LostMapping(AllocatorFault):
    """A claim shows other blocks than it should: the table of a sequence, or a list of ids that is
    its caller's and was changed."""


class LostContents(AllocatorFault):
    """A block that somebody holds was overwritten."""


class BadMove(AllocatorFault):
    """A move or copy to a block that is somebody's, or to or from no block at all."""


class StaleCache(AllocatorFault):
    """A prompt was given cached blocks that do not hold its contents."""


class Invalid(AllocatorFault):
    """The allocator's own ``validate`` raised."""


class Crashed(AllocatorFault):
    """A call that should have worked, or refused, raised something else."""
