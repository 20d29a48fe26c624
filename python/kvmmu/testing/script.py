"""The calls of one trial as lines of Python: what runs is what is shown.

What lives here: running a line, reading what it left in its variables, and the source to copy. What
never lives here: what a line should do (see :mod:`.trial`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import islice
from operator import index
from types import CodeType
from typing import Any

from .subject import name_of

__all__ = ["Script"]


@lru_cache(maxsize=4096)
def _compiled(line: str) -> CodeType:
    return compile(line, "<sequence>", "exec")


class Script:
    """Lines that have run on an allocator, which they call ``a``.

    Attributes:
        lines: without the import and the making of ``a``.
    """

    def __init__(self, factory: Callable[[], Any], allocator: Any) -> None:
        self.factory = factory
        self.lines: list[str] = []
        self._variables: dict[str, Any] = {"a": allocator}

    def run(self, line: str) -> None:
        """Runs a line; raises what it raises."""
        self.lines.append(line)
        try:
            exec(_compiled(line), self._variables)
        except SystemExit as error:  # which would end the search without a word
            raise RuntimeError(f"it asked to exit with {error}") from error

    def forgive(self, error: Exception) -> str:
        """The last line has raised and may: it is shown so. Returns its call."""
        call = self.call
        self.lines[-1] = f"with suppress(Exception): {call}  # {type(error).__name__}"
        return call

    @property
    def call(self) -> str:
        """The last line without its assignment."""
        return self.lines[-1].split(" = ", 1)[-1]

    def value(self, name: str) -> Any:
        """What a variable holds."""
        return self._variables[name]

    def ids(self, name: str, most: int) -> list[int]:
        """The first ``most`` ids that a claim shows.

        Raises:
            TypeError: the claim is no collection, or something in it is no whole number.
            whatever iterating over it raises.
        """
        return [index(block) for block in islice(self._variables[name], most)]

    def pairs(self, name: str) -> list[tuple[int, int]]:
        """Copies (source, destination); None is none.

        Raises:
            TypeError, ValueError: these are no pairs of whole numbers.
            whatever iterating over them raises.
        """
        pairs = self._variables[name]
        if pairs is None:
            return []
        if isinstance(pairs, Iterator):  # so that the lines that follow can look at them as well
            pairs = self._variables[name] = list(pairs)
        return [(index(source), index(destination)) for source, destination in pairs]

    def source(self, proof: str = "") -> str:
        """All that has run, with its imports, and a last line that fails."""
        lines = [*self.lines, proof] if proof else self.lines
        head = ["from contextlib import suppress"] if any("suppress(" in x for x in lines) else []
        module, name = getattr(self.factory, "__module__", None), name_of(self.factory)
        if (
            module in ("builtins", "__main__", None)
            or "<" in name
            or not hasattr(self.factory, "__name__")
        ):
            head += ["a = factory()"]
        else:
            root = name.split(".")[0]
            head += [f"from {module} import {root}", f"a = {name}()"]
        return "\n".join([*head, *lines]) + "\n"
