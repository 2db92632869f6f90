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
from problems import class_batch, mlp_model, plain_learner

m = ibaml.methods


def frozen() -> nn.Module:
    return mlp_model().requires_grad_(False)


class TiedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


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
    "no cg steps": (lambda: m.ibaml(mlp_model(), cg_steps=0), "exactly zero"),
    "infinite damping": (lambda: m.ibaml(mlp_model(), damping=float("inf")), "damping"),
    "steps that are no number of steps": (lambda: m.maml(mlp_model(), steps=2.5), "steps"),
    "samples that are no number": (lambda: m.ibaml(mlp_model(), samples=2.5), "samples"),
    "log-variance out of float's range": (lambda: m.ibaml(mlp_model(), init_log_var=-800.0), "log"),
    "reptile with a meta-loss": (lambda: m.reptile(mlp_model(), objective=QueryNll()), "meta-loss"),
    "reptile with a learned noise": (
        lambda: m.reptile(mlp_model(), likelihood=Gaussian(1.0, learn=True)),
        "learn=False",
    ),
    "an option of another method": (
        lambda: m.maml(mlp_model(), cg_steps=3),
        "cg_steps is read by ibaml, imaml, and the method is maml: leave it out",
    ),
    "a typo": (lambda: m.ibaml(mlp_model(), adpat="head"), "did you mean adapt"),
    "head tied to an embedding": (
        lambda: m.ibaml(TiedHead(), adapt="all", tie_head=True),
        "shares a weight",
    ),
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
    "empty examples": (replaced("support_x", lambda t: t[..., :0]), r"example of support_x is emp"),
    "labels in a column": (
        lambda fields: fields.update(
            {name: fields[name][..., None] for name in ("support_y", "query_y")}
        ),
        r"support_y has shape \(2, 6, 1\).*support_y\.squeeze",
    ),
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
        learner = plain_learner("maml", mlp_model(ways=2))
        with pytest.raises(ValueError, match="label 2 is out of range: the model has 2 outputs"):
            learner(class_batch((3,), ways=3))
        batch = class_batch((3,), ways=3)
        with pytest.raises(ValueError, match="out of range"):
            learner.adapt(batch.support_x[0], batch.support_y[0])

    def test_dtype(self):
        with pytest.raises(ValueError, match=re.escape("batch.to(torch.float64)")):
            plain_learner("maml", mlp_model())(class_batch((3,)).to(torch.float32))

    def test_input_shape(self):
        with pytest.raises(ValueError, match=r"does not run on.*\(6, 4\)"):
            plain_learner("maml", mlp_model())(class_batch((4,)))

    def test_target_shape(self):
        x = torch.zeros(1, 2, 3, dtype=torch.float64)
        with pytest.raises(ValueError, match="do not fit targets"):
            plain_learner("maml", mlp_model())(TaskBatch(x, x[..., :2], x, x[..., :2]))

    def test_outputs_that_are_not_one_tensor(self):
        class Pair(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(3, 3).double()

            def forward(self, x):
                return self.linear(x), x

        with pytest.raises(ValueError, match="one tensor is needed"):
            plain_learner("maml", Pair())(class_batch((3,)))

    def test_a_reduced_loss(self):
        learner = plain_learner("maml", mlp_model(), likelihood=nn.CrossEntropyLoss())
        with pytest.raises(ValueError, match="one nll per example"):
            learner(class_batch((3,)))


def test_adapt_refuses_bad_data():
    learner = plain_learner("ibaml", mlp_model())
    x = torch.zeros(4, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"\(4, 3\).*\(3,\)"):
        learner.adapt(x, torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="NaN"):
        learner.adapt(x * float("nan"), torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match="norm_stats"):
        learner.adapt(x, torch.zeros(4, dtype=torch.long), norm_stats="layer")


def test_a_stiff_prior_is_announced_before_it_diverges():
    learner = plain_learner("ibaml", mlp_model(), init_log_var=-9.5, lr=0.1)
    with pytest.warns(RuntimeWarning, match="lower lr or beta, or raise init_log_var"):
        learner(class_batch((3,)))


class TestMoreDisagreements:
    @pytest.mark.filterwarnings("ignore:.*the slower way is taken")
    def test_a_model_that_is_random(self):
        class Random(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(3, 3).double()

            def forward(self, x):
                return self.linear(nn.functional.dropout(x))

        with pytest.raises(ValueError, match="is random"):
            plain_learner("maml", Random())(class_batch((3,)))

    def test_the_users_own_train_call_does_not_switch_dropout_on(self):
        net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
        learner = plain_learner("maml", net)
        batch = class_batch((3,))
        before = float(learner(batch).detach())
        net.train()
        assert float(learner(batch).detach()) == before

    def test_a_head_that_is_not_the_last_registered(self):
        class Odd(nn.Module):
            def __init__(self):
                super().__init__()
                self.classifier = nn.Linear(4, 3)
                self.encoder = nn.Linear(3, 4)

            def forward(self, x):
                return self.classifier(self.encoder(x))

        batch = class_batch((3,))
        with pytest.raises(ValueError, match=r"encoder with 4 outputs.*name the head"):
            plain_learner("ibaml", Odd().double(), adapt="head")(batch)
        plain_learner("ibaml", Odd().double(), adapt="classifier")(batch)

    def test_regression_with_a_tied_head(self):
        x = torch.zeros(1, 2, 3, dtype=torch.float64)
        learner = plain_learner("ibaml", mlp_model(), tie_head=True)
        with pytest.raises(ValueError, match="tie_head is for classification"):
            learner(TaskBatch(x, x[..., 0], x, x[..., 0]))
        with pytest.raises(ValueError, match="tied head"):
            learner.adapt(x[0], x[0, :, 0])

    def test_a_change_of_dtype_is_noticed(self):
        learner = plain_learner("maml", mlp_model().float())
        batch = class_batch((3,)).to(torch.float32)
        learner(batch)
        learner.double()
        with pytest.raises(ValueError, match="the tasks are"):
            learner(batch)

    def test_labels_and_types(self):
        learner = plain_learner("maml", mlp_model())
        with pytest.raises(TypeError, match="TaskBatch is needed, got tuple"):
            learner((1, 2))
        with pytest.raises(ValueError, match="label -1"):
            learner.adapt(torch.zeros(2, 3).double(), torch.tensor([-1, 0]))
        with pytest.raises(ValueError, match="classes=2"):
            TaskBatch(**sound(), classes=2)


def test_integer_targets_of_a_custom_loss_are_no_labels():
    """One logit and targets 0 or 1; counts of a Poisson."""

    def bce(outputs, y):
        return nn.functional.binary_cross_entropy_with_logits(
            outputs[:, 0], y.double(), reduction="none"
        )

    batch = class_batch((3,), ways=2)
    plain_learner("ibaml", mlp_model(ways=1), likelihood=bce)(batch).backward()
    counts = TaskBatch(
        batch.support_x, batch.support_y * 40, batch.query_x, batch.query_y * 50, validate=False
    )
    poisson = nn.PoissonNLLLoss(reduction="none")
    plain_learner(
        "ibaml", mlp_model(ways=1), likelihood=lambda f, y: poisson(f[:, 0], y.double()), steps=1
    )(counts).backward()


def test_rules_accept_what_they_should():
    for rule in (Unrolled(), FirstOrder(), Implicit()):
        plain_learner("ibaml", mlp_model(), gradient=rule)
    plain_learner("maml", mlp_model(), gradient=Reptile())
