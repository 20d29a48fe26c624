"""Every layout holds the same tokens: written by slots, read by blocks, moved whole."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from kvmmu import CPUMover, InvalidBlock, InvalidConfig, Layers, layout  # noqa: E402
from kvmmu.layout import CAN, LAYOUTS  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16, FP8, torch.int8)
SIZES = (  # physical blocks, block_size, heads, dim, dim of V
    (9, 4, 2, 8, None),
    (5, 3, 1, 7, None),
    (7, 1, 3, 5, None),
    (6, 4, 2, 8, 3),
    (6, 5, 1, 9, 0),
)


def filled(*shape: int, dtype: Any, seed: int = 0) -> Any:
    """Any bytes at all: NaN patterns of fp8 and float32 are copied like others."""
    size = dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), generator=generator)
    return raw.to(torch.uint8).view(dtype)


def raw(tensor: Any) -> Any:
    """[..., bytes] uint8 of a tensor, a contiguous copy."""
    return tensor.detach().contiguous().view(torch.uint8)


def same(one: Any, other: Any) -> bool:
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and bool(torch.equal(raw(one), raw(other)))


def made(name: str, size: Any, dtype: Any, num_layers: int = 2) -> Layers:
    num_blocks, block_size, heads, dim, v_dim = size
    return Layers.allocate(
        name,
        num_layers=num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=heads,
        head_dim=dim,
        v_head_dim=v_dim,
        dtype=dtype,
    )


def adopted(name: str, dtype: Any = torch.bfloat16) -> Layers:
    """9 physical blocks of 4 tokens, 2 heads of 8, in tensors that an engine might own."""
    n = 9
    match name:
        case "packed in each block":
            tensors = [filled(n, 2, 4, 2, 8, dtype=dtype, seed=i) for i in range(2)]
            return Layers.adopt(tensors, layout="packed", block_size=4, num_blocks=n)
        case "packed in each block by strides":
            tensors = [filled(n, 2, 4, 2, 8, dtype=dtype, seed=i).transpose(0, 1) for i in range(2)]
            return Layers.adopt(tensors, layout="packed", block_size=4, num_blocks=n)
        case "packed in each token":
            both = [filled(n, 4, 2, 2, 8, dtype=dtype, seed=i) for i in range(2)]
            pairs = [(t[:, :, 0], t[:, :, 1]) for t in both]
            return Layers.adopt(pairs, layout="packed", block_size=4, num_blocks=n)
        case "halves of the last axis":
            both = [filled(n, 4, 2, 16, dtype=dtype, seed=i) for i in range(2)]
            pairs = [(t[..., :8], t[..., 8:]) for t in both]
            return Layers.adopt(pairs, layout="NHD", block_size=4, num_blocks=n)
        case "gaps between heads":
            pairs = [tuple(filled(n, 4, 2, 12, dtype=dtype)[..., :8] for _ in "kv") for _ in "ab"]
            return Layers.adopt(pairs, layout="NHD", block_size=4, num_blocks=n)
        case "tokens outermost":
            pairs = [
                tuple(filled(4, n, 2, 8, dtype=dtype).transpose(0, 1) for _ in "kv") for _ in "ab"
            ]
            return Layers.adopt(pairs, layout="NHD", block_size=4, num_blocks=n)
        case "block-major in one tensor":
            buffer = filled(n, 2, 2, 4, 2, 8, dtype=dtype)
            return Layers.adopt(buffer, layout="block_major", block_size=4, num_blocks=n)
        case "groups of other shapes":
            pairs = [
                tuple(filled(n, 4, 2, 8, dtype=dtype) for _ in "kv"),
                (filled(n, 4, 5, 3, dtype=torch.float32), filled(n, 4, 5, 6, dtype=torch.float32)),
            ]
            return Layers.adopt(
                pairs,
                layout="NHD",
                block_size=4,
                num_blocks=n,
                extra=[filled(n, dtype=torch.float32), filled(n, 3, dtype=torch.int8)],
            )
    raise AssertionError(name)


ADOPTED = (
    "packed in each block",
    "packed in each block by strides",
    "packed in each token",
    "halves of the last axis",
    "gaps between heads",
    "tokens outermost",
    "block-major in one tensor",
    "groups of other shapes",
)


def holds(layers: Layers, rng: np.random.Generator) -> None:
    """Writes tokens all over the pool, reads them back in every way, then moves blocks."""
    n, size = layers.num_blocks, layers.block_size
    slots = rng.permutation(n * size)[: n * size * 2 // 3].astype(np.int64)
    table = rng.permutation(n)[: n - 1]
    runs: list[list[int]] = []
    for block in table.tolist():
        if runs and sum(runs[-1]) == block:
            runs[-1][1] += 1
        else:
            runs.append([block, 1])
    expected: list[list[Any]] = []
    for index in range(len(layers)):
        halves: list[Any] = list(layers.logical(index))
        expected.append([None if half is None else copied(half) for half in halves])
        new: list[Any] = [
            None
            if half is None
            else filled(len(slots), *half.shape[2:], dtype=half.dtype, seed=7 * index + at)
            for at, half in enumerate(halves)
        ]
        layers.write(index, new[0], new[1], slots)
        for half, tokens in zip(expected[index], new, strict=True):
            if half is not None:
                words = half.view(-1, *half.shape[2:]).view(layout._RAW[half.element_size()])
                words[torch.from_numpy(slots)] = tokens.view(words.dtype)
    compare(layers, expected)
    for tokens in (
        0,
        1,
        size,
        size * min(2, len(table)) - 1,
        size * len(table) - size // 2,
        size * len(table),
    ):
        for index, halves in enumerate(expected):
            wanted: list[Any] = [
                None if half is None else half[torch.from_numpy(table)].flatten(0, 1)[:tokens]
                for half in halves
            ]
            found = layers.gather(index, table, tokens)
            for one, other in zip(found, wanted, strict=True):
                assert (one is None) == (other is None)
                if one is not None:
                    assert one.is_contiguous()
                    assert one.untyped_storage().nbytes() == one.numel() * one.element_size()
                    assert same(one, other)
            if not layers.can["views"]:
                with pytest.raises(InvalidConfig, match=f"layout {layers.layout}: tokens of cons"):
                    layers.views(index, runs, tokens)
                continue
            views = layers.views(index, runs, tokens)
            for at in (0, 1):
                parts = [view[at] for view in views]
                if wanted[at] is None:
                    assert parts == [None] * len(parts)
                elif tokens:
                    assert same(torch.cat([raw(part) for part in parts]), raw(wanted[at]))
    order = rng.permutation(n - 1)[: (n - 1) // 2 * 2]
    pairs = np.ascontiguousarray(order.reshape(2, -1).T).astype(np.uint32)
    before = [raw_storage(tensor) for tensor in layers.tensors]
    CPUMover(layers.storage).move(pairs)
    source, destination = (torch.from_numpy(column.astype(np.int64)) for column in pairs.T)
    for halves in expected:
        for half in halves:
            if half is not None:
                words = half.view(layout._RAW[half.element_size()])
                words[destination] = words[source]
    compare(layers, expected)
    # What belongs to no block of the moved ones is as it was, gaps included.
    moved = [raw_storage(tensor) for tensor in layers.tensors]
    for tensor, one, other in zip(layers.tensors, before, moved, strict=True):
        touched = torch.zeros(len(one), dtype=torch.bool)
        for region in layers.storage.regions:
            start = region.address - tensor.untyped_storage().data_ptr()
            if 0 <= start < len(one):
                for block in destination.tolist():
                    at = start + block * region.stride
                    touched[at : at + region.block_bytes] = True
        assert torch.equal(one[~touched], other[~touched])


def copied(tensor: Any) -> Any:
    return tensor.clone(memory_format=torch.contiguous_format)


def raw_storage(tensor: Any) -> Any:
    """Every byte of what the tensor is a view of, copied."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone()


