"""The code in the documents runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


def test_the_ten_steps_of_embedding_run_as_one_program() -> None:
    pytest.importorskip("torch")
    text = (DOCS / "embedding.md").read_text()
    steps = re.findall(r"^## (\d+)\. ", text, re.MULTILINE)
    assert steps == [str(n) for n in range(1, 11)]
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        assert "```python" in section, f"no code in step {section.splitlines()[0]}"
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "now"
    moved = re.fullmatch(r"(\d+) blocks moved, largest free run (\d+)", lines[-1])
    assert moved
    assert int(moved[1]) > 0
    assert int(moved[2]) >= 36
