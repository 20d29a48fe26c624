"""What an allocator should show, and whether it does.

What lives here: :class:`Model`, which reads what calls returned and what can be asked at any time,
and raises a fault where that is not what it should be. What never lives here: calls that change
something (see :mod:`.trial`), whether it is an allocator at all (:mod:`.subject`), and how a call
becomes a line of Python (:mod:`.script`).

The model is short: which claims hold which blocks, and what each of their blocks contains. The rest
follows. A block is held if a claim has it and free otherwise; its references are the claims that
have it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from operator import index as whole
from reprlib import repr as shown_short
from typing import Any

from . import faults
from .script import Script
from .subject import Refuses, Subject

__all__ = ["Claim", "Model"]

FEW = 64
"""Pools up to this size have every block looked at after each call, larger ones those held."""


@dataclass
class Claim:
    """What one claim should be: its name in the lines, its blocks, and what each contains."""

    name: str
    blocks: list[int]
    values: list[int]
    prompt: int | None = None
    """The prompt that all of its blocks belong to."""
    written: bool = True
    """False between ``claim_prompt`` and ``publish``."""


class Model:
    """An allocator and what it should be. Arguments and errors: see :class:`~.trial.Trial`."""

    def __init__(self, factory: Callable[[], Any], refuses: Refuses | None = None) -> None:
        self.subject = subject = Subject.made_by(factory, refuses)
        self.allocator = subject.allocator
        self.num_blocks = subject.num_blocks
        self.has = subject.has
        self.deals_in_sequences = bool(self.has & {"fork", "append", "truncate"})
        self.owns_memory = {"read", "write"} <= self.has
        self.script = Script(factory, subject.allocator)

        self._few = [*subject.all_blocks()] if self.num_blocks <= FEW else []
        """The blocks of a small pool, which are all looked at after each call."""
        self.claims: list[Claim] = []
        self.gone: list[tuple[str, list[int]]] = []
        """Expressions of what was released, and its ids then."""
        self.cached: int | None = None
        """Cached blocks after the last call, if the allocator says."""
        self.prompts: dict[int, int] = {}
        """The most blocks that each prompt has asked for."""
        self.memory: dict[int, int] = {}
        self.fault: faults.AllocatorFault | None = None
        self._names = (f"x{number}" for number in itertools.count())
        self._values = itertools.count(1)

    @property
    def held(self) -> Counter[int]:
        """References of each block that somebody holds."""
        return Counter(itertools.chain.from_iterable([claim.blocks for claim in self.claims]))

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return self.num_blocks - len(set().union(*[claim.blocks for claim in self.claims]))

    # -- checks after every call ---------------------------------------------------------------

    def _check(self, raised: str = "") -> None:
        """Compares all that can be seen. ``raised``: the call that has just failed, which must have
        changed nothing."""
        self._check_claims(raised)
        self._check_stats(raised)
        held = self.held
        if "references" in self.has:
            for block in self._few or held:
                count = self._whole(
                    self._ask("references", block),
                    f"a.references({block})",
                    faults.WrongReferences,
                )
                if count != held[block]:
                    raise self._mismatch(
                        raised,
                        faults.WrongReferences,
                        f"block {block} has {count} references, {held[block]} claims hold it",
                        f"assert a.references({block}) == {held[block]}",
                    )
        for claim in self.claims:
            for i, block in enumerate(claim.blocks):
                if self._read(block) != claim.values[i]:
                    raise self._mismatch(
                        raised,
                        faults.LostContents,
                        f"block {block}, number {i} of {claim.name}, holds something else now",
                        f"assert a.read({block}) == {claim.values[i]}",
                    )
        if "validate" in self.has:
            try:
                self.allocator.validate()
            except Exception as error:
                message = f"a.validate() raised {type(error).__name__}: {error}"
                raise self._mismatch(raised, faults.Invalid, message, "a.validate()") from error

    def _check_claims(self, raised: str) -> None:
        """What claims show is what the model has: a list of ids is its caller's, and stays."""
        for claim in self.claims:
            shown = self._blocks(claim.name)
            if shown != claim.blocks:
                raise self._mismatch(
                    raised,
                    faults.LostMapping,
                    f"{claim.name} shows the blocks {shown}, expected {claim.blocks}",
                    f"assert [*{claim.name}] == {claim.blocks}",
                )

    def _check_stats(self, raised: str) -> None:
        stats = self._stats()
        if not stats:
            return
        free = self.free
        for key, right in (("free", free), ("used", self.num_blocks - free)):
            if stats.get(key, right) == right:
                continue
            if not raised:
                self._probe()
            raise self._mismatch(
                raised,
                faults.WrongStatistics,
                f"stats() says {stats[key]} {key}, expected {right}",
                f"assert a.stats()[{key!r}] == {right}",
            )
        cached = stats.get("cached", 0)
        if not 0 <= cached <= free:
            raise self._mismatch(
                raised,
                faults.WrongStatistics,
                f"stats() says {cached} cached, and {free} blocks are free",
                f"assert 0 <= a.stats()['cached'] <= {free}",
            )
        if "cached" in stats:
            if raised and self.cached is not None and cached != self.cached:
                raise self._mismatch(
                    raised,
                    faults.WrongStatistics,
                    f"{self.cached} blocks were cached before, {cached} are now",
                    f"assert a.stats()['cached'] == {self.cached}",
                )
            self.cached = cached

    def _probe(self) -> None:
        """A count is off: :class:`~.trial.Trial` looks for what is behind it."""

    def _mismatch(
        self, raised: str, kind: type[faults.AllocatorFault], message: str, proof: str
    ) -> faults.AllocatorFault:
        if raised:
            kind, message = faults.ChangedByFailure, f"{raised} failed, and yet: {message}"
        return self._fault(kind, message, proof)

    # -- faults --------------------------------------------------------------------------------

    def _must(self, line: str) -> None:
        """Runs a call that has no reason to fail."""
        try:
            self.script.run(line)
        except Exception as error:
            raise self._crash(error) from error

    def _crash(self, error: Exception) -> faults.AllocatorFault:
        message = f"{self.script.call} raised {type(error).__name__}: {error}"
        return self._fault(faults.Crashed, message)

    def _fault(
        self, kind: type[faults.AllocatorFault], message: str, proof: str = ""
    ) -> faults.AllocatorFault:
        self.fault = kind(message, self.script.source(proof))
        return self.fault

    # -- what was handed out -------------------------------------------------------------------

    def _check_new(self, name: str, blocks: list[int], n: int, shown: str = "") -> None:
        """These blocks were just handed out: each must be one that nobody holds."""
        held, shown = self.held, shown or name
        seen: set[int] = set()
        for block in blocks:
            self._check_id(name, block)
            if block in seen:
                raise self._fault(
                    faults.DoubleHandOut,
                    f"block {block} was handed out twice in one call",
                    f"assert len({{*{shown}}}) == {len(blocks)}",
                )
            if block in held:
                holder = next(claim for claim in self.claims if block in claim.blocks)
                raise self._fault(
                    faults.DoubleHandOut,
                    f"block {block} was handed out to {name} while {holder.name} holds it",
                    f"assert not {{*{holder.name}}} & {{*{shown}}}"
                    if holder.name != name
                    else f"assert len({{*{name}}}) == len([*{name}])",
                )
            seen.add(block)
        if len(blocks) != n:
            over = n > self.free
            raise self._fault(
                faults.Overcommitted if over else faults.WrongCount,
                f"{n} blocks were asked for and {len(blocks)} given to {name}"
                + (f"; {self.free} were free, so the call had to be refused" if over else ""),
                f"assert len([*{shown}]) == {n}",
            )

    def _check_id(self, name: str, block: int) -> None:
        if not self.subject.is_block(block):
            of = "the null block" if block == self.subject.null_block else "no block of this pool"
            raise self._fault(
                faults.UnknownBlock,
                f"{name} was given block {block}, which is {of}",
                f"assert {block} not in {name}",
            )

    # -- what calls and questions return -------------------------------------------------------

    def _blocks(self, name: str) -> list[int]:
        """What a claim shows: no more than one id too many, which cannot be all right."""
        claim, proof = self.script.value(name), f"[block.__index__() for block in {name}]"
        try:
            if isinstance(claim, Iterator):
                proof = f"assert iter({name}) is not {name}"
                raise TypeError(f"a {type(claim).__name__} can be read only once")
            if not self.deals_in_sequences and isinstance(claim, Set | Mapping):
                proof = f"{name}[:0]"
                raise TypeError(f"a {type(claim).__name__} has no order")
            return self.script.ids(name, self.num_blocks + 1)
        except Exception as error:
            raise self._fault(
                faults.UnknownBlock,
                f"{name} is {shown_short(claim)}, no list of block ids: {error}",
                proof,
            ) from error

    def _pairs(self, name: str) -> list[tuple[int, int]]:
        try:
            return self.script.pairs(name)
        except Exception as error:
            raise self._fault(
                faults.BadMove,
                f"{name} is {shown_short(self.script.value(name))}, no list of (source, "
                f"destination): {error}",
                f"[(one.__index__(), other.__index__()) for one, other in {name}]",
            ) from error

    def _whole(self, value: Any, what: str, kind: type[faults.AllocatorFault]) -> int:
        try:
            return whole(value)
        except TypeError as error:
            raise self._fault(
                kind,
                f"{what} is {shown_short(value)}, no whole number",
                f"assert isinstance({what}, int)",
            ) from error

    def _stats(self) -> dict[str, int]:
        """The counts that the kit knows."""
        if "stats" not in self.has:
            return {}
        stats = self._ask("stats")
        if not isinstance(stats, Mapping):
            raise self._fault(
                faults.WrongStatistics,
                f"a.stats() is {shown_short(stats)}, no mapping",
                "a.stats().keys()",
            )
        return {
            key: self._whole(stats[key], f"a.stats()[{key!r}]", faults.WrongStatistics)
            for key in ("free", "used", "cached")
            if key in stats
        }

    def _ask(self, method: str, *arguments: int) -> Any:
        """What the allocator says of itself; no line of the sequence, unless it raises."""
        try:
            return getattr(self.allocator, method)(*arguments)
        except Exception as error:
            self.script.lines.append(f"a.{method}({', '.join(map(str, arguments))})")
            raise self._crash(error) from error

    # -- contents ------------------------------------------------------------------------------

    @staticmethod
    def _prompt_value(prompt: int, i: int) -> int:
        return (prompt + 1) * 10**12 + i

    def _write_fresh(self, blocks: Iterable[int]) -> list[int]:
        """Writes something into each block that no other block holds."""
        values = [next(self._values) for _ in blocks]
        for block, value in zip(blocks, values, strict=True):
            self._write(block, value)
        return values

    def _write(self, block: int, value: int) -> None:
        if self.owns_memory:
            self._must(f"a.write({block}, {value})")
        self.memory[block] = value

    def _read(self, block: int) -> int | None:
        if self.owns_memory:
            value = self._ask("read", block)
            try:
                return int(value)
            except Exception:  # anything at all may come of a block that is not whole
                return None
        return self.memory.get(block)

    def _copy(self, source: int, destination: int) -> None:
        if not self.owns_memory and source in self.memory:
            self.memory[destination] = self.memory[source]
