"""`nxpipe init`: nxpipe.toml, a release workflow and its sources, the files of the CDK CLI, .gitignore; all or none.

The comments of the configuration are the descriptions of its fields.
"""

import difflib
import json
import os
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence, Set
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from string import Template
from textwrap import fill
from typing import Final, get_args

import click
from click.core import ParameterSource
from pydantic import ValidationError

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.param_types import TASKS, Choice, Count, PinnedSource
from nxpipe.pipeline.config import Config, Model, field_help
from nxpipe.pipeline.config.cloud import Release
from nxpipe.pipeline.config.messages import violations
from nxpipe.pipeline.config.models import Task
from nxpipe.pipeline.config.reference import tables
from nxpipe.pipeline.fleet.github import GitHubSource, first_release, origin, setup_script
from nxpipe.pipeline.models.catalogue import find
from nxpipe.pipeline.models.source import DEFAULT_BUCKET, longest_sequence, looks_like_folder, resolve
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import ModelSourceError, WouldOverwrite
from nxpipe.pipeline.util.files import NAME, FileChange, expanded, write_changes
from nxpipe.pipeline.util.text import for_json

_TEMPLATES: Final = Path(__file__).parents[1] / "templates"
_PACKAGE: Final = _TEMPLATES / "package.json"
_ACKNOWLEDGED: Final = timedelta(days=180)
_ANY_MODEL: Final = "feature-extraction"  # compiles for every model
_FLEETS: Final = ("serving", "training")


class _Text(Template):
    """A template whose placeholders may name a field: ${store.url} is the description of that field."""

    idpattern = "[a-z_]+(?:[.][a-z_]+)?"


def configuration(
    root: Path, model_id: str, task: str | None, fleets: Sequence[str] = (), release: Release | None = None
) -> str:
    """The text of a valid configuration with one model, a fleet of each of these kinds, and the GitHub repository."""
    folder = expanded(model_id)
    if looks_like_folder(model_id) and not folder.is_dir():
        resolve(model_id)  # raises, with the folder that was probably meant
    source = "path" if folder.is_dir() else "id"
    last = (folder.resolve().name if folder.is_dir() else model_id).rpartition("/")[2]
    values = {
        "name": _slug(root.resolve().name, "project"),
        "model_name": _slug(last, "model"),
        "model": Path(os.path.relpath(folder, root)).as_posix() if folder.is_dir() else model_id,
        "task": task or _task_of(model_id, folder),
        "bucket": _bucket_of(folder),
        # One artifact for all fleets, and Inf2 instances do not train.
        "target": "trn1.2xlarge" if "training" in fleets else "inf2.xlarge",
    }
    values["fleet_stack"] = f"*-serve-{values['model_name']}*"  # of a project that may be renamed
    values["training_name"] = "tuning" if values["model_name"] != "tuning" else "training"
    comments = _comments()
    comments["models.source"] = comments[f"models.{source}"]
    quoted = {key: for_json(value) for key, value in values.items()}
    quoted["until"] = str(datetime.now(UTC).date() + _ACKNOWLEDGED)
    tables = _fleet_tables(fleets, quoted)
    mark = "" if fleets or release else "# "
    optional = {"fleets": tables, "release": _release_table(release, comments), "mark": mark}
    text = _filled("nxpipe.toml", {**quoted, **comments, **optional, "source": source})
    _require_valid(text, model_id)
    return text


def _filled(template: str, values: Mapping[str, str]) -> str:
    return _Text((_TEMPLATES / template).read_text(encoding="utf-8")).substitute(values)


def _fleet_tables(kinds: Sequence[str], values: Mapping[str, str]) -> str:
    """The tables of the fleets; without any, those of a serving fleet as a comment."""
    if kinds:
        return "# One table for each fleet.\n" + "\n".join(_filled(f"{kind}.toml", values) for kind in kinds)
    example = _as_comment(_filled("serving.toml", values))
    return f"# One table for each fleet. To deploy one, uncomment it, and `region` above.\n{example}"


