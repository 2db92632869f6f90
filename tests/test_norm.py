"""Normalization: torch's fused layers are a trap for second derivatives, and batch norm's
statistics are a choice. Finite differences decide."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ibaml
from ibaml import Curvature, FirstOrder, Implicit, Unrolled
from ibaml.execution import norm_layers
from oracles import (
    F64,
    blocks,
    converged,
    exact_cg,
    finite_difference_errors,
    five_point,
    generator,
    gradients,
)
from problems import class_batch, plain_learner

NORMS = {
    "batch": lambda: nn.BatchNorm2d(2),
    "layer": lambda: nn.LayerNorm([2, 4, 4]),
    "instance": lambda: nn.InstanceNorm2d(2, affine=True),
    "group": lambda: nn.GroupNorm(1, 2),
}


def network(norm: str, ways: int = 2) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        NORMS[norm](),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8, ways),
    ).to(F64)
    with torch.no_grad():
        for p in net[1].parameters():
            p += 0.3 * torch.randn(p.shape, dtype=F64)
    return net


def batch() -> ibaml.TaskBatch:
    return class_batch((1, 6, 6), ways=2)


@pytest.mark.parametrize("execution", ["auto", "loop"])
@pytest.mark.parametrize("norm", list(NORMS))
@pytest.mark.parametrize("method", ["maml", "abml"])
def test_unrolled_is_exact_with_every_norm(norm, method, execution):
    options = {} if method == "maml" else {"init_log_var": -3.0, "samples": 2}
    learner = plain_learner(
        method, network(norm), steps=3, lr=0.1, execution=execution, **options
    ).eval()
    exact = gradients(learner, batch())
    rng = torch.Generator().manual_seed(0)
    for name, ps in blocks(learner).items():
        d = torch.randn(exact[name].shape, generator=rng, dtype=F64)
        slope = five_point(lambda: float(learner(batch(), generator()).detach()), ps, d, 1e-4)
        assert slope == pytest.approx(float(exact[name] @ d), rel=1e-7)


@pytest.mark.parametrize("adapt", ["all", "head"])
@pytest.mark.parametrize("norm", list(NORMS))
@pytest.mark.parametrize("method", ["imaml", "ibaml"])
def test_implicit_is_exact_with_every_norm(norm, method, adapt):
    options = {"lam": 1.0} if method == "imaml" else {"init_log_var": -2.0, "samples": 2}
    learner = plain_learner(
        method,
        network(norm),
        solver=converged(),
        gradient=Implicit(Curvature("energy"), exact_cg()),
        adapt=adapt,
        **options,
    ).eval()
    errors = finite_difference_errors(learner, batch(), step=2e-5)
    assert max(errors.values()) <= 1e-5, errors


@pytest.mark.parametrize("norm", list(NORMS))
def test_vmap_is_refused_where_it_is_not_known_to_be_right(norm):
    with pytest.raises(ValueError, match=r"vmap.*loop"):
        plain_learner("maml", network(norm), execution="vmap")


def shared_norm_learner(**options) -> ibaml.MetaLearner:
    return plain_learner("ibaml", network("batch"), adapt="head", steps=3, **options)


class TestStatistics:
    def test_running_statistics_move_once_a_meta_step_over_all_tasks(self):
        learner = shared_norm_learner().train()
        layer = learner.model[1]
        b = batch()
        learner(b)
        assert int(layer.num_batches_tracked) == 1
        with torch.no_grad():
            seen = torch.stack([learner.model[0](x) for x in b.query_x])
        mean = seen.mean((1, 3, 4)).mean(0)
        var = torch.stack([t.transpose(0, 1).flatten(1).var(1) for t in seen]).mean(0)
        assert torch.allclose(layer.running_mean, 0.1 * mean)
        assert torch.allclose(layer.running_var, 0.9 + 0.1 * var)

    def test_adaptation_prediction_and_evaluation_never_move_them(self):
        learner = shared_norm_learner().train()
        b = batch()
        learner(b)
        before = {n: t.clone() for n, t in learner.model.named_buffers()}
        learner.adapt(b.support_x[0], b.support_y[0]).predict_proba(b.query_x[0])
        learner.eval()
        learner(b)
        for n, t in learner.model.named_buffers():
            assert torch.equal(t, before[n])

    def test_they_are_part_of_the_saved_state(self):
        learner = shared_norm_learner().train()
        learner(batch())
        other = shared_norm_learner()
        other.load_state_dict(learner.state_dict())
        assert torch.equal(other.model[1].running_mean, learner.model[1].running_mean)

    @pytest.mark.parametrize(
        ("adapt", "stats"), [("head", "running"), ("all", "support"), (["0", "5"], "running")]
    )
    def test_the_default_at_prediction_follows_the_layers_role(self, adapt, stats):
        learner = plain_learner("ibaml", network("batch"), adapt=adapt)
        b = batch()
        posterior = learner.adapt(b.support_x[0], b.support_y[0])
        assert posterior.norm_stats == {"1": stats}

    @pytest.mark.parametrize("stats", ["running", "support"])
    @pytest.mark.parametrize("adapt", ["head", "all"])
    def test_one_query_does_not_depend_on_the_others(self, stats, adapt):
        learner = plain_learner("ibaml", network("batch"), adapt=adapt)
        b = batch()
        posterior = learner.adapt(b.support_x[0], b.support_y[0], norm_stats=stats)
        together = posterior.predict_proba(b.query_x[0])
        alone = torch.cat([posterior.predict_proba(x[None]) for x in b.query_x[0]])
        assert torch.allclose(together, alone, atol=1e-12)

    def test_batch_statistics_are_transductive(self):
        learner = shared_norm_learner()
        b = batch()
        posterior = learner.adapt(b.support_x[0], b.support_y[0], norm_stats="batch")
        together = posterior.predict_proba(b.query_x[0])
        assert (together[:1] - posterior.predict_proba(b.query_x[0][:1])).abs().max() > 1e-6

    def test_support_statistics_are_those_of_adaptation(self):
        """Predicting the support set with its own frozen statistics is the adapted network."""
        learner = plain_learner("maml", network("batch"), steps=3)
        b = batch()
        x = b.support_x[0]
        frozen = learner.adapt(x, b.support_y[0], norm_stats="support").outputs(x)
        seen = learner.adapt(x, b.support_y[0], norm_stats="batch").outputs(x)
        assert torch.allclose(frozen, seen, atol=1e-10)

    @pytest.mark.parametrize("execution", ["auto", "loop", "single", "fold"])
    @pytest.mark.parametrize("adapt", ["all", "head"])
    def test_every_weight_set_has_its_own_support_statistics(self, execution, adapt):
        """Beside plain torch: a network with the drawn weights sees the support set in training
        mode, and the queries in evaluation mode."""
        learner = plain_learner(
            "ibaml", network("batch"), steps=3, adapt=adapt, init_log_var=-1.0, execution=execution
        )
        b = batch()
        posteriors = learner.adapt_all(b, norm_stats="support")
        outputs, drawn = posteriors.outputs(b.query_x, 3), posteriors.sample(3)
        plain = network("batch")
        plain[1].momentum = 1.0  # what it saw last
        for task in range(len(b)):
            for sample in range(3):
                weights = {name: w[task, sample] for name, w in drawn.items()}
                plain.load_state_dict({**learner.model.state_dict(), **weights})
                plain.train()(b.support_x[task])
                values = b.support_x.shape[1] * 4 * 4
                plain[1].running_var *= (values - 1) / values  # of the biased kind
                expected = plain.eval()(b.query_x[task])
                assert torch.allclose(outputs[task, sample], expected, atol=1e-10)

    def test_frozen_layers_keep_their_running_statistics(self):
        net = network("batch")
        net[1].running_mean += 0.5
        before = net[1].running_mean.clone()
        learner = plain_learner("ibaml", net, adapt="head", freeze=["0", "1"]).train()
        learner(batch())
        assert torch.equal(net[1].running_mean, before)
        assert learner.norm_plan("batch") == {"1": "running"}

    def test_a_layer_without_running_statistics_works(self):
        net = network("batch")
        net[1] = nn.BatchNorm2d(2, track_running_stats=False).to(F64)
        learner = plain_learner("ibaml", net, adapt="head").train()
        learner(batch()).backward()
        b = batch()
        posterior = learner.adapt(b.support_x[0], b.support_y[0])
        assert posterior.norm_stats == {"1": "support"}
        together = posterior.predict_proba(b.query_x[0])
        alone = torch.cat([posterior.predict_proba(x[None]) for x in b.query_x[0]])
        assert torch.allclose(together, alone, atol=1e-12)

    def test_a_layer_used_twice_has_no_one_set_of_support_statistics(self):
        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.BatchNorm1d(3)
                self.first, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

            def forward(self, x):
                return self.head(self.norm(torch.tanh(self.first(self.norm(x)))))

        b = class_batch((3,), ways=2)
        learner = plain_learner("ibaml", Twice().to(F64)).train()
        learner(b).backward()
        with pytest.raises(ValueError, match="more than once"):
            learner.adapt(b.support_x[0], b.support_y[0]).predict_proba(b.query_x[0])
        learner.adapt(b.support_x[0], b.support_y[0], norm_stats="running").predict_proba(
            b.query_x[0]
        )

    def test_a_layer_used_for_some_tasks_only_has_no_support_statistics(self):
        class Sometimes(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.head = nn.BatchNorm1d(3), nn.Linear(3, 2)

            def forward(self, x):
                return self.head(self.norm(x) if x.mean() > 0 else x)

        b = class_batch((3,), ways=2)
        one, other = b.support_x[:1].abs(), -b.support_x[1:2].abs()
        tasks = ibaml.TaskBatch(
            torch.cat([one, other]), b.support_y[:2], b.query_x[:2].abs(), b.query_y[:2]
        )
        learner = plain_learner("maml", Sometimes().to(F64), execution="loop")
        with pytest.raises(ValueError, match="for some support sets and not for others"):
            learner.adapt_all(tasks, norm_stats="support").predict_proba(tasks.query_x)

    def test_reptile_has_running_statistics_too(self):
        learner = plain_learner("reptile", network("batch"), steps=2).train()
        learner(batch())
        assert int(learner.model[1].num_batches_tracked) == 1
        assert learner.model[1].running_mean.abs().max() > 0

    def test_a_single_support_example_with_dense_batch_norm_and_running_statistics(self):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).to(F64)
        learner = plain_learner("ibaml", net, adapt="head", init_log_var=-2.0)
        posterior = learner.adapt(torch.randn(1, 3, dtype=F64), torch.tensor([1]))
        assert posterior.predict_proba(torch.randn(1, 3, dtype=F64)).shape == (1, 2)


def test_dropout_is_off_so_that_the_energy_is_one_function():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3)).to(F64)
    learner = plain_learner("maml", net).train()
    b = class_batch((3,))
    assert float(learner(b).detach()) == float(learner(b).detach())


def test_instance_norm_with_running_statistics_is_refused():
    net = nn.Sequential(
        nn.InstanceNorm2d(2, track_running_stats=True), nn.Flatten(), nn.Linear(2, 2)
    )
    with pytest.raises(ValueError, match="track_running_stats"):
        plain_learner("maml", net)


@pytest.mark.parametrize("norm", list(NORMS))
def test_first_order_equals_a_plain_loop(norm):
    b, steps, lr = batch(), 3, 0.1
    total: dict[str, torch.Tensor] = {}
    for t in range(len(b)):
        net = network(norm).train()
        opt = torch.optim.SGD(net.parameters(), lr=lr)
        for _ in range(steps):
            opt.zero_grad()
            nn.functional.cross_entropy(net(b.support_x[t]), b.support_y[t]).backward()
            opt.step()
        opt.zero_grad()
        nn.functional.cross_entropy(net(b.query_x[t]), b.query_y[t]).backward()
        for n, p in net.named_parameters():
            total[n] = total.get(n, 0) + p.grad / len(b)
    learner = ibaml.methods.fomaml(network(norm), steps=steps, lr=lr)
    assert isinstance(learner.gradient, FirstOrder)
    learner(b).backward()
    for n, p in learner.model.named_parameters():
        assert torch.allclose(p.grad, total[n], atol=1e-12)


def test_unrolled_head_with_shared_batch_norm_is_exact():
    learner = ibaml.methods.maml(
        network("batch"), adapt="head", steps=3, lr=0.1, gradient=Unrolled()
    ).eval()
    exact = gradients(learner, batch())
    ps = blocks(learner)["shared"]
    d = torch.ones_like(exact["shared"])
    slope = five_point(lambda: float(learner(batch(), generator()).detach()), ps, d, 1e-4)
    assert slope == pytest.approx(float(exact["shared"] @ d), rel=1e-7)
    assert list(norm_layers(learner.model)) == ["1"]
