"""kvmmu on CUDA devices.

What lives here: whether CUDA can be used and what is missing (:func:`require`), the launches of
the kernels (:mod:`.launches`), the checksum that they are held to, the interface to streams
(:mod:`.streams`), the way to those of a device (:mod:`.device`), and the mover (:mod:`.executor`),
which is all that orders work. What never lives here: an import of CuPy at import time. ``import
kvmmu.cuda`` needs NumPy only, so all of this is tested on any machine.
"""

from __future__ import annotations

from .availability import Installed, installed, require
from .checksum import block_checksums
from .device import open_streams
from .executor import Copying, CUDAMover, GraphMoves
from .launches import (
    MAX_MOVES,
    CheckedPairs,
    ChecksumBlocks,
    Launcher,
    MoveBlocks,
    MoveBlocksIndirect,
    Place,
    RegionTable,
    UpdateTables,
    WriteKV,
)
from .streams import Event, Stream, Streams

__all__ = [
    "MAX_MOVES",
    "CUDAMover",
    "CheckedPairs",
    "ChecksumBlocks",
    "Copying",
    "Event",
    "GraphMoves",
    "Installed",
    "Launcher",
    "MoveBlocks",
    "MoveBlocksIndirect",
    "Place",
    "RegionTable",
    "Stream",
    "Streams",
    "UpdateTables",
    "WriteKV",
    "block_checksums",
    "installed",
    "open_streams",
    "require",
]
