"""Broken allocators: each a few lines over a correct one, named after what it does wrong.

What lives here: the patches, and ``BROKEN``, which says what the kit must call each. What never
lives here: anything that helps the kit to find them. Numbers in docstrings are kinds of fault in
the project's list of hazards.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvmmu.testing import AllocatorFault, faults

from .correct import BlockPool, CachingPool, Sequences, Table

# -- releasing -------------------------------------------------------------------------------


class ClampsCounts(BlockPool):
    """19, and the first pattern: a count below zero is made zero, and nobody hears of it."""

    def release(self, blocks: Sequence[int]) -> None:
        if not all(0 <= block < self.num_blocks for block in blocks):
            raise ValueError
        for block in blocks:
            if self.counts[block] > 0:
                self.drop(block)


class FreesABlockTwiceInOneCall(BlockPool):
    """19: release([b, b]) puts b into the free list twice."""

    def check_held(self, blocks: Sequence[int]) -> None:
        super().check_held(list(set(blocks)))

    def drop(self, block: int) -> None:
        self.counts[block] = max(self.counts[block] - 1, 0)
        if self.counts[block] == 0:
            self.put_back(block)


class FreesABlockOnceForEachHolder(BlockPool):
    """19: two holders release in one call; all are counted down, then each finds zero."""

    def release(self, blocks: Sequence[int]) -> None:
        self.check_held(blocks)
        for block in blocks:
            self.counts[block] -= 1
        for block in blocks:
            if self.counts[block] == 0:
                self.put_back(block)


class ReleasesHalfBeforeItFails(BlockPool):
    """22, 24: what stands before the bad id in the list is released all the same."""

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.check_held([block])
            self.drop(block)


class FreesAtTheFirstRelease(BlockPool):
    """1: a shared block is freed although the other still reads it."""

    def drop(self, block: int) -> None:
        self.counts[block] -= 1
        self.put_back(block)

    def put_back(self, block: int) -> None:
        if block not in self.empty:
            super().put_back(block)


class TakesNegativeIds(BlockPool):
    """44: the padding slot -1 used as an index."""

    def check_held(self, blocks: Sequence[int]) -> None:
        super().check_held([block + self.num_blocks * (block < 0) for block in blocks])


# -- claiming --------------------------------------------------------------------------------


class LeaksTheFirstBlocksOfAFailedClaim(BlockPool):
    """15: the claim of k blocks fails at the j-th."""

    def check_free(self, n: int) -> None:
        pass

    def take(self) -> int:
        super().check_free(1)
        return super().take()


class SlipsInTheStack(BlockPool):
    """Patterns, arithmetic on ids: hands out the last free block and strikes out the first."""

    def take(self) -> int:
        block = self.empty[-1]
        del self.empty[0]
        self.counts[block] = 1
        return block


class HasOneBlockTooMany(BlockPool):
    """25: off by one at the end of the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.empty.append(self.num_blocks)
        self.counts.append(0)

    def stats(self) -> dict[str, int]:
        return super().stats() | {"free": len(self.empty) - 1}


class NeverGivesTheLastBlock(BlockPool):
    """25: the same in the other direction; the statistics do not know."""

    def check_free(self, n: int) -> None:
        super().check_free(n + 1 if n else 0)


class HandsOutTheNullBlock(BlockPool):
    """43: padding and a sequence write into the same block."""

    null_block = 0

    def __init__(self) -> None:
        super().__init__(7)
        self.num_blocks = 6
        self.empty = list(range(6))


class GivesWhatIsThere(BlockPool):
    """28: too many are asked for, and fewer come back."""

    def claim(self, n: int) -> list[int]:
        return super().claim(min(n, self.free))


class RoundsUpToPairs(BlockPool):
    """14: a page of two blocks for an odd claim, and nobody owns the other."""

    def claim(self, n: int) -> list[int]:
        return super().claim(min(n + n % 2, self.free) if n <= self.free else n)


class DoesNotEvictForAClaim(CachingPool):
    """Patterns, four meanings of free: cached blocks count as free and are not given."""

    def check_free(self, n: int) -> None:
        if n > len(self.empty):
            raise MemoryError


class BreaksWhenTheListIsEmpty(CachingPool):
    """36: the last empty block is gone, and eviction is forgotten: IndexError."""

    def take_oldest(self) -> int:
        return self.empty.pop()


# -- counting --------------------------------------------------------------------------------


