"""The journeys of people who evaluate nxpipe, from the wheel in an empty repository: `NN_*.journey`, in this folder.

Each heading of a script is a subtest, named by the finding of the review that it answers. `python -m
tests.journeys.transcript NAME` runs one and prints what was seen.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import ROOT
from tests.journeys import given
from tests.journeys.script import Finding, Step, findings_of
from tests.user import Repository, cloud_up, download_cdk, new_repository
from tests.wheel import wheel_of

FOLDER: Final = Path(__file__).parent
JOURNEYS: Final = sorted(FOLDER.glob("*.journey"))
CLOUD: Final = "<local AWS>"  # in the first line of a script that needs one


def needs_cloud(path: Path) -> bool:
    return CLOUD in path.read_text().partition("\n")[0]


QUICK: Final = [path for path in JOURNEYS if path.stem in {"05_saved_programs", "07_plan"}]  # half a minute each
LONG: Final = [path for path in JOURNEYS if path not in QUICK]
SetUp = Callable[[Path], Repository]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def repository_of(wheel: Path, tmp_path: Path) -> Iterator[SetUp]:
    with ExitStack() as running:
        yield lambda path: set_up(path, wheel, tmp_path, running)


def set_up(path: Path, wheel: Path, folder: Path, running: ExitStack) -> Repository:
    repository = new_repository(folder / "my-models", wheel, {"WHEEL": str(wheel)})
    if needs_cloud(path):
        download_cdk(repository.folder)
        repository.shell.write_text(running.enter_context(cloud_up(folder / "server.txt")))
    return repository


def play(step: Step, repository: Repository) -> tuple[list[str], str]:
    """The faults of a step, and what was seen."""
    for words in step.given:
        name, *arguments = words.split()
        getattr(given, name)(repository, *arguments)
    done = repository.execute(step.command)
    faults = step.faults(done, repository.fill_in)
    for name, pattern in step.noted:
        match = re.search(repository.fill_in(pattern), done.out + done.err, re.MULTILINE)
        faults += [] if match else [f"nothing matches {pattern}, which {name} stands for"]
        repository.noted[name] = match[1] if match else name
    return faults, f"$ {step.command}\n{done.out}{done.err}[{done.code}]"


def steps_of(path: Path) -> list[Step]:
    return [step for finding in findings_of(path) for step in finding.steps]


def walk(path: Path, repository: Repository, subtests: pytest.Subtests) -> None:
    for finding in findings_of(path):
        with subtests.test(finding.title):
            wrong = failures(path, finding, repository)
            if wrong and finding.not_yet:
                pytest.xfail(f"{finding.not_yet}\n{wrong}")
            assert wrong == ""


def failures(path: Path, finding: Finding, repository: Repository) -> str:
    """What went wrong in any step: the following ones are run too, since later findings build on them."""
    wrong = []
    for step in finding.steps:
        faults, seen = play(step, repository)
        wrong += [f"{path.name}:{step.line}: {'; '.join(faults)}\n{seen}"] if faults else []
    return "\n".join(wrong)


@pytest.mark.sample(16)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", QUICK, ids=lambda path: path.stem)
def test_a_quick_journey_from_the_wheel_in_an_empty_repository(
    path: Path, repository_of: SetUp, subtests: pytest.Subtests
) -> None:
    walk(path, repository_of(path), subtests)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("path", LONG, ids=lambda path: path.stem)
def test_a_journey_from_the_wheel_in_an_empty_repository(
    path: Path, repository_of: SetUp, subtests: pytest.Subtests
) -> None:
    walk(path, repository_of(path), subtests)


def test_the_fourteen_journeys_are_scripted_and_say_what_must_hold() -> None:
    assert [int(path.stem[:2]) for path in JOURNEYS] == list(range(1, 15))
    titles = [(path.stem, finding.title) for path in JOURNEYS for finding in findings_of(path)]
    assert len(set(titles)) == len(titles)
    expectations = [step.expected or step.refused or step.code for path in JOURNEYS for step in steps_of(path)]
    assert sum(map(bool, expectations)) > 120
