"""Streams, events and memory of a device, as far as kvmmu needs them.

What lives here: the interface that the executor is written against. What never lives here: who
implements it (:mod:`.device`), and an order between two pieces of work; the executor decides that,
and so a recorded implementation of this interface can prove it.

Words: a *stream* runs what is queued in it in order. To *record* an event in a stream marks all
that is queued there by now; a stream that *waits* for the event runs what is queued in it later
only when that has finished. The host does not wait for either. An event can be recorded again:
whoever has begun to wait for it waits for what was recorded then.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from ..errors import InvalidConfig
from .launches import Launcher

__all__ = ["Event", "Stream", "Streams", "stream_for_once"]


class Event(Protocol):
    """A mark in a stream. One that was never recorded is over."""

    def query(self) -> bool:
        """Whether all that it marks has finished."""
        ...

    def synchronize(self) -> None:
        """The host waits for it."""
        ...

    def elapsed_ms(self, since: Event, /) -> float:
        """Milliseconds from another event to this one, both timed and over."""
        ...


class Stream(Protocol):
    """Work that runs in order."""

    def record(self, event: Event, /) -> None:
        """The event marks what is queued here by now."""
        ...

    def wait(self, event: Event, /) -> None:
        """What is queued here from now on runs after what the event marks."""
        ...

    def synchronize(self) -> None:
        """The host waits for all that is queued here."""
        ...


class Streams(Protocol):
    """One device. Every stream, event and buffer that it hands out is its own."""

    @property
    def device(self) -> str:
        """Its name, ``"cuda:0"``."""
        ...

    def current(self) -> Stream:
        """The stream that the caller queues its own work in."""
        ...

    def capturing(self) -> bool:
        """Whether the caller's stream is being captured in a graph: what is queued there does not
        run now, but with each replay."""
        ...

    def side(self) -> Stream:
        """A stream of high priority that nothing but kvmmu queues in; always the same."""
        ...

    def event(self, name: str, /, *, timed: bool = False) -> Event:
        """A new event.

        Args:
            name: what it is for, where somebody looks at a recording.
            timed: whether :meth:`Event.elapsed_ms` can be asked.
        """
        ...

    def kernel(self, name: str, /) -> Launcher:
        """A kernel of ``kvmmu.kernels``, compiled and loaded; it launches in the stream that is in
        :meth:`use`. The same one every time."""
        ...

    def use(self, stream: Stream, /) -> AbstractContextManager[None]:
        """Makes the device and this stream the ones that launches go to."""
        ...

    def zeros(self, num_bytes: int, /) -> Any:
        """Device memory, zeroed, finished when this returns: a torch uint8 tensor [num_bytes],
        aligned to 256 bytes."""
        ...

    def pinned(self, num_bytes: int, /) -> Any:
        """Page-locked host memory, zeroed, which the device can read at the same address: a torch
        uint8 tensor [num_bytes]."""
        ...

    def upload(self, stream: Stream, to: Any, source: Any, /) -> None:
        """Queues a copy of page-locked memory to device memory, uint8 tensors of one size. The
        source is read when the copy runs, not now."""
        ...


def stream_for_once(streams: Streams) -> Stream:
    """The caller's stream, for work that is to run once.

    Raises:
        InvalidConfig: it is being captured. Numbers: ``device``.
    """
    if streams.capturing():
        raise InvalidConfig(
            f"the current stream of {streams.device} is being captured in a graph, and each "
            "replay would do this again: allowed there are GraphMoves.launch and KVCache.write, "
            "the latter when no moves wait for a graph (GraphMoves.flush first)",
            device=streams.device,
        )
    return streams.current()
