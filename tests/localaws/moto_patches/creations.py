"""Creating what must not be there yet. Of all who try at once, S3 lets one win; moto looks first and writes then, so
that another one may write in between.
"""

from functools import cache
from threading import Lock
from typing import Any, Final

from moto.s3.responses import S3Response

from tests.localaws.moto_patches._around import around

_ONE_AT_A_TIME: Final = Lock()


@cache
def mend() -> None:
    around(S3Response, "put_object", _alone)
    around(S3Response, "_key_response_post", _alone)  # which completes uploads in parts


def _alone(stock: Any, response: Any, *args: Any, **kwargs: Any) -> Any:
    with _ONE_AT_A_TIME:
        return stock(response, *args, **kwargs)
