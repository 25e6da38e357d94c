"""Public keys and what they prove: Ed25519, and ECDSA on P-256 because that is what a KMS key offers."""

from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_der_public_key,
    load_pem_public_key,
)

from nxpipe.artifact_store.digest import sha256_hex
from nxpipe.artifact_store.errors import StoreError

MAX_KEY_BYTES: Final = 16 * 1024
_KINDS: Final = "an Ed25519 key, or one of ECDSA on the curve P-256"

_Verifier: TypeAlias = Ed25519PublicKey | EllipticCurvePublicKey


class BadKey(StoreError):
    """A key that cannot be read, is of another kind, or is not kept safe."""


@dataclass(frozen=True)
class PublicKey:
    """By its DER SubjectPublicKeyInfo, the one form that both kinds have in common."""

    der: bytes

    @classmethod
    def of(cls, key: object, where: str) -> "PublicKey":
        return cls(_known_kind(key, where).public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))

    @classmethod
    def from_der(cls, der: bytes, where: str) -> "PublicKey":
        try:
            return cls.of(load_der_public_key(der), where)
        except (ValueError, UnsupportedAlgorithm) as error:
            raise BadKey(f"{where} is no public key; it should be {_KINDS}") from error

    @classmethod
    def from_file(cls, path: Path) -> "PublicKey":
        data = read_key_file(path)
        try:
            return cls.of(load_pem_public_key(data), str(path))
        except (ValueError, UnsupportedAlgorithm) as error:
            hint = "; it holds a private key, and the public one lies beside it" if b"PRIVATE KEY" in data else ""
            raise BadKey(f"{path} holds no public key in PEM{hint}; it should be {_KINDS}") from error

    @cached_property
    def key_id(self) -> str:
        return sha256_hex(self.der)

    @property
    def pem(self) -> bytes:
        return self._key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def proves(self, signature: bytes, message: bytes) -> bool:
        """Whether the holder of the private key signed exactly this message."""
        try:
            if isinstance(self._key, Ed25519PublicKey):
                self._key.verify(signature, message)
            else:
                self._key.verify(signature, message, ECDSA(SHA256()))
        except InvalidSignature:
            return False
        return True

    @cached_property
    def _key(self) -> _Verifier:
        return _known_kind(load_der_public_key(self.der), self.key_id)


class Signer(Protocol):
    """Whoever can use a private key, without showing it."""

    @property
    def public(self) -> PublicKey: ...

    def sign(self, message: bytes) -> bytes: ...


def read_key_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise BadKey(
            f"the key file {path} cannot be read: {error.strerror}; mend the path or its permissions"
        ) from error
    if len(data) > MAX_KEY_BYTES:
        raise BadKey(f"{path} has more than {MAX_KEY_BYTES} bytes, so it is no key file; name another")
    return data


def as_base64(data: bytes) -> str:
    return b64encode(data).decode()


def from_base64(text: str) -> bytes | None:
    """None for anything but the one spelling that the bytes have."""
    try:
        data = b64decode(text, validate=True)
    except (NotBase64, ValueError):
        return None
    return data if as_base64(data) == text else None


def _known_kind(key: object, where: str) -> _Verifier:
    if isinstance(key, Ed25519PublicKey):
        return key
    if isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1):
        return key
    raise BadKey(f"{where} holds a key of another kind; it should be {_KINDS}")
