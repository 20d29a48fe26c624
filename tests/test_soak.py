"""kvmmu soak: scenarios, their requests, every policy over every kind of load, bytes verified."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kvmmu.commands import app
from kvmmu.errors import InvalidConfig
from kvmmu.replay import traces
from kvmmu.replay.chains import Chains
from kvmmu.replay.queue import CAUSES, Queue
from kvmmu.replay.tokens import Tokens
from kvmmu.soak import scenario as scenarios
from kvmmu.soak import together
from kvmmu.soak.concurrency import sustained
from kvmmu.soak.figures import MEASURES
from kvmmu.soak.policies import POLICIES, Chosen
from kvmmu.soak.report import rates, table
from kvmmu.soak.run import options_of, soak_one
from kvmmu.soak.sensitivity import sensitivity, variants
from kvmmu.soak.task import Task
from kvmmu.soak.together import Soaked, alone, soak
from kvmmu.soak.workload import requests
from rich.console import Console

from .ctrl_c import press

SECONDS = 40
MIX: dict[str, Any] = {
    "title": "a small mix",
    "hours": SECONDS / 3600,
    "warm_up": 2.0,
    "pool": {"num_blocks": 4096, "block_bytes": 65_536},
    "server": {"copy_rate": "1GiB", "timeout": 3.0, "prefix_caching": False},
    "kinds": [
        {
            "name": "long",
            "share": 0.3,
            "prompt": {"lognormal": {"mean": 9000, "sigma": 0.4, "low": 512, "high": 20_000}},
            "output": {"uniform": {"low": 1, "high": 200}},
        },
        {
            "name": "short",
            "share": 0.7,
            "prompt": {"lognormal": {"mean": 500, "sigma": 0.8, "low": 1, "high": 4000}},
            "output": {
                "mixture": [
                    {"share": 0.2, "lengths": {"fixed": 1}},
                    {"share": 0.8, "lengths": {"uniform": {"low": 2, "high": 300}}},
                ]
            },
        },
    ],
    "phases": [{"length": "20s", "rate": 6.0}, {"length": "5s", "rate": 0.5}],
}
AGENTS: dict[str, Any] = {
    **MIX,
    "title": "small agents",
    "server": {"copy_rate": "1GiB", "timeout": 30.0},
    "kinds": [
        {
            "name": "agent",
            "share": 1.0,
            "prefix": {"texts": 2, "tokens": {"fixed": 1024}},
            "prompt": {"uniform": {"low": 10, "high": 900}},
            "output": {"uniform": {"low": 1, "high": 60}},
            "turns": {
                "count": {"uniform": {"low": 1, "high": 5}},
                "pause_low": "100ms",
                "pause_high": "2s",
                "adds": {"uniform": {"low": 1, "high": 300}},
                "branches": 3,
                "branching": 0.3,
            },
        }
    ],
    "phases": [{"length": "10s", "rate": 1.5}],
}


def changed(base: dict[str, Any], **sections: Any) -> scenarios.Scenario:
    data = json.loads(json.dumps(base))
    for section, values in sections.items():
        if isinstance(values, dict):
            data[section] = {**data.get(section, {}), **values}
        else:
            data[section] = values
    return scenarios.of(data)


# -- scenarios -------------------------------------------------------------------------------------


def test_every_scenario_that_comes_with_kvmmu_loads_and_says_that_it_is_simulated() -> None:
    assert len(scenarios.names()) == 8
    for name in scenarios.names():
        assert "(simulated)" in scenarios.load(name).title


def test_a_scenario_that_was_printed_and_saved_is_the_same(tmp_path: Path) -> None:
    for name in scenarios.names():
        file = tmp_path / f"{name}.yaml"
        file.write_text(scenarios.text(name))
        assert scenarios.load(str(file)) == scenarios.load(name)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"hours": 0}, "hours"),
        ({"hours": float(10**9)}, "hours"),
        ({"warm_up": 10_000.0}, "warm_up"),
        ({"pool": {"num_blocks": 1}}, "pool.num_blocks"),
        ({"pool": {"num_blocks": True}}, "pool.num_blocks"),
        ({"pool": {"block_bytes": "many"}}, "pool.block_bytes"),
        ({"pool": {"blocks": 3}}, "num_blocks"),
        ({"server": {"step": 0.0}}, "server.step"),
        ({"server": {"step": "1ns"}}, "server.step: 1e-09 s"),
        ({"server": {"step": "2min"}}, "server.step: 120 s"),
        ({"server": {"timeout": 0.0}}, "server.timeout: 0 s"),
        ({"server": {"timeout": 1e8}}, "server.timeout: 1e+08 s"),
        ({"server": {"copy_rate": 0}}, "server.copy_rate"),
        ({"server": {"spare": 0.0}}, "server.spare"),
        ({"server": {"timeout": -1.0}}, "server.timeout"),
        ({"kinds": []}, "no requests"),
        ({"phases": []}, "no requests"),
        ({"phases": [{"length": 0.0, "rate": 1.0}]}, "phases[0].length"),
        ({"phases": [{"length": 1.0, "rate": 0.0}]}, "no rate above 0"),
        ({"phases": [{"length": 1.0, "rate": 1.0, "only": ["longs"]}]}, "longs"),
        ({"trace": {"speed": 2.0}}, "one of the two"),
    ],
)
def test_a_scenario_that_cannot_be_is_refused_by_its_key(
    sections: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidConfig, match=r"allowed|needed") as refused:
        changed(MIX, **sections)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ({"share": 0.2}, "shares add up to 0.9"),
        ({"name": "short"}, "each once"),
        ({"prompt": {}}, "none given"),
        ({"prompt": {"fixed": 1, "uniform": {"low": 1, "high": 2}}}, "fixed, uniform given"),
        ({"prompt": {"uniform": {"low": 3, "high": 2}}}, "at most high"),
        ({"prompt": {"lognormal": {"mean": 1, "sigma": 9, "low": 1, "high": 2}}}, "sigma"),
        ({"output": {"mixture": [{"share": 0.5, "lengths": {"fixed": 1}}]}}, "add up to 0.5"),
    ],
)
def test_a_kind_that_cannot_be_is_refused_by_its_key(kind: dict[str, Any], said: str) -> None:
    kinds = [{**MIX["kinds"][0], **kind}, MIX["kinds"][1]]
    with pytest.raises(InvalidConfig, match=r"allowed|needed") as refused:
        changed(MIX, kinds=kinds)
    assert said in str(refused.value)


def test_a_fault_in_a_file_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(scenarios.text("shift").replace("num_blocks: 90112", "num_block: 90112"))
    with pytest.raises(InvalidConfig, match="did you mean num_blocks") as refused:
        scenarios.load(str(file))
    line = 1 + file.read_text().splitlines().index("  num_block: 90112")
    assert f"mine.yaml:{line}:" in str(refused.value)


def test_an_unknown_scenario_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(InvalidConfig, match="article-128k"):
        scenarios.load("article-64k")


# -- requests --------------------------------------------------------------------------------------


def test_the_same_seed_makes_the_same_requests_and_another_does_not() -> None:
    scenario = scenarios.of(AGENTS)
    first, again, other = (requests(scenario, seed) for seed in (3, 3, 4))
    for column in ("arrival_s", "prompt_tokens", "output_tokens", "hash_ids", "parents"):
        assert np.array_equal(getattr(first, column), getattr(again, column))
    assert not np.array_equal(first.prompt_tokens[:5], other.prompt_tokens[:5])


def test_requests_keep_to_what_the_scenario_says() -> None:
    scenario = scenarios.load("article-128k")
    trace = requests(scenario, 1)
    long = trace.prompt_tokens > 16_384
    assert len(trace) == pytest.approx(6.76 * 12 * 3600, rel=0.01)
    assert 0.27 < long.mean() < 0.31  # of the 30 %, a few are shorter than the longest short one
    assert trace.prompt_tokens.max() == 131_072
    assert trace.prompt_tokens[long].mean() == pytest.approx(64_000, rel=0.05)
    assert trace.output_tokens.min() >= 1 and trace.output_tokens.max() <= 10_000
    assert (trace.arrival_s[1:] >= trace.arrival_s[:-1]).all()
    assert trace.arrival_s[-1] < 12 * 3600


def test_phases_follow_each_other_and_only_their_kinds_arrive() -> None:
    trace = requests(scenarios.load("shift"), 0)
    second = trace.arrival_s % 600 >= 300
    assert (trace.prompt_tokens[~second] <= 16_384).all()
    assert (trace.prompt_tokens[second] > 16_384).mean() > 0.2
    assert (~second).sum() / second.sum() == pytest.approx(55 / 4.5, rel=0.1)


def test_a_rate_that_is_scaled_changes_how_many_arrive() -> None:
    scenario = scenarios.of(MIX)
    assert len(requests(scenario, 0, rate=10.0)) > 5 * len(requests(scenario, 0))


def test_more_requests_than_fit_are_refused_before_they_are_made() -> None:
    with pytest.raises(InvalidConfig, match="allowed: at most"):
        requests(changed(MIX, hours=700.0, phases=[{"length": 3600.0, "rate": 10_000.0}]), 0)


@pytest.mark.parametrize(
    ("kind", "phases", "said"),
    [
        ({}, [{"length": "1ns", "rate": 1.0}], "stretches"),
        (
            {"turns": {"count": {"fixed": 1 << 24}, "branches": 16, "branching": 1.0}},
            [{"length": "10s", "rate": 1.5}],
            "with all turns",
        ),
        (
            {"prefix": {"texts": 100_000, "tokens": {"fixed": 1 << 24}}},
            [{"length": "10s", "rate": 1.5}],
            "the texts of agent",
        ),
        (
            {"prompt": {"fixed": 1 << 24}},
            [{"length": "10s", "rate": 200.0}],
            "the prompts",
        ),
    ],
)
def test_a_scenario_of_absurd_numbers_is_refused_before_it_takes_the_memory(
    kind: dict[str, Any], phases: list[dict[str, Any]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would run for ever, or draw more than any memory holds."""
    monkeypatch.setattr("kvmmu.soak.workload.MAX_REQUESTS", 100_000)  # (so that this is quick)
    agent = json.loads(json.dumps(AGENTS["kinds"][0]))
    agent["turns"] |= kind.get("turns", {})
    scenario = changed(AGENTS, kinds=[{**agent, **kind, "turns": agent["turns"]}], phases=phases)
    with pytest.raises(InvalidConfig, match="allowed: at most") as refused:
        requests(scenario, 0)
    assert said in str(refused.value)


