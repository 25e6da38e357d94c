"""Reports as one SARIF 2.1.0 log, which GitHub shows as annotations in a pull request."""

from collections.abc import Iterable
from typing import Final

from pipeline import VERSION
from pipeline.check.finding import RULES, Finding
from pipeline.check.report import Report

SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"


def as_sarif(reports: Iterable[Report], about: str) -> dict[str, object]:
    """`about` is the file to annotate where a finding has no line of code: it names the models."""
    results = [_result(report, finding, about) for report in reports for finding in report.findings]
    rules = [
        {
            "id": rule.id,
            "name": rule.name,
            "shortDescription": {"text": rule.meaning},
            "defaultConfiguration": {"level": str(rule.severity)},
        }
        for rule in RULES.values()
    ]
    driver = {"name": "nxpipe", "version": VERSION, "rules": rules}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}


def _result(report: Report, finding: Finding, about: str) -> dict[str, object]:
    place: dict[str, object] = {"artifactLocation": {"uri": finding.file or about}}
    if finding.line:
        place["region"] = {"startLine": finding.line}
    location: dict[str, object] = {"physicalLocation": place}
    if finding.module:
        location["logicalLocations"] = [{"fullyQualifiedName": finding.module, "kind": "module"}]
    advice = f" Way out: {finding.advice}." if finding.advice else ""
    return {
        "ruleId": finding.rule.id,
        "level": str(finding.severity),
        "message": {"text": f"{report.model}: {finding.message}.{advice}"},
        "locations": [location],
        "occurrenceCount": finding.count,
    }
