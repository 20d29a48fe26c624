"""Allocators fitted to the kit, and one to copy from.

What lives here: :class:`FreeList`, the example; kvmmu's own allocators; vLLM's BlockPool. What
never lives here: checks, or anything that helps an allocator to pass them.

Each class and function without required arguments is a target of ``kvmmu fuzz``.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

import kvmmu

from .. import _core
from ..errors import InvalidConfig, LimitExceeded, OutOfBlocks

__all__ = [
    "FreeList",
    "MMUSequences",
    "PoolBlocks",
    "VLLMBlockPool",
    "vllm_block_pool",
    "vllm_block_pool_sparse",
    "vllm_block_pool_untrusting",
]


SPARSE_TAIL = 4
"""Places at the end of a sparse table that are cached."""


class FreeList:
    """A stack of free blocks."""

    def __init__(self, num_blocks: int = 8) -> None:
        self.num_blocks = num_blocks
        self.free = list(range(num_blocks))
        self.held: set[int] = set()

    def claim(self, n: int) -> list[int]:
        if n > len(self.free):
            raise MemoryError(f"need {n} blocks, free {len(self.free)}")
        blocks = [self.free.pop() for _ in range(n)]
        self.held.update(blocks)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        if len(set(blocks)) < len(blocks) or not self.held.issuperset(blocks):
            raise ValueError(f"not all held: {blocks}")
        self.held.difference_update(blocks)
        self.free.extend(blocks)


class OneSequence:
    """A sequence of an MMU; iterates over its present blocks."""

    def __init__(self, mmu: _core.MMU, number: int) -> None:
        self.mmu = mmu
        self.number = number

    def __iter__(self) -> Iterator[int]:
        return iter(self.mmu.block_table(self.number).tolist())

    def __contains__(self, block: int) -> bool:
        return block in list(self)


class MMUSequences:
    """:class:`kvmmu.MMU`: a claim is an open sequence, written in a step of its own.

    Blocks have two tokens. The second place of a last block stays empty until the sequence grows,
    so that growing a fork copies on write.

    Args:
        num_blocks: blocks of the pool.
        config: other arguments of the MMU. Scattered placement gives compaction something to do.
    """

    copies_on_write = True
    refuses = (OutOfBlocks, LimitExceeded)  # the latter: longer than the whole pool

    def __init__(self, num_blocks: int = 8, **config: Any) -> None:
        self.num_blocks = num_blocks
        self.mmu = _core.MMU(num_blocks, 2, **{"placement": "scatter", **config})
        self.null_block = self.mmu.null_block
        self._fresh = itertools.count(10**6)
        rows, width, tokens = 1, num_blocks, 2 * num_blocks
        self._tables = self.mmu.register_tables(
            np.zeros((rows, width), np.int32),
            np.zeros(rows, np.int32),
            np.zeros(tokens, np.int64),
            np.zeros(rows + 1, np.int32),
        )

    def claim(self, n: int) -> OneSequence:
        sequence = self._open(self._tokens(_length(n)))
        self._write(sequence)
        return sequence

    def release(self, sequence: OneSequence) -> None:
        self.mmu.close(sequence.number)

    def fork(self, sequence: OneSequence) -> OneSequence:
        return OneSequence(self.mmu, self.mmu.fork(sequence.number))

    def append(self, sequence: OneSequence, n: int) -> list[tuple[int, int]]:
        info = self.mmu.info(sequence.number)
        return self._write(sequence, _length(info.num_blocks + n) - info.num_tokens)

    def truncate(self, sequence: OneSequence, n: int) -> None:
        self.mmu.truncate(sequence.number, _length(n))

    def compact(self) -> list[tuple[int, int]]:
        moves = self.mmu.begin(self.mmu.plan_below(0.0))
        if self.mmu.commit(moves) != len(moves):
            raise RuntimeError("a move was dropped although nothing happened meanwhile")
        return _pairs(moves.pairs)

    def claim_prompt(self, prompt: int, n: int) -> tuple[OneSequence, int]:
        first = prompt * 1000
        sequence = self._open(np.arange(first, first + _length(n), dtype=np.int32))
        return sequence, self.mmu.info(sequence.number).num_cached_tokens // 2

    def publish(self, sequence: OneSequence, prompt: int) -> None:
        self._write(sequence)

    def evict(self, n: int) -> int:
        return self.mmu.evict(n)

    def stats(self) -> dict[str, int]:
        states = self.mmu.states()
        return {
            "free": states["available"],
            "used": states["in_use"],
            "cached": states["cached"],
        }

    def references(self, block: int) -> int:
        return int(self.mmu.references(np.array([block], np.int64))[0])

    def validate(self) -> None:
        self.mmu.validate()

    def _open(self, tokens: npt.NDArray[np.int32]) -> OneSequence:
        return OneSequence(self.mmu, self.mmu.open(tokens))

    def _tokens(self, count: int) -> npt.NDArray[np.int32]:
        """Tokens that no prompt has."""
        return np.array(list(itertools.islice(self._fresh, count)), np.int32)

    def _write(self, sequence: OneSequence, new: int = 0) -> list[tuple[int, int]]:
        """One step: everything that is not written yet, and ``new`` tokens behind it."""
        info = self.mmu.info(sequence.number)
        lengths = np.array([info.num_tokens - info.num_scheduled + new], np.int32)
        step = self.mmu.begin_step()
        try:
            copies = self.mmu.prepare(
                step,
                np.array([sequence.number]),
                self._tables,
                query_lens=lengths,
                new_tokens=self._tokens(new),
            )
            self.mmu.written(step)
        finally:
            self.mmu.end_step(step)
        return _pairs(copies)


def _length(blocks: int) -> int:
    """Tokens of a sequence of so many blocks: one less than they have places."""
    return max(2 * blocks - 1, 0)


def _pairs(pairs: npt.NDArray[Any]) -> list[tuple[int, int]]:
    return [(int(source), int(destination)) for source, destination in pairs]


class PoolBlocks:
    """``kvmmu.Pool``: ids with references, and nothing that caches or moves.

    Args:
        num_blocks: blocks of the pool.
        config: other arguments of the pool.
    """

    def __init__(self, num_blocks: int = 8, **config: Any) -> None:
        self.num_blocks = num_blocks
        self.pool = kvmmu.Pool(num_blocks, **config)

    def claim(self, n: int) -> npt.NDArray[np.int32]:
        blocks: npt.NDArray[np.int32] = self.pool.claim(n)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        self.pool.release(np.asarray(blocks, np.int32))

    def retain(self, blocks: Sequence[int]) -> None:
        self.pool.retain(np.asarray(blocks, np.int32))

    def stats(self) -> dict[str, int]:
        states = self.pool.states()
        return {"free": states["available"], "used": states["in_use"]}

    def references(self, block: int) -> int:
        return int(self.pool.references(block))

    def validate(self) -> None:
        self.pool.validate()


class VLLMBlockPool:
    """vLLM's BlockPool, as its KVCacheManager uses it: prompts are found block by block, what was
    found is touched, the rest is taken new; full blocks are cached.

    It trusts its callers: it does not look whether a block that is freed is held. With
    ``trusts_caller=False`` the kit shows what comes of that.

    With ``sparse=True`` it is called as for groups of layers that do not read every block (Mamba,
    sliding windows): a null block stands before each block in the table of a prompt, and of each
    table only the end is cached, which is said by a mask.
    """

    refuses = (ValueError,)
    null_block = 0

    def __init__(self, pool: Any, *, trusts_caller: bool = True, sparse: bool = False) -> None:
        self.pool = pool
        self.num_blocks = pool.num_gpu_blocks - 1
        self.trusts_caller = trusts_caller
        self.sparse = sparse

    def claim(self, n: int) -> list[int]:
        return _ids(self.pool.get_new_blocks(n))

    def release(self, blocks: Sequence[int]) -> None:
        self.pool.free_blocks(self._blocks(blocks))

    def retain(self, blocks: Sequence[int]) -> None:
        self.pool.touch(self._blocks(blocks))

    def claim_prompt(self, prompt: int, n: int) -> tuple[list[int], int]:
        found: list[Any] = []
        for key in self._hashes(prompt, n):
            hit = self.pool.get_cached_block(key, [0])
            if hit is None:
                break
            found += hit
        idle = sum(block.ref_cnt == 0 for block in found)
        if n - len(found) + idle > self.pool.get_num_free_blocks():
            raise ValueError("the manager does not ask the pool for more than it has")
        self.pool.touch(found)
        return _ids([*found, *self.pool.get_new_blocks(n - len(found))]), len(found)

    def publish(self, blocks: Sequence[int], prompt: int) -> None:
        mine = self._blocks(blocks)
        found = next((i for i, block in enumerate(mine) if block.block_hash is None), len(mine))
        table, keys, mask = mine, self._hashes(prompt, len(mine)), None
        if self.sparse:
            table = [block for own in mine for block in (self.pool.null_block, own)]
            keys = _hashes(prompt, len(table))
            found *= 2
            mask = [i >= len(table) - SPARSE_TAIL for i in range(found, len(table))]
        self.pool.cache_full_blocks(
            SimpleNamespace(block_hashes=keys),
            table,
            num_cached_blocks=found,
            num_full_blocks=len(table),
            block_size=self.pool.hash_block_size,
            kv_cache_group_id=0,
            block_mask=mask,
        )

    def evict(self, n: int) -> int:
        chosen = [block.block_id for block in self._cached()][:n]
        self.pool.evict_blocks(set(chosen))
        return len(chosen)

    def stats(self) -> dict[str, int]:
        return {"free": self.pool.get_num_free_blocks(), "cached": len(self._cached())}

    def references(self, block: int) -> int:
        return int(self.pool.blocks[block].ref_cnt)

    def _hashes(self, prompt: int, n: int) -> list[bytes]:
        """Of the places in a prompt's table that have a block."""
        return _hashes(prompt, 2 * n)[1::2] if self.sparse else _hashes(prompt, n)

    def _blocks(self, blocks: Sequence[int]) -> list[Any]:
        """vLLM's callers have the objects: of what is no block there is none."""
        if any(not 0 < block <= self.num_blocks for block in blocks):
            raise KeyError(f"not all are blocks: {blocks}")
        return [self.pool.blocks[block] for block in blocks]

    def _cached(self) -> list[Any]:
        return [b for b in self.pool.blocks if b.block_hash is not None and b.ref_cnt == 0]


