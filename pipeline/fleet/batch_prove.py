"""`nxpipe prove --on batch`: one AWS Batch job on the smallest instance type of [prove] that an artifact fits.

The job runs `nxpipe prove` and stores the evidence. It has no signing key: the submitter reads the digest of the
evidence from the log, and accepts a document that is new, of this manifest, and has the limits that it sent.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from nxpipe.artifact_store.errors import Refused
from nxpipe.artifact_store.evidence import DEVICE, EMULATED, Evidence, Limits, document_gap
from nxpipe.emulator.executable.interface import interface_from
from nxpipe.emulator.hardware import INSTANCES
from nxpipe.emulator.hardware.instance import Instance
from nxpipe.pipeline.artifacts.store_url import VARIABLE
from nxpipe.pipeline.build.executors.batch import ENDED, PROJECT_TAG, describe, is_retryable
from nxpipe.pipeline.config.prices import load_prices
from nxpipe.pipeline.models.thresholds import Thresholds, faults_of
from nxpipe.pipeline.util import exit_codes
from nxpipe.pipeline.util.aws import client, convert_sdk_errors, error_code
from nxpipe.pipeline.util.console import reported_error
from nxpipe.pipeline.util.errors import (
    AwsError,
    BuildRefused,
    NotReady,
    PipelineError,
    ProgramInvalid,
    VerificationFailed,
)
from nxpipe.pipeline.util.text import human_bytes
from nxpipe.pipeline.verify.prove import ProveOptions
from nxpipe.stacks.names import proving_queue

if TYPE_CHECKING:
    from nxpipe.artifact_store import Published, Store
    from nxpipe.pipeline.config import Config
    from nxpipe.pipeline.config.cloud import Prove

Report = Callable[[str], None]

_GIB: Final = 1024**3
_DIGEST: Final = re.compile(r'\s*"evidence": "([0-9a-f]{64})",?')
_TOO_LONG: Final = "Job attempt duration exceeded timeout"
_OUT_OF_MEMORY: Final = "OutOfMemory"
# A failure of the job is one of this command, with the same exit code.
_FAILURES: Final[Mapping[int, type[Exception]]] = {
    exit_codes.COMPILE.number: BuildRefused,
    exit_codes.VERIFICATION.number: VerificationFailed,
    exit_codes.EXECUTABLE.number: ProgramInvalid,
    exit_codes.REFUSED.number: Refused,
    exit_codes.NOT_READY.number: NotReady,
}


@dataclass(frozen=True)
class Pace:
    """Seconds. `poll`: between two polls. `start`: until a job without an instance is ended. `silence`: without an
    answer of AWS. `log`: for the last lines of a log to arrive."""

    start: float = 1800.0
    poll: float = 5.0
    silence: float = 900.0
    log: float = 60.0


@dataclass(frozen=True)
class ProvingQueue:
    """The deployed queue of an instance type, with its newest job definition."""

    batch: Any
    logs: Any
    project: str
    type: str
    queue: str
    definition: str
    store: str
    log_group: str
    attempts: int
    seconds: int


def prove_on_batch(
    published: "Published",
    store: "Store",
    config: "Config",
    options: ProveOptions,
    report: Report,
    pace: Pace = Pace(),
) -> Evidence:
    """The evidence of an artifact that a job has stored. A job that fails raises its own error; an interruption ends
    the job."""
    if config.prove is None:
        raise BuildRefused(
            "nxpipe.toml has no [prove], which describes the queues of `nxpipe prove --on batch`; add the table and "
            f"run `npx cdk deploy {config.project.name}-prove`"
        )
    row = smallest_instance(published, store, config.prove)
    queue = find_queue(config.project.name, row.name, config.project.region)
    _require_one_store(store.url, queue)
    report(price_sentence(queue, config.project.region, spot=config.prove.capacity == "spot"))
    limits = Limits.model_validate(asdict(Thresholds.of(config)))
    before = {each.digest for each in store.evidence(published.manifest.digest)}
    lines = ProofJob(queue, submit(queue, published, options, limits), report, pace).lines()
    return _accepted(published, store, lines, before, limits, Thresholds.of(config))


def smallest_instance(published: "Published", store: "Store", prove: "Prove") -> Instance:
    """The smallest configured instance type for the artifact's target, with a core for each rank and memory for it."""
    manifest = published.manifest
    if not manifest.executables or not manifest.runs_on_devices:
        raise BuildRefused(
            f"{manifest.model.id}: it has no programs for Neuron devices; build it with --backend neuronx"
        )
    rows = sorted((INSTANCES[name] for name in prove.instance_types), key=lambda each: (each.chips, each.vcpus))
    rows = [each for each in rows if each.compiler_target == manifest.target]
    degree = max(each.tensor_parallel for each in manifest.executables)
    need = _bytes_of_a_rank(published, store)
    for row in rows:
        if row.logical_cores >= degree and row.device_memory_gib * _GIB / row.logical_cores >= need:
            return row
    raise BuildRefused(
        f"{published.name} needs {degree} cores of {manifest.target} with {human_bytes(need)} each, and no type in "
        f"`instance_types` of [prove] has them ({', '.join(prove.instance_types)}); add a larger one and deploy "
        "the stack"
    )


