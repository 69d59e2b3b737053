"""``python -m orhpc.rollout.engines.cpu``: the server process."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import ipaddress
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import psutil
import torch
from aiohttp import web

from orhpc.errors import EXIT_CONFIG, ConfigError
from orhpc.models.forward_check import refuse_changing_positions
from orhpc.models.images import image_processor
from orhpc.process.parent import parent_of_server
from orhpc.process.ports import inherited_socket, start_listening
from orhpc.process.secrets import read_engine_key
from orhpc.process.start_gate import wait_at_gate
from orhpc.process.terminal import protect_server
from orhpc.rollout.engines.cpu.batcher import Batcher
from orhpc.rollout.engines.cpu.control import WeightControl
from orhpc.rollout.engines.cpu.model import SlotModel, load_model
from orhpc.rollout.engines.cpu.scheduler import Scheduler
from orhpc.rollout.engines.cpu.server import EngineServer, ServerInfo
from orhpc.rollout.engines.cpu.weights import WeightStore

log = logging.getLogger("orhpc.cpu_engine")

_PR_SET_PDEATHSIG = 1


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line; option names are SGLang's where it has them."""
    parser = argparse.ArgumentParser(prog="python -m orhpc.rollout.engines.cpu", description=__doc__)
    parser.add_argument("--model-path", required=True, help="Hugging Face folder")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument(
        "--api-key-file", type=Path, help="file of mode 0600 with the key that requests must send"
    )
    parser.add_argument("--listen-fd", type=int, help="inherited socket, bound to the port, to listen on")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--max-running-requests", type=int, default=32, help="requests decoded in one batch")
    parser.add_argument("--context-length", type=int, default=2048, help="maximum tokens of a request")
    parser.add_argument(
        "--mem-fraction-static", type=float, default=0.5, help="fraction of free memory for the cache"
    )
    parser.add_argument("--threads", type=int, default=0, help="compute threads; 0: all cores")
    parser.add_argument("--weight-version", default="default", help="version of the weights in the folder")
    parser.add_argument("--random-seed", type=int, default=0)
    parser.add_argument("--enable-return-routed-experts", action="store_true")
    parser.add_argument("--load-format", choices=("auto", "dummy"), default="auto")
    parser.add_argument(
        "--dist-timeout", type=float, default=600.0, help="timeout of a weight transfer in seconds"
    )
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument(
        "--no-model-check", action="store_true", help="do not compare with transformers' own forward pass"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Serve until stopped; returns the exit code."""
    args = parse_arguments(argv)
    protect_server()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _die_with_parent()
    try:
        key = read_engine_key(args.api_key_file)
        _check(args, key)
        listener = None if args.listen_fd is None else inherited_socket(args.listen_fd)
        # Only the compute thread may own an OpenMP thread team.  With a second one (this thread's) there are
        # more threads than cores, and libgomp sleeps at every barrier: steps take 1.5 times as long.
        torch.set_num_threads(1)
        _use_interface_of(args.host)
        wait_at_gate()
        model = _load(args)
        weights = WeightStore(model.model)
    except ConfigError as error:
        log.error("%s", error)
        return EXIT_CONFIG
    asyncio.run(_serve(args, key, listener, model, weights))
    return 0


def _die_with_parent() -> None:
    """End this process when its parent process ends or has ended, for whatever reason.

    The kernel also sends the signal when only the *thread* that forked ends, so the handler checks whether
    the parent process has ended.
    """
    parent = parent_of_server()

    def check(_signal: int, _frame: object) -> None:
        if os.getppid() != parent:
            os._exit(0)

    signal.signal(signal.SIGUSR1, check)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if os.getppid() != parent:
        os._exit(0)


def _check(args: argparse.Namespace, key: str | None) -> None:
    try:
        address = ipaddress.ip_address(args.host)
    except ValueError as error:
        raise ConfigError(f"--host {args.host} is not an IP address") from error
    if key is None and not address.is_loopback:
        raise ConfigError(f"--host {args.host} is not loopback, so it needs --api-key-file")
    for name in ("max_running_requests", "context_length"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    if args.context_length < 2:
        raise ConfigError("--context-length must be at least 2")
    if not 0 < args.mem_fraction_static < 1:
        raise ConfigError("--mem-fraction-static must be between 0 and 1")
    if not 0 <= args.random_seed < 1 << 31:
        raise ConfigError("--random-seed must be in 0 .. 2**31 - 1")


def _use_interface_of(host: str) -> None:
    """Let gloo use the interface of this server's address rather than that of the host name."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            return


def _load(args: argparse.Namespace) -> SlotModel:
    model = load_model(
        args.model_path,
        dtype=args.dtype,
        load_format=args.load_format,
        seed=args.random_seed,
        trust_remote_code=args.trust_remote_code,
    )
    free = psutil.virtual_memory().available * args.mem_fraction_static
    slots = min(
        args.max_running_requests, int(free // (_bytes_per_token(model.config, args) * args.context_length))
    )
    if slots < 1:
        raise ConfigError(
            f"one context of {args.context_length} tokens does not fit into {free / 2**30:.1f} GiB: "
            "lower engine.context_length"
        )
    if slots < args.max_running_requests:
        log.warning("memory fits %d contexts, not %d: other requests wait", slots, args.max_running_requests)
    refuse_changing_positions(
        model.config,
        args.context_length,
        "an engine that caches keys",
        "engine.context_length or rollout.max_total_tokens",
    )
    return SlotModel(
        model,
        slots,
        args.context_length,
        record_routes=args.enable_return_routed_experts,
        check=not args.no_model_check,
        images=image_processor(args.model_path),
    )


def _bytes_per_token(config: object, args: argparse.Namespace) -> int:
    text = config.get_text_config()  # type: ignore[attr-defined]
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    per_layer = 2 * heads * max(head, getattr(text, "qk_head_dim", 0) or 0)
    return text.num_hidden_layers * per_layer * (4 if args.dtype == "float32" else 2)


async def _serve(
    args: argparse.Namespace,
    key: str | None,
    listener: socket.socket | None,
    model: SlotModel,
    weights: WeightStore,
) -> None:
    scheduler = Scheduler(
        Batcher(model),
        weights,
        version=args.weight_version,
        threads=args.threads or os.cpu_count() or 1,
        loop=asyncio.get_running_loop(),
    )
    info = ServerInfo(
        args.model_path, args.dtype, model.slots, args.context_length, str(model.model.config.model_type)
    )
    control = WeightControl(scheduler, deadline_s=args.dist_timeout)
    server = EngineServer(scheduler, control, info, key=key, seed=args.random_seed)
    scheduler.start()
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None)
    await runner.setup()
    if listener is None:
        await web.TCPSite(runner, args.host, args.port, backlog=1024).start()
    else:
        start_listening(listener)
        await web.SockSite(runner, listener, backlog=1024).start()
    log.info("serving %s on http://%s:%d with %d slots", args.model_path, args.host, args.port, model.slots)
    # There is no state to save: SIGTERM and the parent's death end the process at once.
    await asyncio.Event().wait()


if __name__ == "__main__":
    sys.exit(main())
