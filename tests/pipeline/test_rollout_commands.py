"""`nxpipe rollout start|status|approve|pause|resume|abort|log`, with a state machine controlled by the test.

test_rollout_machines.py tests the commands with the real machines.
"""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import boto3
import pytest

from nxpipe.artifact_store import open_store
from nxpipe.pipeline.rollout.aws import baseline_history
from nxpipe.pipeline.rollout.follow import follow
from nxpipe.pipeline.rollout.planner import Service, in_favour, minutes_until
from nxpipe.pipeline.rollout.status import Status
from nxpipe.pipeline.util import exit_codes
from nxpipe.pipeline.util.console import Console
from tests.artifact_store.samples import MODEL, publish_proven, publish_verified, put
from tests.canary.samples import plan_with
from tests.pipeline.in_process import nxpipe
from tests.pipeline.rollout_world import Fleet, fleet, front

pytestmark = pytest.mark.sample(12)

__all__ = ["fleet", "front", "nxpipe"]

REFUSED = exit_codes.ROLLOUT_REFUSED.number
ROLLED_BACK = exit_codes.ROLLED_BACK.number


# Start


def test_a_start_gives_each_colour_its_artifact_and_leaves_the_fleets_channel_alone(fleet: Fleet) -> None:
    answer = fleet.start(1, "--reason", "new tokenizer")
    assert answer.code == 0, answer.err
    assert "blue -> green" in answer.err
    assert "  fleet search is a rehearsal: it may serve programs of the emulator" in answer.err
    assert "5 %, 25 %, 50 %, 95 % of traffic, each for 5 to 60 minutes" in answer.err
    assert "latencies are not compared: the stable version has 0 timed requests" in answer.err
    served = [fleet.served(channel) for channel in ("search--blue", "search--green", "production")]
    assert served == [fleet.name(0), fleet.name(1), fleet.name(0)]
    execution = fleet.execution()
    document = json.loads(execution["input"])
    assert (document["from"], document["to"], document["reason"]) == ("blue", "green", "new tokenizer")
    assert document["artifact"] == fleet.artifacts[1].request_key
    assert fleet.record()["owner"] == execution["executionArn"]


def test_a_fleet_that_is_no_rehearsal_rolls_out_no_programs_of_the_emulator(fleet: Fleet) -> None:
    path = Path("nxpipe.toml")
    path.write_text(path.read_text().replace("rehearsal = true", ""))
    refused = fleet.start(1)
    assert refused.code == exit_codes.REFUSED.number
    assert "fleet search needs those of backend neuronx" in refused.err
    assert (fleet.running(), fleet.record()) == ([], {})


def test_a_fleet_that_is_no_rehearsal_any_more_can_leave_what_it_rehearsed_with(fleet: Fleet) -> None:
    path, store = Path("nxpipe.toml"), open_store("store")
    path.write_text(path.read_text().replace("rehearsal = true", ""))
    real = publish_proven(store, put(store, request=8).model_copy(update={"backend": "neuronx"}))
    answer = fleet.rollout("start", "search", real.name)
    assert answer.code == 0, answer.err
    assert fleet.served("search--blue") == fleet.name(0)


def test_a_rollout_without_evidence_of_devices_gives_a_reason_that_both_channels_keep(fleet: Fleet) -> None:
    path, store = Path("nxpipe.toml"), open_store("store")
    path.write_text(path.read_text().replace("rehearsal = true", ""))
    made = put(store, request=8).model_copy(update={"backend": "neuronx"})
    words = ("start", "search", publish_verified(store, made).name)
    refused = fleet.rollout(*words)
    assert (refused.code, "it has no evidence of kind device" in refused.err) == (exit_codes.REFUSED.number, True)
    assert (fleet.running(), "owner" in fleet.record()) == ([], False)
    without = ("--without-evidence", "device", "--reason", "first hour")
    fleet.says("promoted", "all is well")
    answer = fleet.rollout(*words, *without, "--wait")
    assert answer.code == 0, answer.err
    for channel in ("search--green", "production"):
        log = json.loads(fleet.nxpipe("channel", "log", channel, "--last", "1", "--json").out)
        assert log[0]["reason"].startswith("without device evidence, because first hour (")
        assert "rollout" in log[0]["reason"]
        assert log[0]["artifacts"][0]["without"] == ["device"]


