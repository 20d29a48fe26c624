"""The device that is there.

What lives here: the way to its streams, which imports torch and CuPy when it is first asked for.
What never lives here: the interface (:mod:`.streams`) and its implementation
(:mod:`.torch_streams`).
"""

from __future__ import annotations

from functools import cache

from ..errors import InvalidConfig
from .availability import require
from .streams import Streams

__all__ = ["open_streams"]


@cache
def open_streams(device: str) -> Streams:
    """Torch's streams and CuPy's compiler for a device; one object a device.

    Args:
        device: ``"cuda:0"``, with the number.

    Raises:
        CUDAUnavailable, MissingExtra: as :func:`kvmmu.cuda.require`.
        InvalidConfig: not a CUDA device with its number.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda" or not number.isdigit():
        raise InvalidConfig(f"device = {device!r}: allowed is 'cuda:0' and so on", device=device)
    require()
    from .torch_streams import TorchStreams

    return TorchStreams(int(number))
