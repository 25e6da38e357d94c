"""Evidence as a gate: the kinds that a channel requires, what does not count, and promotions that do without."""

import json
import tomllib
from pathlib import Path
from typing import Any, get_args

import jsonschema  # type: ignore[import-untyped]
import pytest

from nxpipe.artifact_store import Published, Store, open_store
from nxpipe.artifact_store.backends.protocol import Payload
from nxpipe.artifact_store.channel.change import Author, EvidenceWaiver, Requirements, promote
from nxpipe.artifact_store.evidence import DEVICE, EMULATED, INSTRUCTIONS, KINDS, XLA
from nxpipe.pipeline.artifacts.requirements import required_evidence
from nxpipe.pipeline.cli.options import KINDS as OPTION_KINDS
from nxpipe.pipeline.config import ConfigInvalid, json_schema, load_config
from nxpipe.pipeline.config.schema import field_kind
from nxpipe.pipeline.config.sections import ChannelRules
from nxpipe.pipeline.util.exit_codes import OK, REFUSED, USAGE
from tests.artifact_store.samples import evidence, publish_verified, put
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]

MODEL = "bert-base-uncased"
SLOT = (MODEL, "inf2")
PROJECT = f"""[project]
name = "demo"
[store]
url = "file://store"
[[models]]
name = "bert"
id = "{MODEL}"
task = "fill-mask"
target = "inf2.xlarge"
[[models]]
name = "other"
id = "acme/other"
task = "fill-mask"
target = "inf2.xlarge"
"""


def fleet(name: str, more: str = "", *, channel: str = "production", model: str = "bert") -> str:
    return (
        f'[[fleets]]\nkind = "serving"\nname = "{name}"\nmodel = "{model}"\nchannel = "{channel}"\n'
        'instance_types = ["inf2.xlarge"]\ncapacity = { kind = "on-demand" }\nsize = { min = 1, max = 2 }\n'
        f"{more}\n"
    )


REHEARSAL = "rehearsal = true"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    write(fleet("live"))
    return tmp_path


def write(more: str) -> None:
    Path("nxpipe.toml").write_text(PROJECT + more)


def the_store() -> Store:
    return open_store("store")


def publish(number: int = 1, *kinds: str, backend: str = "neuronx", **figures: float) -> Published:
    """Publish an artifact with emulated evidence, and with evidence of other kinds that has these figures."""
    store = the_store()
    made = put(store, str(number), request=number, model=MODEL).model_copy(update={"backend": backend})
    for kind in kinds:
        store.attest(evidence(store, made, kind, **figures))
    return publish_verified(store, made)


def last_reason(nxpipe: InProcess, channel: str = "production") -> str:
    (entry,) = json.loads(nxpipe("channel", "log", channel, "--last", "1", "--json").out)
    return str(entry["reason"])


# What a channel requires


def kinds(channel: str, slot: tuple[str, str] | None = None) -> tuple[str, ...]:
    return required_evidence(load_config(Path("nxpipe.toml"), {}), Path(), channel, slot)


def test_a_channel_of_devices_requires_their_evidence_and_any_other_does_not() -> None:
    write(fleet("live") + fleet("tried", REHEARSAL, channel="staging"))
    assert {channel: kinds(channel) for channel in ("production", "live--blue", "live--green")} == dict.fromkeys(
        ("production", "live--blue", "live--green"), (EMULATED, DEVICE)
    )
    assert {kinds(channel) for channel in ("staging", "tried--blue", "experiments")} == {(EMULATED,)}


def test_what_only_a_rehearsal_of_the_channel_runs_needs_no_device() -> None:
    write(fleet("live") + fleet("tried", REHEARSAL, model="other"))
    assert kinds("production", SLOT) == kinds("production", ("acme/unknown", "inf2")) == (EMULATED, DEVICE)
    assert kinds("production", ("acme/other", "inf2")) == (EMULATED,)


def test_a_channel_s_own_table_decides_for_it_and_for_the_environments_of_its_fleets() -> None:
    write(
        '[channels.production]\nrequire = ["emulated", "xla"]\n[channels.staging]\nrequire = ["device"]\n'
        + fleet("live")
    )
    assert {kinds(channel, SLOT) for channel in ("production", "live--blue", "live--green")} == {(EMULATED, XLA)}
    assert kinds("staging") == (DEVICE,)


