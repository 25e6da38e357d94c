"""Structure of the product: size of modules, importers, cycles, layers, names. It parses the sources and imports none.

Usage: python benchmarks/structure.py [--checkout DIR] [--list NAME]... [--path COMMAND] [--json] [--check]

The product is the packages artifact_store, emulator, pipeline and stacks, `app.py`, and the modules that the folder
`nxpipe` has of its own. A module is named by its place in the repository: `pipeline.config`, not
`nxpipe.pipeline.config`.

    --list NAME     print one list: empty, long, single, named, cycles, duplicates, names, upward, unlayered,
                    click, path
    --path COMMAND  run COMMAND under a profiler and count the modules whose functions it enters; `nxpipe build` stands
                    for a build of a tiny BERT with random weights that publishes into a new local store
    --check         exit 1 if a limit is exceeded; it measures the path of `nxpipe build` as well
"""

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

PACKAGES: Final = ("artifact_store", "emulator", "pipeline", "stacks")
UMBRELLA: Final = "nxpipe"  # its folder has links to the packages, and may have other modules

# Folders of pipeline, the lowest first. Folders of one row are siblings, which may not import one another.
LAYERS: Final = (
    ("util",),
    ("config",),
    ("models",),
    ("canary",),
    ("compile",),
    ("verify", "check", "artifacts", "predict"),
    ("build", "serving"),
    ("rollout", "fleet", "profile", "plan"),
    ("release",),
    ("ui",),
    ("cli",),
)

LIMITS: Final = {
    # 475 before contracts, predictions, profiles; 511 before plans; 545 before one design of pages, ui, inference in
    # process and the results of the Python API
    "modules": 570,
    "upward imports": 0,
    "cycles at import time": 0,
    "cycles counting imports inside functions": 0,
    "single importers": 90,  # 60 before parts of the agent; 65 before profiles and the schedule; 76 before plans
    "duplicate public classes": 0,
    "modules of pipeline on the path of nxpipe build": 47,  # 40 before its report had charts, and changes of channels
}
LISTS: Final = (
    *("empty", "long", "single", "named", "cycles", "duplicates", "names", "upward", "unlayered", "click", "path"),
)
# Figures with goal 0 that `--check` does not judge: one is a heuristic, the other an import contract.
GOALS: Final = ("modules named by a participle or pronoun", "click importers outside pipeline.cli")

_STRING: Final = re.compile(rf"(?:{UMBRELLA}\.)?((?:{'|'.join(PACKAGES)})(?:\.\w+)+)(?::\w+)?")

# Participles without -ed or -ing, pronouns, and adverbs that leave out their noun.
_NO_NOUNS: Final = frozenset(
    re.findall(
        r"\w+",
        """
        asked told made shown kept held found chosen opened said given beginning ending begun taken known seen sent
        left lost meant done drawn written built gone heard felt thought brought bought caught broken spoken forgotten
        hidden itself themselves himself whoever whatever who what which whom whose this that those these it its they
        them ours theirs mine yours one each any all some other another others none nobody somebody nothing something
        everything elsewhere here there alone apart together afar beside beyond meanwhile
        """,
    )
)
# Nouns of the field in -ing, and words that only end like a participle.
_FIELD_NOUNS: Final = frozenset(
    re.findall(
        r"\w+",
        """
        batching binding buffering building caching casting clustering decoding embedding encoding finding folding
        grouping indexing listing lowering mapping naming networking packing padding paging partitioning pipelining
        pooling pricing
        printing profiling ring rounding routing sampling scaling scheduling serving sharding signing sizing spring
        string testing thing tiling timing tracing training tuning versioning bed embed feed need red seed shed speed
        """,
    )
)


class Edge(NamedTuple):
    """An import: `kind` is `module`, `function`, `types` (under TYPE_CHECKING) or `name` (in a string)."""

    importer: str
    imported: str
    kind: str
    line: int


