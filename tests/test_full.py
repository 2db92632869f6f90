"""A learner whose linear head has a full covariance: gradients, predictions, files, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ibaml
from ibaml import Categorical, DualNewton, FullGaussian, Gaussian, Implicit, MetaLearner, Point
from ibaml.execution import Runner
from ibaml.heads.prior import HeadPrior
from ibaml.heads.regression import regression
from oracles import F64, directional_errors, generator, gradients
from problems import class_batch, conv_model, mlp_model, regression_batch


def learner(model: nn.Module | None = None, **options) -> MetaLearner:
    return ibaml.methods.ibaml(
        mlp_model() if model is None else model,
        **{"posterior": "full", "init_log_var": 0.3, "beta": 1.0, "adapt": "head", **options},
    )


def regressor(**options) -> MetaLearner:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).to(F64)
    return learner(model, likelihood=Gaussian(0.4, learn=True), **options)


def exact(inference: str = "laplace") -> dict:
    return {"posterior": None, "belief": FullGaussian(inference), "solver": DualNewton(200, 1e-13)}


# --- the meta-gradient ---------------------------------------------------------------------------


@pytest.mark.parametrize("objective", ["predictive", "query"])
@pytest.mark.parametrize("inference", ["laplace", "variational"])
@pytest.mark.parametrize("tie_head", [False, True])
def test_gradients_of_a_classifier_against_finite_differences(inference, objective, tie_head):
    made = learner(
        **exact(inference),
        objective=objective,
        likelihood=Categorical("learned"),
        tie_head=tie_head,
        beta=0.7,
        learn_beta=True,
    )
    errors = differences(made, class_batch())
    assert set(errors) == {"m", "rho", "shared", "likelihood", "beta"}
    if tie_head:  # a softmax does not see what all rows have in common
        errors.pop("m")
        assert max(p.grad.abs().max() for p in made.tied_mean.values()) < 1e-12
    assert max(errors.values()) < 1e-6, errors


@pytest.mark.parametrize("objective", ["predictive", "query"])
def test_gradients_of_a_regressor_against_finite_differences(objective):
    errors = differences(regressor(objective=objective), regression_batch())
    assert set(errors) == {"m", "rho", "shared", "likelihood"}
    assert max(errors.values()) < 1e-6, errors


def differences(made: MetaLearner, batch) -> dict[str, float]:
    """Errors per block against differences of the loss, which is solved anew."""
    return directional_errors(made, batch, gradients(made, batch))


# --- the posterior -------------------------------------------------------------------------------


def dense(made: MetaLearner, x, y):
    """Mean and covariance of the head's weights (C·F), by Newton on dense matrices."""
    body, head = made.model[:-1], made.model[-1]
    with torch.no_grad():
        phi = nn.functional.pad(body(x), (0, 1), value=1.0)
        start = torch.cat([head.weight, head.bias[:, None]], 1)
        rho = torch.cat([p.expand(1, -1) for p in rows_of(made)], 1).expand_as(start)
    classes, width = start.shape
    w, precision = start.flatten().clone(), torch.diag((-rho.flatten()).exp())
    target = nn.functional.one_hot(y, classes).to(F64)
    for _ in range(100):
        p = (phi @ w.view(classes, width).mT).softmax(-1)
        gradient = ((p - target).mT @ phi).flatten() + precision @ (w - start.flatten())
        curvature = torch.diag_embed(p) - p[:, :, None] * p[:, None]
        hessian = torch.einsum("ncd,nf,ng->cfdg", curvature, phi, phi).reshape(len(w), -1)
        step = torch.linalg.solve(hessian + precision, gradient)
        w = w - step / max(1.0, float(step.norm()))
    return w, torch.linalg.inv(hessian + precision), phi


def rows_of(made: MetaLearner):
    weight, bias = (p.detach() for p in made.log_var.values())
    return weight, bias[:, None]


