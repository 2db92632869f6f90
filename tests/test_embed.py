"""Pictures to vectors: the network against its source, preparation, the cache, a module of one's
own, scikit-learn, the command line, and runs that read photographs."""

from __future__ import annotations

import io
import json
import pickle
import sqlite3
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import ibaml
from ibaml import words
from ibaml.backbones import DEFAULT, PRETRAINED, BackboneError, pretrained
from ibaml.backbones.efficientnet import Conv, EfficientNetLite
from ibaml.cli import app
from ibaml.tasks import (
    DataError,
    Dataset,
    DataWarning,
    Inputs,
    from_dataset,
    image_folder,
    open_data,
)
from ibaml.tasks import vectors as store
from ibaml.tasks.cache import clear, entries
from ibaml.tasks.images import ImageError, open_picture
from ibaml.tasks.networks import Known
from ibaml.tasks.sources.embedded import embedded
from ibaml.training import resolve

runner = CliRunner()
QUICK = "efficientnet_lite0"
pytest.importorskip(PRETRAINED[QUICK].wheel)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("IBAML_CACHE", str(tmp_path_factory.mktemp("cache")))


def smooth(seed: int, width: int = 60, height: int = 40) -> Image.Image:
    """A picture without detail, which survives compression and resizing."""
    small = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def photographs(root: Path, classes: int = 4, each: int = 3) -> Path:
    for c in range(classes):
        (root / "shop" / f"class {c}").mkdir(parents=True)
        for i in range(each):
            smooth(10 * c + i).save(root / "shop" / f"class {c}" / f"{i}.png")
    return root


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))


# --- the network


@pytest.mark.parametrize("name", PRETRAINED)
def test_the_network_is_that_of_the_published_weights(name):
    """Against the package the weights were made for, with its batch norms unfolded."""
    oracle = pytest.importorskip("efficientnet_lite_pytorch").EfficientNet
    known = pretrained(name)
    saved = torch.load(known.path(), map_location="cpu", weights_only=True)
    theirs = oracle.from_name(name.replace("_", "-"))
    theirs.load_state_dict(saved)
    theirs = theirs.double().eval()
    ours = EfficientNetLite(known.width, known.depth).double()
    ours.load_published(saved)
    x = torch.randn(1, 3, known.side, known.side, dtype=torch.float64)
    with torch.no_grad():
        expected = theirs.extract_features(x).mean((2, 3))
        torch.testing.assert_close(ours(x), expected, rtol=1e-11, atol=1e-11)
    assert expected.shape == (1, known.features)


@pytest.mark.parametrize(("side", "kernel", "stride"), [(7, 3, 2), (8, 3, 2), (8, 5, 2), (9, 5, 1)])
def test_padding_is_the_same_as_a_sum_over_every_place(side, kernel, stride):
    conv = Conv(1, 1, kernel, stride, linear=True).double()
    nn.init.normal_(conv.weight)
    x = torch.randn(1, 1, side, side, dtype=torch.float64)
    places = -(-side // stride)
    before = max((places - 1) * stride + kernel - side, 0) // 2
    padded = torch.zeros(side + 2 * kernel, side + 2 * kernel, dtype=torch.float64)
    padded[before : before + side, before : before + side] = x[0, 0]
    expected = torch.stack([
        torch.stack([
            (padded[i * stride :, j * stride :][:kernel, :kernel] * conv.weight[0, 0]).sum()
            for j in range(places)
        ]) for i in range(places)
    ])  # fmt: skip
    torch.testing.assert_close(conv(x)[0, 0], expected)


def test_weights_of_another_network_are_refused():
    saved = torch.load(pretrained(QUICK).path(), map_location="cpu", weights_only=True)
    with pytest.raises((KeyError, ValueError)):
        EfficientNetLite(1.1, 1.2).load_published(saved)


def test_a_file_that_is_not_the_known_one_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "w.pth").write_bytes(b"anything")
    monkeypatch.setattr(type(pretrained(QUICK)), "path", lambda self: tmp_path / "w.pth")
    with pytest.raises(BackboneError, match=r"its SHA-256 differs.*force-reinstall"):
        pretrained(QUICK).load()


