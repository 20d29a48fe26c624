"""What a replay is asked for.

What lives here: :class:`Options`, which refuses a value out of range when it is made and says
what is allowed. What never lives here: the command line (it only fills this in) and policy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InvalidConfig

__all__ = ["MAX_BLOCKS", "MAX_BLOCK_SIZE", "MAX_ROWS", "MAX_SEQUENCE_BLOCKS", "Options"]

MAX_BLOCKS = 2**31 - 2
MAX_BLOCK_SIZE = 4096
MAX_ROWS = 65_536
MAX_SEQUENCE_BLOCKS = 262_144

_RANGES: dict[str, tuple[float, float]] = {
    "blocks": (1, MAX_BLOCKS),
    "hold_blocks": (0, 512),
    "block_size": (1, MAX_BLOCK_SIZE),
    "budget_blocks": (1, MAX_BLOCKS),
    "inject_faults": (0, 1),
    "max_running": (1, MAX_ROWS),
    "prefill_tokens_per_s": (1, 1e12),
    "step_ms": (0.001, 60_000),
    "speed": (1e-6, 1e6),
    "seed": (0, 2**63 - 1),
    "contiguous": (0, 2**30),
    "granule": (1, 512),
    "measure_every": (1, 10**6),
    "windows_below": (0, 1),
    "gather_least": (0, 1),
}
_OPTIONAL_RANGES: dict[str, tuple[float, float]] = {
    "timeout_s": (0.001, 10**7),
    "restart_after_s": (0.001, 10**7),
    "spare": (0.001, 1),
}
_CHOICES = {
    "placement": ("address", "fullest", "fifo", "scatter"),
    "eviction": ("lru", "lfu"),
}
_OPTIONAL_CHOICES = {
    "require": ("huge",),
    "reserve": ("max", "pow2", "oracle"),
    "sabotage": ("skip-copy", "skip-commit", "early-reuse", "wrong-block"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of one replay.

    Attributes:
        blocks: usable blocks of the pool.
        block_size: tokens a block.
        compaction: whether blocks are moved between steps.
        budget_blocks: most blocks that one pass of compaction moves.
        guarantee: keep the guarantee with so many windows of slack; None: the default trigger.
        inject_faults: share of passes, 0 to 1, in which the mover fails on its way.
        max_running: rows of the block table, which is how many requests run at once.
        prefill_tokens_per_s: prompt tokens computed in a second of simulated time, all requests
            together.
        step_ms: simulated time of a step.
        speed: how much faster than in the trace the requests arrive.
        seed: for tokens, verified positions and ``placement="scatter"``.
        placement: ``"address"``, ``"fullest"``, ``"fifo"`` or ``"scatter"`` (worst case).
        page_orders: page sizes of the pool, each 2**order blocks; 0 among them.
        hold_blocks: empty blocks kept behind a sequence to grow into, at most.
        eviction: ``"lru"`` or ``"lfu"``.
        page_aware: whether, of the oldest tenth, blocks in windows with few live ones go first.
        one_at_a_time: each request alone, without a clock; see :mod:`.alone`. It asks what a cache
            of this size finds, so blocks are single ones, and the oldest go first: page sizes,
            holds and ``page_aware`` count for nothing.
        reserved_blocks: left available when a request is admitted while others run; None: a
            hundredth of the pool.
        preheat_pages: of the largest pages, so many are touched before the first request.
        further: arguments of :class:`kvmmu.MMU` that no option stands for.
        verify: read positions back through the exported tables and compare.
        sabotage: what to break on purpose; turns ``verify`` on.
        contents: whether bytes are stored at all. Without them nothing can be verified, and moves
            are planned and committed and copy nothing.
        prefix_caching: whether blocks of requests that have ended are kept for later prompts.
        windows_below, gather_least: as of :class:`kvmmu.MMU`.
        require: ``"huge"``: a request waits until each complete region of its prompt is a huge
            page.
        contiguous: so many tokens at the start of each request lie in one run.
        reserve: each request reserves one run for all that it may ever need, as before paging:
            ``"max"`` the longest request of the trace, ``"pow2"`` its prompt and the next power of
            two of its output, ``"oracle"`` exactly what it will need.
        timeout_s: simulated seconds after which a client leaves that was never admitted; None: it
            stays.
        restart_after_s: after so many seconds of a head that waits for a shape the pool is
            emptied, and all that ran waits to run again; None: never. At most once in
            ``restart_every_s``, and for ``restart_takes_s`` nothing runs.
        spare: share of the pool that stays when memory is given back (see :mod:`.returning`); None:
            none is given back.
        granule: blocks of the smallest group that can be given back.
        measure_every: steps between two looks at the whole memory.

    Raises:
        InvalidConfig: names the option, what was given and what is allowed.
    """

    blocks: int = 90_000
    block_size: int = 16
    compaction: bool = True
    budget_blocks: int = 32
    guarantee: int | None = None
    inject_faults: float = 0.0
    max_running: int = 256
    prefill_tokens_per_s: float = 200_000.0
    step_ms: float = 30.0
    speed: float = 1.0
    seed: int = 0
    placement: str = "address"
    page_orders: tuple[int, ...] = (0, 2, 9)
    hold_blocks: int = 8
    eviction: str = "lru"
    page_aware: bool = True
    reserved_blocks: int | None = None
    preheat_pages: int = 0
    further: Mapping[str, Any] = field(default_factory=dict)
    one_at_a_time: bool = False
    verify: bool = False
    sabotage: str | None = None
    contents: bool = True
    prefix_caching: bool = True
    windows_below: float = 0.8
    gather_least: float = 0.1
    require: str | None = None
    contiguous: int = 0
    reserve: str | None = None
    timeout_s: float | None = None
    restart_after_s: float | None = None
    restart_every_s: float = 600.0
    restart_takes_s: float = 20.0
    spare: float | None = None
    granule: int = 64
    measure_every: int = 1

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            in_range(name, getattr(self, name), low, high)
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise InvalidConfig(f"{_flag(name)}: {value!r} given, allowed: {_or(choices)}")
        for name, (low, high) in _OPTIONAL_RANGES.items():
            value = getattr(self, name)
            if value is not None:
                in_range(name, value, low, high)
        for name, choices in _OPTIONAL_CHOICES.items():
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise InvalidConfig(f"{_flag(name)}: {value!r} given, allowed: {_or(choices)}")
        if self.reserved_blocks is not None:
            in_range("reserved_blocks", self.reserved_blocks, 0, self.blocks - 1)
        if self.guarantee is not None:
            in_range("guarantee_slack", self.guarantee, 0, MAX_BLOCKS)
            if self.placement != "address":
                raise InvalidConfig(
                    f"--guarantee: given with --placement {self.placement}, "
                    "allowed: with --placement address"
                )
        if 0 not in self.page_orders or not all(0 <= order <= 9 for order in self.page_orders):
            given = ",".join(map(str, self.page_orders))
            raise InvalidConfig(f"--page-orders: {given} given, allowed: 0 to 9, 0 among them")
        if self.one_at_a_time:
            plain = {"page_orders": (0,), "hold_blocks": 0, "page_aware": False}
            for name, value in plain.items():
                object.__setattr__(self, name, value)
        if self.reserve is not None and (self.require or self.contiguous):
            raise InvalidConfig(
                f"--reserve: {self.reserve!r} given with a shape, allowed: one of the two"
            )
        if self.sabotage is not None:
            object.__setattr__(self, "verify", True)
        if self.verify and not self.contents:
            raise InvalidConfig("--verify: given without contents, allowed: with them")

    @property
    def headroom(self) -> int:
        """Blocks that admission leaves to running requests."""
        return self.blocks // 100 if self.reserved_blocks is None else self.reserved_blocks

    @property
    def step_s(self) -> float:
        """Simulated seconds a step."""
        return self.step_ms / 1000

    @property
    def prefill_tokens_per_step(self) -> float:
        return self.prefill_tokens_per_s * self.step_s


def in_range(name: str, value: float, low: float, high: float) -> None:
    """Raises InvalidConfig unless ``low <= value <= high``; NaN is never in range."""
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidConfig(
            f"{_flag(name)}: {_shown(value)} given, allowed: {_shown(low)} to {_shown(high)}"
        )


def _shown(number: float) -> str:
    """Whole numbers digit by digit: those that differ in the last must not look the same."""
    return str(number) if isinstance(number, int) else f"{number:.12g}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _or(choices: tuple[str, ...]) -> str:
    if len(choices) == 1:
        return choices[0]
    return f"{', '.join(choices[:-1])} or {choices[-1]}"
