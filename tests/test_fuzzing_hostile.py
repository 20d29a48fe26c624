"""What is no allocator, or returns what no allocator should, is told so in one clear sentence.

Nothing here may end in an error of the kit's own, and each sequence that is shown fails when it is
copied.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from kvmmu import InvalidConfig
from kvmmu.testing import AllocatorFault, check_allocator, faults, fuzz
from kvmmu.testing.adapters import FreeList

from .broken.correct import BlockPool


def having(**attributes: Any) -> Callable[[], FreeList]:
    """Makes free lists with other attributes, or more."""

    def make() -> FreeList:
        made = FreeList()
        vars(made).update(attributes)
        return made

    return make


def claiming(change: Callable[[list[int]], Any]) -> Callable[[], FreeList]:
    """Makes free lists whose claims return something else."""

    class Changed(FreeList):
        def claim(self, n: int) -> Any:
            return change(super().claim(n))

    return Changed


def fails(*_: Any) -> Any:
    raise OSError("the disk is full")


# -- factories -------------------------------------------------------------------------------

ONE = FreeList()


class Unreadable:
    claim = release = None

    @property
    def num_blocks(self) -> int:
        return fails()  # type: ignore[no-any-return]


class LacksRelease:
    num_blocks = 8

    def claim(self, n: int) -> list[int]:
        return [0] * n


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        (fails, r"fails\(\) raised OSError: the disk is full; a factory takes nothing"),
        (FreeList().claim, r"FreeList.claim\(\) raised TypeError"),
        (lambda: None, "made a NoneType, which lacks num_blocks, claim, release"),
        (LacksRelease, "made a LacksRelease, which lacks release;"),
        (Unreadable, "made a Unreadable, whose attributes cannot be read: OSError: the disk"),
        (lambda: ONE, "made the same FreeList twice; each example needs a new one"),
        (having(claim=3), "whose claim cannot be called"),
        (having(retain=3), "whose retain cannot be called"),
        (having(num_blocks=0), "whose num_blocks is 0, allowed: 1 or more"),
        (having(num_blocks=8.0), "whose num_blocks is 8.0, allowed: a whole number"),
        (having(num_blocks="8"), "whose num_blocks is '8', allowed: a whole number"),
        (having(null_block="x"), "whose null_block is 'x', allowed: a whole number"),
        (having(null_block=9), "whose null_block is 9, allowed: 0 to 8"),
        (having(refuses="MemoryError"), "refuses is 'MemoryError', allowed: a tuple of exception"),
        (having(refuses=(KeyboardInterrupt,)), "refuses is .*KeyboardInterrupt.* allowed: a tuple"),
    ],
)
def test_what_is_no_allocator_is_told_before_anything_runs(
    factory: Callable[[], Any], said: str
) -> None:
    with pytest.raises(InvalidConfig, match=said):
        check_allocator(factory, max_examples=1, seed=1)


@pytest.mark.parametrize("then", [lambda: None, fails])
def test_a_factory_that_goes_bad_later_is_named_too(then: Callable[[], Any]) -> None:
    made = itertools.count()

    def factory() -> Any:
        return FreeList() if next(made) < 20 else then()

    with pytest.raises(InvalidConfig, match=r"factory.* (made a NoneType|raised OSError)"):
        fuzz(factory, max_examples=100, seed=1)


@pytest.mark.parametrize(
    "factory",
    [
        claiming(tuple),
        claiming(lambda blocks: np.array(blocks, np.int32)),
        claiming(lambda blocks: [np.uint16(block) for block in blocks]),
        having(num_blocks=np.int64(8), retain=None, refuses=MemoryError),
        having(stats=lambda: {"free blocks": None}, compact=lambda: np.zeros((0, 2))),
    ],
)
def test_unusual_and_allowed(factory: Callable[[], Any]) -> None:
    check_allocator(factory, max_examples=30, seed=1)


# -- what calls return -----------------------------------------------------------------------


class Unreadably:
    def __iter__(self) -> Iterator[int]:
        return fails()  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return fails()  # type: ignore[no-any-return]


class Endless:
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class ReturnsItsOwnList(FreeList):
    """The same list each time, filled anew."""

    def __init__(self) -> None:
        super().__init__()
        self.last: list[int] = []

    def claim(self, n: int) -> list[int]:
        self.last[:] = super().claim(n)
        return self.last


class SortsTheCallersList(BlockPool):
    def retain(self, blocks: Any) -> None:
        super().retain(blocks)
        blocks.sort(reverse=True)


class Exits(FreeList):
    def claim(self, n: int) -> list[int]:
        raise SystemExit(3)


def prompts(value: Any) -> Callable[[], FreeList]:
    return having(claim_prompt=lambda prompt, n: value, publish=lambda blocks, prompt: None)


def reading(value: Any) -> Callable[[], FreeList]:
    return having(read=lambda block: value, write=lambda block, value: None)


@pytest.mark.parametrize(
    ("factory", "kind", "said"),
    [
        (claiming(lambda blocks: None), faults.UnknownBlock, "x0 is None, no list of block ids"),
        (claiming(lambda blocks: 3), faults.UnknownBlock, "x0 is 3, no list"),
        (claiming(str), faults.UnknownBlock, r"no list of block ids: 'str' object"),
        (claiming(lambda b: [*map(float, b)]), faults.UnknownBlock, r"x0 is \[7.0.* 'float'"),
        (claiming(lambda b: np.array(b, float)), faults.UnknownBlock, r"x0 is array.* 'numpy.fl"),
        (claiming(lambda b: np.array([b])), faults.UnknownBlock, r"x0 is array.* only integer"),
        (claiming(lambda b: [[x] for x in b]), faults.UnknownBlock, r"x0 is \[\[7\].* 'list'"),
        (claiming(iter), faults.UnknownBlock, "a list_iterator can be read only once"),
        (claiming(set), faults.UnknownBlock, "a set has no order"),
        (claiming(dict.fromkeys), faults.UnknownBlock, "a dict has no order"),
        (claiming(lambda blocks: Unreadably()), faults.UnknownBlock, "the disk is full"),
        (claiming(lambda b: [-1 - x for x in b]), faults.UnknownBlock, "block -8, which is no"),
        (claiming(lambda b: [10**30] * len(b)), faults.UnknownBlock, "block 10{30}, which is no"),
        (claiming(lambda b: range(10**12)), faults.UnknownBlock, "block 8, which is no block"),
        (claiming(lambda b: [0] * 10**6), faults.DoubleHandOut, "block 0 was handed out twice"),
        (claiming(lambda blocks: Endless()), faults.UnknownBlock, "block 8, which is no block"),
        (ReturnsItsOwnList, faults.LostMapping, r"x\d+ shows the blocks"),
        (SortsTheCallersList, faults.LostMapping, r"x\d+ shows the blocks"),
        (Exits, faults.Crashed, "raised RuntimeError: it asked to exit with 3"),
        (having(stats=lambda: None), faults.WrongStatistics, "stats.. is None, no mapping"),
        (having(stats=lambda: {"free": 8.0}), faults.WrongStatistics, "is 8.0, no whole number"),
        (having(stats=fails), faults.Crashed, r"a.stats\(\) raised OSError"),
        (having(references=lambda b: None), faults.WrongReferences, r"\(0\) is None, no whole"),
        (having(references=fails), faults.Crashed, r"a.references\(0\) raised OSError"),
        (having(validate=fails), faults.Invalid, r"a.validate\(\) raised OSError: the disk"),
        (prompts(None), faults.Crashed, r"a.claim_prompt\(\d, \d\) raised TypeError"),
        (prompts(([1], 0.0)), faults.WrongCount, "hits is 0.0, no whole number"),
        (prompts(([1], -1)), faults.WrongCount, "gave 1 blocks, -1 of them cached"),
        (having(evict=lambda n: None), faults.WrongStatistics, "evicted is None, no whole"),
        (having(evict=lambda n: 10**9), faults.WrongStatistics, "says that it evicted 1000000000"),
        (having(compact=lambda: 3), faults.BadMove, r"moves is 3, no list of \(source"),
        (having(compact=lambda: [1, 2]), faults.BadMove, r"moves is \[1, 2\], no list"),
        (having(compact=lambda: [(0, 1, 2)]), faults.BadMove, "too many values"),
        (having(compact=lambda: [(0.0, 1.0)]), faults.BadMove, "'float' object"),
        (having(compact=lambda: [(-1, 0)]), faults.BadMove, "one is no block of this pool"),
        (reading(None), faults.LostContents, "holds something else now"),
        (reading(np.zeros(3)), faults.LostContents, "holds something else now"),
        (having(read=fails, write=lambda b, v: None), faults.Crashed, r"a.read\(\d\) raised"),
        (having(read=lambda b: 0, write=fails), faults.Crashed, r"a.write\(\d, \d\) raised"),
    ],
)
def test_what_no_call_should_return_is_named(
    factory: Callable[[], Any], kind: type[AllocatorFault], said: str
) -> None:
    fault = fuzz(factory, max_examples=100, seed=1, shrink=False).fault
    assert type(fault) is kind, fault
    with pytest.raises(AssertionError, match=said):
        raise fault
    lines = fault.sequence.splitlines()
    made = next(i for i, line in enumerate(lines) if line.startswith("a = "))
    copied = "\n".join(["from contextlib import suppress", *lines[made + 1 :]])
    with pytest.raises((Exception, SystemExit)):
        exec(compile(copied, "<copied>", "exec"), {"a": factory()})
