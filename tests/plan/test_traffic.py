"""Traffic: distributions as people type them, and logs in the forms that are common."""

import json
import re
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.pipeline.plan.traffic import Arrivals, LengthDistribution, Request, Traffic, read_log
from nxpipe.pipeline.util.errors import InputInvalid

LENGTHS = LengthDistribution.parse("lognormal:1k,0.6"), LengthDistribution.parse("exponential:200")


@pytest.mark.parametrize(
    ("text", "mean"),
    [
        *(("512", 512), ("1k", 1000), ("2Ki", 2048), ("1.5k", 1500), ("fixed:7", 7)),
        *(("uniform:100-2000", 1050), ("exponential:300", 300), ("lognormal:800,0.6", 800), ("lognormal:1k,2", 1000)),
    ],
)
def test_lengths_have_the_mean_that_is_written(text: str, mean: float) -> None:
    traffic = Traffic(LengthDistribution.parse(text), LengthDistribution.parse("1"))
    assert fmean(each.prompt for each in traffic.requests(60_000, 1, 1.0)) == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize(
    "text", ["", "many", "-5", "0", "uniform:5", "uniform:9-3", "normal:3,4", "lognormal:8", "1e9"]
)
def test_other_lengths_are_refused_with_examples(text: str) -> None:
    with pytest.raises(InputInvalid, match="lognormal:800"):
        LengthDistribution.parse(text)


@pytest.mark.parametrize(("arrivals", "variation"), [("constant", 0.0), ("poisson", 1.0), ("bursty", 2.0)])
def test_gaps_have_the_rate_and_the_variation_of_their_kind(arrivals: str, variation: float) -> None:
    found = Traffic(*LENGTHS, Arrivals(arrivals)).requests(60_000, 4, 5.0)
    gaps = [later.arrival - each.arrival for each, later in pairwise(found)]
    assert fmean(gaps) == pytest.approx(0.2, rel=0.03)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(variation, abs=0.06)


@given(st.integers(0, 1000), st.floats(0.01, 100), st.integers(1, 50))
def test_a_rate_only_moves_the_same_requests(seed: int, rate: float, count: int) -> None:
    one, other = (Traffic(*LENGTHS).requests(count, seed, each) for each in (1.0, rate))
    assert [(each.prompt, each.output) for each in one] == [(each.prompt, each.output) for each in other]
    assert [each.arrival for each in one] == pytest.approx([each.arrival * rate for each in other])
    assert list(one) == list(Traffic(*LENGTHS).requests(count, seed, 1.0))


MOONCAKE = '{"timestamp": 1000, "input_length": 700, "output_length": 50, "hash_ids": [0, 7]}\n'
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:48.6805900,396,109\n"
)
VLLM = {"input_lens": [10, 20], "output_lens": [3, 4], "start_times": [5.0, 5.5], "ttfts": [0.1, 0.2]}
SHAREGPT = [{"conversations": [{"from": "human", "value": "x" * 40}, {"from": "gpt", "value": "y" * 80}]}]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MOONCAKE * 2, [Request(0.0, 700, 50, 512)] * 2),
        (AZURE, [Request(0.0, 374, 44), Request(2.0, 396, 109)]),
        (json.dumps(VLLM), [Request(0.0, 10, 3), Request(0.5, 20, 4)]),
        (json.dumps(SHAREGPT), [Request(0.0, 10, 20)]),
        ('{"prompt_tokens": 5, "completion_tokens": 6}\n\n{"prompt_tokens": 7, "completion_tokens": 8}\n',
         [Request(0.0, 5, 6), Request(0.0, 7, 8)]),
        ('[{"input_len": 5, "output_len": 6, "arrival": 3}, {"input_len": 5, "output_len": 6, "arrival": 1.5}]',
         [Request(-1.5, 5, 6), Request(0.0, 5, 6)]),
        ("prompt_tokens,output_tokens\n5,6\n", [Request(0.0, 5, 6)]),
        ("timestamp,input_length,output_length\n0.25,5,6\n0.75,7,8\n", [Request(0.0, 5, 6), Request(0.5, 7, 8)]),
    ],
)  # fmt: skip
def test_logs_in_common_forms_are_requests(tmp_path: Path, text: str, expected: list[Request]) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    found = read_log(path).log
    assert [(each.prompt, each.output, each.shared) for each in found] == [
        (each.prompt, each.output, each.shared) for each in expected
    ]
    assert [each.arrival for each in found] == pytest.approx([each.arrival for each in expected], abs=1e-6)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the log is empty"),
        ("[]", "no requests"),
        ("3", "no requests"),
        (MOONCAKE + "{broken\n", "line 2 is not JSON"),
        (MOONCAKE + "[1]\n", "line 2"),
        (MOONCAKE + '{"timestamp": 1, "input_length": 0, "output_length": 5}\n', "line 2: input_length is '0'"),
        ('{"timestamp": 1, "output_length": 5}\n', "entry 1: no column input_length"),
        ("a,b\n1,2\n", "line 2: no column input_length"),
        ("prompt_tokens,output_tokens\n5,six\n", "line 2: output_tokens is 'six'"),
        ("time,prompt_tokens,output_tokens\nnoon,5,6\n", "line 2: time is 'noon'"),
        (json.dumps({"input_lens": [1], "output_lens": []}), "--save-detailed"),
        (json.dumps([{"conversations": [{"value": 1}, {"value": 2}]}]), "no text `value`"),
        (json.dumps([7]), "entry 1: '7' is not a request"),
    ],
)
def test_a_malformed_log_is_refused_with_the_place(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(InputInvalid, match=re.escape(said)):
        read_log(path)


def test_a_log_is_repeated_at_its_own_pace_or_at_another(tmp_path: Path) -> None:
    log = Traffic(log=(Request(0.0, 1, 1), Request(1.0, 2, 2), Request(2.0, 3, 3)))
    assert log.rate == 1.0
    found = log.requests(7, 1)
    assert [each.arrival for each in found] == pytest.approx([0, 1, 2, 3, 4, 5, 6])
    assert [each.prompt for each in found] == [1, 2, 3, 1, 2, 3, 1]
    faster = log.requests(7, 1, 2.0)
    assert [each.arrival for each in faster] == pytest.approx([0, 0.5, 1, 1.5, 2, 2.5, 3])
    with pytest.raises(InputInvalid, match="no rate"):
        Traffic(log=(Request(0.0, 1, 1),)).requests(3, 1)
