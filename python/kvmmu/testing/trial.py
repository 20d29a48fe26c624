"""One allocator beside a model of what it should be.

What lives here: :class:`Trial`, whose methods each make one call, compare what came of it with
the model, and raise a fault with all calls so far. What never lives here: chance (see
:mod:`.machine`), and what can be checked without knowing the call (:mod:`.model`).
"""

from __future__ import annotations

from . import faults
from .model import Claim, Model

__all__ = ["Claim", "Trial"]


def _part(claim: Claim, start: int, stop: int) -> str:
    """The expression for a part of a claim of ids."""
    if stop - start == len(claim.blocks):
        return claim.name
    return f"{claim.name}[{start or ''}:{stop if stop < len(claim.blocks) else ''}]"


class Trial(Model):
    """An allocator under test.

    Args:
        factory: makes the allocator; called once.
        refuses: exception types that say "not enough blocks"; default: the allocator's own
            ``refuses``, or MemoryError.

    Raises:
        InvalidConfig: the factory raised, or made no :class:`~.protocol.Allocator`.
    """

    def begin(self) -> None:
        """Looks at the new allocator, before the first call."""
        self._check()

    # -- calls that claim ----------------------------------------------------------------------

    def claim(self, n: int) -> None:
        """Asks for ``n`` blocks."""
        name = next(self._names)
        if self._claims_blocks(f"{name} = a.claim({n})", n, may_refuse=n < 1):
            blocks = self._blocks(name)
            self._check_new(name, blocks, max(n, 0))
            self._add(Claim(name, blocks, self._write_fresh(blocks)))
            self._check()

    def claim_prompt(self, prompt: int, n: int) -> None:
        """Asks for the first blocks of a prompt; whatever is found cached must be what it says."""
        name = next(self._names)
        self.prompts[prompt] = max(n, self.prompts.get(prompt, 0))
        # It costs n at most: what is found cached and is held costs nothing.
        if not self._claims_blocks(f"{name}, hits = a.claim_prompt({prompt}, {n})", n):
            return
        blocks = self._blocks(name)
        hits = self._whole(self.script.value("hits"), "hits", faults.WrongCount)
        if len(blocks) != n or not 0 <= hits <= n:
            raise self._fault(
                faults.WrongCount,
                f"claim_prompt({prompt}, {n}) gave {len(blocks)} blocks, {hits} of them cached",
                f"assert len([*{name}]) == {n} and 0 <= hits <= {n}",
            )
        self._check_new(name, blocks[hits:], n - hits, f"[*{name}][{hits}:]" if hits else name)
        values = [self._prompt_value(prompt, i) for i in range(n)]
        for i, block in enumerate(blocks[:hits]):
            self._check_id(name, block)
            if self._read(block) != values[i]:
                raise self._fault(
                    faults.StaleCache,
                    f"{name} was given block {block} as block {i} of prompt {prompt}: it is not",
                    f"assert hits == {i}  # block {block} holds something else",
                )
            if block in blocks[i + 1 :]:
                raise self._fault(
                    faults.DoubleHandOut,
                    f"block {block} is in {name} twice",
                    f"assert len({{*{name}}}) == {n}",
                )
        values[hits:] = self._write_fresh(blocks[hits:])
        self._add(Claim(name, blocks, values, prompt, written=hits == n))
        self._check()

    def append(self, index: int, n: int) -> None:
        """Extends a sequence, and writes into its last block if that is how the allocator works."""
        claim = self.claims[index]
        last = claim.blocks[-1] if claim.blocks else None
        shared = last is not None and self.held[last] > 1
        cost = n + (shared and self.subject.copies_on_write)
        if not self._claims_blocks(f"copies = a.append({claim.name}, {n})", cost):
            return
        copies = self._pairs("copies")
        if copies and (len(copies) > 1 or copies[0][0] != last):
            raise self._fault(
                faults.BadMove,
                f"append to {claim.name} returned the copies {copies}; its last block was {last}",
                f"assert [source for source, _ in copies] == [{last}]",
            )
        expected = [*claim.blocks[:-1], copies[0][1]] if copies else list(claim.blocks)
        blocks = self._blocks(claim.name)
        old = len(expected)
        if blocks[:old] != expected:
            raise self._fault(
                faults.LostMapping,
                f"{claim.name} shows {blocks[:old]} after the append, expected {expected}",
                f"assert [*{claim.name}][:{old}] == {expected}",
            )
        handed_out = [copies[0][1], *blocks[old:]] if copies else blocks[old:]
        shown = f"[*{claim.name}][{old - len(copies)}:]"
        self._check_new(claim.name, handed_out, n + len(copies), shown)
        for source, destination in copies:
            self._copy(source, destination)
        if self.subject.copies_on_write and last is not None:
            if shared and not copies:
                other = next(c for c in self.claims if c is not claim and last in c.blocks)
                raise self._fault(
                    faults.LostContents,
                    f"append to {claim.name} writes into block {last}, which {other.name} shares",
                    f"assert {last} not in {claim.name}",
                )
            claim.values[-1:] = self._write_fresh(expected[-1:])
            claim.prompt = None
        claim.blocks = blocks
        claim.values += self._write_fresh(blocks[old:])
        self._check()

    def _claims_blocks(self, line: str, cost: int, may_refuse: bool = False) -> bool:
        """Runs a call that needs ``cost`` free blocks: whether it worked, which it must if they
        are there."""
        free = self.free
        try:
            self.script.run(line)
        except Exception as error:
            call = self.script.call
            if not may_refuse and not isinstance(error, self.subject.refuses):
                raise self._crash(error) from error
            if cost <= free and not may_refuse:
                message = f"{call} was refused although {free} blocks are free"
                raise self._fault(faults.LostBlock, message) from error
            self._raised(error)
            return False
        return True

    # -- calls that share and release ----------------------------------------------------------

    def release(self, index: int, start: int = 0, stop: int | None = None) -> None:
        """Releases a claim, or (of ids) a part of it."""
        claim = self.claims[index]
        stop = len(claim.blocks) if stop is None else stop
        if self.deals_in_sequences or stop - start == len(claim.blocks):
            self._must(f"a.release({claim.name})")
            del self.claims[index]
            self.gone.append((claim.name, claim.blocks))
        else:
            self._must(f"a.release({_part(claim, start, stop)})")
            blocks = claim.blocks[start:stop]
            self.gone.append((str(blocks), blocks))
            kept = f"{claim.name}[{stop}:]"
            if start:
                kept = f"[*{claim.name}[:{start}], *{kept}]"
            self._must(f"{claim.name} = {kept}")
            del claim.blocks[start:stop], claim.values[start:stop]
            claim.prompt = None
        self._check()

    def release_together(self, first: int, second: int) -> None:
        """Releases two claims of ids in one call. Where they share a block, the call may refuse to
        be given it twice."""
        one, other = self.claims[first], self.claims[second]
        call = f"a.release([*{one.name}, *{other.name}])"
        if set(one.blocks).isdisjoint(other.blocks):
            self._must(call)
        elif not self._may(call):
            return
        self.gone += [(claim.name, claim.blocks) for claim in (one, other)]
        self.claims = [claim for claim in self.claims if claim not in (one, other)]
        self._check()

    def share(self, index: int, start: int = 0, stop: int | None = None) -> None:
        """A second claim on the same blocks, by ``fork`` or (of ids, or a part) ``retain``."""
        claim, name = self.claims[index], next(self._names)
        if self.deals_in_sequences:
            self._must(f"{name} = a.fork({claim.name})")
            start, stop = 0, len(claim.blocks)
        else:
            stop = len(claim.blocks) if stop is None else stop
            what = _part(claim, start, stop)
            self._must(f"a.retain({what})")
            self._must(f"{name} = {what}")
        part = slice(start, stop)
        self._add(Claim(name, claim.blocks[part], claim.values[part]))
        self._check()

    def truncate(self, index: int, n: int) -> None:
        """Cuts a sequence to its first ``n`` blocks."""
        claim = self.claims[index]
        self._must(f"a.truncate({claim.name}, {n})")
        del claim.blocks[n:], claim.values[n:]
        self._check()

    # -- calls that move, publish and evict ----------------------------------------------------

    def compact(self) -> None:
        """Lets the allocator move blocks, and carries its moves out."""
        self._must("moves = a.compact()")
        new: dict[int, int] = {}
        for source, destination in self._pairs("moves"):
            if not self.subject.is_block(source) or not self.subject.is_block(destination):
                raise self._fault(
                    faults.BadMove,
                    f"a move from {source} to {destination}, of which one is no block of this pool",
                    f"assert ({source}, {destination}) not in [*map(tuple, moves)]",
                )
            if destination in self.held:
                holder = next(claim for claim in self.claims if destination in claim.blocks)
                raise self._fault(
                    faults.BadMove,
                    f"a move from {source} to {destination}, which {holder.name} holds",
                    f"assert ({source}, {destination}) not in [*map(tuple, moves)]",
                )
            self._copy(source, destination)
            new[source] = destination
            for claim in self.claims:
                claim.blocks = [destination if b == source else b for b in claim.blocks]
        if not self.deals_in_sequences:
            for claim in self.claims:
                if new.keys() & set(self._blocks(claim.name)):
                    self._must(f"{claim.name} = {claim.blocks}")
        self._check()

    def publish(self, index: int) -> None:
        """Writes what is left of a prompt, then says so."""
        claim = self.claims[index]
        assert claim.prompt is not None
        for i, block in enumerate(claim.blocks):
            claim.values[i] = self._prompt_value(claim.prompt, i)
            self._write(block, claim.values[i])
        self._must(f"a.publish({claim.name}, {claim.prompt})")
        claim.written = True
        self._check()

    def evict(self, n: int) -> None:
        """Has cached blocks forgotten."""
        before = self._cached()
        self._must(f"evicted = a.evict({n})")
        evicted = self._whole(self.script.value("evicted"), "evicted", faults.WrongStatistics)
        after = self._cached()
        self._check()
        if not 0 <= evicted <= n or (before is not None and after != before - evicted):
            counts = "" if before is None else f"; {before} were cached before, {after} are now"
            proof = f"assert 0 <= evicted <= {n}"
            if before is not None:
                proof += f" and a.stats()['cached'] == {before} - evicted"
            message = f"evict({n}) says that it evicted {evicted}{counts}"
            raise self._fault(faults.WrongStatistics, message, proof)

    def _cached(self) -> int | None:
        return self._stats().get("cached")

    # -- calls that must be refused ------------------------------------------------------------

    def release_again(self, index: int) -> None:
        """Releases what was released; not if all its ids have a new holder, who cannot be told
        from the old one."""
        what, blocks = self.gone[index]
        held = self.held
        if self.deals_in_sequences or any(block not in held for block in blocks):
            self._must_refuse(f"a.release({what})", faults.ReleasedTwice, "it was released already")

    def release_foreign(self, block: int, index: int | None) -> None:
        """Releases an id that was never handed out, alone or behind a good claim."""
        what = f"[{block}]" if index is None else f"[*{self.claims[index].name}, {block}]"
        self._must_refuse(
            f"a.release({what})", faults.ForeignRelease, f"block {block} was never handed out"
        )

    def release_doubled(self, index: int) -> None:
        """Releases one reference by naming its block twice: an error, or once."""
        claim = self.claims[index]
        block = claim.blocks[0]
        if not self._may(f"a.release([{block}, {block}])"):
            return
        self._must(f"{claim.name} = {claim.name}[1:]")
        del claim.blocks[0], claim.values[0]
        claim.prompt = None
        self.claims = [claim for claim in self.claims if claim.blocks]
        self._check()

    def use_again(self, index: int) -> None:
        """Shares or extends what was released."""
        what, blocks = self.gone[index]
        held = self.held
        for method, call in (("fork", "{}"), ("append", "{}, 1"), ("retain", "{}")):
            if method not in self.has:
                continue
            # Ids may have a new holder, and a cache may let one retain what nobody holds.
            if method == "retain" and (
                "claim_prompt" in self.has or all(block in held for block in blocks)
            ):
                continue
            self._must_refuse(
                f"a.{method}({call.format(what)})",
                faults.UsedAfterRelease,
                f"{what} was released",
            )

    def _must_refuse(self, call: str, kind: type[faults.AllocatorFault], reason: str) -> None:
        if self._may(call):
            message = f"{call} was accepted although {reason}"
            raise self._fault(kind, message, f"assert False, {f'accepted although {reason}'!r}")

    # -- the end -------------------------------------------------------------------------------

    def finish(self) -> None:
        """Releases everything: then every block can be had, once. Nothing is cached after that, and
        no prompt may find anything but what others then publish."""
        while self.claims:
            self.release(0)
        self.claim_all()
        if not self.prompts:
            return
        while self.claims:
            self.release(0)
        for prompt, n in self.prompts.items():
            self.claim_prompt(prompt, min(n, self.num_blocks))
            if not self.claims[0].written:
                self.publish(0)
            self.release(0)

    def claim_all(self) -> None:
        """Claims all that is free, block for block accounted for, and one more."""
        self.claim(self.free)
        self.claim(1)

    def _probe(self) -> None:
        """A count is off: is a block lost, or free while somebody holds it? Raises that, if so."""
        lines, claims, has = len(self.script.lines), list(self.claims), self.has
        self.has = has - {"stats", "references", "validate"}
        self.claim_all()
        self.has, self.claims = has, claims
        del self.script.lines[lines:]

    # -- how a call may end --------------------------------------------------------------------

    def _may(self, call: str) -> bool:
        """Runs a call that may raise whatever it likes, and then must have changed nothing: whether
        it worked."""
        try:
            self.script.run(call)
        except Exception as error:
            self._raised(error)
            return False
        return True

    def _raised(self, error: Exception) -> None:
        """The last line raised, as it may or must: nothing may have changed."""
        self._check(raised=self.script.forgive(error))

    def _add(self, claim: Claim) -> None:
        if claim.blocks or self.deals_in_sequences:
            self.claims.append(claim)
