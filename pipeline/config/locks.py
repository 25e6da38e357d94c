"""The lock file of machine images: which AMI the instances of a region start from, for each version of the Neuron SDK.

AWS names only the newest image of a kind, and nodes of one fleet that start on different days would differ. So one is
chosen by `nxpipe ami lock`, written down, and committed; whoever reads the file looks nothing up.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError

from nxpipe.pipeline.config.cluster import Cluster
from nxpipe.pipeline.config.faults import ConfigInvalid, Fault
from nxpipe.pipeline.config.kinds import Region
from nxpipe.pipeline.config.root import Config
from nxpipe.pipeline.config.schema import Table, text
from nxpipe.pipeline.util.files import MiB, read_file, toml_of

# Public parameters that name the newest image of a region: with all frameworks and the driver, and with ECS and the
# driver.
FLEETS_PARAMETER: Final = "/aws/service/neuron/dlami/multi-framework/ubuntu-24.04/latest/image_id"
TRAINING_PARAMETER: Final = "/aws/service/ecs/optimized-ami/amazon-linux-2023/neuron/recommended/image_id"

_HEAD: Final = "# Written by `nxpipe ami lock`: the machine images that instances start from. Commit it.\n"
_AMI = Annotated[str, text("ami-[0-9a-f]{8,17}", 'the id of an AMI, such as "ami-0a1b2c3d4e5f60718"')]


class LockedImage(Table):
    """One image, and how it was found."""

    region: Region = Field(description="Where it is.")
    sdk: str | None = Field(
        default=None,
        description="The version of the Neuron SDK that is in it. Hosts of training have the driver only: what trains "
        "is a container, which brings its own.",
    )
    id: _AMI = Field(description="The image.")
    name: str = Field(description="What AWS calls it.")
    created: date = Field(description="When AWS made it.")
    expires: date = Field(description="From when on AWS does not keep it up.")
    source: str = Field(description="The public parameter, or the search, that named it.")


@dataclass(frozen=True)
class AmiLock:
    """What the file holds."""

    path: Path
    images: tuple[LockedImage, ...] = ()

    def image(self, region: str, sdk: str | None) -> LockedImage | None:
        """Of a version of the SDK, or, without one, for hosts of training; None: not locked yet."""
        return next((each for each in self.images if (each.region, each.sdk) == (region, sdk)), None)

    def with_images(self, found: Iterable[LockedImage], sdks: Iterable[str]) -> "AmiLock":
        """The images of some regions in the place of those regions' old ones, and none of a version out of use."""
        new, kept = tuple(found), frozenset((None, *sdks))
        regions = {each.region for each in new}
        old = [each for each in self.images if each.region not in regions and each.sdk in kept]
        return AmiLock(self.path, tuple(sorted([*new, *old], key=lambda each: (each.region, each.sdk or ""))))

    def text(self) -> str:
        """The file: always in the same order, so that a difference is a difference."""
        return _HEAD + "".join(map(_written, self.images))


def read_lock(path: Path) -> AmiLock:
    """A missing file holds no image."""
    try:
        document = toml_of(read_file(path, limit=4 * MiB).decode())
        images = tuple(LockedImage.model_validate(each) for each in document.pop("image", ()))
    except FileNotFoundError:
        return AmiLock(path)
    except (ValueError, ValidationError, UnicodeDecodeError) as error:
        first = str(error).splitlines()[0]
        raise _invalid(path, f"what cannot be read ({first})", "what `nxpipe ami lock` writes; run it again") from error
    if document:
        raise _invalid(path, f"the key {next(iter(document))}", "what `nxpipe ami lock` writes; run it again")
    return AmiLock(path, images)


def _written(image: LockedImage) -> str:
    values: dict[str, Any] = image.model_dump(exclude_none=True)
    rows = (f"{key} = {_value(value)}\n" for key, value in values.items())
    return "\n[[image]]\n" + "".join(rows)


def _value(value: str | date) -> str:
    if isinstance(value, date):
        return value.isoformat()
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _invalid(path: Path, found: str, allowed: str) -> ConfigInvalid:
    return ConfigInvalid([Fault(str(path), None, "", found, allowed)])


_CLUSTER_LOCK_HEAD: Final = "# Written by `nxpipe infra lock`: what the cluster is made of. Commit it.\n"
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
        return _CLUSTER_LOCK_HEAD + _rows(top) + "".join(f"\n[{key}]\n{_rows(table)}" for key, table in tables.items())


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
