"""Checks of the connection to the coordinator, layer by layer; the first failure ends them."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator

import grpc

from weft_rl import __version__
from weft_rl.cli.doctor.certificates import expiry, first_of
from weft_rl.cli.doctor.finding import Finding, fail, ok, warn
from weft_rl.contract.errors import NotAllowedError, UnauthenticatedError, WeftError
from weft_rl.rpc.bounds import PROTOCOL_REVISION
from weft_rl.rpc.channel import open_channel, split_target
from weft_rl.rpc.handshake import why_refused
from weft_rl.rpc.security.credentials import Credentials, is_loopback
from weft_rl.rpc.status import error_from_rpc
from weft_rl.v1 import inspect_pb2 as pb
from weft_rl.v1.inspect_pb2_grpc import InspectServiceStub

_SECONDS = 3.0
#: Difference of clocks that is worth a warning.
_CLOCK_SECONDS = 2.0


def check_own(credentials: Credentials) -> Iterator[Finding]:
    """Check this process's own credentials."""
    if credentials.tls_ca:
        try:
            ssl.create_default_context(cafile=credentials.tls_ca)
        except (OSError, ssl.SSLError) as error:
            yield fail("tls_ca", f"{credentials.tls_ca}: {_why(error)}", "name a PEM file")
    if credentials.tls_cert:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(
                credentials.tls_cert, credentials.tls_key
            )
            der = first_of(credentials.tls_cert)
        except (OSError, ssl.SSLError, ValueError) as error:
            what = f"{credentials.tls_cert}, {credentials.tls_key}: {_why(error)}"
            yield fail("own_certificate", what, "name a chain and the key that belongs to it")
        else:
            yield expiry("own_certificate", "our certificate", der)


def check_connection(target: str, credentials: Credentials) -> Iterator[Finding]:
    """Check the connection to the coordinator, from its name to its answer."""
    host, port = split_target(target)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        advice = "check the name (--coordinator) and this machine's DNS"
        yield fail("dns", f"{host} is not known here: {error.strerror}", advice)
        return
    addresses = ", ".join(dict.fromkeys(str(entry[4][0]) for entry in found))
    yield ok("dns", f"{host} is {addresses}" if addresses != host else f"{host} is an address")
    began = time.monotonic()
    try:
        socket.create_connection((host, port), timeout=_SECONDS).close()
    except OSError as error:
        why = f"no answer in {_SECONDS:.0f} s" if isinstance(error, TimeoutError) else _why(error)
        yield fail("tcp", f"{target}: {why}", _why_not_connected(error))
        return
    yield ok("tcp", f"{target} accepts connections ({(time.monotonic() - began) * 1e3:.1f} ms)")
    tls = list(_check_tls(target, credentials))
    yield from tls
    if not any(finding.level == "fail" for finding in tls):
        yield from _check_answer(target, credentials)


def _why_not_connected(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "start weft coordinator there, and check its --listen: 127.0.0.1 is local only"
    return "look for a firewall or a network policy, and check that this network reaches it"


def _check_tls(target: str, credentials: Credentials) -> Iterator[Finding]:
    why = why_refused(target, credentials, _SECONDS)
    der, protocol = _certificate_of(target) if credentials.has_tls else (b"", "")
    if why:
        yield fail("tls", f"the handshake fails: {why}", _handshake_advice(credentials, why))
    elif credentials.has_tls:
        shown = "a certificate is shown" if credentials.tls_cert else "no certificate is shown"
        yield ok("tls", f"{protocol or 'TLS'}; the server's certificate is trusted; {shown}")
    elif is_loopback(target):
        yield ok("tls", "none, on this machine's loopback")
    else:
        yield warn(
            "tls",
            f"none: anyone between here and {target} can read and change the traffic",
            "start the coordinator with --tls-cert, --tls-key and --access, and name --tls-ca here",
        )
    if der:
        yield expiry("server_certificate", "the server's certificate", der)


def _handshake_advice(credentials: Credentials, why: str) -> str:
    if not credentials.has_tls:
        return "name --tls-ca, and --tls-cert and --tls-key where the coordinator asks for one"
    if "not trusted" in why:
        return "check --tls-ca, and that the server's certificate names this host"
    return "check --tls-cert and --tls-key, and --tls-ca of the coordinator"


def _certificate_of(target: str) -> tuple[bytes, str]:
    """Return a server's certificate, trusted or not, and the version of TLS."""
    host, port = split_target(target)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, port), timeout=_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as secured,
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
        yield fail("access", error.message, advice)
        return
    except NotAllowedError as error:
        advice = "enough for a trainer or a replica; listings need the role inspect"
        yield warn("access", error.message, advice)
        return
    except WeftError as error:
        advice = "check that a coordinator listens there, and look at its log"
        yield fail("access", f"{error.message} ({error.reason})", advice)
        return
    ended = time.time()
    taken = f"{shown} is accepted" if anything else "callers are not identified"
    yield ok("access", f"GetPool is answered in {(ended - began) * 1e3:.0f} ms; {taken}")
    yield _compare_versions(pool)
    if pool.HasField("time"):
        yield _compare_clocks(pool.time.ToNanoseconds() / 1e9, began, ended)
    ready = sum(
        count.num_replicas for count in pool.replica_counts if count.state == pb.REPLICA_STATE_READY
    )
    total = sum(count.num_replicas for count in pool.replica_counts)
    says = f"{ready} of {total} replicas are ready"
    if ready == total and total:
        yield ok("pool", says)
    else:
        advice = "weft status says why" if total else "start a replica: weft rollout -- MODEL"
        yield warn("pool", says, advice)


def _compare_versions(pool: pb.GetPoolResponse) -> Finding:
    ours = f"weft {__version__}, revision {PROTOCOL_REVISION}"
    theirs = f"weft {pool.weft_version or '?'}, revision {pool.protocol_revision or '?'}"
    if pool.protocol_revision not in (0, PROTOCOL_REVISION):
        advice = "install the same release at both ends: until then pushes and replicas are refused"
        return fail("versions", f"here {ours}; there {theirs}", advice)
    if pool.weft_version != __version__:
        advice = "they are compatible; upgrade the older one when it suits"
        return warn("versions", f"here {ours}; there {theirs}", advice)
    return ok("versions", f"{ours} at both ends")


def _compare_clocks(theirs: float, began: float, ended: float) -> Finding:
    """Compare the coordinator's clock, read between ``began`` and ``ended``, with ours."""
    off = theirs - min(max(theirs, began), ended)
    if abs(off) < _CLOCK_SECONDS:
        return ok(
            "clock", f"the coordinator's differs by less than {abs(off) + ended - began:.1g} s"
        )
    return warn(
        "clock",
        f"the coordinator's is {abs(off):.1f} s {'ahead of' if off > 0 else 'behind'} ours",
        "synchronise both by NTP: certificates and logs depend on it (leases and deadlines do not)",
    )


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error)
