"""What a terminal shows of a command, as HTML: what it writes on a pseudo-terminal, drawn as it
would be there.
"""

import codecs
import fcntl
import io
import os
import pathlib
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

THEME = TerminalTheme(
    (0x17, 0x19, 0x1E), (0xD8, 0xDB, 0xE0),
    [(0x17, 0x19, 0x1E), (0xE0, 0x6C, 0x75), (0x7F, 0xBF, 0x7A), (0xE5, 0xC0, 0x7B), (0x61, 0xAF, 0xEF),
     (0xC6, 0x78, 0xDD), (0x4F, 0xB8, 0xC4), (0xD8, 0xDB, 0xE0)],
)  # fmt: skip
PAGE = """<!doctype html><html data-ready="yes"><meta charset="utf-8"><style>
body {{ margin: 0; background: {background}; color: {foreground}; }}
pre {{ margin: 0; padding: 14px 18px; font: 14px "DejaVu Sans Mono", monospace; display: inline-block; }}
</style><pre>{code}</pre></html>
"""
TOKEN = re.compile(r"\x1b\[(\d*)A|(\x1b\[2K)|\x1b\[\?25[lh]|(\x1b\[[\d;]*m)|(\n)|\r|([^\x1b\r\n]+)")


class Screen:
    """The rows of a terminal, each with its colours as they were written; all that is known of it
    is what rich asks.
    """

    def __init__(self, rows: int, columns: int):
        self.size = (rows, columns)
        self.lines, self.at = [""], 0
        self.decode = codecs.getincrementaldecoder("utf-8")().decode
        self.rest = ""

    def feed(self, data: bytes) -> None:
        text = self.rest + self.decode(data)
        whole = re.sub(r"\x1b(\[[\d;?]*)?$", "", text)
        self.rest, place = text[len(whole) :], 0
        while place < len(whole):
            found = TOKEN.match(whole, place)
            assert found, f"what does a terminal make of {whole[place : place + 20]!r}?"
            up, clear, style, down, plain = found.groups()
            if up is not None:
                self.at -= int(up or 1)
            elif clear:
                self.lines[self.at] = ""
            elif down:
                self.at += 1
                self.lines += [""] * (self.at == len(self.lines))
            else:
                self.lines[self.at] += style or plain or ""
            place = found.end()

    def shown(self) -> list[Text]:
        """The rows that are to be seen."""
        lines = self.lines[: self.at + 1] if self.at >= len(self.lines) - 1 else self.lines
        return [Text.from_ansi(line) for line in lines[-self.size[0] :]]

    def html(self) -> str:
        console = Console(
            record=True, file=io.StringIO(), width=self.size[1], color_system="truecolor"
        )
        for line in self.shown():
            assert line.cell_len <= self.size[1], line.plain
            console.print(line, no_wrap=True, crop=False, highlight=False)
        code = console.export_html(theme=THEME, code_format="{code}", inline_styles=True)
        background, foreground = THEME.background_color.hex, THEME.foreground_color.hex
        return PAGE.format(code=code.strip("\n"), background=background, foreground=foreground)


def watch(
    command: Sequence[str],
    until: Callable[[Screen], bool],
    rows: int = 24,
    columns: int = 80,
    env: Mapping[str, str] = os.environ,
    cwd: pathlib.Path | None = None,
    seconds: float = 300.0,
) -> Screen:
    """Runs a command in a terminal until its screen is as wanted, stops it, and returns the screen
    as it was.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    env = {k: v for k, v in env.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    env |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    process = subprocess.Popen(
        command, env=env, cwd=cwd, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    screen, deadline = Screen(rows, columns), time.monotonic() + seconds
    try:
        while not until(screen):
            assert time.monotonic() < deadline and process.poll() is None, "\n".join(
                map(str, screen.shown())
            )
            if select.select([ours], [], [], 1.0)[0]:
                screen.feed(os.read(ours, 1 << 16))
        return screen
    finally:
        process.send_signal(signal.SIGTERM)
        while process.poll() is None:  # it says more, which somebody has to read
            if select.select([ours], [], [], 0.1)[0]:
                try:
                    os.read(ours, 1 << 16)
                except OSError:
                    break
        process.wait()
        os.close(ours)
