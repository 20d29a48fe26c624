"""One MMU decides, R ranks copy: compaction where the KV cache is split over processes.

What lives here: the order of one ranked pass, the messages it is made of, and the worker's loop.
What never lives here: a transport (see ``channels.py``, or bring your own), a choice of moves, or
a copy.

The plan is decided once, and its bytes go to every rank; no rank decides anything from a state of
its own. The tables flip (``commit``) after every rank has said that its copies are done, and not
at all if one could not copy. Until then no rank's destinations are mapped, so whatever a rank has
copied by then is harmless.

The danger is a rank that does **not** answer: it may still be copying into its destinations. If
the moves were aborted, those blocks would be handed out, written by the next step and then
overwritten by the late copy. So the moves stay begun (``RankedCompaction.pending``), their
destinations out of use and their sources where they are, until that rank answers after all or is
declared dead with ``forget``. Nothing new is begun meanwhile: at most one plan's blocks are held.

Messages::

    bytes   4  magic "kvmr"      2  version          2  kind
            8  session           8  number           8  epoch
            4  rank              4  num_blocks       8  bytes of the body
            4  CRC-32 of the 40 before               4  CRC-32 of the body
            .  body                                                     (all little-endian)

    to a rank     PLAN (body: bytes of Moves), QUERY, STOP
    from a rank   DONE, FAILED (body: UTF-8), HERE (epoch: the last one applied), UNREADABLE (UTF-8)

The session is drawn by each RankedCompaction, so that answers to one that was there before mean
nothing. Numbers rise with every message, and answers carry the number of what they answer. A rank
works off its messages in order, hence an answer to a later message answers all earlier ones: a
plan or an answer that was damaged on its way is cleared up by a QUERY. UNREADABLE answers nothing
(it cannot say to what), it only asks for a QUERY.
"""

from __future__ import annotations

import math
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NoReturn, Protocol

import numpy as np

from .errors import InvalidConfig, InvalidMessage, RankFailed, RankLost, RankTimeout

if TYPE_CHECKING:
    from ._core import MMU, Moves, Plan
    from .movers import Mover, SupportsMove

__all__ = ["Channel", "PendingMoves", "RankedCompaction", "serve_rank"]

_HEADER = struct.Struct("<4sHHQQQIIQII")
_CHECKED = 48  # bytes of the header in front of the checksums
_MAGIC = b"kvmr"
_VERSION = 1
_NO_EPOCH = 2**64 - 1
_MAX_TEXT = 4096
_MOST_AT_ONCE = 1000
_MAX_QUERIES = 3
"""Queries a rank gets for one plan: enough for damage on the way, not a storm."""


class Channel(Protocol):
    """Carries messages between ranks, whole and in order from one rank to another.

    ``TorchChannel`` and ``PipeChannel`` are two; a serving stack may bring its own.
    """

    @property
    def rank(self) -> int:
        """The rank of this end."""
        ...

    def send(self, rank: int, data: bytes) -> None:
        """Sends a message to a rank, without waiting until it is received.

        Raises:
            ConnectionError: the connection is known to be gone, and nothing was sent.
        """
        ...

    def receive(self, timeout_s: float) -> tuple[int, bytes | None] | None:
        """The next message of any rank, or None when there was none for ``timeout_s`` seconds.

        Returns:
            (rank, message); (rank, None) once when the connection to that rank is gone.
        """
        ...


class _Kind(IntEnum):
    PLAN = 1
    QUERY = 2
    STOP = 3
    DONE = 4
    FAILED = 5
    HERE = 6
    UNREADABLE = 7


