import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.artifact_store.canonical import MAX_DEPTH, MAX_INTEGER, canonical_json, parse_canonical_json
from nxpipe.artifact_store.errors import InvalidDocument
from tests.conftest import ROOT

LIMIT = 1 << 20
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-MAX_INTEGER, MAX_INTEGER)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT
)
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4))


def same(a: Any, b: Any) -> bool:
    """Equal, and of equal types all the way down: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) and (not isinstance(a, float) or math.copysign(1, a) == math.copysign(1, b))


@given(JSON)
def test_a_value_survives_its_canonical_bytes(value: object) -> None:
    assert same(parse_canonical_json(canonical_json(value), limit=LIMIT), value)


@given(JSON)
def test_any_json_reader_understands_canonical_bytes(value: object) -> None:
    assert same(json.loads(canonical_json(value)), value)


@given(st.dictionaries(TEXT, JSON), st.randoms())
def test_the_order_of_a_dictionary_does_not_show(value: dict[str, object], random: Any) -> None:
    items = list(value.items())
    random.shuffle(items)
    assert canonical_json(dict(items)) == canonical_json(value)


@given(JSON)
def test_there_is_no_second_spelling(value: object) -> None:
    """White space, escapes and key order that a lenient parser takes are refused."""
    for loose in (
        json.dumps(value, indent=1).encode(),
        json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode(),
        canonical_json(value) + b"\n",
    ):
        if loose != canonical_json(value):
            with pytest.raises(InvalidDocument):
                parse_canonical_json(loose, limit=LIMIT)


@given(st.binary())
def test_arbitrary_bytes_are_a_value_or_a_typed_error(data: bytes) -> None:
    try:
        value = parse_canonical_json(data, limit=LIMIT)
    except InvalidDocument:
        return
    assert canonical_json(value) == data


@pytest.mark.parametrize(
    "data",
    [
        b'{"a":1,"a":1}',
        b'{"a":{"b":1,"b":2}}',
        b'{"b":1,"a":2}',
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"1E5",
        b"1.50",
        b"01",
        b"-0",
        b"9007199254740992",
        b"1" * 5000,
        b'"\\u0041"',
        b'"\\/"',
        b'"\\ud800"',
        b"\xef\xbb\xbf1",
        b'"\xff"',
        b"",
        b" 1",
        b"1 ",
        b"[1,]",
        b"'a'",
        b"[" * 100_000,
        b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
    ],
    ids=lambda data: repr(data[:20]),
)
def test_bytes_that_are_not_canonical_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidDocument):
        parse_canonical_json(data, limit=LIMIT)


def endless() -> object:
    value: list[object] = []
    value.append(value)
    return value


UNSPEAKABLE: dict[str, object] = {
    "NaN": float("nan"),
    "infinity": float("inf"),
    "negative infinity": [float("-inf")],
    "a large integer": MAX_INTEGER + 1,
    "a small integer": -MAX_INTEGER - 1,
    "an integer too long to print": 10**5000,
    "a lone surrogate": "\ud800",
    "a lone surrogate as key": {"\udfff": 1},
    "a number as key": {1: "a"},
    "a key too long to print": {10**5000: "a"},
    "None as key": {None: "a"},
    "bytes": b"bytes",
    "a set": {1, 2},
    "an object": object(),
    "a list of itself": endless(),
}


@pytest.mark.parametrize("name", UNSPEAKABLE)
def test_values_without_a_portable_spelling_are_refused(name: str) -> None:
    with pytest.raises(InvalidDocument):
        canonical_json(UNSPEAKABLE[name])


def test_a_document_over_its_limit_is_refused_before_it_is_parsed() -> None:
    assert parse_canonical_json(b'"aaa"', limit=5) == "aaa"
    with pytest.raises(InvalidDocument, match="6 bytes, and at most 5"):
        parse_canonical_json(b'"aaaa"', limit=5)


def test_the_deepest_allowed_value_is_taken() -> None:
    data = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert canonical_json(parse_canonical_json(data, limit=LIMIT)) == data


def test_bytes_depend_on_neither_hash_seed_nor_locale_nor_time_zone() -> None:
    code = (
        "from nxpipe.artifact_store.canonical import canonical_json; import sys; "
        "value = {k: [1.1e-7, k] for k in {'\\xdf', 'a', 'Z', '\\u4e2d', '\\U0001f600', '\\uffff'}}; "
        "sys.stdout.buffer.write(canonical_json(value))"
    )
    answers = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **env}, capture_output=True, check=True
        ).stdout
        for env in (
            {"PYTHONHASHSEED": "0"},
            {"PYTHONHASHSEED": "1", "LC_ALL": "C", "PYTHONUTF8": "0"},
            {"PYTHONHASHSEED": "2", "TZ": "Asia/Tokyo", "LC_ALL": "C.UTF-8"},
        )
    }
    assert len(answers) == 1
    # By code point, so U+FFFF before U+1F600; UTF-16 order would have it the other way round.
    (answer,) = answers
    assert list(json.loads(answer)) == ["Z", "a", "ß", "中", "\uffff", "\U0001f600"]
