"""AWS's own policies. Moto reads all of them, a thousand and a half, whenever its state is cleared; we read them once.

Nobody changes them but by attaching them, which is counted from nothing in each state.
"""

from typing import Any

from moto.iam.models import IAMBackend

from tests.localaws.moto_patches._around import around

_read: dict[tuple[str, str], list[Any]] = {}


def mend() -> None:
    around(IAMBackend, "_init_aws_policies", _policies)


def _policies(stock: Any, backend: IAMBackend) -> list[Any]:
    key = (backend.account_id, backend.region_name)
    if not _read.get(key):
        _read[key] = stock(backend)
    for one in _read[key]:
        one.attachment_count = 0
    return list(_read[key])
