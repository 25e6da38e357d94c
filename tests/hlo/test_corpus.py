"""The corpus of probes: its modules are those of our emission, its answers are right, and its bytes are the same
everywhere."""

import os
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from nxpipe.emulator.hlo.assumptions import assumptions
from nxpipe.emulator.hlo.constraints import TARGETS, violations
from nxpipe.emulator.hlo.corpus import corpus, corpus_digest, matching
from nxpipe.emulator.hlo.probe import Probe
from tests.conftest import ROOT

GROUPS = sorted({probe.name.split("/")[0] for probe in corpus()})


def test_names_are_unique_and_each_probe_has_an_assumption_and_a_fallback() -> None:
    assert [name for name, count in Counter(probe.name for probe in corpus()).items() if count > 1] == []
    for probe in corpus():
        assert probe.assumption, probe.name
        assert probe.fallback, probe.name


def test_a_module_violates_no_rule_but_the_one_that_its_question_is_about() -> None:
    for probe in corpus():
        found = {each.rule for target in TARGETS for each in violations(probe.module, target)}
        assert found == ({probe.breaks} if probe.breaks else set()), probe.name


def test_only_questions_break_rules() -> None:
    assert not any(probe.breaks for probe in assumptions())
    assert not any(probe.is_question for probe in assumptions())


def test_each_opcode_and_each_type_that_assumptions_use_has_one_probe() -> None:
    proofs = Counter(feature for probe in assumptions() for feature in probe.proves)
    used = {feature for probe in assumptions() for feature in probe.features}
    assert {feature: proofs[feature] for feature in used if proofs[feature] != 1} == {}


def test_every_opcode_of_the_reference_page_has_a_probe() -> None:
    page = (ROOT / "docs/reference/hlo.md").read_text().split("## Opcodes")[1].split("```")[1]
    opcodes = {word.replace("_", "-") for word in page.split()[1:]}
    names = {"broadcast-in-dim": "broadcast", "dot-general": "dot"}
    proven = {feature for probe in assumptions() for feature in probe.proves}
    assert [each for each in opcodes if f"opcode {names.get(each, each)}" not in proven] == []


def test_the_bytes_are_equal_in_another_process_with_another_hash_seed() -> None:
    code = "from nxpipe.emulator.hlo.corpus import corpus_digest; print(corpus_digest())"
    environment = os.environ | {"PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == corpus_digest(), done.stderr


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_is_a_pattern(group: str) -> None:
    assert matching(group) == matching(f"{group}/*") == [p for p in corpus() if p.name.startswith(f"{group}/")]


@pytest.mark.sample(8)
@pytest.mark.parametrize("group", GROUPS)
def test_xla_computes_the_expected_outputs(group: str) -> None:
    for probe in matching(group):
        outputs = _on_xla(probe)
        assert max(probe.distance(rank, found) for rank, found in enumerate(outputs)) <= probe.tolerance, probe.name


def _on_xla(probe: Probe) -> list[dict[str, np.ndarray]]:
    from nxpipe.emulator.hlo.schema import ModuleField
    from nxpipe.emulator.hlo.wire import Message
    from tests.hlo.xla_cpu import LoadedProto

    plain = Message.parse(probe.twin or probe.module)
    plain.remove(ModuleField.INPUT_OUTPUT_ALIAS)
    program = LoadedProto(plain.encode(), probe.world)
    current = [dict(arrays) for arrays in probe.inputs]
    for _ in range(probe.runs):
        rows = program.run([list(arrays.values()) for arrays in current])
        outputs = [dict(zip(probe.outputs[0], row, strict=True)) for row in rows]
        for arrays, own in zip(current, outputs, strict=True):
            arrays |= {name: own[output] for output, name in probe.aliases.items()}
    for found, expected in zip(outputs, probe.outputs, strict=True):
        assert {name: (a.dtype, a.shape) for name, a in found.items()} == {
            name: (a.dtype, a.shape) for name, a in expected.items()
        }
    return outputs
