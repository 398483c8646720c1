"""Print the findings of an examination as text for people or as JSON."""

from collections import Counter
from typing import Any, NamedTuple

import jaxdp
from jaxdp.distributed import hosts
from jaxdp.doctor.check import FAILURE, OK, WARNING, Line

COLORS = {OK: "\x1b[32m", WARNING: "\x1b[1;33m", FAILURE: "\x1b[1;31m"}


class Examined(NamedTuple):
    """The findings of a job. hosts: names by rank. stray: the problems of one rank that did not join the job."""

    lines: list[Line]
    size: int
    hosts: dict[int, str]
    stray: bool = False


def failed(examined: Examined) -> bool:
    return any(check.status == FAILURE for check, _ in examined.lines)


def ordered(lines: list[Line]) -> list[Line]:
    """Return the findings with those of one name side by side, names in the order of their first finding."""
    position = {name: i for i, name in enumerate(dict.fromkeys(check.name for check, _ in lines))}
    return sorted(lines, key=lambda line: position[line[0].name])


def as_json(examined: Examined) -> dict[str, Any]:
    """Return {checks: [{name, status, found, fix; of several processes, rank, ranks, hosts}], failures, ...}."""
    checks = []
    for check, ranks in ordered(examined.lines):
        entry: dict[str, Any] = check._asdict()
        if ranks and examined.size > 1:
            entry |= {"rank": ranks[0], "ranks": list(ranks), "hosts": names_of(ranks, examined)}
        checks.append(entry)
    count = Counter(check.status for check, _ in examined.lines)
    return {
        "jaxdp": jaxdp.__version__,
        "processes": examined.size,
        "hosts": list(dict.fromkeys(examined.hosts.values())),
        "failures": count[FAILURE],
        "warnings": count[WARNING],
        "checks": checks,
    }


def as_text(examined: Examined, color: bool = False) -> str:
    """Return a line for each finding, and a second one for its fix."""
    lines, size = ordered(examined.lines), examined.size
    names = list(dict.fromkeys(examined.hosts.values()))
    where = names[0] if len(names) == 1 else f"{len(names)} hosts ({', '.join(names[:8])})"
    text = [f"jaxdp {jaxdp.__version__} doctor: {size} process{'es' * (size > 1)} on {where}"]
    width = max(len(check.name) for check, _ in lines)
    for check, ranks in lines:
        status = f"{COLORS[check.status]}{check.status:7}\x1b[0m" if color else f"{check.status:7}"
        text.append(f"{status}  {check.name:{width}}  {prefix(ranks, examined)}{check.found}")
        text += [f"{'':7}  {'':{width}}  fix: {check.fix}"] if check.fix else []
    count = Counter(check.status for check, _ in lines)
    counts = [f"{count[s]} {s}{'s' * (count[s] > 1)}" for s in (WARNING, FAILURE) if count[s]]
    return "\n".join([*text, ", ".join([f"{count[OK]} ok", *counts])])


def names_of(ranks: tuple[int, ...], examined: Examined) -> list[str]:
    """Return the hosts of these ranks."""
    return list(dict.fromkeys(examined.hosts[r] for r in ranks))


def prefix(ranks: tuple[int, ...], examined: Examined) -> str:
    """Return the ranks of a finding as a prefix; empty if they are all."""
    if not ranks or len(ranks) == examined.size:
        return ""
    names = names_of(ranks, examined)
    if len(ranks) == 1:
        return f"{hosts.title(ranks[0], names[0])}: "
    more = " ..." if len(ranks) > 8 else ""
    return f"ranks {', '.join(map(str, ranks[:8]))}{more} (host{'s' * (len(names) > 1)} {', '.join(names[:4])}): "
