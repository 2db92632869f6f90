"""Whose turn is it with a module? While a network runs, its parameters are others and hooks are on
it, so one thread runs it at a time, and nobody else looks at its tensors meanwhile.

What is held while a network runs waits for nothing but that network: no solver, no backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import Lock, RLock
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn


class _Locks:
    """A lock for every module. Modules with a part in common have a lock in common; they are kept
    here, not in the modules, which are copied and pickled."""

    def __init__(self) -> None:
        self._making = Lock()
        self._of: WeakKeyDictionary[nn.Module, tuple[Any, ...]] = WeakKeyDictionary()

    def of(self, *modules: nn.Module) -> list[Any]:
        """All locks of the modules, in the one order in which everybody takes them."""
        return sorted({lock for module in modules for lock in self._locks_of(module)}, key=id)

    def _locks_of(self, module: nn.Module) -> tuple[Any, ...]:
        locks = self._of.get(module)
        if locks is None:
            with self._making:
                parts = list(module.modules())
                locks = tuple({lock for part in parts for lock in self._of.get(part, ())})
                locks = locks or (RLock(),)
                for part in parts:
                    self._of.setdefault(part, locks)
        return locks


_running, _training = _Locks(), _Locks()


def held(*modules: nn.Module) -> AbstractContextManager[Any]:
    """Inside, no other thread runs these modules, or sees what this one does to them."""
    locks = _running.of(*modules)
    return locks[0] if len(locks) == 1 else _every(locks)


@contextmanager
def _every(locks: list[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for lock in locks:
            stack.enter_context(lock)
        yield


@contextmanager
def training(model: nn.Module) -> Iterator[None]:
    """Inside, a training call of another thread is refused."""
    with ExitStack() as stack:
        for lock in _training.of(model):
            if not lock.acquire(blocking=False):
                raise RuntimeError(
                    "another thread is inside a training call (learner(batch) or one_meta_step) of "
                    "this learner, or of one that shares its weights: training is one thread at a "
                    "time. adapt and predict may be called from any number; to train in several, "
                    "give each thread a copy.deepcopy of the learner"
                )
            stack.callback(lock.release)
        yield


class Everywhere:
    """A setting of the whole process that is needed for a while: the first thread in makes it, and
    the last one out undoes it."""

    def __init__(self, setting: Callable[[], AbstractContextManager[Any]]) -> None:
        self._setting = setting
        self._lock = Lock()
        self._inside = 0
        self._made = ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._inside:
                self._made.enter_context(self._setting())
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._made.close()
