"""Wrong options and wrong data are refused in a sentence, before any work is done."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import ibaml
from ibaml import (
    FirstOrder,
    Implicit,
    Reptile,
    TaskBatch,
    Unrolled,
)
from problems import class_batch, mlp_model, plain_learner

m = ibaml.methods


def test_step_sizes_must_name_every_weight_and_no_other():
    batch = class_batch((3,))
    with pytest.raises(ValueError, match=r"lr gives no step size for '2\.weight': add it"):
        m.maml(mlp_model(), lr={"0.*": 0.1})(batch)
    with pytest.raises(ValueError, match=r"lr: no weight matches '3\.\*'"):
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
    "negative label": (with_value("support_y", -1), r"support_y has label -1; labels are 0"),
    "query label out of range": (
        with_value("query_y", 3),
        r"query_y has label 3, out of range: the largest label in support_y is 2",
    ),
    "support label out of range": (
        with_value("support_y", 99),
        r"support_y has label 99 with 6 examples a task, so some class has none",
    ),
    "NaN input": (
        with_value("support_x", float("nan")),
        r"support_x holds a NaN or an infinity \(first in task 0\)",
    ),
    "infinite query": (with_value("query_x", float("inf")), r"query_x holds a NaN or an infinity"),
    "tasks differ": (
        replaced("query_x", lambda t: t[:1]),
        r"the number of tasks differs: .*\(2, 6, 3\).*\(1, 6, 3\)",
    ),
    "examples differ": (
        replaced("support_y", lambda t: t[:, :4]),
        r"the number of examples differs: .*\(2, 6, 3\).*\(2, 4\)",
    ),
    "inputs differ": (
        replaced("query_x", lambda t: t[..., :2]),
        r"one example differs in shape: .*\(2, 6, 3\).*\(2, 6, 2\)",
    ),
    "dtypes differ": (
        replaced("query_x", lambda t: t.float()),
        r"mixed dtypes: support_x is \S*float64, query_x is \S*float32",
    ),
    "target kinds differ": (
        replaced("query_y", lambda t: t.double()),
        r"mixed dtypes: support_y is \S*int64, query_y is \S*float64",
    ),
    "devices differ": (
        replaced("query_y", lambda t: t.to("meta")),
        r"mixed devices: .*query_y on meta; move the batch with",
    ),
    "no task dimension": (
        replaced("support_y", lambda t: t[0]),
        r"support_y needs the dimensions \(tasks, examples, …\), got shape \(6,\)",
    ),
    "no examples": (
        replaced("support_x", lambda t: t[:, :0]),
        r"support_x has no tasks or no examples",
    ),
    "empty examples": (
        replaced("support_x", lambda t: t[..., :0]),
        r"one example of support_x is empty",
    ),
    "labels in a column": (
        lambda fields: fields.update(
            {name: fields[name][..., None] for name in ("support_y", "query_y")}
        ),
        r"support_y has shape \(2, 6, 1\), and class labels are .*support_y\.squeeze",
    ),
    "not a tensor": (
        replaced("support_x", lambda t: t.tolist()),
        r"support_x must be a tensor, got list",
    ),
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
    with pytest.raises(ValueError, match="keys has 3 entries for 2 tasks"):
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
        with pytest.raises(ValueError, match="label 2 is out of range: the model has 2 outputs"):
            learner.adapt(batch.support_x[0], batch.support_y[0])

    def test_dtype(self):
        with pytest.raises(ValueError, match=re.escape("batch.to(torch.float64)")):
            plain_learner("maml", mlp_model())(class_batch((3,)).to(torch.float32))

    def test_input_shape(self):
        with pytest.raises(ValueError, match=r"does not run on.*\(6, 4\)"):
            plain_learner("maml", mlp_model())(class_batch((4,)))

    def test_target_shape(self):
        x = torch.zeros(1, 2, 3, dtype=torch.float64)
        with pytest.raises(ValueError, match="do not match targets of"):
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
    with pytest.raises(ValueError, match=r"one entry per example: .*\(4, 3\).*\(3,\)"):
        learner.adapt(x, torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="x holds a NaN or an infinity"):
        learner.adapt(x * float("nan"), torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"norm_stats must be one of .*got 'layer'"):
        learner.adapt(x, torch.zeros(4, dtype=torch.long), norm_stats="layer")


def test_a_stiff_prior_is_announced_before_it_diverges():
    learner = plain_learner("ibaml", mlp_model(), init_log_var=-9.5, lr=0.1)
    with pytest.warns(RuntimeWarning, match="lower lr or beta, or raise init_log_var"):
        learner(class_batch((3,)))


class TestMoreDisagreements:
    @pytest.mark.filterwarnings("ignore:.*a slower strategy is used")
    def test_a_model_that_is_random(self):
        class Random(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(3, 3).double()

            def forward(self, x):
                return self.linear(nn.functional.dropout(x))

        with pytest.raises(
            ValueError, match=r"the model .* is random: two passes over the same inputs differ"
        ):
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
        with pytest.raises(ValueError, match="a tied head needs to know the number of classes"):
            learner.adapt(x[0], x[0, :, 0])

    def test_a_change_of_dtype_is_noticed(self):
        learner = plain_learner("maml", mlp_model().float())
        batch = class_batch((3,)).to(torch.float32)
        learner(batch)
        learner.double()
        with pytest.raises(
            ValueError, match=r"the tasks are \S*float32 and the model is \S*float64: use batch\.to"
        ):
            learner(batch)

    def test_labels_and_types(self):
        learner = plain_learner("maml", mlp_model())
        with pytest.raises(TypeError, match="TaskBatch is needed, got tuple"):
            learner((1, 2))
        with pytest.raises(ValueError, match="label -1 is out of range: labels are 0"):
            learner.adapt(torch.zeros(2, 3).double(), torch.tensor([-1, 0]))
        with pytest.raises(ValueError, match="label 2 is out of range for classes=2"):
            TaskBatch(**sound(), classes=2)


def test_integer_targets_of_a_custom_loss_are_no_labels():
    """One logit and targets 0 or 1; counts of a Poisson."""

    def bce(outputs, y):
        return nn.functional.binary_cross_entropy_with_logits(
            outputs[:, 0], y.double(), reduction="none"
        )

    def trains(learner: ibaml.MetaLearner, batch: TaskBatch) -> bool:
        loss = learner(batch)
        loss.backward()
        slopes = [p.grad for p in learner.parameters()]
        return bool(loss.isfinite()) and all(g.isfinite().all() and g.any() for g in slopes)

    batch = class_batch((3,), ways=2)
    assert trains(plain_learner("ibaml", mlp_model(ways=1), likelihood=bce), batch)
    counts = TaskBatch(
        batch.support_x, batch.support_y * 40, batch.query_x, batch.query_y * 50, validate=False
    )
    poisson = nn.PoissonNLLLoss(reduction="none")
    learner = plain_learner(
        "ibaml", mlp_model(ways=1), likelihood=lambda f, y: poisson(f[:, 0], y.double()), steps=1
    )
    assert trains(learner, counts)


def test_rules_accept_what_they_should():
    for rule in (Unrolled(), FirstOrder(), Implicit()):
        assert plain_learner("ibaml", mlp_model(), gradient=rule).gradient is rule
    rule = Reptile()
    assert plain_learner("maml", mlp_model(), gradient=rule).gradient is rule
