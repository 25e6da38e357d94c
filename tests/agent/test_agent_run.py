"""`nxpipe agent run`: an instance goes into service when it is ready, and is abandoned at once if it cannot serve."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest

from nxpipe.artifact_store.channel.generation import Served
from nxpipe.artifact_store.channel.log import ChannelLog
from nxpipe.artifact_store.layout import blob_path
from nxpipe.artifact_store.manifest import Manifest
from nxpipe.pipeline.fleet.agent.shadow import CONTROL
from nxpipe.pipeline.util import exit_codes
from tests.agent.metadata import Metadata, metadata_service
from tests.agent.project import SERVERLESS
from tests.artifact_store.afar import first_generation, patch
from tests.artifact_store.samples import MODEL, Folder, evidence, folder, publish_proven, publish_verified, put
from tests.pipeline.command import Answer
from tests.pipeline.command import nxpipe as in_a_process
from tests.pipeline.in_process import InProcess, nxpipe

pytestmark = pytest.mark.sample(4)

__all__ = ["nxpipe"]

GROUP, HOOK = "demo-search-blue", "demo-search-ready"
SERVER = (sys.executable, "-c", "raise SystemExit")  # for tests in which it is never started


@dataclass
class Place:
    """An instance that waits for its hook, the store of its project, and its device files."""

    root: Path
    store: Folder
    published: Manifest
    metadata: Metadata
    aws: Any

    @property
    def words(self) -> list[str]:
        return ["agent", "run", "--fleet", "search", "--hook", HOOK, "--to", "served", "--devices", "dev"]

    def run(self, *command: str) -> Answer:
        return in_a_process(*self.words, "--", *command, cwd=self.root)

    def states(self) -> dict[str, str]:
        (group,) = self.aws.describe_auto_scaling_groups(AutoScalingGroupNames=[GROUP])["AutoScalingGroups"]
        return {instance["InstanceId"]: instance["LifecycleState"] for instance in group["Instances"]}

    @property
    def state(self) -> str | None:
        return self.states().get(str(self.metadata.values["instance-id"]))


@pytest.fixture
def place(server: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Place]:
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    Path("nxpipe.toml").write_text(SERVERLESS)
    Path("dev").mkdir()
    for name in ("neuron0", "neuron_monitor", "null"):
        Path("dev", name).touch()
    held = folder(tmp_path / "store")
    published = publish_verified(held.store, put(held.store))
    ChannelLog(held.backend, "production").append(lambda _: first_generation("production", [Served.of(published)]))
    aws = boto3.client("autoscaling")
    instance = _launched(aws)
    with metadata_service() as metadata:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", metadata.url)
        metadata.values |= {
            "instance-id": instance,
            "instance-type": "inf2.xlarge",
            "placement/region": "us-east-1",
            "tags/instance/aws:autoscaling:groupName": GROUP,
        }
        yield Place(tmp_path, held, published.manifest, metadata, aws)
    aws.delete_auto_scaling_group(AutoScalingGroupName=GROUP, ForceDelete=True)
    boto3.client("ec2").delete_launch_template(LaunchTemplateName=GROUP)


def _launched(aws: Any) -> str:
    ec2 = boto3.client("ec2")
    ec2.create_launch_template(
        LaunchTemplateName=GROUP,
        LaunchTemplateData={"ImageId": "ami-0123456789abcdef0", "InstanceType": "inf2.xlarge"},
    )
    aws.create_auto_scaling_group(
        AutoScalingGroupName=GROUP,
        MinSize=1,
        MaxSize=1,
        AvailabilityZones=["us-east-1a"],
        LaunchTemplate={"LaunchTemplateName": GROUP},
        LifecycleHookSpecificationList=[
            {
                "LifecycleHookName": HOOK,
                "LifecycleTransition": "autoscaling:EC2_INSTANCE_LAUNCHING",
                "DefaultResult": "ABANDON",
            }
        ],
    )
    (group,) = aws.describe_auto_scaling_groups(AutoScalingGroupNames=[GROUP])["AutoScalingGroups"]
    (instance,) = group["Instances"]
    assert instance["LifecycleState"] == "Pending:Wait"
    return str(instance["InstanceId"])


def test_without_a_server_the_agent_ends_when_the_artifact_is_there(nxpipe: InProcess, place: Place) -> None:
    answer = nxpipe(*place.words)
    assert (answer.code, answer.out) == (0, f"{place.root}/served\n"), answer.err
    assert place.state == "InService"
    assert Path("served/manifest.json").read_bytes() == place.published.to_bytes()
    # After a reboot no hook is pending.
    assert nxpipe(*place.words).code == 0


@pytest.mark.parametrize(
    ("present", "said"), [((), "has 0 Neuron devices"), (("neuron0", "neuron1"), "has 2 Neuron devices")]
)
def test_an_instance_with_other_devices_than_its_type_has_is_given_up(
    nxpipe: InProcess, place: Place, present: tuple[str, ...], said: str
) -> None:
    Path("dev/neuron0").unlink()
    for name in present:
        Path("dev", name).touch()
    answer = nxpipe(*place.words, "--", *SERVER)
    assert answer.code == exit_codes.NOT_READY.number
    assert said in answer.err
    assert place.state is None
    assert not Path("served").exists()


def test_changed_bytes_are_not_served(nxpipe: InProcess, place: Place) -> None:
    patch(Path("store") / blob_path(place.published.executables[0].blob))
    answer = nxpipe(*place.words, "--", *SERVER)
    assert answer.code == exit_codes.CORRUPT.number
    assert place.state is None
    assert not Path("served/manifest.json").exists()


def test_programs_for_another_target_are_not_served(nxpipe: InProcess, place: Place) -> None:
    place.metadata.values["instance-type"] = "trn1.2xlarge"
    answer = nxpipe(*place.words, "--", *SERVER)
    assert answer.code == exit_codes.NOT_READY.number
    assert "has programs for inf2, but a trn1.2xlarge runs those for trn1" in answer.err
    assert place.state is None


def test_programs_of_the_emulator_are_served_by_a_rehearsal_only(nxpipe: InProcess, place: Place) -> None:
    Path("nxpipe.toml").write_text(SERVERLESS.replace("rehearsal = true", ""))
    answer = nxpipe(*place.words, "--", *SERVER)
    assert answer.code == exit_codes.NOT_READY.number
    assert "has programs of backend emulator, which no Neuron device runs, and fleet search needs" in answer.err
    assert "build with --backend neuronx, or set rehearsal = true" in answer.err
    assert place.state is None


def test_programs_of_the_neuron_compiler_are_served_by_every_fleet(nxpipe: InProcess, place: Place) -> None:
    store = place.store.store
    compiled = publish_proven(store, put(store, request=2).model_copy(update={"backend": "neuronx"}))
    ChannelLog(place.store.backend, "devices").append(lambda _: first_generation("devices", [Served.of(compiled)]))
    Path("nxpipe.toml").write_text(SERVERLESS.replace("rehearsal = true", "").replace("production", "devices"))
    answer = nxpipe(*place.words)
    assert (answer.code, place.state) == (0, "InService"), answer.err


@pytest.mark.parametrize(
    ("waived", "said"),
    [
        ((), "has no evidence of kind device; on an instance with Neuron devices, run: nxpipe prove"),
        (("emulated",), "has no evidence of kind device"),
        (("device",), None),
    ],
)
def test_a_device_fleet_serves_what_has_evidence_of_devices_or_what_a_promotion_has_waived(
    nxpipe: InProcess, place: Place, waived: tuple[str, ...], said: str | None
) -> None:
    store = place.store.store
    compiled = publish_verified(store, put(store, request=2).model_copy(update={"backend": "neuronx"}))
    served = Served.of(compiled, without=waived)
    ChannelLog(place.store.backend, "devices").append(lambda _: first_generation("devices", [served]))
    Path("nxpipe.toml").write_text(SERVERLESS.replace("rehearsal = true", "").replace("production", "devices"))
    answer = nxpipe(*place.words)
    if said is None:
        assert (answer.code, place.state) == (0, "InService"), answer.err
    else:
        assert (answer.code, place.state) == (exit_codes.NOT_READY.number, None)
        assert f"of channel devices cannot be served: it {said}" in answer.err
        assert not Path("served").exists()


def test_evidence_that_is_too_far_off_or_of_another_artifact_starts_no_server(nxpipe: InProcess, place: Place) -> None:
    store, channel = place.store.store, ChannelLog(place.store.backend, "far")
    made = put(store, request=2)
    published = publish_verified(store, made, cosine=0.5)
    channel.append(lambda _: first_generation("far", [Served.of(published)]))
    Path("nxpipe.toml").write_text(SERVERLESS.replace("production", "far"))
    words = [word for word in place.words if word not in ("--hook", HOOK)]
    answer = nxpipe(*words)
    assert (answer.code, "logits cosine 0.5" in answer.err) == (exit_codes.NOT_READY.number, True), answer.err
    # A document below the path of another artifact is corrupt, whatever it says.
    good = evidence(store, place.published)
    place.store.write(good.path.replace(good.manifest, made.digest), good.to_bytes())
    assert nxpipe(*words).code == exit_codes.CORRUPT.number
    assert not Path("served").exists()


def test_a_channel_that_asks_for_signatures_is_not_believed_without_one(nxpipe: InProcess, place: Place) -> None:
    assert nxpipe("store", "keygen", "release.key").code == 0
    signing = (
        '[signing]\nrequire = ["production"]\n[[signing.trusted]]\nname = "release"\nkey = "file:release.key.pub"\n'
    )
    Path("nxpipe.toml").write_text(f"{SERVERLESS}{signing}")
    answer = nxpipe(*place.words, "--", *SERVER)
    assert answer.code == exit_codes.REFUSED.number, answer.err
    assert "generation 1 of channel production is not signed" in answer.err
    assert place.state is None


def test_a_file_that_this_version_does_not_understand_gives_the_instance_up(nxpipe: InProcess, place: Place) -> None:
    Path("nxpipe.toml").write_text(f"{SERVERLESS}[from-the-future]\n")
    assert nxpipe(*place.words).code == exit_codes.CONFIGURATION.number
    assert place.state is None


def test_during_a_rollout_an_instance_runs_what_its_colour_runs(nxpipe: InProcess, place: Place) -> None:
    store, candidate = (
        place.store.store,
        Served.of(publish_verified(place.store.store, put(place.store.store, request=2))),
    )
    ChannelLog(place.store.backend, "search--green").append(lambda _: first_generation("search--green", [candidate]))
    # Blue was never rolled out to: what the fleet's channel serves counts.
    assert nxpipe(*place.words).code == 0
    assert Path("served/manifest.json").read_bytes() == place.published.to_bytes()
    place.metadata.values["tags/instance/aws:autoscaling:groupName"] = "demo-search-green"
    words = [word for word in place.words if word not in ("--hook", HOOK)]
    assert nxpipe(*words).code == 0
    assert Path("served/manifest.json").read_bytes() == store.read_blob(candidate.manifest)


def test_a_fleet_with_a_shadow_phase_gives_its_server_a_control_file_and_needs_no_log_for_it(
    nxpipe: InProcess, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("nxpipe.toml").write_text(f"{SERVERLESS}[rollout.shadow]\npercent = 10.0\n")
    monkeypatch.setenv("NXPIPE_LOG", "/nxpipe/demo/search")  # which was deleted
    monkeypatch.setenv(CONTROL, "")
    answer = nxpipe(*place.words)
    assert (answer.code, place.state) == (0, "InService"), answer.err
    assert os.environ[CONTROL] == str(place.root / "shadow" / "control.json")
    assert json.loads(Path("shadow/control.json").read_text()) == {}


def test_a_colours_channel_is_believed_by_the_rules_of_the_fleets_and_never_passed_over(
    nxpipe: InProcess, place: Place
) -> None:
    """It serves the very same as the fleet's own, which would be believed."""
    served = Served.of(next(iter(place.store.store.list())))
    ChannelLog(place.store.backend, "search--blue").append(lambda _: first_generation("search--blue", [served]))
    assert nxpipe("store", "keygen", "release.key").code == 0
    path = Path("nxpipe.toml")
    path.write_text(f'{SERVERLESS}[signing]\nkey = "file:release.key"\nrequire = ["production"]\n')
    assert nxpipe("store", "sign", served.name).code == 0
    answer = nxpipe(*place.words)
    assert answer.code == exit_codes.REFUSED.number
    assert "generation 1 of channel search--blue is not signed" in answer.err
    assert place.state is None


