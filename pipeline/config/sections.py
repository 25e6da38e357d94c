"""The tables [project], [rollout], [build], [verify], [channels.NAME] and [signing]."""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, ValidationInfo, field_validator

from nxpipe.pipeline.config.kinds import (
    ASCENDING,
    DISTINCT,
    LIST,
    MAYBE_EMPTY,
    Account,
    Alarm,
    Parallelism,
    PublicKeyFile,
    Region,
    SigningKey,
    Slug,
    duration,
    write_duration,
)
from nxpipe.pipeline.config.schema import Absent, ListRule, Table, Unit, refuse


class Project(Table):
    """The project, and the AWS account and region that it is deployed to."""

    name: Slug = Field(description="The prefix of the names of all stacks and their resources.", examples=["search"])
    region: Annotated[Region | None, Absent("the region of the AWS credentials")] = Field(
        default=None, description="The AWS region that the stacks are deployed to.", examples=["us-east-2"]
    )
    account: Annotated[Account | None, Absent("the account of the AWS credentials")] = Field(
        default=None, description="The AWS account that the stacks are deployed to.", examples=["123456789012"]
    )


_Latency = Annotated[timedelta, duration("1ms", "1h")]
_Bake = Annotated[timedelta, duration("1m", "7d")]


class Guards(Table):
    """Absolute limits of a new version, independent of the old one."""

    alarms: Annotated[tuple[Alarm, ...], MAYBE_EMPTY, DISTINCT] = Field(
        default=(),
        description="CloudWatch alarms that roll back when they fire.",
        examples=[["search-errors"]],
    )
    max_error_rate: float = Field(
        default=0.01,
        gt=0,
        lt=1,
        description="The error rate of the service level objective. An alarm fires above it, minutes in which"
        " the old version exceeds it do not count for a rollout, and a new version with all "
        "traffic is rolled back on evidence that it exceeds it.",
        examples=[0.01],
    )
    max_p99: Annotated[_Latency | None, Absent("no limit")] = Field(
        default=None,
        description="The p99 latency objective; an alarm fires above it. Rollouts compare the latencies of "
        "both versions.",
        examples=["800ms"],
    )


_ENDS_IN_100 = ListRule(
    "in ascending order that end in 100", lambda steps: ASCENDING.holds(steps) and steps[-1:] == (100,)
)


class RolloutShadow(Table):
    """A phase before the first step: the new version gets copies of requests, and its responses are compared."""

    percent: Annotated[float, Field(gt=0, le=100), Unit("percent of requests")] = Field(
        default=10.0, description="The share of requests for text that are mirrored.", examples=[10.0]
    )
    bake_min: _Bake = Field(
        default=timedelta(minutes=5), description="The minimum duration of the phase.", examples=["5m"]
    )
    bake_max: _Bake = Field(
        default=timedelta(hours=1),
        description="The maximum duration of the phase; an undecided phase then waits for an operator.",
        examples=["1h"],
    )

    @field_validator("bake_max")
    @classmethod
    def _not_before_the_minimum(cls, longest: timedelta, info: ValidationInfo) -> timedelta:
        return _require_not_before(longest, info.data.get("bake_min"))


def _require_not_before(longest: timedelta, shortest: timedelta | None) -> timedelta:
    if shortest is not None and longest < shortest:
        raise refuse(f'a duration of at least bake_min, "{write_duration(shortest)}"')
    return longest


