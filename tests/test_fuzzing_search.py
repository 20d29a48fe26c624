"""How the kit's own driver draws calls, when it stops, and how a sequence that it found gets short.

What lives here: the limits of a search, what its examples reach, and shortening on made-up faults
whose shortest sequence is known. What never lives here: whether faults of allocators are found
(``test_fuzzing.py`` and ``test_fuzzing_blind.py``).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvmmu.testing import Driver, check_allocator, faults, fuzz
from kvmmu.testing.adapters import FreeList
from kvmmu.testing.rules import RULES
from kvmmu.testing.shorten import Example, Step, shorten

from .broken.correct import BlockPool, CachingPool, Sequences

# -- what is drawn ---------------------------------------------------------------------------


def counting(made_of: type, methods: Iterable[str]) -> tuple[Callable[[], Any], Counter[str]]:
    """A factory, and how often each of these methods of what it makes was called."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        method = getattr(made_of, name)

        def call(self: Any, *arguments: Any) -> Any:
            calls[name] += 1
            return method(self, *arguments)

        return call

    return type("Counted", (made_of,), {name: counted(name) for name in methods}), calls


@pytest.mark.parametrize(
    ("made_of", "methods"),
    [
        (BlockPool, ("claim", "release", "retain")),
        (CachingPool, ("claim", "release", "retain", "claim_prompt", "publish", "evict")),
        (Sequences, ("claim", "release", "fork", "append", "truncate", "compact")),
    ],
)
def test_every_method_that_an_allocator_has_is_called_in_most_examples(
    made_of: type, methods: tuple[str, ...]
) -> None:
    factory, calls = counting(made_of, methods)
    report = fuzz(factory, max_examples=50, seed=1)
    assert report.fault is None
    assert min(calls[name] for name in methods) > report.examples, calls


def test_some_examples_leave_some_calls_out() -> None:
    factory, calls = counting(CachingPool, ("retain", "evict"))
    called = set()
    for seed in range(40):
        calls.clear()
        fuzz(factory, max_examples=1, seed=seed)
        called.add((calls["retain"] > 0, calls["evict"] > 0))
    assert called == set(itertools.product((False, True), repeat=2))


def test_one_more_example_changes_none_of_those_before() -> None:
    calls = [fuzz(BlockPool, max_examples=n, seed=3).calls for n in range(1, 8)]
    assert calls == sorted(set(calls))
    assert calls == [fuzz(BlockPool, max_examples=n, seed=3).calls for n in range(1, 8)]


# -- when it stops ---------------------------------------------------------------------------


def test_it_runs_as_many_examples_as_it_is_told() -> None:
    seen: list[tuple[int, bool]] = []
    report = fuzz(FreeList, max_examples=7, seed=1, watch=lambda n, bad: seen.append((n, bad)))
    assert report.examples == 7
    assert seen == [(n, False) for n in range(1, 8)]


def test_it_stops_when_the_time_is_up_and_runs_one_example_at_least() -> None:
    assert fuzz(FreeList, seconds=1e-9, seed=1).examples == 1
    assert 1 < fuzz(FreeList, seconds=0.5, max_examples=10**9, seed=1).examples < 10**6


def test_what_watch_raises_ends_the_search() -> None:
    def watch(examples: int, failed: bool) -> None:
        if examples == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fuzz(FreeList, max_examples=10, seed=1, watch=watch)


# -- what is found once only -----------------------------------------------------------------


def test_a_fault_that_the_same_calls_do_not_show_again_is_reported_as_it_was() -> None:
    made = itertools.count()

    class Once(FreeList):
        def __init__(self) -> None:
            super().__init__()
            self.bad = next(made) == 6

        def claim(self, n: int) -> list[int]:
            return [99] * n if self.bad else super().claim(n)

    with pytest.raises(faults.UnknownBlock) as raised:
        check_allocator(Once, max_examples=20, seed=1)
    assert any(note.startswith("not on every run") for note in raised.value.__notes__)


def test_a_factory_that_goes_bad_once_there_is_a_fault_does_not_hide_it() -> None:
    made = itertools.count()

    def factory() -> Any:
        if next(made) > 3:
            raise OSError("the disk is full")
        return Leaks()

    class Leaks(FreeList):
        def release(self, blocks: Sequence[int]) -> None:
            super().release(blocks)
            del self.free[:]

    assert isinstance(fuzz(factory, max_examples=1, seed=1).fault, faults.LostBlock)


# -- how it gets short -----------------------------------------------------------------------

CLAIM = next(rule for rule in RULES if rule.name == "claim")


def step(number: int) -> Step:
    return CLAIM, {"n": number % 6, "mark": number}


@given(
    st.integers(0, 30).flatmap(
        lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n), min_size=1))
    )
)
def test_shortening_keeps_exactly_the_steps_that_are_needed(made: tuple[int, set[int]]) -> None:
    """A fault that shows if these steps are there, in this order."""
    last, needed = made
    tried = 0

    def replay(steps: Sequence[Step]) -> Example:
        nonlocal tried
        tried += 1
        marks = [drawn["mark"] for _, drawn in steps]
        fault = faults.LostBlock("", "") if needed.issubset(marks) else None
        return Example(list(steps), [str(mark) for mark in marks], fault)

    found = shorten(replay, replay([step(i) for i in range(last + 1)]))
    assert [drawn["mark"] for _, drawn in found.steps] == sorted(needed)
    assert all(drawn["n"] == 0 for _, drawn in found.steps), "the simplest value would do"
    assert tried < 100 * (last + 2)


def test_shortening_takes_no_other_kind_of_fault_and_no_more_lines() -> None:
    def replay(steps: Sequence[Step]) -> Example:
        marks = {drawn["mark"] for _, drawn in steps}
        if 0 not in marks:
            return Example(list(steps), [], faults.Crashed("", ""))
        lines = ["line"] * (len(steps) if 1 in marks else 10)  # without step 1 it takes longer
        return Example(list(steps), lines, faults.LostBlock("", ""))

    found = shorten(replay, replay([step(i) for i in range(4)]))
    assert [drawn["mark"] for _, drawn in found.steps] == [0, 1]
    assert type(found.fault) is faults.LostBlock


def test_what_is_shown_is_one_call_if_one_call_is_enough() -> None:
    class GivesTheSameTwice(FreeList):
        def claim(self, n: int) -> list[int]:
            return super().claim(n)[:1] * n

    fault = fuzz(GivesTheSameTwice, max_examples=100, seed=1).fault
    assert fault is not None
    made, call, proof = fault.sequence.splitlines()
    assert (made, call[:12], proof[:14]) == ("a = factory()", "x0 = a.claim", "assert len({*x")


@pytest.mark.parametrize("driver", ["random", "hypothesis"])
def test_what_is_wrong_before_the_first_call_is_shown_without_one(driver: Driver) -> None:
    class WrongFromTheStart(BlockPool):
        def references(self, block: int) -> int:
            return 1

    fault = fuzz(WrongFromTheStart, max_examples=10, seed=1, driver=driver).fault
    assert isinstance(fault, faults.WrongReferences)
    assert fault.sequence == "a = factory()\nassert a.references(0) == 0\n"