def test_a_trace_is_wanted_or_it_is_not() -> None:
    trace = traces.Trace(
        "t", "sample", np.zeros(1), np.ones(1, np.int64), np.ones(1, np.int64),
        np.empty(0, np.uint64), np.zeros(2, np.int64),
    )  # fmt: skip
    with pytest.raises(InvalidConfig, match="--trace: none given"):
        requests(scenarios.load("mooncake"), 0)
    with pytest.raises(InvalidConfig, match="--trace: t given"):
        requests(scenarios.of(MIX), 0, trace=trace)


def test_a_continuation_begins_with_all_tokens_of_its_parent() -> None:
    trace = requests(scenarios.of(AGENTS), 1)
    tokens = Tokens(trace, 7)
    assert trace.parents is not None
    children = np.flatnonzero(trace.parents >= 0)
    assert len(children) > 20
    for child in children.tolist():
        parent = int(trace.parents[child])
        assert parent < child
        before, mine = tokens.request(parent), tokens.request(child)
        assert len(before) < trace.prompt_tokens[child]
        assert np.array_equal(mine[: len(before)], before)
    branches = np.bincount(trace.parents[children])
    assert set(np.unique(branches)) <= {0, 1, 3} and (branches == 3).any()


def test_shared_texts_are_shared_and_nothing_else_is() -> None:
    trace = requests(scenarios.of(AGENTS), 1)
    assert trace.parents is not None
    roots = np.flatnonzero(trace.parents < 0).tolist()
    heads = {tuple(trace.ids_of(root)[:2].tolist()) for root in roots}
    assert len(heads) == 2
    tails = [int(i) for root in roots for i in trace.ids_of(root)[2:]]
    assert len(set(tails)) == len(tails)


