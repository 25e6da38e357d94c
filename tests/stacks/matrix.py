"""All valid and invalid combinations of fleets as projects, templates of the valid ones, and the findings on them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any, Final, TypeAlias
from unittest.mock import MagicMock, patch

from aws_cdk import App

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.stacks import app
from nxpipe.stacks.lint.validation import guard
from tests.stacks.linting import complaints, complaints_of_alike
from tests.stacks.local import REGION, new_app
from tests.stacks.whole import CERTIFICATE, write_locks

PURPOSES: Final = ("serving", "training")
IMAGE: Final = f"123456789012.dkr.ecr.{REGION}.amazonaws.com/train@sha256:{'0' * 64}"
CAPACITIES: Final = {
    "on-demand": '{ kind = "on-demand" }',
    "spot": '{ kind = "spot" }',
    "reservation": '{ kind = "reservation", id = "cr-0a1b2c3d4e5f60718" }',
    "capacity-block": (
        '{ kind = "capacity-block", id = "cr-0b1b2c3d4e5f60718",'
        " start = 2098-12-01T11:30:00Z, end = 2098-12-08T11:30:00Z }"
    ),
}
NETWORKS: Final = {
    "closed": 'kind = "closed"',
    "nat": 'kind = "nat"',
    "existing": f"""\
kind = "existing"
vpc = "vpc-0a1b2c3d4e5f60718"
cidr = "10.20.0.0/16"
[[network.subnets]]
zone = "{REGION}a"
id = "subnet-0a1b2c3d4e5f60718"
[[network.subnets]]
zone = "{REGION}b"
id = "subnet-0b1b2c3d4e5f60718"
""",
}


@dataclass(frozen=True)
class Fleet:
    purpose: str
    type: str
    capacity: str
    network: str

    def __str__(self) -> str:
        return f"{self.purpose} {self.type} {self.capacity} {self.network}"

    @property
    def name(self) -> str:
        return "-".join((self.purpose, self.type.translate(str.maketrans("._", "--")), self.capacity))

    @property
    def stack(self) -> str:
        return f"all-{'serve' if self.purpose == 'serving' else 'train'}-{self.name}"

    @property
    def table(self) -> str:
        nodes = 2 if INSTANCES[self.type].efa_interfaces and self.capacity != "spot" else 1
        capacity, zone = CAPACITIES[self.capacity], ""
        if self.capacity in ("reservation", "capacity-block"):
            zone = f'zone = "{REGION}a"\n'
            if self.purpose == "serving":  # for both groups of a rollout
                capacity = capacity.replace(" }", ", instances = 4 }")
        sessions = "ssm = true\n" if self.capacity == "reservation" else ""
        own = {
            "serving": f'{zone}size = {{ min = 1, max = 2 }}\ncertificate = "{CERTIFICATE}"',
            "training": f'zone = "{REGION}a"\nnodes = {nodes}\nimage = "{IMAGE}"',
        }[self.purpose]
        return f"""
