"""The process of one rank: it runs the host function and reports to its launcher (`emulator.run.devices.ranks`)."""

import json
import os
import sys
from typing import Any

from nxpipe.emulator.parent_process import die_with_parent
from nxpipe.emulator.run.devices import open_runtime
from nxpipe.emulator.run.devices.ranks import Rank, document_of, function_of


def main(job: Any) -> None:
    """Run a job of the launcher. The process does not wait for threads, which AWS's library may leave."""
    die_with_parent(job["parent"])
    reports = os.fdopen(job["reports"], "wb")

    def report(document: Any) -> None:
        reports.write(json.dumps(document).encode() + b"\n")
        reports.flush()

    try:
        with open_runtime(job["implementation"], **job["options"]) as runtime:
            rank = Rank(job["rank"], job["world"], 0, runtime, report)
            rank.step("run the host function")
            result = function_of(job["host"])(rank, job["argument"])
        report({"result": result})
    except BaseException as fault:
        report(document_of(fault))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
