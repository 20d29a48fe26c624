"""Fake tensor-parallel ranks: shards with contents, movers that can be broken, and the processes
that they live in. Without pytest, since the processes import it."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from kvmmu import (
    MMU,
    Channel,
    Mover,
    Moves,
    OutOfBlocks,
    PipeChannel,
    RankedCompaction,
    Storage,
    serve_rank,
)

from .small import prefix_values

Ints = npt.NDArray[Any]

BLOCK_SIZE = 4
CONTEXT = multiprocessing.get_context("spawn")
PATIENCE = 30.0  # seconds until a test gives up; never reached when all is well


class FaultyMover(Mover):
    """A mover that does what ``fault`` says at the next plan."""

    def __init__(self, storage: Storage) -> None:
        super().__init__(storage)
        self.fault = ""
        self.copying = threading.Event()
        self.go_on = threading.Event()

    def apply(self, moves: Moves | bytes, *, num_blocks: int | None = None) -> int:
        fault, self.fault = self.fault, ""
        if fault == "raise":
            raise RuntimeError("a bus error")
        if fault == "hang":
            self.copying.set()
            if not self.go_on.wait(PATIENCE):
                raise TimeoutError("the test forgot a rank")
            self.go_on.clear()
        count = super().apply(moves, num_blocks=num_blocks)
        if fault == "die":  # copied, not acknowledged
            os.kill(os.getpid(), signal.SIGKILL)
        return count


class Shard:
    """One rank's share: K of 8 bytes a token; V whose width differs from rank to rank."""

    def __init__(self, rank: int, num_blocks: int) -> None:
        self.k = np.zeros((num_blocks + 1, BLOCK_SIZE), np.uint64)
        self.v = np.zeros((num_blocks + 1, BLOCK_SIZE, rank + 1), np.uint32)
        self.mover = FaultyMover(Storage.from_numpy([self.k, self.v]))

    def write(self, slots: Ints, values: Ints) -> None:
        self.k.reshape(-1)[slots] = values
        self.v.reshape(-1, self.v.shape[2])[slots] = values.astype(np.uint32)[:, None]

    def copy(self, pairs: Ints) -> None:
        self.mover.move(pairs)

    def read(self, slots: Ints) -> Ints:
        """What K holds there; V is compared with it."""
        values: Ints = self.k.reshape(-1)[slots]
        v = self.v.reshape(-1, self.v.shape[2])[slots]
        if (v != values.astype(np.uint32)[:, None]).any():
            raise AssertionError("V and K are of different tokens")
        return values

    def set_fault(self, fault: str) -> None:
        self.mover.fault = fault

    def resume(self) -> None:
        self.mover.go_on.set()


class ShardLike(Protocol):
    """A shard here or in another process."""

    def write(self, slots: Ints, values: Ints) -> None: ...
    def copy(self, pairs: Ints) -> None: ...
    def read(self, slots: Ints) -> Ints: ...
    def set_fault(self, fault: str) -> None: ...
    def resume(self) -> None: ...


class RemoteShard:
    """The shard of another process, called through a pipe."""

    def __init__(self, control: Any) -> None:
        self.control = control

    def call(self, name: str, *arguments: Any) -> Any:
        self.control.send((name, arguments))
        if not self.control.poll(PATIENCE):
            raise TimeoutError(f"{name}: no answer")
        error, result = self.control.recv()
        if error is not None:
            raise error
        return result

    def write(self, slots: Ints, values: Ints) -> None:
        self.call("write", slots, values)

    def copy(self, pairs: Ints) -> None:
        self.call("copy", pairs)

    def read(self, slots: Ints) -> Ints:
        result: Ints = self.call("read", slots)
        return result

    def set_fault(self, fault: str) -> None:
        self.call("set_fault", fault)

    def resume(self) -> None:
        self.call("resume")


def serve_both(shard: Shard, channel: Channel, control: Any) -> None:
    """Plans in a thread, calls of a RemoteShard in this one, until the calls end."""
    stop = threading.Event()
    serving = threading.Thread(target=serve_rank, args=(shard.mover, channel, stop), daemon=True)
    serving.start()
    serve_control(shard, control)
    stop.set()
    serving.join(5)


