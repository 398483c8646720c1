"""Images in a zip file, which is read where it is."""

import contextlib
import io
import os
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdp.archives.image_table import Listed, Row
from jaxdp.data.dataset import Part, array_part
from jaxdp.data.image_files import kind_of_name
from jaxdp.data.image_folder import import_pillow, open_image
from jaxdp.data.split_names import listed, normalized, split_names
from jaxdp.errors import UsageError, one_line

MOST = 1 << 28  # bytes of an image; a file that unpacks to more is none


class Zip(zipfile.ZipFile):
    """An open zip file; another process opens it again."""

    def __reduce__(self) -> Any:
        return Zip, (self.filename,)


class Member(NamedTuple):
    """A file in an archive, which has open(info) -> a file that begins with the member's content.

    parts: the path of the archive, then the names of the folders and of the file; that of a folder
    is "".
    """

    parts: tuple[str, ...]
    archive: Any
    info: zipfile.ZipInfo

    def __str__(self) -> str:
        return "/".join(self.parts)

    def read(self) -> bytes:
        """Return the content. Raises ValueError if it is no image, since it is too large."""
        size = self.info.file_size
        if size > MOST:
            raise ValueError(f"it has {size:,} bytes; an image has at most {MOST:,}")
        if self.info.compress_type > zipfile.ZIP_DEFLATED:
            raise ValueError("it is neither stored nor deflated")  # which takes bounded memory
        with self.archive.open(self.info) as file:
            return file.read(size)  # not more, whatever is in it


@open_image.register
def open_member(member: Member) -> Any:
    pillow, content = import_pillow("Image"), io.BytesIO(member.read())
    try:
        return pillow.open(content)
    except pillow.UnidentifiedImageError:  # its text has the address of the bytes
        raise ValueError("cannot identify image file") from None


def members_of(path: Path, passed: Counter[str]) -> list[Member]:
    """Return the members of a zip file, but count those that are hidden. Raises UsageError."""
    try:
        archive = Zip(path)
    except Exception as error:  # a damaged file raises many types of errors
        raise UsageError(
            f"data.args.root: cannot read {str(path)!r} ({one_line(error)}); give a zip file"
        ) from None
    members = []
    for info in archive.infolist():
        name = info.filename
        # Many programs write UTF-8 without its flag, bit 11, or backslashes.
        if not info.flag_bits >> 11 & 1:
            with contextlib.suppress(UnicodeError):
                name = name.encode("cp437").decode()
        name = os.path.normpath(normalized(name).replace("\\", "/"))
        parts = [*name.split("/"), *[""] * info.filename.endswith("/")]
        if "hidden" in map(kind_of_name, parts):
            passed["hidden"] += 1
        else:
            members.append(Member((str(path), *parts), archive, info))
    return members


class ImageZip(Listed):
    """Images by class in a zip file: what `ImageFolder` reads in the folder that it was made of.

    root: the file, with the folders of an `ImageFolder` in it, or with one folder that has them. The
    examples, their order and the test split are those of that folder. A member is read when it is
    needed, and nothing is written; each worker process opens the file for itself. In memory are the
    file's directory and one image, of at most 256 MiB. The other arguments are those of `ImageFolder`.

    Raises UsageError for a file that is no zip file or is damaged, for a class without images, for two
    images of one name, and, when it is read, for an image that is damaged, encrypted or too large.
    """

    numbers = False

    def list_images(self, root: str, splits: Any, passed: Counter[str]) -> list[Row]:
        members = members_of(Path(root).expanduser(), passed)
        images = [x for x in members if kind_of_name(x.parts[-1]) == "image"]
        for name, count in Counter(map(str, images)).most_common(1):
            if count > 1:
                raise UsageError(f"data.args.root: {count} images are called {name!r}; keep one")
        # All may be in one folder, that of the file's name.
        prefix = os.path.commonprefix([x.parts[:-1] for x in images])  # noqa: RUF071  # by parts
        top = max(1, min([len(prefix), *(len(x.parts) - 2 for x in images)]))
        names = split_names({x.parts[top] for x in images})
        divided = any(x.split for x in names.values()) if splits is None else bool(splits)
        at, rows, folders = top + divided, [], set()
        for member in members:
            parts, kind = member.parts, kind_of_name(member.parts[-1])
            inside = parts[:top] == prefix[:top] and len(parts) > at + 1
            if inside:
                folders.add(parts[at])
            if inside and kind == "image":
                rows.append(Row(member, parts[at], parts[top] if divided else "train"))
            elif parts[-1]:
                passed["image outside of the classes" if kind == "image" else kind] += 1
        if empty := sorted(folders - {row.label for row in rows}):
            raise UsageError(
                f"data.args.root: no image in {listed(empty)} of the classes in {root!r}; add some"
            )
        return rows

    def parts(self) -> dict[str, Part]:
        # Not the file's bytes, in which the time of packing is, but what its directory says of each
        # image: this covers a file of any size, and the same images packed again are the same data.
        images = [(x.info.CRC, label) for x, label in zip(self.files, self.labels)]  # type: ignore[attr-defined]
        return {"images": array_part(np.array(images))}
