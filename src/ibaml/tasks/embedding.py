"""How do pictures become vectors that a linear head can read? By a network that others trained.

A named backbone's vectors are kept in the cache, by the content of the picture.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from ibaml.backbones import DEFAULT, pretrained
from ibaml.files import at_home
from ibaml.tasks.errors import DataError
from ibaml.tasks.images import ImageError, open_picture, picture_of, plain, read_file
from ibaml.tasks.networks import Known, Own, Transform
from ibaml.tasks.vectors import Vectors, key_of

Progress = Callable[[int, int], None]  # arguments: pictures done so far, pictures in all
Content: TypeAlias = bytes | np.ndarray

_IN_CACHE = 2  # pictures that a CPU's cache holds: more at once take longer each
_Opened: TypeAlias = tuple[bytes | None, Tensor | np.ndarray]
_Batch: TypeAlias = tuple[list[int], np.ndarray, dict[int, str]]
_PARAMETERS = ("backbone", "transform", "batch_size", "device", "cache", "progress")


class Embed:
    """Pictures to vectors, by a network with weights that is not trained further.

    It is a scikit-learn transformer too (there is nothing to fit).

    Args:
        backbone: a name, ``efficientnet_lite2`` or ``efficientnet_lite0`` (half the time), or any
            module that maps pictures to vectors; its outputs (n, C, H, W) are averaged over H, W.
        transform: for a module: what makes a tensor (C, H, W) of a Pillow picture. Left out, the
            picture's middle is resized to 224 pixels and normalized as ImageNet's.
        batch_size: pictures at once through a module, or on a GPU. On a CPU, as many threads as
            torch uses embed a named backbone's pictures.
        device: of a named backbone; a module stays where it is.
        cache: whether vectors of a named backbone are kept on disk.
        progress: called with the pictures done and their number.

    >>> ibaml.Embed()(["apple.jpg", "pear.png"]).shape                            # doctest: +SKIP
    (2, 1280)
    """

    def __init__(
        self,
        backbone: str | nn.Module = DEFAULT,
        transform: Transform | None = None,
        *,
        batch_size: int = 32,
        device: str | torch.device = "cpu",
        cache: bool = True,
        progress: Progress | None = None,
    ) -> None:
        self.backbone = backbone
        self.transform_picture = transform
        self.batch_size = batch_size
        self.device = device
        self.cache = cache
        self.progress = progress
        self._check()

    def __call__(self, images: Any, *, progress: Progress | None = None) -> np.ndarray:
        """The vectors (n, features), float32, of pictures: paths, Pillow pictures, or uint8 arrays
        (H, W), (H, W, C) or (C, H, W); several, or one alone. ``progress`` takes the place of the
        one that was given before."""
        vectors, failures = self.try_each(images, progress=progress)
        if failures:
            shown = "\n  ".join(list(failures.values())[:10])
            more = f"\n  … and {len(failures) - 10} more" if len(failures) > 10 else ""
            raise ImageError(
                f"{len(failures)} of {len(vectors)} images cannot be read: repair or remove them:"
                f"\n  {shown}{more}"
            )
        return vectors

    def try_each(
        self, images: Any, *, progress: Progress | None = None
    ) -> tuple[np.ndarray, dict[int, str]]:
        """The vectors, and why pictures could not be read, by their number; those rows are NaN."""
        items = _several(images)
        return self.of_contents((_content(one) for one in items), len(items), progress)

    def of_contents(
        self,
        contents: Iterable[Callable[[], tuple[str, Content]]],
        total: int,
        progress: Progress | None = None,
    ) -> tuple[np.ndarray, dict[int, str]]:
        """As `try_each`, of functions that each return a picture's name and content."""
        vectors = np.full((total, self.features), np.nan, np.float32)
        failures: dict[int, str] = {}
        done, progress = 0, progress or self.progress
        for rows, found, failed in self._batches(contents):
            vectors[rows] = found
            failures |= failed
            done += len(rows)
            if progress is not None:
                progress(done, total)
        return vectors, failures

    @property
    def name(self) -> str:
        """Of the backbone; of a module its class."""
        return self.backbone if isinstance(self.backbone, str) else type(self.backbone).__name__

    @property
    def features(self) -> int:
        """Numbers in a vector."""
        return self._network.features

    @property
    def least(self) -> int | None:
        """The side in pixels that a picture needs: a larger JPEG may be decoded smaller. None for a
        module of a user's own, of which it is not known."""
        return self._network.least

    # --- what is kept with a run or a file ------------------------------------------------------

    def described(self) -> dict[str, Any]:
        """What `read` needs, for a JSON file."""
        own = {} if isinstance(self.backbone, str) else {
            "module": self.name, "transform": self.transform_picture is not None,
        }  # fmt: skip
        return {
            "backbone": self.backbone if isinstance(self.backbone, str) else None,
            "digest": self.digest,
            "features": self.features,
            **own,
        }

    @property
    def digest(self) -> str:
        """Of the weights, and of how pictures are prepared for a named backbone."""
        return self._network.digest

    @classmethod
    def read(
        cls,
        content: Any,
        backbone: nn.Module | None = None,
        transform: Transform | None = None,
        **options: Any,
    ) -> Embed:
        """What `described` returned. A module of a user's own, and its transform, are passed in
        again; another one than was described is refused."""
        try:
            name, digest, features = content["backbone"], content["digest"], content["features"]
            module, transformed = str(content.get("module")), bool(content.get("transform"))
            if not (isinstance(name, str | None) and isinstance(digest, str)):
                raise ValueError("its name or digest is no text")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"the description of an embedding is damaged ({error})") from error
        if name is None and backbone is None:
            raise DataError(
                f"pictures were embedded by a module of your own ({module}): pass it in, "
                f"ibaml.Embed(module{', transform' if transformed else ''})"
            )
        made = cls(name if backbone is None else backbone, transform, **options)  # type: ignore[arg-type]
        if made.digest != digest or made.features != features:
            raise DataError(
                f"{made.name} is not the backbone that was used ({name or module}): its weights or "
                "the preparation of its pictures differ; embed the pictures again"
            )
        return made

    # --- a transformer of scikit-learn ----------------------------------------------------------

    def fit(self, X: Any = None, y: Any = None) -> Embed:
        """Nothing is fitted."""
        return self

    def transform(self, X: Any) -> np.ndarray:
        return self(X)

    def fit_transform(self, X: Any, y: Any = None) -> np.ndarray:
        return self(X)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        named = {"transform": "transform_picture"}
        return {name: getattr(self, named.get(name, name)) for name in _PARAMETERS}

    def set_params(self, **params: Any) -> Embed:
        unknown = [name for name in params if name not in _PARAMETERS]
        if unknown:
            raise ValueError(f"Embed has no parameter {unknown[0]!r}: {', '.join(_PARAMETERS)}")
        chosen = {**self.get_params(), **params}
        self.__dict__.clear()
        self.__init__(**chosen)  # type: ignore[misc]
        return self

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def __sklearn_tags__(self) -> Any:
        from sklearn.utils import InputTags, Tags, TargetTags, TransformerTags

        return Tags(
            estimator_type=None,
            target_tags=TargetTags(required=False),
            transformer_tags=TransformerTags(),
            input_tags=InputTags(two_d_array=False, string=True),
            requires_fit=False,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Without what is made again: a named network is loaded when it is needed."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_made", "_store")}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Embed) and self.described() == other.described()

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        own = isinstance(self.backbone, nn.Module)
        return f"Embed({self.name}(…))" if own else f"Embed({self.name!r})"

    # --- inside ---------------------------------------------------------------------------------

    def _check(self) -> None:
        if isinstance(self.backbone, str):
            pretrained(self.backbone)
            if self.transform_picture is not None:
                raise ValueError(
                    f"transform is for a module of your own: {self.backbone} has its preparation"
                )
        elif not isinstance(self.backbone, nn.Module):
            raise TypeError(
                f"backbone is a name or a torch module, got {type(self.backbone).__name__}"
            )
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise ValueError(f"batch_size must be 1 or more, got {self.batch_size!r}")

    @property
    def _network(self) -> Known | Own:
        if "_made" not in self.__dict__:
            own = self.backbone
            self._made: Known | Own = (
                Known(pretrained(own), self.device) if isinstance(own, str)
                else Own(own, self.transform_picture)
            )  # fmt: skip
        return self._made

    def _batches(self, contents: Iterable[Callable[[], tuple[str, Content]]]) -> Iterator[_Batch]:
        """Rows, their vectors, and failures. On a CPU, threads embed a few pictures each; else
        pictures are decoded while the network runs on those before them."""
        numbered, threads = enumerate(contents), torch.get_num_threads()
        apart = self._network.on_cpu
        size = _IN_CACHE if apart else self.batch_size
        waiting: deque[Callable[[], _Batch]] = deque()
        try:
            with ThreadPoolExecutor(
                threads, initializer=partial(torch.set_num_threads, 1) if apart else None
            ) as pool:
                while batch := list(islice(numbered, size)):
                    if apart:
                        opening = [(row, partial(self._opened, one)) for row, one in batch]
                        waiting.append(pool.submit(self._embedded, opening).result)
                    else:
                        opened = [(row, pool.submit(self._opened, one)) for row, one in batch]
                        each = [(row, future.result) for row, future in opened]
                        waiting.append(partial(self._embedded, each))
                    if len(waiting) > (4 * threads if apart else 1):
                        yield waiting.popleft()()
                while waiting:
                    yield waiting.popleft()()
        finally:
            if apart:  # what a thread sets is also the default of later threads
                torch.set_num_threads(threads)

    def _opened(self, content: Callable[[], tuple[str, Content]]) -> _Opened:
        """A picture's key, and its vector if that is known, or what the network reads."""
        name, found = content()
        key = None
        if (store := self._vectors) is not None:
            key = key_of(found)
            if (known := store.get([key]).get(key)) is not None:
                return key, known
        net = self._network
        if isinstance(found, bytes):
            return key, net.prepared(open_picture(found, name, least=self.least))
        return key, net.prepared(picture_of(found))

    def _embedded(self, batch: Sequence[tuple[int, Callable[[], _Opened]]]) -> _Batch:
        vectors = np.full((len(batch), self.features), np.nan, np.float32)
        failures: dict[int, str] = {}
        new: list[tuple[int, bytes | None, Tensor]] = []
        for at, (row, opened) in enumerate(batch):
            try:
                key, found = opened()
            except DataError as error:
                failures[row] = str(error)
                continue
            if isinstance(found, Tensor):
                new.append((at, key, found))
            else:
                vectors[at] = found
        if new:
            shapes = {tuple(x.shape) for _, _, x in new}
            if len(shapes) > 1:
                raise DataError(f"transform returned tensors of different shapes: {shapes}")
            made = self._network.vectors(torch.stack([x for _, _, x in new]))
            vectors[[at for at, _, _ in new]] = made
            keep = {key: v for (_, key, _), v in zip(new, made, strict=True) if key is not None}
            if keep and self._vectors is not None:
                self._vectors.put(keep)
        return [row for row, _ in batch], vectors, failures

    @property
    def _vectors(self) -> Vectors | None:
        if not self.cache or not isinstance(self._network, Known):
            return None
        if "_store" not in self.__dict__:
            self._store = Vectors(self.name, self.digest, self.features)
        return self._store


def _content(one: Any) -> Callable[[], tuple[str, Content]]:
    """A function that reads one picture a person gave."""
    if isinstance(one, str | Path):
        return lambda: (str(one), read_file(at_home(one)))
    if isinstance(one, Tensor):
        one = one.numpy()
    if isinstance(one, np.ndarray):
        return lambda: ("an array", one)
    if hasattr(one, "convert") and hasattr(one, "size"):
        return lambda: ("a picture", np.asarray(plain(one)))
    raise DataError(f"an image is a path, a Pillow picture or a uint8 array, got {one!r}")


def _several(images: Any) -> Sequence[Any]:
    """A sequence of images, from several or one."""
    if isinstance(images, str | Path) or hasattr(images, "convert"):
        return [images]
    if isinstance(images, Tensor | np.ndarray) and images.ndim in (2, 3) and _numbers(images):
        return [images]
    items = list(images.ravel() if isinstance(images, np.ndarray) and images.dtype.kind in "OUS"
                 else images)  # fmt: skip
    if not items:
        raise DataError("there is no image to embed")
    return items


def _numbers(array: Tensor | np.ndarray) -> bool:
    return isinstance(array, Tensor) or array.dtype.kind not in "OUS"
