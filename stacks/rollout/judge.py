"""The judge as a Lambda function: `nxpipe.pipeline.canary` in an archive whose bytes depend on its source alone."""

import tempfile
import zipfile
from pathlib import Path
from typing import Final

from aws_cdk import aws_iam, aws_lambda, aws_s3_assets
from constructs import Construct

from nxpipe.stacks.project import kept_log

_ROOT: Final = Path(__file__).parents[3]  # the folder that holds the package nxpipe
_PACKAGE: Final = "nxpipe/pipeline"
RUNTIME: Final = "python3.13"
_LONG_AGO: Final = (1980, 1, 1, 0, 0, 0)


class Judge(Construct):
    """It may write its log, and nothing else: whatever it is told, it can only answer."""

    def __init__(self, scope: Construct, id_: str, *, name: str) -> None:
        super().__init__(scope, id_)
        logs = kept_log(self, "Logs")
        role = aws_iam.Role(
            self,
            "Role",
            description=f"The judge {name}",
            path="/nxpipe/",
            assumed_by=aws_iam.ServicePrincipal("lambda.amazonaws.com"),
        )
        logs.grant_write(role)
        code = aws_s3_assets.Asset(self, "Code", path=str(archive()))
        made = aws_lambda.CfnFunction(
            self,
            "Function",
            function_name=name,
            description="Says what the counts of a rollout mean",
            runtime=RUNTIME,
            architectures=["arm64"],
            handler="nxpipe.pipeline.canary.handler.handle",
            code=aws_lambda.CfnFunction.CodeProperty(s3_bucket=code.s3_bucket_name, s3_key=code.s3_object_key),
            role=role.role_arn,
            logging_config=aws_lambda.CfnFunction.LoggingConfigProperty(log_group=logs.log_group_name),
            memory_size=512,
            timeout=20,
        )
        self.arn: str = made.attr_arn


def archive() -> Path:
    """Not compressed: what a compressor makes of a text differs from one version of it to the next."""
    path = Path(tempfile.mkdtemp(), "judge.zip")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as packed:
        for source in [_ROOT / _PACKAGE / "__init__.py", *sorted((_ROOT / _PACKAGE / "canary").glob("*.py"))]:
            entry = zipfile.ZipInfo(str(source.relative_to(_ROOT)), _LONG_AGO)
            entry.external_attr = 0o644 << 16
            packed.writestr(entry, source.read_bytes())
    return path
