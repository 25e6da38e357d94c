"""`nxpipe ui`: the store as a local web page, or as a static site."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from nxpipe.pipeline.artifacts.store_url import open_configured_store
from nxpipe.pipeline.cli.main import Command
from nxpipe.pipeline.cli.options import config_option, store_option
from nxpipe.pipeline.util.console import Console
from nxpipe.pipeline.util.errors import MissingSoftware

if TYPE_CHECKING:
    from nxpipe.pipeline.ui.site import StoreSite

_PORT: Final = 8770


@click.command(cls=Command)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=_PORT, show_default=True, help="The port; 0: one that is free."
)
@click.option(
    "--export",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write the pages to DIR, a new or empty folder, and serve nothing.",
)
@store_option
@config_option
@click.pass_context
def ui(ctx: click.Context, /, port: int, folder: Path | None, store: str | None, config_path: Path) -> None:
    """Show a store in a browser: artifacts, channels with their history, build reports, rollouts.

    The pages are served on this machine's loopback interface and change nothing; Ctrl-C ends the server. Each page is
    read from the store when it is requested. --export writes the same pages as a static site with relative links, for
    a bucket or GitHub Pages. The pages load nothing from the network.

    \b
    Example:
      nxpipe ui
      nxpipe ui --store s3://my-artifacts/nxpipe --port 8080
      nxpipe ui --export site
    """
    from nxpipe.pipeline.artifacts.channel_log import ChannelView
    from nxpipe.pipeline.ui.site import StoreSite, export

    console: Console = ctx.obj
    _require_libraries(serving=folder is None)
    opened = open_configured_store(store, config_path, console)
    site = StoreSite(ChannelView.of(opened, config_path, console.say))
    if folder is None:
        _serve(site, port, console)
        return
    with console.step(f"write the pages of {opened.url}"):
        count = export(site, folder)
    if console.json:
        console.data({"folder": str(folder), "pages": count, "index": str(folder / "index.html")})
    else:
        console.result(f"{folder / 'index.html'}: {count:,} pages of {opened.url}")


def _require_libraries(*, serving: bool) -> None:
    from importlib.util import find_spec

    for name in ("numpy", *(("starlette", "uvicorn") if serving else ())):
        if find_spec(name) is None:
            raise MissingSoftware(name, "nxpipe ui", "run: pip install 'nxpipe[serve]'")


def _serve(site: "StoreSite", port: int, console: Console) -> None:
    from nxpipe.pipeline.ui.server import PageServer

    def announce(url: str) -> None:
        if console.json:
            console.data_line({"url": url})
        else:
            console.result(url)

    with suppress(KeyboardInterrupt):
        PageServer(site, port, announce).run()
