"""Releases: jobs of one GitHub repository, in one of its environments, may publish. No key is stored anywhere.

Which branches and tags may use the environment, and who must approve, is kept by GitHub with the environment: a token
of a job that runs in one names the environment, and no branch.
"""

from typing import Any, Final

from aws_cdk import CfnOutput, Duration, Stack, aws_iam
from constructs import Construct

from pipeline.config.cloud import Release
from stacks.handles import StoreHandle
from stacks.project_tag import tag_project
from stacks.publishing import publishing, signing

_ISSUER: Final = "token.actions.githubusercontent.com"
_AUDIENCE: Final = "sts.amazonaws.com"
LONGEST_RELEASE: Final = Duration.hours(6)  # GitHub ends a job then


class ReleaseStack(Stack):
    """A role that GitHub's word opens, and what it may do."""

    def __init__(
        self,
        scope: Construct,
        id_: str,
        *,
        project: str,
        release: Release,
        store: StoreHandle,
        prefix: str,
        signing_key: str | None = None,
        **kwargs: Any,
    ) -> None:
        """`signing_key` is the ARN of a key in KMS, if that is what signs."""
        super().__init__(scope, id_, description=f"Releases of {project} from GitHub", **kwargs)
        role = self._role(project, release)
        aws_iam.ManagedPolicy(
            self,
            "Publishing",
            description=f"Publish artifacts of {project}",
            path="/nxpipe/",
            roles=[role],
            statements=[*publishing(store, prefix), *(signing(signing_key) if signing_key else [])],
        )
        tag_project(self, project)
        CfnOutput(self, "RoleArn", value=role.role_arn, description="The variable NXPIPE_ROLE_ARN of the repository")

    def _role(self, project: str, release: Release) -> aws_iam.Role:
        said = {
            f"{_ISSUER}:aud": _AUDIENCE,
            f"{_ISSUER}:sub": f"repo:{release.repository}:environment:{release.environment}",
        }
        return aws_iam.Role(
            self,
            "Role",
            description=f"Taken by releases of {project} in {release.repository}",
            path="/nxpipe/",
            max_session_duration=LONGEST_RELEASE,
            assumed_by=aws_iam.WebIdentityPrincipal(self._provider(release), {"StringEquals": said}),
        )

    def _provider(self, release: Release) -> str:
        """GitHub's provider: an account has room for one, so one that is there already is used.

        It has no thumbprints: AWS trusts GitHub's certificate by its own authorities.
        """
        if release.provider is not None:
            return release.provider
        made = aws_iam.CfnOIDCProvider(self, "GitHub", url=f"https://{_ISSUER}", client_id_list=[_AUDIENCE])
        arn: str = made.attr_arn
        return arn
