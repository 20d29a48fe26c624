"""The CUDA kernels of kvmmu, as text.

What lives here: their names and their sources, which the compiled core carries. What never lives
here: a compiler, a launch, or an import of CuPy; those are in :mod:`kvmmu.cuda`. This works
anywhere, so that a kernel can be read, compiled elsewhere or given to another launcher.
"""

from __future__ import annotations

from . import _core

__all__ = ["names", "source"]


def names() -> tuple[str, ...]:
    """All kernels. Each function, ``extern "C"``, has the name of its file in ``kernels/``."""
    return _core.kernel_names()


def source(name: str) -> str:
    """CUDA C++ source of a kernel, complete in itself (its header is copied in), for NVRTC or nvcc
    with ``--std=c++17``. The head of the file says how it is to be launched.

    Raises:
        InvalidConfig: there is no such kernel. Numbers: ``name``.
    """
    return _core.kernel_source(name)
