"""Runs, byte ranges and paired runs say exactly what a plain loop says, in the fewest pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvmmu import (
    MMU,
    CPUMover,
    InvalidBlock,
    InvalidConfig,
    InvalidPlan,
    Mover,
    Moves,
    Region,
    Storage,
    block_runs,
    byte_ranges,
    pair_ranges,
    pair_runs,
)

DTYPES: list[Any] = [np.int32, np.int64, np.uint32, np.uint8, np.uint64]
NUM_BLOCKS = 200

# Mostly ascending by one, so that runs happen; repeats and descents too.
blocks_of = st.lists(
    st.tuples(st.integers(0, 190), st.integers(0, 6), st.sampled_from([1, 1, 1, -1, 0])),
    max_size=12,
).map(lambda parts: [max(0, a + k * step) for a, n, step in parts for k in range(n)])


def runs_by_loop(*columns: list[int]) -> list[tuple[int, ...]]:
    """The first of each column and the length of every run that is consecutive in all of them."""
    runs: list[list[int]] = []
    for row in zip(*columns, strict=True):
        if runs and all(runs[-1][c] + runs[-1][-1] == row[c] for c in range(len(row))):
            runs[-1][-1] += 1
        else:
            runs.append([*row, 1])
    return [tuple(run) for run in runs]


@given(blocks_of, st.sampled_from(DTYPES))
def test_block_runs_are_those_of_a_plain_loop(blocks: list[int], dtype: Any) -> None:
    runs = block_runs(np.array(blocks, dtype))
    assert runs == runs_by_loop(blocks)
    assert [start + k for start, count in runs for k in range(count)] == blocks
    assert all(type(number) is int for run in runs for number in run)


@given(blocks_of, blocks_of, st.sampled_from(DTYPES), st.sampled_from(DTYPES))
def test_pair_runs_are_those_of_a_plain_loop(
    local: list[int], remote: list[int], one: Any, other: Any
) -> None:
    count = min(len(local), len(remote))
    local, remote = local[:count], remote[:count]
    runs = pair_runs(np.array(local, one), np.array(remote, other))
    assert runs == runs_by_loop(local, remote)
    pairs = [(a + k, b + k) for a, b, n in runs for k in range(n)]
    assert pairs == list(zip(local, remote, strict=True))


def test_a_pair_run_needs_one_order_at_both_ends() -> None:
    up, down = np.arange(5), np.arange(5)[::-1]
    assert pair_runs(up, up + 100) == [(0, 100, 5)]
    assert len(pair_runs(up, down)) == 5
    assert len(pair_runs(down, down)) == 5  # consecutive, but downwards: five pieces of memory
    assert pair_runs(np.array([4, 5, 6, 7]), np.array([1, 2, 8, 9])) == [(4, 1, 2), (6, 8, 2)]


def test_unequal_lengths_are_refused_with_both() -> None:
    with pytest.raises(InvalidConfig, match=r"3 local blocks .* 2 remote") as caught:
        pair_runs(np.arange(3), np.arange(2))
    assert caught.value.numbers == {"local": 3, "remote": 2}


@pytest.mark.parametrize(
    "blocks", [[1, 2], np.zeros((2, 2), np.int32), np.zeros(3), np.zeros(3, bool), None]
)
def test_what_is_no_integer_array_is_refused(blocks: Any) -> None:
    for call in (
        lambda: block_runs(blocks),
        lambda: pair_runs(blocks, np.arange(2)),
        lambda: pair_runs(np.arange(2), blocks),
    ):
        with pytest.raises(InvalidConfig, match="integer array of shape"):
            call()


def test_padding_is_not_taken_for_a_block() -> None:
    with pytest.raises(InvalidBlock, match=r"blocks\[2\] is -1") as caught:
        block_runs(np.array([4, 5, -1]))
    assert (caught.value.block, caught.value.index) == (-1, 2)
    with pytest.raises(InvalidBlock, match=r"remote\[1\] is -7"):
        pair_runs(np.array([4, 5]), np.array([3, -7]))


def test_no_blocks_have_no_runs() -> None:
    none = np.zeros(0, np.int32)
    assert block_runs(none) == []
    assert pair_runs(none, none) == []
    (ranges,) = byte_ranges(Storage.from_numpy([np.zeros((5, 3))]), [])
    assert ranges.shape == (0, 2)


# -- byte ranges -----------------------------------------------------------------------------


def storage() -> Storage:
    """Back to back; with a gap; packed K and V; all in one storage."""
    n = NUM_BLOCKS + 1
    packed = np.zeros((n, 2, 24), np.uint8)
    return Storage.from_numpy(
        [
            np.zeros((n, 5), np.float32),
            np.zeros((n, 40), np.uint8)[:, 3:30],
            packed[:, 0],
            packed[:, 1],
        ]
    )


def ranges_by_loop(region: Region, blocks: list[int]) -> list[list[int]]:
    ranges: list[list[int]] = []
    for block in blocks:
        address = region.address + block * region.stride
        if region.stride == region.block_bytes and ranges and sum(ranges[-1]) == address:
            ranges[-1][1] += region.block_bytes
        else:
            ranges.append([address, region.block_bytes])
    return ranges


@given(blocks_of, st.booleans())
def test_byte_ranges_are_those_of_a_plain_loop(blocks: list[int], merged: bool) -> None:
    where = storage()
    ids = np.array(blocks, np.int64)
    runs = block_runs(ids) if merged else [(block, 1) for block in blocks]
    ranges = byte_ranges(where, [(7, 0), *runs, (0, 0)])  # empty runs have no bytes
    assert len(ranges) == len(where.regions)
    for region, found in zip(where.regions, ranges, strict=True):
        assert found.dtype == np.int64
        assert found.tolist() == ranges_by_loop(region, blocks)


def test_bytes_read_by_ranges_are_the_bytes_of_the_blocks() -> None:
    rng = np.random.default_rng(3)
    arrays = [
        rng.integers(0, 256, (33, 12), np.uint8),
        rng.integers(0, 256, (33, 9), np.uint8)[:, 2:7],
    ]
    blocks = np.array([4, 5, 6, 20, 2, 3, 31])
    ranges = byte_ranges(Storage.from_numpy(arrays), block_runs(blocks))
    assert [len(found) for found in ranges] == [4, 7]
    for array, found in zip(arrays, ranges, strict=True):
        base = array if array.base is None else array.base
        assert isinstance(base, np.ndarray)
        raw, origin = base.reshape(-1), base.ctypes.data
        pieces = [raw[address - origin : address - origin + size] for address, size in found]
        np.testing.assert_array_equal(np.concatenate(pieces), array[blocks].reshape(-1))


def test_ranges_of_more_than_4_gib_are_exact() -> None:
    """Addresses only: no such memory is touched."""
    region = Region(address=1 << 40, stride=3 << 20, block_bytes=3 << 20, num_blocks=10_001)
    (ranges,) = byte_ranges(Storage([region], 10_000), [(2143, 6000)])
    assert ranges.tolist() == [[(1 << 40) + 2143 * (3 << 20), 6000 * (3 << 20)]]


@pytest.mark.parametrize(
    ("runs", "block"),
    [
        ([(0, 3), (199, 2)], 200),
        ([(200, 1)], 200),  # the null block
        ([(-1, 2)], -1),
        ([(2**62, 2**62)], 2**62),
        ([(0, 201)], 200),
    ],
)
def test_a_run_that_leaves_the_pool_is_refused(runs: list[tuple[int, int]], block: int) -> None:
    with pytest.raises(InvalidBlock, match="the storage has 200") as caught:
        byte_ranges(storage(), runs)
    assert caught.value.block == block


@pytest.mark.parametrize(
    "runs", [[(1, -1)], [(1.0, 2)], [1, 2], [(1, 2, 3)], [(1, "2")], [(1,), (2, 3)]]
)
def test_runs_of_another_form_are_refused(runs: Any) -> None:
    with pytest.raises(InvalidConfig):
        byte_ranges(storage(), runs)


# -- the bytes of a pair -----------------------------------------------------------------------


def a_peer_of(where: Storage, gap: int) -> Storage:
    """Its regions elsewhere, the first with ``gap`` bytes between blocks."""
    return Storage(
        [
            Region(
                address=(1 << 40) + index * (1 << 32),
                stride=region.block_bytes + gap * (index == 0),
                block_bytes=region.block_bytes,
                num_blocks=region.num_blocks,
            )
            for index, region in enumerate(where.regions)
        ],
        where.num_blocks,
    )


@given(blocks_of, blocks_of, st.sampled_from([0, 3]))
def test_pair_ranges_are_those_of_a_plain_loop(
    local: list[int], remote: list[int], gap: int
) -> None:
    count = min(len(local), len(remote))
    here = storage()
    there = a_peer_of(here, gap)
    runs = pair_runs(np.array(local[:count], np.int64), np.array(remote[:count], np.int64))
    ranges = pair_ranges(here, there, [(7, 9, 0), *runs])  # an empty run has no bytes
    for one, other, found in zip(here.regions, there.regions, ranges, strict=True):
        assert found.dtype == np.int64
        expected = []
        dense = one.stride == one.block_bytes == other.stride
        single = [(a + k, b + k, 1) for a, b, n in runs for k in range(n)]
        for a, b, size in runs if dense else single:
            addresses = [one.address + a * one.stride, other.address + b * other.stride]
            expected.append([*addresses, size * one.block_bytes])
        assert found.tolist() == expected


def test_neighbours_at_one_end_alone_stay_two_descriptors() -> None:
    here = Storage.from_numpy([np.zeros((11, 8), np.uint8)])
    (ranges,) = pair_ranges(here, a_peer_of(here, 0), [(4, 1, 2), (6, 8, 2)])
    base = here.regions[0].address
    assert ranges.tolist() == [
        [base + 32, (1 << 40) + 8, 16],
        [base + 48, (1 << 40) + 64, 16],
    ]


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([(0, 0, 201)], "the local storage has 200"),
        ([(0, 199, 2)], "the remote storage has 200"),
        ([(-1, 0, 1)], "run 0 is 1 blocks from -1 on, but the local"),
    ],
)
def test_a_pair_that_leaves_either_pool_is_refused(runs: Any, said: str) -> None:
    with pytest.raises(InvalidBlock, match=said):
        pair_ranges(storage(), a_peer_of(storage(), 0), runs)


@pytest.mark.parametrize("runs", [[(1, 2, -1)], [(1, 2)], [(1.0, 2, 3)], [1, 2, 3], [(1, 2, 3, 4)]])
def test_pairs_of_another_form_are_refused(runs: Any) -> None:
    with pytest.raises(InvalidConfig):
        pair_ranges(storage(), a_peer_of(storage(), 0), runs)


def test_memories_of_another_shape_are_no_pair() -> None:
    one = Storage.from_numpy([np.zeros((5, 8), np.uint8)])
    two = Storage.from_numpy([np.zeros((5, 8), np.uint8), np.zeros((5, 8), np.uint8)])
    wider = Storage.from_numpy([np.zeros((5, 16), np.uint8)])
    with pytest.raises(InvalidConfig, match=r"1 local regions .* 2 remote") as caught:
        pair_ranges(one, two, [])
    assert caught.value.numbers == {"local": 1, "remote": 2}
    with pytest.raises(InvalidConfig, match="region 0: blocks of 8 bytes here, of 16") as caught:
        pair_ranges(one, wider, [])
    assert caught.value.numbers == {"region": 0, "local": 8, "remote": 16}


# -- Mover -----------------------------------------------------------------------------------


def begun(num_blocks: int = NUM_BLOCKS) -> tuple[MMU, Moves]:
    """An MMU with every second block in use, and moves that have begun."""
    mmu = MMU(num_blocks, 4, prefix_caching=False)
    sequences = [mmu.open(np.full(4, k, np.int32)) for k in range(num_blocks // 2)]
    for sequence in sequences[::2]:
        mmu.close(sequence)
    return mmu, mmu.begin(mmu.plan_free_run(num_blocks * 3 // 4))


def test_a_mover_applies_moves_and_their_bytes_like_the_executor() -> None:
    _, moves = begun()
    assert len(moves) > 10
    before = np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS + 1, 48), np.uint8)
    expected = before.copy()
    CPUMover(Storage.from_numpy([expected])).move(moves.pairs)
    for given_ in (moves, moves.to_bytes()):
        memory = before.copy()
        mover = Mover(Storage.from_numpy([memory]))
        assert (mover.applied, mover.last_epoch, mover.copied_bytes) == (0, None, 0)
        assert mover.apply(given_, num_blocks=NUM_BLOCKS) == len(moves)
        np.testing.assert_array_equal(memory, expected)
        assert (mover.applied, mover.last_epoch) == (1, moves.epoch)
        assert mover.copied_bytes == len(moves) * 48


def test_moves_are_applied_once() -> None:
    mmu, moves = begun()
    memory = np.random.default_rng(1).integers(0, 256, (NUM_BLOCKS + 1, 48), np.uint8)
    mover = Mover(Storage.from_numpy([memory]))
    mover.apply(moves)
    mmu.commit(moves)
    memory[moves.pairs[:, 1]] = 7  # in use by now
    expected = memory.copy()
    with pytest.raises(InvalidPlan, match="in use by now") as caught:
        mover.apply(moves.to_bytes())
    assert caught.value.numbers == {"epoch": moves.epoch, "last_epoch": moves.epoch}
    np.testing.assert_array_equal(memory, expected)
    later = mmu.begin(mmu.plan_free_run(NUM_BLOCKS * 3 // 4))
    assert later.epoch > moves.epoch
    mover.apply(later)


@pytest.mark.parametrize("num_blocks", [NUM_BLOCKS - 50, NUM_BLOCKS + 1])
def test_a_pool_of_another_shape_is_refused(num_blocks: int) -> None:
    """Hazard 6. Ids alone show it only when the storage is too small."""
    _, moves = begun()
    memory = np.random.default_rng(1).integers(0, 256, (num_blocks + 1, 48), np.uint8)
    expected = memory.copy()
    mover = Mover(Storage.from_numpy([memory]))
    with pytest.raises(InvalidConfig, match="pool of 200 blocks") as caught:
        mover.apply(moves, num_blocks=NUM_BLOCKS)
    assert caught.value.numbers == {"num_blocks": num_blocks, "expected": NUM_BLOCKS}
    np.testing.assert_array_equal(memory, expected)
    assert mover.last_epoch is None


def test_a_refused_set_can_be_applied_later() -> None:
    """What was refused has not been copied, so its epoch still counts as new."""
    _, moves = begun()
    mover = Mover(Storage.from_numpy([np.zeros((NUM_BLOCKS + 1, 8))]))
    data = moves.to_bytes()
    for bad in (data[:-1], data[:30] + bytes([data[30] ^ 1]) + data[31:], b"", b"nonsense" * 5):
        with pytest.raises(InvalidPlan):
            mover.apply(bad)
    small = Mover(Storage.from_numpy([np.zeros((4, 8))]))
    with pytest.raises(InvalidBlock):
        small.apply(moves)
    with pytest.raises(InvalidConfig, match="not ndarray"):
        mover.apply(moves.pairs)  # type: ignore[arg-type]
    assert mover.apply(data) == len(moves)
