"""Packages that instances install: the agent's bundle, the check that it fits an image, and the download with pip.

Instances install the folder without an index and resolve nothing. A wheel for another Python or a missing dependency
would appear only on an instance, which then fails to start, as does its replacement. `check_folder` finds both from the
wheels alone: tags from their names, dependencies from their metadata.
"""

import io
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from re import fullmatch
from typing import TYPE_CHECKING, Final

from packaging.metadata import RawMetadata, parse_email
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from nxpipe.artifact_store.canonical import sha256_hex
from nxpipe.pipeline.config.locks import SystemSoftware
from nxpipe.pipeline.util.errors import InputInvalid, MissingSoftware
from nxpipe.pipeline.util.files import MiB

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store

_AGENT: Final = "nxpipe"
_LARGEST_METADATA: Final = 4 * MiB
_MANYLINUX: Final = ("manylinux2014", "manylinux2010", "manylinux1")  # the older names, all of glibc 2.17 and less
_REMEDY: Final = "download the wheels of the image with: nxpipe agent bundle NEW_FOLDER --fetch WHEEL_OF_NXPIPE"


class PackagesUnfit(InputInvalid):
    """Packages that an image cannot install."""


_PACKAGES: Final = (".deb", ".whl")  # Python packages, and system packages that the image lacks


@dataclass(frozen=True)
class Bundle:
    """The packages of a folder as a tar file in the store."""

    packages: tuple[str, ...]
    python: str  # version of the image's Python, which the wheels are for
    data: bytes

    @classmethod
    def of(cls, folder: Path, software: SystemSoftware) -> "Bundle":
        """The packages of a folder, without other files, dates and owners. They must fit the image's software."""
        check_folder(folder, software)
        paths = sorted(path for path in folder.iterdir() if path.suffix in _PACKAGES)
        written = io.BytesIO()
        with tarfile.open(fileobj=written, mode="w", format=tarfile.USTAR_FORMAT) as archive:
            for path in paths:
                entry = tarfile.TarInfo(path.name)
                data = path.read_bytes()
                entry.size, entry.mode = len(data), 0o644
                archive.addfile(entry, io.BytesIO(data))
        return cls(tuple(path.name for path in paths), software.python, written.getvalue())

    @property
    def sha256(self) -> str:
        return sha256_hex(self.data)

    @property
    def path(self) -> str:
        """Path in the bucket, outside of the store's layout: garbage collection ignores it."""
        return f"agents/{self.sha256}.tar"

    def put(self, store: "Store") -> bool:
        """Uploads the bundle; False if it exists."""
        return store.backend.create(self.path, store.backend.hashed(self.data), durable=True)

    def lock(self) -> str:
        """The lock file that the stacks read: the bundle's digest and Python, and its packages for people."""
        return json.dumps({"sha256": self.sha256, "python": self.python, "packages": self.packages}, indent=2) + "\n"


@dataclass(frozen=True)
class Wheel:
    path: Path
    name: str
    version: Version
    tags: frozenset[Tag]
    requires_python: SpecifierSet
    dependencies: tuple[Requirement, ...]

    @classmethod
    def of(cls, path: Path) -> "Wheel":
        try:
            name, version, _, tags = parse_wheel_filename(path.name)
            metadata = _metadata(path)
            dependencies = tuple(map(_requirement, metadata.get("requires_dist", ())))
            python = SpecifierSet(metadata.get("requires_python", ""))
        except (ValueError, zipfile.BadZipFile) as error:  # each error of packaging is a ValueError
            raise PackagesUnfit(f"{path} is not a wheel ({error}); {_REMEDY}") from error
        return cls(path, name, version, tags, python, dependencies)


def check_folder(folder: Path, software: SystemSoftware) -> None:
    """Refuses the folder unless an image with this software can install its wheels, and they are all that they need."""
    wheels = _by_name(folder)
    if _AGENT not in wheels:
        raise PackagesUnfit(f"{folder} has no wheel of nxpipe; {_REMEDY}")
    installable = _tags(software)
    for wheel in wheels.values():
        if wheel.tags.isdisjoint(installable):
            raise PackagesUnfit(
                f"{wheel.path} does not install on the fleets' image, which has Python {software.python} on x86_64 "
                f"Linux with glibc {software.glibc}; {_REMEDY}"
            )
        if not wheel.requires_python.contains(f"{software.python}.0"):
            raise PackagesUnfit(
                f"{wheel.path} requires Python {wheel.requires_python}, but the fleets' image has {software.python}; "
                f"{_REMEDY}"
            )
    for wheel, missing in _missing(wheels, software):
        found = wheels.get(canonicalize_name(missing.name))
        state = f"{folder} has {missing.name} {found.version}" if found else f"{folder} does not have it"
        raise PackagesUnfit(f"{wheel.path} requires {_plain(missing)}, but {state}; add that wheel, or {_REMEDY}")


