import subprocess
import sys
from pathlib import Path

import pytest

from nxpipe.artifact_store import open_store
from nxpipe.artifact_store.errors import BadUrl
from nxpipe.artifact_store.url import anchored
from tests.conftest import ROOT


@pytest.mark.parametrize(
    ("url", "folder"),
    [
        ("file:///abs/store", "/abs/store"),
        ("/abs/store", "/abs/store"),
        ("file://.nxpipe/store", "{cwd}/.nxpipe/store"),
        ("file://a b%20c#d", "{cwd}/a b%20c#d"),
        ("store", "{cwd}/store"),
        ("./store", "{cwd}/store"),
        ("file://~/store", "{home}/store"),
        ("~/store", "{home}/store"),
    ],
)
def test_a_folder_may_be_spelled_in_several_ways(
    url: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert open_store(url).url == "file://" + folder.format(cwd=tmp_path, home="/home/somebody")


def test_opening_a_store_creates_nothing(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    store.list()
    store.find("0" * 64)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("url", "opened"),
    [
        ("s3://my-bucket", "s3://my-bucket"),
        ("s3://my-bucket/", "s3://my-bucket"),
        ("s3://my.bucket/a/b/", "s3://my.bucket/a/b"),
    ],
)
def test_a_bucket_may_have_a_prefix(url: str, opened: str) -> None:
    assert open_store(url).url == opened


@pytest.mark.parametrize(
    "url",
    [
        "",
        "file://",
        "file://a\nb",
        "a\0b",
        "http://example.com/x",
        "gs://bucket/x",
        "s3:/bucket",
        "S3://bucket",
        "file:/x",
        "s3://",
        "s3:///prefix",
        "s3://Upper/x",
        "s3://a",
        "s3://bucket/../x",
        "s3://bucket/a//b",
        "s3://bucket/a\nb",
        "~nobody-of-this-name/store",
    ],
)
def test_any_other_url_is_refused_with_the_forms_that_are_allowed(url: str) -> None:
    with pytest.raises(BadUrl, match=r"file:///absolute/path.*s3://bucket/prefix"):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("file://.nxpipe/store", "file:///project/.nxpipe/store"),
        ("store", "file:///project/store"),
        ("file:///abs", "file:///abs"),
        ("s3://my-bucket/p", "s3://my-bucket/p"),
    ],
)
def test_a_relative_folder_can_be_anchored_elsewhere(url: str, expected: str) -> None:
    assert anchored(url, Path("/project")) == expected


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        ("import nxpipe.artifact_store.errors", ("pydantic", "boto3", "botocore")),
        (
            "from nxpipe.artifact_store import open_store; open_store('store').list()",
            ("boto3", "botocore", "numpy", "click"),
        ),
    ],
)
def test_nothing_heavy_is_imported_before_it_is_needed(code: str, heavy: tuple[str, ...]) -> None:
    probe = f"import sys; {code}; print(sorted(set({heavy}) & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


def test_the_room_offers_what_it_says_it_offers() -> None:
    from nxpipe import artifact_store

    for name in artifact_store.__all__:
        assert getattr(artifact_store, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'Sotre'"):
        _ = artifact_store.Sotre
