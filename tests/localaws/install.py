"""Puts our CloudFormation in moto's place, in this process."""

from functools import cache
from typing import Any, Final

import moto.cloudformation
import moto.cloudformation.models
import moto.cloudformation.urls
from botocore.loaders import Loader
from moto.core.config import default_user_config

from tests.localaws.formation import models, urls
from tests.localaws.moto_patches import apply_all
from tests.localaws.moto_patches._around import around
from tests.localaws.providers import know_all

_READ: Final[dict[Any, Any]] = {}


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
    around(Loader, "__init__", _share)


def _share(stock: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
    """Each account that moto makes begins a session of its own, and each session would read the descriptions of the
    services again: a third of a test's time."""
    stock(loader, *args, **kwargs)
    loader._cache = _READ
