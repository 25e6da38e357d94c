"""Templates from files: those of a folder that CDK has written, or any others, in JSON or YAML."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from nxpipe.pipeline.util.aws import asking
from nxpipe.pipeline.util.documents import MiB, json_of, read_file
from nxpipe.pipeline.util.errors import MissingSoftware, TemplateInvalid
from nxpipe.pipeline.util.escape import for_terminal
from nxpipe.stacks.costs import Estimate
from nxpipe.stacks.plan import Change, Kind, Plan, Restart
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


def deployed_templates(like: Templates, client: Callable[..., Any]) -> Templates:
    """Of the stacks that would be deployed, those that are there already."""
    found = (_deployed(template, client) for template in like.all)
    return Templates(tuple(each for each in found if each is not None))


def _deployed(template: Template, client: Callable[..., Any]) -> Template | None:
    from botocore.exceptions import ClientError

    cloudformation = client("cloudformation", template.region)
    with asking(f"give the template of stack {template.stack}"):
        try:
            body = cloudformation.get_template(StackName=template.stack, TemplateStage="Original")["TemplateBody"]
        except ClientError as error:
            if "does not exist" in str(error):
                return None
            raise
    text = body if isinstance(body, str) else json.dumps(body)
    return read(template.stack, parse(text, f"the deployed template of {template.stack}"), template.region)


_WORDS: Final[dict[Kind, str]] = {
    "added": "is new",
    "changed": "changes in place",
    "left": "leaves the stack and is kept as it is",
    "removed": "is deleted",
    "replaced": "is REPLACED by a new one",
    "unclear": "changes, in place or by a new one",
}


def plan_text(plan: Plan, before: Estimate, after: Estimate) -> str:
    """For a person: by stack, the worst first; then what restarts, and what it costs."""
    if plan.empty:
        return "Nothing changes."
    lines = [*_changes(plan), *map(_restart, plan.restarts)]
    lines += [f"Stack {stack} is not in the app any more: CDK leaves it as it is." for stack in plan.forgotten]
    return "\n".join([*map(for_terminal, lines), _costs(before, after)])


def _changes(plan: Plan) -> Iterator[str]:
    for stack, changes in groupby(plan.changes, key=lambda change: change.resource.stack):
        yield f"{stack}:"
        yield from (f"  {_change(change)}" for change in changes)


def _change(change: Change) -> str:
    at = change.resource
    named = f"{at.path} ({at.type}) {_WORDS[change.kind]}"
    if change.kind == "replaced":
        return f"{named}, for {_listed(change.properties)} cannot change"
    return f"{named}: {_listed(change.properties)}" if change.properties else named


def _restart(restart: Restart) -> str:
    count = "Instances" if restart.instances is None else f"{restart.instances} instances"
    if restart.by == restart.group:
        return f"{count} of {restart.group.path} are started anew, for the group is another one."
    return f"{count} of {restart.group.path} are replaced one after another, for {restart.by.path} changes."


def _costs(before: Estimate, after: Estimate) -> str:
    unknown = "" if all(line.hourly is not None for line in after.lines) else ", and what has no known price"
    if round(before.monthly) == round(after.monthly):
        return f"It costs about ${after.monthly:,.0f} a month, as before{unknown}."
    return f"It costs about ${after.monthly:,.0f} a month{unknown}; before, it was ${before.monthly:,.0f}."


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names)
