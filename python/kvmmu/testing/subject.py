"""What a factory makes: is it an allocator, and what can be asked of it?

What lives here: :class:`Subject`, read once before the first call. What never lives here: calls of
the allocator, and the model (see :mod:`.trial`).
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import index
from typing import Any

from ..errors import InvalidConfig

__all__ = ["Subject", "name_of"]

NEEDED = ("num_blocks", "claim", "release")
OPTIONAL = (
    "retain", "fork", "append", "truncate", "compact", "claim_prompt", "publish", "evict",
    "stats", "references", "validate", "write", "read",
)  # fmt: skip

Refuses = tuple[type[Exception], ...]


def name_of(factory: Callable[[], Any]) -> str:
    """What to call a factory in a message, or in a line of Python."""
    return str(getattr(factory, "__qualname__", repr(factory)))


@dataclass(frozen=True, slots=True)
class Subject:
    """An allocator and what it says of itself: see :class:`~.protocol.Allocator`.

    Attributes:
        has: names of the optional methods that it has. One that is None counts as missing.
    """

    allocator: Any
    num_blocks: int
    null_block: int | None
    trusts_caller: bool
    copies_on_write: bool
    refuses: Refuses
    has: frozenset[str]

    @classmethod
    def made_by(cls, factory: Callable[[], Any], refuses: Refuses | None = None) -> Subject:
        """Calls the factory once and looks at what comes.

        Raises:
            InvalidConfig: the factory raised, or what it made is no allocator.
        """
        try:
            allocator = factory()
        except InvalidConfig:
            raise
        except Exception as error:
            raise InvalidConfig(
                f"{name_of(factory)}() raised {type(error).__name__}: {error}; a factory takes "
                "nothing and makes an allocator"
            ) from error
        made = f"{name_of(factory)} made a {type(allocator).__name__}"
        try:
            return cls._of(allocator, refuses)
        except InvalidConfig as error:
            raise InvalidConfig(f"{made}, {error}") from error.__cause__
        except Exception as error:  # a property's own
            raise InvalidConfig(
                f"{made}, whose attributes cannot be read: {type(error).__name__}: {error}"
            ) from error

    @classmethod
    def _of(cls, allocator: Any, refuses: Refuses | None) -> Subject:
        missing = [name for name in NEEDED if getattr(allocator, name, None) is None]
        if missing:
            raise InvalidConfig(
                f"which lacks {', '.join(missing)}; an allocator has num_blocks, claim and release"
            )
        has = frozenset(n for n in OPTIONAL if getattr(allocator, n, None) is not None)
        for name in ("claim", "release", *sorted(has)):
            if not callable(getattr(allocator, name)):
                raise InvalidConfig(f"whose {name} cannot be called")
        num_blocks = _whole(allocator.num_blocks, "num_blocks")
        if num_blocks < 1:
            raise InvalidConfig(f"whose num_blocks is {num_blocks}, allowed: 1 or more")
        null = getattr(allocator, "null_block", None)
        if null is not None and not 0 <= (null := _whole(null, "null_block")) <= num_blocks:
            raise InvalidConfig(f"whose null_block is {null}, allowed: 0 to {num_blocks}")
        return cls(
            allocator,
            num_blocks,
            null,
            bool(getattr(allocator, "trusts_caller", False)),
            bool(getattr(allocator, "copies_on_write", False)),
            _exceptions(refuses or getattr(allocator, "refuses", (MemoryError,))),
            has,
        )

    def is_block(self, block: int) -> bool:
        """Whether this id may be handed out."""
        last = self.num_blocks - (self.null_block is None)
        return 0 <= block <= last and block != self.null_block

    def all_blocks(self) -> Iterator[int]:
        """Every id that may be handed out."""
        return filter(self.is_block, range(self.num_blocks + 1))


def _whole(value: Any, name: str) -> int:
    try:
        return index(value)
    except TypeError:
        shown = reprlib.repr(value)
        raise InvalidConfig(f"whose {name} is {shown}, allowed: a whole number") from None


def _exceptions(types: Any) -> Refuses:
    """One exception type or a tuple of them."""
    listed: tuple[Any, ...] = types if isinstance(types, tuple) else (types,)
    if not all(isinstance(found, type) and issubclass(found, Exception) for found in listed):
        raise InvalidConfig(
            f"whose refuses is {reprlib.repr(types)}, allowed: a tuple of exception types"
        )
    return listed