def test_mean_variances_and_draws_are_those_of_the_dense_posterior():
    made, batch = learner(**exact()), class_batch()
    with torch.no_grad():
        for p in made.log_var.parameters():
            p.add_(0.5 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    x, y = batch.support_x[0], batch.support_y[0]
    posterior = made.adapt(x, y)
    mean, covariance, _ = dense(made, x, y)
    width = 5
    got = torch.cat([posterior.mean["2.weight"], posterior.mean["2.bias"][:, None]], 1)
    assert torch.allclose(got.flatten(), mean, atol=1e-8)
    log_var = torch.cat([posterior.log_var["2.weight"], posterior.log_var["2.bias"][:, None]], 1)
    assert torch.allclose(log_var.flatten().exp(), covariance.diagonal(), atol=1e-8)
    draws = posterior.sample(40_000)
    flat = torch.cat([draws["2.weight"], draws["2.bias"][..., None]], -1).flatten(1)
    assert flat.shape[1] == 3 * width
    assert torch.allclose(flat.mean(0), mean, atol=0.03)
    assert torch.allclose(flat.mT.cov(), covariance, atol=0.06)


def test_predictions_are_the_same_at_every_call_and_those_of_many_draws():
    made, batch = learner(), class_batch(query=20)
    posterior = made.adapt(batch.support_x[0], batch.support_y[0])
    p = posterior.predict_proba(batch.query_x[0])
    assert torch.equal(p, posterior.predict_proba(batch.query_x[0]))
    assert torch.allclose(p[3:4], posterior.predict_proba(batch.query_x[0][3:4]), atol=1e-14)
    drawn = posterior.predict_proba(batch.query_x[0], 50_000, torch.Generator().manual_seed(0))
    assert torch.allclose(p, drawn, atol=1e-2)


def test_a_regressor_is_the_gaussian_process_of_its_features():
    made, batch = regressor(), regression_batch(tasks=1)
    posterior = made.adapt(batch.support_x[0], batch.support_y[0])
    mean, variance = posterior.predict(batch.query_x[0])
    with torch.no_grad():
        phi, star = (
            nn.functional.pad(made.model[:2](x), (0, 1), value=1.0)
            for x in (batch.support_x[0], batch.query_x[0])
        )
        head = made.model[-1]
        start = torch.cat([head.weight, head.bias[:, None]], 1)[0]
    gram, cross, own = (a @ b.mT * torch.tensor(0.3).exp() for a, b in
                        ((phi, phi), (phi, star), (star, star)))  # fmt: skip
    inverse = torch.linalg.inv(gram + 0.16 * torch.eye(len(gram), dtype=F64))
    target = batch.support_y[0][:, 0] - phi @ start
    assert torch.allclose(mean[:, 0], star @ start + cross.mT @ inverse @ target, atol=1e-7)
    expected = (own - cross.mT @ inverse @ cross).diagonal() + 0.16
    assert torch.allclose(variance[:, 0], expected, atol=1e-7)
    normal = torch.distributions.Normal(mean, variance.sqrt())
    nll = posterior.nll(batch.query_x[0], batch.query_y[0])
    assert torch.allclose(nll, -normal.log_prob(batch.query_y[0])[:, 0], atol=1e-10)


def test_its_mean_is_the_point_of_the_same_strength():
    batch = class_batch(tasks=1)
    x, y = batch.support_x[0], batch.support_y[0]
    full = learner(**exact()).adapt(x, y)
    lam = 1 / (len(x) * float(torch.tensor(0.3).exp()))
    point = MetaLearner(
        mlp_model(), Point(lam=lam), ibaml.NewtonCG(100, tol=1e-13), Implicit(), adapt="head"
    ).adapt(x, y)
    for name, mean in full.mean.items():
        assert torch.allclose(mean, point.mean[name], atol=1e-7)


def test_tasks_do_not_touch_each_other():
    made, batch = learner(), class_batch(tasks=4)
    query = batch.query_x
    together = made.adapt_all(batch).predict_proba(query)
    for t in range(4):
        alone = made.adapt_all(batch.select([t])).predict_proba(query[[t]])
        assert torch.allclose(together[t], alone[0], atol=1e-12)
    batch.support_x[1] = torch.inf  # after the checks of a batch
    ill = made.adapt_all(batch)
    assert ill.solution.diverged.tolist() == [False, True, False, False]
    good = ill.predict_proba(query)
    assert torch.allclose(good[[0, 2, 3]], together[[0, 2, 3]], atol=1e-12)
    before = made.adapt(torch.zeros(0, 3, dtype=F64), torch.zeros(0, dtype=torch.long))
    assert torch.allclose(good[1], before.predict_proba(query[1]), atol=1e-6)


def test_a_task_that_diverges_is_left_out_of_the_gradient():
    made, batch = learner(), class_batch(tasks=3)
    fine = made(batch.select([0, 2]), generator())
    batch.support_x[1] = torch.inf
    loss = made(batch, generator())
    assert made.diagnostics.diverged.tolist() == [False, True, False]
    assert torch.allclose(loss, fine, atol=1e-12)
    loss.backward()
    assert all(p.grad.isfinite().all() for p in made.parameters() if p.grad is not None)


def test_diagnostics_say_what_happened():
    made, batch = learner(), class_batch()
    made(batch).backward()
    seen = made.diagnostics
    assert (seen.steps >= 2).all()
    assert (seen.energy_after < seen.energy_before).all()
    assert (seen.gradient_norm["mean"] < 1e-6).all()


def test_a_tied_head_serves_any_number_of_classes():
    made = learner(tie_head=True)
    for ways in (2, 3, 7):
        batch = class_batch(ways=ways, tasks=1)
        names = [f"class {i}" for i in batch.support_y[0].tolist()]
        posterior = made.adapt(batch.support_x[0], names)
        assert posterior.predict_proba(batch.query_x[0]).shape == (2 * ways, ways)


def test_without_examples_it_is_the_prior():
    made = regressor()
    x = torch.randn(5, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    mean, variance = made.adapt(x[:0], torch.zeros(0, 1, dtype=F64)).predict(x)
    with torch.no_grad():
        phi = nn.functional.pad(made.model[:2](x), (0, 1), value=1.0)
        assert torch.allclose(mean, made.model(x))
    expected = phi.square().sum(-1) * torch.tensor(0.3).exp() + 0.16
    assert torch.allclose(variance[:, 0], expected, atol=1e-7)


# --- files and modules ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["classifier", "tied", "regressor", "convolutions"])
def test_files_and_modules_answer_as_the_posterior_does(kind, tmp_path):
    make = {
        "classifier": lambda: (learner(ibaml.nn.mlp(3, 3, hidden=(4,)).to(F64)), class_batch()),
        "tied": lambda: (
            learner(ibaml.nn.mlp(3, 3, hidden=(4,)).to(F64), tie_head=True), class_batch()
        ),
        "regressor": lambda: (
            learner(ibaml.nn.mlp(4, 1, hidden=(6,)).to(F64), likelihood=Gaussian(0.4, learn=True)),
            regression_batch(),
        ),
        "convolutions": lambda: (learner(conv_model()), class_batch((1, 6, 6), ways=2)),
    }  # fmt: skip
    made, batch = make[kind]()
    x, query = batch.support_x[0], batch.query_x[0]
    posterior = made.adapt(x, batch.support_y[0])

    def answer(p):
        return p.predict(query) if kind == "regressor" else (p.predict_proba(query),)

    def own():
        return {"model": conv_model()} if kind == "convolutions" else {}

    again = ibaml.load_posterior(posterior.save(tmp_path / "p.ibaml"), **own())
    reloaded = ibaml.load(made.save(tmp_path / "l.ibaml"), **own()).adapt(x, batch.support_y[0])
    module = posterior.module()
    said = module(query)
    said = said if isinstance(said, tuple) else (said,)
    exported = torch.export.export(module, (query,)).module()(query)
    exported = exported if isinstance(exported, tuple) else (exported,)
    for one, two, three, four, expected in zip(
        answer(again), answer(reloaded), said, exported, answer(posterior), strict=True
    ):
        for got in (one, two, three, four):
            assert torch.allclose(got, expected, atol=1e-10)
    assert again.log_var.keys() == posterior.log_var.keys()


# --- refusals ------------------------------------------------------------------------------------


def test_a_network_that_does_not_end_in_its_head_is_refused():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(3, 3)

        def forward(self, x):
            return 2 * self.head(x)

    made = learner(Scaled().to(F64))
    with pytest.raises(ValueError, match=r'posterior="full" needs .* use posterior="diagonal"'):
        made(class_batch())


def test_another_likelihood_is_refused_by_name():
    class Heavy(ibaml.Likelihood):
        def forward(self, outputs, y):
            return (outputs - y).abs().sum(-1)

    made = learner(
        nn.Linear(4, 1).to(F64), belief=FullGaussian(), posterior=None, likelihood=Heavy()
    )
    with pytest.raises(ValueError, match="Heavy is neither for labels nor Gaussian noise"):
        made(regression_batch())


def test_regression_with_the_evidence_of_another_library():
    """The log evidence is scikit-learn's, of the same Gaussian process."""
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import DotProduct, WhiteKernel

    x = torch.randn(1, 7, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    y = x.sum(-1).sin()
    found = regression(HeadPrior(torch.zeros(3, dtype=F64), torch.zeros(3, dtype=F64)), x, y, 0.3)
    kernel = DotProduct(sigma_0=1e-12, sigma_0_bounds="fixed") + WhiteKernel(0.3, "fixed")
    process = GaussianProcessRegressor(kernel, optimizer=None, alpha=0).fit(x[0], y[0])
    assert float(found.log_evidence) == pytest.approx(process.log_marginal_likelihood(), abs=1e-9)


def test_every_example_runs_through_the_shared_layers_once(monkeypatch):
    """The figures on the solution read the features that the posterior was found with."""
    batch, one = class_batch(), learner()
    one(batch, generator())  # the first batch of a kind is checked
    run, passed = Runner.features, []

    def counted(self, model, constants, x):
        passed.append(x.shape[:2].numel())
        return run(self, model, constants, x)

    monkeypatch.setattr(Runner, "features", counted)
    one(batch, generator()).backward()
    assert sum(passed) == batch.support_y.numel() + batch.query_y.numel()
    assert one.diagnostics.energy_after.isfinite().all()
