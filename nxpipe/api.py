"""The functions of the Python API, over the library that the commands call.

A model is a hub id, a folder, or a .pt2 or .onnx file. The keywords of `ModelKeywords` have the meaning and the
defaults of the keys of [[models]] in nxpipe.toml. Without `store`, the store is that of the commands: NXPIPE_STORE_URL,
else nxpipe.toml, else its default. Errors are those of the library; `nxpipe` exports them.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from nxpipe.emulator.confinement import confined
from nxpipe.pipeline.models.spec import ModelSpec, spec_options
from nxpipe.pipeline.util.errors import InputInvalid, PipelineError
from nxpipe.pipeline.util.files import NAME
from nxpipe.store import CONFIG, Artifact, Store, opened, published_of

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published
    from nxpipe.artifact_store import Store as ArtifactStore
    from nxpipe.artifact_store.evidence import Evidence
    from nxpipe.pipeline.build.plan import BuildPlan
    from nxpipe.pipeline.build.run import BuildRun
    from nxpipe.pipeline.build.state import CellResult
    from nxpipe.pipeline.check.report import Report
    from nxpipe.pipeline.fleet.preflight_rules import PreflightReport
    from nxpipe.pipeline.plan.traffic import LengthDistribution
    from nxpipe.pipeline.serving.inference import LoadedModel
    from nxpipe.results import ArtifactDifference, Bench, CapacityPlan, Explanation, Profile, Verification

__all__ = [
    *("BuildFailed", "ModelKeywords", "bench", "build", "build_plan", "check", "diff", "explain", "load"),
    *("plan_serve", "preflight", "profile", "prove", "verify"),
]


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
    batches: Sequence[int]
    buckets: Sequence[int] | None
    phases: Sequence[str] | None
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


def build_plan(
    model: str | Path,
    *,
    store: "str | Store | ArtifactStore | None" = None,
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
    run = _run(opened(store), state, force=force)
    with confined():
        return run.plan([replace(_spec(model, target, tp, keywords), verified=verify)])


def build(
    model: str | Path,
    *,
    store: "str | Store | ArtifactStore | None" = None,
    target: str = "inf2.xlarge",
    tp: int = 1,
    verify: bool = True,
    force: bool = False,
    state: Path = Path(NAME),
    **keywords: Unpack[ModelKeywords],
) -> tuple[Artifact, ...]:
    """Compile a model, verify it and publish the artifact, unless the store already has it.

    Returns the published artifacts; a build for one target and degree has one. Runs in processes of this machine.
    `state` is the folder for the timings of earlier builds. Raises `BuildFailed` if a program is missing.
    """
    target_store = opened(store)
    run = _run(target_store, state, force=force)
    with confined():
        results = run.execute(run.plan([replace(_spec(model, target, tp, keywords), verified=verify)]))
    if missing := results.missing():
        raise BuildFailed(missing)
    return tuple(artifact for planned in results.plan.artifacts if (artifact := target_store.find(planned.key)))


def verify(
    model: "str | Path | Artifact | Published",
    *,
    store: "str | Store | ArtifactStore | None" = None,
    target: str = "inf2.xlarge",
    tp: int = 1,
    layers: bool = False,
    **keywords: Unpack[ModelKeywords],
) -> "Verification":
    """Compare the emulated outputs of a model, or of an artifact, with the reference.

    `model` may also be an artifact, or with `store` its name MODEL@KEY; its programs run on their stored inputs. The
    reference is PyTorch in fp32, or ONNX's reference evaluator for an ONNX file. `layers` compares every layer too.
    Returns one comparison per program; no threshold is applied.
    """
    from nxpipe.pipeline.artifacts.lookup import is_artifact
    from nxpipe.pipeline.compile.spec import BuildSpec
    from nxpipe.pipeline.verify.cases import compare_model
    from nxpipe.pipeline.verify.comparison import VerifyOptions
    from nxpipe.pipeline.verify.execution import FAST
    from nxpipe.results import Verification

    with confined():
        if isinstance(model, Path) or (isinstance(model, str) and store is None and not is_artifact(model)):
            spec = BuildSpec.of(_spec(model, target, tp, keywords))
            return Verification(compare_model(spec, VerifyOptions(layers=layers), _silent))
        from nxpipe.pipeline.verify.replay import compare_artifact

        published, found = _located(model, store)
        return Verification(compare_artifact(published, found.stored, _silent, FAST))


def prove(
    model: "str | Artifact | Published",
    *,
    store: "str | Store | ArtifactStore | None" = None,
    device: str = "auto",
    runs: int = 100,
) -> "Evidence":
    """Run an artifact, or the one of a name MODEL@KEY, on this machine's Neuron devices, and store the evidence.

    Its programs run on the inputs of its emulated evidence, and must agree with the answers there within the default
    thresholds; each is timed `runs` times. `device` is "nrtpy", "libnrt" or "auto". The document is not signed. Raises
    `VerificationFailed` for an answer beyond the thresholds, and `NotReady` without a device or for one that fails.
    """
    from nxpipe.pipeline.config import Config, Project
    from nxpipe.pipeline.models.thresholds import Thresholds
    from nxpipe.pipeline.verify.prove import ProveOptions
    from nxpipe.pipeline.verify.prove import prove as prove_artifact

    published, found = _located(model, store)
    allowed = Thresholds.of(Config(project=Project(name="api")))
    return prove_artifact(published, found.stored, allowed, ProveOptions(device, runs), _silent)


def load(
    artifact: "str | Artifact | Published | None" = None,
    *,
    store: "str | Store | ArtifactStore | None" = None,
    channel: str | None = None,
    model: str | None = None,
    target: str | None = None,
    folder: str | Path | None = None,
    device: str = "emulator",
    mode: str = "fast",
    rows: int | None = None,
) -> "LoadedModel":
    """Load the programs of an artifact in this process, to run them; neither PyTorch nor transformers is imported.

    The artifact is an `Artifact` or its name MODEL@KEY; or that which a `channel` serves for a `model` and a `target`,
    if it serves several; or that in a `folder` which `nxpipe store fetch` has filled. `device` is "emulator", or
    "auto", "nrtpy" or "libnrt" for this machine's Neuron devices. On the emulator, `mode` "fast" computes the graph,
    and "isa" executes the instructions of the programs. `rows`: the batch size of text generation; by default the
    smallest that holds the prompts of a call.
    """
    from nxpipe.pipeline.serving.text import require_serving_libraries

    if sum(each is not None for each in (artifact, channel, folder)) != 1:
        raise InputInvalid("load: pass one of an artifact, channel= and folder=")
    if channel is None and (model or target):
        raise InputInvalid("load: model= and target= select an artifact of channel=")
    require_serving_libraries()
    from nxpipe.pipeline.serving.inference import load_artifact, load_folder

    if folder is not None:
        return load_folder(Path(folder), device=device, mode=mode, rows=rows)
    if channel is not None:
        artifact, store = _served_by(channel, model, target, store)
    assert artifact is not None, "one of the three"
    published, found = _located(artifact, store)
    return load_artifact(published, found.stored, device=device, mode=mode, rows=rows)


def profile(
    source: "str | Path | Artifact | Published",
    *,
    program: str | None = None,
    store: "str | Store | ArtifactStore | None" = None,
    target: str = "inf2.xlarge",
    tp: int = 1,
    **keywords: Unpack[ModelKeywords],
) -> "Profile":
    """Predict where the time of programs goes; nothing is run.

    `source` is an artifact or its name MODEL@KEY, a .nxe file, or a model, which is compiled without weights.
    `program` selects one program of an artifact. The result shows tables and charts in a notebook; `save_page` and
    `save_trace` write all of it.
    """
    from nxpipe.pipeline.artifacts.lookup import is_artifact
    from nxpipe.pipeline.profile.programs import program_in_file, programs_of_artifact, programs_of_spec
    from nxpipe.results import Profile

    if isinstance(source, str | Path) and Path(source).suffix == ".nxe":
        return Profile([program_in_file(Path(source))])
    if isinstance(source, Path) or (isinstance(source, str) and not is_artifact(source)):
        with confined():
            return Profile(list(programs_of_spec(_spec(source, target, tp, keywords), _silent)))
    published, found = _located(source, store)
    return Profile(list(programs_of_artifact(published.manifest, found.stored, program)))


def bench(
    artifact: "str | Artifact | Published",
    *,
    against: "str | Artifact | None" = None,
    threshold: float = 0.05,
    store: "str | Store | ArtifactStore | None" = None,
) -> "Bench":
    """The predicted times of an artifact's programs, beside those of a baseline: an artifact or a channel.

    `regressions` of the result are the programs that are slower by more than the threshold.
    """
    from nxpipe.pipeline.artifacts.bench import bench as compare
    from nxpipe.pipeline.artifacts.lookup import find_match
    from nxpipe.results import Bench

    published, found = _located(artifact, store)
    baseline = against.manifest if isinstance(against, Artifact) else None
    if isinstance(against, str):
        baseline = find_match(against, found.stored, found.config_path).beside(published.manifest)
    return Bench(compare(published.manifest, baseline, found.stored), threshold)


def diff(
    before: "str | Artifact", after: "str | Artifact", *, store: "str | Store | ArtifactStore | None" = None
) -> "ArtifactDifference":
    """The differences of two artifacts, or of those that channels serve: options, programs, times, content."""
    from nxpipe.artifact_store.difference import ManifestDifference
    from nxpipe.artifact_store.index.leaves import differences
    from nxpipe.pipeline.artifacts.difference import program_differences
    from nxpipe.pipeline.artifacts.lookup import pair
    from nxpipe.results import ArtifactDifference

    own = next((each.store for each in (before, after) if isinstance(each, Artifact)), None)
    found = opened(store if store is not None else own)
    names = [each.name if isinstance(each, Artifact) else each for each in (before, after)]
    old, new = pair(names, found.stored, found.config_path)
    return ArtifactDifference(
        old.name,
        new.name,
        differences(found.stored.key_inputs(old), found.stored.key_inputs(new)),
        ManifestDifference.between(old, new),
        tuple(program_differences(old, new, found.stored)),
    )


def explain(
    model: str | Path,
    *,
    store: "str | Store | ArtifactStore | None" = None,
    target: str = "inf2.xlarge",
    tp: int = 1,
    verify: bool = True,
    nearest: int = 1,
    **keywords: Unpack[ModelKeywords],
) -> "Explanation":
    """Explain whether a build would be a cache hit, and by which fields of the key it is a miss. Compiles nothing."""
    from nxpipe.pipeline.build.explain import look_up_request
    from nxpipe.pipeline.compile.spec import BuildSpec
    from nxpipe.results import Explanation

    found = opened(store)
    with confined():
        planned = _run(found, Path(NAME), force=False).plan(
            [replace(_spec(model, target, tp, keywords), verified=verify)]
        )
        (artifact,) = planned.artifacts
        lookup = look_up_request(BuildSpec.of(artifact.spec), artifact, found.stored, nearest, lambda _: None)
    return Explanation(lookup, found.url)


def plan_serve(
    model: str | Path,
    *,
    rate: float,
    prompt: "str | int | LengthDistribution" = "1k",
    output: "str | int | LengthDistribution" = "256",
    ttft: str | None = None,
    tpot: str | None = None,
    instances: Sequence[str] = ("inf2", "trn1", "trn2"),
    purchases: Sequence[str] = (),
    region: str = "us-east-1",
    availability: float = 0.999,
    budget: float | None = None,
    certain: bool = False,
    gpus: bool | Sequence[str] = True,
    workers: int | None = None,
) -> "CapacityPlan":
    """Plan a serving fleet: instance types, layout, batch, size and cost at the objectives, as `nxpipe plan serve`.

    `rate`: requests a second. `prompt`, `output`: lengths in tokens, as "1k" or "lognormal:800,0.6". `ttft`, `tpot`:
    objectives, as "1s" or "50ms@p99". `budget`: dollars a month at most. `gpus`: also compare with GPU instances, by
    default those with public measurements of the model. Simulations run in `workers` processes.
    """
    from nxpipe.pipeline.config.prices import Purchase, load_prices
    from nxpipe.pipeline.plan.candidates import instances_of, planned_model
    from nxpipe.pipeline.plan.serve import Objective, ServingDemand, plan_serving
    from nxpipe.pipeline.plan.serve_report import GpuComparison, compare_with_gpus
    from nxpipe.pipeline.plan.traffic import LengthDistribution, Traffic
    from nxpipe.results import CapacityPlan

    prompts, outputs = (
        each if isinstance(each, LengthDistribution) else LengthDistribution.parse(str(each))
        for each in (prompt, output)
    )
    if not (rate > 0 and 0 < availability < 1):
        raise InputInvalid(f"rate {rate} must be more than 0 and availability {availability} between 0 and 1")
    demand = ServingDemand(
        Traffic(prompts, outputs),
        rate,
        ttft=None if ttft is None else Objective.parse(ttft),
        tpot=None if tpot is None else Objective.parse(tpot),
        availability=availability,
        budget=budget,
        region=region,
        purchases=tuple(Purchase(each) for each in purchases),
        certain=certain,
    )
    prices = load_prices()
    found = plan_serving(planned_model(str(model)), demand, instances_of(instances), prices, workers=workers)
    if gpus is False:
        return CapacityPlan(found, GpuComparison())
    return CapacityPlan(found, compare_with_gpus(found, prices, () if gpus is True else tuple(gpus)))


def preflight(config_path: str | Path = CONFIG, region: str | None = None) -> "PreflightReport":
    """Compare the AWS account of the current credentials with what nxpipe.toml deploys; change nothing.

    `region` replaces that of the file. Obstacles are rows of the report, not exceptions; a check without permission is
    a row in state "unknown".
    """
    from nxpipe.pipeline.fleet.preflight import preflight as examine

    return examine(Path(config_path), region)


def _run(store: Store, state: Path, *, force: bool) -> "BuildRun":
    from nxpipe.pipeline.build.jobs import BuildOptions
    from nxpipe.pipeline.build.run import BuildRun
    from nxpipe.pipeline.config import Config, Project
    from nxpipe.pipeline.models.thresholds import Thresholds
    from nxpipe.pipeline.util.console import Console

    config = Config(project=Project(name="api"))
    return BuildRun(Console(quiet=True), store.stored, config, Thresholds.of(config), state, BuildOptions(force=force))


def _silent(title: str) -> Any:
    """The progress callback of the library, without output."""
    return nullcontext()


def _located(
    artifact: "str | Artifact | Published", store: "str | Store | ArtifactStore | None"
) -> "tuple[Published, Store]":
    """An artifact and its store: the given one, else the artifact's own, else that of the commands."""
    own = artifact.store if isinstance(artifact, Artifact) else None
    found = opened(store if store is not None else own)
    return published_of(artifact, found), found


def _served_by(
    channel: str, model: str | None, target: str | None, store: "str | Store | ArtifactStore | None"
) -> "tuple[str, Store]":
    from nxpipe.pipeline.artifacts.lookup import served_by

    found = opened(store)
    selection = served_by(channel, model, target, found.stored, found.config_path, lambda _: None)
    return selection.manifest.request_key, found


def _spec(model: str | Path, target: str, tp: int | None, keywords: ModelKeywords) -> ModelSpec:
    from nxpipe.pipeline.config import Model

    defaults = dict.fromkeys(spec_options()) | {
        name: Model.model_fields[name].default for name in ("batches", "autocast", "autocast_type")
    }
    options: dict[str, Any] = {name: value for name, value in keywords.items() if name != "axes"}
    options |= {
        name: tuple(options[name]) for name in ("batches", "buckets", "phases") if options.get(name) is not None
    }
    axes = tuple(keywords.get("axes", {}).items())
    return ModelSpec.from_options(str(model), defaults | options | {"target": target, "tp": tp}, axes=axes)