def test_an_environment_does_without_what_the_fleets_channel_does_without(fleet: Fleet) -> None:
    """The first rollout pins the old environment to what it runs: its instances must go on starting."""
    path, store = Path("nxpipe.toml"), open_store("store")
    path.write_text(path.read_text().replace("rehearsal = true", ""))
    old = publish_verified(store, put(store, request=7).model_copy(update={"backend": "neuronx"}))
    new = publish_proven(store, put(store, request=8).model_copy(update={"backend": "neuronx"}))
    words = ("promote", old.name, "--channel", "production", "--without-evidence", "device", "--reason", "first hour")
    assert fleet.nxpipe(*words).code == 0
    assert fleet.rollout("start", "search", new.name).code == 0
    shown = [fleet.nxpipe("channel", "show", f"search--{colour}", "--json").out for colour in ("blue", "green")]
    blue, green = (json.loads(text)[0] for text in shown)
    assert blue["artifacts"][0]["without"] == ["device"]
    assert "channel production serves it without" in blue["reason"]
    assert "without" not in green["artifacts"][0]


def test_latencies_are_frozen_from_what_the_old_version_has_shown(fleet: Fleet) -> None:
    dimensions = [
        {"Name": "LoadBalancer", "Value": fleet.front["balancer"]},
        {"Name": "TargetGroup", "Value": fleet.front["colours"]["blue"]["series"]},
    ]
    shown = {
        "MetricName": "TargetResponseTime",
        "Dimensions": dimensions,
        "Timestamp": datetime.now(UTC) - timedelta(minutes=5),
        "Values": [number / 100 for number in range(1, 101)],
        "Counts": [20.0] * 100,
    }
    boto3.client("cloudwatch").put_metric_data(Namespace="AWS/ApplicationELB", MetricData=[shown])
    answer = fleet.start(1)
    assert "those of 2,000 requests to the stable version" in answer.err, answer.err
    frozen = json.loads(fleet.execution()["input"])["plan"]["latencies"]
    assert frozen == pytest.approx([0.51, 0.76, 0.91, 0.96, 1.0, 1.25, 1.6])


def test_a_start_waits_as_long_as_the_instances_of_the_fleet_may_take(fleet: Fleet) -> None:
    path = Path("nxpipe.toml")
    path.write_text(path.read_text().replace("rehearsal = true", 'rehearsal = true\nready_within = "110m"'))
    assert fleet.start(1).code == 0
    assert json.loads(fleet.execution()["input"])["pace"]["warm_tries"] == 500  # (110 + 15) minutes, 4 a minute


def test_starting_the_same_twice_is_one_rollout_and_another_one_has_to_wait(fleet: Fleet) -> None:
    assert (fleet.start(1).code, fleet.start(1).code) == (0, 0)
    other = fleet.start(2)
    assert other.code == REFUSED
    assert "has been running since" in other.err
    assert "nxpipe rollout abort search" in other.err
    assert fleet.served("search--green") == fleet.name(1)
    assert len(fleet.running()) == 1


def test_a_start_that_died_is_finished_by_the_same_words_and_forgotten_by_others_after_a_while(fleet: Fleet) -> None:
    assert fleet.start(1).code == 0
    arn = fleet.execution()["executionArn"]
    fleet.stop_all()
    long_ago = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    never_started = arn.rpartition(":")[0] + f":{fleet.artifacts[2].request_key[:12]}-green-1"
    fleet.write_record(owner=never_started, since=datetime.now(UTC).isoformat(), stable="blue")
    busy = fleet.start(1, "--again")
    assert (busy.code, "retry in 5 min" in busy.err) == (REFUSED, True)
    assert fleet.start(2).code == 0
    assert fleet.execution()["executionArn"] == never_started
    fleet.stop_all()
    fleet.write_record(owner=f"{arn}-lost", since=long_ago, stable="blue")
    assert fleet.start(1, "--again").code == 0
    assert fleet.served("search--green") == fleet.name(1)


def test_an_artifact_that_is_served_already_is_nothing_to_do(fleet: Fleet) -> None:
    answer = fleet.start(0)
    assert (answer.code, f"runs {MODEL}" in answer.out) == (0, True)
    assert "owner" not in fleet.record()


