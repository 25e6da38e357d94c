"""Generations of a channel in words and as JSON."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from nxpipe.artifact_store.names import SHOWN
from nxpipe.pipeline.util.escape import for_terminal, shown, style
from nxpipe.pipeline.util.text import table

if TYPE_CHECKING:
    from nxpipe.artifact_store.channel.generation import Generation, Served
    from nxpipe.pipeline.artifacts.view import Entry

_UNITS: Final = (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1))


def generation_data(generation: "Generation") -> dict[str, object]:
    """All that a generation says, but for what only proves it; and its digest, by which it can be named for good."""
    return generation.model_dump(exclude={"format", "write_id", "signatures"}) | {"digest": generation.digest}


def served_lines(generation: "Generation") -> list[str]:
    return [f"  {each.name} for {each.target}" for each in generation.artifacts]


def log_data(entry: "Entry") -> dict[str, object]:
    changes = [
        {"model_id": model, "target": target, "from": old and old.request_key, "to": new and new.request_key}
        for model, target, old, new in _changes(entry)
    ]
    about = {"changes": changes, "signed_by": entry.signed_by, "fault": entry.fault}
    return generation_data(entry.generation) | about


def log_text(entry: "Entry") -> str:
    one = entry.generation
    did = "promote" if one.restores is None else f"rollback to {one.restores}"
    lines = [f"{_title(f'{one.channel} {one.generation}')}  {did}  {_moment(one.at)}  by {one.actor}"]
    lines += [f"  {one.reason}"] if one.reason else []
    lines += [f"  {model} for {target}: {_key(old)} -> {_key(new)}" for model, target, old, new in _changes(entry)]
    return "\n".join(map(shown, lines + _trust_lines(entry)))


def state_data(entry: "Entry", signers: "Mapping[Served, Sequence[str]]") -> dict[str, object]:
    served = [{**each.model_dump(), "signed_by": names} for each, names in signers.items()]
    about = {"age_seconds": round(entry.age), "signed_by": entry.signed_by, "fault": entry.fault}
    return generation_data(entry.generation) | about | {"artifacts": served}


def state_text(entry: "Entry", signers: "Mapping[Served, Sequence[str]]") -> str:
    one = entry.generation
    rows = [
        (
            each.model_id,
            each.target,
            each.request_key[:SHOWN],
            each.manifest.sha256[:SHOWN],
            ", ".join(names) or "not signed",
        )
        for each, names in signers.items()
    ]
    lines = [
        _title(f"{one.channel}, generation {one.generation}"),
        f"  for {_age(entry.age)}, since {_moment(one.at)}, by {for_terminal(one.actor)}",
        f"  digest {one.digest}",
        *map(shown, _trust_lines(entry)),
        table(("model", "target", "key", "manifest", "signed by"), rows),
    ]
    return "\n".join(lines)


def _changes(entry: "Entry") -> "Iterator[tuple[str, str, Served | None, Served | None]]":
    """Each model and target whose artifact is another than before: what it was, and what it is."""
    old, new = ({each.slot: each for each in state} for state in (entry.before, entry.generation.artifacts))
    for slot in sorted(old.keys() | new.keys()):
        if old.get(slot) != new.get(slot):
            yield *slot, old.get(slot), new.get(slot)


def _trust_lines(entry: "Entry") -> list[str]:
    signed = [f"  signed by {', '.join(entry.signed_by)}"] if entry.signed_by else []
    return signed + ([style(f"  {entry.fault}", fg="red")] if entry.fault else [])


def _title(text: str) -> str:
    return style(text, bold=True)


def _key(served: "Served | None") -> str:
    return served.request_key[:SHOWN] if served else "nothing"


def _moment(text: str) -> str:
    return f"{text[:19].replace('T', ' ')} UTC"


def _age(seconds: float) -> str:
    """In its largest unit."""
    whole = max(0, int(seconds))
    name, length = next((unit for unit in _UNITS if whole >= unit[1]), _UNITS[-1])
    return f"{whole // length} {name}{'' if whole // length == 1 else 's'}"
