"""This process itself, one item at a time: for a build that is not worth a second process."""

from collections.abc import Callable, Sequence
from typing import Final

from nxpipe.pipeline.build.carry_out import carry_out
from nxpipe.pipeline.build.events import Begun, Event
from nxpipe.pipeline.build.item import Item


class InlineExecutor:
    name: Final = "local"

    def __init__(self, tell: Callable[[Event], None]) -> None:
        """`tell` hears of steps while an item is carried out, for until then `events` does not return."""
        self._tell = tell
        self._item: Item | None = None

    def takes(self, item: Item) -> bool:
        return self._item is None

    def start(self, item: Item) -> None:
        self._item = item

    def events(self, patience: float) -> Sequence[Event]:
        if self._item is None:
            return ()
        self._tell(Begun(self._item.key, "this process"))
        item, self._item = self._item, None
        return (carry_out(item, self._tell),)

    def close(self) -> None:
        """Nothing runs but while `events` does."""
