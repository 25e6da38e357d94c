"""Installation of our CloudFormation in place of moto's, in this process."""

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
    """Replace moto's CloudFormation for both of its modes: decorator in the process, and server."""
    moto.cloudformation.cloudformation_backends = models.cloudformation_backends
    moto.cloudformation.models.cloudformation_backends = models.cloudformation_backends
    moto.cloudformation.urls.url_paths = urls.url_paths
    default_user_config["iam"] = {"load_aws_managed_policies": True}
    default_user_config["stepfunctions"] = {"execute_state_machine": True}
    know_all()
    apply_all()
    share_descriptions()
