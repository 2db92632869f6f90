"""Which methods of the literature are there? Every method is one row of choices; this is the table.

| method  | adapted weights           | energy               | differentiate           | meta-loss |
|---------|---------------------------|----------------------|-------------------------|-----------|
| maml    | point                     | nll                  | unrolled                | query nll |
| fomaml  | point                     | nll                  | first order             | query nll |
| reptile | point                     | nll                  | towards the solution    | –         |
| imaml   | point, isotropic prior λ  | nll + λ/2·‖w − θ‖²   | implicit                | query nll |
| abml    | diagonal Gaussian         | nll + κ·KL           | unrolled                | ABML's    |
| ibaml   | diagonal Gaussian         | nll + κ·KL           | implicit                | query nll |

Options left out take the recommended values (`ibaml.recommended`), the same as on the command line;
an option that is given is never changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypedDict, Unpack

from torch import nn

from ibaml.arguments import check_count, check_number, check_part, check_word
from ibaml.curvature import Block, Curvature, Kind
from ibaml.energy import Categorical, Gaussian, NllFunction, NoiseKind
from ibaml.execution import Execution, Precision
from ibaml.gradient import FirstOrder, GradientRule, Implicit, Reptile, Unrolled
from ibaml.gradient.implicit import enough_steps
from ibaml.learner import MetaLearner
from ibaml.linalg import ConjugateGradient
from ibaml.objectives import Abml, Objective
from ibaml.recommended import (
    head_features,
    make_solver,
    recommend,
    recommended,
    recommended_adapt,
)
from ibaml.solve import Descent, DualNewton, HeadNewton, Rate, Solver
from ibaml.tasks import Dataset, Inputs, TaskSource
from ibaml.weights import (
    Belief,
    ClassMeans,
    DiagonalGaussian,
    FullGaussian,
    LowRankGaussian,
    Point,
    Selection,
    SimpleHead,
)
from ibaml.words import (
    CURVATURES,
    IN_CLOSED_FORM,
    NOT_OF_FULL,
    POSTERIORS,
    READ_BY,
    SIMPLE_HEADS,
    SOLVERS,
    STOPPINGS,
    ObjectiveName,
    PosteriorName,
    SolverName,
    StoppingWord,
)

__all__ = [
    "BayesOptions",
    "IbamlOptions",
    "ImamlOptions",
    "ImplicitOptions",
    "Options",
    "abml",
    "fomaml",
    "ibaml",
    "imaml",
    "maml",
    "reptile",
]


class Options(TypedDict, total=False):
    """Options of every method.

    Attributes:
        adapt: which weights a task adapts: ``"all"``, ``"head"``, ``"last"`` (the last block of
            layers and the head), a pattern, …; by default the head for implicit methods if the
            module ends in a linear layer, else everything.
        steps, lr: K and α. Implicit methods solve a head by Newton's method, unless α is given,
            which selects descent.
        solver: an object, or one of ``"newton"``, ``"descent"``, ``"natural"``, ``"adam"``,
            ``"dual"`` (for a full posterior alone) and ``"head"`` (for noise on the outputs alone).
        objective: an object, or one of ``"query"``, ``"predictive"``, ``"abml"``.
        gradient, likelihood: objects; see `MetaLearner`, which explains the other options too.
        data: the dataset that the learner is for. Settings that depend on the data
            (`ibaml.recommend`: the temperature of predictions, how inputs are prepared) follow it.
    """

    adapt: Selection
    freeze: Selection | None
    tie_head: bool
    steps: int
    lr: Rate
    solver: Solver | SolverName
    gradient: GradientRule
    objective: Objective | ObjectiveName
    likelihood: NllFunction | None
    data: Dataset | TaskSource
    execution: Execution
    precision: Precision
    capture: bool | None
    diagnose: bool


class ImplicitOptions(Options, total=False):
    """Options of implicit methods.

    Attributes:
        cg_steps: L, the steps of conjugate gradients; by default as many as are needed.
        curvature: ``"ggn"`` (safe), ``"energy"`` (exact) or, for ibaml, ``"lemma"`` (the paper's).
        damping: μ, relative to the prior's precision.
        stopping: whether the implicit rule knows that descent was stopped early: ``"auto"``,
            ``"off"``, or the precision δ of the start (see `Implicit`).
    """

    cg_steps: int
    curvature: Kind
    damping: float
    stopping: StoppingWord | float


class ImamlOptions(ImplicitOptions, total=False):
    """Options of iMAML. ``lam``: λ of the proximal term, on the mean nll."""

    lam: float


class BayesOptions(Options, total=False):
    """Options of methods with a Gaussian belief.

    Attributes:
        samples: S, Monte-Carlo samples of the energy.
        noise: ``"outputs"`` of a linear head, by fixed points, or on the weights: ``"independent"``
            or ``"antithetic"`` pairs.
        beta: β of κ = β/N: 1 is Bayes, below 1 a tempered posterior.
        learn_beta: meta-learn log β too (not under the first-order rule).
        init_log_var: the initial ρ.
        belief: the belief about the adapted weights, an object.
    """

    samples: int
    noise: NoiseKind
    beta: float
    learn_beta: bool
    init_log_var: float
    belief: Belief


class IbamlOptions(ImplicitOptions, BayesOptions, total=False):
    """Options of iBaML.

    Attributes:
        posterior: what is believed about the adapted weights: ``"full"``, any covariance, for a
            linear head, in closed form; ``"diagonal"``, the paper's; ``"low_rank"``; or
            ``"class_means"`` (`ClassMeans`, for features white within classes). To compare with,
            also of a linear head: ``"point"``, ``"prototypes"`` (ProtoNet), ``"ridge"`` (R2-D2),
            ``"gp"`` (Gaussian processes on labels ±1). By default
            a head's is full, unless an option is given that describes how the others are computed
            (``samples``, ``noise``, ``steps``, ``lr``, ``solver``, ``cg_steps``, …).
        lam: λ, the strength of the prior at the start, on the mean nll as in iMAML, instead of β:
            κ = λ·exp(ρ) whatever the number of examples.
        block: ``"all"``, or ``"mean"`` for the loss's curvature in the means alone.
    """

    posterior: PosteriorName
    lam: float
    block: Block


def maml(model: nn.Module, **options: Unpack[Options]) -> MetaLearner:
    """Model-agnostic meta-learning (Finn et al., 2017): differentiate through K steps.

    >>> import ibaml
    >>> learner = ibaml.methods.maml(ibaml.nn.mlp(1, 1), steps=5, lr=0.01)
    """
    return _make("maml", model, options, Options, Point(), Unrolled())


def fomaml(model: nn.Module, **options: Unpack[Options]) -> MetaLearner:
    """First-order MAML: the prior receives the gradient taken at the solution."""
    return _make("fomaml", model, options, Options, Point(), FirstOrder())


def reptile(model: nn.Module, **options: Unpack[Options]) -> MetaLearner:
    """Reptile (Nichol et al., 2018): move the prior towards the solution of the support set.

    The loss is ½‖θ − v̂‖², whose gradient θ − v̂ is Reptile's direction. Shared weights would have
    no gradient, so it adapts everything.
    """
    return _make("reptile", model, options, Options, Point(), Reptile())


def imaml(model: nn.Module, **options: Unpack[ImamlOptions]) -> MetaLearner:
    """Implicit MAML (Rajeswaran et al., 2019): a proximal term λ/2·‖w − θ‖² and its implicit
    gradient."""
    return _make("imaml", model, options, ImamlOptions, None, None)


def abml(model: nn.Module, **options: Unpack[BayesOptions]) -> MetaLearner:
    """Amortized Bayesian meta-learning (Ravi & Beatson, 2019): a Gaussian posterior, unrolled."""
    return _make("abml", model, options, BayesOptions, DiagonalGaussian(), Unrolled())


def ibaml(model: nn.Module, **options: Unpack[IbamlOptions]) -> MetaLearner:
    """Implicit Bayesian meta-learning (Zhang et al., 2023): a Gaussian posterior and its implicit
    meta-gradient, in time and memory that do not grow with K.

    >>> import ibaml
    >>> learner = ibaml.methods.ibaml(ibaml.nn.conv4(5))               # its head, in closed form
    >>> learner = ibaml.methods.ibaml(ibaml.nn.conv4(5), posterior="diagonal")   # the paper's
    >>> learner = ibaml.methods.ibaml(ibaml.nn.conv4(5), adapt="all", steps=10, lr=0.1)
    """
    return _make("ibaml", model, options, IbamlOptions, None, None)


def _make(
    method: str,
    model: nn.Module,
    given: Mapping[str, Any],
    known: type,
    belief: Belief | None,
    gradient: GradientRule | None,
) -> MetaLearner:
    """The learner of a method: the given options, and the recommended values of the rest."""
    _refuse_unknown(method, given, set(known.__annotations__))
    options = {name: value for name, value in given.items() if value is not None}
    if isinstance(options.get("solver"), str):
        check_word("solver", options["solver"], SOLVERS)
    if "gradient" in options:
        check_part("gradient", options["gradient"])
    data = options.pop("data", None)
    if isinstance(model, nn.Module):
        options.setdefault("adapt", recommended_adapt(method, model))
        if data is not None:
            options = {**recommend(method, model, data), **options}
    values = recommended(
        method,
        head=isinstance(options.get("adapt"), str) and options["adapt"] == "head",
        regression=isinstance(options.get("likelihood"), Gaussian),
        given=_settings_given(options, model),
    )
    options["solver"] = _solver(options, values)
    belief = _belief(method, options, values) if belief is None or "belief" in options else belief
    implicit = _implicit(options, values) if gradient is None else None
    chosen = options.pop("gradient", None)
    options["gradient"] = chosen or implicit or gradient
    if method == "abml" and options.get("objective") is None:
        options["objective"] = Abml()
    for name in ("samples", "noise", "beta", "init_log_var"):
        if name in values:
            options.setdefault(name, values[name])
    if values.get("posterior") in IN_CLOSED_FORM:
        options.setdefault("objective", values["objective"])
        if isinstance(options.get("likelihood"), Categorical):  # else targets may be numbers
            options.setdefault("tie_head", values["tie_head"])
    learner = MetaLearner(model, belief, **options)
    if data is not None:
        learner.inputs = Inputs.of(data)
    return learner


def _settings_given(options: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The settings that the recommended values of others depend on."""
    names = ("posterior", "lam", "beta", "learn_beta", "execution", *NOT_OF_FULL)
    settings: dict[str, Any] = {name: options.get(name) for name in names}
    settings["inner_lr"] = options.get("lr")
    if isinstance(model, nn.Module):  # anything else is refused later
        settings |= head_features(model)
    if isinstance(belief := options.get("belief"), Belief):
        other = "diagonal" if belief.is_diagonal_gaussian else "low_rank"
        settings["posterior"] = "full" if belief.in_dual else other
    elif not _in_closed_form(options):
        settings["posterior"] = options.get("posterior", "diagonal")
    if not isinstance(options.get("solver"), str):
        settings["solver"] = None
        if isinstance(options.get("gradient"), Unrolled):
            settings["solver"] = "descent"  # a line search has no derivative
        elif options.get("solver") is not None and not isinstance(options["solver"], HeadNewton):
            settings["noise"] = options.get("noise", "antithetic")
    solver, rule = options.get("solver"), options.get("gradient")
    sizes = isinstance(solver, Descent) and type(solver).step_sizes is not Descent.step_sizes
    known = sizes or solver is None or isinstance(solver, str | DualNewton | HeadNewton)
    if settings["stopping"] is None and (rule is not None or not known):
        settings["stopping"] = "off"  # nothing says where such a solver stopped
    likelihood = options.get("likelihood")
    settings["bounded"] = likelihood is None or isinstance(likelihood, Categorical | Gaussian)
    if isinstance(likelihood, Gaussian):
        settings["noise_std"] = math.exp(float(likelihood.log_noise.detach()))
    return settings


def _in_closed_form(options: Mapping[str, Any]) -> bool:
    """Whether no part was given that a posterior in closed form does not go with."""
    likelihood, objective = options.get("likelihood"), options.get("objective")
    parts = [options.get("solver"), options.get("gradient")]
    return (
        (likelihood is None or isinstance(likelihood, Categorical | Gaussian))
        and all(part is None or isinstance(part, DualNewton | str) for part in parts)
        and not (isinstance(objective, Abml) or objective == "abml")
    )


def _belief(method: str, options: dict[str, Any], values: Mapping[str, Any]) -> Belief:
    """The given belief, or a new one by name and strength."""
    belief, posterior, lam = (options.pop(name, None) for name in ("belief", "posterior", "lam"))
    if method == "imaml":
        return Point(lam=values["lam"] if lam is None else lam)
    for name, value in (("posterior", posterior), ("lam", lam)):
        if belief is not None and value is not None:
            raise ValueError(f"{name} and belief were both given: choose it in the belief alone")
    if belief is not None:
        check_part("belief", belief)
        return belief
    if posterior is not None:
        check_word("posterior", posterior, POSTERIORS)
    if lam is not None and "beta" in options:
        raise ValueError("lam and beta both set the strength of the prior: give one of them")
    kappa = None
    lam = values.get("lam") if lam is None else lam
    if lam is not None:
        check_number("lam", lam, above=0)
        log_var = options.get("init_log_var", values["init_log_var"])
        check_number("init_log_var", log_var, least=-80, most=80)
        kappa = lam * math.exp(log_var)
    if values["posterior"] in IN_CLOSED_FORM:
        _refuse_draws(values["posterior"], options)
        if values["posterior"] in SIMPLE_HEADS:
            return SimpleHead(values["posterior"], kappa)
        return FullGaussian(kappa=kappa) if values["posterior"] == "full" else ClassMeans()
    return (DiagonalGaussian if values["posterior"] == "diagonal" else LowRankGaussian)(kappa=kappa)


def _refuse_draws(posterior: str, options: Mapping[str, Any]) -> None:
    """Refuse options of beliefs that are not in closed form."""
    draws = ("samples", "noise", "cg_steps", "curvature", "damping", "block", "stopping", "lr")
    for name in draws:
        if name in options:
            raise ValueError(
                f'{name} is not read by posterior="{posterior}", which is in closed form: leave it '
                'out, or use posterior="diagonal"'
            )


def _refuse_unknown(method: str, given: Mapping[str, Any], known: set[str]) -> None:
    for name in given:
        if name in known:
            continue
        if readers := READ_BY.get(name):
            raise TypeError(
                f"{name} is read by {', '.join(readers)}, and the method is {method}: leave it out"
            )
        near = get_close_matches(name, sorted(known), n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise TypeError(
            f"{method} has no option {name!r}{hint} (it has {', '.join(sorted(known))})"
        )


def _solver(options: dict[str, Any], values: Mapping[str, Any]) -> Solver:
    """The given solver, or a new one by name, steps and step size."""
    solver, steps, lr = (options.pop(name, None) for name in ("solver", "steps", "lr"))
    if solver is not None and not isinstance(solver, str):
        check_part("solver", solver)
        if steps is not None or lr is not None:
            raise ValueError(
                "steps and lr belong to the solver: give them to it, or leave solver out"
            )
        return solver
    name = values["solver"]
    if name in ("newton", "dual", "head") and lr is not None:
        raise ValueError(f"lr is not read by solver {name}, which has a line search")
    steps = values["steps"] if steps is None else steps
    return make_solver(name, steps, values.get("inner_lr") if lr is None else lr)


def _implicit(options: dict[str, Any], values: Mapping[str, Any]) -> GradientRule | None:
    """The implicit rule of the options; None if a gradient rule was given."""
    if isinstance(options.get("curvature"), Curvature):
        raise TypeError(
            f"curvature is one of the words {', '.join(CURVATURES)} here: give an object to "
            "gradient=Implicit(Curvature(…))"
        )
    its = ("cg_steps", "curvature", "damping", "block", "stopping")
    named = [n for n in its if n in options]
    if options.get("gradient") is not None:
        if named:
            verb = "belongs" if len(named) == 1 else "belong"
            raise ValueError(
                f"{' and '.join(named)} {verb} to the implicit rule, and a gradient rule was "
                "given: choose it there, in gradient=Implicit(…), or leave gradient out"
            )
        return None
    cg_steps = options.pop("cg_steps", None)
    if values.get("posterior") in IN_CLOSED_FORM:
        return Implicit()
    chosen = Curvature(
        options.pop("curvature", values["curvature"]),
        options.pop("damping", values["damping"]),
        options.pop("block", values.get("block", "all")),
    )
    stopping = options.pop("stopping", values.get("stopping", "off"))
    if isinstance(stopping, str):
        check_word("stopping", stopping, STOPPINGS)
    stopping = None if stopping == "off" else stopping
    if cg_steps is None:
        return Implicit(chosen, enough_steps(stopped=bool(stopping)), stopping=stopping)
    check_count("cg_steps", cg_steps, 1 if cg_steps else 0)  # the rule says why not 0
    return Implicit(chosen, ConjugateGradient(cg_steps), stopping=stopping)
