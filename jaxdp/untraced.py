"""A start of what ran before calls the update that was compiled then, and traces it only while the devices work on it.

A large update takes longer to trace than to load. What its program depends on is known where no code of the user's
takes part, and under those facts it is found. They are not trusted for long: the update is traced in a thread
meanwhile, and nothing is saved before that has given the same program. Executables are kept by
`jax.experimental.serialize_executable`. On CPU one that came out of JAX's cache cannot be kept again, as its code is
gone; so the start that compiles it keeps it.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.experimental import serialize_executable

from jaxdp import footprint
from jaxdp.ahead import Asked
from jaxdp.compilation_cache import PROGRAM, Note, prune, seal, unseal
from jaxdp.errors import RunFailed
from jaxdp.parallel.base import Program
from jaxdp.step import Batch, TrainState

Update = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
MOST = 2**26  # bytes of an executable that is kept
HIT = "/jax/compilation_cache/cache_hits"  # the event of a program that came out of JAX's cache


class Kept(NamedTuple):
    """call(*leaves) -> leaves; facts: a digest of those it was kept under; the rest: see `Updates.keep`."""

    call: Callable[..., Any]
    facts: str
    several: bool
    names: list[str]
    lowered: str
    layout: Any


class Updates:
    """Those of one start: what the last one kept is loaded, called in the place of what would be traced, and checked.

    early: what is known of a start before all is built, by which the file is found; None keeps nothing.
    """

    def __init__(self, early: str | None, asked: Asked, pool: concurrent.futures.Executor):
        self.note, self.asked, self.pool = Note(early, PROGRAM), asked, pool
        self.seen_by_pool = pool.submit(settings)
        self.loading = None if self.note.file is None else pool.submit(self._load)
        self.kept: Kept | None = None
        self.checking: concurrent.futures.Future[str] | None = None
        self.facts, self.begun, self.sure = "", False, False

    def first(self, program: Program, facts: str | None) -> Program:
        """The program, whose first call takes what was kept under the same facts, if it fits. None: nothing is kept."""
        if facts is None or self.note.file is None or not hasattr(program.update, "lower"):
            return program
        if self.seen_by_pool.result() != (own := settings()):  # some are set for this thread alone
            return program
        self.facts = hashlib.sha256(repr((facts, own)).encode()).hexdigest()
        updates = program.updates and First(program.updates, True, self)
        return program._replace(update=First(program.update, False, self), updates=updates)

    def fitting(self, several: bool) -> Kept | None:
        """What was kept, for the first call of all; nothing for others, as it is the first that is checked."""
        kept = self.loading.result() if self.loading is not None else None
        self.loading = None
        if kept is not None and (kept.facts, kept.several) != (self.facts, several):
            self._put_back()
            return None
        return kept

    def after(self, program: Program, state: TrainState, batch: Batch, several: bool, layout: Any) -> None:
        """After the first call: begins to check what was called, or keeps what was compiled for it, and notes what else
        the next start is to load. layout: what is to be known of the program then. Once a start."""
        if self.begun:
            return
        self.begun = True
        first: Any = program.updates if several else program.update
        programs = list(self.asked.programs)
        if isinstance(first, First):
            if self.kept is not None:
                shapes = jax.tree.map(shape_of, (state, batch))
                self.checking = self.pool.submit(lambda: digest(first.own.lower(*shapes)))
            elif first.compiled:
                lowered = first.own.lower(state, batch)
                if footprint.is_compiled(lowered):
                    self.pool.submit(self.keep, lowered, several, first.names, layout)
                    programs = [p for p in programs if p not in first.asked]
        self.asked.note(programs)

    def keep(self, lowered: Any, several: bool, names: list[str], layout: Any) -> None:
        """Keeps a program that is compiled. names: of the metrics it gives."""
        with contextlib.suppress(Exception):  # it is traced the next time
            compiled = lowered.compile()
            executable, inputs, outputs = serialize_executable.serialize(compiled)
            if len(executable) > MOST:
                return
            facts = {
                "facts": self.facts,
                "several": several,
                "names": names,
                "lowered": digest(lowered),
                "layout": layout,
                "leaves": (inputs.num_leaves, outputs.num_leaves),
                "devices": [d.id for d in compiled.runtime_executable().local_devices()],
            }
            self.note.write(seal(json.dumps(facts).encode() + b"\n" + executable))
            assert self.note.file is not None
            prune(self.note.file.parent)

    def _take(self) -> bytes:
        """What was kept. Its file has another name until it is known to be right: what twice ended a start is left."""
        assert self.note.file is not None
        for file, taken in zip(self._names(), self._names()[1:]):
            with contextlib.suppress(OSError):
                file.replace(taken)
                return taken.read_bytes()
        return b""

    def _names(self) -> list[pathlib.Path]:
        assert self.note.file is not None
        return [self.note.file, *(self.note.file.with_name(f"{self.note.file.name}.tried{n}") for n in (1, 2))]

    def _put_back(self) -> None:
        own, *taken = self._names()
        for file in taken:
            with contextlib.suppress(OSError):
                file.replace(own)
                own.touch()  # it is in use

    def _load(self) -> Kept | None:
        with contextlib.suppress(Exception):  # of another version, or damaged
            head, _, executable = unseal(self._take()).partition(b"\n")
            facts = json.loads(head)
            takes, gives = ((0,) * n for n in facts.pop("leaves"))
            devices = {d.id: d for d in jax.local_devices()}
            compiled = serialize_executable.deserialize_and_load(
                executable,
                jax.tree.structure((takes, {})),
                jax.tree.structure(gives),
                execution_devices=[devices[i] for i in facts.pop("devices")],
            )
            return Kept(compiled, **facts)
        return None

    def look(self) -> None:
        """`certain`, once that need not wait: what is wrong ends the run within seconds."""
        if not self.sure and self.checking is not None and self.checking.done():
            self.certain()

    def certain(self) -> None:
        """Waits until what was called is known to be what would have been traced. Raises RunFailed where it is not."""
        if self.kept is None or self.sure:
            return
        try:
            assert self.checking is not None
            problem = "" if self.checking.result() == self.kept.lowered else "is not what this code makes now"
        except Exception as error:
            problem = f"cannot be made by this code: {type(error).__name__}"
        if problem:
            self.doubt()
            raise RunFailed(
                f"the update that {self.note.file} kept {problem}; it is removed, and nothing was saved of what it "
                "computed; run the same command again",
                rank=0,
            )
        self.sure = True
        self._put_back()

    def doubt(self) -> None:
        """Forgets what was called, if it is not known to be right yet, and what is still to be done."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        if self.kept is not None and not self.sure:
            for file in self._names():
                file.unlink(missing_ok=True)


