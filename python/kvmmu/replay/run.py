"""A whole replay, from a trace and options to figures.

What lives here: :func:`replay`, which puts the rooms together. What never lives here: printing.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

from .alone import Alone
from .loop import Serving
from .machine import Machine
from .metrics import Totals
from .options import Options
from .report import figures
from .traces import Trace
from .verify import Verifier

if TYPE_CHECKING:
    from ..metrics import Collector

__all__ = ["replay"]


def replay(
    trace: Trace,
    options: Options,
    *,
    watch: Callable[[Totals], bool] = lambda totals: False,
    say: Callable[[str], None] = lambda sentence: None,
    collector: Collector | None = None,
) -> dict[str, Any]:
    """Runs a trace.

    Args:
        trace: from :mod:`.traces` or :mod:`.sample`.
        options: how.
        watch: called every few steps; returns True to stop early.
        say: told of the first mismatches.
        collector: of metrics: watches the manager as ``"replay"`` while it runs. Waits are told in
            simulated seconds.

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
    if collector is not None:
        block_bytes = machine.contents[0].nbytes + machine.owners[0].nbytes
        totals.engine = collector.add(machine.mmu.core, "replay", block_bytes=block_bytes)
    try:
        kind(trace, options, machine, totals, verifier, watch).run()
    finally:
        if collector is not None:
            collector.remove("replay")
    return figures(trace, options, totals, machine.mmu, perf_counter() - start)