# -- the queue and chains --------------------------------------------------------------------------


def test_a_wait_is_counted_by_what_the_head_waited_for() -> None:
    queue = Queue(patience=3)
    queue.arrive(0, 10, 0)
    queue.pass_step("shape")
    queue.arrive(1, 10, 1)
    queue.pass_step("memory")
    queue.pass_step(None)
    assert queue.waited(queue.head) == {
        "prefill": 0,
        "batch": 0,
        "memory": 1,
        "shape": 1,
        "tables": 0,
    }
    queue.pop()
    assert queue.waited(queue.head)["shape"] == 0
    queue.again(7, 10, 3)
    assert queue.head.request == 7 and queue.head.reopened
    assert [left.request for left in queue.leave(4)] == []
    assert [left.request for left in queue.leave(5)] == [1]
    assert len(queue) == 1  # whoever ran before stays
    assert [left.request for left in queue.leave(10**9)] == []


def test_a_parked_sequence_is_closed_with_its_last_continuation() -> None:
    trace = requests(scenarios.of(AGENTS), 1)
    assert trace.parents is not None
    counts = np.bincount(trace.parents[trace.parents >= 0])
    parent = int(np.flatnonzero(counts == 3)[0])
    children = np.flatnonzero(trace.parents == parent).tolist()
    chains = Chains(trace, 0.03)
    assert chains.park(parent, 99, 50, 0) and chains.tokens == 50
    assert sorted(chains.due(10**6)) == children
    assert [chains.settle(child) for child in children] == [None, None, 99]
    assert len(chains) == chains.tokens == 0
    assert chains.park(parent, 98, 50, 0) and chains.drop() == 98 and chains.drop() is None
    assert [chains.settle(child) for child in children] == [None, None, None]


