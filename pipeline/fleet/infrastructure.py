"""CloudFormation templates from files or deployed stacks, text of deployment plans, and content of lock files."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from itertools import groupby
from pathlib import Path
from typing import Any, Final, TypeAlias

from nxpipe.pipeline.config.cloud import Amis
from nxpipe.pipeline.config.locks import (
    ADDONS,
    FLEETS_PARAMETER,
    SYSTEMS,
    TRAINING_PARAMETER,
    ClusterLock,
    LockedImage,
    LockedNodes,
    SystemSoftware,
    sdk_order,
)
from nxpipe.pipeline.util.aws import convert_sdk_errors, error_code
from nxpipe.pipeline.util.errors import AwsError, MissingSoftware, TemplateInvalid
from nxpipe.pipeline.util.files import MiB, json_of, read_file
from nxpipe.pipeline.util.text import for_terminal
from nxpipe.stacks.lint.costs import Estimate
from nxpipe.stacks.lint.deployment_plan import Change, Kind, Plan, Refused, Restart
from nxpipe.stacks.lint.template import PUBLISHED, Template, Templates, construct_paths, read

_ENDING: Final = ".template.json"
_LARGEST: Final = 16 * MiB
_MANIFEST: Final = "manifest.json"
_MOST_PARAMETERS: Final = 10  # in one call of GetParameters


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
        artifacts = json_of(_text(manifest))["artifacts"]
        stacks = {
            id_: artifact for id_, artifact in artifacts.items() if artifact["type"] == "aws:cloudformation:stack"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TemplateInvalid(f"{manifest} is not a CDK manifest ({error}); run `npx cdk synth`") from error
    return [_of_artifact(path, id_, artifact, region) for id_, artifact in sorted(stacks.items())]


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
    templates = (_deployed(template, client) for template in like.all)
    return Templates(tuple(template for template in templates if template is not None))


def _deployed(template: Template, client: Callable[..., Any]) -> Template | None:
    from botocore.exceptions import ClientError

    cloudformation = client("cloudformation", template.region)
    with convert_sdk_errors(f"return the template of stack {template.stack}"):
        try:
            body = cloudformation.get_template(StackName=template.stack, TemplateStage="Original")["TemplateBody"]
        except ClientError as error:
            if "does not exist" in str(error):
                return None
            raise
    text = body if isinstance(body, str) else json.dumps(body)
    return read(template.stack, parse(text, f"the deployed template of {template.stack}"), template.region)


@dataclass(frozen=True)
class Stale:
    """A value of another stack with which a stack was deployed, and which is another one today."""

    stack: str
    name: str  # in Parameter Store
    deployed: str
    current: str | None  # None: the other stack no longer has it

    def __str__(self) -> str:
        has = f"Stack {self.stack} is stale: it was deployed with {self.deployed} for {self.name}, which"
        if self.current is None:
            return f"{has} no longer exists; deploy the stack that has it first."
        return f"{has} is {self.current} now; `npx cdk deploy {self.stack}` updates it."


def stale_values(deployed: Templates, client: Callable[..., Any]) -> list[Stale]:
    """Compares the values that deployed stacks have from other stacks with today's."""
    return [stale for template in deployed.all for stale in _stale_of(template, client)]


def _stale_of(template: Template, client: Callable[..., Any]) -> Iterator[Stale]:
    if not any(name.startswith(PUBLISHED) for name in template.stored_parameters.values()):
        return
    with convert_sdk_errors(f"describe the parameters of stack {template.stack}"):
        described = client("cloudformation", template.region).describe_stacks(StackName=template.stack)["Stacks"][0]
    with_values = {
        parameter["ParameterValue"]: parameter["ResolvedValue"]
        for parameter in described.get("Parameters", ())
        if "ResolvedValue" in parameter and parameter["ParameterValue"].startswith(PUBLISHED)
    }
    current = _stored(sorted(with_values), client("ssm", template.region), template.stack)
    for name, value in sorted(with_values.items()):
        if current.get(name) != value:
            yield Stale(template.stack, name, value, current.get(name))


def _stored(names: list[str], ssm: Any, stack: str) -> dict[str, str]:
    """Values in Parameter Store, as far as they exist."""
    found: dict[str, str] = {}
    with convert_sdk_errors(f"read the parameters that stack {stack} has from other stacks"):
        for start in range(0, len(names), _MOST_PARAMETERS):
            response = ssm.get_parameters(Names=names[start : start + _MOST_PARAMETERS])
            found |= {parameter["Name"]: parameter["Value"] for parameter in response["Parameters"]}
    return found


