"""Makes the pictures of the documentation, in docs/img, from runs of a minute: `python docs/screenshots.py`."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from PIL import Image  # noqa: E402

from browser import Browser  # noqa: E402

IMG = ROOT / "docs" / "img"
TRAIN = [sys.executable, str(ROOT / "train.py"), "--config", str(ROOT / "configs" / "digits.yaml")]
KEYS = ["--epochs", "180", "--eval.every", "230", "--checkpoint.every", "690", "--log.every", "10"]
# name: (runs, width and height in CSS pixels, dark, JavaScript ahead of the picture)
REPORTS = {
    "report_light": (["digits"], (1280, 1560), False, "0"),
    "report_dark": (["digits"], (1280, 1560), True, "0"),
    "report_runs": (["digits", "slower", "sharded"], (1280, 1150), False, "smooth(0.9), hover(0, 1500)"),
    "report_phone_light": (["digits"], (390, 844), False, "0"),
    "report_phone_dark": (["digits"], (390, 844), True, "scrollTo(0, 560)"),
}
STAGE = """
smooth = (s) => { document.getElementById("smooth").value = s; document.getElementById("smooth").oninput?.();
    document.getElementById("smooth").dispatchEvent(new Event("input")); };
hover = (i, x) => { jaxdp.view.over = jaxdp.view.charts[i]; jaxdp.view.hover = x; jaxdp.redraw(); };
"""


def train(folder: pathlib.Path, name: str, *more: str, devices: int = 1, interrupt: int | None = None) -> None:
    """A run; interrupt: preempted once that update was made, and then started again."""
    env = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}
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


def main() -> None:
    IMG.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, Browser() as page:
        folder = pathlib.Path(temporary)
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
            page.screenshot(IMG / f"{name}.png")
            with Image.open(IMG / f"{name}.png") as picture:  # a palette of 256 colours takes a third of the bytes
                picture.convert("RGB").quantize(256).save(IMG / f"{name}.png", optimize=True)
            size = (IMG / f"{name}.png").stat().st_size
            assert size < 200e3 and not page.errors, (name, size, page.errors)
            print(f"{name}.png {size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
