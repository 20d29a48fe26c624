"""The README says nothing that does not run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_the_example_runs_as_it_stands_and_prints_what_it_says(tmp_path: Path) -> None:
    (example,) = code_blocks("python")
    (printed,) = code_blocks("text")
    assert len(example.splitlines()) <= 25
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == printed


def test_the_set_up_commands_are_there() -> None:
    commands = code_blocks("console")[0].splitlines()
    scripts = [line.split()[1] for line in commands if line.startswith("$ ")]
    assert scripts == ["./scripts/run", "./scripts/test"]
    assert all(os.access(ROOT / script, os.X_OK) for script in scripts)


def test_every_file_that_the_readme_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert [link for link in links if not (ROOT / link).exists()] == []
