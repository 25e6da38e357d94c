"""`nxpipe calibrate`: the factor between predicted times and those of device evidence, and `bench --calibration`."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.artifact_store import Store, open_store
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.evidence import DEVICE, Timing
from nxpipe.pipeline.artifacts.calibration import (
    CalibrationReport,
    Measurement,
    calibrate,
    measurements_of,
    read_calibration,
)
from nxpipe.pipeline.util.exit_codes import NOT_FOUND, OK, OVERWRITE, REFUSED, USAGE
from tests.artifact_store.samples import evidence
from tests.pipeline.in_process import InProcess, nxpipe
from tests.pipeline.predicted import name_of, publish

__all__ = ["nxpipe"]

MACHINE = {
    "device": "inf2",
    "instance type": "inf2.xlarge",
    "driver": "2.23.9.0",
    "runtime": "nrtpy 2.34.10.0",
    "compiler": "2.27.5334.0",
}
COMPILER = "a" * 64


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nxpipe.toml").write_text('[project]\nname = "search"\n[store]\nurl = "file://store"\n')
    return tmp_path


@pytest.fixture
def store(here: Path) -> Store:
    return open_store(str(here / "store"))


def proven(
    store: Store,
    note: str,
    times: Mapping[int, tuple[float | None, float]],
    *machines: Mapping[str, str],
    phase: str = "forward",
    target: str = "inf2",
    compiler: str = COMPILER,
    clock: str = "device",
) -> str:
    """The name of a published artifact with times by bucket: predicted ones, and those measured on each machine."""
    inputs = {"note": note, "target": target, "compiler": {"backend": "neuronx", "source": compiler}}
    predicted = {bucket: before for bucket, (before, _) in times.items()}
    published = publish(store, note, predicted, phase=phase, target=target, inputs=inputs)
    for machine in machines:
        document = evidence(store, published.manifest, DEVICE)
        programs = [
            compared.model_copy(
                update={
                    "surroundings": dict(machine),
                    "timing": Timing(clock=clock, runs=100, p50_ms=p50, p99_ms=p50),
                }
            )
            for compared, (_, p50) in zip(document.programs, times.values(), strict=True)
        ]
        store.attest(document.model_copy(update={"programs": tuple(programs)}))
    return name_of(published)


def shown(nxpipe: InProcess, *words: str) -> Any:
    answer = nxpipe(*words, "--json")
    assert answer.code == OK.number, answer.err
    return json.loads(answer.out)


def refused(nxpipe: InProcess, *words: str) -> tuple[int, str]:
    """The exit code, and the only line of the message."""
    answer = nxpipe(*words)
    assert answer.out == ""
    (line,) = answer.err.splitlines()
    return answer.code, line


# The fit

DURATIONS = st.floats(1e-3, 1e5)
PHASES = st.sampled_from(["prefill", "decode"])
SAMPLES = st.lists(st.tuples(PHASES, DURATIONS, DURATIONS), min_size=1, max_size=12)


def measured(samples: Sequence[tuple[str, float, float]], times: float = 1.0) -> list[Measurement]:
    return [
        Measurement(
            artifact="bert@aaaaaa",
            target="inf2",
            cost_model=COMPILER,
            program=f"{phase}-{number}",
            phase=phase,
            predicted_ms=predicted,
            p50_ms=p50 * times,
            clock="device",
            surroundings=MACHINE,
            evidence="e" * 64,
        )
        for number, (phase, predicted, p50) in enumerate(samples)
    ]


def fitted(measurements: Sequence[Measurement]) -> CalibrationReport:
    (report,) = calibrate(measurements)
    return report


@given(SAMPLES, st.floats(0.01, 100))
def test_a_device_that_is_slower_by_a_factor_has_factors_larger_by_it_and_the_same_spreads(
    samples: list[tuple[str, float, float]], times: float
) -> None:
    before, after = fitted(measured(samples)), fitted(measured(samples, times))
    assert before.calibration.phases.keys() == after.calibration.phases.keys()
    for phase, old in before.calibration.phases.items():
        new = after.calibration.phases[phase]
        assert new.factor == pytest.approx(old.factor * times)
        assert new.count == old.count
        assert new.spread == (None if old.count == 1 else pytest.approx(old.spread))
    residuals = [report.residual(each) for report in (before, after) for each in report.measurements]
    assert residuals[: len(samples)] == pytest.approx(residuals[len(samples) :])


@given(st.lists(DURATIONS, min_size=2, max_size=12), st.floats(0.01, 100))
def test_one_factor_that_explains_all_measurements_has_spread_1_and_no_residuals(
    durations: list[float], factor: float
) -> None:
    report = fitted(measured([("decode", each, each * factor) for each in durations]))
    (phase,) = report.calibration.phases.values()
    assert phase.factor == pytest.approx(factor)
    assert phase.spread == pytest.approx(1)
    assert [report.residual(each) for each in report.measurements] == pytest.approx([0] * len(durations))


@given(SAMPLES, st.randoms())
def test_the_order_of_measurements_does_not_matter(samples: list[tuple[str, float, float]], random: Any) -> None:
    measurements = measured(samples)
    shuffled = random.sample(measurements, len(measurements))
    assert fitted(measurements).document() == fitted(shuffled).document()


@given(SAMPLES)
def test_the_residuals_of_a_phase_multiply_to_1_and_have_its_spread(samples: list[tuple[str, float, float]]) -> None:
    report = fitted(measured(samples))
    for name, phase in report.calibration.phases.items():
        logs = [math.log1p(report.residual(each)) for each in report.measurements if each.phase == name]
        assert sum(logs) == pytest.approx(0, abs=1e-6)
        if phase.spread is not None:
            assert sum(log * log for log in logs) == pytest.approx(
                math.log(phase.spread) ** 2 * (phase.count - 1), abs=1e-6
            )


def test_a_single_measurement_has_no_spread() -> None:
    (phase,) = fitted(measured([("decode", 2.0, 3.0)])).calibration.phases.values()
    assert phase.factor == pytest.approx(1.5)
    assert (phase.spread, phase.count) == (None, 1)


# The command


def test_factors_are_by_instance_type_clock_and_phase(nxpipe: InProcess, store: Store) -> None:
    larger = MACHINE | {"instance type": "inf2.8xlarge"}
    names = [
        proven(store, "prefill", {16: (1.0, 2.0), 32: (2.0, 8.0)}, MACHINE, larger, phase="prefill"),
        proven(store, "decode", {16: (1.0, 1.5)}, MACHINE, phase="decode"),
        proven(store, "by the host", {16: (1.0, 9.0)}, MACHINE, clock="host"),
    ]
    found = shown(nxpipe, "calibrate", *names, names[0])
    assert found["format"] == "nxpipe.calibration-report/1"
    spread = math.exp(math.log(2) / math.sqrt(2))
    assert [
        (each["instance_type"], each["clock"], name, phase["factor"], phase["spread"], phase["count"])
        for each in found["calibrations"]
        for name, phase in each["phases"].items()
    ] == [
        ("inf2.8xlarge", "device", "prefill", pytest.approx(math.sqrt(8)), pytest.approx(spread), 2),
        ("inf2.xlarge", "device", "decode", pytest.approx(1.5), None, 1),
        ("inf2.xlarge", "device", "prefill", pytest.approx(math.sqrt(8)), pytest.approx(spread), 2),
        ("inf2.xlarge", "host", "forward", pytest.approx(9), None, 1),
    ]
    programs = found["calibrations"][0]["programs"]
    assert [(each["program"], each["predicted_ms"], each["p50_ms"], each["ratio"]) for each in programs] == [
        ("prefill-b1-s16", 1.0, 2.0, pytest.approx(2)),
        ("prefill-b1-s32", 2.0, 8.0, pytest.approx(4)),
    ]
    assert [each["residual"] for each in programs] == pytest.approx([math.sqrt(0.5) - 1, math.sqrt(2) - 1])


def test_a_page_has_what_was_measured_the_factors_and_the_residuals(nxpipe: InProcess, store: Store) -> None:
    name = proven(store, "bert", {16: (1.0, 2.0), 32: (2.0, 8.0)}, MACHINE)
    answer = nxpipe("calibrate", name)
    assert (answer.code, answer.err) == (OK.number, "")
    lines = answer.out.splitlines()
    software = "compiler 2.27.5334.0; driver 2.23.9.0; runtime nrtpy 2.34.10.0"
    assert lines[0] == f"inf2.xlarge, clock of the device; {software}"
    assert [line.split() for line in lines[2:4]] == [
        ["PHASE", "MEASUREMENTS", "FACTOR", "SPREAD"],
        ["forward", "2", "2.828", "1.633"],
    ]
    assert [line.split()[-1] for line in lines[6:]] == ["-29.3%", "+41.4%"]


def test_a_single_measurement_is_reported_as_one(nxpipe: InProcess, store: Store) -> None:
    answer = nxpipe("calibrate", proven(store, "bert", {16: (1.0, 2.0)}, MACHINE))
    assert answer.code == OK.number
    assert answer.out.splitlines()[3].split() == ["forward", "1", "2", "-"]
    assert answer.err.startswith("inf2.xlarge: one measurement of forward, which has no spread; prove more")


def test_an_artifact_without_device_evidence_is_refused(nxpipe: InProcess, store: Store) -> None:
    name = proven(store, "bert", {16: (1.0, 2.0)})
    code, line = refused(nxpipe, "calibrate", name)
    assert code == REFUSED.number
    assert "it has no evidence of kind device; on an instance with Neuron devices, run: nxpipe prove" in line
    assert refused(nxpipe, "calibrate", "acme/none@aaaaaa")[0] == NOT_FOUND.number
    assert refused(nxpipe, "calibrate")[0] == USAGE.number


@pytest.mark.parametrize("absent", ["instance type", "driver"])
def test_evidence_that_does_not_name_its_machine_is_refused(nxpipe: InProcess, store: Store, absent: str) -> None:
    machine = {name: text for name, text in MACHINE.items() if name != absent}
    name = proven(store, "bert", {16: (1.0, 2.0)}, machine)
    code, line = refused(nxpipe, "calibrate", name)
    assert code == REFUSED.number
    assert f"does not name the {absent} of its machine; run `nxpipe prove" in line
    assert refused(nxpipe, "calibrate", name, "--rehearsal") == (code, line)


def test_evidence_of_a_stand_in_is_refused_unless_it_is_a_rehearsal_which_is_marked(
    nxpipe: InProcess, store: Store
) -> None:
    machine = {"device": "inf2", "compiler": "2.27.5334.0+stand-in"}
    name = proven(store, "bert", {16: (1.0, 2.0)}, machine)
    code, line = refused(nxpipe, "calibrate", name, "-o", "inf2.json")
    assert code == REFUSED.number
    assert "was made with a stand-in, not by AWS's compiler on a device; pass --rehearsal" in line
    assert not Path("inf2.json").exists()
    answer = nxpipe("calibrate", name, "--rehearsal", "-o", "inf2.json")
    assert answer.code == OK.number
    assert answer.out.startswith("REHEARSAL, no device measured this: stand-in, clock of the device")
    assert read_calibration(Path("inf2.json")).rehearsal
    benched = nxpipe("bench", name, "--calibration", "inf2.json")
    assert "CALIBRATED (REHEARSAL)" in benched.out
    assert "inf2.json is of a rehearsal" in benched.err


def test_predictions_of_several_cost_models_are_not_fitted_together(nxpipe: InProcess, store: Store) -> None:
    one = proven(store, "one", {16: (1.0, 2.0)}, MACHINE)
    other = proven(store, "other", {16: (1.0, 2.0)}, MACHINE, compiler="b" * 64)
    elsewhere = proven(store, "elsewhere", {16: (1.0, 2.0)}, MACHINE, target="trn1")
    code, line = refused(nxpipe, "calibrate", one, other)
    assert code == USAGE.number
    assert "predictions by two compilers" in line
    assert all(digest * 12 in line for digest in "ab")
    code, line = refused(nxpipe, "calibrate", one, elsewhere)
    assert code == USAGE.number
    assert "so no factor fits both; calibrate them one by one" in line


@pytest.mark.parametrize("predicted", [None, 0.0, -1.0])
def test_a_program_without_a_predicted_time_is_refused(
    nxpipe: InProcess, store: Store, predicted: float | None
) -> None:
    code, line = refused(nxpipe, "calibrate", proven(store, "bert", {16: (predicted, 2.0)}, MACHINE))
    assert code == REFUSED.number
    assert "forward-b1-s16 has no predicted time to compare with; build it again" in line


@pytest.mark.parametrize("p50", [0.0, 5e-324, 1e308])
def test_a_time_that_is_no_duration_is_refused(nxpipe: InProcess, store: Store, p50: float) -> None:
    code, line = refused(nxpipe, "calibrate", proven(store, "bert", {16: (1.0, p50)}, MACHINE))
    assert code == REFUSED.number
    assert "which is no duration" in line


def test_an_artifact_that_does_not_name_its_compiler_is_refused(nxpipe: InProcess, store: Store) -> None:
    published = publish(store, "by others", {16: 1.0})
    store.attest(evidence(store, published.manifest, DEVICE))
    code, line = refused(nxpipe, "calibrate", name_of(published))
    assert code == REFUSED.number
    assert "does not name the compiler of its predictions" in line


# The file


def test_a_file_has_the_calibration_of_one_instance_type_and_clock(nxpipe: InProcess, store: Store) -> None:
    larger = MACHINE | {"instance type": "inf2.8xlarge"}
    name = proven(store, "bert", {16: (1.0, 2.0)}, MACHINE, larger)
    answer = nxpipe("calibrate", name, "-o", "inf2.json")
    assert answer.code == USAGE.number
    assert "measurements of inf2.8xlarge (device), inf2.xlarge (device); select one with --instance-type" in answer.err
    assert not Path("inf2.json").exists()
    words = ("calibrate", name, "--instance-type", "inf2.xlarge")
    assert nxpipe(*words, "-o", "inf2.json").code == OK.number
    data = Path("inf2.json").read_bytes()
    assert data == canonical_json(json.loads(data)) + b"\n"
    again = nxpipe(*words, "-o", "inf2.json")
    assert again.code == OVERWRITE.number
    assert "inf2.json exists already" in again.err
    assert Path("inf2.json").read_bytes() == data
    code, line = refused(nxpipe, "calibrate", name, "--clock", "host")
    assert code == REFUSED.number
    assert "the evidence has those of inf2.8xlarge by the clock of the device, inf2.xlarge by the clock" in line


@given(samples=SAMPLES)
def test_a_calibration_survives_its_file(samples: list[tuple[str, float, float]], tmp_path_factory: Any) -> None:
    calibration = fitted(measured(samples)).calibration
    path = tmp_path_factory.mktemp("calibration") / "inf2.json"
    calibration.write(path)
    assert read_calibration(path) == calibration


def test_evidence_is_named_in_the_file(nxpipe: InProcess, store: Store) -> None:
    name = proven(store, "bert", {16: (1.0, 2.0)}, MACHINE)
    assert nxpipe("calibrate", name, "-o", "inf2.json").code == OK.number
    (document,) = [each.digest for each in store.evidence(store.resolve(name).manifest_digest) if each.kind == DEVICE]
    assert read_calibration(Path("inf2.json")).evidence == (document,)


# `nxpipe bench --calibration`


def test_a_bench_shows_the_calibrated_prediction_beside_the_raw_one(nxpipe: InProcess, store: Store) -> None:
    name = proven(store, "bert", {16: (1.0, 2.0), 32: (2.0, 8.0)}, MACHINE)
    other = proven(store, "other", {16: (3.0, 1.0)}, phase="decode")
    assert nxpipe("calibrate", name, "-o", "inf2.json").code == OK.number
    raw = shown(nxpipe, "bench", name, other)
    lines = shown(nxpipe, "bench", name, other, "--calibration", "inf2.json")
    assert [line.pop("calibrated_ns") for line in lines] == [
        pytest.approx(math.sqrt(8) * 1e6),
        pytest.approx(2 * math.sqrt(8) * 1e6),
        None,
    ]
    of = {"instance_type": "inf2.xlarge", "clock": "device", "rehearsal": False}
    assert [line.pop("calibration") for line in lines] == [of] * 3
    assert lines == raw
    rows = nxpipe("bench", name, other, "--calibration", "inf2.json", "--measured").out.splitlines()
    assert rows[0].split()[-5:] == ["CALIBRATED", "THIS", "PROGRAM", "AWS'S", "COMPILER"]
    column = rows[0].index("CALIBRATED")
    assert rows[1::3] == [name, other]
    assert [row[column:].split()[:2] for row in rows[2:4]] == [["2.828", "ms"], ["5.657", "ms"]]
    assert rows[5][column:].split()[0] == "-"


def test_a_calibration_of_another_target_or_cost_model_is_refused(nxpipe: InProcess, store: Store) -> None:
    name = proven(store, "bert", {16: (1.0, 2.0)}, MACHINE)
    assert nxpipe("calibrate", name, "-o", "inf2.json").code == OK.number
    for other, sentence in (
        (proven(store, "trn", {16: (1.0, 2.0)}, target="trn1"), "the calibration is of inf2, and"),
        (
            proven(store, "new", {16: (1.0, 2.0)}, compiler="b" * 64),
            "the calibration is of predictions by compiler aaa",
        ),
    ):
        code, line = refused(nxpipe, "bench", name, other, "--calibration", "inf2.json")
        assert code == USAGE.number
        assert sentence in line
        assert other in line


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        "\x00",
        '{"format": "nxpipe.calibration/2"}',
        pytest.param("[" * 500, id="deep"),
        pytest.param("1" * 5000, id="long integer"),
    ],
)
def test_a_file_that_is_no_calibration_is_refused(nxpipe: InProcess, store: Store, text: str) -> None:
    name = proven(store, "bert", {16: (1.0, 2.0)}, MACHINE)
    Path("inf2.json").write_text(text)
    code, line = refused(nxpipe, "bench", name, "--calibration", "inf2.json")
    assert code == USAGE.number
    assert "inf2.json: no calibration nxpipe.calibration/1 (" in line
    assert line.endswith("; write one with `nxpipe calibrate -o`")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("factor", 0),
        ("factor", -1.0),
        ("factor", "2"),
        ("factor", math.nan),
        ("factor", math.inf),
        ("factor", 1e308),
        ("spread", 0.5),
        ("count", 0),
        ("more", 1),
    ],
)
def test_a_file_with_a_figure_out_of_range_is_refused(
    nxpipe: InProcess, store: Store, field: str, value: object
) -> None:
    name = proven(store, "bert", {16: (1.0, 2.0)}, MACHINE)
    assert nxpipe("calibrate", name, "-o", "inf2.json").code == OK.number
    document = json.loads(Path("inf2.json").read_text())
    document["phases"]["forward"][field] = value
    Path("inf2.json").write_text(json.dumps(document))
    code, line = refused(nxpipe, "bench", name, "--calibration", "inf2.json")
    assert code == USAGE.number
    assert f"phases.forward.{field}" in line


def test_measurements_are_those_of_complete_documents(store: Store) -> None:
    name = proven(store, "bert", {16: (1.0, 2.0), 32: (2.0, 8.0)}, MACHINE)
    manifest = store.resolve(name).manifest
    (complete,) = [each for each in store.evidence(manifest.digest) if each.kind == DEVICE]
    store.attest(complete.model_copy(update={"programs": complete.programs[:1]}))
    assert {each.evidence for each in measurements_of(manifest, store)} == {complete.digest}
