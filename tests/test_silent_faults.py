"""What used to be wrong without a word: it is refused, said, or left out."""

from __future__ import annotations

import copy
import math
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

import ibaml
from ibaml.execution.single import Single
from ibaml.learner import meta_learner
from oracles import F64, generator, gradients, relative
from problems import class_batch, conv_model, mlp_model, plain_learner

# --- choices are fixed when a learner is made ----------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gradient", ibaml.Implicit()),
        ("solver", ibaml.NewtonCG(3)),
        ("objective", ibaml.PredictiveNll()),
        ("samples", 3),
        ("noise", "antithetic"),
        ("beta", 0.5),
    ],
)
def test_assigning_a_choice_is_refused_and_names_replace(name, value):
    learner = plain_learner("maml", mlp_model())
    before = getattr(learner, name)
    with pytest.raises(AttributeError, match=rf"{name} is fixed .* learner\.replace\({name}=…\)"):
        setattr(learner, name, value)
    assert getattr(learner, name) is before


@pytest.mark.parametrize("name", ["belief", "likelihood", "roles"])
def test_assigning_what_the_weights_depend_on_is_refused(name):
    learner = plain_learner("ibaml", mlp_model())
    with pytest.raises(AttributeError, match=f"{name} is fixed .*make another learner"):
        setattr(learner, name, None)


def test_an_implicit_rule_for_a_point_without_a_prior_is_refused_by_replace_too():
    with pytest.raises(ValueError, match="the meta-gradient is exactly zero"):
        plain_learner("maml", mlp_model()).replace(gradient=ibaml.Implicit())


def test_replace_shares_the_weights_and_leaves_the_learner_as_it_was():
    learner, batch = plain_learner("ibaml", mlp_model(), samples=2, steps=3), class_batch()
    before = gradients(learner, batch)
    other = learner.replace(gradient=ibaml.FirstOrder(), samples=4)
    assert (other.samples, learner.samples) == (4, 2)
    assert [id(p) for p in other.parameters()] == [id(p) for p in learner.parameters()]
    fresh = plain_learner("ibaml", mlp_model(), samples=4, steps=3, gradient=ibaml.FirstOrder())
    for name, g in gradients(other, batch).items():
        assert torch.equal(g, gradients(fresh, batch)[name])
        assert torch.equal(before[name], gradients(learner, batch)[name])
        assert not torch.equal(g, before[name])


def test_replace_refuses_what_it_cannot_do():
    learner = plain_learner("maml", mlp_model())
    with pytest.raises(TypeError, match="belief cannot be replaced: only solver, gradient"):
        learner.replace(belief=None)
    with pytest.raises(ValueError, match="a learned step size is a weight of its own"):
        learner.replace(solver=ibaml.GradientDescent(3, 0.1, learn_lr=True))
    with pytest.raises(ValueError, match="samples must be a whole number, 1 or more; got 0"):
        learner.replace(samples=0)


# --- a fast way that fails is said ---------------------------------------------------------------


