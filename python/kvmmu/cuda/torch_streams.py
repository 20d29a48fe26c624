"""Streams and events of torch, lent to CuPy, which compiles and launches the kernels.

What lives here: the implementation of :mod:`.streams` on a CUDA device. What never lives here: an
order between two pieces of work.

Torch owns every stream, event and buffer; CuPy sees a stream of torch's through
``cupy.cuda.Stream.from_external``, so that both queue in the same one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import torch

from .. import kernels
from ..errors import CUDAUnavailable
from .launches import Launcher
from .streams import Event, Stream

__all__ = ["TorchStreams"]

_CUDA: Any = torch.cuda
"""Without torch's annotations, which streams and events have only in part."""
_OPTIONS = ("--std=c++17",)
_MAX_LENT = 64
"""Streams of torch that CuPy's view is kept of; torch itself has 32 of each priority."""


class _Event:
    """An event of torch's."""

    __slots__ = ("raw",)

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def query(self) -> bool:
        return bool(self.raw.query())

    def synchronize(self) -> None:
        self.raw.synchronize()

    def elapsed_ms(self, since: Any, /) -> float:
        return float(since.raw.elapsed_time(self.raw))


class _Stream:
    """A stream of torch's."""

    __slots__ = ("lent", "raw")

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.lent = cupy.cuda.Stream.from_external(raw)

    def record(self, event: Any, /) -> None:
        event.raw.record(self.raw)

    def wait(self, event: Any, /) -> None:
        self.raw.wait_event(event.raw)

    def synchronize(self) -> None:
        self.raw.synchronize()


class TorchStreams:
    """A CUDA device. :func:`kvmmu.cuda.open_streams` makes one a device.

    Raises:
        CUDAUnavailable: torch has no CUDA, or not so many devices. Numbers: ``devices``.
    """

    def __init__(self, index: int) -> None:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if index >= count:
            built = torch.version.cuda
            why = "built without CUDA" if built is None else f"built for CUDA {built}"
            what = f"torch {torch.__version__}, {why}"
            raise CUDAUnavailable(
                f"torch shows {count} CUDA devices, so there is no cuda:{index} ({what}): check "
                "CUDA_VISIBLE_DEVICES, or install a torch that is built for CUDA",
                devices=count,
            )
        self._index = index
        self._lock = threading.Lock()
        self._lent: dict[int, _Stream] = {}
        self._kernels: dict[str, Launcher] = {}
        with torch.cuda.device(index):
            highest = min(_CUDA.Stream.priority_range())  # lower numbers come first
            self._side = _Stream(_CUDA.Stream(index, priority=highest))

    @property
    def device(self) -> str:
        return f"cuda:{self._index}"

    def current(self) -> Stream:
        raw = torch.cuda.current_stream(self._index)
        with self._lock:
            found = self._lent.get(raw.cuda_stream)
            if found is None:
                if len(self._lent) >= _MAX_LENT:  # streams from elsewhere may come and go
                    self._lent.clear()
                with torch.cuda.device(self._index):
                    found = self._lent[raw.cuda_stream] = _Stream(raw)
        return found

    def capturing(self) -> bool:
        with torch.cuda.device(self._index):
            return bool(torch.cuda.is_current_stream_capturing())

    def side(self) -> Stream:
        return self._side

    def event(self, name: str, /, *, timed: bool = False) -> Event:
        with torch.cuda.device(self._index):
            return _Event(_CUDA.Event(enable_timing=timed))

    def kernel(self, name: str, /) -> Launcher:
        with self._lock, torch.cuda.device(self._index), cupy.cuda.Device(self._index):
            found = self._kernels.get(name)
            if found is None:
                module = cupy.RawModule(code=kernels.source(name), options=_OPTIONS)
                found = self._kernels[name] = module.get_function(name)
        return found

    @contextmanager
    def use(self, stream: Any, /) -> Iterator[None]:
        with cupy.cuda.Device(self._index), torch.cuda.stream(stream.raw), stream.lent:
            yield

    def zeros(self, num_bytes: int, /) -> Any:
        with torch.inference_mode(False):
            made = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        torch.cuda.current_stream(self._index).synchronize()
        return made

    def pinned(self, num_bytes: int, /) -> Any:
        with torch.inference_mode(False), torch.cuda.device(self._index):
            return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, stream: Any, to: Any, source: Any, /) -> None:
        with torch.cuda.device(self._index), torch.cuda.stream(stream.raw):
            to.copy_(source, non_blocking=True)
