"""Hostile variants of valid `.pt2` files, by number: equal numbers give equal files on every machine.

Known attacks are inserted wherever a document has a string; names, numbers, structure, archive entries and bytes are
changed at random.
"""

import io
import json
import random
import warnings
import zipfile
from collections.abc import Callable
from typing import Any, Final

import torch

from tests.security.saved_entries import CONSTANTS, MODEL, WEIGHTS, Saved, at, put_at, strings

MARK: Final = "PWN"  # the file that a model's code would create in the current folder
_CODE: Final = f"__import__('os').system('touch {MARK}')"
GADGETS: Final = (
    _CODE,
    f"x={_CODE}",
    f"x=open('{MARK}','w')",
    f"a):\n  pass\n{_CODE}\ndef f(",
    f"a\n{_CODE}\n#",
    f"${{{_CODE}}}",
    *("os.system", "torch.os.system", "torch.load", "torch.ops.load_library", "torch.hub.load", "builtins.exec"),
    *("torch.ops.aten.from_file.default", "torch.ops.aten.save.default", "torch.ops.aten._print.default"),
    *("_operator.methodcaller", "_operator.call", "math.sqrt", "#torch:x", "torch.ops.higher_order.cond"),
    *("torch.ops.aten.__class__.__init__", "torch.ops.prims.__getattr__.default", "torch.ops.profiler.x.default"),
    *("../../etc/passwd", "/etc/passwd", "/proc/self/environ", "/dev/zero", "C:\\x", "weight_0\0.pt", "a/../b"),
    *("evilmod", "evilmod:x", "ctypes:cdll", "antigravity", "this", "idlelib.idle", "collections.defaultdict"),
    *("\x1b]0;x\x07", "\x1b[2J", "::add-mask::x", "\u202e", "\ud800", "\0", "", " ", "a" * 5000, "é", "lambda", "self"),
    *("-1", "1e999", "s0 + 1", "s0", "u0", "9" * 5000, "Infinity", "NaN", "true", "null"),
)
NUMBERS: Final[tuple[Any, ...]] = (
    *(0, 1, -1, 2, 64, 65, 2**31, 2**31 - 1, 2**32, 2**62, 2**63 - 1, 2**63, -(2**63), 10**30, 1.5, -0.0, 1e308),
    *(float("nan"), float("inf"), True, False, None, "1", [], {}),
)
_CONTAINERS: Final = (
    *("builtins.tuple", "builtins.list", "builtins.dict", "collections.namedtuple", "collections.OrderedDict"),
    *("collections.defaultdict", "collections.deque", "evilmod.Evil", "torch.return_types.max", "os:system", None, 7),
)


class _Block(torch.nn.Module):
    """Buffers, a constant, tied weights, a write in place, results in a tree."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(4, 4)
        self.outer = torch.nn.Linear(4, 4)
        self.outer.weight = self.inner.weight
        self.norm = torch.nn.BatchNorm1d(4)
        self.table = torch.ones(4)

    def forward(self, x: Any, y: Any) -> Any:
        hidden = self.norm(torch.nn.functional.gelu(self.inner(x)) + self.table).clone()
        hidden.add_(y)
        return {"result": self.outer(hidden), "pair": (hidden, [x.sum()])}


def good_files() -> list[Saved]:
    """The valid files."""
    small = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.GELU())
    block = ((), {"x": torch.ones(3, 4), "y": torch.ones(3, 4)})
    return [_saved(small, ((torch.zeros(2, 8),), {})), _saved(_Block().eval(), block)]


def _saved(module: Any, arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Saved:
    file = io.BytesIO()
    torch.export.save(torch.export.export(module, *arguments), file)
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        return Saved({name.partition("/")[2]: archive.read(name) for name in names}, "m")


def variant(number: int, good: list[Saved]) -> bytes:
    """The file of this number."""
    chance = random.Random(number)
    saved = chance.choice(good).copy()
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        chance.choice(_DOCUMENT_CHANGES)(saved, chance)
    return _archived(saved, chance)


def _documented(change: Callable[[Any, random.Random], None]) -> Callable[[Saved, random.Random], None]:
    """A change of the model's document, or sometimes of a list of tensors."""

    def changed(saved: Saved, chance: random.Random) -> None:
        entry = chance.choice((MODEL, MODEL, MODEL, WEIGHTS, CONSTANTS))
        try:
            document = saved.json(entry)
        except (ValueError, KeyError, RecursionError):  # an earlier change has removed the entry or its JSON
            return
        change(document, chance)
        saved.put(entry, document)

    return changed