def compare(layers: Layers, expected: list[list[Any]]) -> None:
    for index, halves in enumerate(expected):
        for one, other in zip(layers.logical(index), halves, strict=True):
            assert (one is None) == (other is None)
            assert one is None or same(one, other)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_write_gather_views_and_moves_agree_in_every_layout(
    name: str, dtype: Any, size: Any
) -> None:
    if name == "packed" and size[4] is not None:
        with pytest.raises(InvalidConfig, match="packed holds K and V of one width"):
            made(name, size, dtype)
        return
    layers = made(name, size, dtype)
    for tensor in layers.tensors:
        assert not raw(tensor).any()
    holds(layers, np.random.default_rng(size[0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ADOPTED)
def test_write_gather_views_and_moves_agree_in_adopted_tensors(name: str, dtype: Any) -> None:
    holds(adopted(name, dtype), np.random.default_rng(3))


@given(
    st.sampled_from(LAYOUTS),
    st.tuples(st.integers(2, 9), st.integers(1, 5), st.integers(1, 3), st.integers(1, 9)),
    st.sampled_from(DTYPES),
    st.integers(0, 2**32),
)
def test_write_gather_views_and_moves_agree_in_odd_sizes(
    name: str, size: Any, dtype: Any, seed: int
) -> None:
    holds(made(name, (*size, None), dtype), np.random.default_rng(seed))


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 4)), max_size=5), st.data())
def test_gather_of_any_runs_is_what_views_show(runs: list[tuple[int, int]], data: Any) -> None:
    layers = adopted("packed in each token")
    runs = [(first, min(count, 9 - first)) for first, count in runs]
    blocks = [first + offset for first, count in runs for offset in range(count)]
    tokens = data.draw(st.integers(0, 4 * len(blocks)))
    k, v = layers.gather(1, blocks, tokens)
    assert v is not None
    views = layers.views(1, runs, tokens)
    assert sum(len(part) for part, _ in views) == tokens
    if tokens:
        assert same(torch.cat([raw(part) for part, _ in views]), raw(k))
        assert same(torch.cat([raw(part) for _, part in views]), raw(v))