def serve_control(shard: Shard, control: Any) -> None:
    """Calls of a RemoteShard, until its end is closed."""
    while control.poll(PATIENCE):
        try:
            name, arguments = control.recv()
        except EOFError:
            return
        try:
            control.send((None, getattr(shard, name)(*arguments)))
        except Exception as error:
            control.send((error, None))


class World:
    """Sequences with contents on every shard, and plans that move them."""

    def __init__(self, num_blocks: int, shards: Sequence[ShardLike]) -> None:
        self.mmu = MMU(
            num_blocks,
            BLOCK_SIZE,
            placement="scatter",
            seed=5,
            budget_blocks=num_blocks,
            compaction_start=0.35,
        )
        self.shards = list(shards)
        self.tokens: dict[int, list[int]] = {}
        width = self.mmu.max_blocks_per_sequence
        self.tables = self.mmu.register_tables(
            np.zeros((4, width), np.int32),
            np.zeros(4, np.int32),
            np.zeros(width * BLOCK_SIZE, np.int64),
            np.zeros(5, np.int32),
        )

    def open(self, tokens: list[int]) -> int:
        sequence = self.mmu.open(np.array(tokens, np.int32))
        self.tokens[sequence] = list(tokens)
        self.write(sequence)
        return sequence

    def append(self, sequence: int, tokens: list[int]) -> None:
        copies = self.mmu.append(sequence, np.array(tokens, np.int32))
        for shard in self.shards:
            shard.copy(copies)
        self.tokens[sequence] += tokens
        self.write(sequence)

    def fork(self, sequence: int) -> int:
        child = self.mmu.fork(sequence)
        self.tokens[child] = list(self.tokens[sequence])
        return child

    def close(self, sequence: int) -> None:
        self.mmu.close(sequence)
        del self.tokens[sequence]

    def write(self, sequence: int) -> None:
        """One step that writes what is left of a sequence, on every shard."""
        info = self.mmu.info(sequence)
        step = self.mmu.begin_step()
        left = np.array([info.num_tokens - info.num_scheduled], np.int32)
        ids = np.array([sequence], np.int64)
        copies = self.mmu.prepare(step, ids, self.tables, query_lens=left)
        slots = self.tables.slot_mapping[: self.tables.num_tokens].copy()
        for seed, shard in enumerate(self.shards):
            shard.copy(copies)
            shard.write(slots, prefix_values(self.tokens[sequence], seed)[info.num_scheduled :])
        self.mmu.written(step)
        self.mmu.end_step(step)

    def random_operation(self, rng: random.Random) -> None:
        names = sorted(self.tokens)
        kind = rng.choice(["open", "open", "append", "fork", "close", "close"])
        try:
            if kind == "open" or not names:
                shared = rng.randrange(3)  # some prompts begin alike
                count = rng.randrange(1, 30)
                self.open([shared] * rng.randrange(9) + [rng.randrange(9) for _ in range(count)])
            elif kind == "append":
                self.append(rng.choice(names), [rng.randrange(9) for _ in range(rng.randrange(9))])
            elif kind == "fork":
                self.fork(rng.choice(names))
            else:
                self.close(rng.choice(names))
        except OutOfBlocks:
            self.close(names[0])

    def check(self) -> None:
        """Every rank reads its own bytes of every sequence, and all invariants hold."""
        for sequence, tokens in self.tokens.items():
            written = self.mmu.info(sequence).num_written
            slots = self.mmu.translate(sequence, np.arange(written, dtype=np.int64))
            for seed, shard in enumerate(self.shards):
                expected = prefix_values(tokens, seed)[:written]
                np.testing.assert_array_equal(shard.read(slots), expected)
        self.mmu.validate()

    def scatter(self) -> None:
        """Begins anew: half of the blocks in use, spread over the pool."""
        for sequence in list(self.tokens):
            self.close(sequence)
        rng = random.Random(11)
        while self.mmu.states()["available"] > self.mmu.num_blocks // 2:
            self.open([rng.randrange(1000) for _ in range(3 * BLOCK_SIZE)])

    def plan(self) -> Any:
        """A plan with moves in it."""
        plan = self.mmu.plan_free_run(self.mmu.states()["available"])
        assert len(plan) > 3
        return plan


