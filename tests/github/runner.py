"""A local runner of GitHub workflows: every job in a new clone, every `run` in GitHub's bash.

stand_ins.py has the replaced parts. Jobs of a matrix run in parallel, all others in the order of the file; a job whose
environment requires an approval is approved at once.
"""

import os
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Final

from tests.github.documents import read
from tests.github.expressions import as_text, filled, holds

_BASH: Final = ("bash", "--noprofile", "--norc", "-eo", "pipefail")  # GitHub's command for `shell: bash`
_SELF: Final = "$/"


@dataclass(frozen=True)
class Run:
    """A run of a workflow: its trigger, the settings of the repository, and the outputs of its jobs."""

    repository: Path
    folder: Path  # the run's folder, with one for each job
    workflow: str
    github: Mapping[str, Any]
    variables: Mapping[str, Mapping[str, str]]  # secrets by environment; those of the repository under ""
    surroundings: Mapping[str, str]  # additional environment variables of a job's machine
    stand_ins: Mapping[str, Callable[["Machine", Mapping[str, str]], None]]  # replacements of third-party actions
    inputs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    job: str
    name: str
    result: str  # success, failure or skipped
    log: str


@dataclass
class Machine:
    """The machine of a job: new, with a working folder, and the files by which steps communicate with GitHub."""

    run: Run
    name: str
    folder: Path
    environment: dict[str, str]
    contexts: dict[str, Any]
    steps: list[Step] = field(default_factory=list)
    noted: dict[str, list[str]] = field(default_factory=dict)  # written by the replacements of actions and pip

    @property
    def workspace(self) -> Path:
        return self.folder / "work"

    @property
    def summary(self) -> str:
        return (self.folder / "GITHUB_STEP_SUMMARY").read_text()

    def answered(self, said: Mapping[str, Any]) -> dict[str, str]:
        """Values for a step: text, with expressions evaluated."""
        values = {
            name: filled(value, self.contexts, self.workspace) if isinstance(value, str) else value
            for name, value in said.items()
        }
        return {name: as_text(value) for name, value in values.items()}

    def note(self, what: str, *words: str) -> None:
        self.noted.setdefault(what, []).extend(words)


@dataclass
class Outcome:
    """The result of a run: its jobs in order of execution, and their results."""

    results: dict[str, str] = field(default_factory=dict)
    outputs: dict[str, dict[str, str]] = field(default_factory=dict)
    machines: list[Machine] = field(default_factory=list)

    @property
    def steps(self) -> list[Step]:
        return [step for machine in self.machines for step in machine.steps]

    def needs(self, job: Mapping[str, Any]) -> dict[str, Any]:
        named = job.get("needs", [])
        names = [named] if isinstance(named, str) else named
        return {name: {"result": self.results[name], "outputs": self.outputs.get(name, {})} for name in names}


def carry_out(run: Run, *, spared: str = "") -> Outcome:
    """Run the jobs in the order of the file, which is that of their needs. The job `spared` is skipped and counts as
    successful."""
    outcome = Outcome()
    for name, job in read(run.repository / run.workflow)["jobs"].items():
        if name == spared:
            outcome.results[name] = "success"
        else:
            carry_out_job(run, name, job, outcome.needs(job), outcome)
    return outcome


def carry_out_job(run: Run, name: str, job: Mapping[str, Any], needs: Mapping[str, Any], outcome: Outcome) -> None:
    well = all(need["result"] == "success" for need in needs.values())
    contexts = _contexts(run, job, name, needs)
    if not holds(job.get("if"), contexts, run.repository, well=well):
        outcome.results[name] = "skipped"
        return
    machines = [
        _machine(run, f"{name}-{number}", {**contexts, "matrix": cell})
        for number, cell in enumerate(_cells(job, contexts, run))
    ]
    with ThreadPoolExecutor() as beside_each_other:
        list(beside_each_other.map(lambda machine: _carry_out_on(machine, job), machines))
    outcome.machines += machines
    outcome.results[name] = "failure" if any(_failed(machine.steps) for machine in machines) else "success"
    outcome.outputs[name] = machines[-1].answered(job.get("outputs", {}))


def _carry_out_on(machine: Machine, job: Mapping[str, Any]) -> None:
    for said in (read(machine.run.repository / machine.run.workflow), job):
        machine.environment.update(machine.answered(said.get("env", {})))
    _carry_out_steps(machine, job["steps"])


