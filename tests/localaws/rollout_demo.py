"""`python -m tests.localaws.rollout_demo`: rollouts on the local AWS, from an empty account to their ends.

Only the account is simulated: the CDK's own command deploys the real stacks, the state machines run, the judge's
function runs, and the weights are those of the listener's rule. Instances are processes of `nxpipe serve` on the
emulator, behind a router that follows the weights; requests, latencies and errors are real. A minute of the plan lasts
one second.
"""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final, NoReturn

from nxpipe.artifact_store import Store, open_store
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.pipeline.util import exit_codes
from tests.localaws.formation.provider import client_of
from tests.localaws.moto_patches.refreshes import hosts_answer
from tests.localaws.server import local_aws
from tests.localaws.servers import Servers, servers
from tests.localaws.visitors import Fleet
from tests.serving import checkpoints
from tests.serving.server_process import free_port

_ROOT: Final = Path(__file__).parents[2]
_CDK: Final = _ROOT / "node_modules" / ".bin" / "cdk"
_NXPIPE: Final = Path(sys.executable).parent / "nxpipe"
# The unpacked CDK package, shared by digest: tests have a new HOME each, and unpacking takes nine seconds.
_PACKAGE_CACHE: Final = Path.home() / ".cache" / "aws" / "jsii" / "package-cache"
_ACCOUNT, _REGION = "123456789012", "us-east-2"
_MODEL: Final = "llama"
_CONFIG: Final = f"""\
[project]
name = "demo"
account = "{_ACCOUNT}"
region = "{_REGION}"

[[models]]
name = "chat"
path = "{_MODEL}"
task = "text-generation"
target = "inf2.xlarge"
phases = ["extend", "decode"]
batches = [8]
buckets = [16, 64]
weights = "random:0"

[[fleets]]
kind = "serving"
name = "search"
model = "chat"
channel = "production"
instance_types = ["inf2.xlarge"]
capacity = {{ kind = "on-demand" }}
size = {{ min = 1, max = 2 }}
certificate = "CERTIFICATE"
rehearsal = true

[rollout]
steps = [50, 100]
bake_min = "3m"
bake_max = "4h"
alpha = 0.1
beta = 0.2

[rollout.guards]
max_error_rate = 0.05

[rollout.shadow]
percent = 50.0
bake_min = "2m"
bake_max = "4h"
"""
_RATE: Final = 80  # requests a second
_HISTORY: Final = 1200  # requests of the latency baseline


@dataclass(frozen=True)
class Candidate:
    """A version that is rolled out. `fault` is that of its servers' device."""

    name: str
    what: str
    expected: str
    weights: str = "random:0"
    fault: str = ""


CANDIDATES: Final = (
    Candidate("wrong", "other weights: every answer differs", "refused in the shadow phase", weights="random:1"),
    Candidate("slow", "each program takes 80 ms longer", "rolled back by latency", fault="slow"),
    Candidate("crashing", "its process is killed after every 120 programs", "rolled back by errors", fault="crashing"),
    Candidate("good", "another build of the same weights", "promoted"),
)

Report = Callable[[str], None]


