"""``kvmmu map``: the memory at one moment, in a terminal.

What lives here: its options and messages; finding the moment. What never lives here: drawing (see
:mod:`kvmmu.pictures.terminal`).
"""

from __future__ import annotations

import json
import os
import re
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import rich.console
import typer

from .. import _core
from ..errors import InvalidConfig
from ..pictures.terminal import memory_map
from ..replay import sample as samples
from ..replay import traces
from ..replay.options import Options, in_range
from ..replay.run import replay as run_replay
from ..snapshots import Snapshot, snapshot
from .around import (
    INTERRUPTED,
    Switch,
    check_writable,
    complain,
    exit_codes,
    refuse_typed,
    show,
    stop_on_ctrl_c,
    write_text,
)

if TYPE_CHECKING:
    from ..replay.metrics import Totals

__all__ = ["COMMAND"]

MAX_JSON = 2**28
"""Bytes of a file that is read to say what it is instead of a snapshot."""
REPLAYED = ("at", "blocks", "block_size", "compaction", "placement", "speed", "seed")
"""Options of the replay: parameters of the command."""
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


class By(Enum):
    """What the characters say."""

    state = "state"
    sequence = "sequence"
    page = "page"


def map_(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A snapshot (JSON), or a trace that is replayed up to a moment; "
            "'article' for the mix of long and short requests that needs no file.",
            show_default=False,
        ),
    ],
    at: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Moment of the replay: 90s, 10m, 1.5h (60s)."),
    ] = None,
    by: Annotated[By, typer.Option(help="What the characters say.")] = By.state,
    rows: Annotated[int, typer.Option(help="Lines of the map, at most.")] = 40,
    blocks: Annotated[int, typer.Option(help="Blocks of the replay's pool.")] = 90_000,
    block_size: Annotated[int, typer.Option(help="Tokens a block.")] = 16,
    compaction: Annotated[Switch, typer.Option(help="Move blocks between steps.")] = Switch.on,
    placement: Annotated[
        str, typer.Option(metavar="address|fullest|fifo|scatter", help="Where blocks are taken.")
    ] = "address",
    speed: Annotated[float, typer.Option(help="How much faster than traced.")] = 1,
    seed: Annotated[int, typer.Option(help="For tokens and samples.")] = 0,
    json_file: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE", help="Write the moment as a snapshot.", show_default=False
        ),
    ] = None,
) -> None:
    """Print what every part of the memory is at one moment."""
    with exit_codes():
        in_range("rows", rows, 1, 1000)
        if json_file is not None:
            check_writable(json_file)
        if _is_snapshot(source):
            refuse_typed(
                context, "with a snapshot, which is of one moment", "with a trace", *REPLAYED
            )
            taken = _read(source)
        else:
            options = Options(
                blocks=blocks,
                block_size=block_size,
                compaction=compaction is Switch.on,
                placement=placement,
                speed=speed,
                seed=seed,
            )
            taken = _replayed(source, options, _seconds("60s" if at is None else at))
        if json_file is not None:
            write_text(json_file, taken.json() + "\n", "--json")
        console = rich.console.Console(highlight=False)
        show(
            memory_map(
                taken,
                console.width,
                by=by.value,
                rows=rows,
                ascii_only=not _can_print(console.encoding),
            )
        )


class _Moment:
    """Takes a snapshot of the first step that ends at a time or later."""

    def __init__(self, at_s: float) -> None:
        self._at = at_s
        self.taken: Snapshot | None = None
        self.reached = 0.0

    def sample(self, simulated_s: float, mmu: _core.MMU, **series: float) -> None:
        self.reached = simulated_s
        if self.taken is None and simulated_s >= self._at:
            self.taken = snapshot(mmu)

    def wants(self, moves: int) -> bool:
        return False

    def compaction(self, before: _core.BlockMap, after: _core.BlockMap) -> None:
        raise AssertionError("it wants none")


def _replayed(source: str, options: Options, at_s: float) -> Snapshot:
    if source == "article":
        trace = samples.article(options.seed, minutes=min(max(at_s / 60, 0.01), 24 * 60))
    else:
        try:
            trace = traces.read(source)
        except traces.TraceError:
            if _is_json(source):  # not many of them, one a line
                _read(source)
            raise
    moment = _Moment(at_s)
    with stop_on_ctrl_c() as stopped:

        def watch(totals: Totals) -> bool:
            return moment.taken is not None or stopped()

        run_replay(trace, options, watch=watch, say=complain, onlooker=moment)
        if stopped() and moment.taken is None:
            raise typer.Exit(INTERRUPTED)
    if moment.taken is None:
        raise InvalidConfig(
            f"--at: {at_s:g} s given, allowed: up to {moment.reached:g} s, when the replay ended"
        )
    return moment.taken


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in UNITS:
        raise InvalidConfig(f"--at: {text!r} given, allowed: a time such as 90s, 10m or 1.5h")
    return float(found[1]) * UNITS[found[2]]


def _is_snapshot(source: str) -> bool:
    """By how the file begins; one that cannot be read is left to the reader of traces."""
    try:
        with open(source, "rb") as file:
            return b'"kvmmu_snapshot"' in file.read(100)
    except (OSError, ValueError):
        return False


def _is_json(source: str) -> bool:
    """Whether a file is one JSON object or list, as a snapshot is; a trace is not."""
    try:
        with open(source, "rb") as file:
            if file.read(1) not in (b"{", b"[") or os.fstat(file.fileno()).st_size > MAX_JSON:
                return False
        json.loads(Path(source).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return True


def _read(source: str) -> Snapshot:
    try:
        text = Path(source).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"{source} cannot be read: {error}") from None
    try:
        return Snapshot.from_json(text)
    except InvalidConfig as error:
        raise InvalidConfig(f"{source} is {error}") from None


def _can_print(encoding: str) -> bool:
    try:
        "·█▒→".encode(encoding)
    except (UnicodeError, LookupError):
        return False
    return True


COMMAND = map_
