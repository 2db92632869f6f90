"""How do settings become tasks, a network, a learner?"""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ibaml import methods
from ibaml.energy import Categorical, Gaussian
from ibaml.fields import SettingsError, near
from ibaml.kinds import NAMES, SINUSOIDS, TABLE
from ibaml.learner import MetaLearner
from ibaml.nn import Discriminant, backbone
from ibaml.objectives import Abml, Objective, PredictiveNll, QueryNll
from ibaml.recommended import (
    MANY_WAYS,
    head_features,
    make_solver,
    recommended,
    recommended_temperature,
)
from ibaml.solve import Solver
from ibaml.tasks import Augment, EpisodeTasks, Inputs, SinusoidTasks, Table, TableTasks, TaskSource
from ibaml.tasks.catalog import open_data
from ibaml.tasks.embedding import Embed
from ibaml.tasks.sources.decode import Progress
from ibaml.tasks.sources.folder import roots_of
from ibaml.training.rules import (
    data_kind,
    refuse_unread_by_network,
    stopping_of,
    temperature_of,
)
from ibaml.training.settings import Settings
from ibaml.weights import ClassMeans
from ibaml.words import BACKBONES, DESCENTS, IN_CLOSED_FORM


def pick_dtype(settings: Settings) -> torch.dtype:
    return {"float32": torch.float32, "float64": torch.float64}[settings.dtype]


def located(settings: Settings) -> Settings:
    """The settings with absolute paths, which hold in every working directory."""
    names = ("root", "splits") if settings.data in NAMES else ("data", "root", "splits")
    given = {name: _paths(value) for name in names if (value := getattr(settings, name))}
    found: dict[str, Any] = {
        name: os.pathsep.join(str(path.absolute()) for path in paths)
        for name, paths in given.items()
        if all(path.exists() for path in paths)
    }
    return replace(settings, **found)


def _paths(text: str) -> list[Path]:
    return roots_of(text, os.pathsep)


def open_tasks(
    settings: Settings, device: torch.device, progress: Progress | None = None
) -> TaskSource:
    """The tasks that the settings describe."""
    assert settings.shots is not None
    common: dict[str, Any] = {
        "shots": settings.shots,
        "train_shots": settings.train_shots,
        "seed": settings.seed,
        "device": device,
        "dtype": pick_dtype(settings),
    }
    kind = data_kind(vars(settings))
    if kind is TABLE:
        assert settings.task is not None
        assert settings.features is not None
        assert settings.target is not None
        table = Table.read(
            settings.data,
            task=settings.task,
            features=[c.strip() for c in settings.features.split(",") if c.strip()],
            target=settings.target,
            splits=settings.splits,
        )
        return TableTasks(table, first_rows=settings.first_rows, **common)
    assert settings.queries is not None
    if kind is SINUSOIDS:
        return SinusoidTasks(queries=settings.queries, **common)
    if Path(settings.data).suffix.lower() == ".tsv":
        raise SettingsError("a table needs task, features and target: name its columns")
    if settings.data not in NAMES and not any(path.exists() for path in _paths(settings.data)):
        raise SettingsError(
            f"data {settings.data!r} is neither a path nor one of {', '.join(NAMES)}"
            f"{near(settings.data, NAMES)}"
        )
    data = open_data(
        settings.data,
        root=settings.root,
        splits=settings.splits,
        class_level=settings.class_level,
        image_size=settings.image_size,
        embed=None if settings.backbone is None else Embed(settings.backbone, device=device),
        progress=progress,
    )
    assert settings.ways is not None
    crop = data.examples.shape[-1] // 10 if data.is_image else 0
    return EpisodeTasks(
        data,
        settings.ways,
        queries=settings.queries,
        train_ways=settings.train_ways,
        rotations=settings.rotations,
        augment=Augment(crop=crop) if settings.augment else None,
        **common,
    )


def fit_network(settings: Settings, tasks: TaskSource) -> Settings:
    """The settings with a network that suits the data, where none was given."""
    images = len(tasks.example_shape) == 3
    model = settings.model or ("conv4" if images else "mlp")
    if BACKBONES[model].images and not images:
        raise SettingsError(
            f"model {model} reads images, and one input of {tasks.name} has shape "
            f"{tasks.example_shape}: use mlp"
        )
    refuse_unread_by_network(asdict(settings), model)
    reads = BACKBONES[model].reads
    left_out = {n: value for n, value in reads.items() if getattr(settings, n) is None}
    return replace(settings, model=model, **left_out)


