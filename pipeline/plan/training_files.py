"""Files of training: configurations of NxD Training and Hugging Face, which a plan reads, and those that launch one.

An imported file is a YAML or JSON document. What a plan needs is read and checked, everything else is ignored.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from nxpipe.pipeline.config.prices import Purchase
from nxpipe.pipeline.plan.training import TrainingCandidate
from nxpipe.pipeline.plan.training_memory import Precision, Recompute
from nxpipe.pipeline.util.errors import InputInvalid, MissingSoftware
from nxpipe.pipeline.util.files import DocumentInvalid, json_of, read_file
from nxpipe.pipeline.util.text import for_json

_LARGEST: Final = 1 << 20
_REFERENCE: Final = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_NEMO_PRECISION: Final = {
    "mixed_precision": Precision.MIXED,
    "mixed_precisionSR": Precision.MIXED,
    "bf16SR": Precision.BF16_SR,
    "autocast": Precision.MIXED,
    "fp32": Precision.FP32,
}


@dataclass(frozen=True)
class ImportedTraining:
    """What a configuration of another tool says of a run; None where it says nothing."""

    kind: str
    tp: int | None = None
    pp: int | None = None
    interleave: int | None = None
    micro: int | None = None
    sequences: int | None = None  # of a step
    accumulation: int | None = None  # micro-batches of a step, where `sequences` follows from the replicas
    tokens: int | None = None  # of a sequence
    steps: int | None = None
    instances: int | None = None
    devices: int | None = None  # ranks of an instance
    zero1: bool | None = None
    sequence_parallel: bool | None = None
    flash: bool | None = None
    recompute: Recompute | None = None
    precision: Precision | None = None
    sizes: Mapping[str, int] | None = None  # entries of an architecture


def read_training(path: Path) -> ImportedTraining:
    """The run that a file of NxD Training, or of Hugging Face's TrainingArguments, configures."""
    document = _document(path)
    fields = _Fields(path, document)
    if "distributed_strategy" in document or isinstance(document.get("trainer"), dict):
        return _nxd_training(fields)
    if "per_device_train_batch_size" in document:
        return _hugging_face(fields)
    raise InputInvalid(
        f"{path}: neither distributed_strategy of NxD Training nor per_device_train_batch_size of Hugging Face's "
        "TrainingArguments is in it; pass one of these files to --from"
    )


def _document(path: Path) -> dict[str, Any]:
    try:
        data = read_file(path, limit=_LARGEST)
        document = json_of(data) if data.lstrip().startswith(b"{") else _yaml(data.decode("utf-8"))
    except (OSError, UnicodeDecodeError, DocumentInvalid) as fault:
        raise InputInvalid(f"{path}: not a readable configuration ({fault}); pass a YAML or JSON file") from fault
    if not isinstance(document, dict):
        raise InputInvalid(f"{path}: the document is no mapping of names to values; pass a YAML or JSON file with one")
    return document


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise MissingSoftware("PyYAML", "a configuration in YAML", "pip install pyyaml") from error
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise DocumentInvalid(f"not valid YAML: {' '.join(str(error).split())[:200]}") from error


@dataclass(frozen=True)
class _Fields:
    """The fields of a document by their dotted names; `${a.b}` is the value of another field."""

    path: Path
    document: Mapping[str, Any]

    def value(self, name: str) -> Any:
        for _ in range(8):  # references to references
            found = self._at(name)
            if not (isinstance(found, str) and (reference := _REFERENCE.fullmatch(found.strip()))):
                return found
            name = reference[1]
        raise self.invalid(name, "a value that no circle of references hides")

    def _at(self, name: str) -> Any:
        found: Any = self.document
        for part in name.split("."):
            if found is None:
                return None
            if not isinstance(found, Mapping):
                raise self.invalid(name.rpartition(".")[0], "a mapping", found)
            found = found.get(part)
        return found

    def count(self, name: str, least: int = 1) -> int | None:
        """A whole number; None if there is none, or -1, which both tools write for it."""
        found = self.value(name)
        if found is None or found == -1:
            return None
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found < 10**12:
            raise self.invalid(name, f"a whole number from {least}", found)
        return found

    def flag(self, name: str) -> bool | None:
        found = self.value(name)
        if found is not None and not isinstance(found, bool):
            raise self.invalid(name, "true or false", found)
        return found

    def one_of(self, name: str, known: Sequence[str]) -> str | None:
        found = self.value(name)
        if found is None or (isinstance(found, str) and found in known):
            return found
        raise self.invalid(name, f"one of {', '.join(known)}", found)

    def invalid(self, name: str, wanted: str, found: Any = None) -> InputInvalid:
        return InputInvalid(f"{self.path}: {name} is {found!r:.60}, not {wanted}; correct the file")


