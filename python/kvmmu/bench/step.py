"""Sequences and steps, called from Python: what a serving engine pays for each.

Rivals (``--vllm DIR``): vLLM's BlockPool, which gets and frees blocks without hashing or matching a
prompt; its block hashing, which looks nothing up; its allocate_slots, which writes no tables.
Ours does all of that. Without vLLM, hashlib's SHA-256 of the same bytes stands in for the hashing.
"""

from __future__ import annotations

import hashlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import MMU, BlockTables
from .harness import Bench, Goal, Row, medians, of_the_core, seconds, with_path

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
    manager: Callable[[int, int], Any]
    """(blocks, longest sequence in tokens) -> KVCacheManager"""
    request: Callable[[str, list[int]], Any]
    """(name, prompt) -> Request"""


def load_vllm() -> VLLM:
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256, xxhash
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import (
        get_request_block_hasher,
        hash_block_tokens,
        init_none_hash,
    )
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    init_none_hash(sha256)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    sampling = SamplingParams(max_tokens=2 * STEPS)
    sampling.update_from_generation_config({}, eos_token_id=0)
    hasher = get_request_block_hasher(BLOCK, sha256)

    def manager(blocks: int, longest: int) -> Any:
        groups = [KVCacheGroupSpec(["layer"], spec)]
        config = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        return KVCacheManager(
            config, max_model_len=longest, scheduler_block_size=BLOCK, hash_block_size=BLOCK
        )

    def request(name: str, prompt: list[int]) -> Any:
        return Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=hasher,
        )

    hashes = {"sha256": sha256, "xxhash": xxhash}
    return VLLM(BlockPool, hash_block_tokens, hashes, manager, request)


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
        contenders = {"kvmmu": our_open_and_close(caching, tokens)}
        if vllm is not None:
            contenders["vllm"] = vllm_get_and_free(vllm, caching)
        found = medians(contenders, rounds=51)
        yield Row(
            f"open + close {PROMPT_BLOCKS} blocks, {'hashed' if caching else 'no cache'}",
            "ns/block",
            found["kvmmu"],
            f"vLLM BlockPool, {'not hashed' if caching else 'no cache'}",
            found.get("vllm"),
        )


def our_open_and_close(caching: bool, tokens: Tokens) -> Callable[[], float]:
    mmu = MMU(POOL, BLOCK, prefix_caching=caching)
    return lambda: seconds(lambda: mmu.close(mmu.open(tokens))) * 1e9 / PROMPT_BLOCKS


def vllm_get_and_free(vllm: VLLM, caching: bool) -> Callable[[], float]:
    pool = vllm.block_pool(POOL, caching, BLOCK)

    def work() -> None:
        pool.free_blocks(pool.get_new_blocks(PROMPT_BLOCKS))

    return lambda: seconds(work) * 1e9 / PROMPT_BLOCKS


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

    def hashed(function: Callable[[Any], bytes], of: VLLM) -> Callable[[], float]:
        def work() -> None:
            parent = None
            for block in listed:
                parent = of.hash_block_tokens(function, parent, block)

        return lambda: seconds(work) * 1e6 / len(listed)

    contenders: dict[str, Callable[[], float]] = {
        "kvmmu": lambda: seconds(lambda: mmu.match(tokens)) * 1e6 / max(matched, 1)
    }
    rivals: list[str] = []
    if vllm is None:
        rivals.append("hashlib sha256 (stand-in for vLLM)")
        contenders[rivals[-1]] = lambda: seconds(lambda: chained_sha256(tokens)) * 1e6 / len(listed)
    else:
        for name, function in vllm.hashes.items():
            rivals.append(f"vLLM hash_block_tokens, {name}")
            contenders[rivals[-1]] = hashed(function, vllm)
    found = medians(contenders)
    for rival in rivals:
        yield Row(
            f"match a prefix of {PROMPT_BLOCKS} blocks",
            "us/block",
            found["kvmmu"],
            rival,
            found[rival],
            Goal(0.15),
        )


def decode_step(bench: Bench, vllm: VLLM | None) -> Iterator[Row]:
    """Every sequence gets one token a step: the longest grow by 13 blocks on the way."""
    width = DEPTH + STEPS // BLOCK + 1
    prompt = (DEPTH - 1) * BLOCK + 1
    ours = our_decode_step(width, prompt)
    theirs = None if vllm is None else vllm_decode_step(vllm, width, prompt)
    times: dict[str, list[float]] = {"kvmmu": [], "vllm": []}
    for number in range(STEPS + 1):
        took = {"kvmmu": ours(), "vllm": theirs() if theirs else None}
        for name, figure in took.items():
            if (
                number and figure is not None
            ):  # the first step, which writes whole rows, is left out
                times[name].append(figure * 1e6)
    name = f"decode step of {BATCH} x {DEPTH} blocks"
    for word, reduce in (("median", statistics.median), ("worst", max)):
        yield Row(
            f"{name}, {word} of {STEPS}",
            "us",
            reduce(times["kvmmu"]),
            "vLLM allocate_slots (no tables)",
            reduce(times["vllm"]) if times["vllm"] else None,
        )


