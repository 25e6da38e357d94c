"""Statistics of the build cache: hits, misses, and the time that hits saved, from the log of builds.

A hit saves the time that the program took when it was built: as the log has it, or the report that the build stored
beside the artifact. A hit whose time neither has counts as a hit with unknown time.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from nxpipe.artifact_store.errors import StoreError

if TYPE_CHECKING:
    from nxpipe.artifact_store import Store

Entry = Mapping[str, Any]  # a line of BuildLog
ReportedTimes = Callable[[str, str], Mapping[str, float]]  # of an artifact of a store: seconds by the key of a program


@dataclass
class CacheFigures:
    """Sums over artifacts of builds. Seconds are those of the processes that compile, added up."""

    name: str
    builds: int = 0
    hits: int = 0
    misses: int = 0
    seconds_spent: float = 0.0
    seconds_saved: float = 0.0
    hits_without_time: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 0.0

    def add(self, entry: Entry, times: Mapping[str, float]) -> None:
        known = [seconds for hit in _hits(entry) if (seconds := _time_of(hit, times)) is not None]
        self.builds += 1
        self.hits += len(entry["hits"])
        self.misses += len(entry["built"])
        self.seconds_spent += sum(entry["built"].values())
        self.seconds_saved += sum(known)
        self.hits_without_time += len(entry["hits"]) - len(known)

    def document(self) -> dict[str, Any]:
        rounded = {name: round(getattr(self, name), 3) for name in ("seconds_spent", "seconds_saved")}
        return asdict(self) | rounded | {"hit_rate": round(self.hit_rate, 4)}


@dataclass
class CacheStatistics:
    total: CacheFigures = field(default_factory=lambda: CacheFigures("total"))
    models: dict[str, CacheFigures] = field(default_factory=dict)
    weeks: dict[str, CacheFigures] = field(default_factory=dict)

    @classmethod
    def of(cls, entries: Sequence[Entry], reported: ReportedTimes) -> "CacheStatistics":
        """The statistics of valid entries. `reported` is called once for each artifact of which a time is not known."""
        times = {key: float(seconds) for entry in entries for key, seconds in entry["built"].items()}
        unknown = [each for each in entries if any(_time_of(hit, times) is None for hit in _hits(each))]
        for artifact in dict.fromkeys((each["store"], each["artifact"]) for each in unknown):
            times = {**reported(*artifact), **times}
        found = cls()
        for entry in entries:
            model, week = f"{entry['model']} on {entry['target']}", _week(entry["at"])
            for figures in (
                found.total,
                found.models.setdefault(model, CacheFigures(model)),
                found.weeks.setdefault(week, CacheFigures(week)),
            ):
                figures.add(entry, times)
        return found

    def document(self) -> dict[str, Any]:
        models, weeks = ([each.document() for each in group.values()] for group in (self.models, self.weeks))
        return {"total": self.total.document(), "models": models, "weeks": weeks}


def valid_entries(entries: Iterable[Mapping[str, Any]], store: str | None = None) -> list[Entry]:
    """The entries with all fields, of one store or of all."""
    return [entry for entry in entries if _is_valid(entry) and store in (None, entry["store"])]


def _hits(entry: Entry) -> list[tuple[str, str]]:
    """The keys under which the time of each hit may be known: its cache key, else its program in this artifact. A key
    of today differs from that of the build if the code has changed that verifies."""
    return [(key, _program_key(entry["artifact"], name)) for key, name in entry["hits"].items()]


def _program_key(artifact: str, program: str) -> str:
    return f"{artifact} {program}"


def _time_of(hit: tuple[str, str], times: Mapping[str, float]) -> float | None:
    return next((times[key] for key in hit if key in times), None)


def _is_valid(entry: Mapping[str, Any]) -> bool:
    texts = all(isinstance(entry.get(name), str) for name in ("at", "store", "artifact", "model", "target"))
    hits, built = entry.get("hits"), entry.get("built")
    if not texts or not isinstance(hits, dict) or not isinstance(built, dict):
        return False
    try:
        _week(entry["at"])
    except ValueError:
        return False
    seconds = [isinstance(each, int | float) and each >= 0 for each in built.values()]
    return all(isinstance(name, str) for name in hits.values()) and all(seconds)


def _week(moment: str) -> str:
    year, week, _ = datetime.fromisoformat(moment).isocalendar()
    return f"{year}-W{week:02}"


def times_in_reports(open_store: Callable[[str], "Store | None"]) -> ReportedTimes:
    """The times in the reports that builds store beside their artifacts; nothing of a store that cannot be read."""
    from nxpipe.artifact_store.builds import read_report, report_timestamps

    def times(url: str, artifact: str) -> Mapping[str, float]:
        found: dict[str, float] = {}
        try:
            store = open_store(url)
            published = store.find(artifact) if store else None
            if store is None or published is None:
                return found
            for moment in report_timestamps(store, published.manifest_digest):
                found |= _built_in(read_report(store, published.manifest_digest, moment, "json"), artifact)
        except (StoreError, OSError):
            return found
        return found

    return times


def _built_in(report: bytes | None, artifact: str) -> dict[str, float]:
    """The seconds of the programs that one report has as built; a report is not signed, and may be of any shape."""
    try:
        found: dict[str, float] = {}
        for part in json.loads(report or b"{}")["artifacts"]:
            for cell in [each for each in part["cells"] if each["became"] == "built"]:
                found[str(cell["key"])] = float(cell["seconds"])
                if part["key"] == artifact:
                    found[_program_key(artifact, str(cell["program"]))] = float(cell["seconds"])
        return found
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}
