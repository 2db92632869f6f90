"""Is this a release? Everything that `make test` has no time for, in order.

    make release-check

Wheel and sdist are built, installed in a fresh environment and used from another folder; the site
is built without a warning, its links hold and its snippets run; every example and the notebook
run as they are printed; and the pages in a browser, where `make test-browser` exists. What is
installed comes with the constraints of constraints.txt. All it makes is in build/release.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLACE = ROOT / "build/release"
BIN = Path(sys.executable).parent
LAUNCHED = {  # examples that another program starts
    "with_torchrun": ["torchrun", "--nproc-per-node", "2"],
    "with_accelerate": ["torchrun", "--nproc-per-node", "2"],
}
IN_WHEEL = (
    "py.typed", "tasks/splits/", "answers/priors/", "serve/page/", "pages/templates/",
    "licenses/LICENSE", "licenses/NOTICE",
)  # fmt: skip


def run(*words: str | Path, at: Path = ROOT) -> str:
    """Run a command, and return what it printed; one that fails ends everything."""
    done = subprocess.run(
        [str(word) for word in words], cwd=at, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if done.returncode:
        print(done.stdout)
        sys.exit(f"release-check: failed: {' '.join(map(str, words))}")
    return done.stdout


def build() -> None:
    """The wheel is built from the sdist, so that nothing is missing in either."""
    shutil.rmtree(PLACE / "dist", ignore_errors=True)
    run(BIN / "python", "-m", "build", "--outdir", PLACE / "dist", ".")
    wheel, sdist = packages()
    names = zipfile.ZipFile(wheel).namelist()
    for part in IN_WHEEL:
        assert any(part in name for name in names), f"{wheel.name} has no {part}"
    strange = [n for n in names if not re.match(r"ibaml(-[\d.]+\.dist-info)?/", n)]
    assert not strange, f"{wheel.name} holds {strange[:3]}"
    with tarfile.open(sdist) as archive:
        held = {Path(*Path(name).parts[1:]).as_posix() for name in archive.getnames()}
    missing = {"README.md", "LICENSE", "NOTICE", "CITATION.cff", "pyproject.toml"} - held
    assert not missing, f"{sdist.name} has no {sorted(missing)}"


def packages() -> tuple[Path, Path]:
    (wheel,) = (PLACE / "dist").glob("*.whl")
    (sdist,) = (PLACE / "dist").glob("*.tar.gz")
    return wheel, sdist


def install() -> None:
    """A fresh environment, the wheel alone, and a life from train to predict somewhere else."""
    fresh = PLACE / "venv"
    venv.create(fresh, clear=True, with_pip=True)
    python = fresh / "bin/python"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    wheel, sdist = packages()
    run(*pip, "-c", ROOT / "constraints.txt", wheel)
    run(python, "-m", "pip", "check")
    with tempfile.TemporaryDirectory() as folder:
        smoke(fresh / "bin", Path(folder))
        run(*pip, "--no-deps", "--force-reinstall", sdist)
        run(fresh / "bin/ibaml", "--version", at=Path(folder))


def smoke(commands: Path, folder: Path) -> None:
    """Seconds of training, evaluation and prediction, without any extra."""
    version = run(commands / "ibaml", "--version", at=folder)
    name = packages()[0].name.split("-")[1]
    assert name in version, f"ibaml --version says {version!r}, the wheel is {name}"
    (folder / "vectors.py").write_text(
        "import numpy as np, ibaml, sys\n"
        "assert 'site-packages' in ibaml.__file__, ibaml.__file__\n"
        "rng = np.random.default_rng(0)\n"
        "x = 2 * rng.normal(size=(40, 1, 8)) + 0.4 * rng.normal(size=(40, 12, 8))\n"
        "x, y = x.reshape(480, 8).astype('float32'), np.repeat(np.arange(40), 12)\n"
        "np.savez('base.npz', x=x, y=y)\n"
        "np.savez('known.npz', x=x[:36:2], y=y[:36:2]), np.savez('new.npz', x=x[1:36:2])\n"
    )
    run(commands / "python", "vectors.py", at=folder)
    ibaml = commands / "ibaml"
    small = ("--hidden", "16", "--queries", "5", "--iterations", "20", "--val-every", "0")
    run(ibaml, "train", "--data", "base.npz", "--model", "mlp", *small, "--out", "run", at=folder)
    scores = run(ibaml, "evaluate", "run", "--tasks", "50", "--queries", "5", at=folder)
    accuracy = re.search(r"([\d.]+) ?%", scores)
    assert accuracy, f"no accuracy in {scores}"
    assert float(accuracy[1]) > 40, f"by chance 20 %:\n{scores}"
    run(ibaml, "doctor", "run", at=folder)
    run(ibaml, "report", "run", at=folder)
    assert (folder / "run/report.html").stat().st_size > 10_000
    run(ibaml, "predict", "known.npz", "new.npz", "--out", "answers", at=folder)
    answers = (folder / "answers/predictions.csv").read_text().splitlines()
    assert len(answers) == 19, "18 answers and a header"


def site() -> None:
    shutil.rmtree(ROOT / "build/site", ignore_errors=True)
    shutil.rmtree(ROOT / "docs/generated", ignore_errors=True)
    run("make", "site")


def snippets() -> None:
    run(BIN / "pytest", "-n", "1", "tests/test_docs.py", "tests/test_api.py")


def examples() -> None:
    """Every example as it is printed, each in an empty folder."""
    for path in sorted((ROOT / "examples").glob("*.py")):
        launcher, *more = LAUNCHED.get(path.stem, ["python"])
        with tempfile.TemporaryDirectory() as folder:
            begun = time.monotonic()
            run(BIN / launcher, *more, path, at=Path(folder))
            print(f"    {path.name:24} {time.monotonic() - begun:5.0f} s", flush=True)


def notebook() -> None:
    import nbformat
    from nbclient import NotebookClient

    tour = nbformat.read(ROOT / "examples/tour.ipynb", as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(tour, timeout=600, resources={"metadata": {"path": folder}})
        client.execute()


def browser() -> None:
    """The pages in a real browser, where the target exists."""
    if re.search(r"^test-browser:", (ROOT / "Makefile").read_text(), re.MULTILINE):
        run("make", "test-browser")
    else:
        print("    there is no make test-browser: left out")


STEPS: tuple[Callable[[], None], ...] = (
    build, install, site, snippets, examples, notebook, browser,
)  # fmt: skip


def main() -> None:
    only = sys.argv[1:]
    if unknown := set(only) - {step.__name__ for step in STEPS}:
        sys.exit(f"there is no step {unknown.pop()!r}: {', '.join(s.__name__ for s in STEPS)}")
    begun = time.monotonic()
    for step in STEPS:
        if not only or step.__name__ in only:
            print(f"{step.__name__} …", flush=True)
            start = time.monotonic()
            step()
            print(f"{step.__name__}: {time.monotonic() - start:.0f} s", flush=True)
    print(f"release-check: all of it holds, {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
