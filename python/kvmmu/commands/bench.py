"""``kvmmu bench``: the benchmarks of the installed package, on this machine.

What lives here: its options. What never lives here: measuring (see :mod:`kvmmu.bench`).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .. import bench as benches
from ..bench.harness import Bench, Row, warm_cores
from ..bench.report import remarks, table
from ..errors import InvalidConfig
from .around import check_writable, exit_codes, show, write_json

__all__ = ["COMMAND"]


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar=f"[{'|'.join(benches.NAMES)}]...",
            help="What to measure (default: all, minutes).",
            show_default=False,
        ),
    ] = None,
    vllm: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="An unpacked source of vLLM.", show_default=False),
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the rows.", show_default=False),
    ] = None,
) -> None:
    """Measure kvmmu beside its rivals on this machine; ratios below 1: kvmmu is faster."""
    with exit_codes():
        wanted = list(dict.fromkeys(names or benches.NAMES))
        for name in wanted:
            if name not in benches.NAMES:
                allowed = ", ".join(benches.NAMES)
                raise InvalidConfig(f"no benchmark is called {name!r}; there are: {allowed}")
        if vllm is not None and not (vllm / "vllm" / "v1" / "core" / "block_pool.py").is_file():
            raise InvalidConfig(f"--vllm {vllm}: vllm/v1/core/block_pool.py is not there")
        if json_file is not None:
            check_writable(json_file)
        run = Bench(vllm=vllm and vllm.resolve())
        run.two_loops = warm_cores()
        if not run.two_cores:
            run.note("two loops do not run in parallel here: no figure of two threads was taken")
        rows: list[Row] = []
        for name in wanted:
            print(f"{name} ...", file=sys.stderr, flush=True)
            rows.extend(benches.rows(name, run))
        if json_file is not None:
            write_json(json_file, [row.as_json(None) for row in rows])
        show(table(rows, run), piped_width=150)
        for remark in remarks(rows, run):
            show(remark, as_is=True)


COMMAND = bench
