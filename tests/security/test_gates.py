"""The gate that judges figures (attempts R01 to R102): what [verify] of whoever promotes forbids is not served, under
whichever thresholds it was built, and whatever its evidence claims. And what a workflow's inputs can do to its scripts.
"""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from nxpipe.artifact_store import Store, open_store
from nxpipe.artifact_store.backends.protocol import Payload
from nxpipe.artifact_store.canonical import canonical_json, sha256_hex
from nxpipe.artifact_store.channel.log import ChannelLog
from nxpipe.artifact_store.evidence import Evidence
from nxpipe.pipeline.util.exit_codes import CORRUPT, OK, REFUSED, USAGE, VERIFICATION
from tests.conftest import ROOT
from tests.pipeline.command import nxpipe as installed
from tests.pipeline.conftest import BERT, write_model
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]

# Nearer than bfloat16 comes to float32.
CONFIG: Final = """
[project]
name = "demo"
region = "us-east-2"
[store]
url = "file://store"
[verify]
min_cosine = 0.9999999
[[models]]
name = "tiny"
path = "models/tiny"
task = "feature-extraction"
target = "inf2.xlarge"
buckets = [8]
weights = "random:0"
"""
SIGNED: Final = """
[[fleets]]
kind = "serving"
name = "live"
model = "tiny"
channel = "production"
instance_types = ["inf2.xlarge"]
capacity = { kind = "on-demand" }
size = { min = 1, max = 2 }
rehearsal = true
[signing]
key = "file:release.key"
require = ["production"]
"""
LAX: Final = {"NXPIPE_VERIFY_MIN_COSINE": "0.5", "NXPIPE_VERIFY_MAX_RELATIVE_ERROR": "1.0"}
BEYOND: Final = "pooler_output cosine 0.99999"

attempt = pytest.mark.attempt


