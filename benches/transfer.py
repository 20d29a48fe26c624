"""A request of 128k tokens is pulled from one process to another over NIXL, both ends churned.

What lives here: the contenders, which differ in where the request lies at either end, and the
table. What never lives here: the processes (see :mod:`ends`).

Each end has served minutes of the soak scenario ``article-128k``, with other requests at either,
before the request comes; what it then finds is up to the policy: the order of release (the
rival), address order, the default, and the default with the request gathered at both ends. Times
are the best of three. Descriptors need no NIXL and are counted in any case.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from kvmmu import pair_runs

from ends import Ends, Moved, Placed, Shape, nixl_api
from harness import Bench, Row

TOKENS = 131_072
MINUTES = 10.0
SEEDS = {"source": 1, "target": 2}
NUM_BLOCKS = 90_112  # of the scenario
PIECE = 4096  # a layer's K or V of 16 tokens, 8 heads of 128, bfloat16, tensor parallel 8
AT_ONCE = 4  # regions: with more the memory of both ends would pass 4 GiB
REGIONS = (8, 61, 160)  # 4 layers of K and V; 61 of one piece (MLA); 80 layers of K and V
TRIES = 3

FIFO = "order of release"
POLICIES = {FIFO: "plain", "address order": "plain-ordered", "default": "compaction"}
GATHERED = "default + gather"


class Pair(NamedTuple):
    """Where the request lies."""

    source: Placed
    target: Placed

    @property
    def runs(self) -> int:
        return len(pair_runs(self.target.blocks, self.source.blocks))


def rows(bench: Bench) -> Iterator[Row]:
    shape: Shape | None = Shape(NUM_BLOCKS, PIECE, AT_ONCE)
    try:
        nixl_api()
    except ImportError as error:
        bench.note(f"transfer: descriptors alone: {error}")
        shape = None
    with Ends(shape) as ends:
        placed = _places(bench, ends)
        for regions in REGIONS:
            yield from _descriptors(placed, regions)
            if shape is not None:
                yield from _times(ends, placed, regions)
        if shape is not None:
            yield from _joined(bench, ends, placed, REGIONS[0])
    if shape is not None:
        with Ends(replace(shape, huge_pages=False)) as ends:
            yield from _small_pages(ends, placed)


def _places(bench: Bench, ends: Ends) -> dict[str, Pair]:
    """Where each contender puts the request."""
    placed: dict[str, Pair] = {}
    for contender, policy in POLICIES.items():
        ends.both("churn", policy, MINUTES, SEEDS)
        placed[contender] = Pair(**ends.both("open", TOKENS))
        _tell(bench, contender, placed[contender])
    placed[GATHERED] = Pair(**ends.both("gather"))
    _tell(bench, GATHERED, placed[GATHERED])
    return placed


def _tell(bench: Bench, contender: str, pair: Pair) -> None:
    runs = [1 + int((np.diff(end.blocks) != 1).sum()) for end in pair]
    bench.note(
        f"transfer: {contender}: others hold {pair.source.in_use:.0%} / {pair.target.in_use:.0%} "
        f"of the pool; {runs[0]} / {runs[1]} runs, {pair.runs} pair runs; "
        f"{pair.source.moves} / {pair.target.moves} blocks moved for it"
    )


def _descriptors(placed: dict[str, Pair], regions: int) -> Iterator[Row]:
    rival = placed[FIFO].runs * regions
    for contender, pair in placed.items():
        if contender != FIFO:
            measure = f"128k, {regions} regions of 4 KiB, {contender}: descriptors"
            yield Row(measure, "descriptors", float(pair.runs * regions), FIFO, float(rival))


def _times(ends: Ends, placed: dict[str, Pair], regions: int) -> Iterator[Row]:
    found = {contender: _best(ends, pair, regions) for contender, pair in placed.items()}
    for contender, best in found.items():
        if contender == FIFO:
            continue
        for what, value, rival in (
            ("prepare", best.prepare_s, found[FIFO].prepare_s),
            ("post", best.post_s, found[FIFO].post_s),
            ("move", best.move_s, found[FIFO].move_s),
        ):
            measure = f"128k, {regions} regions of 4 KiB, {contender}: {what}"
            yield Row(measure, "ms", value * 1e3, FIFO, rival * 1e3)


def _joined(bench: Bench, ends: Ends, placed: dict[str, Pair], regions: int) -> Iterator[Row]:
    """The same by lists of all blocks, from which NIXL makes descriptors itself."""
    found = {name: _best(ends, placed[name], regions, by_block=True) for name in (FIFO, "default")}
    for name, best in found.items():
        if best.joined != placed[name].runs * regions:
            bench.note(f"transfer: NIXL joined {best.descriptors} blocks to {best.joined}")
    for what, value, rival in (
        ("prepare", found["default"].prepare_s, found[FIFO].prepare_s),
        ("move", found["default"].move_s, found[FIFO].move_s),
    ):
        measure = f"128k, {regions} regions of 4 KiB, default, joined by NIXL: {what}"
        yield Row(measure, "ms", value * 1e3, FIFO, rival * 1e3)


def _small_pages(ends: Ends, placed: dict[str, Pair]) -> Iterator[Row]:
    """What the host's own pages are worth: the same on pages of 4 KiB."""
    regions = REGIONS[0]
    measure = f"128k, {regions} regions of 4 KiB, {{}}, host pages of 4 KiB: move"
    rival = _best(ends, placed[FIFO], regions).move_s
    for contender in ("default", GATHERED):
        moved = _best(ends, placed[contender], regions).move_s
        yield Row(measure.format(contender), "ms", moved * 1e3, FIFO, rival * 1e3)


def _best(ends: Ends, pair: Pair, regions: int, *, by_block: bool = False) -> Moved:
    """The best of some tries, each over all regions, in rounds of what fits at once."""
    source, target = pair.source.blocks, pair.target.blocks
    tries: list[list[Moved]] = [[] for _ in range(TRIES)]
    ends.ask("target", "clear")
    for number, first in enumerate(range(0, regions, AT_ONCE)):
        these = min(AT_ONCE, regions - first)
        ends.ask("source", "write", source, number)
        for one in tries:
            one.append(ends.ask("target", "pull", target, source, these, by_block))
        wrong = ends.ask("target", "wrong", target, number, these)
        if wrong:
            raise RuntimeError(f"{wrong} of {len(target)} blocks arrived with other bytes")
    sums = [_sum(one) for one in tries]
    return min(sums, key=lambda moved: moved.prepare_s + moved.move_s)


def _sum(rounds: list[Moved]) -> Moved:
    return Moved(
        sum(moved.prepare_s for moved in rounds),
        sum(moved.post_s for moved in rounds),
        sum(moved.move_s for moved in rounds),
        sum(moved.descriptors for moved in rounds),
        sum(moved.joined for moved in rounds),
    )
