"""Pictures: what a history keeps, what cells say, the page in a real browser, the terminal's map.

The browser is headless Chromium, driven by Playwright; where there is none those tests are skipped.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvmmu import MMU, BlockMap, InvalidConfig, MissingExtra, Snapshot, run_plan, snapshot
from kvmmu.pictures import History, Run, page
from kvmmu.pictures import page as page_function
from kvmmu.pictures.cells import CODES, available, cell_size, cells, codes, sequence_colours
from kvmmu.pictures.terminal import memory_map

from .test_cli import kvmmu, said


class NoCopies:
    """A mover for a memory that has no contents."""

    def move(self, pairs: Any) -> None:
        pass


def churned(history: History, steps: int, *, compaction: bool = True, seed: int = 0) -> MMU:
    """A pool of eight windows under load, which a history sees."""
    rng = np.random.default_rng(seed)
    mmu = MMU(8 * 512, 4, budget_blocks=64, max_sequences=256)
    opened: list[int] = []
    for step in range(steps):
        while mmu.states()["available"] > 900:
            tokens = int(rng.integers(20, 3000))
            opened.append(mmu.open(rng.integers(0, 10**6, tokens).astype(np.int32)))
        for _ in range(3):
            mmu.close(opened.pop(int(rng.integers(len(opened)))))
        moved = 0
        plan = mmu.plan_compaction() if compaction else None
        if plan is not None:
            wanted = history.wants(len(plan))
            before = mmu.block_map() if wanted else None
            moved = run_plan(mmu, NoCopies(), plan)
            if before is not None:
                history.compaction(before, mmu.block_map())
        measure = mmu.measure()
        history.sample(
            0.5 * (step + 1),
            mmu,
            ratio=measure.ratio_available,
            free_windows=measure.free_windows,
            moves=moved,
            odd_name=float("nan") if step % 2 else 7.0,
        )
    mmu.validate()
    return mmu


# -- cells -----------------------------------------------------------------------------------


def slowly(blocks: Any, size: int) -> list[tuple[int, int, set[int], set[int]]]:
    """For each cell: count of its commonest code, blocks that count, and which colours and orders
    are commonest, by counting one by one."""
    found = []
    for first in range(0, len(blocks.states), size):
        at = range(first, min(first + size, len(blocks.states)))
        of = Counter(int(codes(blocks)[b]) for b in at)
        of.pop(CODES.index("null"), None)
        sequences = Counter(int(blocks.sequences[b]) for b in at)
        orders = Counter(int(blocks.orders[b]) + 1 for b in at)
        most = [{k for k, n in c.items() if n == max(c.values())} for c in (sequences, orders)]
        colours = {int(sequence_colours(np.array([s]))[0]) for s in most[0]}
        found.append((max(of.values(), default=0), sum(of.values()), colours, most[1]))
    return found


@given(
    st.lists(st.tuples(st.integers(1, 90), st.booleans()), min_size=1, max_size=10),
    st.sampled_from(["last", "first", 30]),
    st.integers(1, 70),
)
def test_a_cell_says_what_most_of_its_blocks_are(
    opened: list[tuple[int, bool]], null_block: Any, most: int
) -> None:
    mmu = MMU(60, 4, page_orders=(0, 2), medium_from=0, null_block=null_block)
    for at, (tokens, keep) in enumerate(opened):
        if -(-tokens // 4) > mmu.states()["available"]:
            break
        sequence = mmu.open(np.arange(tokens, dtype=np.int32) + 100 * at)
        if not keep:
            mmu.close(sequence)
    blocks = mmu.block_map()
    size = cell_size(len(blocks), most)
    states, colours, orders = cells(blocks, size)
    expected = slowly(blocks, size)
    assert len(states) == len(expected) <= most
    for cell, (count, of, colour, order) in enumerate(expected):
        here = codes(blocks)[cell * size : (cell + 1) * size]
        if count:
            assert np.count_nonzero(here == states[cell] & 15) == count
        assert states[cell] >> 4 == round(15 * count / max(of, 1))
        assert colours[cell] in colour
        assert orders[cell] in order


def test_windows_are_whole_cells() -> None:
    for blocks in (1, 100, 2048, 90_000, 1_000_000):
        size = cell_size(blocks, 512)
        assert -(-blocks // size) <= 512
        assert size & (size - 1) == 0
        assert size == 1 or -(-blocks // (size // 2)) > 512


# -- a history -------------------------------------------------------------------------------


def test_a_long_run_stays_within_its_samples_and_loses_no_number() -> None:
    history = History(every_steps=2, samples=10, compactions=0)
    mmu = MMU(64, 4)
    steps = 1000
    for step in range(steps):
        history.sample(float(step), mmu, number=float(step), rare=1.0 if step == 500 else 0.0)
    assert len(history.times) <= 10
    assert history.times == sorted(history.times)
    assert history.every_steps >= steps // 10
    assert all(plane.shape == (len(history.times), 64) for plane in history.planes())
    # Every step up to the last sample counts once, so weighted means give the sums.
    ends = [int(time) + 1 for time in history.times]
    lengths = np.diff([0, *ends])
    means = np.array(history.series()["number"], dtype=float)
    assert (means * lengths).sum() == pytest.approx(sum(range(ends[-1])))
    assert (np.array(history.series()["rare"], float) * lengths).sum() == pytest.approx(1.0)


def test_a_history_of_a_short_run_has_its_first_step() -> None:
    history = History(every_steps=100)
    history.sample(0.03, MMU(64, 4), waits=3)
    assert history.times == [0.03]
    assert history.series() == {"waits": [3.0]}


def test_numbers_that_are_none_are_left_out() -> None:
    history, mmu = History(every_steps=2), MMU(64, 4)
    for step, value in enumerate([1.0, float("nan"), 5.0, float("inf"), float("nan")]):
        history.sample(step, mmu, x=value, **({"late": 2.0} if step == 4 else {}))
    assert history.series() == {"x": [1.0, 5.0, None], "late": [None, None, 2.0]}


def test_a_history_survives_a_pickle() -> None:
    history = History(every_steps=4)
    churned(history, 40)
    again = pickle.loads(pickle.dumps(history))
    assert again.times == history.times
    assert all(np.array_equal(a, b) for a, b in zip(again.planes(), history.planes(), strict=True))
    assert len(again.compactions) == len(history.compactions)


def test_the_passes_that_moved_most_are_kept_with_every_block_before_and_after() -> None:
    history = History(compactions=3)
    moved: list[int] = []
    rng = np.random.default_rng(1)
    mmu = MMU(4 * 512, 4, page_orders=(0,), hold_blocks=0, max_sequences=2048)
    opened = [mmu.open(np.full(4, at, np.int32)) for at in range(1800)]
    for at in rng.permutation(1800)[:900]:
        mmu.close(opened[at])
    for step, budget in enumerate([5, 40, 1, 17, 3, 40, 60]):
        plan = mmu.plan_huge_pages(1 + (budget == 60), max_blocks=budget)
        before = mmu.block_map()
        made = run_plan(mmu, NoCopies(), plan)
        after = mmu.block_map()
        moved.append(made)
        assert history.wants(made) == (len(moved) <= 3 or made > sorted(moved[:-1])[-3])
        history.compaction(before, after)
        if budget == 60:
            kept = history.compactions[-1]
            assert sorted(map(tuple, kept.moves)) == sorted(map(tuple, plan.pairs))
            for packed, blocks in ((kept.before, before), (kept.after, after)):
                planes = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(3, -1)
                assert np.array_equal(planes[0], codes(blocks))
                assert np.array_equal(planes[2], blocks.orders + 1)
            assert kept.effect["free windows"][1] == mmu.measure().free_windows
            assert kept.effect["longest free run"][1] == mmu.measure().largest_run_available
        history.sample(float(step), mmu)
    assert moved[-1] == 60
    kept_moves = sorted(len(each.moves) for each in history.compactions)
    assert kept_moves == sorted(moved)[-3:]
    times = [each.simulated_s for each in history.compactions]
    assert times == sorted(times)


def test_of_passes_that_move_equally_many_those_far_apart_are_kept() -> None:
    history, mmu = History(compactions=3, every_steps=1000), MMU(64, 1, page_orders=(0,))
    sequence = mmu.open(np.arange(8, dtype=np.int32))
    mmu.validate()
    for step in range(200):
        at = mmu.block_table(sequence)[0]
        before = mmu.block_map()
        columns = {
            name: getattr(before, name).copy()
            for name in ("states", "references", "sequences", "logical", "orders", "flags")
        }
        other = int(np.flatnonzero(before.sequences < 0)[0])
        for column in columns.values():  # one block has changed places with an empty one
            column[[at, other]] = column[[other, at]]
        if history.wants(1):
            history.compaction(before, Snapshot(**columns, about={}))
        history.sample(float(step + 1), mmu)
    times = [each.simulated_s for each in history.compactions]
    assert len(times) == 3
    assert times[-1] > 100
    assert min(np.diff(times)) > 10


@pytest.mark.parametrize(
    "wrong",
    [{"every_steps": 0}, {"samples": 1}, {"cells": 0}, {"compactions": -1}, {"samples": 2.5}],
)
def test_a_history_refuses_numbers_that_make_none(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(wrong))):
        History(**wrong)


# -- the page --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    made = []
    for policy, compaction in (("compaction", True), ("fallback <b>&amp;", False)):
        history = History(every_steps=2, samples=100)
        churned(history, 150, compaction=compaction)
        figures: dict[str, Any] = {
            "moves": 12345,
            "ratio": 0.123456,
            "note": "<i>",
            "missing": None,
            "flag": True,
        }
        made.append(Run(policy, figures, history, {"moves": "blocks & <moves>"}))
    made.append(Run("table only", {"moves": 1}))
    return made


@pytest.fixture(scope="module")
def text(runs: list[Run]) -> str:
    pytest.importorskip("plotly")
    return page("Simulated <test>", runs, about="seed 0 </script>")


def test_the_page_is_one_file_that_says_what_it_was_given(text: str, runs: list[Run]) -> None:
    assert "Simulated &lt;test&gt;" in text
    assert "seed 0 &lt;/script&gt;" in text
    for shown in ("12,345", "0.123", "&lt;i&gt;", "<td>–</td>", "table only", "<td>yes</td>"):
        assert shown in text
    assert "blocks &amp; &lt;moves&gt;" in text
    assert "{{" not in text.partition("<script>")[0]
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert [run["policy"] for run in data["runs"]] == [run.policy for run in runs[:2]]
    assert data["runs"][0]["compactions"]
    own = text.replace(max(text.split("<script>"), key=len), "")
    assert not re.findall(r"""(?:src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org)""", own)


def test_runs_of_one_name_and_no_runs_are_refused(runs: list[Run]) -> None:
    for given_runs in ([], [runs[0], runs[0]]):
        with pytest.raises(InvalidConfig, match="name"):
            page("t", given_runs)


def test_without_plotly_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, runs: list[Run]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingExtra, match=r"kvmmu\[html\]"):
        page_function("t", runs)


# -- in a browser ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium; skipped where there is none."""
    api = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("KVMMU_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip("no Chromium on the path; KVMMU_CHROMIUM can name one")
    with api.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class Opened:
    """A page in the browser, and whatever it complained of or asked for."""

    def __init__(self, browser: Any, file: Path, width: int, theme: str) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=theme
        )
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("html[data-ready=yes]", timeout=60_000)

    def picture(self, canvas: str) -> str:
        return str(self.page.evaluate(f"document.getElementById('{canvas}').toDataURL()"))

    def until(self, true: Callable[[], bool]) -> None:
        """Waits for something to become true. (The page's policy forbids the driver's own way.)"""
        for _ in range(200):
            if true():
                return
            self.page.wait_for_timeout(50)
        raise AssertionError("it did not become so in 10 s")

    def says(self, element: str) -> str:
        return str(self.page.inner_text(f"#{element}"))


