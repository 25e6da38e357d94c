"""Seconds in which a replica's requests are simulated, on one core.

    python benchmarks/planning.py [--requests N] [--model MODEL] [--instance TYPE] [--tp N]

Poisson arrivals at 0.8 of the rate at which the scheduler answers requests that are all there from the start; prompts
are log-normal with mean 1,000 and coefficient of variation 0.8, answers exponential with mean 200.
"""

import argparse
import time

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--model", default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--instance", default="inf2.48xlarge")
    parser.add_argument("--tp", type=int, default=8)
    options = parser.parse_args()
    known = architecture(options.model)
    if known is None:
        parser.error(f"{options.model} has no known architecture")
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


if __name__ == "__main__":
    main()
