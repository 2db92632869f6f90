"""What a training run is: every setting, its default, its meaning, and what is refused.

One table serves the command line, the TOML file and the run folder. A setting left out takes the
default of its method and data; a setting that the method or the data do not read is refused, not
ignored.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ibaml.energy.likelihood import Temperature
from ibaml.recommended import (
    GAUSSIAN,
    IMPLICIT,
    METHODS,
    UNROLLED,
    recommended,
    recommended_adapt,
    recommended_meta_lr,
)
from ibaml.tasks.kinds import IMAGE_SIZE, QUERIES, TABLE, Kind, kind_of_data, refusal


class SettingsError(ValueError):
    """A setting is unknown, of the wrong kind, or contradicts another; the message names it."""


def setting(
    default: Any,
    help: str,
    panel: str,
    *,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    only: tuple[str, ...] = (),
    shown: str | None = None,
) -> Any:
    """A setting: ``only`` names the methods that read it, ``shown`` describes a default that
    depends on other settings."""
    return field(
        default=default,
        metadata={
            "help": help,
            "panel": panel,
            "choices": choices,
            "least": least,
            "above": above,
            "most": most,
            "only": only,
            "shown": shown,
        },
    )


_DATA, _NET, _METHOD = "Tasks", "Network", "Method: how a task is learned"
_OUTER, _RUN = "Meta-training: how the prior is learned", "Run"


@dataclass(frozen=True)
class Settings:
    """A training run. `resolve` makes one; ``None`` means that a setting does not apply."""

    # --- tasks
    data: str = setting(
        "glyphs", "A name of `ibaml data list`, sinusoids, an image folder or zip, a CSV list of "
        "images, an .npz of features x and labels y, or a table (with --target).", _DATA
    )  # fmt: skip
    root: str | None = setting(
        None, "Where the files of a named dataset, or of a CSV list, lie.", _DATA,
        shown="$IBAML_DATA; beside the list",
    )  # fmt: skip
    splits: str | None = setting(
        None, "JSON file with the classes (or tasks) of train, val and test, for your own data.",
        _DATA, shown="as the data have it, else by a hash",
    )  # fmt: skip
    image_size: int | None = setting(
        None, "Side of the images of a folder or list of your own.", _DATA, least=4,
        shown=str(IMAGE_SIZE),
    )  # fmt: skip
    task: str | None = setting(None, "Table: the column that names the task.", _DATA)
    features: str | None = setting(None, "Table: the input columns, comma-separated.", _DATA)
    target: str | None = setting(None, "Table: the column to predict.", _DATA)
    ways: int | None = setting(None, "Classes of a task (W).", _DATA, least=2, shown="5")
    shots: int | None = setting(
        None, "Examples a class (or, in regression, a task).", _DATA, least=1,
        shown="1; regression 5",
    )  # fmt: skip
    queries: int | None = setting(
        None, "Queries a class (or a task) of a training task.", _DATA, least=1,
        shown=f"{QUERIES}; a table: all other rows",
    )  # fmt: skip
    train_shots: int | None = setting(
        None, "Other shots in training than in the test (Reptile likes more).", _DATA, least=1,
        shown="shots; reptile: more",
    )  # fmt: skip
    rotations: bool = setting(False, "Count quarter turns of a training class as classes.", _DATA)
    augment: bool = setting(False, "Flip and shift training images.", _DATA)

    # --- network
    model: str | None = setting(
        None,
        "conv4, resnet12 or mlp.",
        _NET,
        choices=("conv4", "resnet12", "mlp"),
        shown="by the data",
    )
    channels: int | None = setting(
        None, "Channels of conv4, or of resnet12's first block.", _NET, least=1, shown="32; 64"
    )
    hidden: str | None = setting(
        None, "Hidden widths of mlp, comma-separated.", _NET, shown="40,40"
    )
    norm: str | None = setting(
        None, "Normalisation of conv4 and resnet12: batch, group or none.", _NET,
        choices=("batch", "group", "none"), shown="batch",
    )  # fmt: skip

    # --- method
    method: str = setting(
        "ibaml", "ibaml, abml, imaml, maml, fomaml, reptile: see `ibaml methods`.", _METHOD,
        choices=METHODS,
    )  # fmt: skip
    adapt: str | None = setting(
        None, "Which weights a task adapts: all, head, or a pattern over their names.", _METHOD,
        shown="head for ibaml and imaml, else all",
    )  # fmt: skip
    tie_head: bool = setting(
        False, "One prior row for all classes: a prior for any number of them.", _METHOD
    )
    solver: str | None = setting(
        None, "newton converges in a few steps; descent takes exactly K; also natural, adam.",
        _METHOD, choices=("newton", "descent", "natural", "adam"),
        shown="newton for an implicit head, else descent",
    )  # fmt: skip
    steps: int | None = setting(
        None, "K, the adaptation steps.", _METHOD, least=0, shown="newton 8, else 5"
    )
    inner_lr: float | None = setting(
        None, "α, the step size of adaptation (not of newton).", _METHOD, above=0,
        shown="0.1, in regression 0.1·σ²; adam 0.01",
    )  # fmt: skip
    learn_inner_lr: bool | None = setting(
        None, "Meta-learn α, one for each weight tensor.", _METHOD, only=UNROLLED, shown="no"
    )
    cg_steps: int | None = setting(
        None, "L, conjugate-gradient steps of the implicit gradient.", _METHOD, least=1,
        only=IMPLICIT, shown="as many as it takes, up to 64",
    )  # fmt: skip
    curvature: str | None = setting(
        None, "H: ggn is safe; energy is exact; lemma is the paper's.", _METHOD,
        choices=("ggn", "energy", "lemma"), only=IMPLICIT, shown="ggn",
    )  # fmt: skip
    damping: float | None = setting(
        None, "μ, relative to the prior's precision.", _METHOD, least=0, only=IMPLICIT, shown="0"
    )
    block: str | None = setting(
        None, "all, or mean: curvature of the loss for the means alone.", _METHOD,
        choices=("all", "mean"), only=("ibaml",), shown="all",
    )  # fmt: skip
    samples: int | None = setting(
        None, "S, Monte-Carlo samples of the energy.", _METHOD, least=1, only=GAUSSIAN, shown="4"
    )
    noise: str | None = setting(
        None, "independent, or antithetic pairs.", _METHOD, choices=("independent", "antithetic"),
        only=GAUSSIAN, shown="antithetic",
    )  # fmt: skip
    beta: float | None = setting(
        None, "β of κ = β/N: 1 is Bayes, below 1 a tempered posterior.", _METHOD, above=0,
        only=GAUSSIAN, shown="0.002 for a head, else 0.001 (regression 0.01)",
    )  # fmt: skip
    init_log_var: float | None = setting(
        None, "ρ, the prior's log-variance at the start.", _METHOD, least=-80, most=80,
        only=GAUSSIAN, shown="-5 for a head, else -9 (regression -6)",
    )  # fmt: skip
    lam: float | None = setting(
        None, "λ of the proximal term, on the mean nll.", _METHOD, above=0, only=("imaml",),
        shown="0.05",
    )  # fmt: skip
    objective: str | None = setting(
        None, "The meta-loss: query (nll), predictive (nll of the averaged prediction) or abml.",
        _METHOD, choices=("query", "predictive", "abml"),
        only=("ibaml", "abml", "imaml", "maml", "fomaml"), shown="query; abml: abml",
    )  # fmt: skip
    temperature: str | None = setting(
        None, "t of predictions softmax(t·z), outside the energy: learned with the prior, fitted "
        "on validation tasks, both, or a number.", _METHOD,
        shown="learned for many training classes, else fitted",
    )  # fmt: skip
    noise_std: float | None = setting(
        None, "σ of the observations, in regression.", _METHOD, above=0, shown="0.3"
    )
    learn_noise: bool | None = setting(None, "Meta-learn σ.", _METHOD, shown="yes; reptile no")

    # --- meta-training
    iterations: int = setting(2000, "Meta-iterations.", _OUTER, least=0)
    tasks: int = setting(8, "Tasks of a meta-iteration, over all processes.", _OUTER, least=1)
    micro_batch: int | None = setting(
        None, "Tasks at once in memory; the result does not change.", _OUTER, least=1,
        shown="as many as fit",
    )  # fmt: skip
    optimiser: str = setting(
        "adam", "adam, adamw, sgd, rmsprop, radam, nadam, adagrad.", _OUTER,
        choices=("adam", "adamw", "sgd", "rmsprop", "radam", "nadam", "adagrad"),
    )  # fmt: skip
    meta_lr: float | None = setting(
        None, "Step size of the optimiser.", _OUTER, above=0, shown="0.01 for a head, else 0.003"
    )
    momentum: float | None = setting(None, "Of sgd and rmsprop.", _OUTER, least=0, shown="0")
    weight_decay: float = setting(0.0, "Of the optimiser.", _OUTER, least=0)
    schedule: str = setting(
        "cosine", "How the step size falls: constant, linear or cosine.", _OUTER,
        choices=("constant", "linear", "cosine"),
    )  # fmt: skip
    warmup: int = setting(0, "Iterations over which the step size rises first.", _OUTER, least=0)
    clip: float = setting(10.0, "Largest norm of the meta-gradient.", _OUTER, above=0)
    ema: float | None = setting(
        None, "Average the meta-parameters with this decay, e.g. 0.99.", _OUTER, above=0, most=1,
        shown="off",
    )  # fmt: skip

    # --- run
    seed: int = setting(
        0, "Of the network's start, the tasks and the noise.", _RUN, least=0, most=2**63 - 1
    )
    device: str = setting("auto", "auto, cpu, cuda or cuda:N.", _RUN)
    dtype: str = setting("float32", "float32 or float64.", _RUN, choices=("float32", "float64"))
    threads: int | None = setting(None, "CPU threads of a process.", _RUN, least=1, shown="torch's")
    execution: str = setting(
        "auto", "auto, loop (the oracle), single, vmap, fold or head.", _RUN,
        choices=("auto", "loop", "single", "vmap", "fold", "head"),
    )  # fmt: skip
    precision: str = setting(
        "full", "full, or bfloat16 where tasks are folded (an accelerator).", _RUN,
        choices=("full", "bfloat16"),
    )  # fmt: skip
    capture: bool = setting(True, "Record meta-steps as CUDA graphs, on an accelerator.", _RUN)
    val_every: int = setting(200, "Validate after so many iterations; 0: never.", _RUN, least=0)
    val_tasks: int = setting(100, "Validation tasks.", _RUN, least=1)
    checkpoint_every: int = setting(200, "Save after so many iterations.", _RUN, least=1)
    keep: int = setting(3, "Checkpoints to keep, besides the best.", _RUN, least=1)
    log_every: int = setting(20, "Log after so many iterations.", _RUN, least=1)
    tensorboard: bool = setting(True, "Write TensorBoard files.", _RUN)
    patience: int = setting(
        20, "Stop after so many faulty iterations in a row (diverged tasks, gradients that are not "
        "finite).", _RUN, least=1,
    )  # fmt: skip

    @property
    def regression(self) -> bool:
        return self.ways is None


FIELDS = {f.name: f for f in dataclasses.fields(Settings)}


def option(name: str) -> str:
    """How a setting is written on the command line."""
    return f"--{name.replace('_', '-')}"


def kind_of(table: type, name: str) -> type:
    """The kind of a setting of a table: int, float, bool or str."""
    hint = typing.get_type_hints(table)[name]
    if isinstance(hint, types.UnionType):
        hint = next(t for t in typing.get_args(hint) if t is not type(None))
    return typing.cast(type, hint)


def near(name: str, known: typing.Iterable[str]) -> str:
    """“; did you mean X?”, or nothing."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.4)
    return f"; did you mean {close[0]}?" if close else ""


