"""What carries moves out.

What lives here: movers, which copy whole blocks of a storage. What never lives here: a decision
about which block goes where, and any knowledge of sequences. A mover is handed pairs and copies.

``Mover`` is the one to use: it picks the executor for a storage and also takes begun moves, as a
value or as the bytes that came from the process that decides. ``CPUMover`` is the executor for
host memory, ``kvmmu.cuda.CUDAMover`` that for a CUDA device. ``SupportsMove`` is what the rest of
kvmmu asks of either.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from . import _core
from .bound import Bound
from .errors import InvalidConfig, InvalidPlan
from .pairs import Pairs, checked_pairs
from .storage import Storage

if TYPE_CHECKING:
    from .cuda.executor import CUDAMover
    from .cuda.streams import Streams

__all__ = ["CPUMover", "Mover", "SupportsMove"]


class SupportsMove(Protocol):
    """Copies blocks. :func:`kvmmu.compact` and :func:`kvmmu.run_plan` take any object with this
    method."""

    def move(self, pairs: Pairs) -> None:
        """Copies block ``pairs[i, 0]`` to block ``pairs[i, 1]`` for every i, over all regions.

        When it returns, whatever reads the destinations in the order of this mover (the host for
        a CPU mover, the stream for a device) sees the copies. If it raises, the destinations hold
        nothing of worth and every source is as it was.
        """
        ...


class CPUMover(Bound):
    """Copies in host memory, with the interpreter lock released.

    The default, and the reference that other movers are tested against. Nothing else may write
    the sources or touch the destinations during ``move``.

    Args:
        storage: the memory; kept alive.

    Raises:
        InvalidConfig: memory of a device. Numbers: ``device``.
    """

    def __init__(self, storage: Storage) -> None:
        if storage.device != "cpu":
            raise InvalidConfig(
                f"the storage is on {storage.device}; a CPUMover copies in host memory "
                "(kvmmu.Mover picks the right one)",
                device=storage.device,
            )
        self._storage = storage
        self._copied_bytes = 0

    @property
    def storage(self) -> Storage:
        """The memory that it moves blocks in."""
        return self._storage

    @property
    def copied_bytes(self) -> int:
        """Bytes copied so far (each counted once). Exact while one thread moves at a time."""
        return self._copied_bytes

    def move(self, pairs: Pairs) -> None:
        """Copies block ``pairs[i, 0]`` to block ``pairs[i, 1]`` in every region.

        Args:
            pairs: uint32 or int32 [m, 2]; destinations differ from each other and from every
                source. A source may occur several times.

        Raises:
            InvalidBlock: an id that is no usable block (the null block, for instance). Numbers:
                ``block``, ``num_blocks``, and ``index``, the row.
            InvalidPlan: a destination that occurs twice, or that is a source as well. Numbers:
                ``block``.
            InvalidConfig: another dtype or shape.
            Nothing has been copied then.
        """
        checked = checked_pairs(pairs, self._storage)
        if len(checked) == 0:
            return
        _core.copy_blocks(self._storage.region_table, checked, self._storage.span)
        self._copied_bytes += len(checked) * self._storage.block_bytes


class Mover(Bound):
    """Applies moves to a storage, in the process that decides or in one without an MMU.

    Args:
        storage: the memory; kept alive. Host memory is copied by :class:`CPUMover`, that of a CUDA
            device by :class:`kvmmu.cuda.CUDAMover`: there "done" means queued, in order with the
            stream that is current where ``apply`` is called, which has to be the one that the steps
            run in (``with torch.cuda.stream(...)``: it is another one in each thread).
        streams: of the CUDA device; None: torch's.

    One mover follows one MMU: ``apply`` takes epochs in rising order only. For the moves of
    another MMU (the process that decides was started again, for instance) make a new one.
    """

    def __init__(self, storage: Storage, *, streams: Streams | None = None) -> None:
        self._executor = executor_for(storage, streams)
        self._lock = threading.Lock()
        self._applied = 0
        self._last_epoch: int | None = None

    @property
    def storage(self) -> Storage:
        """The memory that it moves blocks in."""
        return self._executor.storage

    @property
    def copied_bytes(self) -> int:
        """Bytes copied so far (each counted once). Exact while one thread moves at a time."""
        return self._executor.copied_bytes

    @property
    def applied(self) -> int:
        """Calls of ``apply`` that copied all they were given."""
        return self._applied

    @property
    def last_epoch(self) -> int | None:
        """Epoch of the newest moves applied; None before the first."""
        return self._last_epoch

    def move(self, pairs: Pairs) -> None:
        """Copies block ``pairs[i, 0]`` to block ``pairs[i, 1]`` in every region: arguments and
        errors as :meth:`CPUMover.move`. For copy-on-write copies, which have no epoch."""
        self._executor.move(pairs)

    def apply(self, moves: _core.Moves | bytes, *, num_blocks: int | None = None) -> int:
        """Carries out moves that have begun.

        When it returns, the copies are done, or queued on a CUDA device, and the MMU may commit.

        Args:
            moves: from ``MMU.begin``, or their ``to_bytes()``.
            num_blocks: of the MMU that decided. The bytes do not say it, and ids that fit a
                larger pool pass every other check: give it where the storage is not of one making
                with the MMU.

        Returns:
            blocks copied.

        Raises:
            InvalidPlan: bytes that are not whole and unchanged; or an epoch that is not newer
                than ``last_epoch`` (``epoch``, ``last_epoch``): moves that were copied before
                would overwrite blocks that are in use by now.
            InvalidConfig: a storage with another number of blocks than ``num_blocks`` (numbers:
                ``num_blocks``, ``expected``), or moves of another type.
            InvalidBlock: as :meth:`CPUMover.move`.
            Nothing has been copied then, and the epoch still counts as not applied.
        """
        if isinstance(moves, bytes):
            moves = _core.Moves.from_bytes(moves)
        elif not isinstance(moves, _core.Moves):
            raise InvalidConfig(
                f"moves must be Moves or their bytes, not {type(moves).__name__}", argument="moves"
            )
        if num_blocks is not None and num_blocks != self.storage.num_blocks:
            raise InvalidConfig(
                f"the moves are those of a pool of {num_blocks} blocks, but this storage has "
                f"{self.storage.num_blocks}",
                num_blocks=self.storage.num_blocks,
                expected=num_blocks,
            )
        with self._lock:
            last = self._last_epoch
            if last is not None and moves.epoch <= last:
                raise InvalidPlan(
                    f"moves of epoch {moves.epoch} come after those of epoch {last}: copied again "
                    "they would overwrite blocks that are in use by now",
                    epoch=moves.epoch,
                    last_epoch=last,
                )
            self._executor.move(moves.pairs)
            self._last_epoch = moves.epoch
            self._applied += 1
        return len(moves)


def executor_for(storage: Storage, streams: Streams | None = None) -> CPUMover | CUDAMover:
    """What copies blocks of this storage.

    Args:
        streams: given, a :class:`kvmmu.cuda.CUDAMover` with these; None: as the storage's device
            asks for.
    """
    if storage.device == "cpu" and streams is None:
        return CPUMover(storage)
    from .cuda.executor import CUDAMover

    return CUDAMover(storage, streams=streams)
