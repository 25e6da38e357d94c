"""Views of a channel's history: its generations, their signers and changes, as text and as data."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Final

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.channel.generation import Generation, Served
from nxpipe.artifact_store.channel.log import channels
from nxpipe.artifact_store.documents import seconds_since_1970
from nxpipe.artifact_store.names import SHOWN
from nxpipe.artifact_store.trust.channel_trust import ChannelVerifier, untrusted
from nxpipe.artifact_store.trust.policy import Policy
from nxpipe.pipeline.artifacts.channels import rehearsals_of, unknown_channel
from nxpipe.pipeline.artifacts.signing import trust_in
from nxpipe.pipeline.config import Config, load_config
from nxpipe.pipeline.util.text import for_terminal, shown, style, table


@dataclass(frozen=True)
class ChannelEntry:
    """A generation, its predecessor's artifacts, its signers, and the reason why it is not trusted, if any."""

    generation: Generation
    before: tuple[Served, ...]
    signed_by: tuple[str, ...]
    fault: str | None

    @property
    def age(self) -> float:
        """Age in seconds, by the clocks of this machine and of the author."""
        return time.time() - seconds_since_1970(self.generation.at)

    def require_trust(self) -> None:
        if self.fault:
            raise untrusted(self.generation, self.fault)


@dataclass(frozen=True)
class ChannelView:
    """The channels of a store, verified by a trust policy."""

    store: Store
    trust: ChannelVerifier
    config: Config
    folder: Path  # of nxpipe.toml

    @classmethod
    def of(cls, store: Store, config_path: Path, say: Callable[[str], None]) -> "ChannelView":
        config = load_config(config_path, os.environ, missing_ok=True)
        return cls(store, trust_in(config, config_path.parent, store, say), config, config_path.parent)

    def names(self, name: str | None) -> list[str]:
        """The named channel, or all channels."""
        known = channels(self.store.backend)
        if name is None:
            return known
        if name not in known:
            raise unknown_channel(self.store, name)
        return [name]

    def history(self, name: str, last: int) -> Iterator[ChannelEntry]:
        """The newest generations first, each verified by the digest in its successor."""
        verified = [*islice(self.trust.history(self.store, name), last + 1), None]
        for generation, before in islice(pairwise(verified), last):
            assert generation is not None, "only the first generation has no predecessor"
            old, fault = before.artifacts if before else (), self.trust.fault(self.store.backend, generation)
            if generation is verified[0] and fault is None:
                self.trust.mark(generation)
            yield ChannelEntry(generation, old, tuple(self.policy.authors(generation)), fault)

    @cached_property
    def policy(self) -> Policy:
        return self.trust.policy or Policy()

    def require_trust(self, entry: ChannelEntry) -> None:
        """Raise unless the current state is trusted: the generation, and the signatures of its artifacts."""
        entry.require_trust()
        for artifact in entry.generation.artifacts:
            self.trust.require_signatures(self.store, entry.generation.channel, artifact)

    def signers(self, channel: str, served: Served) -> list[str]:
        """Trusted signers of an artifact on this channel at this time."""
        return self.policy.signers(self.store, served.manifest.sha256, channel, self.store.backend.now())

    def rehearsals(self, channel: str) -> list[str]:
        """The notices of the channel's fleets that are rehearsals."""
        return rehearsals_of(self.config, self.folder, channel)


_UNITS: Final = (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1))


def generation_data(generation: Generation) -> dict[str, object]:
    """Content of a generation without signatures, and its digest, which identifies it permanently."""
    return generation.model_dump(exclude={"format", "write_id", "signatures"}) | {"digest": generation.digest}


def served_lines(generation: Generation) -> list[str]:
    return [f"  {artifact.name} for {artifact.target}{_waived(artifact)}" for artifact in generation.artifacts]


def channel_log_data(entry: ChannelEntry) -> dict[str, object]:
    changes = changes_data(entry.before, entry.generation.artifacts)
    log_fields = {"changes": changes, "signed_by": entry.signed_by, "fault": entry.fault}
    return generation_data(entry.generation) | log_fields


