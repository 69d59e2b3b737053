"""Opens pages in headless Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable

import pytest
from playwright.sync_api import sync_playwright

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
Probe = Callable[..., str]


@pytest.fixture
def probe() -> Probe:
    """Open an address and return the text that the page wrote into its ``<output>`` element."""
    if BROWSER is None:
        assert not os.environ.get("CI"), "CI needs Chromium"
        pytest.skip("needs Chromium")

    def opened(address: str, width: int, height: int = 9000) -> str:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": width, "height": height})
            page.goto(address)
            output = page.wait_for_selector("output", state="attached", timeout=400_000)
            text = output.text_content() if output else None
            browser.close()
        assert text is not None
        return text

    return opened
