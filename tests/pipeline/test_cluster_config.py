"""The table [cluster]: configurations that EKS would refuse are errors, each with one sentence."""

from pathlib import Path

import pytest

from nxpipe.pipeline.config import ConfigInvalid, load_config
from nxpipe.pipeline.config.load import check_placement, has_network

GROUP = """
[[cluster.groups]]
name = "train"
instance_type = "trn1.32xlarge"
zone = "us-east-2b"
capacity = { kind = "on-demand" }
size = { min = 0, max = 4 }
"""
BLOCK = (
    '{ kind = "capacity-block", id = "cr-0a1b2c3d4e5f60718", start = 2027-11-01T11:30:00Z, end = 2027-11-08T11:30:00Z }'
)
CLUSTER = f"""
[project]
name = "search"
region = "us-east-2"
[cluster]
kubernetes = "1.34"
admins = ["arn:aws:iam::123456789012:role/platform"]
{GROUP}"""
ON_DEMAND = '{ kind = "on-demand" }'
SIZE = "{ min = 0, max = 4 }"
REGISTRY = "123456789012.dkr.ecr.us-east-2.amazonaws.com"


def faults(folder: Path, text: str) -> list[str]:
    """The errors of a file, including those checked at deployment only."""
    path = folder / "nxpipe.toml"
    path.write_text(text)
    try:
        config = load_config(path, {})
    except ConfigInvalid as invalid:
        return [f"{fault.key}: {fault.found} | {fault.allowed}" for fault in invalid.faults]
    return [f"{'.'.join(map(str, entry.path))}: {entry.found} | {entry.allowed}" for entry in check_placement(config)]


def test_a_cluster_of_its_own_is_complete_and_has_a_network(tmp_path: Path) -> None:
    assert faults(tmp_path, CLUSTER) == []
    config = load_config(tmp_path / "nxpipe.toml", {})
    assert config.cluster is not None
    assert has_network(config)
    (group,) = config.cluster.groups
    assert (group.efa, group.near, config.cluster.public) == (True, True, None)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('kubernetes = "1.34"', "kubernetes = 1.34", "cluster.kubernetes: 1.34 | a version of Kubernetes"),
        ("role/platform", "user/somebody", "cluster.admins[0]:"),
        ("[[cluster.groups]]", 'public = ["0.0.0.0/0"]\n[[cluster.groups]]', "not the whole internet"),
        ('"train"', '"system"', "another name; system is the group of system nodes"),
        (GROUP, GROUP + GROUP, '2 groups called "train" | groups with unique names'),
        ('"trn1.32xlarge"', '"m7i.large"', "cluster.groups[0].instance_type:"),
        ('"trn1.32xlarge"', '"trn1.2xlarge"\n', ""),
        (ON_DEMAND, '{ kind = "on-demand", warm_pool = { min = 1 } }', "cluster.groups[0].capacity.warm_pool:"),
        (ON_DEMAND, BLOCK, ""),
        (f"{ON_DEMAND}\nsize = {SIZE}", f"{BLOCK}\nsize = {{ min = 1, max = 4 }}", "run while the block lasts"),
        (f"{ON_DEMAND}\nsize = {SIZE}", f"{BLOCK}\nsize = {{ min = 0, max = 0 }}", "run while the block lasts"),
        ('"us-east-2b"', '"us-east-2c"', "cluster.groups.0.zone"),
        ("[cluster]", '[network]\nkind = "closed"\nzones = ["us-east-2b"]\n[cluster]', "two zones in network.zones"),
        ('region = "us-east-2"', "", "a region; the subnets"),
    ],
)
def test_what_eks_would_refuse_is_refused_in_one_sentence(old: str, new: str, said: str, tmp_path: Path) -> None:
    assert old in CLUSTER
    found = faults(tmp_path, CLUSTER.replace(old, new))
    assert (len(found) == 1 and said in found[0]) if said else found == [], found


@pytest.mark.parametrize(
    ("type_", "capacity", "said"),
    [
        ("inf2.xlarge", BLOCK, "EC2 sells capacity blocks of"),
        ("trn2u.48xlarge", '{ kind = "spot" }', "EC2 sells no trn2u.48xlarge on the spot market"),
        ("inf2.xlarge", '{ kind = "on-demand", placement = "cluster" }', "has no Elastic Fabric Adapter, which"),
        ("inf2.xlarge", '{ kind = "spot" }', ""),
    ],
)
def test_a_pair_that_ec2_refuses_is_refused(type_: str, capacity: str, said: str, tmp_path: Path) -> None:
    found = faults(tmp_path, CLUSTER.replace("trn1.32xlarge", type_).replace(ON_DEMAND, capacity))
    assert (len(found) == 1 and said in found[0]) if said else found == [], found


def test_images_are_in_a_registry_of_ecr_by_a_tag_and_efa_asks_for_its_plugin(tmp_path: Path) -> None:
    images = "".join(f'{key} = "{REGISTRY}/{key}:1"\n' for key in ("device_plugin", "scheduler_extension", "scheduler"))
    (fault,) = faults(tmp_path, f"{CLUSTER}[cluster.images]\n{images}")
    assert "efa_plugin as well; pods of group train" in fault
    whole = f'{CLUSTER}[cluster.images]\n{images}efa_plugin = "{REGISTRY}/efa:1"\n'
    assert faults(tmp_path, whole) == []
    assert len(faults(tmp_path, whole.replace("efa:1", f"efa@sha256:{'0' * 64}"))) == 1
    assert len(faults(tmp_path, whole.replace(f"{REGISTRY}/efa:1", "public.ecr.aws/neuron/efa:1"))) == 1
