"""The benchmarks that need no more than the installed package: ``kvmmu bench``.

What lives here: a file a workload, how they are timed (:mod:`.harness`), and the table
(:mod:`.report`). What never lives here: what needs a checkout, a compiler or a rival that must be
built; that is in the repository's ``benches/``, whose ``run`` measures these too.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

from .harness import Bench, Row

__all__ = ["NAMES", "rows"]

NAMES = ("move", "plan", "pool", "step", "table", "views")


def rows(name: str, bench: Bench) -> Iterator[Row]:
    """Measures one of :data:`NAMES`."""
    found: Iterator[Row] = import_module(f"{__name__}.{name}").rows(bench)
    return found
