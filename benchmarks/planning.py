"""Seconds in which a replica's requests are simulated, on one core, and in which `nxpipe plan serve` answers.

    python benchmarks/planning.py simulation [--requests N] [--model MODEL] [--instance TYPE] [--tp N]
    python benchmarks/planning.py plan [--model MODEL] [--rate N] [--type TYPE]... [--runs N]

`plan` prints the seconds of each run of the command as a process, the processor time of all processes of the run, and
the load of the machine before it. The goal is 20 seconds on two cores for Llama-3.1-8B at 20 requests/s over four
families; that of `simulation` 15 seconds for 100,000 requests.

The load of `simulation`: Poisson arrivals at 0.8 of the rate at which the scheduler answers requests that are all there
from the start; prompts are log-normal with mean 1,000 and coefficient of variation 0.8, answers exponential with mean
200.
"""

import argparse
import os
import resource
import subprocess
import sys
import time
from typing import Final

from nxpipe.emulator.hardware.instance import INSTANCES
from nxpipe.pipeline.plan.schedulers import Replica, Scheduling
from nxpipe.pipeline.plan.simulation import simulate
from nxpipe.pipeline.plan.steps import PredictedSteps
from nxpipe.pipeline.plan.traffic import LengthDistribution, Traffic
from nxpipe.pipeline.predict.architectures import architecture

_REPLICAS = (
    Replica(8, 8192, (128, 256, 512), Scheduling.NXPIPE, chunk=512),
    Replica(8, 8192, tuple(1 << power for power in range(7, 14)), Scheduling.NXDI),
    Replica(8, 8 * 8192, (2048,), Scheduling.VLLM, chunk=2048, block=32, longest=8192),
)


FAMILIES: Final = ("inf2.48xlarge", "trn1.32xlarge", "trn1n.32xlarge", "trn2.48xlarge")
_DEMAND: Final = ("--prompt", "1k", "--output", "256", "--ttft", "1s", "--tpot", "50ms", "--region", "us-east-2")
_COMMAND: Final = "from nxpipe.pipeline.cli.entry import main; main()"


def plan(options: argparse.Namespace) -> None:
    types = [part for name in options.type or FAMILIES for part in ("--instance", name)]
    arguments = ["plan", "serve", "--model-id", options.model, "--rate", options.rate, *_DEMAND, *types]
    for _ in range(options.runs):
        before, load = resource.getrusage(resource.RUSAGE_CHILDREN), os.getloadavg()[0]
        started = time.monotonic()
        done = subprocess.run([sys.executable, "-c", _COMMAND, *arguments], capture_output=True, text=True, check=False)
        seconds = time.monotonic() - started
        if done.returncode:
            sys.exit(done.stderr)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        print(f"{seconds:.1f} s, {used:.1f} s of processors, load {load:.1f}")


def simulation(options: argparse.Namespace) -> None:
    known = architecture(options.model)
    if known is None:
        sys.exit(f"{options.model} has no known architecture")
    type_ = INSTANCES[options.instance]
    cores = options.tp * (type_.cores // type_.logical_cores)
    traffic = Traffic(LengthDistribution.parse("lognormal:1k,0.8"), LengthDistribution.parse("exponential:200"))
    for replica in _REPLICAS:
        framework = "" if replica.scheduler is Scheduling.NXPIPE else "NxD Inference + vLLM"
        steps = PredictedSteps(options.model, options.instance, options.tp, cores, framework, known)
        burst = simulate(traffic.requests(500, 1, 1e6), replica, steps)
        rate = 0.8 * 500 / burst.seconds
        began = time.process_time()
        requests = traffic.requests(options.requests, 2, rate)
        drawn = time.process_time()
        found = simulate(requests, replica, steps)
        ended = time.process_time()
        print(
            f"{replica.scheduler:<12} {len(requests):,} requests at {rate:.2f}/s: {ended - drawn:.1f} s, and "
            f"{drawn - began:.1f} s to draw them; {found.seconds / 3600:.1f} h simulated, {found.tokens:,} tokens; "
            f"TTFT p50 {found.ttft_at(0.5) * 1e3:,.0f} ms, p99 {found.ttft_at(0.99) * 1e3:,.0f} ms, TPOT p99 "
            f"{found.tpot_at(0.99) * 1e3:.1f} ms; busy {found.busy:.0%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    simulated = commands.add_parser("simulation")
    simulated.set_defaults(run=simulation)
    simulated.add_argument("--requests", type=int, default=100_000)
    simulated.add_argument("--instance", default="inf2.48xlarge")
    simulated.add_argument("--tp", type=int, default=8)
    planned = commands.add_parser("plan")
    planned.set_defaults(run=plan)
    planned.add_argument("--rate", default="20")
    planned.add_argument("--type", action="append")
    planned.add_argument("--runs", type=int, default=3)
    for command in (simulated, planned):
        command.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
