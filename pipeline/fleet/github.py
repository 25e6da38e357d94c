"""What a GitHub repository needs for the release workflow: a source of nxpipe, environments and variables.

The values of variables come from outputs of the stacks "storage" and "release".
"""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nxpipe.pipeline.config import Config
from nxpipe.pipeline.config.cloud import Release
from nxpipe.pipeline.util.errors import InputInvalid

_BACKEND: Final = "hatchling==1.33.0"  # builds a commit of nxpipe; pip would download it without a hash
_REMOTE: Final = re.compile(r"(?:https://|git@|ssh://git@)github\.com[:/]([\w.-]+/[\w.-]+?)(?:\.git)?/?\s*", re.ASCII)
_APPROVED: Final = "production"
_OUTPUT: Final = """\
output() { # STACK OUTPUT
  local value
  value=$(aws cloudformation describe-stacks --region %s --stack-name "$1" \\
    --query "Stacks[0].Outputs[?OutputKey=='$2'].OutputValue" --output text)
  [ -n "$value" ] || { echo "The stack $1 has no output $2." >&2; return 1; }
  echo "$value"
}"""


@dataclass(frozen=True)
class GitHubSource:
    """What GitHub's jobs install: a source of nxpipe (None: to be named), and the index of a version."""

    source: str | None = None
    index: str | None = None

    def lines(self, extra: str) -> Iterator[str]:
        """Lines of a requirements file for pip-compile. `extra` is such as "[compile]"."""
        if self.source is None:
            yield "# No source is named yet, so the jobs fail at once. Name one, as one of these lines:"
            yield f"# nxpipe{extra} @ https://HOST/nxpipe-VERSION-py3-none-any.whl#sha256=DIGEST"
            yield f"# nxpipe{extra} @ git+https://HOST/OWNER/nxpipe@COMMIT      with a second line: {_BACKEND}"
        elif self.source.startswith("git+"):
            yield f"nxpipe{extra} @ {self.source}"
            yield f"{_BACKEND}  # builds nxpipe from the commit"
        elif self.source.startswith("https:"):
            yield f"nxpipe{extra} @ {self.source}"
        else:
            yield f"--index-url {self.index}"
            yield self.source.replace("nxpipe", f"nxpipe{extra}", 1)


def origin(directory: Path) -> str | None:
    """OWNER/NAME of the git remote "origin" on github.com, without network access."""
    command = ["git", "-C", str(directory), "remote", "get-url", "origin"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # no git
        return None
    found = _REMOTE.fullmatch(done.stdout)
    return found[1] if found else None


def first_release(config: Config) -> str:
    """The steps from a repository with the files of `nxpipe init` to its first release."""
    assert config.release is not None
    ids = (
        ""
        if config.release.owner_id
        else f"set owner_id and repository_id ({ids_command(config.release.repository)}); "
    )
    return (
        f"For GitHub: {ids}write the locks of requirements/*.in, as their comments show; {deploy_command(config)}; "
        f"then run this script, which nxpipe infra github prints again.\n{setup_script(config)}"
    )


def ids_command(repository: str) -> str:
    """The command that prints the values of owner_id and repository_id."""
    return f"gh api repos/{repository} --jq '.owner.id, .id'"


def setup_script(config: Config) -> str:
    """A bash script; a repetition sets the same values again. A missing stack or output ends it."""
    if config.release is None:
        raise InputInvalid("nxpipe.toml has no [release]; add it with `repository`, `owner_id` and `repository_id`")
    return "\n".join(_lines(config, config.release)) + "\n"


def _lines(config: Config, release: Release) -> Iterator[str]:
    project = config.project
    yield "#!/usr/bin/env bash"
    yield f"# Sets up {release.repository} for the release workflow, after: {deploy_command(config)}"
    if release.owner_id is None:
        yield f"# [release] has no ids yet; set owner_id and repository_id first: {ids_command(release.repository)}"
    yield "set -euo pipefail"
    yield f'region="{project.region or "${AWS_REGION:?}"}"'
    yield _OUTPUT % '"$region"'
    yield from _variable(release, "AWS_REGION", '"$region"')
    if not config.store.url.startswith("s3://"):
        yield f"value=$(output {project.name}-storage BucketName)"
        yield from _variable(release, "NXPIPE_STORE_URL", '"s3://$value"')
    yield f"value=$(output {project.name}-release ReadRoleArn)"
    yield from _variable(release, "NXPIPE_READ_ROLE_ARN", '"$value"')
    outputs = {release.environment: "RoleArn"}
    outputs |= {name: f"Promote{name.title().replace('-', '')}RoleArn" for name in release.channels}
    for environment, output in outputs.items():
        yield ""
        yield from _environment(release, environment)
        yield f"value=$(output {project.name}-release {output})"
        yield from _variable(release, "NXPIPE_ROLE_ARN", '"$value"', f" --env {environment}")


def deploy_command(config: Config) -> str:
    return f"npx cdk deploy {config.project.name}-storage {config.project.name}-release"


def _variable(release: Release, name: str, value: str, scope: str = "") -> Iterator[str]:
    yield f"gh variable set {name} --repo {release.repository}{scope} --body {value}"


def _environment(release: Release, name: str) -> Iterator[str]:
    """Jobs of tags alone get an environment's role. For a release from a branch, add a rule for that branch."""
    path = f"repos/{release.repository}/environments/{name}"
    reviewers = ""
    if name == _APPROVED:
        yield "reviewer=$(gh api user --jq .id) # you; add others in the settings of the environment"
        reviewers = " -f 'reviewers[][type]=User' -F \"reviewers[][id]=$reviewer\""
    yield (
        f"gh api --silent --method PUT {path} -F 'deployment_branch_policy[protected_branches]=false'"
        f" -F 'deployment_branch_policy[custom_branch_policies]=true'{reviewers}"
    )
    yield f"gh api {path}/deployment-branch-policies --jq '.branch_policies[].name' | grep -xF 'v*' > /dev/null ||"
    yield f"  gh api --silent --method POST {path}/deployment-branch-policies -f 'name=v*' -f type=tag"
