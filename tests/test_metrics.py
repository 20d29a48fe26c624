"""Metrics: what a scrape reads, what it must not disturb, and when the alarms go off."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from kvmmu import MMU, CPUMover, InvalidConfig, OutOfBlocks, Storage, compact, metrics
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def ints(values: Any) -> npt.NDArray[np.int32]:
    return np.array(values, dtype=np.int32)


def scraped(registry: CollectorRegistry) -> Samples:
    text = generate_latest(registry).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset({"cache": "kv", **labels}.items())]


class World:
    """A manager that is served, and scraped."""

    def __init__(self, num_blocks: int = 64, **options: Any) -> None:
        self.mmu = MMU(num_blocks, 4, **options)
        self.registry = CollectorRegistry()
        self.collector = metrics.Collector(self.registry)
        self.watched = self.collector.add(
            self.mmu, block_bytes=1000, time_every=1, measure_every_s=0
        )
        self.tables = self.mmu.register_tables(
            np.empty((8, 64), np.int32),
            np.empty(8, np.int32),
            np.empty(256, np.int64),
            np.empty(9, np.int32),
        )

    def serve(self, tokens: Any) -> int:
        """Opens a prompt and writes all of it."""
        mmu = self.mmu
        sequence = mmu.open(ints(tokens))
        step = mmu.begin_step()
        lens = ints([len(tokens) - mmu.info(sequence).num_scheduled])
        mmu.prepare(step, np.array([sequence]), self.tables, query_lens=lens)
        mmu.written(step)
        mmu.end_step(step)
        return sequence

    def scrape(self) -> Samples:
        return scraped(self.registry)


def test_every_exported_figure_equals_what_the_manager_says() -> None:
    world = World(2048, placement="scatter", guarantee=None, seed=3)
    mmu = world.mmu
    prompts = [list(range(start, start + 40)) for start in (0, 0, 1000, 2000)]
    ids = [world.serve(prompt) for prompt in prompts]
    child = mmu.fork(ids[2])
    mmu.append(child, ints([7]))
    mmu.close(ids[3])
    mmu.evict(2)
    storage = Storage.from_numpy([np.zeros((2049, 8), np.uint8)])
    assert compact(mmu, CPUMover(storage)) > 0
    found = world.scrape()
    states, stats, measure = mmu.states(), mmu.stats(), mmu.measure()
    assert sum(value(found, "kvmmu_blocks", state=s) for s in metrics._STATES) == 2048
    for state in metrics._STATES:
        assert value(found, "kvmmu_blocks", state=state) == states[state]
    assert value(found, "kvmmu_available_blocks") == states["available"]
    for over, ratio in (("empty", measure.ratio_empty), ("available", measure.ratio_available)):
        assert value(found, "kvmmu_fragmentation_ratio", over=over) == ratio
        assert value(found, "kvmmu_fragmentation_index", over=over) == 1 - ratio
    assert value(found, "kvmmu_free_windows") == measure.free_windows
    possible = measure.available // 512
    assert value(found, "kvmmu_free_windows_ratio") == measure.free_windows / possible
    for counter, (name, _) in metrics._COUNTERS.items():
        assert value(found, f"kvmmu_{name}_total") == stats[counter], counter
    assert stats["prefix_hit_blocks"] > 0
    assert stats["evicted_blocks"] == 2
    assert stats["moves_committed"] > 0
    assert value(found, "kvmmu_moves_total", outcome="committed") == stats["moves_committed"]
    assert value(found, "kvmmu_moved_bytes_total") == stats["moves_committed"] * 1000
    assert value(found, "kvmmu_sequences") == measure.sequences == 4
    assert value(found, "kvmmu_sequence_runs") == measure.runs
    assert value(found, "kvmmu_unused_slots") == measure.unused_slots
    histogram = measure.run_histogram.tolist()
    assert value(found, "kvmmu_free_run_blocks_bucket", le="+Inf") == sum(histogram)
    for k in range(12):
        bucket = value(found, "kvmmu_free_run_blocks_bucket", le=str(float(2 ** (k + 1) - 1)))
        assert bucket == sum(histogram[: k + 1])
    assert value(found, "kvmmu_free_run_blocks_gsum") == measure.available
    assert value(found, "kvmmu_up") == 1


def test_every_counter_of_the_manager_is_exported_or_left_out_on_purpose() -> None:
    exported = {*metrics._COUNTERS, *metrics._OUTCOMES.values()}
    left_out = {"left_cached", "grown_in_place", "released_before"}
    assert set(MMU(8, 4).stats()) == exported | left_out


def test_passes_that_their_limit_stopped_are_counted() -> None:
    world = World(64, placement="scatter", page_orders=(0,), hold_blocks=0)
    ids = [world.serve(range(100 * i, 100 * i + 4)) for i in range(32)]
    assert ids
    mmu = world.mmu
    for most, early in ((1, 1), (64, 1)):
        plan = mmu.plan_free_run(24, max_blocks=most)
        assert plan.complete is (most == 64)
        mmu.abort(mmu.begin(plan))
        found = world.scrape()
        assert value(found, "kvmmu_compaction_passes_stopped_early_total") == early
    assert value(found, "kvmmu_compaction_passes_total") == 2
    assert value(found, "kvmmu_moves_total", outcome="aborted") > 0


def test_what_the_engine_tells_is_counted_by_cause() -> None:
    world = World()
    world.watched.preempted()
    world.watched.preempted(2)
    world.watched.swapped(7)
    for seconds in (0, 0.01, 0.02, 31, 1e9):
        world.watched.waited("shape", seconds)
    found = world.scrape()
    assert value(found, "kvmmu_preemptions_total") == 3
    assert value(found, "kvmmu_swapped_blocks_total") == 7
    counts = [
        value(found, "kvmmu_wait_seconds_bucket", cause="shape", le=le)
        for le in ("0.01", "0.03", "30.0", "100.0", "+Inf")
    ]
    assert counts == [2, 3, 3, 4, 5]
    assert value(found, "kvmmu_wait_seconds_sum", cause="shape") == 1e9 + 31.03
    assert value(found, "kvmmu_wait_seconds_count", cause="memory") == 0


@pytest.mark.parametrize(
    ("call", "allowed"),
    [
        (lambda w: w.watched.waited("weather", 1), "memory"),
        (lambda w: w.watched.waited("shape", -1), "from 0"),
        (lambda w: w.watched.waited("shape", float("nan")), "from 0"),
        (lambda w: w.watched.waited("shape", True), "from 0"),
        (lambda w: w.watched.preempted(-1), "from 0"),
        (lambda w: w.watched.swapped(1.5), "from 0"),
        (lambda w: w.collector.add(w.mmu), r"'kv': allowed is one that is not taken: \['kv'\]"),
        (lambda w: w.collector.add(w.mmu, ""), "not empty"),
        (lambda w: w.collector.add(w.mmu, "\ud800"), "name"),
        (lambda w: w.collector.add(w.mmu, "x", sharing_expected="x"), "sharing_expected"),
        (lambda w: w.collector.add(w.mmu, "x", sharing_expected=None), "sharing_expected"),
        (lambda w: w.collector.add(object(), "x"), "an MMU or a KVCache"),
        (lambda w: w.collector.add(w.mmu, "x", block_bytes=0), "from 1"),
        (lambda w: w.collector.add(w.mmu, "x", time_every=-1), "from 0"),
        (lambda w: w.collector.add(w.mmu, "x", measure_every_s=-1), "0 or more"),
        (lambda w: w.collector.remove("x"), "kv"),
        (lambda w: metrics.serve(65536, w.registry), "65535"),
        (lambda w: metrics.serve(True, w.registry), "65535"),
    ],
)
def test_what_is_not_meant_is_refused_and_says_what_is_allowed(call: Any, allowed: str) -> None:
    world = World()
    before = world.scrape()
    with pytest.raises(InvalidConfig, match=allowed):
        call(world)
    after = world.scrape()
    assert after.keys() == before.keys()
    told = "kvmmu_wait_seconds_count", "kvmmu_preemptions_total", "kvmmu_swapped_blocks_total"
    assert all(v == 0 for (name, _), v in after.items() if name in told)


def test_several_managers_share_a_collector_and_one_out_of_order_hides_no_other() -> None:
    world = World()
    other = MMU(16, 4)
    world.collector.add(other, "other")
    found = world.scrape()
    both = {labels for name, labels in found if name == "kvmmu_pool_blocks"}
    assert both == {frozenset({("cache", "kv")}), frozenset({("cache", "other")})}
    with pytest.raises(Exception, match="on purpose"):
        other._panic_for_test()
    found = world.scrape()
    assert found["kvmmu_up", frozenset({("cache", "other")})] == 0
    assert ("kvmmu_pool_blocks", frozenset({("cache", "other")})) not in found
    assert value(found, "kvmmu_up") == 1
    assert value(found, "kvmmu_pool_blocks") == 64
    world.collector.remove("other")
    assert ("kvmmu_up", frozenset({("cache", "other")})) not in world.scrape()


def test_both_text_formats_can_be_written_and_names_are_not_taken_twice() -> None:
    world = World()
    world.serve(range(30))
    text = cast(Any, openmetrics).generate_latest(world.registry).decode()
    assert text.endswith("# EOF\n")
    assert "kvmmu_free_run_blocks_gcount" in text
    with pytest.raises(ValueError, match="Duplicated"):
        metrics.Collector(world.registry)
    names = [family.name for family in world.collector.describe()]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"kvmmu_[a-z0-9_]+", name) for name in names)


def test_the_guarantee_is_exported_where_it_is_kept() -> None:
    assert "kvmmu_guarantee_debt_moves" not in {name for name, _ in World().scrape()}
    world = World(2048, guarantee=0)
    found = world.scrape()
    held = world.mmu.guarantee()
    assert value(found, "kvmmu_guarantee_debt_moves") == held["owed"]
    assert value(found, "kvmmu_guarantee_windows_allowed") == held["allowed"]


def test_operations_are_timed_one_in_so_many_and_no_pattern_of_calls_hides_one() -> None:
    mmu = MMU(64, 4)
    assert mmu.operation_times() == {}
    mmu.begin_step()
    assert mmu.operation_times() == {}
    mmu.time_operations(64)
    rounds = 64 * 200
    for _ in range(rounds):  # a cycle of four calls, which divides 64
        mmu.end_step(mmu.begin_step())
        mmu.match(ints([1, 2]))
        mmu.evict(0)
    times = mmu.operation_times()
    assert set(times) == {"begin_step", "end_step", "match", "evict"}
    for counts, seconds in times.values():
        assert 100 <= sum(counts) <= 400  # 200 are expected
        assert len(counts) == len(mmu.operation_time_bounds()) + 1
        assert 0 < seconds < 60
    mmu.time_operations(0)
    mmu.evict(0)
    assert mmu.operation_times() == times
    mmu.time_operations(1)
    with pytest.raises(OutOfBlocks):  # a call that fails took its time as well
        for start in (0, 1000):
            mmu.open(ints(range(start, start + 64 * 4)))
    assert sum(mmu.operation_times()["open"][0]) == 2


def test_measuring_is_not_repeated_before_its_time() -> None:
    world = World()
    world.collector.remove("kv")
    watched = world.collector.add(world.mmu, measure_every_s=3600)
    first = value(world.scrape(), "kvmmu_sequences")
    world.serve(range(9))
    found = world.scrape()
    assert value(found, "kvmmu_sequences") == first == 0
    assert value(found, "kvmmu_sequences_opened_total") == 1  # counters are always those of now
    assert value(found, "kvmmu_measure_age_seconds") > 0
    watched._measure_every_s = 0.0
    assert value(world.scrape(), "kvmmu_sequences") == 1


def test_scrapes_from_threads_while_the_manager_works_disturb_neither() -> None:
    world = World(512)
    failed: list[BaseException] = []
    stop = threading.Event()

    def scrape() -> None:
        try:
            while not stop.is_set():
                found = world.scrape()
                assert value(found, "kvmmu_up") == 1
                world.watched.waited("memory", 0.1)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=scrape) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(300):
        world.mmu.close(world.serve(range(i, i + 33)))
    stop.set()
    for thread in threads:
        thread.join()
    assert not failed, failed[0]
    world.mmu.validate()
    found = world.scrape()
    waits = value(found, "kvmmu_wait_seconds_count", cause="memory")
    assert waits == round(value(found, "kvmmu_wait_seconds_sum", cause="memory") * 10)


def test_a_cache_brings_the_bytes_of_its_blocks() -> None:
    torch = pytest.importorskip("torch")
    from kvmmu import KVCache

    cache = KVCache(2, 1, 8, torch.float32, 32, block_size=4)
    registry = CollectorRegistry()
    metrics.Collector(registry).add(cache)
    found = scraped(registry)
    assert value(found, "kvmmu_block_bytes") == 2 * 2 * 4 * 8 * 4
    assert value(found, "kvmmu_given_back_bytes") == 0


def test_a_forked_child_that_scrapes_is_told_and_does_not_hang() -> None:
    code = """
