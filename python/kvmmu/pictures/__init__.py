"""Pictures of the memory: over time, before and after a compaction, and as text.

A serving loop feeds a :class:`History`; :func:`page` makes one HTML file of the histories of
several runs, which needs no network (``kvmmu[html]``). :mod:`.terminal` draws one moment for a
terminal (``kvmmu[cli]``).
"""

from __future__ import annotations

from .history import Compaction, History
from .page import Run, check_library, page

__all__ = ["Compaction", "History", "Run", "check_library", "page"]
