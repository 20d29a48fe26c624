"""The CPU mover copies whole blocks and nothing else, and refuses a bad set before it starts."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvmmu import (
    CPUMover,
    InvalidBlock,
    InvalidConfig,
    InvalidPlan,
    KVCacheError,
    Region,
    Storage,
    _core,
    run_plan,
)

NUM_BLOCKS = 11


def filled(*shape: int, seed: int = 1) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def layouts() -> dict[str, list[np.ndarray[Any, Any]]]:
    """Arrays of NUM_BLOCKS + 1 blocks; where they are views, the bytes between them are guarded
    through ``.base``."""
    n = NUM_BLOCKS + 1
    packed = filled(n, 2, 600)
    major = filled(n, 6, 2, 1100)
    gaps = filled(n, 1000)
    odd = filled(5 + n * 1501)[5:].reshape(n, 1501)
    return {
        "layer by layer": [filled(n, 512, seed=layer) for layer in range(4)],
        "packed K and V": [packed[:, 0], packed[:, 1]],
        "block-major": [major[:, layer, half] for layer in range(5) for half in range(2)],
        "K only, a gap behind each block": [gaps[:, 3:900]],
        "34 KiB and 18 KiB, quantised": [filled(n, 34 << 10), filled(n, 18 << 10)],
        "fp8 with an odd stride at an odd address": [odd[:, :1499]],
        "one byte a block": [filled(n)],
        "float32 of one token": [np.arange(n * 3, dtype=np.float32).reshape(n, 3)],
    }


@pytest.mark.parametrize("dtype", [np.uint32, np.int32])
@pytest.mark.parametrize("name", layouts())
def test_every_layout_moves_exactly_the_blocks_it_was_told(name: str, dtype: Any) -> None:
    arrays = layouts()[name]
    bases = [array if array.base is None else array.base for array in arrays]
    pairs: Any = np.array([[10, 0], [10, 1], [3, 4], [9, 2]], dtype)
    # Views of one buffer share one expectation of the whole buffer, gaps included.
    expected = {id(base): base.copy() for base in bases}
    for array, base in zip(arrays, bases, strict=True):
        start = array.ctypes.data - base.ctypes.data
        piece = array.itemsize * int(np.prod(array.shape[1:]))
        raw = expected[id(base)].reshape(-1).view(np.uint8)
        for source, destination in pairs.tolist():
            here, there = (start + block * array.strides[0] for block in (source, destination))
            raw[there : there + piece] = raw[here : here + piece]
    mover = CPUMover(Storage.from_numpy(arrays))
    mover.move(pairs)
    for base in bases:
        np.testing.assert_array_equal(base, expected[id(base)])
    assert mover.copied_bytes == 4 * mover.storage.block_bytes


@given(
    st.permutations(range(NUM_BLOCKS)),
    st.integers(0, NUM_BLOCKS // 2),
    st.sampled_from(sorted(layouts())),
)
def test_any_legal_set_of_moves_copies_like_numpy(
    order: list[int], count: int, layout: str
) -> None:
    arrays = layouts()[layout]
    pairs = np.array(order[: 2 * count], np.uint32).reshape(-1, 2)
    expected = [array.copy() for array in arrays]
    for array in expected:
        array[pairs[:, 1]] = array[pairs[:, 0]]
    CPUMover(Storage.from_numpy(arrays)).move(pairs)
    for array, copy in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(array, copy)


@pytest.fixture
def mover() -> CPUMover:
    return CPUMover(Storage.from_numpy([filled(NUM_BLOCKS + 1, 64), filled(NUM_BLOCKS + 1, 3000)]))


def contents(mover: CPUMover) -> list[bytes]:
    return [np.asarray(region.owner).tobytes() for region in mover.storage.regions]


@pytest.mark.parametrize(
    ("pairs", "error", "numbers"),
    [
        ([[0, 1], [2, 11]], InvalidBlock, {"block": 11, "index": 1, "num_blocks": 11}),
        ([[11, 1]], InvalidBlock, {"block": 11, "index": 0, "num_blocks": 11}),
        ([[0, 1], [2**31 - 1, 3]], InvalidBlock, {"block": 2**31 - 1, "index": 1}),
        ([[0, 1], [4, -1]], InvalidBlock, {"block": -1, "index": 1}),
        ([[0, 1], [2, 1]], InvalidPlan, {"block": 1}),
        ([[0, 1], [1, 2]], InvalidPlan, {"block": 1, "index": 1}),
        ([[0, 1], [3, 3]], InvalidPlan, {"block": 3, "index": 1}),
    ],
)
def test_a_bad_set_is_refused_before_the_first_byte_moves(
    mover: CPUMover, pairs: list[list[int]], error: type[KVCacheError], numbers: dict[str, int]
) -> None:
    before = contents(mover)
    dtypes: list[Any] = (
        [np.int32] if min(min(pair) for pair in pairs) < 0 else [np.int32, np.uint32]
    )
    for dtype in dtypes:
        with pytest.raises(error) as caught:
            mover.move(np.array(pairs, dtype))
        assert caught.value.numbers.items() >= numbers.items()
        again = pickle.loads(pickle.dumps(caught.value))
        assert (type(again), str(again), again.numbers) == (
            error,
            str(caught.value),
            caught.value.numbers,
        )
    assert contents(mover) == before
    assert mover.copied_bytes == 0


@pytest.mark.parametrize(
    ("pairs", "given_"),
    [
        ([[0, 1]], "list"),
        (None, "NoneType"),
        (np.zeros((1, 2), np.int64), r"int64 of shape \(1, 2\)"),
        (np.zeros((1, 2), np.float32), "float32"),
        (np.zeros((1, 2), bool), "bool"),
        (np.zeros((2, 3), np.uint32), r"shape \(2, 3\)"),
        (np.zeros(2, np.uint32), r"shape \(2,\)"),
    ],
)
def test_pairs_of_another_kind_are_refused_by_what_was_given(
    mover: CPUMover, pairs: Any, given_: str
) -> None:
    with pytest.raises(InvalidConfig, match=given_):
        mover.move(pairs)


def test_no_pairs_copy_nothing(mover: CPUMover) -> None:
    before = contents(mover)
    mover.move(np.empty((0, 2), np.uint32))
    mover.move(np.empty((0, 2), np.int32))
    assert contents(mover) == before
    assert mover.copied_bytes == 0


def test_pairs_may_be_a_strided_view(mover: CPUMover) -> None:
    wide = np.array([[0, 9, 1, 9], [2, 9, 3, 9]], np.uint32)
    first = np.asarray(mover.storage.regions[0].owner)
    expected = first[[0, 2]].copy()
    mover.move(wide[:, ::2])
    np.testing.assert_array_equal(first[[1, 3]], expected)


def test_the_raw_function_names_arguments_of_the_wrong_kind() -> None:
    regions = Storage.from_numpy([filled(4, 8)]).region_table
    pairs = np.zeros((0, 2), np.uint32)
    wrong: list[Any] = [
        None,
        [],
        regions.astype(np.int64),
        regions[:, :2],
        np.tile(regions, (3, 1)).T,
    ]
    for bad in wrong:
        with pytest.raises(InvalidConfig, match="regions must be a C-contiguous uint64") as caught:
            _core.copy_blocks(bad, pairs, 3)
        assert caught.value.argument == "regions"
    signed: Any = np.zeros((1, 2), np.int32)
    with pytest.raises(InvalidConfig, match=r"pairs must be .* not int32 of shape \[1, 2\]"):
        _core.copy_blocks(regions, signed, 3)
    for row in ([0, 8, 8], [4096, 4, 8], [4096, 8, 0], [4096, 2**63, 8], [2**64 - 1, 8, 8]):
        with pytest.raises(InvalidConfig) as caught:
            _core.copy_blocks(np.array([row], np.uint64), np.array([[0, 2]], np.uint32), 3)
        assert caught.value.region == 0


def test_an_array_beyond_four_gib_is_moved_exactly() -> None:
    """Stride 1,002,240: block 2143 is the first past 2 GiB, 4286 the first past 4 GiB. Zeroed
    memory is mapped lazily, so only the touched pages exist."""
    array = np.zeros((4400, 1_002_240), np.uint8)
    piece = array[:, :1_000_001]
    for block in (2143, 4285):
        piece[block] = filled(1_000_001, seed=block)
    mover = CPUMover(Storage.from_numpy([piece]))
    mover.move(np.array([[2143, 4286], [4285, 5]], np.uint32))
    np.testing.assert_array_equal(piece[4286], filled(1_000_001, seed=2143))
    np.testing.assert_array_equal(piece[5], filled(1_000_001, seed=4285))
    for block in (4, 5, 6, 4285, 4286, 4287):
        assert not array[block, 1_000_001:].any()
    for block in (4, 6, 4284, 4287):
        assert not array[block].any()


def test_threads_may_move_different_blocks_at_once() -> None:
    arrays = [filled(65, 40_000) for _ in range(3)]
    expected = [array.copy() for array in arrays]
    storage = Storage.from_numpy(arrays)
    sets = [np.array([[16 * t + k, 16 * t + 8 + k] for k in range(8)], np.uint32) for t in range(4)]

    def work(pairs: np.ndarray[Any, Any]) -> None:
        mover = CPUMover(storage)
        for _ in range(20):
            mover.move(pairs)

    threads = [threading.Thread(target=work, args=(pairs,)) for pairs in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for array, copy in zip(arrays, expected, strict=True):
        for pairs in sets:
            copy[pairs[:, 1]] = copy[pairs[:, 0]]
        np.testing.assert_array_equal(array, copy)


def test_cpu_features_are_named() -> None:
    features = _core.cpu_features()
    assert set(features) == {"avx2", "non_temporal"}
    assert all(isinstance(value, bool) for value in features.values())


class Recorder:
    """Stands for an MMU that hands out one set of moves, and for a mover that may fail."""

    def __init__(self, fails: BaseException | None = None) -> None:
        self.fails = fails
        self.log: list[str] = []
        self.pairs = np.array([[0, 1]], np.uint32)

    def begin(self, plan: object) -> Recorder:
        self.log.append("begin")
        return self

    def move(self, pairs: object) -> None:
        self.log.append("move")
        if self.fails is not None:
            raise self.fails

    def commit(self, moves: object) -> int:
        self.log.append("commit")
        return 1

    def abort(self, moves: object) -> None:
        self.log.append("abort")


def test_a_plan_runs_begin_move_commit() -> None:
    both: Any = Recorder()
    assert run_plan(both, both, both) == 1
    assert both.log == ["begin", "move", "commit"]


@pytest.mark.parametrize("fails", [RuntimeError("no"), KeyboardInterrupt()])
def test_a_mover_that_fails_leaves_an_aborted_plan(fails: BaseException) -> None:
    both: Any = Recorder(fails)
    with pytest.raises(type(fails)):
        run_plan(both, both, both)
    assert both.log == ["begin", "move", "abort"]


def test_regions_that_a_storage_refuses_never_reach_the_copy() -> None:
    with pytest.raises(InvalidConfig):
        Storage([Region(4096, 8, 8, 5), Region(4100, 8, 8, 5)], 4)
