"""One policy over one scenario.

What lives here: :func:`soak_one`, which puts a scenario and a policy together into options of the
serving loop, runs it and makes figures of it. What never lives here: processes, tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..replay.metrics import Onlooker, Totals
from ..replay.options import Options
from ..replay.run import serve
from . import workload
from .figures import figures
from .policies import POLICIES, Chosen
from .task import Task

if TYPE_CHECKING:
    from ..metrics import Collector

__all__ = ["options_of", "soak_one"]

MEASURE_EVERY = 32
"""Steps, about a second, between two looks at the whole memory."""


def options_of(task: Task, policy: Chosen) -> Options:
    """What the serving loop is asked for."""
    scenario = task.scenario
    pool, server = scenario.pool, scenario.server
    asked: dict[str, Any] = {
        "blocks": pool.num_blocks,
        "block_size": pool.block_size,
        "granule": pool.granule,
        "step_ms": server.step * 1000,
        "prefill_tokens_per_s": server.prefill_tokens_per_s,
        "max_running": server.max_running,
        "timeout_s": server.timeout,
        "prefix_caching": server.prefix_caching,
        "contiguous": server.contiguous,
        "spare": server.spare,
        "seed": task.seed,
        "contents": task.verify,
        "verify": task.verify,
        "measure_every": MEASURE_EVERY,
    }
    asked |= policy.options
    if task.budget_blocks is not None:
        asked["budget_blocks"] = task.budget_blocks
    if task.windows_below is not None:
        asked["windows_below"] = task.windows_below
    if asked.get("reserve") or asked.get("placement") == "fifo":
        asked["contiguous"] = 0  # all of it is, or nothing can be
    if server.spare is not None and asked.get("reserve"):
        asked["spare"] = None
    return Options(**asked)


def _of_settings(task: Task) -> Chosen:
    assert task.settings is not None
    return Chosen(task.policy, "settings of a file", task.settings)


def soak_one(
    task: Task,
    watch: Callable[[float, Totals], bool] = lambda simulated_s, totals: False,
    onlooker: Onlooker | None = None,
    collector: Collector | None = None,
) -> dict[str, Any]:
    """Runs it.

    Args:
        watch: told how far it is, in simulated seconds; returns True to stop.
        collector: of metrics; told of the run under the name "replay".
        onlooker: told of the memory about once a simulated second, and of passes of compaction.

    Returns:
        the figures of :mod:`.figures`.

    Raises:
        InvalidConfig: no memory for this, or a trace is missing.
    """
    policy = POLICIES[task.policy] if task.settings is None else _of_settings(task)
    options = options_of(task, policy)
    hours = task.simulated_s / 3600
    scenario = task.scenario.model_copy(update={"hours": hours})
    trace = workload.requests(scenario, task.seed, trace=task.trace, rate=task.rate)
    served = serve(
        trace,
        options,
        watch=lambda totals: watch(totals.simulated_s, totals),
        until_s=task.simulated_s,
        warm_up_s=min(scenario.warm_up, task.simulated_s / 4),
        onlooker=onlooker,
        collector=collector,
    )
    return figures(task, policy, options, trace, served)
