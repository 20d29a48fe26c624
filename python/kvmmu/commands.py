"""The commands of ``kvmmu``, as a Typer app.

What lives here: options, messages, the progress bar, exit codes of each command. What never lives
here: the work itself (see :mod:`.replay`, :mod:`.doctor` and :mod:`.testing`). Imported by
:mod:`.cli` only, since it needs ``kvmmu[cli]``.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Annotated, Any

import rich.console
import rich.progress
import typer

from . import _core, doctor
from .errors import InternalError, InvalidConfig, KVCacheError, MissingExtra
from .replay import sample as samples
from .replay import traces
from .replay.metrics import Totals
from .replay.options import Options, in_range
from .replay.report import table
from .replay.run import replay as run_replay

__all__ = ["app"]

CHECK_FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
BLOCKS = 90_000
BLOCKS_FOR_SAMPLE = 2_048

app = typer.Typer(
    name="kvmmu",
    help="A memory-management unit for the KV caches of LLM serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Switch(Enum):
    """on or off"""

    on = "on"
    off = "off"


class Driver(Enum):
    """Who draws the calls of a search."""

    random = "random"
    hypothesis = "hypothesis"


class Sample(Enum):
    """Traces that need no file."""

    small = "small"
    article = "article"


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvmmu {_core.__version__}")
        raise typer.Exit


@app.callback()
def _kvmmu(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


@app.command(name="doctor")
def _doctor() -> None:
    """What is installed, what is missing, and which extra brings it."""
    with _exit_codes():
        findings = doctor.examine()
        _print(doctor.table(findings))
        if any(finding.failed for finding in findings):
            raise typer.Exit(CHECK_FAILED)


@app.command(name="replay")
def _replay(
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
    skip_bad_lines: Annotated[
        bool, typer.Option("--skip-bad-lines", help="Leave bad lines of a trace out, count them.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress bar and no table.")
    ] = False,
    sabotage: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve a trace of real requests in simulated time, and check every byte."""
    with _exit_codes():
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
            _check_writable(json_file)
        requests = _requests(trace, sample, seed, rate, minutes, limit, skip_bad_lines)
        with _stop_on_ctrl_c() as stopped, _progress(quiet, len(requests)) as show:

            def watch(totals: Totals) -> bool:
                show(totals)
                return stopped()

            figures = run_replay(requests, options, watch=watch, say=_complain)
        if json_file is not None:
            _write(json_file, figures)
        if not quiet:
            _print(table(figures))
        if figures["interrupted"]:
            raise typer.Exit(INTERRUPTED)
        if figures["options"]["verify"] and figures["requests"] and not figures["verified_tokens"]:
            _complain("check failed: nothing was verified, for no request was served")
            raise typer.Exit(CHECK_FAILED)
        if figures["mismatches"] or figures["wasted_blocks"] or figures["guarantee_broken"]:
            _complain(
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


@app.command(name="fuzz")
def _fuzz(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="package.module:factory, which makes an allocator.",
            show_default=False,
        ),
    ],
    seconds: Annotated[float, typer.Option(help="How long to look for a fault.")] = 60,
    examples: Annotated[
        int | None, typer.Option(help="Stop after so many as well.", show_default=False)
    ] = None,
    steps: Annotated[int, typer.Option(help="Calls an example.")] = 40,
    seed: Annotated[
        int | None, typer.Option(help="Of the calls (default: another one each time).")
    ] = None,
    driver: Annotated[
        Driver, typer.Option(help="Who draws the calls; hypothesis is far slower.")
    ] = Driver.random,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write what was found.", show_default=False),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print a fault and nothing else.")
    ] = False,
) -> None:
    """Call an allocator at random, and compare it with what it should be."""
    with _exit_codes():
        from . import testing

        in_range("seconds", seconds, 0.001, 10**7)
        in_range("examples", 1 if examples is None else examples, 1, 10**12)
        in_range("steps", steps, 1, 10**4)
        in_range("seed", 0 if seed is None else seed, 0, 2**63)
        seed = random.SystemRandom().randrange(10**6) if seed is None else seed
        if json_file is not None:
            _check_writable(json_file)
        factory = testing.find_factory(target)
        with _fuzz_progress(quiet, seconds) as watch:
            report = testing.fuzz(
                factory,
                seconds=seconds,
                max_examples=examples,
                seed=seed,
                steps=steps,
                driver=driver.value,
                watch=watch,
            )
        fault = report.fault
        if json_file is not None:
            found = None
            if fault is not None:
                found = {
                    "kind": type(fault).__name__,
                    "message": fault.message,
                    "sequence": fault.sequence,
                }
            figures = {
                "target": target,
                "seed": report.seed,
                "steps": steps,
                "driver": driver.value,
                "examples": report.examples,
                "calls": report.calls,
                "seconds": report.seconds,
                "fault": found,
            }
            _write(json_file, figures)
        examples_ran = f"{report.examples:,} example{'s' * (report.examples != 1)}"
        ran = f"{examples_ran} ({report.calls:,} calls, seed {report.seed})"
        if fault is None:
            if not quiet:
                _print(f"no fault in {ran}")
            return
        _print(f"{type(fault).__name__}, found after {ran}\n{fault}", as_is=True)
        for note in getattr(fault, "__notes__", ()):
            _print(note, as_is=True)
        raise typer.Exit(CHECK_FAILED)


