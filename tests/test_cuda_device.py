"""The CUDA cache by its contents: on a GPU (marked ``gpu``), and rehearsed in the shim.

Every test that can run in both runs the same code in both, so that nothing here is tried for the
first time where a GPU is.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvmmu import InvalidConfig, KVCache, cuda  # noqa: E402
from kvmmu.cuda.launches import ChecksumBlocks, RegionTable  # noqa: E402

from . import cuda_shim  # noqa: E402
from .conftest import ROOT  # noqa: E402
from .small_cache import contents, raw  # noqa: E402
from .texts import Texts  # noqa: E402

USABLE = torch.cuda.is_available() and not cuda.availability.problems(cuda.installed())
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not USABLE, reason="needs a CUDA device")]
IN_SHIM = pytest.mark.skipif(cuda_shim.compiler() is None, reason="needs g++")
BOTH = pytest.mark.parametrize(
    "where", [pytest.param("shim", marks=IN_SHIM), pytest.param("cuda", marks=ON_GPU)]
)
BLOCK = 4
EAGER: dict[str, Any] = {
    "placement": "scatter",
    "compaction_start": 0.0,
    "compaction_stop": 0.0,
    "budget_blocks": 4,
}


def place(where: str) -> dict[str, Any]:
    """How a cache gets its device."""
    return {"device": "cuda"} if where == "cuda" else {"streams": cuda_shim.ShimStreams()}


class Loop(Texts):
    """A serving loop with contents."""

    def halves(self, layer: int) -> list[Any]:
        return [half for half in self.cache.layers.logical(layer) if half is not None]

    def step(self, handles: list[Any]) -> None:
        with self.cache.step() as step:
            batch, lens = self.schedule(step, handles)
            values: list[int] = []
            for one, count in zip(handles, lens, strict=True):
                end = one.num_scheduled
                values += self.texts[one][end - count : end]
            for layer in range(len(self.cache.layers)):
                kv = [
                    contents(values, layer, n, half).to(half.device)
                    for n, half in enumerate(self.halves(layer))
                ]
                self.cache.write(layer, kv[0], kv[1] if len(kv) > 1 else None, batch)

    def check(self) -> None:
        for handle, text in self.texts.items():
            for layer in range(len(self.cache.layers)):
                found = self.cache.gather(handle, layer)
                for n, half in enumerate(self.halves(layer)):
                    right = contents(text[: handle.num_scheduled], layer, n, half)
                    assert torch.equal(raw(found[n].cpu()), raw(right)), (handle, layer, n)
        self.cache.validate()

    def churn(self, turns: int = 8) -> None:
        running: list[Any] = []
        for turn in range(turns):
            running.append(self.open(5 + 3 * turn % 11))
            self.step(running)
            if turn % 3 == 1:
                running.append(self.fork(running[0]))
            self.step(running)
            self.check()
            if len(running) > 3:
                self.close(running.pop(0), running.pop(1))
        self.cache.synchronize()
        self.check()
        assert self.cache.mmu.stats()["moves_committed"] > 0
        self.close(*list(self.texts))


@BOTH
@pytest.mark.parametrize("copy", ["between_steps", "overlap"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("layout", ["NHD", "HND", "packed", "block_major"])
def test_every_sequence_reads_its_own_bytes(where: str, layout: str, dtype: str, copy: str) -> None:
    kind = getattr(torch, dtype)
    options: dict[str, Any] = {**EAGER, "auto_compact": True, "steps_in_flight": 2, "copy": copy}
    form: dict[str, Any] = {"block_size": BLOCK, "layout": layout, "max_batch": 8}
    if layout != "packed":
        form["v_head_dim"] = 24
    cache: Any = KVCache(2, 2, 40, kind, 48, **form, **options, **place(where))
    cache.warm_up()
    Loop(cache).churn()


@BOTH
def test_an_engines_own_strides_and_scales_move_with_its_blocks(where: str) -> None:
    device = "cuda" if where == "cuda" else "cpu"
    wide = torch.zeros(33, 2, BLOCK, 3, 16, device=device)  # K and V of a block side by side
    scales = torch.zeros(33, 3, dtype=torch.int16, device=device)
    scales[:, 0] = torch.arange(33)
    how = {key: value for key, value in place(where).items() if key != "device"}
    cache: Any = KVCache.attach(
        [(wide[:, 0], wide[:, 1])],
        layout="NHD",
        num_blocks=32,
        block_size=BLOCK,
        extra=[scales],
        **EAGER,
        **how,
    )
    loop = Loop(cache)
    handles = [loop.open(9) for _ in range(4)]
    loop.step(handles)
    before = [handle.block_table() for handle in handles]
    loop.close(handles.pop(1))
    del before[1]
    cache.synchronize()
    assert cache.compact() > 0
    loop.check()
    for handle, blocks in zip(handles, before, strict=True):
        found = scales[torch.from_numpy(handle.block_table().astype(np.int64)).to(device), 0]
        assert found.tolist() == blocks.tolist()
    loop.close(*handles)


@BOTH
def test_checksums_on_the_device_are_those_of_the_host(where: str) -> None:
    how = place(where)
    cache: Any = KVCache(1, 2, 20, torch.bfloat16, 16, block_size=BLOCK, layout="packed", **how)
    loop = Loop(cache)
    handle = loop.open(30)
    loop.step([handle])
    cache.synchronize()
    streams = cache.mover.streams
    table = RegionTable.of(cache.storage)
    ids = np.arange(17, dtype=np.uint32)
    place_of = {"ids": streams.zeros(ids.nbytes), "sums": streams.zeros(8 * len(ids))}
    rows = streams.zeros(table.rows.nbytes)
    rows.copy_(torch.from_numpy(table.rows.reshape(-1).view(np.uint8).copy()))
    place_of["ids"].copy_(torch.from_numpy(ids.view(np.uint8)))
    with streams.use(streams.current()):
        ChecksumBlocks(streams.kernel("checksum_blocks"), table, rows.data_ptr())(
            ids, place_of["sums"].data_ptr(), place_of["ids"].data_ptr()
        )
    found = place_of["sums"].cpu().numpy().view(np.uint64)
    host = KVCache.attach(
        [tensor.cpu() for tensor in cache.layers.tensors],
        layout="packed",
        num_blocks=16,
        block_size=BLOCK,
    )
    assert found.tolist() == cuda.block_checksums(host.storage, ids).tolist()
    assert len(set(found[:8].tolist())) > 1
    loop.close(handle)


def example(text: str, how: str) -> str:
    """The README's example, its cache made in another place; what it prints."""
    printed = io.StringIO()
    code = text.replace('device = "cpu"', 'device = "cuda"') if how == "cuda" else text
    names: dict[str, Any] = {}
    if how == "shim":
        code = code.replace("device=device, placement", "streams=streams, placement")
        names["streams"] = cuda_shim.ShimStreams()
    assert code != text
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    return printed.getvalue()


