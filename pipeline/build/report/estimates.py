"""How long what is left will take."""

from collections.abc import Sequence

from nxpipe.pipeline.build.planned import PlannedCell


class Estimates:
    """The plan's, corrected by how far they were off so far. What has none is held, by its size, against what was
    measured. Sums only: a plan may have many thousands of cells, and this is asked several times a second."""

    def __init__(self) -> None:
        self._waiting = 0
        self._seconds = 0.0  # of those that wait and have an estimate
        self._work = 0.0  # of those that wait and have none
        self._measured = [0.0, 0.0]  # seconds that were estimated, and those it took
        self._rated = [0.0, 0.0]  # work, and the seconds it took
        self._at_once = 1

    def wait(self, cell: PlannedCell) -> None:
        self._count(cell, 1)

    def take(self, cell: PlannedCell) -> None:
        """It waits no longer."""
        self._count(cell, -1)

    def measured(self, cell: PlannedCell, seconds: float) -> None:
        self._rated[0] += cell.work
        self._rated[1] += seconds
        if cell.seconds is not None:
            self._measured[0] += cell.seconds
            self._measured[1] += seconds

    def left(self, running: Sequence[tuple[PlannedCell, float]]) -> float | None:
        """`running`: each with the seconds it has had. None where nothing like what waits or runs was measured.

        The work is shared by as many as have been seen at it at once, and lasts as long as the longest that runs.
        """
        self._at_once = max(self._at_once, len(running))
        waiting = self._of(self._seconds, self._work) if self._waiting else 0.0
        whole = [(self._of(cell.seconds or 0.0, 0.0 if cell.seconds else cell.work), had) for cell, had in running]
        rest = [max(seconds - had, 0.0) for seconds, had in whole if seconds is not None]
        if waiting is None or len(rest) < len(whole):
            return None
        return max([(waiting + sum(rest)) / self._at_once, *rest])

    def _count(self, cell: PlannedCell, sign: int) -> None:
        self._waiting += sign
        if cell.seconds is None:
            self._work += sign * cell.work
        else:
            self._seconds += sign * cell.seconds

    def _of(self, seconds: float, work: float) -> float | None:
        """What so many estimated seconds, and so much work without an estimate, will really take."""
        estimated, took = self._measured
        size, lasted = self._rated
        if work and not (size and lasted):
            return None
        return seconds * (took / estimated if estimated and took else 1.0) + (work * lasted / size if work else 0.0)