def _nxd_training(f: _Fields) -> ImportedTraining:
    """NxD Training's YAML, which is NeMo's with the distributed strategy and the data as tables of their own."""
    granularity = f.one_of("model.activations_checkpoint_granularity", ("selective", "full"))
    precision = f.one_of("precision.type", (*_NEMO_PRECISION, "manual"))
    if precision == "manual":
        mixed = f.flag("precision.master_weights")
        precision = "mixed_precision" if mixed else "bf16SR"
    names = {
        "layers": "model.num_layers",
        "hidden": "model.hidden_size",
        "heads": "model.num_attention_heads",
        "kv_heads": "model.num_kv_heads",
        "intermediate": "model.ffn_hidden_size",
        "vocab": "model.vocab_size",
    }
    sizes = {key: size for key, name in names.items() if (size := f.count(name)) is not None}
    tokens = f.count("model.encoder_seq_length")
    return ImportedTraining(
        kind="NxD Training",
        tp=f.count("distributed_strategy.tensor_model_parallel_size"),
        pp=f.count("distributed_strategy.pipeline_model_parallel_size"),
        interleave=f.count("distributed_strategy.virtual_pipeline_model_parallel_size"),
        micro=f.count("data.micro_batch_size"),
        sequences=f.count("data.global_batch_size"),
        tokens=f.count("data.seq_length") if tokens is None else tokens,
        steps=f.count("trainer.max_steps"),
        instances=f.count("trainer.num_nodes"),
        devices=f.count("trainer.devices"),
        zero1=f.flag("distributed_strategy.zero1"),
        sequence_parallel=f.flag("distributed_strategy.sequence_parallel"),
        flash=f.flag("model.fusions.flash_attention"),
        recompute=Recompute(granularity) if granularity else Recompute.NONE,
        precision=_NEMO_PRECISION[precision] if precision else None,
        sizes=sizes,
    )


def _hugging_face(f: _Fields) -> ImportedTraining:
    """TrainingArguments, and what NeuronTrainingArguments of optimum-neuron adds."""
    if f.flag("fp16"):
        raise f.invalid("fp16", "false: NeuronCores train in bf16 or fp32", True)
    optimizer = f.value("optim")
    if optimizer is not None and not str(optimizer).startswith("adamw"):
        raise f.invalid("optim", "an AdamW, whose state alone is planned", optimizer)
    tokens = next((found for name in ("max_seq_length", "max_length") if (found := f.count(name))), None)
    return ImportedTraining(
        kind="TrainingArguments",
        tp=f.count("tensor_parallel_size"),
        pp=f.count("pipeline_parallel_size"),
        micro=f.count("per_device_train_batch_size"),
        accumulation=f.count("gradient_accumulation_steps") or 1,
        tokens=tokens,
        steps=f.count("max_steps"),
        zero1=f.flag("zero_1"),
        sequence_parallel=None if (disabled := f.flag("disable_sequence_parallel")) is None else not disabled,
        recompute=Recompute.FULL if f.flag("gradient_checkpointing") else None,
        precision=Precision.MIXED if f.flag("bf16") else Precision.FP32,
    )


FLEET: Final = "training"  # its name in nxpipe.toml
_SCRATCH: Final = "/scratch"  # where the stack mounts the file system of a fleet
_COMPILER_FLAGS: Final = "--model-type=transformer --distribution-strategy=llm-training"


@dataclass(frozen=True)
class Launch:
    """What the files of a plan name beside its layout."""

    project: str
    model_id: str
    nodes: int
    region: str
    zone: str
    purchase: Purchase
    steps: int
    block: tuple[datetime, datetime] | None = None  # the first capacity block


