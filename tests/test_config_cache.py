"""What settings build on torch: the reserve, the preheating, every argument in its place."""

from __future__ import annotations

import inspect
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from kvmmu import Config, InvalidConfig, OutOfBlocks
from kvmmu.config import settings
from kvmmu.errors import Reserved

torch = pytest.importorskip("torch")

from kvmmu import LAYOUTS, KVCache  # noqa: E402
from kvmmu.layout import Layers  # noqa: E402

MODEL = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 8, "dtype": "float32"}


def small(reserved: int = 0, blocks: int = 64, **options: Any) -> KVCache:
    options = {"block_size": 4, "page_orders": (0,), "hold_blocks": 0, **options}
    return KVCache(1, 1, 4, torch.float32, blocks, reserved_blocks=reserved, **options)


def prompt(blocks: int, of: int = 0) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.arange(blocks * 4, dtype=np.int32) + of * 100_000


# -- the reserve -----------------------------------------------------------------------------


def test_a_new_sequence_leaves_the_reserve_to_those_that_run() -> None:
    cache = small(reserved=16)
    first = cache.open(prompt(40, 1))
    assert cache.quote(prompt(9, 2)).when == "frees"
    before = cache.mmu.states()
    with pytest.raises(Reserved) as error:
        cache.open(prompt(9, 2))
    assert error.value.numbers == {
        "needed": 9, "available": 24, "num_blocks": 64, "reserved": 16
    }  # fmt: skip
    assert isinstance(error.value, OutOfBlocks)
    assert cache.mmu.states() == before
    fits = cache.quote(prompt(8, 2))
    assert (fits.when, fits.needed, fits.available, fits.reserved) == ("now", 8, 24, 16)
    second = cache.open(prompt(8, 2))
    with cache.step() as step:  # those that run grow into it
        step.prepare([second], query_lens=[32 + 60], new_tokens=np.ones(60, dtype=np.int32))
    assert cache.mmu.states()["available"] == 1
    first.close()
    second.close()


def test_alone_a_sequence_may_have_everything() -> None:
    cache = small(reserved=16)
    assert cache.quote(prompt(64)).when == "now"
    with cache.open(prompt(64)):
        assert cache.mmu.states()["available"] == 0
        assert cache.quote(prompt(1, 2)).when == "frees"
    assert cache.quote(prompt(65)).when == "never"


def test_cached_blocks_that_match_are_not_claimed_from_the_reserve() -> None:
    cache = small(reserved=16)
    with cache.open(prompt(20, 1)) as first, cache.step() as step:
        step.prepare([first], query_lens=[80])
    keeper = cache.open(prompt(24, 3))
    again = prompt(21, 1)
    with cache.open(again) as sequence:  # 21 + 16 of 40 available: only because 20 are found
        assert sequence.num_cached_tokens == 80
        with pytest.raises(Reserved), cache.open(prompt(5, 4)):
            pass
    keeper.close()


def test_two_that_open_at_once_do_not_both_count_the_same_blocks() -> None:
    for _ in range(20):
        cache = small(reserved=16)
        keeper = cache.open(prompt(8))
        with ThreadPoolExecutor(8) as pool:
            ready = threading.Barrier(8)
            found = list(pool.map(partial(open_at_once, cache, ready), range(1, 9)))
        opened = [sequence for sequence in found if sequence is not None]
        assert len(opened) == 4
        assert cache.mmu.states()["available"] == 16
        for sequence in [keeper, *opened]:
            sequence.close()


def open_at_once(cache: KVCache, ready: threading.Barrier, number: int) -> Any:
    ready.wait()
    try:
        return cache.open(prompt(10, number))
    except Reserved:
        return None


@pytest.mark.parametrize("reserved", [-1, 64, True, 1.0, "8"])
def test_a_reserve_that_is_no_part_of_the_pool_is_refused(reserved: Any) -> None:
    with pytest.raises(InvalidConfig, match="allowed is 0 to 63"):
        small(reserved=reserved)


# -- preheating ------------------------------------------------------------------------------


def test_preheating_writes_every_byte_of_the_pages_and_leaves_nothing() -> None:
    cache = small(blocks=2000, page_orders=(0, 2, 9))
    null = cache.mmu.null_block
    k, v = cache.layer(0).k, cache.layer(0).v
    assert v is not None
    k[:null], v[:null] = 7.0, 7.0  # whatever was there before the first sequence
    found = cache.preheat(2)
    assert cache.preheated is found
    assert (found.pages, found.whole, found.order, found.blocks) == (2, 2, 9, 1024)
    assert found.bytes == 1024 * cache.storage.block_bytes
    assert found.seconds > 0
    touched = (k[:null] == 0).all(dim=-1).all(dim=-1).all(dim=-1).nonzero().flatten()
    assert len(touched) == 1024
    assert torch.equal(touched, (v[:null] == 0).flatten(1).all(dim=1).nonzero().flatten())
    assert (k[:null] == 0).sum() == 1024 * 16
    assert cache.mmu.states()["empty"] == 2000
    cache.validate()
    with cache.open(prompt(1024)) as sequence:  # pages that are given first are those
        assert set(sequence.block_table().tolist()) <= set(touched.tolist())


