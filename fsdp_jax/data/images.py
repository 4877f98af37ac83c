"""Images with labels: drawn ones, which need no file, and arrays in an `.npz`.

Shapes: N images, H height, W width, C = 3 colours.
"""

import hashlib
from pathlib import Path

import numpy as np

from fsdp_jax.data.examples import Examples, Row, Settings, random_bytes, uniforms
from fsdp_jax.data.windows import check_positive
from fsdp_jax.errors import ConfigError, message

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
"""What is drawn; the label is the place here."""

SIDE = 32
NOISE = 0.1  # of the range of a colour, at most, either way
DARK = 0.4  # of the range of a colour: dark ones lie below, bright ones as near to the other end


class DrawnImages:
    """Random access to `count` square drawings: colours, place, size and noise are chance, the
    class is not.

    Image i shows class i mod 8; all else depends on `seed` and `first + i` alone, so that ranges
    that do not overlap give different images. Nothing is stored. `side`: of an image, in pixels.
    """

    def __init__(self, count: int, *, seed: int, first: int = 0, side: int = SIDE):
        check_positive("the number of images", count)
        check_positive("the side of an image", side)
        self._count, self._seed, self._first, self._side = count, seed, first, side
        self.settings: Settings = {
            "images": count,
            "first_image": first,
            "image_seed": seed,
            "image_side": side,
        }

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Row:
        """`images`, uint8 [side, side, 3]; `labels`, int32 []."""
        number = self._first + int(index)
        kind = number % len(CLASSES)
        chance = uniforms(self._seed, number, 10)
        dark, bright = DARK * chance[:3], 1 - DARK * chance[3:6]
        back, front = (dark, bright) if chance[6] < 0.5 else (bright, dark)
        image = np.where(_shape(kind, self._side, *chance[7:10])[..., None], front, back)
        noise = random_bytes(self._seed, number, image.size).reshape(image.shape)
        image += NOISE * (noise / 127.5 - 1)
        return {
            "images": (255 * image.clip(0, 1) + 0.5).astype(np.uint8),
            "labels": np.array(kind, np.int32),
        }


def _shape(kind: int, side: int, x: float, y: float, size: float) -> np.ndarray:
    """Where the shape is, bool [H, W]. The numbers are chance, 0 to 1; the shape lies within the
    image.
    """
    name = CLASSES[kind]
    places = np.arange(side) + 0.5
    if kind >= CLASSES.index("horizontal stripes"):
        half = side * (0.1 + 0.1 * size)  # of a period
        rows, columns = (np.floor(places / half + 2 * phase) % 2 == 0 for phase in (y, x))
        across = (
            np.broadcast_to(rows[:, None], (side, side)),
            np.broadcast_to(columns, (side, side)),
        )
        return (
            rows[:, None] == columns
            if name == "checkerboard"
            else across[name == "vertical stripes"]
        )
    radius = side * (0.2 + 0.2 * size)
    down, right = (places - (radius + (side - 2 * radius) * place) for place in (y, x))
    down, square = down[:, None], np.maximum(abs(down)[:, None], abs(right))
    if name == "square":
        return square < 0.85 * radius
    if name == "triangle":
        return (down < 0.8 * radius) & (2 * abs(right) < down + radius)
    if name == "cross":
        return (square < radius) & (np.minimum(abs(down), abs(right)) < 0.3 * radius)
    distance = np.hypot(down, right)
    return (distance < radius) & (distance > 0.6 * radius) if name == "ring" else distance < radius


class ArrayImages:
    """Random access to images in memory: uint8 [N, H, W, 3] with labels, int [N].

    Raises ConfigError where the arrays are not that.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray, *, where: str):
        _check_arrays(images, labels, where)
        self.images, self.labels = images, labels
        self.settings: Settings = {"images": len(images)}

    @property
    def classes(self) -> int:
        """The largest label, plus one."""
        return int(self.labels.max()) + 1

    @property
    def digest(self) -> str:
        """SHA-256, in hexadecimal, of the shape, the images and the labels as int64."""
        found = hashlib.sha256(repr(self.images.shape).encode())
        found.update(np.ascontiguousarray(self.images).data)
        found.update(self.labels.astype("<i8").tobytes())
        return found.hexdigest()

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Row:
        """`images`, uint8 [H, W, 3]; `labels`, int32 []."""
        return {"images": self.images[index], "labels": np.array(self.labels[index], np.int32)}


def load_images(path: str | Path) -> ArrayImages:
    """An `.npz` with `images`, uint8 [N, H, W, 3], and `labels`, integers [N]. Raises ConfigError
    where it is not.
    """
    file, fix = Path(path).expanduser(), "numpy.savez(path, images=..., labels=...)"
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
            missing = [name for name in ("images", "labels") if name not in arrays]
            if missing:
                got = ", ".join(arrays) or "nothing"
                what = "An array is missing."
                raise ConfigError(
                    message(what, where=str(file), expected=", ".join(missing), got=got, fix=fix)
                )
            return ArrayImages(arrays["images"], arrays["labels"], where=str(file))
    except ConfigError:
        raise
    except (
        Exception
    ) as error:  # a damaged archive fails in many ways: OSError, ValueError, BadZipFile, zlib.error
        what, expected = "The images cannot be read.", "an .npz with images and labels"
        raise ConfigError(
            message(what, where=str(file), expected=expected, got=error, fix=fix)
        ) from error


class ImageSplit:
    """Some rows of other examples: those of `indices`, int64 [rows], in that order."""

    def __init__(self, examples: Examples, indices: np.ndarray):
        self._examples, self._indices = examples, indices
        self.settings: Settings = {**examples.settings, "chosen": len(indices)}

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Row:
        return self._examples[int(self._indices[index])]


def _check_arrays(images: np.ndarray, labels: np.ndarray, where: str) -> None:
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or not images.size:
        got = f"{images.dtype} {list(images.shape)}"
        what = "The images have another form."
        raise ConfigError(
            message(what, where=f"{where}, images", expected="uint8 [N, H, W, 3]", got=got)
        )
    if labels.dtype.kind not in "iu" or labels.shape != (len(images),):
        expected, got = (
            f"integers [{len(images)}], one an image",
            f"{labels.dtype} {list(labels.shape)}",
        )
        raise ConfigError(
            message(
                "The labels have another form.",
                where=f"{where}, labels",
                expected=expected,
                got=got,
            )
        )
    wrong = np.flatnonzero((labels < 0) | (labels >= 1 << 31))
    if len(wrong):
        what, got = "A label is out of range.", f"{labels[wrong[0]]}, of image {wrong[0]}"
        raise ConfigError(message(what, where=f"{where}, labels", expected="0 or more", got=got))
