"""Every way to run many weight sets equals the loop: the head by itself, and folds."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ibaml
from ibaml import NewtonCG
from ibaml.paper.complexity.measure import picture_tasks
from oracles import gradients, relative
from problems import class_batch, conv_model, mlp_model, plain_learner

METHODS = {
    "maml": {},
    "fomaml": {},
    "imaml": {"lam": 0.3},
    "abml": {"samples": 3},
    "ibaml": {"samples": 3, "curvature": "energy"},
}


@pytest.mark.parametrize("tie_head", [False, True])
@pytest.mark.parametrize("model", ["mlp", "conv"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_equals_the_loop(method, model, tie_head):
    make, shape = {"mlp": (mlp_model, (3,)), "conv": (conv_model, (1, 6, 6))}[model]
    batch = class_batch(shape, ways=2) if model == "conv" else class_batch(shape)
    actual = {}
    for execution in ("loop", "head"):
        learner = plain_learner(
            method, make(), adapt="head", execution=execution, tie_head=tie_head, **METHODS[method]
        )
        actual[execution] = gradients(learner, batch)
    for block in actual["loop"]:
        torch.testing.assert_close(
            actual["head"][block], actual["loop"][block], rtol=1e-11, atol=1e-14
        )


def test_newton_and_running_statistics_equal_the_loop():
    batch = class_batch((1, 6, 6), ways=2)
    actual = []
    for execution in ("loop", "auto"):
        learner = plain_learner(
            "ibaml", conv_model(), adapt="head", execution=execution, solver=NewtonCG(3), samples=2
        )
        gradients(learner, batch)
        posterior = learner.adapt(batch.support_x[0], batch.support_y[0])
        buffers = [b.clone() for n, b in learner.model.named_buffers() if "running" in n]
        actual.append([posterior.outputs(batch.query_x[0]), *buffers])
    assert actual[0][1:], "the model has running statistics"
    for a, b in zip(*actual, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


class _Reads(nn.Module):
    """Normalizes its features by the head's own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x) / (1 + self.head.weight.norm()))


class _InPlace(_Reads):
    def forward(self, x):
        return self.head(self.body(x)).mul_(2.0)


class _After(_Reads):
    def forward(self, x):
        return F.log_softmax(self.head(self.body(x)), -1)


class _Twice(_Reads):
    def forward(self, x):
        return self.head(self.body(x) + self.head(self.body(x)).sum(-1, keepdim=True))


@pytest.mark.filterwarnings("ignore:.*a slower strategy is used")
@pytest.mark.parametrize("kind", [_Reads, _InPlace, _After, _Twice])
def test_what_is_not_features_and_then_a_head_takes_the_whole_network(kind):
    torch.manual_seed(0)
    batch = class_batch((3,))
    state = kind().double().state_dict()
    actual = []
    for execution in ("loop", "auto"):
        net = kind().double()
        net.load_state_dict(state)
        learner = plain_learner("imaml", net, adapt="head", execution=execution)
        actual.append(gradients(learner, batch))
    for block in actual[0]:
        assert relative(actual[1][block], actual[0][block]) <= 1e-12


def test_a_fast_way_that_is_not_right_is_set_aside_aloud():
    torch.manual_seed(0)
    learner = plain_learner("imaml", _Reads().double(), adapt="head")
    with pytest.warns(
        RuntimeWarning, match="head.* differ from the loop's .* slower strategy is used"
    ):
        learner(class_batch((3,)))
    assert learner.strategy == "loop"


def test_reading_the_head_in_passing_is_refused_where_the_head_was_asked_for():
    torch.manual_seed(0)
    learner = plain_learner("imaml", _Reads().double(), adapt="head", execution="head")
    with pytest.raises(ValueError, match="does not work for this model"):
        learner(class_batch((3,)))
    with pytest.raises(
        ValueError,
        match=r'needs the adapted weights to be those of one nn\.Linear: use adapt="head"',
    ):
        plain_learner("imaml", mlp_model(), adapt="all", execution="head")