# -- policies over loads ---------------------------------------------------------------------------


CROWDED = changed(
    MIX,
    pool={"num_blocks": 2048},
    server={"timeout": 30.0},
    phases=[{"length": 100.0, "rate": 4.0}],
)


def run(scenario: scenarios.Scenario, policy: str, **asked: Any) -> dict[str, Any]:
    found = soak_one(Task(scenario, policy, seed=5, verify=True, **asked))
    assert found["mismatches"] == 0 and found["verified_tokens"] > 1000
    assert {measure.name for measure in MEASURES} <= set(found)
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_a_mix_and_every_byte_is_right(policy: str) -> None:
    found = run(scenarios.of(MIX), policy)
    assert found["requests"] > 100 and found["finished"] > 30 and found["steps"] > 1000
    strict = POLICIES[policy].options.get("require") == "huge"
    paged = POLICIES[policy].options.get("reserve") is None
    if paged and not strict:
        assert found["shape_failures"] == 0
    if policy.startswith("contiguous"):
        assert found["runs_all"] == 1.0
    if policy == "compaction":
        assert found["moved_blocks"] > 0
        assert found["huge_cover"] > run(scenarios.of(MIX), "fallback")["huge_cover"]
    if not POLICIES[policy].options.get("compaction", True):
        assert found["moved_blocks"] == 0
    if POLICIES[policy].options.get("page_orders") == (0,):
        assert found["huge_cover"] == 0


def test_strict_pages_wait_for_a_shape_where_paging_does_not() -> None:
    """A small pool, thinned out by shorts: a complete region is not to be had although enough
    blocks are."""
    fifo, plain, moving = (
        run(CROWDED, policy) for policy in ("strict-fifo", "plain", "strict-compaction")
    )
    assert fifo["shape_failures"] > 0 and fifo["waits_s"]["shape"] > 50
    assert plain["shape_failures"] == 0 == plain["waits_s"]["shape"]
    assert moving["waits_s"]["shape"] < fifo["waits_s"]["shape"] / 4
    assert fifo["finished"] < plain["finished"]


def test_a_restart_empties_the_pool_and_everybody_runs_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {**POLICIES["strict-fifo"].options, "restart_after_s": 1.0, "restart_takes_s": 2.0}
    monkeypatch.setitem(POLICIES, "restart", Chosen("restart", "", options))
    found = run(CROWDED, "restart")
    assert found["restarts"] == 1 and found["finished"] > 50


def test_reservations_hold_fewer_tokens_the_more_they_guess() -> None:
    scenario = changed(MIX, phases=[{"length": 100.0, "rate": 12.0}])
    held = {
        policy: run(scenario, policy)["holds_tokens_full"]
        for policy in ("contiguous-max", "contiguous-pow2", "contiguous-oracle", "plain")
    }
    assert held["contiguous-max"] < held["contiguous-pow2"] <= held["contiguous-oracle"] + 0.05
    assert held["contiguous-oracle"] < held["plain"] and held["plain"] > 0.9


@pytest.mark.parametrize("policy", ["plain", "strict-fifo", "strict-compaction", "compaction"])
def test_agents_park_fork_and_branch_and_every_byte_is_right(policy: str) -> None:
    found = run(scenarios.of(AGENTS), policy)
    assert found["continued"] > 40 and found["dropped"] == 0
    assert found["hit_rate"] > 0.5


def test_parked_sequences_make_room_when_memory_is_needed() -> None:
    scenario = changed(AGENTS, pool={"num_blocks": 400}, phases=[{"length": 100.0, "rate": 4.0}])
    found = run(scenario, "compaction")
    assert found["dropped"] > 5 and found["finished"] > 50


