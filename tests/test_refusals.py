"""Wrong options and wrong data are refused in a sentence, before any work is done."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import ibaml
from ibaml import (
    Abml,
    Adam,
    FirstOrder,
    Gaussian,
    GradientDescent,
    Implicit,
    NaturalDescent,
    NewtonCG,
    QueryNll,
    Reptile,
    TaskBatch,
    Unrolled,
)
from problems import class_batch, mlp_model

m = ibaml.methods


def frozen() -> nn.Module:
    return mlp_model().requires_grad_(False)


OPTIONS = {
    "implicit without a prior": (lambda: m.maml(mlp_model(), gradient=Implicit()), "prior"),
    "imaml with lambda zero": (lambda: m.imaml(mlp_model(), lam=0.0), "prior"),
    "negative lambda": (lambda: m.imaml(mlp_model(), lam=-1.0), "lam"),
    "learned step size under implicit": (
        lambda: m.ibaml(mlp_model(), solver=GradientDescent(5, 0.1, learn_lr=True)),
        "step size",
    ),
    "learned step size under first order": (
        lambda: m.fomaml(mlp_model(), solver=GradientDescent(5, 0.1, learn_lr=True)),
        "step size",
    ),
    "negative beta": (lambda: m.ibaml(mlp_model(), beta=-0.5), "beta"),
    "beta zero": (lambda: m.ibaml(mlp_model(), beta=0.0), "beta"),
    "zero samples": (lambda: m.ibaml(mlp_model(), samples=0), "samples"),
    "unknown noise": (lambda: m.ibaml(mlp_model(), noise="sobol"), "noise"),
    "infinite variance": (lambda: m.ibaml(mlp_model(), init_log_var=float("inf")), "init_log_var"),
    "reptile without steps": (lambda: m.reptile(mlp_model(), steps=0), "steps=0"),
    "reptile with shared weights": (lambda: m.reptile(mlp_model(), adapt="head"), "shared"),
    "no trainable parameters": (lambda: m.maml(frozen()), "no trainable parameters"),
    "no parameters at all": (lambda: m.maml(nn.ReLU()), "no trainable parameters"),
    "not a module": (lambda: m.maml(lambda x: x), "nn.Module"),
    "negative steps": (lambda: m.maml(mlp_model(), steps=-1), "steps"),
    "negative lr": (lambda: m.maml(mlp_model(), lr=-0.1), "lr"),
    "negative cg steps": (lambda: m.ibaml(mlp_model(), cg_steps=-1), "steps"),
    "unknown curvature": (lambda: m.ibaml(mlp_model(), curvature="fisher"), "curvature"),
    "negative damping": (lambda: m.ibaml(mlp_model(), damping=-1.0), "damping"),
    "unknown block": (lambda: m.ibaml(mlp_model(), block="variance"), "block"),
    "lemma for a point": (lambda: m.imaml(mlp_model(), curvature="lemma"), "lemma"),
    "solver and steps": (lambda: m.maml(mlp_model(), solver=Adam(), steps=3), "solver"),
    "gradient and cg steps": (
        lambda: m.ibaml(mlp_model(), gradient=FirstOrder(), cg_steps=3),
        "cg_steps",
    ),
    "unrolled newton": (lambda: m.maml(mlp_model(), solver=NewtonCG()), "unrolled"),
    "natural descent for a point": (
        lambda: m.maml(mlp_model(), solver=NaturalDescent()),
        "Gaussian",
    ),
    "abml objective for a point": (lambda: m.maml(mlp_model(), objective=Abml()), "Gaussian"),
    "adapt nothing": (lambda: m.maml(mlp_model(), adapt="hed.*"), "adapt.*hed"),
    "adapt by an empty predicate": (lambda: m.maml(mlp_model(), adapt=lambda n, p: False), "adapt"),
    "adapt and freeze the same": (
        lambda: m.maml(mlp_model(), adapt="0", freeze="0.weight"),
        "both",
    ),
    "head of a network without one": (lambda: m.maml(nn.Conv2d(1, 1, 1), adapt="head"), "no head"),
    "tied head that is shared": (lambda: m.maml(mlp_model(), adapt="0", tie_head=True), "tie_head"),
    "unknown execution": (lambda: m.maml(mlp_model(), execution="fast"), "execution"),
    "unknown option": (lambda: m.maml(mlp_model(), step=3), "step"),
    "likelihood that is none": (lambda: m.maml(mlp_model(), likelihood="gaussian"), "likelihood"),
    "noise that is not positive": (lambda: Gaussian(noise=0.0), "noise"),
    "objective without samples": (lambda: QueryNll(samples=0), "samples"),
    "objective with unknown noise": (lambda: QueryNll(noise="new"), "noise"),
    "shared noise with samples": (lambda: QueryNll(samples=2, noise="shared"), "shared"),
    "abml without tasks": (lambda: Abml(tasks=0), "tasks"),
    "eta out of range": (lambda: NaturalDescent(eta=1.5), "eta"),
    "tolerance zero": (lambda: GradientDescent(tol=0.0), "tol"),
    "newton on the lemma": (lambda: NewtonCG(curvature=ibaml.Curvature("lemma")), "ggn"),
}


@pytest.mark.parametrize(("build", "word"), list(OPTIONS.values()), ids=list(OPTIONS))
def test_options(build, word):
    with pytest.raises((ValueError, TypeError), match=word):
        build()


def test_step_sizes_must_name_every_weight_and_no_other():
    batch = class_batch((3,))
    with pytest.raises(ValueError, match=r"2\.weight"):
        m.maml(mlp_model(), lr={"0.*": 0.1})(batch)
    with pytest.raises(ValueError, match="3"):
        m.maml(mlp_model(), lr={"*": 0.1, "3.*": 0.2})(batch)


def sound() -> dict[str, torch.Tensor]:
    batch = class_batch((3,))
    return {
        name: getattr(batch, name).clone()
        for name in ("support_x", "support_y", "query_x", "query_y")
    }


def with_value(name: str, value: float):
    def change(fields):
        fields[name].view(-1)[0] = value

    return change


def replaced(name: str, function):
    def change(fields):
        fields[name] = function(fields[name])

    return change


DATA = {
    "negative label": (with_value("support_y", -1), r"support_y has label -1"),
    "query label out of range": (with_value("query_y", 3), r"query_y has label 3"),
    "support label out of range": (with_value("support_y", 99), r"support_y has label 99"),
    "NaN input": (with_value("support_x", float("nan")), r"support_x.*task 0"),
    "infinite query": (with_value("query_x", float("inf")), r"query_x"),
    "tasks differ": (replaced("query_x", lambda t: t[:1]), r"\(2, 6, 3\).*\(1, 6, 3\)"),
    "examples differ": (replaced("support_y", lambda t: t[:, :4]), r"\(2, 6, 3\).*\(2, 4\)"),
    "inputs differ": (replaced("query_x", lambda t: t[..., :2]), r"\(2, 6, 3\).*\(2, 6, 2\)"),
    "dtypes differ": (replaced("query_x", lambda t: t.float()), r"float64.*float32"),
    "target kinds differ": (replaced("query_y", lambda t: t.double()), r"int64.*float64"),
    "devices differ": (replaced("query_y", lambda t: t.to("meta")), r"devices.*query_y on meta"),
    "no task dimension": (replaced("support_y", lambda t: t[0]), r"support_y.*\(6,\)"),
    "no examples": (replaced("support_x", lambda t: t[:, :0]), r"support_x"),
    "not a tensor": (replaced("support_x", lambda t: t.tolist()), r"support_x"),
}


@pytest.mark.parametrize(("change", "message"), list(DATA.values()), ids=list(DATA))
def test_data(change, message):
    fields = sound()
    change(fields)
    with pytest.raises((ValueError, TypeError), match=message):
        TaskBatch(**fields)


def test_sound_data_passes_and_validation_can_be_skipped():
    assert len(TaskBatch(**sound())) == 2
    fields = sound()
    fields["support_x"][0, 0] = float("nan")
    TaskBatch(**fields, validate=False)
    with pytest.raises(ValueError, match="keys"):
        TaskBatch(**sound(), keys=[1, 2, 3])


def test_mixed_floating_dtypes_of_inputs_and_targets():
    x = torch.zeros(1, 2, 3)
    y = torch.zeros(1, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"support_x is \S*float32, support_y is \S*float64"):
        TaskBatch(x, y, x, y)


class TestTheModelAndTheTasksDisagree:
    """Found at the first call, before a step is taken, and named."""

    def test_more_classes_than_outputs(self):
        learner = m.maml(mlp_model(ways=2))
        with pytest.raises(ValueError, match="label 2 is out of range: the model has 2 outputs"):
            learner(class_batch((3,), ways=3))
        batch = class_batch((3,), ways=3)
        with pytest.raises(ValueError, match="out of range"):
            learner.adapt(batch.support_x[0], batch.support_y[0])

    def test_dtype(self):
        with pytest.raises(ValueError, match=re.escape("batch.to(torch.float64)")):
            m.maml(mlp_model())(class_batch((3,)).to(torch.float32))

    def test_input_shape(self):
        with pytest.raises(ValueError, match=r"does not run on.*\(6, 4\)"):
            m.maml(mlp_model())(class_batch((4,)))

    def test_target_shape(self):
        x = torch.zeros(1, 2, 3, dtype=torch.float64)
        with pytest.raises(ValueError, match="do not fit targets"):
            m.maml(mlp_model())(TaskBatch(x, x[..., :2], x, x[..., :2]))

    def test_outputs_that_are_not_one_tensor(self):
        class Pair(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(3, 3).double()

            def forward(self, x):
                return self.linear(x), x

        with pytest.raises(ValueError, match="one tensor is needed"):
            m.maml(Pair())(class_batch((3,)))

    def test_a_reduced_loss(self):
        learner = m.maml(mlp_model(), likelihood=nn.CrossEntropyLoss())
        with pytest.raises(ValueError, match="one nll per example"):
            learner(class_batch((3,)))


def test_adapt_refuses_bad_data():
    learner = m.ibaml(mlp_model())
    x = torch.zeros(4, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"\(4, 3\).*\(3,\)"):
        learner.adapt(x, torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="NaN"):
        learner.adapt(x * float("nan"), torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match="norm_stats"):
        learner.adapt(x, torch.zeros(4, dtype=torch.long), norm_stats="layer")


def test_a_stiff_prior_is_announced_before_it_diverges():
    learner = m.ibaml(mlp_model(), init_log_var=-9.5, lr=0.1)
    with pytest.warns(RuntimeWarning, match="lower lr or beta, or raise init_log_var"):
        learner(class_batch((3,)))


def test_rules_accept_what_they_should():
    for rule in (Unrolled(), FirstOrder(), Implicit()):
        m.ibaml(mlp_model(), gradient=rule)
    m.maml(mlp_model(), gradient=Reptile())
