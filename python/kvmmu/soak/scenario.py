"""What a scenario file may say.

What lives here: the models of a scenario, and :func:`load`, which finds one by its name or path.
What never lives here: drawing requests (see :mod:`.workload`), policies.

A scenario is a load and a machine, not a policy: arrivals, lengths, pool, step time, prefill rate,
copy rate, patience. Copy one (``kvmmu soak NAME --show > mine.yaml``), change it, give its path.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Annotated

from pydantic import Field

from ..config.files import Document, Keys, Section, check, read
from ..config.units import Bytes, Seconds, Share
from ..errors import InvalidConfig

__all__ = ["Kind", "Lengths", "Phase", "Scenario", "Turns", "load", "names", "text"]

MAX_HOURS = 24 * 31
MAX_TOKENS = 1 << 24
Tokens = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Rate = Annotated[float, Field(ge=0, le=10_000)]


class Lognormal(Section):
    mean: Annotated[float, Field(gt=0, le=MAX_TOKENS)]
    """Of the distribution before it is cut."""
    sigma: Annotated[float, Field(ge=0, le=5)]
    low: Tokens
    high: Tokens

    def contradictions(self) -> Iterator[tuple[Keys, str]]:
        if self.low > self.high:
            yield ("low",), f"{self.low} given, allowed: at most high, {self.high}"


class Uniform(Section):
    low: Tokens
    high: Tokens

    def contradictions(self) -> Iterator[tuple[Keys, str]]:
        if self.low > self.high:
            yield ("low",), f"{self.low} given, allowed: at most high, {self.high}"


class Lengths(Section):
    """How long something is: one of the four."""

    fixed: Tokens | None = None
    uniform: Uniform | None = None
    lognormal: Lognormal | None = None
    mixture: Annotated[list[Part], Field(min_length=1, max_length=16)] | None = None

    def contradictions(self) -> Iterator[tuple[Keys, str]]:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            said = ", ".join(given) or "none"
            yield (), f"{said} given, allowed: one of {', '.join(type(self).model_fields)}"
        if self.mixture is not None:
            total = sum(part.share for part in self.mixture)
            if abs(total - 1) > 1e-9:
                yield ("mixture",), f"shares add up to {total:g}, allowed: to 1"


class Part(Section):
    share: Share
    lengths: Lengths


class SharedPrefix(Section):
    """The prompt begins with one of a few texts that others begin with too."""

    texts: Annotated[int, Field(ge=1, le=100_000)]
    tokens: Lengths
    """Of each text; whole groups of 512 tokens are shared."""


class Turns(Section):
    """The request is an agent: it ends, waits for a tool while its KV stays, and goes on."""

    count: Lengths
    """Turns of one agent, the first included."""
    pause_low: Seconds
    pause_high: Seconds
    adds: Lengths
    """Tokens that the tool's answer adds to the prompt."""
    branches: Annotated[int, Field(ge=1, le=16)] = 1
    """Continuations where it branches."""
    branching: Share = 0.0
    """Share of turns that are followed by so many at once; all but the first of them end there."""

    def contradictions(self) -> Iterator[tuple[Keys, str]]:
        if self.pause_low > self.pause_high:
            yield (
                ("pause_low",),
                f"{self.pause_low:g} s given, allowed: at most pause_high, {self.pause_high:g} s",
            )


class Kind(Section):
    """One kind of request."""

    name: Annotated[str, Field(min_length=1, max_length=40)]
    share: Share
    """Of the requests, where a phase does not say otherwise."""
    prompt: Lengths
    output: Lengths
    prefix: SharedPrefix | None = None
    turns: Turns | None = None


class Phase(Section):
    """A stretch of time with one rate. Phases follow each other, again and again."""

    length: Seconds
    rate: Rate
    """Requests a second, Poisson."""
    only: list[str] | None = None
    """Kinds that arrive in it; the others' shares are left out."""

    def contradictions(self) -> Iterator[tuple[Keys, str]]:
        if self.length <= 0:
            yield ("length",), f"{self.length:g} s given, allowed: above 0"


class TraceOf(Section):
    """A trace of real requests instead of kinds and phases; the file is given at run time."""

    speed: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """How much faster than traced."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Only the first requests."""


class Pool(Section):
    num_blocks: Annotated[int, Field(ge=2, le=2**31 - 2)]
    block_size: Annotated[int, Field(ge=1, le=4096)] = 16
    """Tokens a block."""
    block_bytes: Bytes
    """Of all layers together, on all devices: what one move copies."""
    granule: Annotated[int, Field(ge=1, le=512)] = 64
    """Blocks of the smallest group that can be given back."""


