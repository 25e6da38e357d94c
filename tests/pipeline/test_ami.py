"""`nxpipe ami lock`: the selection of an image, and the content of the file."""

from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from botocore.session import Session
from botocore.stub import Stubber

from nxpipe.pipeline.config import ConfigInvalid, TrainingFleet, load_config
from nxpipe.pipeline.config.cloud import Amis
from nxpipe.pipeline.config.locks import (
    FLEETS_PARAMETER,
    TRAINING_PARAMETER,
    AmiLock,
    LockedImage,
    read_lock,
    require_driver,
)
from nxpipe.pipeline.fleet.infrastructure import find_image, find_own_image, find_training_host
from nxpipe.pipeline.util.errors import AwsError
from nxpipe.pipeline.util.exit_codes import AWS, CONFIGURATION
from nxpipe.stacks.app import main
from nxpipe.stacks.locks import (
    fleet_image,
    fleet_python,
    fleet_root_device,
    known_images,
    lock_of,
    training_image,
    unlocked_images,
)
from tests.pipeline.in_process import InProcess, nxpipe
from tests.stacks.local import new_app

__all__ = ["nxpipe"]

REGION = "us-east-2"
TOML = f'[project]\nname = "search"\nregion = "{REGION}"\n[amis]\nsdk = ["2.32.0"]\n'


def image(id_: str, sdk: str, created: str, **more: str) -> dict[str, str]:
    return {
        "ImageId": id_,
        "Name": f"Deep Learning AMI Neuron (Ubuntu 24.04) {created[:10].replace('-', '')}",
        "Description": f"PyTorch, JAX. Neuron SDK {sdk}. Supported EC2 instances: Inf2, Trn1, Trn1n, Trn2.",
        "CreationDate": created,
        **more,
    }


NEWEST = image("ami-00000000000000003", "2.33.0", "2026-10-20T08:00:00.000Z")
OLD = image("ami-00000000000000001", "2.32.0", "2026-08-20T08:00:00.000Z")
MENDED = image(
    "ami-00000000000000002", "2.32.0", "2026-09-01T08:00:00.000Z", DeprecationTime="2028-08-31T08:00:00.000Z"
)
OTHER = image("ami-00000000000000004", "2.32.0.1", "2026-11-01T08:00:00.000Z")


class Amazon:
    """Fakes of EC2 and SSM with fixed responses, which check each request by the SDK's own model."""

    def __init__(
        self, found: list[dict[str, str]], newest: dict[str, str] = NEWEST, parameter: str = FLEETS_PARAMETER
    ) -> None:
        self.clients: dict[str, Any] = {}
        for service in ("ec2", "ssm"):
            session = Session()
            session.set_credentials("test", "test")
            self.clients[service] = session.create_client(service, region_name=REGION)
        self.ec2, self.ssm = Stubber(self.clients["ec2"]), Stubber(self.clients["ssm"])
        self.ssm.add_response("get_parameter", {"Parameter": {"Value": newest["ImageId"]}}, {"Name": parameter})
        self.ec2.add_response("describe_images", {"Images": [newest]}, {"ImageIds": [newest["ImageId"]]})
        self.ec2.add_response("describe_images", {"Images": found})
        for stubber in (self.ec2, self.ssm):
            stubber.activate()

    def __call__(self, service: str, region: str) -> Any:
        assert region == REGION
        return self.clients[service]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "nxpipe.toml").write_text(TOML)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_newest_image_is_taken_when_it_holds_the_wanted_version() -> None:
    chosen = find_image(REGION, "2.33.0", Amazon([]))
    assert (chosen.id, chosen.source) == (NEWEST["ImageId"], FLEETS_PARAMETER)
    assert chosen.created == date(2026, 10, 20)


def test_another_version_is_searched_for_and_its_newest_image_taken() -> None:
    chosen = find_image(REGION, "2.32.0", Amazon([MENDED, OLD, OTHER]))
    assert chosen.id == MENDED["ImageId"]
    assert chosen.source == "DescribeImages *Neuron SDK 2.32.0*"


