"""The files of a project with every feature."""

import json
from pathlib import Path
from typing import Final

from nxpipe.pipeline.config.locks import ADDONS, ClusterLock, LockedNodes

CERTIFICATE: Final = "arn:aws:acm:us-east-2:123456789012:certificate/0a1b2c3d"
WHOLE: Final = f"""\
[project]
name = "demo"
region = "us-east-2"

[[models]]
name = "bert"
id = "bert-base-uncased"
task = "fill-mask"
buckets = [128]
target = "inf2.xlarge"

[[models]]
name = "llama"
id = "acme/llama"
task = "text-generation"
buckets = [128]
target = "trn1.32xlarge"

[[fleets]]
kind = "serving"
name = "search"
model = "bert"
channel = "production"
instance_types = ["inf2.xlarge"]
capacity = {{ kind = "on-demand", warm_pool = {{ min = 1 }} }}
size = {{ min = 1, desired = 2, max = 4 }}
scaling = {{ requests_per_target = 600 }}
command = ["python", "-m", "server"]
certificate = "{CERTIFICATE}"
standby = {{ instance_type = "g5.xlarge", image = "ami-0123456789abcdef0", size = {{ min = 1, max = 2 }} }}

[[fleets]]
kind = "training"
name = "tune"
model = "llama"
channel = "production"
instance_types = ["trn1.32xlarge"]
zone = "us-east-2b"
nodes = 2
capacity = {{ kind = "on-demand" }}
image = "123456789012.dkr.ecr.us-east-2.amazonaws.com/train@sha256:{"0" * 64}"

[[fleets]]
kind = "training"
name = "spare"
model = "llama"
channel = "experiments"
instance_types = ["trn1.32xlarge"]
zone = "us-east-2a"
nodes = 1
capacity = {{ kind = "spot" }}
image = "123456789012.dkr.ecr.us-east-2.amazonaws.com/train@sha256:{"0" * 64}"
scratch = {{ size = 1200 }}

[[endpoints]]
name = "answers"
model = "bert"
artifact = "{"0" * 64}"
image = "123456789012.dkr.ecr.us-east-2.amazonaws.com/serve@sha256:{"0" * 64}"
instance_type = "ml.inf2.xlarge"
instances = 4
shift = {{ kind = "canary", percent = 25, bake = "10m" }}

[cluster]
kubernetes = "1.34"
admins = ["arn:aws:iam::123456789012:role/platform"]

[[cluster.groups]]
name = "research"
instance_type = "trn1.32xlarge"
zone = "us-east-2b"
capacity = {{ kind = "on-demand" }}
size = {{ min = 0, max = 2 }}

[release]
repository = "example/models"
owner_id = 1
repository_id = 2

[farm]
image = "123456789012.dkr.ecr.us-east-2.amazonaws.com/nxpipe@sha256:{"0" * 64}"

[prove]
image = "123456789012.dkr.ecr.us-east-2.amazonaws.com/prove@sha256:{"0" * 64}"
instance_types = ["inf2.xlarge"]

[observe]
emails = ["oncall@example.com"]

[budget]
monthly = 100000

[[acknowledge]]
rule = "NXP-COST-1"
resource = "demo-*"
reason = "g5.xlarge, m7i.large and ml.inf2.xlarge have no price in the list for us-east-2; about $5 an hour"
expires = 2098-01-01
"""
STACKS: Final = frozenset(
    f"demo-{part}"
    for part in (
        "build-farm",
        "cache",
        "cluster",
        "endpoint-answers",
        "network",
        "observe",
        "prove",
        "release",
        "rollout-search",
        "serve-search",
        "storage",
        "train-spare",
        "train-tune",
    )
)

_IMAGES: Final = """\
[[image]]
region = "us-east-2"
sdk = "2.32.0"
id = "ami-0a1b2c3d4e5f60718"
name = "Deep Learning AMI Neuron"
created = 2026-08-20
expires = 2099-01-01
source = "a test"

[[image]]
region = "us-east-2"
id = "ami-0b1a2c3d4e5f60718"
name = "Amazon ECS, Neuron"
created = 2026-08-20
expires = 2099-01-01
source = "a test"
"""
_CLUSTER: Final = ClusterLock(
    region="us-east-2",
    kubernetes="1.34",
    neuron=LockedNodes(release="1.34.1-20261012", image="ami-0123456789abcdef0"),
    system=LockedNodes(release="1.34.1-20261013", image="ami-0fedcba9876543210"),
    addons=dict.fromkeys(ADDONS, "v1.20.0-eksbuild.1"),
)


def write_locks(folder: Path) -> None:
    """The lock files of `nxpipe ami lock`, `nxpipe agent bundle` and `nxpipe infra lock`."""
    (folder / "nxpipe.amis.lock").write_text(_IMAGES)
    (folder / "nxpipe.agent.lock").write_text(json.dumps({"sha256": "0" * 64}))
    (folder / "nxpipe.cluster.lock").write_text(_CLUSTER.text())


def write_whole(folder: Path) -> Path:
    """Write the nxpipe.toml."""
    write_locks(folder)
    path = folder / "nxpipe.toml"
    path.write_text(WHOLE)
    return path