# -- what each layout can do -----------------------------------------------------------------


@pytest.mark.parametrize("name", CAN)
def test_the_table_says_what_tensors_of_a_layout_can_do(name: str) -> None:
    layers = (
        made(name, SIZES[0], torch.float32) if name in LAYOUTS else adopted("packed in each block")
    )
    assert layers.can == CAN[name]
    if CAN[name]["paged"]:
        layers.paged(0, 8)
    else:
        with pytest.raises(InvalidConfig, match="no single stride"):
            layers.paged(0, 8)


def test_the_table_in_the_docs_is_the_table_in_the_code() -> None:
    lines = (ROOT / "docs" / "layouts.md").read_text().splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    names = [cell.strip("`") for cell in table[0][1:]]
    shown = {
        row[0].replace("`", ""): dict(zip(names, (cell == "yes" for cell in row[1:]), strict=True))
        for row in table[2 : 2 + len(CAN)]
    }
    assert all(cell in ("yes", "no") for row in table[2 : 2 + len(CAN)] for cell in row[1:])
    assert shown == CAN


def test_blocks_are_as_few_regions_as_their_bytes_allow() -> None:
    def count(layers: Layers) -> int:
        return len(layers.storage.regions)

    size = SIZES[0]
    counts = {name: count(made(name, size, torch.float32, num_layers=3)) for name in LAYOUTS}
    assert counts == {"NHD": 6, "HND": 6, "packed": 6, "block_major": 1}
    assert count(adopted("packed in each block")) == 2
    assert count(adopted("packed in each token")) == 2
    assert count(adopted("halves of the last axis")) == 2
    assert count(adopted("gaps between heads")) == 4 * 8
    assert count(adopted("tokens outermost")) == 4 * 4
    assert count(adopted("groups of other shapes")) == 6
    other_widths = made("block_major", SIZES[3], torch.float32, num_layers=3)
    assert other_widths.can["one_descriptor"]