class Server(Section):
    step: Seconds = 0.03
    """Simulated time of a step, whatever is in it."""
    prefill_tokens_per_s: Annotated[float, Field(ge=1, le=1e12)] = 200_000.0
    max_running: Annotated[int, Field(ge=1, le=65_536)] = 256
    timeout: Seconds = 30.0
    """After which a client leaves that was not admitted."""
    copy_rate: Bytes
    """Bytes a second that a move copies: what moves cost in time is computed from it."""
    prefix_caching: bool = True
    contiguous: Tokens = 0
    """Tokens at the start of each request that must lie in one run."""
    spare: Share | None = None
    """Of the pool, kept when memory is given back; none: no memory is given back."""

    def contradictions(self) -> Iterator[tuple[Keys, str]]:
        # The ranges of the serving loop, whose own words are options of another command.
        for name, low, high in (("step", 1e-6, 60.0), ("timeout", 0.001, 1e7)):
            value = getattr(self, name)
            if not low <= value <= high:
                yield (name,), f"{value:g} s given, allowed: {low:g} to {high:.12g} s"
        if self.copy_rate <= 0:
            yield ("copy_rate",), "0 given, allowed: above 0"
        if self.spare is not None and self.spare < 0.001:
            yield ("spare",), f"{self.spare:g} given, allowed: .001 to 1, or none"


class Scenario(Section):
    """A load and the machine that serves it."""

    title: Annotated[str, Field(min_length=1, max_length=100)]
    about: str = ""
    hours: Annotated[float, Field(gt=0, le=MAX_HOURS)]
    """Simulated time."""
    warm_up: Seconds = 600.0
    """At the beginning, of which nothing is counted."""
    pool: Pool
    server: Server
    kinds: Annotated[tuple[Kind, ...], Field(max_length=16)] = ()
    phases: Annotated[tuple[Phase, ...], Field(max_length=1000)] = ()
    trace: TraceOf | None = None

    def contradictions(self) -> Iterator[tuple[Keys, str]]:
        if self.trace is None and not (self.kinds and self.phases):
            yield (), "no requests, needed: kinds and phases, or trace"
        if self.trace is not None and (self.kinds or self.phases):
            yield ("trace",), "given with kinds or phases, allowed: one of the two"
        if self.warm_up >= self.hours * 3600:
            yield ("warm_up",), f"{self.warm_up:g} s given, allowed: less than hours"
        known = [kind.name for kind in self.kinds]
        if len(set(known)) < len(known):
            yield ("kinds",), f"names {', '.join(known)}, allowed: each once"
        total = sum(kind.share for kind in self.kinds)
        if self.kinds and abs(total - 1) > 1e-9:
            yield ("kinds",), f"shares add up to {total:g}, allowed: to 1"
        for index, phase in enumerate(self.phases):
            unknown = [name for name in phase.only or () if name not in known]
            if unknown:
                said = f"{', '.join(unknown)} given, allowed: {', '.join(known)}"
                yield ("phases", index, "only"), said
            elif phase.only is not None and not any(
                kind.share for kind in self.kinds if kind.name in phase.only
            ):
                yield ("phases", index, "only"), "no kind with a share above 0, needed: one"
        if self.phases and not any(phase.rate for phase in self.phases):
            yield ("phases",), "no rate above 0, needed: one"


def names() -> list[str]:
    """Scenarios that come with kvmmu."""
    folder = resources.files(__package__).joinpath("scenarios")
    return sorted(file.name[:-5] for file in folder.iterdir() if file.name.endswith(".yaml"))


def text(name: str) -> str:
    """The file of a scenario that comes with kvmmu, to copy and change."""
    _known(name)
    return resources.files(__package__).joinpath("scenarios", f"{name}.yaml").read_text("utf-8")


def load(name: str) -> Scenario:
    """A scenario by its name, or by the path of a file.

    Raises:
        InvalidConfig: no such scenario, or all faults of the file with their lines.
    """
    if name.endswith((".yaml", ".yml", ".json")) or "/" in name or Path(name).is_file():
        return check(Scenario, read(name))
    _known(name)
    with resources.as_file(resources.files(__package__).joinpath("scenarios")) as folder:
        return check(Scenario, read(folder / f"{name}.yaml"))


def of(data: dict[str, object]) -> Scenario:
    """A scenario made of a dict."""
    return check(Scenario, Document.of(data, "scenario"))


def _known(name: str) -> None:
    if name not in names():
        raise InvalidConfig(
            f"SCENARIO: {name} given, allowed: {', '.join(names())}, or the path of a YAML file"
        )
