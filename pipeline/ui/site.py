"""The pages of a store by their address, for the server and for an export, which have the same bytes.

Nothing is written to the store. What another party may have written, such as the name of a rollout, becomes an address
only if it has the form of one.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from nxpipe.artifact_store.builds import read_report, report_timestamps
from nxpipe.artifact_store.channel.log import channels
from nxpipe.artifact_store.errors import StoreError
from nxpipe.pipeline.artifacts.bench import served_comparisons
from nxpipe.pipeline.artifacts.channel_log import ChannelView
from nxpipe.pipeline.models.thresholds import Thresholds
from nxpipe.pipeline.ui import pages
from nxpipe.pipeline.util.errors import PipelineError, WouldOverwrite
from nxpipe.pipeline.util.page.page import Site

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store
    from nxpipe.artifact_store.channel.generation import Generation

_MAIN: Final = (
    ("Overview", "index.html"),
    ("Artifacts", "artifacts/index.html"),
    ("Channels", "channels/index.html"),
    ("Reports", "reports/index.html"),
    ("Rollouts", "rollouts/index.html"),
)
_ROLLOUTS: Final = "rollouts/"
_EVALUATION: Final = re.compile(r"rollouts/([a-z0-9][a-z0-9-]{0,62})/([A-Za-z0-9][A-Za-z0-9_-]{0,79})/(\d{6})\.json")
_HISTORY: Final = 200  # generations of a channel that its page lists
# Errors of documents of another form, which another party or version may have stored.
_UNREADABLE: Final = (StoreError, PipelineError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError,
                      RecursionError)  # fmt: skip

Render = Callable[[Site], bytes]


@dataclass(frozen=True)
class StoreSite:
    """The site of one store."""

    view: ChannelView

    @property
    def store(self) -> "Store":
        return self.view.store

    def page(self, path: str) -> bytes | None:
        """The page at an address, as the store is now; None if there is none."""
        render = self._found(path)
        return None if render is None else self._rendered(path, render)

    def paths(self) -> Iterator[str]:
        """The addresses of all pages."""
        yield from (path for _, path in _MAIN)
        for artifact in self.store.list():
            yield pages.artifact_path(artifact.request_key)
            for timestamp in report_timestamps(self.store, artifact.manifest_digest):
                yield pages.report_path(artifact.manifest_digest, timestamp)
        yield from map(pages.channel_path, channels(self.store.backend))
        yield from (pages.rollout_path(fleet, rollout) for fleet, rollout, _ in self._rollouts())

    def _rendered(self, path: str, render: Render) -> bytes:
        root = "../" * (len(PurePosixPath(path).parts) - 1)
        site = Site([(title, f"{root}{target}") for title, target in _MAIN], f"{root}{path}", root)
        try:
            return render(site)
        except _UNREADABLE as error:
            return pages.broken_page(path.removesuffix(".html"), f"{type(error).__name__}: {error}", site)

    def _found(self, path: str) -> Render | None:
        """What renders an address; every part of it is compared with what the store lists."""
        match path.split("/"):
            case ["index.html"]:
                return self._overview
            case ["artifacts", "index.html"]:
                return lambda site: pages.artifacts_page(self.store.list(), self._tips(), site)
            case ["channels", "index.html"]:
                return lambda site: pages.channels_page(self._tips(), site)
            case ["reports", "index.html"]:
                return lambda site: pages.reports_page(self._reports(), site)
            case ["rollouts", "index.html"]:
                return lambda site: pages.rollouts_page(self._rollouts(), site)
            case ["artifacts", name]:
                listed = {pages.artifact_path(each.request_key): each for each in self.store.list()}
                return partial(self._artifact, listed[path]) if path in listed else None
            case ["channels", name]:
                channel = name.removesuffix(".html")
                known = path == pages.channel_path(channel) and channel in channels(self.store.backend)
                return partial(self._channel, channel) if known else None
            case ["reports", _]:
                stored = {pages.report_path(each.manifest_digest, at): (each, at) for each, at in self._reports()}
                return partial(self._report, *stored[path]) if path in stored else None
            case ["rollouts", _, _]:
                rollouts = {pages.rollout_path(fleet, name): (fleet, name) for fleet, name, _ in self._rollouts()}
                return partial(self._rollout, *rollouts[path]) if path in rollouts else None
            case _:
                return None

    def _overview(self, site: Site) -> bytes:
        counts = {"stored build reports": len(self._reports()), "rollouts": len(self._rollouts())}
        return pages.overview(self.store.url, self.store.list(), self._tips(), counts, site)

    def _tips(self) -> "Mapping[str, Generation | None]":
        """The newest generation of each channel; None of one that cannot be verified."""
        tips: dict[str, Generation | None] = {}
        for name in channels(self.store.backend):
            try:
                entries = list(self.view.history(name, 1))
            except (StoreError, PipelineError):
                entries = []  # its own page says why
            tips[name] = entries[0].generation if entries else None
        return tips

    def _reports(self) -> "Sequence[tuple[Published, str]]":
        found = [
            (artifact, timestamp)
            for artifact in self.store.list()
            for timestamp in report_timestamps(self.store, artifact.manifest_digest)
        ]
        return sorted(found, key=lambda each: (each[1], each[0].request_key), reverse=True)

    def _rollouts(self) -> list[tuple[str, str, int]]:
        """(fleet, rollout, evaluations) of those with a record, the newest first."""
        counts: dict[tuple[str, str], tuple[float, int]] = {}
        for item in self.store.backend.walk(_ROLLOUTS):
            if found := _EVALUATION.fullmatch(item.path):
                at = (found[1], found[2])
                modified, count = counts.get(at, (0.0, 0))
                counts[at] = (max(modified, item.modified), max(count, int(found[3])))
        ordered = sorted(counts.items(), key=lambda each: (-each[1][0], each[0]))
        return [(*at, count) for at, (_, count) in ordered]

    def _artifact(self, artifact: "Published", site: Site) -> bytes:
        served = served_comparisons(artifact.manifest, self.store, drift=False)
        timestamps = report_timestamps(self.store, artifact.manifest_digest)
        thresholds = Thresholds.of(self.view.config)
        return pages.artifact_page(artifact, self.store, served, self._tips(), timestamps, thresholds, site)

    def _channel(self, name: str, site: Site) -> bytes:
        known = frozenset(artifact.request_key for artifact in self.store.list())
        return pages.channel_page(name, list(self.view.history(name, _HISTORY)), known, site)

    def _report(self, artifact: "Published", timestamp: str, site: Site) -> bytes:
        """Rendered from the document: a stored page is unsigned, and a browser would run scripts in it."""
        from nxpipe.pipeline.build.report.html import page

        data = read_report(self.store, artifact.manifest_digest, timestamp, "json")
        return page(json.loads(data or b"null"), site)

    def _rollout(self, fleet: str, rollout: str, site: Site) -> bytes:
        from nxpipe.pipeline.rollout.course import EvaluationLog
        from nxpipe.pipeline.rollout.page import rollout_page

        return rollout_page(fleet, rollout, EvaluationLog.at(self.store, fleet, rollout), site)


def export(site: StoreSite, folder: Path) -> int:
    """Write all pages to a new or empty folder, whole or not at all; the count of pages."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WouldOverwrite(f"{folder} exists and is not an empty folder; nothing was written; pass another --export")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        count = 0
        for path in site.paths():
            page = site.page(path)
            if page is not None:  # it may have been collected since it was listed
                target = scratch / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(page)
                count += 1
        (scratch / ".nojekyll").touch()  # GitHub Pages serves the files as they are
        scratch.chmod(0o755)
        scratch.replace(folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return count