def test_one_head_or_one_token_a_block_may_do_more() -> None:
    assert made("HND", (5, 4, 1, 8, None), torch.float32).can["views"]
    assert made("block_major", (5, 1, 2, 8, None), torch.float32).can["views"]


# -- hazards ---------------------------------------------------------------------------------


def test_hazard_6_pools_of_odd_bytes_and_k_alone_keep_their_bytes() -> None:
    """34 KiB and 18 KiB blocks of quantised bytes, K only."""
    layers = Layers.adopt(
        [filled(9, 16, 1, 2176, dtype=torch.uint8), filled(9, 16, 1, 1152, dtype=FP8)],
        layout="NHD",
        block_size=16,
        num_blocks=9,
    )
    assert layers.storage.block_bytes == (34 + 18) * 1024
    assert [layer.v for layer in layers] == [None, None]
    holds(layers, np.random.default_rng(6))


@pytest.mark.parametrize("name", ["NHD", "HND"])
def test_hazard_7_a_pool_beyond_four_gib_is_addressed_exactly(name: str) -> None:
    """Blocks of 501,120 bytes with as much behind them: stride 1,002,240, block 4286 is past
    4 GiB. The memory is mapped and never touched but for a few pages."""
    stride, n = 1_002_240, 4400
    buffer = torch.empty(n * stride, dtype=torch.uint8)
    shape = (n, 16, 4, 7830) if name == "NHD" else (n, 4, 16, 7830)
    inner = (4 * 7830, 7830, 1) if name == "NHD" else (16 * 7830, 7830, 1)
    k = torch.as_strided(buffer, shape, (stride, *inner))
    layers = Layers.adopt([k], layout=name, block_size=16, num_blocks=n)
    blocks = [2142, 2143, 4285, 4286, 4398, 4399]
    new = filled(len(blocks), 4, 7830, dtype=torch.uint8)
    layers.write(0, new, None, np.array([block * 16 + 5 for block in blocks]))
    for index, block in enumerate(blocks):
        found, _ = layers.gather(0, [block], 16)
        assert same(found[5], new[index])
        assert not found[6].any()
        start = block * stride + (5 * 4 * 7830 if name == "NHD" else 5 * 7830)
        assert torch.equal(buffer[start : start + 7830], new[index, 0])
    CPUMover(layers.storage).move(np.array([[4286, 7], [2143, 4397]], np.uint32))
    for source, block in ((3, 7), (1, 4397)):
        found, _ = layers.gather(0, [block], 16)
        assert same(found[5], new[source])


def test_hazard_7_slot_four_million_is_addressed_exactly() -> None:
    """Slot 4,000,000 x 576 elements is past 2**31, in bytes past 2**32."""
    n = 250_001
    k = torch.empty(n * 16 * 576, dtype=torch.bfloat16).view(n, 16, 1, 576)
    layers = Layers.adopt([k], layout="NHD", block_size=16, num_blocks=n)
    new = filled(2, 1, 576, dtype=torch.bfloat16)
    layers.write(0, new, None, np.array([4_000_000, 3_999_999]))
    found, _ = layers.gather(0, [249_999, 250_000], 17)
    assert same(found[16], new[0])
    assert same(found[15], new[1])
    ((view, _),) = layers.views(0, [(249_999, 2)], 17)
    assert same(view[16], new[0])