@pytest.mark.parametrize("policy", ["plain", "fallback", "compaction", "strict"])
def test_memory_is_given_back_when_the_load_falls_and_taken_when_it_returns(policy: str) -> None:
    scenario = changed(
        MIX,
        server={"spare": 0.1},
        pool={"granule": 16},
        phases=[{"length": 10.0, "rate": 5.0}, {"length": 10.0, "rate": 0.1}],
    )
    found = run(scenario, policy)
    assert 0 < found["returned"] <= 1 and found["returnable_low"] is not None
    still = run(changed(scenario.model_dump(mode="json"), server={"spare": None}), policy)
    assert found["finished"] >= 0.8 * still["finished"]


def test_runs_of_a_128k_are_of_so_many_tokens_whatever_a_block_holds() -> None:
    """Each lies in one run, so that there are 131,072 / 112,000 of them."""
    length = {"prompt": {"fixed": 111_990}, "output": {"fixed": 10}}
    for block_size in (16, 64):
        scenario = changed(
            MIX,
            pool={"num_blocks": 458_752 // block_size, "block_size": block_size},
            kinds=[{"name": "long", "share": 1.0, **length}],
            phases=[{"length": "20s", "rate": 0.5}],
        )
        found = soak_one(Task(scenario, "contiguous-oracle", hours=15 / 3600))
        assert found["runs_long"] == pytest.approx(131_072 / 112_000, rel=0.001)


def test_the_first_tokens_lie_in_one_run_where_the_scenario_asks_for_it() -> None:
    scenario = changed(MIX, server={"contiguous": 2048})
    assert options_of(Task(scenario, "compaction"), POLICIES["compaction"]).contiguous == 2048
    assert options_of(Task(scenario, "plain"), POLICIES["plain"]).contiguous == 0
    found = run(scenario, "compaction")
    assert found["finished"] > 50


def test_nothing_of_the_warm_up_is_counted() -> None:
    whole = run(changed(MIX, warm_up=0.0), "compaction")
    half = run(changed(MIX, warm_up=9.0), "compaction")
    assert half["requests"] < 0.9 * whole["requests"]
    assert half["steps"] == pytest.approx(whole["steps"] - 300, abs=40)
    assert half["moved_blocks"] < whole["moved_blocks"]


def test_a_run_is_the_same_from_the_same_seed_but_for_times() -> None:
    first, again = (soak_one(Task(scenarios.of(MIX), "compaction", seed=2)) for _ in range(2))
    for name in ("wall_s", "manager_share"):
        del first[name], again[name]
    assert first == again


def test_contents_change_nothing_but_that_they_are_verified() -> None:
    with_bytes = run(scenarios.of(MIX), "compaction")
    without = soak_one(Task(scenarios.of(MIX), "compaction", seed=5))
    timed = ("wall_s", "manager_share", "mismatches", "verified_tokens")
    assert {k: v for k, v in with_bytes.items() if k not in timed} == {
        k: v for k, v in without.items() if k not in timed
    }


# -- many runs -------------------------------------------------------------------------------------


def test_runs_in_processes_are_what_they_are_alone() -> None:
    tasks = [Task(scenarios.of(MIX), policy, seed=1) for policy in ("plain", "compaction")]
    told: list[list[float]] = []

    def watch(simulated_s: Any) -> bool:
        told.append(list(simulated_s))
        return False

    found = soak(tasks, processes=2, watch=watch)
    alone = [soak_one(task) for task in tasks]
    for one, other in zip(found, alone, strict=True):
        figures = one.figures
        assert figures["policy"] == other["policy"]
        assert figures["moved_blocks"] == other["moved_blocks"]
    assert told


def test_a_fault_in_one_process_is_raised_here() -> None:
    fine = Task(scenarios.of(MIX), "plain")
    wrong = replace(fine, scenario=scenarios.load("mooncake"))
    with pytest.raises(InvalidConfig, match="--trace: none given"):
        soak([fine, wrong], processes=2)


def test_the_sustained_rate_is_an_interval_and_paging_sustains_more_than_reservations() -> None:
    scenario = changed(MIX, phases=[{"length": 100.0, "rate": 4.0}])
    tasks = [Task(scenario, policy, seed=1) for policy in ("plain", "contiguous-max")]
    plain, contiguous = sustained(tasks, probes=4)
    for one in (plain, contiguous):
        assert one.fails is not None and one.holds < one.fails and len(one.probes) == 4
        for rate, share in one.probes:
            assert (share < 0.005) == (rate <= one.holds)
    assert plain.concurrency > 1.5 * contiguous.concurrency


def test_a_rate_that_was_never_tried_is_not_told_as_one_that_fails() -> None:
    idle = changed(MIX, hours=10 / 3600, phases=[{"length": 100.0, "rate": 0.5}])
    (found,) = sustained([Task(idle, "plain", seed=1)], probes=2)
    assert [rate for rate, _ in found.probes] == [1.0, 1.25]
    assert (found.holds, found.fails) == (1.25, None)
    (row,) = [line for line in printed(rates(idle, [found])) if "plain" in line]
    assert row.replace("│", " ").split()[:3] == ["plain", "1.250", "-"]


def test_a_run_under_the_guarantee_says_how_it_stood() -> None:
    scenario = scenarios.load("shift")
    plain = soak_one(Task(scenario, "compaction", seed=1, hours=0.02))
    kept = soak_one(Task(scenario, "kept", seed=1, hours=0.02, settings={"guarantee": 0}))
    names = ("excess_mean", "excess_worst", "owed_mean", "owed_p99", "guarantee_broken")
    assert [plain[name] for name in names] == [None] * 5
    assert kept["guarantee_broken"] == 0
    assert 0 <= kept["excess_mean"] <= kept["excess_worst"]
    assert 0 <= kept["owed_mean"] <= kept["owed_p99"]
    assert kept["moves_per_free"] == kept["moved_blocks"] / kept["freed_blocks"] <= 1


def test_each_variant_changes_one_thing() -> None:
    first = Task(scenarios.load("article-128k"), "plain")
    planned = variants(first)
    assert {one.what for one in planned} == {
        "load", "long requests", "step", "prefill", "budget", "trigger",
    }  # fmt: skip
    assert len({(one.what, one.value, one.task.policy) for one in planned}) == len(planned)
    for one in planned:
        assert one.task.hours == 2.0
        if one.what == "long requests":
            means = 64 * float(one.value[:-1]) / 100 + 2 * (1 - float(one.value[:-1]) / 100)
            assert one.task.rate * means == pytest.approx(0.3 * 64 + 0.7 * 2)
        elif one.what != "load":
            assert one.task.rate == 1.0


# -- tables ----------------------------------------------------------------------------------------

WORST = {
    "running_mean": 255.9, "pool_used": 1.0, "timeouts_long": 1.0, "huge_cover": 1.0,
    "free_windows": 1.0, "runs_long": 8192.0, "runs_all": 131.1, "moves_per_step": 32.0,
}  # fmt: skip


def printed(what: Any, width: int = 80) -> list[str]:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(what)
    lines: list[str] = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return lines


def told(policy: str, **figures: Any) -> dict[str, Any]:
    everything = {measure.name: 1.0 for measure in MEASURES}
    whole = {"policy": policy, "seed": 7, "simulated_s": 18.0, "interrupted": False}
    return {**everything, **whole, **figures}


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("policies", [1, 2, 5, 11])
def test_policies_that_do_not_fit_stand_in_further_tables(policies: int, width: int) -> None:
    """Nothing is folded and nothing is cut: each head and each figure is there as it is."""
    names = list(POLICIES)[:policies]
    results = [told(name, **WORST, requests=1e6 + number) for number, name in enumerate(names)]
    lines = printed(table(scenarios.of(MIX), results, hours=0.005), width)
    assert "…" not in "".join(lines)
    heads = [word for line in lines if line.startswith("┃") for word in line.split("┃")]
    assert [head.strip() for head in heads if head.strip()] == names
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    labels = [row[0] for row in cells]
    asked = [measure.label.strip() for measure in MEASURES]
    assert labels == asked * (len(labels) // len(asked))
    asked_of = [f"{1e6 + number:,.0f}" for number in range(policies)]
    assert [cell for row in cells if row[0] == "requests" for cell in row[1:]] == asked_of
    if width == 200 and policies < 11:
        assert labels == asked, "one table where there is room"


def test_a_page_of_80_holds_all_that_is_told_of_the_sensitivity() -> None:
    planned = variants(Task(scenarios.load("article-128k"), "plain", hours=0.003))
    lines = printed(sensitivity(planned, [told(one.task.policy, **WORST) for one in planned]))
    figures = ["255.9", "100.0", "100.00", "1.000", "1.000", "8192.0", "131.1", "32.00"]
    rows = [line for line in lines if line.split()[-8:] == figures]
    assert len(rows) == len(planned)
    for one, row in zip(planned, rows, strict=True):
        assert row.startswith(f"{one.what} {one.value} ") and f" {one.task.policy} " in row


@pytest.mark.parametrize("hours", [0.003, 0.005, 0.25, 12.0])
@pytest.mark.parametrize("interrupted", [False, True])
def test_titles_say_the_time_as_asked_and_whether_it_was_reached(
    hours: float, interrupted: bool
) -> None:
    result = told("plain", simulated_s=9.0, interrupted=interrupted)
    scenario = scenarios.of(MIX)
    planned = variants(Task(scenario, "plain", hours=hours))
    for lines in (
        printed(table(scenario, [result], hours=hours), 160),
        printed(sensitivity(planned, [result] * len(planned)), 160),
    ):
        text = " ".join(" ".join(lines[:4]).split("┏")[0].split())
        assert f" {hours:g} h" in text
        assert ("(interrupted)" in text) == interrupted
    lines = printed(table(scenario, [result], hours=hours))
    assert any("simulated h" in line and "0.0025" in line for line in lines) == interrupted


# -- the command -----------------------------------------------------------------------------------

COMMAND = [sys.executable, "-m", "kvmmu.cli", "soak"]


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "160", "TERM": "dumb"},
    )
    assert "Traceback" not in done.stderr
    return done


