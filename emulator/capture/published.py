"""The tensor-parallel plan that a model's authors published with it."""

from nxpipe.emulator.capture.elsewhere import of_model
from nxpipe.emulator.capture.request import CaptureRequest


def published_plan(request: CaptureRequest) -> tuple[tuple[str, str], ...]:
    """(pattern of modules or parameters, style) pairs, in a fixed order; none if the model publishes no plan.

    Models of diffusers know nothing of plans.
    """
    return of_model(tuple, "published_plan", request)


def published_plan_here(request: CaptureRequest) -> tuple[tuple[str, str], ...]:
    """The same, in this process."""
    from nxpipe.emulator.capture.model import build_model

    plan: dict[str, str] = dict(getattr(build_model(request), "tp_plan", None) or {})
    return tuple(sorted(plan.items()))