class First:
    """An update that is traced as ever, or whose first call took what was kept."""

    def __init__(self, own: Any, several: bool, updates: Updates):
        self.own, self.several, self.updates = own, several, updates
        self.call: Update | None = None
        self.asked: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.compiled = False  # by the first call

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        if self.call is not None:
            self.updates.look()
            return self.call(state, batch)
        self.call = self.own
        if kept := self.updates.fitting(self.several):
            self.updates.kept = kept
            try:
                call = by(self.own, kept, state)
                result = call(state, batch)
                self.call = call
                return result
            except (TypeError, ValueError):  # it is of other arguments than these; nothing has run
                self.updates.kept = None
        before = len(self.updates.asked.programs)
        with counting_hits() as hits:
            result = self.own(state, batch)
        self.asked, self.names = self.updates.asked.programs[before:], list(result[1])
        self.compiled = not hits
        return result

    def lower(self, state: TrainState, batch: Batch) -> Any:
        return self.own.lower(state, batch)


def by(own: Any, kept: Kept, state: TrainState) -> Update:
    """The update `own`, computed by what was kept; other shapes than it is for are left to `own`."""
    result = (state, dict.fromkeys(kept.names, 0))
    if hasattr(own, "by"):
        call = own.by(kept.call, result)
    else:
        tree = jax.tree.structure(result)
        call = lambda state, batch: jax.tree.unflatten(tree, kept.call(*jax.tree.leaves((state, batch))))
    return call


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """What an argument is traced by."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None))


def settings() -> str:
    """JAX's, as this thread has them."""
    return repr(sorted((name, repr(value)) for name, value in jax.config.values.items()))


def digest(lowered: Any) -> str:
    """Of a lowered program."""
    return hashlib.sha256(lowered.as_text().encode()).hexdigest()


@contextlib.contextmanager
def counting_hits() -> Iterator[list[str]]:
    """The programs that come out of JAX's cache in this block, one item each."""
    hits: list[str] = []

    def heard(event: str, **more: str | int) -> None:
        if event == HIT:
            hits.append(event)

    jax.monitoring.register_event_listener(heard)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(heard)
