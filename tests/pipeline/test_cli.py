import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click
import pytest

from nxpipe.pipeline.cli.main import COMMANDS, cli
from nxpipe.pipeline.cli.reference import walk
from tests.pipeline.command import NXPIPE, nxpipe
from tests.pipeline.in_process import InProcess
from tests.pipeline.in_process import nxpipe as here

__all__ = ["here"]


def every_command() -> Iterator[tuple[str, click.Command]]:
    for path, command in walk(cli, ("nxpipe",)):
        yield " ".join(path), command


EVERY = list(every_command())
LEAVES = [(name, command) for name, command in EVERY if not isinstance(command, click.Group)]


@pytest.mark.parametrize(("name", "command"), EVERY, ids=[name for name, _ in EVERY])
def test_every_command_has_help_with_an_example_of_itself(name: str, command: click.Command) -> None:
    assert command.help is not None
    assert "Example:" in command.help
    assert f"  {name}" in command.help


@pytest.mark.parametrize(("name", "command"), LEAVES, ids=[name for name, _ in LEAVES])
def test_every_command_takes_json_quiet_and_verbose(name: str, command: click.Command) -> None:
    spelled = {option for param in command.params for option in param.opts}
    assert {"--json", "--quiet", "--verbose"} <= spelled


@pytest.mark.parametrize(("name", "command"), LEAVES, ids=[name for name, _ in LEAVES])
def test_every_option_is_explained(name: str, command: click.Command) -> None:
    silent = [param.name for param in command.params if isinstance(param, click.Option) and not param.help]
    assert silent == []


def test_the_listing_says_what_each_commands_own_help_says() -> None:
    for name, (_, listed) in COMMANDS.items():
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        assert command.help is not None
        assert command.help.splitlines()[0].rstrip(".") == listed.rstrip("."), name


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_goes_to_stdout_and_ends_well(flag: str, tmp_path: Path) -> None:
    answer = nxpipe(flag, cwd=tmp_path)
    assert (answer.code, answer.err) == (0, "")
    assert all(name in answer.out for name in COMMANDS)


@pytest.mark.parametrize("words", [[], ["store"], ["config"]])
def test_a_group_alone_shows_its_help_on_stderr(words: list[str], tmp_path: Path) -> None:
    answer = nxpipe(*words, cwd=tmp_path)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("Usage: ")


def test_a_misspelt_command_is_answered_with_the_nearest_one(tmp_path: Path) -> None:
    answer = nxpipe("biuld", cwd=tmp_path)
    assert answer.code == 2
    assert answer.out == ""
    assert "'biuld'" in answer.err
    assert "did you mean 'nxpipe build'?" in answer.err


def test_a_misspelt_subcommand_is_answered_with_the_nearest_one(tmp_path: Path) -> None:
    answer = nxpipe("config", "chekc", cwd=tmp_path)
    assert answer.code == 2
    assert "did you mean 'check'?" in answer.err


def test_a_wrong_option_is_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    answer = nxpipe("version", "--colour", cwd=tmp_path)
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert "--colour" in answer.err


def test_flags_stand_before_or_after_the_command(tmp_path: Path) -> None:
    before, after = nxpipe("--json", "version", cwd=tmp_path), nxpipe("version", "--json", cwd=tmp_path)
    assert json.loads(before.out) == json.loads(after.out)


def test_version_names_the_backends_and_libraries(tmp_path: Path) -> None:
    versions = json.loads(nxpipe("version", "--json", cwd=tmp_path).out)
    assert {"nxpipe", "backend emulator", "backend neuronx", "torch", "transformers", "python"} <= set(versions)


def test_doctor_ends_in_its_own_code_when_something_is_missing(tmp_path: Path) -> None:
    answer = nxpipe("doctor", "--json", cwd=tmp_path, PATH="/nonexistent")
    states = {row["what"]: row["state"] for row in json.loads(answer.out)}
    assert states["node"] == "missing"
    assert states["torch 2.13.0"] == "ok"
    assert answer.code == 4
    assert "Missing: node" in answer.err


