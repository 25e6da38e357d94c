"""IAM roles of GitHub Actions jobs by OIDC: one for each environment of one repository, no stored key.

Jobs of the publishing environment publish, those of a channel's environment promote to it, pull requests only read.
GitHub's environment settings decide which branches and tags may use it and who approves: a token of a job that runs
in an environment names the environment, and no branch.
"""

from dataclasses import dataclass
from typing import Any, Final

from aws_cdk import CfnOutput, Duration, Stack, aws_iam
from constructs import Construct

from nxpipe.pipeline.config import Signing
from nxpipe.pipeline.config.cloud import Release
from nxpipe.stacks.handles import ReleaseHandle, StoreHandle
from nxpipe.stacks.iam import kms_key, knowing, promoting, publishing, reading, signing_with
from nxpipe.stacks.project import tag_project

_ISSUER: Final = "token.actions.githubusercontent.com"
_AUDIENCE: Final = "sts.amazonaws.com"
LONGEST_RELEASE: Final = Duration.hours(6)  # GitHub ends a job then


@dataclass(frozen=True)
class _Jobs:
    """`word` begins the names of their role, `subject` is what their tokens say beside the repository."""

    word: str
    subject: str
    does: str
    variable: str  # where GitHub keeps the role's name
    longest: Duration = LONGEST_RELEASE


def _in(environment: str, word: str, does: str) -> _Jobs:
    subject = f"environment:{environment}"
    return _Jobs(word, subject, does, f"NXPIPE_ROLE_ARN of the environment {environment}")


class ReleaseStack(Stack):
    """Roles that GitHub's word opens, and what each may do."""

    handle: ReleaseHandle

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        project: str,
        release: Release,
        store: StoreHandle,
        prefix: str,
        signing: Signing | None = None,
        **kwargs: Any,
    ) -> None:
        """`signing` names the keys: one for what is built, and one for each channel, which its jobs alone may use."""
        super().__init__(scope, id_, description=f"Releases of {project} from GitHub", **kwargs)
        self._provider, self._repository = self._provider_of(release), release.repository

        def signs(channel: str | None = None) -> list[aws_iam.PolicyStatement]:
            """With the key of this duty alone. Who promotes sees by the key of builds that they have signed."""
            if signing is None:
                return []
            builds, own = kms_key(signing.key), kms_key(signing.key_of(channel) if channel else signing.key)
            known = [key for key in dict.fromkeys((own, builds)) if key]
            return [*(signing_with(own) if own else []), *knowing(known)]

        publish = _in(release.environment, "", f"Publish artifacts of {project}")
        self.handle = ReleaseHandle(role=self._role(publish, [*publishing(store, prefix), *signs()]))
        variable = "NXPIPE_READ_ROLE_ARN of the repository"
        plan = _Jobs("Read", "pull_request", f"Read artifacts of {project}", variable, Duration.hours(1))
        self._role(plan, reading(store, prefix))
        for channel in release.channels:
            word = f"Promote{channel.title().replace('-', '')}"
            promote = _in(channel, word, f"Promote artifacts of {project} to {channel}")
            self._role(promote, [*reading(store, prefix), *promoting(store, prefix, channel), *signs(channel)])
        tag_project(self, project)

    def _role(self, jobs: _Jobs, statements: list[aws_iam.PolicyStatement]) -> aws_iam.Role:
        said = {f"{_ISSUER}:aud": _AUDIENCE, f"{_ISSUER}:sub": f"repo:{self._repository}:{jobs.subject}"}
        role = aws_iam.Role(
            self,
            f"{jobs.word}Role",
            description=f"{jobs.does}, from {self._repository}",
            path="/nxpipe/",
            max_session_duration=jobs.longest,
            assumed_by=aws_iam.WebIdentityPrincipal(self._provider, {"StringEquals": said}),
        )
        aws_iam.ManagedPolicy(
            self,
            f"{jobs.word}Policy",
            description=jobs.does,
            path="/nxpipe/",
            roles=[role],
            statements=statements,
        )
        CfnOutput(self, f"{jobs.word}RoleArn", value=role.role_arn, description=f"The variable {jobs.variable}")
        return role

    def _provider_of(self, release: Release) -> str:
        """GitHub's provider: an account has room for one, so one that is there already is used.

        It has no thumbprints: AWS trusts GitHub's certificate by its own authorities.
        """
        if release.provider is not None:
            return release.provider
        made = aws_iam.CfnOIDCProvider(self, "GitHub", url=f"https://{_ISSUER}", client_id_list=[_AUDIENCE])
        arn: str = made.attr_arn
        return arn