def test_an_image_expires_when_ec2_deprecates_it_which_is_two_years_if_it_does_not_say() -> None:
    assert find_image(REGION, "2.32.0", Amazon([MENDED])).expires == date(2028, 8, 31)
    assert find_image(REGION, "2.32.0", Amazon([OLD])).expires == date(2028, 8, 19)


def test_a_version_that_no_image_holds_is_told_with_the_one_that_there_is() -> None:
    with pytest.raises(AwsError, match=r"no image of Neuron SDK 2\.32\.0; .* SDK 2\.33\.0.*set `sdk` in \[amis\]"):
        find_image(REGION, "2.32.0", Amazon([OTHER]))


def test_what_aws_refuses_is_one_sentence() -> None:
    amazon = Amazon([])
    amazon.clients["ssm"] = Session().create_client("ssm", region_name=REGION)
    with pytest.raises(
        AwsError,
        match=r"no AWS credentials found, .* the parameter .* in us-east-2; set AWS_PROFILE",
    ):
        find_image(REGION, "2.32.0", amazon)


def test_the_python_of_the_image_is_locked_too_since_the_agent_is_made_for_it() -> None:
    chosen = find_image(REGION, "2.33.0", Amazon([]))
    assert (chosen.python, chosen.glibc) == ("3.12", "2.39")
    older = {**NEWEST, "Name": "Deep Learning AMI Neuron (Ubuntu 22.04) 20261020"}
    assert find_image(REGION, "2.33.0", Amazon([], older)).python == "3.10"


def test_an_image_of_an_unknown_system_is_refused_since_its_python_is_unknown() -> None:
    unknown = {**NEWEST, "Name": "Deep Learning AMI Neuron (Ubuntu 26.04) 20261020"}
    with pytest.raises(AwsError, match=r"names no operating system whose Python nxpipe knows .*Ubuntu 24\.04"):
        find_image(REGION, "2.33.0", Amazon([], unknown))


LOCKED = LockedImage(
    region=REGION,
    sdk="2.32.0",
    id="ami-00000000000000002",
    name='Deep "Learning" AMI \\ Neuron',
    created=date(2026, 9, 1),
    expires=date(2028, 8, 31),
    source=FLEETS_PARAMETER,
    python="3.12",
    glibc="2.39",
)


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    path = tmp_path / "nxpipe.amis.lock"
    written = AmiLock(path).with_images([LOCKED], ["2.32.0"])
    path.write_text(written.text())
    assert read_lock(path) == written


def test_a_region_that_was_not_asked_for_keeps_its_images_and_a_version_out_of_use_goes(tmp_path: Path) -> None:
    elsewhere = LOCKED.model_copy(update={"region": "eu-west-1"})
    outdated = LOCKED.model_copy(update={"region": "eu-west-1", "sdk": "2.31.0"})
    newer = LOCKED.model_copy(update={"id": "ami-00000000000000009"})
    before = AmiLock(tmp_path / "lock", (LOCKED, outdated, elsewhere))
    assert before.with_images([newer], ["2.32.0"]).images == (elsewhere, newer)


def test_an_image_that_is_not_locked_is_the_parameter_that_the_command_reads(project: Path) -> None:
    config = load_config(project / "nxpipe.toml", {})
    lock = lock_of(config, project)
    assert fleet_image(config, lock) == f"{{{{resolve:ssm:{FLEETS_PARAMETER}}}}}"
    assert training_image(config, lock) == f"{{{{resolve:ssm:{TRAINING_PARAMETER}}}}}"
    assert unlocked_images(config, lock) == {fleet_image(config, lock), training_image(config, lock)}


