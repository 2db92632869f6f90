"""How does a matplotlib figure become part of a page, so that it follows the page's colors?

matplotlib's SVG is read and written anew with known elements and attributes alone. Colors become
variables of the page's style sheet, so that one drawing is right in light and in dark. Text stays
text. There is no style, no script, no link and no name of a file in the result.
"""

from __future__ import annotations

import re
from io import BytesIO
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from ibaml.report.figure import NAMES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {**NAMES, "#000000": "ink", "#ffffff": "paper"}
_ELEMENTS = {"g", "path", "text", "tspan", "rect", "use", "defs", "clipPath"}
_ATTRIBUTES = {"d", "x", "y", "width", "height", "transform", "clip-path"}
_STYLES = {
    "fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-dashoffset", "stroke-linecap",
    "stroke-linejoin", "opacity", "fill-opacity", "stroke-opacity", "text-anchor", "font-size",
}  # fmt: skip
_LINK = "{http://www.w3.org/1999/xlink}href"
_SVG = "http://www.w3.org/2000/svg"


def inline_svg(figure: Figure, name: str, label: str) -> str:
    """The figure as an ``<svg>`` element.

    Args:
        name: of the figure, unique on the page: a word of letters, digits and dashes.
        label: what it shows, for readers who do not see it.
    """
    if not re.fullmatch(r"[a-z][a-z0-9-]*", name):
        raise ValueError(f"name must be a word such as loss-1, got {name!r}")
    from matplotlib import rc_context

    drawn = BytesIO()
    figure.patch.set_visible(False)
    for axis in figure.axes:
        axis.patch.set_visible(False)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "svg.image_inline": True}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(drawn.getvalue())
    made = ElementTree.Element(
        "svg", {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": label}
    )
    for child in root:
        _copy(child, made, name)
    return ElementTree.tostring(made, encoding="unicode")


def _copy(source: ElementTree.Element, parent: ElementTree.Element, name: str) -> None:
    namespace, _, tag = source.tag[1:].partition("}")
    if namespace != _SVG or tag not in _ELEMENTS:
        return
    attributes = {n: v for n, v in source.attrib.items() if n in _ATTRIBUTES}
    attributes |= _styles(source.attrib.get("style", ""))
    if tag in ("path", "clipPath") and "id" in source.attrib:  # what others refer to
        attributes["id"] = f"{name}-{source.attrib['id']}"
    if (link := source.attrib.get(_LINK, "")).startswith("#"):
        attributes["href"] = f"#{name}-{link[1:]}"
    if "clip-path" in attributes:
        attributes["clip-path"] = attributes["clip-path"].replace("url(#", f"url(#{name}-")
    made = ElementTree.SubElement(parent, tag, attributes)
    made.text = source.text if source.text and source.text.strip() else None
    for child in source:
        _copy(child, made, name)


def _styles(text: str) -> dict[str, str]:
    """The properties of a style as attributes; the colors as variables."""
    found: dict[str, str] = {}
    for part in text.split(";"):
        key, _, value = (word.strip() for word in part.partition(":"))
        if key == "font":  # "9px 'DejaVu Sans'": the page has its own font
            key, value = "font-size", value.split("px")[0] + "px"
        if key in _STYLES:
            found[key] = f"var(--{_COLORS[value]})" if value in _COLORS else value
    return found
