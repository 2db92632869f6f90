"""What is known of classes before their first example? A map, how means spread, a temperature.

A prior is fitted to other people's classes (`ibaml.heads.from_base`), comes from a run or a file,
or is made of the support set alone, in closed form:

- *directions*, for many features (embeddings): vectors have square roots taken, if none is
  negative, are centered and brought to length 1; answers are softmax(t·cosines to class means);
- *gaussian*, for few features (tables): the two-covariance model (`ibaml.heads.plda`) with the
  covariance within classes pooled and shrunk.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ibaml.answers.compact import expanded
from ibaml.answers.promises import Promises
from ibaml.container import MISFITS, ArtifactError, read_artifact, write_artifact
from ibaml.heads.from_base import FromBase, Scalars
from ibaml.heads.plda import class_means

MANY = 32  # features from which on a vector's length says little about its class
TEMPERATURE = 20.0  # of cosines without a prior; validation classes of Caltech-101 chose it
_FOLDER = Path(__file__).parent / "priors"


@dataclass(frozen=True)
class Prior:
    """z = (root(x) − center)·map, of length 1 if ``unit``; class means have variances ``between``.

    Attributes:
        name: as it is shown.
        center: (F,).
        map: (F, K); None is the identity.
        between: variances of class means along z, (K,).
        temperature: t of the answers softmax(t·scores).
        unit: whether z has length 1, so that scores are cosines; else they are log densities.
        root: whether square roots are taken first.
        promises: measured on classes that the map had not seen; None if nothing was.
        without: the same for such vectors and no prior.
        facts: of where it comes from, for people.
        freedom: how many vectors the covariance within classes was estimated from, if few.
    """

    name: str
    center: Tensor
    map: Tensor | None
    between: Tensor
    temperature: float = 1.0
    unit: bool = True
    root: bool = False
    promises: Promises | None = None
    without: Promises | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    freedom: float = math.inf
    compact: Mapping[str, Tensor] | None = field(default=None, repr=False)

    @property
    def features(self) -> int:
        return len(self.center)

    def mapped(self, x: Tensor) -> Tensor:
        """Vectors (n, F) as the head reads them, (n, K)."""
        z = (rooted(x) if self.root else x) - self.center
        z = z if self.map is None else z @ self.map
        return normalize(z, dim=-1) if self.unit else z

    @property
    def digest(self) -> str | None:
        """Of the network whose vectors it is for; None if it does not say."""
        embed = self.facts.get("embed")
        return embed.get("digest") if isinstance(embed, Mapping) else None

    @cached_property
    def done(self) -> Prior:
        """The same prior for vectors that are mapped already."""
        return Prior(
            self.name, torch.zeros_like(self.between), None, self.between, self.temperature,
            self.unit, False, self.promises, self.without, self.facts, self.freedom,
        )  # fmt: skip

    @classmethod
    def of_base(cls, found: FromBase, name: str, root: bool = False, **more: Any) -> Prior:
        """The prior that `ibaml.heads.from_base.fit` found."""
        return cls(
            name, found.center.float(), found.map.float(), found.between.float(),
            found.temperature, True, root, **more,
        )  # fmt: skip

    @classmethod
    def of_support(cls, x: Tensor, y: Tensor, classes: int) -> Prior:
        """What the support set says alone: vectors (n, F), labels 0 … classes − 1."""
        return _directions(x, y, classes) if x.shape[1] >= MANY else _gaussian(x, y, classes)

    # --- files ---

    @classmethod
    def open(cls, which: str | Path) -> Prior:
        """A packaged prior by its name, a file that `save` or a learner wrote, or a run folder.

        >>> Prior.open("runs/photos").temperature                                 # doctest: +SKIP
        """
        if str(which) in packaged():
            return cls._read(_FOLDER / f"{which}.safetensors")
        path = Path(which)
        if path.is_dir():
            return _of_learner(path)
        if not path.is_file():
            known = ", ".join(packaged()) or "none"
            raise ArtifactError(
                f"prior {str(which)!r} is no run folder, no file and no prior of the package "
                f"(there: {known}); without a prior say none"
            )
        try:
            return cls._read(path)
        except ArtifactError as error:
            if "holds a learner" not in str(error):
                raise
            return _of_learner(path)

    @classmethod
    def _read(cls, path: Path) -> Prior:
        facts, tensors = read_artifact(path, "prior")
        try:
            return cls.read(facts, tensors)
        except MISFITS as error:
            raise ArtifactError(f"the parts of {path} do not match: {error}") from error

    def save(self, path: str | Path) -> Path:
        """Write it to a file."""
        return write_artifact(Path(path), "prior", *self.described())

    def described(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Its facts and its tensors, for a file."""
        facts = {
            "name": self.name, "temperature": self.temperature, "unit": self.unit,
            "root": self.root, "facts": dict(self.facts),
        }  # fmt: skip
        tensors = dict(self.compact or {})
        if not tensors:
            tensors = {"center": self.center, "between": self.between}
            if self.map is not None:
                tensors["map"] = self.map
        if self.promises is not None:
            tensors |= self.promises.tensors()
        if self.without is not None:
            tensors |= self.without.tensors("without")
        return facts, tensors

    @classmethod
    def read(cls, facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Prior:
        """The prior of these facts and tensors."""
        own = {n: t for n, t in tensors.items() if "/" not in n}
        map: Tensor | None
        if "within" in own:
            center, map, between = expanded(own, Scalars(**facts["facts"]["scalars"]))
        else:
            center, between = own["center"].float(), own["between"].float()
            map = own["map"].float() if "map" in own else None
        shape = (len(center), len(between))
        if (map is None and shape[0] != shape[1]) or (map is not None and map.shape != shape):
            raise ValueError("map, center and between differ in size")
        for name, tensor in (("center", center), ("between", between), ("map", map)):
            if tensor is not None and not bool(tensor.isfinite().all()):
                raise ValueError(f"{name} is not finite")
        temperature = float(facts["temperature"])
        if not 0 < temperature < math.inf:
            raise ValueError(f"the temperature is {temperature}")
        return cls(
            str(facts["name"]), center, map, between, temperature, bool(facts["unit"]),
            bool(facts["root"]), Promises.read(tensors), Promises.read(tensors, "without"),
            dict(facts["facts"]),
            compact=own if "within" in own else None,
        )  # fmt: skip


def rooted(x: Tensor) -> Tensor:
    """Square roots, with the sign kept."""
    return x.sign() * x.abs().sqrt()


def packaged_for(embed: Mapping[str, Any] | None) -> Prior | None:
    """The packaged prior for vectors of this network (`ibaml.Embed.described`); None for others."""
    for name in packaged() if embed else ():
        facts, tensors = read_artifact(_FOLDER / f"{name}.safetensors", "prior")
        if embed and facts["facts"]["embed"]["digest"] == embed.get("digest"):
            return Prior.read(facts, tensors)
    return None


def packaged() -> list[str]:
    """The names of the priors that come with the package."""
    return sorted(path.stem for path in _FOLDER.glob("*.safetensors"))


def _of_learner(path: Path) -> Prior:
    """The prior in a trained run, or in a learner's file."""
    from ibaml.energy import Categorical
    from ibaml.nn import Discriminant
    from ibaml.training.start import load

    learner = load(path)
    network = learner.model
    if not isinstance(network, Discriminant) or not isinstance(learner.likelihood, Categorical):
        raise ArtifactError(
            f"{path} holds no map of vectors: a prior is a run of `ibaml train --data x.npz` with "
            "model discriminant, the default for vectors"
        )
    center, map, embed = network.center, network.map, None
    if (inputs := learner.inputs) is not None:  # which standardizes what the network reads
        deviation = torch.tensor(inputs.deviation)
        center = torch.tensor(inputs.mean) + deviation * center
        map, embed = map / deviation[:, None], inputs.described().get("embed")
    return Prior(
        path.stem, center.float(), map.float(), network.between.float(),
        float(learner.likelihood.temperature), facts={"embed": embed},
    )  # fmt: skip


def _directions(x: Tensor, y: Tensor, classes: int) -> Prior:
    """Centered on what the class means have in common, as far as chance does not explain it."""
    root = bool((x >= 0).all())
    means = class_means((rooted(x) if root else x)[None], y[None], classes)[1][0]
    center = means.mean(0)
    size = center.square().sum()
    if classes > 1 and size > 0:
        chance = (means - center).square().sum() / (classes * (classes - 1))
        center = (1 - chance / size).clamp_min(0) * center  # James and Stein
    else:
        center = torch.zeros_like(center)
    flat = torch.full_like(center, 1e6)  # class means as they are
    return Prior("none", center, None, flat, TEMPERATURE, True, root)


def _gaussian(x: Tensor, y: Tensor, classes: int) -> Prior:
    """The pooled covariance, shrunk to a multiple of each feature's variance."""
    x = x.double()
    features = x.shape[1]
    counts, means = (part[0] for part in class_means(x[None], y[None], classes))
    center = means.mean(0)
    spread = x.std(0, correction=0)
    spread = torch.where(spread > 1e-9 * x.abs().amax(0).clamp_min(1e-300), spread, 1.0)
    apart = (x - means[y]) / spread
    held, free = features + 2, max(len(x) - classes, 0)
    scatter = apart.mT @ apart
    size = (scatter.trace() / features + 0.5) / (free + 1)  # half of the total, if nothing is known
    within = scatter + held * size * torch.eye(features, dtype=x.dtype)
    values, vectors = torch.linalg.eigh(within / (free + held))
    map = vectors / values.sqrt() / spread[:, None]
    off = (means - center) @ map
    wide = torch.tensor(10.0, dtype=x.dtype)
    if classes > 1:
        estimate = off.square().sum() / (classes - 1) / features - (1 / counts).mean()
        wide = estimate.clamp_min(0.5)
    return Prior(
        "none", center.float(), map.float(), wide.float().expand(features).clone(), 1.0, False,
        freedom=free + held,
    )  # fmt: skip
