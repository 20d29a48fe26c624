"""A whole replay, from a trace and options to figures.

What lives here: :func:`serve`, which puts the rooms together, and :func:`replay`, which makes
figures of it. What never lives here: printing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..preheat import Preheated
from .alone import Alone
from .loop import Serving
from .machine import Machine
from .metrics import Onlooker, TimedMMU, Totals
from .options import Options
from .report import figures
from .traces import Trace
from .verify import Verifier

if TYPE_CHECKING:
    from ..metrics import Collector

__all__ = ["Served", "replay", "serve"]


@dataclass(frozen=True, slots=True)
class Served:
    """What a run leaves behind.

    Attributes:
        totals: its sums.
        mmu: the MMU that served, with its stop watch.
        wall_s: seconds that it took.
        preheated: what touching memory at start took.
    """

    totals: Totals
    mmu: TimedMMU
    wall_s: float
    preheated: Preheated | None = None


def serve(
    trace: Trace,
    options: Options,
    *,
    watch: Callable[[Totals], bool] = lambda totals: False,
    say: Callable[[str], None] = lambda sentence: None,
    until_s: float | None = None,
    warm_up_s: float = 0.0,
    onlooker: Onlooker | None = None,
    collector: Collector | None = None,
) -> Served:
    """Runs a trace.

    Args:
        trace: from :mod:`.traces` or :mod:`.sample`.
        options: how.
        watch: called every few steps; returns True to stop early.
        say: told of the first mismatches.
        until_s: simulated seconds after which the run ends; None: when all have finished.
        warm_up_s: simulated seconds of which nothing is counted.
        onlooker: told of every step, and of passes of compaction; not of requests one at a time.
        collector: of metrics: watches the manager as ``"replay"`` while it runs. Waits are told in
            simulated seconds.

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
    if options.reserve == "pow2":
        longest *= 2  # at most: an output is rounded up
    slots = min(slots, options.blocks * options.block_size + rows)
    machine = Machine(options, rows=rows, longest=longest, slots=slots)
    machine.mmu.onlooker = onlooker
    verifier = Verifier(machine, totals, options.seed, say) if options.verify else None
    if collector is not None:
        block_bytes = 8 * (options.block_size + 1)  # contents, and the owner
        totals.engine = collector.add(machine.mmu.core, "replay", block_bytes=block_bytes)
    try:
        if options.one_at_a_time:
            Alone(trace, options, machine, totals, verifier, watch).run()
        else:
            serving = Serving(
                trace,
                options,
                machine,
                totals,
                verifier,
                watch,
                until_s=until_s,
                warm_up_s=warm_up_s,
            )
            serving.run()
    finally:
        if collector is not None:
            collector.remove("replay")
    return Served(totals, machine.mmu, perf_counter() - start, machine.preheated)


def replay(
    trace: Trace,
    options: Options,
    *,
    watch: Callable[[Totals], bool] = lambda totals: False,
    say: Callable[[str], None] = lambda sentence: None,
    onlooker: Onlooker | None = None,
    collector: Collector | None = None,
) -> dict[str, Any]:
    """Runs a whole trace; arguments and errors as for :func:`serve`.

    Returns:
        the figures of :mod:`.report`.
    """
    served = serve(trace, options, watch=watch, say=say, onlooker=onlooker, collector=collector)
    found = figures(trace, options, served.totals, served.mmu, served.wall_s)
    preheated = served.preheated
    return {**found, "preheated": None if preheated is None else asdict(preheated)}
