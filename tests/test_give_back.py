"""Memory given back while sequences run, and what comes back.

``tests/test_cache_machine.py`` shrinks and grows in the middle of everything else, over memory
whose owner fills with garbage what it was given. Here: what the system itself says of resident
memory, sizes of granules, and each promise of ``shrink`` and ``grow`` by name.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvmmu import (
    MMU,
    HostPages,
    InvalidBlock,
    InvalidConfig,
    NotReturnable,
    OutOfBlocks,
    Region,
    Storage,
)
from kvmmu.give_back import _minus, whole_pages

torch = pytest.importorskip("torch")
kvmmu: Any = pytest.importorskip("kvmmu")

from .small_cache import Broken, SmallCache  # noqa: E402

LAYOUTS = ("NHD", "HND", "packed", "block_major")
MIB = 2**20
HUGE = 2 * MIB


def resident() -> int:
    """Bytes of this process that are in memory, as the kernel counts them."""
    for line in Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("smaps_rollup has no Rss")


def big(layout: str = "NHD", **options: Any) -> Any:
    """64 MiB: 1024 blocks of 64 KiB, in pieces of 16 KiB a half layer."""
    options = {"layout": layout, "max_tokens": 4096, **options}
    return kvmmu.KVCache(2, 8, 32, torch.float32, 1024, **options)


def fill(cache: Any, sequence: Any, value: float) -> None:
    """Schedules and writes all that is not scheduled yet."""
    with cache.step() as step:
        count = sequence.num_tokens - sequence.num_scheduled
        batch = step.prepare([sequence], query_lens=[count])
        for layer in range(len(cache.layers)):
            k = torch.full((count, 8, 32), float(value + layer))
            cache.write(layer, k, k + 0.5, batch)


def holds(cache: Any, sequence: Any, value: float) -> None:
    for layer in range(len(cache.layers)):
        k, v = cache.gather(sequence, layer)
        assert len(k) == sequence.num_scheduled
        assert (k == value + layer).all() and (v == value + layer + 0.5).all()


def prompt(number: int, length: int) -> Any:
    return torch.arange(number * 10_000, number * 10_000 + length, dtype=torch.int32)


# -- resident memory -----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resident_memory_goes_down_and_comes_back(layout: str) -> None:
    cache = big(layout)
    for tensor in cache.layers.tensors:
        tensor.fill_(7)  # all of it is in memory
    # Every eighth of 60 sequences stays, so that something lives in every granule.
    sequences = [cache.open(prompt(n, 16 * 17)) for n in range(60)]
    for number, sequence in enumerate(sequences):
        fill(cache, sequence, number)
    kept = {n: sequence for n, sequence in enumerate(sequences) if n % 8 == 0}
    for number, sequence in enumerate(sequences):
        if number not in kept:
            sequence.close()
    before = resident()
    found = cache.shrink(700)
    after = resident()
    granule = cache.storage.granule()
    assert granule == {"block_major": 32}.get(layout, 128)
    assert found.blocks == -(-700 // granule) * granule
    assert found and found.moved > 0
    # All but the pages that a granule shares with one that stays.
    assert found.bytes >= (found.blocks - granule) * 65536
    assert before - after >= found.bytes - 4 * MIB
    for number, sequence in kept.items():
        holds(cache, sequence, number)
    cache.validate()
    # Sequences run on in what is left.
    other = cache.open(prompt(99, 16 * 30))
    fill(cache, other, 99)
    with pytest.raises(OutOfBlocks) as refused:
        cache.open(prompt(98, 16 * 200))
    assert refused.value.num_blocks == 1024 - found.blocks
    # All comes back, as zeros, and is charged when it is touched.
    offline = cache.mmu.offline_blocks()
    low = resident()
    assert cache.grow() == found.blocks
    whole = whole_pages(cache.storage, offline, 4096)
    assert resident() - low < 4 * MIB
    for layer in range(2):
        for half in cache.layers.logical(layer):
            part = half[torch.from_numpy(offline[granule:-granule])]
            assert (part == 0).all() and len(part) > 0
            half[torch.from_numpy(offline)] = 3
    assert resident() - low >= int((whole[:, 1] - whole[:, 0]).sum()) - 4 * MIB
    for number, sequence in kept.items():
        holds(cache, sequence, number)
    cache.validate()
    for sequence in (*kept.values(), other):
        sequence.close()


def test_an_engines_memory_stays_unless_it_says_otherwise() -> None:
    def attach(**options: Any) -> Any:
        tensors = [(torch.ones(65, 16, 8, 32), torch.ones(65, 16, 8, 32)) for _ in range(2)]
        return kvmmu.KVCache.attach(tensors, layout="NHD", num_blocks=64, **options)

    kept = attach()
    found = kept.shrink(32, granule=8)
    assert (found.blocks, found.bytes, kept.bytes_given_back) == (32, 0, 0)
    assert all((tensor == 1).all() for tensor in kept.layers.tensors)
    assert kept.grow() == 32
    given_back = attach(return_memory=True)
    found = given_back.shrink(32, granule=8)
    blocks = given_back.mmu.offline_blocks()
    # Pieces of 16 KiB from wherever the tensors begin: all pages but those at both ends.
    assert found.bytes >= 32 * 4 * 16384 - 4 * 2 * 4096
    gone = torch.zeros(65, dtype=torch.bool)
    gone[torch.from_numpy(blocks)] = True
    for tensor in given_back.layers.tensors:
        assert (tensor[~gone] == 1).all()
        assert int((tensor == 0).sum()) * 4 >= 32 * 16384 - 2 * 4096
    given_back.validate()


def test_shared_memory_is_refused_and_the_blocks_stay() -> None:
    tensors = [(torch.ones(65, 16, 8, 32).share_memory_(), None) for _ in range(2)]
    cache = kvmmu.KVCache.attach(tensors, layout="NHD", num_blocks=64, return_memory=True)
    with pytest.raises(NotReturnable) as refused:
        cache.shrink(32, granule=8)
    assert refused.value.bytes >= 4096 and refused.value.at >= refused.value.address
    assert "/" in str(refused.value)
    states = cache.mmu.states()
    assert (states["offline"], states["empty"], cache.bytes_given_back) == (0, 64, 0)
    assert all((k == 1).all() for k, _ in tensors)
    cache.validate()


def test_bytes_between_the_pieces_of_blocks_are_left_alone() -> None:
    whole = np.full((33, 3, 8192), 7, np.uint8)
    storage = Storage.from_numpy([whole[:, 0], whole[:, 2]])
    pages = whole_pages(storage, np.arange(8, 24), 4096)
    HostPages().give_back(np.stack([pages[:, 0], pages[:, 1] - pages[:, 0]], axis=1))
    assert (whole[:, 1] == 7).all()
    assert (whole[:8] == 7).all() and (whole[24:] == 7).all()
    assert int((whole[8:24, ::2] == 0).sum()) == int((pages[:, 1] - pages[:, 0]).sum()) > 0


def test_who_returns_the_memory_is_checked_when_the_cache_is_made() -> None:
    with pytest.raises(InvalidConfig, match="return_memory"):
        kvmmu.KVCache(1, 1, 8, torch.float32, 8, return_memory=3)


# -- granules ------------------------------------------------------------------------------------


def storage_of(pieces: list[tuple[int, int]], blocks: int = 8192, base: int = 64 * HUGE) -> Storage:
    """Regions of (block bytes, stride), each from an address of its own on."""
    regions = []
    for size, stride in pieces:
        regions.append(Region(base, stride, size, blocks + 1))
        base += -(-(blocks + 1) * stride // HUGE) * HUGE
    return Storage(regions, blocks)


def test_granules_are_what_strides_say() -> None:
    kib = 1024
    assert storage_of([(32 * kib, 32 * kib)] * 160).granule() == 64
    assert storage_of([(4 * kib, 4 * kib)] * 160).granule() == 512
    assert storage_of([(128 * kib, 128 * kib)]).granule() == 16
    # All 80 layers of a block side by side: 5 MiB.
    assert storage_of([(160 * 32 * kib, 160 * 32 * kib)]).granule() == 2
    assert storage_of([(32 * kib, 32 * kib)]).granule(4096) == 1
    assert storage_of([(34 * kib, 34 * kib)]).granule() == 1024
    assert storage_of([(32 * kib, 32 * kib), (16, 16)]).granule() == HUGE // 16
    assert storage_of([(HUGE, 3 * HUGE)]).granule() == 1


def test_pieces_side_by_side_count_together_and_gaps_are_refused() -> None:
    piece = 32 * 1024
    beside = [Region(64 * HUGE + n * piece, 4 * piece, piece, 65) for n in range(4)]
    assert Storage(beside, 64).granule() == 16
    with pytest.raises(InvalidConfig) as refused:
        Storage(beside[:3], 64).granule()
    numbers = refused.value.numbers
    assert (numbers["stride"], numbers["block_bytes"]) == (4 * piece, 3 * piece)
    for wrong in (0, 3, 3 * 4096, -1, True):
        with pytest.raises(InvalidConfig):
            Storage(beside, 64).granule(wrong)


@given(
    seed=st.integers(0, 2**32),
    page=st.sampled_from([1, 8, 64, 256]),
    blocks=st.integers(1, 24),
)
def test_whole_pages_are_those_that_only_these_blocks_have_bytes_in(
    seed: int, page: int, blocks: int
) -> None:
    rng = random.Random(seed)
    regions: list[Region] = []
    base = 4096 + rng.randrange(300)
    for _ in range(rng.randint(1, 4)):
        size = rng.randint(1, 100)
        beside = rng.randint(1, 3)
        stride = size * beside + rng.choice([0, 0, 5])
        regions += [Region(base + n * size, stride, size, blocks + 1) for n in range(beside)]
        base += (blocks + 1) * stride + rng.choice([0, 0, 77])
    storage = Storage(regions, blocks)
    chosen = np.array([b for b in range(blocks) if rng.random() < 0.7], np.int64)
    owner: dict[int, int] = {}
    for region in regions:
        for block in range(blocks + 1):
            first = region.address + block * region.stride
            owner.update(dict.fromkeys(range(first, first + region.block_bytes), block))
    free = set(chosen.tolist())
    expected = {
        at
        for at in range(0, base + page, page)
        if all(owner.get(byte) in free for byte in range(at, at + page))
    }
    found = whole_pages(storage, chosen, page)
    assert {at for low, high in found.tolist() for at in range(low, high, page)} == expected
    assert (found[1:, 0] > found[:-1, 1]).all()


@given(sets=st.lists(st.sets(st.integers(0, 40)), min_size=2, max_size=2))
def test_what_is_left_of_ranges(sets: list[set[int]]) -> None:
    def ranges(numbers: set[int]) -> Any:
        edges = [n for n in range(42) if (n in numbers) != (n - 1 in numbers)]
        return np.array(edges, np.int64).reshape(-1, 2)

    found = _minus(ranges(sets[0]), ranges(sets[1]))
    assert found.tolist() == ranges(sets[0] - sets[1]).tolist()


def test_more_than_four_gib_of_addresses_are_given_back_where_they_lie() -> None:
    # 6 GiB of addresses, of which little is ever touched.
    stride = 1_002_240
    whole = np.zeros(6500 * stride, np.uint8).reshape(6500, stride)
    storage = Storage.from_numpy([whole])
    for block in (4284, 4286, 6400):  # 4286 is the first past 2**32
        whole[block] = 7
    pages = whole_pages(storage, np.array([4286]), 4096)
    assert pages[0, 0] - storage.regions[0].address > 2**32
    HostPages().give_back(np.stack([pages[:, 0], pages[:, 1] - pages[:, 0]], axis=1))
    assert int((whole[4286] == 0).sum()) == int(pages[0, 1] - pages[0, 0]) > stride - 8192
    assert (whole[4284] == 7).all() and (whole[6400] == 7).all()


# -- shrink and grow -----------------------------------------------------------------------------


def test_live_blocks_leave_the_granules_and_every_sequence_reads_its_own() -> None:
    pool = SmallCache(64, 2, placement="scatter", page_orders=(0,), hold_blocks=0)
    handles = [pool.open(4) for _ in range(24)]
    pool.close(*[handles[n] for n in range(24) if n % 3])
    child = pool.fork(pool.handles[handles[0].id])
    found = pool.cache.shrink(32, granule=8)
    assert (found.blocks, found.stopped) == (32, None) and found.moved > 0
    pool.check()
    pool.step([child], [1])  # copy on write in what is left
    pool.check()
    assert pool.cache.grow(9, granule=8) == 16
    assert pool.cache.grow(100, granule=8) == 16
    assert pool.cache.grow() == 0
    pool.check()


def test_it_gives_what_there_is_and_says_why_it_is_no_more() -> None:
    pool = SmallCache(32, 2, page_orders=(0,), hold_blocks=0)
    handle = pool.open(6)
    found = pool.cache.shrink(32, granule=8)
    assert (found.blocks, found.wanted, found.stopped) == (24, 32, "live")
    assert not found
    assert pool.cache.shrink(1, granule=64).stopped == "granule"
    pool.check()
    with pytest.raises(OutOfBlocks) as refused:
        pool.open(14)
    assert (refused.value.needed, refused.value.available) == (7, 5)
    assert refused.value.num_blocks == 8
    pool.check()
    assert pool.cache.grow(1, granule=8) == 8
    pool.close(handle)


def test_pinned_and_leased_blocks_stay_where_they_are() -> None:
    pool = SmallCache(32, 2, page_orders=(0,), hold_blocks=0, anchor=0.0)
    handles = [pool.open(8) for _ in range(8)]  # 4 blocks each: all are in use
    lease = handles[1].lease()
    pinned = handles[5].block_table().astype(np.int64)
    pool.cache.mmu.pin(pinned)
    for handle in handles:
        pool.close(handle)
    bytes_of = pool.leased(lease)
    found = pool.cache.shrink(32, granule=8)
    assert (found.blocks, found.stopped) == (16, "stuck")
    assert all(torch.equal(a, b) for a, b in zip(bytes_of, pool.leased(lease), strict=True))
    lease.done()
    pool.cache.mmu.unpin(pinned)
    assert pool.cache.shrink(32, granule=8).blocks == 16
    assert pool.states()["offline"] == 32
    pool.check()


def test_beside_steps_in_flight_it_makes_one_pass_and_can_be_called_again() -> None:
    pool = SmallCache(32, 2, late=True, page_orders=(0,), hold_blocks=0, budget_blocks=2)
    handles = [pool.open(8) for _ in range(8)]
    pool.close(*handles[::2])
    pool.cache.mmu.evict(32)
    rows = list(pool.handles.values())
    pool.close(*rows[1:])
    pool.cache.mmu.evict(32)
    step = pool.launch(rows[:1], [1])
    step.written()
    pool.cache.end_step(step, pool.device.event())
    calls = 0
    assert pool.cache.mmu.steps_in_flight() == 1
    first = pool.cache.shrink(24, granule=16)
    assert first.moved <= 2
    while not (found := pool.cache.shrink(24 - pool.states()["offline"], granule=16)):
        calls += 1
        assert found.moved <= 2 or pool.cache.mmu.steps_in_flight() == 0
        if calls == 3:
            pool.cache.synchronize()
        if found.stopped != "steps":
            break
    pool.device.run()
    pool.check()
    assert pool.states()["offline"] == 16


def test_blocks_that_a_step_in_flight_reads_do_not_go() -> None:
    pool = SmallCache(16, 2, late=True, page_orders=(0,), hold_blocks=0, prefix_caching=False)
    handle = pool.open(16)
    step = pool.launch([handle], [1])
    step.written()
    event = pool.device.event()
    pool.cache.end_step(step, event)
    pool.close(handle)
    found = pool.cache.shrink(16, granule=1)
    assert (found.blocks, found.stopped) == (16 - pool.states()["fenced"], "steps")
    assert pool.states()["fenced"] == 9
    pool.device.run()  # reads what it should
    assert pool.cache.shrink(16, granule=1).blocks == 9
    pool.check()


def test_a_mover_or_an_owner_that_dies_leaves_all_as_it_was() -> None:
    pool = SmallCache(32, 2, placement="scatter", page_orders=(0,), hold_blocks=0)
    handles = [pool.open(4) for _ in range(12)]
    pool.close(*handles[::2])
    before = pool.everything()[1:]
    pool.mover.fails_after = 1
    with pytest.raises(Broken):
        pool.cache.shrink(16, granule=8)
    assert pool.states()["offline"] == 0 and pool.everything()[1:] == before
    pool.check()
    pool.mover.fails_after = None
    pool.landlord.fails = True
    with pytest.raises(Broken):
        pool.cache.shrink(16, granule=8)
    assert pool.states()["offline"] == 0
    pool.check()
    pool.landlord.fails = False
    assert pool.cache.shrink(16, granule=8).blocks == 16
    pool.check()
    pool.landlord.fails = True
    with pytest.raises(Broken):
        pool.cache.grow()
    assert pool.states()["offline"] == 16
    pool.check()
    pool.landlord.fails = False
    assert pool.cache.grow() == 16
    pool.check()


def test_arguments_are_named() -> None:
    pool = SmallCache(8, 2)
    for wrong in (-1, 1.5, True, None):
        with pytest.raises(InvalidConfig, match="blocks"):
            pool.cache.shrink(wrong)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(InvalidConfig, match="granule"):
            pool.cache.shrink(1, granule=wrong)
        with pytest.raises(InvalidConfig, match="granule"):
            pool.cache.grow(1, granule=wrong)
    assert pool.cache.shrink(0, granule=1).blocks == 0
    assert pool.cache.shrink(10**12, granule=1).blocks == 8
    assert pool.cache.grow(10**12, granule=1) == 8


# -- without storage -----------------------------------------------------------------------------


def test_an_mmu_alone_takes_blocks_offline_and_back() -> None:
    mmu = MMU(64, 4, page_orders=(0,), hold_blocks=0)
    kept = mmu.open(np.arange(8, dtype=np.int32))
    gone = mmu.shrink(20, granule=16)
    assert gone.dtype == np.int64 and len(gone) == 32
    assert (np.diff(gone) > 0).all() and gone[0] % 16 == 0
    assert mmu.states()["offline"] == 32
    assert mmu.quote(np.arange(160, dtype=np.int32) + 100).when == "grows"
    plan = mmu.plan_shrink(16, granule=16)
    assert len(plan) <= 2
    assert mmu.offline_blocks(1, granule=16).tolist() == gone[:16].tolist()
    used = mmu.block_table(kept).astype(np.int64)
    for wrong in (used, np.array([gone[0], gone[0]]), np.array([64]), np.array([-1])):
        with pytest.raises(InvalidBlock):
            mmu.grow(wrong)
    assert mmu.states()["offline"] == 32
    mmu.grow(gone)
    assert mmu.states()["offline"] == 0
    assert mmu.quote(np.arange(160, dtype=np.int32) + 100).when == "now"
    with pytest.raises(InvalidConfig, match="granule"):
        mmu.shrink(1, granule=0)
    mmu.validate()


# -- threads -------------------------------------------------------------------------------------


def test_sequences_run_on_in_other_threads_while_memory_goes_and_comes() -> None:
    """Steps of two threads; shrinking and growing in a third. Each sequence reads its own."""
    options = {"max_tokens": 256, "steps_in_flight": 4, "page_orders": (0,), "hold_blocks": 0}
    cache = kvmmu.KVCache(2, 8, 32, torch.float32, 256, block_size=4, **options)
    stop = threading.Event()
    reading = threading.Lock()  # outside of a step, blocks may be read only while none moves
    failures: list[BaseException] = []
    rounds = [0, 0]

    def serve(thread: int) -> None:
        rng = random.Random(thread)
        while not stop.is_set():
            number = 1000 * (thread + 1) + rounds[thread]
            try:
                sequence = cache.open(prompt(number, rng.randint(1, 120)))
            except OutOfBlocks:
                continue
            with sequence:
                try:
                    for _ in range(3):
                        if sequence.num_scheduled == sequence.num_tokens:
                            sequence.append([number])
                        fill(cache, sequence, number % 97)
                        with reading:
                            holds(cache, sequence, number % 97)
                except OutOfBlocks:
                    continue
                rounds[thread] += 1

    def guarded(thread: int) -> None:
        try:
            serve(thread)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(2)]
    for each in threads:
        each.start()
    rng = random.Random(7)
    went = moved = 0
    try:
        for _ in range(150):
            with reading:
                found = cache.shrink(rng.randint(1, 128), granule=rng.choice([1, 4, 16]))
            went += found.blocks
            moved += found.moved
            if rng.random() < 0.8:
                cache.grow(rng.randint(1, 128), granule=4)
    finally:
        stop.set()
        for each in threads:
            each.join()
    assert not failures, failures
    assert went > 0 and moved > 0 and min(rounds) > 0
    cache.grow()
    cache.validate()
