"""``kvmmu fuzz``: calls an allocator at random.

What lives here: its options, messages and progress bar. What never lives here: the search (see
:mod:`kvmmu.testing`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from time import monotonic
from typing import Annotated

import rich.console
import rich.progress
import typer

from ..errors import InvalidConfig
from ..replay.options import in_range
from .around import (
    CHECK_FAILED,
    check_writable,
    complain,
    exit_codes,
    refuse_typed,
    show,
    write_json,
)

__all__ = ["COMMAND"]


class Driver(Enum):
    """Who draws the calls of a search."""

    random = "random"
    hypothesis = "hypothesis"


def fuzz(
    context: typer.Context,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="package.module:factory, which makes an allocator.",
            show_default=False,
        ),
    ] = None,
    recording: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Instead: make the calls of a recording (KVMMU_RECORD) again, and shorten a "
            "failure for as long as --seconds.",
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        int, typer.Option(help="With --from: recount after every so many calls only.")
    ] = 1,
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
    with exit_codes():
        if (target is None) == (recording is None):
            given = "none" if target is None else "both"
            raise InvalidConfig(f"TARGET, --from: {given} given, allowed: one of them")
        in_range("every", every, 1, 10**9)
        in_range("seconds", seconds, 0.001, 10**7)
        if recording is None:
            refuse_typed(context, "without --from", "with it", "every")
        else:
            refuse_typed(
                context, "with --from", "without it", "examples", "steps", "seed", "driver"
            )
            _again(recording, every, seconds, json_file, quiet)
            return
        assert target is not None
        from .. import testing

        in_range("examples", 1 if examples is None else examples, 1, 10**12)
        in_range("steps", steps, 1, 10**4)
        in_range("seed", 0 if seed is None else seed, 0, 2**63)
        seed = random.SystemRandom().randrange(10**6) if seed is None else seed
        if json_file is not None:
            check_writable(json_file)
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
            write_json(json_file, figures)
        examples_ran = f"{report.examples:,} example{'s' * (report.examples != 1)}"
        ran = f"{examples_ran} ({report.calls:,} calls, seed {report.seed})"
        if fault is None:
            if not quiet:
                show(f"no fault in {ran}")
            return
        show(f"{type(fault).__name__}, found after {ran}\n{fault}", as_is=True)
        for note in getattr(fault, "__notes__", ()):
            show(note, as_is=True)
        raise typer.Exit(CHECK_FAILED)


def _again(file: str, every: int, seconds: float, json_file: str | None, quiet: bool) -> None:
    """A recording, call by call."""
    from .. import recorder

    if json_file is not None:
        check_writable(json_file)
    try:
        recording = recorder.read(file)
    except OSError as error:
        raise InvalidConfig(f"--from: {file} cannot be read: {error.strerror}") from None
    if not recording.calls:
        raise InvalidConfig(
            f"--from: {file}: nothing was checked, for the recording has no whole frame"
        )
    if recording.truncated is not None:
        complain(f"{file} ends within the frame at {recording.truncated}: what was there is lost")
    result = recorder.replay(recording, every=every)
    for call, what in result.differs:
        complain(f"call {call.number} ({call.name}) {what}")
    if result.num_differs > len(result.differs):
        complain(f"{result.num_differs - len(result.differs)} calls more ended otherwise")
    fault = None
    if result.failure is not None:
        end = monotonic() + seconds
        fault = recorder.shortest(recording, result.failure, watch=lambda: monotonic() >= end)
    if json_file is not None:
        found = None
        if result.failure is not None and fault is not None:
            found = {
                "call": result.failure.call.number,
                "message": result.failure.message,
                "sequence": fault.sequence,
            }
        figures = {
            "recording": file,
            "truncated": recording.truncated,
            "calls": result.calls,
            "differ": result.num_differs,
            "fault": found,
        }
        write_json(json_file, figures)
    if fault is None:
        if not quiet:
            show(f"no invariant broken in {result.calls:,} calls")
        return
    show(f"{type(fault).__name__} {result.failure}\n{fault}", as_is=True)
    for note in getattr(fault, "__notes__", ()):
        show(note, as_is=True)
    raise typer.Exit(CHECK_FAILED)


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

        def advance(examples: int, failed: bool) -> None:
            said = f"{examples:,} examples"
            if failed:
                said += ", [red]a fault[/red]: looking for a shorter sequence"
            bar.update(task, completed=min(monotonic() - started, seconds), said=said)

        yield advance


COMMAND = fuzz