def channel_log_text(entry: ChannelEntry) -> str:
    generation = entry.generation
    action = "promote" if generation.restores is None else f"rollback to {generation.restores}"
    title = _title(f"{generation.channel} {generation.generation}")
    lines = [f"{title}  {action}  {_moment(generation.at)}  by {generation.actor}"]
    lines += [f"  {generation.reason}"] if generation.reason else []
    lines += [f"  {model} for {target}: {_key(old)} -> {_key(new)}" for model, target, old, new in _changes(entry)]
    return "\n".join(map(shown, lines + _trust_lines(entry)))


def channel_state_data(
    entry: ChannelEntry, signers: Mapping[Served, Sequence[str]], rehearsals: Sequence[str]
) -> dict[str, object]:
    served = [{**artifact.model_dump(), "signed_by": names} for artifact, names in signers.items()]
    state_fields = {"age_seconds": round(entry.age), "signed_by": entry.signed_by, "fault": entry.fault}
    state_fields["rehearsals"] = list(rehearsals)
    return generation_data(entry.generation) | state_fields | {"artifacts": served}


def channel_state_text(entry: ChannelEntry, signers: Mapping[Served, Sequence[str]], rehearsals: Sequence[str]) -> str:
    generation = entry.generation
    rows = [
        (
            artifact.model_id,
            artifact.target,
            _key(artifact),
            artifact.manifest.sha256[:SHOWN],
            ", ".join(names) or "not signed",
        )
        for artifact, names in signers.items()
    ]
    lines = [
        _title(f"{generation.channel}, generation {generation.generation}"),
        f"  for {_age(entry.age)}, since {_moment(generation.at)}, by {for_terminal(generation.actor)}",
        f"  digest {generation.digest}",
        *(f"  {notice}" for notice in rehearsals),
        *map(shown, _trust_lines(entry)),
        table(("model", "target", "key", "manifest", "signed by"), rows),
    ]
    return "\n".join(lines)


def moved_lines(before: Generation, after: Generation) -> list[str]:
    """What a change replaced: from which generation to which, and from which artifact to which."""
    changes = _changed(before.artifacts, after.artifacts)
    restored = f", which restores generation {after.restores}" if after.restores else ""
    return [f"  from generation {before.generation} to generation {after.generation}{restored}"] + [
        f"  {model} for {target}: {_key(old)} -> {_key(new)}" for model, target, old, new in changes
    ]


def changes_data(before: Sequence[Served], after: Sequence[Served]) -> list[dict[str, object]]:
    return [
        {"model_id": model, "target": target, "from": old and old.request_key, "to": new and new.request_key}
        for model, target, old, new in _changed(before, after)
    ]


def _changes(entry: ChannelEntry) -> "Iterator[tuple[str, str, Served | None, Served | None]]":
    return _changed(entry.before, entry.generation.artifacts)


def _changed(
    before: Sequence[Served], after: Sequence[Served]
) -> "Iterator[tuple[str, str, Served | None, Served | None]]":
    """Changed slots: model, target, previous and new artifact."""
    old, new = ({artifact.slot: artifact for artifact in state} for state in (before, after))
    for slot in sorted(old.keys() | new.keys()):
        if old.get(slot) != new.get(slot):
            yield *slot, old.get(slot), new.get(slot)


def _trust_lines(entry: ChannelEntry) -> list[str]:
    signed = [f"  signed by {', '.join(entry.signed_by)}"] if entry.signed_by else []
    return signed + ([style(f"  {entry.fault}", fg="red")] if entry.fault else [])


def _title(text: str) -> str:
    return style(text, bold=True)


def _key(served: "Served | None") -> str:
    return f"{served.request_key[:SHOWN]}{_waived(served)}" if served else "nothing"


def _waived(served: "Served") -> str:
    return f", without {' and '.join(served.without)} evidence" if served.without else ""


def _moment(text: str) -> str:
    return f"{text[:19].replace('T', ' ')} UTC"


def _age(seconds: float) -> str:
    """An age in its largest unit."""
    total = max(0, int(seconds))
    name, length = next((unit for unit in _UNITS if total >= unit[1]), _UNITS[-1])
    return f"{total // length} {name}{'' if total // length == 1 else 's'}"
