"""One process decides, several copy: all ranks move or none, whatever a rank or a wire does."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import pickle
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvmmu import (
    MMU,
    InvalidConfig,
    InvalidMessage,
    Mover,
    PipeChannel,
    RankedCompaction,
    RankFailed,
    RankLost,
    RankTimeout,
    Storage,
    TorchChannel,
    serve_rank,
)
from kvmmu.ranks import _Kind, _Message

from . import rank_world
from .rank_world import CONTEXT, PATIENCE, RemoteShard, Shard, World

NUM_BLOCKS = 64
RANKS = (1, 2, 3, 4)
SHORT = 0.3  # seconds for a rank that will not answer


class Wire:
    """A channel whose messages a test can damage, drop or record, in both directions."""

    def __init__(self, inner: PipeChannel) -> None:
        self.inner = inner
        self.sending: Callable[[int, bytes], bytes | None] = lambda rank, data: data
        self.receiving: Callable[[int, bytes], bytes | None] = lambda rank, data: data
        self.sent: list[tuple[int, bytes]] = []

    @property
    def rank(self) -> int:
        return self.inner.rank

    def send(self, rank: int, data: bytes) -> None:
        self.sent.append((rank, data))
        changed = self.sending(rank, data)
        if changed is not None:
            self.inner.send(rank, changed)

    def receive(self, timeout_s: float) -> tuple[int, bytes | None] | None:
        received = self.inner.receive(timeout_s)
        if received is None or received[1] is None:
            return received
        changed = self.receiving(received[0], received[1])
        return None if changed is None else (received[0], changed)


class Group:
    """Four ranks in threads of this process, over pipes, and the world that they hold."""

    def __init__(self, timeout_s: float = PATIENCE, sizes: dict[int, int] | None = None) -> None:
        ends = {rank: multiprocessing.Pipe() for rank in RANKS}
        self.wire = Wire(PipeChannel(0, {rank: one for rank, (one, _) in ends.items()}))
        self.stop = threading.Event()
        self.shards: list[Any] = [Shard(0, NUM_BLOCKS)]
        self.returned: dict[int, Any] = {}
        self.threads = []
        for rank, (_, other) in ends.items():
            shard = Shard(rank, (sizes or {}).get(rank, NUM_BLOCKS))
            self.shards.append(shard)
            channel = PipeChannel(rank, {0: other})
            thread = threading.Thread(target=self.serve, args=(rank, shard.mover, channel))
            thread.start()
            self.threads.append(thread)
        self.world = World(NUM_BLOCKS, self.shards)
        self.ranked = RankedCompaction(
            self.world.mmu,
            self.wire,
            RANKS,
            timeout_s=timeout_s,
            local_mover=self.shards[0].mover,
        )

    def serve(self, rank: int, mover: Mover, channel: PipeChannel) -> None:
        with channel:
            try:
                self.returned[rank] = serve_rank(mover, channel, self.stop, poll_s=0.02)
            except Exception as error:
                self.returned[rank] = error

    def state(self, name: str) -> int:
        return self.world.mmu.states()[name]

    def close(self) -> None:
        self.stop.set()
        for shard in self.shards:
            shard.resume()
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        self.wire.inner.close()


@pytest.fixture
def make_group() -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []

    def make(**settings: Any) -> Group:
        groups.append(Group(**settings))
        groups[-1].world.scatter()
        return groups[-1]

    yield make
    for group in groups:
        group.close()


def test_a_plan_moves_every_rank_or_none(make_group: Callable[..., Group]) -> None:
    group = make_group()
    rng = random.Random(20)
    moved = 0
    for turn in range(150):
        group.world.random_operation(rng)
        available = group.state("available")
        fault = rng.choice(["", "", "raise"])
        if turn % 3 == 0 and available > 1:
            plan = group.world.mmu.plan_free_run(available)
            victim = rng.choice(RANKS)
            group.shards[victim].set_fault(fault if len(plan) else "")
            try:
                moved += group.ranked.run_plan(plan)
                assert not (fault and len(plan))
            except RankFailed as error:
                assert fault and error.rank == victim
            group.world.check()
            assert group.state("destined") == 0
    assert moved > 100
    assert {shard.mover.copied_bytes > 0 for shard in group.shards} == {True}
    assert group.ranked.pending is None


def test_compact_follows_the_trigger_of_the_mmu(make_group: Callable[..., Group]) -> None:
    group = make_group()
    assert group.ranked.compact() > 0
    group.world.check()
    while group.ranked.compact():
        pass
    sent = len(group.wire.sent)
    assert group.ranked.compact() == 0
    assert len(group.wire.sent) == sent


def test_a_rank_that_raises_aborts_the_plan_on_all(make_group: Callable[..., Group]) -> None:
    group = make_group()
    before = group.world.mmu.states()
    group.shards[3].set_fault("raise")
    with pytest.raises(RankFailed, match=r"rank 3 could not copy .* a bus error") as caught:
        group.ranked.run_plan(group.world.plan())
    error = caught.value
    assert error.failures == {3: "RuntimeError: a bus error"}
    assert error.epoch == group.shards[1].mover.last_epoch  # the others have copied
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.numbers) == (str(error), error.numbers)
    assert group.world.mmu.states() == before
    group.world.check()
    assert group.ranked.run_plan(group.world.plan()) > 0
    group.world.check()


def test_a_local_mover_that_raises_aborts_when_all_have_answered(
    make_group: Callable[..., Group],
) -> None:
    group = make_group()
    before = group.world.mmu.states()

    def broken(pairs: Any) -> None:
        raise OSError("a page is gone")

    group.shards[0].mover.move = broken
    with pytest.raises(OSError, match="a page is gone"):
        group.ranked.run_plan(group.world.plan())
    assert group.ranked.pending is None
    assert group.world.mmu.states() == before
    assert all(shard.mover.applied == 1 for shard in group.shards[1:])


def test_an_interrupt_between_copies_and_answers_loses_nothing(
    make_group: Callable[..., Group],
) -> None:
    group = make_group()
    before = group.world.mmu.states()
    group.shards[2].set_fault("hang")
    move = group.shards[0].mover.move

    def interrupted(pairs: Any) -> None:
        raise KeyboardInterrupt

    group.shards[0].mover.move = interrupted
    with pytest.raises(KeyboardInterrupt):
        group.ranked.run_plan(group.world.plan())
    pending = group.ranked.pending
    assert pending is not None
    assert 2 in pending.ranks
    group.shards[2].resume()
    wait_until(lambda: group.ranked.poll() is None)
    assert group.world.mmu.states() == before
    group.shards[0].mover.move = move
    assert group.ranked.run_plan(group.world.plan()) > 0
    group.world.check()


def test_destinations_stay_out_of_use_until_a_silent_rank_answers(
    make_group: Callable[..., Group],
) -> None:
    group = make_group(timeout_s=SHORT)
    group.shards[2].set_fault("hang")
    plan = group.world.plan()
    began = time.monotonic()
    with pytest.raises(RankTimeout, match=r"rank 2 has not answered .* stay out of use") as caught:
        group.ranked.run_plan(plan)
    assert SHORT <= time.monotonic() - began < PATIENCE / 2
    error = caught.value
    assert not isinstance(error, RankLost)
    assert (error.rank, error.ranks, error.seconds) == (2, (2,), SHORT)
    pending = group.ranked.pending
    assert pending is not None
    assert (pending.epoch, pending.num_moves, pending.ranks) == (error.epoch, len(plan), (2,))
    assert group.state("destined") == len(plan)
    group.world.check()

    # Nothing new is begun meanwhile, and what the late copy will overwrite is nobody's: fill the
    # pool to the last block first.
    with pytest.raises(RankTimeout):
        group.ranked.run_plan(plan)
    began = time.monotonic()
    for _ in range(10):  # asked once; a serving loop does not wait at each step
        with pytest.raises(RankTimeout):
            group.ranked.compact()
    assert time.monotonic() - began < 5 * SHORT
    assert group.state("destined") == len(plan)
    group.world.open([7] * (group.state("empty") * 4))
    group.world.check()
    assert group.ranked.poll() == pending

    group.shards[2].resume()
    wait_until(lambda: group.ranked.poll() is None)
    assert group.state("destined") == 0
    group.world.check()
    group.world.close(max(group.world.tokens))
    assert group.ranked.run_plan(group.world.plan()) > 0
    group.world.check()


def test_control_an_abort_in_spite_of_a_silent_rank_lets_it_overwrite_a_sequence(
    make_group: Callable[..., Group],
) -> None:
    """Without the wait the same story ends badly; so the test above can fail."""
    group = make_group(timeout_s=SHORT)
    shard = group.shards[2]
    shard.set_fault("hang")
    with pytest.raises(RankTimeout):
        group.ranked.run_plan(group.world.plan())
    transaction = group.ranked._pending
    assert transaction is not None
    group.world.mmu.abort(transaction.moves)
    group.ranked._pending = None
    group.world.open([7] * (group.state("empty") * 4))
    group.world.check()
    shard.resume()
    wait_until(lambda: shard.mover.applied == 1)
    with pytest.raises(AssertionError):
        group.world.check()


def test_a_late_answer_to_an_old_epoch_is_not_taken_for_a_new_one(
    make_group: Callable[..., Group],
) -> None:
    group = make_group(timeout_s=SHORT)
    kept: list[bytes] = []
    plan = group.world.plan()
    group.wire.receiving = lambda rank, data: kept.append(data) if rank == 2 else data
    with pytest.raises(RankTimeout):
        group.ranked.run_plan(plan)
    group.wire.receiving = lambda rank, data: data
    # The next call asks, and rank 2 says that it is done.
    group.shards[2].set_fault("hang")
    with pytest.raises(RankTimeout) as caught:
        group.ranked.run_plan(plan)
    assert group.ranked.pending is not None
    assert group.ranked.pending.epoch == caught.value.epoch
    assert len(kept) == 1
    old = _Message.from_bytes(kept[0])
    assert (old.kind, old.epoch) == (_Kind.DONE, caught.value.epoch - 1)
    group.ranked._take(2, kept[0])  # it arrives now
    assert group.ranked.pending is not None
    assert group.ranked.pending.ranks == (2,)
    # Nor is the answer to another RankedCompaction, whatever epoch and number it bears.
    alien = _Message(_Kind.DONE, 99, 1000, caught.value.epoch, 2)
    group.ranked._take(2, alien.to_bytes())
    assert group.ranked.pending.ranks == (2,)
    assert group.ranked.ignored_messages == 2
    group.world.check()


def test_forget_gives_the_blocks_of_a_dead_rank_back(make_group: Callable[..., Group]) -> None:
    group = make_group(timeout_s=SHORT)
    group.wire.sending = lambda rank, data: None if rank == 4 else data
    before = group.world.mmu.states()
    with pytest.raises(RankTimeout):
        group.ranked.run_plan(group.world.plan())
    with pytest.raises(InvalidConfig, match="rank 9 is none of"):
        group.ranked.forget(9)
    group.ranked.forget(4)
    assert group.ranked.ranks == (1, 2, 3)
    assert group.ranked.pending is None
    assert group.world.mmu.states() == before
    del group.world.shards[4]
    assert group.ranked.run_plan(group.world.plan()) > 0
    group.world.check()


@pytest.mark.parametrize("direction", ["to a rank", "from a rank"])
def test_bytes_damaged_on_the_way_never_move_anything_wrong(
    make_group: Callable[..., Group], direction: str
) -> None:
    """Every byte of a plan, and of an answer, flipped once: it is refused or cleared up."""
    group = make_group()
    rng = random.Random(4)
    position: list[int] = []

    def damage(rank: int, data: bytes) -> bytes:
        if rank != 2 or not position:
            return data
        where = position.pop() % len(data)
        return data[:where] + bytes([data[where] ^ (1 << rng.randrange(8))]) + data[where + 1 :]

    if direction == "to a rank":
        group.wire.sending = damage
    else:
        group.wire.receiving = damage
    outcomes = {"moved": 0, "refused": 0}
    for at in range(0, 120, 1 if direction == "from a rank" else 2):
        group.world.random_operation(rng)
        if group.state("available") < 2:
            continue
        plan = group.world.mmu.plan_free_run(group.state("available"))
        if len(plan) == 0:
            continue
        position.append(at)
        try:
            assert group.ranked.run_plan(plan) > 0
            outcomes["moved"] += 1
        except RankFailed as error:
            assert error.rank == 2
            outcomes["refused"] += 1
        assert group.ranked.pending is None
        assert not position
        group.world.check()
    if direction == "to a rank":  # no damaged plan was copied
        assert outcomes["moved"] == 0
        assert outcomes["refused"] > 10
    else:  # the copies were made, and asked about again
        assert outcomes["moved"] > 10
        assert outcomes["refused"] == 0


def test_noise_does_not_end_the_loop_of_a_rank(make_group: Callable[..., Group]) -> None:
    group = make_group()
    rng = random.Random(6)
    good = _Message(_Kind.PLAN, group.ranked._session, 0, 1, 1, NUM_BLOCKS, b"x").to_bytes()
    for noise in (b"", b"x", good[:20], good[:-1], b"kvmr" + rng.randbytes(80), rng.randbytes(56)):
        group.wire.inner.send(1, noise)
    other_version = good[:4] + b"\x02\x00" + good[6:]
    group.wire.inner.send(1, other_version)
    for_another = _Message(_Kind.PLAN, group.ranked._session, 1, 1, 3, NUM_BLOCKS, b"").to_bytes()
    group.wire.inner.send(1, for_another)
    group.wire.inner.send(1, _Message(_Kind.DONE, group.ranked._session, 1, 9, 1).to_bytes())
    assert group.ranked.run_plan(group.world.plan()) > 0
    group.world.check()


def test_a_duplicate_of_a_plan_is_not_copied_again(make_group: Callable[..., Group]) -> None:
    group = make_group()
    assert group.ranked.run_plan(group.world.plan()) > 0
    rank, data = next(item for item in group.wire.sent if item[0] == 1)
    group.world.open([7] * (group.state("empty") * 4))
    group.wire.inner.send(rank, data)
    received = group.wire.receive(PATIENCE)
    assert received is not None
    assert received[1] is not None
    answer = _Message.from_bytes(received[1])
    assert answer.kind is _Kind.FAILED
    assert b"in use by now" in answer.body
    group.world.check()


def test_another_version_is_named_with_both() -> None:
    data = _Message(_Kind.STOP, 1, 2, 3, 4).to_bytes()
    with pytest.raises(InvalidMessage, match="version 7, but this is version 1") as caught:
        _Message.from_bytes(data[:4] + b"\x07\x00" + data[6:])
    assert (caught.value.version, caught.value.expected) == (7, 1)


def test_every_flipped_or_missing_byte_of_a_message_is_noticed() -> None:
    message = _Message(_Kind.PLAN, 2**64 - 1, 2, 3, 4, 5, b"some bytes of moves")
    data = message.to_bytes()
    assert _Message.from_bytes(data) == message
    for at in range(len(data)):
        for bad in (data[:at], data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]):
            with contextlib.suppress(InvalidMessage):
                assert not _Message.from_bytes(bad).whole
    assert not _Message.from_bytes(data + b"x").whole


@pytest.mark.parametrize("size", [NUM_BLOCKS - 30, NUM_BLOCKS * 2])
def test_a_rank_with_a_storage_of_another_shape_refuses(
    make_group: Callable[..., Group], size: int
) -> None:
    group = make_group(sizes={2: NUM_BLOCKS, 3: NUM_BLOCKS})
    shard = Shard(2, size)
    group.shards[2].mover._executor = shard.mover._executor
    with pytest.raises(
        RankFailed, match=f"pool of {NUM_BLOCKS} blocks, but this storage has {size}"
    ):
        group.ranked.run_plan(group.world.plan())
    assert not shard.k.any()
    assert group.state("destined") == 0


def test_a_rank_follows_one_compaction_only(make_group: Callable[..., Group]) -> None:
    group = make_group(timeout_s=PATIENCE)
    assert group.ranked.run_plan(group.world.plan()) > 0
    second = RankedCompaction(group.world.mmu, group.wire, RANKS, timeout_s=PATIENCE)
    group.world.scatter()
    plan = group.world.plan()
    with pytest.raises(RankFailed, match="follows another RankedCompaction") as caught:
        second.run_plan(plan)
    assert sorted(caught.value.failures) == list(RANKS)
    group.world.check()


def test_ranks_stop_when_told(make_group: Callable[..., Group]) -> None:
    group = make_group()
    assert group.ranked.run_plan(group.world.plan()) > 0
    group.ranked.stop_ranks()
    for thread in group.threads:
        thread.join(PATIENCE)
    assert group.returned == dict.fromkeys(RANKS, 1)


def test_a_rank_says_when_the_one_that_decides_is_gone(make_group: Callable[..., Group]) -> None:
    group = make_group()
    group.wire.inner.close()
    for thread in group.threads:
        thread.join(PATIENCE)
    for error in group.returned.values():
        assert isinstance(error, RankLost)
        assert error.rank == 0
    with pytest.raises(RankLost, match="gone"):
        group.ranked.run_plan(group.world.plan())
    assert group.state("destined") == 0


@pytest.mark.parametrize(
    ("ranks", "timeout_s", "message"),
    [
        ([], 1.0, "at least one"),
        ([1, 1], 1.0, "named once"),
        ([0, 1], 1.0, "rank 0 is this end"),
        ([-1], 1.0, r"0 \.\. 2\*\*32 - 1"),
        (["1"], 1.0, "must be integers"),
        ([True], 1.0, "must be integers"),
        ([1], 0.0, "above 0"),
        ([1], float("nan"), "above 0"),
        ([1], float("inf"), "above 0"),
    ],
)
def test_a_bad_setting_is_named(ranks: Any, timeout_s: float, message: str) -> None:
    with PipeChannel(0, {}) as channel, pytest.raises(InvalidConfig, match=message):
        RankedCompaction(MMU(8, 4), channel, ranks, timeout_s=timeout_s)


def test_a_send_to_a_peer_that_does_not_read_does_not_wait() -> None:
    one, other = multiprocessing.Pipe()
    channel = PipeChannel(0, {1: one})
    began = time.monotonic()
    for _ in range(20):
        channel.send(1, bytes(100_000))  # more than a pipe holds
    assert channel.receive(0.0) is None
    assert time.monotonic() - began < PATIENCE / 2
    with pytest.raises(InvalidConfig, match=r"none of the peers \[1\]"):
        channel.send(2, b"")
    other.close()
    assert channel.receive(PATIENCE) == (1, None)
    with pytest.raises(ConnectionError):
        channel.send(1, b"")
    channel.close()


# -- processes -------------------------------------------------------------------------------


@pytest.fixture
def processes() -> Iterator[list[Any]]:
    started: list[Any] = []
    yield started
    for process in started:
        process.kill()
        process.join(PATIENCE)
        process.close()


def test_a_process_killed_between_copy_and_answer_loses_nothing(processes: list[Any]) -> None:
    connections, controls = {}, []
    for rank in (1, 2):
        here, there = CONTEXT.Pipe()
        control, control_there = CONTEXT.Pipe()
        process = CONTEXT.Process(
            target=rank_world.pipe_rank, args=(rank, NUM_BLOCKS, there, control_there)
        )
        process.start()
        processes.append(process)
        there.close()
        control_there.close()
        connections[rank] = here
        controls.append(control)
    local = Shard(0, NUM_BLOCKS)
    world = World(NUM_BLOCKS, [local, *(RemoteShard(control) for control in controls)])
    with PipeChannel(0, connections) as channel:
        ranked = RankedCompaction(
            world.mmu, channel, (1, 2), timeout_s=PATIENCE, local_mover=local.mover
        )
        world.scatter()
        assert ranked.run_plan(world.plan()) > 0
        world.check()
        world.scatter()
        plan = world.plan()
        world.shards[2].set_fault("die")
        with pytest.raises(RankLost) as caught:
            ranked.run_plan(plan)
        assert (caught.value.rank, caught.value.ranks) == (2, (2,))
        assert world.mmu.states()["destined"] == len(plan)
        with pytest.raises(RankLost):  # and says so until it is forgotten
            ranked.compact() or ranked.run_plan(plan)
        ranked.forget(2)
        assert world.mmu.states()["destined"] == 0
        del world.shards[2]
        world.check()
        assert ranked.run_plan(plan) > 0
        world.check()
        ranked.stop_ranks()
    for control in controls:
        control.close()


needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


@needs_torch
def test_one_mmu_and_four_movers_over_gloo(processes: list[Any], tmp_path: Path) -> None:
    """From a seed: operations and plans; ranks that raise, are late, are killed."""
    size = 5
    # The server imports torch once; every process is forked from it, before it has any thread.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "kvmmu.channels", "tests.rank_world"])
    meet = str(tmp_path / "rendezvous")
    pipes = [context.Pipe() for _ in range(1, size)]
    result, result_there = context.Pipe()
    for rank, (_, there) in zip(range(1, size), pipes, strict=True):
        processes.append(
            context.Process(
                target=rank_world.torch_rank, args=(rank, size, meet, NUM_BLOCKS, there)
            )
        )
    ends = [here for here, _ in pipes]
    seed = 2024
    processes.append(
        context.Process(
            target=rank_world.torch_mmu, args=(size, meet, NUM_BLOCKS, ends, result_there, seed)
        )
    )
    for process in processes:
        process.start()
    for connection in [end for pair in pipes for end in pair] + [result_there]:
        connection.close()
    assert result.poll(2 * PATIENCE), "no report in time"
    report = result.recv()
    result.close()
    assert report["moved"] > 20
    assert report["failed"][0] == 2
    assert "a bus error" in report["failed"][1]
    assert report["late"] == (3, (3,), "RankTimeout")
    assert report["destined_late"] > 0
    assert report["lost"] == (4, (4,))
    assert report["destined"] > 0
    assert report["destined_after"] == 0
    for process in processes:
        process.join(PATIENCE)
    assert [process.exitcode for process in processes] == [0, 0, 0, -9, 0]


@needs_torch
def test_a_torch_channel_without_a_group_says_what_to_call() -> None:
    with pytest.raises(InvalidConfig, match="init_process_group"):
        TorchChannel([0])


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_serve_rank_leaves_when_its_event_is_set() -> None:
    one, other = multiprocessing.Pipe()
    stop = threading.Event()
    stop.set()
    mover = Mover(Storage.from_numpy([np.zeros((5, 3))]))
    with PipeChannel(1, {0: one}) as channel:
        assert serve_rank(mover, channel, stop) == 0
    other.close()
