"""Datasets in every public layout, from small files made in exactly those formats; untrusted
input; and the real files, where IBAML_DATA says they are."""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
import os
import pickle
import stat
import tarfile
import time
import zipfile
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ibaml.tasks import (
    DataError,
    Dataset,
    DataWarning,
    Table,
    cifar100,
    cub,
    feature_vectors,
    image_folder,
    image_list,
    miniimagenet,
    omniglot,
)
from ibaml.tasks.cache import cached, entries
from ibaml.tasks.catalog import open_data
from ibaml.tasks.dataset import published, split_by_hash
from ibaml.tasks.images import ImageError, decode
from ibaml.tasks.inspect import inspect_dataset
from ibaml.tasks.sources.unpickle import unpickle
from real_data import DATA, real


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("IBAML_CACHE", str(tmp_path_factory.mktemp("cache")))


def picture(seed: int, size: int = 12, mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(seed)
    shape = (size, size, 3) if mode == "RGB" else (size, size)
    return Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8), mode)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def make_folder(root: Path, classes=("a", "b", "c"), count: int = 4) -> Path:
    for c, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for i in range(count):
            (root / name / f"{i}.png").write_bytes(encoded(picture(100 * c + i)))
    return root


class TestFolders:
    def test_one_folder_per_class(self, tmp_path):
        data = image_folder(make_folder(tmp_path / "mine"), image_size=12)
        assert data.classes == ("a", "b", "c")
        assert data.examples.shape == (12, 3, 12, 12)
        expected = np.asarray(picture(101)).transpose(2, 0, 1)
        row = data.files.index("b/1.png")
        assert data.classes[data.labels[row]] == "b"
        assert np.array_equal(data.examples[row], expected)

    def test_names_with_spaces_and_unicode(self, tmp_path):
        names = ("ä ö", "日本", "with space")
        assert set(image_folder(make_folder(tmp_path, names), image_size=8).classes) == set(names)

    def test_a_zip_of_it_in_an_outer_folder(self, tmp_path):
        make_folder(tmp_path / "mine")
        with zipfile.ZipFile(tmp_path / "mine.zip", "w") as z:
            for f in sorted((tmp_path / "mine").rglob("*.png")):
                z.write(f, f"outer/{f.relative_to(tmp_path / 'mine')}")
        a = image_folder(tmp_path / "mine", image_size=12)
        b = image_folder(tmp_path / "mine.zip", image_size=12)
        assert np.array_equal(a.examples, b.examples)
        assert a.classes == b.classes

    def test_split_folders_split_file_and_hash(self, tmp_path):
        for split, classes in (("train", "ab"), ("test", "cd")):
            make_folder(tmp_path / "s" / split, classes)
        data = image_folder(tmp_path / "s", image_size=8)
        assert data.splits == {"train": (0, 1), "test": (2, 3)}
        make_folder(tmp_path / "f")
        (tmp_path / "split.json").write_text(json.dumps({"train": ["c"], "test": ["a"]}))
        data = image_folder(tmp_path / "f", splits=tmp_path / "split.json", image_size=8)
        assert data.splits == {"train": (2,), "test": (0,)}
        names = [f"class {i}" for i in range(1000)]
        split = split_by_hash(names)
        assert sorted(sum(split.values(), ())) == list(range(1000))
        assert 580 < len(split["train"]) < 700
        where = {names[i]: s for s, m in split.items() for i in m}
        again = split_by_hash(names[::2])
        assert all(where[names[::2][i]] == s for s, m in again.items() for i in m)

    def test_a_class_in_two_splits_is_refused(self, tmp_path):
        make_folder(tmp_path / "f")
        (tmp_path / "split.json").write_text(json.dumps({"train": ["a", "b"], "test": ["b"]}))
        with pytest.raises(DataError, match="'b' is in two splits, train and test"):
            image_folder(tmp_path / "f", splits=tmp_path / "split.json", image_size=8)

    @pytest.mark.parametrize(
        ("text", "message"),
        [("{", "split file"), ('["a"]', "needs"), ('{"train": ["zebra"]}', "zebra")],
    )
    def test_bad_split_files(self, tmp_path, text, message):
        make_folder(tmp_path / "f")
        (tmp_path / "split.json").write_text(text)
        with pytest.raises(DataError, match=message):
            image_folder(tmp_path / "f", splits=tmp_path / "split.json", image_size=8)

    def test_loose_images_empty_classes_and_nothing(self, tmp_path):
        make_folder(tmp_path / "f")
        (tmp_path / "f" / "loose.png").write_bytes(encoded(picture(1)))
        with pytest.raises(DataError, match=r"loose\.png lies in no class folder"):
            image_folder(tmp_path / "f")
        make_folder(tmp_path / "g")
        (tmp_path / "g" / "empty").mkdir()
        with pytest.warns(DataWarning, match="no image in 'empty'"):
            assert image_folder(tmp_path / "g", image_size=8).classes == ("a", "b", "c")
        (tmp_path / "h").mkdir()
        with pytest.raises(DataError, match="found no images"):
            image_folder(tmp_path / "h")
        with pytest.raises(DataError, match="does not exist"):
            image_folder(tmp_path / "nowhere")

    def test_a_list_in_a_csv(self, tmp_path):
        make_folder(tmp_path)
        rows = [("path", "label", "split")]
        rows += [
            (f"{c}/{i}.png", c.upper(), s)
            for c, s in (("a", "train"), ("b", "test"))
            for i in range(4)
        ]
        with (tmp_path / "list.csv").open("w", newline="") as f:
            csv.writer(f).writerows(rows)
        data = image_list(tmp_path / "list.csv", image_size=8)
        assert data.classes == ("A", "B")
        assert data.splits == {"train": (0,), "test": (1,)}
        assert open_data(str(tmp_path / "list.csv"), image_size=8).classes == ("A", "B")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("file,label\na/0.png,x\n", "no column 'path'"),
            ("path,label\na/9.png,x\n", r"1 of 1 files are missing.*a/9\.png"),
            ("path,label\n", "no rows"),
            ("path,label\na/0.png,\n", "line 2"),
        ],
    )
    def test_bad_lists(self, tmp_path, text, message):
        make_folder(tmp_path)
        (tmp_path / "list.csv").write_text(text)
        with pytest.raises(DataError, match=message):
            image_list(tmp_path / "list.csv", image_size=8)


