"""Hostile ONNX files: each attempt of the review and its variants ends in one sentence, without side effects."""

import os
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from onnx import ModelProto, TensorProto

from nxpipe.emulator.capture import capture_file, data_files, dynamic_axes
from nxpipe.emulator.capture.onnx.external import tensors_of
from nxpipe.emulator.capture.onnx.limits import (
    DEPTH,
    EXPANDED_NODES,
    FILE_FIELDS,
    FILE_NODES,
    LOOP_ITERATIONS,
    UNCOUNTED_BYTES,
    BeyondLimit,
)
from nxpipe.emulator.capture.site import NotExpressible, require_table_fits
from nxpipe.pipeline.compile.spec import _resolved
from nxpipe.pipeline.models.program_file import SavedProgram, UnknownAxis
from tests.pipeline.command import Answer
from tests.pipeline.in_process import InProcess, nxpipe
from tests.security.audit import watched
from tests.security.onnx_files import (
    OWN,
    Recipe,
    beside,
    body,
    branches,
    chain,
    field,
    function,
    functions_in_functions,
    loops,
    model,
    node,
    projection,
    projection_in_function,
    saved,
    single,
    table,
    weight,
)

__all__ = ["nxpipe"]

pytestmark = pytest.mark.sample(2)

_SHAPE: Final = table("w", 2, 8)
_WEIGHT: Final = weight("w", 8, 4)
_OUTSIDE: Final = "outside of its folder, and is never read"
_LINK: Final = "is behind a symlink, which is never followed"
_SECOND: Final = "has a second name (a hard link)"
_TOO_MUCH: Final = f"has more than {EXPANDED_NODES:,} nodes with its loops and functions expanded"
_RECURSIVE: Final = "function mine.F calls itself"


def _secret(folder: Path) -> Path:
    """A file of this machine outside of the model, as long as the weight, so that its size reveals nothing."""
    place = folder.parent / "secret"
    place.mkdir(exist_ok=True)
    (place / "passwd").write_bytes(bytes(_WEIGHT.raw_data))
    return place / "passwd"


def _reshaped(tensor: Any) -> Any:
    return model([node("Reshape", "x w", "y")], [tensor])


def _linked(wrap: Any, tensor: Any) -> Recipe:
    def recipe(folder: Path) -> Any:
        (folder / "data.bin").symlink_to(_secret(folder))
        return wrap(beside(tensor, "data.bin"))

    return recipe


def _linked_folder(wrap: Any) -> Recipe:
    def recipe(folder: Path) -> Any:
        (folder / "sub").symlink_to(_secret(folder).parent)
        return wrap(beside(_WEIGHT, "sub/passwd"))

    return recipe


def _second_name(wrap: Any) -> Recipe:
    def recipe(folder: Path) -> Any:
        (folder / "data.bin").hardlink_to(_secret(folder))
        return wrap(beside(_WEIGHT, "data.bin"))

    return recipe


def _fifo(wrap: Any) -> Recipe:
    def recipe(folder: Path) -> Any:
        os.mkfifo(folder / "data.bin")
        return wrap(beside(_WEIGHT, "data.bin"))

    return recipe


def _absolute(folder: Path) -> Any:
    return projection_in_function(beside(_WEIGHT, str(_secret(folder))))


def _upwards(folder: Path) -> Any:
    _secret(folder)
    return projection_in_function(beside(_WEIGHT, "../secret/passwd"))


def _there(wrap: Any, **entries: object) -> Recipe:
    def recipe(folder: Path) -> Any:
        (folder / "data.bin").write_bytes(_WEIGHT.raw_data)
        return wrap(beside(_WEIGHT, "data.bin", **entries))

    return recipe


def _is_fifo(folder: Path) -> None:
    os.mkfifo(folder / "m.onnx")


def _is_endless(folder: Path) -> None:
    (folder / "m.onnx").symlink_to("/dev/zero")


def _is_folder_link(folder: Path) -> None:
    (folder / "m.onnx").symlink_to(folder / "gone")


def _with(made: Any) -> Recipe:
    return lambda folder: made


