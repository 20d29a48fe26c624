"""What the compiled core says to people: ``repr`` of what it makes, and the words of its refusals.

Both speak Python: attributes and values as they are read and given there, never how Rust writes
them. Docstrings are in ``test_docs.py``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kvmmu import MMU, InternalError, InvalidConfig, Pool
from kvmmu._core import BlockTables, copy_blocks

TOKENS = np.arange(40, dtype=np.int32)


def tables(mmu: MMU, **form: Any) -> BlockTables:
    return mmu.register_tables(
        np.empty((4, 16), np.int32),
        np.empty(4, np.int32),
        np.empty(64, np.int64),
        np.empty(5, np.int32),
        **form,
    )


def values(shown: str) -> dict[str, Any]:
    """The arguments ``name=value`` of a ``repr``, as Python reads them."""
    call = re.fullmatch(r"\w+\((?:\d+ \w+, )?(.*)\)", shown)
    assert call, shown
    found = eval(f"dict({call[1]})", {})
    assert isinstance(found, dict)
    return found


# -- repr --------------------------------------------------------------------------------------


def test_an_mmu_shows_its_blocks() -> None:
    mmu = MMU(100, 16)
    assert repr(mmu) == "MMU(num_blocks=100, block_size=16, in_use=0, cached=0, available=100)"
    mmu.open(TOKENS)
    states = mmu.states()
    assert values(repr(mmu)) == {
        "num_blocks": 100,
        "block_size": 16,
        "in_use": states["in_use"],
        "cached": states["cached"],
        "available": states["available"],
    }
    assert states["in_use"] == 3


def test_a_pool_shows_its_blocks() -> None:
    pool = Pool(100, placement="fifo")
    pool.claim(7)
    assert repr(pool) == "Pool(num_blocks=100, in_use=7, cached=0, available=93)"


def test_an_mmu_that_refuses_work_still_has_a_repr_and_says_why() -> None:
    mmu = MMU(100, 16)
    with pytest.raises(InternalError):
        mmu._panic_for_test()
    assert repr(mmu) == (
        "MMU(num_blocks=100, block_size=16, an earlier call ended in an internal error; this MMU "
        "refuses further work)"
    )


def test_in_a_forked_child_an_mmu_has_a_repr_and_says_why() -> None:
    code = """
import os
import kvmmu
mmu, pool = kvmmu.MMU(100, 16), kvmmu.Pool(8)
if os.fork() == 0:
    print(mmu, pool, sep="\\n", flush=True)
    os._exit(0)
os.wait()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == [
        "MMU(num_blocks=100, block_size=16, this MMU was made before the process forked: make one "
        "in each process)",
        "Pool(num_blocks=8, this Pool was made before the process forked: make one in each "
        "process)",
    ]


def test_tables_show_their_shape_and_what_is_in_them() -> None:
    mmu = MMU(100, 16)
    buffers = tables(mmu, kernel_block_size=4)
    mmu.export(np.array([mmu.open(TOKENS)], np.int64), buffers)
    assert repr(buffers) == (
        "BlockTables(4 rows of 16 entries, 64 slots, num_rows=1, num_tokens=0, "
        "kernel_block_size=4, page_order=0, null_entry=400)"
    )
    assert repr(buffers.dirty_rows()) == "DirtyRows(1 row)"


