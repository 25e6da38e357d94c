"""`nxpipe dis`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.util.console import Console, human_bytes, table
from nxpipe.pipeline.util.errors import ProgramInvalid
from nxpipe.pipeline.util.suggest import did_you_mean

if TYPE_CHECKING:
    from nxpipe.artifact_store.manifest import Executable, Manifest
    from nxpipe.emulator.analysis.utilisation import Utilisation
    from nxpipe.emulator.isa.program import Program

# Here, so that `--help` imports no emulator; a test holds them to `emulator.isa`.
ENGINES = ("tensor", "vector", "scalar", "gpsimd", "collective", *(f"dma{queue}" for queue in range(8)))


@click.command(cls=Command)
@click.argument("source", metavar="FILE|ARTIFACT")
@click.option("--program", "name", metavar="NAME", help="Which of an artifact's programs, such as prefill-b1-s128.")
@click.option("--only", type=click.Choice(ENGINES), help="The instructions of one engine, and the loops around them.")
@click.option("--totals", "totalled", is_flag=True, help="What the program adds up to, instead of its text.")
@click.option("--tables", is_flag=True, help="The bytes of constants too, so that the text is the whole program.")
@store_option
@config_option
@click.pass_context
def dis(
    ctx: click.Context,
    /,
    source: str,
    name: str | None,
    only: str | None,
    totalled: bool,
    tables: bool,
    store: str | None,
    config_path: Path,
) -> None:
    """Print an executable's program as text, or what it adds up to.

    The program is in a FILE.nxe, or in an ARTIFACT of the store, named as MODEL@KEY. Nothing is run: totals are each
    instruction times the turns of the loops around it, at the documented cost, and the last line says how well they
    use the machine. docs/reference/isa.md explains the text. With --json, totals and text are one document.

    \b
    Example:
      nxpipe dis forward-b1-s128.nxe | less -S
      nxpipe dis forward-b1-s128.nxe --only tensor
      nxpipe dis my-llama@4e9ce0 --program prefill-b1-s128 --totals
    """
    console: Console = ctx.obj
    if totalled and (only or tables):
        raise click.UsageError("--totals are those of the whole program: leave --only and --tables out")
    from nxpipe.emulator.isa.instructions import Engine
    from nxpipe.emulator.isa.text import lines, text

    program = _in_file(Path(source), name, store) if _is_file(source) else _in_store(ctx, source, name)
    engine = Engine(only) if only else None
    if console.json:
        used = _used(program, source)
        told: dict[str, Any] = {"totals": used.totals.document(), "utilisation": used.document()}
        console.data(told if totalled else told | {"text": text(program, only=engine, tables=tables)})
    elif totalled:
        console.page(_report(_used(program, source)))
    else:
        for line in lines(program, only=engine, tables=tables):
            console.result(line)


def _is_file(source: str) -> bool:
    """What ends as one is meant as one, whether or not it is there."""
    return Path(source).is_file() or Path(source).suffix == ".nxe"


def _in_file(path: Path, name: str | None, store: str | None) -> "Program":
    from nxpipe.emulator.executable.executable import read

    if name is not None or store is not None:
        raise click.UsageError(f"{path} is a file, with one program: leave --program and --store out")
    return read(path).program


def _in_store(ctx: click.Context, artifact: str, name: str | None) -> "Program":
    from nxpipe.pipeline.cli.store_url import open_the_store
    from nxpipe.pipeline.verify.stored_program import read_instructions

    store = open_the_store(ctx.params["store"], ctx.params["config_path"], ctx.obj)
    manifest = store.resolve(artifact).manifest
    return read_instructions(manifest, _chosen(manifest, name), store).program


def _chosen(manifest: "Manifest", name: str | None) -> "Executable":
    programs = {one.name: one for one in manifest.executables}
    if name is None and len(programs) == 1:
        return manifest.executables[0]
    if name in programs:
        return programs[name]
    has = f"{manifest.model.id} has {', '.join(programs) or 'no program'}"
    if name is None:
        raise click.UsageError(f"{has}; pass one of them by --program")
    raise click.BadParameter(f"{has}, not {name!r}{did_you_mean(name, programs)}", param_hint="--program")


def _used(program: "Program", source: str) -> "Utilisation":
    """A program that breaks a rule can be read, but not added up."""
    from nxpipe.emulator.analysis.utilisation import utilisation
    from nxpipe.emulator.isa.faults import ProgramInvalid as Illegal
    from nxpipe.emulator.isa.limits import check

    try:
        check(program)
    except Illegal as fault:
        raise ProgramInvalid(f"{source}: {fault}") from fault
    return utilisation(program)


def _report(used: "Utilisation") -> str:
    total = used.totals
    engines = [
        (engine, f"{count:,}", f"{total.ns[engine] / 1000:,.1f}") for engine, count in sorted(total.engines.items())
    ]
    memories = [
        (memory, human_bytes(total.read[memory]), human_bytes(total.written[memory]))
        for memory in sorted(total.read | total.written)
    ]
    kinds = [(kind, f"{count:,}") for kind, count in total.kinds.most_common()]
    parts = [
        f"{total.static:,} instructions in the text, {sum(total.kinds.values()):,} carried out; "
        f"{total.multiply_adds:,} multiply-adds",
        table(("engine", "instructions", "busy us"), engines),
        table(("memory", "read", "written"), memories),
        table(("instruction", "times"), kinds),
        used.sentence(),
    ]
    return "\n\n".join(parts)
