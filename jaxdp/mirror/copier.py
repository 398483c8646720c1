"""The process that copies: python -m jaxdp.mirror.copier URL DIRECTORY

It looks for finished checkpoints until its standard input ends, with the training process, whatever
ended that. Then it copies once more, prints what the mirror has, and ends."""

import contextlib
import os
import pathlib
import select
import sys

from jaxdp.errors import one_line
from jaxdp.mirror.storage import KEY, Storage

EVERY_S, MOST_S = 1.0, 60.0  # between two looks, and after failures
LAST_TRIES = 3


def main(url: str, directory: str) -> int:
    """Return 0 if the mirror has all checkpoints at the end, else 1."""
    storage = Storage(url, pathlib.Path(directory))
    wait, tries, said = EVERY_S, LAST_TRIES, ""
    copied = [0.0]  # when the manifests were written that were there at the last copy
    while tries:
        ended = bool(select.select([sys.stdin], [], [], wait)[0])
        try:
            here = [*map(os.path.getmtime, storage.local.glob("*/manifest.json"))]
            if ended or here != copied:  # else the storage, which may be far, is not asked
                storage.upload(ended)
                copied = here
            wait, said = EVERY_S, ""
            if ended:
                said = f"mirror: {storage.url} has step {max(storage.steps(), default=0)}"
                break
        except Exception as error:  # each file system has its own; the next look tries again
            why = f"{KEY}: {storage.url}: {one_line(error) or type(error).__name__}"
            if why != said and not ended:
                print(f"{why}; trying again", file=sys.stderr, flush=True)
            wait, said = min(2 * wait, MOST_S), why
            tries -= ended
    with contextlib.suppress(BrokenPipeError):  # the training process may have gone
        os.write(sys.stdout.fileno(), said.encode())
    return not tries


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
