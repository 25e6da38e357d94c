"""Replay of the product: everything that a change of structure must leave as it was, recorded and compared.

Usage: python benchmarks/replay.py record OUT [--quick] [--jobs N] [--checkout DIR] [--only SECTION]...
       python benchmarks/replay.py compare A B
       python benchmarks/replay.py check [--quick] [--jobs N] [--checkout DIR] [--only SECTION]...
       python benchmarks/replay.py baseline RECORD

`record` writes a folder: entries/ has a JSON document for each entry, nxe/ the programs, digests.json the digests.
`compare` takes two such folders, or digests alone, and ends in exit code 1 if there is a difference. `check` records
the checkout into a temporary folder and compares it with `benchmarks/replay/baseline.json`. `baseline` replaces in that
file the sections that a record has. The product is driven from outside only: by the `nxpipe` command, by `app.py`, and
by the Lambda function that `app.py` packs. Nothing is fetched. Sections:

    interface  names of commands, flags, exit codes and keys of nxpipe.toml
    check      `nxpipe check --json` of small models, of models at their real size, and of faulty ones
    build      two dozen small models x tensor-parallel 1 and 2 x NeuronCore-v2 and v3: programs, graphs, manifests,
               key inputs, evidence, layout of the store
    documents  field names and types of the commands' `--json` documents
    projects   CloudFormation templates and configuration of six projects
    canary     records of 50 rollouts that the judge decides, and the summaries of 50 simulations

What is left out, because it differs between runs or follows from the compiler's source: of key inputs
`compiler.source`; of manifests the digest of the key inputs; of action records, reports, leases and parts all but the
layout of their paths; of evidence `manifest`, `surroundings` and `seal`; of build documents `request_key`, `manifest`,
`seconds` and `attempts`; of templates the digests of assets; of the judge's records `previous`, whose chain is verified
instead. The handler of the Lambda function is compared without the prefix `nxpipe.`.

Texts for people (messages, advice, descriptions, titles) are kept apart from data: other words are reported and are no
difference. So are other Sids of IAM statements. Figures of evidence depend on the processor: they are compared only
where both records come from the same one.
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
INPUTS: Final = Path(__file__).resolve().parent / "replay"
BASELINE: Final = INPUTS / "baseline.json"
SECTIONS: Final = ("interface", "check", "build", "documents", "projects", "canary")

_TEXT: Final = "<text>"
_TEXTS: Final = frozenset(
    (
        *("message", "advice", "reason", "why", "in_short", "description", "title", "text", "help"),
        *("Description", "AlarmDescription", "AssertDescription", "Comment", "Cause", "MessageBody"),
        *("label", "markdown", "displayName"),
    )
)
# A description that CloudFormation can only change by replacing the resource is data.
_REPLACING: Final = frozenset(("AWS::IAM::ManagedPolicy", "AWS::EC2::SecurityGroup"))
_HEX: Final = re.compile(r"[0-9a-f]{64}")
_NUMBER: Final = re.compile(r"\d+(?:\.\d+)?")


@dataclass
class Entry:
    """One document: `data` must not change, `texts` may. `machine` marks figures that depend on the processor."""

    data: Any
    texts: dict[str, str] = field(default_factory=dict)
    machine: bool = False


class ReplayFailed(Exception):
    """The product did not produce what a record needs."""


# Recording


@dataclass
class Product:
    """A checkout, driven from outside."""

    root: Path
    work: Path
    jobs: int
    quick: bool

    def __post_init__(self) -> None:
        home = self.work / "home"
        home.mkdir(parents=True)
        kept = {"PATH", "LD_LIBRARY_PATH", "NVM_DIR"}
        self.environment = {name: value for name, value in os.environ.items() if name in kept} | {
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home / "cache"),
            "XDG_STATE_HOME": str(home / "state"),
            "TMPDIR": str(self.folder("tmp")),
            "LC_ALL": "C.UTF-8",
            "TZ": "UTC",
            "COLUMNS": "200",
            "NO_COLOR": "1",
            "HF_HUB_OFFLINE": "1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "1",
        }

    def folder(self, name: str) -> Path:
        path = self.work / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def python(self) -> Path:
        return self.root / ".venv" / "bin" / "python"

    def nxpipe(self, *words: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
        return self.run([self.root / ".venv" / "bin" / "nxpipe", *words], cwd or self.work)

    def run(self, command: Sequence[str | Path], cwd: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [str(word) for word in command],
            cwd=cwd,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )

    def each(self, work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        with ThreadPoolExecutor(self.jobs) as pool:
            return list(pool.map(work, items))


Entries = Iterator[tuple[str, Entry]]


def record(product: Product, out: Path, sections: Sequence[str]) -> None:
    shutil.rmtree(out, ignore_errors=True)
    (out / "nxe").mkdir(parents=True)
    document: dict[str, Entry] = {}
    seconds: dict[str, float] = {}
    for section in SECTIONS:
        if section not in sections:
            continue
        began = time.monotonic()
        for name, entry in _RECORDERS[section](product, out):
            if f"{section}/{name}" in document:
                raise ReplayFailed(f"two entries are called {section}/{name}")
            document[f"{section}/{name}"] = entry
        seconds[section] = round(time.monotonic() - began, 1)
        sys.stderr.write(f"{section}: {seconds[section]} s\n")
    for name, entry in document.items():
        path = out / "entries" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(vars(entry), indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    write_digests(out, document, sections, quick=product.quick)
    (out / "seconds.json").write_text(json.dumps(seconds) + "\n")


def write_digests(out: Path, found: Mapping[str, Entry], sections: Sequence[str], *, quick: bool) -> None:
    digests = {
        "surroundings": found["build/surroundings"].data if "build/surroundings" in found else {},
        "sections": list(sections),
        "quick": quick,
        "entries": {name: digests_of(found[name]) for name in sorted(found) if name != "build/surroundings"},
    }
    (out / "digests.json").write_text(_lines(digests))


def digests_of(entry: Entry) -> str:
    """The digests of the data and of the texts, and whether the data depend on the machine."""
    data, texts = (hashlib.sha256(_spelled(item).encode()).hexdigest()[:16] for item in (entry.data, entry.texts))
    return f"{data} {texts}{' machine' if entry.machine else ''}"


def _spelled(document: Any) -> str:
    return json.dumps(document, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _lines(digests: Mapping[str, Any]) -> str:
    """A line for each entry, so that a change of the baseline can be read."""
    return json.dumps(digests, indent=0, ensure_ascii=False) + "\n"


def split(document: Any, *, is_text: Callable[[tuple[Any, ...], Any], bool] | None = None, **more: bool) -> Entry:
    """The data of a document, and its texts by their paths."""
    texts: dict[str, str] = {}
    is_text_at = is_text or (lambda path, value: bool(path) and path[-1] in _TEXTS)

    def walk(value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, str) and is_text_at(path, value):
            texts["/".join(map(str, path))] = value
            return _TEXT if value else ""
        if isinstance(value, Mapping):
            return {key: walk(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item, (*path, number)) for number, item in enumerate(value)]
        return value

    return Entry(walk(document, ()), texts, **more)


def without(document: Any, *names: str) -> Any:
    """The document without these keys, at any depth."""
    if isinstance(document, Mapping):
        return {key: without(value, *names) for key, value in document.items() if key not in names}
    if isinstance(document, list):
        return [without(entry, *names) for entry in document]
    return document


def shape_of(value: Any) -> Any:
    """Names and types of a document. Keys that are digests or names with a digest are one key."""
    if isinstance(value, Mapping):
        fields: dict[str, Any] = {}
        for key, item in value.items():
            name = re.sub(r"[0-9a-f]{16,64}", "<digest>", key)
            fields[name] = _either(fields.get(name), shape_of(item))
        return fields
    if isinstance(value, list):
        joined = None
        for entry in value:
            joined = _either(joined, shape_of(entry))
        return [] if joined is None else [joined]
    return type(value).__name__


def _either(left: Any, right: Any) -> Any:
    if left is None or left == right:
        return right
    if isinstance(left, dict) and isinstance(right, dict):
        return {key: _either(left.get(key), right.get(key, left.get(key))) for key in {**left, **right}}
    if isinstance(left, list) and isinstance(right, list):
        return [_either(left[0], right[0])] if left and right else left or right
    return " or ".join(sorted({*str(left).split(" or "), *str(right).split(" or ")}))


def _failure(done: "subprocess.CompletedProcess[str]", work: Path) -> dict[str, str]:
    """A command's stderr without progress lines and names of temporary folders."""
    lines = done.stderr.replace(str(work), "WORK").splitlines()
    return {"stderr": "\n".join(line for line in lines if not re.search(r"\b\d+(\.\d+)? s\b", line))}


