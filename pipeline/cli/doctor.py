"""`nxpipe doctor`: the software that commands require, and with --hardware the probes of this machine's compiler and
devices."""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.compile.neuronx.toolchain import REMEDY, installed_releases
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import InputInvalid
from nxpipe.pipeline.util.exit_codes import FINDINGS, SOFTWARE
from nxpipe.pipeline.util.text import Column, for_terminal, plain, style, table

if TYPE_CHECKING:
    from nxpipe.emulator.hlo.probe import Probe
    from nxpipe.pipeline.check.hardware import Run
    from nxpipe.pipeline.check.hardware_report import BrokenAssumption, HardwareReport, Surroundings, Trial

LIBRARIES: Final = (
    "click",
    "pydantic",
    "boto3",
    "torch",
    "transformers",
    "safetensors",
    "numpy",
    "ml_dtypes",
    "aws-cdk-lib",
    "ray",
)
_COMPILE: Final = "pip install 'nxpipe[compile]'"
_SERVE: Final = "pip install 'nxpipe[serve]'"
_CDK: Final = "pip install 'nxpipe[cdk]'"
_CDK_RELEASE: Final = "2.1148.1"


@dataclass(frozen=True)
class Need:
    """A library or program that a command requires."""

    name: str
    needed_for: str
    how: str | Callable[[], str]
    find: Callable[[], str | None]
    optional: bool = False

    @property
    def remedy(self) -> str:
        return self.how if isinstance(self.how, str) else self.how()


@dataclass(frozen=True)
class Requirement:
    """A requirement and its version, or None if it is missing."""

    need: Need
    version: str | None

    @property
    def state(self) -> str:
        if self.version:
            return "ok"
        return "optional" if self.need.optional else "missing"


def examine() -> list[Requirement]:
    """Check all requirements without importing them."""
    return [Requirement(need, need.find()) for need in NEEDS]


def _library(name: str, exactly: str | None = None) -> Callable[[], str | None]:
    def find() -> str | None:
        try:
            installed = version(name)
        except PackageNotFoundError:
            return None
        return installed if exactly is None or installed.partition("+")[0] == exactly else None

    return find


def _libraries(*names: str) -> Callable[[], str | None]:
    """A check that returns the versions of all libraries."""

    def find() -> str | None:
        versions = [_library(name)() for name in names]
        return ", ".join(filter(None, versions)) if all(versions) else None

    return find


def _program(*command: str) -> Callable[[], str | None]:
    """A check that returns the first line of a program's version output."""

    def find() -> str | None:
        if shutil.which(command[0]) is None:
            return None
        try:
            completed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return completed.stdout.strip().partition("\n")[0] if completed.returncode == 0 else None

    return find


def _cdk() -> str | None:
    """The version of the CDK command in node_modules, else of the command on the PATH."""
    local = Path("node_modules/.bin/cdk")
    return _program(str(local.resolve()) if local.exists() else "cdk", "--version")()


def _install_cdk() -> str:
    """What installs the CDK command here: npm ci needs a lock file, npm install a package.json that names it."""
    if Path("package-lock.json").exists():
        return "npm ci"
    return "npm install" if Path("package.json").exists() else f"npm install --save-dev aws-cdk@{_CDK_RELEASE}"


NEEDS: Final = (
    Need("torch 2.13.0", "nxpipe build", _COMPILE, _library("torch", exactly="2.13.0")),
    Need("transformers", "nxpipe build", _COMPILE, _library("transformers")),
    Need("safetensors", "nxpipe build", _COMPILE, _library("safetensors")),
    Need("numpy", "nxpipe build", _COMPILE, _library("numpy")),
    Need("ml_dtypes", "nxpipe build", _COMPILE, _library("ml_dtypes")),
    Need("boto3", "a store on s3://", "pip install nxpipe", _library("boto3")),
    Need("tokenizers", "nxpipe generate, nxpipe serve", _SERVE, _library("tokenizers"), optional=True),
    Need("starlette, uvicorn", "nxpipe serve, nxpipe ui", _SERVE, _libraries("starlette", "uvicorn"), optional=True),
    Need("aws-cdk-lib", "cdk synth, cdk deploy", _CDK, _library("aws-cdk-lib")),
    Need("node", "cdk synth, cdk deploy", "install Node.js 24, or 22", _program("node", "--version")),
    Need("cdk", "cdk synth, cdk deploy", _install_cdk, _cdk),
    Need("git", "nxpipe init", "install git", _program("git", "--version"), optional=True),
    Need("ray", "building on several machines", "pip install 'nxpipe[ray]'", _library("ray"), optional=True),
    Need(
        "neuronx-cc, jaxlib",
        "nxpipe build --backend neuronx",
        REMEDY,
        installed_releases,
        optional=True,
    ),
)