[[fleets]]
kind = "{self.purpose}"
name = "{self.name}"
model = "{INSTANCES[self.type].compiler_target}"
channel = "production"
instance_types = ["{self.type}"]
capacity = {capacity}
{sessions}{own}
"""

    @property
    def sampled(self) -> bool:
        """If a type supports both, the closed network has both; each open network has one."""
        both = INSTANCES[self.type].compiler_target != "inf2"
        return not both or self.network == "closed" or (self.network == "nat") == (self.purpose == "training")

    @property
    def refused(self) -> str | None:
        """The invalid key, according to EC2 and the Neuron documentation."""
        if self.type.startswith("trn3"):  # racks, which are no instance type
            return "instance_types[0]"
        if self.purpose == "training" and self.type.startswith("inf2"):  # no collectives across instances
            return "instance_types[0]"
        if self.capacity == "capacity-block" and self.type not in ("trn1.32xlarge", "trn2.48xlarge", "trn2u.48xlarge"):
            return "capacity"
        if self.capacity == "spot" and self.type == "trn2u.48xlarge":
            return "capacity"
        return None


FLEETS: Final = [Fleet(*entry) for entry in product(PURPOSES, INSTANCES, CAPACITIES, NETWORKS)]
POSSIBLE: Final = [fleet for fleet in FLEETS if fleet.refused is None and fleet.sampled]
REFUSED: Final = [fleet for fleet in FLEETS if fleet.refused is not None]


def pairwise(fleets: Sequence[Fleet]) -> list[Fleet]:
    """A small subset (greedy) in which every pair of values that occurs in a fleet occurs."""
    pairs = {fleet: set(combinations(enumerate(astuple(fleet)), 2)) for fleet in fleets}
    missing, found = set().union(*pairs.values()), []
    while missing:
        found.append(max(fleets, key=lambda fleet: len(pairs[fleet] & missing)))
        missing -= pairs[found[-1]]
    return found


PAIRWISE: Final = pairwise(POSSIBLE)


def project(network: str, *fleets: Fleet) -> str:
    """All models are equal; fleets depend on the target only."""
    targets = {INSTANCES[fleet.type].compiler_target: fleet.type for fleet in fleets}
    models = [
        f'[[models]]\nname = "{target}"\nid = "acme/bert"\ntask = "fill-mask"\ntarget = "{type_}"\n'
        for target, type_ in targets.items()
    ]
    head = f'[project]\nname = "all"\naccount = "123456789012"\nregion = "{REGION}"\n'
    return "\n".join([head, f"[network]\n{NETWORKS[network]}", *models, *(fleet.table for fleet in fleets)])


Said: TypeAlias = dict[tuple[str, str], list[str]]  # by network and stack


@dataclass(frozen=True)
class Made:
    """The templates of one network, and the findings in each stack."""

    templates: Mapping[str, dict[str, Any]]
    findings: Mapping[str, list[str]]


@dataclass(frozen=True)
class Matrix:
    made: Mapping[str, Made]  # by network
    said: Said  # by cfn-lint


def make_matrix(fleets: Iterable[Fleet], folder: Path) -> Matrix:
    """Without alarms and rollouts, which do not depend on instances and are tested elsewhere."""
    fleets = list(fleets)
    with (
        patch("nxpipe.stacks.observability.ObserveStack", MagicMock()),
        patch("nxpipe.stacks.rollout.stack.RolloutStack", MagicMock()),
    ):
        made = {network: make(network, fleets, folder / network) for network in NETWORKS}
    return Matrix(made, judged(made))


def judged(made: Mapping[str, Made]) -> Said:
    every = {
        (network, stack): without_name(stack, template)
        for network, value in made.items()
        for stack, template in value.templates.items()
    }

    def called(start: str) -> dict[tuple[str, str], dict[str, Any]]:
        return {at: template for at, template in every.items() if at[1].startswith(start)}

    result: Said = {at: complaints(template, REGION) for at, template in called("all-network").items()}
    for kind in ("all-serve-", "all-train-", "all-storage"):
        result |= complaints_of_alike(called(kind), REGION)
    return result


def make(network: str, fleets: Iterable[Fleet], folder: Path) -> Made:
    folder.mkdir()
    write_locks(folder)
    cdk = new_app(outdir=str(folder / "out"))
    path = folder / "nxpipe.toml"
    path.write_text(project(network, *(fleet for fleet in fleets if fleet.network == network)))
    config = app.deployable(path)
    app.add_stacks(cdk, config, folder)
    guard(cdk, config, folder)
    found = findings(cdk, folder / "out")
    written = (folder / "out").glob("*.template.json")
    return Made({entry.name.removesuffix(".template.json"): json.loads(entry.read_text()) for entry in written}, found)


def findings(cdk: App, out: Path) -> dict[str, list[str]]:
    """The findings by stack, from the report of the failed synthesis."""
    try:
        cdk.synth()
    except RuntimeError as refused:
        if not str(refused).startswith("ValidationFailed"):
            raise
    found: dict[str, list[str]] = {}
    for report in json.loads((out / "validation-report.json").read_text())["pluginReports"]:
        for violation in report["violations"]:
            for at in violation["violatingConstructs"]:
                found.setdefault(at["constructPath"].partition("/")[0], []).append(violation["description"])
    return found


def without_name(stack: str, template: dict[str, Any]) -> dict[str, Any]:
    """The template without fleet names, the only difference between many resources and irrelevant for a linter."""
    for kind in ("serve", "train"):
        name = stack.removeprefix(f"all-{kind}-")
        if name != stack:
            return dict(json.loads(json.dumps(template).replace(name, "fleet")))
    return template
