"""The table of exit codes: number, meaning, remedy, and the errors that map to it.

Errors are named by module and class, not imported, so the table adds no import time to a command.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class ExitCode:
    number: int
    name: str
    meaning: str
    remedy: str
    errors: tuple[str, ...] = ()


OK: Final = ExitCode(0, "ok", "The command succeeded.", "Nothing to do.")
INTERNAL: Final = ExitCode(
    1,
    "internal",
    "An internal error of nxpipe.",
    "Rerun with `--verbose` and report the log file that the message names.",
)
USAGE: Final = ExitCode(
    2,
    "usage",
    "Invalid usage or input: an unknown option, a value out of range, a prompt longer than the largest bucket.",
    "See `nxpipe COMMAND -h`; nothing was changed.",
    ("click.exceptions:UsageError", "nxpipe.emulator.errors:InputsInvalid", "nxpipe.pipeline.util.errors:InputInvalid"),
)
CONFIGURATION: Final = ExitCode(
    3,
    "configuration",
    "`nxpipe.toml` or an `NXPIPE_*` environment variable is invalid.",
    "Fix the lines that the message names, then run `nxpipe config check`.",
    ("nxpipe.pipeline.config.messages:ConfigInvalid",),
)
SOFTWARE: Final = ExitCode(
    4,
    "missing-software",
    "A library or program that the command requires is not installed.",
    "Run `nxpipe doctor`, which lists missing software and how to install it.",
    ("nxpipe.pipeline.util.errors:MissingSoftware",),
)
OVERWRITE: Final = ExitCode(
    5,
    "would-overwrite",
    "The command would overwrite an existing file.",
    "Move the file away, or see the difference with `--dry-run`.",
    ("nxpipe.pipeline.util.errors:WouldOverwrite",),
)
MODEL: Final = ExitCode(
    10,
    "model-source",
    "The model cannot be loaded: an unknown id, a broken folder, weights that do not match its configuration.",
    "Pass another `--model-id` or `--weights`; the message names the cause.",
    ("nxpipe.pipeline.util.errors:ModelSourceError",),
)
COMPILE: Final = ExitCode(
    11,
    "does-not-compile",
    "The model cannot be captured or lowered for the target, or this version does not support the request.",
    "The message names the operators, their lines in the model's source, and the fix.",
    ("nxpipe.emulator.errors:CompileError", "nxpipe.pipeline.util.errors:BuildRefused"),
)
VERIFICATION: Final = ExitCode(
    12,
    "verification-failed",
    "An emulated output deviates from PyTorch's beyond the thresholds, or a device's output from the emulated one; "
    "nothing was published, and no evidence of the device was stored.",
    "Choose a more precise autocast, or relax the thresholds in `[verify]` if the deviation is acceptable.",
    ("nxpipe.pipeline.util.errors:VerificationFailed",),
)
DOES_NOT_FIT: Final = ExitCode(
    13,
    "does-not-fit",
    "The model compiles, but its shard exceeds the memory of one core of the target.",
    "Use the tensor-parallel degree or the target that `nxpipe check` reports.",
    ("nxpipe.pipeline.util.errors:DoesNotFit", "nxpipe.emulator.errors:OutOfMemory"),
)
EXECUTABLE: Final = ExitCode(
    14,
    "bad-executable",
    "An executable is malformed, corrupt, or not the one that its artifact describes.",
    "Rebuild the model or fetch the artifact again; docs/reference/nxe.md documents the byte offset in the message.",
    ("nxpipe.emulator.errors:ExecutableInvalid", "nxpipe.pipeline.util.errors:ProgramInvalid"),
)
INCOMPLETE: Final = ExitCode(
    15,
    "incomplete",
    "Cells of the build are missing: they failed for several reasons, or were skipped after a failure.",
    "The summary lists each reason; fix the causes and run the same command again; built cells are cached.",
)
REGRESSION: Final = ExitCode(
    16,
    "regression",
    "A program is predicted to be slower than the baseline by more than the threshold.",
    "See the change with `nxpipe diff`; fix it, or raise `--threshold`.",
)
EXECUTOR: Final = ExitCode(
    17,
    "executor",
    "The executor, such as a Ray cluster, is unreachable or was lost.",
    "Check the address in the message, then run the same command again; built cells are cached.",
    ("nxpipe.pipeline.util.errors:ExecutorUnavailable",),
)
NO_PLAN: Final = ExitCode(
    18,
    "no-plan",
    "No instance type meets the objectives of a plan within its budget, or fits the model.",
    "The output says why each is not possible: relax an objective, raise the budget, or pass another `--instance`.",
)
STORE: Final = ExitCode(
    20,
    "store",
    "The artifact store cannot be reached, read or written.",
    "Check the URL, permissions or free space that the message names; a retry is safe.",
    ("nxpipe.artifact_store.errors:StoreError",),
)
NOT_FOUND: Final = ExitCode(
    21,
    "not-in-store",
    "The store has no artifact of that name or key.",
    "List the artifacts with `nxpipe store ls`.",
    ("nxpipe.artifact_store.errors:NotFound",),
)
CORRUPT: Final = ExitCode(
    22,
    "corrupt",
    "Stored bytes do not match their digest; they were not used.",
    "Fetch or rebuild the artifact; find the cause of the corruption.",
    ("nxpipe.artifact_store.errors:Corrupt",),
)
REFUSED: Final = ExitCode(
    23,
    "refused",
    "A rule of the store or the channel's policy forbids the operation; nothing was changed.",
    "The message names the rule and what satisfies it: another artifact, a signature, a newer generation.",
    ("nxpipe.artifact_store.errors:Refused",),
)
CONFLICT: Final = ExitCode(
    24,
    "not-reproducible",
    "One request produced two different artifacts; the first one stays published.",
    "Compare the two; make the difference deterministic or a part of the cache key. If the store lost a part of the "
    "first one, restore it from a copy of the store, or remove the record that the message names and build again.",
    ("nxpipe.artifact_store.errors:Conflict",),
)
KEY: Final = ExitCode(
    25,
    "signing-key",
    "A signing key or public key is unusable: unreadable, of another type, or readable by other users.",
    "Fix the file or KMS key that the message names, or create a key with `nxpipe store keygen`.",
    ("nxpipe.artifact_store.trust.keys:BadKey",),
)
UNSAFE_STORE: Final = ExitCode(
    26,
    "unsafe-store",
    "The folder or bucket lacks a property that the store requires.",
    "Use another backend, or fix the properties that `nxpipe store doctor` reports.",
    ("nxpipe.artifact_store.errors:UnsafeBackend", "nxpipe.pipeline.util.errors:StoreNotKept"),
)
SYSTEM: Final = ExitCode(
    30,
    "system",
    "The operating system refused: no space, no permission, no such folder.",
    "Fix the cause that the message names and run the same command again.",
    ("builtins:OSError", "builtins:MemoryError"),
)
NOT_READY: Final = ExitCode(
    31,
    "not-ready",
    "This instance cannot serve its fleet's artifact or prove one: a device is missing or fails, a program or instance "
    "metadata is missing, or its server exits or does not answer.",
    "Fix the cause that the message names; Auto Scaling replaces the instance.",
    (
        "nxpipe.pipeline.util.errors:NotReady",
        "nxpipe.pipeline.serving.engine:NotServing",
        "nxpipe.pipeline.serving.engine:Overloaded",
        "nxpipe.pipeline.serving.generation:RequestFailed",
    ),
)
AWS: Final = ExitCode(
    32,
    "aws",
    "AWS is unreachable, denies the request, or lacks the resource.",
    "Check the region, credentials and permission that the message names; a retry is safe.",
    ("nxpipe.pipeline.util.errors:AwsError",),
)
FINDINGS: Final = ExitCode(
    33,
    "findings",
    "Templates violate NXP rules, a deployment would delete resources that must be retained, the account lacks "
    "something that it needs, a step of the smoke test failed, or an assumption about the hardware is broken.",
    "Apply the fix in each finding or row; `[[acknowledge]]` accepts a finding until a date, with a reason.",
    ("nxpipe.pipeline.fleet.teardown:StepFailed",),
)
TEMPLATE: Final = ExitCode(
    34,
    "bad-template",
    "A file is not a valid CloudFormation template.",
    "Fix the file that the message names, or write the templates with `npx cdk synth`.",
    ("nxpipe.pipeline.util.errors:TemplateInvalid",),
)
RECORD: Final = ExitCode(
    35,
    "rollout-record",
    "A rollout's plan, evidence or record is malformed, or a recorded verdict does not match its evidence.",
    "Fetch the record again; if the error persists, find the change to the evaluation that the message names.",
    ("nxpipe.pipeline.canary.documents:CanaryError",),
)
ROLLED_BACK: Final = ExitCode(
    40,
    "rolled-back",
    "The rollout was rolled back: the new version is worse, or an alarm or an operator ended it.",
    "See the cause with `nxpipe rollout log FLEET`; fix the version, or restart the same one with `--again`.",
)
UNDECIDED: Final = ExitCode(
    41,
    "undecided",
    "A step of the rollout reached its time limit without a decision; it waits for an operator.",
    "Run `nxpipe rollout approve FLEET` or `abort FLEET`; `nxpipe rollout plan` shows how to detect smaller changes.",
)
CAPACITY_BLOCKED: Final = ExitCode(
    42,
    "capacity-blocked",
    "The new version's instances did not start or did not become ready; no traffic was moved.",
    "Check the Auto Scaling group that the message names, then start the rollout again.",
)
ROLLOUT_REFUSED: Final = ExitCode(
    43,
    "rollout-refused",
    "The rollout cannot start now, or no rollout is in progress; no traffic was moved.",
    "Resolve the cause that the message names: another rollout, an alarm, a stack that is not deployed.",
    ("nxpipe.pipeline.util.errors:RolloutRefused",),
)
INTERRUPTED: Final = ExitCode(
    130, "interrupted", "Interrupted by Ctrl-C; no partial files remain.", "Run the same command again; it resumes."
)
PIPE_CLOSED: Final = ExitCode(
    141, "pipe-closed", "The reader of stdout closed the pipe, as `head` does.", "Nothing to do."
)
TERMINATED: Final = ExitCode(
    143, "terminated", "Terminated by SIGTERM; no partial files remain.", "Run the same command again; it resumes."
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
    NO_PLAN,
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
    """The row of the error's nearest ancestor in the table; None for an internal error."""
    for kind in type(error).__mro__:
        row = _BY_ERROR.get(f"{kind.__module__}:{kind.__qualname__}")
        if row is not None:
            return row
    return None


def row_of(number: int) -> ExitCode:
    """The row of a number."""
    return next(row for row in TABLE if row.number == number)


def combined_code(codes: Iterable[int]) -> int:
    """The exit code of a build, from the codes of its failed cells: the common one, else INCOMPLETE; 0 without any."""
    distinct = set(codes)
    return OK.number if not distinct else distinct.pop() if len(distinct) == 1 else INCOMPLETE.number