def test_a_misspelt_channel_is_noted_and_one_without_a_fleet_is_not(nxpipe: InProcess) -> None:
    rules = '[channels.{}]\nrequire = ["emulated"]\n'
    write(fleet("live") + rules.format("prodution") + rules.format("experiments"))
    answer = nxpipe("config", "check")
    assert answer.code == OK.number
    assert "[channels.NAME] names channel prodution" in answer.err
    assert "experiments" not in answer.err


def test_the_kinds_of_the_file_and_of_the_command_line_are_those_of_the_store() -> None:
    written = field_kind(ChannelRules.model_fields["require"]).item
    assert written is not None
    assert get_args(written.annotation) == OPTION_KINDS == KINDS


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[channels.production]\n", "channels.production.require: found nothing; expected a list of 1 to 4 items"),
        ("[channels.production]\nrequire = []\n", "found an empty list; expected a list of 1 to 4 items"),
        ('[channels.production]\nrequire = ["xla", "xla"]\n', 'found ["xla", "xla"]; expected a list of 1 to 4 items'),
        (
            '[channels.production]\nrequire = ["devise"]\n',
            'channels.production.require[0]: found "devise"; expected one',
        ),
        ('[channels.production]\nrequire = ["devise"]\n', 'did you mean "device"?'),
        (
            "[channels.production]\nrequires = 1\n",
            "channels.production.requires: found an unknown key; expected one of",
        ),
        ('[channels."a b"]\nrequire = ["xla"]\n', 'channels."a b": found "a b"; expected a name of at most 40'),
        ('[channels.live--blue]\nrequire = ["xla"]\n', "channels.live--blue: found"),
        ("[channels]\nproduction = 3\n", "channels.production: found 3; expected a table that sets require"),
        ('[[channels]]\nrequire = ["xla"]\n', "channels: found [a table]; expected tables headed [channels.NAME]"),
    ],
)
def test_a_faulty_table_is_refused_by_its_line_and_what_is_allowed(text: str, fault: str) -> None:
    write(text)
    with pytest.raises(ConfigInvalid) as refused:
        load_config(Path("nxpipe.toml"), {})
    assert fault in str(refused.value)
    first = PROJECT.count("\n") + 1
    assert {found.line for found in refused.value.faults} <= {first, first + 1}


def test_an_editor_knows_the_rules_of_channels() -> None:
    schema = json_schema()
    document = tomllib.loads(PROJECT + '[channels.production]\nrequire = ["device"]\n')
    jsonschema.validate(document, schema)
    document["channels"]["production"]["require"] = ["devise"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema)


# What counts


@pytest.mark.parametrize("kind", [INSTRUCTIONS, XLA, DEVICE])
def test_a_missing_kind_is_refused_by_name_and_with_its_remedy(nxpipe: InProcess, kind: str) -> None:
    write(fleet("live") + f'[channels.production]\nrequire = ["emulated", "{kind}"]\n')
    others = set(KINDS) - {EMULATED, kind}
    artifact = publish(1, *others)
    refused = nxpipe("promote", artifact.name, "--channel", "production")
    assert refused.code == REFUSED.number
    assert f"{artifact.name} cannot be served on channel production: it has no evidence of kind {kind}; " in refused.err
    remedy = {INSTRUCTIONS: "nxpipe verify {} --mode isa --attest", XLA: "--backend neuronx", DEVICE: "nxpipe prove {}"}
    assert remedy[kind].format(artifact.name) in refused.err
    the_store().attest(evidence(the_store(), artifact.manifest, kind))
    assert nxpipe("promote", artifact.name, "--channel", "production").code == OK.number


def test_evidence_of_devices_that_is_too_far_off_is_refused_by_its_figures(nxpipe: InProcess) -> None:
    artifact = publish(1, DEVICE, cosine=0.9)
    refused = nxpipe("promote", artifact.name, "--channel", "production")
    assert refused.code == REFUSED.number
    assert "evidence of kind device: forward-b1-s128 logits cosine 0.9000000 < min_cosine 0.999" in refused.err
    the_store().attest(evidence(the_store(), artifact.manifest, DEVICE))  # a second run, within the thresholds
    assert nxpipe("promote", artifact.name, "--channel", "production").code == OK.number