def test_an_exception_in_a_fast_strategy_is_said_once_with_its_reason(monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise NotImplementedError("no kernel for this machine")

    monkeypatch.setattr(Single, "run", broken)
    batch = class_batch((1, 40, 40), ways=2)
    net = nn.Sequential(nn.Conv2d(1, 2, 3, stride=8), nn.Tanh(), nn.Flatten(), nn.Linear(50, 2))
    learner = plain_learner("maml", net.to(F64))
    with pytest.warns(
        RuntimeWarning, match="single: no kernel for this machine.*a slower strategy"
    ):
        learner(batch)
    assert learner.strategy == "loop"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner(batch)
        learner(class_batch((1, 40, 40), ways=2, shots=3))  # another kind, the same sentence


# --- no graph where none is wanted ---------------------------------------------------------------


@pytest.mark.parametrize("method", ["maml", "fomaml", "reptile", "imaml", "abml", "ibaml"])
@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_no_graph_is_built_where_gradients_are_off(method, off):
    learner, batch = plain_learner(method, mlp_model()), class_batch()
    expected = learner(batch, generator())
    assert expected.requires_grad
    with off():
        loss = learner(batch, generator())
    assert not loss.requires_grad
    assert torch.equal(loss, expected.detach())


# --- second derivatives that are not there -------------------------------------------------------


class _Cube(torch.autograd.Function):
    """x³, whose backward pass can (or cannot) be differentiated."""

    way = "right"

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @classmethod
    def backward_of(cls, ctx, g):
        (x,) = ctx.saved_tensors
        return g * 3 * x**2


class _Right(_Cube):
    @staticmethod
    def backward(ctx, g):
        return _Cube.backward_of(ctx, g)


class _Once(_Cube):
    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return _Cube.backward_of(ctx, g)


class _Detached(_Cube):
    """The usual mistake: a backward pass that leaves autograd."""

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (3 * x.detach() ** 2)


class _Through(_Cube):
    """A straight-through estimator: its first derivative is not that of its values, on purpose."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


class _With(nn.Module):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)
        self.function = function

    def forward(self, x):
        return self.second(self.function.apply(self.first(x)))


RULES = ["maml", "imaml", "ibaml", "abml"]


@pytest.mark.parametrize("method", RULES)
@pytest.mark.parametrize("function", [_Once, _Detached])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_backward_pass_that_leaves_autograd_is_said_with_its_error(method, function, dtype):
    options = {"curvature": "energy"} if method == "ibaml" else {}
    learner = plain_learner(method, _With(function).to(dtype), **options)
    batch = class_batch().to(dtype)
    with pytest.warns(RuntimeWarning, match=r"_With .* no correct second derivative: .* \d+ % off"):
        learner(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner(batch)


def test_imamls_gradient_would_be_far_off_there():
    """What is at stake: the sentence comes with a gradient that is wrong by a large factor."""
    batch, actual = class_batch(), {}
    for function in (_Right, _Once):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = {"lam": 0.1, "steps": 100, "lr": 0.05, "cg_steps": 50, "adapt": "first"}
            learner = plain_learner("imaml", _With(function).to(F64), **options)
            actual[function] = gradients(learner, batch)["m"]
    assert relative(actual[_Once], actual[_Right]) > 0.5


class _NoFurther(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise RuntimeError("the derivative for cube_backward is not implemented")


class _Refusing(_Cube):
    """As torch's own operations do it that have no second derivative."""

    @staticmethod
    def backward(ctx, g):
        return _NoFurther.apply(_Cube.backward_of(ctx, g))


@pytest.mark.parametrize("method", RULES)
def test_an_operation_that_refuses_a_second_derivative_is_refused_in_a_sentence(method):
    options = {"curvature": "energy"} if method == "ibaml" else {}
    learner = plain_learner(method, _With(_Refusing).to(F64), **options)
    with pytest.raises(ValueError, match=r"cube_backward is not impl.* \(methods\.fomaml"):
        learner(class_batch())


@pytest.mark.parametrize("method", ["fomaml", "reptile"])
def test_rules_without_second_derivatives_take_such_operations(method):
    learner = plain_learner(method, _With(_Once).to(F64))
    learner(class_batch()).backward()
    assert all(p.grad.isfinite().all() for p in learner.parameters())


def blamed(learner: ibaml.MetaLearner, batch: ibaml.TaskBatch) -> list[str]:
    """The warnings of a step, which has a finite loss and leaves finite gradients."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = learner(batch)
        loss.backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in learner.parameters())
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("method", RULES)
@pytest.mark.parametrize("function", [_Right, _Through])
def test_right_operations_and_straight_through_estimators_are_not_blamed(method, function):
    learner = plain_learner(method, _With(function).to(F64))
    assert not blamed(learner, class_batch())
    assert any(p.grad.abs().max() > 0 for p in learner.parameters())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("method", ["maml", "imaml", "ibaml"])
def test_kinks_are_not_blamed(method, seed):
    batch = class_batch((1, 6, 6), ways=2, seed=seed)
    assert not blamed(plain_learner(method, conv_model(smooth=False)), batch)


# --- a loss that is finite and a gradient that is not --------------------------------------------


def _net() -> nn.Module:
    torch.manual_seed(0)
    conv = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*conv, nn.Linear(64, 2))


def _one_ill(at: int = 1) -> tuple[ibaml.TaskBatch, ibaml.TaskBatch]:
    """A batch one of whose tasks has a pixel of 1e30, and the batch without it."""
    batch = class_batch((1, 6, 6), ways=2, tasks=4).to(torch.float32)
    batch.support_x[at, 0, 0, 0, 0] = 1e30
    return batch, batch.select([t for t in range(4) if t != at])


def test_a_task_with_a_finite_loss_and_no_finite_gradient_is_left_out_like_a_diverged_one():
    batch, without = _one_ill()
    learner = plain_learner("maml", _net(), steps=2)
    loss = learner(batch)
    assert loss.isfinite()
    loss.backward()
    assert learner.diagnostics.left_out.tolist() == [False, True, False, False]
    gradients = {n: p.grad.clone() for n, p in learner.named_parameters()}
    learner.zero_grad()
    learner(without).backward()
    for name, p in learner.named_parameters():
        assert p.grad.abs().max() > 0
        assert torch.equal(gradients[name], p.grad), name


def test_a_plain_loop_over_such_tasks_keeps_sound_weights():
    batch, _ = _one_ill()
    learner = plain_learner("maml", _net(), steps=2)
    optimizer = torch.optim.Adam(learner.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        learner(batch).backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in learner.parameters())


def test_where_no_task_has_a_finite_gradient_it_is_zero_and_all_are_left_out():
    batch, _ = _one_ill(0)
    only = batch.select([0])
    learner = plain_learner("maml", _net(), steps=2)
    learner(only).backward()
    assert learner.diagnostics.left_out.tolist() == [True]
    assert all((p.grad == 0).all() for p in learner.parameters())


def test_looking_at_gradients_leaves_backward_as_it_is():
    """Twice with retain_graph, hooks once, second derivatives, and gradients by autograd.grad."""
    learner, batch = plain_learner("maml", mlp_model(), steps=2), class_batch()
    learner(batch).backward()
    once = [p.grad.clone() for p in learner.parameters()]
    loss = learner(batch)
    learner.zero_grad()
    loss.backward(retain_graph=True)
    loss.backward()
    for g, p in zip(once, learner.parameters(), strict=True):
        torch.testing.assert_close(p.grad, 2 * g)
    first = next(iter(learner.parameters()))
    handle = first.register_hook(lambda g: 3 * g)
    learner.zero_grad()
    learner(batch).backward()
    torch.testing.assert_close(first.grad, 3 * once[0])
    handle.remove()
    parameters = list(learner.parameters())
    gradients = torch.autograd.grad(learner(batch), parameters, create_graph=True)
    direction = [torch.full_like(p, 0.1) for p in parameters]
    along = sum((g * d).sum() for g, d in zip(gradients, direction, strict=True))
    second = torch.autograd.grad(along, parameters)
    step, ends = 1e-5, []
    for sign in (1, -1):
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p.add_(sign * step * d)
        ends.append(torch.autograd.grad(learner(batch), parameters))
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p.sub_(sign * step * d)
    for exact, up, down in zip(second, *ends, strict=True):
        assert relative((up - down) / (2 * step), exact) < 1e-6


def test_a_likelihood_over_tensors_of_its_own_still_gets_their_gradient():
    scale = torch.tensor(2.0, dtype=F64, requires_grad=True)
    learner = plain_learner(
        "maml",
        mlp_model(),
        likelihood=lambda out, y: scale * F.cross_entropy(out, y, reduction="none"),
    )
    learner(class_batch()).backward()
    assert scale.grad is not None
    assert scale.grad != 0


# --- copies of a posterior -----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copied_posterior_does_not_claim_that_the_learner_was_trained_since(how):
    learner, batch = plain_learner("ibaml", mlp_model(), adapt="head"), class_batch()
    optimizer = torch.optim.SGD(learner.parameters(), lr=0.1)
    learner(batch).backward()
    optimizer.step()  # versions of tensors begin anew in a copy, and these have moved on
    posterior = learner.adapt(batch.support_x[0], batch.support_y[0])

    def copied(one):
        return copy.deepcopy(one) if how == "deepcopy" else pickle.loads(pickle.dumps(one))

    expected, again = posterior.predict_proba(batch.query_x[0]), copied(posterior)
    assert torch.equal(again.predict_proba(batch.query_x[0]), expected)
    optimizer.step()
    assert torch.equal(again.predict_proba(batch.query_x[0]), expected)  # it has weights of its own
    with pytest.raises(RuntimeError, match="the learner was trained after"):
        posterior.predict_proba(batch.query_x[0])
    with pytest.raises(RuntimeError, match="the learner was trained after"):
        copied(posterior).predict_proba(batch.query_x[0])


# --- what was taken and should not be ------------------------------------------------------------


def test_adapt_refuses_labels_in_columns_and_inputs_without_features():
    learner, batch = plain_learner("ibaml", mlp_model()), class_batch()
    x, y = batch.support_x[0], batch.support_y[0]
    with pytest.raises(ValueError, match=r"one number per example, \(N,\): use y\.squeeze\(1\)"):
        learner.adapt(x, y[:, None])
    with pytest.raises(ValueError, match="its examples are empty"):
        learner.adapt(x[:, :0], y)


@pytest.mark.parametrize("lam", [math.inf, math.nan, -1.0])
def test_imaml_refuses_a_lam_that_is_no_finite_number(lam):
    with pytest.raises(ValueError, match="lam must be a finite number, 0 or more"):
        ibaml.methods.imaml(mlp_model(), lam=lam)


def test_where_nobody_may_look_such_a_gradient_is_zero_and_all_are_left_out(monkeypatch):
    """On an accelerator looking would mean waiting."""
    batch, without = _one_ill()
    learner = plain_learner("maml", _net(), steps=2)
    monkeypatch.setattr(meta_learner, "may_look", lambda rule, device: False)
    learner(batch).backward()
    assert learner.diagnostics.left_out.tolist() == [True] * 4
    assert all((p.grad == 0).all() for p in learner.parameters())
    learner.zero_grad()
    learner(without).backward()
    assert not learner.diagnostics.left_out.any()
    assert all(p.grad.abs().max() > 0 for p in learner.parameters())


def test_a_recorded_meta_step_keeps_gradients_that_are_not_finite_to_itself(monkeypatch):
    from contextlib import nullcontext

    from ibaml import capture
    from ibaml.energy import task_roots

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(capture, "record", lambda graph, device: nullcontext())
    learner = plain_learner("maml", _net(), steps=2)
    for batch, ill in zip(_one_ill(), (True, False), strict=True):
        roots = task_roots(0, batch.task_keys, None)
        recording = capture.Recording(learner, learner.meta_step, batch, roots)
        assert recording.step.left_out.tolist() == [ill] * len(batch)
        assert bool((recording.flat == 0).all()) == ill
        assert recording.flat.isfinite().all()


# --- what a review found -------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["imaml", "ibaml"])
@pytest.mark.parametrize("adapt", ["all", "head"])
def test_an_ill_task_is_left_out_of_implicit_gradients_too(method, adapt):
    """A linear solver takes zero in the place of a right-hand side that is not finite."""

    def nll(z, y):
        losses = F.cross_entropy(z.clamp(-9, 9), y, reduction="none")
        (big,) = (z.abs().amax(-1) > 1e5).nonzero(as_tuple=True)
        ill = (z[big, 0] - z[big, 0].detach()).abs().sqrt()  # 0, and its slope is not
        return losses.index_add(0, big, ill)

    batch = class_batch((3,), tasks=4)
    batch.query_x[1] = 1e9
    learner = getattr(ibaml.methods, method)(mlp_model(nn.ReLU), likelihood=nll, adapt=adapt)
    loss = learner(batch, generator())
    assert loss.isfinite()
    before = learner.diagnostics
    loss.backward()
    assert learner.diagnostics.left_out.tolist() == [False, True, False, False]
    assert not learner.diagnostics.unsolved[1]
    assert not before.left_out.any()  # what was handed out does not change
    assert before.cg_residual is None
    gradients = [p.grad.clone() for p in learner.parameters()]
    learner.zero_grad()
    learner(batch.select([0, 2, 3]), generator()).backward()
    for g, p in zip(gradients, learner.parameters(), strict=True):
        torch.testing.assert_close(g, p.grad, rtol=1e-10, atol=1e-14)


class _Opaque(torch.autograd.Function):
    """Cross-entropy whose backward pass leaves autograd."""

    @staticmethod
    def forward(ctx, z, y):
        ctx.save_for_backward(z, y)
        return F.cross_entropy(z, y, reduction="none")

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        z, y = ctx.saved_tensors
        return g[:, None] * (z.softmax(-1) - F.one_hot(y, z.shape[-1])), None


@pytest.mark.parametrize("method", RULES)
@pytest.mark.parametrize("adapt", ["all", "head"])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_likelihood_without_a_second_derivative_is_said_with_every_curvature(
    method, adapt, dtype
):
    learner = getattr(ibaml.methods, method)(
        mlp_model().to(dtype), adapt=adapt, likelihood=lambda z, y: _Opaque.apply(z, y)
    )
    with pytest.warns(RuntimeWarning, match=r"no correct second derivative: .* \d+ % off"):
        learner(class_batch().to(dtype))


class _Float32Inside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        h = self.first(x)
        return self.second(h.float().softmax(-1).to(x.dtype) * h.tanh())


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("method", ["maml", "imaml", "ibaml"])
def test_a_part_in_single_precision_is_not_blamed(method, seed):
    torch.manual_seed(seed)
    learner = getattr(ibaml.methods, method)(_Float32Inside())
    assert not blamed(learner, class_batch(seed=seed).to(torch.float32))


def test_tensors_that_join_the_loss_later_get_their_gradient():
    scale = torch.tensor(2.0, dtype=F64)
    learner = ibaml.methods.maml(
        mlp_model(), likelihood=lambda z, y: scale * F.cross_entropy(z, y, reduction="none")
    )
    learner(class_batch()).backward()
    scale.requires_grad_()
    learner(class_batch()).backward()
    assert scale.grad is not None


def test_a_solver_that_replaces_one_with_learned_steps_takes_its_own():
    learner = ibaml.methods.maml(
        mlp_model(), solver=ibaml.GradientDescent(3, 0.01, learn_lr=True), adapt="all"
    )
    other = learner.replace(solver=ibaml.GradientDescent(3, 0.5))
    fresh = ibaml.methods.maml(mlp_model(), solver=ibaml.GradientDescent(3, 0.5), adapt="all")
    assert torch.equal(other(class_batch()), fresh(class_batch()))
    with pytest.raises(TypeError, match="solver must be an object"):
        learner.replace(solver=3)


def test_a_batch_with_an_ill_task_can_go_backward_twice():
    batch, _ = _one_ill()
    learner = ibaml.methods.maml(_net(), steps=2)
    loss = learner(batch)
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in learner.parameters()]
    loss.backward()
    for g, p in zip(once, learner.parameters(), strict=True):
        torch.testing.assert_close(p.grad, 2 * g)
    with pytest.raises(RuntimeError, match="backward through the same loss a second time"):
        loss.backward()


def test_a_scale_that_overflows_is_for_its_scaler_to_see():
    """Amp's loss scale: the gradient alone is sound, so no task is left out and none is hidden."""
    batch, learner = class_batch().to(torch.float32), ibaml.methods.maml(mlp_model().float())
    (learner(batch) * 3e38).backward(gradient=torch.tensor(1e10))
    assert not learner.diagnostics.left_out.any()
    assert not all(p.grad.isfinite().all() for p in learner.parameters())


def test_a_loss_that_is_kept_does_not_keep_its_tasks():
    import gc
    import weakref

    learner, batch = ibaml.methods.maml(mlp_model()), class_batch()
    loss = learner(batch)
    kept = weakref.ref(batch)
    loss.backward()
    del batch
    gc.collect()
    assert kept() is None
