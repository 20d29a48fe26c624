"""Sequences and steps, called from Python: what a serving engine pays for each.

Rivals: vLLM's BlockPool, KVCacheManager's block hashing (``--vllm DIR``). Without vLLM hashlib's
SHA-256 of the same bytes stands in for the hashing, and is named as that.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness import Bench, Goal, Row, medians, seconds, with_path
from kvmmu import MMU, BlockTables

Tokens = npt.NDArray[np.int32]

POOL = 100_000
BLOCK = 16
PROMPT_BLOCKS = 8192
BATCH = 256
DEPTH = 512
STEPS = 200


@dataclass(frozen=True)
class VLLM:
    """The parts of vLLM that are measured."""

    block_pool: Any
    hash_block_tokens: Any
    hashes: dict[str, Callable[[Any], bytes]]


def load_vllm() -> VLLM:
    from vllm.utils.hashing import sha256, xxhash
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash

    init_none_hash(sha256)
    return VLLM(BlockPool, hash_block_tokens, {"sha256": sha256, "xxhash": xxhash})


def random_tokens(count: int, seed: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(0, 128_000, count, dtype=np.int32)


def tables(mmu: MMU, rows: int, width: int, tokens: int) -> BlockTables:
    return mmu.register_tables(
        np.empty((rows, width), np.int32),
        np.empty(rows, np.int32),
        np.empty(tokens, np.int64),
        np.empty(rows + 1, np.int32),
    )


def prefill(mmu: MMU, sequence: int, buffers: BlockTables, tokens: int) -> None:
    """Schedules a prompt in one step and reports it written: full blocks are published."""
    step = mmu.begin_step()
    lengths = np.array([tokens], np.int32)
    mmu.prepare(step, np.array([sequence]), buffers, query_lens=lengths)
    mmu.written(step)
    mmu.end_step(step)


def open_and_close(bench: Bench, vllm: VLLM | None) -> Iterator[Row]:
    tokens = random_tokens(PROMPT_BLOCKS * BLOCK)
    for caching in (False, True):
        mmu = MMU(POOL, BLOCK, prefix_caching=caching)

        def ours(mmu: MMU = mmu) -> float:
            return seconds(lambda: mmu.close(mmu.open(tokens))) * 1e9 / PROMPT_BLOCKS

        contenders = {"kvmmu": ours}
        if vllm is not None:
            pool = vllm.block_pool(POOL, caching, BLOCK)

            def theirs(pool: Any = pool) -> float:
                work = lambda: pool.free_blocks(pool.get_new_blocks(PROMPT_BLOCKS))  # noqa: E731
                return seconds(work) * 1e9 / PROMPT_BLOCKS

            contenders["vllm"] = theirs
        found = medians(contenders, rounds=51)
        state = "on, prompt hashed" if caching else "off"
        rival = f"vLLM BlockPool get + free, caching {'on, no hashing' if caching else 'off'}"
        yield Row(
            f"open + close {PROMPT_BLOCKS} blocks, caching {state}",
            "ns/block",
            found["kvmmu"],
            rival,
            found.get("vllm"),
        )


def chained_sha256(tokens: Tokens) -> bytes:
    """SHA-256 of every block's bytes behind its parent's digest."""
    digest = b"\0" * 32
    for row in tokens.reshape(-1, BLOCK):
        digest = hashlib.sha256(digest + row.tobytes()).digest()
    return digest


def prefix_match(bench: Bench, vllm: VLLM | None) -> Iterator[Row]:
    tokens = random_tokens(PROMPT_BLOCKS * BLOCK, seed=1)
    mmu = MMU(POOL, BLOCK)
    sequence = mmu.open(tokens)
    prefill(mmu, sequence, tables(mmu, 1, PROMPT_BLOCKS, len(tokens)), len(tokens))
    matched = mmu.match(tokens) // BLOCK
    if matched != PROMPT_BLOCKS - 1:
        bench.note(f"prefix match found {matched} blocks of {PROMPT_BLOCKS - 1}")
    listed: list[list[int]] = tokens.reshape(-1, BLOCK).tolist()

    def ours() -> float:
        return seconds(lambda: mmu.match(tokens)) * 1e6 / max(matched, 1)

    def chain(of: VLLM, hash_function: Callable[[Any], bytes]) -> None:
        parent = None
        for block in listed:
            parent = of.hash_block_tokens(hash_function, parent, block)

    contenders: dict[str, Callable[[], float]] = {"kvmmu": ours}
    if vllm is None:
        rivals = ["hashlib sha256 of the same bytes (stand-in for vLLM's hashing)"]
        contenders[rivals[0]] = lambda: seconds(lambda: chained_sha256(tokens)) * 1e6 / len(listed)
    else:
        rivals = []
        for name, function in vllm.hashes.items():
            rivals.append(f"vLLM hash_block_tokens, {name} (no look-up)")
            contenders[rivals[-1]] = lambda function=function, of=vllm: (
                seconds(lambda: chain(of, function)) * 1e6 / len(listed)
            )
    found = medians(contenders)
    for rival in rivals:
        yield Row(
            f"prefix match of {PROMPT_BLOCKS} blocks (hash, look-up, tokens compared)",
            "us/block",
            found["kvmmu"],
            rival,
            found[rival],
            Goal(0.15),
        )


def decode_step(bench: Bench) -> Iterator[Row]:
    """Every sequence gets one token a step: the longest grow by 13 blocks on the way."""
    width = DEPTH + STEPS // BLOCK + 1
    mmu = MMU(BATCH * width, BLOCK, max_sequences=BATCH, max_blocks_per_sequence=width)
    prompt = (DEPTH - 1) * BLOCK + 1
    one = tables(mmu, 1, width, prompt)
    sequences = np.empty(BATCH, np.int64)
    for index in range(BATCH):
        sequences[index] = mmu.open(random_tokens(prompt + index % BLOCK, seed=index))
        prefill(mmu, int(sequences[index]), one, prompt)
        mmu.truncate(int(sequences[index]), prompt)
    batch = tables(mmu, BATCH, width, BATCH)
    new = random_tokens(BATCH, seed=BATCH)

    def step() -> None:
        number = mmu.begin_step()
        mmu.prepare(number, sequences, batch, new_tokens=new)
        mmu.written(number)
        mmu.end_step(number)

    times: Sequence[float] = sorted(seconds(step) * 1e6 for _ in range(STEPS))
    name = f"decode step, {BATCH} sequences of {DEPTH} blocks, one token each"
    yield Row(f"{name}: median of {STEPS}", "us", statistics.median(times))
    yield Row(f"{name}: worst of {STEPS}", "us", times[-1])


def rows(bench: Bench) -> Iterator[Row]:
    vllm = with_path(bench.vllm, load_vllm, bench) if bench.vllm else None
    yield from open_and_close(bench, vllm)
    yield from prefix_match(bench, vllm)
    yield from decode_step(bench)
