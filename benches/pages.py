"""Huge pages of a serving engine, and the moves that they take: kvmmu beside LLFree.

What is claimed and given back is what the serving loop of ``kvmmu replay`` asks of a manager on a
trace, without prefix caching, so that a block is live or empty: the flight recorder writes it down,
and ``benches/pool/`` serves it with every contender. What lives here: the calls as that program
reads them, and the goals. What never lives here: a serving loop; the counting
(``benches/pool/src/pages.rs``, from the blocks that it was handed).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from kvmmu import recorder
from kvmmu.replay import run, traces
from kvmmu.replay.options import Options
from kvmmu.replay.traces import Trace

import pool
from harness import Bench, Goal, Row
from pool import LLFREE, OURS, Figures

OPTIONS = Options(
    blocks=90_112,
    speed=2.9,  # of the Mooncake conversation trace: then 92 % of the blocks are live
    prefix_caching=False,
    compaction=False,
    contents=False,
    measure_every=1000,
)
MEASURE = "huge pages of prompts"
PLACED, DEMANDED = "as placed", "on demand"
LESS = Goal(1.0, of="ratio")


def calls(recorded: Iterable[recorder.Call], block_size: int) -> Iterator[str]:
    """Lines of ``benches/pool/src/serving.rs``, without the first: what changed who holds how many
    blocks. Calls that were refused changed nothing."""
    tokens: dict[int, int] = {}
    scheduled: dict[int, int] = {}
    for call in recorded:
        if call.error is not None:
            continue
        if call.name == "open":
            assert call.returned is not None
            tokens[call.returned] = len(call.arguments["tokens"])
            scheduled[call.returned] = 0
            yield f"open {call.returned} {tokens[call.returned]}"
        elif call.name == "close":
            sequence = call.arguments["sequence"]
            del tokens[sequence], scheduled[sequence]
            yield f"close {sequence}"
        elif call.name == "prepare":
            lens = call.arguments["query_lens"]
            grown = []
            for row, sequence in enumerate(call.arguments["sequences"].tolist()):
                scheduled[sequence] += 1 if lens is None else int(lens[row])
                before = tokens[sequence]
                tokens[sequence] = max(before, scheduled[sequence])
                if -(-tokens[sequence] // block_size) > -(-before // block_size):
                    grown.append(f"{sequence} {tokens[sequence]}")
            if grown:
                yield " ".join(("grow", *grown))
        elif call.name in ("append", "fork", "truncate", "release_before", "cancel"):
            raise ValueError(f"call {call.number}: {call.name} is not in a load of this kind")


@dataclass(frozen=True)
class Product:
    """What a run of the product itself came to.

    Attributes:
        live: share of the pool in use, over steps.
        steps, finished, preempted: of the serving loop.
        pages: huge pages of sequences when they finished.
        moves: blocks moved.
    """

    live: float
    steps: int
    finished: int
    preempted: int
    pages: int
    moves: int


def serve(trace: Trace, options: Options) -> Product:
    """Runs the serving loop of ``kvmmu replay``."""
    served = run.serve(trace, options)
    totals = served.totals
    return Product(
        live=totals.live_sum / max(totals.steps, 1) / options.blocks,
        steps=totals.steps,
        finished=totals.finished,
        preempted=totals.preempted,
        pages=totals.huge_at_end,
        moves=served.mmu.stats()["moves_committed"],
    )


def write_load(trace: Trace, options: Options, file: Path) -> Product:
    """Serves a trace and writes what was claimed and given back to a file."""
    recording = file.with_suffix(".kvmmu")
    served = serve(trace, replace(options, further={"record": str(recording)}))
    found = recorder.read(recording)
    recording.unlink()
    with file.open("w", encoding="ascii") as out:
        print("pool", options.blocks, options.block_size, file=out)
        for line in calls(found.calls, options.block_size):
            print(line, file=out)
    return served


def beside(
    figures: Figures,
    pattern: str,
    words: str,
    unit: str,
    value: Callable[[str], float | None],
    goal: Goal | None = None,
    *,
    everybody: bool = False,
) -> Iterator[Row]:
    """Ours beside LLFree's, which is judged, and perhaps beside everybody's that was measured."""
    ours = value(OURS)
    if ours is None:
        return
    there = [who for who in figures.who(MEASURE) if who not in (OURS, LLFREE)] if everybody else []
    for rival in (LLFREE, *there):
        theirs = value(rival)
        if rival == LLFREE or theirs is not None:
            judged = goal if rival == LLFREE else None
            yield Row(f"{words}, {pattern}", unit, ours, rival, theirs, judged)


def share(figures: Figures, pattern: str, part: str, whole: str, who: str) -> float | None:
    """One figure by another. What was not counted is 0: where no page is missed none lacks."""
    by = figures.part(MEASURE, pattern, 1, whole, who)
    return (figures.part(MEASURE, pattern, 1, part, who) or 0.0) / by if by else None


def placement(figures: Figures) -> Iterator[Row]:
    """Nothing moves: who gets how many huge pages, and what those would take that are missed."""
    of = partial(beside, figures, PLACED)
    pages = partial(share, figures, PLACED, "pages", "regions")
    theirs = pages(LLFREE)
    least = None if theirs is None else Goal(theirs, least=True)
    yield from of("complete regions that are huge pages", "share", pages, least, everybody=True)
    lacking = partial(share, figures, PLACED, "lacking, all", "regions")
    yield from of("moves that missed pages lack, by all regions", "moves", lacking, LESS)

    def part(name: str) -> Callable[[str], float | None]:
        return lambda who: figures.part(MEASURE, PLACED, 1, name, who)

    words = "moves that a missed page lacks"
    yield from of(f"{words}: mean", "moves", part("lacking, mean"), LESS, everybody=True)
    yield from of(f"{words}: p50", "moves", part("lacking, p50"))
    yield from of(f"{words}: p90", "moves", part("lacking, p90"))
    for name in ("every window", "half the windows"):
        yield from of(f"moves for a free window, {name} of the possible", "moves", part(name))
    yield from of("runs of a sequence at its end", "runs", part("runs at the end"), everybody=True)


def on_demand(figures: Figures) -> Iterator[Row]:
    """Every region becomes a huge page by the fewest moves: the same pages for all."""
    of = partial(beside, figures, DEMANDED)
    each = partial(share, figures, DEMANDED, "moved", "regions")
    yield from of("moves for each huge page, every region one", "moves", each, LESS, everybody=True)
    each = partial(share, figures, DEMANDED, "moved", "made")
    yield from of("moves for each window that had to be made", "moves", each)


def background(figures: Figures, still: Product, moving: Product) -> Iterator[Row]:
    """The product's own compaction between steps, by the pages that there are more at the end."""
    if moving.pages <= still.pages:
        return
    lacking = figures.part(MEASURE, PLACED, 1, "lacking, mean", LLFREE)
    yield Row(
        "moves for each huge page that compaction between steps adds",
        "moves",
        (moving.moves - still.moves) / (moving.pages - still.pages),
        f"{LLFREE}, what a missed page lacks",
        lacking,
        LESS,
    )