@dataclass(frozen=True, slots=True)
class _Message:
    kind: _Kind
    session: int
    number: int
    epoch: int
    rank: int
    """To whom, in a message to a rank; from whom, in an answer."""
    num_blocks: int = 0
    body: bytes = b""
    whole: bool = True
    """False: the header is sound, the body is not."""

    def to_bytes(self) -> bytes:
        fields = (self.session, self.number, self.epoch, self.rank, self.num_blocks)
        head = _HEADER.pack(_MAGIC, _VERSION, self.kind, *fields, len(self.body), 0, 0)[:_CHECKED]
        sums = struct.pack("<II", zlib.crc32(head), zlib.crc32(self.body))
        return head + sums + self.body

    @staticmethod
    def from_bytes(data: bytes) -> _Message:
        if len(data) < _HEADER.size:
            raise InvalidMessage(
                f"{len(data)} bytes are no message between ranks; a header has {_HEADER.size}",
                given=len(data),
            )
        fields = _HEADER.unpack_from(data)
        magic, version, kind, session, number, epoch, rank, blocks, length, head_sum, body_sum = (
            fields
        )
        if magic != _MAGIC:
            raise InvalidMessage("not a message between ranks", given=len(data))
        # Before the checksum: another version may have another header.
        if version != _VERSION:
            raise InvalidMessage(
                f"a message of version {version}, but this is version {_VERSION}: all ranks need "
                "the same kvmmu",
                given=len(data),
                version=version,
                expected=_VERSION,
            )
        if zlib.crc32(data[:_CHECKED]) != head_sum or kind not in set(_Kind):
            raise InvalidMessage("a message between ranks was damaged", given=len(data))
        body = data[_HEADER.size :]
        whole = len(body) == length and zlib.crc32(body) == body_sum
        return _Message(_Kind(kind), session, number, epoch, rank, blocks, body, whole)


@dataclass(frozen=True, slots=True)
class PendingMoves:
    """Moves that a rank owes an answer for: begun, neither committed nor aborted."""

    epoch: int
    num_moves: int
    """Destinations out of use."""
    ranks: tuple[int, ...]
    """Those that may still be copying."""


@dataclass(slots=True)
class _Transaction:
    moves: Moves
    number: int
    """Of its PLAN messages."""
    owing: set[int] = field(default_factory=set)
    """Ranks that have not answered."""
    lost: set[int] = field(default_factory=set)
    failures: dict[int, str] = field(default_factory=dict)
    queries: dict[int, int] = field(default_factory=dict)


