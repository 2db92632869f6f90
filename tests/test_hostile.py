"""What do files do that mean harm, or are odd? Each is refused by a sentence, within limits."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import zipfile
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load, save
from typer.testing import CliRunner

import ibaml
from ibaml import untrusted
from ibaml.artifact import ArtifactError
from ibaml.cli import app
from ibaml.fields import SettingsError, read_toml, write_toml
from ibaml.tasks import DataError, cifar100, feature_vectors, image_folder, image_list, miniimagenet
from ibaml.tasks.catalog import CATALOG, open_data
from ibaml.tasks.dataset import published
from ibaml.tasks.download import DownloadError, Remote, contents_of, fetch
from ibaml.tasks.images import read_file
from ibaml.tasks.sources.decode import Entry, listed
from ibaml.tasks.sources.unpickle import unpickle
from ibaml.tasks.tree import Tree
from ibaml.training import RunError, Settings, open_run, resume, train
from ibaml.training import run as run_module
from ibaml.training.checkpoint import pack, unpack
from ibaml.training.faults import TrainingError
from ibaml.training.start import load_run
from ibaml.training.watch import JsonLines
from real_data import DATA, real
from runs import waves

ZERO = Path("/dev/zero")
posix = pytest.mark.skipif(os.name != "posix", reason="pipes and devices")


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("IBAML_CACHE", str(tmp_path_factory.mktemp("cache")))


@contextmanager
def within(seconds: int):
    """Fail, instead of hanging: what takes this long is meant never to end."""

    def late(*_):
        raise AssertionError(f"still busy after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def png(color: int = 0) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (8, 8), color).save(buffer, "PNG")
    return buffer.getvalue()


# --- pickles -------------------------------------------------------------------------------------

ARRAY = (
    b"\x80\x02}U\nimage_datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
    b"K\x00\x85U\x01b\x87R"
)
NONE = b"J\xff\xff\xff\xff" * 2


def test_a_pickle_with_an_array_of_pointers_is_refused():
    """An array of objects whose flags a state has cleared: its bytes are taken for addresses."""
    kind = b"cnumpy\ndtype\nU\x02O8K\x00K\x01\x87R(K\x03U\x01|NNN" + NONE + b"K\x00tb"
    data = ARRAY + b"(K\x01K\x01\x85" + kind + b"\x89U\x08AAAAAAAAtbs."
    with pytest.raises(DataError, match="only whole numbers are read"):
        unpickle(data, "x.pkl")


def test_a_pickle_that_changes_a_type_of_numbers_is_refused():
    kind = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNK\x08K\x08K?tb"
    data = ARRAY + b"(K\x01K\x01\x85" + kind + b"\x89U\x01Atbs."
    with pytest.raises(DataError, match="changes the inside of a type"):
        unpickle(data, "x.pkl")


def test_a_pickle_of_lists_in_lists_ends():
    doubled = b"]q\x00" + b"".join(b"](h%ch%ceq%c" % (i, i, i + 1) for i in range(40))
    data = b"\x80\x02}U\x0bfine_labels" + doubled + b"s."
    with within(20), pytest.raises(DataError, match="container twice"):
        unpickle(data, "x.pkl")
    with within(20), pytest.raises(DataError, match="other things than numbers or texts"):
        unpickle(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".", "x.pkl")


def test_a_pickle_of_too_many_instructions_is_refused(monkeypatch):
    monkeypatch.setattr(untrusted, "OPCODES", 1000)
    with pytest.raises(DataError, match="more than 1,000 instructions"):
        unpickle(pickle.dumps({"x": list(range(5000))}, 2), "x.pkl")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickles_of_every_protocol_are_read_without_loading(protocol, monkeypatch):
    images = np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3)
    index = {"a": [0], b"b": np.array([1]), "c": [np.int64(3), 70_000, 2**40, -1]}
    data = pickle.dumps({"image_data": images, b"f": images.T, "class_dict": index}, protocol)
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, None)
    read = unpickle(data, "x.pkl")
    assert np.array_equal(read["image_data"], images)
    assert np.array_equal(read["f"], images.T)
    assert read["class_dict"]["a"] == [0]
    assert read["class_dict"][b"b"].tolist() == [1]
    assert read["class_dict"]["c"] == [3, 70_000, 2**40, -1]


@pytest.mark.parametrize(
    "content",
    [
        {"image_data": 5, "class_dict": {}},
        {"image_data": np.zeros((1, 84, 84, 3), np.uint8), "class_dict": {"a": 5}},
        {"image_data": np.zeros((1, 84, 84, 3), np.uint8), "class_dict": {"a": ["x"]}},
        {"image_data": np.zeros((1, 84, 84, 3), np.uint8), "class_dict": {"a": None}},
        {"image_data": np.zeros((1, 84, 84, 3), np.uint8), "class_dict": {3: [0]}},
        {"image_data": np.zeros((1, 84, 84, 3), np.uint8), "class_dict": {}},
        {"image_data": np.zeros((0, 84, 84, 3), np.uint8), "class_dict": {"a": []}},
        {"image_data": np.zeros((1, 84, 84, 3)), "class_dict": {"a": [0]}},
        {("a", "b"): 1},
        {"image_data": object, "class_dict": {}},
    ],
)
def test_pickles_of_other_things_are_refused_by_a_sentence(tmp_path, content):
    (tmp_path / "mini-imagenet-cache-train.pkl").write_bytes(pickle.dumps(content, 2))
    with pytest.raises(DataError, match=r"mini-imagenet-cache-train\.pkl"):
        miniimagenet(tmp_path)


def test_miniimagenet_prefers_its_images_to_its_pickles(tmp_path):
    for wnid in published("miniimagenet")["val"]:
        (tmp_path / wnid).mkdir()
        (tmp_path / wnid / "1.png").write_bytes(png())
    (tmp_path / "mini-imagenet-cache-train.pkl").write_bytes(b"not read")
    assert len(miniimagenet(tmp_path, image_size=8).classes) == 16


def cifar_binary(root: Path, short: int = 0) -> np.ndarray:
    """An archive in the published form; returns its records."""
    fine = sorted(c for names in published("cifar-fs").values() for c in names)
    coarse = [s for names in published("fc100").values() for s in names]
    rng = np.random.default_rng(0)
    records = rng.integers(0, 256, (300, 3074), dtype=np.uint8)
    records[:, 1] = np.arange(300) % 100
    records[:, 0] = records[:, 1] % 20
    files = {
        "train.bin": records[:200].tobytes(),
        "test.bin": records[200:].tobytes()[: -short or None],
        "fine_label_names.txt": "\n".join(fine).encode() + b"\n",
        "coarse_label_names.txt": "\n".join(coarse).encode() + b"\n",
    }
    with tarfile.open(root / "cifar-100-binary.tar.gz", "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar-100-binary/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return records


def test_cifars_binary_archive_is_read_and_preferred(tmp_path):
    records = cifar_binary(tmp_path)
    (tmp_path / "cifar-100-python.tar.gz").write_bytes(b"not read")
    data = cifar100(tmp_path)
    assert {s: len(m) for s, m in data.splits.items()} == {"train": 64, "val": 16, "test": 20}
    of_third = records[records[:, 1] == 3, 2:].reshape(-1, 3, 32, 32)
    assert np.array_equal(data.examples[data.labels == 3], of_third)
    fc = cifar100(tmp_path, "fc100")
    assert {s: len(m) for s, m in fc.splits.items()} == {"train": 60, "val": 20, "test": 20}


def test_a_cifar_archive_cut_short_or_without_end_is_refused(tmp_path):
    cifar_binary(tmp_path, short=5)
    with pytest.raises(DataError, match="not a multiple of 3,074"):
        cifar100(tmp_path)
    member = tarfile.TarInfo("cifar-100-binary/big")
    member.size = 8 << 40
    with gzip.open(tmp_path / "cifar-100-binary.tar.gz", "wb") as file:
        file.write(member.tobuf() + bytes(512) * 20)
    with within(60), pytest.raises(DataError, match="unpacks to more than"):
        cifar100(tmp_path)


# --- npz and zip ---------------------------------------------------------------------------------


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def header(shape: str, kind: str = "<f4") -> bytes:
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


X, Y = np.ones((6, 2), np.float32), np.array(list("aabbcc"))


def npz(path: Path, x: bytes = b"", y: bytes = b"", method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("x.npy", x or npy(X))
        archive.writestr("y.npy", y or npy(Y))
    return path


def renamed_npy(path: Path) -> None:
    path.write_bytes(npy(X))


def encrypted(path: Path) -> None:
    data = bytearray(npz(path).read_bytes())
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = -1
        while (at := data.find(signature, at + 1)) >= 0:
            data[at + flags] |= 1
    path.write_bytes(data)


def damaged_deflate(path: Path) -> None:
    data = bytearray(npz(path).read_bytes())
    data[35 + 5] ^= 255
    path.write_bytes(data)


def odd_version(path: Path) -> None:
    data = bytearray(npz(path).read_bytes())
    data[data.find(b"PK\x01\x02") + 6] = 99
    path.write_bytes(data)


def bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("y.npy", npy(Y))
        with archive.open("x.npy", "w", force_zip64=True) as member:
            for _ in range(1100):
                member.write(bytes(2**20))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (renamed_npy, r"is an \.npy of one array: save it by np\.savez"),
        (encrypted, "damaged or encrypted"),
        (damaged_deflate, "x.npy cannot be read"),
        (odd_version, "damaged archive"),
        (bomb, "x unpacks to 1,153,433,600 bytes, and"),
        (lambda p: npz(p, header("(2000000, 2000000)")), "holds 0 bytes: it is damaged"),
        (lambda p: npz(p, header("(10000000000000,)", "|V0")), "only numbers and texts"),
        (lambda p: npz(p, npy(np.float32(1))), r"features must be floating, \(examples, D\)"),
        (lambda p: npz(p, y=npy(np.array("a"))), r"labels must be \(N,\)"),
        (lambda p: npz(p, y=npy(np.full(6, 2**31 - 1, "u4")).replace(b"<u4", b"<U1")), "x.npz: "),
        (lambda p: npz(p, method=zipfile.ZIP_LZMA), "packed by method 14.*deflate"),
        (lambda p: p.write_bytes(b"no zip"), r"is no \.npz"),
        (lambda p: np.savez(p, x=X, y=Y, split=np.array("train")), r"split \(\)"),
        (lambda p: np.savez(p, x=X, y=Y.astype(object)), "not a readable array|only numbers"),
    ],
)
def test_an_odd_npz_is_refused_by_a_sentence(tmp_path, make, words):
    path = tmp_path / "x.npz"
    make(path)
    with within(60), pytest.raises(DataError, match=words):
        open_data(str(path))


def test_arrays_in_any_order_and_endianness_are_read(tmp_path):
    x = np.random.default_rng(0).normal(size=(6, 2))
    for one in (np.asfortranarray(x), x.astype(">f8"), x.astype("<f4")):
        np.savez_compressed(tmp_path / "x.npz", x=one, y=Y)
        data = open_data(str(tmp_path / "x.npz"))
        expected = feature_vectors(x.astype(np.float32), Y)
        assert np.array_equal(data.examples, expected.examples)
        assert data.splits == expected.splits


def test_zips_by_lzma_or_of_an_odd_version_are_refused_by_a_sentence(tmp_path):
    path = tmp_path / "z.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("a/1.png", png())
    with pytest.raises(DataError, match="packed by method 14"):
        image_folder(path, image_size=8)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/1.png", png())
    data = bytearray(path.read_bytes())
    data[data.find(b"PK\x01\x02") + 6] = 99
    path.write_bytes(data)
    with pytest.raises(DataError, match="damaged archive"):
        image_folder(path)


def test_a_zip_with_a_file_without_a_name_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.writestr("a/1.png", png())
    data = (tmp_path / "z.zip").read_bytes().replace(b"a/1.png", b"\0/1.png")
    (tmp_path / "z.zip").write_bytes(data)
    with pytest.raises(DataError, match="a file without a name"):
        image_folder(tmp_path / "z.zip")


def test_a_zip_whose_list_of_files_claims_to_be_huge_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(untrusted, "DIRECTORY", 1000)
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        for i in range(100):
            archive.writestr(f"a/{i}.png", b"")
    with pytest.raises(DataError, match="more than 1,000 bytes at once"):
        image_folder(tmp_path / "z.zip")


# --- work without end ----------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("kind", ["device", "pipe", "sparse"])
def test_no_reader_waits_for_a_pipe_or_reads_without_end(tmp_path, kind):
    def odd(name: str) -> Path:
        path = tmp_path / name
        if kind == "device":
            path.symlink_to(ZERO)
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            with path.open("wb") as file:
                file.truncate(20 << 30)
        return path

    (tmp_path / "run").mkdir()
    refused = "more than [0-9,]+ bytes" if kind == "sparse" else "no regular file"
    npz(tmp_path / "x.npz")
    with within(60):
        for read, error in (
            (lambda: open_run(odd("run/config.json").parent), RunError),
            (lambda: open_data(str(tmp_path / "x.npz"), splits=odd("s.json")), DataError),
            (lambda: image_list(odd("l.csv")), DataError),
            (lambda: read_toml(odd("c.toml"), Settings), SettingsError),
            (lambda: ibaml.load_posterior(odd("p.ibaml")), ArtifactError),
            (lambda: read_file(odd("i.png")), DataError),
            (lambda: miniimagenet(odd("mini-imagenet-cache-train.pkl").parent), DataError),
        ):
            with pytest.raises(error, match=refused):
                read()
        with pytest.raises(DataError, match=r"no regular file|neither a folder"):
            image_folder(odd("z.zip"))


@posix
def test_files_without_end_in_a_folder_of_images_are_not_read(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_bytes(png())
    (tmp_path / "a" / "2.png").symlink_to(ZERO)
    os.mkfifo(tmp_path / "a" / "3.png")
    with (tmp_path / "a" / "4.png").open("wb") as file:
        file.truncate(20 << 30)
    with within(60), pytest.warns(UserWarning, match=r"4\.png has more than 268,435,456 bytes"):
        data = image_folder(tmp_path, image_size=8)
    assert data.files == ("a/1.png",)


def test_names_that_appear_twice_are_found_at_once(tmp_path):
    names = [f"a/{i}.png" for i in range(300_000)]
    tree = Tree(tmp_path, (), False)
    entries = [Entry("a", name) for name in [*names, names[-1]]]
    with within(60), pytest.raises(DataError, match=r"'a/299999\.png' is listed twice"):
        listed("x", [(tree, entries)])


def test_class_folders_that_are_links_are_read(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "elsewhere" / name).mkdir(parents=True)
        (tmp_path / "elsewhere" / name / "1.png").write_bytes(png())
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / name).symlink_to(tmp_path / "elsewhere" / name)
    assert image_folder(tmp_path / "data", image_size=8).classes == ("a", "b")


# --- run folders, checkpoints, settings ----------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(waves(iterations=2, val_every=1), tmp_path_factory.mktemp("r") / "run")[0]


def copied(run, to: Path):
    shutil.copytree(run.path, to)
    return open_run(to)


@pytest.mark.parametrize(
    "change",
    [
        [],
        5,
        {"settings": []},
        {"settings": "x"},
        {"settings": {"ways": {"a": 1}}},
        {"settings": {"data": ["a"]}},
        {"data": []},
        {"data": {}},
        {"data": {"name": 1, "digest": "x", "example_shape": [1]}},
        {"data": {"name": "x", "digest": "x", "example_shape": "x"}},
        {"data": {"name": "x", "digest": "x", "example_shape": [-1]}},
        {"data": {"name": "x", "digest": "x", "example_shape": [10**6, 10**6, 3]}},
        {"data": {"name": "x", "digest": "x", "example_shape": [1], "inputs": 5}},
    ],
)
def test_a_config_of_other_types_is_refused_by_a_sentence(trained, tmp_path, change):
    run = copied(trained, tmp_path / "run")
    config = run.path / "config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, **change} if isinstance(change, dict) else change))
    with pytest.raises(RunError, match=r"config\.json"):
        open_run(run.path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 500 + "1" + "}" * 500, "\udcff"])
def test_deep_or_foreign_json_is_refused_by_a_sentence(trained, tmp_path, text):
    run = copied(trained, tmp_path / "run")
    (run.path / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(RunError, match=r"config\.json cannot be read"):
        open_run(run.path)
    splits = tmp_path / "s.json"
    splits.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match="split file"):
        open_data(str(npz(tmp_path / "x.npz")), splits=splits)


@pytest.mark.parametrize(
    "text",
    ["ways = " + "[" * 50_000, "ways." + ".".join("a" * 20_000) + " = 1", "a=" + "{a=" * 900],
)
def test_deep_toml_is_refused_by_a_sentence(tmp_path, text):
    (tmp_path / "c.toml").write_text(text)
    with within(60), pytest.raises(SettingsError, match=r"c\.toml (is not TOML|has a line|nests)"):
        read_toml(tmp_path / "c.toml", Settings)


def test_any_text_survives_config_toml(tmp_path):
    settings = replace(waves(), data="a\nb\r\"'\\\t\x7f\x85\u2028")
    (tmp_path / "c.toml").write_bytes(write_toml(settings).encode())
    assert read_toml(tmp_path / "c.toml", Settings)["data"] == settings.data
    with pytest.raises(SettingsError, match="data must be UTF-8"):
        waves(data=os.fsdecode(b"caf\xe9"))


def rewritten(run, path: Path, tensors=None, **facts) -> None:
    old_tensors, old = unpack(path.read_bytes())
    whole = {k: v for k, v in {**old, **facts}.items() if v != "gone"}
    path.write_bytes(pack(old_tensors if tensors is None else tensors, whole))


@pytest.mark.parametrize("gone", ["best", "faulty", "returns", "best_step", "rise"])
def test_a_checkpoint_with_facts_missing_ends_in_a_sentence(trained, tmp_path, gone):
    run = copied(trained, tmp_path / "run")
    rewritten(run, run.saved()[0], **{gone: "gone"})
    with pytest.raises(TrainingError, match="is missing"):
        resume(run, iterations=3)


def test_a_checkpoint_of_another_network_ends_in_a_sentence(trained, tmp_path):
    run = copied(trained, tmp_path / "run")
    tensors, _ = unpack(run.saved()[0].read_bytes())
    wider = {n: torch.zeros([d + 1 for d in t.shape]) for n, t in tensors.items()}
    rewritten(run, run.saved()[0], wider)
    with pytest.raises(TrainingError, match="not one of this run"):
        resume(run, iterations=3)
    run = copied(trained, tmp_path / "second")
    moments = {n: t[..., :1] if n.startswith("opt") and t.dim() else t for n, t in tensors.items()}
    rewritten(run, run.saved()[0], moments)
    with pytest.raises(TrainingError, match="has another shape"):
        resume(run, iterations=3)
    rewritten(run, run.best, wider)
    with pytest.raises(RunError, match="does not fit the settings"):
        load_run(run)


@pytest.mark.parametrize("facts", [{"step": "gone"}, {"step": "x"}, {"step": -1}, {"step": 3}])
def test_a_file_named_like_a_checkpoint_is_not_taken_for_one(trained, tmp_path, facts):
    run = copied(trained, tmp_path / "run")
    last = run.saved()[0]
    (other := last.with_name("step-00000102.safetensors")).write_bytes(last.read_bytes())
    rewritten(run, other, **facts)
    (last.with_name("step-00000103.safetensors")).write_bytes(pack({"a": torch.ones(1)}, {}))
    saved, notes = run.newest()
    assert saved.path == last
    assert len(notes) == 2


def test_only_our_own_half_written_files_are_removed(trained, tmp_path):
    run = copied(trained, tmp_path / "run")
    for name in (".bash-history", ".step-00000002.safetensors-ab_c1"):
        (run.checkpoints / name).touch()
    run_module.prepare_folder(run)
    left = {p.name for p in run.checkpoints.iterdir() if p.name.startswith(".")}
    assert left == {".bash-history"}


def test_odd_lines_of_a_log_are_left_out(tmp_path):
    log = tmp_path / "log.jsonl"
    good = [{"step": 1, "loss": 0.1}, {"note": "caf\xe9 \u2028"}]
    odd = [
        b"[1]",
        b"5",
        b"\xff\xfe",
        b'{"step": "x"}',
        b'{"step": null}',
        b"[" * 9999,
        b'{"st',
        b"",
    ]
    lines = [json.dumps(good[0]).encode(), *odd, json.dumps(good[1], ensure_ascii=False).encode()]
    log.write_bytes(b"\n".join(lines) + b'\n{"step": 9}\n')
    JsonLines(log, 1).started(5, 10)
    assert [json.loads(line) for line in log.read_text().splitlines()] == good


def test_the_revision_is_not_that_of_somebody_elses_repository(tmp_path, monkeypatch):
    def git(*words):
        own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", tmp_path, *own, *words], check=True, capture_output=True)

    git("init", "-q")
    (tmp_path / "theirs.txt").write_text("x")
    (tmp_path / "run.py").write_text("ours, installed inside")
    git("add", "theirs.txt")
    git("commit", "-qm", "theirs")
    monkeypatch.setattr(run_module, "__file__", str(tmp_path / "run.py"))
    assert run_module._revision() is None
    git("add", "run.py")
    git("commit", "-qm", "ours")
    assert len(run_module._revision()) == 40


def test_a_restart_goes_on_with_the_run_of_its_own_torchrun_only(tmp_path, monkeypatch):
    """torchrun starts a failed process again: a folder that the first try refused stays refused."""
    settings = waves(iterations=1, val_every=0)
    run, _ = train(settings, tmp_path / "earlier")
    for name, value in (
        ("RANK", "0"), ("WORLD_SIZE", "1"), ("TORCHELASTIC_RUN_ID", "none"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)
    for restarts in ("0", "1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        with pytest.raises(RunError, match="is a run already"):
            train(settings, run.path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    own, _ = train(settings, tmp_path / "own")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert train(settings, own.path)[1].step == 1
    monkeypatch.setattr(os, "getppid", lambda: -5)  # a later torchrun with the same --rdzv-id
    with pytest.raises(RunError, match="is a run already"):
        train(settings, own.path)


# --- the command line ----------------------------------------------------------------------------


def test_ctrl_c_while_importing_ends_with_a_sentence():
    script = """
import sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from ibaml.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "Stopped.\n")


@posix
def test_names_that_are_not_utf8_are_read_and_shown(tmp_path):
    root = os.fsencode(tmp_path) + b"/caf\xe9"
    for name in (b"/a\xff", b"/b", b"/c"):
        os.makedirs(root + name)
        (Path(os.fsdecode(root + name)) / "1.png").write_bytes(png(ord(name[1:2])))
    data = image_folder(os.fsdecode(root), image_size=8)
    assert data.classes[0] == "a\udcff"

    def ibaml_(*words):
        return subprocess.run(
            [sys.executable, "-m", "ibaml", *words], capture_output=True, text=True, timeout=100
        )

    shown = ibaml_("data", "info", root, "--image-size", "8")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "caf\\udce9" in shown.stdout
    refused = ibaml_("train", "--data", root, "--out", str(tmp_path / "run"))
    assert refused.returncode == 1
    assert "data must be UTF-8" in refused.stdout
    assert "Traceback" not in refused.stdout + refused.stderr


def test_names_that_look_like_markup_are_shown_as_they_are(tmp_path):
    path = npz(tmp_path / "[bold]q.npz")
    done = CliRunner().invoke(app, ["data", "info", str(path)])
    assert done.exit_code == 0
    assert "[bold]q" in done.stdout