@dataclass
class Module:
    name: str
    path: Path
    tree: ast.Module
    lines: int
    is_package: bool
    imports: list[tuple[str, str, int]] = field(default_factory=list)  # absolute dotted names, with kind and line

    @property
    def package(self) -> str:
        return self.name.partition(".")[0]

    @property
    def is_empty(self) -> bool:
        """Whether it has only comments and white space."""
        return not self.tree.body

    @property
    def is_blank_init(self) -> bool:
        """An `__init__.py` with at most a docstring."""
        return self.is_package and all(
            isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) for part in self.tree.body
        )

    def classes(self) -> Iterator[str]:
        """Public classes of the top level, also under `if` and `try`."""
        stack: list[ast.AST] = list(self.tree.body)
        while stack:
            part = stack.pop()
            if isinstance(part, ast.ClassDef):
                if not part.name.startswith("_"):
                    yield part.name
            elif isinstance(part, (ast.If, ast.Try)):
                stack.extend(ast.iter_child_nodes(part))


def read_product(root: Path) -> dict[str, Module]:
    """Modules by name. Links are resolved, so that each file is read once."""
    files: dict[Path, tuple[str, bool]] = {}
    for package in PACKAGES:
        folder = next((p for p in (root / package, root / UMBRELLA / package) if p.is_dir()), None)
        if folder is not None:
            _add(folder.resolve(), package, files)
    if (root / UMBRELLA).is_dir():
        _add((root / UMBRELLA).resolve(), UMBRELLA, files)
    if (root / "app.py").is_file():
        files.setdefault((root / "app.py").resolve(), ("app", False))
    modules = {}
    for path, (name, is_package) in sorted(files.items(), key=lambda item: item[1]):
        source = path.read_text("utf-8")
        tree = ast.parse(source, str(path))
        modules[name] = module = Module(name, path, tree, source.count("\n"), is_package)
        module.imports = list(_Imports(module).found())
    return modules


def _add(folder: Path, name: str, found: dict[Path, tuple[str, bool]]) -> None:
    for entry in sorted(folder.iterdir()):
        if entry.is_symlink():
            continue
        if entry.is_dir() and any(entry.rglob("*.py")):
            _add(entry, f"{name}.{entry.name}", found)
        elif entry.suffix == ".py":
            is_package = entry.name == "__init__.py"
            found.setdefault(entry, (name if is_package else f"{name}.{entry.stem}", is_package))


class _Imports:
    """Reads the imports of one module, with the kind of place where each stands."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._docstrings = set(_docstrings(module.tree))

    def found(self) -> Iterator[tuple[str, str, int]]:
        yield from self._visit(self._module.tree, "module")

    def _visit(self, node: ast.AST, kind: str) -> Iterator[tuple[str, str, int]]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and kind == "module":
            kind = "function"
        for child in ast.iter_child_nodes(node):
            yield from self._names(child, kind)
            if isinstance(child, ast.If) and _is_type_checking(child.test):
                yield from self._visit(ast.Module(child.body, []), "types")
                yield from self._visit(ast.Module(child.orelse, []), kind)
            else:
                yield from self._visit(child, kind)

    def _names(self, node: ast.AST, kind: str) -> Iterator[tuple[str, str, int]]:
        """The imports of this node itself."""
        if isinstance(node, ast.Import):
            yield from ((alias.name, kind, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = self._base(node)
            yield from ((f"{base}.{alias.name}", kind, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and (name := _imported_by_call(node)):
            yield (name, kind, node.lineno)
        elif isinstance(node, ast.Constant) and node not in self._docstrings:
            match = _STRING.fullmatch(str(node.value))
            if match:
                yield (match[1], "name", node.lineno)

    def _base(self, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        parts = self._module.name.split(".")
        kept = parts[: len(parts) - statement.level + self._module.is_package]
        return ".".join([*kept, *([statement.module] if statement.module else [])])


def _docstrings(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from (statement.value for statement in node.body if isinstance(statement, ast.Expr))


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def _imported_by_call(call: ast.Call) -> str | None:
    """The name in `import_module("...")`, if it is a literal."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if function in ("import_module", "__import__") and call.args and isinstance(call.args[0], ast.Constant):
        return str(call.args[0].value)
    return None