@pytest.mark.parametrize("broken", ["[[image]\n", '[[image]]\nid = "ami-1"\n', "images = 3\n"])
def test_a_file_that_was_written_by_hand_is_told_by_its_name(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "nxpipe.amis.lock"
    path.write_text(broken)
    with pytest.raises(ConfigInvalid, match=r"nxpipe\.amis\.lock: .*run it again"):
        read_lock(path)


def test_the_command_writes_the_file_that_the_stacks_read(
    project: Path, nxpipe: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nxpipe.pipeline.util.aws.client", Amazon([MENDED]))
    answer = nxpipe("ami", "lock")
    assert answer.code == 0, answer.err
    assert MENDED["ImageId"] in answer.out
    config = load_config(project / "nxpipe.toml", {})
    lock = lock_of(config, project)
    assert fleet_image(config, lock) == MENDED["ImageId"]
    assert known_images(lock)[MENDED["ImageId"]].region == REGION
    assert not list(project.glob(".*.new"))


def test_a_project_that_trains_gets_an_image_for_its_hosts(tmp_path: Path) -> None:
    host = image("ami-0000000000000000a", "2.33.0", "2026-10-25T08:00:00.000Z")
    amazon = Amazon([], newest=host, parameter=TRAINING_PARAMETER)
    chosen = find_training_host(REGION, amazon)
    assert (chosen.id, chosen.sdk) == (host["ImageId"], None)
    lock = AmiLock(tmp_path / "lock").with_images([chosen, LOCKED], ["2.32.0"])
    lock.path.write_text(lock.text())
    found = read_lock(lock.path)
    assert (found.image(REGION, None), found.image(REGION, "2.32.0")) == (chosen, LOCKED)


def host_built(created: str, among: list[dict[str, str]]) -> LockedImage:
    named = {"Name": "al2023-ami-ecs-neuron-hvm", "Description": "Amazon Linux AMI 2023 x86_64 ECS HVM EBS"}
    host = image("ami-0000000000000000a", "", created) | named
    return find_training_host(REGION, Amazon(among, newest=host, parameter=TRAINING_PARAMETER))


def test_the_driver_of_a_training_host_is_at_least_of_the_newest_sdk_that_is_older_than_its_image(
    tmp_path: Path,
) -> None:
    rebuilt = image("ami-00000000000000005", "2.32.0", "2026-10-22T08:00:00.000Z")
    assert host_built("2026-10-25T08:00:00.000Z", [OLD, NEWEST, rebuilt]).driver == "2.33.0"
    assert host_built("2026-09-25T08:00:00.000Z", [OLD, NEWEST, rebuilt]).driver == "2.32.0"
    assert host_built("2026-07-25T08:00:00.000Z", [OLD, NEWEST]).driver is None
    lock = AmiLock(tmp_path / "lock").with_images([host_built("2026-10-25T08:00:00.000Z", [NEWEST])], [])
    lock.path.write_text(lock.text())
    assert read_lock(lock.path) == lock


TRAINS = """
[[models]]
name = "llama"
path = "llama"
task = "text-generation"
target = "trn1.2xlarge"
[[fleets]]
kind = "training"
name = "tune"
model = "llama"
channel = "next"
instance_types = ["trn1.2xlarge"]
zone = "us-east-2a"
capacity = { kind = "on-demand" }
nodes = 1
"""


@pytest.mark.parametrize(
    ("driver", "sdk", "refusal"),
    [
        ("2.32.0", None, None),
        ("2.33.0", "2.9.0", None),
        ("2.32", "2.32.0", None),
        ("2.31.0", None, r"the driver of Neuron SDK 2\.31\.0.*SDK 2\.32\.0 or newer.*fleet tune.*ami lock"),
        ("2.9.0", "2.31.0", r"the driver of Neuron SDK 2\.9\.0.*SDK 2\.31\.0 or newer"),
        (None, None, None),
        (None, "2.32.0", r"no driver of ami-.*run it again"),
    ],
)
def test_a_host_whose_driver_is_older_than_the_sdk_of_the_container_is_refused(
    project: Path, driver: str | None, sdk: str | None, refusal: str | None
) -> None:
    path = project / "nxpipe.toml"
    path.write_text(TOML + TRAINS + (f'sdk = "{sdk}"\n' if sdk else ""))
    config = load_config(path, {})
    (fleet,) = config.fleets
    assert isinstance(fleet, TrainingFleet)
    host = LOCKED.model_copy(update={"sdk": None, "driver": driver})
    with pytest.raises(ConfigInvalid, match=refusal) if refusal else nullcontext():
        require_driver(config, AmiLock(project / "nxpipe.amis.lock", (host,)), fleet)


def test_the_app_refuses_a_host_whose_driver_is_too_old_before_it_makes_a_stack(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "nxpipe.toml").write_text(TOML + TRAINS)
    host = LOCKED.model_copy(update={"sdk": None, "driver": "2.31.0"})
    (project / "nxpipe.amis.lock").write_text(AmiLock(project, (host,)).text())
    assert main(new_app({"config": str(project / "nxpipe.toml")})) == CONFIGURATION.number
    assert "the driver of Neuron SDK 2.31.0" in capsys.readouterr().err


def test_without_a_region_the_command_asks_for_one(project: Path, nxpipe: InProcess) -> None:
    (project / "nxpipe.toml").write_text('[project]\nname = "search"\n')
    answer = nxpipe("ami", "lock")
    assert answer.code == 2
    assert "--region" in answer.err


# An image of the team's own

TEAM = "123456789012"
OWN: dict[str, Any] = {
    "ImageId": "ami-0000000000000000b",
    "Name": "search-serving-41",
    "OwnerId": TEAM,
    "State": "available",
    "Architecture": "x86_64",
    "VirtualizationType": "hvm",
    "RootDeviceType": "ebs",
    "RootDeviceName": "/dev/xvda",
    "BlockDeviceMappings": [
        {"DeviceName": "/dev/sdb", "VirtualName": "ephemeral0"},
        {"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": 120}},
    ],
    "CreationDate": "2026-10-30T08:00:00.000Z",
    "SourceImageId": NEWEST["ImageId"],
    "SourceImageRegion": REGION,
}
OWN_TOML = f'{TOML}image = "{OWN["ImageId"]}"\nowner = "self"\n'


def amis(**more: str) -> Amis:
    return Amis.model_validate({"image": OWN["ImageId"], "owner": "self", **more})


def team(*images: dict[str, Any]) -> Amazon:
    """AWS with these images, in the order of the calls; the account of the credentials is the team's."""
    aws = Amazon([])
    session = Session()
    session.set_credentials("test", "test")
    for service in ("ec2", "sts"):
        aws.clients[service] = session.create_client(service, region_name=REGION)
    ec2, sts = Stubber(aws.clients["ec2"]), Stubber(aws.clients["sts"])
    for found in images:
        expected = {"ImageIds": [found["ImageId"]], "IncludeDeprecated": True}
        ec2.add_response("describe_images", {"Images": [found]}, expected)
    if not images:
        ec2.add_client_error("describe_images", "InvalidAMIID.NotFound", "The image id does not exist")
    sts.add_response("get_caller_identity", {"Account": TEAM})
    ec2.activate()
    sts.activate()
    return aws


def test_an_own_image_is_locked_with_the_software_of_its_base_and_takes_the_place_of_the_public_one(
    project: Path, nxpipe: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "nxpipe.toml").write_text(OWN_TOML)
    monkeypatch.setattr("nxpipe.pipeline.util.aws.client", team(OWN, NEWEST))
    answer = nxpipe("ami", "lock")
    assert answer.code == 0, answer.err
    assert "never" in answer.out  # its owner set no deprecation date
    config = load_config(project / "nxpipe.toml", {})
    lock = lock_of(config, project)
    (locked,) = lock.images
    assert (locked.id, locked.name, locked.created, locked.expires) == (
        OWN["ImageId"],
        "search-serving-41",
        date(2026, 10, 30),
        None,
    )
    assert (locked.owner, locked.architecture, locked.virtualization) == (TEAM, "x86_64", "hvm")
    assert (locked.root_device, locked.root_gib, locked.glibc) == ("/dev/xvda", 120, "2.39")
    assert (fleet_image(config, lock), fleet_root_device(config, lock)) == (OWN["ImageId"], "/dev/xvda")
    assert fleet_python(config, lock) == "3.12"
    assert fleet_image(config, lock) not in unlocked_images(config, lock)


def test_the_software_of_an_own_image_may_be_given() -> None:
    chosen = find_own_image(REGION, amis(python="3.13", glibc="2.41"), team(OWN))
    assert (chosen.python, chosen.glibc) == ("3.13", "2.41")
    named = OWN | {"Name": "search on Ubuntu 22.04"}
    assert find_own_image(REGION, amis(), team(named)).python == "3.10"
    plain = {key: value for key, value in OWN.items() if not key.startswith("Source")}
    with pytest.raises(AwsError, match="set `python` and `glibc` in"):
        find_own_image(REGION, amis(), team(plain))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"OwnerId": "210987654321"}, r"is owned by 210987654321, not by self \(account 123456789012\)"),
        ({"State": "pending"}, "has the state pending, but serving fleets need available"),
        ({"Architecture": "arm64"}, "has the architecture arm64, but serving fleets need x86_64"),
        ({"VirtualizationType": "paravirtual"}, "has the virtualization type paravirtual, but .* need hvm"),
        ({"RootDeviceType": "instance-store"}, "has the root device type instance-store, but .* need ebs"),
    ],
)
def test_an_image_from_which_serving_instances_cannot_start_is_refused(change: dict[str, str], fault: str) -> None:
    with pytest.raises(AwsError, match=f"image ami-0000000000000000b {fault}.* correct `image`.* in .amis.") as refused:
        find_own_image(REGION, amis(), team(OWN | change, NEWEST))
    assert "\n" not in str(refused.value)


