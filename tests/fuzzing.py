"""What does each reader do with damaged files? Success or a sentence of ours, never anything else.

`python tests/fuzzing.py 10000` (`make fuzz`) tries many; test_fuzz.py tries a few. A reader has
valid files; the n-th input is one of them, changed as numbers of the seed n say.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import resource
import shutil
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load, save

import fuzzing_http
import ibaml
from ibaml.answers import Classifier, Prior
from ibaml.artifact import ArtifactError, load_learner
from ibaml.assessment import Protocol, read_assessment
from ibaml.assessment.stored import write_scores
from ibaml.evaluation import ClassScores
from ibaml.fields import SettingsError, read_toml
from ibaml.pages.blocks import Page, Section
from ibaml.pages.doctor import read_doctor, verdict_blocks
from ibaml.pages.reproduction import reproduction_page
from ibaml.pages.write import html
from ibaml.tasks import DataError, Table, cifar100, image_folder, image_list
from ibaml.tasks.catalog import open_data
from ibaml.tasks.dataset import published
from ibaml.tasks.images import decode
from ibaml.tasks.sources.unpickle import unpickle
from ibaml.training import RunError, Settings, open_run
from ibaml.training.checkpoint import CheckpointError, pack, unpack
from ibaml.training.faults import TrainingError
from ibaml.training.rules import resolve
from ibaml.training.run import create_run, read_saved
from ibaml.training.watch import read_log

HERE = Path(__file__).parent
OURS = (DataError, SettingsError, RunError, ArtifactError, CheckpointError, TrainingError)
SECONDS = 10.0  # for one input
MEMORY = 2_000_000  # kB for all of them
ODD: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 10**30, 1.5, -1e308, "", "x", "\udcff", "\0", [], {}, [[]],
    ["a", 1, None], {"a": {}}, [1] * 100, "9" * 5000,
]  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """A reader of files, and valid ones: the suffix of their names, and how an input is made."""

    read: Callable[[Path], object]
    suffix: str
    valid: tuple[bytes, ...]
    change: Callable[[random.Random, bytes], bytes]


def in_bytes(draw: random.Random, data: bytes) -> bytes:
    """A few bytes changed, removed, repeated or made extreme; or the end cut off."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 5, 20))):
        if not changed:
            break
        at, size = draw.randrange(len(changed)), draw.choice((1, 1, 2, 4, 8, 40))
        match draw.randrange(6):
            case 0:
                changed[at] ^= 1 << draw.randrange(8)
            case 1:
                changed[at : at + size] = bytes([draw.choice((0, 255, 127, 128))]) * size
            case 2:
                changed[at : at + size] = draw.randbytes(size)
            case 3:
                del changed[at : at + size]
            case 4:
                there = draw.randrange(len(changed))
                changed[at:at] = changed[there : there + size]
            case _:
                if draw.random() < 0.2:
                    del changed[at:]
    return bytes(changed)


def in_values(draw: random.Random, value: Any) -> Any:
    """A value somewhere in a JSON value exchanged for an odd one, or left out."""
    inner = list(value) if isinstance(value, dict) else list(range(len(value))) \
        if isinstance(value, list) else []  # fmt: skip
    if not inner or draw.random() < 0.1:
        return draw.choice(ODD)
    at = draw.choice(inner)
    if draw.random() < 0.1:
        if isinstance(value, dict):
            return {k: v for k, v in value.items() if k != at}
        return value[:at] + value[at + 1 :]
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[at] = in_values(draw, value[at])
    return copied


def in_json(draw: random.Random, data: bytes) -> bytes:
    if draw.random() < 0.3:
        return in_bytes(draw, data)
    return json.dumps(in_values(draw, json.loads(data))).encode()


def in_facts(draw: random.Random, data: bytes) -> bytes:
    """The facts in a saved learner or posterior."""
    if draw.random() < 0.3:
        return in_bytes(draw, data)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    tensors = load(data)
    if draw.random() < 0.2:
        del tensors[draw.choice(list(tensors))]
    header["facts"] = json.dumps(in_values(draw, json.loads(header["facts"])))
    return save(tensors, header)


