"""The operations made for folds: against torch's own in float64, and their Triton kernels (in
Triton's interpreter where there is no accelerator) against the plain lines."""

import os
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ibaml.execution.block import OFF, Plain, Saved, norm_relu_pool
from ibaml.execution.needed import needed_gradients
from ibaml.execution.thin import plain_thin, thin
from oracles import gradients, relative
from problems import class_batch, plain_learner

F64 = torch.float64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
linux = pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux alone")


def torchs(x, w, b):
    return F.max_pool2d(F.batch_norm(x, None, None, w, b, True, 0.1, 1e-3).relu(), 2)


@pytest.mark.parametrize("size", [(4, 4), (5, 7), (2, 3)])
def test_norm_relu_pool_is_torchs_with_two_derivatives(size):
    torch.manual_seed(0)
    x = torch.randn(3, 2, *size, dtype=F64, requires_grad=True)
    w = torch.tensor([1.1, -0.9], dtype=F64, requires_grad=True)
    b = torch.tensor([-1.2, -0.9], dtype=F64, requires_grad=True)
    y, (mean, var) = norm_relu_pool(x, w, b, 1e-3)
    torch.testing.assert_close(y, torchs(x, w, b))
    torch.testing.assert_close(mean, x.mean((0, 2, 3)))
    torch.testing.assert_close(var, x.var((0, 2, 3), unbiased=False))
    assert (y == 0).any(), "ReLU should be off somewhere"

    def ours(*inputs):
        return norm_relu_pool(*inputs, 1e-3)[0]

    assert torch.autograd.gradcheck(ours, (x, w, b))
    assert torch.autograd.gradgradcheck(ours, (x, w, b))


def test_batch_norm_with_channels_last_is_as_exact_as_float32_can_be():
    """Torch's own is 1e-5 to 1e-4 off here, for it adds up half a million numbers one by one."""
    from ibaml.execution.normalize import normalize

    rng = torch.Generator().manual_seed(0)
    x = torch.randn(20, 4, 84, 84, generator=rng, dtype=F64) + 1
    g = x.square()  # so that no sum is near zero
    w = torch.linspace(0.5, 1.5, 4, dtype=F64)
    actual = []
    for dtype, form in ((F64, torch.contiguous_format), (torch.float32, torch.channels_last)):
        z = x.to(dtype).contiguous(memory_format=form).requires_grad_()
        weight, bias = (t.to(dtype).requires_grad_() for t in (w, w.flip(0)))
        y, moments = normalize(z, weight, bias, 1e-5)
        first = torch.autograd.grad(y, (z, weight, bias), g.to(dtype))
        actual.append([t.detach() for t in (y, *moments, *first)])
    for exact, single in zip(*actual, strict=True):
        assert relative(single.double(), exact) < 2e-6


def test_what_is_not_finite_stays_so():
    x = torch.randn(2, 3, 4, 4, dtype=F64)
    x[0, 1, 0, 0] = float("nan")
    y, _ = norm_relu_pool(x, torch.ones(3, dtype=F64), torch.zeros(3, dtype=F64), 1e-5)
    assert y[:, 1].isnan().all()
    assert y[:, [0, 2]].isfinite().all()


@pytest.mark.parametrize(("groups", "kernel", "padding"), [(1, 3, (1, 1)), (2, 5, (2, 0))])
def test_a_thin_layer_is_a_convolution(groups, kernel, padding):
    torch.manual_seed(0)
    x = torch.randn(2, 2 * groups, 6, 7, dtype=F64)
    w = torch.randn(3 * groups, 2, kernel, kernel, dtype=F64, requires_grad=True)
    expected = F.conv2d(x, w, padding=padding, groups=groups)
    torch.testing.assert_close(plain_thin(x, w, padding, groups), expected)
    assert torch.autograd.gradcheck(lambda w: plain_thin(x, w, padding, groups), (w,))


def test_only_gradients_somebody_waits_for_are_wanted():
    seen = []

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return a * b

        @staticmethod
        def backward(ctx, g):
            seen.append(needed_gradients(ctx, 2))
            a, b = ctx.saved_tensors
            return g * b, g * a

    a, b = (torch.ones(2, requires_grad=True) for _ in range(2))
    torch.autograd.grad(Product.apply(a, b).sum(), a)
    torch.autograd.grad(Product.apply(2 * a, 2 * b).sum(), b)
    Product.apply(2 * a, b).sum().backward()
    Product.apply(a.detach(), b).sum().backward()
    assert seen == [(True, False), (False, True), (True, True), (False, True)]


