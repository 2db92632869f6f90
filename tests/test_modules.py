"""Modules nobody here wrote: any nn.Module, any loss, any optimizer, both precisions."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ibaml
from ibaml import Curvature, Dense, GradientDescent, Implicit, TaskBatch
from ibaml.nn.recipe import build, recipe_of
from oracles import F64, blocks, five_point, generator, gradients, relative
from problems import class_batch, mlp_model, plain_learner, regression_batch


class Attention(nn.Module):
    """A transformer encoder layer, as torch ships it (dropout and all), with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, batch_first=True)
        self.head = nn.Linear(3, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embedding(tokens)).mean(1))


class Tied(nn.Module):
    """One weight used twice, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Counting(nn.Module):
    """A module that writes to a buffer in its forward and scales by a fixed one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("scale", torch.tensor(2.0, dtype=F64))
        self.register_buffer("calls", torch.zeros((), dtype=F64))

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.linear(x)) * self.scale


def sequences() -> TaskBatch:
    return class_batch((5, 4))


def tokens() -> TaskBatch:
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(11, (2, 10, 5), generator=rng)
    y = torch.arange(3).repeat(4)[:10].expand(2, 10)
    return TaskBatch(x[:, :6], y[:, :6], x[:, 6:], y[:, 6:])


MODELS = {
    "transformer": (Attention, sequences),
    "lstm": (Recurrent, sequences),
    "embedding": (Embedded, tokens),
    "tied": (Tied, lambda: class_batch((3,))),
    "buffers": (Counting, lambda: class_batch((3,))),
}
METHODS = {
    "maml": {"steps": 2, "lr": 0.1},
    "fomaml": {"steps": 2, "lr": 0.1},
    "reptile": {"steps": 2, "lr": 0.1},
    "imaml": {"steps": 2, "lr": 0.1},
    "abml": {"steps": 2, "lr": 0.1, "samples": 2, "init_log_var": -3.0},
    "ibaml": {"steps": 2, "lr": 0.1, "samples": 2, "init_log_var": -3.0},
}


def make(name: str, dtype: torch.dtype = F64):
    torch.manual_seed(0)
    module, batch = MODELS[name]
    return module().to(dtype), batch().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("name", list(MODELS))
def test_every_method_trains_it(name, method, dtype):
    net, batch = make(name, dtype)
    learner = plain_learner(method, net, **METHODS[method])
    loss = learner(batch, generator())
    loss.backward()
    assert loss.dtype == dtype
    for n, p in learner.named_parameters():
        assert p.grad is not None, n
        assert p.grad.dtype == dtype
        assert p.grad.isfinite().all()
    posterior = learner.adapt(batch.support_x[0], batch.support_y[0])
    proba = posterior.predict_proba(batch.query_x[0])
    assert torch.allclose(proba.sum(-1), torch.ones_like(proba[:, 0]))


@pytest.mark.parametrize("name", list(MODELS))
def test_its_unrolled_gradient_is_exact(name):
    net, batch = make(name)
    learner = ibaml.methods.maml(net, **METHODS["maml"])
    exact = gradients(learner, batch)["m"]
    d = torch.randn(exact.shape, generator=torch.Generator().manual_seed(0), dtype=F64)
    slope = five_point(
        lambda: float(learner(batch, generator()).detach()), blocks(learner)["m"], d, 1e-4
    )
    assert slope == pytest.approx(float(exact @ d), rel=1e-7)


@pytest.mark.parametrize("name", ["transformer", "lstm", "embedding", "tied"])
def test_its_implicit_gradient_is_the_dense_one(name):
    from oracles import dense_gradients

    net, batch = make(name)
    learner = plain_learner(
        "ibaml",
        net,
        solver=GradientDescent(2, 0.1),
        gradient=Implicit(Curvature("energy"), Dense()),
        samples=2,
        init_log_var=-3.0,
        adapt="head",
    )
    dense = dense_gradients(learner, batch)
    for block, g in gradients(learner, batch).items():
        assert relative(g, dense[block]) <= 1e-9, block


def test_a_tied_parameter_is_one_parameter():
    learner = plain_learner("ibaml", Tied().to(F64))
    names = [n for n, _ in learner.named_parameters()]
    assert names.count("model.first.weight") == 1
    assert not any("second.weight" in n or "second/weight" in n for n in names)
    assert learner.layout.size == 9 + 3 + 3
    head = plain_learner("ibaml", Tied().to(F64), adapt="head")
    assert head.roles.adapted == ("first.weight", "second.bias")
    assert plain_learner("ibaml", Tied(), adapt="second.*").roles.adapted == head.roles.adapted


def test_buffers_are_respected():
    net, batch = make("buffers")
    learner = plain_learner("ibaml", net)
    learner(batch).backward()
    learner.adapt(batch.support_x[0], batch.support_y[0]).predict_proba(batch.query_x[0])
    assert net.calls == 0
    assert net.scale == 2


