"""The torch-facing KV cache: an MMU, the memory of the blocks, and a mover.

What lives here: :class:`KVCache`, the handles :class:`Sequence`, :class:`Step` and
:class:`Batch`. What never lives here: which block goes where (the MMU decides), how a layout lays
out bytes (:mod:`.layout`), how attention is computed (:mod:`.attention`).

The life of a step::

    with cache.step() as step:
        batch = step.prepare(sequences, new_tokens=...)
        cache.write(layer, k, v, batch)        # or the engine's own kernel, on cache.layer(i)
    # left normally: written and ended; by an exception: lengths roll back, nothing is published

or, with several in flight: ``step = cache.begin_step()``, ``step.prepare(...)``,
``step.written()`` once its work is queued, ``cache.end_step(step, event)``.

On a CUDA device all that is queued goes into the stream that is current then, and a step ends when
the device has done it: without an event of the caller's, the cache records one.
"""

from __future__ import annotations

import logging
import operator
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Listed
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from .errors import InvalidConfig, InvalidStep, KVCacheError, MissingExtra, Reserved

try:
    import torch
except ImportError as error:  # pragma: no cover - tested in an environment without torch
    raise MissingExtra(
        "kvmmu.KVCache needs torch: pip install 'kvmmu[torch]' (kvmmu.MMU works without)"
    ) from error

from ._core import MMU, BlockTables
from .admission import Admission, admission
from .bound import Bound
from .buffers import Buffers, Csr, Entries, Rotation
from .compaction import run_plan
from .give_back import GivenBack, HostPages, ReturnsMemory, Shrunk, grow, shrink
from .layout import Layer, Layers
from .leases import Lease, LeaseBook
from .movers import CPUMover
from .pace import Pace
from .preheat import Preheated, preheat, touch_host
from .snapshots import Snapshot, snapshot
from .storage import Storage
from .transfer import block_runs, byte_ranges

if TYPE_CHECKING:
    from ._core import Moves, Plan
    from .cuda.executor import Copying, CUDAMover
    from .cuda.side import DeviceSide
    from .cuda.streams import Streams

__all__ = ["Batch", "Event", "KVCache", "Sequence", "Step"]

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
_log = logging.getLogger("kvmmu")
_DEVICE_BUDGET_US = 200.0
_DEVICE_BYTES_PER_US = 1e6
"""1 TB/s: what a copy on a device is taken to do before anybody has watched one."""
_NO_COPIES: Int32s = np.empty((0, 2), dtype=np.int32)


class Event(Protocol):
    """What says that the device has finished a step: ``torch.cuda.Event``, for instance."""

    def query(self) -> bool:
        """Whether it has."""

    def synchronize(self) -> None:
        """Waits until it has."""


def _int32(name: str, values: Any) -> Int32s:
    """Tokens or lengths as int32 [n]: arrays and tensors of int32 as they are, lists converted."""
    if isinstance(values, torch.Tensor):
        if values.device.type != "cpu" or values.dtype != torch.int32:
            raise InvalidConfig(
                f"{name} is {values.dtype} on {values.device}: allowed is int32 on the CPU"
            )
        values = values.numpy()
    if isinstance(values, np.ndarray):
        if values.dtype != np.int32 or values.ndim != 1:
            raise InvalidConfig(
                f"{name} is {values.dtype} {list(values.shape)}: allowed is int32, one dimension"
            )
        return np.ascontiguousarray(values)
    try:
        wide = np.array([operator.index(value) for value in values], dtype=np.int64)
    except (TypeError, OverflowError) as error:
        raise InvalidConfig(f"{name}: allowed are whole numbers of 32 bits ({error})") from None
    found = wide.astype(np.int32)
    if (found != wide).any():  # NumPy 1 would cut them in silence
        raise InvalidConfig(f"{name}: {int(wide[found != wide][0])} is more than 32 bits")
    return found