def _made(make: Any, *arguments: Any) -> Recipe:
    return lambda folder: make(*arguments)


def _calls(*pairs: tuple[str, str]) -> Any:
    """Functions that call each other in a chain."""
    made = [function(name, [node(called, "a", "b", domain=OWN)]) for name, called in pairs]
    return model([node(pairs[0][0], "x", "y", domain=OWN)], functions=made)


def _deep_branches() -> bytes:
    """200 nested branches, which protobuf neither reads nor writes: assembled as bytes."""
    inner = b""
    for _ in range(200):
        attribute = field(1, b"then_branch") + field(6, field(2, b"e") + inner) + bytes([20 << 3 & 127 | 128, 1, 5])
        inner = field(1, field(1, b"known") + field(2, b"y") + field(4, b"If") + field(5, attribute))
    return field(7, inner)


def _short(**changed: Any) -> Any:
    tensor = weight("w", 8, 4)
    for name, value in changed.items():
        tensor.ClearField(name)
        if isinstance(value, list):
            getattr(tensor, name).extend(value)
        else:
            setattr(tensor, name, value)
    return projection(tensor)


def _constant(kind: str, tables: dict[str, Any], given: str, **attributes: Any) -> Any:
    """The requested value, computed with known tables and added to x."""
    made = [node(kind, given, "t", **attributes), node("Add", "x x", "y")]
    return model(made, list(tables.values()))


_UNKNOWN = "reads 'nowhere', which is not defined"

