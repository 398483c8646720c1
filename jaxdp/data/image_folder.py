"""Images in one folder per class, decoded when they are read."""

import zlib
from pathlib import Path
from typing import Any

import numpy as np

from jaxdp.data.base import check_split
from jaxdp.data.parts import Part, file_part
from jaxdp.data.windows import check_fraction
from jaxdp.errors import UsageError, check_sizes, import_optional, one_line

READ = 4096  # of more files, only the names are compared with those of an earlier start
ENDINGS = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm"}
FOLDERS = {"train": ("train",), "test": ("test", "val", "valid", "validation")}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's training pixels in [0, 1], by channel


class ImageFolder:
    """Images by class: "inputs" uint8 [size, size, 3], "labels" int32, the index of the class in the sorted names.

    root: a folder with train/CLASS/* and test/CLASS/* (or val/CLASS/*); or with CLASS/*, of which about a
    `test_fraction`, selected by a hash of CLASS/NAME, is the test split: adding an image does not move the others.
    Images are rotated according to EXIF, converted to RGB, resized to a shorter side of `size` (bilinear, antialiased)
    and center-cropped. On the device, `transform` standardizes them by mean and std, per channel in [0, 1], ImageNet's
    by default. augment: in training, mirror at random.

    Needs Pillow. Raises UsageError for a folder without images, for test classes missing in train, and, when it is
    read, for an image that cannot be decoded, with its path.
    """

    def __init__(
        self,
        root: str,
        split: str = "train",
        size: int = 224,
        augment: bool = False,
        test_fraction: float = 0.1,
        mean: tuple[float, ...] = MEAN,
        std: tuple[float, ...] = STD,
    ):
        check_split(split)
        check_fraction(test_fraction)
        check_sizes("data.args", size=size)
        import_pillow("Image")
        top = Path(root).expanduser()
        folders = {name: next((top / n for n in FOLDERS[name] if (top / n).is_dir()), None) for name in FOLDERS}
        divided = None in folders.values()
        by_class = images(folders["train"] or top if divided else folders[split])
        self.class_names = sorted(by_class if divided else images(folders["train"]))
        if unknown := sorted(set(by_class) - set(self.class_names)):
            raise UsageError(f"data.args.root: {str(folders[split])!r} has class {unknown[0]!r}, which train lacks")
        files = [(path, label) for label, name in enumerate(self.class_names) for path in by_class.get(name, [])]
        if divided:
            files = [file for file in files if held_out(file[0], test_fraction) == (split == "test")]
        if not files:
            what = f"no image for {split} in its classes" if by_class else "no folder of images"
            raise UsageError(f"data.args.root: {what} in {root!r}; images are in {root}/CLASS or {root}/{split}/CLASS")
        self.files, self.top = [path for path, _ in files], top
        self.labels = np.array([label for _, label in files], np.int32)
        self.classes, self.input_shape = len(self.class_names), (size, size, 3)
        self.size, self.augment, self.mean, self.std = size, augment, tuple(mean), tuple(std)

    def __len__(self) -> int:
        return len(self.files)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        inputs = np.empty((len(indices), *self.input_shape), np.uint8)
        for row, index in enumerate(indices.tolist()):
            inputs[row] = decode(self.files[index], self.size)
        return {"inputs": inputs, "labels": self.labels[indices]}

    def parts(self) -> dict[str, Part]:
        read = len(self.files) <= READ
        return {path.relative_to(self.top).as_posix(): file_part(path, read) for path in self.files}

    def transform(self, batch: dict[str, Any], key: Any, train: bool) -> dict[str, Any]:
        """Standardize pixels to float32 by the channels' mean and std; see `Dataset`."""
        from jaxdp.data.augment import random_flip, standardize

        inputs = random_flip(batch["inputs"], key) if train and self.augment else batch["inputs"]
        return {**batch, "inputs": standardize(inputs, self.mean, self.std)}


def images(folder: Path | None) -> dict[str, list[Path]]:
    """Return {subfolder: its image files at any depth, sorted by path} for all subfolders with images."""
    if folder is None or not folder.is_dir():
        return {}
    by_class = {
        child.name: sorted(path for path in child.rglob("*") if path.suffix.lower() in ENDINGS)
        for child in sorted(folder.iterdir())
        if child.is_dir() and not child.name.startswith(".")
    }
    return {name: paths for name, paths in by_class.items() if paths}


def held_out(path: Path, fraction: float) -> bool:
    return zlib.crc32(f"{path.parent.name}/{path.name}".encode()) < fraction * 2**32


def decode(path: Path, size: int) -> np.ndarray:
    """Read an image file as uint8 [size, size, 3]. Raises UsageError."""
    pillow, operations = import_pillow("Image"), import_pillow("ImageOps")
    try:
        with pillow.open(path) as opened:
            if opened.mode[0] in "IF":  # Pillow would clip the values
                raise ValueError(f"its pixels ({opened.mode}) have more than 8 bits a channel")
            image = operations.exif_transpose(opened).convert("RGB")
            scale = size / min(image.size)
            shape = [max(size, round(side * scale)) for side in image.size]
            image = image.resize(shape, pillow.Resampling.BILINEAR)
    except Exception as error:  # an invalid image raises many types of errors
        raise UsageError(f"data: cannot read image {str(path)!r}: {one_line(error)}; replace or remove it") from error
    left, top = ((side - size) // 2 for side in image.size)
    return np.asarray(image.crop((left, top, left + size, top + size)))


def import_pillow(module: str) -> Any:
    return import_optional(f"PIL.{module}", "data.target: ImageFolder", "images")
