"""The number of transformers model classes that lower to a graph, and the reasons of the others.

Usage: nice python benchmarks/sweep.py FOLDER [--mapping NAME] [--only PART] [--workers N] [--timeout S] [--again KIND]

Every class behind transformers' automatic base, causal and masked language models (or behind the given mappings) is
built from its default configuration, cut to two layers where possible, and captured. Each class has a process and a
time-out of its own. Results are appended to FOLDER/sweep.jsonl as they arrive: an interrupted sweep can continue, and
`--again` repeats classes with a kind of result. The page goes to standard output.
"""

import argparse
import contextlib
import json
import multiprocessing
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

LAYERS = 2
SEQUENCE = 32
# Names of the depth in configurations.
_DEPTHS = (
    *("num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_encoder_layers", "num_decoder_layers"),
    *("encoder_layers", "decoder_layers", "num_hidden_groups", "num_blocks", "n_blocks", "num_transformer_layers"),
    *("encoder_n_layers", "decoder_n_layers", "speech_encoder_layers", "t2u_encoder_layers", "t2u_decoder_layers"),
)
# By name: the task of its classes, and the mapping.
_MAPPINGS = {
    "base": ("feature-extraction", "MODEL_MAPPING_NAMES"),
    "causal": ("text-generation", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "masked": ("fill-mask", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "seq2seq": ("text2text-generation", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "image-classification": ("image-classification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    "speech": ("automatic-speech-recognition", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
    "ctc": ("automatic-speech-recognition", "MODEL_FOR_CTC_MAPPING_NAMES"),
}
_USUAL = ("base", "causal", "masked")
_HEADING = """# Breadth: the model classes of transformers

Every class behind transformers' automatic mappings ({}), from its default configuration cut to two layers where that
can be built, captured in float32 with {} tokens and a batch of one, with torch {} and transformers {}, by
`benchmarks/sweep.py`. The classes are captured only; no graph is executed. `CaptureError`: the class has no default
model on this machine, needs an input whose shape no configuration gives, or raises an error in tracing. `GraphBreak`:
it branches on a tensor's value. `UnsupportedOperators`: it uses operators that have no counterpart.
"""


@dataclass(frozen=True)
class Answer:
    """The result of one class. `kind` is `lowered`, or the type of the error."""

    name: str
    model_type: str
    kind: str
    says: str
    nodes: int
    seconds: float
    peak_mib: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mapping", action="append", choices=_MAPPINGS, help="may be repeated")
    parser.add_argument("--only", default="", help="classes whose name contains this text")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--again", action="append", default=[])
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    book = given.folder / "sweep.jsonl"
    latest = {answer.name: answer for answer in _read(book)}
    known = {name: answer for name, answer in latest.items() if answer.kind not in given.again}
    mappings = given.mapping or _USUAL
    every = _classes(mappings)
    chosen = {name: case for name, case in every.items() if name not in known and given.only in name}
    _prepare()
    with book.open("a") as out:
        for answer in _answers(chosen, given.workers, given.timeout):
            known[answer.name] = answer
            out.write(json.dumps(asdict(answer)) + "\n")
            out.flush()
            print(f"{len(known)}/{len(every)} {answer.name}: {answer.kind} {answer.says[:150]}", file=sys.stderr)
    _print_page([known[name] for name in every if name in known], len(every), mappings)
    return 0 if all(answer.kind not in ("Untyped", "TimedOut") for answer in known.values()) else 1


def _read(book: Path) -> Iterator[Answer]:
    if book.is_file():
        for line in book.read_text().splitlines():
            yield Answer(**json.loads(line))


def _classes(mappings: Iterable[str] = _USUAL) -> dict[str, tuple[str, str]]:
    """Task and model type by class name; a class in several mappings counts once, under the first."""
    from transformers.models.auto import modeling_auto

    document: dict[str, tuple[str, str]] = {}
    for task, mapping in (_MAPPINGS[name] for name in mappings):
        for model_type, names in getattr(modeling_auto, mapping).items():
            for name in (names,) if isinstance(names, str) else names:
                document.setdefault(name, (task, model_type))
    return document


def _prepare() -> None:
    """Import the common modules before the workers are forked, so that the cost of a class is its model only."""
    import torch

    import nxpipe.emulator.capture.export  # noqa: F401

    torch.set_num_threads(1)


def _answers(cases: Mapping[str, tuple[str, str]], workers: int, timeout: float) -> Iterator[Answer]:
    """Results as they arrive, from at most so many processes at a time."""
    fork = multiprocessing.get_context("fork")
    waiting = list(cases.items())
    running: dict[Connection, tuple[str, str, Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            name, (task, model_type) = waiting.pop(0)
            ours, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_work, args=(theirs, name, task, model_type))
            process.start()
            theirs.close()
            running[ours] = name, model_type, process, time.monotonic()
        ready = wait(list(running), timeout=1)
        for channel, (name, model_type, process, started) in list(running.items()):
            late = time.monotonic() - started > timeout
            if channel in ready or late:
                del running[channel]
                yield _received(channel, process, name, model_type, timeout)


def _received(channel: Connection, process: Any, name: str, model_type: str, timeout: float) -> Answer:
    """A worker's result; a time-out and a lost process are results, too."""
    kind, says = "TimedOut", f"no answer after {timeout:.0f} s"
    if channel.poll():
        try:
            return Answer(**channel.recv())
        except EOFError:
            process.join()
            kind, says = "Untyped", f"the process ended with status {process.exitcode}"
        finally:
            channel.close()
    process.kill()
    process.join()
    return Answer(name, model_type, kind, says, 0, timeout, 0)


def _work(channel: Connection, name: str, task: str, model_type: str) -> None:
    started = time.perf_counter()
    kind, says, nodes = _tried(name, task, model_type)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    channel.send(asdict(Answer(name, model_type, kind, says, nodes, round(time.perf_counter() - started, 2), peak)))


def _tried(name: str, task: str, model_type: str) -> tuple[str, str, int]:
    import torch

    from nxpipe.emulator.capture.export import capture_module, input_types
    from nxpipe.emulator.capture.image_models import bind_patch_grid
    from nxpipe.emulator.capture.request import CaptureRequest
    from nxpipe.emulator.errors import CompileError, UnsupportedOperators
    from nxpipe.emulator.passes import check

    try:
        kind, config = _class_and_configuration(name, model_type)
        request = CaptureRequest({"model_type": model_type}, task, "forward", 1, _sequence(config), "float32")
        model = _built(name, model_type, kind, config)
        bind_patch_grid(model, request.batch)
        types = input_types(model, request).items()
        empty = {name: torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta") for name, t in types}
        graph = capture_module(model, empty)
        check(graph, after="capture")
    except UnsupportedOperators as fault:
        return type(fault).__name__, "; ".join(_grouped(fault.findings)), 0
    except CompileError as fault:
        return type(fault).__name__, str(fault), 0
    except Exception as fault:  # a sweep records unexpected errors, too
        return "Untyped", f"{type(fault).__name__}: {fault}", 0
    return "lowered", "", len(graph.nodes)


def _grouped(findings: Iterable[Any]) -> Iterator[str]:
    """Findings in one sentence each; those of equal layers are merged."""
    counts: Counter[Any] = Counter()
    for finding in findings:
        module = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", finding.module)
        counts[replace(finding, module=module, count=1)] += finding.count
    for finding, count in counts.items():
        yield str(replace(finding, count=count))


def _built(name: str, model_type: str, kind: Any, config: Any) -> Any:
    """The model; in its full depth if it cannot be cut."""
    from nxpipe.emulator.capture.model import instantiate
    from nxpipe.emulator.errors import CaptureError

    try:
        return instantiate(kind, config, "float32")
    except CaptureError:
        return instantiate(kind, _class_and_configuration(name, model_type, whole=True)[1], "float32")


def _sequence(config: Any) -> int:
    """The default number of tokens, or fewer if the text model has fewer positions."""
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", {})]
    limits = [getattr(part, "max_position_embeddings", None) for part in (config, *inner)]
    return min([SEQUENCE, *(limit for limit in limits if isinstance(limit, int) and limit > 0)])


def _class_and_configuration(name: str, model_type: str, *, whole: bool = False) -> tuple[Any, Any]:
    import transformers

    from nxpipe.emulator.capture.model import disable_caches, first_paragraph, quiet_libraries
    from nxpipe.emulator.errors import CaptureError

    try:
        with quiet_libraries():
            config = transformers.AutoConfig.for_model(model_type)
            config = config if whole else _cut(config)
            config.use_cache = False
            disable_caches(config)
            return getattr(transformers, name), config
    except Exception as fault:
        raise CaptureError(f"transformers has no default {name} on this machine: {first_paragraph(fault)}") from fault


def _cut(config: Any) -> Any:
    """The configuration with at most so many layers, in each stage."""
    if isinstance(getattr(config, "depths", None), list | tuple):
        config.depths = [min(depth, LAYERS) for depth in config.depths]  # a depth for each stage; their number stays
    else:
        _cut_depth(config)
    for name in ("layer_types", "mlp_layer_types", "attention_types", "layers_block_type", "hybrid_override_pattern"):
        kinds = getattr(config, name, None)
        if isinstance(kinds, list) and len(kinds) > LAYERS and len(kinds) != getattr(config, "num_hidden_layers", 0):
            try:
                setattr(config, name, kinds[:LAYERS])
            except (AttributeError, NotImplementedError):
                continue  # computed from the depth, hence cut already
    for inner in getattr(config, "sub_configs", {}):
        if getattr(config, inner, None) is not None:
            _cut(getattr(config, inner))
    return config


def _cut_depth(config: Any) -> None:
    for name in _DEPTHS:
        depth = getattr(config, name, None)
        if isinstance(depth, int) and not isinstance(depth, bool) and depth > LAYERS:
            with contextlib.suppress(AttributeError, NotImplementedError):  # computed from other settings
                setattr(config, name, LAYERS)


def _print_page(answers: list[Answer], every: int, mappings: Iterable[str]) -> None:
    import torch
    import transformers

    print(_HEADING.format(", ".join(mappings), SEQUENCE, torch.__version__, transformers.__version__))
    kinds = Counter(answer.kind for answer in answers)
    by_type: dict[str, set[str]] = {}
    for answer in answers:
        by_type.setdefault(answer.model_type, set()).add(answer.kind)
    lowered = sum("lowered" in kinds_of for kinds_of in by_type.values())
    print(
        f"{kinds['lowered']} of {len(answers)} classes lower ({every} exist), "
        f"and {lowered} of {len(by_type)} model types.\n"
    )
    print("| result | classes |\n|---|---|")
    for kind, count in kinds.most_common():
        print(f"| {kind} | {count} |")
    print("\n| class | result | reason |\n|---|---|---|")
    for answer in answers:
        if answer.kind != "lowered":
            print(f"| {answer.name} | {answer.kind} | {answer.says[:300].replace('|', '/')} |")


if __name__ == "__main__":
    sys.exit(main())
