"""The tables about the account that the stacks are deployed to: money, AMIs, alarms, releases, and what is accepted."""

from datetime import date
from typing import Annotated

from pydantic import Field

from nxpipe.pipeline.config.forms import Absent, Unit, text
from nxpipe.pipeline.config.kinds import DISTINCT, LIST, MAYBE_EMPTY, Day, Email, Folder, Image, OidcProvider, Slug
from nxpipe.pipeline.config.table import Table

_Sdk = Annotated[str, text("[0-9]+(?:\\.[0-9]+){1,3}", 'a version of the Neuron SDK such as "2.32.0"', longest=32)]


class Budget(Table):
    """What the project may cost."""

    monthly: Annotated[int | None, Field(ge=1), Unit("US dollars"), Absent("no limit")] = Field(
        default=None,
        description="A month of all fleets at their desired sizes. What is over it is not synthesised, and an alarm "
        "tells of real costs.",
        examples=[20000],
    )


class Amis(Table):
    """The machine images that instances start from."""

    sdk: Annotated[tuple[_Sdk, ...], LIST, DISTINCT] = Field(
        default=("2.32.0",),
        description="The versions of the Neuron SDK in use: the images are of the first, and each has a part of the "
        "compile cache. One that was replaced stays in the list until no instance of it is left.",
        examples=[["2.33.0", "2.32.0"]],
    )
    lock: Folder = Field(
        default="nxpipe.amis.lock",
        description="The file that `nxpipe ami lock` writes: one image for each region and kind. A relative path "
        "starts at this file.",
        examples=["nxpipe.amis.lock"],
    )


class Observe(Table):
    """Who hears of alarms."""

    emails: Annotated[tuple[Email, ...], MAYBE_EMPTY, DISTINCT] = Field(
        default=(), description="Addresses that alarms are sent to.", examples=[["oncall@example.com"]]
    )


class Release(Table):
    """The GitHub repository whose jobs may publish artifacts, without a stored key."""

    repository: Annotated[
        str, text("[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+", 'a repository such as "OWNER/NAME"', longest=140)
    ] = Field(description="The repository.", examples=["example/models"])
    environment: Annotated[str, text("[A-Za-z0-9_-]+", "the name of a GitHub environment", longest=100)] = Field(
        default="release", description="The environment of the jobs that may publish.", examples=["release"]
    )
    channels: Annotated[tuple[Slug, ...], MAYBE_EMPTY, DISTINCT] = Field(
        default=("staging", "production"),
        description="The channels that jobs may promote to, each in the environment of its name.",
        examples=[["staging", "production"]],
    )
    provider: Annotated[OidcProvider | None, Absent("it is made")] = Field(
        default=None,
        description="GitHub's OpenID Connect provider, when the account has it already: there is room for one.",
        examples=["arn:aws:iam::123456789012:oidc-provider/token.actions.githubusercontent.com"],
    )


class Farm(Table):
    """Machines without accelerators that compile: AWS Batch."""

    max_vcpus: Annotated[int, Field(ge=4, le=10000)] = Field(
        default=256, description="How many virtual processors compile at once at most.", examples=[256]
    )
    image: Image = Field(
        description="The container that runs `nxpipe build`, by its digest.",
        examples=[f"123456789012.dkr.ecr.us-east-2.amazonaws.com/nxpipe@sha256:{'0' * 64}"],
    )


class Acknowledge(Table):
    """A finding of the guards that is accepted; each is headed `[[acknowledge]]`."""

    rule: Annotated[str, text("[A-Za-z0-9][A-Za-z0-9._:-]*", 'the id of a rule such as "NXP-NET-1"', longest=128)] = (
        Field(description="The rule.", examples=["NXP-NET-1"])
    )
    resource: Annotated[str, text("[!-~]+", "the path of a construct, where * stands for anything", longest=255)] = (
        Field(default="*", description="What it is accepted for.", examples=["search-serve-web/*"])
    )
    reason: Annotated[str, text(r"[^\x00-\x1f]{12,}", "a reason of at least 12 characters", longest=1000)] = Field(
        description="Why it is accepted.", examples=["behind the company's own proxy"]
    )
    expires: Day = Field(description="From when on it is not accepted any more.", examples=[date(2027, 6, 1)])
