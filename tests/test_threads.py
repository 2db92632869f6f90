"""One learner in many threads: adapting and predicting are re-entrant, training is one thread's."""

from __future__ import annotations

import copy
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from threading import Barrier, Event, Thread
from typing import Any

import pytest
import torch
from torch import nn

import ibaml
from ibaml import GradientDescent, Unrolled
from ibaml.execution import held
from ibaml.execution.call import twice_differentiable
from oracles import F64
from problems import class_batch, conv_model, mlp_model
from test_modules import Attention, Recurrent

THREADS = 8
STEPS = 2


@pytest.fixture(autouse=True)
def _many_turns() -> Iterator[None]:
    """Threads take turns more often than they would."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def together(*jobs: Callable[[], Any], seconds: float = 60) -> list[Any]:
    """What the jobs return, each in a thread of its own, begun at the same moment."""
    results: list[Any] = [None] * len(jobs)
    failed: list[BaseException] = []
    start = Barrier(len(jobs))

    def do(i: int, job: Callable[[], Any]) -> None:
        try:
            start.wait(seconds)
            results[i] = job()
        except BaseException as error:
            failed.append(error)

    threads = [Thread(target=do, args=job, daemon=True) for job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads), "a deadlock"
    if failed:
        raise failed[0]
    return results


def _pause(*_: Any) -> None:
    """In the middle of a network: the other threads' turn."""
    time.sleep(1e-4)


def _learner(model: nn.Module, **choices: Any) -> ibaml.MetaLearner:
    next(m for m in model.modules() if not list(m.children())).register_forward_hook(_pause)
    choices = {"adapt": "all", "samples": 2, "init_log_var": -4.0, **choices}
    return ibaml.methods.ibaml(model, solver=GradientDescent(STEPS, 0.05), **choices)


def _same_weights(learner: nn.Module, before: dict[str, torch.Tensor]) -> None:
    now = learner.state_dict()
    assert list(now) == list(before)
    for name, value in before.items():
        assert torch.equal(now[name], value), name
    assert all(isinstance(p, nn.Parameter) for p in learner.parameters())
    hooks = [h for m in learner.modules() for h in m._forward_hooks.values()]
    assert set(hooks) == {_pause}
    assert not any(m._forward_pre_hooks for m in learner.modules())


def _kept(learner: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in learner.state_dict().items()}


IMAGES = ((1, 6, 6), 2)
CASES = {
    "vmap": (mlp_model, ((3,), 3), {"execution": "vmap"}, None),
    "loop": (mlp_model, ((3,), 3), {"execution": "loop"}, None),
    "head": (mlp_model, ((3,), 3), {"adapt": "head"}, None),
    "tied head": (mlp_model, ((3,), 3), {"adapt": "head", "tie_head": True}, None),
    "attention": (Attention, ((5, 4), 3), {}, None),
    "recurrent": (Recurrent, ((5, 4), 3), {}, None),
    "fold": (conv_model, IMAGES, {"execution": "fold"}, "support"),
    "conv head": (conv_model, IMAGES, {"adapt": "head", "execution": "head"}, "support"),
    **{
        f"{way} {stats}": (conv_model, IMAGES, {"execution": way}, stats)
        for way in ("loop", "single")
        for stats in ("batch", "support", "running")
    },
}


@pytest.mark.parametrize("case", CASES)
def test_every_thread_gets_what_one_thread_gets(case):
    make, (shape, ways), choices, norm_stats = CASES[case]
    torch.manual_seed(0)
    learner = _learner(make().to(F64), **choices)
    batch = class_batch(shape, tasks=THREADS, ways=ways)

    def answer(learner: ibaml.MetaLearner, task: int) -> torch.Tensor:
        x, y = batch.support_x[task], batch.support_y[task]
        posterior = learner.adapt(x, y, norm_stats=norm_stats)
        return posterior.predict_proba(batch.query_x[task], samples=3)

    alone = copy.deepcopy(learner)
    expected = [answer(alone, task) for task in range(THREADS)]
    before = _kept(learner)
    answers = together(*(lambda t=t: answer(learner, t) for t in range(THREADS)))
    for one, other in zip(answers, expected, strict=True):
        assert torch.equal(one, other)
    _same_weights(learner, before)


