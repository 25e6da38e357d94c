"""Every block of commands of every page is executed, in the page's order, in a user's repository; or it has a reason.

`GIVEN` has, for each page that this module executes, what its prose has the user do beforehand, and what the names of
its examples stand for. The guides of a deployment are executed by `tests/localaws/test_walk.py` in one repository.
A line of output that a page shows must be in the command's output, whatever its numbers; a line with `...` is left out.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import ROOT
from tests.doc_blocks import WALK, Block, blocks_of, left_out, pages
from tests.journeys import given
from tests.serving import checkpoints
from tests.test_docs import rows
from tests.user import Repository, cloud_up, download_cdk, new_repository
from tests.wheel import wheel_of

_SMALL: Final = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def nothing(repository: Repository) -> None:
    """The page works in an empty repository."""


def bert(repository: Repository) -> None:
    """A small model in place of the public one, in a folder of its name."""
    shape = {**_SMALL, "architectures": ["BertForMaskedLM"], "max_position_embeddings": 512}
    folder = checkpoints.write(repository.folder / "bert-base-uncased", "bert", **shape)
    (folder / "tokenizer.json").unlink()  # as the public configuration that is part of nxpipe
    (folder / "tokenizer_config.json").unlink()
    repository.noted["--model-id bert-base-uncased"] = "--model-id ./bert-base-uncased"
    download_cdk(repository.folder)


def llama(repository: Repository) -> None:
    checkpoints.write(repository.folder / "my-llama", "llama")
    repository.noted["128,512,4096"] = "16,96"
    repository.noted["--model-id ./my-llama"] = "--weights random:0 --model-id ./my-llama"
    repository.noted["my-llama@4e9ce0"] = "my-llama"


def artifacts(repository: Repository) -> None:
    """Two versions of a classifier and a language model, built, and one program of them in a file."""
    for seed, name in (("0", "bert"), ("1", "bert-2")):
        given.classifier(repository, name, seed)
    llama(repository)
    for command, name in (
        ("--model-id ./bert --buckets 16", "bert@4e9ce0"),
        ("--model-id ./bert-2 --buckets 16", "bert@a41f07"),
        ("--model-id ./my-llama --buckets 64", "my-llama@4e9ce0"),
    ):
        built = repository.succeed(f"nxpipe build {command}")
        repository.noted[name] = re.findall(r"^built +([\w-]+@\w{12})", built, re.MULTILINE)[0]
    first = repository.noted["bert@4e9ce0"]
    repository.noted["bert-base-uncased@4e9ce0"] = first
    repository.noted["--model-id bert-base-uncased"] = "--model-id ./bert --buckets 16"
    repository.noted["decode-b1-s2048"] = "decode-b1-s64"
    repository.succeed(f"nxpipe store fetch {first} --to fetched")
    (program,) = (repository.folder / "fetched/executables").glob("*")
    shutil.copy(program, repository.folder / "forward-b1-s128.nxe")


def classifiers(repository: Repository) -> None:
    given.classifier(repository, "sentiment")
    given.drifted(repository, "sentiment", "tuned")


def bucket(repository: Repository) -> None:
    repository.noted["BUCKET"] = "team-models"
    given.classifier(repository, "sentiment")
    repository.succeed("aws s3 mb s3://BUCKET")


def claims(repository: Repository) -> None:
    (repository.folder / "docs").mkdir()
    shutil.copy(ROOT / "docs/claims.toml", repository.folder / "docs")


def portfolio(repository: Repository) -> None:
    """The file of the page's own block."""
    text = (ROOT / "docs/guides/planning.md").read_text()
    (block,) = re.findall(r"```toml\n(# portfolio\.toml\n.*?)```", text, re.DOTALL)
    (repository.folder / "portfolio.toml").write_text(block)


