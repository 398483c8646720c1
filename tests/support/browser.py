"""A headless Chromium, driven by the DevTools protocol over a pipe: no port, no driver, no package."""

import base64
import json
import os
import pathlib
import select
import shutil
import subprocess
import tempfile
import time

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FLAGS = (
    "--headless=new --no-sandbox --remote-debugging-pipe --disable-gpu --disable-dev-shm-usage --no-first-run "
    "--disable-extensions --disable-background-networking --disable-component-update --hide-scrollbars"
)


class Browser:
    """One page. errors: what its console said of errors, and exceptions that nothing caught."""

    def __init__(self):
        assert CHROMIUM is not None
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        ours, theirs = os.pipe(), os.pipe()  # they read the first, we the second
        command = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={self.profile.name}", "about:blank"]
        script = f'exec "$@" 3<&{ours[0]} 4>&{theirs[1]}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command], pass_fds=(ours[0], theirs[1]),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(ours[0])
        os.close(theirs[1])
        self.writing, self.reading = ours[1], theirs[0]
        self.buffer, self.count, self.session = b"", 0, None
        self.errors = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *args):
        os.close(self.writing)
        os.close(self.reading)
        self.process.kill()
        self.process.wait(10)
        self.profile.cleanup()

    def call(self, method, **params):
        self.count += 1
        message = {"id": self.count, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def receive(self, timeout=30):
        while b"\0" not in self.buffer:
            assert select.select([self.reading], [], [], timeout)[0], "the browser does not answer"
            piece = os.read(self.reading, 1 << 20)
            assert piece, "the browser has ended"
            self.buffer += piece
        text, self.buffer = self.buffer.split(b"\0", 1)
        message = json.loads(text)
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(
                params["exceptionDetails"].get("exception", {}).get("description", "?")
            )
        elif message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(str(params["args"]))
        return message

    def open(self, file, width=1280, height=900, dark=False, scale=1):
        """Opens a page at a size in CSS pixels, and waits until it has drawn itself."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=pathlib.Path(file).resolve().as_uri())
        deadline = time.monotonic() + 30
        while (
            self("document.readyState + document.documentElement?.dataset.ready") != "completeyes"
        ):
            assert time.monotonic() < deadline and not self.errors, self.errors
            time.sleep(0.02)
        self("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def __call__(self, expression):
        """The value of a JavaScript expression, which may be a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, file, whole=False):
        """A PNG of what is to be seen, or of the whole page."""
        params = {"format": "png"}
        if whole:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            params |= {"captureBeyondViewport": True, "clip": {**size, "scale": 1}}
        pathlib.Path(file).write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", **params)["data"])
        )
