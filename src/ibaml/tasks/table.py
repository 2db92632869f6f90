"""How does a table become tasks? Each task is some of its rows; tasks differ in size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from ibaml.seeding import mix
from ibaml.tasks.batch import TaskBatch
from ibaml.tasks.dataset import constant, group, split_by_file, split_by_hash
from ibaml.tasks.errors import DataError
from ibaml.tasks.numbers import Numbers
from ibaml.tasks.rows import read_rows


@dataclass(frozen=True)
class Table:
    """Regression tasks from a table: features (N, D) and targets (N,), grouped by task.

    Features and target are standardized with the moments of the training tasks (``center`` and
    ``spread``, with the target's last). ``features`` and ``target`` are the names of their columns.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    labels: np.ndarray
    tasks: tuple[str, ...]
    splits: dict[str, tuple[int, ...]]
    center: np.ndarray
    spread: np.ndarray
    target: str
    features: tuple[str, ...] = ()

    @classmethod
    def read(
        cls,
        path: str | Path,
        *,
        task: str,
        features: Sequence[str],
        target: str,
        splits: str | Path | None = None,
    ) -> Table:
        """Read a CSV or TSV with a header.

        ``splits`` is a JSON file ``{"train": [task, …], "val": […], "test": […]}``. Without it,
        tasks are split 64 : 16 : 20 by a hash of their name.

        >>> Table.read("gapminder.tsv", task="country", features=["year"],
        ...            target="lifeExp")                                   # doctest: +SKIP
        """
        path = Path(path)
        if not features:
            raise DataError("features: name at least one column")
        columns = (*features, target)
        rows = read_rows(path, (task, *columns))
        values = np.empty((len(rows), len(columns)))
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                try:
                    values[i, j] = float(row[column])
                except ValueError:
                    raise DataError(
                        f"{path}, line {i + 2}: {column} is {row[column]!r}, which is not a number"
                    ) from None
        if not np.isfinite(values).all():
            line = int(np.argwhere(~np.isfinite(values))[0][0]) + 2
            raise DataError(f"{path}, line {line}: a value is not finite")
        order, labels, tasks = group([row[task] for row in rows])
        values = values[order]
        chosen = split_by_hash(tasks) if splits is None else split_by_file(Path(splits), tasks)
        placed = sorted(t for members in chosen.values() for t in members)
        for one, other in pairwise(placed):
            if one == other:
                raise DataError(
                    f"{splits}: {tasks[one]!r} is in two splits: test tasks must be new"
                )
        known = values[np.isin(labels, chosen.get("train") or range(len(tasks)))]
        center = known.mean(0)
        spread = np.where(constant(known, known.dtype), 1.0, known.std(0))
        scaled = (values - center) / spread
        return cls(
            path.stem, scaled[:, :-1], scaled[:, -1], labels, tasks, chosen, center, spread, target,
            tuple(features),
        )  # fmt: skip

    def batches(
        self,
        split: str,
        keys: Sequence[int],
        support: int,
        *,
        query: int | None = None,
        first_rows: bool = False,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> list[TaskBatch]:
        """One task per key: ``support`` random rows, and the rest (or ``query`` of it) to test on.

        ``first_rows`` takes them in the order of the first feature instead: the first ``support``
        rows, and the later ones (or the next ``query``). Equal values keep the order of the file.
        Tasks of different sizes come in separate batches, one per size. A task is a pure function
        of (seed, split, key).
        """
        if support < 1 or (query is not None and query < 1):
            raise DataError(f"support and query must be 1 or more, got {support}, {query}")
        by_size: dict[int, list[tuple[int, np.ndarray]]] = {}
        for key, t, numbers in self._draw(split, keys, support, query, seed):
            begin, end = self._starts[t : t + 2]
            if first_rows:
                rows = begin + np.argsort(self.x[begin:end, 0], kind="stable")
            else:
                total = int(end - begin)
                rows = begin + numbers.sample(total, total)
            rows = rows[: support + query] if query else rows
            by_size.setdefault(len(rows), []).append((key, rows))
        result = []
        for _, tasks in sorted(by_size.items()):
            index = np.stack([rows for _, rows in tasks])
            x = torch.from_numpy(self.x[index]).to(dtype)
            y = torch.from_numpy(self.y[index]).to(dtype)
            result.append(
                TaskBatch(
                    x[:, :support], y[:, :support], x[:, support:], y[:, support:],
                    keys=[key for key, _ in tasks],
                )
            )  # fmt: skip
        return result

    def drawn(
        self,
        split: str,
        keys: Sequence[int],
        support: int,
        *,
        query: int | None = None,
        seed: int = 0,
    ) -> tuple[str, ...]:
        """The names of the tasks that `batches` draws for these keys; keys may share a task."""
        return tuple(self.tasks[t] for _, t, _ in self._draw(split, keys, support, query, seed))

    @cached_property
    def _starts(self) -> np.ndarray:
        """The row where each task begins, and the end of the last task."""
        return np.searchsorted(self.labels, np.arange(len(self.tasks) + 1))

    def _draw(
        self, split: str, keys: Sequence[int], support: int, query: int | None, seed: int
    ) -> Iterator[tuple[int, int, Numbers]]:
        """Each key, the task it draws, and the random numbers that draw its rows."""
        if not self.splits.get(split):
            raise DataError(f"{self.name} has no tasks in split {split!r}")
        sizes = np.diff(self._starts)
        members = [t for t in self.splits[split] if sizes[t] >= support + (query or 1)]
        if not members:
            raise DataError(
                f"{self.name}, split {split!r}: no task has {support} + {query or 1} rows; lower "
                "support (shots)"
            )
        for key in keys:
            numbers = Numbers(mix(seed, 11, *split.encode(), int(key)))
            yield int(key), members[int(numbers.sample(len(members), 1)[0])], numbers
