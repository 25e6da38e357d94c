"""Wheels that instances install: the check that a folder of them fits an image, and their download with pip.

Instances install the folder without an index and resolve nothing. A wheel for another Python or a missing dependency
would appear only on an instance, which then fails to start, as does its replacement. `check_folder` finds both from the
wheels alone: tags from their names (PEP 425, PEP 600), dependencies from their metadata (PEP 508).
"""

import ast
import operator
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesHeaderParser
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Final

from nxpipe.pipeline.config.locks import SystemSoftware
from nxpipe.pipeline.util.errors import InputInvalid, MissingSoftware
from nxpipe.pipeline.util.files import MiB

_AGENT: Final = "nxpipe"
_LARGEST_METADATA: Final = 4 * MiB
_REMEDY: Final = "download the wheels of the image with: nxpipe agent bundle NEW_FOLDER --fetch WHEEL_OF_NXPIPE"


class PackagesUnfit(InputInvalid):
    """Packages that an image cannot install."""


@dataclass(frozen=True)
class Dependency:
    """A Requires-Dist line of a wheel, such as `cffi>=2.0.0; platform_python_implementation != "PyPy"`."""

    name: str
    extras: frozenset[str]
    specifier: str
    marker: str

    _FORM: ClassVar = re.compile(r"\s*([\w.-]+)\s*(?:\[([^\]]*)\])?\s*\(?((?:[<>=!~@][^;()]*)?)\)?\s*(?:;(.*))?")

    @classmethod
    def of(cls, line: str) -> "Dependency":
        match = cls._FORM.fullmatch(line)
        if match is None:
            raise ValueError(f"it requires {line!r}, which is not in the form of PEP 508")
        name, extras, specifier, marker = (part or "" for part in match.groups())
        split = frozenset(extra.strip() for extra in extras.split(",") if extra.strip())
        return cls(_normal(name), split, specifier.strip(), marker.strip())

    def applies(self, software: SystemSoftware, extras: Iterable[str]) -> bool:
        """Whether the marker selects the image. One that cannot be evaluated does: a spare wheel does no harm."""
        if not self.marker:
            return True
        environment = _marker_environment(software)
        try:
            condition = ast.parse(self.marker, mode="eval").body  # its grammar is a part of Python's
            return any(_holds(condition, {**environment, "extra": extra}) for extra in ("", *extras))
        except (SyntaxError, KeyError):
            return True

    def __str__(self) -> str:
        return f"{self.name}{self.specifier}"


@dataclass(frozen=True)
class Wheel:
    path: Path
    name: str
    version: str
    tags: tuple[tuple[str, str, str], ...]  # Python, ABI, platform
    requires_python: str
    dependencies: tuple[Dependency, ...]

    @classmethod
    def of(cls, path: Path) -> "Wheel":
        try:
            name, version, *_, pythons, abis, platforms = path.stem.split("-")
            metadata = _metadata(path)
            dependencies = tuple(map(Dependency.of, metadata.get_all("Requires-Dist", ())))
        except (ValueError, zipfile.BadZipFile) as error:
            raise PackagesUnfit(f"{path} is not a wheel ({error}); {_REMEDY}") from error
        tags = tuple(product(pythons.split("."), abis.split("."), platforms.split(".")))
        return cls(path, _normal(name), version, tags, metadata.get("Requires-Python", ""), dependencies)

    def fits(self, software: SystemSoftware) -> bool:
        return any(
            _python_fits(python, abi, software) and _platform_fits(platform, software)
            for python, abi, platform in self.tags
        )


def check_folder(folder: Path, software: SystemSoftware) -> None:
    """Refuses the folder unless an image with this software can install its wheels, and they are all that they need."""
    wheels = _by_name(folder)
    if _AGENT not in wheels:
        raise PackagesUnfit(f"{folder} has no wheel of nxpipe; {_REMEDY}")
    for wheel in wheels.values():
        if not wheel.fits(software):
            raise PackagesUnfit(
                f"{wheel.path} does not install on the fleets' image, which has Python {software.python} on x86_64 "
                f"Linux with glibc {software.glibc}; {_REMEDY}"
            )
        if not _satisfies(f"{software.python}.0", wheel.requires_python):
            raise PackagesUnfit(
                f"{wheel.path} requires Python {wheel.requires_python}, but the fleets' image has {software.python}; "
                f"{_REMEDY}"
            )
    for wheel, missing in _missing(wheels, software):
        found = wheels.get(missing.name)
        state = f"{folder} has {missing.name} {found.version}" if found else f"{folder} does not have it"
        raise PackagesUnfit(f"{wheel.path} requires {missing}, but {state}; add that wheel, or {_REMEDY}")


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
        missing = {str(dependency) for _, dependency in _missing(_by_name(folder), software)}
        if missing <= set(requirements):
            return
        requirements += sorted(missing.difference(requirements))
        for path in folder.iterdir():  # the whole is resolved again, and may select other versions
            path.unlink()


