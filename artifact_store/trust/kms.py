"""AWS KMS signing keys: the private half never leaves KMS."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final

from botocore.exceptions import BotoCoreError, ClientError
from botocore.session import Session

from nxpipe.artifact_store.errors import StoreUnavailable
from nxpipe.artifact_store.trust.keys import BadKey, PublicKey

ALGORITHM: Final = "ECDSA_SHA_256"
MAX_RAW: Final = 4096
_NEEDED: Final = "create one with key spec ECC_NIST_P256 and usage SIGN_VERIFY"


@dataclass(frozen=True)
class KmsKey:
    """Signs with an asymmetric key of KMS."""

    arn: str
    _client: Any = field(repr=False, compare=False)

    @classmethod
    def open(cls, arn: str) -> "KmsKey":
        """A signing key by ARN; sends no request before the first use."""
        try:
            return cls(arn, Session().create_client("kms", region_name=arn.split(":")[3]))
        except BotoCoreError as error:
            raise _unavailable(arn, error) from error

    @cached_property
    def public(self) -> PublicKey:
        with self._errors():
            answer = self._client.get_public_key(KeyId=self.arn)
        if ALGORITHM not in answer.get("SigningAlgorithms", ()):
            raise BadKey(f"the KMS key {self.arn} cannot sign with {ALGORITHM}; {_NEEDED}")
        return PublicKey.from_der(answer["PublicKey"], f"the KMS key {self.arn}")

    def sign(self, message: bytes) -> bytes:
        # A message beyond KMS's limit is sent as its digest.
        kind, body = ("RAW", message) if len(message) <= MAX_RAW else ("DIGEST", hashlib.sha256(message).digest())
        with self._errors():
            answer = self._client.sign(KeyId=self.arn, Message=body, MessageType=kind, SigningAlgorithm=ALGORITHM)
        return bytes(answer["Signature"])

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (BotoCoreError, ClientError) as error:
            raise _unavailable(self.arn, error) from error


def _unavailable(arn: str, error: Exception) -> StoreUnavailable:
    reason = " ".join(str(error).split()).rstrip(".")
    return StoreUnavailable(
        f"the KMS key {arn} cannot be used: {reason}; check the ARN and the credentials, and allow this identity "
        "kms:GetPublicKey and kms:Sign on it"
    )
