"""Small images, and the archives that people pack them in."""

import io
import tarfile
import zipfile

import numpy as np
import pytest

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
