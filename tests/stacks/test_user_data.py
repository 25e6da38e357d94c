"""The first boot of an instance, run in a sandbox."""

import shlex
import shutil
import subprocess
import sysconfig
from datetime import timedelta
from pathlib import Path

import pytest

from nxpipe.pipeline.config import Config, ServingFleet, load_config
from nxpipe.pipeline.util.files import user_state_folder
from nxpipe.stacks.user_data.scripts import (
    LARGEST,
    PROGRAMS,
    Agent,
    InstancePaths,
    NoPublicKey,
    Serving,
    TooLong,
    TrainingHost,
    fleet_file,
    systemd_word,
)
from tests.stacks.sandbox import Sandbox

pytestmark = pytest.mark.runs

CONFIG = """
[project]
name = "demo"
[[models]]
name = "bert"
id = "acme/bert"
task = "fill-mask"
target = "{type}"
weights = "random:0"
[[models]]
name = "other"
path = "models/other"
task = "fill-mask"
target = "inf2.xlarge"
[[fleets]]
kind = "serving"
name = "search"
model = "bert"
channel = "production"
instance_types = ["{type}"]
capacity = {{ kind = "{kind}" }}
size = {{ min = 1, max = 4 }}
ready_within = "10m"
command = {command}
zone = "us-east-2b"
"""
SIGNING = """
[signing]
require = ["production", "staging"]
[[signing.trusted]]
name = "release"
key = "file:release.pub"
[[signing.trusted]]
name = "trial"
key = "file:release.pub"
channels = ["staging"]
[[fleets]]
kind = "serving"
name = "trial"
model = "other"
channel = "staging"
instance_types = ["inf2.xlarge"]
capacity = { kind = "on-demand" }
size = { min = 1, max = 4 }
"""
SERVER = '["python3", "-m", "server", "--greeting", "it costs 5$, or \\"100%\\""]'


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path / "sandbox")


def configured(
    folder: Path, *, type_: str = "inf2.xlarge", kind: str = "on-demand", command: str = SERVER, more: str = ""
) -> Config:
    path = folder / "nxpipe.toml"
    path.write_text(CONFIG.format(type=type_, kind=kind, command=command) + more)
    return load_config(path, {})


def serving(sandbox: Sandbox, config: Config | None = None, *, digest: str | None = None) -> Serving:
    folder = sandbox.folder
    config = config or configured(folder)
    fleet = config.fleets[0]
    assert isinstance(fleet, ServingFleet)
    return Serving(
        config=config,
        fleet=fleet,
        folder=folder,
        region="us-east-2",
        store_url="s3://demo-artifacts/models",
        hook="demo-search-ready",
        log="/nxpipe/demo/search",
        agent=Agent("s3://demo-artifacts/agent/agent.tar", digest or sandbox.sha256),
        places=InstancePaths(str(sandbox.root)),
    )


def test_an_instance_is_set_up_and_its_unit_started(sandbox: Sandbox) -> None:
    ran = sandbox.run(serving(sandbox).script())
    assert ran.code == 0, ran.err
    (fetched,) = ran.called("aws")
    assert fetched.startswith("aws s3 cp --only-show-errors --region us-east-2 s3://demo-artifacts/agent/agent.tar ")
    (installed,) = ran.called("pip")
    assert "--no-index --no-deps" in installed
    assert [Path(part).name for part in installed.split()[-2:]] == [
        "click-8.4.0-py3-none-any.whl",
        "nxpipe-0.1.0-py3-none-any.whl",
    ]
    (system,) = ran.called("dpkg")
    assert Path(system.split()[-1]).name == "neuron-tools_2.4.1_amd64.deb"
    assert ran.calls[-3:] == [
        "systemctl enable --now --no-block nxpipe-logs.service",
        "systemctl enable --now --no-block nxpipe-watch.service",
        "systemctl enable --now nxpipe-agent.service",
    ]
    assert not list(sandbox.folder.glob("tmp.*"))


def test_another_unit_watches_the_devices(sandbox: Sandbox) -> None:
    sandbox.run(serving(sandbox).script())
    unit = sandbox.text("etc/systemd/system/nxpipe-watch.service")
    assert f"ExecStart={sandbox.root}/opt/nxpipe/agent/bin/nxpipe agent watch --fleet search\n" in unit
    assert "NXPIPE_LOG=/nxpipe/demo/search\n" in sandbox.text("etc/nxpipe/agent.env")


