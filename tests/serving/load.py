"""AIPerf, a public load generator, against `nxpipe serve`: `python -m tests.serving.load AIPERF`, which is what `make
load` does.

It is no test, for AIPerf has a gigabyte of dependencies. It runs as its authors publish it: for completions and chats,
streamed and whole, it sends requests to a tiny Llama on the emulator, reads /metrics, and reports. Every request must
be answered with as many tokens as it asked for.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.serving import checkpoints
from tests.serving.server_process import build, serving

REQUESTS, TOKENS = 200, 32
RUNS = (("completions", True), ("completions", False), ("chat", True), ("chat", False))


def main(aiperf: str) -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = ("--phases", "extend,decode", "--batches", "8", "--buckets", "64,512")
        artifact = build(folder, "llama", *words, max_position_embeddings=512)
        with serving(*artifact) as server:
            reports = [
                _report(aiperf, server.url, _tokenizer(folder / f"{kind}-{stream}"), kind, stream)
                for kind, stream in RUNS
            ]
    for (kind, stream), report in zip(RUNS, reports, strict=True):
        first = f"first token {report['time_to_first_token']['p50']:.0f} ms, " if stream else ""
        sys.stdout.write(
            f"{kind}{', streamed' if stream else ''}: {report['request_count']['avg']:.0f} of {REQUESTS} requests, "
            f"{report['output_token_throughput']['avg']:.0f} tokens/s, {first}"
            f"latency {report['request_latency']['p50']:.0f} ms (median)\n"
        )
    return 0 if all(map(_is_whole, reports)) else 1


def _is_whole(report: dict[str, Any]) -> bool:
    tokens = report["usage_completion_tokens"]
    answered = report["request_count"]["avg"] == REQUESTS and not report.get("error_request_count")
    return bool(answered and tokens["min"] == tokens["max"] == TOKENS)


def _report(aiperf: str, url: str, folder: Path, kind: str, stream: bool) -> dict[str, Any]:
    fields = ("--extra-inputs", "ignore_eos:true", "--extra-inputs", f"min_tokens:{TOKENS}")
    lengths = (
        "--synthetic-input-tokens-mean",
        "64",
        "--output-tokens-mean",
        str(TOKENS),
        "--output-tokens-stddev",
        "0",
    )
    # Random weights write random bytes, which are other tokens when they are read again.
    counts = ("--concurrency", "8", "--request-count", str(REQUESTS), "--use-server-token-count")
    output = ("--ui-type", "none", "--artifact-dir", str(folder / "report"))
    where = ("--url", url, "--endpoint-type", kind, "--tokenizer", str(folder))
    command = [aiperf, "profile", "-m", "llama", *where, *fields, *lengths, *counts, *output]
    done = subprocess.run(
        [*command, *(("--streaming",) if stream else ())], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{kind}: aiperf ended with {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    report: dict[str, Any] = json.loads((folder / "report/profile_export_aiperf.json").read_text())
    return report


def _tokenizer(folder: Path) -> Path:
    """The model's tokenizer, as transformers saves one."""
    folder.mkdir()
    checkpoints.tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": checkpoints.TEMPLATE}))
    return folder


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
