"""What a deployment has to know of a place, beyond what a build does."""

from pathlib import Path

import pytest

from nxpipe.pipeline.config.load import check_placement, has_network, load, read_source, zones_of
from nxpipe.pipeline.config.messages import ConfigInvalid
from nxpipe.pipeline.config.root import Config

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
    return [str(source.fault(entry)).removeprefix(f"{folder}/") for entry in check_placement(load(source))]


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
            "nxpipe.toml:1: project.region: found nothing; expected a region; the subnets of the fleets are in its "
            "zones",
        ),
        (
            HERE + '[network]\nkind = "nat"\nzones = ["us-east-2b", "eu-west-1a"]\n',
            'nxpipe.toml:6: network.zones[1]: found "eu-west-1a"; expected a zone of us-east-2, the region of the '
            "project",
        ),
        (
            HERE + '[network]\nkind = "closed"\nzones = ["us-east-2a", "us-east-2c"]\n',
            'nxpipe.toml:21: fleets[0].zone: found "us-east-2b"; expected a zone that has a subnet: us-east-2a, '
            "us-east-2c (network.zones)",
        ),
        (
            HERE + EXISTING,
            'nxpipe.toml:10: network.subnets[1].zone: found "us-east-2b"; expected a zone that is not listed yet',
        ),
    ],
)
def test_a_place_that_cannot_be_is_told_in_one_sentence(tmp_path: Path, head: str, fault: str) -> None:
    assert told(tmp_path, head + MODEL + FLEET) == [fault]


def test_a_serving_fleet_has_a_subnet_in_its_zone(tmp_path: Path) -> None:
    serving = """
[[fleets]]
kind = "serving"
name = "search"
model = "bert"
channel = "production"
instance_types = ["trn1.32xlarge"]
zone = "us-east-2c"
capacity = { kind = "reservation", id = "cr-0a1b2c3d", instances = 4 }
size = { min = 1, max = 2 }
"""
    (fault,) = told(tmp_path, HERE + MODEL + serving)
    assert 'fleets[0].zone: found "us-east-2c"; expected a zone that has a subnet' in fault
    listed = '[network]\nkind = "closed"\nzones = ["us-east-2c", "us-east-2b"]\n'
    assert told(tmp_path, HERE + listed + MODEL + serving) == []


ENDPOINT = f"""
[[endpoints]]
name = "a-name-of-forty-letters-is-a-long-one-ok"
model = "bert"
artifact = "{"0" * 64}"
image = "123456789012.dkr.ecr.us-west-2.amazonaws.com/serve@sha256:{"0" * 64}"
instance_type = "ml.trn1.32xlarge"
instances = 1
shift = {{ kind = "all-at-once", bake = "10m" }}
"""


def test_an_endpoint_has_a_name_and_an_image_that_sagemaker_takes(tmp_path: Path) -> None:
    long = HERE.replace("demo", "a-project-of-thirty-letters-or")
    name, image = told(tmp_path, long + MODEL + ENDPOINT)
    assert "endpoints[0].name" in name
    assert "expected at most 32 characters" in name
    assert "expected an image in ECR of us-east-2" in image
    here = ENDPOINT.replace("us-west-2", "us-east-2")
    assert told(tmp_path, HERE + MODEL + here) == []
    assert has_network(configured(tmp_path, HERE + MODEL + here))


def test_a_channel_that_jobs_release_to_has_no_more_fleets_than_a_role_has_policies(tmp_path: Path) -> None:
    serving = FLEET.replace('"training"', '"serving"').replace("nodes = 2", "size = { min = 1, max = 2 }")
    serving = serving.replace('zone = "us-east-2b"\n', "")
    release = '[release]\nrepository = "example/models"\n'
    fleets = [serving.replace('"tune"', f'"fleet{number}"') for number in range(10)]
    assert told(tmp_path, HERE + release + MODEL + "".join(fleets[:9])) == []
    assert told(tmp_path, HERE + MODEL + "".join(fleets)) == []
    (fault,) = told(tmp_path, HERE + release + MODEL + "".join(fleets))
    assert "fleets[9].channel" in fault
    assert "at most 9 serving fleets" in fault


def test_a_release_signs_with_a_key_that_cannot_become_another(tmp_path: Path) -> None:
    release = '[release]\nrepository = "example/models"\n'
    key = '[signing]\nkey = "kms:arn:aws:kms:us-east-2:123456789012:key/1a2b"\n'
    assert told(tmp_path, PROJECT + release + key) == []
    (fault,) = told(tmp_path, PROJECT + release + key.replace("key/1a2b", "alias/release"))
    assert "signing.key" in fault
    assert "the IAM role of releases is limited to it" in fault
    assert told(tmp_path, PROJECT + key.replace("key/1a2b", "alias/release")) == []


SERVING = """
[[fleets]]
kind = "serving"
name = "search"
model = "bert"
channel = "production"
instance_types = ["trn1.32xlarge"]
capacity = { kind = "on-demand" }
size = { min = 1, max = 2 }
compile_cache = "s3://BUCKET/neuron"
"""


def test_instances_do_not_write_their_compile_cache_into_the_stores_bucket(tmp_path: Path) -> None:
    text = HERE + '[store]\nurl = "s3://artifacts/models"\n' + MODEL + SERVING
    (line,) = told(tmp_path, text.replace("BUCKET", "artifacts"))
    assert "fleets[0].compile_cache" in line
    assert "a prefix in another bucket than the store's" in line
    assert told(tmp_path, text.replace("BUCKET", "my-caches")) == []


def test_a_compile_cache_is_in_s3(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="s3://BUCKET/PREFIX"):
        configured(tmp_path, HERE + MODEL + SERVING.replace("s3://BUCKET", "/mnt/efs"))