_COLOURS = {"ok": "green", "optional": "yellow", "missing": "red"}


@click.command(cls=Command)
@click.option("--hardware", is_flag=True, help="Compile and run small modules, one assumption each, on this machine.")
@click.option(
    "--only", metavar="PATTERN", default="*", help="With --hardware: the probes of a group, or like 'opcode/t*'."
)
@click.option("--targets", metavar="TARGETS", help="With --hardware: inf2, trn1, ...  [default: that of this machine]")
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    help="With --hardware: the file that keeps the results. A run with the same file resumes.",
)
@click.option("--force", is_flag=True, help="With --hardware: repeat finished probes.")
@click.pass_context
def doctor(
    ctx: click.Context, hardware: bool, only: str, targets: str | None, report: Path | None, force: bool
) -> None:
    """Report installed and missing software, with the commands that require it.

    Exits with code 4 if required software is missing. With --hardware, it compiles a corpus of small modules with
    neuronx-cc, runs them where the machine has Neuron devices, and exits with code 33 if an assumption is broken.

    \b
    Example:
      nxpipe doctor
      nxpipe doctor --hardware --report hardware.json
    """
    console: Console = ctx.obj
    if hardware:
        ctx.exit(_probe(console, only, targets, report, force=force))
    if only != "*" or targets or report or force:
        raise click.UsageError("--only, --targets, --report and --force require --hardware")
    findings = examine()
    if console.json:
        console.data([_as_json(finding) for finding in findings])
    else:
        console.page(
            table(
                ("state", "software", Column("needed for", drop=1), "version, or how to install it"),
                [_row(finding) for finding in findings],
            )
        )
    missing = [finding.need.name for finding in findings if finding.state == "missing"]
    if missing:
        console.say(f"Missing: {', '.join(missing)}.")
        ctx.exit(SOFTWARE.number)
    console.say("All required tools found.")
    if not Path("cdk.json").exists():
        console.say("cdk.json: missing, which npx cdk reads; nxpipe init writes it.")


def _row(finding: Requirement) -> tuple[str, str, str, str]:
    state = style(finding.state, fg=_COLOURS[finding.state])
    return state, finding.need.name, finding.need.needed_for, finding.version or finding.need.remedy


def _as_json(finding: Requirement) -> dict[str, object]:
    return {
        "what": finding.need.name,
        "state": finding.state,
        "needed_for": finding.need.needed_for,
        "found": finding.version,
        "get_it": finding.need.remedy,
    }


# Hardware -------------------------------------------------------------------------------------------------------------


def _probe(console: Console, only: str, targets: str | None, path: Path | None, *, force: bool) -> int:
    """Probe the compiler and the devices; the exit code."""
    from nxpipe.pipeline.check import hardware
    from nxpipe.pipeline.check.hardware_report import HardwareReport

    found = hardware.survey()
    probes, chosen = (
        hardware.chosen_probes(only),
        _targets(targets) or [hardware.native_target(found) or _DEFAULT_TARGET],
    )
    if found.devices:
        with console.step("open the devices"):
            found = hardware.with_runtime(found)
    report = HardwareReport(found, hardware.missing_opcodes())
    if path is not None and path.exists():
        report.resume(path)
    by_target = {target: hardware.for_target(probes, target) for target in chosen}
    for target, own in by_target.items():
        run = hardware.DeviceRun() if found.devices and target == hardware.native_target(found) else None
        _try_all(console, report, own, target, run, path, force=force)
    return _summarise(console, report, by_target)