# -- processes -------------------------------------------------------------------------------


def pipe_rank(rank: int, num_blocks: int, channel_end: Any, control: Any) -> None:
    """A rank in a process of its own, over a pipe."""
    shard = Shard(rank, num_blocks)
    with PipeChannel(rank, {0: channel_end}) as channel:
        serve_both(shard, channel, control)


def torch_rank(rank: int, size: int, rendezvous: str, num_blocks: int, control: Any) -> None:
    """A rank in a process of its own, in a gloo group."""
    import torch.distributed as dist
    from kvmmu import TorchChannel

    join_group(rank, size, rendezvous)
    shard = Shard(rank, num_blocks)
    with TorchChannel([0]) as channel:
        serve_both(shard, channel, control)
    dist.destroy_process_group()


def torch_mmu(
    size: int, rendezvous: str, num_blocks: int, controls: Any, result: Any, seed: int
) -> None:
    """The process that decides, in a gloo group; sends what it found to ``result``."""
    import torch.distributed as dist
    from kvmmu import RankFailed, RankLost, RankTimeout, TorchChannel

    join_group(0, size, rendezvous)
    report: dict[str, Any] = {"moved": 0, "plans": 0}
    rng = random.Random(seed)
    # Shard 0 is that of this process: it has a local mover.
    local = Shard(0, num_blocks)
    remote = [RemoteShard(control) for control in controls]
    with TorchChannel(range(1, size)) as channel:
        world = World(num_blocks, [local, *remote])
        ranked = RankedCompaction(
            world.mmu, channel, range(1, size), timeout_s=PATIENCE, local_mover=local.mover
        )
        for turn in range(60):
            world.random_operation(rng)
            if turn % 4 == 3:
                moved = ranked.run_plan(world.mmu.plan_free_run(world.mmu.states()["available"]))
                report["plans"] += 1
                report["moved"] += moved
            if turn % 10 == 9:
                world.check()
        world.check()
        world.scatter()
        remote[1].set_fault("raise")
        try:
            ranked.run_plan(world.plan())
        except RankFailed as error:
            report["failed"] = (error.rank, str(error))
        world.check()
        assert ranked.run_plan(world.plan()) > 0
        world.check()
        # A rank that is late. No other connection suffers from the wait that ended.
        world.scatter()
        remote[2].set_fault("hang")
        ranked._timeout_s = 0.3
        try:
            ranked.run_plan(world.plan())
        except RankTimeout as error:
            report["late"] = (error.rank, error.ranks, type(error).__name__)
        report["destined_late"] = world.mmu.states()["destined"]
        ranked._timeout_s = PATIENCE
        remote[2].resume()
        ranked.compact()  # asks, and hears that it is done
        assert ranked.pending is None
        assert ranked.run_plan(world.plan()) > 0
        world.check()
        # A rank that dies between copy and acknowledgement: its pipe for calls ends with it.
        world.scatter()
        world.mmu.validate()
        victim = size - 1
        remote[victim - 1].set_fault("die")
        before = world.mmu.states()["destined"]
        try:
            ranked.run_plan(world.plan())
        except RankLost as error:
            report["lost"] = (error.rank, error.ranks)
        except RankTimeout as error:
            report["timeout"] = (error.rank, error.ranks)
        report["destined"] = world.mmu.states()["destined"] - before
        ranked.forget(victim)
        report["destined_after"] = world.mmu.states()["destined"]
        del world.shards[victim]
        world.check()
        assert ranked.run_plan(world.plan()) > 0
        world.check()
        ranked.stop_ranks()
    result.send(report)
    dist.destroy_process_group()


def join_group(rank: int, size: int, rendezvous: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