class CountsEveryReleaseAsABlock(BlockPool):
    """2: the used counter drifts when shared blocks are released."""

    used = 0

    def take(self) -> int:
        self.used += 1
        return super().take()

    def drop(self, block: int) -> None:
        self.used -= 1
        super().drop(block)

    def stats(self) -> dict[str, int]:
        return super().stats() | {"used": self.used}


class CountsToThree(BlockPool):
    """Design: an overflowing count is an error, not a lost reference."""

    def retain(self, blocks: Sequence[int]) -> None:
        self.check_held(blocks)
        for block in blocks:
            self.counts[block] = min(self.counts[block] + 1, 3)


class SaysItEvictedAll(CachingPool):
    """3: a pass that stops early and says it is done."""

    def evict(self, n: int) -> int:
        super().evict(min(n, 1))
        return min(n, len(self.evictable) + 1)


# -- caching ---------------------------------------------------------------------------------


class EvictsWhatItHasJustMatched(CachingPool):
    """36: the matched blocks are referenced after the rest has been claimed."""

    def claim_prompt(self, prompt: int, n: int) -> tuple[list[int], int]:
        found = self.match(prompt, n)
        self.check_free(n - len(found))
        new = [self.take() for _ in range(n - len(found))]
        for block in found:
            if block in self.evictable:
                self.evictable.remove(block)
            self.counts[block] += 1
        return found + new, len(found)


class EvictsBlocksInUse(CachingPool):
    """36: eviction walks the index, and half of that is in use."""

    def evict(self, n: int) -> int:
        victims = list(self.keys)[:n]
        for block in victims:
            self.forget(block)
            if block in self.evictable:
                self.evictable.remove(block)
            self.empty.append(block)
        return len(victims)


class ServesWhatWasOverwritten(CachingPool):
    """8, 31: a cached block is claimed, and its entry stays."""

    def forget(self, block: int) -> None:
        self.keys.pop(block)

    def match(self, prompt: int, n: int) -> list[int]:
        return [b for b in super().match(prompt, n) if self.counts[b] or b in self.evictable]


class PublishesBeforeItIsWritten(CachingPool):
    """23: found by the next prompt as soon as it is claimed."""

    def claim_prompt(self, prompt: int, n: int) -> tuple[list[int], int]:
        blocks, hits = super().claim_prompt(prompt, n)
        self.publish(blocks, prompt)
        return blocks, hits


class CountsHitsPastAGap(CachingPool):
    """35: block 1 is cached, block 0 is not, and block 1 is served as the first."""

    def match(self, prompt: int, n: int) -> list[int]:
        return [self.index[prompt, i] for i in range(n) if (prompt, i) in self.index]


class EvictsForAClaimThatItRefuses(CachingPool):
    """22: evicts block by block until none is left; the blocks are put back, the entries not."""

    def claim(self, n: int) -> list[int]:
        if n > self.free:
            self.evict(n)
        return super().claim(n)


class KeepsTheReferencesOfARefusedPrompt(CachingPool):
    """22: match, then fail to get the rest."""

    def claim_prompt(self, prompt: int, n: int) -> tuple[list[int], int]:
        found = self.match(prompt, n)
        self.hold(found)
        return found + self.claim(n - len(found)), len(found)


# -- sequences -------------------------------------------------------------------------------


class MovesOneMappingOnly(Sequences):
    """1: one of the two sequences that share a block still points at its old place."""

    def move(self, source: int, destination: int) -> None:
        self.counts[destination], self.counts[source] = self.counts[source], 0
        first = next(table for table in self.tables if source in table)
        self.repoint(first, source, destination)


class DropsAReferenceInAMove(Sequences):
    """1: every mapping follows, and the count at the new place says one."""

    def references(self, block: int) -> int:
        return self.counts[block]

    def move(self, source: int, destination: int) -> None:
        super().move(source, destination)
        self.counts[destination] = 1


class MovesOntoABlockInUse(Sequences):
    """8: the destination is the one before the first free block."""

    def compact(self) -> list[tuple[int, int]]:
        free = super().destination()
        if not 0 < free < self.num_blocks or not any(self.counts[free:]):
            return []
        source = max(b for b, count in enumerate(self.counts) if count)
        self.move(source, free - 1)
        return [(source, free - 1)]


class WritesIntoTheSharedBlock(Sequences):
    """25: no copy on write."""

    def must_copy(self, table: Table) -> bool:
        return False


class KeepsTheBlockThatItCopied(Sequences):
    """21: the reference to the old block is never given back."""

    def append(self, table: Table, n: int) -> list[tuple[int, int]]:
        copies = super().append(table, n)
        for source, _ in copies:
            self.counts[source] += 1
        return copies


