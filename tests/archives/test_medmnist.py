"""The .npz files of MedMNIST: gray and colored images, volumes, one label or several."""

import pickle

import numpy as np
import pytest

from jaxdp.data import MedMNIST
from jaxdp.errors import UsageError

RNG = np.random.default_rng(0)


def write(path, shape=(28, 28), labels=1, save=np.savez_compressed):
    arrays = {}
    for split, rows in (("train", 30), ("val", 9), ("test", 12)):
        arrays[f"{split}_images"] = RNG.integers(0, 256, (rows, *shape), np.uint8)
        classes = np.arange(rows * labels) % (3 if labels == 1 else 2)
        arrays[f"{split}_labels"] = classes.reshape(rows, labels).astype(np.uint8)
    save(path, **arrays)
    return arrays


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("shape", [(28, 28), (28, 28, 3), (28, 28, 28)])
def test_images_have_channels_and_labels_are_classes(tmp_path, shape, save):
    arrays = write(tmp_path / "m.npz", shape, save=save)
    wanted = shape if shape[-1] == 3 else (*shape, 1)
    for split, rows in (("train", 30), ("val", 9), ("test", 12)):
        source = MedMNIST(str(tmp_path / "m.npz"), split)
        for one in (source, pickle.loads(pickle.dumps(source))):
            batch = one.read(np.arange(rows))
            assert len(one) == rows and batch["inputs"].shape == (rows, *wanted)
            assert one.input_shape == wanted and one.classes == 3
            np.testing.assert_array_equal(
                batch["inputs"].ravel(), arrays[f"{split}_images"].ravel()
            )
            np.testing.assert_array_equal(batch["labels"], arrays[f"{split}_labels"][:, 0])
            assert batch["labels"].dtype == np.int32
    assert source.inventory == "test_images, test_labels"
    scaled = source.transform(batch, None, False)["inputs"]
    assert float(scaled.min()) >= -1 and float(scaled.max()) <= 1


@pytest.mark.parametrize("shape", [(28, 3), (3, 3), (28, 28, 3)])
def test_the_number_of_dims_tells_gray_images(tmp_path, shape):
    arrays = write(tmp_path / "m.npz", shape)
    source = MedMNIST(str(tmp_path / "m.npz"))
    assert source.input_shape == ((28, 28, 3) if len(shape) == 3 else (*shape, 1))
    read = source.read(np.arange(30))["inputs"]
    np.testing.assert_array_equal(read.ravel(), arrays["train_images"].ravel())


def test_labels_may_have_one_dim(tmp_path):
    arrays = write(tmp_path / "a.npz")
    for name, x in arrays.items():
        arrays[name] = x[:, 0] if name.endswith("labels") else x
    np.savez(tmp_path / "b.npz", **arrays)
    one, two = (MedMNIST(str(tmp_path / name)) for name in ("a.npz", "b.npz"))
    assert one.classes == two.classes == 3
    np.testing.assert_array_equal(one.arrays["labels"], two.arrays["labels"])
    assert two.arrays["labels"].dtype == np.int32


def test_several_labels_stay_as_they_are(tmp_path):
    arrays = write(tmp_path / "m.npz", labels=14)
    source = MedMNIST(str(tmp_path / "m.npz"))
    assert source.classes == 14
    np.testing.assert_array_equal(source.read(np.arange(30))["labels"], arrays["train_labels"])


def test_other_files_are_refused_in_a_line(tmp_path):
    np.savez(tmp_path / "x.npz", images=np.zeros((3, 8, 8)))
    with pytest.raises(
        UsageError, match=r"'.*x.npz' has no array 'train_images'; its arrays: images"
    ):
        MedMNIST(str(tmp_path / "x.npz"))
    with pytest.raises(UsageError, match=r"data.args.path: cannot read '.*none.npz'"):
        MedMNIST(str(tmp_path / "none.npz"))
