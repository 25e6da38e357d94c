"""Contract of an artifact with a serving runtime: versions, files, environment, command, and what proves in the log
that nothing was compiled. docs/reference/serving-contract.md states the format.

A contract is data. The importer writes it (pipeline/artifacts/recipes.py), the agent of an instance acts on it
(pipeline/fleet/agent/trees.py); neither needs the runtime.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Final, Literal, get_args

from pydantic import Field, field_validator, model_validator

from nxpipe.artifact_store.canonical import canonical_json, parse_canonical_json
from nxpipe.artifact_store.documents import Blob, Count, Digest, Document, Label, Name, SafePath, Size, parse_document
from nxpipe.artifact_store.errors import InvalidDocument
from nxpipe.artifact_store.fetch.folder import MANIFEST, SERVING
from nxpipe.artifact_store.manifest import MAX_FILES, MAX_MANIFEST_BYTES, Manifest
from nxpipe.emulator.hardware import CORES, INSTANCES
from nxpipe.pipeline.models.versions import DRIVER_VERSION, version_numbers
from nxpipe.pipeline.util.errors import NotReady, cause_of
from nxpipe.pipeline.util.files import read_file

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store

Runtime = Literal["nxpipe", "vllm-nxdi", "vllm-neuron", "optimum", "torchscript"]
RUNTIMES: Final[tuple[str, ...]] = get_args(Runtime)
COMPILERS: Final = ("neuronx-cc", "neuron-cc")
DRIVER, SDK = "driver", "sdk"  # pins that are no Python package

MAX_CONTRACT_BYTES: Final = 8 * 1024**2
MAX_PROOFS: Final = 4096  # a server of vLLM Neuron writes one for each graph
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLACES: Final = ("port", "artifact_folder")  # placeholders that are no tree
_SECONDS: Final = 60


class TreeFile(Document):
    """A file of a tree and the content that it must have."""

    path: SafePath
    sha256: Digest
    size: Size


class FileTree(Document):
    """Files that the runtime reads. `destination` is relative to the folder in which the agent lays out trees, or
    absolute where the runtime has the path compiled in. `runtime_writes` has patterns of names, such as locks, that the
    runtime may write beside the files; it does not read them as programs."""

    name: Label
    destination: str = Field(min_length=1, max_length=1024)
    runtime_writes: tuple[str, ...] = Field(strict=False, max_length=16)
    files: tuple[TreeFile, ...] = Field(strict=False, min_length=1, max_length=MAX_FILES)

    def may_have(self, path: str) -> bool:
        """Whether the runtime itself may have written a file that is not of the tree."""
        return any(fnmatchcase(path.rpartition("/")[2], pattern) for pattern in self.runtime_writes)

    @field_validator("destination")
    @classmethod
    def _is_plain(cls, path: str) -> str:
        parts = path.removeprefix("/").split("/")
        if not path.isprintable() or "\\" in path or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"{path!r} is not a plain path")
        return path


class ServingContract(Document):
    """How one runtime serves an artifact without compiling."""

    format: Literal["nxpipe.serving/1"] = "nxpipe.serving/1"
    name: Label
    runtime: Runtime
    target: Name
    lnc: Count  # physical cores of a logical one
    tp: Count
    cores: Count  # logical cores that the server takes
    pins: dict[str, str]  # exact versions by distribution; `driver` is the lowest
    trees: tuple[FileTree, ...] = Field(strict=False, max_length=16)
    environment: dict[str, str]
    argv: tuple[str, ...] = Field(strict=False, max_length=256)  # empty: the fleet's command
    forbidden: tuple[str, ...] = Field(strict=False, max_length=64)
    proves: tuple[str, ...] = Field(strict=False, max_length=MAX_PROOFS)
    disproves: tuple[str, ...] = Field(strict=False, max_length=64)
    progress: tuple[str, ...] = Field(strict=False, max_length=64)

    @model_validator(mode="after")
    def _is_consistent(self) -> "ServingContract":
        names = [tree.name for tree in self.trees]
        if len(set(names)) != len(names) or set(names) & set(_PLACES):
            raise ValueError(f"trees {names} need distinct names other than {', '.join(_PLACES)}")
        _refuse_overlap([tree.destination for tree in self.trees])
        for variable in (*self.environment, *self.forbidden):
            if not _VARIABLE.fullmatch(variable):
                raise ValueError(f"{variable!r} is no name of a variable")
        if both := set(self.environment) & set(self.forbidden):
            raise ValueError(f"{min(both)} is both set and forbidden")
        for pattern in (*self.proves, *self.disproves):
            try:
                re.compile(pattern)
            except re.error as fault:
                raise ValueError(f"{pattern!r} is no regular expression: {fault}") from None
        places = dict.fromkeys((*names, *_PLACES), "")
        for text in (*self.environment.values(), *self.argv):
            _substituted(text, places)
        return self

    @property
    def required(self) -> tuple[str, ...]:
        """Every file of the trees, as TREE/PATH. Trees are whole: a runtime that misses one file may compile anew."""
        return tuple(f"{tree.name}/{file.path}" for tree in self.trees for file in tree.files)

    @property
    def needs_artifact(self) -> bool:
        """True if the command reads the folder of a fetched artifact."""
        return any("${artifact_folder}" in text for text in (*self.argv, *self.environment.values()))

    def substituted(self, text: str, places: Mapping[str, str]) -> str:
        """An argument or a value with folders and port in place of their names."""
        return _substituted(text, places)

    def to_bytes(self) -> bytes:
        data = canonical_json(self.model_dump())
        if len(data) > MAX_CONTRACT_BYTES:
            raise InvalidDocument(f"contract {self.name} has {len(data)} bytes, and {MAX_CONTRACT_BYTES} are allowed")
        return data

    @classmethod
    def from_bytes(cls, data: bytes) -> "ServingContract":
        return parse_document(cls, parse_canonical_json(data, limit=MAX_CONTRACT_BYTES))


def _substituted(text: str, places: Mapping[str, str]) -> str:
    try:
        return Template(text).substitute(places)
    except (KeyError, ValueError) as fault:
        raise ValueError(f"{text!r} has a placeholder other than {', '.join(sorted(places))}: {fault}") from None


def _refuse_overlap(destinations: list[str]) -> None:
    for one in destinations:
        for other in destinations:
            if one is not other and f"{one}/".startswith(f"{other}/"):
                raise ValueError(f"trees at {other} and {one} overlap")


def contracts_of(store: "Store", manifest: Manifest) -> tuple[ServingContract, ...]:
    """The contracts of a published artifact, by the order of its payloads; our own server's for one without."""
    stored = tuple(ServingContract.from_bytes(store.read_blob(payload.contract)) for payload in manifest.serving)
    return stored or tuple(own_contract(manifest))


