"""The words that neuronx-cc is called with, and the environment that it is called in."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from nxpipe.emulator.hardware import CORES
from nxpipe.pipeline.request import BuildRequest
from nxpipe.pipeline.util.errors import BuildRefused

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

# What AWS's wrapper takes out of NEURON_CC_FLAGS for itself; all else there would reach the compiler.
_OF_THE_WRAPPER: Final = ("--cache_dir", "--no_cache", "--retry_failed_compilation", "--log_level")
_RETRY: Final = "--retry_failed_compilation"
# They change types behind the model's back, or make a compiler that only pretends.
_MISLEADING: Final = ("XLA_USE_BF16", "XLA_DOWNCAST_BF16", "NEURON_EXTRACT_GRAPHS_ONLY")


def compiler_flags(request: BuildRequest) -> tuple[str, ...]:
    """Each is said, whatever its default: defaults have changed between releases."""
    casts = ("--auto-cast-type", request.autocast_type) if request.autocast != "none" else ()
    return (
        *("--target", request.target.compiler_target),
        *("--model-type", _MODEL_TYPES.get(request.source.task, "generic")),
        *("--auto-cast", request.autocast),
        *casts,
        *("--logical-nc-config", str(_logical_cores(request))),
    )


def compiler_environment(request: BuildRequest, given: Mapping[str, str], cache: Path) -> dict[str, str]:
    """The user's, with a cache of its own where none is named, and without what would mislead."""
    kept = {name: value for name, value in given.items() if name not in _MISLEADING}
    words = wrapper_words(given)
    return {
        "NEURON_COMPILE_CACHE_URL": str(cache),
        **kept,
        "NEURON_CC_FLAGS": shlex.join(words if _RETRY in words else [*words, _RETRY]),
        "NEURON_LOGICAL_NC_CONFIG": str(_logical_cores(request)),
    }


def wrapper_words(given: Mapping[str, str]) -> list[str]:
    """NEURON_CC_FLAGS, where it holds nothing that would change a program without changing its key."""
    try:
        words = shlex.split(given.get("NEURON_CC_FLAGS", ""))
    except ValueError as error:
        raise BuildRefused(f"NEURON_CC_FLAGS cannot be read ({error}); unset it, or close its quotes") from error
    for word in words:
        if word.partition("=")[0] not in _OF_THE_WRAPPER:
            raise BuildRefused(
                f"NEURON_CC_FLAGS holds {word!r}, which would change the program and not its key; leave only "
                f"{', '.join(_OF_THE_WRAPPER)} there (a value goes behind '=')"
            )
    return words


def _logical_cores(request: BuildRequest) -> int:
    return CORES[request.target.core].lnc_default