def test_the_command_prints_a_table_and_writes_every_measure(tmp_path: Path) -> None:
    file, out = tmp_path / "mix.json", tmp_path / "out.json"
    file.write_text(json.dumps(MIX))
    done = command(file, "--policy", "plain", "--policy", "compaction", "--json", out)
    assert done.returncode == 0, done.stderr
    for word in ("a small mix", "plain", "compaction", "huge cover", "simulated"):
        assert word in done.stdout
    figures = json.loads(out.read_text())
    assert [one["policy"] for one in figures["policies"]] == ["plain", "compaction"]
    for one in figures["policies"]:
        assert {measure.name for measure in MEASURES} <= set(one)
    assert figures["scenario"]["title"] == "a small mix"


@pytest.mark.parametrize("mismatches", [0, 3])
def test_a_difference_that_verify_finds_is_exit_status_1(
    mismatches: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "mix.json"
    file.write_text(json.dumps(MIX))

    def wrong(task: Task, watch: Any, collector: Any) -> Soaked:
        soaked = alone(task, watch, collector)
        assert soaked.figures["mismatches"] == 0
        return replace(soaked, figures={**soaked.figures, "mismatches": mismatches})

    monkeypatch.setattr("kvmmu.commands.soak.alone", wrong)
    with pytest.raises(SystemExit) as left:
        app(["soak", str(file), "--policy", "compaction", "--verify"])
    said = capsys.readouterr()
    assert left.value.code == (1 if mismatches else 0)
    assert ("3 mismatches" in said.err) == bool(mismatches)
    assert ("positions, no mismatch" in said.out) == (not mismatches)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "SCENARIO: none given"),
        (("nothing",), "article-128k"),
        (("article-128k", "--policy", "best"), "--policy: best given"),
        (("article-128k", "--hours", "0"), "--hours"),
        (("article-128k", "--hours", "nan"), "--hours"),
        (("article-128k", "--rate", "-1"), "--rate"),
        (("article-128k", "--processes", "0"), "--processes"),
        (("article-128k", "--json", "/nowhere/x.json"), "--json"),
        (("article-128k", "--concurrency", "--sensitivity"), "one of the two"),
        (
            ("article-128k", "--sensitivity", "--policy", "compaction"),
            "--policy: compaction given with --sensitivity (of plain, fallback, compaction), "
            "allowed: without it",
        ),
        (("drop", "--sensitivity", "--config", "x"), "--config: x given with --sensitivity"),
        (("drop", "--sensitivity", "--html", "x"), "--html: x given with --sensitivity"),
        (("drop", "--sensitivity", "--metrics-port", "1"), "--metrics-port: 1 given with --sens"),
        (("drop", "--sensitivity", "--probes", "3"), "--probes: 3 given without --concurrency"),
        (("drop", "--concurrency", "--html", "x"), "--html: x given with --concurrency"),
        (("drop", "--concurrency", "--metrics-port", "1"), "--metrics-port: 1 given with --conc"),
        (("drop", "--concurrency", "--rate", "2"), "--rate: 2 given with --concurrency"),
        (("drop", "--probes", "3"), "--probes: 3 given without --concurrency, allowed: with it"),
        (("mooncake",), "--trace: none given"),
        (("azure", "--trace", "/nowhere"), "/nowhere"),
        (("missing.yaml",), "missing.yaml"),
    ],
)
def test_bad_input_exits_2_before_anything_runs(arguments: tuple[str, ...], said: str) -> None:
    done = command(*arguments)
    assert done.returncode == 2 and said in done.stderr and not done.stdout


