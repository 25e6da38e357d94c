"""The chain from a description to a device and back, with stand-ins for compiler and device: `make demo-hardware`."""

import pytest

from tests.neuronx.demo import DemoResult, demo

pytestmark = pytest.mark.slow  # a minute of processor time

PROGRAMS = ["decode-b1-s16", "prefill-b1-s16"]


@pytest.fixture(scope="module")
def result() -> DemoResult:
    return demo(lambda _: None)


def test_a_version_has_evidence_of_each_kind_that_was_collected(result: DemoResult) -> None:
    assert result.kinds == ["device", "emulated", "xla"]


def test_new_weights_and_a_rollback_compile_nothing(result: DemoResult) -> None:
    assert result.compilations == [2, 2, 2]


@pytest.mark.parametrize(
    ("gate", "code", "reason"),
    [
        ("unsigned", 23, "requires signed artifacts"),
        ("no device evidence", 23, "nxpipe prove"),
        ("device too far off", 12, "verification failed: decode-b1-s16"),
        ("evidence of another version", 23, "its device evidence is not signed by the keys that its channel trusts"),
    ],
)
def test_each_gate_refuses_with_its_reason(result: DemoResult, gate: str, code: int, reason: str) -> None:
    ran = result.refused[gate]
    assert ran.code == code, ran.err
    assert reason in ran.err


def test_an_instance_gets_neffs_and_interfaces_and_no_program_or_graph_of_the_emulator(result: DemoResult) -> None:
    programs = [f"executables/{name}.{suffix}" for name in PROGRAMS for suffix in ("json", "neff")]
    expected = [".nxpipe", *programs, "files/config.json", "manifest.json", "weights.safetensors"]
    assert result.served == [expected] * 3


def test_what_an_instance_fetched_gives_the_golden_answers_after_each_change_of_the_channel(
    result: DemoResult,
) -> None:
    assert result.replayed == [PROGRAMS] * 3
    assert result.rolled_back == result.versions[0] != result.versions[1]
