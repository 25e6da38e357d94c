"""`nxpipe release` on a folder: all gates, repetitions, and refusals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nxpipe.artifact_store import open_store
from nxpipe.artifact_store.channel import change
from nxpipe.artifact_store.evidence import DEVICE
from nxpipe.artifact_store.layout import blob_path
from nxpipe.pipeline.util import exit_codes
from nxpipe.pipeline.util.console import reported_error
from tests.artifact_store.samples import evidence
from tests.pipeline.command import Answer
from tests.release.world import CELLS, GATES, Team, deepen, gate, states

VERIFIED = "already verified on this machine"


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


pytestmark = pytest.mark.sample(4, "release")  # the first release takes 17 seconds


def test_a_release_takes_two_models_from_their_description_to_a_channel(first: tuple[Path, Answer]) -> None:
    folder, answer = first
    assert answer.code == 0, answer.err
    report = json.loads(answer.out)
    assert report["verdict"] == "released"
    assert list(states(report)) == list(GATES)
    assert states(report) == dict.fromkeys(GATES, "passed") | {"rollout": "skipped"}
    assert [cell["fate"] for cell in gate(report, "build")["figures"]] == ["built"] * CELLS
    assert len({(figure["artifact"], figure["program"]) for figure in gate(report, "verify")["figures"]}) == CELLS
    assert {line["verdict"] for line in gate(report, "bench")["figures"]} == {"alone"}
    store = open_store(str(folder / "store"))
    assert {artifact["manifest"] for artifact in report["artifacts"]} == {
        entry.manifest_digest for entry in store.list()
    }
    assert report["way_back"] == []  # nothing was served before


def test_the_report_is_kept_as_data_and_as_a_page_that_asks_nobody(first: tuple[Path, Answer]) -> None:
    folder, answer = first
    (kept,) = (path for path in (folder / ".nxpipe/releases").iterdir() if path.name != "verified")
    assert json.loads((kept / "release.json").read_text()) == json.loads(answer.out)
    page = (kept / "release.html").read_text()
    assert "default-src &#x27;none&#x27;" in page
    assert "http://" not in page
    assert page.count("<script") == 1
    assert "Largest relative error of each output" in page
    assert all(f"<code>{name}</code>" in page for name in GATES)


def test_a_release_that_is_over_changes_nothing_when_it_is_said_again(team: Team) -> None:
    team.release()
    before = everything(Path("store"))
    report = team.release()
    assert states(report) == dict.fromkeys(GATES, "done") | {"rollout": "skipped"}
    assert everything(Path("store")) == before


def test_a_changed_bucket_is_a_new_generation_that_its_report_takes_back(team: Team) -> None:
    old = team.served("staging")
    team.describes("buckets = [8, 16, 32]", "buckets = [8, 16, 48]")
    report = team.release("--reason", "longer texts")
    fates = {(cell["artifact"], cell["program"]): cell["fate"] for cell in gate(report, "build")["figures"]}
    assert [key for key, fate in fates.items() if fate == "built"] == [("bert on inf2.xlarge, tp 1", "forward-b1-s48")]
    lines = {
        line["program"]: line["verdict"] for line in gate(report, "bench")["figures"] if "bert" in line["artifact"]
    }
    assert lines == {"forward-b1-s8": "within", "forward-b1-s16": "within", "forward-b1-s48": "new"}
    newest, before = team.log("staging")
    assert (newest.reason, newest.generation, before.generation) == ("longer texts", 2, 1)
    assert team.served("staging")["tiny-llama"] == old["tiny-llama"]
    assert team.served("staging")["tiny-bert"] != old["tiny-bert"]
    assert report["way_back"] == ["nxpipe rollback --channel staging --to 1 --expect 2"]
    assert team.does(report["way_back"][0]).code == 0
    assert team.served("staging") == old
    stale = team.does(report["way_back"][0])
    assert stale.code == exit_codes.REFUSED.number  # it takes back this release, and no later one


def test_a_slower_program_is_refused_before_anything_is_signed_or_served(team: Team) -> None:
    old, signatures = team.log("staging"), everything(Path("store/signatures"))
    team.describes("buckets = [8, 16, 32]", "buckets = [32]")
    deepen(Path("models/tiny-bert/config.json"))
    report = team.release(code=exit_codes.REGRESSION.number)
    assert states(report) | {"sign": "not run", "promote": "not run", "rollout": "not run"} == states(report)
    assert states(report)["bench"] == "failed"
    assert "forward-b1-s32 of tiny-bert@" in team.said[-1]
    assert report["way_back"] == []
    assert (team.log("staging"), everything(Path("store/signatures"))) == (old, signatures)
    allowed = team.release("--threshold", "1000%")
    assert states(allowed)["build"] == "done"
    assert VERIFIED in gate(allowed, "verify")["sentence"]
    assert len(team.log("staging")) == 2


def test_production_gets_the_very_manifests_of_staging_and_nothing_is_built(team: Team) -> None:
    team.describes("buckets = [8, 16, 32]", "buckets = [8, 16, 64]")  # which nobody has released
    report = team.release("--to", "production", "--from", "staging", "--skip", "verify")
    assert [states(report)[name] for name in ("check", "build", "verify")] == ["skipped"] * 3
    assert gate(report, "verify")["sentence"] == "--skip verify"
    assert team.served("production") == team.served("staging")
    only = team.release("--to", "eu", "--from", "staging", "--only", "bert", "--skip", "verify")
    assert team.served("eu") == {"tiny-bert": team.served("staging")["tiny-bert"]}
    assert only["from"] == "staging"
    (empty, same) = (
        team.nxpipe("release", "--to", "production", "--from", source) for source in ("nobody", "production")
    )
    assert (empty.code, same.code) == (exit_codes.NOT_FOUND.number, exit_codes.USAGE.number)


def test_what_was_changed_in_the_store_is_found_out_by_whoever_releases_it(team: Team) -> None:
    store = open_store("store")
    (bert,) = (entry for entry in store.list() if entry.model_id == "tiny-bert")
    damaged = Path("store", blob_path(bert.manifest.executables[0].blob))
    data = damaged.read_bytes()
    damaged.chmod(0o600)
    damaged.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    report = team.release("--to", "eu", "--from", "staging", code=exit_codes.CORRUPT.number)
    assert states(report)["verify"] == "failed"
    assert team.served("eu") == {}


def test_a_channel_that_moves_after_it_was_held_against_is_not_overwritten(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    def somebody_else_is_faster(*words: object) -> None:
        store = open_store("store")
        (bert,) = (entry for entry in store.list() if entry.model_id == "tiny-bert")
        change.promote(store, "eu", [bert], change.Author("somebody", ""), change.Requirements())

    with monkeypatch.context() as patch:
        patch.setattr("nxpipe.pipeline.release.promotion.author_signature", somebody_else_is_faster)
        words = ("--to", "eu", "--from", "staging", "--skip", "verify")
        report = team.release(*words, code=exit_codes.REFUSED.number)
    assert (states(report)["promote"], len(team.log("eu"))) == ("failed", 1)
    assert states(team.release(*words))["promote"] == "passed"


def test_what_is_released_from_a_channel_needs_no_compiler(team: Team) -> None:
    program = """
