"""What broke in comparable systems, where it concerns KVCache and torch.

``test_hazards.py`` has the same kinds for the MMU. Which test covers which number of the list of
hazards, here or elsewhere:

====  ===========================================================================================
 4    test_hazards: one big hole; here: passes of KVCache go on until nothing is left
 5    here: padded rows are not fragmentation
 6    test_layout (hazard_6), test_cache (K only, widths, fp8 with scales, every layout); here: a
      block of 34 or 18 bytes a token under compaction
 7    test_layout (hazard_7); here: a compaction beyond 4 GiB, found by views and gather
 8    test_hazards for the index; here: what a prompt finds after compaction into a full cache
11    test_hazards; here: slots of a batch after a move and after a fork
17    test_layout (hazard_17) for the tensors; here: the row of a batch read in kernel blocks
25    here: forks that end on a boundary copy nothing, and neither do sequences of no tokens
26    here: last_page_len of a batch
27    test_hazards; here: the last token of a cached prompt is written by its step
28    here: a row too wide is refused, its neighbour's tables untouched
29    here: batches of none, and of a sequence without tokens
30    here: NaN in the unused tail of a recycled block
39    here: stores before the compute wrote, loads over what an older step reads (with controls);
      test_cache: what a step in flight touches is not reused (with controls)
41    here: leases instead of swap (with a control); test_cache: leases
43    here: a row reused by a shorter sequence; padding writes nothing
44    test_layout (hazard_44); here: NaN in the null block spreads nowhere
45    test_cache: 1000 operations; here: buffers refilled before their copy ran (with a control)
47    test_ranks: one decision, all or none apply it; here: movers of several caches, one MMU
====  ===========================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvmmu import (  # noqa: E402
    InvalidConfig,
    InvalidPlan,
    KVCache,
    LimitExceeded,
    Mover,
    Moves,
    attend,
    run_plan,
)
from kvmmu.layout import Layers  # noqa: E402

from .small_cache import SmallCache, raw  # noqa: E402

EAGER: dict[str, Any] = {
    "placement": "scatter",
    "compaction_start": 0.0,
    "compaction_stop": 0.0,
    "budget_blocks": 4,
}
LAYOUTS = ("NHD", "HND", "packed", "block_major")


# -- moves -----------------------------------------------------------------------------------


def test_compaction_goes_on_until_nothing_is_left() -> None:
    """Kinds 3 and 4, seen from a cache: no pass of nothing while there is something to do."""
    pool = SmallCache(64, 4, **EAGER)
    handles = [pool.open(4) for _ in range(40)]
    pool.close(*handles[::2])
    passes: list[int] = []
    while not passes or passes[-1]:
        passes.append(pool.cache.compact())
        assert passes[-1] <= 4
        pool.check()
    measure = pool.cache.mmu.measure()
    assert measure.largest_run_available == measure.available == 44


def test_padded_rows_are_not_fragmentation() -> None:
    """Kind 5. A row of one token is padded with null blocks in a table of 64 columns."""
    pool = SmallCache(64, 4, auto_compact=True)
    handle = pool.open(5)
    for _ in range(100):
        pool.step([handle])
    assert pool.cache.mmu.stats()["moves_begun"] == 0
    pool.check()


@pytest.mark.parametrize("width", [34, 18])
def test_blocks_of_odd_bytes_keep_them_under_compaction(width: int) -> None:
    """Kind 6. Quantised rows with a scale in them, K only, sliced out of wider rows."""
    wide = torch.zeros((21, 3, 1, width + 5), dtype=torch.uint8)
    cache = KVCache.attach(
        [wide[..., 2 : 2 + width]], layout="NHD", num_blocks=20, block_size=3,
        max_batch=8, max_tokens=64, **EAGER,
    )  # fmt: skip
    pool = SmallCache(20, 3, cache=cache)
    handles = [pool.open(5 + k) for k in range(6)]
    pool.close(*handles[::2])
    moved = 0
    while count := pool.cache.compact():
        moved += count
        pool.check()
    assert moved > 0
    assert not wide[..., :2].any(), "written beside the rows"
    assert not wide[..., 2 + width :].any(), "written beside the rows"


def test_a_compaction_beyond_four_gib_is_exact() -> None:
    """Kind 7. Blocks of 1,002,240 bytes; the few used ones lie at both ends of 4.4 GB and beyond
    4 GiB, and what lies between is never touched."""
    blocks, block_size, dim = 4401, 16, 62_640
    k = torch.empty((blocks, block_size, 1, dim), dtype=torch.uint8)
    cache: Any = KVCache.attach(
        [k],
        layout="NHD",
        num_blocks=blocks - 1,
        block_size=block_size,
        max_batch=2,
        max_tokens=64,
        anchor=0.0,
        page_orders=(0,),
        hold_blocks=0,
    )

    def block(first: int, count: int) -> Any:
        return cache.open([first] * (block_size * count))

    low, filler, middle, more, high = (
        block(number, count) for number, count in enumerate((1, 4299, 3, 95, 2))
    )
    assert middle.block_table().tolist() == [4300, 4301, 4302]
    assert high.block_table().tolist() == [4398, 4399]
    contents = {}
    for handle in (low, middle, high):
        tokens = handle.num_tokens
        contents[handle] = torch.randint(0, 256, (tokens, 1, dim), dtype=torch.uint8)
        with cache.step() as step:
            cache.write(0, contents[handle], None, step.prepare([handle], query_lens=[tokens]))
    assert torch.equal(k[4300:4303].reshape(-1, 1, dim), contents[middle])
    filler.close()
    more.close()
    assert run_plan(cache.mmu, cache.mover, cache.mmu.plan_free_run(4394)) == 3
    assert middle.block_table().tolist() != [4300, 4301, 4302]
    for handle, expected in contents.items():
        assert torch.equal(cache.gather(handle, 0)[0], expected)
        assert torch.equal(torch.cat([view for view, _ in cache.views(handle, 0)]), expected)
        handle.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_prompt_finds_after_compaction_into_a_full_cache_is_its_own(layout: str) -> None:
    """Kind 8."""
    pool = SmallCache(12, 4, layout=layout, **EAGER)
    prompts = [pool.fresh(8) for _ in range(4)]
    cached = [pool.open(prompt) for prompt in prompts]
    live = [pool.open(4) for _ in range(4)]
    pool.close(cached[0], cached[2], live[1], live[3])
    assert pool.states()["empty"] == 0
    while pool.cache.compact():
        pool.check()
    found = 0
    for prompt in prompts:
        again = pool.open([*prompt, 0])
        found += again.num_cached_tokens
        pool.check()
        pool.close(again)
    assert found > 0


def test_slots_of_a_batch_come_from_the_table_after_a_move_and_a_fork() -> None:
    """Kind 11. Not the last slot plus one."""
    pool = SmallCache(20, 4, **EAGER)
    handles = [pool.open(6) for _ in range(5)]
    pool.close(*handles[:3])
    handles = [*handles[3:], pool.fork(handles[3])]
    before = [handle.block_table().tolist() for handle in handles]
    while pool.cache.compact():
        pass
    assert [handle.block_table().tolist() for handle in handles] != before
    step = pool.launch(handles, [4, 4, 4])
    for row, handle in enumerate(handles):
        blocks = handle.block_table()
        positions = np.arange(6, 10)
        expected = blocks[positions // 4] * 4 + positions % 4
        assert step.batch.slot_mapping[4 * row : 4 * row + 4].tolist() == expected.tolist()
    step.written()
    pool.cache.end_step(step)
    pool.check()


@pytest.mark.parametrize("page", [1, 2, 4, 8])
def test_a_row_reads_the_same_tokens_in_kernel_blocks(page: int) -> None:
    """Kind 17. A block of 16 tokens is 16 / page entries of the kernel's, in order."""
    pool = SmallCache(12, 16, placement="scatter")
    handle = pool.open(40)
    step = pool.launch([handle])
    ratio = 16 // page
    row = step.batch.block_table[0, :3].long()
    expanded = (row[:, None] * ratio + torch.arange(ratio)).flatten()
    k, _ = pool.cache.layers.paged(1, page)
    found = k[expanded].flatten(0, 1)[:41]
    assert torch.equal(raw(found), raw(pool.cache.gather(handle, 1)[0]))
    step.written()
    pool.cache.end_step(step)


