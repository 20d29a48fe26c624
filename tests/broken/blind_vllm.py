"""Five patches of vLLM's BlockPool, by people who had not seen the kit.

They were given vLLM's source and asked for faults that are easy to make and hard to find; the
faults are theirs, the words are ours: each does what it does around the original method, so that
none of vLLM's text is here. What lives here: the patches, and ``BLIND_POOLS``. Importing this needs
vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kvmmu.testing.adapters import VLLMBlockPool
from vllm.v1.core.block_pool import BlockPool

__all__ = ["BLIND_POOLS"]


class LeavesTheTailInTheQueue(BlockPool):  # type: ignore[misc]  # Any where vLLM is not installed
    """``touch`` takes free blocks out of the free queue up to the first block in use: what follows
    gets its reference and stays free."""

    def touch(self, blocks: Sequence[Any]) -> None:
        first = next((i for i, block in enumerate(blocks) if block.ref_cnt > 0), len(blocks))
        super().touch(blocks[:first])
        for block in blocks[first:]:
            block.ref_cnt += 1


class FreesOnceForEachMention(BlockPool):  # type: ignore[misc]  # Any where vLLM is not installed
    """Counts all down, then frees all that are at zero: a block of two holders who release it in
    one call is in the free queue twice."""

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        blocks = list(ordered_blocks)
        super().free_blocks(blocks)
        again = [block for i, block in enumerate(blocks) if block in blocks[:i]]
        self.free_block_queue.append_n([block for block in again if block.ref_cnt == 0])


class EvictsBeforeItRefuses(BlockPool):  # type: ignore[misc]  # Any where vLLM is not installed
    """Takes and evicts block by block until none is left, then puts them back and refuses: the
    counts are right, and the cache is empty."""

    def get_new_blocks(self, num_blocks: int) -> Any:
        free = self.get_num_free_blocks()
        if num_blocks > free:
            self.free_blocks(super().get_new_blocks(free))
        return super().get_new_blocks(num_blocks)


class PairsHashesPastAGap(BlockPool):  # type: ignore[misc]  # Any where vLLM is not installed
    """Leaves out null and masked blocks, then pairs the others with the hashes from the first on:
    what follows a gap is found for contents that it does not have."""

    def cache_full_blocks(
        self,
        request: Any,
        blocks: list[Any],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        places = range(num_cached_blocks, num_full_blocks)
        mask = block_mask or [True] * len(places)
        kept = [blocks[i] for i, wanted in zip(places, mask, strict=True) if wanted]
        kept = [block for block in kept if not block.is_null]
        super().cache_full_blocks(
            request,
            [*blocks[:num_cached_blocks], *kept],
            num_cached_blocks,
            num_cached_blocks + len(kept),
            block_size,
            kv_cache_group_id,
        )


class RemembersHits(BlockPool):  # type: ignore[misc]  # Any where vLLM is not installed
    """A hit that was found once is trusted as long as its block has some hash, whichever."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hits: dict[tuple[Any, ...], Any] = {}

    def get_cached_block(self, block_hash: Any, kv_cache_group_ids: list[int]) -> Any:
        key = (block_hash, *kv_cache_group_ids)
        hit = self.hits.pop(key, None)
        if hit is None or any(block.block_hash is None for block in hit):
            hit = super().get_cached_block(block_hash, kv_cache_group_ids)
        if hit is not None:
            self.hits[key] = hit
        return hit


def _adapted(pool: type[BlockPool], *, sparse: bool = False) -> Callable[[], VLLMBlockPool]:
    def make() -> VLLMBlockPool:
        return VLLMBlockPool(pool(9, enable_caching=True, hash_block_size=16), sparse=sparse)

    make.__name__ = pool.__name__
    return make


BLIND_POOLS: dict[str, tuple[Callable[[], VLLMBlockPool], str]] = {
    pool.__name__: (_adapted(pool, sparse=pool is PairsHashesPastAGap), kind)
    for pool, kind in (
        (LeavesTheTailInTheQueue, "a held block stays in the free queue"),
        (FreesOnceForEachMention, "a block is in the free queue twice"),
        (EvictsBeforeItRefuses, "a refused claim empties the cache"),
        (PairsHashesPastAGap, "a hash of another place"),
        (RemembersHits, "a hit that was evicted"),
    )
}