# attempt, file, command, exit code, words of the sentence
_ATTEMPTS: list[tuple[str, Recipe, str, int, str]] = [
    ("O00", _with(projection(_WEIGHT)), "check", 0, "lowers, and fits"),
    ("O01", _with(_reshaped(beside(_SHAPE, "../../../../../../etc/passwd"))), "check", 10, _OUTSIDE),
    ("O02", _with(_reshaped(beside(_SHAPE, "/etc/passwd"))), "check", 10, _OUTSIDE),
    ("O03", _linked(_reshaped, _SHAPE), "check", 10, _LINK),
    ("O04", _linked_folder(projection), "build", 10, _LINK),
    ("O05", _with(projection(beside(_WEIGHT, "../../../../../../etc/passwd"))), "build", 10, _OUTSIDE),
    ("O06", _second_name(projection), "build", 10, _SECOND),
    ("O07", _fifo(projection), "build", 10, "data.bin cannot be read (Not a regular file)"),
    ("O08", _with(projection(beside(_WEIGHT, "/dev/zero"))), "build", 10, _OUTSIDE),
    ("O09", _there(projection, offset=-100), "build", 10, "the offset of the data of 'w' is '-100'"),
    ("O10", _there(projection, length=2**62), "build", 10, "but the model needs 4,611,686,018,427,387,904"),
    ("O11", _there(projection, length="abc"), "build", 10, "the length of the data of 'w' is 'abc'"),
    ("O12", _with(projection(beside(_WEIGHT, "."))), "build", 10, "is not a file name"),
    ("O13", _with(projection(beside(_WEIGHT, "a\0b\nc"))), "build", 10, r"'a\x00b\nc', which is not a file name"),
    ("O14", _with(projection(beside(_WEIGHT, "PWN\x1b]0;x\x07"))), "build", 10, r"'PWN\x1b]0;x\x07'"),
    ("O15", _made(loops, 1, 10**9), "check", 11, f"runs more than {LOOP_ITERATIONS:,} times"),
    ("O16", _made(loops, 1, LOOP_ITERATIONS), "check", 0, "lowers, and fits"),
    ("O17", _made(loops, 2, LOOP_ITERATIONS), "check", 11, _TOO_MUCH),
    ("O18", _made(loops, 6, LOOP_ITERATIONS), "check", 11, _TOO_MUCH),
    ("O19", _made(functions_in_functions, 30, 2), "check", 11, _TOO_MUCH),
    ("O20", _with(_calls(("F", "F"))), "check", 11, _RECURSIVE),
    ("O21", _with(_calls(("F", "G"), ("G", "F"))), "check", 11, _RECURSIVE),
    ("O22", _made(functions_in_functions, 2000, 1), "check", 11, f"nests {DEPTH + 1} bodies"),
    ("O23", _made(branches, 30), "check", 0, "lowers, and fits"),
    ("O24", _with(_constant("ConstantOfShape", {"s": table("s", 10**6, 10**6)}, "s")), "check", 0, "lowers, and fits"),
    (
        "O25",
        _with(_constant("Range", {n: single(n, np.float32(v)) for n, v in (("a", 0), ("b", 1e12), ("d", 1))}, "a b d")),
        "check",
        11,
        "it needs a table of 7,999,999,9",
    ),
    (
        "O26",
        _with(_constant("Expand", {"s": table("s", 10**6, 10**6), "v": single("v", np.float32(1))}, "v s")),
        "check",
        0,
        "",
    ),
    ("O27", _with(model([node("Pad", "x p", "y")], [table("p", 0, 10**15, 0, 0)])), "check", 11, "onnx.Pad"),
    (
        "O28",
        _with(
            model(
                [node("OneHot", "i d v", "h"), node("Add", "x x", "y")],
                [table("i", 1), single("d", 2**40), table("v", 0, 1)],
            )
        ),
        "check",
        11,
        "it needs a table of 8,796,093,022,208 bytes, and the limit is",
    ),
    (
        "O29",
        _with(
            model(
                [
                    node("Constant", "", "s", value_floats=[1e9, 1e9]),
                    node("Resize", "x . s", "y", mode="linear"),
                ]
            )
        ),
        "check",
        11,
        "it needs a table of 16,000,000,000 bytes, and the limit is",
    ),
    (
        "O30",
        _with(model([node("Relu", "x", "y")], inputs={"x": [2**40, 2**40]})),
        "check",
        11,
        "is not a valid tensor type",
    ),
    ("O31", _with(model([node("Relu", "x", "y")], inputs={"x": [-2, 0]})), "check", 11, "is not a valid tensor type"),
    ("O32", _made(chain, 20_000), "check", 0, "lowers, and fits"),
    ("O33", _made(chain, 10**6), "check", 11, f"fields, and the limit is {FILE_FIELDS:,}"),
    (
        "O34",
        _with(model([node("Add", "x b", "a"), node("Relu", "a", "b"), node("Relu", "a", "y")])),
        "check",
        11,
        "reads 'b', which node 1, which comes after it, defines",
    ),
    # That the output shows such names with their control characters visible is held in the tests of the console.
    (
        "O35",
        _with(model([node("Det", "x", "y", name="\x1b]0;PWN\x07\n::error::x")], inputs={"x": [4, 4]})),
        "check",
        11,
        "onnx.Det",
    ),
    ("O36", _with(_short(raw_data=b"abc")), "build", 11, "initialiser 'w' cannot be read"),
    ("O37", _with(_short(raw_data=b"", dims=[2**40, 2**40])), "build", 11, "initialiser 'w' cannot be read"),
    ("O38", _with(b"not protobuf"), "check", 11, "is truncated, or is not an ONNX model"),
    ("O39", _with(b"\x80\x04cos\nsystem\n(S'touch PWN'\ntR."), "check", 11, "is truncated, or is not an ONNX model"),
    ("O40", _is_fifo, "check", 10, "cannot be read (Not a regular file)"),
    ("O41", _is_endless, "check", 10, "cannot be read (Not a regular file)"),
    ("O42", _with(model([node("Add", "x nowhere", "y")])), "build", 11, _UNKNOWN),
    ("O43", _with(model([node("Clip", "x nowhere high", "y")])), "build", 11, _UNKNOWN),
    ("O44", _with(model([node("Gemm", "x w nowhere", "y")], [_WEIGHT])), "build", 11, _UNKNOWN),
    ("O45", _with(model([node("Gemm", "x w nowhere", "y")], [_WEIGHT])), "check", 11, _UNKNOWN),
    ("O46", _there(projection_in_function), "build", 0, ""),
    ("O48", _there(projection), "build", 0, ""),
    ("O49", _with(model([node("Clip", "x nowhere", "y")])), "build --no-verify", 11, _UNKNOWN),
    ("O50", _upwards, "build", 10, _OUTSIDE),
    ("O51", _absolute, "build", 10, _OUTSIDE),
    ("O52", _linked(projection_in_function, _WEIGHT), "build", 10, _LINK),
    ("O53", _linked_folder(projection_in_function), "build", 10, _LINK),
    ("O54", _second_name(projection_in_function), "build", 10, _SECOND),
    ("O55", _fifo(projection_in_function), "build", 10, "data.bin cannot be read (Not a regular file)"),
]