def our_decode_step(width: int, prompt: int) -> Callable[[], float]:
    """begin, prepare (tables written), written, end."""
    mmu, sequences, batch, new = decoding(width, prompt)

    def step() -> None:
        number = mmu.begin_step()
        mmu.prepare(number, sequences, batch, new_tokens=new)
        mmu.written(number)
        mmu.end_step(number)

    return lambda: seconds(step)


def decoding(width: int, prompt: int) -> tuple[MMU, npt.NDArray[np.int64], BlockTables, Tokens]:
    """A batch whose prompts are written, its tables, and a token for each."""
    mmu = MMU(BATCH * width, BLOCK, max_sequences=BATCH, max_blocks_per_sequence=width)
    one = tables(mmu, 1, width, prompt)
    sequences = np.empty(BATCH, np.int64)
    for index in range(BATCH):
        sequences[index] = mmu.open(random_tokens(prompt, seed=index))
        prefill(mmu, int(sequences[index]), one, prompt)
    batch = tables(mmu, BATCH, width, BATCH)
    return mmu, sequences, batch, random_tokens(BATCH, seed=BATCH)


def vllm_decode_step(vllm: VLLM, width: int, prompt: int) -> Callable[[], float]:
    """One allocate_slots a request, prefix caching on; tokens are appended outside the clock."""
    manager = vllm.manager(BATCH * width + 1, width * BLOCK)
    requests = []
    for index in range(BATCH):
        request = vllm.request(str(index), random_tokens(prompt, seed=index).tolist())
        manager.allocate_slots(request, prompt)
        request.num_computed_tokens = prompt
        requests.append(request)

    def step() -> None:
        for request in requests:
            manager.allocate_slots(request, 1)

    def timed() -> float:
        for request in requests:
            request.append_output_token_ids(7)
        took = seconds(step)
        for request in requests:
            request.num_computed_tokens += 1
        return took

    return timed


def prepare_alone(bench: Bench) -> Iterator[Row]:
    """Rows, lengths and slots of a decode step: from Rust, and from Python in company (torch
    imported where it is there, garbage collector on, eight idle threads)."""
    name = f"prepare {BATCH} x {DEPTH} blocks"
    core = of_the_core(bench, "decode_step")
    if core is not None:
        ratio = Goal(3, of="ratio")
        yield Row(f"{name}, core, median", "us", core["us"], goal=Goal(20))
        yield Row(f"{name}, core, p99", "us", core["p99_us"], "its median", core["us"], ratio)
    try:
        import torch  # noqa: F401
    except ImportError:
        bench.note("prepare is measured without torch, which is not installed")
    wake = threading.Event()
    idle = [threading.Thread(target=wake.wait, daemon=True) for _ in range(8)]
    for thread in idle:
        thread.start()
    width = DEPTH + 1000 // BLOCK + 2
    mmu, sequences, batch, new = decoding(width, (DEPTH - 1) * BLOCK + 1)
    times = []
    for _ in range(1001):
        number = mmu.begin_step()
        start = time.perf_counter()
        mmu.prepare(number, sequences, batch, new_tokens=new)
        times.append((time.perf_counter() - start) * 1e6)
        mmu.written(number)
        mmu.end_step(number)
    wake.set()
    times = sorted(times[1:])
    median, p99 = times[500], times[990]
    yield Row(f"{name}, from Python, median", "us", median, goal=Goal(40))
    yield Row(f"{name}, from Python, p99", "us", p99, "its median", median, Goal(3, of="ratio"))

    indptr, last = np.zeros(BATCH + 1, np.int32), np.zeros(BATCH, np.int32)
    indices = np.zeros(BATCH * width, np.int32)
    count = batch.csr(indptr, indices, last)
    source = indices[:count].copy()
    target = np.zeros_like(source)

    def copied() -> None:
        target[:] = source

    found = medians(
        {
            "kvmmu": lambda: seconds(lambda: batch.csr(indptr, indices, last)) * 1e6,
            "memmove": lambda: seconds(copied) * 1e6,
        }
    )
    yield Row(
        f"CSR of {BATCH} x {DEPTH} blocks",
        "us",
        found["kvmmu"],
        "memmove of its indices",
        found["memmove"],
        Goal(1.2, of="ratio"),
    )

    token, sequence = new[:1].copy(), int(sequences[0])
    length = mmu.info(sequence).num_tokens - 500
    mmu.truncate(sequence, length)

    def thousand() -> float:
        start = time.perf_counter()
        for _ in range(500):
            mmu.append(sequence, token)
        for _ in range(500):
            mmu.states()
        took = time.perf_counter() - start
        mmu.truncate(sequence, length)
        return took * 1e3

    yield Row(
        "one call from Python (append a token; states)",
        "us",
        medians({"kvmmu": thousand})["kvmmu"],
        goal=Goal(0.5),
    )


def rows(bench: Bench) -> Iterator[Row]:
    vllm = with_path(bench.vllm, load_vllm, bench) if bench.vllm else None
    yield from open_and_close(bench, vllm)
    yield from prefix_match(bench, vllm)
    yield from decode_step(bench, vllm)
    yield from prepare_alone(bench)
