"""The CUDA kernels do what the CPU mover and NumPy do; sanitizers find what a caller may not do.

The kernels run on the CPU here (``cuda_shim.py``): the same text that is compiled for a device, in
the same call shape. What a device alone can show is not shown: times, streams, caches.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvmmu import (  # noqa: E402
    CPUMover,
    InvalidBlock,
    InvalidConfig,
    InvalidPlan,
    KVCacheError,
    Layers,
    LimitExceeded,
    Region,
    Storage,
    cuda,
)
from kvmmu.cuda import launches  # noqa: E402
from kvmmu.layout import LAYOUTS  # noqa: E402

from . import cuda_shim, shim_faults  # noqa: E402
from .test_layout import ADOPTED, DTYPES, SIZES, adopted, filled, made, raw  # noqa: E402
from .test_movers import layouts as arrays_of  # noqa: E402

if cuda_shim.compiler() is None:
    pytest.skip("g++ is not installed", allow_module_level=True)

ROOT = Path(__file__).resolve().parent.parent
Bytes = npt.NDArray[np.uint8]


def random_bytes(*shape: int, seed: int = 1) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def at(array: npt.NDArray[Any]) -> int:
    return int(array.ctypes.data)


def mover(storage: Storage, **shape: int) -> tuple[cuda.MoveBlocks, cuda_shim.ShimKernel]:
    """Small grids by default, so that every loop of the kernel turns more than once."""
    table = cuda.RegionTable.of(storage)
    kernel = cuda_shim.kernel("move_blocks")
    shape = {"threads": 64, "max_thread_blocks": 3, **shape}
    return cuda.MoveBlocks(kernel, table, at(table.rows), **shape), kernel


def indirect(
    storage: Storage, capacity: int = 8, thread_blocks: int = 3
) -> tuple[cuda.MoveBlocksIndirect, npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    table = cuda.RegionTable.of(storage)
    buffer, refused = np.zeros(2 + 2 * capacity, np.uint32), np.zeros(1, np.uint32)
    move = cuda.MoveBlocksIndirect(
        cuda_shim.kernel("move_blocks_indirect", parallel=True),
        table,
        at(table.rows),
        buffer=at(buffer),
        refused=at(refused),
        capacity=capacity,
        thread_blocks=thread_blocks,
        threads=64,
    )
    return move, buffer, refused


def checksums(storage: Storage, blocks: list[int], **shape: int) -> npt.NDArray[np.uint64]:
    table = cuda.RegionTable.of(storage)
    kernel = cuda_shim.kernel("checksum_blocks")
    ids, sums = np.array(blocks, np.uint32), np.zeros(len(blocks), np.uint64)
    shape = {"threads": 32, "max_thread_blocks": 2, **shape}
    cuda.ChecksumBlocks(kernel, table, at(table.rows), **shape)(ids, at(sums))
    return sums


def snapshot(owners: list[Any]) -> list[bytes]:
    """Every byte of the memory of arrays or tensors, also what lies between and behind blocks."""
    found = []
    for owner in owners:
        if isinstance(owner, np.ndarray):
            found.append((owner if owner.base is None else owner.base).tobytes())
        else:
            storage = owner.untyped_storage()
            found.append(ctypes.string_at(storage.data_ptr(), storage.nbytes()))
    return found


# -- move_blocks ---------------------------------------------------------------------------

PAIRS = np.array([[3, 0], [3, 1], [4, 2]], np.uint32)


def every_storage() -> dict[str, Any]:
    """Makers of a storage and what holds its bytes; each makes the same contents every time."""
    makers: dict[str, Any] = {}
    for name in LAYOUTS:
        for size in SIZES:
            if name == "packed" and size[4] is not None:
                continue
            for dtype in DTYPES:
                key = f"{name} {size} {dtype}"
                makers[key] = lambda n=name, s=size, d=dtype: refilled(made(n, s, d))
    for name in ADOPTED:
        makers[name] = lambda n=name: refilled(adopted(n))
    for name in arrays_of():
        makers[name] = lambda n=name: in_arrays(arrays_of()[n])
    return makers


def in_arrays(arrays: list[Any]) -> tuple[Storage, list[Any]]:
    return Storage.from_numpy(arrays), arrays


def refilled(layers: Layers) -> tuple[Storage, list[Any]]:
    for seed, tensor in enumerate(layers.tensors):
        tensor.copy_(filled(*tensor.shape, dtype=tensor.dtype, seed=seed))
    return layers.storage, list(layers.tensors)


STORAGES = every_storage()


@pytest.mark.parametrize("name", STORAGES)
def test_in_every_layout_the_kernel_moves_what_the_cpu_mover_moves(name: str) -> None:
    storage, expected = STORAGES[name]()
    before = snapshot(expected)
    pairs = PAIRS[: 3 if storage.num_blocks > 4 else 2]
    CPUMover(storage).move(pairs)
    assert snapshot(expected) != before
    storage, owners = STORAGES[name]()
    move, kernel = mover(storage)
    assert move(pairs) == 1
    assert snapshot(owners) == snapshot(expected)
    assert len(kernel.launches) == 1
    storage, owners = STORAGES[name]()
    into, buffer, refused = indirect(storage)
    into.fill(buffer, pairs)
    into()
    assert snapshot(owners) == snapshot(expected)
    assert refused[0] == 0


@st.composite
def regions_and_moves(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]]]:
    """(offset, gap behind a block, bytes a block) of each region, and moves of 6 blocks."""
    sizes = st.one_of(
        st.integers(1, 70),
        st.integers(1, 5000),
        st.sampled_from([16, 128, 2048, 2050, 4096, 34 << 10, 18 << 10]),
    )
    region = st.tuples(st.integers(0, 33), st.sampled_from([0, 0, 1, 2, 6, 8, 16, 100]), sizes)
    order = draw(st.permutations(range(6)))
    count = draw(st.integers(0, 3))
    moves = [(order[2 * i], order[2 * i + 1]) for i in range(count)]
    return draw(st.lists(region, min_size=1, max_size=4)), moves


def storage_of(regions: list[tuple[int, int, int]]) -> tuple[Storage, list[Bytes]]:
    found, buffers = [], []
    for seed, (offset, gap, size) in enumerate(regions):
        buffers.append(random_bytes(offset + 7 * (size + gap) + 16, seed=seed))
        found.append(Region(at(buffers[-1]) + offset, size + gap, size, 7, buffers[-1]))
    return Storage(found, 6), buffers


@given(regions_and_moves(), st.sampled_from([32, 96, 256]), st.integers(1, 5))
def test_any_sizes_strides_and_addresses_move_like_the_cpu_mover(
    case: tuple[list[tuple[int, int, int]], list[tuple[int, int]]], threads: int, grid: int
) -> None:
    regions, moves = case
    pairs = np.array(moves, np.uint32).reshape(-1, 2)
    expected, copies = storage_of(regions)
    CPUMover(expected).move(pairs)
    storage, buffers = storage_of(regions)
    mover(storage, threads=threads, max_thread_blocks=grid)[0](pairs)
    assert snapshot(buffers) == snapshot(copies)
    every = list(range(7))
    reference = cuda.block_checksums(expected, np.arange(7))
    for shape in ({"threads": threads, "max_thread_blocks": grid}, {}):
        np.testing.assert_array_equal(checksums(storage, every, **shape), reference)


@pytest.mark.parametrize(
    ("address", "stride", "size", "width"),
    [
        (4096, 4096, 4096, 16),
        (4096, 34 << 10, 34 << 10, 16),
        (4096, 1504, 1496, 8),
        (4104, 4096, 4096, 8),
        (4096, 4100, 4096, 4),
        (4096, 4096, 18 * 17, 2),
        (4097, 4096, 4096, 1),
        (4096, 4097, 4096, 1),
        (4096, 4096, 1499, 1),
    ],
)
def test_a_region_is_copied_in_the_widest_words_that_its_alignment_allows(
    address: int, stride: int, size: int, width: int
) -> None:
    rows = cuda.RegionTable.of(Storage([Region(address, stride, size, 4)], 3)).rows
    assert rows.tolist() == [[0, stride, size, width, 0]]


def test_chunks_are_numbered_through_so_that_small_pieces_fill_the_lanes() -> None:
    """160 pieces of 4 KiB are 2 chunks each: with 8 warps a thread block, 40 of them a block."""
    storage = Storage.from_numpy([random_bytes(5, 4096, seed=layer) for layer in range(160)])
    table = cuda.RegionTable.of(storage)
    assert table.chunks_per_block == 320
    kernel = cuda_shim.kernel("move_blocks")
    move = cuda.MoveBlocks(kernel, table, at(table.rows))
    move(np.array([[0, 1], [2, 3]], np.uint32))
    assert kernel.launches == [((80,), (256,))]
    for region in storage.regions:
        array = np.asarray(region.owner)
        np.testing.assert_array_equal(array[1], array[0])
        np.testing.assert_array_equal(array[3], array[2])


def test_more_moves_than_the_arguments_hold_go_in_several_launches() -> None:
    blocks = 2 * (2 * cuda.MAX_MOVES + 3)
    array = random_bytes(blocks + 1, 24)
    expected = array.copy()
    order = np.random.default_rng(5).permutation(blocks).astype(np.uint32).reshape(-1, 2)
    expected[order[:, 1]] = expected[order[:, 0]]
    move, kernel = mover(Storage.from_numpy([array]))
    assert move(order) == len(kernel.launches) == 3
    np.testing.assert_array_equal(array, expected)


def test_the_chunks_of_a_launch_are_numbered_in_31_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [random_bytes(12, 4096, seed=n) for n in range(2)]
    expected = [array.copy() for array in arrays]
    pairs = np.array([[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], np.uint32)
    for array in expected:
        array[pairs[:, 1]] = array[pairs[:, 0]]
    monkeypatch.setattr(launches, "_MAX_CHUNKS", 9)  # two moves of four chunks, not three
    move, kernel = mover(Storage.from_numpy(arrays))
    assert move(pairs) == len(kernel.launches) == 3
    for array, copy in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(array, copy)


def test_a_block_of_more_chunks_than_a_launch_can_number_is_refused_by_name() -> None:
    region = Region(4097, 2**39, 2**39, 3)  # by single bytes: 2^32 chunks of 128
    with pytest.raises(InvalidConfig) as caught:
        cuda.RegionTable.of(Storage([region], 2))
    assert caught.value.chunks == 2**32
    assert caught.value.block_bytes == 2**39


def test_offsets_beyond_four_gib_are_exact() -> None:
    """Stride 1,002,240: block 2143 is the first past 2 GiB, 4286 the first past 4 GiB. Zeroed
    memory is mapped lazily, so only the touched pages exist."""
    array = np.zeros((4400, 1_002_240), np.uint8)
    piece = array[:, :1_000_016]
    for block in (2143, 4285):
        piece[block] = random_bytes(1_000_016, seed=block)
    storage = Storage.from_numpy([piece])
    mover(storage, threads=256)[0](np.array([[2143, 4286], [4285, 5]], np.uint32))
    move, buffer, _ = indirect(storage)
    move.fill(buffer, np.array([[4286, 4288]], np.uint32))
    move()
    np.testing.assert_array_equal(piece[4286], random_bytes(1_000_016, seed=2143))
    np.testing.assert_array_equal(piece[4288], random_bytes(1_000_016, seed=2143))
    np.testing.assert_array_equal(piece[5], random_bytes(1_000_016, seed=4285))
    for block in (4285, 4286, 4288, 5):
        assert not array[block, 1_000_016:].any()
    for block in (4, 6, 4284, 4287, 4289):
        assert not array[block].any()
    np.testing.assert_array_equal(
        checksums(storage, [4286, 4287]), cuda.block_checksums(storage, np.array([4286, 4287]))
    )


BAD = [
    ([[0, 1], [2, 11]], InvalidBlock, {"block": 11, "index": 1, "num_blocks": 11}),
    ([[0, 1], [2, 1]], InvalidPlan, {"block": 1}),
    ([[0, 1], [1, 2]], InvalidPlan, {"block": 1, "index": 1}),
    ([[3, 3]], InvalidPlan, {"block": 3, "index": 0}),
]


@pytest.mark.parametrize(("pairs", "error", "numbers"), BAD)
def test_a_bad_set_of_moves_is_refused_before_anything_is_launched(
    pairs: list[list[int]], error: type[KVCacheError], numbers: dict[str, int]
) -> None:
    storage = Storage.from_numpy([random_bytes(12, 64)])
    move, kernel = mover(storage)
    into, buffer, _ = indirect(storage)
    for call in (move, lambda moves: into.fill(buffer, moves)):
        with pytest.raises(error) as caught:
            call(np.array(pairs, np.uint32))
        assert caught.value.numbers.items() >= numbers.items()
    assert kernel.launches == []
    assert not buffer.any()
    assert move(np.empty((0, 2), np.uint32)) == 0
    assert kernel.launches == []


@pytest.mark.parametrize("threads", [0, 16, 33, 257, 288, True, 64.0])
def test_thread_blocks_are_whole_warps_of_at_most_256_threads(threads: Any) -> None:
    with pytest.raises(InvalidConfig):
        mover(Storage.from_numpy([random_bytes(3, 8)]), threads=threads)


# -- move_blocks_indirect ------------------------------------------------------------------


def test_moves_in_a_buffer_are_carried_out_once_and_replays_copy_nothing() -> None:
    array = random_bytes(9, 5000)
    move, buffer, refused = indirect(Storage.from_numpy([array]))
    assert move.fill(buffer, np.array([[0, 1], [2, 3]], np.uint32)) == 24
    move()
    np.testing.assert_array_equal(array[[1, 3]], array[[0, 2]])
    assert buffer[:2].tolist() == [0, 0]
    array[1], array[3] = 1, 2  # their new owners write
    before = array.copy()
    move()
    move()
    np.testing.assert_array_equal(array, before)
    move.fill(buffer, np.array([[4, 5]], np.uint32))
    move()
    np.testing.assert_array_equal(array[5], array[4])
    assert refused[0] == 0


def test_a_count_above_the_capacity_copies_nothing_and_is_reported() -> None:
    array = random_bytes(9, 500)
    before = array.copy()
    move, buffer, refused = indirect(Storage.from_numpy([array]), capacity=2)
    buffer[:] = [3, 0, 0, 1, 2, 3]
    move()
    np.testing.assert_array_equal(array, before)
    assert (refused[0], *buffer[:2]) == (3, 0, 0)
    with pytest.raises(LimitExceeded) as caught:
        move.fill(buffer, np.array([[0, 1], [2, 3], [4, 5]], np.uint32))
    assert (caught.value.needed, caught.value.limit) == (3, 2)
    assert not buffer[:2].any()
    refused[0] = 0
    move.fill(buffer, np.array([[0, 1], [2, 3]], np.uint32))  # exactly full
    move()
    np.testing.assert_array_equal(array[[1, 3]], before[[0, 2]])
    assert refused[0] == 0


def test_a_buffer_has_room_for_its_capacity_and_its_head() -> None:
    move, buffer, _ = indirect(Storage.from_numpy([random_bytes(3, 8)]), capacity=4)
    every_wrong: list[Any] = [
        buffer[:-1],
        buffer.astype(np.int64),
        np.zeros(20, np.uint32)[::2],
    ]
    for wrong in every_wrong:
        with pytest.raises(InvalidConfig) as caught:
            move.fill(wrong, np.array([[0, 1]], np.uint32))
        assert caught.value.argument == "staging"


# -- update_tables -------------------------------------------------------------------------


@given(st.dictionaries(st.integers(0, 299), st.integers(-(2**31), 2**31 - 1), max_size=200))
def test_entries_are_written_where_they_belong_and_nowhere_else(values: dict[int, int]) -> None:
    tables = np.arange(300, dtype=np.int32)
    expected = tables.copy()
    for index, value in values.items():
        expected[index] = value
    signed = np.array(list(values.values()), np.int32)
    entries = np.stack([np.array(list(values), np.uint32), signed.view(np.uint32)], axis=1)
    kernel = cuda_shim.kernel("update_tables")
    cuda.UpdateTables(kernel, at(tables), 300, threads=32)(np.ascontiguousarray(entries))
    np.testing.assert_array_equal(tables, expected)
    assert len(kernel.launches) == bool(values)


@pytest.mark.parametrize(
    ("entries", "numbers"),
    [
        (np.array([[1, 0], [10, 0]], np.uint32), {"index": 10, "num_entries": 10}),
        (np.array([[1, 0], [2**32 - 1, 0]], np.uint32), {"index": 2**32 - 1}),
        (np.array([[4, 0], [1, 0], [4, 0]], np.uint32), {"index": 4}),
        (np.array([[1, 0]], np.int32), {"argument": "entries"}),
        (np.array([1, 0], np.uint32), {"argument": "entries"}),
        (np.zeros((2, 4), np.uint32)[:, ::2], {"argument": "entries"}),
        ([[1, 0]], {"argument": "entries"}),
    ],
)
def test_entries_outside_of_the_tables_or_given_twice_are_refused(
    entries: Any, numbers: dict[str, Any]
) -> None:
    tables = np.arange(10, dtype=np.int32)
    kernel = cuda_shim.kernel("update_tables")
    with pytest.raises(InvalidConfig) as caught:
        cuda.UpdateTables(kernel, at(tables), 10)(entries)
    assert caught.value.numbers.items() >= numbers.items()
    assert kernel.launches == []


# -- write_kv ------------------------------------------------------------------------------


def writer(layers: Layers, layer: int, **shape: int) -> tuple[cuda.WriteKV, cuda_shim.ShimKernel]:
    k, v = layers.logical(layer)
    kernel = cuda_shim.kernel("write_kv")
    shape = {"threads": 32, "max_thread_blocks": 3, **shape}
    place = None if v is None else cuda.Place.of(v)
    return cuda.WriteKV(kernel, cuda.Place.of(k), place, **shape), kernel


def new_tokens(layers: Layers, layer: int, count: int, kind: str) -> tuple[Any, Any]:
    """K and V as engines hand them over: dense, cut out of one QKV matrix, or heads first."""
    found: list[Any] = []
    for seed, half in enumerate(layers.logical(layer)):
        if half is None:
            found.append(None)
            continue
        heads, dim = half.shape[2:]
        if kind == "dense":
            found.append(filled(count, heads, dim, dtype=half.dtype, seed=seed))
        elif kind == "qkv":
            wide = filled(count, 3 * heads * dim, dtype=half.dtype, seed=seed)
            found.append(wide[:, heads * dim : 2 * heads * dim].view(count, heads, dim))
        else:
            found.append(filled(heads, count, dim, dtype=half.dtype, seed=seed).transpose(0, 1))
    return found[0], found[1]


def write(call: cuda.WriteKV, k: Any, v: Any, slots: npt.NDArray[np.int64]) -> None:
    call(cuda.Place.of(k), None if v is None else cuda.Place.of(v), at(slots))


def every_layers() -> dict[str, Any]:
    makers: dict[str, Any] = {}
    for name in LAYOUTS:
        for size in SIZES:
            if name != "packed" or size[4] is None:
                for dtype in DTYPES:
                    makers[f"{name} {size} {dtype}"] = lambda n=name, s=size, d=dtype: made(n, s, d)
    for name in ADOPTED:
        makers[name] = lambda n=name: adopted(n)
    return makers


LAYERS = every_layers()


@pytest.mark.parametrize("kind", ["dense", "qkv", "heads first"])
@pytest.mark.parametrize("name", LAYERS)
def test_in_every_layout_tokens_are_written_as_layers_write_does(name: str, kind: str) -> None:
    expected, layers = LAYERS[name](), LAYERS[name]()
    total = layers.num_blocks * layers.block_size
    order = np.random.default_rng(3).permutation(total)[: total // 2].astype(np.int64)
    for layer in range(len(layers)):
        k, v = new_tokens(layers, layer, len(order), kind)
        expected.write(layer, k, v, order)
        call, kernel = writer(layers, layer)
        write(call, k, v, order)
        assert len(kernel.launches) == 1
    for one, other in zip(layers.tensors, expected.tensors, strict=True):
        assert bool(torch.equal(raw(one), raw(other)))


@given(
    heads=st.integers(1, 5),
    dim=st.integers(1, 300),
    dim_v=st.integers(0, 40),
    block_size=st.integers(1, 7),
    slots=st.lists(st.integers(-2, 34), max_size=12, unique=True),
    dtype=st.sampled_from(DTYPES),
    name=st.sampled_from([name for name in LAYOUTS if name != "packed"]),
    kind=st.sampled_from(["dense", "qkv", "heads first"]),
)
def test_any_shape_is_written_as_layers_write_does_and_padding_writes_nothing(
    heads: int,
    dim: int,
    dim_v: int,
    block_size: int,
    slots: list[int],
    dtype: Any,
    name: str,
    kind: str,
) -> None:
    size = (5, block_size, heads, dim, dim_v)
    expected, layers = made(name, size, dtype, 1), made(name, size, dtype, 1)
    where = np.array([slot for slot in slots if slot < 5 * block_size], np.int64)
    k, v = new_tokens(layers, 0, len(where), kind)
    real = np.flatnonzero(where >= 0)
    expected.write(0, k[real], None if v is None else v[real], where[real])
    write(writer(layers, 0)[0], k, v, where)
    for one, other in zip(layers.tensors, expected.tensors, strict=True):
        assert bool(torch.equal(raw(one), raw(other)))


def test_padding_slots_write_nothing_at_all() -> None:
    layers = adopted("packed in each block")
    before = [raw(tensor).clone() for tensor in layers.tensors]
    k, v = new_tokens(layers, 0, 3, "dense")
    write(writer(layers, 0)[0], k, v, np.array([-1, -(2**63), -7], np.int64))
    for tensor, copy in zip(layers.tensors, before, strict=True):
        assert bool(torch.equal(raw(tensor), copy))


def test_more_tokens_than_a_launch_can_number_go_in_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launches, "_MAX_CHUNKS", 13)
    expected, layers = adopted("halves of the last axis"), adopted("halves of the last axis")
    slots = np.random.default_rng(3).permutation(36)[:20].astype(np.int64)
    k, v = new_tokens(layers, 1, 20, "heads first")
    expected.write(1, k, v, slots)
    call, kernel = writer(layers, 1)
    write(call, k, v, slots)
    assert len(kernel.launches) == 4  # 6 tokens of 2 chunks each
    for one, other in zip(layers.tensors, expected.tensors, strict=True):
        assert bool(torch.equal(raw(one), raw(other)))


def test_slots_and_strides_beyond_32_bits_are_exact() -> None:
    """Slot 4,000,000 x 576 elements, and a token stride past 4 GiB (lazily mapped zeros)."""
    pool = np.zeros((250_001, 16, 1, 576), np.float16)
    far = np.zeros((2, 2**31 + 8), np.float16)
    new = np.lib.stride_tricks.as_strided(far, (2, 1, 576), (far.strides[0], 1152, 2))
    new[0], new[1] = 1.5, 2.5
    slots = np.array([4_000_000, 3_728_270], np.int64)
    call = cuda.WriteKV(cuda_shim.kernel("write_kv"), cuda.Place.of(pool), None, threads=32)
    call(cuda.Place.of(new), None, at(slots))
    flat = pool.reshape(-1, 576)
    assert (flat[4_000_000] == 1.5).all()
    assert (flat[3_728_270] == 2.5).all()
    for slot in (0, 3_999_999, 4_000_001, 3_728_269, 3_728_271):
        assert not flat[slot].any()


def test_heads_that_touch_are_written_as_one() -> None:
    layers = made("NHD", (9, 4, 8, 128, None), torch.bfloat16, 1)
    k, v = layers.logical(0)
    assert v is not None
    call = cuda.WriteKV(cuda_shim.kernel("write_kv"), cuda.Place.of(k), cuda.Place.of(v))
    new, slots = filled(2, 8, 128, dtype=torch.bfloat16), np.array([0, 5], np.int64)
    write(call, new, new, slots)
    (halves,) = call._halves["half"]
    assert halves["heads"].tolist() == [1, 1]
    assert halves["words_per_head"].tolist() == [128, 128]
    assert halves["width"].tolist() == [16, 16]


def test_what_does_not_fit_the_pool_is_refused_before_anything_is_launched() -> None:
    call, kernel = writer(made("NHD", (5, 4, 2, 8, 3), torch.float32, 1), 0)
    k, v = torch.zeros(3, 2, 8), torch.zeros(3, 2, 3)
    slots = np.zeros(3, np.int64)
    wrong: list[tuple[Any, Any]] = [
        (k, None),
        (k[:, :1], v),
        (k[..., :4], v),
        (k, v[:2]),
        (k.to(torch.bfloat16), v),
        (k[0], v),
        (torch.zeros(3, 8, 2).transpose(1, 2), v),
    ]
    for bad_k, bad_v in wrong:
        with pytest.raises(InvalidConfig) as caught:
            write(call, bad_k, bad_v, slots)
        assert caught.value.argument in ("k", "v")
    assert kernel.launches == []
    write(call, k[:0], v[:0], slots[:0])
    assert kernel.launches == []
    with pytest.raises(InvalidConfig):
        cuda.WriteKV(kernel, cuda.Place.of(k), None)
    pool = np.zeros((5, 4, 2, 8), np.float32)
    with pytest.raises(InvalidConfig):
        cuda.WriteKV(kernel, cuda.Place.of(pool), cuda.Place.of(pool[:, :2]))


# -- checksum_blocks -----------------------------------------------------------------------


@pytest.mark.parametrize("name", STORAGES)
def test_checksums_are_those_of_numpy_in_every_layout(name: str) -> None:
    storage, _ = STORAGES[name]()
    blocks = [0, storage.num_blocks, 1, 1]
    sums = checksums(storage, blocks)
    np.testing.assert_array_equal(sums, cuda.block_checksums(storage, np.array(blocks)))
    assert len(set(sums.tolist())) == 3


def test_the_checksum_does_not_change_from_version_to_version() -> None:
    """Sums are compared across processes. The value was worked out with Python's integers alone."""
    data = bytes(range(21))
    mask = 2**64 - 1

    def mix(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB & mask
        return z ^ (z >> 31)

    total = 0
    for region, piece in enumerate((data[:13], data[13:])):
        padded = piece + bytes(-len(piece) % 8)
        for word in range(len(padded) // 8):
            value = int.from_bytes(padded[8 * word : 8 * word + 8], "little")
            key = mix(((region << 40) + word + 0x9E3779B97F4A7C15) & mask)
            total = (total + mix(value ^ key)) & mask
    arrays = [
        np.frombuffer(data[:13] * 2, np.uint8).reshape(2, 13).copy(),
        np.frombuffer(data[13:] * 2, np.uint8).reshape(2, 8).copy(),
    ]
    storage = Storage.from_numpy(arrays)
    assert cuda.block_checksums(storage, np.array([1])).tolist() == [total]
    assert checksums(storage, [1]).tolist() == [total]


@given(st.data(), st.sampled_from([(16,), (2048, 24), (1499,), (12, 12, 40)]))
def test_a_byte_that_changes_or_changes_places_changes_the_checksum(
    data: st.DataObject, sizes: tuple[int, ...]
) -> None:
    arrays = [random_bytes(2, size, seed=size) for size in sizes]
    storage = Storage.from_numpy(arrays)
    before = checksums(storage, [0])
    flat = [(array, place) for array in arrays for place in range(array.shape[1])]
    one, place = flat[data.draw(st.integers(0, len(flat) - 1))]
    other, there = flat[data.draw(st.integers(0, len(flat) - 1))]
    if one[0, place] == other[0, there]:
        one[0, place] ^= np.uint8(data.draw(st.integers(1, 255)))
    else:
        one[0, place], other[0, there] = other[0, there].copy(), one[0, place].copy()
    assert checksums(storage, [0]) != before


def test_checksums_of_blocks_that_are_not_there_are_refused() -> None:
    storage = Storage.from_numpy([random_bytes(4, 8)])
    table = cuda.RegionTable.of(storage)
    kernel = cuda_shim.kernel("checksum_blocks")
    call = cuda.ChecksumBlocks(kernel, table, at(table.rows))
    sums = np.zeros(4, np.uint64)
    for bad in (np.array([0, 4], np.uint32), np.array([0, -1])):
        with pytest.raises(InvalidBlock) as caught:
            call(bad, at(sums))
        assert (caught.value.index, caught.value.num_blocks) == (1, 3)
        with pytest.raises(InvalidBlock):
            cuda.block_checksums(storage, bad)
    strided: list[Any] = [np.array([0, 1], np.int64), np.arange(4, dtype=np.uint32)[::2], [0]]
    for bad in strided:
        with pytest.raises(InvalidConfig):
            call(bad, at(sums))
    assert kernel.launches == []


# -- sanitizers ----------------------------------------------------------------------------


def run_case(sanitizer: str, case: str, without: str = "") -> subprocess.CompletedProcess[str]:
    library = cuda_shim.build(sanitizer, without)
    environment = os.environ | {
        "LD_PRELOAD": " ".join(cuda_shim.runtimes(sanitizer)),
        # Leaks would be those of the interpreter.
        "ASAN_OPTIONS": "detect_leaks=0:exitcode=66",
        "TSAN_OPTIONS": "halt_on_error=1:exitcode=66",
        "UBSAN_OPTIONS": "exitcode=66",
    }
    command = [sys.executable, "-m", "tests.shim_faults", str(library), case]

    def run(*prefix: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*prefix, *command],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    done = run()
    if "unexpected memory mapping" in done.stderr:  # addresses too random for this sanitizer
        done = run("setarch", "-R")
    return done


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_right_launches_of_every_kernel_leave_the_sanitizers_silent(sanitizer: str) -> None:
    done = run_case(sanitizer, "clean")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("case", shim_faults.THREAD)
def test_thread_sanitizer_reports_moves_that_meet(case: str) -> None:
    done = run_case("thread", case)
    assert done.returncode == 66, done.stderr
    assert "ThreadSanitizer: data race" in done.stderr
    assert f"{case.split(':')[0]}" in done.stderr


@pytest.mark.parametrize("case", shim_faults.ADDRESS)
def test_address_sanitizer_reports_accesses_outside_of_the_arrays(case: str) -> None:
    done = run_case("address", case)
    assert done.returncode == 66, done.stderr
    expected = "misaligned address" if "alignment" in case else "AddressSanitizer: heap-buffer"
    assert expected in done.stderr


def test_without_its_barrier_the_count_is_cleared_while_others_still_read_it() -> None:
    done = run_case("thread", "clean", without="    __syncthreads();\n")
    assert done.returncode == 66, done.stderr
    assert "data race" in done.stderr
    assert "move_blocks_indirect.cu" in done.stderr


def test_the_docs_count_the_planted_faults() -> None:
    docs = (ROOT / "docs" / "cuda.md").read_text()
    alignment = sum("alignment" in case for case in shim_faults.ADDRESS)
    for sanitizer, count in (
        ("ThreadSanitizer", len(shim_faults.THREAD)),
        ("AddressSanitizer", len(shim_faults.ADDRESS) - alignment),
        ("UndefinedBehaviorSanitizer", alignment),
    ):
        assert re.search(rf"^\| {sanitizer} \|.*\| {count} \|$", docs, re.M), sanitizer
