"""Compaction under random operations and faults, contents and all (see ``compaction_machine.py``).

Two drivers, as in ``test_machine.py``: Hypothesis finds short failures (and prints
``@reproduce_failure``), plain walks go further in the same time and print their seed.
``KVMMU_TEST_PROFILE=deep`` runs both far longer; ``KVMMU_TEST_SEED=n`` repeats the walk of a seed.
"""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Callable

import pytest
from hypothesis import settings

from .compaction_machine import CHANGES, FAULTS, GOALS, TRIGGERS, CompactionMachine, Machine
from .machine import MAX_MOVES_IN_FLIGHT, PROFILE
from .test_machine import OPERATIONS, Draw, Operation, prompt, tokens

STEPS = 120
DEEP = PROFILE == "deep"
WALKS = 2000 if DEEP else 30
LARGE_WALKS = 100 if DEEP else 1

TestCompaction = CompactionMachine.TestCase
TestCompaction.settings = settings(
    settings.get_profile(PROFILE),
    max_examples=20_000 if DEEP else 100,
)


def goal(r: Draw) -> tuple[str, int]:
    return r.choice(GOALS), r.randrange(64)


def some(r: Draw) -> int | None:
    return r.choice([None, 1, 5, 40])


def race(m: Machine, r: Draw) -> None:
    when, end = r.choice(["planned", "begun", "copied"]), r.choice(["commit", "commit", "abort"])
    m.race_goal(*goal(r), r.choice(CHANGES), tokens(r), when, end)


def deaf(m: Machine, r: Draw) -> None:
    m.rank_never_answers(*goal(r), r.choice(CHANGES), tokens(r), r.random() < 0.5)


def can_begin(m: Machine) -> bool:
    return len(m.flights) < MAX_MOVES_IN_FLIGHT


MOVES: list[Operation] = [
    (8, can_begin, lambda m, r: m.begin_goal(*goal(r), some(r))),
    (8, lambda m: True, lambda m, r: m.one_pass(*goal(r), some(r))),
    (4, lambda m: True, lambda m, r: m.passes(r.choice([None, None, 3]))),
    (3, lambda m: m.sequences, lambda m, r: m.lease(*(r.randrange(64) for _ in range(3)))),
    (3, lambda m: m.leases, lambda m, r: m.end_lease(r.randrange(64))),
    (
        3,
        lambda m: True,
        lambda m, r: m.shrink(r.randrange(64), r.choice([1, 2, 4, 64])),
    ),
    (
        4,
        lambda m: m.offline,
        lambda m, r: m.grow(r.randrange(64), r.choice([1, 2, 4, 64]), r.random() < 0.4),
    ),
    (
        2,
        lambda m: True,
        lambda m, r: m.make_room_to_shrink(r.randrange(64), r.choice([1, 2, 4]), some(r)),
    ),
    (4, lambda m: True, lambda m, r: m.mover_raises(*goal(r), r.randrange(10))),
    (4, lambda m: True, lambda m, r: m.killed(*goal(r), r.random() < 0.5)),
    (3, lambda m: True, deaf),
    (
        2,
        lambda m: m.sequences and m.silent is None and len(m.steps) < 2,
        lambda m, r: m.step_falls_silent(r.randrange(64)),
    ),
    (2, lambda m: m.silent is not None, lambda m, r: m.silence_ends(r.random() < 0.3)),
    (16, lambda m: m.sequences and not m.flights, race),
]
ALL: list[Operation] = [*OPERATIONS, *MOVES]
WEIGHTS = [weight for weight, _, _ in ALL]
RACES = [*WEIGHTS[:-1], 10 * WEIGHTS[-1]]


def walk(seed: int, steps: int, large: bool = False, races: bool = False) -> None:
    """One machine, ``steps`` operations, all drawn from the seed. ``large``: a pool of 4,096 blocks
    whose sequences have huge pages. ``races``: more commits that lose."""
    r = random.Random(seed)
    machine: Machine = CompactionMachine()
    done = 0
    try:
        machine.build(
            num_blocks=4096
            if large
            else r.choice([r.randint(2, 16), r.randint(30, 64), r.randint(30, 64)]),
            block_size=1 if large else r.randint(1, 4),
            page_orders=r.choice([(0,), (0, 2), (0, 2, 9)]),
            budget=r.choice([4, 8, 32, 600]),
            trigger=r.choice(list(TRIGGERS)),
            placement=r.choice(["scatter", "scatter", "address", "fullest", "fifo"]),
            hold_blocks=r.randint(0, 8),
            prefix_caching=r.random() < 0.5,
            served=[(prompt(r), r.random() < 0.3) for _ in range(r.randint(2, 6))],
            scale=r.choice([110, 180, 300]) if large else 1,
        )
        machine.everything_holds()
        while done < steps:
            ((_, possible, run),) = r.choices(ALL, RACES if races else WEIGHTS)
            if possible(machine):
                done += 1
                run(machine, r)
                machine.everything_holds()
        machine.teardown()
    except BaseException as error:
        error.add_note(f"KVMMU_TEST_SEED={seed}, operation {done}")
        raise


def seeded(run: Callable[[int], None], walks: int) -> None:
    if "KVMMU_TEST_SEED" in os.environ:
        run(int(os.environ["KVMMU_TEST_SEED"]))
        return
    for _ in range(walks):
        run(secrets.randbits(48))


@pytest.mark.parametrize("group", range(4))
def test_walks_with_faults_lose_no_byte(group: int) -> None:
    seeded(lambda seed: walk(seed, STEPS), WALKS)


@pytest.mark.parametrize("group", range(3))
def test_walks_with_faults_among_huge_pages_lose_no_byte(group: int) -> None:
    seeded(lambda seed: walk(seed, STEPS, large=True), LARGE_WALKS)


def test_every_fault_was_reached() -> None:
    """Behind the walks: none of them proves anything about a point that it never came to. Goes on
    until each was reached, and fails when that takes too long."""
    reached = CompactionMachine.faults
    wanted = {*FAULTS, *(f"moves: {name}" for name in ("free_run", "groups", "gather"))}
    for seed in range(400):
        if all(reached[fault] for fault in wanted):
            return
        walk(seed, STEPS, races=True)
    raise AssertionError(f"never reached: {sorted(f for f in wanted if not reached[f])}")
