"""What a run may ask of a group of processes, whatever its kind."""

import json

from launch import port, processes, ranks

ASK = """
import json, os
import jaxdp
from jaxdp.errors import UsageError

context = jaxdp.init(group={group})
rank, size = context.rank, context.size
answers = dict(
    size=size,
    local_size=context.local_size,
    hosts=context.hosts,
    exchanged=context.exchange("ranks", f"text {{rank}}"),
    again=context.exchange("ranks", str(10 * rank)),
    root=context.of_root("root", lambda: {{"rank": rank}}),
    pids=context.pids,
)
path = f"{{os.environ['FOLDER']}}/arrived {{rank}}"
open(path, "w", encoding="utf-8").close()
context.barrier("all", 60.0)
answers["arrived"] = sorted(os.listdir(os.environ["FOLDER"]))
try:
    context.agree("its input is wrong" if rank == 1 else None)
except UsageError as error:
    answers["agreed"] = [error.rank, str(error)]
try:
    context.check_same("facts", {{"a": "1", "rank": str(rank)}})
except UsageError as error:
    answers["same"] = [error.rank, str(error)]
assert jaxdp.current() is context and jaxdp.init(group={group}) == context
print(json.dumps([rank, context.is_root, os.getpid(), answers]))
jaxdp.process.context.shutdown()
"""


def check_group(tmp_path, group):
    """Two processes of `jaxdp.init(group=GROUP)`, an expression, get the same answers."""
    script = ASK.format(group=group)
    environments = [x | {"FOLDER": str(tmp_path)} for x in ranks(2, f"127.0.0.1:{port()}")]
    jobs = processes(["-c", script], environments)
    assert [job.returncode for job in jobs] == [0, 0], [job.output for job in jobs]
    (first, *alike), (second, *other) = (json.loads(job.stdout.splitlines()[-1]) for job in jobs)
    assert (first, second) == (0, 1) and alike[0] and not other[0]
    answers = alike[2]
    assert answers == other[2]
    assert answers["size"] == answers["local_size"] == len(answers["hosts"]) == 2
    assert answers["exchanged"] == ["text 0", "text 1"] and answers["again"] == ["0", "10"]
    assert answers["root"] == {"rank": 0} and answers["pids"] == [alike[1], other[1]]
    assert answers["arrived"] == ["arrived 0", "arrived 1"]
    assert answers["agreed"][0] == 1 and answers["agreed"][1].startswith("rank 1 (host ")
    rank, text = answers["same"]
    assert rank == 0 and "facts: rank 1 (host " in text and "has rank=1, but rank 0" in text
