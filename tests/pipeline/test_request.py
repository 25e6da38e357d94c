import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nxpipe.artifact_store.canonical import canonical_json, sha256_hex
from nxpipe.emulator.hardware import instance
from nxpipe.pipeline.compile.spec import BuildSpec
from nxpipe.pipeline.models.configuration import Shape
from nxpipe.pipeline.models.source import PretrainedModel, resolve
from nxpipe.pipeline.models.weights import RandomWeights
from nxpipe.pipeline.util.errors import BuildRefused
from tests.pipeline.conftest import BERT, write_model


@pytest.fixture
def request_(bert: Path) -> BuildSpec:
    return BuildSpec(resolve(str(bert)), RandomWeights(0), (Shape("forward", 1, 32),), instance("inf2.xlarge"))


def model_of(request: BuildSpec) -> PretrainedModel:
    assert isinstance(request.source, PretrainedModel)
    return request.source


def key(request: BuildSpec) -> str:
    return sha256_hex(canonical_json(request.key_inputs()))


def test_every_declared_input_flips_the_key(request_: BuildSpec) -> None:
    source = model_of(request_)
    others = [
        replace(request_, source=replace(source, config={**source.config, "hidden_size": 64})),
        replace(request_, source=replace(source, task="fill-mask")),
        replace(request_, weights=RandomWeights(1)),
        replace(request_, shapes=(Shape("forward", 1, 64),)),
        replace(request_, shapes=(Shape("forward", 2, 32),)),
        replace(request_, shapes=(Shape("prefill", 1, 32),)),
        replace(request_, shapes=(*request_.shapes, Shape("forward", 1, 64))),
        replace(request_, target=instance("trn2.48xlarge")),
        replace(request_, autocast="none"),
        replace(request_, autocast_type="fp16"),
        replace(request_, tensor_parallel=2),
    ]
    keys = [key(request) for request in [request_, *others]]
    assert len(set(keys)) == len(keys)


def test_the_folder_its_name_and_the_order_of_its_configuration_never_flip_the_key(
    request_: BuildSpec, tmp_path: Path
) -> None:
    backwards = dict(reversed(BERT.items()))
    other = resolve(str(write_model(tmp_path / "elsewhere" / "renamed", backwards)))
    assert key(replace(request_, source=other)) == key(request_)


def test_the_order_of_the_shapes_never_flips_the_key(request_: BuildSpec) -> None:
    shapes = (Shape("forward", 1, 32), Shape("forward", 1, 64))
    assert key(replace(request_, shapes=shapes)) == key(replace(request_, shapes=shapes[::-1]))


def test_host_user_locale_time_zone_and_hash_seed_never_flip_the_key(
    request_: BuildSpec, bert: Path, tmp_path: Path
) -> None:
    code = (
        "import sys\n"
        "from nxpipe.pipeline.models.source import resolve; from nxpipe.pipeline.models.weights import RandomWeights\n"
        "from nxpipe.pipeline.compile.spec import BuildSpec; from nxpipe.pipeline.models.configuration import Shape\n"
        "from nxpipe.emulator.hardware import instance\n"
        "from nxpipe.artifact_store.canonical import canonical_json\n"
        "from nxpipe.artifact_store.canonical import sha256_hex\n"
        "shapes = (Shape('forward', 1, 32),)\n"
        "r = BuildSpec(resolve(sys.argv[1]), RandomWeights(0), shapes, instance('inf2.xlarge'))\n"
        "print(sha256_hex(canonical_json(r.key_inputs())))\n"
    )
    odd = {
        "PYTHONHASHSEED": "7",
        "TZ": "Asia/Kathmandu",
        "LC_ALL": "C",
        "USER": "somebody",
        "HOME": str(tmp_path / "h"),
    }
    there = subprocess.run(
        [sys.executable, "-c", code, str(bert)],
        env={**os.environ, **odd},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.strip() == key(request_)


def with_config(request: BuildSpec, **changes: object) -> BuildSpec:
    return replace(request, source=replace(model_of(request), config={**request.source.config, **changes}))


def test_notes_of_where_a_configuration_came_from_never_flip_the_key_however_deep(request_: BuildSpec) -> None:
    part = {"hidden_size": 8, "layers": {"size": 2}}
    noted = {"_name_or_path": "/home/ann/x", "transformers_version": "4.1", "layers": {"size": 2, "_name_or_path": "y"}}
    plain = with_config(request_, text_config=part)
    assert key(with_config(request_, text_config=part | noted, _name_or_path="z")) == key(plain)
    assert key(with_config(request_, text_config=part | {"hidden_size": 9})) != key(plain)


def test_an_artifact_that_is_not_to_be_verified_is_the_same(request_: BuildSpec) -> None:
    assert key(replace(request_, verified=False)) == key(request_)


def test_the_class_that_diffusers_builds_is_part_of_the_key(request_: BuildSpec) -> None:
    assert key(with_config(request_, _class_name="A")) != key(with_config(request_, _class_name="B"))


def test_the_inputs_of_a_key_are_plain_json(request_: BuildSpec) -> None:
    inputs = request_.key_inputs()
    assert json.loads(canonical_json(inputs)) == inputs


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tensor_parallel": 4}, "inf2.xlarge has no tensor-parallel degree 4; it offers 1, 2; the nearest is --tp 2"),
        ({"shapes": (Shape("decode", 1, 32),)}, "phase 'decode'"),
        ({"shapes": (Shape("forward", 1, 65),)}, "positions up to 64; pass --buckets of at most 64"),
    ],
)
def test_what_cannot_be_built_is_refused_before_any_work(
    request_: BuildSpec, change: dict[str, object], sentence: str
) -> None:
    with pytest.raises(BuildRefused, match=sentence):
        replace(request_, **change).check()  # type: ignore[arg-type]
