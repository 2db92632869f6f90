"""How does a package offer names without importing the modules that define them?"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazily(
    package: str, homes: Mapping[str, Sequence[str]], modules: Sequence[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__`` (PEP 562): a name is imported when it is first
    asked for.

    Args:
        package: the package's ``__name__``.
        homes: the modules inside it, and which names each defines.
        modules: the modules inside it that are offered under their own names.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name in modules:
            return import_module(f"{package}.{name}")
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{home_of[name]}"), name)
        setattr(sys.modules[package], name, value)  # the next access finds it directly
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of, *modules})

    return __getattr__, __dir__
