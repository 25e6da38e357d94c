"""The words that people see and type: suggestions for typos, forms of numbers, errors as JSON, completion, stats."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from nxpipe.artifact_store import Store, open_store
from nxpipe.pipeline.build.cache import BuildLog
from nxpipe.pipeline.cli.param_types import Amount, Bytes, Count, DurationType, Share
from nxpipe.pipeline.util.exit_codes import CONFIGURATION, MODEL, NOT_FOUND, OK, REFUSED, TABLE, USAGE
from nxpipe.pipeline.util.text import nearest
from tests.pipeline.conftest import BERT, write_model
from tests.pipeline.in_process import InProcess, nxpipe
from tests.pipeline.predicted import name_of, publish

__all__ = ["nxpipe"]

PROJECT = """
[project]
name = "search"
region = "us-east-2"
[store]
url = "file://store"
[[models]]
name = "sentiment"
path = "sentiment"
task = "feature-extraction"
target = "inf2.xlarge"
buckets = [16]
weights = "random:0"
[[fleets]]
kind = "serving"
name = "search"
model = "sentiment"
channel = "production"
instance_types = ["inf2.xlarge"]
capacity = { kind = "on-demand" }
size = { min = 1, desired = 2, max = 4 }
rehearsal = true
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a model, a fleet, two artifacts and two channels. No test changes it."""
    from nxpipe.artifact_store.channel.change import Author, Requirements, promote

    folder = tmp_path_factory.mktemp("words")
    write_model(folder / "sentiment", dict(BERT))
    (folder / "net.pt").write_bytes(b"PK\3\4")
    (folder / "nxpipe.toml").write_text(PROJECT)
    store = open_store(str(folder / "store"))
    served = publish(store, "one", {16: 1.0, 128: 2.0}, model="sentiment")
    other = publish(store, "two", {16: 1.0}, model="acme/tiny-bert")
    for channel, artifact in (("production", served), ("staging", other)):
        promote(store, channel, [artifact], Author("ann", "first"), Requirements(check_evidence=lambda *_: {}))
    return folder


@pytest.fixture
def here(world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(world)
    return world


PLAN = "plan serve --model-id meta-llama/Llama-3.1-8B --rate 5"
CHECK = "check --model-id ./sentiment"

# What people type, and the words that the answer must have.
MISTAKES = [
    # instances and targets
    (f"{CHECK} --target trn2", "choose trn2.48xlarge or trn2u.48xlarge"),
    (f"{CHECK} --target inf2", "choose inf2.xlarge"),
    (f"{CHECK} --target Inferentia2", "choose inf2.xlarge"),
    (f"{CHECK} --target trainium2", "choose trn2.48xlarge"),
    (f"{CHECK} --target inf2.larg", "did you mean inf2.xlarge"),
    (f"{CHECK} --target inf2.8x", "did you mean inf2.8xlarge?"),
    (f"{CHECK} --target trn1.32xl", "did you mean trn1.32xlarge?"),
    (f"{CHECK} --target g5.xlarge", "'g5.xlarge' is no Neuron instance"),
    (f"{PLAN} --instance inf2.xlage", "did you mean 'inf2.xlarge'?"),
    (f"{PLAN} --instance trn22", "did you mean 'trn2'?"),
    (f"{PLAN} --gpu g5.xlarg", "did you mean 'g5.xlarge'?"),
    (f"{PLAN} --region us-eats-2", "did you mean 'us-east-2'?"),
    (f"{PLAN} --region useast1", "did you mean 'us-east-1'?"),
    ("prices ls inf2.xlarg", "did you mean 'inf2.xlarge'?"),
    # tasks and phases
    (f"{CHECK} --task text-classificaton", "did you mean 'text-classification'?"),
    (f"{CHECK} --task text_generation", "did you mean 'text-generation'?"),
    (f"{CHECK} --task sentiment-analysis", "did you mean 'text-classification'?"),
    (f"{CHECK} --task embeddings", "did you mean 'feature-extraction'?"),
    (f"{CHECK} --task summarization", "did you mean 'text2text-generation'?"),
    (f"{CHECK} --task asr", "did you mean 'automatic-speech-recognition'?"),
    (f"{CHECK} --phases forwrd", "did you mean 'forward'?"),
    (f"{CHECK} --phases prefil,decode", "did you mean 'prefill'?"),
    # channels
    ("channel show prod", "did you mean 'production'?"),
    ("channel log prodution", "did you mean 'production'?"),
    ("store fetch --channel stagin --to out", "did you mean 'staging'?"),
    ("bench sentiment@{key} --against prodction", "did you mean 'production'?"),
    ("diff production stagng", "did you mean 'staging'?"),
    # artifacts, programs, models
    ("store show sentimnt", "did you mean sentiment@"),
    ("store fetch tiny-bert --to out", "did you mean acme/tiny-bert@"),
    ("store sign sentimet --key file:none", "none"),
    ("store report sentimet", "did you mean sentiment@"),
    ("store pin sentimet --as release", "did you mean sentiment@"),
    ("store export sentimet --to out.tar", "did you mean sentiment@"),
    ("promote sentimet --channel production", "did you mean sentiment@"),
    ("prove sentimet", "did you mean sentiment@"),
    ("dis sentiment --program forward-b1-s61", "did you mean 'forward-b1-s16'?"),
    ("build --only sentimet", "did you mean 'sentiment'?"),
    ("check --only Sentimet", "did you mean 'sentiment'?"),
    ("check --model-id ./sentimet", "did you mean 'sentiment'?"),
    ("check --model-id sentimet", "did you mean './sentiment'?"),
    ("check --model-id net.pt", "net.pt is a pickle, which nxpipe never loads"),
    ("check --model-id sentiment/config.json", "pass its folder: sentiment"),
    # fleets
    ("rollout status serch", "did you mean 'search'?"),
    ("rollout start saerch sentiment", "did you mean 'search'?"),
    ("cost --fleet searhc", "did you mean 'search'?"),
    # options and their values
    (f"{PLAN} --runtime vllm-neurn", "did you mean 'vllm-neuron'?"),
    (f"{PLAN} --purchase on-demnd", "did you mean 'on-demand'?"),
    (f"{PLAN} --arrivals poison", "did you mean 'poisson'?"),
    (f"{CHECK} --autocast matmul", "did you mean 'matmult'?"),
    ("build --executor ry", "did you mean 'ray'?"),
    ("build --backend neuron", "did you mean 'neuronx'?"),
    ("run sentiment --mode iso", "did you mean 'isa'?"),
    ("prove sentiment --device nrtp", "did you mean 'nrtpy'?"),
    ("store fetch sentiment --to out --programs emulater", "did you mean 'emulator'?"),
    ("monitor --to prometeus", "did you mean 'prometheus'?"),
    ("release --skip verfy", "did you mean 'verify'?"),
    ("build --modle-id x", "Did you mean '--model-id'?"),
    ("store ls --modle x", "Did you mean '--model'?"),
    ("store verify-signature sentiment --key file:k.pub", "did you mean '--public-key'?"),
    # commands, also the words of other tools
    ("biuld", "did you mean 'nxpipe build'?"),
    ("compile", "did you mean 'nxpipe build'?"),
    ("chekc", "did you mean 'nxpipe check'?"),
    ("gc", "did you mean 'nxpipe store gc'?"),
    ("sign", "did you mean 'nxpipe store sign'?"),
    ("log", "did you mean 'nxpipe channel log'?"),
    ("pull", "did you mean 'nxpipe store fetch'?"),
    ("list", "did you mean 'nxpipe store ls'?"),
    ("chat", "did you mean 'nxpipe generate'?"),
    ("deploy", "did you mean 'nxpipe rollout start'?"),
    ("lnit", "did you mean 'nxpipe init'?"),
    ("store fecth", "did you mean 'fetch'?"),
    ("config chekc", "did you mean 'check'?"),
    ("rollout stauts", "did you mean 'status'?"),
    ("infra lint cdk.ot", "cdk.ot"),
    ("infra plan", "no synthesized templates yet; run: npx cdk synth --quiet"),
    # numbers
    ("rollout plan --rps lots --base-error 5%", "'lots' is not a number, as in 20, 2.5, 20k or 1M"),
    ("rollout plan --rps 1k --base-error 5", "'5' is above 100%; write 5% or 0.05"),
    ("bench --threshold 5", "'5' could be 5% or 500%"),
    ("store gc --max-age 30", "'30' is not a duration, as in 500ms, 2s, 5m, 1h or 30d"),
    ("store gc --budget 16", "'16' is not a size, as in 500MiB, 16GiB or 16GB"),
    ("store gc --keep 1.5", "'1.5' is not a whole number, as in 20, 20k or 1M"),
    (f"{PLAN} --ttft soon", "as in 500ms, 1.5s or 500ms@p99"),
    ("build --tp 0 --model-id ./sentiment", "1"),
]
CODES = {USAGE.number, NOT_FOUND.number, MODEL.number, REFUSED.number, 25}


def test_sixty_mistakes_are_in_the_list() -> None:
    assert len({line for line, _ in MISTAKES}) == len(MISTAKES) >= 60


@pytest.mark.parametrize(("line", "expected"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_gets_the_right_suggestion_in_one_sentence(
    nxpipe: InProcess, here: Path, line: str, expected: str
) -> None:
    key = open_store("store").resolve("sentiment").request_key
    answer = nxpipe(*line.format(key=key).split())
    message = answer.err + answer.out  # the findings of check are its result
    assert expected in message
    assert answer.code in CODES
    assert "internal error" not in message
    assert "Traceback" not in message


def test_a_misspelt_channel_is_no_baseline_and_allow_empty_warns_of_it(nxpipe: InProcess, here: Path) -> None:
    words = ("bench", "sentiment@" + open_store("store").resolve("sentiment").request_key, "--against", "prodction")
    assert nxpipe(*words).code == NOT_FOUND.number
    allowed = nxpipe(*words, "--allow-empty")
    assert allowed.code == OK.number
    assert "Warning: prodction has no generation, so nothing is compared; did you mean 'production'?" in allowed.err


def test_a_new_channel_with_nearly_the_name_of_another_is_noted(
    nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store(str(tmp_path / ".nxpipe" / "store"))
    name = name_of(publish(store, "one", {16: 1.0}))
    assert "is new" not in nxpipe("promote", name, "--channel", "production").err
    assert (
        "channel prodction is new; did you mean 'production'?" in nxpipe("promote", name, "--channel", "prodction").err
    )


@pytest.mark.parametrize(
    ("typed", "known", "meant"),
    [
        ("prod", ["production", "staging"], "production"),
        ("prodction", ["production", "profile"], "production"),
        ("pr", ["production", "profile"], None),
        ("BF16", ["bf16", "fp16"], "bf16"),
        ("text_classification", ["text-classification"], "text-classification"),
        ("x", ["xla"], None),
    ],
)
def test_the_nearest_word(typed: str, known: list[str], meant: str | None) -> None:
    assert nearest(typed, known) == meant


# Candidates


def test_an_ambiguous_name_lists_dates_and_channels_the_newest_first(
    nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store(str(tmp_path / ".nxpipe" / "store"))
    first, second = publish(store, "one", {16: 1.0}), publish(store, "two", {16: 1.0})
    assert nxpipe("promote", name_of(first), "--channel", "production").code == OK.number
    answer = nxpipe("store", "show", "acme/tiny-bert")
    day = first.record.published_at[:10]
    assert answer.code == NOT_FOUND.number
    assert f"{name_of(first)} for inf2 ({day}" in answer.err
    assert ", on production)" in answer.err
    assert name_of(second) in answer.err


# Numbers


def converted(type_: click.ParamType[Any], text: str) -> object:
    return type_.convert(text, None, None)


@pytest.mark.parametrize(
    ("type_", "text", "value"),
    [
        (Share(), "5%", 0.05),
        (Share(), "0.05", 0.05),
        (Share(), "99.9 %", 0.999),
        (Share(100.0), "150%", 1.5),
        (Count(), "20", 20),
        (Count(), "1k", 1000),
        (Count(), "20k", 20_000),
        (Count(), "1M", 1_000_000),
        (Count(), "20,000", 20_000),
        (Count(), "2Ki", 2048),
        (Amount(), "1.5k", 1500.0),
        (Amount(), "7B", 7e9),
        (Bytes(), "16GiB", 16 << 30),
        (Bytes(), "16Gi", 16 << 30),
        (Bytes(), "16GB", 16_000_000_000),
        (Bytes(), "16gb", 16_000_000_000),
        (Bytes(), "500MiB", 500 << 20),
        (Bytes(), "1.5GiB", 3 << 29),
        (DurationType(), "500ms", 0.5),
        (DurationType(), "2s", 2.0),
        (DurationType(), "5m", 300.0),
        (DurationType(), "5min", 300.0),
        (DurationType(), "1h30m", 5400.0),
        (DurationType(), "30d", 2_592_000.0),
        (DurationType(unit="s"), "90", 90.0),
        (DurationType(unit="d"), "36h", 1.5),
        (DurationType(zero=True), "0", 0.0),
    ],
)
def test_numbers_are_accepted_in_the_forms_that_people_type(
    type_: click.ParamType[Any], text: str, value: float
) -> None:
    assert converted(type_, text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("type_", "text", "expected"),
    [
        (Share(), "5", "write 5% or 0.05"),
        (Share(100.0), "1", "could be 1% or 100%"),
        (Share(), "-1%", "as in 5% or 0.05"),
        (Share(), "101%", "at most 100%"),
        (Share(zero=False), "0%", "above 0"),
        (Count(), "1.5", "whole number"),
        (Count(1, 8), "9", "at least 1 and at most 8"),
        (Count(), "1m", "as in 20, 20k or 1M"),
        (Bytes(), "16", "as in 500MiB, 16GiB or 16GB"),
        (Bytes(), "-1GiB", "as in"),
        (DurationType(), "5", "as in 500ms, 2s, 5m, 1h or 30d"),
        (DurationType(), "0s", "as in"),
        (DurationType(unit="s"), "soon", "or a number of seconds"),
        (DurationType(0.1, 3600), "2h", "at most 1h"),
    ],
)
def test_the_error_of_a_number_names_the_accepted_forms(type_: click.ParamType[Any], text: str, expected: str) -> None:
    with pytest.raises(click.BadParameter) as refused:
        converted(type_, text)
    assert expected in refused.value.message


# Errors as JSON


@pytest.mark.parametrize(
    ("line", "row"),
    [
        ("store show nothing-like-it --json", NOT_FOUND),
        ("--json nope", USAGE),
        ("build --nope --json", USAGE),  # click stops before --json
        ("bench sentiment --threshold 5 --json", USAGE),
        ("store gc --keep x --json", USAGE),
        ("config check --config broken.toml --json", CONFIGURATION),
    ],
)
def test_with_json_an_error_is_one_document_on_stderr(
    nxpipe: InProcess, here: Path, tmp_path: Path, line: str, row: object
) -> None:
    (tmp_path / "broken.toml").write_text('[project]\nname = "search"\nregin = "x"\nnmae = 1\n')
    answer = nxpipe(*line.replace("broken.toml", str(tmp_path / "broken.toml")).split())
    if row is CONFIGURATION and answer.out:
        pytest.skip("the faults are the result of config check")
    error = json.loads(answer.err)["error"]
    assert answer.out == ""
    assert answer.code == error["exit_code"]
    assert row == next(each for each in TABLE if each.number == answer.code)
    assert error["name"] == next(each.name for each in TABLE if each.number == answer.code)
    assert error["message"]
    assert error["hint"]


def test_faults_of_a_configuration_are_details_of_the_error(
    nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nxpipe.toml").write_text('[project]\nname = "search"\nregin = "x"\nnmae = 1\n')
    error = json.loads(nxpipe("build", "--json").err)["error"]
    assert error["name"] == "configuration"
    assert len([error["message"], *error["details"]]) == 2
    assert "region" in error["message"]


# Keys


def test_a_public_key_is_written_like_a_signing_key(
    nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = name_of(publish(open_store(str(tmp_path / ".nxpipe" / "store")), "one", {16: 1.0}))
    assert nxpipe("store", "keygen", "release.key").code == OK.number
    assert nxpipe("store", "sign", name, "--key", "file:release.key").code == OK.number
    for form in ("file:release.key.pub", "release.key.pub"):
        assert nxpipe("store", "verify-signature", name, "--public-key", form).code == OK.number


# Summaries


def test_summaries_say_what_a_change_replaced_and_why_gc_keeps(
    nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store(str(tmp_path / ".nxpipe" / "store"))
    old, new, idle = (publish(store, note, {16: 1.0}) for note in ("one", "two", "three"))
    nxpipe("promote", name_of(old), "--channel", "production")
    promoted = nxpipe("promote", name_of(new), "--channel", "production")
    assert "from generation 1 to generation 2" in promoted.err
    assert f"acme/tiny-bert for inf2: {old.request_key[:12]} -> {new.request_key[:12]}" in promoted.err
    moved = nxpipe("promote", name_of(old), "--channel", "production", "--expect", "1")
    assert moved.code == REFUSED.number
    assert "channel production has moved: it is at generation 2, not 1 (" in moved.err
    rolled = nxpipe("rollback", "--channel", "production")
    assert "from generation 2 to generation 3, which restores generation 1" in rolled.err
    _age(tmp_path / ".nxpipe" / "store" / "ac" / idle.request_key)
    kept = nxpipe("store", "gc", "--dry-run").err
    assert "Nothing to collect in" in kept
    assert "3 artifacts are kept (2 served by production lately, 1 no retention rule)" in kept
    nxpipe("store", "pin", name_of(idle), "--as", "audit")
    document = json.loads(nxpipe("store", "gc", "--keep", "1", "--dry-run", "--json").out)
    assert {entry["reason"] for entry in document["kept"]} == {"served by production lately", "pinned by audit"}


def _age(path: Path) -> None:
    moment = path.stat().st_mtime - 10 * 86400
    os.utime(path, (moment, moment))


# Statistics


def logged(store: Store, artifact: str, hits: list[str], built: dict[str, float], at: str, model: str) -> None:
    entry = {"at": at, "store": store.url, "artifact": artifact, "model": model, "target": "inf2.xlarge"}
    BuildLog.of_user().note([entry | {"hits": {key: f"program-{key}" for key in hits}, "built": built}])


def test_stats_sum_hits_misses_and_the_time_that_hits_saved(
    nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "No builds are recorded yet" in nxpipe("stats").err
    store = open_store(str(tmp_path / "store"))
    shared = publish(store, "one", {16: 1.0})
    cells = [
        {"key": key, "program": f"program-{name}", "seconds": seconds, "became": "built"}
        for key, name, seconds in (("c", "c", 5.0), ("of another version", "d", 2.0))
    ]
    report = {"artifacts": [{"key": shared.request_key, "cells": cells}]}
    from nxpipe.artifact_store.builds import store_report
    from nxpipe.artifact_store.documents import written_now

    store_report(store, shared.manifest_digest, written_now(), html=b"", json=json.dumps(report).encode())
    logged(store, "0" * 64, [], {"a": 10.0, "b": 20.0}, "2026-11-20T10:00:00Z", "bert")
    logged(store, "0" * 64, ["a", "b"], {}, "2026-11-27T10:00:00Z", "bert")
    logged(store, shared.request_key, ["c", "d", "unknown"], {}, "2026-11-27T11:00:00Z", "llama")  # a colleague built c
    document = json.loads(nxpipe("stats", "--json").out)
    assert document["total"] == {
        "name": "total",
        "builds": 3,
        "hits": 5,
        "misses": 2,
        "hit_rate": 0.7143,
        "seconds_spent": 30.0,
        "seconds_saved": 37.0,
        "hits_without_time": 1,
    }
    assert [(week["name"], week["hits"]) for week in document["weeks"]] == [("2026-W47", 0), ("2026-W48", 5)]
    text = nxpipe("stats").out
    assert "bert on inf2.xlarge" in text
    assert "5 of 7 programs came from the cache (71%)" in text
    assert json.loads(nxpipe("stats", "--json", "--store", "other").out)["total"]["builds"] == 0
    assert json.loads(nxpipe("stats", "--json", "--store", "store").out)["total"]["builds"] == 3


def test_a_damaged_line_of_the_log_of_builds_is_left_out(nxpipe: InProcess, tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    logged(store, "0" * 64, [], {"a": 1.0}, "2026-11-20T10:00:00Z", "bert")
    path = Path(os.environ["XDG_STATE_HOME"]) / "nxpipe" / "builds.jsonl"
    with path.open("ab") as file:
        file.write(b'{"format":"nxpipe.build/1","hits":3}\n{"format":"nxpipe.build/1","at":"2026')
    logged(store, "0" * 64, ["a"], {}, "2026-11-20T11:00:00Z", "bert")  # its line is cut short with the one before
    logged(store, "0" * 64, ["a"], {}, "2026-11-20T12:00:00Z", "bert")
    total = json.loads(nxpipe("stats", "--json").out)["total"]
    assert (total["builds"], total["hits"], total["misses"], total["seconds_saved"]) == (2, 1, 1, 1.0)


# Completion


@pytest.fixture
def complete(nxpipe: InProcess, here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], set[str]]:
    def words(line: str) -> set[str]:
        monkeypatch.setenv("_NXPIPE_COMPLETE", "bash_complete")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - (0 if line.endswith(" ") else 1)))
        answer = nxpipe()
        assert answer.err == ""
        return {each.partition(",")[2] for each in answer.out.splitlines() if each}

    return words


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("nxpipe store show sen", {"sentiment", "sentiment@"}),
        ("nxpipe store fetch acme", {"acme/tiny-bert", "acme/tiny-bert@"}),
        ("nxpipe promote sentiment --channel p", {"production"}),
        ("nxpipe channel log ", {"production", "staging"}),
        ("nxpipe bench --against st", {"staging"}),
        ("nxpipe build --only s", {"sentiment"}),
        ("nxpipe dis sentiment --program f", {"forward-b1-s16", "forward-b1-s128"}),
        ("nxpipe check --phases prefill,d", {"prefill,decode"}),
        ("nxpipe check --task fi", {"fill-mask"}),
        ("nxpipe check --target inf2.x", {"inf2.xlarge"}),
        ("nxpipe rollout status se", {"search"}),
        ("nxpipe plan serve --region us-east", {"us-east-1", "us-east-2"}),
        ("nxpipe plan serve --runtime v", {"vllm-neuron"}),
        ("nxpipe store export nothing", set()),
        ("nxpipe nonsense x", set()),
        ("nxpipe build --only ", {"sentiment"}),
    ],
)
def test_names_are_completed(complete: Callable[[str], set[str]], line: str, found: set[str]) -> None:
    words = complete(line)
    assert {word.partition("@")[0] + ("@" if "@" in word else "") for word in words} == found


def test_a_completion_is_silent_whatever_the_folder_holds(
    complete: Callable[[str], set[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert complete("nxpipe store show ") == set()
    (tmp_path / "nxpipe.toml").write_text("[store\n")
    assert complete("nxpipe store show ") == set()
    (tmp_path / "nxpipe.toml").write_text('[store]\nurl = "s3://bucket/prefix"\n')
    assert complete("nxpipe promote --channel p") == set()
    (tmp_path / "nxpipe.toml").write_text("models = 3\nfleets = [1]\n")
    assert complete("nxpipe build --only ") == set()
    assert complete("nxpipe rollout status ") == set()


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_complete_the_same_names(
    nxpipe: InProcess, here: Path, monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    monkeypatch.setenv("_NXPIPE_COMPLETE", f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", "nxpipe build --only")
    monkeypatch.setenv("COMP_CWORD", "s" if shell == "fish" else "3")
    answer = nxpipe()
    assert answer.err == ""
    assert "sentiment" in answer.out


def test_a_fetch_says_which_generation_of_the_channel_it_brought(
    nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = name_of(publish(open_store(str(tmp_path / ".nxpipe" / "store")), "one", {16: 1.0}))
    nxpipe("promote", name, "--channel", "production")
    fetched = nxpipe("store", "fetch", "--channel", "production", "--to", "served")
    assert f"{name} for inf2, which production serves in generation 1: wrote " in fetched.err
    assert "up to date" in nxpipe("store", "fetch", "--channel", "production", "--to", "served").err


# Inputs


def test_a_text_is_read_by_the_tokenizer_in_the_artifact(tmp_path: Path) -> None:
    from nxpipe.pipeline.models.source import PretrainedModel
    from nxpipe.pipeline.verify.stored_artifact import StoredArtifact

    source = PretrainedModel("sentiment", None, dict(BERT), "feature-extraction", None)
    files = {"tokenizer.json": b"{}", "config.json": b"{}"}
    made = StoredArtifact(manifest=None, source=source, weights={}, programs=(), companions=files)  # type: ignore[arg-type]
    with made.source_with_tokenizer() as read:
        assert read is not None
        assert read.folder is not None
        folder = read.folder
        assert {each.name: each.read_bytes() for each in folder.iterdir()} == files
    assert not folder.exists()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((3, 16), "has batch 3, and this program was compiled for batch 1; build with --batches 3, or pass 1 row"),
        ((1, 20), "has 20 tokens, and this program was compiled for a bucket of 16; pad it to 16"),
        ((16,), "is int64 [16], but the program takes int64 [1, 16]"),
    ],
)
def test_an_input_of_another_size_says_how_to_build_for_it(shape: tuple[int, ...], expected: str) -> None:
    import numpy as np

    from nxpipe.emulator.errors import InputsInvalid
    from nxpipe.emulator.ir.types import DType, TensorType
    from nxpipe.emulator.run.inputs import _require_type

    with pytest.raises(InputsInvalid) as refused:
        _require_type("input_ids", TensorType((1, 16), DType("int64")), np.ones(shape, np.int64))
    assert expected in str(refused.value)
