"""What a storage accepts, and what it refuses by name and number."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import weakref
from typing import Any, cast

import kvmmu
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvmmu import InvalidConfig, Region, Storage


def test_import_loads_neither_numpy_nor_the_core_nor_an_extra() -> None:
    code = (
        "import sys, kvmmu\n"
        "names = ('numpy', 'torch', 'typer', 'rich', 'cupy', 'kvmmu._core')\n"
        "print([name for name in names if name in sys.modules])\n"
        "assert set(kvmmu.__all__) <= set(dir(kvmmu))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Manager'"):
        kvmmu.Manager  # noqa: B018


def test_every_error_of_the_errors_module_is_exported() -> None:
    from kvmmu import errors

    assert set(errors.__all__) <= set(kvmmu.__all__)
    for name in errors.__all__:
        assert getattr(kvmmu, name) is getattr(errors, name)


# -- from_numpy ------------------------------------------------------------------------------


def test_arrays_become_regions_with_their_strides() -> None:
    plain = np.zeros((9, 4, 2, 8), np.float16)
    strided = np.zeros((9, 3, 40), np.uint8)[:, 1]
    flat = np.zeros(9, np.int64)
    storage = Storage.from_numpy([plain, strided, flat])
    assert storage.num_blocks == 8
    assert storage.block_bytes == 128 + 40 + 8
    assert storage.region_table.dtype == np.uint64
    assert storage.region_table.tolist() == [
        [plain.ctypes.data, 128, 128],
        [strided.ctypes.data, 120, 40],
        [flat.ctypes.data, 8, 8],
    ]
    assert storage.region_table is storage.region_table
    assert not storage.region_table.flags.writeable
    assert [region.num_blocks for region in storage.regions] == [9, 9, 9]


def test_a_storage_keeps_its_arrays_alive() -> None:
    class Traced(np.ndarray):
        pass

    array = np.zeros((3, 8), np.uint8).view(Traced)
    alive = weakref.ref(array)
    storage = Storage.from_numpy([array])
    del array
    gc.collect()
    assert alive() is not None
    del storage
    gc.collect()
    assert alive() is None


def test_packed_and_block_major_layouts_are_accepted() -> None:
    packed = np.zeros((9, 2, 4, 16), np.uint16)  # K and V of a block side by side
    Storage.from_numpy([packed[:, 0], packed[:, 1]])
    major = np.zeros((9, 5, 2, 4, 16), np.uint16)  # all layers of a block side by side
    Storage.from_numpy([major[:, layer, half] for layer in range(5) for half in range(2)])
    backwards = [major[:, layer, half] for layer in reversed(range(5)) for half in range(2)]
    Storage.from_numpy(backwards)
    halves = np.zeros((18, 8), np.uint8)  # even blocks one region, odd blocks the other
    Storage.from_numpy([halves[0::2], halves[1::2]])


def frozen(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("array", "sentence"),
    [
        ([[1, 2], [3, 4]], "array 1 is a list, not a NumPy array"),
        (np.zeros((9, 2), object), "Python objects"),
        (np.array(3), r"shape \(\)"),
        (np.zeros((0, 2)), r"shape \(0, 2\)"),
        (np.zeros((1, 2)), "at least 2 blocks"),
        (np.zeros((9, 0)), "at least 1 byte"),
        (np.zeros((8, 2)), "array 1 has 8 blocks, but array 0 has 9"),
        (frozen(np.zeros((9, 2))), "array 1 is read-only"),
        (np.zeros((9, 4, 2)).transpose(0, 2, 1), "C-contiguous"),
        (np.zeros((9, 4))[:, ::2], "C-contiguous"),
        (np.zeros((9, 4))[::-1], "stride of -32 bytes"),
        (np.lib.stride_tricks.as_strided(np.zeros(16), (9, 2), (0, 8)), "stride of 0 bytes"),
        (np.lib.stride_tricks.as_strided(np.zeros(16), (9, 2), (8, 8)), "stride of 8 bytes"),
    ],
)
def test_an_array_that_cannot_be_moved_in_is_refused_by_index(array: Any, sentence: str) -> None:
    with pytest.raises(InvalidConfig, match=sentence) as caught:
        Storage.from_numpy([np.zeros((9, 3)), array])
    assert caught.value.region == 1


def test_no_arrays_and_no_regions_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="at least one"):
        Storage.from_numpy([])
    with pytest.raises(InvalidConfig, match="at least one"):
        Storage([], 4)


# -- regions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_blocks", [0, -1, 2**31 - 1, 3.5, True, "16", None])
def test_num_blocks_out_of_range_is_refused(num_blocks: Any) -> None:
    with pytest.raises(InvalidConfig, match=r"num_blocks must be .*1 \.\. 2147483646"):
        Storage([Region(4096, 8, 8, 100)], num_blocks)


@pytest.mark.parametrize(
    ("region", "sentence"),
    [
        (Region(0, 8, 8, 5), "address must be in 1"),
        (Region(-8, 8, 8, 5), "address must be in 1"),
        (Region(2**64, 8, 8, 5), "address must be in 1"),
        (Region(4096, 0, 8, 5), "stride must be in 1"),
        (Region(4096, 8, 0, 5), "block_bytes must be in 1"),
        (Region(4096, cast(int, 8.0), 8, 5), "stride must be an integer"),
        (Region(4096, 8, True, 5), "block_bytes must be an integer"),
        (Region(4096, 7, 8, 5), "stride of 7 bytes, less than the 8 bytes"),
        (Region(4096, 8, 8, 4), "4 blocks; 5 are needed"),
        (Region(4096, 2**62, 8, 5), "outside of the address space"),
        (Region(2**63 - 8, 8, 8, 5), "outside of the address space"),
    ],
)
def test_a_region_out_of_bounds_is_refused_with_its_numbers(region: Region, sentence: str) -> None:
    fine = Region(2**40, 8, 8, 5)
    with pytest.raises(InvalidConfig, match=sentence) as caught:
        Storage([fine, region], 4)
    assert caught.value.region == 1


def test_a_region_may_have_more_blocks_than_the_pool() -> None:
    assert Storage([Region(4096, 8, 8, 500)], 4).num_blocks == 4


def test_sizes_beyond_32_bits_stay_exact() -> None:
    region = Region(2**40, 1_002_240, 1_000_000, 5_000_000)
    assert region.end == 2**40 + 4_999_999 * 1_002_240 + 1_000_000
    assert Storage([region], 4_000_000).region_table.tolist() == [[2**40, 1_002_240, 1_000_000]]


def test_regions_of_different_strides_that_interleave_are_refused_by_name() -> None:
    with pytest.raises(InvalidConfig, match="regions 0 and 1 interleave with different") as caught:
        Storage([Region(4096, 64, 8, 5), Region(4096 + 8, 32, 8, 5)], 4)
    assert (caught.value.region, caught.value.other) == (0, 1)


def test_an_overlap_is_found_past_regions_that_are_fine() -> None:
    regions = [Region(2**20 + 64 * layer, 64 * 10, 64, 5) for layer in range(10)]
    Storage(regions, 4)
    for one, two in itertools.combinations(range(10), 2):
        bad = list(regions)
        bad[two] = Region(regions[one].address + 640, 640, 64, 5)
        with pytest.raises(InvalidConfig, match=f"regions {one} and {two} share bytes"):
            Storage(bad, 4)


def blocks_of(region: Region) -> set[int]:
    return {
        region.address + block * region.stride + byte
        for block in range(region.num_blocks)
        for byte in range(region.block_bytes)
    }


small_regions = st.builds(
    lambda address, stride, shorter, count: Region(
        address, stride, max(1, stride - shorter), count
    ),
    st.integers(1, 60),
    st.sampled_from([4, 6, 12]),
    st.integers(0, 11),
    st.integers(2, 5),
)


@given(st.lists(small_regions, min_size=2, max_size=4))
def test_overlap_is_decided_byte_by_byte_for_equal_strides(regions: list[Region]) -> None:
    """Exact for equal strides; with different strides no overlap gets through."""
    taken = [blocks_of(region) for region in regions]
    shares = any(one & two for one, two in itertools.combinations(taken, 2))
    mixed = len({region.stride for region in regions}) > 1
    try:
        Storage(regions, 1)
        accepted = True
    except InvalidConfig:
        accepted = False
    if shares:
        assert not accepted
    elif not mixed:
        assert accepted
