"""``python -m orhpc.rollout.engines.transformers_server``: an OpenAI-compatible server of transformers.

It is ``transformers serve`` for one model folder, behind our key and on an inherited socket.  It runs on any
GPU or CPU, and answers slower than SGLang.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from orhpc.errors import EXIT_CONFIG, ConfigError
from orhpc.process.keyed_server import require_key_of_uvicorn
from orhpc.process.ports import inherited_socket
from orhpc.process.secrets import read_engine_key
from orhpc.process.terminal import protect_server
from orhpc.rollout.engines.sglang_server import end_with_parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until stopped; what cannot be served prints one line and returns exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--api-key-file", type=Path)
    parser.add_argument("--listen-fd", type=int)
    options = parser.parse_args(arguments)
    protect_server()
    try:
        key = read_engine_key(options.api_key_file)
        listener = None if options.listen_fd is None else inherited_socket(options.listen_fd)
        end_with_parent()
        serve = _server_class(options.model_path.name)
        require_key_of_uvicorn(key, listener, open_health=True)
    except ConfigError as error:
        print(f"orhpc: {error}", file=sys.stderr, flush=True)
        return EXIT_CONFIG
    # The name by which clients ask for the model is the folder's, relative to here.
    os.chdir(options.model_path.parent)
    serve(
        force_model=options.model_path.name,
        host=options.host,
        port=options.port,
        device=options.device,
        trust_remote_code=options.trust_remote_code,
    )
    return 0


def _server_class(name: str) -> type:
    """The program behind ``transformers serve``, which lists only the model of this name.

    Raises:
        ConfigError: its packages are not installed.
    """
    try:
        from transformers.cli.serve import Serve
        from transformers.cli.serving.model_manager import ModelManager
        from transformers.utils.import_utils import is_serve_available
        from uvicorn.config import LOGGING_CONFIG
    except ImportError as error:
        raise ConfigError(f"transformers serve: {error}; pip install 'orhpc[serve]'") from None
    if not is_serve_available():
        raise ConfigError("transformers serve needs more packages: pip install 'orhpc[serve]'")
    entry = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "orhpc"}
    # Its own list is of all models in the hub's cache, and fails where there is no cache.
    setattr(ModelManager, "get_gen_models", staticmethod(lambda cache_dir=None: [entry]))  # noqa: B010
    # uvicorn's formatter of the access log cannot take records from which secrets were removed.
    plain = {"()": "uvicorn.logging.DefaultFormatter", "fmt": "%(asctime)s %(levelname)s %(message)s"}
    LOGGING_CONFIG["formatters"]["access"] = plain
    return Serve


if __name__ == "__main__":
    sys.exit(main())
