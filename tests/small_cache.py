"""A small KVCache with contents, and a device that runs what is queued as late as it is told.

What lives here: what each position should hold, in any layout and dtype, and the kernels of a step
(write, then read back through the rows that they were given) as work on a queue. The queue is in
order, as a stream is; copies on write and moves are queued on it as well.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from .machine import Sequence as Text

torch = pytest.importorskip("torch")

from kvmmu import KVCache, Lease  # noqa: E402
from kvmmu import Sequence as Handle  # noqa: E402
from kvmmu import Step as Handout  # noqa: E402

ROWS = 8
TOKENS = 64


class Device:
    """An in-order queue. Not late: everything runs at once."""

    def __init__(self, late: bool = False) -> None:
        self.late = late
        self.queue: deque[Callable[[], object]] = deque()
        self.queued = self.ran = 0
        self.copies = 0
        """Place behind the last copy or move: who does not go through the queue waits for those,
        and for no kernel."""

    def put(self, work: Callable[[], object], *, copies: bool = False) -> None:
        self.queue.append(work)
        self.queued += 1
        if copies:
            self.copies = self.queued
        if not self.late:
            self.run()

    def run(self, upto: int | None = None) -> None:
        """Runs the queue, or until so many have run since the start."""
        while self.ran < (self.queued if upto is None else upto):
            self.queue[0]()
            self.queue.popleft()
            self.ran += 1

    def event(self) -> Event:
        """Over when all that is queued by now has run."""
        return Event(self, self.queued)


@dataclass
class Event:
    """A place in the queue."""

    device: Device
    place: int

    def query(self) -> bool:
        return self.device.ran >= self.place

    def synchronize(self) -> None:
        self.device.run(self.place)


class Broken(Exception):
    """What a mover that dies raises."""


class DeviceMover:
    """Queues copies; or, while ``fails_after`` is a number, makes so many at once and dies."""

    def __init__(self, device: Device, mover: Any) -> None:
        self.device = device
        self.mover = mover
        self.fails_after: int | None = None
        self.storage = mover.storage

    def move(self, pairs: Any) -> None:
        if self.fails_after is not None:
            self.device.run()
            self.mover.move(pairs[: self.fails_after])
            raise Broken
        pairs = pairs.copy()
        self.device.put(lambda: self.mover.move(pairs), copies=True)


class Landlord:
    """Whose memory it is: fills what was given back with garbage at once, past every kernel that is
    queued and behind the copies, and what is taken back with other garbage."""

    def __init__(self, device: Device, page_bytes: int) -> None:
        self.device = device
        self.page_bytes = page_bytes
        self.gone: set[int] = set()
        """Pages."""
        self.fails = False

    def give_back(self, ranges: Any) -> None:
        if self.fails:
            raise Broken
        pages = self._pages(ranges)
        assert not self.gone & pages, "these pages are gone already"
        self.gone |= pages
        self.device.run(max(self.device.copies, self.device.ran))
        self._fill(ranges, 0xDB)

    def take_back(self, ranges: Any) -> None:
        if self.fails:
            raise Broken
        pages = self._pages(ranges)
        assert pages <= self.gone, "these pages are not gone"
        self.gone -= pages
        self._fill(ranges, 0xEE)

    def _pages(self, ranges: Any) -> set[int]:
        assert len(ranges) and (ranges % self.page_bytes == 0).all() and (ranges > 0).all()
        each = [range(at, at + size, self.page_bytes) for at, size in ranges.tolist()]
        pages = list(itertools.chain(*each))
        assert len(set(pages)) == len(pages), "a page is listed twice"
        return set(pages)

    def _fill(self, ranges: Any, byte: int) -> None:
        for address, size in ranges.tolist():
            ctypes.memset(address, byte, size)


def contents(values: Sequence[int], layer: int, half: int, like: Any) -> Any:
    """KV of positions with these values: [n, heads, dim] of the heads, dim and dtype of ``like``
    [..., heads, dim], any bytes, NaN among them."""
    heads, dim = like.shape[-2:]
    if not values:
        return like.new_empty((0, heads, dim))
    size = heads * dim * like.element_size()
    seeds = np.array(values, np.uint64)[:, None] * np.uint64(4 * layer + 2 * half + 1)
    place = np.arange(size, dtype=np.uint64)
    found = ((seeds >> (place % 8 * 8)) + place).astype(np.uint8)
    return torch.from_numpy(found).view(like.dtype).view(len(values), heads, dim)


def raw(tensor: Any) -> Any:
    """Its bytes, so that NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8)


