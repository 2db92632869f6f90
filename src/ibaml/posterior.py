"""What does the user hold after adaptation? The posterior over a task's weights, which predicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ibaml.arguments import check_count
from ibaml.energy import (
    NoiseKind,
    Stream,
    TaskEnergy,
    detached,
    draw_noise,
    gaussian_nll,
)
from ibaml.execution import NormStats, held, support_statistics, watch_moments
from ibaml.heads.class_means import ClassDirections
from ibaml.heads.points import PREDICTION_POINTS, gaussian_points, place_first
from ibaml.labels import as_tensor, decoded, encoded
from ibaml.seeding import draw_seed
from ibaml.solve import Solution
from ibaml.tasks import Inputs
from ibaml.weights import head_module

if TYPE_CHECKING:
    from ibaml.learner import MetaLearner

_ENTRIES = 2**23  # at most this many outputs at a time, 32 MB in float32


class Posteriors:
    """What `MetaLearner.adapt_all` returns: the posteriors of T tasks, which predict together.

    Predictions average over the posterior: over fixed points where a linear head makes outputs
    Gaussian (then ``samples`` is not read), else over draws. They are the same at every call unless
    a generator is given, which asks for draws, and one query's prediction does not depend on the
    other queries (except with ``norm_stats="batch"``). A task's draws depend on its key alone.

    Attributes:
        norm_stats: which statistics each batch-norm layer uses.
        solution: what happened in the solve (None if there were no examples).
        learner: the learner that made it.
    """

    def __init__(
        self,
        energy: TaskEnergy,
        v: Tensor,
        norm_stats: Mapping[str, NormStats],
        seed: int,
        keys: tuple[int, ...],
        noise: NoiseKind,
        watched: tuple[tuple[Tensor, int], ...],
        solution: Solution | None,
        learner: MetaLearner,
    ) -> None:
        self._energy = replace(detached(energy), redraw=None)
        self._v = v
        self._seed = seed
        self._keys = keys
        self._noise: NoiseKind = noise
        self._watched = watched
        self.norm_stats = dict(norm_stats)
        self.solution = solution
        self.learner = learner

    def __getstate__(self) -> dict[str, Any]:
        watched = tuple((t, t._version == version) for t, version in self._watched)
        return {**self.__dict__, "_watched": watched}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # a copy watches its own tensors, whose versions start again; a stale posterior stays stale
        watched = tuple((t, t._version if fresh else -1) for t, fresh in state["_watched"])
        self.__dict__.update(state, _watched=watched)

    def __len__(self) -> int:
        return len(self._v)

    def __repr__(self) -> str:
        return f"Posteriors({len(self)} tasks, {self._about_weights()})"

    def _about_weights(self) -> str:
        """The belief and its weights, in words for `repr`."""
        energy = self._energy
        belief = f"{type(energy.belief).__name__} over {energy.layout.size} weights"
        parts = [f"{belief} ({_few(energy.layout.names)})"]
        if "support" in self.norm_stats.values():
            parts.append("holds its support examples")
        if self.solution is not None and (count := int(self.solution.diverged.sum())):
            parts.append(f"the prior for {count} of {len(self)}: the solver diverged")
        return ", ".join(parts)

    @property
    def mean(self) -> dict[str, Tensor]:
        """Posterior means of the adapted weights by name, ``(T, *shape)``."""
        return self._energy.layout.split(self._energy.part(self._v, "mean"))

    @property
    def log_var(self) -> dict[str, Tensor]:
        """Posterior log-variances of the adapted weights by name (none for a point)."""
        energy = self._energy
        if isinstance(energy.answer, ClassDirections):
            return {}
        if energy.answer is not None:
            return energy.layout.split(energy.flat(energy.answer.weight_variances()).log())
        log_var = energy.belief.log_var(self._v)
        return {} if log_var is None else energy.layout.split(log_var)

    @torch.no_grad()
    def sample(
        self, samples: int = 10, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Draws of the adapted weights by name, ``(T, samples, *shape)``."""
        return self._sampled(samples, generator).weights(self._v)

    @torch.no_grad()
    def outputs(
        self, x: Tensor, samples: int = 10, generator: torch.Generator | None = None
    ) -> Tensor:
        """The network's outputs for inputs x (T, M, …) under draws: (T, S, M, …)."""
        with torch.inference_mode(False), torch.no_grad():
            outputs = self._outputs(x.clone() if x.is_inference() else x, samples, generator)
            self._check_fresh()  # again: another thread may have trained in between
            return outputs

    def _outputs(self, x: Tensor, samples: int, generator: torch.Generator | None) -> Tensor:
        self._check_fresh()
        energy = self._sampled(samples, generator)
        if "support" not in self.norm_stats.values():
            return replace(energy, x=x).outputs(self._v)
        run, model, weights = energy.run, energy.model, energy.weights(self._v)
        constants = {**energy.constants, **energy.meta.shared}
        return run(model, {**weights, **self.statistics(energy)}, constants, x)

    def statistics(self, energy: TaskEnergy) -> dict[str, Tensor]:
        """Batch norm's statistics of the support set, for every weight set: the support set runs
        through each of them."""
        run, model = energy.run, energy.model
        constants = {**energy.constants, **energy.meta.shared}
        with watch_moments(model) as passes:
            run(model, energy.weights(self._v), constants, energy.x)
        sets = energy.noise.shape[:2]
        return support_statistics(self.norm_stats, passes, run.calls(sets.numel()), *sets)

    @torch.no_grad()
    def predict_proba(
        self, x: Tensor, samples: int = 10, generator: torch.Generator | None = None
    ) -> Tensor:
        """Class probabilities (T, M, C), averaged over the posterior."""
        if (at_points := self.outputs_at_points(x, generator)) is not None:
            return torch.cat([self._probabilities(part).mean(1) for part in at_points], 1)
        outputs = self.outputs(x, samples, generator)
        if outputs.dim() != 4 or self._energy.y.is_floating_point():
            raise ValueError(
                "predict_proba is for classification (integer targets, logits per class); use "
                "predict for regression"
            )
        return self._probabilities(outputs).mean(1)

    @torch.no_grad()
    def predict(
        self, x: Tensor, samples: int = 10, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean and variance of the predictions, each with the shape of the targets of M examples.

        The variance is that of the outputs over the posterior plus the likelihood's noise.
        """
        likelihood = self._energy.likelihood
        if likelihood.takes_labels(self._energy.y):
            raise ValueError("predict is for regression; use predict_proba for classes")
        if (moments := self._moments(x, generator)) is not None:
            mean, variance = moments
        else:
            outputs = self.outputs(x, samples, generator)
            mean = outputs.mean(1)
            variance = (outputs - mean[:, None]).square().mean(1)
        if mean.shape[2:] == (1,) and self._energy.y.dim() == 2:
            mean, variance = mean.squeeze(-1), variance.squeeze(-1)  # each target is one number
        with held(likelihood):
            noise = likelihood.noise_variance()
        return mean, variance if noise is None else variance + noise.to(variance.dtype)

    @torch.no_grad()
    def nll(
        self, x: Tensor, y: Tensor, samples: int = 10, generator: torch.Generator | None = None
    ) -> Tensor:
        """−log of the likelihood of every target in y, averaged over the posterior: (T, M)."""
        if self._energy.likelihood.takes_labels(y):
            rows = self.predict_proba(x, samples, generator)
            return -rows.gather(-1, y.long()[..., None])[..., 0].log()
        moments = self._moments(x, generator)
        with held(self._energy.likelihood):
            noise = self._energy.likelihood.noise_variance()
        if moments is not None and noise is not None:
            mean, variance = moments
            return gaussian_nll(y.view_as(mean), mean, variance + noise.to(variance.dtype))
        each = replace(self._energy, y=y).nll(self.outputs(x, samples, generator))
        return -(torch.logsumexp(-each, 1) - torch.tensor(each.shape[1]).log())

    def outputs_at_points(
        self, x: Tensor, generator: torch.Generator | None = None, count: int = PREDICTION_POINTS
    ) -> Iterator[Tensor] | None:
        """A linear head's outputs at fixed points that stand for the posterior, (T, S, m, C), for
        the inputs x (T, M, …) part by part; None where draws are asked for, or needed."""
        if self._energy.y.is_floating_point() or (moments := self._moments(x, generator)) is None:
            return None
        mean, covariance = moments
        if isinstance(self._energy.answer, ClassDirections):
            return iter([mean[:, None]])  # no spread
        points = gaussian_points(count, mean.shape[-1], mean.dtype, mean.device)
        at_once = max(1, _ENTRIES // (points.numel() * len(mean)))
        parts = zip(mean.split(at_once, 1), covariance.split(at_once, 1), strict=True)
        return (place_first(m, c, points) for m, c in parts)

    def _moments(
        self, x: Tensor, generator: torch.Generator | None
    ) -> tuple[Tensor, Tensor] | None:
        """Mean (T, M, C) of a linear head's outputs, and their covariance (T, M, C, C) or, for
        numbers, variance (T, M, C); None where draws are asked for, or needed."""
        energy = self._energy
        gaussian = energy.belief.has_output_moments or energy.answer is not None
        linear = energy.run.linear and "support" not in self.norm_stats.values()
        if generator is not None or not gaussian or not linear:
            return None
        with torch.inference_mode(False), torch.no_grad():
            self._check_fresh()
            x = x.clone() if x.is_inference() else x
            mean, covariance = replace(energy, x=x).output_moments(self._v)
            self._check_fresh()  # again: another thread may have trained in between
            if energy.y.is_floating_point() and covariance.dim() > mean.dim():
                covariance = covariance.diagonal(dim1=-2, dim2=-1)
            return mean, covariance

    def _probabilities(self, outputs: Tensor) -> Tensor:
        """Class probabilities of every draw's outputs (T, S, M, C)."""
        likelihood = self._energy.likelihood
        with held(likelihood):
            return likelihood.probabilities(outputs.flatten(0, 2)).unflatten(0, outputs.shape[:3])

    def _sampled(self, samples: int, generator: torch.Generator | None) -> TaskEnergy:
        check_count("samples", samples, 1)
        energy = self._energy
        size = energy.belief.noise_size(energy.layout.size)
        if energy.answer is not None:
            size = sum(energy.answer.noise_sizes())
        if not size:
            return energy
        seed = self._seed if generator is None else draw_seed(generator)
        noise = draw_noise(
            seed,
            self._keys,
            Stream.PREDICT,
            samples,
            size,
            self._noise,
            device=self._v.device,
            dtype=self._v.dtype,
        )
        return replace(energy, noise=noise, points=None)

    def _check_fresh(self) -> None:
        if any(t._version != version for t, version in self._watched):
            raise RuntimeError(
                "the learner was trained after this posterior was made, so its shared weights have "
                "changed: call learner.adapt again"
            )


class Posterior:
    """What `MetaLearner.adapt` returns: the posterior of one task. See `Posteriors`.

    Attributes:
        classes: the names of the columns of probabilities, the labels of ``adapt``; None in
            regression.
        norm_stats: which statistics each batch-norm layer uses.
        solution: what happened in the solve (None if there were no examples).
    """

    def __init__(self, task: Posteriors, classes: tuple[Any, ...] | None = None) -> None:
        self._task = task
        self._classes = classes
        self.norm_stats = task.norm_stats
        self.solution = task.solution

    @property
    def classes(self) -> tuple[Any, ...] | None:
        if self._classes is not None or self._task._energy.y.is_floating_point():
            return self._classes
        try:  # one class per row of the head
            return tuple(range(head_module(self._task.learner.model)[1].out_features))
        except ValueError:
            return None

    @property
    def inputs(self) -> Inputs:
        """How raw inputs are prepared: ``posterior.inputs(["new.jpg"])``."""
        if self._task.learner.inputs is None:
            raise ValueError(
                "how inputs are prepared is not known here: set learner.inputs (an "
                "ibaml.tasks.Inputs), or prepare them yourself as in training"
            )
        return self._task.learner.inputs

    @property
    def needs_examples(self) -> bool:
        """Whether predictions read the support examples (batch norm with their statistics)."""
        return "support" in self.norm_stats.values()

    def __repr__(self) -> str:
        if self._task._energy.y.is_floating_point():
            what = "regression"
        elif self.classes is None:
            what = "classification"
        else:
            what = f"{len(self.classes)} classes ({_few(self.classes)})"
        return f"Posterior({what}, {self._task._about_weights()})"

    def nll(
        self,
        x: Tensor | np.ndarray,
        y: Tensor | np.ndarray | Sequence[Any],
        samples: int = 10,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """−log of the likelihood of every target in y, averaged over the posterior: (M,). Its mean
        is the nll that evaluations report.

        Args:
            y: one target per example: labels as `MetaLearner.adapt` was given them (each one of
                ``classes``), or numbers.

        >>> posterior.nll(x, ["cat", "dog"]).mean()                               # doctest: +SKIP
        """
        rows, targets = self._rows(x), self._targets(y)
        if len(targets) != rows.shape[1]:
            raise ValueError(
                f"x and y need one entry per example: x has {rows.shape[1]}, y has {len(targets)}"
            )
        return self._task.nll(rows, targets[None], samples, generator)[0]

    def _targets(self, y: Any) -> Tensor:
        """Targets in the form that the likelihood reads, (M, …)."""
        energy, v = self._task._energy, self._task._v
        if energy.y.is_floating_point():
            return as_tensor(y, "y", v.dtype).to(v)
        if self.classes is not None and energy.likelihood.takes_labels(energy.y):
            return encoded(y, self.classes)[0].to(v.device)
        return as_tensor(y, "y", v.dtype).to(v.device)

    def _rows(self, x: Tensor | np.ndarray) -> Tensor:
        return as_tensor(x, "x", self._task._v.dtype)[None]

    def save(self, path: str | Path, *, examples: bool = True) -> Path:
        """Write a finished classifier or regressor to one file. `ibaml.load_posterior` reads it
        without the learner or any data. Nothing in it executes.

        Args:
            examples: if `needs_examples`, the prepared examples go into the file (never the
                originals); with False this is an error instead.
        """
        from ibaml.artifact import save_posterior

        return save_posterior(self, path, examples=examples)

    def module(self, samples: int = 10) -> nn.Module:
        """A plain module from prepared inputs (M, …) to averaged probabilities (M, C), or to mean
        and variance. It uses the posterior's default draws; for `torch.export` and code without
        ibaml."""
        from ibaml.deploy import predictive_module

        return predictive_module(self._task, samples)

    def predict_labels(
        self, x: Tensor | np.ndarray, samples: int = 10, generator: torch.Generator | None = None
    ) -> np.ndarray:
        """The most probable class of every input, as a label that `MetaLearner.adapt` was given."""
        best = self.predict_proba(x, samples, generator).argmax(-1)
        classes = self.classes
        return best.cpu().numpy() if classes is None else decoded(best, classes)

    @property
    def mean(self) -> dict[str, Tensor]:
        """Posterior means of the adapted weights, by name."""
        return {n: t[0] for n, t in self._task.mean.items()}

    @property
    def log_var(self) -> dict[str, Tensor]:
        """Posterior log-variances of the adapted weights, by name (none for a point)."""
        return {n: t[0] for n, t in self._task.log_var.items()}

    def sample(
        self, samples: int = 10, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Draws of the adapted weights by name, ``(samples, *shape)``."""
        return {n: w[0] for n, w in self._task.sample(samples, generator).items()}

    def outputs(
        self, x: Tensor | np.ndarray, samples: int = 10, generator: torch.Generator | None = None
    ) -> Tensor:
        """The network's outputs for inputs x (M, …) under draws from the posterior: (S, M, …)."""
        return self._task.outputs(self._rows(x), samples, generator)[0]

    def predict_proba(
        self, x: Tensor | np.ndarray, samples: int = 10, generator: torch.Generator | None = None
    ) -> Tensor:
        """Class probabilities (M, C), averaged over the posterior."""
        return self._task.predict_proba(self._rows(x), samples, generator)[0]

    def predict(
        self, x: Tensor | np.ndarray, samples: int = 10, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean and variance of the prediction, each with the shape of the targets of M examples.

        The variance is that of the outputs over the posterior plus the likelihood's noise.
        """
        mean, variance = self._task.predict(self._rows(x), samples, generator)
        return mean[0], variance[0]


def _few(names: Sequence[Any]) -> str:
    """The first few of many names."""
    rest = f", … {len(names) - 4} more" if len(names) > 5 else ""
    return ", ".join(str(n) for n in names[: 4 if rest else 5]) + rest
