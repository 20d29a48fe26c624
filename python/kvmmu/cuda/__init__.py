"""kvmmu on CUDA devices.

What lives here: whether CUDA can be used and what is missing (:func:`require`), the launches of
the kernels (:mod:`.launches`), and the checksum that they are held to. What never lives here: an
import of CuPy at import time. ``import kvmmu.cuda`` needs NumPy only, so all of this is tested on
any machine.
"""

from __future__ import annotations

from .availability import Installed, installed, require
from .checksum import block_checksums
from .launches import (
    MAX_MOVES,
    ChecksumBlocks,
    Launcher,
    MoveBlocks,
    MoveBlocksIndirect,
    Place,
    RegionTable,
    UpdateTables,
    WriteKV,
)

__all__ = [
    "MAX_MOVES",
    "ChecksumBlocks",
    "Installed",
    "Launcher",
    "MoveBlocks",
    "MoveBlocksIndirect",
    "Place",
    "RegionTable",
    "UpdateTables",
    "WriteKV",
    "block_checksums",
    "installed",
    "require",
]
