"""Beliefs, roles, layout, noise, likelihoods and objectives: the parts, against other libraries."""

from __future__ import annotations

import math
from collections import OrderedDict
from fnmatch import fnmatchcase

import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributions as dist
from torch import nn

import ibaml
from ibaml import Categorical, Gaussian
from ibaml.energy import Stream, draw_noise
from ibaml.seeding import mix
from ibaml.weights import DiagonalGaussian, Layout, Point, assign_roles
from oracles import F64, generator, relative, seed
from problems import class_batch, mlp_model, plain_learner, regression_batch

numbers = st.floats(-3, 3)


@given(st.integers(1, 6), st.integers(0, 10**6))
def test_kl_and_log_density_are_torchs(n, seed_):
    rng = torch.Generator().manual_seed(seed_)
    m, rho, m_t, rho_t, w = torch.randn(5, n, generator=rng, dtype=F64)
    v = torch.cat([m_t, rho_t])[None]
    belief = DiagonalGaussian()
    prior = dist.Normal(m, (rho / 2).exp())
    task = dist.Normal(m_t, (rho_t / 2).exp())
    kl = dist.kl_divergence(task, prior).sum()
    assert belief.penalty(v, (m, rho)).item() == pytest.approx(kl.item(), rel=1e-10)
    density = belief.log_density(w[None, None], v)
    assert density.item() == pytest.approx(task.log_prob(w).sum().item(), rel=1e-10)


def test_kl_is_accurate_close_to_the_prior():
    """expm1: the KL of a belief that moved by 1e-9 is 1e-18-ish, not rounding."""
    m = torch.zeros(1, dtype=F64)
    v = torch.tensor([[0.0, 1e-6]], dtype=F64)
    exact = (1e-6) ** 2 / 4
    kl = DiagonalGaussian().penalty(v, (m, m)).item()
    assert kl == pytest.approx(exact, rel=1e-3)


@given(st.integers(1, 5), st.integers(0, 10**6))
def test_precision_is_the_penaltys_hessian(n, seed_):
    rng = torch.Generator().manual_seed(seed_)
    m, rho = torch.randn(2, n, generator=rng, dtype=F64)
    for belief, size in ((DiagonalGaussian(), 2 * n), (Point(lam=0.7), n)):
        v = torch.randn(1, size, generator=rng, dtype=F64)
        prior = (m, rho) if size == 2 * n else (m,)
        h = torch.autograd.functional.hessian(
            lambda p, b=belief, q=prior: b.penalty(p, q).sum(), v
        ).reshape(size, size)
        assert torch.allclose(h, torch.diag(belief.precision(v, prior).diagonal[0]), atol=1e-10)


def test_point_density_is_an_isotropic_gaussian():
    v, w = torch.zeros(1, 3, dtype=F64), torch.ones(1, 1, 3, dtype=F64)
    expected = dist.Normal(torch.zeros(3, dtype=F64), 0.5).log_prob(torch.ones(3, dtype=F64)).sum()
    assert Point(lam=4.0).log_density(w, v).item() == pytest.approx(expected.item())
    with pytest.raises(ValueError, match="prior"):
        Point().log_density(w, v)


def test_samples_have_the_beliefs_moments():
    v = torch.tensor([[1.0, -2.0, math.log(4.0), math.log(0.25)]], dtype=F64)
    noise = draw_noise(0, (0,), Stream.META, 20000, 2, dtype=F64)
    w = DiagonalGaussian().sample(v, noise)[0]
    assert torch.allclose(w.mean(0), v[0, :2], atol=0.05)
    assert torch.allclose(w.std(0), torch.tensor([2.0, 0.5], dtype=F64), atol=0.05)


