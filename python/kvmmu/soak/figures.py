"""What a run comes to: every figure, with its definition beside it.

What lives here: :data:`MEASURES`, in the order in which tables show them, and :func:`figures`. What
never lives here: counting (the serving loop does) and tables.

*Long* is a request with a prompt of more than 100,000 tokens, or a sequence of more than that at
its end; *short* is a sequence of at most 2,000. Nothing of the warm-up is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..replay.metrics import LONG_PROMPT, Totals
from ..replay.options import Options
from ..replay.queue import CAUSES
from ..replay.run import Served
from ..replay.traces import Trace
from .policies import Chosen
from .task import Task

__all__ = ["MEASURES", "Measure", "figures"]

LOW_USE = 0.5
TOKENS_OF_128K = 131_072


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure.

    Attributes:
        name: its key in JSON.
        label: in tables.
        form: how a table shows it: a format, of the value times ``scale``.
        meaning: its definition.
    """

    name: str
    label: str
    form: str
    meaning: str
    scale: float = 1.0


MEASURES = (
    Measure("requests", "requests", ",.0f", "admitted, or left before"),
    Measure("running_mean", "running", ".1f", "requests that ran at once, mean over steps"),
    Measure("pool_used", "pool in use %", ".1f", "blocks in use / usable blocks, mean", 100),
    Measure(
        "shape_failures",
        "shape failures",
        ",.0f",
        "requests that were refused as the head of the queue at least once although enough blocks "
        "were available, for they were not in the shape required",
    ),
    Measure(
        "memory_failures",
        "memory failures",
        ",.0f",
        "requests that were refused as the head of the queue at least once for want of blocks",
    ),
    Measure(
        "out_of_memory_events",
        "OOM events",
        ",.0f",
        "times a running request was thrown out for want of blocks, and requests refused for good",
    ),
    Measure(
        "timeouts",
        "timeouts %",
        ".2f",
        "clients that left because they were not admitted in time / requests",
        100,
    ),
    Measure("timeouts_long", "  long %", ".2f", "the same, of long requests", 100),
    Measure(
        "timeouts_long_shape",
        "  long, shape %",
        ".2f",
        "of long requests: those that left and had waited for a shape more than for anything else",
        100,
    ),
    Measure("wait_p99_s", "wait p99 s", ".2f", "simulated seconds in the queue, p99"),
    Measure(
        "wait_shape_p99_s",
        "  long, shape p99 s",
        ".2f",
        "seconds that long requests waited while the head lacked a shape, p99",
    ),
    Measure(
        "huge_cover",
        "huge cover",
        ".3f",
        "complete regions of 512 blocks of running sequences that are one huge page / all, over "
        "the steps looked at",
    ),
    Measure(
        "free_windows",
        "free windows",
        ".3f",
        "aligned groups of 512 available blocks / as many as the available blocks could make, mean",
    ),
    Measure(
        "returnable_low",
        "  at low use",
        ".3f",
        "the same over the looks at which less than half the pool was in use: what could be given "
        "back",
    ),
    Measure(
        "returned",
        "given back",
        ".3f",
        "blocks given back / blocks that were available or given back beyond the spare",
    ),
    Measure(
        "ratio_available",
        "ratio, available",
        ".3f",
        "fragmentation ratio, 1 - largest run / available blocks, mean",
    ),
    Measure("ratio_empty", "ratio, empty", ".3f", "the same over empty blocks"),
    Measure(
        "runs_long",
        "runs of a 128k",
        ".1f",
        "runs of a long sequence at its end, per 131,072 tokens, mean",
    ),
    Measure(
        "pair_runs_long",
        "pair runs of a 128k",
        ".1f",
        "runs that are consecutive at both ends in the same order, per 131,072 tokens: the "
        "receiving end has the blocks of the long sequence that finished before",
    ),
    Measure("runs_short", "runs of a short", ".1f", "runs of a short sequence at its end, mean"),
    Measure("runs_all", "runs of all", ".1f", "runs of running sequences, mean"),
    Measure(
        "holds_tokens",
        "in use holds tokens %",
        ".1f",
        "tokens whose KV is in memory / slots of blocks in use",
        100,
    ),
    Measure(
        "holds_tokens_full",
        "pool holds tokens %",
        ".1f",
        "tokens whose KV is in memory / slots of the pool, while the head waited for memory or a "
        "shape (the vLLM paper's measure)",
        100,
    ),
    Measure(
        "unused_slots",
        "unused slots %",
        ".2f",
        "slots of last blocks that hold no token / slots of blocks in use",
        100,
    ),
    Measure("hit_rate", "prefix hits %", ".2f", "blocks found / full blocks of prompts", 100),
    Measure("moves_per_step", "moves a step", ".2f", "blocks moved, mean over steps"),
    Measure("moves_p99", "  p99", ".0f", "blocks moved in a step, p99"),
    Measure("moves_per_token", "moves a token", ".4f", "blocks moved / tokens generated"),
    Measure(
        "moves_per_huge_page",
        "moves a huge page",
        ".1f",
        "blocks moved / huge pages that sequences had at their end",
    ),
    Measure("moves_per_free", "moves a free", ".4f", "blocks moved / blocks freed"),
    Measure(
        "excess_mean",
        "windows in excess",
        ".2f",
        "windows held beyond those that the guarantee allows, mean over steps",
    ),
    Measure("excess_worst", "  worst", ".0f", "the most of a step"),
    Measure("owed_mean", "moves owed", ",.0f", "moves owed to the guarantee, mean over steps"),
    Measure("owed_p99", "  p99", ",.0f", "moves owed to the guarantee after a step, p99"),
    Measure(
        "step_lost_to_moves",
        "step lost to moves %",
        ".3f",
        "bytes moved at the scenario's copy rate / simulated time",
        100,
    ),
    Measure(
        "manager_share",
        "step in kvmmu %",
        ".3f",
        "wall time inside kvmmu a step / simulated time of a step, on this machine",
        100,
    ),
    Measure("restarts", "restarts", ",.0f", "times the pool was emptied"),
    Measure("continued", "forked turns", ",.0f", "continuations opened as forks of their parents"),
    Measure("dropped", "dropped pauses", ",.0f", "parked sequences that made room for others"),
    Measure("wall_s", "wall s", ".1f", "seconds that this run took here"),
)


