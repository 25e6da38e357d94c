"""A valid configuration: its meaning, the source of each value, the description of each field."""

import json
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from pydantic import TypeAdapter

from nxpipe.pipeline.config import (
    Config,
    ConfigInvalid,
    Model,
    ServingFleet,
    TrainingFleet,
    configuration_page,
    field_help,
    json_schema,
    load_config,
    origins,
)
from nxpipe.pipeline.config.reference import tables
from nxpipe.pipeline.config.schema import field_kind
from tests.conftest import ROOT
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]

LEAST = '[project]\nname = "search"\n'
MODEL = '[[models]]\nname = "m"\nid = "m"\ntask = "text-generation"\ntarget = "inf2.48xlarge"\n'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "nxpipe.toml"


def load(path: Path, text: str, environ: dict[str, str] | None = None) -> Config:
    path.write_text(text)
    return load_config(path, environ or {})


def refusal(path: Path, text: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigInvalid) as refused:
        load(path, text, environ)
    return str(refused.value)


def test_a_name_alone_is_a_configuration(path: Path) -> None:
    config = load(path, LEAST)
    assert (config.project.name, config.project.region, config.store.url) == ("search", None, "file://.nxpipe/store")
    assert (config.models, config.fleets, config.rollout.steps) == ((), (), (5, 25, 50, 100))


def test_the_projects_own_file_is_valid() -> None:
    config = load_config(ROOT / "nxpipe.toml", {})
    assert [model.id for model in config.models] == ["bert-base-uncased", "HuggingFaceTB/SmolLM2-135M"]
    assert {type(fleet) for fleet in config.fleets} == {ServingFleet, TrainingFleet}


def test_values_mean_what_they_say(path: Path) -> None:
    config = load(
        path,
        LEAST + '[store]\ncache_limit = "2TiB"\n[rollout]\nbake_min = "90s"\nguards.max_p99 = "1500ms"\n'
        '[build]\ntimeout = "1d"\nparallelism = 3\n[verify]\nmin_cosine = 1\n',
    )
    assert config.store.cache_limit == 2 << 40
    assert config.rollout.bake_min == timedelta(seconds=90)
    assert config.rollout.guards.max_p99 == timedelta(seconds=1.5)
    assert (config.build.timeout, config.build.parallelism) == (timedelta(days=1), 3)
    assert config.verify.min_cosine == 1.0


def test_every_kind_of_capacity_can_be_written(path: Path) -> None:
    fleets = [
        f'[[fleets]]\nkind = "training"\nname = "f{index}"\nmodel = "m"\nchannel = "c"\nnodes = 16\n'
        f'instance_types = ["trn2.48xlarge"]\ncapacity = {{ {capacity} }}\n'
        'zone = "us-east-2b"\n'
        for index, capacity in enumerate(
            (
                'kind = "on-demand"',
                'kind = "spot"',
                'kind = "reservation", id = "cr-0a1b2c3d"',
                'kind = "capacity-block", id = "cr-0a1b2c3d", start = 2026-10-25T11:30:00Z, end = 2026-11-01T11:30:00Z',
            )
        )
    ]
    config = load(path, LEAST + MODEL.replace("inf2.48", "trn2.48") + "".join(fleets))
    assert [fleet.capacity.kind for fleet in config.fleets] == ["on-demand", "spot", "reservation", "capacity-block"]
    assert config.fleets[3].capacity.model_dump()["end"] == datetime(2026, 11, 1, 11, 30, tzinfo=UTC)


def test_phases_follow_the_task_unless_they_are_written(path: Path) -> None:
    assert load(path, LEAST + MODEL).models[0].phases == ("prefill", "decode")
    assert load(path, LEAST + MODEL + 'phases = ["prefill"]\n').models[0].phases == ("prefill",)
    assert load(path, LEAST + MODEL.replace("text-generation", "fill-mask")).models[0].phases == ("forward",)


def test_a_fleet_begins_with_its_least_size_unless_another_is_written(path: Path) -> None:
    fleet = (
        '[[fleets]]\nkind = "serving"\nname = "f"\nmodel = "m"\nchannel = "c"\ninstance_types = ["inf2.48xlarge"]\n'
        'capacity.kind = "spot"\nsize = { min = 2, max = 5 }\n'
    )
    sized = load(path, LEAST + MODEL + fleet).fleets[0]
    assert isinstance(sized, ServingFleet)
    assert (sized.size.min, sized.size.desired, sized.size.max) == (2, 2, 5)


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_line_ends_of_both_worlds_are_read_and_counted(path: Path, newline: str) -> None:
    path.write_bytes((LEAST + "[build]\n# why\nparallelism = 0\n").replace("\n", newline).encode())
    with pytest.raises(ConfigInvalid) as refused:
        load_config(path, {})
    assert [fault.line for fault in refused.value.faults] == [5]


