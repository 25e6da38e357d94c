"""Coverage-guided fuzzing of every reader of formats and programs: only typed errors, no hang.

    python benchmarks/fuzz.py [--runs N] [--only NAME]

Needs atheris, which is not among the development tools: pip install atheris. N inputs for each reader.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

RUNS = 100_000
LONGEST = 4096  # minimum of the input's size limit in bytes, which otherwise is twice that of the example
HANG = 5  # seconds for one input
_DONE = re.compile(r"Done (\d+) runs in (\d+) second")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--only", help="one reader")
    parser.add_argument("--here", action="store_true", help="in this process, which ends with it")
    args = parser.parse_args()
    if find_spec("atheris") is None:
        print("atheris is not installed: pip install atheris", file=sys.stderr)
        return 2
    if args.here:
        return fuzz(args.only, args.runs)
    from tests.executable.parsers import parsers as executables
    from tests.faults.parsers import parsers
    from tests.isa.parsers import parsers as programs

    names = [args.only] if args.only else [*parsers(), *executables(), *programs()]
    total = sum(in_a_process(name, args.runs) for name in names)
    print(f"{total:,} inputs, {len(names)} readers: typed errors only")
    return 0


def in_a_process(name: str, runs: int) -> int:
    """Fuzz in a process of its own, because libFuzzer ends its process."""
    command = [sys.executable, __file__, "--only", name, "--runs", str(runs), "--here"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    done = _DONE.search(ran.stderr)
    if ran.returncode or done is None:
        sys.exit(f"{name} failed:\n{ran.stdout[-2000:]}{ran.stderr[-6000:]}")
    inputs, seconds = int(done[1]), max(int(done[2]), 1)
    print(f"{name:<16} {inputs:>9,} inputs  {inputs // seconds:>7,} a second", flush=True)
    return inputs


def fuzz(name: str, runs: int) -> int:
    atheris = import_module("atheris")
    with atheris.instrument_imports(include=["artifact_store", "emulator"]):
        from nxpipe.artifact_store.errors import InvalidDocument
        from nxpipe.emulator.errors import ExecutableInvalid
        from tests.executable.parsers import parsers as executables
        from tests.faults.parsers import parsers
        from tests.isa.assembler import TextInvalid
        from tests.isa.parsers import parsers as programs
    parser = {**parsers(), **executables(), **programs()}[name]

    def one(data: bytes) -> None:
        try:
            parser.read(data)
        except (InvalidDocument, ExecutableInvalid, TextInvalid):
            return

    longest = max(LONGEST, 2 * len(parser.example))
    with tempfile.TemporaryDirectory() as corpus:
        (Path(corpus) / "example").write_bytes(parser.example)
        os.chdir(corpus)  # the folder for the input of a crash
        options = [f"-runs={runs}", f"-timeout={HANG}", f"-max_len={longest}", "-rss_limit_mb=1024"]
        atheris.Setup([sys.argv[0], *options, corpus], one)
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
