"""nxpipe ships models to AWS Inferentia2 and Trainium: check, compile, verify, store, roll out.

    import nxpipe

    report = nxpipe.check("bert-base-uncased", target="inf2.xlarge")
    (artifact,) = nxpipe.build("bert-base-uncased", store="file://store", weights="random:0", buckets=(64,))
    comparisons = nxpipe.verify(artifact, store="file://store")

`docs/reference/python-api.md` documents the functions. Importing the package imports nothing else: each name is
imported on first use. In a checkout the four packages stand at the top of the repository and `nxpipe/` links to them; a
wheel has them in place.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nxpipe.api import BuildFailed, ModelKeywords, build, check, plan, preflight, prove, verify
    from nxpipe.artifact_store import Published as Artifact
    from nxpipe.artifact_store import Store, open_store
    from nxpipe.pipeline.build.plan import BuildPlan
    from nxpipe.pipeline.check.report import Report as CheckReport
    from nxpipe.pipeline.fleet.preflight_rules import PreflightReport, PreflightRow
    from nxpipe.pipeline.verify.comparison import Comparison

__all__ = [
    "Artifact",
    "BuildFailed",
    "BuildPlan",
    "CheckReport",
    "Comparison",
    "ModelKeywords",
    "PreflightReport",
    "PreflightRow",
    "Store",
    "build",
    "check",
    "open_store",
    "plan",
    "preflight",
    "prove",
    "verify",
]

_HOMES = {
    "Artifact": "artifact_store:Published",
    "BuildFailed": "api:BuildFailed",
    "BuildPlan": "pipeline.build.plan:BuildPlan",
    "CheckReport": "pipeline.check.report:Report",
    "Comparison": "pipeline.verify.comparison:Comparison",
    "ModelKeywords": "api:ModelKeywords",
    "PreflightReport": "pipeline.fleet.preflight_rules:PreflightReport",
    "PreflightRow": "pipeline.fleet.preflight_rules:PreflightRow",
    "Store": "artifact_store:Store",
    "build": "api:build",
    "check": "api:check",
    "open_store": "artifact_store:open_store",
    "plan": "api:plan",
    "preflight": "api:preflight",
    "prove": "api:prove",
    "verify": "api:verify",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module, _, attribute = _HOMES[name].partition(":")
    return getattr(import_module(f"{__name__}.{module}"), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