def _gadget(document: Any, chance: random.Random) -> None:
    found = list(strings(document))
    if found:
        put_at(document, chance.choice(found)[0], chance.choice(GADGETS))


def _rename(document: Any, chance: random.Random) -> None:
    """Replace one string everywhere, keys included: consistent names pass more checks."""
    found = list(strings(document))
    if not found:
        return
    old, new = chance.choice(found)[1], chance.choice(GADGETS)

    def renamed(part: Any) -> Any:
        if isinstance(part, dict):
            return {(new if key == old else key): renamed(value) for key, value in part.items()}
        if isinstance(part, list):
            return [renamed(entry) for entry in part]
        return new if part == old and isinstance(part, str) else part

    for key in list(document):
        document[key] = renamed(document[key])


def _number(document: Any, chance: random.Random) -> None:
    ways = [way for way, part in _parts(document) if isinstance(part, int | float)]
    if ways:
        put_at(document, chance.choice(ways), chance.choice(NUMBERS))


def _parts(document: Any) -> list[tuple[list[Any], Any]]:
    found: list[tuple[list[Any], Any]] = []
    waiting: list[tuple[list[Any], Any]] = [([], document)]
    while waiting:
        way, part = waiting.pop()
        if way:
            found.append((way, part))
        for key, inner in part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ():
            waiting.append(([*way, key], inner))
    return found


def _structure(document: Any, chance: random.Random) -> None:
    """Remove, double, nest, empty or replace one part."""
    parts = _parts(document)
    if not parts:
        return
    way, part = chance.choice(parts)
    owner, key = at(document, way[:-1]), way[-1]
    kind = chance.randrange(7)
    if kind == 0:
        del owner[key]
    elif kind == 1 and isinstance(owner, list):
        owner.insert(key, json.loads(json.dumps(part)))
    elif kind == 2:
        owner[key] = [part]
    elif kind == 3:
        owner[key] = type(part)() if part is not None else {}
    elif kind == 4:
        owner[key] = json.loads(json.dumps(chance.choice(parts)[1]))
    elif kind == 5 and isinstance(owner, dict):
        owner[chance.choice(GADGETS)] = owner.pop(key)
    else:
        for _ in range(chance.choice((3, 20, 70))):
            part = {"as_graph": part} if chance.random() < 0.5 else [part]
        owner[key] = part


def _spec(document: Any, chance: random.Random) -> None:
    """Change a tree spec of arguments or results."""
    calls = _found(document, "graph_module", "module_call_graph")
    entries = [call for call in calls or () if isinstance(call, dict)] if isinstance(calls, list) else []
    if entries:
        entry = chance.choice(entries)
        tree = json.dumps([chance.choice((1, 1, 1, 0, "1")), _tree(chance, 3)])
        whole: dict[str, Any] = {"inputs": [], "outputs": [], "in_spec": tree, "out_spec": tree}
        entry["signature"] = {**whole, **_mapping(entry.get("signature")), chance.choice(("in_spec", "out_spec")): tree}


def _found(document: Any, *way: str) -> Any:
    for key in way:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def _mapping(part: Any) -> dict[str, Any]:
    return part if isinstance(part, dict) else {}