def test_names(monkeypatch):
    assert set(words.PRETRAINED) == set(PRETRAINED)
    assert ibaml.Embed().name == DEFAULT == words.PRETRAINED[0]
    with pytest.raises(BackboneError, match=r"is none of .*; did you mean efficientnet_lite2"):
        ibaml.Embed("efficientnet_lite9")
    with pytest.raises(ValueError, match="transform is for a module of your own"):
        ibaml.Embed(QUICK, lambda picture: picture)
    with pytest.raises(TypeError, match="a name or a torch module, got int"):
        ibaml.Embed(3)
    monkeypatch.setitem(__import__("sys").modules, pretrained(QUICK).wheel, None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "ibaml\[backbones\]"'):
        ibaml.Embed(QUICK, cache=False)(smooth(0))


# --- pictures


def test_a_picture_by_path_array_and_pillow_is_the_same(tmp_path):
    embed = ibaml.Embed(QUICK)
    smooth(1).save(tmp_path / "a.png")
    pixels = np.asarray(smooth(1))
    given = [tmp_path / "a.png", str(tmp_path / "a.png"), smooth(1), pixels,
             pixels.transpose(2, 0, 1)]  # fmt: skip
    vectors = embed(given)
    assert vectors.shape == (5, embed.features)
    assert vectors.dtype == np.float32
    assert np.abs(vectors - vectors[0]).max() < 1e-4
    for one in given:
        assert np.abs(embed(one) - vectors[0]).max() < 1e-4
    gray = pixels[:, :, 0]
    same = embed([gray, np.stack([gray] * 3, 2)])
    assert np.abs(same[0] - same[1]).max() < 1e-4
    batch = torch.from_numpy(np.stack([pixels, pixels])).permute(0, 3, 1, 2)
    assert np.abs(embed(batch) - vectors[0]).max() < 1e-4


def test_it_sees_the_middle_square_upright(tmp_path):
    embed = ibaml.Embed(QUICK, cache=False)
    wide = np.asarray(smooth(2, 80, 40))
    assert np.abs(embed(wide) - embed(wide[:, 20:60].copy())).max() < 1e-4
    exif = Image.Exif()
    exif[0x0112] = 6  # shown turned by 90 degrees
    turned = Image.fromarray(wide[:, 20:60]).rotate(90)
    turned.save(tmp_path / "turned.png", exif=exif)
    assert np.abs(embed(tmp_path / "turned.png") - embed(wide)).max() < 1e-4


def test_a_large_photograph_is_decoded_smaller_and_embedded_alike():
    picture = smooth(3, 3200, 2400)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=95)
    small = open_picture(buffer.getvalue(), "p", least=448)
    assert 448 <= min(small.size) < 1200
    embed = ibaml.Embed(QUICK, cache=False)
    full = open_picture(buffer.getvalue(), "p")
    assert full.size == (3200, 2400)
    assert cosine(embed(small), embed(full)) > 0.98


def test_other_pictures_in_the_batch_change_nothing():
    embed = ibaml.Embed(QUICK, cache=False)
    together = embed([smooth(i) for i in range(5)])
    assert np.abs(together[3] - embed(smooth(3))[0]).max() < 1e-4


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([], "no image to embed"),
        ("nowhere.jpg", "nowhere.jpg is not there: name an image file"),
        (".", "is a folder: name an image file"),
        ([np.zeros((4, 4, 3))], "uint8"),
        ([np.zeros((4, 4, 7), np.uint8)], "1 or 3 channels"),
        ([3], "a path, a Pillow picture or a uint8 array, got 3"),
    ],
)
def test_refusals(images, message):
    with pytest.raises(DataError, match=message):
        ibaml.Embed(QUICK)(images)


