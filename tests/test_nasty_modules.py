"""Modules that do what modules may do: every strategy gives the loop's gradients and statistics, or
steps back, or says that it does not fit."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ibaml
from oracles import gradients, relative
from problems import class_batch, plain_learner

pytestmark = pytest.mark.filterwarnings("ignore:.*a slower strategy is used")


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.again, self.third = (nn.BatchNorm2d(4) for _ in range(3))
        self.alpha = nn.Parameter(torch.zeros(()))
        self.head = nn.Linear(4, 2)

    def pooled(self, x):
        return self.head(x.mean((2, 3)))


class _LooksOn(_Net):
    """Reads an activation without a graph on the way."""

    def forward(self, x):
        h = self.norm(self.first(x))
        with torch.no_grad():
            self.seen = float(h.abs().mean())
        return self.pooled(h.tanh())


class _FrozenTrunk(_Net):
    """A part that nobody should train."""

    def forward(self, x):
        with torch.no_grad():
            h = self.norm(self.first(x))
        return self.pooled(self.second(h).tanh())


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return g * (s + x * s * (1 - s))


class _OwnFunction(_Net):
    def forward(self, x):
        return self.pooled(_Swish.apply(self.norm(self.first(x))))


class _ReZero(_Net):
    """Changes what a norm returned, in place, by a parameter that is zero."""

    def forward(self, x):
        h = self.norm(self.first(x))
        h.add_(self.alpha * x)
        return self.pooled(F.relu(h).tanh())


class _ShiftInPlace(_Net):
    """The norm takes the shift away, and its running mean does not."""

    def forward(self, x):
        h = self.first(x)
        h.add_(3.0)
        return self.pooled(self.norm(h).tanh())


class _TwoNormsOfOne(_Net):
    def forward(self, x):
        h = self.norm(self.first(x))
        return self.pooled(self.again(h) * self.third(h))


class _NormTwice(_Net):
    def forward(self, x):
        h = self.norm(self.first(x))
        return self.pooled((h * self.norm(self.second(x.repeat(1, 4, 1, 1)))).tanh())


class _UnusedNorm(_Net):
    def forward(self, x):
        h = self.first(x)
        self.norm(h)
        return self.pooled(self.again(h).tanh())


class _Residual(_Net):
    def forward(self, x):
        h = F.relu(self.norm(self.first(x)))
        out = self.again(self.second(h))
        out += h
        return self.pooled(F.max_pool2d(F.relu(out), 2))


class _Views(_Net):
    """What channels last cannot view, and keywords of other names."""

    def forward(self, x):
        h = F.relu(self.norm(self.first(x)))
        return self.head(h.view(h.shape[0], 4, -1).transpose(1, 2).contiguous().mean(axis=1))


class _FlatView(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4 * 6 * 6, 2)

    def forward(self, x):
        h = F.max_pool2d(F.relu(self.norm(self.first(x))), 2)
        return self.head(h.view(-1, 4 * 6 * 6))


_NETS = (
    _LooksOn, _FrozenTrunk, _OwnFunction, _ReZero, _ShiftInPlace, _TwoNormsOfOne, _NormTwice,
    _UnusedNorm, _Residual, _Views, _FlatView,
)  # fmt: skip


def outcome(kind, execution, method, adapt="all", shots=2):
    torch.manual_seed(0)
    options = {"samples": 2} if method == "ibaml" else {}
    learner = plain_learner(
        method, kind().double(), execution=execution, adapt=adapt, steps=2, **options
    )
    actual = gradients(learner, class_batch((1, 12, 12), ways=2, shots=shots))
    state = {n: b.double() for n, b in learner.named_buffers()}
    return learner, actual, state


# shots of two classes of 12×12 pictures from which our operations are taken by themselves on a CPU
_MANY = 7


@pytest.mark.parametrize("method", ["maml", "ibaml"])
@pytest.mark.parametrize("kind", _NETS)
def test_what_is_taken_by_itself_gives_the_loops_gradients(kind, method):
    _, expected, buffers = outcome(kind, "loop", method, shots=_MANY)
    learner, actual, seen = outcome(kind, "auto", method, shots=_MANY)
    assert learner.strategy in ("single", "loop")
    for name, value in expected.items():
        scale = max(float(v.norm()) for v in expected.values())
        assert (actual[name] - value).norm() <= 1e-8 * value.norm() + 1e-10 * scale, name
    for name, value in buffers.items():
        torch.testing.assert_close(seen[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", _NETS)
@pytest.mark.parametrize("execution", ["fold", "single"])
def test_what_is_asked_for_is_right_or_refused(kind, execution):
    _, expected, buffers = outcome(kind, "loop", "ibaml")
    try:
        _, actual, seen = outcome(kind, execution, "ibaml")
    except ValueError as error:
        refused = str(error)
    else:
        refused = ""
    if refused:
        assert "does not work for this model" in refused
        return
    for name, value in expected.items():
        assert (actual[name] - value).norm() <= 1e-8 * value.norm() + 1e-12, name
    for name, value in buffers.items():
        torch.testing.assert_close(seen[name], value, rtol=1e-9, atol=1e-9)


def test_a_norm_right_before_the_head_is_part_of_the_features():
    class Net(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(
                nn.Flatten(), nn.Linear(144, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)
            )

    learner, actual, _ = outcome(Net, "auto", "ibaml", adapt="head", shots=_MANY)
    assert learner.strategy == "head, single before it"
    _, expected, _ = outcome(Net, "loop", "ibaml", adapt="head", shots=_MANY)
    assert relative(actual["m"], expected["m"]) < 1e-9


def test_one_value_per_channel_has_no_statistics():
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    x = torch.randn(2, 1, 2, 2)
    y = torch.zeros(2, 1, dtype=torch.long)
    batch = ibaml.TaskBatch(x, y, x, y, classes=2, validate=False)
    for execution in ("loop", "single"):
        with pytest.raises(ValueError, match=r"does not run|per channel"):
            plain_learner("maml", net, execution=execution)(batch)


@pytest.mark.parametrize("execution", ["single", "fold"])
def test_a_third_derivative_is_refused(execution):
    torch.manual_seed(0)
    net = ibaml.nn.conv4(2, channels=4, in_channels=1, image_size=16).double()
    learner = plain_learner("maml", net, execution=execution, steps=1)
    loss = learner(class_batch((1, 16, 16), ways=2))
    with pytest.raises(RuntimeError, match=r'third derivative.*execution="loop"'):
        torch.autograd.grad(loss, list(learner.parameters()), create_graph=True, allow_unused=True)


def test_weights_tied_later_are_tied_for_the_next_learner():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    net = net.double()
    batch = class_batch((3,), ways=2)
    plain_learner("maml", net, execution="loop")(batch)
    net[2].weight = net[0].weight
    actual = gradients(plain_learner("maml", net, execution="loop"), batch)
    fresh = nn.Sequential(*net)  # a module nobody has seen
    expected = gradients(plain_learner("maml", fresh, execution="loop"), batch)
    assert relative(actual["m"], expected["m"]) < 1e-12