class TestOddLayouts:
    @pytest.mark.parametrize("name", ["Train", "validation", "valid"])
    def test_splits_by_other_names(self, tmp_path, name):
        make_folder(tmp_path / name, "ab")
        make_folder(tmp_path / "test", "cd")
        split = "train" if name == "Train" else "val"
        assert image_folder(tmp_path, image_size=8).splits == {split: (0, 1), "test": (2, 3)}

    def test_what_lies_beside_splits_is_refused(self, tmp_path):
        make_folder(tmp_path / "a" / "train", "ab")
        make_folder(tmp_path / "a" / "samples", "cd")
        with pytest.raises(DataError, match="'samples' lies beside"):
            image_folder(tmp_path / "a", image_size=8)

    def test_a_split_folder_alone_stays_a_split(self, tmp_path):
        make_folder(tmp_path / "train")
        assert image_folder(tmp_path, image_size=8).splits == {"train": (0, 1, 2)}

    def test_a_file_listed_twice(self, tmp_path):
        make_folder(tmp_path)
        (tmp_path / "l.csv").write_text("path,label\na/0.png,x\na/0.png,y\n")
        with pytest.raises(DataError, match=r"'a/0\.png' is listed twice"):
            image_list(tmp_path / "l.csv", image_size=8)

    def test_splits_of_a_list_are_named_as_splits(self, tmp_path):
        make_folder(tmp_path)
        (tmp_path / "l.csv").write_text("path,label,split\na/0.png,x,dev\n")
        with pytest.raises(DataError, match="line 2: split is 'dev'"):
            image_list(tmp_path / "l.csv", image_size=8)

    def test_text_that_is_not_utf8(self, tmp_path):
        (tmp_path / "l.csv").write_bytes("path,label\nä.png,x\n".encode("latin-1"))
        with pytest.raises(DataError, match=r"l\.csv: is not UTF-8"):
            image_list(tmp_path / "l.csv", image_size=8)

    def test_two_folders_alike_in_names_sizes_and_times(self, tmp_path):
        for k in (0, 1):
            root = tmp_path / str(k) / "mine" / "a"
            root.mkdir(parents=True)
            Image.new("L", (8, 8), 100 * k).save(root / "x.bmp")
            os.utime(root / "x.bmp", (0, 0))
        one, two = (
            image_folder(tmp_path / str(k) / "mine", image_size=8).examples.mean() for k in (0, 1)
        )
        assert (one, two) == (0, 100)


