"""Are answers, their familiarity, their promises and their files right?"""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ibaml
from ibaml.answers import Classifier, Head, Prior, fit_prior
from ibaml.answers.classifier import UNKNOWN
from ibaml.answers.compact import compacted, expanded
from ibaml.answers.promises import ERRORS, LEVELS, SHOTS, WAYS, Promises
from ibaml.answers.suggest import suggested
from ibaml.container import ArtifactError
from ibaml.heads.from_base import fit
from ibaml.training import resolve, train

FEATURES = 40
FIXTURES = Path(__file__).parent / "artefacts" / "answers"


def drawn(classes: int, each: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Classes that differ most along the first features, as embeddings do."""
    rng = np.random.default_rng(seed)
    wide = np.linspace(2.0, 0.2, FEATURES)
    means = rng.normal(size=(classes, 1, FEATURES)) * wide
    x = means + rng.normal(size=(classes, each, FEATURES)) * np.linspace(0.4, 1.0, FEATURES)
    y = torch.arange(classes).repeat_interleave(each)
    return torch.from_numpy(x.reshape(-1, FEATURES)).float(), y


@pytest.fixture(scope="module")
def prior() -> Prior:
    return fit_prior(*drawn(30, 25, 0), "drawn", tasks=60)


@pytest.fixture
def shop(prior):
    x, y = drawn(4, 6, 1)
    one = Classifier(prior, source={"kind": "vectors"})
    one.add(x, [f"class {c}" for c in y.tolist()], [f"{i}.jpg" for i in range(len(x))])
    return one


# --- the head


def test_directions_answer_by_cosines_to_shrunk_means(prior):
    x, y = drawn(3, 4, 2)
    z = prior.mapped(x).double().numpy()
    b = prior.between.double().numpy()
    rows = np.stack([4 * b / (4 * b + 1) * z[y.numpy() == c].mean(0) for c in range(3)])
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    head = Head.of(prior, x, y, 3)
    expected = prior.temperature * z @ rows.T
    np.testing.assert_allclose(head.scores(prior.mapped(x)).numpy(), expected, atol=2e-4)


def test_few_features_answer_by_the_densities_of_a_new_example():
    """Against the joint Gaussian of a class's examples and a query, conditioned by hand."""
    x, y = drawn(3, 5, 3)
    x = x[:, :4]
    head = Head.of(None, x, y, 3)
    b = head.prior.between.double().numpy()
    z = head.z.double().numpy()
    query = np.array([0.3, -0.2, 1.0, 0.5])
    for c in range(3):
        own = z[y.numpy() == c]
        log_p = 0.0
        for k in range(4):
            joint = b[k] * np.ones((6, 6)) + np.eye(6)
            gain = joint[5, :5] @ np.linalg.inv(joint[:5, :5])
            mean, variance = gain @ own[:, k], joint[5, 5] - gain @ joint[:5, 5]
            log_p += -0.5 * ((query[k] - mean) ** 2 / variance + np.log(2 * np.pi * variance))
        found = head.scores(torch.from_numpy(query[None]).float())[0, c]
        assert float(found) == pytest.approx(log_p, abs=1e-3)


def test_examples_are_left_out_exactly(prior):
    x, y = drawn(3, 4, 4)
    head = Head.of(prior, x, y, 3)
    scores = head._left_out(head.z, torch.nn.functional.normalize(head._means, dim=-1), 1.0)
    assert head._several.tolist() == list(range(12))
    for row in (0, 5, 11):
        stay = torch.arange(len(y)) != row
        rest = Head.of(replace(prior, promises=None), x[stay], y[stay], 3)
        assert float(scores[row].logsumexp(-1)) == pytest.approx(
            float(rest.likeness(head.z[row : row + 1])), abs=1e-4
        )


def test_what_all_examples_share_does_not_make_others_familiar(prior):
    """Photographs in one light: new classes share it too."""
    x, y = drawn(12, 10, 11)
    x = x + torch.from_numpy(np.random.default_rng(1).normal(size=FEATURES) * 3).float()
    shown = (y < 8) & (torch.arange(len(y)) % 10 < 3)
    head = Head.of(prior, x[shown], y[shown], 8)
    new = head.familiar(prior.mapped(x[y >= 8]))
    known = head.familiar(prior.mapped(x[(y < 8) & ~shown]))
    assert (new < 0.05).mean() > 0.3
    assert (known < 0.05).mean() < 0.15
    plain, _ = drawn(8, 3, 12)
    usual = Head.of(prior, plain, torch.arange(8).repeat_interleave(3), 8)
    assert float(torch.as_tensor(usual.drift).norm()) < 0.1


def test_a_temperature_that_examples_contradict_is_moved(prior):
    rng = np.random.default_rng(0)
    noise = torch.from_numpy(rng.normal(size=(60, FEATURES))).float()
    head = Head.of(prior, noise, torch.arange(60) % 3, 3)  # classes that do not differ at all
    assert head.warmth < 0.7
    x, y = drawn(3, 20, 5)
    assert 0.7 < Head.of(prior, x, y, 3).warmth < 1.5


def test_many_features_without_a_prior_are_centered_as_far_as_chance_does_not_explain():
    x, y = drawn(5, 1, 6)
    far = Prior.of_support(x + 100, y, 5)
    np.testing.assert_allclose(far.center, (x + 100).mean(0).sqrt(), rtol=0.02)  # roots: positive
    near = Prior.of_support(x - x.mean(0) + 1e-3, y, 5)
    assert near.center.norm() < 0.1
    assert Prior.of_support(x[:1], y[:1], 1).center.norm() == 0


def test_a_map_in_few_directions_is_the_same_map():
    x, y = drawn(12, 20, 7)
    found = fit(x, y)
    center, map, between = expanded(compacted(x, y, found.scalars, FEATURES - 1), found.scalars)
    whole = Prior.of_base(found, "whole")
    few = replace(whole, center=center, map=map, between=between)
    a, b = whole.mapped(x), few.mapped(x)
    np.testing.assert_allclose(a @ a.mT, b @ b.mT, atol=0.02)
    one, other = (Head.of(p, x[:60], y[:60], 3) for p in (whole, few))
    np.testing.assert_allclose(one.scores(a), other.scores(b), atol=0.5)


def test_a_run_on_vectors_is_a_prior(tmp_path):
    """It answers as the run itself does."""
    x, y = drawn(30, 12, 13)
    np.savez(tmp_path / "vectors.npz", x=3 * x.numpy() + 7, y=y.numpy())
    settings = {"data": str(tmp_path / "vectors.npz"), "ways": 3, "queries": 5, "iterations": 0}
    train(resolve(settings), tmp_path / "run")
    learner, new = ibaml.load(tmp_path / "run"), 3 * drawn(3, 6, 14)[0] + 7
    shown, labels = new[::2], torch.arange(3).repeat_interleave(3)
    posterior = learner.adapt(learner.inputs(shown.numpy()), labels)
    theirs = posterior.predict_proba(learner.inputs(new.numpy()))
    shop = Classifier(Prior.open(tmp_path / "run"))
    shop.add(shown, [str(c) for c in labels.tolist()])
    shop._head = replace(shop.head())
    shop._head.__dict__["warmth"] = 1.0
    np.testing.assert_allclose(shop.answer(new).probabilities, theirs, atol=2e-3)


# --- what is measured


def test_unknown_classes_are_found_at_the_stated_false_alarms(prior):
    alarms, caught, better = [], [], []
    for seed in range(20):
        x, y = drawn(20, 15, 100 + seed)
        shown = y < 10
        support = shown & (torch.arange(len(y)) % 15 < 5)
        head = Head.of(prior, x[support], y[support], 10)
        known, new = prior.mapped(x[shown & ~support]), prior.mapped(x[~shown])
        alarms.append((head.familiar(known) < 0.05).mean())
        caught.append((head.familiar(new) < 0.05).mean())
        soft = [head.log_probabilities(z).amax(-1).numpy() for z in (known, new)]
        like = [head.likeness(z).numpy() for z in (known, new)]
        ranks = [(k[:, None] > n).mean() for k, n in (like, soft)]
        better.append(ranks[0] - ranks[1])
    assert 0.02 < np.mean(alarms) < 0.09
    assert np.mean(caught) > 0.8
    assert np.mean(better) > 0


def test_sure_answers_keep_their_promise(prior):
    broken = []
    for seed in range(40):
        x, y = drawn(10, 15, 300 + seed)
        support = torch.arange(len(y)) % 15 < 2
        head = Head.of(prior, x[support], y[support], 10)
        best = head.log_probabilities(prior.mapped(x[~support])).max(-1)
        sure = best.values.exp().numpy() >= prior.promises.sure(0.05, 10, 2)
        wrong = (best.indices != y[~support]).numpy() & sure
        broken.append(wrong.sum() > 0.05 * sure.sum())
        assert sure.mean() > 0.2
    assert np.mean(broken) <= 0.1


def test_classes_of_few_examples_promise_what_they_can():
    x, y = drawn(12, 25, 15)
    few = (torch.arange(len(y)) % 25 < 4) | (y < 7)
    uneven = fit_prior(x[few], y[few], tasks=2)
    assert uneven.promises is not None
    assert uneven.promises.sure(0.05, 5, 1) > 1  # too few tasks for a promise
    pairs = torch.arange(len(y)) % 25 < 2
    assert fit_prior(x[pairs], y[pairs], tasks=2).promises is None


def test_tables_are_between_the_measured_sizes_what_lies_between():
    scores = np.broadcast_to(np.linspace(0, 5, len(LEVELS)), (len(WAYS), len(SHOTS), len(LEVELS)))
    scores = scores + 2.0 * np.log(SHOTS)[None, :, None] + np.log(WAYS)[:, None, None]
    confidence = np.broadcast_to(np.linspace(0.9, 0.1, len(ERRORS)), (*scores.shape[:2], 5))
    table = Promises(scores, confidence.copy(), 0.5)
    middle = scores[3, 1, 5] + 2 * np.log(3 / 2)  # 10 ways, 3 shots
    assert table.familiar(np.array([middle]), 10, np.array([3]))[0] == pytest.approx(LEVELS[5])
    assert table.median(10, 40) == table.median(10, SHOTS[-1])
    assert table.sure(0.05, 7, 3) == pytest.approx(0.5)
    assert table.sure(0.0001, 7, 3) > 1  # nothing is promised there


def test_gaussian_tables_know_a_new_class_too():
    rng = np.random.default_rng(0)
    alarms, caught = [], []
    for _ in range(40):
        means = 4 * rng.normal(size=(6, 3))
        x = means[:, None] + rng.normal(size=(6, 30, 3))
        y = torch.arange(5).repeat_interleave(10)
        head = Head.of(None, torch.tensor(x[:5, :10].reshape(-1, 3)).float(), y, 5)
        parts = (torch.tensor(part.reshape(-1, 3)).float() for part in (x[:5, 10:], x[5:]))
        known, new = map(head.prior.mapped, parts)
        alarms.append((head.familiar(known) < 0.05).mean())
        caught.append((head.familiar(new) < 0.05).mean())
    assert 0.01 < np.mean(alarms) < 0.08
    assert np.mean(caught) > 0.5


def test_a_suggestion_is_a_class_that_was_never_shown(shop):
    new, _ = drawn(1, 12, 77)
    pool = torch.cat([shop.x, new])
    head = shop.head()
    first = suggested(head, head.prior.mapped(pool), 3)
    assert first[0] >= len(shop.x)
    assert len(set(first)) == 3
    assert len(shop.suggest(pool, 1000)) == len(pool)


# --- the classifier


def test_any_numbers_of_classes_and_examples(prior):
    x, _ = drawn(3, 30, 8)
    for known in (prior, None):
        one = Classifier(known)
        one.add(x[:30], ["many"] * 30)
        alone = one.answer(x)
        assert set(alone.best) == {"many"}
        assert alone.unknown[30:].mean() > alone.unknown[:30].mean() + 0.5
        one.add(x[30:31], ["single"])
        answers = one.answer(x)
        right = [b == ("many" if i < 30 else "single") for i, b in enumerate(answers.best[:60])]
        assert np.mean(right) > 0.9
        np.testing.assert_allclose(answers.probabilities.sum(1), 1, rtol=1e-5)
        assert answers.labels.count(UNKNOWN) == answers.unknown.sum()


def test_what_is_added_and_removed_leaves_no_trace(shop, prior):
    x, _ = drawn(5, 6, 9)
    before = shop.answer(x).probabilities
    shop.add(x[:3], ["new", "new", "class 1"], ["a", "b", "c"])
    assert shop.classes[-1] == "new"
    assert shop.add_new(x[:4], ["new", "new", "class 1", "new"], ["a", "b", "c", "d"]) == 1
    assert shop.remove(files=["c"], classes=["new"]) == 4
    np.testing.assert_array_equal(shop.answer(x).probabilities, before)


def test_a_saved_classifier_answers_the_same(shop, tmp_path):
    x, _ = drawn(6, 6, 10)
    again = Classifier.load(shop.save(tmp_path / "shop.ibaml"))
    one, other = shop.answer(x), again.answer(x)
    for name in ("probabilities", "familiar", "unknown", "sure"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert (again.files, again.source) == (shop.files, shop.source)
    bare = Classifier()
    bare.add(x, ["a", "b"] * 18)
    np.testing.assert_array_equal(
        Classifier.load(bare.save(tmp_path / "bare.ibaml")).answer(x).probabilities,
        bare.answer(x).probabilities,
    )


def test_the_packaged_prior_names_its_source():
    photos = Prior.open("photos")
    assert photos.features == 1280
    assert "CC BY 4.0" in photos.facts["attribution"]
    assert photos.promises is not None
    assert photos.without is not None
    from ibaml.answers import prior as module

    assert (module._FOLDER / "photos.safetensors").stat().st_size < 1_000_000


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda p: p.write_bytes(pickle.dumps({"x": 1})), "damaged, or not a file of ibaml"),
        (lambda p: p.write_bytes(p.read_bytes()[:500]), "damaged"),
        (lambda p: p.write_bytes(b""), "damaged"),
        (lambda p: _header(p, format="9"), "update ibaml"),
        (lambda p: _header(p, ibaml="posterior"), "holds a posterior, not a classifier"),
        (lambda p: _facts(p, labels=["a"]), "do not match"),
        (lambda p: _facts(p, labels=None), "do not match"),
        (lambda p: _facts(p, source=[1]), "do not match"),
        (lambda p: _facts(p, prior={"name": 1}), "do not match"),
        (lambda p: _tensor(p, "x", torch.full((24, FEATURES), torch.nan)), "not finite"),
        (lambda p: _tensor(p, "prior/map", torch.zeros(2, 2)), "differ in size"),
        (lambda p: _tensor(p, "prior/promises/scores", torch.zeros(1)), "another shape"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_classifier_is_refused_with_a_sentence(shop, tmp_path, spoil, sentence):
    path = shop.save(tmp_path / "shop.ibaml")
    spoil(path)
    with pytest.raises(ArtifactError, match=sentence):
        Classifier.load(path)


def _metadata(path):
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size])["__metadata__"]


