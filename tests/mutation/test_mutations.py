"""A wrong program does not pass: what is changed in one place is noticed, or shown to be no change."""

import pytest

from tests.mutation.changes import KINDS, Mutant, drawn
from tests.mutation.judges import Judge, caught, judged, walked
from tests.mutation.proofs import proof
from tests.mutation.redundant import redundant
from tests.mutation.samples import samples

SEED = 20
NAMES = ("linear", "norm", "softmax", "attention", "layers", "gather", "reduce", "ranks", "meetings")
MISSED_AT_MOST = 0.05


@pytest.mark.sample(3)
@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_a_program_as_it_is_emitted_passes_every_judge_and_is_proved_to_be_in_order(number: int) -> None:
    sample, program = samples()[number]
    assert sample.name == NAMES[number]
    assert caught(sample, program) is None
    assert walked(sample.name).in_order


@pytest.mark.sample(2)
def test_what_a_judge_of_order_or_of_results_catches_is_never_proved_to_be_no_change() -> None:
    for mutant in drawn(1, SEED + 2):
        found = caught(mutant.sample, mutant.program)
        if found and found[0] in (Judge.RACES, Judge.OUTPUTS):
            assert not proof(walked(mutant.sample.name), mutant.program), mutant


def _require_noticed(mutants: list[Mutant]) -> None:
    verdicts = [judged(mutant) for mutant in mutants]
    missed = [str(verdict.mutant) for verdict in verdicts if verdict.is_missed]
    assert len(missed) <= MISSED_AT_MOST * len(verdicts), missed
    assert {verdict.judge for verdict in verdicts} >= set(Judge)
    # Waits are a matter of proof: nobody may find that one is missing because a result happened to be wrong, and what
    # the race check lets pass, another proof must bear out.
    of_waits = [verdict for verdict in verdicts if verdict.mutant.is_wait]
    assert not [str(verdict.mutant) for verdict in of_waits if verdict.is_missed or verdict.judge is Judge.OUTPUTS]


def test_of_forty_small_changes_to_programs_hardly_one_goes_unnoticed() -> None:
    mutants = drawn(2, SEED)
    assert len(mutants) == 2 * len(KINDS) >= 40
    _require_noticed(mutants)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_of_hundreds_of_small_changes_to_programs_hardly_one_in_twenty_goes_unnoticed() -> None:
    mutants = drawn(25, SEED + 1)
    assert len(mutants) >= 300
    _require_noticed(mutants)


def test_no_wait_of_an_emitted_program_says_what_others_say() -> None:
    for sample, program in samples():
        assert not redundant(program), sample.name
