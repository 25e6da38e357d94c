"""Toolchain of AWS: installed releases, and the flags of neuronx-cc. Nothing of it is imported."""

import os
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nxpipe.artifact_store.evidence import EMULATED, XLA
from nxpipe.emulator.hardware import CORES, INSTANCES
from nxpipe.emulator.hlo.constraints import TARGETS
from nxpipe.pipeline.compile.neuronx.compiler import COMMAND, COMPILER_REMEDY, compiler_release
from nxpipe.pipeline.models.versions import compiler_digest, source_digest
from nxpipe.pipeline.util.errors import BuildRefused, MissingSoftware

if TYPE_CHECKING:
    from nxpipe.pipeline.compile.spec import BuildSpec

_HLO: Final = "jaxlib"  # writes the HLO module
_HLO_REMEDY: Final = "pip install 'nxpipe[neuron]'"
REMEDY: Final = f"{_HLO_REMEDY}, and {COMPILER_REMEDY}; the emulator needs neither"
_NEEDED_FOR: Final = "--backend neuronx"


class NeuronxToolchain:
    evidence: tuple[str, ...] = (EMULATED, XLA)

    def require_installed(self) -> None:
        toolchain()

    def check(self, spec: "BuildSpec") -> None:
        if spec.target.compiler_target not in TARGETS:
            raise BuildRefused(
                f"{spec.source.id}: neuronx-cc has no target {spec.target.name}; its targets are "
                f"{', '.join(TARGETS)}; choose an instance of those, or --backend emulator"
            )
        require_no_flags(os.environ)

    def key_inputs(self, spec: "BuildSpec") -> dict[str, object]:
        return {
            "backend": "neuronx",
            "source": compiler_digest(),
            "driver": source_digest(Path(__file__).parent),
            "flags": {phase: list(compiler_flags(Compilation.of(spec, phase))) for phase in spec.source.phases},
            "toolchain": toolchain(),
        }


def toolchain() -> dict[str, str]:
    """The installed releases that a device's program depends on; MissingSoftware for the first that is absent."""
    compiler, hlo = compiler_release(), _installed(_HLO)
    if compiler is None:
        raise MissingSoftware(f"{COMMAND} on the PATH", _NEEDED_FOR, COMPILER_REMEDY)
    if hlo is None:
        raise MissingSoftware(_HLO, _NEEDED_FOR, _HLO_REMEDY)
    return {COMMAND: compiler, _HLO: hlo}


def installed_releases() -> str | None:
    """The releases in one line; None if the back end cannot run."""
    try:
        return ", ".join(f"{name} {release}" for name, release in toolchain().items())
    except MissingSoftware:
        return None


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


# Flags --------------------------------------------------------------------------------------------------------------

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
_FIRST_GENERATION: Final = ("inf2", "trn1", "trn1n")  # of NeuronCore-v2
_WITH_INTEGER_FLAGS: Final = (2, 27)  # the first release whose reference has them


@dataclass(frozen=True)
class Compilation:
    """Everything that the flags of one program depend on."""

    target: str
    phase: str = "forward"
    task: str = ""
    release: str = ""  # of neuronx-cc; empty for the newest

    @classmethod
    def of(cls, spec: "BuildSpec", phase: str) -> "Compilation":
        return cls(spec.target.compiler_target, phase, spec.source.task, toolchain()[COMMAND])

    @property
    def logical_cores(self) -> int:
        """Physical cores of one logical core; the runtime's setting must be the same."""
        return _LOGICAL_CORES[self.target]

    @property
    def has_integer_flags(self) -> bool:
        parts = re.match(r"(\d+)\.(\d+)", self.release)
        return parts is None or (int(parts[1]), int(parts[2])) >= _WITH_INTEGER_FLAGS


_LOGICAL_CORES: Final[Mapping[str, int]] = {
    each.compiler_target: CORES[each.core].lnc_default for each in INSTANCES.values()
}


def _model_type(it: Compilation) -> str:
    return f"--model-type={_MODEL_TYPES.get(it.task, 'generic')}"


def _optimization(it: Compilation) -> str:
    return "-O2" if it.phase == "decode" else "-O1"


def _saturation(it: Compilation) -> str | None:
    return "--enable-saturate-infinity" if it.target in _FIRST_GENERATION else None


def _downcast(it: Compilation) -> str | None:
    return "--implicit-integer-downcast=all" if it.has_integer_flags else None


def _int64(it: Compilation) -> str | None:
    has_choice = it.has_integer_flags and it.target not in _FIRST_GENERATION
    return "--native-int64=disabled" if has_choice else None


# All flags that may change a NEFF, each with its reason; None leaves one out. docs/guides/neuronx.md has the table.
# Defaults have changed between releases, so that what is meant is passed.
FLAGS: Final[tuple[tuple[Callable[[Compilation], str | None], str], ...]] = (
    (lambda it: f"--target={it.target}", "required; no device is looked at"),
    (_model_type, "scheduling for the kind of model"),
    (lambda _: "--auto-cast=none", "the module has explicit types: nxpipe's autocast has decided"),
    (lambda it: f"--lnc={it.logical_cores}", "the cores that a loader gives to a rank"),
    (_optimization, "-O1 compiles layer by layer; -O2 avoids the calls, which each token of a decode would pay"),
    (lambda _: "--enable-mixed-precision-accumulation", "sums of softmax and norms in fp32, as the emulator has them"),
    (_saturation, "an infinite mask would become NaN in a transposition by the matrix engine of NeuronCore-v2"),
    (_downcast, "no integer of a module has more than 32 bits; the next release refuses some operators otherwise"),
    (_int64, "64-bit integers are slower, and no module has one; the next release has them by default"),
)


def compiler_flags(compilation: Compilation) -> tuple[str, ...]:
    """The flags of a program, in the order of the table."""
    return tuple(flag for choose, _ in FLAGS if (flag := choose(compilation)) is not None)


# Flags in NEURON_CC_FLAGS for AWS's wrapper around the compiler, which changes no program.
_WRAPPER_FLAGS: Final = ("--cache_dir", "--no_cache", "--retry_failed_compilation", "--log_level")


def require_no_flags(environ: Mapping[str, str]) -> None:
    """Raise BuildRefused for a flag in NEURON_CC_FLAGS: frameworks pass it on, and a build would be without it."""
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
