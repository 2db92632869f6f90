"""What is in a file? A complete learner or a finished posterior, and nothing that executes.

It is a safetensors file. Its header holds JSON: the format's version, the choices by the names of
their classes and fields, how the backbone was built, how inputs are prepared, the names of classes.
For a user's own part (a module, a likelihood, a solver) it holds only the name; the part is passed
in again when loading.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ibaml import curvature, gradient, linalg, objectives, solve, untrusted, weights
from ibaml.container import MISFITS, ArtifactError, read_artifact, write_artifact
from ibaml.energy import ByTarget, Categorical, Gaussian, Likelihood, TaskEnergy
from ibaml.heads.class_means import ClassDirections
from ibaml.heads.dual import DualPosterior
from ibaml.heads.regression import RegressionPosterior
from ibaml.learner import MetaLearner
from ibaml.nn.recipe import build, recipe_of
from ibaml.posterior import Posterior, Posteriors
from ibaml.tasks.inputs import Inputs

if TYPE_CHECKING:
    from ibaml.execution import Plan

_CHOICES: dict[str, type] = {
    one.__name__: one
    for one in (
        weights.Point, weights.DiagonalGaussian, weights.LowRankGaussian, weights.FullGaussian,
        weights.ClassMeans, weights.SimpleHead,
        solve.GradientDescent, solve.PolyakDescent, solve.NaturalDescent, solve.Adam,
        solve.NewtonCG, solve.DualNewton, solve.HeadNewton,
        gradient.Unrolled, gradient.FirstOrder, gradient.Reptile, gradient.Implicit,
        curvature.Curvature, linalg.ConjugateGradient, linalg.Dense, linalg.Neumann,
        objectives.QueryNll, objectives.PredictiveNll, objectives.Abml, objectives.TowardsSolution,
    )
}  # fmt: skip
_PASSED_IN = ("model", "belief", "solver", "gradient", "objective", "likelihood")


# --- a learner -----------------------------------------------------------------------------------


def save_learner(learner: MetaLearner, path: str | Path) -> Path:
    """Write a learner to a file: weights, choices, and how inputs are prepared."""
    return write_artifact(Path(path), "learner", _described(learner), learner.state_dict())


def load_learner(
    path: str | Path, device: torch.device | str = "cpu", **passed_in: Any
) -> MetaLearner:
    """The learner in a file. Nothing in it is executed.

    Args:
        passed_in: the user's own parts: ``model``, ``likelihood``, ``solver``, …
    """
    facts, tensors = read_artifact(Path(path), "learner")
    return _learner(Path(path), facts, tensors, passed_in).to(device)


def _described(learner: MetaLearner) -> dict[str, Any]:
    head = isinstance(learner.selection, str) and learner.selection in ("all", "head")
    return {
        "model": recipe_of(learner.model),
        "module": type(learner.model).__name__,
        "dtype": str(next(learner.parameters()).dtype).removeprefix("torch."),
        "belief": _choice(learner.belief),
        "solver": _choice(learner.solver),
        "gradient": _choice(learner.gradient),
        "objective": _choice(learner.objective),
        "likelihood": _likelihood(learner.likelihood),
        "adapt": learner.selection if head else list(learner.roles.adapted),
        "freeze": list(learner.roles.frozen),
        "tie_head": bool(learner.layout.rows),
        "samples": learner.samples,
        "noise": learner.noise,
        "beta": learner.beta,
        "learn_beta": learner.log_beta is not None,
        "inputs": None if learner.inputs is None else learner.inputs.described(),
    }


def _learner(
    path: Path, facts: Mapping[str, Any], tensors: Mapping[str, Tensor], passed_in: dict[str, Any]
) -> MetaLearner:
    unknown = [name for name in passed_in if name not in _PASSED_IN]
    if unknown:
        raise TypeError(f"{unknown[0]} cannot be passed in; these can: {', '.join(_PASSED_IN)}")
    try:
        dtype = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16,
                 "float16": torch.float16}[facts["dtype"]]  # fmt: skip
        model = passed_in.get("model")
        if model is None:
            if facts["model"] is None:
                raise ArtifactError(
                    f"{path} holds a learner around a module of your own ({facts['module']}): "
                    "build it and pass it in, model=…"
                )
            _refuse_larger(path, facts["model"], tensors)
            model = build(facts["model"]).to(dtype)
        own = {n: passed_in.get(n) or _chosen(path, n, facts[n]) for n in _PASSED_IN[1:5]}
        reptile = isinstance(own["gradient"], gradient.Reptile)
        trainable = {n for n, p in model.named_parameters() if p.requires_grad}
        freeze = [n for n in facts["freeze"] if n in trainable]
        learner = MetaLearner(
            model,
            own["belief"],
            own["solver"],
            own["gradient"],
            None if reptile else own["objective"],
            passed_in.get("likelihood") or _known_likelihood(path, facts["likelihood"]),
            adapt=facts["adapt"],
            freeze=freeze or None,
            tie_head=facts["tie_head"],
            samples=facts["samples"],
            noise=facts["noise"],
            beta=facts["beta"],
            learn_beta=facts.get("learn_beta", False),
        )
        learner.inputs = None if facts["inputs"] is None else Inputs.read(facts["inputs"])
        learner.load_state_dict(dict(tensors))
    except ArtifactError:
        raise
    except MISFITS as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        hint = " (is your module the one it was saved with?)" if "model" in passed_in else ""
        raise ArtifactError(f"the parts of {path} do not match{hint}: {first}") from error
    learner.eval()
    return learner


def _refuse_larger(path: Path, recipe: Any, tensors: Mapping[str, Tensor]) -> None:
    """Refuse a description of a network with more weights than the file holds, before it is made:
    it may ask for any memory."""
    with torch.device("meta"):
        weights = sum(p.numel() for p in build(recipe).parameters())
    held = sum(t.numel() for t in tensors.values())
    if weights > held:
        raise ArtifactError(
            f"{path} describes a network of {weights:,} weights, and holds {held:,} numbers: it is "
            "damaged"
        )


def _choice(value: Any) -> Any:
    """A choice as JSON: its class and fields; for a user's own part only its name."""
    name = type(value).__name__
    if is_dataclass(value) and _CHOICES.get(name) is type(value):
        chosen_fields = {f.name: _choice(getattr(value, f.name)) for f in fields(value) if f.init}
        return {"class": name, **chosen_fields}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {"by name": {str(k): float(v) for k, v in value.items()}}
    if isinstance(value, list | tuple):
        return [_choice(one) for one in value]
    return {"own": type(value).__name__}


