"""``kvmmu soak``: policies over long simulated loads, in one table.

What lives here: its options, messages and progress bars. What never lives here: the work (see
:mod:`kvmmu.soak`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import rich.console
import rich.progress
import typer
from rich.console import RenderableType

from ..errors import InvalidConfig
from ..pictures import Run, check_library, page
from ..replay import traces
from ..replay.options import in_range
from ..soak import scenario as scenarios
from ..soak.concurrency import PROBE_HOURS, PROBES, sustained
from ..soak.figures import MEASURES
from ..soak.policies import chosen
from ..soak.report import definitions, published, rates, shown, table
from ..soak.sensitivity import POLICIES as COMPARED
from ..soak.sensitivity import sensitivity, variants
from ..soak.task import Task
from ..soak.together import Soaked, alone
from ..soak.together import soak as run_soak
from ..soak.workload import requests
from .around import (
    CHECK_FAILED,
    INTERRUPTED,
    Files,
    as_json,
    complain,
    exit_codes,
    refuse_typed,
    serve_metrics,
    show,
    stop_on_ctrl_c,
)
from .configured import Configured

if TYPE_CHECKING:
    from ..metrics import Collector

__all__ = ["COMMAND"]


OF_A_FILE = "config"
"""Name of the policy that a file of settings makes."""


def soak(
    context: typer.Context,
    scenario: Annotated[
        str | None,
        typer.Argument(
            metavar="SCENARIO",
            help="article-128k, article-2048, mooncake, azure, shift, drop, agents, code, or the "
            "path of a YAML file.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", help="One of those that --definitions lists; several times; none: all."
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Settings (YAML), as one more policy.",
            show_default=False,
        ),
    ] = None,
    hours: Annotated[
        float | None, typer.Option(help="Simulated time (default: as the scenario says).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths.")] = 0,
    rate: Annotated[float, typer.Option(help="Times as many requests a second.")] = 1.0,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Of a scenario that takes a real trace.", show_default=False
        ),
    ] = None,
    concurrency: Annotated[
        bool,
        typer.Option(
            "--concurrency",
            help="Find the largest rate at which fewer than 0.5 % of the long requests time out.",
        ),
    ] = False,
    probes: Annotated[int, typer.Option(help="Runs a policy for --concurrency.")] = PROBES,
    sensitive: Annotated[
        bool,
        typer.Option(
            "--sensitivity",
            help="Vary load, share of long requests, step time, prefill, budget and trigger, "
            "each alone.",
        ),
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Store bytes, and read them back (slower).")
    ] = False,
    processes: Annotated[
        int | None, typer.Option(help="Runs at once (default: one a core).")
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write the figures.", show_default=False),
    ] = None,
    html_file: Annotated[
        str | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Write a page with the memory over time (needs kvmmu\\[html]).",
            show_default=False,
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            help="Serve metrics for Prometheus on this port of 127.0.0.1, of one policy alone.",
            show_default=False,
        ),
    ] = None,
    print_scenario: Annotated[
        bool, typer.Option("--show", help="Print the scenario's file, to copy and change.")
    ] = False,
    print_definitions: Annotated[
        bool, typer.Option("--definitions", help="Print what every policy and row means.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress bars and no table.")
    ] = False,
) -> None:
    """Compare policies over hours of simulated load: where compaction pays, and where not."""
    with exit_codes():
        if print_definitions:
            show(definitions())
            return
        if scenario is None:
            raise InvalidConfig(f"SCENARIO: none given, allowed: {', '.join(scenarios.names())}")
        if print_scenario:
            show(scenarios.text(scenario), as_is=True)
            return
        if concurrency and sensitive:
            raise InvalidConfig("--sensitivity: given with --concurrency, allowed: one of the two")
        _refuse_ignored(context, concurrency=concurrency, sensitive=sensitive)
        loaded = scenarios.load(scenario)
        policies = chosen(policy or [])
        settings = None if config is None else _settings(context, config, loaded)
        if hours is not None:
            in_range("hours", hours, 0.001, scenarios.MAX_HOURS)
        in_range("seed", seed, 0, 2**63 - 1)
        in_range("rate", rate, 0.001, 1000)
        in_range("probes", probes, 2, 20)
        in_range("processes", 1 if processes is None else processes, 1, 1024)
        if html_file is not None:
            check_library()
        files = Files(json_file=json_file, html_file=html_file)
        read = None if trace is None else traces.read(trace)
        first = Task(loaded, policies[0].name, seed, hours, rate, read, verify)
        requests(loaded, seed, trace=read, rate=rate)  # says what is missing before anything runs
        pictured = html_file is not None
        tasks = [replace(first, policy=one.name, history=pictured) for one in policies]
        if settings is not None:
            tasks.append(replace(first, policy=OF_A_FILE, settings=settings, history=pictured))
        if metrics_port is not None and len(tasks) > 1:
            raise InvalidConfig("--metrics-port: with several runs, allowed: with one policy")
        with serve_metrics(metrics_port) as collector, stop_on_ctrl_c() as stopped:
            if concurrency:
                figures, tables = _concurrency(tasks, probes, processes, stopped, quiet=quiet)
            elif sensitive:
                figures, tables = _sensitivity(first, processes, stopped, quiet=quiet)
            else:
                soaked = _policies(tasks, processes, stopped, collector, quiet=quiet)
                results = [one.figures for one in soaked]
                files.write("html_file", lambda: _page(first, soaked))
                stopped_early = any(one["interrupted"] for one in results)
                figures = {"policies": results, "interrupted": stopped_early}
                tables = _tables(scenario, first, results)
        figures = {"scenario": loaded.model_dump(mode="json"), **figures}
        files.write("json_file", lambda: as_json(figures))
        for shown_below in () if quiet else tables:  # last: a run of hours must not be lost to it
            show(shown_below)
        files.tell()
        if figures["interrupted"]:
            raise typer.Exit(INTERRUPTED)
        if verify:
            _verified(figures, quiet=quiet)


def _refuse_ignored(context: typer.Context, *, concurrency: bool, sensitive: bool) -> None:
    """What counts for nothing beside the kind of run that was asked for."""
    if concurrency:
        refuse_typed(context, "with --concurrency, which looks for it", "without it", "rate")
        refuse_typed(context, "with --concurrency", "without it", "html_file", "metrics_port")
        return
    refuse_typed(context, "without --concurrency", "with it", "probes")
    if sensitive:
        compared = f"with --sensitivity (of {', '.join(COMPARED)})"
        refuse_typed(context, compared, "without it", "policy", "config")
        refuse_typed(context, "with --sensitivity", "without it", "html_file", "metrics_port")


def _verified(figures: dict[str, Any], *, quiet: bool) -> None:
    """What --verify found in the runs whose figures are told; of a search, those it ended with."""
    told = [*figures.get("policies", ()), *figures.get("sensitivity", ())]
    told += [one["figures"] for one in figures.get("concurrency", ()) if one["figures"]]
    wrong = sum(one["mismatches"] for one in told)
    if wrong:
        complain(f"check failed: {wrong:,} mismatches")
        raise typer.Exit(CHECK_FAILED)
    read = sum(one["verified_tokens"] for one in told)
    if not read:
        complain("check failed: nothing was verified, for no request was served")
        raise typer.Exit(CHECK_FAILED)
    if not quiet:
        show(f"verified: {read:,} positions, no mismatch")


def _settings(context: typer.Context, file: str, scenario: scenarios.Scenario) -> dict[str, Any]:
    """What a file of settings says about a policy; the pool is the scenario's."""
    given = Configured(context, file)
    resolved = given.resolve(scenario.pool.num_blocks, scenario.pool.block_size)
    assert resolved is not None
    given.whole(resolved)
    asked = {
        **given.further("pool", "seed", "placement"),
        **given.further("pages", "hold_blocks"),
        **given.further("prefix", "eviction", "page_aware", "prefix_caching"),
        **given.further(
            "compaction", "budget_blocks", "guarantee", "windows_below", "gather_least"
        ),
        "further": given.further_of_the_mmu(),
    }
    if given.says("compaction", "auto_compact"):
        asked["compaction"] = given.further("compaction", "auto_compact")["auto_compact"]
    orders, size = given.says("pages", "page_orders"), given.says("pages", "page_size")
    if orders or size:
        asked["page_orders"] = tuple(resolved.mmu["page_orders"])
    if given.says("memory", "reserved_memory"):
        asked["reserved_blocks"] = resolved.reserved_blocks
    given.further("model", "num_layers", "num_kv_heads", "head_dim", "v_head_dim", "dtype")
    given.complain_of_unused("a soak")
    return asked