_WORDS: Final[dict[Kind, str]] = {
    "added": "is new",
    "changed": "changes in place",
    "left": "leaves the stack and is retained",
    "removed": "is deleted",
    "replaced": "is REPLACED by a new one",
    "unclear": "changes, in place or by a new one",
}


def plan_text(plan: Plan, before: Estimate, after: Estimate, stale: Sequence[Stale] = ()) -> str:
    """Changes by stack, the most severe first; then restarts, stale stacks and costs."""
    if plan.empty and not stale:
        return "Nothing changes."
    lines = [*_changes(plan), *map(_restart, plan.restarts), *map(_refusal, plan.refused), *map(str, stale)]
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


def _refusal(refused: Refused) -> str:
    stacks = " ".join(refused.importers)
    return (
        f"CloudFormation refuses this while other stacks import {refused.resource.path}; deploy them without it first: "
        f"npx cdk deploy --exclusively {stacks}"
    )


def _restart(restart: Restart) -> str:
    count = "Instances" if restart.instances is None else f"{restart.instances} instances"
    if restart.by == restart.group:
        return f"{count} of {restart.group.path} are replaced: the group is a new one."
    return f"{count} of {restart.group.path} are replaced one after another: {restart.by.path} changes."


def _costs(before: Estimate, after: Estimate) -> str:
    unknown = "" if all(line.hourly is not None for line in after.lines) else ", plus resources without a known price"
    if round(before.monthly) == round(after.monthly):
        return f"It costs about ${after.monthly:,.0f} a month, as before{unknown}{after.range}."
    return f"It costs about ${after.monthly:,.0f} a month{unknown}; before, it was ${before.monthly:,.0f}{after.range}."


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names)


_NAME: Final = "Deep Learning AMI Neuron (Ubuntu 24.04) *"
_SDK: Final = re.compile(r"Neuron SDK ([0-9]+(?:\.[0-9]+){1,3})")
_LIFETIME: Final = timedelta(days=2 * 365)  # EC2 deprecates a public image two years after its creation


def find_serving_images(region: str, amis: Amis, client: Callable[[str, str], Any]) -> list[LockedImage]:
    """The AMI that [amis] names, or the newest one with each version of the SDK."""
    if amis.image is not None:
        return [find_own_image(region, amis, client)]
    return [find_image(region, sdk, client) for sdk in amis.sdk]


def find_own_image(region: str, amis: Amis, client: Callable[[str, str], Any]) -> LockedImage:
    """The AMI that [amis] names, refused unless serving instances can start from it."""
    assert amis.image is not None, "[amis] names an image"
    assert amis.owner is not None, "[amis] has both or neither"
    ec2 = client("ec2", region)
    image = _described(amis.image, region, ec2)
    if image is None:
        raise AwsError(
            f"{region} has no image {amis.image} that these credentials can see; copy it to the region, share it with "
            "the account, or correct `image` in [amis]"
        )
    _require_owner(image, amis.owner, region, client)
    _require_bootable(image)
    software = _own_software(image, amis, region, ec2)
    device = image["RootDeviceName"]
    return LockedImage(
        region=region,
        sdk=amis.sdk[0],
        id=image["ImageId"],
        name=image.get("Name", ""),
        created=_day(image["CreationDate"]),
        expires=_day(image["DeprecationTime"]) if image.get("DeprecationTime") else None,
        source="[amis] image",
        python=software.python,
        glibc=software.glibc,
        owner="amazon" if amis.owner == "amazon" else image["OwnerId"],
        root_device=device,
        root_gib=_size(image, device),
        architecture=image["Architecture"],
        virtualization=image["VirtualizationType"],
    )


def _described(id_: str, region: str, ec2: Any) -> dict[str, Any] | None:
    try:
        with convert_sdk_errors(f"describe the image {id_} in {region}"):
            images: list[dict[str, Any]] = ec2.describe_images(ImageIds=[id_], IncludeDeprecated=True)["Images"]
    except AwsError as error:
        if error_code(error) not in ("InvalidAMIID.NotFound", "InvalidAMIID.Unavailable"):
            raise
        return None
    return images[0] if images else None


def _require_owner(image: dict[str, Any], owner: str, region: str, client: Callable[[str, str], Any]) -> None:
    expected = owner
    if owner == "self":
        with convert_sdk_errors("read the account of the credentials"):
            expected = client("sts", region).get_caller_identity()["Account"]
    if expected not in (image["OwnerId"], image.get("ImageOwnerAlias")):
        name = f"{owner} (account {expected})" if owner == "self" else owner
        raise AwsError(
            f"image {image['ImageId']} is owned by {image.get('ImageOwnerAlias', image['OwnerId'])}, not by {name}; "
            "correct `image` or `owner` in [amis]"
        )