def _release_table(release: Release | None, comments: Mapping[str, str]) -> str:
    """The repository whose jobs may publish; without one, an example as a comment."""
    shown = release or Release(repository="OWNER/NAME")
    values = {
        "repository": for_json(shown.repository),
        "owner_id": str(shown.owner_id or 123456),
        "repository_id": str(shown.repository_id or 456789),
        "absent": "" if shown.owner_id or release is None else "# ",
    }
    text = _filled("release.toml", {**comments, **values})
    if release:
        return text
    return f"# To release from GitHub, uncomment this table, and `region` above.\n{_as_comment(text)}"


def _as_comment(table: str) -> str:
    return re.sub("(?m)^(?=[^#\n])", "# ", table)


def _slug(text: str, default: str) -> str:
    """The text as a valid name, as similar as possible."""
    words = re.sub("[^a-z0-9]+", "-", text.lower()).lstrip("-0123456789")
    return words[:40].strip("-") or default


def _task_of(model_id: str, folder: Path) -> str:
    if folder.is_dir():
        return resolve(str(folder)).task
    known = find(model_id)
    return known.task if known is not None and known.task in get_args(Task) else _ANY_MODEL


def _bucket_of(folder: Path) -> int:
    """The default bucket, at most the positions of a model in a folder."""
    positions = longest_sequence(resolve(str(folder))) if folder.is_dir() else None
    return min(DEFAULT_BUCKET, positions or DEFAULT_BUCKET)


def _comments() -> dict[str, str]:
    return {
        f"{path[0]}.{key}": fill(field.description or "", 118, subsequent_indent="# ")
        for path, _, table in tables(Config)
        if len(path) == 1
        for key, field in table.model_fields.items()
    }


def _require_valid(text: str, model_id: str) -> None:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:  # a lone surrogate, for example
        raise ModelSourceError(f"{model_id!r} cannot be written into a configuration: {error}") from error
    try:
        Config.model_validate(document)
    except ValidationError as error:
        violation = next(violations(error, Config))
        raise ModelSourceError(
            f"{model_id!r} cannot be used: found {violation.found}, expected {violation.allowed}"
        ) from error


_GITHUB: Final = {
    ".github/workflows/nxpipe-release.yml": _TEMPLATES / "nxpipe-release.yml",
    ".github/actions/nxpipe/action.yml": _TEMPLATES / "nxpipe/action.yml",
}
_SOURCES: Final = {  # the requirements of GitHub's jobs, and the extra of those that compile
    "requirements/nxpipe.in": "",
    "requirements/nxpipe-compile.in": "[compile]",
}
_IGNORED: Final = (f"{NAME}/", "cdk.out/", "node_modules/")  # the local store and its cache, and those of the CDK CLI
_VENV: Final = ".venv"
_OF_GITHUB: Final = {
    "repository": "--repository",
    "owner_id": "--owner-id",
    "repository_id": "--repository-id",
}
_DESCRIBED: Final = {  # options that describe one file
    "model_id": ("--model-id", "nxpipe.toml"),
    "task": ("--task", "nxpipe.toml"),
    "fleets": ("--fleet", "nxpipe.toml"),
    "github": ("--github", "nxpipe.toml"),
    "source": ("--install", "requirements/nxpipe.in"),
}


def plan(
    root: Path,
    model_id: str,
    task: str | None,
    fleets: Sequence[str] = (),
    *,
    release: Release | None = None,
    installed: GitHubSource | None = None,
) -> tuple[FileChange, ...]:
    """All files that a repository needs to release one model and to deploy its fleets."""
    environment, ignored = _environment(root), _read(root / ".gitignore")
    sources = installed or GitHubSource()
    texts = {
        "nxpipe.toml": configuration(root, model_id, task, fleets, release),
        **{name: file.read_text(encoding="utf-8") for name, file in _GITHUB.items()},
        **{name: _requirements(sources, name, extra) for name, extra in _SOURCES.items()},
        "cdk.json": (_TEMPLATES / "cdk.json").read_text(encoding="utf-8").replace(_VENV, environment),
        "package.json": _PACKAGE.read_text(encoding="utf-8"),
    }
    changes = (
        *(FileChange(root, name, _read(root / name), text) for name, text in texts.items()),
        FileChange(
            root, ".gitignore", ignored, _with_entries(ignored or "", (*_IGNORED, f"{environment}/")), amends=True
        ),
    )
    return tuple(change for change in changes if not (change.amends and change.before == change.after))


