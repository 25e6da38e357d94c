"""The gate that moves traffic: `rollout`. What `nxpipe rollout start --wait` does, for each fleet of the channel."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from nxpipe.pipeline.artifacts.colours import COLOURS
from nxpipe.pipeline.release.fleets import rolled_out
from nxpipe.pipeline.release.gate import Outcome, Settled

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published
    from nxpipe.pipeline.config import ServingFleet
    from nxpipe.pipeline.release.state import Release
    from nxpipe.pipeline.rollout.beginning import Begun
    from nxpipe.pipeline.rollout.opened import Opened

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


def _opened(release: "Release", fleet: "ServingFleet") -> "Opened":
    from nxpipe.pipeline.rollout.artifacts import Artifacts
    from nxpipe.pipeline.rollout.machine import Machine
    from nxpipe.pipeline.rollout.opened import Opened

    words, config = release.words, release.config
    artifacts = Artifacts(release.store, config, release.folder, fleet, words.actor, words.key)
    return Opened(config, fleet, Machine(config, fleet), artifacts)


def _keep_what_others_run(opened: "list[Opened]") -> None:
    """The first rollout that promotes moves the channel. Fleets that come after it, and have only followed that, must
    not follow it now: their instances would fetch what no rollout has brought there."""
    for one in opened[1:]:
        for colour in COLOURS:
            one.artifacts.keep(colour, f"another fleet of channel {one.fleet.channel} is rolled out first")


def _roll(release: "Release", one: "Opened", artifact: "Published") -> _Rolled:
    from nxpipe.pipeline.rollout.beginning import begin_wanted
    from nxpipe.pipeline.rollout.start import ServedAlready, Wanted

    wanted = Wanted(artifact, None, again=False, minute=_MINUTE, reason=release.words.reason)
    begun = begin_wanted(release.console, one, wanted)
    if isinstance(begun, ServedAlready):
        fleet, candidate = one.fleet.name, begun.candidate
        figures = {"fleet": fleet, "phase": "none", "artifact": vars(candidate)}
        return _Rolled(f"fleet {fleet} runs {candidate.name} already, on {begun.colour}", 0, figures)
    return _followed(release, one, begun)


def _followed(release: "Release", one: "Opened", begun: "Begun") -> _Rolled:
    from nxpipe.pipeline.rollout.ending import exit_code, settle
    from nxpipe.pipeline.rollout.follow import follow
    from nxpipe.pipeline.rollout.view import line

    watcher, fleet = one.watcher, one.fleet.name
    if not release.words.wait and not begun.is_over:
        status = watcher.status(begun.arn)
        sentence = f"fleet {fleet}: begun; watch it with: nxpipe rollout status {fleet} --wait"
        return _Rolled(sentence, 0, status.as_json(), goes_on=True)
    status = follow(release.console, fleet, lambda: watcher.status(begun.arn))
    settle(one, status)
    return _Rolled(f"fleet {fleet}: {line(status)}", exit_code(status), status.as_json())


def _steps(release: "Release") -> str:
    return ", ".join(map(str, release.config.rollout.steps))
