"""How well do outputs explain targets? nll(outputs, y), one value per example."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from ibaml.arguments import check_flag, check_number, check_part
from ibaml.heads import few

NllFunction = Callable[[Tensor, Tensor], Tensor]


class Likelihood(nn.Module):
    """Base of all likelihoods: ``forward(outputs (B, …), y (B, …)) -> nll (B,)``.

    Parameters of a likelihood are meta-learned like any other.
    """

    def probabilities(self, outputs: Tensor) -> Tensor:
        """Class probabilities (B, C) of outputs (B, C) under this likelihood. The default is
        p(c) ∝ exp(−nll(outputs, c)); a subclass may have a direct formula."""
        if outputs.dim() != 2:
            raise ValueError(
                f"{type(self).__name__} has no class probabilities for outputs of shape "
                f"{tuple(outputs.shape)}: write its probabilities(outputs)"
            )
        labels = torch.arange(outputs.shape[-1], device=outputs.device)
        nll = [self(outputs, label.expand(len(outputs))) for label in labels]
        return (-torch.stack(nll, -1)).softmax(-1)

    def outside(self) -> dict[str, Tensor]:
        """Parameters by name that the meta-loss and predictions read but the energy does not."""
        return {}

    def rescale(self, outputs: Tensor, outside: Mapping[str, Tensor]) -> Tensor:
        """The outputs as the meta-loss reads them. The given tensors replace the parameters that
        are outside the energy."""
        return outputs

    def noise_variance(self) -> Tensor | None:
        """Variance of the observation noise; None if the likelihood has none."""
        return None

    def takes_labels(self, y: Tensor) -> bool:
        """Whether this likelihood reads targets y as class labels 0 … C−1."""
        return False


Temperature = float | Literal["learned", "fitted", "both"]


class Categorical(Likelihood):
    """Class labels 0 … C−1 with logits z (B, C): cross-entropy. Predictions and the meta-loss use
    softmax(t·z), the energy softmax(z): there a scale is redundant, but in predictions it sets how
    sure they are.

    Args:
        temperature: t, a number; ``"learned"`` with the prior; ``"fitted"`` on validation tasks
            (`Trainer` does so whenever it validates; `fit_temperature` by hand); or ``"both"``.

    >>> Categorical(temperature=2.0).probabilities(torch.tensor([[0.0, 1.0]])).max() > 0.88
    tensor(True)
    """

    log_temperature: Tensor
    log_fit: Tensor | None

    def __init__(self, temperature: Temperature = 1.0) -> None:
        super().__init__()
        if isinstance(temperature, int | float) and not isinstance(temperature, bool):
            fits = 0 < temperature < math.inf
        else:
            fits = isinstance(temperature, str) and temperature in ("learned", "fitted", "both")
        if not fits:
            raise ValueError(
                'temperature must be a positive number, "learned", "fitted" or "both", got '
                f"{temperature!r}"
            )
        self.chosen = temperature
        learned, fitted = (temperature in (kind, "both") for kind in ("learned", "fitted"))
        number = 1.0 if isinstance(temperature, str) else float(temperature)
        # in full precision here; the learner casts it to the model's dtype
        log_temperature = torch.tensor(math.log(number), dtype=torch.float64)
        if learned:
            self.log_temperature = nn.Parameter(log_temperature)
        else:
            self.register_buffer("log_temperature", log_temperature)
        self.register_buffer("log_fit", torch.zeros((), dtype=torch.float64) if fitted else None)

    @property
    def temperature(self) -> float:
        """t of predictions: the given or learned value times the fitted one."""
        fit = 0.0 if self.log_fit is None else float(self.log_fit)
        return math.exp(float(self.log_temperature.detach()) + fit)

    def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
        if outputs.dim() != 2:
            raise ValueError(
                f"classification needs logits of shape (examples, classes), got "
                f"{tuple(outputs.shape)} for targets of shape {tuple(y.shape)}"
            )
        return few.cross_entropy(outputs, y.long())

    def probabilities(self, outputs: Tensor) -> Tensor:
        fit = 0.0 if self.log_fit is None else self.log_fit
        return few.softmax(outputs * (self.log_temperature + fit).exp().to(outputs.dtype))

    def outside(self) -> dict[str, Tensor]:
        return {"log_temperature": self.log_temperature}

    def rescale(self, outputs: Tensor, outside: Mapping[str, Tensor]) -> Tensor:
        return outputs * outside["log_temperature"].exp().to(outputs.dtype)

    def takes_labels(self, y: Tensor) -> bool:
        return True

    def extra_repr(self) -> str:
        learned = isinstance(self.log_temperature, nn.Parameter)
        ways = [
            w for w, here in (("learned", learned), ("fitted", self.log_fit is not None)) if here
        ]
        return f"temperature={self.temperature:.3g}" + (f", {' and '.join(ways)}" if ways else "")


class Gaussian(Likelihood):
    """Real targets with Gaussian noise of standard deviation σ: ½((y − f)/σ)² + log σ + ½ log 2π,
    summed over the dimensions of a target.

    Args:
        noise: σ, or its initial value.
        learn: meta-learn log σ together with the prior.
    """

    log_noise: Tensor

    def __init__(self, noise: float = 1.0, learn: bool = False) -> None:
        super().__init__()
        check_number("noise", noise, above=0)  # a standard deviation
        check_flag("learn", learn)
        # in full precision here; the learner casts it to the model's dtype
        log_noise = torch.tensor(math.log(noise), dtype=torch.float64)
        if learn:
            self.log_noise = nn.Parameter(log_noise)
        else:
            self.register_buffer("log_noise", log_noise)

    def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
        if outputs.shape != y.shape:
            if outputs.shape != (*y.shape, 1):
                raise ValueError(
                    f"outputs of shape {tuple(outputs.shape[1:])} per example do not match targets "
                    f"of shape {tuple(y.shape[1:])} per example"
                )
            outputs = outputs.squeeze(-1)
        z = (outputs - y) * (-self.log_noise).exp()
        terms = z.square() / 2 + self.log_noise + math.log(2 * math.pi) / 2
        return terms.flatten(1).sum(1) if terms.dim() > 1 else terms

    def noise_variance(self) -> Tensor:
        return (2 * self.log_noise).exp()


class Custom(Likelihood):
    """Any callable ``(outputs, y) -> nll per example``; a module's parameters are meta-learned."""

    def __init__(self, function: NllFunction) -> None:
        super().__init__()
        self.function = function

    def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
        nll = self.function(outputs, y)
        if nll.shape != outputs.shape[:1]:
            raise ValueError(
                f"the likelihood must return one nll per example, shape ({outputs.shape[0]},), "
                f'and returned {tuple(nll.shape)}: use reduction="none" and sum over the rest'
            )
        return nll


class ByTarget(Likelihood):
    """The default: categorical for integer targets, Gaussian with σ = 1 for floating ones."""

    def __init__(self) -> None:
        super().__init__()
        self.categorical = Categorical()
        self.gaussian = Gaussian()

    def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
        chosen = self.gaussian if y.is_floating_point() else self.categorical
        return chosen(outputs, y)

    def probabilities(self, outputs: Tensor) -> Tensor:
        return self.categorical.probabilities(outputs)

    def takes_labels(self, y: Tensor) -> bool:
        return not y.is_floating_point()

    def noise_variance(self) -> Tensor:
        return self.gaussian.noise_variance()


def as_likelihood(likelihood: NllFunction | None) -> Likelihood:
    """A likelihood from None (by target), a `Likelihood`, a module or a plain callable."""
    if likelihood is None:
        return ByTarget()
    if isinstance(likelihood, Likelihood):
        return likelihood
    check_part("likelihood", likelihood)
    return Custom(likelihood)
