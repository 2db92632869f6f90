"""Do the links inside a built site hold?

    python release/links.py build/site

Every href and src of every page that stays in the site leads to a file, and its fragment to an id
in it. Nothing is fetched.
"""

from __future__ import annotations

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links and the ids of one page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.ids.add(value)
            if name in ("href", "src") and value:
                self.links.append(value)


def broken(site: Path) -> list[str]:
    """Sentences about links that lead nowhere."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    if not pages:
        return [f"{site} holds no page"]
    wrong = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not there.is_file():
                wrong.append(f"{path.relative_to(site.resolve())}: {link} leads to no file")
            elif there in pages and unquote(parts.fragment) not in {"", *pages[there].ids}:
                wrong.append(f"{path.relative_to(site.resolve())}: {link} leads to no place")
    return wrong


if __name__ == "__main__":
    problems = broken(Path(sys.argv[1]))
    print("\n".join(problems) or "every internal link holds")
    sys.exit(bool(problems))
