"""Asking AWS: clients of one region, and one sentence for whatever goes wrong."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, Literal

from nxpipe.pipeline.util.errors import AwsError

_TOO_MANY: Final = ("RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequestsException")


def client(service: str, region: str | None = None, *, retries: Literal["standard", "adaptive"] = "standard") -> Any:
    """Credentials come from where the AWS SDK always looks, and so does the region if none is given."""
    from botocore.config import Config
    from botocore.session import Session

    session = Session()
    session.register_component("data_loader", _descriptions())
    patience = Config(connect_timeout=5, read_timeout=30, retries={"mode": retries, "total_max_attempts": 5})
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


def is_no_answer(error: AwsError) -> bool:
    """A fault of the network or of a server, or too many questions: not what is wrong with one, or with who asks."""
    from botocore import exceptions as sdk

    cause = error.__cause__
    if isinstance(cause, sdk.ClientError):
        status = cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status >= 500 or cause.response.get("Error", {}).get("Code") in _TOO_MANY
    return isinstance(cause, sdk.ConnectionError | sdk.HTTPClientError)