def test_quiet_leaves_stderr_empty(tmp_path: Path) -> None:
    assert nxpipe("store", "ls", "--quiet", cwd=tmp_path).err == ""


def test_no_colour_reaches_a_pipe_nor_a_terminal_that_asked_for_none(tmp_path: Path) -> None:
    assert "\033[" not in nxpipe("doctor", cwd=tmp_path).out
    assert "\033[" in on_a_terminal("doctor", cwd=tmp_path)
    assert "\033[" not in on_a_terminal("doctor", cwd=tmp_path, NO_COLOR="1")


def on_a_terminal(*arguments: str, cwd: Path, **environment: str) -> str:
    """Stdout and stderr of the command on a pseudo-terminal."""
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color", **environment}
    with subprocess.Popen([str(NXPIPE), *arguments], cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs, env=env):
        os.close(theirs)
        seen = b""
        while True:
            try:
                seen += os.read(ours, 65536)
            except OSError:  # the terminal's other side is closed: the command has ended
                break
    os.close(ours)
    return seen.decode()


def test_an_unforeseen_error_is_one_sentence_that_names_its_log(tmp_path: Path) -> None:
    answer = _crash(tmp_path)
    assert answer.returncode == 1
    assert "Traceback" not in answer.stderr
    assert answer.stderr.count("\n") == 1
    log = Path(answer.stderr.split(" in ")[-1].strip().rstrip("."))
    assert "ZeroDivisionError" in answer.stderr
    assert "Traceback" in log.read_text()


def test_verbose_shows_the_traceback_of_an_unforeseen_error(tmp_path: Path) -> None:
    assert "Traceback" in _crash(tmp_path, "--verbose").stderr


def _crash(cwd: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """The real entry point, with a bug planted in one command."""
    planted = (
        "import sys, nxpipe.pipeline.cli.doctor as d, nxpipe.pipeline.cli.main as c\n"
        "d.examine = lambda: 1 / 0\n"
        f"sys.argv = ['nxpipe', 'doctor', *{list(flags)}]\n"
        "import nxpipe.pipeline.cli.doctor as command; command.examine = d.examine\n"
        "c.main()\n"
    )
    python = NXPIPE.parent / "python"
    return subprocess.run([str(python), "-c", planted], cwd=cwd, capture_output=True, text=True, check=False)


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    command = f"{NXPIPE} config schema | head -c 1"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout == "{"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_the_command(shell: str, tmp_path: Path) -> None:
    answer = nxpipe("completion", shell, cwd=tmp_path)
    assert answer.code == 0
    assert "_NXPIPE_COMPLETE" in answer.out


def test_bash_completes_a_command_and_a_subcommand(tmp_path: Path) -> None:
    def complete(words: str, position: str) -> list[str]:
        answer = nxpipe(cwd=tmp_path, _NXPIPE_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=position)
        return [line.partition(",")[2] for line in answer.out.splitlines()]

    assert complete("nxpipe bu", "1") == ["build"]
    assert complete("nxpipe store sh", "2") == ["show"]


@pytest.mark.sample(16)
@pytest.mark.parametrize(
    ("number", "code", "after"),
    [
        (signal.SIGINT, 130, "read the configuration"),
        (signal.SIGTERM, 143, "compile"),
        (signal.SIGINT, 130, "emulate"),
    ],
)
def test_an_interrupted_build_ends_cleanly_and_leaves_nothing_half_written(
    number: signal.Signals,
    code: int,
    after: str,
    tmp_path: Path,
    bert: Path,
    here: InProcess,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    store = f"file://{tmp_path}/store"
    words = ["build", "--model-id", str(bert), "--weights", "random:0", "--buckets", "32", "--store", store]
    # A shell that started the tests in the background has left Ctrl-C ignored, which a child would inherit.
    heeding = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        [str(NXPIPE), *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=heeding
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if after in line:
                process.send_signal(number)
                break
        result = process.stderr.read()
    assert process.returncode == code, result
    assert "Traceback" not in result
    assert json.loads(here("store", "ls", "--json", "--store", store).out) == []
    assert [path for path in tmp_path.rglob("*") if path.is_file() and "tmp" in path.name] == []
    assert here(*words).code == 0
