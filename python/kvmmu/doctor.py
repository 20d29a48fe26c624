"""What is there, what is missing, and which extra brings it: ``kvmmu doctor``.

What lives here: :func:`examine`. What never lives here: imports of what it looks for. torch alone
takes seconds to import, so packages are found by their metadata and libraries by their loader.

Something optional that is missing is no failure; a core that does not work is.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from . import _core
from .cuda import availability as cuda
from .errors import KVCacheError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Finding", "examine", "table"]

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        what: what was looked for.
        found: version or setting; None when it is missing.
        note: what follows from it, or what brings it.
        failed: kvmmu itself does not work.
    """

    what: str
    found: str | None
    note: str = ""
    failed: bool = False


def examine() -> list[Finding]:
    """Looks at everything; imports and changes nothing."""
    found = cuda.installed()
    return [
        Finding("kvmmu", _core.__version__, _core.build),
        Finding("Python", platform.python_version(), sys.executable),
        Finding("NumPy", np.__version__),
        _cpu(),
        _huge_pages(),
        _self_check(),
        _package("typer", "command line", "kvmmu[cli]"),
        _package("rich", "tables and progress", "kvmmu[cli]"),
        _package("plotly", "pages of --html", "kvmmu[html]"),
        _package("pydantic", "files of settings", "kvmmu[config]"),
        _package("PyYAML", "files of settings", "kvmmu[config]"),
        _package("hypothesis", "fuzzing of allocators", "kvmmu[testing]"),
        _package("prometheus-client", "metrics", "kvmmu[metrics]"),
        _package("torch", "KVCache on tensors", "kvmmu[torch]"),
        _driver(found),
        _cupy(found),
        _nvrtc(found),
        _cuda(found),
    ]


def table(findings: Sequence[Finding]) -> RenderableType:
    """The findings as a table. Needs rich."""
    from rich.markup import escape
    from rich.table import Table

    grid = Table(show_header=False, box=None, padding=(0, 1))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(no_wrap=True)
    grid.add_column(style="dim")
    for finding in findings:
        found = escape(finding.found) if finding.found is not None else "[yellow]missing[/yellow]"
        if finding.failed:
            found = f"[red]{found}[/red]"
        grid.add_row(escape(finding.what), found, escape(finding.note))
    return grid


def _cpu() -> Finding:
    features = _core.cpu_features()
    have = [name for name, present in features.items() if present is True]
    return Finding(
        "CPU",
        f"{platform.machine()}, {os.cpu_count()} cores",
        f"mover uses: {', '.join(have) or 'plain copies'}",
    )


def _huge_pages() -> Finding:
    """Transparent huge pages: the setting in brackets counts."""
    try:
        text = _HUGE_PAGES.read_text(encoding="ascii", errors="replace")
        setting = text[text.index("[") + 1 : text.index("]")]
    except (OSError, ValueError):
        return Finding("huge pages", None, "this system does not say")
    notes = {
        "always": "CPU storage gets them by itself",
        "madvise": "CPU storage gets them where it asks",
        "never": "CPU copies are slower without: set madvise or always",
    }
    return Finding("huge pages", setting, notes.get(setting, ""))


def _self_check() -> Finding:
    """Opens a sequence, exports it and lets the core recount itself."""
    try:
        mmu = _core.MMU(8, 4, record=False)
        sequence = mmu.open(np.arange(9, dtype=np.int32))
        tables = mmu.register_tables(
            np.empty((1, 8), dtype=np.int32),
            np.empty(1, dtype=np.int32),
            np.empty(16, dtype=np.int64),
            np.empty(2, dtype=np.int32),
        )
        step = mmu.begin_step()
        mmu.prepare(
            step,
            np.array([sequence], dtype=np.int64),
            tables,
            query_lens=np.array([9], dtype=np.int32),
        )
        mmu.written(step)
        mmu.validate(tables)
        mmu.end_step(step)
        mmu.close(sequence)
        mmu.validate()
        states = mmu.states()
        if states["available"] != 8:
            return Finding("self check", "failed", f"blocks are missing: {states}", failed=True)
    except KVCacheError as error:
        return Finding("self check", "failed", str(error), failed=True)
    return Finding("self check", "passed", "one request through a pool of 8 blocks")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _package(name: str, purpose: str, extra: str) -> Finding:
    version = _version(name)
    return Finding(name, version, purpose if version else f"{purpose}: pip install '{extra}'")


def _cupy(found: cuda.Installed) -> Finding:
    if not found.cupy:
        return Finding("CuPy", None, "CUDA mover: pip install 'kvmmu[cuda13]' or 'kvmmu[cuda12]'")
    versions = ", ".join(version for _, version in found.cupy)
    return Finding("CuPy", versions, f"CUDA mover ({', '.join(name for name, _ in found.cupy)})")


def _nvrtc(found: cuda.Installed) -> Finding:
    if not found.nvrtc:
        note = "compiles the kernels: pip install 'kvmmu[cuda13]' or 'kvmmu[cuda12]'"
        return Finding("NVRTC", None, note)
    majors = ", ".join(f"CUDA {major}" for major, _ in found.nvrtc)
    return Finding(
        "NVRTC", majors, f"compiles the kernels ({', '.join(s for _, s in found.nvrtc)})"
    )


def _driver(found: cuda.Installed) -> Finding:
    if found.driver is None:
        note = "comes with the NVIDIA driver; nothing on a CPU needs it"
        return Finding("CUDA driver", None, note)
    major, minor = found.driver
    extra = "kvmmu[cuda13]" if major >= 13 else "kvmmu[cuda12]"
    return Finding(
        "CUDA driver", f"CUDA {major}.{minor}", f"fits {extra}; devices: {found.devices}"
    )


def _cuda(found: cuda.Installed) -> Finding:
    """What ``kvmmu.cuda.require()`` would say."""
    problems = cuda.problems(found)
    if not problems:
        return Finding("CUDA", "ready", "driver, CuPy and NVRTC fit each other")
    state = None if found.driver is None else "not usable"
    return Finding("CUDA", state, "; ".join(map(str, problems)))
