"""The gate that moves traffic: `rollout`. What `nxpipe rollout start --wait` does, for each fleet of the channel."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from nxpipe.pipeline.artifacts.channels import COLOURS
from nxpipe.pipeline.release.fleets import rolled_out
from nxpipe.pipeline.release.gate import Outcome, Settled

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published
    from nxpipe.pipeline.config import ServingFleet
    from nxpipe.pipeline.release.state import Release
    from nxpipe.pipeline.rollout.context import RolloutContext
    from nxpipe.pipeline.rollout.start import StartedRollout

_MINUTE: Final = 60  # seconds


@dataclass(frozen=True)
class _Rolled:
    """What became of one fleet's. `goes_on`: it was begun, and nobody waits for it."""

    sentence: str
    code: int
    figures: dict[str, Any]
    goes_on: bool = False


class Rollout:
    """One fleet after another: a rollout that has promoted moves the channel, which the next one counts from."""

    name: Final = "rollout"

    def settled(self, release: "Release") -> Settled | None:
        if "promote" in release.words.skipped:
            return Settled("skipped", "without `promote` there is nothing new to serve")
        if rolled_out(release):
            return None
        return Settled("skipped", f"no fleet has traffic to move from what channel {release.words.channel} served")

    def intention(self, release: "Release") -> str:
        pairs = [f"fleet {fleet.name} to {one.name}" for fleet, one in rolled_out(release)]
        return f"move the traffic of {', '.join(pairs)}, in steps of {_steps(release)} %"

    def run(self, release: "Release") -> Outcome:
        pairs = rolled_out(release)
        opened = [_opened(release, fleet) for fleet, _ in pairs]
        _keep_what_others_run(opened)
        done: list[_Rolled] = []
        for one, (_, candidate) in zip(opened, pairs, strict=True):
            done.append(_roll(release, one, release.published(candidate)))
            if done[-1].code or done[-1].goes_on:
                break
        sentences = [each.sentence for each in done]
        if waiting := [fleet.name for fleet, _ in pairs[len(done) :]]:
            sentences.append(f"not begun: fleet {', '.join(waiting)}; the same words go on with it")
        return Outcome("; ".join(sentences), done[-1].code, [each.figures for each in done])


def _opened(release: "Release", fleet: "ServingFleet") -> "RolloutContext":
    from nxpipe.pipeline.rollout.aws import StateMachine
    from nxpipe.pipeline.rollout.context import FleetArtifacts, RolloutContext

    words, config = release.words, release.config
    artifacts = FleetArtifacts(release.store, config, release.folder, fleet, words.actor, words.key)
    return RolloutContext(config, fleet, StateMachine(config, fleet), artifacts)


def _keep_what_others_run(opened: "list[RolloutContext]") -> None:
    """The first rollout that promotes moves the channel. Fleets that come after it, and have only followed that, must
    not follow it now: their instances would fetch what no rollout has brought there."""
    for one in opened[1:]:
        for colour in COLOURS:
            one.artifacts.keep(colour, f"another fleet of channel {one.fleet.channel} is rolled out first")


def _roll(release: "Release", one: "RolloutContext", artifact: "Published") -> _Rolled:
    from nxpipe.pipeline.rollout.start import AlreadyServed, StartRequest, start_rollout

    wanted = StartRequest(artifact, None, again=False, minute=_MINUTE, reason=release.words.reason)
    begun = start_rollout(release.console, one, wanted)
    if isinstance(begun, AlreadyServed):
        fleet, candidate = one.fleet.name, begun.candidate
        figures = {"fleet": fleet, "phase": "none", "artifact": vars(candidate)}
        return _Rolled(f"fleet {fleet} runs {candidate.name} already, on {begun.colour}", 0, figures)
    return _followed(release, one, begun)


def _followed(release: "Release", one: "RolloutContext", begun: "StartedRollout") -> _Rolled:
    from nxpipe.pipeline.rollout.finish import exit_code, move_fleet_channel
    from nxpipe.pipeline.rollout.follow import follow
    from nxpipe.pipeline.rollout.render import status_line

    watcher, fleet = one.watcher, one.fleet.name
    if not release.words.wait and not begun.is_over:
        status = watcher.status(begun.arn)
        sentence = f"fleet {fleet}: begun; watch it with: nxpipe rollout status {fleet} --wait"
        return _Rolled(sentence, 0, status.as_json(), goes_on=True)
    status = follow(release.console, fleet, lambda: watcher.status(begun.arn))
    move_fleet_channel(one, status)
    return _Rolled(f"fleet {fleet}: {status_line(status)}", exit_code(status), status.as_json())


def _steps(release: "Release") -> str:
    return ", ".join(map(str, release.config.rollout.steps))
