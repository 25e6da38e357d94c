"""Releases of libraries and of the driver, and source digests: what depends on the installation, without an import."""

import hashlib
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from nxpipe.artifact_store.canonical import canonical_json, sha256_hex
from nxpipe.pipeline.util.errors import MissingSoftware

DRIVER_VERSION: Final = Path("/sys/module/neuron/version")  # the file with that of the Neuron driver
# Releases of these can change a captured graph, so they are part of every key.
LIBRARIES: Final = ("torch", "transformers", "numpy")
# transformers selects the implementation of a layer by the presence of these.
_OPTIONAL: Final = (
    *("apex", "causal-conv1d", "detectron2", "flash-attn", "flash-linear-attention", "kernels", "mamba-ssm"),
    *("mambapy", "natten", "timm", "xlstm"),
)
_EXTRAS: Final = {"diffusers": "diffusion", "onnx": "onnx"}  # all others come with `compile`


@cache
def optional_versions() -> dict[str, str]:
    """Releases of the optional packages that change how transformers computes a layer."""
    versions = {}
    for name in _OPTIONAL:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def version_numbers(version: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"[0-9]+", version))


def digest_of(document: Mapping[str, object]) -> str:
    """The cache key of a document: SHA-256 of its canonical JSON."""
    return sha256_hex(canonical_json(document))


@cache
def library_version(name: str) -> str:
    """The installed release of a library, without importing it; builds for CPU and CUDA capture alike."""
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError as error:
        extra = _EXTRAS.get(name, "compile")
        raise MissingSoftware(name, "Building this model", f"pip install 'nxpipe[{extra}]'") from error


def compiler_digest() -> str:
    """The SHA-256 of the emulator's source: a changed compiler never reuses results of an older one."""
    from nxpipe.emulator import errors

    return source_digest(Path(errors.__file__).parent)


def comparison_digest() -> str:
    """The SHA-256 of the comparison's source, `pipeline/verify`: a changed comparison computes its figures again."""
    return source_digest(Path(__file__).parents[1] / "verify")


@cache
def source_digest(folder: Path) -> str:
    """The SHA-256 of all Python files in a folder, with their relative paths."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py"), key=lambda path: path.relative_to(folder).as_posix()):
        source = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{len(source)}\0".encode())
        digest.update(source)
    return digest.hexdigest()
