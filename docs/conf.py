"""Sphinx's configuration: MyST Markdown, with the reference generated from the code at every build."""

from __future__ import annotations

import sys
from importlib.metadata import version as installed
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))

project = "orhpc"
author = "the orhpc authors"
version = release = installed("orhpc")
extensions = ["myst_parser"]
myst_enable_extensions = ["deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"orhpc {release}"
# The pages are read from a folder too, so nothing may be loaded from elsewhere.
html_theme_options = {"source_repository": "", "top_of_page_buttons": []}


def setup(app: Sphinx) -> None:
    """Write the pages of the reference before Sphinx reads its sources."""
    import generate

    generate.write(Path(__file__).parent / "reference")
