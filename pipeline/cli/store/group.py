"""`nxpipe store`: the group of the commands on a store and its artifacts."""

import click

from nxpipe.pipeline.cli.main import LazyGroup

STORE_COMMANDS = {
    "fetch": (
        "nxpipe.pipeline.cli.store.fetch:fetch",
        "Fetch an artifact into a folder, verified and ready to serve.",
    ),
    "keygen": ("nxpipe.pipeline.cli.store.sign:keygen", "Create a signing key, or write the public half of one."),
    "diff": (
        "nxpipe.pipeline.cli.diff:diff",
        "Compare two artifacts: key inputs, programs, graphs, weights, files, evidence.",
    ),
    "explain": (
        "nxpipe.pipeline.cli.explain:explain",
        "Explain cache hits and misses of a build, field by field.",
    ),
    "export": (
        "nxpipe.pipeline.cli.store.bundle:export",
        "Export one artifact to a tar file or folder.",
    ),
    "import": (
        "nxpipe.pipeline.cli.store.bundle:import_",
        "Import and publish an exported artifact, or a folder that a serving runtime compiled.",
    ),
    "doctor": (
        "nxpipe.pipeline.cli.store.fsck:doctor",
        "Check that a folder or bucket can hold a store safely.",
    ),
    "du": (
        "nxpipe.pipeline.cli.store.listing:du",
        "Show the size of each model, of shared and of orphaned objects.",
    ),
    "fsck": (
        "nxpipe.pipeline.cli.store.fsck:fsck",
        "Read and verify the whole store; repair it with --repair-from.",
    ),
    "gc": ("nxpipe.pipeline.cli.store.gc:gc", "Remove orphans, and artifacts beyond the retention rules."),
    "ls": ("nxpipe.pipeline.cli.store.listing:ls", "List all artifacts, the newest first."),
    "pin": ("nxpipe.pipeline.cli.store.gc:pin", "Pin an artifact, which protects it from gc, or list the pins."),
    "report": ("nxpipe.pipeline.cli.store.report:report", "Write the report of the build that published an artifact."),
    "sign": ("nxpipe.pipeline.cli.store.sign:sign", "Sign an artifact, its provenance and its evidence."),
    "unpin": ("nxpipe.pipeline.cli.store.gc:unpin", "Remove a pin; a later gc may remove the artifact."),
    "verify-signature": (
        "nxpipe.pipeline.cli.store.sign:verify_signature",
        "Verify an artifact's signatures and print the signed statement.",
    ),
    "show": (
        "nxpipe.pipeline.cli.store.listing:show",
        "Show one artifact: programs, weights, utilisation, evidence, key.",
    ),
}


@click.group(cls=LazyGroup, homes=STORE_COMMANDS)
def store() -> None:
    """Manage artifacts: list, compare, fetch, sign, collect garbage.

    An artifact is a compiled model: a manifest and the blobs that it names, each named by the SHA-256 digest of its
    bytes. Its key is the digest of all inputs of the build. An object that no artifact references is an orphan until gc
    removes it.

    \b
    Example:
      nxpipe store ls
      nxpipe store show bert-base-uncased
      nxpipe store fetch --channel production --to /srv/models
    """
