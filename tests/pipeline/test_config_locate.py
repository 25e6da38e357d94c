"""Every key of a valid document is located on its line, for every style of the document."""

import random
import re
import tomllib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nxpipe.pipeline.config.schema import KeyPath
from nxpipe.pipeline.config.toml_file import locate

Document = dict[str, Any]

_characters = st.characters(exclude_categories=["Cs"])
_keys = st.one_of(
    st.from_regex("[A-Za-z0-9_-]{1,6}", fullmatch=True),
    st.text(_characters, max_size=6),
    st.sampled_from(["a.b", "[x]", "# no comment", "'", '"', "", "line\nbreak", "=", "\\"]),
)
_texts = st.one_of(
    st.text(_characters, max_size=12),
    st.sampled_from(
        ['a = "b"', "[header]\nkey = 1\n", '""', "''", "'''", '"""', "# hash", "]", "}", "\\", "tail'", 'tail"']
    ),
)
_scalars = st.one_of(st.integers(-9, 9), st.booleans(), st.floats(allow_nan=False), st.datetimes(), st.dates(), _texts)
_values = st.recursive(
    _scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_keys, inner, max_size=3)),
    max_leaves=12,
)
documents = st.dictionaries(_keys, _values, max_size=5)


class Writer:
    """Writes a document in a random style, and records the line of each key."""

    def __init__(self, chance: random.Random) -> None:
        self.text = ""
        self.lines: dict[KeyPath, int] = {}
        self._chance = chance

    def table(self, table: Document, path: KeyPath, header: tuple[str, ...]) -> None:
        """Keys come first: lines after a subtable's header belong to the subtable."""
        later: list[str] = []
        for key, value in table.items():
            if self._chance.random() < 0.5 and (isinstance(value, dict) or self._is_array_of_tables(value)):
                later.append(key)
            else:
                self._entry((key,), value, path)
        for key in later:
            self._headed(table[key], (*path, key), (*header, key))

    def _headed(self, value: Any, path: KeyPath, header: tuple[str, ...]) -> None:
        name = self._space(".").join(map(self._key, header))
        if isinstance(value, dict):
            self._blank()
            self._note(path)
            self.text += f"[{name}]{self._end()}"
            self.table(value, path, header)
            return
        for index, item in enumerate(value):
            self._blank()
            self._note(path)
            self._note((*path, index))
            self.text += f"[[{name}]]{self._end()}"
            self.table(item, (*path, index), header)

    def _entry(self, keys: tuple[str, ...], value: Any, path: KeyPath) -> None:
        if isinstance(value, dict) and value and self._chance.random() < 0.4:
            for key, inner in value.items():
                self._entry((*keys, key), inner, path)
            return
        self._blank()
        for depth in range(len(keys)):
            self._note((*path, *keys[: depth + 1]))
        self.text += self._space(".").join(map(self._key, keys)) + self._space("=")
        self._value(value, (*path, *keys))
        self.text += self._end()

    def _value(self, value: Any, path: KeyPath) -> None:
        if isinstance(value, list):
            self._list(value, path)
        elif isinstance(value, dict):
            self._braces(value, path)
        elif isinstance(value, str):
            self.text += self._string(value)
        elif isinstance(value, bool):
            self.text += str(value).lower()
        else:
            self.text += str(value)

    def _list(self, items: list[Any], path: KeyPath) -> None:
        self.text += "["
        for index, item in enumerate(items):
            self.text += self._gap()
            self._note((*path, index))
            self._value(item, (*path, index))
            self.text += self._gap() + ("," if index < len(items) - 1 or self._chance.random() < 0.3 else "")
        self.text += self._gap() + "]"

    def _braces(self, table: Document, path: KeyPath) -> None:
        self.text += "{"
        for index, (key, value) in enumerate(table.items()):
            self.text += self._space("," if index else "")
            self._note((*path, key))
            self.text += self._key(key) + self._space("=")
            self._value(value, (*path, key))
        self.text += " }"

    def _key(self, key: str) -> str:
        if re.fullmatch("[A-Za-z0-9_-]+", key) and self._chance.random() < 0.8:
            return key
        return f"'{key}'" if self._is_literal(key, "'\n") and self._chance.random() < 0.5 else _basic(key)

    def _string(self, text: str) -> str:
        style = self._chance.randrange(4)
        if style == 0 and self._is_literal(text, "'\n"):
            return f"'{text}'"
        if style == 1 and self._is_literal(text, "") and "'''" not in text and not text.endswith("'"):
            return f"'''\n{text}'''"
        if style == 2 and self._is_literal(text, "\\") and '"""' not in text:
            return f'"""\n{text}"""' if not text.endswith('""') else _basic(text)
        return _basic(text)

    def _is_literal(self, text: str, without: str) -> bool:
        return all(entry in "\n\t" or (entry.isprintable() and entry != "\x7f") for entry in text) and not set(
            text
        ) & set(without)

    def _is_array_of_tables(self, value: Any) -> bool:
        return isinstance(value, list) and bool(value) and all(isinstance(item, dict) for item in value)

    def _space(self, token: str) -> str:
        return self._chance.choice(["", " ", "\t"]) + token + self._chance.choice(["", " "])

    def _gap(self) -> str:
        return self._chance.choice(["", " ", "\n", "  # ], not the end\n\n"])

    def _blank(self) -> None:
        self.text += self._chance.choice(["", "", "\n", "# key = 1\n", "  \t\n "])

    def _end(self) -> str:
        return self._chance.choice(["\n", "  # the end = 1\n", " \r\n"])

    def _note(self, path: KeyPath) -> None:
        self.lines.setdefault(path, self.text.count("\n") + 1)


def _basic(text: str) -> str:
    safe = (entry if entry.isprintable() and entry not in '"\\' else f"\\U{ord(entry):08x}" for entry in text)
    return f'"{"".join(safe)}"'


@given(documents, st.randoms(use_true_random=False))
def test_every_key_is_found_on_its_line_in_every_style(document: Document, chance: random.Random) -> None:
    writer = Writer(chance)
    writer.table(document, (), ())
    assert tomllib.loads(writer.text) == document, "the test's own writer must write what it was given"
    assert locate(writer.text) == writer.lines


def test_a_table_stands_where_its_own_header_is_even_after_its_subtable() -> None:
    assert locate("[a.b]\nx = 1\n[a]\ny = 2\n") == {
        ("a",): 3,
        ("a", "b"): 1,
        ("a", "b", "x"): 2,
        ("a", "y"): 4,
    }


def test_a_subtable_belongs_to_the_newest_table_of_its_array() -> None:
    lines = locate("[[a]]\n[a.b]\nx = 1\n[[a]]\n[a.b]\nx = 2\n[[a.c]]\n[[a.c]]\ny = 3\n")
    assert (lines["a", 0, "b", "x"], lines["a", 1, "b", "x"], lines["a", 1, "c", 1, "y"]) == (3, 6, 9)