class TestRoles:
    def net(self) -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))

    def test_all_head_names_patterns_predicate(self):
        net = self.net()
        everything = tuple(n for n, _ in net.named_parameters())
        assert assign_roles(net, "all").adapted == everything
        head = ("3.weight", "3.bias")
        for choice in ("head", "3", "3.*", ["3.weight", "3.bias"], lambda n, p: n.startswith("3")):
            roles = assign_roles(net, choice)
            assert roles.adapted == head
            assert roles.shared == everything[:4]

    @pytest.mark.parametrize(
        ("net", "last"),
        [
            (ibaml.nn.conv4(5), "blocks.3"),
            (ibaml.nn.resnet12(5, widths=(4, 4, 4, 4)), "blocks.3"),
            (ibaml.nn.mlp(1, 1, (4, 4)), "3"),
            # a flat sequence: a layer and the norm after it
            (nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2)),
             "[12]"),
            # a body in a module of its own, whose last stage has two blocks
            (
                nn.Sequential(
                    OrderedDict(
                        body=nn.Sequential(
                            nn.Linear(2, 3),
                            nn.Sequential(nn.Bilinear(3, 3, 3), nn.Bilinear(3, 3, 3)),
                            nn.LayerNorm(3),
                        ),
                        head=nn.Linear(3, 2),
                    )
                ),
                "body.1.1 body.2",
            ),
        ],
    )  # fmt: skip
    def test_the_last_block_and_the_head(self, net: nn.Module, last: str):
        roles = assign_roles(net, "last")
        names = [n for n, _ in net.named_parameters()]
        wanted = [n for n in names if any(fnmatchcase(n, f"{p}.*") for p in last.split())]
        assert roles.adapted == (*wanted, *roles.head)
        assert roles.head == assign_roles(net, "head").adapted
        assert set(roles.shared) == set(names) - set(roles.adapted)
        assert roles.shared

    def test_without_a_block_before_the_head_last_is_refused(self):
        with pytest.raises(ValueError, match='no weights before its head: use adapt="head"'):
            assign_roles(nn.Linear(2, 2), "last")

    def test_frozen(self):
        net = self.net()
        net[0].weight.requires_grad_(False)
        roles = assign_roles(net, "head", freeze="1.*")
        assert roles.frozen == ("0.weight", "1.weight", "1.bias")
        assert roles.shared == ("0.bias",)
        assert assign_roles(net, "all", freeze="3").adapted == ("0.bias", "1.weight", "1.bias")

    def test_meta_parameters_are_exactly_what_is_learned(self):
        net = self.net()
        learner = plain_learner("ibaml", net, adapt="head", freeze="0")
        names = {n for n, _ in learner.named_parameters()}
        assert names == {
            "model.1.weight",
            "model.1.bias",
            "model.3.weight",
            "model.3.bias",
            "log_var.3/weight",
            "log_var.3/bias",
        }
        assert "model.0.weight" in learner.state_dict()
        assert "model.1.running_mean" in learner.state_dict()

    def test_a_typo_gets_the_nearest_name(self):
        with pytest.raises(ValueError, match=r"did you mean 3\.weight"):
            assign_roles(self.net(), "3.weigth")


class TestTiedHead:
    def learner(self, adapt="head"):
        return plain_learner("ibaml", mlp_model(), adapt=adapt, tie_head=True, init_log_var=-1.0)

    @pytest.mark.parametrize("adapt", ["head", "all"])
    @pytest.mark.parametrize("ways", [2, 3, 20])
    def test_any_number_of_classes(self, ways, adapt):
        learner = self.learner(adapt)
        batch = class_batch((3,), ways=ways)
        learner(batch).backward()
        posterior = learner.adapt(batch.support_x[0], batch.support_y[0])
        assert posterior.predict_proba(batch.query_x[0]).shape == (2 * ways, ways)
        assert posterior.mean["2.weight"].shape == (ways, 4)
        more = learner.adapt(batch.support_x[0], batch.support_y[0], classes=ways + 1)
        assert more.predict_proba(batch.query_x[0]).shape == (2 * ways, ways + 1)

    def test_relabeling_the_classes_changes_nothing(self):
        """The prior is exchangeable over classes: the loss is that of the renamed task (with the
        noise's rows renamed alike, here by having none to speak of)."""
        learner = plain_learner(
            "ibaml", mlp_model(), adapt="head", tie_head=True, init_log_var=-25.0, beta=1e-12
        )
        batch = class_batch((3,))
        order = torch.tensor([2, 0, 1])
        renamed = ibaml.TaskBatch(
            batch.support_x, order[batch.support_y], batch.query_x, order[batch.query_y]
        )
        a, b = (float(learner(x, generator()).detach()) for x in (batch, renamed))
        assert a == pytest.approx(b, rel=1e-5)

    def test_the_placeholder_is_no_meta_parameter(self):
        learner = self.learner()
        names = {n for n, _ in learner.named_parameters()}
        assert "model.2.weight" not in names
        assert "tied_mean.2/weight" in names


