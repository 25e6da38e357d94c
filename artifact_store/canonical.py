"""Canonical JSON and SHA-256: one byte form of each document, because its digest is its name."""

import hashlib
import json
import math
from collections.abc import Iterable
from typing import Final, NoReturn

from nxpipe.artifact_store.errors import InvalidDocument


def sha256_hex(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_of_chunks(chunks: Iterable[bytes]) -> str:
    """The digest of bytes that need not fit in memory."""
    hasher = hashlib.sha256()
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.hexdigest()


MAX_DEPTH: Final = 64
MAX_INTEGER: Final = 2**53 - 1  # the largest that every JSON reader, JavaScript's included, holds exactly


def canonical_json(value: object) -> bytes:
    """The canonical bytes of a value made of dict, list, tuple, str, int, float, bool and None."""
    _check(value, depth=0)
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False)
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidDocument(
            f"a string holds the lone surrogate U+{ord(text[error.start]):04X}, which UTF-8 cannot encode"
        ) from None


def parse_canonical_json(data: bytes, *, limit: int) -> object:
    """The value of canonical bytes. Other bytes, and more than `limit` bytes, raise InvalidDocument."""
    if len(data) > limit:
        raise InvalidDocument(f"it has {len(data)} bytes, and at most {limit} are allowed")
    value = _parse(data)
    if canonical_json(value) != data:
        raise InvalidDocument("it is JSON, but not in the canonical form")
    return value


def _parse(data: bytes) -> object:
    try:
        value: object = json.loads(
            data.decode(),
            object_pairs_hook=_object_without_duplicates,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_refuse_constant,
        )
    except UnicodeDecodeError as error:
        raise InvalidDocument(f"it is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from None
    except json.JSONDecodeError as error:
        raise InvalidDocument(f"it is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _too_deep() from None
    return value


def _check(value: object, depth: int) -> None:
    """Refuse values that json.dumps would coerce, or whose JSON form depends on the reader."""
    if depth == MAX_DEPTH and isinstance(value, list | tuple | dict):
        raise _too_deep()
    match value:
        case None | bool() | str():
            return
        case int() | float():
            _check_number(value)
        case list() | tuple():
            for item in value:
                _check(item, depth + 1)
        case dict():
            for key, item in value.items():
                if not isinstance(key, str):
                    raise InvalidDocument(f"a key of an object is {type(key).__name__}, not text")
                _check(item, depth + 1)
        case _:
            raise InvalidDocument(f"a value of type {type(value).__name__} has no JSON form")


def _check_number(value: int | float) -> None:
    if isinstance(value, int):
        if abs(value) > MAX_INTEGER:
            raise _too_wide(f"of {value.bit_length()} bits")
    elif not math.isfinite(value):
        raise InvalidDocument(f"{value} is not a number in JSON")


def _object_without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        keys = [key for key, _ in pairs]
        duplicate = next(key for key in keys if keys.count(key) > 1)
        raise InvalidDocument(f"an object has the key {duplicate!r} twice")
    return fields


def _integer(text: str) -> int:
    if len(text) > len(str(-MAX_INTEGER)):
        raise _too_wide(f"of {len(text)} characters")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise InvalidDocument(f"the number {text[:20]} is too large for a double")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidDocument(f"{name} is not a number in JSON")


def _too_deep() -> InvalidDocument:
    return InvalidDocument(f"it is nested more than {MAX_DEPTH} levels deep")


def _too_wide(width: str) -> InvalidDocument:
    return InvalidDocument(f"an integer {width} is beyond 2^53 - 1; write it as text")


def pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """DSSE's PAE, version 1."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