def contract_of_folder(folder: Path, name: str | None = None) -> ServingContract | None:
    """The contract of a fetched folder; None for an artifact that no server runs.

    Without a name, an artifact has at most one payload. NotReady for a folder that is no fetched one, or damaged.
    """
    manifest = fetched_manifest(folder)
    payloads = [payload for payload in manifest.serving if name in (None, payload.name)]
    if len(payloads) > 1:
        names = ", ".join(payload.name for payload in payloads)
        raise NotReady(f"{folder} has the contracts {names}; name one of them")
    if not payloads:
        if name is not None:
            raise NotReady(f"{folder} has no contract {name}; fetch an artifact that has it")
        return next(own_contract(manifest, on_devices=any(folder.glob("executables/*.neff"))), None)
    path = folder / SERVING / f"{payloads[0].name}.json"
    try:
        data = read_file(path, limit=MAX_CONTRACT_BYTES)
        if Blob.of(data) != payloads[0].contract:
            raise InvalidDocument("it is not the one that the manifest names")
        return ServingContract.from_bytes(data)
    except (OSError, ValueError, InvalidDocument) as fault:
        raise NotReady(f"{path} cannot be used ({cause_of(fault)}); fetch the artifact again") from fault


def fetched_manifest(folder: Path) -> Manifest:
    """The manifest of a fetched folder; NotReady for a folder that is no complete fetch."""
    path = folder / MANIFEST
    try:
        return Manifest.from_bytes(read_file(path, limit=MAX_MANIFEST_BYTES))
    except (OSError, ValueError, InvalidDocument) as fault:
        raise NotReady(
            f"{path} cannot be used ({cause_of(fault)}); the folder is not a complete fetch: run nxpipe store fetch "
            "again"
        ) from fault


