"""The built site in a real Chromium without a window, for tests and for the committed pictures.

    python docs/site/browser.py                 says whether one can be started here
    python docs/site/browser.py SITE FOLDER     renews the pictures: FOLDER/desktop-light.png ...

Needs selenium, and Debian's packages chromium and chromium-driver.
"""

from __future__ import annotations

import functools
import http.server
import io
import json
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHROMIUM, DRIVER = "chromium", "chromedriver"
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage",
)  # fmt: skip
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
SCHEMES = ("light", "dark")


def lacks() -> str:
    """Why no browser can be started here; empty where one can."""
    missing = [name for name in (CHROMIUM, DRIVER) if shutil.which(name) is None]
    try:
        import selenium  # noqa: F401
    except ImportError:
        missing.append("selenium")
    return f"the site's browser test needs {', '.join(missing)}" if missing else ""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_) -> None:
        pass


@contextmanager
def server(site: Path) -> Iterator[str]:
    """The address at which this folder is served on this machine."""
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as one:
        threading.Thread(target=one.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{one.server_address[1]}/"
        one.shutdown()


@contextmanager
def chromium() -> Iterator:
    """A browser with a profile of its own."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which(CHROMIUM)
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
        for option in (*OPTIONS, f"--user-data-dir={profile}"):
            options.add_argument(option)
        driver = webdriver.Chrome(options=options, service=Service(shutil.which(DRIVER)))
        try:
            yield driver
        finally:
            driver.quit()


def look(driver, size: str, scheme: str) -> None:
    """Show pages as on such a screen, to a reader whose system is light or dark."""
    width, height = SIZES[size]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def requests(driver) -> set[str]:
    """What the browser has asked for since the last call, but for what a page has within."""
    urls = set()
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            urls.add(message["params"]["request"]["url"])
    return {url for url in urls if not url.startswith(("data:", "blob:", "about:", "chrome"))}


def picture(driver) -> bytes:
    """What is seen now, as a PNG of few colours where Pillow is there."""
    data = driver.get_screenshot_as_png()
    try:
        from PIL import Image
    except ImportError:
        return data
    small = io.BytesIO()
    image = Image.open(io.BytesIO(data)).convert("RGB")
    image.quantize(64).save(small, "PNG", optimize=True)
    return small.getvalue()


def main(site: str = "", folder: str = "") -> None:
    if lacks():
        raise SystemExit(lacks())
    if not site:
        return
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with server(Path(site)) as address, chromium() as driver:
        for size in SIZES:
            for scheme in SCHEMES:
                look(driver, size, scheme)
                driver.get(address)
                (target / f"{size}-{scheme}.png").write_bytes(picture(driver))


if __name__ == "__main__":
    main(*sys.argv[1:])