class Rollout(Table):
    """Canary rollouts: traffic moves in steps, each evaluated by an anytime-valid sequential test."""

    steps: Annotated[
        tuple[Annotated[int, Field(ge=1, le=100), Unit("percent of traffic")], ...], LIST, _ENDS_IN_100
    ] = Field(
        default=(5, 25, 50, 100),
        description="The traffic shares of the new version, step by step.",
        examples=[[5, 25, 50, 100]],
    )
    alpha: float = Field(
        default=0.01,
        gt=0,
        le=0.1,
        description="The bound on the probability of rolling back a version that is as good as the old one.",
        examples=[0.01],
    )
    beta: float = Field(
        default=0.05,
        gt=0,
        le=0.2,
        description="The bound on the probability of advancing a version that is worse than a step tolerates.",
        examples=[0.05],
    )
    bake_min: _Bake = Field(
        default=timedelta(minutes=5), description="The minimum duration of a step.", examples=["5m"]
    )
    bake_max: _Bake = Field(
        default=timedelta(hours=1),
        description="The maximum duration of a step; an undecided step then waits for an operator.",
        examples=["1h"],
    )
    margin: float = Field(
        default=1.0,
        ge=1,
        le=1.5,
        description="The odds ratio of bad requests, new to old version, that counts as no worse.",
        examples=[1.0],
    )
    bursts: float = Field(
        default=0.0,
        ge=0,
        le=5,
        description="For bursty errors: the standard deviation of the logarithm of a version's error rate "
        "from minute to minute in normal operation.",
        examples=[0.0],
    )
    shadow: Annotated[RolloutShadow | None, Absent("none; the first step is the first evaluation")] = Field(
        default=None,
        description="A shadow phase, for fleets whose server is `nxpipe serve`. No traffic moves in it.",
    )
    guards: Guards = Field(default_factory=Guards, description="Absolute limits, which roll back at once.")

    @field_validator("bake_max")
    @classmethod
    def _not_before_the_minimum(cls, longest: timedelta, info: ValidationInfo) -> timedelta:
        return _require_not_before(longest, info.data.get("bake_min"))


Backend: TypeAlias = Literal["emulator", "neuronx"]


class Build(Table):
    """The compilation of models."""

    backend: Backend = Field(
        default="emulator",
        description="The compiler: nxpipe's own, or AWS's neuronx-cc beside it if it is installed, whose programs "
        "run on devices.",
        examples=["emulator"],
    )

    executor: Literal["local", "ray", "batch"] = Field(
        default="local",
        description="The executor of compile jobs: processes of this machine, a Ray cluster, or AWS Batch.",
        examples=["local"],
    )
    parallelism: Parallelism = Field(
        default="auto",
        description='The number of parallel compile jobs; "auto" follows available processors and memory.',
        examples=[4],
    )
    timeout: Annotated[timedelta | None, duration("1m", "7d"), Absent("no limit")] = Field(
        default=None, description="The time limit of one compile job.", examples=["2h"]
    )


class Verify(Table):
    """Thresholds on the deviation of emulated outputs from PyTorch in fp32; artifacts beyond them are not published."""

    min_cosine: float = Field(
        default=0.999,
        gt=0,
        le=1,
        description="The minimum cosine similarity of an emulated output and PyTorch's.",
        examples=[0.999],
    )
    max_relative_error: float = Field(
        default=0.05,
        gt=0,
        le=1,
        description="The maximum absolute difference of the two outputs, relative to the largest magnitude in"
        " PyTorch's.",
        examples=[0.05],
    )
    max_kl: Annotated[float | None, Field(gt=0), Unit("nats"), Absent("not checked")] = Field(
        default=None,
        description="For logits: the maximum mean Kullback-Leibler divergence of the softmax from PyTorch's.",
        examples=[0.01],
    )
    min_top1: Annotated[float | None, Field(gt=0, le=1), Absent("not checked")] = Field(
        default=None,
        description="For logits: the minimum top-1 agreement with PyTorch, as a share of positions.",
        examples=[0.99],
    )


class ChannelRules(Table):
    """The evidence that an artifact needs for a promotion to the channel, and to the channels of its fleets'
    environments. A channel without the table requires `emulated` and `device` if a fleet with devices (no `rehearsal`)
    fetches from it, else `emulated`."""

    require: Annotated[
        tuple[Literal["emulated", "instructions", "xla", "device"], ...],
        Field(strict=False, min_length=1, max_length=4),
        DISTINCT,
    ] = Field(
        description="The kinds of evidence, by what ran: the graph in the engines' arithmetic, the program on the"
        " emulated core, the HLO module by XLA on the CPU, the NEFF on Neuron devices.",
        examples=[["emulated", "xla", "device"]],
    )