import os, sys, warnings
warnings.simplefilter("ignore")
from prometheus_client import CollectorRegistry, generate_latest
import kvmmu, kvmmu.metrics
registry = CollectorRegistry()
kvmmu.metrics.Collector(registry).add(kvmmu.MMU(8, 4))
child = os.fork()
if not child:
    found = generate_latest(registry).decode()
    os._exit(0 if 'kvmmu_up{cache="kv"} 0.0' in found else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert done.returncode == 0


# -- the command ---------------------------------------------------------------------------------


def replay(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kvmmu.cli", "replay", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def served_at(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    line = process.stderr.readline()
    found = re.fullmatch(r"kvmmu: metrics: (http://127\.0\.0\.1:\d+/metrics)\n", line)
    assert found, line
    return found[1]


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def test_a_port_that_is_taken_or_out_of_range_is_said_before_the_run() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for given, said in ((port, "in use"), (70_000, "allowed is 0"), (-1, "allowed is 0")):
            process = replay("--sample", "--metrics-port", str(given))
            out, errors = process.communicate(timeout=60)
            assert process.returncode == 2
            assert not out
            assert "--metrics-port" in errors
            assert said in errors


@pytest.mark.parametrize("address", ["\ud800", "x" * 70 + ".example", "256.0.0.1"])
def test_an_address_that_is_none_is_named(address: str) -> None:
    with pytest.raises(InvalidConfig, match="cannot be served on"):
        metrics.serve(0, CollectorRegistry(), address=address)


@pytest.fixture
def long_replay() -> Iterator[str]:
    """The address of a replay that goes on for longer than a test."""
    process = replay("--sample", "article", "--minutes", "600", "--metrics-port", "0", "--quiet")
    try:
        yield served_at(process)
    finally:
        process.kill()
        process.communicate()


def test_a_running_replay_can_be_scraped(long_replay: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = {
            (s.name, frozenset(s.labels.items())): s.value
            for family in text_string_to_metric_families(get(long_replay))
            for s in family.samples
        }
        opened = found.get(("kvmmu_sequences_opened_total", frozenset({("cache", "replay")})), 0)
        if opened > 100:
            break
        time.sleep(0.1)
    assert opened > 100
    timed = {dict(labels)["operation"] for name, labels in found if name.startswith("kvmmu_oper")}
    assert {"prepare", "written"} <= timed


# -- alarms --------------------------------------------------------------------------------------

RULES = metrics.alert_rules()


def tool(name: str) -> str:
    """A program of Prometheus (on Debian: apt-get install prometheus)."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian's package prometheus has it)")
    return found


def test_the_rules_come_with_the_package() -> None:
    assert RULES.is_file()
    alerts = re.findall(r"- alert: (\w+)", RULES.read_text())
    assert len(alerts) == len(set(alerts)) == 5


@pytest.mark.needs_prometheus
def test_promtool_accepts_the_rules() -> None:
    done = subprocess.run(
        [tool("promtool"), "check", "rules", RULES], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


ALARMS = """
rule_files: [RULES]
evaluation_interval: 15s
tests:
  - interval: 15s
    input_series:
      - series: 'kvmmu_fragmentation_ratio{cache="high",over="available"}'
        values: '0.36x60'
      - series: 'kvmmu_fragmentation_ratio{cache="at",over="available"}'
        values: '0.35x60'
      - series: 'kvmmu_fragmentation_ratio{cache="other",over="empty"}'
        values: '0.9x60'
      - series: 'kvmmu_fragmentation_index{cache="low",over="available"}'
        values: '0.69x60'
      - series: 'kvmmu_fragmentation_index{cache="at",over="available"}'
        values: '0.7x60'
      - series: 'kvmmu_evicted_blocks_total{cache="evicts"}'
        values: '0+765x60'
      - series: 'kvmmu_swapped_blocks_total{cache="evicts"}'
        values: '0x60'
      - series: 'kvmmu_evicted_blocks_total{cache="both"}'
        values: '0+390x60'
      - series: 'kvmmu_swapped_blocks_total{cache="both"}'
        values: '0+390x60'
      - series: 'kvmmu_evicted_blocks_total{cache="alone"}'
        values: '0+765x60'
      - series: 'kvmmu_evicted_blocks_total{cache="calm"}'
        values: '0+735x60'
      - series: 'kvmmu_prefix_queried_blocks_total{cache="shared"}'
        values: '0+100x80'
      - series: 'kvmmu_prefix_hit_blocks_total{cache="shared"}'
        values: '0+79x80'
      - series: 'kvmmu_sharing_expected{cache="shared"}'
        values: '1x80'
      - series: 'kvmmu_prefix_queried_blocks_total{cache="apart"}'
        values: '0+100x80'
      - series: 'kvmmu_prefix_hit_blocks_total{cache="apart"}'
        values: '0+1x80'
      - series: 'kvmmu_sharing_expected{cache="apart"}'
        values: '0x80'
      - series: 'kvmmu_prefix_queried_blocks_total{cache="idle"}'
        values: '100x80'
      - series: 'kvmmu_prefix_hit_blocks_total{cache="idle"}'
        values: '0x80'
      - series: 'kvmmu_sharing_expected{cache="idle"}'
        values: '1x80'
      - series: 'kvmmu_free_windows_ratio{cache="scattered"}'
        values: '0.79x60'
      - series: 'kvmmu_free_windows_possible{cache="scattered"}'
        values: '4x60'
      - series: 'kvmmu_free_windows_ratio{cache="small"}'
        values: '0x60'
      - series: 'kvmmu_free_windows_possible{cache="small"}'
        values: '3x60'
    alert_rule_test:
      - {eval_time: 4m, alertname: KVMMUFragmented, exp_alerts: []}
EXPECTED"""


def expected(at: str, alert: str, severity: str, *caches: str, over: bool = False) -> str:
    lines = [f"      - eval_time: {at}", f"        alertname: {alert}", "        exp_alerts:"]
    for cache in caches:
        labels = f"severity: {severity}, cache: {cache}" + (", over: available" if over else "")
        lines.append(f"          - exp_labels: {{{labels}}}")
        lines.append("            exp_annotations: ANNOTATIONS")
    return "\n".join(lines)


@pytest.mark.needs_prometheus
def test_each_alarm_goes_off_above_its_threshold_and_not_at_it(tmp_path: Path) -> None:
    """Annotations are left out of the copy: they are for people, and promtool compares them."""
    rules = tmp_path / "rules.yml"
    text = re.sub(r"\n        annotations:\n(?:          .*\n)+", "\n", RULES.read_text())
    rules.write_text(text)
    cases = [
        expected("6m", "KVMMUFragmented", "info", "high", over=True),
        expected("6m", "KVMMUFragmentationIndexLow", "info", "low", over=True),
        expected("7m", "KVMMUThrashing", "warning", "evicts", "both", "alone"),
        expected("17m", "KVMMUSharingLow", "warning", "shared"),
        expected("6m", "KVMMUFreeWindowsLow", "warning", "scattered"),
    ]
    cases = [re.sub(r"\n *exp_annotations: ANNOTATIONS", "", case) for case in cases]
    test = tmp_path / "test.yml"
    test.write_text(ALARMS.replace("RULES", str(rules)).replace("EXPECTED", "\n".join(cases)))
    done = subprocess.run(
        [tool("promtool"), "test", "rules", test], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.needs_prometheus
def test_a_prometheus_server_scrapes_a_running_replay_and_the_alarm_fires(
    long_replay: str, tmp_path: Path
) -> None:
    """The rules are those of the package, but for how long a condition has to hold."""
    rules = tmp_path / "rules.yml"
    rules.write_text(re.sub(r"for: \d+m", "for: 1s", RULES.read_text()))
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": "kvmmu",
                "static_configs": [{"targets": [long_replay.split("/")[2]]}],
            }
        ],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [
            tool("prometheus"),
            f"--config.file={tmp_path / 'prometheus.yml'}",
            f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NO_PROXY": "127.0.0.1"},
    )
    try:
        firing: dict[str, Any] = {}
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline and "KVMMUFragmented" not in firing:
            time.sleep(0.5)
            if server.poll() is not None:
                break
            try:
                answer = json.loads(get(f"http://127.0.0.1:{port}/api/v1/alerts"))
            except OSError:
                continue
            firing = {
                alert["labels"]["alertname"]: alert
                for alert in answer["data"]["alerts"]
                if alert["state"] == "firing"
            }
    finally:
        server.terminate()
        _, errors = server.communicate(timeout=30)
    assert "KVMMUFragmented" in firing, errors[-2000:]
    alarm = firing["KVMMUFragmented"]
    assert alarm["labels"]["cache"] == "replay"
    assert float(alarm["value"]) > 0.35
    assert "replay" in alarm["annotations"]["summary"]