# Of the same kinds, tried by nobody before.
_SIBLINGS: list[tuple[str, Recipe, str, int, str]] = [
    ("one node too many", _made(chain, FILE_NODES + 1), "check", 11, f"{FILE_NODES + 1:,} nodes, and the limit is"),
    ("empty location", _with(projection(beside(_WEIGHT, ""))), "build", 10, "is not a file name"),
    ("location of a folder", _with(projection(beside(_WEIGHT, "store"))), "build", 10, "cannot be read"),
    ("the model file itself, linked to nothing", _is_folder_link, "check", 10, "No such file"),
    ("length of digits that are not ASCII", _there(projection, length="١٢"), "build", 10, "not a number of bytes"),
    ("offset of 5,000 digits", _there(projection, offset="9" * 5000), "build", 10, "not a number of bytes"),
    (
        "one file of data read a thousand times",
        lambda folder: (
            (folder / "data.bin").write_bytes(bytes(128)),
            model(
                [node("MatMul", "x w0", "y")],
                [beside(weight(f"w{i}", 8, 4), "data.bin", length=128) for i in range(1000)],
            ),
        )[1],
        "build",
        10,
        "its tensors read 128,000 bytes of its external data files, which have 128,",
    ),
    ("three functions that call each other", _with(_calls(("F", "G"), ("G", "H"), ("H", "F"))), "check", 11, "itself"),
    (
        "a function that calls itself in a branch",
        _with(
            model(
                [node("F", "x", "y", domain=OWN)],
                functions=[function("F", [node("Loop", "a . a", "b", body=body([node("F", "v", "o_v", domain=OWN)]))])],
            )
        ),
        "check",
        11,
        _RECURSIVE,
    ),
    ("branches deeper than protobuf reads", _with(_deep_branches()), "check", 11, "not an ONNX model"),
    ("a node that reads itself", _with(model([node("Add", "x y", "y")])), "check", 11, "this node itself defines"),
    (
        "a value made twice",
        _with(model([node("Relu", "x", "y"), node("Neg", "x", "y")])),
        "check",
        11,
        "already defined",
    ),
    (
        "an output that nothing makes",
        _with(model([node("Relu", "x", "t")])),
        "check",
        11,
        "is not the result of any node",
    ),
    (
        "an operand of a function that nothing makes",
        _with(
            model(
                [node("F", "x", "y", domain=OWN)],
                functions=[function("F", [node("Clip", "a nowhere", "b")])],
            )
        ),
        "check",
        11,
        _UNKNOWN,
    ),
    (
        "an operand of a loop's body that nothing makes",
        _with(
            model([node("Loop", "turns . x", "y", body=body([node("Clip", "v nowhere", "o_v")]))], [single("turns", 2)])
        ),
        "check",
        11,
        _UNKNOWN,
    ),
    (
        "a result that its operator does not have",
        _with(model([node("Relu", "x", "t second"), node("Clip", "t second", "y")])),
        "check",
        11,
        "it has 1 results, but the node names 2",
    ),
    (
        "two functions of one name",
        _with(
            model(
                [node("F", "x", "y", domain=OWN)],
                functions=[function("F", [node(kind, "a", "b")]) for kind in ("Relu", "Neg")],
            )
        ),
        "check",
        11,
        "two functions mine.F",
    ),
    (
        "a table of 2^40 for Trilu",
        _with(model([node("Trilu", "x", "y")], inputs={"x": [2**20, 2**20]})),
        "check",
        11,
        "it needs a table of 1,099,511,627,776 bytes",
    ),
    (
        "a result of 70 TB that nothing reads",
        _with(model([node("ConstantOfShape", "s", "t"), node("Relu", "x", "y")], [table("s", 2**22, 2**22)])),
        "build",
        11,
        "ONNX's reference evaluator needs about 70.4 TB for intermediate results",
    ),
    ("Split in 10^12", _with(model([node("Split", "x", "y", num_outputs=10**12)])), "check", 11, "has more than"),
    (
        "Range by steps of nothing",
        _with(_constant("Range", {n: single(n, v) for n, v in (("a", 0), ("b", 9), ("d", 0))}, "a b d")),
        "check",
        11,
        "the node is malformed",
    ),
    (
        "an element type that does not exist",
        _with(model([node("Cast", "x", "y", to=12345)])),
        "check",
        11,
        "the hardware has no element type number 12345",
    ),
    (
        "a name of 2 MB in each origin",
        _with(model([node("Relu", "x", "y", name="n" * 2**21)])),
        "check",
        11,
        "has a name of 2,097,152 characters, and the limit is 1,024",
    ),
]


