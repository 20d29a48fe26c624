"""``--config FILE`` for any command: the file's settings, under what was typed.

What lives here: :class:`Configured`. What never lives here: what a command does with a setting, and
reading (see :mod:`kvmmu.config`).

An option that was typed wins over the file, and the file over the option's default. Settings that
the file does not name keep the command's defaults, which need not be those of the library.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from .around import complain, typed

if TYPE_CHECKING:
    from ..config import Config
    from ..config.resolve import Resolved

__all__ = ["ConfigFile", "Configured"]

T = TypeVar("T")

_NO_DEFAULT = object()

ConfigFile = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="Settings (YAML); options that are given win over it.",
        show_default=False,
    ),
]


class Configured:
    """What was typed, over a file of settings or none.

    Args:
        context: of the command.
        file: of ``--config``; None: only what was typed counts.

    Raises:
        InvalidConfig: all faults of the file. MissingExtra.
    """

    def __init__(self, context: typer.Context, file: str | None) -> None:
        self._context = context
        self._config: Config | None = None
        self._used: set[tuple[str, str]] = set()
        if file is not None:
            from ..config import Config

            self._config = Config.load(file)

    def __bool__(self) -> bool:
        return self._config is not None

    def typed(self, option: str) -> bool:
        """Whether an option was given."""
        return typed(self._context, option)

    def pick(self, option: str, value: T, section: str, key: str) -> T:
        """The value of an option: as typed, else the file's, else its default."""
        self._used.add((section, key))
        if self._config is None or self.typed(option) or not self._config.says(section, key):
            return value
        found: T = getattr(getattr(self._config, section), key)
        return found

    def further(self, section: str, *keys: str) -> dict[str, Any]:
        """Settings that no option has: those that the file names."""
        self._used.update((section, key) for key in keys)
        if self._config is None:
            return {}
        settings = getattr(self._config, section)
        return {key: getattr(settings, key) for key in keys if self._config.says(section, key)}

    def further_of_the_mmu(self) -> dict[str, Any]:
        """Those settings of an MMU that no option of a run has, as the file names them."""
        return {
            **self.further("pool", "anchor", "dedup", "table_nodes"),
            **self.further("pages", "medium_from", "huge_from"),
            **self.further("compaction", "compaction_start", "compaction_stop"),
        }

    def says(self, section: str, key: str) -> bool:
        """Whether the file names a setting."""
        self._used.add((section, key))
        return self._config is not None and self._config.says(section, key)

    def resolve(self, num_blocks: int | None, block_size: int) -> Resolved | None:
        """What the file's settings become in this pool; None without a file.

        Raises:
            InvalidConfig: they do not fit.
        """
        if self._config is None:
            return None
        model = self._config.model
        size = None if model is None else model.bytes_per_token * block_size
        return self._config.resolve(num_blocks=num_blocks, bytes_per_block=size)

    def whole(self, resolved: Resolved) -> Resolved:
        """Raises InvalidConfig if the file leaves something open that this pool needs."""
        assert self._config is not None  # there would be nothing resolved
        return self._config.whole(resolved)

    def complain_of_unused(self, command: str) -> None:
        """Says which settings of the file this command has no use for, where they are not the
        defaults."""
        for section, key in self._unused():
            assert self._config is not None
            place = self._config.place(section, key)
            name = self._config.called(section, key)
            complain(f"{place}: {name} counts for nothing in {command}")

    def _unused(self) -> Iterator[tuple[str, str]]:
        if self._config is None:
            return
        from ..config import Config

        defaults = Config().to_dict()
        for section, settings in self._config.to_dict().items():
            for key, value in (settings or {}).items():
                if (section, key) in self._used or not self._config.says(section, key):
                    continue
                if value != (defaults[section] or {}).get(key, _NO_DEFAULT):
                    yield section, key
