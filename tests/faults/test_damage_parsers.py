"""Whatever a document holds, its reader answers with the document or with a sentence."""

import json
from contextlib import suppress
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.errors import InvalidDocument
from tests.faults.parsers import Parser, parsers

PARSERS: Final = parsers()
BINARY: Final = ("pack", "OCI tar")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def read(parser: Parser, data: bytes) -> None:
    with suppress(InvalidDocument):
        parser.read(data)


@pytest.mark.parametrize("name", PARSERS)
def test_every_reader_likes_its_example_unless_that_is_unsigned(name: str) -> None:
    if name != "envelope":
        PARSERS[name].read(PARSERS[name].example)


@pytest.mark.parametrize("name", PARSERS)
@given(data=st.binary(max_size=300), at=st.floats(0, 1), width=st.integers(0, 40))
def test_bytes_written_over_an_example_are_read_or_refused(name: str, data: bytes, at: float, width: int) -> None:
    example = PARSERS[name].example
    start = int(at * len(example))
    read(PARSERS[name], example[:start] + data + example[start + width :])


@pytest.mark.parametrize("name", [name for name in PARSERS if name not in BINARY])
@given(data=st.data(), value=VALUES)
def test_any_value_in_the_place_of_any_other_is_read_or_refused(name: str, data: st.DataObject, value: object) -> None:
    document = json.loads(PARSERS[name].example)
    at = document
    while isinstance(at, dict | list) and at:
        step = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if not isinstance(at[step], dict | list) or not at[step] or data.draw(st.booleans()):
            at[step] = value
            break
        at = at[step]
    try:
        written = canonical_json(document)
    except InvalidDocument:
        return
    read(PARSERS[name], written)
