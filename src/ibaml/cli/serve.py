"""``ibaml serve``: how does a person try it in a browser?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ibaml.cli.screen import errors_as_sentences, say
from ibaml.words import PRETRAINED

if TYPE_CHECKING:
    from ibaml.answers import Classifier
    from ibaml.tasks.embedding import Embed

PORT = 8731

_HELP = """Try it in a browser: drop photographs, see the answers.

    Opens a page on this machine, for nobody else: nothing leaves it. Open the
    printed address, token included. CLASSIFIER is a file that the page or
    `ibaml predict --save` wrote; without one you begin with no classes. Ctrl-C
    ends it; what you do not save is gone.

    Examples:

    ibaml serve

    ibaml serve shop.ibaml

    It comes with pip install "ibaml\\[serve]". See docs/serve.md."""


def command(app: typer.Typer) -> None:
    """Add the command."""
    app.command("serve", help=_HELP)(_serve)


def _serve(
    classifier: Annotated[Path | None, typer.Argument(help="A saved classifier.")] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of the address; 0 takes a free one.")
    ] = PORT,
    prior: Annotated[
        str | None,
        typer.Option(
            help="What is known of classes before, as in `ibaml predict`.", show_default="photos"
        ),
    ] = None,
    backbone: Annotated[
        str | None,
        typer.Option(
            help=f"The network for photographs: {' or '.join(PRETRAINED)}.",
            show_default=PRETRAINED[0],
        ),
    ] = None,
    false_alarms: Annotated[
        float,
        typer.Option(min=0, max=0.99, help="Share of known photographs that may be unknown."),
    ] = 0.05,
) -> None:
    with errors_as_sentences():
        from ibaml.extras import need

        need("starlette")
        need("uvicorn")
        from ibaml.machine import threads
        from ibaml.serve.reading import Reading
        from ibaml.serve.server import Page
        from ibaml.serve.session import Session

        shop, embed = _begun(classifier, prior, backbone)
        reading = Reading(embed)
        session = Session(shop, reading, false_alarms=false_alarms)
        page = Page(session, port, at_once=reading.at_once)
        with reading, threads(1):  # several photographs are read at once, and heads are small
            say(f"Open {page.address}")
            say("It is for this machine alone. Ctrl-C ends it.")
            page.run()
    say(f"Stopped{'; the last changes were not saved' if session.unsaved else ''}.")


def _begun(path: Path | None, prior: str | None, backbone: str | None) -> tuple[Classifier, Embed]:
    """The classifier to begin with, and the network of its photographs."""
    from ibaml.answers import Classifier
    from ibaml.cli.predict import known
    from ibaml.tasks.embedding import Embed

    if path is None:
        embed = Embed(backbone or PRETRAINED[0])
        source = {"kind": "pictures", "embed": embed.described()}
        return Classifier(**known(source, prior), source=source), embed
    if prior is not None or backbone is not None:
        raise ValueError(f"{path} has its prior and its network: leave out --prior and --backbone")
    shop = Classifier.load(path)
    if shop.source.get("kind") != "pictures":
        raise ValueError(
            f"{path} holds vectors or a table's rows, and the page is for photographs: use "
            "`ibaml predict`"
        )
    embed = Embed.read(shop.source.get("embed"))
    if shop.x.shape[1] != embed.features:
        raise ValueError(f"{path} is damaged: its vectors are not of the network that it names")
    return shop, embed