def test_the_models_own_parameters_are_the_prior_means():
    net = mlp_model()
    learner = plain_learner("ibaml", net)
    mine = {id(p) for p in learner.parameters()}
    assert all(id(p) in mine for p in net.parameters())
    assert len(list(learner.parameters())) == 2 * len(list(net.parameters()))
    learner(class_batch((3,))).backward()
    assert all(p.grad is not None for p in net.parameters())


def test_a_custom_loss_with_parameters_of_its_own():
    """A Laplace likelihood whose scale is meta-learned: its gradient is exact too."""

    class Laplace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_scale = nn.Parameter(torch.tensor(-0.5))

        def forward(self, outputs, y):
            smooth = torch.sqrt((outputs - y) ** 2 + 1e-2)
            return (smooth / self.log_scale.exp() + self.log_scale).sum(-1)

    from oracles import converged, exact_cg, finite_difference_errors

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).to(F64)
    learner = plain_learner(
        "ibaml",
        net,
        likelihood=Laplace(),
        solver=converged(),
        gradient=Implicit(Curvature("energy"), exact_cg()),
        init_log_var=-1.0,
        samples=2,
        noise="antithetic",
    )
    assert "likelihood.function.log_scale" in dict(learner.named_parameters())
    errors = finite_difference_errors(learner, regression_batch(), step=1e-4)
    assert set(errors) == {"m", "rho", "likelihood"}
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=0.01),
        lambda p: torch.optim.AdamW(p, lr=0.01),
        lambda p: torch.optim.RMSprop(p, lr=0.003),
    ],
    ids=["sgd", "adam", "adamw", "rmsprop"],
)
@pytest.mark.parametrize("method", ["maml", "imaml", "ibaml"])
def test_a_plain_loop_with_any_optimizer_learns(method, optimizer):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
    batch = class_batch((3,), tasks=4).to(torch.float32)
    learner = plain_learner(method, net, **METHODS[method])
    opt = optimizer(learner.parameters())
    first = last = None
    for _ in range(40):
        opt.zero_grad()
        loss = learner(batch)
        loss.backward()
        opt.step()
        last = float(loss.detach())
        first = last if first is None else first
    assert last < 0.9 * first


def test_a_learner_can_be_copied_and_saved():
    learner = plain_learner("ibaml", mlp_model())
    batch = class_batch((3,))
    learner(batch)
    other = copy.deepcopy(learner)
    other.load_state_dict(learner.state_dict())
    a, b = (float(x(batch, generator()).detach()) for x in (learner, other))
    assert a == b


def test_a_learner_can_be_pickled_and_so_can_a_posterior():
    import pickle

    batch = class_batch((3,))
    learner = plain_learner("ibaml", mlp_model())
    learner(batch)
    other = pickle.loads(pickle.dumps(learner))
    assert torch.equal(other(batch, generator()), learner(batch, generator()))
    posterior = learner.adapt(batch.support_x[0], batch.support_y[0])
    again = pickle.loads(pickle.dumps(posterior))
    x = batch.query_x[0]
    assert torch.equal(again.predict_proba(x), posterior.predict_proba(x))


@pytest.mark.parametrize("method", ["maml", "ibaml"])
@pytest.mark.parametrize("adapt", ["all", "head"])
def test_it_works_inside_inference_mode(method, adapt):
    """Where Lightning validates and predicts."""
    batch = class_batch((3,))
    learner = plain_learner(method, mlp_model(), adapt=adapt)
    expected = learner(batch, generator())
    with torch.inference_mode():
        inside = class_batch((3,))
        assert torch.equal(learner(inside, generator()), expected.detach())
        learner.adapt(inside.support_x[0], inside.support_y[0]).predict_proba(inside.query_x[0])


def test_a_parameter_may_have_any_name():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.keys = nn.Parameter(torch.randn(3, 3, dtype=F64))

        def forward(self, x):
            return x @ self.keys

    learner = plain_learner("ibaml", Named())
    learner(class_batch((3,))).backward()
    assert all(p.grad is not None for p in learner.parameters())


def test_freezing_leaves_the_users_model_as_it_was():
    net = mlp_model()
    first = plain_learner("ibaml", net, adapt="head", freeze="0", tie_head=True)
    first(class_batch((3,))).backward()
    assert all(p.requires_grad for p in net.parameters())
    assert net[0].weight.grad is None
    assert len(plain_learner("maml", net).roles.adapted) == 4


