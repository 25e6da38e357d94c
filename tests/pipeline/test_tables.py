"""The layout of tables and lines: every width, no broken word, nothing lost."""

import io
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import Column, folded, screen_width, style, table, unstyled

_WORDS = st.lists(st.text("abcdefgh", min_size=1, max_size=11), max_size=12).map(" ".join)
_NUMBERS = st.sampled_from(["1", "12.5 MB", "3,000", "-", "0.99%", "4.91 ms"])
_WIDTHS = st.integers(60, 200)
_COLUMNS = ("name", Column("note", drop=2), Column("remark", drop=1), Column("size", drop=3))
_CELLS = st.tuples(_WORDS, _WORDS, _WORDS, _NUMBERS)


def _lines(text: str) -> list[str]:
    return unstyled(text).split("\n")


def _words(cells: Sequence[str]) -> list[str]:
    return sorted(word for cell in cells for word in cell.split())


@given(rows=st.lists(_CELLS, min_size=1, max_size=4), width=_WIDTHS)
def test_no_line_is_wider_than_the_screen_and_no_word_is_broken_or_lost(
    rows: list[tuple[str, ...]], width: int
) -> None:
    lines = _lines(table(_COLUMNS, rows, width))
    assert max(map(len, lines)) <= width
    body, _, note = " ".join(lines[1:]).partition("Not shown in ")
    dropped = note.partition(": ")[2].partition(".")[0].split(", ")
    kept = [n for n, name in enumerate(("name", "note", "remark", "size")) if name not in dropped]
    assert _words([row[n] for row in rows for n in kept]) == _words([body])


@given(rows=st.lists(_CELLS, min_size=1, max_size=4))
def test_columns_are_dropped_in_the_order_of_their_priority_and_named(rows: list[tuple[str, ...]]) -> None:
    shown = [
        [name for name in ("NAME", "NOTE", "REMARK", "SIZE") if name in _lines(table(_COLUMNS, rows, width))[0]]
        for width in (20, 30, 40, 60, 90, 200)
    ]
    for names in shown:
        assert names in (
            ["NAME"],
            ["NAME", "REMARK"],
            ["NAME", "NOTE", "REMARK"],
            ["NAME", "NOTE", "REMARK", "SIZE"],
        )


def test_a_dropped_column_is_named_with_the_way_to_see_it() -> None:
    text = table(("program", Column("spill", drop=1)), [("forward-b1-s128", "w" * 60)], 40)
    assert _lines(text) == [
        "PROGRAM",
        "forward-b1-s128",
        "Not shown in 40 columns: spill. A wider",
        "terminal or --json has them.",
    ]


def test_numbers_are_aligned_to_the_right_and_texts_to_the_left() -> None:
    rows = [("forward-b1-s32", "0.91 ms", "dma"), ("forward-b1-s128", "12.30 ms", "-"), ("decode", "-", "pe")]
    assert _lines(table(("program", "time", "bound by"), rows)) == [
        "PROGRAM              TIME  BOUND BY",
        "forward-b1-s32    0.91 ms  dma",
        "forward-b1-s128  12.30 ms  -",
        "decode                  -  pe",
    ]


def test_a_row_of_one_cell_is_a_heading_that_widens_no_column() -> None:
    text = table(("name", "size"), [("a heading of the rows below",), ("a", "1 B"), ("b", "20 B")])
    assert _lines(text) == ["NAME  SIZE", "a heading of the rows below", "a      1 B", "b     20 B"]


def test_an_indented_cell_is_wrapped_like_any_other() -> None:
    text = table(("  program", "why"), [("  forward-b1-s128", "no room here")], 24)
    assert _lines(text) == [
        "  PROGRAM          WHY",
        "  forward-b1-s128  no",
        "                   room",
        "                   here",
    ]


def test_a_table_without_rows_but_headings_has_no_titles() -> None:
    assert _lines(table(("name", "size"), [("published already",)])) == ["published already"]


@given(text=_WORDS.filter(bool), width=st.integers(12, 80))
def test_lines_are_folded_between_words(text: str, width: int) -> None:
    lines = folded(text, width)
    assert " ".join(lines).split() == text.split()
    assert max(map(len, lines)) <= width


@given(text=st.text("ab/-@ ", min_size=1, max_size=200), width=st.integers(12, 80), indent=st.sampled_from(["", "  "]))
def test_words_longer_than_a_line_are_broken_and_complete(text: str, width: int, indent: str) -> None:
    lines = folded(text, width, indent)
    assert max(map(len, lines)) <= width
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")


def test_a_long_path_is_broken_after_its_separators() -> None:
    text = "see /home/someone/models/bert-base-uncased@4e9ce0a41f07/config.json"
    lines = ["see", "  /home/someone/models/bert-", "  base-uncased@4e9ce0a41f07/", "  config.json"]
    assert folded(text, 30, "  ") == lines


def test_a_table_that_cannot_be_narrowed_becomes_lists() -> None:
    cells = [tuple(f"{number} {letter}" for number in range(10_000_000, 10_000_006)) for letter in "ab"]
    lines = _lines(table([f"c{number}" for number in range(6)], cells, 60))
    assert lines[0] == "C0  10000000 a"
    assert lines[6:8] == ["", "C0  10000000 b"]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_lines_are_wrapped_between_words_on_a_terminal_and_whole_in_a_pipe(
    columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = " ".join(["information"] * 40)
    terminal, pipe = _Terminal(), io.StringIO()
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("sys.stdout", terminal)
    Console().result(text)
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr("sys.stdout", pipe)
    Console().result(text)
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= int(columns)
    assert set(" ".join(lines).split()) == {"information"}
    assert pipe.getvalue() == f"{text}\n"


def test_json_is_never_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("sys.stdout", terminal := _Terminal())
    Console(json=True).data({"text": "word " * 40})
    assert "word " * 40 in terminal.getvalue()


@pytest.mark.parametrize("columns", ["", "0", "-5", "many"])
def test_a_pipe_has_no_width_unless_columns_is_a_number(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert screen_width(io.StringIO()) is None
    monkeypatch.setenv("COLUMNS", "60")
    assert screen_width(io.StringIO()) == 60


def test_styles_neither_widen_a_column_nor_are_they_cut() -> None:
    text = table(("state", "what"), [(style("fails", fg="red"), "a text of many words"), ("ok", "another")], 16)
    assert _lines(text) == ["STATE  WHAT", "fails  a text of", "       many", "       words", "ok     another"]