def edges_of(modules: Mapping[str, Module]) -> list[Edge]:
    """Imports between modules of the product. `from package import module` is an import of the module."""
    edges: dict[tuple[str, str, str], Edge] = {}
    for module in modules.values():
        for name, kind, line in module.imports:
            imported = _resolve(name, modules)
            if imported is not None and imported != module.name:
                edges.setdefault((module.name, imported, kind), Edge(module.name, imported, kind, line))
    return list(edges.values())


def _resolve(name: str, modules: Mapping[str, Module]) -> str | None:
    parts = name.split(".")
    if parts[0] == UMBRELLA and len(parts) > 1 and parts[1] in PACKAGES:
        name = ".".join(parts[1:])
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


def cycles(edges: Iterable[Edge], kinds: Iterable[str]) -> list[list[str]]:
    """Strongly connected components of more than one module: those that reach each other."""
    following, before = defaultdict(set), defaultdict(set)
    for edge in edges:
        if edge.kind in kinds:
            following[edge.importer].add(edge.imported)
            before[edge.imported].add(edge.importer)
    components, placed = [], set()
    for node in sorted(following):
        if node not in placed:
            component = _reachable(node, following) & _reachable(node, before)
            placed |= component
            if len(component) > 1:
                components.append(sorted(component))
    return components


def _reachable(start: str, following: Mapping[str, set[str]]) -> set[str]:
    reached, todo = {start}, [start]
    while todo:
        new = following.get(todo.pop(), set()) - reached
        reached |= new
        todo.extend(new)
    return reached


def single_importers(
    modules: Mapping[str, Module], edges: Iterable[Edge]
) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Modules with one importer; and those that no module imports and one names in a string, as a table of commands
    does."""
    importers = defaultdict(set)
    imported = set()
    for edge in edges:
        importers[edge.imported].add(edge.importer)
        if edge.kind != "name":
            imported.add(edge.imported)
    every = sorted(
        (name, next(iter(importers[name])))
        for name, module in modules.items()
        if len(importers[name]) == 1 and not module.is_blank_init
    )
    return [entry for entry in every if entry[0] in imported], [entry for entry in every if entry[0] not in imported]


def duplicates(modules: Mapping[str, Module]) -> list[tuple[str, str, list[str]]]:
    """Package, class, modules."""
    homes = defaultdict(list)
    for module in modules.values():
        for name in module.classes():
            homes[module.package, name].append(module.name)
    return sorted((package, name, found) for (package, name), found in homes.items() if len(found) > 1)


def is_no_noun(name: str) -> bool:
    """A heuristic: the last word of the name is a participle, a gerund or a pronoun, or the name has a pronoun."""
    words = name.lower().strip("_").split("_")
    last = words[-1]
    if last in _FIELD_NOUNS:
        return False
    return last in _NO_NOUNS or (len(last) > 4 and last.endswith(("ing", "ed")))


def upward(edges: Iterable[Edge]) -> tuple[list[Edge], list[Edge]]:
    """Imports in pipeline of a higher layer or of a sibling; and those that only a string names."""
    floor = {name: height for height, names in enumerate(LAYERS) for name in names}
    imports: list[Edge] = []
    named: list[Edge] = []
    for edge in edges:
        low, high = layer_of(edge.importer), layer_of(edge.imported)
        if low == high or low not in floor or high not in floor or floor[high] < floor[low]:
            continue
        (named if edge.kind == "name" else imports).append(edge)
    return imports, named


def layer_of(module: str) -> str | None:
    """The folder or module of pipeline that the module belongs to."""
    parts = module.split(".")
    return parts[1] if parts[0] == "pipeline" and len(parts) > 1 else None


def unlayered(modules: Mapping[str, Module]) -> list[tuple[str, int]]:
    """Folders and modules of pipeline outside of the layers, with their number of modules."""
    known = {name for names in LAYERS for name in names}
    count: dict[str, int] = defaultdict(int)
    for name, module in modules.items():
        if (layer := layer_of(name)) and layer not in known and not module.is_empty:
            count[layer] += 1
    return sorted(count.items())


def click_importers(modules: Mapping[str, Module]) -> list[str]:
    return sorted(
        name
        for name, module in modules.items()
        if any(imported.partition(".")[0] == "click" for imported, kind, _ in module.imports if kind != "name")
        and layer_of(name) != "cli"
    )


# The profiler. Python imports a `sitecustomize` before all else, in each process of the command, however it is started.
# A function counts, not a module's or a class's body. The record that a dataclass makes has no file: its module is that
# of the names that it sees. Names are appended as they are found, because workers are killed.
_PROFILER: Final = """
import os, sys, threading
_FOLDER, _PACKAGES, _known, _seen = {folder!r}, {packages!r}, {{}}, set()