def test_figures_are_kept_when_the_table_cannot_be_printed(tmp_path: Path) -> None:
    scenario, out = tmp_path / "mine.yaml", tmp_path / "out.json"
    scenario.write_text(json.dumps({**MIX, "hours": 0.002, "warm_up": 0.0}))
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, str(scenario), "--policy", "plain", "--json", str(out)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    assert done.returncode == 2 and "standard output cannot be written" in done.stderr
    assert json.loads(out.read_text())["policies"][0]["policy"] == "plain"


def test_a_pool_that_no_machine_has_is_refused_in_the_words_of_the_scenario(tmp_path: Path) -> None:
    """Not in those of replay's options, which soak has not."""
    scenario = tmp_path / "mine.yaml"
    scenario.write_text(json.dumps({**MIX, "pool": {**MIX["pool"], "num_blocks": 2**31 - 2}}))
    done = command(str(scenario), "--policy", "plain")
    assert done.returncode == 2 and "this machine has" in done.stderr, done.stderr
    assert "--" not in done.stderr


def test_definitions_and_scenarios_are_printed() -> None:
    done = command("--definitions")
    assert done.returncode == 0
    for policy in POLICIES:
        assert policy in done.stdout
    assert command("drop", "--show").stdout.rstrip("\n") == scenarios.text("drop").rstrip("\n")


