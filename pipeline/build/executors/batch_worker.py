"""What a child of an array job does: one item of the list, told line by line, and its outcome kept in the store."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from nxpipe.pipeline.build.events import Begun, Ended, Event, Said, to_document
from nxpipe.pipeline.build.executors.batch_items import item_at
from nxpipe.pipeline.build.faults import fault_of
from nxpipe.pipeline.build.item import Item
from nxpipe.pipeline.request import digest_of
from nxpipe.pipeline.util.errors import MissingSoftware

_LOG: Final = 64 * 1024  # characters of a log that go into the outcome: its end; all of it is in the job's output
_MESSAGE: Final = 4096


def work(url: str, items: str, place: int, say: Callable[[str], None]) -> Ended:
    """`url` is the store as this machine sees it; that of the driver stands in the item."""
    from nxpipe.artifact_store.builds import record_outcome
    from nxpipe.artifact_store.url import open_store
    from nxpipe.pipeline.build.carry_out import carry_out

    item = replace(item_at(open_store(url), items, place), store=url)
    say(f"{item.title}: item {place} of {items[:12]}")

    def tell(event: Event) -> None:
        if isinstance(event, Said):
            say(event.text)
        elif isinstance(event, Begun):
            say(f"begun by {event.worker}")

    try:
        _require_the_same_question(item)
    except Exception as error:
        ended = Ended(item.key, 0.0, fault=fault_of(error))
    else:
        ended = carry_out(item, tell)
    say(_last_words(ended))
    record_outcome(open_store(url, kms_key=item.kms_key), items, place, to_document(_brief(ended)))
    return ended


def _require_the_same_question(item: Item) -> None:
    """An image of another version would answer another question than was asked, and commit it under another key."""
    request = item.asked.request()
    if item.shape is None:
        own = digest_of(request.key_inputs())
    else:
        own = request.evidence_key(item.shape) if request.verified else request.program_key(item.shape)
    if own != item.key:
        raise MissingSoftware(
            "what it was planned with (the version of nxpipe, its libraries, or the revision that the hub has)",
            f"{item.title} of the build farm",
            "deploy an image of [farm] that is made of what the build runs with, and name the revision of a model",
        )


def _last_words(ended: Ended) -> str:
    if ended.fault is None:
        return f"{'found' if ended.cached else 'done'} after {ended.seconds:.1f} s"
    return f"{ended.fault.log}\n{ended.fault.kind}: {ended.fault.message}".lstrip()


def _brief(ended: Ended) -> Ended:
    """So that it fits into a record, and can be spelled in it: a file's name may hold what UTF-8 cannot."""
    fault = ended.fault
    if fault is None:
        return ended
    message, log = (text.encode(errors="replace").decode() for text in (fault.message, fault.log))
    return replace(ended, fault=replace(fault, message=message[:_MESSAGE], log=log[-_LOG:]))
