"""Small images, and the archives that people pack them in."""

import io
import pickle
import tarfile
import zipfile

import numpy as np
import pytest

from jaxdp.data.example_order import order_of
from jaxdp.data.prefetch import read_batches

RNG = np.random.default_rng(0)


def png(value):
    """The bytes of an 8x8 image of one gray."""
    image = pytest.importorskip("PIL.Image", reason="pip install -e '.[images]'")
    file = io.BytesIO()
    image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(file, "png")
    return file.getvalue()


def write_zip(path, members, **more):
    """Write {name: content}; a name that ends in / is a folder."""
    with zipfile.ZipFile(path, "w", **more) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return str(path)


def write_tar(path, members, mode="w", mtime=0):
    """Write {name: content}, or pairs of them; a name that ends in / is a folder."""
    pairs = members.items() if isinstance(members, dict) else members
    with tarfile.open(path, mode) as file:
        for name, content in pairs:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), mtime
            if name.endswith("/"):
                info.type = tarfile.DIRTYPE
            file.addfile(info, io.BytesIO(content))
    return str(path)


def write_files(folder, members):
    for name, content in members.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return str(folder)


def grays(dataset):
    """(gray, class name) of each example."""
    batch = dataset.read(np.arange(len(dataset)))
    names = [dataset.class_names[label] for label in batch["labels"]]
    return list(zip(batch["inputs"][:, 0, 0, 0].tolist(), names))


def check_readers(source):
    """Whoever reads a part of a batch of 8 examples, a copy in another process too, reads the same."""
    order = order_of(source, 8, 4, 0, True)
    for step in range(3):
        whole = read_batches(source, order, [step], range(4))
        for part in (range(1), range(1, 4)):
            batch = read_batches(pickle.loads(pickle.dumps(source)), order, [step], part)
            for name, x in batch.items():
                np.testing.assert_array_equal(x, whole[name][part.start : part.stop])
