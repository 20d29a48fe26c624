"""What a KVCache has on a CUDA device beside its memory.

What lives here: :class:`DeviceSide`: the mover, the tables, the writes of KV, and the marks by
which work of one step comes behind that of another. What never lives here: blocks, sequences, or
the life of a step (:mod:`kvmmu.cache`).

A step is *marked* when it is settled and again when it ends: an event in the stream that is
current then, behind all that the step has queued. Whoever queues something that steps in flight
must not see (a copy, new tables) calls :meth:`DeviceSide.follow` first. In the stream that the
steps themselves run in that says nothing new; in another one it is what keeps them apart. It comes
behind all copies too, since the stream that was current when those were queued may be another.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch

from ..bound import Bound
from ..buffers import Buffers
from ..errors import InvalidConfig
from ..layout import Layers
from ..storage import Storage
from .executor import CUDAMover
from .launches import Place, WriteKV
from .streams import Event, Streams, stream_for_once
from .tables import DeviceTables

__all__ = ["DeviceSide"]


class DeviceSide(Bound):
    """See the module. Not for several threads at once; the cache has a lock.

    Args:
        storage, layers: the memory.
        streams: of its device; None: torch's.
        shape: rows, blocks a row, tokens a step.
        depth: steps in flight.
        first: a set of host buffers as it was registered.
    """

    def __init__(
        self,
        storage: Storage,
        layers: Layers,
        streams: Streams | None,
        shape: tuple[int, int, int],
        depth: int,
        first: Buffers,
    ) -> None:
        self.mover = CUDAMover(storage, streams=streams)
        self._streams = self.mover.streams
        self.tables = DeviceTables(self._streams, shape, depth + 1)
        self.tables.update(first)
        self._layers = layers
        kernel = self._streams.kernel("write_kv")
        self._writes = []
        for index in range(len(layers)):
            k, v = layers.logical(index)
            self._writes.append(WriteKV(kernel, Place.of(k), None if v is None else Place.of(v)))
        self._marks: dict[int, list[Event]] = {}
        self._spare: list[Event] = []
        # Steps may run in another stream than this: the memory is zeroed, the tables are empty.
        stream_for_once(self._streams).synchronize()
        weakref.finalize(self, _wait_for_marks, self._marks, os.getpid())

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._layers[0].k.device

    def check_stream(self) -> None:
        """Before anything has changed: raises InvalidConfig if the caller's stream is being
        captured."""
        stream_for_once(self._streams)

    def mark(self, step: int) -> Event:
        """An event behind all that is queued in the caller's stream by now; kept until
        :meth:`forget`.

        Raises:
            InvalidConfig: the stream is being captured.
        """
        stream = stream_for_once(self._streams)
        event = self._spare.pop() if self._spare else self._streams.event("step")
        stream.record(event)
        self._marks.setdefault(step, []).append(event)
        return event

    def follow(self) -> None:
        """What is queued in the caller's stream from now on comes behind every marked step and
        every copy.

        Raises:
            InvalidConfig: the stream is being captured.
        """
        current = stream_for_once(self._streams)
        self.mover.follow()
        for events in self._marks.values():
            for event in events:
                current.wait(event)

    def wait(self) -> None:
        """Waits until every marked step and every copy that is queued by now is done."""
        self.follow()
        self.mover.flush()
        stream_for_once(self._streams).synchronize()

    def forget(self, step: int) -> None:
        """The step has ended; its events are used again."""
        self._spare += self._marks.pop(step, ())

    def write(self, layer: int, k: Any, v: Any, slots: torch.Tensor) -> None:
        """Queues the write of tokens to slots; shapes and errors as :meth:`Layers.write`, but the
        slots, int64 [T] on the device, are not looked at, and negative ones are padding."""
        halves = self._layers[layer]
        for name, given, half in (("k", k, halves.k), ("v", v, halves.v)):
            if given is None:
                continue  # whether the layer has none, the launch checks
            if not isinstance(given, torch.Tensor) or half is None:
                raise InvalidConfig(
                    f"{name} is a {type(given).__name__}, not a tensor"
                    if half is not None
                    else f"{name}: the layer has no V, so None is needed",
                    argument=name,
                )
            if given.dtype != half.dtype or given.device != half.device or given.is_neg():
                raise InvalidConfig(
                    f"{name} for layer {layer} is {given.dtype} on {given.device}; {half.dtype} on "
                    f"{half.device} is needed",
                    argument=name,
                )
            if given.ndim != 3 or len(given) != len(slots):
                raise InvalidConfig(
                    f"{name} for layer {layer} has shape {tuple(given.shape)}; [{len(slots)}, "
                    "heads, dim] is needed",
                    argument=name,
                    shape=tuple(given.shape),
                )
        own = {half.untyped_storage().data_ptr() for half in halves_of(halves)}
        with torch.inference_mode():
            k, v = (self._source(given, own) for given in (k, v))
        self.mover.flush()
        with self._streams.use(self._streams.current()):
            self._writes[layer](Place.of(k), None if v is None else Place.of(v), slots.data_ptr())

    def warm_up(self) -> None:
        """Launches every kernel once without work, and waits."""
        self.tables.warm_up()
        with self._streams.use(self._streams.current()):
            self._writes[0].warm_up()
        self.mover.warm_up()

    def _source(self, given: Any, own: set[int]) -> Any:
        """Dense in the last axis, and not in the pool (a view of another sequence is copied before
        anything is written)."""
        if given is None:
            return None
        given = given.detach()
        if given.untyped_storage().data_ptr() in own:
            return given.clone()
        strides = given.stride()
        if min(strides, default=0) < 0 or (given.shape[-1] > 1 and strides[-1] != 1):
            return given.contiguous()
        return given


def _wait_for_marks(marks: dict[int, list[Event]], process: int) -> None:
    """Nothing that the device still reads or writes is given back. Not in a forked child."""
    if os.getpid() == process:
        for events in marks.values():
            for event in events:
                event.synchronize()


def halves_of(layer: Any) -> list[torch.Tensor]:
    """K, and V where there is one."""
    return [half for half in (layer.k, layer.v) if half is not None]
