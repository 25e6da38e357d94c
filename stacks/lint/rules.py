"""The NXP rule pack: the list of rules, the rules about capacity, images and cost, and the facts that rules need."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from nxpipe.pipeline.config import Config, ServingFleet
from nxpipe.pipeline.config.capacity import DRAINED_BEFORE_THE_END, CapacityBlock
from nxpipe.pipeline.config.endpoints import has_local_disks
from nxpipe.pipeline.config.prices import load_prices
from nxpipe.stacks.lint import data_rules, network_rules, rules
from nxpipe.stacks.lint.costs import estimate
from nxpipe.stacks.lint.data_rules import KEEP
from nxpipe.stacks.lint.finding import Accepted, Facts, Finding, KnownImage, Rule, Window
from nxpipe.stacks.lint.launches import BATCH, GROUP, NODES, TEMPLATE, Launch, compute, instance_types, launches
from nxpipe.stacks.lint.template import Properties, Resource, Templates, intrinsic, settings, tables, text
from nxpipe.stacks.locks import known_images, lock_of, unlocked_images

BLOCK = "NXP-CAP-1"
OPEN = "NXP-CAP-2"
POOL = "NXP-CAP-3"


def block(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for launch in launches(all_):
        for place, what, remedy in _faults_of_block(launch, facts):
            yield Finding(BLOCK, launch.resource, f"{launch.inside}{place}", what, remedy)
        for user in launch.users if launch.block else ():
            if "PlacementGroup" in compute(user):
                what = "it starts instances of a capacity block in a placement group"
                yield Finding(
                    BLOCK, user, "PlacementGroup", what, "leave it out: a block's instances are close together"
                )


def _faults_of_block(launch: Launch, facts: Facts) -> Iterator[tuple[str, str, str]]:
    if not launch.block:
        if launch.reservation in facts.blocks:
            what = f"{launch.reservation} is a capacity block, but the market type is another one"
            yield "InstanceMarketOptions", what, "set MarketType to capacity-block"
        return
    specification = settings(launch.data, "CapacityReservationSpecification")
    if not settings(specification, "CapacityReservationTarget"):
        what = "the launch template has the market type capacity-block, but names no block"
        yield "CapacityReservationSpecification", what, "name the block in CapacityReservationTarget"
    if settings(launch.data, "Placement").get("GroupName") or settings(launch.data, "Placement").get("GroupId"):
        what = "the launch template requests a capacity block within a placement group, where it has no capacity"
        yield "Placement", what, "leave the group out: a block's instances are close together"


def empty_outside(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for launch in launches(all_):
        for user in launch.users if launch.block else ():
            window = facts.blocks.get(launch.reservation or "")
            check = {GROUP: _group, BATCH: _environment, NODES: _nodes}[user.type]
            yield from check(all_, user, _BlockNow(window, facts.now))


@dataclass(frozen=True)
class _BlockNow:
    """The window of a capacity block, seen at the time of the synthesis. An unknown one is in the future."""

    window: Window | None
    now: datetime

    @property
    def has_begun(self) -> bool:
        """True while the block is open: a template then requests the instances itself, without a schedule."""
        return self.window is not None and self.window.start <= self.now < self.window.drained

    @property
    def is_over(self) -> bool:
        return self.window is not None and self.now >= self.window.drained

    @property
    def why(self) -> str:
        return "after its capacity block is drained" if self.is_over else "before its capacity block begins"


def _group(all_: Templates, group: Resource, block: _BlockNow) -> Iterator[Finding]:
    for key in () if block.has_begun else ("MinSize", "DesiredCapacity"):
        if str(group.properties.get(key, "0")) != "0":
            what = f"the group requests instances {block.why}, when EC2 has none"
            yield Finding(OPEN, group, key, what, f"set {key} to 0; a scheduled action fills the group")
    moments = [
        (action.properties.get("StartTime"), str(action.properties.get("DesiredCapacity")) != "0")
        for action in all_.of("AWS::AutoScaling::ScheduledAction")
        if all_.same((action.properties.get("AutoScalingGroupName"), action), ({"Ref": group.id}, group))
    ]
    yield from _check_schedule(group, moments, block, "scheduled action that sets DesiredCapacity")


def _environment(all_: Templates, environment: Resource, block: _BlockNow) -> Iterator[Finding]:
    """Findings about a Batch environment, which EventBridge Scheduler opens and closes by its state or its queue's."""
    switched = [environment, *_queues(all_, environment)]
    is_on = all(resource.properties.get("State", "ENABLED") == "ENABLED" for resource in switched)
    if is_on and not block.has_begun:
        what = f"the environment accepts jobs {block.why}, when EC2 has no instances"
        yield Finding(OPEN, environment, "State", what, "set the state of its queue to DISABLED; a schedule enables it")
    moments = [
        (moment, arguments["State"] == "ENABLED")
        for moment, arguments, source in _scheduled(all_, "batch:update")
        if "State" in arguments and any(resource.id in source for resource in switched)
    ]
    yield from _check_schedule(environment, moments, block, "schedule that sets State")


