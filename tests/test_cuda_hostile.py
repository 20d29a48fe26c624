"""Hostile use of a CUDA device, over recorded streams: handles of others, steps that are over,
failures in the middle, things dropped while the device still needs them, a fork of the process.

What lives here: one test a fault that was found so. What never lives here: the order of work as
such (``test_cuda_order.py``).
"""

from __future__ import annotations

import gc
import os
import signal
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvmmu import InvalidConfig, InvalidStep, Region, Storage, UsedAfterFork, cuda  # noqa: E402
from kvmmu.cuda import tables  # noqa: E402

from . import cuda_shim  # noqa: E402
from .recorded import RecordedStreams, World  # noqa: E402
from .test_cuda_order import Serving, pool  # noqa: E402

pytestmark = pytest.mark.skipif(cuda_shim.compiler() is None, reason="needs g++")


def test_a_batch_whose_tables_another_step_has_is_refused() -> None:
    serving = Serving(World(), 2)
    one, two = serving.open(5), serving.open(5)
    step, old, lens = serving.prepare([one])
    serving.kernels(old, [one], lens)
    step.written()
    other, batch, lens = serving.prepare([two])
    nodes = len(serving.world.nodes)
    right = torch.zeros(5, 2, 4)
    with pytest.raises(InvalidStep, match=f"step {step.number}: .* step {other.number}"):
        serving.cache.write(0, right, right, old)  # its slots would be those of the other
    with pytest.raises(InvalidStep, match=f"step {step.number}: .* step {other.number}"):
        old.csr()
    assert len(serving.world.nodes) == nodes
    serving.kernels(batch, [two], lens)
    serving.cache.end_step(step)
    serving.end(other)
    serving.finish()
    assert serving.world.errors == []


def test_a_cache_that_is_dropped_keeps_staging_until_the_device_has_read_it() -> None:
    world = World()
    serving = Serving(world)
    handle = serving.open(5)
    serving.step([handle])
    handle.close()
    serving.texts.clear()
    del handle, serving.cache
    gc.collect()
    assert any(node.what == "host gives staging back" for node in world.nodes)
    assert [race.kind for race in world.races()] == []


def test_moves_that_were_put_outlive_the_handle() -> None:
    world = World()
    streams = RecordedStreams(world)
    storage, array = pool(world, streams)
    mover = cuda.CUDAMover(storage, streams=streams)
    moves = mover.graph_moves(2, thread_blocks=2)
    expected = array[0].copy()
    moves.move(np.array([[0, 4]], np.uint32))
    del moves
    gc.collect()
    mover.move(np.array([[4, 5]], np.uint32))
    assert np.array_equal(array[4], expected)
    assert np.array_equal(array[5], expected)
    assert world.races() == []


def test_a_copy_is_finished_by_the_mover_that_started_it() -> None:
    world = World()
    streams = RecordedStreams(world)
    movers = [cuda.CUDAMover(pool(world, streams)[0], streams=streams) for _ in range(2)]
    copying = movers[0].start(np.array([[0, 4]], np.uint32))
    with pytest.raises(InvalidConfig, match="no copy that this mover has started"):
        movers[1].finish(copying)
    assert not copying.finished
    movers[0].finish(copying)
    assert copying.finished


def test_memory_of_another_device_than_the_streams_is_refused() -> None:
    streams = RecordedStreams(World())
    there = Storage([Region(4096, 16, 16, 9, device="cuda:1")], 8)
    with pytest.raises(InvalidConfig, match="storage is on cuda:1, the streams are of cuda:0"):
        cuda.CUDAMover(there, streams=streams)


def test_rows_of_an_update_that_failed_half_way_are_emptied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tables, "_ENTRIES", 8)
    serving = Serving(World(), num_blocks=96)
    device = serving.cache._device.tables
    handles = [serving.open(12) for _ in range(5)]
    serving.step(handles[:1])
    serving.cache.synchronize()
    launch, count = device._update._launch, 0

    def failing(*how: Any) -> None:
        nonlocal count
        count += 1
        if count > 6:
            raise ZeroDivisionError
        launch(*how)

    device._update._launch = failing
    with pytest.raises(ZeroDivisionError), serving.cache.step() as step:
        step.prepare(handles, query_lens=[1, 9, 9, 9, 9], new_tokens=[7])
    device._update._launch = launch
    assert (device.block_table[1:].numpy() != serving.cache.mmu.null_block).any()
    serving.cache.synchronize()
    step, batch, _ = serving.prepare(handles[:1])
    host = batch._buffers
    for name in ("slot_mapping", "block_table", "seq_lens", "query_start_loc"):
        assert torch.equal(getattr(device, name), getattr(host, name)), name
    step.cancel()
    serving.cache.end_step(step)
    serving.close_all()