# -- boundaries ------------------------------------------------------------------------------


def test_forks_that_end_on_a_boundary_and_empty_sequences_copy_nothing() -> None:
    """Kind 25."""
    pool = SmallCache(8, 4)
    a = pool.open(8)
    b = pool.fork(a)
    pool.step([b])
    pool.step([a])
    assert pool.cache.mmu.stats()["copied_on_write"] == 0
    assert pool.states()["available"] == 4
    pool.append(a, 0)
    pool.truncate(a, 4)
    pool.truncate(a, 0)
    empty = pool.open(0)
    pool.close(pool.fork(empty))
    pool.cache.compact()
    assert empty.runs() == [] and empty.byte_ranges()[0].tolist() == []
    lease = empty.lease()
    assert lease.blocks.tolist() == []
    lease.done()
    pool.check()
    c = pool.open(7)
    pool.append(c, 6)
    assert len(c.block_table()) == 4
    pool.step([c], [6])
    pool.check()


def test_the_last_page_of_a_row_is_never_empty_when_full() -> None:
    """Kind 26."""
    pool = SmallCache(16, 4)
    handles = [pool.open(n) for n in (0, 1, 3, 4, 5, 8)]
    step = pool.launch(handles, [0] * 6)
    indptr, indices, last = step.batch.csr()
    assert last.tolist() == [0, 1, 3, 4, 1, 4]
    assert indptr.tolist() == [0, 0, 1, 2, 3, 5, 7]
    assert indices.tolist() == [b for one in handles for b in one.block_table().tolist()]
    step.written()
    pool.cache.end_step(step)


