"""Keys and trust policy from [signing] of nxpipe.toml. Cryptography is imported only to sign and to verify."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from nxpipe.artifact_store.errors import Refused
from nxpipe.pipeline.artifacts.channels import ENVIRONMENTS, environment_channel
from nxpipe.pipeline.util.files import NoHome, expanded, user_state_folder
from nxpipe.pipeline.util.text import did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nxpipe.artifact_store import Store
    from nxpipe.artifact_store.channel.change import Sign
    from nxpipe.artifact_store.evidence import Evidence
    from nxpipe.artifact_store.trust.channel_trust import ChannelVerifier
    from nxpipe.artifact_store.trust.keys import PublicKey, Signer
    from nxpipe.artifact_store.trust.policy import Policy, TrustedKey
    from nxpipe.pipeline.config import Config
    from nxpipe.pipeline.config import TrustedKey as TrustedKeyTable


# Set by GitHub Actions: the workflow and its ref.
_WORKFLOW = ("GITHUB_SERVER_URL", "GITHUB_WORKFLOW_REF")


def signing_policy(config: "Config", folder: Path) -> "Policy | None":
    """The trust policy; None if the configuration neither requires nor trusts a signature."""
    signing = config.signing
    if not signing.require and not signing.trusted:
        return None
    from nxpipe.artifact_store.trust.policy import Policy

    trusted = tuple(_trusted(table, config, folder) for table in signing.trusted)
    if not trusted:
        trusted = tuple(_default_keys(config, folder))
    return Policy(trusted, _with_environments(config, signing.require), signing.threshold)


def trusted_evidence(
    channel: str | None, config: "Config", folder: Path, store: "Store"
) -> "Callable[[Evidence], bool] | None":
    """What decides whether a channel trusts evidence; None without a channel or a policy: all counts."""
    policy = signing_policy(config, folder) if channel is not None else None
    if channel is None or policy is None:
        return None
    from nxpipe.artifact_store.trust.policy import evidence_verifier

    return evidence_verifier(policy, store, channel)


def trust_in(
    config: "Config", folder: Path, store: "Store", say: "Callable[[str], None]" = lambda _: None
) -> "ChannelVerifier":
    """The verifier of a store's channels, by the policy and by marks of the generations that this machine has seen.

    Marks detect a rollback of the store itself: a channel never returns to an earlier generation.
    """
    from nxpipe.artifact_store.channel.watermarks import Marks
    from nxpipe.artifact_store.trust.channel_trust import ChannelVerifier

    for sentence in unused_channels(config):
        say(f"Note: {sentence}")
    marks = None
    try:
        marks = Marks(user_state_folder() / "channels", _identity(store.url))
    except NoHome as error:
        say(f"Note: generations of channels cannot be recorded on this machine: {error}")
    return ChannelVerifier(signing_policy(config, folder), marks, say)


def _identity(url: str) -> str:
    """URL and endpoint: a bucket of the same name at another endpoint is another store."""
    from nxpipe.artifact_store.url import is_remote

    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return f"{url} at {endpoint}" if endpoint and is_remote(url) else url


def unused_channels(config: "Config") -> "Iterator[str]":
    """Warnings about channels in [signing] and [channels.NAME] that no fleet serves and that resemble a fleet's channel
    without a rule."""
    signing = config.signing
    signed = {*signing.require, *(channel for key in signing.trusted for channel in key.channels or ())}
    served = {fleet.channel for fleet in config.fleets}
    for table, with_rule in (("[signing]", signed), ("[channels.NAME]", set(config.channels))):
        for channel in sorted(with_rule - served):
            if hint := did_you_mean(channel, sorted(served - with_rule)):
                yield f"{table} names channel {channel}, but no fleet of nxpipe.toml serves it{hint}"


def _default_keys(config: "Config", folder: Path) -> "Iterator[TrustedKey]":
    """Trusted keys without [[signing.trusted]]: each signing key, for the documents that it signs."""
    from nxpipe.artifact_store.trust.policy import TrustedKey

    signing, promoted = config.signing, _with_environments(config, [rule.channel for rule in config.signing.promoting])
    if signing.key:
        public_key = _public_half(signing.key, folder)
        other_channels = _with_environments(config, signing.require) - promoted
        yield TrustedKey("signing.key", public_key, signs="artifacts" if promoted else None)
        if promoted and other_channels:
            yield TrustedKey("signing.key", public_key, other_channels, signs="channels")
    for rule in signing.promoting:
        channels = _with_environments(config, (rule.channel,))
        yield TrustedKey(f"promoting {rule.channel}", _public_half(rule.key, folder), channels, signs="channels")


def _with_environments(config: "Config", channels: "Sequence[str]") -> frozenset[str]:
    """The channels and, for each fleet that serves one of them, the channels of its environments."""
    of_fleets = {
        environment_channel(fleet.name, environment)
        for fleet in config.fleets
        if fleet.channel in channels
        for environment in ENVIRONMENTS
    }
    return frozenset(channels) | of_fleets


def chosen_signer(typed: str | None, config: "Config", folder: Path, channel: str | None = None) -> "Signer":
    """The key that signs artifacts, or generations of a channel. A typed path is relative to the working directory, a
    configured one to nxpipe.toml.
    """
    from nxpipe.artifact_store.trust.signers import open_signer

    signer = open_signer(typed, Path()) if typed else _configured(config, folder, channel)
    if signer is None:
        raise Refused("no signing key is set; pass --key file:PATH or kms:ARN, or set [signing] key in nxpipe.toml")
    return signer


def author_signature(typed: str | None, config: "Config", folder: Path, channel: str, store: "Store") -> "Sign | None":
    """The function that signs a channel's change; None unless the channel requires it or --key was passed."""
    if typed is None and channel not in _with_environments(config, config.signing.require):
        return None
    from nxpipe.artifact_store.trust.policy import signing_with

    base = next(
        (fleet.channel for fleet in config.fleets if channel in _with_environments(config, (fleet.channel,))), channel
    )
    signer, policy = chosen_signer(typed, config, folder, base), signing_policy(config, folder)
    if policy and channel in policy.required and not policy.trusts(signer.public, channel, store.backend.now()):
        raise Refused(
            f"key {signer.public.key_id} may not sign for channel {channel}, so this change would not be trusted; "
            "use a key that [[signing.trusted]] of nxpipe.toml lists for it"
        )
    return signing_with(signer)


