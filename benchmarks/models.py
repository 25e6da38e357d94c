"""Results and cost of `nxpipe check` for well-known models at full size, and the accuracy of the emulator.

Usage: python benchmarks/models.py [--folder DIR] [--only TEXT] [--page docs/results/models.md]

Each model is checked in a process of its own with an empty cache, and again with a warm one. For comparison, the same
programs go through plain torch.export and the decomposition to core ATen. A small model of the same class runs through
`nxpipe verify`. Rows are stored in DIR, one file per model, so that an interrupted run can continue; delete a file to
measure again.
"""

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # the small models are those of the tests

TARGET = "trn2.48xlarge"
TIME_OUT = 900
GOAL = 0.6  # relative to the time of plain export

# Models that must pass, each with the small model of the same class that is verified.
MODELS = {
    "meta-llama/Llama-2-7b-hf": "llama",
    "meta-llama/Llama-2-13b-hf": "llama",
    "meta-llama/Llama-2-70b-hf": "llama",
    "meta-llama/Meta-Llama-3-8B": "llama",
    "meta-llama/Meta-Llama-3-70B": "llama",
    "meta-llama/Llama-3.1-8B": "llama",
    "meta-llama/Llama-3.1-70B": "llama",
    "mistralai/Mistral-7B-v0.1": "mistral",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral",
    "Qwen/Qwen2.5-7B": "qwen2",
    "Qwen/Qwen2.5-72B-Instruct": "qwen2",
    "Qwen/Qwen3-8B": "qwen3",
    "google/gemma-2-2b": "gemma2",
    "google/gemma-2-9b": "gemma2",
    "microsoft/Phi-3-mini-4k-instruct": "phi3",
    "tiiuae/falcon-7b": "falcon",
    "gpt2": "gpt2",
    "EleutherAI/gpt-neo-1.3B": "gpt_neo",
    "EleutherAI/gpt-j-6b": "gptj",
    "bert-base-uncased": "bert",
    "bert-large-uncased": "bert",
    "roberta-base": "roberta",
    "distilbert-base-uncased": "distilbert",
    "albert-base-v2": "albert",
    "google/electra-base-discriminator": "electra",
    "xlm-roberta-base": "xlm-roberta",
    "t5-base": "t5",
    "facebook/bart-base": "bart",
    "openai/whisper-base": "whisper",
    "openai/whisper-large-v3": "whisper",
    "google/vit-base-patch16-224": "vit",
    "openai/clip-vit-base-patch32": "clip",
    "microsoft/resnet-50": "resnet",
    "facebook/convnext-tiny-224": "convnext",
    "facebook/dinov2-base": "dinov2",
    "microsoft/swin-tiny-patch4-window7-224": "swin",
    "stable-diffusion-v1-5/stable-diffusion-v1-5/unet": "unet",
    "stable-diffusion-v1-5/stable-diffusion-v1-5/vae": "vae",
    "stabilityai/stable-diffusion-2-1/unet": "unet",
    "stabilityai/stable-diffusion-2-1/vae": "vae",
    "stabilityai/stable-diffusion-xl-base-1.0/unet": "unet-xl",
    "stabilityai/stable-diffusion-xl-base-1.0/vae": "vae",
    "facebook/wav2vec2-base": "wav2vec2",
}
# Text models with fewer positions than the default bucket of a check.
TOKENS = {"clip": 77, "unet": 77, "unet-xl": 77}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "nxpipe-models")
    parser.add_argument("--only", default="", help="models whose id contains this text")
    parser.add_argument("--page", type=Path, help="write the table as a page to this path")
    parser.add_argument("--export-worker", metavar="ID", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.export_worker:
        return export_plainly(options.export_worker)
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for model in MODELS:
        if options.only in model:
            rows.append(measured(model, options.folder))
            print("  ".join(cells(rows[-1])), flush=True)
    if options.page:
        options.page.write_text(page(rows), encoding="utf-8")
    return 0


def measured(model: str, folder: Path) -> dict[str, Any]:
    """One row, from the folder if it was measured before."""
    path = folder / f"{model.replace('/', '--')}.json"
    row: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"model": model}
    nxpipe, buckets = str(Path(sys.executable).parent / "nxpipe"), str(tokens(model))
    if "check" not in row:
        with tempfile.TemporaryDirectory() as cache:
            check = [nxpipe, "check", "--model-id", model, "--target", TARGET, "--buckets", buckets, "--json"]
            row["check"], row["warm"] = run(check, cache), run(check, cache)
    if "export" not in row:
        row["export"] = run([sys.executable, __file__, "--export-worker", model])
    if "verify" not in row:
        with tempfile.TemporaryDirectory() as small:
            phases = write_small_model(model, Path(small))
            options = ["--weights", "random:0", "--buckets", "12", "--phases", phases, "--also", "none", "--json"]
            row["verify"] = run([nxpipe, "verify", "--model-id", small, *options])
    path.write_text(json.dumps(row, indent=1))
    return row