def _bytes_of_a_rank(published: "Published", store: "Store") -> int:
    """A lower bound of a core's memory: all programs, and the tensors of the largest. Scratch memory is unknown."""
    devices = [each.device for each in published.manifest.executables if each.device]
    tensors = []
    for device in devices:
        interface = interface_from(store.read_blob(device.interface))
        states = {each.alias for each in interface.arguments}
        results = [each for place, each in enumerate(interface.results) if place not in states]
        types = [each.type for each in interface.arguments] + [each.type for each in results]
        tensors.append(sum(type_.nbytes for type_ in types))
    return max(tensors) + sum(device.neff.size for device in devices)


def find_queue(project: str, instance_type: str, region: str | None) -> ProvingQueue:
    """Find the deployed queue of an instance type in AWS, with the credentials of the AWS SDK."""
    batch, name = client("batch", region, retries="adaptive"), proving_queue(project, instance_type)
    with convert_sdk_errors(f"find the job queue {name}"):
        queues = batch.describe_job_queues(jobQueues=[name])["jobQueues"]
        jobs = batch.describe_job_definitions(jobDefinitionName=name, status="ACTIVE")["jobDefinitions"]
    if not queues or not jobs or queues[0]["state"] != "ENABLED":
        raise AwsError(
            f"AWS Batch has no enabled job queue {name} with a job definition in {batch.meta.region_name}; run `npx "
            f"cdk deploy {project}-prove`, or set the region in [project]"
        )
    newest = max(jobs, key=lambda definition: definition["revision"])
    container = newest["containerProperties"]
    environment = {variable["name"]: variable["value"] for variable in container.get("environment", ())}
    return ProvingQueue(
        batch=batch,
        logs=client("logs", region),
        project=project,
        type=instance_type,
        queue=queues[0]["jobQueueArn"],
        definition=newest["jobDefinitionArn"],
        store=environment.get(VARIABLE, ""),
        log_group=container.get("logConfiguration", {}).get("options", {}).get("awslogs-group", "/aws/batch/job"),
        attempts=int(newest.get("retryStrategy", {}).get("attempts", 1)),
        seconds=int(newest.get("timeout", {}).get("attemptDurationSeconds", 0)),
    )


def price_sentence(queue: ProvingQueue, region: str | None, *, spot: bool) -> str:
    """What a job costs at most."""
    prices = load_prices()
    price = prices.of(region, queue.type)
    hours = queue.seconds / 3600
    bound = f"{queue.attempts} attempts x {hours:g} h"
    if price is None:
        return f"A job on {queue.type}: no price known in {region}; at most {bound}, plus the instance's start and end."
    total = queue.attempts * hours * price
    return (
        f"A job on {queue.type} costs at most {bound} x ${price:,.4f} an hour = ${total:,.2f}, by list prices of "
        f"{prices.date}{', less on the spot market' if spot else ''}, plus the instance's start and end."
    )