def test_evidence_of_another_artifact_does_not_count_wherever_it_lies(nxpipe: InProcess) -> None:
    proven, other = publish(1, DEVICE), publish(2)
    words = ("promote", other.name, "--channel", "production")
    assert "no evidence of kind device" in nxpipe(*words).err
    (document,) = (found for found in the_store().evidence(proven.manifest_digest) if found.kind == DEVICE)
    forged = Payload.of(document.to_bytes())
    the_store().backend.create(f"evidence/{other.manifest_digest}/{document.digest}", forged)
    refused = nxpipe(*words)
    assert refused.code != OK.number
    assert "it is the record of" in refused.err


def test_evidence_of_devices_counts_only_with_a_signature_that_the_channel_trusts(nxpipe: InProcess) -> None:
    for name in ("release", "mallory"):
        assert nxpipe("store", "keygen", f"{name}.key").code == OK.number
    write('[signing]\nkey = "file:release.key"\nrequire = ["production"]\n' + fleet("live"))
    artifact = publish()
    assert nxpipe("store", "sign", artifact.name).code == OK.number
    the_store().attest(evidence(the_store(), artifact.manifest, DEVICE))  # by whoever may write to the store
    words = ("promote", artifact.name, "--channel", "production")
    for key in (None, "file:mallory.key"):
        if key:
            assert nxpipe("store", "sign", artifact.name, "--key", key).code == OK.number
        refused = nxpipe(*words)
        assert refused.code == REFUSED.number
        assert "its device evidence is not signed by the keys that its channel trusts" in refused.err
        assert f"nxpipe store sign {artifact.name}" in refused.err
    assert nxpipe("store", "sign", artifact.name).code == OK.number
    assert nxpipe(*words).code == OK.number


# Doing without


def test_a_promotion_without_evidence_says_so_in_the_log_for_ever(nxpipe: InProcess) -> None:
    artifact = publish()
    words = ("promote", artifact.name, "--channel", "production", "--without-evidence", "device")
    refused = nxpipe(*words)
    assert (refused.code, "--without-evidence requires --reason TEXT" in refused.err) == (USAGE.number, True)
    assert nxpipe(*words, "--reason", "first hour on hardware").code == OK.number
    expected = "without device evidence, because first hour on hardware ("
    assert last_reason(nxpipe).startswith(expected)
    assert f"{artifact.name}: it has no evidence of kind device" in last_reason(nxpipe)
    assert expected in nxpipe("channel", "log", "production").out
    (served,) = shown(nxpipe, "channel", "show", "production")[0]["artifacts"]
    assert served["without"] == ["device"]
    assert f"{artifact.request_key[:12]}, without device evidence" in nxpipe("channel", "show", "production").out


def test_what_was_missing_is_no_longer_said_to_be_once_it_is_there(nxpipe: InProcess) -> None:
    artifact, words = publish(), ("promote", "--channel", "production")
    waived = (*words, artifact.name, "--without-evidence", "device", "--reason", "first hour")
    assert [nxpipe(*waived).code for _ in range(2)] == [OK.number] * 2
    assert shown(nxpipe, "channel", "show", "production")[0]["generation"] == 1
    the_store().attest(evidence(the_store(), artifact.manifest, DEVICE))
    assert nxpipe(*words, artifact.name, "--reason", "proven").code == OK.number
    (state,) = shown(nxpipe, "channel", "show", "production")
    assert (state["generation"], "without" in state["artifacts"][0]) == (2, False)


def test_what_is_not_missing_is_not_said_to_be(nxpipe: InProcess) -> None:
    artifact = publish(1, DEVICE)
    words = ("promote", artifact.name, "--channel", "production", "--without-evidence", "device")
    assert nxpipe(*words, "--reason", "to be sure").code == OK.number
    assert last_reason(nxpipe) == "to be sure"


