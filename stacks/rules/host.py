"""Rules about what runs on an instance's first minute: its metadata service and its image."""

from collections.abc import Iterator

from nxpipe.stacks.reading.launches import BATCH, NODES, TEMPLATE, launches
from nxpipe.stacks.reading.template import Resource, Templates, intrinsic, settings
from nxpipe.stacks.rules.finding import Facts, Finding

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
