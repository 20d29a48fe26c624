"""What the fuzzing kit asks of an allocator.

What lives here: the protocols, which say what each call means. What never lives here: code.
Only :class:`Allocator` is needed. Every other method or attribute is found by its name, one by
one, and is then used and checked (None counts as missing); whoever has none of a class leaves the
whole class out.

A **claim** is what ``claim`` returned: the ids of the blocks, in order, in one of two forms.

* *ids*: a list, tuple or array that the caller owns, and that the allocator does not change. Any
  of its blocks can be released, alone or together with blocks of other claims.
* a *sequence*: an object of the allocator that shows its present blocks when it is iterated over.
  It is handed back whole, and the allocator may change what it shows when it moves blocks. An
  allocator that has one of the methods of :class:`SupportsSequences` deals in sequences.

All calls come from one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

__all__ = [
    "Allocator",
    "SupportsCompact",
    "SupportsContents",
    "SupportsCounts",
    "SupportsPrefixes",
    "SupportsRetain",
    "SupportsSequences",
]


class Allocator(Protocol):
    """Hands out blocks. These attributes are optional:

    ``null_block`` (int): a block that nobody is ever given. The ids are then 0 .. ``num_blocks``
    without it; else 0 .. ``num_blocks`` - 1.

    ``refuses`` (tuple of exception types): what a call raises when there are not enough blocks;
    default ``(MemoryError,)``, which :class:`kvmmu.OutOfBlocks` is. Any other exception is a crash.

    ``trusts_caller`` (bool): True if it is undefined what happens when somebody releases or retains
    a block that is not held. Then the kit does not try it; else each such call must raise (any
    exception) and change nothing.
    """

    @property
    def num_blocks(self) -> int:
        """Blocks that can be held at once. 4 to 16 find most faults."""

    def claim(self, n: int, /) -> Sequence[int] | Iterable[int]:
        """Hands out ``n`` blocks that nobody holds; raises, and changes nothing, exactly if fewer
        are free. A claim of 0 may be refused. What is cached must outlive a refusal, which shows
        only in the ``cached`` of ``stats``."""

    def release(self, blocks: Any, /) -> None:
        """Takes one reference from each block. The last reference gone, the block is free. Where
        two claims of ids share a block and are released in one call, it is listed twice: that may
        be refused, by any exception, as long as nothing changes."""


class SupportsRetain(Protocol):
    """Sharing by id (vLLM's ``touch``)."""

    def retain(self, blocks: Any, /) -> None:
        """One more reference on each of these blocks, which are held."""


class SupportsSequences(Protocol):
    """Sharing and growth by sequence. ``copies_on_write`` (bool, optional) is True if ``append``
    writes behind the end of the last block: where that is shared, it must be copied first."""

    def fork(self, claim: Any, /) -> Iterable[int]:
        """A second sequence that holds the same blocks."""

    def append(self, claim: Any, n: int, /) -> Iterable[tuple[int, int]] | None:
        """Extends a sequence by ``n`` >= 1 blocks; refuses as ``claim`` does. Returns the copies
        (source, destination) that it took: the last block, if it was replaced."""

    def truncate(self, claim: Any, n: int, /) -> None:
        """Releases all blocks but the first ``n``."""


class SupportsCompact(Protocol):
    """Moving blocks."""

    def compact(self) -> Iterable[tuple[int, int]] | None:
        """Moves what it likes. Returns the copies (source, destination), in the order in which
        the kit then carries them out; every reference to the source is one to the destination from
        then on. The caller renames its own ids; sequences show the new ones by themselves."""


class SupportsPrefixes(Protocol):
    """A prefix cache. A prompt is an int; block ``i`` of a prompt has contents that only block
    ``i`` of that prompt has."""

    def claim_prompt(self, prompt: int, n: int, /) -> tuple[Iterable[int], int]:
        """A claim for the first ``n`` blocks of a prompt, and how many of its first blocks were
        found cached (each gets one more reference). Refuses as ``claim`` does."""

    def publish(self, claim: Any, prompt: int, /) -> None:
        """The blocks of this claim have been written: other claims may find them."""

    def evict(self, n: int, /) -> int:
        """Forgets up to ``n`` cached blocks that nobody holds; returns how many."""


class SupportsCounts(Protocol):
    """What an allocator says of itself."""

    def stats(self) -> Mapping[str, int]:
        """Any of ``free`` (blocks that can be claimed, cached ones with them), ``used`` (blocks
        that somebody holds) and ``cached`` (free ones that a prompt could find); others are
        ignored."""

    def references(self, block: int, /) -> int:
        """How often a block is held."""

    def validate(self) -> None:
        """Raises if the allocator finds itself broken. Called after every operation."""


class SupportsContents(Protocol):
    """For allocators that own the memory: then they also carry out their own copies. For all
    others the kit keeps a pattern for each block and carries out the copies that it is told of."""

    def write(self, block: int, value: int, /) -> None:
        """Fills a block with something that depends on ``value``, 0 .. 2**62."""

    def read(self, block: int, /) -> int:
        """The value that the whole block holds; anything else if it is not whole."""
