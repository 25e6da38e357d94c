"""The project of a smoke test: its files beside the user's nxpipe.toml, its price, and the commands that run in it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from math import ceil
from pathlib import Path
from shlex import quote
from string import Template as Text
from typing import Final

from nxpipe.artifact_store.canonical import sha256_hex
from nxpipe.pipeline.artifacts.store_url import open_uncached_store
from nxpipe.pipeline.config import Config
from nxpipe.pipeline.config.load import load, read_source, zones_of
from nxpipe.pipeline.config.prices import load_prices
from nxpipe.pipeline.fleet.account import Account
from nxpipe.pipeline.fleet.infrastructure import templates_of
from nxpipe.pipeline.fleet.teardown import FLEET, PARTS, StepFailed
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import InputInvalid, MissingSoftware
from nxpipe.pipeline.util.files import NAME, write_whole
from nxpipe.pipeline.util.text import for_json
from nxpipe.stacks.lint.costs import Estimate, estimate
from nxpipe.stacks.lint.template import Templates
from nxpipe.stacks.locks import LOCK, fleet_python, lock_of, locked_agent
from nxpipe.stacks.names import SMOKE_TAG

TYPE: Final = "inf2.xlarge"
MODEL: Final = "smoke"
CHANNEL: Final = "smoke"
_TEMPLATES: Final = Path(__file__).parents[1] / "templates"
_DELETION: Final = timedelta(minutes=30)  # after the limit; AWS bills started hours
_ACKNOWLEDGED: Final = timedelta(days=2)
_STARTED_TO_STOP: Final = 10  # seconds that a command has to end

# A model with one layer of 32 features: it compiles in seconds and needs no download.
_TINY: Final = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
# The server returns files of the artifact. It runs no program: those of the emulator run on no device.
_CONFIG: Final = """\
# Written by `nxpipe infra smoke`; `nxpipe infra smoke --destroy` deletes what it deploys.
[project]
name = ${name}
account = ${account}
region = ${region}

[store]
url = ${store}

[network]
kind = "closed"
zones = ${zones}

[amis]
${amis}
[[models]]
name = ${model}
path = ${model}
task = "fill-mask"
target = ${type}
buckets = [16]
weights = "random:0"

[[fleets]]
kind = "serving"
name = ${fleet}
model = ${model}
channel = ${channel}
instance_types = [${type}]
capacity = { kind = "on-demand" }
size = { min = 0, desired = 1, max = 1 }
command = ["python3", "-m", "http.server", "8000", "--directory", "/var/lib/nxpipe/artifact"]
health = "/manifest.json"
draining = "1s"
rehearsal = true

