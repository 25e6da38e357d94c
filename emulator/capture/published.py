"""The tensor-parallel plan that a model's authors published with it."""

from emulator.capture.model import build_model
from emulator.capture.request import CaptureRequest


def published_plan(request: CaptureRequest) -> tuple[tuple[str, str], ...]:
    """(pattern of modules or parameters, style) pairs, in a fixed order; none if the model publishes no plan."""
    plan: dict[str, str] = dict(build_model(request).tp_plan or {})
    return tuple(sorted(plan.items()))
