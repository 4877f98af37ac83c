"""Images: the drawn shapes match their labels, and arrays from files are checked."""

import os

import numpy as np
from collected import collected
from refusals import fields, refused

from fsdp_jax.data.images import CLASSES, NOISE, ArrayImages, DrawnImages, ImageSplit, load_images
from fsdp_jax.errors import ConfigError, DamageError

IMAGES = np.arange(4 * 2 * 2 * 3, dtype=np.uint8).reshape(4, 2, 2, 3)
LABELS = np.array([0, 2, 1, 0])
DRAWN = DrawnImages(64, seed=1)


def test_an_image_is_bytes_with_a_label():
    row = DRAWN[11]
    assert (row["images"].shape, row["images"].dtype) == ((32, 32, 3), np.uint8)
    assert (row["labels"].shape, row["labels"].dtype) == ((), np.int32)
    assert len(DRAWN) == 64
    labels = [int(DRAWN[index]["labels"]) for index in range(64)]
    assert labels == [*range(8)] * 8
    for index in range(16):  # contrast and noise
        image = DRAWN[index]["images"]
        assert np.ptp(image.astype(int).sum(axis=-1)) > 100
        assert len(np.unique(image.reshape(-1, 3), axis=0)) > 100


def test_the_index_and_the_seed_determine_the_image():
    np.testing.assert_array_equal(DRAWN[5]["images"], DrawnImages(64, seed=1)[5]["images"])
    shifted = DrawnImages(64, seed=1, first=40)
    np.testing.assert_array_equal(shifted[5]["images"], DRAWN[45]["images"])
    different = {
        images[index]["images"].tobytes()
        for images in (DRAWN, DrawnImages(64, seed=2))
        for index in range(64)
    }
    assert len(different) == 128


SHARE_OF_BOX = {
    "disc": (0.7, 0.88),
    "square": (1, 1),
    "triangle": (0.35, 0.65),
    "ring": (0.3, 0.7),
    "cross": (0.3, 0.75),
}


def test_shapes_match_their_labels():
    with collected() as case:
        for index in range(40):
            with case(CLASSES[index % 8]):
                check_shape(DRAWN[index]["images"].astype(int), CLASSES[index % 8])


def check_shape(image, name):
    # bool [H, W], told by the colour of the first corner
    shape = np.abs(image - image[0, 0]).max(axis=-1) > 2 * 255 * NOISE + 2
    rows, columns = shape.any(axis=1), shape.any(axis=0)
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
        low, high = SHARE_OF_BOX[name]
        assert low <= box.mean() <= high
        middle = box[box.shape[0] // 2, box.shape[1] // 2]
        assert middle == (name != "ring")


def test_a_file_of_arrays_is_read(tmp_path):
    np.savez(tmp_path / "a.npz", images=IMAGES, labels=LABELS.astype(np.uint8))
    images = load_images(tmp_path / "a.npz")
    assert (len(images), images.classes) == (4, 3)
    np.testing.assert_array_equal(images[2]["images"], IMAGES[2])
    label = images[1]["labels"]
    assert (label, label.dtype, label.shape) == (2, np.int32, ())
    assert images.digest == ArrayImages(IMAGES, LABELS, where="").digest
    assert images.digest != ArrayImages(IMAGES, LABELS[::-1], where="").digest


def test_a_split_holds_the_rows_of_its_indices():
    split = ImageSplit(ArrayImages(IMAGES, LABELS, where=""), np.array([3, 1]))
    assert len(split) == 2
    np.testing.assert_array_equal(split[0]["images"], IMAGES[3])
    assert split.settings == {"images": 4, "chosen": 2}


def test_arrays_of_the_wrong_form_are_refused(tmp_path):
    cases = [
        (
            IMAGES.astype(np.float32),
            LABELS,
            {
                "what": "wrong shape or dtype",
                "where": "./a.npz, images",
                "got": "float32 [4, 2, 2, 3]",
            },
        ),
        (IMAGES[..., :1], LABELS, "uint8 [4, 2, 2, 1]"),
        (IMAGES[0], LABELS, "uint8 [2, 2, 3]"),
        (IMAGES[:0], LABELS[:0], "uint8 [0, 2, 2, 3]"),
        (
            IMAGES,
            LABELS[:3],
            {"what": "labels have the wrong shape", "expected": "integers [4]", "got": "int64 [3]"},
        ),
        (IMAGES, LABELS.astype(float), "float64 [4]"),
        (IMAGES, np.array([0, 1, -1, 0]), {"what": "out of range", "got": "-1, of image 2"}),
    ]
    with collected() as case:
        for images, labels, says in cases:
            with case(says):
                np.savez(tmp_path / "a.npz", images=images, labels=labels)
                with refused(error=ConfigError, **fields(says, tmp_path)):
                    load_images(tmp_path / "a.npz")


def test_images_that_are_cut_short_as_they_are_read_are_damage(tmp_path, monkeypatch):
    file = tmp_path / "a.npz"
    np.savez(file, images=IMAGES, labels=LABELS)
    load = np.load

    def load_and_cut(opened, **options):
        arrays = load(opened, **options)
        os.truncate(file, 200)
        return arrays

    images = load_images(file)
    monkeypatch.setattr(np, "load", load_and_cut)
    with refused("cannot be read", error=DamageError) as damage:
        load_images(file)
    assert damage.value.where == str(file)
    np.testing.assert_array_equal(images[3]["images"], IMAGES[3])


def test_missing_and_damaged_files_are_refused(tmp_path):
    file = tmp_path / "a.npz"
    with refused(
        "cannot be read", error=ConfigError, where=str(tmp_path / "a.npz"), fix="numpy.savez"
    ):
        load_images(file)
    np.savez(file, images=IMAGES, classes=LABELS)
    with refused("missing", error=ConfigError, expected="labels", got="images, classes"):
        load_images(file)
    np.savez(file, images=IMAGES, labels=LABELS)
    content = bytearray(file.read_bytes())
    content[200] ^= 0xFF
    for damaged in (content, content[:300], b"", b"text"):
        file.write_bytes(damaged)
        with refused("cannot be read", error=DamageError):
            load_images(file)
    np.savez(file, images=np.array([{}]), labels=LABELS)
    with refused("cannot be read", error=DamageError):
        load_images(file)
    with refused(error=ConfigError, where="the number of images"):
        DrawnImages(0, seed=1)
