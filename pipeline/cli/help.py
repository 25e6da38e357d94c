"""The layout of help pages: commands by purpose, and options by purpose where a command has many."""

import re
from collections.abc import Iterable, Mapping
from typing import Final

import click

from nxpipe.pipeline.util.text import folded

COMMAND_SECTIONS: Final = {
    "Getting started": ("init", "doctor", "config", "completion", "version"),
    "Build and verify": ("check", "build", "explain", "verify", "bench", "profile", "dis", "prove"),
    "Store and channels": ("store", "diff", "channel", "promote", "rollback", "stats", "ui"),
    "Run and serve": ("run", "generate", "serve", "device", "monitor"),
    "Plan and cost": ("plan", "assess", "claim", "prices", "cost", "calibrate"),
    "Release and deploy": ("release", "rollout", "infra", "ami", "agent", "worker"),
}
_MANY: Final = 10  # options of a command, above which they are grouped
_OPTION_SECTIONS: Final = {
    "Model": "model-id only model task weights revision axis prompts text input example",
    "Target and programs": "target tp batches buckets phases autocast autocast-type backend program instance "
    "instances core degree",
    "Execution": "dry-run force resume keep-going executor address jobs timeout memory-limit retries no-verify mode "
    "device limit threads seed runs",
    "Store": "store config channel mirror offline key public-key require expect actor reason pin",
    "Output": "out report html sarif format explain top against threshold json quiet verbose help",
}
_SECTION_OF: Final = {name: title for title, names in _OPTION_SECTIONS.items() for name in names.split()}
_OTHERS: Final = "Options"
_ORDER: Final = ("Model", "Target and programs", _OTHERS, "Execution", "Store", "Output")
_CHOICES: Final = re.compile(r"\[([^\]|]+(?:\|[^\]|]+)+)\]$")
_LONGEST_CHOICES: Final = 32


class HelpFormatter(click.HelpFormatter):
    """Lists whose texts are not wrapped within names such as text-generation."""

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        rows = list(rows)
        column = min(max(len(name) for name, _ in rows), col_max) + col_spacing
        for name, text in rows:
            lines = folded(text, max(self.width - self.current_indent - column, 10)) if text else []
            first = f"{'':>{self.current_indent}}{name}"
            if lines and len(name) <= column - col_spacing:
                first += " " * (column - len(name)) + lines.pop(0)
            self.write("\n".join([first, *(" " * (self.current_indent + column) + line for line in lines)]) + "\n")


def write_commands(formatter: click.HelpFormatter, lines: Mapping[str, str]) -> None:
    """The commands of the root group; one that is in no section stands at the end."""
    placed = {name for names in COMMAND_SECTIONS.values() for name in names}
    sections = {**COMMAND_SECTIONS, "Other commands": tuple(sorted(lines.keys() - placed))}
    width = max(map(len, lines))
    for title, names in sections.items():
        known = [(name.ljust(width), lines[name]) for name in names if name in lines]
        if known:
            with formatter.section(title):
                formatter.write_dl(known)


def write_options(formatter: click.HelpFormatter, ctx: click.Context, params: Iterable[click.Parameter]) -> None:
    """The options of a command; more than ten are grouped by purpose."""
    records = [(param, _with_choices_below(*record)) for param in params if (record := param.get_help_record(ctx))]
    titles = [_section(param) if len(records) > _MANY else _OTHERS for param, _ in records]
    for title in _ORDER:
        lines = [line for own, (_, line) in zip(titles, records, strict=True) if own == title]
        if lines:
            with formatter.section(title):
                formatter.write_dl(lines)


def _section(param: click.Parameter) -> str:
    names = (name.lstrip("-") for name in param.opts)
    return next((_SECTION_OF[name] for name in names if name in _SECTION_OF), _OTHERS)


def _with_choices_below(names: str, text: str) -> tuple[str, str]:
    """Many choices are listed in the text of an option, where they are wrapped, and not beside its name."""
    choices = _CHOICES.search(names)
    if choices is None or len(choices[0]) <= _LONGEST_CHOICES:
        return names, text
    listed = choices[1].replace("|", ", ")
    sentence, bracket, default = text.partition("  [")
    return names[: choices.start()] + "CHOICE", f"{sentence} One of: {listed}.{bracket}{default}"