def _require_one_store(url: str, queue: ProvingQueue) -> None:
    if url.rstrip("/") != queue.store.rstrip("/"):
        raise BuildRefused(
            f"the jobs of [prove] use {queue.store or 'no store'}, this command {url}; pass --store "
            f"{queue.store or 's3://BUCKET/PREFIX'}, or deploy the stack of the project that has {url}"
        )


def submit(queue: ProvingQueue, published: "Published", options: ProveOptions, limits: Limits) -> str:
    words = ["nxpipe", "prove", published.request_key, "--runs", str(options.runs), "--limit", str(options.limit)]
    thresholds = {key: value for key, value in limits.model_dump().items() if value is not None}
    variables = [{"name": f"NXPIPE_VERIFY_{key.upper()}", "value": repr(value)} for key, value in thresholds.items()]
    with convert_sdk_errors(f"submit a job to {queue.queue}"):
        answer = queue.batch.submit_job(
            jobName=f"{queue.project}-prove-{published.request_key[:12]}",
            jobQueue=queue.queue,
            jobDefinition=queue.definition,
            containerOverrides={"command": [*words, "--device", options.device, "--json"], "environment": variables},
            tags={PROJECT_TAG: queue.project},
        )
    return str(answer["jobId"])


class ProofJob:
    """A submitted job. Its log is reported while it runs, without the document at the end."""

    def __init__(self, queue: ProvingQueue, id_: str, report: Report, pace: Pace) -> None:
        self._queue, self._id, self._report, self._pace = queue, id_, report, pace
        self._stream: str | None = None
        self._token: dict[str, str] = {}
        self._lines: list[str] = []
        self._in_document = False
        self._status = ""

    def lines(self) -> list[str]:
        """The log of the job that has succeeded. An error or an interruption of the wait ends the job."""
        try:
            job = self._end()
        except BaseException:
            self._terminate()
            raise
        self._read_rest(done=_DIGEST.fullmatch if job["status"] == "SUCCEEDED" else reported_error)
        if job["status"] != "SUCCEEDED":
            raise self._failure(job)
        return self._lines

    def _end(self) -> Mapping[str, Any]:
        answered = waits_since = time.monotonic()
        while True:
            try:
                job = describe(self._queue.batch, [self._id]).get(self._id)
                if job is None:
                    raise NotReady(f"AWS Batch no longer knows job {self._id}; run the command once more")
                self._report_status(job)
                self._read()
                answered = time.monotonic()
            except AwsError as error:
                if not is_retryable(error) or time.monotonic() - answered > self._pace.silence:
                    raise
                job = {"status": self._status}
            if job["status"] in ENDED:
                return job
            if job["status"] in ("STARTING", "RUNNING"):
                waits_since = time.monotonic()
            elif time.monotonic() - waits_since > self._pace.start:
                reason = job.get("statusReason") or "AWS Batch has no instance for it"
                raise NotReady(
                    f"job {self._id} was ended: no {self._queue.type} was available within {self._pace.start:g} s "
                    f"({reason}); try later, pass a higher --start-limit, or set `capacity` of [prove]"
                )
            time.sleep(self._pace.poll)

    def _report_status(self, job: Mapping[str, Any]) -> None:
        stream = job.get("container", {}).get("logStreamName") or self._stream
        if stream != self._stream:  # of another attempt
            self._stream, self._token = stream, {}
        if job["status"] != self._status:
            self._status = job["status"]
            self._report(f"  job {self._id} on {self._queue.type}: {self._status.lower()}")

    def _read(self) -> None:
        """Read new lines of the log; a stream appears with its first line."""
        while self._stream is not None:
            try:
                with convert_sdk_errors(f"read the log stream {self._stream}"):
                    page = self._queue.logs.get_log_events(
                        logGroupName=self._queue.log_group,
                        logStreamName=self._stream,
                        startFromHead=True,
                        **self._token,
                    )
            except AwsError as error:
                if error_code(error) == "ResourceNotFoundException":
                    return
                raise
            for event in page["events"]:
                self._note(event["message"])
            token = {"nextToken": page["nextForwardToken"]}
            if token == self._token or not page["events"]:
                return
            self._token = token

    def _note(self, line: str) -> None:
        self._lines.append(line)
        self._in_document = self._in_document or line == "{"
        if not self._in_document and reported_error(line) is None:
            self._report(f"  {line}")

    def _read_rest(self, done: Callable[[str], object]) -> None:
        """Read until the last line is there: lines arrive some seconds after the end."""
        until = time.monotonic() + self._pace.log
        self._read()
        while self._stream is not None and not any(map(done, self._lines)) and time.monotonic() < until:
            time.sleep(self._pace.poll)
            self._read()

    def _failure(self, job: Mapping[str, Any]) -> Exception:
        """The job's own error, by its exit code and the sentence in its log; else the reason that Batch gives."""
        container = job.get("container", {})
        code, status, reason = container.get("exitCode"), job.get("statusReason", ""), container.get("reason", "")
        where = f"job {self._id} on {self._queue.type}"
        sentences = list(filter(None, map(reported_error, self._lines)))
        if status.startswith(_TOO_LONG):
            return NotReady(
                f"{where} ran for {self._queue.seconds} s, its limit; allow more in `time_limit` of [prove]"
            )
        if reason.startswith(_OUT_OF_MEMORY):
            return NotReady(f"{where} was out of memory; name only larger types in `instance_types` of [prove]")
        if sentences and code in _FAILURES:
            return _FAILURES[code](sentences[-1])
        explanation = (sentences or [text for text in (reason, status) if text] or ["AWS Batch gives no reason"])[-1]
        hint = f"; read its log stream {self._stream} in {self._queue.log_group}" if self._stream else ""
        exit_ = "" if code is None else f" with exit code {code}"
        return AwsError(f"{where} failed{exit_}: {explanation.rstrip('.')}{hint}")

    def _terminate(self) -> None:
        try:
            with convert_sdk_errors(f"terminate job {self._id}"):
                self._queue.batch.terminate_job(jobId=self._id, reason="The command that submitted it has ended.")
        except PipelineError as error:
            self._report(f"job {self._id} may still run: {error}")


