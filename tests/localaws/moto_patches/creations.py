"""Conditional creation in S3. Of simultaneous requests one succeeds; moto checks and writes in two steps, so that
several can succeed."""

from functools import cache
from threading import Lock
from typing import Any, Final

from moto.s3.responses import S3Response

from tests.localaws.moto_patches._around import around

_ONE_AT_A_TIME: Final = Lock()


@cache
def apply() -> None:
    around(S3Response, "put_object", _alone)
    around(S3Response, "_key_response_post", _alone)  # CompleteMultipartUpload


def _alone(stock: Any, response: Any, *args: Any, **kwargs: Any) -> Any:
    with _ONE_AT_A_TIME:
        return stock(response, *args, **kwargs)