@given(st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=1, max_size=4))
def test_layout_round_trip(shapes):
    layout = Layout(tuple(f"w{i}" for i in range(len(shapes))), tuple(map(tuple, shapes)))
    flat = torch.arange(float(layout.size))
    assert torch.equal(layout.join(layout.split(flat)), flat)
    batched = layout.split(flat.expand(2, 5, -1))
    assert all(w.shape == (2, 5, *s) for w, s in zip(batched.values(), shapes, strict=True))


class TestNoise:
    def test_depends_on_seed_and_key_alone(self):
        whole = draw_noise(3, (7, 8, 9), Stream.ADAPT, 4, 5)
        assert torch.equal(draw_noise(3, (9,), Stream.ADAPT, 4, 5)[0], whole[2])
        for other in (
            draw_noise(4, (7,), Stream.ADAPT, 4, 5),
            draw_noise(3, (7,), Stream.META, 4, 5),
            draw_noise(3, (7,), Stream.ADAPT, 4, 5, step=1),
            draw_noise(3, (8,), Stream.ADAPT, 4, 5),
        ):
            assert not torch.equal(other[0], whole[0])

    @pytest.mark.parametrize("samples", [1, 2, 5, 6])
    def test_antithetic_pairs(self, samples):
        noise = draw_noise(0, (1,), Stream.ADAPT, samples, 3, "antithetic")[0]
        assert noise.shape == (samples, 3)
        for i in range(0, samples - 1, 2):
            assert torch.equal(noise[i], -noise[i + 1])

    def test_the_same_in_both_precisions(self):
        a = draw_noise(0, (1,), Stream.ADAPT, 3, 4, dtype=F64)
        assert torch.equal(a.float(), draw_noise(0, (1,), Stream.ADAPT, 3, 4))

    @given(st.lists(st.integers(-(2**70), 2**70), min_size=1, max_size=4))
    def test_mix_takes_any_integers(self, parts):
        assert 0 <= mix(*parts) < 2**63
        assert mix(*parts) != mix(*parts, 0)

    def test_one_seed_per_call(self):
        batch = class_batch((3,))
        learner = plain_learner("ibaml", mlp_model(), init_log_var=-2.0)
        a = float(learner(batch, generator()).detach())
        assert a == float(learner(batch, generator()).detach())
        g = generator()
        first, second = (float(learner(batch, g).detach()) for _ in range(2))
        assert first == a
        assert second != a
        torch.manual_seed(0)
        x = float(learner(batch).detach())
        torch.manual_seed(0)
        assert x == float(learner(batch).detach())


class TestLikelihoods:
    def test_categorical_is_cross_entropy(self):
        logits, y = torch.randn(6, 3), torch.arange(6) % 3
        expected = -dist.Categorical(logits=logits).log_prob(y)
        assert torch.allclose(Categorical()(logits, y), expected, atol=1e-6)

    @pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 2)])
    def test_gaussian_is_torchs(self, shape):
        f, y = torch.randn(2, *shape, dtype=F64)
        expected = -dist.Normal(f, 0.3).log_prob(y).reshape(5, -1).sum(-1)
        assert torch.allclose(Gaussian(0.3)(f, y), expected)

    def test_gaussian_drops_a_trailing_dimension_but_never_broadcasts(self):
        f, y = torch.randn(5, 1), torch.randn(5)
        assert torch.allclose(Gaussian()(f, y), Gaussian()(f[:, 0], y))
        with pytest.raises(ValueError, match="do not match"):
            Gaussian()(torch.randn(5, 2), y)

    def test_a_learned_noise_is_a_meta_parameter_and_moves_to_the_data(self):
        torch.manual_seed(0)
        likelihood = Gaussian(1.0, learn=True)
        learner = plain_learner(
            "ibaml",
            nn.Linear(4, 1).to(F64),
            likelihood=likelihood,
            init_log_var=-2.0,
            beta=0.1,
            solver=ibaml.NewtonCG(5),
        )
        opt = torch.optim.Adam(learner.parameters(), lr=0.1)
        batch = regression_batch(tasks=4, support=20, query=20)
        for _ in range(60):
            opt.zero_grad()
            learner(batch, generator()).backward()
            opt.step()
        assert 0.05 < likelihood.log_noise.exp().item() < 0.3  # the data's noise is 0.1