@pytest.mark.parametrize("page_size", [1, 2, 4, 8, 16])
def test_hazard_17_a_kernel_of_another_page_size_reads_the_same_tokens(page_size: int) -> None:
    """16 tokens a block: rows of smaller pages name 16 / page_size a block, in order."""
    layers = made("packed", (9, 16, 2, 8, None), torch.float32)
    k, v = (filled(48, 2, 8, dtype=torch.float32, seed=seed) for seed in (1, 2))
    blocks = np.array([4, 0, 7])
    layers.write(1, k, v, (blocks[:, None] * 16 + np.arange(16)).reshape(-1))
    pages = 16 // page_size
    row = (blocks[:, None] * pages + np.arange(pages)).reshape(-1)
    for half, whole, expected in zip(
        layers.paged(1, page_size), layers.logical(1), (k, v), strict=True
    ):
        assert half is not None
        assert whole is not None
        assert half.data_ptr() == whole.data_ptr()
        assert same(half[torch.from_numpy(row)].flatten(0, 1), expected)


def test_pages_of_several_blocks_are_aligned_groups() -> None:
    layers = adopted("packed in each token")
    k, _ = layers.paged(0, 16)
    assert k.shape == (2, 16, 2, 8)  # block 8 fills no page
    assert same(k[1].contiguous(), layers.gather(0, [4, 5, 6, 7], 16)[0])
    for size in (3, 6, 64):
        with pytest.raises(InvalidConfig, match=f"page_size {size} neither divides"):
            layers.paged(0, size)


def test_hazard_18_groups_of_other_strides_stay_inside_their_own_tensors() -> None:
    layers = adopted("groups of other shapes")
    assert {region.stride for region in layers.storage.regions} == {128, 240, 480, 4, 3}
    before = [raw_storage(tensor) for tensor in layers.tensors]
    last = np.array([[7, 0]], np.uint32)
    CPUMover(layers.storage).move(last)
    for tensor, old in zip(layers.tensors, before, strict=True):
        size = len(old) // 9
        new = raw_storage(tensor)
        assert torch.equal(new[:size], old[7 * size : 8 * size])
        assert torch.equal(new[size:], old[size:])


@pytest.mark.parametrize("name", LAYOUTS)
def test_hazard_44_padding_writes_touch_the_null_block_alone(name: str) -> None:
    layers = made(name, SIZES[0], torch.float32)
    null = layers.num_blocks - 1
    padding = torch.full((3, 2, 8), torch.nan)
    layers.write(0, padding, padding, np.array([null * 4, null * 4, null * 4 + 3]))
    for index in range(2):
        for half in layers.logical(index):
            assert half is not None
            assert not half[:null].any()
    assert layers.logical(0)[0][null, 0].isnan().all()


@pytest.mark.parametrize("slot", [-1, 36, -(2**40), 2**40])
@pytest.mark.parametrize("name", LAYOUTS)
def test_hazard_44_a_slot_outside_of_the_pool_writes_nothing(name: str, slot: int) -> None:
    layers = made(name, SIZES[0], torch.float32)
    new = torch.ones(2, 2, 8)
    with pytest.raises(InvalidBlock, match=rf"slots\[1\] is {slot}; .* 0 \.\. 35") as caught:
        layers.write(0, new, new, np.array([3, slot]))
    assert (caught.value.slot, caught.value.index, caught.value.num_blocks) == (slot, 1, 9)
    assert not any(raw(tensor).any() for tensor in layers.tensors)


# -- arguments -------------------------------------------------------------------------------


def test_slots_may_be_read_only_strided_or_a_tensor() -> None:
    layers = made("NHD", SIZES[0], torch.float32)
    new = filled(3, 2, 8, dtype=torch.float32)
    frozen = np.array([1, 9, 30])
    frozen.flags.writeable = False
    for slots in (frozen, np.array([30, 9, 1])[::-1], torch.tensor([1, 9, 30])):
        layers.write(0, new, new, slots)
        assert same(layers.gather(0, [0], 2)[0][1], new[0])
    layers.write(0, new[:0], new[:0], np.zeros(0, np.int64))


