"""What is measured? Which methods, at which K, L and S, and on which tasks and network?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ibaml.fields import SettingsError, chosen, setting
from ibaml.words import CURVATURES, STOPPINGS

if TYPE_CHECKING:
    import torch

NAMES = {"maml": "MAML", "imaml": "iMAML", "abml": "ABML", "ibaml": "iBaML"}
IMPLICIT_OF = {"maml": "imaml", "abml": "ibaml"}  # the same belief with the other gradient rule
POINT_OF = {"abml": "maml", "ibaml": "imaml"}  # the same gradient rule without variances

_WHAT, _TASKS, _HOW = "What is measured", "Tasks and network", "How"
_CPU = {"tasks": 1, "ks": (1, 5, 10, 20), "ls": (1, 5, 10, 20), "repeats": 3}
_CUDA = {"tasks": 8, "ks": (1, 2, 5, 10, 20, 50), "ls": (1, 2, 5, 10, 20), "repeats": 5}


@dataclass(frozen=True)
class Arm:
    """A method at one S, K and (if it is implicit) L."""

    method: str
    samples: int
    steps: int
    cg_steps: int | None

    @property
    def label(self) -> str:
        return label(self.method, self.samples)


def label(method: str, samples: int) -> str:
    """A curve's name: the method, and S if it has samples."""
    return f"{NAMES[method]}, S = {samples}" if method in POINT_OF else NAMES[method]


@dataclass(frozen=True)
class Sweep:
    """A measurement: K varies at L = `fixed_cg_steps`, L varies at K = `fixed_steps`.

    `Sweep.of` makes one from texts or numbers, with the defaults of its device.
    """

    methods: tuple[str, ...] = setting(
        tuple(NAMES), "Which methods.", _WHAT, choices=tuple(NAMES), shown=",".join(NAMES)
    )
    ks: tuple[int, ...] = setting(
        (), "K, steps of adaptation.", _WHAT, least=1, shown="1,5,10,20; CUDA 1,2,5,10,20,50"
    )
    ls: tuple[int, ...] = setting(
        (), "L, steps of conjugate gradients.", _WHAT, least=1, shown="1,5,10,20; CUDA 1,2,5,10,20"
    )
    samples: tuple[int, ...] = setting(
        (1, 5), "S, Monte-Carlo samples of ABML and iBaML.", _WHAT, least=1, shown="1,5"
    )
    curvature: str = setting(
        "ggn", "H of the implicit methods: energy, ggn or lemma.", _WHAT, choices=CURVATURES
    )
    stopping: str = setting(
        "off", "Whether their gradient knows that descent was stopped after K steps: auto or off.",
        _WHAT, choices=STOPPINGS,
    )  # fmt: skip
    tasks: int = setting(0, "Tasks per batch.", _TASKS, least=1, shown="1; CUDA 8")
    image_size: int = setting(84, "Side of the images in pixels.", _TASKS, least=16)
    channels: int = setting(32, "Channels of Conv4.", _TASKS, least=1)
    device: str = setting("auto", "Device: auto, cpu, cuda or cuda:N.", _HOW)
    execution: str = setting(
        "auto", "How tasks run at once: auto, loop, single, vmap, fold or head.", _HOW,
        choices=("auto", "loop", "vmap", "fold"),
    )  # fmt: skip
    precision: str = setting(
        "full",
        "Activations: full, or bfloat16 where tasks are folded.",
        _HOW,
        choices=("full", "bfloat16"),
    )
    repeats: int = setting(0, "Timed runs of each point; the median counts.", _HOW, least=1, shown="3; CUDA 5")  # noqa: E501  # fmt: skip
    threads: int | None = setting(None, "CPU threads.", _HOW, least=1, shown="torch's own")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Sweep:
        """A sweep from the given options, checked; several values may be one text with commas."""
        from ibaml.machine import pick_device  # imports torch, which --help does not need

        options = {name: _ascending(value) for name, value in chosen(cls, given).items()}

        device = pick_device(options.get("device", "auto"))
        own = _CUDA if device.type == "cuda" else _CPU
        sweep = cls(**{**own, **options, "device": str(device)})
        if sweep.curvature == "lemma" and "imaml" in sweep.methods:
            raise SettingsError("curvature lemma is iBaML's: leave imaml out of methods")
        return sweep

    @property
    def fixed_steps(self) -> int:
        """K where L varies: 5, or the nearest value."""
        return min(self.ks, key=lambda k: (abs(k - 5), k))

    @property
    def fixed_cg_steps(self) -> int:
        """L where K varies: 5, or the nearest value."""
        return min(self.ls, key=lambda n: (abs(n - 5), n))

    @property
    def torch_device(self) -> torch.device:
        import torch

        return torch.device(self.device)

    def arms(self) -> list[Arm]:
        """All arms to measure; within a curve the small ones come first."""
        arms = []
        for method in self.methods:
            for samples in self.samples if method in POINT_OF else (1,):
                if method in IMPLICIT_OF:
                    pairs: set[tuple[int, int | None]] = {(k, None) for k in self.ks}
                else:
                    pairs = {(k, self.fixed_cg_steps) for k in self.ks}
                    pairs |= {(self.fixed_steps, n) for n in self.ls}
                ordered = sorted(pairs, key=lambda pair: (pair[0], pair[1] or 0))
                arms += [Arm(method, samples, k, n) for k, n in ordered]
        return arms


def _ascending(value: Any) -> Any:
    """Several values without repeats; numbers in ascending order."""
    if not isinstance(value, tuple):
        return value
    values = dict.fromkeys(value)
    return tuple(values if isinstance(value[0], str) else sorted(values))
