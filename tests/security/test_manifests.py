"""Forged manifests in a store: a fetch refuses them in one sentence, and writes nowhere else."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from nxpipe.artifact_store import Store
from nxpipe.artifact_store.canonical import canonical_json
from nxpipe.artifact_store.documents import Blob, written_now
from nxpipe.artifact_store.errors import InvalidDocument
from nxpipe.artifact_store.fetch.file_layout import layout_of
from nxpipe.artifact_store.layout import blob_path
from nxpipe.artifact_store.manifest import WIDTHS, Manifest, Tensor
from nxpipe.artifact_store.records import ActionRecord
from nxpipe.emulator.ir.types import DType
from nxpipe.pipeline.util import exit_codes
from tests.artifact_store.samples import Folder, folder, put, tree
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]

Raw = dict[str, Any]
Change = Callable[[Raw, Store], None]

HELD: Final = frozenset({0})
CORRUPT: Final = frozenset({exit_codes.CORRUPT.number})
REFUSED: Final = frozenset({exit_codes.REFUSED.number})
STORE: Final = frozenset({exit_codes.STORE.number})
MISSING: Final = frozenset({exit_codes.NOT_FOUND.number, exit_codes.STORE.number})  # or the file system has no room


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    home = tmp_path / "a" / "b" / "c"
    home.mkdir(parents=True)
    monkeypatch.chdir(home)
    return folder(home / "store")


def planted(place: Folder, data: bytes, raw: Raw) -> str:
    """The key of these bytes, stored by an attacker with write access."""
    blob = Blob.of(data)
    path = place.root / blob_path(blob)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    record = ActionRecord(
        request_key=raw["key_inputs"]["sha256"],
        manifest=blob,
        model_id="tiny",
        target="inf2",
        executables=1,
        size_bytes=1,
        published_at=written_now(),
        write_id="0" * 32,
    )
    (place.root / record.path).parent.mkdir(parents=True, exist_ok=True)
    (place.root / record.path).write_bytes(record.to_bytes())
    return record.request_key


def sample(place: Folder) -> Raw:
    return json.loads(canonical_json(put(place.store).model_dump()))  # type: ignore[no-any-return]


def file_named(*paths: str) -> Change:
    def change(raw: Raw, store: Store) -> None:
        raw["files"] = [{"path": path, "blob": store.put_blob(path.encode()).model_dump()} for path in paths]

    return change


def program_named(*names: str) -> Change:
    def change(raw: Raw, store: Store) -> None:
        raw["executables"] = [raw["executables"][0] | {"name": name} for name in names]

    return change


def tensor(**fields: object) -> Change:
    def change(raw: Raw, store: Store) -> None:
        raw["weights"] = [raw["weights"][0] | fields]

    return change


def _absent(size: int, **more: object) -> Change:
    return tensor(blob={"sha256": "ab" * 32, "size": size}, shape=[size], **more)


def _lying_file(raw: Raw, store: Store) -> None:
    raw["files"][0]["blob"]["size"] = 2**53 - 1


# id, what is changed, the exit codes that are right, and what the sentence says
FIELDS: Final[list[tuple[str, Change, frozenset[int], str]]] = [
    ("B300", file_named("../../PWN"), CORRUPT, "is not a plain relative path"),
    ("B301", file_named("/tmp/PWNabs"), CORRUPT, "is not a plain relative path"),
    ("B302", file_named("a/../../../PWN"), CORRUPT, "is not a plain relative path"),
    ("B303", file_named("..\\..\\PWN"), CORRUPT, "is not a plain relative path"),
    ("B304", file_named("C:PWN"), CORRUPT, "is not a plain relative path"),
    ("B305", file_named("PWN\nx"), CORRUPT, "is not a plain relative path"),
    ("B306", file_named("PWN\x1b[31m"), CORRUPT, "is not a plain relative path"),
    ("B307", file_named("./PWN"), CORRUPT, "is not a plain relative path"),
    ("B308", file_named("PWN/"), CORRUPT, "is not a plain relative path"),
    ("B309", file_named("a//PWN"), CORRUPT, "is not a plain relative path"),
    ("B310", file_named("\u202ePWN"), CORRUPT, "is not a plain relative path"),
    ("B311", file_named("PWN\x00"), CORRUPT, "is not a plain relative path"),
    ("B312", file_named("~/PWN"), HELD, ""),
    ("B313", file_named("PWN" + "a" * 300), CORRUPT, "is too long"),
    ("B314", file_named("manifest.json/PWN"), HELD, ""),
    ("B320", file_named("a/x", "A/x"), CORRUPT, "are the same name on a file system that ignores case or Unicode form"),
    ("B321", file_named("caf\u00e9", "cafe\u0301"), CORRUPT, "are the same name on a file system"),
    ("B320", program_named("Forward", "forward"), CORRUPT, "are the same name on a file system"),
    ("B321", program_named("\u212b", "\u00e5"), CORRUPT, "are the same name on a file system"),
    ("B320", file_named("A", "a/x"), CORRUPT, "lies below another file"),
    ("B330", program_named("../../PWN"), REFUSED, "is not a file name"),
    ("B331", program_named(".."), REFUSED, "is not a file name"),
    ("B332", program_named("."), REFUSED, "is not a file name"),
    ("B333", program_named("a/b"), REFUSED, "is not a file name"),
    ("B334", program_named("a\\b"), STORE, "is not a plain relative path"),
    ("B335", program_named("x" * 512), STORE, "is too long"),
    ("B336", program_named("\x1b[2J"), CORRUPT, "holds control characters"),
    ("B337", program_named("CON"), HELD, ""),
    ("B338", program_named("a:b"), HELD, ""),
    ("B339", program_named("-rf"), HELD, ""),
    ("B340", tensor(name="__metadata__"), CORRUPT, "the safetensors format reserves that name"),
    ("B341", tensor(dtype="float32", shape=[7]), CORRUPT, "has 28 bytes, and its blob has 100"),
    ("B341", tensor(shape=[]), CORRUPT, "has 1 bytes, and its blob has 100"),
    ("B341", tensor(shape=[0, 100]), CORRUPT, "has 0 bytes, and its blob has 100"),
    ("B342", tensor(shape=[2**53 - 1]), CORRUPT, "has 9007199254740991 bytes, and its blob has 100"),
    ("B342", tensor(shape=[2**53 - 1, 2**53 - 1, 0]), CORRUPT, "is larger than 9007199254740991 bytes"),
    ("B343", tensor(dtype="evil"), CORRUPT, "is of the unknown type 'evil'"),
    ("B344", _absent(2**53 - 1, pack=None), MISSING, ""),
    ("B345", _absent(2**40), MISSING, ""),
    ("B346", _lying_file, CORRUPT, "9007199254740991"),
    ("B347", file_named("config.json", "config.json"), CORRUPT, "appears 2 times"),
    ("B348", file_named("PWNd", "PWNd/x"), CORRUPT, "lies below another file"),
]


@pytest.mark.parametrize(
    ("change", "codes", "said"),
    [pytest.param(*row[1:], marks=pytest.mark.attempt(row[0]), id=f"{row[0]}-{at}") for at, row in enumerate(FIELDS)],
)
def test_a_fetch_takes_no_manifest_at_its_word(
    place: Folder, tmp_path: Path, nxpipe: InProcess, change: Change, codes: frozenset[int], said: str
) -> None:
    raw = sample(place)
    change(raw, place.store)
    answer = nxpipe("store", "fetch", planted(place, canonical_json(raw), raw), "--to", "out", "--store", "store")
    assert answer.code in codes, answer.err
    assert said in answer.err
    assert answer.err.count("\n") == 1
    assert "\x1b" not in answer.err + answer.out
    here = Path.cwd().relative_to(tmp_path).as_posix()
    assert {path for path in tree(tmp_path) if not path.startswith((f"{here}/store/", f"{here}/out/"))} == set()
    if answer.code:
        assert not (Path("out") / "manifest.json").exists()


def _nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def _with_report(text: str) -> Callable[[Raw], bytes]:
    """A manifest whose report is this, in no other place different from a good one."""

    def made(raw: Raw) -> bytes:
        return canonical_json(raw | {"report": {}}).replace(b'"report":{}', f'"report":{text}'.encode())

    return made


def _with_key_twice(raw: Raw) -> bytes:
    return b'{"backend":"emulator",' + canonical_json(raw)[1:]


def _with_boolean(raw: Raw) -> bytes:
    raw["executables"][0]["batch"] = True
    return canonical_json(raw)


BYTES: Final[list[tuple[str, Callable[[Raw], bytes], str]]] = [
    ("B350", lambda raw: _nested(100_000), "it is nested more than 64 levels deep"),
    ("B351", lambda raw: json.dumps(raw).encode(), "it is JSON, but not in the canonical form"),
    ("B352", _with_key_twice, "an object has the key 'backend' twice"),
    ("B353", _with_report('{"x":' + "9" * 100_000 + "}"), "an integer of 100000 characters is beyond 2^53 - 1"),
    ("B354", lambda raw: b" " * (33 * 1024**2), "it has more than the allowed 33554432 bytes"),
    ("B355", _with_report('{"x":1e999}'), "the number 1e999 is too large for a double"),
    ("B356", _with_report('{"x":NaN}'), "NaN is not a number in JSON"),
    ("B357", _with_boolean, "batch: Input should be a valid integer"),
    ("B358", lambda raw: b"\x1f\x8b\x08\x00\x00\x00\x96", "it is not UTF-8"),
]


@pytest.mark.parametrize(
    ("made", "said"), [pytest.param(*row[1:], marks=pytest.mark.attempt(row[0]), id=row[0]) for row in BYTES]
)
def test_bytes_that_are_no_manifest_are_corrupt(
    place: Folder, nxpipe: InProcess, made: Callable[[Raw], bytes], said: str
) -> None:
    raw = sample(place)
    answer = nxpipe("store", "fetch", planted(place, made(raw), raw), "--to", "out", "--store", "store")
    assert answer.code == exit_codes.CORRUPT.number
    assert said in answer.err
    assert answer.err.count("\n") == 1
    assert not Path("out").exists()


@pytest.mark.attempt("B315")
def test_a_lone_surrogate_cannot_be_spelled() -> None:
    with pytest.raises(InvalidDocument, match="lone surrogate"):
        canonical_json({"path": "PWN\ud800"})


@pytest.mark.attempt("B349")
def test_a_manifest_is_not_nested_deeper_than_any_document() -> None:
    with pytest.raises(InvalidDocument, match="nested more than 64 levels deep"):
        Manifest.from_bytes(b'{"x":' * 70 + b"1" + b"}" * 70)


@pytest.mark.attempt("B340", "B341", "B342", "B343")
@pytest.mark.parametrize("words", [("run", "KEY"), ("verify", "KEY"), ("store", "show", "KEY")], ids=lambda w: w[0])
@pytest.mark.parametrize("change", [tensor(name="__metadata__"), tensor(dtype="evil"), tensor(shape=[3])])
def test_no_command_is_surprised_by_such_a_tensor(
    place: Folder, nxpipe: InProcess, change: Change, words: tuple[str, ...]
) -> None:
    raw = sample(place)
    change(raw, place.store)
    key = planted(place, canonical_json(raw), raw)
    answer = nxpipe(*(word.replace("KEY", key) for word in words), "--store", "store")
    assert answer.code == exit_codes.CORRUPT.number, answer.err
    assert re.search(r"cas/sha256/\w\w/\w{64} is corrupt: weights\.0: Value error, (tensor|no tensor)", answer.err)


def test_every_type_that_a_build_stores_has_a_width() -> None:
    assert {kind.value: kind.itemsize for kind in DType}.items() <= WIDTHS.items()


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2**20), (2, 3)])
def test_a_tensor_that_is_right_is_taken_by_the_readers_of_weights(dtype: str, shape: tuple[int, ...]) -> None:
    elements = 1
    for length in shape:
        elements *= length
    blob = Blob.of(bytes(elements * WIDTHS[dtype]))
    head = layout_of([Tensor(name="a", dtype=dtype, shape=shape, blob=blob, pack=None)]).head
    described = json.loads(head[8:])["a"]
    assert described["data_offsets"] == [0, blob.size]
