"""Time of `nxpipe plan serve`: a model at a rate over families of instance types, as a process, on this machine.

Usage: python benchmarks/planning.py [--model-id ID] [--rate N] [--instance TYPE]... [--runs N] [--json]

It prints the seconds of each run, the processor time of all processes of a run, and the load of the machine before it.
The goal is 20 seconds on two cores for Llama-3.1-8B at 20 requests/s over four families.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Final

FAMILIES: Final = ("inf2.48xlarge", "trn1.32xlarge", "trn1n.32xlarge", "trn2.48xlarge")
OBJECTIVES: Final = ("--prompt", "1k", "--output", "256", "--ttft", "1s", "--tpot", "50ms", "--region", "us-east-2")


def measured(command: list[str]) -> dict[str, float]:
    before, load = resource.getrusage(resource.RUSAGE_CHILDREN), os.getloadavg()[0]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - started
    if done.returncode:
        sys.exit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return {"seconds": round(seconds, 2), "processor_seconds": round(used, 2), "load": round(load, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-id", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--rate", default="20")
    parser.add_argument("--instance", action="append")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    types = [part for name in options.instance or FAMILIES for part in ("--instance", name)]
    demand = ["--model-id", options.model_id, "--rate", options.rate, *OBJECTIVES, *types]
    command = [sys.executable, "-c", "from nxpipe.pipeline.cli.entry import main; main()", "plan", "serve", *demand]
    runs = [measured(command) for _ in range(options.runs)]
    if options.json:
        print(json.dumps(runs))
        return
    for run in runs:
        print(f"{run['seconds']:6.2f} s, {run['processor_seconds']:.2f} s of processors, load {run['load']}")


if __name__ == "__main__":
    main()
