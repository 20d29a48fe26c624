"""From a file of settings to an MMU or a KVCache.

What lives here: :class:`Config`. What never lives here: single settings (:mod:`.settings`) and what
becomes of them (:mod:`.resolve`).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import yaml
from pydantic import PrivateAttr

from .._core import MMU
from ..errors import InvalidConfig, MissingExtra
from ..preheat import preheat
from .files import Document, Keys, check, read
from .resolve import Resolved, resolve
from .settings import PAGED_ATTENTION, PagedAttention, Pages, Sections

if TYPE_CHECKING:
    from ..cache import KVCache

__all__ = ["Config"]

_SHAPE = ("num_layers", "num_kv_heads", "head_dim", "v_head_dim", "dtype")


class _Written(Sections):
    """A file as people write it."""

    paged_attention: PagedAttention | None = None
    """Names that other systems use."""

    def contradictions(self) -> Iterator[tuple[Keys, str]]:
        return iter(())  # of the whole, once each setting is in its place


class Config(Sections):
    """Settings of an MMU or a KVCache.

    Made by :meth:`load` or :meth:`from_dict`; sections and keys are attributes
    (``config.pool.block_size``). Equal when all settings are. docs/configuration.md lists the keys.
    """

    _document: Document = PrivateAttr(default_factory=lambda: Document.of({}))

    # -- reading and writing -------------------------------------------------------------------

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads a YAML file.

        Raises:
            InvalidConfig: all faults of it, each with file, line, key, what was given and what is
                allowed.
        """
        return cls._of(read(path))

    @classmethod
    def from_dict(cls, data: dict[str, Any], name: str = "configuration") -> Self:
        """The same of a dict; ``name`` stands for the file in messages.

        Raises:
            InvalidConfig: as :meth:`load`, without lines.
        """
        return cls._of(Document.of(data, name))

    @classmethod
    def _of(cls, document: Document) -> Self:
        written = check(_Written, document).paged_attention
        values: dict[Keys, Any] = {}
        if written is not None and isinstance(written.large_page_prefetch, bool):
            hold = Pages.model_fields["hold_blocks"].default if written.large_page_prefetch else 0
            values["pages", "hold_blocks"] = hold
        names: dict[Keys, Keys] = {
            ("paged_attention", name): keys for name, keys in PAGED_ATTENTION.items()
        }
        moved = document.moved(names, values)
        config = check(cls, moved)
        config._document = moved
        config.resolve()  # what cannot be is said now, as far as the settings know the pool
        return config

    def to_dict(self) -> dict[str, Any]:
        """All settings, defaults included, as :meth:`from_dict` takes them. Sizes are text with a
        unit."""
        return self.model_dump(mode="json")

    def to_yaml(self) -> str:
        """The same as YAML, which :meth:`load` reads back to an equal Config."""
        return str(yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True))

    def says(self, *keys: str) -> bool:
        """Whether a setting was given (and is no default)."""
        return self._document.has(keys)

    def called(self, *keys: str) -> str:
        """A setting as the file calls it."""
        return self._document.called(keys)

    def place(self, *keys: str) -> str:
        """``file:line`` of a setting, for messages."""
        return self._document.place(keys)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash(self.to_yaml())

    # -- building ------------------------------------------------------------------------------

    def resolve(
        self, *, num_blocks: int | None = None, bytes_per_block: int | None = None
    ) -> Resolved:
        """What the settings become in a pool of a known size; see :mod:`kvmmu.config.resolve`.

        Args:
            num_blocks: usable blocks; None: as the settings say.
            bytes_per_block: over all layers; None: of ``model``, if that is given.

        Raises:
            InvalidConfig: what does not fit, with file and line.
        """
        for name, value in (("num_blocks", num_blocks), ("bytes_per_block", bytes_per_block)):
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1
            ):
                raise InvalidConfig(f"{name} = {value!r}: allowed is a whole number from 1")
        return resolve(self, self._document, num_blocks=num_blocks, block_bytes=bytes_per_block)

    def mmu(
        self, num_blocks: int | None = None, *, bytes_per_block: int | None = None, **further: Any
    ) -> MMU:
        """Builds an :class:`kvmmu.MMU`.

        Args:
            num_blocks, bytes_per_block: as for :meth:`resolve`.
            further: arguments of MMU; they win over the settings.

        What an MMU has no use for is left out: ``kvcache``, ``model`` but for bytes a block,
        ``compaction.auto_compact`` and the budgets in time and bytes, and
        ``memory.reserved_memory``, which is up to whoever admits (:meth:`resolve` says how many
        blocks).

        Raises:
            InvalidConfig: something is missing, or does not fit.
        """
        resolved = self.whole(self.resolve(num_blocks=num_blocks, bytes_per_block=bytes_per_block))
        arguments = {"num_blocks": resolved.num_blocks, **resolved.mmu, **further}
        mmu = MMU(**arguments)
        if resolved.preheat_pages:
            preheat(mmu, resolved.preheat_pages)
        return mmu

    def cache(self, num_blocks: int | None = None, **further: Any) -> KVCache:
        """Builds a :class:`kvmmu.KVCache`, which allocates its tensors.

        Args:
            num_blocks: usable blocks; None: as the settings say.
            further: arguments of KVCache; they win over the settings. What ``model`` does not say
                (``num_layers``, ``num_kv_heads``, ``head_dim``, ``dtype``) must be here.

        Raises:
            MissingExtra: torch is not installed.
            InvalidConfig: something is missing, or does not fit.
        """
        from ..cache import KVCache

        shape: dict[str, Any] = {} if self.model is None else self.model.model_dump()
        shape |= {name: further.pop(name) for name in _SHAPE if name in further}
        missing = [name for name in _SHAPE if name not in shape and name != "v_head_dim"]
        if missing:
            self._refuse((("model",), f"missing, needed for a KVCache: {', '.join(missing)}"))
        if isinstance(shape["dtype"], str):
            import torch

            dtype = getattr(torch, shape["dtype"], None)
            if dtype is None:
                raise MissingExtra(f"this torch has no {shape['dtype']}: pip install -U torch")
            shape["dtype"] = dtype
        block_size = further.get("block_size", self.pool.block_size)
        resolved = self.whole(
            self.resolve(num_blocks=num_blocks, bytes_per_block=_block_bytes(shape, block_size))
        )
        cache = KVCache(
            **shape,
            **{
                "num_blocks": resolved.num_blocks,
                **resolved.mmu,
                **resolved.cache,
                "reserved_blocks": resolved.reserved_blocks,
                **further,
            },
        )
        if resolved.preheat_pages:
            cache.preheat(resolved.preheat_pages)
        return cache

    def attach(self, tensors: Any, *, num_blocks: int, **further: Any) -> KVCache:
        """Builds a KVCache over an engine's own tensors: ``KVCache.attach``.

        Args:
            tensors: as for ``KVCache.attach``.
            num_blocks: usable blocks: those of the tensors less the null block.
            further: arguments of ``KVCache.attach``; they win over the settings.

        Raises:
            MissingExtra, InvalidConfig: as :meth:`cache`.
        """
        from ..cache import KVCache
        from ..layout import Layers

        layout = further.pop("layout", self.kvcache.layout)
        block_size = further.get("block_size", self.pool.block_size)
        adopted = Layers.adopt(
            tensors, layout=layout, block_size=block_size, num_blocks=num_blocks + 1
        )
        resolved = self.whole(
            self.resolve(num_blocks=num_blocks, bytes_per_block=adopted.storage.block_bytes)
        )
        own = {name: value for name, value in resolved.cache.items() if name != "device"}
        if own["return_memory"] is None:
            own["return_memory"] = False
        arguments = {**resolved.mmu, **own, "reserved_blocks": resolved.reserved_blocks, **further}
        arguments["layout"] = layout
        cache = KVCache.attach(tensors, num_blocks=num_blocks, **arguments)
        if resolved.preheat_pages:
            cache.preheat(resolved.preheat_pages)
        return cache

    def whole(self, resolved: Resolved) -> Resolved:
        """Raises InvalidConfig unless all is known that a pool needs."""
        missing: list[tuple[Keys, str]] = []
        if resolved.num_blocks is None:
            needed = "missing, needed: it, pool.memory with model, or num_blocks where it is built"
            missing.append((("pool", "num_blocks"), needed))
        if resolved.page_order is None:
            needed = "in bytes, needed: a section model, or bytes_per_block where it is built"
            missing.append((("pages", "page_size"), needed))
        if resolved.reserved_blocks is None:
            needed = "in bytes, needed: a section model, or bytes_per_block where it is built"
            missing.append((("memory", "reserved_memory"), needed))
        self._refuse(*missing)
        return resolved

    def _refuse(self, *found: tuple[Keys, str]) -> None:
        self._document.refuse(found)


def _block_bytes(shape: dict[str, Any], block_size: Any) -> int | None:
    """None where an argument is none that KVCache takes: it says so itself."""
    k, v = shape["head_dim"], shape.get("v_head_dim")
    factors = (shape["num_layers"], shape["num_kv_heads"], k, k if v is None else v, block_size)
    if not all(isinstance(factor, int) and factor >= 0 for factor in factors):
        return None
    layers, heads, k, v, block_size = factors
    size = layers * heads * (k + v) * getattr(shape["dtype"], "itemsize", 0) * block_size
    return int(size) or None
