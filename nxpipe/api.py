"""The Python API: check, plan, build, verify, prove and preflight, as functions of the library that the commands call.

A model is a hub id, a folder, or a .pt2 or .onnx file. The keywords of `ModelKeywords` have the meaning and the
defaults of the keys of [[models]] in nxpipe.toml; only `preflight` reads that file. Errors are those of the library,
such as `nxpipe.pipeline.util.errors.ModelSourceError` and `nxpipe.emulator.errors.CompileError`.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from nxpipe.emulator.confinement import confined
from nxpipe.pipeline.models.spec import ModelSpec, spec_options
from nxpipe.pipeline.util.errors import PipelineError
from nxpipe.pipeline.util.files import NAME

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store
    from nxpipe.artifact_store.evidence import Evidence
    from nxpipe.pipeline.build.plan import BuildPlan
    from nxpipe.pipeline.build.run import BuildRun
    from nxpipe.pipeline.build.state import CellResult
    from nxpipe.pipeline.check.report import Report
    from nxpipe.pipeline.fleet.preflight_rules import PreflightReport
    from nxpipe.pipeline.verify.comparison import Comparison

__all__ = ["BuildFailed", "ModelKeywords", "build", "check", "plan", "preflight", "prove", "verify"]


class ModelKeywords(TypedDict, total=False):
    """Keywords that select the programs of a model; all are optional.

    task: what the model is used for; default: the task in its config.json. batches, buckets: the batch sizes and
    sequence lengths to compile for; default: (1,) and (128,). phases: ("forward",), ("prefill",) or
    ("prefill", "decode"); default: by task. autocast, autocast_type: the operators that run in a lower precision, and
    that precision; default: "matmult" and "bf16". weights: "hub", "random:SEED" or a folder of safetensors; default:
    the folder's own, or the hub's. revision: a branch, tag or commit of the hub. axes: the sizes of dynamic axes of an
    ONNX file.
    """

    task: str | None
    batches: tuple[int, ...]
    buckets: tuple[int, ...] | None
    phases: tuple[str, ...] | None
    autocast: str
    autocast_type: str
    weights: str | None
    revision: str | None
    axes: Mapping[str, int]


class BuildFailed(PipelineError):
    """A build that could not publish every artifact; `cells` are the missing programs with their failures."""

    def __init__(self, cells: "Sequence[CellResult]") -> None:
        self.cells = tuple(cells)
        reasons = dict.fromkeys(cell.failure.message if cell.failure else cell.status.value for cell in cells)
        super().__init__(f"{len(self.cells)} programs are missing: {'; '.join(reasons)}")


def check(
    model: str | Path, *, target: str = "inf2.xlarge", tp: int | None = None, **keywords: Unpack[ModelKeywords]
) -> "Report":
    """Check that a model compiles for a target and fits its memory; needs no weights.

    `target` is an instance type, or "all". Without `tp`, the report names the smallest tensor-parallel degree that
    fits. Problems of the model are findings of the report, not exceptions.
    """
    from nxpipe.pipeline.check.checker import check as check_model

    with confined():
        return check_model(_spec(model, target, tp, keywords), _silent)


def plan(
    model: str | Path,
    *,
    store: "str | Store",
    target: str = "inf2.xlarge",
    tp: int = 1,
    verify: bool = True,
    force: bool = False,
    state: Path = Path(NAME),
    **keywords: Unpack[ModelKeywords],
) -> "BuildPlan":
    """Plan a build: each program of each artifact, its status in the store, and why it is a cache miss.

    The keywords are those of `build`. Compiles nothing and writes nothing; a program that cannot be built is a cell
    with a `failure`, not an exception.
    """
    run = _run(_opened(store), state, force=force)
    with confined():
        return run.plan([replace(_spec(model, target, tp, keywords), verified=verify)])


def build(
    model: str | Path,
    *,
    store: "str | Store",
    target: str = "inf2.xlarge",
    tp: int = 1,
    verify: bool = True,
    force: bool = False,
    state: Path = Path(NAME),
    **keywords: Unpack[ModelKeywords],
) -> "tuple[Published, ...]":
    """Compile a model, verify it and publish the artifact, unless the store already has it.

    Returns the published artifacts; a build for one target and degree has one. Runs in processes of this machine.
    `state` is the folder for the timings of earlier builds. Raises `BuildFailed` if a program is missing.
    """
    opened = _opened(store)
    run = _run(opened, state, force=force)
    with confined():
        results = run.execute(run.plan([replace(_spec(model, target, tp, keywords), verified=verify)]))
    if missing := results.missing():
        raise BuildFailed(missing)
    return tuple(published for artifact in results.plan.artifacts if (published := opened.find(artifact.key)))


def verify(
    model: "str | Path | Published",
    *,
    store: "str | Store | None" = None,
    target: str = "inf2.xlarge",
    tp: int = 1,
    layers: bool = False,
    **keywords: Unpack[ModelKeywords],
) -> "tuple[Comparison, ...]":
    """Compare the emulated outputs of a model, or of an artifact of `store`, with the reference.

    `model` may also be an artifact that `build` returned, or its name MODEL@KEY; its programs run on their stored
    inputs. The reference is PyTorch in fp32, or ONNX's reference evaluator for an ONNX file. `layers` compares every
    layer too.
    Returns one comparison per program; no threshold is applied.
    """
    from nxpipe.pipeline.compile.spec import BuildSpec
    from nxpipe.pipeline.verify.cases import compare_model
    from nxpipe.pipeline.verify.comparison import VerifyOptions
    from nxpipe.pipeline.verify.execution import FAST

    with confined():
        if store is not None:
            from nxpipe.pipeline.verify.replay import compare_artifact

            opened = _opened(store)
            published = opened.resolve(str(model)) if isinstance(model, str | Path) else model
            return tuple(compare_artifact(published, opened, _silent, FAST))
        if not isinstance(model, str | Path):
            raise TypeError("an artifact requires its store; pass store=")
        spec = BuildSpec.of(_spec(model, target, tp, keywords))
        return tuple(compare_model(spec, VerifyOptions(layers=layers), _silent))


def prove(model: "str | Published", *, store: "str | Store", device: str = "auto", runs: int = 100) -> "Evidence":
    """Run an artifact, or the one of a name MODEL@KEY, on this machine's Neuron devices, and store the evidence.

    Its programs run on the inputs of its emulated evidence, and must agree with the answers there within the default
    thresholds; each is timed `runs` times. `device` is "nrtpy", "libnrt" or "auto". The document is not signed. Raises
    `VerificationFailed` for an answer beyond the thresholds, and `NotReady` without a device or for one that fails.
    """
    from nxpipe.pipeline.config import Config, Project
    from nxpipe.pipeline.models.thresholds import Thresholds
    from nxpipe.pipeline.verify.prove import ProveOptions
    from nxpipe.pipeline.verify.prove import prove as prove_artifact

    opened = _opened(store)
    published = opened.resolve(model) if isinstance(model, str) else model
    allowed = Thresholds.of(Config(project=Project(name="api")))
    return prove_artifact(published, opened, allowed, ProveOptions(device, runs), _silent)


def preflight(config_path: str | Path = "nxpipe.toml", region: str | None = None) -> "PreflightReport":
    """Compare the AWS account of the current credentials with what nxpipe.toml deploys; change nothing.

    `region` replaces that of the file. Obstacles are rows of the report, not exceptions; a check without permission is
    a row in state "unknown".
    """
    from nxpipe.pipeline.fleet.preflight import preflight as examine

    return examine(Path(config_path), region)


def _run(store: "Store", state: Path, *, force: bool) -> "BuildRun":
    from nxpipe.pipeline.build.jobs import BuildOptions
    from nxpipe.pipeline.build.run import BuildRun
    from nxpipe.pipeline.config import Config, Project
    from nxpipe.pipeline.models.thresholds import Thresholds
    from nxpipe.pipeline.util.console import Console

    config = Config(project=Project(name="api"))
    return BuildRun(Console(quiet=True), store, config, Thresholds.of(config), state, BuildOptions(force=force))


def _silent(title: str) -> Any:
    """The progress callback of the library, without output."""
    return nullcontext()


def _spec(model: str | Path, target: str, tp: int | None, keywords: ModelKeywords) -> ModelSpec:
    from nxpipe.pipeline.config import Model

    defaults = dict.fromkeys(spec_options()) | {
        name: Model.model_fields[name].default for name in ("batches", "autocast", "autocast_type")
    }
    options = {name: value for name, value in keywords.items() if name != "axes"}
    axes = tuple(keywords.get("axes", {}).items())
    return ModelSpec.from_options(str(model), defaults | options | {"target": target, "tp": tp}, axes=axes)


def _opened(store: "str | Store") -> "Store":
    from nxpipe.artifact_store import open_store

    return open_store(store) if isinstance(store, str) else store