class ExtendsTheOtherTablesToo(Sequences):
    """11: what one sequence appends is appended to all that begin alike."""

    def append(self, table: Table, n: int) -> list[tuple[int, int]]:
        alike = [t for t in self.tables if t is not table and t and t[:1] == table[:1]]
        copies = super().append(table, n)
        for other in alike:
            other.extend(table[-n:])
        return copies


class ExtendsTheTableBeforeItFails(Sequences):
    """22: a refused append leaves the sequence longer than it was."""

    def append(self, table: Table, n: int) -> list[tuple[int, int]]:
        try:
            return super().append(table, n)
        except MemoryError:
            table.append(0)
            raise


class ForksWhatIsClosed(Sequences):
    """24: an unknown sequence is forked as if it were there."""

    def fork(self, table: Table) -> Table:
        child = Table(table)
        for block in child:
            self.counts[block] += 1
        self.tables.append(child)
        return child


class OwnsItsMemory(Sequences):
    """Correct: a Sequences that holds contents and carries its own copies out."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = [0] * self.num_blocks

    def write(self, block: int, value: int) -> None:
        self.memory[block] = value

    def read(self, block: int) -> int:
        return self.memory[block]

    def append(self, table: Table, n: int) -> list[tuple[int, int]]:
        copies = super().append(table, n)
        for source, destination in copies:
            self.memory[destination] = self.memory[source]
        return copies

    def move(self, source: int, destination: int) -> None:
        self.memory[destination] = self.memory[source]
        super().move(source, destination)


class ForgetsToCopyWhatItMoves(OwnsItsMemory):
    """6: tables and counts are right, and the bytes are where they were."""

    def move(self, source: int, destination: int) -> None:
        Sequences.move(self, source, destination)


class FindsItselfBroken(Sequences):
    """2: a counter drifts that only the allocator's own recount shows."""

    truncated = 0

    def truncate(self, table: Table, n: int) -> None:
        self.truncated += len(table) - n
        super().truncate(table, n)

    def validate(self) -> None:
        if self.truncated > 2:
            raise RuntimeError(f"{self.truncated} blocks too many in the recount")


BROKEN: dict[type[BlockPool | Sequences], type[AllocatorFault]] = {
    ClampsCounts: faults.ReleasedTwice,
    FreesABlockTwiceInOneCall: faults.DoubleHandOut,
    FreesABlockOnceForEachHolder: faults.DoubleHandOut,
    ReleasesHalfBeforeItFails: faults.ChangedByFailure,
    FreesAtTheFirstRelease: faults.DoubleHandOut,
    TakesNegativeIds: faults.ForeignRelease,
    LeaksTheFirstBlocksOfAFailedClaim: faults.ChangedByFailure,
    SlipsInTheStack: faults.DoubleHandOut,
    HasOneBlockTooMany: faults.UnknownBlock,
    NeverGivesTheLastBlock: faults.LostBlock,
    HandsOutTheNullBlock: faults.UnknownBlock,
    GivesWhatIsThere: faults.Overcommitted,
    RoundsUpToPairs: faults.WrongCount,
    DoesNotEvictForAClaim: faults.LostBlock,
    BreaksWhenTheListIsEmpty: faults.Crashed,
    CountsEveryReleaseAsABlock: faults.WrongStatistics,
    CountsToThree: faults.WrongReferences,
    SaysItEvictedAll: faults.WrongStatistics,
    EvictsWhatItHasJustMatched: faults.DoubleHandOut,
    EvictsBlocksInUse: faults.DoubleHandOut,
    ServesWhatWasOverwritten: faults.StaleCache,
    PublishesBeforeItIsWritten: faults.StaleCache,
    CountsHitsPastAGap: faults.StaleCache,
    EvictsForAClaimThatItRefuses: faults.ChangedByFailure,
    KeepsTheReferencesOfARefusedPrompt: faults.ChangedByFailure,
    MovesOneMappingOnly: faults.LostMapping,
    DropsAReferenceInAMove: faults.WrongReferences,
    MovesOntoABlockInUse: faults.BadMove,
    WritesIntoTheSharedBlock: faults.LostContents,
    KeepsTheBlockThatItCopied: faults.LostBlock,
    ExtendsTheOtherTablesToo: faults.LostMapping,
    ExtendsTheTableBeforeItFails: faults.ChangedByFailure,
    ForksWhatIsClosed: faults.UsedAfterRelease,
    ForgetsToCopyWhatItMoves: faults.LostContents,
    FindsItselfBroken: faults.Invalid,
}
"""What each must be called."""