_LONG: Final = {"O18", "O19", "O32", "O33"}  # as O17 and the chain below, and a check of a graph that is merely large


def _row(attempt: str, *rest: Any) -> Any:
    marks = [pytest.mark.attempt(attempt), *([pytest.mark.slow] if attempt in _LONG else [])]
    return pytest.param(*rest, id=attempt, marks=marks)


def _command(nxpipe: InProcess, words: str, folder: Path, *more: str) -> Answer:
    command, *flags = words.split()
    where = ("--store", str(folder.parent / "store")) if command == "build" else ("--target", "inf2.xlarge")
    return nxpipe(command, "--model-id", str(folder / "m.onnx"), *where, *flags, *more)


def _tried(nxpipe: InProcess, root: Path, recipe: Recipe, command: str) -> Answer:
    folder = root / "model"
    folder.mkdir()
    made = recipe(folder)
    if made is not None:
        saved(made, folder)
    before = {path.relative_to(root) for path in root.rglob("*")}
    answer = _command(nxpipe, command, folder)
    after = {path.relative_to(root) for path in root.rglob("*") if path.relative_to(root).parts[0] != "store"}
    assert after == before
    return answer


def _require_sentence(answer: Answer, code: int, words: str) -> None:
    text = " ".join((answer.out + answer.err).split())
    assert (answer.code, words in text) == (code, True), text
    assert "internal error" not in text
    assert "Traceback" not in text
    if code and not answer.out:
        assert sum(line.startswith("Error: ") for line in answer.err.splitlines()) == 1, answer.err


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("recipe", "command", "code", "words"),
    [_row(*row) for row in _ATTEMPTS],
)
def test_an_attempt_of_the_review_ends_in_a_sentence(
    recipe: Recipe, command: str, code: int, words: str, nxpipe: InProcess, tmp_path: Path
) -> None:
    _require_sentence(_tried(nxpipe, tmp_path, recipe, command), code, words)


@pytest.mark.sample(6)
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("recipe", "command", "code", "words"), [pytest.param(*rest, id=what) for what, *rest in _SIBLINGS]
)
def test_what_is_like_an_attempt_ends_in_a_sentence(
    recipe: Recipe, command: str, code: int, words: str, nxpipe: InProcess, tmp_path: Path
) -> None:
    _require_sentence(_tried(nxpipe, tmp_path, recipe, command), code, words)


@pytest.mark.sample(4)
def test_messages_that_grow_in_memory_are_counted_before_they_do(tmp_path: Path) -> None:
    path = saved(field(7, field(1, b"") * (FILE_FIELDS + UNCOUNTED_BYTES)), tmp_path)
    with pytest.raises(BeyondLimit, match=r"has more than 2,000,000 fields, and the limit is 2,000,000"):
        capture_file(path)


def test_an_empty_table_does_not_excuse_an_endless_one() -> None:
    with pytest.raises(NotExpressible, match="needs a table of 8,796,093,022,208 bytes"):
        require_table_fits((0, 2**40))


