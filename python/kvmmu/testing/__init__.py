"""A fuzzing kit for block allocators: kvmmu's own, and anybody else's.

What lives here: the names. ``check_allocator`` is for pytest, ``kvmmu fuzz`` for the command line,
:mod:`.protocol` says what an allocator is, :mod:`.adapters` fits some to it. What never lives here:
torch, and anything that ``import kvmmu`` would load.

Needs ``kvmmu[testing]``; without it the import raises ``MissingExtra``.
"""

from __future__ import annotations

from . import faults
from .check import Driver, Report, check_allocator, find_factory, fuzz
from .faults import AllocatorFault
from .machine import AllocatorMachine
from .protocol import Allocator
from .trial import Trial

__all__ = [
    "Allocator",
    "AllocatorFault",
    "AllocatorMachine",
    "Driver",
    "Report",
    "Trial",
    "check_allocator",
    "faults",
    "find_factory",
    "fuzz",
]
