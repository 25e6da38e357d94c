"""Files of training: what is read of NxD Training and Hugging Face, and the files that launch a plan."""

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from nxpipe.pipeline.config import load_config
from nxpipe.pipeline.config.training_fleet import TrainingFleet
from nxpipe.pipeline.plan.training_files import ImportedTraining, read_training
from nxpipe.pipeline.plan.training_memory import Precision, Recompute
from nxpipe.pipeline.util.errors import InputInvalid
from tests.pipeline.in_process import InProcess, nxpipe
from tests.stacks.local import new_app
from tests.stacks.whole import write_locks

__all__ = ["nxpipe"]

ROOT = Path(__file__).parents[2]
CDK = ROOT / "node_modules" / ".bin" / "cdk"
MODEL = "meta-llama/Meta-Llama-3-8B-Instruct"
NXDT = """\
name: hf_llama
model_source: hf
trainer:
  devices: 32
  num_nodes: 4
  max_epochs: -1 # max_steps is reached first
  max_steps: 10000
exp_manager:
  checkpoint_callback_params:
    model_parallel_size: ${multiply:${distributed_strategy.tensor_model_parallel_size}, 1}
distributed_strategy:
  tensor_model_parallel_size: 32
  pipeline_model_parallel_size: 1
  virtual_pipeline_model_parallel_size: 1
  zero1: True
  sequence_parallel: True
  kv_replicator: 4
data:
  micro_batch_size: 1
  global_batch_size: 1024
  seq_length: ${model.encoder_seq_length}
model:
  encoder_seq_length: 8192
  num_layers: 32
  hidden_size: 4096
  activations_checkpoint_granularity: selective
  fusions:
    flash_attention: True
precision:
  type: 'mixed_precision'
"""
ARGUMENTS: dict[str, Any] = {
    "output_dir": "out",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 16,
    "max_steps": 500,
    "bf16": True,
    "gradient_checkpointing": True,
    "learning_rate": 2e-5,
    "optim": "adamw_torch",
    "tensor_parallel_size": 8,
    "zero_1": True,
}


