"""Images in one folder per class, decoded when they are read."""

import contextlib
import sys
import zlib
from collections import Counter
from collections.abc import Mapping
from functools import singledispatch
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxdp.data.dataset import Batch, Part, check_split, file_part
from jaxdp.data.image_files import FIX, Images, describe, find_classes, find_splits
from jaxdp.data.split_names import normalized
from jaxdp.data.standardized import StandardizedImages
from jaxdp.data.windows import check_fraction
from jaxdp.errors import UsageError, check_one_of, check_sizes, import_optional, one_line

CHECK = "`jaxdp data check` lists all that cannot be read"
READ = 4096  # of more files, only the names are compared with those of an earlier start
# of ImageNet's training pixels in [0, 1], by channel
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ImageFolder(StandardizedImages):
    """Images by class: "inputs" uint8 [size, size, 3], "labels" int32, the index of the class in
    the sorted names.

    root: a folder with train/CLASS/* and test/CLASS/* (or val/CLASS/*, in any spelling; splits:
    {train: FOLDER, test: FOLDER} names them instead, {} none); or with CLASS/*, of which about a
    `test_fraction`, selected by a hash of CLASS/NAME, is the test split: adding an image does not
    move the others. Links to folders are followed; hidden files and those of systems (`__MACOSX`,
    `Thumbs.db`) are not read. `inventory` counts the images by class, and all else. Images are
    rotated according to EXIF, converted to RGB, resized to a shorter side of `size` (bilinear,
    antialiased) and center-cropped. On the device, `transform` standardizes them by mean and std,
    per channel in [0, 1], ImageNet's by default. augment: in training, mirror at random. on_error:
    skip gives an image that cannot be decoded a mask of 0, and reports it, instead of an error; the
    order of the examples stays that of all files.

    Needs Pillow. Raises UsageError for a class without images, for test classes missing in train,
    and, when it is read, for an image that cannot be decoded, with its path.
    """

    key = "data.args.root"  # in error messages

    def __init__(
        self,
        root: str,
        split: str = "train",
        size: int = 224,
        augment: bool = False,
        test_fraction: float = 0.1,
        mean: tuple[float, ...] = MEAN,
        std: tuple[float, ...] = STD,
        splits: Mapping[str, str] | None = None,
        on_error: Literal["raise", "skip"] = "raise",
    ):
        check_split(split)
        check_fraction(test_fraction)
        check_sizes("data.args", size=size)
        check_one_of("data.args.on_error", on_error, ("raise", "skip"))
        import_pillow("Image")
        self.on_error, self.skipped = on_error, set[int]()
        passed = Counter[str]()
        training, by_class, place = self.find(root, split, splits, passed)
        self.class_names = [*training]
        if unknown := sorted(by_class.keys() - self.class_names):
            raise UsageError(f"{self.key}: {place!r} has class {unknown[0]!r}, which train lacks")
        self.files, labels = list[Path](), list[int]()
        for label, name in enumerate(self.class_names):
            for path in by_class.get(name, []):
                if place or held_out(path, test_fraction) == (split == "test"):
                    self.files.append(path)
                    labels.append(label)
        if not labels:
            what = f"no image for {split} in its classes" if by_class else "no folder of images"
            raise UsageError(
                f"{self.key}: {what} in {root!r}; images are in {root}/CLASS or {root}/{split}/CLASS"
            )
        self.labels = np.array(labels, np.int32)
        self.classes, self.input_shape = len(self.class_names), (size, size, 3)
        self.size, self.augment, self.mean, self.std = size, augment, tuple(mean), tuple(std)
        self.inventory = describe(
            self.class_names, np.bincount(self.labels, minlength=self.classes).tolist(), passed
        )

    def find(
        self, root: str, split: str, splits: Mapping[str, str] | None, passed: Counter[str]
    ) -> tuple[Images, Images, str]:
        """Return (the images to train on by class, those of the split, where those are); "" if the test
        split is a share of the others. The arguments are those of the class. Adds to `passed`."""
        self.top = top = Path(root).expanduser()
        if not top.is_dir():
            return {}, {}, ""
        folders = find_splits(top, splits, passed)
        if split == "train" and [*folders] == ["test"]:
            raise UsageError(
                f"data.args.root: {root!r} has only {folders['test'].name!r}, nothing to train on; {FIX}"
            )
        training = folders.get("train") or folders.get("test") or top
        folder = folders.get(split, training)
        by_class, problem = find_classes(training, passed if folder == training else Counter())
        if problem:
            raise UsageError(problem)
        images = by_class if folder == training else find_classes(folder, passed)[0]
        return by_class, images, str(folder) if "test" in folders else ""

    def __len__(self) -> int:
        return len(self.files)

    def read(self, indices: np.ndarray) -> Batch:
        inputs = np.zeros((len(indices), *self.input_shape), np.uint8)
        mask = np.ones(len(indices), np.float32)
        for row, index in enumerate(indices.tolist()):
            try:
                inputs[row] = decode(self.files[index], self.size)
            except UsageError as error:
                if self.on_error == "raise":
                    raise UsageError(
                        f"{error}, or set data.args.on_error: skip; {CHECK}"
                    ) from error.__cause__
                mask[row] = 0
                if index not in self.skipped:  # reported once in this process
                    self.skipped.add(index)
                    with contextlib.suppress(OSError, ValueError):  # no standard error
                        print(
                            f"warning: skipped, with mask 0: {error}", file=sys.stderr, flush=True
                        )
        examples = {"inputs": inputs, "labels": self.labels[indices]}
        return {**examples, "mask": mask} if self.on_error == "skip" else examples

    def parts(self) -> dict[str, Part]:
        read = len(self.files) <= READ
        return {
            normalized(path.relative_to(self.top).as_posix()): file_part(path, read)
            for path in self.files
        }

    def moved(self, images: Any, key: Any) -> Any:
        from jaxdp.data.augment import random_flip

        return random_flip(images, key)


def held_out(path: Path, fraction: float) -> bool:
    name = normalized("/".join(path.parts[-2:]))
    return zlib.crc32(name.encode(errors="surrogateescape")) < fraction * 2**32


def decode(path: Path, size: int) -> np.ndarray:
    """Read an image file as uint8 [size, size, 3]. Raises UsageError."""
    pillow, operations = import_pillow("Image"), import_pillow("ImageOps")
    try:
        with open_image(path) as opened:
            if opened.mode[0] in "IF":  # Pillow would clip the values
                raise ValueError(f"its pixels ({opened.mode}) have more than 8 bits a channel")
            image = operations.exif_transpose(opened).convert("RGB")
            scale = size / min(image.size)
            shape = [max(size, round(side * scale)) for side in image.size]
            image = image.resize(shape, pillow.Resampling.BILINEAR)
    except Exception as error:  # an invalid image raises many types of errors
        raise UsageError(
            f"data: cannot read image {str(path)!r}: {one_line(error)}; replace or remove it"
        ) from error
    left, top = ((side - size) // 2 for side in image.size)
    return np.asarray(image.crop((left, top, left + size, top + size)))


@singledispatch
def open_image(path: Any) -> Any:
    """Open an image file, without decoding its pixels. Raises many types of errors."""
    if not path.stat().st_size:
        raise ValueError("it has 0 bytes")
    return import_pillow("Image").open(path)


def import_pillow(module: str) -> Any:
    return import_optional(f"PIL.{module}", "data.target: ImageFolder", "images")