def _queues(all_: Templates, environment: Resource) -> list[Resource]:
    return [
        queue
        for queue in all_.of("AWS::Batch::JobQueue")
        if any(
            all_.same((order.get("ComputeEnvironment"), queue), ({"Ref": environment.id}, environment))
            for order in queue.properties.get("ComputeEnvironmentOrder", ())
        )
    ]


def _nodes(all_: Templates, nodes: Resource, block: _BlockNow) -> Iterator[Finding]:
    scaling = settings(nodes.properties, "ScalingConfig")
    for key in () if block.has_begun else ("MinSize", "DesiredSize"):
        if str(scaling.get(key, "1")) != "0":
            what = f"the node group requests instances {block.why}, when EC2 has none"
            yield Finding(OPEN, nodes, f"ScalingConfig/{key}", what, f"set {key} to 0; a schedule fills the group")
    name = nodes.properties.get("NodegroupName")
    moments = [
        (moment, str(settings(arguments, "ScalingConfig").get("DesiredSize")) != "0")
        for moment, arguments, source in _scheduled(all_, "eks:updateNodegroupConfig")
        if "ScalingConfig" in arguments and (arguments.get("NodegroupName") == name or nodes.id in source)
    ]
    yield from _check_schedule(nodes, moments, block, "schedule that sets DesiredSize")


def _scheduled(all_: Templates, call: str) -> Iterator[tuple[str, Properties, str]]:
    """Scheduled calls of an AWS API: time, arguments, and the text of the arguments."""
    for schedule in all_.of("AWS::Scheduler::Schedule"):
        target = settings(schedule.properties, "Target")
        source = text(target.get("Input"))
        if f":aws-sdk:{call}".lower() not in text(target.get("Arn")).lower():
            continue
        try:
            arguments = json.loads(source)
        except ValueError:
            continue
        if isinstance(arguments, dict):
            moment = str(schedule.properties.get("ScheduleExpression", ""))
            yield moment.removeprefix("at(").removesuffix(")"), arguments, source


def _check_schedule(
    user: Resource, moments: Sequence[tuple[object, bool]], block: _BlockNow, by: str
) -> Iterator[Finding]:
    window = block.window
    opened = [_moment(at) for at, filled in moments if filled]
    closed = [_moment(at) for at, filled in moments if not filled]
    if window is not None and any(at is not None and at < window.start for at in opened):
        what = f"instances are requested before the capacity block begins at {window.start.isoformat()}"
        yield Finding(OPEN, user, "", what, f"move the {by}")
    if not closed:
        if block.is_over:
            return
        what = "nothing drains the instances before the capacity block ends, when EC2 terminates them"
        yield Finding(OPEN, user, "", what, f"add a {by} 45 minutes before the end")
    elif window is not None and all(at is not None and at > window.drained for at in closed):
        what = f"the instances are drained later than {window.drained.isoformat()}, 45 minutes before the block ends"
        yield Finding(OPEN, user, "", what, f"move the {by}")


def _moment(at: object) -> datetime | None:
    """A time of a template, in UTC if it has no time zone; None if it is known at deployment only."""
    try:
        moment = datetime.fromisoformat(str(at))
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)


def warm_pool(all_: Templates, facts: Facts) -> Iterator[Finding]:
    by_group = {user.key: launch for launch in launches(all_) for user in launch.users}
    for pool in all_.of("AWS::AutoScaling::WarmPool"):
        group = all_.follow(pool.properties.get("AutoScalingGroupName"), pool)
        if group is None:
            continue
        launch = by_group.get(group.key)
        market = settings(launch.data, "InstanceMarketOptions").get("MarketType") if launch else None
        types = instance_types(group)
        if len(types) > 1 or "MixedInstancesPolicy" in group.properties:
            what = f"a warm pool beside a group of several instance types or markets ({', '.join(types) or 'mixed'})"
            yield Finding(POOL, pool, "AutoScalingGroupName", what, "leave one on-demand type, or remove the warm pool")
        elif market is not None:
            what = f"a warm pool beside a group whose instances are bought as {market}"
            yield Finding(POOL, pool, "AutoScalingGroupName", what, "a warm pool takes on-demand instances only")


METADATA = "NXP-HOST-1"
IMAGE = "NXP-HOST-2"
DISKS = "NXP-HOST-3"