def _download(requirements: Sequence[str], folder: Path, software: SystemSoftware) -> None:
    major, minor = software.python.split(".")
    newest = int(software.glibc.partition(".")[2])
    platforms = [f"manylinux_2_{glibc}_x86_64" for glibc in range(newest, 4, -1)]
    platforms += [f"{alias}_x86_64" for alias in _MANYLINUX]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--abi=cp{major}{minor}"]
    command += [f"--python-version={software.python}", *(f"--platform={platform}" for platform in platforms)]
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


def _missing(wheels: Mapping[str, Wheel], software: SystemSoftware) -> list[tuple[Wheel, Dependency]]:
    """Dependencies that no wheel satisfies, and the wheels that have them."""
    return [
        (wheel, dependency)
        for wheel, dependency in _applicable(wheels, software)
        if dependency.name not in wheels or not _satisfies(wheels[dependency.name].version, dependency.specifier)
    ]


def _applicable(wheels: Mapping[str, Wheel], software: SystemSoftware) -> list[tuple[Wheel, Dependency]]:
    """Dependencies whose markers select the image. Each may require extras of others, which have dependencies too."""
    extras: dict[str, frozenset[str]] = {}
    while True:
        found = [
            (wheel, dependency)
            for wheel in wheels.values()
            for dependency in wheel.dependencies
            if dependency.applies(software, extras.get(wheel.name, ()))
        ]
        required = dict(extras)
        for _, dependency in found:
            required[dependency.name] = required.get(dependency.name, frozenset()) | dependency.extras
        if required == extras:
            return found
        extras = required


def _metadata(path: Path) -> Message:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        if len(names) != 1:
            raise ValueError("it has no METADATA")
        with archive.open(names[0]) as file:
            return BytesHeaderParser().parsebytes(file.read(_LARGEST_METADATA))


def _normal(name: str) -> str:
    """The name by which an index compares packages (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


_MANYLINUX: Final = {"manylinux2014": 17, "manylinux2010": 12, "manylinux1": 5}  # the glibc 2.x of the older names


def _platform_fits(platform: str, software: SystemSoftware) -> bool:
    if platform == "any":
        return True
    family = platform.removesuffix("_x86_64")
    numbered = re.fullmatch("manylinux_2_([0-9]+)", family)
    glibc = int(numbered[1]) if numbered else _MANYLINUX.get(family)
    return family != platform and glibc is not None and _satisfies(software.glibc, f">=2.{glibc}")


def _python_fits(python: str, abi: str, software: SystemSoftware) -> bool:
    major, minor = software.python.split(".")
    own = f"cp{major}{minor}"
    if abi == own:
        return python == own
    tag = re.fullmatch(rf"(py|cp){major}([0-9]*)", python)
    if tag is None or abi not in ("none", "abi3"):
        return False
    if abi == "none" and tag[1] == "cp":
        return python == own
    return int(tag[2] or 0) <= int(minor)


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


_ORDERS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}
_SYMBOLS: Final[Mapping[type[ast.cmpop], str]] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.GtE: ">=",
    ast.Gt: ">",
}


def _holds(node: ast.expr, environment: Mapping[str, str]) -> bool:
    """Evaluates a marker. KeyError for a variable or an operator that is not known."""
    match node:
        case ast.BoolOp(op=ast.And(), values=values):
            return all(_holds(value, environment) for value in values)
        case ast.BoolOp(values=values):
            return any(_holds(value, environment) for value in values)
        case ast.Compare(left=left, ops=[order], comparators=[right]):
            return _compared(_text(left, environment), order, _text(right, environment))
    raise KeyError(ast.unparse(node))


def _text(node: ast.expr, environment: Mapping[str, str]) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else environment[ast.unparse(node)]


def _compared(left: str, order: ast.cmpop, right: str) -> bool:
    if isinstance(order, ast.In | ast.NotIn):
        return (left in right) == isinstance(order, ast.In)
    symbol = _SYMBOLS[type(order)]
    if _VERSION.match(left) and _VERSION.match(right):
        return _ordered(left, symbol, right)
    return _ORDERS[symbol](left, right)


_VERSION: Final = re.compile(r"v?(?:[0-9]+!)?([0-9]+(?:\.[0-9]+)*)")
_CLAUSE: Final = re.compile(r"(~=|===?|!=|<=?|>=?)\s*([^\s,]+)")


def _satisfies(version: str, specifier: str) -> bool:
    """Compares releases (PEP 440) and no suffixes: 2.0rc1 satisfies >=2.0. pip has selected the versions."""
    return all(_ordered(version, symbol, bound) for symbol, bound in _CLAUSE.findall(specifier))


def _ordered(version: str, symbol: str, bound: str) -> bool:
    if symbol == "===":
        return version == bound
    if symbol == "~=":
        return _ordered(version, ">=", bound) and _ordered(version, "==", f"{bound.rpartition('.')[0]}.*")
    if bound.endswith(".*"):
        prefix = _release(bound)
        return (_release(version)[: len(prefix)] == prefix) == (symbol == "==")
    left, right = _release(version), _release(bound)
    length = max(len(left), len(right))
    padded = ([*release, *[0] * (length - len(release))] for release in (left, right))
    return _ORDERS[symbol](*padded)


def _release(version: str) -> tuple[int, ...]:
    match = _VERSION.match(version)
    return tuple(map(int, match[1].split("."))) if match else ()
