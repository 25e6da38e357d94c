"""How far an emulated answer is from PyTorch's, in figures; whether that is near enough is the caller's threshold."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Deviation:
    """The distance of one output from the reference."""

    output: str
    max_absolute: float
    mean_absolute: float
    max_relative: float  # the largest difference, over the largest magnitude of the reference
    cosine: float

    def as_json(self) -> dict[str, object]:
        """Four significant digits say all; as text, because a manifest holds no floats."""
        return {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in asdict(self).items()} | {
            "cosine": f"{self.cosine:.7f}"
        }

    def within(self, min_cosine: float, max_relative_error: float) -> bool:
        """False for NaN too: no comparison with NaN holds."""
        return self.cosine >= min_cosine and self.max_relative <= max_relative_error


def compare(
    ours: Mapping[str, "np.ndarray[Any, Any]"], reference: Mapping[str, "np.ndarray[Any, Any]"]
) -> list[Deviation]:
    """One deviation an output, in the reference's order."""
    return [_deviation(name, ours[name], value) for name, value in reference.items()]


def sentences(report: Mapping[str, object]) -> Iterator[str]:
    """A stored report as people read it. It may be a stranger's: what is not as we write it is passed over."""
    for program, outputs in report.items():
        for row in outputs if isinstance(outputs, list) else ():
            match row:
                case {"output": str(output), "cosine": str(cosine), "max_relative": str(error)}:
                    text = f"{program} {output}: against PyTorch fp32 cosine {cosine}, largest relative error {error}"
                    yield from [text] if text.isprintable() else []


def _deviation(name: str, ours: "np.ndarray[Any, Any]", reference: "np.ndarray[Any, Any]") -> Deviation:
    import numpy as np

    if ours.shape != reference.shape:
        raise ValueError(f"output {name}: {ours.shape} beside a reference of {reference.shape}")
    a, b = (np.asarray(value, np.float64).ravel() for value in (ours, reference))
    difference = np.abs(a - b)
    largest = float(np.abs(b).max(initial=0.0))
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    worst = float(difference.max(initial=0.0))
    return Deviation(
        output=name,
        max_absolute=worst,
        mean_absolute=float(difference.mean()) if difference.size else 0.0,
        max_relative=worst / largest if largest else worst,
        cosine=float(a @ b) / lengths if lengths else float(not (a.any() or b.any())),
    )
