"""GPUs: memory and bandwidth, as their makers publish them.

What lives here: :class:`GPU` and the built-in ones. What never lives here: measurements.

Figures are those of NVIDIA's datasheets (H100, H200, A100, L40S, L4, A10 Tensor Core GPU; HGX
B200) and product pages (GeForce RTX). Memory that is sold as 80 GB is counted as 80 GiB, which is
what the driver shows within a few percent (less where error correction takes a part);
``--memory`` says it exactly.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from ..errors import InvalidConfig

__all__ = ["GPU", "GPUS", "find"]

_SHEET = "NVIDIA's datasheet"


@dataclass(frozen=True, slots=True)
class GPU:
    """A device.

    Attributes:
        name: as in the datasheet.
        memory: bytes.
        bandwidth: bytes a second; None: not known.
        source: where the figures come from.
    """

    name: str
    memory: int
    bandwidth: float | None
    source: str


def _gpu(name: str, gib: float, gb_a_second: float, source: str = _SHEET) -> GPU:
    return GPU(name, int(gib * 2**30), gb_a_second * 1e9, source)


GPUS: dict[str, GPU] = {
    gpu.name: gpu
    for gpu in (
        _gpu("A10", 24, 600),
        _gpu("A100-40GB", 40, 1_555),
        _gpu("A100-80GB", 80, 2_039),
        _gpu("L4", 24, 300),
        _gpu("L40S", 48, 864),
        _gpu("H100", 80, 3_350),
        _gpu("H100-PCIe", 80, 2_000),
        _gpu("H200", 141, 4_800),
        _gpu("B200", 180, 8_000),
        _gpu("RTX-4090", 24, 1_008, "NVIDIA's product page"),
        _gpu("RTX-5090", 32, 1_792, "NVIDIA's product page"),
    )
}


def find(name: str) -> GPU:
    """A built-in GPU by its name, however it is capitalised.

    Raises:
        InvalidConfig: there is none.
    """
    by_name = {known.lower(): gpu for known, gpu in GPUS.items()}
    wanted = name.lower().replace(" ", "-")
    if wanted not in by_name:
        near = [by_name[n].name for n in get_close_matches(wanted, by_name, n=2)]
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise InvalidConfig(
            f"--gpu: {name} given, {hint}allowed: {', '.join(GPUS)} (or --memory SIZE)"
        )
    return by_name[wanted]