def fetch_wheels(agent: str, folder: Path, software: SystemSoftware) -> None:
    """Downloads the wheels of an image into the folder: those of `agent`, a wheel of nxpipe or a requirement such as
    "nxpipe==0.1.0", and of all that it depends on. The folder is complete, or unchanged.
    """
    if folder.is_dir() and any(folder.glob("*.whl")):
        raise PackagesUnfit(f"{folder} already has wheels; name a new folder, or remove them")
    if find_spec("pip") is None:
        raise MissingSoftware("pip", "downloading the agent's packages", "install it with: python -m ensurepip")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".nxpipe-") as name:
        fetched = Path(name)
        _resolve(agent, fetched, software)
        if _AGENT not in _by_name(fetched):
            raise PackagesUnfit(f"{agent} is not nxpipe; pass the wheel of nxpipe, or nxpipe==VERSION, to --fetch")
        check_folder(fetched, software)
        folder.mkdir(exist_ok=True)
        for path in sorted(fetched.iterdir()):
            path.rename(folder / path.name)


def _resolve(agent: str, folder: Path, software: SystemSoftware) -> None:
    """Runs pip until nothing is missing. pip evaluates markers for the Python that runs it, even with --python-version,
    and so leaves out what only the image's Python or platform requires.
    """
    requirements = [agent]
    while True:
        _download(requirements, folder, software)
        missing = {_plain(dependency) for _, dependency in _missing(_by_name(folder), software)}
        if missing <= set(requirements):
            return
        requirements += sorted(missing.difference(requirements))
        for path in folder.iterdir():  # the whole is resolved again, and may select other versions
            path.unlink()


def _download(requirements: Sequence[str], folder: Path, software: SystemSoftware) -> None:
    major, minor = software.python.split(".")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--abi=cp{major}{minor}"]
    command += [f"--python-version={software.python}", *(f"--platform={platform}" for platform in _platforms(software))]
    done = subprocess.run(
        [*command, f"--dest={folder}", "--", *requirements], capture_output=True, text=True, check=False
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")] or done.stderr.splitlines()
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"exit code {done.returncode}"
        raise PackagesUnfit(
            f"pip cannot download {requirements[0]} and its dependencies for Python {software.python}: {reason}; "
            "check the index that `pip config list` shows, and the wheel that --fetch names"
        )


def _by_name(folder: Path) -> Mapping[str, Wheel]:
    wheels: dict[str, Wheel] = {}
    for path in sorted(folder.glob("*.whl")):
        wheel = Wheel.of(path)
        if wheel.name in wheels:
            raise PackagesUnfit(f"{path} and {wheels[wheel.name].path.name} are of one package; remove one of them")
        wheels[wheel.name] = wheel
    return wheels


def _missing(wheels: Mapping[str, Wheel], software: SystemSoftware) -> list[tuple[Wheel, Requirement]]:
    """Dependencies that no wheel satisfies, and the wheels that have them."""
    return [
        (wheel, dependency)
        for wheel, dependency in _applicable(wheels, software)
        if (found := wheels.get(canonicalize_name(dependency.name))) is None
        or not dependency.specifier.contains(found.version, prereleases=True)  # pip has selected the version
    ]


def _applicable(wheels: Mapping[str, Wheel], software: SystemSoftware) -> list[tuple[Wheel, Requirement]]:
    """Dependencies whose markers select the image. Each may require extras of others, which have dependencies too."""
    extras: dict[str, frozenset[str]] = {}
    while True:
        found = [
            (wheel, dependency)
            for wheel in wheels.values()
            for dependency in wheel.dependencies
            if _applies(dependency, software, extras.get(wheel.name, ()))
        ]
        required = dict(extras)
        for _, dependency in found:
            name = canonicalize_name(dependency.name)
            required[name] = required.get(name, frozenset()) | dependency.extras
        if required == extras:
            return found
        extras = required


def _applies(dependency: Requirement, software: SystemSoftware, extras: Iterable[str]) -> bool:
    """Whether the marker selects the image, not the machine that runs this."""
    environment = _marker_environment(software)
    marker = dependency.marker
    return marker is None or any(marker.evaluate({**environment, "extra": extra}) for extra in ("", *extras))


def _requirement(line: str) -> Requirement:
    try:
        return Requirement(line)
    except InvalidRequirement as error:
        reason, *_ = str(error).splitlines()  # the next lines show the place, underlined
        raise ValueError(f"it requires {line!r}: {reason}") from error


def _plain(dependency: Requirement) -> str:
    return f"{canonicalize_name(dependency.name)}{dependency.specifier}"


def _metadata(path: Path) -> RawMetadata:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        if len(names) != 1:
            raise ValueError("it has no METADATA")
        with archive.open(names[0]) as file:
            return parse_email(file.read(_LARGEST_METADATA))[0]


def _platforms(software: SystemSoftware) -> list[str]:
    newest = int(software.glibc.partition(".")[2])
    families = [*(f"manylinux_2_{glibc}" for glibc in range(newest, 4, -1)), *_MANYLINUX]
    return [f"{family}_x86_64" for family in families]


def _tags(software: SystemSoftware) -> frozenset[Tag]:
    """The tags of wheels that the image can install."""
    major, minor = map(int, software.python.split("."))
    own = f"cp{major}{minor}"
    platforms = _platforms(software)
    return frozenset(
        (
            *cpython_tags((major, minor), [own], platforms),
            *compatible_tags((major, minor), own, platforms),
        )
    )


def _marker_environment(software: SystemSoftware) -> dict[str, str]:
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{software.python}.0",
        "os_name": "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{software.python}.0",
        "python_version": software.python,
        "sys_platform": "linux",
    }
