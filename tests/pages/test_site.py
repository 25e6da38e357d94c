"""`nxpipe ui`: exported pages are those that are served; only loopback names are answered, and nothing is changed."""

import http.client
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nxpipe.artifact_store import open_store
from nxpipe.pipeline.ui.server import PageServer
from nxpipe.pipeline.ui.site import export
from nxpipe.pipeline.util.exit_codes import OK
from tests.artifact_store.samples import tree
from tests.pages.samples import fill, links, site_of
from tests.pipeline.in_process import InProcess, nxpipe

__all__ = ["nxpipe"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store, and the export of its site."""
    folder = tmp_path_factory.mktemp("site")
    export(site_of(folder / "store"), folder / "pages")
    return folder


@pytest.fixture(scope="module")
def port(folder: Path) -> Iterator[int]:
    """The port of a server of the store."""
    from nxpipe.pipeline.artifacts.channel_log import ChannelView
    from nxpipe.pipeline.ui.site import StoreSite

    urls: list[str] = []
    view = ChannelView.of(open_store(str(folder / "store")), folder / "store/nxpipe.toml", lambda _: None)
    server = PageServer(StoreSite(view), 0, urls.append)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not urls and thread.is_alive():
        time.sleep(0.01)
    yield int(urls[0].rpartition(":")[2].strip("/"))
    server.should_exit = True
    thread.join()


def asked(port: int, path: str, method: str = "GET", host: str | None = None) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{port}")
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, dict(answer.getheaders())


def test_every_link_of_the_exported_site_resolves_and_leaves_it_nowhere(folder: Path) -> None:
    pages = folder / "pages"
    found = list(links(pages))
    assert len(found) > 50
    for path, link in found:
        target, _, anchor = link.partition("#")
        assert ":" not in target
        assert not target.startswith("/")
        linked = (path.parent / target).resolve() if target else path
        assert linked.is_relative_to(pages.resolve()), (path, link)
        assert linked.is_file(), (path, link)
        if anchor:
            assert f'id="{anchor}"' in linked.read_text(), (path, link)


def test_the_site_has_each_artifact_channel_report_and_rollout_and_the_overview_leads_to_all(folder: Path) -> None:
    pages = folder / "pages"
    store = open_store(str(folder / "store"))
    names = {path.relative_to(pages).as_posix() for path in pages.rglob("*.html")}
    assert {f"artifacts/{artifact.request_key}.html" for artifact in store.list()} <= names
    assert {"channels/production.html", "rollouts/search/good-1.html", "rollouts/search/bad-2.html"} <= names
    assert sum(name.startswith("reports/") for name in names) == 3
    reached, todo = set(), [pages / "index.html"]
    linked = {path: [(path.parent / link.partition("#")[0]).resolve() for each, link in links(pages) if each == path
                     and link.partition("#")[0]] for path in pages.rglob("*.html")}  # fmt: skip
    while todo:
        path = todo.pop()
        if path not in reached:
            reached.add(path)
            todo += linked[path]
    assert {path.relative_to(pages).as_posix() for path in reached} == names


def test_only_a_report_of_another_version_cannot_be_shown(folder: Path) -> None:
    broken = [path for path in (folder / "pages").rglob("*.html") if "This cannot be shown" in path.read_text()]
    assert [path.parent.name for path in broken] == ["reports"]
    assert all("alert(1)</script>" not in path.read_text() for path in (folder / "pages").rglob("*.html"))


def test_served_pages_are_the_exported_ones(folder: Path, port: int) -> None:
    for path in sorted((folder / "pages").rglob("*.html")):
        name = path.relative_to(folder / "pages").as_posix()
        status, body, headers = asked(port, f"/{name}")
        assert (status, body) == (200, path.read_bytes()), name
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    status, _, headers = asked(port, "/artifacts/")
    assert (status, headers["location"]) == (307, "/artifacts/index.html")


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "127.0.0.1@evil.example", "10.0.0.1", "localhost:x"]
)
def test_a_name_that_is_not_of_loopback_is_not_answered(port: int, host: str) -> None:
    status, body, _ = asked(port, "/index.html", host=host)
    assert status == 421
    assert b"<html" not in body


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1", "[::1]:8770"])
def test_each_name_of_loopback_is_answered(port: int, host: str) -> None:
    assert asked(port, "/index.html", host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_but_reading_is_allowed(folder: Path, port: int, method: str) -> None:
    before = tree(folder / "store")
    assert asked(port, "/index.html", method)[0] == 405
    assert tree(folder / "store") == before


def test_head_has_the_headers_of_a_page_without_its_body(port: int) -> None:
    status, body, headers = asked(port, "/index.html", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["content-length"]) > 1000


@pytest.mark.parametrize(
    "path",
    [
        "/../store/nxpipe.toml", "/..%2f..%2fetc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/index.html/..",
        "/artifacts/../index.html", "/channels/../../x.html", "/channels/absent.html", "/reports/x.html",
        "/rollouts/search/..html", "/artifacts/%00.html", "/cas/sha256/", "/index", "/channels/production.html/",
    ],
)  # fmt: skip
def test_an_address_that_is_no_page_has_none(port: int, path: str) -> None:
    status, body, _ = asked(port, path)
    assert status == 404
    assert body == b"there is no such page"


def test_an_export_is_whole_or_nothing_and_overwrites_nothing(nxpipe: InProcess, tmp_path: Path) -> None:
    store = tmp_path / "store"
    fill(open_store(str(store)))
    before = tree(store)
    words = ("ui", "--store", str(store), "--export")
    answer = nxpipe(*words, str(tmp_path / "site"))
    assert answer.code == OK.number, answer.err
    assert answer.out == f"{tmp_path / 'site/index.html'}: 12 pages of {store.as_uri()}\n"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/index.html").write_text("mine")
    refused = nxpipe(*words, str(tmp_path / "mine"))
    assert (refused.code, "is not an empty folder" in refused.err) == (5, True)
    assert (tmp_path / "mine/index.html").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "site", "store"]
    assert tree(store) == before


def test_a_store_without_artifacts_has_a_site_that_says_what_to_run(nxpipe: InProcess, tmp_path: Path) -> None:
    answer = nxpipe("ui", "--store", str(tmp_path / "store"), "--export", str(tmp_path / "site"))
    assert answer.code == OK.number, answer.err
    assert "nxpipe build publishes one" in (tmp_path / "site/artifacts/index.html").read_text()