def test_distributed_data_parallel_works_around_it(tmp_path):
    """One process, gloo: frozen weights and a tied head's placeholder are not waited for."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1
    )
    try:
        learner = plain_learner("ibaml", mlp_model(), adapt="head", tie_head=True)
        wrapped = nn.parallel.DistributedDataParallel(learner)
        batch = class_batch((3,))
        for _ in range(2):
            wrapped(batch, generator()).backward()
        alone = plain_learner("ibaml", mlp_model(), adapt="head", tie_head=True)
        expected = gradients(alone, batch)["rho"]
        actual = torch.cat([p.grad.reshape(-1) for p in learner.log_var.values()])
        assert relative(actual / 2, expected) <= 1e-12
    finally:
        torch.distributed.destroy_process_group()


def test_vmap_and_loop_agree():
    batch = class_batch((3,))
    grads = []
    for execution in ("loop", "vmap"):
        for kind in ("energy", "ggn"):
            learner = plain_learner(
                "ibaml",
                mlp_model(),
                execution=execution,
                curvature=kind,
                init_log_var=-2.0,
                steps=3,
            )
            grads.append(gradients(learner, batch))
    for i in (0, 1):
        for block in grads[i]:
            assert relative(grads[i + 2][block], grads[i][block]) <= 1e-12


def test_auto_takes_vmap_for_dense_networks_and_the_loop_elsewhere():
    from ibaml.execution import choose

    assert choose(ibaml.nn.mlp(1, 1)).strategy == "vmap"
    assert choose(ibaml.nn.conv4(5)).strategy == "loop"
    assert choose(Tied()).strategy == "loop"


class TestBackbones:
    @pytest.mark.parametrize("norm", ["batch", "group", "none"])
    @pytest.mark.parametrize("size", [28, 84])
    def test_conv4(self, norm, size):
        net = ibaml.nn.conv4(5, channels=8, in_channels=1, image_size=size, norm=norm)
        assert net(torch.randn(2, 1, size, size)).shape == (2, 5)

    def test_conv4_is_the_papers(self):
        net = ibaml.nn.conv4(5)
        assert net(torch.randn(2, 3, 84, 84)).shape == (2, 5)
        assert net.head.in_features == 32 * 5 * 5
        assert sum(p.numel() for p in net.parameters()) == 32901

    def test_resnet12(self):
        net = ibaml.nn.resnet12(5, widths=(8, 8, 16, 16), norm="group")
        assert net(torch.randn(2, 3, 84, 84)).shape == (2, 5)
        default = sum(p.numel() for p in ibaml.nn.resnet12(5).parameters())
        assert 7.5e6 < default < 8.5e6
        learner = plain_learner(
            "ibaml", ibaml.nn.resnet12(2, in_channels=1, widths=(4, 4, 4, 4)), steps=1, samples=1
        )
        batch = class_batch((1, 16, 16), ways=2).to(torch.float32)
        learner(batch).backward()
        assert all(p.grad.isfinite().all() for p in learner.parameters())

    def test_mlp_flattens(self):
        assert ibaml.nn.mlp(12, 3, hidden=(7,), activation="tanh")(torch.randn(4, 3, 4)).shape == (
            4,
            3,
        )

    def test_an_mlp_with_skip_reads_its_inputs_beside_the_hidden_features(self):
        net = ibaml.nn.mlp(3, 2, hidden=(7, 5), activation="tanh", skip=True)
        assert net[-1].in_features == 5 + 3
        x = torch.randn(4, 3)
        with torch.no_grad():
            net[-1].weight[:, :5] = 0.0  # what is left is linear in the inputs
        expected = torch.nn.functional.linear(x, net[-1].weight[:, 5:], net[-1].bias)
        assert torch.equal(net(x), expected)

    @pytest.mark.parametrize("skip", [True, False])
    def test_an_mlp_is_built_again_from_its_recipe(self, skip):
        net = ibaml.nn.mlp(3, 2, hidden=(7, 5), activation="tanh", skip=skip)
        again = build(recipe_of(net))
        again.load_state_dict(net.state_dict())
        x = torch.randn(4, 3)
        assert torch.equal(again(x), net(x))

    def test_skip_keeps_an_adapted_head_linear_with_features_computed_once(self):
        net = ibaml.nn.mlp(3, 1, hidden=(7,), skip=True)
        learner = ibaml.methods.ibaml(net, likelihood=ibaml.Gaussian(0.3))
        posterior = learner.adapt(torch.randn(5, 3), torch.randn(5))
        mean, _ = posterior.predict(torch.randn(4, 3))
        assert mean.shape == (4,)
        assert {name.split(".")[0] for name in posterior.mean} == {"2"}

    @pytest.mark.parametrize(
        ("build", "word"),
        [
            (lambda: ibaml.nn.mlp(3, 1, hidden=(), skip=True), "skip"),
            (lambda: ibaml.nn.mlp(3, 1, skip=1), "skip"),
            (lambda: ibaml.nn.conv4(0), "ways"),
            (lambda: ibaml.nn.conv4(5, image_size=8), "image_size"),
            (lambda: ibaml.nn.conv4(5, norm="layer"), "norm"),
            (lambda: ibaml.nn.mlp(1, 1, activation="sine"), "activation"),
            (lambda: ibaml.nn.resnet12(5, widths=(1, 2)), "widths"),
        ],
    )
    def test_wrong_options_are_refused(self, build, word):
        with pytest.raises(ValueError, match=word):
            build()


def test_embedding_head_can_be_tied_too():
    """A tied prior through a module with integer inputs, more classes than it was built with."""
    net, _ = make("embedding")
    learner = plain_learner("ibaml", net, adapt="head", tie_head=True)
    tokens_ = torch.randint(11, (7, 5))
    proba = learner.adapt(tokens_, torch.arange(7)).predict_proba(tokens_)
    assert proba.shape == (7, 7)
    assert F.nll_loss(proba.log(), torch.arange(7)).isfinite()
