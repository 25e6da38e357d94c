"""Help texts: commands and options by purpose, as wide as the screen, long choices in the text of their option."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Final

import click

from nxpipe.pipeline.util.text import folded

COMMANDS_BY_PURPOSE: Final[Mapping[str, Sequence[str]]] = {
    "Getting started": ("init", "doctor", "config", "completion", "version"),
    "Build and verify": ("check", "build", "verify", "explain", "profile", "dis"),
    "Store and channels": ("store", "diff", "bench", "promote", "rollback", "channel", "stats", "ui"),
    "Serve and run": ("run", "generate", "serve"),
    "Plan and cost": ("plan", "assess", "claim", "prices", "cost"),
    "Release and roll out": ("release", "rollout"),
    "AWS and devices": ("infra", "ami", "prove", "calibrate", "device", "monitor"),
    "Run by instances and build jobs": ("agent", "worker"),
}

_SPECIFIC: Final = "Options"  # of this command alone
_MANY: Final = 10  # options that are easy to read in one list
_OPTIONS_BY_PURPOSE: Final[Mapping[str, str]] = {
    "Model": "--model-id --only --model --folder --task --weights --revision --axis",
    "Target and shapes": "--target --tp --batches --buckets --phases --autocast --autocast-type --backend",
    "Workload": "--rate --arrivals --prompt --log --ttft --tpot --availability --certain --tokens --sequence-length",
    "Training": "--precision --zero1 --flash --batch --checkpoint-seconds --restart-seconds",
    "Instances and cost": "--instance --count --region --zone --purchase --runtime --rollouts --spot-interruptions "
    "--budget --deadline --gpu --no-gpu --measured-instance --migration-weeks --week-cost --overrun",
    "Sampling": "--max-tokens --temperature --top-p --top-k --seed --stop",
    "Server": "--host --port --name --rows --copies --max-waiting --request-timeout --drain-delay --drain-timeout "
    "--keep-alive --pooling",
    "Shadow requests": "--shadow --shadow-record --shadow-control --shadow-match",
    "GitHub": "--github --repository --owner-id --repository-id",
    "Execution": "--dry-run --force --resume --keep-going --no-verify --executor --address --jobs --timeout "
    "--memory-limit --retries --mode --engine-order --device --limit --wait",
    "Promotion": "--channel --reason --actor --past-rollouts --without-evidence --expect --despite-policy",
    "Store and configuration": "--store --config --key --public-key",
    "Output": "--sarif --html --out --trace --explain --json --quiet --verbose --help",
}
_PURPOSE: Final = {name: purpose for purpose, names in _OPTIONS_BY_PURPOSE.items() for name in names.split()}
_ELSEWHERE: Final = {
    ("plan serve", "--output"): "Workload",
    ("plan serve", "--measured"): "Instances and cost",
    ("simulate", "--seed"): _SPECIFIC,
}
_LONGEST_CHOICE: Final = 36


def write_commands(formatter: click.HelpFormatter, helps: Mapping[str, str]) -> None:
    """The commands of the root group by purpose; those of no purpose at the end."""
    placed = set(chain.from_iterable(COMMANDS_BY_PURPOSE.values()))
    for purpose, names in {**COMMANDS_BY_PURPOSE, "Other commands": sorted(set(helps) - placed)}.items():
        if rows := [(name, helps[name]) for name in names if name in helps]:
            with formatter.section(purpose):
                formatter.write_dl(rows)


def write_options(formatter: click.HelpFormatter, ctx: click.Context, parameters: Iterable[click.Parameter]) -> None:
    """The options; by purpose if they are many."""
    sections: dict[str, list[tuple[str, str]]] = {}
    params = [param for param in parameters if isinstance(param, click.Option)]
    for param in params:
        if record := _record(param, ctx):
            sections.setdefault(_purpose(param, ctx) if len(params) > _MANY else _SPECIFIC, []).append(record)
    for purpose in (_SPECIFIC, *_OPTIONS_BY_PURPOSE):
        if purpose in sections:
            with formatter.section(purpose):
                formatter.write_dl(sections[purpose])


def _purpose(param: click.Option, ctx: click.Context) -> str:
    names = [name for name in param.opts if name.startswith("--")]
    other = next(
        (_ELSEWHERE[tail, name] for tail, name in _ELSEWHERE if ctx.command_path.endswith(tail) and name in names), None
    )
    return other or next((_PURPOSE[name] for name in names if name in _PURPOSE), _SPECIFIC)


def _record(param: click.Option, ctx: click.Context) -> tuple[str, str] | None:
    """The option and its help. Long choices, which no narrow screen could wrap, are part of the help."""
    record = param.get_help_record(ctx)
    if record is None or not isinstance(param.type, click.Choice) or param.metavar is not None:
        return record
    choices = param.make_metavar(ctx)
    if len(choices) <= _LONGEST_CHOICE:
        return record
    names, text = record
    word = (param.name or "").upper().replace("_", "-")
    body, separator, extra = text.partition("  [")
    return names.replace(choices, word), f"{body} One of {', '.join(map(str, param.type.choices))}.{separator}{extra}"


class HelpFormatter(click.HelpFormatter):
    """Wraps between words only. An example that is longer than a line continues after a backslash."""

    def write_text(self, text: str) -> None:
        self.write("\n\n".join(map(self._paragraph, text.split("\n\n"))) + "\n")

    def _paragraph(self, text: str) -> str:
        indent = " " * self.current_indent
        head, *lines = text.split("\n")
        if head.strip() == "\b":
            return "\n".join(row for line in lines for row in _example(indent + line.rstrip(), self.width))
        return "\n".join(folded(indent + " ".join(text.split()), self.width, indent))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        rows = list(rows)
        indent = " " * self.current_indent
        longest = max((len(name) for name, _ in rows), default=0)
        blanks = indent + " " * (min(longest, col_max, self.width // _SHARE_OF_NAMES) + col_spacing)
        for name, text in rows:
            lines = folded(blanks + " ".join(text.split()), self.width, blanks)
            head = indent + name
            if len(head) + col_spacing <= len(blanks):
                lines[0] = head + lines[0][len(head) :]
            else:
                lines = folded(head, self.width, indent + "  ") + lines
            self.write("\n".join(lines) + "\n")


_SHARE_OF_NAMES: Final = 3  # of the width: names take at most a third


def _example(line: str, width: int) -> Iterator[str]:
    if len(line) <= width:
        yield line
        return
    indent = line[: len(line) - len(line.lstrip(" "))] + "  "
    *before, last = folded(line, width - 2, indent)
    yield from (f"{part} \\" if line.lstrip(" ").startswith("nxpipe ") else part for part in before)
    yield last
