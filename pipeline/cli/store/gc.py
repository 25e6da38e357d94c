"""`nxpipe store gc`, `pin` and `unpin`: retention of artifacts."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxpipe.pipeline.artifacts.identity import current_identity
from nxpipe.pipeline.artifacts.store_url import open_uncached_store
from nxpipe.pipeline.cli.completion import complete_artifacts, complete_pins
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import REASON, Label, config_option, store_option
from nxpipe.pipeline.cli.param_types import Bytes, Count, DurationType
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import human_bytes, table

if TYPE_CHECKING:
    from nxpipe.artifact_store.maintenance.collection import Collected, Plan, Step
    from nxpipe.artifact_store.pins import Pin


@click.command(cls=Command)
@click.argument("name", metavar="[ARTIFACT]", required=False, shell_complete=complete_artifacts)
@click.option("--as", "pin_name", type=Label("pin"), metavar="PIN", help="The pin's name: 1 to 63 of a-z, 0-9 and '-'.")
@click.option("--reason", type=REASON, default="", help="The reason, shown with the pin.")
@store_option
@config_option
@click.pass_obj
def pin(
    console: Console, name: str | None, pin_name: str | None, reason: str, store: str | None, config_path: Path
) -> None:
    """Pin an artifact, which protects it from gc, or list the pins.

    ARTIFACT is a model's id, MODEL@KEY, or a key, as for `nxpipe store show`. Without ARTIFACT, lists all pins.

    \b
    Example:
      nxpipe store pin bert-base-uncased@4e9ce0 --as audit-2026 --reason "figures of the paper"
      nxpipe store pin
    """
    from nxpipe.artifact_store.pins import Pins

    if (name is None) != (pin_name is None):
        raise click.UsageError("ARTIFACT requires --as PIN; without both, the pins are listed")
    opened = open_uncached_store(store, config_path, console)
    pins = Pins(opened.backend)
    if name is not None and pin_name is not None:
        published = opened.resolve(name)
        entries = [pins.add(pin_name, published.record.manifest, actor=current_identity(), reason=reason)]
    else:
        entries = pins.all()
    if console.json:
        console.data([entry.model_dump(mode="json") for entry in entries])
    elif entries:
        console.page(table(("pin", "manifest", "expires", "by", "reason"), [_pin_row(entry) for entry in entries]))
    else:
        console.say(f"{opened.url} has no pins.")


@click.command(cls=Command)
@click.argument("pin_name", type=Label("pin"), metavar="PIN", shell_complete=complete_pins)
@store_option
@config_option
@click.pass_obj
def unpin(console: Console, pin_name: str, store: str | None, config_path: Path) -> None:
    """Remove a pin; a later gc may remove the artifact.

    \b
    Example:
      nxpipe store unpin audit-2026
    """
    from nxpipe.artifact_store.pins import Pins

    opened = open_uncached_store(store, config_path, console)
    Pins(opened.backend).remove(pin_name)
    if console.json:
        console.data({"removed": pin_name})
    else:
        console.say(f"Removed pin {pin_name} of {opened.url}.")


def _pin_row(entry: "Pin") -> tuple[str, ...]:
    from nxpipe.artifact_store.names import SHOWN

    return entry.name, entry.manifest.sha256[:SHOWN], (entry.expires_at or "never")[:16], entry.actor, entry.reason


@click.command(cls=Command)
@click.option("--keep", type=Count(1), metavar="N", help="Keep the newest N of each model and target.")
@click.option("--max-age", type=DurationType(), help="Remove artifacts older than this, as in 90d.")
@click.option(
    "--budget",
    type=Bytes(),
    help="Remove the oldest artifacts until the others fit, as in 2TiB.",
)
@click.option("--dry-run", is_flag=True, help="Print the steps with reasons; change nothing.")
@store_option
@config_option
@click.pass_obj
def gc(
    console: Console,
    keep: int | None,
    max_age: int | None,
    budget: int | None,
    dry_run: bool,
    store: str | None,
    config_path: Path,
) -> None:
    """Remove orphaned objects, and artifacts beyond the retention rules.

    An artifact is removed if any of the rules applies; without rules, only objects left by crashes and repairs are
    removed. Artifacts stay if they are pinned, or if a channel served them lately: in its last 90 days or 10
    generations.
    Objects younger than a day stay. A removed artifact disappears at once; its bytes are freed a day later.

    \b
    Example:
      nxpipe store gc --dry-run
      nxpipe store gc --keep 5 --max-age 90d
    """
    from nxpipe.artifact_store.maintenance.collection import Rules, apply_plan, plan, time_to_collect

    opened = open_uncached_store(store, config_path, console)
    now = time_to_collect(opened, read_only=dry_run)
    if not dry_run:
        opened.backend.recover()
    planned = plan(opened, Rules(keep=keep, max_age=max_age, budget=budget), now)
    outcome = None if dry_run else apply_plan(opened, planned)
    if console.json:
        console.data(_as_json(planned, outcome))
    elif planned.steps:
        console.page(table(("action", "object", "size", "why"), [_step_row(step) for step in planned.steps]))
    if not planned.steps:
        console.say(f"Nothing to collect in {opened.url}{_kept(planned, ': ')}.")
    elif outcome is None:
        freed = sum(step.listed.size for step in planned.steps if step.action != "retire")
        console.say(
            f"{len(planned.steps)} steps would free {human_bytes(freed)} of {opened.url}; nothing was changed"
            f"{_kept(planned, '; ')}."
        )
    else:
        console.say(
            f"{len(outcome.done)} steps freed {human_bytes(outcome.freed)} of {opened.url}; "
            f"{len(outcome.spared)} objects stay, because another process used or changed them during the run"
            f"{_kept(planned, '; ')}."
        )


def _kept(planned: "Plan", separator: str) -> str:
    """How many artifacts stay, by reason, the most frequent first."""
    if not planned.kept:
        return ""
    reasons = Counter(kept.reason for kept in planned.kept)
    counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    noun = "artifact is" if len(planned.kept) == 1 else "artifacts are"
    return f"{separator}{len(planned.kept)} {noun} kept ({counts})"


def _step_row(step: "Step") -> tuple[str, ...]:
    return step.action, step.listed.path, human_bytes(step.listed.size), step.reason


def _as_json(planned: "Plan", outcome: "Collected | None") -> dict[str, object]:
    spared = {(step.action, step.listed.path) for step in outcome.spared} if outcome else set()
    return {
        "carried_out": outcome is not None,
        "steps": [
            {
                "action": step.action,
                "path": step.listed.path,
                "size": step.listed.size,
                "tag": step.listed.tag,
                "reason": step.reason,
                "spared": (step.action, step.listed.path) in spared,
            }
            for step in planned.steps
        ],
        "kept": [
            {"artifact": kept.record.request_key, "model": kept.record.model_id, "target": kept.record.target}
            | {"reason": kept.reason}
            for kept in planned.kept
        ],
    }