# -- around a run --------------------------------------------------------------------------


@contextmanager
def _exit_codes() -> Iterator[None]:
    """Errors that are somebody's input become a sentence and exit code 2."""
    try:
        yield
    except (traces.TraceError, InvalidConfig, MissingExtra) as error:
        _complain(str(error))
        raise typer.Exit(BAD_INPUT) from None
    except InternalError as error:
        _complain(f"internal error, a fault of kvmmu: {error}")
        raise typer.Exit(CHECK_FAILED) from None
    except KVCacheError as error:
        _complain(f"{type(error).__name__}: {error}")
        raise typer.Exit(CHECK_FAILED) from None
    except MemoryError as error:
        _complain(f"out of memory ({error}); fewer --blocks or a smaller trace need less")
        raise typer.Exit(BAD_INPUT) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _complain(sentence: str) -> None:
    print(f"kvmmu: {sentence}", file=sys.stderr, flush=True)


def _print(what: rich.console.RenderableType, *, as_is: bool = False) -> None:
    """``as_is``: text to copy, neither wrapped nor read as markup."""
    try:
        console = rich.console.Console(highlight=False)
        console.print(what, soft_wrap=as_is, markup=not as_is)
        sys.stdout.flush()
    except OSError as error:
        raise InvalidConfig(f"the standard output cannot be written: {error.strerror}") from None


def _check_writable(file: str) -> None:
    """Says before the run what would go wrong after it; leaves no file behind."""
    existed = os.path.lexists(file)
    try:
        with open(file, "a", encoding="utf-8"):
            pass
        if not existed:
            os.unlink(file)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidConfig(f"--json: {file} cannot be written: {reason}") from None


def _write(file: str, figures: dict[str, Any]) -> None:
    try:
        Path(file).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidConfig(f"--json: {file} cannot be written: {error.strerror}") from None


@contextmanager
def _stop_on_ctrl_c() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C asks the run to end after its step; a second one ends it at once."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


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

        def show(totals: Totals) -> None:
            nonlocal due
            now = monotonic()
            if now < due:
                return
            due = now + 0.1
            said = f"{totals.steps:,} steps"
            if totals.mismatches:
                said += f", [red]{totals.mismatches:,} mismatches[/red]"
            bar.update(task, completed=totals.finished + totals.refused, said=said)

        yield show


@contextmanager
def _fuzz_progress(quiet: bool, seconds: float) -> Iterator[Callable[[int, bool], None]]:
    """The same for a search: its bar is the time."""
    console = rich.console.Console(stderr=True, highlight=False)
    if quiet or not console.is_terminal:
        yield lambda examples, failed: None
        return
    bar = rich.progress.Progress(
        rich.progress.BarColumn(),
        rich.progress.TextColumn("{task.fields[said]}"),
        rich.progress.TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    started = monotonic()
    with bar:
        task = bar.add_task("", total=seconds, said="")

        def show(examples: int, failed: bool) -> None:
            said = f"{examples:,} examples"
            if failed:
                said += ", [red]a fault[/red]: looking for a shorter sequence"
            bar.update(task, completed=min(monotonic() - started, seconds), said=said)

        yield show