# Section "interface"


def interface(product: Product, _: Path) -> Entries:
    todo: list[tuple[str, ...]] = [()]
    while todo:
        answers = product.each(lambda words: product.nxpipe(*words, "--help"), todo)
        below = []
        for words, done in zip(todo, answers, strict=True):
            flags, commands = _read_help(done.stdout)
            below += [(*words, command) for command in commands] if not product.quick or not words else []
            data = {"flags": flags, "commands": commands, "exit code": done.returncode}
            yield f"help/{' '.join(('nxpipe', *words))}", Entry(data, {"help": done.stdout})
        todo = below
    schema = product.nxpipe("config", "schema")
    yield "schema of nxpipe.toml", split(json.loads(schema.stdout))
    page = next((product.root / "docs").rglob("exit-codes.md")).read_text()
    rows = re.findall(r"^\|\s*`?(\d+)`?\s*\|\s*([^|]*?)\s*\|(.*)\|\s*$", page, re.MULTILINE)
    yield "exit codes", Entry([row[:2] for row in rows], {number: text for number, _, text in rows})
    for words in (("build", "--no-such-flag"), ("no-such-command",), ("check", "--model-id", "./missing")):
        done = product.nxpipe(*words)
        yield f"exit code of {' '.join(words)}", Entry(done.returncode, _failure(done, product.work))


def _read_help(text: str) -> tuple[list[str], list[str]]:
    """Flags with their choices, and commands, from the first columns of the sections Options and Commands."""
    flags, commands, section = [], [], ""
    for line in text.splitlines():
        if line and not line.startswith(" "):
            section = line.rstrip(":")
        elif section == "Options" and re.match(r"  -", line):
            column = re.split(r"\s{2,}", line.strip())[0]
            flags.append(" ".join(re.findall(r"(?<![\w-])--?[a-z][\w-]*|\[[^\]]*\|[^\]]*\]", column)))
        elif section == "Commands" and re.match(r"  \S", line):
            commands.append(line.split()[0])
    return flags, commands


# Section "check"

_REAL: Final = (
    ("bert-base-uncased", "inf2.xlarge", None),
    ("gpt2", "trn1.2xlarge", 2),
    ("meta-llama/Llama-3.1-8B", "inf2.48xlarge", 24),
    ("mistralai/Mixtral-8x7B-v0.1", "trn2.48xlarge", 8),
    ("google/gemma-2-2b", "trn1.32xlarge", None),
    ("openai/whisper-tiny", "inf2.xlarge", None),
    ("google/vit-base-patch16-224", "trn2.48xlarge", None),
    ("meta-llama/Llama-3.1-70B", "inf2.xlarge", None),  # does not fit into memory
)
_FAULTY: Final = {
    "unknown type": {"model_type": "berd"},
    "no type": {"hidden_size": 8},
    "not supported": {
        "model_type": "mamba",
        "architectures": ["MambaForCausalLM"],
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "vocab_size": 101,
        "state_size": 4,
    },
    "heads": {"model_type": "bert", "architectures": ["BertModel"], "hidden_size": 30, "num_attention_heads": 4},
}


