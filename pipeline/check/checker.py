"""Check of one model: its examination, from the cache if it can be, judged for every target and degree."""

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

_MOST_ENTRIES = 512


def lookup(key: str) -> Examination | None:
    try:
        path = _folder() / f"{key}.json"
        document = json_of(read_file(path, limit=64 * MiB))
        if document["digest"] != _digest(key, document["examination"]):
            return None
        found = Examination.from_json(document["examination"])
        path.touch()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # a damaged entry is a miss
    return found


def keep(key: str, examination: Examination) -> None:
    """Write an entry atomically. A folder that cannot be written costs time on the next run, and nothing else."""
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
        _forget_the_oldest(folder)


def _forget_the_oldest(folder: Path) -> None:
    entries = list(folder.iterdir())
    if len(entries) > _MOST_ENTRIES:
        entries.sort(key=lambda path: path.stat().st_mtime)
        for path in entries[: len(entries) - _MOST_ENTRIES]:
            path.unlink(missing_ok=True)


def _digest(key: str, body: object) -> str:
    return hashlib.sha256(f"{key}\n{json.dumps(body, sort_keys=True)}".encode()).hexdigest()


def _folder() -> Path:
    return cache_folder() / "checks"


_NOTHING: Final = Examination((), (), (), {}, whole=False)


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
    shapes = spec.shapes(source, source.phases)
    findings += too_long(source, shapes)
    checkpoint, damage = examine_files(_weights_folder(spec, source))
    findings += damage
    found = _NOTHING
    if not unusable:
        refused = {name for finding in findings for name in finding.programs}
        # That the model is quantised is a finding already; the model it was quantised from can be checked further.
        plain = replace(source, config=without_quantisation(source.config))
        wanted = _compiled_spec(spec, plain, tuple(shape for shape in shapes if shape.name not in refused))
        try:
            found = _examine_cached(wanted, _degrees(spec), checkpoint, step)
        except InvalidDocument as error:  # numbers that canonical JSON cannot hold
            findings.append(located_in_config(source, Finding(CONFIGURATION, f"config.json: {error}")))
    findings += [located_by_message(source, finding) for finding in found.findings]
    whole = found.whole and len(found.programs) == len(shapes)
    file = located_in_config(source, Finding(SOURCE, "")).file
    return _report(spec, source, file, replace(found, whole=whole), findings)


def _check_program_file(spec: ModelSpec, program: SavedProgram, step: "Step") -> Report:
    """A program file is read each time: that takes no tracing."""
    from nxpipe.pipeline.check.examination import examine

    file = relative_path(program.path)
    try:
        program.require_readable()
    except ModelSourceError as error:
        return Report(program.id, "", (), False, (), (Finding(SOURCE, str(error), file=file),), file)

    shapes = spec.shapes(program, program.phases)
    found = examine(_compiled_spec(spec, program, shapes), _degrees(spec), None, step)
    findings = [*found.findings, *_missing_data(program)]
    findings = [finding if finding.file else replace(finding, file=file) for finding in findings]
    return _report(spec, program, file, found, findings)


def _missing_data(program: SavedProgram) -> Iterator[Finding]:
    """The graph needs no weights, but a build does. An unreadable program has a finding already."""
    try:
        program.require_data()
    except ModelSourceError as error:
        message, _, advice = str(error).partition("; ")
        yield Finding(WEIGHTS, message, advice)
    except CompileError:
        return


def _report(spec: ModelSpec, source: ModelSource, file: str, found: Examination, findings: Iterable[Finding]) -> Report:
    fits = tuple(fit_target(found, target, spec.tp) for target in spec.targets())
    merged = merge([*findings, *verdicts(fits, spec.tp)])
    task = source.task if isinstance(source, PretrainedModel) else ""
    return Report(source.id, task, found.programs, found.whole, fits, merged, file)


def _weights_folder(spec: ModelSpec, source: ModelSource) -> Path | None:
    return source.folder if spec.weights.kind == "checkpoint" else spec.weights.folder


def _degrees(spec: ModelSpec) -> tuple[int, ...]:
    return tuple(sorted({degree for target in spec.targets() for degree in target.degrees}))


def _compiled_spec(spec: ModelSpec, source: ModelSource, shapes: tuple[Shape, ...]) -> BuildSpec:
    """The programs to compile, for one rank and the first target: the graph is the same for all, rules differ."""
    return BuildSpec(source, NoWeights(), shapes, spec.targets()[0], spec.autocast, spec.autocast_type)


def _examine_cached(
    spec: BuildSpec, degrees: tuple[int, ...], checkpoint: Checkpoint | None, step: "Step"
) -> Examination:
    key = _key(spec, degrees, checkpoint)
    found = lookup(key)
    if found is None:
        from nxpipe.pipeline.check.examination import examine, lasting

        with no_collection():  # nearly all that importing PyTorch and tracing allocate stays until the end
            found = examine(spec, degrees, checkpoint, step)
        if lasting(found):
            keep(key, found)
    return found


def _key(spec: BuildSpec, degrees: tuple[int, ...], checkpoint: Checkpoint | None) -> str:
    """Like the key of a build, with the checker's own source in it, and of the weights their headers alone."""
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
