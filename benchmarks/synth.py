"""Duration of the synthesis of the stacks: `python app.py` alone, and the user's command.

Usage: python benchmarks/synth.py [--runs N]

Two projects: this repository's own nxpipe.toml, and one with every feature of a project. Each is synthesised N times,
cold, alternating with the others; the median is printed with the goal, and the CPU time of the app and its children.
CDK's own validation, which `npx cdk synth` runs by default, is included there and not in the app.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.stacks.whole import write_locks, write_whole

ROOT = Path(__file__).parent.parent
GOALS = {"python app.py": 5.0, "cdk synth": 20.0, "cdk synth --no-validation": 20.0}  # seconds


@dataclass(frozen=True)
class Run:
    wall: float
    processor: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as folder:
        projects = {"own": _own(Path(folder, "own")), "whole": write_whole(_made(Path(folder, "whole")))}
        cases = {(what, name): _command(what, path) for what in GOALS for name, path in projects.items()}
        result: dict[tuple[str, str], list[Run]] = {case: [] for case in cases}
        for _ in range(runs):
            for case, (command, environment) in cases.items():
                result[case].append(_timed(command, environment, Path(folder, "cdk.out")))
    return _print(result, runs)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _own(folder: Path) -> Path:
    """The repository's project, with locks for the region of the tests, which it does not need otherwise."""
    write_locks(_made(folder))
    text = (ROOT / "nxpipe.toml").read_text().replace("us-east-1", "us-east-2")
    (folder / "nxpipe.toml").write_text(text)
    return folder / "nxpipe.toml"


def _command(what: str, config: Path) -> tuple[list[str], Mapping[str, str]]:
    if what == "python app.py":
        context = json.loads((ROOT / "cdk.json").read_text())["context"] | {"config": str(config)}
        return [sys.executable, "app.py"], {"CDK_CONTEXT_JSON": json.dumps(context), "CDK_VALIDATION": "false"}
    command = str(ROOT / "node_modules" / ".bin" / "cdk")
    return [command, *what.split()[1:], "--quiet", "-c", f"config={config}"], {}


def _timed(command: list[str], environment: Mapping[str, str], out: Path) -> Run:
    """Synthesise into an empty folder: a second synthesis would find files of the first."""
    shutil.rmtree(out, ignore_errors=True)
    own = {"CDK_OUTDIR": str(out), "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "20"}
    output = [] if command[0] == sys.executable else ["-o", str(out)]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        [*command, *output], cwd=ROOT, env={**os.environ, **own, **environment}, check=True, capture_output=True
    )
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Run(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def _print(found: Mapping[tuple[str, str], list[Run]], runs: int) -> int:
    print(f"median of {runs} runs\n")
    print(f"{'command':<28} {'project':<8} {'wall s':>8} {'cpu s':>8} {'goal s':>8}")
    late = 0
    for (what, project), value in found.items():
        wall = statistics.median(run.wall for run in value)
        processor = statistics.median(run.processor for run in value)
        late += wall > GOALS[what]
        print(f"{what:<28} {project:<8} {wall:>8.2f} {processor:>8.2f} {GOALS[what]:>8.0f}")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