def written(folder: Path, text: str, name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_configuration_of_nxd_training_is_read(tmp_path: Path) -> None:
    assert read_training(written(tmp_path, NXDT)) == ImportedTraining(
        kind="NxD Training",
        tp=32,
        pp=1,
        interleave=1,
        micro=1,
        sequences=1024,
        tokens=8192,
        steps=10000,
        instances=4,
        devices=32,
        zero1=True,
        sequence_parallel=True,
        flash=True,
        recompute=Recompute.SELECTIVE,
        precision=Precision.MIXED,
        sizes={"layers": 32, "hidden": 4096},
    )


def test_references_are_followed(tmp_path: Path) -> None:
    text = NXDT.replace("  encoder_seq_length: 8192\n", "  other: 2048\n")
    text = text.replace("${model.encoder_seq_length}", "${model.other}")
    assert read_training(written(tmp_path, text)).tokens == 2048


@pytest.mark.parametrize("name", ["arguments.json", "arguments.yaml"])
def test_training_arguments_are_read_from_json_and_yaml(name: str, tmp_path: Path) -> None:
    text = json.dumps(ARGUMENTS) if name.endswith("json") else "\n".join(f"{k}: {v}" for k, v in ARGUMENTS.items())
    found = read_training(written(tmp_path, text, name))
    assert (found.micro, found.accumulation, found.steps, found.tp) == (2, 16, 500, 8)
    assert (found.precision, found.recompute, found.zero1) == (Precision.MIXED, Recompute.FULL, True)
    assert found.sequences is None


def test_training_arguments_without_bf16_train_in_fp32(tmp_path: Path) -> None:
    found = read_training(written(tmp_path, json.dumps({"per_device_train_batch_size": 1, "max_steps": -1})))
    assert (found.precision, found.steps, found.accumulation) == (Precision.FP32, None, 1)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("global_batch_size: 1024", "global_batch_size: many", "data.global_batch_size is 'many', not a whole number"),
        ("micro_batch_size: 1", "micro_batch_size: 0", "data.micro_batch_size is 0, not a whole number from 1"),
        ("micro_batch_size: 1", "micro_batch_size: 1.5", "data.micro_batch_size is 1.5, not a whole number from 1"),
        ("micro_batch_size: 1", "micro_batch_size: true", "data.micro_batch_size is True, not a whole number from 1"),
        ("parallel_size: 32", "parallel_size: [32]", "tensor_model_parallel_size is [32], not a whole number from 1"),
        ("zero1: True", "zero1: 1", "distributed_strategy.zero1 is 1, not true or false"),
        ("granularity: selective", "granularity: some", "granularity is 'some', not one of selective, full"),
        ("type: 'mixed_precision'", "type: fp8", "precision.type is 'fp8', not one of mixed_precision"),
        ("devices: 32", "devices: ${trainer.devices}", "that no circle of references hides"),
        ("  max_steps: 10000", "  max_steps: 99999999999999", "max_steps is 99999999999999, not a whole number from 1"),
        ("data:\n  micro_batch_size: 1\n", "data: 5\nother:\n", "data is 5, not a mapping"),
        ("trainer:\n", "trainer: [\n", "not valid YAML"),
    ],
)
def test_each_malformed_field_is_refused_in_one_sentence(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    assert old in NXDT
    with pytest.raises(InputInvalid) as refused:
        read_training(written(tmp_path, NXDT.replace(old, new, 1)))
    assert sentence in str(refused.value)
    assert "config.yaml: " in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"fp16": True}, "fp16 is True, not false: NeuronCores train in bf16 or fp32"),
        ({"optim": "adafactor"}, "optim is 'adafactor', not an AdamW"),
        ({"per_device_train_batch_size": "2"}, "per_device_train_batch_size is '2', not a whole number from 1"),
        ({"gradient_accumulation_steps": -2}, "gradient_accumulation_steps is -2, not a whole number from 1"),
        ({"bf16": "yes"}, "bf16 is 'yes', not true or false"),
    ],
)
def test_each_malformed_argument_is_refused_in_one_sentence(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(InputInvalid) as refused:
        read_training(written(tmp_path, json.dumps(ARGUMENTS | changes)))
    assert sentence in str(refused.value)


@pytest.mark.parametrize("text", ["", "[]", "a: 1", '{"learning_rate": 1}', "- 1", "\x00", "{"])
def test_other_documents_are_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputInvalid, match=r"config\.yaml: .*pass"):
        read_training(written(tmp_path, text))


# The command.


