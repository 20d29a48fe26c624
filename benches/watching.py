"""What watching a manager costs: timed calls, metrics, events, the flight recorder.

Each is measured on decode steps (256 sequences of 512 blocks, of which every step fills 16) of a
manager that is watched and of one that is not, in turn. ``ratio`` is watched by not watched. The
recorder also on the steps of a KVCache, where torch is installed, and on whole replays.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from kvmmu import MMU
from kvmmu.bench.harness import Bench, Goal, Row, medians, seconds

BATCH, DEPTH, BLOCK = 256, 512, 16
STEPS, ROUNDS = 10, 150
WIDTH = DEPTH + (STEPS * (ROUNDS + 2)) // BLOCK + 2


def rows(bench: Bench) -> Iterator[Row]:
    """All of them."""
    with tempfile.TemporaryDirectory() as folder:
        yield from decode_steps(Path(folder))
        yield from cache_steps(bench, Path(folder))
        yield from replays(Path(folder))
    yield from scrapes(bench)


def stepping(**options: Any) -> tuple[MMU, Callable[[], float]]:
    """A manager, and microseconds a step of so many steps of it."""
    mmu = MMU(BATCH * WIDTH, BLOCK, max_sequences=BATCH, max_blocks_per_sequence=WIDTH, **options)
    prompt = (DEPTH - 1) * BLOCK + 1
    one = tables(mmu, 1, prompt)
    ids = np.empty(BATCH, np.int64)
    for i in range(BATCH):
        # Lengths differ, so that each step fills some blocks and not all of them at once.
        tokens = np.random.default_rng(i).integers(0, 100_000, prompt - i % BLOCK, dtype=np.int32)
        ids[i] = mmu.open(tokens)
        step = mmu.begin_step()
        lens = np.array([len(tokens)], np.int32)
        mmu.prepare(step, ids[i : i + 1], one, query_lens=lens)
        mmu.written(step)
        mmu.end_step(step)
    batch = tables(mmu, BATCH, BATCH)
    # More of them than what compresses the recording looks back.
    tokens = np.random.default_rng(7).integers(0, 100_000, (512, BATCH), dtype=np.int32)
    turn = itertools.cycle(tokens)

    def steps() -> None:
        for _ in range(STEPS):
            new = next(turn)
            number = mmu.begin_step()
            mmu.prepare(number, ids, batch, new_tokens=new)
            mmu.written(number)
            mmu.end_step(number)

    return mmu, lambda: seconds(steps) * 1e6 / STEPS


def tables(mmu: MMU, rows: int, slots: int) -> Any:
    return mmu.register_tables(
        np.empty((rows, WIDTH), np.int32),
        np.empty(rows, np.int32),
        np.empty(slots, np.int64),
        np.empty(rows + 1, np.int32),
    )


def decode_steps(folder: Path) -> Iterator[Row]:
    timed, timed_steps = stepping(record=False)
    timed.time_operations(64)
    contenders = {
        "plain": stepping(record=False)[1],
        "one call in 64 timed": timed_steps,
        "events": stepping(record=False, events=65_536)[1],
        "recorded": stepping(record=str(folder / "steps"))[1],
    }
    found = medians(contenders, ROUNDS)
    goals = {"one call in 64 timed": Goal(1.01, "ratio")}
    for name, figure in found.items():
        if name != "plain":
            measure = f"decode step of {BATCH} x {DEPTH} blocks, {name}"
            yield Row(measure, "us", figure, "not watched", found["plain"], goals.get(name))


def cache_steps(bench: Bench, folder: Path) -> Iterator[Row]:
    """Steps of an engine in small: a KVCache with two layers, 64 sequences, KV is written."""
    try:
        import torch
    except ImportError as error:
        bench.note(f"steps of a KVCache: {error}")
        return
    from kvmmu import KVCache

    torch.set_num_threads(1)

    def engine(**options: Any) -> Callable[[], float]:
        blocks = 64 * (WIDTH - DEPTH + 200 // BLOCK + 1)
        cache = KVCache(2, 2, 64, torch.float32, blocks, max_batch=64, **options)
        sequences = [cache.open(np.arange(i, i + 200, dtype=np.int32)) for i in range(64)]
        for sequence in sequences:
            with cache.step() as step:
                step.prepare([sequence], query_lens=[200 - sequence.num_cached_tokens])
        ids = np.array([sequence.id for sequence in sequences])
        k = torch.zeros(64, 2, 64)
        new = np.arange(64, dtype=np.int32)
        kept.append(sequences)

        def steps() -> None:
            for _ in range(STEPS):
                with cache.step() as step:
                    batch = step.prepare(ids, new_tokens=new)
                    for layer in range(2):
                        cache.write(layer, k, k, batch)

        return lambda: seconds(steps) * 1e6 / STEPS

    kept: list[Any] = []
    contenders = {"plain": engine(record=False), "recorded": engine(record=str(folder / "cache"))}
    found = medians(contenders, ROUNDS)
    measure = "step of a KVCache with 2 layers, 64 sequences, recorded"
    yield Row(measure, "us", found["recorded"], "not", found["plain"], Goal(1.02, "ratio"))
    for sequences in kept:
        for sequence in sequences:
            sequence.close()


def replays(folder: Path) -> Iterator[Row]:
    """Processor time of whole replays, that of the thread which compresses and writes included."""
    command = [sys.executable, "-m", "kvmmu.cli", "replay", "--sample", "article"]
    command += ["--minutes", "3", "--quiet"]

    def run(record: str) -> Callable[[], tuple[float, float]]:
        def work() -> tuple[float, float]:
            before = os.times()
            took = seconds(
                lambda: subprocess.run(
                    command, check=True, env={**os.environ, "KVMMU_RECORD": record}
                )
            )
            after = os.times()
            used = after.children_user + after.children_system
            return took, used - before.children_user - before.children_system

        return work

    runs: dict[str, list[tuple[float, float]]] = {"plain": [], "recorded": []}
    for number in range(4):
        for name, record in (("plain", ""), ("recorded", str(folder / "replay"))):
            figure = run(record)()
            if number:
                runs[name].append(figure)
    for index, what in enumerate(("wall", "processor")):
        found = {name: statistics.median(run[index] for run in all_) for name, all_ in runs.items()}
        measure = f"kvmmu replay --sample article --minutes 3, recorded, {what} time"
        yield Row(measure, "s", found["recorded"], "not", found["plain"], Goal(1.02, "ratio"))


def scrapes(bench: Bench) -> Iterator[Row]:
    """A scrape of a scattered pool, and how long the manager stands still for it."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
    except ImportError as error:
        bench.note(f"scrapes: {error}")
        return
    from kvmmu.metrics import Collector

    for blocks in (90_000, 1_000_000):
        mmu = MMU(blocks, BLOCK, max_sequences=20_000, placement="scatter", anchor=0)
        draw, ids = np.random.default_rng(0), []
        while mmu.states()["empty"] > blocks // 10:
            ids.append(mmu.open(draw.integers(0, 2**30, 100 * BLOCK, dtype=np.int32)))
        for sequence in ids[::2]:
            mmu.close(sequence)
        registry = CollectorRegistry()
        Collector(registry).add(mmu, measure_every_s=0)
        contenders = {
            "measure": lambda mmu=mmu: seconds(mmu.measure) * 1e6,
            "scrape": lambda of=registry: seconds(lambda: generate_latest(of)) * 1e6,
        }
        found = medians(contenders)
        yield Row(f"scrape, {blocks} blocks", "us", found["scrape"])
        yield Row(f"of that the manager stands still, {blocks} blocks", "us", found["measure"])
