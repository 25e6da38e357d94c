"""Verification of a channel before anybody acts on it: its log, its author, the signatures of its artifacts.

The only path from a channel's name to an artifact, so that no caller can skip one of the three checks.
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
from nxpipe.artifact_store.fetch.mirrors import Notice, unnoticed
from nxpipe.artifact_store.fetch.offline_index import OfflineIndex
from nxpipe.artifact_store.store import Store

if TYPE_CHECKING:
    from nxpipe.artifact_store.trust.policy import Policy  # and with it the cryptography


@dataclass(frozen=True)
class ChannelVerifier:
    """What this machine believes of one store's channels: by a policy, None where nobody's signature is asked for, and
    by what it has seen of them before, None where that is not kept. `say` hears where it cannot be kept."""

    policy: "Policy | None"
    marks: Marks | None
    say: Notice = unnoticed

    def tip(self, store: Store, channel: str) -> Generation | None:
        """The newest generation, to be acted on; None of a channel that is empty. From then on it is marked as seen."""
        tip, place = self._looked_up(store, channel)
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
        """Whether what was seen may not be taken back. A folder in which nobody has to sign anything may be removed and
        made anew: whoever can do that can write into its log what they like."""
        return bool(self.marks and self.marks.are_of_a_bucket) or bool(self.policy and channel in self.policy.required)

    def mark(self, tip: Generation) -> None:
        """A machine that can keep nothing, such as a container, proves the whole log at each look."""
        try:
            if self.marks:
                self.marks.keep(tip, anew=not self._binds(tip.channel))
        except StoreUnavailable as error:
            self.say(f"what was seen of channel {tip.channel} cannot be kept on this machine: {error}")

    def insist_on_signatures(self, store: Store, channel: str, served: Served) -> None:
        """Asked when something was promoted; asked again by whoever acts on it."""
        doubt = self.policy.judge(store, channel) if self.policy else None
        if doubt and (sentence := doubt(served)):
            raise Refused(sentence)

    def served(self, store: Store, channel: str) -> tuple[Served, ...] | None:
        """All that a channel serves now, to be acted on; None of a channel that is empty."""
        tip = self.tip(store, channel)
        if tip is None:
            return None
        for each in tip.artifacts:
            self.insist_on_signatures(store, channel, each)
        return tip.artifacts

    def history(self, store: Store, channel: str) -> Iterator[Generation]:
        """The newest generation first, each proved by the one after it. Whose word each is, is for `fault` to say."""
        log = self.log(store.backend, channel)
        return log.back_from(log.tip())

    def fault(self, place: Backend, generation: Generation) -> str | None:
        """Why a generation that lies in this place should not be believed."""
        return self.policy.fault(generation, lambda one: _taken(place, one)) if self.policy else None

    def _looked_up(self, store: Store, channel: str) -> tuple[Generation | None, Backend]:
        """From the first place whose log is whole and not behind what was seen; what is remembered was proved before.

        "It is empty" is an answer too: a mirror may lag, and must not be asked what it had.
        """

        def read(place: Backend) -> tuple[Generation | None, Backend]:
            log = self.log(place, channel)
            return (log.newest(further=False) if isinstance(place, OfflineIndex) else log.tip()), place

        answer = sources_of(store).first(f"channel {channel}", read)
        assert answer is not None, "a tuple was read, or an error is under way"
        return answer


ALL: Final = ChannelVerifier(None, None)  # for stores of which nothing is asked, and nothing was seen


def untrusted(generation: Generation, fault: str) -> Refused:
    return Refused(
        f"generation {generation.generation} of channel {generation.channel} {fault}; find out who wrote it, and "
        "promote or roll back again with a trusted key"
    )


def _taken(place: Backend, generation: Generation) -> float:
    """By the place's own clock. Of what is remembered it is not known any more; it was believed when it was."""
    stat = None if isinstance(place, OfflineIndex) else place.stat(generation.path)
    return stat.modified if stat else 0.0
