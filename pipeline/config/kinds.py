"""Value types that several tables share: names, durations, sizes, addresses, ARNs."""

import json
import re
from datetime import date, timedelta
from ipaddress import ip_network
from itertools import pairwise
from typing import Annotated, Any, Final

from pydantic import Field

from nxpipe.pipeline.config.schema import Form, ListRule, text

Slug = Annotated[
    str,
    text(
        "[a-z](?:-?[a-z0-9])*",
        "a name of at most 40 lower-case letters, digits and single hyphens that begins with a letter",
        longest=40,
    ),
]
# Policies and state machines name ARNs and endpoints of the partition `aws`.
_OTHER_PARTITIONS: Final = "cn-|us-gov-|us-iso|eu-iso"
Region = Annotated[
    str,
    text(
        f"(?!{_OTHER_PARTITIONS})[a-z]{{2}}(?:-[a-z]+)+-[0-9]",
        'an AWS region such as "us-east-2"; those of China, GovCloud and isolated partitions are not supported',
        longest=32,
    ),
]
Account = Annotated[str, text("[0-9]{12}", 'an AWS account: 12 digits in quotes, such as "123456789012"')]
Folder = Annotated[str, text(r"[^\x00-\x1f]*[^\x00-\x20]", "the path of a folder", longest=1024)]

_BUCKET = "[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
StoreUrl = Annotated[
    str,
    text(
        rf"file://[^\x00-\x20?#]+|s3://{_BUCKET}(?:/[A-Za-z0-9!_.*'()/=-]*)?",
        'the URL of a store: "file://FOLDER" or "s3://BUCKET/PREFIX"',
        longest=1024,
    ),
]

S3Url = Annotated[
    str, text(rf"s3://{_BUCKET}(?:/[A-Za-z0-9!_.*'()/=-]*)?", 'the URL of a prefix: "s3://BUCKET/PREFIX"', longest=1024)
]

_NAME = "[A-Za-z0-9][A-Za-z0-9_.-]*"
HubId = Annotated[
    str, text(f"{_NAME}(?:/{_NAME})?", 'a hub id such as "bert-base-uncased" or "OWNER/NAME"', longest=193)
]
Revision = Annotated[str, text("[A-Za-z0-9][A-Za-z0-9_./-]*", "a branch, tag or commit of the hub repository")]
Weights = Annotated[
    str,
    text(
        r"hub|random:[0-9]{1,18}|[^\x00-\x1f]*/[^\x00-\x1f]*",
        '"hub", "random:SEED" with a whole number, or a folder written with a slash, such as "./weights"',
        longest=1024,
    ),
]
Alarm = Annotated[str, text("[!-~](?:[ -~]*[!-~])?", "the name of a CloudWatch alarm")]
Vpc = Annotated[str, text("vpc-[0-9a-f]{8,17}", 'the id of a VPC, such as "vpc-0a1b2c3d4e5f60718"')]
Subnet = Annotated[str, text("subnet-[0-9a-f]{8,17}", 'the id of a subnet, such as "subnet-0a1b2c3d4e5f60718"')]
Zone = Annotated[str, text("[a-z]{2}(?:-[a-z]+)+-[0-9][a-z]", 'an availability zone such as "us-east-2a"', longest=32)]
_NUMBER = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_ADDRESS = rf"{_NUMBER}(?:\.{_NUMBER}){{3}}"


