"""kvmmu: a memory-management unit for the KV caches of LLM serving.

``import kvmmu`` loads nothing: each name brings its module when it is first used. NumPy is all
that the names in ``__all__`` need. ``KVCache`` and what belongs to it (``Sequence``, ``Step``,
``Batch``, ``LAYOUTS``, ``Layer``, ``Layers``, ``attend``) are here as well and need torch
(``kvmmu[torch]``): without it they raise ``MissingExtra``. So does ``Config`` without
``kvmmu[config]``.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Not in __all__, which is what can be had with NumPy alone.
    from .attention import attend as attend
    from .cache import Batch as Batch
    from .cache import KVCache as KVCache
    from .cache import Sequence as Sequence
    from .cache import Step as Step
    from .config import Config as Config
    from .layout import LAYOUTS as LAYOUTS
    from .layout import Layer as Layer
    from .layout import Layers as Layers

if TYPE_CHECKING:
    from ._core import (
        MMU,
        BlockMap,
        BlockTables,
        DirtyRows,
        Events,
        Measure,
        Moves,
        Plan,
        Pool,
        Quote,
        SequenceInfo,
        __version__,
    )
    from .cascade import CascadeLevel, PrefixGroups, prefix_groups
    from .channels import PipeChannel, TorchChannel
    from .compaction import compact, run_plan
    from .errors import (
        ConcurrentUse,
        CUDAUnavailable,
        Fragmented,
        InternalError,
        InvalidBlock,
        InvalidConfig,
        InvalidLease,
        InvalidMessage,
        InvalidPlan,
        InvalidRecording,
        InvalidStep,
        KVCacheError,
        LimitExceeded,
        MissingExtra,
        NotReturnable,
        OutOfBlocks,
        OutOfTables,
        RankFailed,
        RankLost,
        RankTimeout,
        Reserved,
        UnknownSequence,
        UsedAfterFork,
    )
    from .give_back import HostPages, ReturnsMemory, Shrunk
    from .leases import Lease
    from .movers import CPUMover, Mover, SupportsMove
    from .ranks import Channel, PendingMoves, RankedCompaction, serve_rank
    from .snapshots import Snapshot, snapshot
    from .storage import Region, Storage
    from .transfer import block_runs, byte_ranges, pair_ranges, pair_runs

__all__ = [
    "MMU",
    "BlockMap",
    "BlockTables",
    "CPUMover",
    "CUDAUnavailable",
    "CascadeLevel",
    "Channel",
    "ConcurrentUse",
    "DirtyRows",
    "Events",
    "Fragmented",
    "HostPages",
    "InternalError",
    "InvalidBlock",
    "InvalidConfig",
    "InvalidLease",
    "InvalidMessage",
    "InvalidPlan",
    "InvalidRecording",
    "InvalidStep",
    "KVCacheError",
    "Lease",
    "LimitExceeded",
    "Measure",
    "MissingExtra",
    "Mover",
    "Moves",
    "NotReturnable",
    "OutOfBlocks",
    "OutOfTables",
    "PendingMoves",
    "PipeChannel",
    "Plan",
    "Pool",
    "PrefixGroups",
    "Quote",
    "RankFailed",
    "RankLost",
    "RankTimeout",
    "RankedCompaction",
    "Region",
    "Reserved",
    "ReturnsMemory",
    "SequenceInfo",
    "Shrunk",
    "Snapshot",
    "Storage",
    "SupportsMove",
    "TorchChannel",
    "UnknownSequence",
    "UsedAfterFork",
    "__version__",
    "block_runs",
    "byte_ranges",
    "compact",
    "pair_ranges",
    "pair_runs",
    "prefix_groups",
    "run_plan",
    "serve_rank",
    "snapshot",
]

_HOME = {
    "Lease": "leases",
    "BlockMap": "_core",
    "BlockTables": "_core",
    "CPUMover": "movers",
    "CascadeLevel": "cascade",
    "Channel": "ranks",
    "DirtyRows": "_core",
    "Events": "_core",
    "MMU": "_core",
    "Measure": "_core",
    "Mover": "movers",
    "Moves": "_core",
    "PendingMoves": "ranks",
    "PipeChannel": "channels",
    "Plan": "_core",
    "Pool": "_core",
    "PrefixGroups": "cascade",
    "Quote": "_core",
    "RankedCompaction": "ranks",
    "HostPages": "give_back",
    "Region": "storage",
    "ReturnsMemory": "give_back",
    "Shrunk": "give_back",
    "SequenceInfo": "_core",
    "Storage": "storage",
    "SupportsMove": "movers",
    "TorchChannel": "channels",
    "__version__": "_core",
    "block_runs": "transfer",
    "byte_ranges": "transfer",
    "compact": "compaction",
    "pair_ranges": "transfer",
    "pair_runs": "transfer",
    "prefix_groups": "cascade",
    "run_plan": "compaction",
    "serve_rank": "ranks",
    "Snapshot": "snapshots",
    "snapshot": "snapshots",
}
"""The module that each name lives in; whatever else is in ``__all__`` is an error."""

_EXTRA = {
    "Batch": "cache",
    "Config": "config",
    "KVCache": "cache",
    "LAYOUTS": "layout",
    "Layer": "layout",
    "Layers": "layout",
    "Sequence": "cache",
    "Step": "cache",
    "attend": "attention",
}
"""The same for names that need torch, or pydantic and PyYAML."""


def _is_there(name: str) -> bool:
    """Whether what a name needs is installed. Nothing is imported."""
    needed = ("pydantic", "yaml") if _EXTRA[name] == "config" else ("torch",)
    return all(find_spec(library) is not None for library in needed)


def __getattr__(name: str) -> Any:
    if name not in __all__ and name not in _EXTRA:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _EXTRA.get(name) or _HOME.get(name, "errors")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    # Names that cannot be had would end whoever asks for each of them: help() does.
    return sorted({*globals(), *__all__, *filter(_is_there, _EXTRA)})