def own_contract(
    manifest: Manifest, pins: Mapping[str, str] | None = None, *, on_devices: bool = True
) -> Iterator[ServingContract]:
    """The contract with `nxpipe serve`, which holds no compiler; none for an artifact without programs. `on_devices`
    is false for a folder with the emulator's programs only, as that of a rehearsal."""
    if not manifest.executables:
        return
    degree = max(executable.tensor_parallel for executable in manifest.executables)
    device = ("--device",) if manifest.runs_on_devices and on_devices else ()
    yield ServingContract(
        name="nxpipe",
        runtime="nxpipe",
        target=manifest.target,
        lnc=default_lnc(manifest.target),
        tp=degree,
        cores=degree,
        pins=dict(pins or {}),
        trees=(),
        environment={},
        argv=("nxpipe", "serve", "--folder", "${artifact_folder}", *device, "--host", "0.0.0.0", "--port", "${port}"),  # noqa: S104
        forbidden=(),
        proves=(),
        disproves=(),
        progress=("serving_generation_tokens_total", "serving_prompt_tokens_total", "serving_responses_total"),
    )


def default_lnc(target: str) -> int:
    """Physical cores of a logical one, as the instances of a target group them by default."""
    return next((CORES[one.core].lnc_default for one in INSTANCES.values() if one.compiler_target == target), 1)


def require_pins(contract: ServingContract, installed: Mapping[str, str]) -> None:
    """Raise NotReady for the first version that differs from its pin. `installed` has names as `installed_versions`
    returns them. The SDK's own number is compared only where the host states it: its packages are pinned too."""
    for package, wanted in sorted(contract.pins.items()):
        found = installed.get(package)
        if found is None and package == SDK:
            continue
        if found is None or not _satisfies(package, wanted, found):
            least = "at least " if package == DRIVER else ""
            raise NotReady(
                f"contract {contract.name} needs {package} {least}{wanted}, and {found or 'none'} is installed; "
                f"install {package} {wanted} in the server's environment, or import what this version compiled"
            )


def _satisfies(package: str, wanted: str, found: str) -> bool:
    if package == DRIVER:
        return version_numbers(found) >= version_numbers(wanted)
    return found == wanted or ("+" not in wanted and found.partition("+")[0] == wanted)


_LIST: Final = """
import importlib.metadata, json
found = {}
for each in importlib.metadata.distributions():
    found.setdefault(each.metadata["Name"] or "", each.version)  # the first on the path is the one that is imported
print(json.dumps(found))
"""


def installed_versions(python: str | Path = sys.executable, driver: Path = DRIVER_VERSION) -> dict[str, str]:
    """Versions of the distributions that an interpreter sees, by normalised name, and of the Neuron driver.

    Reads their metadata and imports none of them: importing torch takes seconds, and torch_neuronx needs devices.
    """
    try:
        listed = subprocess.run(
            [str(python), "-c", _LIST], capture_output=True, text=True, timeout=_SECONDS, check=True, cwd="/"
        )
        found = {_normalised(name): str(version) for name, version in json.loads(listed.stdout).items()}
    except (OSError, subprocess.SubprocessError, ValueError, AttributeError) as fault:
        raise NotReady(
            f"{python} does not list its packages ({cause_of(fault)}); name the interpreter of the server's environment"
        ) from fault
    try:
        return found | {DRIVER: driver.read_text().strip()}
    except OSError:
        return found  # no driver: a pin of it names what is missing


def interpreter_of(program: str, path: str | None = None) -> Path:
    """The Python of a console script, which lies beside it: `vllm` of a venv has that venv's packages."""
    found = shutil.which(program, path=path)
    if found is None:
        raise NotReady(f"there is no program {program!r} on this instance; install the contract's runtime in the AMI")
    for name in ("python3", "python"):
        if (python := Path(found).parent / name).exists():
            return python
    raise NotReady(f"there is no Python beside {found}; install the runtime with pip in an environment of its own")


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
