"""``kvmmu replay``: a trace of real requests, served in simulated time.

What lives here: its options, messages and progress bar. What never lives here: the work (see
:mod:`kvmmu.replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import partial
from time import monotonic
from typing import Annotated, Any

import rich.console
import rich.progress
import typer

from ..errors import InvalidConfig
from ..pictures import History, Run, check_library, page
from ..replay import sample as samples
from ..replay import traces
from ..replay.metrics import Totals
from ..replay.options import MAX_BLOCK_SIZE, MAX_BLOCKS, Options, in_range
from ..replay.report import table
from ..replay.run import replay as run_replay
from .around import (
    CHECK_FAILED,
    INTERRUPTED,
    Files,
    Switch,
    as_json,
    complain,
    exit_codes,
    refuse_typed,
    serve_metrics,
    show,
    stop_on_ctrl_c,
)
from .configured import ConfigFile, Configured

__all__ = ["COMMAND"]

BLOCKS = 90_000
BLOCKS_FOR_SAMPLE = 2_048


DEFINITIONS = {
    "finished": "requests that were served to their end",
    "refused": "requests that can never run in this pool",
    "preempted": "times that a running request was thrown out and computed again",
    "prefix_hit_rate": "share of full prompt blocks that were found cached",
    "memory_in_use": "share of the pool, mean over steps",
    "fragmentation_ratio": "1 - longest available run / available blocks, mean over steps",
    "runs_a_sequence": "groups of consecutive blocks, mean over steps",
    "huge_cover": "share of complete regions of 512 blocks that one huge page maps",
    "moves_a_step": "blocks that were moved",
    "us_a_step": "microseconds inside kvmmu, on this machine",
}
"""Of the page's table."""


OF_MOVES = ("budget_blocks", "guarantee", "guarantee_slack", "inject_faults")
"""Options that count for nothing where no block is moved: parameters of the command."""
OF_THE_LOOP = (
    *("compaction", *OF_MOVES, "max_running", "prefill_tokens_per_s", "step_ms", "speed"),
    *("page_orders", "hold_blocks", "page_aware"),
)
"""Those that count for nothing without a clock."""


class Sample(Enum):
    """Traces that need no file."""

    small = "small"
    article = "article"


