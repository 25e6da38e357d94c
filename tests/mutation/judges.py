"""The detectors of a mutant: the validator, the hostile memory, the race check, and the outputs."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

import numpy as np

from nxpipe.emulator.core.faults import Race
from nxpipe.emulator.errors import ExecutionError, IndexOutOfRange
from nxpipe.emulator.isa.legality import faults
from nxpipe.emulator.isa.program import Program
from tests.mutation.changes import Mutant
from tests.mutation.proofs import Walk, proof
from tests.mutation.samples import DRAWS, Sample, Tensors, samples

# Samples and orders of engines.
RUNS = ((1, "hostile"), (1, "random:1"), (1, "random:2"), (2, "hostile"), (3, "hostile"), (4, "hostile"))


class Judge(StrEnum):
    VALIDATOR = "validator"
    MEMORY = "hostile memory"
    RACES = "race check"
    OUTPUTS = "outputs"


@dataclass(frozen=True)
class Verdict:
    """The detector of a mutant and its message; or the proof that it is equivalent."""

    mutant: Mutant
    judge: Judge | None
    said: str
    proof: str = ""

    @property
    def is_missed(self) -> bool:
        return self.judge is None and not self.proof


def judged(mutant: Mutant) -> Verdict:
    program = mutant.program
    found = caught(mutant.sample, program)
    if found:
        return Verdict(mutant, *found)
    return Verdict(mutant, None, "", proof(walked(mutant.sample.name), program))


def caught(sample: Sample, program: Program) -> tuple[Judge, str] | None:
    """The detector and its message; None if the mutant is missed."""
    illegal = faults(program)
    if illegal:
        return Judge.VALIDATOR, str(illegal[0])
    for seed, order in RUNS:
        try:
            ranks = sample.found(program, seed, order)
        except Race as race:
            return Judge.RACES, str(race)
        except ExecutionError as fault:
            return Judge.MEMORY, str(fault)
        for outputs in ranks:
            wrong = _wrong(sample, seed, outputs)
            if wrong:
                return Judge.OUTPUTS, wrong
    accepted = [index for index in sample.outside if _accepts(sample, program, index)]
    return (Judge.OUTPUTS, f"there are results for the indices {accepted}, which are refused") if accepted else None


def _accepts(sample: Sample, program: Program, index: int) -> bool:
    """True if an index out of range has a result, in the middle of the indices or at their end."""
    for place in (0.5, 1.0):
        try:
            sample.found(program, 1, "hostile", (index, place))
        except IndexOutOfRange:
            continue
        return True
    return False


@cache
def walked(name: str) -> Walk:
    """The walk of a sample's emitted program."""
    return Walk(next(program for sample, program in samples() if sample.name == name))


@cache
def _expected(name: str) -> Mapping[int, Tensors]:
    sample = next(value for value, _ in samples() if value.name == name)
    return {seed: sample.expected(seed) for seed in DRAWS}


def _wrong(sample: Sample, seed: int, found: Tensors) -> str:
    allowed = sample.noise * DRAWS[seed] / DRAWS[1]
    for name, expected in _expected(sample.name)[seed].items():
        with np.errstate(all="ignore"):
            apart = np.abs(found[name].astype(np.float64) - expected)
        if not (apart <= allowed).all():
            return f"{name} is off by up to {np.nanmax(apart, initial=0):.3g}, where {allowed:.3g} is allowed"
    return ""
