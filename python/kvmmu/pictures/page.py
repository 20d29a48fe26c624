"""One HTML file with everything in it: tables, maps, charts.

What lives here: :func:`page`, which puts data, our own style and script, and the plotting library
together. What never lives here: how things look and behave (``page.css``, ``page.js``), numbers
that are not in the runs.

The file is opened from a disk: it asks for nothing, and its content security policy forbids it to.
"""

from __future__ import annotations

import base64
import html
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import numpy as np

from .._core import __version__
from ..errors import InvalidConfig, MissingExtra
from .cells import CODES, COLOURS
from .history import Compaction, History

__all__ = ["Run", "check_library", "page"]

Figure = float | int | str | None

SERIES = {
    "ratio": ("Fragmentation ratio", "1 − longest available run / available blocks"),
    "free_windows": ("Free windows", "aligned groups of 512 available blocks"),
    "waiting": ("Requests that wait", "in the queue, mean of a sample's steps"),
    "running": ("Requests that run", "mean of a sample's steps"),
    "moves": ("Blocks moved", "a step"),
    "live": ("Blocks in use", "mean of a sample's steps"),
    "runs": ("Runs a sequence", "groups of consecutive blocks, mean"),
    "huge_cover": ("Huge cover", "share of complete regions of 512 blocks in huge pages"),
    "waits_for_shape": ("Waits for shape", "requests that wait although enough blocks are free"),
    "waits_for_memory": ("Waits for memory", "requests that wait for blocks"),
}
"""Titles and units of series that a loop of ours has; others are shown by their names."""


@dataclass(frozen=True)
class Run:
    """What one policy did.

    Args:
        policy: its name, one of a kind on a page.
        figures: name -> number (or text, or None where there is none) of the table.
        history: what :class:`History` kept of it; None: a row of the table only.
        definitions: what a figure means, by name.
    """

    policy: str
    figures: Mapping[str, Figure]
    history: History | None = None
    definitions: Mapping[str, str] = field(default_factory=dict)


def page(title: str, runs: Sequence[Run], *, about: str = "") -> str:
    """One self-contained HTML page, of about 5 MB: the plotting library is in it.

    Args:
        title: of the page; say "simulated" where it is.
        runs: one or more, in the order of the table.
        about: a sentence or two below the title: scenario, seed, command.

    Returns:
        the text of the file, to be written as UTF-8.

    Raises:
        InvalidConfig: no run, or two of one name.
        MissingExtra: plotly is not installed (``kvmmu[html]``).
    """
    names = [run.policy for run in runs]
    if not runs or len(set(names)) != len(names):
        raise InvalidConfig(f"runs named {names}: allowed is one or more, each name once")
    library = _library()
    drawn = [run for run in runs if run.history is not None and run.history.times]
    data = {
        "codes": CODES,
        "colours": COLOURS,
        "series": {name: {"title": a, "unit": b} for name, (a, b) in SERIES.items()},
        "runs": [_data(run.policy, run.history) for run in drawn if run.history is not None],
    }
    parts = resources.files(__package__)
    text = (parts / "page.html").read_text(encoding="utf-8")
    filled = {
        "title": html.escape(title),
        "about": f"<p>{html.escape(about)}</p>" if about else "",
        "version": html.escape(__version__),
        "table": _table(runs),
        "hidden": "" if drawn else "hidden",
        "style": (parts / "page.css").read_text(encoding="utf-8"),
        "library": library,
        "data": _for_script(data),
        "script": (parts / "page.js").read_text(encoding="utf-8"),
    }
    # In one pass, so that nothing that is put in is looked at for marks.
    pieces = text.split("{{")
    made = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        made += [filled[name], rest]
    return "".join(made)


def check_library() -> None:
    """Before a long run: whether its page could be made.

    Raises:
        MissingExtra: plotly is not installed (``kvmmu[html]``).
    """
    _library()


def _library() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingExtra(
            "--html needs plotly: pip install 'kvmmu[html]'", extra="html"
        ) from error
    text: str = get_plotlyjs()
    return text


def _for_script(data: Any) -> str:
    """JSON that may stand in a script element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _data(policy: str, history: History) -> dict[str, Any]:
    planes = history.planes()
    return {
        "policy": policy,
        "blocks": history.blocks,
        "cellBlocks": history.cell_blocks,
        "cells": planes[0].shape[1],
        "everySteps": history.every_steps,
        "times": [round(time, 4) for time in history.times],
        # Cells beside each other in time are alike, so time runs fastest.
        "planes": _encoded(
            zlib.compress(b"".join(np.ascontiguousarray(plane.T).tobytes() for plane in planes), 9)
        ),
        "series": {
            name: [None if value is None else float(f"{value:.6g}") for value in values]
            for name, values in history.series().items()
        },
        "compactions": [_pass(each) for each in history.compactions],
    }


def _pass(compaction: Compaction) -> dict[str, Any]:
    return {
        "time": round(compaction.simulated_s, 4),
        "moves": compaction.moves.tolist(),
        "before": _encoded(compaction.before),
        "after": _encoded(compaction.after),
        "effect": compaction.effect,
    }


def _table(runs: Sequence[Run]) -> str:
    """Policies as rows, figures as columns, and what each figure means."""
    names = list(dict.fromkeys(name for run in runs for name in run.figures))
    if not names:
        return ""
    definitions: dict[str, str] = {}
    for run in runs:
        definitions.update(run.definitions)
    heads = "".join(f'<th scope="col">{html.escape(_words(name))}</th>' for name in names)
    rows = "".join(
        f'<tr><th scope="row">{html.escape(run.policy)}</th>'
        + "".join(f"<td>{html.escape(_shown(run.figures.get(name)))}</td>" for name in names)
        + "</tr>"
        for run in runs
    )
    table = (
        '<div class="scroll" tabindex="0" role="region" aria-label="Table of policies">'
        f'<table><thead><tr><th scope="col">policy</th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
    explained = "".join(
        f"<dt>{html.escape(_words(name))}</dt><dd>{html.escape(definitions[name])}</dd>"
        for name in names
        if name in definitions
    )
    if explained:
        table += f"<details><summary>What the figures mean</summary><dl>{explained}</dl></details>"
    return f'<section aria-labelledby="h-table"><h2 id="h-table">Policies</h2>{table}</section>'


def _words(name: str) -> str:
    return name.replace("_", " ")


def _shown(value: Figure) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"
