"""Deviation of emulated outputs from the reference: errors, cosine, and for logits KL divergence and top-1."""

from typing import TYPE_CHECKING, Any, Final

from nxpipe.pipeline.models.thresholds import Deviation, is_scores
from nxpipe.pipeline.models.weights import Arrays

if TYPE_CHECKING:
    import numpy as np


_ROWS: Final = 64  # of logits at a time: a row may have 256,000 entries, and is compared in float64


def compare(ours: Arrays, reference: Arrays) -> list[Deviation]:
    """One deviation an output, in the reference's order."""
    return [_deviation(name, ours[name], value) for name, value in reference.items()]


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
    for start in range(0, len(a), _ROWS):
        log_q, log_p = (_log_softmax(value[start : start + _ROWS]) for value in (a, b))
        p = np.exp(log_p)
        # An entry of probability 0 in the reference adds nothing.
        divergence += float(np.where(p > 0, p * (log_p - log_q), 0).sum())
        agreeing += int((log_q.argmax(axis=-1) == log_p.argmax(axis=-1)).sum())
    return divergence / len(a), agreeing / len(a)


def _log_softmax(rows: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    import numpy as np

    with np.errstate(invalid="ignore"):  # an infinite score makes the divergence NaN, which no threshold lets pass
        shifted = rows.astype(np.float64) - rows.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
