"""What happened in the learner's last call, per task? Reading a value waits for the device,
recording it does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from ibaml.gradient import Record
from ibaml.linalg import Reason
from ibaml.metastep import MetaStep
from ibaml.solve import Solution

UNSOLVED = 0.1  # a system whose ‖b − Hu‖/‖b‖ is larger counts as unsolved


@dataclass(frozen=True)
class Diagnostics:
    """The record of one call; every tensor has one entry per task.

    Values of the backward pass (``cg_…``, ``negative_curvature``) are None if the record was read
    before it, and for rules that solve no linear system. A record does not change once it was
    returned: read `MetaLearner.diagnostics` again after ``backward()``.
    """

    step: MetaStep
    blocks: Mapping[str, slice]  # where each block of a solution lies
    keys: tuple[int, ...]

    def snapshot(self) -> Diagnostics:
        """A copy that a later backward pass does not change. It is made on the device, without
        waiting for it."""
        step = self.step
        rebuilt = step.rebuilt
        if rebuilt is not None:
            rebuilt = (replace(rebuilt[0]), rebuilt[1])
        copied_step = replace(
            step, left_out=step.left_out.clone(), record=replace(step.record), rebuilt=rebuilt
        )
        return replace(self, step=copied_step)

    @property
    def left_out(self) -> Tensor:
        """Tasks that took no part in the loss."""
        return self.step.left_out

    @property
    def record(self) -> Record:
        """The solve and the linear solve as they were returned."""
        return Record(self.step.record.solution, self.step.linear)

    @property
    def energy_before(self) -> Tensor:
        return self._solution.energy_before

    @property
    def energy_after(self) -> Tensor | None:
        return self._solution.energy_after

    @property
    def gradient_norm(self) -> dict[str, Tensor] | None:
        """‖∇E‖ at the solution, for each block (``"mean"``, ``"log_var"``)."""
        gradient = self._solution.gradient
        if gradient is None:
            return None
        return {name: gradient[:, where].norm(dim=-1) for name, where in self.blocks.items()}

    @property
    def steps(self) -> Tensor:
        """Steps the solver took."""
        return self._solution.steps

    @property
    def reason(self) -> list[Reason]:
        """Why the solver stopped."""
        return [Reason(r) for r in self._solution.reason.tolist()]

    @property
    def diverged(self) -> Tensor:
        """Tasks whose adaptation or meta-loss was not finite; they took no part in the loss."""
        return self.left_out

    @property
    def cg_residual(self) -> Tensor | None:
        """‖b − Hu‖/‖b‖ of the linear solve; NaN for a task that was left out."""
        linear = self.step.linear
        return None if linear is None else linear.residual

    @property
    def unsolved(self) -> Tensor | None:
        """Tasks whose linear system counts as unsolved: a relative residual above `UNSOLVED`."""
        residual = self.cg_residual
        return None if residual is None else ~(residual <= UNSOLVED) & ~self.left_out

    @property
    def cg_steps(self) -> Tensor | None:
        linear = self.step.linear
        return None if linear is None else linear.steps

    @property
    def cg_reason(self) -> list[Reason] | None:
        linear = self.step.linear
        return None if linear is None else [Reason(r) for r in linear.reason.tolist()]

    @property
    def negative_curvature(self) -> Tensor | None:
        """Tasks for which the linear solver found H to be indefinite."""
        linear = self.step.linear
        return None if linear is None else linear.reason == Reason.NEGATIVE_CURVATURE

    @property
    def _solution(self) -> Solution:
        assert self.step.record.solution is not None
        return self.step.record.solution

    def __str__(self) -> str:
        """A table, one line per task."""
        norms = self.gradient_norm or {}
        head = ["task", "E before", "E after", *(f"|dE/d{b}|" for b in norms), "steps", "solver"]
        residual, steps, reasons = self.cg_residual, self.cg_steps, self.cg_reason
        if residual is not None:
            head += ["CG steps", "CG residual", "CG"]
        after = self.energy_after
        rows = [head]
        for t, key in enumerate(self.keys):
            row = [str(key), f"{self.energy_before[t]:.4g}"]
            row.append("-" if after is None else f"{after[t]:.4g}")
            row += [f"{n[t]:.2e}" for n in norms.values()]
            row += [str(int(self.steps[t])), self.reason[t].sentence]
            if residual is not None and steps is not None and reasons is not None:
                outcome = reasons[t].sentence + (", unsolved" if residual[t] > UNSOLVED else "")
                row += [str(int(steps[t])), f"{residual[t]:.2e}", outcome]
            rows.append(row)
        widths = [max(len(r[i]) for r in rows) for i in range(len(head))]
        return "\n".join(
            "  ".join(cell.rjust(w) for cell, w in zip(r, widths, strict=True)) for r in rows
        )
