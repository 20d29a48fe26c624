"""What a run comes to: a dict for ``--json`` and a table for people.

What lives here: the definition of every figure. What never lives here: counting.

- ``prefix_hit_rate``: blocks found in the prefix cache / full blocks of the prompts;
  ``prefix_hit_rate_listed``: / ceil(prompt / block_size). Both over requests that were admitted,
  counted when first opened; a request computed again after preemption is not counted twice.
- ``generated_tokens``: as the requests ask for them; a token is counted once, however often its
  request is computed again.
- ``moved_blocks``: see :mod:`.seen`. Moves of blocks that only the cache holds show in no row and
  are not in it; ``committed_moves`` is the core's own count of all. ``aborted_moves``: moves begun
  and given back.
- ``wasted_blocks``: see :mod:`.sharing`; the worst of the sampled steps.
- ``live_peak``, ``live_mean``: blocks in use (states), before the requests that a step finishes
  are closed. ``fragmentation_ratio_mean``: 1 - largest run / available blocks, after compaction;
  ``runs_per_sequence_mean``: over steps with an open sequence. Means are over steps.
- ``huge_cover``: complete regions of 512 blocks of running sequences that are one page of order 9
  / all, over steps; None when there was no such region. ``huge_cover_separable``: the same of the
  regions whose blocks were all first mapped by one sequence (see :mod:`.cover`), over one step in
  32. ``token_share_by_page``: blocks that pages
  of each order map / all, over steps. ``promotions``, ``splits``, ``huge_missed``, ``holds_made``,
  ``holds_broken``: the core's counts. ``runs_at_end``: runs of a sequence when it finished, mean
  over those of at most 2,000 tokens and of more than 100,000; ``held_blocks`` at the end.
- ``mmu_s``, ``mmu_us_per_step``: see :mod:`.metrics`. ``wall_s``: the whole run without reading
  the trace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .metrics import TimedMMU, Totals
from .options import Options
from .traces import Trace

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["figures", "table"]


def figures(
    trace: Trace, options: Options, totals: Totals, mmu: TimedMMU, wall_s: float
) -> dict[str, Any]:
    """All figures of a run, ready for JSON."""
    stats = mmu.stats()
    laps = np.array(mmu.laps, dtype=np.float64) / 1000
    steps = max(totals.steps, 1)
    return {
        "trace": trace.name,
        "requests": totals.requests,
        "finished": totals.finished,
        "refused": totals.refused,
        "preempted": totals.preempted,
        "skipped_lines": trace.skipped_lines,
        "out_of_order": trace.out_of_order,
        "interrupted": totals.interrupted,
        "prefix_hit_rate": _ratio(totals.blocks_found, totals.prompt_blocks_full),
        "prefix_hit_rate_listed": _ratio(totals.blocks_found, totals.prompt_blocks_listed),
        "prompt_tokens": totals.prompt_tokens,
        "computed_tokens": totals.computed_tokens,
        "generated_tokens": totals.generated_tokens,
        "steps": totals.steps,
        "simulated_s": totals.simulated_s,
        "peak_running": totals.peak_running,
        "running_mean": totals.running_sum / steps,
        "moved_blocks": totals.moved_blocks,
        "compactions": totals.compactions,
        "faults_injected": totals.faults,
        "freed_blocks": stats["freed_blocks"] + stats["left_cached"],
        "guarantee_broken": totals.guarantee_broken,
        "guarantee": totals.guarantee() if options.guarantee is not None else None,
        "committed_moves": stats["moves_committed"],
        "aborted_moves": stats["moves_aborted"],
        "evicted_blocks": stats["evicted_blocks"],
        "fragmentation_ratio_mean": totals.ratio_sum / max(totals.measured, 1),
        "runs_per_sequence_mean": totals.runs_sum / max(totals.runs_steps, 1),
        "huge_cover": totals.huge_sum / totals.regions_sum if totals.regions_sum else None,
        "huge_cover_separable": (
            totals.separable_huge_sum / totals.separable_sum if totals.separable_sum else None
        ),
        "token_share_by_page": _shares(totals.pages_sum, options.page_orders),
        "promotions": stats["promotions"],
        "splits": stats["splits"],
        "huge_missed": stats["huge_missed"],
        "holds_made": stats["holds_made"],
        "holds_broken": stats["holds_broken"],
        "runs_at_end": {
            length: {"sequences": len(runs), "mean": float(np.mean(runs)) if runs else None}
            for length, runs in totals.runs_at_end.items()
        },
        "wasted_blocks": totals.wasted_blocks,
        "wasted_samples": totals.wasted_samples,
        "live_peak": totals.live_peak,
        "live_mean": totals.live_sum / steps,
        "verified_tokens": totals.verified_tokens,
        "mismatches": totals.mismatches,
        "wall_s": wall_s,
        "mmu_s": mmu.total_ns / 1e9,
        "mmu_us_per_step": {
            "mean": float(laps.mean()) if len(laps) else 0.0,
            "p50": float(np.percentile(laps, 50)) if len(laps) else 0.0,
            "p99": float(np.percentile(laps, 99)) if len(laps) else 0.0,
        },
        "refusals": [{"request": request, "reason": reason} for request, reason in totals.refusals],
        "options": {
            "blocks": options.blocks,
            "block_size": options.block_size,
            "compaction": options.compaction,
            "budget_blocks": options.budget_blocks,
            "guarantee": options.guarantee,
            "inject_faults": options.inject_faults,
            "max_running": options.max_running,
            "prefill_tokens_per_s": options.prefill_tokens_per_s,
            "step_ms": options.step_ms,
            "speed": options.speed,
            "seed": options.seed,
            "placement": options.placement,
            "page_orders": list(options.page_orders),
            "hold_blocks": options.hold_blocks,
            "eviction": options.eviction,
            "page_aware": options.page_aware,
            "reserved_blocks": options.headroom,
            "preheat_pages": options.preheat_pages,
            "prefix_caching": options.prefix_caching,
            "windows_below": options.windows_below,
            "gather_least": options.gather_least,
            "further": dict(options.further),
            "one_at_a_time": options.one_at_a_time,
            "verify": options.verify,
            "sabotage": options.sabotage,
        },
    }


def _shares(pages: dict[int, int], orders: tuple[int, ...]) -> dict[str, float]:
    blocks = {order: pages.get(order, 0) << order for order in sorted(set(orders))}
    total = sum(blocks.values())
    return {str(order): _ratio(n, total) for order, n in blocks.items()}


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def table(figures: dict[str, Any]) -> RenderableType:
    """The figures as a table. Needs rich."""
    from rich.table import Table

    f, o = figures, figures["options"]
    grid = Table(
        title=f"kvmmu replay {f['trace']}" + (" (interrupted)" if f["interrupted"] else ""),
        title_style="bold",
        title_justify="left",
        show_header=False,
        box=None,
        padding=(0, 1),
    )
    grid.add_column(style="bold")
    grid.add_column(justify="right")
    grid.add_column(style="dim")

    def line(name: str, value: str, note: str = "", style: str = "") -> None:
        grid.add_row(name, f"[{style}]{value}[/{style}]" if style else value, note)

    pool = f"{o['blocks']:,} blocks of {o['block_size']} tokens"
    line("requests", f"{f['finished']:,}", f"finished of {f['requests']:,}")
    if f["refused"]:
        first = f["refusals"][0]
        line("  refused", f"{f['refused']:,}", f"request {first['request']} {first['reason']}")
    if f["preempted"]:
        line("  preempted", f"{f['preempted']:,}", "times, out of blocks; computed again")
    if f["skipped_lines"]:
        line("  bad lines", f"{f['skipped_lines']:,}", "skipped")
    if f["out_of_order"]:
        line("  out of order", f"{f['out_of_order']:,}", "sorted by arrival")
    line("tokens", _big(f["prompt_tokens"]), f"of prompts, {_big(f['computed_tokens'])} computed")
    line("", _big(f["generated_tokens"]), "generated")
    line(
        "prefix cache",
        f"{f['prefix_hit_rate']:.2%}",
        f"of full prompt blocks found ({f['prefix_hit_rate_listed']:.2%} of all)",
    )
    line("memory", f"{f['live_mean'] / o['blocks']:.1%}", f"in use on average, of {pool}")
    line("", f"{f['live_peak'] / o['blocks']:.1%}", f"at the peak ({f['live_peak']:,} blocks)")
    if not o["one_at_a_time"]:
        line("running", f"{f['running_mean']:.1f}", f"on average, {f['peak_running']} at the peak")
        line("fragmentation", f"{f['fragmentation_ratio_mean']:.3f}", "1 - largest run / available")
        line("runs a sequence", f"{f['runs_per_sequence_mean']:.1f}", "on average")
        shares = ", ".join(
            f"{share:.1%} by {1 << int(order)}" for order, share in f["token_share_by_page"].items()
        )
        if len(o["page_orders"]) > 1:
            line("pages", shares, "share of blocks mapped by pages of so many")
            if f["huge_cover"] is not None:
                line("huge cover", f"{f['huge_cover']:.3f}", "of complete regions of 512 blocks")
            if f["huge_cover_separable"] is not None:
                note = "of those that no other sequence has a part of"
                line("", f"{f['huge_cover_separable']:.3f}", note)
            line("promotions", f"{f['promotions']:,}", f"{f['splits']:,} splits")
            if 9 in o["page_orders"]:
                note = "regions of 512 blocks that got no huge page"
                line("huge pages missed", f"{f['huge_missed']:,}", note)
        if o["hold_blocks"]:
            line("holds", f"{f['holds_made']:,}", f"made, {f['holds_broken']:,} broken for others")
        for length, runs in f["runs_at_end"].items():
            if runs["sequences"]:
                note = f"on average, of {runs['sequences']:,} {length} sequences at their end"
                line("runs at the end", f"{runs['mean']:.1f}", note)
        if o["compaction"]:
            per_step = f["moved_blocks"] / max(f["steps"], 1)
            line("moved blocks", f"{f['moved_blocks']:,}", f"{per_step:.2f} a step")
            if o["inject_faults"]:
                line("faults", f"{f['faults_injected']:,}", f"{f['aborted_moves']:,} moves aborted")
        if f["guarantee"] is not None:
            held, broken = f["guarantee"], f["guarantee_broken"]
            line(
                "windows in excess",
                f"{held['excess_mean']:.2f}",
                f"on average, at worst {held['excess_worst']}; owed {held['owed_mean']:.0f} moves, "
                f"p99 {held['owed_p99']:.0f}",
            )
            line("guarantee broken", f"{broken}", "steps", "red" if broken else "")
        wasted = f["wasted_blocks"]
        line("blocks held twice", f"{wasted}", "", "red" if wasted else "")
    if o["verify"]:
        bad = f["mismatches"]
        line(
            "verified",
            _big(f["verified_tokens"]),
            f"[red]{bad:,} mismatches[/red]" if bad else "[green]positions, no mismatch[/green]",
        )
    us = f["mmu_us_per_step"]
    if not o["one_at_a_time"]:
        line("steps", f"{f['steps']:,}", f"{f['simulated_s']:,.0f} s simulated")
    line("time", f"{f['wall_s']:.1f} s", f"of which {f['mmu_s']:.1f} s inside kvmmu")
    line(
        "kvmmu a step",
        f"{us['mean']:.0f} µs",
        f"mean; p50 {us['p50']:.0f} µs, p99 {us['p99']:.0f} µs",
    )
    return grid


def _big(count: int) -> str:
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**4)):
        if count >= size:
            return f"{count / (1000 if unit == 'k' else size):,.1f} {unit}"
    return f"{count:,}"
