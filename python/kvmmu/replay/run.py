"""A whole replay, from a trace and options to figures.

What lives here: :func:`replay`, which puts the rooms together. What never lives here: printing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from time import perf_counter
from typing import Any

from .alone import Alone
from .loop import Serving
from .machine import Machine
from .metrics import Totals
from .options import Options
from .report import figures
from .traces import Trace
from .verify import Verifier

__all__ = ["replay"]


def replay(
    trace: Trace,
    options: Options,
    *,
    watch: Callable[[Totals], bool] = lambda totals: False,
    say: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Any]:
    """Runs a trace.

    Args:
        trace: from :mod:`.traces` or :mod:`.sample`.
        options: how.
        watch: called every few steps; returns True to stop early.
        say: told of the first mismatches.

    Returns:
        the figures of :mod:`.report`.

    Raises:
        InvalidConfig: the machine does not have the memory for this.
    """
    start = perf_counter()
    totals = Totals(requests=len(trace))
    longest = int((trace.prompt_tokens + trace.output_tokens).max())
    if options.one_at_a_time:
        rows, slots = 1, longest
    else:
        rows = min(options.max_running, len(trace))
        slots = rows + int(
            min(options.prefill_tokens_per_step + 1, trace.prompt_tokens.sum() + rows)
        )
    slots = min(slots, options.blocks * options.block_size + rows)
    machine = Machine(options, rows=rows, longest=longest, slots=slots)
    verifier = Verifier(machine, totals, options.seed, say) if options.verify else None
    kind = Alone if options.one_at_a_time else Serving
    kind(trace, options, machine, totals, verifier, watch).run()
    found = figures(trace, options, totals, machine.mmu, perf_counter() - start)
    found["preheated"] = None if machine.preheated is None else asdict(machine.preheated)
    return found
