"""`nxpipe store`: everything that is done to a store beside building and promoting."""

import click

from nxpipe.pipeline.cli.main import LazyGroup

STORE_COMMANDS = {
    "fetch": (
        "nxpipe.pipeline.cli.store.fetch:fetch",
        "Bring an artifact into a folder, verified and ready to serve.",
    ),
    "keygen": ("nxpipe.pipeline.cli.store.sign:keygen", "Make a signing key, or write the public half of one."),
    "diff": (
        "nxpipe.pipeline.cli.diff:diff",
        "Compare two artifacts: key inputs, programs, graphs, weights, files, evidence.",
    ),
    "explain": (
        "nxpipe.pipeline.cli.explain:explain",
        "Say why a build is answered by the store or not, field by field.",
    ),
    "export": (
        "nxpipe.pipeline.cli.store.bundle:export",
        "Write one artifact to a tar file or folder, for where no network leads.",
    ),
    "import": (
        "nxpipe.pipeline.cli.store.bundle:import_",
        "Publish an artifact that `nxpipe store export` has written.",
    ),
    "doctor": (
        "nxpipe.pipeline.cli.store.fsck:doctor",
        "Try out whether a folder or bucket can hold a store safely.",
    ),
    "du": (
        "nxpipe.pipeline.cli.store.listing:du",
        "Say how many bytes each model takes, shared and orphaned ones too.",
    ),
    "fsck": (
        "nxpipe.pipeline.cli.store.fsck:fsck",
        "Read and verify all that the store needs; repair it if asked.",
    ),
    "gc": ("nxpipe.pipeline.cli.store.gc:gc", "Remove what nothing needs, and artifacts that the rules give up."),
    "ls": ("nxpipe.pipeline.cli.store.listing:ls", "List every artifact, the newest first."),
    "pin": ("nxpipe.pipeline.cli.store.gc:pin", "Keep an artifact from being collected, or list the pins."),
    "report": ("nxpipe.pipeline.cli.store.report:report", "Write the report of the build that made an artifact."),
    "sign": ("nxpipe.pipeline.cli.store.sign:sign", "Sign an artifact, together with what it was made of."),
    "unpin": ("nxpipe.pipeline.cli.store.gc:unpin", "Remove a pin; a later collection may take what it kept."),
    "verify-signature": (
        "nxpipe.pipeline.cli.store.sign:verify_signature",
        "Verify an artifact's signatures, and print what was signed.",
    ),
    "show": ("nxpipe.pipeline.cli.store.listing:show", "Show one artifact: programs, weights, figures, key."),
}


@click.group(cls=LazyGroup, homes=STORE_COMMANDS)
def store() -> None:
    """Look after artifacts: list, compare, fetch, sign, collect.

    An artifact is one compiled model: a manifest, which names all parts, and the parts, which are blobs named by the
    SHA-256 digest of their bytes. Its key is the digest of all that was asked of the build. What nothing names any
    more is an orphan, until a collection removes it.

    \b
    Example:
      nxpipe store ls
      nxpipe store show bert-base-uncased
      nxpipe store fetch --channel production --to /srv/models
    """
