"""Report of the probes on a machine: what each did, which assumptions are broken, and by which causes.

The JSON document `nxpipe.hardware-report/1` can be sent to others: it has no name of a host or user, no path, no
address and no secret. It is written after each probe, so an interrupted run leaves a valid one.
"""

import getpass
import math
import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from nxpipe.emulator.hlo.corpus import corpus_digest
from nxpipe.emulator.hlo.probe import Probe
from nxpipe.pipeline import VERSION
from nxpipe.pipeline.util.errors import InputInvalid
from nxpipe.pipeline.util.files import MiB, json_of, read_file, write_whole
from nxpipe.pipeline.util.text import for_json, for_log

FORMAT: Final = "nxpipe.hardware-report/1"
_LINES: Final = 12  # of a log
_LONGEST: Final = 300  # characters of a line
_LARGEST: Final = 16 * MiB


@dataclass(frozen=True)
class Surroundings:
    """Software and devices of the machine; empty where something is absent."""

    compiler: str = ""  # the release of neuronx-cc
    driver: str = ""
    runtime: str = ""
    implementation: str = ""  # nrtpy or libnrt
    family: str = ""  # of the devices
    instance: str = ""
    devices: int = 0


@dataclass(frozen=True)
class Trial:
    """What one probe did on one target; None: not tried. `module` is the digest of its module."""

    module: str
    compiled: bool | None = None
    ran: bool | None = None
    agrees: bool | None = None
    code: str = ""  # of the compiler or the runtime
    message: str = ""
    log: tuple[str, ...] = ()
    is_final: bool = True  # False: the same attempt may end differently
    distance: float | None = None  # of the outputs from the expected ones
    seconds: float = 0.0  # of the compilation

    @property
    def has_failed(self) -> bool:
        return False in (self.compiled, self.ran, self.agrees)


@dataclass(frozen=True)
class BrokenAssumption:
    """A probe that failed by itself, with those that failed because of it."""

    name: str
    assumption: str
    fallback: str
    code: str
    message: str
    consequences: tuple[str, ...]


@dataclass
class HardwareReport:
    """Surroundings, and trials by target and name of the probe. `missing_opcodes` are of the compiler's own list."""

    surroundings: Surroundings
    missing_opcodes: tuple[str, ...] | None = None  # None: the compiler printed no list
    trials: dict[str, dict[str, Trial]] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        missing = None if self.missing_opcodes is None else list(self.missing_opcodes)
        return {
            "format": FORMAT,
            "nxpipe": VERSION,
            "corpus": corpus_digest(),
            "surroundings": asdict(self.surroundings),
            "missing_opcodes": missing,
            "targets": {
                target: {name: {**asdict(trial), "log": list(trial.log)} for name, trial in trials.items()}
                for target, trials in self.trials.items()
            },
        }

    def write(self, path: Path) -> None:
        write_whole(path, f"{for_json(self.document(), 1)}\n".encode())

    def resume(self, path: Path) -> None:
        """Take the trials of an earlier run with the same compiler, runtime and driver."""
        earlier = read_report(path)
        same = ("compiler", "driver", "runtime", "implementation")
        if all(getattr(earlier.surroundings, name) == getattr(self.surroundings, name) for name in same):
            self.trials = earlier.trials


def read_report(path: Path) -> HardwareReport:
    """The report in a file; InputInvalid if it is none."""
    try:
        document = json_of(read_file(path, limit=_LARGEST))
        if document["format"] != FORMAT:
            raise ValueError(f"its format is {str(document['format'])[:40]!r}")
        missing = document["missing_opcodes"]
        return HardwareReport(
            _record(Surroundings, document["surroundings"]),
            None if missing is None else tuple(map(str, missing)),
            {
                str(target): {
                    str(name): _record(Trial, {**trial, "log": tuple(map(str, trial["log"]))})
                    for name, trial in trials.items()
                }
                for target, trials in document["targets"].items()
            },
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputInvalid(f"{path}: no report {FORMAT} ({reason[:120]}); pass another file to --report") from error


def _record(kind: type[Any], document: Mapping[str, Any]) -> Any:
    """A record from its fields, each of the type of its default."""
    values = {each.name: document[each.name] for each in fields(kind)}
    permitted = {"log": (tuple,), "distance": (float, int, type(None)), "seconds": (float, int), "devices": (int,)}
    for name, value in values.items():
        outcome = (bool, type(None)) if name in ("compiled", "ran", "agrees", "is_final") else (str,)
        if not isinstance(value, permitted.get(name, outcome)):
            raise TypeError(f"{name} is {value!r}")
    return kind(**values)


# Causes ---------------------------------------------------------------------------------------------------------------


def broken_assumptions(probes: Sequence[Probe], trials: Mapping[str, Trial]) -> list[BrokenAssumption]:
    """The failed probes that no other failed probe explains. One explains another if the other uses the feature that it
    proves, and not the other way round: a refused opcode explains the operators that are composed of it."""
    failed = [each for each in probes if not each.is_question and each.name in trials and trials[each.name].has_failed]
    causes = [each for each in failed if not any(_explains(other, each) for other in failed)]
    return [
        BrokenAssumption(
            *(cause.name, cause.assumption, cause.fallback, trials[cause.name].code, trials[cause.name].message),
            tuple(each.name for each in failed if each not in causes and _uses(each, cause)),
        )
        for cause in causes
    ]


def _explains(cause: Probe, probe: Probe) -> bool:
    return _uses(probe, cause) and not _uses(cause, probe)


def _uses(probe: Probe, other: Probe) -> bool:
    """Whether a probe uses a feature that another one proves."""
    return probe is not other and not probe.features.isdisjoint(other.proves)


def answers(probes: Sequence[Probe], trials: Mapping[str, Trial]) -> list[tuple[Probe, Trial]]:
    """The questions that the compiler or the device has answered."""
    return [(each, trials[each.name]) for each in probes if each.is_question and each.name in trials]


# Anonymous texts ------------------------------------------------------------------------------------------------------

_PATH: Final = re.compile(r"(?<![\w.<])(?:~|[A-Za-z]:)?(?:/[\w.@+~%=,:-]+){1,}/?")
_ADDRESS: Final = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b|\b(?:[0-9a-f]{1,4}:){4,7}[0-9a-f]{1,4}\b", re.I)
_SECRET_NAME: Final = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.I)
_SHORTEST_SECRET: Final = 8


def anonymous(text: str) -> str:
    """One line without paths, addresses, names of the machine and its user, and secrets of the environment."""
    for secret in _secrets():
        text = text.replace(secret, "<secret>")
    text = _ADDRESS.sub("<address>", _PATH.sub("<path>", text))
    for word in _own_names():
        text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", "<name>", text)
    return for_log(text)[:_LONGEST]


def last_lines(text: str) -> tuple[str, ...]:
    """The end of a log."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    return tuple(map(anonymous, lines[-_LINES:]))


def finite(distance: float) -> float | None:
    """A distance that JSON has; None for an infinite one."""
    return distance if math.isfinite(distance) else None


def _secrets() -> Iterable[str]:
    found = (value for name, value in os.environ.items() if _SECRET_NAME.search(name))
    return sorted((value for value in found if len(value) >= _SHORTEST_SECRET), key=len, reverse=True)


def _own_names() -> Iterator[str]:
    host = socket.gethostname()
    yield from dict.fromkeys(name for name in (host, host.partition(".")[0]) if len(name) > 1)
    with suppress(OSError, KeyError):  # a user id without a name
        yield getpass.getuser()
