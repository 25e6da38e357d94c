"""`nxpipe infra lock`: the resolved versions, and the refusals of readers of the file."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from botocore.session import Session
from botocore.stub import Stubber

from nxpipe.pipeline.config import ConfigInvalid, load_config
from nxpipe.pipeline.config.locks import ADDONS, read_cluster_lock
from nxpipe.pipeline.fleet.infrastructure import find_cluster
from nxpipe.pipeline.util.errors import AwsError
from tests.pipeline.cluster_project import DIGESTS, IMAGES, LOCK, REGION, project
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe", "project"]


@cache
def unlimited() -> Session:
    """A client with credentials, cached because it loads service descriptions."""
    session = Session()
    session.set_credentials("test", "test")
    return session


class Amazon:
    """Fakes of SSM, EKS and ECR with fixed responses, which check each request by the SDK's own model."""

    def __init__(self, *, releases: bool = True, default: bool = True) -> None:
        self.clients: dict[str, Any] = {}
        self.stubs: dict[str, Stubber] = {}
        for service in ("ssm", "eks", "ecr"):
            self.clients[service] = unlimited().create_client(service, region_name=REGION)
            self.stubs[service] = Stubber(self.clients[service])
            self.stubs[service].activate()
        for kind, nodes in (("neuron", LOCK.neuron), ("standard", LOCK.system)):
            self._release(kind, {"image_id": nodes.image, **({"release_version": nodes.release} if releases else {})})
        for name in ADDONS:
            self._addon(name, default)
        for image, digest in DIGESTS.items():
            name, _, tag = image.partition("/")[2].rpartition(":")
            document = {"registryId": "123456789012", "repositoryName": name, "imageIds": [{"imageTag": tag}]}
            self.stubs["ecr"].add_response("describe_images", {"imageDetails": [{"imageDigest": digest}]}, document)

    def _release(self, kind: str, values: Mapping[str, str]) -> None:
        folder = f"/aws/service/eks/optimized-ami/1.34/amazon-linux-2023/x86_64/{kind}/recommended"
        document = {"Names": [f"{folder}/image_id", f"{folder}/release_version"]}
        found = [{"Name": f"{folder}/{key}", "Value": value} for key, value in values.items()]
        self.stubs["ssm"].add_response("get_parameters", {"Parameters": found}, document)

    def _addon(self, name: str, default: bool) -> None:
        def version(number: str, fit: bool) -> dict[str, Any]:
            fits = [
                {"clusterVersion": "1.33", "defaultVersion": True},
                {"clusterVersion": "1.34", "defaultVersion": fit},
            ]
            return {"addonVersion": number, "compatibilities": fits}

        versions = [version("v1.21.0-eksbuild.1", False), version("v1.20.4-eksbuild.1", default)]
        answer = {"addons": [{"addonName": name, "addonVersions": versions}]}
        self.stubs["eks"].add_response(
            "describe_addon_versions", answer, {"addonName": name, "kubernetesVersion": "1.34"}
        )

    def __call__(self, service: str, region: str) -> Any:
        assert region == REGION
        return self.clients[service]


def test_what_eks_recommends_is_locked_with_the_digests_of_the_mirror() -> None:
    assert find_cluster(REGION, "1.34", tuple(IMAGES.values()), Amazon()) == LOCK


@pytest.mark.parametrize("lacking", ["releases", "default"])
def test_a_version_that_eks_does_not_have_is_told(lacking: str) -> None:
    with pytest.raises(AwsError, match=r"set `kubernetes` in \[cluster\] to a version that EKS supports"):
        find_cluster(REGION, "1.34", (), Amazon(**{lacking: False}))


def test_an_image_that_is_not_in_the_mirror_is_told_by_its_name() -> None:
    amazon = Amazon()
    amazon.clients["ecr"] = unlimited().create_client("ecr", region_name=REGION)
    empty = Stubber(amazon.clients["ecr"])
    empty.add_client_error("describe_images", "ImageNotFoundException")
    empty.activate()
    with pytest.raises(AwsError, match=r"AWS: cannot find the image 123456789012\.dkr.*neuron-device-plugin:2\.32"):
        find_cluster(REGION, "1.34", tuple(IMAGES.values()), amazon)


def test_the_command_writes_the_lock_that_synthesis_reads(
    project: Path, nxpipe: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = project / "nxpipe.cluster.lock"
    path.unlink()
    monkeypatch.setattr("nxpipe.pipeline.util.aws.client", Amazon())
    answer = nxpipe("infra", "lock", "--json")
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["images"] == DIGESTS
    assert read_cluster_lock(load_config(project / "nxpipe.toml", {}), path) == LOCK
    assert path.read_text() == LOCK.text()


def test_a_lock_without_a_version_of_an_add_on_is_refused(project: Path) -> None:
    path = project / "nxpipe.cluster.lock"
    path.write_text("".join(line for line in LOCK.text().splitlines(keepends=True) if "coredns" not in line))
    with pytest.raises(ConfigInvalid, match="found no entry for coredns"):
        read_cluster_lock(load_config(project / "nxpipe.toml", {}), path)