def test_the_unit_runs_the_agent_with_the_server_behind_it_word_for_word(sandbox: Sandbox) -> None:
    sandbox.run(serving(sandbox).script())
    unit = sandbox.text("etc/systemd/system/nxpipe-agent.service")
    (command,) = (line.removeprefix("ExecStart=") for line in unit.splitlines() if line.startswith("ExecStart="))
    words = [part.replace("%%", "%").replace("$$", "$") for part in shlex.split(command)]
    agent = [f"{sandbox.root}/opt/nxpipe/agent/bin/nxpipe", "agent", "run", "--fleet", "search"]
    server = ["python3", "-m", "server", "--greeting", 'it costs 5$, or "100%"']
    assert words == [*agent, "--to", f"{sandbox.root}/var/lib/nxpipe/artifact", "--", *server]
    assert "User=nxpipe\n" in unit


def test_what_the_agent_has_seen_of_a_channel_is_in_the_state_that_systemd_keeps(sandbox: Sandbox) -> None:
    """Its account has no home of its own: a generation that was seen binds after a restart as well."""
    assert sandbox.run(serving(sandbox).script()).code == 0
    lines = sandbox.text("etc/systemd/system/nxpipe-agent.service").splitlines()
    (folder,) = (line.removeprefix("StateDirectory=") for line in lines if line.startswith("StateDirectory="))
    (state,) = (line.rpartition("=")[2] for line in lines if line.startswith("Environment=XDG_STATE_HOME="))
    assert Path(state, folder) == Path("%S", user_state_folder().name)


def test_the_agent_reads_the_same_fleet_from_the_instances_own_file(sandbox: Sandbox) -> None:
    assert sandbox.run(serving(sandbox).script()).code == 0
    there = load_config(sandbox.root / "etc/nxpipe/nxpipe.toml", {})
    wanted = configured(sandbox.folder)
    assert there.models == wanted.models[:1]
    assert there.fleets[0].model_dump(exclude={"command"}) == wanted.fleets[0].model_dump(exclude={"command"})
    assert (there.store.url, there.project) == ("s3://demo-artifacts/models", wanted.project)
    assert there.store.cache == f"{sandbox.root}/var/lib/nxpipe/cache"


_SHADOW = "[rollout.shadow]\npercent = 5.0\n"
_UPDATES = 'updates = { policy = "swap", interval = "10s" }\n'


def test_the_agent_knows_of_a_shadow_phase_and_of_updates(sandbox: Sandbox) -> None:
    for more in (_SHADOW, _UPDATES):
        configured(sandbox.folder)
        own = sandbox.folder / "nxpipe.toml"
        own.write_text(own.read_text().replace("{ min = 1, max = 4 }", "{ min = 2, max = 4 }") + more)
        wanted = load_config(own, {})
        (fleet,) = wanted.fleets
        assert isinstance(fleet, ServingFleet)
        path = sandbox.folder / "there.toml"
        path.write_text(fleet_file(wanted, fleet, {"url": "s3://demo-artifacts/models"}, "/keys"))
        there = load_config(path, {})
        assert there.rollout.shadow == wanted.rollout.shadow
        assert there.fleets[0].model_dump(exclude={"command"}) == fleet.model_dump(exclude={"command"})
        assert ("updates" in path.read_text()) == (more == _UPDATES), "an agent of an older bundle has no such key"


@pytest.mark.parametrize(
    "capacity",
    [
        '{ kind = "spot", on_demand_base = 2 }',
        '{ kind = "on-demand", warm_pool = { min = 1, reuse = false } }',
        '{ kind = "reservation", id = "cr-0a1b2c3d4e5f60718" }',
    ],
)
def test_however_the_fleet_is_bought_its_file_is_read_back(sandbox: Sandbox, capacity: str) -> None:
    path = sandbox.folder / "nxpipe.toml"
    path.write_text(CONFIG.format(type="inf2.xlarge", kind="X", command=SERVER).replace('{ kind = "X" }', capacity))
    config = load_config(path, {})
    sandbox.run(serving(sandbox, config).script())
    there = load_config(sandbox.root / "etc/nxpipe/nxpipe.toml", {})
    assert there.fleets[0].capacity == config.fleets[0].capacity


def test_a_capacity_blocks_dates_are_read_back(sandbox: Sandbox) -> None:
    block = (
        '{ kind = "capacity-block", id = "cr-0a1b2c3d4e5f60718", '
        "start = 2098-12-01T11:30:00Z, end = 2098-12-08T11:30:00Z }"
    )
    path = sandbox.folder / "nxpipe.toml"
    path.write_text(CONFIG.format(type="trn1.32xlarge", kind="X", command=SERVER).replace('{ kind = "X" }', block))
    config = load_config(path, {})
    sandbox.add_disks()
    sandbox.run(serving(sandbox, config).script())
    assert load_config(sandbox.root / "etc/nxpipe/nxpipe.toml", {}).fleets[0].capacity == config.fleets[0].capacity


