import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from nxpipe.pipeline.models.thresholds import Thresholds
from nxpipe.pipeline.verify.evidence import compare

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