def _requirements(source: GitHubSource, name: str, extra: str) -> str:
    lock = f"{name.removesuffix('.in')}.txt"
    return _filled("requirements.in", {"name": name, "lock": lock, "source": "\n".join(source.lines(extra))})


def _environment(root: Path) -> str:
    """The virtual environment in the repository, relative to it: `npx cdk synth` uses it if none is activated."""
    own, root = Path(sys.prefix), root.resolve()
    inside = sys.prefix != sys.base_prefix and root in own.parents
    name = own.relative_to(root).as_posix() if inside else _VENV
    return name if re.fullmatch("[A-Za-z0-9._/-]+", name) else _VENV  # the shell reads it


def _read(path: Path) -> str | None:
    """The text of the file; empty for a folder or a broken link, which also block a new file."""
    if path.is_file():
        return path.read_bytes().decode("utf-8", "surrogateescape")
    return "" if os.path.lexists(path) else None


def _with_entries(text: str, entries: Sequence[str]) -> str:
    """The text of .gitignore with one entry for each folder."""
    newline = "\r\n" if "\r\n" in text else "\n"
    present = {line.strip().strip("/") for line in text.splitlines()}
    missing = [entry for entry in entries if entry.strip("/") not in present]
    if missing and text and not text.endswith("\n"):
        text += newline
    return text + "".join(entry + newline for entry in missing)


def diff(change: FileChange) -> str:
    """The change as a unified diff for `git apply`."""
    old = "/dev/null" if change.before is None else f"a/{change.name}"
    before, after = ((text or "").splitlines(keepends=True) for text in (change.before, change.after))
    lines = difflib.unified_diff(before, after, old, f"b/{change.name}")
    text = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return text.encode("utf-8", "backslashreplace").decode()


def require_inside(changes: Sequence[FileChange]) -> None:
    """Raise if a file would be read or written outside of the repository."""
    for change in changes:
        root, target = (Path(os.path.realpath(path)) for path in (change.root, change.path))
        if not target.is_relative_to(root):
            raise WouldOverwrite(
                f"{change.path} is a link to {target}, outside of {root}; nothing was written; replace the link by a "
                "folder or file of the repository"
            )


def require_absent(changes: Sequence[FileChange]) -> None:
    """Raise if a new file would replace an existing one."""
    existing = [str(change.path) for change in changes if change.replaces]
    if existing:
        *others, last = existing
        files = f"{', '.join(others)} and {last} exist" if others else f"{last} exists"
        raise WouldOverwrite(
            f"{files} already; nothing was written; "
            "see the difference with --dry-run, write the missing files with --keep, or move the file away"
        )