def test_the_shared_layers_run_once_a_task():
    """Support, query and the way back: three passes a task, whatever K, S and L are."""
    counts = []
    for steps, samples in ((1, 1), (7, 5)):
        net = conv_model()
        passes: list[int] = []
        first = next(m for m in net.modules() if isinstance(m, nn.Conv2d))
        learner = plain_learner(
            "ibaml", net, adapt="head", steps=steps, samples=samples, cg_steps=4
        )
        batch = class_batch((1, 6, 6), ways=2)
        learner(batch).backward()  # the first call also checks
        first.register_forward_hook(lambda *_, passes=passes: passes.append(1))
        learner(batch).backward()
        counts.append(len(passes) / len(batch))
    assert counts == [3, 3]


# --- folds: tasks and samples in the channels of native kernels ----------------------------------


@pytest.mark.parametrize("adapt", ["all", "head", ["0.*"], ["1.*", "*.bias"]])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", ["fold", "single"])
def test_folds_equal_the_loop(way, method, adapt):
    """conv_model has batch norm: 0 is the convolution, 1 the norm, 5 the head."""
    batch = class_batch((1, 6, 6), ways=2)
    actual = {}
    for execution in ("loop", way):
        learner = plain_learner(
            method, conv_model(), adapt=adapt, execution=execution, **METHODS[method]
        )
        actual[execution] = gradients(learner, batch)
        actual[execution]["statistics"] = torch.cat(
            [b.reshape(-1).double() for b in learner.model.buffers()]
        )
        assert learner.strategy == execution
    for block in actual["loop"]:
        torch.testing.assert_close(
            actual[way][block], actual["loop"][block], rtol=1e-10, atol=1e-13, msg=block
        )


@pytest.mark.parametrize("norm", ["batch", "group", "none"])
@pytest.mark.parametrize("network", ["conv4", "resnet12"])
@pytest.mark.parametrize("way", ["fold", "single"])
def test_folds_equal_the_loop_on_the_backbones(way, network, norm):
    torch.manual_seed(0)
    if network == "conv4":
        net = ibaml.nn.conv4(2, channels=4, in_channels=1, image_size=16, norm=norm)
    else:
        net = ibaml.nn.resnet12(2, in_channels=1, widths=(2, 2, 4, 4), norm=norm)
    net = net.double()
    batch = class_batch((1, 16, 16), ways=2)
    actual = []
    for execution in ("loop", way):
        learner = plain_learner(
            "ibaml", copy.deepcopy(net), execution=execution, samples=2, steps=2, init_log_var=-4.0
        )
        actual.append(gradients(learner, batch))
    for block in actual[0]:
        torch.testing.assert_close(actual[1][block], actual[0][block], rtol=1e-9, atol=1e-12)


