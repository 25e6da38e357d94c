"""The documentation agrees with the code."""

import re
import shlex
from pathlib import Path

import click
import pytest

from nxpipe.pipeline.cli.main import cli
from nxpipe.pipeline.cli.reference import stale, walk
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_generated_pages_are_fresh() -> None:
    assert stale() == [], "run `make docs` and commit the result"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_of_ours_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", heading) for heading in headings]
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.strip().lower())) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_heading_leads_to_one(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", text)
    pages = [((page.parent / link).resolve() if link else page, anchor) for link, anchor in links]
    assert [(str(to), anchor) for to, anchor in pages if to.suffix == ".md" and anchor not in anchors(to)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_line_on_a_page_parses(page: Path) -> None:
    """Names and options of every `nxpipe ...` line of an example are those of the real command."""
    blocks = re.findall(r"^```(?:bash|sh|console)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.replace("\\\n", "").splitlines()]
    for line in lines:
        if line.startswith("nxpipe "):
            assert_parses(shlex.split(line, comments=True)[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_that_a_page_names_exists(page: Path) -> None:
    paths = re.findall(
        r"`((?:emulator|artifact_store|pipeline|stacks|tests|benchmarks|docs)/[\w./-]+)`", page.read_text()
    )
    assert [path for path in paths if not (ROOT / path).exists()] == []


PROSE = [page for page in PAGES if page.parent.name != "results"]


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_has_at_most_100_columns(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert [line for line in prose.splitlines() if len(line) > 100 and not line.startswith("|")] == []


def assert_parses(words: list[str]) -> None:
    words = words[: words.index(">")] if ">" in words else words
    command, path = resolve(words)
    spelled = {option for param in command.params for option in (*param.opts, *param.secondary_opts)} | {"-h", "--help"}
    options = [word.partition("=")[0] for word in words if word.startswith("-")]
    assert set(options) <= spelled, f"{path} has no {set(options) - spelled}"


def resolve(words: list[str]) -> tuple[click.Command, str]:
    commands = {path[1:]: command for path, command in walk(cli, ("nxpipe",))}
    names = tuple(word for word in words if not word.startswith("-"))
    depth = next(n for n in range(len(names), -1, -1) if names[:n] in commands)
    command = commands[names[:depth]]
    assert depth == len(names) or not isinstance(command, click.Group), f"no command {' '.join(names)}"
    return command, " ".join(names[:depth])


def test_every_direct_dependency_is_justified() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text()
    declared = re.findall(
        r'^\s+"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?[=><]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert len(declared) > 10
    assert [name for name in declared if f"`{name}`" not in page] == []


def rows(text: str) -> list[list[str]]:
    """The cells of all tables, without headings and rules."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    bodies = [line for line, below in zip(lines, [*lines[1:], ""], strict=True) if not below.startswith("| ---")]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in bodies if not line.startswith("| ---")]


CHANGES = rows((ROOT / "CONTRIBUTING.md").read_text())


@pytest.mark.parametrize("task", CHANGES, ids=lambda task: task[0])
def test_a_change_task_names_at_most_three_places_and_each_exists(task: list[str]) -> None:
    _, change, tests = task
    places, proofs = (re.findall(r"`([a-z_./-]*/[a-z_./-]*)`", cell) for cell in (change, tests))
    assert 1 <= len(places) <= 3
    assert proofs
    assert [place for place in (*places, *proofs) if not (ROOT / place).exists()] == []


def test_the_eight_change_tasks_are_on_the_page() -> None:
    tasks = " ".join(task[0] for task in CHANGES)
    named = (
        "instance type",
        "aten operator",
        "an instruction",
        "a flag",
        "alarm",
        "threshold",
        "backend",
        "fusion pass",
    )
    assert [name for name in named if name not in tasks] == []


def test_each_concept_has_one_row_in_the_glossary_with_a_meaning_and_an_origin() -> None:
    table = rows((ROOT / "docs" / "glossary.md").read_text())
    assert all(len(row) == 3 and all(row) for row in table)
    terms = [term.strip().lower() for row in table for term in row[0].split(",")]
    assert len(terms) > 60
    assert len(set(terms)) == len(terms)


@pytest.mark.parametrize("package", ["emulator", "artifact_store", "pipeline", "stacks"])
def test_the_architecture_page_has_every_package(package: str) -> None:
    tree = (ROOT / "docs" / "architecture.md").read_text().split("```text")[1].split("```")[0]
    section = tree.split(f"\n{package}/", 1)[1].split("\n\n")[0]
    folders = {path.parent.name for path in (ROOT / package).glob("*/__init__.py")} | (
        {"templates"} if package == "pipeline" else set()
    )
    assert set(re.findall(r"^  ([a-z_]+)/ ", section, re.MULTILINE)) == folders