def read_toml(path: Path) -> dict[str, Any]:
    """Settings of a TOML file, the names as on the command line, with dashes or underscores."""
    try:
        content = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is no TOML: {error}") from error
    found = {}
    for name, value in content.items():
        if isinstance(value, Mapping):
            raise SettingsError(f"{path}: [{name}] is a table; settings are flat, e.g. ways = 5")
        plain = name.replace("-", "_")
        if plain in found:
            raise SettingsError(
                f"{path}: {plain} is there twice, with dashes and underscores: keep one"
            )
        found[plain] = value
    for name in found:
        if name not in FIELDS:
            raise SettingsError(f"{path}: there is no setting {name!r}{near(name, FIELDS)}")
    return found


def write_toml(settings: Settings) -> str:
    """The settings as a TOML file that gives the same run again."""
    import tomli_w  # the machine that measures has torch and numpy alone

    values = {name: getattr(settings, name) for name in FIELDS}
    return tomli_w.dumps({name: value for name, value in values.items() if value is not None})


def resolve(given: Mapping[str, Any]) -> Settings:
    """The settings of a run from those that were given; the rest by method and data."""
    chosen: dict[str, Any] = {}
    for name, value in given.items():
        if name not in FIELDS:
            raise SettingsError(f"there is no setting {name!r}{near(name, FIELDS)}")
        if value is not None:
            chosen[name] = checked(Settings, name, value)
    method = chosen.get("method", "ibaml")
    _refuse_unread(chosen, method)
    values = {**_defaults(chosen, method), **chosen}
    return Settings(**values)