def test_the_last_token_of_a_cached_prompt_is_computed() -> None:
    """Kind 27."""
    pool = SmallCache(4, 4)
    prompt = pool.fresh(8)
    pool.close(pool.open(prompt))
    again = pool.open(prompt)
    assert (again.num_cached_tokens, again.num_written) == (4, 8)
    pool.check()


def test_a_row_that_would_be_too_wide_leaves_its_neighbour_alone() -> None:
    """Kind 28. The sum is tested, not the increment."""
    pool = SmallCache(16, 4, max_sequence_tokens=16)
    a, b = pool.open(12), pool.open(12)
    batch = pool.launch([b, a], [1, 1])
    before = [buffers.block_table.clone() for buffers in pool.cache._rotation]
    everything = pool.everything()
    other = pool.cache.begin_step()
    with pytest.raises(LimitExceeded) as caught:
        other.prepare([b, a], query_lens=[1, 8], new_tokens=[1] * 9)
    assert caught.value.limit in (4, 16)
    assert pool.everything() == everything
    for was, buffers in zip(before, pool.cache._rotation, strict=True):
        assert torch.equal(was, buffers.block_table)
    other.cancel()
    pool.cache.end_step(other)
    batch.written()
    pool.cache.end_step(batch)
    pool.check()


def test_batches_of_none_and_of_empty_sequences_are_batches() -> None:
    """Kind 29."""
    pool = SmallCache(8, 4)
    empty, short = pool.open(0), pool.open(3)
    batches: list[tuple[list[Any], list[int]]] = [
        ([], []),
        ([empty], [0]),
        ([empty, short], [0, 2]),
        ([short, empty], [1, 1]),
    ]
    for handles, counts in batches:
        step = pool.launch(handles, counts)
        batch = step.batch
        assert len(batch) == len(handles)
        assert batch.query_start_loc.tolist() == [0, *np.cumsum(counts).tolist()]
        assert batch.num_tokens == sum(counts)
        assert len(batch.csr().indptr) == len(handles) + 1
        step.written()
        pool.cache.end_step(step)
    step = pool.cache.begin_step()
    pool.cache.write(0, torch.zeros(0, 2, 4), torch.zeros(0, 2, 4), step.prepare([]))
    pool.cache.end_step(step)
    pool.check()


@pytest.mark.parametrize("moved", [False, True])
def test_nan_in_the_tail_of_a_recycled_block_is_never_seen(moved: bool) -> None:
    """Kind 30. The memory is not zeroed again: what is read ends at the sequence's length."""
    pool = SmallCache(20, 4, prefix_caching=False, **EAGER)
    handles = [pool.open(4) for _ in range(20)]
    for layer in pool.cache.layers:
        layer.k.fill_(float("nan"))
        layer.v.fill_(float("nan"))
    pool.close(*handles)
    cache = pool.cache
    kept: list[Any] = []
    ones: list[Any] = [cache.open([k] * 6) for k in range(4)]
    for handle in ones:
        with cache.step() as step:
            batch = step.prepare([handle], query_lens=[6])
            for layer in range(2):
                cache.write(layer, torch.ones(6, 2, 4), torch.ones(6, 2, 4), batch)
    if moved:
        for handle in ones[::2]:
            handle.close()
        kept, ones = ones, ones[1::2]
        assert cache.compact() > 0
    for handle in ones:
        k, v = cache.gather(handle, 0)
        assert (k == 1).all() and (v == 1).all()
        out = attend(torch.ones(2, 4), cache.views(handle, 0))
        assert torch.isfinite(out).all() and torch.allclose(out, torch.ones(2, 4))
        whole = cache.layer(0).k[handle.block_table().tolist()]
        assert torch.isnan(whole).any(), "the tail holds what it held: kernels must mask"
    for handle in {*kept, *ones}:
        handle.close()