def test_keys_come_along_where_the_channel_asks_for_signatures(sandbox: Sandbox) -> None:
    (sandbox.folder / "release.pub").write_text("-----BEGIN PUBLIC KEY-----\n'quoted' $HOME\n")
    assert sandbox.run(serving(sandbox, configured(sandbox.folder, more=SIGNING)).script()).code == 0
    there = load_config(sandbox.root / "etc/nxpipe/nxpipe.toml", {})
    assert there.signing.require == ("production",)
    (key,) = there.signing.trusted
    assert Path(key.key.removeprefix("file:")).read_text() == "-----BEGIN PUBLIC KEY-----\n'quoted' $HOME\n"


def test_a_public_key_that_is_not_there_is_told_before_anything_is_deployed(sandbox: Sandbox) -> None:
    with pytest.raises(NoPublicKey, match=r"channel production requires signatures, but .*release\.pub cannot be read"):
        serving(sandbox, configured(sandbox.folder, more=SIGNING)).script()


def test_nothing_is_mounted_and_no_cache_is_set(sandbox: Sandbox) -> None:
    """The artifact has every program: an instance that compiles raises an alarm."""
    ran = sandbox.run(serving(sandbox).script())
    assert ran.code == 0, ran.err
    assert not ran.called("mount")
    assert "NEURON_COMPILE_CACHE_URL" not in sandbox.text("etc/nxpipe/agent.env")
    assert "RequiresMountsFor" not in sandbox.text("etc/systemd/system/nxpipe-agent.service")


def test_a_fleets_compile_cache_is_the_url_that_awss_libraries_read(sandbox: Sandbox) -> None:
    config = configured(sandbox.folder, more='compile_cache = "s3://my-caches/neuron"\n')
    assert sandbox.run(serving(sandbox, config).script()).code == 0
    assert "NEURON_COMPILE_CACHE_URL=s3://my-caches/neuron\n" in sandbox.text("etc/nxpipe/agent.env")
    assert "compile_cache =" not in sandbox.text(
        "etc/nxpipe/nxpipe.toml"
    )  # the agent of an older bundle has no such key


ABANDONED = (
    "aws autoscaling complete-lifecycle-action --region us-east-2 --lifecycle-action-result ABANDON "
    "--lifecycle-hook-name demo-search-ready --instance-id i-1 --auto-scaling-group-name blue"
)


def test_a_bundle_with_another_digest_is_not_unpacked_and_the_instance_given_up(sandbox: Sandbox) -> None:
    ran = sandbox.run(serving(sandbox, digest="0" * 64).script())
    assert ran.code != 0
    assert not ran.called("python3")
    assert not ran.called("pip")
    assert ran.calls[-1] == ABANDONED


def test_packages_of_the_system_wait_for_dpkgs_lock(sandbox: Sandbox) -> None:
    """unattended-upgrades runs during the first boot too."""
    ran = sandbox.run(serving(sandbox).script(), UNLOCKED_AT="3")
    assert ran.code == 0, ran.err
    assert len(ran.called("dpkg")) == 3
    assert ran.called("sleep") == ["sleep 10"] * 2


def test_a_lock_that_is_never_released_gives_the_instance_up_in_one_sentence(sandbox: Sandbox) -> None:
    ran = sandbox.run(serving(sandbox).script(), UNLOCKED_AT="1000")
    assert ran.code != 0
    assert len(ran.called("dpkg")) == 30
    assert "another process holds dpkg's lock for five minutes; disable unattended-upgrades" in ran.console
    assert ran.calls[-1] == ABANDONED


def test_a_package_that_dpkg_refuses_is_not_tried_again(sandbox: Sandbox) -> None:
    ran = sandbox.run(serving(sandbox).script(), DPKG="dependency problems")
    assert len(ran.called("dpkg")) == 1
    assert "dpkg cannot install the .deb files of the agent's bundle: dpkg: error: dependency problems" in ran.console
    assert ran.calls[-1] == ABANDONED


def test_a_python_without_virtual_environments_is_one_sentence(sandbox: Sandbox) -> None:
    ran = sandbox.run(serving(sandbox).script(), NO_VENV="1")
    assert "python3 of this image makes no virtual environment; use an image that has python3-venv" in ran.console
    assert ran.calls[-1] == ABANDONED