def _policies(
    tasks: Sequence[Task],
    processes: int | None,
    stopped: Callable[[], bool],
    collector: Collector | None,
    *,
    quiet: bool,
) -> list[Soaked]:
    with _progress(quiet, [task.policy for task in tasks], tasks) as advance:
        if len(tasks) == 1:  # one run needs no second process
            return [alone(tasks[0], lambda told: advance([told]) or stopped(), collector)]
        return run_soak(tasks, processes=processes, watch=lambda told: advance(told) or stopped())


def _tables(name: str, first: Task, results: Sequence[dict[str, Any]]) -> list[RenderableType]:
    beside = published(name)
    return [
        table(first.scenario, results, hours=first.simulated_s / 3600),
        *([] if beside is None else [beside]),
        "What the rows and policies mean: kvmmu soak --definitions. All of it is simulated.",
    ]


def _page(task: Task, soaked: Sequence[Soaked]) -> str:
    meanings = {measure.label.strip(): measure.meaning for measure in MEASURES}
    runs = [
        Run(
            policy=one.figures["policy"],
            figures={
                measure.label.strip(): shown(measure, one.figures[measure.name])
                for measure in MEASURES
            },
            history=one.history,
            definitions=meanings,
        )
        for one in soaked
    ]
    stopped = ", interrupted" * any(one.figures["interrupted"] for one in soaked)
    about = f"{task.scenario.about} {task.simulated_s / 3600:g} hours{stopped}, seed {task.seed}."
    return page(task.scenario.title, runs, about=about)


