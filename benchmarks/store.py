"""Speed of publishing and fetching with the artifact store, compared with other tools.

    nice -n -15 python benchmarks/store.py FOLDER [--runs N] [--aws PATH] [--s5cmd PATH] [--quick]

FOLDER is new, best in memory (/dev/shm). Every client moves the same random bytes in processes of its own, with a
server of its own where there is one; clients alternate, and the median of the runs counts. Runs repeat as long as there
is time. Clients that the first run could not measure in time are listed on the page, docs/results/store-speed.md, which
is rewritten. --quick tests the script: a sixteenth of the bytes, and no page.
"""

import argparse
import itertools
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from store_process import Cost, Failed, measured

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "results" / "store-speed.md"
MODEL = "example/benchmark"
BUCKET = "benchmark"
_PYTHON = sys.executable
_NXPIPE = str(Path(_PYTHON).parent / "nxpipe")
_MIB = 1024**2


@dataclass(frozen=True)
class Shape:
    count: int
    size: int

    @property
    def name(self) -> str:
        unit, size = ("MiB", self.size // _MIB) if self.size >= _MIB else ("KiB", self.size // 1024)
        return f"{self.count:,} x {size:,} {unit}"

    def files(self, folder: Path) -> Path:
        """Random bytes, written once."""
        where = folder / "source" / self.name.replace(" ", "").replace(",", "")
        if not where.exists():
            where.mkdir(parents=True)
            for number in range(self.count):
                (where / f"{number:04}").write_bytes(os.urandom(self.size))
        return where


SHAPES = (Shape(1, 1024 * _MIB), Shape(20, 64 * _MIB), Shape(2000, 64 * 1024))
# moto is an order of magnitude slower than any of its clients, so fewer bytes suffice.
MOTO_SHAPES = (Shape(1, 128 * _MIB), Shape(20, 4 * _MIB), Shape(200, 64 * 1024))


@dataclass(frozen=True)
class Client:
    """Commands that send the files of a folder to a URL, and that fetch them into a new folder."""

    name: str
    publish: Callable[[Path, str], Sequence[str]]
    fetch: Callable[[str, Path], Sequence[str]]


@dataclass(frozen=True)
class Row:
    place: str
    shape: str
    action: str
    client: str
    costs: tuple[Cost, ...]

    @property
    def median(self) -> Cost:
        return Cost(*(statistics.median(column) for column in zip(*self.costs, strict=True)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=9, help="time limit; later measurements are skipped")
    parser.add_argument("--aws", default="aws")
    parser.add_argument("--s5cmd", default="s5cmd")
    parser.add_argument("--place", action="append", choices=[place.name for place in PLACES], help="may be repeated")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs every `finally`
    options.folder.mkdir(parents=True)  # raises if it exists
    try:
        hit = _local_hit(options.folder)  # first: Python compiles all modules in it
        rows, left_out = _all_rows(options)
    finally:
        shutil.rmtree(options.folder)
    page = _page(rows, left_out, hit, options.runs)
    print(page)
    if not options.quick and not options.place:
        PAGE.write_text(page)
    return 0


@dataclass
class Session:
    """Measurements in rounds: if the time runs out, every client has had as many runs."""

    folder: Path
    deadline: float
    costs: dict[tuple[str, str, str, str], list[Cost]]  # by place, shape, action and client
    left_out: dict[str, str]  # reasons by measurement

    def run(self, place: "Place", client: Client, shape: Shape) -> None:
        what = f"{client.name} on {place.name}, {shape.name}"
        if what in self.left_out:
            return
        try:
            for action, cost in self._both_ways(place, client, shape).items():
                self.costs.setdefault((place.name, shape.name, action, client.name), []).append(cost)
        except Failed as error:
            if (place.name, shape.name, "publish", client.name) not in self.costs:
                self.left_out[what] = str(error)
            print(f"{what}: {error}", file=sys.stderr)

    def _both_ways(self, place: "Place", client: Client, shape: Shape) -> dict[str, Cost]:
        self._left()
        source, work = shape.files(self.folder), self.folder / "work"
        work.mkdir()
        try:
            with place.opened(work) as (url, environment):
                environment = {**environment, **_own_places(self.folder, work)}
                _get_memory_ready(work, shape)
                published = measured(client.publish(source, url), environment, self._left())
                _get_memory_ready(work, shape)
                fetched = measured(client.fetch(url, work / "fetched"), environment, self._left())
            result = sum(path.stat().st_size for path in (work / "fetched").rglob("*") if path.is_file())
            if result < shape.count * shape.size:
                raise Failed(f"{result} bytes came, and {shape.count * shape.size} were sent")
        finally:
            shutil.rmtree(work)
        return {"publish": published, "fetch": fetched}

    def _left(self) -> float:
        left = self.deadline - time.monotonic()
        if left < 0:
            raise Failed("the time limit was reached")
        return left


def _all_rows(options: argparse.Namespace) -> tuple[list[Row], Mapping[str, str]]:
    session = Session(options.folder, time.monotonic() + options.minutes * 60, {}, {})
    places = [place for place in PLACES if not options.place or place.name in options.place]
    work = [(place, shape) for place in places for shape in place.shapes]
    for number, (place, shape) in itertools.product(range(options.runs), work):
        if number and time.monotonic() > session.deadline:
            break
        small = Shape(shape.count, shape.size // 16) if options.quick else shape
        for client in place.clients(options):
            if _is_there(client):
                session.run(place, client, small)
            else:
                session.left_out[client.name] = "not installed"
        shutil.rmtree(options.folder / "source", ignore_errors=True)
        print(f"{place.name}, {small.name}: run {number + 1} of {options.runs}", file=sys.stderr)
    # Tables in the order of measurement: by shape, first publishing, then fetching.
    order = {key[:3]: number for number, key in enumerate(session.costs)}
    keys = sorted(session.costs, key=lambda key: order[key[:3]])
    return [Row(*key, tuple(session.costs[key])) for key in keys], session.left_out


def _get_memory_ready(folder: Path, shape: Shape) -> None:
    """Touch as much memory as a client writes, cache included. A virtual machine returns freed memory to its host, and
    getting it again takes seconds, which the first client would lose."""
    path, zeros = folder / "ready", bytes(_MIB)
    with path.open("wb", buffering=0) as file:
        for _ in range(2 * shape.count * shape.size // _MIB + 1):
            file.write(zeros)
    path.unlink()


def _own_places(folder: Path, work: Path) -> dict[str, str]:
    return {"HOME": str(work), "TMPDIR": str(work), "PYTHONPYCACHEPREFIX": str(folder / "compiled")}


def _is_there(client: Client) -> bool:
    return shutil.which(client.publish(Path(), "")[0]) is not None


# Clients


NXPIPE = Client(
    "nxpipe",
    lambda source, url: [_PYTHON, str(ROOT / "benchmarks/store_process.py"), "publish", str(source), url],
    lambda url, to: [_NXPIPE, "store", "fetch", MODEL, "--store", url, "--to", str(to), "--quiet"],
)
CP = Client(
    "cp + sha256sum",
    lambda source, url: ["sh", "-c", f"cp -r {source} {url} && sha256sum {url}/* > /dev/null"],
    lambda url, to: ["sh", "-c", f"cp -r {url} {to} && sha256sum {to}/* > /dev/null"],
)
BOTO3 = Client(
    "boto3",
    lambda source, url: [_PYTHON, str(ROOT / "benchmarks/store_process.py"), "boto3-up", str(source), url],
    lambda url, to: [_PYTHON, str(ROOT / "benchmarks/store_process.py"), "boto3-down", url, str(to)],
)


def _aws(program: str) -> Client:
    return Client(
        "aws s3 cp",
        lambda source, url: [program, "s3", "cp", "--recursive", "--quiet", str(source), f"{url}/files"],
        lambda url, to: [program, "s3", "cp", "--recursive", "--quiet", f"{url}/files", str(to)],
    )


def _s5cmd(program: str) -> Client:
    return Client(
        "s5cmd",
        lambda source, url: [program, "--log", "error", "cp", f"{source}/", f"{url}/files/"],
        lambda url, to: [program, "--log", "error", "cp", f"{url}/files/*", f"{to}/"],
    )


# Places


_IDENTITY = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def _in_a_folder(work: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    yield str(work / "store"), {}


@contextmanager
def on_our_server(work: Path, *words: str) -> Iterator[tuple[str, Mapping[str, str]]]:
    command = [_PYTHON, str(ROOT / "benchmarks/s3_server.py"), str(work / "served"), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        endpoint = server.stdout.readline().strip()
        try:
            yield f"s3://{BUCKET}/nxpipe", {"AWS_ENDPOINT_URL": endpoint, "S3_ENDPOINT_URL": endpoint, **_IDENTITY}
        finally:
            server.kill()


@contextmanager
def _on_moto(work: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    environment = {"AWS_ENDPOINT_URL": endpoint, "S3_ENDPOINT_URL": endpoint, **_IDENTITY}
    command = [_PYTHON, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as server:
        try:
            measured([_PYTHON, str(ROOT / "benchmarks/store_process.py"), "make-bucket", BUCKET], environment)
            yield f"s3://{BUCKET}/nxpipe", environment
        finally:
            server.kill()


@dataclass(frozen=True)
class Place:
    name: str
    opened: Callable[[Path], AbstractContextManager[tuple[str, Mapping[str, str]]]]
    shapes: Sequence[Shape]
    clients: Callable[[argparse.Namespace], Sequence[Client]]


def _of_s3(options: argparse.Namespace) -> Sequence[Client]:
    return NXPIPE, _s5cmd(options.s5cmd), _aws(options.aws), BOTO3


PLACES = (
    Place("a folder", _in_a_folder, SHAPES, lambda _: (NXPIPE, CP)),
    Place("S3, our fast server", on_our_server, SHAPES, _of_s3),
    Place("S3, moto", _on_moto, MOTO_SHAPES, _of_s3),
)


# A hit


def _local_hit(folder: Path) -> tuple[float, float]:
    """Milliseconds for fetching a small, completely cached artifact by its key, and for bare Python."""
    shape, work = Shape(20, 64 * 1024), folder / "hit"
    work.mkdir()
    environment = _own_places(folder, work)
    with on_our_server(work) as (url, served):
        measured(NXPIPE.publish(shape.files(folder), url), {**served, **environment})
        warm = subprocess.run(
            [*NXPIPE.fetch(url, work / "first"), "--json"],
            env={**os.environ, **served, **environment},
            capture_output=True,
            check=True,
            text=True,
        )
    key = json.loads(warm.stdout)["key"]
    times: dict[str, list[float]] = {"hit": [], "bare": []}
    for number in range(11):
        fetch = [_NXPIPE, "store", "fetch", key, "--store", url, "--to", str(work / str(number)), "--quiet"]
        for name, command in (("hit", fetch), ("bare", [_PYTHON, "-c", "pass"])):
            began = time.perf_counter()
            measured(command, environment)
            times[name].append((time.perf_counter() - began) * 1000)
    return statistics.median(times["hit"]), statistics.median(times["bare"])


# The page


_HEADING = """# How fast the store is

Time to publish and fetch with nxpipe and other tools; written by `benchmarks/store.py`, medians of up to {runs}
interleaved runs, on {cores} cores with client, server and files (in memory) on one machine. The ratio is the other
tool's time divided by nxpipe's: above 1, nxpipe is faster. nxpipe verifies the SHA-256 of every byte before use, also
writes what it fetches from S3 to its cache, and includes the start of its process; of the other tools, only
`sha256sum` verifies.
"""


def _page(rows: Sequence[Row], left_out: Mapping[str, str], hit: tuple[float, float], runs: int) -> str:
    parts = [_HEADING.format(runs=runs, cores=os.cpu_count())]
    if left_out:
        parts.append("\n".join(["Left out:\n", *(f"- {what}: {why}" for what, why in left_out.items()), ""]))
    for place in dict.fromkeys(row.place for row in rows):
        parts.append(f"## {place[0].upper()}{place[1:]}\n")
        parts.append("| What | Client | Seconds | Ratio | CPU seconds | Peak RSS, MB |\n|---|---|---|---|---|---|")
        parts[-1] += "".join(f"\n{_line(row, rows)}" for row in rows if row.place == place) + "\n"
    parts.append(
        f"## Cache hit\n\nFetching an artifact of 20 x 64 KiB by its full key from the cache of the machine: "
        f"{hit[0]:.0f} ms in total, of which the start of Python takes {hit[1]:.0f} ms; the goal is 150 ms.\n"
    )
    return "\n".join(parts)


def _line(row: Row, rows: Sequence[Row]) -> str:
    ours = next((entry for entry in rows if (entry.client, *_what(entry)) == (NXPIPE.name, *_what(row))), row)
    seconds, cpu, rss = row.median
    spread = f"{min(cost.seconds for cost in row.costs):.2f}-{max(cost.seconds for cost in row.costs):.2f}"
    ratio = "" if row is ours else f"{seconds / ours.median.seconds:.2f}"
    return f"| {row.action} {row.shape} | {row.client} | {seconds:.2f} ({spread}) | {ratio} | {cpu:.2f} | {rss:.0f} |"


def _what(row: Row) -> tuple[str, str, str]:
    return row.place, row.shape, row.action


if __name__ == "__main__":
    sys.exit(main())
