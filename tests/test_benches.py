"""The benchmark runner's manners. No test measures anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benches"))

from harness import Goal, Row  # noqa: E402


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benches" / "run"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["stepp"], "no benchmark is called 'stepp'; there are: move, plan, step, table, views"),
        (["step", "--vllm", "nowhere"], "--vllm nowhere"),
        (["step", "--llfree", "nowhere"], "--llfree nowhere"),
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