def replay(
    context: typer.Context,
    trace: Annotated[
        str | None,
        typer.Argument(
            metavar="TRACE", help="Mooncake JSONL or Azure CSV, plain or gzip.", show_default=False
        ),
    ] = None,
    sample: Annotated[
        Sample | None,
        typer.Option(
            metavar="[article]",
            help="Make a trace instead of reading one: a small one of chats, or 'article', "
            "a mix of long and short requests.",
            show_default=False,
        ),
    ] = None,
    blocks: Annotated[
        int | None,
        typer.Option(
            help=f"Blocks of the pool ({BLOCKS}, of the small sample {BLOCKS_FOR_SAMPLE})."
        ),
    ] = None,
    block_size: Annotated[int, typer.Option(help="Tokens a block.")] = 16,
    compaction: Annotated[Switch, typer.Option(help="Move blocks between steps.")] = Switch.on,
    budget_blocks: Annotated[int, typer.Option(help="Most blocks that one pass moves.")] = 32,
    guarantee: Annotated[
        bool,
        typer.Option(
            "--guarantee",
            help="Never hold more windows than live blocks need plus one, "
            "never move more than is freed.",
        ),
    ] = False,
    guarantee_slack: Annotated[
        int, typer.Option(help="Windows more that the guarantee may hold.")
    ] = 0,
    inject_faults: Annotated[
        float, typer.Option(help="Share of passes in which the mover fails on its way.")
    ] = 0,
    max_running: Annotated[int, typer.Option(help="Requests that run at once.")] = 256,
    prefill_tokens_per_s: Annotated[
        float,
        typer.Option(help="Prompt tokens computed a second. At 20,000 the memory never fills."),
    ] = 200_000,
    step_ms: Annotated[float, typer.Option(help="Simulated time of a step.")] = 30,
    speed: Annotated[float, typer.Option(help="How much faster than traced.")] = 1,
    limit: Annotated[
        int | None, typer.Option(help="Only the first requests.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="For tokens, samples and random positions.")] = 0,
    placement: Annotated[
        str,
        typer.Option(metavar="address|fullest|fifo|scatter", help="'scatter' is the worst case."),
    ] = "address",
    page_orders: Annotated[
        str,
        typer.Option(metavar="K,K,...", help="Page sizes: 2^K blocks each; '0' for single blocks."),
    ] = "0,2,9",
    hold_blocks: Annotated[
        int, typer.Option(help="Empty blocks kept behind a sequence to grow into.")
    ] = 8,
    eviction: Annotated[
        str, typer.Option(metavar="lru|lfu", help="Which cached blocks go first.")
    ] = "lru",
    page_aware: Annotated[
        Switch,
        typer.Option(help="Of the oldest tenth, evict where few blocks of a window are in use."),
    ] = Switch.on,
    one_at_a_time: Annotated[
        bool,
        typer.Option(
            "--one-at-a-time",
            help="Each request alone, in order, no clock: what the prefix cache finds.",
        ),
    ] = False,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests a second of a sample (8, of 'article' 5.63)."),
    ] = None,
    minutes: Annotated[float, typer.Option(help="Minutes of arrivals in '--sample article'.")] = 10,
    config: ConfigFile = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read contents back through the exported tables.")
    ] = False,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the figures.", show_default=False),
    ] = None,
    html_file: Annotated[
        str | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Write a page with the memory over time (needs kvmmu\\[html]).",
            show_default=False,
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            help="Serve metrics for Prometheus on this port of 127.0.0.1 (0: one that is free).",
            show_default=False,
        ),
    ] = None,
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Leave bad lines of a trace out, count them.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress bar and no table.")
    ] = False,
    sabotage: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve a trace of real requests in simulated time, and check every byte.

    Exit status 1: a check failed, or every request was refused.
    """
    with exit_codes():
        given = Configured(context, config)
        moves = given.pick("compaction", compaction is Switch.on, "compaction", "auto_compact")
        _refuse_ignored(context, trace, sample, moves, one_at_a_time)
        if not guarantee:
            refuse_typed(context, "without --guarantee", "with it", "guarantee_slack")
        options = Options(
            **_of_the_pool(given, blocks, block_size, page_orders, sample),
            compaction=moves,
            budget_blocks=given.pick("budget_blocks", budget_blocks, "compaction", "budget_blocks"),
            guarantee=given.pick(
                "guarantee", guarantee_slack if guarantee else None, "compaction", "guarantee"
            ),
            inject_faults=inject_faults,
            max_running=max_running,
            prefill_tokens_per_s=prefill_tokens_per_s,
            step_ms=step_ms,
            speed=speed,
            seed=given.pick("seed", seed, "pool", "seed"),
            placement=given.pick("placement", placement, "pool", "placement"),
            hold_blocks=given.pick("hold_blocks", hold_blocks, "pages", "hold_blocks"),
            eviction=given.pick("eviction", eviction, "prefix", "eviction"),
            page_aware=given.pick("page_aware", page_aware is Switch.on, "prefix", "page_aware"),
            further=given.further_of_the_mmu(),
            **given.further("prefix", "prefix_caching"),
            **given.further("compaction", "windows_below", "gather_least"),
            one_at_a_time=one_at_a_time,
            verify=verify,
            sabotage=sabotage,
        )
        given.complain_of_unused("a replay")
        if limit is not None:
            in_range("limit", limit, 1, 10**9)
        if rate is not None:
            in_range("rate", rate, 0.001, 1000)
        in_range("minutes", minutes, 0.01, 24 * 60)
        history = None if html_file is None else _history(one_at_a_time)
        files = Files(json_file=json_file, html_file=html_file)
        requests = _requests(trace, sample, seed, rate, minutes, limit, skip_bad_lines)
        with (
            serve_metrics(metrics_port) as collector,
            stop_on_ctrl_c() as stopped,
            _progress(quiet, len(requests)) as advance,
        ):

            def watch(totals: Totals) -> bool:
                advance(totals)
                return stopped()

            figures = run_replay(
                requests,
                options,
                watch=watch,
                say=complain,
                onlooker=history,
                collector=collector,
            )
        files.write("json_file", lambda: as_json(figures))
        if history is not None:
            named = trace or (
                "the small sample" if sample is Sample.small else "the sample 'article'"
            )
            files.write("html_file", partial(_page, named, figures, history))
        if not quiet:
            show(table(figures))
        files.tell()
        if figures["interrupted"]:
            raise typer.Exit(INTERRUPTED)
        refused_all = 0 < figures["refused"] == figures["requests"]
        if refused_all:
            first = figures["refusals"][0]
            complain(
                "check failed: every request was refused: "
                f"request {first['request']} {first['reason']}"
            )
        if figures["options"]["verify"] and figures["requests"] and not figures["verified_tokens"]:
            complain("check failed: nothing was verified, for no request was served")
            raise typer.Exit(CHECK_FAILED)
        if refused_all:
            raise typer.Exit(CHECK_FAILED)
        if figures["mismatches"] or figures["wasted_blocks"] or figures["guarantee_broken"]:
            complain(
                f"check failed: {figures['mismatches']} mismatches, "
                f"{figures['wasted_blocks']} blocks held twice, "
                f"guarantee broken in {figures['guarantee_broken']} steps"
            )
            raise typer.Exit(CHECK_FAILED)


def _refuse_ignored(
    context: typer.Context,
    trace: str | None,
    sample: Sample | None,
    moves: bool,
    one_at_a_time: bool,
) -> None:
    """What counts for nothing beside what else was asked for."""
    if one_at_a_time:
        refuse_typed(context, "with --one-at-a-time", "without it", *OF_THE_LOOP)
    if not moves:
        refuse_typed(context, "with compaction off", "with --compaction on", *OF_MOVES)
    if sample is None and trace is not None:
        refuse_typed(context, f"with TRACE ({trace})", "with --sample", "rate", "minutes")
    if sample is Sample.small:
        refuse_typed(context, "without --sample article", "with --sample article", "minutes")
    if sample is not None and trace is None:
        refuse_typed(context, "with --sample", "with TRACE", "skip_bad_lines")


def _history(one_at_a_time: bool) -> History:
    """Says before the run what would keep the page from being written after it."""
    if one_at_a_time:
        raise InvalidConfig(
            "--html: not with --one-at-a-time, which has no clock to show memory along"
        )
    check_library()
    return History()


def _page(named: str, figures: dict[str, Any], history: History) -> str:
    options, steps = figures["options"], max(figures["steps"], 1)
    of_interest = {
        "finished": figures["finished"],
        "refused": figures["refused"],
        "preempted": figures["preempted"],
        "prefix_hit_rate": figures["prefix_hit_rate"],
        "memory_in_use": figures["live_mean"] / options["blocks"],
        "fragmentation_ratio": figures["fragmentation_ratio_mean"],
        "runs_a_sequence": figures["runs_per_sequence_mean"],
        "huge_cover": figures["huge_cover"],
        "moves_a_step": figures["moved_blocks"] / steps,
        "us_a_step": figures["mmu_us_per_step"]["mean"],
    }
    policy = "compaction" if options["compaction"] else "no compaction"
    run = Run(policy, of_interest, history, DEFINITIONS)
    about = (
        f"{figures['requests']:,} requests, {options['blocks']:,} blocks of "
        f"{options['block_size']} tokens, steps of {options['step_ms']:g} ms, seed "
        f"{options['seed']}, placement {options['placement']}. Simulated time, real decisions."
    )
    return page(f"Simulated replay of {named}", [run], about=about)


def _of_the_pool(
    given: Configured, blocks: int | None, block_size: int, page_orders: str, sample: Sample | None
) -> dict[str, Any]:
    """The options that depend on each other: blocks, their size, page sizes, the reserve."""
    default = BLOCKS_FOR_SAMPLE if sample is Sample.small else BLOCKS
    block_size = given.pick("block_size", block_size, "pool", "block_size")
    in_range("block_size", block_size, 1, MAX_BLOCK_SIZE)
    if blocks is not None:
        in_range("blocks", blocks, 1, MAX_BLOCKS)
    orders = _orders(page_orders)
    resolved = given.resolve(blocks, block_size)
    if resolved is not None and resolved.num_blocks is None:
        resolved = given.resolve(default, block_size)
    if resolved is None:
        blocks = default if blocks is None else blocks
        return {"blocks": blocks, "block_size": block_size, "page_orders": orders}
    given.whole(resolved)
    for key in ("num_blocks", "memory"):
        given.says("pool", key)
    pages = [given.says("pages", key) for key in ("page_orders", "page_size")]
    of_file = any(pages) and not given.typed("page_orders")
    reserved = given.says("memory", "reserved_memory")
    given.says("start", "preheat_pages")
    given.further("model", "num_layers", "num_kv_heads", "head_dim", "v_head_dim", "dtype")
    return {
        "blocks": resolved.num_blocks,
        "block_size": block_size,
        "page_orders": tuple(resolved.mmu["page_orders"]) if of_file else orders,
        "reserved_blocks": resolved.reserved_blocks if reserved else None,
        "preheat_pages": resolved.preheat_pages,
    }


def _orders(text: str) -> tuple[int, ...]:
    """The page orders of ``--page-orders``."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidConfig(
            f"--page-orders: {text!r} given, allowed: numbers from 0 to 9 with commas between"
        ) from None


