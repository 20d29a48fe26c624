"""Who copies blocks on a CUDA device, and in which order to everything else there.

What lives here: :class:`CUDAMover`, which satisfies ``kvmmu.SupportsMove``, and
:class:`GraphMoves` for captured graphs. What never lives here: a choice of moves, a table, or a
kernel's arguments (:mod:`.launches`).

# Order

The *caller's stream* is the one that is current when a method is called: attention kernels, writes
of KV and updates of tables are queued there. Copies run in the side stream::

    caller's stream   ... step N ──● ready             ┌── wait(done) ── tables ── step N + 1
                                   └─ wait ─┐          │
    side stream                             └─ copy ──●┘ done

``ready`` holds the copy back until its sources have been written, and until steps that are queued
have read what the destinations held before. ``done`` holds back whoever reads the destinations,
writes the sources under their next owner, or overwrites destinations that were given back.
Copies of two calls follow each other in the side stream.

That is enough for work in the caller's stream and for what the host does after an event of it. Work
in another stream has to be ordered before the caller's (``KVCache`` does that for its steps), and
transfers that are in no stream wait with :meth:`CUDAMover.synchronize`. Nothing is queued in a
stream that is being captured: each replay would do it again.

Nothing is allocated, compiled or uploaded for a copy: moves travel in the arguments of the launch,
the region table was uploaded once, both events are used again every time.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from ..bound import Bound
from ..errors import InvalidConfig, UsedAfterFork
from ..pairs import Pairs
from ..storage import Storage, _integer
from .device import open_streams
from .launches import _MAX_GRID, MoveBlocks, MoveBlocksIndirect, RegionTable
from .streams import Event, Stream, Streams, stream_for_once

__all__ = ["CUDAMover", "Copying", "GraphMoves"]

OVERLAP_THREAD_BLOCKS = 16
"""Of a copy beside a running step: a part of the device, which has 100 multiprocessors and more.
A first guess; no GPU has measured it."""

_NO_MOVES = np.empty((0, 2), np.uint32)


class Copying(Bound):
    """A copy that :meth:`CUDAMover.start` has queued. :meth:`CUDAMover.finish` takes it, once."""

    __slots__ = ("_mover", "finished", "num_moves")

    def __init__(self, mover: CUDAMover, num_moves: int) -> None:
        self._mover = mover
        self.num_moves = num_moves
        self.finished = False


class CUDAMover(Bound):
    """Copies blocks in the memory of one CUDA device. Any thread may call; one at a time copies.

    Args:
        storage: the memory; kept alive.
        streams: of the device that it lies on; None: torch's.
        overlap_thread_blocks: thread blocks of a copy that :meth:`start` queues, few enough to
            leave room for the step beside it.

    Raises:
        CUDAUnavailable, MissingExtra: as :func:`kvmmu.cuda.require`.
        InvalidConfig: another number, a block that a kernel cannot number, memory of the host, or
            streams of another device than the memory.

    It makes a side stream, two events, the region table on the device and compiles its kernel. When
    it is dropped or closed, it waits for its copies, and for what its graphs' moves were queued
    for: memory may be given back after that.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        streams: Streams | None = None,
        overlap_thread_blocks: int = OVERLAP_THREAD_BLOCKS,
    ) -> None:
        self._storage = storage
        self._streams = open_streams(storage.device) if streams is None else streams
        # Memory of the host with streams is that of a device that only stands for one (tests).
        if storage.device not in ("cpu", self._streams.device):
            raise InvalidConfig(
                f"the storage is on {storage.device}, the streams are of {self._streams.device}",
                device=storage.device,
            )
        few = _integer("overlap_thread_blocks", overlap_thread_blocks, 1, _MAX_GRID)
        self._table = RegionTable.of(storage)
        self._side = self._streams.side()
        self._process = os.getpid()
        self._rows = _upload(self._streams, self._table.rows)
        self._ready = self._streams.event("ready")
        self._done = self._streams.event("done")
        kernel = self._streams.kernel("move_blocks")
        rows = self._rows.data_ptr()
        self._all = MoveBlocks(kernel, self._table, rows)
        self._few = MoveBlocks(kernel, self._table, rows, max_thread_blocks=few)
        self._lock = threading.RLock()
        # A captured graph has the addresses of its buffer: it stays as long as the mover does.
        self._buffers: list[tuple[Any, Event]] = []
        self._put: set[GraphMoves] = set()  # kept until what was put has been carried out
        self._copied_bytes = 0
        self._used: list[Stream | Event] = [self._side]
        self._give_back = weakref.finalize(self, _wait_for, self._used, self._process)

    @property
    def storage(self) -> Storage:
        """The memory that it moves blocks in."""
        return self._storage

    @property
    def streams(self) -> Streams:
        """The device."""
        return self._streams

    @property
    def copied_bytes(self) -> int:
        """Bytes whose copies were queued so far (each counted once)."""
        return self._copied_bytes

    def move(self, pairs: Pairs) -> None:
        """Queues the copy of block ``pairs[i, 0]`` to block ``pairs[i, 1]`` in every region.

        It runs behind all that is queued in the caller's stream, and ahead of what is queued there
        from now on. Arguments and errors as :meth:`kvmmu.CPUMover.move`.
        """
        self._check_process()
        with self._lock:
            self._queue(pairs, self._all)
            self._streams.current().wait(self._done)

    def start(self, pairs: Pairs) -> Copying:
        """Queues the same copy beside what is queued in the caller's stream from now on, with few
        thread blocks.

        Until :meth:`finish`, work that is queued there must leave the destinations alone, and write
        no source that is still to be moved.

        Returns:
            what :meth:`finish` takes.

        Raises:
            as :meth:`kvmmu.CPUMover.move`. Nothing has been copied then, or what was is ordered
            before the caller's stream.
        """
        self._check_process()
        with self._lock:
            return Copying(self, self._queue(pairs, self._few))

    def finish(self, copying: Copying) -> None:
        """What is queued in the caller's stream from now on comes behind the copy. To be called
        between two steps, before the tables change, and before moves are aborted. Again: nothing.

        Raises:
            InvalidConfig: a copy that another mover has queued.
        """
        self._check_process()
        if not isinstance(copying, Copying) or copying._mover is not self:
            raise InvalidConfig(
                f"{copying!r} is no copy that this mover has started", argument="copying"
            )
        with self._lock:
            if not copying.finished:
                # Copies follow each other in the side stream: a newer record covers this one.
                stream_for_once(self._streams).wait(self._done)
                copying.finished = True

    def follow(self) -> None:
        """What is queued in the caller's stream from now on comes behind all copies that were
        queued, whichever stream was the caller's then."""
        self._check_process()
        with self._lock:
            stream_for_once(self._streams).wait(self._done)

    def copied(self) -> bool:
        """Whether all copies that were queued have finished. Moves that were put for a graph have
        not before a :meth:`flush` behind them: nobody tells of a replay."""
        self._check_process()
        with self._lock:
            return (
                not self._put
                and self._done.query()
                and all(used.query() for _, used in self._buffers)
            )

    def synchronize(self) -> None:
        """The host waits for all copies that were queued. Moves that were put for a graph and not
        replayed are carried out first (:meth:`flush`)."""
        self._check_process()
        with self._lock:
            self.flush()
            events = [self._done, *(used for _, used in self._buffers)]
        for event in events:
            event.synchronize()

    def graph_moves(self, capacity: int = 32, *, thread_blocks: int = 132) -> GraphMoves:
        """Moves for captured graphs of this device; see :class:`GraphMoves`. Their kernel is
        launched once without moves, and waited for; their buffer (8 bytes a move) stays as long as
        the mover."""
        self._check_process()
        with self._lock:
            made = GraphMoves(self, capacity, thread_blocks)
            self._buffers.append((made._memory, made._used))
            self._used.append(made._used)
            return made

    def flush(self) -> None:
        """Carries out moves that were put for a graph and not replayed yet; see
        :meth:`GraphMoves.flush`."""
        self._check_process()
        with self._lock:
            for graph in list(self._put):
                graph.flush()

    def warm_up(self) -> None:
        """Launches its kernel once, without moves, and waits: what a driver loads on first use is
        loaded then. Those of :meth:`graph_moves` do so when they are made."""
        self._check_process()
        with self._lock:
            stream = stream_for_once(self._streams)
            with self._streams.use(stream):
                self._all.warm_up()
            stream.synchronize()

    def close(self) -> None:
        """Waits for its copies. Again: nothing. It still works afterwards, but whoever gives memory
        back then has to wait himself."""
        self._give_back()

    def _check_process(self) -> None:
        """A child has no use of the device, and another thread's lock is never given back there."""
        if os.getpid() != self._process:
            raise UsedAfterFork(
                f"a CUDAMover of process {self._process} is used in process {os.getpid()}: make "
                "another one after the fork"
            )

    def _queue(self, pairs: Pairs, launch: MoveBlocks) -> int:
        """Behind the caller's stream, in the side stream. The caller holds the lock."""
        checked = launch.check(pairs)
        caller = stream_for_once(self._streams)
        if len(checked) == 0:
            return 0
        self.flush()
        caller.record(self._ready)
        self._side.wait(self._ready)
        try:
            with self._streams.use(self._side):
                launch.launch(checked)
        except BaseException:
            # Some of several launches may have begun: they end before a destination is given back.
            self._side.record(self._done)
            caller.wait(self._done)
            raise
        self._side.record(self._done)
        self._copied_bytes += len(checked) * self._storage.block_bytes
        return len(checked)


