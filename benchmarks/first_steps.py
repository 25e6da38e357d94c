"""A newcomer's first steps, timed: first artifact, first deployed fleet on the local AWS, first chat answer.

    python benchmarks/first_steps.py            measure, and print the rows
    python benchmarks/first_steps.py --write    and write docs/results/first-steps.md

Each way starts with nothing but a wheel of this checkout: a fresh virtual environment, `pip install` of the wheel with
the extras that the way needs, from the index or cache that pip is configured with, then the commands that the guides
give. Downloads are part of the times, so a second run on a machine has warmer caches; the page says which it was. The
local AWS is started before the clock: it stands for an account that exists. `npm install` is replaced by a copy of the
downloaded CDK CLI if the registry is not reachable.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.journeys import given  # noqa: E402
from tests.user import Repository, cloud_up, download_cdk, fresh_repository  # noqa: E402
from tests.wheel import wheel_of  # noqa: E402

PAGE = ROOT / "docs/results/first-steps.md"
INSTALL = "python3 -m venv .venv && . .venv/bin/activate && pip install --quiet --disable-pip-version-check"


@dataclass(frozen=True)
class Way:
    """What a newcomer wants, the time it may take, and the commands with the name of each step."""

    name: str
    goal: int  # seconds
    steps: tuple[tuple[str, str], ...]
    needs_cloud: bool = False


ARTIFACT = Way(
    "first built artifact",
    180,
    (
        ("install the wheel with [compile]", f"{INSTALL} 'WHEEL[compile]'"),
        ("nxpipe init", "nxpipe init --model-id ./classifier"),
        ("nxpipe check", "nxpipe check --model-id ./classifier --buckets 16"),
        ("nxpipe build", "nxpipe build --model-id ./classifier --buckets 16"),
        ("nxpipe store ls", "nxpipe store ls"),
    ),
)
FLEET = Way(
    "first deployed fleet, on the local AWS",
    480,
    (
        ("install the wheel with [compile,cdk]", f"{INSTALL} 'WHEEL[compile,cdk]'"),
        ("nxpipe init --fleet serving", "nxpipe init --fleet serving --model-id ./classifier"),
        ("the CDK CLI", "test -d node_modules || npm install --silent"),
        ("nxpipe ami lock", "nxpipe ami lock"),
        ("cdk bootstrap", "npx cdk bootstrap aws://123456789012/us-east-2"),
        (
            "the agent's bundle, into the store",
            "nxpipe agent bundle packages --fetch WHEEL --store file://.nxpipe/store",
        ),
        ("nxpipe build", "nxpipe build --model-id ./classifier --buckets 16"),
        ("cdk deploy --all", "npx cdk deploy --all --require-approval never"),
    ),
    needs_cloud=True,
)
CHAT = Way(
    "first chat answer",
    300,
    (
        ("install the wheel with [compile,serve]", f"{INSTALL} 'WHEEL[compile,serve]'"),
        ("nxpipe build", "nxpipe build --model-id ./llama --weights random:0 --buckets 64"),
        ("nxpipe generate --chat", "echo 'where does the river begin?' | nxpipe generate llama --chat --max-tokens 8"),
    ),
)


@dataclass(frozen=True)
class Time:
    way: Way
    step: str
    seconds: float


def measure(way: Way, wheel: Path) -> Iterator[Time]:
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        repository = fresh_repository(folder / "my-models", {"WHEEL": str(wheel)})
        prepare(way, repository, running)
        for name, command in way.steps:
            began = time.monotonic()
            repository.succeed(command)
            yield Time(way, name, time.monotonic() - began)
            if name.startswith("nxpipe init") and way.needs_cloud:
                repository.edit((r"^(# )?region = .*", 'region = "us-east-2"'))


def prepare(way: Way, repository: Repository, running: ExitStack) -> None:
    """What the newcomer has before the clock runs: a model, and an account."""
    given.classifier(repository, "classifier")
    given.language_model(repository, "llama")
    if way.needs_cloud:
        download_cdk(repository.folder)
        repository.shell.write_text(running.enter_context(cloud_up(repository.folder.parent / "server.txt")))


def page(times: list[Time]) -> str:
    rows = []
    for way in dict.fromkeys(each.way for each in times):
        own = [each for each in times if each.way is way]
        total = sum(each.seconds for each in own)
        verdict = "within it" if total <= way.goal else "**beyond it**"
        steps = ", ".join(f"{each.step} {each.seconds:.0f}" for each in own)
        rows.append(f"| {way.name} | {total:.0f} s | {way.goal // 60} min, {verdict} | {steps} |")
    cores, load = os.cpu_count(), os.getloadavg()[0]
    return f"""# First steps

How long a newcomer waits, from an empty folder and a wheel, by `benchmarks/first_steps.py` on
{datetime.now(UTC):%Y-%m-%d}: {cores} cores, load {load:.1f} at the end, Python {sys.version.split()[0]}. Each row is
one run with a fresh virtual environment. The model is tiny, so these are the times of the tools.

| To | Took | Goal | Steps, in seconds |
| --- | --- | --- | --- |
{chr(10).join(rows)}

Packages come from the index and the cache that pip has on the machine. The CDK CLI was downloaded
before; the local AWS stands for an account that exists.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the page")
    parser.add_argument("--only", choices=("artifact", "fleet", "chat"), help="measure one way")
    options = parser.parse_args()
    ways = {"artifact": ARTIFACT, "fleet": FLEET, "chat": CHAT}
    chosen = [ways[options.only]] if options.only else list(ways.values())
    times: list[Time] = []
    with tempfile.TemporaryDirectory() as folder:
        wheel = wheel_of(ROOT, Path(folder))
        for way in chosen:
            for each in measure(way, wheel):
                times.append(each)
                print(f"{each.way.name}: {each.step}: {each.seconds:.1f} s", flush=True)
    print(page(times))
    if options.write:
        PAGE.write_text(page(times))


if __name__ == "__main__":
    main()
