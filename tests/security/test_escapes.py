"""Text from models, files and users reaches terminals, logs, HTML and GitHub as text only."""

import ast
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Final

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.pipeline.cli.main import cli
from nxpipe.pipeline.fleet.monitor.source import MonitorSettings
from nxpipe.pipeline.util import console, exit_codes
from nxpipe.pipeline.util import text as escape
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.text import table
from tests.conftest import ROOT
from tests.pipeline import command
from tests.pipeline.in_process import InProcess, nxpipe
from tests.security import hostile_text as hostile
from tests.security.hostile_text import EVIL, IN_A_NAME, assert_harmless

__all__ = ["nxpipe"]


@dataclass(frozen=True)
class Attempt:
    """An attempt: `make` puts a model into the working directory; `words` are the arguments of nxpipe."""

    id: str
    words: str
    code: int
    make: Callable[[Path], object] = lambda _: None
    shows: str = r"\x1b]0;PWNED\x07"  # what a reader sees of it


def _renamed(name: str) -> Callable[[Path], object]:
    return lambda here: hostile.save_onnx(here / name, operator="Nothing")


ONNX, BERT = "--model-id m.onnx --target inf2.xlarge", "--model-id m --target inf2.xlarge --buckets 16"
PT2 = "--model-id m.pt2 --target inf2.xlarge"
MODELS = (
    Attempt("C01", f"check {ONNX}", 10, lambda here: hostile.save_onnx(
        here / "m.onnx", initializers=(hostile.outside_data(EVIL),))),
    Attempt("C02", f"build --store st {ONNX}", 10, lambda here: hostile.save_onnx(
        here / "m.onnx", initializers=(hostile.outside_data(EVIL),))),
    Attempt("C03", f"check {ONNX}", 11, lambda here: hostile.save_onnx(
        here / "m.onnx", operator="Relu" + EVIL, node=EVIL)),
    Attempt("C04", f"build --store st {ONNX}", 11, lambda here: hostile.save_onnx(
        here / "m.onnx", operator="Relu" + EVIL, node=EVIL)),
    Attempt("C05", f"check {ONNX}", 11, lambda here: hostile.save_onnx(here / "m.onnx", x=EVIL, shape=(EVIL, 4))),
    Attempt("C06", f"check {ONNX}", 11, lambda here: hostile.save_onnx(here / "m.onnx", y=EVIL, made="other")),
    Attempt("C07", f"build --store st {ONNX}", 11, lambda here: hostile.save_onnx(
        here / "m.onnx", initializers=(hostile.bad_weights(EVIL),))),
    Attempt("C09", f"build --store st {PT2}", 11, lambda here: hostile.pt2_with(
        here / "m.pt2", hostile.in_text("weight_0"))),
    Attempt("C10", f"check {PT2}", 11, lambda here: hostile.pt2_with(
        here / "m.pt2", hostile.in_text("torch.ops.aten.gelu.default"))),
    Attempt("C13", f"check {PT2}", 0, lambda here: hostile.pt2_with(
        here / "m.pt2", hostile.in_tree_spec()), shows=""),
    Attempt("C14", f"check {BERT}", 11, lambda here: hostile.bert(here / "m", hidden_act=EVIL)),
    Attempt("C15", f"check {BERT}", 11, lambda here: hostile.bert(here / "m", model_type=EVIL)),
    Attempt("C16", f"check {BERT}", 11, lambda here: hostile.bert(here / "m", architectures=[EVIL], dtype=EVIL)),
    Attempt("C17", f"build --store st {BERT}", 10, lambda here: hostile.bert(
        here / "m", position_embedding_type=EVIL, **{EVIL: EVIL}), shows=""),
    Attempt("C18", f"build --store st {BERT}", 10, lambda here: hostile.with_index(here / "m", EVIL)),
    Attempt("C19", f"build --store st {BERT}", 10, lambda here: hostile.with_tensors(here / "m"), shows=""),
    Attempt("C20", f"check --model-id m{IN_A_NAME}.onnx --target inf2.xlarge", 11, _renamed(f"m{IN_A_NAME}.onnx")),
    Attempt("C21", f"build --store st --model-id m{IN_A_NAME} --target inf2.xlarge", 10,
            lambda here: hostile.bert(here / f"m{IN_A_NAME}")),
)  # fmt: skip
RAW = EVIL.replace("\n", " ")
TOML = '[project]\nname = "demo"\n'
OTHERS = (
    Attempt("C22", "config check", 3, lambda here: _toml(here, f"[project]\nname = {json.dumps(EVIL)}\n"), r"\u001b"),
    Attempt("C23", "config check", 3, lambda here: _toml(here, f"{TOML}{json.dumps(EVIL)} = 1\n"), r"\u001b"),
    Attempt("C24", "config check", 3, lambda here: _toml(here, _model(f"id = {json.dumps(EVIL)}")), r"\u001b"),
    Attempt("C25", "build", 3, lambda here: _toml(here, _model(f"path = {json.dumps(EVIL)}")), r"\u001b"),
    Attempt("C26", "store ls", 3, lambda here: _toml(here, f"{TOML}[store]\nurl = {json.dumps(EVIL)}\n"), r"\u001b"),
    Attempt("C27", "config check", 3, lambda here: _toml(here, f'[project]\nname = "{EVIL}"\n'), r"\u001b"),
    Attempt("C29", f"{EVIL}", 2),
    Attempt("C29", f"--{EVIL}", 2),
    Attempt("C29", f"check --target {EVIL} --model-id m", 2),
    Attempt("C29", f"check --{EVIL} x", 2),
    Attempt("C30", f"store show {EVIL}@abcdef --store st", 21),
    Attempt("C31", f"config check --config {IN_A_NAME}.toml", 3),
)


