"""What every command has around its work.

What lives here: exit codes, messages, files and ports that must be there before a run, Ctrl-C. What
never lives here: a command.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import rich.console
import typer

from ..errors import InternalError, InvalidConfig, InvalidRecording, KVCacheError, MissingExtra
from ..replay import traces

if TYPE_CHECKING:
    from ..metrics import Collector

__all__ = [
    "BAD_INPUT",
    "CHECK_FAILED",
    "INTERRUPTED",
    "Files",
    "Switch",
    "as_json",
    "check_writable",
    "complain",
    "exit_codes",
    "refuse_typed",
    "serve_metrics",
    "show",
    "stop_on_ctrl_c",
    "typed",
    "write_json",
    "write_text",
]

CHECK_FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
"""Exit statuses beside 0. A check has failed, too, where there was nothing to check: a replay that
refused every request. A file of which nothing can be read is bad input."""


class Switch(Enum):
    """on or off"""

    on = "on"
    off = "off"


@contextmanager
def exit_codes() -> Iterator[None]:
    """Errors that are somebody's input become a sentence and exit code 2."""
    try:
        yield
    except (traces.TraceError, InvalidConfig, InvalidRecording, MissingExtra) as error:
        complain(str(error))
        raise typer.Exit(BAD_INPUT) from None
    except InternalError as error:
        complain(f"internal error, a fault of kvmmu: {error}")
        raise typer.Exit(CHECK_FAILED) from None
    except KVCacheError as error:
        complain(f"{type(error).__name__}: {error}")
        raise typer.Exit(CHECK_FAILED) from None
    except MemoryError as error:
        complain(f"out of memory ({error}); fewer --blocks or a smaller trace need less")
        raise typer.Exit(BAD_INPUT) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def typed(context: typer.Context, option: str) -> bool:
    """Whether an option was given, by the name of its parameter."""
    source = context.get_parameter_source(option)  # an enum of click's, or of Typer's own
    return source is not None and source.name not in ("DEFAULT", "DEFAULT_MAP")


def refuse_typed(context: typer.Context, where: str, allowed: str, *options: str) -> None:
    """Refuses options that count for nothing beside others, instead of ignoring them.

    Args:
        where: they count for nothing: "with --x", "without --x".
        options: by the names of their parameters.

    Raises:
        InvalidConfig: one of them was typed.
    """
    for option in options:
        if not typed(context, option):
            continue
        flag = next(one for one in context.command.params if one.name == option).opts[0]
        value = context.params.get(option)
        if isinstance(value, Enum):
            value = value.value
        if isinstance(value, (list, tuple)):
            value = ", ".join(map(str, value))
        if isinstance(value, float):
            value = f"{value:g}"
        given = "given" if value is True else f"{value} given"
        raise InvalidConfig(f"{flag}: {given} {where}, allowed: {allowed}")


def complain(sentence: str) -> None:
    """A sentence for people, on the error output."""
    print(f"kvmmu: {sentence}", file=sys.stderr, flush=True)


def show(
    what: rich.console.RenderableType, *, as_is: bool = False, piped_width: int | None = None
) -> None:
    """``as_is``: text to copy, neither wrapped nor read as markup. ``piped_width``: of a table
    that is not read on a terminal, where COLUMNS does not say another."""
    if sys.stdout is None:
        raise InvalidConfig("the standard output cannot be written: it is closed")
    try:
        told = os.environ.get("COLUMNS", "").isdigit()
        width = None if told or sys.stdout.isatty() else piped_width
        console = rich.console.Console(highlight=False, width=width)
        console.print(what, soft_wrap=as_is, markup=not as_is)
        sys.stdout.flush()
    except OSError as error:
        raise InvalidConfig(f"the standard output cannot be written: {error.strerror}") from None


def check_writable(file: str, option: str = "--json") -> None:
    """Says before the run what would go wrong after it; leaves no file behind."""
    try:
        path = os.path.realpath(file)  # a link may name a file that is not there yet
        existed = os.path.lexists(path)
        with open(file, "a", encoding="utf-8"):
            pass
        if not existed:
            os.unlink(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidConfig(f"{option}: {file} cannot be written: {reason}") from None


class Files:
    """What a command writes beside what it shows: tried before the run, written after it. One that
    cannot be written then costs neither the others nor the table, and is told at the end."""

    def __init__(self, **files: str | None) -> None:
        """``files``: by the names of the options' parameters; None: not asked for.

        Raises:
            InvalidConfig: one cannot be written, or two are the same file.
        """
        self._files = {name: file for name, file in files.items() if file is not None}
        self._faults: list[InvalidConfig] = []
        seen: dict[str, str] = {}
        for name, file in self._files.items():
            check_writable(file, _flag(name))
            path = os.path.realpath(file)
            if path in seen and (os.path.isfile(path) or not os.path.exists(path)):
                raise InvalidConfig(
                    f"{_flag(name)}: {file} given, which is that of {_flag(seen[path])}, "
                    "allowed: another"
                )
            seen[path] = name

    def write(self, name: str, text: Callable[[], str]) -> None:
        """Writes one, if it was asked for; ``text`` is called then."""
        file = self._files.get(name)
        if file is None:
            return
        try:
            write_text(file, text(), _flag(name))
        except InvalidConfig as error:
            self._faults.append(error)

    def tell(self) -> None:
        """Raises InvalidConfig if one could not be written."""
        if self._faults:
            raise self._faults[0]


def _flag(name: str) -> str:
    return f"--{name.removesuffix('_file').replace('_', '-')}"


def as_json(found: Any) -> str:
    """What a command found, as the text of a file."""
    return json.dumps(found, indent=2) + "\n"


def write_json(file: str, found: Any) -> None:
    """What a command found, to a file."""
    write_text(file, as_json(found), "--json")


def write_text(file: str, text: str, option: str) -> None:
    """Something for people, to a file."""
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidConfig(f"{option}: {file} cannot be written: {error.strerror}") from None


@contextmanager
def serve_metrics(port: int | None) -> Iterator[Collector | None]:
    """Serves metrics on a port while a command runs, if one was asked for: ``--metrics-port``.

    Raises:
        InvalidConfig: the port is taken or not allowed, before anything runs.
        MissingExtra: prometheus-client is not installed.
    """
    if port is None:
        yield None
        return
    from .. import metrics

    registry = metrics.CollectorRegistry()
    try:
        server = metrics.serve(port, registry)
    except InvalidConfig as error:
        raise InvalidConfig(f"--metrics-port: {error}") from None
    with server:
        complain(f"metrics: {server.url}")
        yield metrics.Collector(registry)


@contextmanager
def stop_on_ctrl_c() -> Iterator[Callable[[], bool]]:
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
