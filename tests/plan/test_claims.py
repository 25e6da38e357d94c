"""Claims: what is impossible by documents, implausible by predictions and measurements, and what contradicts itself."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.pipeline.config.prices import load_prices
from nxpipe.pipeline.plan.claims import Baseline, Claim, Credibility, claims_of, examine
from nxpipe.pipeline.util.errors import InputInvalid
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]

ROOT = Path(__file__).parents[2]
LLAMA = "meta-llama/Llama-3.1-8B"
ORDER = list(Credibility)


def verdict(**fields: object) -> Credibility:
    return examine(Claim.model_validate({"instance": "inf2.xlarge", **fields})).verdict


def test_the_page_shows_what_the_command_prints(nxpipe: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    answer = nxpipe("claim", str(ROOT / "docs" / "claims.toml"))
    page = (ROOT / "docs" / "claims.md").read_text()
    shown = re.search(r"```text\n(.*?)```", page, re.DOTALL)
    assert shown is not None
    assert shown[1].rstrip() == answer.out.rstrip()
    assert answer.code == 0


def test_claims_that_were_made_in_public_get_the_verdicts_that_arithmetic_gives() -> None:
    examined = {each.text: examine(each) for each in claims_of(ROOT / "docs" / "claims.toml")}
    verdicts = {text.split(":")[0].split(",")[0]: each.verdict for text, each in examined.items()}
    assert verdicts["Llama-2-70B"] is Credibility.IMPOSSIBLE
    assert verdicts["190 TFLOPS BF16 per NeuronCore-v2"] is Credibility.IMPOSSIBLE
    assert verdicts["Llama-4-Scout on inf2.48xlarge 2"] is Credibility.IMPOSSIBLE
    assert verdicts["Llama-3.1-8B"] is Credibility.IMPLAUSIBLE
    assert verdicts["trn2.48xlarge fine-tunes Llama-3 70B at 3"] is Credibility.POSSIBLE
    assert verdicts["trn1"] is Credibility.POSSIBLE


@given(st.floats(1, 2000), st.floats(1, 2000), st.integers(1, 64))
def test_a_faster_claim_is_never_more_believable(one: float, other: float, batch: int) -> None:
    slow, fast = sorted((one, other))
    verdicts = [verdict(model=LLAMA, batch=batch, tokens_per_second=rate) for rate in (slow, fast)]
    assert ORDER.index(verdicts[0]) <= ORDER.index(verdicts[1])


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_a_cheaper_claim_is_never_more_believable(one: float, other: float) -> None:
    cheap, dear = sorted((one, other))
    verdicts = [verdict(model=LLAMA, batch=1, tokens_per_second=30, dollars_per_million=each) for each in (cheap, dear)]
    assert ORDER.index(verdicts[0]) >= ORDER.index(verdicts[1])


@given(st.floats(1, 1e5))
def test_a_rate_beyond_the_memory_floor_is_impossible_and_within_it_is_not(rate: float) -> None:
    """One step reads the 7.5e9 parameters that a token uses: in 8 bits, at 820 GB/s."""
    floor = 820e9 / 7_504_658_432
    found = verdict(model=LLAMA, batch=1, tokens_per_second=rate)
    assert (found is Credibility.IMPOSSIBLE) == (rate > floor)


@given(st.floats(1e8, 1e12), st.floats(1, 1e7), st.integers(1, 64))
def test_a_training_beyond_the_peak_rate_is_impossible(parameters: float, rate: float, instances: int) -> None:
    found = examine(
        Claim(
            what="training",
            instance="trn1.32xlarge",
            instances=instances,
            parameters=parameters,
            tokens_per_second=rate,
        )
    )
    beyond = 6 * round(parameters) * rate > instances * 3040e12
    no_room = round(parameters) * 2 > instances * 512 * 2**30
    assert (found.verdict is Credibility.IMPOSSIBLE) == (beyond or no_room)


def test_a_cost_is_compared_with_every_known_way_of_buying_and_dated() -> None:
    found = examine(Claim(model=LLAMA, instance="inf2.xlarge", batch=1, tokens_per_second=30, dollars_per_million=7.02))
    (cost,) = (step for step in found.steps if step.text.startswith("cost:"))
    price = load_prices().price("us-east-1", "inf2.xlarge")
    assert price is not None
    assert f"${price.hourly / (30 * 3600) * 1e6:,.2f} on-demand" in cost.text
    assert str(price.date) in cost.text
    assert "reserved-3y" in cost.text


def test_a_saving_that_the_prices_do_not_give_is_said_with_the_price_that_would() -> None:
    baseline = Baseline(instance="p4d.24xlarge", tokens_per_second=800, cheaper=0.42)
    claim = Claim(
        model="meta-llama/Llama-2-70b-hf", instance="inf2.48xlarge", tp=24, batch=1, tokens_per_second=20,
        dollars_per_million=6.55, baseline=baseline,
    )  # fmt: skip
    (compared,) = (step for step in examine(claim).steps if step.text.startswith("baseline:"))
    assert compared.verdict is Credibility.IMPLAUSIBLE
    assert "$32.52 an hour" in compared.text


def test_an_unknown_price_is_said_and_never_counted_as_zero() -> None:
    claim = Claim(
        model=LLAMA, instance="trn2u.48xlarge", tp=4, batch=1, tokens_per_second=30, dollars_per_million=0.001
    )
    (cost,) = (step for step in examine(claim).steps if step.text.startswith("cost:"))
    assert cost.text == "cost: no price of trn2u.48xlarge is known in us-east-1"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--instance", "inf2.larg", "--tokens-per-second", "5", "--model-id", LLAMA], "did you mean inf2.xlarge"),
        (["--instance", "inf2.xlarge", "--tokens-per-second", "5", "--model-id", "meta-llama/Llama-3.1-8"], "did you"),
        (["--instance", "inf2.xlarge", "--tokens-per-second", "5"], "it names no model"),
        (["--instance", "inf2.xlarge", "--model-id", LLAMA], "needs tokens_per_second"),
        ([], "name a FILE with claims"),
    ],
)
def test_what_is_missing_is_said_in_one_sentence(nxpipe: InProcess, arguments: list[str], said: str) -> None:
    answer = nxpipe("claim", *arguments)
    assert answer.code == 2
    assert said in answer.err
    assert answer.out == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("claims = 3", "no [[claims]]"),
        ('[[claims]]\ninstance = "inf2.xlarge"\nbatch = 0\n', "claim 1: batch"),
        ('[[claims]]\ninstance = "inf2.xlarge"\nbacth = 1\n', "claim 1: bacth"),
        ("[[claims]]\n[[claims", "no [[claims]]"),
    ],
)
def test_a_malformed_file_is_refused_with_the_place(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "claims.toml"
    file.write_text(text)
    with pytest.raises(InputInvalid, match=re.escape(said)):
        claims_of(file)
