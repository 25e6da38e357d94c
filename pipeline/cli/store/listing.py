"""`nxpipe store ls`, `show` and `du`: the artifacts of a store and their sizes."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from nxpipe.pipeline.artifacts.store_url import open_configured_store, open_uncached_store
from nxpipe.pipeline.cli.completion import complete_artifacts
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.cli.param_types import Count
from nxpipe.pipeline.compile import artifact_files
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import Column, for_terminal, human_bytes, style, table

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store
    from nxpipe.artifact_store.documents import Blob
    from nxpipe.artifact_store.evidence import Evidence, Timing
    from nxpipe.artifact_store.manifest import Manifest


_COLUMNS = (
    Column("artifact", whole=True),
    Column("target"),
    Column("tp", drop=2),
    Column("batches", drop=4),
    Column("buckets", drop=3),
    Column("differs in", drop=1),
    Column("channels"),
    Column("size", drop=5),
    Column("published", drop=6, whole=True),
)
_DETAILED = 200  # artifacts whose manifests are read
_READERS = 16  # at once
_LONGEST = 24  # of a value in a row
_IN_COLUMNS = ("shapes", "options.tensor_parallel", "target")  # key inputs that have columns of their own

_PROGRAMS: Final = (
    Column("  program"),
    Column("phase", drop=3),
    Column("batch", drop=4),
    Column("sequence", drop=5),
    Column("tp", drop=6),
    Column("size"),
    Column("NEFF"),
    Column("graph", drop=1),
)
_OUTPUTS: Final = (
    Column("  program"),
    Column("output"),
    Column("max abs", drop=3),
    Column("mean abs", drop=4),
    Column("max rel"),
    Column("cosine"),
    Column("KL", drop=5),
    Column("top-1", drop=6),
    Column("reference", drop=2),
)
_TIMES: Final = ("  program", "p50", "p99", "runs", "clock")


@click.command(cls=Command)
@click.option("--model", metavar="ID", help="Only artifacts of this model; `*` matches any text, as in 'acme/*'.")
@click.option("--target", metavar="NAME", help="Only artifacts for this target, as in inf2.")
@click.option("--limit", type=Count(1), metavar="N", help="Only the newest N.")
@store_option
@config_option
@click.pass_obj
def ls(
    console: Console, model: str | None, target: str | None, limit: int | None, store: str | None, config_path: Path
) -> None:
    """List all artifacts, the newest first.

    `differs in` names the key inputs by which artifacts of one model and target differ. The programs and inputs of the
    newest 200 are read.

    \b
    Example:
      nxpipe store ls
      nxpipe store ls --model 'acme/*' --target inf2 --limit 20
      nxpipe store ls --store s3://my-artifacts/nxpipe --json
    """
    opened = open_configured_store(store, config_path, console)
    published = opened.list(console.detail)
    selected = [artifact for artifact in published if _matches(artifact, model, target)][:limit]
    details, channels = _details(selected[:_DETAILED], opened), opened.serving_channels() if selected else {}
    if console.json:
        console.data(
            [
                _summary(artifact)
                | (asdict(details[artifact.manifest_digest]) if artifact.manifest_digest in details else {})
                | {"channels": list(channels.get(artifact.manifest_digest, ()))}
                for artifact in selected
            ]
        )
    elif selected:
        console.page(table(_COLUMNS, [_row(artifact, details, channels) for artifact in selected]))
    if not published:
        console.say(
            f"{opened.url} has no artifacts; build one with: "
            "nxpipe build --model-id bert-base-uncased --weights random:0"
        )
    elif not selected:
        console.say(f"None of the {len(published)} artifacts in {opened.url} matches.")


@click.command(cls=Command)
@click.argument("name", metavar="ARTIFACT", shell_complete=complete_artifacts)
@store_option
@config_option
@click.pass_obj
def show(console: Console, name: str, store: str | None, config_path: Path) -> None:
    """Show one artifact: programs, weights, utilisation, evidence, key.

    ARTIFACT is a model's id, MODEL@KEY, or a key (at least six hex digits). Verifies the manifest against its digest.
    --json has the full utilisation of each program.

    \b
    Example:
      nxpipe store show bert-base-uncased
      nxpipe store show bert-base-uncased@4e9ce0 --json
    """
    opened = open_configured_store(store, config_path, console)
    published = opened.resolve(name)
    inputs = opened.key_inputs(published.manifest)
    programs = artifact_files.read(published.manifest, opened)
    evidence = opened.evidence(published.manifest_digest)
    if console.json:
        manifest = published.manifest.model_dump(mode="json")
        evidence_data = [{"digest": entry.digest, **entry.model_dump(mode="json")} for entry in evidence]
        details = {"manifest": manifest, "key_inputs": inputs, "utilisation": programs, "evidence": evidence_data}
        console.data(_summary(published) | details)
    else:
        console.page("\n\n".join(_page(published, opened, inputs, evidence)))


def _matches(artifact: "Published", model: str | None, target: str | None) -> bool:
    return (model is None or fnmatchcase(artifact.model_id, model)) and target in (None, artifact.target)


@dataclass(frozen=True)
class ArtifactDetails:
    """What distinguishes an artifact from others of its model: its programs, and the key inputs in which it differs."""

    degrees: list[int]
    batches: list[int]
    buckets: list[int]
    differs_in: dict[str, object]


def _details(artifacts: "Sequence[Published]", store: "Store") -> dict[str, ArtifactDetails]:
    """The details of artifacts, by the digest of the manifest."""
    from concurrent.futures import ThreadPoolExecutor

    from nxpipe.artifact_store.index.leaves import leaves

    def inputs_of(artifact: "Published") -> dict[str, object]:
        return dict(leaves(store.key_inputs(artifact.manifest) or {}))

    with ThreadPoolExecutor(_READERS) as pool:
        inputs = list(pool.map(inputs_of, artifacts))
    alike: defaultdict[tuple[str, str], list[dict[str, object]]] = defaultdict(list)
    for artifact, found in zip(artifacts, inputs, strict=True):
        alike[artifact.model_id, artifact.target].append(found)
    details = {}
    for artifact, found in zip(artifacts, inputs, strict=True):
        programs = artifact.manifest.executables
        details[artifact.manifest_digest] = ArtifactDetails(
            sorted({program.tensor_parallel for program in programs}),
            sorted({program.batch for program in programs}),
            sorted({program.sequence for program in programs}),
            _differing(found, alike[artifact.model_id, artifact.target]),
        )
    return details


def _differing(inputs: dict[str, object], alike: Sequence[dict[str, object]]) -> dict[str, object]:
    """The key inputs that are not the same in all artifacts of a model."""
    return {
        path: inputs.get(path)
        for path in sorted({path for other in alike for path in other})
        if not path.startswith(_IN_COLUMNS) and any(other.get(path) != inputs.get(path) for other in alike)
    }


def _row(
    artifact: "Published", details: Mapping[str, ArtifactDetails], channels: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    found = details.get(artifact.manifest_digest)
    numbers = (found.degrees, found.batches, found.buckets) if found else ((), (), ())
    return (
        artifact.name,
        artifact.target,
        *(",".join(map(str, each)) or "-" for each in numbers),
        ", ".join(starmap(_difference, found.differs_in.items())) if found else "-",
        ", ".join(channels.get(artifact.manifest_digest, ())) or "-",
        human_bytes(artifact.size_bytes),
        _minute(artifact),
    )


def _difference(path: str, value: object) -> str:
    """`autocast=all`; of a digest its beginning."""
    from nxpipe.artifact_store.names import SHOWN

    name = path.rpartition(".")[2] if path.startswith("options.") else path
    text = "absent" if value is None else _readable(value)
    return f"{name}={text if len(text) <= _LONGEST else text[:SHOWN]}"


def _summary(artifact: "Published") -> dict[str, object]:
    return {
        "request_key": artifact.request_key,
        "manifest_digest": artifact.manifest_digest,
        "model": artifact.model_id,
        "target": artifact.target,
        "programs": artifact.executables,
        "size_bytes": artifact.size_bytes,
        "published_at": artifact.published_at,
    }


def _minute(artifact: "Published") -> str:
    return f"{artifact.published_at[:16].replace('T', ' ')} UTC"


def _page(
    published: "Published", store: "Store", key_inputs: dict[str, object], evidence: "Sequence[Evidence]"
) -> Iterator[str]:
    """The sections of the page that have content."""
    from nxpipe.artifact_store.index.leaves import leaves
    from nxpipe.artifact_store.names import SHOWN
    from nxpipe.pipeline.build.report.program_table import program_table
    from nxpipe.pipeline.build.report.summary import figures_of
    from nxpipe.pipeline.models.thresholds import report_of

    manifest = published.manifest
    weights = [tensor.blob for tensor in manifest.weights]
    yield _aligned(
        [
            ("model", manifest.model.id),
            ("revision", manifest.model.revision or "none"),
            ("task", manifest.model.task),
            ("target", manifest.target),
            ("backend", manifest.backend),
            ("key", published.request_key),
            ("manifest", published.manifest_digest),
            ("published", _minute(published)),
            ("size", f"{human_bytes(published.size_bytes)} in {len(manifest.blobs())} blobs"),
            ("evidence", ", ".join(sorted({entry.kind for entry in evidence})) or "none"),
            ("weights", f"{_bytes_of(weights)} in {len(weights)} tensor{'' if len(weights) == 1 else 's'}"),
        ]
    )
    if manifest.executables:
        yield f"{style('programs', bold=True)}\n{_program_table(manifest)}"
    if manifest.files:
        yield _section("files", [(file.path, human_bytes(file.blob.size)) for file in manifest.files])
    for payload in manifest.serving:
        files = [(file.path, human_bytes(file.blob.size)) for file in payload.files]
        files += [
            (file.path, f"{human_bytes(sum(one.blob.size for one in file.tensors))} in {len(file.tensors)} tensors")
            for file in payload.shared
        ]
        yield _section(f"serving {payload.name}", sorted(files) or [("contract", "without files")])
    if figures := figures_of(manifest, store):
        verified = report_of(manifest, store)
        yield f"{style('predictions and accuracy', bold=True)}\n{program_table(figures, verified)}"
    for entry in evidence:
        yield "\n".join(_evidence(entry, f"evidence {entry.digest[:SHOWN]}"))
    if key_inputs:
        yield _section("key inputs", ((path, _readable(value)) for path, value in leaves(key_inputs)))


def _program_table(manifest: "Manifest") -> str:
    from nxpipe.pipeline.build.report.program_table import by_size

    rows = [
        (
            f"  {program.name}",
            program.phase,
            *map(str, (program.batch, program.sequence, program.tensor_parallel)),
            human_bytes(program.blob.size),
            human_bytes(program.device.neff.size) if program.device else "",
            program.graph_key[:12],
        )
        for program in sorted(manifest.executables, key=lambda program: by_size(program.name))
    ]
    used = [n for n in range(len(_PROGRAMS)) if any(row[n] for row in rows)]
    return table([_PROGRAMS[n] for n in used], [[row[n] for n in used] for row in rows])


def _evidence(evidence: "Evidence", title: str) -> Iterator[str]:
    """The limits, the figures of each output, the times of devices, and what the programs ran on."""
    limits = [f"{name} {limit}" for name, limit in evidence.limits.model_dump().items() if limit is not None]
    yield f"{style(title, bold=True)}: {evidence.kind}; limits: {', '.join(limits) or 'none'}"
    names = ("max_absolute", "mean_absolute", "max_relative", "cosine", "kl", "top1")
    rows = [
        (
            f"  {program.program}",
            figures.output,
            *(_figure(getattr(figures, name)) for name in names),
            program.yardstick,
        )
        for program in evidence.programs
        for figures in program.outputs
    ]
    if rows:
        yield table(_OUTPUTS, rows)
    if times := [program for program in evidence.programs if program.timing]:
        yield table(_TIMES, [(f"  {program.program}", *_timing(program.timing)) for program in times if program.timing])
    surroundings: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for program in evidence.programs:
        surroundings.setdefault(tuple(sorted(program.surroundings.items())), []).append(program.program)
    for entries, programs in surroundings.items():
        if entries:
            of = "" if len(surroundings) == 1 else f" {', '.join(programs)}"
            yield for_terminal(f"  ran with{of}: {', '.join(f'{name} {text}' for name, text in entries)}")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.7g}"


def _timing(timing: "Timing") -> tuple[str, ...]:
    return f"{timing.p50_ms:.3f} ms", f"{timing.p99_ms:.3f} ms", str(timing.runs), timing.clock


def _bytes_of(blobs: "list[Blob]") -> str:
    """The size of the tensors, and the stored size if some are equal."""
    whole, stored = sum(blob.size for blob in blobs), sum(blob.size for blob in set(blobs))
    return human_bytes(whole) if whole == stored else f"{human_bytes(whole)}, {human_bytes(stored)} stored,"


def _readable(value: object) -> str:
    """The value as text; untrusted strings with control characters are escaped."""
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value)


def _section(title: str, rows: Iterable[tuple[str, str]]) -> str:
    return f"{style(title, bold=True)}\n{_aligned(rows, indent='  ')}"


def _aligned(rows: Iterable[tuple[str, str]], indent: str = "") -> str:
    cells = [(for_terminal(name), for_terminal(text)) for name, text in rows]
    width = max(len(name) for name, _ in cells)
    return "\n".join(f"{indent}{name.ljust(width)}  {text}".rstrip() for name, text in cells)


@click.command(cls=Command)
@store_option
@config_option
@click.pass_obj
def du(console: Console, store: str | None, config_path: Path) -> None:
    """Show the size of each model, of shared and of orphaned objects.

    "logical" counts every artifact as if it were alone, "stored" counts every blob once, and "own" counts blobs that no
    other model shares.

    \b
    Example:
      nxpipe store du
    """
    from nxpipe.artifact_store.maintenance.reachability import usage

    opened = open_uncached_store(store, config_path, console)
    store_usage = usage(opened)
    if console.json:
        console.data(asdict(store_usage))
        return
    rows = [
        (model.model_id, str(model.artifacts), *map(human_bytes, (model.logical, model.stored, model.own)))
        for model in store_usage.models
    ]
    console.page(table(("model", "artifacts", "logical", "stored", "own"), rows))
    console.say(
        f"{human_bytes(store_usage.stored)} in {store_usage.objects} objects; "
        f"artifacts take {human_bytes(store_usage.artifacts_stored)} instead of {human_bytes(store_usage.logical)}, "
        f"{human_bytes(store_usage.shared)} of it shared by several models; "
        f"{human_bytes(store_usage.orphaned)} in {store_usage.orphans} objects are orphaned."
    )
