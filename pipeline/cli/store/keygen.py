"""`nxpipe store keygen`."""

from pathlib import Path

import click

from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.util.console import Console


@click.command(cls=Command)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--public-of", metavar="KEY", help="Write only the public half of this key, file:PATH or kms:ARN.")
@click.pass_obj
def keygen(console: Console, file: Path, public_of: str | None) -> None:
    """Make a signing key, or write the public half of one.

    FILE gets an Ed25519 key that only you may read, and FILE.pub its public half, which belongs in the repository:
    [[signing.trusted]] of nxpipe.toml names it. Nothing is ever overwritten. A key in AWS KMS is made there, with key
    spec ECC_NIST_P256 and usage SIGN_VERIFY; --public-of writes its public half into FILE.

    \b
    Example:
      nxpipe store keygen release.key
      nxpipe store keygen kms.pub --public-of kms:arn:aws:kms:us-east-2:123456789012:alias/release
    """
    from nxpipe.artifact_store.trust.keys import make_key_file, public_path, write_public_key
    from nxpipe.artifact_store.trust.signers import open_signer

    if public_of is None:
        public, written = make_key_file(file), public_path(file)
        console.say(f"{file} holds the private key: keep it out of the repository.")
    else:
        public, written = open_signer(public_of, Path()).public, file
        write_public_key(public, written)
    if console.json:
        console.data({"key_id": public.key_id, "public_key": str(written)})
    else:
        console.result(f"{written}  key {public.key_id}")