@dataclass(frozen=True)
class Project:
    """A folder with an nxpipe.toml, and the commands that run in it."""

    folder: Path
    environment: dict[str, str]

    def nxpipe(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self._run([str(_NXPIPE), *arguments], self.folder)

    def cdk(self, *arguments: str, within: Path) -> None:
        settings = ("-c", f"config={self.folder / 'nxpipe.toml'}", "-o", str(self.folder / "cdk.out"))
        done = self._run([str(_CDK), *arguments, *settings], within)
        if done.returncode:
            raise RuntimeError(f"cdk {' '.join(arguments)} failed:\n{done.stdout}{done.stderr}")

    def _run(self, command: list[str], within: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=within, env=self.environment, capture_output=True, text=True, check=False, timeout=300
        )


@dataclass(frozen=True)
class Played:
    """How the rollout of a candidate went."""

    candidate: Candidate
    code: int
    shares: list[int]  # of traffic, in order
    requests: int  # to the candidate
    failed: int  # of all requests to the fleet
    total: int
    medians: tuple[float, float]  # milliseconds, of the stable version and the candidate
    pairs: str  # bad of all mirrored requests
    crashes: int
    seconds: float


@dataclass(frozen=True)
class DemoResult:
    """Results of the demonstration, for its test."""

    played: list[Played]
    served: str
    promoted: str
    replayed: int


def demo(report: Report, candidates: Sequence[Candidate] = CANDIDATES) -> DemoResult:
    began = time.monotonic()
    with _project() as project, ExitStack() as running:
        report("An empty local account. Building a tiny Llama, and versions of it, for the emulator:")
        report(f"  {', '.join(_write_models(project, candidates))}")
        report("Deploying network, store, fleet, alarms and state machines with cdk:")
        _deploy(project, report)
        versions = _publish(project, candidates)
        stable = versions["stable"]
        _check(project.nxpipe("promote", stable, "--channel", "production"))
        store = _store(project)
        faults = {store.resolve(versions[each.name]).request_key: each.fault for each in candidates if each.fault}
        held = running.enter_context(
            servers(_REGION, project.folder / "nxpipe.toml", project.folder / "instances", free_port(), faults)
        )
        _await(lambda: any(each.is_ready for each in held.running.values()), held)
        traffic = running.enter_context(_routed(project, held))
        report(f"nxpipe serve answers as {stable}, behind a router; {_RATE} requests a second. A minute is a second.")
        _await(lambda: sum(each["requests"] for each in traffic.seconds("blue")) > _HISTORY, held)
        played = [_play(project, held, traffic, each, versions[each.name], report) for each in candidates]
        replayed = _replay(project, report)
        served = json.loads(_check(project.nxpipe("channel", "show", "production", "--json")).stdout)
        if held.problems:
            report(f"  {len(held.problems)} problems of instances, the last one: {held.problems[-1]}")
    report("\n".join(_table(played)))
    report(f"The account is removed, and all processes have ended, after {time.monotonic() - began:.0f} s.")
    return DemoResult(played, _name_of(served), next(reversed(versions.values())), replayed)


@dataclass(frozen=True)
class Traffic:
    """What the router has counted."""

    fleet: Fleet
    counts: Path

    def seconds(self, colour: str, since: float = 0) -> list[dict[str, Any]]:
        lines = self.counts.read_text().splitlines() if self.counts.exists() else []
        found = (json.loads(line) for line in lines)
        return [each for each in found if each["colour"] == colour and each["at"] >= since]


@contextmanager
def _routed(project: Project, held: Servers) -> Iterator[Traffic]:
    """The router and its clients, in a process of their own."""
    traffic = Traffic(Fleet.find(_REGION, "demo-search"), project.folder / "counts.jsonl")
    words = ["--region", _REGION, "--fleet", "demo-search", "--targets", str(held.targets)]
    words += ["--counts", str(traffic.counts), "--rate", str(_RATE)]
    process = subprocess.Popen([sys.executable, "-m", "tests.localaws.router", *words], env=project.environment)
    try:
        yield traffic
    finally:
        process.terminate()
        process.wait()


def _await(condition: Callable[[], bool], held: Servers, within: float = 120) -> None:
    until = time.monotonic() + within
    while not condition():
        if time.monotonic() > until:
            raise RuntimeError(f"the fleet does not serve; {held.problems[-1:] or 'without a problem'}")
        time.sleep(0.1)


def _play(
    project: Project, held: Servers, traffic: Traffic, candidate: Candidate, version: str, report: Report
) -> Played:
    """Roll a candidate out, and count what clients saw meanwhile."""
    home = max(traffic.fleet.weights(), key=lambda colour: traffic.fleet.weights()[colour])
    away = "green" if home == "blue" else "blue"
    report(f"\n{candidate.name}: {candidate.what} ({version})")
    began, crashes, shares = time.time(), held.crashes, [0]
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.1):
            if (share := traffic.fleet.weights()[away]) != shares[-1]:
                shares.append(share)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        code = _roll_out(project, version, report)
    finally:
        over.set()
        thread.join()
    old, new = (traffic.seconds(colour, began) for colour in (home, away))
    pairs = [
        json.loads(line)["bad"]
        for path in held.folder.glob(f"*/pairs/{version.rpartition('@')[2]}*/pairs.jsonl")
        for line in path.read_text().splitlines()
    ]
    return Played(
        candidate,
        code,
        shares,
        sum(each["requests"] for each in new),
        sum(each["failed"] for each in (*old, *new)),
        sum(each["requests"] for each in (*old, *new)),
        (_median(old), _median(new)),
        f"{sum(pairs)} of {len(pairs)}",
        held.crashes - crashes,
        time.time() - began,
    )


def _median(seconds: Sequence[dict[str, Any]]) -> float:
    times = [one for each in seconds for one in each["times"]]
    return 1000 * median(times) if times else 0.0


def _table(played: Sequence[Played]) -> Iterator[str]:
    row = "{:<9} {:<28} {:>9} {:>10} {:>9} {:>12} {:>11} {:>8} {:>8}"
    yield "\n" + row.format(
        "version", "outcome", "exit code", "traffic", "requests", "failed of all", "median ms", "pairs", "restarts"
    )
    for each in played:
        outcome = {0: "promoted", exit_codes.ROLLED_BACK.number: each.candidate.expected}.get(each.code, "unexpected")
        yield row.format(
            each.candidate.name,
            outcome,
            each.code,
            f"{max(each.shares)} %",
            each.requests,
            f"{each.failed}/{each.total}",
            f"{each.medians[0]:.0f}/{each.medians[1]:.0f}",
            each.pairs.replace(" of ", "/"),
            each.crashes,
        )


def _name_of(channel: list[dict[str, Any]] | dict[str, Any]) -> str:
    result = channel[0] if isinstance(channel, list) else channel
    return f"{_MODEL}@{result['artifacts'][0]['request_key'][:12]}"


