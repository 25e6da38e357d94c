"""Asking AWS: clients of one region, and one sentence for whatever goes wrong."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from pipeline.errors import AwsError


def client(service: str, region: str | None = None) -> Any:
    """Credentials come from where the AWS SDK always looks, and so does the region if none is given."""
    from botocore.config import Config
    from botocore.session import Session

    session = Session()
    session.register_component("data_loader", _descriptions())
    patience = Config(connect_timeout=5, read_timeout=30, retries={"mode": "standard", "total_max_attempts": 5})
    with asking(f"ask {service}"):
        return session.create_client(service, region_name=region, config=patience)


@cache
def _descriptions() -> Any:
    """Of services and endpoints: reading them takes longer than a call, and the files do not change."""
    from botocore.loaders import create_loader

    return create_loader()


@contextmanager
def asking(what: str) -> Iterator[None]:
    """Turn the SDK's errors into ours; `what` continues "AWS was to"."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except (BotoCoreError, ClientError) as error:
        raise AwsError(f"AWS was to {what}, and did not: {str(error).rstrip('.')}") from error
