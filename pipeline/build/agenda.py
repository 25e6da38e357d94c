"""The items of a plan, in the order in which they go: the largest cell first, an artifact as soon as it is whole."""

import heapq
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Final

from nxpipe.pipeline.build.item import Item
from nxpipe.pipeline.build.planned import Plan, PlannedArtifact, PlannedCell
from nxpipe.pipeline.models.thresholds import Thresholds

_BEFORE_ALL_CELLS: Final = 1e30  # an artifact that is whole waits for none


@dataclass
class Agenda:
    """What waits, and what waits for what. A cell that two artifacts have in common is one item."""

    _ready: list[tuple[float, int, Item]] = field(default_factory=list)
    _artifacts: dict[str, Item] = field(default_factory=dict)
    _missing: dict[str, set[str]] = field(default_factory=dict)
    _wanted_by: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    _count: int = 0

    @classmethod
    def of(cls, plan: Plan, thresholds: Thresholds, *, force: bool = False, kms_key: str | None = None) -> "Agenda":
        agenda, seen = cls(), set[str]()

        def item(artifact: PlannedArtifact, cell: PlannedCell | None) -> Item:
            return Item(
                key=cell.key if cell else artifact.key,
                title=f"{artifact.title}, {cell.shape.name}" if cell else artifact.title,
                asked=artifact.asked.absolute(),
                shape=cell.shape if cell else None,
                store=plan.store,
                thresholds=thresholds,
                force=force,
                work=cell.work if cell else _BEFORE_ALL_CELLS,
                memory=artifact.memory,
                kms_key=kms_key,
            )

        for artifact in plan.artifacts:
            if artifact.is_published or artifact.key in agenda._artifacts or not artifact.key:
                continue
            agenda._artifacts[artifact.key] = item(artifact, None)
            missing = [cell for cell in artifact.cells if cell.state != "committed"]
            agenda._missing[artifact.key] = {cell.key for cell in missing}
            for cell in missing:
                agenda._wanted_by[cell.key].append(artifact.key)
                if cell.state == "to do" and cell.key not in seen:
                    seen.add(cell.key)
                    agenda.put(item(artifact, cell))
            agenda._put_if_whole(artifact.key)
        return agenda

    def __bool__(self) -> bool:
        return bool(self._ready)

    @property
    def first(self) -> Item:
        return self._ready[0][2]

    def take(self) -> Item:
        return heapq.heappop(self._ready)[2]

    def put(self, item: Item) -> None:
        self._count += 1
        heapq.heappush(self._ready, (-item.work, self._count, item))

    def made(self, item: Item) -> None:
        """The artifacts that waited for this cell alone can go."""
        for key in self._wanted_by.get(item.key, ()):
            self._missing[key].discard(item.key)
            self._put_if_whole(key)

    def _put_if_whole(self, key: str) -> None:
        if not self._missing[key]:
            self.put(self._artifacts[key])
