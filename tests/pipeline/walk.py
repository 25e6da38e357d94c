"""The walk of one model in this process: every program of it made or found, then the artifact published. A build does
the same by a plan and an executor; here each step can be heard, and ended in an error."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.backends.protocol import ignore_progress
from nxpipe.pipeline.build.worker import CellBuilder
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.thresholds import Thresholds
from nxpipe.pipeline.models.versions import digest_of
from nxpipe.pipeline.util.progress import Step


@dataclass(frozen=True)
class Built:
    cached: bool


def build(
    request: BuildSpec,
    store: Store,
    step: Step,
    say: Callable[[str], None],
    *,
    thresholds: Thresholds,
    force: bool = False,
) -> Built:
    """Publish the artifact of this request, or find it published."""
    request.check()
    maker = CellBuilder(store, step, say, thresholds, force=force)
    if not force and _is_published(request, store):
        return Built(cached=True)
    made = [maker.make(request, shape) for shape in sorted(request.shapes)]
    if not any(made) and _is_published(request, store):  # by another build
        return Built(cached=True)
    maker.publish(request, lambda title, size: nullcontext(ignore_progress))
    return Built(cached=False)


def _is_published(request: BuildSpec, store: Store) -> bool:
    return store.find(digest_of(request.key_inputs())) is not None
