"""What can be proved of the CUDA kernels without a GPU: they compile for every architecture, in few
registers, to the instructions that they were written for.

NVRTC says registers and spills, nvdisasm shows the instructions. Neither needs a driver. What the
kernels compute is in test_cuda_shim.py.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from kvmmu import InvalidConfig, cuda, kernels

from . import nvrtc

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "kernels"
THREADS_OF_A_PROCESSOR = {80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048, 103: 2048, 120: 1536}
"""Most threads that a multiprocessor of each architecture holds. All have 65,536 registers."""
REGISTERS = 65_536

# Copies wait for memory, so they want every thread that fits: 32 registers, or 40 where a
# multiprocessor holds fewer threads. The others may use what they need for half of that.
FULL = ("move_blocks", "move_blocks_indirect", "update_tables")
WIDE_LOADS = {"move_blocks": 4, "move_blocks_indirect": 4, "write_kv": 4, "checksum_blocks": 4}
WIDE_STORES = {"move_blocks": 4, "move_blocks_indirect": 4, "write_kv": 4}

gate = pytest.mark.skipif(
    nvrtc.library() is None, reason="NVRTC is not installed (nvidia-cuda-nvrtc, kvmmu[test])"
)
disassembly = pytest.mark.skipif(
    nvrtc.library() is None or nvrtc.disassembler() is None,
    reason="NVRTC or nvdisasm is not installed (nvidia-cuda-nvdisasm, kvmmu[test])",
)
every_kernel = pytest.mark.parametrize("name", kernels.names())
every_architecture = pytest.mark.parametrize("architecture", THREADS_OF_A_PROCESSOR)


@cache
def compiled(name: str, architecture: int) -> nvrtc.Compiled:
    return nvrtc.compile_kernel(kernels.source(name), name, architecture)


@cache
def instructions(name: str, architecture: int) -> list[str]:
    return nvrtc.instructions(compiled(name, architecture).cubin)


def test_the_embedded_sources_are_the_files_of_the_repository() -> None:
    assert set(kernels.names()) == {path.stem for path in FOLDER.glob("*.cu")}
    header = (FOLDER / "blocks.cuh").read_text()
    for name in kernels.names():
        lines = kernels.source(name).splitlines(keepends=True)
        source = "".join(line for line in lines if not line.startswith("#line"))
        file = (FOLDER / f"{name}.cu").read_text()
        assert source == file.replace('#include "blocks.cuh"\n', header)
        assert "#include" not in source


def test_a_kernel_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(InvalidConfig, match=r'"moveblocks".*move_blocks, ') as caught:
        kernels.source("moveblocks")
    assert caught.value.name == "moveblocks"


def test_each_file_says_how_its_kernel_is_launched_and_what_the_caller_answers_for() -> None:
    for name in kernels.names():
        head = (FOLDER / f"{name}.cu").read_text().split('extern "C"')[0]
        assert head.startswith(f"// {name}: ")
        for part in ("Launch:", "The caller's duties"):
            assert part in head, (name, part)
        signature = re.search(rf"\b{name}\(([^)]*)\)", kernels.source(name).split('extern "C"')[1])
        assert signature is not None
        for parameter in signature[1].split(","):
            word = parameter.split()[-1].lstrip("*")
            assert re.search(rf"^//   (\w+, )*{word}\b", head, re.M), (name, word)


def test_launches_and_kernels_agree_on_the_numbers_that_both_know() -> None:
    source = kernels.source("move_blocks")
    assert f"kMaxMoves = {cuda.MAX_MOVES};" in source
    assert f"0 .. {cuda.MAX_MOVES};" in source
    assert "kLanes = 32;" in source
    assert "kInFlight = 4;" in source


@gate
def test_the_compiler_s_messages_name_the_lines_of_the_files() -> None:
    source = kernels.source("move_blocks").replace("moves.pairs, num_moves", "moves.pairs, typo")
    with pytest.raises(AssertionError) as caught:
        nvrtc.compile_kernel(source, "move_blocks", 90)
    file = (FOLDER / "move_blocks.cu").read_text().splitlines()
    line = 1 + next(n for n, text in enumerate(file) if "moves.pairs, num_moves" in text)
    assert f"move_blocks.cu({line}): error" in str(caught.value)


@gate
@every_architecture
@every_kernel
def test_every_kernel_compiles_without_spills_in_the_registers_it_may_have(
    name: str, architecture: int
) -> None:
    found = compiled(name, architecture)
    assert (found.stack, found.spill_stores, found.spill_loads) == (0, 0, 0)
    threads = THREADS_OF_A_PROCESSOR[architecture] // (1 if name in FULL else 2)
    # Registers are given to a warp in units of 8 a thread.
    assert -(-found.registers // 8) * 8 * threads <= REGISTERS, found.registers
    assert found.cubin[:4] == b"\x7fELF"


@disassembly
@every_architecture
@every_kernel
def test_memory_is_accessed_as_it_was_meant(name: str, architecture: int) -> None:
    found = instructions(name, architecture)
    count = Counter(found)
    wide_loads = sum(n for text, n in count.items() if text.startswith("LDG.E.128"))
    wide_stores = sum(n for text, n in count.items() if text.startswith("STG.E.128"))
    assert (wide_loads, wide_stores) == (WIDE_LOADS.get(name, 0), WIDE_STORES.get(name, 0))
    # No local memory, and no access that has to ask which memory it is for.
    assert [text for text in count if re.match(r"(LDL|STL|LD|ST)(\.|$)", text)] == []
    assert any(text.startswith(("STG", "RED")) for text in count)


@disassembly
@every_architecture
@pytest.mark.parametrize("name", WIDE_STORES)
def test_four_wide_loads_are_in_flight_before_the_first_store(name: str, architecture: int) -> None:
    found = instructions(name, architecture)
    accesses = [text[:3] for text in found if text.startswith(("LDG.E.128", "STG"))]
    first = accesses.index("LDG")
    assert accesses[first : first + 5] == ["LDG"] * 4 + ["STG"]


def test_the_docs_say_how_much_was_gated() -> None:
    docs = (ROOT / "docs" / "cuda.md").read_text()
    names, architectures = len(kernels.names()), len(THREADS_OF_A_PROCESSOR)
    assert f"{names} kernels x {architectures} architectures = {names * architectures}" in docs
    for name in kernels.names():
        assert f"| `{name}` |" in docs
    for architecture in THREADS_OF_A_PROCESSOR:
        assert f"sm_{architecture}" in docs


@gate
def test_a_kernel_that_spills_is_seen() -> None:
    """The control: without it, a log that says nothing would look like a kernel without spills."""
    source = """
extern "C" __global__ void __launch_bounds__(1024, 2) spills(float* x, int n) {
    float held[96];
#pragma unroll
    for (int i = 0; i < 96; ++i) held[i] = x[i * n + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 96; ++i) x[(95 - i) * n + threadIdx.x] = held[i] * held[(i * 7) % 96];
}
"""
    found = nvrtc.compile_kernel(source, "spills", 90)
    assert found.registers <= 32
    assert found.stack > 0
    assert found.spill_stores > 0
    if nvrtc.disassembler() is not None:
        texts = nvrtc.instructions(found.cubin)
        assert any(text.startswith("STL") for text in texts)
        assert any(text.startswith("LDL") for text in texts)
        assert not any(text.startswith("LDG.E.128") for text in texts)
