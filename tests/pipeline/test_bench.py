"""`nxpipe bench`: predicted durations of programs, compared with those of a channel's artifacts."""

import json
from pathlib import Path
from typing import Any

import pytest

from nxpipe.artifact_store import Published, Store, open_store
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.models.spec import specs_of_config
from nxpipe.pipeline.util.exit_codes import NOT_FOUND, OK, REFUSED, REGRESSION, USAGE
from tests.pipeline.conftest import BERT, write_model
from tests.pipeline.in_process import InProcess, nxpipe
from tests.pipeline.predicted import name_of, publish
from tests.pipeline.test_channel_commands import SIGNED

__all__ = ["nxpipe"]

PROJECT = '[project]\nname = "search"\n[store]\nurl = "file://store"\n'
DESCRIBED = """
[[models]]
name = "bert"
path = "models/tiny-bert"
task = "feature-extraction"
target = "inf2.xlarge"
buckets = [16, 32]
weights = "random:0"
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nxpipe.toml").write_text(PROJECT)
    return tmp_path


@pytest.fixture
def store(here: Path) -> Store:
    return open_store(str(here / "store"))


def serve(nxpipe: InProcess, *artifacts: Published) -> None:
    assert nxpipe("promote", *map(name_of, artifacts), "--channel", "production").code == OK.number


def verdicts(nxpipe: InProcess, *words: str) -> dict[str, str]:
    rows: list[dict[str, Any]] = json.loads(nxpipe("bench", *words, "--json").out)
    return {row["program"]: row["verdict"] for row in rows}


def test_what_is_slower_by_more_than_the_threshold_is_a_regression(nxpipe: InProcess, store: Store) -> None:
    serve(nxpipe, publish(store, "before", {16: 1.0, 32: 2.0}))
    now = publish(store, "now", {16: 1.04, 32: 2.2})
    words = (name_of(now), "--against", "production")
    answer = nxpipe("bench", *words)
    assert answer.code == REGRESSION.number
    title, heading, *rows = answer.out.splitlines()
    assert title.split()[:2] == ["PROGRAM", "TP"]
    assert heading == name_of(now)
    assert [row.split() for row in rows] == [
        ["forward-b1-s16", "1", "1.040", "ms", "1.000", "ms", "+4.0%", "1.235", "ms", "not", "covered"],
        ["forward-b1-s32", "1", "2.200", "ms", "2.000", "ms", "+10.0%", "2.395", "ms", "not", "covered"],
    ]
    assert "1 program is predicted to be slower by more than 5%: forward-b1-s32" in answer.err
    assert "by 10.0%; `nxpipe diff" in answer.err
    assert nxpipe("bench", *words, "--threshold", "10%").code == OK.number
    assert nxpipe("bench", *words, "--threshold", "9.9%").code == REGRESSION.number
    assert verdicts(nxpipe, *words, "--threshold", "0") == dict.fromkeys(
        ("forward-b1-s16", "forward-b1-s32"), "regression"
    )


def test_only_the_same_program_of_the_same_model_and_target_is_compared(nxpipe: InProcess, store: Store) -> None:
    serve(
        nxpipe,
        publish(store, "before", {16: 1.0}),
        publish(store, "other model", {16: 0.1}, model="acme/llama"),
        publish(store, "other target", {16: 0.1}, target="trn2"),
    )
    same, wider = publish(store, "now", {16: 0.9, 32: 9.0}), publish(store, "tp", {16: 5.0}, degree=2)
    assert verdicts(nxpipe, name_of(same), "--against", "production") == {
        "forward-b1-s16": "within",
        "forward-b1-s32": "new",
    }
    assert verdicts(nxpipe, name_of(wider), "--against", "production") == {"forward-b1-s16": "new"}


def test_a_channel_that_serves_nothing_of_the_model_is_said_and_no_failure(nxpipe: InProcess, store: Store) -> None:
    now = publish(store, "now", {16: 1.0})
    answer = nxpipe("bench", name_of(now), "--against", "production", "--allow-empty")
    assert (answer.code, answer.err) == (
        OK.number,
        "channel production serves no acme/tiny-bert for inf2 yet\n",
    )
    serve(nxpipe, publish(store, "other", {16: 1.0}, model="acme/llama"))
    assert "serves no acme/tiny-bert" in nxpipe("bench", name_of(now), "--against", "production").err
    assert nxpipe("bench", name_of(now)).err == ""


def test_an_artifact_may_be_held_against_any_other(nxpipe: InProcess, store: Store) -> None:
    before, now = publish(store, "before", {16: 1.0}), publish(store, "now", {16: 2.0}, target="trn2")
    assert nxpipe("bench", name_of(now), "--against", name_of(before)).code == REGRESSION.number
    assert nxpipe("bench", name_of(now), "--against", before.request_key).code == REGRESSION.number
    assert nxpipe("bench", name_of(now), "--against", "acme/tiny-bert@ffffff").code == NOT_FOUND.number


@pytest.mark.parametrize(("then", "now"), [(None, 1.0), (1.0, None)])
def test_a_time_that_is_not_known_is_no_regression(
    nxpipe: InProcess, store: Store, then: float | None, now: float | None
) -> None:
    before = publish(store, "before", {16: then})
    after = publish(store, "now", {16: now})
    assert verdicts(nxpipe, name_of(after), "--against", name_of(before)) == {"forward-b1-s16": "unknown"}


def test_a_channel_that_nobody_should_believe_is_no_yardstick(nxpipe: InProcess, store: Store, here: Path) -> None:
    now = publish(store, "now", {16: 1.0})
    serve(nxpipe, now)
    assert nxpipe("store", "keygen", "release.key").code == OK.number
    (here / "nxpipe.toml").write_text(SIGNED)
    assert nxpipe("bench", name_of(now), "--against", "production").code == REFUSED.number


def test_the_models_of_the_configuration_are_those_that_a_build_has_made(
    nxpipe: InProcess, store: Store, here: Path
) -> None:
    write_model(here / "models" / "tiny-bert", dict(BERT))
    (here / "nxpipe.toml").write_text(PROJECT + DESCRIBED)
    missing = nxpipe("bench")
    assert missing.code == NOT_FOUND.number
    assert "run `nxpipe build --only bert`, or see the cause with `nxpipe explain bert`" in missing.err
    publish(store, "built", {16: 1.0, 32: 2.0}, model="tiny-bert", inputs=asked(here).key_inputs())
    for words in ((), ("bert",)):
        assert verdicts(nxpipe, *words) == {"forward-b1-s16": "alone", "forward-b1-s32": "alone"}


def asked(here: Path) -> BuildSpec:
    """The build specification of the only model."""
    config = load_config(here / "nxpipe.toml", {})
    (only,) = specs_of_config(config, (), here)
    return BuildSpec.of(only)


@pytest.mark.parametrize("threshold", ["-1%", "much", "nan", "inf", "5%%"])
def test_a_threshold_is_a_share(nxpipe: InProcess, threshold: str) -> None:
    answer = nxpipe("bench", "--threshold", threshold)
    assert answer.code == USAGE.number
    assert "is not a share, as in 5% or 0.05" in answer.err
