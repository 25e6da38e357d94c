"""All that stands between a model and a target: in seconds, without weights, without stopping at the first.

What follows from the model alone (does it lower, what does it take) is kept by key and found again; what depends on
where the model lies, and on the instance, is judged anew each time. A check that was made before imports no torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nxpipe.artifact_store.canonical import canonical_json, sha256_hex
from nxpipe.artifact_store.errors import InvalidDocument
from nxpipe.emulator.configuration import without_quantisation
from nxpipe.emulator.errors import CompileError
from nxpipe.pipeline.check import cache
from nxpipe.pipeline.check.configuration import blamed, in_config, review, shown, too_long, unusable_source
from nxpipe.pipeline.check.finding import CONFIGURATION, SOURCE, WEIGHTS, Finding, merge
from nxpipe.pipeline.check.fit import fit, verdicts
from nxpipe.pipeline.check.report import Examination, Report
from nxpipe.pipeline.check.weights import Checkpoint, examine_files
from nxpipe.pipeline.models.source import ModelSource
from nxpipe.pipeline.order import Order
from nxpipe.pipeline.request import Shape, all_phases, program_inputs, source_digest
from nxpipe.pipeline.saved import SavedProgram
from nxpipe.pipeline.util.errors import ModelSourceError
from nxpipe.pipeline.util.files import expanded
from nxpipe.pipeline.util.process import no_collection

if TYPE_CHECKING:
    from nxpipe.pipeline.verify.evidence import Step

__all__ = ["check", "check_file"]

_NOTHING = Examination((), (), (), {}, whole=False)


def check(order: Order, step: "Step") -> Report:
    """Everything there is to say of one model."""
    try:
        source = order.source(files=False)
    except ModelSourceError as error:
        fault = unusable_source(order.model_id, error)
        return Report(order.model_id, order.task or "", (), False, (), (fault,), fault.file)
    findings = list(review(source))
    unusable = any(finding.rule is CONFIGURATION for finding in findings)
    shapes = order.shapes(source, all_phases(source.task))
    findings += too_long(source, shapes)
    checkpoint, damage = examine_files(_weights_folder(order, source))
    findings += damage
    found = _NOTHING
    if not unusable:
        try:
            found = _examined(order, _unquantised(source), _within_positions(shapes, findings), checkpoint, step)
        except InvalidDocument as error:  # a configuration of numbers that no JSON reader agrees on
            findings.append(in_config(source, Finding(CONFIGURATION, f"config.json: {error}")))
    findings += [blamed(source, finding) for finding in found.findings]
    whole = found.whole and len(found.programs) == len(shapes)
    place = in_config(source, Finding(SOURCE, "")).file
    return _report(order, (source.id, source.task, place), replace(found, whole=whole), findings)


def check_file(program: SavedProgram, order: Order, step: "Step") -> Report:
    """Everything there is to say of a program in a file: it is read anew each time, which takes no tracing."""
    name, place = program.name, shown(program.path)
    try:
        program.require_readable()
    except ModelSourceError as error:
        return Report(name, "", (), False, (), (Finding(SOURCE, str(error), file=place),), place)
    from nxpipe.pipeline.check.examine import Subject, examine

    tried = _degrees(order)
    target = order.targets()[0].compiler_target
    subject = Subject({"program": program.compile}, dict, order.autocast, order.autocast_type, target, tried)
    found = examine(subject, step)
    findings = [*found.findings, *_missing_data(program)]
    findings = [finding if finding.file else replace(finding, file=place) for finding in findings]
    return _report(order, (name, "", place), found, findings)


def _missing_data(program: SavedProgram) -> Iterator[Finding]:
    """The graph needs no weights, but a build does. A file that cannot be read as a program was reported as such."""
    try:
        program.require_data()
    except ModelSourceError as error:
        message, _, advice = str(error).partition("; ")
        yield Finding(WEIGHTS, message, advice)
    except CompileError:
        return


def _report(order: Order, about: tuple[str, str, str], found: Examination, findings: Sequence[Finding]) -> Report:
    fits = tuple(fit(found, target, order.tp) for target in order.targets())
    said = merge([*findings, *verdicts(fits, order.tp)])
    model, task, place = about
    return Report(model, task, found.programs, found.whole, fits, said, place)


def _unquantised(source: ModelSource) -> ModelSource:
    """The model that a quantised one was made from: that it is quantised was said, and the rest can be checked."""
    return replace(source, config=without_quantisation(source.config))


def _within_positions(shapes: tuple[Shape, ...], findings: list[Finding]) -> tuple[Shape, ...]:
    refused = {name for finding in findings for name in finding.programs}
    return tuple(shape for shape in shapes if shape.name not in refused)


def _weights_folder(order: Order, source: ModelSource) -> Path | None:
    if order.weights in (None, "hub"):
        return source.folder
    return None if str(order.weights).startswith("random:") else expanded(str(order.weights))


def _degrees(order: Order) -> tuple[int, ...]:
    return tuple(sorted({degree for target in order.targets() for degree in target.degrees}))


def _examined(
    order: Order, source: ModelSource, shapes: tuple[Shape, ...], checkpoint: Checkpoint | None, step: "Step"
) -> Examination:
    # Of several targets the first is compiled for: what differs between them is said by rules, not by the graph.
    target = order.targets()[0].compiler_target
    key = _key(order, source, shapes, checkpoint, target)
    found = cache.lookup(key)
    if found is None:
        from nxpipe.pipeline.check.examine import Subject, examine, lasting, programs_of, published_of, weights_of

        programs, options = programs_of(source, shapes), (order.autocast, order.autocast_type, target)
        ways = (lambda: weights_of(source, shapes), lambda: published_of(source, shapes))
        subject = Subject(programs, ways[0], *options, _degrees(order), checkpoint, ways[1])
        with no_collection():  # nearly all that importing PyTorch and tracing make stays until the end
            found = examine(subject, step)
        if lasting(found):
            cache.keep(key, found)
    return found


def _key(
    order: Order, source: ModelSource, shapes: tuple[Shape, ...], checkpoint: Checkpoint | None, target: str
) -> str:
    """Like the key of a build, with the checker's own source in it, and of the weights their headers alone."""
    inputs = {
        "format": "nxpipe.check/2",
        **program_inputs(source, shapes),
        "checker": source_digest(Path(__file__).parent),
        "weights": [list(pair) for pair in checkpoint.identity] if checkpoint else None,
        "degrees": list(_degrees(order)),
        "target": target,
        "options": {"autocast": order.autocast, "autocast_type": order.autocast_type},
    }
    return sha256_hex(canonical_json(inputs))