def test_one_posterior_predicts_in_many_threads():
    batch = class_batch((1, 6, 6), tasks=1, ways=2)
    posterior = _learner(conv_model()).adapt_all(batch)
    expected = [posterior.nll(batch.query_x, batch.query_y, 2 + i) for i in range(4)]
    answers = together(
        *(lambda i=i: posterior.nll(batch.query_x, batch.query_y, 2 + i) for i in range(4))
    )
    assert all(torch.equal(a, b) for a, b in zip(answers, expected, strict=True))


def test_a_likelihood_with_weights_is_its_owners_in_every_thread():
    """Its weights are swapped as the network's are; its noise is read by predictions."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(6, 3, generator=rng, dtype=F64)
    likelihood = ibaml.Gaussian(0.5, learn=True)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(F64)
    learner = _learner(model, likelihood=likelihood)
    before = _kept(learner)

    def answer(task: int) -> torch.Tensor:
        return torch.stack(learner.adapt(x, x[:, :1] + task).predict(x))

    expected = [answer(task) for task in range(4)]
    actual = together(*(lambda t=t: [answer(t) for _ in range(3)] for t in range(4)))
    for task, answers in enumerate(actual):
        assert all(torch.equal(a, expected[task]) for a in answers)
    _same_weights(learner, before)


# --- while somebody trains -----------------------------------------------------------------------


def _train(learner: ibaml.MetaLearner, steps: int = 2) -> list[float]:
    """A few steps as a training loop takes them, validation between them."""
    optimizer = torch.optim.SGD(learner.parameters(), 0.1)
    losses = []
    for step in range(steps):
        learner.train()
        batch = class_batch((1, 6, 6), ways=2, seed=step)
        loss = learner(batch, torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        learner.eval()
    return losses


@pytest.mark.parametrize("rule", ["implicit", "recomputed"])
def test_adapting_changes_nothing_of_training(rule):
    """Neither the losses nor the weights nor batch norm's running statistics; and copies that are
    taken on the way are whole."""
    choices = {} if rule == "implicit" else {"gradient": Unrolled(recompute=True)}
    learner = _learner(conv_model(), execution="loop").replace(**choices)
    alone = copy.deepcopy(learner)
    expected = _train(alone)
    batch = class_batch((1, 6, 6), tasks=1, ways=2)
    ended = Event()

    def train() -> list[float]:
        try:
            return _train(learner)
        finally:
            ended.set()

    shapes = {n: t.shape for n, t in alone.state_dict().items()}

    def adapt() -> None:
        while not ended.is_set():
            for norm_stats in ("batch", "support", "running"):
                posteriors = learner.adapt_all(batch, norm_stats=norm_stats)
                posteriors.predict_proba(batch.query_x)

    def save() -> None:
        while not ended.is_set():
            for taken in (learner, copy.deepcopy(learner)):
                assert {n: t.shape for n, t in taken.state_dict().items()} == shapes
                assert all(isinstance(p, nn.Parameter) for p in taken.parameters())

    losses, _, _ = together(train, adapt, save)
    assert losses == expected
    _same_weights(learner, _kept(alone))


def test_a_learner_that_shares_the_weights_predicts_meanwhile():
    """`replace` shares the module; another learner's network may share a part of it."""
    backbone = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).to(F64)
    first, second = (nn.Sequential(backbone, nn.Linear(4, 3).to(F64)) for _ in range(2))
    learner = _learner(first)
    others = [learner, learner.replace(samples=3), learner.replace(execution="loop")]
    others.append(_learner(second, adapt="head"))
    batch = class_batch((3,), tasks=4)

    def answer(i: int) -> torch.Tensor:
        x, y = batch.support_x[i], batch.support_y[i]
        return others[i].adapt(x, y).predict_proba(batch.query_x[i])

    def loss() -> torch.Tensor:
        value = learner(batch, torch.Generator().manual_seed(0))
        gradients = torch.autograd.grad(value, list(learner.parameters()), allow_unused=True)
        return torch.cat([value.detach()[None], *(g.flatten() for g in gradients if g is not None)])

    before = _kept(learner), _kept(others[-1])
    expected = [loss(), *(answer(i) for i in range(4))]
    jobs = [loss, *(lambda i=i: answer(i) for i in range(4))]
    actual = together(*(lambda job=job: [job() for _ in range(4)] for job in jobs))
    for answers, right in zip(actual, expected, strict=True):
        assert all(torch.equal(a, right) for a in answers)
    _same_weights(learner, before[0])
    _same_weights(others[-1], before[1])


