"""How does a page become a file? Jinja2 escapes every text, and the file says itself that a browser
may fetch nothing and run nothing."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from ibaml._version import __version__
from ibaml.files import write_whole
from ibaml.pages.blocks import Page

if TYPE_CHECKING:
    from jinja2 import Template


@cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    pages = Environment(
        loader=PackageLoader("ibaml.pages"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    return pages.get_template("page.html")


def html(page: Page) -> str:
    """The page as one file of HTML."""
    from markupsafe import Markup

    style = (resources.files("ibaml.pages") / "templates" / "page.css").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    ids = _ids([section.title for section in page.sections])
    return _template().render(
        page=page, sections=list(zip(ids, page.sections, strict=True)), style=Markup(style),
        policy=policy, version=__version__, drawing=Markup,
    )  # fmt: skip


def write_page(page: Page, path: Path) -> Path:
    """Write the page, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # a name on a disk may hold bytes that are no text
    write_whole(path, html(page).encode("utf-8", "replace"))
    return path


def _ids(titles: list[str]) -> list[str]:
    """Addresses of sections: words of their titles, each different."""
    found: list[str] = []
    for at, title in enumerate(titles, start=1):
        word = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:40]
        found.append(word if word and word not in found else f"{word or 'section'}-{at}")
    return found
