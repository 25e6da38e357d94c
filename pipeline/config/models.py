"""The tables [[models]]: sources, programs and targets of the models to compile."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias, get_args

from pydantic import Field, ValidationInfo, field_validator

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.config.kinds import ASCENDING, DISTINCT, LIST, Degree, Folder, HubId, Revision, Slug, Weights
from nxpipe.pipeline.config.schema import Absent, Table, Unit, one_of, refuse

InstanceType = Annotated[str, one_of(INSTANCES)]
Task: TypeAlias = Literal[
    "feature-extraction",
    "fill-mask",
    "text-classification",
    "text-generation",
    "text2text-generation",
    "image-classification",
    "automatic-speech-recognition",
]
Phase: TypeAlias = Literal["forward", "prefill", "extend", "decode"]
Autocast: TypeAlias = Literal["none", "matmult", "all"]
AutocastType: TypeAlias = Literal["bf16", "fp16", "tf32", "fp8_e4m3"]


# The phases of a model without `phases`, by task: all that are needed to generate text, or the whole model. `extend` is
# an optional phase.
DEFAULT_PHASES: Final[Mapping[str, tuple[Phase, ...]]] = dict.fromkeys(get_args(Task), ("forward",)) | {
    "text-generation": ("prefill", "decode")
}


def _default_phases(earlier: dict[str, Any]) -> tuple[Phase, ...]:
    return DEFAULT_PHASES[earlier["task"]]


class Variant(Table):
    """More artifacts of the same model: every combination of target and degree."""

    targets: Annotated[tuple[InstanceType, ...], LIST, DISTINCT] = Field(
        description="The instance types to compile for.", examples=[["trn1.32xlarge", "trn2.48xlarge"]]
    )
    tp: Annotated[tuple[Annotated[Degree, Unit("logical NeuronCores")], ...], LIST, ASCENDING] = Field(
        default=(1,), description="The tensor-parallel degrees.", examples=[[8, 32]]
    )

    @field_validator("tp")
    @classmethod
    def _fits_every_target(cls, degrees: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        for target in info.data.get("targets", ()):
            if degrees[-1] > INSTANCES[target].logical_cores:
                raise refuse(f"at most {INSTANCES[target].logical_cores}, the logical cores of {target}")
        return degrees


class Model(Table):
    """One model and its compiled programs: one for each phase, batch and bucket."""

    name: Slug = Field(description="The unique name of the model in fleets and commands.", examples=["bert"])
    id: Annotated[HubId | None, Absent("none; `path` is set instead")] = Field(
        default=None, description="The id of the model on the hub.", examples=["bert-base-uncased"]
    )
    path: Annotated[Folder | None, Absent("none; `id` is set instead")] = Field(
        default=None,
        validate_default=True,
        description="The folder of the model, as `save_pretrained` writes it. A relative path starts at this file.",
        examples=["./models/bert"],
    )
    revision: Annotated[Revision | None, Absent("the repository's main branch")] = Field(
        default=None,
        description="The revision of `id` on the hub. A commit makes builds reproducible.",
        examples=["main"],
    )
    task: Task = Field(description="The task of the model, which selects the head to compile.", examples=["fill-mask"])
    target: InstanceType = Field(description="The instance type to compile for.", examples=["inf2.xlarge"])
    tp: Annotated[Degree, Unit("logical NeuronCores")] = Field(
        default=1,
        description="The tensor-parallel degree: the number of cores that share one copy of the model.",
        examples=[8],
    )
    batches: Annotated[tuple[Annotated[int, Field(ge=1, le=1024), Unit("sequences")], ...], LIST, ASCENDING] = Field(
        default=(1,), description="The batch sizes to compile for.", examples=[[1, 4]]
    )
    buckets: Annotated[tuple[Annotated[int, Field(ge=1, le=131072), Unit("tokens")], ...], LIST, ASCENDING] = Field(
        default=(128,),
        description="The sequence lengths to compile for; a request is padded to the next larger one.",
        examples=[[128, 512]],
    )
    phases: Annotated[
        tuple[Phase, ...], LIST, DISTINCT, Absent("prefill and decode for text-generation, else forward")
    ] = Field(
        default_factory=_default_phases,
        description="The programs of the model: forward, or prefill (the prompt), decode (one token for each row of the"
        " KV cache) and extend (a chunk of the prompt of one row, while the others go on) as separate programs.",
        examples=[["prefill", "decode"]],
    )
    autocast: Autocast = Field(
        default="matmult",
        description="The fp32 operators that run in `autocast_type`: none, matrix multiplications, or all.",
        examples=["matmult"],
    )
    autocast_type: AutocastType = Field(
        default="bf16", description="The data type that `autocast` casts to.", examples=["bf16"]
    )
    weights: Annotated[Weights | None, Absent("the hub's for an `id`, the folder's own for a `path`")] = Field(
        default=None,
        description="The source of the weights: the hub, a folder of safetensors, or a seed for random "
        "weights in tests.",
        examples=["random:0"],
    )
    also: tuple[Variant, ...] = Field(
        default=(), strict=False, description="More targets and degrees to compile the same programs for."
    )

    @field_validator("path")
    @classmethod
    def _one_source(cls, path: str | None, info: ValidationInfo) -> str | None:
        if "id" in info.data and (path is None) == (info.data["id"] is None):
            raise refuse("exactly one of id and path", found="neither" if path is None else "both")
        return path

    @field_validator("revision")
    @classmethod
    def _revision_requires_id(cls, revision: str | None, info: ValidationInfo) -> str | None:
        if revision is not None and info.data.get("path") is not None:
            raise refuse("no revision together with path; a folder has one version")
        return revision

    @field_validator("tp")
    @classmethod
    def _fits_the_target(cls, degree: int, info: ValidationInfo) -> int:
        target = info.data.get("target")
        if target is not None and degree > INSTANCES[target].logical_cores:
            raise refuse(f"at most {INSTANCES[target].logical_cores}, the logical cores of {target}")
        return degree

    @field_validator("phases")
    @classmethod
    def _check_phases(cls, phases: tuple[Phase, ...], info: ValidationInfo) -> tuple[Phase, ...]:
        task = info.data.get("task", "text-generation")
        if "forward" in phases and len(phases) > 1:
            raise refuse(
                '"forward" alone, or "prefill", "extend" and "decode"; forward is the whole model in one program'
            )
        if "forward" not in phases and task != "text-generation":
            raise refuse(f'"forward"; only text-generation has other phases, and the task is {task}')
        return phases

    @field_validator("weights")
    @classmethod
    def _hub_requires_id(cls, weights: str | None, info: ValidationInfo) -> str | None:
        if weights == "hub" and info.data.get("path") is not None:
            raise refuse('a folder or "random:SEED"; a model from a path is not on the hub')
        return weights
