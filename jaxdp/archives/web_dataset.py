"""Images in the tar files of WebDataset, which are read where they are."""

import glob
import math
import os
import re
import tarfile
import zipfile
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxdp.archives.image_table import Row
from jaxdp.archives.packed import ImageZip, Member
from jaxdp.data.dataset import Part, array_part
from jaxdp.data.image_files import ENDINGS
from jaxdp.data.image_folder import READ
from jaxdp.errors import UsageError, check_one_of, one_line

# The name of a member up to the first dot after its folders, and its ending.
MEMBER = re.compile(r"(?:\./)*((?:.*/)?[^/.]+)\.([^/]+)")
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


class WebDataset(ImageZip):
    """Images by class in the tar files of WebDataset: "inputs" uint8 [size, size, 3], "labels" int32,
    the index in `class_names`.

    shards: a path, a pattern such as data/*.tar, or a range such as data/train-{000..003}.tar; or
    {train: PATTERN, test: PATTERN}, of other names with `splits`. The members of a tar file that have one
    name up to the first dot are a sample: one image, 0001.jpg, and its class, a whole number, in
    0001.cls. Of one pattern, about a `test_fraction` of the images, selected by a hash of the names of
    file and member, is the test split.
    args: the other arguments of `ImageFolder`.

    Each file is read from header to header at the start; an image is read when it is needed, from its
    place in the file, and nothing is unpacked. `inventory` counts the members that are neither. Raises
    UsageError for a file that is missing, compressed, cut off or damaged, for a sample without an image
    or a class, or with two images, and for two members of one name.
    """

    key, numbers = "data.args.shards", True

    def __init__(self, shards: str | Mapping[str, str], split: str = "train", **args: Any):
        self.shards = shards if isinstance(shards, Mapping) else {"train": shards}
        super().__init__(f"{shards}", split, **args)

    def list_images(self, root: str, splits: Any, passed: Counter[str]) -> list[Row]:
        rows = []
        for split, pattern in self.shards.items():
            if not splits:
                check_one_of(self.key, split, ("train", "test"))
            for path in expanded(os.path.expanduser(pattern)):
                for name, sample in samples_of(path, passed).items():
                    try:
                        [image] = [ending for ending in sample if f".{ending}" in ENDINGS]
                        label = int(sample["cls"].read())
                        if label < 0:
                            raise ValueError
                    except (LookupError, ValueError):
                        raise UsageError(
                            f"{self.key}: {name!r} of {path!r} has {', '.join(sample)}; a sample has one image, and "
                            "its class, a whole number, in .cls"
                        ) from None
                    rows.append(Row(sample[image], f"{label}", split))
                    passed.update(sample.keys() - {image, "cls"})
        return rows

    def parts(self) -> dict[str, Part]:
        read = len(self.files) <= READ
        return {
            str(x): Part(x.info.file_size if read else math.inf, lambda x=x: iter([x.read()]))  # type: ignore
            for x in self.files
        } | {"labels": array_part(self.labels)}


def expanded(pattern: str) -> list[str]:
    """Return the paths of a pattern with ranges; the pattern itself if no file is like it."""
    found = RANGE.search(pattern)
    if not found:
        return sorted(glob.glob(pattern)) or [pattern]
    first, last = sorted(map(int, found.groups()))
    return [
        path
        for x in range(first, last + 1)
        for path in expanded(pattern.replace(found[0], f"{x:0{len(found[1])}}", 1))
    ]


class Shard(NamedTuple):
    """A tar file that is read at any place."""

    path: str

    def open(self, info: zipfile.ZipInfo) -> Any:
        file = open(self.path, "rb")  # noqa: SIM115  # `Member` closes it
        file.seek(info.header_offset)
        return file


def samples_of(path: str, passed: Counter[str]) -> dict[str, Any]:
    """Return {name: {ending: a member}} of the samples in a tar file; count what is in none. Raises
    UsageError.
    """
    samples: dict[str, Any] = {}
    try:
        with tarfile.TarFile(path) as archive:
            for member in archive:
                found = MEMBER.fullmatch(member.name)
                if not found or not member.isfile():
                    passed["hidden, folder or link"] += 1
                    continue
                sample, ending = samples.setdefault(found[1], {}), found[2].lower()
                if ending in sample:
                    raise ValueError(f"two members are called {member.name!r}")
                # A tar file stores its members as a zip file may.
                info = zipfile.ZipInfo(member.name)
                info.file_size, info.header_offset = member.size, member.offset_data
                sample[ending] = Member((os.path.basename(path), member.name), Shard(path), info)
            # Zeros end a tar file, 10,240 bytes as a rule; tarfile stops at anything else that is no
            # header, too. Behind them another one may have been joined.
            end = archive.fileobj.read(1 << 20)
            if not end or end.strip(b"\0"):
                raise ValueError(f"it is cut off, or damaged, at byte {archive.offset:,}")
    except (OSError, ValueError, tarfile.TarError) as error:
        raise UsageError(
            f"data.args.shards: cannot read {path!r} ({one_line(error)}); give a tar file that is complete and not "
            "compressed (gunzip unpacks a .tar.gz)"
        ) from None
    return samples
