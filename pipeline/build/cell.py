"""One program of a request made, or found made: as parts in the store, each committed by itself."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, TypeAlias

from nxpipe.artifact_store import Published, Store
from nxpipe.artifact_store.builds import StepResult, keep_step_result, observed, record_observation, step_result
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.errors import Incomplete
from nxpipe.pipeline.build.assemble import publish
from nxpipe.pipeline.build.failed import refuse_what_failed_before, remembering
from nxpipe.pipeline.build.turn import turn
from nxpipe.pipeline.compile.made import Made, backend_of, compared
from nxpipe.pipeline.request import BuildRequest, Shape
from nxpipe.pipeline.util.progress import Watch
from nxpipe.pipeline.verify.evidence import Step
from nxpipe.pipeline.verify.judged import insist
from nxpipe.pipeline.verify.materials import Shelf
from nxpipe.pipeline.verify.verify import Thresholds

_Find: TypeAlias = Callable[[Store, str], StepResult | None]
_Keep: TypeAlias = Callable[[Store, str, Mapping[str, Blob], dict[str, object]], StepResult]


class Maker:
    """Makes cells one after the other; what it has loaded for one may serve the next. With `force` it makes what is
    there as well, whose bytes must come out equal, and waits for nobody."""

    def __init__(
        self,
        store: Store,
        step: Step,
        say: Callable[[str], None],
        thresholds: Thresholds,
        *,
        force: bool = False,
        shelf: Shelf | None = None,
    ) -> None:
        self._store = store
        self._step = step
        self._say = say
        self._thresholds = thresholds
        self._force = force
        self._shelf = shelf or Shelf()

    def make(self, request: BuildRequest, shape: Shape) -> bool:
        """False: all of it was there."""
        backend = backend_of(request)
        front: Callable[[], Any] = cache(partial(backend.front, request, shape, self._step))

        def program() -> Made:
            return backend.program(request, shape, front(), self._store, self._step, force=self._force)

        def evidence() -> Made:
            materials = self._shelf.of(request, self._step)
            return backend.evidence(request, shape, front(), materials, self._store, self._step, self._thresholds)

        key = request.program_key(shape)
        made = self._part(key, program)
        if request.verified:
            key = request.evidence_key(shape, key)
            made = self._part(key, evidence, observed, record_observation) or made
            self._insist(request, shape, key)
        return made

    def publish(self, request: BuildRequest, watch: Watch) -> Published:
        """The artifact, all of whose cells are there. No listing shows that a part has lost a blob: it is made anew."""
        tensors = self._shelf.of(request, self._step).tensors
        try:
            return publish(request, tensors, self._store, self._step, watch, self._thresholds)
        except Incomplete:
            for shape in sorted(request.shapes):
                self.make(request, shape)
            return publish(request, tensors, self._store, self._step, watch, self._thresholds)

    def _part(
        self, key: str, make: Callable[[], Made], find: _Find = step_result, keep: _Keep = keep_step_result
    ) -> bool:
        if self._force:
            self._keep(key, make, keep)
            return True
        if self._is_known(key, find):
            return False
        with turn(self._store, key, self._say):
            if self._is_known(key, find):
                return False
            self._keep(key, make, keep)
            return True

    def _is_known(self, key: str, find: _Find) -> bool:
        if find(self._store, key) is not None:
            return True
        refuse_what_failed_before(self._store, key, self._thresholds)
        return False

    def _keep(self, key: str, make: Callable[[], Made], keep: _Keep) -> None:
        with remembering(self._store, key, self._thresholds):
            made = make()
        keep(self._store, key, made.files, dict(made.facts))

    def _insist(self, request: BuildRequest, shape: Shape, key: str) -> None:
        """What was observed first stands, and may have been within other thresholds than today's."""
        part = observed(self._store, key)
        if part is not None:
            insist(request.source.id, [compared(shape, part)], self._thresholds)
