"""The CUDA kernels, compiled by g++ and run on the CPU in the call shape of ``cupy.RawKernel``.

What lives here: compiling the embedded sources against ``shim/shim.h``, launchers, and
:class:`ShimStreams`, a device of one stream that does everything at once. What never lives here: a
kernel's arguments or what it ought to do.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from kvmmu import kernels

HEADER = Path(__file__).resolve().parent / "shim" / "shim.h"
SANITIZERS = {
    "none": ["-O2"],
    "address": ["-O1", "-g", "-fsanitize=address,alignment", "-fno-sanitize-recover=alignment"],
    "thread": ["-O1", "-g", "-fsanitize=thread"],
}
_FOLDER = tempfile.TemporaryDirectory(prefix="kvmmu-shim-")  # gone at exit
_RUNTIMES = {"address": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}


def compiler() -> str | None:
    return shutil.which("g++")


@cache
def build(sanitizer: str = "none", without: str = "") -> Path:
    """One shared library with all kernels; built once a process.

    Args:
        without: text left out of the sources, where it must occur: a planted fault.
    """
    program = compiler()
    assert program is not None
    text = "".join(
        f'#line 1 "{name}.cu"\n{kernels.source(name)}SHIM_ENTRY({name})\n'
        for name in kernels.names()
    )
    assert without in text
    if without:
        text = text.replace(without, "")
    folder = Path(tempfile.mkdtemp(dir=_FOLDER.name))
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text(text)
    flags = ["-std=c++17", "-shared", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror"]
    quiet = ["-Wno-unknown-pragmas"]  # "#pragma unroll" is nvcc's
    command = [program, *flags, *quiet, *SANITIZERS[sanitizer], "-include", str(HEADER)]
    done = subprocess.run(
        [*command, "-o", str(library), str(source)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return library


def runtimes(sanitizer: str) -> list[str]:
    """The sanitizer's libraries, which have to be there before the interpreter starts."""
    program = compiler()
    assert program is not None
    return [
        subprocess.run(
            [program, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        for name in _RUNTIMES[sanitizer]
    ]


class ShimKernel:
    """One kernel, a :class:`kvmmu.cuda.Launcher` whose device is this process."""

    def __init__(self, library: ctypes.CDLL, name: str, parallel: bool) -> None:
        self._entry = getattr(library, f"shim_{name}")
        self._parallel = parallel
        self.launches: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        """Grid and block of each launch."""

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...], /
    ) -> None:
        assert all(n >= 1 for n in (*grid, *block)), (grid, block)
        self.launches.append((grid, block))
        # As RawKernel: NumPy scalars, and arrays of size 1 for structures.
        values = []
        for value in args:
            assert isinstance(value, np.generic) or (
                isinstance(value, np.ndarray) and value.size == 1
            ), type(value)
            values.append(np.ascontiguousarray(value).reshape(1))
        pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        three = ctypes.c_uint * 3
        self._entry(three(*(*grid, 1, 1)[:3]), three(*(*block, 1, 1)[:3]), pointers, self._parallel)


def kernel(name: str, *, parallel: bool = False, library: Path | None = None) -> ShimKernel:
    """A kernel in the shim.

    Args:
        parallel: a thread of the operating system for each CUDA thread; kernels with a barrier need
            it.
        library: from :func:`build`; None: without a sanitizer.
    """
    return ShimKernel(ctypes.CDLL(str(library or build())), name, parallel)


class ShimEvent:
    """A moment."""

    def __init__(self) -> None:
        self.at = 0.0

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_ms(self, since: Any, /) -> float:
        return 1e3 * float(self.at - since.at)


class ShimStream:
    """Whatever is queued has run when the call returns."""

    def record(self, event: Any, /) -> None:
        event.at = time.perf_counter()

    def wait(self, event: Any, /) -> None:
        pass

    def synchronize(self) -> None:
        pass


class ShimStreams:
    """``kvmmu.cuda.Streams`` without a device: for contents, and to rehearse what a device runs."""

    device = "cuda:0"

    def __init__(self) -> None:
        self._stream = ShimStream()

    def current(self) -> Any:
        return self._stream

    def capturing(self) -> bool:
        return False

    def side(self) -> Any:
        return self._stream

    def event(self, name: str, /, *, timed: bool = False) -> Any:
        return ShimEvent()

    def kernel(self, name: str, /) -> Any:
        shim = kernel(name, parallel=name == "move_blocks_indirect")
        if name != "move_blocks_indirect":
            return shim
        # A thread of the system for each of CUDA's: fewer of them.
        return lambda grid, block, args: shim((min(grid[0], 2),), (32,), args)

    @contextmanager
    def use(self, stream: Any, /) -> Iterator[None]:
        yield

    def zeros(self, num_bytes: int, /) -> Any:
        import torch

        array = np.zeros(num_bytes + 256, np.uint8)
        skip = -array.ctypes.data % 256
        return torch.from_numpy(array[skip : skip + num_bytes])

    def pinned(self, num_bytes: int, /) -> Any:
        return self.zeros(num_bytes)

    def upload(self, stream: Any, to: Any, source: Any, /) -> None:
        to.copy_(source)
