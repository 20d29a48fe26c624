"""The pool beside LLFree, lists, a queue, a stack, a buddy allocator; and its batches from Python.

The figures come from ``benches/pool/``, a cargo package of its own, which runs every contender in
turn in one process. What lives here: its build, with LLFree if ``--llfree DIR`` names a checkout,
and the goals. What never lives here: a measurement of anything but the calls from Python.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvmmu.bench import pool as from_python

from harness import ROOT, Bench, Goal, Row

PACKAGE = ROOT / "benches" / "pool"
CORE = ROOT / "rust" / "kvmmu"
BATCH = 8192
POOL = 1 << 20
OURS = "kvmmu"
LLFREE = "LLFree"
SCATTERED = "one block, half full"
FULL = "one block, 99 % full"
STOPPED = "a claim while another is stopped in one"
CHURN = "churn at 75 % fill"
RIVALS = (LLFREE, "Mutex<Vec>", "ArrayQueue", "tagged Treiber stack", "buddy_system_allocator")

Key = tuple[str, str, int, str]
"""(measure, pattern, threads, contender)"""


@dataclass(frozen=True)
class Figures:
    """What the Rust program printed: for each key its parts."""

    parts: dict[Key, dict[str, float]]

    def part(self, measure: str, pattern: str, threads: int, part: str, who: str) -> float | None:
        return self.parts.get((measure, pattern, threads, who), {}).get(part)

    def pair(self, measure: str, pattern: str, threads: int, who: str) -> float | None:
        """A claim and its release."""
        parts = self.parts.get((measure, pattern, threads, who))
        return None if parts is None else sum(parts.values())

    def who(self, measure: str) -> list[str]:
        """Those that were measured, ours first, in the order in which they were."""
        return list(dict.fromkeys(key[3] for key in self.parts if key[0] == measure))

    def measures(self) -> list[str]:
        return list(dict.fromkeys(key[0] for key in self.parts))


def read(lines: str) -> Figures:
    """Figures from JSON lines (``benches/pool/src/report.rs`` has the format)."""
    parts: dict[Key, dict[str, float]] = {}
    for line in lines.splitlines():
        found: dict[str, Any] = json.loads(line)
        key = (found["measure"], found["pattern"], found["threads"], found["who"])
        parts.setdefault(key, {})[found["part"]] = found["value"]
    return Figures(parts)


def target_folder() -> Path:
    return Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target") / "pool-bench"


def manifest(llfree: Path | None) -> Path:
    """The package's manifest; with LLFree that of a copy which depends on the checkout.

    The copy's lock file starts as the package's, so that both hold the same versions.
    """
    if llfree is None:
        return PACKAGE / "Cargo.toml"
    copy = target_folder() / "with-llfree"
    shutil.copytree(PACKAGE, copy, dirs_exist_ok=True)
    text = (PACKAGE / "Cargo.toml").read_text(encoding="utf-8")
    # log_error takes its tracing out of the hot path. A literal string of TOML: no escapes in it.
    dependency = (
        f"llfree = {{ path = '{llfree / 'core'}', features = ['std', 'log_error'],"
        " optional = true }"
    )
    changes = {
        "llfree = []": 'llfree = ["dep:llfree"]',
        'kvmmu = { path = "../../rust/kvmmu" }': f"kvmmu = {{ path = '{CORE}' }}\n{dependency}",
    }
    for old, new in changes.items():
        if text.count(old) != 1:
            raise ValueError(f"{PACKAGE / 'Cargo.toml'}: expected one line {old!r}")
        text = text.replace(old, new)
    (copy / "Cargo.toml").write_text(text, encoding="utf-8")
    return copy / "Cargo.toml"


def build(llfree: Path | None) -> Path:
    """Compiles the program; returns its path."""
    folder = target_folder()
    options = ["--features", "llfree"] if llfree else ["--locked"]
    command = ["cargo", "build", "--quiet", "--release", "--target-dir", str(folder)]
    command += ["--manifest-path", str(manifest(llfree)), *options]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder / "release" / "pool-bench"


def run(program: Path, *arguments: str) -> Figures:
    done = subprocess.run([program, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return read(done.stdout)


def beside_rivals(
    figures: Figures,
    measure: str,
    pattern: str,
    threads: int,
    unit: str,
    value: Callable[[str], float | None],
    goals: dict[str, Goal],
    expected: Sequence[str] = (LLFREE,),
) -> Iterator[Row]:
    """Our figure beside every rival's that was measured, and beside the expected ones anyway."""
    ours = value(OURS)
    if ours is None:
        return
    words = f"{measure}, {pattern}, {threads} thread{'s' if threads > 1 else ''}"
    there = [who for who in RIVALS if value(who) is not None or who in expected]
    for rival in there:
        yield Row(words, unit, ours, rival, value(rival), goals.get(rival))


