"""``kvmmu replay``: a trace of real requests, served in simulated time.

What lives here: its options, messages and progress bar. What never lives here: the work (see
:mod:`kvmmu.replay`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from time import monotonic
from typing import Annotated

import rich.console
import rich.progress
import typer

from ..errors import InvalidConfig
from ..replay import sample as samples
from ..replay import traces
from ..replay.metrics import Totals
from ..replay.options import Options, in_range
from ..replay.report import table
from ..replay.run import replay as run_replay
from .around import (
    CHECK_FAILED,
    INTERRUPTED,
    Switch,
    check_writable,
    complain,
    exit_codes,
    serve_metrics,
    show,
    stop_on_ctrl_c,
    write_json,
)

__all__ = ["replay"]

BLOCKS = 90_000
BLOCKS_FOR_SAMPLE = 2_048


class Sample(Enum):
    """Traces that need no file."""

    small = "small"
    article = "article"


def replay(
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
    verify: Annotated[
        bool, typer.Option("--verify", help="Read contents back through the exported tables.")
    ] = False,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the figures.", show_default=False),
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
    """Serve a trace of real requests in simulated time, and check every byte."""
    with exit_codes():
        options = Options(
            blocks=(BLOCKS_FOR_SAMPLE if sample is Sample.small else BLOCKS)
            if blocks is None
            else blocks,
            block_size=block_size,
            compaction=compaction is Switch.on,
            budget_blocks=budget_blocks,
            guarantee=guarantee_slack if guarantee else None,
            inject_faults=inject_faults,
            max_running=max_running,
            prefill_tokens_per_s=prefill_tokens_per_s,
            step_ms=step_ms,
            speed=speed,
            seed=seed,
            placement=placement,
            page_orders=_orders(page_orders),
            hold_blocks=hold_blocks,
            eviction=eviction,
            page_aware=page_aware is Switch.on,
            one_at_a_time=one_at_a_time,
            verify=verify,
            sabotage=sabotage,
        )
        if limit is not None:
            in_range("limit", limit, 1, 10**9)
        if rate is not None:
            in_range("rate", rate, 0.001, 1000)
        in_range("minutes", minutes, 0.01, 24 * 60)
        if json_file is not None:
            check_writable(json_file)
        requests = _requests(trace, sample, seed, rate, minutes, limit, skip_bad_lines)
        with (
            serve_metrics(metrics_port) as collector,
            stop_on_ctrl_c() as stopped,
            _progress(quiet, len(requests)) as advance,
        ):

            def watch(totals: Totals) -> bool:
                advance(totals)
                return stopped()

            figures = run_replay(requests, options, watch=watch, say=complain, collector=collector)
        if json_file is not None:
            write_json(json_file, figures)
        if not quiet:
            show(table(figures))
        if figures["interrupted"]:
            raise typer.Exit(INTERRUPTED)
        if figures["options"]["verify"] and figures["requests"] and not figures["verified_tokens"]:
            complain("check failed: nothing was verified, for no request was served")
            raise typer.Exit(CHECK_FAILED)
        if figures["mismatches"] or figures["wasted_blocks"] or figures["guarantee_broken"]:
            complain(
                f"check failed: {figures['mismatches']} mismatches, "
                f"{figures['wasted_blocks']} blocks held twice, "
                f"guarantee broken in {figures['guarantee_broken']} steps"
            )
            raise typer.Exit(CHECK_FAILED)


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
