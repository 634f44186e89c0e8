"""A headless Chromium, driven by the DevTools protocol over two pipes: standard library alone."""

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--window-size=1400,900",
    "--disable-dev-shm-usage", "--remote-debugging-pipe",
)  # fmt: skip
# Chromium reads commands from descriptor 3 and answers on 4.
LAUNCH = "import os, sys; [os.dup2(int(fd), at) for at, fd in ((3, sys.argv[1]), (4, sys.argv[2]))]; "
LAUNCH += "os.execv(sys.argv[3], sys.argv[3:])"
KEYS = {"Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowLeft": 37, "ArrowDown": 40, "ArrowUp": 38, "End": 35}
KEYS |= {"Home": 36, "PageDown": 34, "Tab": 9}


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """Sends commands and waits for their answers; what the page reports meanwhile is kept in `events`."""

    def __init__(self, commands: int, answers: int, seconds: float = 60) -> None:
        self.commands, self.answers, self.seconds = commands, answers, seconds
        self.waiting = b""
        self.number = 0
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.commands, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") != self.number:
                self.events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            else:
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + self.seconds
        while b"\0" not in self.waiting:
            ready, _, _ = select.select([self.answers], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"Chromium has not answered for {self.seconds} s")
            data = os.read(self.answers, 1 << 20)
            if not data:
                raise RuntimeError("Chromium has gone")
            self.waiting += data
        message, _, self.waiting = self.waiting.partition(b"\0")
        return json.loads(message)


@contextmanager
def launch(chromium: str, profile: Path) -> Iterator[Browser]:
    """A Chromium with a new profile, gone at the end."""
    pipes = (os.pipe(), os.pipe())
    theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (pipes[0][0], pipes[1][1])]  # out of the way of 3 and 4
    os.close(pipes[0][0])
    os.close(pipes[1][1])
    command = [sys.executable, "-c", LAUNCH, *map(str, theirs), chromium, *FLAGS, f"--user-data-dir={profile}"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, pass_fds=theirs, stdin=quiet, stdout=quiet, stderr=quiet)
    for fd in theirs:
        os.close(fd)
    browser = Browser(pipes[0][1], pipes[1][0])
    try:
        yield browser
        browser.send("Browser.close")
        process.wait(timeout=30)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(browser.commands)
        os.close(browser.answers)


class Page:
    """One tab."""

    def __init__(self, browser: Browser) -> None:
        self.browser = browser
        target = browser.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = browser.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.send(method, self.session, **parameters)

    def open(self, path: Path) -> float:
        """Load a file, and return the seconds until the report says that it is ready."""
        start = time.monotonic()
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("document.documentElement?.dataset.ready === 'true'")
        return time.monotonic() - start

    def evaluate(self, expression: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not self.evaluate(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(f"never true: {expression}")
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)})?.textContent ?? ''")

    def middle(self, selector: str) -> tuple[float, float]:
        box = self.evaluate(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)}); "
            "node.scrollIntoView({block: 'nearest'}); const box = node.getClientRects()[0]; "
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        return box[0], box[1]

    def hover(self, selector: str) -> None:
        x, y = self.middle(selector)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str) -> None:
        x, y = self.middle(selector)
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        letter = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = KEYS.get(key, ord(key) if len(key) == 1 else 0)
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **letter)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def prefer(self, scheme: str) -> None:
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions, and requests for anything but the page itself."""
        self.evaluate("1")  # what was reported before this answer is here
        found = []
        for event in self.browser.events:
            details = event.get("params", {})
            match event["method"]:
                case "Runtime.exceptionThrown":
                    found.append(json.dumps(details["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if details["type"] in ("error", "warning", "assert"):
                    found.append(json.dumps(details["args"]))
                case "Log.entryAdded" if details["entry"]["level"] in ("error", "warning"):
                    found.append(details["entry"]["text"])
                case "Network.requestWillBeSent" if not details["request"]["url"].startswith(("file:", "data:")):
                    found.append(details["request"]["url"])
        return found