[[acknowledge]]
rule = "NXP-NET-3"
resource = ${stacks}
reason = "the only caller is the probe, inside of the network"
expires = ${until}
"""
_SUFFIX: Final = "-smoke"
_LONGEST: Final = 40  # characters of a project


@dataclass(frozen=True)
class PriceLine:
    """An hourly cost; None: unknown."""

    what: str
    hourly: float | None


@dataclass(frozen=True)
class SmokePrice:
    """What the test costs by the hour, and at most if the limit ends it."""

    lines: tuple[PriceLine, ...]
    hours: int  # started ones, with the deletion

    @classmethod
    def of(cls, costs: Estimate, limit: float, others: Sequence[str]) -> "SmokePrice":
        known = [PriceLine(str(line), line.hourly) for line in costs.lines]
        hours = ceil((limit + _DELETION.total_seconds()) / 3600)
        return cls((*known, *(PriceLine(what, None) for what in others)), hours)

    @property
    def hourly(self) -> float:
        """The sum of the known prices."""
        return sum(line.hourly or 0.0 for line in self.lines)

    @property
    def unknown(self) -> int:
        return sum(line.hourly is None for line in self.lines)

    @property
    def total(self) -> float:
        return self.hourly * self.hours


@dataclass
class SmokeProject:
    """The files of a smoke test, for one account."""

    config: Config  # of the user's project
    config_path: Path
    account: Account
    agent: str = ""  # digest of the bundle

    @classmethod
    def of(cls, config_path: Path) -> "SmokeProject":
        config = load(read_source(config_path, os.environ))
        project = cls(config, config_path.absolute(), Account(config.project.region))
        if len(project.name) > _LONGEST:
            raise InputInvalid(
                f"{project.name} is too long for a project; the smoke test needs a `name` in [project] of at most "
                f"{_LONGEST - len(_SUFFIX)} characters"
            )
        return project

    @property
    def name(self) -> str:
        return f"{self.config.project.name}{_SUFFIX}"

    @property
    def folder(self) -> Path:
        """Beside nxpipe.toml, in the folder that git ignores: its log and templates explain a failure."""
        return self.config_path.parent / NAME / "smoke"

    @property
    def toml(self) -> Path:
        return self.folder / "nxpipe.toml"

    def prepare(self, limit: float) -> SmokePrice:
        """Write the project, synthesize it, and compute its price."""
        if find_spec("torch") is None:
            raise MissingSoftware("torch", "nxpipe infra smoke", "run: pip install 'nxpipe[compile]'")
        folder, lock = self.config_path.parent, lock_of(self.config, self.config_path.parent)
        digest = locked_agent(folder, fleet_python(self.config, lock))
        if digest is None:
            raise InputInvalid(
                f"{folder / LOCK} does not exist, and the instance installs the agent that it names; run: nxpipe agent "
                "bundle packages --fetch WHEEL"
            )
        self.agent = digest
        self._require_bundle()
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / MODEL).mkdir(parents=True)
        (self.folder / MODEL / "config.json").write_text(json.dumps(_TINY))
        for name in (LOCK, self.config.amis.lock):
            if (folder / name).is_file():
                shutil.copyfile(folder / name, self.folder / Path(name).name)
        shutil.copyfile(_TEMPLATES / "cdk.json", self.folder / "cdk.json")
        self.write(f"file://{self.folder / 'store'}")
        self.cdk("synth", "--quiet", "--app", f"{quote(sys.executable)} -P -m nxpipe.stacks", "-c", f"{SMOKE_TAG}=true")
        return self.price(limit)

    def price(self, limit: float) -> SmokePrice:
        named = {f"{self.name}-{part}" for part in PARTS}
        every = templates_of([self.folder / "cdk.out"], self.account.region)
        costs = estimate(Templates(tuple(one for one in every.all if one.stack in named)), load_prices())
        config = load(read_source(self.toml, {}))
        gib = next(fleet.volume_gib for fleet in config.fleets if fleet.kind == "serving")
        others = (f"root volume, {gib} GiB of gp3", "KMS key", "requests, bytes and log lines")
        return SmokePrice.of(costs, limit, others)

    def _require_bundle(self) -> None:
        store = open_uncached_store(None, self.config_path, Console(quiet=True))
        if store.backend.stat(self._bundle) is None:
            raise InputInvalid(
                f"{store.url} has no {self._bundle}, which {LOCK} names; run: nxpipe agent bundle packages"
            )

    @property
    def _bundle(self) -> str:
        return f"agents/{self.agent}.tar"

    def write(self, store: str) -> None:
        amis = self.config.amis.model_dump(exclude_none=True, exclude={"lock"})
        values = {
            "name": self.name,
            "account": self.account.id,
            "region": self.account.region,
            "store": store,
            "zones": zones_of(self._located()),
            "model": MODEL,
            "type": TYPE,
            "fleet": FLEET,
            "channel": CHANNEL,
            "stacks": f"{self.name}-serve-{FLEET}*",
        }
        tables = {key: for_json(value) for key, value in values.items()}
        tables["amis"] = "".join(f"{key} = {for_json(value)}\n" for key, value in amis.items())
        tables["amis"] += f"lock = {for_json(Path(self.config.amis.lock).name)}\n"
        tables["until"] = str(datetime.now(UTC).date() + _ACKNOWLEDGED)
        write_whole(self.toml, Text(_CONFIG).substitute(tables).encode())

    def _located(self) -> Config:
        project = self.config.project.model_copy(update={"region": self.account.region})
        return self.config.model_copy(update={"project": project})

    def copy_agent(self) -> str:
        chunks = open_uncached_store(None, self.config_path, Console(quiet=True)).backend.read(self._bundle)
        data = b"".join(chunks or ())
        if sha256_hex(data) != self.agent:
            raise StepFailed(f"{self._bundle} in the project's store has another digest; run `nxpipe agent bundle`")
        store = open_uncached_store(None, self.toml, Console(quiet=True))
        store.backend.create(self._bundle, store.backend.hashed(data), durable=True)
        return f"{self._bundle}, {len(data)} bytes"

    def deploy(self, part: str, *more: str) -> None:
        settings = ("--app", "cdk.out", "--require-approval", "never", "--progress", "events", "--concurrency", "4")
        self.cdk("deploy", f"{self.name}-{part}", *settings, *more)

    def cdk(self, *arguments: str) -> None:
        self._command([self._find_cdk(), *arguments])

    def _find_cdk(self) -> str:
        """The CDK CLI of the repository, as npx finds it, else the one on the PATH."""
        folders = (self.folder, *self.folder.parents)
        own = [path for folder in folders if (path := folder / "node_modules" / ".bin" / "cdk").is_file()]
        found = str(own[0]) if own else shutil.which("cdk")
        if found is None:
            raise MissingSoftware("the CDK CLI", "nxpipe infra smoke", "run: npm install")
        return found

    def nxpipe(self, *arguments: str) -> str:
        start = "from nxpipe.pipeline.cli.entry import main; main()"
        return self._command([sys.executable, "-c", start, *arguments])

    def _command(self, command: Sequence[str]) -> str:
        """Run a command in the project's folder; its output goes to a log. It ends if this thread is interrupted."""
        log = self.folder / "smoke.log"
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("NXPIPE_")}
        environment = {
            **inherited,
            "AWS_REGION": self.account.region,
            "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "20",
            "NO_COLOR": "1",
        }
        with log.open("ab") as errors:
            errors.write(f"$ {' '.join(command)}\n".encode())
            errors.flush()
            # A session of its own: Ctrl-C on the terminal reaches this process only, which then ends the command.
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
            try:
                output, _ = process.communicate()
            except BaseException:
                _end(process)
                raise
            errors.write(output)
        if process.returncode:
            last = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()][-1]
            shown = " ".join(word for word in command[1:3] if not word.startswith(("-", "from")))
            raise StepFailed(f"{Path(command[0]).name} {shown} failed: {last}; see {log}")
        return output.decode()


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a command and its children."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            return
        try:
            process.wait(_STARTED_TO_STOP)
        except subprocess.TimeoutExpired:
            continue
        return
