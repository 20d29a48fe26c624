"""The commands of ``kvmmu``, as one Typer app; a file a command.

What lives here: the app. What never lives here: the work itself (see :mod:`kvmmu.replay`,
:mod:`kvmmu.doctor`, :mod:`kvmmu.testing` and their like). A command's file holds its options, its
messages and its progress bar; what all have in common is in :mod:`.around`. Imported by
:mod:`kvmmu.cli` only, since it needs ``kvmmu[cli]``.
"""

from __future__ import annotations

from typing import Annotated

import typer

from .. import _core
from . import advise, bench, config, doctor, fuzz, map, replay, soak

__all__ = ["app"]

app = typer.Typer(
    name="kvmmu",
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


app.command(name="doctor")(doctor.doctor)
app.command(name="replay")(replay.replay)
app.command(name="soak")(soak.soak)
app.command(name="map")(map.map_)
app.command(name="fuzz")(fuzz.fuzz)
app.command(name="advise")(advise.advise)
app.command(name="bench")(bench.bench)
app.add_typer(config.app)
