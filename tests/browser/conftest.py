"""What does a page look like, say and do in a real browser? In Debian's Chromium, by Playwright.

`make test-browser` runs these tests; `make test` does not collect them. Every page that `visit`
opens is watched: a test fails if the console has an error, or if a request leaves the machine.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import (
    Browser,
    BrowserContext,
    Page,
    Request,
    Route,
    expect,
    sync_playwright,
)

SHOTS = Path(__file__).parent.parent.parent / "runs" / "browser"  # ignored by git
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
SCHEMES = ("light", "dark")
HERE = ("127.0.0.1", "localhost")
expect.set_options(timeout=15_000)  # the machine may be busy
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@dataclass
class Watched:
    """A page, what its console said, and what it asked for.

    >>> seen = visit("http://127.0.0.1:8000/", size="phone", scheme="dark")       # doctest: +SKIP
    >>> seen.page.get_by_role("button", name="Save").click()                      # doctest: +SKIP
    >>> seen.check_accessible()                                                   # doctest: +SKIP
    >>> seen.shoot("report")               # runs/browser/report-phone-dark.png     doctest: +SKIP
    """

    page: Page
    context: BrowserContext
    look: str
    home: str  # the address that was visited: of a file, nothing else may be read
    errors: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)  # patterns of errors that a test provokes

    def guard(self, route: Route, request: Request) -> None:
        if stays(request.url, self.home):
            route.continue_()
        else:
            self.left.append(request.url)
            route.abort()

    def check(self) -> None:
        """No error in the console, and no request left the machine."""
        wrong = [e for e in self.errors if not any(re.search(p, e) for p in self.expected)]
        assert not self.left, f"requests left the machine: {self.left}"
        assert not wrong, f"the console has errors: {wrong}"

    def check_accessible(self) -> None:
        """axe-core finds no serious or critical fault in the page as it is now."""
        found = Axe().run(self.page).response["violations"]
        grave = [
            f"{v['id']} ({v['impact']}): {v['help']}: "
            + "; ".join(f"{n['target']} {n['html'][:160]}" for n in v["nodes"][:5])
            for v in found
            if v["impact"] in ("serious", "critical")
        ]
        assert not grave, "\n".join(grave)

    def check_fits(self) -> None:
        """Nothing sticks out to the right: a phone shows the page without scrolling sideways."""
        wide = self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert wide <= 0, f"the page is {wide} pixels wider than the window"

    def shoot(self, name: str, *, whole: bool = True) -> Path:
        """A screenshot in runs/browser/."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        path = SHOTS / f"{name}-{self.look}.png"
        self.page.screenshot(path=path, full_page=whole)
        return path


def stays(url: str, home: str) -> bool:
    """Whether a request stays on the machine, and for a file in the file."""
    parts = urlsplit(url)
    if parts.scheme in ("data", "blob", "about"):
        return True
    if urlsplit(home).scheme == "file":
        return url.split("#")[0] == home.split("#")[0]
    return parts.scheme in ("http", "ws") and parts.hostname in HERE


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.exit(
            "no Chromium is installed: apt-get install chromium, or name one by CHROMIUM=/path",
            returncode=1,
        )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path,
            # a name that is resolved is a request that leaves, also where no page asked for it
            args=["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"],
        )
        yield browser
        browser.close()


Visit = Callable[..., Watched]


@pytest.fixture
def visit(chromium: Browser) -> Iterator[Visit]:
    """Opens an address or a file in a fresh, watched window; checked when the test ends."""
    open_pages: list[Watched] = []

    def opened(
        address: str | Path, *, size: str = "desktop", scheme: str = "light", scripts: bool = True
    ) -> Watched:
        home = address.resolve().as_uri() if isinstance(address, Path) else address
        width, height = SIZES[size]
        context = chromium.new_context(
            viewport={"width": width, "height": height},
            color_scheme=scheme,  # type: ignore[arg-type]
            has_touch=size == "phone",
            is_mobile=size == "phone",
            device_scale_factor=2 if size == "phone" else 1,
            reduced_motion="reduce",
            java_script_enabled=scripts,
            accept_downloads=True,
        )
        page = context.new_page()
        page.set_default_timeout(15_000)
        seen = Watched(page, context, f"{size}-{scheme}", home)
        context.route("**/*", seen.guard)
        page.on("console", lambda m: seen.errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: seen.errors.append(str(error)))
        open_pages.append(seen)
        page.goto(home)
        return seen

    yield opened
    for seen in open_pages:
        seen.context.close()
    for seen in open_pages:
        seen.check()


@pytest.fixture(params=[(size, scheme) for size in SIZES for scheme in SCHEMES], ids="-".join)
def look(request: pytest.FixtureRequest) -> dict[str, str]:
    """Every size and scheme in turn, for `visit(address, **look)`."""
    size, scheme = request.param
    return {"size": size, "scheme": scheme}