def _requests(
    path: str | None,
    sample: Sample | None,
    seed: int,
    rate: float | None,
    minutes: float,
    limit: int | None,
    skip_bad_lines: bool,
) -> traces.Trace:
    if path is not None and sample is not None:
        raise InvalidConfig(
            f"TRACE ({path}) and --sample given, allowed: one of them; "
            "--sample takes nothing or 'article'"
        )
    if path is not None:
        return traces.read(path, limit=limit, skip_bad_lines=skip_bad_lines)
    if sample is None:
        raise InvalidConfig("TRACE: none given; name a trace file, or use --sample")
    if sample is Sample.small:
        made = samples.small(seed) if rate is None else samples.small(seed, rate=rate)
    elif rate is None:
        made = samples.article(seed, minutes=minutes)
    else:
        made = samples.article(seed, rate=rate, minutes=minutes)
    return made if limit is None else made.head(limit)


@contextmanager
def _progress(quiet: bool, requests: int) -> Iterator[Callable[[Totals], None]]:
    """A live bar on a terminal, nothing elsewhere."""
    console = rich.console.Console(stderr=True, highlight=False)
    if quiet or not console.is_terminal:
        yield lambda totals: None
        return
    bar = rich.progress.Progress(
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TextColumn("requests"),
        rich.progress.TextColumn("{task.fields[said]}"),
        rich.progress.TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with bar:
        task = bar.add_task("", total=requests, said="")
        due = 0.0

        def advance(totals: Totals) -> None:
            nonlocal due
            now = monotonic()
            if now < due:
                return
            due = now + 0.1
            said = f"{totals.steps:,} steps"
            if totals.mismatches:
                said += f", [red]{totals.mismatches:,} mismatches[/red]"
            bar.update(task, completed=totals.finished + totals.refused, said=said)

        yield advance


COMMAND = replay
