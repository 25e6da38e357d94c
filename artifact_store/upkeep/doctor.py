"""Can this backend hold a store at all? Tried out, in a folder of its own, rather than believed."""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from nxpipe.artifact_store.backends.probes import NotApplicable, Probe, Probed, Violated
from nxpipe.artifact_store.backends.protocol import Backend
from nxpipe.artifact_store.errors import Denied, StoreUnavailable, UnsafeBackend
from nxpipe.artifact_store.upkeep.probes import Common

Verdict = Literal["pass", "fail", "not applicable", "not proved"]


@dataclass(frozen=True)
class Diagnosis:
    """What became of one experiment.

    `not proved`: it could not be made, which tells nothing of the property; `denied` when it was not permitted.
    """

    probe: Probe
    verdict: Verdict
    detail: str
    denied: Denied | None = None


def examine(backend: Backend) -> Iterator[Diagnosis]:
    """Make every experiment, and clean up."""
    folder = f"doctor-{secrets.token_hex(8)}/"
    # One that is out of reach is said to be so once, and not by each experiment; one that forbids things, by each.
    with suppress(Denied):
        backend.stat(f"{folder}absent")

    def clean_up() -> None:
        for found in list(backend.walk(folder)):
            backend.remove(found)

    try:
        for probe in Common(backend, folder).all():
            yield _diagnosis(probe)
        for probe in backend.probes(folder) if isinstance(backend, Probed) else ():
            yield _diagnosis(probe)
    except BaseException:
        with suppress(StoreUnavailable):
            clean_up()
        raise
    yield _diagnosis(Probe("the examination leaves nothing behind", "nor would a collection", clean_up, vital=False))


def insist_on_safety(url: str, diagnoses: Sequence[Diagnosis]) -> None:
    """Refuse a backend without one of the vital properties, by their names."""
    vital = [diagnosis for diagnosis in diagnoses if diagnosis.probe.vital]
    failed = [diagnosis for diagnosis in vital if diagnosis.verdict == "fail"]
    if failed:
        raise UnsafeBackend(url, [f"{each.probe.name} ({each.detail})" for each in failed])
    unproved = [diagnosis for diagnosis in vital if diagnosis.verdict == "not proved"]
    if unproved:
        denied = {each.denied.permission: each.denied.operation for each in unproved if each.denied}
        lacking = "; ".join(f"{permission} ({operation})" for permission, operation in sorted(denied.items()))
        cause = f"this identity is denied {lacking}" if denied else f"the store {unproved[0].detail}"
        raise StoreUnavailable(
            f"{len(unproved)} vital properties of {url} could not be proved, which is not to say that they fail, for "
            f"{cause}; mend that and examine it again"
        )


def _diagnosis(probe: Probe) -> Diagnosis:
    try:
        return Diagnosis(probe, "pass", probe.run() or "")
    except NotApplicable as reason:
        return Diagnosis(probe, "not applicable", str(reason))
    except Violated as seen:
        return Diagnosis(probe, "fail", str(seen))
    except Denied as error:
        detail = f"{error.permission} is denied ({error.operation}), so it could not be proved"
        return Diagnosis(probe, "not proved", detail, error)
    except StoreUnavailable as error:
        return Diagnosis(probe, "not proved", str(error))