@pytest.fixture(params=[(400, "light"), (400, "dark"), (1600, "light"), (1600, "dark")], ids=str)
def opened(
    request: pytest.FixtureRequest, browser: Any, text: str, tmp_path: Path
) -> Iterator[Opened]:
    file = tmp_path / "page.html"
    file.write_text(text, encoding="utf-8")
    shown = Opened(browser, file, *request.param)
    yield shown
    assert shown.complaints == []
    assert shown.requests == [file.as_uri()]
    shown.context.close()


@pytest.mark.needs_chromium
def test_the_page_works_in_a_browser(opened: Opened, runs: list[Run]) -> None:
    page = opened.page
    history = runs[0].history
    assert history is not None

    # Nothing is wider than the window, and no two labels of an axis touch.
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    boxes = page.evaluate(
        """[...document.querySelectorAll('.plot')].map(plot => ['x', 'y'].map(axis =>
            [...plot.querySelectorAll(`.${axis}tick text`)].map(label => {
              const { left, right, top, bottom } = label.getBoundingClientRect();
              return [left, right, top, bottom]; })))"""
    )
    assert len(boxes) == 4
    for plot in boxes:
        for labels in plot:
            assert len(labels) >= 2
            for i, a in enumerate(labels):
                for b in labels[i + 1 :]:
                    assert a[1] <= b[0] or b[1] <= a[0] or a[3] <= b[2] or b[3] <= a[2]

    # Colours by state, sequence and page size are three pictures.
    pictures = [opened.picture("map")]
    for value in ("1", "2"):
        page.check(f"input[name=colour][value='{value}']", force=True)
        page.wait_for_selector(f"#map[data-plane='{value}']")
        pictures.append(opened.picture("map"))
    assert len(set(pictures)) == 3
    page.check("input[name=colour][value='0']", force=True)

    # The cursor reads what the history says, by mouse and by keyboard.
    page.locator("#map").scroll_into_view_if_needed()
    box = page.locator("#map").bounding_box()
    cells = history.planes()[0].shape[1]
    for share_x, share_y in ((0.5, 0.5), (0.1, 0.9), (0.97, 0.03)):
        x = 66 + share_x * (box["width"] - 66 - 16)
        y = 14 + share_y * (box["height"] - 14 - 26)
        page.mouse.move(box["x"] + x, box["y"] + y)
        check_readout(opened.says("readout"), history)
    page.focus("#map")
    page.keyboard.press("Home")
    for _ in range(cells // 10 + 1):
        page.keyboard.press("Shift+ArrowDown")
    first = opened.says("readout")
    check_readout(first, history)
    assert "block 0" in first or "blocks 0 to" in first
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    assert opened.says("readout") != first
    check_readout(opened.says("readout"), history)

    # Before and after, at a click.
    text, before = opened.says("pass-text"), opened.picture("pass")
    assert text.startswith("Before") and f"{len(history.compactions[0].moves)} blocks" in text
    page.click("#flip")
    page.wait_for_selector("#pass[data-shows=after]")
    assert opened.says("pass-text").startswith("After")
    assert opened.picture("pass") != before
    page.click("#pass")
    page.wait_for_selector("#pass[data-shows=before]")
    assert opened.picture("pass") == before
    page.check("#all-windows")
    check_pass(opened, history)
    page.locator("#pass-list button").last.click()
    opened.until(lambda: opened.says("pass-text") != text)

    # Another policy, another theme.
    pictures = [opened.picture("map")]
    page.select_option("#run", "1")
    opened.until(lambda: "fallback <b>&amp;" in page.get_attribute("#map", "aria-label"))
    assert page.is_hidden("#passes")
    pictures.append(opened.picture("map"))
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    other = "light" if page.evaluate("document.documentElement.dataset.theme") == "dark" else "dark"
    page.check(f"input[name=theme][value={other}]", force=True)
    page.wait_for_selector(f"html[data-theme={other}]")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != ground
    opened.until(lambda: opened.picture("map") != pictures[-1])

    # A closer look at a part of the time is one for the map as well, and can be left.
    seen = opened.picture("map")
    plot = page.locator(".plot").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 80)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 80, steps=5)
    page.mouse.up()
    opened.until(lambda: opened.picture("map") != seen)
    page.wait_for_timeout(400)  # a click right after the drag would be its second
    page.mouse.dblclick(box["x"] + 0.5 * box["width"], box["y"] + 80)
    opened.until(lambda: opened.picture("map") == seen)


