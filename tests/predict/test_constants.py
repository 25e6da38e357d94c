"""`nxpipe calibrate --from`: constants fitted to tables of measurements, their file, and broken tables."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nxpipe.emulator.hardware.links import collectives_ns, host_ns
from nxpipe.pipeline.predict.constants import execution_times, predict, read_constants, shipped
from nxpipe.pipeline.predict.fit import calibrate_from, prior, select
from nxpipe.pipeline.predict.measurements import cycle_of, read, value_of
from nxpipe.pipeline.util.errors import InputInvalid
from nxpipe.pipeline.util.exit_codes import INTERRUPTED, OK, USAGE
from nxpipe.pipeline.util.progress import Progress
from tests.pipeline.in_process import InProcess, nxpipe
from tests.predict.samples import DECODE, ROW, measured_by, write_table

__all__ = ["nxpipe"]

MODELS = ("bert-base-uncased", "bert-large-uncased", "distilbert-base-uncased", "gpt2", "gpt2-medium")


def table(folder: Path) -> Path:
    encoders = [
        {**ROW, "model": model, "batch": str(batch), "seq_len": str(length)}
        for model in MODELS
        for batch in (1, 4, 16)
        for length in (64, 128, 384)
    ]
    decodes = [
        {
            **DECODE,
            "model": model,
            "batch": str(batch),
            "tp_degree": str(tp),
            "cores_used": str(tp),
            "input_len": tokens,
        }
        for model in ("meta-llama/Llama-2-7b-hf", "meta-llama/Llama-2-13b-hf", "meta-llama/Meta-Llama-3-8B")
        for batch in (1, 8)
        for tp in (2, 8, 24)
        for tokens in ("128", "3000")
    ]
    return write_table(folder / "table.csv", [*encoders, *decodes])


def test_the_fit_recovers_the_times_of_known_constants_and_most_of_the_constants(tmp_path: Path) -> None:
    path = table(tmp_path)
    names = select(read(path)).problem().names
    generator = np.random.default_rng(0)
    truth = {name: prior(name)[0] * math.exp(0.4 * prior(name)[1] * generator.normal()) for name in names}
    selection = select(read(measured_by(path, truth)))
    problem = selection.problem()
    theta = problem.fit()
    assert np.abs(problem.errors(theta)).max() < 0.02
    products = {  # what the rows determine: a constant and its deviations together
        base: sum(
            theta[names.index(n)] - math.log(truth[n]) for n in names if n in (base, f"{base}@{code}", f"{base}@inf2")
        )
        for base, code in (("tensor.dense", "traced"), ("dma.weights", "tnx"), ("dma.cache", "tnx"))
    }
    assert max(map(abs, products.values())) < 0.2, products


def test_the_derivatives_of_the_fit_are_those_of_its_times(tmp_path: Path) -> None:
    problem = select(read(table(tmp_path))).problem()
    theta = np.log([prior(name)[0] for name in problem.names])
    logs, derivatives = problem.logs(theta)
    for column in range(0, len(theta), 3):
        moved = theta.copy()
        moved[column] += 1e-6
        assert (problem.logs(moved)[0] - logs) / 1e-6 == pytest.approx(derivatives[:, column], abs=1e-4)


def test_equal_tables_give_equal_files_with_their_provenance(tmp_path: Path) -> None:
    path = measured_by(table(tmp_path), {})
    first, second = (calibrate_from([path], date="2026-01-01", seed=1) for _ in range(2))
    assert first == second
    assert first.sources[0].name == "table.csv"
    assert first.sources[0].rows == len(read(path))
    first.write(tmp_path / "constants.json")
    assert read_constants(tmp_path / "constants.json") == first
    assert set(first.families) == {"all", "encoder", "llm-decode"}
    assert all(each.low <= each.value <= each.high for each in first.constants.values())


def test_the_shipped_constants_have_provenance_and_no_constant_of_a_model() -> None:
    fitted = shipped()
    assert {source.name for source in fitted.sources} == {"published_train.csv", "contrib_train.csv"}
    bases = {name.partition("@")[0] for name in fitted.constants}
    assert all(base.startswith("host.server.") or prior(base) for base in bases)
    deviations = {name.partition("@")[2] for name in fitted.constants} - {""}
    codes = {
        "traced",
        "training",
        "diffusion",
        *(f"{code}{phase}" for code in ("tnx", "nxd", "served") for phase in ("", "-prefill")),
    }
    families = {"inf2", "trn1", "trn2"} | {
        "encoder",
        "encoder-decoder",
        "llm-decode",
        "llm-prefill",
        "vision-cnn",
        "vision-transformer",
    }
    assert deviations <= codes | families
    assert fitted.families["all"].coverage >= 0.85


def test_a_fit_shows_its_progress_and_an_interrupted_one_writes_nothing(
    tmp_path: Path, nxpipe: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = measured_by(table(tmp_path), {}), tmp_path / "out.json"
    monkeypatch.setattr("nxpipe.pipeline.util.progress._LOG_INTERVAL", 0.0)
    run = nxpipe("--json", "calibrate", "--from", str(path), "--out", str(out))
    steps = [json.loads(line) for line in run.err.splitlines() if line.startswith('{"done"')]
    assert [step["done"] for step in steps] == list(range(1, steps[0]["total"] + 1))
    assert {step["unit"] for step in steps} == {"fits"}
    before = out.read_bytes()

    def interrupted(progress: Progress, size: int) -> None:
        if progress._done == 2:
            raise KeyboardInterrupt
        progress._done += size

    monkeypatch.setattr(Progress, "sent", interrupted)
    assert nxpipe("calibrate", "--from", str(path), "--out", str(out)).code == INTERRUPTED.number
    assert out.read_bytes() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out.json", "table.csv"]


def test_the_time_of_a_program_has_the_host_and_what_collectives_cost_beside_the_devices(tmp_path: Path) -> None:
    figures = {
        "time": {"latency_ns": 2e6},
        "instructions": {"by_engine": {"tensor": {}, "collective": {}}},
        "hbm": {"compulsory": {"input": 16_000_000, "output": 0, "weights": 1 << 30}},
    }
    program = SimpleNamespace(name="decode-b1-s128", tensor_parallel=32)
    manifest: Any = SimpleNamespace(target="trn1", executables=(program,))
    time = execution_times(manifest, {program.name: figures})[program.name]
    assert time.device == 2.0
    assert time.host == pytest.approx(1.0 + host_ns(0) / 1e6)
    assert time.collectives == collectives_ns("v2", 32) / 1e6 > 0
    assert time.document()["ms"] == pytest.approx(time.device + time.host + time.collectives)
    alone = figures | {"instructions": {"by_engine": {"tensor": {}}}}
    assert execution_times(manifest, {program.name: alone})[program.name].collectives == 0
    for other in ({}, "x", {"time": {"latency_ns": None}}, figures | {"hbm": {}}):
        assert execution_times(manifest, {program.name: other}) == {}
    other_target: Any = SimpleNamespace(target="gpu", executables=(program,))
    assert execution_times(other_target, {program.name: figures}) == {}


def test_a_value_and_its_cycle_are_each_others_inverse(tmp_path: Path) -> None:
    for metric in ("latency_ms_p50", "throughput_per_s"):
        (row,) = read(write_table(tmp_path / "one.csv", [{**ROW, "metric": metric, "batch": "8", "in_flight": "4"}]))
        assert row.cycle is not None
        assert value_of(row.configuration, row.cycle) == pytest.approx(row.value)
        assert cycle_of(row.configuration, row.value) == row.cycle
        assert predict(row.configuration).value > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": "fast"}, "line 2: value is 'fast', not a number"),
        ({"value": "0"}, "line 2: value is '0', not a positive number"),
        ({"value": ""}, "line 2: value is '', not a positive number"),
        ({"batch": "1.5"}, "line 2: batch is '1.5', not a whole number from 1"),
        ({"tp_degree": "-8"}, "line 2: tp_degree is '-8', not a whole number from 1"),
        ({"image_size": "224"}, "line 2: image_size is '224', not width x height"),
    ],
)
def test_a_bad_cell_is_named_with_its_line_and_column(tmp_path: Path, change: dict[str, str], message: str) -> None:
    with pytest.raises(InputInvalid, match=message):
        read(write_table(tmp_path / "bad.csv", [{**ROW, **change}]))


def test_the_command_fits_tables_and_refuses_what_is_none(tmp_path: Path, nxpipe: InProcess) -> None:
    path, out = measured_by(table(tmp_path), {}), tmp_path / "out.json"
    run = nxpipe("--json", "calibrate", "--from", str(path), "--out", str(out))
    assert run.code == OK.number, run.err
    assert json.loads(run.out)["families"]["encoder"]["rows"] == 45
    assert read_constants(out).constants
    broken = tmp_path / "broken.csv"
    broken.write_text("id,model\n1,bert\n")
    refused = nxpipe("calibrate", "--from", str(broken))
    assert refused.code == USAGE.number
    assert "broken.csv: no column tier" in refused.err
    few = nxpipe("calibrate", "--from", str(write_table(tmp_path / "few.csv", [ROW])))
    assert "1 rows can be fitted, and 8 are needed" in few.err
    assert nxpipe("calibrate", "--from", str(path), "bert@1234").code == USAGE.number
    assert nxpipe("calibrate").code == USAGE.number