# -- transfers and the order of things --------------------------------------------------------


@pytest.mark.parametrize("waits", [True, False])
def test_a_store_waits_for_the_writes_of_its_step(waits: bool) -> None:
    """Kind 39, read after write. The control reads before the device wrote."""
    pool = SmallCache(8, 4, late=True)
    handle = pool.open(8, write=False)
    step = pool.launch([handle], [8])
    step.written()
    event = pool.device.event()
    pool.cache.end_step(step, event)
    lease = handle.lease()
    values = list(pool.texts[handle.id].values)
    pool.close(handle)
    if waits:
        event.synchronize()
        pool.read(torch.from_numpy(lease.blocks), values)
    else:
        with pytest.raises(AssertionError):
            pool.read(torch.from_numpy(lease.blocks), values)
        event.synchronize()
    lease.done()
    pool.check()


@pytest.mark.parametrize("fenced", [True, False])
def test_a_load_does_not_overwrite_what_an_older_step_reads(fenced: bool) -> None:
    """Kind 39, write after read. The load is a transfer that does not wait for the queue."""
    pool = SmallCache(4, 4, late=True, prefix_caching=False)
    old = pool.open(8, write=False)
    step = pool.launch([old], [8])
    step.written()
    pool.device.run(pool.device.ran + 1)  # written, not yet read
    event = pool.device.event()
    pool.close(old)
    pool.cache.end_step(step, event if fenced else None)
    load = pool.open(4 * pool.states()["available"], write=False)
    slots = pool.cache.mmu.translate(load.id, np.arange(load.num_tokens, dtype=np.int64))
    pool.write(torch.from_numpy(slots), pool.texts[load.id].values)
    if fenced:
        pool.device.run()
    else:
        with pytest.raises(AssertionError):
            pool.device.run()


@pytest.mark.parametrize("leased", [True, False])
def test_blocks_under_a_pending_transfer_are_not_freed(leased: bool) -> None:
    """Kind 41. The control has no lease: what it sends is somebody else's."""
    pool = SmallCache(8, 4, prefix_caching=False)
    handle = pool.open(12)
    values = list(pool.texts[handle.id].values)
    row = torch.from_numpy(handle.block_table().astype(np.int64))
    lease = handle.lease() if leased else None
    pool.close(handle)
    for _ in range(4):
        pool.close(pool.open(4 * pool.states()["available"]))
    if lease is None:
        with pytest.raises(AssertionError):
            pool.read(row, values)
        return
    pool.read(row, values)
    lease.cancel()  # a failed store is given up: nothing stays behind
    assert pool.states()["empty"] == 8
    assert pool.cache.mmu.num_leases() == 0


# -- tables ----------------------------------------------------------------------------------