class Gate(nn.Module):
    """Stops the thread that closed it in the middle of the network, until it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp_model()
        self.inside: list[Event] = []  # entered, may go on

    def forward(self, x):
        y = self.inner(x)
        if self.inside:
            entered, opened = self.inside
            self.inside = []
            entered.set()
            assert opened.wait(30)
        return y


@pytest.mark.parametrize("who", ["the learner", "one that shares its weights"])
def test_a_second_training_call_is_refused_and_the_first_goes_on(who):
    gate = Gate()
    learner = _learner(gate)
    other = learner if who == "the learner" else learner.replace(samples=3)
    batch = class_batch((3,))

    def loss() -> torch.Tensor:
        return learner(batch, torch.Generator().manual_seed(0)).detach()

    expected, before = loss(), _kept(learner)
    entered, opened = Event(), Event()
    gate.inside = [entered, opened]

    def second() -> None:
        assert entered.wait(30)
        try:
            for call in (lambda: other(batch), lambda: other.one_meta_step().__enter__()):
                with pytest.raises(RuntimeError, match=r"one thread may train at a time.*deepcopy"):
                    call()
        finally:
            opened.set()

    answers, _ = together(loss, second)
    assert torch.equal(answers, expected)
    _same_weights(learner, before)
    assert torch.equal(together(loss)[0], expected), "then another thread may"


def test_a_meta_step_of_many_calls_is_one_threads_and_adapting_goes_on():
    learner = _learner(conv_model())
    batch = class_batch((1, 6, 6), ways=2)
    x, y = batch.support_x[0], batch.support_y[0]
    expected = learner.adapt(x, y).predict_proba(batch.query_x[0])

    def refused() -> torch.Tensor:
        with pytest.raises(RuntimeError, match="one thread may train at a time"):
            learner(batch)
        return learner.adapt(x, y).predict_proba(batch.query_x[0])

    with learner.one_meta_step():
        learner(batch).backward()
        assert torch.equal(together(refused)[0], expected)
        learner(batch).backward()
    together(lambda: learner(batch).backward())


# --- what a call leaves --------------------------------------------------------------------------


def test_kernels_are_chosen_for_as_long_as_anybody_needs_them():
    """The flags are the process's: the first sets them, and only the last restores them."""

    def flags() -> list[bool]:
        cuda = torch.backends.cuda
        attention = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled()
        return [*attention, cuda.math_sdp_enabled(), torch.backends.cudnn.enabled]

    before = flags()
    assert before == [True] * 4
    seen = []
    first_in, second_in, first_out = Event(), Event(), Event()

    def first() -> None:
        with twice_differentiable(True):
            first_in.set()
            assert second_in.wait(30)
        first_out.set()

    def second() -> None:
        assert first_in.wait(30)
        with twice_differentiable(True):
            second_in.set()
            assert first_out.wait(30)
            seen.append(flags())

    together(first, second)
    assert seen == [[False, False, True, False]]
    assert flags() == before


