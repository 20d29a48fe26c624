"""Random operations on the MMU against a model, contents and all (see ``machine.py``).

Two drivers: Hypothesis finds short failures (and prints ``@reproduce_failure``), plain walks go
further in the same time and print their seed. ``KVMMU_TEST_PROFILE=deep`` runs both far longer;
``KVMMU_TEST_SEED=n`` repeats the walk of a seed.
"""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
from hypothesis import settings

from .machine import (
    MAX_MOVES_IN_FLIGHT,
    MAX_SEQUENCES,
    MAX_STEPS_IN_FLIGHT,
    PROFILE,
    MMUMachine,
    Prompt,
)

TestMMU = MMUMachine.TestCase
TestMMU.settings = settings.get_profile(PROFILE)

STEPS = 150
WALKS = 5000 if PROFILE == "deep" else 100
"""Walks of each of the tests below."""

Machine: TypeAlias = Any
"""An MMUMachine; its rules are called as plain methods here."""
Draw: TypeAlias = random.Random


def prompt(r: Draw) -> Prompt:
    key = r.choice([None, None, None, None, (0, b"x"), (1, b"x"), (1, b"y")])
    salt = r.choice([b"", b"", b"", b"", b"tenant"])
    return Prompt(r.randrange(3), r.randrange(6), tokens(r, 4), salt, key)


def tokens(r: Draw, most: int = 7) -> list[int]:
    return [r.randint(1, 3) for _ in range(r.randint(1, most))]


def prepare(m: Machine, r: Draw) -> None:
    chosen = [r.randrange(64) for _ in range(r.randint(1, 7))]
    lengths = [r.randrange(6) for _ in range(r.randrange(3))]
    known = tokens(r) if r.random() < 0.8 else None
    m.prepare(r.choice([None, r.randrange(64)]), chosen, lengths, known)


def race(m: Machine, r: Draw) -> None:
    what = r.choice(["write", "append", "truncate", "close", "fork", "pin", "rewrite"])
    end = r.choice(["commit", "commit", "abort", "later"])
    m.race(r.randrange(64), what, tokens(r), r.choice(["planned", "begun", "copied"]), end)


def plan(m: Machine, r: Draw) -> None:
    most = r.choice([None, None, 1, 2, 5])
    if r.random() < 0.7:
        m.plan_free_run(r.randrange(64), most, r.random() < 0.7, r.random() < 0.7)
    else:
        m.plan_below(r.choice([None, 0.0, 0.2, 0.5]), most)


def any_step(m: Machine) -> bool:
    return any(not step.settled for step in m.steps.values())


Operation: TypeAlias = tuple[int, Callable[[Machine], Any], Callable[[Machine, Draw], Any]]

OPERATIONS: list[Operation] = [
    # weight, when it is possible, what it does
    (6, lambda m: len(m.sequences) < MAX_SEQUENCES, lambda m, r: m.open(prompt(r))),
    (
        10,
        lambda m: len(m.sequences) < MAX_SEQUENCES,
        lambda m, r: m.serve(prompt(r), r.randint(1, 64), r.random() < 0.4),
    ),
    (
        1,
        lambda m: len(m.sequences) < MAX_SEQUENCES,
        lambda m, r: m.open_too_long(r.randrange(3), r.randrange(8)),
    ),
    (6, lambda m: m.sequences, lambda m, r: m.append(r.randrange(64), tokens(r))),
    (
        6,
        lambda m: 0 < len(m.sequences) < MAX_SEQUENCES,
        lambda m, r: m.fork(r.randrange(64)),
    ),
    (
        5,
        lambda m: m.sequences,
        lambda m, r: m.truncate(r.randrange(64), r.randrange(64), r.random() < 0.7),
    ),
    (
        2,
        lambda m: len(m.sequences) < MAX_SEQUENCES,
        lambda m, r: m.open_shaped(prompt(r), r.choice([0, 1, 4, 9, 20]), r.randrange(8)),
    ),
    (
        4,
        lambda m: m.sequences,
        lambda m, r: m.release_before(r.randrange(64), r.randrange(64), r.random() < 0.5),
    ),
    (8, lambda m: m.sequences, lambda m, r: m.close(r.randrange(64))),
    (2, lambda m: len(m.steps) < MAX_STEPS_IN_FLIGHT, lambda m, r: m.idle_step()),
    (6, lambda m: m.sequences, lambda m, r: m.catch_up(r.randrange(64), r.randint(1, 64))),
    (16, lambda m: m.sequences, prepare),
    (8, any_step, lambda m, r: m.written(r.randrange(64), r.random() < 0.5)),
    (4, any_step, lambda m, r: m.cancel(r.randrange(64), r.random() < 0.5)),
    (
        8,
        lambda m: any(step.settled or not step.prepared for step in m.steps.values()),
        lambda m, r: m.end_step(r.randrange(64)),
    ),
    (2, lambda m: True, lambda m, r: m.pin(r.randrange(64), r.random() < 0.5, r.randrange(64))),
    (3, lambda m: True, lambda m, r: m.unpin(r.randrange(64), r.random() < 0.8)),
    (2, lambda m: True, lambda m, r: m.evict(r.randrange(5))),
    (6, lambda m: True, plan),
    (
        4,
        lambda m: m.plans and len(m.flights) < MAX_MOVES_IN_FLIGHT,
        lambda m, r: m.begin(r.randrange(64)),
    ),
    (4, lambda m: m.flights, lambda m, r: m.copy(r.randrange(64), r.randint(1, 10))),
    (6, lambda m: m.flights, lambda m, r: m.commit(r.randrange(64))),
    (3, lambda m: m.flights, lambda m, r: m.abort(r.randrange(64))),
    (
        3,
        lambda m: not m.flights,
        lambda m, r: m.compact_at_once(r.choice([None, None, r.randrange(4)])),
    ),
    (8, lambda m: m.sequences and not m.flights, race),
    (1, lambda m: True, lambda m, r: m.use_what_is_gone(r.randrange(64))),
    (1, lambda m: m.sequences, lambda m, r: m.ask_for_too_much(r.randrange(64))),
]