@click.command(cls=Command)
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path), default=".")
@click.option(
    "--model-id", metavar="ID|FOLDER", default="bert-base-uncased", show_default=True, help="The first model."
)
@click.option(
    "--task",
    type=Choice(get_args(Task), TASKS),
    help=f"{field_help(Model, 'task')}  [default: that of the public model, else feature-extraction]",
)
@click.option(
    "--fleet",
    "fleets",
    type=Choice(_FLEETS),
    multiple=True,
    help="Also write a fleet of this kind, ready to synthesize; may be repeated.",
)
@click.option("--install", "source", type=PinnedSource(), help="The source of nxpipe for GitHub's jobs; see above.")
@click.option("--index-url", metavar="URL", help="Your package index, which has the version that --install names.")
@click.option(
    "--github", is_flag=True, help="Also write [release], and print the commands that set up the GitHub repository."
)
@click.option("--repository", metavar="OWNER/NAME", help="The repository of --github.  [default: git's remote origin]")
@click.option("--owner-id", type=Count(1), metavar="N", help="The id of the repository's owner.")
@click.option("--repository-id", type=Count(1), metavar="N", help="The id of the repository.")
@click.option("--keep", is_flag=True, help="Keep existing files as they are, and write those that are missing.")
@click.option("--dry-run", is_flag=True, help="Print the changes as a diff and write nothing.")
@click.pass_context
def init(
    ctx: click.Context,
    directory: Path,
    model_id: str,
    task: str | None,
    fleets: tuple[str, ...],
    source: str | None,
    index_url: str | None,
    github: bool,
    repository: str | None,
    owner_id: int | None,
    repository_id: int | None,
    keep: bool,
    dry_run: bool,
) -> None:
    """Write nxpipe.toml, a release workflow and the files of the CDK CLI into a repository.

    Existing files are never overwritten: if one of the new files exists already, nothing is written; with --keep, the
    others are. If all of them exist and are equal, there is nothing to do. An existing .gitignore is extended.

    \b
    Files:
      nxpipe.toml                           the model, the fleets, the store
      .github/workflows/nxpipe-release.yml  the release workflow
      .github/actions/nxpipe/action.yml     the action that its jobs start with
      requirements/nxpipe.in                the source of nxpipe for these jobs
      requirements/nxpipe-compile.in        the same for jobs that compile
      cdk.json                              how `npx cdk` starts the stacks, and their feature flags
      package.json                          the version of the CDK CLI
      .gitignore                            the local store, cdk.out, node_modules, the virtual environment

    \b
    Sources of nxpipe for --install (without it, the jobs fail at once and name this option):
      git+https://HOST/OWNER/nxpipe@COMMIT                     a commit, with its 40 digits
      https://HOST/nxpipe-VERSION-py3-none-any.whl#sha256=...  a wheel
      nxpipe==VERSION                                          a version in your index, with --index-url

    With --github, the ids of the repository are those of `gh api repos/OWNER/NAME --jq '.owner.id, .id'`.

    \b
    Example:
      nxpipe init --dry-run
      nxpipe init . --model-id HuggingFaceTB/SmolLM2-135M
      nxpipe init . --fleet serving --fleet training
      nxpipe init . --github --repository acme/models --owner-id 123456 --repository-id 456789
    """
    console: Console = ctx.obj
    installed = _installed(ctx, source, index_url)
    release = _release(ctx, directory, repository, (owner_id, repository_id)) if github else None
    _require_github(ctx, github)
    planned = plan(directory, model_id, task, tuple(dict.fromkeys(fleets)), release=release, installed=installed)
    require_inside(planned)
    kept = [change for change in planned if keep and change.replaces]
    _require_use(ctx, kept)
    changes = [change for change in planned if change not in kept]
    if dry_run:
        _show_diff(console, changes)
        return
    config = _configured(planned) if github else None
    if not keep and all(map(_is_up_to_date, changes)):
        _show_nothing(console, [change.path for change in changes], config)
        return
    require_absent(changes)
    write_changes(changes)
    _show_files(console, [change.path for change in changes], [change.path for change in kept], config)
    _show_next(console, directory, {change.name for change in kept if change.before != change.after}, config)


def _show_diff(console: Console, changes: Sequence[FileChange]) -> None:
    text = "".join(map(diff, changes))
    if console.json:
        console.data({"diff": text})
    else:
        console.page(text)


def _is_up_to_date(change: FileChange) -> bool:
    """True for an equal file. The date until which a finding is accepted counts from the day of the file."""
    before, after = (_EXPIRES.sub("", text or "") for text in (change.before, change.after))
    return change.before is not None and before == after


_EXPIRES: Final = re.compile(r"(?m)^(?:# )?expires = \d{4}-\d\d-\d\d$")


