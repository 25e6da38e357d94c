"""From `[signing]` of nxpipe.toml to keys and rules. The cryptography is imported when there is something to check."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from artifact_store.errors import Refused
from pipeline.channels.colours import COLOURS, channel_of
from pipeline.folders import expanded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from artifact_store import Store
    from artifact_store.channel.change import Sign
    from artifact_store.channel.generation import Generation
    from artifact_store.trust.keys import PublicKey, Signer
    from artifact_store.trust.policy import Policy, TrustedKey
    from pipeline.config import Config
    from pipeline.config import TrustedKey as TrustedKeyTable

key_option = click.option(
    "--key",
    metavar="KEY",
    help="The signing key, file:PATH or kms:ARN.  [default: NXPIPE_SIGNING_KEY, then [signing] key of nxpipe.toml]",
)

# Set by GitHub for each run: which workflow of which commit is at work.
_WORKFLOW = ("GITHUB_SERVER_URL", "GITHUB_WORKFLOW_REF")


def signing_policy(config: "Config", folder: Path) -> "Policy | None":
    """Whose word counts; None where no channel asks for anybody's."""
    signing = config.signing
    if not signing.require and not signing.trusted:
        return None
    from artifact_store.trust.policy import Policy, TrustedKey

    trusted = tuple(_trusted(each, config, folder) for each in signing.trusted)
    if not trusted and signing.key:
        trusted = (TrustedKey("signing.key", _public_half(signing.key, folder)),)
    return Policy(trusted, _with_colours(config, signing.require), signing.threshold)


def require_belief(generation: "Generation", fault: str | None) -> None:
    """What a generation says is acted on only where the policy finds no fault with it."""
    if fault:
        raise Refused(
            f"generation {generation.generation} of channel {generation.channel} {fault}; find out who wrote it, and "
            "promote or roll back again with a trusted key"
        )


def _with_colours(config: "Config", channels: "Sequence[str]") -> frozenset[str]:
    """What holds for a channel holds for the colours of the fleets that run it."""
    of_fleets = {
        channel_of(fleet.name, colour) for fleet in config.fleets if fleet.channel in channels for colour in COLOURS
    }
    return frozenset(channels) | of_fleets


def chosen_signer(typed: str | None, config: "Config", folder: Path) -> "Signer":
    """The key to sign with: what was typed starts here, what is configured starts at the file."""
    from artifact_store.trust.signers import open_signer

    signer = open_signer(typed, Path()) if typed else _configured(config, folder)
    if signer is None:
        raise Refused("no signing key is named; pass --key file:PATH or kms:ARN, or set [signing] key in nxpipe.toml")
    return signer


def author_signature(typed: str | None, config: "Config", folder: Path, channel: str, store: "Store") -> "Sign | None":
    """How a change of a channel is signed: where the channel asks for it, or a key was typed."""
    if typed is None and channel not in _with_colours(config, config.signing.require):
        return None
    from artifact_store.trust.policy import signing_with

    signer, policy = chosen_signer(typed, config, folder), signing_policy(config, folder)
    if policy and channel in policy.required and not policy.trusts(signer.public, channel, store.backend.now()):
        raise Refused(
            f"key {signer.public.key_id} may not sign for channel {channel}, so nobody would believe this change; "
            "use a key that [[signing.trusted]] of nxpipe.toml names for it"
        )
    return signing_with(signer)


def named_public_key(path: Path) -> "PublicKey":
    from artifact_store.trust.keys import PublicKey

    return PublicKey.from_file(path)


def builder_id() -> str:
    """Who vouches for the build, as provenance names it: GitHub's workflow, or a person's machine."""
    server, workflow = (os.environ.get(name) for name in _WORKFLOW)
    return f"{server}/{workflow}" if server and workflow else "nxpipe:local"


def _public_half(key: str, folder: Path) -> "PublicKey":
    """From the file beside a key file, so that whoever only looks needs no private key."""
    from artifact_store.trust.key_files import public_path
    from artifact_store.trust.signers import open_signer

    beside = public_path(folder / expanded(key.removeprefix("file:")))
    if key.startswith("file:") and beside.exists():
        return named_public_key(beside)
    return open_signer(key, folder).public


def _configured(config: "Config", folder: Path) -> "Signer | None":
    from artifact_store.trust.signers import open_signer

    return open_signer(config.signing.key, folder) if config.signing.key else None


def _trusted(table: "TrustedKeyTable", config: "Config", folder: Path) -> "TrustedKey":
    from artifact_store.trust.policy import TrustedKey

    path = folder / expanded(table.key.removeprefix("file:"))
    channels = None if table.channels is None else _with_colours(config, table.channels)
    return TrustedKey(
        table.name, named_public_key(path), channels, table.expires.timestamp() if table.expires else None
    )
