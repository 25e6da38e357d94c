"""The deployed judge: its archive in an empty folder, run by a Python without other packages."""

import json
import shutil
import subprocess
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from nxpipe.stacks.rollout.stack import archive

# Questions come line by line, and each answer has beside it what it says of each metric's ratio. What an operator may
# add to a Python, `-I` and `-S` leave out.
_SERVE: Final = """
import json, sys
sys.path.insert(0, sys.argv[1])
from nxpipe.pipeline.canary.metrics import METRICS
from nxpipe.pipeline.canary.handler import RolloutState
from nxpipe.pipeline.canary.handler import handle
from nxpipe.pipeline.canary.evalues import interval
print(json.dumps([module.__file__ for module in sys.modules.values() if getattr(module, "__file__", None)]), flush=True)
for line in sys.stdin:
    told = handle(json.loads(line), None)
    course = RolloutState.from_text(told["carried"])
    ratios = [interval(course.plan, course.evidence.steps, metric) for metric in range(len(METRICS))]
    print(json.dumps([told, ratios]), flush=True)
"""


class Function:
    def __init__(self, running: "subprocess.Popen[str]") -> None:
        self._running = running
        self.files: list[str] = self._next()  # that it has loaded

    def __call__(self, question: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[float, float]]]:
        """The judge's response, and the intervals of the ratios."""
        assert self._running.stdin is not None
        self._running.stdin.write(json.dumps({question: given}) + "\n")
        self._running.stdin.flush()
        told, ratios = self._next()
        return told, [(low, high) for low, high in ratios]

    def _next(self) -> Any:
        assert self._running.stdout is not None
        return json.loads(self._running.stdout.readline())


@contextmanager
def function(python: str, folder: Path) -> Iterator[Function]:
    with zipfile.ZipFile(archive()) as packed:
        packed.extractall(folder)
    command = [python, "-I", "-S", "-B", "-c", _SERVE, str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, env={}, stdin=pipe, stdout=pipe, text=True) as running:
        try:
            yield Function(running)
        finally:
            running.terminate()


def found(python: str) -> str:
    """The path of a Python; empty if it cannot be run, because a version manager may have only its name."""
    path = shutil.which(python) or ""
    return path if path and subprocess.run([path, "-V"], capture_output=True, check=False).returncode == 0 else ""