def _accepted(
    published: "Published",
    store: "Store",
    lines: list[str],
    before: set[str],
    limits: Limits,
    allowed: Thresholds,
) -> Evidence:
    """The document that the log names. The submitter signs it, so each claim of the log is checked."""
    digests = {found[1] for line in lines if (found := _DIGEST.fullmatch(line))}
    named = f"the job's log names {', '.join(sorted(digests)) or 'no evidence'}"
    documents = {each.digest: each for each in store.evidence(published.manifest.digest)}
    evidence = documents.get(min(digests)) if len(digests) == 1 else None
    if evidence is None:
        raise Refused(f"{named}, and the store has no such document for {published.name}; prove it again")
    gap = document_gap(published.manifest, evidence, DEVICE) or next(faults_of(evidence.programs, allowed), None)
    if gap is None:
        gap = _inputs_gap(evidence, documents.values())
    if gap is None and evidence.digest in before:
        gap = "it is older than the job"
    if gap is None and evidence.limits != limits:
        gap = "its limits are not those of [verify]"
    if gap is not None:
        raise Refused(f"{named}, which is refused: {gap}; prove {published.name} again")
    return evidence


def _inputs_gap(evidence: Evidence, documents: Iterable[Evidence]) -> str | None:
    """A message about the first program that has not run on golden inputs."""
    golden = {
        (compared.program, compared.inputs)
        for document in documents
        if document.kind == EMULATED
        for compared in document.programs
    }
    others = (each.program for each in evidence.programs if (each.program, each.inputs) not in golden)
    return next((f"its inputs of {name} are not those of emulated evidence" for name in others), None)
