"""Faults of the first boot: each ends in one sentence in the fleet's log group, which outlives the instance, in one
ABANDON and in one alarm. `operating.md`, "When an instance does not start", is the same table for people.
"""

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
from moto.ec2.exceptions import EC2ClientError

from nxpipe.artifact_store.layout import blob_path
from nxpipe.artifact_store.manifest import ModelRef
from tests.agent.boot_world import GROUP, LOG, SERVER, BootFleet, Machine, boot_fleet, booting
from tests.conftest import ROOT
from tests.localaws.formation.provider import client_of
from tests.localaws.moto_patches import capacity, scaling
from tests.stacks.local import REGION

ALARM: Final = "demo-search-not-starting"
_GIVEN_UP: Final = " is given up: "


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BootFleet]:
    with boot_fleet(tmp_path_factory.mktemp("fleet")) as found:
        yield found


@pytest.fixture
def fleet(deployed: BootFleet, monkeypatch: pytest.MonkeyPatch) -> BootFleet:
    for name, value in deployed.environment.items():
        monkeypatch.setenv(name, value)
    return deployed


@pytest.fixture
def machine(fleet: BootFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    with booting(fleet, tmp_path, monkeypatch) as found:
        yield found


@dataclass(frozen=True)
class Fault:
    name: str
    inject: Callable[[Machine], None]
    sentence: str  # a part of it
    stream: str = "agent"  # of the log group: `boot` is user data's


# Faults of the image and of the bundle, which user data reports.


def _without(program: str) -> Callable[[Machine], None]:
    return lambda machine: (machine.sandbox.folder / "bin" / program).unlink()


def _program(name: str, does: str) -> Callable[[Machine], None]:
    return lambda machine: machine.sandbox.replace(name, does)


_NO_ENSUREPIP: Final = "The virtual environment was not created successfully because ensurepip is not available."
_NO_SPACE: Final = "tar: nxpipe-0.1.0-py3-none-any.whl: Cannot write: No space left on device"
# The real pip, as that of an image with Python 3.10. The wheels require 3.11.
_OLD_PIP: Final = f"""exec {sys.executable} -m pip "$@" --dry-run --target "$SANDBOX/none" --python-version 3.10"""


def _old_python(machine: Machine) -> None:
    (machine.sandbox.folder / "pip").write_text(f"#!/bin/sh\n{_OLD_PIP}\n")


def _no_bundle(machine: Machine) -> None:
    machine.fleet.store.remove(machine.fleet.bundle)


def _other_bundle(machine: Machine) -> None:
    machine.fleet.store.write(machine.fleet.bundle, b"another")


_KMS: Final = (
    "User: arn:aws:sts::123456789012:assumed-role/nxpipe/demo-search/i-1 is not authorized to perform: kms:Decrypt on "
    "resource: arn:aws:kms:us-east-2:123456789012:key/1 because no identity-based policy allows the kms:Decrypt action"
)


def _no_key_for_the_bundle(machine: Machine) -> None:
    denied = f"fatal error: An error occurred (AccessDenied) when calling the GetObject operation: {_KMS}"
    machine.aws_says = lambda words: (1, denied) if words[:2] == ["s3", "cp"] else None


def _no_unit(machine: Machine) -> None:
    machine.unit_fails = True


# Faults of the store and of the artifact, which the agent reports.


def _serves(**changes: Any) -> Callable[[Machine], None]:
    return lambda machine: machine.fleet.serve(machine.fleet.publish(seed="b", **changes))


def _other_model(machine: Machine) -> None:
    _serves(model=ModelRef(id="acme/other", revision=None, task="fill-mask"))(machine)


def _too_wide(machine: Machine) -> None:
    (program,) = machine.fleet.published.manifest.executables
    _serves(executables=(program.model_copy(update={"tensor_parallel": 4}),))(machine)


def _unsigned(machine: Machine) -> None:
    machine.fleet.serve(machine.fleet.published, signed=False)


def _damaged(machine: Machine) -> None:
    (program,) = machine.fleet.published.manifest.executables
    path = blob_path(program.blob)
    machine.fleet.store.write(path, machine.fleet.stocked[path][:-1] + b"!")


def _s3_answers(code: str, message: str) -> Callable[[Machine], None]:
    return lambda machine: machine.answer_s3(403, code, message)


def _s3_unreachable(machine: Machine) -> None:
    machine.environment["AWS_ENDPOINT_URL_S3"] = "http://127.0.0.1:9"


def _full_disk(machine: Machine) -> None:
    """A file system of 16 KiB holds the agent's state, in a mount namespace of the agent."""
    state = f"{machine.root}/var/lib/nxpipe"
    mount = f'mount -t tmpfs -o size=16k none {state} && exec "$@"'
    machine.wrapper = ("unshare", "--map-root-user", "--mount", "sh", "-c", mount, "agent")
    if subprocess.run([*machine.wrapper[:3], "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine permits no mount namespace")


# Faults of the instance and of the server.


def _no_device(machine: Machine) -> None:
    (machine.root / "dev/neuron0").unlink()


def _other_type(machine: Machine) -> None:
    machine.metadata["instance-type"] = "trn1.2xlarge"


def _newer_file(machine: Machine) -> None:
    def change(machine: Machine) -> None:
        path = machine.root / "etc/nxpipe/nxpipe.toml"
        path.write_text(path.read_text() + "[from-the-future]\n")

    machine.before_agent.append(change)


def _no_server(machine: Machine) -> None:
    (machine.root / "usr/bin" / SERVER).unlink()


def _server(**behaviour: object) -> Callable[[Machine], None]:
    return lambda machine: machine.configure_server(**behaviour)


def _neff_refused(machine: Machine) -> None:
    said = "2026-Nov-23 04:00:00 ERROR NRT:nrt_load  failed to load NEFF: NRT_UNSUPPORTED_NEFF_VERSION"
    (machine.root / "usr/bin" / SERVER).write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")


def _port_in_use(machine: Machine) -> None:
    machine.hold(socket.create_server(("127.0.0.1", machine.fleet.port)))


FAULTS: Final = (
    Fault("no dpkg", _without("dpkg"), "this image has no dpkg on the PATH of root; use an image that has it", "boot"),
    Fault(
        "no venv",
        _program("python3", f"echo '{_NO_ENSUREPIP}'; exit 1"),
        "python3 of this image makes no virtual environment; use an image that has python3-venv",
        "boot",
    ),
    Fault("no bundle", _no_bundle, "; upload it with `nxpipe agent bundle`", "boot"),
    Fault("another bundle", _other_bundle, ".tar does not have the digest of its name; delete it", "boot"),
    Fault("no key for the bundle", _no_key_for_the_bundle, f"{_KMS}; correct the role of the instance", "boot"),
    Fault("another Python", _old_python, "pip cannot install the agent's bundle: ERROR: Package 'click'", "boot"),
    Fault(
        "a package that dpkg refuses",
        _program("dpkg", "echo 'dpkg: error: dependency problems' >&2; exit 1"),
        "dpkg cannot install the .deb files of the agent's bundle: dpkg: error: dependency problems; bundle packages",
        "boot",
    ),
    Fault(
        "no space for the bundle",
        _program("tar", f"echo '{_NO_SPACE}' >&2; exit 2"),
        f"the agent's bundle cannot be unpacked: {_NO_SPACE}; correct the cause",
        "boot",
    ),
    Fault("a unit that does not start", _no_unit, "systemd has not started nxpipe-agent.service; see its", "boot"),
    Fault("an empty channel", lambda machine: machine.fleet.clear(), "channel production"),
    Fault(
        "a channel of another model", _other_model, "which serves acme/other for inf2; promote an artifact of acme/bert"
    ),
    Fault("another backend", _serves(backend="emulator"), "has programs of backend emulator, which no Neuron device"),
    Fault("more cores than there are", _too_wide, "needs 4 logical cores, but a inf2.xlarge has 2; build it with"),
    Fault("no signature", _unsigned, "generation 1 of channel production is not signed"),
    Fault("a damaged program", _damaged, "; publish the artifact again to repair it"),
    Fault("no key for the store", _s3_answers("AccessDenied", _KMS), "is not authorized to perform: kms:Decrypt"),
    Fault(
        "a wrong clock",
        _s3_answers("RequestTimeTooSkewed", "The difference between the request time and the current time is large."),
        "RequestTimeTooSkewed",
    ),
    Fault("no way to S3", _s3_unreachable, "127.0.0.1:9"),
    Fault("a full disk", _full_disk, "No space left on device"),
    Fault("no device", _no_device, "has 0 Neuron devices, but a inf2.xlarge has 1; check the driver"),
    Fault("another instance type", _other_type, "has programs for inf2, but a trn1.2xlarge runs those for trn1; build"),
    Fault("a file of a newer version", _newer_file, "from-the-future"),
    Fault("no server", _no_server, "there is no program 'model-server' on this instance; install it in the AMI"),
    Fault("a server that exits", _server(ends=3), "the server exited with code 3 before it was ready; correct"),
    Fault("a server that is killed", _server(ends="SIGKILL"), "the server was ended by SIGKILL before it was ready"),
    Fault("a NEFF that does not load", _neff_refused, "; its last lines: 2026-Nov-23 04:00:00 ERROR NRT:nrt_load"),
    Fault("a wrong answer", _server(labels=["heart"]), "the response to the probe POST /predict has "),
    Fault("a port in use", _port_in_use, "before the server starts; stop it, or disable its unit in the AMI"),
)


def test_an_instance_without_a_fault_goes_into_service(machine: Machine) -> None:
    """So that each fault below is the only one."""
    machine.boot()
    assert machine.code == 0, machine.journal.path.read_text()
    (state,) = machine.fleet.group()["Instances"]
    assert (state["InstanceId"], state["LifecycleState"]) == (machine.instance, "InService")
    assert not [line for lines in machine.fleet.lines(machine.instance).values() for line in lines if _GIVEN_UP in line]


@pytest.mark.sample(9)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_ends_in_one_sentence_one_abandonment_and_one_alarm(machine: Machine, fault: Fault) -> None:
    _require_one_of_each(machine, fault)


@pytest.mark.slow
def test_a_server_that_is_never_healthy_ends_as_the_other_faults(machine: Machine) -> None:
    """After the shortest time that a fleet may set, one minute."""
    waits = "did not answer GET /health on 127.0.0.1"
    _require_one_of_each(machine, Fault("a server that is never healthy", _server(late=600), waits))


def _require_one_of_each(machine: Machine, fault: Fault) -> None:
    fault.inject(machine)
    begun, before = datetime.now(UTC), len(machine.fleet.messages)
    machine.boot()
    assert machine.code
    assert _is_terminated(machine.instance)
    lines = machine.fleet.lines(machine.instance)
    told = [(stream, line) for stream in lines for line in lines[stream] if _GIVEN_UP in line]
    assert len(told) == 1, (lines, machine.err)
    ((stream, sentence),) = told
    assert stream == fault.stream, sentence
    assert sentence.startswith("nxpipe: ")
    assert fault.sentence in sentence
    assert any(pattern.search(sentence) for pattern in _documented()), sentence
    others = [line for of_stream in lines.values() for line in of_stream if line != sentence]
    assert not [line for line in others if fault.sentence in line or line.startswith(("Error", "Traceback"))], others
    assert machine.fleet.activities(machine.instance) == ["Cancelled"]
    (message,) = machine.fleet.messages[before:]
    assert f"Instance: {machine.instance}. Log group: {LOG}" in message
    assert alarms_of(machine.fleet, begun) == [ALARM]


_GUIDE: Final = ROOT / "docs/guides/operating.md"
_OF_THE_CASE: Final = re.compile(r"\b(?:PROGRAM|NAME|MODEL|TARGET|N)\b|\\\.\\\.\\\.")


@cache
def _documented() -> list[re.Pattern[str]]:
    """What the guide's table of sentences has in its first column."""
    _, _, section = _GUIDE.read_text().partition("\n### When an instance does not start\n")
    rows = [
        line.split("|")[1] for line in section.partition("\nWithout an instance ")[0].splitlines() if line[:3] == "| `"
    ]
    assert rows
    return [
        re.compile(_OF_THE_CASE.sub(".+", re.escape(text))) for row in rows for text in re.findall("`([^`]+)`", row)
    ]


def _is_terminated(instance: str) -> bool:
    (reservation,) = client_of("ec2", REGION).describe_instances(InstanceIds=[instance])["Reservations"]
    return bool(reservation["Instances"][0]["State"]["Name"] == "terminated")


# Alarms. CloudWatch's evaluation is written here, since the local AWS has none: an alarm is in ALARM while enough of
# the last minutes exceed its threshold. A minute without data does not.

_MINUTES: Final = 180
_EVERY: Final = 4  # minutes from a failed launch to the next


def alarms_of(fleet: BootFleet, begun: datetime) -> list[str]:
    """The alarms that notify people within three hours in which each launch ends as the one since `begun`."""
    cloudwatch = client_of("cloudwatch", REGION)
    found = cloudwatch.describe_alarms(AlarmTypes=["MetricAlarm"])["MetricAlarms"]
    before = len(fleet.messages)
    group = fleet.group()
    in_service = sum(state["LifecycleState"] == "InService" for state in group["Instances"])
    levels = {"GroupDesiredCapacity": group["DesiredCapacity"], "GroupInServiceInstances": in_service}

    def at(metric: dict[str, Any], minute: int) -> float | None:
        if metric["Namespace"] == "AWS/AutoScaling":
            of_group = {"Name": "AutoScalingGroupName", "Value": GROUP} in metric["Dimensions"]
            return levels[metric["MetricName"]] if of_group else 0
        return counts[json.dumps(metric)] if minute % _EVERY == 0 else None

    counts = {json.dumps(metric): _count(metric, begun) for alarm in found for metric in _metrics(alarm).values()}
    for minute in range(_MINUTES):
        for alarm in found:
            state = "ALARM" if _exceeds(alarm, minute, at) else "OK"
            if state != alarm["StateValue"]:
                alarm["StateValue"] = state
                cloudwatch.set_alarm_state(AlarmName=alarm["AlarmName"], StateValue=state, StateReason="evaluated")
    told = [json.loads(message)["AlarmName"] for message in fleet.messages[before:]]
    for alarm in found:
        cloudwatch.set_alarm_state(AlarmName=alarm["AlarmName"], StateValue="OK", StateReason="the end of a test")
    return told


def _metrics(alarm: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The metrics that an alarm reads, by their names in its expression."""
    if "MetricName" in alarm:
        return {"m": {key: alarm[key] for key in ("Namespace", "MetricName", "Dimensions")}}
    return {entry["Id"]: entry["MetricStat"]["Metric"] for entry in alarm["Metrics"] if "MetricStat" in entry}


def _count(metric: dict[str, Any], begun: datetime) -> float | None:
    """What the local AWS has counted since then."""
    points = client_of("cloudwatch", REGION).get_metric_statistics(
        Namespace=metric["Namespace"],
        MetricName=metric["MetricName"],
        Dimensions=metric["Dimensions"],
        StartTime=begun - timedelta(seconds=1),
        EndTime=datetime.now(UTC) + timedelta(minutes=1),
        Period=60,
        Statistics=["Sum"],
    )["Datapoints"]
    return float(sum(point["Sum"] for point in points)) if points else None


def _exceeds(alarm: dict[str, Any], now: int, at: Callable[[dict[str, Any], int], float | None]) -> bool:
    metrics = _metrics(alarm)
    expression = next((entry["Expression"] for entry in alarm.get("Metrics", ()) if "Expression" in entry), "m")
    breaching = 0
    for minute in range(max(0, now - alarm["EvaluationPeriods"] + 1), now + 1):
        values = {name: at(metric, minute) for name, metric in metrics.items()}
        if None in values.values():  # a load balancer without requests has no metric
            continue
        breaching += float(eval(expression, {"__builtins__": {}}, values)) > alarm["Threshold"]
    return breaching >= int(alarm.get("DatapointsToAlarm", alarm["EvaluationPeriods"]))


# An image without the programs that reach AWS: the sentence is on the console, which EC2 keeps for an hour at least.
# The hook ends the instance when its time is over.


@pytest.mark.sample(2)
@pytest.mark.parametrize("program", ["aws", "curl"])
def test_an_instance_that_cannot_reach_aws_is_ended_by_its_hook_with_its_sentence_on_the_console(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    _without(program)(machine)
    begun, before = datetime.now(UTC), len(machine.fleet.messages)
    machine.boot()
    assert machine.code
    first, *others = machine.console.splitlines()
    sentence = f"this image has no {program} on the PATH of root; use an image that has it"
    assert first == f"nxpipe: this instance is given up: {sentence}"
    assert [line.partition(" demo-search-ready")[0] for line in others] == [
        "nxpipe: the log group /nxpipe/demo/search does not have these lines; see the console output of the instance",
        "nxpipe: hook",
    ]
    assert not _is_terminated(machine.instance)
    later = capacity.now() + timedelta(seconds=60 + 600 + 1)  # ready_within, and ten minutes
    monkeypatch.setattr(capacity, "now", lambda: later)
    machine.fleet.group()
    assert _is_terminated(machine.instance)
    assert machine.fleet.activities(machine.instance) == ["Cancelled"]
    (message,) = machine.fleet.messages[before:]
    assert f"Instance: {machine.instance}" in message
    assert alarms_of(machine.fleet, begun) == [ALARM]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("aws") is None, reason="there is no AWS CLI")
@pytest.mark.parametrize("fault", FAULTS[:3], ids=lambda fault: fault.name)
def test_the_real_aws_cli_delivers_and_abandons_as_its_stand_in(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, fault: Fault
) -> None:
    """It fetches the bundle, fails to fetch it, writes the events and completes the hook."""
    given = [f"{name}={shlex.quote(value)}" for name, value in machine.fleet.environment.items()]
    machine.sandbox.replace(
        "aws", " ".join(["exec env", f"HOME={Path.home()}", *given, str(shutil.which("aws")), '"$@"'])
    )
    _require_one_of_each(machine, fault)


# Launches that EC2 refuses: there is no instance, and so no log of one. The message on the topic is the sentence.


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            "VcpuLimitExceeded",
            "You have requested more vCPU capacity than your current vCPU limit of 0 allows for the instance bucket "
            "that the specified instance type belongs to.",
        ),
        (
            "InsufficientInstanceCapacity",
            "We currently do not have sufficient inf2.xlarge capacity in the Availability Zone you requested.",
        ),
        ("InvalidAMIID.NotFound", "The image id '[ami-0123456789abcdef0]' does not exist"),
    ],
)
def test_a_launch_that_ec2_refuses_is_one_message_with_its_reason_and_one_alarm(
    fleet: BootFleet, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
) -> None:
    def refuse(*_: object) -> None:
        raise EC2ClientError(code, reason)

    monkeypatch.setattr(scaling, "_run", refuse)
    begun, before = datetime.now(UTC), len(fleet.messages)
    try:
        fleet.scale(1)
        (message,) = fleet.messages[before:]
        assert f"Fleet search: group {GROUP} has not launched an instance. Reason: {reason}" in message
        assert alarms_of(fleet, begun) == [ALARM]
    finally:
        fleet.scale(0)
