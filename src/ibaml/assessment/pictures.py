"""What does an assessment look like?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ibaml.assessment.judge import Assessment
from ibaml.evaluation import ClassScores
from ibaml.extras import missing
from ibaml.learner import MetaLearner
from ibaml.report import Fit, draw_episode, draw_fits, draw_reliability, draw_selective
from ibaml.tasks import EpisodeTasks, SinusoidTasks


def draw_assessment(assessment: Assessment, folder: Path, split: str = "test") -> list[Path]:
    """The pictures of a run: reliability, selective accuracy and an episode, or regression fits.
    There are none if matplotlib is missing; the figures are written already."""
    if missing("matplotlib") is not None:
        return []
    pictures = []
    classes = {
        n or "test tasks": s for n, s in assessment.scores.items() if isinstance(s, ClassScores)
    }
    if classes:
        title = f"{assessment.source.name}: confidence and accuracy"
        pictures.append(draw_reliability(classes, folder / "reliability.png", title))
        title = f"{assessment.source.name}: accuracy when the least sure are left out"
        pictures.append(draw_selective(classes, folder / "selective.png", title))
    if isinstance(assessment.source, EpisodeTasks) and assessment.source.data.is_image:
        path = folder / "episode.png"
        pictures.append(draw_predictions(assessment.learner, assessment.source, path, split))
    if isinstance(assessment.source, SinusoidTasks):
        pictures.append(draw_waves(assessment.learner, assessment.source, folder / "fits.png"))
    return pictures


def draw_predictions(
    learner: MetaLearner, source: EpisodeTasks, path: Path, split: str = "test", key: int = 0
) -> Path:
    """An episode with the learner's predictions for its queries (four of each class)."""
    episodes = source.episodes(split)
    batch = episodes.batch([key])
    said = learner.adapt_all(batch).predict_proba(batch.query_x)[0].cpu()
    plain = replace(episodes, normalize=False, device="cpu").batch([key])
    rows, _ = episodes.draw(key)
    names = [source.data.classes[source.data.labels[r[0]]] for r in rows]
    shown = min(4, episodes.queries)
    split_up = (episodes.ways, -1)
    return draw_episode(
        plain.support_x[0].unflatten(0, split_up),
        plain.query_x[0].unflatten(0, split_up)[:, :shown],
        names,
        path,
        f"{source.name}, a new task: {episodes.ways} classes, {episodes.shots} example(s) each",
        said.unflatten(0, split_up)[:, :shown],
    )


def draw_waves(learner: MetaLearner, source: SinusoidTasks, path: Path) -> Path:
    """A new sinusoid after 0, 1, 5 and 10 examples."""
    from ibaml.tasks import Sinusoids

    family = source.family
    examples = replace(source, shots=10, queries=1).batches("test", [3])[0]
    amplitude, phase, _ = Sinusoids.task(family, 2, 3)
    x = torch.linspace(*family.x_range, 200, device=source.device, dtype=source.dtype)[:, None]
    fits = []
    for shots in (0, 1, 5, 10):
        xs, ys = examples.support_x[0, :shots], examples.support_y[0, :shots]
        mean, variance = learner.adapt(xs, ys).predict(x, samples=50)
        fits.append(
            Fit(
                title=f"{shots} example{'' if shots == 1 else 's'}",
                x=x.cpu(),
                truth=amplitude * torch.sin(x + phase).cpu(),
                mean=mean.cpu(),
                deviation=variance.sqrt().cpu() if learner.belief.stochastic else None,
                examples_x=xs.cpu(),
                examples_y=ys.cpu(),
            )
        )
    return draw_fits([("prediction", fits)], path, "A new sinusoid, few examples")