class TestUntrustedImages:
    def test_a_png_named_jpg(self):
        assert decode(encoded(picture(0)), "x.jpg", 12).shape == (3, 12, 12)

    def test_truncated(self):
        data = encoded(picture(0, 64), "JPEG")
        with pytest.raises(ImageError, match=r"broken\.jpg"):
            decode(data[: len(data) // 2], "broken.jpg", 12)
        with pytest.raises(ImageError, match="not a readable image"):
            decode(b"hello", "text.png", 12)

    def test_a_bomb_is_refused_before_it_is_decoded(self):
        for side, message in ((12000, "12000×12000 pixels"), (30000, "bomb")):
            bomb = encoded(Image.new("1", (side, side)))
            assert len(bomb) < 2_000_000
            with pytest.raises(ImageError, match=rf"big\.png: .*{message}"):
                decode(bomb, "big.png", 12)

    def test_gray_cmyk_palette_alpha_and_sixteen_bits(self):
        gray = picture(0, mode="L")
        assert np.array_equal(decode(encoded(gray), "g", 12)[0], np.asarray(gray))
        assert decode(encoded(picture(0).convert("CMYK"), "JPEG"), "c", 12).shape == (3, 12, 12)
        assert decode(encoded(picture(0).convert("P")), "p", 12).shape == (3, 12, 12)
        clear = Image.new("RGBA", (12, 12), (0, 0, 0, 0))
        assert decode(encoded(clear), "a", 12).min() == 255
        for value in (200, 257, 65535 // 2, 65535):
            deep = Image.fromarray(np.full((12, 12), value, dtype=np.uint16))
            assert (decode(encoded(deep), "d", 12, 1) == value // 257).all()
        floating = Image.fromarray(np.zeros((12, 12), dtype=np.float32))
        with pytest.raises(ImageError, match="no known scale"):
            decode(encoded(floating, "TIFF"), "f.tif", 12)

    def test_exif_rotation(self):
        image = Image.new("RGB", (20, 10))
        image.paste((255, 0, 0), (0, 0, 10, 10))
        exif = Image.Exif()
        exif[0x0112] = 6  # shown turned by 90 degrees
        turned = decode(encoded(image, "JPEG", exif=exif, quality=95), "e", 10)
        assert turned[0, :4].mean() > 200
        assert turned[0, 6:].mean() < 60

    def test_not_square_is_cropped_at_the_center(self):
        image = Image.new("L", (30, 10))
        image.paste(255, (10, 0, 20, 10))
        assert decode(encoded(image), "w", 10, 1).min() > 200

    def test_one_bad_image_of_a_published_dataset_leaves_nothing_in_the_cache(self, tmp_path):
        for half in ("background", "evaluation"):
            make_folder(tmp_path / f"images_{half}" / "Greek", ["alpha"], 2)
        (tmp_path / "images_background" / "Greek" / "alpha" / "0.png").write_bytes(b"no image")
        (tmp_path / "images_evaluation" / "Greek" / "alpha" / "1.png").write_bytes(b"nor this")
        with pytest.raises(ImageError, match=r"2 of 4 images(.|\n)*alpha/0(.|\n)*alpha/1"):
            omniglot(tmp_path, split="background")
        assert not entries()


class TestUntrustedArchives:
    @pytest.mark.parametrize(
        "name", ["../evil.png", "/etc/evil.png", "a/../../evil.png", "C:\\x.png"]
    )
    def test_paths_that_leave(self, tmp_path, name):
        with zipfile.ZipFile(tmp_path / "z.zip", "w") as z:
            z.writestr(name, encoded(picture(0)))
        with pytest.raises(DataError, match="leaves the archive"):
            image_folder(tmp_path / "z.zip")

    def test_links(self, tmp_path):
        link = zipfile.ZipInfo("a/link.png")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        with zipfile.ZipFile(tmp_path / "z.zip", "w") as z:
            z.writestr(link, "/etc/passwd")
        with pytest.raises(DataError, match="is a link"):
            image_folder(tmp_path / "z.zip")

    def test_a_name_twice(self, tmp_path):
        with zipfile.ZipFile(tmp_path / "z.zip", "w") as z:
            z.writestr("a/1.png", encoded(picture(0)))
            with pytest.warns(UserWarning, match="Duplicate"):
                z.writestr("a/1.png", encoded(picture(1)))
        with pytest.raises(DataError, match=r"holds 'a/1\.png' twice"):
            image_folder(tmp_path / "z.zip")

    def test_a_member_with_a_wrong_checksum(self, tmp_path):
        path = tmp_path / "z.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as z:
            z.writestr("a/1.png", encoded(picture(0, 40)))
        data = bytearray(path.read_bytes())
        data[200] ^= 255
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"a/1\.png cannot be read"):
            image_folder(path)

    def test_damaged_and_not_an_archive(self, tmp_path):
        (tmp_path / "t.zip").write_text("no zip")
        with pytest.raises(DataError, match="neither a folder nor a zip"):
            image_folder(tmp_path / "t.zip")

    def test_a_pickle_that_would_run_code(self, tmp_path):
        class Evil:
            def __reduce__(self):
                return (os.system, (f"touch {tmp_path}/ran",))

        with pytest.raises(DataError, match="which is not data"):
            unpickle(pickle.dumps({"image_data": Evil()}), "evil.pkl")
        assert not (tmp_path / "ran").exists()
        with pytest.raises(DataError, match="not a readable pickle"):
            unpickle(b"\x80garbage", "x.pkl")
        with pytest.raises(DataError, match="dictionary"):
            unpickle(pickle.dumps([1]), "x.pkl")


class TestMiniImageNet:
    """Three public layouts of the same images give the same dataset."""

    def content(self):
        lists = published("miniimagenet")
        chosen = {s: lists[s][:2] for s in ("train", "val", "test")}
        return {
            s: {w: [picture(hash(w) % 10**6 + i, 84) for i in range(3)] for w in ws}
            for s, ws in chosen.items()
        }

    def check(self, data: Dataset):
        assert {s: len(m) for s, m in data.splits.items()} == {"train": 2, "val": 2, "test": 2}
        assert data.examples.shape == (18, 3, 84, 84)
        for _split, classes in self.content().items():
            for wnid, pictures in classes.items():
                c = data.classes.index(wnid)
                rows = data.examples[data.starts[c] : data.starts[c + 1]]
                wanted = {np.asarray(p).transpose(2, 0, 1).tobytes() for p in pictures}
                assert {r.tobytes() for r in rows} == wanted

    def test_tables_beside_images(self, tmp_path):
        (tmp_path / "images").mkdir()
        for split, classes in self.content().items():
            rows = [("filename", "label")]
            for wnid, pictures in classes.items():
                for i, p in enumerate(pictures):
                    name = f"{wnid}{i:08d}.png"
                    (tmp_path / "images" / name).write_bytes(encoded(p))
                    rows.append((name, wnid))
            with (tmp_path / f"{split}.csv").open("w", newline="") as f:
                csv.writer(f).writerows(rows)
        self.check(miniimagenet(tmp_path))
        (tmp_path / "images" / name).unlink()
        with pytest.raises(DataError, match=r"1 of 6 files are not in images/"):
            miniimagenet(tmp_path)

    def test_a_folder_per_class(self, tmp_path, monkeypatch):
        module = import_module("ibaml.tasks.sources.miniimagenet")

        monkeypatch.setattr(
            module, "published", lambda _: {s: list(c) for s, c in self.content().items()}
        )
        for classes in self.content().values():
            for wnid, pictures in classes.items():
                (tmp_path / wnid).mkdir()
                for i, p in enumerate(pictures):
                    (tmp_path / wnid / f"{i}.png").write_bytes(encoded(p))
        self.check(miniimagenet(tmp_path))

    def test_the_pickles(self, tmp_path):
        for split, classes in self.content().items():
            images, index = [], {}
            for wnid, pictures in classes.items():
                index[wnid] = list(range(len(images), len(images) + 3))
                images += [np.asarray(p) for p in pictures]
            content = {"image_data": np.stack(images), "class_dict": index}
            (tmp_path / f"mini-imagenet-cache-{split}.pkl").write_bytes(pickle.dumps(content, 2))
        self.check(miniimagenet(tmp_path))

    def test_every_published_class_folder_is_read(self, tmp_path):
        for names in published("miniimagenet").values():
            make_folder(tmp_path, names, 1)
        data = miniimagenet(tmp_path, image_size=8)
        assert {s: len(m) for s, m in data.splits.items()} == {"train": 64, "val": 16, "test": 20}

    def test_pickles_that_do_not_fit_together(self, tmp_path):
        path = tmp_path / "mini-imagenet-cache-train.pkl"
        images = np.zeros((2, 84, 84, 3), np.uint8)
        for index, message in (
            ({"a": [0, 5]}, "outside the 2 images"),
            ({"a": [0], "b": [0]}, "in two classes"),
            ([0], "must be a dictionary"),
        ):
            path.write_bytes(pickle.dumps({"image_data": images, "class_dict": index}))
            with pytest.raises(DataError, match=message):
                miniimagenet(tmp_path)

    def test_nothing_known(self, tmp_path):
        with pytest.raises(DataError, match="none of the public layouts"):
            miniimagenet(tmp_path)


class TestCifar:
    def archive(self, root: Path) -> None:
        lists = published("cifar-fs")
        fine = sorted(c for names in lists.values() for c in names)
        above = [s for names in published("fc100").values() for s in names]
        coarse_of = [i % 20 for i in range(100)]
        rng = np.random.default_rng(0)
        parts = {"meta": {b"fine_label_names": [f.encode() for f in fine],
                          b"coarse_label_names": [a.encode() for a in above]}}  # fmt: skip
        for part, count in (("train", 2), ("test", 1)):
            labels = [i for i in range(100) for _ in range(count)]
            parts[part] = {
                b"data": rng.integers(0, 256, (len(labels), 3072), dtype=np.uint8),
                b"fine_labels": labels,
                b"coarse_labels": [coarse_of[i] for i in labels],
            }
        with tarfile.open(root / "cifar-100-python.tar.gz", "w:gz") as tar:
            for name, content in parts.items():
                data = pickle.dumps(content, 2)
                member = tarfile.TarInfo(f"cifar-100-python/{name}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        self.pixels = parts["train"][b"data"]

    def test_both_splits(self, tmp_path):
        self.archive(tmp_path)
        data = cifar100(tmp_path, "cifar-fs")
        assert {s: len(m) for s, m in data.splits.items()} == {"train": 64, "val": 16, "test": 20}
        assert data.examples.shape == (300, 3, 32, 32)
        assert data.count(0) == 3
        assert np.array_equal(data.examples[0], self.pixels[0].reshape(3, 32, 32))
        fc = cifar100(tmp_path, "fc100")
        assert {s: len(m) for s, m in fc.splits.items()} == {"train": 60, "val": 20, "test": 20}
        with pytest.raises(DataError, match="neither"):
            cifar100(tmp_path / "nowhere")
        whole = (tmp_path / "cifar-100-python.tar.gz").read_bytes()
        (tmp_path / "cifar-100-python.tar.gz").write_bytes(whole[:5000])
        with pytest.raises(DataError, match="damaged archive"):
            cifar100(tmp_path)


def test_cub(tmp_path, monkeypatch):
    module = import_module("ibaml.tasks.sources.cub")

    lists = {s: names[:2] for s, names in published("cub").items()}
    monkeypatch.setattr(module, "published", lambda _: lists)
    root = tmp_path / "CUB_200_2011" / "images"
    make_folder(root, [c for names in lists.values() for c in names], 2)
    data = cub(tmp_path, image_size=12)
    assert {s: len(m) for s, m in data.splits.items()} == {"train": 2, "val": 2, "test": 2}
    monkeypatch.undo()
    assert {s: len(m) for s, m in published("cub").items()} == {"train": 100, "val": 50, "test": 50}


class TestCache:
    def test_second_start_does_not_decode_and_a_change_is_noticed(self, tmp_path, monkeypatch):
        module = import_module("ibaml.tasks.sources.decode")

        root = make_folder(tmp_path / "f")
        image_folder(root, image_size=8)
        calls = []
        genuine = module.decode
        monkeypatch.setattr(module, "decode", lambda *a: calls.append(a) or genuine(*a))
        image_folder(root, image_size=8)
        assert not calls
        (root / "a" / "new.png").write_bytes(encoded(picture(7)))
        assert len(image_folder(root, image_size=8).examples) == 13
        assert len(calls) == 13

    def test_a_failed_build_leaves_nothing(self):
        def build():
            raise RuntimeError("no")

        with pytest.raises(RuntimeError, match="no"):
            cached("x", "d" * 30, build)
        assert not entries()

    def test_a_damaged_entry_is_made_anew(self):
        def build():
            return np.arange(100, dtype=np.uint8), {"a": 1}

        cached("x", "f" * 30, build)
        entry = entries()[0].path
        for damage in (
            lambda: (entry / "images.npy").write_bytes(b"short"),
            lambda: (entry / "images.npy").unlink(),
            lambda: (entry / "facts.json").write_text("{"),
            lambda: (entry / "facts.json").unlink(),
        ):
            damage()
            array, facts = cached("x", "f" * 30, build)
            assert array.sum() == 4950
            assert facts == {"a": 1}

    def test_a_cache_that_cannot_be_written_is_told_before_the_work(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("IBAML_CACHE", str(tmp_path / "file" / "cache"))
        with pytest.raises(DataError, match="set IBAML_CACHE"):
            cached("x", "a" * 30, lambda: pytest.fail("decoded in vain"))

    def test_two_processes_at_once(self):
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        workers = [context.Process(target=_build_slowly, args=(queue,)) for _ in range(3)]
        for w in workers:
            w.start()
        sums = [queue.get(timeout=60) for _ in workers]
        for w in workers:
            w.join()
        assert len(set(sums)) == 1
        (entry,) = entries()
        assert entry.name == "race"
        assert [p.name for p in Path(os.environ["IBAML_CACHE"]).iterdir()] == ["ibaml-datasets"]
        inside = {p.name for p in (Path(os.environ["IBAML_CACHE"]) / "ibaml-datasets").iterdir()}
        assert inside == {"CACHEDIR.TAG", entry.path.name}


def _build_slowly(queue) -> None:
    def build():
        time.sleep(0.3)
        return np.arange(1000, dtype=np.uint8), {}

    array, _ = cached("race", "e" * 30, build)
    queue.put(int(array.astype(int).sum()))


class TestFeatures:
    def test_any_embeddings(self):
        features = torch.randn(6, 4)
        data = feature_vectors(
            features, [2, 0, 1, 2, 0, 1], splits={"train": ["0", "1"], "test": ["2"]}
        )
        assert data.classes == ("0", "1", "2")
        assert np.array_equal(data.examples[-1], features[3].numpy())
        assert not data.is_image

    @pytest.mark.parametrize(
        ("features", "labels", "message"),
        [
            (np.zeros((2, 3, 1)), [0, 1], "must be floating"),
            (np.zeros((2, 3), int), [0, 1], "must be floating"),
            (np.zeros((2, 3)), [0], "1 labels"),
            (np.full((2, 3), np.nan), [0, 1], "NaN"),
            (np.zeros((2, 0)), [0, 1], "no columns"),
            (np.zeros((2, 3)), np.array([0, np.nan]), r"labels\[1\] is nan, which is not a class"),
            (np.zeros((2, 3)), ["a", None], r"labels\[1\] is None, which is not a class"),
            (np.zeros((2, 3)), torch.tensor([[0], [1]]), r"got \(2, 1\): squeeze them"),
            (np.zeros((2, 3)), [["a"], ["b"]], r"got \(2, 1\): squeeze them"),
        ],
    )
    def test_refusals(self, features, labels, message):
        with pytest.raises(DataError, match=message):
            feature_vectors(features, labels)


class TestTables:
    def write(self, tmp_path, rows) -> Path:
        path = tmp_path / "t.tsv"
        path.write_text("\n".join("\t".join(map(str, r)) for r in rows) + "\n")
        return path

    def rows(self):
        rng = np.random.default_rng(0)
        rows = [("who", "x", "y")]
        for t in range(60):
            rows += [(f"task {t}", rng.normal(), t + rng.normal()) for _ in range(4 + t % 3)]
        return rows

    def test_tasks_of_unequal_size_come_in_separate_batches(self, tmp_path):
        table = Table.read(
            self.write(tmp_path, self.rows()), task="who", features=["x"], target="y"
        )
        batches = table.batches("train", range(40), 3)
        assert {b.query_x.shape[1] for b in batches} == {1, 2, 3}
        assert sum(len(b) for b in batches) == 40
        one = table.batches("train", [17], 3)[0]
        home = next(b for b in batches if 17 in b.task_keys)
        i = home.task_keys.index(17)
        assert torch.equal(home.support_x[i], one.support_x[0])
        assert torch.equal(home.query_y[i], one.query_y[0])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda r: r[:1], "no rows"),
            (lambda r: [("who", "z", "y"), *r[1:]], "no column 'x'"),
            (lambda r: [*r, ("t", "abc", 1)], "x is 'abc', which is not a number"),
            (lambda r: [*r, ("t", "nan", 1)], "not finite"),
        ],
    )
    def test_refusals(self, tmp_path, change, message):
        path = self.write(tmp_path, change(self.rows()))
        with pytest.raises(DataError, match=message):
            Table.read(path, task="who", features=["x"], target="y")

    def test_too_few_rows(self, tmp_path):
        table = Table.read(
            self.write(tmp_path, self.rows()), task="who", features=["x"], target="y"
        )
        with pytest.raises(DataError, match="lower support"):
            table.batches("train", range(3), 50)


def test_inspection_finds_leaks_duplicates_and_small_classes(tmp_path):
    make_folder(tmp_path / "f")
    same = (tmp_path / "f" / "a" / "0.png").read_bytes()
    (tmp_path / "f" / "b" / "leak.png").write_bytes(same)
    (tmp_path / "f" / "a" / "twin.png").write_bytes(same)
    (tmp_path / "s.json").write_text(json.dumps({"train": ["a"], "test": ["b"]}))
    data = image_folder(tmp_path / "f", splits=tmp_path / "s.json", image_size=12)
    report = inspect_dataset(data, 5)
    assert [data.files[r] for pair in report.leaks for r in pair] == ["a/0.png", "b/leak.png"]
    assert [data.files[r] for pair in report.duplicates for r in pair] == ["a/0.png", "a/twin.png"]
    assert report.small == (("c", 4),)
    assert report.unassigned == ("c",)
    assert report.serious


def test_a_leak_is_found_behind_a_class_in_no_split(tmp_path):
    make_folder(tmp_path / "f", count=1)
    for name in ("a", "b", "c"):
        (tmp_path / "f" / name / "same.png").write_bytes(encoded(picture(7)))
    (tmp_path / "s.json").write_text(json.dumps({"train": ["b"], "test": ["c"]}))
    data = image_folder(tmp_path / "f", splits=tmp_path / "s.json", image_size=12)
    report = inspect_dataset(data, 1)
    assert [data.files[r] for pair in report.leaks for r in pair] == ["b/same.png", "c/same.png"]


def test_unknown_names_are_told(tmp_path, monkeypatch):
    monkeypatch.setenv("IBAML_DATA", str(tmp_path))
    with pytest.raises(DataError, match="neither a path nor one of glyphs"):
        open_data("imagenet")
    with pytest.raises(DataError, match="ibaml data get omniglot"):
        open_data("omniglot")


@real
class TestRealFiles:
    def test_omniglot(self):
        data = omniglot(DATA / "omniglot")
        assert data.examples.shape == (32460, 1, 28, 28)
        assert len(data.classes) == 1623
        assert {s: len(m) for s, m in data.splits.items()} == {
            "train": 1028,
            "val": 172,
            "test": 423,
        }
        authors = omniglot(DATA / "omniglot", split="background")
        assert {s: len(m) for s, m in authors.splits.items()} == {"train": 964, "test": 659}
        assert all(data.count(c) == 20 for c in range(1623))
        assert 0.02 < data.moments[0].item() < 0.2  # ink is bright on black

    def test_caltech_as_an_image_folder(self):
        root = DATA / "caltech101"
        data = image_folder(root / "caltech101-84.zip", splits=root / "splits.json")
        assert {s: len(m) for s, m in data.splits.items()} == {"train": 64, "val": 16, "test": 20}
        assert len(data.examples) == 8677

    def test_gapminder(self):
        table = Table.read(
            DATA / "gapminder" / "gapminder.tsv",
            task="country",
            features=["year"],
            target="lifeExp",
        )
        assert len(table.tasks) == 142
        assert table.batches("test", range(4), 5)[0].query_x.shape == (4, 7, 1)
