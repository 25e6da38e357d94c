"""nxpipe ships models to AWS Inferentia2 and Trainium: check, compile, verify, store, serve, roll out.

    import nxpipe

    report = nxpipe.check("bert-base-uncased", target="inf2.xlarge")
    (artifact,) = nxpipe.build("./sentiment", store="file://store", buckets=(64,))
    with nxpipe.load(artifact) as model:
        print(model("great movie"))

`docs/reference/python-api.md` documents the names. Importing the package imports nothing else: each name is imported on
first use. In a checkout the four packages stand at the top of the repository and `nxpipe/` links to them; a wheel has
them in place.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxpipe.api import (
        BuildFailed,
        ModelKeywords,
        bench,
        build,
        build_plan,
        check,
        diff,
        explain,
        load,
        plan_serve,
        preflight,
        profile,
        prove,
        verify,
    )
    from nxpipe.artifact_store.errors import ChannelEmpty, Corrupt, NotFound, Refused, StoreError
    from nxpipe.artifact_store.evidence import Evidence
    from nxpipe.emulator.errors import CompileError
    from nxpipe.pipeline.build.plan import BuildPlan
    from nxpipe.pipeline.check.report import Report as CheckReport
    from nxpipe.pipeline.config.messages import ConfigInvalid
    from nxpipe.pipeline.fleet.preflight_rules import PreflightReport, PreflightRow
    from nxpipe.pipeline.serving.inference import (
        Classification,
        ExtractedAnswer,
        LabelledToken,
        LoadedModel,
        MaskFill,
    )
    from nxpipe.pipeline.serving.text_generation import GeneratedText, SamplingKeywords, TextStream
    from nxpipe.pipeline.util.errors import (
        AwsError,
        BuildRefused,
        DoesNotFit,
        InputInvalid,
        MissingSoftware,
        ModelSourceError,
        NotReady,
        PipelineError,
        PromptTooLong,
        VerificationFailed,
    )
    from nxpipe.pipeline.verify.comparison import Comparison
    from nxpipe.results import ArtifactDifference, Bench, CapacityPlan, Explanation, Profile, Verification
    from nxpipe.store import Artifact, ArtifactProgram, Channel, ChannelGeneration, Store, open_store

_HOMES = {
    "api": (
        *("BuildFailed", "ModelKeywords", "bench", "build", "build_plan", "check", "diff", "explain", "load"),
        *("plan_serve", "preflight", "profile", "prove", "verify"),
    ),
    "store": ("Artifact", "ArtifactProgram", "Channel", "ChannelGeneration", "Store", "open_store"),
    "results": ("ArtifactDifference", "Bench", "CapacityPlan", "Explanation", "Profile", "Verification"),
    "pipeline.serving.inference": (*("Classification", "ExtractedAnswer", "LabelledToken", "LoadedModel", "MaskFill"),),
    "pipeline.serving.text_generation": ("GeneratedText", "SamplingKeywords", "TextStream"),
    "pipeline.build.plan": ("BuildPlan",),
    "pipeline.check.report": ("CheckReport:Report",),
    "pipeline.verify.comparison": ("Comparison",),
    "pipeline.fleet.preflight_rules": ("PreflightReport", "PreflightRow"),
    "artifact_store.evidence": ("Evidence",),
    "artifact_store.errors": ("ChannelEmpty", "Corrupt", "NotFound", "Refused", "StoreError"),
    "emulator.errors": ("CompileError",),
    "pipeline.config.messages": ("ConfigInvalid",),
    "pipeline.util.errors": (
        *("AwsError", "BuildRefused", "DoesNotFit", "InputInvalid", "MissingSoftware", "ModelSourceError", "NotReady"),
        *("PipelineError", "PromptTooLong", "VerificationFailed"),
    ),
}
_FOUND = {
    entry.partition(":")[0]: (home, entry.rpartition(":")[2]) for home, names in _HOMES.items() for entry in names
}
_RENAMED = {"plan": "nxpipe.build_plan plans a build, and nxpipe.plan_serve a serving fleet"}

__all__ = [
    "Artifact",
    "ArtifactDifference",
    "ArtifactProgram",
    "AwsError",
    "Bench",
    "BuildFailed",
    "BuildPlan",
    "BuildRefused",
    "CapacityPlan",
    "Channel",
    "ChannelEmpty",
    "ChannelGeneration",
    "CheckReport",
    "Classification",
    "Comparison",
    "CompileError",
    "ConfigInvalid",
    "Corrupt",
    "DoesNotFit",
    "Evidence",
    "Explanation",
    "ExtractedAnswer",
    "GeneratedText",
    "InputInvalid",
    "LabelledToken",
    "LoadedModel",
    "MaskFill",
    "MissingSoftware",
    "ModelKeywords",
    "ModelSourceError",
    "NotFound",
    "NotReady",
    "PipelineError",
    "PreflightReport",
    "PreflightRow",
    "Profile",
    "PromptTooLong",
    "Refused",
    "SamplingKeywords",
    "Store",
    "StoreError",
    "TextStream",
    "Verification",
    "VerificationFailed",
    "bench",
    "build",
    "build_plan",
    "check",
    "diff",
    "explain",
    "load",
    "open_store",
    "plan_serve",
    "preflight",
    "profile",
    "prove",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _FOUND:
        hint = f"; {_RENAMED[name]}" if name in _RENAMED else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    from importlib import import_module

    home, attribute = _FOUND[name]
    return getattr(import_module(f"{__name__}.{home}"), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
