"""Checkpoints of hosts that share no file system: every host keeps the full state in its own run
directory.

Of the processes that see the same directory, one is its writer. A save gathers the state, and each
writer writes all of it. A restore agrees on the newest step that any host has undamaged, copies its
files to the hosts that lack it, and then each process reads those of its own host.
"""

import contextlib
import json
import pathlib
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.checkpoint import folders, manifest
from jaxdp.checkpoint.leaves import host
from jaxdp.checkpoint.orbax import TIMEOUT, prepare, save_alone
from jaxdp.checkpoint.store import Checkpoints, Say
from jaxdp.errors import UsageError
from jaxdp.extras import load_extra
from jaxdp.run import rundir

CHUNK = 1 << 22  # bytes of a file in one broadcast


class LocalCheckpoints(Checkpoints):
    """The checkpoints of a run whose directory may be a different one on each host.

    writers[rank]: the process that writes into the directory which that rank sees. If it is the
    same one for all, they work like `Checkpoints`. facts["job"]: a random text; checkpoints of one
    step and one job have the same state."""

    writers: Sequence[int] = ()

    @property
    def is_shared(self) -> bool:
        return len(set(self.writers)) < 2

    def attach(self, nonce: str) -> str | None:
        """Choose the writer of each directory: root in its own, elsewhere the first process that
        makes a file there.
        """
        context = self.context
        job = context.of_root("job", lambda: secrets.token_hex(8))
        mark = self.directory / f".writer-{job}"
        for of_root in (True, False):
            if context.is_root == of_root:
                with self._reported(), contextlib.suppress(FileExistsError):
                    self.directory.mkdir(parents=True, exist_ok=True)
                    with mark.open("x", encoding="utf-8") as file:
                        file.write(str(context.rank))
            context.barrier("writer")
        self.writers = [
            int(rank) for rank in context.exchange("writers", mark.read_text(encoding="utf-8"))
        ]
        self.writes = self.writers[context.rank] == context.rank
        self.facts = {**self.facts, "job": job}
        for path in self.directory.glob(".writer-*") if self.writes else ():
            path.unlink(missing_ok=True)
        return None

    def latest(
        self,
        say: Say = print,
        tidy: bool = True,
        refused: Iterable[int] = (),
        only: int | None = None,
    ) -> int:
        """Return the newest step that a host has undamaged, once all hosts have it, or 0. Raises
        UsageError.
        """
        context = self.context
        if self.is_shared:
            return super().latest(say, tidy, refused, only)
        title = context.title
        rank = context.rank
        tell = say if context.is_root else lambda text: say(f"{title(rank)}: {text}")
        refused, tried = (
            {*refused, *(folders.unfinished(self.directory) if self.writes else ())},
            len({*refused}),
        )
        if self.writes:
            self._set_unfinished_aside(tell)
        while True:
            own, content, problem = (
                folders.newest(self.directory, refused, only) if self.writes else (0, {}, "")
            )
            offer = [
                own,
                not problem,
                content["meta"].get("job") if content else None,
                len(refused) - tried,
            ]
            offers = [
                json.loads(text) for text in context.exchange("offers", json.dumps(offer), TIMEOUT)
            ]
            # Of equal offers, `max` takes the first one, of the lowest rank.
            newest, _, job, _ = max(offers, key=lambda offer: offer[:2])
            if not newest:
                if context.is_root and any(count for *_, count in offers):
                    say("no host has a complete checkpoint: the run starts from the beginning")
                self.last = None
                return 0
            if own == newest and not problem:
                problem = manifest.problem(self.directory / str(own))
                problem = "another job has saved it" if offer[2] != job else problem
            if problem.startswith("cannot read"):
                raise UsageError(f"run_dir: {title(rank)} {problem}; fix that first")
            sound = context.exchange("sound", json.dumps(own == newest and not problem), TIMEOUT)
            if problem:
                refused.add(own)
                self.set_aside(own, "damaged", f"checkpoint {own} is damaged: {problem}", tell)
            if (
                source := next((r for r in sorted({*self.writers}) if json.loads(sound[r])), None)
            ) is not None:
                targets = [r for r in sorted({*self.writers}) if not json.loads(sound[r])]
                with self._reported():
                    self._copy(newest, source, targets)
                if context.is_root and targets:
                    self.events.note("checkpoint_copied", newest, source=source, targets=targets)
                    say(
                        f"checkpoint {newest} copied from {title(source)} to {', '.join(map(title, targets))}"
                    )
                self.last = newest
                return newest

    def _copy(self, step: int, source: int, targets: Sequence[int]) -> None:
        """Copy a checkpoint from the directory of one writer to those of others."""
        broadcast = load_extra("interop.collectives", "checkpoint.local: true").broadcast
        rank = self.context.rank
        folder = self.directory / str(step)
        text = json.dumps(manifest.read(folder)) if rank == source else ""
        content = (
            json.loads(self.context.exchange("manifest", text)[source])
            if targets
            else {"files": {}}
        )
        files = content["files"]
        copy = folder.with_name(f"{step}{folders.TEMPORARY}-copy")
        for name, (size, _) in files.items():
            for start in range(0, max(size, 1), CHUNK):
                chunk = np.zeros(CHUNK, np.uint8)
                if rank == source:
                    data = np.fromfile(folder / name, np.uint8, CHUNK, offset=start)
                    chunk[: data.size] = data
                chunk = np.asarray(broadcast(chunk, source, [[source, *targets]]))
                if rank in targets:
                    (copy / name).parent.mkdir(parents=True, exist_ok=True)
                    with (copy / name).open("ab") as file:
                        file.write(chunk[: size - start].tobytes())
        if rank in targets:
            manifest.check(copy, files)
            manifest.flush(copy, files)
            manifest.write(copy, files, content["meta"])
            copy.rename(folder)
            rundir.flush(self.directory)
        self.context.barrier("copied", TIMEOUT)

    def _start(self, folder: pathlib.Path, tree: dict[str, Any]) -> Any:
        """Gather the state, one array after the other, and start to write it if this process is a
        writer.
        """
        if self.is_shared:
            return super()._start(folder, tree)
        first = {device.process_index: device for device in reversed(jax.devices())}
        # The device may lack the memory for all.
        kind = None if jax.default_backend() == "cpu" else "pinned_host"
        mesh = Mesh([first[writer] for writer in sorted({*self.writers})], ("host",))
        replicated = NamedSharding(mesh, P(), memory_kind=kind)

        def gather(x):
            value = np.array(host(x))
            if not self.writes:
                return None
            return jax.make_array_from_callback(value.shape, replicated, value.__getitem__)

        tree = jax.tree.map(gather, tree)
        prepare(self.context)
        return save_alone(folder, tree) if self.writes else None

    def _digests(self, folder: pathlib.Path) -> manifest.Files:
        if self.is_shared:
            return super()._digests(folder)
        files = manifest.digests(folder, manifest.list_files(folder)) if self.writes else {}
        if self.writes:
            manifest.flush(folder, files)
        self._commit.wait_for_all("digests")
        return files

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """Raise UsageError for a file that cannot be read or written."""
        try:
            yield
        except OSError as error:
            name = f"{self.context.title(self.context.rank)} cannot use {str(error.filename or self.directory)!r}"
            raise UsageError(
                f"run_dir: {name}: {error.strerror}; fix that, or choose another"
            ) from None
