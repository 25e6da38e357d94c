"""The walk of one model in this process: every program of it made or found, then the artifact published.

A request whose artifact the store holds stops at the first step, before numpy or torch is imported.
"""

from collections.abc import Callable
from dataclasses import dataclass

from artifact_store import Published, Store
from pipeline.building.cell import Maker
from pipeline.evidence import Step
from pipeline.nearness import why_missed
from pipeline.progress import Watch, unwatched
from pipeline.request import BuildRequest, digest_of
from pipeline.verify import Thresholds


@dataclass(frozen=True)
class Built:
    published: Published
    cached: bool


def build(
    request: BuildRequest,
    store: Store,
    step: Step,
    say: Callable[[str], None],
    *,
    thresholds: Thresholds,
    force: bool = False,
    watch: Watch = unwatched,
) -> Built:
    """Publish the artifact of this request, or find it published."""
    request.check()
    inputs = request.key_inputs()
    key = digest_of(inputs)
    if not force and (found := store.find(key)):
        return Built(found, cached=True)
    if not force and (hint := why_missed(store, inputs)):
        say(hint)
    maker = Maker(store, step, say, thresholds, force=force)
    made = [maker.make(request, shape) for shape in sorted(request.shapes)]
    if not any(made) and (found := store.find(key)):  # by whoever made them meanwhile
        return Built(found, cached=True)
    return Built(maker.publish(request, watch), cached=False)
