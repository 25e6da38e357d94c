"""The warm gate: what must hold before an instance gets requests, and afterwards.

Before the server starts: the devices of the instance type, programs for it, and golden inputs on every core. Once the
server is healthy: answers that depend on the prompt. In service: progress, since a server whose cores hang still has an
open port. Each fault is one sentence, by which the instance is given up or the server restarted.
"""

import http.client
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from nxpipe.emulator.hardware import INSTANCES, Instance
from nxpipe.pipeline.config.device_measures import GENERATED_TOKENS
from nxpipe.pipeline.fleet.agent.watch import TOKEN_COUNTERS
from nxpipe.pipeline.util.console import reported_error
from nxpipe.pipeline.util.errors import NotReady, cause_of

if TYPE_CHECKING:
    from nxpipe.artifact_store.manifest import Manifest
    from nxpipe.pipeline.artifacts.channels import ProgramHost
    from nxpipe.pipeline.artifacts.contract import ServingContract
    from nxpipe.pipeline.config.serving_fleet import ServingFleet

_DEVICE: Final = re.compile("neuron[0-9]+")  # the driver creates one per chip


def require_devices(instance_type: str, folder: Path) -> int:
    """The number of chips; an error if some of the instance type's are missing."""
    expected = _entry(instance_type).chips
    devices = sum(_DEVICE.fullmatch(path.name) is not None for path in folder.iterdir())
    if devices != expected:
        raise NotReady(
            f"{folder} has {devices} Neuron devices, but a {instance_type} has {expected}; check the driver with "
            "`dmesg` or let Auto Scaling replace the instance"
        )
    return devices


def require_programs_for(instance_type: str, manifest: "Manifest", host: "ProgramHost") -> None:
    if fault := host.fault(manifest.name, manifest.backend):
        raise NotReady(fault)
    entry = _entry(instance_type)
    if manifest.target != entry.compiler_target:
        raise NotReady(
            f"{manifest.name} has programs for {manifest.target}, but a {instance_type} runs those for "
            f"{entry.compiler_target}; build the model for this fleet and promote that artifact"
        )
    degree = max((executable.tensor_parallel for executable in manifest.executables), default=1)
    if degree > entry.logical_cores:
        raise NotReady(
            f"{manifest.name} needs {degree} logical cores, but a {instance_type} has {entry.logical_cores}; "
            "build it with a smaller tp, or choose a larger instance type"
        )


def require_cores(instance_type: str, contract: "ServingContract") -> None:
    """Raise NotReady for a contract that needs more logical cores than an instance type has."""
    cores = _entry(instance_type).logical_cores
    if contract.cores > cores:
        raise NotReady(
            f"contract {contract.name} needs {contract.cores} logical cores, but a {instance_type} has {cores}; choose "
            "a larger instance type, or import what was compiled for fewer"
        )


def _entry(instance_type: str) -> Instance:
    if instance_type not in INSTANCES:
        raise NotReady(f"{instance_type} is not an instance type with Neuron devices that this version of nxpipe knows")
    return INSTANCES[instance_type]


# The command in a process of its own, without modules of the working directory.
_NXPIPE: Final = (sys.executable, "-P", "-c", "from nxpipe.pipeline.cli.entry import main; main()")
_IDLE_MARGIN: Final = 10  # seconds for which a server keeps a connection longer than the load balancer


def server_command(folder: Path, fleet: "ServingFleet") -> tuple[str, ...]:
    """`nxpipe serve` of the artifact in a folder, by the settings of a fleet."""
    seconds = {
        "--drain-timeout": fleet.draining.total_seconds(),
        "--keep-alive": fleet.idle_timeout.total_seconds() + _IDLE_MARGIN,
    }
    options = (word for name, value in seconds.items() for word in (name, f"{value:g}"))
    address = ("--host", "0.0.0.0", "--port", str(fleet.port))  # noqa: S104, of the load balancer's targets
    # The load balancer has stopped sending requests when Auto Scaling ends an instance.
    return (*_NXPIPE, "serve", "--folder", str(folder), *address, *_device_of(fleet), *options, "--drain-delay", "0")