def known_keys(config: "Config", folder: Path) -> "list[PublicKey]":
    """Trusted keys in local files, for verification on a machine without a network."""
    signing = config.signing
    if signing.trusted:
        return [_trusted(table, config, folder).key for table in signing.trusted]
    public_file = _public_key_file(signing.key or "", folder)
    return [named_public_key(public_file)] if public_file else []


def public_key_of(typed: str) -> "PublicKey":
    """The public key `file:PATH` or `kms:ARN`; a path alone is one of a file."""
    from nxpipe.artifact_store.trust.signers import open_signer

    if typed.startswith("kms:"):
        return open_signer(typed, Path()).public
    return named_public_key(expanded(typed.removeprefix("file:")))


def named_public_key(path: Path) -> "PublicKey":
    from nxpipe.artifact_store.trust.keys import PublicKey

    return PublicKey.from_file(path)


def builder_id() -> str:
    """The builder id in the provenance: the GitHub workflow, or a local machine."""
    server, workflow = (os.environ.get(name) for name in _WORKFLOW)
    return f"{server}/{workflow}" if server and workflow else "nxpipe:local"


def _public_half(key: str, folder: Path) -> "PublicKey":
    """The public key. It is read from the file beside a key file, so that verification needs no private key."""
    from nxpipe.artifact_store.trust.signers import open_signer

    public_file = _public_key_file(key, folder)
    return named_public_key(public_file) if public_file else open_signer(key, folder).public


def _public_key_file(key: str, folder: Path) -> Path | None:
    """The public key file beside a key file, if it exists."""
    from nxpipe.artifact_store.trust.keys import public_path

    if not key.startswith("file:"):
        return None
    path = public_path(folder / expanded(key.removeprefix("file:")))
    return path if path.exists() else None


def _configured(config: "Config", folder: Path, channel: str | None) -> "Signer | None":
    from nxpipe.artifact_store.trust.signers import open_signer

    key = config.signing.key if channel is None else config.signing.key_of(channel)
    return open_signer(key, folder) if key else None


def _trusted(table: "TrustedKeyTable", config: "Config", folder: Path) -> "TrustedKey":
    from nxpipe.artifact_store.trust.policy import TrustedKey

    path = folder / expanded(table.key.removeprefix("file:"))
    channels = None if table.channels is None else _with_environments(config, table.channels)
    return TrustedKey(
        table.name, named_public_key(path), channels, table.expires.timestamp() if table.expires else None, table.signs
    )
