"""Process groups of the trainer: rendezvous of the ranks, and typed errors.

Ranks meet in a store.  torch's network store has no authentication: any process that can connect to it can
read and change what the ranks publish there.  Ranks of one node therefore use a file that only this user can
open.  Across nodes, and with engines that receive broadcasts (SGLang supports only the network store), the
store listens only on the job's address.  Other users of the nodes and of their network can still connect to
it, and to the sockets that gloo and NCCL open on that address: they can disturb a run, or read weights while
a group forms.  Where that matters, nodes and network must be exclusive to the job.
"""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from orhpc.errors import InfraError, OrhpcError, OutOfMemory
from orhpc.process.ports import start_listening
from orhpc.train.memory_errors import exhausted_memory
from orhpc.train.stopping import allow_collectives

_TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
_FileStore = dist.FileStore  # pyright: ignore[reportPrivateImportUsage]


def own_address_towards(address: str) -> str:
    """Return this machine's address on the route to ``address`` (no packet is sent)."""
    family = socket.getaddrinfo(address, None, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return probe.getsockname()[0]


def use_interface_towards(address: str) -> None:
    """Make gloo and NCCL's bootstrap use the interface on the route to ``address``.

    By default gloo resolves the host's name, which on many clusters is a loopback address or another
    network.  Variables that are already set are kept.
    """
    own = own_address_towards(address)
    for interface, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == own for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
            return


def bound(address: str, port: int) -> socket.socket:
    """Return a socket bound to ``address:port`` only.  Raises OSError when the port is in use."""
    family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
    except OSError:
        listener.close()
        raise
    return listener


def meeting_file() -> str:
    """Return the path of a rendezvous file for ranks of this node, in a new folder private to this user."""
    return str(Path(tempfile.mkdtemp(prefix="orhpc-ranks-")) / "store")


def hosted_store(
    address: str, listener: socket.socket, world_size: int, timeout: timedelta, *, wait: bool
) -> dist.Store:  # pyright: ignore[reportPrivateImportUsage]
    """Host a key-value store on ``listener``, a socket bound to ``address``; the store takes it over."""
    start_listening(listener)
    # The store closes the descriptor.
    return _TCPStore(
        address,
        listener.getsockname()[1],
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=wait,
        master_listen_fd=listener.detach(),
    )


def join_default_group(
    device: torch.device,
    address: str,
    meeting: int | str,
    rank: int,
    world_size: int,
    timeout_s: float,
    listener: socket.socket | None = None,
) -> None:
    """Make this process rank ``rank`` of the trainer.

    ``meeting``: the port on which rank 0 hosts the store, or the store's file when all ranks share a node.
    ``listener``: on rank 0, a socket already bound to ``address`` and that port.
    On CUDA, device tensors go through NCCL and host tensors (small agreements) through gloo.
    Raises :class:`~orhpc.errors.InfraError` after ``timeout_s``.
    """
    allow_collectives()
    timeout = timedelta(seconds=timeout_s)
    use_interface_towards(address)
    if device.type == "cuda":
        # With cuMem allocation, broadcasts to SGLang's engines fail with an unhandled CUDA error and hang.
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
    with typed_failures("the trainer's process group did not come up"):
        if isinstance(meeting, str):
            store = _FileStore(meeting, world_size)
            store.set_timeout(timeout)
        elif rank == 0:
            listener = listener or bound(address, meeting)
            store = hosted_store(address, listener, world_size, timeout, wait=False)
        else:
            store = _TCPStore(address, meeting, world_size, is_master=False, timeout=timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )


@contextlib.contextmanager
def typed_failures(what: str) -> Iterator[None]:
    """Convert torch's memory and communication errors to the project's; other errors pass unchanged."""
    try:
        yield
    except OrhpcError:
        raise
    except Exception as error:
        if exhausted_memory(error):
            raise OutOfMemory(f"{what}: {_one_line(error)}") from error
        if _of_communication(error):
            raise InfraError(f"{what}: {_one_line(error)}") from error
        raise


def _of_communication(error: Exception) -> bool:
    if isinstance(error, dist.DistError | OSError):
        return True
    signs = ("gloo", "Timed out", "NCCL", "Connection")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