import sys
from nxpipe.pipeline.cli.main import main
sys.argv = ["nxpipe", *"release --to eu --from staging --skip verify".split()]
try:
    main()
except SystemExit as ended:
    assert ended.code == 0
print({"torch", "transformers", "boto3", "nxpipe.emulator.compile"} & set(sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1:] == ["set()"], done.stderr


def test_a_later_change_of_the_channel_is_not_taken_back_with_the_release(team: Team) -> None:
    team.release("--to", "eu", "--from", "staging", "--only", "bert", "--skip", "verify")
    report = team.release("--to", "eu", "--from", "staging", "--skip", "verify")
    assert report["way_back"] == ["nxpipe rollback --channel eu --to 1 --expect 2"]


@pytest.mark.parametrize("words", [(), ("--to", "production", "--from", "staging")], ids=["built", "from a channel"])
def test_a_dry_run_says_every_gate_and_changes_nothing(team: Team, words: tuple[str, ...]) -> None:
    team.describes("buckets = [8, 16, 32]", "buckets = [8, 16, 48]")
    before = everything(Path())
    report = team.release("--dry-run", *words)
    assert everything(Path()) == before
    assert list(states(report)) == list(GATES)
    assert states(report)["promote"] == "to do"
    cells = (
        [cell["state"] for artifact in report["plan"]["artifacts"] for cell in artifact["cells"]]
        if report["plan"]
        else []
    )
    assert cells.count("to do") == (0 if words else 1)


def test_a_dry_run_has_the_exit_code_of_the_builds_own(team: Team) -> None:
    reasons = {"buckets = [8, 16, 32]": "buckets = [8, 16, 4096]", "models/tiny-llama": "models/no-llama"}
    for reason, code in zip(reasons.items(), (exit_codes.COMPILE, exit_codes.INCOMPLETE), strict=True):
        team.describes(*reason)
        assert team.nxpipe("build", "--dry-run").code == code.number
        team.release("--dry-run", code=code.number)


def test_what_does_not_compile_ends_at_the_first_gate_with_its_code(team: Team) -> None:
    team.describes("buckets = [8, 16, 32]", "buckets = [8, 16, 4096]")
    report = team.release(code=exit_codes.COMPILE.number)
    assert states(report) == dict.fromkeys(GATES, "not run") | {"check": "failed"}
    error = reported_error(team.said[-1])
    assert error is not None
    assert error.startswith("check: tiny-bert")
    assert "4096" in error


def test_programs_that_the_channels_fleet_cannot_run_are_refused_before_they_are_compiled(team: Team) -> None:
    fleet = """
[[fleets]]
kind = "serving"
name = "search"
model = "bert"
channel = "staging"
instance_types = ["inf2.xlarge"]
capacity = { kind = "on-demand" }
size = { min = 1, max = 2 }
"""
    path = Path("nxpipe.toml")
    path.write_text(path.read_text().replace("[8, 16, 32]", "[8, 64]") + fleet)
    before = everything(Path("store"))
    dry = team.nxpipe("release", "--dry-run")
    report = team.release(code=exit_codes.REFUSED.number)
    assert dry.code == exit_codes.REFUSED.number
    assert (states(report)["check"], states(report)["build"]) == ("failed", "not run")
    assert "and fleet search needs those of backend neuronx" in gate(report, "check")["sentence"]
    assert everything(Path("store")) == before
    path.write_text(path.read_text() + "rehearsal = true\n")
    assert team.nxpipe("release", "--dry-run").code == 0


def test_a_channel_that_takes_signed_artifacts_cannot_do_without_the_gate(team: Team) -> None:
    assert team.nxpipe("release", "--skip", "sign").code == exit_codes.USAGE.number
    team.describes('key = "file:release.key"\n', "")
    team.describes("[[models]]", '[[signing.trusted]]\nname = "ci"\nkey = "file:release.key.pub"\n[[models]]')
    team.describes('require = ["staging"]', 'require = ["staging", "production"]')
    # Who releases has no key: what CI has signed may be served, but not by this person's word.
    report = team.release("--to", "production", "--from", "staging", "--skip", "verify", code=exit_codes.REFUSED.number)
    assert (states(report)["sign"], states(report)["promote"]) == ("done", "failed")
    assert team.served("production") == {}


def test_a_release_names_the_evidence_that_its_artifacts_lack(team: Team) -> None:
    Path("nxpipe.toml").write_text(
        Path("nxpipe.toml").read_text() + '[channels.production]\nrequire = ["emulated", "instructions"]\n'
    )
    words = ("--to", "production", "--from", "staging", "--skip", "verify", "--reason", "first")
    dry = gate(team.release("--dry-run", *words), "promote")["sentence"]
    assert dry.count("lacks instructions evidence (it has no evidence of kind instructions; ") == 2
    assert dry.count(": refused") == 2
    report = team.release(*words, code=exit_codes.REFUSED.number)
    assert "no evidence of kind instructions" in gate(report, "promote")["sentence"]
    waived = (*words, "--without-evidence", "instructions")
    assert ": allowed by --without-evidence" in gate(team.release("--dry-run", *waived), "promote")["sentence"]
    team.release(*waived)
    assert team.log("production")[0].reason.startswith("without instructions evidence, because first (")


def test_a_release_signs_no_evidence_of_devices_that_it_finds(team: Team) -> None:
    store = open_store("store")
    for artifact in store.list():
        store.attest(evidence(store, artifact.manifest, DEVICE))
    team.describes("[[models]]", '[channels.staging]\nrequire = ["emulated", "device"]\n[[models]]')
    team.describes("buckets = [8, 16, 32]", "buckets = [8, 16]")
    team.release("--skip", "promote")
    for artifact in store.list():
        store.attest(evidence(store, artifact.manifest, DEVICE))
    report = team.release("--reason", "smaller", code=exit_codes.REFUSED.number)
    assert (
        "its device evidence is not signed by the keys that its channel trusts" in gate(report, "promote")["sentence"]
    )
    for artifact in store.list():
        assert team.nxpipe("store", "sign", artifact.name).code == 0
    team.release("--reason", "smaller")


def test_two_models_for_one_place_of_a_channel_are_refused_before_anything_is_done(team: Team) -> None:
    text = Path("nxpipe.toml").read_text()
    twin = text[text.index("[[models]]") :].partition('[[models]]\nname = "llama"')[0]
    Path("nxpipe.toml").write_text(text + twin.replace('"bert"', '"bert-long"').replace("[8, 16, 32]", "[64]"))
    before = everything(Path("store"))
    answer = team.nxpipe("release")
    assert (answer.code, "bert and bert-long" in answer.err) == (exit_codes.REFUSED.number, True)
    assert everything(Path("store")) == before
    assert states(team.release("--only", "llama", "--skip", "verify"))["promote"] == "done"


def test_github_shows_the_gates_and_reads_no_markup_of_a_strangers(
    team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    monkeypatch.setenv("RUNNER_ENVIRONMENT", "self-hosted")  # its folders outside of the workspace stay
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "workspace"))
    team.describes('weights = "random:0"', 'weights = "<b>there</b>"')
    team.release("--only", "bert", code=exit_codes.MODEL.number)
    text = summary.read_text().partition("<div>")[2]  # after the summary of the build
    assert "not released" in text
    assert "<b>" not in text
    assert "\n\n" not in text.rstrip("\n")  # the block of HTML ends where it should


@pytest.mark.parametrize("runner", ["github-hosted", "self-hosted"])
def test_a_job_of_github_releases_to_no_store_that_ends_with_it(
    team: Team, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    """The store is in the working directory, which is also the workspace of the job."""
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("RUNNER_ENVIRONMENT", runner)
    before = everything(Path("store"))
    answer = team.nxpipe("release", "--only", "bert")
    assert (answer.code, answer.out, everything(Path("store"))) == (exit_codes.UNSAFE_STORE.number, "", before)
    assert "GitHub deletes it at the end of the job" in answer.err
    assert answer.err.count("\n") == 1
    assert team.nxpipe("release", "--only", "bert", "--dry-run").code == 0