def build_network(settings: Settings, shape: tuple[int, ...]) -> nn.Module:
    """The network for inputs of this shape; its start depends on the seed alone."""
    outputs = settings.ways or 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        assert settings.model is not None
        read = {name: getattr(settings, name) for name in BACKBONES[settings.model].reads}
        if settings.model == "mlp":  # a full posterior learns a linear part in closed form
            read["skip"] = settings.regression and settings.posterior == "full"
        net: nn.Module = backbone(settings.model).for_inputs(
            shape, outputs, regression=settings.regression, **read
        )
    return net.to(pick_dtype(settings))


def choose_temperature(settings: Settings, network: nn.Module, tasks: TaskSource) -> Settings:
    """The settings with a temperature that suits the data, where none was given."""
    if settings.temperature is not None or not isinstance(tasks, EpisodeTasks):
        return settings
    chosen = recommended_temperature(settings.method, network, tasks)
    if chosen == "fitted" and not settings.val_every:
        chosen = 1.0  # without validation there is nothing to fit it on
    return replace(settings, temperature=str(chosen))


def choose_step_size(settings: Settings, network: nn.Module) -> Settings:
    """The settings with a step size that suits the network, where none was given."""
    if settings.inner_lr is not None or settings.solver not in DESCENTS:
        return settings
    given = {"solver": settings.solver, "posterior": "diagonal", **head_features(network)}
    head = settings.adapt == "head"
    values = recommended(settings.method, head=head, regression=settings.regression, given=given)
    return replace(settings, inner_lr=values["inner_lr"])


def choose_train_ways(settings: Settings, tasks: TaskSource) -> tuple[Settings, TaskSource]:
    """Settings and tasks with more classes in training, where none were given: a feature that tells
    twenty classes apart tells five (docs/studies/heads.md). Half of the classes at most, so that
    tasks differ."""
    if settings.train_ways is not None or not isinstance(tasks, EpisodeTasks):
        return settings, tasks
    if settings.posterior not in IN_CLOSED_FORM or not settings.tie_head or not settings.iterations:
        return settings, tasks
    ways = min(MANY_WAYS, tasks.episodes("train").classes // 2)
    if ways <= tasks.ways:
        return settings, tasks
    return replace(settings, train_ways=ways), replace(tasks, train_ways=ways)


def build_learner(settings: Settings, network: nn.Module) -> MetaLearner:
    """The learner that the settings describe, around a network."""
    settings = choose_step_size(settings, network)
    options: dict[str, Any] = {
        "adapt": settings.adapt,
        "tie_head": settings.tie_head,
        "execution": settings.execution,
        "precision": settings.precision,
        "capture": None if settings.capture else False,
        "solver": _solver(settings),
        "objective": _objective(settings),
    }
    for name in ("samples", "noise", "beta", "init_log_var"):
        if getattr(settings, name) is not None:
            options[name] = getattr(settings, name)
    for name in ("posterior", "cg_steps", "curvature", "damping", "block", "lam"):
        if getattr(settings, name) is not None:
            options[name] = getattr(settings, name)
    if settings.stopping is not None:
        options["stopping"] = stopping_of(settings.stopping)
    if settings.regression:
        assert settings.noise_std is not None
        options["likelihood"] = Gaussian(settings.noise_std, learn=bool(settings.learn_noise))
    elif settings.temperature is not None:
        options["likelihood"] = Categorical(temperature_of(settings.temperature))
    build = getattr(methods, settings.method)
    learner: MetaLearner = build(network, **options)
    if isinstance(network, Discriminant) and isinstance(learner.belief, ClassMeans):
        with torch.no_grad():  # the prior that the base classes give (a saved one replaces it)
            for name, parameter in learner.named_parameters():
                if name.startswith("log_var."):
                    parameter.copy_(network.between.log().expand_as(parameter))
    return learner


def _solver(settings: Settings) -> Solver:
    assert settings.steps is not None
    assert settings.solver is not None
    return make_solver(
        settings.solver, settings.steps, settings.inner_lr, bool(settings.learn_inner_lr)
    )


def _objective(settings: Settings) -> Objective | None:
    if settings.objective is None:
        return None
    if settings.objective == "abml":
        # one hyper-prior, spread over the training tasks
        return Abml(tasks=max(1, settings.iterations * settings.tasks))
    return QueryNll() if settings.objective == "query" else PredictiveNll()


def describe_source(tasks: TaskSource) -> dict[str, Any]:
    """The description of the data that a run folder keeps."""
    return {
        "name": tasks.name,
        "digest": tasks.digest,
        "origin": tasks.data.digest if isinstance(tasks, EpisodeTasks) else None,
        "example_shape": list(tasks.example_shape),
        "ways": tasks.ways,
        "inputs": None if (inputs := Inputs.of(tasks)) is None else inputs.described(),
    }