@pytest.fixture(scope="module")
def lax(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose [verify] refuses its own build: the thresholds came from the builder's environment."""
    folder = tmp_path_factory.mktemp("lax")
    write_model(folder / "models" / "tiny", BERT | {"num_hidden_layers": 1})
    (folder / "nxpipe.toml").write_text(CONFIG)
    done = installed("build", cwd=folder, **LAX)
    assert done.code == OK.number, done.err
    return folder


@pytest.fixture
def here(lax: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(lax, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    return tmp_path / "project"


def the_store() -> Store:
    return open_store("store")


def served(channel: str) -> object:
    return ChannelLog(the_store().backend, channel).tip()


def evidence() -> Evidence:
    (one,) = the_store().list()
    (found,) = the_store().evidence(one.manifest_digest)
    return found


@pytest.mark.sample(4, "laxer thresholds")
@attempt("R01")
def test_thresholds_of_a_builders_own_environment_are_theirs_and_are_told(here: Path, nxpipe: InProcess) -> None:
    """Built by the fixture. What they were is in the evidence; the artifact is the same under any."""
    assert evidence().limits.min_cosine == 0.5
    assert "limits: min_cosine 0.5" in nxpipe("store", "show", "tiny").out


COMMANDS: Final = (
    pytest.param(("build",), VERIFICATION, id="build", marks=attempt("R02")),
    pytest.param(("build", "--dry-run"), VERIFICATION, id="build, dry run", marks=attempt("R02")),
    pytest.param(("promote", "tiny", "--channel", "production"), REFUSED, id="promote", marks=attempt("R03")),
    pytest.param(
        ("release", "--channel", "production", "--skip", "check", "--skip", "verify"),
        VERIFICATION,
        id="release without check and verify",
    ),
    pytest.param(
        ("release", "--channel", "production", "--skip", "build", "--skip", "check", "--skip", "verify"),
        REFUSED,
        id="release of what is there, without verify",
        marks=attempt("R04"),
    ),
    pytest.param(
        ("release", "--to", "production", "--skip", "check"), VERIFICATION, id="release", marks=attempt("R05")
    ),
)


@pytest.mark.sample(4, "laxer thresholds")
@pytest.mark.parametrize(("words", "code"), COMMANDS)
def test_what_was_built_under_laxer_thresholds_is_not_taken(
    here: Path, nxpipe: InProcess, words: tuple[str, ...], code: Any
) -> None:
    answer = nxpipe(*words)
    assert (answer.code, BEYOND in answer.out + answer.err) == (code.number, True), answer.err
    assert "< min_cosine 0.9999999" in answer.out + answer.err
    assert served("production") is None


@pytest.mark.sample(4, "laxer thresholds")
@attempt("R02")
def test_under_the_thresholds_that_it_keeps_it_is_found_and_served(
    here: Path, nxpipe: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in LAX.items():
        monkeypatch.setenv(name, value)
    assert nxpipe("build").out.startswith("cached")
    assert nxpipe("promote", "tiny", "--channel", "production").code == OK.number


@pytest.mark.sample(4, "laxer thresholds")
@attempt("R02")
def test_evidence_that_was_committed_and_not_published_is_looked_at_too(here: Path, nxpipe: InProcess) -> None:
    (one,) = the_store().list()
    for path in (f"store/ac/{one.request_key}", f"store/{evidence().path}"):
        Path(path).unlink()
    answer = nxpipe("build")
    assert (answer.code, BEYOND in answer.err) == (VERIFICATION.number, True), answer.err
    assert not the_store().list()


def _lie(**figures: object) -> Callable[[dict[str, Any]], object]:
    return lambda value: [row.update(figures) for program in value["programs"] for row in program["outputs"]]


LIES: Final[dict[str, tuple[Callable[[dict[str, Any]], object], Any, str]]] = {
    "R06 words": (lambda value: value.update(programs={"forward-b1-s8": "trust me"}), CORRUPT, "is corrupt: programs"),
    "R06 words for a program": (lambda value: value.update(programs=["trust me"]), CORRUPT, "is corrupt: programs.0"),
    "R06 words for a figure": (_lie(cosine="trust me"), CORRUPT, "cosine: Input should be a valid number"),
    "R06 no outputs": (lambda value: value["programs"][0].update(outputs=[]), CORRUPT, "outputs"),
    "R06 an output left out": (lambda value: value["programs"][0]["outputs"].pop(), REFUSED, "does not cover"),
    "R06 another program": (lambda value: value["programs"][0].update(program="x"), REFUSED, "does not cover program"),
    "R06 another kind": (lambda value: value.update(kind="device"), REFUSED, "has no evidence of kind emulated"),
    "R06b a cosine of -1": (_lie(cosine=-1.0), REFUSED, "cosine -1.0000000 < min_cosine 0.9999999"),
    "R06b a large error": (
        _lie(cosine=1.0, max_relative=1e9),
        REFUSED,
        "relative error 1e+09 > max_relative_error 0.05",
    ),
}


@pytest.mark.sample(4, "laxer thresholds")
@pytest.mark.parametrize(
    "lie", [pytest.param(name, marks=attempt("R06b" if "R06b" in name else "R06")) for name in LIES]
)
@pytest.mark.parametrize(
    "words",
    [
        ("promote", "tiny", "--channel", "production"),
        ("release", "--to", "production", "--skip", "build", "--skip", "check", "--skip", "verify"),
    ],
    ids=["promote", "release"],
)
def test_what_evidence_claims_is_parsed_and_judged(
    here: Path, nxpipe: InProcess, lie: str, words: tuple[str, ...]
) -> None:
    change, code, sentence = LIES[lie]
    store, found = the_store(), evidence()
    value = json.loads(json.dumps(found.model_dump()))
    change(value)
    digest = sha256_hex(canonical_json(value))
    (here / "store" / found.path).unlink()
    sealed = Payload.of(canonical_json(value | {"seal": digest}))
    store.backend.replace(f"evidence/{found.manifest}/{digest}", sealed)
    answer = nxpipe(*words)
    assert (answer.code, sentence in answer.out + answer.err) == (code.number, True), answer.err
    assert served("production") is None


@pytest.mark.sample(4, "laxer thresholds")
@attempt("R06")
@pytest.mark.parametrize("figure", ["NaN", "Infinity", "1e999"])
def test_a_figure_that_is_no_number_is_refused(here: Path, nxpipe: InProcess, figure: str) -> None:
    found = evidence()
    path = here / "store" / found.path
    cosine = found.programs[0].outputs[0].cosine
    path.chmod(0o600)
    path.write_bytes(path.read_bytes().replace(f'"cosine":{cosine}'.encode(), f'"cosine":{figure}'.encode()))
    assert nxpipe("promote", "tiny", "--channel", "production").code == CORRUPT.number
    assert served("production") is None


@pytest.mark.sample(4, "laxer thresholds")
@attempt("R06")
def test_what_was_never_verified_is_not_served_and_a_build_verifies_it(
    here: Path, nxpipe: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    (before,) = the_store().list()
    (here / "store" / evidence().path).unlink()
    for name, value in LAX.items():
        monkeypatch.setenv(name, value)
    answer = nxpipe("promote", "tiny", "--channel", "production")
    assert (answer.code, "it has no evidence of a verification" in answer.err) == (REFUSED.number, True)
    assert nxpipe("build", "--no-verify").out.startswith("cached")
    assert nxpipe("build").code == OK.number
    (after,) = the_store().list()
    assert after == before
    assert evidence().manifest == after.manifest_digest
    assert nxpipe("promote", "tiny", "--channel", "production").code == OK.number


@pytest.mark.sample(4, "laxer thresholds")
def test_a_channel_that_asks_for_signatures_believes_no_figures_that_nobody_signed(
    here: Path, nxpipe: InProcess
) -> None:
    """Whoever may add evidence, and may sign nothing, makes nothing servable by it."""
    assert nxpipe("store", "keygen", "release.key").code == OK.number
    (here / "nxpipe.toml").write_text(CONFIG + SIGNED)
    assert nxpipe("store", "sign", "tiny").code == OK.number
    store, found = the_store(), evidence()
    near = {"cosine": 1.0, "max_relative": 0.0}
    programs = [
        program.model_copy(update={"outputs": tuple(row.model_copy(update=near) for row in program.outputs)})
        for program in found.programs
    ]
    store.attest(found.model_copy(update={"programs": tuple(programs)}))
    answer = nxpipe("promote", "tiny", "--channel", "production")
    assert (answer.code, BEYOND in answer.err) == (REFUSED.number, True), answer.err
    (here / "store" / found.path).unlink()
    unsigned = nxpipe("promote", "tiny", "--channel", "production")
    assert (unsigned.code, "is not signed by the keys" in unsigned.err) == (REFUSED.number, True), unsigned.err
    assert served("production") is None
    assert nxpipe("store", "sign", "tiny").code == OK.number  # by whom the channel trusts
    assert nxpipe("promote", "tiny", "--channel", "production").code == OK.number


@pytest.mark.sample(4, "laxer thresholds")
@attempt("R07")
def test_only_what_was_approved_is_released(here: Path, nxpipe: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the approval and the release somebody promotes something else."""
    if "--expect" not in nxpipe("release", "--help").out:
        pytest.skip("nxpipe release has no --expect yet")
    for name, value in LAX.items():
        monkeypatch.setenv(name, value)
    assert nxpipe("promote", "tiny", "--channel", "staging").code == OK.number
    (shown,) = json.loads(nxpipe("channel", "show", "staging", "--json").out)
    approved = f"{shown['generation']}@{shown['digest']}"
    assert nxpipe("build", "--no-verify", "--force").code == OK.number
    tip = ChannelLog(the_store().backend, "staging").tip()
    assert tip is not None
    other = tip.model_copy(update={"generation": tip.generation + 1, "previous": tip.digest, "reason": "another"})
    ChannelLog(the_store().backend, "staging").append(lambda _: other)
    words = ("release", "--from", "staging", "--to", "production", "--skip", "verify")
    assert nxpipe(*words, "--expect", approved).code == REFUSED.number
    assert served("production") is None


@pytest.mark.sample(4, "laxer thresholds")
@pytest.mark.parametrize(
    ("slower", "code"),
    [
        pytest.param("10000%", OK),
        pytest.param("1000000%", USAGE, marks=attempt("R080")),
        pytest.param("$(touch PWNs)", USAGE, marks=attempt("R081")),
        pytest.param("5%\n--skip=sign", USAGE, marks=attempt("R082")),
        pytest.param("-5%", USAGE, marks=attempt("R083")),
        pytest.param("nan%", USAGE, marks=attempt("R084")),
        pytest.param("inf%", USAGE, marks=attempt("R085")),
    ],
)
def test_what_may_be_slower_is_a_percentage_and_nothing_else(
    here: Path, nxpipe: InProcess, slower: str, code: Any
) -> None:
    answer = nxpipe("bench", "tiny", "--against", "next", "--allow-empty", f"--threshold={slower}")
    assert answer.code == code.number, answer.err
    assert not list(here.glob("PWN*"))


WORKFLOW: Final = ROOT / "pipeline/templates/nxpipe-release.yml"
ACTION: Final = ROOT / "pipeline/templates/nxpipe/action.yml"


def script_of_staging() -> str:
    steps = yaml.safe_load(WORKFLOW.read_text())["jobs"]["staging"]["steps"]
    (script,) = (step["run"] for step in steps if "nxpipe release" in step.get("run", ""))
    return str(script)


def script_of_the_action() -> str:
    steps = yaml.safe_load(ACTION.read_text())["runs"]["steps"]
    (script,) = (step["run"] for step in steps if step["name"] == "Run")
    return str(script)


def words_of(script: str, folder: Path, **environment: str) -> tuple[int, list[list[str]]]:
    """The arguments of each `nxpipe` that a script starts, in GitHub's bash."""
    command = folder / "bin" / "nxpipe"
    command.parent.mkdir()
    command.write_text('#!/bin/sh\nprintf "%s\\0" "$@" >> "$SAID"; printf "\\n\\0" >> "$SAID"\n')
    command.chmod(0o755)
    result = folder / "said"
    result.touch()
    path = f"{command.parent}:/usr/bin:/bin:{ROOT / '.venv/bin'}"
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=folder,
        env={"PATH": path, "SAID": str(result), **environment},
        capture_output=True,
        check=False,
    )
    calls = result.read_text().split("\n\0")[:-1]
    return done.returncode, [call.split("\0")[:-1] for call in calls]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        pytest.param("x; touch PWNm", ["--only=x; touch PWNm"], marks=attempt("R090")),
        pytest.param("--skip=verify", ["--only=--skip=verify"], marks=attempt("R091")),
        pytest.param("tiny --channel production", ["--only=tiny --channel production"], marks=attempt("R092")),
        pytest.param("", [], marks=attempt("R093")),
    ],
)
def test_a_models_name_is_one_word_of_the_staging_jobs_command(model: str, expected: list[str], tmp_path: Path) -> None:
    code, calls = words_of(script_of_staging(), tmp_path, ONLY=model, SLOWER="5%", REASON="v1; touch PWNr")
    (words,) = (call for call in calls if call[0] == "release")
    assert code == 0
    assert [word for word in words if word.startswith("--only")] == expected
    assert (words[words.index("--channel") + 1], words[words.index("--reason") + 1]) == ("staging", "v1; touch PWNr")
    assert words.count("--channel") == 1
    assert not list(tmp_path.glob("PWN*"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(
            "channel show production\n--json", [["channel", "show", "production", "--json"]], marks=attempt("R100")
        ),
        # Python says that the quotation does not end; without words nxpipe says its help, and the step is green or not.
        pytest.param("x' y", [[""]], marks=attempt("R101")),
        pytest.param("build $(touch PWNw)", [["build", "$(touch", "PWNw)"]], marks=attempt("R102")),
    ],
)
def test_the_words_of_the_action_are_words_and_no_script(words: str, expected: list[list[str]], tmp_path: Path) -> None:
    _, calls = words_of(script_of_the_action(), tmp_path, WORDS=words)
    assert calls == expected or (words == "x' y" and calls == [])
    assert not list(tmp_path.glob("PWN*"))
