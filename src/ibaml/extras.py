"""Which library does a feature need that may not be installed, and what installs it?

The core needs torch and numpy. Everything else is asked for here, so that what is missing is said
in one sentence with the line that mends it.
"""

from __future__ import annotations

from importlib import import_module

# what each library is for, and the name of its extra in pyproject.toml; None: a dependency of the
# package itself, which is missing only where the package was installed without its dependencies
_USES: dict[str, tuple[str, str | None]] = {
    "matplotlib": ("pictures", "plots"),
    "tensorboard": ("TensorBoard files", "tensorboard"),
    "fontTools": ("glyphs", "glyphs"),
    "scipy": ("95 % intervals", None),
    "PIL": ("images", None),
    "safetensors": ("saved files", None),
    "filelock": ("run folders", None),
    "tomli_w": ("run folders", None),
    "jinja2": ("pages", None),
}
_PACKAGES = {"fontTools": "fonttools", "PIL": "pillow", "tomli_w": "tomli-w"}


class MissingLibrary(ModuleNotFoundError):
    """A library that a feature needs is not installed; the message says how to install it."""


def need(library: str, what: str | None = None, extra: str | None = None) -> None:
    """Refuse with a sentence where a library cannot be imported.

    Args:
        library: its name in an import.
        what: what it is needed for, unless it is what the library is usually for.
        extra: the extra that installs it, unless it is the library's own.
    """
    if (sentence := missing(library, what, extra)) is not None:
        raise MissingLibrary(sentence, name=library)


def missing(library: str, what: str | None = None, extra: str | None = None) -> str | None:
    """What is missing and how to install it, None where the library is there.

    >>> missing("numpy") is None
    True
    """
    try:
        import_module(library)
    except ImportError as error:
        usual, own = _USES[library]
        package = _PACKAGES.get(library, library)
        named = extra or own
        line = f'"ibaml[{named}]"' if named else package
        why = "is not installed"
        if not isinstance(error, ModuleNotFoundError):
            why = f"cannot be imported ({error})"
        return f"{what or usual} need {package}, which {why}: pip install {line}"
    return None
