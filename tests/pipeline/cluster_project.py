"""A project with a cluster, and the lock file that belongs to it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from nxpipe.pipeline.config.locks import ADDONS, ClusterLock

REGION: Final = "us-east-2"
REGISTRY: Final = f"123456789012.dkr.ecr.{REGION}.amazonaws.com"
IMAGES: Final = {
    "device_plugin": f"{REGISTRY}/neuron-device-plugin:2.32.0.0",
    "scheduler_extension": f"{REGISTRY}/neuron-scheduler:2.32.0.0",
    "scheduler": f"{REGISTRY}/mirror/kube-scheduler:v1.34.1",
    "efa_plugin": f"{REGISTRY}/aws-efa-k8s-device-plugin:v0.5.20",
    "monitor": f"{REGISTRY}/neuron-monitor:1.3.0",
}
DIGESTS: Final = {image: f"sha256:{place:064x}" for place, image in enumerate(IMAGES.values(), 1)}
LOCK: Final = ClusterLock.model_validate(
    {
        "region": REGION,
        "kubernetes": "1.34",
        "neuron": {"release": "1.34.1-20261012", "image": "ami-0123456789abcdef0"},
        "system": {"release": "1.34.1-20261013", "image": "ami-0fedcba9876543210"},
        "addons": dict.fromkeys(ADDONS, "v1.20.4-eksbuild.1"),
        "images": DIGESTS,
    }
)
ON_DEMAND: Final = '{ kind = "on-demand" }'
RESERVED: Final = '{ kind = "reservation", id = "cr-0a1b2c3d4e5f60718" }'


def group(name: str, type_: str, capacity: str = ON_DEMAND, zone: str = "b") -> str:
    return f"""
[[cluster.groups]]
name = "{name}"
instance_type = "{type_}"
zone = "{REGION}{zone}"
capacity = {capacity}
size = {{ min = 0, max = 4 }}
"""


def toml(*groups: str, images: Mapping[str, str] = IMAGES, more: str = "") -> str:
    rows = "".join(f'{key} = "{image}"\n' for key, image in images.items())
    return f"""
[project]
name = "search"
region = "{REGION}"
{more}
[cluster]
kubernetes = "1.34"
admins = ["arn:aws:iam::123456789012:role/platform"]
{"".join(groups)}
{"[cluster.images]" if images else ""}
{rows}"""


WHOLE: Final = toml(group("train", "trn1.32xlarge"), group("serve", "inf2.xlarge", RESERVED, "a"))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "nxpipe.toml").write_text(WHOLE)
    (tmp_path / "nxpipe.cluster.lock").write_text(LOCK.text())
    monkeypatch.chdir(tmp_path)
    return tmp_path
