"""The kit finds faults that were made by people who had not seen it.

Five are patches of the example free list, five of vLLM's BlockPool (skipped without vLLM). Each
must be found by both drivers within 2,000 examples from every seed that is tried here; ``python -m
tests.test_fuzzing_blind [DRIVER]`` prints the table of ``docs/fuzzing.md``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from statistics import median
from typing import Any, cast

import pytest
from kvmmu.testing import Driver, Report, fuzz

from .broken.blind_lists import BLIND_LISTS

SEEDS = {"quick": range(1, 2), "default": range(1, 4), "deep": range(1, 21)}[
    os.environ.get("KVMMU_TEST_PROFILE", "default")
]
DRIVERS: tuple[Driver, ...] = ("random", "hypothesis")
POOLS = [
    "LeavesTheTailInTheQueue",
    "FreesOnceForEachMention",
    "EvictsBeforeItRefuses",
    "PairsHashesPastAGap",
    "RemembersHits",
]


def pools() -> dict[str, tuple[Callable[[], Any], str]]:
    """Of vLLM's, which is there."""
    found: dict[str, tuple[Callable[[], Any], str]] = import_module(
        f"{__package__}.broken.blind_vllm"
    ).BLIND_POOLS
    return found


def look(factory: Callable[[], Any], seed: int, driver: Driver) -> Report:
    return fuzz(factory, max_examples=2000, seed=seed, shrink=False, driver=driver)


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("broken", BLIND_LISTS, ids=lambda broken: broken.__name__)
def test_each_blind_patch_of_the_free_list_is_found(
    broken: type, seed: int, driver: Driver
) -> None:
    report = look(broken, seed, driver)
    assert report.fault is not None, report


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", POOLS)
@pytest.mark.usefixtures("vllm")
def test_each_blind_patch_of_vllm_is_found(name: str, seed: int, driver: Driver) -> None:
    report = look(pools()[name][0], seed, driver)
    assert report.fault is not None, report


@pytest.mark.usefixtures("vllm")
def test_the_blind_patches_of_vllm_are_all_tried() -> None:
    assert list(pools()) == POOLS


def main(driver: str = "random") -> None:
    """Prints the table: what is found, and the examples that it took, median and most."""
    targets: dict[str, tuple[Callable[[], Any], str]] = {
        broken.__name__: (broken, kind) for broken, kind in BLIND_LISTS.items()
    }
    try:
        targets |= pools()
    except ImportError as error:
        print(f"without vLLM: {error}")
    print("| patch | what is wrong | reported as | median | most |\n|---|---|---|---|---|")
    for name, (factory, kind) in targets.items():
        found = [look(factory, seed, cast(Driver, driver)) for seed in range(1, 21)]
        called = sorted({type(report.fault).__name__ for report in found})
        examples = [report.examples for report in found]
        row = (f"`{name}`", kind, ", ".join(called), f"{median(examples):g}", f"{max(examples)}")
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
