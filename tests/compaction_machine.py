"""The machine of ``machine.py`` with every goal of compaction, and with faults at every point of a
move.

What lives here: plans of all goals, leases, memory that is given back and taken back, passes that
end as passes end when something breaks (the mover raises, the process is killed between copy and
commit, a rank never answers, a step never signals its end, a source changes under way), and a
counter for each such point. What never lives here: what must hold after each operation (the base
machine checks it), a test.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from kvmmu import (
    InvalidBlock,
    Moves,
    OutOfBlocks,
    Plan,
    RankedCompaction,
    RankTimeout,
    run_plan,
)

from .machine import (
    MAX_MOVES_IN_FLIGHT,
    Broken,
    Carrier,
    Flight,
    MMUMachine,
    Prompt,
    index,
    prompts,
    token_lists,
)

Machine: TypeAlias = Any
"""A CompactionMachine; its rules are called as plain methods by walks."""

GOALS = ("compaction", "run", "below", "huge", "groups", "gather")
CHANGES = ("close", "truncate", "write", "release", "pin", "append", "fork", "rewrite", "lease")
LOSES = ("close", "truncate", "write", "release", "pin", "rewrite", "lease")
"""Those that can make a commit lose a block."""
FAULTS = (
    "the mover raised before the first copy",
    "the mover raised on its way",
    "killed between begin and copy",
    "killed between copy and commit",
    "a rank never answered",
    "a rank copied late",
    "a step never ended",
    *(f"lost to {change}" for change in LOSES),
)
"""Every point at which something breaks. Each must be reached in a run of the tests."""

ELSEWHERE = 0xE1_E1_E1_E1_E1_E1_E1_E1
"""What the new owner of memory that was given back writes there."""

TRIGGERS: dict[str, dict[str, Any]] = {
    "default": {},
    "eager": {"windows_below": 1.0, "gather_least": 0.01},
    # Without free windows: the two want different blocks to move, and need not come to an end.
    "ratio": {"compaction_start": 0.1, "compaction_stop": 0.05, "windows_below": 0.0},
    "guarantee": {"guarantee": 0},
    "guarantee with slack": {"guarantee": 2},
    "guarantee alone": {"guarantee": 0},
}
"""``guarantee alone``: nobody asks for other moves, so that its two bounds can be checked."""


@dataclass
class Lease:
    """Blocks under a lease, by number; what they held is noted as for pins."""

    number: int
    blocks: list[int]


class Deaf:
    """A channel to a rank that takes every message and never says a word."""

    rank = 0

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, rank: int, data: bytes) -> None:
        """Takes it."""
        self.sent.append(data)

    def receive(self, timeout_s: float) -> None:
        """Nothing, ever."""


class Watched:
    """Stands before an MMU and keeps what it began."""

    def __init__(self, mmu: Any) -> None:
        self._mmu = mmu
        self.begun: Moves | None = None

    def begin(self, plan: Plan) -> Moves:
        """As the MMU's."""
        begun: Moves = self._mmu.begin(plan)
        self.begun = begun
        return begun

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mmu, name)


