"""Two channels between ranks: torch.distributed (gloo), and pipes of one machine.

What lives here: how a message gets from one rank to another, whole, in order, and without making
anybody wait for a rank that hangs. What never lives here: what a message says.

A send only queues; a thread a peer does the sending. torch is imported by ``TorchChannel`` alone.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from importlib import import_module
from multiprocessing import connection as mp_connection
from typing import Any, Self

from .errors import InvalidConfig, MissingExtra

__all__ = ["PipeChannel", "TorchChannel"]

_MAX_MESSAGE = 1 << 28
"""Bytes. The moves of a plan over 16 M blocks fit; a length beyond it is damage."""
_GOODBYE = -1
_FOREVER = timedelta(days=365)
_LINGER_S = 1.0


class _Outbox:
    """Messages to one peer, sent by a thread that may wait as long as the peer lets it."""

    def __init__(self, name: str, deliver: Callable[[bytes | None], None]) -> None:
        self._deliver = deliver
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._started = False
        self._lock = threading.Lock()
        self.broken = False

    def put(self, data: bytes | None) -> None:
        """None: the last one, a goodbye."""
        with self._lock:
            if not self._started:
                self._started = True
                self._thread.start()
        self._queue.put(data)

    def join(self, deadline: float) -> bool:
        """Whether all is sent, or never will be."""
        if self._started:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            data = self._queue.get()
            try:
                self._deliver(data)
            except Exception:  # whatever a transport raises, it means that nothing gets there
                self.broken = True
                return
            if data is None:
                return


class PipeChannel:
    """A channel over ``multiprocessing`` connections, one a peer.

    A peer counts as gone when the other end of its connection is closed: with
    ``multiprocessing.Pipe`` close the end that was handed to another process in this one.

    Args:
        rank: of this end.
        connections: peer rank -> duplex connection; closed by :meth:`close`.
    """

    def __init__(self, rank: int, connections: Mapping[int, Any]) -> None:
        self._rank = rank
        self._open = dict(connections)
        self._gone: set[int] = set()
        self._outboxes = {
            peer: _Outbox(f"kvmmu to rank {peer}", self._deliver(connection))
            for peer, connection in self._open.items()
        }
        self._connections = dict(self._open)

    @property
    def rank(self) -> int:
        """The rank of this end."""
        return self._rank

    def send(self, rank: int, data: bytes) -> None:
        """Queues a message.

        Raises:
            ConnectionError: the peer is gone, or this channel is closed.
            InvalidConfig: no peer has this rank.
        """
        _send(self._outboxes, self._gone, rank, data)

    def receive(self, timeout_s: float) -> tuple[int, bytes | None] | None:
        """The next message, (rank, None) once for a peer that is gone, or None after
        ``timeout_s`` seconds. Once a message has begun to arrive its rest is waited for. One
        thread receives at a time."""
        if not self._open:
            time.sleep(max(0.0, timeout_s))
            return None
        ready = mp_connection.wait(list(self._open.values()), max(0.0, timeout_s))
        if not ready:
            return None
        rank = next(peer for peer, one in self._open.items() if one is ready[0])
        # The next call begins behind this one, so that a peer that talks much starves nobody.
        connection = self._open.pop(rank)
        try:
            data: bytes = connection.recv_bytes(_MAX_MESSAGE)
        except (EOFError, OSError):
            self._gone.add(rank)
            return rank, None
        self._open[rank] = connection
        return rank, data

    def close(self) -> None:
        """Sends what is queued, for at most a second, and closes the connections. One whose peer
        does not take what was queued stays open until this process ends."""
        deadline = time.monotonic() + _LINGER_S
        for peer, outbox in self._outboxes.items():
            self._gone.add(peer)
            outbox.put(None)
        for peer, outbox in self._outboxes.items():
            if outbox.join(deadline):
                self._connections[peer].close()
        self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _deliver(connection: Any) -> Callable[[bytes | None], None]:
        def deliver(data: bytes | None) -> None:
            if data is not None:
                connection.send_bytes(data)

        return deliver


class TorchChannel:
    """A channel over a torch.distributed process group with the gloo backend.

    A wait that times out inside of gloo closes every connection of the group, and a finished
    receive does not show before it is waited for. So nothing here waits with a limit inside of
    gloo: a thread a peer receives, without one, into a queue, and the limits are the queue's.

    Each message is a length (int64 [1], -1 is a goodbye) and its bytes (uint8 [n]), sent from
    point to point under ``tag``.

    Args:
        peers: global ranks to talk with: all ranks that copy, at the deciding one; the deciding
            one, at the others.
        group: the process group; None: the default one. If that has another backend, make one
            with ``torch.distributed.new_group(backend="gloo")``.
        tag: keeps these messages apart from other ones in the group.

    Raises:
        MissingExtra: torch is not installed.
        InvalidConfig: no process group, another backend, or a peer that is not in it.
    """

    def __init__(self, peers: Iterable[int], *, group: Any = None, tag: int = 0x6B76) -> None:
        try:
            self._torch: Any = import_module("torch")
        except ImportError as error:
            raise MissingExtra(
                "TorchChannel needs torch, which the extra kvmmu[torch] brings", extra="torch"
            ) from error
        self._dist: Any = import_module("torch.distributed")
        if not self._dist.is_available() or not self._dist.is_initialized():
            raise InvalidConfig(
                "there is no process group yet: call torch.distributed.init_process_group",
                argument="group",
            )
        backend = str(self._dist.get_backend(group))
        if "gloo" not in backend:
            raise InvalidConfig(
                f"the group must have the gloo backend, not {backend}", argument="group"
            )
        self._group = group
        self._tag = tag
        self._rank = int(self._dist.get_rank())
        members = set(self._dist.get_process_group_ranks(group))
        peers = [int(peer) for peer in peers]
        if wrong := [peer for peer in peers if peer not in members or peer == self._rank]:
            raise InvalidConfig(
                f"peers must be other ranks of the group {sorted(members)}, not {wrong}",
                argument="peers",
            )
        self._gone: set[int] = set()
        self._inbox: queue.SimpleQueue[tuple[int, bytes | None]] = queue.SimpleQueue()
        self._outboxes = {
            peer: _Outbox(f"kvmmu to rank {peer}", self._deliver(peer)) for peer in peers
        }
        self._receivers = [
            threading.Thread(
                target=self._receive_all, args=(peer,), name=f"kvmmu from rank {peer}", daemon=True
            )
            for peer in peers
        ]
        for receiver in self._receivers:
            receiver.start()

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self._rank

    def send(self, rank: int, data: bytes) -> None:
        """Queues a message.

        Raises:
            ConnectionError: the peer is gone, or this channel is closed.
            InvalidConfig: no peer has this rank.
        """
        _send(self._outboxes, self._gone, rank, data)

    def receive(self, timeout_s: float) -> tuple[int, bytes | None] | None:
        """The next message, (rank, None) once for a peer that is gone, or None after
        ``timeout_s`` seconds. Any thread may call."""
        try:
            return self._inbox.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None

    def close(self) -> None:
        """Says goodbye to all peers and waits, for at most a second, until they have too. To be
        called at every end before the process group is destroyed."""
        deadline = time.monotonic() + _LINGER_S
        for peer, outbox in self._outboxes.items():
            self._gone.add(peer)
            outbox.put(None)
        for outbox in self._outboxes.values():
            outbox.join(deadline)
        for receiver in self._receivers:
            receiver.join(max(0.0, deadline - time.monotonic()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _deliver(self, peer: int) -> Callable[[bytes | None], None]:
        def deliver(data: bytes | None) -> None:
            length = _GOODBYE if data is None else len(data)
            self._wait_for(
                self._dist.isend, self._torch.tensor([length], dtype=self._torch.int64), peer
            )
            if data:
                array = self._torch.frombuffer(bytearray(data), dtype=self._torch.uint8)
                self._wait_for(self._dist.isend, array, peer)

        return deliver

    def _receive_all(self, peer: int) -> None:
        try:
            while True:
                header = self._torch.zeros(1, dtype=self._torch.int64)
                self._wait_for(self._dist.irecv, header, peer)
                length = int(header[0])
                if not 0 <= length <= _MAX_MESSAGE:
                    break  # a goodbye, or nobody knows where the next message begins
                body = self._torch.empty(length, dtype=self._torch.uint8)
                if length:
                    self._wait_for(self._dist.irecv, body, peer)
                self._inbox.put((peer, body.numpy().tobytes()))
        except Exception:
            pass
        self._gone.add(peer)
        self._inbox.put((peer, None))

    def _wait_for(self, operation: Any, tensor: Any, peer: int) -> None:
        operation(tensor, peer, group=self._group, tag=self._tag).wait(_FOREVER)


def _send(outboxes: Mapping[int, _Outbox], gone: set[int], rank: int, data: bytes) -> None:
    outbox = outboxes.get(rank)
    if outbox is None:
        raise InvalidConfig(
            f"rank {rank} is none of the peers {sorted(outboxes)}", argument="rank", rank=rank
        )
    if len(data) > _MAX_MESSAGE:
        raise InvalidConfig(
            f"a message of {len(data)} bytes; {_MAX_MESSAGE} are allowed", given=len(data)
        )
    if rank in gone or outbox.broken:
        raise ConnectionError(f"the connection to rank {rank} is gone")
    outbox.put(data)
