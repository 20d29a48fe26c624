"""Page sizes fitted to the lengths of a trace, and checked by replaying both.

What lives here: :func:`fit`, :func:`compare`, and what a trace tells of a load (:func:`looked_at`).
What never lives here: the replay.

A sequence of L blocks with pages of 2**k and 512 blocks takes ``L // 512`` huge entries,
``(L % 512) >> k`` medium ones, and the rest singly. The medium order with the fewest entries over
all requests is fitted; huge pages are left out where less than a hundredth of the blocks could be
in one. That is arithmetic on an empty pool; only the replay knows what a full one has left, so both
are replayed and the fitted policy is advised only where it did better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..replay.options import Options
from ..replay.run import replay
from ..replay.traces import Trace

__all__ = ["DEFAULT", "Compared", "PagePolicy", "Seen", "compare", "fit", "looked_at"]

WINDOW = 512
HUGE_LEAST = 0.01
"""Share of blocks that must be able to lie in huge pages."""
BETTER = 0.95
"""Entries a block, of the default's, from which a policy counts as better."""
HITS = 0.002
"""Hit rate that it may lose."""
_PHASE_S = 300.0
_PHASE_REQUESTS = 20
_SHIFT = 0.3

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PagePolicy:
    """Arguments of :class:`kvmmu.MMU`."""

    page_orders: tuple[int, ...]
    medium_from: int
    huge_from: int


DEFAULT = PagePolicy((0, 2, 9), 512, 2048)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a trace says of its load.

    Attributes:
        mean_tokens: of a sequence at its end. longest: the longest.
        lengths: int64 [n], tokens of each at its end.
        huge_share: share of blocks in complete regions of 512.
        shifts: the share of requests that reach a region differs by three tenths between phases of
            five minutes.
        prefixes: prompts have prefixes in common.
    """

    mean_tokens: float
    longest: int
    lengths: Ints
    huge_share: float
    shifts: bool
    prefixes: bool


def looked_at(trace: Trace, block_size: int) -> Seen:
    """Looks at a trace without replaying it."""
    lengths = (trace.prompt_tokens + trace.output_tokens).astype(np.int64)
    blocks = -(-lengths // block_size)
    huge = (blocks // WINDOW * WINDOW).sum()
    shares = []
    phase = (trace.arrival_s // _PHASE_S).astype(np.int64)
    for number in np.unique(phase):
        those = blocks[phase == number]
        if len(those) >= _PHASE_REQUESTS:
            shares.append(float((those >= WINDOW).mean()))
    ids = trace.hash_ids
    return Seen(
        mean_tokens=float(lengths.mean()),
        longest=int(lengths.max()),
        lengths=lengths,
        huge_share=float(huge / max(blocks.sum(), 1)),
        shifts=bool(shares) and max(shares) - min(shares) > _SHIFT,
        prefixes=bool(len(ids)) and len(np.unique(ids)) < len(ids),
    )


def entries(blocks: Ints, orders: tuple[int, ...]) -> Ints:
    """Page-table entries of sequences of so many blocks, where every page is to be had."""
    left, count = blocks.copy(), np.zeros_like(blocks)
    for order in sorted(orders, reverse=True):
        count += left >> order
        left &= (1 << order) - 1
    return count


def fit(lengths: Ints, block_size: int) -> PagePolicy:
    """The policy with the fewest entries for sequences of these lengths (tokens)."""
    blocks = -(-lengths // block_size)
    total = max(int(blocks.sum()), 1)
    huge = bool((blocks // WINDOW * WINDOW).sum() / total >= HUGE_LEAST)
    top = (9,) if huge else ()
    orders = min(
        ((0, order, *top) for order in range(1, 9)),
        key=lambda orders: (int(entries(blocks, orders).sum()), orders),
    )
    medium = block_size << (orders[1] - 1)  # half a page: what is shorter hardly grows into one
    return PagePolicy(orders, medium, max(medium, block_size * WINDOW - 1))


@dataclass(frozen=True, slots=True)
class Compared:
    """Two replays of one trace.

    Attributes:
        default, fitted: figures of each.
        policy: that was fitted.
        better: whether it is advised.
        why: in words.
    """

    default: dict[str, Any]
    fitted: dict[str, Any]
    policy: PagePolicy
    better: bool
    why: str


def entries_a_block(figures: dict[str, Any]) -> float:
    """Page-table entries a block, over the steps of a replay."""
    shares = figures["token_share_by_page"]
    return float(sum(share / (1 << int(order)) for order, share in shares.items()))


def compare(
    trace: Trace,
    blocks: int,
    block_size: int,
    *,
    watch: Callable[[Any], bool] = lambda totals: False,
) -> Compared:
    """Fits a policy, replays the trace under the default and under it.

    Raises:
        InvalidConfig: the replay does not fit this machine.
    """
    policy = fit(looked_at(trace, block_size).lengths, block_size)
    default = _replay(trace, blocks, block_size, DEFAULT, watch)
    if policy == DEFAULT:
        return Compared(default, default, policy, False, "the default is what fits")
    fitted = _replay(trace, blocks, block_size, policy, watch)
    before, after = entries_a_block(default), entries_a_block(fitted)
    said = f"{after:.3f} entries a block, the default {before:.3f}"
    if default["interrupted"] or fitted["interrupted"]:
        return Compared(default, fitted, policy, False, f"stopped early: {said}")
    if not before:
        return Compared(default, fitted, policy, False, "nothing ran long enough to be looked at")
    if after > BETTER * before:
        return Compared(default, fitted, policy, False, f"no better in the replay: {said}")
    if fitted["preempted"] > default["preempted"] or fitted["refused"] > default["refused"]:
        worse = f"{fitted['preempted']} preempted, with the default {default['preempted']}"
        return Compared(default, fitted, policy, False, f"{said}, but {worse}")
    if fitted["prefix_hit_rate"] < default["prefix_hit_rate"] - HITS:
        worse = f"hits {fitted['prefix_hit_rate']:.3f}, not {default['prefix_hit_rate']:.3f}"
        return Compared(default, fitted, policy, False, f"{said}, but {worse}")
    return Compared(default, fitted, policy, True, said)


def _replay(
    trace: Trace,
    blocks: int,
    block_size: int,
    policy: PagePolicy,
    watch: Callable[[Any], bool],
) -> dict[str, Any]:
    options = Options(
        blocks=blocks,
        block_size=block_size,
        page_orders=policy.page_orders,
        further={"medium_from": policy.medium_from, "huge_from": policy.huge_from},
        contents=False,
    )
    return replay(trace, options, watch=watch)
