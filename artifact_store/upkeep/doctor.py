"""Can this backend hold a store at all? Tried out, in a folder of its own, rather than believed."""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from artifact_store.backends.probes import NotApplicable, Probe, Probed, Violated
from artifact_store.backends.protocol import Backend
from artifact_store.errors import StoreUnavailable, UnsafeBackend
from artifact_store.upkeep.probes import Common

Verdict = Literal["pass", "fail", "not applicable", "unknown"]


@dataclass(frozen=True)
class Diagnosis:
    """What became of one experiment. `unknown`: it was not permitted, or could not be made."""

    probe: Probe
    verdict: Verdict
    detail: str


def examine(backend: Backend) -> Iterator[Diagnosis]:
    """Make every experiment, and clean up."""
    folder = f"doctor-{secrets.token_hex(8)}/"
    backend.stat(f"{folder}absent")  # one that is out of reach is said to be so once, and not by each experiment
    try:
        for probe in Common(backend, folder).all():
            yield _diagnosis(probe)
        for probe in backend.probes(folder) if isinstance(backend, Probed) else ():
            yield _diagnosis(probe)
    finally:
        for found in list(backend.walk(folder)):
            backend.remove(found)


def insist_on_safety(url: str, diagnoses: Sequence[Diagnosis]) -> None:
    """Refuse a backend without one of the vital properties, by their names."""
    vital = [diagnosis for diagnosis in diagnoses if diagnosis.probe.vital]
    failed = [diagnosis for diagnosis in vital if diagnosis.verdict == "fail"]
    if failed:
        raise UnsafeBackend(url, [f"{each.probe.name} ({each.detail})" for each in failed])
    unknown = [diagnosis for diagnosis in vital if diagnosis.verdict == "unknown"]
    if unknown:
        raise StoreUnavailable(
            f"{len(unknown)} properties of {url} could not be examined, the first one, that {unknown[0].probe.name}, "
            f"because the store {unknown[0].detail}"
        )


def _diagnosis(probe: Probe) -> Diagnosis:
    try:
        return Diagnosis(probe, "pass", probe.run() or "")
    except NotApplicable as reason:
        return Diagnosis(probe, "not applicable", str(reason))
    except Violated as seen:
        return Diagnosis(probe, "fail", str(seen))
    except StoreUnavailable as error:
        return Diagnosis(probe, "unknown", str(error))
