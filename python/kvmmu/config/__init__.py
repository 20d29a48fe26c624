"""Configuration: files of settings that build an MMU or a KVCache.

What lives here: :class:`Config` (:mod:`.settings`), the reader of YAML and the checks that any file
of settings goes through (:mod:`.files`), and units (:mod:`.units`). What never lives here: what a
setting does. Needs ``kvmmu[config]``.
"""

from __future__ import annotations

from ..errors import MissingExtra

try:
    import pydantic  # noqa: F401
    import yaml  # noqa: F401
except ImportError as error:
    raise MissingExtra(
        f"configuration files need pydantic and PyYAML ({error}): pip install 'kvmmu[config]'"
    ) from error

from .build import Config
from .files import Document, check, read
from .reference import reference

__all__ = ["Config", "Document", "check", "read", "reference"]
