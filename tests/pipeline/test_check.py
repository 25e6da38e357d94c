"""`nxpipe check`: its output, its exit codes and its cache."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from nxpipe.pipeline.check import checker
from nxpipe.pipeline.compile.findings import RULES
from tests.emulator.test_sources import AUTOENCODER, UNET
from tests.pipeline.conftest import BERT, LLAMA, write_model
from tests.pipeline.in_process import InProcess, nxpipe

pytestmark = pytest.mark.sample(8)

__all__ = ["nxpipe"]

# What GitHub's code scanning asks of a SARIF 2.1.0 log, beyond the standard's own schema.
_TEXT = {"type": "object", "required": ["text"], "properties": {"text": {"minLength": 1, "maxLength": 1024}}}
_RULE = {
    "required": ["id", "name", "shortDescription", "fullDescription", "help", "defaultConfiguration"],
    "properties": {"name": {"maxLength": 255}, "shortDescription": _TEXT, "fullDescription": _TEXT, "help": _TEXT},
}
_PLACE = {
    "required": ["artifactLocation", "region"],
    "properties": {
        "artifactLocation": {"required": ["uri"], "properties": {"uri": {"pattern": "^(?!/|[.][.]|[a-z]+:)[^ ]+$"}}},
        "region": {"required": ["startLine"], "properties": {"startLine": {"type": "integer", "minimum": 1}}},
    },
}
_RESULT = {
    "required": ["ruleId", "ruleIndex", "level", "message", "locations", "partialFingerprints"],
    "properties": {
        "level": {"enum": ["none", "note", "warning", "error"]},
        "message": {"type": "object", "required": ["text"]},
        "occurrenceCount": {"type": "integer", "minimum": 1},
        "partialFingerprints": {"minProperties": 1, "additionalProperties": {"type": "string"}},
        "locations": {
            "minItems": 1,
            "maxItems": 1000,
            "items": {"required": ["physicalLocation"], "properties": {"physicalLocation": _PLACE}},
        },
    },
}
_DRIVER = {"required": ["name", "semanticVersion", "rules"], "properties": {"rules": {"items": _RULE}}}
_RUN = {
    "required": ["tool", "results"],
    "properties": {
        "tool": {"required": ["driver"], "properties": {"driver": _DRIVER}},
        "results": {"type": "array", "maxItems": 25_000, "items": _RESULT},
    },
}
SARIF = {
    "type": "object",
    "required": ["$schema", "version", "runs"],
    "properties": {"version": {"const": "2.1.0"}, "runs": {"type": "array", "minItems": 1, "items": _RUN}},
}


@pytest.fixture(autouse=True)
def _a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return write_model(tmp_path / "models" / "tiny-bert", {**BERT, "max_position_embeddings": 512})


def findings(output: str) -> list[dict[str, Any]]:
    (report,) = json.loads(output)
    found: list[dict[str, Any]] = report["findings"]
    return found


def test_a_sound_model_lowers_and_fits_and_the_first_line_says_so(nxpipe: InProcess, bert: Path) -> None:
    answer = nxpipe("check", "--model-id", str(bert))
    assert answer.code == 0
    assert answer.out.splitlines()[0] == "tiny-bert lowers, and fits inf2.xlarge at tp 1"


@pytest.mark.sample(4)
def test_a_decoder_is_checked_reading_its_prompt_and_writing_tokens(nxpipe: InProcess, llama: Path) -> None:
    answer = nxpipe("check", "--model-id", str(llama), "--buckets", "16,32", "--json")
    (report,) = json.loads(answer.out)
    names = {program["name"] for program in report["programs"]}
    assert names == {"prefill-b1-s16", "prefill-b1-s32", "decode-b1-s32"}


def test_the_cache_of_keys_and_values_is_counted(nxpipe: InProcess, llama: Path) -> None:
    (report,) = json.loads(nxpipe("check", "--model-id", str(llama), "--buckets", "64", "--json").out)
    (target,) = report["targets"]
    layers, heads, width, bf16 = 2, 2, 8, 2
    assert target["rows"][0]["footprint"]["state"] == 2 * layers * heads * width * 64 * bf16


def test_one_phase_that_fails_hides_nothing_of_the_others(nxpipe: InProcess, tmp_path: Path) -> None:
    write_model(tmp_path / "m", {**BERT, "auto_map": {"AutoModel": "x.Y"}, "quantization_config": {"bits": 4}})
    answer = nxpipe("check", "--model-id", "./m", "--buckets", "16,4096", "--tp", "24", "--json")
    rules = {finding["rule"] for finding in findings(answer.out)}
    assert {"NXC-104", "NXC-105", "NXC-204", "NXC-301"} <= rules
    (report,) = json.loads(answer.out)
    assert [program["name"] for program in report["programs"]] == ["forward-b1-s16"]


def test_what_two_programs_share_is_said_once_naming_both(nxpipe: InProcess, tmp_path: Path) -> None:
    write_model(tmp_path / "m", {**LLAMA, "hidden_act": "geluu"})
    (found,) = findings(nxpipe("check", "--model-id", "./m", "--json").out)
    assert found["programs"] == ["decode-b1-s128", "prefill-b1-s128"]


def test_layers_that_differ_in_their_number_are_one_finding_with_a_count(nxpipe: InProcess, bert: Path) -> None:
    answer = nxpipe("check", "--model-id", str(bert), "--autocast", "all", "--autocast-type", "fp16", "--json")
    norms = [finding for finding in findings(answer.out) if "layer.*.output.LayerNorm" in finding["module"]]
    assert [(finding["rule"], finding["count"]) for finding in norms] == [("NXC-501", 2)]
    assert norms[0]["file"].startswith("transformers/models/bert/")


def test_a_model_that_is_too_large_ends_in_its_own_exit_code(nxpipe: InProcess, tmp_path: Path) -> None:
    write_model(tmp_path / "m", {**LLAMA, "vocab_size": 10**9})
    answer = nxpipe("check", "--model-id", "./m")
    assert answer.code == 13
    assert "does not fit" in answer.out.splitlines()[0]


@pytest.mark.sample(4)
def test_without_a_degree_the_smallest_that_fits_is_chosen(nxpipe: InProcess, tmp_path: Path) -> None:
    write_model(tmp_path / "m", {**LLAMA, "num_key_value_heads": 8, "vocab_size": 1_000_000_00})
    (report,) = json.loads(nxpipe("check", "--model-id", "./m", "--target", "trn2.48xlarge", "--json").out)
    (target,) = report["targets"]
    fitting = [row["degree"] for row in target["rows"] if row["fits"]]
    assert target["chosen"] == min(fitting) > 1


def test_a_higher_degree_never_needs_more_of_a_core(nxpipe: InProcess, tmp_path: Path) -> None:
    write_model(tmp_path / "m", {**LLAMA, "num_key_value_heads": 8})
    (report,) = json.loads(nxpipe("check", "--model-id", "./m", "--target", "trn2.48xlarge", "--json").out)
    needs = [row["need"] for row in report["targets"][0]["rows"] if row["footprint"]]
    assert len(needs) > 2
    assert needs == sorted(needs, reverse=True)


def test_all_targets_are_one_matrix(nxpipe: InProcess, bert: Path) -> None:
    from nxpipe.emulator.hardware import INSTANCES

    answer = nxpipe("check", "--model-id", str(bert), "--target", "all")
    assert answer.code == 0
    assert all(f"\n{name} " in answer.out for name in INSTANCES)


def test_the_models_of_the_configuration_file_are_checked_as_described_there(
    nxpipe: InProcess, bert: Path, tmp_path: Path
) -> None:
    described = (
        '[[models]]\nname = "{name}"\npath = "{path}"\ntask = "fill-mask"\ntarget = "inf2.xlarge"\nbuckets = [16]\n'
    )
    both = described.format(name="good", path=bert) + described.format(name="bad", path=tmp_path / "nowhere")
    Path("nxpipe.toml").write_text('[project]\nname = "p"\n' + both)
    assert nxpipe("check", "--only", "good").code == 0
    everything = nxpipe("check", "--json")
    assert everything.code == 10
    assert [report["exit_code"] for report in json.loads(everything.out)] == [0, 10]


def test_sarif_is_what_github_reads_and_its_places_are_relative(nxpipe: InProcess, tmp_path: Path) -> None:
    write_model(tmp_path / "m", {**BERT, "hidden_act": "geluu", "auto_map": {"AutoModel": "x.Y"}})
    assert nxpipe("check", "--model-id", "./m", "--sarif", "out.sarif").code == 11
    log = json.loads(Path("out.sarif").read_text())
    jsonschema.validate(log, SARIF)
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert {rule["id"] for rule in rules} == set(RULES)
    assert all(rules[result["ruleIndex"]]["id"] == result["ruleId"] for result in run["results"])
    places = [result["locations"][0]["physicalLocation"] for result in run["results"]]
    assert {place["artifactLocation"]["uri"] for place in places} == {"m/config.json"}


def test_a_finding_in_a_librarys_source_is_annotated_at_the_model_and_keeps_its_fingerprint(
    nxpipe: InProcess, tmp_path: Path
) -> None:
    write_model(tmp_path / "m", {**BERT, "max_position_embeddings": 512})
    words = ("check", "--model-id", "./m", "--autocast", "all", "--autocast-type", "fp16", "--sarif")
    marks = []
    for bucket in ("16", "24"):
        assert nxpipe(*words, f"{bucket}.sarif", "--buckets", bucket).code == 0
        log = json.loads(Path(f"{bucket}.sarif").read_text())
        jsonschema.validate(log, SARIF)
        results = log["runs"][0]["results"]
        assert any("at transformers/models/bert" in result["message"]["text"] for result in results)
        marks.append([result["partialFingerprints"] for result in results])
    assert marks[0] == marks[1] != []


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**BERT, "max_position_embeddings": 512}, ("--buckets", "16")),
        (LLAMA, ("--buckets", "8,16", "--phases", "prefill,decode")),
    ],
    ids=["encoder", "decoder"],
)
def test_a_check_captures_exactly_what_a_build_captures(
    nxpipe: InProcess, tmp_path: Path, config: dict[str, object], words: tuple[str, ...]
) -> None:
    model = ("--model-id", str(write_model(tmp_path / "m", config)), *words)
    (report,) = json.loads(nxpipe("check", *model, "--json").out)
    checked = {program["name"]: program["graph_key"] for program in report["programs"]}
    assert nxpipe("build", *model, "--weights", "random:0", "--no-verify", "--store", "./store").code == 0
    shown = json.loads(nxpipe("store", "show", "m", "--store", "./store", "--json").out)
    assert checked == {program["name"]: program["graph_key"] for program in shown["manifest"]["executables"]}


def test_a_bucket_that_leaves_no_room_for_the_first_positions_is_refused_before_it_reads_behind_the_table(
    nxpipe: InProcess, tmp_path: Path
) -> None:
    """RoBERTa counts positions from its padding's id on, so that its table serves fewer tokens than it has rows."""
    config = {**BERT, "model_type": "roberta", "architectures": ["RobertaModel"], "pad_token_id": 1}
    write_model(tmp_path / "m", {**config, "max_position_embeddings": 34})
    assert nxpipe("check", "--model-id", "./m", "--buckets", "32").code == 0
    answer = nxpipe("check", "--model-id", "./m", "--buckets", "33", "--json")
    found = findings(answer.out)
    assert answer.code == 11
    assert {finding["rule"] for finding in found} == {"NXC-204"}
    assert all("a lookup reads row 34 of a table with 34 rows" in finding["message"] for finding in found)
    assert all(finding["file"].startswith("transformers/models/roberta/") for finding in found)
    assert all("shorter by 1" in finding["advice"] for finding in found)