def checked(table: type, name: str, value: Any) -> Any:
    """A value of the right kind and in range."""
    kind = kind_of(table, name)
    meta = table.__dataclass_fields__[name].metadata  # type: ignore[attr-defined]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
        raise SettingsError(f"{name} must be {words[kind]}, got {value!r}")
    if meta["choices"] and value not in meta["choices"]:
        raise SettingsError(
            f"{name} must be one of {', '.join(meta['choices'])}; got {value!r}"
            f"{near(str(value), meta['choices'])}"
        )
    if isinstance(value, int | float) and kind is not bool:
        if not math.isfinite(value):
            raise SettingsError(f"{name} must be finite, got {value}")
        if meta["least"] is not None and value < meta["least"]:
            raise SettingsError(f"{name} must be {meta['least']:g} or more, got {value}")
        if meta["above"] is not None and value <= meta["above"]:
            raise SettingsError(f"{name} must be above {meta['above']:g}, got {value}")
        if meta["most"] is not None and value > meta["most"]:
            raise SettingsError(f"{name} must be {meta['most']:.10g} or less, got {value}")
    return value


def differs(ours: Settings, given: Settings) -> str | None:
    """The first setting that is given and is another than ours."""
    for name in FIELDS:
        value = getattr(given, name)
        if value is not None and value != getattr(ours, name):
            return name
    return None