def test_a_valid_configuration_cannot_be_changed(path: Path) -> None:
    config = load(path, LEAST)
    with pytest.raises(ValueError, match="frozen"):
        config.project.name = "other"  # type: ignore[misc]


def test_without_a_file_the_defaults_hold_if_the_command_allows_it(path: Path) -> None:
    assert load_config(path, {"NXPIPE_STORE_URL": "s3://bucket/x"}, missing_ok=True).store.url == "s3://bucket/x"
    with pytest.raises(ConfigInvalid, match="does not exist"):
        load_config(path, {})
    with pytest.raises(ConfigInvalid, match="a folder"):
        load_config(path.parent, {}, missing_ok=True)


def test_the_environment_stands_in_for_single_values(path: Path) -> None:
    environ = {
        "NXPIPE_PROJECT_ACCOUNT": "012345678901",
        "NXPIPE_STORE_URL": "s3://bucket/models",
        "NXPIPE_STORE_CACHE": "",
        "NXPIPE_BUILD_PARALLELISM": "8",
        "NXPIPE_ROLLOUT_GUARDS_MAX_ERROR_RATE": "2e-2",
        "NXPIPE_VERIFY_MIN_COSINE": "1",
    }
    config = load(path, LEAST + "[build]\nparallelism = 2\n", environ)
    assert (config.project.account, config.store.url, config.store.cache) == (
        "012345678901",
        "s3://bucket/models",
        "~/.cache/nxpipe",
    )
    assert (config.build.parallelism, config.rollout.guards.max_error_rate, config.verify.min_cosine) == (8, 0.02, 1.0)


def test_a_required_value_may_come_from_the_environment_alone(path: Path) -> None:
    assert load(path, "[build]\n", {"NXPIPE_PROJECT_NAME": "search"}).project.name == "search"


@pytest.mark.parametrize(
    ("variable", "value", "sentence"),
    [
        ("NXPIPE_BUILD_PARALLELISM", "many", 'found "many"; expected a whole number from 1 to 256, or "auto"'),
        ("NXPIPE_BUILD_PARALLELISM", "4.0", 'found "4.0"; expected a whole number from 1 to 256, or "auto"'),
        ("NXPIPE_BUILD_EXECUTOR", "Local", 'expected one of "local", "ray", "batch"; did you mean "local"?'),
        ("NXPIPE_VERIFY_MIN_COSINE", "nan", 'found "nan"; expected a number above 0 and at most 1'),
        ("NXPIPE_VERIFY_MIN_COSINE", "1e999", "found inf; expected a number above 0 and at most 1"),
        (
            "NXPIPE_STORE_URI",
            "s3://x",
            "expected a variable for a scalar key of [store]: NXPIPE_STORE_URL, NXPIPE_STORE",
        ),
        ("NXPIPE_ROLLOUT_STEPS", "5,100", "expected a variable for a scalar key of [rollout]: NXPIPE_ROLLOUT_ALPHA"),
        ("NXPIPE_PROJECT_NAME", "caf\udce9", r'found "caf\udce9"; expected a name'),
    ],
)
def test_a_wrong_variable_is_told_by_its_name(path: Path, variable: str, value: str, sentence: str) -> None:
    result = refusal(path, LEAST, {variable: value})
    assert result.startswith(f"environment: {variable}: found ")
    assert sentence in result


def test_the_nearest_variable_is_named(path: Path) -> None:
    assert refusal(path, LEAST, {"NXPIPE_STORE_URI": "s3://x"}).endswith('did you mean "NXPIPE_STORE_URL"?')


def test_variables_of_other_tools_are_left_alone(path: Path) -> None:
    load(
        path,
        LEAST,
        {"NXPIPE_CONFIG": "x", "NXPIPE_STOREHOUSE": "1", "NXPIPE_": "1", "MY_STORE_URI": "x", "NXPIPE_X_Y": "1"},
    )


def test_a_variable_does_not_hide_that_its_section_is_wrong(path: Path) -> None:
    assert "store: found 3; expected a table" in refusal(
        path, "store = 3\n" + LEAST, {"NXPIPE_STORE_URL": "s3://bucket"}
    )


def test_show_names_the_origin_of_every_value(path: Path) -> None:
    path.write_text(LEAST + MODEL + "[rollout.guards]\nmax_p99 = '90s'\n")
    settings = {setting.key: setting for setting in origins(path, {"NXPIPE_BUILD_TIMEOUT": "60m"})}
    assert str(settings["project.name"].origin) == f"{path}:2"
    assert (settings["rollout.guards.max_p99"].value, settings["rollout.guards.max_p99"].origin.line) == ("90s", 9)
    assert (settings["build.timeout"].value, str(settings["build.timeout"].origin)) == ("1h", "NXPIPE_BUILD_TIMEOUT")
    assert (settings["store.cache_limit"].value, str(settings["store.cache_limit"].origin)) == ("20GiB", "default")
    phases = settings["models[0].phases"]
    assert (phases.value, phases.origin.kind) == (["prefill", "decode"], "default")
    assert (settings["models[0].path"].value, settings["models[0].path"].origin.kind) == (None, "default")


