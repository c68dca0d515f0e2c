"""A headless Chromium, driven through chromedriver's own protocol (W3C WebDriver), which is HTTP.

The few commands that the tests need are shorter than a library for all of them.
"""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless",
    "--no-sandbox",  # Chromium refuses to run as root with it
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",  # of the browser itself: it is not the page's
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
]
WAIT_S = 240.0  # a machine may be busy


def missing() -> str | None:
    """What there is to install, or None."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium and shutil.which("chromedriver"):
        return None
    return "no Chromium with chromedriver: apt-get install chromium chromium-driver"


class Browser:
    """One window."""

    def __init__(self, address: str, profile: Path) -> None:
        self.address, self.session = address, ""
        options = {
            "binary": shutil.which("chromium") or shutil.which("google-chrome"),
            "args": [*FLAGS, f"--user-data-dir={profile}"],
        }
        logs = {"browser": "ALL", "performance": "ALL"}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": logs}
        made = self.call("POST", "/session", capabilities={"alwaysMatch": wanted})
        self.session = f"/session/{made['sessionId']}"
        self.open("about:blank")  # instead of the start page, which has requests of its own
        self.requests()

    def call(self, method: str, path: str, **body: Any) -> Any:
        """One command of the protocol; its value. Raises AssertionError with the driver's words."""
        request = urllib.request.Request(
            self.address + self.session + path,
            data=json.dumps(body).encode() if method == "POST" else None,
            headers={"Content-Type": "application/json"},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def open(self, address: str) -> None:
        self.call("POST", "/url", url=address)

    def run(self, script: str, *arguments: Any) -> Any:
        """Run the body of a JavaScript function in the page, and return its value."""
        return self.call("POST", "/execute/sync", script=script, args=list(arguments))

    def wait(self, script: str) -> None:
        """Wait until an expression is true in the page."""
        end = time.monotonic() + WAIT_S
        while not self.run(f"return Boolean({script})"):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.05)

    def resize(self, width: int, height: int) -> None:
        """Set the size of the page itself, which may be narrower than a window can be."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.devtools("Emulation.setDeviceMetricsOverride", **size)

    def devtools(self, command: str, **parameters: Any) -> Any:
        return self.call("POST", "/goog/cdp/execute", cmd=command, params=parameters)

    def move_to(self, x: float, y: float) -> None:
        """Move the mouse to a point of the window."""
        move = {"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)}
        pointer = {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}}
        self.call("POST", "/actions", actions=[{**pointer, "actions": [move]}])

    def console(self) -> list[str]:
        """The warnings and errors in the page's console since the last call."""
        entries = self.call("POST", "/se/log", type="browser")
        return [entry["message"] for entry in entries if entry["level"] not in ("INFO", "DEBUG")]

    def requests(self) -> list[str]:
        """The addresses that the page has asked for since the last call."""
        entries = self.call("POST", "/se/log", type="performance")
        said = [json.loads(entry["message"])["message"] for entry in entries]
        sent = [x["params"] for x in said if x["method"] == "Network.requestWillBeSent"]
        return [x["request"]["url"] for x in sent]

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """A picture of the whole page, or of what a window shows of it."""
        shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A window of a browser of its own; `profile` is an empty folder."""
    environment = {name: x for name, x in os.environ.items() if "proxy" not in name.lower()}
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert driver.stdout
        line = next(line for line in driver.stdout if "started successfully on port" in line)
        port = line.split("port")[-1].strip(" .\n")
        window = Browser(f"http://127.0.0.1:{port}", profile)
        try:
            yield window
        finally:
            window.call("DELETE", "")
    finally:
        driver.terminate()
        driver.wait()


def main() -> None:
    """`python -m tests.browser PAGE WIDTH PICTURE`: what a page shows first, as a picture."""
    page, width, picture = sys.argv[1:]
    with tempfile.TemporaryDirectory() as profile, browser(Path(profile)) as window:
        window.resize(int(width), int(width) * 3 // 4)
        window.open(Path(page).resolve().as_uri())
        window.wait("document.body.dataset.ready")
        time.sleep(1)  # the curves are drawn after they are known
        window.picture(Path(picture), whole=False)


if __name__ == "__main__":
    main()
