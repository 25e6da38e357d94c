"""The lock file of a cluster: the releases of its nodes, the versions of its add-ons, the digests of its images.

EKS takes the newest of each when nobody says which, so that two clusters made in different weeks would differ. So they
are chosen by `nxpipe infra lock`, written down, and committed; whoever reads the file looks nothing up.
"""

from pathlib import Path
from typing import Annotated, Final

from pydantic import Field, ValidationError

from nxpipe.pipeline.config.cluster import Cluster
from nxpipe.pipeline.config.faults import ConfigInvalid, Fault
from nxpipe.pipeline.config.forms import text
from nxpipe.pipeline.config.kinds import Region
from nxpipe.pipeline.config.root import Config
from nxpipe.pipeline.config.table import Table
from nxpipe.pipeline.util.documents import MiB, read_file, toml_of

_HEAD: Final = "# Written by `nxpipe infra lock`: what the cluster is made of. Commit it.\n"
_RUN: Final = "what `nxpipe infra lock` writes; run it"
ADDONS: Final = ("aws-efs-csi-driver", "coredns", "eks-pod-identity-agent", "kube-proxy", "vpc-cni")

_Release = Annotated[str, text(r"1\.[0-9]+\.[0-9]+-[0-9]{8}", 'a release of node images such as "1.34.1-20261012"')]
_Ami = Annotated[str, text("ami-[0-9a-f]{8,17}", 'the id of an AMI, such as "ami-0a1b2c3d4e5f60718"')]
_AddonVersion = Annotated[str, text(r"v[0-9][0-9a-z.-]*", 'the version of an add-on such as "v1.20.4-eksbuild.1"')]
_Digest = Annotated[str, text("sha256:[0-9a-f]{64}", "a digest such as sha256:...")]


class LockedNodes(Table):
    """What nodes of one kind start from."""

    release: _Release = Field(description="The release, as node groups are told it.")
    image: _Ami = Field(description="The AMI of that release, as Karpenter is told it.")


class ClusterLock(Table):
    """What the file holds."""

    region: Region = Field(description="Where the images of nodes are.")
    kubernetes: str = Field(description="The version of Kubernetes that all of it is for.")
    neuron: LockedNodes = Field(description="Nodes with accelerators.")
    system: LockedNodes = Field(description="Nodes without.")
    addons: dict[str, _AddonVersion] = Field(description="The versions of the add-ons.")
    images: dict[str, _Digest] = Field(
        default_factory=dict, description="The digests of the images of [cluster.images]."
    )

    def text(self) -> str:
        """The file: always in the same order, so that a difference is a difference."""
        plain = self.model_dump()
        top = {key: value for key, value in plain.items() if isinstance(value, str)}
        tables = {key: value for key, value in plain.items() if isinstance(value, dict) and value}
        return _HEAD + _rows(top) + "".join(f"\n[{key}]\n{_rows(table)}" for key, table in tables.items())


def _rows(values: dict[str, str]) -> str:
    """Keys and values are of forms that have nothing to escape; only names of images are no bare keys."""
    names = {key: f'"{key}"' if "/" in key else key for key in values}
    return "".join(f'{names[key]} = "{value}"\n' for key, value in sorted(values.items()))


def cluster_of(config: Config, file: str) -> tuple[Cluster, str]:
    """The cluster and its region. `file` is nxpipe.toml, for what is said of it."""
    if config.cluster is None:
        raise ConfigInvalid([Fault(file, None, "cluster", "no such table", "a table that describes the cluster")])
    if config.project.region is None:
        raise ConfigInvalid([Fault(file, None, "project.region", "nothing", "the region of the cluster")])
    return config.cluster, config.project.region


def read_cluster_lock(config: Config, path: Path) -> ClusterLock:
    """The lock of `[cluster]`, if it is one of the cluster that the configuration describes."""
    try:
        lock = ClusterLock.model_validate(toml_of(read_file(path, limit=MiB).decode()))
    except FileNotFoundError:
        raise _invalid(path, "no such file", _RUN) from None
    except (ValueError, ValidationError, UnicodeDecodeError) as error:
        raise _invalid(path, f"what cannot be read ({str(error).splitlines()[0]})", f"{_RUN} again") from error
    cluster, region = cluster_of(config, str(path))
    _fits(lock, cluster, region, path)
    return lock


def _fits(lock: ClusterLock, cluster: Cluster, region: str, path: Path) -> None:
    for key, wanted in (("kubernetes", cluster.kubernetes), ("region", region)):
        if (found := getattr(lock, key)) != wanted:
            raise _invalid(path, f"{key} {found}", f"{wanted}, as nxpipe.toml has it; run `nxpipe infra lock` again")
    images = cluster.images.all if cluster.images else ()
    for known, names in ((lock.addons, ADDONS), (lock.images, images)):
        if missing := [each for each in names if each not in known]:
            raise _invalid(path, f"nothing about {missing[0]}", f"{_RUN} again")


def _invalid(path: Path, found: str, allowed: str) -> ConfigInvalid:
    return ConfigInvalid([Fault(str(path), None, "", found, allowed)])
