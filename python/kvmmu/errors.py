"""Every error that kvmmu raises.

What lives here: the exception classes, with the numbers that decided as attributes. They
pickle (they cross process borders in serving stacks). What never lives here: the decision to
raise one. The binding raises them for the core; Python code raises them for itself.

Each error is raised before anything has changed, unless its docstring says otherwise.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CUDAUnavailable",
    "ConcurrentUse",
    "Fragmented",
    "InternalError",
    "InvalidBlock",
    "InvalidConfig",
    "InvalidLease",
    "InvalidMessage",
    "InvalidPlan",
    "InvalidRecording",
    "InvalidStep",
    "KVCacheError",
    "LimitExceeded",
    "MissingExtra",
    "NotReturnable",
    "OutOfBlocks",
    "OutOfTables",
    "RankFailed",
    "RankLost",
    "RankTimeout",
    "Reserved",
    "UnknownSequence",
    "UsedAfterFork",
]


def _rebuild(cls: type[KVCacheError], message: str, numbers: dict[str, Any]) -> KVCacheError:
    return cls(message, **numbers)


class KVCacheError(Exception):
    """Base of all errors of kvmmu.

    ``str(error)`` is the sentence for people. The keyword numbers that it names are attributes
    and, together, the dict ``error.numbers``.
    """

    def __init__(self, message: str, **numbers: Any) -> None:
        super().__init__(message)
        self.numbers = numbers

    def __getattr__(self, name: str) -> Any:
        numbers = self.__dict__.get("numbers", {})
        if name in numbers:
            return numbers[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), str(self), self.numbers)


class OutOfBlocks(KVCacheError, MemoryError):
    """Not enough available blocks. Numbers: ``needed``, ``available``, ``num_blocks`` (without
    those that are offline)."""


class Fragmented(OutOfBlocks):
    """Enough blocks are available, or held, in the wrong shape. Numbers: as OutOfBlocks, and
    ``largest_run`` (blocks). Where a sequence does not lie in the pages that tables need: also
    ``sequence``, ``group`` and ``page_order``; ``needed`` are then the blocks of that group, and
    ``largest_run`` those of them that are in place."""


class Reserved(OutOfBlocks):
    """Enough blocks are available, and fewer than the reserve for running sequences would be left.
    Numbers: as OutOfBlocks, and ``reserved``."""


class OutOfTables(KVCacheError, MemoryError):
    """The preallocated page-table nodes or sequence slots are used up. Numbers: ``capacity``."""


class UnknownSequence(KVCacheError, KeyError):
    """No open sequence has this id (it was closed, or never existed). Numbers: ``sequence``."""


class InvalidConfig(KVCacheError, ValueError):
    """A setting or an argument that is not allowed; the message says what is allowed."""


class LimitExceeded(KVCacheError, ValueError):
    """A sequence, a row or a batch would pass a fixed limit. Numbers: ``needed``, ``limit``."""


class InvalidBlock(KVCacheError, ValueError):
    """A block is not in a state that allows this (for instance released twice).
    Numbers: ``block``."""


class InvalidStep(KVCacheError, ValueError):
    """A step that is unknown, has ended, or is used out of order. Numbers: ``step``."""


class InvalidLease(KVCacheError, ValueError):
    """A lease that is unknown or has ended: each ends once. Numbers: ``lease``."""


class InvalidPlan(KVCacheError, ValueError):
    """A plan or a set of moves that cannot be begun, committed or read. Numbers: ``epoch``
    where there is one."""


class InvalidRecording(KVCacheError, ValueError):
    """A file of the flight recorder that is none, of another version, or damaged. Numbers:
    ``offset`` (bytes), and ``version`` where that is another."""


class InvalidMessage(KVCacheError, ValueError):
    """Bytes between ranks that are not a whole, unchanged message of this version. Numbers:
    ``given`` (bytes), and ``version`` and ``expected`` where the versions differ."""


class RankFailed(KVCacheError, RuntimeError):
    """A rank answered that it could not copy; all others have answered too. The moves are
    aborted, and every sequence has the blocks it had before. Numbers: ``rank`` (the first),
    ``epoch``, and ``failures`` (rank -> what it said)."""


class RankTimeout(KVCacheError, TimeoutError):
    """A rank has not answered in time. It may still be copying, so the moves stay begun and their
    destinations out of use until it answers or is forgotten; every sequence has the blocks it had
    before. Numbers: ``rank`` (the first), ``ranks`` (all that owe an answer), ``epoch``,
    ``seconds`` (the limit), ``failures`` (rank -> what others said)."""


class RankLost(RankTimeout):
    """The connection to a rank is gone. Numbers: as RankTimeout; ``ranks`` are all that may still
    be copying, which are none if nothing had reached the lost one."""


class ConcurrentUse(KVCacheError, RuntimeError):
    """Another thread is working on this sequence (or the same one is listed twice in a batch).
    Numbers: ``sequence``."""


class UsedAfterFork(KVCacheError, RuntimeError):
    """An object of before ``os.fork`` is used in the child. Nothing is touched there."""


class InternalError(KVCacheError, RuntimeError):
    """The core panicked: a fault of kvmmu. The object refuses all further work."""


class NotReturnable(KVCacheError, RuntimeError):
    """Memory that cannot go back to the system: shared, with a file behind it, locked, or no whole
    pages. Numbers: ``address``, ``bytes``, and ``at`` (the first address that is something else),
    ``errno`` (of the system) or ``page_bytes``."""


class MissingExtra(KVCacheError, ImportError):
    """Something optional is not installed. The message names the extra that brings it."""


class CUDAUnavailable(KVCacheError, RuntimeError):
    """CUDA cannot be used here: no driver, no device, or a CuPy that does not fit the driver. The
    message says what to install. Numbers, where they are known: ``driver`` (major, minor),
    ``devices``, ``cupy`` (package -> version), ``needed`` (major version)."""
