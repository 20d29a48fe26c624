"""Tables for kernels whose blocks are not ours, what was dirty in them, and groups of rows that
share a prefix.

The core's own test of all forms (``rust/kvmmu/tests/rows.rs``) goes further in random operations.
Here the way from Python is tested, and that kernels which read so read the right bytes.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvmmu import (
    MMU,
    BlockTables,
    CascadeLevel,
    Fragmented,
    InvalidConfig,
    InvalidStep,
    LimitExceeded,
    PrefixGroups,
    prefix_groups,
)

Ints = npt.NDArray[np.int32]
BLOCK = 16


def ints(*values: int) -> Ints:
    return np.array(values, np.int32)


def longs(*values: int) -> npt.NDArray[np.int64]:
    return np.array(values, np.int64)


def tables(mmu: MMU, rows: int = 4, width: int = 64, tokens: int = 512, **form: Any) -> BlockTables:
    return mmu.register_tables(
        np.empty((rows, width), np.int32),
        np.empty(rows, np.int32),
        np.empty(tokens, np.int64),
        np.empty(rows + 1, np.int32),
        **form,
    )


def step(mmu: MMU, buffers: BlockTables, ids: list[int], lens: list[int]) -> None:
    number = mmu.begin_step()
    mmu.prepare(number, longs(*ids), buffers, query_lens=ints(*lens))
    mmu.written(number)
    mmu.end_step(number)


def aligned(mmu: MMU, tokens: int, order: int) -> int:
    """A sequence that begins at an aligned place."""
    found = None
    while found is None:
        sequence = mmu.open(np.zeros(tokens, np.int32))
        if mmu.block_table(sequence)[0] % (1 << order) == 0:
            found = sequence
        else:
            mmu.close(sequence)
            mmu.open(ints(1))
    return found


# -- kernel blocks -----------------------------------------------------------------------------


def test_a_block_of_16_is_four_kernel_blocks_of_4_in_order() -> None:
    """Kind 17."""
    mmu = MMU(8, BLOCK)
    buffers = tables(mmu, kernel_block_size=4)
    assert (buffers.kernel_block_size, buffers.null_entry) == (4, 8 * 4)
    assert (buffers.block_table == 32).all()
    sequence = mmu.open(np.zeros(2 * BLOCK, np.int32))
    mmu.export(longs(sequence), buffers)
    first, second = mmu.block_table(sequence).tolist()
    expected = [4 * block + part for block in (first, second) for part in range(4)]
    assert buffers.block_table[0].tolist() == expected + [32] * 56


@pytest.mark.parametrize("null", ["first", "last", 3])
@given(tokens=st.lists(st.integers(0, 70), min_size=1, max_size=4), size=st.sampled_from([1, 2, 8]))
def test_entries_behind_a_length_are_null_also_within_a_block(
    null: str | int, tokens: list[int], size: int
) -> None:
    mmu = MMU(32, BLOCK, null_block=null, prefix_caching=False)
    buffers = tables(mmu, width=70, kernel_block_size=size)
    null_entry = mmu.null_block * (BLOCK // size)
    for lens in (tokens, tokens[::-1][:2]):  # the rows are used again, by others
        ids = [mmu.open(np.zeros(n, np.int32)) for n in lens]
        step(mmu, buffers, ids, lens)
        for row, (sequence, n) in enumerate(zip(ids, lens, strict=True)):
            slots = mmu.translate(sequence, np.arange(0, n, size))
            expected = (slots // size).tolist()
            wide = 70 - len(expected)
            assert buffers.block_table[row].tolist() == expected + [null_entry] * wide
        assert (buffers.block_table[len(ids) :] == null_entry).all()
        count = sum(-(-n // size) for n in lens)
        indptr, indices, last = np.empty(5, "i4"), np.empty(count, "i4"), np.empty(4, "i4")
        assert buffers.csr(indptr, indices, last) == count
        for row, n in enumerate(lens):
            pages = int(indptr[row + 1] - indptr[row])
            assert pages * size - n == (size - last[row] if n else 0)
        mmu.validate(buffers)


def test_slots_are_the_same_whatever_an_entry_is() -> None:
    plain, split = MMU(8, BLOCK), MMU(8, BLOCK)
    one, other = tables(plain), tables(split, kernel_block_size=2)
    for mmu, buffers in ((plain, one), (split, other)):
        step(mmu, buffers, [mmu.open(np.zeros(21, np.int32))], [21])
    assert one.slot_mapping.tolist() == other.slot_mapping.tolist()
    assert (one.seq_lens == other.seq_lens).all()
    assert one.block_table[0, 0] * BLOCK == other.block_table[0, 0] * 2


# -- pages -------------------------------------------------------------------------------------


def test_pages_are_numbers_of_aligned_groups_and_a_tail_begins_one() -> None:
    mmu = MMU(63, BLOCK, null_block="first", page_orders=(0,), hold_blocks=0)
    buffers = tables(mmu, page_order=3)
    assert (buffers.kernel_block_size, buffers.null_entry, buffers.page_order) == (128, 0, 3)
    sequence = aligned(mmu, 11 * BLOCK - 3, 3)
    step(mmu, buffers, [sequence], [11 * BLOCK - 3])
    first = int(mmu.block_table(sequence)[0])
    assert buffers.block_table[0].tolist() == [first // 8, first // 8 + 1] + [0] * 62
    indptr, indices, last = np.empty(2, "i4"), np.empty(2, "i4"), np.empty(1, "i4")
    assert buffers.csr(indptr, indices, last) == 2
    assert last.tolist() == [3 * BLOCK - 3]
    mmu.validate(buffers)


def test_a_sequence_that_lies_in_no_pages_is_refused_with_its_group() -> None:
    single: dict[str, Any] = {"page_orders": (0,), "hold_blocks": 0}
    mmu = MMU(63, BLOCK, null_block="first", prefix_caching=False, **single)
    buffers = tables(mmu, page_order=1)
    good = aligned(mmu, 2 * BLOCK, 1)
    mmu.export(longs(good), buffers)
    before = buffers.block_table.copy(), buffers.generations()
    bad = aligned(mmu, 3 * BLOCK, 1)
    others = [mmu.open(ints(1)) for _ in range(5)]  # one of them is where it would grow
    mmu.append(bad, np.zeros(BLOCK, np.int32))
    blocks = mmu.block_table(bad)
    assert blocks[3] != blocks[2] + 1
    for call in (
        lambda: mmu.export(longs(good, bad), buffers),
        lambda: mmu.prepare(mmu.begin_step(), longs(good, bad), buffers),
    ):
        with pytest.raises(Fragmented) as caught:
            call()
        error = caught.value
        assert (error.sequence, error.group, error.page_order) == (bad, 1, 1)
        assert (error.needed, error.largest_run, error.num_blocks) == (2, 1, 63)
        assert error.available == mmu.states()["available"]
        assert pickle.loads(pickle.dumps(error)).numbers == error.numbers
        assert (buffers.block_table == before[0]).all()
        assert (buffers.generations() == before[1]).all()
    assert len(others) == 5
    mmu.validate(buffers)


# -- what was dirty ----------------------------------------------------------------------------


def test_a_mirror_that_follows_dirty_rows_is_the_table() -> None:
    mmu = MMU(64, 4, prefix_caching=False)
    buffers = tables(mmu, width=32, kernel_block_size=2)
    mirror = buffers.block_table.copy()
    seen = buffers.generations()
    assert (seen == 0).all() and len(buffers.dirty_rows()) == 0
    ids = [mmu.open(np.zeros(n, np.int32)) for n in (3, 9, 17)]

    def follow() -> list[tuple[int, int, int]]:
        dirty = buffers.dirty_rows()
        assert dirty.rows.dtype == dirty.start.dtype == dirty.stop.dtype == np.int32
        assert dirty.generation.dtype == np.int64
        for row, start, stop, generation in zip(
            dirty.rows, dirty.start, dirty.stop, dirty.generation, strict=True
        ):
            assert generation == seen[row] + 1  # nothing was missed
            seen[row] = generation
            mirror[row, start:stop] = buffers.block_table[row, start:stop]
        assert (mirror == buffers.block_table).all()
        assert (seen == buffers.generations()).all()
        return list(
            zip(dirty.rows.tolist(), dirty.start.tolist(), dirty.stop.tolist(), strict=True)
        )

    mmu.export(longs(*ids), buffers)
    assert follow() == [(0, 0, 2), (1, 0, 5), (2, 0, 9)]
    mmu.export(longs(*ids), buffers)
    assert follow() == []
    mmu.append(ids[1], ints(1, 2, 3))
    mmu.export(longs(*ids), buffers)
    assert follow() == [(1, 5, 6)]
    mmu.truncate(ids[2], 4)
    with pytest.raises(LimitExceeded):
        mmu.export(longs(ids[0], mmu.open(np.zeros(65, np.int32))), buffers)
    assert told(buffers) == [(1, 5, 6)]  # a refused call wrote nothing
    mmu.export(longs(ids[0], ids[2]), buffers)
    assert follow() == [(1, 0, 6), (2, 0, 9)]


def told(buffers: BlockTables) -> list[tuple[int, int, int]]:
    dirty = buffers.dirty_rows()
    return list(zip(dirty.rows.tolist(), dirty.start.tolist(), dirty.stop.tolist(), strict=True))


# -- groups ------------------------------------------------------------------------------------


def rows_again(found: PrefixGroups, lens: Ints, size: int) -> list[tuple[list[int], int]]:
    """Entries and length of each row, from both levels."""
    rows = []
    for group, (first, end) in enumerate(zip(found.row_indptr, found.row_indptr[1:], strict=False)):
        shared = part(found.shared, group)
        for row in range(first, end):
            own = part(found.own, row)
            length = len(shared) * size
            if own:
                length += (len(own) - 1) * size + int(found.own.kv_last_page_len[row])
            rows.append((shared + own, length))
    assert [length for _, length in rows] == lens.tolist()
    return rows


def part(level: CascadeLevel, n: int) -> list[int]:
    found: list[int] = level.kv_indices[level.kv_indptr[n] : level.kv_indptr[n + 1]].tolist()
    return found


def family(mmu: MMU, buffers: BlockTables, shared: int, children: int) -> list[int]:
    parent = mmu.open(np.arange(shared, dtype=np.int32))
    step(mmu, buffers, [parent], [shared])
    return [parent, *(mmu.fork(parent) for _ in range(children))]


@pytest.mark.parametrize("size", [None, 4, 8])
def test_neighbours_that_share_a_prompt_are_one_group(size: int | None) -> None:
    mmu = MMU(64, BLOCK, null_block="first")
    buffers = tables(mmu, rows=6, kernel_block_size=size)
    a = family(mmu, buffers, 37, 2)
    stranger = mmu.open(ints(7, 8, 9))
    ids = [*a, stranger]
    lens = [1, 5, 1, 3]
    number = mmu.begin_step()
    mmu.prepare(number, longs(*ids), buffers, query_lens=ints(*lens))
    found = prefix_groups(buffers)
    assert found.row_indptr.tolist() == [0, 3, 4]
    assert found.shared.qo_indptr.tolist() == [0, 7, 10]
    assert found.own.qo_indptr.tolist() == [0, 1, 6, 7, 10]
    per_block = BLOCK // (size or BLOCK)
    # The third block is written by all three: only one may have it still. The first two are full.
    assert found.shared.kv_indptr.tolist() == [0, 2 * per_block, 2 * per_block]
    assert found.shared.kv_last_page_len.tolist() == [size or BLOCK, 0]
    again = rows_again(found, buffers.seq_lens[:4], size or BLOCK)
    for row, (entries, _) in enumerate(again):
        assert entries == buffers.block_table[row, : len(entries)].tolist()
    mmu.cancel(number)
    mmu.end_step(number)


def test_a_prompt_is_not_shared_with_those_who_still_compute_it() -> None:
    """Level 0 has no causal mask: no query may stand in it."""
    mmu = MMU(64, 4)
    buffers = tables(mmu)
    a, b = family(mmu, buffers, 12, 1)
    number = mmu.begin_step()
    mmu.truncate(b, 11)  # its third block is no longer full
    mmu.prepare(number, longs(a, b), buffers, query_lens=ints(0, 1))
    found = prefix_groups(buffers)
    assert found.shared.kv_indptr.tolist() == [0, 2]
    rows_again(found, buffers.seq_lens[:2], 4)
    mmu.written(number)
    mmu.end_step(number)


def test_groups_go_into_arrays_that_were_made_once() -> None:
    mmu = MMU(64, 4)
    buffers = tables(mmu, rows=4, width=16)
    ids = family(mmu, buffers, 24, 3)
    out = PrefixGroups.allocate(4, 16)
    for level in out.levels:
        level.kv_indices[:] = -7
    step(mmu, buffers, ids, [1, 1, 1, 1])
    found = prefix_groups(buffers, out=out)
    assert np.shares_memory(found.own.kv_indices, out.own.kv_indices)
    assert found.shared.kv_indices.tolist() == mmu.block_table(ids[0])[:6].tolist()
    assert (out.shared.kv_indices[6:] == -7).all()
    fresh = prefix_groups(buffers)
    for one, other in zip(found.levels, fresh.levels, strict=True):
        for name in ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist()
    moves = mmu.begin(mmu.plan_free_run(50))
    mmu.commit(moves)
    mmu.export(longs(*ids), buffers)
    moved = prefix_groups(buffers)
    assert moved.row_indptr.tolist() == fresh.row_indptr.tolist()
    for one, other in zip(moved.levels, fresh.levels, strict=True):
        for name in ("qo_indptr", "kv_indptr", "kv_last_page_len"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist()


def test_groups_of_rows_that_are_no_longer_those_of_the_step_are_refused() -> None:
    mmu = MMU(64, 4)
    buffers = tables(mmu)
    ids = family(mmu, buffers, 9, 1)
    step(mmu, buffers, ids, [1, 1])
    mmu.export(longs(*ids), buffers)
    prefix_groups(buffers)  # the same rows
    mmu.export(longs(*ids[::-1]), buffers)
    with pytest.raises(InvalidConfig, match="query_start_loc"):
        prefix_groups(buffers)
    step(mmu, buffers, ids, [1, 1])
    prefix_groups(buffers)
    mmu.export(longs(ids[0]), buffers)
    with pytest.raises(InvalidConfig, match="query_start_loc"):
        prefix_groups(buffers)


def test_outputs_of_groups_are_checked_before_anything_is_written() -> None:
    mmu = MMU(64, 4)
    buffers = tables(mmu, rows=4, width=16)
    step(mmu, buffers, family(mmu, buffers, 24, 3), [1, 1, 1, 1])
    good = PrefixGroups.allocate(4, 16)
    level = good.own

    def with_own(**changed: Any) -> PrefixGroups:
        names = ("qo_indptr", "kv_indptr", "kv_indices", "kv_last_page_len")
        arrays = {name: changed.get(name, getattr(level, name)) for name in names}
        return PrefixGroups(good.row_indptr, good.shared, CascadeLevel(**arrays))

    frozen = np.zeros(4, np.int32)
    frozen.flags.writeable = False
    for array in (
        np.zeros(5, np.int64),
        np.zeros((5, 1), np.int32),
        np.zeros(10, np.int32)[::2],
        [0] * 5,
        level.qo_indptr,  # is one of the others too
        np.frombuffer(bytearray(21), np.int32, 4, 1),
    ):
        with pytest.raises(InvalidConfig):
            prefix_groups(buffers, out=with_own(kv_indptr=array))
    with pytest.raises(InvalidConfig):
        prefix_groups(buffers, out=with_own(kv_last_page_len=frozen))
    good.row_indptr[:] = -7
    for name, size, needed in (
        ("qo_indptr", 4, 5),
        ("kv_indptr", 4, 5),
        ("kv_last_page_len", 3, 4),
        ("kv_indices", 3, 4),
    ):
        with pytest.raises(LimitExceeded) as caught:
            prefix_groups(buffers, out=with_own(**{name: np.zeros(size, np.int32)}))
        assert (caught.value.needed, caught.value.limit) == (needed, size), name
    assert (good.row_indptr == -7).all()


# -- hostile input -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        {"kernel_block_size": size}
        for size in (0, -4, 3, 5, 32, 17, True, 4.0, "4", 2**40, [4], np.float32(4))
    ]
    + [{"page_order": order} for order in (-1, 10, 63, 2**40, True, 1.0, "1", [1])]
    + [{"kernel_block_size": 16, "page_order": 0}],
    ids=str,
)
def test_entries_that_there_are_not_are_refused(form: dict[str, Any]) -> None:
    mmu = MMU(1023, BLOCK, null_block="first")
    untouched = np.full((4, 4), 77, np.int32)
    with pytest.raises(InvalidConfig):
        mmu.register_tables(
            untouched, np.zeros(4, "i4"), np.zeros(4, "i8"), np.zeros(5, "i4"), **form
        )
    assert (untouched == 77).all()


@pytest.mark.parametrize(
    ("num_blocks", "null", "order", "allowed"),
    [
        (64, "last", 3, "null_block = 0 or another multiple of 8 up to 56"),
        (63, "last", 3, "null_block = 0 or another multiple of 8 up to 56"),
        (63, 5, 1, "multiple of 2 up to 62"),
        (8, "last", 3, "null_block = 0"),
        (6, "first", 3, "num_blocks of at least 7"),
        (510, "first", 9, "num_blocks of at least 511"),
    ],
)
def test_pages_without_a_null_page_are_refused(
    num_blocks: int, null: str | int, order: int, allowed: str
) -> None:
    with pytest.raises(InvalidConfig, match=allowed):
        tables(MMU(num_blocks, BLOCK, null_block=null), page_order=order)


def test_the_null_page_may_be_any_whole_page_that_begins_with_the_null_block() -> None:
    for null, order in ((0, 9), (512, 9), (8, 3), (1016, 3)):
        buffers = tables(MMU(1023, BLOCK, null_block=null), page_order=order)
        assert buffers.null_entry == null >> order
        assert (buffers.block_table == null >> order).all()


def test_a_row_that_is_too_narrow_is_refused_in_its_own_units() -> None:
    mmu = MMU(63, BLOCK, null_block="first")
    for form, needed in (({"kernel_block_size": 4}, 9), ({"page_order": 1}, 2)):
        buffers = tables(mmu, width=needed - 1, **form)
        sequence = aligned(mmu, 33, 1)
        with pytest.raises(LimitExceeded) as caught:
            mmu.export(longs(sequence), buffers)
        assert (caught.value.needed, caught.value.limit) == (needed, needed - 1)
        assert (buffers.block_table == buffers.null_entry).all()


# -- the cache: what kernels read --------------------------------------------------------------


def small_cache(**options: Any) -> Any:
    torch = pytest.importorskip("torch")
    import kvmmu

    shape: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 4}
    return kvmmu.KVCache(
        **shape, dtype=torch.float32, max_batch=4, max_tokens=256, **{"block_size": 16, **options}
    )


@pytest.mark.parametrize(
    ("form", "null"),
    [({"kernel_block_size": 4}, "last"), ({"page_order": 1}, "first"), ({}, "last")],
    ids=str,
)
def test_a_kernel_reads_its_own_bytes_through_every_form_of_table(
    form: dict[str, int], null: str
) -> None:
    cache = small_cache(num_blocks=31, null_block=null, **form)
    import torch

    fillers: list[Any] = []
    handle = cache.open(list(range(75)))
    while handle.block_table()[0] % 2:
        handle.close()
        fillers.append(cache.open([1]))
        handle = cache.open(list(range(75)))
    with cache.step() as current:
        batch = current.prepare([handle], query_lens=[75])
        size = batch.tables.kernel_block_size
        values = torch.arange(75 * 8, dtype=torch.float32).reshape(75, 2, 4)
        cache.write(0, values, -values, batch)
        k, v = cache.layers.paged(0, size)
        row = batch.block_table[0, : -(-75 // size)].long()
        assert torch.equal(k[row].flatten(0, 1)[:75], values)
        assert torch.equal(v[row].flatten(0, 1)[:75], -values)
        csr = batch.csr()
        assert csr.indices.tolist() == row.tolist()
        assert (batch.block_table[0, len(row) :] == batch.tables.null_entry).all()
    cache.validate()
    with pytest.raises(InvalidStep):
        prefix_groups(batch)
    for one in (handle, *fillers):
        one.close()


def test_a_layout_that_cannot_be_read_in_other_pages_is_refused() -> None:
    for form in ({"kernel_block_size": 4}, {"page_order": 1}):
        with pytest.raises(InvalidConfig, match="layout"):
            small_cache(num_blocks=31, layout="block_major", null_block="first", **form)
    small_cache(num_blocks=31, layout="block_major", kernel_block_size=16)


def attention(q: Any, k: Any, v: Any, causal_from: int | None) -> tuple[Any, Any]:
    """Output and log-sum-exp of one head; ``causal_from``: keys that every query sees."""
    scores = q @ k.T
    if causal_from is not None:
        seen = np.arange(k.shape[0])[None, :] <= causal_from + np.arange(q.shape[0])[:, None]
        scores = np.where(seen, scores, -np.inf)
    top = scores.max(axis=1, initial=-1e300)
    weights = np.exp(scores - top[:, None])
    total = weights.sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num(weights @ v / total[:, None]), top + np.log(total)


@given(data=st.data())
def test_cascade_attention_over_both_levels_is_attention(data: st.DataObject) -> None:
    """Two levels merged by their log-sum-exp against each row alone, from a step of many tokens."""
    size = data.draw(st.sampled_from([2, 4]), "kernel block")
    mmu = MMU(40, 4)
    buffers = tables(mmu, rows=6, kernel_block_size=size)
    ids = []
    for _ in range(data.draw(st.integers(1, 2), "families")):
        length = data.draw(st.integers(1, 17), "prompt")
        grown = family(mmu, buffers, length, data.draw(st.integers(0, 2), "children"))
        for child in grown[1:]:
            mmu.truncate(child, data.draw(st.integers(0, length), "cut"))
        ids += grown
    lens = [data.draw(st.integers(0, 4), "queries") for _ in ids]
    number = mmu.begin_step()
    mmu.prepare(number, longs(*ids), buffers, query_lens=ints(*lens))
    found = prefix_groups(buffers)
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((41 * 4 // size, size, 3)) for _ in range(2))
    starts = buffers.query_start_loc
    q = rng.standard_normal((int(starts[len(ids)]), 3))

    def keys(level: CascadeLevel, n: int, length: int) -> tuple[Any, Any]:
        pages = part(level, n)
        return k[pages].reshape(-1, 3)[:length], v[pages].reshape(-1, 3)[:length]

    def length_of(level: CascadeLevel, n: int) -> int:
        pages = len(part(level, n))
        return (pages - 1) * size + int(level.kv_last_page_len[n]) if pages else 0

    for group in range(len(found.row_indptr) - 1):
        shared = length_of(found.shared, group)
        at = found.shared.qo_indptr
        whole = attention(q[at[group] : at[group + 1]], *keys(found.shared, group, shared), None)
        for row in range(found.row_indptr[group], found.row_indptr[group + 1]):
            queries = slice(int(starts[row]), int(starts[row + 1]))
            assert queries.stop - queries.start == lens[row]
            own = length_of(found.own, row)
            out, lse = attention(q[queries], *keys(found.own, row, own), own - lens[row])
            first = slice(queries.start - int(at[group]), queries.stop - int(at[group]))
            share = 1 / (1 + np.exp(lse - whole[1][first]))
            merged = share[:, None] * whole[0][first] + (1 - share)[:, None] * out
            length = int(buffers.seq_lens[row])
            pages = buffers.block_table[row, : -(-length // size)]
            alone, _ = attention(
                q[queries],
                k[pages].reshape(-1, 3)[:length],
                v[pages].reshape(-1, 3)[:length],
                length - lens[row],
            )
            np.testing.assert_allclose(merged, alone, atol=1e-12)
    mmu.cancel(number)
    mmu.end_step(number)