def test_what_another_channel_serves_can_be_rolled_out(fleet: Fleet) -> None:
    assert fleet.nxpipe("promote", fleet.name(2), "--channel", "staging").code == 0
    assert fleet.rollout("start", "search", "--channel", "staging", "--to", "green").code == 0
    assert fleet.served("search--green") == fleet.name(2)


def test_a_channel_that_takes_signed_artifacts_only_holds_its_colours_to_that(fleet: Fleet) -> None:
    assert fleet.nxpipe("store", "keygen", "release.key").code == 0
    path = Path("nxpipe.toml")
    path.write_text(path.read_text() + '[signing]\nkey = "file:release.key"\nrequire = ["production"]\n')
    unproved = fleet.start(1)
    assert (unproved.code, "channel production is not signed" in unproved.err) == (exit_codes.REFUSED.number, True)
    for version in (0, 2):
        assert fleet.nxpipe("store", "sign", fleet.name(version)).code == 0
    for version in (2, 0):  # as it serves the first one already, this takes two steps
        assert fleet.nxpipe("promote", fleet.name(version), "--channel", "production").code == 0
    unsigned = fleet.start(1)
    assert unsigned.code == exit_codes.REFUSED.number
    assert "requires signed artifacts" in unsigned.err
    assert "owner" not in fleet.record()
    assert fleet.nxpipe("store", "sign", fleet.name(1)).code == 0
    assert fleet.start(1).code == 0
    (told,) = json.loads(fleet.nxpipe("channel", "log", "search--green", "--json").out)
    assert (told["signed_by"], told["fault"]) == (["signing.key"], None)


# The end


def test_a_rehearsal_is_foreseen_by_what_its_short_minutes_bring(fleet: Fleet) -> None:
    with Path("nxpipe.toml").open("a") as file:
        file.write("[rollout]\nsteps = [100]\n")
    fleet.count(30, seconds=10)
    message = fleet.start(1, "--minute", "1").err
    minutes = minutes_until(in_favour(plan_with((100,)), Service(30 / 60, base_error=0.0001), 0))
    assert "at 30 requests a second" in message
    assert f"95 %: about {minutes:.0f} minutes" in message


def test_what_the_load_balancer_answered_with_504_is_an_error_of_the_baseline(fleet: Fleet) -> None:
    """Such a request has no response in the counts of the target group."""
    fleet.count(30, seconds=10, answered=21)
    known = baseline_history(fleet.state_machine(), "blue", 1)
    assert (known.rps, known.error_rate) == pytest.approx((30, 0.3))
    assert "at 30 requests a second with an error rate of 30 %:" in fleet.start(1, "--minute", "1").err


def test_refusals_and_responses_to_earlier_requests_are_no_errors_of_the_baseline(fleet: Fleet) -> None:
    fleet.count(30, seconds=10, answered=20, status="4XX")
    fleet.count(0, seconds=10, answered=15)
    assert baseline_history(fleet.state_machine(), "blue", 1).error_rate == 0


def test_a_promotion_moves_the_fleets_channel_once(fleet: Fleet) -> None:
    fleet.says("promoted", "all is well")
    answer = fleet.start(1, "--minute", "1", "--wait")
    assert answer.code == 0, answer.err
    assert "promoted" in answer.out
    assert fleet.served("production") == fleet.name(1)
    assert fleet.rollout("status", "search", "--wait").code == 0
    assert len(json.loads(fleet.nxpipe("channel", "log", "production", "--json").out)) == 2


def test_when_the_command_has_died_the_next_one_moves_the_channel(fleet: Fleet) -> None:
    fleet.says("promoted", "all is well")
    assert fleet.start(1).code == 0
    fleet.until_ended()
    assert "promote it with: nxpipe rollout status search --wait" in fleet.rollout("status", "search").err
    assert fleet.served("production") == fleet.name(0)
    fleet.weigh(green=100)
    fleet.ends()
    assert fleet.start(2).code == 0
    assert fleet.served("production") == fleet.name(1)
    assert fleet.served("search--blue") == fleet.name(2)