def _device_of(fleet: "ServingFleet") -> tuple[str, ...]:
    return () if fleet.rehearsal else ("--device",)


def require_golden_answers(
    folder: Path, fleet: "ServingFleet", instance_type: str, seconds: float, words: Sequence[str]
) -> str:
    """Run the golden inputs on every core in a process of its own, whose memory is free again when the server starts;
    the sentence about what has run. `words` are the options of the store and the configuration."""
    cores = str(_entry(instance_type).logical_cores)
    place = ("--channel", fleet.channel, "--cores", cores, *_device_of(fleet))
    command = [*_NXPIPE, "agent", "warm", str(folder), *place, *words, "--json"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as late:
        raise NotReady(
            f"the golden inputs have not ended within {seconds:.0f} s, the rest of the fleet's ready_within; replace "
            "the instance, or raise ready_within"
        ) from late
    sys.stderr.write(done.stderr)
    if done.returncode:
        *_, last = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["it printed nothing"]
        raise NotReady(f"the golden inputs stop the artifact: {reported_error(last) or last}")
    return str(json.loads(done.stdout)["sentence"])


_TOOLS: Final = "/opt/aws/neuron/bin"  # of aws-neuronx-tools
_COLLECTIVES: Final = ("allr", "allg")  # all-reduce and all-gather, of which runtimes shard matrices
_COLLECTIVE_SECONDS: Final = 120.0


def require_collectives(contract: "ServingContract", environ: Mapping[str, str], seconds: float) -> str:
    """Run small collectives over the ranks of a contract by AWS's nccom-test, in processes of their own that end before
    the server starts; the sentence about what has run. A core that does not answer the others hangs a server for the
    rest of `ready_within`, and this for two minutes at most."""
    program = shutil.which("nccom-test", path=f"{environ.get('PATH', os.defpath)}{os.pathsep}{_TOOLS}")
    if program is None:
        return f"there is no nccom-test on PATH or in {_TOOLS}; collectives run in the server first"
    limit = min(seconds, _COLLECTIVE_SECONDS)
    for operation in _COLLECTIVES:
        sizes = ("--minbytes", "1kb", "--maxbytes", "1kb", "--datatype", "fp32")
        command = (program, "-r", str(contract.tp), *sizes, operation)
        code, last = _ended(command, environ, limit)
        what = f"{operation} over {contract.tp} ranks"
        if code is None:
            raise NotReady(
                f"{what} has not ended within {limit:.0f} s; a core or a link does not answer: replace the instance"
            )
        if code:
            raise NotReady(f"{what} ended with code {code}: {last}; a core or a link is faulty: replace the instance")
    return f"all-reduce and all-gather ran over {contract.tp} ranks"


def _ended(command: Sequence[str], environ: Mapping[str, str], seconds: float) -> tuple[int | None, str]:
    """The exit code of a command and the last line that it printed; None after `seconds`, when its processes end."""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environ,
        errors="replace", text=True, process_group=0,
    ) as process:  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks that outlive their parent would hold the cores
    *_, last = [line.strip() for line in printed.splitlines() if line.strip()] or ["it printed nothing"]
    return process.returncode, last[:200]


_PROMPTS: Final = ([0], [1], [0, 1], [1, 0, 1], [1, 1, 0, 0, 1])  # tokens of every vocabulary
_MAX_BYTES: Final = 4 << 20  # of a response
_PROBE_SECONDS: Final = 30.0