PAGE_ORDERS: list[tuple[int, ...]] = [(0,), (0, 1), (0, 2), (0, 1, 3), (0, 3), (0, 2, 9)]


def walk(seed: int, steps: int, huge: bool = False) -> None:
    """One machine, ``steps`` operations, all drawn from the seed. ``huge``: a pool in which pages
    of 512 blocks come and go."""
    r = random.Random(seed)
    machine: Machine = MMUMachine()
    done = 0
    try:
        machine.build(
            num_blocks=r.randint(1100, 2100)
            if huge
            else r.choice([r.randint(2, 16), r.randint(12, 64)]),
            block_size=1 if huge else r.randint(1, 4),
            prefix_caching=r.random() < 0.8,
            placement="address" if huge else r.choice(["scatter", "address", "address"]),
            eviction=r.choice(["lru", "lfu"]),
            page_orders=r.choice([(0, 9), (0, 2, 9), (0, 3, 9)]) if huge else r.choice(PAGE_ORDERS),
            medium_from=r.choice([0, 0, 5]),
            hold_blocks=r.randint(0, 8),
            dedup=r.random() < 0.5,
            budget=r.randint(1, 8),
            thresholds=r.choice([(0.35, 0.30), (0.0, 0.0), (0.1, 0.05)]),
            shorter=r.choice([0, 0, 1, 5]),
            served=[(prompt(r), r.random() < 0.3) for _ in range(r.randint(2, 6))],
            scale=r.choice([110, 180]) if huge else 1,
        )
        machine.everything_holds()
        weights = [weight for weight, _, _ in OPERATIONS]
        while done < steps:
            ((_, possible, run),) = r.choices(OPERATIONS, weights)
            if possible(machine):
                done += 1
                run(machine, r)
                machine.everything_holds()
        machine.teardown()
    except BaseException as error:
        error.add_note(f"KVMMU_TEST_SEED={seed}, operation {done}")
        raise


@pytest.mark.parametrize("group", range(4))
def test_long_random_walks_keep_every_promise(group: int) -> None:
    if "KVMMU_TEST_SEED" in os.environ:
        walk(int(os.environ["KVMMU_TEST_SEED"]), STEPS)
        return
    for _ in range(WALKS):
        walk(secrets.randbits(48), STEPS)


HUGE_WALKS = 200 if PROFILE == "deep" else 4


@pytest.mark.parametrize("group", range(2))
def test_walks_among_huge_pages_keep_every_promise(group: int) -> None:
    """Pages of 512 blocks are made, shared, split, cut at both ends, moved and given back."""
    if "KVMMU_TEST_SEED" in os.environ:
        walk(int(os.environ["KVMMU_TEST_SEED"]), STEPS, huge=True)
        return
    for _ in range(HUGE_WALKS):
        walk(secrets.randbits(48), STEPS, huge=True)