@pytest.mark.sample(4)
@pytest.mark.parametrize("program", [name for name in PROGRAMS if name not in ("aws", "curl")])
def test_a_program_that_the_image_lacks_is_named_before_anything_is_done(sandbox: Sandbox, program: str) -> None:
    (sandbox.folder / "bin" / program).unlink()
    ran = sandbox.run(serving(sandbox).script())
    assert ran.code != 0
    sentence = f"this instance is given up: this image has no {program} on the PATH of root; use an image that has it"
    assert f"nxpipe: {sentence}\n" in ran.console
    assert ran.steps == [ABANDONED]
    assert not (sandbox.root / "etc/nxpipe").exists()


def test_a_program_outside_of_the_list_is_not_found_by_any_test_of_this_file(sandbox: Sandbox) -> None:
    """So a script cannot come to use one that the first boot does not check."""
    assert "grep" not in PROGRAMS
    ran = sandbox.run(serving(sandbox).script() + "grep nxpipe /etc/passwd\n")
    assert "grep: command not found" in ran.err
    assert ran.calls[-1] == ABANDONED


@pytest.mark.parametrize("program", ["aws", "curl"])
def test_an_instance_that_cannot_abandon_itself_says_what_happens(sandbox: Sandbox, program: str) -> None:
    (sandbox.folder / "bin" / program).unlink()
    ran = sandbox.run(serving(sandbox).script(), **({"AWS": "255"} if program == "curl" else {}))
    assert ran.code != 0
    assert f"this image has no {program} on the PATH of root" in ran.console
    expected = "hook demo-search-ready is not completed here; it ends the instance when its time is over"
    assert ran.console.endswith(f"nxpipe: {expected}\n")
    assert "systemctl" not in "".join(ran.calls)


def test_a_unit_that_does_not_start_gives_the_instance_up(sandbox: Sandbox) -> None:
    ran = sandbox.run(serving(sandbox).script(), SYSTEMCTL="3")
    assert ran.code == 3
    assert ran.calls[-1] == ABANDONED


def test_the_end_of_the_output_is_in_the_log_group_before_the_instance_is_abandoned(sandbox: Sandbox) -> None:
    fault = 'a "quoted" C:\\path,\tand ünicode'
    ran = sandbox.run(serving(sandbox).script(), DPKG=fault)
    group = "--log-group-name /nxpipe/demo/search --log-stream-name i-1/boot"
    created, delivered, abandoned = (call for call in ran.calls if call.startswith(("aws logs", "aws autoscaling")))
    assert f"create-log-stream --region us-east-2 --cli-connect-timeout 5 {group}" in created
    assert f"put-log-events --region us-east-2 --cli-connect-timeout 5 {group} --log-events file:///" in delivered
    assert abandoned == ABANDONED
    assert ran.delivered == [
        "nxpipe: this instance is given up: dpkg cannot install the .deb files of the agent's bundle: dpkg: error: "
        'a "quoted" C:\\path,?and ??nicode; bundle packages for this image'
    ]
    assert ran.console.startswith("nxpipe: this instance is given up: dpkg cannot install")


def test_an_agent_that_has_written_why_it_gives_up_is_not_reported_again(sandbox: Sandbox) -> None:
    mark = sandbox.root / "run/nxpipe/given-up"
    mark.parent.mkdir(parents=True)
    mark.touch()
    sandbox.replace("systemctl", '[ "$*" != "enable --now nxpipe-agent.service" ] || exit 3')
    ran = sandbox.run(serving(sandbox).script())
    assert (ran.code, ran.delivered, ran.console, ABANDONED in ran.calls) == (3, [], "", False)


def test_systemd_does_not_start_the_agent_of_an_instance_again_that_is_given_up(sandbox: Sandbox) -> None:
    sandbox.run(serving(sandbox).script())
    unit, settings = sandbox.text("etc/systemd/system/nxpipe-agent.service"), sandbox.text("etc/nxpipe/agent.env")
    mark = f"{sandbox.root}/run/nxpipe/given-up"
    assert f"\nConditionPathExists=!{mark}\n" in unit.partition("[Service]")[0]
    assert "\nRuntimeDirectory=nxpipe\nRuntimeDirectoryPreserve=yes\n" in unit
    assert f"NXPIPE_GIVEN_UP={mark}\n" in settings


def test_the_log_group_has_what_a_program_writes_and_not_only_the_reports(sandbox: Sandbox) -> None:
    ran = sandbox.run(serving(sandbox).script() + "ls /absent-folder\n")
    assert any("ls: command not found" in line for line in ran.delivered), ran.delivered


def test_only_the_last_200_lines_are_delivered(sandbox: Sandbox) -> None:
    ran = sandbox.run(serving(sandbox).script() + "for ((n = 0; n < 500; n++)); do echo line $n >&2; done\nfalse\n")
    assert len(ran.delivered) == 200
    assert ran.delivered[-2] == "line 499"
    assert ran.calls[-1] == ABANDONED


