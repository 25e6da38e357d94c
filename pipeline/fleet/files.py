"""Templates from files: those of a folder that CDK has written, or any others, in JSON or YAML."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from nxpipe.pipeline.util.errors import MissingSoftware, TemplateInvalid
from nxpipe.pipeline.util.files import MiB, json_of, read_file
from nxpipe.stacks.reading import Template, Templates, construct_paths, read

_ENDING: Final = ".template.json"
_LARGEST: Final = 16 * MiB
_MANIFEST: Final = "manifest.json"


def templates_of(paths: Iterable[Path], region: str | None = None) -> Templates:
    """All of them together. `region` holds for those that do not say themselves."""
    return Templates(tuple(template for path in paths for template in _read(path, region)))


def _read(path: Path, region: str | None) -> list[Template]:
    if not path.is_dir():
        stack = path.name.removesuffix(_ENDING) if path.name.endswith(_ENDING) else path.stem
        return [read(stack, parse(_text(path), str(path)), region)]
    manifest = path / _MANIFEST
    if not manifest.is_file():
        raise TemplateInvalid(f"{path} is no folder that CDK has written: it has no {_MANIFEST}; run `npx cdk synth`")
    try:
        found = json_of(_text(manifest))["artifacts"]
        stacks = {id_: each for id_, each in found.items() if each["type"] == "aws:cloudformation:stack"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TemplateInvalid(f"{manifest} is not what CDK writes ({error}); run `npx cdk synth`") from error
    return [_of_artifact(path, id_, each, region) for id_, each in sorted(stacks.items())]


def _of_artifact(folder: Path, id_: str, artifact: Mapping[str, Any], region: str | None) -> Template:
    properties = artifact.get("properties", {})
    path = folder / properties.get("templateFile", f"{id_}{_ENDING}")
    where = artifact.get("environment", "").rpartition("/")[2]
    known = where if where and not where.startswith("unknown") else region
    document = parse(_text(path), str(path))
    return read(properties.get("stackName", id_), document, known, construct_paths(path))


def _text(path: Path) -> str:
    """CloudFormation's own limit is 1 MB."""
    try:
        return read_file(path, limit=_LARGEST).decode()
    except ValueError as error:
        raise TemplateInvalid(f"{path} is no template: {error}") from error


def parse(text: str, name: str) -> dict[str, Any]:
    """A template's text; `name` is for what is said of it."""
    try:
        document = json_of(text) if text.lstrip().startswith("{") else _yaml(text)
    except (ValueError, RecursionError) as error:
        raise TemplateInvalid(f"{name} is no template: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict) or not isinstance(document.get("Resources"), dict):
        raise TemplateInvalid(f"{name} is no CloudFormation template: it has no Resources")
    return document


def _yaml(text: str) -> Any:
    """YAML with CloudFormation's short forms, such as !Ref and !GetAtt."""
    try:
        import yaml
    except ImportError as error:
        raise MissingSoftware("PyYAML", "a template in YAML", "pip install pyyaml") from error

    class Loader(yaml.SafeLoader):
        pass

    def function(loader: Any, suffix: str, node: Any) -> dict[str, Any]:
        if isinstance(node, yaml.ScalarNode):
            value = loader.construct_scalar(node)
        elif isinstance(node, yaml.SequenceNode):
            value = loader.construct_sequence(node, deep=True)
        else:
            value = loader.construct_mapping(node, deep=True)
        return {suffix if suffix in ("Condition", "Ref") else f"Fn::{suffix}": value}

    Loader.add_multi_constructor("!", function)
    try:
        return yaml.load(text, Loader)  # noqa: S506, a safe one
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