def test_an_imported_layout_is_judged_beside_better_ones(nxpipe: InProcess, tmp_path: Path) -> None:
    path = written(tmp_path, NXDT)
    answer = nxpipe("plan", "train", "--model-id", MODEL, "--from", str(path), "--json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert found["tokens"] == 10000 * 1024 * 8192
    assert found["given"]["layout"]["tp"] == 32
    assert found["given"]["fits"]
    best = found["choices"][0]
    assert best["instances"] == 4
    assert best["tokens_per_second"]["expected"] >= found["given"]["tokens_per_second"]["expected"]


def test_an_imported_layout_that_cannot_run_or_does_not_fit_is_said(nxpipe: InProcess, tmp_path: Path) -> None:
    wrong = written(tmp_path, NXDT.replace("pipeline_model_parallel_size: 1", "pipeline_model_parallel_size: 3", 1))
    answer = nxpipe("plan", "train", "--model-id", MODEL, "--from", str(wrong))
    assert answer.code == 2
    assert "tp x pp x dp is 96, but 4 x trn1.32xlarge have 128 ranks" in answer.err
    large = NXDT.replace("tensor_model_parallel_size: 32", "tensor_model_parallel_size: 1").replace("4\n", "4\n", 1)
    answer = nxpipe("plan", "train", "--model-id", MODEL, "--from", str(written(tmp_path, large)), "--json")
    assert answer.code == 18
    found = json.loads(answer.out)
    assert not found["given"]["fits"]
    assert found["choices"], "layouts that fit are still shown"


def test_training_arguments_give_the_batch_of_a_number_of_instances(nxpipe: InProcess, tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps(ARGUMENTS), "arguments.json")
    asked = ("plan", "train", "--model-id", MODEL, "--from", str(path), "--instance", "trn1.32xlarge", "--json")
    answer = nxpipe(*asked, "--count", "2")
    found = json.loads(answer.out)
    assert found["sequences"] == 2 * 16 * (64 // 8)
    assert nxpipe(*asked).code == 2


def launched(nxpipe: InProcess, folder: Path, *arguments: str) -> Path:
    answer = nxpipe(
        *("plan", "train", "--model-id", MODEL, "--tokens", "10B", "--out", str(folder / "launch"), *arguments)
    )
    assert answer.code == 0, answer.err
    return folder / "launch"


# AWS Batch runs no multi-node jobs on spot instances.
WAYS = [("trn1.32xlarge", "spot", 1), ("trn1.32xlarge", "on-demand", 4), ("trn2.48xlarge", "capacity-block", 4)]


@pytest.mark.parametrize(("type_", "purchase", "count"), WAYS)
def test_the_written_fleet_is_valid_and_is_the_plan(
    type_: str, purchase: str, count: int, nxpipe: InProcess, tmp_path: Path
) -> None:
    folder = launched(nxpipe, tmp_path, "--instance", type_, "--count", str(count), "--purchase", purchase)
    assert nxpipe("config", "check", "--config", str(folder / "nxpipe.toml")).code == 0
    (fleet,) = load_config(folder / "nxpipe.toml", {}).fleets
    assert isinstance(fleet, TrainingFleet)
    assert (fleet.instance_types, fleet.nodes, fleet.capacity.kind) == ((type_,), count, purchase)
    assert (fleet.scratch is None) == (purchase == "spot")


def test_the_written_layout_reads_back_as_the_plan(nxpipe: InProcess, tmp_path: Path) -> None:
    folder = launched(nxpipe, tmp_path, "--instance", "trn1.32xlarge", "--count", "4", "--purchase", "on-demand")
    answer = nxpipe("plan", "train", "--model-id", MODEL, "--from", str(folder / "nxdt.yaml"), "--json")
    found = json.loads(answer.out)
    assert found["given"]["layout"] == found["choices"][0]["layout"]
    assert found["given"]["step_seconds"] == found["choices"][0]["step_seconds"]


def test_what_batch_does_not_run_is_not_written(nxpipe: InProcess, tmp_path: Path) -> None:
    asked = ("plan", "train", "--model-id", MODEL, "--tokens", "10B", "--instance", "trn1.32xlarge", "--count", "4")
    answer = nxpipe(*asked, "--purchase", "spot", "--out", str(tmp_path / "launch"))
    assert answer.code == 2
    assert "no multi-node jobs on spot instances; pass --purchase on-demand, or --count 1" in answer.err
    assert not (tmp_path / "launch").exists()


def stub(folder: Path, name: str) -> Path:
    """A program that records its arguments and the variables of the layout."""
    path = folder / name
    path.write_text(
        f'#!/bin/sh\n{{ printf "%s\\n" {name} "$@"; echo; env; }} >> "$RECORD"\n'
        'case "$1" in */train.sh) exec "$@";; esac\necho job-1\n'
    )
    path.chmod(0o755)
    return path


def test_the_scripts_start_the_ranks_of_the_plan_and_compile_first(nxpipe: InProcess, tmp_path: Path) -> None:
    folder = launched(nxpipe, tmp_path, "--instance", "trn1.32xlarge", "--count", "4", "--purchase", "on-demand")
    programs, record = tmp_path / "bin", tmp_path / "record"
    programs.mkdir()
    for name in ("torchrun", "neuron_parallel_compile", "aws"):
        stub(programs, name)
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "RECORD": str(record), "NXPIPE_CHECKPOINTS": "s3://kept"}
    batch = {"AWS_BATCH_JOB_NUM_NODES": "4", "AWS_BATCH_JOB_NODE_INDEX": "2"}
    batch["AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS"] = "10.0.0.7"
    done = subprocess.run([folder / "precompile.sh", "pretrain.py", "--x"], env=env | batch, check=False)
    assert done.returncode == 0
    lines = record.read_text().splitlines()
    assert lines[:4] == ["neuron_parallel_compile", str(folder / "train.sh"), "pretrain.py", "--x"]
    arguments = lines[lines.index("torchrun") + 1 :]
    assert arguments[:10] == [
        *("--nproc_per_node", "32", "--nnodes", "4", "--node_rank", "2", "--master_addr", "10.0.0.7"),
        *("--master_port", "44000"),
    ]
    assert arguments[10:12] == ["pretrain.py", "--x"]
    layout = json.loads((folder / "nxdt.yaml").read_text())
    tp = layout["distributed_strategy"]["tensor_model_parallel_size"]
    assert {f"TP_DEGREE={tp}", "GLOBAL_BATCH_SIZE=1024", "FI_PROVIDER=efa"} <= set(arguments)
    assert "NEURON_COMPILE_CACHE_URL=s3://kept/neuron-compile-cache" in arguments
    record.unlink()
    subprocess.run([folder / "submit.sh", "pretrain.py"], env=env, check=True, capture_output=True)
    jobs = record.read_text().split("aws\nbatch\nsubmit-job\n")[1:]
    assert ["precompile.sh" in job.split("\n\n")[0] for job in jobs] == [True, False]
    assert '[{"jobId": "job-1"}]' in jobs[1]
    assert all(path.stat().st_mode & stat.S_IXUSR for path in folder.glob("*.sh"))


def test_files_that_exist_are_not_replaced(nxpipe: InProcess, tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    written(tmp_path / "launch", "mine", "train.sh")
    answer = nxpipe("plan", "train", "--model-id", MODEL, "--tokens", "10B", "--out", str(tmp_path / "launch"))
    assert answer.code == 5
    assert "train.sh exists; move it away" in answer.err
    assert [path.name for path in (tmp_path / "launch").iterdir()] == ["train.sh"]


@pytest.mark.parametrize(("type_", "purchase", "count"), WAYS)
@pytest.mark.sample(16)
def test_the_stacks_of_the_written_fleet_synthesise(
    type_: str, purchase: str, count: int, nxpipe: InProcess, tmp_path: Path
) -> None:
    from nxpipe.stacks.app import add_stacks, deployable

    folder = launched(nxpipe, tmp_path, "--instance", type_, "--count", str(count), "--purchase", purchase)
    write_locks(folder)
    cdk = new_app(outdir=str(tmp_path / "out"))
    add_stacks(cdk, deployable(folder / "nxpipe.toml"), folder)
    assert any(stack.node.id.endswith("-train-training") for stack in cdk.node.children)
    names = {
        resource["Properties"].get("JobDefinitionName")
        for path in Path(cdk.synth().directory).glob("*train*.template.json")
        for resource in json.loads(path.read_text())["Resources"].values()
        if resource["Type"] == "AWS::Batch::JobDefinition"
    }
    assert names == {"meta-llama-3-8b-instruct-training"}
    assert all(f"--job-definition {name} " in (folder / "submit.sh").read_text() for name in names)


@pytest.mark.sample(24, "plans by the cdk command")
def test_plan_config_check_and_cdk_synth_follow_each_other(nxpipe: InProcess, tmp_path: Path) -> None:
    folder = launched(nxpipe, tmp_path)
    write_locks(folder)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "CDK_", "NXPIPE_"))}
    command = [str(CDK), "synth", "--quiet", "-c", f"config={folder / 'nxpipe.toml'}", "-o", str(tmp_path / "out")]
    env = kept | {"CDK_HOME": str(tmp_path / "home"), "CDK_VALIDATION": "false"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "out").glob("*-train-*.template.json"))
