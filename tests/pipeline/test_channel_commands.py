"""The commands promote, rollback and channel, and those that sign."""

import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from nxpipe.artifact_store import Published, open_store
from nxpipe.artifact_store.channel.change import Author, Requirements
from nxpipe.artifact_store.channel.change import promote as promote_unsigned
from nxpipe.artifact_store.layout import generation_path, signature_folder
from nxpipe.pipeline.util import exit_codes
from tests.artifact_store.samples import publish_proven, publish_verified, put
from tests.conftest import ROOT
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]

BERT = "bert-base-uncased"
PROJECT = """
[project]
name = "search"

[store]
url = "file://store"

[[models]]
name = "bert"
id = "bert-base-uncased"
task = "fill-mask"
target = "inf2.xlarge"

[[fleets]]
kind = "serving"
name = "live"
model = "bert"
channel = "production"
instance_types = ["inf2.xlarge", "inf2.8xlarge"]
capacity = { kind = "on-demand" }
size = { min = 1, max = 2 }
rehearsal = true
"""
REHEARSAL = "fleet live is a rehearsal: it may serve programs of the emulator; send it no production traffic"
SIGNED = PROJECT + '[signing]\nkey = "file:release.key"\nrequire = ["production"]\n'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder, and an environment that does not identify the user of the tests."""
    monkeypatch.chdir(tmp_path)
    for name in [entry for entry in os.environ if entry.startswith(("GITHUB_", "NXPIPE_", "GIT_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    (tmp_path / "nxpipe.toml").write_text(PROJECT)
    return tmp_path


def publish(here: Path, number: int = 1, *, target: str = "inf2", backend: str = "emulator") -> Published:
    store = open_store(str(here / "store"))
    manifest = put(store, f"{target} {number}", request=[target, number], model=BERT)
    made = manifest.model_copy(update={"target": target, "backend": backend})
    return publish_verified(store, made) if backend == "emulator" else publish_proven(store, made)


def name_of(one: Published) -> str:
    return f"{one.model_id}@{one.request_key[:12]}"


# Promoting and rolling back


def test_promote_says_what_is_served_and_the_log_says_who_and_why(here: Path, nxpipe: InProcess) -> None:
    one = publish(here)
    answer = nxpipe("promote", name_of(one), "--channel", "production", "--actor", "ann", "--reason", "first release")
    assert (answer.code, answer.out) == (0, f"  {name_of(one)} for inf2\n")
    assert answer.err.splitlines() == ["Channel production changed, generation 1:", f"  {REHEARSAL}"]
    log = nxpipe("channel", "log", "production").out
    assert re.fullmatch(
        rf"production 1  promote  [\d-]+ [\d:]+ UTC  by ann\n  first release\n"
        rf"  {BERT} for inf2: nothing -> {one.request_key[:12]}\n",
        log,
    )


def test_a_fleet_that_is_no_rehearsal_gets_no_programs_of_the_emulator(here: Path, nxpipe: InProcess) -> None:
    emulated, compiled = publish(here), publish(here, 2, backend="neuronx")
    (here / "nxpipe.toml").write_text(PROJECT.replace("rehearsal = true", "rehearsal = false"))
    refused = nxpipe("promote", name_of(emulated), "--channel", "production")
    assert refused.code == exit_codes.REFUSED.number
    assert refused.err == (
        f"Error: {name_of(emulated)} has programs of backend emulator, which no Neuron device runs, and fleet live "
        "needs those of backend neuronx; build with --backend neuronx, or set rehearsal = true in its [[fleets]] "
        "table\n"
    )
    assert nxpipe("channel", "show", "production").code == exit_codes.NOT_FOUND.number
    assert nxpipe("promote", name_of(compiled), "--channel", "production").code == 0
    assert nxpipe("promote", name_of(emulated), "--channel", "experiments").code == 0  # no fleet runs it


def test_a_channel_is_refused_for_one_fleet_even_if_another_is_a_rehearsal(here: Path, nxpipe: InProcess) -> None:
    second = PROJECT[PROJECT.index("[[fleets]]") :].replace("rehearsal = true", "").replace('"live"', '"paid"')
    (here / "nxpipe.toml").write_text(PROJECT + second)
    refused = nxpipe("promote", name_of(publish(here)), "--channel", "production")
    assert (refused.code, "and fleet paid needs" in refused.err) == (exit_codes.REFUSED.number, True)


def test_a_rehearsal_says_so_wherever_its_channel_is_shown(here: Path, nxpipe: InProcess) -> None:
    words = ("promote", name_of(publish(here)), "--channel", "production", "--json")
    assert json.loads(nxpipe(*words).out)["rehearsals"] == [REHEARSAL]
    assert f"  {REHEARSAL}\n" in nxpipe("channel", "show", "production").out
    assert json.loads(nxpipe("channel", "show", "production", "--json").out)[0]["rehearsals"] == [REHEARSAL]
    (here / "nxpipe.toml").write_text(PROJECT.replace("rehearsal = true", ""))
    assert "rehearsal" not in nxpipe("channel", "show", "production").out


def test_a_rollback_restores_no_programs_that_the_fleet_cannot_run(here: Path, nxpipe: InProcess) -> None:
    rehearsed, real = publish(here), publish(here, 2, backend="neuronx")
    for entry in (rehearsed, real):
        assert nxpipe("promote", name_of(entry), "--channel", "production").code == 0
    (here / "nxpipe.toml").write_text(PROJECT.replace("rehearsal = true", ""))
    refused = nxpipe("rollback", "--channel", "production")
    assert refused.code == exit_codes.REFUSED.number
    assert "generation 1 of channel production cannot be restored: " in refused.err
    assert "build with --backend neuronx" in refused.err


def test_promoting_again_changes_nothing_and_says_so(here: Path, nxpipe: InProcess) -> None:
    one = publish(here)
    first = json.loads(nxpipe("promote", name_of(one), "--channel", "production", "--json").out)
    again = json.loads(nxpipe("promote", one.request_key, name_of(one), "--channel", "production", "--json").out)
    assert (first["changed"], again["changed"]) == (True, False)
    assert first["generation"] == again["generation"] == 1
    assert first["artifacts"][0]["request_key"] == one.request_key


def test_a_rollback_serves_what_was_served_before(here: Path, nxpipe: InProcess) -> None:
    first, second, third = (publish(here, number) for number in range(3))
    for entry in (first, second, third):
        assert nxpipe("promote", name_of(entry), "--channel", "production").code == 0
    answer = nxpipe("rollback", "--channel", "production", "--reason", "p99 doubled")
    assert (answer.code, answer.out) == (0, f"  {name_of(second)} for inf2\n")
    assert nxpipe("rollback", "--channel", "production", "--to", "1").out == f"  {name_of(first)} for inf2\n"
    entries = json.loads(nxpipe("channel", "log", "production", "--json").out)
    assert [(entry["generation"], entry["action"], entry["restores"]) for entry in entries] == [
        (5, "rollback", 1),
        (4, "rollback", 2),
        (3, "promote", None),
        (2, "promote", None),
        (1, "promote", None),
    ]
    assert entries[1]["reason"] == "p99 doubled"
    assert entries[1]["changes"] == [
        {"model_id": BERT, "target": "inf2", "from": third.request_key, "to": second.request_key}
    ]
    last = json.loads(nxpipe("channel", "log", "production", "--last", "2", "--json").out)
    assert last == entries[:2]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("promote", "bert-bas", "--channel", "production"), exit_codes.NOT_FOUND, BERT),
        (("promote", BERT), exit_codes.USAGE, "--channel"),
        (("promote", "--channel", "production"), exit_codes.USAGE, "MODEL@KEY"),
        (("promote", BERT, "--channel", "Prod/1"), exit_codes.USAGE, "is not a valid channel name"),
        (("promote", BERT, "--channel", "production", "--expect", "7"), exit_codes.REFUSED, "at generation 0, not 7"),
        (("promote", BERT, "--channel", "production", "--key", "x"), exit_codes.KEY, "file:PATH"),
        (("rollback", "--channel", "production"), exit_codes.NOT_FOUND, "is empty"),
        (("rollback", "--channel", "production", "--to", "0"), exit_codes.USAGE, "--to"),
        (("channel", "show", "production"), exit_codes.NOT_FOUND, "which has none yet"),
        (("channel", "lgo"), exit_codes.USAGE, "did you mean 'log'?"),
        (("store", "sign", BERT), exit_codes.REFUSED, "no signing key is set"),
        (("store", "verify-signature", BERT), exit_codes.REFUSED, "no public key is given"),
    ],
)
def test_wrong_words_get_one_sentence_and_their_exit_code(
    here: Path, nxpipe: InProcess, words: tuple[str, ...], code: exit_codes.ExitCode, said: str
) -> None:
    publish(here)
    answer = nxpipe(*words)
    assert (answer.code, answer.out) == (code.number, "")
    assert answer.err.startswith("Error: ")
    assert answer.err.count("\n") == 1
    assert said in answer.err


def test_a_channel_that_no_fleet_runs_is_pointed_out(here: Path, nxpipe: InProcess) -> None:
    one = publish(here)
    answer = nxpipe("promote", name_of(one), "--channel", "prodution")
    assert answer.code == 0
    assert "Note: no fleet of nxpipe.toml runs channel prodution; did you mean 'production'?" in answer.err
    assert "did you mean 'prodution'?" in nxpipe("channel", "show", "production").err


def test_a_fleet_of_the_channel_is_not_left_without_its_target(here: Path, nxpipe: InProcess) -> None:
    trn1, inf2 = publish(here, target="trn1"), publish(here)
    answer = nxpipe("promote", name_of(trn1), "--channel", "production")
    assert answer.code == exit_codes.REFUSED.number
    assert f"run {BERT} on inf2, and no artifact" in answer.err
    assert nxpipe("promote", name_of(trn1), name_of(inf2), "--channel", "production").code == 0
    assert nxpipe("promote", name_of(trn1), "--channel", "elsewhere").code == 0


def test_a_model_in_a_folder_goes_by_the_folders_name(here: Path, nxpipe: InProcess) -> None:
    (here / "nxpipe.toml").write_text(PROJECT.replace('id = "bert-base-uncased"', f'path = "./models/../{BERT}"'))
    trn1 = publish(here, target="trn1")
    assert f"run {BERT} on inf2, and no artifact" in nxpipe("promote", name_of(trn1), "--channel", "production").err


@pytest.mark.parametrize("form", ["bert", "bert@{key:.8}", BERT])
def test_a_model_goes_by_its_name_in_the_file_as_well(here: Path, nxpipe: InProcess, form: str) -> None:
    published = publish(here)
    answer = nxpipe("promote", form.format(key=published.request_key), "--channel", "production")
    assert name_of(published) in answer.out + answer.err


# Who


def actor(nxpipe: InProcess) -> str:
    answer = nxpipe("rollback", "--channel", "production", "--json")
    return str(json.loads(answer.out)["actor"])


def test_the_actor_is_githubs_then_gits_then_the_machines(
    here: Path, nxpipe: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        nxpipe("promote", name_of(publish(here, number)), "--channel", "production")
    monkeypatch.setenv("LOGNAME", "nobody-special")
    assert actor(nxpipe).startswith("nobody-special on ")
    (here / "gitconfig").write_text("[user]\nname = Ann\nemail = ann@acme.example\n")
    assert actor(nxpipe) == "Ann <ann@acme.example>"
    for name, value in (("ACTOR", "octocat"), ("RUN_ID", "42"), ("REPOSITORY", "acme/models")):
        monkeypatch.setenv(f"GITHUB_{name}", value)
    assert actor(nxpipe) == "octocat (GitHub, acme/models run 42)"


# Signing


def keygen(nxpipe: InProcess, file: str) -> str:
    return str(json.loads(nxpipe("store", "keygen", file, "--json").out)["key_id"])


def test_a_signed_channel_takes_signed_artifacts_only_and_signs_its_own_log(here: Path, nxpipe: InProcess) -> None:
    (here / "nxpipe.toml").write_text(SIGNED)
    key_id = keygen(nxpipe, "release.key")
    first, second = publish(here, 1), publish(here, 2)
    refused = nxpipe("promote", name_of(first), "--channel", "production")
    assert refused.code == exit_codes.REFUSED.number
    assert f"sign it with: nxpipe store sign {name_of(first)}" in refused.err
    for entry in (first, second):
        assert key_id in nxpipe("store", "sign", name_of(entry)).out
        assert nxpipe("promote", name_of(entry), "--channel", "production").code == 0
    assert nxpipe("rollback", "--channel", "production").code == 0
    (here / "release.key").unlink()  # whoever looks needs the public half only
    (state,) = json.loads(nxpipe("channel", "show", "--json").out)
    assert (state["generation"], state["signed_by"], state["fault"]) == (3, ["signing.key"], None)
    assert state["artifacts"][0]["signed_by"] == ["signing.key"]
    assert [entry["fault"] for entry in json.loads(nxpipe("channel", "log", "--json").out)] == [None] * 3
    page = nxpipe("channel", "show").out
    assert "signed by signing.key" in page
    assert re.search(r"for \d+ seconds?, since ", page)


def test_trusted_keys_count_by_their_channel_and_expiry(here: Path, nxpipe: InProcess) -> None:
    keygen(nxpipe, "release.key")
    one = publish(here)
    (here / "nxpipe.toml").write_text(SIGNED)
    nxpipe("store", "sign", name_of(one))
    trusted = '[[signing.trusted]]\nname = "release"\nkey = "file:release.key.pub"\n'
    soon, past = (datetime.now(UTC).replace(microsecond=0) + timedelta(days=days) for days in (1, -1))
    for extra, code in (
        (f"expires = {past.isoformat()}\n", exit_codes.REFUSED),
        (f'expires = {soon.isoformat()}\nchannels = ["production"]\n', exit_codes.OK),
    ):
        (here / "nxpipe.toml").write_text(SIGNED + trusted + extra)
        answer = nxpipe("promote", name_of(one), "--channel", "production")
        assert answer.code == code.number, answer.err
    assert json.loads(nxpipe("channel", "show", "--json").out)[0]["signed_by"] == ["release"]


def test_a_change_that_nobody_would_believe_is_not_written(here: Path, nxpipe: InProcess) -> None:
    keygen(nxpipe, "release.key")
    keygen(nxpipe, "mine.key")
    (here / "nxpipe.toml").write_text(SIGNED)
    one = publish(here)
    nxpipe("store", "sign", name_of(one))
    answer = nxpipe("promote", name_of(one), "--channel", "production", "--key", "file:mine.key")
    assert answer.code == exit_codes.REFUSED.number
    assert "may not sign for channel production" in answer.err
    assert not (here / "store" / generation_path("production", 1)).exists()


def test_a_rollback_to_what_an_expired_key_signed_is_refused_unless_the_log_may_tell_why(
    here: Path, nxpipe: InProcess
) -> None:
    keygen(nxpipe, "release.key")
    keygen(nxpipe, "oncall.key")
    (here / "nxpipe.toml").write_text(SIGNED)
    first, second = publish(here, 1), publish(here, 2)
    for entry in (first, second):
        nxpipe("store", "sign", name_of(entry))
        assert nxpipe("promote", name_of(entry), "--channel", "production").code == 0
    past = (datetime.now(UTC).replace(microsecond=0) - timedelta(days=1)).isoformat()
    trusted = [f'[[signing.trusted]]\nname = "{name}"\nkey = "file:{name}.key.pub"\n' for name in ("release", "oncall")]
    (here / "nxpipe.toml").write_text(f"{SIGNED}{trusted[0]}expires = {past}\n{trusted[1]}")
    back = ("rollback", "--channel", "production", "--key", "file:oncall.key")
    refused = nxpipe(*back)
    assert refused.code == exit_codes.REFUSED.number
    assert f"nxpipe store sign {name_of(first)}, or override the policy with --despite-policy" in refused.err
    assert nxpipe(*back, "--despite-policy", "the key expired at midnight").code == 0
    result = json.loads(nxpipe("channel", "log", "--json").out)[0]
    assert result["action"] == "rollback"
    assert "despite the signing policy, because the key expired at midnight" in result["reason"]
    assert (result["signed_by"], result["fault"]) == (["oncall"], None)


def test_an_unsigned_generation_of_a_signed_channel_is_reported(here: Path, nxpipe: InProcess) -> None:
    keygen(nxpipe, "release.key")
    (here / "nxpipe.toml").write_text(SIGNED)
    store = open_store(str(here / "store"))
    promote_unsigned(store, "production", [publish(here)], Author("mallory", ""), Requirements())
    for words in (("channel", "log"), ("channel", "show", "production")):
        answer = nxpipe(*words)
        assert answer.code == exit_codes.REFUSED.number
        assert "is not signed" in answer.out
        assert "generation 1 of channel production is not signed" in answer.err


def test_a_signature_is_verified_with_public_keys_alone(here: Path, nxpipe: InProcess) -> None:
    one = publish(here)
    for name in ("release", "other"):
        keygen(nxpipe, f"{name}.key")
    assert nxpipe("store", "sign", name_of(one), "--key", "file:release.key", "--builder", "ci:1").code == 0
    (here / "release.key").unlink()
    (here / "nxpipe.toml").unlink()
    words = ("store", "verify-signature", name_of(one), "--store", "store", "--public-key")
    answer = nxpipe(*words, "release.key.pub", "--public-key", "other.key.pub")
    assert answer.code == 0
    assert json.loads(answer.out)["subject"] == [{"name": BERT, "digest": {"sha256": one.manifest_digest}}]
    assert "built by ci:1" in answer.err
    (signer,) = json.loads(nxpipe(*words, "release.key.pub", "--json").out)["signed_by"]
    assert (signer["name"], signer["builder"]) == ("release.key.pub", "ci:1")
    answer = nxpipe(*words, "other.key.pub")
    assert answer.code == exit_codes.REFUSED.number
    assert f"it has signatures of {signer['key_id']} only" in answer.err
    path = here / "store" / signature_folder(one.manifest_digest) / signer["key_id"]
    path.write_bytes(path.read_bytes().replace(b'"sig":"', b'"sig":"A', 1))
    assert nxpipe(*words, "release.key.pub").code == exit_codes.CORRUPT.number


def test_keygen_writes_the_public_half_of_a_key_that_exists(here: Path, nxpipe: InProcess) -> None:
    key_id = keygen(nxpipe, "release.key")
    answer = nxpipe("store", "keygen", "copy.pub", "--public-of", "file:release.key")
    assert key_id in answer.out
    assert (here / "copy.pub").read_bytes() == (here / "release.key.pub").read_bytes()
    assert nxpipe("store", "keygen", "release.key").code == exit_codes.KEY.number


def test_the_builder_of_a_github_run_is_its_workflow(
    here: Path, nxpipe: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    keygen(nxpipe, "release.key")
    monkeypatch.setenv("GITHUB_SERVER_URL", "https://github.com")
    monkeypatch.setenv("GITHUB_WORKFLOW_REF", "acme/models/.github/workflows/release.yml@refs/heads/main")
    document = json.loads(nxpipe("store", "sign", name_of(publish(here)), "--key", "file:release.key", "--json").out)
    assert document["statement"]["predicate"]["runDetails"]["builder"]["id"] == (
        "https://github.com/acme/models/.github/workflows/release.yml@refs/heads/main"
    )


# What a host needs for it

WITHOUT_A_COMPILER = """
import sys

# A state and a way to open files; no compiler is behind them.
LIGHT = {"nxpipe.emulator.confinement", "nxpipe.emulator.regular_file"}

class Blocked:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {"torch", "transformers", "numpy", "ml_dtypes", "safetensors", "boto3", "botocore"} or (
            name.startswith("nxpipe.emulator.")
            and not name.startswith("nxpipe.emulator.hardware")
            and name not in LIGHT
        ):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocked())
try:
    import numpy
except ImportError:
    pass
else:
    raise SystemExit("the block does not hold")
from nxpipe.pipeline.cli.main import main
sys.argv = ["nxpipe", *sys.argv[1:]]
main()
"""


def test_promotion_and_rollback_need_no_compiler_and_no_aws(here: Path) -> None:
    first, second = publish(here, 1), publish(here, 2)
    script = here / "blocked.py"
    script.write_text(WITHOUT_A_COMPILER)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    for words in (
        ["promote", name_of(first), "--channel", "production"],
        ["promote", name_of(second), "--channel", "production"],
        ["rollback", "--channel", "production"],
        ["channel", "log"],
    ):
        done = subprocess.run([sys.executable, str(script), *words], cwd=here, env=environment, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()
