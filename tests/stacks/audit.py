"""checkov over all stacks: `python -m tests.stacks.audit CHECKOV`, which is what `make audit` does.

It is no test, for checkov cannot be installed beside us: it pins a boto3 of two years ago. What it finds is mended, or
stands among the decisions of stacks/lint/validation.py; a decision that nothing needs any more is told, too.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nxpipe.stacks.lint.finding import Finding, sift
from nxpipe.stacks.lint.template import Resource
from nxpipe.stacks.lint.validation import ACKNOWLEDGED
from tests.stacks.whole import write_whole

ROOT = Path(__file__).parents[2]


def main(checkov: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        synthesise(write_whole(Path(folder)), Path(folder, "out"))
        report = judged(checkov, Path(folder, "out"))
    summary = report["summary"]
    accepted = [replace(entry, optional=False) for entry in ACKNOWLEDGED if entry.rule.startswith("CKV")]
    left = sift(findings(report), accepted, datetime.now(UTC).date())
    sys.stdout.write("".join(f"{entry}\n" for entry in left))
    sys.stdout.write(
        f"{summary['resource_count']} resources: {summary['passed']} checks passed, {summary['failed']} did not, "
        f"of which {len(left)} ask for something; checkov {summary['checkov_version']}\n"
    )
    return 1 if left or summary["parsing_errors"] or not summary["passed"] else 0


def synthesise(config: Path, output: Path) -> None:
    context = json.loads((ROOT / "cdk.json").read_text())["context"] | {"config": str(config)}
    own = {"CDK_CONTEXT_JSON": json.dumps(context), "CDK_OUTDIR": str(output), "CDK_VALIDATION": "false"}
    subprocess.run([sys.executable, "app.py"], cwd=ROOT, env={**os.environ, **own}, check=True, capture_output=True)


def judged(checkov: str, folder: Path) -> Any:
    """The findings of checkov, which ends with code 1 if it has any; if it fails, its output is not JSON."""
    command = [checkov, "--directory", str(folder), "--framework", "cloudformation", "--skip-download"]
    done = subprocess.run([*command, "--quiet", "--output", "json"], capture_output=True, text=True, check=False)
    return json.loads(done.stdout)


def findings(report: Any) -> Iterator[Finding]:
    for failed in report["results"]["failed_checks"]:
        stack = Path(failed["file_path"]).name.removesuffix(".template.json")
        type_, _, id_ = failed["resource"].partition(".")
        resource = Resource(stack, None, id_, type_, f"{stack}/{id_}", {})
        what, remedy = failed["check_name"], "fix it, or write the decision into stacks/lint/validation.py"
        yield Finding(failed["check_id"], resource, "", what, remedy)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
