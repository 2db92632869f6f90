"""Which settings are recommended? One table for Python and the command line.

They depend on the method, on whether only the head is adapted, and on whether targets are numbers.
Settings that depend on the data come from `recommend`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from ibaml.arguments import check_module, check_word
from ibaml.energy import Categorical, Gaussian
from ibaml.energy.likelihood import Temperature
from ibaml.linalg import ConjugateGradient
from ibaml.solve import (
    Adam,
    Descent,
    DualNewton,
    GradientDescent,
    HeadNewton,
    NaturalDescent,
    NewtonCG,
    PolyakDescent,
    Rate,
    Solver,
)
from ibaml.tasks import Dataset, EpisodeTasks, TaskSource
from ibaml.words import DESCENTS, GAUSSIAN, IMPLICIT, IN_CLOSED_FORM, METHODS, NOT_OF_FULL

# a head that reads more has another best step size (docs/studies/paper-setting.md)
_FEW_FEATURES = 128
MANY_WAYS = 20  # classes of a training task, if the prior is tied over them and there are enough
MANY_CLASSES = 300  # with so many, a temperature learned with the prior is right for new classes


def ends_in_linear(model: nn.Module) -> bool:
    """Whether the last layer that has weights is linear, so that it is a head."""
    layers = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
    return bool(layers) and isinstance(layers[-1], nn.Linear)


def head_features(model: nn.Module) -> dict[str, int]:
    """How many features the last layer reads, as `recommended` is given it; empty if it is not
    linear."""
    if not ends_in_linear(model):
        return {}
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    return {"head_features": last.in_features}


def recommended_adapt(method: str, model: nn.Module | None = None) -> str:
    """``"head"`` for implicit methods, which assume that a task is solved well (for a head this is
    easy); ``"all"`` for the others."""
    has_head = model is None or ends_in_linear(model)
    return "head" if method in IMPLICIT and has_head else "all"


def recommended(
    method: str, *, head: bool, regression: bool, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The settings of a method that were not given.

    Args:
        head: whether only the last linear layer is adapted.
        regression: whether targets are numbers.
        given: settings that others depend on: ``posterior`` and all that only another than the full
            one reads, ``solver``, ``inner_lr`` (a given α selects descent), ``noise``,
            ``curvature``, ``stopping``, ``execution``, ``lam``, ``beta``, ``learn_beta``,
            ``noise_std``, ``bounded`` (False: nobody knows the loss's lowest value),
            ``head_features`` (how many the network's head reads).
    """
    given = {name: value for name, value in (given or {}).items() if value is not None}
    by_itself = head and given.get("execution", "auto") in ("auto", "head")
    values: dict[str, Any] = {}
    if method == "ibaml":
        full = by_itself and not any(name in given for name in NOT_OF_FULL)
        full &= given.get("objective") != "abml"
        full |= given.get("solver") == "dual"
        values["posterior"] = given.get("posterior", "full" if full else "diagonal")
    if regression:
        values.update(noise_std=0.3, learn_noise=method != "reptile")
    if values.get("posterior") in IN_CLOSED_FORM:
        return {**values, **_full(regression, given)}
    on_outputs = by_itself and values.get("posterior") == "diagonal" and "inner_lr" not in given
    noise = given.get("noise", "outputs" if on_outputs else "antithetic")
    solver = given.get("solver")
    if solver is None:
        newton = method in IMPLICIT and head and "inner_lr" not in given
        exact = noise == "outputs" and on_outputs
        solver = "descent" if not newton else "head" if exact else "newton"
    # descent stops early, and the implicit rule knows it; a given curvature means the plain rule
    stopped = method in IMPLICIT and solver in DESCENTS
    stopped &= "curvature" not in given and given.get("stopping") not in ("off", "0", 0)
    bounded = given.get("bounded", True) and not regression and "inner_lr" not in given
    pays = stopped or method in ("maml", "abml", "fomaml")  # docs/studies/paper-setting.md
    if solver == "descent" and "solver" not in given and bounded and pays:
        solver = "polyak"
    steps = {"newton": 8, "head": 16}.get(solver, 15 if stopped else 5)
    values.update(solver=solver, steps=steps)
    if solver in (*DESCENTS, "adam"):
        few = head or method == "reptile" or given.get("head_features", math.inf) <= _FEW_FEATURES
        labels = 0.1 if few else 0.03
        if solver == "polyak":  # the largest; K = 5 steps of 0.1 are too long for many features
            labels = 0.3 if few else 0.1 if stopped else 0.03
        values["inner_lr"] = 0.01 if solver == "adam" else 0.1 if regression else labels
        if regression and solver != "adam":  # the loss, and so its slope, grows with 1/σ²
            values["inner_lr"] *= given.get("noise_std", values["noise_std"]) ** 2
    if method in IMPLICIT:
        # the exact Hessian is positive definite where a head is solved to convergence; with the
        # precision of the start it nearly always is
        exact = stopped or solver == "head"
        values.update(curvature="energy" if exact else "ggn", damping=0.0)
        values["stopping"] = "auto" if stopped else "off"
    if method == "ibaml":
        values["block"] = "mean" if stopped else "all"
    if method in GAUSSIAN:
        values.update(
            samples=64 if noise == "outputs" else 4,
            noise=noise,
            # with everything adapted, a draw puts noise into every layer, so ρ is small, and β too:
            # β·exp(−ρ)/N is the strength of the prior
            beta=0.002 if head else 0.01 if regression else 0.001,
            init_log_var=-5.0 if head else -6.0 if regression else -9.0,
        )
    if stopped and method == "ibaml" and not head and not regression:
        values.update(samples=2)
        if not given.get("beta") and not given.get("learn_beta"):
            values["lam"] = 0.1  # which means the same at any number of shots
    if "lam" in given or "lam" in values:
        values.pop("beta", None)
    if method == "imaml":
        values["lam"] = 0.05
    if method != "reptile":
        values["objective"] = "abml" if method == "abml" else "query"
    return values