GIVEN: Final[dict[str, Callable[[Repository], None]]] = {
    "docs/claims.md": claims,
    "docs/getting-started.md": bert,
    "docs/guides/debug-accuracy.md": classifiers,
    "docs/guides/debug-speed.md": classifiers,
    "docs/guides/models.md": nothing,
    "docs/guides/planning.md": portfolio,
    "docs/guides/serving.md": llama,
    "docs/guides/sharing.md": bucket,
    "docs/reference/configuration.md": nothing,
    "docs/reference/planning.md": nothing,
    "docs/reference/profile.md": artifacts,
}
CLOUDY: Final = ("docs/guides/sharing.md",)  # on the local AWS
CHEAP: Final = ("docs/claims.md", "docs/guides/planning.md", "docs/reference/configuration.md")


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wheel_of(ROOT, tmp_path_factory.mktemp("wheel"))


def execute(page: str, wheel: Path, folder: Path) -> None:
    repository = new_repository(folder / "my-models", wheel)
    with cloud_up(folder / "server.txt") if page in CLOUDY else nullcontext("") as exports:
        repository.shell.write_text(exports)
        GIVEN[page](repository)
        wrong = [fault for block in blocks_of(ROOT / page) if not block.reason for fault in faults(block, repository)]
    assert wrong == []


def faults(block: Block, repository: Repository) -> Iterator[str]:
    for command, shown in block.commands():
        code, output = repository.run(command)
        if code:
            yield f"{block.place}: {command}: exit code {code}\n{output}"
            continue
        seen = {normal(line) for line in output.splitlines()}
        missing = [line for line in shown if "..." not in line and normal(line) not in seen]
        if missing:
            yield f"{block.place}: {command}: not printed: {missing}\n{output}"


def normal(line: str) -> str:
    """A line without what differs between models, machines and days: numbers, digests, folders, widths of columns."""
    line = re.sub(r"file://\S+", "file://", line)
    line = re.sub(r"\b[0-9a-f]{12}\b", "KEY", line)
    line = re.sub(r"\b\d[\d.,]*(e[-+]?\d+)?\b", "N", line)
    line = re.sub(r"\bN ?([kKMG]i?)?B\b|\bN(m?s|us)?\b", "N", line)
    return re.sub(r"\s+", " ", line).strip()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in GIVEN if page not in CHEAP])
def test_the_blocks_of_a_page_run_in_their_order_in_a_users_repository(page: str, wheel: Path, tmp_path: Path) -> None:
    execute(page, wheel, tmp_path)


@pytest.mark.sample(12)
@pytest.mark.parametrize("page", CHEAP)
def test_the_blocks_of_a_page_without_a_build_run_in_their_order(page: str, wheel: Path, tmp_path: Path) -> None:
    execute(page, wheel, tmp_path)


def test_every_block_of_every_page_is_executed_or_has_a_reason() -> None:
    unknown = [
        block.place
        for page in pages()
        for block in blocks_of(page)
        if not block.reason and str(page.relative_to(ROOT)) not in GIVEN and not (page in WALK and block.kind == "sh")
    ]
    assert unknown == [], "add the page to GIVEN, or a comment <!-- not executed: REASON -->"
    assert [page for page in GIVEN if all(block.reason for block in blocks_of(ROOT / page))] == []


def test_the_table_of_unexecuted_blocks_is_complete() -> None:
    text = (ROOT / "docs/testing.md").read_text()
    table = rows(text.split("## Blocks that are not executed", 1)[1].split("\n## ", 1)[0])
    listed = [(re.sub(r"^\[.*\]\((.*)\)$", r"\1", page), int(number), reason) for page, number, reason in table]
    assert listed == sorted((page, number, reason) for (page, reason), number in left_out().items())


def test_a_shown_line_must_be_printed_whatever_its_numbers() -> None:
    assert normal("built  bert@ea6f9603f792  inf2  1 program  438.1 MB") == normal(
        "built  bert@000000000000  inf2  1 program  24.5 kB"
    )
    assert normal("cached  bert@ea6f9603f792") != normal("built  bert@ea6f9603f792")
