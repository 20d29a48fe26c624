"""Streams and events that only record, and what a recording proves about the order of work.

What lives here: an implementation of ``kvmmu.cuda.Streams`` without a device. Launches run the real
kernels through the shim. Two questions are asked of a run:

- **Order** (schedules ``"now"`` and ``"fast"``: everything runs when it is queued, so that all it
  touches is known; but the host is told that something is over only when it waits for that, as by a
  device that is as slow as can be, or, ``"fast"``, whenever it asks). Each launch, copy and host
  access is a node with the blocks and words that it reads and writes. Edges: the order of a stream;
  an event from its record to who waits for it; the host from each call to the next, and from the
  host to what it queues. Two accesses to one place, one of them a write, with no path between them,
  are a race.
- **Contents** (schedules ``"late"``, ``"side first"``, ``"caller last"`` and seeds): queued work
  runs only when the host waits for it, or all but the side stream's does, or only that of the
  caller's first stream does, or in an order drawn among those that the waits allow. Readers compare
  bytes.

A wait can be left out of a run by its name (``drop``): then the proof has to fail.

What never lives here: anything that the executor decides.
"""

from __future__ import annotations

import ctypes
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from kvmmu import Storage, cuda

from . import cuda_shim

Place = tuple[Any, ...]
"""("block", pool, id) or ("word", address / 4)."""


@dataclass
class Node:
    """One thing that happened."""

    what: str
    where: str
    before: int
    """Bits of all nodes that a path leads from."""
    needs: tuple[int, ...]
    run: Callable[[], None] | None = None
    reads: set[Place] = field(default_factory=set)
    writes: set[Place] = field(default_factory=set)
    done: bool = False


@dataclass(frozen=True)
class Race:
    """Two accesses that nothing orders."""

    first: str
    second: str
    place: Place

    @property
    def kind(self) -> str:
        return f"{self.first} | {self.second}"