def _chosen(path: Path, name: str, content: Any) -> Any:
    """The object of a `_choice`; only classes listed above are made."""
    if isinstance(content, list):
        return tuple(_chosen(path, name, one) for one in content)
    if not isinstance(content, dict):
        return content
    if "own" in content:
        raise ArtifactError(
            f"{path} was saved with a {name} of your own ({content['own']}): pass it in, {name}=…"
        )
    if "by name" in content:
        return {str(k): float(v) for k, v in content["by name"].items()}
    kind = _CHOICES.get(str(content.get("class")))
    if kind is None:
        raise ArtifactError(f"{path}: {name} is of an unknown class, {content.get('class')!r}")
    if name == "belief":  # early files also store fields that follow from the class
        content = {k: v for k, v in content.items() if k not in ("blocks", "stochastic")}
    known = {f.name: f for f in fields(kind) if f.init}
    given = {k: _chosen(path, name, v) for k, v in content.items() if k != "class"}
    unexpected = [k for k in given if k not in known]
    missing = [
        k for k, f in known.items()
        if k not in given and f.default is MISSING and f.default_factory is MISSING
    ]  # fmt: skip
    if unexpected or missing:
        raise ArtifactError(
            f"{path}: {name} has the wrong fields ({', '.join(unexpected or missing)})"
        )
    return kind(**given)


def _likelihood(likelihood: Likelihood) -> Any:
    if type(likelihood) is ByTarget:
        return None
    if type(likelihood) is Categorical:
        return {"class": "Categorical", "temperature": likelihood.chosen}
    if type(likelihood) is Gaussian:
        learned = isinstance(likelihood.log_noise, nn.Parameter)
        return {"class": "Gaussian", "noise": math.exp(float(likelihood.log_noise.detach())),
                "learn": learned}  # fmt: skip
    return {"own": type(likelihood).__name__}


def _known_likelihood(path: Path, content: Any) -> Likelihood | None:
    if content is None:
        return None
    given = {k: v for k, v in content.items() if k != "class"}
    if content.get("class") == "Categorical":
        return Categorical(**given)
    if content.get("class") == "Gaussian":
        return Gaussian(**given)
    raise ArtifactError(
        f"{path} was saved with a likelihood of your own ({content.get('own')}): pass it in, "
        "likelihood=…"
    )


# --- a posterior ---------------------------------------------------------------------------------