class TestObjectives:
    def losses(self, objective, samples: int = 6):
        learner = plain_learner(
            "ibaml", mlp_model(), objective=objective, init_log_var=-1.0, samples=samples
        )
        support, query = learner.problem(class_batch((3,)), seed())
        v = learner.belief.start(support.meta.prior, 2).detach()
        return objective(v, support, query), v, support, query

    def test_jensens_bound_is_above_the_predictive_nll(self):
        bound, *_ = self.losses(ibaml.QueryNll())
        predictive, v, _, query = self.losses(ibaml.PredictiveNll())
        assert (bound > predictive).all()
        p = query.outputs(v).softmax(-1).mean(1)
        oracle = -p.gather(-1, query.y[..., None]).log().mean((1, 2))
        assert relative(predictive, oracle) <= 1e-12

    def test_with_one_sample_they_are_equal(self):
        a, *_ = self.losses(ibaml.QueryNll(), 1)
        b, *_ = self.losses(ibaml.PredictiveNll(), 1)
        assert torch.allclose(a, b)

    @pytest.mark.parametrize(("examples", "n"), [("support", 6), ("all", 12)])
    def test_abml_weighs_the_kl(self, examples, n):
        objective = ibaml.Abml(tasks=3, kl_examples=examples)
        _, v, support, query = self.losses(objective)
        moved = v + 0.1
        kl = support.belief.penalty(moved, support.meta.prior)
        other = ibaml.Abml(tasks=3, kl_examples="all" if examples == "support" else "support")
        difference = objective(moved, support, query) - other(moved, support, query)
        assert torch.allclose(difference, kl * (1 / n - 1 / (18 - n)))

    def test_a_tied_row_counts_once_in_the_hyper_prior(self):
        values = []
        for ways in (3, 9):
            learner = plain_learner("abml", mlp_model(), adapt="head", tie_head=True)
            _, query = learner.problem(class_batch((3,), ways=ways), 0)
            values.append(float(ibaml.Abml().log_hyper_prior(query).detach()))
        assert values[0] == pytest.approx(values[1], rel=1e-12)

    def test_samples_and_shared_noise(self):
        *_, support, query = self.losses(ibaml.QueryNll(samples=9))
        assert (support.noise.shape[1], query.noise.shape[1]) == (6, 9)
        *_, support, query = self.losses(ibaml.QueryNll(noise="shared"))
        assert query.noise is support.noise


def test_the_devices_noise_is_normal_and_a_seeds_own():
    """What an accelerator draws, drawn on the CPU: distribution, independence, and keys."""
    from ibaml.energy.noise import normal
    from ibaml.seeding import mix

    seeds = torch.tensor([mix(0, key) for key in range(40)])
    z = normal(seeds, 5001)
    assert z.shape == (40, 5001)
    assert scipy.stats.kstest(z.flatten().numpy(), "norm").pvalue > 1e-3
    assert abs(float((z[:, 1:] * z[:, :-1]).mean())) < 0.01  # neighbors
    assert abs(float((z[:, :2500] * z[:, 2501:5001]).mean())) < 0.01  # Box and Muller's pairs
    assert float(torch.corrcoef(z).fill_diagonal_(0).abs().max()) < 0.07  # tasks
    torch.testing.assert_close(normal(seeds[3:4], 5001)[0], z[3], rtol=0, atol=0)