def _require_bootable(image: dict[str, Any]) -> None:
    needs = {
        "State": ("available", "wait until it is"),
        "Architecture": ("x86_64", "build it for the processors of Inferentia and Trainium instances"),
        "VirtualizationType": ("hvm", "build it from an HVM image"),
    }
    for key, (needed, remedy) in needs.items():
        if image[key] != needed:
            raise _unfit(image, key, needed, remedy)
    if image["RootDeviceType"] == "instance-store":
        raise _unfit(image, "RootDeviceType", "ebs", "build it with an EBS root volume")


def _unfit(image: dict[str, Any], key: str, needed: str, remedy: str) -> AwsError:
    what = re.sub("(?<!^)(?=[A-Z])", " ", key).lower()
    return AwsError(
        f"image {image['ImageId']} has the {what} {image[key]}, but serving fleets need {needed}; {remedy}, or "
        "correct `image` in [amis]"
    )


def _own_software(image: dict[str, Any], amis: Amis, region: str, ec2: Any) -> SystemSoftware:
    """The software that [amis] gives, or that of the operating system that the image or its base names."""
    if amis.python is not None and amis.glibc is not None:
        return SystemSoftware(amis.python, amis.glibc)
    found = _system(image)
    if found is None and image.get("SourceImageId") and image.get("SourceImageRegion", region) == region:
        base = _described(image["SourceImageId"], region, ec2)
        found = _system(base) if base else None
    if found is None:
        raise AwsError(
            f"neither image {image['ImageId']}, {image.get('Name', '')!r}, nor its base names an operating system "
            f"whose Python nxpipe knows ({', '.join(SYSTEMS)}); set `python` and `glibc` in [amis]"
        )
    return found


def _size(image: dict[str, Any], device: str) -> int | None:
    disks = (mapping for mapping in image.get("BlockDeviceMappings", ()) if mapping.get("DeviceName") == device)
    return next((disk["Ebs"].get("VolumeSize") for disk in disks if "Ebs" in disk), None)


def find_image(region: str, sdk: str, client: Callable[[str, str], Any]) -> LockedImage:
    """The newest image with this version of the SDK."""
    ec2 = client("ec2", region)
    newest = _newest(FLEETS_PARAMETER, region, client("ssm", region), ec2)
    if _holds(newest, sdk):
        return _locked(newest, region, sdk, FLEETS_PARAMETER)
    pattern = f"*Neuron SDK {sdk}*"
    with convert_sdk_errors(f"list the images of Neuron SDK {sdk} in {region}"):
        response = ec2.describe_images(
            Owners=["amazon"],
            Filters=[{"Name": "name", "Values": [_NAME]}, {"Name": "description", "Values": [pattern]}],
        )
    images = [image for image in response["Images"] if _holds(image, sdk)]
    if not images:
        raise AwsError(
            f"{region} has no image of Neuron SDK {sdk}; the newest one is {newest['Name']}, "
            f"{newest.get('Description', 'no description')!r}; set `sdk` in [amis] to an existing version"
        )
    return _locked(max(images, key=_age), region, sdk, f"DescribeImages {pattern}")


def find_training_host(region: str, client: Callable[[str, str], Any]) -> LockedImage:
    """The newest image with ECS and the Neuron driver, and the SDK whose driver it has at least."""
    ec2 = client("ec2", region)
    newest = _newest(TRAINING_PARAMETER, region, client("ssm", region), ec2)
    with convert_sdk_errors(f"list the Neuron images of {region}, for the driver of {newest['ImageId']}"):
        response = ec2.describe_images(Owners=["amazon"], Filters=[{"Name": "name", "Values": [_NAME]}])
    older = [image for image in response["Images"] if image["CreationDate"] <= newest["CreationDate"]]
    sdks = [found[1] for image in older if (found := _SDK.search(image.get("Description", "")))]
    locked = _locked(newest, region, None, TRAINING_PARAMETER)
    return locked.model_copy(update={"driver": max(sdks, key=sdk_order, default=None)})


def _newest(parameter: str, region: str, ssm: Any, ec2: Any) -> dict[str, Any]:
    with convert_sdk_errors(f"read the parameter {parameter} in {region}"):
        id_ = ssm.get_parameter(Name=parameter)["Parameter"]["Value"]
    with convert_sdk_errors(f"describe the image {id_} in {region}"):
        images: list[dict[str, Any]] = ec2.describe_images(ImageIds=[id_])["Images"]
    if not images:
        raise AwsError(f"{region} names {id_} as the newest Neuron image but does not have it; run the command again")
    return images[0]


