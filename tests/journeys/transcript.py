"""`python -m tests.journeys.transcript NAME [TITLE]`: run a journey and print what was seen, with its faults.

With the words of a TITLE, the run ends after that heading. Without faults the exit code is 0.
"""

import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from tests.conftest import ROOT
from tests.journeys.script import findings_of
from tests.journeys.test_journeys import JOURNEYS, play, set_up
from tests.wheel import wheel_of


def main(name: str, title: str = "") -> int:
    (path,) = (one for one in JOURNEYS if name in one.stem)
    wrong = 0
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        repository = set_up(path, wheel_of(ROOT, folder / "wheel"), folder, running)
        for finding in findings_of(path):
            sys.stdout.write(f"\n## {finding.title}\n")
            for step in finding.steps:
                began = time.monotonic()
                faults, seen = play(step, repository)
                wrong += 0 if finding.not_yet else len(faults)
                sys.stdout.write(f"{seen[-4000:]} {time.monotonic() - began:.1f} s\n")
                kind = "EXPECTED FAULT" if finding.not_yet else "FAULT"
                sys.stdout.writelines(f"{kind} {path.name}:{step.line}: {fault}\n" for fault in faults)
                sys.stdout.flush()
            if title and title in finding.title:
                break
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