def test_a_channel_that_somebody_has_moved_meanwhile_is_left_as_it_is(fleet: Fleet) -> None:
    fleet.says("promoted", "all is well")
    assert fleet.start(1).code == 0
    fleet.until_ended()
    assert fleet.nxpipe("promote", fleet.name(2), "--channel", "production").code == 0
    assert fleet.rollout("status", "search", "--wait").code == 0
    assert fleet.served("production") == fleet.name(2)


def test_of_two_fleets_on_one_channel_each_moves_what_it_runs_itself(fleet: Fleet) -> None:
    fleet.says("promoted", "all is well")
    assert fleet.start(1).code == 0
    fleet.until_ended()
    other = fleet.publish("acme/other")
    assert fleet.nxpipe("promote", other, "--channel", "production").code == 0
    assert fleet.rollout("status", "search", "--wait").code == 0
    assert sorted(fleet.all_served("production")) == sorted([fleet.name(1), other])


@pytest.mark.parametrize(
    ("outcome", "code"),
    [
        ("roll_back", exit_codes.ROLLED_BACK),
        ("aborted", exit_codes.ROLLED_BACK),
        ("capacity_blocked", exit_codes.CAPACITY_BLOCKED),
    ],
)
def test_how_it_ended_is_the_exit_code(fleet: Fleet, outcome: str, code: exit_codes.ExitCode) -> None:
    fleet.says(outcome, "of this and that")
    answer = fleet.start(1, "--minute", "1", "--wait")
    assert (answer.code, "of this and that" in answer.out) == (code.number, True)
    assert fleet.rollout("status", "search").code == code.number
    assert fleet.served("production") == fleet.name(0)


def test_a_version_that_went_back_is_rolled_out_again_only_by_another_word(fleet: Fleet) -> None:
    fleet.says("roll_back", "it is worse")
    assert fleet.start(1, "--minute", "1", "--wait").code == ROLLED_BACK
    first = fleet.execution()["name"]
    assert fleet.start(1, "--minute", "1", "--wait").code == ROLLED_BACK
    assert fleet.execution()["name"] == first
    assert fleet.start(1, "--again").code == 0
    assert fleet.execution()["name"] == f"{first}-2"


def test_a_rollout_that_was_refused_says_why_and_may_be_started_again(fleet: Fleet) -> None:
    error_document = json.dumps({"errorMessage": "The alarm p99 sounds.", "errorType": "Refused"})
    fleet.ends({"Refused": {"Type": "Fail", "Error": "Refused", "Cause": error_document}})
    answer = fleet.start(1)
    fleet.until_ended()
    waited = fleet.rollout("status", "search", "--wait")
    assert (answer.code, waited.code) == (0, REFUSED)
    assert "The alarm p99 sounds." in waited.out
    fleet.write_record()  # the machine has unlocked it
    fleet.ends()
    assert fleet.start(1).code == 0


def test_what_died_is_over_when_the_watchdog_has_brought_it_home(fleet: Fleet) -> None:
    assert fleet.start(1).code == 0
    owner = fleet.record()["owner"]
    fleet.stop_all()
    assert fleet.status()["outcome"]["end"] == "unfinished"
    busy = fleet.start(2)
    assert (busy.code, "its watchdog is rolling back" in busy.err) == (REFUSED, True)
    for stable, code in (("blue", ROLLED_BACK), ("green", 0)):
        fleet.write_record(stable=stable)
        assert fleet.rollout("status", "search", "--wait").code == code, owner
    assert fleet.served("production") == fleet.name(1)


# While it is under way


def test_the_status_has_the_weights_and_what_the_judge_has_seen(fleet: Fleet) -> None:
    assert fleet.start(1).code == 0
    assert fleet.status()["phase"] == "filling"
    fleet.weigh(green=5)
    fleet.look(4, requests=(300, 5700), failed=(0, 12))
    status = fleet.status()
    assert (status["phase"], status["weights"], status["step"]) == ("step", {"blue": 95, "green": 5}, 0)
    assert status["evidence"]["better"] > 0 > status["evidence"]["worse"]
    assert status["ratios"]["errors"][1] is not None
    assert (status["progress"]["advance"], status["progress"]["regression"]) == (1, 0)
    picture = fleet.rollout("status", "search").out
    assert "blue 95 %, green 5 %" in picture
    assert "step 1 of 4, at 5 %" in picture
    assert "100 % of the evidence needed; 3 more min of evidence are required" in " ".join(picture.split())
    assert "now 0 of 600 24 of 11,400" in " ".join(picture.split())


