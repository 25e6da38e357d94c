"""`nxpipe dis`: the text or the totals of an executable's program."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nxpipe.pipeline.cli.completion import complete_artifacts, complete_programs
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.cli.param_types import Choice
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import ProgramInvalid
from nxpipe.pipeline.util.text import did_you_mean, human_bytes, table

if TYPE_CHECKING:
    from nxpipe.artifact_store.manifest import Executable, Manifest
    from nxpipe.emulator.analysis.utilization import Utilisation
    from nxpipe.emulator.isa.program import Program

# A copy, so that `--help` imports no emulator; a test compares it with `emulator.isa`.
ENGINES = ("tensor", "vector", "scalar", "gpsimd", "collective", *(f"dma{queue}" for queue in range(8)))


@click.command(cls=Command)
@click.argument("source", metavar="FILE|ARTIFACT", shell_complete=complete_artifacts)
@click.option(
    "--program",
    "name",
    metavar="NAME",
    shell_complete=complete_programs,
    help="The program of an artifact, as in prefill-b1-s128.",
)
@click.option("--only", type=Choice(ENGINES), help="Only the instructions of one engine, with their loops.")
@click.option(
    "--totals",
    "totalled",
    is_flag=True,
    help="Print instruction counts, busy time and memory traffic instead of the text.",
)
@click.option("--tables", is_flag=True, help="Include the bytes of constants; the text is then the whole program.")
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
    """Print an executable's program as text, or its totals.

    The program is in FILE.nxe, or in an ARTIFACT of the store, as MODEL@KEY. Nothing is run: the totals are the
    documented costs of all instructions times their loop counts, and the last line is the utilisation of the engines.
    docs/reference/isa.md documents the text. --json prints totals and text in one document.

    \b
    Example:
      nxpipe dis forward-b1-s128.nxe | less -S
      nxpipe dis forward-b1-s128.nxe --only tensor
      nxpipe dis my-llama@4e9ce0 --program prefill-b1-s128 --totals
    """
    console: Console = ctx.obj
    if totalled and (only or tables):
        raise click.UsageError("--totals cannot be combined with --only or --tables")
    from nxpipe.emulator.isa.instruction import Engine
    from nxpipe.emulator.isa.text import lines, text

    program = _in_file(Path(source), name, store) if _is_file(source) else _in_store(ctx, source, name)
    engine = Engine(only) if only else None
    if console.json:
        utilisation = _measure(program, source)
        document: dict[str, Any] = {"totals": utilisation.totals.document(), "utilisation": utilisation.document()}
        console.data(document if totalled else document | {"text": text(program, only=engine, tables=tables)})
    elif totalled:
        console.page(_report(_measure(program, source)))
    else:
        for line in lines(program, only=engine, tables=tables):
            console.result(line)


def _is_file(source: str) -> bool:
    """True for a file, and for any name that ends in .nxe."""
    return Path(source).is_file() or Path(source).suffix == ".nxe"


def _in_file(path: Path, name: str | None, store: str | None) -> "Program":
    from nxpipe.emulator.executable.executable import read

    if name is not None or store is not None:
        raise click.UsageError(f"{path} is a file with one program; remove --program and --store")
    return read(path).program


def _in_store(ctx: click.Context, artifact: str, name: str | None) -> "Program":
    from nxpipe.pipeline.artifacts.store_url import open_configured_store
    from nxpipe.pipeline.verify.stored_artifact import read_instructions

    store = open_configured_store(ctx.params["store"], ctx.params["config_path"], ctx.obj)
    manifest = store.resolve(artifact).manifest
    return read_instructions(manifest, _select_program(manifest, name), store).program


def _select_program(manifest: "Manifest", name: str | None) -> "Executable":
    programs = {program.name: program for program in manifest.executables}
    if name is None and len(programs) == 1:
        return manifest.executables[0]
    if name in programs:
        return programs[name]
    available = f"{manifest.model.id} has {', '.join(programs) or 'no program'}"
    if name is None:
        raise click.UsageError(f"{available}; select one with --program")
    raise click.BadParameter(f"{available}, not {name!r}{did_you_mean(name, programs)}", param_hint="--program")


def _measure(program: "Program", source: str) -> "Utilisation":
    """The totals; a program that violates the ISA has a text, but no totals."""
    from nxpipe.emulator.analysis.utilization import utilisation
    from nxpipe.emulator.isa.constraints import ProgramInvalid as Illegal
    from nxpipe.emulator.isa.legality import check

    try:
        check(program)
    except Illegal as error:
        raise ProgramInvalid(f"{source}: {error}") from error
    return utilisation(program)


def _report(utilisation: "Utilisation") -> str:
    total = utilisation.totals
    engines = [
        (engine, f"{count:,}", f"{total.ns[engine] / 1000:,.1f}") for engine, count in sorted(total.engines.items())
    ]
    memories = [
        (memory, human_bytes(total.read[memory]), human_bytes(total.written[memory]))
        for memory in sorted(total.read | total.written)
    ]
    kinds = [(kind, f"{count:,}") for kind, count in total.kinds.most_common()]
    parts = [
        f"{total.static:,} instructions in the text, {sum(total.kinds.values()):,} executed; "
        f"{total.multiply_adds:,} multiply-adds",
        table(("engine", "instructions", "busy us"), engines),
        table(("memory", "read", "written"), memories),
        table(("instruction", "times"), kinds),
        utilisation.sentence(),
    ]
    return "\n\n".join(parts)