def data_kind(chosen: Mapping[str, Any]) -> Kind:
    """The kind of data that settings name."""
    return kind_of_data(chosen.get("data", "glyphs"), table=chosen.get("target") is not None)


def is_regression(chosen: Mapping[str, Any]) -> bool:
    return data_kind(chosen).regression


def _refuse_unread(chosen: Mapping[str, Any], method: str) -> None:
    """Refuse settings that nothing would read, and settings that contradict each other."""
    if chosen.get("data") == "":
        raise SettingsError("data is empty: give a name or a path, or leave it out for glyphs")
    for name in chosen:
        only = FIELDS[name].metadata["only"]
        if only and method not in only:
            raise SettingsError(
                f"{name} is read by {', '.join(only)} and the method is {method}: leave it out"
            )
    table = [name for name in ("task", "features", "target") if name in chosen]
    if table and len(table) < 3:
        missing = [name for name in ("task", "features", "target") if name not in table]
        raise SettingsError(f"a table needs {' and '.join(missing)} too ({table[0]} was given)")
    refuse_unread_data(chosen)
    regression = is_regression(chosen)
    for name in ("ways", "rotations", "augment", "tie_head"):
        if regression and chosen.get(name):
            raise SettingsError(f"{name} is for classification, and {_what(chosen)} is regression")
    if regression and chosen.get("temperature") is not None:
        raise SettingsError(f"temperature is for classification, and {_what(chosen)} is regression")
    if chosen.get("temperature") is not None:
        temperature_of(chosen["temperature"])
        if method == "reptile" and chosen["temperature"] in ("learned", "both"):
            raise SettingsError("reptile has no gradient for a temperature: use fitted")
    for name in ("noise_std", "learn_noise"):
        if not regression and chosen.get(name) is not None:
            raise SettingsError(f"{name} is for regression (sinusoids, or a table with target)")
    solver = chosen.get("solver")
    if solver == "newton" and "inner_lr" in chosen:
        raise SettingsError("inner_lr is not read by solver newton, which has a line search")
    if solver == "newton" and method not in IMPLICIT and method not in ("fomaml", "reptile"):
        raise SettingsError(f"solver newton cannot be unrolled, as {method} does: use descent")
    if solver == "natural" and method not in GAUSSIAN:
        raise SettingsError(f"solver natural moves log-variances, and {method} has none")
    model = chosen.get("model")
    if model == "mlp":
        for name in ("channels", "norm"):
            if name in chosen:
                raise SettingsError(f"{name} is for conv4 and resnet12, and the model is mlp")
    elif model is not None and "hidden" in chosen:
        raise SettingsError(f"hidden is for mlp, and the model is {model}")
    if "momentum" in chosen and chosen.get("optimiser", "adam") not in ("sgd", "rmsprop"):
        raise SettingsError(
            f"momentum is for sgd and rmsprop, and optimiser is {chosen.get('optimiser', 'adam')}"
        )
    if chosen.get("curvature") == "lemma" and method != "ibaml":
        raise SettingsError("curvature lemma is written for ibaml's Gaussian: use ggn or energy")
    if method == "reptile" and chosen.get("adapt", "all") != "all":
        raise SettingsError("reptile has no gradient for shared weights: leave adapt at all")
    if chosen.get("learn_noise") and method == "reptile":
        raise SettingsError("reptile has no gradient for learn_noise: leave it out")
    if chosen.get("objective") == "abml" and method not in GAUSSIAN:
        raise SettingsError(f"objective abml needs a Gaussian belief, and {method} has a point")
    warmup, iterations = chosen.get("warmup", 0), chosen.get("iterations", 2000)
    if warmup > iterations:
        raise SettingsError(f"warmup ({warmup}) is longer than iterations ({iterations})")


