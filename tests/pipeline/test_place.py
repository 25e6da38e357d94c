"""What a deployment has to know of a place, beyond what a build does."""

from pathlib import Path

import pytest

from pipeline.config.load import load, read_source
from pipeline.config.place import has_network, misplaced, zones_of
from pipeline.config.root import Config

MODEL = """
[[models]]
name = "bert"
id = "bert-base-uncased"
task = "fill-mask"
buckets = [128]
target = "trn1.32xlarge"
"""
FLEET = """
[[fleets]]
kind = "training"
name = "tune"
model = "bert"
channel = "production"
instance_types = ["trn1.32xlarge"]
zone = "us-east-2b"
nodes = 2
capacity = { kind = "on-demand" }
"""
PROJECT = '[project]\nname = "demo"\n'
HERE = PROJECT + 'region = "us-east-2"\n'


def configured(folder: Path, text: str) -> Config:
    path = folder / "nxpipe.toml"
    path.write_text(text)
    return load(read_source(path, {}))


def told(folder: Path, text: str) -> list[str]:
    path = folder / "nxpipe.toml"
    path.write_text(text)
    source = read_source(path, {})
    return [str(source.fault(each)).removeprefix(f"{folder}/") for each in misplaced(load(source))]


def test_a_project_that_only_keeps_artifacts_needs_no_place(tmp_path: Path) -> None:
    assert told(tmp_path, PROJECT) == []
    assert not has_network(configured(tmp_path, PROJECT))


def test_fleets_are_in_the_first_two_zones_of_their_region_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    config = configured(tmp_path, HERE + MODEL + FLEET)
    assert has_network(config)
    assert zones_of(config) == ("us-east-2a", "us-east-2b")
    listed = '[network]\nkind = "closed"\nzones = ["us-east-2c", "us-east-2b"]\n'
    assert zones_of(configured(tmp_path, HERE + listed + MODEL + FLEET)) == ("us-east-2c", "us-east-2b")
    assert told(tmp_path, HERE + listed + MODEL + FLEET) == []


EXISTING = """[network]
kind = "existing"
vpc = "vpc-0a1b2c3d4e5f60718"
cidr = "10.0.0.0/8"
subnets = [
  { zone = "us-east-2b", id = "subnet-0a1b2c3d4e5f60718" },
  { zone = "us-east-2b", id = "subnet-0a1b2c3d4e5f60719" },
]
"""


@pytest.mark.parametrize(
    ("head", "fault"),
    [
        (
            PROJECT,
            "nxpipe.toml:1: project.region: found nothing; expected a region, for the subnets of the fleets are in its "
            "zones",
        ),
        (
            HERE + '[network]\nkind = "nat"\nzones = ["us-east-2b", "eu-west-1a"]\n',
            'nxpipe.toml:6: network.zones[1]: found "eu-west-1a"; expected a zone of us-east-2, which is the region of '
            "the project",
        ),
        (
            HERE + '[network]\nkind = "closed"\nzones = ["us-east-2a", "us-east-2c"]\n',
            'nxpipe.toml:21: fleets[0].zone: found "us-east-2b"; expected a zone that has a subnet: us-east-2a, '
            "us-east-2c (network.zones)",
        ),
        (
            HERE + EXISTING,
            'nxpipe.toml:10: network.subnets[1].zone: found "us-east-2b"; expected another zone: this one has a subnet '
            "already",
        ),
    ],
)
def test_a_place_that_cannot_be_is_told_in_one_sentence(tmp_path: Path, head: str, fault: str) -> None:
    assert told(tmp_path, head + MODEL + FLEET) == [fault]
