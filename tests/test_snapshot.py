"""The memory at one moment: the map of blocks, its JSON, and the file for PyTorch's memory viewer.

The map is held to the verbs that say the same block by block; ``validate()`` holds it to the page
tables after every step of the randomised tests. PyTorch's own functions read the file.
"""

from __future__ import annotations

import json
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvmmu import MMU, BlockMap, InvalidConfig, Region, Snapshot, Storage, snapshot

from .small import SmallPool

STATE = {name: number for number, name in enumerate(BlockMap.STATES)}


def busy(null_block: str | int = "last", orders: tuple[int, ...] = (0, 2)) -> SmallPool:
    """A pool in which most states and flags occur."""
    pool = SmallPool(
        64, 4, page_orders=orders, hold_blocks=2, null_block=null_block, medium_from=0, huge_from=0
    )
    mmu = pool.mmu
    tokens = np.arange(40, dtype=np.int32)
    a = mmu.open(tokens)
    mmu.fork(a)
    step = mmu.begin_step()
    mmu.prepare(step, np.array([a]), pool.tables, query_lens=np.array([40], np.int32))
    mmu.written(step)
    b = mmu.open(np.arange(1000, 1020, dtype=np.int32))
    mmu.pin(mmu.block_table(b)[:1].astype(np.int64))
    mmu.lease(b, 4, 8)
    c = mmu.open(np.arange(2000, 2010, dtype=np.int32))
    mmu.close(c)  # fenced: a step is in flight
    return pool


@pytest.mark.parametrize("null_block", ["last", "first", 17])
def test_the_map_says_of_every_block_what_the_verbs_say(null_block: str | int) -> None:
    mmu = busy(null_block).mmu
    blocks = mmu.block_map()
    span = 64 + (null_block != "last")
    assert len(blocks) == span
    null = blocks.states == STATE["null"]
    assert np.flatnonzero(null).tolist() == ([] if null_block == "last" else [mmu.null_block])
    real = np.flatnonzero(~null)
    assert blocks.references[real].tolist() == mmu.references(real).tolist()
    counts = np.bincount(blocks.states, minlength=7)
    states = mmu.states()
    assert {name: counts[number] for name, number in STATE.items() if name != "null"} == {
        name: states[name] for name in BlockMap.STATES[:6]
    }
    assert counts[STATE["fenced"]] > 0
    assert np.count_nonzero(blocks.flags & BlockMap.HELD) == states["held"]
    evictable = np.count_nonzero(blocks.flags & BlockMap.EVICTABLE)
    assert counts[STATE["empty"]] + evictable == states["available"]
    mapped = {block for sequence in mmu.sequences().tolist() for block in mmu.block_table(sequence)}
    assert set(np.flatnonzero(blocks.sequences >= 0).tolist()) == mapped
    for block in mapped:
        sequence, logical = int(blocks.sequences[block]), int(blocks.logical[block])
        assert mmu.look(sequence, logical) == block
        order = int(blocks.orders[block])
        first = block >> order << order
        assert [mmu.look(sequence, logical + at - block) for at in range(first, first + 2**order)]
    assert set(blocks.orders[list(mapped)].tolist()) == {0, 2}
    mmu.validate()


def test_the_map_tells_pins_from_leases_and_shows_moves_in_flight() -> None:
    pool = busy(orders=(0,))
    mmu = pool.mmu
    flags = mmu.block_map().flags
    assert np.count_nonzero(flags & BlockMap.PINNED) == 1
    assert np.count_nonzero(flags & BlockMap.LEASED) == 1
    assert not np.any((flags & BlockMap.PINNED) & (flags & BlockMap.LEASED))
    mmu = MMU(32, 4, page_orders=(0,), hold_blocks=0)
    opened = [mmu.open(np.arange(16, dtype=np.int32) + 100 * at) for at in range(8)]
    for sequence in opened[::2]:
        mmu.close(sequence)
    plan = mmu.plan_free_run(8)
    assert len(plan)
    moves = mmu.begin(plan)
    blocks = mmu.block_map()
    assert np.flatnonzero(blocks.flags & BlockMap.MOVING).tolist() == sorted(moves.pairs[:, 0])
    assert np.flatnonzero(blocks.states == STATE["destined"]).tolist() == sorted(moves.pairs[:, 1])
    mmu.abort(moves)
    assert not np.any(mmu.block_map().flags & BlockMap.MOVING)


def test_blocks_that_were_given_back_are_offline_on_the_map() -> None:
    mmu = MMU(64, 4, page_orders=(0,))
    gone = mmu.shrink(8)
    assert np.flatnonzero(mmu.block_map().states == STATE["offline"]).tolist() == sorted(gone)


def alike(one: Snapshot, other: Snapshot) -> bool:
    names = ("states", "references", "sequences", "logical", "orders", "flags")
    return one.about == other.about and all(
        getattr(one, name).dtype == getattr(other, name).dtype
        and np.array_equal(getattr(one, name), getattr(other, name))
        for name in names
    )