def close_all(handles: dict[int, Handle]) -> None:
    """So that a test may leave its sequences open."""
    for handle in handles.values():
        handle._open = False


class SmallCache:
    """``SmallCache(n, t)``: n blocks of t tokens, and what each position of each sequence holds."""

    def __init__(
        self,
        num_blocks: int = 16,
        block_size: int = 4,
        *,
        cache: Any = None,
        late: bool = False,
        dim: int = 4,
        dtype: Any = torch.float32,
        page_bytes: int = 64,
        **config: Any,
    ) -> None:
        self.device = Device(late)
        self.landlord = Landlord(self.device, page_bytes)
        if cache is None:
            config = {"max_batch": ROWS, "max_tokens": TOKENS, **config}
            config.setdefault("return_memory", self.landlord)
            cache = KVCache(2, 2, dim, dtype, num_blocks, block_size=block_size, **config)
        self.cache: Any = cache
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.mover = self.cache.mover = DeviceMover(self.device, cache.mover)
        self.texts: dict[int, Text] = {}
        self.handles: dict[int, Handle] = {}
        weakref.finalize(self, close_all, self.handles)
        self._fresh = itertools.count(1)
        self._unknown = itertools.count(-1, -1)

    def fresh(self, count: int) -> list[int]:
        """Tokens that no other sequence has."""
        return list(itertools.islice(self._fresh, count))

    # -- sequences ---------------------------------------------------------------------------

    def open(self, tokens: int | list[int], *, write: bool = True) -> Handle:
        tokens = self.fresh(tokens) if isinstance(tokens, int) else tokens
        handle: Handle = self.cache.open(tokens)
        text = Text(b"", {}, self.block_size)
        text.extend(tokens)
        self.handles[handle.id], self.texts[handle.id] = handle, text
        if write and tokens:
            self.step([handle], [handle.num_tokens - handle.num_scheduled])
        return handle

    def fork(self, handle: Handle) -> Handle:
        child = handle.fork()
        self.handles[child.id], self.texts[child.id] = child, self.texts[handle.id].fork()
        return child

    def append(self, handle: Handle, tokens: int | list[int]) -> None:
        tokens = self.fresh(tokens) if isinstance(tokens, int) else tokens
        handle.append(tokens)
        self.texts[handle.id].extend(tokens)

    def truncate(self, handle: Handle, length: int) -> None:
        handle.truncate(length)
        self.texts[handle.id].cut(length)

    def close(self, *handles: Handle) -> None:
        for handle in handles:
            handle.close()
            del self.handles[handle.id], self.texts[handle.id]

    # -- steps -------------------------------------------------------------------------------

    def launch(
        self,
        handles: list[Handle],
        lens: list[int] | None = None,
        *,
        tokens: list[int] | None = None,
        known: bool = True,
        defer: bool = False,
        step: Handout | None = None,
    ) -> Any:
        """Prepares a step (a new one if none is given) and queues its kernels; it stays open."""
        own = step is None
        step = self.cache.begin_step() if step is None else step
        assert step is not None
        counts = [1] * len(handles) if lens is None else lens
        lacking = [
            max(0, handle.num_scheduled + count - handle.num_tokens)
            for handle, count in zip(handles, counts, strict=True)
        ]
        new = self.fresh(sum(lacking)) if tokens is None else tokens
        if not known:
            new = list(itertools.islice(self._unknown, sum(lacking)))
        try:
            step.prepare(
                handles,
                query_lens=lens,
                new_tokens=new if known else None,
                defer_copies=defer,
            )
        except BaseException:
            if own:
                step.cancel()
                self.cache.end_step(step)
            raise
        batch = step.batch
        assert batch is not None
        if defer:
            batch.run_copies()
        rest = iter(new)
        for handle, count in zip(handles, lacking, strict=True):
            self.texts[handle.id].extend(list(itertools.islice(rest, count)))
        self.queue_kernels(batch, handles, counts)
        return step

    def queue_kernels(self, batch: Any, handles: list[Handle], counts: list[int]) -> None:
        """Write this step's tokens, garbage for padding; then read every row."""
        written: list[int] = []
        reads = []
        for row, (handle, count) in enumerate(zip(handles, counts, strict=True)):
            end = int(batch.seq_lens[row])
            values = self.texts[handle.id].values[:end]
            written += values[end - count :]
            reads.append((batch.block_table[row].clone(), list(values)))
        slots = batch._buffers.slot_mapping.clone()
        self.device.put(lambda: self.write(slots, written))

        def read() -> None:
            for row, values in reads:
                self.read(row, values)

        self.device.put(read)

    def halves(self, layer: int) -> list[Any]:
        return [half for half in self.cache.layers.logical(layer) if half is not None]

    def write(self, slots: Any, values: list[int]) -> None:
        for layer in range(len(self.cache.layers)):
            kv = [contents(values, layer, n, like) for n, like in enumerate(self.halves(layer))]
            for at, half in enumerate(kv):
                pad = torch.full((len(slots) - len(half), *half.shape[1:]), 0.0)
                kv[at] = torch.cat([raw(half), 0xFF - raw(pad.to(half.dtype))]).view(half.dtype)
            self.cache.layers.write(layer, kv[0], kv[1] if len(kv) > 1 else None, slots)

    def read(self, row: Any, values: list[int]) -> None:
        """Compares the positions behind a row of blocks with what they should hold."""
        for layer in range(len(self.cache.layers)):
            found = self.cache.layers.gather(layer, row, len(values))
            self.compare(layer, found, values)

    def compare(self, layer: int, found: Any, values: list[int]) -> None:
        for half, like in enumerate(self.halves(layer)):
            expected = contents(values, layer, half, like)
            assert torch.equal(raw(found[half]), raw(expected)), f"layer {layer}, half {half}"

    def step(self, handles: list[Handle], lens: list[int] | None = None, **how: Any) -> None:
        """A whole step: launched, written, run, ended."""
        step = self.launch(handles, lens, **how)
        step.written()
        self.device.run()
        self.cache.end_step(step)

    # -- checks ------------------------------------------------------------------------------

    def check(self) -> None:
        """Every open sequence reads its own bytes, and all invariants hold."""
        for number, handle in self.handles.items():
            written = handle.num_written
            values = self.texts[number].values[:written]
            row = torch.from_numpy(handle.block_table().astype(np.int64))
            self.read(row, values)
            for layer in range(len(self.cache.layers) if self.cache.layers.can["views"] else 0):
                views = self.cache.views(handle, layer)
                pairs = zip(*views, strict=True) if views else [(), ()]
                joined = [
                    None if None in part else torch.cat(part)[:written] if part else None
                    for part in pairs
                ]
                if views:
                    self.compare(layer, joined, values)
        self.cache.validate()

    def leased(self, lease: Lease) -> list[Any]:
        """Copies of all bytes of its blocks."""
        blocks = torch.from_numpy(lease.blocks)
        return [
            raw(half)[blocks].clone()
            for layer in range(len(self.cache.layers))
            for half in self.halves(layer)
        ]

    def states(self) -> dict[str, int]:
        found: dict[str, int] = self.cache.mmu.states()
        return found

    def references(self) -> list[int]:
        """Of each usable block."""
        blocks = np.arange(self.num_blocks + 1, dtype=np.int64)
        found: list[int] = self.cache.mmu.references(
            blocks[blocks != self.cache.mmu.null_block]
        ).tolist()
        return found

    def everything(self) -> Any:
        """All that can be seen of the state."""
        mmu = self.cache.mmu
        ids = sorted(mmu.sequences().tolist())
        return (
            mmu.states(),
            [(n, mmu.block_table(n).tolist(), mmu.info(n).num_scheduled) for n in ids],
            [mmu.info(n).num_tokens for n in ids],
            self.references(),
            mmu.num_leases(),
        )