def _read_block(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(f"{_ADDRESS}/[0-9]{{1,2}}", value):
        raise ValueError
    return str(ip_network(value))  # refuses host bits


Cidr = Annotated[
    str,
    Form(
        'a block of IPv4 addresses such as "10.20.0.0/16"',
        _read_block,
        schema={"type": "string", "pattern": f"^{_ADDRESS}/[0-9]{{1,2}}$"},
    ),
]
Certificate = Annotated[
    str,
    text(
        r"arn:aws[a-z-]*:acm:[a-z0-9-]+:[0-9]{12}:certificate/[A-Za-z0-9-]+",
        "the ARN of a certificate in ACM",
        longest=1024,
    ),
]
Sdk = Annotated[str, text("[0-9]+(?:\\.[0-9]+){1,3}", 'a version of the Neuron SDK such as "2.32.0"', longest=32)]
Image = Annotated[
    str,
    text(
        r"[a-z0-9.-]+(?::[0-9]+)?(?:/[a-z0-9._-]+)+@sha256:[0-9a-f]{64}",
        'an image with its digest, such as "123456789012.dkr.ecr.us-east-2.amazonaws.com/train@sha256:..."',
        longest=1024,
    ),
]
EcrImage = Annotated[
    str,
    text(
        r"[0-9]{12}\.dkr\.ecr\.[a-z0-9-]+\.amazonaws\.com(?:\.cn)?/[a-z0-9._/-]+@sha256:[0-9a-f]{64}",
        'an image in ECR with its digest, such as "123456789012.dkr.ecr.us-east-2.amazonaws.com/serve@sha256:..."',
        longest=1024,
    ),
]
Email = Annotated[str, text(r"[^@\s]+@[^@\s]+\.[^@\s]+", "an e-mail address")]
ReservationId = Annotated[str, text("cr-[0-9a-f]{8,17}", 'the id of a reservation, such as "cr-0a1b2c3d4e5f60718"')]
OidcProvider = Annotated[
    str,
    text(
        r"arn:aws[a-z-]*:iam::[0-9]{12}:oidc-provider/token\.actions\.githubusercontent\.com",
        "the ARN of GitHub's OpenID Connect provider",
    ),
]
KmsKey = Annotated[
    str,
    text(
        r"arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:(?:key|alias)/[A-Za-z0-9/_-]+", "the ARN of a KMS key", longest=1024
    ),
]
SigningKey = Annotated[
    str,
    text(
        r"file:[^\x00-\x20]+|kms:arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:(?:key|alias)/[A-Za-z0-9/_-]+",
        'a signing key: "file:PATH" or "kms:ARN"',
        longest=1024,
    ),
]
PublicKeyFile = Annotated[str, text(r"file:[^\x00-\x20]+", 'a public key: "file:PATH"', longest=1024)]

_LONGEST_JSON: Final = 4096


def _read_json(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_JSON:
        raise ValueError
    try:
        json.loads(value)
    except RecursionError as nested:
        raise ValueError from nested
    return value


# As text: TOML has no null, and the server gets the very bytes.
JsonText = Annotated[
    str,
    Form(
        f"JSON as text of at most {_LONGEST_JSON} characters",
        _read_json,
        schema={"type": "string", "maxLength": _LONGEST_JSON},
    ),
]

_DEGREES: Final = (1, 2, 4, 8, 16, 24, 32, 64)


def _read_degree(value: Any) -> int:
    if type(value) is not int or value not in _DEGREES:
        raise ValueError
    return value


Degree = Annotated[
    int, Form("1, 2, 4, 8, 16, 24, 32 or 64", _read_degree, schema={"type": "integer", "enum": list(_DEGREES)})
]


def _read_parallelism(value: Any) -> int | str:
    if value == "auto" or (type(value) is int and 1 <= value <= 256):
        return value  # type: ignore[no-any-return]
    raise ValueError


Parallelism = Annotated[
    int | str,
    Form(
        'a whole number from 1 to 256, or "auto"',
        _read_parallelism,
        schema={"anyOf": [{"type": "integer", "minimum": 1, "maximum": 256}, {"const": "auto"}]},
    ),
]

_UNITS: Final = {
    "d": timedelta(days=1),
    "h": timedelta(hours=1),
    "m": timedelta(minutes=1),
    "s": timedelta(seconds=1),
    "ms": timedelta(milliseconds=1),
}


def parse_duration(value: Any) -> timedelta:
    match = re.fullmatch("([0-9]{1,9})(ms|[smhd])", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError
    return int(match[1]) * _UNITS[match[2]]


def write_duration(value: timedelta) -> str:
    """The duration in the largest unit that divides it."""
    unit, length = next((unit, length) for unit, length in _UNITS.items() if not value % length)
    return f"{value // length}{unit}"


def duration(shortest: str, longest: str) -> Form:
    """A duration within limits, as in "90s" or "10m"."""
    least, most = parse_duration(shortest), parse_duration(longest)

    def read(value: object) -> timedelta:
        length = parse_duration(value)
        if not least <= length <= most:
            raise ValueError
        return length

    allowed = f'a duration from "{shortest}" to "{longest}": a whole number and one of the units ms, s, m, h, d'
    return Form(allowed, read, write_duration, {"type": "string", "pattern": "^[0-9]{1,9}(?:ms|[smhd])$"})


def _read_day(value: Any) -> date:
    if isinstance(value, str):
        return date.fromisoformat(value)
    if type(value) is not date:
        raise ValueError
    return value


# A calendar date without a time zone.
Day = Annotated[
    date,
    Form("a day such as 2027-06-30", _read_day, lambda day: day.isoformat(), {"type": "string", "format": "date"}),
]

_SIZES: Final = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20}


def parse_size(value: Any) -> int:
    match = re.fullmatch("([1-9][0-9]{0,5})([MGT]iB)", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError
    return int(match[1]) * _SIZES[match[2]]


def _write_size(value: int) -> str:
    unit, bytes_ = next((unit, bytes_) for unit, bytes_ in _SIZES.items() if value % bytes_ == 0)
    return f"{value // bytes_}{unit}"


# In bytes.
Size = Annotated[
    int,
    Form(
        'a size: a whole number and one of the units MiB, GiB, TiB, such as "20GiB"',
        parse_size,
        _write_size,
        {"type": "string", "pattern": "^[1-9][0-9]{0,5}[MGT]iB$"},
    ),
]

# TOML has lists; the frozen configuration has tuples.
LIST: Final = Field(strict=False, min_length=1, max_length=64)
MAYBE_EMPTY: Final = Field(strict=False, max_length=64)
JUST_ONE: Final = Field(strict=False, min_length=1, max_length=1)
ASCENDING: Final = ListRule("in ascending order without repeats", lambda items: all(a < b for a, b in pairwise(items)))
DISTINCT: Final = ListRule("without repeats", lambda items: len(set(items)) == len(items))
