"""`nxpipe store keygen`, `sign` and `verify-signature`: keys and signatures of artifacts."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nxpipe.artifact_store.errors import Refused
from nxpipe.pipeline.artifacts.signing import builder_id, chosen_signer, public_key_of, signing_policy
from nxpipe.pipeline.artifacts.store_url import open_uncached_store
from nxpipe.pipeline.cli.completion import complete_artifacts
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import OneLine, config_option, key_option, public_key_option, store_option
from nxpipe.pipeline.util.console import Console

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store
    from nxpipe.artifact_store.trust.keys import PublicKey


@click.command(cls=Command)
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--public-of", metavar="KEY", help="Write only the public half of this key, file:PATH or kms:ARN.")
@click.pass_obj
def keygen(console: Console, file: Path, public_of: str | None) -> None:
    """Create a signing key, or write the public half of one.

    FILE gets an Ed25519 key that only you may read, and FILE.pub its public half; commit FILE.pub and name it in
    [[signing.trusted]] of nxpipe.toml. Nothing is overwritten. Create KMS keys in AWS with key spec ECC_NIST_P256 and
    usage SIGN_VERIFY; --public-of writes their public half to FILE.

    \b
    Example:
      nxpipe store keygen release.key
      nxpipe store keygen kms.pub --public-of kms:arn:aws:kms:us-east-2:123456789012:alias/release
    """
    from nxpipe.artifact_store.trust.keys import make_key_file, public_path, write_public_key
    from nxpipe.artifact_store.trust.signers import open_signer

    if public_of is None:
        public, written = make_key_file(file), public_path(file)
        console.say(f"{file} is the private key; do not commit it.")
    else:
        public, written = open_signer(public_of, Path()).public, file
        write_public_key(public, written)
    if console.json:
        console.data({"key_id": public.key_id, "public_key": str(written)})
    else:
        console.result(f"{written}  key {public.key_id}")


@click.command(cls=Command)
@click.argument("name", metavar="ARTIFACT", shell_complete=complete_artifacts)
@key_option("the artifact")
@click.option(
    "--builder",
    type=OneLine(512),
    metavar="URI",
    help="The builder in the provenance.  [default: the GitHub workflow, else nxpipe:local]",
)
@store_option
@config_option
@click.pass_obj
def sign(
    console: Console, name: str, key: str | None, builder: str | None, store: str | None, config_path: Path
) -> None:
    """Sign an artifact, its provenance and its evidence.

    The signature is an in-toto statement with SLSA provenance in a DSSE envelope. The store keeps one per key; signing
    again replaces only the signature of the same key. ARTIFACT is as for `nxpipe store show`.

    \b
    Example:
      nxpipe store sign bert-base-uncased@4e9ce0 --key file:release.key
      nxpipe store sign bert-base-uncased --key kms:arn:aws:kms:us-east-2:123456789012:alias/release
    """
    from nxpipe.artifact_store.trust.policy import sign_evidence
    from nxpipe.artifact_store.trust.signatures import Signatures
    from nxpipe.pipeline.config import load_config

    opened = open_uncached_store(store, config_path, console)
    signer = chosen_signer(key, load_config(config_path, os.environ, missing_ok=True), config_path.parent)
    published = opened.resolve(name)
    statement = Signatures(opened).add(published, signer, builder or builder_id())
    evidence = sign_evidence(opened, published, signer, builder or builder_id())
    if console.json:
        document = {"manifest_digest": published.manifest_digest, "key_id": signer.public.key_id}
        console.data(document | {"statement": statement.to_json(), "evidence": evidence})
    else:
        console.result(f"{published.model_id}  manifest {published.manifest_digest}")
        console.result(f"signed by key {signer.public.key_id}")


@click.command("verify-signature", cls=Command)
@click.argument("name", metavar="ARTIFACT", shell_complete=complete_artifacts)
@public_key_option
@store_option
@config_option
@click.pass_obj
def verify_signature(
    console: Console, name: str, public_keys: tuple[str, ...], store: str | None, config_path: Path
) -> None:
    """Verify an artifact's signatures and print the signed statement.

    Checks the signatures of all given keys against the manifest's digest; at least one key must have signed. Needs no
    network for a local store. ARTIFACT is as for `nxpipe store show`.

    \b
    Example:
      nxpipe store verify-signature bert-base-uncased@4e9ce0 --public-key file:release.key.pub
      nxpipe store verify-signature bert-base-uncased --json
    """
    from nxpipe.artifact_store.trust.signatures import Signatures

    keys = {key: public_key_of(key) for key in public_keys} or _trusted_keys(config_path)
    opened = open_uncached_store(store, config_path, console)
    published, signatures = opened.resolve(name), Signatures(opened)
    statements = {label: signatures.by(key, published.manifest_digest) for label, key in keys.items()}
    verified = {label: statement for label, statement in statements.items() if statement is not None}
    if not verified:
        raise _unsigned(published, opened, keys)
    signed_by = [
        {"name": label, "key_id": keys[label].key_id, "builder": verified[label].builder} for label in verified
    ]
    statement = next(iter(verified.values())).to_json()
    if console.json:
        document = {"manifest_digest": published.manifest_digest, "signed_by": signed_by}
        console.data(document | {"statement": statement})
        return
    for signer in signed_by:
        console.say(f"signed by {signer['name']} (key {signer['key_id']}), built by {signer['builder']}")
    console.data(statement)


def _trusted_keys(config_path: Path) -> "dict[str, PublicKey]":
    from nxpipe.pipeline.config import load_config

    policy = signing_policy(load_config(config_path, os.environ, missing_ok=True), config_path.parent)
    if policy is None or not policy.trusted:
        raise Refused("no public key is given; pass --public-key file:PATH, or set [[signing.trusted]] in nxpipe.toml")
    return {trusted.name: trusted.key for trusted in policy.trusted}


def _unsigned(published: "Published", store: "Store", keys: "dict[str, PublicKey]") -> Refused:
    from nxpipe.artifact_store.trust.signatures import Signatures

    key_ids = Signatures(store).key_ids(published.manifest_digest)
    existing = f"it has signatures of {', '.join(key_ids)} only" if key_ids else "it has no signatures"
    return Refused(f"{published.name} is not signed by {', '.join(keys)}; {existing}; sign it with: nxpipe store sign")