def check(product: Product, _: Path) -> Entries:
    projects = [("inf2.xlarge", 1), *([] if product.quick else [("trn2.48xlarge", 2)])]

    def small(project: tuple[str, int]) -> "subprocess.CompletedProcess[str]":
        folder = write_models(product, product.folder(f"check-{project[0]}"), [project])
        return product.nxpipe("check", "--json", cwd=folder)

    for (target, degree), done in zip(projects, product.each(small, projects), strict=True):
        yield f"small {target} tp {degree}/exit code", Entry(done.returncode)
        for document in _json_of(done):
            yield f"small {target} tp {degree}/{document['model']}", split(document)

    def real(case: tuple[str, str, int | None]) -> "subprocess.CompletedProcess[str]":
        degree = [] if case[2] is None else ["--tp", str(case[2])]
        return product.nxpipe("check", "--model-id", case[0], "--target", case[1], *degree, "--json")

    cases = _REAL[:1] if product.quick else _REAL
    for case, done in zip(cases, product.each(real, cases), strict=True):
        entry = split({"exit code": done.returncode, "document": _json_of(done)})
        yield f"real/{case[0].replace('/', ' ')} {case[1]}", entry
    for name, config in _FAULTY.items():
        folder = product.folder(f"faulty/{name}")
        (folder / "config.json").write_text(json.dumps(config))
        done = product.nxpipe("check", "--model-id", f"./{name}", "--buckets", "16", "--json", cwd=folder.parent)
        entry = split({"exit code": done.returncode, "document": json.loads(done.stdout or "null")})
        yield f"faulty/{name}", Entry(entry.data, entry.texts | _failure(done, product.work))


def _json_of(done: "subprocess.CompletedProcess[str]") -> Any:
    try:
        return json.loads(done.stdout)
    except ValueError as error:
        raise ReplayFailed(f"{' '.join(done.args)}: exit code {done.returncode}, no JSON\n{done.stderr}") from error


def models_of(product: Product) -> dict[str, dict[str, Any]]:
    models: dict[str, dict[str, Any]] = json.loads((INPUTS / "models.json").read_text())
    return {name: models[name] for name in ("bert", "llama")} if product.quick else models


def write_models(product: Product, folder: Path, variants: Sequence[tuple[str, int]]) -> Path:
    """A project of all models: folders with a config.json, and nxpipe.toml. The first variant is the model itself."""
    verify = "[verify]\nmin_cosine = 0.98\nmax_relative_error = 0.3"  # wide enough for fp8
    lines = ['[project]\nname = "replay"\n[store]\nurl = "file://store"', verify]
    for name, model in models_of(product).items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(model["config"]))
        allowed = [(target, degree) for target, degree in variants if degree in model.get("tp", (1, 2))] or variants[:1]
        (target, degree), *also = allowed
        fields = {
            "name": name,
            "path": name,
            "weights": "random:0",
            "target": target,
            "tp": degree if degree in model.get("tp", (1, 2)) else 1,
            "buckets": model.get("buckets", [32]),
            "also": [{"targets": [target], "tp": [degree]} for target, degree in also],
        }
        fields |= {
            key: model[key] for key in ("task", "batches", "phases", "autocast", "autocast_type") if key in model
        }
        lines += ["[[models]]", *(f"{key} = {_toml(value)}" for key, value in fields.items())]
    (folder / "nxpipe.toml").write_text("\n".join(lines) + "\n")
    return folder


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    return f"[{', '.join(map(_toml, value))}]" if isinstance(value, list) else json.dumps(value)


# Section "build"

_VARIANTS: Final = (("inf2.xlarge", 1), ("inf2.xlarge", 2), ("trn2.48xlarge", 1), ("trn2.48xlarge", 2))
_FILES: Final = (("neurons.onnx", ("--axis", "batch=4")), ("attention.pt2", ()))


def build(product: Product, out: Path) -> Entries:
    folder = product.folder("build")
    write_models(product, folder, _VARIANTS[:2] if product.quick else _VARIANTS)
    documents = _build(product, folder, "--keep-going")
    targets = "inf2.xlarge" if product.quick else "inf2.xlarge,trn2.48xlarge"
    for name, words in _FILES:
        shutil.copy(INPUTS / name, folder)
        documents += _build(product, folder, "--model-id", f"./{name}", "--target", targets, *words)
    count: Counter[str] = Counter()
    for document in documents:
        kept = without(document, "request_key", "manifest", "seconds", "attempts", "verification")
        name = f"{document['model']} {document['target']}"
        count[name] += 1
        yield f"document/{name} {count[name]}", split(kept)
    yield from _store(Store(folder / "store"), out)


