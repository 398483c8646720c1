"""Print the findings of an examination as text for people or as JSON."""

from collections import Counter
from typing import Any, NamedTuple

import jaxdp
from jaxdp.doctor.check import FAILURE, OK, WARNING, Line

COLORS = {OK: "\x1b[32m", WARNING: "\x1b[1;33m", FAILURE: "\x1b[1;31m"}


class Examined(NamedTuple):
    """The findings of a job. hosts: names by rank."""

    lines: list[Line]
    size: int
    hosts: dict[int, str]

    def statuses(self) -> Counter[str]:
        """Return the number of findings of each status."""
        return Counter(check.status for check, _ in self.lines)


def as_json(examined: Examined) -> dict[str, Any]:
    """Return {checks: [{name, status, found, fix; of several processes, rank, ranks, hosts}], failures, ...}."""
    checks = []
    for check, ranks in examined.lines:
        checks.append(check._asdict())
        if ranks and examined.size > 1:
            names = list(dict.fromkeys(examined.hosts[rank] for rank in ranks))
            checks[-1] |= {"rank": ranks[0], "ranks": list(ranks), "hosts": names}
    return {
        "jaxdp": jaxdp.__version__,
        "processes": examined.size,
        "hosts": list(dict.fromkeys(examined.hosts.values())),
        "failures": examined.statuses()[FAILURE],
        "warnings": examined.statuses()[WARNING],
        "checks": checks,
    }


def as_text(examined: Examined, color: bool = False) -> str:
    """Return a line for each finding, and a second one for its fix."""
    names, size, count = list(dict.fromkeys(examined.hosts.values())), examined.size, examined.statuses()
    where = names[0] if len(names) == 1 else f"{len(names)} hosts ({', '.join(names[:8])})"
    text = [f"jaxdp {jaxdp.__version__} doctor: {size} process{'es' * (size > 1)} on {where}"]
    width = max(len(check.name) for check, _ in examined.lines)
    for check, ranks in examined.lines:
        status = f"{COLORS[check.status]}{check.status:7}\x1b[0m" if color else f"{check.status:7}"
        some = [f"{rank} (host {examined.hosts[rank]})" for rank in ranks] if len(ranks) < size else []
        prefix = f"rank{'s' * (len(some) > 1)} {', '.join(some[:4])}{' ...' * (len(some) > 4)}: " if some else ""
        text.append(f"{status}  {check.name:{width}}  {prefix}{check.found}")
        text += [f"{'':7}  {'':{width}}  fix: {check.fix}"] if check.fix else []
    counts = [f"{count[s]} {s}{'s' * (count[s] > 1)}" for s in (WARNING, FAILURE) if count[s]]
    return "\n".join([*text, ", ".join([f"{count[OK]} ok", *counts])])
