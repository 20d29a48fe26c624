"""NVRTC and nvdisasm, as far as the gate of test_cuda_gate.py needs them.

What lives here: the compiler by ctypes, and the disassembler as a program. What never lives here: a
statement about what a kernel must look like, or a driver: neither tool needs one.

By ctypes and not through CuPy: the two wheels are all that the gate then needs, and torch brings
the first one along. CuPy is needed where there is a GPU, and only there.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

_WHEELS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
_USAGE = re.compile(
    r"Function properties for (?P<name>\w+)\n\D*(?P<stack>\d+) bytes stack frame, "
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads\n"
    r"ptxas info\s*: Used (?P<registers>\d+) registers"
)


@dataclass(frozen=True)
class Compiled:
    """A kernel for one architecture. Bytes of the stack frame and of spills, a thread."""

    cubin: bytes
    registers: int
    stack: int
    spill_stores: int
    spill_loads: int


def _file(distribution: str, pattern: str) -> Path | None:
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if re.fullmatch(pattern, file.name):
            return Path(str(file.locate()))
    return None


@cache
def library() -> ctypes.CDLL | None:
    """NVRTC of the newest wheel that is installed."""
    for wheel in _WHEELS:
        found = _file(wheel, r"libnvrtc\.so\.\d+")
        if found is not None:
            return ctypes.CDLL(str(found))
    return None


@cache
def disassembler() -> Path | None:
    return _file("nvidia-cuda-nvdisasm", "nvdisasm")


def compile_kernel(source: str, name: str, architecture: int) -> Compiled:
    """Compiles a kernel.

    Raises:
        AssertionError: the log of a compilation that failed, or one without the figures.
    """
    nvrtc = library()
    assert nvrtc is not None
    program = ctypes.c_void_p()
    text = source.encode()
    made = nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name.encode(), 0, None, None)
    assert made == 0, made
    try:
        options = [
            b"--std=c++17",
            f"--gpu-architecture=sm_{architecture}".encode(),
            b"--ptxas-options=-v",
        ]
        done = nvrtc.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*options)
        )
        log = _read(nvrtc, "ProgramLog", program).rstrip(b"\0").decode()
        assert done == 0, f"{name} for sm_{architecture}: {log}"
        usage = _USAGE.search(log)
        assert usage is not None and usage["name"] == name, log
        return Compiled(
            _read(nvrtc, "CUBIN", program),
            int(usage["registers"]),
            int(usage["stack"]),
            int(usage["stores"]),
            int(usage["loads"]),
        )
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(nvrtc: ctypes.CDLL, what: str, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    assert getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) == 0
    buffer = ctypes.create_string_buffer(size.value)
    assert getattr(nvrtc, f"nvrtcGet{what}")(program, buffer) == 0
    return buffer.raw


def instructions(cubin: bytes) -> list[str]:
    """The instructions of a cubin with their modifiers, operands left out: ``LDG.E.128`` ..."""
    program = disassembler()
    assert program is not None
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        done = subprocess.run(
            [str(program), "-c", str(file)], capture_output=True, text=True, check=True
        )
    # /*0040*/  @P0 LDG.E.128 R4, desc[UR4][R2.64] ;
    return re.findall(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", done.stdout, re.M)
