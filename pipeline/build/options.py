"""Options of a build, None where `[build]` of nxpipe.toml decides; and the build matrix: models x targets x degrees."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nxpipe.pipeline.config import Config
from nxpipe.pipeline.config.sections import Backend
from nxpipe.pipeline.models.spec import ModelSpec, configured_models


@dataclass(frozen=True)
class BuildOptions:
    """`timeout`: seconds of one job. `memory_limit`: bytes of one job. `address` is that of a Ray cluster."""

    force: bool = False
    keep_going: bool = False
    retries: int = 2
    executor: str | None = None
    address: str | None = None
    jobs: int | None = None
    timeout: float | None = None
    memory_limit: int | None = None


def specs_of_options(
    options: Mapping[str, Any], config: Config, names: Sequence[str], root: Path
) -> tuple[ModelSpec, ...]:
    """Specifications of a command line: of its own model, or of those in nxpipe.toml."""
    model_id, verified = options["model_id"], not options["no_verify"]
    if model_id is None:
        return specs_of_config(config, names, root, backend=options["backend"], verified=verified)
    spec = ModelSpec.from_options(
        model_id,
        {**options, "target": options["target"][0], "tp": options["tp"][0]},
        axes=options["axes"],
        backend=options["backend"] or config.build.backend,
        verified=verified,
    )
    return _unique(_variants(spec, options["target"], options["tp"]))


def specs_of_config(
    config: Config, names: Sequence[str], root: Path, *, backend: Backend | None = None, verified: bool = True
) -> tuple[ModelSpec, ...]:
    """Specifications of all models in nxpipe.toml, or of the named ones; `backend` overrides the file's."""
    chosen = backend or config.build.backend
    return _unique(
        spec
        for model in configured_models(config, names)
        for first in [ModelSpec.from_config(model, root, backend=chosen, verified=verified)]
        for spec in (first, *(variant for also in model.also for variant in _variants(first, also.targets, also.tp)))
    )


def _unique(specs: Iterable[ModelSpec]) -> tuple[ModelSpec, ...]:
    """The specifications without duplicates, which two options may cause."""
    return tuple(dict.fromkeys(specs))


def _variants(spec: ModelSpec, targets: Sequence[str], degrees: Sequence[int]) -> Iterator[ModelSpec]:
    for target in targets:
        for degree in degrees:
            yield replace(spec, target=target, tp=degree)
