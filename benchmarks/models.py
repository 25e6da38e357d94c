"""What `nxpipe check` says of well-known models at their real sizes, and what it costs beside plain torch.export.

Usage: python benchmarks/models.py [--folder DIR] [--only TEXT] [--page docs/models.md] [--no-export]

Each model is checked in a process of its own, with an empty cache, and again with a warm one. Beside it runs what one
would do without nxpipe: torch.export of the same model and its decomposition to core ATen. Rows are kept in DIR, one
file a model, so that a run which was interrupted goes on where it stopped; delete a file to measure again.
"""

import argparse
import datetime
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
KNOWN = ROOT / "pipeline" / "models" / "known_models.json"
TARGET = "trn2.48xlarge"
TIME_OUT = 600


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "nxpipe-models")
    parser.add_argument("--only", default="", help="models whose id contains this text")
    parser.add_argument("--page", type=Path, help="write the table there as a page")
    parser.add_argument("--no-export", action="store_true", help="leave plain torch.export out")
    parser.add_argument("--export-worker", metavar="ID", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.export_worker:
        return export_plainly(options.export_worker)
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for model in json.loads(KNOWN.read_text()):
        if options.only in model:
            rows.append(measured(model, options.folder, with_export=not options.no_export))
            print(line(rows[-1]), flush=True)
    if options.page:
        options.page.write_text(page(rows))
    return 0


def measured(model: str, folder: Path, *, with_export: bool) -> dict[str, Any]:
    """One row, from the folder if it was measured before."""
    path = folder / f"{model.replace('/', '--')}.json"
    row: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"model": model}
    if "check" not in row:
        with tempfile.TemporaryDirectory() as cache:
            command = [str(Path(sys.executable).parent / "nxpipe"), "check", "--model-id", model, "--target", TARGET]
            row["check"] = run([*command, "--json"], cache)
            row["warm"] = run([*command, "--json"], cache)
    if with_export and "export" not in row:
        row["export"] = run([sys.executable, __file__, "--export-worker", model], None)
    path.write_text(json.dumps(row, indent=1))
    return row


def run(command: list[str], cache: str | None) -> dict[str, Any]:
    """A command's answer, seconds and peak memory."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **({"XDG_CACHE_HOME": cache} if cache else {})}
    started = time.monotonic()
    # A parent in between, so that the peak is that of this command and no other's.
    measure = (
        "import json, resource, subprocess, sys\n"
        f"done = subprocess.run(sys.argv[1:], capture_output=True, text=True, timeout={TIME_OUT})\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "processor = used.ru_utime + used.ru_stime\n"
        "print(json.dumps([done.returncode, done.stdout, done.stderr[-2000:], used.ru_maxrss, processor]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", measure, *command], capture_output=True, text=True, env=environment, check=False
    )
    seconds = time.monotonic() - started
    if done.returncode:
        return {"code": None, "seconds": seconds, "error": f"more than {TIME_OUT} s"}
    code, out, error, peak, processor = json.loads(done.stdout)
    unit = 1 if platform.system() == "Darwin" else 1024
    answer = {"code": code, "seconds": seconds, "processor": processor, "peak": peak * unit}
    return answer | ({"out": json.loads(out)} if out.startswith(("[", "{")) else {"error": error})


def export_plainly(model: str) -> int:
    """torch.export and core ATen of the programs that a check compiles; nothing of ours but the model's making."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from emulator.capture.model import build_model
    from pipeline.models.source import resolve
    from pipeline.request import Shape, all_phases, capture_request

    started = time.monotonic()
    nodes = 0
    source = resolve(model)
    for phase in all_phases(source.task):
        request = capture_request(source, Shape("forward" if phase == "forward" else "prefill", 1, 128))
        built = build_model(request)
        tokens = 1 if phase == "decode" else 128
        ids = {"input_ids": torch.zeros((1, tokens), dtype=torch.int64)}
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            program = torch.export.export(built.to("meta"), (), {k: v.to("meta") for k, v in ids.items()}, strict=False)
            nodes += len(program.run_decompositions().graph.nodes)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": time.monotonic() - started, "nodes": nodes, "peak": peak}))
    return 0


def cells(row: dict[str, Any]) -> list[str]:
    check, warm, export = row["check"], row["warm"], row.get("export", {})
    seconds, processor = f"{check['seconds']:.1f}", f"{check.get('processor', 0):.1f}"
    peak = f"{check.get('peak', 0) / 2**30:.2f}"
    if "out" not in check:
        return [row["model"], str(check.get("error", "")).strip()[-80:], "", "", seconds, processor, peak, "", ""]
    (report,) = check["out"]
    (target,) = report["targets"] or [{"chosen": None}]
    verdict = f"fits at tp {target['chosen']}" if check["code"] == 0 else report["verdict"]
    worst = next((finding["rule"] for finding in report["findings"] if finding["severity"] == "error"), "")
    stored = sum(program["nodes"] for program in report["programs"])
    steps = sum(program["steps"] for program in report["programs"])
    plain = (
        f"{export['seconds']:.1f} ({export['processor']:.1f})" if export.get("code") == 0 else "fails" if export else ""
    )
    return [
        row["model"],
        f"{verdict} {worst}".strip(),
        f"{stored:,}",
        f"{steps:,}",
        seconds,
        processor,
        peak,
        f"{warm['seconds']:.2f}",
        plain,
    ]


HEADER = ("model", "check", "nodes", "unrolled", "seconds", "processor", "peak GiB", "warm", "plain export")


def line(row: dict[str, Any]) -> str:
    return "  ".join(cells(row))


def page(rows: list[dict[str, Any]]) -> str:
    table = [HEADER, ("---",) * len(HEADER), *map(cells, rows)]
    lines = "\n".join(f"| {' | '.join(row)} |" for row in table)
    lowered = sum(row["check"].get("code") in (0, 13) for row in rows)
    return (
        "# Models\n\nWhat `nxpipe check` says of well-known models at their real sizes: batch 1, 128 tokens, decoders "
        f"with prefill and decode, bf16 `matmult`, on {TARGET}. {lowered} of the {len(rows)} measured lower; "
        f"{len(json.loads(KNOWN.read_text()))} are known.\n\n"
        f"Measured by `python benchmarks/models.py --page docs/models.md` on {datetime.date.today()}, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}; imports of torch and transformers included. "
        "*nodes* are stored, *unrolled* is with every repeated layer written out. *processor* is the time the cores "
        "worked, which other work on the machine does not stretch; *warm* is a second check. *plain export* is "
        "torch.export and its decomposition to core ATen of the same programs without a cache, in a process of its "
        "own: seconds, and in brackets those of the processor.\n\n"
        f"{lines}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
