"""Pages of a store: overview, artifacts, channels, reports, rollouts. Addresses are relative to the page."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from nxpipe.pipeline.build.report.document import ArtifactFigures, accuracy_of, program_figures
from nxpipe.pipeline.build.report.figures import figure_sections
from nxpipe.pipeline.build.report.summary import counted, figures_of
from nxpipe.pipeline.models.thresholds import Thresholds
from nxpipe.pipeline.util.page.html import Child, Markup, tag
from nxpipe.pipeline.util.page.page import (
    Cell,
    Section,
    Site,
    definitions,
    heading,
    moment,
    note,
    pill,
    sheet,
    table,
    tiles,
    two,
)
from nxpipe.pipeline.util.text import human_bytes

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store
    from nxpipe.artifact_store.channel.generation import Generation, Served
    from nxpipe.artifact_store.evidence import Evidence
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.pipeline.artifacts.channel_log import ChannelEntry

_NEWEST: Final = 8
_TENSORS: Final = 100
_FILES: Final = 300
KIND: Final = "store"


def artifact_path(request_key: str) -> str:
    return f"artifacts/{request_key}.html"


def channel_path(name: str) -> str:
    return f"channels/{name}.html"


def report_path(manifest_digest: str, timestamp: str) -> str:
    return f"reports/{manifest_digest}-{timestamp}.html"


def rollout_path(fleet: str, rollout: str) -> str:
    return f"rollouts/{fleet}/{rollout}.html"


def _link(text: Child, site: Site, path: str) -> Markup:
    return tag("a", text, href=f"{site.root}{path}")


# Lists

Channels = Mapping[str, "Generation | None"]  # the newest generation of each


def overview(
    url: str,
    artifacts: "Sequence[Published]",
    channels: Channels,
    counts: Mapping[str, int],
    site: Site,
) -> bytes:
    figures = [
        (f"{len(artifacts):,}", "artifacts"),
        (human_bytes(sum(each.size_bytes for each in artifacts)), "size of all, shared parts counted again"),
        (f"{len(channels):,}", "channels"),
        *((f"{count:,}", label) for label, count in counts.items()),
    ]
    lead = [heading("Artifact store", tag("code", url)), tiles(figures)]
    sections = [
        Section("Channels", _channels(channels, site)),
        Section("Newest artifacts", artifact_table(artifacts[:_NEWEST], channels, site)),
    ]
    return sheet("Artifact store", KIND, lead, sections, script=True, site=site)


def artifacts_page(artifacts: "Sequence[Published]", channels: Channels, site: Site) -> bytes:
    shown = artifact_table(artifacts, channels, site)
    sections = [Section("All artifacts, the newest first", shown)]
    return sheet("Artifacts", KIND, heading("Artifacts"), sections, script=True, site=site)


def artifact_table(artifacts: "Sequence[Published]", channels: Channels, site: Site) -> Markup:
    if not artifacts:
        return tag("p", "The store has no artifact yet; nxpipe build publishes one.")
    rows = [
        (
            _link(tag("code", each.name), site, artifact_path(each.request_key)),
            _served_by(each.request_key, channels, site),
            each.target,
            Cell(f"{each.executables:,}", each.executables),
            Cell(human_bytes(each.size_bytes), each.size_bytes),
            moment(each.published_at),
        )
        for each in artifacts
    ]
    columns = ("artifact", "served by", "target", "programs", "size", "published")
    return table(columns, rows, "Artifacts", words=("served by", "target", "published"), sortable=True)


def _served_by(request_key: str, channels: Channels, site: Site) -> Child:
    names = [
        name
        for name, tip in channels.items()
        if tip is not None and any(served.request_key == request_key for served in tip.artifacts)
    ]
    return [[", " if number else "", _link(name, site, channel_path(name))] for number, name in enumerate(names)] or "–"


def channels_page(channels: Channels, site: Site) -> bytes:
    sections = [Section("All channels", _channels(channels, site))]
    return sheet("Channels", KIND, heading("Channels"), sections, script=True, site=site)


def _channels(channels: Channels, site: Site) -> Markup:
    if not channels:
        return tag("p", "The store has no channel yet; nxpipe promote creates one.")
    rows = [
        (
            _link(name, site, channel_path(name)),
            Cell([_slot(served, site) for served in tip.artifacts] if tip else "cannot be verified", long=True),
            Cell(str(tip.generation), tip.generation) if tip else "–",
            moment(tip.at) if tip else "–",
            Cell(tip.actor if tip else "–", long=True),
        )
        for name, tip in channels.items()
    ]
    columns = ("channel", "serves", "generation", "since", "by")
    return table(columns, rows, "Channels", words=("serves", "since", "by"), sortable=True)


def _slot(served: "Served", site: Site) -> Markup:
    named = _link(tag("code", served.name), site, artifact_path(served.request_key))
    return tag("div", named, f" for {served.target}")


def channel_page(name: str, history: "Sequence[ChannelEntry]", known: "frozenset[str]", site: Site) -> bytes:
    """The state and the history of a channel; artifacts that are no longer in the store have no link."""
    entries = list(history)
    if not entries:
        lead = heading(f"Channel {name}", "It has no generation.")
        return sheet(f"Channel {name}", KIND, lead, [], site=site)
    newest = entries[0].generation
    lead = heading(f"Channel {name}", f"generation {newest.generation}, {moment(newest.at)}, by {newest.actor}")
    sections = [
        Section("Serves", _serves(newest.artifacts, known, site)),
        Section("History", _history(entries, known, site)),
    ]
    return sheet(f"Channel {name}", KIND, lead, sections, script=True, site=site)


def _serves(artifacts: "Sequence[Served]", known: "frozenset[str]", site: Site) -> Markup:
    rows = [(_named(served, known, site), served.target, ", ".join(served.without) or "none") for served in artifacts]
    columns = ("artifact", "target", "evidence waived")
    return table(columns, rows, "Artifacts that the channel serves", words=columns[1:])


def _named(served: "Served", known: "frozenset[str]", site: Site) -> Markup:
    name = tag("code", served.name)
    return _link(name, site, artifact_path(served.request_key)) if served.request_key in known else name


def _history(entries: "Sequence[ChannelEntry]", known: "frozenset[str]", site: Site) -> Markup:
    rows = []
    for entry in entries:
        generation = entry.generation
        new = [served for served in generation.artifacts if served not in entry.before]
        action = "promote" if generation.restores is None else f"rollback to {generation.restores}"
        trust = pill(f"not trusted: {entry.fault}", "bad") if entry.fault else ", ".join(entry.signed_by) or "–"
        rows.append(
            (
                Cell(str(generation.generation), generation.generation),
                action,
                Cell([_changed(served, known, site) for served in new] or "nothing new", long=True),
                moment(generation.at),
                Cell(generation.actor, long=True),
                trust,
                Cell(generation.reason or "–", long=True),
            )
        )
    columns = ("generation", "action", "changed", "at", "by", "signed by", "reason")
    return table(columns, rows, "History, the newest first", words=columns[1:], sortable=True)


def _changed(served: "Served", known: "frozenset[str]", site: Site) -> Markup:
    return tag("div", _named(served, known, site), f" for {served.target}")


def reports_page(reports: "Sequence[tuple[Published, str]]", site: Site) -> bytes:
    rows = [
        (
            _link(_readable(timestamp), site, report_path(artifact.manifest_digest, timestamp)),
            _link(tag("code", artifact.name), site, artifact_path(artifact.request_key)),
            artifact.target,
        )
        for artifact, timestamp in reports
    ]
    columns = ("build of", "artifact", "target")
    empty = tag("p", "The store has no report yet; nxpipe build stores one beside what it publishes.")
    body = table(columns, rows, "Reports of builds", words=columns[1:], sortable=True) if rows else empty
    return sheet(
        "Build reports", KIND, heading("Build reports"), [Section("All reports", body)], script=True, site=site
    )


def _readable(timestamp: str) -> str:
    """20261121T190147.250000Z as a time for people."""
    day, clock = timestamp[:8], timestamp[9:15]
    return f"{day[:4]}-{day[4:6]}-{day[6:]} {clock[:2]}:{clock[2:4]}:{clock[4:]} UTC"


def rollouts_page(rollouts: Sequence[tuple[str, str, int]], site: Site) -> bytes:
    """(fleet, rollout, evaluations), the newest first."""
    rows = [
        (_link(rollout, site, rollout_path(fleet, rollout)), fleet, Cell(f"{count:,}", count))
        for fleet, rollout, count in rollouts
    ]
    empty = tag("p", "The store has no evaluation of a rollout.")
    shown = table(("rollout", "fleet", "evaluations"), rows, "Rollouts", words=("fleet",), sortable=True)
    body = shown if rows else empty
    return sheet("Rollouts", KIND, heading("Rollouts"), [Section("All rollouts", body)], script=True, site=site)


def broken_page(title: str, fault: str, site: Site) -> bytes:
    """In place of a page whose documents cannot be read."""
    article = tag("article", tag("p", fault), class_="bad")
    return sheet(title, KIND, heading(title), [Section("This cannot be shown", article)], site=site)


# One artifact


def artifact_page(
    artifact: "Published",
    store: "Store",
    served: Sequence[Mapping[str, Any]],
    channels: Channels,
    timestamps: Sequence[str],
    thresholds: Thresholds,
    site: Site,
) -> bytes:
    manifest, evidence = artifact.manifest, store.evidence(artifact.manifest_digest)
    figures = ArtifactFigures(figures_of(manifest, store), accuracy_of(manifest, store), served)
    document = _document(artifact, manifest, figures)
    lead = heading(artifact.name, f"published {moment(artifact.published_at)}", _channel_line(artifact, channels, site))
    sections: list[Section] = [
        Section("Manifest", _facts(artifact, manifest)),
        Section("Programs", _programs(manifest)),
        *figure_sections([document], vars(thresholds)),
        Section("Evidence", _evidence(evidence)),
        Section("Build reports", _reports(artifact, timestamps, site)),
        Section("Weights", _weights(manifest)),
        Section("Files", _files(manifest)),
    ]
    return sheet(artifact.name, KIND, lead, sections, script=True, site=site)


def _channel_line(artifact: "Published", channels: Channels, site: Site) -> Child:
    return ["served by ", _served_by(artifact.request_key, channels, site)]


def _document(artifact: "Published", manifest: "Manifest", figures: ArtifactFigures) -> dict[str, Any]:
    """The artifact as the document of a build report has it."""
    degree = manifest.executables[0].tensor_parallel if manifest.executables else 1
    cells = [
        {"program": each.name, "phase": each.phase, "batch": each.batch, "sequence": each.sequence}
        | program_figures(figures, each.name)
        for each in manifest.executables
    ]
    order = {"tp": degree, "target": manifest.target}
    return {"title": artifact.name, "asked": {"order": order}, "cells": cells, "served": list(figures.served)}


def _facts(artifact: "Published", manifest: "Manifest") -> Markup:
    facts: dict[str, Child] = {
        "model": tag("code", manifest.model.id),
        "revision": manifest.model.revision or "–",
        "task": manifest.model.task,
        "target": manifest.target,
        "back end": manifest.backend,
        "size": human_bytes(artifact.size_bytes),
        "runs on devices": "yes" if manifest.runs_on_devices else "no: it has programs of the emulator only",
        "request key": tag("code", artifact.request_key),
        "manifest": tag("code", artifact.manifest_digest),
    }
    return definitions(facts)


def _programs(manifest: "Manifest") -> Markup:
    rows = [
        (
            tag("code", each.name),
            Cell(f"{each.batch:,}", each.batch),
            Cell(f"{each.sequence:,}", each.sequence),
            each.tensor_parallel,
            Cell(human_bytes(each.blob.size), each.blob.size),
            Cell(human_bytes(each.device.neff.size), each.device.neff.size) if each.device else Cell("–", 0),
        )
        for each in manifest.executables
    ]
    columns = ("program", "batch", "bucket", "tp", "size", "NEFF")
    return table(columns, rows, "Programs of the artifact", sortable=True)


def _evidence(evidence: "Sequence[Evidence]") -> Child:
    if not evidence:
        return tag("p", "None: it was built with --no-verify, or imported without evidence.")
    rows = [
        (each.kind, ", ".join(sorted({program.yardstick for program in each.programs})), f"{len(each.programs):,}",
         Cell(tag("code", each.digest[:12])))
        for each in evidence
    ]  # fmt: skip
    columns = ("kind", "compared with", "programs", "document")
    return table(columns, rows, "Evidence of the artifact", words=("compared with", "document"))


def _reports(artifact: "Published", timestamps: Sequence[str], site: Site) -> Child:
    if not timestamps:
        return tag("p", "None.")
    links = (_link(_readable(each), site, report_path(artifact.manifest_digest, each)) for each in timestamps)
    return tag("ul", [tag("li", link) for link in links])


def _weights(manifest: "Manifest") -> Iterator[Markup | None]:
    tensors = sorted(manifest.weights, key=lambda tensor: (-tensor.blob.size, tensor.name))
    if not tensors:
        yield tag("p", "None.")
        return
    total = sum(tensor.blob.size for tensor in tensors)
    yield tag("p", f"{counted(len(tensors), 'tensor')}, {human_bytes(total)}.")
    rows = [
        (tag("code", each.name), Cell(human_bytes(each.blob.size), each.blob.size),
         two(each.dtype, " × ".join(map(str, each.shape))))
        for each in tensors[:_TENSORS]
    ]  # fmt: skip
    shown = table(("tensor", "size", "type"), rows, "Weights, the largest first", words=("type",), sortable=True)
    yield tag("details", tag("summary", f"The largest {len(rows):,}"), shown)


def _files(manifest: "Manifest") -> Iterator[Markup | None]:
    rows = [
        (tag("code", each.path), Cell(human_bytes(each.blob.size), each.blob.size), tag("code", each.blob.sha256[:12]))
        for each in manifest.files[:_FILES]
    ]
    yield table(("file", "size", "SHA-256"), rows, "Files of the artifact", words=("SHA-256",), sortable=True)
    yield note(f"{len(manifest.files) - len(rows):,} more." if len(manifest.files) > len(rows) else "")