class GraphMoves(Bound):
    """Moves that a captured graph carries out: made by :meth:`CUDAMover.graph_moves`.

    Inside of the capture, ahead of whatever reads blocks, call :meth:`launch`. Between two replays
    :meth:`move` puts the next moves into a buffer on the device. A replay without new moves copies
    nothing.

    Moves are put in the caller's stream. A graph that is replayed in another one has to be told of:
    ``with moves.replaying(): graph.replay()``. All else here orders itself, in whichever stream.

    Moves that the next replay would come too late for are carried out by the same kernel outside of
    the graph (:meth:`flush`): those of an earlier :meth:`move`, and all before the mover copies
    something itself, since a copy on write may read what was moved. It satisfies
    ``kvmmu.SupportsMove``, so ``kvmmu.compact(mmu, graph_moves)`` works.

    Attributes:
        capacity: moves of one call.
    """

    def __init__(self, mover: CUDAMover, capacity: int, thread_blocks: int) -> None:
        self._mover = mover
        self._streams = mover.streams
        self.capacity = _integer("capacity", capacity, 1, 2**20)
        blocks = _integer("thread_blocks", thread_blocks, 1, _MAX_GRID)
        stream = stream_for_once(self._streams)
        size = 4 * (2 + 2 * self.capacity)
        # One allocation: the buffer, and behind it the word that says which count was refused.
        self._memory = self._streams.zeros(size + 4)
        self._staging = Staging(self._streams, size, 2)
        self._kernel = MoveBlocksIndirect(
            self._streams.kernel("move_blocks_indirect"),
            mover._table,
            mover._rows.data_ptr(),
            buffer=self._memory.data_ptr(),
            refused=self._memory.data_ptr() + size,
            capacity=self.capacity,
            thread_blocks=blocks,
        )
        self._used = self._streams.event("moves")  # behind all that uses the buffer
        with self._streams.use(stream):
            self._kernel()
        stream.synchronize()

    def launch(self) -> None:
        """Queues the kernel in the caller's stream: once, in the capture. Outside of one it carries
        out what was put."""
        self._mover._check_process()
        with self._mover._lock:
            if not self._streams.capturing():
                self._mover._put.add(self)
                self.flush()
                return
            with self._streams.use(self._streams.current()):
                self._kernel()

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Around replays in the caller's stream: they come behind what was put, whichever stream
        that was in, and whatever uses the buffer next comes behind them. Nothing is put or flushed
        in another stream meanwhile.
        """
        self._mover._check_process()
        stream = stream_for_once(self._streams)
        with self._mover._lock:
            stream.wait(self._used)
        try:
            yield
        finally:
            with self._mover._lock:
                stream.record(self._used)

    def move(self, pairs: Pairs) -> None:
        """The next replay copies block ``pairs[i, 0]`` to block ``pairs[i, 1]``.

        Raises:
            LimitExceeded: more moves than the capacity. Numbers: ``needed``, ``limit``.
            InvalidBlock, InvalidPlan, InvalidConfig: as :meth:`kvmmu.CPUMover.move`.
            Nothing has changed then.
        """
        self._mover._check_process()
        with self._mover._lock:
            checked = self._kernel.check(pairs)
            if len(checked) == 0:
                return
            caller = stream_for_once(self._streams)
            self.flush()
            host, words = self._staging.take()
            size = self._kernel.fill_checked(words.view(np.uint32), checked)
            caller.wait(self._used)
            self._streams.upload(caller, self._memory[:size], host[:size])
            self._mover._put.add(self)
            self._staging.queued(caller)
            caller.record(self._used)
            self._mover._copied_bytes += len(checked) * self._mover.storage.block_bytes

    def refused(self) -> int:
        """Waits for the device; a count above the capacity that the kernel met, which only another
        writer of the buffer can have put there. 0: none."""
        self._mover._check_process()
        stream_for_once(self._streams).synchronize()
        self._used.synchronize()
        return int(self._memory[-4:].cpu().numpy().view(np.uint32)[0])

    def flush(self) -> None:
        """Carries out now, in the caller's stream, what was put; after a replay that has done so,
        this copies nothing. The engine's own kernels outside of the graph need it first, if they
        touch blocks (``cache.write``, ``cache.gather`` and copies on write call it).

        Raises:
            InvalidConfig: something was put, and the stream is being captured: the graph would
                carry it out, nobody before.
        """
        self._mover._check_process()
        with self._mover._lock:
            if self in self._mover._put:
                caller = stream_for_once(self._streams)
                caller.wait(self._used)
                with self._streams.use(caller):
                    self._kernel()
                caller.record(self._used)
                self._mover._put.remove(self)


class Staging(Bound):
    """Page-locked memory that the device reads after the host has gone on: several equal parts,
    used in turn. A part is written again when the event behind its last use is over; with more
    parts than steps in flight, that is so already. When it is dropped, the host waits for all of
    them: what is given back may be written by its next owner at once.

    Args:
        num_bytes: of a part, a multiple of 8.
        parts: at least 1.
    """

    def __init__(self, streams: Streams, num_bytes: int, parts: int) -> None:
        if num_bytes % 8:
            raise InvalidConfig(f"num_bytes = {num_bytes}: allowed is a multiple of 8")
        memory = streams.pinned(num_bytes * parts)
        self._parts: list[tuple[Any, npt.NDArray[np.uint8], Event]] = []
        for number in range(parts):
            part = memory[number * num_bytes : (number + 1) * num_bytes]
            self._parts.append((part, part.numpy(), streams.event("staging")))
        self._next = 0
        events = [event for _, _, event in self._parts]
        weakref.finalize(self, _wait_for, events, os.getpid())

    def take(self) -> tuple[Any, npt.NDArray[np.uint8]]:
        """The part whose turn it is, as a tensor and an array of the same bytes. The host waits
        until the device has read what it held."""
        tensor, array, event = self._parts[self._next]
        event.synchronize()
        return tensor, array

    def queued(self, stream: Stream) -> None:
        """All that reads the part has been queued in this stream; the turn passes on."""
        stream.record(self._parts[self._next][2])
        self._next = (self._next + 1) % len(self._parts)


def _upload(streams: Streams, array: npt.NDArray[Any]) -> Any:
    """A copy in device memory, made when this returns."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    host, made = streams.pinned(len(flat)), streams.zeros(len(flat))
    host.numpy()[:] = flat
    stream = stream_for_once(streams)
    streams.upload(stream, made, host)
    stream.synchronize()
    return made


def _wait_for(things: Iterable[Stream | Event], process: int) -> None:
    """Not in a forked child, which has no use of the device."""
    if os.getpid() == process:
        for thing in things:
            thing.synchronize()
