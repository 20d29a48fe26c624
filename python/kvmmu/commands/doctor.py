"""``kvmmu doctor``: what is installed, what is missing.

What lives here: the command. What never lives here: looking (see :mod:`kvmmu.doctor`).
"""

from __future__ import annotations

import typer

from .. import doctor as rooms
from .around import CHECK_FAILED, exit_codes, show

__all__ = ["COMMAND"]


def doctor() -> None:
    """What is installed, what is missing, and which extra brings it."""
    with exit_codes():
        findings = rooms.examine()
        show(rooms.table(findings))
        if any(finding.failed for finding in findings):
            raise typer.Exit(CHECK_FAILED)


COMMAND = doctor