_DEFAULT_TARGET: Final = "inf2"  # where the machine has no device


def _targets(text: str | None) -> list[str]:
    from nxpipe.emulator.hlo.constraints import TARGETS

    names = list(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))
    if unknown := [name for name in names if name not in TARGETS]:
        raise InputInvalid(f"neuronx-cc has no target {unknown[0][:40]!r}; its targets are {', '.join(TARGETS)}")
    return names


def _try_all(
    console: Console,
    report: "HardwareReport",
    probes: "list[Probe]",
    target: str,
    run: "Run | None",
    path: Path | None,
    *,
    force: bool,
) -> None:
    """Each probe in turn; the report is on disk after each."""
    from nxpipe.pipeline.check import hardware

    trials = hardware.try_all(report, probes, target, hardware.compile_probe, run, force=force)
    for number, probe in enumerate(probes, 1):
        if console.live:
            console.overwrite(for_terminal(f"  [{number}/{len(probes)}] {target} {probe.name}"))
        _, trial = next(trials)
        if path is not None:
            report.write(path)
        if console.live:
            console.clear_row()
        if not console.json and (trial.has_failed or not console.live):
            console.say(f"  [{number}/{len(probes)}] {target} {probe.name}: {_outcome(probe, trial)}")


def _outcome(probe: "Probe", trial: "Trial") -> str:
    words = "ok" if not trial.has_failed else "no" if probe.is_question else "failed"
    return f"{words}{f', {plain(trial.message)}' if trial.message else ''}"


def _summarise(console: Console, report: "HardwareReport", probes: "dict[str, list[Probe]]") -> int:
    """Print the outcome on each target; the exit code."""
    from nxpipe.pipeline.check.hardware_report import broken_assumptions

    broken = {target: broken_assumptions(own, report.trials[target]) for target, own in probes.items()}
    if console.json:
        summary = {target: [asdict(each) for each in rows] for target, rows in broken.items()}
        console.data({**report.document(), "broken": summary})
    else:
        console.page("\n".join(_surroundings(report)))
        for target, own in probes.items():
            console.page(_table(own, report.trials[target], target))
            console.page("\n".join(_causes(target, broken[target])))
    count = sum(map(len, broken.values()))
    if report.missing_opcodes:
        console.say(f"The compiler's list of operators lacks: {', '.join(report.missing_opcodes)}.")
    if count:
        console.say(f"{count} {'assumption is' if count == 1 else 'assumptions are'} broken.")
        return FINDINGS.number
    ran = all(trial.ran is not None for target in probes for trial in report.trials[target].values())
    console.say("All assumptions hold." if ran else "All assumptions hold as far as the compiler shows; nothing ran.")
    return 0


def _surroundings(report: "HardwareReport") -> list[str]:
    found: Surroundings = report.surroundings
    runtime = " ".join(filter(None, (found.implementation, found.runtime))) or "not opened"
    return [
        f"neuronx-cc {found.compiler}; driver {found.driver or 'absent'}; runtime {runtime}",
        f"{found.devices} Neuron devices{f' of {found.instance}' if found.instance else ''}",
    ]


def _table(probes: "list[Probe]", trials: "dict[str, Trial]", target: str) -> str:
    rows = []
    for probe in probes:
        trial = trials[probe.name]
        marks = [_mark(value) for value in (trial.compiled, trial.ran, trial.agrees)]
        remark = probe.assumption if trial.has_failed else ""
        rows.append((probe.name, *marks, f"(question) {remark}" if probe.is_question and remark else remark))
    header = (f"probe on {target}", "compiled", "ran", "agrees", "assumption broken")
    return table(header, rows)


def _mark(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"


def _causes(target: str, broken: "list[BrokenAssumption]") -> list[str]:
    lines = []
    for each in broken:
        code = f" [{each.code}]" if each.code else ""
        lines.append(f"{target} {each.name}{code} breaks: {each.assumption}.")
        lines.append(f"  {plain(each.message)}")
        lines.append(f"  Fallback: {each.fallback}.")
        if each.consequences:
            lines.append(f"  Fail because of it: {', '.join(each.consequences)}.")
    return lines