class World:
    """All that is recorded, of one host and any number of devices."""

    def __init__(self, schedule: str | int = "now", drop: str | None = None) -> None:
        self.schedule = schedule
        self.drop = drop
        self.nodes: list[Node] = []
        self.waits: dict[str, int] = {}
        """How often each kind of wait was asked for."""
        self.errors: list[str] = []
        self.streams: list[RecordedStream] = []
        self._host: int | None = None
        self._draw = random.Random(schedule if isinstance(schedule, int) else 0)
        self._pools: list[tuple[Storage, RecordedStreams]] = []
        self._buffers: list[tuple[int, int, RecordedStreams]] = []
        self._pinned: dict[int, tuple[Any, Any]] = {}
        """address -> (weak reference to the array, what it held at the last call)."""
        self._kept: list[Any] = []

    @property
    def at_once(self) -> bool:
        return self.schedule in ("now", "fast")

    def knows(self, number: int | None) -> bool:
        """Whether the host has waited for this, or for something behind it."""
        return number is None or (
            self._host is not None and bool(self.nodes[self._host].before >> number & 1)
        )

    def keep(self, *things: Any) -> None:
        """Until the world ends, as torch's allocator keeps memory until its stream is done."""
        self._kept += things

    # -- nodes -------------------------------------------------------------------------------

    def add(self, what: str, where: str, needs: list[int | None], **rest: Any) -> int:
        known = tuple(sorted({number for number in needs if number is not None}))
        before = 0
        for number in known:
            before |= self.nodes[number].before | 1 << number
        self.nodes.append(Node(what, where, before, known, **rest))
        return len(self.nodes) - 1

    def host(self, what: str, needs: list[int | None] | None = None, **rest: Any) -> int:
        """A thing that the host does, after all that it did before."""
        self._host = self.add(what, "host", [self._host, *(needs or [])], **rest)
        self.nodes[self._host].done = True
        return self._host

    def call(self) -> None:
        """The host makes a call: what it has written to page-locked memory since the last is known
        now, and was written before this."""
        for address, (reference, before) in list(self._pinned.items()):
            array = reference()
            if array is None:
                del self._pinned[address]
                continue
            changed = np.flatnonzero(array != before)
            if len(changed):
                self.host("host fills staging", writes=words(address, changed))
                self._pinned[address] = (reference, array.copy())
        if isinstance(self.schedule, int):
            for _ in range(self._draw.randrange(3)):
                self.run_one()
        elif self.schedule in ("side first", "caller last"):
            for stream in self.streams:
                first = stream.role == "side"
                if self.schedule == "caller last":
                    first = stream is not self.streams[1]
                if first and stream.queue:
                    self.run(stream.queue[-1])

    def queue(self, stream: RecordedStream, what: str, run: Any = None, **rest: Any) -> int:
        """Work in a stream."""
        needs = [stream.tail, self._host, *stream.waiting]
        stream.waiting = []
        number = self.add(what, stream.name, needs, run=run, **rest)
        stream.tail = number
        stream.queue.append(number)
        if self.at_once:
            self.run(number)
        return number

    def run(self, number: int | None) -> None:
        """Runs a node, and before it what it needs."""
        if number is None or self.nodes[number].done:
            return
        stack = [number]
        while stack:
            node = self.nodes[stack[-1]]
            left = [need for need in node.needs if not self.nodes[need].done]
            if left:
                stack.append(min(left))
                continue
            stack.pop()
            if not node.done:
                node.done = True
                work, node.run = node.run, None  # what it holds may be given back once it has run
                if work is not None:
                    work()

    def run_one(self) -> None:
        """Runs the next of some stream that can run."""
        ready = []
        for stream in self.streams:
            while stream.queue and self.nodes[stream.queue[0]].done:
                stream.queue.pop(0)
            if stream.queue and all(self.nodes[n].done for n in self.nodes[stream.queue[0]].needs):
                ready.append(stream.queue[0])
        if ready:
            self.run(self._draw.choice(ready))

    def finish(self) -> None:
        """Runs all that is left."""
        for number in range(len(self.nodes)):
            self.run(number)

    def dropped(self, kind: str) -> bool:
        """Whether a wait of this kind is left out of the run; counts it."""
        self.waits[kind] = self.waits.get(kind, 0) + 1
        return kind == self.drop

    # -- memory ------------------------------------------------------------------------------

    def pool(self, storage: Storage, owner: RecordedStreams) -> None:
        """The blocks of a storage are places of a device."""
        self._pools.append((storage, owner))

    def block(self, address: int, block: int) -> Place:
        number = self._pool_at(address)
        return ("block", number, block)

    def _pool_at(self, address: int) -> int:
        for number, (storage, _) in enumerate(self._pools):
            if any(region.address <= address < region.end for region in storage.regions):
                return number
        raise AssertionError(f"{address:#x} is in no pool")

    def owner(self, address: int) -> RecordedStreams:
        """The device that an address is on."""
        for start, end, owner in self._buffers:
            if start <= address < end:
                return owner
        return self._pools[self._pool_at(address)][1]

    def host_access(self, what: str, blocks: Any, storage: Storage, *, write: bool) -> None:
        """Something on the host side, a transfer for instance, reads or writes blocks."""
        self.call()
        address = storage.regions[0].address
        places = {self.block(address, int(block)) for block in blocks}
        if write:
            self.host(what, writes=places)
        else:
            self.host(what, reads=places)

    # -- what it proves ----------------------------------------------------------------------

    def races(self) -> list[Race]:
        """One for each pair of kinds and place."""
        assert self.at_once, "other schedules do not know what a launch reads"
        self.call()
        accesses: dict[Place, list[tuple[int, bool]]] = {}
        found: dict[tuple[str, Place], Race] = {}
        for number, node in enumerate(self.nodes):
            for place in node.reads | node.writes:
                write = place in node.writes
                earlier = accesses.setdefault(place, [])
                for other, wrote in earlier:
                    if (write or wrote) and not node.before >> other & 1:
                        race = Race(self.nodes[other].what, node.what, place)
                        found.setdefault((race.kind, place), race)
                earlier.append((number, write))
        return list(found.values())


def words(address: int, indices: Any) -> set[Place]:
    """Words of 4 bytes, by their index from an address."""
    assert address % 4 == 0
    first = address // 4
    return {("word", first + int(index)) for index in indices}


