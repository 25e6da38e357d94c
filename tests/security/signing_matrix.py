"""Matrix of attacks, commands and signing policies, and its table in docs/guides/security.md.

`python -m tests.security.signing_matrix` writes the table.
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import fill
from typing import Final

from nxpipe.artifact_store.errors import Corrupt, Refused, StoreUnavailable
from tests.conftest import ROOT
from tests.security.signing_world import ATTACKS, RULES, WAYS, World, copied, machine, make

PAGE: Final = ROOT / "docs" / "guides" / "security.md"
BEGIN: Final = "<!-- Made by `python -m tests.security.signing_matrix`; change the code, not this table. -->"
NOTHING: Final = "none"
END: Final = "<!-- The end of that table. -->"

Cell = tuple[str, str, str]  # rule, attack, way


def cells(folder: Path) -> Iterator[tuple[Cell, str]]:
    """The outcome of each: `served` (the artifact served before the attack), `refused`, or something else."""
    for number, rule in enumerate(RULES):
        whole = make(folder / f"{number}", rule, time.time())
        for at, (name, attack) in enumerate(ATTACKS.items()):
            shared = copied(whole, folder / f"{number}-{at}")
            if not attack.seen:
                attack.do(shared)
            for nth, way in enumerate(WAYS):
                with machine(folder / f"{number}-{at}-{nth}-state"):
                    world = copied(whole, folder / f"{number}-{at}-{nth}") if attack.seen else shared
                    if attack.seen:
                        assert _outcome(world, way) == "served"
                        attack.do(world)
                    yield (rule, name, way), _outcome(world, way)
        with machine(folder / f"{number}-state"):
            for way in WAYS:
                yield (rule, NOTHING, way), _outcome(whole, way)


def _outcome(world: World, way: str) -> str:
    try:
        digest = WAYS[way](world)
    except (Corrupt, Refused, StoreUnavailable):  # the last through a mirror, which does not hold all of the store
        return "refused"
    return "served" if digest == world.artifact("b").manifest_digest else "MISLED"


def expected(attack: str) -> str:
    return "served" if attack == NOTHING or ATTACKS[attack].fails else "refused"


def page(seen: Mapping[Cell, str]) -> str:
    """A row for each attack, common to all rules and ways, or with the differing ones named."""
    ways = ", ".join(f"`{way}`" for way in WAYS)
    figures = f"{len(seen)} cells: {len(RULES)} policies ({', '.join(RULES)}), {len(ATTACKS)} attacks and none, "
    lines = [
        fill(f"{figures}{len(WAYS)} commands ({ways}).", 100, break_on_hyphens=False),
        "",
        "| Attack on a channel that requires signatures | Result under every policy, by every command |",
        "|---|---|",
    ]
    for name in (NOTHING, *ATTACKS):
        whom = ", to a machine that has seen the channel before" if name in ATTACKS and ATTACKS[name].seen else ""
        outcomes = {outcome for (_, attack, _), outcome in seen.items() if attack == name}
        odd = [f"{rule}, {way}: {outcome}" for (rule, attack, way), outcome in seen.items() if attack == name]
        lines.append(f"| {name}{whom} | {outcomes.pop() if len(outcomes) == 1 else '; '.join(odd)} |")
    return "\n".join(lines)


def written() -> str:
    """The table in the page."""
    return PAGE.read_text().partition(f"{BEGIN}\n\n")[2].partition(f"\n\n{END}")[0]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        table = page(dict(cells(Path(folder))))
    PAGE.write_text(PAGE.read_text().replace(f"{BEGIN}\n\n{written()}\n\n{END}", f"{BEGIN}\n\n{table}\n\n{END}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