def refuse_unread_data(chosen: Mapping[str, Any]) -> None:
    """Refuse settings that this kind of data does not read."""
    if said := refusal(chosen.get("data", "glyphs"), data_kind(chosen), chosen):
        raise SettingsError(said)


def temperature_of(text: str) -> Temperature:
    """The temperature that a setting means."""
    try:
        number = float(text)
    except ValueError:
        if text not in ("learned", "fitted", "both"):
            raise SettingsError(
                f"temperature must be learned, fitted, both or a number, got {text!r}"
                f"{near(text, ('learned', 'fitted', 'both'))}"
            ) from None
        return typing.cast(Temperature, text)
    if not 0 < number < math.inf:
        raise SettingsError(f"temperature must be a positive number, got {text}")
    return number


def _what(chosen: Mapping[str, Any]) -> str:
    return "a table" if data_kind(chosen) is TABLE else str(chosen.get("data"))


def _defaults(chosen: Mapping[str, Any], method: str) -> dict[str, Any]:
    """What was not given, by method and data."""
    kind = data_kind(chosen)
    regression = kind.regression
    adapt = chosen.get("adapt", recommended_adapt(method))
    head = adapt == "head"
    values: dict[str, Any] = {
        "adapt": adapt,
        "shots": 5 if regression else 1,
        **recommended(method, head=head, regression=regression, given=chosen),
        "meta_lr": recommended_meta_lr(head=head),
    }
    for name, usual in (("image_size", IMAGE_SIZE), ("queries", QUERIES)):
        if kind.reads(name):
            values[name] = usual
    if not regression:
        values["ways"] = 5
    if method in UNROLLED:
        values["learn_inner_lr"] = False
    if method == "reptile":
        values["train_shots"] = max(5, chosen.get("shots", 1))
    if chosen.get("optimiser") in ("sgd", "rmsprop"):
        values["momentum"] = 0.0
    return values