class TrustedKey(Table):
    """A trusted public key, as `[[signing.trusted]]`."""

    name: Slug = Field(description="The name of the key in messages and logs.", examples=["release"])
    key: PublicKeyFile = Field(
        description="The public key in PEM, Ed25519 or ECDSA P-256. A relative path starts at this file.",
        examples=["file:release.key.pub"],
    )
    channels: Annotated[tuple[Slug, ...] | None, LIST, DISTINCT, Absent("all channels")] = Field(
        default=None, description="The channels that the key may sign for.", examples=[["production"]]
    )
    expires: Annotated[datetime | None, Absent("never")] = Field(
        default=None,
        description="The date from which new signatures of the key are rejected. Remove a stolen key instead.",
        examples=[datetime(2027, 11, 1, tzinfo=UTC)],
    )

    @field_validator("expires")
    @classmethod
    def _require_offset(cls, moment: datetime | None) -> datetime | None:
        if moment is not None and moment.tzinfo is None:
            raise refuse(f"a time with an offset, such as {moment.isoformat()}Z; the expiry applies in all time zones")
        return moment

    signs: Annotated[Literal["artifacts", "channels"] | None, Absent("both")] = Field(
        default=None,
        description="The scope of the key: artifacts, or changes of channels.",
        examples=["artifacts"],
    )

    def may_sign_for(self, channel: str) -> bool:
        return self.channels is None or channel in self.channels

    def vouches_for(self, what: Literal["artifacts", "channels"]) -> bool:
        return self.signs in (None, what)


class PromotingKey(Table):
    """The signing key of one channel, as `[[signing.promoting]]`."""

    channel: Slug = Field(description="The channel.", examples=["production"])
    key: SigningKey = Field(
        description="The Ed25519 key file or KMS key. A relative path starts at this file.",
        examples=["kms:arn:aws:kms:us-east-2:123456789012:alias/production"],
    )


class Signing(Table):
    """Signatures of artifacts and of channels."""

    key: Annotated[SigningKey | None, Absent("artifacts are not signed")] = Field(
        default=None,
        description="The Ed25519 key file or KMS key that signs manifests, and promotions to channels in "
        "`require` that are not in `promoting`. A relative path starts at this file.",
        examples=["file:release.key"],
    )
    promoting: Annotated[tuple[PromotingKey, ...], MAYBE_EMPTY] = Field(
        default=(),
        description="Separate keys for promotions and rollbacks, so that build jobs cannot promote.",
    )
    trusted: Annotated[tuple[TrustedKey, ...], MAYBE_EMPTY] = Field(
        default=(),
        description="The trusted public keys. Default: the public half of `key`, from the file beside it.",
    )
    threshold: Annotated[int, Field(ge=1, le=8), Unit("keys")] = Field(
        default=1, description="The number of trusted signatures that an artifact requires.", examples=[2]
    )
    require: Annotated[tuple[Slug, ...], MAYBE_EMPTY, DISTINCT] = Field(
        default=(),
        description="Channels that accept signed artifacts only and sign their promotions and rollbacks. They"
        " need no fleet.",
        examples=[["production"]],
    )

    @field_validator("trusted")
    @classmethod
    def _unique_names(cls, trusted: tuple[TrustedKey, ...]) -> tuple[TrustedKey, ...]:
        names = [entry.name for entry in trusted]
        duplicate = next((name for name in names if names.count(name) > 1), None)
        if duplicate is not None:
            raise refuse("unique names of keys", found=f'"{duplicate}" twice')
        return trusted

    @field_validator("require")
    @classmethod
    def _require_enough_keys(cls, channels: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if not {"key", "trusted", "threshold"} <= info.data.keys():
            return channels  # violations of these keys are reported already
        key, trusted, threshold = info.data["key"], info.data["trusted"], info.data["threshold"]
        if channels and key is None and not trusted:
            raise refuse("signing.key or signing.trusted to be set as well; promotion to these channels requires a key")
        for channel in channels:
            channel_keys = [entry for entry in trusted if entry.may_sign_for(channel)]
            signers = sum(entry.vouches_for("artifacts") for entry in channel_keys) if trusted else 1
            if signers < threshold:
                raise refuse(
                    f"at least {threshold} trusted keys (threshold) that may sign for {channel}, not {signers}"
                )
            if trusted and not any(entry.vouches_for("channels") for entry in channel_keys):
                raise refuse(f"a trusted key that may sign promotions to {channel}; no key of signing.trusted may")
        return channels

    @field_validator("promoting")
    @classmethod
    def _one_key_per_channel(cls, promoting: tuple[PromotingKey, ...]) -> tuple[PromotingKey, ...]:
        channels = [entry.channel for entry in promoting]
        duplicate = next((channel for channel in channels if channels.count(channel) > 1), None)
        if duplicate is not None:
            raise refuse("one key for each channel", found=f'"{duplicate}" twice')
        return promoting

    def key_of(self, channel: str) -> str | None:
        """The key that signs promotions to this channel."""
        return next((entry.key for entry in self.promoting if entry.channel == channel), self.key)