def _header(path, **changed):
    save_file(load_file(path), path, {**_metadata(path), **changed})


def _facts(path, **changed):
    facts = json.loads(_metadata(path)["facts"])
    _header(path, facts=json.dumps({**facts, **changed}))


def _tensor(path, name, value):
    metadata, tensors = _metadata(path), load_file(path)
    save_file({**tensors, name: value}, path, metadata)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda s: s.add(np.zeros((1, 3)), ["a"]), "3 features, and the examples' 40"),
        (lambda s: s.add(np.zeros((2, 40)), ["a"]), "one of each"),
        (lambda s: s.add(np.full((1, 40), np.nan), ["a"]), "not finite"),
        (lambda s: s.add(np.zeros((1, 40)), ["unknown"]), "rename it"),
        (lambda s: s.add(np.array([["a"] * 40]), ["a"]), "must be numbers"),
        (lambda s: s.remove(classes=["none"]), "no class 'none'; the classes are class 0"),
        (lambda s: s.remove(files=["x.png"]), "no example is of the file"),
        (lambda s: s.remove(classes=s.classes), "nothing would be left"),
        (lambda s: s.answer(np.zeros((1, 40)), false_alarms=5), "e.g. 0.05"),
        (lambda s: s.suggest(np.zeros((1, 40)), 0), "1 or more"),
        (lambda s: Classifier().answer(np.zeros((1, 40))), "no examples yet"),
        (lambda s: Prior.open("fotos"), "there: photos"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said(shop, call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call(shop)


# --- files of every format there was -------------------------------------------------------------


@pytest.mark.parametrize("file", sorted(FIXTURES.glob("*.ibaml")), ids=lambda f: f.stem)
def test_classifiers_of_every_format_there_was_are_read(file):
    """Written by `python tests/test_answers.py`, once for every format, and kept."""
    expected = json.loads(file.with_suffix(".json").read_text())
    answers = Classifier.load(file).answer(np.eye(6))
    np.testing.assert_allclose(answers.probabilities, expected["probabilities"], atol=1e-4)
    np.testing.assert_allclose(answers.familiar, expected["familiar"], atol=1e-4)
    assert answers.labels == expected["labels"]


def write_fixtures() -> None:
    FIXTURES.mkdir(exist_ok=True)
    x, y = drawn(12, 8, 0)
    shop = Classifier(fit_prior(x[:, :6], y, tasks=5))
    shop.add(x[:20, :6], [f"class {c}" for c in y[:20].tolist()], [f"{i}.jpg" for i in range(20)])
    shop.save(FIXTURES / "classifier-1.ibaml")
    answers = shop.answer(np.eye(6))
    content = {
        "probabilities": answers.probabilities.tolist(), "familiar": answers.familiar.tolist(),
        "labels": answers.labels,
    }  # fmt: skip
    (FIXTURES / "classifier-1.json").write_text(json.dumps(content))


if __name__ == "__main__":
    write_fixtures()
