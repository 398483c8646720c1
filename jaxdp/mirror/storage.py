"""A run's folder in a storage that fsspec reaches, and copies in both directions.

Imports neither JAX nor Orbax, since the process that copies needs neither."""

import contextlib
import json
import os
import pathlib
import shutil
from typing import Any

from jaxdp.checkpoint import manifest
from jaxdp.checkpoint.folders import complete
from jaxdp.errors import UsageError, import_optional, one_line

KEY = "checkpoint.mirror"
# Copied beside the checkpoints; `git.diff` may hold secrets, so it stays where it is.
FILES = ("config.yaml", "env.json", "layout.json", "model.txt", "metrics.jsonl", "events.jsonl")


class Storage:
    """The folder URL/NAME for a run directory NAME. Its methods raise what fsspec raises.

    Raises UsageError for a URL that fsspec does not know, or needs another package for.
    """

    def __init__(self, url: str, directory: pathlib.Path):
        fsspec = import_optional("fsspec", KEY, "mirror")
        self.directory, self.local = directory, directory / "checkpoints"
        self.url = f"{url.rstrip('/')}/{directory.absolute().name}"
        try:
            self.files, self.root = fsspec.url_to_fs(self.url)
        except (ValueError, ImportError) as error:
            raise UsageError(
                f"{KEY}: {url!r} cannot be opened: {one_line(error)}; an example is s3://bucket/runs"
            ) from None
        self.owner = f"{self.root}/.mirror"  # a file with the nonce of the run directory
        if "memory" in self.files.protocol:
            raise UsageError(
                f"{KEY}: {url!r} is in the memory of one process; give a storage that outlives it"
            )
        own = os.path.realpath(directory)
        if "file" in self.files.protocol and f"{os.path.realpath(self.root)}/".startswith(
            f"{own}/"
        ):
            raise UsageError(
                f"{KEY}: {url!r}: {self.url!r} is in the run directory; give another folder"
            )

    def check(self) -> None:
        """Write a file, to know before the first update that this is possible. It is empty: `claim`
        may write it."""
        bucket = self.root.partition("/")[0]
        if bucket and not self.files.exists(bucket):
            raise FileNotFoundError(f"there is no {bucket!r}")  # it would be made, whatever it is
        self.files.makedirs(self.root, exist_ok=True)
        self.files.pipe_file(self.owner, b"")

    def claim(self) -> None:
        """Raise UsageError if another run directory is copied there, by a run that goes on."""
        own, owner = (self.directory / ".nonce").read_bytes(), b""
        with contextlib.suppress(FileNotFoundError):
            owner = self.files.cat_file(self.owner)
        if not owner:
            self.files.pipe_file(self.owner, own)
        elif owner != own:
            raise UsageError(
                f"{KEY}: {self.url} is the mirror of another run that goes on, and nothing is copied; give this one "
                "another name with --run_dir"
            )

    def folders(self) -> list[str]:
        """Return the folders of checkpoints there, complete or not."""
        self.files.invalidate_cache()
        try:
            return list(self.files.ls(f"{self.root}/checkpoints", detail=False))
        except FileNotFoundError:
            return []

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints there, in order."""
        names = (
            x.rpartition("/")[2]
            for x in self.folders()
            if self.files.exists(f"{x}/{manifest.NAME}")
        )
        return sorted(int(name) for name in names if name.isdecimal())

    def saved(self, step: int) -> dict[str, Any]:
        """Return the metadata of a checkpoint there."""
        return self._manifest(f"{self.root}/checkpoints/{step}")["meta"]

    def has_one_of(self, steps: list[int]) -> bool:
        """Return whether a local checkpoint is there too, with the same files: it is of this run."""
        return any(
            self._manifest(f"{self.root}/checkpoints/{step}").get("files")
            == manifest.read(self.local / f"{step}")["files"]
            for step in steps
        )

    def upload(self, last: bool) -> None:
        """Copy what is missing there, and remove the checkpoints there that are not here any more.

        A manifest is copied after the files that it lists, so what has one is complete. last: the
        run has ended, and the other files have changed since its last checkpoint. Raises UsageError
        for the mirror of another run."""
        self.claim()
        changed = [step for step in complete(self.local) if self._upload(step)]
        for name in FILES if changed or last else ():
            if (self.directory / name).is_file():
                self.files.put_file(f"{self.directory}/{name}", f"{self.root}/{name}")
        if here := complete(self.local):
            for folder in self.folders():
                if folder.rpartition("/")[2] not in map(str, here):
                    self.files.rm(folder, recursive=True)

    def _upload(self, step: int) -> bool:
        """Copy a checkpoint if it differs; return whether it did."""
        source, target = self.local / f"{step}", f"{self.root}/checkpoints/{step}"
        try:
            here = json.loads((source / manifest.NAME).read_bytes())
            there = self._manifest(target)
            if there == here:
                return False
            names = manifest.list_files(source)
            if there.get("files") == here["files"]:
                names = []  # its evaluation was added to the manifest
            elif self.files.exists(target):
                self.files.rm(target, recursive=True)  # it is made again, after a rollback
            for name in [*names, manifest.NAME]:
                self.files.makedirs(f"{target}/{name}".rpartition("/")[0], exist_ok=True)
                self.files.put_file(f"{source}/{name}", f"{target}/{name}")
        except FileNotFoundError:
            if source.is_dir():
                raise
            return False  # it was removed meanwhile
        return True

    def download(self) -> list[str]:
        """Copy the checkpoints whose every byte is right into the directory, and the files beside
        them. Return what is wrong with the others."""
        wrong = []
        for folder in self.local.glob("*.mirror"):  # of a download that was interrupted
            shutil.rmtree(folder)
        for step in self.steps():
            folder, top = self.local / f"{step}.mirror", f"{self.root}/checkpoints/{step}/"
            folder.mkdir(parents=True)
            with contextlib.suppress(manifest.Damaged, FileNotFoundError):  # `problem` says which
                self.files.get_file(top + manifest.NAME, f"{folder}/{manifest.NAME}")
                for name in manifest.read(folder)["files"]:
                    target = manifest.located(folder, name)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    self.files.get_file(top + name, f"{target}")
            if problem := manifest.problem(folder):
                shutil.rmtree(folder)
                wrong.append(f"checkpoint {step} of {self.url} is damaged: {problem}")
        for name in FILES:
            if self.files.exists(f"{self.root}/{name}"):
                self.files.get_file(f"{self.root}/{name}", str(self.directory / name))
        for folder in self.local.glob(
            "*.mirror"
        ):  # when all are there, or the next start is refused
            folder.rename(folder.with_suffix(""))
        return wrong

    def _manifest(self, folder: str) -> dict[str, Any]:
        """Return the manifest of a checkpoint there, {} if it has none that can be read."""
        try:
            return json.loads(self.files.cat_file(f"{folder}/{manifest.NAME}"))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return {}