def save_posterior(posterior: Posterior, path: str | Path, *, examples: bool = True) -> Path:
    """Write a finished classifier or regressor: its learner, the posterior, the names of its
    classes. A full covariance is kept as the features and targets of the examples. If predictions
    need the examples themselves (batch norm with their statistics), they are written as prepared,
    never the originals; ``examples=False`` then raises."""
    task = posterior._task
    task._check_fresh()
    learner, energy = task.learner, task._energy
    facts = {
        **_described(learner),
        "norm_stats": dict(task.norm_stats),
        "seed": task._seed,
        "keys": list(task._keys),
        "rows": energy.layout.classes,
        "floating": energy.y.is_floating_point(),
        "target_shape": list(energy.y.shape[2:]),
        "input_shape": list(energy.x.shape[2:]),
        "classes": None if posterior.classes is None else [_plain(c) for c in posterior.classes],
        "examples": posterior.needs_examples,
    }
    tensors = {f"learner/{n}": t for n, t in learner.state_dict().items()}
    tensors["posterior/v"] = task._v
    facts["support_size"] = 1
    if isinstance(energy.answer, DualPosterior | RegressionPosterior):
        tensors["posterior/features"] = energy.answer.features
        tensors["posterior/y"] = energy.y
        facts["support_size"] = energy.x.shape[1]
    if isinstance(energy.answer, ClassDirections):
        tensors["posterior/rows"] = energy.answer.rows
    if posterior.needs_examples:
        if not examples:
            raise ArtifactError(
                "predictions of this posterior need its support examples (batch norm with their "
                'statistics): leave examples at True, or adapt with norm_stats="running"'
            )
        tensors["posterior/x"] = energy.x
    return write_artifact(Path(path), "posterior", facts, tensors)


def load_posterior(
    path: str | Path, device: torch.device | str = "cpu", **passed_in: Any
) -> Posterior:
    """A finished classifier or regressor from a file. Nothing in it is executed.

    >>> posterior = ibaml.load_posterior("shop.ibaml")                            # doctest: +SKIP
    >>> posterior.predict_proba(posterior.inputs(["new.jpg"]))                    # doctest: +SKIP
    """
    path = Path(path)
    facts, tensors = read_artifact(path, "posterior")
    own = {n.removeprefix("learner/"): t for n, t in tensors.items() if n.startswith("learner/")}
    learner = _learner(path, facts, own, passed_in).to(device)
    try:
        plan: Plan = {str(k): v for k, v in facts["norm_stats"].items()}
        keys = tuple(int(k) for k in facts["keys"])
        classes = facts["classes"]
        layout = learner.layout.for_classes(int(facts["rows"] or 0))
        v = tensors["posterior/v"].to(device)
        like = next(learner.parameters())
        size = int(facts.get("support_size", 1))
        if not isinstance(classes, list | None):
            raise ValueError("the names of its classes are no list")
        if size * math.prod(facts["input_shape"]) > untrusted.NUMBERS:
            raise ValueError(f"{size:,} examples of the shape {facts['input_shape']} are too many")
        x = like.new_zeros(1, size, *facts["input_shape"])
        x = tensors.get("posterior/x", x).to(like.device)
        y = torch.zeros(1, x.shape[1], *facts["target_shape"], device=like.device)
        y = y.to(like.dtype) if facts["floating"] else y.long()
        if facts["examples"] and "posterior/x" not in tensors:
            raise ArtifactError(f"{path} lacks the examples that its predictions need")
        noise = like.new_zeros(1, 1, learner.belief.noise_size(layout.size))
        with torch.no_grad():
            energy = learner.energy(x, y, noise, layout, plan)
            if isinstance(learner.solver, solve.DualNewton):
                energy = _answered(energy, tensors, learner.solver)
        if v.shape != (1, learner.belief.dim(layout.size)):
            raise ValueError(f"the posterior has shape {tuple(v.shape)}")
        task = Posteriors(
            energy, v, plan, int(facts["seed"]), keys, learner.noise, learner.watched(), None,
            learner,
        )  # fmt: skip
    except MISFITS as error:
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(f"the parts of {path} do not match: {error}") from error
    return Posterior(task, None if classes is None else tuple(classes))


def _answered(
    energy: TaskEnergy, tensors: Mapping[str, Tensor], solver: solve.DualNewton
) -> TaskEnergy:
    """The energy with the posterior of the features and targets in the file."""
    if (rows := tensors.get("posterior/rows")) is not None:
        if rows.dim() != 3 or rows.shape[1:] != energy.rows(energy.meta.prior[0]).shape:
            raise ValueError("the rows of the head do not fit the learner")
        return replace(energy, answer=ClassDirections(rows.to(energy.x)))
    if "posterior/features" not in tensors:
        return replace(energy, answer=solve.before_examples(energy, 1))
    y = tensors["posterior/y"].to(energy.y)
    features = tensors["posterior/features"].to(energy.x.device)
    if y.shape != energy.y.shape or features.shape[:2] != y.shape[:2]:
        raise ValueError("the support set's features and targets differ in number")
    energy = replace(energy, y=y)
    return replace(energy, answer=solver.posterior(energy, features, examine=False)[0])


def _plain(label: Any) -> Any:
    """A label as a JSON value."""
    return label.item() if hasattr(label, "item") else label