def test_a_stream_that_exists_takes_the_lines_too(sandbox: Sandbox) -> None:
    ran = sandbox.run(serving(sandbox, digest="0" * 64).script(), NO_STREAM="254")
    assert ran.delivered[-1].startswith("nxpipe: this instance is given up: ")


def test_a_log_group_that_does_not_answer_delays_the_abandonment_for_a_limited_time(sandbox: Sandbox) -> None:
    program = sandbox.folder / "bin/timeout"
    real = program.resolve()
    program.unlink()
    program.write_text(f'#!/bin/sh\n[ "$1" = 20 ] || exit 9\nshift\nexec {real} 0.2 "$@"\n')
    program.chmod(0o755)
    ran = sandbox.run(serving(sandbox, digest="0" * 64).script(), LOGS_TAKE="60")
    assert ran.delivered == []
    assert "the log group /nxpipe/demo/search does not have these lines; see the console output" in ran.console
    assert ran.calls[-1] == ABANDONED


def test_the_forwarder_follows_every_unit_and_is_stopped_after_them(sandbox: Sandbox) -> None:
    config = configured(sandbox.folder, type_="trn1.32xlarge", more='log_units = ["my-server.service"]\n')
    sandbox.add_disks()
    assert sandbox.run(serving(sandbox, config).script()).code == 0
    unit = sandbox.text("etc/systemd/system/nxpipe-logs.service")
    before = "nxpipe-agent.service nxpipe-watch.service my-server.service nxpipe-instance-store.service"
    followed = " ".join(f"--unit={name}" for name in (*before.split(), "cloud-final.service"))
    assert f"\nBefore={before}\n" in unit
    assert f"\nExecStart={sandbox.root}/opt/nxpipe/agent/bin/nxpipe agent forward {followed}\n" in unit
    assert "\nSupplementaryGroups=systemd-journal\n" in unit
    settings = sandbox.text("etc/nxpipe/agent.env")
    assert f"NXPIPE_FORWARDED={sandbox.root}/var/lib/nxpipe-logs/position.json\n" in settings
    assert "log_units" not in sandbox.text("etc/nxpipe/nxpipe.toml")  # the agent of an older bundle has no such key


STATE, STORE = "var/lib/nxpipe", "opt/nxpipe/instance_store.sh"


def prepared(sandbox: Sandbox, *disks: str) -> Sandbox:
    """After the first boot of a type with an instance store, whose unit has not run yet."""
    sandbox.add_disks(*disks)
    ran = sandbox.run(serving(sandbox, configured(sandbox.folder, type_="trn1.32xlarge")).script())
    assert ran.code == 0, ran.err
    return sandbox


def test_the_agent_starts_after_the_unit_of_the_instance_store(sandbox: Sandbox) -> None:
    prepared(sandbox)
    agent = sandbox.text("etc/systemd/system/nxpipe-agent.service")
    for relation in ("Wants", "After"):
        assert f"{relation}=network-online.target nxpipe-instance-store.service\n" in agent
    unit = sandbox.text("etc/systemd/system/nxpipe-instance-store.service")
    assert f"ExecStart=/usr/bin/env bash {sandbox.root}/{STORE}\n" in unit
    assert shellcheck(sandbox.text(STORE), sandbox.folder) == (0, "")


def test_the_first_blank_disk_is_formatted_and_holds_the_state(sandbox: Sandbox) -> None:
    prepared(sandbox, "1-lvm", "2-blank", "2-blank-part1", "3-blank")
    ran = sandbox.run_file(sandbox.root / STORE)
    assert ran.code == 0, ran.err
    disk = f"{sandbox.root}/dev/disk/by-id/nvme-Amazon_EC2_NVMe_Instance_Storage_AWS2-blank"
    assert ran.called("mkfs.ext4") == [f"mkfs.ext4 -q -L nxpipe -E nodiscard {disk}"]
    assert ran.called("mount") == [f"mount -o noatime {disk} {sandbox.root}/{STATE}"]
    again = sandbox.run_file(sandbox.root / STORE)
    assert len(again.called("mount")) == 1  # it is mounted already


def test_after_a_reboot_the_disk_is_mounted_as_it_is(sandbox: Sandbox) -> None:
    prepared(sandbox, "1-ours")
    ran = sandbox.run_file(sandbox.root / STORE)
    assert (len(ran.called("mount")), ran.called("mkfs.ext4")) == (1, [])


