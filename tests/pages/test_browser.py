"""Every page in a real browser: no violation that axe knows, in light and dark, no overflow, no request, no message."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.pages.browser import Browser, browser, missing
from tests.pages.samples import write_command_pages, write_pages

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

WIDTHS: Final = (390, 768, 1280)


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_pages(tmp_path_factory.mktemp("pages")) + write_command_pages(tmp_path_factory.mktemp("commands"))


def faults(tab: Browser, page: Path, width: int, *, dark: bool) -> list[str]:
    """What is wrong with a page."""
    tab.open(page.as_uri(), width, dark=dark)
    found = tab.violations() + tab.messages
    if tab.requests != [page.as_uri()]:
        found.append(f"it requests {tab.requests[1:]}")
    if wider := tab.overflow():
        found.append(f"it is {wider} px wider than {width} px")
    return [f"{page.name}, {width} px, {'dark' if dark else 'light'}: {fault}" for fault in found]


@pytest.mark.sample(8, "browser")
def test_every_page_is_accessible_and_fits_a_phone(tab: Browser, pages: list[Path]) -> None:
    assert [fault for page in pages for fault in faults(tab, page, 390, dark=False)] == []


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_is_accessible_at_every_width_in_both_schemes(
    tab: Browser, pages: list[Path], width: int, dark: bool
) -> None:
    assert [fault for page in pages for fault in faults(tab, page, width, dark=dark)] == []


@pytest.mark.sample(8, "browser")
def test_a_table_is_sorted_by_its_heads_and_filtered_by_words(tab: Browser, pages: list[Path]) -> None:
    page = next(page for page in pages if page.name == "build.html")
    tab.open(page.as_uri(), 1280)
    programs = "[...document.querySelectorAll('table.sortable')].at(-1)"
    times = f"[...{programs}.tBodies[0].rows].map(row => Number(row.cells[4].dataset.value))"
    click = f"{programs}.tHead.rows[0].cells[4].querySelector('button').click(); {times}"
    up, down = tab.evaluate(click), tab.evaluate(click)
    assert up == sorted(up)
    assert down == sorted(up, reverse=True)
    assert up != down
    words = f"""
        const box = {programs}.parentElement.parentElement.querySelector('input.filter');
        box.value = 'b4 model-1'; box.dispatchEvent(new Event('input'));
        [...{programs}.tBodies[0].rows].filter(row => !row.hidden).map(row => row.textContent)
    """
    shown = tab.evaluate(words)
    assert len(shown) == 3
    assert all("b4" in row and "model-1" in row for row in shown)


@pytest.mark.sample(8, "browser")
def test_the_checks_of_this_file_find_what_is_wrong(tab: Browser, tmp_path: Path) -> None:
    page = tmp_path / "wrong.html"
    page.write_text(
        "<!doctype html><html><title>x</title><img src='a.png'><p style='width: 2000px; color: #ddd'>pale</p>"
    )
    found = " ".join(faults(tab, page, 390, dark=False))
    assert all(word in found for word in ("image-alt", "color-contrast", "html-has-lang", "px wider", "a.png"))