def test_what_stops_a_model_is_said_before_its_tables(nxpipe: InProcess, tmp_path: Path) -> None:
    write_model(tmp_path / "m", {**BERT, "auto_map": {"AutoModel": "x.Y"}})
    output = nxpipe("check", "--model-id", "./m", "--buckets", "16,128").out
    places = [output.index(word) for word in ("does not lower", "NXC-204", "PROGRAM", "WEIGHTS", "NXC-104")]
    assert places == sorted(places)


def _run(folder: Path, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, env=dict(os.environ), check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_second_check_of_the_same_model_says_the_same_without_torch(nxpipe: InProcess, bert: Path) -> None:
    first = nxpipe("check", "--model-id", str(bert), "--json").out
    code = (
        "import sys; from nxpipe.pipeline.cli.main import cli; from nxpipe.pipeline.util.console import Console\n"
        f"cli.main(['check', '--model-id', {str(bert)!r}, '--json'], obj=Console(), standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'nxpipe.pipeline.check.examination'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    assert _run(bert, code) == first


@pytest.mark.sample(6)
@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"digest": "0", "examination": {}}', b"\xff" * 100])
def test_a_damaged_memory_is_ignored_and_written_again(nxpipe: InProcess, bert: Path, damage: bytes) -> None:
    first = nxpipe("check", "--model-id", str(bert), "--json").out
    (entry,) = (Path(os.environ["XDG_CACHE_HOME"]) / "nxpipe" / "checks").iterdir()
    whole = entry.read_bytes()
    entry.write_bytes(damage or whole[: len(whole) // 2])
    assert nxpipe("check", "--model-id", str(bert), "--json").out == first
    assert entry.read_bytes() == whole


def test_an_entry_altered_by_one_figure_is_not_believed(nxpipe: InProcess, bert: Path) -> None:
    first = nxpipe("check", "--model-id", str(bert), "--json").out
    (entry,) = (Path(os.environ["XDG_CACHE_HOME"]) / "nxpipe" / "checks").iterdir()
    document = json.loads(entry.read_bytes())
    document["examination"]["footprints"][0]["weights"] = 1
    entry.write_text(json.dumps(document))
    assert nxpipe("check", "--model-id", str(bert), "--json").out == first


def test_the_memory_of_checks_is_bounded(nxpipe: InProcess, bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "_ENTRIES_LIMIT", 2)
    for bucket in ("8", "16", "24", "32"):
        assert nxpipe("check", "--model-id", str(bert), "--buckets", bucket).code == 0
    assert len(list((Path(os.environ["XDG_CACHE_HOME"]) / "nxpipe" / "checks").iterdir())) == 2


def test_a_cache_that_cannot_be_written_costs_time_and_nothing_else(
    nxpipe: InProcess, bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert nxpipe("check", "--model-id", str(bert)).code == 0


def test_moving_the_folder_changes_where_findings_point_and_nothing_else(nxpipe: InProcess, tmp_path: Path) -> None:
    config: dict[str, object] = {**BERT, "hidden_act": "geluu"}
    for name in ("one", "two"):
        write_model(tmp_path / name, config)
    places = [findings(nxpipe("check", "--model-id", f"./{name}", "--json").out)[0]["file"] for name in ("one", "two")]
    assert places == ["one/config.json", "two/config.json"]


def test_a_defect_of_ours_is_a_finding_with_its_log_and_is_not_remembered(
    nxpipe: InProcess, bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nxpipe.pipeline.check.examination as examine

    def broken(*_: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(examine, "compile_shape", broken)
    answer = nxpipe("check", "--model-id", str(bert), "--json")
    (found,) = findings(answer.out)
    assert (answer.code, found["rule"]) == (1, "NXC-299")
    assert Path(found["message"].partition("traceback is in ")[2].rstrip(".")).is_file()
    monkeypatch.undo()


@pytest.mark.sample(4)
@pytest.mark.parametrize("config", [UNET, AUTOENCODER], ids=["unet", "vae"])
def test_a_diffusion_model_which_publishes_no_plan_is_checked_at_every_degree(
    nxpipe: InProcess, tmp_path: Path, config: dict[str, Any]
) -> None:
    pytest.importorskip("diffusers")
    model = write_model(tmp_path / "model", config)
    answer = nxpipe("check", "--model-id", str(model), "--target", "inf2.24xlarge", "--json")
    assert answer.code == 0, answer.err
    (report,) = json.loads(answer.out)
    assert report["verdict"] == "ok"
