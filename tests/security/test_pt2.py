"""An untrusted `.pt2`: no code of its choice runs, no name in it is resolved, and its size bounds the work."""

import json
import os
import pickle
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from nxpipe.emulator.capture.pt2 import capture_exported, exported_parameters, run_exported
from nxpipe.emulator.capture.pt2_document import NODES
from nxpipe.emulator.errors import CaptureError, CompileError
from nxpipe.emulator.ir.graph import Graph
from tests.pipeline.in_process import InProcess, nxpipe
from tests.security.audit import watched
from tests.security.saved_entries import CONSTANTS, MODEL, WEIGHTS, Saved, saved_program

__all__ = ["nxpipe"]  # the fixture

Edit = Callable[[Any], object]
# What reading a program may import for the first time: the reader's own parts, and torch's.
READERS: Final = ("nxpipe.emulator", "torch", "transformers", "sympy", "mpmath", "numpy", "encodings")


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    found = saved_program(tmp_path)
    capture_exported(tmp_path / "m.pt2")  # all that a good file imports
    return found


def read(path: Path) -> Graph | str:
    """The graph of a file, or the text of its refusal; any other effect fails the test."""
    with watched() as seen:
        try:
            found: Graph | str = capture_exported(path)
            exported_parameters(path)
        except CompileError as refusal:
            found = str(refusal)
    assert not seen.forbidden
    assert not seen.imports_beyond(*READERS)
    assert not seen.files_outside(path.parent)
    if isinstance(found, str):
        assert "\n" not in found
        assert "Traceback" not in found
        assert len(found) < 700
        assert "Error" not in found or "torch 2." in found  # words of torch's are only where torch was asked
    return found


# --- Parts of the document. ---


def graph_of(document: Any) -> Any:
    return document["graph_module"]["graph"]


def node(document: Any, number: int = 1) -> Any:
    return graph_of(document)["nodes"][number]


def call_of(document: Any, number: int = 0) -> Any:
    return document["graph_module"]["module_call_graph"][number]


def tensor(document: Any, name: str = "input") -> Any:
    return graph_of(document)["tensor_values"][name]


def set_target(target: str) -> Edit:
    return lambda document: node(document).update(target=target)


def container(kind: str, context: Any) -> str:
    leaf: dict[str, Any] = {"type": None, "context": None, "children_spec": []}
    return json.dumps([1, {"type": kind, "context": context, "children_spec": [leaf]}])


def factory(module: str, name: str = "x") -> str:
    context = {"default_factory_module": module, "default_factory_name": name, "dict_context": ["a"]}
    return container("collections.defaultdict", context)


def enumeration(fqn: str, name: str) -> str:
    return container("builtins.dict", json.dumps([{"__enum__": True, "fqn": fqn, "name": name}]))


def set_spec(text: str, side: str = "out_spec", call: int = 0) -> Edit:
    def edit(document: Any) -> None:
        entry = call_of(document, call)
        entry["signature"] = {**call_of(document)["signature"], side: text}

    return edit


def rename_input(name: str) -> Edit:
    """Rename a value in all places; torch writes it into Python source."""

    def edit(document: Any) -> None:
        graph = graph_of(document)
        graph["inputs"][2]["as_tensor"]["name"] = name
        graph["tensor_values"][name] = graph["tensor_values"].pop("input")
        graph["nodes"][0]["inputs"][0]["arg"]["as_tensor"]["name"] = name
        document["graph_module"]["signature"]["input_specs"][2]["user_input"]["arg"]["as_tensor"]["name"] = name

    return edit


def set_size(**changes: Any) -> Edit:
    return lambda document: tensor(document).update(changes)


def insert(**changes: Any) -> Edit:
    """Another call, whose result is unused."""

    def edit(document: Any) -> None:
        extra = json.loads(json.dumps(node(document)))
        extra["name"] = extra["outputs"][0]["as_tensor"]["name"] = "extra"
        graph_of(document)["tensor_values"]["extra"] = tensor(document, "gelu")
        extra.update(changes)
        graph_of(document)["nodes"].append(extra)

    return edit


