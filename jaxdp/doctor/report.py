"""An examination as a person reads it, a line or two for each finding, and as a program does."""

from __future__ import annotations

import io
import sys
from collections import Counter
from typing import Any

import jaxdp
from jaxdp.distributed import hosts
from jaxdp.doctor.check import FAILURE, OK, WARNING, Examined, Line

STYLE = {OK: "green", WARNING: "bold yellow", FAILURE: "bold red"}
MANY = 3  # lines of one name that are well and differ by rank, before the rest is counted only


def failed(examined: Examined) -> bool:
    return any(check.status == FAILURE for check, _ in examined.lines)


def ordered(lines: list[Line]) -> list[Line]:
    """Lines of one name side by side, names in the order in which they came."""
    place = {name: i for i, name in enumerate(dict.fromkeys(check.name for check, _ in lines))}
    return sorted(lines, key=lambda line: place[line[0].name])


def as_json(examined: Examined) -> dict[str, Any]:
    """{checks: [{name, status, found, fix; of several processes, rank, ranks, hosts}], failures, warnings, ...}."""
    checks = []
    for check, ranks in ordered(examined.lines):
        entry: dict[str, Any] = check._asdict()
        if ranks and examined.size > 1:
            names = list(dict.fromkeys(examined.hosts[r] for r in ranks))
            entry |= {"rank": ranks[0], "ranks": list(ranks), "hosts": names}
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


def as_text(examined: Examined, wide: bool = False) -> str:
    """wide: for a terminal, with colours; else each finding is one line, and its fix the next."""
    rows, shown = [], Counter[str]()
    lines = ordered(examined.lines)
    for check, ranks in lines:
        if check.status == OK:
            shown[check.name] += 1
            same = sum(c.name == check.name and c.status == OK for c, _ in lines)
            if same > MANY + 1 and examined.size > 1 and shown[check.name] > MANY:
                if shown[check.name] == same:
                    rows.append((check.status, check.name, f"and {same - MANY} more like it", ""))
                continue
        rows.append((check.status, check.name, f"{who(ranks, examined)}{check.found}", check.fix))
    count = Counter(check.status for check, _ in lines)
    numbers = [f"{count[OK]} ok"]
    numbers += [f"{count[s]} {s}{'s' * (count[s] > 1)}" for s in (WARNING, FAILURE) if count[s]]
    head = f"jaxdp {jaxdp.__version__} doctor: {examined.title}"
    if wide:
        return _coloured(head, rows, ", ".join(numbers))
    width = max(len(name) for _, name, _, _ in rows)
    text = [head]
    for status, name, found, fix in rows:
        text.append(f"{status:7}  {name:{width}}  {found}")
        text += [f"{'':7}  {'':{width}}  fix: {fix}"] if fix else []
    return "\n".join([*text, ", ".join(numbers)])


def who(ranks: tuple[int, ...], examined: Examined) -> str:
    """The ranks that a finding is of, where it is not that of all."""
    if not ranks or len(ranks) == examined.size:
        return ""
    if len(ranks) == 1:
        return f"{hosts.title(ranks[0], examined.hosts[ranks[0]])}: "
    names = list(dict.fromkeys(examined.hosts[r] for r in ranks))
    more = " ..." if len(ranks) > 8 else ""
    return f"ranks {', '.join(map(str, ranks[:8]))}{more} (host{'s' * (len(names) > 1)} {', '.join(names[:4])}): "


def _coloured(head: str, rows: list[tuple[str, str, str, str]], numbers: str) -> str:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    for status, name, found, fix in rows:
        text = Text(found)
        if fix:
            text.append(f"\nfix: {fix}", style="cyan")
        table.add_row(Text(status, style=STYLE[status]), Text(name, style="bold"), text)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=Console(file=sys.stdout).width)
    console.print(Text(head, style="bold"))
    console.print(table)
    console.print(Text(numbers, style="bold"))
    return out.getvalue().rstrip()
