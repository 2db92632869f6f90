"""How do many weight sets run through one network, and with which batch-norm statistics?"""

from ibaml.execution.choice import choose
from ibaml.execution.fold_rules import Unfoldable
from ibaml.execution.locks import held, training
from ibaml.execution.norm import (
    Buffers,
    Moments,
    Plan,
    Statistics,
    norm_buffers,
    norm_layers,
    plan_norms,
    support_statistics,
    watch_moments,
)
from ibaml.execution.runner import Runner
from ibaml.execution.strategy import Strategy
from ibaml.words import EXECUTIONS, NORM_STATS, Execution, NormStats, Precision

__all__ = [
    "EXECUTIONS",
    "NORM_STATS",
    "Buffers",
    "Execution",
    "Moments",
    "NormStats",
    "Plan",
    "Precision",
    "Runner",
    "Statistics",
    "Strategy",
    "Unfoldable",
    "choose",
    "held",
    "norm_buffers",
    "norm_layers",
    "plan_norms",
    "support_statistics",
    "training",
    "watch_moments",
]