def chain(length: int) -> Edit:
    def edit(document: Any) -> None:
        graph, template, meta = graph_of(document), json.dumps(node(document)), tensor(document, "gelu")
        for number in range(length):
            name = f"g{number}"
            extra = json.loads(template)
            extra["name"] = extra["outputs"][0]["as_tensor"]["name"] = name
            graph["nodes"].append(extra)
            graph["tensor_values"][name] = meta

    return edit


def argument(value: Any) -> list[Any]:
    return [{"name": "self", "arg": value, "kind": 1}]


from_file = insert(
    target="torch.ops.aten.from_file.default",
    inputs=[
        {"name": "filename", "arg": {"as_string": "PWN"}, "kind": 1},
        {"name": "shared", "arg": {"as_bool": True}, "kind": 1},
        {"name": "size", "arg": {"as_int": 8}, "kind": 1},
    ],
)

CASES: Final[tuple[tuple[tuple[str, ...], Edit, str | None], ...]] = (
    (("P00", "P00b"), lambda document: None, None),
    (("P01",), lambda document: document.update(guards_code=["__import__('os').system('touch PWN')"]), None),
    (("P02", "P02b"), set_spec(factory("evilmod")), "is not a tuple, list or dictionary"),
    (("P02c", "P02e"), set_spec(factory("this")), "is not a tuple, list or dictionary"),
    (("P02d",), set_spec(factory("evilmod"), "in_spec"), "is not a tuple, list or dictionary"),
    (("P02f",), set_spec(factory("antigravity")), "is not a tuple, list or dictionary"),
    (("P02f",), set_spec(factory("idlelib.idle")), "is not a tuple, list or dictionary"),
    (("P02g",), set_spec(factory("evilmod"), call=1), "is not a tuple, list or dictionary"),
    (("P03",), set_target("os.system"), "calls 'os.system', which is not an operator"),
    (("P03",), set_target("torch.os.system"), "calls 'torch.os.system', which is not an operator"),
    (("P04",), set_target("torch.ops.load_library"), "which is not an operator"),
    (("P05",), from_file, "calls 'torch.ops.aten.from_file.default', which is not an operator"),
    (("P05",), insert(target="torch.ops.aten.save.default"), "which is not an operator"),
    (("P05",), insert(target="torch.ops.aten._print.default"), "which is not an operator"),
    (("P06",), set_target("_operator.methodcaller"), "which is not an operator"),
    (("P07",), set_target("_operator.call"), "which is not an operator"),
    (("P08",), set_target("torch.ops.aten.__class__.__init__"), "which is not an operator"),
    (("P09",), set_target("torch.ops.__dict__"), "which is not an operator"),
    (("P09",), set_target("torch.ops._dl_open_guard.__call__"), "which is not an operator"),
    (("P10",), set_target("torch.ops.higher_order.cond"), "cannot be read by torch"),
    (("P10",), set_target("torch.ops.higher_order.aoti_call_delegate"), "which is not an operator"),
    (
        ("P10b",),
        lambda document: node(document)["metadata"].update(
            nn_module_stack="a,b,os.system", torch_fn="x;os.system", source_fn_stack="x,torch.os.system"
        ),
        None,
    ),
    (("P10b",), lambda document: node(document)["metadata"].update(custom="[" * 99, from_node="{"), None),
    (("P12",), set_size(sizes=[{"as_expr": {"expr_str": "__import__('os').system('touch PWN')"}}] * 2), "dynamic"),
    (
        ("P12b",),
        lambda document: document.update(range_constraints={"__import__('os')": {"min_val": 0, "max_val": 9}}),
        None,
    ),
    (
        ("P12c",),
        lambda document: graph_of(document).update(
            sym_int_values={"s0": {"as_expr": {"expr_str": "__import__('os').system('touch PWN')"}}}
        ),
        "dynamic",
    ),
    (("P28",), set_target("torch.ops.aten.\x1b[2J\x1b]0;x\x07.default"), "which is not an operator"),
    (("P29",), rename_input("a\x1b[2J"), "which is not an identifier"),
    (("P29",), rename_input("a\nb"), "which is not an identifier"),
    (("P30",), chain(NODES), "operations, and the limit is 32,768"),
    (
        ("P31",),
        lambda document: node(document, 0).update(inputs=argument({"as_tensor": {"name": "gelu"}})),
        "cannot be read by torch",
    ),
    (
        ("P31",),
        lambda document: node(document).update(inputs=argument({"as_tensor": {"name": "ghost"}})),
        "cannot be read by torch",
    ),
    (("P32",), set_size(dtype=99), "has no member '99'"),
    (("P33",), set_size(sizes=[{"as_int": 2**62}] * 2), "more than 2^63 elements"),
    (("P33",), set_size(sizes=[{"as_int": 10**30}] * 2), "an integer of 64 bits"),
    (("P34",), set_size(sizes=[{"as_int": -2}, {"as_int": 8}]), "negative size"),
    (("P43",), set_spec(enumeration("os:environ", "HOME")), "is not a tuple, list or dictionary"),
    (("P40",), set_spec(enumeration("ctypes:cdll", "/proc/self/fd/3")), "is not a tuple, list or dictionary"),
    # Siblings that the review did not try. Of these, names of values ran code on the old reader.
    ((), rename_input("x=__import__('os').system('touch PWN')"), "which is not an identifier"),
    ((), rename_input("x=open('PWN', 'w')"), "which is not an identifier"),
    ((), rename_input("lambda"), "which is not an identifier"),
    ((), rename_input("self"), "which Python reserves"),
    ((), rename_input("__debug__"), "which Python reserves"),
    ((), rename_input("é"), "which is not an identifier"),
    ((), lambda document: node(document)["inputs"][0].update(name="self=(yield)"), "which is not an identifier"),
    ((), lambda document: node(document).update(name="a):\n import os\n#"), "which is not an identifier"),
    ((), lambda document: node(document).update(inputs=argument({"as_operator": "torch.load"})), "an operator to"),
    ((), lambda document: node(document).update(inputs=argument({"as_string_to_argument": {}})), "a dictionary to"),
    ((), lambda document: graph_of(document).update(custom_obj_values={"o": {}}), "objects of Python classes"),
    ((), lambda document: document.update(verifiers=["os"]), "dialect"),
    ((), lambda document: document.update(schema_version={"major": [], "minor": 1}), "an integer of 64 bits"),
    ((), lambda document: document.update(opset_version={"aten": "x"}, torch_version=[]), None),
    ((), lambda document: document["graph_module"].update(metadata={"custom": "["}), None),
    ((), lambda document: tensor(document)["device"].update(type="privateuseone:os.system"), None),
    ((), set_size(layout=1), "SparseCoo"),
    ((), set_size(strides=[{"as_int": 1}]), "2 sizes and 1 strides"),
    ((), set_spec("[1, " * 40_000), "reads|deeper"),
    ((), set_spec(json.dumps([99, {}])), "not of version 1"),
    ((), set_spec(container("evilmod.Evil", "null")), None),
    ((), set_spec(container("evilmod.Evil", json.dumps({"__enum__": True}))), "is not a tuple, list or dictionary"),
    ((), set_spec(container("builtins.tuple", json.dumps({"__enum__": True}))), "with a context"),
    ((), lambda document: document["graph_module"].update(module_call_graph=[]), "has no call signature"),
    ((), lambda document: document["graph_module"].pop("signature"), "GraphModule has no signature"),
    (
        (),
        lambda document: document["graph_module"]["signature"].update(input_specs=[]),
        "inputs that differ from its signature",
    ),
)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("edit", "refusal"),
    [
        pytest.param(edit, refusal, marks=pytest.mark.attempt(*ids), id=f"{'-'.join(ids) or 'sibling'}-{number}")
        for number, (ids, edit, refusal) in enumerate(CASES)
    ],
)
def test_what_a_document_says_is_data(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edit: Edit, refusal: str | None
) -> None:
    (tmp_path / "evilmod.py").write_text("open('PWN', 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = read(saved.change(edit).write(tmp_path / "m.pt2"))
    assert not Path("PWN").exists()
    if refusal is None:
        assert isinstance(found, Graph)
        assert len(found.nodes) == 2
    else:
        assert isinstance(found, str)
        assert any(part in found for part in refusal.split("|"))


# --- Tensors. ---


def weights(**changes: Any) -> Edit:
    def edit(listing: Any) -> None:
        listing["config"]["0.weight"]["tensor_meta"].update(changes)

    return edit


def numbers(*values: int) -> list[Any]:
    return [{"as_int": value} for value in values]


@pytest.mark.parametrize(
    ("edit", "refusal"),
    [
        pytest.param(edit, refusal, marks=pytest.mark.attempt(*ids), id=f"{'-'.join(ids) or 'sibling'}-{number}")
        for number, (ids, edit, refusal) in enumerate(
            [
                (["P11"], lambda x: x["config"]["0.weight"].update(use_pickle=True), "as pickled Python"),
                (["P35"], lambda x: x["config"]["0.weight"].update(tensor_meta=None), "as pickled Python"),
                (
                    ["P13"],
                    lambda x: x["config"]["0.weight"].update(path_name="../../../etc/passwd"),
                    "without a folder",
                ),
                ([], lambda x: x["config"]["0.weight"].update(path_name="/etc/passwd"), "without a folder"),
                ([], lambda x: x["config"]["0.weight"].update(path_name="ghost"), "has no data/weights/ghost"),
                (["P16"], weights(sizes=numbers(10**6, 10**6), strides=numbers(0, 0)), "has tensors of"),
                (["P17"], weights(storage_offset={"as_int": -1000}), "negative size, stride or offset"),
                (["P18"], weights(strides=numbers(-8, 1)), "negative size, stride or offset"),
                (["P19"], weights(storage_offset={"as_int": 10**6}), "where a tensor needs 4,000,128"),
                (["P20"], weights(strides=numbers(10**6, 1)), "where a tensor needs"),
                ([], weights(dtype=0), "has no member '0'"),
                ([], weights(sizes=[{"as_expr": {"expr_str": "1"}}] * 2), "dynamic sizes"),
            ]
        )
    ],
)
def test_tensors_lie_inside_of_the_file(saved: Saved, tmp_path: Path, edit: Edit, refusal: str) -> None:
    found = read(saved.change(edit, WEIGHTS).write(tmp_path / "m.pt2"))
    assert isinstance(found, str)
    assert refusal in found


@pytest.mark.attempt("P21", "L04")
@pytest.mark.parametrize("used", [False, True])
def test_an_entry_that_many_weights_name_is_read_once_or_refused(saved: Saved, tmp_path: Path, used: bool) -> None:
    """200 weights of 64 MiB in 64 MiB. Those that the program does not use are never read."""
    changed, size = saved.copy(), 2**24
    changed.entries["data/weights/big"] = bytes(4 * size)
    listing, document = changed.json(WEIGHTS), changed.json()
    for number in range(200):
        one = json.loads(json.dumps(listing["config"]["0.weight"]))
        one["path_name"] = "big"
        one["tensor_meta"].update(sizes=numbers(size), strides=numbers(1))
        listing["config"][f"w{number}"] = one
        if used:
            graph_of(document)["inputs"].insert(0, {"as_tensor": {"name": f"w{number}"}})
            graph_of(document)["tensor_values"][f"w{number}"] = one["tensor_meta"]
            document["graph_module"]["signature"]["input_specs"].insert(
                0, {"parameter": {"arg": {"name": f"w{number}"}, "parameter_name": f"w{number}"}}
            )
    changed.put(WEIGHTS, listing)
    changed.put(MODEL, document)
    path = changed.write(tmp_path / "m.pt2")
    found = read(path)
    if used:
        assert isinstance(found, str)
        assert "has tensors of 13,421,772,944 bytes in a file of 67," in found
    else:
        assert isinstance(found, Graph)
        assert exported_parameters(path).keys() == {"0.weight", "0.bias"}


def test_names_of_one_tensor_share_its_numbers(tmp_path: Path) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(4, 4, bias=False)
            self.b = torch.nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x: Any) -> Any:
            return self.b(self.a(x))

    torch.export.save(torch.export.export(Tied(), (torch.ones(2, 4),)), tmp_path / "tied.pt2")
    graph = capture_exported(tmp_path / "tied.pt2")
    expected = Tied()
    held = exported_parameters(tmp_path / "tied.pt2")
    expected.a.weight.data = torch.from_numpy(next(iter(held.values())))
    found = run_exported(tmp_path / "tied.pt2", graph, {"x": torch.ones(2, 4).numpy()})
    assert torch.allclose(torch.from_numpy(found["output"]), expected(torch.ones(2, 4)))