def test_disks_that_the_image_has_joined_are_used_where_it_mounts_them(sandbox: Sandbox) -> None:
    prepared(sandbox, "1-lvm", "2-lvm")
    shared = sandbox.root / "opt/dlami/nvme"
    shared.mkdir(parents=True)
    (shared / ".mounted").touch()
    ran = sandbox.run_file(sandbox.root / STORE)
    assert ran.called("mount") == [f"mount --bind {shared}/nxpipe {sandbox.root}/{STATE}"]
    assert (shared / "nxpipe").is_dir()


def test_disks_with_other_data_are_left_alone_and_the_root_volume_serves(sandbox: Sandbox) -> None:
    prepared(sandbox, "1-lvm")
    ran = sandbox.run_file(sandbox.root / STORE)
    assert (ran.code, ran.called("mount"), ran.called("mkfs.ext4")) == (0, [], [])
    assert "no disk of the instance store is free" in ran.err


@pytest.mark.parametrize(
    ("type_", "capacity"),
    [
        ("inf2.xlarge", '{ kind = "on-demand" }'),  # it has no instance store
        ("trn1.32xlarge", '{ kind = "on-demand", warm_pool = { min = 1 } }'),  # a stop would empty it
    ],
)
def test_without_an_instance_store_that_lasts_the_root_volume_holds_the_state(
    sandbox: Sandbox, type_: str, capacity: str
) -> None:
    path = sandbox.folder / "nxpipe.toml"
    path.write_text(CONFIG.format(type=type_, kind="X", command=SERVER).replace('{ kind = "X" }', capacity))
    ran = sandbox.run(serving(sandbox, load_config(path, {})).script())
    assert ran.code == 0, ran.err
    assert not (sandbox.root / STORE).exists()
    assert "instance-store" not in sandbox.text("etc/systemd/system/nxpipe-agent.service")


@pytest.mark.parametrize(
    ("type_", "grouping"), [("trn2.48xlarge", "NEURON_LOGICAL_NC_CONFIG=2\n"), ("inf2.xlarge", None)]
)
def test_cores_are_grouped_as_the_programs_were_compiled(sandbox: Sandbox, type_: str, grouping: str | None) -> None:
    sandbox.add_disks()
    ran = sandbox.run(serving(sandbox, configured(sandbox.folder, type_=type_)).script())
    assert ran.code == 0, ran.err
    path = sandbox.root / "opt/aws/neuron/logical_nc_config"
    assert (path.read_text() if path.exists() else None) == grouping


def test_a_fleet_without_a_server_of_ours_has_a_unit_that_ends(sandbox: Sandbox) -> None:
    sandbox.run(serving(sandbox, configured(sandbox.folder, command="[]")).script())
    unit = sandbox.text("etc/systemd/system/nxpipe-agent.service")
    assert "Type=oneshot\nRemainAfterExit=yes\n" in unit
    assert "Restart=on-failure\n" in unit
    assert " -- " not in unit


def test_systemd_waits_for_the_agent_as_long_as_the_fleet_does_and_starts_it_five_times_an_hour_at_most(
    sandbox: Sandbox,
) -> None:
    config = configured(sandbox.folder)
    config = config.model_copy(
        update={"fleets": (config.fleets[0].model_copy(update={"draining": timedelta(minutes=2)}),)}
    )
    sandbox.run(serving(sandbox, config).script())
    lines = sandbox.text("etc/systemd/system/nxpipe-agent.service").splitlines()
    sections = "\n".join(lines).split("\n\n")
    assert "StartLimitIntervalSec=1h\nStartLimitBurst=5" in sections[0]
    assert {
        *("Type=notify", "NotifyAccess=main", "KillMode=mixed", "SuccessExitStatus=143", "Restart=always"),
        *("TimeoutStartSec=960", "TimeoutStopSec=150"),  # ready_within and draining, and a margin
    } <= set(sections[1].splitlines())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
@pytest.mark.parametrize("command", [SERVER, "[]"])
def test_systemd_finds_no_fault_in_the_agents_unit(sandbox: Sandbox, command: str) -> None:
    sandbox.run(serving(sandbox, configured(sandbox.folder, command=command)).script())
    path = sandbox.root / "etc/systemd/system/nxpipe-agent.service"
    program = sandbox.root / "opt/nxpipe/agent/bin/nxpipe"
    program.touch(mode=0o755)
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if "nxpipe-agent" in line] == []
    path.write_text(path.read_text().replace("KillMode=", "KilMode=").replace("RemainAfterExit=", "RemainAfter="))
    done = subprocess.run(["systemd-analyze", "verify", str(path)], capture_output=True, text=True, check=False)
    assert "Unknown key" in done.stderr  # it would find one


