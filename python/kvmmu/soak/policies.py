"""The policies that a soak compares: each a configuration of the product itself.

What lives here: :data:`POLICIES`. What never lives here: code of a policy; what differs between two
of them are arguments of :class:`kvmmu.MMU` and of the serving loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidConfig

__all__ = ["POLICIES", "Chosen", "chosen"]


@dataclass(frozen=True, slots=True)
class Chosen:
    """One policy.

    Attributes:
        name: as on the command line.
        about: one sentence.
        options: of :class:`kvmmu.replay.options.Options`, where they differ from the defaults.
    """

    name: str
    about: str
    options: Mapping[str, Any] = field(default_factory=dict)


_SINGLE = {"page_orders": (0,), "hold_blocks": 0, "compaction": False}
_STILL = {"compaction": False}
_STRICT = {"require": "huge"}
_CONTIGUOUS = {**_SINGLE, "prefix_caching": False}

POLICIES = {
    policy.name: policy
    for policy in (
        Chosen(
            "plain",
            "single blocks in the order of release, as vLLM",
            {**_SINGLE, "placement": "fifo", "page_aware": False},
        ),
        Chosen("plain-ordered", "single blocks, lowest address first", _SINGLE),
        Chosen(
            "strict-fifo",
            "complete regions huge or wait, blocks in the order of release "
            "(what the source article calls PagedAttention without compaction)",
            {**_STRICT, **_STILL, "placement": "fifo", "page_aware": False},
        ),
        Chosen("strict", "complete regions huge or wait", {**_STRICT, **_STILL}),
        Chosen("fallback", "huge where a huge page is free (the default without moves)", _STILL),
        Chosen(
            "restart",
            "strict; the pool is emptied when the head has waited 3 s for a shape",
            {**_STRICT, **_STILL, "restart_after_s": 3.0},
        ),
        Chosen("strict-compaction", "strict, with moves", _STRICT),
        Chosen("compaction", "the default: huge where free, with moves"),
        Chosen(
            "contiguous-max",
            "one run a request, for the longest request there is",
            {**_CONTIGUOUS, "reserve": "max"},
        ),
        Chosen(
            "contiguous-pow2",
            "one run a request, for its output rounded up to a power of two",
            {**_CONTIGUOUS, "reserve": "pow2"},
        ),
        Chosen(
            "contiguous-oracle",
            "one run a request, for exactly what it will need",
            {**_CONTIGUOUS, "reserve": "oracle"},
        ),
    )
}


def chosen(names: Sequence[str]) -> list[Chosen]:
    """Policies by name, each once; none: all.

    Raises:
        InvalidConfig: an unknown name.
    """
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        raise InvalidConfig(f"--policy: {', '.join(unknown)} given, allowed: {', '.join(POLICIES)}")
    return [POLICIES[name] for name in dict.fromkeys(names)] or list(POLICIES.values())
