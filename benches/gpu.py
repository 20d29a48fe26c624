"""What one GPU does with the kernels and the mover: rates, passes, graphs, what runs beside them.

``benches/gpu.sh`` runs it. What lives here: the measurements, each a function that yields rows, and
the clock that stops them. What never lives here: a claim; a row is what this run measured.

    python benches/gpu.py [--rehearse] [--seconds S] [--threads FILE] [--json FILE]

``--threads`` names what ``benches/pool/`` measured here (JSON lines); the table shows it.

With ``--rehearse`` the same code runs tiny sizes in the CPU shim of the tests: it shows that the
script works, its figures mean nothing, and the table says so.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kvmmu import KVCache, Storage, cuda
from kvmmu.cuda.launches import ChecksumBlocks, MoveBlocks, RegionTable
from kvmmu.storage import Region

import pool
from harness import ROOT, Goal, Row

KIB = 1024


class Device:
    """Where it runs, and the clock.

    Args:
        rehearse: in the shim, with sizes divided by ``shrink``.
        seconds: measurements begin no later than so many seconds from now.
    """

    def __init__(self, rehearse: bool, seconds: float) -> None:
        self.rehearse = rehearse
        self.end = time.monotonic() + seconds
        if rehearse:
            sys.path.insert(0, str(ROOT))
            from tests.cuda_shim import ShimStreams

            self.streams: cuda.Streams = ShimStreams()
            self.torch = torch.device("cpu")
        else:
            self.streams = cuda.open_streams("cuda:0")
            self.torch = torch.device("cuda", 0)

    @property
    def name(self) -> str:
        return "the CPU shim" if self.rehearse else torch.cuda.get_device_name(0)

    def small(self, size: int, rehearsed: int) -> int:
        return rehearsed if self.rehearse else size

    def late(self) -> bool:
        return time.monotonic() > self.end

    def bytes(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self.torch)

    def busy(self, cycles: int = 400_000) -> None:
        """Keeps the current stream busy while the host queues what is to be timed."""
        if not self.rehearse:
            cuda_of_torch: Any = torch.cuda  # not annotated there
            cuda_of_torch._sleep(cycles)

    def synchronize(self) -> None:
        if not self.rehearse:
            torch.cuda.synchronize()

    def us(self, work: Callable[[], object], repeats: int = 20) -> float:
        """Median microseconds of the device for what ``work`` queues in the current stream."""
        stream = self.streams.current()
        first, last = (self.streams.event(name, timed=True) for name in ("first", "last"))
        found = []
        for turn in range(self.small(repeats, 1) + 1):
            self.busy()
            stream.record(first)
            work()
            stream.record(last)
            last.synchronize()
            if turn:  # the first loads and warms
                found.append(1e3 * last.elapsed_ms(first))
        return statistics.median(found)

    def storage(self, pieces: int, piece_bytes: int, blocks: int) -> tuple[Storage, torch.Tensor]:
        """A pool of ``pieces`` regions, one behind the other in one allocation."""
        memory = self.bytes(pieces * piece_bytes * (blocks + 1))
        base = memory.data_ptr()
        where = "cpu" if self.rehearse else "cuda:0"
        return Storage(
            [
                Region(
                    base + piece * piece_bytes * (blocks + 1),
                    piece_bytes,
                    piece_bytes,
                    blocks + 1,
                    memory,
                    where,
                )
                for piece in range(pieces)
            ],
            blocks,
        ), memory

    def rows_of(self, table: RegionTable) -> torch.Tensor:
        made: torch.Tensor = self.streams.zeros(table.rows.nbytes)
        made.copy_(torch.from_numpy(table.rows.reshape(-1).view(np.uint8).copy()))
        return made

    def mover(self, storage: Storage) -> tuple[Callable[[Any], object], Any]:
        """``move_blocks`` in the current stream, and what has to be kept."""
        table = RegionTable.of(storage)
        rows = self.rows_of(table)
        launch = MoveBlocks(self.streams.kernel("move_blocks"), table, rows.data_ptr())

        def move(pairs: Any) -> None:
            with self.streams.use(self.streams.current()):
                launch(pairs)

        return move, rows


def scattered(blocks: int, moves: int, seed: int = 0) -> Any:
    order = np.random.default_rng(seed).permutation(blocks)[: 2 * moves].astype(np.uint32)
    return np.ascontiguousarray(order.reshape(moves, 2))


def peak(device: Device) -> float:
    """GB/s read and written by one large copy of torch's."""
    size = device.small(1 << 30, 1 << 16)
    source, target = device.bytes(size), device.bytes(size)
    return 2 * size / device.us(lambda: target.copy_(source)) / 1e3


