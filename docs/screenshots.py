"""Makes the pictures of the documentation, in docs/img, from runs of a minute: `python
docs/screenshots.py [NAME ...]`.

It takes chromium, pillow, tensorboard and tensorboardX. Names: report, console, tensorboard; all of
them by itself."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from PIL import Image  # noqa: E402
from terminal import Screen, watch  # noqa: E402

from browser import Browser  # noqa: E402

IMG = ROOT / "docs" / "img"
TRAIN = [sys.executable, str(ROOT / "train.py"), "--config", str(ROOT / "configs" / "digits.yaml")]
KEYS = ["--epochs", "180", "--eval.every", "230", "--checkpoint.every", "690", "--log.every", "10"]
# name: (runs, width and height in CSS pixels, dark, JavaScript ahead of the picture)
REPORTS = {
    "report_light": (["digits"], (1280, 1560), False, "0"),
    "report_dark": (["digits"], (1280, 1560), True, "0"),
    "report_runs": (
        ["digits", "slower", "sharded"],
        (1280, 1440),
        False,
        "smooth(0.9), hover(0, 1500)",
    ),
    "report_phone_light": (["digits"], (390, 844), False, "0"),
    "report_phone_dark": (["digits"], (390, 844), True, "scrollTo(0, 560)"),
}
STAGE = """
smooth = (s) => { document.getElementById("smooth").value = s; document.getElementById("smooth").oninput?.();
    document.getElementById("smooth").dispatchEvent(new Event("input")); };
hover = (i, x) => { jaxdp.view.over = jaxdp.view.charts[i]; jaxdp.view.hover = x; jaxdp.redraw(); };
"""


def train(
    folder: pathlib.Path, name: str, *more: str, devices: int = 1, interrupt: int | None = None
) -> None:
    """A run; interrupt: preempted once that update was made, and then started again."""
    env = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
    }
    command = [*TRAIN, *KEYS, "--run_dir", str(folder / name), *more]
    if interrupt is not None:
        process = subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.DEVNULL)
        while made(folder / name) < interrupt and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        process.wait()
        time.sleep(2)
    subprocess.run(command, env=env, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)


def made(run: pathlib.Path) -> int:
    """The last update that metrics.jsonl has."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        return json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    return 0


def shoot(page: Browser, name: str, most: float = 200e3) -> None:
    """What the page shows, as docs/img/NAME.png."""
    file = IMG / f"{name}.png"
    page.screenshot(file)
    with Image.open(file) as picture:  # a palette of 256 colours takes a third of the bytes
        picture.convert("RGB").quantize(256).save(file, optimize=True)
    size = file.stat().st_size
    assert size < most and not page.errors, (name, size, page.errors)
    print(f"{file.name} {size / 1e3:.0f} kB")


def reports(folder: pathlib.Path, page: Browser) -> None:
    """The page of one run, and of three."""
    train(folder, "digits", interrupt=1500)
    train(folder, "slower", "--optimizer.lr", "3e-4")
    train(folder, "sharded", "--parallel.backend", "pjit", "--parallel.zero", "2", devices=4)
    for name, (runs, (width, height), dark, script) in REPORTS.items():
        file = folder / f"{name}.html"
        directories = [str(folder / run) for run in runs]
        report = [sys.executable, "-m", "jaxdp", "report", *directories, "--out", str(file)]
        subprocess.run(report, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        page.open(file, width, height, dark, scale=2 if width < 600 else 1)
        page(STAGE)
        page(script)
        page("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        shoot(page, name)


def console(folder: pathlib.Path, page: Browser) -> None:
    """The panel on a terminal of 80 columns, as it stands a third through a run."""
    config = str(ROOT / "configs" / "python_gpt.yaml")
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        "--config",
        config,
        "--run_dir",
        "runs/python_gpt",
    ]
    command += [
        "--steps",
        "1000",
        "--log.every",
        "10",
        "--eval.every",
        "200",
        "--checkpoint.every",
        "200",
    ]

    def drawn(screen: Screen) -> bool:
        last = str(screen.shown()[-1])
        return (
            made(folder / "runs" / "python_gpt") >= 320
            and last.startswith("╰")
            and last.endswith("╯")
        )

    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    file = folder / "console.html"
    file.write_text(watch(command, drawn, env=env, cwd=folder).html())
    page.open(file)
    size = page("(p => [p.offsetWidth, p.offsetHeight])(document.querySelector('pre'))")
    page.open(file, *size, scale=2)
    shoot(page, "console", 100e3)


def tensorboard(folder: pathlib.Path, page: Browser) -> None:
    """The scalars of two runs that had the writer."""
    for name, rate in (("digits", "3e-3"), ("slower", "3e-4")):
        writers = ["--log.writers", "[TensorBoard]", "--epochs", "60", "--eval.every", "115"]
        train(folder, f"boards/{name}", *writers, "--optimizer.lr", rate)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        "boards",
        "--host",
        "127.0.0.1",
    ]
    server = subprocess.Popen(
        [*command, "--port", str(port), "--load_fast", "false"], cwd=folder,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        wait(lambda: reached(port))
        page.call(
            "Emulation.setDeviceMetricsOverride", width=1440, height=720, deviceScaleFactor=1, mobile=False
        )  # fmt: skip
        tags = "%5E(eval%7Ctrain)%2F(accuracy%7Closs%7Clr%7Cgrad)"
        page.call(
            "Page.navigate",
            url=f"http://127.0.0.1:{port}/#scalars&_smoothingWeight=0&tagFilter={tags}",
        )
        wait(lambda: page(CURVES) >= 12)  # six tags of two runs
        time.sleep(2)  # they move into their places
        shoot(page, "tensorboard")
    finally:
        server.terminate()
        server.wait()


CURVES = """(() => {
    const within = (root) => [...root.querySelectorAll("*")].reduce(
        (n, e) => n + (e.tagName == "path" && (e.getAttribute("d") ?? "").length > 60)
            + (e.shadowRoot ? within(e.shadowRoot) : 0), 0);
    return within(document);
})()"""


def reached(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port)).close()
        return True
    return False


def wait(there: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)


PICTURES = {"report": reports, "console": console, "tensorboard": tensorboard}


def main() -> None:
    IMG.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        with tempfile.TemporaryDirectory() as temporary, Browser() as page:
            PICTURES[name](pathlib.Path(temporary), page)


if __name__ == "__main__":
    main()
