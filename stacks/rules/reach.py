"""In a network without a way out, what is called from inside has an endpoint, and each endpoint has a caller."""

from collections.abc import Iterator
from typing import Final

from nxpipe.stacks.reach import Need, Unreachable, idle, needs
from nxpipe.stacks.reading.template import Resource, Templates, text
from nxpipe.stacks.rules.finding import Facts, Finding

ENDPOINT: Final = "NXP-NET-2"

_WAYS_OUT: Final = ("AWS::EC2::InternetGateway", "AWS::EC2::NatGateway", "AWS::EC2::TransitGatewayAttachment")


def reachable(all_: Templates, facts: Facts) -> Iterator[Finding]:
    network = next(all_.of("AWS::EC2::VPC"), None)
    if network is None or any(all_.of(*_WAYS_OUT)):
        return  # a network that exists already, or that has a way out
    there = {_service(each): each for each in all_.of("AWS::EC2::VPCEndpoint")}
    wanted: set[Need] = set()
    for template in all_.all:
        try:
            found = sorted(needs(template.stack, template.document["Resources"]))
        except Unreachable as unreachable:
            what, _, mend = str(unreachable).rpartition("; ")
            yield Finding(ENDPOINT, network, "", what, mend)
            continue
        wanted.update(found)
        for need in found:
            if need.endpoint not in there:
                caller = template.resources[need.caller.partition("/")[2]]
                what = f"it calls {need.endpoint} ({need.call}), to which nothing leads out of the closed network"
                yield Finding(ENDPOINT, caller, "", what, f"add an endpoint for {need.endpoint}")
    for service in idle(wanted, there):
        what = f"nothing in the network calls {service}"
        yield Finding(
            ENDPOINT, there[service], "ServiceName", what, "leave the endpoint out: it costs money by the hour"
        )


def _service(endpoint: Resource) -> str:
    """com.amazonaws.us-east-2.ecr.api -> ecr.api, whatever the region."""
    name = text(endpoint.properties.get("ServiceName"))
    return name.partition("com.amazonaws.")[2].partition(".")[2] or name