def test_an_image_that_does_not_exist_is_refused_and_the_lock_file_stays(
    project: Path, nxpipe: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "nxpipe.toml").write_text(OWN_TOML)
    monkeypatch.setattr("nxpipe.pipeline.util.aws.client", team())
    answer = nxpipe("ami", "lock")
    assert answer.code == AWS.number
    assert "us-east-2 has no image ami-0000000000000000b that these credentials can see" in answer.err
    assert not (project / "nxpipe.amis.lock").exists()


def test_an_image_of_amazon_may_be_named_such_as_the_base_image_of_neuron() -> None:
    base = OWN | {"OwnerId": "898082745236", "ImageOwnerAlias": "amazon"}
    assert find_own_image(REGION, amis(owner="amazon"), team(base, NEWEST)).owner == "amazon"
    with pytest.raises(AwsError, match="is owned by amazon, not by self"):
        find_own_image(REGION, amis(), team(base, NEWEST))


def test_an_image_that_another_one_replaced_in_the_configuration_is_no_longer_the_locked_one(project: Path) -> None:
    old = LOCKED.model_copy(update={"owner": TEAM, "id": "ami-0000000000000000a", "root_device": "/dev/xvda"})
    for lock in (AmiLock(project / "lock", (LOCKED,)), AmiLock(project / "lock", (old,))):
        (project / "nxpipe.toml").write_text(OWN_TOML)
        config = load_config(project / "nxpipe.toml", {})
        assert fleet_image(config, lock) == OWN["ImageId"]
        assert OWN["ImageId"] in unlocked_images(config, lock)
    (project / "nxpipe.toml").write_text(TOML)
    config = load_config(project / "nxpipe.toml", {})
    assert fleet_image(config, lock) == f"{{{{resolve:ssm:{FLEETS_PARAMETER}}}}}"
    assert fleet_root_device(config, lock) == "/dev/sda1"


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        (f'image = "{OWN["ImageId"]}"', "both of image and owner"),
        (f'image = "{OWN["ImageId"]}"\nowner = "self"\npython = "3.12"', "both of python and glibc"),
        ('python = "3.12"\nglibc = "2.39"', "only beside the image"),
        (f'image = "{OWN["ImageId"]}"\nowner = "me"', '"self", "amazon", or an AWS account'),
    ],
)
def test_an_image_is_named_with_its_owner(project: Path, keys: str, fault: str) -> None:
    (project / "nxpipe.toml").write_text(f"{TOML}{keys}\n")
    with pytest.raises(ConfigInvalid, match=fault):
        load_config(project / "nxpipe.toml", {})