def test_ctrl_c_prints_what_there_is_and_exits_130(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    running = subprocess.Popen(
        [*COMMAND, "article-128k", "--policy", "plain", "--policy", "fallback", "--json", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    time.sleep(8)
    running.send_signal(signal.SIGINT)
    said, complained = running.communicate(timeout=120)
    assert running.returncode == 130, complained
    assert "Traceback" not in complained and "huge cover" in said
    assert json.loads(out.read_text())["interrupted"] is True


def test_ctrl_c_while_the_processes_begin_exits_130_too() -> None:
    """A terminal sends it to all of them; those that were importing died of it."""
    status, complained = press(
        [*COMMAND, "shift", "--hours", "0.1", "--policy", "plain", "--policy", "strict",
         "--processes", "2"],
        children=3,  # two, and the one that tracks their memory
    )  # fmt: skip
    assert status == 130, complained
    assert "Traceback" not in complained


def test_a_run_that_was_stopped_before_it_began_draws_no_hours_of_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = [0.0]
    monkeypatch.setattr(together, "_told", told, raising=False)
    monkeypatch.setattr(together, "_stopping", SimpleNamespace(value=1), raising=False)
    figures = together._one(0, Task(scenarios.load("article-128k"), "plain", hours=12.0)).figures
    assert figures["interrupted"]
    assert figures["simulated_s"] <= 36
    assert figures["requests"] < 1000
    assert told == [12 * 3600.0]


def test_no_process_is_left_when_the_first_is_killed() -> None:
    running = subprocess.Popen(
        [*COMMAND, "shift", "--policy", "plain", "--policy", "strict", "--processes", "2"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    time.sleep(8)
    running.terminate()
    running.communicate(timeout=60)  # returns when nobody has the pipe open any more
    assert running.returncode == -signal.SIGTERM


def test_waits_are_of_known_causes() -> None:
    assert set(run(scenarios.of(MIX), "plain")["waits_s"]) == set(CAUSES)


def test_a_file_of_settings_is_one_more_policy(tmp_path: Path) -> None:
    file, settings, out = tmp_path / "mix.json", tmp_path / "mine.yaml", tmp_path / "out.json"
    file.write_text(json.dumps(MIX))
    settings.write_text("compaction: {auto_compact: false}\npages: {page_orders: [0]}\n")
    done = command(file, "--policy", "compaction", "--config", settings, "--json", out)
    assert done.returncode == 0, done.stderr
    compaction, mine = json.loads(out.read_text())["policies"]
    assert (compaction["policy"], mine["policy"]) == ("compaction", "config")
    assert mine["moved_blocks"] == 0 == mine["huge_cover"] and compaction["huge_cover"] > 0
    settings.write_text("compaction: {budget: 3}\n")
    done = command(file, "--config", settings)
    assert done.returncode == 2 and "mine.yaml:1:" in done.stderr


def test_metrics_are_served_of_one_policy_alone(tmp_path: Path) -> None:
    file = tmp_path / "mix.json"
    file.write_text(json.dumps(MIX))
    done = command(file, "--policy", "compaction", "--metrics-port", "0")
    assert done.returncode == 0 and "metrics: http://127.0.0.1:" in done.stderr
    done = command(file, "--metrics-port", "0")
    assert done.returncode == 2 and "with one policy" in done.stderr
