"""Toolchain of AWS: installed releases, flags of neuronx-cc and its environment. None of it is imported or run."""

import os
import shlex
import shutil
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nxpipe.emulator.hardware import CORES
from nxpipe.pipeline.models.program_file import SavedProgram
from nxpipe.pipeline.models.source import ModelSource
from nxpipe.pipeline.models.versions import compiler_digest, source_digest
from nxpipe.pipeline.util.errors import BuildRefused, MissingSoftware

if TYPE_CHECKING:
    from nxpipe.pipeline.compile.spec import BuildSpec

PROGRAM: Final = "neuronx-cc"
TARGETS: Final = ("inf2", "trn1", "trn1n", "trn2")
REMEDY: Final = "use an AWS Neuron image, with neuronx-cc on the PATH and torch-neuronx; the emulator needs neither"
_NEEDED: Final = ("neuronx-cc", "torch-neuronx")
_OPTIONAL: Final = ("torch-xla", "libneuronxla")  # they create the HLO module, if they are separate packages


class NeuronxToolchain:
    evidence: tuple[str, ...] = ()  # a NEFF runs on a device only

    def require_source(self, source: ModelSource) -> None:
        if isinstance(source, SavedProgram):
            raise BuildRefused(
                f"{source.id}: neuronx-cc cannot build a saved program; pass the model's folder or id, or "
                "--backend emulator"
            )

    def require_installed(self) -> None:
        toolchain()

    def check(self, spec: "BuildSpec") -> None:
        if spec.tensor_parallel != 1:
            raise BuildRefused(
                f"{spec.source.id}: torch_neuronx.trace compiles for one core, and --tp is {spec.tensor_parallel}; "
                f"pass --tp 1 where the model fits one core of {spec.target.name} (see nxpipe check), or "
                "--backend emulator"
            )
        if spec.target.compiler_target not in TARGETS:
            raise BuildRefused(
                f"{spec.source.id}: neuronx-cc has no target {spec.target.name}; its targets are "
                f"{', '.join(TARGETS)}; choose an instance of those, or --backend emulator"
            )
        wrapper_flags(os.environ)

    def key_inputs(self, spec: "BuildSpec") -> dict[str, object]:
        return {
            "backend": "neuronx",
            "source": compiler_digest(),  # of nxpipe's own capture, whose graph key names the program
            "driver": source_digest(Path(__file__).parent),
            "flags": list(compiler_flags(spec)),
            "toolchain": toolchain(),
        }

    def weights_inputs(self, spec: "BuildSpec") -> dict[str, object]:
        return {"weights": spec.weights.identity()}  # a NEFF contains its weights


def toolchain() -> dict[str, str]:
    """The installed releases that a NEFF depends on; MissingSoftware for the first that is absent."""
    missing = _missing()
    if missing:
        raise MissingSoftware(missing, "--backend neuronx", REMEDY)
    releases = {name: _installed(name) for name in (*_NEEDED, *_OPTIONAL)}
    return {name: release for name, release in releases.items() if release is not None}


def installed_releases() -> str | None:
    """The releases in one line; None if the backend cannot run."""
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

# Flags in NEURON_CC_FLAGS that AWS's wrapper consumes; all others reach the compiler.
_WRAPPER_FLAGS: Final = ("--cache_dir", "--no_cache", "--retry_failed_compilation", "--log_level")
_RETRY: Final = "--retry_failed_compilation"
# Variables that silently change the model's types, or limit the compiler to extracting graphs.
_MISLEADING: Final = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "NEURON_EXTRACT_GRAPHS_ONLY")


def compiler_flags(spec: "BuildSpec") -> tuple[str, ...]:
    """The flags of neuronx-cc, all explicit, since defaults have changed between releases."""
    casts = ("--auto-cast-type", spec.autocast_type) if spec.autocast != "none" else ()
    return (
        *("--target", spec.target.compiler_target),
        *("--model-type", _MODEL_TYPES.get(spec.source.task, "generic")),
        *("--auto-cast", spec.autocast),
        *casts,
        *("--logical-nc-config", str(_logical_cores(spec))),
    )


def compiler_environment(spec: "BuildSpec", environ: Mapping[str, str], cache: Path) -> dict[str, str]:
    """The user's environment without misleading variables, and with a temporary compile cache unless the user has set
    one."""
    environment = {name: value for name, value in environ.items() if name not in _MISLEADING}
    flags = wrapper_flags(environ)
    return {
        "NEURON_COMPILE_CACHE_URL": str(cache),
        **environment,
        "NEURON_CC_FLAGS": shlex.join(flags if _RETRY in flags else [*flags, _RETRY]),
        "NEURON_LOGICAL_NC_CONFIG": str(_logical_cores(spec)),
    }


def wrapper_flags(environ: Mapping[str, str]) -> list[str]:
    """The flags in NEURON_CC_FLAGS; BuildRefused for one that would change a program without changing its key."""
    try:
        flags = shlex.split(environ.get("NEURON_CC_FLAGS", ""))
    except ValueError as error:
        raise BuildRefused(f"NEURON_CC_FLAGS cannot be read ({error}); unset it, or close its quotes") from error
    for flag in flags:
        if flag.partition("=")[0] not in _WRAPPER_FLAGS:
            raise BuildRefused(
                f"NEURON_CC_FLAGS holds {flag!r}, which would change the program and not its key; leave only "
                f"{', '.join(_WRAPPER_FLAGS)} there (write a value as FLAG=VALUE)"
            )
    return flags


def _logical_cores(spec: "BuildSpec") -> int:
    return CORES[spec.target.core].lnc_default
