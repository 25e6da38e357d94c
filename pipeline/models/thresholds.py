"""Thresholds of [verify], deviations as figures, and stored evidence judged by them. No numpy is imported."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from nxpipe.artifact_store.evidence import EMULATED, Compared, Evidence, Figures, coverage_gap, document_gap
from nxpipe.pipeline.util.errors import VerificationFailed

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.pipeline.config import Config


Report: TypeAlias = Mapping[str, Sequence[Mapping[str, str]]]  # by program, the figures of each output


@dataclass(frozen=True)
class Thresholds:
    """The limits of a deviation, from [verify] of nxpipe.toml. None: no limit."""

    min_cosine: float
    max_relative_error: float
    max_kl: float | None = None
    min_top1: float | None = None

    @classmethod
    def of(cls, config: "Config") -> "Thresholds":
        section = config.verify
        return cls(section.min_cosine, section.max_relative_error, section.max_kl, section.min_top1)


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
        """Figures with four significant digits; the cosine with seven decimals."""
        figures = {"max_absolute": self.max_absolute, "mean_absolute": self.mean_absolute}
        figures |= {"max_relative": self.max_relative}
        figures |= {name: value for name, value in (("kl", self.kl), ("top1", self.top1)) if value is not None}
        shown = {name: f"{value:.4g}" for name, value in figures.items()}
        return {"output": self.output, **shown, "cosine": f"{self.cosine:.7f}"}

    def figures(self) -> Figures:
        """The figures as evidence has them; VerificationFailed if one is not finite.

        Only a divergence may be so, where no threshold limits it. JSON has neither NaN nor infinity: it is absent, and
        an absent divergence is beyond every `max_kl`.
        """
        figures = asdict(self) | {"kl": self.kl if self.kl is not None and isfinite(self.kl) else None}
        for name, value in figures.items():
            if isinstance(value, float) and not isfinite(value):
                raise VerificationFailed(
                    f"verification failed: {self.output} has {name} {value}; see the outputs with `nxpipe run`"
                )
        return Figures(**figures)

    def faults(self, allowed: Thresholds) -> list[str]:
        """The figures beyond the thresholds, as `cosine 0.970 < min_cosine 0.999`. NaN is beyond every threshold."""
        limits = (
            _least("cosine", self.cosine, allowed.min_cosine, "min_cosine", ".7f"),
            _most("relative error", self.max_relative, allowed.max_relative_error, "max_relative_error"),
            _most("KL divergence", self.kl, allowed.max_kl, "max_kl"),
            _least("top-1", self.top1, allowed.min_top1, "min_top1"),
        )
        return [fault for fault in limits if fault is not None]


def _least(figure: str, value: float | None, limit: float | None, name: str, digits: str = ".4g") -> str | None:
    if value is None or limit is None or value >= limit:
        return None
    return f"{figure} {value:{digits}} {'<' if value < limit else 'is beyond'} {name} {limit}"


def _most(figure: str, value: float | None, limit: float | None, name: str) -> str | None:
    if value is None or limit is None or value <= limit:
        return None
    return f"{figure} {value:.3g} {'>' if value > limit else 'is beyond'} {name} {limit}"


def is_scores(output: str) -> bool:
    """True for logits, which are compared as distributions too."""
    return output.rpartition(".")[2].endswith("logits")


def references_of(report: Report) -> list[str]:
    """What the outputs of a stored report were compared with."""
    return list(dict.fromkeys(row.get("yardstick", DEFAULT_REFERENCE) for rows in report.values() for row in rows))


def evidence_shortfall(
    manifest: "Manifest", evidence: Sequence[Evidence], allowed: Thresholds, kind: str = EMULATED
) -> str | None:
    """The reason why no evidence of the kind shows the artifact to be within the thresholds; None if one does."""
    if (sentence := coverage_gap(manifest, evidence, kind)) is not None:
        return sentence
    complete = [document for document in evidence if document_gap(manifest, document, kind) is None]
    faults = [next(faults_of(document.programs, allowed), None) for document in complete]
    if None in faults:
        return None
    return faults[0] if kind == EMULATED else f"evidence of kind {kind}: {faults[0]}"


def missing_evidence(
    manifest: "Manifest", evidence: Sequence[Evidence], allowed: Thresholds, kinds: Collection[str]
) -> dict[str, str]:
    """The kinds of which no evidence shows the artifact to be within the thresholds, each with the reason."""
    reasons = ((kind, evidence_shortfall(manifest, evidence, allowed, kind)) for kind in kinds)
    return {kind: reason for kind, reason in reasons if reason is not None}


def faults_of(programs: Sequence[Compared], allowed: Thresholds) -> Iterator[str]:
    """A sentence for each output beyond the thresholds: `forward-b1-s128 logits cosine 0.970 < min_cosine 0.999`."""
    for program in programs:
        for figures in program.outputs:
            if wrong := _faults(figures, allowed):
                yield f"{program.program} {figures.output} {'; '.join(wrong)}"


def require_within(name: str, programs: Sequence[Compared], allowed: Thresholds) -> None:
    """Raise VerificationFailed for the first output beyond the thresholds."""
    for sentence in faults_of(programs, allowed):
        raise VerificationFailed(f"verification failed: {name} {sentence}; try --autocast none, or change [verify]")


def complete_evidence(manifest: "Manifest", evidence: Sequence[Evidence], kind: str = EMULATED) -> Evidence | None:
    """The first evidence of the kind that covers all programs. Its figures are shown, its outputs compared with those
    of later runs."""
    return next((document for document in evidence if document_gap(manifest, document, kind) is None), None)


def report_of(manifest: "Manifest", store: "Store") -> Report:
    """The rounded figures of an artifact by program; empty if it is not verified."""
    return report_in(manifest, store.evidence(manifest.digest), EMULATED)


def report_in(manifest: "Manifest", evidence: Sequence[Evidence], kind: str) -> Report:
    """The rounded figures of the evidence of a kind, by program; empty without any."""
    complete = complete_evidence(manifest, evidence, kind)
    programs = complete.programs if complete else ()
    return {
        program.program: [_shown(figures, program.yardstick) for figures in program.outputs] for program in programs
    }


def _shown(figures: Figures, reference: str) -> dict[str, str]:
    """Figures of one output, with the reference unless it is the default."""
    reference_field = {} if reference == DEFAULT_REFERENCE else {"yardstick": reference}
    return _stored_deviation(figures).as_json() | reference_field


def _faults(figures: Figures, allowed: Thresholds) -> list[str]:
    absent = [
        f"{name} is absent, and {threshold} is {limit}"
        for name, value, limit, threshold in (
            ("KL divergence", figures.kl, allowed.max_kl, "max_kl"),
            ("top-1", figures.top1, allowed.min_top1, "min_top1"),
        )
        if value is None and limit is not None and is_scores(figures.output)
    ]
    return _stored_deviation(figures).faults(allowed) + absent


def _stored_deviation(figures: Figures) -> Deviation:
    values: dict[str, Any] = figures.model_dump()
    return Deviation(**values)


DEFAULT_REFERENCE: Final = "PyTorch fp32"
