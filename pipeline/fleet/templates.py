"""CloudFormation templates: from files (a CDK output folder, JSON, YAML), as deployed, and a change plan as text."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from nxpipe.pipeline.util.aws import asking
from nxpipe.pipeline.util.errors import MissingSoftware, TemplateInvalid
from nxpipe.pipeline.util.escape import for_terminal
from nxpipe.pipeline.util.files import MiB, json_of, read_file
from nxpipe.stacks.lint.costs import Estimate
from nxpipe.stacks.lint.deployment_plan import Change, Kind, Plan, Restart
from nxpipe.stacks.lint.template import Template, Templates, construct_paths, read

_ENDING: Final = ".template.json"
_LARGEST: Final = 16 * MiB
_MANIFEST: Final = "manifest.json"


def templates_of(paths: Iterable[Path], region: str | None = None) -> Templates:
    """Templates of all paths. `region` applies to those that name none."""
    return Templates(tuple(template for path in paths for template in _read(path, region)))


def _read(path: Path, region: str | None) -> list[Template]:
    if not path.is_dir():
        stack = path.name.removesuffix(_ENDING) if path.name.endswith(_ENDING) else path.stem
        return [read(stack, parse(_text(path), str(path)), region)]
    manifest = path / _MANIFEST
    if not manifest.is_file():
        raise TemplateInvalid(f"{path} is not a CDK output folder: it has no {_MANIFEST}; run `npx cdk synth`")
    try:
        found = json_of(_text(manifest))["artifacts"]
        stacks = {id_: each for id_, each in found.items() if each["type"] == "aws:cloudformation:stack"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TemplateInvalid(f"{manifest} is not a CDK manifest ({error}); run `npx cdk synth`") from error
    return [_of_artifact(path, id_, each, region) for id_, each in sorted(stacks.items())]


def _of_artifact(folder: Path, id_: str, artifact: Mapping[str, Any], region: str | None) -> Template:
    properties = artifact.get("properties", {})
    path = folder / properties.get("templateFile", f"{id_}{_ENDING}")
    where = artifact.get("environment", "").rpartition("/")[2]
    known = where if where and not where.startswith("unknown") else region
    document = parse(_text(path), str(path))
    return read(properties.get("stackName", id_), document, known, construct_paths(path))


def _text(path: Path) -> str:
    """Text of a template; CloudFormation's own limit is 1 MB."""
    try:
        return read_file(path, limit=_LARGEST).decode()
    except ValueError as error:
        raise TemplateInvalid(f"{path} is not a template: {error}") from error


def parse(text: str, name: str) -> dict[str, Any]:
    """Parses a template; `name` is for messages."""
    try:
        document = json_of(text) if text.lstrip().startswith("{") else _yaml(text)
    except (ValueError, RecursionError) as error:
        raise TemplateInvalid(f"{name} is not a template: {' '.join(str(error).split())}") from error
    if not isinstance(document, dict) or not isinstance(document.get("Resources"), dict):
        raise TemplateInvalid(f"{name} is not a CloudFormation template: it has no Resources")
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
    """Deployed templates of the same stacks, as far as they exist."""
    found = (_deployed(template, client) for template in like.all)
    return Templates(tuple(each for each in found if each is not None))


def _deployed(template: Template, client: Callable[..., Any]) -> Template | None:
    from botocore.exceptions import ClientError

    cloudformation = client("cloudformation", template.region)
    with asking(f"return the template of stack {template.stack}"):
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
    "left": "leaves the stack and is retained",
    "removed": "is deleted",
    "replaced": "is REPLACED by a new one",
    "unclear": "changes, in place or by a new one",
}


def plan_text(plan: Plan, before: Estimate, after: Estimate) -> str:
    """Changes by stack, the most severe first; then restarts and costs."""
    if plan.empty:
        return "Nothing changes."
    lines = [*_changes(plan), *map(_restart, plan.restarts)]
    lines += [f"Stack {stack} is no longer in the app: CDK leaves it unchanged." for stack in plan.forgotten]
    return "\n".join([*map(for_terminal, lines), _costs(before, after)])


def _changes(plan: Plan) -> Iterator[str]:
    for stack, changes in groupby(plan.changes, key=lambda change: change.resource.stack):
        yield f"{stack}:"
        yield from (f"  {_change(change)}" for change in changes)


def _change(change: Change) -> str:
    at = change.resource
    named = f"{at.path} ({at.type}) {_WORDS[change.kind]}"
    if change.kind == "replaced":
        return f"{named}: {_listed(change.properties)} cannot change in place"
    return f"{named}: {_listed(change.properties)}" if change.properties else named


def _restart(restart: Restart) -> str:
    count = "Instances" if restart.instances is None else f"{restart.instances} instances"
    if restart.by == restart.group:
        return f"{count} of {restart.group.path} are replaced: the group is a new one."
    return f"{count} of {restart.group.path} are replaced one after another: {restart.by.path} changes."


def _costs(before: Estimate, after: Estimate) -> str:
    unknown = "" if all(line.hourly is not None for line in after.lines) else ", plus resources without a known price"
    if round(before.monthly) == round(after.monthly):
        return f"It costs about ${after.monthly:,.0f} a month, as before{unknown}."
    return f"It costs about ${after.monthly:,.0f} a month{unknown}; before, it was ${before.monthly:,.0f}."


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names)
