"""Check of one model: its examination, cached if possible, and the fit of every target and degree."""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from nxpipe.artifact_store.errors import InvalidDocument
from nxpipe.emulator.configuration import without_quantisation
from nxpipe.emulator.errors import (
    CompileError,
)
from nxpipe.pipeline.check.model_files import (
    Checkpoint,
    examine_files,
    located_by_message,
    located_in_config,
    relative_path,
    review_config,
    too_long,
    unusable_source,
)
from nxpipe.pipeline.check.report import Examination, Report, fit_target, verdicts
from nxpipe.pipeline.compile.findings import (
    CONFIGURATION,
    SOURCE,
    WEIGHTS,
    Finding,
    merge,
)
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.program_file import SavedProgram
from nxpipe.pipeline.models.source import ModelSource, PretrainedModel
from nxpipe.pipeline.models.spec import ModelSpec
from nxpipe.pipeline.models.versions import digest_of, source_digest
from nxpipe.pipeline.models.weights import NoWeights
from nxpipe.pipeline.util.errors import ModelSourceError
from nxpipe.pipeline.util.files import MiB, cache_folder, json_of, read_file
from nxpipe.pipeline.util.process import no_collection
from nxpipe.pipeline.util.progress import Step

_ENTRIES_LIMIT = 512


def lookup(key: str) -> Examination | None:
    try:
        path = _folder() / f"{key}.json"
        document = json_of(read_file(path, limit=64 * MiB))
        if document["digest"] != _digest(key, document["examination"]):
            return None
        examination = Examination.from_json(document["examination"])
        path.touch()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # a damaged entry is a cache miss
    return examination