def metadata(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for launch in launches(all_):
        options = settings(launch.data, "MetadataOptions")
        place = f"{launch.inside}MetadataOptions"
        if options.get("HttpEndpoint") == "disabled":
            continue
        if options.get("HttpTokens") != "required":
            what = "IMDSv1 is enabled, which a server-side request forgery can read"
            yield Finding(METADATA, launch.resource, place, what, "set HttpTokens to required")
        hops = str(options.get("HttpPutResponseHopLimit", "unset"))
        unused = launch.resource.type == TEMPLATE and not launch.users  # may be used for containers
        containers = unused or any(user.type in (BATCH, NODES) for user in launch.users)
        if hops != "1" and not (containers and hops == "2"):
            what = f"the hop limit of the metadata service is {hops}"
            limit = "2 at most: containers need no more" if containers else "1: only the host itself needs the service"
            remedy = f"set HttpPutResponseHopLimit to {limit}"
            yield Finding(METADATA, launch.resource, place, what, remedy)


def image(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for launch in launches(all_):
        id_ = launch.data.get("ImageId")
        fault = _fault_of_image(id_, launch.resource, all_, facts)
        if fault is not None:
            yield Finding(IMAGE, launch.resource, f"{launch.inside}ImageId", *fault)
        known = (facts.images or {}).get(id_) if isinstance(id_, str) else None
        fault = _fault_of_root(known, tables(launch.data, "BlockDeviceMappings")) if known else None
        if fault is not None:
            yield Finding(IMAGE, launch.resource, f"{launch.inside}BlockDeviceMappings", *fault)


def _fault_of_root(known: KnownImage, disks: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """Against the root volume of the image; the lock file has it for images that [amis] names."""
    if known.root_device is None or not disks:
        return None  # without mappings, the image's own apply
    root = next((disk for disk in disks if disk.get("DeviceName") == known.root_device), None)
    if root is None:
        what = f"no disk is mapped to {known.root_device}, the image's root device, so its settings are the image's"
        return what, f"map the root volume to {known.root_device}"
    size = settings(root, "Ebs").get("VolumeSize")
    if known.root_gib is not None and isinstance(size, int) and size < known.root_gib:
        what = f"the root volume has {size} GiB, less than the {known.root_gib} GiB of the image's snapshot"
        return what, f"set `disk` of the fleet to {known.root_gib} or more"
    return None


def _fault_of_image(value: object, at: Resource, all_: Templates, facts: Facts) -> tuple[str, str] | None:
    lock = "run `nxpipe ami lock` and take the image from the lock file"
    if value is None:
        return None  # Batch and EKS choose an image
    if isinstance(value, str) and value in facts.unlocked_images:
        return None  # resolved once, at deployment; synthesis warns of it
    if isinstance(value, str) and value.startswith("ami-"):
        return _fault_of_id(value, at, facts)
    if _moves(value, at, all_):
        return "an SSM parameter names the image when an instance starts, so instances of one fleet may differ", lock
    return None


def _moves(value: object, at: Resource, all_: Templates) -> bool:
    if isinstance(value, str):
        return "resolve:ssm:" in value
    name, parameter = intrinsic(value)
    if name != "Ref":
        return False
    document = next((template.document for template in all_.all if template.stack == at.stack), {})
    kind = ((document.get("Parameters") or {}).get(parameter) or {}).get("Type", "")
    return "SSM::Parameter::Value" in str(kind)


def _fault_of_id(id_: str, at: Resource, facts: Facts) -> tuple[str, str] | None:
    if facts.images is None or id_ in facts.given_images:
        return None
    known = facts.images.get(id_)
    if known is None:
        return f"{id_} is not in the lock file", "run `nxpipe ami lock` and take the image from there"
    if at.region is not None and known.region != at.region:
        return f"{id_} is an image of {known.region}, but the stack is in {at.region}", "use an image of that region"
    if known.expires is not None and known.expires <= facts.today:
        return f"{id_} expired on {known.expires}", "run `nxpipe ami lock` for a newer image"
    return None


def local_disks(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for config in all_.of("AWS::SageMaker::EndpointConfig"):
        types = [str(variant.get("InstanceType")) for variant in tables(config.properties, "ProductionVariants")]
        for type_ in filter(has_local_disks, types if "KmsKeyId" in config.properties else ()):
            what = f"it has a KMS key, which SageMaker refuses for {type_}, whose local disks the hardware encrypts"
            yield Finding(DISKS, config, "KmsKeyId", what, "remove KmsKeyId")


COST: Final = "NXP-COST-1"


def within(all_: Templates, facts: Facts) -> Iterator[Finding]:
    if facts.budget is None or facts.prices is None:
        return
    costs = estimate(all_, facts.prices)
    for line in costs.lines:
        if line.unlisted:
            what = f"the cost of {line.what} is not known{line.remark.removeprefix(': no price known')}"
            yield Finding(
                COST,
                line.resource,
                "",
                f"{what}, so it cannot be compared with the budget of ${facts.budget:,}",
                "acknowledge it with the price in the reason, or remove `monthly` from [budget]",
            )
    if costs.monthly > facts.budget:
        dearest = max(costs.lines, key=lambda line: line.hourly or 0)
        yield Finding(
            COST,
            dearest.resource,
            "",
            f"it costs about ${costs.monthly:,.0f} a month, the budget is ${facts.budget:,}; most is {dearest.what}",
            "make the fleets smaller, or raise `monthly` in [budget]",
        )


def facts_of(config: Config, folder: Path) -> Facts:
    """Facts for the rules. `folder` is the folder of nxpipe.toml; relative paths start there."""
    groups = config.cluster.groups if config.cluster else ()
    blocks = [user.capacity for user in (*config.fleets, *groups) if isinstance(user.capacity, CapacityBlock)]
    standbys = [fleet.standby for fleet in config.fleets if isinstance(fleet, ServingFleet) and fleet.standby]
    lock = lock_of(config, folder)
    return Facts(
        project=config.project.name,
        blocks={block.id: Window(block.start, block.end - DRAINED_BEFORE_THE_END) for block in blocks},
        images=known_images(lock),
        given_images=frozenset(standby.image for standby in standbys),
        unlocked_images=unlocked_images(config, lock),
        budget=config.budget.monthly,
        prices=load_prices(),
    )


def accepted_by(config: Config) -> list[Accepted]:
    return [Accepted(entry.rule, entry.resource, entry.reason, entry.expires) for entry in config.acknowledge]


RULES: Final = (
    Rule(
        network_rules.LAYOUT,
        "interfaces of an EFA instance match its network cards in the instance catalogue",
        network_rules.layout,
    ),
    Rule(network_rules.GROUPS, "EFA interfaces list security groups, and no subnet", network_rules.groups_inside),
    Rule(
        network_rules.SELF,
        "the EFA security group allows all traffic to and from itself, by group reference",
        network_rules.talks_to_itself,
    ),
    Rule(network_rules.SUBNET, "instances that communicate by EFA are in one subnet", network_rules.one_subnet),
    Rule(
        rules.BLOCK,
        "a capacity block has its market type, its reservation, no placement group",
        rules.block,
    ),
    Rule(
        rules.OPEN,
        "a capacity block's group is empty before its window, and drained before its end",
        rules.empty_outside,
    ),
    Rule(rules.POOL, "a warm pool has one on-demand instance type", rules.warm_pool),
    Rule(
        network_rules.BATCH_GROUPS,
        "a Batch environment has no security groups if its interfaces have them",
        network_rules.batch_groups,
    ),
    Rule(rules.METADATA, "IMDSv2 is required, one hop (two with containers)", rules.metadata),
    Rule(rules.IMAGE, "the AMI is in the lock file, of the stack's region, and not expired", rules.image),
    Rule(rules.DISKS, "an endpoint on instances with local disks has no KMS key for volumes", rules.local_disks),
    Rule(network_rules.OPEN, "nothing is open to 0.0.0.0/0", network_rules.nothing_open),
    Rule(
        network_rules.ENDPOINT,
        "in a closed network each call has an endpoint, and each endpoint a caller",
        network_rules.reachable,
    ),
    Rule(network_rules.PLAIN, "load balancers use TLS", network_rules.nothing_plain),
    Rule(data_rules.WILDCARD, "no write action has a wildcard resource", data_rules.no_wildcard),
    Rule(data_rules.SIGNER, "a signing key is used for builds or for one channel only", data_rules.one_signer),
    Rule(data_rules.PRIVATE, "buckets are private, EFS and S3 require TLS", data_rules.private),
    Rule(rules.COST, "the monthly cost is known and within the budget", rules.within),
    Rule(KEEP, "stateful resources keep their logical ids", data_rules.keeps_logical_ids),
    Rule(
        data_rules.WEIGHTS,
        "the listener rule with a fleet's traffic weights keeps its template text",
        data_rules.unchanged_rule,
    ),
    Rule(
        data_rules.WEAK,
        "no property reads another stack by a weak reference",
        data_rules.no_weak_reference,
    ),
)


def lint(templates: Templates, facts: Facts) -> Iterator[Finding]:
    """Findings of all rules in templates that are deployed together."""
    for rule in RULES:
        yield from rule.check(templates, facts)
