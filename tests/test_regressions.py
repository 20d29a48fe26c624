"""One test for each fault that was found after the promises had been written down.

Each is named after what must hold, and is written for the whole kind of the fault.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kvmmu import (
    MMU,
    BlockTables,
    InvalidBlock,
    InvalidConfig,
    InvalidPlan,
    KVCacheError,
    LimitExceeded,
    OutOfBlocks,
    OutOfTables,
    Pool,
    UnknownSequence,
)


def ints(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def longs(*values: int) -> npt.NDArray[np.int64]:
    return np.array(values, dtype=np.int64)


def tables(mmu: MMU, rows: int = 8, width: int = 16, tokens: int = 256) -> BlockTables:
    return mmu.register_tables(
        np.empty((rows, width), np.int32),
        np.empty(rows, np.int32),
        np.empty(tokens, np.int64),
        np.empty(rows + 1, np.int32),
    )


def filled(mmu: MMU, buffers: BlockTables, tokens: range) -> int:
    """A sequence whose tokens are all written."""
    sequence = mmu.open(np.array(tokens, dtype=np.int32))
    step = mmu.begin_step()
    lens = ints(len(tokens) - mmu.info(sequence).num_scheduled)
    mmu.prepare(step, longs(sequence), buffers, query_lens=lens)
    mmu.written(step)
    mmu.end_step(step)
    return sequence


def misaligned(dtype: Any, count: int) -> npt.NDArray[Any]:
    size = np.dtype(dtype).itemsize
    return np.ndarray((count,), dtype, buffer=bytearray(size * count + 1), offset=1)


@pytest.mark.parametrize(
    "method", ["open", "match", "quote", "append", "pin", "references", "rows"]
)
def test_a_misaligned_array_is_refused_not_read_as_empty(method: str) -> None:
    mmu = MMU(8, 4)
    sequence = mmu.open(ints(1))
    before = mmu.states()
    with pytest.raises(InvalidConfig, match="align"):
        if method == "append":
            mmu.append(sequence, misaligned(np.int32, 3))
        elif method == "rows":
            mmu.prepare(mmu.begin_step(), misaligned(np.int64, 1), tables(mmu))
        else:
            dtype = np.int64 if method in ("pin", "references") else np.int32
            getattr(mmu, method)(misaligned(dtype, 3))
    assert mmu.states() == before


def test_tables_that_cannot_be_written_are_refused_when_they_are_registered() -> None:
    mmu = MMU(8, 4)
    good = (np.empty((2, 4), np.int32), np.empty(2, np.int32), np.empty(8, np.int64))
    starts = np.empty(3, np.int32)
    starts.flags.writeable = False
    with pytest.raises(InvalidConfig):
        mmu.register_tables(*good, starts)
    shared = np.empty(8, np.int32)
    with pytest.raises(InvalidConfig):
        mmu.register_tables(shared.reshape(2, 4), shared[:2], good[2], np.empty(3, np.int32))
    lens = np.empty(2, np.int32)
    buffers = mmu.register_tables(good[0], lens, good[2], np.empty(3, np.int32))
    with pytest.raises(InvalidConfig):
        mmu.prepare(mmu.begin_step(), longs(), buffers, query_lens=lens)


def test_looking_at_tables_while_calls_on_them_fail_never_hangs() -> None:
    code = """
import sys, threading
import numpy as np
from kvmmu import MMU, KVCacheError
sys.setswitchinterval(1e-6)
mmu = MMU(8, 4)
tables = mmu.register_tables(
    np.empty((2, 4), "i4"), np.empty(2, "i4"), np.empty(8, "i8"), np.empty(3, "i4")
)
def failing():
    for _ in range(20000):
        try:
            mmu.export(np.array([12345]), tables)
        except KVCacheError:
            pass
def looking():
    for _ in range(200000):
        tables.num_rows