def launch_files(c: TrainingCandidate, launch: Launch) -> dict[str, str]:
    """The text of each file that launches a plan, by name."""
    return {
        "nxpipe.toml": _configuration(c, launch),
        "train.sh": _train(c),
        "precompile.sh": _precompile(),
        "submit.sh": _submit(launch),
        "nxdt.yaml": _nxdt(c, launch),
    }


def _configuration(c: TrainingCandidate, launch: Launch) -> str:
    folder = Path(launch.model_id)
    source = f"path = {for_json(str(folder.resolve()))}" if folder.is_dir() else f"id = {for_json(launch.model_id)}"
    lines = [
        f"# Written by `nxpipe plan train`: {c.count} x {c.instance.name}, {c.layout}.",
        *("[project]", f"name = {for_json(launch.project)}", f"region = {for_json(launch.region)}", ""),
        *("[store]", 'url = "file://.nxpipe/store"', ""),
        *("[[models]]", f"name = {for_json(launch.project)}", source, 'task = "text-generation"'),
        *(f"target = {for_json(c.instance.name)}", "buckets = [128]", ""),
        '# Before its deployment, the fleet needs the training container: image = "REPOSITORY_URI@sha256:..."',
    ]
    lines += [
        *("[[fleets]]", 'kind = "training"', f"name = {for_json(FLEET)}", f"model = {for_json(launch.project)}"),
        *('channel = "experiments"', f"instance_types = [{for_json(c.instance.name)}]"),
        *(f"zone = {for_json(launch.zone)}", f"nodes = {c.count}"),
    ]
    if launch.purchase is not Purchase.SPOT:  # which has a bucket for checkpoints
        lines.append("scratch = { size = 1200 } # GiB: checkpoints and the cache of compiled graphs")
    lines += _capacity(launch)
    return "\n".join(lines) + "\n"


def _capacity(launch: Launch) -> Iterator[str]:
    if launch.block is not None:
        start, end = launch.block
        yield "# Replace id, start, end and zone by those of the capacity block that you buy."
        yield "[fleets.capacity]"
        yield 'kind = "capacity-block"'
        yield 'id = "cr-00000000000000000"'
        yield f"instances = {launch.nodes}"
        yield f"start = {start:%Y-%m-%dT%H:%M:%SZ}"
        yield f"end = {end:%Y-%m-%dT%H:%M:%SZ}"
        return
    if launch.purchase not in (Purchase.SPOT, Purchase.ON_DEMAND):
        yield f"# Billed as {launch.purchase}: a commitment of the account, which changes no resource."
    yield f'capacity = {{ kind = "{"spot" if launch.purchase is Purchase.SPOT else "on-demand"}" }}'