def test_doing_without_one_kind_excuses_no_other(nxpipe: InProcess) -> None:
    store = the_store()
    made = put(store, model=MODEL).model_copy(update={"backend": "neuronx"})
    artifact = store.publish(made)
    words = ("promote", artifact.name, "--channel", "production", "--reason", "now")
    refused = nxpipe(*words, "--without-evidence", "device")
    assert (refused.code, "no evidence of a verification" in refused.err) == (REFUSED.number, True)
    both = nxpipe(*words, "--without-evidence", "device", "--without-evidence", "emulated")
    assert both.code == OK.number
    assert last_reason(nxpipe).startswith("without device and emulated evidence, because now (")


def test_every_artifact_that_goes_without_is_named_with_what_it_lacks(nxpipe: InProcess) -> None:
    write(fleet("live") + fleet("second", model="other"))
    far, store = publish(1, DEVICE, cosine=0.9), the_store()
    other = publish_verified(
        store, put(store, "other", request=2, model="acme/other").model_copy(update={"backend": "neuronx"})
    )
    words = ("promote", far.name, other.name, "--channel", "production", "--without-evidence", "device")
    assert nxpipe(*words, "--reason", "now").code == OK.number
    reason = last_reason(nxpipe)
    assert f"{far.name}: evidence of kind device: forward-b1-s128 logits cosine 0.9000000" in reason
    assert f"{other.name}: it has no evidence of kind device" in reason


def test_a_reason_of_its_own_stands_behind_what_a_promotion_does_without(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "library"))
    artifact = store.publish(put(store))
    waiver = EvidenceWaiver.of(("emulated",), "the oracle is down")
    author = Author("ann", "promoted by rollout 7")
    reason = promote(store, "prod", [artifact], author, Requirements(), waiver=waiver).generation.reason
    assert reason.startswith("without emulated evidence, because the oracle is down (")
    assert reason.endswith("; promoted by rollout 7")


def test_a_rollback_needs_no_evidence(nxpipe: InProcess) -> None:
    """What served before served with less, and must be back at once."""
    first, second = publish(1), publish(2, DEVICE)
    without = ("--without-evidence", "device", "--reason", "first hour")
    assert nxpipe("promote", first.name, "--channel", "production", *without).code == OK.number
    assert nxpipe("promote", second.name, "--channel", "production").code == OK.number
    assert nxpipe("rollback", "--channel", "production").code == OK.number
    assert f"{first.request_key[:12]}, without device evidence" in nxpipe("channel", "show", "production").out


# Readers


def shown(nxpipe: InProcess, *words: str) -> Any:
    answer = nxpipe(*words, "--json")
    assert answer.code == OK.number, answer.err
    return json.loads(answer.out)


def test_a_bench_shows_what_devices_measured_beside_the_prediction(nxpipe: InProcess) -> None:
    unproven, proven = publish(1), publish(2, DEVICE)
    assert "measured" not in shown(nxpipe, "bench", proven.name)[0]
    (line,) = shown(nxpipe, "bench", proven.name, "--measured", "--against", unproven.name)
    assert line["measured"] == {"clock": "device", "runs": 100, "p50_ms": 2.5, "p99_ms": 3.0}
    assert line["measured_before"] is None
    answer = nxpipe("bench", proven.name, unproven.name, "--measured")
    assert "2.500 ms  3.000 ms" in answer.out
    assert f"{unproven.name} has no device evidence" in answer.err
    assert f"{proven.name} has no device evidence" not in answer.err


def test_a_diff_compares_evidence_of_each_kind_and_times_on_devices(nxpipe: InProcess) -> None:
    before, after = publish(1), publish(2, DEVICE)
    found = shown(nxpipe, "diff", before.name, after.name)
    assert {entry["field"].split(".")[0] for entry in found["evidence"]} == {"device"}
    program = {"program": "forward-b1-s128", "p50_ms": {"a": None, "b": 2.5}, "p99_ms": {"a": None, "b": 3.0}}
    assert found["timings"] == [program]
    assert "measured on devices" in nxpipe("diff", before.name, after.name).out


def test_an_artifact_shows_its_kinds_of_evidence(nxpipe: InProcess) -> None:
    page = nxpipe("store", "show", publish(1, DEVICE).name).out
    assert "device, emulated" in page
    assert "2.500 ms  3.000 ms   100  device" in page
