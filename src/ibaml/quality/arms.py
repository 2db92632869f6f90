"""Which methods are compared, and among which settings may each choose on validation classes?

An arm is an ordinary training run. All share data, network, pre-training, tasks and seeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Settings = dict[str, Any]


@dataclass(frozen=True)
class Arm:
    """A method: its title, what sets its runs apart, and the settings to choose from.

    Attributes:
        often: whether it is trained with every seed, not with the first alone.
    """

    title: str
    own: Settings
    candidates: tuple[Settings, ...]
    often: bool = False


_RATES: tuple[Settings, ...] = ({}, {"meta_lr": 0.003}, {"meta_lr": 0.001})
_STEPS: tuple[Settings, ...] = ({}, {"inner_lr": 0.1}, {"meta_lr": 0.001})
_SCALED = {"temperature": "both"}  # the learned scale of the literature's heads

# the first is what the others are compared with
ARMS: dict[str, Arm] = {
    "ours": Arm("iBaML", {}, _RATES, often=True),
    "point": Arm("point", {"posterior": "point"}, _RATES, often=True),
    "maml": Arm("MAML", {"method": "maml"}, _STEPS),
    "anil": Arm("ANIL", {"method": "maml", "adapt": "head"}, _RATES),
    "abml": Arm("ABML", {"method": "abml"}, ({}, {"beta": 1e-4}, {"inner_lr": 0.1})),
    "protonet": Arm("ProtoNet", {"posterior": "prototypes", **_SCALED}, _RATES),
    "r2d2": Arm("R2-D2", {"posterior": "ridge", **_SCALED}, _RATES),
    "gp": Arm("GP on ±1", {"posterior": "gp", **_SCALED}, _RATES),
    "imaml": Arm("iMAML, head", {"method": "imaml"}, ({}, {"lam": 0.5}, {"meta_lr": 0.001})),
    # these run only if they are named
    "ibaml_all": Arm("iBaML, everything", {"adapt": "all"}, ({},)),
    "imaml_all": Arm("iMAML, everything", {"method": "imaml", "adapt": "all"}, ({},)),
    "fomaml": Arm("FOMAML", {"method": "fomaml"}, _STEPS),
}
USUAL = tuple(ARMS)[:9]
