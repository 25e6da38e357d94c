"""Writes the part of docs/conformance.md that PyTorch's operator database judges.

    python benchmarks/conformance.py [--most N]

Without --most every sample of every type is run, which takes a quarter of an hour or more.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.conformance.opinfo import DTYPES, Verdict, judge, operators

PAGE = Path(__file__).parent.parent / "docs" / "conformance.md"
_BEGIN, _END = "<!-- opinfo: begin -->", "<!-- opinfo: end -->"
_TITLE = "# Conformance\n\nWhat independent judges say of the operators; `benchmarks/conformance.py` makes this page.\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--most", type=int, help="samples of each operator and type")
    most = parser.parse_args().most
    verdicts: dict[str, Verdict] = {}
    for name, entry in operators().items():
        verdict = verdicts[name] = Verdict()
        for dtype in DTYPES:
            judge(entry, dtype, most, verdict)
        for failure in verdict.failed:
            print(f"{name}: {failure}", file=sys.stderr)
    _replace(section(verdicts, most))
    return int(any(verdict.failed for verdict in verdicts.values()))


def section(verdicts: dict[str, Verdict], most: int | None) -> str:
    passed = sum(verdict.passed for verdict in verdicts.values())
    unsupported = sum(sum(verdict.unsupported.values()) for verdict in verdicts.values())
    failed = sum(len(verdict.failed) for verdict in verdicts.values())
    samples = f"at most {most} samples of each type" if most else "every sample"
    types = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
    lines = [
        "## PyTorch's operator database\n",
        f"{len(verdicts)} operators, {samples} ({types}), each traced, imported, run on the emulator and held against",
        f"PyTorch: **{passed} passed, {unsupported} unsupported, {failed} failed**. Unsupported samples are refused",
        "before anything runs, with the reason shown.\n",
        "| Operator | Passed | Unsupported | Failed | Most frequent reason |",
        "| --- | ---: | ---: | ---: | --- |",
        *(_row(name, verdict) for name, verdict in sorted(verdicts.items())),
    ]
    return "\n".join(lines) + "\n"


def _row(name: str, verdict: Verdict) -> str:
    reason = verdict.unsupported.most_common(1)[0][0].replace("|", "\\|") if verdict.unsupported else ""
    return f"| `{name}` | {verdict.passed} | {sum(verdict.unsupported.values())} | {len(verdict.failed)} | {reason} |"


def _replace(text: str) -> None:
    """Other judges' sections of the page stay as they are."""
    page = PAGE.read_text() if PAGE.is_file() else _TITLE
    before, _, rest = page.partition(_BEGIN)
    after = rest.partition(_END)[2] or "\n"
    PAGE.write_text(f"{before.rstrip()}\n\n{_BEGIN}\n\n{text}\n{_END}{after}")


if __name__ == "__main__":
    sys.exit(main())
