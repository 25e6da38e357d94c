"""Promotion and rollback of a channel under the rules of nxpipe.toml: its evidence, signatures and fleets."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nxpipe.artifact_store.channel import change
from nxpipe.pipeline.artifacts.channels import fleet_of_channel, program_check
from nxpipe.pipeline.artifacts.identity import current_identity
from nxpipe.pipeline.artifacts.requirements import requirements
from nxpipe.pipeline.artifacts.signing import author_signature, trust_in
from nxpipe.pipeline.util.errors import InputInvalid

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store
    from nxpipe.artifact_store.channel.log import Appended
    from nxpipe.pipeline.config import Config


@dataclass(frozen=True)
class ChannelChange:
    """Who changes a channel of a store, and why. `key` signs the generation, by default the key of [signing]; `folder`
    is that of nxpipe.toml. The store must be opened without a cache."""

    store: "Store"
    config: "Config"
    folder: Path
    channel: str
    reason: str = ""
    actor: str | None = None
    key: str | None = None
    say: Callable[[str], None] = lambda _: None

    def promote(
        self, artifacts: "Sequence[Published]", *, expect: int | None = None, without: Sequence[str] = ()
    ) -> "Appended":
        """Serve the artifacts, each in place of that of the same model and target. `without`: the kinds of evidence
        that may be missing, for the reason that the log records."""
        if without and not self.reason:
            raise InputInvalid("a promotion without evidence requires a reason; the channel's log records both")
        waiver = change.EvidenceWaiver.of(without, self.reason)
        needs = requirements(self.store, self.config, self.folder, self.channel)
        return change.promote(
            self.store, self.channel, artifacts, self._author(), needs, expected=expect, waiver=waiver
        )

    def rollback(self, *, to: int | None = None, expect: int | None = None, despite: str | None = None) -> "Appended":
        """Serve the artifacts of an earlier generation."""
        author, trust = self._author(), trust_in(self.config, self.folder, self.store, self.say)
        return change.rollback(
            self.store,
            self.channel,
            author,
            to=to,
            expected=expect,
            check_artifact=trust.policy.artifact_check(self.store, self.channel) if trust.policy else None,
            check_programs=program_check(self.config, self.folder, self.channel),
            despite=despite,
            trust=trust,
        )

    def _author(self) -> change.Author:
        sign = author_signature(self.key, self.config, self.folder, self.channel, self.store)
        return change.Author(self.actor or current_identity(), self.reason, sign)


def require_unmanaged(channel: str, remedy: str) -> None:
    """Refuse a blue or green channel: only rollouts evaluate the traffic that they move."""
    fleet = fleet_of_channel(channel)
    if fleet is not None:
        raise InputInvalid(
            f"rollouts of fleet {fleet} manage channel {channel}; run `nxpipe rollout start {fleet} MODEL@KEY`, or "
            f"{remedy} to change the channel without a rollout"
        )
