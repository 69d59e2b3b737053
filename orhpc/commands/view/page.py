"""The page of ``orhpc view``: the same scripts for the server and for an exported file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib.resources import files
from typing import Any

STYLES = ("base.css", "view.css")
SCRIPTS = ("dom.js", "source.js", "rollout.js", "view.js")
_SHARED = ("base.css", "dom.js")
_VIEWPORT = '<meta name="viewport" content="width=device-width,initial-scale=1">'


def asset(name: str) -> str:
    """The content of one of :data:`STYLES` or :data:`SCRIPTS`."""
    folder = "orhpc.commands" if name in _SHARED else "orhpc.commands.view"
    return (files(folder) / "assets" / name).read_text("utf-8")


def served_page(title: str) -> str:
    """The page that asks a server for its data."""
    styles = "".join(f'<link rel="stylesheet" href="/assets/{name}">' for name in STYLES)
    scripts = "".join(f'<script src="/assets/{name}"></script>' for name in SCRIPTS)
    return _page(title, styles, f'<main id="view"></main>{scripts}')


def exported_page(title: str, data: dict[str, Any]) -> str:
    """The page with its data: it loads nothing, and runs no script but its own."""
    styles = f"<style>{''.join(asset(name) for name in STYLES)}</style>"
    scripts = [asset(name) for name in SCRIPTS]
    hashes = " ".join(f"'sha256-{_hash(script)}'" for script in scripts)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {hashes}"
    # Not readable as markup: a "</script>" in a rollout must not end the block.
    block = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    body = f'<main id="view"></main><script type="application/json" id="data">{block}</script>'
    body += "".join(f"<script>{script}</script>" for script in scripts)
    return _page(title, f'<meta http-equiv="Content-Security-Policy" content="{policy}">{styles}', body)


def _page(title: str, head: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"{_VIEWPORT}{head}</head><body>{body}</body></html>\n"
    )


def _hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