def test_without_evidence_a_person_is_awaited_and_the_exit_code_says_so(fleet: Fleet) -> None:
    assert fleet.start(1).code == 0
    fleet.weigh(green=5)
    fleet.look(61)
    waited = fleet.rollout("status", "search", "--wait")
    assert waited.code == exit_codes.UNDECIDED.number
    assert "an operator must decide" in waited.out
    assert "nxpipe rollout approve search, or nxpipe rollout abort search" in waited.err
    assert fleet.rollout("approve", "search").code == 0
    assert fleet.status()["awaits_a_person"] is False


def test_a_word_to_a_rollout_may_be_repeated_and_its_end_is_not_taken_back(fleet: Fleet) -> None:
    assert fleet.start(1).code == 0
    changed = [json.loads(fleet.rollout(word, "search", "--json").out)["changed"] for word in ("pause", "pause")]
    assert (changed, fleet.record()["signal"]) == ([True, False], "pause")
    assert (fleet.rollout("resume", "search").code, "signal" in fleet.record()) == (0, False)
    assert "is not paused" in fleet.rollout("resume", "search").out
    assert fleet.rollout("abort", "search").code == 0
    assert (fleet.rollout("approve", "search").code, fleet.record()["signal"]) == (REFUSED, "abort")
    fleet.stop_all()
    fleet.write_record(stable="blue")
    late = fleet.rollout("abort", "search")
    assert (late.code, "no rollout of fleet search is running" in late.err) == (REFUSED, True)


def test_the_log_is_a_table_and_as_json_what_replay_reads(fleet: Fleet) -> None:
    assert fleet.start(1).code == 0
    for minutes in (4, 8):
        fleet.look(minutes, requests=(300, 5700), failed=(30, 12))
    table = fleet.rollout("log", "search", "--html", "rollout.html").out
    assert "roll_back" in table
    page = Path("rollout.html").read_text()
    assert "requests of the new version that failed" in page
    assert "roll back" in page
    assert "of 11400" in table
    Path("record.jsonl").write_text(fleet.rollout("log", "search", "--json").out)
    replayed = fleet.rollout("replay", "record.jsonl", "--json")
    assert (replayed.code, len(json.loads(replayed.out))) == (0, 2), replayed.err


def test_interrupted_waiting_says_how_to_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    def look() -> Status:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        follow(Console(), "search", look)
    assert "follow it with: nxpipe rollout status search --wait" in capsys.readouterr().err


def test_what_a_user_gets_wrong_is_one_sentence_with_the_way_out(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {
        "did you mean 'search'?": (exit_codes.USAGE, fleet.rollout("status", "serch")),
        "pass either ARTIFACT": (exit_codes.USAGE, fleet.rollout("start", "search")),
        "there is no artifact": (exit_codes.NOT_FOUND, fleet.rollout("start", "search", f"{MODEL}@ffffffff")),
        "omit --to": (exit_codes.ROLLOUT_REFUSED, fleet.start(1, "--to", "blue")),
        "there is no rollout lost": (
            exit_codes.ROLLOUT_REFUSED,
            fleet.rollout("log", "search", "--execution", "lost"),
        ),
        "no rollout of fleet search": (exit_codes.ROLLOUT_REFUSED, fleet.rollout("abort", "search")),
    }
    with monkeypatch.context() as other:
        other.setenv("NXPIPE_PROJECT_NAME", "other")
        answers["npx cdk deploy other-rollout-search"] = (exit_codes.ROLLOUT_REFUSED, fleet.rollout("status", "search"))
        answers["has no state machine"] = (exit_codes.ROLLOUT_REFUSED, fleet.rollout("abort", "search"))
    fleet.weigh(green=50)
    answers["shift all of it to one of blue and green"] = (exit_codes.ROLLOUT_REFUSED, fleet.start(1))
    with monkeypatch.context() as nobody:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            nobody.delenv(name)
        answers["no AWS credentials found"] = (exit_codes.AWS, fleet.rollout("abort", "search"))
    for sentence, (code, answer) in answers.items():
        assert answer.code == code.number, (sentence, answer)
        assert sentence in answer.err, answer.err
        assert "Traceback" not in answer.err