def one_block(figures: Figures, threads: Sequence[int]) -> Iterator[Row]:
    for pattern in ("repeat", "bulk"):
        for count in threads:
            goal = Goal(0.5 if count == 1 else 1.0, of="ratio")
            yield from beside_rivals(
                figures,
                SCATTERED,
                f"{pattern}, claim + release",
                count,
                "ns",
                partial(figures.pair, SCATTERED, pattern, count),
                {LLFREE: goal},
            )
        alone, both = (figures.pair(SCATTERED, pattern, count, OURS) for count in (1, 2))
        loops = [figures.part("private loop", "repeat", n, "one add", "machine") for n in (1, 2)]
        if alone is not None and both is not None and None not in loops:
            slowdown = (loops[1] or 0.0) / (loops[0] or 1.0)
            yield Row(
                f"{SCATTERED}, {pattern}, 2 threads",
                "ns",
                both,
                f"1 thread x {slowdown:.2f} (two private loops)",
                alone * slowdown,
                Goal(1.5, of="ratio"),
            )


def pages(figures: Figures, threads: Sequence[int]) -> Iterator[Row]:
    for order in (2, 9):
        for pattern in ("repeat", "bulk"):
            for count in threads:
                measure = f"page of order {order}"
                yield from beside_rivals(
                    figures,
                    measure,
                    f"{pattern}, claim + release",
                    count,
                    "ns",
                    partial(figures.pair, measure, pattern, count),
                    {LLFREE: Goal(1.0, of="ratio")},
                )


def batches(figures: Figures, threads: Sequence[int]) -> Iterator[Row]:
    """The goal is about the value: it stands once, in LLFree's row, there or not."""
    for state in ("filled once", "scattered"):
        measure = f"batch of {BATCH}, {state}"
        for part in ("claim", "release"):
            for count in threads:
                goal = Goal(0.5) if state == "filled once" and count == 1 else None
                yield from beside_rivals(
                    figures,
                    measure,
                    part,
                    count,
                    "ns/block",
                    partial(figures.part, measure, "batch", count, part),
                    {} if goal is None else {LLFREE: goal},
                )


def published(figures: Figures) -> Iterator[Row]:
    """One more reference of each block, and back: nobody else here counts references."""
    for state in ("published and held", "published and cached"):
        for part, word in (("claim", "retain"), ("release", "release")):
            ours = figures.part(f"batch of {BATCH}, {state}", "batch", 1, part, OURS)
            if ours is not None:
                yield Row(f"batch of {BATCH}, {state}, {word}", "ns/block", ours, goal=Goal(2.5))


def nearly_full(figures: Figures) -> Iterator[Row]:
    for pattern in ("repeat", "bulk"):
        ours = figures.pair(FULL, pattern, 1, OURS)
        half = figures.pair(SCATTERED, pattern, 1, OURS)
        if ours is None:
            continue
        words = f"{FULL}, {pattern}, 1 thread"
        yield Row(words, "ns", ours, "half full", half, Goal(3, of="ratio"))
        yield Row(words, "ns", ours, LLFREE, figures.pair(FULL, pattern, 1, LLFREE))