def test_values_show_their_attributes_as_python_has_them() -> None:
    mmu = MMU(2048, 16, compaction_start=0.3)
    ids = [mmu.open(TOKENS + 100 * n) for n in range(30)]
    for sequence in ids[::2]:
        mmu.close(sequence)
    plan = mmu.plan_free_run(2000)
    moves = mmu.begin(plan)
    shown = [mmu.info(ids[1]), mmu.quote(TOKENS), mmu.measure(), plan, moves]
    for value in shown:
        for name, given in values(repr(value)).items():
            held = getattr(value, name)
            assert given == (held.tolist() if isinstance(held, np.ndarray) else held), name
        assert repr(value).startswith(f"{type(value).__name__}(")
    assert repr(MMU(100).quote(TOKENS)) == (
        "Quote(when='now', moves=0, needed=3, available=100, num_cached_tokens=0)"
    )
    attributes = {
        name for value in shown[:3] for name in vars(type(value)) if not name.startswith("_")
    }
    assert attributes == {name for value in shown[:3] for name in values(repr(value))}
    assert repr(moves) == f"Moves({len(moves)} moves, epoch={moves.epoch})"
    assert repr(plan).startswith(f"Plan({len(plan)} moves, goal='free_run(2000)', complete=True, ")
    assert repr(mmu.block_map()) == "BlockMap(2048 blocks)"


# -- refusals ----------------------------------------------------------------------------------


def made(**given: Any) -> Callable[[], object]:
    return lambda: MMU(100, 16, **given)


ARRAY = (
    "an array of {0}, one dimension, C-contiguous, aligned; "
    'np.require({1}, np.{0}, "CA") makes one of numbers'
)
NULL = '"last", "first" or a whole number from 0 to 100'


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (made(guarantee=0, placement="fifo"),
         'guarantee = 0 with placement = "fifo": allowed is "address"'),
        (made(guarantee=3, placement="scatter", seed=7),
         'guarantee = 3 with placement = "scatter": allowed is "address"'),
        (made(events=4, prefix_caching=False),
         "events = 4 with prefix_caching = False: allowed is 0, for nothing is published"),
        (made(null_block="mid"), f"null_block = 'mid': allowed is {NULL}"),
        (made(null_block=101), f"null_block = 101: allowed is {NULL}"),
        (made(null_block=True), f"null_block = True: allowed is {NULL}"),
        (lambda: Pool(100, null_block=-1), f"null_block = -1: allowed is {NULL}"),
        (lambda: MMU(100).open([1, 2, 3]),  # type: ignore[arg-type]
         "tokens = a list: allowed is " + ARRAY.format("int32", "tokens")),
        (lambda: MMU(100).open(TOKENS.astype(np.int64)),
         "tokens = int64 [40]: allowed is " + ARRAY.format("int32", "tokens")),
        (lambda: MMU(100).pin(TOKENS),  # type: ignore[arg-type]
         "blocks = int32 [40]: allowed is " + ARRAY.format("int64", "blocks")),
        (lambda: MMU(100).register_tables([], [], [], []),  # type: ignore[arg-type]
         "block_table is a list: allowed is int32 [B, W], C-contiguous; np.zeros makes one"),
        (lambda: copy_blocks([], [], 1),  # type: ignore[arg-type]
         "regions must be a C-contiguous uint64 array of shape [n, 3], not list; "
         'np.require(regions, np.uint64, "C") makes one of rows of numbers'),
        (lambda: MMU(100, page_orders=(0, 2)).open(TOKENS, page_orders=(0, 3)),
         "page order 3 of a sequence: the pool has [0, 2]"),
    ],
)  # fmt: skip
def test_refusals_speak_python(call: Callable[[], object], said: str) -> None:
    with pytest.raises(InvalidConfig) as error:
        call()
    assert str(error.value) == said


def test_what_a_refusal_tells_to_do_makes_an_array_that_is_taken() -> None:
    mmu = MMU(100)
    raw = np.zeros(4 * 8 + 1, np.uint8)[1:].view(np.int32)
    for tokens in ([1, 2, 3], TOKENS.astype(np.int64), TOKENS[::2], raw):
        with pytest.raises(InvalidConfig) as error:
            mmu.open(tokens)  # type: ignore[arg-type]
        advice = re.search(r"np\.require\(.*?\)", str(error.value))
        assert advice
        mmu.close(mmu.open(eval(advice[0], {"np": np, "tokens": tokens})))
