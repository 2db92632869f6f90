"""Which thread may use a module? While a network runs, its parameters are replaced and hooks are on
it, so only one thread runs it at a time, and no other thread reads its tensors meanwhile.

A lock is held only while the network itself runs, never during a solve or a backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from threading import Lock, RLock, get_ident
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ibaml.forks import around_forks


class _Locks:
    """A lock for every module. Modules that share a part share a lock. The locks are stored here
    and not in the modules, because those are copied and pickled."""

    def __init__(self) -> None:
        self._making = Lock()
        self._of: WeakKeyDictionary[nn.Module, tuple[Any, ...]] = WeakKeyDictionary()
        self._taken: list[Any] = []

    def take_all(self) -> None:
        """Before this process is forked: wait (a minute at most) until no network runs, so that all
        are whole."""
        until = monotonic() + 60
        while True:
            with self._making:
                locks = self._all()
            self._taken = [
                lock for lock in locks if lock.acquire(timeout=max(0, until - monotonic()))
            ]
            self._making.acquire()  # last, because who runs a network may want it
            if self._all() == locks or monotonic() > until:
                return
            self.give_back()  # meanwhile there are more

    def give_back(self) -> None:
        self._making.release()
        while self._taken:
            self._taken.pop().release()

    def _all(self) -> list[Any]:
        return sorted({lock for locks in self._of.values() for lock in locks}, key=id)

    def of(self, *modules: nn.Module) -> list[Any]:
        """All locks of the modules, in the order in which every thread takes them."""
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
    """Inside, no other thread runs these modules or sees what this one changes."""
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
                    "this learner, or of one that shares its weights: only one thread may train at "
                    "a time. Any number may call adapt and predict; to train in several threads, "
                    "give each a copy.deepcopy of the learner"
                )
            stack.callback(lock.release)
        yield


class Everywhere:
    """A temporary setting of the whole process: the first thread that needs it enters it, and the
    last one leaves it."""

    def __init__(self, setting: Callable[[], AbstractContextManager[Any]]) -> None:
        self._setting = setting
        self._lock = Lock()
        self._inside: Counter[int] = Counter()  # how often each thread is
        self._made = ExitStack()
        _everywhere.append(self)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            if not self._inside:
                self._made.enter_context(self._setting())
            self._inside[get_ident()] += 1
        try:
            yield
        finally:
            with self._lock:
                self._leave(get_ident(), 1)

    def _leave(self, thread: int, times: int) -> None:
        self._inside[thread] -= times
        if not self._inside[thread]:
            del self._inside[thread]
        if not self._inside:
            self._made.close()

    def before_fork(self) -> None:
        self._lock.acquire()

    def after_fork(self, in_child: bool) -> None:
        if in_child:  # no other thread will ever leave
            for thread in set(self._inside) - {get_ident()}:
                self._leave(thread, self._inside[thread])
        self._lock.release()


_everywhere: list[Everywhere] = []


def _before_fork() -> None:
    # a training call of another thread is not waited for: the forked process is refused its own
    _running.take_all()
    for setting in _everywhere:  # who runs a network takes these last
        setting.before_fork()


def _after_fork(in_child: bool) -> None:
    for setting in _everywhere:
        setting.after_fork(in_child)
    _running.give_back()


around_forks(_before_fork, partial(_after_fork, False), partial(_after_fork, True))
