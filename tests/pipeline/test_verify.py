from collections.abc import Callable
from dataclasses import fields, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nxpipe.artifact_store import Store, open_store
from nxpipe.artifact_store.builds import StepResult
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.evidence import Compared, Timing
from nxpipe.emulator.capture.request import ModelOutputs
from nxpipe.emulator.executable.interface import Interface
from nxpipe.emulator.executable.neff import read_neff
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.thresholds import Deviation, Thresholds, faults_of
from nxpipe.pipeline.util.errors import VerificationFailed
from nxpipe.pipeline.verify import evidence
from nxpipe.pipeline.verify.comparison import Case, Comparison, VariantResult
from nxpipe.pipeline.verify.device import FetchedProgram
from nxpipe.pipeline.verify.evidence import compare
from nxpipe.pipeline.verify.prove import Golden, Proof
from nxpipe.pipeline.verify.replay import compared_run
from tests.neuronx.neff_files import archive, container, members

TENSORS = arrays(np.float32, (3, 4), elements=st.floats(-100, 100, width=32))


@given(value=TENSORS)
def test_equal_answers_do_not_deviate(value: "np.ndarray") -> None:
    (found,) = compare({"y": value}, {"y": value})
    assert found.max_absolute == 0
    assert not found.faults(Thresholds(0.999999, 0))


@given(value=TENSORS, place=st.integers(0, 11), error=st.floats(1, 50))
def test_one_wrong_element_is_seen(value: "np.ndarray", place: int, error: float) -> None:
    wrong = value.copy()
    wrong.flat[place] += np.float32(error)
    (found,) = compare({"y": wrong}, {"y": value})
    assert found.max_absolute == pytest.approx(error, rel=1e-3)
    assert found.faults(Thresholds(-1, found.max_relative * 0.999))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_nan_or_infinity_is_never_within_any_threshold(bad: float) -> None:
    value = np.ones(4, np.float32)
    wrong = value.copy()
    wrong[2] = bad
    (found,) = compare({"y": wrong}, {"y": value})
    assert len(found.faults(Thresholds(-1, 1e30))) == 2


def test_an_answer_of_the_opposite_direction_has_cosine_minus_one() -> None:
    (found,) = compare({"y": -np.ones(3)}, {"y": np.ones(3)})
    assert found.cosine == pytest.approx(-1)


def test_answers_of_different_shapes_are_not_compared() -> None:
    with pytest.raises(ValueError, match=r"shape \(2,\), and the reference has \(3,\)"):
        compare({"y": np.ones(2)}, {"y": np.ones(3)})


@given(logits=TENSORS, shift=st.floats(-5, 5))
def test_the_divergence_of_a_distribution_from_itself_is_zero_and_does_not_see_a_shift(
    logits: "np.ndarray", shift: float
) -> None:
    (found,) = compare({"logits": logits + np.float32(shift)}, {"logits": logits})
    assert found.kl == pytest.approx(0, abs=1e-5)


def test_the_divergence_is_that_of_the_textbook() -> None:
    p, q = np.array([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]]), np.array([[0.4, 0.4, 0.2], [0.7, 0.2, 0.1]])
    (found,) = compare({"logits": np.log(q) + 3}, {"logits": np.log(p)})
    assert found.kl == pytest.approx(float((p * np.log(p / q)).sum() / 2), rel=1e-6)
    assert found.top1 == 0.5


def test_only_logits_are_read_as_distributions() -> None:
    value = np.ones((2, 3), np.float32)
    (found,) = compare({"last_hidden_state": value}, {"last_hidden_state": value})
    assert (found.kl, found.top1) == (None, None)


def test_thresholds_on_distributions_hold_when_asked_for() -> None:
    ours, reference = np.array([[1.0, 2.0], [0.0, 5.0]]), np.array([[2.0, 1.0], [0.0, 5.0]])
    (found,) = compare({"logits": ours}, {"logits": reference})
    lax = Thresholds(-1, 10)
    assert not found.faults(lax)
    assert [fault.split()[0] for fault in found.faults(Thresholds(-1, 10, max_kl=0.1, min_top1=0.9))] == ["KL", "top-1"]


# A figure that is no number: JSON has none, and no comparison passes by it.

NEAR = Deviation("logits", 0.0, 0.0, 0.0, 1.0, kl=0.0, top1=1.0)
FIGURES = [each.name for each in fields(Deviation) if each.name != "output"]
ABSENT = Blob(sha256="0" * 64, size=0)
LAX = Thresholds(0.5, 0.5)


def by_build(deviation: Deviation, _: Store, __: Path) -> Compared:
    files = [{"path": path, "blob": ABSENT.model_dump()} for path in ("answers", "inputs")]
    facts = evidence._metadata([deviation], "PyTorch fp32", {})
    result = StepResult.model_validate({"key": "1" * 64, "files": files, "facts": facts, "write_id": "2" * 32})
    return evidence.compared(Shape("forward", 1, 8), result)


def by_verify(deviation: Deviation, store: Store, _: Path) -> Compared:
    answer = ModelOutputs({"logits": np.ones(2, np.float32)}, {})
    case = Case("forward-b1-s8", "random inputs", [{}], {"none": lambda _, __: ([answer], None)}, {})
    run = VariantResult("none", (deviation,))
    return compared_run(case, Comparison(case.program, case.input_source, "PyTorch fp32", (run,), ()), store)


def by_prove(deviation: Deviation, store: Store, folder: Path) -> Compared:
    neff = read_neff(BytesIO(container(archive(members([])))))
    golden = by_build(NEAR, store, folder)
    program = FetchedProgram("forward-b1-s8", folder, neff, Interface(1, (), ()), {})
    (answers := folder / "answers").write_bytes(b"")
    timing = Timing(clock="device", runs=100, p50_ms=1.0, p99_ms=1.0)
    described = {"family": "trn2", "implementation": "nrtpy", "version": "2.34"}
    return Proof(program, Golden(golden, store), (deviation,), timing, answers).stored(store, described)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("path", [by_build, by_verify, by_prove])
def test_a_divergence_that_is_no_number_is_absent_from_evidence_and_beyond_every_limit(
    path: Callable[[Deviation, Store, Path], Compared], bad: float, tmp_path: Path
) -> None:
    store = open_store(str(tmp_path / "store"))
    stored = path(replace(NEAR, kl=bad), store, tmp_path)
    assert stored.outputs[0].kl is None
    assert list(faults_of([stored], LAX)) == []  # nothing limits it
    (fault,) = faults_of([stored], replace(LAX, max_kl=1e30))
    assert "KL divergence is absent" in fault


@pytest.mark.parametrize("figure", [name for name in FIGURES if name != "kl"])
@pytest.mark.parametrize("path", [by_build, by_verify, by_prove])
def test_no_other_figure_that_is_no_number_becomes_evidence(
    path: Callable[[Deviation, Store, Path], Compared], figure: str, tmp_path: Path
) -> None:
    change: dict[str, Any] = {figure: np.nan}
    with pytest.raises(VerificationFailed, match=f"logits has {figure} nan"):
        path(replace(NEAR, **change), open_store(str(tmp_path / "store")), tmp_path)


@pytest.mark.parametrize("figure", ["max_relative", "cosine", "kl", "top1"])
def test_a_limited_figure_that_is_no_number_is_a_fault(figure: str) -> None:
    change: dict[str, Any] = {figure: np.nan}
    limits = Thresholds(-1e30, 1e30, max_kl=1e30, min_top1=-1e30)
    assert not NEAR.faults(limits)
    assert len(replace(NEAR, **change).faults(limits)) == 1