def _build(product: Product, folder: Path, *words: str) -> list[dict[str, Any]]:
    """Build with two workers always: the number of threads of each is among the surroundings of its evidence."""
    done = product.nxpipe("build", *words, "--jobs", "2", "--json", cwd=folder)
    if done.returncode:
        raise ReplayFailed(f"{' '.join(done.args)}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    documents: list[dict[str, Any]] = json.loads(done.stdout)
    return documents


@dataclass(frozen=True)
class Store:
    """The files of a local store, read by its documented format."""

    folder: Path

    def blob(self, digest: str) -> bytes:
        return (self.folder / "cas" / "sha256" / digest[:2] / digest).read_bytes()

    def documents(self, *under: str) -> Iterator[tuple[str, Any]]:
        folder = self.folder.joinpath(*under)
        for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
            if path.is_file():
                yield path.name, json.loads(path.read_bytes())


def _store(store: Store, out: Path) -> Entries:
    surroundings: dict[str, Any] = {}
    for _, action in store.documents("ac"):
        digest = action["manifest"]["sha256"]
        manifest = json.loads(store.blob(digest))
        inputs = json.loads(store.blob(manifest["key_inputs"]["sha256"]))
        degree = manifest["executables"][0]["tensor_parallel"]
        name = f"{manifest['model']['id']} {manifest['target']} tp {degree}"
        del inputs["compiler"]["source"]
        yield f"{name}/key inputs", Entry(inputs)
        graphs = {file["path"]: file["blob"] for file in manifest["files"]}
        for left in manifest["executables"]:
            (out / "nxe" / f"{name} {left['name']}.nxe").write_bytes(store.blob(left["blob"]["sha256"]))
            yield f"{name}/program {left['name']}", Entry(left | {"graph": graphs[f"graphs/{left['name']}"]})
        for path, blob in graphs.items():
            if path == "utilisation.json":
                yield f"{name}/utilisation", split(json.loads(store.blob(blob["sha256"])))
        del manifest["key_inputs"], manifest["executables"]
        for file in manifest["files"]:
            if file["path"] == "utilisation.json":
                del file["blob"]
        yield f"{name}/manifest", Entry(manifest)
        for _, evidence in store.documents("evidence", digest):
            result = without(evidence, "manifest", "surroundings", "seal")
            inputs_of = {program["program"]: program.pop("inputs") for program in result["programs"]}
            yield f"{name}/inputs of evidence", Entry(inputs_of)
            yield f"{name}/evidence", Entry(result, machine=True)
            surroundings = evidence["programs"][0]["surroundings"]
    yield "layout of the store", Entry(sorted(set(_layout(store.folder))))
    yield "surroundings", Entry(surroundings)


def _layout(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*"):
        if path.is_file():
            name = str(path.relative_to(folder))
            name = re.sub(r"^(cas/sha256/)..", r"\1<two>", _HEX.sub("<digest>", name))
            name = re.sub(r"^(neuron-artifacts)/[^/]*", r"\1/<model>", name)
            yield re.sub(r"[0-9a-f]{16}(?=/manifest)|\d{8}T[\d.]+Z|(?<=/)\d{10}$", "<number>", name)


# Section "documents"

_SLOW: Final = ("build", "explain", "bench", "run", "verify", "rollout")


def documents(product: Product, _: Path) -> Entries:
    """Field names of the commands' output. The commands run in order, on the store that the former ones leave."""
    folder = product.folder("documents")
    (folder / "tiny").mkdir(exist_ok=True)
    llama = json.loads((INPUTS / "models.json").read_text())["llama"]["config"]
    (folder / "tiny" / "config.json").write_text(json.dumps(llama))
    model = ("--model-id", "./tiny", "--weights", "random:0", "--buckets", "16")
    store = ("--store", "store")
    keys: list[str] = []
    for degree in ("1", "2"):
        _build(product, folder, *model, "--tp", degree, *store)
        listed = _json_of(product.nxpipe("store", "ls", *store, "--json", cwd=folder))
        keys += {str(row["request_key"]) for row in listed} - {*keys}
    first, second = keys
    shutil.copy(INPUTS / "projects" / "serving.toml", folder / "project.toml")
    config = ("--config", "project.toml")
    load = ("--rps", "20", "--base-error", "0.005")
    commands: list[tuple[str, ...]] = [
        ("build", *model, *store),
        ("build", *model, *store, "--dry-run", "--autocast", "all"),
        ("explain", *model, *store, "--autocast", "all"),
        ("explain", first, *store),
        ("diff", first, second, *store, "--tensors"),
        ("dis", first, *store, "--program", "prefill-b1-s16", "--totals"),
        ("store", "ls", *store),
        ("store", "show", first, *store),
        ("store", "du", *store),
        ("store", "pin", first, "--as", "kept", *store),
        ("store", "pin", *store),
        ("store", "fsck", *store),
        ("store", "gc", "--dry-run", *store),
        ("store", "doctor", *store),
        ("store", "fetch", first, "--to", "served", *store),
        ("store", "keygen", "release.key"),
        ("store", "sign", first, "--key", "file:release.key", *store),
        ("store", "verify-signature", first, "--public-key", "release.key.pub", *store),
        ("store", "export", first, "--to", "out.tar", *store),
        ("promote", first, "--channel", "staging", *store),
        ("promote", second, "--channel", "staging", *store),
        ("channel", "show", "staging", *store),
        ("channel", "log", "staging", *store),
        ("rollback", "--channel", "staging", *store),
        ("bench", first, "--against", second, *store),
        ("run", first, *store),
        ("verify", *model),
        ("config", "check", *config),
        ("config", "show", *config),
        ("doctor",),
        ("version",),
        ("rollout", "plan", *load, *config),
        ("rollout", "simulate", *load, "--rollouts", "2", *config),
        ("init", "new", "--dry-run"),
    ]
    for number, words in enumerate(commands):
        if product.quick and words[0] in _SLOW:
            continue
        done = product.nxpipe(*words, "--json", cwd=folder)
        name = " ".join({first: "FIRST", second: "SECOND"}.get(word, word) for word in words)
        try:
            shape = shape_of(json.loads(done.stdout)) if done.stdout.strip() else None
        except ValueError:
            shape = "no JSON"
        texts = _failure(done, product.work) if done.returncode else {}
        depends = words[0] == "doctor"  # on the installed packages
        entry = Entry({"exit code": done.returncode, "shape": shape}, texts, machine=depends)
        yield f"{number:02} {name.replace('/', ' ')}", entry


# Section "projects"


def projects(product: Product, _: Path) -> Entries:
    names = sorted(path.stem for path in (INPUTS / "projects").glob("*.toml"))
    names = ["canary"] if product.quick else names
    folder = product.folder("projects")
    shutil.copytree(INPUTS / "projects", folder, dirs_exist_ok=True)
    answers = product.each(lambda name: synthesise(product, folder / f"{name}.toml"), names)
    for name, (done, assembly) in zip(names, answers, strict=True):
        texts = {str(number): line for number, line in enumerate(_notes(done.stderr.replace(str(folder), "")))}
        yield f"{name}/exit code", Entry(done.returncode)
        yield f"{name}/costs", Entry(re.findall(r"\$[\d,.]*\d", done.stderr), texts)
        yield from ((f"{name}/{stack}", entry) for stack, entry in assembly_entries(assembly))
        shown = product.nxpipe("config", "show", "--config", f"{name}.toml", "--json", cwd=folder)
        yield f"{name}/configuration", split(json.loads(shown.stdout.replace(str(folder), "FOLDER")))


def _notes(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.strip() and "!!" not in line]


def synthesise(product: Product, config: Path) -> tuple["subprocess.CompletedProcess[str]", Path]:
    """`app.py` as `cdk synth` runs it."""
    out = product.work / "assemblies" / config.stem
    context = json.loads((product.root / "cdk.json").read_text())["context"]
    context |= {"config": str(config), "aws:cdk:enable-path-metadata": True, "aws:cdk:enable-asset-metadata": True}
    given = {"CDK_CONTEXT_JSON": json.dumps(context), "CDK_OUTDIR": str(out), "CDK_VALIDATION": "false"}
    done = product.run([product.python, "app.py"], product.root, **given)
    if done.returncode or not out.is_dir():
        raise ReplayFailed(f"{config.name}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    return done, out


def assembly_entries(assembly: Path) -> Entries:
    assets: dict[str, Any] = {}
    for path in assembly.glob("*.assets.json"):
        for digest, asset in json.loads(path.read_text())["files"].items():
            if not asset["source"]["path"].endswith(".template.json"):
                assets[digest] = asset.get("displayName")
    hidden = re.compile("|".join([*assets, "$^"]))
    for path in sorted(assembly.glob("*.template.json")):
        template = json.loads(hidden.sub("<asset>", path.read_text()))
        yield f"template {path.name.removesuffix('.template.json')}", template_entry(template)
    artifacts = json.loads((assembly / "manifest.json").read_text())["artifacts"]
    fields = ("stackName", "terminationProtection", "tags", "templateFile")
    stacks = {
        name: {
            "environment": artifact["environment"],
            "dependencies": sorted(artifact.get("dependencies", ())),
            **{key: artifact["properties"][key] for key in fields if key in artifact["properties"]},
        }
        for name, artifact in artifacts.items()
        if artifact["type"] == "aws:cloudformation:stack"
    }
    yield "stacks", Entry({"stacks": stacks, "assets": sorted(map(str, assets.values()))})


def template_entry(template: dict[str, Any]) -> Entry:
    """A template, with the JSON documents in its texts parsed: state machines and dashboards."""
    replacing = {name for name, resource in template.get("Resources", {}).items() if resource["Type"] in _REPLACING}

    def is_text(path: tuple[Any, ...], _: Any) -> bool:
        if path[-1] == "Sid":
            return True
        return path[-1] in _TEXTS and not (path[0] == "Resources" and path[1] in replacing)

    return split(_read_embedded(template), is_text=is_text)


def _read_embedded(value: Any, key: str = "") -> Any:
    if isinstance(value, Mapping):
        if set(value) == {"Fn::Join"} and value["Fn::Join"][0] == "":
            parts = value["Fn::Join"][1]
            places = {f"@@{number}@@": _spelled(part) for number, part in enumerate(parts) if not isinstance(part, str)}
            text = "".join(part if isinstance(part, str) else f"@@{number}@@" for number, part in enumerate(parts))
            document = _embedded(text)
            return value if document is None else _filled(document, places)
        return {key: _read_embedded(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_read_embedded(entry) for entry in value]
    if isinstance(value, str):
        if key == "Handler":
            return value.removeprefix("nxpipe.")
        document = _embedded(value)
        return value if document is None else document
    return value


def _embedded(text: str) -> Any:
    if not text.startswith(("{", "[")):
        return None
    try:
        return {"embedded JSON": json.loads(text)}
    except ValueError:
        return None


def _filled(document: Any, places: Mapping[str, str]) -> Any:
    if isinstance(document, Mapping):
        return {_filled(key, places): _filled(value, places) for key, value in document.items()}
    if isinstance(document, list):
        return [_filled(entry, places) for entry in document]
    if isinstance(document, str):
        return re.sub(r"@@\d+@@", lambda match: places[match[0]], document)
    return document


# Section "canary"

_SIMULATIONS: Final = (
    ("steady", "--base-error 0.005"),
    ("steady", "--base-error 0.005 --canary-error 0.02"),
    ("steady", "--base-error 0.002 --latency-scale 1.3"),
    ("incident", "--base-error 0.005"),
    ("bursty", "--base-error 0.005 --canary-error 0.008"),
    ("late", "--base-error 0.005 --canary-error 0.02"),
)
_LATENCIES: Final = (0.1, 0.15, 0.2, 0.3, 0.5, 0.625, 0.8)
_PERIOD: Final = 60
_COLOURS: Final = ("blue", "green", "standby")


def canary(product: Product, _: Path) -> Entries:
    seeds = range(6 if product.quick else 50)
    (product.folder("canary") / "nxpipe.toml").write_text('[project]\nname = "replay"\n')

    def simulate(seed: int) -> "subprocess.CompletedProcess[str]":
        scenario, words = _SIMULATIONS[seed % len(_SIMULATIONS)]
        command = f"rollout simulate --scenario {scenario} --rps 20 {words} --rollouts 20 --seed {seed} --json"
        return product.nxpipe(*command.split(), cwd=product.folder("canary"))

    for seed, done in zip(seeds, product.each(simulate, seeds), strict=True):
        name = f"simulation/seed {seed:02} {_SIMULATIONS[seed % len(_SIMULATIONS)][0]}"
        yield name, split({"exit code": done.returncode, "document": _json_of(done)})
    yield from _judged(product, seeds)


def _judged(product: Product, seeds: Iterable[int]) -> Entries:
    """Rollouts that the judge decides: the archive and handler named in the template of a fleet's rollout."""
    folder = product.folder("projects")
    shutil.copytree(INPUTS / "projects", folder, dirs_exist_ok=True)
    assembly = product.work / "assemblies" / "canary"
    if not assembly.is_dir():
        synthesise(product, folder / "canary.toml")
    template = json.loads((assembly / "answers-rollout-search.template.json").read_text())
    (function,) = (r for r in template["Resources"].values() if r["Type"] == "AWS::Lambda::Function")
    code = product.folder("judge")
    with zipfile.ZipFile(next(assembly.glob("asset.*.zip"))) as packed:
        packed.extractall(code)
    module, _, name = function["Properties"]["Handler"].rpartition(".")
    serve = (
        "import importlib, json, sys\n"
        f"sys.path.insert(0, {str(code)!r})\n"
        f"handle = getattr(importlib.import_module({module!r}), {name!r})\n"
        "for line in sys.stdin:\n"
        "    try:\n"
        "        answer = handle(json.loads(line), None)\n"
        "    except Exception as error:\n"
        "        answer = {'raised': type(error).__name__, 'message': str(error)}\n"
        "    print(json.dumps(answer), flush=True)\n"
    )
    with subprocess.Popen(
        [product.python, "-I", "-S", "-B", "-c", serve],
        cwd=code,
        env=product.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as running:

        def invoke(question: str, given: Mapping[str, Any]) -> dict[str, Any]:
            assert running.stdin is not None
            assert running.stdout is not None
            running.stdin.write(json.dumps({question: given}) + "\n")
            running.stdin.flush()
            answer: dict[str, Any] = json.loads(running.stdout.readline())
            return answer

        for seed in seeds:
            entry, lines = roll_out(invoke, seed)
            yield f"records/seed {seed:02} {SCENARIOS[seed % len(SCENARIOS)].name}", entry
            if seed < len(SCENARIOS):
                path = product.folder("canary") / f"record-{seed}.jsonl"
                path.write_text("".join(f"{line}\n" for line in lines))
                done = product.nxpipe("rollout", "replay", str(path), "--json")
                document = {"exit code": done.returncode, "document": json.loads(done.stdout or "null")}
                yield f"replay/seed {seed:02}", split(document)
        assert running.stdin is not None
        running.stdin.close()


@dataclass(frozen=True)
class Scenario:
    """Random traffic of one rollout: error rates of both versions, and disturbances."""

    name: str
    stable: float = 0.005
    canary: float = 0.005
    slower: float = 1.0
    requests: int = 1200  # per minute
    alarm_at: int | None = None
    signal: tuple[int, str] | None = None
    gaps: float = 0.0  # share of the minutes


SCENARIOS: Final = (
    Scenario("healthy"),
    Scenario("faulty", canary=0.03),
    Scenario("slightly worse", canary=0.008, requests=300),
    Scenario("slower", slower=1.8),
    Scenario("alarm", alarm_at=9),
    Scenario("aborted", signal=(7, "abort")),
    Scenario("paused", signal=(4, "pause")),
    Scenario("little traffic", requests=6, signal=(70, "approve")),
    Scenario("gaps", gaps=0.3),
    Scenario("no traffic", requests=0),
)


def roll_out(invoke: Callable[[str, Mapping[str, Any]], dict[str, Any]], seed: int) -> tuple[Entry, list[str]]:
    """A rollout minute by minute until it ends, as the state machine runs it, and its record line by line."""
    scenario, chance = SCENARIOS[seed % len(SCENARIOS)], random.Random(seed)
    plan = {
        "steps": [{"share": 5, "tolerates": 11.0}, {"share": 50, "tolerates": 2.0}, {"share": 100, "tolerates": 1.53}],
        "bake_min": 5,
        "bake_max": 30,
        "alpha": 0.01,
        "beta": 0.05,
        "objective": 0.01,
        "margin": 1.0,
        "bursts": [0.1 if seed % 3 == 0 else 0.0] + [0.0] * len(_LATENCIES),
        "latencies": list(_LATENCIES) if seed % 4 else [],
    }
    groups = {
        name: {"group": f"demo-{name}", "targets": f"arn:{name}", "series": f"targetgroup/{name}/1"}
        for name in _COLOURS
    }
    state = {
        "from": "blue",
        "to": "green",
        "plan": plan,
        "pace": {"patience": 60},
        "weights": {"blue": [100], "green": [0], "standby": [0]},
        "blue": {"desired": 3, "most": 4},
        "green": {"desired": 0, "most": 4},
        "alarms": _alarms(sounding=False),
    }
    fleet = {"balancer": "app/front/1", "least": 1, "alarms": ["bad"], "colours": groups}
    opened = invoke("opens", {"fleet": fleet, "state": state, "name": f"r{seed}", "at": _at(0)})
    if "raised" in opened:
        return split(opened), []
    answers, lines, minute = [opened], [opened["record"]["text"]], 0
    carried, step = opened["carried"], 0
    counts = _Traffic(scenario, chance)
    while minute < 600:
        began = invoke("begins", {"carried": carried, "step": step, "at": _at(minute)})
        answers.append(began)
        carried, verdict, wanted = began["carried"], "continue", began["ask"]
        share = opened["steps"][step]["green"] / 100
        while verdict in ("continue", "watch", "ask") and minute < 600:
            minute += 1
            counts.draw(minute, share)
            signal = scenario.signal[1] if scenario.signal and minute >= scenario.signal[0] else None
            seen = {
                "carried": carried,
                "at": _at(minute),
                "metrics": counts.answer(wanted["queries"], minute),
                "alarms": _alarms(sounding=scenario.alarm_at is not None and minute >= scenario.alarm_at),
                "record": {"Item": {"signal": {"S": signal}}} if signal else {},
            }
            looked = invoke("looks", seen)
            answers.append(looked)
            if "raised" in looked:
                return split({"answers": answers}), lines
            carried, verdict, wanted = looked["carried"], looked["verdict"], looked["ask"]
            lines.append(looked["record"]["text"])
        step += 1
        if verdict != "advance" or step >= opened["count"]:
            break
    return record_entry(answers, lines), lines


def record_entry(answers: Sequence[Mapping[str, Any]], lines: Sequence[str]) -> Entry:
    """The final state and every record. Records are chained by digests of their texts, too."""
    records = [json.loads(line) for line in lines]
    digests = [None, *(hashlib.sha256(line.encode()).hexdigest() for line in lines[1:])]
    is_chain = all(value["previous"] == before for value, before in zip(records[1:], digests, strict=False))
    steps = [without(answer, "carried", "record", "ask", "key") for answer in answers]
    last = json.loads(answers[-1]["carried"])
    return split(
        {
            "records": [without(entry, "previous") for entry in records],
            "answers": steps,
            "carried": without(last, "previous"),
            "queries": answers[1]["ask"],
            "keys": [answer["key"] for answer in answers if "key" in answer],
            "is chain": is_chain,
        }
    )


class _Traffic:
    """Counts by minute, drawn once: repeated queries return the same, as with CloudWatch."""

    def __init__(self, scenario: Scenario, chance: random.Random) -> None:
        self._scenario, self._chance = scenario, chance
        self._minutes: dict[int, dict[str, float]] = {}

    def draw(self, minute: int, share: float) -> None:
        scenario, chance = self._scenario, self._chance
        counts: dict[str, float] = {}
        if chance.random() >= scenario.gaps:
            arms = (("canary", share, scenario.canary, scenario.slower), ("stable", 1 - share, scenario.stable, 1.0))
            for arm, part, error, slower in arms:
                total = round(scenario.requests * part * chance.uniform(0.8, 1.2))
                times = sorted(chance.expovariate(8 / slower) for _ in range(total))
                bad = sum(chance.random() < error for _ in range(total))
                document = {"requests": total, "2xx": total - bad, "5xx": bad, "timed": total}
                for number, latency in enumerate(_LATENCIES):
                    document[f"slower{number}"] = sum(entry > latency for entry in times)
                counts |= {f"{arm}_{name}": float(count) for name, count in document.items() if count}
        self._minutes[minute] = counts

    def answer(self, queries: Sequence[Mapping[str, Any]], now: int) -> list[dict[str, Any]]:
        minutes = [minute for minute in sorted(self._minutes) if now - 30 <= minute < now]
        result = []
        for query in queries:
            present = [minute for minute in minutes if query["Id"] in self._minutes[minute]]
            values = [self._minutes[entry][query["Id"]] for entry in present]
            result.append({"Id": query["Id"], "Timestamps": list(map(_at, present)), "Values": values})
        return [entry | {"StatusCode": "Complete"} for entry in result]


def _at(minute: int) -> str:
    return datetime.fromtimestamp(1_800_000_000 + minute * _PERIOD, UTC).isoformat()


def _alarms(*, sounding: bool) -> dict[str, list[str]]:
    state = ["ALARM" if sounding else "OK"]
    return {"metric_names": [], "metric_states": [], "composite_names": ["bad"], "composite_states": state}


_RECORDERS: Final[Mapping[str, Callable[[Product, Path], Entries]]] = {
    "interface": interface,
    "check": check,
    "build": build,
    "documents": documents,
    "projects": projects,
    "canary": canary,
}


# Comparing


@dataclass(frozen=True)
class Record:
    """Digests by entry; and the entries themselves, if it is a folder."""

    digests: Mapping[str, Any]
    folder: Path | None

    @staticmethod
    def read(path: Path) -> "Record":
        file = path / "digests.json" if path.is_dir() else path
        return Record(json.loads(file.read_text()), path if path.is_dir() else None)

    @cached_property
    def entries(self) -> Mapping[str, list[str]]:
        return {name: digests.split() for name, digests in self.digests["entries"].items()}

    def entry(self, name: str) -> Entry | None:
        if self.folder is None:
            return None
        return Entry(**json.loads((self.folder / "entries" / f"{name}.json").read_text()))


def compare(left: Record, right: Record) -> int:
    """Print all differences; the exit code."""
    sections = [section for section in left.digests["sections"] if section in right.digests["sections"]]
    in_part = left.digests["quick"] != right.digests["quick"] or len(sections) < len(SECTIONS)
    entries = {**left.entries, **right.entries}
    names = [name for name in entries if name.partition("/")[0] in sections]
    is_same_machine = left.digests["surroundings"] == right.digests["surroundings"]
    result = Found()
    for name in sorted(names):
        if name not in left.entries or name not in right.entries:
            if not in_part:
                result.differences.append(
                    f"{name}: only in the {'second' if name in right.entries else 'first'} record"
                )
        elif "machine" in left.entries[name] and not is_same_machine:
            result.skipped += 1
        else:
            result.compare(name, left, right)
    result.show()
    print(f"{result.compared} entries compared in {', '.join(sections)}{' (in part)' if in_part else ''}")
    if result.skipped:
        print(f"{result.skipped} entries of evidence not compared: recorded on different processors or libraries")
    print(f"{len(result.differences)} differences" if result.differences else "no difference")
    return 1 if result.differences or not result.compared else 0


def replace_sections(record: Record) -> int:
    """Take the record's sections into the baseline, which keeps the others. A record without builds has no evidence,
    and names no processor and libraries."""
    old, new = Record.read(BASELINE).digests, record.digests
    surroundings = new["surroundings"] or old["surroundings"]
    if new["quick"] or (surroundings != old["surroundings"] and new["sections"] != list(SECTIONS)):
        sys.stderr.write("the record is quick, or a part from another processor or library; record all sections\n")
        return 2
    kept = {name: value for name, value in old["entries"].items() if name.partition("/")[0] not in new["sections"]}
    entries = dict(sorted({**kept, **new["entries"]}.items()))
    BASELINE.write_text(_lines({**new, "surroundings": surroundings, "sections": list(SECTIONS), "entries": entries}))
    return 0


@dataclass
class Found:
    """The result of a comparison: different data, different Sids, different texts."""

    differences: list[str] = field(default_factory=list)
    renamed: list[str] = field(default_factory=list)
    reworded: list[str] = field(default_factory=list)
    skipped: int = 0
    compared: int = 0

    def compare(self, name: str, left: Record, right: Record) -> None:
        self.compared += 1
        before, after = left.entries[name], right.entries[name]
        if before == after:
            return
        old, new = left.entry(name), right.entry(name)
        if before[0] != after[0]:
            details = (
                list(differing(old.data, new.data)) if old and new else ["its data differ; record both to see how"]
            )
            self.differences += [f"{name}: {detail}" for detail in details[:20]]
            self.differences += [f"{name}: and {len(details) - 20} more"] if len(details) > 20 else []
        if before[1] != after[1]:
            sids, texts = other_texts(old, new) if old and new else ([], ["its texts differ; record both to see how"])
            self.renamed += [f"{name}: {sid}" for sid in sids]
            self.reworded += [f"{name}: {text}" for text in texts]

    def show(self) -> None:
        parts = {"renamed Sids": self.renamed, "texts changed": self.reworded, "DIFFERENCES": self.differences}
        for title, lines in parts.items():
            if lines:
                print(f"{title}: {len(lines)}", *(f"  {line}" for line in lines), sep="\n")


def differing(old: Any, new: Any, path: str = "") -> Iterator[str]:
    where = path or "the document"
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({**old, **new}):
            if key not in new:
                yield f"{path}/{key} is gone (was {_short(old[key])})"
            elif key not in old:
                yield f"{path}/{key} is new: {_short(new[key])}"
            else:
                yield from differing(old[key], new[key], f"{path}/{key}")
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield f"{where} has {len(new)} items, had {len(old)}: {_short(old)} -> {_short(new)}"
        else:
            for number, (before, after) in enumerate(zip(old, new, strict=True)):
                yield from differing(before, after, f"{path}/{number}")
    elif old != new or type(old) is not type(new):
        yield f"{where}: {_short(old)} -> {_short(new)}"


def other_texts(old: Entry, new: Entry) -> tuple[list[str], list[str]]:
    sids, texts = [], []
    for key in sorted({**old.texts, **new.texts}):
        before, after = old.texts.get(key, ""), new.texts.get(key, "")
        if before == after:
            continue
        if key.endswith("/Sid"):
            sids.append(f"{before} -> {after}")
            continue
        numbers = sorted(_NUMBER.findall(before)) == sorted(_NUMBER.findall(after))
        texts.append(f"{key}: {_short(before)} -> {_short(after)}{'' if numbers else ' [ITS NUMBERS DIFFER]'}")
    return sids, texts


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else _spelled(value)
    text = " ".join(text.split())
    return text if len(text) <= 160 else f"{text[:150]}... ({len(text)} characters)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("record", "check"):
        command = commands.add_parser(name)
        if name == "record":
            command.add_argument("out", type=Path)
        command.add_argument("--quick", action="store_true", help="a part of each section")
        command.add_argument("--jobs", type=int, default=1, help="commands at once; a build always has two workers")
        command.add_argument("--checkout", type=Path, default=ROOT)
        command.add_argument("--only", action="append", choices=SECTIONS, default=[], metavar="SECTION")
    command = commands.add_parser("compare")
    command.add_argument("one", type=Path)
    command.add_argument("other", type=Path)
    command = commands.add_parser("baseline")
    command.add_argument("record", type=Path)
    options = parser.parse_args()
    if options.command == "compare":
        return compare(Record.read(options.one), Record.read(options.other))
    if options.command == "baseline":
        return replace_sections(Record.read(options.record))
    with tempfile.TemporaryDirectory(prefix="nxpipe-replay-") as name:
        folder = Path(name).resolve()
        product = Product(options.checkout.resolve(), folder / "work", options.jobs, options.quick)
        out = options.out if options.command == "record" else folder / "record"
        try:
            record(product, out, options.only or SECTIONS)
        except ReplayFailed as failed:
            sys.stderr.write(f"{failed}\n")
            return 2
        return 0 if options.command == "record" else compare(Record.read(BASELINE), Record.read(out))


if __name__ == "__main__":
    os.nice(5)
    sys.exit(main())