@pytest.mark.parametrize("null_block", ["last", 17])
def test_json_comes_back_without_loss(null_block: str | int) -> None:
    pool = busy(null_block)
    taken = snapshot(pool.mmu)
    text = taken.json()
    assert alike(Snapshot.from_json(text), taken)
    read = json.loads(text)
    assert sum(read["blocks"].values()) == len(taken)
    assert len(read["runs"]["starts"]) < len(taken)
    assert read["tokens"] == {
        str(sequence): pool.mmu.info(sequence).num_tokens
        for sequence in pool.mmu.sequences().tolist()
        if sequence in taken.sequences
    }
    assert read["measure"]["free_windows"] == pool.mmu.measure().free_windows


@given(st.lists(st.tuples(st.integers(1, 60), st.booleans()), max_size=12))
def test_any_pool_comes_back_from_json(opened: list[tuple[int, bool]]) -> None:
    mmu = MMU(96, 4, page_orders=(0, 2), medium_from=0)
    kept = []
    for at, (tokens, keep) in enumerate(opened):
        if -(-tokens // 4) > mmu.states()["available"]:
            break
        sequence = mmu.open(np.arange(tokens, dtype=np.int32) + 100 * at)
        if keep:
            kept.append(sequence)
        else:
            mmu.close(sequence)
    taken = snapshot(mmu)
    assert alike(Snapshot.from_json(taken.json()), taken)
    starts = taken.run_starts()
    assert len(starts) <= 96
    assert starts.tolist() == sorted(set(starts.tolist()))


def broken(change: Any) -> str:
    read = json.loads(snapshot(MMU(8, 4)).json())
    change(read)
    return json.dumps(read)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "kvmmu_snapshot"),
        ('{"a": 1}', "kvmmu_snapshot"),
        (broken(lambda read: read.update(kvmmu_snapshot=99)), "format"),
        (broken(lambda read: read.pop("runs")), "runs"),
        (broken(lambda read: read["runs"].update(states=[])), "runs"),
        (broken(lambda read: read["runs"].update(states=["x"])), "runs"),
        (broken(lambda read: read["runs"].update(states=[9])), "state 9"),
        (broken(lambda read: read["runs"].update(starts=[3])), "cover"),
        (broken(lambda read: read.update(span=-1)), "runs"),
        (broken(lambda read: read["runs"].update(orders=[300])), "runs"),
    ],
)
def test_a_text_that_is_no_snapshot_is_refused_by_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(InvalidConfig, match=says):
        Snapshot.from_json(text)


def test_a_storage_of_another_pool_is_refused() -> None:
    mmu = MMU(64, 4)
    memory = np.zeros((33, 4), np.uint64)
    with pytest.raises(InvalidConfig, match="32 blocks"):
        snapshot(mmu, Storage.from_numpy([memory]))


def test_without_a_storage_there_is_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="storage"):
        snapshot(MMU(64, 4)).save(tmp_path / "s.pickle")
    assert not (tmp_path / "s.pickle").exists()


# -- the file for PyTorch's viewer -----------------------------------------------------------


def packed(num_blocks: int) -> Storage:
    """K and V of a block side by side, and a piece of another size by itself."""
    kv = np.zeros((num_blocks, 2, 24), np.uint8)  # 48 bytes a block
    base = kv.__array_interface__["data"][0]
    other = np.zeros((num_blocks, 8), np.uint8)
    at = other.__array_interface__["data"][0]
    regions = [
        Region(base, 48, 16, num_blocks, kv),
        Region(base + 24, 48, 16, num_blocks, kv),
        Region(at, 8, 8, num_blocks, other),
    ]
    return Storage(regions, num_blocks - 1)


def far(num_blocks: int) -> Storage:
    """Two regions that interleave, of which a block's pieces are more than a stride apart."""
    memory = np.zeros(64 * (num_blocks + 2), np.uint8)
    base = memory.__array_interface__["data"][0]
    regions = [
        Region(base, 64, 16, num_blocks, memory),
        Region(base + 64 + 32, 64, 16, num_blocks, memory),
    ]
    return Storage(regions, num_blocks - 1)


def check(taken: dict[str, Any], mmu: MMU, storage: Storage) -> None:
    """Blocks tile their segments, and their bytes are those of the pool."""
    pieces = sum(region.block_bytes for region in storage.regions)
    live = np.isin(mmu.block_map().states, [STATE[s] for s in ("in_use", "destined", "cached")])
    requested = 0
    for segment in taken["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            assert 0 < block["requested_size"] <= block["size"]
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]
        requested += segment["requested_size"]
        assert segment["device"] < len(taken["device_traces"])
    assert requested == pieces * np.count_nonzero(live)


