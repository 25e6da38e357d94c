"""Lock files: AMIs of instances (`nxpipe ami lock`), and versions and digests of a cluster (`nxpipe infra lock`).

By default AWS resolves the newest image, release or add-on, so instances started on different days, or clusters created
in different weeks, would differ. The lock files are committed; no AWS call is needed to read them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError

from nxpipe.pipeline.config.cloud import Amis, Prove
from nxpipe.pipeline.config.cluster import Cluster
from nxpipe.pipeline.config.kinds import Region, Sdk
from nxpipe.pipeline.config.messages import ConfigInvalid, Fault
from nxpipe.pipeline.config.root import Config
from nxpipe.pipeline.config.schema import Table, text
from nxpipe.pipeline.config.training_fleet import TrainingFleet
from nxpipe.pipeline.util.files import MiB, read_file, toml_of

# Public SSM parameters with the newest AMI of a region: with all frameworks and the driver; with ECS and the driver.
FLEETS_PARAMETER: Final = "/aws/service/neuron/dlami/multi-framework/ubuntu-24.04/latest/image_id"
TRAINING_PARAMETER: Final = "/aws/service/ecs/optimized-ami/amazon-linux-2023/neuron/recommended/image_id"

_HEAD: Final = "# Written by `nxpipe ami lock`: the machine images that instances start from. Commit it.\n"
_AMI = Annotated[str, text("ami-[0-9a-f]{8,17}", 'the id of an AMI, such as "ami-0a1b2c3d4e5f60718"')]
_Minor = Annotated[str, text(r"[0-9]+\.[0-9]+", 'a version such as "3.12"')]


@dataclass(frozen=True)
class SystemSoftware:
    """Software of an operating system that decides which wheels install there."""

    python: str  # of its `python3`, such as "3.12"
    glibc: str  # such as "2.39"


# By the name that an AMI's own name contains. Python is the system's `python3`, from `os_properties` of the Neuron
# SDK's n2-manifest.json and the release notes of its DLAMIs; glibc is the one of the distribution's release.
SYSTEMS: Final = {
    "Amazon Linux 2023": SystemSoftware(python="3.9", glibc="2.34"),
    "Ubuntu 22.04": SystemSoftware(python="3.10", glibc="2.35"),
    "Ubuntu 24.04": SystemSoftware(python="3.12", glibc="2.39"),
}
_DEFAULT_SYSTEM: Final = SYSTEMS["Ubuntu 24.04"]  # of FLEETS_PARAMETER, and so of images that older lock files name


class LockedImage(Table):
    """One AMI and its origin."""

    region: Region = Field(description="The region.")
    sdk: str | None = Field(
        default=None,
        description="The version of its Neuron SDK. Hosts of training containers have the driver only.",
    )
    id: _AMI = Field(description="The id.")
    name: str = Field(description="The name.")
    created: date = Field(description="The creation date.")
    expires: date | None = Field(default=None, description="The deprecation date. The owner of an image may set none.")
    source: str = Field(description="The public parameter, the search, or the key of nxpipe.toml that resolved it.")
    python: _Minor | None = Field(
        default=None, description="The version of its Python, for the agent. Hosts of training containers have none."
    )
    glibc: _Minor | None = Field(default=None, description="The version of its C library.")
    owner: str | None = Field(
        default=None, description='Of an image that [amis] names: the owning account, or "amazon".'
    )
    root_device: str | None = Field(default=None, description="Of such an image: the name of its root device.")
    root_gib: int | None = Field(default=None, description="Of such an image: the size of its root volume.")
    architecture: str | None = Field(default=None, description="Of such an image: the architecture.")
    virtualization: str | None = Field(default=None, description="Of such an image: the kind of virtualization.")
    driver: Sdk | None = Field(
        default=None,
        description="Of a host of training containers: the Neuron SDK whose driver it has, or an older one. Its name "
        "and description state no driver; AWS builds it with the newest one, so this is the newest SDK of the Deep "
        "Learning AMIs that are older than the image.",
    )

    @property
    def software(self) -> SystemSoftware:
        """The software that the agent's packages must fit. Older lock files do not name it."""
        return SystemSoftware(self.python or _DEFAULT_SYSTEM.python, self.glibc or _DEFAULT_SYSTEM.glibc)