def _train(c: TrainingCandidate) -> str:
    """One node's part of the job. AWS Batch sets its variables in multi-node jobs, the address on all but the main."""
    layout = c.layout
    environment = {
        "NEURON_CC_FLAGS": _COMPILER_FLAGS,
        "NEURON_FUSE_SOFTMAX": "1",
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1" if layout.precision is Precision.BF16_SR else "0",
        "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "7",
        "MALLOC_ARENA_MAX": "128",
        "TP_DEGREE": str(layout.tp),
        "PP_DEGREE": str(layout.pp),
        "VPP_DEGREE": str(layout.interleave),
        "DP_DEGREE": str(layout.dp),
        "MICRO_BATCH_SIZE": str(layout.micro),
        "NUM_MICROBATCHES": str(layout.micro_batches),
        "GLOBAL_BATCH_SIZE": str(layout.sequences),
        "SEQ_LEN": str(c.job.tokens),
        "USE_ZERO_1": "1" if layout.zero1 else "0",
        "SEQUENCE_PARALLEL": "1" if layout.sequence_parallel else "0",
        "ACTIVATIONS_CHECKPOINT": layout.recompute.value,
    }
    if c.count > 1:
        environment |= {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1", "FI_EFA_FORK_SAFE": "1"}
    exports = "\n".join(f"export {name}={json.dumps(value)}" for name, value in environment.items())
    return f"""#!/usr/bin/env bash
# Starts the ranks of one node: ./train.sh SCRIPT [ARGUMENT]...
# Written by `nxpipe plan train`: {layout}.
# The script reads the layout from these variables, or NxD Training from nxdt.yaml.
set -euo pipefail
: "${{1:?usage: ./train.sh SCRIPT [ARGUMENT]...}}"
{exports}
# Both jobs have one cache: in the bucket of a fleet on spot capacity, else on its file system.
shared="${{NXPIPE_CHECKPOINTS:-{_SCRATCH}}}"
export NEURON_COMPILE_CACHE_URL="${{NEURON_COMPILE_CACHE_URL:-$shared/neuron-compile-cache}}"
main=${{AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS:-${{MASTER_ADDR:-$(hostname -i | cut -d' ' -f1)}}}}
exec torchrun \\
    --nproc_per_node {c.instance.logical_cores} \\
    --nnodes "${{AWS_BATCH_JOB_NUM_NODES:-{c.count}}}" \\
    --node_rank "${{AWS_BATCH_JOB_NODE_INDEX:-${{NODE_RANK:-0}}}}" \\
    --master_addr "$main" \\
    --master_port "${{MASTER_PORT:-44000}}" \\
    "$@"
"""


def _precompile() -> str:
    return """#!/usr/bin/env bash
# Compiles the graphs of a run into the cache, without training: ./precompile.sh SCRIPT [ARGUMENT]...
# Run it as a job of its own before train.sh, with as many nodes: graphs depend on the number of ranks. Give the script
# about ten steps.
set -euo pipefail
: "${1:?usage: ./precompile.sh SCRIPT [ARGUMENT]...}"
# neuron_parallel_compile sets NEURON_EXTRACT_GRAPHS_ONLY=1: operations return zeros, and graphs are compiled after.
exec neuron_parallel_compile "$(dirname "$0")/train.sh" "$@"
"""


def _submit(launch: Launch) -> str:
    several = '{"nodePropertyOverrides": [{"targetNodes": "0:", "containerOverrides": job}]}'
    overrides = several if launch.nodes > 1 else "job"
    return f"""#!/usr/bin/env bash
# Submits the precompile job, and the training job after it: ./submit.sh SCRIPT [ARGUMENT]...
# The container has train.sh, precompile.sh and the script in its working folder.
set -euo pipefail
: "${{1:?usage: ./submit.sh SCRIPT [ARGUMENT]...}}"
export AWS_REGION="${{AWS_REGION:-{launch.region}}}"
overrides() {{
    python3 - "$@" <<'PYTHON'
import json, sys
job = {{"command": sys.argv[1:]}}
print(json.dumps({overrides}))
PYTHON
}}
submit() {{  # NAME DEPENDENCIES COMMAND...
    local name=$1 depends=$2
    shift 2
    aws batch submit-job --job-name "$name" --job-queue {launch.project}-{FLEET} \\
        --job-definition {launch.project}-{FLEET} --depends-on "$depends" \\
        --{"node" if launch.nodes > 1 else "container"}-overrides "$(overrides "$@")" --query jobId --output text
}}
precompile=$(submit precompile '[]' ./precompile.sh "$@")
submit train "[{{\\"jobId\\": \\"$precompile\\"}}]" ./train.sh "$@"
"""


def _nxdt(c: TrainingCandidate, launch: Launch) -> str:
    """The part of an NxD Training configuration that a plan decides; JSON is YAML."""
    layout = c.layout
    precision = {Precision.MIXED: "mixed_precision", Precision.BF16_SR: "bf16SR", Precision.FP32: "fp32"}
    granularity = None if layout.recompute is Recompute.NONE else layout.recompute.value
    document = {
        "trainer": {"devices": c.instance.logical_cores, "num_nodes": c.count, "max_steps": launch.steps},
        "distributed_strategy": {
            "tensor_model_parallel_size": layout.tp,
            "pipeline_model_parallel_size": layout.pp,
            "virtual_pipeline_model_parallel_size": layout.interleave,
            "zero1": layout.zero1,
            "sequence_parallel": layout.sequence_parallel,
        },
        "data": {"micro_batch_size": layout.micro, "global_batch_size": layout.sequences},
        "model": {
            "encoder_seq_length": c.job.tokens,
            "activations_checkpoint_granularity": granularity,
            "fusions": {"flash_attention": layout.flash},
        },
        "precision": {"type": precision[layout.precision]},
    }
    return for_json(document, 2) + "\n"
