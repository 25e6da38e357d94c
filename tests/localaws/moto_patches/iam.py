"""AWS managed policies. Moto parses all 1,500 of them at each reset; here they are parsed once.

Only attaching changes them, and each reset starts with fresh attachment counts.
"""

from typing import Any

from moto.iam.models import IAMBackend

from tests.localaws.moto_patches._around import around

_read: dict[tuple[str, str], list[Any]] = {}


def apply() -> None:
    around(IAMBackend, "_init_aws_policies", _policies)


def _policies(stock: Any, backend: IAMBackend) -> list[Any]:
    key = (backend.account_id, backend.region_name)
    if not _read.get(key):
        _read[key] = stock(backend)
    for entry in _read[key]:
        entry.attachment_count = 0
    return list(_read[key])
