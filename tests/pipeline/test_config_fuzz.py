"""Any file is either a valid configuration or refused as one, without another error."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nxpipe.pipeline.config import Config, ConfigInvalid, load_config
from tests.conftest import ROOT
from tests.tiers import examples

GOOD = (ROOT / "nxpipe.toml").read_bytes()
_PIECES = (
    b"\n",
    b'"',
    b"'",
    b"[",
    b"]",
    b"[[",
    b"{",
    b"}",
    b"=",
    b".",
    b",",
    b"#",
    b"\\",
    b"\x00",
    b"\xff",
    b"nan",
    b"true",
)
_VALUES = (
    b"0",
    b"-1",
    b"1.5",
    b"true",
    b"nan",
    b'""',
    b'"x"',
    b"[]",
    b"{}",
    b"[[[]]]",
    b"2026-01-01",
    b"9" * 5000,
    b"0x" + b"f" * 999,
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "nxpipe.toml"


def outcome(path: Path, data: bytes) -> Config | ConfigInvalid:
    path.write_bytes(data)
    try:
        return load_config(path, {})
    except ConfigInvalid as refused:
        return refused


def assert_is_told_well(result: Config | ConfigInvalid, data: bytes) -> None:
    if isinstance(result, Config):
        return
    assert result.faults
    for fault in result.faults:
        assert fault.line is None or 1 <= fault.line <= data.count(b"\n") + 1
        assert "\n" not in str(fault), "a fault is one line"
        assert len(str(fault)) < 1500


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_and_never_crash(path: Path, data: bytes) -> None:
    assert_is_told_well(outcome(path, data), data)


@settings(max_examples=examples(300))
@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_a_damaged_configuration_is_refused_and_never_crashes(path: Path, chance: random.Random, times: int) -> None:
    data = GOOD
    for _ in range(times):
        start = chance.randrange(len(data) + 1)
        data = data[:start] + chance.choice(_PIECES) + data[start + chance.choice((0, 0, 1, 5)) :]
    assert_is_told_well(outcome(path, data), data)


@settings(max_examples=examples(300))
@given(st.randoms(use_true_random=False), st.integers(1, 5))
def test_any_value_in_any_place_is_taken_or_refused_on_its_own_line(
    path: Path, chance: random.Random, times: int
) -> None:
    lines = GOOD.split(b"\n")
    places = [number for number, line in enumerate(lines) if b" = " in line and not line.startswith(b"#")]
    for number in chance.sample(places, times):
        lines[number] = lines[number].split(b" = ")[0] + b" = " + chance.choice(_VALUES)
    data = b"\n".join(lines)
    assert_is_told_well(outcome(path, data), data)


@pytest.mark.parametrize("depth", [10, 100, 200, 250, 300, 350, 400, 450, 500, 1000, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ("{a=", "}")])
def test_no_depth_of_nesting_is_a_crash(path: Path, opening: str, closing: str, depth: int) -> None:
    data = f'[project]\nname = "x"\n[store]\nurl = {opening * depth}1{closing * depth}\n'.encode()
    result = outcome(path, data)
    assert isinstance(result, ConfigInvalid)
    assert_is_told_well(result, data)