def test_a_row_reused_by_a_shorter_sequence_ends_in_null_blocks() -> None:
    """Kind 43. And what pads the batch writes nothing."""
    pool = SmallCache(16, 4, max_sequence_tokens=32)
    a = pool.open(24)
    for _ in range(2):
        pool.step([a])  # both sets of tables
    pool.close(a)
    pool.cache.mmu.evict(16)
    for layer in pool.cache.layers:
        layer.k.zero_()
        layer.v.zero_()
    b = pool.open(8, write=False)
    for _ in range(2):
        step = pool.launch([b], [4])  # writes the padded slots as well
        registered = step.batch._buffers
        found = registered.block_table.tolist()
        length = -(-int(step.batch.seq_lens[0]) // 4)
        assert found[0][:length] == b.block_table()[:length].tolist()
        assert found[0][2:] == [16] * 6
        assert all(row == [16] * 8 for row in found[1:])
        assert registered.seq_lens.tolist()[1:] == [0] * 7
        assert (registered.query_start_loc[1:] == 4).all()
        assert (registered.slot_mapping[4:] // 4 == 16).all()
        step.written()
        pool.cache.end_step(step)
    pool.check()
    mine = set(b.block_table().tolist())
    for block in set(range(16)) - mine:
        assert not pool.cache.layer(0).k[block].any(), f"padding wrote into block {block}"


def test_nan_in_the_null_block_spreads_nowhere() -> None:
    """Kind 44. SmallCache writes NaN to every padding slot in every step."""
    pool = SmallCache(8, 4, null_block="first")
    handle = pool.open(5)
    assert torch.isnan(pool.cache.layer(0).k[0]).any()
    cache = pool.cache
    with cache.step() as step:
        batch = step.prepare([handle], query_lens=[1], new_tokens=[1])
        cache.write(0, torch.ones(1, 2, 4), torch.ones(1, 2, 4), batch)
        views = cache.views(handle, 0)
        assert sum(len(k) for k, _ in views) == 6
        assert 0 not in handle.block_table()
        k = torch.cat([view for view, _ in views])
        assert (k[5] == 1).all()
    with pytest.raises(Exception, match="slot"):
        cache.layers.write(0, torch.ones(1, 2, 4), torch.ones(1, 2, 4), torch.tensor([-1]))


@pytest.mark.parametrize("rotated", [True, False])
def test_a_buffer_is_not_refilled_before_its_copy_ran(rotated: bool) -> None:
    """Kind 45. The device copies the tables late, from the registered memory. The control keeps
    more steps in flight than it said, ending them too early for the cache to notice."""
    pool = SmallCache(16, 4, late=True, steps_in_flight=2)
    handles = [pool.open(3 + k, write=False) for k in range(3)]
    copied: list[tuple[list[int], list[int]]] = []
    events: list[Any] = []

    def copy(tables: Any, expected: list[int]) -> Callable[[], None]:
        return lambda: copied.append((tables.tolist(), expected))

    for turn in range(8):
        if rotated and len(events) == 2:
            events.pop(0).synchronize()
        step = pool.cache.begin_step()
        handle = handles[turn % 3]
        batch = step.prepare([handle], query_lens=[2])
        pool.device.put(copy(batch.slot_mapping, batch.slot_mapping.tolist()))
        events.append(pool.device.event())
        step.written()
        pool.cache.end_step(step, events[-1] if rotated else None)
    pool.device.run()
    right = [found == expected for found, expected in copied]
    assert len(right) == 8
    assert all(right) == rotated


# -- ranks -----------------------------------------------------------------------------------


def test_one_plan_is_applied_alike_by_the_movers_of_all_ranks() -> None:
    """Kind 47. One MMU decides; a rank that has another pool, or gets a plan twice, refuses."""
    pool = SmallCache(20, 4, **EAGER)
    ranks = [
        Layers.allocate(
            layout, num_layers=2, num_blocks=21, block_size=4, num_kv_heads=2, head_dim=4,
            dtype=torch.float32,
        )
        for layout in LAYOUTS
    ]  # fmt: skip
    movers = [Mover(layers.storage) for layers in ranks]
    handles = [pool.open(6) for _ in range(8)]
    pool.close(*handles[::2])
    for layers in ranks:
        for index in range(2):
            for mine, source in zip(layers.logical(index), pool.halves(index), strict=True):
                assert mine is not None
                mine.copy_(source)
    for _ in range(3):
        plan = pool.cache.mmu.plan_compaction()
        if plan is None:
            break
        moves = pool.cache.mmu.begin(plan)
        data = moves.to_bytes()
        pool.mover.move(moves.pairs)
        for mover in movers:
            assert mover.apply(data) == len(moves)
            with pytest.raises(InvalidPlan):
                mover.apply(data)
            with pytest.raises(InvalidConfig):
                mover.apply(Moves.from_bytes(data), num_blocks=19)
        pool.cache.mmu.commit(moves)
        pool.check()
        for handle in pool.handles.values():
            row = torch.from_numpy(handle.block_table().astype(np.int64))
            for layers in ranks:
                for index in range(2):
                    found = layers.gather(index, row, handle.num_written)
                    pool.compare(index, found, pool.texts[handle.id].values[: handle.num_written])
    assert pool.cache.mmu.stats()["moves_committed"] > 0
