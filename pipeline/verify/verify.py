"""How far an emulated answer is from PyTorch's, in figures; whether that is near enough is the caller's threshold."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    import numpy as np

    from nxpipe.pipeline.config import Config

Arrays: TypeAlias = Mapping[str, "np.ndarray[Any, Any]"]

Report: TypeAlias = Mapping[str, Sequence[Mapping[str, str]]]  # by program, the figures of each output

USUAL_YARDSTICK: Final = "PyTorch fp32"
_SHOWN: Final = 4  # outputs of a program that are told one by one
_ROWS_AT_A_TIME = 64  # of logits: a row may have 256,000 entries, and is looked at in float64


@dataclass(frozen=True)
class Thresholds:
    """How near to PyTorch an answer must be. What is None is not asked for."""

    min_cosine: float
    max_relative_error: float
    max_kl: float | None = None
    min_top1: float | None = None

    @classmethod
    def of(cls, config: "Config") -> "Thresholds":
        asked = config.verify
        return cls(asked.min_cosine, asked.max_relative_error, asked.max_kl, asked.min_top1)


@dataclass(frozen=True)
class Deviation:
    """The distance of one tensor from the reference. Logits are compared as distributions too."""

    output: str
    max_absolute: float
    mean_absolute: float
    max_relative: float  # the largest difference, over the largest magnitude of the reference
    cosine: float
    kl: float | None = None  # from the reference's softmax to ours, in nats, mean over positions
    top1: float | None = None  # the share of positions whose likeliest entry is the same

    def as_json(self) -> dict[str, str]:
        """Four significant digits say all, of the cosine seven."""
        figures = {"max_absolute": self.max_absolute, "mean_absolute": self.mean_absolute}
        figures |= {"max_relative": self.max_relative}
        figures |= {name: value for name, value in (("kl", self.kl), ("top1", self.top1)) if value is not None}
        shown = {name: f"{value:.4g}" for name, value in figures.items()}
        return {"output": self.output, **shown, "cosine": f"{self.cosine:.7f}"}

    def faults(self, allowed: Thresholds) -> list[str]:
        """What is beyond the thresholds, in words. NaN is beyond every threshold: no comparison with NaN holds."""
        asked = [
            (self.cosine >= allowed.min_cosine, f"cosine {self.cosine:.6f}, asked for {allowed.min_cosine}"),
            (
                self.max_relative <= allowed.max_relative_error,
                f"largest relative error {self.max_relative:.3g}, allowed {allowed.max_relative_error}",
            ),
        ]
        if self.kl is not None and allowed.max_kl is not None:
            asked.append((self.kl <= allowed.max_kl, f"KL divergence {self.kl:.3g}, allowed {allowed.max_kl}"))
        if self.top1 is not None and allowed.min_top1 is not None:
            asked.append((self.top1 >= allowed.min_top1, f"top-1 {self.top1:.4g}, asked for {allowed.min_top1}"))
        return [words for holds, words in asked if not holds]


def is_scores(output: str) -> bool:
    """Logits are compared as distributions, too."""
    return output.rpartition(".")[2].endswith("logits")


def compare(ours: Arrays, reference: Arrays) -> list[Deviation]:
    """One deviation an output, in the reference's order."""
    return [_deviation(name, ours[name], value) for name, value in reference.items()]


def sentences(report: Report) -> Iterator[str]:
    """A stored report as people read it: where outputs are many, as the caches of a decoder are, the first of a program
    and the worst of its others.
    """
    for program, rows in report.items():
        if len(rows) > _SHOWN:
            worst = min(rows[1:], key=lambda row: float(row["cosine"]))
            yield _sentence(program, rows[0])
            yield f"{_sentence(program, worst)}; the worst of {len(rows) - 1} others"
        else:
            yield from (_sentence(program, row) for row in rows)


def _sentence(program: str, row: Mapping[str, str]) -> str:
    yardstick = row.get("yardstick", USUAL_YARDSTICK)
    near = f"cosine {row['cosine']}, largest relative error {row['max_relative']}"
    return f"{program} {row['output']}: against {yardstick} {near}"


def _deviation(name: str, ours: "np.ndarray[Any, Any]", reference: "np.ndarray[Any, Any]") -> Deviation:
    import numpy as np

    if ours.shape != reference.shape:
        raise ValueError(f"output {name}: {ours.shape} beside a reference of {reference.shape}")
    a, b = (np.asarray(value, np.float64).ravel() for value in (ours, reference))
    difference = np.abs(a - b)
    largest = float(np.abs(b).max(initial=0.0))
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    worst = float(difference.max(initial=0.0))
    scores = is_scores(name) and reference.ndim and reference.size
    kl, top1 = _as_distributions(ours, reference) if scores else (None, None)
    return Deviation(
        output=name,
        max_absolute=worst,
        mean_absolute=float(difference.mean()) if difference.size else 0.0,
        max_relative=worst / largest if largest else worst,
        cosine=float(a @ b) / lengths if lengths else float(not (a.any() or b.any())),
        kl=kl,
        top1=top1,
    )


def _as_distributions(ours: "np.ndarray[Any, Any]", reference: "np.ndarray[Any, Any]") -> tuple[float, float]:
    """The mean Kullback-Leibler divergence of the softmax over the last axis, and how often both peak at one place."""
    import numpy as np

    a, b = (value.reshape(-1, value.shape[-1]) for value in (ours, reference))
    divergence, agreeing = 0.0, 0
    for start in range(0, len(a), _ROWS_AT_A_TIME):
        log_q, log_p = (_log_softmax(value[start : start + _ROWS_AT_A_TIME]) for value in (a, b))
        p = np.exp(log_p)
        # An entry that the reference rules out adds nothing, whatever we say of it.
        divergence += float(np.where(p > 0, p * (log_p - log_q), 0).sum())
        agreeing += int((log_q.argmax(axis=-1) == log_p.argmax(axis=-1)).sum())
    return divergence / len(a), agreeing / len(a)


def _log_softmax(rows: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    import numpy as np

    with np.errstate(invalid="ignore"):  # an infinite score makes the divergence NaN, which no threshold lets pass
        shifted = rows.astype(np.float64) - rows.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