def _full(regression: bool, given: Mapping[str, Any]) -> dict[str, Any]:
    """A head in closed form. With Gaussian noise, Bayes' own β is right; the softmax of one linear
    layer is so unsure after a few examples that a classifier needs a colder posterior, and a strong
    prior (docs/studies/heads.md)."""
    values: dict[str, Any] = {"solver": "dual", "steps": 40, "objective": "predictive"}
    if regression:
        beta = {} if given.get("lam") else {"beta": 1.0}
        return {**values, **beta, "init_log_var": -1.0}
    values.update(init_log_var=-5.0, tie_head=True)
    if given.get("beta") or given.get("learn_beta"):
        return {**values, "beta": 0.01}
    # λ, unlike β, means the same in training tasks of many classes and in the test
    return {**values, "lam": 0.3}


def recommended_meta_lr(*, head: bool) -> float:
    """The step size of the prior's optimizer (Adam)."""
    return 0.01 if head else 0.003


def make_solver(name: str, steps: int, lr: Rate | None, learn_lr: bool = False) -> Solver:
    """A solver by its name."""
    if name in ("dual", "head"):
        return DualNewton(steps) if name == "dual" else HeadNewton(steps)
    if name == "newton":
        # rough directions suffice (H is Gauss–Newton's); a recorded meta-step takes every halving
        return NewtonCG(steps, linear_solver=ConjugateGradient(10, tol=0.3), halvings=10)
    kinds: dict[str, type[Descent]] = {
        "descent": GradientDescent,
        "polyak": PolyakDescent,
        "natural": NaturalDescent,
        "adam": Adam,
    }
    return kinds[name](steps=steps, lr=cast(Rate, lr), learn_lr=learn_lr)


def recommend(
    method: str, model: nn.Module, data: Dataset | TaskSource | None = None
) -> dict[str, Any]:
    """The options of ``ibaml.methods.METHOD`` that depend on the data, for this module and dataset.

    >>> import ibaml
    >>> data, model = ibaml.tasks.glyphs(), ibaml.nn.conv4(5, 16, 1, 28)
    >>> ibaml.recommend("ibaml", model, data)
    {'likelihood': Categorical(temperature=1, learned)}
    """
    check_word("method", method, METHODS)
    check_module(model)
    if data is not None and not isinstance(data, Dataset) and not hasattr(data, "batches"):
        remedy = f"ibaml.tasks.open_data({data!r})" if isinstance(data, str) else "EpisodeTasks(…)"
        raise TypeError(
            "data must be a dataset or a source of tasks, such as ibaml.tasks.glyphs(); got "
            f"{type(data).__name__}: write {remedy}"
        )
    if isinstance(data, Dataset | EpisodeTasks):
        return {"likelihood": Categorical(recommended_temperature(method, model, data))}
    if data is not None and data.ways is None:
        values = recommended(method, head=False, regression=True)
        return {"likelihood": Gaussian(values["noise_std"], learn=values["learn_noise"])}
    return {}


def recommended_temperature(
    method: str, model: nn.Module, data: Dataset | EpisodeTasks
) -> Temperature:
    """How the temperature of predictions is found.

    It is learned with the prior if there are many training classes (with few, predictions for new
    classes are too sure) and a norm fixes the size of the network's features (else they grow).
    Otherwise it is fitted on validation tasks, if there are validation classes. It is never both:
    many training classes say more than the few for validation, which may be harder or easier than
    the classes to come.
    """
    dataset, ways = (data.data, data.ways) if isinstance(data, EpisodeTasks) else (data, 2)
    turns = 4 if isinstance(data, EpisodeTasks) and data.rotations else 1
    train_classes = turns * len(dataset.splits.get("train", ()))
    has_norm = any(isinstance(m, _NORMS) for m in model.modules())
    learned = train_classes >= MANY_CLASSES and has_norm and method != "reptile"
    fitted = len(dataset.splits.get("val", ())) >= ways
    return "learned" if learned else "fitted" if fitted else 1.0


_NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
