"""The requests of a scenario, from a seed.

What lives here: :func:`requests`, arrivals, lengths, shared texts and continuations. What never
lives here: policies, the clock of the serving loop.

Everything is drawn ahead, from streams of their own (arrivals; kinds; lengths; texts), so that the
same seed gives the same requests to every policy, and a rate that is scaled changes arrivals alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import InvalidConfig
from ..replay.sample import lognormal
from ..replay.traces import TRACE_BLOCK, Trace
from .scenario import Lengths, Phase, Scenario, Turns

__all__ = ["MAX_REQUESTS", "requests"]

MAX_REQUESTS = 20_000_000
MAX_PHASES = 1_000_000
"""Stretches of one rate in all hours together."""
MAX_GROUPS = 100_000_000
"""Groups of 512 tokens of all prompts together, and of all shared texts: 8 bytes each."""
I64 = npt.NDArray[np.int64]


def requests(
    scenario: Scenario, seed: int, *, trace: Trace | None = None, rate: float = 1.0
) -> Trace:
    """All requests of a run.

    Args:
        scenario: what arrives.
        seed: makes them.
        trace: the real one, for a scenario that takes one.
        rate: times as many requests a second as the scenario says.

    Raises:
        InvalidConfig: a trace is missing or not wanted, or these are too many requests.
    """
    if scenario.trace is not None:
        return _traced(scenario, trace, rate)
    if trace is not None:
        raise InvalidConfig(
            f"--trace: {trace.name} given, allowed: with scenarios that take a trace"
        )
    return _Drawn(scenario, seed, rate).trace()


def _traced(scenario: Scenario, trace: Trace | None, rate: float) -> Trace:
    assert scenario.trace is not None
    if trace is None:
        raise InvalidConfig("--trace: none given, needed: the file of a trace (see docs/proof.md)")
    if scenario.trace.limit is not None:
        trace = trace.head(scenario.trace.limit)
    arrival = trace.arrival_s / (scenario.trace.speed * rate)
    within = int(np.searchsorted(arrival, scenario.hours * 3600, side="right"))
    first = trace.head(max(within, 1))
    return Trace(
        name=trace.name,
        kind=trace.kind,
        arrival_s=arrival[: len(first)],
        prompt_tokens=first.prompt_tokens,
        output_tokens=first.output_tokens,
        hash_ids=first.hash_ids,
        hash_starts=first.hash_starts,
    )


class _Drawn:
    """Requests of kinds and phases."""

    def __init__(self, scenario: Scenario, seed: int, rate: float) -> None:
        self._scenario = scenario
        self._rate = rate
        streams = np.random.SeedSequence([seed, 5]).spawn(4)
        self._arrivals, self._kinds, self._lengths, self._texts = map(
            np.random.default_rng, streams
        )

    def trace(self) -> Trace:
        arrival, kind = self._arrive()
        count = len(arrival)
        prompts = np.zeros(count, dtype=np.int64)
        outputs = np.zeros(count, dtype=np.int64)
        for number, of_kind in enumerate(self._scenario.kinds):
            where = np.flatnonzero(kind == number)
            prompts[where] = np.maximum(draw(of_kind.prompt, len(where), self._lengths), 1)
            outputs[where] = np.maximum(draw(of_kind.output, len(where), self._lengths), 1)
        ids, starts = self._shared(kind, prompts)
        trace = Trace(
            name=self._scenario.title,
            kind="scenario",
            arrival_s=arrival,
            prompt_tokens=prompts,
            output_tokens=outputs,
            hash_ids=ids,
            hash_starts=starts,
        )
        return self._with_turns(trace, kind)

    def _arrive(self) -> tuple[npt.NDArray[np.float64], I64]:
        """Times of arrival, and kinds."""
        end, at = self._scenario.hours * 3600, 0.0
        phases = self._scenario.phases
        stretches = len(phases) * end / sum(phase.length for phase in phases)
        if stretches > MAX_PHASES:
            raise InvalidConfig(
                f"phases: {stretches:.0f} stretches in {self._scenario.hours:g} hours, "
                f"allowed: at most {MAX_PHASES}"
            )
        times: list[npt.NDArray[np.float64]] = []
        kinds: list[I64] = []
        total = 0
        while at < end:
            for phase in phases:
                length = min(phase.length, end - at)
                if length <= 0:
                    break
                count = int(self._arrivals.poisson(phase.rate * self._rate * length))
                total += count
                if total > MAX_REQUESTS:
                    raise InvalidConfig(
                        f"{total} requests in {at / 3600:.1f} of {self._scenario.hours:g} hours, "
                        f"allowed: at most {MAX_REQUESTS}"
                    )
                times.append(at + np.sort(self._arrivals.uniform(0, length, count)))
                kinds.append(
                    self._kinds.choice(len(self._scenario.kinds), count, p=self._shares(phase))
                )
                at += length
        if not total:
            raise InvalidConfig(
                f"no request arrives in {self._scenario.hours:g} hours, needed: one or more"
            )
        return np.concatenate(times), np.concatenate(kinds)

    def _shares(self, phase: Phase) -> npt.NDArray[np.float64]:
        wanted = phase.only
        shares = np.array(
            [
                kind.share if wanted is None or kind.name in wanted else 0.0
                for kind in self._scenario.kinds
            ]
        )
        share: npt.NDArray[np.float64] = shares / shares.sum()
        return share

    def _shared(self, kind: I64, prompts: I64) -> tuple[npt.NDArray[np.uint64], I64]:
        """Ids of groups of 512 tokens: those of shared texts, and one of its own for all others.
        The prompts grow by the texts."""
        if all(of_kind.prefix is None for of_kind in self._scenario.kinds):
            return np.empty(0, dtype=np.uint64), np.zeros(len(prompts) + 1, dtype=np.int64)
        shared: list[npt.NDArray[np.uint64] | None] = [None] * len(prompts)
        fresh = 0
        for number, of_kind in enumerate(self._scenario.kinds):
            if of_kind.prefix is None:
                continue
            lengths = draw(of_kind.prefix.tokens, of_kind.prefix.texts, self._texts) // TRACE_BLOCK
            _few_enough(fresh + int(lengths.sum()), f"the texts of {of_kind.name}")
            texts = []
            for length in lengths.tolist():
                texts.append(np.arange(fresh, fresh + length, dtype=np.uint64))
                fresh += length
            where = np.flatnonzero(kind == number)
            for request, text in zip(
                where.tolist(),
                self._texts.integers(0, len(texts), len(where)).tolist(),
                strict=True,
            ):
                shared[request] = texts[text]
                prompts[request] += len(texts[text]) * TRACE_BLOCK
        groups = -(-prompts // TRACE_BLOCK)
        _few_enough(int(groups.sum()), "the prompts")
        starts = np.zeros(len(prompts) + 1, dtype=np.int64)
        np.cumsum(groups, out=starts[1:])
        ids = np.arange(fresh, fresh + int(starts[-1]), dtype=np.uint64)
        for request, text_ids in enumerate(shared):
            if text_ids is not None:
                ids[starts[request] : starts[request] + len(text_ids)] = text_ids
        return ids, starts

    def _with_turns(self, trace: Trace, kind: I64) -> Trace:
        """Adds the continuations of requests that are agents, behind all others."""
        agents = {
            number: of_kind.turns
            for number, of_kind in enumerate(self._scenario.kinds)
            if of_kind.turns is not None
        }
        if not agents:
            return trace
        parents: list[int] = []
        pauses: list[float] = []
        prompts: list[int] = []
        outputs: list[int] = []
        base = len(trace)
        for number, turns in agents.items():
            output = self._scenario.kinds[number].output
            for request in np.flatnonzero(kind == number).tolist():
                count = int(draw(turns.count, 1, self._lengths)[0])
                tokens = int(trace.prompt_tokens[request] + trace.output_tokens[request])
                parent = request
                for _ in range(count - 1):
                    first = base + len(parents)
                    for added, answer in self._branches(turns, output):
                        parents.append(parent)
                        pauses.append(
                            float(self._lengths.uniform(turns.pause_low, turns.pause_high))
                        )
                        prompts.append(tokens + added)
                        outputs.append(answer)
                    parent = first
                    tokens = prompts[first - base] + outputs[first - base]
                    if base + len(parents) > MAX_REQUESTS:
                        raise InvalidConfig(
                            f"{base + len(parents)} requests or more with all turns, "
                            f"allowed: at most {MAX_REQUESTS}"
                        )
        more = len(parents)
        last = np.full(more, trace.hash_starts[-1], dtype=np.int64)
        return Trace(
            name=trace.name,
            kind=trace.kind,
            arrival_s=np.concatenate([trace.arrival_s, np.array(pauses)]),
            prompt_tokens=np.concatenate([trace.prompt_tokens, np.array(prompts, dtype=np.int64)]),
            output_tokens=np.concatenate([trace.output_tokens, np.array(outputs, dtype=np.int64)]),
            hash_ids=trace.hash_ids,
            hash_starts=np.concatenate([trace.hash_starts, last]),
            parents=np.concatenate(
                [np.full(base, -1, dtype=np.int64), np.array(parents, dtype=np.int64)]
            ),
        )

    def _branches(self, turns: Turns, output: Lengths) -> list[tuple[int, int]]:
        """(tokens that the tool adds, tokens generated then) of one turn's continuations."""
        n = turns.branches if self._lengths.random() < turns.branching else 1
        added = np.maximum(draw(turns.adds, n, self._lengths), 1).tolist()
        return list(zip(added, np.maximum(draw(output, n, self._lengths), 1).tolist(), strict=True))


def _few_enough(groups: int, what: str) -> None:
    if groups > MAX_GROUPS:
        raise InvalidConfig(
            f"{groups} groups of {TRACE_BLOCK} tokens in {what}, allowed: at most {MAX_GROUPS}"
        )


def draw(lengths: Lengths, count: int, random: np.random.Generator) -> I64:
    """int64 [count]: so many lengths."""
    if lengths.fixed is not None:
        return np.full(count, lengths.fixed, dtype=np.int64)
    if lengths.uniform is not None:
        return random.integers(lengths.uniform.low, lengths.uniform.high, count, endpoint=True)
    if lengths.lognormal is not None:
        of = lengths.lognormal
        return lognormal(random, count, mean=of.mean, sigma=of.sigma, low=of.low, high=of.high)
    assert lengths.mixture is not None
    which = random.choice(len(lengths.mixture), count, p=[part.share for part in lengths.mixture])
    out = np.zeros(count, dtype=np.int64)
    for number, part in enumerate(lengths.mixture):
        where = np.flatnonzero(which == number)
        out[where] = draw(part.lengths, len(where), random)
    return out