@pytest.mark.attempt("O47")
@pytest.mark.parametrize("wrap", [projection, projection_in_function], ids=["graph", "function"])
def test_weights_beside_the_file_are_in_the_key_wherever_they_are_named(
    wrap: Any, nxpipe: InProcess, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "data.bin").write_bytes(_WEIGHT.raw_data)
    saved(wrap(beside(_WEIGHT, "data.bin")), folder)
    first = _command(nxpipe, "build", folder)
    assert (first.code, "cached" in first.out) == (0, False), first.err
    assert "cached" in _command(nxpipe, "build", folder).out
    (folder / "data.bin").write_bytes(weight("w", 8, 4, seed=1).raw_data)
    _resolved.cache_clear()  # a second command is a second process
    changed = _command(nxpipe, "build", folder)
    assert (changed.code, "cached" in changed.out) == (0, False), changed.err


def _elsewhere() -> Any:
    return beside(_WEIGHT, "data.bin", length=128)


def _in_attribute_of_caller() -> Any:
    body = [node("Constant", "", "w"), node("MatMul", "a w", "b")]
    body[0].attribute.add(name="value", ref_attr_name="held", type=4)
    called = function("F", body)
    called.attribute.append("held")
    return model([node("F", "x", "y", domain=OWN, held=_elsewhere())], functions=[called])


def _in_default_of_function() -> Any:
    made = _in_attribute_of_caller()
    del made.graph.node[0].attribute[:]
    del made.functions[0].attribute[:]
    default = made.functions[0].attribute_proto.add(name="held", type=4)
    default.t.CopyFrom(_elsewhere())
    return made


def _in_body_of_loop() -> Any:
    square = weight("w", 8, 8)
    inner = body([node("MatMul", "v w", "o_v")])
    inner.initializer.append(beside(square, "data.bin", length=256))
    return model([node("Loop", "turns . x", "y", body=inner)], [single("turns", 2)])


def _in_training() -> Any:
    made = projection(_WEIGHT)
    made.training_info.add().algorithm.initializer.append(_elsewhere())
    return made


def _in_sparse_value() -> Any:
    made = projection(_WEIGHT)
    attribute = made.graph.node.add(op_type="Constant", output=["s"]).attribute.add(name="sparse_value", type=11)
    attribute.sparse_tensor.values.CopyFrom(_elsewhere())
    return made


def _in_filling() -> Any:
    filling = beside(weight("w", 1), "data.bin", length=4)
    return model([node("ConstantOfShape", "s", "t", value=filling), node("Add", "x t", "y")], [table("s", 2, 8)])


_EVERYWHERE = {
    "initialiser": lambda: projection(_elsewhere()),
    "function": lambda: projection_in_function(_elsewhere()),
    "attribute of a call": _in_attribute_of_caller,
    "default of a function": _in_default_of_function,
    "body of a loop": _in_body_of_loop,
    "value of ConstantOfShape": _in_filling,
    "training": _in_training,
    "sparse value": _in_sparse_value,
}


@pytest.mark.parametrize("made", _EVERYWHERE.values(), ids=list(_EVERYWHERE))
def test_every_place_of_a_tensor_is_found(made: Any, tmp_path: Path) -> None:
    path = saved(made(), tmp_path)
    (tmp_path / "data.bin").write_bytes(bytes(256))
    assert data_files(path).keys() == {"data.bin"}


@pytest.mark.parametrize("made", list(_EVERYWHERE.values())[:6], ids=list(_EVERYWHERE)[:6])
def test_what_a_build_reads_is_among_the_digests(made: Any, tmp_path: Path) -> None:
    path = saved(made(), tmp_path)
    (tmp_path / "data.bin").write_bytes(weight("w", 8, 8).raw_data)
    program = SavedProgram(path, {})
    with watched() as seen:
        graph = program.graph
        weights = program.read_weights()
        if made is not _in_default_of_function:  # which onnx's evaluator does not know
            program.outputs(program.shapes((), (), None)[0], (), weights, {"x": np.ones((2, 8), np.float32)})
    digests = program.digests()
    assert set(graph.parameters) <= set(weights)
    assert {file for file in seen.files if file.is_relative_to(tmp_path)} == {path, tmp_path / "data.bin"}
    assert digests.keys() == {"", "data.bin"}
    assert not seen.forbidden


