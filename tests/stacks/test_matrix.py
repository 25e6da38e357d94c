"""Every instance type, however it is bought, in every kind of network, serving and training: the stacks are clean for
all who judge them, or the file is refused in one sentence.

One project holds all fleets of a network that can be made, which are 104: every pair of values in the commit tier, all
of them in the nightly one. Each fleet that cannot be made, of 126, is a project of its own.

The region is us-east-2, for cfn-lint's list of instance types has more of them there than anywhere. It has
trn2u.48xlarge in no region, which is the one thing that it may say.
"""

import json
from pathlib import Path
from typing import Final

import pytest

from nxpipe.pipeline.config import ConfigInvalid
from nxpipe.stacks import app
from tests.iam.takers import hurried, takes
from tests.iam.templates import Templates
from tests.stacks.matrix import NETWORKS, PAIRWISE, POSSIBLE, REFUSED, Fleet, Matrix, project

SHARED: Final = {"all-network", "all-storage"}
UNKNOWN_TO_CFN_LINT: Final = "trn2u.48xlarge"


@pytest.mark.parametrize(
    "fleet",
    [fleet if fleet in PAIRWISE else pytest.param(fleet, marks=pytest.mark.slow) for fleet in POSSIBLE],
    ids=str,
)
def test_a_fleet_that_can_be_is_made_and_neither_the_guards_nor_cfn_lint_have_anything_to_say(
    fleet: Fleet, matrix: Matrix
) -> None:
    there = matrix.made[fleet.network]
    assert fleet.type in json.dumps(there.templates[fleet.stack])
    assert there.findings.get(fleet.stack, []) == []
    by_cfn_lint = matrix.said.get((fleet.network, fleet.stack), [])
    if fleet.type == UNKNOWN_TO_CFN_LINT:
        assert {entry.partition(" ")[0] for entry in by_cfn_lint} == {"E3628"}, by_cfn_lint
    else:
        assert by_cfn_lint == []


@pytest.mark.parametrize("network", NETWORKS)
def test_what_the_fleets_share_is_clean_beside_all_of_them(network: str, matrix: Matrix) -> None:
    """Zones are listed, so that no subnet ever moves: W3010 would have them found when the stack is made."""
    assert set(matrix.made[network].templates) - {fleet.stack for fleet in POSSIBLE} == SHARED
    for stack in SHARED:
        assert matrix.made[network].findings.get(stack, []) == []
        assert [entry for entry in matrix.said.get((network, stack), []) if not entry.startswith("W3010")] == []


@pytest.mark.parametrize("network", NETWORKS)
def test_every_resource_that_names_a_role_waits_for_its_policies(network: str, matrix: Matrix) -> None:
    templates = Templates(matrix.made[network].templates)
    assert len(list(takes(templates))) > len(SHARED)
    assert list(hurried(templates)) == []


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
