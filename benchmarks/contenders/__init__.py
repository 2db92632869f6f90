"""Who computes the meta-gradients that `benchmarks/peers.py` compares: one file per contender.

Each has ``prepare(case) -> step``; ``step()`` is one meta-step and returns the gradients by name.
A library that is not installed shows as the ImportError of its file's ``prepare``.
"""

from contenders.case import METHODS, Case, Gradients, Method, Step

__all__ = ["METHODS", "Case", "Gradients", "Method", "Step"]
