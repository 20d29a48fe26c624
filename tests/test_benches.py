"""The benchmark runner's manners. No test measures anything."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from kvmmu import MMU, OutOfBlocks, recorder
from kvmmu.replay.traces import Trace

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benches"))

from kvmmu import bench as of_the_wheel  # noqa: E402
from kvmmu.bench.harness import of_the_core  # noqa: E402
from kvmmu.bench.report import table  # noqa: E402
from rich.console import Console  # noqa: E402

import pages  # noqa: E402
import pool  # noqa: E402
from harness import Bench, Goal, Row  # noqa: E402

from . import cuda_shim  # noqa: E402


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benches" / "run"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["stepp"],
            "no benchmark is called 'stepp'; "
            "there are: move, pages, plan, pool, step, table, transfer, views, watching",
        ),
        (["step", "--vllm", "nowhere"], "--vllm nowhere"),
        (["step", "--llfree", "nowhere"], "--llfree nowhere"),
        (["pages", "--trace", "nowhere"], "--trace nowhere, whole file: cannot be read"),
        (["step", "--json", "/nowhere/rows.json"], "--json /nowhere/rows.json"),
    ],
)
def test_bad_input_is_told_before_anything_is_measured(arguments: list[str], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_goal_about_the_value_is_judged_without_a_rival() -> None:
    row = Row("x", "us/block", 0.2, "someone", None, Goal(0.15))
    assert (row.ratio, row.met) == (None, False)
    assert row.as_json(2.0)["rival_value"] is None


def test_a_goal_about_the_ratio_is_open_without_the_rival() -> None:
    absent = Row("x", "ns", 2.0, "someone", None, Goal(0.5, of="ratio"))
    present = Row("x", "ns", 2.0, "someone", 8.0, Goal(0.5, of="ratio"))
    assert absent.met is None
    assert present.met is True
    assert present.ratio == 0.25


def test_figures_are_told_in_atomic_adds_of_the_same_run() -> None:
    assert Row("x", "us/block", 0.1, None).adds(2.0) == pytest.approx(50.0)
    assert Row("x", "GiB/s", 9.0, None).adds(2.0) is None


def test_a_goal_of_at_least_is_met_from_its_limit_up() -> None:
    goal = Goal(20, least=True)
    assert str(goal) == "value >= 20"
    assert [Row("x", "blocks", value, goal=goal).met for value in (19.9, 20.0, 256.0)] == [
        False,
        True,
        True,
    ]


def figure(measure: str, pattern: str, threads: int, who: str, part: str, value: float) -> str:
    return json.dumps(
        {
            "measure": measure,
            "pattern": pattern,
            "threads": threads,
            "who": who,
            "part": part,
            "unit": "ns",
            "value": value,
        }
    )


def test_two_threads_are_held_to_one_thread_times_the_slowdown_of_two_private_loops() -> None:
    lines = [
        figure("private loop", "repeat", 1, "machine", "one add", 3.0),
        figure("private loop", "repeat", 2, "machine", "one add", 6.0),
    ]
    for threads, ours in ((1, 5.0), (2, 14.0)):
        for part in ("claim", "release"):
            lines.append(figure(pool.SCATTERED, "bulk", threads, "kvmmu", part, ours))
            lines.append(figure(pool.SCATTERED, "bulk", threads, "LLFree", part, 20.0))
    rows = list(pool.one_block(pool.read("\n".join(lines)), [1, 2]))
    assert [(row.rival, row.ratio, row.met) for row in rows] == [
        ("LLFree", 0.25, True),
        ("LLFree", 0.7, True),
        ("1 thread x 2.00 (two private loops)", 1.4, True),
    ]


def test_a_placement_that_keeps_fewer_windows_than_llfree_is_said_to_miss_its_goal() -> None:
    measure, pattern = "random replacement at 50 % fill", "LLFree's experiment"
    lines = []
    for who, windows in (("kvmmu", 9), ("kvmmu, FIFO", 0), ("LLFree", 10)):
        lines.append(figure(measure, pattern, 1, who, "possible", 12))
        lines.append(figure(measure, pattern, 1, who, "after 8 passes", windows))
    bench = Bench()
    rows = list(pool.fragmentation(pool.read("\n".join(lines)), bench, seed=7))
    assert [(row.rival, row.rival_value, row.met) for row in rows] == [
        ("LLFree", 10, False),
        ("kvmmu, FIFO", 0, None),
    ]
    assert rows[0].measure.endswith("after 8 passes: free windows of 12")
    assert "pool: seed 7" in bench.notes


# -- pages -----------------------------------------------------------------------------------


def recorded_lines(file: Path, mmu: MMU, block_size: int) -> list[str]:
    mmu.flush_recording()
    return list(pages.calls(recorder.read(file).calls, block_size))


def test_a_recording_becomes_what_was_claimed_and_given_back(tmp_path: Path) -> None:
    file = tmp_path / "engine.kvmmu"
    mmu = MMU(8, 4, max_blocks_per_sequence=8, prefix_caching=False, record=str(file))
    tables = mmu.register_tables(
        np.empty((2, 8), np.int32),
        np.empty(2, np.int32),
        np.empty(16, np.int64),
        np.empty(3, np.int32),
    )

    def step(ids: list[int], lens: list[int] | None, new: int) -> None:
        number = mmu.begin_step()
        mmu.prepare(
            number,
            np.array(ids),
            tables,
            query_lens=None if lens is None else np.array(lens, np.int32),
            new_tokens=np.zeros(new, np.int32),
        )
        mmu.written(number)
        mmu.end_step(number)

    a = mmu.open(np.arange(7, dtype=np.int32))
    b = mmu.open(np.arange(4, dtype=np.int32))
    step([a, b], [3, 4], 0)  # within the prompts: nobody has more blocks
    step([a, b], [4, 1], 1)  # b begins a block
    step([b, a], None, 2)  # a fills its second block
    with pytest.raises(OutOfBlocks):
        mmu.open(np.arange(20, dtype=np.int32))
    step([a, b], None, 2)  # a begins its third
    blocks = mmu.info(a).num_blocks, mmu.info(b).num_blocks
    mmu.close(a)
    assert blocks == (3, 2)
    assert recorded_lines(file, mmu, 4) == [
        f"open {a} 7",
        f"open {b} 4",
        f"grow {b} 5",
        f"grow {a} 9",
        f"close {a}",
    ]


def test_a_call_that_shares_blocks_is_no_part_of_such_a_load(tmp_path: Path) -> None:
    file = tmp_path / "engine.kvmmu"
    mmu = MMU(8, 4, max_blocks_per_sequence=8, record=str(file))
    mmu.fork(mmu.open(np.arange(7, dtype=np.int32)))
    with pytest.raises(ValueError, match="call 1: fork"):
        recorded_lines(file, mmu, 4)


def test_a_load_holds_what_the_serving_loop_held_and_ends_empty(tmp_path: Path) -> None:
    requests = 40
    trace = Trace(
        name="crowded",
        kind="sample",
        arrival_s=np.linspace(0.0, 2.0, requests),
        prompt_tokens=np.arange(1, requests + 1) * 13,
        output_tokens=np.full(requests, 120),
        hash_ids=np.empty(0, np.uint64),
        hash_starts=np.zeros(requests + 1, np.int64),
    )
    options = replace(pages.OPTIONS, blocks=96, speed=1.0, reserved_blocks=0)
    file = tmp_path / "load.txt"
    served = pages.write_load(trace, options, file)
    assert served.finished == requests
    assert served.preempted > 0, "calls that were refused are to be in this load"
    head, *lines = file.read_text().splitlines()
    assert head == "pool 96 16"
    held: dict[str, int] = {}
    most = 0
    for line in lines:
        name, *words = line.split()
        if name == "close":
            del held[words[0]]
        else:
            for sequence, tokens in zip(words[::2], words[1::2], strict=True):
                blocks = -(-int(tokens) // 16)
                assert blocks > held.get(sequence, 0)
                assert (name == "open") == (sequence not in held)
                held[sequence] = blocks
        most = max(most, sum(held.values()))
    assert not held
    assert 90 <= most <= 96
    assert not list(tmp_path.glob("*.kvmmu"))
    moving = pages.serve(trace, replace(options, compaction=True))
    assert (moving.steps, moving.preempted) == (served.steps, served.preempted)


def page_figures(*whom: tuple[str, float, float]) -> pool.Figures:
    """(who, huge pages of 10 regions, moves that the missed ones lack in all)."""
    lines = []
    for who, got, lacking in whom:
        parts = {"regions": 10, "pages": got, "pages at the end": got, "lacking, all": lacking}
        if got < 10:
            parts["lacking, mean"] = lacking / (10 - got)
        for part, value in parts.items():
            lines.append(figure(pages.MEASURE, pages.PLACED, 1, who, part, value))
        for part, value in {"regions": 10, "made": 10 - got, "moved": lacking}.items():
            lines.append(figure(pages.MEASURE, pages.DEMANDED, 1, who, part, value))
    return pool.read("\n".join(lines))


def test_moves_for_a_page_are_judged_against_llfree_alone() -> None:
    figures = page_figures(("kvmmu", 6, 800), ("LLFree", 8, 300), ("buddy", 4, 900))
    still, moving = pages.Product(0.9, 5, 3, 0, 6, 0), pages.Product(0.9, 5, 3, 0, 9, 1200)
    rows = [
        *pages.placement(figures),
        *pages.on_demand(figures),
        *pages.background(figures, still, moving),
    ]
    said = {(row.measure, row.rival): (row.kvmmu, row.rival_value, row.met) for row in rows}
    expected = {
        ("complete regions that are huge pages, as placed", "LLFree"): (0.6, 0.8, False),
        ("complete regions that are huge pages, as placed", "buddy"): (0.6, 0.4, None),
        ("moves that a missed page lacks: mean, as placed", "LLFree"): (200, 150, False),
        ("moves for each huge page, every region one, on demand", "LLFree"): (80, 30, False),
        ("moves for each window that had to be made, on demand", "LLFree"): (200, 150, None),
        (
            "moves for each huge page that compaction between steps adds",
            "LLFree, what a missed page lacks",
        ): (400, 150, False),
    }
    assert {key: said[key] for key in expected} == expected


def test_without_llfree_nothing_about_pages_is_decided() -> None:
    figures = page_figures(("kvmmu", 6, 800))
    rows = [*pages.placement(figures), *pages.on_demand(figures)]
    assert {row.rival for row in rows} == {"LLFree"}
    assert all(row.met is None for row in rows)


def test_a_page_that_nobody_misses_lacks_nothing() -> None:
    figures = page_figures(("kvmmu", 10, 0), ("LLFree", 9, 30))
    (row,) = [row for row in pages.placement(figures) if "by all regions" in row.measure]
    assert (row.kvmmu, row.rival_value, row.met) == (0, 3, True)


def test_figures_of_another_load_than_the_product_served_are_refused() -> None:
    figures = page_figures(("kvmmu", 6, 800))
    pages.check(figures, pages.Product(0.9, 5, 3, 0, 6, 0))
    pages.check(figures, pages.Product(0.9, 5, 3, 1, 5, 0))  # what was thrown out ended too
    with pytest.raises(ValueError, match="6 huge pages at the end, kvmmu replay had 5"):
        pages.check(figures, pages.Product(0.9, 5, 3, 0, 5, 0))


def test_pages_without_a_trace_are_noted_and_not_measured() -> None:
    bench = Bench()
    assert list(pages.rows(bench)) == []
    assert bench.notes == ["pages: needs --trace FILE (the Mooncake conversation trace, for one)"]


def test_a_copy_with_llfree_depends_on_the_checkout_and_on_this_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CARGO_TARGET_DIR", str(tmp_path))
    made = tomllib.loads(pool.manifest(Path("/a rival/llfree")).read_text(encoding="utf-8"))
    assert made["dependencies"]["llfree"]["path"] == "/a rival/llfree/core"
    assert made["dependencies"]["kvmmu"]["path"] == str(ROOT / "rust" / "kvmmu")
    assert made["features"]["llfree"] == ["dep:llfree"]
    assert pool.manifest(None) == ROOT / "benches" / "pool" / "Cargo.toml"


def test_no_rival_is_in_the_core_s_lock_file() -> None:
    lock = tomllib.loads((ROOT / "Cargo.lock").read_text(encoding="utf-8"))
    names = {package["name"] for package in lock["package"]}
    assert not names & {"crossbeam-queue", "buddy_system_allocator", "llfree", "pool-bench"}


def test_what_needs_a_gpu_is_rehearsed_as_a_whole(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    if cuda_shim.compiler() is None:
        pytest.skip("needs g++")
    program = tmp_path / "pool-bench"  # stands for the one that cargo builds
    lines = [
        figure(pool.SCATTERED, pattern, threads, who, part, value)
        for pattern, parts in (("repeat", ["pair"]), ("bulk", ["claim", "release"]))
        for threads in (1, 2)
        for who, value in (("kvmmu", 5.0), ("Mutex<Vec>", 20.0), ("ArrayQueue", 10.0))
        for part in parts
    ]
    asked = '[ "$1 $2" = "threads --threads" ] && [ "$3" -ge 1 ] || exit 2'
    program.write_text("\n".join(["#!/bin/sh", asked, "cat <<'.'", *lines, ".\n"]))
    program.chmod(0o755)
    places = {"PYTHON": sys.executable, "OUT": str(tmp_path), "POOL_BENCH": str(program)}
    done = subprocess.run(
        [str(ROOT / "benches" / "gpu.sh"), "--rehearse"],
        capture_output=True,
        text=True,
        env={**os.environ, **places},
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["rehearsal"] is True
    assert found["notes"] == []
    assert "A REHEARSAL, no figure means anything" in done.stdout
    measures = " ".join(row["measure"] for row in found["rows"])
    for part in (
        "one block, half full, repeat, 1 thread one block, half full, repeat, 2 threads",
        "one block, half full, bulk, 2 threads",
        "large copy",
        "pieces of 655 KiB",
        "blocks of",
        "until copied",
        "zero moves in a graph",
        "a prefill",
        "a decode",
        "130 GB, pieces of 4 KiB",
    ):
        assert part in measures
    rivals = {(row["rival"], row["rival_value"]) for row in found["rows"] if row["unit"] == "ns"}
    assert rivals == {("ArrayQueue", 10.0), ("ArrayQueue", 20.0)}  # bulk: a claim and a release


def test_figures_of_threads_that_are_missing_or_cut_off_are_said_to_be(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    whole = figure(pool.SCATTERED, "repeat", 1, "kvmmu", "pair", 5.0)
    for text, said, status in (
        ("", "threads were not measured", 0),
        (whole + "\n" + whole[:40], "threads failed", 1),
        (None, "threads failed: FileNotFoundError", 1),
    ):
        lines = tmp_path / "threads.jsonl"
        lines.unlink(missing_ok=True)
        if text is not None:
            lines.write_text(text)
        arguments = ["--rehearse", "--seconds", "-1", "--threads", str(lines)]
        done = subprocess.run(
            [sys.executable, str(ROOT / "benches" / "gpu.py"), *arguments],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, f"note: {said}" in done.stdout) == (status, True), done.stdout


def test_a_gpu_run_that_is_short_of_time_says_what_it_left_out(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    out = tmp_path / "gpu.json"
    arguments = ["--rehearse", "--seconds", "-1", "--json", str(out)]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benches" / "gpu.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no time was left for") == 6
    assert len(json.loads(out.read_text())["notes"]) == 6


def test_a_gpu_run_without_the_program_for_threads_says_so_and_fails(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    if cuda_shim.compiler() is None:
        pytest.skip("needs g++")
    places = {"PYTHON": sys.executable, "OUT": str(tmp_path), "POOL_BENCH": str(tmp_path / "none")}
    done = subprocess.run(
        [str(ROOT / "benches" / "gpu.sh"), "--rehearse"],
        capture_output=True,
        text=True,
        env={**os.environ, **places, "LIMIT": "0"},
        check=False,
    )
    assert done.returncode == 1
    assert f"threads are not measured: there is no program {tmp_path / 'none'}" in done.stderr
    assert "note: threads were not measured" in done.stdout


# -- kvmmu bench -----------------------------------------------------------------------------


def bench(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvmmu.cli", "bench", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["stepp"], "no benchmark is called 'stepp'; there are: move, plan, pool, step, table"),
        (["step", "--vllm", "nowhere"], "--vllm nowhere"),
        (["step", "--json", "/nowhere/rows.json"], "--json: /nowhere/rows.json cannot be written"),
    ],
)
def test_the_command_tells_bad_input_before_anything_is_measured(
    arguments: list[str], said: str
) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_the_command_needs_no_checkout_and_no_cargo(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = [sys.executable, "-m", "kvmmu.cli", "bench", "pool", "--json", str(out)]
    places = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env=places
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert [row["unit"] for row in rows] == ["ns/block", "ns/block"]
    assert all(row["kvmmu"] > 0 and row["atomic_adds"] is None for row in rows)
    assert "batch of 8192 from Python" in done.stdout


def test_what_only_a_checkout_can_measure_is_noted() -> None:
    run = Bench()
    assert of_the_core(run, "page_table") is None
    assert run.notes == ["page_table: the core alone is measured from a checkout (benches/run)"]
    assert of_the_core(Bench(rust=lambda name: {"ns": 1.0}), "x") == {"ns": 1.0}
    assert Row("x", "us", 2.0).as_json(None)["atomic_adds"] is None


def test_every_workload_of_the_wheel_is_one_of_the_checkout_too() -> None:
    listed = run("--help").stdout
    for name in of_the_wheel.NAMES:
        assert name in listed
        assert (ROOT / "python" / "kvmmu" / "bench" / f"{name}.py").is_file()


@pytest.mark.parametrize("width", [60, 80, 119, 120, 150])
def test_a_table_of_any_width_has_every_figure_whole(width: int) -> None:
    bench = Bench(vllm=None)
    bench.two_loops, bench.atomic_ns = 1.9, 5.1
    goal = Goal(0.5, "ratio")
    rows = [
        Row("claim and release 5000 blocks", "ns/block", 123.4, "vLLM's BlockPool", 1234.0, goal),
        Row("claim [none]", "bytes", 0.0001234),
    ]
    out = io.StringIO()
    Console(width=width, file=out).print(table(rows, bench))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width and "…" not in out.getvalue()
    words = set(re.sub("[│┃;,]", " ", out.getvalue()).split())
    assert words >= {"123.4", "1234", "0.1", "24.2", "0.0001234", "yes", "BlockPool", "[none]"}
    assert ("rival" in words) == (width >= 120)
