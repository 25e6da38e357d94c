"""Ed25519 keys in files: the private half in PKCS #8, for its owner's eyes only, the public half beside it."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from nxpipe.artifact_store.trust.keys import BadKey, PublicKey, read_key_file

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
                f"{path} is open to other users (mode {mode:04o}), and signs for whoever reads it; chmod 600 it"
            )
        try:
            key = load_pem_private_key(data, password=None)
        except TypeError as error:
            raise BadKey(f"{path} is encrypted, and nobody can be asked for its passphrase; keep it in KMS") from error
        except (ValueError, UnsupportedAlgorithm) as error:
            raise BadKey(f"{path} holds no private key in PEM; make one with: nxpipe store keygen FILE") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise BadKey(f"{path} holds a private key of another kind; it should be an Ed25519 key")
        return cls(key, PublicKey.of(key.public_key(), str(path)))

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)


def public_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.pub")


def make_key_file(path: Path) -> PublicKey:
    """A new key in a new file, which nobody else may read for even a moment, and its public half beside it."""
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
