"""An AWS account in one region: answers of AWS as plain facts, read with calls that change nothing."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from functools import partial
from threading import Lock
from typing import Any, Final

from nxpipe.emulator.hardware import INSTANCES
from nxpipe.pipeline.util.aws import client, convert_sdk_errors, error_code, is_denied
from nxpipe.pipeline.util.errors import AwsError
from nxpipe.stacks.names import PROJECT_TAG

_IAM_PREFIXES: Final = {"service-quotas": "servicequotas"}
_GITHUB: Final = "oidc-provider/token.actions.githubusercontent.com"
_SCALING_ROLE: Final = "AWSServiceRoleForAutoScaling"

# Names of EC2's quotas in vCPUs: on demand, and on the spot market. By the letters before the generation of a type.
_QUOTAS: Final[Mapping[str, tuple[str, str]]] = {
    "inf": ("Running On-Demand Inf instances", "All Inf Spot Instance Requests"),
    "trn": ("Running On-Demand Trn instances", "All Trn Spot Instance Requests"),
    "g": ("Running On-Demand G and VT instances", "All G and VT Spot Instance Requests"),
    "vt": ("Running On-Demand G and VT instances", "All G and VT Spot Instance Requests"),
    "p": ("Running On-Demand P instances", "All P4, P3 and P2 Spot Instance Requests"),
    "f": ("Running On-Demand F instances", "All F Spot Instance Requests"),
    "x": ("Running On-Demand X instances", "All X Spot Instance Requests"),
}
STANDARD: Final = (
    "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances",
    "All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests",
)


def quota_name(instance_type: str, *, spot: bool) -> str:
    """The EC2 quota that limits an instance type."""
    letters = re.match("[a-z]*", instance_type)
    names = _QUOTAS.get(letters[0] if letters else "", STANDARD)
    return names[1] if spot else names[0]


@dataclass(frozen=True)
class Quota:
    """A quota of the account; `code` is for a request to increase it."""

    service: str
    code: str
    value: float


@dataclass(frozen=True)
class Image:
    """An AMI as EC2 describes it now."""

    state: str
    created: date
    deprecated: date | None


@dataclass(frozen=True)
class Reservation:
    """A capacity reservation or capacity block as EC2 describes it."""

    state: str
    type: str
    zone: str
    count: int
    start: datetime | None
    end: datetime | None


class MissingPermission(AwsError):
    """A call that the identity may not make."""

    def __init__(self, action: str) -> None:
        super().__init__(f"AWS: permission for {action} is missing")
        self.action = action


class Account:
    """The account of the current credentials in one region: answers of AWS as plain facts."""

    def __init__(self, region: str | None) -> None:
        self._clients: dict[tuple[str, str | None], Any] = {}
        self._lock = Lock()
        sts = self._client("sts", region)
        self.region: str = sts.meta.region_name
        with convert_sdk_errors(f"identify the account of the credentials in {self.region}"):
            identity = sts.get_caller_identity()
        self.id: str = identity["Account"]
        self.partition: str = identity["Arn"].split(":")[1]

    def _client(self, service: str, region: str | None) -> Any:
        with self._lock:
            if (service, region) not in self._clients:
                self._clients[service, region] = client(service, region)
            return self._clients[service, region]

    def call(self, service: str, method: str, *, region: str | None = None, **parameters: Any) -> dict[str, Any]:
        sdk = self._client(service, region or self.region)
        answer: dict[str, Any] = self._converted(service, sdk, method, lambda: getattr(sdk, method)(**parameters))
        return answer

    def items(self, service: str, method: str, key: str, **parameters: Any) -> list[Any]:
        """The entries of all pages of a listing. S3 leaves empty lists out."""
        sdk = self._client(service, self.region)
        pages = sdk.get_paginator(method).paginate(**parameters)
        found: list[Any] = self._converted(
            service, sdk, method, lambda: [item for page in pages for item in page.get(key, ())]
        )
        return found

    def _converted(self, service: str, sdk: Any, method: str, ask: Callable[[], Any]) -> Any:
        action = f"{_IAM_PREFIXES.get(service, service)}:{sdk.meta.method_to_api_mapping[method]}"
        try:
            with convert_sdk_errors(f"call {action} in {sdk.meta.region_name}"):
                return ask()
        except AwsError as error:
            if is_denied(error):
                raise MissingPermission(action) from error
            raise

    def parameter(self, name: str) -> str | None:
        answer = _unless(("ParameterNotFound",), lambda: self.call("ssm", "get_parameter", Name=name))
        return answer["Parameter"]["Value"] if answer else None

    def zone_ids(self) -> dict[str, str]:
        zones = self.call("ec2", "describe_availability_zones")["AvailabilityZones"]
        return {zone["ZoneName"]: zone["ZoneId"] for zone in zones if zone.get("State", "available") == "available"}

    def offers(self, types: Collection[str]) -> dict[str, set[str]]:
        """Ids of the zones that offer each instance type."""
        found: dict[str, set[str]] = defaultdict(set)
        for offer in self.items(
            "ec2",
            "describe_instance_type_offerings",
            "InstanceTypeOfferings",
            LocationType="availability-zone-id",
            Filters=[{"Name": "instance-type", "Values": sorted(types)}],
        ):
            found[offer["InstanceType"]].add(offer["Location"])
        return found

    def vcpus(self, types: Collection[str]) -> dict[str, int]:
        """vCPUs by instance type, as far as the region has it: a filter accepts any name."""
        if not types:
            return {}
        named = [{"Name": "instance-type", "Values": sorted(types)}]
        entries = self.items("ec2", "describe_instance_types", "InstanceTypes", Filters=named)
        return {entry["InstanceType"]: entry["VCpuInfo"]["DefaultVCpus"] for entry in entries}

    def quotas(self, service: str, names: Collection[str]) -> dict[str, Quota]:
        """Quotas by name: the applied ones, and AWS's defaults for those that were never changed."""
        found = self._listed_quotas("list_service_quotas", service)
        if not set(names) <= found.keys():
            found = self._listed_quotas("list_aws_default_service_quotas", service) | found
        return found

    def _listed_quotas(self, method: str, service: str) -> dict[str, Quota]:
        entries = self.items("service-quotas", method, "Quotas", ServiceCode=service)
        return {
            entry["QuotaName"]: Quota(service, entry["QuotaCode"], entry["Value"])
            for entry in entries
            if "Value" in entry
        }

    def used_vcpus(self, project: str) -> dict[str, int]:
        """vCPUs of running instances by quota, without those of the project and of capacity blocks."""
        used: dict[str, int] = defaultdict(int)
        states = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
        for reservation in self.items("ec2", "describe_instances", "Reservations", Filters=states):
            for instance in reservation["Instances"]:
                own = {"Key": PROJECT_TAG, "Value": project} in instance.get("Tags", ())
                market = instance.get("InstanceLifecycle")
                if own or market == "capacity-block":
                    continue
                name = quota_name(instance["InstanceType"], spot=market == "spot")
                used[name] += _vcpus_of(instance)
        return used

    def service_zones(self, services: Collection[str]) -> dict[str, list[str]]:
        """Zones of the interface endpoints of each service that the region has; AWS refuses a list with another one."""
        names = {f"com.amazonaws.{self.region}.{service}": service for service in services}
        while names:
            try:
                answer = self.call("ec2", "describe_vpc_endpoint_services", ServiceNames=sorted(names))
            except AwsError as error:
                absent = [name for name in names if f"'{name}'" in str(error)]
                if error_code(error) != "InvalidServiceName" or not absent:
                    raise
                names = {name: service for name, service in names.items() if name not in absent}
                continue
            details = answer["ServiceDetails"]
            return {names[entry["ServiceName"]]: entry["AvailabilityZones"] for entry in details}
        return {}

    def image(self, id_: str) -> Image | None:
        absent = ("InvalidAMIID.NotFound", "InvalidAMIID.Unavailable")
        request = partial(self.call, "ec2", "describe_images", ImageIds=[id_], IncludeDeprecated=True)
        images = (_unless(absent, request) or {"Images": []})["Images"]
        if not images:
            return None
        created, deprecated = images[0]["CreationDate"], images[0].get("DeprecationTime")
        return Image(images[0]["State"], _day(created), _day(deprecated) if deprecated else None)

    def has_container(self, registry: str, repository: str, digest: str) -> bool:
        account, _, _, region, *_ = registry.split(".")
        request = partial(
            self.call,
            "ecr",
            "describe_images",
            region=region,
            registryId=account,
            repositoryName=repository,
            imageIds=[{"imageDigest": digest}],
        )
        return _unless(("ImageNotFoundException", "RepositoryNotFoundException"), request) is not None

    def reservation(self, id_: str) -> Reservation | None:
        absent = ("InvalidCapacityReservationId.NotFound", "InvalidCapacityReservationId.Malformed")
        request = partial(self.call, "ec2", "describe_capacity_reservations", CapacityReservationIds=[id_])
        found = (_unless(absent, request) or {"CapacityReservations": []})["CapacityReservations"]
        if not found:
            return None
        entry = found[0]
        return Reservation(
            entry["State"],
            entry["InstanceType"],
            entry["AvailabilityZone"],
            entry["TotalInstanceCount"],
            entry.get("StartDate"),
            entry.get("EndDate"),
        )

    def github_providers(self, project: str) -> dict[str, bool]:
        """ARNs of GitHub's OIDC providers, and whether the project's release stack created them."""
        providers = self.call("iam", "list_open_id_connect_providers")["OpenIDConnectProviderList"]
        arns = [entry["Arn"] for entry in providers if entry["Arn"].endswith(f":{_GITHUB}")]
        return {arn: {"Key": PROJECT_TAG, "Value": project} in self._provider_tags(arn) for arn in arns}

    def _provider_tags(self, arn: str) -> list[dict[str, str]]:
        provider = self.call("iam", "get_open_id_connect_provider", OpenIDConnectProviderArn=arn)
        tags: list[dict[str, str]] = provider.get("Tags", [])
        return tags

    def default_key(self) -> str:
        key: str = self.call("ec2", "get_ebs_default_kms_key_id")["KmsKeyId"]
        return key

    def scaling_may_use(self, key: str) -> bool:
        """True for AWS's own key, and for a key with a grant or a policy for the role of Auto Scaling."""
        if key.endswith("alias/aws/ebs") or self._is_of_aws(key):
            return True
        grants = self.items("kms", "list_grants", "Grants", KeyId=key)
        if any(_SCALING_ROLE in grant.get("GranteePrincipal", "") for grant in grants):
            return True
        return _SCALING_ROLE in self.call("kms", "get_key_policy", KeyId=key, PolicyName="default")["Policy"]

    def _is_of_aws(self, key: str) -> bool:
        manager: str = self.call("kms", "describe_key", KeyId=key)["KeyMetadata"].get("KeyManager", "CUSTOMER")
        return manager == "AWS"

    def confirmed(self, topic: str) -> dict[str, bool] | None:
        """E-mail addresses that are subscribed to a topic, and whether they are confirmed; None without the topic."""
        arn = f"arn:{self.partition}:sns:{self.region}:{self.id}:{topic}"
        listing = partial(self.items, "sns", "list_subscriptions_by_topic", "Subscriptions", TopicArn=arn)
        entries = _unless(("NotFound", "NotFoundException"), listing)
        if entries is None:
            return None
        return {entry["Endpoint"]: entry["SubscriptionArn"].startswith("arn:") for entry in entries}


def _unless(codes: Sequence[str], request: Callable[[], Any]) -> Any:
    """The answer of a request; None if AWS answers that there is no such resource."""
    try:
        return request()
    except AwsError as error:
        if error_code(error) not in codes:
            raise
        return None


def _vcpus_of(instance: Mapping[str, Any]) -> int:
    options = instance.get("CpuOptions")
    if options:
        return int(options["CoreCount"]) * int(options["ThreadsPerCore"])
    known = INSTANCES.get(instance["InstanceType"])
    return known.vcpus if known else 0


def _day(text: str) -> date:
    return date.fromisoformat(text[:10])