def copies(device: Device) -> Iterator[Row]:
    best = peak(device)
    yield Row("large copy of torch's", "GB/s", best)
    for kib in (4, 8, 16, 32, 655):
        pieces = max(1, device.small(5120, 8) // kib)
        storage, memory = device.storage(pieces, kib * KIB, device.small(128, 8))
        move, kept = device.mover(storage)
        pairs = scattered(storage.num_blocks, device.small(32, 2))
        moved = 2 * len(pairs) * storage.block_bytes
        rate = moved / device.us(partial(move, pairs)) / 1e3
        goal = Goal(0.8, of="ratio", least=True)
        yield Row(f"move_blocks, pieces of {kib} KiB", "GB/s", rate, "large copy", best, goal)
        del memory, kept


def blocks_of_an_80_layer_model(device: Device) -> Iterator[Row]:
    pieces, blocks = device.small(160, 4), device.small(256, 16)
    storage, memory = device.storage(pieces, 32 * KIB, blocks)
    move, kept = device.mover(storage)
    pairs = scattered(blocks, device.small(32, 4))
    ours = device.us(lambda: move(pairs))
    view = memory.view(pieces, blocks + 1, 32 * KIB)
    ids = torch.from_numpy(pairs.astype(np.int64)).to(device.torch)

    def index() -> None:
        view[:, ids[:, 1]] = view[:, ids[:, 0]]

    theirs = device.us(index, 5)
    name = f"{len(pairs)} blocks of {storage.block_bytes / 1e6:.2f} MB"
    yield Row(name, "us", ours, "torch indexing", theirs, Goal(90))

    def one_by_one() -> None:
        for source, target in pairs.tolist():
            for piece in range(pieces):
                view[piece, target].copy_(view[piece, source], non_blocking=True)

    def with_host(work: Callable[[], object]) -> float:
        device.synchronize()
        start = time.perf_counter()
        work()
        device.synchronize()
        return 1e6 * (time.perf_counter() - start)

    ours = statistics.median(with_host(lambda: move(pairs)) for _ in range(device.small(20, 1)))
    theirs = with_host(one_by_one)
    yield Row(f"{name}, with the host", "us", ours, "a cudaMemcpyAsync a piece", theirs)
    del kept


def passes(device: Device) -> Iterator[Row]:
    """A whole pass: plan, begin, queue, commit on the host; the copies on the device."""
    where: dict[str, Any] = (
        {"streams": device.streams} if device.rehearse else {"device": device.torch}
    )
    eager: dict[str, Any] = {"compaction_start": 0.0, "compaction_stop": 0.0, "budget_blocks": 32}
    layers, blocks = device.small(80, 2), device.small(1024, 256)
    cache: Any = KVCache(
        layers, 8, 128, torch.bfloat16, blocks, placement="scatter", **eager, **where
    )
    cache.warm_up()
    opened = [cache.open(list(range(64 * n, 64 * n + 64))) for n in range(blocks // 8)]
    mmu, host, whole, moved = cache.mmu, [], [], 0
    for turn in range(device.small(12, 3)):
        device.synchronize()
        start = time.perf_counter()
        count = cache.compact()
        host.append(1e6 * (time.perf_counter() - start))
        cache.mover.synchronize()
        if count and turn:
            whole.append(1e6 * (time.perf_counter() - start))
            moved = max(moved, count)
    if whole:
        name = f"a pass of up to {moved} blocks of {cache.storage.block_bytes / 1e6:.2f} MB"
        yield Row(f"{name}, until copied", "us", statistics.median(whole), goal=Goal(200))
        yield Row(f"{name}, host alone", "us", statistics.median(host[1:]))
    assert mmu.states()["in_use"] > 0
    for sequence in opened:
        sequence.close()


def graphs(device: Device) -> Iterator[Row]:
    """What ``move_blocks_indirect`` costs in a captured graph when there is nothing to move."""
    storage, memory = device.storage(4, 32 * KIB, 64)
    mover = cuda.CUDAMover(storage, streams=device.streams)
    moves = mover.graph_moves(32, thread_blocks=device.small(132, 2))
    mover.warm_up()
    count = device.small(200, 2)

    def launches() -> None:
        for _ in range(count):
            moves.launch()

    if device.rehearse:
        yield Row("zero moves in a graph", "us", device.us(launches) / count, goal=Goal(3))
        return
    cuda_of_torch: Any = torch.cuda  # not annotated there
    side = cuda_of_torch.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        launches()
    yield Row("zero moves in a graph", "us", device.us(graph.replay) / count, goal=Goal(3))
    del memory


def beside(device: Device) -> Iterator[Row]:
    """How much longer work of the caller's takes while blocks are copied beside it."""
    storage, memory = device.storage(device.small(160, 4), 32 * KIB, device.small(256, 16))
    pairs = scattered(storage.num_blocks, device.small(32, 4))
    mover = cuda.CUDAMover(storage, streams=device.streams)
    width = device.small(8192, 64)
    a = torch.ones(width, width, dtype=torch.bfloat16, device=device.torch)
    big = device.bytes(device.small(4 << 30, 1 << 16)).view(torch.int64)
    kinds = {
        "a prefill (matrix products)": partial(torch.matmul, a, a),
        "a decode (reading memory)": partial(torch.sum, big),
    }
    for name, work in kinds.items():
        alone = device.us(work, 10)

        def with_copy(work: Callable[[], object] = work) -> None:
            copying = mover.start(pairs)
            work()
            mover.finish(copying)

        both = device.us(with_copy, 10)
        yield Row(f"{name} beside a copy of {len(pairs)} blocks", "us", both, "alone", alone)
    del memory


def reach(device: Device) -> Iterator[Row]:
    """One reading pass over blocks that lie scattered in the pool, against blocks side by side:
    what the reach of the device's TLB costs."""
    kernel = device.streams.kernel("checksum_blocks")
    if not device.rehearse:
        torch.cuda.empty_cache()  # what the parts before have left
    free = 1 << 30 if device.rehearse else torch.cuda.mem_get_info()[0]
    for gigabytes in (16, 60, 130):
        for kib in (4, 16, 32):
            pieces = device.small(16, 2)
            blocks = device.small(gigabytes * 10**9, 1 << 20) // (pieces * kib * KIB) - 1
            if device.late() or pieces * kib * KIB * (blocks + 1) > 0.97 * free:
                continue
            storage, memory = device.storage(pieces, kib * KIB, blocks)
            table = RegionTable.of(storage)
            rows = device.rows_of(table)
            read = min(blocks, max(1, device.small(4 << 30, 1 << 18) // storage.block_bytes))
            sums = device.streams.zeros(8 * read)
            rates = []
            order = np.random.default_rng(0).permutation(blocks)[:read].astype(np.uint32)
            for ids in (order, np.arange(read, dtype=np.uint32)):
                there = torch.from_numpy(ids.view(np.uint8).copy()).to(device.torch)
                launch = ChecksumBlocks(kernel, table, rows.data_ptr(), max_thread_blocks=1)

                def work(
                    launch: Any = launch, ids: Any = ids, there: Any = there, sums: Any = sums
                ) -> None:
                    with device.streams.use(device.streams.current()):
                        launch(ids, sums.data_ptr(), there.data_ptr())

                rates.append(read * storage.block_bytes / device.us(work, 5) / 1e3)
            yield Row(
                f"reading scattered blocks, {gigabytes} GB, pieces of {kib} KiB",
                "GB/s",
                rates[0],
                "side by side",
                rates[1],
            )
            del memory, rows, sums
            if not device.rehearse:
                torch.cuda.empty_cache()


def threads(figures: pool.Figures) -> Iterator[Row]:
    """One block from the pool by 1, 2, 4, ... threads at a time, beside the fastest rival."""
    for pattern in ("repeat", "bulk"):
        for count in (1, 2, 4, 8, 16):
            ours = figures.pair(pool.SCATTERED, pattern, count, pool.OURS)
            if ours is None:
                continue
            pairs = {who: figures.pair(pool.SCATTERED, pattern, count, who) for who in pool.RIVALS}
            there = {who: pair for who, pair in pairs.items() if pair is not None}
            best = min(there, key=there.__getitem__, default=None)
            name = f"{pool.SCATTERED}, {pattern}, {count} thread{'s' * (count > 1)}"
            yield Row(name, "ns", ours, best, None if best is None else there[best])


PARTS = (copies, blocks_of_an_80_layer_model, passes, graphs, beside, reach)


def show(rows: list[Row], device: Device, notes: list[str]) -> None:
    """A plain table: this machine may have no rich."""
    print(f"\n{device.name}" + (": A REHEARSAL, no figure means anything" * device.rehearse))
    line = "{:<62} {:>6} {:>10} {:>26} {:>10} {:>7}  {}"
    print(line.format("measure", "unit", "kvmmu", "beside", "its", "ratio", "goal"))
    for row in rows:
        their = "-" if row.rival_value is None else f"{row.rival_value:.4g}"
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        met = {True: "met", False: "NOT MET", None: ""}[row.met]
        goal = f"{row.goal} {met}" if row.goal else ""
        figure = f"{row.kvmmu:.4g}"
        print(line.format(row.measure, row.unit, figure, row.rival or "-", their, ratio, goal))
    for note in notes:
        print(f"note: {note}")


def keep(path: Path, rows: list[Row], device: Device, notes: list[str]) -> None:
    """What was measured so far: whoever ends this run early has that."""
    found = {
        "device": device.name,
        "rehearsal": device.rehearse,
        "when": time.strftime("%Y-%m-%d %H:%M:%S"),
        "torch": torch.__version__,
        "rows": [
            {
                "measure": row.measure,
                "unit": row.unit,
                "kvmmu": row.kvmmu,
                "rival": row.rival,
                "rival_value": row.rival_value,
                "goal": None if row.goal is None else str(row.goal),
                "met": row.met,
            }
            for row in rows
        ],
        "notes": notes,
    }
    path.write_text(json.dumps(found, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="benches/gpu.py")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes in the CPU shim")
    parser.add_argument("--seconds", type=float, default=110, help="begin nothing later")
    parser.add_argument("--threads", type=Path, metavar="FILE", help="what pool-bench printed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too")
    options = parser.parse_args(arguments)
    device = Device(options.rehearse, options.seconds)
    rows: list[Row] = []
    notes: list[str] = []
    if options.threads:
        try:
            rows += threads(pool.read(options.threads.read_text()))
            if not rows:
                notes.append("threads were not measured")
        except (OSError, ValueError, KeyError) as error:
            notes.append(f"threads failed: {type(error).__name__}: {error}")
    for part in PARTS:
        if device.late():
            notes.append(f"no time was left for: {part.__name__}")
            continue
        try:
            for row in part(device):
                rows.append(row)
                print(f"{row.measure}: {row.kvmmu:.4g} {row.unit}", flush=True)
        except Exception as error:  # the other parts are worth having
            notes.append(f"{part.__name__} failed: {type(error).__name__}: {error}")
        if options.json:
            keep(options.json, rows, device, notes)
    if options.json:
        keep(options.json, rows, device, notes)
    show(rows, device, notes)
    return 1 if any("failed" in note for note in notes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
