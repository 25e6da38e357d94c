"""The evidence records of a rollout, one of each look at it, as they lie beside the artifacts in the store."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nxpipe.artifact_store import Store
from nxpipe.pipeline.canary.counts import Batch
from nxpipe.pipeline.canary.evidence import Evidence
from nxpipe.pipeline.canary.judge import Moment, Verdict, add_minutes
from nxpipe.pipeline.canary.plan import CanaryPlan


@dataclass(frozen=True)
class Look:
    """`record` is the document, `text` its spelling, over which the next one holds the digest."""

    record: Mapping[str, Any]
    text: str

    @staticmethod
    def of(stored: bytes) -> "Look":
        text = json.loads(stored)["text"]
        return Look(json.loads(text), text)

    @property
    def number(self) -> int:
        return int(self.record["number"])

    @property
    def at(self) -> str:
        return str(self.record["at"])

    @property
    def step(self) -> int | None:
        """From 0; None once all steps are over."""
        return int(self.record["moment"]["step"]) if self.verdict else None

    @property
    def word(self) -> str:
        return str(self.record["word"])

    @property
    def reason(self) -> str:
        """The first line says it, others give the numbers."""
        return str(self.record["reason"])

    @property
    def verdict(self) -> Verdict | None:
        said = self.record["verdict"]
        return Verdict.from_json(said) if said else None

    @property
    def batches(self) -> list[Batch]:
        return [Batch.from_json(each) for each in self.record.get("batches", ())]

    def added_to(self, evidence: Evidence, plan: CanaryPlan) -> Evidence:
        """What is known after it: the judge's own bookkeeping."""
        if self.verdict is None:
            return evidence
        return add_minutes(plan, evidence, self.batches, Moment(**self.record["moment"]))[0]


@dataclass
class Looks:
    """Those of one rollout; each is read once."""

    store: Store
    folder: str
    known: list[Look] = field(default_factory=list)

    @classmethod
    def at(cls, store: Store, fleet: str, rollout: str) -> "Looks":
        return cls(store, f"rollouts/{fleet}/{rollout}/")

    def plan_text(self) -> str | None:
        """Number 0; None where the rollout has not opened."""
        stored = self._bytes(self._path(0))
        return str(json.loads(stored)["text"]) if stored else None

    def refresh(self) -> list[Look]:
        """All of them. They are numbered without gaps."""
        if not self.known:
            there = self.store.backend.paths(self.folder)
            wanted = [self._path(number) for number in range(1, 1 + len(there)) if self._path(number) in there]
            self.known += _read(self.store.backend.each(self._bytes, wanted))
        while found := self._bytes(self._path(len(self.known) + 1)):
            self.known.append(Look.of(found))
        return self.known

    def _path(self, number: int) -> str:
        return f"{self.folder}{number:06}.json"

    def _bytes(self, path: str) -> bytes:
        return b"".join(self.store.backend.read(path) or ())


def _read(found: Iterable[bytes]) -> list[Look]:
    return [Look.of(each) for each in found]
