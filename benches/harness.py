"""What only a checkout can measure: programs that cargo builds.

What lives here: the yardstick, and figures of the core crate's examples. What never lives here: how
things are timed, and rows (:mod:`kvmmu.bench.harness`, which the wheel has too).
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from kvmmu.bench.harness import Bench, Goal, Row, medians, warm_cores

__all__ = ["ROOT", "Bench", "Goal", "Row", "atomic_add_ns", "medians", "rust_figures", "warm_cores"]

ROOT = Path(__file__).resolve().parent.parent


def atomic_add_ns() -> float:
    """One uncontended atomic add, in nanoseconds, measured now by a Rust program."""
    return rust_figures("atomic_add")["ns"]


def rust_figures(example: str) -> dict[str, float]:
    """What an example of the core crate measures and prints as JSON."""
    cargo = ("cargo", "run", "--quiet", "--release", "--locked")
    command = (*cargo, "-p", "kvmmu", "--example", example)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return {name: float(value) for name, value in json.loads(done.stdout).items()}
