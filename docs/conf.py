"""The site: `make site` builds it from these pages, and fails at a broken link or anchor.

Pages are read on GitHub as well, so they are plain Markdown. A link that leaves this folder leads to the source of the
repository, at the commit that is built.
"""

import os
import re
from pathlib import Path
from typing import Any

from pygments.lexers.special import TextLexer

HERE = Path(__file__).parent
_SERVER = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
_REPOSITORY = os.environ.get("GITHUB_REPOSITORY", "OWNER/nxpipe")
SOURCE = f"{_SERVER}/{_REPOSITORY}/blob/{os.environ.get('GITHUB_SHA', 'main')}"

project = "nxpipe"
html_title = "nxpipe"
extensions = ["myst_parser"]
exclude_patterns = ["_site"]
html_theme = "furo"
html_theme_options = {
    "source_repository": f"{_SERVER}/{_REPOSITORY}",
    "source_branch": "main",
    "source_directory": "docs/",
}
html_copy_source = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
myst_heading_anchors = 5
myst_enable_extensions = ["colon_fence"]
highlight_language = "text"
nitpicky = True


def links_to_sources(app: Any, name: str, content: list[str]) -> None:
    """Replace links out of this folder; one that leads nowhere ends the build."""
    folder = (HERE / name).parent

    def replaced(match: re.Match[str]) -> str:
        target, anchor = match[1], match[2] or ""
        path = (folder / target).resolve()
        if path.is_relative_to(HERE) and path.is_file():
            return match[0]
        if not path.exists():
            raise ValueError(f"{name}.md: the link {target} leads nowhere")
        return f"]({SOURCE}/{path.relative_to(HERE.parent)}{anchor})"

    content[0] = re.sub(r"\]\(([^)#:\s]+)(#[^)]*)?\)", replaced, content[0])


def setup(app: Any) -> None:
    app.add_lexer("nxasm", TextLexer)  # the text form of programs, docs/reference/isa.md
    app.connect("source-read", links_to_sources)