def _holds(image: dict[str, Any], sdk: str) -> bool:
    return re.search(rf"Neuron SDK {re.escape(sdk)}(?!\.?\d)", image.get("Description", "")) is not None


def _age(image: dict[str, Any]) -> tuple[str, str]:
    return image["CreationDate"], image["ImageId"]


def _locked(image: dict[str, Any], region: str, sdk: str | None, source: str) -> LockedImage:
    created = _day(image["CreationDate"])
    deprecated = image.get("DeprecationTime")
    software = _software(image) if sdk else None
    return LockedImage(
        region=region,
        sdk=sdk,
        id=image["ImageId"],
        name=image["Name"],
        created=created,
        expires=_day(deprecated) if deprecated else created + _LIFETIME,
        source=source,
        python=software.python if software else None,
        glibc=software.glibc if software else None,
    )


def _software(image: dict[str, Any]) -> SystemSoftware:
    """The software of the operating system that the image's name or description contains."""
    if software := _system(image):
        return software
    raise AwsError(
        f"image {image['ImageId']}, {image['Name']!r}, names no operating system whose Python nxpipe knows "
        f"({', '.join(SYSTEMS)}); update nxpipe"
    )


def _system(image: dict[str, Any]) -> SystemSoftware | None:
    text = f"{image.get('Name', '')} {image.get('Description', '')}"
    return next((software for system, software in SYSTEMS.items() if system in text), None)


def _day(time: str) -> date:
    return date.fromisoformat(time[:10])


AwsClients: TypeAlias = Callable[[str, str], Any]

_NODES: Final = "/aws/service/eks/optimized-ami/{kubernetes}/amazon-linux-2023/x86_64/{kind}/recommended"


def find_cluster(region: str, kubernetes: str, images: tuple[str, ...], client: AwsClients) -> ClusterLock:
    """Components that EKS recommends today for a version of Kubernetes, and digests of image tags."""
    ssm, eks = client("ssm", region), client("eks", region)
    return ClusterLock(
        region=region,
        kubernetes=kubernetes,
        neuron=_nodes(ssm, kubernetes, "neuron", region),
        system=_nodes(ssm, kubernetes, "standard", region),
        addons={name: _addon(eks, name, kubernetes, region) for name in ADDONS},
        images={image: _digest(image, client) for image in images},
    )


def _nodes(ssm: Any, kubernetes: str, kind: str, region: str) -> LockedNodes:
    names = {
        what: f"{_NODES.format(kubernetes=kubernetes, kind=kind)}/{what}" for what in ("image_id", "release_version")
    }
    with convert_sdk_errors(f"name the release of {kind} nodes for Kubernetes {kubernetes} in {region}"):
        parameters = ssm.get_parameters(Names=list(names.values()))["Parameters"]
    values = {parameter["Name"]: parameter["Value"] for parameter in parameters}
    if missing := [name for name in names.values() if name not in values]:
        raise AwsError(
            f"{region} has no {kind} nodes for Kubernetes {kubernetes}: there is no parameter {missing[0]}; "
            "set `kubernetes` in [cluster] to a version that EKS supports"
        )
    return LockedNodes(release=values[names["release_version"]], image=values[names["image_id"]])


def _addon(eks: Any, name: str, kubernetes: str, region: str) -> str:
    with convert_sdk_errors(f"list the versions of the add-on {name} in {region}"):
        addons = eks.describe_addon_versions(addonName=name, kubernetesVersion=kubernetes)["addons"]
    for version, fit in _fits(addons):
        if fit.get("clusterVersion") == kubernetes and fit.get("defaultVersion"):
            return version
    raise AwsError(
        f"{region} has no version of the add-on {name} for Kubernetes {kubernetes}; "
        "set `kubernetes` in [cluster] to a version that EKS supports"
    )


def _fits(addons: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for addon in addons:
        for version in addon["addonVersions"]:
            for fit in version["compatibilities"]:
                yield version["addonVersion"], fit


def _digest(image: str, client: AwsClients) -> str:
    """Digest of the image that a tag names now; for a multi-architecture image that of its index."""
    registry, _, path = image.partition("/")
    repository, _, tag = path.rpartition(":")
    account, _, _, region, *_ = registry.split(".")
    with convert_sdk_errors(f"find the image {image}"):
        details = client("ecr", region).describe_images(
            registryId=account, repositoryName=repository, imageIds=[{"imageTag": tag}]
        )["imageDetails"]
    digest: str = details[0]["imageDigest"]
    return digest