@pytest.mark.needs_chromium
@pytest.mark.parametrize("samples", [0, 1, 2])
def test_a_page_of_next_to_nothing_works_too(browser: Any, tmp_path: Path, samples: int) -> None:
    pytest.importorskip("plotly")
    history = History(every_steps=1)
    mmu, _ = small()
    for step in range(samples):
        history.sample(float(step), mmu)
    file = tmp_path / "page.html"
    file.write_text(page("Short", [Run("one", {}, history), Run("two", {})]), encoding="utf-8")
    shown = Opened(browser, file, 800, "light")
    assert shown.complaints == []
    assert shown.page.is_visible("#map") == (samples > 0)
    assert shown.page.is_hidden("#passes")
    if samples:
        assert shown.says("readout") == "0 s, block 0: 100 % in use, mapped by pages of 4"
    shown.context.close()


def check_readout(text: str, history: History) -> None:
    """ "12 s, blocks 4,096 to 4,103: 80 % in use, ..." is what the history has there."""
    found = re.match(
        r"(?:(\d+) min ?)?(?:([\d.]+)(?: s)?)?, blocks? ([\d,]+)(?: to ([\d,]+))?: "
        r"(\d+) % ([a-z ]+)",
        text,
    )
    assert found, text
    time = 60 * int(found[1] or 0) + float(found[2] or 0)
    column = int(np.argmin(np.abs(np.array(history.times) - time)))
    cell = int(found[3].replace(",", "")) // history.cell_blocks
    byte = int(history.planes()[0][column, cell])
    assert int(found[5]) == round((byte >> 4) / 15 * 100)
    name = CODES[byte & 15].replace("_", " ").replace("held", "kept to grow into")
    assert found[6].startswith(name.split(":")[0])


