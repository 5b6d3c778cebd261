"""The network by which NCCL would reach other hosts from this process, found without forming a
group: by the rules in NCCL's guide ("Environment Variables") and of its ``src/transport/net_ib``.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

_TUNED: Final = ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")
#: File names of the plugin that NCCL loads by itself.
_PLUGIN: Final = b"libnccl-net.so"
# Cards whose verbs NCCL itself does not speak: they need a plugin.
_BY_PLUGIN: Final = "efa"


def nccl_network(environment: Mapping[str, str] = os.environ, root: Path = Path("/")) -> str:
    """Return a name of the network by which NCCL would reach other hosts from here.

    Two processes with the same name reach each other by better than NCCL's plain sockets: by
    RDMA, by a plugin or by sockets that were tuned, or within one host. Reads files below
    ``root``; opens no connection.
    """
    named = environment.get("NCCL_NET", "")
    if named.lower() not in ("", "ib", "socket"):
        return named
    plugin = environment.get("NCCL_NET_PLUGIN", "")
    if not named and plugin.lower() not in ("", "none"):
        return plugin
    if named.lower() != "socket" and (rdma := _rdma(environment, root)):
        return rdma
    if all(environment.get(name) for name in _TUNED):
        return "sockets, " + " ".join(f"{name}={environment[name]}" for name in _TUNED)
    return f"sockets of host {_host(environment, root)}"


def _rdma(environment: Mapping[str, str], root: Path) -> str:
    """Return the kind of the first RDMA port that NCCL could use; empty without any."""
    if not any((root / "dev/infiniband").glob("uverbs*")) or not _has_verbs():
        return ""
    disabled = environment.get("NCCL_IB_DISABLE", "0") not in ("", "0")
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        if "ACTIVE" not in _text(port / "state"):
            continue
        driver = (port.parents[1] / "device/driver").resolve().name
        if driver == _BY_PLUGIN:
            if _has_plugin(environment, root):
                return "EFA"
        elif not disabled:
            return "RoCE" if _text(port / "link_layer") == "Ethernet" else "InfiniBand"
    return ""


def _has_verbs() -> bool:
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return False
    return True


def _has_plugin(environment: Mapping[str, str], root: Path) -> bool:
    folders = filter(None, environment.get("LD_LIBRARY_PATH", "").split(":"))
    if any((Path(folder) / _PLUGIN.decode()).exists() for folder in folders):
        return True
    try:
        return _PLUGIN in (root / "etc/ld.so.cache").read_bytes()
    except OSError:
        return False


def _host(environment: Mapping[str, str], root: Path) -> str:
    """Return a short name of the host, equal where NCCL takes two processes to share one."""
    host = environment.get("NCCL_HOSTID") or (
        socket.gethostname() + _text(root / "proc/sys/kernel/random/boot_id")
    )
    return hashlib.sha256(host.encode()).hexdigest()[:12]


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
