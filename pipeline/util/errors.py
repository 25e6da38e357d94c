"""What can go wrong between a command and the rooms it drives. Light: every command may import this."""


class PipelineError(Exception):
    """Root of the pipeline's own errors; the message is one sentence that ends in the way out."""


class MissingSoftware(PipelineError):
    """A command needs a library or program that is not installed."""

    def __init__(self, what: str, needed_for: str, get_it: str) -> None:
        super().__init__(f"{needed_for} needs {what}, which is not installed here; {get_it}.")
        self.what = what


class ModelSourceError(PipelineError):
    """A model id, folder, configuration or weights file that cannot be used."""


class InputInvalid(PipelineError):
    """What is to be fed to a program does not suit it: a prompt that is too long, a token that the model has not."""


class BuildRefused(PipelineError):
    """A request that this version cannot carry out as asked."""

    deterministic = True  # the same request meets the same error again


class DoesNotFit(BuildRefused):
    """A program that is larger than a core of the target holds."""


class NotEnoughMemory(BuildRefused):
    """A request that this machine cannot carry out now; another one can."""

    deterministic = False


class ProgramInvalid(PipelineError):
    """A stored program that is not the one that its artifact describes."""


class VerificationFailed(PipelineError):
    """The emulator's answer is further from PyTorch's than the thresholds allow."""

    deterministic = True  # by the same thresholds


class ExecutorUnavailable(PipelineError):
    """Whoever was to carry the work out cannot be reached, or not any more."""


class NotReady(PipelineError):
    """An instance of a fleet that cannot serve what it should."""


class AwsError(PipelineError):
    """AWS cannot be reached, refuses, or does not have what was asked for."""


class TemplateInvalid(PipelineError):
    """A file that is no CloudFormation template, or a folder that CDK has not written."""


class WouldOverwrite(PipelineError):
    """A file of the user's stands where a command would write."""


def sentence_of(error: Exception) -> str:
    """What it says to a person; those of the operating system do not say it in a sentence themselves."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
    if isinstance(error, MemoryError):
        return f"out of memory: {error or 'this work is too large for this machine'}."
    return str(error)


class RolloutRefused(PipelineError):
    """A rollout that must not begin, or a word for one that is not under way; no traffic was moved."""
