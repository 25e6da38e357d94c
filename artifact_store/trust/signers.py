"""Signing keys by name: `file:PATH` or `kms:ARN`."""

from pathlib import Path

from nxpipe.artifact_store.trust.keys import BadKey, Signer


def open_signer(key: str, folder: Path) -> Signer:
    """The signer named `file:PATH` or `kms:ARN`; a relative path is resolved from `folder`."""
    kind, _, name = key.partition(":")
    if kind == "file" and name:
        from nxpipe.artifact_store.trust.keys import KeyFile

        try:
            return KeyFile.open(folder / Path(name).expanduser())
        except RuntimeError as error:
            raise BadKey(f"{key!r} starts with ~, but the home folder is unknown") from error
    if kind == "kms" and name.startswith("arn:") and name.count(":") >= 5:
        from nxpipe.artifact_store.trust.kms import KmsKey  # the AWS SDK is slow to import

        return KmsKey.open(name)
    raise BadKey(f"{key!r} is not a signing key; allowed are file:PATH and kms:arn:aws:kms:REGION:ACCOUNT:key/ID")
