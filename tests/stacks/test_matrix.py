"""Every instance type, however it is bought, in every kind of network, serving and training: the stacks are clean for
all who judge them, or the file is refused in one sentence.

One project holds all fleets of a network that can be made, which are 104; each that cannot, of 126, is a project of its
own.

The region is us-east-2, for cfn-lint's list of instance types has more of them there than anywhere. It has
trn2u.48xlarge in no region, which is the one thing that it may say.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Final, TypeAlias
from unittest.mock import MagicMock

import pytest
from aws_cdk import App

import app
from emulator.hardware import INSTANCES
from pipeline.config import ConfigInvalid
from stacks.guards import guard
from tests.stacks.linting import complaints, complaints_of_alike
from tests.stacks.local import REGION, new_app
from tests.stacks.whole import CERTIFICATE, write_locks

PURPOSES: Final = ("serving", "training")
CAPACITIES: Final = {
    "on-demand": '{ kind = "on-demand" }',
    "spot": '{ kind = "spot" }',
    "reservation": '{ kind = "reservation", id = "cr-0a1b2c3d4e5f60718" }',
    "capacity-block": (
        '{ kind = "capacity-block", id = "cr-0b1b2c3d4e5f60718",'
        " start = 2026-12-01T11:30:00Z, end = 2026-12-08T11:30:00Z }"
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
SHARED: Final = {"all-cache", "all-network", "all-storage"}
UNKNOWN_TO_CFN_LINT: Final = "trn2u.48xlarge"


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
        own = {
            "serving": f'size = {{ min = 1, max = 2 }}\ncertificate = "{CERTIFICATE}"',
            "training": f'zone = "{REGION}a"\nnodes = {nodes}',
        }[self.purpose]
        return f"""
[[fleets]]
kind = "{self.purpose}"
name = "{self.name}"
model = "{INSTANCES[self.type].compiler_target}"
channel = "production"
instance_types = ["{self.type}"]
capacity = {CAPACITIES[self.capacity]}
{own}
"""

    @property
    def sampled(self) -> bool:
        """Where a type can do both, the closed network has both; of the open ones, each has one."""
        both = INSTANCES[self.type].compiler_target != "inf2"
        return not both or self.network == "closed" or (self.network == "nat") == (self.purpose == "training")

    @property
    def refused(self) -> str | None:
        """The key that is wrong, as EC2 and the Neuron documentation have it."""
        if self.type.startswith("trn3"):  # racks, which have no name as an instance
            return "instance_types[0]"
        if self.purpose == "training" and self.type.startswith("inf2"):  # no collectives over instances
            return "instance_types[0]"
        if self.capacity == "capacity-block" and self.type not in ("trn1.32xlarge", "trn2.48xlarge", "trn2u.48xlarge"):
            return "capacity"
        if self.capacity == "spot" and self.type == "trn2u.48xlarge":
            return "capacity"
        return None


FLEETS: Final = [Fleet(*each) for each in product(PURPOSES, INSTANCES, CAPACITIES, NETWORKS)]
POSSIBLE: Final = [fleet for fleet in FLEETS if fleet.refused is None and fleet.sampled]
REFUSED: Final = [fleet for fleet in FLEETS if fleet.refused is not None]


def project(network: str, *fleets: Fleet) -> str:
    """All models are the same; it is the target that fleets ask for."""
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
    """What was made for one network, and what the guards found in each stack."""

    templates: Mapping[str, dict[str, Any]]
    findings: Mapping[str, list[str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Made]]:
    """Without alarms and rollouts, which know nothing of instances, and whose tests are elsewhere."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(app, "ObserveStack", MagicMock())
        patched.setattr(app, "RolloutStack", MagicMock())
        yield {network: make(network, tmp_path_factory.mktemp(network)) for network in NETWORKS}


@pytest.fixture(scope="module")
def said(made: dict[str, Made]) -> Said:
    """By cfn-lint."""
    every = {
        (network, stack): without_name(stack, template)
        for network, each in made.items()
        for stack, template in each.templates.items()
    }
    found = {at: complaints(template, REGION) for at, template in every.items() if at[1] == "all-network"}
    for kind in ("all-serve-", "all-train-", "all-storage", "all-cache"):
        found |= complaints_of_alike({at: each for at, each in every.items() if at[1].startswith(kind)}, REGION)
    return found


def make(network: str, folder: Path) -> Made:
    cdk = new_app(builtin_cloud_formation_validation=False, outdir=str(folder / "out"))
    write_locks(folder)
    path = folder / "nxpipe.toml"
    path.write_text(project(network, *(fleet for fleet in POSSIBLE if fleet.network == network)))
    config = app.deployable(path)
    app.add_stacks(cdk, config, folder)
    guard(cdk, config, folder)
    found = findings(cdk, folder / "out")
    written = (folder / "out").glob("*.template.json")
    return Made({each.name.removesuffix(".template.json"): json.loads(each.read_text()) for each in written}, found)


def findings(cdk: App, out: Path) -> dict[str, list[str]]:
    """By stack. They fail the synthesis as a whole, and stand in its report."""
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
    """What fleets are called is no matter of a linter's, and is all that many of their resources differ in."""
    for kind in ("serve", "train"):
        name = stack.removeprefix(f"all-{kind}-")
        if name != stack:
            return dict(json.loads(json.dumps(template).replace(name, "fleet")))
    return template


@pytest.mark.parametrize("fleet", POSSIBLE, ids=str)
def test_a_fleet_that_can_be_is_made_and_neither_the_guards_nor_cfn_lint_have_anything_to_say(
    fleet: Fleet, made: dict[str, Made], said: Said
) -> None:
    there = made[fleet.network]
    assert fleet.type in json.dumps(there.templates[fleet.stack])
    assert there.findings.get(fleet.stack, []) == []
    by_cfn_lint = said.get((fleet.network, fleet.stack), [])
    if fleet.type == UNKNOWN_TO_CFN_LINT:
        assert {each.partition(" ")[0] for each in by_cfn_lint} == {"E3628"}, by_cfn_lint
    else:
        assert by_cfn_lint == []


@pytest.mark.parametrize("network", NETWORKS)
def test_what_the_fleets_share_is_clean_beside_all_of_them(network: str, made: dict[str, Made], said: Said) -> None:
    """Zones are listed, so that no subnet ever moves: W3010 would have them found when the stack is made."""
    assert set(made[network].templates) - {fleet.stack for fleet in POSSIBLE} == SHARED
    for stack in SHARED:
        assert made[network].findings.get(stack, []) == []
        assert [each for each in said.get((network, stack), []) if not each.startswith("W3010")] == []


@pytest.mark.parametrize("fleet", REFUSED, ids=str)
def test_a_fleet_that_cannot_be_is_refused_in_one_sentence_with_the_key_and_what_to_do(
    fleet: Fleet, tmp_path: Path
) -> None:
    path = tmp_path / "nxpipe.toml"
    path.write_text(project(fleet.network, fleet))
    with pytest.raises(ConfigInvalid) as told:
        app.deployable(path)
    (said,) = str(told.value).splitlines()
    key, _, what = said.removeprefix(f"{path}:").partition(": ")[2].partition(": found ")
    assert key == f"fleets[0].{fleet.refused}"
    assert " expected " in what