def test_the_last_call_does_not_decide_the_next():
    """Its inputs' size, classes and examples choose how weight sets run, for it alone."""
    rng = torch.Generator().manual_seed(0)

    def pictures(count: int, side: int, ways: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(count, 1, side, side, generator=rng, dtype=F64)
        return x, torch.arange(count) % ways

    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
    ).to(F64)  # fmt: skip
    learner = _learner(net)
    small, large = pictures(4, 6, 2), pictures(6, 24, 2)
    query = pictures(5, 24, 2)[0]
    nothing = large[0][:0], large[1][:0]
    plan = {"norm_stats": "running"}

    def answers() -> list[torch.Tensor]:
        probabilities = [learner.adapt(*nothing, **plan).predict_proba(query)]
        batch = ibaml.TaskBatch(*(t[None] for t in (*small, *small)))
        probabilities.append(
            learner.problem(batch, 0)[0](torch.zeros(1, 2 * learner.layout.size).to(F64))
        )
        return [*probabilities, learner.adapt(*small, **plan).predict_proba(query)]

    expected, strategy = answers(), learner.strategy
    for left in (large, small, pictures(2, 8, 1)):
        learner.adapt(*left)
        assert learner.strategy == strategy, "it tells of training"
        for actual, right in zip(answers(), expected, strict=True):
            assert torch.equal(actual, right)


def test_a_posterior_that_training_overtook_refuses_to_predict():
    learner = _learner(Gate(), adapt="head", execution="loop")
    batch = class_batch((3,), tasks=1)
    x, y = batch.support_x[0], batch.support_y[0]
    learner.adapt(x, y)
    entered, opened = Event(), Event()
    learner.model.inside = [entered, opened]

    def step() -> None:
        assert entered.wait(30)
        with torch.no_grad():
            learner.model.inner[0].weight.add_(0.1)
        opened.set()

    posterior, _ = together(lambda: learner.adapt(x, y), step)
    with pytest.raises(RuntimeError, match=r"call learner\.adapt again"):
        posterior.predict_proba(batch.query_x[0])


# --- locks ---------------------------------------------------------------------------------------


def test_a_copy_is_free_whatever_the_learner_is_doing():
    """It has locks of its own, and begins no half-done meta-step."""
    learner = _learner(conv_model())
    batch = class_batch((1, 6, 6), ways=2)
    expected = learner.adapt_all(batch).predict_proba(batch.query_x)
    with learner.one_meta_step(), held(learner.model):
        for made in (copy.deepcopy(learner), pickle.loads(pickle.dumps(learner))):
            (posteriors,) = together(lambda made=made: made.adapt_all(batch))
            assert torch.equal(posteriors.predict_proba(batch.query_x), expected)
            together(lambda made=made: made(batch).backward())
            moved, still = (dict(of.model.named_buffers()) for of in (made, learner))
            assert not torch.equal(moved["1.running_mean"], still["1.running_mean"])


def test_nothing_is_on_the_network_but_while_it_runs():
    """A copy that another thread takes between two passes has none of our hooks."""
    taken = []

    class Copies(ibaml.objectives.QueryNll):
        def __call__(self, v, support, query):
            taken.extend(together(lambda: copy.deepcopy(learner)))
            return super().__call__(v, support, query)

    learner = _learner(conv_model(), objective=Copies())
    before = _kept(learner)
    learner(class_batch((1, 6, 6), ways=2)).backward()
    assert not torch.equal(learner.model[1].running_mean, before["model.1.running_mean"])
    _same_weights(taken[0], before)


def test_modules_with_a_part_in_common_wait_for_each_other_and_nobody_else():
    part, other = nn.Linear(1, 1), nn.Linear(1, 1)
    first, second = nn.Sequential(part), nn.Sequential(part)
    both = nn.Sequential(part, other)
    entered, left = Event(), Event()
    order = []

    def one() -> None:
        with held(first):
            entered.set()
            together(lambda: _take(other))  # not shared: nobody waits
            order.append("first")
        assert left.wait(30)

    def two() -> None:
        assert entered.wait(30)
        with held(second):
            order.append("second")
        left.set()

    def _take(module: nn.Module) -> None:
        with held(module):
            pass

    together(one, two)
    assert order == ["first", "second"]

    def often(*modules: nn.Module) -> None:
        for _ in range(300):
            with held(*modules):
                pass

    together(  # every order of the same locks
        lambda: often(other, both), lambda: often(both, other), lambda: often(second, other, first)
    )
