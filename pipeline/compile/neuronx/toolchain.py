"""Toolchain of AWS: installed releases, flags of neuronx-cc and its environment. None of it is imported or run."""

import shlex
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nxpipe.emulator.hardware import CORES
from nxpipe.pipeline.util.errors import BuildRefused, MissingSoftware

if TYPE_CHECKING:
    from nxpipe.pipeline.compile.spec import BuildSpec

PROGRAM: Final = "neuronx-cc"
REMEDY: Final = "use an AWS Neuron image, with neuronx-cc on the PATH and torch-neuronx; the emulator needs neither"
_NEEDED: Final = ("neuronx-cc", "torch-neuronx")
_OPTIONAL: Final = ("torch-xla", "libneuronxla")  # they make the HLO module, where they are separate packages


def toolchain() -> dict[str, str]:
    """The releases that a NEFF depends on; MissingSoftware names the first that is absent."""
    missing = _missing()
    if missing:
        raise MissingSoftware(missing, "--backend neuronx", REMEDY)
    found = {name: _installed(name) for name in (*_NEEDED, *_OPTIONAL)}
    return {name: release for name, release in found.items() if release is not None}


def installed_releases() -> str | None:
    """The releases in one line; None where the backend cannot run."""
    return None if _missing() else ", ".join(f"{name} {release}" for name, release in toolchain().items())


def _missing() -> str | None:
    for name in _NEEDED:
        if _installed(name) is None:
            return name
    return None if shutil.which(PROGRAM) else f"the program {PROGRAM} on the PATH"


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


TARGETS: Final = ("inf2", "trn1", "trn1n", "trn2")

_TEXT: Final = (
    "feature-extraction",
    "fill-mask",
    "text-classification",
    "token-classification",
    "question-answering",
    "text-generation",
    "text2text-generation",
)
_MODEL_TYPES: Final = {**dict.fromkeys(_TEXT, "transformer"), "image-denoising": "unet-inference"}

# Flags in NEURON_CC_FLAGS that AWS's wrapper keeps for itself; any other would reach the compiler.
_WRAPPER_FLAGS: Final = ("--cache_dir", "--no_cache", "--retry_failed_compilation", "--log_level")
_RETRY: Final = "--retry_failed_compilation"
# Variables that change the model's types silently, or make the compiler extract graphs only.
_MISLEADING: Final = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "NEURON_EXTRACT_GRAPHS_ONLY")


def compiler_flags(spec: "BuildSpec") -> tuple[str, ...]:
    """All flags are explicit, since defaults have changed between releases."""
    casts = ("--auto-cast-type", spec.autocast_type) if spec.autocast != "none" else ()
    return (
        *("--target", spec.target.compiler_target),
        *("--model-type", _MODEL_TYPES.get(spec.source.task, "generic")),
        *("--auto-cast", spec.autocast),
        *casts,
        *("--logical-nc-config", str(_logical_cores(spec))),
    )


def compiler_environment(spec: "BuildSpec", given: Mapping[str, str], cache: Path) -> dict[str, str]:
    """The user's environment, with a compile cache of its own unless one is set, and without misleading variables."""
    kept = {name: value for name, value in given.items() if name not in _MISLEADING}
    flags = wrapper_flags(given)
    return {
        "NEURON_COMPILE_CACHE_URL": str(cache),
        **kept,
        "NEURON_CC_FLAGS": shlex.join(flags if _RETRY in flags else [*flags, _RETRY]),
        "NEURON_LOGICAL_NC_CONFIG": str(_logical_cores(spec)),
    }


def wrapper_flags(given: Mapping[str, str]) -> list[str]:
    """The flags in NEURON_CC_FLAGS; BuildRefused for one that would change a program without changing its key."""
    try:
        flags = shlex.split(given.get("NEURON_CC_FLAGS", ""))
    except ValueError as error:
        raise BuildRefused(f"NEURON_CC_FLAGS cannot be read ({error}); unset it, or close its quotes") from error
    for flag in flags:
        if flag.partition("=")[0] not in _WRAPPER_FLAGS:
            raise BuildRefused(
                f"NEURON_CC_FLAGS holds {flag!r}, which would change the program and not its key; leave only "
                f"{', '.join(_WRAPPER_FLAGS)} there (a value goes behind '=')"
            )
    return flags


def _logical_cores(spec: "BuildSpec") -> int:
    return CORES[spec.target.core].lnc_default
