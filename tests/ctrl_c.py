"""Ctrl-C as a terminal sends it: to every process of a command.

What lives here: :func:`press`. What never lives here: what a command must do then.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path


def press(command: Sequence[str], children: int) -> tuple[int, str]:
    """Runs a command, sends Ctrl-C to all of its processes shortly after it has so many children,
    and returns its exit status and what it complained of."""
    running = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Whatever runs the tests in the background has it ignored, and that is inherited.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    begun = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    until = time.monotonic() + 60
    while len(begun.read_text().split()) < children:
        assert time.monotonic() < until
        time.sleep(0.02)
    time.sleep(0.3)
    os.killpg(running.pid, signal.SIGINT)
    _, complained = running.communicate(timeout=120)
    return running.returncode, complained