class RankedCompaction:
    """Runs plans on several ranks: ``begin``, copies everywhere, ``commit`` when all have answered.

    Any thread may call; one call works at a time. Like :func:`kvmmu.compact` it belongs between
    two steps, and every rank's ``serve_rank`` must be able to copy there.

    Args:
        mmu: the one that decides.
        channel: leads to the ranks. Nothing else may receive from it.
        ranks: those that run ``serve_rank``; not the rank of this end. May be empty if there is a
            ``local_mover``.
        timeout_s: seconds that all ranks together have to answer.
        local_mover: copies in this process too, if it holds a share of the cache itself.

    Raises:
        InvalidConfig: names the argument.
    """

    def __init__(
        self,
        mmu: MMU,
        channel: Channel,
        ranks: Iterable[int],
        *,
        timeout_s: float,
        local_mover: SupportsMove | None = None,
    ) -> None:
        self._ranks = _checked_ranks(ranks, channel.rank, local_mover is not None)
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise InvalidConfig(
                f"timeout_s must be a number of seconds above 0, not {timeout_s}",
                argument="timeout_s",
            )
        self._mmu = mmu
        self._channel = channel
        self._timeout_s = float(timeout_s)
        self._local_mover = local_mover
        self._lock = threading.RLock()
        self._session = secrets.randbits(64)
        self._number = 0
        self._pending: _Transaction | None = None
        self._lost: set[int] = set()
        self._ignored = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part, without forgotten ones."""
        return self._ranks

    @property
    def pending(self) -> PendingMoves | None:
        """What ranks owe an answer for, as of the last call."""
        pending = self._pending
        if pending is None:
            return None
        moves = pending.moves
        return PendingMoves(moves.epoch, len(moves), tuple(sorted(pending.owing)))

    @property
    def ignored_messages(self) -> int:
        """Messages that meant nothing here: damaged, old, or from a rank that takes no part."""
        return self._ignored

    def compact(self) -> int:
        """One pass of compaction, if the memory needs it; as :meth:`run_plan` otherwise."""
        with self._lock:
            # First: blocks of pending moves would spoil the plan.
            self._clear(time.monotonic() + self._timeout_s)
            plan = self._mmu.plan_compaction()
            return 0 if plan is None else self.run_plan(plan)

    def run_plan(self, plan: Plan) -> int:
        """Carries out a plan on all ranks.

        Returns:
            blocks moved; fewer than ``len(plan)`` when some are no longer what the plan saw.

        Raises:
            RankFailed: a rank could not copy.
            RankTimeout: a rank has not answered, to this plan or to the one before. In the latter
                case nothing was begun; the rank was asked and waited for once more, and from then
                on the error comes at once. RankLost: its connection is gone.
            InvalidPlan: from ``begin``.
            whatever the local mover raises, when all ranks have answered.
            In each case every sequence has the blocks it had before.
        """
        with self._lock:
            deadline = time.monotonic() + self._timeout_s
            self._clear(deadline)
            moves = self._mmu.begin(plan)
            transaction = self._pending = _Transaction(moves, self._next_number())
            try:
                if len(moves):
                    self._copy(transaction, deadline)
            except BaseException:  # also when interrupted
                self._abort_if_answered()
                raise
            if transaction.owing or transaction.lost or transaction.failures:
                self._abort_if_answered()
                self._raise_for(transaction)
            self._pending = None
            return self._mmu.commit(moves)

    def poll(self) -> PendingMoves | None:
        """Takes in late answers without waiting; aborts the pending moves if that were all.

        Returns:
            what is still pending.
        """
        with self._lock:
            for _ in range(_MOST_AT_ONCE):  # a channel that never falls silent holds nobody up
                received = self._channel.receive(0.0)
                if received is None:
                    break
                self._take(*received)
            self._abort_if_answered()
            return self.pending

    def forget(self, rank: int) -> None:
        """Declares a rank dead: it takes no further part, and no answer is expected from it.

        Only right when it cannot copy any more (its process has ended). Its memory no longer
        follows the tables from here on.

        Raises:
            InvalidConfig: not one of ``ranks``.
        """
        with self._lock:
            if rank not in self._ranks:
                raise InvalidConfig(
                    f"rank {rank} is none of {list(self._ranks)}", argument="rank", rank=rank
                )
            self._ranks = tuple(other for other in self._ranks if other != rank)
            if self._pending is not None:
                self._pending.owing.discard(rank)
            self._abort_if_answered()

    def stop_ranks(self) -> None:
        """Tells every rank to leave ``serve_rank`` after the messages before this one."""
        with self._lock:
            for rank in self._ranks:
                self._send(rank, _Kind.STOP, self._next_number())

    # -- one pass --------------------------------------------------------------------------------

    def _clear(self, deadline: float) -> None:
        """Raises RankTimeout when an answer is owed from before. The first call asks and waits for
        it, later ones only look: a serving loop must not wait at every step."""
        self.poll()
        pending = self._pending
        if pending is not None:
            unasked = [
                rank for rank in sorted(pending.owing - self._lost) if rank not in pending.queries
            ]
            for rank in unasked:
                self._query(pending, rank)
            if unasked:
                self._await(pending, deadline)
                self._abort_if_answered()
            if self._pending is not None:
                self._raise_for(pending)
        if gone := self._lost.intersection(self._ranks):
            rank = min(gone)
            raise RankLost(
                f"the connection to rank {rank} is gone; nothing was begun",
                rank=rank,
                ranks=(),
                epoch=None,
                seconds=0.0,
                failures={},
            )

    def _copy(self, transaction: _Transaction, deadline: float) -> None:
        data = transaction.moves.to_bytes()
        epoch, number = transaction.moves.epoch, transaction.number
        for rank in self._ranks:
            transaction.owing.add(rank)  # before: an interrupted send may have sent
            if not self._send(rank, _Kind.PLAN, number, epoch, data):
                transaction.owing.discard(rank)
                transaction.lost.add(rank)
        if self._local_mover is not None:
            try:
                self._local_mover.move(transaction.moves.pairs)
            except Exception as error:
                self._await(transaction, deadline)
                transaction.failures[self._channel.rank] = _sentence(error)
                if not transaction.owing:
                    raise  # run_plan aborts
                self._raise_for(transaction, cause=error)
        self._await(transaction, deadline)

    def _await(self, transaction: _Transaction, deadline: float) -> None:
        """Takes answers until all are there, the time is up, or the rest cannot come."""
        while transaction.owing - self._lost:
            left = deadline - time.monotonic()
            received = self._channel.receive(max(left, 0.0))
            if received is not None:
                self._take(*received)
            if left <= 0:
                return

    def _take(self, rank: int, data: bytes | None) -> None:
        pending = self._pending
        if data is None:
            self._lost.add(rank)
            if pending is not None and rank in pending.owing:
                pending.lost.add(rank)
            return
        if pending is None or rank not in pending.owing:
            self._ignored += 1
            return
        try:
            answer = _Message.from_bytes(data)
            if answer.rank != rank or not answer.whole:
                raise InvalidMessage("a damaged answer", given=len(data))
        except InvalidMessage:
            self._ignored += 1
            self._query(pending, rank)
            return
        if answer.kind is _Kind.UNREADABLE:
            self._query(pending, rank)
            return
        if answer.session != self._session or answer.number < pending.number:
            self._ignored += 1
            return
        epoch = pending.moves.epoch
        if answer.number > self._number:  # nothing of that number was sent
            self._ignored += 1
            return
        if answer.kind is _Kind.DONE and answer.number != pending.number:
            self._ignored += 1
            return
        if answer.number == pending.number and answer.epoch != epoch:
            self._ignored += 1
            return
        if answer.kind is _Kind.FAILED:
            pending.failures[rank] = answer.body.decode("utf-8", "replace")
        elif answer.kind is _Kind.HERE and answer.epoch != epoch:
            pending.failures[rank] = "the plan did not arrive whole"
        elif answer.kind not in (_Kind.HERE, _Kind.DONE):
            self._ignored += 1
            return
        pending.owing.discard(rank)

    def _query(self, pending: _Transaction, rank: int) -> None:
        asked = pending.queries.get(rank, 0)
        if asked < _MAX_QUERIES:
            pending.queries[rank] = asked + 1
            self._send(rank, _Kind.QUERY, self._next_number())

    def _send(
        self, rank: int, kind: _Kind, number: int, epoch: int = _NO_EPOCH, body: bytes = b""
    ) -> bool:
        """False: the connection is gone and nothing was sent."""
        blocks = self._mmu.num_blocks
        message = _Message(kind, self._session, number, epoch, rank, blocks, body)
        try:
            self._channel.send(rank, message.to_bytes())
        except ConnectionError:
            self._lost.add(rank)
            return False
        return True

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _abort_if_answered(self) -> None:
        pending = self._pending
        if pending is not None and not pending.owing:
            self._pending = None
            self._mmu.abort(pending.moves)

    def _raise_for(self, transaction: _Transaction, cause: Exception | None = None) -> None:
        """Raises for a transaction that some rank did not complete."""
        epoch, failures = transaction.moves.epoch, dict(transaction.failures)
        owing = tuple(sorted(transaction.owing))
        if transaction.lost or self._lost.intersection(owing):
            rank = min(transaction.lost or self._lost.intersection(owing))
            self._raise_unanswered(
                RankLost,
                f"the connection to rank {rank} is gone, and it had not answered to epoch {epoch}",
                rank,
                transaction,
                cause,
            )
        if owing:
            self._raise_unanswered(
                RankTimeout,
                f"rank {owing[0]} has not answered to epoch {epoch} in {self._timeout_s:g} s",
                owing[0],
                transaction,
                cause,
            )
        if failures:
            rank = min(failures)
            raise RankFailed(
                f"rank {rank} could not copy epoch {epoch}: {failures[rank]}",
                rank=rank,
                epoch=epoch,
                failures=failures,
            ) from cause

    def _raise_unanswered(
        self,
        kind: type[RankTimeout],
        sentence: str,
        rank: int,
        transaction: _Transaction,
        cause: Exception | None,
    ) -> NoReturn:
        owing = tuple(sorted(transaction.owing))
        kept = f"; {len(transaction.moves)} destinations stay out of use" if owing else ""
        raise kind(
            sentence + kept,
            rank=rank,
            ranks=owing,
            epoch=transaction.moves.epoch,
            seconds=self._timeout_s,
            failures=dict(transaction.failures),
        ) from cause


def serve_rank(
    mover: Mover,
    channel: Channel,
    stop: threading.Event | None = None,
    *,
    mmu_rank: int = 0,
    poll_s: float = 0.1,
) -> int:
    """Applies what the deciding rank sends, and answers, until told to stop.

    Blocks; run it in a thread of its own if the rank has other things to do, which must then keep
    steps and copies in the order that ``RankedCompaction`` asks for. It follows one
    ``RankedCompaction``, and so does its mover; one that is started later needs a new call with a
    new mover. A message that cannot be read, a plan that cannot be applied and an error of the
    mover are answers, not ends of the loop.

    Args:
        mover: over this rank's share of the cache.
        channel: leads to the deciding rank. Nothing else may receive from it.
        stop: ends the loop when set, between two messages, as ``RankedCompaction.stop_ranks`` does.
        mmu_rank: who decides; messages of others are refused.
        poll_s: seconds between two looks at ``stop``.

    Returns:
        plans applied.

    Raises:
        RankLost: the connection to the deciding rank is gone. Numbers: ``rank``, ``epoch`` (the
            last one applied, or None).
    """
    session: int | None = None
    applied = 0
    while stop is None or not stop.is_set():
        received = channel.receive(poll_s)
        if received is None:
            continue
        sender, data = received
        if data is None:
            if sender == mmu_rank:
                _mmu_lost(mmu_rank, mover)
            continue
        fatal: BaseException | None = None
        try:
            message = _Message.from_bytes(data)
            if sender != mmu_rank or message.rank != channel.rank:
                raise InvalidMessage(
                    f"rank {channel.rank} takes its own messages from rank {mmu_rank}, not those "
                    f"for rank {message.rank} from rank {sender}",
                    given=len(data),
                )
        except InvalidMessage as error:
            answer = _Message(_Kind.UNREADABLE, 0, 0, 0, channel.rank, body=_text(str(error)))
        else:
            if session is None:
                session = message.session
            kind, epoch, text = _Kind.DONE, message.epoch, ""
            try:
                if message.session != session:
                    raise InvalidConfig("this rank follows another RankedCompaction")
                if message.kind is _Kind.STOP:
                    return applied
                if message.kind is _Kind.PLAN:
                    _apply(mover, message)
                    applied += 1
                elif message.kind is _Kind.QUERY:
                    last = mover.last_epoch
                    kind, epoch = _Kind.HERE, _NO_EPOCH if last is None else last
                else:
                    raise InvalidMessage(f"{message.kind.name} is an answer", given=len(data))
            except BaseException as error:
                kind, text = _Kind.FAILED, _sentence(error)
                if not isinstance(error, Exception):
                    fatal = error
            answer = _Message(
                kind, message.session, message.number, epoch, channel.rank, body=_text(text)
            )
        try:
            channel.send(sender, answer.to_bytes())
        except ConnectionError:
            if fatal is None and sender == mmu_rank:
                _mmu_lost(mmu_rank, mover)
        if fatal is not None:
            raise fatal
    return applied


def _apply(mover: Mover, message: _Message) -> None:
    from ._core import Moves  # here, so that reading this module needs no compiled core

    if not message.whole:
        raise InvalidMessage("the plan was damaged on its way", given=len(message.body))
    moves = Moves.from_bytes(message.body)
    if moves.epoch != message.epoch:
        raise InvalidMessage(
            f"the moves are of epoch {moves.epoch}, their message of {message.epoch}",
            given=len(message.body),
        )
    mover.apply(moves, num_blocks=message.num_blocks)


def _mmu_lost(rank: int, mover: Mover) -> NoReturn:
    raise RankLost(
        f"the connection to rank {rank}, which decides, is gone",
        rank=rank,
        epoch=mover.last_epoch,
    )


def _sentence(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _text(text: str) -> bytes:
    return text.encode("utf-8", "replace")[:_MAX_TEXT]


def _checked_ranks(ranks: Iterable[int], own: int, local: bool) -> tuple[int, ...]:
    given = list(ranks)
    for rank in given:
        if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)):
            raise InvalidConfig(f"ranks must be integers, not {rank!r}", argument="ranks")
        if not 0 <= rank < 2**32:
            raise InvalidConfig(f"ranks are 0 .. 2**32 - 1, not {rank}", argument="ranks")
    if own in given:
        raise InvalidConfig(
            f"rank {own} is this end: its copies are those of local_mover", argument="ranks"
        )
    if len(set(given)) < len(given) or not (given or local):
        raise InvalidConfig(
            f"ranks must be at least one (or there is a local_mover), each named once, not {given}",
            argument="ranks",
        )
    return tuple(int(rank) for rank in given)