def _module(code, names):
    path = names.get("__file__") if code.co_filename == "<string>" else code.co_filename
    if path not in _known:
        relative = os.path.relpath(os.path.realpath(path), {root!r}) if path and os.path.isabs(path) else ""
        parts = relative.removesuffix(".py").removesuffix("/__init__").split("/")
        if parts[0] == {umbrella!r} and len(parts) > 1 and parts[1] in _PACKAGES:
            parts = parts[1:]
        is_product = parts[0] in (*_PACKAGES, {umbrella!r}) and relative.endswith(".py")
        _known[path] = ".".join(parts) if is_product else None
    return _known[path]

def _profile(frame, event, argument):
    # CO_OPTIMIZED: a function. The __getattr__ of a module is part of the import system.
    if event != "call" or not frame.f_code.co_flags & 1 or frame.f_code.co_qualname.startswith("__getattr__"):
        return
    name = _module(frame.f_code, frame.f_globals)
    if name is None:
        return
    caller, before = frame.f_back, None
    if name in _seen and name.partition(".")[0] not in ("emulator", "artifact_store"):
        return
    while caller is not None and before is None:
        before = _module(caller.f_code, caller.f_globals)
        caller = caller.f_back
    key = (name, (before or "").partition(".")[0])
    if name.partition(".")[0] in ("emulator", "artifact_store") and key[1] == name.partition(".")[0] or key in _seen:
        return
    caller, importing = frame.f_back, None
    while caller is not None and importing is None:
        if caller.f_code.co_name == "<module>":
            importing = _module(caller.f_code, caller.f_globals)
        caller = caller.f_back
    if importing is None:
        _seen.update((name, key))
    elif (importing, name, None) in _seen:
        return
    _seen.add((importing, name, None))
    with open(os.path.join(_FOLDER, str(os.getpid())), "a") as file:
        file.write(name + " " + (importing or "") + "\\n")