def store_examination(key: str, examination: Examination) -> None:
    """Write a cache entry atomically. An unwritable folder is ignored: the next run examines the model again."""
    body = examination.as_json()
    document = json.dumps({"digest": _digest(key, body), "examination": body})
    with suppress(OSError):
        folder = _folder()
        folder.parent.mkdir(0o700, parents=True, exist_ok=True)
        folder.mkdir(0o700, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(document)
        Path(temporary).replace(folder / f"{key}.json")
        _remove_oldest(folder)


def _remove_oldest(folder: Path) -> None:
    entries = list(folder.iterdir())
    if len(entries) > _ENTRIES_LIMIT:
        entries.sort(key=lambda path: path.stat().st_mtime)
        for path in entries[: len(entries) - _ENTRIES_LIMIT]:
            path.unlink(missing_ok=True)


def _digest(key: str, body: object) -> str:
    return hashlib.sha256(f"{key}\n{json.dumps(body, sort_keys=True)}".encode()).hexdigest()


def _folder() -> Path:
    return cache_folder() / "checks"


_EMPTY: Final = Examination((), (), (), {}, whole=False)


def check(spec: ModelSpec, step: "Step") -> Report:
    """All findings of one model on the targets of its specification."""
    try:
        source = spec.look_up(weights=False)
    except ModelSourceError as error:
        fault = unusable_source(spec.model_id, error)
        return Report(spec.model_id, spec.task or "", (), False, (), (fault,), fault.file)
    if isinstance(source, SavedProgram):
        return _check_program_file(spec, source, step)
    assert isinstance(source, PretrainedModel)
    return _check_model(spec, source, step)


def _check_model(spec: ModelSpec, source: PretrainedModel, step: "Step") -> Report:
    findings = list(review_config(source))
    unusable = any(finding.rule is CONFIGURATION for finding in findings)
    shapes = spec.shapes(source)
    findings += too_long(source, shapes)
    checkpoint, file_findings = examine_files(_weights_folder(spec, source))
    findings += file_findings
    examination = _EMPTY
    if not unusable:
        refused = {name for finding in findings for name in finding.programs}
        # Quantisation is a finding already; the rest of the check uses the configuration before quantisation.
        unquantised = replace(source, config=without_quantisation(source.config))
        build_spec = _compiled_spec(spec, unquantised, tuple(shape for shape in shapes if shape.name not in refused))
        try:
            examination = _examine_cached(build_spec, _degrees(spec), checkpoint, step)
        except InvalidDocument as error:  # numbers that canonical JSON cannot represent
            findings.append(located_in_config(source, Finding(CONFIGURATION, f"config.json: {error}")))
    findings += [located_by_message(source, finding) for finding in examination.findings]
    complete = examination.whole and len(examination.programs) == len(shapes)
    file = located_in_config(source, Finding(SOURCE, "")).file
    return _report(spec, source, file, replace(examination, whole=complete), findings)


def _check_program_file(spec: ModelSpec, program: SavedProgram, step: "Step") -> Report:
    """Check a .pt2 or .onnx file, without the cache: reading it involves no tracing."""
    from nxpipe.pipeline.check.examination import examine

    file = relative_path(program.path)
    try:
        program.require_readable()
    except ModelSourceError as error:
        return Report(program.id, "", (), False, (), (Finding(SOURCE, str(error), file=file),), file)

    shapes = spec.shapes(program)
    examination = examine(_compiled_spec(spec, program, shapes), _degrees(spec), None, step)
    findings = [*examination.findings, *_missing_data(program)]
    findings = [finding if finding.file else replace(finding, file=file) for finding in findings]
    return _report(spec, program, file, examination, findings)


def _missing_data(program: SavedProgram) -> Iterator[Finding]:
    """A finding for absent weight data, which a build needs. An unreadable program has a finding already."""
    try:
        program.require_data()
    except ModelSourceError as error:
        message, _, advice = str(error).partition("; ")
        yield Finding(WEIGHTS, message, advice)
    except CompileError:
        return


def _report(
    spec: ModelSpec, source: ModelSource, file: str, examination: Examination, findings: Iterable[Finding]
) -> Report:
    fits = tuple(fit_target(examination, target, spec.tp) for target in spec.targets())
    merged = merge([*findings, *verdicts(fits, spec.tp)])
    task = source.task if isinstance(source, PretrainedModel) else ""
    return Report(source.id, task, examination.programs, examination.whole, fits, merged, file)


def _weights_folder(spec: ModelSpec, source: ModelSource) -> Path | None:
    return source.folder if spec.weights.kind == "checkpoint" else spec.weights.folder


def _degrees(spec: ModelSpec) -> tuple[int, ...]:
    return tuple(sorted({degree for target in spec.targets() for degree in target.degrees}))


def _compiled_spec(spec: ModelSpec, source: ModelSource, shapes: tuple[Shape, ...]) -> BuildSpec:
    """The programs to compile, for one rank and the first target: all targets and degrees share the graph."""
    return BuildSpec(source, NoWeights(), shapes, spec.targets()[0], spec.autocast, spec.autocast_type)


def _examine_cached(
    spec: BuildSpec, degrees: tuple[int, ...], checkpoint: Checkpoint | None, step: "Step"
) -> Examination:
    key = _key(spec, degrees, checkpoint)
    examination = lookup(key)
    if examination is None:
        from nxpipe.pipeline.check.examination import examine, is_cacheable

        with no_collection():  # most objects from PyTorch's import and from tracing live until the end
            examination = examine(spec, degrees, checkpoint, step)
        if is_cacheable(examination):
            store_examination(key, examination)
    return examination


def _key(spec: BuildSpec, degrees: tuple[int, ...], checkpoint: Checkpoint | None) -> str:
    """The cache key: that of a build, with the checker's source, and with the headers instead of the weights."""
    return digest_of(
        {
            "format": "nxpipe.check/2",
            **spec.program_inputs(spec.shapes),
            "checker": source_digest(Path(__file__).parent),
            "weights": [list(pair) for pair in checkpoint.identity] if checkpoint else None,
            "degrees": list(degrees),
            "target": spec.target.compiler_target,
            "options": {"autocast": spec.autocast, "autocast_type": spec.autocast_type},
        }
    )
