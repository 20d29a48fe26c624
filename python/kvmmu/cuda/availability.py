"""Whether CUDA can be used here, and what to install where it cannot.

What lives here: what is looked for, without importing it (:func:`installed`), and what follows from
it (:func:`problems`, :func:`require`). What never lives here: a CUDA context, or an import of CuPy.
``kvmmu doctor`` shows the same.

CuPy comes as a package for each major version of CUDA and needs NVRTC of that version. A driver
runs what was made for its own major version and older ones.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from ..errors import CUDAUnavailable, KVCacheError, MissingExtra

__all__ = ["Installed", "installed", "problems", "require"]

_CUPY = {"cupy-cuda13x": 13, "cupy-cuda12x": 12, "cupy-cuda11x": 11, "cupy": None}
"""Packages of CuPy and the major version of CUDA of each; None: whatever it was built for."""
_EXTRAS = (13, 12)
_MIN_CUPY = 14
_NVRTC = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
_DRIVERS = {12: "525", 13: "580"}
"""The oldest driver of each major version of CUDA (Linux)."""


@dataclass(frozen=True, slots=True)
class Installed:
    """What is there.

    Attributes:
        driver: newest CUDA that the driver supports, (major, minor); None: no driver.
        devices: CUDA devices that it shows.
        cupy: packages of CuPy and their versions.
        nvrtc: major versions of CUDA that NVRTC is there for, and where it comes from.
    """

    driver: tuple[int, int] | None = None
    devices: int = 0
    cupy: tuple[tuple[str, str], ...] = ()
    nvrtc: tuple[tuple[int, str], ...] = ()


def installed() -> Installed:
    """Looks; imports nothing and makes no context."""
    driver, devices = _driver()
    cupy = [(name, version) for name in _CUPY if (version := _version(name)) is not None]
    return Installed(driver, devices, tuple(cupy), tuple(_nvrtc()))


def require() -> Installed:
    """Returns what is installed if CUDA can be used.

    Raises:
        MissingExtra: CuPy or NVRTC is missing; the message says what to install. Numbers:
            ``extra``.
        CUDAUnavailable: there is no driver or no device, or packages and driver do not fit each
            other; the message says what to do. Numbers: those of the class.
    """
    found = installed()
    for problem in problems(found):
        raise problem
    return found


def problems(found: Installed) -> list[KVCacheError]:
    """What keeps CUDA from being used, the cause of the others first; empty: nothing."""
    return list(_problems(found))


def _problems(found: Installed) -> Iterator[KVCacheError]:
    oldest = min(_EXTRAS)
    if found.driver is None:
        yield CUDAUnavailable(
            "there is no CUDA driver (libcuda.so.1): install the NVIDIA driver; in a container, "
            "start it with access to the GPU"
        )
    elif found.driver[0] < oldest:
        yield CUDAUnavailable(
            f"the driver supports CUDA {_text(found.driver)} and no newer one: install driver "
            f"{_DRIVERS[oldest]} or newer, for CUDA {oldest}",
            driver=found.driver,
            needed=oldest,
        )
    elif found.devices == 0:
        yield CUDAUnavailable(
            f"the driver (CUDA {_text(found.driver)}) shows no device: check nvidia-smi and "
            "CUDA_VISIBLE_DEVICES; in a container, start it with access to the GPU",
            driver=found.driver,
            devices=0,
        )
    # Which packages fit is the driver's to say; without one, the newest do.
    supported = max(_EXTRAS) if found.driver is None else max(oldest, found.driver[0])
    fits = min(supported, max(_EXTRAS))
    if not found.cupy:
        yield _missing("CuPy is not installed", fits)
        return
    names = " and ".join(name for name, _ in found.cupy)
    if len(found.cupy) > 1:
        yield CUDAUnavailable(
            f"{names} are installed and overwrite each other: pip uninstall "
            f"{names.replace(' and', '')}, then {_install(fits)}",
            cupy=dict(found.cupy),
        )
        return
    ((name, version),) = found.cupy
    cuda = _CUPY[name]
    if not _at_least(version, _MIN_CUPY) or (cuda is not None and cuda < oldest):
        yield CUDAUnavailable(
            f"{name} {version} is too old, {_MIN_CUPY} or newer is needed: pip uninstall {name}, "
            f"then {_install(fits)}",
            cupy=dict(found.cupy),
            needed=_MIN_CUPY,
        )
        return
    if cuda is not None and cuda > supported:
        assert found.driver is not None  # else everything is supported
        yield CUDAUnavailable(
            f"{name} needs a driver of CUDA {cuda} ({_DRIVERS[cuda]} or newer), and this one "
            f"supports CUDA {_text(found.driver)}: pip uninstall {name}, then {_install(fits)}; or "
            "install a newer driver",
            cupy=dict(found.cupy),
            driver=found.driver,
            needed=cuda,
        )
        return
    there = [major for major, _ in found.nvrtc]
    if (cuda is not None and cuda not in there) or not there:
        have = f" (there is one of CUDA {', '.join(map(str, there))})" if there else ""
        of = "" if cuda is None else f" of CUDA {cuda}"
        yield _missing(f"NVRTC{of} is not installed{have}, and {name} needs it", cuda or fits)


def _missing(what: str, cuda: int) -> MissingExtra:
    return MissingExtra(f"{what}: {_install(cuda)}", extra=f"cuda{cuda}")


def _install(cuda: int) -> str:
    return f"pip install 'kvmmu[cuda{cuda}]'"


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _at_least(version: str, major: int) -> bool:
    head = version.split(".", 1)[0]
    return not head.isdigit() or int(head) >= major


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> tuple[tuple[int, int] | None, int]:
    """The CUDA version that the driver supports, and its devices."""
    version, devices = ctypes.c_int(0), ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuDriverGetVersion(ctypes.byref(version)) != 0 or version.value == 0:
            return None, 0
        # cuInit makes no context. It fails where no device is visible.
        if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(devices)) != 0:
            devices = ctypes.c_int(0)
    except (OSError, AttributeError):
        return None, 0
    return (version.value // 1000, version.value % 1000 // 10), devices.value


def _nvrtc() -> Iterator[tuple[int, str]]:
    """Packages first; a library of the system only for what they lack, since loading it is slow."""
    seen = set()
    for name in _NVRTC:
        version = _version(name)
        if version is not None and version.split(".", 1)[0].isdigit():
            seen.add(major := int(version.split(".", 1)[0]))
            yield major, f"{name} {version}"
    for major in _EXTRAS:
        if major not in seen and _loads(f"libnvrtc.so.{major}"):
            yield major, f"libnvrtc.so.{major}"


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