class CompactionMachine(MMUMachine):
    """Random operations, plans of every goal, and faults."""

    faults: ClassVar[Counter[str]] = Counter()
    """How often each of ``FAULTS`` was reached, and ``moves`` of each goal, over all machines."""

    @initialize(
        num_blocks=st.one_of(st.integers(2, 16), st.integers(30, 64)),
        block_size=st.integers(1, 4),
        page_orders=st.sampled_from([(0,), (0, 2), (0, 2, 9)]),
        budget=st.sampled_from([4, 8, 32, 600]),
        trigger=st.sampled_from(list(TRIGGERS)),
        placement=st.sampled_from(["scatter", "address", "fullest", "fifo"]),
        hold_blocks=st.integers(0, 8),
        prefix_caching=st.booleans(),
        served=st.lists(
            st.tuples(prompts, st.sampled_from([False, False, True])), min_size=2, max_size=6
        ),
    )
    def build(
        self,
        num_blocks: int,
        block_size: int,
        page_orders: tuple[int, ...],
        budget: int,
        trigger: str,
        placement: str,
        hold_blocks: int,
        prefix_caching: bool,
        served: list[tuple[Prompt, bool]],
        scale: int = 1,
    ) -> None:
        """A pool with a trigger; pages of 4 and of 512 blocks for short sequences already."""
        self.trigger = trigger
        self.leases: list[Lease] = []
        self.leased: Counter[int] = Counter()
        self.silent: int | None = None
        self.fenced = 0
        self.offline: set[int] = set()
        config = dict(TRIGGERS[trigger])
        start = config.pop("compaction_start", None)
        super().build(
            num_blocks,
            block_size,
            prefix_caching=prefix_caching,
            placement="address" if "guarantee" in config else placement,
            eviction="lru",
            page_orders=page_orders,
            medium_from=4,
            hold_blocks=hold_blocks,
            dedup=False,
            budget=budget,
            thresholds=(start, config.pop("compaction_stop", 0.0)),
            shorter=0,
            served=served,
            scale=scale,
            **config,
        )

    @property
    def alone(self) -> bool:
        """No moves but those of the trigger."""
        return self.trigger == "guarantee alone"

    # -- plans -----------------------------------------------------------------------------------

    def plan_of(self, goal: str, count: int, most: int | None) -> Plan | None:
        """A plan for a goal, checked; None when there is none."""
        mmu, n = self.mmu, self.n
        if self.alone or goal == "compaction":
            plan: Plan | None = mmu.plan_compaction(max_blocks=most)
            if plan is not None:
                assert 0 < len(plan) <= min(self.budget, n if most is None else max(most, 1))
                self.keep(plan)
            return plan
        # As much as there can be, or a little less: less than that is mostly there already.
        most_of = max(1, mmu.states()["available"] - count % 3)
        size = min(n, [1, 2, 3, 4, 8, 16, 64][count % 7])
        calls = {
            "run": lambda: mmu.plan_free_run(most_of, max_blocks=most),
            "below": lambda: mmu.plan_below([0.0, 0.02, 0.1, 0.35][count % 4], max_blocks=most),
            "huge": lambda: mmu.plan_huge_pages(max(1, most_of // 512), max_blocks=most),
            "groups": lambda: mmu.plan_groups(size, max(1, most_of // size), max_blocks=most),
            "gather": lambda: mmu.plan_gather(self.pick(count), max_blocks=most),
        }
        if goal == "huge" and n < 512:
            goal = "groups"
        if goal == "gather" and not self.sequences:
            return None
        plan, _ = self.attempt(calls[goal], OutOfBlocks)
        if plan is not None:
            assert most is None or len(plan) <= most
            assert not (plan.complete and plan.remaining)
            self.keep(plan)
        return plan

    def plan_with_moves(self, goal: str, count: int) -> Plan | None:
        """A plan for this goal, or for the next that has moves in it."""
        at = GOALS.index(goal)
        for other in GOALS[at:] + GOALS[:at]:
            plan = self.plan_of(other, count, None)
            if plan is not None and len(plan):
                return plan
            if self.alone:
                break
        return None

    def carry_out(self, plan: Plan) -> int:
        """Begin, copy and commit of a plan that was made just now: it is right in every move. (One
        that evicts a block may take its own source out of the cache by that.)"""
        moved = run_plan(self.mmu, Carrier(self.device, None), plan)
        assert moved == len(plan) or self.caching, f"{moved} of {len(plan)} moves of {plan.goal}"
        self.faults[f"moves: {plan.goal.split('(')[0]}"] += moved
        return moved

    @precondition(lambda self: len(self.flights) < MAX_MOVES_IN_FLIGHT)
    @rule(goal=st.sampled_from(GOALS), count=index, most=st.sampled_from([None, 1, 5, 40]))
    def begin_goal(self, goal: str, count: int, most: int | None) -> None:
        """One more transaction in flight."""
        plan = self.plan_of(goal, count, most)
        if plan is not None:
            self.begin_plan(plan)

    @rule(goal=st.sampled_from(GOALS), count=index, most=st.sampled_from([None, 1, 5, 40]))
    def one_pass(self, goal: str, count: int, most: int | None) -> None:
        """Plan, begin, copy, commit at once: what was predicted has come."""
        plan = self.plan_of(goal, count, most)
        if plan is None:
            return
        runs = {sequence: self.mmu.info(sequence).num_runs for sequence in self.sequences}
        moved = self.carry_out(plan)
        quiet = not self.steps and not self.flights
        if quiet and moved == len(plan) > 0:
            measure = self.mmu.measure()
            assert measure.largest_run_available == plan.predicted_run
            assert abs(measure.ratio_available - plan.predicted_ratio) < 1e-9
            assert measure.free_windows == plan.predicted_windows
        if quiet and goal == "gather" and not self.alone and most is None:
            sequence = self.pick(count)
            assert self.mmu.info(sequence).num_runs <= runs[sequence]

    @rule(most=st.sampled_from([None, None, 3]))
    def passes(self, most: int | None) -> None:
        """Passes of the trigger, until it has nothing to do: they end, and the guarantee holds."""
        for turn in range(4 * self.n + 8):
            plan = self.plan_of("compaction", 0, most)
            if plan is None:
                break
            moved = self.carry_out(plan)
            if moved == 0 and (self.steps or self.flights or self.pins):
                break  # what stands in the way may stand there for long
            assert turn < 4 * self.n + 7, "passes do not end"
        held = self.mmu.guarantee()
        quiet = not self.steps and not self.flights
        if "guarantee" in self.trigger and quiet and plan is None:
            assert held["owed"] == 0
            assert held["windows"] <= held["allowed"] + held["immovable"], held

    # -- leases ----------------------------------------------------------------------------------

    @precondition(lambda self: self.sequences and len(self.leases) < 3)
    @rule(at=index, start=index, count=index)
    def lease(self, at: int, start: int, count: int) -> None:
        """A transfer begins to read a part of a sequence."""
        self.lease_part(self.pick(at), start, count)

    def lease_part(self, sequence: int, start: int, count: int) -> None:
        model = self.sequences[sequence]
        first = model.released * self.size
        if len(model.values) <= first or len(self.leases) >= 3:
            return
        start = first + start * self.scale % (len(model.values) - first)
        stop = min(len(model.values), start + 1 + count * self.scale)
        number, blocks = self.mmu.lease(sequence, start, stop)
        lease = Lease(int(number), blocks.tolist())
        assert lease.blocks == self.table(sequence)[start // self.size : -(-stop // self.size)]
        for block in lease.blocks:
            self.pins.setdefault(block, []).append(self.frozen_contents(block) or {})
            self.leased[block] += 1
        self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(at=index)
    def end_lease(self, at: int) -> None:
        """A transfer is done; in any order."""
        lease = self.leases.pop(at % len(self.leases))
        self.mmu.end_lease(lease.number)
        for block in lease.blocks:
            self.leased[block] -= 1
            self.pins[block].pop()
            if not self.pins[block]:
                del self.pins[block]

    @rule(block=index, pinned=st.booleans())
    def unpin(self, block: int, pinned: bool) -> None:
        """As in the base, but a lease is no pin."""
        block %= self.n
        if pinned and self.pins:
            block = sorted(self.pins)[block % len(self.pins)]
        if not self.leased[block]:
            super().unpin(block, False)

    # -- memory given back -----------------------------------------------------------------------

    @rule(count=index, granule=st.sampled_from([1, 2, 4, 64]))
    def shrink(self, count: int, granule: int) -> None:
        """Blocks go offline, and somebody else writes into their memory."""
        granule = min(granule, 1 << (self.n.bit_length() - 1))
        before, tables = self.mmu.states(), self.all_tables()
        wanted = before["offline"] + count * self.scale % (before["available"] + 2)
        taken = self.mmu.shrink(wanted, granule=granule).tolist()
        after = self.mmu.states()
        assert taken == sorted(set(taken)) and not self.offline & set(taken)
        assert len(taken) % granule == 0
        assert after["offline"] == before["offline"] + len(taken)
        assert after["available"] == before["available"] - len(taken)
        assert after["offline"] >= wanted or len(taken) <= count * self.scale
        assert self.all_tables() == tables
        self.offline |= set(taken)
        self.device.values[taken] = ELSEWHERE
        self.device.tails[taken] = ELSEWHERE & 0xFF

    @rule(count=index, granule=st.sampled_from([1, 2, 4, 64]), everything=st.booleans())
    def grow(self, count: int, granule: int, everything: bool) -> None:
        """Some of them, or all, come back; those that are not offline do not."""
        granule = min(granule, 1 << (self.n.bit_length() - 1))
        wanted = None if everything else count * self.scale
        back = self.mmu.offline_blocks(wanted, granule=granule)
        assert set(back.tolist()) <= self.offline
        assert len(back) >= min(wanted or 0, len(self.offline)) and (
            not everything or len(back) == len(self.offline)
        )
        here = sorted(set(range(self.n)) - self.offline)
        if here:
            wrong = np.append(back, here[count % len(here)])
            error = self.refused(InvalidBlock, lambda: self.mmu.grow(wrong))
            assert error.block == wrong[-1]
        if len(back):
            self.refused(InvalidBlock, lambda: self.mmu.grow(np.append(back, back[0])))
        self.mmu.grow(back)
        self.offline -= set(back.tolist())

    @rule(count=index, granule=st.sampled_from([1, 2, 4]), most=st.sampled_from([None, 1, 5]))
    def make_room_to_shrink(self, count: int, granule: int, most: int | None) -> None:
        """A plan towards blocks that can be given back, carried out; then they can be."""
        if self.alone or granule > self.n:
            return
        wanted = 1 + count * self.scale % self.n
        plan, _ = self.attempt(
            lambda: self.mmu.plan_shrink(wanted, granule=granule, max_blocks=most), OutOfBlocks
        )
        if plan is None:
            return
        assert most is None or len(plan) <= most
        self.keep(plan)
        self.carry_out(plan)

    # -- faults ----------------------------------------------------------------------------------

    @rule(goal=st.sampled_from(GOALS), count=index, fails_after=st.integers(0, 9))
    def mover_raises(self, goal: str, count: int, fails_after: int) -> None:
        """The mover dies at some move: everything is as before."""
        plan = self.plan_with_moves(goal, count)
        if plan is None:
            return
        tables, states, matches = self.all_tables(), self.mmu.states(), self.matches()
        copies = min(fails_after, len(plan) - 1)
        try:
            run_plan(self.mmu, Carrier(self.device, copies), plan)
        except Broken:
            where = "on its way" if copies else "before the first copy"
            self.faults[f"the mover raised {where}"] += 1
        else:
            raise AssertionError("the error of the mover was swallowed")
        assert self.all_tables() == tables
        assert self.mmu.states()["destined"] == states["destined"]
        # (A destination that was cached has been dropped for it, and what stood behind that. One of
        # those that is under another move stays, in use by that.)
        assert 0 <= self.mmu.states()["in_use"] - states["in_use"] <= states["destined"]
        assert all(now <= before for now, before in zip(self.matches(), matches, strict=True))

    @rule(goal=st.sampled_from(GOALS), count=index, copied=st.booleans())
    def killed(self, goal: str, count: int, copied: bool) -> None:
        """Whoever carries the moves out is gone; all that is left are the bytes it was sent."""
        plan = self.plan_with_moves(goal, count)
        if plan is None:
            return
        tables = self.all_tables()
        moves = self.mmu.begin(plan)
        left = moves.to_bytes()
        if not len(moves):
            self.mmu.abort(moves)
            return
        if copied:
            self.device.move(moves.pairs)
        del moves
        self.mmu.abort(Moves.from_bytes(left))
        assert self.all_tables() == tables
        where = "copy and commit" if copied else "begin and copy"
        self.faults[f"killed between {where}"] += 1

    @rule(
        goal=st.sampled_from(GOALS),
        count=index,
        change=st.sampled_from(CHANGES),
        tokens=token_lists,
        late=st.booleans(),
    )
    def rank_never_answers(
        self, goal: str, count: int, change: str, tokens: list[int], late: bool
    ) -> None:
        """The moves stay begun, whatever else happens, until the rank is declared dead."""
        plan = self.plan_with_moves(goal, count)
        if plan is None:
            return
        watched = Watched(self.mmu)
        ranked = RankedCompaction(watched, Deaf(), [1], timeout_s=1e-4)  # type: ignore[arg-type]
        tables, states = self.all_tables(), self.mmu.states()
        try:
            moved = ranked.run_plan(plan)
        except RankTimeout as error:
            assert error.ranks == (1,)
        else:
            assert moved == 0 and watched.begun is not None and not len(watched.begun)
            return
        self.faults["a rank never answered"] += 1
        assert watched.begun is not None and ranked.pending is not None
        assert self.all_tables() == tables
        flight = Flight(watched.begun, watched.begun.pairs.copy())
        assert self.mmu.states()["destined"] == states["destined"] + len(flight.pairs)
        self.flights.append(flight)
        self.everything_holds()
        self.change_source(flight, count, change, tokens)
        self.everything_holds()
        if late:
            self.device.move(flight.pairs)
            self.faults["a rank copied late"] += 1
            self.everything_holds()
        self.flights.remove(flight)
        ranked.forget(1)
        assert ranked.poll() is None
        assert self.mmu.states()["destined"] == states["destined"]

    @precondition(lambda self: self.sequences and self.silent is None and len(self.steps) < 2)
    @rule(at=index)
    def step_falls_silent(self, at: int) -> None:
        """A step reads a sequence and never signals that it has ended."""
        sequence = self.pick(at)
        if self.in_flight(sequence):
            return
        number = self.begin_step()
        if self.schedule(number, [sequence], [1], [1], plain=False):
            self.report_written(number)
            self.silent, self.fenced = number, 0

    @precondition(lambda self: self.silent is not None)
    @rule(really=st.sampled_from([False, False, True]))
    def silence_ends(self, really: bool) -> None:
        """Somebody has noticed: the step is over after all."""
        if really and self.silent is not None:
            number, self.silent, self.fenced = self.silent, None, 0
            self.finish(number)

    @rule(at=index)
    def end_step(self, at: int) -> None:
        """As in the base, without the silent one."""
        ready = [
            n for n, s in self.steps.items() if (s.settled or not s.prepared) and n != self.silent
        ]
        if ready:
            self.finish(ready[at % len(ready)])

    def commit_moves(self, flight: Flight) -> None:
        """As in the base; what is moved away from waits for the silent step."""
        before = self.mmu.states()["fenced"]
        super().commit_moves(flight)
        more = self.mmu.states()["fenced"] - before
        if self.silent is not None and more > 0:
            self.fenced += more
            self.faults["a step never ended"] += 1

    @precondition(lambda self: self.sequences and not self.flights)
    @rule(
        goal=st.sampled_from(GOALS),
        count=index,
        change=st.sampled_from(CHANGES),
        tokens=token_lists,
        when=st.sampled_from(["planned", "begun", "copied"]),
        end=st.sampled_from(["commit", "commit", "abort", "later"]),
    )
    def race_goal(
        self, goal: str, count: int, change: str, tokens: list[int], when: str, end: str
    ) -> None:
        """A sequence changes once its move is planned, has begun, or has been copied."""
        plan = self.plan_with_moves(goal, count)
        if plan is None:
            return
        if when != "planned":
            self.begin_plan(plan)
        flight = self.flights[-1] if self.flights else Flight(None, plan.pairs)  # type: ignore[arg-type]
        if when == "copied":
            self.copy_moves(flight, len(flight.pairs))
        self.change_source(flight, count, change, tokens)
        self.everything_holds()
        if when == "planned":
            self.begin_plan(plan)
        flight = self.flights[-1]
        self.copy_moves(flight, len(flight.pairs))
        if end == "commit":
            dropped = self.mmu.stats()["moves_dropped"]
            self.commit_moves(flight)
            if self.mmu.stats()["moves_dropped"] > dropped and when != "planned":
                self.faults[f"lost to {change}"] += 1
        elif end == "abort":
            self.abort_moves(flight)

    def change_source(self, flight: Flight, at: int, change: str, tokens: list[int]) -> None:
        """Something happens to a sequence whose blocks are on their way."""
        sources = set(flight.pairs[:, 0].tolist())
        touched = [s for s in sorted(self.sequences) if sources & set(self.table(s))]
        if not touched:
            return
        sequence = touched[at % len(touched)]
        if change == "release":
            self.release_all_of(sequence)
        elif change == "truncate":
            blocks = self.table(sequence)
            first = next(i for i, block in enumerate(blocks) if block in sources)
            self.truncate_to(sequence, first * self.size)
        elif change == "lease":
            self.lease_part(sequence, at, self.n)
        elif change == "pin":
            blocks = [block for block in self.table(sequence) if block in sources]
            self.pin_block(blocks[at % len(blocks)])
        else:
            self.change(sequence, change, tokens)

    def release_all_of(self, sequence: int) -> None:
        model = self.sequences[sequence]
        self.release_before(sorted(self.sequences).index(sequence), 0, True)
        assert self.mmu.info(sequence).num_released == model.released

    # -- rules of the base that plan for themselves ----------------------------------------------

    @rule(count=index, most=st.none(), whole=st.just(True), begun=st.booleans())
    def plan_free_run(self, count: int, most: int | None, whole: bool, begun: bool) -> None:
        """Unless only the trigger may move."""
        if not self.alone:
            super().plan_free_run(count, most, whole, begun)

    @rule(ratio=st.sampled_from([0.0, 0.35]), most=st.sampled_from([None, 3]))
    def plan_below(self, ratio: float | None, most: int | None) -> None:
        """Unless only the trigger may move."""
        if not self.alone:
            super().plan_below(ratio, most)

    @precondition(lambda self: not self.flights)
    @rule(fails_after=st.one_of(st.none(), st.integers(0, 3)))
    def compact_at_once(self, fails_after: int | None) -> None:
        """Unless only the trigger may move."""
        if not self.alone and not self.offline:
            super().compact_at_once(fails_after)

    @precondition(lambda self: self.sequences and not self.flights)
    @rule(
        at=index,
        what=st.sampled_from(["write", "append", "truncate", "close", "fork", "pin", "rewrite"]),
        tokens=token_lists,
        when=st.sampled_from(["planned", "begun", "copied"]),
        end=st.sampled_from(["commit", "abort", "later"]),
    )
    def race(self, at: int, what: str, tokens: list[int], when: str, end: str) -> None:
        """Unless only the trigger may move."""
        if not self.alone:
            super().race(at, what, tokens, when, end)

    # -- what must hold after every operation ----------------------------------------------------

    @invariant()
    def offline_memory_is_not_touched(self) -> None:
        """What is somebody else's memory is neither written nor counted as ours."""
        if not hasattr(self, "mmu"):
            return
        away = sorted(self.offline)
        assert self.mmu.states()["offline"] == len(away)
        assert (self.device.values[away] == ELSEWHERE).all()
        assert (self.device.tails[away] == ELSEWHERE & 0xFF).all()
        assert not self.offline & {block for row in self.all_tables().values() for block in row}

    def check_held(self, elsewhere: int) -> None:
        """A window that is being filled is held as far as it is not filled."""
        assert 0 <= elsewhere <= (512 if 9 in self.page_orders else 0)

    @invariant()
    def moves_and_fences(self) -> None:
        """Moves under the guarantee never outnumber frees; a silent step keeps its fences."""
        if not hasattr(self, "mmu"):
            return
        stats = self.mmu.stats()
        if self.alone:
            assert stats["moves_committed"] <= stats["freed_blocks"] + stats["left_cached"]
        ends = ("moves_committed", "moves_dropped", "moves_aborted")
        flying = sum(len(flight.pairs) for flight in self.flights)
        assert stats["moves_begun"] == sum(stats[end] for end in ends) + flying
        assert self.mmu.states()["fenced"] >= self.fenced, "handed out under a step in flight"
        assert self.mmu.num_leases() == len(self.leases)

    def everything_holds(self) -> None:
        """The base's and ours, for walks."""
        super().everything_holds()
        self.moves_and_fences()
        self.offline_memory_is_not_touched()

    def teardown(self) -> None:
        """Leases end first, and memory comes back: the base knows pins only."""
        if hasattr(self, "mmu") and sys.exc_info()[0] is None:
            while self.leases:
                self.end_lease(0)
            self.grow(0, 1, True)
        super().teardown()
