"""`nxpipe rollout replay`."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.exit_codes import RECORD
from nxpipe.pipeline.util.files import MiB, read_file

if TYPE_CHECKING:
    from nxpipe.pipeline.canary.plan import Plan
    from nxpipe.pipeline.canary.record import Replayed


@click.command(cls=Command)
@click.argument("record", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.pass_context
def replay(ctx: click.Context, record: Path) -> None:
    """Derive every verdict of a recorded rollout again.

    RECORD has the plan in its first line and a judgement in each other one. Every judgement must follow from the counts
    before it, to the bit, and must name the digest of the one before. Ends in exit code 35 at the first that does not.

    \b
    Example:
      nxpipe rollout replay search-2027-03-02.jsonl
    """
    from nxpipe.pipeline.canary.record import read, replay

    console: Console = ctx.obj
    try:
        lines = read_file(record, limit=256 * MiB).decode().splitlines()
    except ValueError as error:
        raise click.BadParameter(f"{record}: {error}", param_hint="RECORD") from error
    plan, records = read(lines)
    replayed = list(replay(plan, records))
    wrong = next((each for each in replayed if each.wrong), None)
    if console.json:
        console.data(_as_json(replayed))
    elif replayed and not wrong:
        console.page(_told(plan, replayed))
    if wrong:
        console.complain(f"judgement {wrong.number} of {record} is not what the judge says: {wrong.wrong}.")
        ctx.exit(RECORD.number)
    console.say(f"{len(replayed)} judgements, all of them the same again.")


def _as_json(replayed: "list[Replayed]") -> list[dict[str, object]]:
    return [
        {"number": each.number, "verdict": each.judged.verdict.as_json(), "same": each.wrong is None, "why": each.wrong}
        for each in replayed
    ]


def _told(plan: "Plan", replayed: "list[Replayed]") -> str:
    """The last verdict of each step."""
    from nxpipe.pipeline.canary.explain import explain

    last = {each.judged.verdict.step: each.judged for each in replayed}
    return "\n".join(explain(plan, judged.evidence, judged.verdict) for judged in last.values())