@BOTH
def test_the_example_of_the_readme_prints_the_same_on_a_device(where: str) -> None:
    readme = (ROOT / "README.md").read_text()
    code, printed = (
        re.findall(rf"^```{kind}\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)[0]
        for kind in ("python", "text")
    )
    assert example(code, where) == printed


@pytest.mark.parametrize("where", [pytest.param("cuda", marks=ON_GPU)])
def test_a_foreign_engine_compares_every_answer_on_a_device(where: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "embed.py"), "40", "1", where],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "all answers equal" in done.stdout


@pytest.mark.parametrize("where", [pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("copy", ["between_steps", "overlap"])
def test_a_busy_stream_changes_no_byte(where: str, copy: str) -> None:
    options: dict[str, Any] = {**EAGER, "auto_compact": True, "steps_in_flight": 4, "copy": copy}
    cache: Any = KVCache(2, 2, 128, torch.bfloat16, 64, max_batch=8, **options, **place(where))
    cache.warm_up()
    loop = Loop(cache)
    running: list[Any] = []
    for turn in range(40):
        running.append(loop.open(20 + turn % 50))
        torch.cuda._sleep(2_000_000)  # about a millisecond: the host is far ahead
        loop.step(running)
        if len(running) > 3:
            loop.close(running.pop(0), running.pop(1))
        if turn % 8 == 7:
            loop.check()
    cache.synchronize()
    loop.check()
    assert cache.mmu.stats()["moves_committed"] > 0
    loop.close(*list(loop.texts))


@pytest.mark.parametrize("where", [pytest.param("cuda", marks=ON_GPU)])
def test_a_captured_graph_moves_once(where: str) -> None:
    cache: Any = KVCache(2, 2, 64, torch.bfloat16, 32, **EAGER, **place(where))
    moves = cache.mover.graph_moves(4)
    cache.warm_up()
    k = cache.layers[0].k
    k.copy_(torch.arange(33, device="cuda").view(-1, 1, 1, 1))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        moves.launch()
        with pytest.raises(InvalidConfig, match="is being captured"):
            cache.mover.move(np.array([[1, 2]], np.uint32))
    moves.move(np.array([[3, 7], [4, 8]], np.uint32))
    graph.replay()
    assert k[7:9, 0, 0, 0].tolist() == [3, 4]
    k[3] = 99
    graph.replay()
    assert k[7:9, 0, 0, 0].tolist() == [3, 4]
    torch.cuda._sleep(2_000_000)
    moves.move(np.array([[5, 9]], np.uint32))
    assert not cache.mover.copied()
    with torch.cuda.stream(torch.cuda.Stream()), moves.replaying():
        graph.replay()  # behind what was put, in whichever stream
    cache.mover.synchronize()
    assert cache.mover.copied()
    assert k[9, 0, 0, 0].item() == 5
    moves.move(np.array([[6, 10]], np.uint32))
    cache.mover.synchronize()  # without a replay
    assert k[10, 0, 0, 0].item() == 6
    assert moves.refused() == 0


@BOTH
def test_preheating_writes_pages_on_a_device_and_leaves_nothing(where: str) -> None:
    cache = KVCache(2, 1, 8, torch.float32, 64, block_size=4, page_orders=(0, 3), **place(where))
    halves = [half for layer in range(2) for half in cache.layers.logical(layer)]
    for half in halves:
        assert half is not None
        half[:64] = torch.arange(1.0, 65.0, device=half.device)[:, None, None, None]
    found = cache.preheat(4)
    assert (found.pages, found.whole, found.order, found.blocks) == (4, 4, 3, 32)
    assert found.bytes == 32 * cache.storage.block_bytes
    assert cache.mmu.states()["empty"] == 64
    cache.validate()
    for half in halves:  # one block of the claimed was copied over the 31 others, and back
        assert half is not None
        rows = Counter(map(tuple, half[:64].flatten(1).tolist()))
        assert sorted(rows.values()) == [1] * 32 + [32]
