"""When compaction pays, as rules.

What lives here: :data:`RULES`, one table, and :func:`judge`, which finds those that hold for a
load. What never lives here: figures; those are measured by ``kvmmu soak`` and stand in
docs/proof.md, which each rule names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

__all__ = ["RULES", "Rule", "Situation", "judge"]

PROOF = "docs/proof.md"
Verdict = Literal["pays", "little", "nothing", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known of a load.

    Attributes:
        live: mean share of the pool that sequences hold (not what only the cache holds); None: not
            known.
        huge_share: share of blocks in complete regions of 512; None: not known.
        shifts: the share of long requests changes within minutes.
        prefixes: prompts share prefixes.
        returns_memory: memory is given back while serving.
        transfers: KV goes to other machines or to the host by runs.
        views: attention without a paged kernel reads runs in place.
        strict: a complete region must be a huge page, or the request waits.
    """

    live: float | None = None
    huge_share: float | None = None
    shifts: bool = False
    prefixes: bool = False
    returns_memory: bool = False
    transfers: bool = False
    views: bool = False
    strict: bool = False


@dataclass(frozen=True, slots=True)
class Rule:
    """One sentence about compaction, and when it holds.

    Attributes:
        name: short.
        holds: of a situation.
        verdict: whether compaction pays there.
        says: what it does there, and what does it without.
        source: where that was measured.
    """

    name: str
    holds: Callable[[Situation], bool]
    verdict: Verdict
    says: str
    source: str = PROOF


def _live(situation: Situation, low: float, high: float = 1.01) -> bool:
    return situation.live is not None and low <= situation.live < high


RULES: tuple[Rule, ...] = (
    Rule(
        "concurrency",
        lambda s: not s.strict,
        "nothing",
        "as many requests run as with plain paging: smaller pages serve where no large one is "
        "free, so nobody waits for a shape",
        f"{PROOF}, concurrency",
    ),
    Rule(
        "strict huge pages",
        lambda s: s.strict,
        "pays",
        "requests that insist on huge pages no longer wait for them; allowing smaller pages does "
        "the same without a move",
        f"{PROOF}, article-128k",
    ),
    Rule(
        "load shifts",
        lambda s: s.shifts,
        "pays",
        "after a time of short requests long ones get huge pages again, which neither placement "
        "nor restarts reach",
        f"{PROOF}, shift",
    ),
    Rule(
        "full prefix cache",
        lambda s: s.prefixes and _live(s, 0.75),
        "pays",
        "with nearly all memory live, huge pages are made by moving instead of by dropping cached "
        "prefixes",
        f"{PROOF}, mooncake",
    ),
    Rule(
        "prefix cache at medium load",
        lambda s: s.prefixes and _live(s, 1 / 3, 0.75),
        "little",
        "page-aware eviction and aligned placement do most of it",
        f"{PROOF}, mooncake",
    ),
    Rule(
        "memory given back",
        lambda s: s.returns_memory and (s.live is None or s.live > 1 / 3),
        "pays",
        "free blocks come together in whole granules, which can go back under load",
        f"{PROOF}, drop",
    ),
    Rule(
        "transfers",
        lambda s: s.transfers and (s.live is None or s.live >= 0.75),
        "pays",
        "sequences lie in fewer runs, so a transfer takes fewer descriptors; up to 75 % live the "
        "hold behind a sequence does that without a move",
        f"{PROOF}, transfer",
    ),
    Rule(
        "transfers at medium load",
        lambda s: s.transfers and s.live is not None and s.live < 0.75,
        "little",
        "the hold behind a sequence keeps it in few runs without a move",
        f"{PROOF}, transfer",
    ),
    Rule(
        "attention by views",
        lambda s: s.views,
        "pays",
        "a sequence in few runs is read in place instead of being gathered in each step",
        f"{PROOF}, article-128k",
    ),
    Rule(
        "short requests only",
        lambda s: s.huge_share is not None and s.huge_share < 0.01,
        "nothing",
        "no sequence reaches a huge page; address order keeps held memory within a few percent",
        f"{PROOF}, azure",
    ),
    Rule(
        "a third live",
        lambda s: s.live is not None and s.live <= 1 / 3,
        "nothing",
        "page-aware eviction finds whole windows, and loses no hits for it",
        f"{PROOF}, mooncake",
    ),
    Rule(
        "steady up to three quarters",
        lambda s: not s.shifts and _live(s, 1 / 3, 0.75),
        "nothing",
        "placement alone covers long sequences with huge pages",
        f"{PROOF}, sensitivity",
    ),
    Rule(
        "above three quarters",
        lambda s: _live(s, 0.75) and (s.huge_share is None or s.huge_share >= 0.01),
        "pays",
        "long sequences keep huge pages, and windows come free, that placement alone loses",
        f"{PROOF}, sensitivity",
    ),
)
"""Each holds by itself; a load meets several."""

_ORDER: tuple[Verdict, ...] = ("pays", "little", "nothing", "unknown")


def judge(situation: Situation) -> tuple[Verdict, tuple[Rule, ...]]:
    """The strongest verdict of the rules that hold, and those rules. ``"unknown"``: too little is
    known of the load to say more than that concurrency stays the same."""
    found = tuple(rule for rule in RULES if rule.holds(situation))
    telling = [rule.verdict for rule in found if rule.name != "concurrency"]
    if not telling:
        return "unknown", found
    return min(telling, key=_ORDER.index), found
