"""Traces made from a seed, for whoever has none at hand.

What lives here: :func:`small` (a few hundred requests of chats that share system prompts and
their own history) and :func:`article` (a mix of long and short requests). What never lives here:
files. The same seed makes the same trace.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from .traces import TRACE_BLOCK, Trace

__all__ = ["article", "lognormal", "small"]

SMALL_REQUESTS = 240


def small(seed: int = 0, *, rate: float = 8.0) -> Trace:
    """240 turns of 60 chats in about half a minute: 5 system prompts, history as prefix.

    Args:
        seed: makes the trace.
        rate: requests a second, Poisson.
    """
    random = np.random.default_rng([seed, 1])
    count = SMALL_REQUESTS
    arrival = np.cumsum(random.exponential(1 / rate, count))
    fresh = iter(range(1 << 62))
    systems = [[next(fresh) for _ in range(blocks)] for blocks in (1, 2, 2, 3, 6)]
    chats: list[list[int]] = [list(systems[i]) for i in random.integers(0, 5, 60)]
    prompts = np.empty(count, dtype=np.int64)
    ids: list[list[int]] = []
    for turn in range(count):
        chat = chats[int(random.integers(0, len(chats)))]
        chat.extend(next(fresh) for _ in range(int(random.integers(0, 4))))
        tail = int(random.integers(1, TRACE_BLOCK))
        prompts[turn] = len(chat) * TRACE_BLOCK + tail
        ids.append([*chat, next(fresh)])
    outputs = lognormal(random, count, mean=60, sigma=0.9, low=1, high=400)
    starts = np.zeros(count + 1, dtype=np.int64)
    np.cumsum([len(row) for row in ids], out=starts[1:])
    return Trace(
        name="sample",
        kind="sample",
        arrival_s=arrival - arrival[0],
        prompt_tokens=prompts,
        output_tokens=outputs,
        hash_ids=np.array([value for row in ids for value in row], dtype=np.uint64),
        hash_starts=starts,
    )


def article(seed: int = 0, *, rate: float = 5.63, minutes: float = 10.0) -> Trace:
    """Long and short requests in one pool; nothing is shared.

    30 % long: prompt lognormal with mean 64k and sigma 0.5, cut to 4k .. 128k; 30 % of them
    generate 20 tokens, the others a mean of 400 (sigma 0.8). 70 % short: prompt mean 2k, sigma
    0.8, cut at 16k; output mean 300, sigma 1.3, cut at 10k. Poisson arrivals. Means are those of
    the lognormal before it is cut. In 90,112 blocks of 16 tokens and at 200,000 prefill tokens a
    second, 4.5 / 5.63 / 6.76 / 8.26 requests a second ask for 60 / 75 / 90 / 110 % of the memory.

    Args:
        seed: makes the trace.
        rate: requests a second.
        minutes: simulated time that the arrivals cover.
    """
    random = np.random.default_rng([seed, 2])
    count = max(1, int(random.poisson(rate * minutes * 60)))
    arrival = np.sort(random.uniform(0, minutes * 60, count))
    long = random.random(count) < 0.30
    k = 1024
    prompts = np.where(
        long,
        lognormal(random, count, mean=64 * k, sigma=0.5, low=4 * k, high=128 * k),
        lognormal(random, count, mean=2 * k, sigma=0.8, low=1, high=16 * k),
    )
    of_long = np.where(
        random.random(count) < 0.30,
        20,
        lognormal(random, count, mean=400, sigma=0.8, low=1, high=10_000),
    )
    of_short = lognormal(random, count, mean=300, sigma=1.3, low=1, high=10_000)
    return Trace(
        name="sample article",
        kind="sample",
        arrival_s=arrival - arrival[0],
        prompt_tokens=prompts,
        output_tokens=np.where(long, of_long, of_short),
        hash_ids=np.empty(0, dtype=np.uint64),
        hash_starts=np.zeros(count + 1, dtype=np.int64),
    )


def lognormal(
    random: np.random.Generator, count: int, *, mean: float, sigma: float, low: int, high: int
) -> npt.NDArray[np.int64]:
    """int64 [count]: lengths whose mean is ``mean`` before they are cut to ``low`` .. ``high``."""
    drawn = random.lognormal(math.log(mean) - sigma * sigma / 2, sigma, count)
    return np.clip(np.rint(drawn), low, high).astype(np.int64)
