"""Writes docs/results/conformance.md: results of PyTorch's operator database and ONNX's node tests.

    python benchmarks/conformance.py [--most N] [--workers N]

Without --most every sample of every type is run, which takes a quarter of an hour on two cores.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy
import onnx
import torch

from nxpipe.emulator.ops import OPERATORS
from tests.conformance.onnx_report import Outcome, outcomes
from tests.conformance.opinfo import DTYPES, Verdict, judged

PAGE = Path(__file__).parent.parent / "docs" / "results" / "conformance.md"

# Particulars in which equal reasons differ: places in a source, types, names, numbers.
_PARTICULARS = re.compile(r" at \S+:\d+| with x\d+ \[[^:]*|\b\w+\[[\d,]*\]|'[^']*'|\b\d+\b")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, help="samples of each operator and type")
    parser.add_argument("--workers", type=int, help="processes; default: the number of cores")
    args = parser.parse_args()
    verdicts = dict(judged(args.most, args.workers))
    result = list(outcomes())
    for name, verdict in verdicts.items():
        for failure in verdict.failed:
            print(f"{name}: {failure}", file=sys.stderr)
    PAGE.write_text(page(verdicts, result, args.most))
    failed = any(verdict.failed for verdict in verdicts.values()) or any(entry.verdict == "failed" for entry in result)
    return int(failed)


def page(verdicts: Mapping[str, Verdict], found: list[Outcome], most: int | None) -> str:
    versions = f"PyTorch {torch.__version__}, ONNX {onnx.__version__}, numpy {numpy.__version__}"
    lines = [
        "# Conformance\n",
        "Results of two independent test suites for the operators: PyTorch's operator database, and ONNX's node tests",
        "through its standard backend interface. Unsupported: rejected with a reason before execution. Failed: a wrong",
        f"result. `benchmarks/conformance.py` wrote this page on {date.today().isoformat()} with {versions}.\n",
        *_opinfo(verdicts, most),
        *_onnx(found),
        *_ours(verdicts, found),
    ]
    return "\n".join(lines) + "\n"


def _opinfo(verdicts: Mapping[str, Verdict], most: int | None) -> Iterable[str]:
    passed = sum(verdict.passed for verdict in verdicts.values())
    failed = sum(len(verdict.failed) for verdict in verdicts.values())
    wider = sum(verdict.wider for verdict in verdicts.values())
    reasons = Counter[str]()
    for verdict in verdicts.values():
        for reason, count in verdict.unsupported.items():
            reasons[_general(reason)] += count
    samples = f"at most {most} samples of each type" if most else "every sample"
    types = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    yield "## PyTorch's operator database\n"
    yield f"{len(verdicts)} operators, {samples} ({types}), each traced, imported, run on the emulator and compared"
    yield f"with PyTorch: **{passed} passed, {reasons.total()} unsupported, {failed} failed**. Of the passed, {wider}"
    yield "agree with PyTorch in float64, but not in the sample's type, in which PyTorch rounds intermediate results.\n"
    yield from _grouped(reasons, "samples")
    yield from ("| Operator | Passed | Unsupported | Failed |", "| --- | ---: | ---: | ---: |")
    for name, verdict in sorted(verdicts.items()):
        yield f"| `{name}` | {verdict.passed} | {verdict.unsupported.total()} | {len(verdict.failed)} |"
    yield ""


def _onnx(found: list[Outcome]) -> Iterable[str]:
    totals = Counter(entry.verdict for entry in found)
    figures = ", ".join(f"{totals[verdict]} {verdict}" for verdict in ("passed", "unsupported", "failed"))
    yield "## ONNX's node tests\n"
    yield f"{len(found)} tests, operator set {onnx.defs.onnx_opset_version()}: **{figures}**. A test counts for each"
    yield "operator in its model.\n"
    yield from _grouped(Counter(_general(entry.reason) for entry in found if entry.verdict == "unsupported"), "tests")
    table: dict[str, Counter[str]] = {}
    for entry in found:
        for operator in entry.operators:
            table.setdefault(operator, Counter())[entry.verdict] += 1
    yield from ("| Operator | Passed | Unsupported | Failed |", "| --- | ---: | ---: | ---: |")
    for operator, counts in sorted(table.items()):
        yield f"| `{operator}` | {counts['passed']} | {counts['unsupported']} | {counts['failed']} |"
    yield ""


def _ours(verdicts: Mapping[str, Verdict], found: list[Outcome]) -> Iterable[str]:
    """The number of passed samples and node tests that contain each operator of the graph."""
    samples = sum((verdict.used for verdict in verdicts.values()), Counter[str]())
    tests = Counter(name for entry in found if entry.verdict == "passed" for name in entry.used)
    yield "## The graph's own operators\n"
    yield "The number of passed samples and node tests that contain each operator. Collectives have no counterpart in"
    yield "either suite; the tests of tensor parallelism compare them with the unsharded model.\n"
    yield from ("| Operator | Samples | Node tests |", "| --- | ---: | ---: |")
    for name in sorted(OPERATORS):
        yield f"| `{name}` | {samples[name]} | {tests[name]} |"


def _grouped(reasons: Counter[str], unit: str) -> Iterable[str]:
    yield from (f"| Why unsupported | {unit.capitalize()} |", "| --- | ---: |")
    for reason, count in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
        yield f"| {reason} | {count} |"
    yield ""


def _general(reason: str) -> str:
    """The remedy in a reason, without the operator and the particulars of the case."""
    advice = reason.rpartition("; the first is ")[2]
    if advice != reason or re.match(r"[\w.:]+(\.\w+)?(, result \d+)?: ", advice):
        advice = re.sub(r"^.*?: ", "", advice, count=1)
    return " ".join(_PARTICULARS.sub(" …", advice).replace("|", "\\|").split())


if __name__ == "__main__":
    sys.exit(main())