def test_a_probe_reaches_the_instance_with_the_command_that_it_requires(sandbox: Sandbox) -> None:
    body = """'{"text": "\\u00e9 \\"quoted\\""}'"""
    probe = f'{{ path = "/predict", body = {body}, expect = "[1.5]", tolerance = 0.01, timeout = "5s" }}'
    config = configured(sandbox.folder, more=f"probe = {probe}\n")
    assert sandbox.run(serving(sandbox, config).script()).code == 0
    assert load_config(sandbox.root / "etc/nxpipe/nxpipe.toml", {}).fleets == config.fleets


def test_a_fleet_without_a_probe_has_the_file_of_an_older_bundle(sandbox: Sandbox) -> None:
    sandbox.run(serving(sandbox).script())
    keys = {line.partition(" = ")[0] for line in sandbox.text("etc/nxpipe/nxpipe.toml").splitlines()}
    assert "ready_within" in keys
    assert keys.isdisjoint({"probe", "command"})


@pytest.mark.parametrize(
    ("plain", "escaped"),
    [("a-b=c", "a-b=c"), ("a b", '"a b"'), ("5%", "5%%"), ("$x", '"$$x"'), ('"', '"\\""'), ("", '""')],
)
def test_a_word_means_to_systemd_what_it_says(plain: str, escaped: str) -> None:
    assert systemd_word(plain) == escaped


def test_what_ec2_would_not_take_is_refused(sandbox: Sandbox) -> None:
    long = str([f"word-{number}-{'x' * 1000}" for number in range(20)]).replace("'", '"')
    with pytest.raises(TooLong, match=rf"EC2 allows {LARGEST}"):
        serving(sandbox, configured(sandbox.folder, command=long)).script()


