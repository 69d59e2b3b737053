"""``python -m orhpc.rollout.engines.openai_server``: serve a model folder to clients of OpenAI's protocol.

Runs in a process of its own, because it needs packages that a login node lacks.  It binds loopback, requires
a key, prints how to reach the server, and ends it at Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import getpass
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orhpc.errors import EXIT_FAILED, EXIT_OK, ConfigError, OrhpcError, policy_of
from orhpc.process.ports import free_ports, is_free
from orhpc.process.terminal import guarded_output
from orhpc.rollout.engines.process import ServerProcess
from orhpc.rollout.engines.sglang_command import arguments as as_words

KEY = "ORHPC_SERVE_KEY"
"""Environment variable with the key that clients must send."""
HOST = "127.0.0.1"
_USUAL_PORT = 8000
_LEAST_KEY = 16
_READY_S = 1800.0
"""Seconds in which a server must be ready: a large model is read from a slow filesystem."""


@dataclass(frozen=True, slots=True)
class Served:
    """A model that is served."""

    name: str
    """What clients name it."""
    port: int
    key: str
    key_is_ours: bool
    """Whether the key was made here, and must be printed."""
    chats: bool
    """Whether it has a chat template."""
    backend: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C; every failure is one line on standard error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", required=True)
    parser.add_argument("--backend", choices=["sglang", "transformers"], required=True)
    parser.add_argument("--port", type=int)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--extra", type=json.loads, default={}, metavar="JSON", help="options of SGLang")
    options = parser.parse_args(arguments)
    with guarded_output():
        try:
            return _serve(options)
        except OrhpcError as error:
            print(f"orhpc: {' '.join(str(error).split())}", file=sys.stderr)
            return policy_of(error).exit_code


def _serve(options: argparse.Namespace) -> int:
    key, key_is_ours = _key()
    port = _port(options.port)
    # The link gives the model its name: transformers names a model by its path.
    work = Path(tempfile.mkdtemp(prefix="orhpc-serve-"))
    link, log = work / options.name, work / "server.log"
    link.symlink_to(options.folder.resolve())
    environment = {name: value for name, value in os.environ.items() if name != KEY}
    server = ServerProcess(HOST, port, _command(options, link, port), environment, key, str(log))
    server.what = "server"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ended = True
    try:
        print(f"loading {options.folder} (log: {log})", flush=True)
        server.start()
        asyncio.run(server.wait_ready(_READY_S))
        served = Served(options.name, port, key, key_is_ours, _chats(options.folder), options.backend)
        print("\n".join(instructions(served)), flush=True)
        while server.alive():
            time.sleep(0.5)
        print(f"orhpc: the server has ended: {server._last_log_line()}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("\nserver ended")
        ended = False
        return EXIT_OK
    finally:
        server.stop()
        if not ended:  # otherwise the log says why
            shutil.rmtree(work, ignore_errors=True)


def _key() -> tuple[str, bool]:
    """The key of the environment, or a new one; and whether it is new.

    Raises:
        ConfigError: the environment's cannot be sent in a header, or is easily guessed.
    """
    key = os.environ.get(KEY)
    if key is None:
        return secrets.token_urlsafe(24), True
    if len(key) < _LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{KEY}: at least {_LEAST_KEY} letters, digits or signs, without blanks")
    return key, False


def _port(wanted: int | None) -> int:
    """The wanted port; by default the usual one, or a free one if that is in use."""
    if wanted is None:
        return _USUAL_PORT if is_free(HOST, _USUAL_PORT) else free_ports(1, HOST)[0]
    if not is_free(HOST, wanted):
        raise ConfigError(f"--port: {wanted} is in use on this machine, or may not be used")
    return wanted


def _command(options: argparse.Namespace, link: Path, port: int) -> list[str]:
    """The server's command line, without key and socket."""
    words: dict[str, Any] = {"model_path": str(link), "host": HOST, "port": port}
    if options.trust_remote_code:
        words["trust_remote_code"] = True
    if options.backend == "sglang":
        words |= {"served_model_name": options.name, "tp_size": options.tp}
        words["context_length"] = options.context_length
        words |= {name.replace("-", "_"): value for name, value in options.extra.items()}
    module = f"orhpc.rollout.engines.{options.backend}_server"
    return [sys.executable, "-m", module, *as_words(words)]


def _chats(folder: Path) -> bool:
    """Whether the model's folder has a chat template."""
    try:
        inside = '"chat_template"' in (folder / "tokenizer_config.json").read_text(errors="replace")
    except OSError:
        inside = False
    return inside or (folder / "chat_template.jinja").is_file()


def instructions(served: Served) -> list[str]:
    """How to reach the server: the key, a tunnel, and an example for curl and for Python."""
    url = f"http://{HOST}:{served.port}/v1"
    where = f"{getpass.getuser()}@{socket.gethostname()}"
    if served.chats:
        path, body = "chat/completions", '"messages": [{"role": "user", "content": "Hello"}]'
        call = 'client.chat.completions.create(\n    messages=[{"role": "user", "content": "Hello"}],'
        answer = "answer.choices[0].message.content"
    else:
        path, body = "completions", '"prompt": "Hello"'
        call, answer = 'client.completions.create(\n    prompt="Hello",', "answer.choices[0].text"
    key = f"export {KEY}={served.key}" if served.key_is_ours else f"the key is that of {KEY}"
    return [
        f"serving {served.name} on {url} ({served.backend}); Ctrl-C ends it",
        "",
        "# the key, which every request needs; it is shown only here" if served.key_is_ours else f"# {key}",
        *([key] if served.key_is_ours else []),
        "# from your own machine, in another terminal (on a node of a job: add -J LOGIN_NODE)",
        f"ssh -N -L {served.port}:{HOST}:{served.port} {where}",
        "# curl",
        f'curl {url}/{path} -H "Authorization: Bearer ${KEY}" -H "Content-Type: application/json" \\',
        f"""  -d '{{"model": "{served.name}", {body}, "max_tokens": 64}}'""",
        "# Python (pip install openai)",
        "import os",
        "from openai import OpenAI",
        f'client = OpenAI(base_url="{url}", api_key=os.environ["{KEY}"])',
        f'answer = {call} model="{served.name}", max_tokens=64\n)',
        f"print({answer})",
    ]


if __name__ == "__main__":
    sys.exit(main())