def test_a_dropped_step_frees_the_tables_of_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = Serving(World(), 2)
    one, two, three = (serving.open(5) for _ in range(3))
    device = serving.cache._device.tables
    first = serving.cache.begin_step()
    with monkeypatch.context() as patch:
        patch.setattr(device, "update", lambda buffers: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            first.prepare([one], query_lens=[5])
    second = serving.prepare([two])[0]
    del first
    gc.collect()
    third = serving.cache.begin_step()
    with pytest.raises(InvalidStep, match=f"step {second.number} is prepared"):
        third.prepare([three], query_lens=[5])
    second.cancel()
    for step in (second, third):
        serving.cache.end_step(step)
    serving.close_all()


@pytest.mark.parametrize("given", [5, None, np.zeros((0, 3), np.uint32), np.zeros((0, 2))])
def test_what_is_no_array_of_moves_is_refused_by_name(given: Any) -> None:
    world = World()
    streams = RecordedStreams(world)
    mover = cuda.CUDAMover(pool(world, streams)[0], streams=streams)
    graph = mover.graph_moves(2)
    for call in (mover.move, mover.start, graph.move):
        with pytest.raises(InvalidConfig, match="pairs must be"):
            call(given)


@pytest.mark.parametrize("count", [None, 0, -1, True, 2.0])
def test_a_number_of_thread_blocks_is_a_number(count: Any) -> None:
    world = World()
    streams = RecordedStreams(world)
    storage = pool(world, streams)[0]
    with pytest.raises(InvalidConfig, match="thread_blocks"):
        cuda.CUDAMover(storage, streams=streams, overlap_thread_blocks=count)
    with pytest.raises(InvalidConfig, match="thread_blocks"):
        cuda.CUDAMover(storage, streams=streams).graph_moves(2, thread_blocks=count)


def in_child(body: Any) -> str:
    """What the body returns in a forked child, or the error's name."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # ends a child that waits for a lock
        try:
            said = str(body())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    said = os.read(reading, 10_000).decode()
    os.close(reading)
    os.waitpid(child, 0)
    return said


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of fork with threads
def test_a_child_queues_nothing_on_the_device_of_its_parent() -> None:
    serving = Serving(World(), 2, copy="overlap")
    serving.cache.auto_compact = False
    handles = [serving.open(9) for _ in range(3)]
    others = [serving.open(8) for _ in range(6)]  # whose blocks no step in flight writes
    serving.step(others)
    serving.close(*others[::2])
    serving.step(handles)
    serving.cache.synchronize()
    ending, batch, lens = serving.prepare(handles)
    serving.kernels(batch, handles, lens)
    ending.written()
    serving.cache.auto_compact = True
    step, batch, lens = serving.prepare(handles)
    assert serving.cache._moving is not None
    cache, right = serving.cache, torch.zeros(3, 2, 4)
    calls = {
        "write": lambda: cache.write(0, right, right, batch),
        "csr": batch.csr,
        "end": lambda: cache.end_step(ending),
        "finish moves": cache._finish_moves,
        "warm up": cache.warm_up,
        "move": lambda: cache.mover.move(np.array([[0, 1]], np.uint32)),
        "synchronize": cache.mover.synchronize,
        "close": cache.mover.close,
    }
    nodes = len(serving.world.nodes)
    for name, call in calls.items():

        def body(call: Any = call) -> str:
            with suppress(UsedAfterFork):
                call()
            return str(len(serving.world.nodes) - nodes)

        with cache._copying, cache._lock:  # another thread of the parent's may have them
            assert in_child(body) == "0", name
    serving.kernels(batch, handles, lens)
    serving.cache.end_step(ending)
    serving.end(step)
    serving.finish()
    assert serving.world.errors == []