@pytest.mark.parametrize(
    ("k", "v", "slots", "sentence"),
    [
        (torch.ones(2, 2, 8), torch.ones(2, 2, 8), np.zeros(3, np.int64), r"k for layer 0 .*\(2,"),
        (torch.ones(3, 2, 8), torch.ones(3, 2, 7), np.zeros(3, np.int64), "v for layer 0 is"),
        (torch.ones(1, 2, 8).half(), torch.ones(1, 2, 8), np.zeros(1, np.int64), "torch.float16"),
        (torch.ones(1, 2, 8), None, np.zeros(1, np.int64), "v for layer 0 is None"),
        ([1], torch.ones(1, 2, 8), np.zeros(1, np.int64), "k for layer 0 is a list"),
        (torch.ones(1, 2, 8), torch.ones(1, 2, 8), np.zeros(1, np.int32), "int64 .* not int32"),
        (torch.ones(1, 2, 8), torch.ones(1, 2, 8), [0], "not list"),
        (torch.ones(1, 2, 8), torch.ones(1, 2, 8), torch.zeros(1, 1).long(), "slots must be"),
    ],
)
def test_a_write_that_does_not_fit_is_refused(k: Any, v: Any, slots: Any, sentence: str) -> None:
    layers = made("NHD", SIZES[0], torch.float32)
    with pytest.raises(InvalidConfig, match=sentence):
        layers.write(0, k, v, slots)
    assert not any(tensor.any() for tensor in layers.tensors)


def test_reads_outside_of_the_pool_are_refused_with_their_numbers() -> None:
    layers = made("NHD", SIZES[0], torch.float32)
    for bad in (-1, 9):
        with pytest.raises(InvalidBlock, match=rf"blocks\[1\] is {bad}; .* 0 \.\. 8") as caught:
            layers.gather(0, [0, bad], 8)
        assert (caught.value.block, caught.value.index) == (bad, 1)
    for bad_run in ((-1, 2), (8, 2), (0, 10), (2, -1)):
        with pytest.raises(InvalidBlock, match="leaves the pool of 9 blocks"):
            layers.views(0, [(0, 1), bad_run, (0, 9)], 8)
    with pytest.raises(InvalidConfig, match="9 tokens need 3 blocks of 4; 2 were given"):
        layers.gather(0, [0, 1], 9)
    with pytest.raises(InvalidConfig, match="9 tokens need 3 blocks of 4; 2 were given"):
        layers.views(0, [(0, 2)], 9)
    with pytest.raises(InvalidConfig, match="blocks must be integers"):
        layers.gather(0, np.array([0.5]).tolist(), 1)
    with pytest.raises(InvalidConfig, match=r"layer must be in 0 \.\. 1"):
        layers.gather(2, [0], 1)
    layers.gather(0, [0, 99], 4)  # what is behind the last token is not read
    assert layers.gather(0, torch.tensor([3, 1]), 8)[0].shape == (8, 2, 8)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"layout": "DNH"}, "layout must be one of NHD, HND, packed, block_major, not 'DNH'"),
        ({"num_layers": 0}, "num_layers must be in 1"),
        ({"num_blocks": 1}, r"num_blocks must be in 2"),
        ({"block_size": True}, "block_size must be an integer"),
        ({"block_size": 0}, "block_size must be in 1"),
        ({"num_kv_heads": 1.5}, "num_kv_heads must be an integer"),
        ({"head_dim": "8"}, "head_dim must be an integer"),
        ({"v_head_dim": -1}, "v_head_dim must be in 0"),
        ({"dtype": torch.complex64}, "dtype must be one of float32, .* not torch.complex64"),
        ({"device": "meta"}, "device is 'meta'; KV lies in host memory"),
        ({"num_blocks": 2**31 - 1, "head_dim": 2**20}, r"needs \d+ bytes; \d+ are available"),
    ],
)
def test_what_cannot_be_allocated_is_refused_before(changed: Any, sentence: str) -> None:
    arguments: Any = {
        "layout": "NHD",
        "num_layers": 1,
        "num_blocks": 3,
        "block_size": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
    }
    with pytest.raises(InvalidConfig, match=sentence):
        Layers.allocate(**{**arguments, **changed})