@pytest.mark.parametrize("make", [packed, far])
def test_blocks_of_the_file_tile_the_memory_of_each_region(make: Any) -> None:
    mmu = busy().mmu
    storage = make(65)
    taken = snapshot(mmu, storage).torch_snapshot()
    assert len(taken["segments"]) == (2 if make is packed else 1)
    check(taken, mmu, storage)


def test_a_null_block_in_the_midst_lies_in_the_file_as_inactive() -> None:
    mmu = busy(null_block=17).mmu
    memory = np.zeros((65, 4), np.uint64)
    address = memory.__array_interface__["data"][0]
    storage = Storage([Region(address, 32, 32, 65, memory)], 64, null_block=17)
    (segment,) = snapshot(mmu, storage).torch_snapshot()["segments"]
    at = {block["address"]: block for block in segment["blocks"]}
    null = at[address + 17 * 32]
    assert (null["size"], null["state"]) == (32, "inactive")
    check({"segments": [segment], "device_traces": [[]]}, mmu, storage)


def test_a_file_may_show_some_regions_only(tmp_path: Path) -> None:
    mmu, storage = busy().mmu, packed(65)
    taken = snapshot(mmu, storage)
    (segment,) = taken.torch_snapshot(regions=[2])["segments"]
    pending = [b["size"] for b in segment["blocks"] if b["state"] == "active_pending_free"]
    assert sum(pending) == 8 * mmu.states()["fenced"] > 0
    assert segment["total_size"] == 65 * 8
    with pytest.raises(InvalidConfig, match="region 3"):
        taken.save(tmp_path / "s.pickle", regions=[3])


VIEWER_KNOWS = {
    *("APPEND", "APPENDS", "BINGET", "BINFLOAT", "BININT", "BININT1", "BININT2", "BINPUT"),
    *("BINUNICODE", "DICT", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "FRAME", "LIST", "LONG1"),
    *("LONG_BINGET", "LONG_BINPUT", "MARK", "MEMOIZE", "NEWFALSE", "NEWTRUE", "NONE", "PROTO"),
    *("SETITEM", "SETITEMS", "SHORT_BINUNICODE", "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}
"""What the viewer's unpickler, which is JavaScript, can read (torch/utils/viz/MemoryViz.js)."""


def test_the_pickle_holds_plain_values_only(tmp_path: Path) -> None:
    mmu, storage = busy().mmu, packed(65)
    taken = snapshot(mmu, storage)
    taken.save(tmp_path / "s.pickle")
    data = (tmp_path / "s.pickle").read_bytes()
    assert pickle.loads(data) == taken.torch_snapshot()
    names = {opcode.name for opcode, _, _ in pickletools.genops(data)}
    assert names <= VIEWER_KNOWS


def test_torch_reads_the_file_as_one_of_its_own(tmp_path: Path) -> None:
    viz = pytest.importorskip("torch.cuda._memory_viz")
    pool = busy()
    memory = np.zeros((65, 2**20), np.uint8)  # the summary leaves small segments out
    storage = Storage.from_numpy([memory])
    taken = snapshot(pool.mmu, storage)
    taken.save(tmp_path / "s.pickle")
    data = pickle.loads((tmp_path / "s.pickle").read_bytes())
    states = pool.mmu.states()
    live = states["in_use"] + states["cached"] + states["destined"]
    summary = viz.segsum(data)
    assert "total_reserved: 65.0MiB" in summary
    assert f"total_allocated: {live}.0MiB" in summary
    assert "[" in summary.splitlines()[1]
    lines = viz.memory(data, format_flamegraph=lambda text: text).splitlines()
    by_state: dict[str, int] = {}
    for line in lines:
        name, _, size = line.rpartition(" ")
        parts = name.split(";")
        assert parts[0] == "stream_0"
        if parts[2] != "<non-python>":
            state = parts[2].removeprefix("state:0:")
            by_state[state] = by_state.get(state, 0) + int(size) // 2**20
            assert (len(parts) == 4) == (state == "in_use")
    assert by_state == {
        name: count for name, count in states.items() if name in STATE and count and name != "null"
    }
    assert len(viz.segments(data, format_flamegraph=lambda text: text).splitlines()) == len(lines)
    assert viz.trace(data) == ""  # nobody recorded any
    for page in (viz.segment_plot(data), viz.trace_plot(data)):
        assert "snapshot.pickle" in page


def test_a_cache_takes_its_own_snapshot(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from kvmmu import KVCache

    cache = KVCache(2, 1, 8, torch.float32, 32, block_size=4)
    sequence = cache.open(list(range(10)))
    taken = cache.snapshot()
    assert np.count_nonzero(taken.sequences == sequence.id) == 3
    taken.save(tmp_path / "s.pickle")
    check(pickle.loads((tmp_path / "s.pickle").read_bytes()), cache.mmu, cache.storage)
    sequence.close()