threading.setprofile(_profile)
sys.setprofile(_profile)
"""

_TINY_BERT: Final = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}
_ARGUMENTS: Final = {
    "nxpipe build": "--model-id ./tiny-bert --weights random:0 --buckets 32 --store store --json",
    "nxpipe check": "--model-id ./tiny-bert --buckets 32 --json",
}


class CommandFailed(Exception):
    """The profiled command ended with an exit code other than 0."""


def path_of(command: str, root: Path) -> dict[str, list[str]]:
    """The modules that the command enters: one of their functions is called, or one of their records is created.

    `pipeline` has those outside of emulator and artifact_store, while the command runs or by a decorator in the module
    of the command itself; `import` has those called only while other modules are imported, which are not counted;
    `entrances` has the modules of emulator and artifact_store that other packages call, not what these call in turn.
    """
    with tempfile.TemporaryDirectory(prefix="nxpipe-path-") as name:
        work, traces, site = Path(name) / "work", Path(name) / "traces", Path(name) / "site"
        for folder in (work / "tiny-bert", traces, site):
            folder.mkdir(parents=True)
        (work / "tiny-bert" / "config.json").write_text(json.dumps(_TINY_BERT))
        profiler = _PROFILER.format(folder=str(traces), packages=PACKAGES, root=str(root.resolve()), umbrella=UMBRELLA)
        (site / "sitecustomize.py").write_text(profiler)
        program, *words = f"{command} {_ARGUMENTS.get(command, '')}".split()
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("NXPIPE_", "AWS_", "PYTHON"))
        }
        done = subprocess.run(
            [root / ".venv" / "bin" / program, *words],
            cwd=work,
            env=environment | {"HOME": name, "XDG_CACHE_HOME": name, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        if done.returncode:
            raise CommandFailed(f"{command}: exit code {done.returncode}\n{done.stderr}")
        calls = {tuple(line.split(" ")) for trace in traces.iterdir() for line in trace.read_text().splitlines()}
    inner = ("emulator", "artifact_store")
    own = command.split()[-1]
    entered = {module for module, importing in calls if importing.rpartition(".")[2] in ("", own)}
    return {
        "pipeline": sorted(entry for entry in entered if entry.partition(".")[0] not in inner),
        "entrances": sorted(entry for entry in entered if entry.partition(".")[0] in inner),
        "import": sorted({module for module, _ in calls if module.partition(".")[0] not in inner} - entered),
    }


def measure(modules: Mapping[str, Module], root: Path, command: str | None) -> dict[str, Any]:
    edges = edges_of(modules)
    up, named = upward(edges)
    single, only_named = single_importers(modules, edges)
    lists: dict[str, Any] = {
        "empty": sorted(name for name, module in modules.items() if module.is_empty),
        "long": sorted(
            ((name, value.lines) for name, value in modules.items() if value.lines > 500), key=lambda x: -x[1]
        ),
        "single": single,
        "named": only_named,
        "cycles": cycles(edges, ("module",)),
        "cycles inside functions": cycles(edges, ("module", "function")),
        "duplicates": duplicates(modules),
        "names": sorted(name for name in modules if is_no_noun(name.rpartition(".")[2])),
        "upward": sorted(up),
        "upward names": sorted(named),
        "unlayered": unlayered(modules),
        "click": click_importers(modules),
    }
    rows = {name: _row(entry for entry in modules.values() if entry.package == name) for name in _packages(modules)}
    total = _row(modules.values())
    for package, row in rows.items():
        row["single importers"] = sum(name.partition(".")[0] == package for name, _ in lists["single"])
    total["single importers"] = len(lists["single"])
    figures = {
        "modules": total["modules"],
        "upward imports": len(up),
        "cycles at import time": len(lists["cycles"]),
        "cycles counting imports inside functions": len(lists["cycles inside functions"]),
        "single importers": total["single importers"],
        "duplicate public classes": len(lists["duplicates"]),
        "modules named by a participle or pronoun": len(lists["names"]),
        "click importers outside pipeline.cli": len(lists["click"]),
    }
    if command:
        lists["path"] = path_of(command, root)
        figures[f"modules of pipeline on the path of {command}"] = len(lists["path"]["pipeline"])
    return {"packages": rows, "total": total, "figures": figures, "lists": lists}


def _packages(modules: Mapping[str, Module]) -> list[str]:
    return sorted({module.package for module in modules.values()})


def _row(modules: Iterable[Module]) -> dict[str, float]:
    every = list(modules)
    sizes = [module.lines for module in every if not module.is_empty]
    return {
        "files": len(every),
        "modules": len(sizes),
        "lines": sum(sizes),
        "median lines": median(sizes) if sizes else 0,
        "<=50": sum(size <= 50 for size in sizes),
        "<=100": sum(size <= 100 for size in sizes),
        ">500": sum(size > 500 for size in sizes),
    }


def exceeded(figures: Mapping[str, int]) -> list[str]:
    return [
        f"{name}: {figures[name]}, the limit is {limit}"
        for name, limit in LIMITS.items()
        if name in figures and figures[name] > limit
    ]


def table(found: Mapping[str, Any]) -> Iterator[str]:
    rows = {**found["packages"], "all": found["total"]}
    columns = list(found["total"])
    yield " ".join(["".ljust(16), *(column.rjust(max(len(column), 7)) for column in columns)])
    for name, row in rows.items():
        cells = (f"{row[column]:g}" if row[column] < 1e6 else str(row[column]) for column in columns)
        widths = (max(len(column), 7) for column in columns)
        yield " ".join([name.ljust(16), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))])
    yield ""
    for name, figure in found["figures"].items():
        limit = f"  (limit {LIMITS[name]})" if name in LIMITS else "  (goal 0, not judged)" if name in GOALS else ""
        yield f"{figure:6}  {name}{limit}"
    lists = found["lists"]
    yield f"{len(lists['named']):6}  modules that no module imports and one names in a string, as commands are"
    yield f"{len(lists['upward names']):6}  upward references by a name in a string (not counted as imports)"
    outside = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in lists["unlayered"])
    yield f"{len(lists['unlayered']):6}  folders and modules of pipeline that are not in a layer: {outside or 'none'}"


def listing(name: str, lists: Mapping[str, Any]) -> Iterator[str]:
    if name in ("single", "named"):
        yield from (f"{module}  <- {importer}" for module, importer in lists[name])
    elif name == "long":
        yield from (f"{module}  {lines}" for module, lines in lists["long"])
    elif name == "duplicates":
        yield from (f"{package}: {value}  {', '.join(homes)}" for package, value, homes in lists["duplicates"])
    elif name == "cycles":
        yield from (f"at import time: {' '.join(cycle)}" for cycle in lists["cycles"])
        yield from (
            f"counting imports inside functions: {' '.join(members)}" for members in lists["cycles inside functions"]
        )
    elif name == "upward":
        yield from (_edge(edge) for edge in lists["upward"])
        yield from (f"{_edge(edge)} (not counted)" for edge in lists["upward names"])
    elif name == "unlayered":
        yield from (f"{value}  {count}" for value, count in lists["unlayered"])
    elif name == "path":
        yield from lists["path"]["pipeline"]
        yield from (f"not counted, an entrance: {module}" for module in lists["path"]["entrances"])
        yield from (f"not counted, called by imports only: {module}" for module in lists["path"]["import"])
    else:
        yield from lists[name]


def _edge(edge: Edge) -> str:
    where = {"module": "", "function": " in a function", "types": " for types", "name": " by name"}[edge.kind]
    return f"{edge.importer}:{edge.line} -> {edge.imported}{where}"


def main() -> int:
    checkout = next((p for p in (Path(__file__).resolve().parent.parent, Path.cwd()) if (p / "app.py").is_file()), None)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, default=checkout)
    parser.add_argument("--list", action="append", choices=LISTS, default=[], metavar="NAME", dest="lists")
    parser.add_argument("--path", metavar="COMMAND")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.checkout is None:
        parser.error("the working directory is not a checkout of nxpipe; pass --checkout DIR")
    command = options.path or ("nxpipe build" if options.check or "path" in options.lists else None)
    try:
        result = measure(read_product(options.checkout.resolve()), options.checkout.resolve(), command)
    except CommandFailed as failed:
        sys.stderr.write(f"{failed}\n")
        return 2
    broken = exceeded(result["figures"])
    if options.json:
        print(json.dumps(result | {"exceeded": broken}, indent=1))
    elif options.lists:
        for name in options.lists:
            print("\n".join(listing(name, result["lists"])))
    else:
        print("\n".join(table(result)))
    if options.check:
        sys.stderr.writelines(f"exceeded: {entry}\n" for entry in broken)
    return 1 if options.check and broken else 0


if __name__ == "__main__":
    sys.exit(main())
