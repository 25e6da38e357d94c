"""NEFF files: what is in a container is read without a device, and a damaged one is refused in a sentence."""

import gzip
import io
import json
import subprocess
import sys
import tarfile
import tracemalloc
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nxpipe.emulator.errors import NeffInvalid
from nxpipe.emulator.executable import neff
from nxpipe.emulator.executable.neff import HEADER, Neff, NeffVariable, open_neff, read_neff
from tests.neuronx.neff_files import Variable, archive, container, members

VARIABLES = [
    Variable("y", "output", 64),
    Variable("cache.must_alias_input", "input", 256),
    Variable("cache", "output", 256),
    Variable("x", "input", 32),
    Variable("scratch", "virtual", 4096),
]
UUID_OF_BUILD = UUID(int=7)


def read(data: bytes) -> Neff:
    return read_neff(io.BytesIO(data))


def whole(*, is_compressed: bool = True, subgraphs: int = 1, tar_format: int = tarfile.GNU_FORMAT) -> bytes:
    body = archive(members(VARIABLES, subgraphs=subgraphs), is_compressed=is_compressed, tar_format=tar_format)
    return container(body, name="build/file.neff", lnc=subgraphs, uuid=UUID_OF_BUILD)


@pytest.mark.parametrize("is_compressed", [True, False])
@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_variables_that_a_caller_binds_are_read(is_compressed: bool, tar_format: int) -> None:
    found = read(whole(is_compressed=is_compressed, tar_format=tar_format))
    assert found.inputs == (NeffVariable("cache.must_alias_input", 256, "input"), NeffVariable("x", 32, "input"))
    assert found.outputs == (NeffVariable("cache", 256, "output"), NeffVariable("y", 64, "output"))
    assert [each.tensor for each in found.inputs] == ["cache", "x"]


def test_the_header_is_read() -> None:
    header = read(whole(subgraphs=2)).header
    assert (header.version, header.name, header.uuid) == ((2, 0), "build/file.neff", UUID_OF_BUILD)
    assert header.build_version.startswith("2.27.")
    assert (header.tpb_count, header.requested_tpb_count, header.tpb_per_node[0], header.lnc_size) == (2, 2, 2, 2)


def test_two_cores_of_a_logical_one_have_one_interface() -> None:
    found = read(whole(subgraphs=2))
    assert [each.name for each in found.subgraphs] == ["sg00", "sg01"]
    assert found.inputs == read(whole()).inputs
    assert found.info["version"].startswith("2.27.")


@pytest.mark.parametrize(("subgraphs", "stated", "cores"), [(1, 0, 1), (2, 0, 2), (2, 2, 2), (1, 2, 2)])
def test_the_physical_cores_are_those_of_the_header_else_one_for_each_subgraph(
    subgraphs: int, stated: int, cores: int
) -> None:
    found = read(container(archive(members(VARIABLES, subgraphs=subgraphs)), lnc=stated))
    assert found.physical_cores == cores


def test_subgraphs_that_disagree_on_a_size_are_read_and_their_interface_is_refused() -> None:
    files = members(VARIABLES, subgraphs=2)
    other = [Variable(each.name, each.kind, each.nbytes + 4) for each in VARIABLES]
    files["sg01/def.json"] = members(other)["sg00/def.json"]
    found = read(container(archive(files)))
    assert len(found.subgraphs) == 2
    with pytest.raises(NeffInvalid, match=r"the subgraphs give input .* different sizes"):
        _ = found.inputs


def test_members_with_long_names_and_of_any_size_are_skipped() -> None:
    extra = {f"debug_info/{'deep/' * 40}trace.bin": b"\1" * 3_000_000, "empty.bin": b""}
    for tar_format in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        files = {**extra, **members(VARIABLES)}
        assert read(container(archive(files, tar_format=tar_format))).outputs == read(whole()).outputs


def test_a_file_is_read_by_its_path_and_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file.neff").write_bytes(whole())
    assert open_neff(tmp_path / "file.neff").inputs == read(whole()).inputs
    with pytest.raises(OSError, match="directory"):
        open_neff(tmp_path)


def _changed(**documents: Any) -> bytes:
    names = {"kelf": "kelf-0.json", "definition": "sg00/def.json"}
    files = members(VARIABLES)
    files |= {
        names[name]: value if isinstance(value, bytes) else json.dumps(value).encode()
        for name, value in documents.items()
    }
    return container(archive(files))


def _variable(**fields: Any) -> bytes:
    return _changed(definition={"var": {"x": fields}})


def _of_kind(kind: bytes) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        member = tarfile.TarInfo("sg00/def.json")
        member.type, member.linkname = kind, "/etc/passwd"
        tar.addfile(member)
    return container(packed.getvalue())