def nhd(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.zeros(shape or (9, 4, 2, 8), dtype=dtype)


def shrunk() -> Any:
    """A tensor whose storage was taken from under it."""
    tensor = nhd()
    tensor.untyped_storage().resize_(100)
    return tensor


whole = torch.zeros(9 * 64 * 2)


@pytest.mark.parametrize(
    ("tensors", "name", "sentence"),
    [
        ([], "NHD", "at least one layer"),
        (nhd(), "NHD", "takes a list with an entry a layer"),
        ([nhd(), "k"], "NHD", "layer 1 is str"),
        ([(nhd(),)], "NHD", r"layer 0 is \[Tensor\]; a pair"),
        ([(nhd(), np.zeros(3))], "NHD", r"layer 0 is \[Tensor, ndarray\]"),
        ([nhd(9, 4, 16)], "NHD", r"layer 0 k has shape \(9, 4, 16\).* \[9, 4, heads, dim\]"),
        ([(nhd(), nhd(8, 4, 2, 8))], "NHD", r"layer 0 v has shape \(8, 4, 2, 8\)"),
        ([nhd(), nhd(9, 2, 4, 8)], "NHD", r"layer 1 k has shape \(9, 2, 4, 8\)"),
        ([nhd()], "HND", r"layer 0 k has shape .* \[9, heads, 4, dim\]"),
        ([nhd(9, 4, 0, 8)], "NHD", "layer 0 k has shape"),
        ([(nhd(), nhd(dtype=torch.float16))], "NHD", "k is torch.float32 and v is torch.float16"),
        ([(nhd(), nhd(9, 4, 3, 8))], "NHD", "layer 0: k has 2 heads and v 3"),
        ([nhd(dtype=torch.complex64)], "NHD", "layer 0 k: dtype must be one of"),
        ([nhd().to_sparse()], "NHD", "layer 0 k is torch.sparse_coo, not strided"),
        ([torch.zeros(9, 4, 2, 8, device="meta")], "NHD", "layer 0 k is 'meta'"),
        ([nhd(9, 4, 1, 8).expand(9, 4, 2, 8)], "NHD", r"strides \(32, 8, 0, 1\)"),
        ([nhd(1, 4, 2, 8).expand(9, 4, 2, 8)], "NHD", r"strides \(0, 16, 8, 1\)"),
        ([nhd(9, 4, 8, 2).transpose(2, 3)], "NHD", "the last axis needs stride 1"),
        ([nhd(9, 4, 2, 16)[..., ::2]], "NHD", "the last axis needs stride 1"),
        ([whole.as_strided((9, 4, 2, 8), (64, 16, 4, 1))], "NHD", "a step of 16 bytes meets"),
        ([whole.as_strided((9, 4, 2, 8), (32, 16, 8, 1))], "NHD", "layer 0 k: region 0 has a str"),
        ([(whole[:576].view(9, 4, 2, 8),) * 2], "NHD", "layer 0 k and layer 0 v: regions"),
        (
            [whole[:576].view(9, 4, 2, 8), whole[32:608].view(9, 4, 2, 8)],
            "NHD",
            "layer 0 k and layer 1 k: regions 0 and 1 share bytes",
        ),
        ([shrunk()], "NHD", "layer 0 k ends at byte 2304 of a storage of 100"),
        ([nhd(3, 9, 4, 2, 8)], "packed", r"layer 0 packed has shape .* \[2, 9 blocks"),
        ([nhd()], "packed", "layer 0 packed has shape"),
        (nhd(9, 2, 4, 2, 8), "block_major", r"a block_major tensor has shape"),
        (nhd(8, 3, 2, 4, 2, 8), "block_major", r"layer 0 k has shape \(8, 4, 2, 8\)"),
    ],
)
def test_tensors_that_cannot_be_adopted_are_refused_by_name(
    tensors: Any, name: str, sentence: str
) -> None:
    with pytest.raises(InvalidConfig, match=sentence):
        Layers.adopt(tensors, layout=name, block_size=4, num_blocks=9)


def test_what_is_extra_is_checked_as_well() -> None:
    def adopt(extra: Any) -> Layers:
        return Layers.adopt([nhd()], layout="NHD", block_size=4, num_blocks=9, extra=extra)

    for bad, sentence in (
        (torch.zeros(8, 3), r"extra 1 has shape \(8, 3\); \[9, ...\]"),
        (torch.zeros(()), r"extra 1 has shape \(\)"),
        (np.zeros(9), "extra 1 is a ndarray"),
        (torch.zeros(1, 3).expand(9, 3), r"extra 1 .* strides \(0, 1\)"),
    ):
        with pytest.raises(InvalidConfig, match=sentence):
            adopt([torch.zeros(9), bad])
    scales = torch.zeros(9)
    with pytest.raises(InvalidConfig, match="extra 0 and extra 1: regions"):
        adopt([scales, scales])


def test_two_blocks_packed_either_way_are_not_guessed() -> None:
    with pytest.raises(InvalidConfig, match="either may be K and V"):
        Layers.adopt([torch.zeros(2, 2, 4, 2, 8)], layout="packed", block_size=4, num_blocks=2)
    made("packed", (2, 4, 2, 8, None), torch.float32)


def test_tensors_of_inference_mode_are_written_and_moved() -> None:
    with torch.inference_mode():
        k, v = nhd(), nhd()
    layers = Layers.adopt([(k, v)], layout="NHD", block_size=4, num_blocks=9)
    new = torch.ones(1, 2, 8, requires_grad=True)
    layers.write(0, new, new, np.array([5]))
    assert k[1, 1].eq(1).all()
    with torch.inference_mode():
        inside = made("HND", SIZES[0], torch.float32)
    inside.write(0, new, new, np.array([5]))
    assert not inside[0].k.is_inference()


# -- manners ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
def test_dropping_the_layers_frees_the_tensors(name: str) -> None:
    layers = made(name, SIZES[0], torch.float32)
    new = torch.ones(1, 2, 8)
    layers.write(0, new, new, np.array([0]))
    layers.gather(0, [0], 1)
    alive = [weakref.ref(tensor) for tensor in layers.tensors]
    storage = layers.storage
    del layers
    gc.collect()
    assert all(ref() is not None for ref in alive)
    CPUMover(storage).move(np.array([[0, 1]], np.uint32))  # the bytes are there
    del storage
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def test_adopted_tensors_are_kept_alive_by_layers_and_by_nothing_after() -> None:
    k = nhd()
    alive = weakref.ref(k)
    layers = Layers.adopt([k], layout="NHD", block_size=4, num_blocks=9)
    del k
    gc.collect()
    assert alive() is not None
    del layers
    gc.collect()
    assert alive() is None


def test_layers_are_a_sequence_and_tell_what_they_are() -> None:
    layers = made("packed", SIZES[0], torch.float32, num_layers=3)
    assert (len(layers), len(layers[1:]), len(list(layers))) == (3, 2, 3)
    assert layers[-1] is layers[2]
    assert layers[0].packed is layers.tensors[0]
    assert (layers.layout, layers.block_size, layers.num_blocks) == ("packed", 4, 9)
    assert repr(layers) == "Layers(packed, 3 layers, 9 blocks of 4 tokens, 1536 bytes a block)"
    assert made("HND", SIZES[0], torch.float32)[0].k.shape == (9, 2, 4, 8)


def test_without_torch_the_names_say_which_extra_brings_it() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import kvmmu\n"
        "from kvmmu import *\n"
        "for name in ('Layers', 'attend'):\n"
        "    try: getattr(kvmmu, name)\n"
        "    except kvmmu.MissingExtra as error: print(error.extra, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert len(re.findall(r"^torch .*kvmmu\[torch\]", done.stdout, re.M)) == 2
