"""What stands for the image of the build farm: the real `nxpipe`, whose cells are trivial.

An item does what its title says: `make` takes note of itself in the store, `refuse` fails by its own fault, `grow`
takes memory until it is ended, `hang` waits to be ended after it has made it.
"""

import sys
import time
from collections.abc import Callable
from types import ModuleType

from nxpipe.artifact_store.builds import keep_step_result, step_result
from nxpipe.artifact_store.url import open_store
from nxpipe.pipeline.build.events import Ended, Event, Fault, Said
from nxpipe.pipeline.build.item import Item
from nxpipe.pipeline.util.exit_codes import COMPILE


def carry_out(item: Item, tell: Callable[[Event], None]) -> Ended:
    tell(Said(item.key, f"step of {item.title}"))
    store = open_store(item.store)
    if item.title.startswith("refuse"):
        log = "Traceback \udcff" + "x" * 100_000
        return Ended(item.key, 0.5, fault=Fault("deterministic", "Unlowered", "no such operator", COMPILE.number, log))
    if item.title.startswith("grow"):
        held = []
        while True:
            held.append(bytearray(b"x" * 2**23))
    found = step_result(store, item.key)
    keep_step_result(store, item.key, {}, {"made": item.title})
    if item.title.startswith("hang") and found is None:
        time.sleep(600)
    return Ended(item.key, 0.5, cached=found is not None, memory=1)


def main() -> None:
    stand_in = ModuleType("nxpipe.pipeline.build.carry_out")
    vars(stand_in)["carry_out"] = carry_out
    sys.modules[stand_in.__name__] = stand_in
    from nxpipe.pipeline.cli.main import main as nxpipe

    nxpipe()


if __name__ == "__main__":
    main()