threads = [threading.Thread(target=work) for work in (failing, looking)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_tables_of_another_mmu_are_refused_and_harm_nobody() -> None:
    one, other = MMU(8, 4), MMU(8, 4, max_sequences=1)
    buffers = tables(one)
    one.export(longs(*[one.open(ints(1)) for _ in range(3)]), buffers)
    with pytest.raises(InvalidConfig):
        other.validate(buffers)
    other.open(ints(1))
    one.validate(buffers)


def test_moves_of_another_mmu_are_refused() -> None:
    one, other = MMU(8, 4), MMU(8, 4)
    begun = [mmu.begin(mmu.plan_below(1.0)) for mmu in (one, other)]
    with pytest.raises(InvalidPlan):
        other.commit(begun[0])
    one.commit(begun[0])
    other.abort(begun[1])


def test_a_pinned_leaf_that_outlives_its_prompt_is_evicted_before_it() -> None:
    mmu = MMU(8, 4)
    sequence = filled(mmu, tables(mmu), range(9))
    blocks = mmu.block_table(sequence).astype(np.int64)
    mmu.pin(blocks[1:2])
    mmu.close(sequence)
    mmu.unpin(blocks[1:2])
    assert mmu.evict(1) == 1
    assert mmu.match(np.arange(9, dtype=np.int32)) == 4


def test_a_block_that_moves_while_a_step_may_read_it_stays_behind_its_leaves() -> None:
    mmu = MMU(16, 4, page_orders=(0,), hold_blocks=0)
    buffers = tables(mmu)
    first = mmu.open(np.arange(100, 120, dtype=np.int32))
    sequence = filled(mmu, buffers, range(12))
    mmu.close(first)
    moves = mmu.begin(mmu.plan_below(0.0, max_blocks=1))
    assert len(moves) == 1
    other = mmu.open(ints(7))
    step = mmu.begin_step()
    mmu.prepare(step, longs(other), buffers)
    mmu.close(sequence)
    assert mmu.commit(moves) == 1
    assert mmu.evict(1) == 0, "its leaves may still be read"
    mmu.validate()
    mmu.written(step)
    mmu.end_step(step)
    assert mmu.match(np.arange(13, dtype=np.int32)) == 12
    for left in (8, 4, 0):
        assert mmu.evict(1) == 1
        assert mmu.match(np.arange(13, dtype=np.int32)) == left


def test_an_id_stays_positive_and_its_own_over_many_lives_of_a_slot() -> None:
    mmu = MMU(8, 4)
    seen = set()
    for _ in range(1000):
        sequence = mmu.open(ints(1))
        assert sequence > 0
        assert sequence not in seen
        seen.add(sequence)
        mmu.close(sequence)
        with pytest.raises(UnknownSequence):
            mmu.info(sequence)


def test_an_id_that_is_gone_is_unknown_while_its_slot_is_busy() -> None:
    mmu = MMU(70_000, 16)
    gone = mmu.open(ints(1))
    mmu.close(gone)
    done = threading.Event()

    def busy() -> None:
        tokens = np.arange(500_000, dtype=np.int32)
        while not done.is_set():
            mmu.close(mmu.open(tokens))

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        for _ in range(2000):
            with pytest.raises(UnknownSequence):
                mmu.info(gone)
    finally:
        done.set()
        thread.join()


def test_memory_that_is_not_to_be_had_is_a_named_error() -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
from kvmmu import MMU, InvalidConfig
for arguments in ((2**31 - 2,), (2**28, 16), (2**20, 4096)):
    try:
        MMU(*arguments)
    except InvalidConfig as error:
        assert "bytes of memory" in str(error), error
    else:
        raise AssertionError(arguments)
try:
    MMU(10, table_nodes=2**24)
except InvalidConfig as error:
    assert "table_nodes" in str(error)
MMU(1000).validate()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_row_without_new_tokens_holds_no_other_row_up() -> None:
    mmu = MMU(8, 4)
    buffers = tables(mmu)
    one, other = mmu.open(ints()), mmu.open(ints())
    first = mmu.begin_step()
    zeros = np.zeros(8, np.int32)
    mmu.prepare(first, longs(one), buffers, query_lens=ints(8), new_tokens=zeros)
    second = mmu.begin_step()
    mmu.prepare(second, longs(one, other), buffers, query_lens=ints(0, 1), new_tokens=ints(5))
    mmu.cancel(first)
    mmu.written(second)
    for step in (first, second):
        mmu.end_step(step)
    assert mmu.info(other).num_written == 1
    mmu.validate(buffers)


def test_more_pins_than_a_count_holds_are_refused() -> None:
    mmu = MMU(4, 4)
    mmu.open(ints(1))
    many = np.zeros(2**25, np.int64)
    for _ in range(3):
        mmu.pin(many)
    with pytest.raises(LimitExceeded):
        mmu.pin(many)
    for _ in range(3):
        mmu.unpin(many)
    with pytest.raises(InvalidBlock):
        mmu.unpin(longs(0))
    mmu.validate()


def test_a_move_never_evicts_what_the_plan_did_not_count_on() -> None:
    mmu = MMU(8, 4, page_orders=(0,), hold_blocks=0)
    buffers = tables(mmu)
    first = mmu.open(np.arange(8, dtype=np.int32))
    mmu.open(ints(50, 51, 52, 53))
    mmu.close(first)
    plan = mmu.plan_free_run(7)
    assert plan.pairs.tolist() == [[2, 7]]
    mmu.close(filled(mmu, buffers, range(200, 228)))  # block 7 is a fresh cached block now
    cached = mmu.match(np.arange(200, 229, dtype=np.int32))
    moves = mmu.begin(plan)
    assert mmu.match(np.arange(200, 229, dtype=np.int32)) == cached
    mmu.abort(moves)


def test_a_fenced_block_is_not_called_available() -> None:
    mmu = MMU(8, 4)
    buffers = tables(mmu)
    sequence = mmu.open(np.arange(32, dtype=np.int32))
    step = mmu.begin_step()
    mmu.prepare(step, longs(sequence), buffers)
    mmu.close(sequence)
    assert mmu.states()["available"] == 0
    with pytest.raises(OutOfBlocks):
        mmu.plan_free_run(8)
    mmu.written(step)
    mmu.end_step(step)
    assert mmu.plan_free_run(8).complete


@pytest.mark.parametrize(
    "number", [2**63, -(2**63) - 1, 2**70, np.uint64(2**63), True, 1.0, "1", None]
)
def test_a_number_that_nobody_has_is_refused_whatever_it_is(number: Any) -> None:
    """Numbers that do not fit 64 bits were OverflowError, and true was the step 1."""
    mmu = MMU(8, 4)
    buffers = tables(mmu)
    sequence = mmu.open(ints(1, 2, 3))
    step = mmu.begin_step()
    before = mmu.states()
    tokens, blocks = ints(1), longs(0)
    calls: dict[str, list[Callable[[], object]]] = {
        "sequence": [
            lambda: mmu.append(number, tokens),
            lambda: mmu.fork(number),
            lambda: mmu.truncate(number, 0),
            lambda: mmu.release_before(number, 0),
            lambda: mmu.look(number, 0),
            lambda: mmu.close(number),
            lambda: mmu.info(number),
            lambda: mmu.block_table(number),
            lambda: mmu.regions(number),
            lambda: mmu.translate(number, blocks),
            lambda: mmu.lease(number, 0, 1),
            lambda: mmu.plan_gather(number),
        ],
        "step": [
            lambda: mmu.prepare(number, longs(sequence), buffers),
            lambda: mmu.written(number),
            lambda: mmu.cancel(number),
            lambda: mmu.end_step(number),
        ],
        "lease": [lambda: mmu.end_lease(number)],
        "seed": [lambda: MMU(8, seed=number), lambda: Pool(8, seed=number)],
    }
    for name, all_of_it in calls.items():
        for call in all_of_it:
            with pytest.raises(InvalidConfig, match=f"^{name} = "):
                call()
    for verb in (mmu.written, mmu.cancel, mmu.end_step, mmu.end_lease):
        with pytest.raises(InvalidConfig, match="from 0"):
            verb(-1)
    mmu.end_step(step)
    assert mmu.states() == before
    mmu.validate()


def test_used_up_tables_leave_a_sound_manager() -> None:
    mmu = MMU(2000, 4, max_sequences=1024, table_nodes=514)
    with pytest.raises(OutOfTables):
        for _ in range(600):
            mmu.open(ints())
    mmu.validate()
    assert MMU(2000, 1, table_nodes=4).quote(np.zeros(600, np.int32)).when == "never"


def test_no_page_table_has_more_entries_than_the_reverse_map_can_name() -> None:
    """The last entry of a table of 2**22 nodes was taken for a chain of mappings."""
    with pytest.raises(InvalidConfig, match="4194303"):
        MMU(8, table_nodes=2**22)


def test_validate_sees_what_somebody_wrote_into_the_tables() -> None:
    mmu = MMU(8, 4)
    buffers = tables(mmu)
    filled(mmu, buffers, range(5))
    mmu.validate(buffers)
    buffers.seq_lens[0] += 1
    with pytest.raises(KVCacheError, match="length"):
        mmu.validate(buffers)
    buffers.seq_lens[0] -= 1
    buffers.slot_mapping[-1] = 3
    with pytest.raises(KVCacheError, match="null block"):
        mmu.validate(buffers)
