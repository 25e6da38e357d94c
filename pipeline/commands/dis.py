"""`nxpipe dis`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli import Command
from pipeline.output import Console, human_bytes, table

if TYPE_CHECKING:
    from emulator.isa.totals import Totals

# Here, so that `--help` imports no emulator; a test holds them to `emulator.isa`.
ENGINES = ("tensor", "vector", "scalar", "gpsimd", "collective", *(f"dma{queue}" for queue in range(8)))


@click.command(cls=Command)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--only", type=click.Choice(ENGINES), help="The instructions of one engine, and the loops around them.")
@click.option("--totals", "totalled", is_flag=True, help="What the program adds up to, instead of its text.")
@click.option("--tables", is_flag=True, help="The bytes of constants too, so that the text is the whole program.")
@click.pass_obj
def dis(console: Console, file: Path, only: str | None, totalled: bool, tables: bool) -> None:
    """Print an executable's program as text, or what it adds up to.

    Nothing is run: totals are each instruction times the turns of the loops around it, at the documented cost.
    docs/isa.md explains the text. With --json, totals and text are one document.

    \b
    Example:
      nxpipe dis forward-b1-s128.nxe | less -S
      nxpipe dis forward-b1-s128.nxe --only tensor
      nxpipe dis forward-b1-s128.nxe --totals
    """
    if totalled and (only or tables):
        raise click.UsageError("--totals are those of the whole program: leave --only and --tables out")
    from emulator.executable import read
    from emulator.isa.instructions import Engine
    from emulator.isa.text import lines, text
    from emulator.isa.totals import totals

    program = read(file).program
    engine = Engine(only) if only else None
    if console.json:
        told: dict[str, Any] = {"totals": totals(program).document()}
        console.data(told if totalled else told | {"text": text(program, only=engine, tables=tables)})
    elif totalled:
        console.result(_report(totals(program)))
    else:
        for line in lines(program, only=engine, tables=tables):
            console.result(line)


def _report(total: "Totals") -> str:
    engines = [
        (engine, f"{count:,}", f"{total.ns[engine] / 1000:,.1f}") for engine, count in sorted(total.engines.items())
    ]
    memories = [
        (memory, human_bytes(total.read[memory]), human_bytes(total.written[memory]))
        for memory in sorted(total.read | total.written)
    ]
    kinds = [(kind, f"{count:,}") for kind, count in total.kinds.most_common()]
    parts = [
        f"{total.static:,} instructions in the text, {sum(total.kinds.values()):,} carried out",
        table(("engine", "instructions", "busy us"), engines),
        table(("memory", "read", "written"), memories),
        table(("instruction", "times"), kinds),
    ]
    if total.utilisation is not None:
        parts.append(
            f"{total.multiply_adds:,} multiply-adds; of the cycles that the tensor engine is busy, "
            f"{total.utilisation:.1%} are what they need at least"
        )
    return "\n\n".join(parts)