@dataclass(frozen=True)
class AmiLock:
    """The lock file of AMIs."""

    path: Path
    images: tuple[LockedImage, ...] = ()

    def image(self, region: str, sdk: str | None) -> LockedImage | None:
        """The AMI with a version of the SDK, or for training hosts if `sdk` is None; None if it is not locked."""
        return next((image for image in self.images if (image.region, image.sdk) == (region, sdk)), None)

    def serving(self, amis: Amis, region: str) -> LockedImage | None:
        """The AMI of serving fleets; None if it is not locked, or if another one was locked."""
        return next((image for image in self._serving(amis) if image.region == region), None)

    def _serving(self, amis: Amis) -> list[LockedImage]:
        images = [image for image in self.images if image.sdk == amis.sdk[0]]
        if amis.image is not None:
            return [image for image in images if image.id == amis.image]
        return [image for image in images if image.owner is None]

    def software(self, amis: Amis, region: str | None) -> SystemSoftware:
        """The software of the fleets' AMIs in the region, or in all, for which one bundle of the agent is made."""
        if amis.python is not None and amis.glibc is not None:
            return SystemSoftware(amis.python, amis.glibc)
        sdk = amis.sdk[0]
        images = [image for image in self._serving(amis) if region in (None, image.region)]
        found = {image.software: image for image in images}
        if len(found) > 1:
            kinds = " and ".join(f"{image.id} with Python {image.software.python}" for image in found.values())
            raise _invalid(
                self.path,
                f"{kinds} for SDK {sdk}",
                "images of one operating system, since all fleets install one bundle; run `nxpipe ami lock` with "
                "every region",
            )
        return next(iter(found), _DEFAULT_SYSTEM)

    def with_images(self, images: Iterable[LockedImage], sdks: Iterable[str]) -> "AmiLock":
        """Replace the images of the given regions, and drop those of unused SDK versions."""
        new, used_sdks = tuple(images), frozenset((None, *sdks))
        regions = {image.region for image in new}
        old = [image for image in self.images if image.region not in regions and image.sdk in used_sdks]
        return AmiLock(self.path, tuple(sorted([*new, *old], key=lambda image: (image.region, image.sdk or ""))))

    def text(self) -> str:
        """The text of the file, in a stable order."""
        return _HEAD + "".join(map(_written, self.images))


