"""Images: drawn ones that can be told apart, and arrays from files with their checks."""

import numpy as np
import pytest

from fsdp_jax.data.images import CLASSES, NOISE, ArrayImages, ImageSplit, DrawnImages, load_images
from fsdp_jax.errors import ConfigError

IMAGES = np.arange(4 * 2 * 2 * 3, dtype=np.uint8).reshape(4, 2, 2, 3)
LABELS = np.array([0, 2, 1, 0])


def drawn(count=64, *, seed=1, first=0):
    return DrawnImages(count, seed=seed, first=first)


def test_an_image_is_bytes_with_a_label():
    row = drawn()[11]
    assert (row["images"].shape, row["images"].dtype) == ((32, 32, 3), np.uint8)
    assert (row["labels"].shape, row["labels"].dtype) == ((), np.int32)
    assert row["labels"] == 3
    assert len(drawn()) == 64


def test_the_number_and_the_seed_fix_the_image():
    np.testing.assert_array_equal(drawn()[5]["images"], drawn()[5]["images"])
    np.testing.assert_array_equal(drawn(first=40)[5]["images"], drawn(first=0)[45]["images"])
    every = {
        image[index]["images"].tobytes()
        for image in (drawn(), drawn(seed=2))
        for index in range(64)
    }
    assert len(every) == 128


def shape_of(image):
    """Where the shape is, whatever the colours: told by the colour of the first corner. bool [H,
    W].
    """
    far = np.abs(image.astype(int) - image[0, 0]).max(axis=-1)
    return far > 2 * 255 * NOISE + 2


@pytest.mark.parametrize("number", range(40))
def test_shapes_are_what_their_labels_say(number):
    row = drawn()[number]
    shape = shape_of(row["images"])
    rows, columns = shape.any(axis=1), shape.any(axis=0)
    name = CLASSES[row["labels"]]
    if name == "horizontal stripes":
        assert rows.sum() not in (0, 32)
        assert (shape == shape[:, :1]).all()
    elif name == "vertical stripes":
        assert columns.sum() not in (0, 32)
        assert (shape == shape[:1]).all()
    elif name == "checkerboard":
        assert 0.3 < shape.mean() < 0.7
        assert rows.all()
        assert columns.all()
    else:
        box = shape[np.ix_(rows, columns)]
        assert abs(box.shape[0] - box.shape[1]) <= 3
        low, high = {
            "disc": (0.7, 0.88), "square": (1, 1), "triangle": (0.35, 0.65), "ring": (0.3, 0.7), "cross": (0.3, 0.75),
        }[name]  # fmt: skip
        assert low <= box.mean() <= high
        middle = box[box.shape[0] // 2, box.shape[1] // 2]
        assert middle == (name != "ring")


def test_classes_are_as_frequent_as_each_other():
    labels = [int(drawn()[index]["labels"]) for index in range(64)]
    assert np.bincount(labels).tolist() == [8] * 8


def test_colours_are_told_apart_and_noise_is_there():
    for index in range(16):
        image = drawn()[index]["images"]
        assert np.ptp(image.astype(int).sum(axis=-1)) > 100
        assert len(np.unique(image.reshape(-1, 3), axis=0)) > 100


def test_a_file_of_arrays_is_read(tmp_path):
    np.savez(tmp_path / "a.npz", images=IMAGES, labels=LABELS.astype(np.uint8))
    found = load_images(tmp_path / "a.npz")
    assert (len(found), found.classes) == (4, 3)
    np.testing.assert_array_equal(found[2]["images"], IMAGES[2])
    assert (found[1]["labels"], found[1]["labels"].dtype, found[1]["labels"].shape) == (
        2,
        np.int32,
        (),
    )
    assert found.digest == ArrayImages(IMAGES, LABELS, where="").digest
    assert found.digest != ArrayImages(IMAGES, LABELS[::-1], where="").digest


def test_some_rows_can_be_chosen():
    chosen = ImageSplit(ArrayImages(IMAGES, LABELS, where=""), np.array([3, 1]))
    assert len(chosen) == 2
    np.testing.assert_array_equal(chosen[0]["images"], IMAGES[3])
    assert chosen.settings == {"images": 4, "chosen": 2}


@pytest.mark.parametrize(
    ("images", "labels", "says"),
    [
        (IMAGES.astype(np.float32), LABELS, r"another form(?s:.*)npz, images\n(?s:.*)float32 \[4, 2, 2, 3\]"),
        (IMAGES[..., :1], LABELS, r"uint8 \[4, 2, 2, 1\]"),
        (IMAGES[0], LABELS, r"uint8 \[2, 2, 3\]"),
        (IMAGES[:0], LABELS[:0], r"uint8 \[0, 2, 2, 3\]"),
        (IMAGES, LABELS[:3], r"labels have another form(?s:.*)integers \[4\](?s:.*)int64 \[3\]"),
        (IMAGES, LABELS.astype(float), r"float64 \[4\]"),
        (IMAGES, np.array([0, 1, -1, 0]), r"out of range(?s:.*)-1, of image 2"),
    ],
)  # fmt: skip
def test_arrays_of_another_form_are_explained(tmp_path, images, labels, says):
    np.savez(tmp_path / "a.npz", images=images, labels=labels)
    with pytest.raises(ConfigError, match=says):
        load_images(tmp_path / "a.npz")


def test_files_that_are_none_are_explained(tmp_path):
    file = tmp_path / "a.npz"
    with pytest.raises(ConfigError, match=r"cannot be read(?s:.*)a\.npz(?s:.*)numpy\.savez"):
        load_images(file)
    np.savez(file, images=IMAGES, classes=LABELS)
    with pytest.raises(
        ConfigError, match=r"missing(?s:.*)expected: +labels\n +got: +images, classes"
    ):
        load_images(file)
    np.savez(file, images=IMAGES, labels=LABELS)
    content = bytearray(file.read_bytes())
    content[200] ^= 0xFF
    for damaged in (content, content[:300], b"", b"text"):
        file.write_bytes(damaged)
        with pytest.raises(ConfigError, match="cannot be read"):
            load_images(file)
    np.savez(file, images=np.array([{}]), labels=LABELS)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_images(file)
    with pytest.raises(ConfigError, match="number of images"):
        drawn(0)
