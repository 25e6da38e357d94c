"""Clients of AWS services for one region; SDK errors become one sentence in an `AwsError`."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, Literal

from nxpipe.pipeline.util.errors import AwsError

_THROTTLING: Final = ("RequestLimitExceeded", "Throttling", "ThrottlingException", "TooManyRequestsException")
_DENIED: Final = ("AccessDenied", "AccessDeniedException", "AuthorizationError", "UnauthorizedOperation")


def client(service: str, region: str | None = None, *, retries: Literal["standard", "adaptive"] = "standard") -> Any:
    """A client with the SDK's default credentials, and its default region if none is given."""
    from botocore.config import Config
    from botocore.session import Session

    session = Session()
    session.register_component("data_loader", _descriptions())
    config = Config(connect_timeout=5, read_timeout=30, retries={"mode": retries, "total_max_attempts": 5})
    with convert_sdk_errors(f"create a client for {service}"):
        return session.create_client(service, region_name=region, config=config)


@cache
def _descriptions() -> Any:
    """The SDK's service descriptions, loaded once: reading the files takes longer than a call."""
    from botocore.loaders import create_loader

    return create_loader()


def regions_of_sdk() -> list[str]:
    """The regions that the SDK knows, without a call; none if it is not installed."""
    try:
        from botocore.session import Session
    except ImportError:
        return []
    return [*Session().get_available_regions("ec2")]


@contextmanager
def convert_sdk_errors(action: str) -> Iterator[None]:
    """Convert SDK errors to AwsError; `action` is an infinitive phrase, as in "list the queues"."""
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError

    try:
        yield
    except NoCredentialsError as error:
        raise AwsError(f"no AWS credentials found, which it takes to {action}; set AWS_PROFILE, or log in") from error
    except NoRegionError as error:
        raise AwsError(
            f"no AWS region is set, which it takes to {action}; set [project] region in nxpipe.toml, or AWS_REGION"
        ) from error
    except (BotoCoreError, ClientError) as error:
        raise AwsError(f"AWS: cannot {action}: {str(error).rstrip('.')}") from error


def error_code(error: AwsError) -> str:
    """AWS's code of the error, such as ParameterNotFound; empty if AWS sent no answer."""
    response: dict[str, Any] = getattr(error.__cause__, "response", None) or {}
    return str(response.get("Error", {}).get("Code", ""))


def is_denied(error: AwsError) -> bool:
    """True if the identity lacks the permission for the call."""
    return error_code(error) in _DENIED


def is_transient(error: AwsError) -> bool:
    """True for network errors, server errors and throttling, after which a retry may succeed."""
    from botocore import exceptions as sdk

    cause = error.__cause__
    if isinstance(cause, sdk.ClientError):
        status = cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status >= 500 or cause.response.get("Error", {}).get("Code") in _THROTTLING
    return isinstance(cause, sdk.ConnectionError | sdk.HTTPClientError)