def _contexts(run: Run, job: Mapping[str, Any], name: str, needs: Mapping[str, Any]) -> dict[str, Any]:
    variables = {**run.variables[""], **run.variables.get(job.get("environment", ""), {})}
    github = {**run.github, "job": name}
    return {"github": github, "vars": variables, "inputs": run.inputs, "needs": needs, "runner": {"os": "Linux"}}


def _cells(job: Mapping[str, Any], contexts: Mapping[str, Any], run: Run) -> Iterator[dict[str, Any]]:
    axes = {
        axis: filled(values, contexts, run.repository) if isinstance(values, str) else values
        for axis, values in job.get("strategy", {}).get("matrix", {}).items()
    }
    assert all(axes.values()), "GitHub refuses a matrix without values"
    for values in product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _machine(run: Run, name: str, contexts: dict[str, Any]) -> Machine:
    folder = run.folder / name
    (folder / "home").mkdir(parents=True)
    (folder / "work").mkdir()
    github = run.github
    environment = {
        **run.surroundings,
        "HOME": str(folder / "home"),
        "PATH": os.pathsep.join(("/usr/local/bin", "/usr/bin", "/bin")),
        "CI": "true",
        "GITHUB_ACTIONS": "true",
        "GITHUB_ACTOR": "ann",
        "GITHUB_REPOSITORY": github["repository"],
        "GITHUB_RUN_ID": github["run_id"],
        "GITHUB_SERVER_URL": "https://github.com",
        "GITHUB_WORKFLOW_REF": f"{github['repository']}/{run.workflow}@{github['ref']}",
    }
    for file in ("GITHUB_ENV", "GITHUB_OUTPUT", "GITHUB_PATH", "GITHUB_STEP_SUMMARY"):
        (folder / file).touch()
        environment[file] = str(folder / file)
    return Machine(run, name, folder, environment, {**contexts, "env": environment, "steps": {}})


def _failed(steps: list[Step]) -> bool:
    return any(step.result == "failure" for step in steps)


def _carry_out_steps(machine: Machine, steps: list[dict[str, Any]]) -> None:
    for step in steps:
        name = step.get("name") or step.get("uses") or step["run"].splitlines()[0]
        if not holds(step.get("if"), machine.contexts, machine.workspace, well=not _failed(machine.steps)):
            machine.steps.append(Step(machine.name, name, "skipped", ""))
            continue
        if "run" in step:
            machine.steps.append(_shell(machine, name, step))
        elif step["uses"].startswith(_SELF):
            _composite(machine, step)
        else:
            machine.steps.append(_stand_in(machine, name, step))


def _shell(machine: Machine, name: str, step: Mapping[str, Any]) -> Step:
    assert "${{" not in step["run"], "an expression in a script is a way in for whoever writes its value"
    own = machine.answered(step.get("env", {}))
    script = machine.folder / f"step-{len(machine.steps)}.sh"
    script.write_text(step["run"])
    done = subprocess.run(
        [*_BASH, str(script)],
        cwd=machine.workspace,
        env={**machine.environment, **own},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    outputs = machine.folder / "GITHUB_OUTPUT"
    result = dict(line.split("=", 1) for line in outputs.read_text().splitlines())
    outputs.write_text("")
    if "id" in step:
        machine.contexts["steps"][step["id"]] = {"outputs": result}
    return Step(machine.name, name, "failure" if done.returncode else "success", done.stdout + done.stderr)


def _stand_in(machine: Machine, name: str, step: Mapping[str, Any]) -> Step:
    action = step["uses"].partition("@")[0]
    machine.run.stand_ins[action](machine, machine.answered(step.get("with", {})))
    return Step(machine.name, name, "success", "")


def _composite(machine: Machine, step: Mapping[str, Any]) -> None:
    """Run the steps of a composite action in the job, with inputs of their own."""
    action = read(machine.run.repository / step["uses"].removeprefix(_SELF) / "action.yml")
    given = machine.answered(step.get("with", {}))
    assert given.keys() <= action["inputs"].keys(), f"{given.keys()} has a word that the action does not know"
    inputs = machine.answered({key: value.get("default") for key, value in action["inputs"].items()}) | given
    outer = machine.contexts
    machine.contexts = {**outer, "inputs": inputs, "steps": {}}
    try:
        _carry_out_steps(machine, action["runs"]["steps"])
    finally:
        machine.contexts = outer