REFUSED = {
    "empty": (b"", "it ends after 0 bytes, within its header of 1024"),
    "half a header": (whole()[:500], "it ends after 500 bytes"),
    "zeros": (bytes(2000), "its header says that it has 0 bytes"),
    "a large header": (bytes(8) + (1 << 40).to_bytes(8, "little") + whole()[16:], "1099511627776 bytes"),
    "no archive": (whole()[: HEADER.size], "no kelf-0.json"),
    "half an archive": (whole()[:-100], "truncated"),
    "half a plain archive": (whole(is_compressed=False)[:2300], "truncated"),
    "another checksum": (whole()[:-8] + bytes(8), "damaged"),
    "noise": (whole()[: HEADER.size] + b"\x1f\x8b" + b"noise" * 100, "damaged"),
    "text": (whole()[: HEADER.size] + b"text" * 1000, "damaged member"),
    "no index": (container(archive({"sg00/def.json": b"{}"})), "no kelf-0.json with a list of graphs"),
    "an index without graphs": (_changed(kelf={"graphs": []}), "no kelf-0.json with a list of graphs"),
    "a graph without a name": (
        _changed(kelf={"graphs": [{"definition": "sg00/def.json"}]}),
        "no name or no definition",
    ),
    "a graph elsewhere": (_changed(kelf={"graphs": [{"name": "a", "definition": "../x"}]}), "no variables in '../x'"),
    "an index that is no JSON": (_changed(kelf=b"{"), "'kelf-0.json' is no JSON document"),
    "deep JSON": (_changed(definition=b"[" * 100_000), "'sg00/def.json' is no JSON document"),
    "long numbers": (_changed(definition=b"1" * 100_000), "'sg00/def.json' is no JSON document"),
    "variables in a list": (_changed(definition={"var": []}), "no variables"),
    "a variable without a type": (_variable(size=4), "'x' of subgraph 'sg00' has no type"),
    "a size in text": (_variable(type="input", size="4"), "input 'x' of subgraph 'sg00' has no size"),
    "a negative size": (_variable(type="output", size=-4), "output 'x' of subgraph 'sg00' has no size"),
    "a size of true": (_variable(type="output", size=True), "has no size"),
    "a link": (_of_kind(tarfile.SYMTYPE), "a member of kind b'2'"),
    "a device": (_of_kind(tarfile.CHRTYPE), "a member of kind b'3'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_neff_is_refused_in_a_sentence_that_says_why(name: str) -> None:
    data, reason = REFUSED[name]
    with pytest.raises(NeffInvalid) as refused:
        read(data)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_document_that_occurs_twice_is_refused() -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for _ in range(2):
            tar.addfile(tarfile.TarInfo("kelf-0.json"), io.BytesIO())
    with pytest.raises(NeffInvalid, match=r"no JSON|twice"):
        read(container(packed.getvalue()))


def test_a_long_document_an_endless_archive_and_many_members_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = whole(is_compressed=False)
    for name, value, reason in (
        ("MAX_DOCUMENT", 10, "has 57 bytes"),
        ("MAX_BODY", 600, "archive has"),
        ("MAX_MEMBERS", 2, "more than 2 members"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(neff, name, value)
            with pytest.raises(NeffInvalid, match=reason):
                read(data)


def test_memory_does_not_depend_on_how_well_an_archive_is_compressed() -> None:
    """32 MB of zeros in 33 kB."""
    files = {"zeros.bin": bytes(32 << 20), **members(VARIABLES)}
    data = container(archive(files))
    del files
    assert len(data) < 50_000
    tracemalloc.start()
    assert read(data).inputs == read(whole()).inputs
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


@given(st.booleans(), st.data())
def test_a_changed_container_is_read_or_refused_in_a_sentence(is_compressed: bool, data: st.DataObject) -> None:
    damaged = bytearray(whole(is_compressed=is_compressed, subgraphs=2))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, max(0, len(damaged) - 1)))
        length = data.draw(st.integers(1, 600))
        match data.draw(st.sampled_from(["byte", "cut", "zero", "repeat", "end"])):
            case "byte":
                damaged[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
            case "cut":
                del damaged[at : at + length]
            case "zero":
                damaged[at : at + length] = bytes(len(damaged[at : at + length]))
            case "repeat":
                damaged[at:at] = damaged[at : at + length]
            case "end":
                del damaged[at:]
    _read_or_refused(bytes(damaged))


@given(st.data())
def test_a_changed_document_is_read_or_refused_in_a_sentence(data: st.DataObject) -> None:
    """Damage within the archive, which its checksums would catch otherwise."""
    files = members(VARIABLES)
    name = data.draw(st.sampled_from(["kelf-0.json", "sg00/def.json", "info.json"]))
    text = bytearray(files[name])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 3))] = data.draw(
            st.sampled_from([b"", b"{", b"[]", b'"', b"-1", b"\xff"])
        )
        text = text or bytearray(b" ")
    _read_or_refused(container(archive(files | {name: bytes(text)})))


def _read_or_refused(data: bytes) -> None:
    try:
        found = read(data)
        assert all(each.nbytes >= 0 for each in (*found.inputs, *found.outputs))
    except NeffInvalid as refused:
        sentence = str(refused)
    else:
        return
    assert "\n" not in sentence


def test_the_reader_needs_the_standard_library_only() -> None:
    code = (
        "import sys; import nxpipe.emulator.executable.neff, nxpipe.emulator.hlo.constraints, "
        "nxpipe.emulator.hlo.canonical\n"
        "assert not {'numpy', 'ml_dtypes', 'torch', 'jaxlib', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_gzip_of_nothing_is_an_archive_without_an_index() -> None:
    with pytest.raises(NeffInvalid, match=r"no kelf-0\.json"):
        read(container(gzip.compress(b"")))