def shellcheck(text: str, folder: Path) -> tuple[int, str]:
    path = folder / "checked.sh"
    path.write_text(text)
    program = Path(sysconfig.get_path("scripts"), "shellcheck")
    done = subprocess.run([str(program), "--shell=bash", str(path)], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def test_shellcheck_finds_nothing_to_say(sandbox: Sandbox) -> None:
    assert shellcheck(serving(sandbox).script(), sandbox.folder) == (0, "")


def test_shellcheck_would_find_a_word_without_quotes(sandbox: Sandbox) -> None:
    text = serving(sandbox).script().replace('rm -r "$bundle"', "rm -r $bundle")
    code, found = shellcheck(text, sandbox.folder)
    assert code != 0
    assert "SC2086" in found


def training_host(sandbox: Sandbox, *, cards: int = 8, sha256: str | None = None) -> TrainingHost:
    sandbox.add_training_host()
    host = TrainingHost("us-east-2", "/nxpipe/demo/tune", InstancePaths(str(sandbox.root)))
    return host.with_efa("s3://demo-artifacts/models/efa/x.tar.gz", sha256 or sandbox.sha256, cards=cards)


NOT_JOINED = "systemctl mask --now --runtime ecs.service"


def test_a_training_host_installs_the_efa_driver_from_the_store_and_then_mounts_the_file_system(
    sandbox: Sandbox,
) -> None:
    scratch = str(sandbox.root / "scratch")
    host = training_host(sandbox).with_scratch(scratch, "fs-1.fsx.us-east-2.amazonaws.com", "abcdefgh")
    ran = sandbox.run(host.script())
    assert ran.code == 0, ran.err
    (fetched,) = ran.called("aws")
    assert "--region us-east-2 s3://demo-artifacts/models/efa/x.tar.gz" in fetched
    assert ran.called("efa_installer.sh") == ["efa_installer.sh --minimal --yes"]
    (mounted,) = ran.called("mount")
    assert mounted.endswith(f"fs-1.fsx.us-east-2.amazonaws.com@tcp:/abcdefgh {scratch}")
    assert ran.called("systemctl") == []


def test_an_image_that_has_the_efa_driver_gets_no_other(sandbox: Sandbox) -> None:
    host = training_host(sandbox)
    devices = sandbox.root / "dev/infiniband"
    devices.mkdir()
    for card in range(8):
        (devices / f"uverbs{card}").touch()
    ran = sandbox.run(host.script())
    assert (ran.code, ran.calls) == (0, [])


def test_an_efa_installer_of_another_digest_is_not_run_and_the_host_does_not_join_the_cluster(
    sandbox: Sandbox,
) -> None:
    ran = sandbox.run(training_host(sandbox, sha256="0" * 64).script())
    assert ran.code != 0
    assert ran.called("efa_installer.sh") == []
    assert NOT_JOINED in ran.calls
    assert "does not join the cluster" in ran.console


def test_a_store_without_the_efa_installer_is_one_sentence_on_the_console(sandbox: Sandbox) -> None:
    host = training_host(sandbox)
    sandbox.bundle.unlink()
    ran = sandbox.run(host.script())
    assert ran.code != 0
    assert "the store has no s3://demo-artifacts/models/efa/x.tar.gz" in ran.console
    assert NOT_JOINED in ran.calls


def test_a_host_with_fewer_efa_devices_than_its_type_does_not_join_the_cluster(sandbox: Sandbox) -> None:
    ran = sandbox.run(training_host(sandbox).script(), CARDS="7")
    assert ran.code != 0
    assert "this host has 7 EFA devices, and its type 8" in ran.console
    assert NOT_JOINED in ran.calls


def test_a_file_system_that_cannot_be_mounted_keeps_the_host_out_of_the_cluster(sandbox: Sandbox) -> None:
    host = training_host(sandbox).with_scratch(str(sandbox.root / "scratch"), "fs-1", "abcdefgh")
    ran = sandbox.run(host.script(), DNF="1")
    assert ran.code != 0
    assert ran.called("mount") == []
    assert NOT_JOINED in ran.calls


def test_a_training_host_that_fails_leaves_its_output_in_the_fleets_log_group(sandbox: Sandbox) -> None:
    """Also before the AWS CLI is installed, which the image does not have."""
    host = TrainingHost("us-east-2", "/nxpipe/demo/tune", InstancePaths(str(sandbox.root)))
    sandbox.add_training_host()
    aws = sandbox.folder / "bin/aws"
    absent = aws.rename(sandbox.folder / "aws")
    (sandbox.folder / "bin/dnf").write_text(
        f'#!/bin/sh\necho "dnf $*" >> "$SANDBOX/calls"\n[ "$4" = awscli-2 ] && /bin/cp {absent} {aws}\n'
    )
    ran = sandbox.run(host.with_scratch(str(sandbox.root / "scratch"), "fs-1", "abcdefgh").script())
    assert ran.code != 0
    assert ran.calls.index(NOT_JOINED) < ran.calls.index("dnf install --assumeyes --quiet awscli-2")
    assert ran.delivered[-1].startswith("nxpipe: this host cannot be set up and does not join the cluster: line ")
    (delivered,) = (call for call in ran.called("aws") if "put-log-events" in call)
    assert "--log-group-name /nxpipe/demo/tune --log-stream-name i-1/boot" in delivered


def test_shellcheck_finds_nothing_in_the_script_of_a_training_host(sandbox: Sandbox) -> None:
    host = training_host(sandbox).with_scratch(str(sandbox.root / "scratch"), "fs-1", "abcdefgh")
    assert shellcheck(host.script(), sandbox.folder) == (0, "")


def host_with_disks(sandbox: Sandbox, *disks: str) -> TrainingHost:
    """Each disk has the second name that systemd gives it."""
    sandbox.add_training_host()
    names = sandbox.root / "dev/disk/by-id"
    names.mkdir(parents=True)
    for disk in disks:
        (sandbox.root / "dev" / disk).touch()
        for end in ("", "_1"):
            (names / f"nvme-Amazon_EC2_NVMe_Instance_Storage_AWS-{disk}{end}").symlink_to(f"../../{disk}")
    host = TrainingHost("us-east-2", "/nxpipe/demo/tune", InstancePaths(str(sandbox.root)))
    return host.with_instance_store(str(sandbox.root / "local"))


def test_the_disks_of_a_training_host_are_one_file_system(sandbox: Sandbox) -> None:
    ran = sandbox.run(host_with_disks(sandbox, "nvme1n1", "nvme2n1").script())
    assert ran.code == 0, ran.err
    root, array = sandbox.root, f"{sandbox.root}/dev/md/nxpipe"
    assert ran.calls == [
        "dnf install --assumeyes --quiet mdadm",
        f"mdadm --create {array} --run --level=0 --raid-devices=2 {root}/dev/nvme1n1 {root}/dev/nvme2n1",
        f"mkfs.ext4 -q -E nodiscard {array}",
        f"mount -o noatime {array} {root}/local",
    ]
    assert (root / "local").stat().st_mode & 0o7777 == 0o1777


def test_a_single_disk_needs_no_array(sandbox: Sandbox) -> None:
    ran = sandbox.run(host_with_disks(sandbox, "nvme1n1").script())
    assert (ran.code, [call.split()[0] for call in ran.calls]) == (0, ["mkfs.ext4", "mount"])


def test_a_host_without_the_disks_of_its_type_does_not_join_the_cluster(sandbox: Sandbox) -> None:
    ran = sandbox.run(host_with_disks(sandbox).script())
    assert (ran.code, ran.steps) == (1, [NOT_JOINED])
    assert "this host has no disk of the instance store" in ran.console