def read_lock(path: Path) -> AmiLock:
    """Read the lock file of AMIs; a missing file is empty."""
    try:
        document = toml_of(read_file(path, limit=4 * MiB).decode())
        images = tuple(LockedImage.model_validate(entry) for entry in document.pop("image", ()))
    except FileNotFoundError:
        return AmiLock(path)
    except (ValueError, ValidationError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise _invalid(
            path, f"an unreadable file ({reason})", "the output of `nxpipe ami lock`; run it again"
        ) from error
    if document:
        raise _invalid(path, f"the key {next(iter(document))}", "the output of `nxpipe ami lock`; run it again")
    return AmiLock(path, images)


def has_job_hosts(config: Config) -> bool:
    """True if instances run containers that use devices: those of training fleets and of [prove]."""
    return config.prove is not None or any(isinstance(fleet, TrainingFleet) for fleet in config.fleets)


def require_driver(config: Config, lock: AmiLock, container: TrainingFleet | Prove) -> None:
    """Refuse a host whose driver is older than the SDK of the container: the runtime would not start."""
    image = lock.image(config.project.region, None) if config.project.region else None
    needed = container.sdk or config.amis.sdk[0]
    if image is None or (image.driver is None and container.sdk is None):  # files of older versions do not name it
        return
    if image.driver is None:
        raise _invalid(lock.path, f"no driver of {image.id}", "the output of `nxpipe ami lock`; run it again")
    if sdk_order(image.driver) < sdk_order(needed):
        of = "[prove]" if isinstance(container, Prove) else f"fleet {container.name}"
        raise _invalid(
            lock.path,
            f"{image.id} with the driver of Neuron SDK {image.driver}",
            f"a driver of SDK {needed} or newer, which the container of {of} requires; run `nxpipe ami lock`, or set "
            "its `sdk` to the version in the container",
        )


def sdk_order(version: str) -> tuple[int, ...]:
    """A key that orders versions; 2.32 is 2.32.0."""
    parts = [int(part) for part in version.split(".")]
    while parts and not parts[-1]:
        parts.pop()
    return tuple(parts)


def _written(image: LockedImage) -> str:
    values: dict[str, Any] = image.model_dump(exclude_none=True)
    rows = (f"{key} = {_value(value)}\n" for key, value in values.items())
    return "\n[[image]]\n" + "".join(rows)


def _value(value: str | int | date) -> str:
    if isinstance(value, int):
        return str(value)
    if isinstance(value, date):
        return value.isoformat()
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _invalid(path: Path, found: str, allowed: str) -> ConfigInvalid:
    return ConfigInvalid([Fault(str(path), None, "", found, allowed)])


_CLUSTER_LOCK_HEAD: Final = "# Written by `nxpipe infra lock`: the versions and digests of the cluster. Commit it.\n"
_REMEDY: Final = "the output of `nxpipe infra lock`; run it"
ADDONS: Final = (
    "aws-efs-csi-driver",
    "coredns",
    "eks-node-monitoring-agent",
    "eks-pod-identity-agent",
    "kube-proxy",
    "vpc-cni",
)

_Release = Annotated[str, text(r"1\.[0-9]+\.[0-9]+-[0-9]{8}", 'a release of node images such as "1.34.1-20261012"')]
_Ami = Annotated[str, text("ami-[0-9a-f]{8,17}", 'the id of an AMI, such as "ami-0a1b2c3d4e5f60718"')]
_AddonVersion = Annotated[str, text(r"v[0-9][0-9a-z.-]*", 'the version of an add-on such as "v1.20.4-eksbuild.1"')]
_Digest = Annotated[str, text("sha256:[0-9a-f]{64}", "a digest such as sha256:...")]


class LockedNodes(Table):
    """The locked image of one kind of nodes."""

    release: _Release = Field(description="The release, for node groups.")
    image: _Ami = Field(description="The AMI of that release, for Karpenter.")


class ClusterLock(Table):
    """The lock file of a cluster."""

    region: Region = Field(description="The region.")
    kubernetes: str = Field(description="The Kubernetes version.")
    neuron: LockedNodes = Field(description="Nodes with accelerators.")
    system: LockedNodes = Field(description="Nodes without accelerators.")
    addons: dict[str, _AddonVersion] = Field(description="The versions of the add-ons.")
    images: dict[str, _Digest] = Field(
        default_factory=dict, description="The digests of the images of [cluster.images]."
    )

    def text(self) -> str:
        """The text of the file, in a stable order."""
        plain = self.model_dump()
        top = {key: value for key, value in plain.items() if isinstance(value, str)}
        tables = {key: value for key, value in plain.items() if isinstance(value, dict) and value}
        return _CLUSTER_LOCK_HEAD + _rows(top) + "".join(f"\n[{key}]\n{_rows(table)}" for key, table in tables.items())


def _rows(values: dict[str, str]) -> str:
    """Key-value lines. Values need no escapes; image names need quotes as keys."""
    names = {key: f'"{key}"' if "/" in key else key for key in values}
    return "".join(f'{names[key]} = "{value}"\n' for key, value in sorted(values.items()))


def cluster_of(config: Config, file: str) -> tuple[Cluster, str]:
    """The cluster and its region; `file` names nxpipe.toml in faults."""
    if config.cluster is None:
        raise ConfigInvalid([Fault(file, None, "cluster", "no such table", "a table that describes the cluster")])
    if config.project.region is None:
        raise ConfigInvalid([Fault(file, None, "project.region", "nothing", "the region of the cluster")])
    return config.cluster, config.project.region


def read_cluster_lock(config: Config, path: Path) -> ClusterLock:
    """The lock file of `[cluster]`, which must match the configuration."""
    try:
        lock = ClusterLock.model_validate(toml_of(read_file(path, limit=MiB).decode()))
    except FileNotFoundError:
        raise _invalid(path, "no such file", _REMEDY) from None
    except (ValueError, ValidationError, UnicodeDecodeError) as error:
        raise _invalid(path, f"an unreadable file ({str(error).splitlines()[0]})", f"{_REMEDY} again") from error
    cluster, region = cluster_of(config, str(path))
    _require_match(lock, cluster, region, path)
    return lock


def _require_match(lock: ClusterLock, cluster: Cluster, region: str, path: Path) -> None:
    for key, expected in (("kubernetes", cluster.kubernetes), ("region", region)):
        if (actual := getattr(lock, key)) != expected:
            raise _invalid(path, f"{key} {actual}", f"{expected}, as in nxpipe.toml; run `nxpipe infra lock` again")
    images = cluster.images.all if cluster.images else ()
    for known, names in ((lock.addons, ADDONS), (lock.images, images)):
        if missing := [name for name in names if name not in known]:
            raise _invalid(path, f"no entry for {missing[0]}", f"{_REMEDY} again")
