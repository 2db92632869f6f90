"""Where are the prior's parameters? The model's own weights are its means; the rest is held here.

The parameters have the belief's names, as ``NAME.WEIGHT``; the mean of a tied row is
``tied_mean.WEIGHT``.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from ibaml.weights.belief import Belief, Prior
from ibaml.weights.layout import Layout

_WHOLE = "all"  # the key of a parameter that is one tensor for all weights


def parameter_key(name: str) -> str:
    """A parameter's name as a key of an `nn.ParameterDict`, which may contain no dot and may not be
    the name of one of its methods."""
    key = name.replace(".", "/")
    return f"{key}/" if hasattr(nn.ParameterDict, key) else key


class PriorParameters:
    """The prior of a belief about the weights of ``layout``, as parameters and as flat vectors.

    Attributes:
        groups: the parameters by group; the owner registers each group under its name.
    """

    def __init__(
        self,
        belief: Belief,
        layout: Layout,
        weights: Mapping[str, Tensor],
        init_log_var: float,
    ) -> None:
        # a tied prior has parameters of its own: the model's head only gives the shape
        means = {
            n: weights[n].detach().mean(0, keepdim=True)
            if n in layout.rows
            else weights[n].detach()
            for n in layout.names
        }
        self._whole = set()
        self.groups = {"tied_mean": _parameters({n: means[n] for n in sorted(layout.rows)})}
        for group, value in belief.prior_parameters(means, init_log_var).items():
            if isinstance(value, Tensor):
                if layout.rows:
                    raise ValueError(
                        f"tie_head: {group} of {type(belief).__name__} is one tensor for all "
                        "weights, so it has no rows to tie; leave tie_head out"
                    )
                self._whole.add(group)
                self.groups[group] = _parameters({_WHOLE: value})
            else:
                self.groups[group] = _parameters(value)

    def vectors(self, layout: Layout, weights: Mapping[str, Tensor]) -> Prior:
        """The prior as vectors, for a layout that may have another number of rows."""
        tied, *rest = self.groups
        means = {
            n: self.groups[tied][parameter_key(n)] if n in layout.rows else weights[n]
            for n in layout.names
        }
        vectors = [layout.join(means)]
        for name in rest:
            group = self.groups[name]
            if name in self._whole:
                vectors.append(group[_WHOLE].reshape(-1))
            else:
                vectors.append(layout.join({n: group[parameter_key(n)] for n in layout.names}))
        return tuple(vectors)


def _parameters(tensors: Mapping[str, Tensor]) -> nn.ParameterDict:
    made = nn.ParameterDict()
    for name, t in tensors.items():  # one at a time: the constructor would sort them
        made[parameter_key(name)] = nn.Parameter(t.detach().clone())
    return made