def _tree(chance: random.Random, depth: int) -> Any:
    if depth == 0 or chance.random() < 0.3:
        return {"type": None, "context": None, "children_spec": []}
    children = [_tree(chance, depth - 1) for _ in range(chance.randrange(4))]
    context: Any = chance.choice(
        (
            None,
            "null",
            [f"k{number}" for number in range(len(children))],
            {"__enum__": True, "fqn": chance.choice(GADGETS), "name": chance.choice(GADGETS)},
            [{"__enum__": True, "fqn": "ctypes:cdll", "name": "./m.pt2"}],
            [{"__enum__": True, "fqn": "os:environ", "name": "HOME"}],
            {"default_factory_module": "evilmod", "default_factory_name": "x", "dict_context": ["a"]},
            chance.choice(GADGETS),
        )
    )
    written = json.dumps(context) if chance.random() < 0.7 else context
    return {"type": chance.choice(_CONTAINERS), "context": written, "children_spec": children}


def _operator(document: Any, chance: random.Random) -> None:
    """Replace an operator by another, with the same arguments."""
    nodes = _found(document, "graph_module", "graph", "nodes")
    if isinstance(nodes, list) and nodes and isinstance(nodes[0], dict):
        chance.choice([node for node in nodes if isinstance(node, dict)])["target"] = chance.choice(_operators())


def _operators() -> list[str]:
    if not _NAMES:
        names = sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith(("aten::", "prims::")))
        for name in names:
            space, _, rest = name.partition("::")
            packet, _, overload = rest.partition(".")
            _NAMES.append(f"torch.ops.{space}.{packet}.{overload or 'default'}")
    return _NAMES


_NAMES: list[str] = []


def _text(saved: Saved, chance: random.Random) -> None:
    """Replace characters of a document."""
    entry = chance.choice((MODEL, WEIGHTS))
    data = bytearray(saved.entries.get(entry) or b" ")
    if chance.random() < 0.1:
        data[:0] = chance.choice((b"[", b'{"a":')) * chance.choice((1, 900, 100_000))
    for _ in range(chance.choice((1, 3, 20))):
        data[chance.randrange(len(data))] = chance.choice(b'"{}[],:0-e\\u\0\xff ')
    saved.entries[entry] = bytes(data)


def _entry(saved: Saved, chance: random.Random) -> None:
    """Drop, rename, swap, cut or enlarge entries."""
    name = chance.choice(sorted(saved.entries))
    data = saved.entries.pop(name)
    kind = chance.randrange(5)
    if kind == 1:
        saved.entries[chance.choice(("../../" + MARK, "/" + MARK, f"..\\{MARK}", "models/x.json", MODEL))] = data
    elif kind == 2:
        saved.entries[name] = data[: chance.randrange(len(data) + 1)]
    elif kind == 3:
        saved.entries[name] = data + bytes(chance.choice((1, 4096, 2**20)))
    elif kind == 4:
        saved.entries[name] = saved.entries[chance.choice(sorted(saved.entries))]


_DOCUMENT_CHANGES: Final[tuple[Callable[[Saved, random.Random], None], ...]] = (
    *(_documented(change) for change in (_gadget, _gadget, _rename, _rename, _number, _structure, _structure)),
    *(_documented(change) for change in (_spec, _spec, _operator)),
    _text,
    _entry,
)


def _archived(saved: Saved, chance: random.Random) -> bytes:
    """Usually a valid archive; else compressed, doubled, after other bytes, or with wrong bytes in it."""
    file, kind = io.BytesIO(), chance.randrange(12)
    if kind == 0:
        file.write(b"\x7fELF" + bytes(chance.choice((60, 4000))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # duplicate names
        with zipfile.ZipFile(file, "a", zipfile.ZIP_DEFLATED if kind == 1 else zipfile.ZIP_STORED) as archive:
            for name, data in saved.entries.items():
                archive.writestr(f"{saved.folder}/{name}", data)
            if kind == 2:
                archive.writestr(f"{chance.choice((saved.folder, 'other'))}/{MODEL}", saved.entries.get(WEIGHTS, b""))
            if kind == 3:
                archive.comment = b"PK\5\6" + bytes(18)
    written = bytearray(file.getvalue())
    if kind == 4:
        for _ in range(chance.choice((1, 10, 100))):
            written[chance.randrange(len(written))] ^= 1 << chance.randrange(8)
    if kind == 5:  # in the central directory
        written[-chance.randrange(1, 400)] ^= 0xFF
    return bytes(written[: chance.randrange(len(written))]) if kind == 6 else bytes(written)