def check(figures: Figures, still: Product) -> None:
    """The program's kvmmu has served what the product has: it ends with as many huge pages.

    Raises:
        ValueError: it has not, so its figures are not those of this load.
    """
    found = figures.part(MEASURE, PLACED, 1, "pages at the end", OURS)
    if not still.preempted and found != still.pages:
        raise ValueError(f"{found} huge pages at the end, kvmmu replay had {still.pages}")


def rows(bench: Bench) -> Iterator[Row]:
    if bench.trace is None:
        bench.note("pages: needs --trace FILE (the Mooncake conversation trace, for one)")
        return
    program = pool.build(bench.llfree)
    trace = traces.read(bench.trace)
    with tempfile.TemporaryDirectory() as folder:
        load = Path(folder) / "load.txt"
        still = write_load(trace, OPTIONS, load)
        figures = pool.run(program, "pages", "--load", str(load))
    check(figures, still)
    moving = serve(trace, replace(OPTIONS, compaction=True))
    bench.note(
        f"pages: {OPTIONS.blocks:,} blocks, {still.live:.1%} live over {still.steps:,} steps, "
        f"{still.finished:,} requests; compaction between steps moved {moving.moves:,} blocks and "
        f"left {moving.pages:,} huge pages at the end instead of {still.pages:,}"
    )
    shown = figures.part(MEASURE, PLACED, 1, "shown", LLFREE)
    if shown:
        bench.note(
            f"pages: LLFree was shown {shown:.0f} free windows when it said that it had none"
        )
    yield from placement(figures)
    yield from on_demand(figures)
    yield from background(figures, still, moving)