def _concurrency(
    tasks: Sequence[Task],
    probes: int,
    processes: int | None,
    stopped: Callable[[], bool],
    *,
    quiet: bool,
) -> tuple[dict[str, Any], list[RenderableType]]:
    tasks = [task if task.hours is not None else replace(task, hours=PROBE_HOURS) for task in tasks]
    with _progress(quiet, [f"{task.policy}, a probe" for task in tasks], tasks) as advance:
        found = sustained(
            tasks,
            probes=probes,
            processes=processes,
            watch=lambda told: advance(told) or stopped(),
        )
    figures = {
        "concurrency": [{**asdict(one), "concurrency": one.concurrency} for one in found],
        "interrupted": stopped(),
    }
    return figures, [rates(tasks[0].scenario, found, interrupted=stopped())]


def _sensitivity(
    first: Task, processes: int | None, stopped: Callable[[], bool], *, quiet: bool
) -> tuple[dict[str, Any], list[RenderableType]]:
    planned = variants(first)
    labels = [f"{one.what} {one.value}, {one.task.policy}" for one in planned]
    tasks = [one.task for one in planned]
    with _progress(quiet, labels, tasks) as advance:
        soaked = run_soak(tasks, processes=processes, watch=lambda told: advance(told) or stopped())
    results = [one.figures for one in soaked]
    figures = {
        "sensitivity": [
            {"varied": one.what, "value": one.value, **result}
            for one, result in zip(planned, results, strict=True)
        ],
        "interrupted": any(result["interrupted"] for result in results),
    }
    return figures, [sensitivity(planned, results)]


@contextmanager
def _progress(
    quiet: bool, labels: Sequence[str], tasks: Sequence[Task]
) -> Iterator[Callable[[Sequence[float]], bool]]:
    """A bar a run on a terminal, nothing elsewhere. What is yielded returns False: go on."""
    console = rich.console.Console(stderr=True, highlight=False)
    if quiet or not console.is_terminal:
        yield lambda told: False
        return
    bars = rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.TextColumn("{task.completed:.3f} of {task.total:g} h"),
        rich.progress.TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    with bars:
        numbers = [
            bars.add_task(label, total=task.simulated_s / 3600)
            for label, task in zip(labels, tasks, strict=True)
        ]

        def advance(told: Sequence[float]) -> bool:
            for number, simulated_s in zip(numbers, told, strict=True):
                bars.update(number, completed=simulated_s / 3600)
            return False

        yield advance


COMMAND = soak