def in_members(draw: random.Random, data: bytes) -> bytes:
    """The members of a zip, so that its checksums are right."""
    if draw.random() < 0.5:
        return in_bytes(draw, data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = draw.choice(list(members))
    members[name] = in_bytes(draw, members[name])
    return zipped(members, draw.choice((0, 8, 12)))


def in_packed(draw: random.Random, data: bytes) -> bytes:
    """The content of a gzip, so that its checksum is right."""
    if draw.random() < 0.3:
        return in_bytes(draw, data)
    return gzip.compress(in_bytes(draw, gzip.decompress(data)), 1)


def in_words(draw: random.Random, data: bytes) -> bytes:
    """A text with odd pieces in it."""
    if draw.random() < 0.5:
        return in_bytes(draw, data)
    pieces = (b"[", b"{", b'"', b"'''", b"\n", b",", b"=", b".", b"\0", b"\xff", b"1e999", b"nan",
              b"\r", b"-", b"[[", b"9" * 400, b"inf", b"\t", b"#", b"\\u", b"true")  # fmt: skip
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.choice(pieces) * draw.choice((1, 1, 2, 100)) + data[at:]


def zipped(members: dict[str, bytes], method: int = 8) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def picture(kind: str, mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (12, 14, len(mode)), dtype=np.uint8)
    Image.fromarray(pixels.squeeze(2) if len(mode) == 1 else pixels, mode).save(buffer, kind)
    return buffer.getvalue()


def readers(place: Path) -> dict[str, Reader]:
    """Every reader of files, by name; ``place`` is an empty folder for what they need."""
    x = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    y = np.repeat(list("abcdef"), 2)
    arrays = {}
    for name, array in {"x": x, "y": y, "split": np.repeat(["train", "val", "test"], 4)}.items():
        np.save(buffer := io.BytesIO(), array)
        arrays[f"{name}.npy"] = buffer.getvalue()
    learner = ibaml.methods.ibaml(ibaml.nn.mlp(3, 2, hidden=(4,)), adapt="head")
    posterior = learner.adapt(torch.tensor(x[:4]), torch.tensor([0, 1, 0, 1]))
    learner.save(place / "learner")
    posterior.save(place / "posterior")
    priors = Path(ibaml.__file__).parent / "answers" / "priors"
    shutil.copy(priors / "photos_lite0.safetensors", place / "prior")
    (place / "1.png").write_bytes(picture("PNG"))
    run = create_run(
        place / "run", resolve({"data": "sinusoids"}),
        {"name": "sinusoids", "digest": "a", "example_shape": [1], "ways": None, "inputs": None},
    )  # fmt: skip
    state = {"learner/w": torch.ones(3)}
    dataset = {
        "image_data": np.zeros((2, 2, 2, 3), np.uint8),
        "class_dict": {"a": [0], "b": np.array([1])},
    }

    def cifar(path: Path) -> object:
        folder = path.parent / "cifar"
        folder.mkdir(exist_ok=True)
        shutil.move(path, folder / "cifar-100-binary.tar.gz")
        return cifar100(folder)

    def config(path: Path) -> object:
        shutil.copy(path, run.path / "config.json")
        return open_run(run.path)

    kept = ClassScores.of(range(3), np.full((3, 2, 2), 0.5), np.zeros((3, 2), int))
    (place / "evaluation").mkdir()
    facts = {
        "protocol": vars(Protocol(tasks=3)), "iteration": 2, "data": "a", "diverged": {"": 0},
        "results": {"": {}},
    }  # fmt: skip
    summary = json.dumps(facts).encode()
    (place / "evaluation" / "summary.json").write_bytes(summary)
    scores = write_scores({"": kept}, place / "evaluation").read_bytes()

    def evaluation(name: str, valid: bytes) -> Callable[[Path], object]:
        def read(path: Path) -> object:
            folder = place / "evaluation"
            shutil.copy(path, folder / name)
            try:
                return read_assessment(folder)
            finally:
                (folder / name).write_bytes(valid)

        return read

    def verdict(path: Path) -> object:
        found = read_doctor(path)
        return html(Page("a", "b", "c", [Section("d", verdict_blocks(found or {}))]))

    def result(path: Path) -> object:
        folder = path.parent / "paper" / "a"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / "result.json")
        return html(reproduction_page(folder.parent))

    images = {f"{c}/{i}.png": picture("PNG", "L") for c in "abc" for i in range(2)}
    table = b"country,year,value\n" + b"".join(b"c%d,%d,1.5\n" % (i % 5, i) for i in range(40))
    kinds = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF")
    columns: dict[str, Any] = {"task": "country", "features": ["year"], "target": "value"}
    return {
        "zip": Reader(
            lambda p: image_folder(p, image_size=8), ".zip", (zipped(images),), in_members
        ),
        "image": Reader(
            lambda p: decode(p.read_bytes(), p.name, 8), "", tuple(map(picture, kinds)), in_bytes
        ),
        "npz": Reader(
            lambda p: open_data(str(p)), ".npz", (zipped(arrays), zipped(arrays, 0)), in_members
        ),
        "list": Reader(
            lambda p: image_list(p, image_size=8), ".csv",
            (b"path,label,split\n1.png,a,train\n", b"path\tlabel\n1.png\ta\n"), in_words,
        ),
        "table": Reader(lambda p: Table.read(p, **columns), ".csv", (table,), in_words),
        "toml": Reader(
            lambda p: resolve(read_toml(p, Settings)), ".toml",
            (b'data = "omniglot"\nways = 5\nmeta-lr = 0.01\nhidden = "8,8"\n',
             b"shots = 1\nsteps = 3\nmethod = 'maml'\n"), in_words,
        ),
        "config": Reader(config, ".json", ((run.path / "config.json").read_bytes(),), in_json),
        "splits": Reader(
            lambda p: open_data(str(place / "good.npz"), splits=p), ".json",
            (b'{"train": ["a", "b"], "val": ["c"], "test": ["d"]}',), in_json,
        ),
        "log": Reader(
            read_log, ".jsonl", (b'{"step": 1, "loss": 0.5}\n{"note": "a"}\n',), in_words
        ),
        "checkpoint": Reader(
            read_saved, "", (pack(state, {"step": 5, "best": None}),),
            lambda draw, data: in_bytes(draw, data) if draw.random() < 0.5
            else pack(state, in_values(draw, unpack(data)[1])),
        ),
        "learner": Reader(load_learner, "", ((place / "learner").read_bytes(),), in_facts),
        "posterior": Reader(
            ibaml.load_posterior, "", ((place / "posterior").read_bytes(),), in_facts
        ),
        "classifier": Reader(
            Classifier.load, ".ibaml",
            ((HERE / "artefacts" / "answers" / "classifier-1.ibaml").read_bytes(),), in_facts,
        ),
        "prior": Reader(Prior.open, ".ibaml", ((place / "prior").read_bytes(),), in_facts),
        "pickle": Reader(
            lambda p: unpickle(p.read_bytes(), p.name), "",
            tuple(pickle.dumps(dataset, protocol) for protocol in range(6)), in_bytes,
        ),
        "cifar": Reader(cifar, ".tar.gz", (_cifar(),), in_packed),
        "request": Reader(fuzzing_http.send, "", fuzzing_http.VALID, in_words),
        "summary": Reader(evaluation("summary.json", summary), ".json", (summary,), in_json),
        "scores": Reader(evaluation("scores.npz", scores), ".npz", (scores,), in_members),
        "doctor": Reader(
            verdict, ".json",
            (b'{"verdict": "a", "fault": "b", "command": "c", "findings": [{}, {"sentence": "d"}],'
             b' "readings": {"e": 0.5}, "measured": {"f": {"g": [1.5, null]}}}',), in_json,
        ),
        "result": Reader(
            result, ".json",
            (b'{"title": "a", "command": "b", "machine": "c", "seed": 0, "seconds": 1.0, "files":'
             b' ["a.png", "a.csv"], "table": [{"x": 1}, {"x": 2}], "agrees": ["d"]}',), in_json,
        ),
    }  # fmt: skip