def test_a_server_that_is_not_installed_is_noticed_before_the_instance_is_in_service(
    nxpipe: InProcess, place: Place
) -> None:
    answer = nxpipe(*place.words, "--", "no-such-server")
    assert answer.code == exit_codes.NOT_READY.number
    assert "no program 'no-such-server'" in answer.err
    assert place.state is None


def test_an_empty_channel_gives_the_instance_up(nxpipe: InProcess, place: Place) -> None:
    Path("nxpipe.toml").write_text(SERVERLESS.replace("production", "experiments"))
    assert nxpipe(*place.words).code == exit_codes.NOT_FOUND.number
    assert place.state is None


def test_outside_of_ec2_the_agent_says_what_it_misses(
    nxpipe: InProcess, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")
    answer = nxpipe(*place.words)
    assert answer.code == exit_codes.NOT_READY.number
    assert "instance metadata service at http://127.0.0.1:9 does not answer" in answer.err
    assert place.state == "Pending:Wait"


def test_a_hook_without_a_group_to_tell_is_an_error(nxpipe: InProcess, place: Place) -> None:
    del place.metadata.values["tags/instance/aws:autoscaling:groupName"]
    answer = nxpipe(*place.words)
    assert answer.code == exit_codes.NOT_READY.number
    assert "must allow instance tags in the metadata" in answer.err


def test_a_fleet_that_the_file_does_not_have_is_a_wrong_word(nxpipe: InProcess, place: Place) -> None:
    answer = nxpipe("agent", "run", "--fleet", "serch", "--devices", "dev")
    assert answer.code == exit_codes.USAGE.number
    assert "did you mean 'search'" in answer.err


def test_what_runs_on_an_instance_imports_neither_numpy_nor_torch(place: Place) -> None:
    script = (
        "import sys, json\nfrom nxpipe.pipeline.cli.main import cli\nfrom nxpipe.pipeline.util.console import Console\n"
        f"cli.main({place.words!r}, obj=Console(), standalone_mode=False)\n"
        "print(json.dumps([name for name in ('numpy', 'torch', 'transformers', 'boto3') if name in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=place.root)
    assert json.loads(done.stdout.splitlines()[-1]) == []
    assert MODEL in Path("served/manifest.json").read_text()
