"""Which network NCCL would use between hosts, told from what a machine has."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from weft_rl.transport import nccl_network as module
from weft_rl.transport.nccl_network import nccl_network


@pytest.fixture(autouse=True)
def verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with the library of RDMA."""
    monkeypatch.setattr(module, "_has_verbs", lambda: True)


def machine(
    root: Path, *, link: str = "InfiniBand", driver: str = "mlx5_core", state: str = "4: ACTIVE"
) -> Path:
    """Make the files of a machine with one RDMA card."""
    (root / "dev/infiniband").mkdir(parents=True)
    (root / "dev/infiniband/uverbs0").touch()
    port = root / "sys/class/infiniband/card0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text(f"{link}\n")
    (root / "drivers" / driver).mkdir(parents=True)
    card = root / "sys/class/infiniband/card0/device"
    card.mkdir()
    (card / "driver").symlink_to(root / "drivers" / driver)
    return root


def test_rdma_is_found_where_a_port_is_up(tmp_path: Path) -> None:
    assert nccl_network({}, machine(tmp_path / "ib")) == "InfiniBand"
    assert nccl_network({"NCCL_IB_DISABLE": "0"}, tmp_path / "ib") == "InfiniBand"
    assert nccl_network({}, machine(tmp_path / "roce", link="Ethernet")) == "RoCE"


@pytest.mark.parametrize("settings", [{"NCCL_IB_DISABLE": "1"}, {"NCCL_NET": "Socket"}])
def test_rdma_that_nccl_is_told_not_to_use_is_none(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    assert nccl_network(settings, machine(tmp_path)).startswith("sockets of host ")


def test_rdma_that_cannot_be_used_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert nccl_network({}, machine(tmp_path / "down", state="1: DOWN")).startswith("sockets")
    hidden = machine(tmp_path / "hidden")
    (hidden / "dev/infiniband/uverbs0").unlink()
    assert nccl_network({}, hidden).startswith("sockets")
    monkeypatch.setattr(module, "_has_verbs", lambda: False)
    assert nccl_network({}, machine(tmp_path / "without")).startswith("sockets")


def test_efa_needs_its_plugin(tmp_path: Path) -> None:
    root = machine(tmp_path / "root", driver="efa", link="Unspecified")
    assert nccl_network({}, root).startswith("sockets")
    plugin = tmp_path / "lib/libnccl-net.so"
    plugin.parent.mkdir()
    plugin.touch()
    assert nccl_network({"LD_LIBRARY_PATH": f":{plugin.parent}"}, root) == "EFA"
    (root / "etc").mkdir()
    (root / "etc/ld.so.cache").write_bytes(b"\0libnccl-net.so\0/opt/lib/libnccl-net.so\0")
    assert nccl_network({}, root) == "EFA"


def test_a_network_that_is_named_is_believed(tmp_path: Path) -> None:
    assert nccl_network({"NCCL_NET": "AWS Libfabric"}, tmp_path) == "AWS Libfabric"
    assert nccl_network({"NCCL_NET_PLUGIN": "tcpx"}, tmp_path) == "tcpx"
    assert nccl_network({"NCCL_NET_PLUGIN": "none"}, tmp_path).startswith("sockets of host")


def test_tuned_sockets_are_alike_on_every_host(tmp_path: Path) -> None:
    tuned = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
    found = nccl_network(tuned | {"NCCL_HOSTID": "a"}, tmp_path)
    assert found == nccl_network(tuned | {"NCCL_HOSTID": "b"}, tmp_path)
    assert found == "sockets, NCCL_SOCKET_NTHREADS=4 NCCL_NSOCKS_PERTHREAD=4"


def test_plain_sockets_are_of_one_host(tmp_path: Path) -> None:
    here = nccl_network({}, tmp_path)
    assert here == nccl_network({}, tmp_path)
    assert nccl_network({"NCCL_HOSTID": "a"}, tmp_path) != here
    boot = tmp_path / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("another boot\n")
    assert nccl_network({}, tmp_path) != here


def test_this_machine_is_asked_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert nccl_network()
    monkeypatch.setattr(ctypes, "CDLL", _no_library)
    assert nccl_network({}).startswith("sockets of host ")


def _no_library(name: str) -> None:
    raise OSError(name)