def _cifar() -> bytes:
    fine = sorted(c for names in published("cifar-fs").values() for c in names)
    coarse = [s for names in published("fc100").values() for s in names]
    records = b"".join(bytes([i % 20, i]) + bytes(3072) for i in range(100))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
        for name, content in {
            "train.bin": records, "test.bin": records,
            "fine_label_names.txt": "\n".join(fine).encode(),
            "coarse_label_names.txt": "\n".join(coarse).encode(),
        }.items():  # fmt: skip
            member = tarfile.TarInfo(f"cifar-100-binary/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def fuzz(name: str, reader: Reader, place: Path, first: int, last: int) -> list[str]:
    """What went wrong with the inputs of these numbers."""
    wrong = []
    for number in range(first, last):
        draw = random.Random(f"{name} {number}")
        if number % 200 == 199:  # a full cache is slow to look through
            shutil.rmtree(os.environ["IBAML_CACHE"], ignore_errors=True)
        path = place / f"input{reader.suffix}"
        path.write_bytes(reader.change(draw, draw.choice(reader.valid)))
        began = time.monotonic()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reader.read(path)
        except OURS as error:
            if not str(error) or "Traceback" in str(error):
                wrong.append(f"{name} {number}: no sentence: {error!r}")
        except Exception:
            wrong.append(f"{name} {number}: {traceback.format_exc()}")
        if time.monotonic() - began > SECONDS:
            wrong.append(f"{name} {number}: took {time.monotonic() - began:.0f} s")
    return wrong


def prepared(place: Path) -> dict[str, Reader]:
    """The readers, with the files beside their inputs."""
    found = readers(place)
    (place / "good.npz").write_bytes(found["npz"].valid[0])
    return found


def main(count: int, names: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["IBAML_CACHE"] = f"{folder}/cache"
        place = Path(folder) / "files"
        place.mkdir()
        failed = 0
        for name, reader in prepared(place).items():
            if names and name not in names:
                continue
            began = time.monotonic()
            wrong = fuzz(name, reader, place, 0, count)
            failed += len(wrong)
            most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            print(f"{name}: {count} inputs, {len(wrong)} wrong, {time.monotonic() - began:.0f} s, "
                  f"{most / 1e6:.2f} GB", *wrong[:5], sep="\n", flush=True)  # fmt: skip
            failed += most > MEMORY
            shutil.rmtree(f"{folder}/cache", ignore_errors=True)
    return 1 if failed else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