def _toml(here: Path, text: str) -> None:
    (here / "nxpipe.toml").write_text(text, encoding="utf-8")


def _model(line: str) -> str:
    return f'{TOML}[[models]]\nname = "m"\n{line}\ntask = "fill-mask"\ntarget = "inf2.xlarge"\nbuckets = [16]\n'


def _words(attempt: Attempt) -> list[str]:
    """The arguments; the hostile text has blanks of its own."""
    marked = attempt.words.replace(EVIL, "\0")
    return [word.replace("\0", EVIL) for word in marked.split(" ")]


@pytest.fixture(autouse=True)
def _in_a_job_of_github(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary"))


def _params(*attempts: Attempt) -> list[object]:
    return [
        pytest.param(attempt, id=f"{attempt.id} {attempt.words[:12]!a}", marks=pytest.mark.attempt(attempt.id))
        for attempt in attempts
    ]


@pytest.mark.sample(8)
@pytest.mark.parametrize("attempt", _params(*MODELS, *OTHERS))
def test_what_a_stranger_says_is_text_in_a_log(attempt: Attempt, nxpipe: InProcess, tmp_path: Path) -> None:
    attempt.make(tmp_path)
    answer = nxpipe(*_words(attempt))
    assert answer.code == attempt.code, answer.err
    assert_harmless(answer.out + answer.err)
    assert attempt.shows in answer.out + answer.err
    assert "Traceback" not in answer.err
    summary = tmp_path / "summary"
    if summary.exists():
        assert_harmless(summary.read_text())


@pytest.mark.parametrize(
    "attempt", _params(*(model for model in (*MODELS, *OTHERS) if model.words.split()[0] != "build"))
)
def test_what_a_stranger_says_is_text_on_a_terminal(
    attempt: Attempt, nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_is_terminal", lambda stream: True)
    monkeypatch.setattr(console, "_coloured", lambda stream: True)
    attempt.make(tmp_path)
    answer = nxpipe(*_words(attempt))
    assert answer.code == attempt.code
    assert_harmless(answer.out + answer.err, terminal=True)
    ours = 32 if attempt.code == 0 else 31
    assert re.search(rf"\x1b\[(1;)?{ours}m", answer.out + answer.err)  # a terminal, with our own green or red on it


@pytest.mark.attempt("C28")
def test_a_variable_of_the_environment_is_text_too(
    nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _toml(tmp_path, TOML)
    monkeypatch.setenv("NXPIPE_PROJECT_REGION", EVIL)
    answer = nxpipe("config", "check")
    assert answer.code == 3
    assert_harmless(answer.err)


@pytest.mark.attempt("C08")
def test_output_names_of_a_good_model_are_text(nxpipe: InProcess, tmp_path: Path) -> None:
    hostile.save_onnx(tmp_path / "m.onnx", y=f"y{EVIL}")
    built = nxpipe("build", "--store", "st", *ONNX.split())
    assert built.code == 0, built.err
    for words in (["store", "ls"], ["store", "show", "m.onnx"], ["store", "explain", "m.onnx"]):
        answer = nxpipe(*words, "--store", "st")
        assert answer.code == 0, answer.err
        assert_harmless(answer.out + answer.err)
    for words in (["run", "m.onnx"], ["verify", "m.onnx"]):
        answer = nxpipe(*words, "--store", "st")
        assert_harmless(answer.out + answer.err)
    assert_harmless(built.out + built.err)


@pytest.mark.sample(4)
@pytest.mark.attempt("C11", "C12")
def test_metadata_of_a_program_is_text_where_torch_itself_tells_of_it(tmp_path: Path) -> None:
    hostile.pt2_with(tmp_path / "m.pt2", hostile.in_text("torch.nn.modules.linear.Linear"))
    answer = command.nxpipe("check", *PT2.split(), cwd=tmp_path)
    assert answer.code in (0, 11)
    assert_harmless(answer.out + answer.err)


@given(st.lists(st.text()))
def test_what_a_library_writes_to_stderr_is_text(chunks: list[str]) -> None:
    stream = StringIO()
    guarded = console.Guarded(stream)
    for chunk in chunks:
        guarded.write(chunk)
    assert stream.getvalue().count("\n") == "".join(chunks).count("\n")
    assert all(entry.isprintable() or entry == "\n" for entry in stream.getvalue())


def test_a_warning_of_a_library_is_text_in_a_process_of_nxpipe(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        f"import atexit, sys\natexit.register(lambda: (print({EVIL!r}), sys.stderr.writelines([{EVIL!r}])))\n"
    )
    answer = command.nxpipe("version", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert answer.code == 0
    assert (answer.out + answer.err).count(r"\x1b]0;PWNED") == 2
    assert_harmless(answer.out + answer.err)


# GitHub and HTML


class _Elements(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.found.append(tag)


MARKUP = 'onnx.<script>alert(1)</script>"><img src=x onerror=alert(2)>|`a`**b**[l](javascript:alert(3)) @octocat #1'


@pytest.mark.attempt("C40", "C41", "C42")
def test_markup_of_a_model_is_text_in_reports_summaries_and_annotations(nxpipe: InProcess, tmp_path: Path) -> None:
    hostile.save_onnx(tmp_path / "m.onnx", operator=MARKUP + EVIL)
    answer = nxpipe("build", "--store", "st", *ONNX.split())
    assert answer.code == 11
    (page,) = tmp_path.glob(".nxpipe/builds/*/report.html")
    elements = _Elements(page.read_text()).found
    assert elements.count("script") == 1  # our own
    assert "img" not in elements
    summary = (tmp_path / "summary").read_text()
    assert not [tag for tag in _Elements(summary).found if tag != "br"]
    assert not re.search(r"@octocat|\]\(javascript|\*\*b|#1\b", summary)
    commands = [line for line in answer.err.split("\n") if line.startswith("::")]
    assert len(commands) == 1
    assert commands[0].startswith("::error title=nxpipe build")
    assert "%0A::add-mask" not in commands[0]


# The functions


@given(st.text())
def test_no_text_leaves_a_terminal_line_with_a_control_character(text: str) -> None:
    for said in (escape.for_terminal(text), escape.for_log(text), escape.unstyled(escape.style(text, fg="red"))):
        assert said.isprintable()
    assert not escape.for_log(text).lstrip().startswith("::")
    assert "##[" not in escape.for_log(text)
    assert escape.for_terminal(escape.for_terminal(text)) == escape.for_terminal(text)


@given(st.text(alphabet=st.sampled_from("\x1b[]0;31mX:#\n\t\x9b\u202e \ud800\U000e0001a"), max_size=30))
def test_the_console_lets_nothing_out_but_its_own_styles(text: str) -> None:
    for coloured in (False, True):
        line_for = escape.line_for(f"{escape.style(text, fg='red', bold=True)} {text}", coloured=coloured)
        assert_harmless(line_for, terminal=coloured)
        for line in table((text,), [(escape.style(text, dim=True),)]).split("\n"):
            assert_harmless(escape.line_for(line, coloured=coloured), terminal=coloured)


@given(
    st.recursive(st.text() | st.integers() | st.none(), lambda each: st.lists(each) | st.dictionaries(st.text(), each))
)
def test_json_says_the_same_in_printable_characters(value: object) -> None:
    for document in (escape.for_json(value), escape.for_json(value, 2), escape.for_json(value, ascii_only=True)):
        assert json.loads(document) == value
        assert_harmless(document)


@given(st.text())
def test_html_and_markdown_have_no_markup_and_no_controls_of_a_stranger(text: str) -> None:
    html = escape.for_html(text)
    assert not re.search("[<>\"'\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", html)
    marked = escape.for_markdown(text)
    assert "\n" not in marked
    assert not re.search(r"[`*_\[\]<>|~@]", marked)


@given(st.text(), st.text())
def test_a_workflow_command_is_one_line_with_one_message(title: str, message: str) -> None:
    line = escape.workflow_command("error", title, message)
    assert "\n" not in line
    assert "\r" not in line
    properties, _, data = line.removeprefix("::error title=").partition("::")
    assert ":" not in properties.replace("%3A", "")
    assert not re.search("[\x00-\x1f\x7f-\x9f]", data)


def test_a_style_cannot_be_forged() -> None:
    ours = escape.style("red", fg="red")
    assert escape.line_for(ours, coloured=True) == "\x1b[31mred\x1b[0m"
    assert escape.line_for("\x1b[31mred\x1b[0m", coloured=True) == r"\x1b[31mred\x1b[0m"


# The one seam


def test_nothing_but_the_console_writes_to_stdout_or_stderr() -> None:
    """A second place would be one without escapes. A worker's stdout is a pipe to its driver, and speaks JSON."""
    allowed = {
        "util/console.py",
        "cli/infra/smoke.py",  # a question with the name of a project, which is plain
        "cli/reference.py",  # a tool of ours, not a command
        "build/executors/local.py",
        "fleet/agent/gate.py",  # what `nxpipe agent warm` has written to its console
        "fleet/agent/logs.py",  # the last words of an agent, escaped
        "fleet/agent/group.py",
    }
    found = set()
    for path in sorted((ROOT / "pipeline").rglob("*.py")):
        for entry in ast.walk(ast.parse(path.read_text())):
            if isinstance(entry, ast.Call) and re.fullmatch(
                r"print|click\.(echo|secho|style|confirm|prompt)|sys\.(stdout|stderr)(\.buffer)?\.write",
                ast.unparse(entry.func),
            ):
                found.add(path.relative_to(ROOT / "pipeline").as_posix())
    assert found <= allowed


@pytest.mark.parametrize("method", ["result", "say", "complain", "trace", "page"])
def test_every_way_to_speak_escapes(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        stream = StringIO()
        monkeypatch.setattr(f"sys.{name}", stream)
    string_io = StringIO()
    monkeypatch.setattr(console, "_write_raw", lambda text, stream, end="\n": string_io.write(text + end))
    getattr(Console(), method)(EVIL)
    assert_harmless(string_io.getvalue())
    assert os.linesep in string_io.getvalue()


# Every command, in whatever of its words


def _commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command_ = group.get_command(context, name)
        assert command_ is not None
        if isinstance(command_, click.Group):
            yield from _commands(command_, (*path, name))
        else:
            yield (*path, name), command_


_PERIODS: Final = "monitor.json"  # a configuration of neuron-monitor
_SOONEST: Final = {
    "--once": ["--once"],
    "--period": ["--period", "0.1"],
    "--config-file": ["--config-file", _PERIODS],
    "--export": ["--export", "pages"],
}


def _hostile_words(command_: click.Command) -> Iterator[list[str]]:
    """The hostile text as all arguments, and with each option in turn. A command that reports without end, once, after
    its shortest period; one that serves a store, an empty folder."""
    arguments = [EVIL for param in command_.params if isinstance(param, click.Argument)]
    for param in command_.params:
        arguments += next((words for name, words in _SOONEST.items() if name in param.opts), [])
    yield arguments
    for option in command_.params:
        if isinstance(option, click.Option) and not option.is_flag and not option.count:
            yield [*arguments, option.opts[-1], EVIL]


NEVER_HERE = {("agent", "run"), ("agent", "watch")}  # they ask the metadata service of an instance


@pytest.mark.sample(16)
@pytest.mark.parametrize(
    ("path", "words"),
    [
        pytest.param(path, words, id=f"{' '.join(path)} {words[-2] if len(words) > 1 else ''}")
        for path, found in _commands(cli)
        if path not in NEVER_HERE
        for words in _hostile_words(found)
    ],
)
def test_every_word_of_every_command_is_text_in_what_is_said_of_it(
    path: tuple[str, ...], words: list[str], nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(_PERIODS).write_text(json.dumps(MonitorSettings.every(0.1).document()))
    answer = nxpipe(*path, *words)
    assert answer.code != exit_codes.INTERNAL.number, answer.err
    assert_harmless(answer.out + answer.err)