def check_pass(opened: Opened, history: History) -> None:
    """What the pointer reads over a pass is what the map of all blocks says."""
    kept = history.compactions[0]
    states = np.frombuffer(zlib.decompress(kept.before), np.uint8)[: history.blocks]
    page = opened.page
    page.locator("#pass").scroll_into_view_if_needed()
    box = page.locator("#pass").bounding_box()
    across, windows = box["width"] - 66 - 16, history.blocks // 512
    row = (box["height"] - 16) / windows
    seen = set()
    for block in (5, 700, 2100, *(int(source) for source in kept.moves[:3, 0])):
        x = 66 + (block % 512 + 0.5) / 512 * across
        page.mouse.move(box["x"] + x, box["y"] + 8 + (block // 512 + 0.3) * row)
        text = opened.says("pass-readout")
        found = re.match(r"block ([\d,]+): ([a-z ]+)", text)
        assert found, text
        number = int(found[1].replace(",", ""))
        assert abs(number - block) <= 512 / across + 1  # a pixel may have more than one block
        name = CODES[states[number]].replace("_", " ").replace("held", "kept to grow into")
        assert found[2].startswith(name)
        seen.add("moved to" in text)
    assert seen == {True, False}


# -- in a terminal ---------------------------------------------------------------------------


def small() -> tuple[MMU, BlockMap]:
    mmu = MMU(64, 4, page_orders=(0, 2), medium_from=0, hold_blocks=2)
    mmu.open(np.arange(60, dtype=np.int32))
    mmu.open(np.arange(100, 130, dtype=np.int32))
    return mmu, mmu.block_map()


def test_the_terminal_shows_every_block_of_a_small_pool() -> None:
    mmu, blocks = small()
    drawn = memory_map(blocks, 60).plain
    marks = "".join(re.findall(r"^ *[\d,]+ (.*)$", drawn, re.MULTILINE)[: -(-64 // 48)])
    expected = {"empty": "·", "in_use": "█", "held": "+"}
    assert marks[:64] == "".join(expected[CODES[code]] for code in codes(blocks))
    states = mmu.states()
    assert f"{states['in_use']} in use" in drawn
    assert "a character: 1 block" in drawn


@pytest.mark.parametrize("width", [24, 40, 80, 200])
@pytest.mark.parametrize("by", ["state", "sequence", "page"])
def test_the_map_keeps_within_the_terminal(width: int, by: str) -> None:
    history = History(compactions=0)
    mmu = churned(history, 5)
    blocks = mmu.block_map()
    drawn = memory_map(blocks, width, by=by, rows=20).plain
    picture = drawn.split("\n\n")[0].splitlines()
    assert len(picture) <= 20
    assert max(map(len, picture)) <= width
    assert len(picture[0]) > width * 0.6
    windows = available(blocks).reshape(-1, 512).all(axis=1).sum()
    assert f"{windows} of 8 windows free" in drawn
    legend = [line.split(" ", 1)[1] for line in drawn.split("\n\n")[1].splitlines()]
    assert len(set(legend)) == len(legend)


def test_the_map_reads_the_same_without_colours_and_in_ascii() -> None:
    _, blocks = small()
    drawn = memory_map(blocks, 60, ascii_only=True)
    assert drawn.plain.isascii()
    assert {".", "#", "+"} <= set(drawn.plain.splitlines()[0])


def test_the_code_of_the_document_runs(tmp_path: Path) -> None:
    text = (Path(__file__).parent.parent / "docs" / "pictures.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.fullmatch(r"33\d\d in use, 3072 in huge pages", lines[0])
    assert lines[-1] == "4 samples"
    assert (tmp_path / "memory.pickle").exists()


# -- commands --------------------------------------------------------------------------------


def test_map_prints_a_snapshot_file(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    mmu, _ = small()
    file.write_text(snapshot(mmu).json())
    done = kvmmu("map", file)
    assert done.returncode == 0, said(done)
    assert "23 in use" in said(done)
    assert "\x1b" not in done.stdout
    assert "pages of 4" in said(kvmmu("map", file, "--by", "page"))
    assert kvmmu("map", file, PYTHONIOENCODING="ascii").stdout.isascii()


def test_map_replays_up_to_a_moment_and_saves_it(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    done = kvmmu("map", "article", "--at", "20s", "--blocks", "30000", "--json", file)
    assert done.returncode == 0, said(done)
    taken = Snapshot.from_json(file.read_text())
    assert taken.about["num_blocks"] == 30000
    assert taken.about["blocks"]["in_use"] > 0
    assert f"{taken.about['blocks']['in_use']:,} in use" in said(done)
    assert said(kvmmu("map", file)) == said(done)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.jsonl"], "nowhere.jsonl"),
        (["article", "--at", "soon"], "--at"),
        (["article", "--at", "-1s"], "--at"),
        (["article", "--rows", "0"], "rows"),
        (["article", "--json", "/nowhere/at/all.json"], "cannot be written"),
    ],
)
def test_map_says_what_is_wrong_with_its_input(arguments: list[str], says: str) -> None:
    done = kvmmu("map", *arguments)
    assert done.returncode == 2
    assert says in said(done)


def test_map_refuses_a_broken_snapshot_and_a_moment_of_one(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    file.write_text(snapshot(MMU(64, 4)).json())
    for option, value in (
        *(("--at", "3s"), ("--blocks", "100"), ("--block-size", "8"), ("--compaction", "off")),
        *(("--placement", "fifo"), ("--speed", "2"), ("--seed", "1")),
    ):
        done = kvmmu("map", file, option, value)
        assert done.returncode == 2
        assert f"{option}: {value} given with a snapshot, which is of one moment" in said(done)
    file.write_text(file.read_text()[:-20])
    done = kvmmu("map", file)
    assert done.returncode == 2
    assert "no snapshot of kvmmu" in said(done)


@pytest.mark.parametrize("text", ['{"trace": "x", "requests": 240}', '{\n "a": 1\n}', "[1, 2]"])
def test_map_says_of_other_json_that_it_is_no_snapshot(text: str, tmp_path: Path) -> None:
    file = tmp_path / "o.json"
    file.write_text(text)
    done = kvmmu("map", file, COLUMNS="300")
    assert done.returncode == 2
    assert f"{file} is no snapshot of kvmmu: it has no 'kvmmu_snapshot'" in said(done)


def test_replay_writes_a_page(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    file = tmp_path / "p.html"
    done = kvmmu("replay", "--sample", "--limit", "60", "--html", file)
    assert done.returncode == 0, said(done)
    text = file.read_text(encoding="utf-8")
    assert "Simulated replay of the small sample" in text
    assert '"policy":"compaction"' in text


def test_replay_says_before_the_run_that_the_page_cannot_be(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    wrong: list[tuple[list[str | Path], str]] = [
        (["--html", tmp_path / "no" / "p.html"], "cannot be written"),
        (["--html", tmp_path / "p.html", "--one-at-a-time"], "no clock"),
    ]
    for arguments, says in wrong:
        done = kvmmu("replay", "--sample", *arguments)
        assert done.returncode == 2
        assert says in said(done)
