"""The NXP rules over synthesised templates, those about capacity among them, and the facts that they need."""

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from nxpipe.pipeline.config import Config, ServingFleet
from nxpipe.pipeline.config.fleets import DRAINED_BEFORE_THE_END, CapacityBlock
from nxpipe.stacks.lint import data_rules, network_rules, rules
from nxpipe.stacks.lint.costs import estimate, load_prices
from nxpipe.stacks.lint.data_rules import KEEP
from nxpipe.stacks.lint.finding import Accepted, Facts, Finding, Rule, Window
from nxpipe.stacks.lint.launches import BATCH, GROUP, NODES, TEMPLATE, Launch, compute, instance_types, launches
from nxpipe.stacks.lint.template import Properties, Resource, Templates, intrinsic, settings, text
from nxpipe.stacks.locks import known_images, lock_of, unlocked_images

BLOCK = "NXP-CAP-1"
OPEN = "NXP-CAP-2"
POOL = "NXP-CAP-3"


def block(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for launch in launches(all_):
        for place, what, mend in _faults_of_block(launch, facts):
            yield Finding(BLOCK, launch.resource, f"{launch.inside}{place}", what, mend)
        for user in launch.users if launch.block else ():
            if "PlacementGroup" in compute(user):
                what = "it starts instances of a capacity block in a placement group"
                yield Finding(BLOCK, user, "PlacementGroup", what, "leave it out: a block's instances are near already")


def _faults_of_block(launch: Launch, facts: Facts) -> Iterator[tuple[str, str, str]]:
    if not launch.block:
        if launch.reservation in facts.blocks:
            what = f"{launch.reservation} is a capacity block, and the market type does not say so"
            yield "InstanceMarketOptions", what, "set MarketType to capacity-block"
        return
    specification = settings(launch.data, "CapacityReservationSpecification")
    if not settings(specification, "CapacityReservationTarget"):
        what = "instances of a capacity block do not say of which one"
        yield "CapacityReservationSpecification", what, "name the block in CapacityReservationTarget"
    if settings(launch.data, "Placement").get("GroupName") or settings(launch.data, "Placement").get("GroupId"):
        what = "instances of a capacity block are asked for in a placement group, where there is no capacity for them"
        yield "Placement", what, "leave the group out: a block's instances are near already"


def empty_outside(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for launch in launches(all_):
        for user in launch.users if launch.block else ():
            window = facts.blocks.get(launch.reservation or "")
            if user.type == GROUP:
                yield from _group(all_, user, window)
            elif user.type == BATCH:
                yield from _environment(all_, user, window)
            elif user.type == NODES:
                yield from _nodes(all_, user, window)


def _group(all_: Templates, group: Resource, window: Window | None) -> Iterator[Finding]:
    for key in ("MinSize", "DesiredCapacity"):
        if str(group.properties.get(key, "0")) != "0":
            what = "the group asks for instances before its capacity block begins, and EC2 has none"
            yield Finding(OPEN, group, key, what, f"set {key} to 0; a scheduled action fills the group")
    moments = [
        (action.properties.get("StartTime"), str(action.properties.get("DesiredCapacity")) != "0")
        for action in all_.of("AWS::AutoScaling::ScheduledAction")
        if all_.same((action.properties.get("AutoScalingGroupName"), action), ({"Ref": group.id}, group))
    ]
    yield from _judge(group, moments, window, "scheduled action that sets DesiredCapacity")


def _environment(all_: Templates, environment: Resource, window: Window | None) -> Iterator[Finding]:
    """Batch has no schedules of its own: EventBridge Scheduler switches the environment, or a queue before it."""
    switched = [environment, *_queues(all_, environment)]
    if all(each.properties.get("State", "ENABLED") == "ENABLED" for each in switched):
        what = "the environment takes jobs before its capacity block begins, and EC2 has no instance for them"
        yield Finding(OPEN, environment, "State", what, "set the state of its queue to DISABLED; a schedule enables it")
    moments = [
        (moment, told["State"] == "ENABLED")
        for moment, told, said in _scheduled(all_, "batch:update")
        if "State" in told and any(each.id in said for each in switched)
    ]
    yield from _judge(environment, moments, window, "schedule that sets State")


def _queues(all_: Templates, environment: Resource) -> list[Resource]:
    return [
        queue
        for queue in all_.of("AWS::Batch::JobQueue")
        if any(
            all_.same((order.get("ComputeEnvironment"), queue), ({"Ref": environment.id}, environment))
            for order in queue.properties.get("ComputeEnvironmentOrder", ())
        )
    ]


def _nodes(all_: Templates, nodes: Resource, window: Window | None) -> Iterator[Finding]:
    scaling = settings(nodes.properties, "ScalingConfig")
    for key in ("MinSize", "DesiredSize"):
        if str(scaling.get(key, "1")) != "0":
            what = "the node group asks for instances before its capacity block begins, and EC2 has none"
            yield Finding(OPEN, nodes, f"ScalingConfig/{key}", what, f"set {key} to 0; a schedule fills the group")
    name = nodes.properties.get("NodegroupName")
    moments = [
        (moment, str(settings(told, "ScalingConfig").get("DesiredSize")) != "0")
        for moment, told, said in _scheduled(all_, "eks:updateNodegroupConfig")
        if "ScalingConfig" in told and (told.get("NodegroupName") == name or nodes.id in said)
    ]
    yield from _judge(nodes, moments, window, "schedule that sets DesiredSize")


def _scheduled(all_: Templates, call: str) -> Iterator[tuple[str, Properties, str]]:
    """When a call of AWS is made, with which arguments, and these as text."""
    for schedule in all_.of("AWS::Scheduler::Schedule"):
        target = settings(schedule.properties, "Target")
        said = text(target.get("Input"))
        if f":aws-sdk:{call}".lower() not in text(target.get("Arn")).lower():
            continue
        try:
            told = json.loads(said)
        except ValueError:
            continue
        if isinstance(told, dict):
            moment = str(schedule.properties.get("ScheduleExpression", ""))
            yield moment.removeprefix("at(").removesuffix(")"), told, said


def _judge(user: Resource, moments: Sequence[tuple[object, bool]], window: Window | None, by: str) -> Iterator[Finding]:
    opened = [_moment(at) for at, filled in moments if filled]
    closed = [_moment(at) for at, filled in moments if not filled]
    if window is not None and any(at is not None and at < window.start for at in opened):
        what = f"instances are asked for before the capacity block begins at {window.start.isoformat()}"
        yield Finding(OPEN, user, "", what, f"move the {by}")
    if not closed:
        what = "nothing drains the instances before the capacity block ends, when EC2 terminates them"
        yield Finding(OPEN, user, "", what, f"add a {by} 45 minutes before the end")
    elif window is not None and all(at is not None and at > window.drained for at in closed):
        what = f"the instances are drained later than {window.drained.isoformat()}, 45 minutes before the block ends"
        yield Finding(OPEN, user, "", what, f"move the {by}")


def _moment(at: object) -> datetime | None:
    """A time as templates write it, which is UTC if they do not say; None if only the deployment knows it."""
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
            yield Finding(POOL, pool, "AutoScalingGroupName", what, "leave one type, on demand, or no warm pool")
        elif market is not None:
            what = f"a warm pool beside a group whose instances are bought as {market}"
            yield Finding(POOL, pool, "AutoScalingGroupName", what, "a warm pool takes on-demand instances only")


METADATA = "NXP-HOST-1"
IMAGE = "NXP-HOST-2"


def metadata(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for launch in launches(all_):
        options = settings(launch.data, "MetadataOptions")
        place = f"{launch.inside}MetadataOptions"
        if options.get("HttpEndpoint") == "disabled":
            continue
        if options.get("HttpTokens") != "required":
            what = (
                "the instance answers to the first version of its metadata service, which any request forgery can ask"
            )
            yield Finding(METADATA, launch.resource, place, what, "set HttpTokens to required")
        hops = str(options.get("HttpPutResponseHopLimit", "unset"))
        unused = launch.resource.type == TEMPLATE and not launch.users  # who knows what for
        containers = unused or any(user.type in (BATCH, NODES) for user in launch.users)
        if hops != "1" and not (containers and hops == "2"):
            what = f"the hop limit of the metadata service is {hops}"
            limit = "2 at most: containers need no more" if containers else "1: nothing but the host itself asks"
            mend = f"set HttpPutResponseHopLimit to {limit}"
            yield Finding(METADATA, launch.resource, place, what, mend)


def image(all_: Templates, facts: Facts) -> Iterator[Finding]:
    for launch in launches(all_):
        fault = _fault_of_image(launch.data.get("ImageId"), launch.resource, all_, facts)
        if fault is not None:
            yield Finding(IMAGE, launch.resource, f"{launch.inside}ImageId", *fault)


def _fault_of_image(value: object, at: Resource, all_: Templates, facts: Facts) -> tuple[str, str] | None:
    lock = "run `nxpipe ami lock` and take the image from the lock file"
    if value is None:
        return None  # Batch and EKS choose one of their own
    if isinstance(value, str) and value in facts.unlocked_images:
        return None  # of the day of the deployment, for all its instances; synthesis warns of it
    if isinstance(value, str) and value.startswith("ami-"):
        return _fault_of_id(value, at, facts)
    if _moves(value, at, all_):
        return "the image is whatever a parameter names when an instance starts, so nodes of one fleet may differ", lock
    return None


def _moves(value: object, at: Resource, all_: Templates) -> bool:
    if isinstance(value, str):
        return "resolve:ssm:" in value
    name, parameter = intrinsic(value)
    if name != "Ref":
        return False
    document = next((each.document for each in all_.all if each.stack == at.stack), {})
    kind = ((document.get("Parameters") or {}).get(parameter) or {}).get("Type", "")
    return "SSM::Parameter::Value" in str(kind)


def _fault_of_id(id_: str, at: Resource, facts: Facts) -> tuple[str, str] | None:
    if facts.images is None or id_ in facts.given_images:
        return None
    known = facts.images.get(id_)
    if known is None:
        return f"{id_} is not in the lock file", "run `nxpipe ami lock` and take the image from there"
    if at.region is not None and known.region != at.region:
        return f"{id_} is an image of {known.region}, and the stack is in {at.region}", "take the region's own"
    if known.expires <= facts.today:
        return f"{id_} has been out of date since {known.expires}", "run `nxpipe ami lock` for newer ones"
    return None


COST: Final = "NXP-COST-1"


def within(all_: Templates, facts: Facts) -> Iterator[Finding]:
    if facts.budget is None or facts.prices is None:
        return
    found = estimate(all_, facts.prices)
    if found.monthly > facts.budget:
        dearest = max(found.lines, key=lambda line: line.hourly or 0)
        yield Finding(
            COST,
            dearest.resource,
            "",
            f"a month costs about ${found.monthly:,.0f}, the budget is ${facts.budget:,}; most of it is {dearest.what}",
            "make the fleets smaller, or raise `monthly` in [budget]",
        )


def facts_of(config: Config, folder: Path) -> Facts:
    """`folder` is that of nxpipe.toml, where relative paths of it start."""
    groups = config.cluster.groups if config.cluster else ()
    blocks = [each.capacity for each in (*config.fleets, *groups) if isinstance(each.capacity, CapacityBlock)]
    standbys = [fleet.standby for fleet in config.fleets if isinstance(fleet, ServingFleet) and fleet.standby]
    lock = lock_of(config, folder)
    return Facts(
        project=config.project.name,
        blocks={each.id: Window(each.start, each.end - DRAINED_BEFORE_THE_END) for each in blocks},
        images=known_images(lock),
        given_images=frozenset(each.image for each in standbys),
        unlocked_images=unlocked_images(config, lock),
        budget=config.budget.monthly,
        prices=load_prices(),
    )


def accepted_by(config: Config) -> list[Accepted]:
    return [Accepted(each.rule, each.resource, each.reason, each.expires) for each in config.acknowledge]


RULES: Final = (
    Rule(
        network_rules.LAYOUT,
        "interfaces of an EFA instance are laid out as its catalogue row says",
        network_rules.layout,
    ),
    Rule(
        network_rules.GROUPS, "security groups are inside the interfaces, and no subnet is", network_rules.groups_inside
    ),
    Rule(
        network_rules.SELF,
        "the EFA security group allows all traffic to and from itself, by group",
        network_rules.talks_to_itself,
    ),
    Rule(network_rules.SUBNET, "instances that talk by EFA are in one subnet", network_rules.one_subnet),
    Rule(
        rules.BLOCK,
        "a capacity block has its market type, its reservation, no placement group",
        rules.block,
    ),
    Rule(
        rules.OPEN,
        "a block's group is empty outside its window, and drained before its end",
        rules.empty_outside,
    ),
    Rule(rules.POOL, "a warm pool is of one on-demand type", rules.warm_pool),
    Rule(
        network_rules.BATCH_GROUPS,
        "a Batch environment has no groups if its interfaces have",
        network_rules.batch_groups,
    ),
    Rule(rules.METADATA, "IMDSv2 is required, one hop (two with containers)", rules.metadata),
    Rule(rules.IMAGE, "the AMI is in the lock file, of its region, and not expired", rules.image),
    Rule(network_rules.OPEN, "nothing is open to 0.0.0.0/0", network_rules.nothing_open),
    Rule(
        network_rules.ENDPOINT,
        "in a closed network each call has an endpoint, each endpoint a caller",
        network_rules.reachable,
    ),
    Rule(network_rules.PLAIN, "load balancers speak TLS", network_rules.nothing_plain),
    Rule(data_rules.WILDCARD, "no action that writes has a wildcard resource", data_rules.no_wildcard),
    Rule(data_rules.SIGNER, "a key signs for one duty: builds, or one channel", data_rules.one_signer),
    Rule(data_rules.PRIVATE, "buckets are private, EFS and S3 refuse plain text", data_rules.private),
    Rule(rules.COST, "what the fleets cost a month is within the budget", rules.within),
    Rule(KEEP, "stateful resources keep their logical ids", data_rules.keeps_logical_ids),
    Rule(data_rules.WEIGHTS, "the rule that weighs a fleet's groups keeps its text", data_rules.unchanged_rule),
)


def lint(templates: Templates, facts: Facts) -> Iterator[Finding]:
    """What the rules find in templates that are deployed together."""
    for rule in RULES:
        yield from rule.check(templates, facts)