def stopped(figures: Figures, bench: Bench) -> Iterator[Row]:
    def of(who: str, part: str) -> float | None:
        return figures.part(STOPPED, "repeat", 2, part, who)

    p999 = of(OURS, "p99.9")
    if p999 is not None:
        words = f"{STOPPED}: p99.9"
        yield Row(words, "ns", p999, "its median", of(OURS, "median"), Goal(10, of="ratio"))
        for rival in RIVALS:
            yield Row(words, "ns", p999, rival, of(rival, "p99.9"))
    held_up = of(OURS, "held up")
    if held_up is not None:
        words = f"{STOPPED}: stops that held it up"
        for rival in RIVALS:
            # Of 100. A hypervisor that takes the core away looks like a wait; locks come to 25.
            goal = Goal(5) if rival == LLFREE else None
            yield Row(words, "stops", held_up, rival, of(rival, "held up"), goal)
        bench.note(
            "stops inside a claim: "
            + ", ".join(
                f"{who} {of(who, 'inside a claim') or 0:.0f} of {of(who, 'stops') or 0:.0f}"
                for who in figures.who(STOPPED)
                if who != "machine"
            )
        )


def fragmentation(figures: Figures, bench: Bench, seed: int) -> Iterator[Row]:
    bench.note(f"pool: seed {seed}")
    for measure in figures.measures():
        if not measure.startswith("random replacement"):
            continue
        pattern = "LLFree's experiment"
        possible = figures.part(measure, pattern, 1, "possible", OURS) or 0
        # The last figure beside everybody's, those on the way beside LLFree's; at the start all
        # have the same blocks.
        *on_the_way, last = [
            part for part in figures.parts[measure, pattern, 1, OURS] if part.endswith("passes")
        ]
        for part in (*on_the_way, last):
            words = f"{measure}, {part}: free windows of {possible:.0f}"
            found = beside_placements(figures, measure, pattern, part, words, "windows", None)
            yield from (row for row in found if part == last or row.rival == LLFREE)
    possible = figures.part(CHURN, "churn", 1, "possible", OURS) or 0
    words = f"{CHURN}: free windows of {possible:.0f}"
    yield from beside_placements(figures, CHURN, "churn", "free windows", words, "windows", None)
    words = f"{CHURN}: mean run of a batch of 256"
    goal = Goal(20, least=True)
    yield from beside_placements(figures, CHURN, "churn", "mean run", words, "blocks", goal)


def beside_placements(
    figures: Figures,
    measure: str,
    pattern: str,
    part: str,
    words: str,
    unit: str,
    goal: Goal | None,
) -> Iterator[Row]:
    """Ours with its default placement beside LLFree and everybody else, our other placements too.

    Without a goal of its own: at least as many as LLFree.
    """
    ours = figures.part(measure, pattern, 1, part, OURS)
    if ours is None:
        return
    rivals = [LLFREE, *(who for who in figures.who(measure) if who not in (OURS, LLFREE))]
    for rival in rivals:
        value = figures.part(measure, pattern, 1, part, rival)
        if rival != LLFREE:
            judged = None
        elif goal is None:
            # Said as a value, so that it can be judged when both are 0.
            judged = None if value is None else Goal(value, least=True)
        else:
            judged = goal
        yield Row(words, unit, ours, rival, value, judged)


def metadata(figures: Figures) -> Iterator[Row]:
    ours = figures.part("metadata", "a block", 1, "all", OURS)
    if ours is not None:
        theirs = figures.part("metadata", "a block", 1, "all", LLFREE)
        yield Row("metadata a block", "bytes", ours, LLFREE, theirs, Goal(4))


def rows(bench: Bench, seed: int = 1) -> Iterator[Row]:
    program = build(bench.llfree)
    threads = [1, 2] if bench.two_cores else [1]
    seeded = ("--seed", str(seed))
    speed = run(program, "speed", "--threads", str(threads[-1]), *seeded)
    yield from one_block(speed, threads)
    yield from pages(speed, threads)
    yield from batches(speed, threads)
    yield from published(speed)
    yield from nearly_full(speed)
    if bench.two_cores:
        yield from stopped(run(program, "stopped", *seeded), bench)
    yield from fragmentation(run(program, "fragmentation", *seeded), bench, seed)
    yield from metadata(run(program, "metadata"))
    yield from from_python.rows(bench)


def main() -> int:
    """``benches/threads.sh``: builds, then prints JSON lines for 1, 2, ... threads."""
    threads = sys.argv[1]
    llfree = Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else None
    return subprocess.run([build(llfree), "threads", "--threads", threads], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
