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
from jaxdp.errors import import_optional
from jaxdp.metrics import safe_print

KEY = "checkpoint.mirror"
# Copied beside the checkpoints; `git.diff` may hold secrets, so it stays where it is.
FILES = ("config.yaml", "env.json", "layout.json", "model.txt", "metrics.jsonl", "events.jsonl")


class Storage:
    """The folder URL/NAME for a run directory NAME. Its methods raise what fsspec raises.

    Raises ValueError or ImportError for a URL that fsspec does not know, or needs another package
    for, and for a folder in the run directory.
    """

    def __init__(self, url: str, directory: pathlib.Path):
        fsspec = import_optional("fsspec", KEY, "mirror")
        self.directory, self.local = directory, directory / "checkpoints"
        self.url = f"{url.rstrip('/')}/{directory.absolute().name}"
        self.files, self.root = fsspec.url_to_fs(self.url)
        self.top = f"{self.root}/checkpoints"
        self.owner = f"{self.root}/.mirror"  # a file that says which run directory is copied
        own, root = (f"{os.path.realpath(path)}/" for path in (directory, self.root))
        protocol = self.files.protocol
        if "memory" in protocol or ("file" in protocol and root.startswith(own)):
            raise ValueError(
                "it is in the run directory, or in the memory of a process; give another storage"
            )

    def check(self) -> None:
        """Write a file, to know before the first update that this is possible. It is empty: `upload`
        may write it."""
        # The bucket: else it would be made, whatever it is.
        self.files.info(self.root.partition("/")[0] or "/")
        self.files.makedirs(self.root, exist_ok=True)
        self.files.pipe_file(self.owner, b"")

    def folders(self) -> list[str]:
        """Return the names of the checkpoints there, complete or not."""
        self.files.invalidate_cache()
        try:
            return [x.rpartition("/")[2] for x in self.files.ls(self.top, detail=False)]
        except FileNotFoundError:
            return []

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints there, in order."""
        steps = [int(name) for name in self.folders() if name.isdecimal()]
        return sorted(filter(self.manifest, steps))

    def manifest(self, step: int) -> dict[str, Any]:
        """Return the manifest of a checkpoint there, {} if it has none that can be read."""
        try:
            return json.loads(self.files.cat_file(f"{self.top}/{step}/{manifest.NAME}"))
        except (FileNotFoundError, NotADirectoryError, ValueError):
            return {}

    def has(self, step: int) -> bool:
        """Return whether a local checkpoint is there too, with the same files: it is of this run."""
        return self.manifest(step).get("files") == manifest.read(self.local / f"{step}")["files"]

    def upload(self, last: bool) -> None:
        """Copy what is missing there, and remove the checkpoints there that are not here any more.

        A manifest is copied after the files that it lists, so what has one is complete. last: the
        run has ended, and the other files have changed since its last checkpoint. Raises
        PermissionError if another run, which goes on, is copied there."""
        # Not the directory's nonce: each start has another, and this process may begin before it.
        own = f"{os.uname().nodename} {self.directory.stat().st_ino}".encode()
        if self.files.cat_file(self.owner) not in (b"", own):
            raise PermissionError(
                "another run has copied there since this one was started; give one of them another name"
            )
        self.files.pipe_file(self.owner, own)
        changed = [step for step in complete(self.local) if self._upload(step)]
        for name in FILES if changed or last else ():
            if (self.directory / name).is_file():
                self.files.put_file(f"{self.directory}/{name}", f"{self.root}/{name}")
        if here := complete(self.local):
            for name in self.folders():
                if name not in map(str, here):
                    self.files.rm(f"{self.top}/{name}", recursive=True)

    def _upload(self, step: int) -> bool:
        """Copy a checkpoint if it differs; return whether it did."""
        source, target = self.local / f"{step}", f"{self.top}/{step}"
        try:
            here = json.loads((source / manifest.NAME).read_bytes())
            there = self.manifest(step)
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

    def download(self) -> None:
        """Copy the checkpoints whose every byte is right into the directory, and the files beside
        them. Print what is wrong with the others."""
        for folder in self.local.glob("*.mirror"):  # of a download that was interrupted
            shutil.rmtree(folder)
        for step in self.steps():
            folder, top = self.local / f"{step}.mirror", f"{self.top}/{step}/"
            folder.mkdir(parents=True)
            with contextlib.suppress(manifest.Damaged, FileNotFoundError):  # `problem` says which
                self.files.get_file(top + manifest.NAME, f"{folder}/{manifest.NAME}")
                for name in manifest.read(folder)["files"]:
                    target = manifest.located(folder, name)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    self.files.get_file(top + name, f"{target}")
            if problem := manifest.problem(folder):
                shutil.rmtree(folder)
                safe_print.say(
                    f"{KEY}: checkpoint {step} of {self.url} is damaged: {problem}", error=True
                )
        for name in FILES:
            if self.files.exists(f"{self.root}/{name}"):
                self.files.get_file(f"{self.root}/{name}", str(self.directory / name))
        for folder in self.local.glob(
            "*.mirror"
        ):  # when all are there, or the next start is refused
            folder.rename(folder.with_suffix(""))
