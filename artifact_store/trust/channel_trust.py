"""Verification of a channel before use: its log, its author, the signatures of its artifacts.

It is the only path from a channel's name to an artifact, so that no caller can skip one of the three checks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from nxpipe.artifact_store.backends.protocol import Backend
from nxpipe.artifact_store.channel.generation import Generation, Served
from nxpipe.artifact_store.channel.log import ChannelLog
from nxpipe.artifact_store.channel.watermarks import Marks
from nxpipe.artifact_store.errors import Refused, StoreUnavailable
from nxpipe.artifact_store.fetch.cached_store import sources_of
from nxpipe.artifact_store.fetch.mirrors import Notice, ignore_notice
from nxpipe.artifact_store.fetch.offline_index import OfflineIndex
from nxpipe.artifact_store.store import Store

if TYPE_CHECKING:
    from nxpipe.artifact_store.trust.policy import Policy  # and with it the cryptography


@dataclass(frozen=True)
class ChannelVerifier:
    """Verifier of one store's channels: `policy` is None if no signatures are required, `marks` is None without
    watermarks. `say` receives a message if a watermark cannot be written."""

    policy: "Policy | None"
    marks: Marks | None
    say: Notice = ignore_notice

    def tip(self, store: Store, channel: str) -> Generation | None:
        """The newest generation, verified and recorded in the watermark; None if the channel is empty."""
        tip, place = self._read_tip(store, channel)
        if tip is None:
            return None
        if fault := self.fault(place, tip):
            raise untrusted(tip, fault)
        if not isinstance(place, OfflineIndex):
            self.mark(tip)
        return tip

    def log(self, place: Backend, channel: str) -> ChannelLog:
        return ChannelLog(place, channel, self.marks, binding=self._binds(channel))

    def _binds(self, channel: str) -> bool:
        """True if the log must continue from the watermark. An unsigned channel in a folder may be created again: a
        user who can do that can write anything into its log anyway."""
        return bool(self.marks and self.marks.is_remote) or bool(self.policy and channel in self.policy.required)

    def mark(self, tip: Generation) -> None:
        """Write the watermark. A machine that cannot, such as a container, verifies the whole log at each read."""
        try:
            if self.marks:
                self.marks.keep(tip, reset=not self._binds(tip.channel))
        except StoreUnavailable as error:
            self.say(f"the watermark of channel {tip.channel} cannot be written on this machine: {error}")

    def require_signatures(self, store: Store, channel: str, served: Served) -> None:
        """Raise Refused if the policy refuses an artifact; checked at promotion and again before use."""
        check = self.policy.artifact_check(store, channel) if self.policy else None
        if check and (reason := check(served)):
            raise Refused(reason)

    def served(self, store: Store, channel: str) -> tuple[Served, ...] | None:
        """The artifacts that a channel serves now, verified; None if the channel is empty."""
        tip = self.tip(store, channel)
        if tip is None:
            return None
        for served in tip.artifacts:
            self.require_signatures(store, channel, served)
        return tip.artifacts

    def history(self, store: Store, channel: str) -> Iterator[Generation]:
        """All generations, newest first, each verified by its successor; signatures are checked by `fault`."""
        log = self.log(store.backend, channel)
        return log.back_from(log.tip())

    def fault(self, place: Backend, generation: Generation) -> str | None:
        """The reason to refuse a generation of this backend, or None."""
        return self.policy.fault(generation, lambda entry: _stored_at(place, entry)) if self.policy else None

    def _read_tip(self, store: Store, channel: str) -> tuple[Generation | None, Backend]:
        """The tip from the first source with an intact log that continues from the watermark, and that source.

        The offline index was verified when it was written. An empty log is a result too: a mirror, which may lag, must
        not be read instead.
        """

        def read(place: Backend) -> tuple[Generation | None, Backend]:
            log = self.log(place, channel)
            return (log.newest(past_head=False) if isinstance(place, OfflineIndex) else log.tip()), place

        result = sources_of(store).first(f"channel {channel}", read)
        assert result is not None, "read returns a tuple or raises"
        return result


ALL: Final = ChannelVerifier(None, None)  # without a policy and without watermarks


def untrusted(generation: Generation, fault: str) -> Refused:
    return Refused(
        f"generation {generation.generation} of channel {generation.channel} {fault}; check its author, then "
        "promote or roll back again with a trusted key"
    )


def _stored_at(place: Backend, generation: Generation) -> float:
    """The time when a backend stored a generation; 0 if unknown, as in the offline index, which is already verified."""
    stat = None if isinstance(place, OfflineIndex) else place.stat(generation.path)
    return stat.modified if stat else 0.0
