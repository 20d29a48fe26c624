"""Random operations on the MMU against a model, contents and all (see ``machine.py``).

``KVMMU_TEST_PROFILE=deep`` runs far longer. A failure prints the operations and a line that
reproduces them (``@reproduce_failure``).
"""

from __future__ import annotations

from hypothesis import settings

from .machine import PROFILE, MMUMachine

TestMMU = MMUMachine.TestCase
TestMMU.settings = settings.get_profile(PROFILE)