# --- downloads -----------------------------------------------------------------------------------


def test_a_download_is_verified_by_what_is_in_it(tmp_path):
    """A zip with the right MD5 alone is not enough; one that was packed again is the same."""
    (site := tmp_path / "site").mkdir()
    for name, color, level in (("good", 1, 1), ("again", 1, 9), ("other", 2, 1)):
        with zipfile.ZipFile(site / f"{name}.zip", "w", zipfile.ZIP_DEFLATED, True, level) as z:
            z.writestr("a/1.png", png(color))
            z.writestr(f"__MACOSX/{name}", b"")
    contents = contents_of(site / "good.zip")

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site))
    Thread(target=partial(server.serve_forever, poll_interval=0.02), daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}"
        for name in ("good", "again"):
            assert fetch(Remote(f"{address}/{name}.zip", "", contents), tmp_path / "to").exists()
        other = Remote(f"{address}/other.zip", "", contents)
        other = replace(other, checksum=replace(other, contents=None).digest(site / "other.zip"))
        with pytest.raises(DownloadError, match="sha256 of the contents"):
            fetch(other, tmp_path / "to")
        assert not (tmp_path / "to" / "other.zip").exists()
    finally:
        server.shutdown()
        server.server_close()


@real
def test_the_real_omniglot_has_the_contents_that_are_pinned():
    for remote in CATALOG["omniglot"].remotes:
        assert remote.problem(DATA / "omniglot" / remote.name) is None


# --- saved learners ------------------------------------------------------------------------------


def test_a_learner_that_describes_a_huge_network_is_refused_before_it_is_made(tmp_path):
    learner = ibaml.methods.ibaml(ibaml.nn.mlp(3, 2, hidden=(4,)))
    data = learner.save(tmp_path / "l.ibaml").read_bytes()
    header_ = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    facts = json.loads(header_["facts"])
    facts["model"]["hidden"] = [200_000, 200_000]
    header_["facts"] = json.dumps(facts)
    (tmp_path / "l.ibaml").write_bytes(save(load(data), header_))
    with pytest.raises(ArtifactError, match=r"a network of 40,001,[0-9,]+ weights, and holds"):
        ibaml.load(tmp_path / "l.ibaml")


def test_a_run_whose_settings_ask_for_a_huge_network_is_refused_before_it_is_made(
    trained, tmp_path
):
    run = copied(trained, tmp_path / "run")
    config = run.path / "config.json"
    content = json.loads(config.read_text())
    content["settings"]["hidden"] = "200000,200000"
    config.write_text(json.dumps(content))
    with pytest.raises(RunError, match=r"their network has 40,000,[0-9,]+ weights"):
        ibaml.load(run.path)
