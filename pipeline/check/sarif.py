"""Reports as one SARIF 2.1.0 log, which GitHub shows as annotations in a pull request.

GitHub can only annotate files of the repository: a finding in a library's source is shown at the model, with the line
of the library in its words.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final
from urllib.parse import quote

from nxpipe.pipeline import VERSION
from nxpipe.pipeline.check.finding import RULES, Finding, Rule
from nxpipe.pipeline.check.report import Report

SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"
_MOST_RESULTS: Final = 25_000  # of one run: GitHub refuses a log with more
_ORDER: Final = {id_: number for number, id_ in enumerate(RULES)}


def as_sarif(reports: Iterable[Report], about: str) -> dict[str, object]:
    """`about` is the file to annotate where nothing of the model lies in the repository: the one that names it."""
    results = [_result(report, finding, about) for report in reports for finding in report.findings]
    driver = {"name": "nxpipe", "semanticVersion": VERSION, "rules": [_rule(rule) for rule in RULES.values()]}
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results[:_MOST_RESULTS]}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(rule: Rule) -> dict[str, object]:
    return {
        "id": rule.id,
        "name": rule.name,
        "shortDescription": {"text": rule.meaning},
        "fullDescription": {"text": rule.meaning},
        "help": {"text": f"{rule.meaning} Each result names the place and the way out; see nxpipe check --help."},
        "defaultConfiguration": {"level": str(rule.severity)},
    }


def _result(report: Report, finding: Finding, about: str) -> dict[str, object]:
    file, line, elsewhere = _place(report, finding, about)
    place = {"artifactLocation": {"uri": quote(file), "uriBaseId": "%SRCROOT%"}, "region": {"startLine": line}}
    location: dict[str, object] = {"physicalLocation": place}
    if finding.module:
        location["logicalLocations"] = [{"fullyQualifiedName": finding.module, "kind": "module"}]
    advice = f" Way out: {finding.advice}." if finding.advice else ""
    return {
        "ruleId": finding.rule.id,
        "ruleIndex": _ORDER[finding.rule.id],
        "level": str(finding.severity),
        "message": {"text": f"{report.model}: {finding.message}{elsewhere}.{advice}"},
        "locations": [location],
        "occurrenceCount": finding.count,
        "partialFingerprints": {"nxpipeFinding/v1": _fingerprint(report, finding)},
    }


def _place(report: Report, finding: Finding, about: str) -> tuple[str, int, str]:
    """A file of the repository, a line of it, and in words the place that is none of its files."""
    if _in_repository(finding.file):
        return finding.file, finding.line or 1, ""
    shown = report.file if _in_repository(report.file) else about
    return shown, 1, f" at {finding.place}" if finding.place else ""


def _in_repository(file: str) -> bool:
    return bool(file) and not Path(file).is_absolute() and ".." not in Path(file).parts and Path(file).is_file()


def _fingerprint(report: Report, finding: Finding) -> str:
    """The same finding of the same model, although lines and counts move."""
    parts = (report.model, finding.rule.id, finding.file, finding.module, finding.message)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