class _Channels(nn.Module):
    """Mixes channels: no fold is right."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.body, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x):
        x = self.body(x)
        if self.kind == "softmax":
            x = x.softmax(1)
        elif self.kind == "sum":
            x = x + x.sum(1, keepdim=True)
        elif self.kind == "parameter":
            x = x * self.scale
        elif self.kind == "index":
            x = x[:, [1, 0, 2, 3]]
        return self.head(x.mean((-2, -1)))


@pytest.mark.parametrize("kind", ["softmax", "sum", "parameter", "index"])
def test_what_has_no_rule_is_refused_by_name(kind):
    learner = plain_learner("maml", _Channels(kind).double(), execution="fold")
    with pytest.raises(ValueError, match=r'execution="fold" does not work.*no rule for'):
        learner(class_batch((1, 6, 6), ways=2))


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_folds_before_an_adapted_head_equal_the_loop(norm, monkeypatch):
    """What an accelerator takes by itself: tasks folded before the head."""
    from ibaml.execution import choice
    from ibaml.execution.fold import Fold

    torch.manual_seed(0)
    net = ibaml.nn.conv4(2, channels=4, in_channels=1, image_size=16, norm=norm).double()
    batch = class_batch((1, 16, 16), ways=2)
    monkeypatch.setattr(choice, "fastest", lambda *_: Fold)
    actual = []
    for execution in ("loop", "auto"):
        learner = plain_learner(
            "ibaml", copy.deepcopy(net), adapt="head", execution=execution, samples=2, steps=3
        )
        actual.append(gradients(learner, batch))
        actual[-1]["statistics"] = torch.cat([b.double().reshape(-1) for b in learner.buffers()])
    assert learner.strategy == "head, fold before it"
    for block in actual[0]:
        torch.testing.assert_close(actual[1][block], actual[0][block], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("stride", [1, 2])
def test_the_convolutions_derivatives_are_torchs(stride, groups):
    """First and second derivatives against torch's own, and finite differences."""
    from ibaml.execution.grouped import Shape, convolve, convolve_transposed

    torch.manual_seed(0)
    x = torch.randn(2, 2 * groups, 5, 6, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4 * groups, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    shape = Shape((stride, stride), (1, 1), (1, 1), groups)
    torch.testing.assert_close(convolve(x, w, shape), F.conv2d(x, w, None, stride, 1, 1, groups))
    assert torch.autograd.gradcheck(lambda a, b: convolve(a, b, shape), (x, w))
    assert torch.autograd.gradgradcheck(lambda a, b: convolve(a, b, shape), (x, w))
    if stride == 1:  # the form a GPU takes
        torch.testing.assert_close(convolve_transposed(x, w, shape), convolve(x, w, shape))


def test_batch_norms_derivatives_are_torchs():
    from ibaml.execution.normalize import normalize

    torch.manual_seed(0)
    x = torch.randn(3, 4, 2, 3, dtype=torch.float64, requires_grad=True)
    w, b = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def ours(*inputs):
        return normalize(*inputs, 1e-3)[0]

    def torchs(x, w, b):
        return F.batch_norm(x, None, None, w, b, True, 0.1, 1e-3)

    torch.testing.assert_close(ours(x, w, b), torchs(x, w, b))
    assert torch.autograd.gradcheck(ours, (x, w, b))
    assert torch.autograd.gradgradcheck(ours, (x, w, b))


@pytest.mark.parametrize("side", [4, 5])
def test_poolings_derivatives_are_torchs(side):
    from ibaml.execution.pool import max_pool

    torch.manual_seed(0)
    x = torch.randn(2, 3, side, side, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(max_pool(x, (2, 2)), F.max_pool2d(x, 2))
    assert torch.autograd.gradcheck(lambda a: max_pool(a, (2, 2)), (x,))
    assert torch.autograd.gradgradcheck(lambda a: max_pool(a, (2, 2)).square(), (x,))


def test_bfloat16_is_a_few_per_cent_off():
    torch.manual_seed(0)
    net = ibaml.nn.conv4(2, channels=8, in_channels=1, image_size=16)
    batch = class_batch((1, 16, 16), ways=2).to(torch.float32)
    actual = []
    for precision in ("full", "bfloat16"):
        learner = plain_learner(
            "ibaml", copy.deepcopy(net), execution="fold", precision=precision, samples=2, steps=2
        )
        actual.append(gradients(learner, batch))
    assert learner.strategy == "fold, bfloat16"
    error = relative(actual[1]["m"], actual[0]["m"])
    assert 0 < error < 0.15
    with pytest.raises(ValueError, match="precision must be one of full, bfloat16"):
        plain_learner("ibaml", net, precision="half")


def test_rounding_alone_does_not_cost_the_fast_way():
    """A bias before batch norm has slope zero, and small inputs make what rounding leaves of it
    large beside the slopes of others."""
    torch.manual_seed(0)
    net = ibaml.nn.conv4(5, channels=8, image_size=42)
    tasks = picture_tasks(2, torch.device("cpu"), image_size=42)
    tensors = (tasks.support_x * 1e-4, tasks.support_y, tasks.query_x * 1e-4, tasks.query_y)
    learner = plain_learner("ibaml", net, adapt="head", steps=1)
    learner(ibaml.TaskBatch(*tensors))
    assert learner.strategy.startswith("head")


class _OwnFeatures(nn.Module):
    """Features drawn from a fixed seed are others in double precision; and the head has a
    derivative that its own rule does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(8)), nn.Linear(32, 3)

    def forward(self, x):
        rng = torch.Generator().manual_seed(0)
        drawn = torch.randn(8, 32, generator=rng, dtype=x.dtype)
        size = self.head.weight.sum()
        return self.head(torch.cos((x * self.scale) @ drawn) + (size - size.detach()))


@pytest.mark.filterwarnings("ignore:.*a slower strategy is used")
def test_a_function_that_double_precision_changes_says_nothing_about_rounding():
    torch.manual_seed(0)
    learner = plain_learner("maml", _OwnFeatures(), adapt="head")
    learner(class_batch((8,)).to(torch.float32))
    assert learner.strategy == "loop"
