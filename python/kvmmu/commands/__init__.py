"""The commands of ``kvmmu``, as one Typer app; a file a command.

What lives here: the app. What never lives here: the work itself (see :mod:`kvmmu.replay`,
:mod:`kvmmu.doctor`, :mod:`kvmmu.testing` and their like). A command's file holds its options, its
messages and its progress bar; what all have in common is in :mod:`.around`. It is imported when the
command is used: some need libraries that take longer to load than others to run. Imported by
:mod:`kvmmu.cli` only, since it needs ``kvmmu[cli]``.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import Annotated, Any

import typer
import typer.core
import typer.main

from .. import _core

__all__ = ["app"]

COMMANDS = ("doctor", "replay", "soak", "map", "fuzz", "advise", "bench", "config")
"""Each is the name of a file here; its ``COMMAND`` is a function, or an app of several."""


class _Commands(typer.core.TyperGroup):
    """Finds a command in its file."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        found = import_module(f".{cmd_name}", __name__).COMMAND
        if not isinstance(found, typer.Typer):
            one = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            one.command(name=cmd_name)(found)
            found = one
        return typer.main.get_command(found)

    def invoke(self, ctx: Any) -> Any:
        """A value that an option does not take is told as any other bad input."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            from .around import BAD_INPUT, complain

            complain(_told(error))
            raise typer.Exit(BAD_INPUT) from None


def _command(error: typer.BadParameter) -> str:
    return "kvmmu" if error.ctx is None else error.ctx.command_path


def _told(error: typer.BadParameter) -> str:
    """A library's complaint about a value, as the commands say it."""
    if error.param is None:
        return error.format_message()
    parameter: Any = error.param
    flags = parameter.param_type_name == "option"
    name = max(parameter.opts, key=len) if flags else parameter.metavar or parameter.name
    if "Missing" in error.format_message():
        return f"{name}: none given; {_command(error)} --help says what it is"
    found = re.search(r"'(.*?)' is not (?:a valid|one of)", error.message)
    given = found[1] if found else ""
    if isinstance(error.__cause__, ValueError) and hasattr(error.__cause__, "errors"):
        given = str(error.__cause__.errors()[0]["input"])  # pydantic's
    choices = re.findall("'(.*?)'", error.message.partition("is not one of")[2])
    if choices:
        allowed = ", ".join(choices[:-1]) + f" or {choices[-1]}"
    elif "integer" in error.message:
        allowed = "a whole number"
    elif "number" in error.message or "float" in error.message:
        allowed = "a number"
    else:
        return f"{name}: {given!r} given: {error.message}"
    return f"{name}: {given!r} given, allowed: {allowed}"


app = typer.Typer(
    name="kvmmu",
    cls=_Commands,
    help="A memory-management unit for the KV caches of LLM serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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
