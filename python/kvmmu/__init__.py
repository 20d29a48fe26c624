"""kvmmu: a memory-management unit for the KV caches of LLM serving.

``import kvmmu`` loads nothing: each name brings its module when it is first used. NumPy is all
that the names below need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._core import (
        MMU,
        BlockTables,
        Measure,
        Moves,
        Plan,
        Quote,
        SequenceInfo,
        __version__,
    )
    from .channels import PipeChannel, TorchChannel
    from .compaction import compact, run_plan
    from .errors import (
        ConcurrentUse,
        Fragmented,
        InternalError,
        InvalidBlock,
        InvalidConfig,
        InvalidMessage,
        InvalidPlan,
        InvalidStep,
        KVCacheError,
        LimitExceeded,
        MissingExtra,
        OutOfBlocks,
        OutOfTables,
        RankFailed,
        RankLost,
        RankTimeout,
        UnknownSequence,
    )
    from .movers import CPUMover, Mover, SupportsMove
    from .ranks import Channel, PendingMoves, RankedCompaction, serve_rank
    from .storage import Region, Storage
    from .transfer import block_runs, byte_ranges, pair_runs

__all__ = [
    "MMU",
    "BlockTables",
    "CPUMover",
    "Channel",
    "ConcurrentUse",
    "Fragmented",
    "InternalError",
    "InvalidBlock",
    "InvalidConfig",
    "InvalidMessage",
    "InvalidPlan",
    "InvalidStep",
    "KVCacheError",
    "LimitExceeded",
    "Measure",
    "MissingExtra",
    "Mover",
    "Moves",
    "OutOfBlocks",
    "OutOfTables",
    "PendingMoves",
    "PipeChannel",
    "Plan",
    "Quote",
    "RankFailed",
    "RankLost",
    "RankTimeout",
    "RankedCompaction",
    "Region",
    "SequenceInfo",
    "Storage",
    "SupportsMove",
    "TorchChannel",
    "UnknownSequence",
    "__version__",
    "block_runs",
    "byte_ranges",
    "compact",
    "pair_runs",
    "run_plan",
    "serve_rank",
]

_HOME = {
    "BlockTables": "_core",
    "CPUMover": "movers",
    "Channel": "ranks",
    "MMU": "_core",
    "Measure": "_core",
    "Mover": "movers",
    "Moves": "_core",
    "PendingMoves": "ranks",
    "PipeChannel": "channels",
    "Plan": "_core",
    "Quote": "_core",
    "RankedCompaction": "ranks",
    "Region": "storage",
    "SequenceInfo": "_core",
    "Storage": "storage",
    "SupportsMove": "movers",
    "TorchChannel": "channels",
    "__version__": "_core",
    "block_runs": "transfer",
    "byte_ranges": "transfer",
    "compact": "compaction",
    "pair_runs": "transfer",
    "run_plan": "compaction",
    "serve_rank": "ranks",
}
"""The module that each name lives in; whatever else is in ``__all__`` is an error."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
