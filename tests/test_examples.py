"""The examples run, say what they promise, and stay short enough to be read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

torch = pytest.importorskip("torch")

EXAMPLES = ROOT / "examples"


def run(name: str, *arguments: str) -> list[str]:
    """The lines that an example prints, warnings made errors."""
    import kvmmu

    package = str(Path(kvmmu.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": package},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_quickstart_answers_as_contiguous_kv_does() -> None:
    lines = run("quickstart.py")
    assert "both continuations attend to their own tokens: yes" in lines
    assert lines[-1] == "found cached: 96 of 100 tokens"


def test_speculative_and_beam_decoding_lose_no_block() -> None:
    *_, last = run("speculative.py", "40")
    assert last.startswith("40 rounds, ") and last.endswith("blocks empty: 64 of 64")


def test_a_foreign_engine_compares_every_answer_on_every_rank() -> None:
    lines = run("embed.py", "40")
    assert "blocks moved on 4 ranks, all answers equal" in lines[-1]
    assert int(lines[-1].split()[0]) > 0, "nothing moved"
    words = lines[-2].replace(",", "").split()
    finished, aborted, preempted = int(words[0]), int(words[2]), int(words[4])
    assert finished + aborted == 40
    assert aborted > 0
    assert preempted > 0


def test_the_embedding_example_fits_on_three_screens() -> None:
    assert len((EXAMPLES / "embed.py").read_text(encoding="utf-8").splitlines()) <= 150
