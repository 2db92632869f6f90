"""Which values do settings take that were not given, and which settings contradict each other?

A setting that was left out takes the default of its method and data. A setting that the method or
the data do not read is refused, not ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from ibaml.fields import SettingsError, chosen, near, refuse_unread
from ibaml.kinds import FEATURES, IMAGE_SIZE, QUERIES, TABLE, Kind, kind_of_data, refusal
from ibaml.training.settings import FIELDS, Settings
from ibaml.words import (
    BACKBONES,
    DESCENTS,
    GAUSSIAN,
    IMPLICIT,
    IN_CLOSED_FORM,
    NOT_OF_FULL,
    STOPPINGS,
    UNROLLED,
    WITHOUT_PRIOR,
    StoppingWord,
)

if TYPE_CHECKING:
    from ibaml.energy.likelihood import Temperature


def resolve(given: Mapping[str, Any]) -> Settings:
    """All settings of a run: those given, and defaults by method and data for the rest."""
    settings = chosen(Settings, given)
    method = settings.get("method", "ibaml")
    _refuse_contradictions(settings, method)
    made = Settings(**{**_defaults(settings, method), **settings})
    if made.warmup > made.iterations:
        raise SettingsError(f"warmup ({made.warmup}) is longer than iterations ({made.iterations})")
    if made.train_ways not in (None, made.ways) and not made.tie_head:
        raise SettingsError(
            "train_ways other than ways needs tie_head: else the head has one row for each class"
        )
    return made


def data_kind(given: Mapping[str, Any]) -> Kind:
    """The kind of data that the settings name."""
    return kind_of_data(given.get("data", "glyphs"), table=given.get("target") is not None)


def is_regression(given: Mapping[str, Any]) -> bool:
    return data_kind(given).regression


def _refuse_contradictions(given: Mapping[str, Any], method: str) -> None:
    """Refuse settings that nothing would read, and settings that contradict each other."""
    if given.get("data") == "":
        raise SettingsError("data is empty: give a name or a path, or leave it out for glyphs")
    refuse_unread(Settings, given, method)
    table = [name for name in ("task", "features", "target") if name in given]
    if table and len(table) < 3:
        missing = [name for name in ("task", "features", "target") if name not in table]
        raise SettingsError(f"a table needs {' and '.join(missing)} too ({table[0]} was given)")
    refuse_unread_data(given)
    _refuse_beside_backbone(given)
    regression = is_regression(given)
    for name in ("ways", "train_ways", "rotations", "augment", "tie_head"):
        if regression and given.get(name):
            raise SettingsError(f"{name} is for classification, and {_what(given)} is regression")
    if regression and given.get("temperature") is not None:
        raise SettingsError(f"temperature is for classification, and {_what(given)} is regression")
    if given.get("temperature") is not None:
        temperature_of(given["temperature"])
        if method == "reptile" and given["temperature"] in ("learned", "both"):
            raise SettingsError("reptile has no gradient for a temperature: use fitted")
    _refuse_around_pretraining(given, regression)
    for name in ("noise_std", "learn_noise"):
        if not regression and given.get(name) is not None:
            raise SettingsError(f"{name} is for regression (sinusoids, or a table with target)")
    solver = given.get("solver")
    if solver in ("newton", "head") and "inner_lr" in given:
        raise SettingsError(f"inner_lr is not read by solver {solver}, which uses a line search")
    if solver == "head" and (method != "ibaml" or given.get("noise", "outputs") != "outputs"):
        raise SettingsError("solver head is for ibaml with noise on outputs: leave it out")
    if solver == "newton" and method not in IMPLICIT and method not in ("fomaml", "reptile"):
        raise SettingsError(f"solver newton cannot be unrolled, as {method} does: use descent")
    stopping = given.get("stopping")
    if stopping is not None and stopping_of(stopping) == "auto" and solver == "adam":
        raise SettingsError(
            "stopping auto needs step sizes, and those of solver adam follow from its gradients: "
            "use descent or natural, or give stopping a number"
        )
    _refuse_beside_full(given, method)
    if "lam" in given and "beta" in given:
        raise SettingsError("lam and beta both set the strength of the prior: give one of them")
    if solver == "natural" and method not in GAUSSIAN:
        raise SettingsError(f"solver natural moves log-variances, and {method} has none")
    if given.get("model") == "discriminant" and regression:
        raise SettingsError(
            f"model discriminant is for classes, and {_what(given)} is regression: use mlp"
        )
    if given.get("model") is not None:
        refuse_unread_by_network(given, given["model"])
    if "momentum" in given and given.get("optimizer", "adam") not in ("sgd", "rmsprop"):
        raise SettingsError(
            f"momentum is for sgd and rmsprop, and optimizer is {given.get('optimizer', 'adam')}"
        )
    if given.get("curvature") == "lemma" and method != "ibaml":
        raise SettingsError("curvature lemma is written for ibaml's Gaussian: use ggn or energy")
    if method == "reptile" and given.get("adapt", "all") != "all":
        raise SettingsError("reptile has no gradient for shared weights: leave adapt at all")
    if given.get("learn_noise") and method == "reptile":
        raise SettingsError("reptile has no gradient for learn_noise: leave it out")
    if given.get("objective") == "abml" and method not in GAUSSIAN:
        raise SettingsError(f"objective abml needs a Gaussian belief, and {method} has a point")


def _refuse_around_pretraining(given: Mapping[str, Any], regression: bool) -> None:
    """Refuse pre-training where there are no classes or no layers to train, and what it alone
    reads."""
    if not given.get("pretrain"):
        if given.get("label_smoothing") is not None:
            raise SettingsError("label_smoothing is for pre-training: give pretrain too")
        return
    if regression:
        raise SettingsError(f"pretrain is for classification, and {_what(given)} is regression")
    vectors = data_kind(given) is FEATURES or given.get("backbone") is not None
    usual = "discriminant" if vectors and given.get("hidden") is None else ""
    if given.get("model", usual) == "discriminant":
        raise SettingsError(
            "pretrain has no layers to train in model discriminant: use model mlp, or leave it out"
        )


def _refuse_beside_backbone(given: Mapping[str, Any]) -> None:
    """Refuse what is for images where a run reads their embeddings."""
    if given.get("backbone") is None:
        return
    for name in ("image_size", "rotations", "augment"):
        if given.get(name):
            raise SettingsError(
                f"{name} is not read with a backbone, which embeds pictures as they are: leave it "
                "out"
            )
    if (model := given.get("model")) is not None and BACKBONES[model].images:
        raise SettingsError(
            f"model {model} reads images, and backbone {given['backbone']} makes vectors of them: "
            "use discriminant or mlp, or leave backbone out"
        )


def _refuse_beside_full(given: Mapping[str, Any], method: str) -> None:
    """Refuse what a posterior in closed form does not read, and its solver for other posteriors."""
    posterior, solver = given.get("posterior"), given.get("solver")
    if solver == "dual" and (method != "ibaml" or posterior not in (None, *IN_CLOSED_FORM)):
        raise SettingsError("solver dual is for posterior full, of method ibaml: leave it out")
    if solver == "dual" or posterior in IN_CLOSED_FORM:
        posterior = posterior or "full"
        if given.get("adapt", "head") == "all":
            raise SettingsError(f"posterior {posterior} is for a linear head: use adapt head")
        for name in ("beta", "init_log_var", "lam"):
            if posterior in WITHOUT_PRIOR and name in given:
                why = "has none" if posterior == "prototypes" else "comes from the base classes"
                raise SettingsError(
                    f"{name} is not read by posterior {posterior}, whose prior {why}: leave it "
                    "out, or use posterior full"
                )
        for name in NOT_OF_FULL:
            if name in given and name != "steps" and given[name] != "dual":
                raise SettingsError(
                    f"{name} is not read by posterior {posterior}, which is in closed form: leave "
                    "it out, or use posterior diagonal"
                )


def refuse_unread_by_network(given: Mapping[str, Any], model: str) -> None:
    """Refuse settings of other networks than this one."""
    for name in dict.fromkeys(n for other in BACKBONES.values() for n in other.reads):
        if given.get(name) is not None and name not in BACKBONES[model].reads:
            readers = [word for word, other in BACKBONES.items() if name in other.reads]
            raise SettingsError(f"{name} is for {' and '.join(readers)}, and the model is {model}")


def refuse_unread_data(given: Mapping[str, Any]) -> None:
    """Refuse settings that this kind of data does not read."""
    if reason := refusal(given.get("data", "glyphs"), data_kind(given), given):
        raise SettingsError(reason)


def temperature_of(text: str) -> Temperature:
    """The temperature that the setting stands for."""
    try:
        number = float(text)
    except ValueError:
        if text not in ("learned", "fitted", "both"):
            raise SettingsError(
                f"temperature must be learned, fitted, both or a number, got {text!r}"
                f"{near(text, ('learned', 'fitted', 'both'))}"
            ) from None
        return cast("Temperature", text)
    if not 0 < number < math.inf:
        raise SettingsError(f"temperature must be a positive number, got {text}")
    return number


def stopping_of(text: str) -> StoppingWord | float:
    """What the setting stands for: a word, or δ."""
    if text in STOPPINGS:
        return text
    try:
        number = float(text)
    except ValueError:
        raise SettingsError(
            f"stopping must be auto, off or a number, got {text!r}{near(text, STOPPINGS)}"
        ) from None
    if not 0 <= number < math.inf:
        raise SettingsError(f"stopping must be 0 or more, got {text}")
    return number


def _what(given: Mapping[str, Any]) -> str:
    return "a table" if data_kind(given) is TABLE else str(given.get("data"))


def _defaults(given: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Defaults by method and data."""
    from ibaml.recommended import recommended, recommended_adapt, recommended_meta_lr  # torch

    kind = data_kind(given)
    regression = kind.regression
    adapt = given.get("adapt", recommended_adapt(method))
    head = adapt == "head"
    values: dict[str, Any] = {
        "adapt": adapt,
        "shots": 5 if regression else 1,
        **recommended(method, head=head, regression=regression, given=given),
        "meta_lr": recommended_meta_lr(head=head),
    }
    if values.get("solver") in DESCENTS and not regression:
        values["inner_lr"] = None  # depends on the network: `build.choose_step_size`
    for name, usual in (("image_size", IMAGE_SIZE), ("queries", QUERIES)):
        if kind.reads(name):
            values[name] = usual
    vectors = kind is FEATURES or given.get("backbone") is not None
    if vectors:
        values["image_size"] = None
    usual = 16 if regression else 8
    values["tasks"] = usual
    if not regression:
        values["ways"] = 5
    # a run is as long as its tasks are many: with more of them a step it has fewer steps
    for name in ("iterations", "val_every", "checkpoint_every", "log_every"):
        of_usual = FIELDS[name].default * usual
        values[name] = max(1, -(-of_usual // given.get("tasks", usual)))
    model = given.get("model")
    if vectors and model is None and given.get("hidden") is None:
        model = "discriminant"
    own = any(name in given for name in ("posterior", "beta", "init_log_var", "lam"))
    if model == "discriminant" and values.get("posterior") == "full" and not own:
        values["posterior"] = "class_means"
    if values.get("posterior") in WITHOUT_PRIOR:
        values.update(lam=None, init_log_var=None)
    if values.get("posterior") == "class_means" and model == "discriminant":
        # the base classes give the map, the prior and the answer: nothing is left to train
        values.update(model=model, iterations=0)
    if method in UNROLLED:
        values["learn_inner_lr"] = False
    if method == "reptile":
        values["train_shots"] = max(5, given.get("shots", 1))
    if given.get("optimizer") in ("sgd", "rmsprop"):
        values["momentum"] = 0.0
    if given.get("pretrain"):
        values["label_smoothing"] = 0.1
    return values