def test_the_walk_over_tensors_misses_none_that_the_format_allows() -> None:
    """Each message type of the format that has a tensor in it is filled once; the walk has to meet every one."""
    model_, count = ModelProto(), 0
    waiting: list[tuple[Any, frozenset[str]]] = [(model_, frozenset())]
    while waiting:
        message, above = waiting.pop()
        for entry in message.DESCRIPTOR.fields:
            kind = entry.message_type
            if kind is None or kind.full_name in above:
                continue
            held = getattr(message, entry.name)
            inner = held.add() if entry.is_repeated else held
            inner.SetInParent()
            if isinstance(inner, TensorProto):
                inner.name, count = str(count), count + 1
            else:
                waiting.append((inner, above | {kind.full_name}))
    assert {tensor.name for tensor in tensors_of(model_)} == set(map(str, range(count)))
    assert count > 10


@pytest.mark.parametrize(
    ("axes", "code", "words"),
    [
        (
            ("batch=2", "bach=2"),
            2,
            "m.onnx has no dynamic axis 'bach', its dynamic axes are 'batch'; did you mean 'batch'?",
        ),
        (("batch=2", "x=2"), 2, "m.onnx has no dynamic axis 'x', its dynamic axes are 'batch'; leave it out"),
        (("batch=2", "batch=3"), 2, "--axis sets 'batch' to both 2 and 3; keep one"),
        (("batch=0",), 2, "is not NAME=SIZE"),
        (("batch=2147483648",), 2, "is not NAME=SIZE with a size from 1 to 2,147,483,647"),
        (("batch=" + "9" * 5000,), 2, "is not NAME=SIZE"),
        (("batch=٢",), 2, "is not NAME=SIZE"),
    ],
)
@pytest.mark.parametrize("command", ["build", "check"])
def test_sizes_are_for_axes_that_a_model_has(
    command: str, axes: tuple[str, ...], code: int, words: str, nxpipe: InProcess, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    saved(model([node("Relu", "x", "y")], inputs={"x": ["batch", 8]}), folder)
    answer = _command(nxpipe, command, folder, *(word for axis in axes for word in ("--axis", axis)))
    assert (answer.code, words in answer.err) == (code, True), answer.err
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("command", ["build", "check", "verify", "explain", "run"])
@pytest.mark.parametrize("name", ["m.onnx", "m.pt2"])
def test_every_command_refuses_a_size_for_an_axis_that_is_not_there(
    name: str, command: str, nxpipe: InProcess, tmp_path: Path
) -> None:
    path = saved(model([node("Relu", "x", "y")]), tmp_path, name)
    answer = nxpipe(command, "--model-id", str(path), "--axis", "batch=4")
    assert answer.code == 2, answer.err
    assert f"{name} has no dynamic axis 'batch', all of its sizes are fixed; leave it out" in answer.err


def test_an_axis_that_a_model_does_not_have_is_no_part_of_a_key(tmp_path: Path) -> None:
    path = saved(model([node("Relu", "x", "y")], inputs={"x": ["batch", 8]}), tmp_path)
    assert dynamic_axes(path) == ("batch",)
    assert SavedProgram(path, {"batch": 2}).digests()
    with pytest.raises(UnknownAxis, match="no dynamic axis 'bach'"):
        SavedProgram(path, {"batch": 2, "bach": 2}).digests()
    fixed = saved(model([node("Relu", "x", "y")]), tmp_path, "fixed.onnx")
    with pytest.raises(UnknownAxis, match="all of its sizes are fixed"):
        SavedProgram(fixed, {"batch": 2}).digests()
    with pytest.raises(UnknownAxis, match=r"m\.pt2 has no dynamic axis 'batch'"):
        SavedProgram(tmp_path / "m.pt2", {"batch": 2}).require_axes()