def _show_nothing(console: Console, paths: Sequence[Path], config: Config | None) -> None:
    if console.json:
        _show_files(console, (), paths, config)
        return
    *others, last = map(str, paths)
    files = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    console.result(f"Nothing to do: {files} up to date.")
    for line in first_release(config).splitlines() if config else ():
        console.say(line)


def _show_files(console: Console, paths: Sequence[Path], kept: Sequence[Path], config: Config | None) -> None:
    """`config` is that of a project with --github."""
    if console.json:
        script = {"github": setup_script(config)} if config else {}
        console.data({"written": [str(path) for path in paths], "kept": [str(path) for path in kept], **script})
    else:
        console.result(*(f"wrote {path}" for path in paths), *(f"kept  {path}" for path in kept))


def _show_next(console: Console, directory: Path, different: Set[str], config: Config | None) -> None:
    """The next commands. `different` are the kept files that differ from what this command writes."""
    if console.json:
        return
    console.say(_following(directory, different))
    for line in first_release(config).splitlines() if config else ():
        console.say(line)


def _require_use(ctx: click.Context, kept: Sequence[FileChange]) -> None:
    """Refuse options that describe a file that is kept."""
    names = {change.name for change in kept}
    for parameter, (option, name) in _DESCRIBED.items():
        if name in names and ctx.get_parameter_source(parameter) is ParameterSource.COMMANDLINE:
            instead = "; add [release] to it and run nxpipe infra github" if parameter == "github" else ""
            raise click.UsageError(f"{option} is for a new {name}, but --keep keeps the one that exists{instead}", ctx)


def _installed(ctx: click.Context, source: str | None, index: str | None) -> GitHubSource:
    """A version needs an index: a public one has no nxpipe today, and the name is free to register there."""
    version = source is not None and source.startswith("nxpipe==")
    if version and index is None:
        raise click.UsageError(f"{source} needs --index-url, your package index; no public index has nxpipe", ctx)
    if index is not None and not version:
        raise click.UsageError("--index-url is the index of a version; pass --install nxpipe==VERSION", ctx)
    if index is not None and not re.fullmatch(r"https://[\w.-]+(:\d+)?(/[\w.~%+-]*)*", index, re.ASCII):
        raise click.UsageError("--index-url is no https URL without a user, a password and a query", ctx)
    return GitHubSource(source, index)


def _require_github(ctx: click.Context, github: bool) -> None:
    for parameter, option in _OF_GITHUB.items():
        if not github and ctx.get_parameter_source(parameter) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{option} belongs to --github; pass --github too", ctx)


def _release(
    ctx: click.Context, directory: Path, repository: str | None, ids: tuple[int | None, int | None]
) -> Release:
    named = repository or origin(directory)
    if named is None:
        raise click.UsageError("no remote origin on github.com; pass --repository OWNER/NAME", ctx)
    try:
        return Release(repository=named, owner_id=ids[0], repository_id=ids[1])
    except ValidationError as error:
        violation = next(violations(error, Release))
        raise click.UsageError(f"--github: found {violation.found}, expected {violation.allowed}", ctx) from error


def _configured(planned: Sequence[FileChange]) -> Config:
    (text,) = (change.after for change in planned if change.name == "nxpipe.toml")
    return Config.model_validate(tomllib.loads(text))


def _following(directory: Path, different: Set[str]) -> str:
    version = json.loads(_PACKAGE.read_text(encoding="utf-8"))["devDependencies"]["aws-cdk"]
    stacks = [] if find_spec("aws_cdk") else ["pip install 'nxpipe[cdk]'"]
    stacks += [f"npm install --save-dev aws-cdk@{version}" if "package.json" in different else "npm install"]
    then = (
        "cdk.json differs from the one that nxpipe requires; see nxpipe init --dry-run"
        if "cdk.json" in different
        else f"{', '.join(stacks)}, then npx cdk synth --quiet"
    )
    there = "" if directory.resolve() == Path.cwd() else f" in {directory}"
    return f"Next{there}: nxpipe config check, then nxpipe build. For the stacks: {then}."
