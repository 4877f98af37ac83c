"""Images with labels: generated drawings, which need no file, and arrays in an `.npz`.

Shapes: N images, H height, W width, C = 3 colours.
"""

import hashlib
from pathlib import Path

import numpy as np

from fsdp_jax.data.checks import check_positive
from fsdp_jax.data.examples import Examples, Row, Settings, random_bytes, random_uniforms
from fsdp_jax.errors import ConfigError, DamageError
from fsdp_jax.io.regular_files import open_regular

CLASSES = (
    "disc",
    "square",
    "triangle",
    "ring",
    "cross",
    "horizontal stripes",
    "vertical stripes",
    "checkerboard",
)
"""The shapes that are drawn, in the order of their labels."""

SIDE = 32
NOISE = 0.1  # the largest noise, as a share of a colour's range
DARK = 0.4  # dark colours are below this share of the range, bright ones above 1 - DARK


class DrawnImages:
    """Random access to `count` square drawings of random colours, position, size and noise.

    Image i shows class i mod 8; all else depends on `seed` and `first + i` alone, so that disjoint
    ranges give different images. Nothing is stored. `side` is in pixels.
    """

    def __init__(self, count: int, *, seed: int, first: int = 0, side: int = SIDE):
        check_positive("the number of images", count)
        check_positive("the side of an image", side)
        self._count = count
        self._seed = seed
        self._first = first
        self._side = side
        self.settings: Settings = {
            "images": count,
            "first_image": first,
            "image_seed": seed,
            "image_side": side,
        }

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Row:
        """Returns `images`, uint8 [side, side, 3], and `labels`, int32 []."""
        number = self._first + int(index)
        label = number % len(CLASSES)
        random = random_uniforms(self._seed, number, 10)
        dark = DARK * random[:3]
        bright = 1 - DARK * random[3:6]
        background, foreground = (dark, bright) if random[6] < 0.5 else (bright, dark)
        shape = _shape_mask(CLASSES[label], self._side, *random[7:10])
        image = np.where(shape[..., None], foreground, background)
        noise = random_bytes(self._seed, number, image.size).reshape(image.shape)
        image += NOISE * (noise / 127.5 - 1)
        return {
            "images": (255 * image.clip(0, 1) + 0.5).astype(np.uint8),
            "labels": np.array(label, np.int32),
        }


def _shape_mask(name: str, side: int, x: float, y: float, size: float) -> np.ndarray:
    """Returns bool [side, side], true inside the shape `name`, one of `CLASSES`.

    `x`, `y` and `size` are 0 to 1: the shape's place and size, or a pattern's phase and period. A
    shape is never cut off.
    """
    pixels = np.arange(side) + 0.5
    # Stripes and squares, with x and y as the phase.
    half_period = side * (0.1 + 0.1 * size)
    rows = (np.floor(pixels / half_period + 2 * y) % 2 == 0)[:, None]
    columns = np.floor(pixels / half_period + 2 * x) % 2 == 0
    if name == "horizontal stripes":
        return np.broadcast_to(rows, (side, side))
    if name == "vertical stripes":
        return np.broadcast_to(columns, (side, side))
    if name == "checkerboard":
        return rows == columns
    # Shapes around a centre, from which `down` and `right` are distances.
    radius = side * (0.2 + 0.2 * size)
    down = (pixels - (radius + (side - 2 * radius) * y))[:, None]
    right = pixels - (radius + (side - 2 * radius) * x)
    larger = np.maximum(abs(down), abs(right))
    distance = np.hypot(down, right)
    match name:
        case "square":
            return larger < 0.85 * radius
        case "triangle":
            return (down < 0.8 * radius) & (2 * abs(right) < down + radius)
        case "cross":
            return (larger < radius) & (np.minimum(abs(down), abs(right)) < 0.3 * radius)
        case "ring":
            return (distance < radius) & (distance > 0.6 * radius)
    assert name == "disc", name
    return distance < radius


class ArrayImages:
    """Random access to images in memory: uint8 [N, H, W, 3] with labels, integers [N].

    `where`: the file that holds them, for messages. Raises ConfigError for other arrays.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, *, where: str):
        _check_image_arrays(images, labels, where)
        self.images = images
        self.labels = labels
        self.settings: Settings = {"images": len(images)}

    @property
    def classes(self) -> int:
        """The largest label, plus one."""
        return int(self.labels.max()) + 1

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of the shape, the images and the labels as int64."""
        digest = hashlib.sha256(repr(self.images.shape).encode())
        digest.update(np.ascontiguousarray(self.images).data)
        digest.update(self.labels.astype("<i8").tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Row:
        """Returns `images`, uint8 [H, W, 3], and `labels`, int32 []."""
        return {"images": self.images[index], "labels": np.array(self.labels[index], np.int32)}


def load_images(path: str | Path) -> ArrayImages:
    """Reads `images`, uint8 [N, H, W, 3], and `labels`, integers [N], of an `.npz`.

    Raises ConfigError if there are none or they are others, DamageError if they cannot be read.
    """
    file = Path(path).expanduser()
    where = str(file)
    fix = "numpy.savez(path, images=..., labels=...)"
    try:
        with open_regular(file) as opened, np.load(opened, allow_pickle=False) as arrays:
            missing = [name for name in ("images", "labels") if name not in arrays]
            if not missing:
                return ArrayImages(arrays["images"], arrays["labels"], where=where)
            expected = ", ".join(missing)
            got = ", ".join(arrays) or "nothing"
            what = "an array is missing"
            raise ConfigError(what, where=where, expected=expected, got=got, fix=fix)
    except ConfigError:
        raise
    except Exception as error:  # damaged archives raise OSError, ValueError, BadZipFile, zlib.error
        what = "the images cannot be read"
        expected = "an .npz with images and labels"
        kind = ConfigError if isinstance(error, FileNotFoundError) else DamageError
        raise kind(what, where=where, expected=expected, got=error, fix=fix) from error


class ImageSplit:
    """One part of other examples: the rows `indices`, int64 [rows], in that order."""

    def __init__(self, examples: Examples, indices: np.ndarray):
        self._examples = examples
        self._indices = indices
        self.settings: Settings = {**examples.settings, "chosen": len(indices)}

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Row:
        """Returns row `indices[index]` of the other examples."""
        return self._examples[int(self._indices[index])]


def _check_image_arrays(images: np.ndarray, labels: np.ndarray, where: str) -> None:
    """Raises ConfigError unless images are uint8 [N, H, W, 3] and labels 0 to 2^31-1, [N]."""
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or not images.size:
        what = "the images have the wrong shape or dtype"
        where = f"{where}, images"
        got = f"{images.dtype} {list(images.shape)}"
        raise ConfigError(what, where=where, expected="uint8 [N, H, W, 3]", got=got)
    where = f"{where}, labels"
    if labels.dtype.kind not in "iu" or labels.shape != (len(images),):
        what = "the labels have the wrong shape or dtype"
        expected = f"integers [{len(images)}], one an image"
        got = f"{labels.dtype} {list(labels.shape)}"
        raise ConfigError(what, where=where, expected=expected, got=got)
    invalid = np.flatnonzero((labels < 0) | (labels >= 1 << 31))
    if len(invalid):
        what = "a label is out of range"
        got = f"{labels[invalid[0]]}, of image {invalid[0]}"
        raise ConfigError(what, where=where, expected="0 or more", got=got)
