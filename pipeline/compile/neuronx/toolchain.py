"""Which of AWS's packages are here, and in which releases. Nothing of them is imported or run."""

import shutil
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from nxpipe.pipeline.util.errors import MissingSoftware

PROGRAM: Final = "neuronx-cc"
GET_IT: Final = "use an AWS Neuron image, with neuronx-cc on the PATH and torch-neuronx; the emulator needs neither"
_NEEDED: Final = ("neuronx-cc", "torch-neuronx")
_BESIDE: Final = ("torch-xla", "libneuronxla")  # they make the HLO module, where they are packages of their own


def toolchain() -> dict[str, str]:
    """The releases that decide what a NEFF holds; an error names what is missing."""
    missing = _missing()
    if missing:
        raise MissingSoftware(missing, "--backend neuronx", GET_IT)
    found = {name: _installed(name) for name in (*_NEEDED, *_BESIDE)}
    return {name: release for name, release in found.items() if release is not None}


def ready() -> str | None:
    """The releases in a line; None where the backend cannot run."""
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
