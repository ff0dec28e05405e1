"""The page in headless Chromium: pointing, clicking, keys, a phone, the dark."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from maskc.report.cases import Subject, head_of
from maskc.report.page import explain_page
from maskc.runtime.localize import RowMap, localize
from maskc.runtime.plan import plan
from maskc.tiles import TileClass, classify

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser

SHOWN = ("doc_prefix", "causal", "share_question", "duo_heads", "cross_pairs")


@pytest.fixture(scope="module")
def path(subjects: dict[str, Subject], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("browser") / "page.html"
    out.write_text(explain_page([subjects[n] for n in SHOWN], "masks"), encoding="utf-8")
    return out


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.fail("no Chromium on the path: apt-get install chromium")
    with sync_playwright() as p:
        running = p.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def opened(browser: Browser, path: Path) -> Iterator[Any]:
    """`opened(mask, **context options)` gives a page; a fault in its scripts, or a request, fails the test."""
    faults: list[str] = []
    contexts = []

    def show(mask: str = SHOWN[0], **options: Any) -> Page:
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda e: faults.append(str(e)))
        page.on("console", lambda m: faults.append(m.text) if m.type == "error" else None)
        page.on("request", lambda r: None if r.url.startswith("file:") else faults.append(r.url))
        page.goto(f"{path.as_uri()}#m={mask}")
        return page

    yield show
    for context in contexts:
        context.close()
    assert faults == []


def point(page: Page, holder: str, k: float, q: float, nk: int, nq: int) -> tuple[float, float]:
    """Where the cell (q, k) is on the screen; the page is scrolled there."""
    area = page.locator(f"{holder} svg rect").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    assert box is not None
    return box["x"] + (k + 0.5) / nk * box["width"], box["y"] + (q + 0.5) / nq * box["height"]


def test_every_mask_opens(opened: Any) -> None:
    page = opened()
    for name in (*SHOWN[1:], SHOWN[0]):
        page.locator("#next").click()
        assert page.locator("#name").inner_text() == name
        assert page.locator("#matrix path").count() > 3
    page.locator("#pick").select_option(label="causal")
    assert page.locator("#name").inner_text() == "causal"
    page.keyboard.press("Escape")
    page.locator("body").press("[")
    assert page.locator("#name").inner_text() == "doc_prefix"


def test_pointing_at_cells_says_what_the_library_says(opened: Any, subjects: dict[str, Subject]) -> None:
    masked = subjects["doc_prefix"].bound.vectors().masked()[0, 0]
    page = opened("doc_prefix")
    for q, k in ((73, 58), (10, 40), (60, 100), (127, 84), (0, 0), (90, 103)):
        page.mouse.move(*point(page, "#matrix", k, q, 128, 128))
        said = page.locator("#cell h4").inner_text()
        assert said == f"row {q}, key {k}: {'masked' if masked[q, k] else 'visible'}"
    tree = page.locator("#cell .tree > li > .yes, #cell .tree > li > .no").first.inner_text()
    assert tree == ("✗" if masked[90, 103] else "✓")
    assert page.locator("#source span").count() == 3


def test_numbers_of_the_page(opened: Any, subjects: dict[str, Subject]) -> None:
    v = subjects["share_question"].bound.vectors()
    page = opened("share_question")
    for size in ((16, 16), (8, 8), (32, 32)):
        page.locator("#tile").select_option(f"{size[0]}x{size[1]}")
        classes = classify(v, *size)
        for name in TileClass:
            row = page.locator("#counts tr", has=page.locator(f".chip.{name.name}"))
            assert row.locator("td").first.inner_text() == str(int((classes == name).sum()))


def test_a_click_shows_the_queue(opened: Any, subjects: dict[str, Subject]) -> None:
    row = classify(subjects["doc_prefix"].bound.vectors(), 16, 16)[0, 0, 5].tolist()
    page = opened("doc_prefix")
    page.mouse.click(*point(page, "#matrix", 3, 5 * 16 + 2, 128, 128))
    assert page.locator("#q-block").input_value() == "5"
    titles = page.locator("#roles .entry title").all_text_contents()
    generator = [t.split(":")[0].removeprefix("KV block ") + t.split(": ")[1].split(",")[0] for t in dict.fromkeys(titles)]
    assert generator == [f"{j}{TileClass(row[j]).name}" for j in reversed(range(8))]
    for name, count in (("SKIP", 1), ("PARTIAL", 3), ("UNMASKED", 3)):
        assert page.locator(f"#roles .entry.{name}").count() == count * row.count(TileClass[name])


def test_keys_move_the_cell(opened: Any) -> None:
    page = opened("doc_prefix")
    page.mouse.move(*point(page, "#matrix", 40, 50, 128, 128))
    page.locator("#matrix").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Shift+ArrowDown")
    assert page.locator("#cell h4").inner_text().startswith("row 67, key 39:")
    page.keyboard.press("Enter")
    assert page.locator("#q-block").input_value() == "4"


def test_localization_follows_the_owners(opened: Any, subjects: dict[str, Subject]) -> None:
    v = subjects["doc_prefix"].bound.vectors()
    page = opened("doc_prefix")
    page.locator("#local-ranks").select_option("2")
    chunks = page.locator("#chunks button")
    chunks.nth(0).focus()
    for n, rank in enumerate("0110100110010110"[: chunks.count()]):
        chunks.nth(n).press(rank)
    layout = plan(
        v, world_size=2, chunk=128 // chunks.count(), assign=[int(r) for r in "0110100110010110"[: chunks.count()]]
    ).rows
    key = 70
    page.mouse.move(*point(page, "#global", key, 20, 128, 128))
    told = [[c.strip() for c in row.split("\t")] for row in page.locator("#column table").inner_text().splitlines()]
    assert told[0] == [f"key {key}", "LTS", "UTE"]
    assert v.lts is not None
    assert v.ute is not None
    assert told[1][1:] == [str(int(v.lts[0, 0, key])), str(int(v.ute[0, 0, key]))]
    for rank in range(2):
        chunk_numbers = layout.chunks_of(rank)
        local = localize(head_of(v, 0, 0), layout, chunk_numbers, layout, tuple(range(layout.chunk_count)))
        assert local.lts is not None
        assert local.ute is not None
        assert told[2 + rank][1:] == [str(int(local.lts[0, 0, key])), str(int(local.ute[0, 0, key]))]
        assert f"{RowMap.of(layout, chunk_numbers).length} rows" in page.locator("#locals h3").nth(rank).inner_text()
    chunks.nth(0).click()
    assert chunks.nth(0).inner_text().split() == ["0", "1"]
    page.locator("#local-reset").click()
    assert page.locator("#locals figure").count() == 2


def test_balance_shows_the_planners_loads(opened: Any, subjects: dict[str, Subject]) -> None:
    scaled = subjects["doc_prefix"].scaled
    assert scaled is not None
    v = scaled.vectors()
    page = opened("doc_prefix")
    page.locator("#plan-ranks").select_option("4")
    page.locator("#plan-chunks").select_option("4")
    p = plan(v, world_size=4, chunk=32, order="contiguous")
    page.locator("#ways button[data-way='contiguous']").click()
    assert page.locator("#ways [aria-pressed=true]").inner_text() == "contiguous"
    assert page.locator("#bars .segment").count() == 16
    on = page.locator("#ways-table tr.on td").all_inner_texts()
    assert on[:2] == [f"{p.imbalance:.4f}", f"{p.makespan:,}"]
    for stage in ("stage 1", "stage 2", "stage 3"):
        page.locator(f"#ways button[data-way='{stage}']").click()
        assert page.locator("#stage-words").inner_text().startswith(stage.capitalize())


def test_switches_of_the_time_line(opened: Any) -> None:
    page = opened("doc_prefix")
    page.locator("#time-rank").select_option("5")
    bars = page.locator("#timeline rect.transfer")
    pruned = bars.count()
    page.locator("#prune").uncheck()
    assert bars.count() > pruned
    assert page.locator("#time-table tr.on th").inner_text() == "everything, hierarchical"
    page.locator("#hierarchical").uncheck()
    assert bars.count() == 28  # every chunk that rank 5 does not own
    assert "model" in page.locator("#exchange h2").inner_text()


def test_heads_are_told_apart(opened: Any, subjects: dict[str, Subject]) -> None:
    masked = subjects["duo_heads"].bound.vectors().masked()[0]
    page = opened("duo_heads")
    for head in (0, 1):
        page.locator("#slice").select_option(str(head))
        page.mouse.move(*point(page, "#matrix", 10, 40, 128, 128))
        assert page.locator("#cell h4").inner_text().endswith("masked" if masked[head, 40, 10] else "visible")


@pytest.mark.parametrize("mask", SHOWN)
def test_on_a_phone(opened: Any, mask: str) -> None:
    """Nothing wider than the screen, text of a readable size, a touch that works."""
    page = opened(mask, viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    small = """[...document.querySelectorAll('svg text')].filter((t) => {
        const scale = t.ownerSVGElement.getBoundingClientRect().width / (t.ownerSVGElement.viewBox.baseVal.width || 1);
        return t.textContent && parseFloat(getComputedStyle(t).fontSize) * scale < 10;
    }).map((t) => t.textContent)"""
    assert page.evaluate(small) == []
    before = page.locator("#cell h4").inner_text()
    page.touchscreen.tap(*point(page, "#matrix", 30, 10, 128, 96))
    assert page.locator("#cell h4").inner_text() != before


COLOURS = """() => {
    const probe = document.body.appendChild(document.createElement("span")), out = {};
    for (const name of ["paper", "panel", "ink", "quiet", "partial", "unmasked", "skip", "chip-ink", "partial-ink", "mark"]) {
        probe.style.color = `var(--${name})`;
        out[name] = getComputedStyle(probe).color.match(/[0-9.]+/g).slice(0, 3).map(Number);
    }
    return out;
}"""


NAMELESS = """() => [...document.querySelectorAll("svg, select, button, input, [role=application], [role=region]")]
    .filter((e) => !e.closest("[aria-hidden=true]"))
    .filter((e) => !(e.getAttribute("aria-label") || (e.labels && e.labels.length) || (e.tagName === "BUTTON" && e.innerText)))
    .map((e) => `${e.tagName} in ${e.closest("[id]").id}`)"""


@pytest.mark.parametrize("mask", SHOWN)
def test_every_figure_and_control_has_a_name(opened: Any, mask: str) -> None:
    assert opened(mask).evaluate(NAMELESS) == []


def test_without_scripts_the_page_says_so(opened: Any) -> None:
    assert "this browser runs none" in opened(java_script_enabled=False).locator("main").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(opened: Any, scheme: str) -> None:
    """Text stands out from what is behind it, 4.5 to 1 or more."""
    page = opened(color_scheme=scheme)
    colours = page.evaluate(COLOURS)

    def luminance(rgb: list[float]) -> float:
        parts = [c / 255 / 12.92 if c / 255 <= 0.03928 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    def contrast(a: str, b: str) -> float:
        high, low = sorted((luminance(colours[a]), luminance(colours[b])), reverse=True)
        return (high + 0.05) / (low + 0.05)

    assert (luminance(colours["paper"]) < 0.1) == (scheme == "dark")
    for text in ("ink", "quiet", "mark"):
        assert contrast(text, "paper") >= 4.5
        assert contrast(text, "panel") >= 4.5
    for ink, chip in (("partial-ink", "partial"), ("chip-ink", "unmasked")):
        assert contrast(ink, chip) >= 4.5
        assert contrast(chip, "skip") >= 1.8
