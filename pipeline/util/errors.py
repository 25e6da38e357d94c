"""Errors of the pipeline. util/exit_codes.py maps them to exit codes. Imports nothing."""


class PipelineError(Exception):
    """Base of the pipeline's errors; the message is one sentence that ends with the remedy."""


class MissingSoftware(PipelineError):
    """A required library or program is not installed."""

    def __init__(self, what: str, needed_for: str, get_it: str) -> None:
        super().__init__(f"{needed_for} requires {what}, which is not installed; {get_it}.")
        self.what = what


class ModelSourceError(PipelineError):
    """An unusable model id, folder, configuration or weights file."""


class InputInvalid(PipelineError):
    """An invalid argument or program input: an unknown fleet, a prompt that is too long, an unknown token."""


class PromptTooLong(InputInvalid):
    """A prompt or text with more tokens than the largest bucket or the KV cache holds, which is `longest`."""

    def __init__(self, message: str, tokens: int, longest: int) -> None:
        super().__init__(message)
        self.tokens, self.longest = tokens, longest


class BuildRefused(PipelineError):
    """A request that this version does not support."""

    deterministic = True  # a retry fails with the same error


class DoesNotFit(BuildRefused):
    """A program that exceeds the memory of a core of the target."""


class NotEnoughMemory(BuildRefused):
    """A request that needs more memory than this machine has available."""

    deterministic = False


class ProgramInvalid(PipelineError):
    """A stored program that differs from its artifact's description."""


class VerificationFailed(PipelineError):
    """An output of the emulator or of a device deviates from its reference beyond the thresholds."""

    deterministic = True  # with the same thresholds


class ExecutorUnavailable(PipelineError):
    """The executor of a build is unreachable or was lost."""


class NotReady(PipelineError):
    """An instance that cannot serve its fleet's artifact, or whose device fails."""


class AwsError(PipelineError):
    """AWS is unreachable, denies a request, or lacks a resource."""


class StoreNotKept(PipelineError):
    """A store in a folder that GitHub deletes at the end of the job."""


class TemplateInvalid(PipelineError):
    """A file that is not a CloudFormation template, or a folder that is not an output of CDK."""


class WouldOverwrite(PipelineError):
    """A command would overwrite an existing file."""


def sentence_of(error: Exception) -> str:
    """The message of an error as one sentence; for errors of the operating system, file name and cause."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
    if isinstance(error, MemoryError):
        return f"out of memory: {error or 'the work exceeds the memory of this machine'}."
    return str(error)


class RolloutRefused(PipelineError):
    """A rollout that cannot start, or a signal without a rollout in progress; no traffic was moved."""


def cause_of(fault: Exception) -> str:
    """The cause of a failure within a sentence: the system's words for an OSError, without path and number."""
    return (fault.strerror if isinstance(fault, OSError) else None) or str(fault) or type(fault).__name__
