"""Keys: Ed25519 in files, ECDSA P-256 in AWS KMS; verification needs the public half only."""

import os
import stat
from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_der_public_key,
    load_pem_private_key,
    load_pem_public_key,
)

from nxpipe.artifact_store.canonical import sha256_hex
from nxpipe.artifact_store.errors import StoreError

MAX_KEY_BYTES: Final = 16 * 1024
_KINDS: Final = "an Ed25519 key, or one of ECDSA on the curve P-256"

_Verifier: TypeAlias = Ed25519PublicKey | EllipticCurvePublicKey


class BadKey(StoreError):
    """A key that cannot be read, has an unsupported type, or is readable for other users."""


@dataclass(frozen=True)
class PublicKey:
    """A public key as DER SubjectPublicKeyInfo, the common format of both kinds."""

    der: bytes

    @classmethod
    def of(cls, key: object, where: str) -> "PublicKey":
        return cls(_known_kind(key, where).public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))

    @classmethod
    def from_der(cls, der: bytes, where: str) -> "PublicKey":
        try:
            return cls.of(load_der_public_key(der), where)
        except (ValueError, UnsupportedAlgorithm) as error:
            raise BadKey(f"{where} is not a public key; use {_KINDS}") from error

    @classmethod
    def from_file(cls, path: Path) -> "PublicKey":
        data = read_key_file(path)
        try:
            return cls.of(load_pem_public_key(data), str(path))
        except (ValueError, UnsupportedAlgorithm) as error:
            hint = "; it holds a private key, and the public key is in FILE.pub" if b"PRIVATE KEY" in data else ""
            raise BadKey(f"{path} holds no public key in PEM{hint}; use {_KINDS}") from error

    @cached_property
    def key_id(self) -> str:
        return sha256_hex(self.der)

    @property
    def pem(self) -> bytes:
        return self._key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    def proves(self, signature: bytes, message: bytes) -> bool:
        """True if the signature of exactly this message is valid."""
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
    """A private key that can sign without being exposed."""

    @property
    def public(self) -> PublicKey: ...

    def sign(self, message: bytes) -> bytes: ...


def read_key_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise BadKey(
            f"the key file {path} cannot be read: {error.strerror}; correct the path or its permissions"
        ) from error
    if len(data) > MAX_KEY_BYTES:
        raise BadKey(f"{path} has more than {MAX_KEY_BYTES} bytes, so it is not a key file; name another")
    return data


def as_base64(data: bytes) -> str:
    return b64encode(data).decode()


def from_base64(text: str) -> bytes | None:
    """The decoded bytes; None for any text but their canonical encoding."""
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
    raise BadKey(f"{where} holds an unsupported key; use {_KINDS}")


_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


@dataclass(frozen=True)
class KeyFile:
    """Signs with the key of a file."""

    _key: Ed25519PrivateKey
    public: PublicKey

    @classmethod
    def open(cls, path: Path) -> "KeyFile":
        data = read_key_file(path)
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & _OTHERS:
            raise BadKey(
                f"{path} is open to other users (mode {mode:04o}), who could sign with it; run: chmod 600 {path}"
            )
        try:
            key = load_pem_private_key(data, password=None)
        except TypeError as error:
            raise BadKey(f"{path} is encrypted, but passphrases are not supported; use a key in KMS") from error
        except (ValueError, UnsupportedAlgorithm) as error:
            raise BadKey(f"{path} holds no private key in PEM; create one with: nxpipe store keygen FILE") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise BadKey(f"{path} holds an unsupported private key; use an Ed25519 key")
        return cls(key, PublicKey.of(key.public_key(), str(path)))

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)


def public_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.pub")


def make_key_file(path: Path) -> PublicKey:
    """Create a key in a new file, readable only for this user from the start, and its public key beside it."""
    key = Ed25519PrivateKey.generate()
    _write_new(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    public = PublicKey.of(key.public_key(), str(path))
    write_public_key(public, public_path(path))
    return public


def write_public_key(public: PublicKey, path: Path) -> None:
    _write_new(path, public.pem, 0o644)


def _write_new(path: Path, data: bytes, mode: int) -> None:
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
    except OSError as error:
        raise BadKey(f"the key file {path} cannot be written: {error.strerror}; choose another path") from error
