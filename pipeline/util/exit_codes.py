"""The one table of exit codes: what each number means and which errors end in it.

Errors are named by text, not imported: an error that was raised has its module loaded already, so the
table costs nothing on the paths where nothing goes wrong.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class ExitCode:
    number: int
    name: str
    meaning: str
    way_out: str
    errors: tuple[str, ...] = ()


OK: Final = ExitCode(0, "ok", "The command did all that was asked.", "Nothing to do.")
INTERNAL: Final = ExitCode(
    1,
    "internal",
    "An error that nxpipe did not foresee.",
    "Run again with `--verbose`, and report the log file that the message names.",
)
USAGE: Final = ExitCode(
    2,
    "usage",
    "The command line is wrong, or what is given to a program: an unknown option, a value out of range, a long prompt.",
    "Read `nxpipe COMMAND -h`; nothing was done.",
    ("click.exceptions:UsageError", "nxpipe.emulator.errors:InputsInvalid", "nxpipe.pipeline.util.errors:InputInvalid"),
)
CONFIGURATION: Final = ExitCode(
    3,
    "configuration",
    "`nxpipe.toml` or an `NXPIPE_*` environment variable is wrong.",
    "Mend the lines that the message names, then run `nxpipe config check`.",
    ("nxpipe.pipeline.config.faults:ConfigInvalid",),
)
SOFTWARE: Final = ExitCode(
    4,
    "missing-software",
    "A library or program that this command needs is not installed.",
    "Run `nxpipe doctor`: it says what is missing and how to get it.",
    ("nxpipe.pipeline.util.errors:MissingSoftware",),
)
OVERWRITE: Final = ExitCode(
    5,
    "would-overwrite",
    "A file of yours stands where the command would write.",
    "Move the file away, or look at the difference with `--dry-run`.",
    ("nxpipe.pipeline.util.errors:WouldOverwrite",),
)
MODEL: Final = ExitCode(
    10,
    "model-source",
    "The model cannot be had: an unknown id, a broken folder, weights that do not fit its configuration.",
    "Pass another `--model-id` or `--weights`, as the message says.",
    ("nxpipe.pipeline.util.errors:ModelSourceError",),
)
COMPILE: Final = ExitCode(
    11,
    "does-not-compile",
    "The model cannot be captured or lowered for the target, or the request is beyond this version.",
    "The message names the operators, where they stand in the model's source, and what to change.",
    ("nxpipe.emulator.errors:CompileError", "nxpipe.pipeline.util.errors:BuildRefused"),
)
VERIFICATION: Final = ExitCode(
    12,
    "verification-failed",
    "The emulated result differs from PyTorch's by more than the thresholds allow; nothing was published.",
    "Choose a gentler autocast, or change the thresholds in `[verify]` if the difference is acceptable.",
    ("nxpipe.pipeline.util.errors:VerificationFailed",),
)
DOES_NOT_FIT: Final = ExitCode(
    13,
    "does-not-fit",
    "The model lowers, but its share does not fit the memory of one core of the target.",
    "Choose the tensor-parallel degree or the target that the report of `nxpipe check` names.",
    ("nxpipe.pipeline.util.errors:DoesNotFit", "nxpipe.emulator.errors:OutOfMemory"),
)
EXECUTABLE: Final = ExitCode(
    14,
    "bad-executable",
    "What claims to be an executable is none, its bytes were changed, or it is another than its artifact describes.",
    "Build the model again, or fetch the artifact again; docs/reference/nxe.md says what the message's byte is.",
    ("nxpipe.emulator.errors:ExecutableInvalid", "nxpipe.pipeline.util.errors:ProgramInvalid"),
)
INCOMPLETE: Final = ExitCode(
    15,
    "incomplete",
    "Cells of the build are missing, for several reasons or because they were not tried after one of them failed.",
    "The summary names each with its reason; mend those, then run the same command: what is there is not built again.",
)
REGRESSION: Final = ExitCode(
    16,
    "regression",
    "A program is predicted to be slower than that of the artifact it was held against, by more than is allowed.",
    "`nxpipe diff` shows what changed; mend it, or allow more with `--threshold`.",
)
EXECUTOR: Final = ExitCode(
    17,
    "executor",
    "Whoever was to carry the work out cannot be reached, or not any more: a Ray cluster, for one.",
    "Look at the address that the message names, then run the same command: what is in the store is not built again.",
    ("nxpipe.pipeline.util.errors:ExecutorUnavailable",),
)
STORE: Final = ExitCode(
    20,
    "store",
    "The artifact store cannot be reached, read or written.",
    "Check the URL, the permissions and the free space that the message names; a retry is always safe.",
    ("nxpipe.artifact_store.errors:StoreError",),
)
NOT_FOUND: Final = ExitCode(
    21,
    "not-in-store",
    "The store holds no artifact of that name or key.",
    "List what is there with `nxpipe store ls`.",
    ("nxpipe.artifact_store.errors:NotFound",),
)
CORRUPT: Final = ExitCode(
    22,
    "corrupt",
    "Stored bytes do not have the digest that names them; they were not used.",
    "Fetch or build the artifact again; find out what changed the bytes.",
    ("nxpipe.artifact_store.errors:Corrupt",),
)
REFUSED: Final = ExitCode(
    23,
    "refused",
    "A rule of the store or of the channel's policy forbids it; nothing was changed.",
    "The message names the rule and what would satisfy it: another artifact, a signature, a look at the channel.",
    ("nxpipe.artifact_store.errors:Refused",),
)
CONFLICT: Final = ExitCode(
    24,
    "not-reproducible",
    "The same request has made two different artifacts; the one that was published first stands.",
    "Compare the two, and make what differs deterministic or part of the key.",
    ("nxpipe.artifact_store.errors:Conflict",),
)
KEY: Final = ExitCode(
    25,
    "signing-key",
    "A signing key or a public key cannot be used: unreadable, of another kind, or open to other users.",
    "Mend the file or the KMS key that the message names; `nxpipe store keygen` makes a new one.",
    ("nxpipe.artifact_store.trust.keys:BadKey",),
)
UNSAFE_STORE: Final = ExitCode(
    26,
    "unsafe-store",
    "The folder or bucket does not keep a property that the store is built on.",
    "Use another backend, or mend the properties that `nxpipe store doctor` names.",
    ("nxpipe.artifact_store.errors:UnsafeBackend",),
)
SYSTEM: Final = ExitCode(
    30,
    "system",
    "The operating system refused: no space, no permission, no such folder.",
    "Mend what the message names and run the same command again.",
    ("builtins:OSError", "builtins:MemoryError"),
)
NOT_READY: Final = ExitCode(
    31,
    "not-ready",
    "This machine cannot serve what its fleet should: a device, a program or the instance's own metadata is missing.",
    "Mend what the message names; Auto Scaling has been told to try another instance.",
    ("nxpipe.pipeline.util.errors:NotReady",),
)
AWS: Final = ExitCode(
    32,
    "aws",
    "AWS cannot be reached, refuses, or does not have what was asked for.",
    "Look at the region, the credentials and the permission that the message names; a retry is always safe.",
    ("nxpipe.pipeline.util.errors:AwsError",),
)
FINDINGS: Final = ExitCode(
    33,
    "findings",
    "Templates break our rules, or deploying them would lose what is to be kept.",
    "Each finding says what to do; `[[acknowledge]]` accepts one for a while, with a reason.",
)
TEMPLATE: Final = ExitCode(
    34,
    "bad-template",
    "What should be a CloudFormation template is none.",
    "Mend the file that the message names, or write the templates with `npx cdk synth`.",
    ("nxpipe.pipeline.util.errors:TemplateInvalid",),
)
RECORD: Final = ExitCode(
    35,
    "rollout-record",
    "A plan, evidence or record of a rollout is none, or a recorded verdict is not what the judge says.",
    "The message names the judgement; fetch the record again, or find out who changed it.",
    ("nxpipe.pipeline.canary.errors:CanaryError",),
)
ROLLED_BACK: Final = ExitCode(
    40,
    "rolled-back",
    "All traffic is with the old version again: the new one is worse, or an alarm or a person ended the rollout.",
    "`nxpipe rollout log FLEET` shows why; mend the version, or start the same one again with `--again`.",
)
UNDECIDED: Final = ExitCode(
    41,
    "undecided",
    "The rollout's step has lasted as long as it may, and its evidence says neither yes nor no: a person is awaited.",
    "Run `nxpipe rollout approve FLEET` or `abort FLEET`; `nxpipe rollout plan` says what would find out more.",
)
CAPACITY_BLOCKED: Final = ExitCode(
    42,
    "capacity-blocked",
    "The new version's instances did not come or did not become ready, so it never had any traffic.",
    "Look at the Auto Scaling group that the message names, then start the rollout again.",
)
ROLLOUT_REFUSED: Final = ExitCode(
    43,
    "rollout-refused",
    "The rollout cannot begin as things are, or there is none that could be told anything; no traffic was moved.",
    "The message names what stands in the way: another rollout, an alarm, a stack that is not deployed.",
    ("nxpipe.pipeline.rollout.errors:RolloutRefused",),
)
INTERRUPTED: Final = ExitCode(
    130, "interrupted", "Ctrl-C. Nothing half-written is left behind.", "Run the same command again: it resumes."
)
PIPE_CLOSED: Final = ExitCode(
    141, "pipe-closed", "The program that read our output went away, as `head` does.", "Nothing to do."
)
TERMINATED: Final = ExitCode(
    143, "terminated", "SIGTERM. Nothing half-written is left behind.", "Run the same command again: it resumes."
)

TABLE: Final = (
    OK,
    INTERNAL,
    USAGE,
    CONFIGURATION,
    SOFTWARE,
    OVERWRITE,
    MODEL,
    COMPILE,
    VERIFICATION,
    DOES_NOT_FIT,
    EXECUTABLE,
    INCOMPLETE,
    REGRESSION,
    EXECUTOR,
    STORE,
    NOT_FOUND,
    CORRUPT,
    REFUSED,
    CONFLICT,
    KEY,
    UNSAFE_STORE,
    SYSTEM,
    NOT_READY,
    AWS,
    FINDINGS,
    TEMPLATE,
    RECORD,
    ROLLED_BACK,
    UNDECIDED,
    CAPACITY_BLOCKED,
    ROLLOUT_REFUSED,
    INTERRUPTED,
    PIPE_CLOSED,
    TERMINATED,
)

_BY_ERROR: Final = {error: row for row in TABLE for error in row.errors}


def exit_code_of(error: BaseException) -> ExitCode | None:
    """The row for this error, by its nearest ancestor in the table; None when nobody foresaw it."""
    for kind in type(error).__mro__:
        row = _BY_ERROR.get(f"{kind.__module__}:{kind.__qualname__}")
        if row is not None:
            return row
    return None


def one_code(codes: Iterable[int]) -> int:
    """That of a build: of what is missing the code that all have in common, if there is one; 0 where nothing is."""
    different = set(codes)
    return OK.number if not different else different.pop() if len(different) == 1 else INCOMPLETE.number
