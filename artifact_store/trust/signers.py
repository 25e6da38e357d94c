"""Signing keys by name: `file:PATH` or `kms:ARN`."""

from pathlib import Path

from nxpipe.artifact_store.trust.keys import BadKey, Signer


def open_signer(key: str, folder: Path) -> Signer:
    """A relative path starts at `folder`."""
    kind, _, name = key.partition(":")
    if kind == "file" and name:
        from nxpipe.artifact_store.trust.keys import KeyFile

        try:
            return KeyFile.open(folder / Path(name).expanduser())
        except RuntimeError as error:
            raise BadKey(f"{key!r} starts with ~, and no such home folder is known") from error
    if kind == "kms" and name.startswith("arn:") and name.count(":") >= 5:
        from nxpipe.artifact_store.trust.kms import KmsKey  # the AWS SDK takes a while to import

        return KmsKey.open(name)
    raise BadKey(f"{key!r} is no signing key; allowed are file:PATH and kms:arn:aws:kms:REGION:ACCOUNT:key/ID")
