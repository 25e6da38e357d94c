"""`nxpipe claim`: whether a published claim about speed and cost can be true."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.param_types import Amount, Count, PriceRegion
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import page_width, shown, style

if TYPE_CHECKING:
    from nxpipe.pipeline.plan.claims import ExaminedClaim

_COLOURS = {"possible": "green", "implausible": "yellow", "impossible": "red"}
_WIDEST = 100  # columns of text


@click.command(cls=Command)
@click.argument("files", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="[FILE]...")
@click.option("--model-id", "model", metavar="MODEL", help="The model, or a folder with its config.json.")
@click.option("--parameters", type=Amount(1), help="Its parameters, instead of a model.")
@click.option("--instance", metavar="TYPE", help="The instance type.")
@click.option("--instances", type=Count(1), default=1, show_default=True, help="How many of them.")
@click.option("--training", is_flag=True, help="The claim is about training.")
@click.option("--tokens-per-second", type=Amount(above=True), help="Tokens a second of all.")
@click.option("--tp", type=Count(1), help="The tensor-parallel degree of a copy.")
@click.option("--batch", type=Count(1), help="The sequences of a copy.")
@click.option("--sequence", type=Count(1), help="Tokens of a sequence.")
@click.option("--dollars-per-million", type=Amount(above=True), help="Dollars a million tokens.")
@click.option("--region", type=PriceRegion(), default="us-east-1", show_default=True, help="Of the prices.")
@click.pass_obj
def claim(console: Console, /, files: tuple[Path, ...], **options: Any) -> None:
    """Say whether a published claim about speed and cost can be true, with the arithmetic.

    Impossible is what exceeds documented memory, HBM rate or peak rate, or what no known price gives. Implausible is
    what exceeds the interval of the predictions called AWS's compiler, the best measured utilisation of a training, or
    needs weights of 8 bits. What a claim leaves open is assumed as it helps the claim most. FILE has `[[claims]]`;
    docs/claims.md has examples. The exit code is 0 for every verdict.

    \b
    Example:
      nxpipe claim --model-id meta-llama/Llama-3.1-8B --instance inf2.xlarge --batch 1 --tokens-per-second 95
      nxpipe claim --parameters 30e9 --training --instance trn1.32xlarge --instances 16 --tokens-per-second 48000
      nxpipe claim docs/claims.toml
    """
    from nxpipe.pipeline.plan.claims import Claim, claims_of, examine

    training = options.pop("training")
    given = {name: value for name, value in options.items() if value is not None}
    if files and given.keys() - {"instances", "region"}:
        raise click.UsageError("a FILE has whole claims; leave out the options, or the file")
    if not files and "instance" not in given:
        raise click.UsageError("name a FILE with claims, or --instance and what is claimed of it")
    if files:
        claims = [each for path in files for each in claims_of(path)]
    else:
        claims = [Claim(what="training" if training else "serving", **given)]
    examined = [examine(each) for each in claims]
    if console.json:
        console.data([_document(each) for each in examined])
    else:
        width = page_width(_WIDEST, _WIDEST)
        console.page("\n\n".join(_page(each, width) for each in examined))


def _document(each: "ExaminedClaim") -> dict[str, Any]:
    return {
        "claim": each.claim.model_dump(exclude_none=True),
        "verdict": each.verdict.value,
        "steps": [{"verdict": step.verdict.value, "text": step.text} for step in each.steps],
    }


def _page(each: "ExaminedClaim", width: int) -> str:
    title = textwrap.wrap(shown(f"{each.verdict.upper()}: {each.claim.text}"), width)
    title[0] = (
        style(title[0][: len(each.verdict)], fg=_COLOURS[each.verdict], bold=True) + title[0][len(each.verdict) :]
    )
    lines = [
        line
        for step in each.steps
        for line in textwrap.wrap(
            f"{step.verdict:<11} {shown(step.text)}", width, initial_indent="  ", subsequent_indent=" " * 14
        )
    ]
    return "\n".join((*title, *lines))
