"""What does a network read of a picture, and which vectors does it return? A named backbone's, or
that of a module of a user's own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from ibaml.backbones import Pretrained
from ibaml.extras import need
from ibaml.tasks.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

Transform = Callable[["Image.Image"], Tensor]

_PREPARATION = 1  # part of the cache's address: raise it when prepared pictures change
_SIDE = 224  # for a module without a transform
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's, as most weights expect


@dataclass
class Known:
    """A named backbone, whose weights are loaded when they are first needed."""

    spec: Pretrained
    device: str | torch.device

    def __post_init__(self) -> None:
        self._loading = Lock()
        self._loaded: nn.Module | None = None

    @property
    def features(self) -> int:
        return self.spec.features

    @property
    def digest(self) -> str:
        """Of the weights and of how pictures are prepared."""
        return hashlib.sha256(f"{_PREPARATION} {self.spec}".encode()).hexdigest()

    @property
    def least(self) -> int:
        """The side that a picture needs: twice of what is read, so that resizing stays exact."""
        return 2 * round(self.spec.side / self.spec.crop)

    @property
    def on_cpu(self) -> bool:
        return torch.device(self.device).type == "cpu"

    def prepared(self, picture: Image.Image) -> Tensor:
        """The picture's middle, uint8 (3, side, side)."""
        return _middle(picture, self.spec.side, self.spec.crop)

    @torch.no_grad()
    def vectors(self, x: Tensor) -> np.ndarray:
        x = x.to(self.device).to(memory_format=torch.channels_last).float()
        return _checked(self._network()((x - self.spec.mean) / self.spec.deviation), self.spec.name)

    def _network(self) -> nn.Module:
        with self._loading:
            if self._loaded is None:
                net = self.spec.load().to(self.device)
                for weight in net.parameters():  # much faster on a CPU
                    if weight.dim() == 4:
                        weight.data = weight.data.contiguous(memory_format=torch.channels_last)
                self._loaded = net
            return self._loaded


@dataclass
class Own:
    """A user's module, where it is and as it is, with the transform of its pictures, if any."""

    module: nn.Module
    transform: Transform | None

    on_cpu = False  # not known to run in several threads

    @property
    def name(self) -> str:
        return type(self.module).__name__

    @cached_property
    def features(self) -> int:
        need("PIL")
        from PIL import Image

        blank = self.prepared(Image.new("RGB", (256, 256)))
        return int(self.vectors(blank[None]).shape[1])

    @property
    def digest(self) -> str:
        """Of the weights."""
        digest = hashlib.sha256()
        for name, value in self.module.state_dict().items():
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()

    @property
    def least(self) -> None:
        """What a transform needs is not known: pictures are decoded at full size."""

    def prepared(self, picture: Image.Image) -> Tensor:
        if self.transform is None:
            x = _middle(picture, _SIDE, 1.0).float() / 255
            return (x - torch.tensor(_MEAN).view(3, 1, 1)) / torch.tensor(_STD).view(3, 1, 1)
        x = self.transform(picture)
        if not isinstance(x, Tensor) or x.dim() != 3:
            raise TypeError(f"transform must return a tensor (C, H, W), got {_what(x)}")
        return x

    @torch.no_grad()
    def vectors(self, x: Tensor) -> np.ndarray:
        if (like := next(self.module.parameters(), None)) is not None:
            x = x.to(like.device, like.dtype)
        with _evaluating(self.module):
            return _checked(self.module(x), self.name)


def _checked(y: object, name: str) -> np.ndarray:
    """The outputs (n, d) or (n, C, H, W) of a network as vectors."""
    if not isinstance(y, Tensor) or y.dim() not in (2, 4):
        raise TypeError(f"{name} must return vectors (n, d) or maps (n, C, H, W), got {_what(y)}")
    vectors: np.ndarray = (y.mean((2, 3)) if y.dim() == 4 else y).float().cpu().numpy()
    if not np.isfinite(vectors).all():
        raise DataError(f"{name} returned a NaN or an infinity")
    return vectors


def _what(value: object) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


@contextmanager
def _evaluating(net: nn.Module) -> Iterator[None]:
    """A module in evaluation mode; the mode of each of its parts is restored."""
    modes = {module: module.training for module in net.modules()}
    net.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _middle(picture: Image.Image, side: int, crop: float) -> Tensor:
    """The middle square of a picture, ``crop`` of its shorter side, as uint8 (3, side, side)."""
    from PIL import Image

    width, height = picture.size
    seen = max(1, round(crop * min(width, height)))
    left, top = (width - seen) // 2, (height - seen) // 2
    middle = picture.crop((left, top, left + seen, top + seen))
    small = middle.resize((side, side), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(small).transpose(2, 0, 1))
