"""A store's channels through the eyes of the policy in nxpipe.toml: what is served, and whose word there is for it."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.channel.generation import Generation, Served
from nxpipe.artifact_store.channel.log import channels
from nxpipe.artifact_store.documents import seconds_since_1970
from nxpipe.artifact_store.transfer.believed import Trust, unbelieved
from nxpipe.artifact_store.trust.policy import Policy
from nxpipe.pipeline.artifacts.channels import unknown_channel
from nxpipe.pipeline.artifacts.signing import trust_in
from nxpipe.pipeline.config import load_config


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
        if self.fault:
            raise unbelieved(self.generation, self.fault)


@dataclass(frozen=True)
class ChannelView:
    store: Store
    trust: Trust

    @classmethod
    def of(cls, store: Store, config_path: Path, say: Callable[[str], None]) -> "ChannelView":
        config = load_config(config_path, os.environ, missing_ok=True)
        return cls(store, trust_in(config, config_path.parent, store, say))

    def names(self, wanted: str | None) -> list[str]:
        """The one that was asked for, or all."""
        known = channels(self.store.backend)
        if wanted is None:
            return known
        if wanted not in known:
            raise unknown_channel(self.store, wanted)
        return [wanted]

    def history(self, name: str, last: int) -> Iterator[Entry]:
        """The newest generations, the newest first, each proved by its successor."""
        proved = [*islice(self.trust.history(self.store, name), last + 1), None]
        for one, before in islice(pairwise(proved), last):
            assert one is not None, "only the first generation is followed by nothing"
            old, fault = before.artifacts if before else (), self.trust.fault(self.store.backend, one)
            if one is proved[0] and fault is None:
                self.trust.mark(one)
            yield Entry(one, old, tuple(self.policy.authors(one)), fault)

    @cached_property
    def policy(self) -> Policy:
        return self.trust.policy or Policy()

    def require_belief(self, entry: Entry) -> None:
        """In what is served now: the generation, and the signatures of its artifacts."""
        entry.require_belief()
        for each in entry.generation.artifacts:
            self.trust.insist_on_signatures(self.store, entry.generation.channel, each)

    def signers(self, channel: str, served: Served) -> list[str]:
        """Who has signed an artifact, of those whose word counts on the channel now."""
        return self.policy.signers(self.store, served.manifest.sha256, channel, self.store.backend.now())