def test_preheating_counts_no_moves_and_one_block_is_enough() -> None:
    cache = small()
    assert cache.preheat(1).bytes == cache.storage.block_bytes
    assert cache.preheat(0).bytes == 0
    assert cache.mover.copied_bytes == 0
    with cache.open(prompt(60)), pytest.raises(OutOfBlocks):
        cache.preheat(5)
    cache.validate()


# -- from settings ---------------------------------------------------------------------------


def test_settings_reach_the_cache() -> None:
    config = Config.from_dict(
        {
            "model": MODEL,
            "pool": {"memory": "10MiB", "block_size": 4, "null_block": "first"},
            "paged_attention": {"page_size": "8KiB", "preheat_pages": 3, "auto_defrag": True},
            "memory": {"reserved_memory": "10%"},
            "compaction": {"budget_us": "1ms", "budget_bytes": "1MiB"},
            "kvcache": {"layout": "packed", "max_batch": 3, "page_order": 3},
        }
    )
    cache = config.cache()
    size = 2 * 2 * 2 * 8 * 4 * 4
    assert cache.storage.block_bytes == size
    assert cache.mmu.num_blocks == 10 * 2**20 // size - 1
    assert cache.mmu.page_orders == [0, 2, 3]
    assert cache.reserved_blocks == -(-cache.mmu.num_blocks // 10)
    assert cache.auto_compact is True
    assert cache.preheated is not None
    assert cache.preheated.bytes == 3 * 8 * size
    assert cache.layers.layout == "packed"
    fewer = config.cache(500, auto_compact=False, reserved_blocks=7, layout="NHD")
    assert (fewer.mmu.num_blocks, fewer.auto_compact, fewer.reserved_blocks) == (500, False, 7)


def test_the_shape_may_come_with_the_call() -> None:
    config = Config.from_dict({"pool": {"num_blocks": 8}, "pages": {"page_size": "4KiB"}})
    with pytest.raises(InvalidConfig, match=r"model: missing.*num_layers, num_kv_heads, head_dim"):
        config.cache()
    cache = config.cache(num_layers=1, num_kv_heads=1, head_dim=4, dtype=torch.float16)
    assert cache.mmu.page_orders == [0, 2, 4][: len(cache.mmu.page_orders)]
    assert cache.storage.block_bytes == 2 * 4 * 2 * 16
    for wrong in ({"num_layers": "2"}, {"head_dim": -1}, {"dtype": 3}):
        shape: dict[str, Any] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 4,
                                 "dtype": torch.float16, **wrong}  # fmt: skip
        with pytest.raises(InvalidConfig):
            config.cache(**shape)


def test_an_engines_tensors_are_attached_with_the_same_settings() -> None:
    tensors = [(torch.zeros(65, 4, 2, 8), torch.zeros(65, 4, 2, 8)) for _ in range(2)]
    config = Config.from_dict(
        {"pool": {"block_size": 4}, "pages": {"page_size": "8KiB"},
         "memory": {"reserved_memory": "4KiB"}, "start": {"preheat_pages": 2}}
    )  # fmt: skip
    cache = config.attach(tensors, num_blocks=64)
    assert cache.storage.block_bytes == 1024
    assert cache.mmu.page_orders == [0, 2, 3]
    assert cache.reserved_blocks == 4
    assert cache.preheated is not None
    assert cache.preheated.blocks == 16
    with pytest.raises(InvalidConfig, match=r"preheat_pages: 2 given, allowed: 0 to 1"):
        config.attach([(k[:16], v[:16]) for k, v in tensors], num_blocks=15)


def test_every_argument_of_a_cache_has_a_setting_or_a_reason() -> None:
    resolved = Config.from_dict({"model": MODEL, "pool": {"num_blocks": 8}}).resolve()
    known = {*resolved.cache, *settings.Model.model_fields, "num_blocks", "block_size",
             "reserved_blocks"}  # fmt: skip
    objects = {"buffers", "streams"}  # no file can hold them
    elsewhere = {"max_sequence_tokens"}  # as max_blocks_per_sequence
    parameters = inspect.signature(KVCache.__init__).parameters
    for name, parameter in parameters.items():
        if name in ("self", "options") or name in objects | elsewhere:
            continue
        assert name in known, name
        if name in resolved.cache and name not in ("device",):
            assert resolved.cache[name] == parameter.default, name
    assert set(resolved.cache) <= set(parameters)


def test_the_names_of_layouts_and_dtypes_are_those_of_the_layouts() -> None:
    from typing import get_args

    assert get_args(settings.Cache.model_fields["layout"].annotation) == LAYOUTS
    for name, size in settings.DTYPE_BYTES.items():
        dtype = getattr(torch, name)
        assert dtype.itemsize == size
        Layers.allocate("NHD", num_layers=1, num_blocks=2, block_size=1, num_kv_heads=1,
                        head_dim=1, dtype=dtype)  # fmt: skip
