"""Page tables with mixed page sizes: where the blocks of a sequence lie, and what stays so.

Pools are small and hold contents (``small.py``): every sequence reads its own bytes at the end of
each story, and everything is recounted. ``machine.py`` does the same at random.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from kvmmu import (
    MMU,
    CPUMover,
    Fragmented,
    InvalidConfig,
    LimitExceeded,
    OutOfBlocks,
    Storage,
    run_plan,
)

from .small import SmallPool

HUGE = 512
MIXED: dict[str, Any] = {
    "page_orders": (0, 2, 9),
    "medium_from": 4,
    "huge_from": 16,
    "hold_blocks": 8,
}


def mixed(num_blocks: int, block_size: int = 1, **config: Any) -> SmallPool:
    """A pool with all page sizes, for sequences of any length."""
    return SmallPool(num_blocks, block_size, **{**MIXED, **config})


def ints(start: int, stop: int) -> npt.NDArray[np.int32]:
    return np.arange(start, stop, dtype=np.int32)


def pages(pool: SmallPool, sequence: int) -> dict[int, int]:
    found: dict[int, int] = pool.mmu.info(sequence).pages
    return found


def huge_pages(blocks: list[int]) -> int:
    """How many aligned groups of 512 physical blocks lie in a row in it."""
    together = [
        b % HUGE == 0 and blocks[i : i + HUGE] == [*range(b, b + HUGE)]
        for i, b in enumerate(blocks)
    ]
    return sum(together)


# -- sizes of pages, and no waste ---------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("orders", [(0,), (0, 2), (0, 3, 9), (0, 2, 9), tuple(range(10))])
def test_a_sequence_takes_the_blocks_of_its_tokens_and_no_more(
    block_size: int, orders: tuple[int, ...]
) -> None:
    mmu = MMU(4096, block_size, page_orders=orders, medium_from=0, huge_from=0)
    for blocks in (0, 1, 3, 4, 7, 8, 511, 512, 513, 1023, 1024, 1100):
        for tokens in {blocks * block_size, max(0, blocks * block_size - 1)}:
            sequence = mmu.open(ints(0, tokens))
            states, info = mmu.states(), mmu.info(sequence)
            assert states["in_use"] == info.num_blocks == -(-tokens // block_size)
            assert states["empty"] == 4096 - info.num_blocks, "held blocks are empty ones"
            assert states["held"] == info.held <= 8
            assert sum(n << order for order, n in info.pages.items()) == info.num_blocks
            mmu.validate()
            mmu.close(sequence)
            assert mmu.states()["held"] == 0
    assert mmu.states()["empty"] == 4096


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (511, {0: 511}),
        (512, {2: 128}),
        (2048, {2: 512}),
        (2049, {9: 4, 0: 1}),
        (2561, {9: 5, 0: 1}),
    ],
)
def test_the_length_decides_the_page_sizes(tokens: int, expected: dict[int, int]) -> None:
    mmu = MMU(4096, 1)
    sequence = mmu.open(ints(0, tokens))
    info = mmu.info(sequence)
    assert (info.pages, info.regions) == (expected, tokens // HUGE)
    other = mmu.open(ints(9000, 9000 + 600), page_orders=(0,))
    assert mmu.info(other).pages == {0: 600}, "its own sizes, whatever its length"
    first, huge = mmu.regions(sequence)
    assert first.tolist() == [*range(0, tokens - 511, 512)]
    assert huge.tolist() == [9 in expected] * info.regions
    first, huge = mmu.regions(other)
    assert (first.tolist(), huge.tolist()) == ([0], [False])
    measure = mmu.measure()
    assert measure.regions == info.regions + 1
    assert measure.pages == {**expected, 0: expected.get(0, 0) + 600}


def test_a_pool_without_whole_windows_serves_with_smaller_pages() -> None:
    pool = mixed(1100, hold_blocks=0)
    pins = [pool.alloc(n) for n in (500, 600)]
    pool.truncate(pins[0], 100)
    pool.truncate(pins[1], 100)
    missed = pool.mmu.stats()["huge_missed"]
    sequence = pool.alloc(900)
    assert pool.mmu.info(sequence).num_blocks == 900
    assert pages(pool, sequence).get(9, 0) == huge_pages(pool.blocks(sequence)) <= 1
    assert pool.state("empty") == 0
    assert pool.mmu.stats()["huge_missed"] >= missed
    pool.check()


# -- huge pages that were asked for --------------------------------------------------------------


@pytest.mark.parametrize("tokens", [512, 513, 1030, 1535, 1536, 2048, 2100])
@pytest.mark.parametrize("contiguous", [0, 100, 512])
def test_required_huge_pages_are_there_whatever_the_length(tokens: int, contiguous: int) -> None:
    mmu = MMU(4096, 1)  # below 2,049 tokens its length alone would give it none
    sequence = mmu.open(ints(0, tokens), require="huge", contiguous=contiguous)
    info = mmu.info(sequence)
    assert info.pages[9] == info.regions == tokens // HUGE
    assert huge_pages(mmu.block_table(sequence).tolist()) == tokens // HUGE
    mmu.validate()


def test_required_huge_pages_that_are_not_to_be_had_are_refused() -> None:
    pool = mixed(2048, hold_blocks=0)
    kept = [pool.alloc(512) for _ in range(4)]
    for sequence in kept[:3]:
        pool.truncate(sequence, 1)  # 1,533 blocks are empty, no window is
    pool.mmu.evict(2048)
    before = pool.snapshot()
    for keys in ({}, {"contiguous": 4}, {"anchor": True}):
        with pytest.raises(Fragmented) as caught:
            pool.open(512, require="huge", **keys)
        assert caught.value.available == 1533 >= caught.value.needed
        assert caught.value.largest_run == 511
        assert pool.snapshot() == before
        pool.check()
    pool.free(kept[0])
    pool.mmu.evict(2048)
    one = pool.alloc(600, require="huge")
    assert pages(pool, one)[9] == 1
    with pytest.raises(OutOfBlocks):
        pool.open(2048, require="huge")
    pool.check()


def test_huge_pages_are_refused_where_the_pool_or_the_caller_has_none() -> None:
    cases: list[tuple[MMU, dict[str, Any]]] = [
        (MMU(2048, 1, page_orders=(0, 2)), {}),
        (MMU(2048, 1), {"page_orders": (0, 2)}),
        (MMU(2048, 1, placement="scatter", page_orders=(0, 2)), {}),
    ]
    for mmu, keys in cases:
        with pytest.raises(Fragmented):
            mmu.open(ints(0, 1030), require="huge", **keys)
        assert mmu.states()["empty"] == 2048
        mmu.open(ints(0, 511), require="huge", **keys)  # it has no complete region
        mmu.validate()


@pytest.mark.parametrize("placement", ["address", "fullest", "fifo", "scatter"])
@pytest.mark.parametrize(
    ("config", "keys"), [({"page_orders": (0, 2)}, {}), ({}, {"page_orders": (0, 2)})]
)
@pytest.mark.parametrize("more", [1, 300, 600])
def test_without_huge_pages_none_is_found_in_the_cache_however_it_lies(
    config: dict[str, Any], keys: dict[str, Any], placement: str, more: int
) -> None:
    """512 blocks that lie as a huge page does are none, in a pool or for a prompt that has none."""
    pool = mixed(1536, placement=placement, **config)
    prompt = pool.fresh(HUGE)
    pool.free(pool.alloc(prompt, page_orders=(0, 2)), pool.alloc(pool.fresh(HUGE)))
    tokens = np.array(prompt + pool.fresh(more), np.int32)
    quote = pool.mmu.quote(tokens, require="huge", **keys)
    assert (quote.when, quote.num_cached_tokens) == ("never", 0)
    with pytest.raises(Fragmented) as refused:
        pool.mmu.open(tokens, require="huge", **keys)
    assert refused.value.needed == (HUGE + more) // HUGE * HUGE
    assert refused.value.available == 1536 == quote.available, "cached blocks count"
    pool.check()


def test_a_contiguous_start_that_takes_a_region_does_not_undo_the_huge_pages_required() -> None:
    mmu = MMU(4096, 1)
    before = mmu.states()
    try:
        sequence = mmu.open(ints(0, 1100), require="huge", contiguous=700)
    except Fragmented:
        assert mmu.states() == before
    else:
        assert mmu.info(sequence).pages[9] == 2
        assert mmu.info(sequence).num_runs == 1
    mmu.validate()


def test_required_huge_pages_use_only_whole_huge_pages_of_a_cached_prefix() -> None:
    pool = mixed(4096)
    prompt = pool.fresh(1100)
    pool.free(pool.alloc(prompt))
    sequence = pool.alloc(prompt + pool.fresh(500), require="huge")
    info = pool.mmu.info(sequence)
    assert info.num_cached_tokens == 1024
    assert (info.pages[9], info.regions) == (3, 3)
    pool.check()


# -- a contiguous start --------------------------------------------------------------------------


def test_the_first_tokens_lie_in_one_run_or_the_prompt_is_refused() -> None:
    pool = mixed(256, 16, hold_blocks=0)
    many = sorted((pool.alloc(16) for _ in range(256)), key=pool.blocks)
    pool.free(*many[::2])
    pool.mmu.evict(256)
    before = pool.snapshot()
    with pytest.raises(Fragmented) as caught:
        pool.open(40 * 16, contiguous=17)
    assert (caught.value.needed, caught.value.largest_run) == (2, 1)
    with pytest.raises(Fragmented):
        pool.open(16 * 16, contiguous=16 * 16)
    assert pool.snapshot() == before
    pool.alloc(40 * 16, contiguous=16)
    pool.free(*many[1::2])
    pool.mmu.evict(256)
    sequence = pool.alloc(60 * 16, contiguous=24 * 16 - 3)
    blocks = pool.blocks(sequence)
    assert blocks[:24] == [*range(blocks[0], blocks[0] + 24)]
    pool.check()


def test_a_contiguous_start_longer_than_the_prompt_is_the_whole_prompt() -> None:
    pool = mixed(2048)
    sequence = pool.alloc(1300, contiguous=2000)
    assert pool.mmu.info(sequence).num_runs == 1
    pool.check()


def test_a_contiguous_start_asks_for_no_huge_pages_behind_it() -> None:
    """What is required is the run; that the rest finds no whole window refuses nobody."""
    pool = mixed(2048, hold_blocks=0, anchor=0.0)
    kept = [pool.alloc(HUGE) for _ in range(4)]
    for sequence in kept:
        pool.truncate(sequence, 1)
    pool.mmu.evict(2048)
    sequence = pool.alloc(1100, contiguous=300)
    blocks = pool.blocks(sequence)
    assert blocks[:300] == [*range(blocks[0], blocks[0] + 300)]
    pool.check()


def test_cached_blocks_make_room_for_a_contiguous_start() -> None:
    pool = mixed(1024, hold_blocks=0, anchor=0.0)
    cached = [pool.alloc(64, page_orders=(0,)) for _ in range(16)]
    pool.free(*cached[::3], *cached[1::3])
    assert pool.state("empty") == 0
    sequence = pool.alloc(128, contiguous=128)
    assert pool.mmu.info(sequence).num_runs == 1
    pool.check()


def answer(pool: SmallPool, tokens: list[int], **keys: Any) -> tuple[str, int | None]:
    """What ``quote`` says, held against what ``open`` then does: the sequence, if it was opened."""

    def seen() -> Any:
        states, *rest = pool.snapshot()
        return {name: n for name, n in states.items() if name != "held"}, rest

    before = pool.snapshot()
    quote = pool.mmu.quote(np.array(tokens, np.int32), **keys)
    assert pool.snapshot() == before
    before = seen()
    try:
        sequence = pool.open(tokens, **keys)
    except (OutOfBlocks, LimitExceeded):
        assert quote.when in ("moves", "frees", "never")
        assert (quote.when == "moves") == (quote.moves > 0)
        assert seen() == before, "holds may have been broken, no more"
        return quote.when, None
    assert quote.when == "now"
    info = pool.mmu.info(sequence)
    assert quote.num_cached_tokens == info.num_cached_tokens
    assert quote.needed == info.num_blocks - info.num_cached_tokens // pool.block_size
    return quote.when, sequence


def test_quote_says_whether_a_required_shape_is_to_be_had_now() -> None:
    pool = mixed(2048, hold_blocks=0)
    kept = [pool.alloc(HUGE) for _ in range(4)]
    pool.truncate(kept[0], 1)  # its other 511 blocks stay cached
    huge = {"require": "huge"}
    assert answer(pool, pool.fresh(512), **huge) == ("frees", None)
    assert answer(pool, pool.fresh(300), contiguous=400)[0] == "now"
    assert answer(pool, pool.fresh(300), contiguous=400) == ("frees", None)
    pool.free(kept[1])  # a window of cached blocks only
    when, one = answer(pool, pool.fresh(600), **huge)
    assert (when, pool.mmu.info(one or 0).pages[9]) == ("now", 1)
    assert answer(pool, pool.fresh(512), **huge) == ("frees", None)
    pool.write(one or 0)
    pool.check()


def test_quote_knows_that_a_cached_prefix_keeps_its_window() -> None:
    pool = mixed(1024, hold_blocks=0, anchor=0.0)
    prompt = pool.fresh(513)
    pool.free(pool.alloc(prompt))
    other = pool.alloc(1)
    # One window has the cached page that matches, the other has somebody in it.
    longer = [*prompt[:512], *pool.fresh(512)]
    assert answer(pool, longer, require="huge") == ("frees", None)
    when, one = answer(pool, [*prompt[:512], *pool.fresh(100)], require="huge")
    assert when == "now" and one is not None
    pool.free(other, one)
    assert answer(pool, pool.fresh(512), require="huge")[0] == "now"


def test_quote_says_never_where_no_such_pool_has_the_shape() -> None:
    huge: dict[str, Any] = {"require": "huge"}
    assert answer(mixed(1023), list(range(1023)), **huge)[0] == "now", "one complete region"
    spoilt = MMU(1024, 1, null_block="first")  # the null block lies in the first of two windows
    assert spoilt.quote(ints(0, 600), require="huge").when == "now"
    assert spoilt.quote(ints(0, 1024), require="huge").when == "never"
    with pytest.raises(Fragmented):
        spoilt.open(ints(0, 1024), require="huge")
    spoilt.open(ints(0, 600), require="huge")
    orders = {"page_orders": (0, 2)}
    for config in (orders, {**orders, "placement": "fifo"}, {**orders, "placement": "scatter"}):
        pool = mixed(2048, **config)
        assert answer(pool, pool.fresh(512), **huge) == ("never", None)
        assert answer(pool, pool.fresh(511), **huge)[0] == "now", "it has no complete region"
    fifo = mixed(64, placement="fifo")
    assert answer(fifo, fifo.fresh(9), contiguous=2) == ("never", None)
    assert answer(fifo, fifo.fresh(9), contiguous=1)[0] == "now"
    assert answer(mixed(64), list(range(65)), contiguous=65) == ("never", None)
    assert answer(mixed(64, page_orders=(0, 2)), list(range(64)), contiguous=64)[0] == "now"
    with pytest.raises(InvalidConfig):
        mixed(64).mmu.quote(ints(0, 9), page_orders=(0, 3))


@pytest.mark.parametrize("seed", range(20))
def test_quote_and_open_agree_whatever_lies_in_the_pool(seed: int) -> None:
    r = np.random.default_rng(seed)
    pool = mixed(3072, hold_blocks=int(r.integers(0, 9)), anchor=float(r.choice([0.0, 0.3])))
    said = set()
    prompts: list[list[int]] = []
    for _ in range(120):
        if pool.tokens and r.random() < 0.5:
            one = list(pool.tokens)[int(r.integers(len(pool.tokens)))]
            length = len(pool.tokens[one])
            pool.truncate(one, int(r.integers(length + 1))) if r.random() < 0.3 else pool.free(one)
        tokens = pool.fresh(int(r.choice([1, 30, 500, 512, 700, 1100])))
        if prompts and r.random() < 0.4:
            tokens = prompts[int(r.integers(len(prompts)))] + tokens
        keys: dict[str, Any] = {}
        if r.random() < 0.5:
            keys["require"] = "huge"
        if r.random() < 0.5:
            keys["contiguous"] = int(r.integers(1, 513 if keys else 1500))
        when, sequence = answer(pool, tokens, **keys)
        said.add(when)
        if sequence is not None:
            pool.write(sequence)
            prompts.append(tokens)
    assert "now" in said and len(said) > 1
    pool.check()


# -- promotion -----------------------------------------------------------------------------------


def test_a_sequence_that_grows_in_place_comes_to_larger_pages() -> None:
    pool = mixed(2048)
    sequence = pool.alloc(1)
    for _ in range(2 * HUGE):
        pool.append(sequence, 1)
        info = pool.mmu.info(sequence)
        assert sum(n << order for order, n in info.pages.items()) == info.num_blocks
    stats = pool.mmu.stats()
    assert stats["promotions"] >= 2 * HUGE // 4 - 8, "nearly every four have become one"
    assert stats["grown_in_place"] >= 2 * HUGE - 16
    whole = huge_pages(pool.blocks(sequence))
    assert pages(pool, sequence).get(9, 0) <= whole
    pool.check()


def test_512_blocks_that_grew_together_become_one_page() -> None:
    pool = mixed(2048, prefix_caching=False)
    sequence = pool.alloc(2 * HUGE)  # ends at the end of a page
    assert pages(pool, sequence) == {9: 2}
    pool.truncate(sequence, HUGE + 4)
    assert pages(pool, sequence) == {9: 1, 2: 1}
    splits = pool.mmu.stats()["splits"]
    assert splits > 0
    for _ in range(HUGE - 4):
        pool.append(sequence, 1)
    assert pages(pool, sequence) == {9: 2}, "it grew back to where it was"
    assert pool.mmu.stats()["splits"] == splits
    pool.check()


# -- splits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", ["parent", "child"])
def test_copy_on_write_in_a_huge_page_copies_one_block(writer: str) -> None:
    pool = mixed(2048, 4)
    parent = pool.alloc(4 * HUGE - 1)
    assert pages(pool, parent) == {0: 3, 2: 127} or pages(pool, parent) == {9: 1}
    child = pool.fork(parent)
    shape, blocks = pages(pool, parent), pool.blocks(parent)
    writing, other = (parent, child) if writer == "parent" else (child, parent)
    copies = pool.append(writing, 1)
    assert len(copies) == 1 and pool.mmu.stats()["copied_on_write"] == 1
    assert copies[0].tolist() == [blocks[-1], pool.blocks(writing)[-1]]
    assert pool.blocks(writing)[:-1] == blocks[:-1] and pool.blocks(other) == blocks
    assert pages(pool, other) == shape == {9: 1}
    assert 9 not in pages(pool, writing) and pages(pool, writing)[2] == 127
    assert pool.refs(other) == [2] * (HUGE - 1) + [1]
    pool.check()
    pool.free(writing)
    assert pool.refs(other) == [1] * HUGE
    pool.check()


@pytest.mark.parametrize("kept", [1, 511, 512, 513, 516, 1023, 1024, 1027])
@pytest.mark.parametrize("shared", [False, True])
def test_truncation_splits_only_the_page_that_it_ends_in(kept: int, shared: bool) -> None:
    pool = mixed(3072)
    sequence = pool.alloc(1100)
    blocks = pool.blocks(sequence)
    assert pages(pool, sequence) == {9: 2, 2: 19}
    other = pool.fork(sequence) if shared else None
    pool.truncate(sequence, kept)
    assert pool.blocks(sequence) == blocks[:kept]
    inside, rest = divmod(kept, HUGE)
    expected = {9: inside, 2: rest // 4, 0: rest % 4}
    assert pages(pool, sequence) == {order: n for order, n in expected.items() if n}
    if other is not None:
        assert pages(pool, other) == {9: 2, 2: 19}
        assert pool.refs(other) == [2] * kept + [1] * (1100 - kept)
    pool.append(sequence, 30)
    pool.check()


def test_release_before_splits_the_page_that_it_begins_in() -> None:
    pool = mixed(3072, prefix_caching=False)
    sequence = pool.alloc(1100)
    child = pool.fork(sequence)
    blocks, null = pool.blocks(sequence), pool.mmu.null_block
    released = 0
    for token, shape in ((3, {9: 1, 2: 146, 0: 1}), (512, {9: 1, 2: 19}), (1030, {2: 17, 0: 2})):
        assert pool.mmu.release_before(sequence, token) == token - released
        released = token
        assert pool.blocks(sequence) == [null] * token + blocks[token:]
        assert pages(pool, sequence) == shape
        assert pages(pool, child) == {9: 2, 2: 19}
        pool.check()
    for refused in (
        lambda: pool.mmu.truncate(sequence, 1030),
        lambda: pool.mmu.lease(sequence, 1029, 1100),
        lambda: pool.mmu.release_before(sequence, 1101),
    ):
        with pytest.raises(InvalidConfig):
            refused()
    assert pool.mmu.release_before(sequence, 1100) == 69, "the last block stays"
    assert pool.mmu.release_before(sequence, 1100) == 0
    grandchild = pool.fork(sequence)
    assert pool.mmu.info(grandchild).num_released == 1099
    pool.free(child)
    assert pool.state("in_use") == 1
    pool.append(sequence, 5)
    pool.check()


def test_moves_and_rows_of_shared_huge_pages_keep_every_byte() -> None:
    pool = mixed(2048)
    first = pool.alloc(700)
    sequence = pool.alloc(700)
    child = pool.fork(sequence)
    pool.mmu.release_before(child, 300)
    pool.free(first)
    pool.mmu.evict(2048)
    before = pool.mmu.stats()["moves_committed"]
    huge = pages(pool, sequence)
    pool.run(pool.mmu.plan_below(0.0))
    assert pool.mmu.stats()["moves_committed"] >= before
    assert pages(pool, sequence).get(9, 0) == huge[9], "a huge page is not taken apart for a run"
    pool.check()


# -- virtual alignment ---------------------------------------------------------------------------


def test_a_hit_maps_the_huge_pages_of_its_donor() -> None:
    pool = mixed(8192)
    stem = pool.fresh(100)
    pool.free(pool.alloc([*stem, 1]))
    donor_tokens = stem + pool.fresh(1000)
    donor = pool.alloc(donor_tokens)
    # Behind 100 blocks of somebody else, its own part begins aligned.
    assert pool.mmu.info(donor).num_cached_tokens == 100
    blocks = pool.blocks(donor)
    assert pages(pool, donor)[9] == 1 and blocks[100] % HUGE == 0
    # The next takes the donor's offset, though its own part begins anywhere.
    taker = pool.alloc(donor_tokens + pool.fresh(700))
    info = pool.mmu.info(taker)
    assert info.num_cached_tokens >= 1099
    assert pool.blocks(taker)[:1099] == blocks[:1099]
    assert info.pages[9] >= 1
    assert info.pages[9] == huge_pages(pool.blocks(taker))
    pool.check()
    pool.free(donor)
    pool.check()
    assert pages(pool, taker) == info.pages


def test_a_prefix_of_1100_blocks_is_mapped_by_its_huge_pages() -> None:
    pool = mixed(4096)
    prompt = pool.fresh(1100)
    pool.free(pool.alloc([*prompt, 7]))
    taker = pool.alloc(prompt + pool.fresh(300))
    assert pool.mmu.info(taker).num_cached_tokens == 1100
    assert pages(pool, taker)[9] == 2
    part = pool.alloc(prompt[:600] + pool.fresh(10))
    assert pool.mmu.info(part).num_cached_tokens == 600
    assert pages(pool, part)[9] == 1
    pool.check()


# -- holds ---------------------------------------------------------------------------------------


def test_a_sequence_grows_into_its_hold() -> None:
    pool = mixed(256)
    sequences = [pool.alloc(5) for _ in range(4)]
    assert pool.state("held") == sum(pool.mmu.info(s).held for s in sequences) == 32
    assert pool.state("empty") == 236 == pool.free_blocks
    for _ in range(8):
        for sequence in sequences:
            pool.append(sequence, 1)
    for sequence in sequences:
        blocks = pool.blocks(sequence)
        assert blocks == [*range(blocks[0], blocks[0] + 13)]
        assert pool.mmu.info(sequence).num_runs == 1
    pool.check()


def test_holds_are_broken_for_whoever_needs_their_blocks() -> None:
    pool = mixed(64)
    sequences = [pool.alloc(4) for _ in range(5)]
    held = pool.state("held")
    assert held > 0
    everything = pool.alloc(44)
    stats = pool.mmu.stats()
    assert pool.state("empty") == pool.state("held") == 0
    assert stats["holds_broken"] > 0
    with pytest.raises(OutOfBlocks) as caught:
        pool.append(sequences[0], 3)
    assert (caught.value.needed, caught.value.available) == (3, 0)
    pool.free(everything)
    pool.check()


def test_a_refusal_counts_what_a_sequence_holds_itself() -> None:
    pool = mixed(16, hold_blocks=2, prefix_caching=False)
    pool.alloc(10)
    sequence = pool.alloc(4)
    for tokens in (3, 4, 9):
        with pytest.raises(OutOfBlocks) as caught:
            pool.append(sequence, tokens)
        assert (caught.value.needed, caught.value.available) == (tokens, 2)
        assert pool.free_blocks == pool.state("empty") == 2
        step = pool.mmu.begin_step()
        with pytest.raises(OutOfBlocks) as caught:
            pool.mmu.prepare(
                step,
                np.array([sequence], np.int64),
                pool.tables,
                query_lens=np.array([tokens], np.int32),
            )
        assert (caught.value.needed, caught.value.available) == (tokens, 2)
        pool.mmu.end_step(step)
        pool.check()
    pool.append(sequence, 2)
    pool.check()


@pytest.mark.parametrize("placement", ["fifo", "fullest", "scatter"])
def test_other_placements_hold_nothing(placement: str) -> None:
    pool = mixed(64, placement=placement)
    pool.alloc(20)
    assert pool.state("held") == 0
    pool.check()


# -- equal blocks once ---------------------------------------------------------------------------


@pytest.mark.parametrize("dedup", [False, True])
def test_a_block_computed_twice_is_kept_once_if_asked(dedup: bool) -> None:
    pool = mixed(2048, dedup=dedup)
    prompt = pool.fresh(600)
    one, other = pool.open(prompt), pool.open(prompt)  # neither finds the other's blocks
    assert not set(pool.blocks(one)) & set(pool.blocks(other))
    pool.write(one, other)
    same = sum(a == b for a, b in zip(pool.blocks(one), pool.blocks(other), strict=True))
    assert same == pool.mmu.stats()["deduplicated"]
    assert same == (600 if dedup else 0)
    assert pool.state("in_use") == 1200 - same
    pool.check()
    pool.append(one, 2)
    pool.free(one)
    pool.check()
    assert pool.match([*prompt, 1]) == 600


def test_dedup_compares_tokens_and_keys() -> None:
    pool = mixed(256, 4, dedup=True)
    one = pool.open([1] * 16)
    others = [
        pool.open([*[1] * 15, 2]),
        pool.open([1] * 16, seed=1, salt=b"tenant"),
        pool.open([1] * 16, seed=2, extra_keys={0: b"image"}),
    ]
    pool.write(one, *others)
    assert pool.blocks(others[0])[:3] == pool.blocks(one)[:3]
    assert pool.blocks(others[0])[3] != pool.blocks(one)[3]
    for other in others[1:]:
        assert not set(pool.blocks(other)) & set(pool.blocks(one))
    assert pool.mmu.stats()["deduplicated"] == 3
    pool.check()


# -- long runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
def test_a_sliding_window_of_1000_steps_keeps_its_blocks_bounded(caching: bool) -> None:
    window, size = 64, 4
    pool = mixed(300, size, prefix_caching=caching)
    sequence = pool.alloc(100)
    most = window // size + 3
    for step in range(1000):
        pool.append(sequence, 1)
        length = pool.mmu.info(sequence).num_tokens
        pool.mmu.release_before(sequence, length - window)
        info = pool.mmu.info(sequence)
        assert info.num_blocks - info.num_released <= most
        assert info.num_released * size <= length - window
        assert pool.state("in_use") <= most
        if step % 50 == 0:
            pool.check()
    assert pool.mmu.info(sequence).num_released >= 1000 // size
    pool.check()
    pool.free(sequence)
    pool.mmu.evict(300)
    assert pool.state("empty") == 300


class Contents:
    """What each position of each sequence should hold, and the memory under it: values that depend
    on all tokens up to a position, kept as they grow, for runs of thousands of steps."""

    def __init__(self, mmu: MMU, rows: int, width: int) -> None:
        self.mmu = mmu
        self.memory = np.zeros((mmu.num_blocks + 1, mmu.block_size), np.uint64)
        self.mover = CPUMover(Storage.from_numpy([self.memory]))
        self.tables = mmu.register_tables(
            np.zeros((rows, width), np.int32),
            np.zeros(rows, np.int32),
            np.zeros(rows * width * mmu.block_size, np.int64),
            np.zeros(rows + 1, np.int32),
        )
        self.values: dict[int, list[int]] = {}

    def extend(self, sequence: int, tokens: npt.NDArray[np.int32]) -> None:
        values = self.values[sequence]
        value = values[-1] if values else 1
        for token in tokens.tolist():
            value = (value ^ (token + 1)) * 0xBF58_476D_1CE4_E5B9 % 2**64
            value ^= value >> 31
            values.append(value)

    def open(self, tokens: npt.NDArray[np.int32]) -> int:
        sequence = self.mmu.open(tokens)
        self.values[sequence] = []
        self.extend(sequence, tokens)
        self.write([sequence])
        return sequence

    def fork(self, sequence: int) -> int:
        child = self.mmu.fork(sequence)
        self.values[child] = list(self.values[sequence])
        return child

    def append(self, sequence: int, tokens: npt.NDArray[np.int32]) -> None:
        self.mover.move(self.mmu.append(sequence, tokens))
        self.extend(sequence, tokens)

    def truncate(self, sequence: int, length: int) -> None:
        self.mmu.truncate(sequence, length)
        del self.values[sequence][length:]

    def close(self, sequence: int) -> None:
        self.mmu.close(sequence)
        del self.values[sequence]

    def write(
        self, sequences: list[int], new_tokens: list[npt.NDArray[np.int32]] | None = None
    ) -> None:
        """Schedules what each lacks, ``new_tokens`` behind its end among it, and writes that."""
        infos = [self.mmu.info(sequence) for sequence in sequences]
        for sequence, tokens in zip(sequences, new_tokens or [], strict=new_tokens is not None):
            self.extend(sequence, tokens)
        done = [info.num_scheduled for info in infos]
        lens = [len(self.values[s]) - n for s, n in zip(sequences, done, strict=True)]
        step = self.mmu.begin_step()
        copies = self.mmu.prepare(
            step,
            np.array(sequences, np.int64),
            self.tables,
            query_lens=np.array(lens, np.int32),
            new_tokens=None if new_tokens is None else np.concatenate(new_tokens),
        )
        self.mover.move(copies)
        slots = self.tables.slot_mapping[: self.tables.num_tokens]
        written = [self.values[s][n:] for s, n in zip(sequences, done, strict=True)]
        self.memory.reshape(-1)[slots] = np.array([*chain.from_iterable(written)], np.uint64)
        self.mmu.written(step)
        self.mmu.end_step(step)

    def check(self) -> None:
        """Every open sequence reads its own bytes through its exported row."""
        sequences = sorted(self.values)
        self.mmu.export(np.array(sequences, np.int64), self.tables)
        self.mmu.validate(self.tables)
        for row, sequence in enumerate(sequences):
            positions = np.arange(self.mmu.info(sequence).num_written)
            blocks = self.tables.block_table[row][positions // self.mmu.block_size]
            found = self.memory[blocks, positions % self.mmu.block_size]
            expected = np.array(self.values[sequence][: len(positions)], np.uint64)
            np.testing.assert_array_equal(found, expected)

    def clean(self) -> None:
        """Closes everything and drops the cache."""
        for sequence in list(self.values):
            self.close(sequence)
        self.mmu.evict(self.mmu.num_blocks)


def three(r: np.random.Generator, count: int) -> npt.NDArray[np.int32]:
    """Tokens of three kinds, so that prompts often begin alike."""
    return r.integers(0, 3, count).astype(np.int32)


@pytest.mark.parametrize("orders", [(0,), (0, 2, 9)])
def test_speculative_decoding_does_not_drift(orders: tuple[int, ...]) -> None:
    """10,000 steps: guesses are appended and scheduled, and those that are wrong are cut off."""
    r = np.random.default_rng(5)
    mmu = MMU(2048, 4, **{**MIXED, "page_orders": orders})
    cache = Contents(mmu, 4, 1024)
    cache.open(ints(0, 1))  # the upper levels of the table stay
    cache.clean()
    beginning, nodes = mmu.states(), mmu.measure().table_nodes
    tables = cache.tables
    pointers = [tables.block_table.ctypes.data, tables.slot_mapping.ctypes.data]
    found = 0
    prompt = three(r, 1)
    for step in range(10_000):
        while len(cache.values) < 4:
            alike = prompt[: int(r.integers(len(prompt) + 1))]
            prompt = np.concatenate([alike, three(r, int(r.integers(1, 450)))])[:900]
            sequence = cache.open(prompt)
            found += mmu.info(sequence).num_cached_tokens
        running = list(cache.values)
        guesses = [three(r, n) for n in r.integers(1, 8, 4).tolist()]
        cache.write(running, guesses)
        for sequence, guess in zip(running, guesses, strict=True):
            length = mmu.info(sequence).num_tokens
            cache.truncate(sequence, length - int(r.integers(0, len(guess))))
            assert mmu.info(sequence).num_blocks == -(-mmu.info(sequence).num_tokens // 4)
        if step % 100 == 0:
            cache.check()
        if r.random() < 0.05:
            cache.close(running[int(r.integers(4))])
    assert found > 10_000, "prompts shared blocks that were cut behind and written again"
    assert pointers == [tables.block_table.ctypes.data, tables.slot_mapping.ctypes.data]
    cache.clean()
    mmu.validate()
    assert (mmu.states(), mmu.measure().table_nodes) == (beginning, nodes)


@pytest.mark.parametrize("orders", [(0,), (0, 2, 9)])
def test_beam_search_does_not_drift(orders: tuple[int, ...]) -> None:
    """10,000 steps of four beams: each step some end and others take their places."""
    r = np.random.default_rng(6)
    mmu = MMU(2048, 4, max_sequences=16, **{**MIXED, "page_orders": orders})
    cache = Contents(mmu, 4, 1024)
    cache.open(ints(0, 1))  # the upper levels of the table stay
    cache.clean()
    beginning, nodes = mmu.states(), mmu.measure().table_nodes
    beams: list[int] = []
    for step in range(10_000):
        if not beams:
            beams = [cache.open(three(r, 2047 - int(r.integers(0, 9))))]
            beams += [cache.fork(beams[0]) for _ in range(3)]
        order = r.integers(0, 4, 4)
        kept = sorted(set(order.tolist()))
        chosen = [beams[at] for at in kept]
        for at in set(range(4)) - set(kept):
            cache.close(beams[at])
        for at in order.tolist():
            if at in kept:
                kept.remove(at)
            else:
                chosen.append(cache.fork(beams[at]))
        beams = chosen
        if step % 2:  # both ways to grow
            cache.write(beams, [three(r, 1) for _ in beams])
        else:
            for beam in beams:
                cache.append(beam, three(r, 1))
            cache.write(beams)
        if step % 100 == 0:
            cache.check()
        if r.random() < 0.01:
            for beam in beams:
                cache.close(beam)
            beams = []
    assert mmu.stats()["copied_on_write"] > 1000
    cache.clean()
    mmu.validate()
    assert (mmu.states(), mmu.measure().table_nodes) == (beginning, nodes)


# -- limits, one past the edge -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("max_blocks_per_sequence", 262_145, "262144"),
        ("hold_blocks", 513, "512"),
        ("hold_blocks", -1, "allowed"),
        ("page_orders", (0, 10), "0 to 9"),
        ("page_orders", (1, 2), "0 among them"),
        ("page_orders", (), "0 among them"),
        ("medium_from", 2049, "2048"),
        ("medium_from", -1, "4294967295"),
        ("huge_from", 2**32, "4294967295"),
    ],
)
def test_one_past_the_edge_is_refused_by_name(name: str, value: Any, said: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        MMU(300_000, 1, **{name: value})
    assert name in str(caught.value) and said in str(caught.value)


def test_the_longest_sequence_of_huge_pages_is_refused_one_token_later() -> None:
    """Kind 48."""
    limit = 262_144
    mmu = MMU(limit + HUGE, 1, max_blocks_per_sequence=limit)
    sequence = mmu.open(np.zeros(limit, np.int32))
    assert mmu.info(sequence).pages == {9: HUGE}
    with pytest.raises(LimitExceeded) as caught:
        mmu.append(sequence, ints(0, 1))
    assert (caught.value.needed, caught.value.limit) == (limit + 1, limit)
    assert mmu.look(sequence, limit - 1) == int(mmu.block_table(sequence)[-1])
    assert mmu.look(sequence, limit) is None
    mmu.close(sequence)
    mmu.validate()


def test_shapes_that_no_pool_has_are_refused_by_name() -> None:
    mmu = MMU(64, 4, page_orders=(0, 2))
    for keys in (
        {"page_orders": (0, 3)},
        {"page_orders": (2,)},
        {"require": "big"},
        {"contiguous": -1},
        {"contiguous": 2**32},
    ):
        (name,) = keys
        with pytest.raises(InvalidConfig, match=name.replace("page_orders", "page.order")):
            mmu.open(ints(0, 4), **keys)
    assert mmu.states()["empty"] == 64


# -- hazards that bear on tables -------------------------------------------------------------------


def test_a_hole_of_3000_blocks_stops_no_compaction() -> None:
    """Kind 4. Used: block 0 and 1,096 at the other end."""
    pool = mixed(4096, 4, hold_blocks=0, page_orders=(0, 2))
    one = pool.alloc(1)
    hole = pool.alloc(4 * 2999)
    rest = pool.alloc(4 * 1096)
    pool.free(hole)
    pool.mmu.evict(4096)
    plan = pool.mmu.plan_free_run(pool.free_blocks)
    assert plan.complete
    pool.run(plan)
    assert pool.mmu.measure().largest_run_available == pool.free_blocks
    pool.check()
    pool.free(one, rest)


def test_survivors_that_pin_a_page_each_are_known_to_the_eviction() -> None:
    """Kind 13. Three of four huge pages keep one block in use; what is dropped for a huge page is
    what makes a window whole, though it was used last."""
    pool = mixed(4 * HUGE, hold_blocks=0)
    cached = [pool.alloc(HUGE) for _ in range(4)]
    whole = pool.blocks(cached[3])
    for sequence in cached[:3]:
        pool.mmu.pin(np.array(pool.blocks(sequence)[-1:], np.int64))
    pool.free(*cached)
    assert pool.state("cached") == 4 * HUGE - 3
    sequence = pool.alloc(HUGE, require="huge")
    assert pages(pool, sequence) == {9: 1}
    assert pool.blocks(sequence) == whole
    pool.check()


@pytest.mark.parametrize("num_blocks", [1, 3, 511, 513, 1027])
def test_pages_that_do_not_divide_the_pool_lie_within_it(num_blocks: int) -> None:
    """Kind 14. Page sizes are powers of two, so a smaller page divides each larger one, and what is
    no such size is refused; a pool need not be a multiple of any: its last blocks serve as smaller
    pages."""
    pool = mixed(num_blocks, medium_from=0, huge_from=0, hold_blocks=0)
    sequence = pool.alloc(num_blocks)
    assert sorted(pool.blocks(sequence)) == [*range(num_blocks)]
    assert pages(pool, sequence).get(9, 0) == num_blocks // HUGE
    pool.check()
    wrong: list[Any] = [(1, 2), (0, -1), (0, 2.5), (0, 10)]
    for orders in wrong:
        with pytest.raises(InvalidConfig, match=r"page.orders"):
            MMU(64, 16, page_orders=orders)


def test_page_sizes_never_blow_up_what_a_sequence_takes() -> None:
    """Kind 16. Two sizes without a common divisor made 13,824 tokens the least that could be
    claimed. Here each page is a multiple of every smaller one: one token takes one block under any
    set of sizes, and one more where the last is full, never a page."""
    for orders in ((0, 9), (0, 3, 9), (0, 2, 9), (0, 5, 7), tuple(range(10))):
        mmu = MMU(4096, 16, page_orders=orders, medium_from=0, huge_from=0)
        for tokens in (1, 16, 17, 13_824, 13_825):
            sequence = mmu.open(ints(0, tokens))
            assert mmu.states()["in_use"] == -(-tokens // 16), orders
            mmu.close(sequence)
            mmu.evict(4096)


def test_regions_of_different_strides_keep_each_to_its_own_memory() -> None:
    """Kind 18. Two groups behind one table, blocks of 24 and of 1,000 bytes with gaps between: each
    is moved and copied by its own stride, and what lies between stays."""
    num_blocks, filler = 64, 0xA5
    mmu = MMU(num_blocks, 4, page_orders=(0, 2), medium_from=0, hold_blocks=0)
    backing = [np.full((num_blocks + 1, stride), filler, np.uint8) for stride in (40, 1024)]
    regions = [backing[0][:, :24], backing[1][:, :1000]]
    mover = CPUMover(Storage.from_numpy(regions))
    first, second = mmu.open(ints(0, 80)), mmu.open(ints(100, 170))
    step = mmu.begin_step()
    tables = mmu.register_tables(
        np.zeros((2, num_blocks), np.int32),
        np.zeros(2, np.int32),
        np.zeros(256, np.int64),
        np.zeros(3, np.int32),
    )
    both = np.array([first, second], np.int64)
    mmu.prepare(step, both, tables, query_lens=np.array([80, 70], np.int32))
    for region, scale in zip(regions, (1, 3), strict=True):
        for index, block in enumerate(mmu.block_table(second).tolist()):
            region[block] = scale * (index + 1)
    mmu.written(step)
    mmu.end_step(step)
    child = mmu.fork(second)
    mmu.close(first)
    mmu.evict(num_blocks)
    before = mmu.block_table(second).tolist()
    assert run_plan(mmu, mover, mmu.plan_free_run(46)) > 0
    mover.move(mmu.append(child, ints(0, 1)))
    assert mmu.block_table(second).tolist() != before
    assert mmu.block_table(child)[-1] != mmu.block_table(second)[-1]
    for region, scale in zip(regions, (1, 3), strict=True):
        for sequence in (second, child):
            for index, block in enumerate(mmu.block_table(sequence).tolist()):
                assert (region[block] == scale * (index + 1)).all()
    assert (backing[0][:, 24:] == filler).all() and (backing[1][:, 1000:] == filler).all()
    mmu.validate(tables)


def test_a_sequence_of_mixed_pages_fails_at_its_last_block_and_leaks_none() -> None:
    """Kind 15."""
    for blocks in (3, 512, 1027):
        pool = mixed(blocks + 1)
        pool.alloc(1, page_orders=(0,))
        with pytest.raises(OutOfBlocks) as caught:
            pool.open(blocks + 1)
        assert (caught.value.needed, caught.value.available) == (blocks + 1, blocks)
        assert pool.state("empty") == blocks
        pool.alloc(blocks)
        pool.check()


def test_slots_follow_the_table_after_fork_move_and_release() -> None:
    """Kind 11. A slot is never the last one plus one."""
    pool = mixed(64, 4, prefix_caching=False)
    first = pool.alloc(30)
    sequence = pool.alloc(42)
    child = pool.fork(sequence)
    pool.append(child, 1)
    pool.free(first)
    pool.run(pool.mmu.plan_free_run(pool.free_blocks))
    pool.mmu.release_before(child, 9)
    for one in (sequence, child):
        blocks, start = pool.blocks(one), pool.first(one)
        positions = np.arange(start, len(pool.tokens[one]))
        expected = [blocks[at // 4] * 4 + at % 4 for at in positions.tolist()]
        assert pool.mmu.translate(one, positions).tolist() == expected
    pool.append(child, 9)
    pool.append(sequence, 9)
    pool.check()


def test_a_reused_row_keeps_nothing_of_a_longer_sequence_with_a_released_front() -> None:
    """Kind 43."""
    pool = mixed(64, 4, prefix_caching=False)
    null = pool.mmu.null_block
    first = pool.alloc(48)
    pool.mmu.release_before(first, 20)
    pool.check()
    row = pool.tables.block_table[0]
    assert row[:5].tolist() == [null] * 5 and null not in row[5:12].tolist()
    pool.free(first)
    second = pool.alloc(8)
    pool.mmu.export(np.array([second], np.int64), pool.tables)
    assert row[:2].tolist() == pool.blocks(second)
    assert (row[2:] == null).all()
    pool.check()


def test_a_step_that_is_cancelled_leaves_a_block_behind_a_released_front() -> None:
    """The last settled block stays: what a step in flight has added may be taken back."""
    pool = mixed(16, block_size=4, prefix_caching=False, hold_blocks=0)
    sequence = pool.alloc(12)
    step = pool.mmu.begin_step()
    pool.mmu.prepare(
        step,
        np.array([sequence], np.int64),
        pool.tables,
        query_lens=np.array([1], np.int32),
        new_tokens=ints(1, 2),
    )
    assert pool.mmu.release_before(sequence, 12) == 2
    pool.mmu.cancel(step)
    pool.mmu.end_step(step)
    pool.mmu.validate(pool.tables)
    assert pool.mmu.info(sequence).num_blocks == 3


def test_a_block_number_that_no_space_has_is_found_nowhere() -> None:
    """Also where the space is shifted against its pages."""
    pool = mixed(64, page_orders=(0, 2), medium_from=0)
    pool.free(pool.alloc(list(range(3))))
    sequence = pool.open([0, 1, 2, *range(100, 120)])
    for block in (23, 2**18, 2**31, 2**32 - 1):
        assert pool.mmu.look(sequence, block) is None
    pool.mmu.validate()


def test_a_truncation_empties_a_later_step_and_an_earlier_one_is_cancelled() -> None:
    """What a step had scheduled of one sequence was taken back: its other rows are settled."""
    pool = mixed(16, hold_blocks=0)
    one, other = pool.open(3), pool.open(2)
    early, late = pool.mmu.begin_step(), pool.mmu.begin_step()
    pool.mmu.prepare(early, np.array([one], np.int64), pool.tables)
    pool.mmu.prepare(late, np.array([one, other], np.int64), pool.tables)
    pool.mmu.truncate(one, 1)
    pool.mmu.cancel(early)
    pool.mmu.validate()
    pool.mmu.written(late)
    pool.mmu.end_step(early)
    pool.mmu.end_step(late)
    pool.mmu.validate()
    assert pool.mmu.info(other).num_written == 1


def test_lengths_that_somebody_else_wrote_are_named() -> None:
    pool = mixed(32)
    sequence = pool.alloc(9)
    pool.mmu.export(np.array([sequence], np.int64), pool.tables)
    out = [np.zeros(40, np.int32) for _ in range(3)]
    for wrong in (-1, 10, 2**31 - 1):
        pool.tables.seq_lens[0] = wrong
        with pytest.raises(InvalidConfig, match=f"seq_lens says {wrong} for row 0"):
            pool.tables.csr(*out)
    pool.tables.seq_lens[0] = 9
    assert pool.tables.csr(*out) == 9


@pytest.mark.parametrize("placement", ["fifo", "fullest", "scatter"])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_required_huge_pages_are_had_under_every_placement(
    placement: str, prefix_caching: bool
) -> None:
    """What else is claimed comes as the placement chooses; only what is required is a page."""
    random = np.random.default_rng(11)
    mmu = MMU(4096, 16, placement=placement, prefix_caching=prefix_caching, max_sequences=64)
    tables = mmu.register_tables(
        np.zeros((1, 4096), np.int32),
        np.zeros(1, np.int32),
        np.zeros(1500 * 16, np.int64),
        np.zeros(2, np.int32),
    )
    live: list[int] = []
    refused = 0
    for _ in range(120):
        if live and random.random() < 0.5:
            mmu.close(live.pop(int(random.integers(len(live)))))
        else:
            blocks = int(random.choice([100, 700, 1500]))
            tokens = random.integers(0, 1 << 30, blocks * 16).astype(np.int32)
            before = mmu.states()["available"]
            try:
                sequence = mmu.open(tokens, require="huge")
            except Fragmented as error:
                assert error.available >= error.needed == blocks // 512 * 512 > 0
                refused += 1
                assert mmu.states()["available"] == before
            except OutOfBlocks:
                assert mmu.states()["available"] == before
            else:
                assert mmu.info(sequence).pages.get(9, 0) == blocks // 512
                live.append(sequence)
                step = mmu.begin_step()
                lens = np.array([blocks * 16], np.int32)
                mmu.prepare(step, np.array([sequence], np.int64), tables, query_lens=lens)
                mmu.written(step)
                mmu.end_step(step)
        mmu.validate()
    assert placement == "fullest" or prefix_caching or refused
