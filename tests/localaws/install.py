"""Puts our CloudFormation in moto's place, in this process."""

from functools import cache

import moto.cloudformation
import moto.cloudformation.models
import moto.cloudformation.urls
from moto.core.config import default_user_config

from tests.botocore_descriptions import share_descriptions
from tests.localaws.formation import models, urls
from tests.localaws.moto_patches import apply_all
from tests.localaws.providers import know_all


@cache
def install() -> None:
    """For both ways of running moto: within a test's process, and as a server."""
    moto.cloudformation.cloudformation_backends = models.cloudformation_backends
    moto.cloudformation.models.cloudformation_backends = models.cloudformation_backends
    moto.cloudformation.urls.url_paths = urls.url_paths
    default_user_config["iam"] = {"load_aws_managed_policies": True}
    default_user_config["stepfunctions"] = {"execute_state_machine": True}
    know_all()
    apply_all()
    share_descriptions()