class RecordedEvent:
    """A mark in a stream."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.marks: int | None = None

    def query(self) -> bool:
        self.world.call()
        if self.world.dropped(f"host waits {self.name}"):
            return True
        if (
            self.world.knows(self.marks)
            if self.world.schedule == "now"
            else self.marks is None or self.world.nodes[self.marks].done
        ):
            self.world.host(f"{self.name} is over", [self.marks])
            return True
        return False

    def synchronize(self) -> None:
        self.world.call()
        if not self.world.dropped(f"host waits {self.name}"):
            self.world.run(self.marks)
            self.world.host(f"{self.name} is over", [self.marks])

    def elapsed_ms(self, since: Any, /) -> float:
        return 1.0  # nothing is measured here


class RecordedStream:
    """Work that runs in order."""

    def __init__(self, streams: RecordedStreams, name: str) -> None:
        self.world, self.owner = streams.world, streams
        self.role, self.name = name, f"{streams.device} {name}"
        self.tail: int | None = None
        self.waiting: list[int | None] = []
        self.queue: list[int] = []
        self.world.streams.append(self)

    def record(self, event: Any, /) -> None:
        self.world.call()
        event.marks = self.world.queue(self, f"record {event.name}")

    def wait(self, event: Any, /) -> None:
        self.world.call()
        if event.marks is None:
            return
        if not self.world.dropped(f"{self.role} waits {event.name}"):
            self.waiting.append(event.marks)

    def synchronize(self) -> None:
        self.world.call()
        if not self.world.dropped(f"host waits {self.role}"):
            self.world.run(self.tail)
            self.world.host(f"{self.role} is empty", [self.tail])


class Graph:
    """What was queued while it was captured."""

    def __init__(self, streams: RecordedStreams) -> None:
        self.streams = streams
        self.work: list[Callable[[], object]] = []

    def replay(self) -> None:
        """In the stream that is the caller's now."""
        before, _USING[:] = _USING[:], [self.streams.current()]
        for work in self.work:
            work()
        _USING[:] = before