def test_each_picture_is_tried(tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no image")
    seen = []
    embed = ibaml.Embed(QUICK, progress=lambda done, total: seen.append((done, total)))
    vectors, failures = embed.try_each([smooth(0), tmp_path / "bad.png", smooth(1)])
    assert list(failures) == [1]
    assert "bad.png: not a readable image" in failures[1]
    assert np.isnan(vectors[1]).all()
    assert np.isfinite(vectors[[0, 2]]).all()
    assert seen[-1] == (3, 3)
    with pytest.raises(ImageError, match=r"1 of 2 images cannot be read(.|\n)*bad\.png"):
        embed([smooth(0), tmp_path / "bad.png"])


# --- the cache


def never(self, x):
    raise AssertionError("the network ran")


def test_what_was_embedded_is_not_embedded_again(tmp_path, monkeypatch):
    smooth(0).save(tmp_path / "a.png")
    first = ibaml.Embed(QUICK)([tmp_path / "a.png"])
    (tmp_path / "another name").write_bytes((tmp_path / "a.png").read_bytes())
    assert [entry.name for entry in entries()] == [f"embeddings-{QUICK}"]
    monkeypatch.setattr(Known, "vectors", never)
    assert np.array_equal(ibaml.Embed(QUICK)([tmp_path / "another name"]), first)
    with pytest.raises(AssertionError):
        ibaml.Embed(QUICK, cache=False)([tmp_path / "a.png"])
    with pytest.raises(AssertionError):
        ibaml.Embed(QUICK)(smooth(1))
    assert clear().removed == 1
    assert not entries()


def test_a_damaged_cache_is_made_anew_and_an_unusable_one_done_without(tmp_path, monkeypatch):
    embed = ibaml.Embed(QUICK)
    first = embed(smooth(0))
    (file,) = (e.path / "vectors.sqlite" for e in entries())
    file.write_bytes(b"damaged" * 1000)
    assert np.abs(embed(smooth(0)) - first).max() < 1e-4
    with sqlite3.connect(file) as base:
        base.execute("UPDATE vectors SET vector = x'00'")  # too short to be one
    assert np.abs(embed(smooth(0)) - first).max() < 1e-4
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("IBAML_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="embeddings are not kept"):
        again = ibaml.Embed(QUICK)(smooth(0))
    assert np.abs(again - first).max() < 1e-4


def test_the_cache_is_bounded_and_keeps_what_was_used_last(monkeypatch):
    monkeypatch.setattr(store, "MOST", 10)
    vectors = store.Vectors("x", "d" * 24, 2)
    day = [100.0 * 86400]
    monkeypatch.setattr(store.time, "time", lambda: day[0])
    keys = [bytes([i]) for i in range(10)]
    vectors.put({key: np.array([i, i], np.float32) for i, key in enumerate(keys)})
    day[0] += 86400
    assert vectors.get(keys[:3])[keys[2]].tolist() == [2, 2]
    vectors.put({b"new": np.zeros(2, np.float32)})
    left = vectors.get([*keys, b"new"])
    assert set(keys[:3]) | {b"new"} <= set(left)
    assert len(left) == 9


def test_many_threads_may_use_the_cache_at_once():
    def use(number: int) -> bool:
        mine = store.Vectors("x", "d" * 24, 3)
        keys = [bytes([number, i]) for i in range(5)]
        for i, key in enumerate(keys):
            mine.put({key: np.array([number, i, 0], np.float32), b"shared": np.zeros(3, "f4")})
        found = mine.get([*keys, b"shared"])
        return mine.usable and [found[key][0] for key in keys] == [number] * 5 and len(found) == 6

    with ThreadPoolExecutor(8) as pool, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(pool.map(use, range(8)))


# --- a module of one's own


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.norm = nn.BatchNorm2d(5)

    def forward(self, x):
        return self.norm(self.conv(x))


def test_any_module_and_transform():
    torch.manual_seed(0)
    own = Own().double()
    own.norm.eval()
    embed = ibaml.Embed(own, lambda p: torch.from_numpy(np.array(p)).permute(2, 0, 1) / 255)
    assert embed.features == 5
    assert embed.name == "Own"
    x = torch.from_numpy(np.stack([np.asarray(smooth(i)) for i in range(3)])).permute(0, 3, 1, 2)
    vectors = embed([smooth(i) for i in range(3)])
    assert own.training
    assert not own.norm.training  # as they were
    own.eval()
    expected = own(x.double() / 255).mean((2, 3)).detach().numpy()
    assert np.abs(vectors - expected).max() < 1e-5
    assert not entries()  # what a transform does has no digest


def test_without_a_transform_a_module_reads_imagenet_s_normalization():
    embed = ibaml.Embed(nn.Identity())
    vectors = embed(np.full((50, 70, 3), 255, np.uint8))
    expected = (1 - np.array([0.485, 0.456, 0.406])) / np.array([0.229, 0.224, 0.225])
    assert np.abs(vectors[0] - expected).max() < 1e-5


@pytest.mark.parametrize(
    ("module", "transform", "message"),
    [
        (nn.Flatten(0), None, r"vectors \(n, d\) or maps \(n, C, H, W\), got shape"),
        (nn.Identity(), lambda p: np.zeros(3), "must return a tensor .* got ndarray"),
        (nn.Identity(), lambda p: torch.full((1, 2, 2), torch.nan), "returned a NaN"),
    ],
)
def test_modules_and_transforms_that_do_not_fit(module, transform, message):
    with pytest.raises((TypeError, DataError), match=message):
        ibaml.Embed(module, transform)(smooth(0))


def test_a_description_is_read_and_checked():
    embed = ibaml.Embed(QUICK)
    described = json.loads(json.dumps(embed.described()))
    assert ibaml.Embed.read(described) == embed
    with pytest.raises(DataError, match="its weights or the preparation"):
        ibaml.Embed.read({**described, "digest": "0"})
    for damaged in ({}, {**described, "backbone": 3}, []):
        with pytest.raises(DataError, match="damaged"):
            ibaml.Embed.read(damaged)
    torch.manual_seed(0)
    own = Own()
    described = json.loads(json.dumps(ibaml.Embed(own).described()))
    with pytest.raises(DataError, match=r"a module of your own \(Own\): pass it in"):
        ibaml.Embed.read(described)
    assert ibaml.Embed.read(described, own).backbone is own
    with pytest.raises(DataError, match="Own is not the backbone that was used"):
        ibaml.Embed.read(described, Own())


# --- scikit-learn


def test_it_is_a_transformer_of_scikit_learn(tmp_path):
    from sklearn.base import clone
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    def transform(picture):
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).float()

    own = Own()
    embed = ibaml.Embed(own, transform, batch_size=7)
    again = clone(embed)
    assert again.get_params() | {"backbone": own} == embed.get_params()
    assert again.backbone is not own
    embed.set_params(batch_size=3)
    assert embed.get_params()["batch_size"] == 3
    assert embed.get_params()["transform"] is transform
    with pytest.raises(ValueError, match="no parameter 'size'"):
        embed.set_params(size=3)
    pictures = [smooth(i) for i in range(6)]
    assert np.array_equal(embed.fit(pictures).transform(pictures), embed.fit_transform(pictures))
    pipeline = make_pipeline(ibaml.Embed(QUICK), LogisticRegression())
    paths = []
    for i, picture in enumerate(pictures):
        picture.save(tmp_path / f"{i}.png")
        paths.append(str(tmp_path / f"{i}.png"))
    labels = ["a", "b"] * 3
    fitted = clone(pipeline).fit(paths, labels)
    assert list(fitted.predict(np.array(paths))) == labels
    assert list(fitted.predict(np.array(paths)[:, None])) == labels
    copy = pickle.loads(pickle.dumps(fitted))
    assert list(copy.predict(paths)) == labels
    assert len(pickle.dumps(fitted)) < 100_000  # without the network


# --- folders, the command line and runs


def test_a_folder_becomes_vectors(tmp_path):
    photographs(tmp_path / "p", 3)
    (tmp_path / "p" / "shop" / "class 1" / "bad.png").write_bytes(b"no image")
    embed = ibaml.Embed(QUICK)
    with pytest.warns(DataWarning, match="1 of 10 images cannot be read: they are left out"):
        data = image_folder(tmp_path / "p", embed=embed)
    assert data.examples.shape == (9, embed.features)
    assert not data.is_image
    expected = embed([smooth(10 * c + i) for c in range(3) for i in range(3)])
    assert np.abs(data.examples - expected).max() < 1e-4
    assert data.embed == embed
    decoded = np.stack([np.asarray(smooth(i, 9, 9)).transpose(2, 0, 1) for i in range(2)])
    named = embedded(Dataset("d", decoded, np.array([0, 1]), ("a", "b"), {}), embed)
    assert np.abs(named.examples - embed([smooth(i, 9, 9) for i in range(2)])).max() < 1e-4
    pairs = from_dataset([(smooth(i), i % 2) for i in range(4)], embed=embed)
    assert np.abs(pairs.examples - embed([smooth(i) for i in (0, 2, 1, 3)])).max() < 1e-4


def run(*given: object, code: int = 0) -> str:
    done = runner.invoke(app, [*map(str, given)], env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done.output


def test_from_photographs_to_a_run_that_reads_photographs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photographs(tmp_path / "p", 9, 4)
    lists = {s: [f"class {c}" for c in range(3 * i, 3 * i + 3)]
             for i, s in enumerate(("train", "val", "test"))}  # fmt: skip
    Path("s.json").write_text(json.dumps(lists))
    Path("p/shop/class 0/bad.png").write_bytes(b"no image")
    shown = run("embed", "p", "--backbone", QUICK, "--splits", "s.json", "--out", "p.npz")
    assert "bad.png: not a readable image" in shown
    assert "DataWarning" not in shown
    assert "36 photographs of 9 classes, 1,280 numbers each" in shown
    assert "p.npz exists" in run("embed", "p", "--out", "p.npz", code=1)
    assert "name it" in run("embed", "p", "--out", "p.txt", code=1)
    assert "1 classes" in run(
        "embed", "p", "--backbone", QUICK, "--class-level", 1, "--out", "p.npz", "--force"
    )
    run("embed", "p", "--backbone", QUICK, "--splits", "s.json", "--out", "p.npz", "--force")
    with np.load("p.npz", allow_pickle=False) as content:
        assert content["files"][0] == "shop/class 0/0.png"
        assert set(content["split"]) == {"train", "val", "test"}
    few = ("--ways", 3, "--queries", 2, "--val-tasks", 5, "--threads", 1, "--no-tensorboard")
    run("train", "--data", "p.npz", *few, "--out", "a")  # splits as in the file
    run("train", "--data", "p", "--splits", "s.json", "--backbone", QUICK, *few, "--out", "b")
    a, b = ibaml.load("a"), ibaml.load("b")
    x = [f"p/shop/class {c}/0.png" for c in (6, 7, 8)]
    assert torch.allclose(a.inputs(x), b.inputs(x), atol=1e-4)
    assert a.inputs.embed == ibaml.Embed(QUICK)
    posterior = b.adapt(b.inputs(x), ["u", "v", "w"])
    assert list(posterior.predict_labels(posterior.inputs(x))) == ["u", "v", "w"]
    posterior.save("shop.ibaml")
    again = ibaml.load_posterior("shop.ibaml")
    assert list(again.predict_labels(again.inputs(x))) == ["u", "v", "w"]
    assert "accuracy" in run("evaluate", "b", "--tasks", 3, "--queries", 2, "--device", "cpu")
    assert "accuracy" in run(
        "evaluate", "b", "--data", "p.npz", "--tasks", 3, "--queries", 2, "--device", "cpu"
    )
    heads = ("--heads", "centroid", "--ways", 3, "--shots", 1, "--queries", 2, "--tasks", 3)
    few = ("--val-tasks", 3, "--device", "cpu", "--out", "h.json")
    for trained in ("a", "b"):  # the same pictures, whether embedded before or by the run
        assert "centroid" in run("bench", "heads", "p.npz", "--run", trained, *heads, *few)
    with np.load("p.npz") as content:
        other = {**content, "x": content["x"] + 1}
    np.savez("other.npz", **other)
    shown = run("bench", "heads", "other.npz", "--run", "b", *heads, *few, code=1)
    assert "was trained on p with other examples" in shown


def test_inputs_of_vectors_are_rows_still():
    inputs = Inputs((2,), (1.0, 0.0), (2.0, 1.0), embed=ibaml.Embed(QUICK))
    for rows in ([[3.0, 4.0]], np.array([[3.0, 4.0]]), torch.tensor([[3.0, 4.0]])):
        assert inputs(rows).tolist() == [[1.0, 4.0]]
    own = Inputs((5,), (0.0,) * 5, (1.0,) * 5, embed=ibaml.Embed(Own()))
    again = Inputs.read(json.loads(json.dumps(own.described())))
    assert again(np.ones((1, 5))).tolist() == [[1.0] * 5]
    with pytest.raises(DataError, match=r"a module of your own \(Own\): pass it in"):
        again([smooth(0)])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backbone": "resnet"}, "backbone must be one of efficientnet_lite"),
        ({"backbone": QUICK, "image_size": 50}, "image_size is not read with a backbone"),
        ({"backbone": QUICK, "augment": True}, "augment is not read with a backbone"),
        ({"backbone": QUICK, "model": "conv4"}, "model conv4 reads images, and backbone"),
        ({"backbone": QUICK, "data": "x.npz"}, "backbone is not read for x.npz"),
        ({"backbone": QUICK, "data": "sinusoids"}, "backbone is not read for sinusoids"),
        ({"class_level": 2, "data": "x.csv"}, "class_level is not read for x.csv"),
    ],
)
def test_settings_that_contradict_a_backbone(given, message):
    with pytest.raises(ValueError, match=message):
        resolve({"data": "photos", **given})


def test_an_npz_whose_embedding_is_not_known_here_is_read_as_vectors(tmp_path):
    x, y = np.zeros((4, 3), np.float32), np.array(["a", "a", "b", "b"])
    for content in ("{", "[]", "{}", json.dumps({"embed": ibaml.Embed(Own()).described()})):
        np.savez(tmp_path / "f.npz", x=x, y=y, embed=np.array(content))
        with pytest.warns(DataWarning, match="will not read pictures"):
            assert open_data(str(tmp_path / "f.npz")).embed is None
    np.savez(tmp_path / "f.npz", x=x, y=y, split=np.array(["train", "train", "test", "dev"]))
    with pytest.raises(DataError, match="split 'dev' is none of train, val, test"):
        open_data(str(tmp_path / "f.npz"))
    np.savez(tmp_path / "f.npz", x=x, y=y, split=np.array(["train", "train", "test", "test"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        splits = open_data(str(tmp_path / "f.npz")).splits
    assert splits == {"train": (0,), "test": (1,)}
