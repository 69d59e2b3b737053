"""The page of rollouts in a real browser: exported and served, at three widths, with hostile text."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from orhpc.commands.cli import main
from orhpc.rundir import RunDir
from tests.browser.conftest import Probe
from tests.unit.commands.view.kit import make_run

PROBE = """
window.errors = [];
window.addEventListener("error", (event) => errors.push(String(event.message)));
window.addEventListener("load", async () => {
  const until = async (ready) => {
    for (let i = 0; i < 200 && !ready(); i += 1) await new Promise((resolve) => setTimeout(resolve, 100));
  };
  const choose = (label, value) => {
    const select = document.querySelector(`select[aria-label="${label}"]`);
    select.value = value;
    select.onchange();
  };
  await until(() => document.querySelectorAll(".reward").length === 3);
  const seen = {};
  const texts = (selector) => [...document.querySelectorAll(selector)].map((element) => element.textContent);
  seen.groups = texts("button.entry .name");
  seen.rewards = texts(".reward");
  seen.shared = texts(".shared .text");
  seen.calls = texts(".call .text");
  choose("show", "tokens");
  seen.tokens = texts("article .tokens").slice(0, 2);
  const colored = [...document.querySelectorAll("article .tokens span")];
  seen.colors = [...new Set(colored.map((one) => one.style.background))];
  document.querySelector("article .tokens span").click();
  seen.inspector = document.querySelector(".inspector").textContent;
  const text = document.querySelector('input[type="search"]');
  text.value = "30.1";
  text.oninput();
  document.querySelector("form").requestSubmit();
  await until(() => document.querySelector("nav .small").textContent.startsWith("1 found in 4 of 4"));
  seen.found = texts("button.entry .name");
  document.querySelector("button.entry").click();
  await until(() => document.querySelector("article.found"));
  seen.marked = texts("article.found .reward");
  seen.beyond = document.documentElement.scrollWidth - window.innerWidth;
  seen.errors = errors;
  const error = document.getElementById("error");
  if (error) seen.errors.push(error.textContent);
  const output = document.createElement("output");
  output.textContent = JSON.stringify(seen);
  document.body.append(output);
});
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path, prompt="Open the door. " + "averylongwordwithoutaspace" * 20)


def check(answer: str) -> None:
    seen = json.loads(answer)
    assert seen["errors"] == []
    assert seen["beyond"] <= 0
    assert seen["groups"] == ["org/env0/train/30", "org/env1/train/31"]
    assert seen["rewards"] == ["0.000", "1.000", "no reward"]
    assert seen["shared"][0].startswith("Open the door.")
    assert "</script>" in seen["calls"][0]
    assert seen["tokens"] == ["grüße 30.0", "grüße 30.1"]
    assert len(seen["colors"]) == 2  # the same difference everywhere, but none where nothing was trained
    assert "trainer −0.6250" in seen["inspector"]
    assert seen["found"] == ["1.00  org/env0/train/30"]
    assert seen["marked"] == ["1.000"]


@pytest.mark.parametrize("width", [500, 900, 1600])
def test_an_exported_page_is_drawn_and_searched(
    run: RunDir, tmp_path: Path, probe: Probe, width: int
) -> None:
    file = tmp_path / "page.html"
    assert main(["view", str(run.path), "--export", str(file)]) == 0
    # The page runs no scripts but its own, so the probe must be allowed.
    digest = base64.b64encode(hashlib.sha256(PROBE.encode()).digest()).decode()
    text = file.read_text().replace("script-src ", f"script-src 'sha256-{digest}' ")
    file.write_text(text.replace("<body>", f"<body><script>{PROBE}</script>"))
    check(probe(file.as_uri(), width))


def test_a_script_that_is_not_the_page_s_own_is_refused(run: RunDir, tmp_path: Path, probe: Probe) -> None:
    file = tmp_path / "page.html"
    assert main(["view", str(run.path), "--export", str(file)]) == 0
    intruder = "<output>refused</output><script>document.querySelector('output').textContent = 'ran'</script>"
    file.write_text(file.read_text().replace("<body>", f"<body>{intruder}"))
    assert probe(file.as_uri(), 900) == "refused"


def test_a_served_page_is_drawn_and_searched(run: RunDir, tmp_path: Path, probe: Probe) -> None:
    program = tmp_path / "serve.py"
    # The probe is added to one of the page's own scripts: the server allows no others.
    program.write_text(
        "import sys\n"
        "from orhpc.commands.cli import main\n"
        "from orhpc.commands.view import server\n"
        "asset = server.asset\n"
        f"server.asset = lambda name: ({PROBE!r} if name == 'dom.js' else '') + asset(name)\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = [sys.executable, "-u", str(program), "view", str(run.path), "--web"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            check(probe(process.stdout.readline().strip(), 900))
        finally:
            process.terminate()