@dataclass
class Completions:
    """The completions of a model server, by OpenAI's API; servers for other tasks have none."""

    address: str
    port: int
    seconds: float = _PROBE_SECONDS
    _model: str | None = field(default=None, init=False)

    def generates(self) -> bool:
        """True for a server that completes a prompt, or that lists a model and fails to complete one; False for one
        that lists no model, or refuses the request as a server for another task does."""
        try:
            self._name()
        except (OSError, http.client.HTTPException, ValueError):
            return False
        try:
            status, document = self._complete(_PROMPTS[0])
        except (OSError, http.client.HTTPException, ValueError):
            return True
        return status >= http.client.INTERNAL_SERVER_ERROR or bool(document.get("choices"))

    def require_varied(self) -> None:
        """Raise NotReady for answers that are the same for every prompt, or are no numbers: of a core that was not
        initialised, or that does not run the program."""
        found = []
        for prompt in _PROMPTS:
            try:
                status, document = self._complete(prompt)
                if status != http.client.OK and "choices" not in document:
                    raise ValueError(f"status {status}, {json.dumps(document)[:200]}")
                choice = document["choices"][0]
                logprob = float((choice["logprobs"] or {})["token_logprobs"][0])
            except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as failed:
                raise NotReady(f"the server does not answer a request for one token: {cause_of(failed)}") from failed
            if status != http.client.OK or not math.isfinite(logprob):
                raise NotReady(
                    f"the server answers the prompt {prompt} with status {status} and a token of log-probability "
                    f"{logprob}; the model computes no numbers on this instance: replace the instance"
                )
            found.append((choice["text"], logprob))
        if all(each == found[0] for each in found):
            raise NotReady(
                f"the server answers {len(found)} different prompts with the same token and log-probability "
                f"{found[0][1]:.6g}; a core was not initialised, or does not run the program: replace the instance"
            )

    def is_answering(self) -> bool:
        """True if a request for one token is answered."""
        try:
            return self._complete(_PROMPTS[0])[0] == http.client.OK
        except (OSError, http.client.HTTPException, ValueError):
            return False

    def generated_tokens(self) -> float | None:
        """The server's count of generated tokens; None if it has none."""
        try:
            status, body = self._answer("GET", "/metrics")
        except (OSError, http.client.HTTPException):
            return None
        counts = [float(number) for number in TOKEN_COUNTERS[GENERATED_TOKENS].findall(body.decode(errors="replace"))]
        return sum(counts) if status == http.client.OK and counts else None

    def _complete(self, prompt: Sequence[int]) -> tuple[int, Any]:
        body = {"model": self._name(), "prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 1}
        status, answer = self._answer("POST", "/v1/completions", json.dumps(body))
        document = json.loads(answer)
        if not isinstance(document, dict):
            raise ValueError("the answer is no JSON object")
        return status, document

    def _name(self) -> str:
        """The name under which the server has the model."""
        if self._model is None:
            _, answer = self._answer("GET", "/v1/models")
            document = json.loads(answer)
            try:
                self._model = str(document["data"][0]["id"])
            except (LookupError, TypeError) as other:
                raise ValueError("the server lists no model") from other
        return self._model

    def _answer(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        headers = {"User-Agent": "nxpipe-agent", **({} if body is None else {"Content-Type": "application/json"})}
        connection = http.client.HTTPConnection(self.address, self.port, timeout=self.seconds)
        with closing(connection):
            connection.request(method, path, body=body, headers=headers)
            response = connection.getresponse()
            return response.status, response.read(_MAX_BYTES)


@dataclass
class TokenProgress:
    """The progress of a server in service: generated tokens, or the answer to a request for one token."""

    completions: Completions
    limit: float  # seconds without progress
    _tokens: float | None = field(default=None, init=False)
    _last: float = field(default_factory=time.monotonic, init=False)

    def fault(self) -> str | None:
        """The sentence about a server without progress; None while it has some."""
        tokens = self.completions.generated_tokens()
        moved = tokens is not None and self._tokens is not None and tokens != self._tokens
        self._tokens = tokens
        if moved or self.completions.is_answering():
            self._last = time.monotonic()
        idle = time.monotonic() - self._last
        if idle <= self.limit:
            return None
        return f"the server has generated no token for {idle:.0f} s, and does not answer a request for one"