class _Odd(nn.Module):
    """Batch norms followed by everything but ReLU and pooling, and biases where they count."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.again = nn.BatchNorm2d(4)
        self.third = nn.Conv2d(4, 4, 3)  # its bias meets no norm
        self.last = nn.BatchNorm2d(4)
        self.head = nn.Linear(4 * 2 * 2, 2)

    def forward(self, x):
        x = self.norm(self.first(x))
        y = F.relu(x, inplace=True)  # x changes too
        z = F.max_pool2d(self.again(self.second(y + x)), 2)  # no ReLU between
        z = F.max_pool2d(F.relu(self.last(F.relu(self.third(z)))), 2)
        return self.head(z.flatten(1))


@pytest.mark.parametrize("adapt", ["all", "head", ["second.*", "last.*", "head.*"]])
@pytest.mark.parametrize(("curvature", "way"), [("ggn", "fold"), ("energy", "single")])
def test_what_waits_is_done_where_something_else_follows(adapt, curvature, way):
    batch = class_batch((1, 12, 12), ways=2)
    actual, states = [], []
    for execution in ("loop", way if adapt != "head" else "head"):
        torch.manual_seed(0)
        learner = plain_learner(
            "ibaml",
            _Odd().double(),
            execution=execution,
            adapt=adapt,
            curvature=curvature,
            samples=2,
            steps=2,
        )
        actual.append(gradients(learner, batch))
        states.append({n: b.clone() for n, b in learner.named_buffers()})
    for name, value in actual[0].items():
        if value.norm() > 1e-10:  # a bias before a norm has none
            assert relative(actual[1][name], value) < 1e-8, name
        else:
            assert actual[1][name].norm() < 1e-9, name
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, rtol=1e-9, atol=1e-9)


@linux
@pytest.mark.parametrize("shape", [(3, 4, 9, 7), (2, 3, 40, 42), (5, 2, 2, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_blocks_kernels_are_the_plain_passes(shape, dtype):
    from ibaml.execution.block_kernels import Kernels

    rng = torch.Generator().manual_seed(0)
    channels = shape[1]
    bound = 1e-5 if dtype == torch.float32 else 1e-2

    def draw(*size):
        return torch.randn(*size, generator=rng).to(DEVICE)

    def near(actual, expected):
        for a, b in zip(actual, expected, strict=True):
            assert (a.float() - b).norm() <= bound * (b.norm() + 1e-6)

    x = (5 + 3 * draw(*shape)).to(dtype)
    w, b, q, r, k = (draw(channels) for _ in range(5))
    mean, s = Plain.statistics(x.float(), 1e-5)
    near(Kernels.statistics(x, 1e-5), (mean, s))
    y, place, chosen = Kernels.choose(x, w, b, mean, s)
    pooled, expected_place, expected = Plain.choose(x.float(), w, b, mean, s)
    near((y, chosen), (pooled, expected))
    assert torch.equal(place, expected_place)
    assert 0 < (place == OFF).float().mean() < 1
    saved = Saved(x, w, mean, s, place, chosen)
    wide = Saved(x.float(), w, mean, s, place, chosen.float())
    g, p = draw(*y.shape).to(dtype), draw(*shape).to(dtype)
    sums = Plain.pooled_sums(g.float(), wide)
    near(Kernels.pooled_sums(g, saved), sums)
    near([Kernels.first(g, saved, *sums)], [Plain.first(g.float(), wide, *sums)])
    *full, there = Plain.full_sums(p.float(), g.float(), wide)
    *actual, actual_at_maxima = Kernels.full_sums(p, g, saved)
    near(actual, full)
    on = place < OFF
    assert torch.equal(actual_at_maxima[on].float(), there[on])
    near(
        [Kernels.to_pooled(there.to(dtype), saved, full[0], full[1], q, r)],
        [Plain.to_pooled(there, wide, full[0], full[1], q, r)],
    )
    rest = (*sums, full[0], full[1], k, q)
    near([Kernels.second(p, g, saved, *rest)], [Plain.second(p.float(), g.float(), wide, *rest)])


@linux
@pytest.mark.parametrize(
    ("groups", "outputs", "channels", "kernel", "padding"),
    [(3, 40, 3, 3, (1, 1)), (1, 8, 1, 3, (1, 1)), (2, 5, 2, 5, (2, 0))],
)
def test_the_thin_layers_kernels_are_the_plain_products(groups, outputs, channels, kernel, padding):
    torch.manual_seed(0)
    x = torch.randn(2, groups * channels, 9, 14, device=DEVICE)
    w = torch.randn(groups * outputs, channels, kernel, kernel, device=DEVICE, requires_grad=True)
    actual = []
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for way in (thin, plain_thin):
            y = way(x, w, padding, groups)
            g = y.detach().cos().requires_grad_()
            (first,) = torch.autograd.grad(y, w, g, create_graph=True)
            (second,) = torch.autograd.grad(first, g, w.detach().sin())
            actual.append((y, first, second))
    for ours, plain in zip(*actual, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