def test_what_show_prints_is_the_configuration_itself(path: Path) -> None:
    """The values that are dumped can be read again: nothing is lost between the program and the file's own language."""
    config = load_config(ROOT / "nxpipe.toml", {})
    dumped = _without_none(config.model_dump(mode="json"))
    assert Config.model_validate(dumped) == config


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list) else value


FIELDS = [
    (table, key) for table in dict.fromkeys(table for _, _, table in tables(Config)) for key in table.model_fields
]


@pytest.mark.parametrize(
    ("table", "key"), FIELDS, ids=lambda value: value if isinstance(value, str) else value.__name__
)
def test_every_field_says_what_it_is_for_what_it_may_be_and_gives_an_example(table: Any, key: str) -> None:
    field = table.model_fields[key]
    assert field.description
    assert field_help(table, key).startswith(field.description)
    if field_kind(field).is_scalar or (field_kind(field).item or field_kind(field)).is_scalar:
        assert " Allowed: " in field_help(table, key)
        assert field.examples


@pytest.mark.parametrize(
    ("table", "key"), FIELDS, ids=lambda value: value if isinstance(value, str) else value.__name__
)
def test_every_example_is_a_value_that_its_field_takes(table: Any, key: str) -> None:
    field = table.model_fields[key]
    kind = field_kind(field)
    for example in field.examples or []:
        TypeAdapter(Annotated[kind.annotation, key, *kind.metadata]).validate_python(example)  # type: ignore[arg-type]


def test_field_help_is_the_text_of_all_three_places() -> None:
    text = field_help(Model, "tp")
    assert text in " ".join(configuration_page().split())
    assert json_schema()["$defs"]["Model"]["properties"]["tp"]["description"] == text


def test_the_page_is_fresh() -> None:
    page = ROOT / "docs" / "reference" / "configuration.md"
    assert page.read_text() == configuration_page(), "run `make docs` and commit the result"


def test_the_schema_accepts_what_the_command_accepts() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    document = tomllib.loads((ROOT / "nxpipe.toml").read_text())
    jsonschema.validate(json.loads(json.dumps(document, default=str)), schema)  # a schema knows days as text


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"project": {"name": "Search"}},
        {"project": {"name": "search"}, "stor": {}},
        {"project": {"name": "search"}, "build": {"timeout": "an hour"}},
        {"project": {"name": "search"}, "build": {"parallelism": 257}},
        {"project": {"name": "search"}, "models": [{"name": "m", "task": "fill-mask", "target": "inf2.large"}]},
        {"project": {"name": "search"}, "fleets": [{"kind": "serving", "nodes": 3}]},
    ],
)
def test_the_schema_refuses_what_the_command_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, json_schema())


def test_the_schemas_defaults_are_as_the_file_writes_them() -> None:
    properties = json_schema()["$defs"]
    assert properties["Rollout"]["properties"]["bake_max"]["default"] == "1h"
    assert properties["Store"]["properties"]["cache_limit"]["default"] == "20GiB"


def test_check_says_one_line(nxpipe: InProcess) -> None:
    answer = nxpipe("config", "check", "--config", str(ROOT / "nxpipe.toml"))
    assert (answer.code, answer.out) == (0, f"{ROOT / 'nxpipe.toml'} is valid: 2 models, 2 fleets.\n")


def test_show_prints_json_for_machines(nxpipe: InProcess, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(LEAST)
    monkeypatch.setenv("NXPIPE_CONFIG", str(path))
    monkeypatch.setenv("NXPIPE_STORE_URL", "s3://bucket")
    settings = {setting["key"]: setting for setting in json.loads(nxpipe("config", "show", "--json").out)}
    assert settings["project.name"]["origin"] == {"kind": "file", "name": str(path), "line": 2}
    assert settings["store.url"] == {
        "key": "store.url",
        "value": "s3://bucket",
        "origin": {"kind": "environment", "name": "NXPIPE_STORE_URL", "line": None},
    }


def test_show_prints_a_line_for_every_value(nxpipe: InProcess) -> None:
    answer = nxpipe("config", "show", "--config", str(ROOT / "nxpipe.toml"))
    assert len(answer.out.splitlines()) == 1 + len(origins(ROOT / "nxpipe.toml", {}))


def test_schema_prints_the_schema(nxpipe: InProcess) -> None:
    assert json.loads(nxpipe("config", "schema").out) == json_schema()
