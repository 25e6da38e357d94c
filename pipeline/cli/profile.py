"""`nxpipe profile`: where the predicted time of a program goes, as a summary, a trace or a page."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxpipe.pipeline.cli.completion import complete_models_or_artifacts
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.model_options import ModelOptions, model_options
from nxpipe.pipeline.cli.options import config_option, html_option, store_option, write_page
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.files import write_whole
from nxpipe.pipeline.util.text import did_you_mean

if TYPE_CHECKING:
    from nxpipe.pipeline.models.spec import ModelSpec
    from nxpipe.pipeline.profile.programs import ProfiledProgram

_FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


@click.command(cls=Command)
@click.argument(
    "sources", nargs=-1, metavar="[ARTIFACT[:PROGRAM]|FILE.nxe|MODEL]...", shell_complete=complete_models_or_artifacts
)
@model_options("profile")
@click.option("--trace", "trace_path", type=_FILE, metavar="FILE", help="Write a trace that ui.perfetto.dev opens.")
@html_option
@click.option("--diff", "compared", is_flag=True, help="Compare two programs or artifacts: the first is the baseline.")
@store_option
@config_option
@click.pass_context
def profile(
    ctx: click.Context,
    /,
    sources: tuple[str, ...],
    options: ModelOptions,
    trace_path: Path | None,
    html_path: Path | None,
    compared: bool,
    store: str | None,
    config_path: Path,
) -> None:
    """Show where the predicted time of programs goes: operators, modules, engines, gaps, and what would help most.

    A program is in FILE.nxe or in an ARTIFACT of the store (MODEL@KEY or a key; :PROGRAM selects one of its programs).
    A MODEL of nxpipe.toml, or that of --model-id, is compiled without weights and without a store. Nothing is run:
    times are those of `this program` on the documented costs of its instructions; those of `AWS's compiler` are shown
    with their interval where its constants cover the model. docs/reference/profile.md defines all terms.

    \b
    Example:
      nxpipe profile --model-id bert-base-uncased
      nxpipe profile my-llama@4e9ce0:decode-b1-s2048 --trace decode.json --html decode.html
      nxpipe profile forward-b1-s128.nxe --json
      nxpipe profile --diff my-llama@4e9ce0 my-llama@a41f07
    """
    console: Console = ctx.obj
    _require_consistent(ctx, sources, options, compared, trace_path or html_path)
    chosen = _Sources(ctx, options, store, config_path, console)
    if compared:
        from nxpipe.pipeline.profile.summary import differences

        pairs = differences(*(list(chosen.programs(source)) for source in sources))
        if console.json:
            console.data([pair.document() for pair in pairs])
        else:
            console.page("\n\n".join(pair.text() for pair in pairs))
        return
    programs = [program for source in sources or (None,) for program in chosen.programs(source)]
    _show(console, programs)
    _write(console, programs, trace_path, html_path)


def _require_consistent(
    ctx: click.Context, sources: Sequence[str], options: ModelOptions, compared: bool, written: Path | None
) -> None:
    options.require_applicable()
    if sources and (options.model_id or options.names):
        raise click.UsageError("a program and --model-id or --only cannot be combined; pass one of them", ctx)
    if compared and len(sources) != 2:
        raise click.UsageError(f"--diff compares two programs, but {len(sources)} are given; pass A and B", ctx)
    if compared and written:
        raise click.UsageError("--diff prints its result; remove --trace and --html", ctx)


class _Sources:
    """The programs of a command's arguments."""

    def __init__(
        self, ctx: click.Context, options: ModelOptions, store: str | None, config_path: Path, console: Console
    ) -> None:
        self._ctx = ctx
        self._options = options
        self._store = store
        self._config_path = config_path
        self._console = console

    def programs(self, source: str | None) -> "Iterator[ProfiledProgram]":
        """The programs of one argument; without one, those of the options."""
        from nxpipe.pipeline.artifacts.lookup import artifact, is_artifact
        from nxpipe.pipeline.artifacts.store_url import open_configured_store
        from nxpipe.pipeline.profile.programs import program_in_file, programs_of_artifact, programs_of_spec

        if source is not None and (Path(source).suffix == ".nxe" or Path(source).is_file()):
            yield program_in_file(Path(source))
            return
        name, _, program = (source or "").partition(":")
        if source is not None and is_artifact(name):
            opened = open_configured_store(self._store, self._config_path, self._console)
            yield from programs_of_artifact(artifact(name, opened), opened, program or None)
            return
        for spec in self._specs(source):
            yield from programs_of_spec(spec, self._console.step)

    def _specs(self, source: str | None) -> "Sequence[ModelSpec]":
        from nxpipe.pipeline.config import load_config

        missing_ok = self._options.model_id is not None or source is not None
        config = load_config(self._config_path, os.environ, missing_ok=missing_ok)
        if source is None:
            return self._options.specs(config, self._config_path.parent)
        known = [model.name for model in config.models]
        if source not in known:
            hint = did_you_mean(source, known) or "; pass a FILE.nxe, MODEL@KEY, a model of nxpipe.toml, or --model-id"
            raise click.UsageError(f"there is no program, artifact or model {source!r}{hint}", self._ctx)
        from dataclasses import replace

        return replace(self._options, names=(source,)).specs(config, self._config_path.parent)


def _show(console: Console, programs: "Sequence[ProfiledProgram]") -> None:
    from nxpipe.pipeline.profile.summary import summary

    if console.json:
        console.data([program.document() for program in programs])
        return
    for number, program in enumerate(programs):
        console.page(f"\n{summary(program)}" if number else summary(program))


def _write(
    console: Console, programs: "Sequence[ProfiledProgram]", trace_path: Path | None, html_path: Path | None
) -> None:
    if trace_path is not None:
        from nxpipe.pipeline.profile.trace import to_bytes, trace_document

        write_whole(trace_path, to_bytes(trace_document(programs)))
        console.say(f"  trace: {trace_path}; open it at https://ui.perfetto.dev")
    if html_path is not None:
        from nxpipe.pipeline.profile.page import profile_page

        write_page(html_path, profile_page(programs), console)