def figures(
    task: Task, policy: Chosen, options: Options, trace: Trace, served: Served
) -> dict[str, Any]:
    """All figures of a run, ready for JSON. A figure that has no meaning for a run is None."""
    totals, mmu = served.totals, served.mmu
    now = mmu.stats()
    stats = {name: count - totals.stats_before.get(name, 0) for name, count in now.items()}
    steps = max(totals.steps, 1)
    waits = _Waits(totals, trace, options.step_s)
    moved = stats["moves_committed"]
    moves = np.array(totals.moved_by_step or [0])
    windows = np.array(totals.low_windows or np.empty((0, 2)))
    low = windows[windows[:, 0] < LOW_USE, 1] if len(windows) else windows
    laps = np.array(mmu.laps or [0], dtype=np.float64) / 1e9
    slots = options.blocks * options.block_size
    freed = stats["freed_blocks"] + stats["left_cached"]
    held = totals.guarantee() if options.guarantee is not None else {}
    found: dict[str, Any] = {
        "requests": len(totals.waits),
        "running_mean": totals.running_sum / steps,
        "pool_used": totals.live_sum / steps / options.blocks,
        "shape_failures": totals.failures["shape"],
        "memory_failures": totals.failures["memory"] + totals.failures["tables"],
        "out_of_memory_events": totals.preempted + totals.refused,
        "timeouts": _ratio(len(totals.timed_out), len(totals.waits)),
        "timeouts_long": _ratio(waits.long_left, waits.long),
        "timeouts_long_shape": _ratio(waits.long_left_for_shape, waits.long),
        "wait_p99_s": _p99(waits.all_s),
        "wait_shape_p99_s": _p99(waits.long_shape_s),
        "huge_cover": _ratio(totals.huge_sum, totals.regions_sum),
        "free_windows": _ratio(totals.windows_sum, totals.windows_steps),
        "returnable_low": float(low.mean()) if len(low) else None,
        "returned": _ratio(totals.offline_sum, totals.idle_sum),
        "ratio_available": _ratio(totals.ratio_sum, totals.measured),
        "ratio_empty": _ratio(totals.ratio_empty_sum, totals.measured),
        "runs_long": _per_128k(totals.pairs_at_end, 1, options.block_size),
        "pair_runs_long": _per_128k(totals.pairs_at_end, 2, options.block_size),
        "runs_short": _mean(totals.runs_at_end["short"]),
        "runs_all": _ratio(totals.runs_sum, totals.runs_steps),
        "holds_tokens": _ratio(totals.tokens_sum, totals.slots_sum),
        "holds_tokens_full": _ratio(totals.full_tokens_sum, totals.full_steps * slots),
        "unused_slots": _ratio(totals.unused_sum, totals.slots_sum),
        "hit_rate": _ratio(totals.blocks_found, totals.prompt_blocks_full)
        if options.prefix_caching
        else None,
        "moves_per_step": moved / steps,
        "moves_p99": float(np.percentile(moves, 99)),
        "moves_per_token": _ratio(moved, totals.generated_tokens),
        "moves_per_huge_page": _ratio(moved, totals.huge_at_end),
        "moves_per_free": _ratio(moved, freed),
        "excess_mean": held.get("excess_mean"),
        "excess_worst": held.get("excess_worst"),
        "owed_mean": held.get("owed_mean"),
        "owed_p99": held.get("owed_p99"),
        "guarantee_broken": totals.guarantee_broken if held else None,
        "step_lost_to_moves": moved
        * task.scenario.pool.block_bytes
        / task.scenario.server.copy_rate
        / (steps * options.step_s),
        "manager_share": float(laps.mean()) / options.step_s,
        "restarts": totals.restarts,
        "continued": totals.continued,
        "dropped": totals.dropped,
        "wall_s": served.wall_s,
    }
    return {
        "policy": policy.name,
        **found,
        "seed": task.seed,
        "rate": task.rate,
        "simulated_s": totals.simulated_s,
        "steps": totals.steps,
        "interrupted": totals.interrupted,
        "finished": totals.finished,
        "refused": totals.refused,
        "preempted": totals.preempted,
        "long_requests": waits.long,
        "long_timeouts": waits.long_left,
        "generated_tokens": totals.generated_tokens,
        "moved_blocks": moved,
        "promotions": stats["promotions"],
        "splits": stats["splits"],
        "evicted_blocks": stats["evicted_blocks"],
        "freed_blocks": freed,
        "waits_s": {cause: waits.sums[cause] for cause in CAUSES},
        "mismatches": totals.mismatches if options.verify else None,
        "verified_tokens": totals.verified_tokens if options.verify else None,
        "refusals": [{"request": request, "reason": reason} for request, reason in totals.refusals],
    }