def tokens(model: str) -> int:
    return TOKENS.get(MODELS[model], 128)


def write_small_model(model: str, folder: Path) -> str:
    """Write the configuration of a small model of the same class; returns the phases in which it is verified."""
    from nxpipe.pipeline.models.catalogue import find
    from nxpipe.pipeline.models.configuration import default_phases
    from tests.emulator.models import small_config

    known = find(model)
    assert known is not None
    names = {key: known.config[key] for key in ("architectures", "_class_name") if key in known.config}
    kept_in = {} if "_class_name" in names else {"torch_dtype": "float32"}  # diffusers does not have this setting
    config = {**small_config(MODELS[model]), **names, **kept_in}
    (folder / "config.json").write_text(json.dumps(config))
    return ",".join(default_phases(known.task))


def run(command: list[str], cache: str | None = None) -> dict[str, Any]:
    """The result, seconds and peak memory of a command."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **({"XDG_CACHE_HOME": cache} if cache else {})}
    # An intermediate process, so that the peak is that of this command alone.
    measure = (
        "import json, resource, subprocess, sys, time\n"
        "started = time.monotonic()\n"
        f"done = subprocess.run(sys.argv[1:], capture_output=True, text=True, timeout={TIME_OUT})\n"
        "seconds = time.monotonic() - started\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "processor = used.ru_utime + used.ru_stime\n"
        "print(json.dumps([done.returncode, done.stdout, done.stderr[-2000:], used.ru_maxrss, processor, seconds]))\n"
    )
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", measure, *command], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        return {"code": None, "seconds": time.monotonic() - started, "error": f"more than {TIME_OUT} s"}
    code, out, error, peak, processor, seconds = json.loads(done.stdout)
    unit = 1 if platform.system() == "Darwin" else 1024
    answer = {"code": code, "seconds": seconds, "processor": processor, "peak": peak * unit}
    return answer | ({"out": json.loads(out)} if out.startswith(("[", "{")) else {"error": error})


class Taken(BaseException):
    """Raised with a program by our front end before any transformation of ours."""

    def __init__(self, program: Any) -> None:
        super().__init__()
        self.program = program


def export_plainly(model: str) -> int:
    """torch.export and core ATen of the programs that a check compiles: the same modules and tensors.

    The module that turns a decoder's step into a function of its cache is ours; the rest is PyTorch's.
    """
    import torch

    from nxpipe.emulator.capture import export
    from nxpipe.pipeline.models.configuration import Shape
    from nxpipe.pipeline.models.source import resolve

    def take(program: Any) -> Any:
        raise Taken(program)

    export.lower_to_known_operators = take
    source, nodes = resolve(model), 0
    for phase in source.default_phases:
        try:
            export.capture_model(source.capture_request(Shape(phase, 1, tokens(model))))
        except Taken as taken:
            with torch.no_grad(), export.quiet_torch():
                nodes += len(taken.program.run_decompositions().graph.nodes)
    print(json.dumps({"nodes": nodes}))
    return 0


HEADER = (
    *("model", "check", "nodes", "unrolled", "seconds", "processor s", "peak GiB", "warm s", "plain export", "ratio"),
    *("verified", "max abs", "KL", "top-1", "cosine"),
)


def cells(row: dict[str, Any]) -> list[str]:
    return [row["model"], *check_cells(row["check"], row["warm"]), *export_cells(row), *verify_cells(row)]


def check_cells(check: dict[str, Any], warm: dict[str, Any]) -> list[str]:
    figures = [f"{check['seconds']:.1f}", f"{check.get('processor', 0):.1f}", f"{check.get('peak', 0) / 2**30:.2f}"]
    if "out" not in check:
        return [str(check.get("error", "")).strip()[-80:], "", "", *figures, ""]
    (report,) = check["out"]
    (target,) = report["targets"] or [{"chosen": None}]
    worst = next((finding["rule"] for finding in report["findings"] if finding["severity"] == "error"), "")
    verdict = f"fits at tp {target['chosen']}" if check["code"] == 0 else f"{report['verdict']} {worst}"
    stored, steps = (sum(program[what] for program in report["programs"]) for what in ("nodes", "steps"))
    return [verdict, f"{stored:,}", f"{steps:,}", *figures, f"{warm['seconds']:.2f}"]


def export_cells(row: dict[str, Any]) -> list[str]:
    plain = row["export"]
    if plain["code"] != 0:
        return ["fails", ""]
    return [f"{plain['seconds']:.1f} ({plain['processor']:.1f})", f"{ratio(row):.2f}" if comparable(row) else ""]


def comparable(row: dict[str, Any]) -> bool:
    """Whether both runs have completed."""
    return row["check"]["code"] is not None and row["export"]["code"] == 0


def ratio(row: dict[str, Any]) -> float:
    """The ratio of CPU times, which other load on the machine does not affect."""
    return float(row["check"]["processor"] / row["export"]["processor"])


def verify_cells(row: dict[str, Any]) -> list[str]:
    """The worst output of all programs, with bf16 matmult."""
    done = row["verify"]
    if "out" not in done:
        return ["fails", str(done.get("error", "")).strip()[-80:], "", "", ""]
    errors = [output for program in done["out"] for output in program["emulated"]["matmult"]["outputs"]]
    scored = [output for output in errors if output["kl"] is not None]
    verdict = f"{len(done['out'])} of {len(done['out'])}" if done["code"] == 0 else "beyond [verify]"
    kl = f"{max(output['kl'] for output in scored):.1e}" if scored else ""
    top1 = f"{min(output['top1'] for output in scored):.2f}" if scored else ""
    worst, cosine = max(output["max_absolute"] for output in errors), min(output["cosine"] for output in errors)
    return [verdict, f"{worst:.1e}", kl, top1, f"{cosine:.6f}"]


def page(rows: list[dict[str, Any]]) -> str:
    table = [HEADER, ("---",) * len(HEADER), *map(cells, rows)]
    lines = "\n".join(f"| {' | '.join(row)} |" for row in table)
    return f"# Models\n\n{legend()}\n\n{summary(rows)}\n\n{lines}\n\n## Breadth\n\n{sweep()}\n"


def legend() -> str:
    libraries = ("torch", "transformers", "diffusers")
    versions = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in libraries)
    return (
        "Results of `nxpipe check` for well-known models at full size: batch 1, 128 tokens (77 for models with a "
        f"shorter limit), decoders with prefill and decode, bf16 `matmult`, on {TARGET}.\n\n"
        "Written by `nice -n -15 python benchmarks/models.py --page docs/results/models.md` on "
        f"{datetime.date.today()}, {os.cpu_count()} cores under other load, Python {platform.python_version()}, "
        f"{versions}.\n\n"
        "- *nodes* is the number of stored nodes, *unrolled* that with all repeated layers unrolled.\n"
        "- *seconds* and *peak* are those of the whole command with an empty cache, including imports of torch and "
        "transformers; *processor* is CPU time, which depends less on other load; *warm* is a second check.\n"
        "- *plain export* is torch.export and its decomposition to core ATen of the same programs, in its own "
        "process with the same imports: seconds, with CPU seconds in brackets. *ratio* is the CPU time of the check "
        "divided by that of the export.\n"
        "- *verified* is `nxpipe verify` of a small model of the same class with random weights, against PyTorch fp32: "
        "the programs within the thresholds, and the worst output of all programs under bf16 `matmult`."
    )


def summary(rows: list[dict[str, Any]]) -> str:
    exported = [row for row in rows if comparable(row)]
    passed = sum(row["check"]["code"] == 0 for row in rows)
    verified = sum(row["verify"]["code"] == 0 for row in rows)
    within = sum(ratio(row) <= GOAL for row in exported)
    ours, theirs = (sum(row[what]["processor"] for row in exported) for what in ("check", "export"))
    return (
        f"{passed} of {len(rows)} pass, {verified} verify. {within} of {len(exported)} take at most {GOAL} of the "
        f"processor time of plain export; in total {ours:.0f} s and {theirs:.0f} s, a ratio of "
        f"{ours / max(theirs, 1e-9):.2f}. Slowest warm check {max(row['warm']['seconds'] for row in rows):.2f} s."
        f"\n\n{floor(rows)}"
    )


def floor(rows: list[dict[str, Any]]) -> str:
    """The lower bound of every check: the imports that it shares with plain export."""
    small = [row for row in rows if comparable(row) and ratio(row) > GOAL]
    imports = (
        "import gc; gc.disable(); from nxpipe.emulator.capture import repeated_layers; gc.freeze()"  # as a check does
    )
    seconds = run([sys.executable, "-c", imports]).get("processor", 0.0)
    names = ", ".join(f"`{row['model']}` {ratio(row):.2f}" for row in small)
    above = f"Above the goal of {GOAL}: {names}. " if small else ""
    return (
        f"{above}In every check, the imports of torch and transformers take {seconds:.1f} s of CPU time, "
        "which dominates both times for models with few programs and layers."
    )


def sweep() -> str:
    """The totals of the sweep over all classes, from its own page."""
    text = (ROOT / "docs" / "results" / "sweep.md").read_text(encoding="utf-8")
    totals = next((line for line in text.splitlines() if re.match(r"\d+ of \d+ classes lower", line)), "")
    return (
        f"Every model class of transformers' automatic mappings, cut to two layers: {totals} See [the sweep](sweep.md)."
    )


if __name__ == "__main__":
    sys.exit(main())
