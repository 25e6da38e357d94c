import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pipeline.verify import compare

TENSORS = arrays(np.float32, (3, 4), elements=st.floats(-100, 100, width=32))


@given(value=TENSORS)
def test_equal_answers_do_not_deviate(value: "np.ndarray") -> None:
    (found,) = compare({"y": value}, {"y": value})
    assert found.max_absolute == 0
    assert found.within(min_cosine=0.999999, max_relative_error=0)


@given(value=TENSORS, place=st.integers(0, 11), error=st.floats(1, 50))
def test_one_wrong_element_is_seen(value: "np.ndarray", place: int, error: float) -> None:
    wrong = value.copy()
    wrong.flat[place] += np.float32(error)
    (found,) = compare({"y": wrong}, {"y": value})
    assert found.max_absolute == pytest.approx(error, rel=1e-3)
    assert not found.within(min_cosine=-1, max_relative_error=found.max_relative * 0.999)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_nan_or_infinity_is_never_within_any_threshold(bad: float) -> None:
    value = np.ones(4, np.float32)
    wrong = value.copy()
    wrong[2] = bad
    (found,) = compare({"y": wrong}, {"y": value})
    assert not found.within(min_cosine=-1, max_relative_error=1e30)


def test_an_answer_of_the_opposite_direction_has_cosine_minus_one() -> None:
    (found,) = compare({"y": -np.ones(3)}, {"y": np.ones(3)})
    assert found.cosine == pytest.approx(-1)


def test_answers_of_different_shapes_are_not_compared() -> None:
    with pytest.raises(ValueError, match=r"\(2,\) beside a reference of \(3,\)"):
        compare({"y": np.ones(2)}, {"y": np.ones(3)})