@contextmanager
def _project() -> Iterator[Project]:
    with TemporaryDirectory() as folder, local_aws() as endpoint, hosts_answer("CONTINUE"):
        logging.getLogger("moto").setLevel(
            logging.CRITICAL
        )  # moto logs a Choice state whose variable is absent as an error
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "CDK_", "NXPIPE_"))}
        own = {
            "CDK_HOME": f"{folder}/cdk-home",
            "XDG_STATE_HOME": f"{folder}/state",  # the account is new each time, so no cached state applies
            "CDK_VALIDATION": "false",  # the template checks have tests of their own, and take ten seconds
            "JSII_RUNTIME_PACKAGE_CACHE_ROOT": str(_PACKAGE_CACHE),
            "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "20",
            "NO_COLOR": "1",
        }
        project = Project(Path(folder), {**inherited, **own, **endpoint})
        certificate = client_of("acm", _REGION).request_certificate(DomainName="search.example.com")["CertificateArn"]
        (project.folder / "nxpipe.toml").write_text(_CONFIG.replace("CERTIFICATE", certificate))
        (project.folder / "nxpipe.agent.lock").write_text(json.dumps({"sha256": "0" * 64, "packages": []}))
        yield project


def _deploy(project: Project, report: Report) -> None:
    began = time.monotonic()
    _check(project.nxpipe("ami", "lock"))
    project.cdk("bootstrap", f"aws://{_ACCOUNT}/{_REGION}", within=project.folder)
    project.cdk("deploy", "--all", "--concurrency", "4", "--require-approval", "never", within=_ROOT)
    outputs = client_of("cloudformation", _REGION).describe_stacks(StackName="demo-storage")["Stacks"][0]["Outputs"]
    bucket = next(entry["OutputValue"] for entry in outputs if entry["OutputKey"] == "BucketName")
    with (project.folder / "nxpipe.toml").open("a") as file:
        file.write(f'\n[store]\nurl = "s3://{bucket}"\n')
    report(f"  {time.monotonic() - began:.0f} s")


def _write_models(project: Project, candidates: Sequence[Candidate]) -> list[str]:
    checkpoints.write(project.folder / _MODEL, "llama")
    return ["stable", *(each.name for each in candidates)]


def _publish(project: Project, candidates: Sequence[Candidate]) -> dict[str, str]:
    """Build the model with each set of weights into the account's store. Versions with equal weights are one build,
    published again under a request key of its own."""
    config, store = project.folder / "nxpipe.toml", _store(project)
    toml = config.read_text()
    named = {"stable": "random:0", **{each.name: each.weights for each in candidates}}
    built = {}
    for weights in dict.fromkeys(named.values()):
        config.write_text(toml.replace("random:0", weights))
        (cell,) = json.loads(_check(project.nxpipe("build", "--json")).stdout)
        built[weights] = store.resolve(cell["request_key"]).manifest
    config.write_text(toml)
    versions = {}
    for name, weights in named.items():
        inputs = json.loads(store.read_blob(built[weights].key_inputs))
        key = store.put_blob(canonical_json({**inputs, "version": name}))
        made = built[weights].model_copy(update={"key_inputs": key})
        for each in store.evidence(built[weights].digest):
            store.attest(each.model_copy(update={"manifest": made.digest}))
        versions[name] = f"{_MODEL}@{store.publish(made).request_key[:12]}"
    return versions


def _store(project: Project) -> Store:
    match = re.search(r'url = "(.+)"', (project.folder / "nxpipe.toml").read_text())
    assert match
    return open_store(match[1])


def _roll_out(project: Project, version: str, report: Report) -> int:
    """Start a rollout and report its output line by line."""
    arguments = ("rollout", "start", "search", version, "--minute", "1", "--wait")
    report(f"$ nxpipe {' '.join(arguments)}")
    command, merged = [str(_NXPIPE), *arguments], subprocess.STDOUT
    with subprocess.Popen(
        command, cwd=project.folder, env=project.environment, stdout=subprocess.PIPE, stderr=merged, text=True
    ) as running:
        assert running.stdout is not None
        for line in running.stdout:
            report(f"  {line.rstrip()}")
    report(f"  exit code {running.returncode}")
    return running.returncode


def _replay(project: Project, report: Report) -> int:
    """The number of evaluations of the last rollout that a replay reproduces."""
    record = project.folder / "rollout.jsonl"
    record.write_text(_check(project.nxpipe("rollout", "log", "search", "--json")).stdout)
    replayed = _check(project.nxpipe("rollout", "replay", str(record), "--json"))
    report(f"$ nxpipe rollout log search\n{_check(project.nxpipe('rollout', 'log', 'search')).stdout}")
    return len(json.loads(replayed.stdout))


def _check(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, done.args))} failed:\n{done.stdout}{done.stderr}")
    return done


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _end(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)  # as Ctrl-C: all processes are ended
    with suppress(KeyboardInterrupt):
        demo(_print)
