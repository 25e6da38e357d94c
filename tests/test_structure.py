"""The shape of the product as benchmarks/structure.py measures it: size, imports, layers and names of its modules."""

import sys
from collections.abc import Mapping

import pytest

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))  # scripts, which are no package
import structure

Modules = Mapping[str, structure.Module]


@pytest.fixture(scope="module")
def modules() -> Modules:
    return structure.read_product(ROOT)


def test_no_public_class_name_is_defined_twice_in_a_package(modules: Modules) -> None:
    assert structure.duplicates(modules) == []


def test_no_module_is_named_by_a_participle_or_a_pronoun(modules: Modules) -> None:
    assert [name for name in modules if structure.is_no_noun(name.rpartition(".")[2])] == []


@pytest.mark.parametrize(
    ("name", "is_no_noun"),
    [("asked", True), ("beginning", True), ("itself", True), ("lowering", False), ("load_balancer", False)],
)
def test_a_participle_and_a_pronoun_are_told_from_nouns(name: str, is_no_noun: bool) -> None:
    assert structure.is_no_noun(name) is is_no_noun


def test_no_import_is_a_cycle_not_even_within_a_function(modules: Modules) -> None:
    assert structure.cycles(structure.edges_of(modules), ("module", "function")) == []


def test_click_is_imported_under_pipeline_cli_alone(modules: Modules) -> None:
    assert structure.click_importers(modules) == []


def test_no_figure_of_the_structure_exceeds_its_limit(modules: Modules) -> None:
    assert structure.exceeded(structure.measure(modules, ROOT, None)["figures"]) == []
