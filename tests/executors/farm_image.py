"""The program behind the build farm's image: the real `nxpipe`, with trivial cells.

The title of a job selects its behaviour: `make` records itself in the store, `refuse` fails deterministically, `grow`
takes memory until it is killed, `hang` records itself and waits until it is killed.
"""

import sys
import time
from collections.abc import Callable
from types import ModuleType

from nxpipe.artifact_store.builds import keep_step_result, step_result
from nxpipe.artifact_store.url import open_store
from nxpipe.pipeline.build.jobs import Event, Failure, FailureClass, Job, JobFinished, JobLog
from nxpipe.pipeline.util.exit_codes import COMPILE


def run_job(job: Job, tell: Callable[[Event], None]) -> JobFinished:
    tell(JobLog(job.key, f"step of {job.title}"))
    store = open_store(job.store)
    if job.title.startswith("refuse"):
        log = "Traceback \udcff" + "x" * 100_000
        return JobFinished(
            job.key,
            0.5,
            failure=Failure(FailureClass.DETERMINISTIC, "Unlowered", "no such operator", COMPILE.number, log),
        )
    if job.title.startswith("grow"):
        held = []
        while True:
            held.append(bytearray(b"x" * 2**23))
    found = step_result(store, job.key)
    keep_step_result(store, job.key, {}, {"made": job.title})
    if job.title.startswith("hang") and found is None:
        time.sleep(600)
    return JobFinished(job.key, 0.5, cached=found is not None, memory=1)


def main() -> None:
    stand_in = ModuleType("nxpipe.pipeline.build.worker")
    vars(stand_in)["run_job"] = run_job
    sys.modules[stand_in.__name__] = stand_in
    from nxpipe.pipeline.cli.main import main as nxpipe

    nxpipe()


if __name__ == "__main__":
    main()