def vllm_block_pool(
    num_blocks: int = 8,
    *,
    path: str | Path | None = None,
    trusts_caller: bool = True,
    sparse: bool = False,
) -> VLLMBlockPool:
    """A new BlockPool with prefix caching.

    Args:
        num_blocks: usable blocks; vLLM keeps one more as its null block.
        path: folder of vLLM's source, if it is not installed.
        trusts_caller, sparse: see :class:`VLLMBlockPool`.

    Raises:
        InvalidConfig: vLLM, or something that it needs, cannot be imported.
    """
    if path is not None and str(path) not in sys.path:
        sys.path.insert(0, str(path))
    try:
        from vllm.v1.core.block_pool import BlockPool
    except ImportError as error:
        raise InvalidConfig(f"vLLM's BlockPool cannot be imported: {error}") from error
    pool = BlockPool(num_gpu_blocks=num_blocks + 1, enable_caching=True, hash_block_size=16)
    return VLLMBlockPool(pool, trusts_caller=trusts_caller, sparse=sparse)


def vllm_block_pool_untrusting() -> VLLMBlockPool:
    """The same, and the kit frees blocks twice as well."""
    return vllm_block_pool(trusts_caller=False)


def vllm_block_pool_sparse() -> VLLMBlockPool:
    """The same, for layers that do not read every block."""
    return vllm_block_pool(sparse=True)


def _ids(blocks: Sequence[Any]) -> list[int]:
    return [block.block_id for block in blocks]


def _hashes(prompt: int, n: int) -> list[bytes]:
    """Stand-ins for vLLM's block hashes, which depend on all tokens up to the end of a block."""
    return [b"%d/%d" % (prompt, i) for i in range(n)]
