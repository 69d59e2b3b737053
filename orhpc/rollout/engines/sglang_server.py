"""``python -m orhpc.rollout.engines.sglang_server``: an SGLang server that keeps its API key secret.

SGLang reads its key from the command line, which is visible to every user of the node, and logs all its
settings.  This process reads the key from a file of mode 0600, keeps it out of the log, checks the options
against the installed SGLang before a GPU is used, and then runs the server.  It checks the key itself before
a request reaches SGLang, because SGLang does not check some paths; and it listens on an inherited socket.

Communication among SGLang's own processes remains open to other users of the node and of the network: the
rendezvous store (``nccl_port``, ``dist_init_addr``), gloo and NCCL use no key.  Interference ends the
engine, and the run restarts it.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib.metadata
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from orhpc.errors import EXIT_CONFIG, ConfigError
from orhpc.models.families import FAMILIES
from orhpc.process.keyed_server import require_key_of_uvicorn
from orhpc.process.parent import parent_of_server
from orhpc.process.ports import inherited_socket
from orhpc.process.secrets import read_engine_key
from orhpc.process.terminal import protect_server
from orhpc.rollout.engines.sglang_command import RENAMED
from orhpc.rollout.engines.sglang_images import forget_images
from orhpc.rollout.engines.sglang_imports import hide_megatron, wait_before_loading_models
from orhpc.rollout.engines.sglang_models import repair_models
from orhpc.rollout.engines.sglang_pause import shorten_pauses
from orhpc.rollout.engines.sglang_routes import allocate_routes_when_used, pack_routes
from orhpc.rollout.engines.start_log import BEGIN

_WATCH_S = 1.0
_SAFE_STARLETTE = Version("1.0.1")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stopped; an invalid option or key file prints one line and returns exit code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    protect_server()
    hide_megatron()
    shorten_pauses()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        own, arguments = split_arguments(arguments)
        if own.listen_fd is not None:  # a part of a run, whose log is read
            logging.info(BEGIN)
        key = read_engine_key(own.api_key_file)
        listener = None if own.listen_fd is None else inherited_socket(own.listen_fd)
        end_with_parent()
        server_args = parse(arguments, key)
        refuse_old_starlette()
        refuse_keyless(server_args)
        refuse_misread_models(Path(server_args.model_path))
        require_key_of_uvicorn(key, listener, open_health=True)
    except ConfigError as error:
        print(f"orhpc: {error}", file=sys.stderr, flush=True)
        return EXIT_CONFIG
    from sglang.launch_server import run_server  # pyright: ignore[reportMissingImports]
    from sglang.srt.utils import kill_process_tree  # pyright: ignore[reportMissingImports]

    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
    return 0


def split_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Separate our own ``--api-key-file`` and ``--listen-fd`` from SGLang's arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--api-key-file", type=Path)
    parser.add_argument("--listen-fd", type=int)
    return parser.parse_known_args(arguments)


def refuse_old_starlette() -> None:
    """Raises ConfigError for a Starlette version with which SGLang's key check can be bypassed.

    Before 1.0.1, a request's ``url`` contains its unchecked Host header, and SGLang uses that URL's path.
    """
    found = importlib.metadata.version("starlette")
    if Version(found) < _SAFE_STARLETTE:
        cure = f"pip install 'starlette>={_SAFE_STARLETTE}'"
        raise ConfigError(f"starlette {found} lets requests bypass the engine's key: {cure}")


def refuse_keyless(server_args: Any) -> None:
    """Raises ConfigError for SGLang servers that do not check the key."""
    if getattr(server_args, "enable_http2", False):
        raise ConfigError("engine.extra.enable_http2: remove it; that server does not check the key")
    if getattr(server_args, "tokenizer_worker_num", 1) > 1:
        raise ConfigError("engine.extra.tokenizer_worker_num: set it to 1; with more, the key is not checked")


def parse(arguments: Sequence[str], key: str | None) -> Any:
    """SGLang's settings from its own parser, including the key.

    Raises ConfigError for an option or a value that the installed release does not support.
    """
    try:
        import sglang  # pyright: ignore[reportMissingImports]
        from sglang.srt.plugins import load_plugins  # pyright: ignore[reportMissingImports]
        from sglang.srt.server_args import ServerArgs  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError(f"engine.backend: sglang cannot be imported here: {error}") from error
    load_plugins()
    parser = argparse.ArgumentParser(prog="sglang", exit_on_error=False, allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    arguments = resolve_options(arguments, set(parser._option_string_actions), f"SGLang {sglang.__version__}")
    try:
        with contextlib.redirect_stderr(None):
            raw = parser.parse_args(arguments)
    except (argparse.ArgumentError, SystemExit) as error:
        raise ConfigError(f"engine: SGLang {sglang.__version__} refuses its options: {error}") from error
    if key is not None:
        raw.api_key = key
    try:
        return ServerArgs.from_cli_args(raw)
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"engine: SGLang {sglang.__version__}: {' '.join(str(error).split())}") from error


def refuse_misread_models(folder: Path) -> None:
    """Raises ConfigError for a model that SGLang (0.5.16, 0.5.23) would silently load incorrectly."""
    file = folder / "config.json"
    if not file.exists():
        return
    config = json.loads(file.read_text())
    family = FAMILIES.get(str(config.get("model_type")))
    if family is not None and (misread := family.sglang_misreads(config)):
        raise ConfigError(f"model.path: {folder} has {misread}")


def resolve_options(arguments: Sequence[str], known: set[str], who: str) -> list[str]:
    """The arguments with options renamed to match ``known``; raises ConfigError for an unknown option."""
    result: list[str] = []
    for word in arguments:
        option, equals, value = word.partition("=")
        if not option.startswith("--"):
            result.append(word)
            continue
        if option not in known:
            option = _resolve_name(option, known, who)
        result.append(option + equals + value)
    return result


def _resolve_name(option: str, known: set[str], who: str) -> str:
    for other in RENAMED.get(option.removeprefix("--").replace("-", "_"), ()):
        if (spelled := f"--{other.replace('_', '-')}") in known:
            return spelled
    close = difflib.get_close_matches(option, known, n=1)
    hint = f"; did you mean {close[0].removeprefix('--').replace('-', '_')}?" if close else ""
    name = option.removeprefix("--").replace("-", "_")
    raise ConfigError(f"engine.extra.{name}: {who} has no option {option}{hint}")


def end_with_parent() -> None:
    """End this process when its parent process ends or has ended, for whatever reason."""
    parent = parent_of_server()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH_S)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10 * _WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
if __name__ == "__mp_main__":  # SGLang's own processes, which multiprocessing has import this one's program
    protect_server()
    hide_megatron()
    allocate_routes_when_used()
    pack_routes()
    repair_models()
    forget_images()
    wait_before_loading_models()
