"""Every option is checked when it is given, and refused in a sentence that says what to do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import ibaml
from ibaml import (
    Abml,
    Adam,
    Categorical,
    ConjugateGradient,
    Curvature,
    Dense,
    DiagonalGaussian,
    DualNewton,
    FirstOrder,
    FullGaussian,
    Gaussian,
    GradientDescent,
    Implicit,
    LowRankGaussian,
    MetaLearner,
    NaturalDescent,
    Neumann,
    NewtonCG,
    Point,
    PredictiveNll,
    QueryNll,
    Unrolled,
)
from problems import class_batch, mlp_model, plain_learner

m = ibaml.methods
NAN = float("nan")
ONE = torch.ones(1)


def made(**parts) -> MetaLearner:
    """A learner of parts, without a method."""
    whole = {"belief": DiagonalGaussian(), "solver": GradientDescent(), "gradient": Implicit()}
    return MetaLearner(mlp_model(), **(whole | parts))


def frozen() -> nn.Module:
    return mlp_model().requires_grad_(False)


class TiedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


OPTIONS = {
    "implicit without a prior": (
        lambda: m.maml(mlp_model(), gradient=Implicit()),
        "implicit differentiation needs a prior in the energy: without one the solution does "
        "not depend on the prior and the meta-gradient is exactly zero. Use lam > 0 (imaml), "
        "a Gaussian belief (ibaml), or the unrolled rule (maml); or descent and "
        'stopping="auto", which makes the start a prior',
    ),
    "imaml with lambda zero": (
        lambda: m.imaml(mlp_model(), lam=0.0),
        "implicit differentiation needs a prior in the energy: without one the solution does "
        "not depend on the prior and the meta-gradient is exactly zero. Use lam > 0 (imaml), "
        "a Gaussian belief (ibaml), or the unrolled rule (maml); or descent and "
        'stopping="auto", which makes the start a prior',
    ),
    "negative lambda": (
        lambda: m.imaml(mlp_model(), lam=-1.0),
        "lam must be a finite number, 0 or more; got -1.0",
    ),
    "learned step size under implicit": (
        lambda: m.ibaml(mlp_model(), solver=GradientDescent(5, 0.1, learn_lr=True)),
        "a learned step size has gradient zero under every rule but the unrolled one (a "
        "solution does not depend on how it was found): use learn_lr=False or "
        "gradient=Unrolled()",
    ),
    "learned step size under first order": (
        lambda: m.fomaml(mlp_model(), solver=GradientDescent(5, 0.1, learn_lr=True)),
        "a learned step size has gradient zero under every rule but the unrolled one (a "
        "solution does not depend on how it was found): use learn_lr=False or "
        "gradient=Unrolled()",
    ),
    "negative beta": (
        lambda: m.ibaml(mlp_model(), beta=-0.5),
        "beta must be a finite number, above 0; got -0.5",
    ),
    "beta zero": (
        lambda: m.ibaml(mlp_model(), beta=0.0),
        "beta must be a finite number, above 0; got 0.0",
    ),
    "zero samples": (
        lambda: m.ibaml(mlp_model(), samples=0),
        "samples must be a whole number, 1 or more; got 0",
    ),
    "unknown noise": (
        lambda: m.ibaml(mlp_model(), noise="sobol"),
        "noise must be one of independent, antithetic, outputs; got 'sobol'",
    ),
    "infinite variance": (
        lambda: m.ibaml(mlp_model(), init_log_var=float("inf")),
        "init_log_var must be a finite number, -80 or more and 80 or less; got inf",
    ),
    "reptile without steps": (
        lambda: m.reptile(mlp_model(), steps=0),
        "Reptile with steps=0 has no direction: the solution is the start",
    ),
    "reptile with shared weights": (
        lambda: m.reptile(mlp_model(), adapt="head"),
        "Reptile moves a prior towards the tasks' solutions and has no gradient for shared "
        'weights (0.weight, 0.bias, …): use adapt="all", or freeze them',
    ),
    "no trainable parameters": (
        lambda: m.maml(frozen()),
        "Sequential has no trainable parameters: there is nothing to meta-learn (is "
        "requires_grad switched off on all of them?)",
    ),
    "no parameters at all": (
        lambda: m.maml(nn.ReLU()),
        "ReLU has no trainable parameters: there is nothing to meta-learn (is requires_grad "
        "switched off on all of them?)",
    ),
    "not a module": (
        lambda: m.maml(lambda x: x),
        "model must be a torch.nn.Module, got function",
    ),
    "negative steps": (
        lambda: m.maml(mlp_model(), steps=-1),
        "steps must be a whole number, 0 or more; got -1",
    ),
    "negative lr": (
        lambda: m.maml(mlp_model(), lr=-0.1),
        "lr must be a finite number, above 0; got -0.1",
    ),
    "negative cg steps": (
        lambda: m.ibaml(mlp_model(), cg_steps=-1),
        "cg_steps must be a whole number, 1 or more; got -1",
    ),
    "unknown curvature": (
        lambda: m.ibaml(mlp_model(), curvature="fisher"),
        "curvature must be one of energy, ggn, lemma; got 'fisher'",
    ),
    "nearly a word for stopping": (
        lambda: m.ibaml(mlp_model(), adapt="all", stopping="aut"),
        "stopping must be one of auto, off; got 'aut'; did you mean auto?",
    ),
    "negative stopping": (
        lambda: m.imaml(mlp_model(), stopping=-1.0),
        "stopping must be a finite number, 0 or more; got -1.0",
    ),
    "stopping beside a rule": (
        lambda: m.ibaml(mlp_model(), stopping="auto", gradient=FirstOrder()),
        "stopping belongs to the implicit rule, and a gradient rule was given: choose it there, "
        "in gradient=Implicit(…), or leave gradient out",
    ),
    "stopping of the unrolled": (
        lambda: m.maml(mlp_model(), stopping="auto"),
        "stopping is read by ibaml, imaml, and the method is maml: leave it out",
    ),
    "stopping of a full posterior": (
        lambda: m.ibaml(mlp_model(), posterior="full", stopping="auto"),
        'stopping is not read by posterior="full", which is in closed form: leave it out, or use '
        'posterior="diagonal"',
    ),
    "stopping of adam": (
        lambda: m.ibaml(mlp_model(), solver="adam", stopping="auto"),
        'stopping="auto" needs step sizes, which GradientDescent and NaturalDescent have and Adam '
        "has not (its steps depend on all gradients before): give stopping a number, or None for "
        "tasks that are solved",
    ),
    "negative damping": (
        lambda: m.ibaml(mlp_model(), damping=-1.0),
        "damping must be a finite number, 0 or more; got -1.0",
    ),
    "unknown block": (
        lambda: m.ibaml(mlp_model(), block="variance"),
        "block must be one of all, mean; got 'variance'",
    ),
    "lemma for a point": (
        lambda: m.imaml(mlp_model(), curvature="lemma"),
        'curvature "lemma" needs a diagonal Gaussian belief: use "energy"',
    ),
    "solver and steps": (
        lambda: m.maml(mlp_model(), solver=Adam(), steps=3),
        "steps and lr belong to the solver: give them to it, or leave solver out",
    ),
    "gradient and cg steps": (
        lambda: m.ibaml(mlp_model(), gradient=FirstOrder(), cg_steps=3),
        "cg_steps belongs to the implicit rule, and a gradient rule was given: choose it "
        "there, in gradient=Implicit(…), or leave gradient out",
    ),
    "unrolled newton": (
        lambda: m.maml(mlp_model(), solver=NewtonCG()),
        "NewtonCG cannot be unrolled: use GradientDescent, NaturalDescent or Adam, or the "
        "implicit rule",
    ),
    "natural descent for a point": (
        lambda: m.maml(mlp_model(), solver=NaturalDescent()),
        "NaturalDescent moves log-variances: it needs a diagonal Gaussian belief",
    ),
    "abml objective for a point": (
        lambda: m.maml(mlp_model(), objective=Abml()),
        "ABML's objective needs a diagonal Gaussian belief (its hyper-prior is over 1/d)",
    ),
    "adapt nothing": (
        lambda: m.maml(mlp_model(), adapt="hed.*"),
        'adapt: no trainable parameter matches \'hed.*\' (or use "all", "head", "last", a pattern '
        'such as "layer4.*", or a predicate)',
    ),
    "adapt by an empty predicate": (
        lambda: m.maml(mlp_model(), adapt=lambda n, p: False),
        "adapt selects no trainable parameter: every method needs at least one weight that "
        "each task adapts (the model has 0.weight, 0.bias, 2.weight, 2.bias)",
    ),
    "adapt and freeze the same": (
        lambda: m.maml(mlp_model(), adapt="0", freeze="0.weight"),
        "both adapt and freeze select ['0.weight']: choose one for each weight",
    ),
    "head of a network without one": (
        lambda: m.maml(nn.Conv2d(1, 1, 1), adapt="head"),
        "Conv2d has no nn.Linear layer, so it has no head: name the weights to adapt,"
        ' e.g. adapt=["classifier.*"]',
    ),
    "tied head that is shared": (
        lambda: m.maml(mlp_model(), adapt="0", tie_head=True),
        "tie_head ties the prior of the last linear layer (2), which is not adapted: use "
        'adapt="head" or adapt="all"',
    ),
    "unknown execution": (
        lambda: m.maml(mlp_model(), execution="fast"),
        "execution must be one of auto, loop, single, vmap, fold, head; got 'fast'",
    ),
    "unknown option": (
        lambda: m.maml(mlp_model(), step=3),
        "maml has no option 'step'; did you mean steps? (it has adapt, capture, data, "
        "diagnose, execution, freeze, gradient, likelihood, lr, objective, precision, solver,"
        " steps, tie_head)",
    ),
    "likelihood that is none": (
        lambda: m.maml(mlp_model(), likelihood="gaussian"),
        "likelihood must be an object such as Categorical() or Gaussian(), or any callable "
        "(outputs, y) -> nll per example; got 'gaussian'",
    ),
    "noise that is not positive": (
        lambda: Gaussian(noise=0.0),
        "noise must be a finite number, above 0; got 0.0",
    ),
    "objective without samples": (
        lambda: QueryNll(samples=0),
        "samples must be a whole number, 1 or more; got 0",
    ),
    "objective with unknown noise": (
        lambda: QueryNll(noise="new"),
        "noise must be one of fresh, shared; got 'new'",
    ),
    "shared noise with samples": (
        lambda: QueryNll(samples=2, noise="shared"),
        'noise="shared" takes adaptation\'s samples: leave samples unset',
    ),
    "abml without tasks": (lambda: Abml(tasks=0), "tasks must be a whole number, 1 or more; got 0"),
    "no cg steps": (
        lambda: m.ibaml(mlp_model(), cg_steps=0),
        "no CG steps from a start of zero give a gradient of exactly zero: use cg_steps of 1 "
        'or more, or ConjugateGradient(steps=0, start="preconditioned")',
    ),
    "infinite damping": (
        lambda: m.ibaml(mlp_model(), damping=float("inf")),
        "damping must be a finite number, 0 or more; got inf",
    ),
    "steps that are no number of steps": (
        lambda: m.maml(mlp_model(), steps=2.5),
        "steps must be a whole number, 0 or more; got 2.5",
    ),
    "samples that are no number": (
        lambda: m.ibaml(mlp_model(), samples=2.5),
        "samples must be a whole number, 1 or more; got 2.5",
    ),
    "log-variance out of float's range": (
        lambda: m.ibaml(mlp_model(), init_log_var=-800.0),
        "init_log_var must be a finite number, -80 or more and 80 or less; got -800.0",
    ),
    "reptile with a meta-loss": (
        lambda: m.reptile(mlp_model(), objective=QueryNll()),
        "Reptile has no meta-loss: leave objective out",
    ),
    "reptile with a learned noise": (
        lambda: m.reptile(mlp_model(), likelihood=Gaussian(1.0, learn=True)),
        "Reptile has no gradient for the parameters of a likelihood: give it a fixed one "
        "(learn=False)",
    ),
    "an option of another method": (
        lambda: m.maml(mlp_model(), cg_steps=3),
        "cg_steps is read by ibaml, imaml, and the method is maml: leave it out",
    ),
    "a typo": (
        lambda: m.ibaml(mlp_model(), adpat="head"),
        "ibaml has no option 'adpat'; did you mean adapt? (it has adapt, belief, beta, block,"
        " capture, cg_steps, curvature, damping, data, diagnose, execution, freeze, gradient,"
        " init_log_var, lam, learn_beta, likelihood, lr, noise, objective, posterior, precision,"
        " samples, solver, steps, stopping, tie_head)",
    ),
    "head tied to an embedding": (
        lambda: m.ibaml(TiedHead(), adapt="all", tie_head=True),
        "tie_head: the last linear layer (head) shares a weight with embedding, whose rows "
        "are not classes; untie them",
    ),
    "eta out of range": (
        lambda: NaturalDescent(eta=1.5),
        "eta must be a finite number, above 0 and 1 or less; got 1.5",
    ),
    "tolerance zero": (
        lambda: GradientDescent(tol=0.0),
        "tol must be a finite number, above 0; got 0.0",
    ),
    "newton on the lemma": (
        lambda: NewtonCG(curvature=ibaml.Curvature("lemma")),
        'NewtonCG minimizes E: its curvature is "ggn" or "energy"',
    ),
    "a belief class": (
        lambda: made(belief=DiagonalGaussian),
        "belief must be an object, not a class: write belief=DiagonalGaussian(), with its "
        "choices in the parentheses",
    ),
    "a solver class": (
        lambda: m.ibaml(mlp_model(), solver=NewtonCG),
        "solver must be an object, not a class: write solver=NewtonCG(), with its choices in "
        "the parentheses",
    ),
    "a gradient class": (
        lambda: m.ibaml(mlp_model(), gradient=FirstOrder),
        "gradient must be an object, not a class: write gradient=FirstOrder(), with its "
        "choices in the parentheses",
    ),
    "an objective class": (
        lambda: m.ibaml(mlp_model(), objective=QueryNll),
        "objective must be an object, not a class: write objective=QueryNll(), with its "
        "choices in the parentheses",
    ),
    "a likelihood class": (
        lambda: m.ibaml(mlp_model(), likelihood=Gaussian),
        "likelihood must be an object, not a class: write likelihood=Gaussian(), with its "
        "choices in the parentheses",
    ),
    "a curvature class": (
        lambda: Implicit(Curvature),
        "curvature must be an object, not a class: write curvature=Curvature(), with its "
        "choices in the parentheses",
    ),
    "a linear solver class": (
        lambda: Implicit(linear_solver=Dense),
        "linear_solver must be an object, not a class: write linear_solver=Dense(), with its "
        "choices in the parentheses",
    ),
    "a likelihood as belief": (
        lambda: made(belief=Categorical()),
        "belief must be an object such as DiagonalGaussian(); got Categorical(…), which is a "
        "likelihood: it goes into likelihood=",
    ),
    "a solver as belief": (
        lambda: made(belief=Adam()),
        "belief must be an object such as DiagonalGaussian(); got Adam(…), which is a solver:"
        " it goes into solver=",
    ),
    "a belief as solver": (
        lambda: made(solver=Point()),
        "solver must be an object such as NewtonCG(); got Point(…), which is a belief: it "
        "goes into belief=",
    ),
    "a gradient rule as objective": (
        lambda: m.ibaml(mlp_model(), objective=Implicit()),
        "objective must be an object such as QueryNll(); got Implicit(…), which is a gradient"
        " rule: it goes into gradient=",
    ),
    "an objective as gradient rule": (
        lambda: m.ibaml(mlp_model(), gradient=QueryNll()),
        "gradient must be an object such as Implicit(); got QueryNll(…), which is an "
        "objective: it goes into objective=",
    ),
    "a linear solver as solver": (
        lambda: m.ibaml(mlp_model(), solver=ConjugateGradient()),
        "solver must be an object such as NewtonCG(); got ConjugateGradient(…), which is a "
        "linear solver: it goes into gradient=Implicit(linear_solver=…)",
    ),
    "an objective as likelihood": (
        lambda: m.ibaml(mlp_model(), likelihood=QueryNll()),
        "likelihood must be an object such as Categorical() or Gaussian(), or any callable "
        "(outputs, y) -> nll per example; got QueryNll(…), which is an objective: it goes "
        "into objective=",
    ),
    "a linear solver as likelihood": (
        lambda: m.ibaml(mlp_model(), likelihood=Dense()),
        "likelihood must be an object such as Categorical() or Gaussian(), or any callable "
        "(outputs, y) -> nll per example; got Dense(…), which is a linear solver: it goes "
        "into gradient=Implicit(linear_solver=…)",
    ),
    "a gradient rule as likelihood": (
        lambda: m.ibaml(mlp_model(), likelihood=Implicit()),
        "likelihood must be an object such as Categorical() or Gaussian(), or any callable "
        "(outputs, y) -> nll per example; got Implicit(…), which is a gradient rule: it goes "
        "into gradient=",
    ),
    "a likelihood as objective": (
        lambda: m.ibaml(mlp_model(), objective=Categorical()),
        "objective must be an object such as QueryNll(); got Categorical(…), which is a "
        "likelihood: it goes into likelihood=",
    ),
    "a likelihood as gradient rule": (
        lambda: m.ibaml(mlp_model(), gradient=Categorical()),
        "gradient must be an object such as Implicit(); got Categorical(…), which is a "
        "likelihood: it goes into likelihood=",
    ),
    "a solver as likelihood": (
        lambda: m.ibaml(mlp_model(), likelihood=Adam()),
        "likelihood must be an object such as Categorical() or Gaussian(), or any callable "
        "(outputs, y) -> nll per example; got Adam(…), which is a solver: it goes into "
        "solver=",
    ),
    "a belief as gradient rule": (
        lambda: m.ibaml(mlp_model(), gradient=DiagonalGaussian()),
        "gradient must be an object such as Implicit(); got DiagonalGaussian(…), which is a "
        "belief: it goes into belief=",
    ),
    "a word for a curvature": (
        lambda: Implicit("energy"),
        "curvature must be an object such as Curvature(\"ggn\"); got 'energy': write "
        'Curvature("energy")',
    ),
    "a curvature as linear solver": (
        lambda: Implicit(linear_solver=Curvature("energy")),
        "linear_solver must be an object such as ConjugateGradient(); got Curvature(…), which"
        " is a curvature: it goes into gradient=Implicit(curvature=…)",
    ),
    "a word for newton's curvature": (
        lambda: NewtonCG(curvature="energy"),
        "curvature must be an object such as Curvature(\"ggn\"); got 'energy': write "
        'Curvature("energy")',
    ),
    "an object for the word of a curvature": (
        lambda: m.ibaml(mlp_model(), curvature=Curvature("energy")),
        "curvature is one of the words energy, ggn, lemma here: give an object to "
        "gradient=Implicit(Curvature(…))",
    ),
    "a word for the learner's solver": (
        lambda: made(solver="newton"),
        "solver must be an object such as NewtonCG(); got 'newton' (ibaml.methods take words)",
    ),
    "no belief": (
        lambda: made(belief=None),
        "belief must be an object such as DiagonalGaussian(); got None",
    ),
    "a word for a gradient rule": (
        lambda: made(gradient="implicit"),
        "gradient must be an object such as Implicit(); got 'implicit'",
    ),
    "a float for cg_steps": (
        lambda: m.ibaml(mlp_model(), cg_steps=2.0),
        "cg_steps must be a whole number, 1 or more; got 2.0: write 2",
    ),
    "a fraction for cg_steps": (
        lambda: m.ibaml(mlp_model(), cg_steps=2.5),
        "cg_steps must be a whole number, 1 or more; got 2.5",
    ),
    "a flag for steps": (
        lambda: m.maml(mlp_model(), steps=True),
        "steps must be a whole number, 0 or more; got True",
    ),
    "a number of numpy for steps": (
        lambda: m.maml(mlp_model(), steps=np.int64(3)),
        "steps must be a whole number, 0 or more; got np.int64(3): write 3",
    ),
    "a text for lr": (
        lambda: m.maml(mlp_model(), lr="0.1"),
        "lr must be a finite number, above 0; got '0.1': write 0.1",
    ),
    "NaN for lr": (
        lambda: m.maml(mlp_model(), lr=NAN),
        "lr must be a finite number, above 0; got nan",
    ),
    "a text for one of several lr": (
        lambda: m.maml(mlp_model(), lr={"*": "fast"}),
        "lr['*'] must be a finite number, above 0; got 'fast'",
    ),
    "NaN for beta": (
        lambda: m.ibaml(mlp_model(), beta=NAN),
        "beta must be a finite number, above 0; got nan",
    ),
    "NaN for lam": (
        lambda: m.imaml(mlp_model(), lam=NAN),
        "lam must be a finite number, 0 or more; got nan",
    ),
    "a text for lam": (
        lambda: m.imaml(mlp_model(), lam="1"),
        "lam must be a finite number, 0 or more; got '1': write 1",
    ),
    "NaN for damping": (
        lambda: m.ibaml(mlp_model(), damping=NAN),
        "damping must be a finite number, 0 or more; got nan",
    ),
    "a text for init_log_var": (
        lambda: m.ibaml(mlp_model(), init_log_var="-5"),
        "init_log_var must be a finite number, -80 or more and 80 or less; got '-5': write -5",
    ),
    "a typo names the method": (
        lambda: m.fomaml(mlp_model(), stepz=5),
        "fomaml has no option 'stepz'; did you mean steps? (it has adapt, capture, data, "
        "diagnose, execution, freeze, gradient, likelihood, lr, objective, precision, solver,"
        " steps, tie_head)",
    ),
    "an option nobody has": (
        lambda: m.fomaml(mlp_model(), xyzzy=5),
        "fomaml has no option 'xyzzy' (it has adapt, capture, data, diagnose, execution, "
        "freeze, gradient, likelihood, lr, objective, precision, solver, steps, tie_head)",
    ),
    "nearly a solver": (
        lambda: m.ibaml(mlp_model(), solver="newtn"),
        "solver must be one of newton, descent, polyak, natural, adam, dual, head; got 'newtn'; "
        "did you mean newton?",
    ),
    "nearly an objective": (
        lambda: m.ibaml(mlp_model(), objective="querry"),
        "objective must be one of query, predictive, abml; got 'querry'; did you mean query?",
    ),
    "nearly a noise": (
        lambda: m.ibaml(mlp_model(), noise="antithetical"),
        "noise must be one of independent, antithetic, outputs; got 'antithetical'; did you mean "
        "antithetic?",
    ),
    "nearly a curvature": (
        lambda: m.ibaml(mlp_model(), curvature="gnn"),
        "curvature must be one of energy, ggn, lemma; got 'gnn'; did you mean ggn?",
    ),
    "nearly an execution": (
        lambda: m.ibaml(mlp_model(), execution="folds"),
        "execution must be one of auto, loop, single, vmap, fold, head; got 'folds'; did you "
        "mean fold?",
    ),
    "nearly a precision": (
        lambda: m.ibaml(mlp_model(), precision="float16"),
        "precision must be one of full, bfloat16; got 'float16'; did you mean bfloat16?",
    ),
    "a number for adapt": (
        lambda: m.ibaml(mlp_model(), adapt=3),
        'adapt must be "all", "head", "last", a name or pattern of weights, several of them, or a '
        "predicate (name, parameter) -> bool; got int",
    ),
    "a module for adapt": (
        lambda: m.ibaml(mlp_model(), adapt=nn.Linear(1, 1)),
        'adapt must be "all", "head", "last", a name or pattern of weights, several of them, or a '
        "predicate (name, parameter) -> bool; got Linear",
    ),
    "a word for tie_head": (
        lambda: m.ibaml(mlp_model(), tie_head="yes"),
        "tie_head must be True or False; got 'yes'",
    ),
    "a word for capture": (
        lambda: m.ibaml(mlp_model(), capture="yes"),
        "capture must be True, False or None; got 'yes'",
    ),
    "a number for diagnose": (
        lambda: m.ibaml(mlp_model(), diagnose=1),
        "diagnose must be True or False; got 1",
    ),
    "a class for the model": (
        lambda: m.ibaml(nn.Linear),
        "model must be an object, not a class: write Linear(…)",
    ),
    "a name for data": (
        lambda: m.ibaml(mlp_model(), data="omniglot"),
        "data must be a dataset or a source of tasks, such as ibaml.tasks.glyphs(); got str: "
        "write ibaml.tasks.open_data('omniglot')",
    ),
    "a belief for maml": (
        lambda: m.maml(mlp_model(), belief=DiagonalGaussian()),
        "belief is read by ibaml, abml, and the method is maml: leave it out",
    ),
    "a text for ways": (
        lambda: ibaml.nn.conv4(ways="5"),
        "ways must be a whole number, 1 or more; got '5': write 5",
    ),
    "one width": (
        lambda: ibaml.nn.mlp(1, 1, hidden=40),
        "hidden must be whole numbers such as (40, 40); got 40",
    ),
    "widths as a text": (
        lambda: ibaml.nn.mlp(1, 1, hidden="40,40"),
        "hidden must be whole numbers such as (40, 40); got '40,40'",
    ),
    "a float among widths": (
        lambda: ibaml.nn.mlp(1, 1, hidden=(40, 40.0)),
        "hidden[1] must be a whole number, 1 or more; got 40.0: write 40",
    ),
    "nearly an activation": (
        lambda: ibaml.nn.mlp(1, 1, activation="rellu"),
        "activation must be one of relu, tanh, gelu, silu, softplus; got 'rellu'; did you "
        "mean relu?",
    ),
    "an unknown norm": (
        lambda: ibaml.nn.conv4(5, norm="layer"),
        "norm must be one of batch, group, none; got 'layer'",
    ),
    "too few widths": (
        lambda: ibaml.nn.resnet12(5, widths=(64, 64)),
        "widths needs four entries, one per block, got [64, 64]",
    ),
    "an image too small": (
        lambda: ibaml.nn.conv4(5, image_size=8),
        "image_size must be 16 or more (four poolings halve it), got 8",
    ),
    "a float for ways": (
        lambda: ibaml.nn.conv4(5.0),
        "ways must be a whole number, 1 or more; got 5.0: write 5",
    ),
    "replace by a class": (
        lambda: plain_learner("ibaml", mlp_model()).replace(solver=NewtonCG),
        "solver must be an object, not a class: write solver=NewtonCG(), with its choices in "
        "the parentheses",
    ),
    "replace by a word": (
        lambda: plain_learner("ibaml", mlp_model()).replace(solver="newton"),
        "solver must be an object such as NewtonCG(); got 'newton' (ibaml.methods take words)",
    ),
    "replace by another kind": (
        lambda: plain_learner("ibaml", mlp_model()).replace(gradient=QueryNll()),
        "gradient must be an object such as Implicit(); got QueryNll(…), which is an "
        "objective: it goes into objective=",
    ),
    "replace by nearly a word": (
        lambda: plain_learner("ibaml", mlp_model()).replace(objective="queri"),
        "objective must be one of query, predictive, abml; got 'queri'; did you mean query?",
    ),
    "replace by a flag": (
        lambda: plain_learner("ibaml", mlp_model()).replace(samples=True),
        "samples must be a whole number, 1 or more; got True",
    ),
    "a float for steps of neumann": (
        lambda: Neumann(steps=2.0),
        "steps must be a whole number, 0 or more; got 2.0: write 2",
    ),
    "a tensor for noise": (
        lambda: Gaussian(torch.tensor(0.3)),
        "noise must be a finite number, above 0; got tensor(0.3000): write 0.30000001192092896",
    ),
    "nearly a temperature": (
        lambda: Categorical("learnd"),
        'temperature must be a positive number, "learned", "fitted" or "both", got \'learnd\'',
    ),
    "temperature zero": (
        lambda: Categorical(0),
        'temperature must be a positive number, "learned", "fitted" or "both", got 0',
    ),
    "natural descent by its word": (
        lambda: m.imaml(mlp_model(), solver="natural"),
        "NaturalDescent moves log-variances: it needs a diagonal Gaussian belief",
    ),
    "newton by its word": (
        lambda: m.maml(mlp_model(), solver="newton"),
        "NewtonCG cannot be unrolled: use GradientDescent, NaturalDescent or Adam, or the "
        "implicit rule",
    ),
    "a step size for newton": (
        lambda: m.ibaml(mlp_model(), solver="newton", lr=0.1),
        "lr is not read by solver newton, which has a line search",
    ),
}


OPTIONS |= {
    "a class for implicit_solve's solver": (
        lambda: ibaml.implicit_solve(lambda v, p: v, ONE, ONE, solver=NewtonCG),
        "solver must be an object, not a class: write solver=NewtonCG(), with its choices in the "
        "parentheses",
    ),
    "another kind for implicit_solve's curvature": (
        lambda: ibaml.implicit_solve(lambda v, p: v, ONE, ONE, curvature=Dense()),
        'curvature must be an object such as Curvature("ggn"); got Dense(…), which is a linear '
        "solver: it goes into gradient=Implicit(linear_solver=…)",
    ),
    "another kind for implicit_solve's linear solver": (
        lambda: ibaml.implicit_solve(lambda v, p: v.sum(), ONE, ONE, linear_solver=NewtonCG()),
        "linear_solver must be an object such as ConjugateGradient(); got NewtonCG(…), which is a "
        "solver: it goes into solver=",
    ),
    "samples of a posterior in closed form": (
        lambda: m.ibaml(mlp_model(), posterior="full", samples=3),
        'samples is not read by posterior="full", which is in closed form: leave it out, or use '
        'posterior="diagonal"',
    ),
    "posterior and belief": (
        lambda: m.ibaml(mlp_model(), posterior="full", belief=FullGaussian()),
        "posterior and belief were both given: choose it in the belief alone",
    ),
    "nearly a posterior": (
        lambda: m.ibaml(mlp_model(), posterior="ful"),
        "posterior must be one of diagonal, low_rank, full, class_means, point, prototypes, "
        "ridge, gp; got 'ful'; did you mean full?",
    ),
    "lam and beta": (
        lambda: m.ibaml(mlp_model(), lam=0.1, beta=0.1),
        "lam and beta both set the strength of the prior: give one of them",
    ),
    "a solver that is not the posterior's": (
        lambda: m.ibaml(mlp_model(), posterior="full", solver=NewtonCG()),
        "a full-covariance posterior and the solver DualNewton belong together: use "
        'posterior="full" and leave solver out, or another solver and posterior="diagonal"',
    ),
}


@pytest.mark.parametrize(("build", "sentence"), list(OPTIONS.values()), ids=list(OPTIONS))
def test_options(build, sentence):
    with pytest.raises((ValueError, TypeError)) as refused:
        build()
    assert str(refused.value) == sentence


def test_words_mean_what_they_mean_on_the_command_line():
    settings = {"solver": "natural", "objective": "predictive", "noise": "independent"}
    learner = m.ibaml(mlp_model(), curvature="energy", block="mean", execution="loop", **settings)
    assert isinstance(learner.solver, NaturalDescent)
    assert learner.objective == PredictiveNll()
    assert learner.noise == "independent"
    assert learner.gradient.curvature == Curvature("energy", block="mean")
    assert learner.execution == "loop"
    assert m.maml(mlp_model(), objective="query").objective == QueryNll()
    assert m.ibaml(mlp_model(), objective="abml").objective == Abml()
    assert learner.replace(objective="query").objective == QueryNll()
    assert made(objective="predictive").objective == PredictiveNll()


@pytest.mark.parametrize("word", ["newton", "descent", "natural", "adam"])
def test_a_word_is_the_solver_that_training_makes_of_it(word):
    given = {} if word == "newton" else {"inner_lr": 0.05}
    from ibaml.training import resolve
    from ibaml.training.build import build_learner

    settings = resolve({"solver": word, "steps": 3, **given})
    options = {} if word == "newton" else {"lr": 0.05}
    built = build_learner(settings, mlp_model())
    assert m.ibaml(mlp_model(), solver=word, steps=3, **options).solver == built.solver


def test_parts_of_ones_own_are_taken():
    """Of any class: what counts is what an object can do."""

    class Steepest:
        steps = 1

        def solve(self, energy, start, *, rate=None, examine=True):
            return GradientDescent(1, 0.01).solve(energy, start, rate=rate, examine=examine)

    class Rule:
        def __call__(self, energy, start, solver, record, *, rate=None, examine=True):
            return FirstOrder()(energy, start, solver, record, rate=rate, examine=examine)

    class Loss:
        samples = None
        noise = "fresh"

        def __call__(self, v, support, query):
            return QueryNll()(v, support, query)

    def nll(outputs, y, weight=1.0):
        return weight * nn.functional.cross_entropy(outputs, y, reduction="none")

    def solved(products, right, diagonal=None):
        return Dense()(products, right, diagonal)

    learner = made(
        solver=Steepest(),
        gradient=Implicit(linear_solver=solved),
        objective=Loss(),
        likelihood=nll,
        samples=2,
    )
    learner(class_batch((3,))).backward()
    learner.replace(gradient=Rule())(class_batch((3,))).backward()
    made(belief=DiagonalGaussian(), likelihood=nn.CrossEntropyLoss(reduction="none"))


def test_a_belief_may_be_given_to_a_method():
    assert m.ibaml(mlp_model(), belief=Point(lam=2.0)).belief == Point(lam=2.0)


class TestPosterior:
    """Which posterior a head has, and what goes with it."""

    def test_a_head_is_solved_in_closed_form(self):
        learner = m.ibaml(mlp_model())
        assert isinstance(learner.belief, FullGaussian)
        assert learner.solver == DualNewton()
        assert learner.objective == PredictiveNll()
        assert learner.belief.kappa == pytest.approx(0.3 * math.exp(-5.0))
        assert m.ibaml(mlp_model(), beta=0.1).belief == FullGaussian()
        assert m.ibaml(mlp_model(), learn_beta=True).beta == 0.01
        assert m.ibaml(mlp_model(), likelihood=Gaussian(0.3)).beta == 1.0
        assert not learner.layout.rows  # targets may be numbers
        assert m.ibaml(mlp_model(), likelihood=Categorical()).layout.rows
        assert m.ibaml(mlp_model(), steps=7, solver="dual").solver == DualNewton(steps=7)

    @pytest.mark.parametrize(
        "given",
        [
            {"adapt": "all"}, {"samples": 3}, {"noise": "independent"}, {"steps": 3}, {"lr": 0.1},
            {"solver": "newton"}, {"solver": NewtonCG()}, {"cg_steps": 4}, {"damping": 0.1},
            {"gradient": Unrolled()}, {"execution": "loop"}, {"objective": "abml"},
            {"likelihood": lambda outputs, y: outputs.square().sum(-1)},
        ],
    )  # fmt: skip
    def test_what_describes_draws_or_descent_selects_the_diagonal_posterior(self, given):
        assert isinstance(m.ibaml(mlp_model(), **given).belief, DiagonalGaussian)

    def test_by_name(self):
        assert m.ibaml(mlp_model(), posterior="diagonal").belief == DiagonalGaussian()
        assert m.ibaml(mlp_model(), posterior="low_rank").belief == LowRankGaussian()
        assert m.ibaml(mlp_model(), belief=LowRankGaussian(2)).belief == LowRankGaussian(2)
        assert isinstance(m.ibaml(mlp_model(), belief=FullGaussian()).solver, DualNewton)

    def test_the_strength_of_the_prior_instead_of_beta(self):
        for posterior in ("diagonal", "full"):
            learner = m.ibaml(mlp_model(), posterior=posterior, lam=0.02, init_log_var=-1.0)
            assert learner.belief.weight(1.0, 5) == pytest.approx(0.02 * math.exp(-1.0))
            assert learner.belief.weight(1.0, 50) == learner.belief.weight(1.0, 5)

    def test_a_beta_that_nothing_would_read_is_refused(self):
        with pytest.raises(ValueError, match=r"beta is not read here, where κ is 0\.002"):
            m.ibaml(mlp_model()).replace(beta=0.5)
        assert m.ibaml(mlp_model(), beta=0.1).replace(beta=0.5).beta == 0.5
