"""The code in the documents runs as it stands, and ``help`` shows what is documented."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import kvmmu
import pytest
from kvmmu import _core

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


def test_help_shows_what_the_stub_says_of_every_public_thing_of_the_core() -> None:
    stub = ast.parse((Path(kvmmu.__file__).parent / "_core.pyi").read_text())
    things: list[tuple[str, str | None]] = [("", ast.get_docstring(stub))]
    heads: list[tuple[str, ast.stmt]] = [("", node) for node in stub.body]
    for path, node in heads:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            heads += [(f"{path}{node.name}.", inner) for inner in node.body]
            things.append((path + node.name, ast.get_docstring(node)))
    assert len(things) > 100
    for name, text in things:
        # Private things may do without; but where there is a text, it is shown.
        if text is None and any(part.startswith("_") for part in name.split(".")):
            continue
        assert text, f"{name} has no text in the stub"
        thing = attrgetter(name)(_core) if name else _core
        assert inspect.getdoc(thing) == text, name