# --- The archive. ---


def _two_models(saved: Saved, path: Path) -> None:
    saved.entries["models/other.json"] = saved.entries[MODEL]
    saved.write(path)


def _deep(saved: Saved, path: Path) -> None:
    saved.entries[MODEL] = b"[" * 100_000 + b"]" * 100_000
    saved.write(path)


def _slip(saved: Saved, path: Path) -> None:
    saved.entries["../../PWN"] = b"x"
    saved.write(path)


def _twice(saved: Saved, path: Path) -> None:
    saved.write(path)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr(f"{saved.folder}/{MODEL}", saved.entries[MODEL])


def _two_folders(saved: Saved, path: Path) -> None:
    saved.write(path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"other/{MODEL}", saved.entries[MODEL])


def _many_entries(saved: Saved, path: Path) -> None:
    saved.write(path)
    data = bytearray(path.read_bytes())
    end = data.rfind(b"PK\5\6")
    data[end + 12 : end + 16] = (2**26).to_bytes(4, "little")
    path.write_bytes(data)


def _large_document(saved: Saved, path: Path) -> None:
    saved.entries[MODEL] += b" " * 2**26
    saved.write(path)


def _truncated(saved: Saved, path: Path) -> None:
    data = saved.write(path).read_bytes()
    path.write_bytes(data[: len(data) // 2])


def _pickled_constants(saved: Saved, path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.system, ("touch PWN",)

    trap = pickle.dumps(Trap())
    saved.entries |= {"data/constants/custom_obj_0": trap, "data/sample_inputs/model.pt": trap, "byteorder": trap}
    payload = {"path_name": "custom_obj_0", "is_param": False, "use_pickle": True, "tensor_meta": None}
    saved.put(CONSTANTS, {"config": {"o": payload}})
    saved.write(path)


Damage = Callable[[Saved, Path], object]


@pytest.mark.parametrize(
    ("damage", "refusal"),
    [
        pytest.param(_slip, None, marks=pytest.mark.attempt("P14")),
        pytest.param(
            lambda saved, path: saved.write(path, compression=zipfile.ZIP_DEFLATED),
            "is compressed",
            marks=pytest.mark.attempt("P15"),
            id="deflate",
        ),
        pytest.param(_deep, "nested too deep", marks=pytest.mark.attempt("P22")),
        pytest.param(_two_models, "has 2 programs", marks=pytest.mark.attempt("P23")),
        pytest.param(_twice, "two entries with the same name", marks=pytest.mark.attempt("P24")),
        pytest.param(_two_folders, "two entries with the same name"),
        pytest.param(_truncated, "truncated", marks=pytest.mark.attempt("P25")),
        pytest.param(lambda _, path: path.write_bytes(b""), "truncated", marks=pytest.mark.attempt("P26"), id="empty"),
        pytest.param(
            lambda _, path: path.write_bytes(pickle.dumps({"a": 1})),
            "truncated, or was not saved by torch.export",
            marks=pytest.mark.attempt("P27"),
            id="pickle",
        ),
        pytest.param(_pickled_constants, "as pickled Python", marks=pytest.mark.attempt("P35", "P11")),
        pytest.param(_many_entries, "lists its entries in 67,108,864 bytes"),
        pytest.param(_large_document, "and the limit is 67,108,864"),
    ],
)
def test_an_archive_is_bytes_in_a_file(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Damage, refusal: str | None
) -> None:
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    damage(saved, tmp_path / "in" / "m.pt2")
    found = read(tmp_path / "in" / "m.pt2")
    assert {path.name for path in tmp_path.rglob("*")} <= {"in", "m.pt2"}
    assert isinstance(found, Graph) if refusal is None else isinstance(found, str) and refusal in found


@pytest.mark.parametrize("name", ["fifo.pt2", "device.pt2", "folder.pt2", "gone.pt2"])
def test_what_is_no_regular_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "fifo.pt2":
        os.mkfifo(path)
    elif name == "device.pt2":
        path.symlink_to("/dev/zero")
    elif name == "folder.pt2":
        path.mkdir()
    with pytest.raises(CaptureError, match=r"cannot be read: (Not a regular file|Is a directory|No such file)"):
        capture_exported(path)
    if name == "fifo.pt2":
        assert stat.S_ISFIFO(path.stat().st_mode)


# --- A file that is a library as well. ---

_CONSTRUCTOR = """
#include <fcntl.h>
__attribute__((constructor)) static void mark(void) { open("%s", O_CREAT | O_WRONLY, 0600); }
"""


@pytest.fixture
def library(tmp_path: Path) -> tuple[bytes, Path]:
    """Native code that creates a file when it is loaded, and the file's path."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    mark = tmp_path / "PWN"
    (tmp_path / "mark.c").write_text(_CONSTRUCTOR % mark)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "mark.so", tmp_path / "mark.c"], check=True)
    subprocess.run([sys.executable, "-c", f"import ctypes; ctypes.CDLL('{tmp_path}/mark.so')"], check=True)
    mark.unlink()  # the control: it would have worked
    return (tmp_path / "mark.so").read_bytes(), mark


@pytest.mark.attempt("P40", "P41", "P42-3")
@pytest.mark.parametrize("name", ["./m.pt2", *(f"/proc/self/fd/{number}" for number in (3, 4, 5, 6))])
def test_a_file_that_is_a_library_as_well_is_never_loaded(
    saved: Saved, tmp_path: Path, library: tuple[bytes, Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    saved.change(set_spec(enumeration("ctypes:cdll", name))).write(Path("m.pt2"), before=library[0])
    assert "is not a tuple, list or dictionary" in str(read(tmp_path / "in" / "m.pt2"))
    assert not library[1].exists()


@pytest.mark.attempt("P00", "P00b", "P40", "P41")
def test_the_commands_refuse_it_in_a_sentence(
    saved: Saved, tmp_path: Path, library: tuple[bytes, Path], monkeypatch: pytest.MonkeyPatch, nxpipe: InProcess
) -> None:
    monkeypatch.chdir(tmp_path)
    saved.write(Path("good.pt2"), before=library[0])
    saved.change(set_spec(enumeration("ctypes:cdll", "./bad.pt2"))).write(Path("bad.pt2"), before=library[0])
    good, bad = (nxpipe("check", "--model-id", name, "--target", "inf2.xlarge") for name in ("good.pt2", "bad.pt2"))
    assert (good.code, bad.code) == (0, 11)
    built = nxpipe("build", "--model-id", "bad.pt2", "--store", "st", "--target", "inf2.xlarge")
    assert built.code == 11
    for answer in (bad, built):
        assert "is not a tuple, list or dictionary" in answer.out + answer.err
        assert "Traceback" not in answer.out + answer.err
    assert not library[1].exists()
