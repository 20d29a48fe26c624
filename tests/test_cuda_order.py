"""The order of work on a CUDA device, proved on the executor that ships, without a device.

``recorded.py`` records what ``KVCache``, ``CUDAMover``, ``GraphMoves`` and the tables queue, and
finds every pair of accesses that nothing orders. Each rule of the order is a wait; a run without
races, and the same run with that one wait left out, which has to have some, prove together that the
wait is there, that it is enough, and that the proof would see it missing. The same runs move real
bytes under schedules that are as unkind as the waits allow.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvmmu import (  # noqa: E402
    InvalidConfig,
    InvalidPlan,
    InvalidStep,
    KVCache,
    LimitExceeded,
    Mover,
    Storage,
    compact,
    cuda,
)

from . import cuda_shim  # noqa: E402
from .conftest import ROOT  # noqa: E402
from .recorded import Place, RecordedStreams, World, words  # noqa: E402
from .small_cache import contents, raw  # noqa: E402
from .texts import Texts  # noqa: E402

pytestmark = pytest.mark.skipif(cuda_shim.compiler() is None, reason="needs g++")

DEPTHS = (1, 2, 4)
LAYERS, BLOCK, ROWS, TOKENS = 2, 4, 6, 48
EAGER: dict[str, Any] = {
    "placement": "scatter",
    "compaction_start": 0.0,
    "compaction_stop": 0.0,
    "budget_blocks": 4,
}


class Serving(Texts):
    """A serving loop over a recorded device: the shipped cache, and attention that looks."""

    def __init__(
        self, world: World, depth: int = 1, *, num_blocks: int = 48, **options: Any
    ) -> None:
        self.world, self.streams = world, RecordedStreams(world)
        options = {**EAGER, "auto_compact": True, "steps_in_flight": depth, **options}
        cache = KVCache(
            LAYERS,
            2,
            4,
            torch.float32,
            num_blocks,
            block_size=BLOCK,
            max_batch=ROWS,
            max_tokens=TOKENS,
            max_sequence_tokens=64,
            streams=self.streams,
            **options,
        )
        super().__init__(cache)
        world.pool(self.cache.storage, self.streams)
        self.layers, self.base = cache.layers, cache.storage.regions[0].address
        self.depth = depth
        self.moved_at_start = self.cache.mmu.stats()["moves_committed"]
        self.events = False  # whether steps end by events of the engine's
        self.own = [self.streams.event("engine") for _ in range(depth)]

    @property
    def moved(self) -> int:
        count: int = self.cache.mmu.stats()["moves_committed"]
        return count

    # -- sequences ---------------------------------------------------------------------------

    def close_all(self) -> None:
        self.close(*list(self.texts))

    # -- steps -------------------------------------------------------------------------------

    def prepare(self, handles: list[Any]) -> tuple[Any, Any, list[int]]:
        """A step with what is left of each prompt, or one new token."""
        step = self.cache.begin_step()
        batch, lens = self.schedule(step, handles)
        return step, batch, lens

    def kernels(self, batch: Any, handles: list[Any], lens: list[int]) -> None:
        """What a model queues: writes of KV, then attention over the tables."""
        ends = [one.num_scheduled for one in handles]
        values = [self.texts[one][:end] for one, end in zip(handles, ends, strict=True)]
        new = [v for row, n in zip(values, lens, strict=True) for v in row[len(row) - n :]]
        for layer in range(LAYERS):
            k, v = self.cache.layers.logical(layer)
            kv = contents(new, layer, 0, k), contents(new, layer, 1, v)
            self.world.keep(*kv)
            self.cache.write(layer, *kv, batch)
        self.attend(batch, values)

    def attend(self, batch: Any, values: list[list[int]]) -> None:
        csr = batch.csr()
        table, lens = batch.block_table, batch.seq_lens
        self.streams.work("attention", lambda: self.look(table, lens, csr, values))

    def look(self, table: Any, lens: Any, csr: Any, values: list[list[int]]) -> Any:
        """Reads every row as the device's tables have it, and compares."""
        reads: set[Place] = words(lens.data_ptr(), range(len(values)))
        reads |= words(csr.indptr.data_ptr(), range(len(values) + 1))
        for row, expected in enumerate(values):
            count = -(-len(expected) // BLOCK)
            blocks = table[row, :count].numpy().astype(np.int64)
            reads |= words(table[row].data_ptr(), range(count))
            start = int(csr.indptr[row])
            reads |= words(csr.indices.data_ptr(), range(start, start + count))
            same = np.array_equal(csr.indices[start : start + count].numpy(), blocks)
            if int(lens[row]) != len(expected) or not same:
                self.world.errors.append(f"row {row}: a table of another step")
                continue
            reads |= {self.world.block(self.base, int(block)) for block in blocks}
            for layer in range(LAYERS):
                found = self.layers.gather(layer, blocks, len(expected))
                for half, like in enumerate(self.layers.logical(layer)):
                    right = contents(expected, layer, half, like)
                    if not torch.equal(raw(found[half]), raw(right)):
                        self.world.errors.append(f"row {row}, layer {layer}: other bytes")
        return reads, set()

    def step(self, handles: list[Any]) -> None:
        step, batch, lens = self.prepare(handles)
        self.kernels(batch, handles, lens)
        self.end(step)

    def end(self, step: Any) -> None:
        step.written()
        if not self.events:
            self.cache.end_step(step)
            return
        self.own.append(self.own.pop(0))
        self.streams.current().record(self.own[-1])
        self.cache.end_step(step, self.own[-1])
        while self.cache.poll() >= self.depth:
            self.cache.synchronize()

    def finish(self) -> None:
        """Ends everything, and looks at what is left from the host."""
        self.cache.synchronize()
        self.cache._finish_moves()
        self.cache.mover.synchronize()
        self.cache.poll()
        self.world.finish()
        self.cache.validate()
        for handle, text in self.texts.items():
            blocks = handle.block_table().astype(np.int64)
            self.world.host_access("host reads", blocks, self.cache.storage, write=False)
            for layer in range(LAYERS):
                found = self.cache.layers.gather(layer, blocks, handle.num_written)
                for half, like in enumerate(self.cache.layers.logical(layer)):
                    right = contents(text[: handle.num_written], layer, half, like)
                    if not torch.equal(raw(found[half]), raw(right)):
                        self.world.errors.append(f"{handle}: other bytes at the end")
        self.close_all()


def churn(serving: Serving, turns: int = 8) -> None:
    """Sequences come, grow, fork and go: blocks are moved, copied on write and used again."""
    running: list[Any] = []
    for turn in range(turns):
        if not serving.cache.auto_compact:
            serving.cache.compact()  # behind the step before, whether that is over or not
        running.append(serving.open(5 + 3 * turn % 11))
        serving.step(running)
        if turn % 3 == 1:
            running.append(serving.fork(running[0]))
        serving.step(running)
        if len(running) > 3:
            serving.close(running.pop(0), running.pop(1))
            serving.step(running)
    assert serving.moved > 0, "nothing was moved: the run proves nothing"
    assert serving.cache.mmu.stats()["copied_on_write"] > 0


def use_every_block(serving: Serving) -> None:
    """Writes all blocks that are empty, and gives them back."""
    serving.cache.synchronize()
    taken = []
    while serving.cache.mmu.states()["available"] >= 4:
        taken.append(serving.open(16))
    for first in range(0, len(taken), 3):
        serving.step(taken[first : first + 3])
    serving.close(*taken)
    serving.cache.synchronize()


# -- runs ----------------------------------------------------------------------------------


def between_steps(world: World, depth: int) -> None:
    """Steps of one stream, copies between them."""
    serving = Serving(world, depth, auto_compact=False)
    churn(serving)
    serving.finish()


def by_itself(world: World, depth: int) -> None:
    """The same with ``auto_compact``."""
    serving = Serving(world, depth)
    churn(serving)
    serving.finish()


def engine_events(world: World, depth: int) -> None:
    """The same with events of the engine's."""
    serving = Serving(world, depth)
    serving.events = True
    churn(serving)
    serving.finish()


def overlap(world: World, depth: int) -> None:
    """Copies beside the step that is prepared."""
    serving = Serving(world, depth, copy="overlap")
    churn(serving)
    serving.finish()


def two_streams(world: World, depth: int) -> None:
    """Steps take turns in two streams of the engine's."""
    serving = Serving(world, depth)
    streams = [serving.streams.current(), serving.streams.other()]
    running: list[Any] = []
    for turn in range(18):
        with serving.streams.within(streams[turn % 2]):
            if turn % 2 == 0:
                running.append(serving.open(5 + turn % 7))
            if turn % 6 == 3:
                running.append(serving.fork(running[0]))
            serving.step(running)
            if len(running) > 3:
                serving.close(running.pop(0), running.pop(1))
    assert serving.moved > 0
    serving.finish()


def moved_elsewhere(world: World, depth: int) -> None:
    """A cache that is made in one stream; blocks are moved in a second, steps run in a third."""
    serving = Serving(world, depth, auto_compact=False)
    streams = [serving.streams.other() for _ in range(2)]
    running: list[Any] = []
    for turn in range(16):
        with serving.streams.within(streams[0]):
            serving.cache.compact()
        with serving.streams.within(streams[1]):
            if turn % 2 == 0:
                running.append(serving.open(5 + turn % 7))
            serving.step(running)
            if len(running) > 3:
                serving.close(running.pop(0), running.pop(1))
    assert serving.moved > 0
    serving.finish()


def behind_written(world: World, depth: int) -> None:
    """Steps that queue attention once more after they are written, in two streams by turns."""
    serving = Serving(world, depth)
    streams = [serving.streams.other() for _ in range(2)]
    running: list[Any] = []
    for turn in range(14):
        with serving.streams.within(streams[turn % 2]):
            if turn % 2 == 0:
                running.append(serving.open(5 + turn % 7))
            step, batch, lens = serving.prepare(running)
            serving.kernels(batch, running, lens)
            step.written()
            ends = [one.num_scheduled for one in running]
            texts = [serving.texts[one][:end] for one, end in zip(running, ends, strict=True)]
            serving.attend(batch, texts)
            serving.own.append(serving.own.pop(0))
            serving.streams.current().record(serving.own[-1])
            serving.cache.end_step(step, serving.own[-1])
            while serving.cache.poll() >= depth:
                serving.cache.synchronize()
            if len(running) > 3:
                serving.close(running.pop(0), running.pop(1))
    assert serving.moved > 0
    serving.finish()


def receive(serving: Serving, tokens: int) -> Any:
    """A sequence whose blocks the host, which is in no stream, fills as soon as it has them."""
    handle = serving.open(tokens)
    blocks = handle.block_table()
    serving.world.host_access("host receives", blocks, serving.cache.storage, write=True)
    return handle


def received(world: World, depth: int) -> None:
    """Blocks that are released while steps read them are received into when they are empty."""
    serving = Serving(world, depth, num_blocks=16, auto_compact=False)
    running: list[Any] = []
    for _ in range(12):
        while serving.cache.mmu.states()["available"] < 4:
            serving.cache.synchronize()
        running.append(receive(serving, 13))
        serving.step(running)
        if len(running) > 1:
            serving.close(running.pop(0))
    serving.finish()


def transfers(world: World, depth: int) -> None:
    """Blocks that were moved away from are received into, once the copies are over."""
    serving = Serving(world, depth, num_blocks=20, auto_compact=False)
    running: list[Any] = []
    for _ in range(8):
        serving.cache.synchronize()
        serving.cache.compact()
        serving.cache.mover.synchronize()
        running.append(receive(serving, 9))
        serving.step(running)
        if len(running) > 2:
            serving.close(running.pop(0))
        serving.step(running)
    assert serving.moved > 0
    serving.finish()


def aborted(world: World, depth: int) -> None:
    """Copies begin, and are given up; their destinations and sources are used again at once."""
    serving = Serving(world, depth, auto_compact=False)
    running = [serving.open(14) for _ in range(3)]
    serving.step(running)
    mmu, mover = serving.cache.mmu, serving.cache.mover
    for _ in range(4):
        serving.cache.synchronize()
        plan = mmu.plan_free_run(30, max_blocks=6)
        moves = mmu.begin(plan)
        assert len(moves) > 0
        copying = mover.start(moves.pairs)
        mover.finish(copying)
        mmu.abort(moves)
        use_every_block(serving)
        serving.step(running)
    serving.finish()


def failing(world: World, depth: int) -> None:
    """A copy of several launches fails behind the first; its destinations are used again."""
    serving = Serving(world, depth, auto_compact=False)
    running = [serving.open(14) for _ in range(3)]
    serving.step(running)
    mmu, mover = serving.cache.mmu, serving.cache.mover
    for _ in range(3):
        serving.cache.synchronize()
        moves = mmu.begin(mmu.plan_free_run(30, max_blocks=6))
        with pytest.raises(ZeroDivisionError), _second_launch_fails(mover):
            mover.move(moves.pairs)
        mmu.abort(moves)
        use_every_block(serving)
        serving.step(running)
    serving.finish()


class _second_launch_fails:
    """Every copy is cut in launches of two moves, and the second raises."""

    def __init__(self, mover: Any) -> None:
        self.all = mover._all

    def __enter__(self) -> None:
        self.kept = self.all._launch, self.all._most
        count = 0

        def launch(*how: Any) -> None:
            nonlocal count
            count += 1
            if count > 1:
                raise ZeroDivisionError
            self.kept[0](*how)

        self.all._launch, self.all._most = launch, 2

    def __exit__(self, *_: object) -> None:
        self.all._launch, self.all._most = self.kept


def graph_replay(world: World, depth: int) -> None:
    """A captured graph moves what a buffer names, then attends; copies on write come outside."""
    serving = Serving(world, depth, auto_compact=False)
    mover, mmu = serving.cache.mover, serving.cache.mmu
    moves = mover.graph_moves(8, thread_blocks=2)
    serving.cache.warm_up()
    texts: list[list[list[int]]] = [[]]
    device = serving.cache._device
    assert device is not None
    tables = device.tables
    with serving.streams.capture() as graph:
        moves.launch()
        serving.streams.work(
            "attention",
            lambda: serving.look(tables.block_table, tables.seq_lens, tables._csr, texts[0]),
        )
    running = [serving.open(9 + 4 * n) for n in range(3)]
    for turn in range(14):
        if turn > 2:
            # Two passes before one replay: the first is carried out ahead of it.
            for _ in range(1 + turn % 2):
                compact(mmu, moves)
        step, batch, lens = serving.prepare(running)
        ends = [one.num_scheduled for one in running]
        values = [serving.texts[one][:end] for one, end in zip(running, ends, strict=True)]
        new = [v for row, n in zip(values, lens, strict=True) for v in row[len(row) - n :]]
        batch.csr()
        # Queued ahead of the graph, which moves first: so the moves that were put are made now.
        for layer in range(LAYERS):
            k, v = serving.cache.layers.logical(layer)
            kv = contents(new, layer, 0, k), contents(new, layer, 1, v)
            world.keep(*kv)
            serving.cache.write(layer, *kv, batch)
        if not world.at_once:
            world.finish()  # the graph's reader looks at what this turn expects
        texts[0] = values
        graph.replay()
        if not world.at_once:
            world.finish()
        serving.end(step)
        if turn % 4 == 1:
            running.append(serving.fork(running[0]))
        if len(running) > 4:
            serving.close(running.pop(0), running.pop(1))
    assert moves.refused() == 0
    assert serving.moved > 0
    serving.finish()


def row(streams: RecordedStreams, storage: Storage, array: Any, block: int, holds: float) -> None:
    """A kernel of the engine's that reads a block, which is to hold this."""
    base, world = storage.regions[0].address, streams.world

    def look() -> tuple[set[Place], set[Place]]:
        if array[block, 0] != holds:
            world.errors.append(f"block {block}: {array[block, 0]}, not {holds}")
        return {world.block(base, block)}, set()

    streams.work("attention", look)


def graph_in_streams(world: World, depth: int) -> None:
    """Moves are put in one stream, replayed in a second, flushed in a third."""
    streams = RecordedStreams(world)
    storage, array = pool(world, streams)
    mover = cuda.CUDAMover(storage, streams=streams)
    moves = mover.graph_moves(2, thread_blocks=2)
    second, third = streams.other(), streams.other()
    with streams.capture() as graph:
        moves.launch()
    for turn in range(2 * depth):
        source, target = (0, 4) if turn % 2 else (1, 5)
        holds = float(array[source, 0])
        moves.move(np.array([[source, target]], np.uint32))
        with streams.within(second), moves.replaying():
            graph.replay()
            row(streams, storage, array, target, holds)
        moves.move(np.array([[source, 6]], np.uint32))
        with streams.within(third):
            moves.flush()
            row(streams, storage, array, 6, holds)
    assert moves.refused() == 0
    moves.move(np.array([[0, 7]], np.uint32))
    with streams.within(third):
        moves.flush()
    del moves, graph, mover
    gc.collect()
    assert "host gives device memory back" in [node.what for node in world.nodes]


def graph_transfers(world: World, depth: int) -> None:
    """Blocks that moves were put from, and no graph was replayed since, are received into."""
    serving = Serving(world, depth, num_blocks=20, auto_compact=False)
    mover, mmu = serving.cache.mover, serving.cache.mmu
    moves = mover.graph_moves(8, thread_blocks=2)
    running: list[Any] = []
    for _ in range(8):
        serving.cache.synchronize()
        compact(mmu, moves)
        assert mover.copied() is (not mover._put)
        mover.synchronize()
        assert mover.copied()
        running.append(receive(serving, 9))
        serving.step(running)
        if len(running) > 2:
            serving.close(running.pop(0))
        serving.step(running)
    assert serving.moved > 0
    serving.finish()


def two_devices(world: World, depth: int) -> None:
    """One MMU decides, two devices copy; each launch goes to the device that has the memory."""
    serving = Serving(world, depth, auto_compact=False)
    second = RecordedStreams(world, "cuda:1")
    arrays = [np.zeros((49, 64), np.float32) for _ in range(2)]
    world.keep(*arrays)
    storage = Storage.from_numpy(arrays)
    world.pool(storage, second)
    mover = Mover(storage, streams=second)
    running: list[Any] = []
    for turn in range(8):
        running.append(serving.open(6 + turn))
        serving.step(running)
        plan = serving.cache.mmu.plan_compaction()
        if plan is not None:
            moves = serving.cache.mmu.begin(plan)
            serving.cache.mover.move(moves.pairs)
            second.work("step", lambda: (set(), set()))
            mover.apply(moves.to_bytes())
            table = moves.pairs[:, 1].tolist()
            places = {world.block(storage.regions[0].address, block) for block in table}
            second.work("attention", _reader(places))
            serving.cache.mmu.commit(moves)
        if len(running) > 2:
            serving.close(running.pop(0))
    assert mover.applied > 0
    serving.finish()


def _reader(places: set[Place]) -> Callable[[], tuple[set[Place], set[Place]]]:
    return lambda: (places, set())


def given_back(world: World, depth: int) -> None:
    """The memory is given back as soon as the mover has been closed, or dropped."""
    for drop in (False, True):
        streams = RecordedStreams(world)
        array = np.zeros((9, 16), np.float32)
        world.keep(array)
        storage = Storage.from_numpy([array])
        world.pool(storage, streams)
        mover = cuda.CUDAMover(storage, streams=streams)
        for _ in range(depth):
            mover.start(np.array([[0, 4], [1, 5]], np.uint32))
        if not drop:
            mover.close()
        del mover
        world.host_access("host gives memory back", range(9), storage, write=True)


def cache_given_back(world: World, depth: int) -> None:
    """A cache is dropped while its steps run; its tables go back to torch's allocator."""
    serving = Serving(world, depth)
    handle = serving.open(5)
    for _ in range(depth):
        serving.step([handle])
    handle.close()
    serving.texts.clear()
    del handle, serving.cache
    gc.collect()
    what = [node.what for node in world.nodes]
    assert what.count("host gives device memory back") == 2  # region table, tables
    assert "host gives staging back" in what


RUNS: tuple[Callable[[World, int], None], ...] = (
    between_steps,
    by_itself,
    engine_events,
    overlap,
    two_streams,
    moved_elsewhere,
    behind_written,
    received,
    transfers,
    aborted,
    failing,
    graph_replay,
    graph_in_streams,
    graph_transfers,
    two_devices,
    given_back,
    cache_given_back,
)


@dataclass(frozen=True)
class Rule:
    """A wait, a run that needs it, and what meets what without it."""

    sentence: str
    run: Callable[[World, int], None]
    wait: str
    meets: tuple[str, str]
    depths: tuple[int, ...] = DEPTHS


RULES = (
    Rule(
        "a copy waits for the last write of its source",
        between_steps,
        "side waits ready",
        ("write_kv", "move_blocks"),
    ),
    Rule(
        "a copy waits for the last write of its source, beside a step",
        overlap,
        "side waits ready",
        ("write_kv", "move_blocks"),
        (2, 4),  # with one step in flight the host has waited for the step before
    ),
    Rule(
        "a copy waits until no step reads what its destination held",
        two_streams,
        "host waits step",
        ("attention", "move_blocks"),
    ),
    Rule(
        "a step reads a destination after the copy",
        between_steps,
        "caller waits done",
        ("move_blocks", "attention"),
    ),
    Rule(
        "a source is written by its next owner after the copy has read it",
        between_steps,
        "caller waits done",
        ("move_blocks", "write_kv"),
    ),
    Rule(
        "tables change after a copy that ran beside the step before",
        overlap,
        "caller waits done",
        ("move_blocks", "attention"),
    ),
    Rule(
        "destinations that were given back are written after the copy",
        aborted,
        "caller waits done",
        ("move_blocks", "write_kv"),
    ),
    Rule(
        "destinations of a copy that failed half way are written after it",
        failing,
        "caller waits done",
        ("move_blocks", "write_kv"),
    ),
    Rule(
        "tables are written after the last step that reads the old entries",
        two_streams,
        "caller waits step",
        ("attention", "update_tables"),
        (2, 4),
    ),
    Rule(
        "a step in another stream sees what the steps before it wrote",
        two_streams,
        "caller waits step",
        ("write_kv", "attention"),
        (2, 4),
    ),
    Rule(
        "what a step queues after it is written is over before tables change",
        behind_written,
        "caller waits step",
        ("attention", "update_tables"),
        (2, 4),
    ),
    Rule(
        "a step in another stream than the copy's reads a destination after it",
        moved_elsewhere,
        "caller waits done",
        ("move_blocks", "attention"),
    ),
    Rule(
        "a step in another stream than the copy's writes a source after it",
        moved_elsewhere,
        "caller waits done",
        ("move_blocks", "write_kv"),
    ),
    Rule(
        "a graph that is replayed in another stream moves what was put",
        graph_in_streams,
        "caller waits moves",
        ("upload", "move_blocks_indirect"),
    ),
    Rule(
        "moves are put after the graph in another stream has moved those before",
        graph_in_streams,
        "caller waits moves",
        ("move_blocks_indirect", "upload"),
    ),
    Rule(
        "transfers that are in no stream wait for moves that were put for a graph",
        graph_transfers,
        "host waits moves",
        ("move_blocks_indirect", "host receives"),
    ),
    Rule(
        "a block is used again after the last step that could touch it has ended",
        received,
        "host waits step",
        ("attention", "host receives"),
    ),
    Rule(
        "the same where the engine brings the events",
        engine_events,
        "host waits engine",
        ("write_kv", "host reads"),
    ),
    Rule(
        "transfers that are in no stream wait for the copies",
        transfers,
        "host waits done",
        ("move_blocks", "host receives"),
    ),
    Rule(
        "staging of tables is written again after it was read",
        between_steps,
        "host waits staging",
        ("update_tables", "host fills staging"),
        (2, 4),  # with one step in flight the host has waited for the step before
    ),
    Rule(
        "staging of moves is written again after it was read",
        graph_replay,
        "host waits staging",
        ("upload", "host fills staging"),
    ),
    Rule(
        "memory is given back after the copies in it",
        given_back,
        "host waits side",
        ("move_blocks", "host gives memory back"),
    ),
    Rule(
        "the region table has arrived before its staging is given back",
        given_back,
        "host waits caller",
        ("upload", "host gives staging back"),
    ),
    Rule(
        "a cache is made before a step in another stream runs",
        moved_elsewhere,
        "host waits caller",
        ("update_tables", "update_tables"),
    ),
    Rule(
        "tables are given back after the steps that read them",
        cache_given_back,
        "host waits step",
        ("attention", "host gives device memory back"),
    ),
    Rule(
        "a graph's buffer is given back after the moves in it",
        graph_in_streams,
        "host waits moves",
        ("move_blocks_indirect", "host gives device memory back"),
    ),
)
CONTROLS = [(rule, depth) for rule in RULES for depth in rule.depths]
"""Each has to be reported: docs/cuda.md has the count."""


@pytest.mark.parametrize("schedule", ["now", "fast"])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_nothing_meets_unordered(run: Any, depth: int, schedule: str) -> None:
    world = World(schedule)
    run(world, depth)
    assert [race.kind for race in world.races()] == []
    assert world.errors == []
    moves = [node for node in world.nodes if node.what.startswith("move_blocks")]
    assert moves or run in (received, cache_given_back)


@pytest.mark.parametrize(
    ("rule", "depth"), CONTROLS, ids=[f"{r.run.__name__}-{r.wait}-{d}" for r, d in CONTROLS]
)
def test_a_wait_that_is_left_out_is_reported(rule: Rule, depth: int) -> None:
    world = World(drop=rule.wait)
    rule.run(world, depth)
    assert world.waits[rule.wait] > 0
    kinds = {(race.first, race.second) for race in world.races()}
    assert rule.meets in kinds, sorted(kinds)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_launch_on_the_wrong_device_is_reported(depth: int) -> None:
    world = World(drop="launch in the device")
    two_devices(world, depth)
    assert "move_blocks on cuda:0, memory of cuda:1" in world.errors


def test_every_wait_is_one_that_some_rule_needs() -> None:
    asked: set[str] = set()
    for run in RUNS:
        for depth in DEPTHS:
            world = World()
            run(world, depth)
            asked |= set(world.waits)
    assert asked == {rule.wait for rule in RULES} | {"launch in the device"}


@pytest.mark.parametrize("schedule", ["late", "side first", "caller last", 1, 2])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
def test_every_answer_has_its_own_bytes_whenever_work_runs(
    run: Any, depth: int, schedule: Any
) -> None:
    world = World(schedule)
    run(world, depth)
    world.finish()
    assert world.errors == []


@pytest.mark.parametrize(
    ("run", "wait", "schedule"),
    [
        (between_steps, "side waits ready", "side first"),
        (between_steps, "caller waits done", "late"),
        (overlap, "caller waits done", "late"),
        (two_streams, "caller waits step", "caller last"),
        (between_steps, "host waits staging", "late"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_wait_that_is_left_out_costs_bytes_in_an_unkind_schedule(
    run: Any, wait: str, schedule: Any
) -> None:
    found = 0
    for depth in (2, 4):
        world = World(schedule, drop=wait)
        run(world, depth)
        world.finish()
        found += len(world.errors)
    assert found > 0


# -- what the parts promise ----------------------------------------------------------------


def test_the_device_has_what_the_host_has_at_addresses_that_never_change() -> None:
    world = World()
    serving = Serving(world, 2)
    tables = serving.cache._device.tables
    names = ("block_table", "seq_lens", "slot_mapping", "query_start_loc")
    before = [getattr(tables, name).data_ptr() for name in names]
    running: list[Any] = []
    for turn in range(12):
        running.append(serving.open(3 + 5 * turn % 17))
        step, batch, lens = serving.prepare(running)
        for name in names:  # all of it: padding as well
            host = getattr(batch._buffers, name)
            assert torch.equal(getattr(tables, name), host), name
        csr, host_csr = batch.csr(), batch._buffers.csr()
        assert all(torch.equal(a, b) for a, b in zip(csr, host_csr, strict=True))
        assert csr.indptr.data_ptr() == tables._csr.indptr.data_ptr()
        serving.kernels(batch, running, lens)
        serving.end(step)
        if len(running) > 4:
            serving.close(*running[:3])
            del running[:3]
    assert [getattr(tables, name).data_ptr() for name in names] == before
    serving.finish()


def test_a_step_makes_no_memory_no_event_and_no_kernel() -> None:
    world = World()
    serving = Serving(world, 2)
    made: list[str] = []
    churn(serving, 4)
    for name in ("zeros", "pinned", "event", "kernel", "upload"):
        real = getattr(serving.streams, name)

        def noted(*how: Any, name: str = name, real: Any = real, **more: Any) -> Any:
            made.append(name)
            return real(*how, **more)

        setattr(serving.streams, name, noted)
    churn(serving, 4)
    assert made == []
    serving.finish()


def test_another_step_is_prepared_only_when_the_tables_are_free() -> None:
    serving = Serving(World(), 2)
    one, two = serving.open(5), serving.open(5)
    step, batch, lens = serving.prepare([one])
    other = serving.cache.begin_step()
    with pytest.raises(InvalidStep, match=f"step {step.number} is prepared"):
        other.prepare([two], query_lens=[5])
    serving.kernels(batch, [one], lens)
    serving.end(step)
    other.prepare([two], query_lens=[5])
    other.cancel()
    serving.cache.end_step(other)
    serving.step([one, two])
    serving.finish()
    assert serving.world.errors == []


def test_a_step_ends_when_the_device_has_done_it() -> None:
    world = World("late")
    serving = Serving(world, 2)
    handle = serving.open(5)
    serving.step([handle])
    assert serving.cache.poll() == 1
    serving.cache.synchronize()
    assert serving.cache.poll() == 0
    for _ in range(3):  # the third waits for the first
        serving.step([handle])
    assert serving.cache.poll() == 2
    serving.finish()
    assert world.errors == []


def test_what_a_device_write_refuses_it_refuses_before() -> None:
    serving = Serving(World())
    handle = serving.open(5)
    step, batch, lens = serving.prepare([handle])
    right = torch.zeros(5, 2, 4)
    launches = len(serving.world.nodes)
    for k, v in (
        (right[:4], right),
        (right, None),
        (right.double(), right),
        (right[:, :1], right),
        ([1], right),
    ):
        with pytest.raises(InvalidConfig):
            serving.cache.write(0, k, v, batch)
    assert len(serving.world.nodes) == launches
    serving.kernels(batch, [handle], lens)
    serving.end(step)
    serving.finish()
    assert serving.world.errors == []


def pool(world: World, streams: RecordedStreams, blocks: int = 9) -> tuple[Storage, Any]:
    array = np.arange(blocks * 16, dtype=np.float32).reshape(blocks, 16)
    world.keep(array)
    storage = Storage.from_numpy([array])
    world.pool(storage, streams)
    return storage, array


def test_a_graph_moves_once_and_only_what_was_put() -> None:
    world = World()
    streams = RecordedStreams(world)
    storage, array = pool(world, streams)
    mover = cuda.CUDAMover(storage, streams=streams)
    moves = mover.graph_moves(2, thread_blocks=2)
    mover.warm_up()
    with streams.capture() as graph:
        moves.launch()
    rows = array.copy()
    graph.replay()
    assert np.array_equal(array, rows), "nothing was put"
    moves.move(np.array([[0, 4], [1, 5]], np.uint32))
    assert np.array_equal(array, rows), "not before the replay"
    graph.replay()
    rows[4:6] = rows[:2]
    assert np.array_equal(array, rows)
    array[0] = rows[0] = -1.0  # the source has another owner now
    graph.replay()
    assert np.array_equal(array, rows), "moved a second time"
    with pytest.raises(LimitExceeded, match="3 moves for a buffer of 2"):
        moves.move(np.array([[0, 4], [1, 5], [2, 6]], np.uint32))
    with pytest.raises(InvalidPlan):
        moves.move(np.array([[0, 4], [4, 5]], np.uint32))
    moves.move(np.array([[2, 6]], np.uint32))
    mover.move(np.array([[6, 7]], np.uint32))  # reads what the graph has not moved yet
    graph.replay()
    rows[6] = rows[7] = rows[2]
    assert np.array_equal(array, rows)
    assert moves.refused() == 0
    assert world.races() == []


def test_copies_beside_a_step_take_few_thread_blocks() -> None:
    world = World()
    streams = RecordedStreams(world)
    array = np.zeros((9, 1 << 16), np.float32)
    world.keep(array)
    storage = Storage.from_numpy([array])
    world.pool(storage, streams)
    grids: list[int] = []
    launch = streams.kernel("move_blocks")

    def noted(grid: Any, block: Any, args: Any) -> None:
        grids.append(grid[0])
        launch(grid, block, args)

    streams._kernels["move_blocks"] = noted
    mover = cuda.CUDAMover(storage, streams=streams, overlap_thread_blocks=3)
    mover.move(np.array([[0, 4]], np.uint32))
    mover.finish(mover.start(np.array([[0, 5]], np.uint32)))
    assert grids == [16, 3]  # 256 KiB: 128 chunks of 2 KiB, 8 warps a thread block
    assert mover.copied_bytes == 2 * storage.block_bytes


def test_a_storage_on_a_device_gets_its_mover_and_none_of_the_hosts() -> None:
    from kvmmu import CPUMover, CUDAUnavailable, MissingExtra, Region

    there = Storage([Region(4096, 16, 16, 9, device="cuda:0")], 8)
    assert there.device == "cuda:0"
    with pytest.raises(InvalidConfig, match="is on cuda:0; a CPUMover"):
        CPUMover(there)
    with pytest.raises(InvalidConfig, match="reads host memory"):
        cuda.block_checksums(there, np.arange(2))
    with pytest.raises(InvalidConfig, match="region 1 is on cpu, region 0 on cuda:0"):
        Storage([*there.regions, Region(8192, 16, 16, 9)], 8)
    with pytest.raises(InvalidConfig, match="with its number"):
        Storage([Region(4096, 16, 16, 9, device="cuda")], 8)
    if not torch.cuda.is_available():
        with pytest.raises((CUDAUnavailable, MissingExtra)):
            Mover(there)


def test_the_document_counts_the_rules_and_the_waits_left_out() -> None:
    text = " ".join((ROOT / "docs" / "cuda.md").read_text().split())
    waits = len({rule.wait for rule in RULES})
    assert f"{len(RULES)} rules, {waits} kinds of wait, {len(CONTROLS)} runs" in text
