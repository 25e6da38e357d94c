"""A store's channels through the eyes of the policy in nxpipe.toml: what is served, and whose word there is for it."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

from artifact_store import Store
from artifact_store.channel.generation import Generation, Served
from artifact_store.channel.log import ChannelLog, channels
from artifact_store.documents import seconds_since_1970
from artifact_store.errors import NotFound
from artifact_store.trust.policy import Policy
from pipeline.channels.signing import require_belief, signing_policy
from pipeline.config import load_config
from pipeline.suggest import did_you_mean


@dataclass(frozen=True)
class Entry:
    """A generation, the state before it, who has signed it, and why it should not be believed, if so."""

    generation: Generation
    before: tuple[Served, ...]
    signed_by: tuple[str, ...]
    fault: str | None

    @property
    def age(self) -> float:
        """In seconds, by this machine's clock and the author's."""
        return time.time() - seconds_since_1970(self.generation.at)

    def require_belief(self) -> None:
        require_belief(self.generation, self.fault)


@dataclass(frozen=True)
class ChannelView:
    store: Store
    policy: Policy

    @classmethod
    def of(cls, store: Store, config_path: Path) -> "ChannelView":
        config = load_config(config_path, os.environ, missing_ok=True)
        return cls(store, signing_policy(config, config_path.parent) or Policy())

    def names(self, wanted: str | None) -> list[str]:
        """The one that was asked for, or all."""
        known = channels(self.store.backend)
        if wanted is None:
            return known
        if wanted not in known:
            others = f"; it has {', '.join(known)}" if known else ", which has none yet; nxpipe promote makes one"
            hint = did_you_mean(wanted, known) or others
            raise NotFound(f"there is no channel {wanted!r} in {self.store.url}{hint}")
        return [wanted]

    def history(self, name: str, last: int) -> Iterator[Entry]:
        """The newest generations, the newest first, each proved by its successor."""
        log = ChannelLog(self.store.backend, name)
        proved = [*islice(log.back_from(log.tip()), last + 1), None]
        for one, before in islice(pairwise(proved), last):
            assert one is not None, "only the first generation is followed by nothing"
            old = before.artifacts if before else ()
            yield Entry(one, old, tuple(self.policy.authors(one)), self.policy.fault(one))

    def signers(self, channel: str, served: Served) -> list[str]:
        """Who has signed an artifact, of those whose word counts on the channel now."""
        return self.policy.signers(self.store, served.manifest.sha256, channel, self.store.backend.now())