class _Waits:
    """The waits of a run, sorted out."""

    def __init__(self, totals: Totals, trace: Trace, step_s: float) -> None:
        long = trace.prompt_tokens > LONG_PROMPT
        requests = np.array([request for request, _ in totals.waits], dtype=np.int64)
        steps = np.array(
            [[waited[cause] for cause in CAUSES] for _, waited in totals.waits], dtype=np.float64
        ).reshape(-1, len(CAUSES))
        seconds = steps * step_s
        shape = CAUSES.index("shape")
        of_long = long[requests]
        self.all_s = seconds.sum(axis=1)
        self.long = int(of_long.sum())
        self.long_shape_s = seconds[of_long, shape]
        self.sums = dict(zip(CAUSES, seconds.sum(axis=0).tolist(), strict=True))
        left = [waited for request, waited in totals.timed_out if long[request]]
        self.long_left = len(left)
        self.long_left_for_shape = sum(
            max(waited, key=lambda cause: waited[cause]) == "shape" for waited in left
        )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _p99(values: npt.NDArray[np.float64]) -> float | None:
    return float(np.percentile(values, 99)) if len(values) else None


def _per_128k(pairs: Sequence[tuple[int, int, int]], which: int, block_size: int) -> float | None:
    """Mean runs per 131,072 tokens, whatever a block holds."""
    return _mean([TOKENS_OF_128K / block_size * entry[which] / entry[0] for entry in pairs])