class RecordedStreams:
    """One device of a world."""

    def __init__(self, world: World, device: str = "cuda:0") -> None:
        self.world, self._device = world, device
        self._side = RecordedStream(self, "side")
        self._caller = RecordedStream(self, "caller")
        self._using: list[RecordedStream] = []
        self._kernels: dict[str, Any] = {}
        self._capture: Graph | None = None

    @property
    def device(self) -> str:
        return self._device

    def current(self) -> Any:
        return self._caller

    def capturing(self) -> bool:
        return self._capture is not None

    def side(self) -> Any:
        return self._side

    def event(self, name: str, /, *, timed: bool = False) -> Any:
        return RecordedEvent(self.world, name)

    def other(self) -> RecordedStream:
        """A second stream that a caller may have."""
        return RecordedStream(self, "caller")

    @contextmanager
    def within(self, stream: RecordedStream) -> Iterator[None]:
        """The caller goes on in another stream."""
        before, self._caller = self._caller, stream
        yield
        self._caller = before

    @contextmanager
    def use(self, stream: Any, /) -> Iterator[None]:
        if self.world.dropped("launch in the device"):
            yield
            return
        before = _USING[:]
        _USING[:] = [stream]
        try:
            yield
        finally:
            _USING[:] = before

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        self._capture = Graph(self)
        yield self._capture
        self._capture = None

    def kernel(self, name: str, /) -> Any:
        # Threads of the system only where a barrier asks for them: they are slow.
        parallel = name == "move_blocks_indirect"
        shim = cuda_shim.kernel(name, parallel=parallel)

        def launch(grid: Any, block: Any, args: Any) -> None:
            # What a driver copies when it is called: every argument by value.
            values = tuple(a.copy() if isinstance(a, np.ndarray) else a for a in args)
            if parallel:
                grid, block = (min(grid[0], 2),), (32,)
            if self._capture is not None:
                self._capture.work.append(lambda: self._launch(name, shim, grid, block, values))
            else:
                self._launch(name, shim, grid, block, values)

        return self._kernels.setdefault(name, launch)

    def zeros(self, num_bytes: int, /) -> Any:
        self.world.call()
        # Words behind it belong to nobody else.
        array = np.zeros(num_bytes + 256, np.uint8)
        skip = -array.ctypes.data % 256
        self.world.keep(array)
        start, world = array.ctypes.data + skip, self.world
        world._buffers.append((start, start + num_bytes, self))
        given = array[skip : skip + num_bytes]
        places = words(start, range(-(-num_bytes // 4)))

        def freed() -> None:  # and whoever gets it next may write it at once
            world.host("host gives device memory back", writes=places)

        weakref.finalize(given, freed).atexit = False
        return torch.from_numpy(given)

    def pinned(self, num_bytes: int, /) -> Any:
        self.world.call()
        assert num_bytes % 4 == 0
        array = np.zeros(num_bytes // 4, np.uint32)
        address, world = array.ctypes.data, self.world
        world._pinned[address] = (weakref.ref(array), array.copy())
        places = words(address, range(len(array)))

        def freed() -> None:
            world._pinned.pop(address, None)
            world.host("host gives staging back", writes=places)

        weakref.finalize(array, freed).atexit = False
        return torch.from_numpy(array.view(np.uint8))

    def upload(self, stream: Any, to: Any, source: Any, /) -> None:
        self.world.call()
        from_, at, size = source.data_ptr(), to.data_ptr(), len(source)
        assert len(to) == size
        self._on_device(stream, "upload", [at])
        target = to.numpy()

        def run() -> None:
            target[:] = np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(from_))

        count = -(-size // 4)
        self.world.queue(
            stream,
            "upload",
            run,
            reads=words(from_, range(count)),
            writes=words(at, range(count)),
        )

    def work(self, what: str, run: Callable[[], tuple[set[Place], set[Place]]]) -> None:
        """A kernel of the caller's: it returns what it read and wrote."""
        if self._capture is not None:
            self._capture.work.append(lambda: self._work(what, run))
        else:
            self._work(what, run)

    def _work(self, what: str, run: Callable[[], tuple[set[Place], set[Place]]]) -> None:
        self.world.call()
        number = len(self.world.nodes)

        def noted() -> None:
            node = self.world.nodes[number]
            node.reads, node.writes = run()

        assert self.world.queue(self._caller, what, noted) == number

    def _on_device(self, stream: RecordedStream, what: str, addresses: list[int]) -> None:
        for address in addresses:
            owner = self.world.owner(address)
            if owner is not stream.owner:
                self.world.errors.append(
                    f"{what} on {stream.owner.device}, memory of {owner.device}"
                )

    def _launch(self, name: str, shim: Any, grid: Any, block: Any, args: Any) -> None:
        self.world.call()
        # Without `use`, whatever device and stream happen to be current: here the first device's.
        stream = _USING[-1] if _USING else self.world.streams[1]
        reads, writes, touched = SETS[name](self.world, args)
        self._on_device(stream, name, touched)
        self.world.queue(stream, name, lambda: shim(grid, block, args), reads=reads, writes=writes)


_USING: list[RecordedStream] = []
"""What launches go to: of the thread, not of a device, as the current device is."""

Sets = tuple[set[Place], set[Place], list[int]]


def _array(address: int, count: int, dtype: Any) -> Any:
    """A copy of memory."""
    kind = ctypes.c_ubyte * (count * np.dtype(dtype).itemsize)
    return np.frombuffer(bytes(kind.from_address(address)), dtype)


def _moved(world: World, base: int, rows: int, num_rows: int, pairs: Any) -> Sets:
    reads = words(rows, range(10 * num_rows))
    reads |= {world.block(base, int(source)) for source, _ in pairs}
    writes = {world.block(base, int(target)) for _, target in pairs}
    return reads, writes, [base, rows]


def _move_blocks(world: World, args: Any) -> Sets:
    base, rows, num_rows, _, count, moves = args
    pairs = moves["pairs"][0, : int(count)]
    return _moved(world, int(base), int(rows), int(num_rows), pairs)


def _move_blocks_indirect(world: World, args: Any) -> Sets:
    base, rows, num_rows, _, buffer, _, refused = args
    buffer = int(buffer)
    count = int(_array(buffer, 1, np.uint32)[0]) if world.at_once else 0
    pairs = _array(buffer + 8, 2 * count, np.uint32).reshape(-1, 2) if count else []
    reads, writes, touched = _moved(world, int(base), int(rows), int(num_rows), pairs)
    reads |= words(buffer, range(2 + 2 * count))
    writes |= words(buffer, range(2)) if count else set()
    return reads, writes, [*touched, buffer, int(refused)]


def _update_tables(world: World, args: Any) -> Sets:
    tables, entries, count = (int(value) for value in args)
    if count == 0:
        return set(), set(), [tables]
    where = _array(entries, 2 * count, np.uint32)[::2]
    return words(entries, range(2 * count)), words(tables, where), [tables]


def _write_kv(world: World, args: Any) -> Sets:
    slots, count, block_size, _, _, k_pool, _, _ = args
    slots, count, size = int(slots), int(count), int(block_size)
    if count == 0:
        return set(), set(), []
    writes: set[Place] = set()
    if world.at_once:
        taken = _array(slots, count, np.int64)
        writes = {world.block(int(k_pool), int(slot) // size) for slot in taken if slot >= 0}
    return words(slots, range(2 * count)), writes, [slots, int(k_pool)]


SETS: dict[str, Callable[[World, Any], Sets]] = {
    "move_blocks": _move_blocks,
    "move_blocks_indirect": _move_blocks_indirect,
    "update_tables": _update_tables,
    "write_kv": _write_kv,
}


def checked(streams: RecordedStreams) -> cuda.Streams:
    """mypy says whether it is one."""
    return streams