def _index(name: str, value: Any, count: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise InvalidConfig(f"{name} = {value!r}: allowed is 0 to {count - 1}")
    return value


class Sequence(Bound):
    """A handle on one sequence. Close it, or use it as a context manager.

    One that is dropped without :meth:`close` gives a ResourceWarning and is closed when the next
    step begins.
    """

    __slots__ = ("__weakref__", "_cache", "_open", "id")

    def __init__(self, cache: KVCache, number: int) -> None:
        self._cache = cache
        self._open = True
        self.id = number

    # -- numbers -----------------------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        """Tokens that have a place."""
        return self._cache.mmu.info(self.id).num_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Tokens found in the prefix index when it was opened."""
        return self._cache.mmu.info(self.id).num_cached_tokens

    @property
    def num_scheduled(self) -> int:
        """Tokens handed to a step, or cached."""
        return self._cache.mmu.info(self.id).num_scheduled

    @property
    def num_written(self) -> int:
        """Tokens whose KV is known to be written."""
        return self._cache.mmu.info(self.id).num_written

    @property
    def num_released_tokens(self) -> int:
        """Tokens in front whose blocks were released."""
        return self._cache.mmu.info(self.id).num_released * self._cache.mmu.block_size

    @property
    def pages(self) -> dict[int, int]:
        """Pages that it maps, by order (2**order blocks)."""
        return self._cache.mmu.info(self.id).pages

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return not self._open

    def block_table(self) -> Int32s:
        """int32 [n]: its physical blocks now, in order; the null block for those released from its
        front. A compaction changes them."""
        return self._cache.mmu.block_table(self.id)

    def runs(self) -> list[tuple[int, int]]:
        """Its physical blocks now, as (first block, count) of each run of consecutive ones; without
        those released from its front."""
        return block_runs(self.block_table()[self._cache.mmu.info(self.id).num_released :])

    def byte_ranges(self) -> list[Int64s]:
        """For each region of the storage, int64 [k, 2]: (address, bytes) of the runs. Take a lease
        first: without one the blocks may move."""
        return byte_ranges(self._cache.storage, self.runs())

    # -- verbs -------------------------------------------------------------------------------

    def append(self, tokens: Any, *, defer_copies: bool = False) -> Int32s:
        """Extends it by known tokens, which a later step schedules and writes.

        Returns:
            int32 [c, 2], copy-on-write pairs still to be run before the next step or move: all
            with ``defer_copies`` (they read what steps that are still being computed write), else
            none, for they were run.
        """
        self._cache._pay()
        copies = self._cache.mmu.append(self.id, _int32("tokens", tokens))
        if defer_copies:
            return copies
        self._cache._run_copies(copies)
        return copies[:0]

    def fork(self) -> Sequence:
        """A second sequence over the same blocks; copies nothing. Whoever writes a shared block
        first gets a copy of it."""
        return Sequence(self._cache, self._cache.mmu.fork(self.id))

    def truncate(self, num_tokens: int) -> None:
        """Shortens it, and releases the blocks behind."""
        self._cache._pay()
        self._cache.mmu.truncate(self.id, num_tokens)

    def release_before(self, token: int) -> int:
        """Releases the blocks that lie wholly in front of a token, for attention that looks back
        only so far; returns how many. As far as tokens are settled: see ``MMU.release_before``."""
        self._cache._pay()
        return self._cache.mmu.release_before(self.id, token)

    def lease(
        self, tokens: range | slice | None = None, *, timeout_s: float | None = None
    ) -> Lease:
        """Holds its blocks for a transfer until ``lease.done()``.

        Args:
            tokens: which (step 1); None: all that were not released.
            timeout_s: after so long the lease is reported (``cache.overdue_leases()``, and a log
                warning); it is kept all the same.
        """
        length = self.num_tokens
        if tokens is None:
            tokens = range(self.num_released_tokens, length)
        start, stop, step = (
            (tokens.start, tokens.stop, tokens.step)
            if isinstance(tokens, range)
            else tokens.indices(length)
        )
        if step != 1:
            raise InvalidConfig(f"tokens = {tokens}: allowed is a step of 1")
        return self._cache._leases.take(self.id, start, max(start, stop), timeout_s)

    def close(self) -> None:
        """Ends it. Its full, written blocks stay cached for other prompts. Again: nothing."""
        if self._open:
            self._cache._pay()
            self._cache.mmu.close(self.id)
            self._open = False

    def __enter__(self) -> Sequence:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            self._cache._dropped.append(self.id)
            warnings.warn(f"{self!r} was dropped without close()", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        return f"Sequence({self.id}{'' if self._open else ', closed'})"


class _Life:
    """What a step and its batch both know."""

    __slots__ = ("cancelled", "ended", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.cancelled = False
        self.ended = False


class Batch(Bound):
    """What a step computes, and the tables that its kernels read.

    All are views of registered memory. In host memory a set is rewritten when its turn comes again
    (see ``steps_in_flight``); on a device there is one set, at addresses that never change, and the
    next ``prepare`` queues its rewriting behind this step.

    Attributes:
        sequences: int64 [B], ids.
        block_table: int32 [B, W], physical blocks (or kernel blocks, or pages, as the cache was
            made), the null entry behind each row's.
        seq_lens: int32 [B], tokens of each row including this step's.
        query_start_loc: int32 [B + 1], where each row's tokens begin.
        slot_mapping: int64 [T], block * block_size + offset of each token of the step.
        copies: int32 [c, 2], copy-on-write pairs that have not been run (see
            ``prepare(defer_copies=True)``).
    """

    __slots__ = (
        "_buffers",
        "_cache",
        "_life",
        "block_table",
        "copies",
        "query_start_loc",
        "seq_lens",
        "sequences",
        "slot_mapping",
    )

    def __init__(
        self, cache: KVCache, life: _Life, buffers: Buffers, sequences: Int64s, copies: Int32s
    ) -> None:
        rows, tokens = len(sequences), buffers.tables.num_tokens
        self._cache = cache
        self._life = life
        self._buffers = buffers
        self.sequences = sequences
        self.copies = copies
        tables = buffers if cache._device is None else cache._device.tables
        self.block_table = tables.block_table[:rows]
        self.seq_lens = tables.seq_lens[:rows]
        self.query_start_loc = tables.query_start_loc[: rows + 1]
        self.slot_mapping = tables.slot_mapping[:tokens]

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return int(self.slot_mapping.shape[0])

    def _check_live(self) -> None:
        """Its slots are this step's only until the step is cancelled or ends."""
        life = self._life
        if life.cancelled or life.ended or self._buffers.step != life.number:
            raise InvalidStep(
                f"step {life.number}: is over, and its slots may be somebody else's",
                step=life.number,
            )
        cache = self._cache
        if cache._device is not None and cache._tables_hold != life.number:
            raise InvalidStep(
                f"step {life.number}: the tables on the device are no longer its own, but those of "
                f"step {cache._tables_hold}",
                step=life.number,
            )

    def run_copies(self) -> None:
        """Runs the deferred copies, once."""
        copies, self.copies = self.copies, self.copies[:0]
        self._cache._run_copies(copies)

    @property
    def tables(self) -> BlockTables:
        """What the MMU has written for it, in host memory, while the step lasts: for
        :func:`kvmmu.prefix_groups`."""
        self._check_live()
        return self._buffers.tables

    def csr(self) -> Csr:
        """The rows in FlashInfer's form: ``indptr``, ``indices``, ``last_page_len``."""
        device = self._cache._device
        if device is None:
            return self._buffers.csr()
        self._cache._check_process()
        with self._cache._copying:
            self._check_live()  # the device's tables are those of the newest step
            return device.tables.update_csr(self._buffers)

    def __len__(self) -> int:
        return len(self.sequences)


class Step(Bound):
    """One step. See the module for its life."""

    __slots__ = ("__weakref__", "_cache", "_life", "_settled", "batch", "number")

    def __init__(self, cache: KVCache, number: int) -> None:
        self._cache = cache
        self._settled = False
        self._life = _Life(number)
        self.number = number
        self.batch: Batch | None = None

    def prepare(
        self,
        sequences: Iterable[Sequence] | Int64s,
        *,
        query_lens: Any = None,
        query_start_loc: Any = None,
        new_tokens: Any = None,
        defer_copies: bool = False,
    ) -> Batch:
        """Schedules the next tokens of each sequence, and fills the tables. All or nothing; once
        a step.

        Args:
            sequences: handles, or int64 [B] ids (no Python object is touched per row then).
            query_lens: int32 [B], tokens of each row (default: 1 each), or
            query_start_loc: int32 [B + 1], the same as running sums from 0.
            new_tokens: int32 [n], values of the tokens past each sequence's end, in row order, or
                None where they are not known yet (such blocks are never shared).
            defer_copies: leave copy-on-write pairs in ``batch.copies`` for the engine to queue
                behind the steps that are still being computed, instead of running them now.

        Raises:
            OutOfBlocks, LimitExceeded, UnknownSequence, ConcurrentUse, InvalidStep, InvalidConfig.
        """
        cache = self._cache
        if self.batch is not None:
            raise InvalidStep(f"step {self.number}: is prepared already", step=self.number)
        ids = _ids(cache, sequences)
        if query_start_loc is not None:
            if query_lens is not None:
                raise InvalidConfig("query_lens and query_start_loc: allowed is one of them")
            starts = _int32("query_start_loc", query_start_loc)
            if len(starts) != len(ids) + 1 or starts[0] != 0:
                raise InvalidConfig(
                    f"query_start_loc has {len(starts)} entries from "
                    f"{starts[0] if len(starts) else None}: allowed are {len(ids) + 1}, from 0"
                )
            query_lens = np.diff(starts)
        lens = None if query_lens is None else _int32("query_lens", query_lens)
        new = None if new_tokens is None else _int32("new_tokens", new_tokens)
        cache._claim_tables(self.number)
        try:
            cache._finish_moves()
            cache._pay()
            buffers = cache._take_buffers(self.number)
            try:
                copies = cache.mmu.prepare(
                    self.number, ids, buffers.tables, query_lens=lens, new_tokens=new
                )
            except BaseException:
                cache._return_buffers(buffers)
                raise
            self.batch = Batch(cache, self._life, buffers, ids, copies)
            cache._send_tables(self.number, buffers)
        except BaseException:
            cache._free_tables(self.number)
            raise
        if not defer_copies:
            self.batch.run_copies()
            if cache.auto_compact and cache._overlap:
                cache._start_moves()
        return self.batch

    def written(self) -> None:
        """All that the step scheduled is written, or queued ahead of whatever reads it."""
        self._check_unsettled()
        # First: what is published may be read in another stream at once.
        self._cache._mark(self.number)
        self._cache.mmu.written(self.number)
        self._settled = True
        self._cache._free_tables(self.number)

    def cancel(self) -> None:
        """Takes the step back: lengths as before, nothing published.

        Raises:
            InvalidStep: it is settled, or sequences have gone on since: cancel newer steps first,
                and truncate what was appended behind. It stays in flight then.
        """
        self._check_unsettled()
        self._cache._mark(self.number)  # some of its work may be queued
        self._cache.mmu.cancel(self.number)
        self._settled = self._life.cancelled = True
        self._cache._free_tables(self.number)
        if self.batch is not None:
            self.batch.run_copies()  # what was copied on write stays where it is now

    def _check_unsettled(self) -> None:
        if self._settled:
            what = "cancelled" if self._life.cancelled else "written"
            raise InvalidStep(f"step {self.number}: is {what} already", step=self.number)

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._settled:
            if error is None:
                self.written()
            else:
                try:
                    self.cancel()
                except Exception as failed:  # the caller's exception is the one that matters
                    error.add_note(f"{self!r} was not taken back cleanly: {failed}")
        if self._settled and not self._life.ended:  # with an event, perhaps, that is not over
            self._cache.end_step(self)

    def __del__(self) -> None:
        life = getattr(self, "_life", None)
        if life is not None and not life.ended:
            if self.batch is None or self._settled:
                self._cache._dropped_steps.append(self.number)
            else:
                _log.warning("%r was dropped unsettled: what it fences stays fenced", self)
                if self._cache._tables_of == self.number:  # no lock: this may run in any call
                    self._cache._tables_of = None

    def __repr__(self) -> str:
        return f"Step({self.number})"


def _ids(cache: KVCache, sequences: Iterable[Sequence] | Int64s) -> Int64s:
    if isinstance(sequences, np.ndarray):
        return sequences
    ids = []
    for sequence in sequences:
        if not isinstance(sequence, Sequence) or sequence._cache is not cache:
            raise InvalidConfig(
                f"sequences holds {sequence!r}: allowed are handles of this cache, or an int64 "
                "array of their ids"
            )
        ids.append(sequence.id)
    return np.array(ids, dtype=np.int64)


class KVCache(Bound):
    """A KV cache over torch tensors.

    ``KVCache(...)`` allocates, :meth:`attach` adopts an engine's tensors.

    Args:
        num_layers, num_kv_heads, head_dim: shape of the model's KV.
        dtype: torch dtype of the KV.
        num_blocks: usable blocks; one more is allocated as the null block.
        block_size: tokens a block.
        v_head_dim: width of V where it differs from K's; 0: there is no V.
        layout: see ``kvmmu.layout.LAYOUTS`` and docs/layouts.md.
        device: ``"cpu"``, or a CUDA device (``kvmmu[cuda12]`` or ``[cuda13]``): then the tables of
            a batch are on it too, and all work is queued in the stream that is current.
        max_batch: rows of the tables. max_tokens: tokens of one step.
        max_sequence_tokens: longest sequence; default: the whole pool.
        steps_in_flight: steps that may be in flight at once; there are as many sets of tables and
            one more.
        kernel_block_size, page_order: what the entries of ``block_table`` name where the kernel's
            blocks are smaller or larger than ours (at most one of them; see
            ``MMU.register_tables`` and :meth:`Layers.paged`). Pages need ``null_block="first"``.
        buffers: own sets of tables (mappings of ``block_table``, ``seq_lens``, ``slot_mapping``,
            ``query_start_loc``, NumPy or CPU torch), ``steps_in_flight + 1`` of them, none of
            which overlap. Only kvmmu writes them: rows that have not changed are not written again.
        auto_compact: compact when a step begins and none is in flight, under the budget. (What a
            step in flight still writes must not be copied before; see :meth:`compact`.) On a CUDA
            device also with steps in flight, since copies are queued behind them.
        copy: ``"between_steps"``, or on a CUDA device ``"overlap"``: blocks are copied beside the
            step that is prepared, and the tables change before the next one.
        budget_us: most microseconds that the copies of one pass take, by a rate that learns from
            each copy in host memory. None: no limit there; 200 on a CUDA device, where a block is
            taken to cost its bytes at 1 TB/s (``cache.pace.watched`` tells it better).
        budget_bytes: most bytes that one pass moves; None: no limit. A pass moves at least one
            block.
        streams: of the CUDA device (``kvmmu.cuda.Streams``); None: torch's.
        return_memory: whether the memory of blocks that :meth:`shrink` takes offline goes back to
            the system (default: host memory does); or an object that takes it
            (:class:`kvmmu.ReturnsMemory`), which on a CUDA device is the only way.
        reserved_blocks: headroom for running sequences, 0 to below ``num_blocks``: :meth:`open`
            raises Reserved where fewer would be left available, unless no block is in use.
        options: further arguments of :class:`kvmmu.MMU` (``prefix_caching``, ``placement``,
            ``page_orders``, ``hold_blocks``, ``eviction``, ``budget_blocks``, ``max_sequences``,
            ``compaction_start``, ...).

    Raises:
        InvalidConfig: names the argument and what is allowed.

    A block that is handed out again still holds what its last owner wrote in the places that its
    new owner has not written: mask by ``seq_lens``, as kernels do.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        num_blocks: int,
        *,
        block_size: int = 16,
        v_head_dim: int | None = None,
        layout: str = "NHD",
        device: str | torch.device = "cpu",
        max_batch: int = 256,
        max_tokens: int = 8192,
        max_sequence_tokens: int | None = None,
        steps_in_flight: int = 1,
        kernel_block_size: int | None = None,
        page_order: int | None = None,
        buffers: Listed[Mapping[str, Any]] | None = None,
        auto_compact: bool = False,
        copy: str = "between_steps",
        budget_us: float | None = None,
        budget_bytes: int | None = None,
        streams: Streams | None = None,
        return_memory: bool | ReturnsMemory | None = None,
        reserved_blocks: int = 0,
        **options: Any,
    ) -> None:
        mmu = _mmu(num_blocks, block_size, max_sequence_tokens, options)
        self.reserved_blocks = _reserved(reserved_blocks, mmu)
        layers = Layers.allocate(
            layout,
            num_layers=num_layers,
            num_blocks=mmu.num_blocks + 1,
            block_size=mmu.block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            dtype=dtype,
            device=device,
        )
        shape = (max_batch, max_tokens, steps_in_flight)
        entries = Entries(kernel_block_size, page_order)
        budget = (budget_us, budget_bytes)
        self._assemble(mmu, layers, *shape, entries, buffers, auto_compact, copy, budget, streams)
        if return_memory is None:
            return_memory = self._device is None
        self._given = GivenBack(self.storage, _owner(return_memory, self.storage.device))

    @classmethod
    def attach(
        cls,
        tensors: Any,
        *,
        layout: str,
        num_blocks: int,
        block_size: int = 16,
        null_block: str | int = "last",
        max_batch: int = 256,
        max_tokens: int = 8192,
        max_sequence_tokens: int | None = None,
        steps_in_flight: int = 1,
        kernel_block_size: int | None = None,
        page_order: int | None = None,
        buffers: Listed[Mapping[str, Any]] | None = None,
        auto_compact: bool = False,
        copy: str = "between_steps",
        budget_us: float | None = None,
        budget_bytes: int | None = None,
        streams: Streams | None = None,
        return_memory: bool | ReturnsMemory = False,
        reserved_blocks: int = 0,
        extra: Iterable[torch.Tensor] = (),
        **options: Any,
    ) -> KVCache:
        """Adopts an engine's own tensors; nothing is copied or zeroed.

        Args:
            tensors: one entry a layer: ``(k, v)``, ``k`` alone, or one packed tensor; see
                ``Layers.adopt``. Each has ``num_blocks + 1`` blocks.
            num_blocks: usable blocks: those of the tensors less the null block.
            null_block: which block padding points at: ``"last"``, ``"first"`` or its number.
            return_memory: as for :class:`KVCache`; by default the engine's memory stays what it is.
                True only where nobody else relies on what blocks that are offline hold, and no
                device was told of their pages.
            extra: what else belongs to a block and moves with it, ``[num_blocks + 1, ...]``: scales
                of a quantised cache, indexer keys, a draft model's KV.

        Other arguments as for :class:`KVCache`.
        """
        options["null_block"] = null_block
        mmu = _mmu(num_blocks, block_size, max_sequence_tokens, options)
        layers = Layers.adopt(
            tensors,
            layout=layout,
            block_size=mmu.block_size,
            num_blocks=mmu.num_blocks + 1,
            extra=extra,
        )
        self = cls.__new__(cls)
        self.reserved_blocks = _reserved(reserved_blocks, mmu)
        shape = (max_batch, max_tokens, steps_in_flight)
        entries = Entries(kernel_block_size, page_order)
        budget = (budget_us, budget_bytes)
        self._assemble(mmu, layers, *shape, entries, buffers, auto_compact, copy, budget, streams)
        self._given = GivenBack(self.storage, _owner(return_memory, self.storage.device))
        return self

    def _assemble(
        self,
        mmu: MMU,
        layers: Layers,
        max_batch: int,
        max_tokens: int,
        steps_in_flight: int,
        entries: Entries,
        buffers: Listed[Mapping[str, Any]] | None,
        auto_compact: bool,
        copy: str,
        budget: tuple[float | None, int | None],
        streams: Streams | None,
    ) -> None:
        for name, value in (
            ("max_batch", max_batch),
            ("max_tokens", max_tokens),
            ("steps_in_flight", steps_in_flight),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidConfig(f"{name} = {value!r}: allowed is a whole number from 1")
        if not isinstance(auto_compact, bool):
            raise InvalidConfig(f"auto_compact = {auto_compact!r}: allowed is True or False")
        on_device = layers.storage.device != "cpu" or streams is not None
        if copy not in ("between_steps", "overlap") or (copy == "overlap" and not on_device):
            raise InvalidConfig(
                f"copy = {copy!r}: allowed are 'between_steps' and, on a CUDA device, 'overlap'"
            )
        tokens = entries.tokens(mmu)
        if tokens != mmu.block_size and not layers.can["paged"]:
            raise InvalidConfig(
                f"entries of {tokens} tokens (kernel_block_size = {entries.kernel_block_size}, "
                f"page_order = {entries.page_order}): this layout can be read in blocks of "
                f"{mmu.block_size} only"
            )
        width = -(-mmu.max_blocks_per_sequence * mmu.block_size // tokens)
        self.mmu = mmu
        self.layers = layers
        self.storage = Storage(layers.storage.regions, mmu.num_blocks, null_block=mmu.null_block)
        self.auto_compact = auto_compact
        per_block = self.storage.block_bytes
        budget_us = _DEVICE_BUDGET_US if on_device and budget[0] is None else budget[0]
        self.pace = Pace(
            per_block,
            budget_us=budget_us,
            budget_bytes=budget[1],
            us_per_block=per_block / _DEVICE_BYTES_PER_US if on_device else None,
        )
        shape = (max_batch, width, max_tokens)
        self._rotation = Rotation(mmu, buffers, steps_in_flight, shape, entries)
        self._depth = steps_in_flight
        self._device: DeviceSide | None = None
        self.mover: CPUMover | CUDAMover
        if on_device:
            from .cuda.side import DeviceSide

            first = next(iter(self._rotation))
            place = (self.storage, layers, streams)
            self._device = DeviceSide(*place, shape, steps_in_flight, first)
            self.mover = self._device.mover
        else:
            self.mover = CPUMover(self.storage)
        self._overlap = copy == "overlap"
        self._moving: tuple[Moves, Copying] | None = None
        self._tables_of: int | None = None
        self._tables_hold: int | None = None  # the newest step, if all of its tables were sent
        self._leases = LeaseBook(mmu)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._copying = threading.Lock()
        self._giving = threading.Lock()
        self._admitting = threading.Lock()
        self.preheated: Preheated | None = None
        self._owed: deque[Int32s] = deque()
        self._in_flight: set[int] = set()
        self._ending: deque[tuple[int, Event]] = deque()
        self._own_events: set[int] = set()
        self._dropped: deque[int] = deque()
        self._dropped_steps: deque[int] = deque()

    # -- sequences ---------------------------------------------------------------------------

    def open(
        self,
        tokens: Any,
        *,
        salt: bytes | None = None,
        extra_keys: Mapping[int, bytes] | None = None,
        anchor: bool = False,
        page_orders: Listed[int] | None = None,
        require: str | None = None,
        contiguous: int = 0,
    ) -> Sequence:
        """Opens a sequence for a prompt and claims all of its blocks, or raises and changes
        nothing. ``sequence.num_cached_tokens`` of them are found cached.

        Args:
            tokens: int32 [n] (tensor, array or list).
            salt, extra_keys, anchor, page_orders, require, contiguous: as for ``MMU.open``.

        Raises:
            OutOfBlocks, Reserved (an OutOfBlocks: the reserve for running sequences would be
            touched), Fragmented, OutOfTables, LimitExceeded, InvalidConfig.
        """
        self._pay()
        self._drain()
        prompt = _int32("tokens", tokens)
        asked: dict[str, Any] = {
            "salt": salt,
            "extra_keys": extra_keys,
            "page_orders": page_orders,
            "require": require,
            "contiguous": contiguous,
        }
        if not self.reserved_blocks:
            return Sequence(self, self.mmu.open(prompt, anchor=anchor, **asked))
        self._check_process()
        with self._admitting:  # two that come at once must not both count the same blocks
            self._check_reserve(prompt, asked)
            return Sequence(self, self.mmu.open(prompt, anchor=anchor, **asked))

    def quote(
        self,
        tokens: Any,
        *,
        salt: bytes | None = None,
        extra_keys: Mapping[int, bytes] | None = None,
        page_orders: Listed[int] | None = None,
        require: str | None = None,
        contiguous: int = 0,
    ) -> Admission:
        """Says whether :meth:`open` with these arguments would succeed, as ``MMU.quote`` does and
        with the reserve counted: what would touch it waits until others have released enough."""
        quote = self.mmu.quote(
            _int32("tokens", tokens),
            salt=salt,
            extra_keys=extra_keys,
            page_orders=page_orders,
            require=require,
            contiguous=contiguous,
        )
        return admission(quote, self.mmu.states()["in_use"], self.reserved_blocks)

    def _check_reserve(self, prompt: Int32s, asked: dict[str, Any]) -> None:
        states, reserved = self.mmu.states(), self.reserved_blocks
        blocks = -(-len(prompt) // self.mmu.block_size)
        if not states["in_use"] or blocks + reserved <= states["available"]:
            return
        quote = self.mmu.quote(prompt, **asked)  # looks for cached blocks, which takes time
        if quote.needed <= quote.available < quote.needed + reserved:
            raise Reserved(
                f"need {quote.needed} blocks beside a reserve of {reserved} for running "
                f"sequences, available {quote.available} of {self.mmu.num_blocks}",
                needed=quote.needed,
                available=quote.available,
                num_blocks=self.mmu.num_blocks,
                reserved=reserved,
            )

    # -- steps -------------------------------------------------------------------------------

    def step(self) -> Step:
        """A step as a context manager: written and ended when left, cancelled by an exception."""
        return self.begin_step()

    def begin_step(self) -> Step:
        """Begins a step. Between steps is when sequences that were dropped are closed, steps
        whose events are over end, and (with ``auto_compact``) blocks move.

        On a CUDA device it waits while ``steps_in_flight`` steps that ended without an event of the
        caller's are still being computed.
        """
        self.poll()
        self._wait_for_room()
        if self._overlap:
            self._finish_moves()  # others begin once the step is prepared
        elif self.auto_compact and (self._device is not None or not self._in_flight):
            self.compact()
        number = self.mmu.begin_step()
        with self._lock:
            self._in_flight.add(number)
        return Step(self, number)

    def end_step(self, step: Step, event: Event | None = None) -> None:
        """The step is over: now, or (with ``event``) when the event is, as :meth:`poll` finds. On a
        CUDA device "now" is an event too: that of the stream that is current.

        A step that was neither written nor cancelled counts as written. Once a step.

        On a CUDA device, what the step queued after :meth:`Step.written` is to be in the stream
        that is current here: other streams come behind that too.
        """
        if event is not None and not (
            callable(getattr(event, "query", None))
            and callable(getattr(event, "synchronize", None))
        ):
            raise InvalidConfig(f"event = {event!r}: allowed is what has query and synchronize")
        if step._cache is not self:
            raise InvalidStep(f"step {step.number}: is of another cache", step=step.number)
        if step._life.ended:
            why = "has ended, or waits for its event"
            raise InvalidStep(f"step {step.number}: {why}", step=step.number)
        if not step._settled:
            step.written()
        if event is None:
            self._end_now(step.number)
        else:
            self._mark(step.number)
            with self._lock:
                self._ending.append((step.number, event))
        step._life.ended = True

    def end_without_event(self, step: Step) -> None:
        """Ends a step whose event will never be over. Only right when the device is known to be
        done with it, or gone."""
        with self._lock:
            waiting = [entry for entry in self._ending if entry[0] == step.number]
            if step._cache is not self or not waiting:
                raise InvalidStep(f"step {step.number}: waits for no event", step=step.number)
            self._ending.remove(waiting[0])
        self._end(step.number)

    def poll(self) -> int:
        """Ends the steps whose events are over, oldest first, closes sequences that were dropped,
        and reports leases past their timeout. Returns how many steps are in flight."""
        self._check_process()
        while True:
            with self._lock:
                head = self._ending[0] if self._ending else None
            if head is None or not head[1].query():
                break
            self._pass(head)
        self._drain()
        if len(self._leases):
            self._leases.overdue()
        return len(self._in_flight)

    def synchronize(self) -> None:
        """Waits for the events of all steps that have one, and ends those steps."""
        self._check_process()
        while True:
            with self._lock:
                if not self._ending:
                    return
                head = self._ending[0]
            head[1].synchronize()  # if it raises, the step stays in flight
            self._pass(head)

    def _end_now(self, number: int) -> None:
        """Ends a step, or on a device has it end when what is queued by now is done."""
        if self._device is None:
            self._end(number)
            return
        event = self._mark(number)
        with self._lock:
            self._ending.append((number, event))
            self._own_events.add(number)

    def _wait_for_room(self) -> None:
        """Ends the oldest steps while too many are in flight, if their events are the cache's."""
        while True:
            with self._lock:
                head = self._ending[0] if self._ending else None
                if (
                    head is None
                    or head[0] not in self._own_events
                    or len(self._in_flight) < self._depth
                ):
                    return
            head[1].synchronize()
            self._pass(head)

    def _pass(self, head: tuple[int, Event]) -> None:
        """Ends the step whose event is over, unless another thread has."""
        with self._lock:
            if not self._ending or self._ending[0] is not head:
                return
            self._ending.popleft()
        self._end(head[0])

    def _end(self, number: int) -> None:
        self._check_process()
        self.mmu.end_step(number)
        with self._lock:
            self._in_flight.discard(number)
            self._own_events.discard(number)
            if self._device is not None:
                self._device.forget(number)

    def _take_buffers(self, number: int) -> Buffers:
        self._check_process()
        with self._lock:
            return self._rotation.take(number, self._in_flight)

    def _return_buffers(self, buffers: Buffers) -> None:
        with self._lock:
            self._rotation.give_back(buffers)

    def _drain(self) -> None:
        while self._dropped_steps:
            self._end_now(self._dropped_steps.popleft())
        while self._dropped:
            try:
                self.mmu.close(self._dropped.popleft())
            except KVCacheError:  # closed by its id meanwhile
                continue

    def _run_copies(self, copies: Int32s) -> None:
        """Runs copies on write, behind those that a mover has failed at before: they are owed until
        they are made, since their destinations are mapped already."""
        self._check_process()
        with self._copying:
            if len(copies):
                self._owed.append(copies)
            self._follow()
            while self._owed:
                self.mover.move(self._owed[0])
                self._owed.popleft()

    def _pay(self) -> None:
        """Makes the copies that are owed, before a block of theirs can go to somebody else."""
        if self._owed:
            self._run_copies(_NO_COPIES)

    # -- on a device -------------------------------------------------------------------------

    def _mark(self, number: int) -> Any:
        """What is queued by now belongs to this step or comes before; it is settled, or ends."""
        self._check_process()
        if self._device is None:
            return None
        with self._lock:
            return self._device.mark(number)

    def _follow(self) -> None:
        """Copies and tables come behind the steps in flight and behind copies, whichever streams
        those run in."""
        if self._device is not None:
            with self._lock:
                self._device.follow()

    def _claim_tables(self, number: int) -> None:
        """The device has one set of tables: the kernels that read it are queued first."""
        if self._device is None:
            return
        self._check_process()
        with self._lock:
            self._device.check_stream()
            other = self._tables_of
            if other is not None and other != number:
                raise InvalidStep(
                    f"step {number}: step {other} is prepared, and the tables on the device are "
                    "its own until it is written or cancelled",
                    step=number,
                )
            self._tables_of = number

    def _free_tables(self, number: int) -> None:
        with self._lock:
            if self._tables_of == number:
                self._tables_of = None

    def _send_tables(self, number: int, buffers: Buffers) -> None:
        if self._device is not None:
            with self._copying:
                self._follow()
                self._tables_hold = None
                self._device.tables.update(buffers)
                self._tables_hold = number

    def _start_moves(self, make: Callable[[], Plan | None] | None = None) -> None:
        """Queues copies beside the step that is prepared, if the memory needs them and none are
        under way."""
        if self._device is None:
            return
        self._check_process()
        with self._copying:
            make = make or self._planner(None, None, None, None)
            plan = make() if self._moving is None else None
            if plan is None:
                return
            self._follow()
            moves = self.mmu.begin(plan)
            try:
                copying = self._device.mover.start(moves.pairs)
            except BaseException:
                self.mmu.abort(moves)
                raise
            self._moving = moves, copying

    def _finish_moves(self) -> int:
        """Puts the copies that are under way before whatever is queued from now on, and changes
        the page table. Returns how many blocks moved. Another thread that comes meanwhile waits: it
        is not to prepare a step in between."""
        if self._device is None:
            return 0
        self._check_process()
        with self._copying:
            if self._moving is None:
                return 0
            moves, copying = self._moving
            self._device.mover.finish(copying)
            self._moving = None
            return self.mmu.commit(moves)

    def _check_process(self) -> None:
        """After a fork another thread's lock may never be given back: the MMU says so first."""
        if os.getpid() != self._process:
            self.mmu.steps_in_flight()

    # -- memory ------------------------------------------------------------------------------

    def layer(self, index: int) -> Layer:
        """(k, v) tensors of a layer as its kernel sees them, in the axis order of the layout."""
        return self.layers[_index("layer", index, len(self.layers))]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor | None, batch: Batch) -> None:
        """Stores the KV of a step: k and v [T, heads, dim], in the order of its slots."""
        if batch._cache is not self:
            raise InvalidConfig("the batch is of another cache")
        self._check_process()
        if self._device is None:
            batch._check_live()
            self.layers.write(layer, k, v, batch.slot_mapping)
        else:
            index = _index("layer", layer, len(self.layers))
            with self._copying:
                batch._check_live()
                self._device.write(index, k, v, batch.slot_mapping)

    def gather(self, sequence: Sequence, layer: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Copies of the KV of all scheduled tokens: (k, v), each [n, heads, dim]."""
        self._check_handle(sequence)
        if self._device is not None:
            self._check_process()
            self._device.mover.flush()
        blocks = torch.from_numpy(self.mmu.block_table(sequence.id).astype(np.int64))
        return self.layers.gather(layer, blocks, sequence.num_scheduled)

    def views(
        self, sequence: Sequence, layer: int
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """The KV of all scheduled tokens without a copy: one (k, v) pair of views a physical run,
        each [tokens, heads, dim]. They are good until the next compaction. Without the first
        ``sequence.num_released_tokens``, if any were released.

        Raises:
            InvalidConfig: the layout cannot (see docs/layouts.md).
        """
        self._check_handle(sequence)
        tokens = sequence.num_scheduled - sequence.num_released_tokens
        return self.layers.views(layer, sequence.runs(), tokens)

    def _check_handle(self, sequence: Sequence) -> None:
        if sequence._cache is not self:
            raise InvalidConfig(f"{sequence!r} is of another cache")

    def compact(
        self,
        *,
        free_run: int | None = None,
        huge_pages: int | None = None,
        gather: Sequence | None = None,
        below: float | None = None,
    ) -> int:
        """One pass of compaction under the budget. Returns how many blocks moved. To be called
        between steps.

        Without a goal: what the default trigger finds to do, if it is on. With one (at most one is
        allowed): the next moves towards it, 0 when it is reached.

        Args:
            free_run: one run of so many available blocks.
            huge_pages: so many free windows of 512 available blocks.
            gather: this sequence in few runs.
            below: a fragmentation ratio over available blocks below this.

        Raises:
            InvalidConfig: more than one goal.
            OutOfBlocks, Fragmented: no moves reach the goal.
            UnknownSequence: it is closed.

        The copies are made at once; on a CUDA device they are queued in order with the current
        stream and the steps in flight. With ``copy="overlap"``, call it once a step is prepared and
        before its kernels are queued: copies that were under way are committed, and others begin
        beside that step (without a step to run beside, they are queued as between steps).

        In host memory an engine whose written steps are still queued elsewhere has to
        queue them behind those instead: ``mmu.plan_compaction``, ``mmu.begin``, queue the copies of
        ``moves.pairs``, ``mmu.commit`` (examples/embed.py does).
        """
        make = self._planner(free_run, huge_pages, gather, below)
        self._pay()
        if self._device is None:
            return self._run(make())
        self.poll()
        moved = self._finish_moves()
        if self._overlap and self._tables_of is not None:
            self._start_moves(make)
            return moved
        self._follow()
        return moved + self._run(make())

    def _planner(
        self,
        free_run: int | None,
        huge_pages: int | None,
        gather: Sequence | None,
        below: float | None,
    ) -> Callable[[], Plan | None]:
        """Makes the plan of the next pass towards a goal."""
        goals = {
            "free_run": free_run,
            "huge_pages": huge_pages,
            "gather": gather,
            "below": below,
        }
        given = [f"{name} = {goal!r}" for name, goal in goals.items() if goal is not None]
        if len(given) > 1:
            raise InvalidConfig(f"{', '.join(given)}: allowed is at most one goal")
        mmu, most = self.mmu, self.pace.blocks()
        if not given:
            return lambda: mmu.plan_compaction(max_blocks=most)
        most = self._most_blocks()
        if gather is not None:
            self._check_handle(gather)
            return lambda: mmu.plan_gather(gather.id, max_blocks=most)
        if free_run is not None:
            return lambda: mmu.plan_free_run(free_run, max_blocks=most)
        if huge_pages is not None:
            return lambda: mmu.plan_huge_pages(huge_pages, max_blocks=most)
        assert below is not None
        return lambda: mmu.plan_below(below, max_blocks=most)

    def _most_blocks(self) -> int:
        """Most blocks of one pass, by all budgets."""
        return min(self.pace.blocks() or self.mmu.budget_blocks, self.mmu.budget_blocks)

    def _run(self, plan: Plan | None) -> int:
        # A device's mover returns when copies are queued: its time says nothing.
        pace = self.pace if self._device is None else None
        return 0 if plan is None else run_plan(self.mmu, self.mover, plan, pace)

    def ready(self, num_blocks: int) -> bool:
        """Whether a run of so many blocks is to be had now, by evicting at most. After
        ``Fragmented`` the next passes of :meth:`compact` make what was refused first."""
        return self.mmu.ready(num_blocks)

    def shrink(self, blocks: int, *, granule: int | None = None) -> Shrunk:
        """Gives memory back: takes ``blocks`` blocks offline, rounded up to whole granules, and
        their pages go back to the system (``return_memory``). Sequences run on; ``states()`` counts
        the blocks as ``offline``, and nobody is given one before :meth:`grow`.

        Granules that are empty go first, then those that lose the fewest cached blocks, then those
        that the fewest moves empty. With no step in flight all moves are made now; else one pass of
        at most the budget, and what it empties can go when those steps have ended: call it again.
        As :meth:`compact`, to be called between steps.

        Args:
            granule: blocks that go together, an aligned group; None: ``storage.granule()``, whose
                bytes are whole pages of 2 MiB. Host memory goes back by pages of
                ``kvmmu.HostPages().page_bytes``, so there ``storage.granule(4096)`` is the least
                that makes sense.

        Returns:
            what went, and why no more (:class:`kvmmu.Shrunk`).

        Raises:
            InvalidConfig: an argument; or no granule fills a page (``Storage.granule``).
            NotReturnable: memory of a kind that cannot go back. No block is offline for it then;
                what was evicted or moved stays so.
        """
        wanted, size = self._granules(blocks, granule)
        self._pay()
        self.poll()
        self._finish_moves()

        def run(plan: Plan) -> int:
            self._follow()
            return self._run(plan)

        most = self._most_blocks()
        with self._giving:
            how = (run, self._settle_moves, most)
            return shrink(self.mmu, self._given, wanted, size, *how)

    def grow(self, blocks: int | None = None, *, granule: int | None = None) -> int:
        """Brings blocks back that :meth:`shrink` took offline: ``blocks`` of them, rounded up to
        whole granules, the lowest first; None: all. Returns how many, never more than were
        offline. What they hold is of no worth (zeros, where their pages had gone).

        Raises:
            InvalidConfig: an argument.
            whatever the owner of the memory raises; nothing has changed then.
        """
        wanted, size = (None, 1) if blocks is None else self._granules(blocks, granule)
        self._check_process()
        with self._giving:
            return grow(self.mmu, self._given, wanted, size)

    @property
    def bytes_given_back(self) -> int:
        """Bytes of pages that are with the system now."""
        return self._given.bytes

    def _granules(self, blocks: Any, granule: int | None) -> tuple[int, int]:
        size = self.storage.granule() if granule is None else granule
        for name, value, least in (("blocks", blocks, 0), ("granule", size, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidConfig(f"{name} = {value!r}: allowed is a whole number from {least}")
        return min(blocks, self.mmu.num_blocks), min(size, 2**31)

    def _settle_moves(self) -> None:
        """Waits until the copies that are queued have been made: pages are unmapped at once."""
        if self._device is not None:
            with self._lock:
                self._device.wait()

    def warm_up(self) -> None:
        """On a CUDA device: launches every kernel once without work and waits, so that nothing is
        compiled or loaded later; before the first step, or before a graph is captured. In host
        memory: nothing."""
        if self._device is not None:
            self._check_process()
            self._device.warm_up()

    def preheat(self, pages: int, order: int | None = None) -> Preheated:
        """Claims so many pages, writes to all of their bytes and gives them back, so that no
        request waits for the system to find memory. To be called before the first sequence.

        Args:
            pages: of 2**order blocks each.
            order: one of ``mmu.page_orders``; None: the largest.

        Returns:
            what that took; ``cache.preheated`` remembers it.

        Raises:
            OutOfBlocks: fewer blocks are empty. InvalidConfig, OutOfTables.
        """
        self._pay()
        self._finish_moves()
        self.preheated = preheat(self.mmu, pages, order, self._touch)
        return self.preheated

    def _touch(self, blocks: Int32s) -> int:
        """Writes the bytes of blocks that nobody uses."""
        if self._device is None:
            return touch_host(self.storage, blocks)
        with self._copying:
            self._follow()
            for source, others in ((blocks[0], blocks[1:]), (blocks[-1], blocks[:1])):
                pairs = np.stack([np.full_like(others, source), others], axis=1)
                self.mover.move(pairs if len(blocks) > 1 else pairs[:0])
        self._settle_moves()
        return len(blocks) * self.storage.block_bytes if len(blocks) > 1 else 0

    def overdue_leases(self) -> list[Lease]:
        """Leases past their timeout; they are kept."""
        return self._leases.overdue()

    def snapshot(self) -> Snapshot:
        """The whole memory as it is now, to look at later: JSON, or a file for PyTorch's memory
        viewer."""
        return snapshot(self.mmu, self.storage)

    def validate(self) -> None:
        """Recounts everything (slow); raises InternalError."""
        for buffers in self._rotation:
            self.mmu.validate(buffers.tables)
        with self._giving:
            self._given.check(self.mmu.offline_blocks())


def _owner(return_memory: bool | ReturnsMemory, device: str) -> ReturnsMemory | None:
    """Who takes the memory of blocks that are offline."""
    if not isinstance(return_memory, bool):
        for name in ("page_bytes", "give_back", "take_back"):
            if not hasattr(return_memory, name):
                raise InvalidConfig(
                    f"return_memory = {return_memory!r}: allowed is True, False, or an object with "
                    "page_bytes, give_back and take_back"
                )
        return return_memory
    if return_memory and device != "cpu":
        raise InvalidConfig(
            f"return_memory = True on {device}: there an object with page_bytes, give_back and "
            "take_back is needed, which owns the pages"
        )
    return HostPages() if return_memory else None


def _reserved(reserved_blocks: int, mmu: MMU) -> int:
    if (
        isinstance(reserved_blocks, bool)
        or not isinstance(reserved_blocks, int)
        or not 0 <= reserved_blocks < mmu.num_blocks
    ):
        raise InvalidConfig(
            f"reserved_blocks = {reserved_blocks!r}: allowed is 0 to {mmu.num_blocks - 1}, "
            "less than the pool"
        )
    return reserved_blocks


def _mmu(
    num_blocks: int,
    block_size: int,
    max_sequence_tokens: int | None,
    options: dict[str, Any],
) -> MMU:
    if max_sequence_tokens is not None:
        for name, value in (
            ("num_blocks", num_blocks),
            ("block_size", block_size),
            ("max_sequence_tokens", max_sequence_tokens),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidConfig(f"{name} = {value!r}: allowed is a whole number from 1")
        longest = -(-max_sequence_tokens // block_size)
        if not 1 <= longest <= num_blocks:
            raise InvalidConfig(
                f"max_sequence_tokens = {max_sequence_tokens}: allowed is 1 to "
                f"{num_blocks * block_size}, the pool"
            )
        options["max_blocks_per_sequence"] = longest
    try:
        return MMU(num_blocks, block_size, **options)
    except TypeError as error:
        raise InvalidConfig(str(error)) from None
