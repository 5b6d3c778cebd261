"""Diagnosis of a server that listens and does not answer, by one TLS handshake.

When a handshake fails, gRPC says only that the connection was lost.
"""

from __future__ import annotations

import socket
import ssl
from typing import Final

from weft_rl.ipc.connection import over_tls
from weft_rl.rpc.channel import split_target
from weft_rl.rpc.security.credentials import Credentials

_SIDES: Final = (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
#: Most flights of one handshake, either way.
_MAX_FLIGHTS: Final = 4


def why_refused(target: str, credentials: Credentials, seconds: float = 2.0) -> str:
    """Return why a channel to HOST:PORT cannot be made with ``credentials``.

    Empty if nothing in the handshake says so.

    Args:
        seconds: Longest that connecting, and each answer, may take.
    """
    host, port = split_target(target)
    try:
        with socket.create_connection((host, port), timeout=seconds) as plain:
            if not credentials.has_tls:
                return _why_not_plain(plain, host)
            return _why_not_tls(plain, host, credentials, seconds)
    except OSError:
        return ""


def _why_not_plain(plain: socket.socket, host: str) -> str:
    """Return why a plaintext caller is refused, if the server speaks TLS only."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        over_tls(context, plain, server_hostname=host).close()
    except ssl.SSLError as error:
        if "alert" not in (error.reason or "").lower():
            return ""
    except OSError:
        return ""
    return "it speaks TLS only: name the certificate of who signed its own (--tls-ca, tls=)"


def _why_not_tls(plain: socket.socket, host: str, credentials: Credentials, seconds: float) -> str:
    try:
        context = ssl.create_default_context(cafile=credentials.tls_ca or None)
        if credentials.tls_cert:
            context.load_cert_chain(credentials.tls_cert, credentials.tls_key)
        context.set_alpn_protocols(["h2"])
    except (OSError, ssl.SSLError) as error:
        return f"its certificates cannot be checked: {error}"
    try:
        with over_tls(context, plain, server_hostname=host) as secured:
            # A server that speaks TLS 1.3 refuses a certificate after the handshake.
            secured.settimeout(min(0.5, seconds))
            if secured.recv(1):
                return ""  # its settings: it takes us
            return _why_not_taken(credentials)
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not trusted here: {error.verify_message}"
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).replace("_", " ").lower()
        if "alert" in reason:
            return _why_not_taken(credentials, f" ({reason})")
        return f"it does not speak TLS ({reason}): is it started with --tls-cert?"
    except TimeoutError:
        return ""
    except OSError:  # some servers close without saying why
        return _why_not_taken(credentials)


def _why_not_taken(credentials: Credentials, said: str = "") -> str:
    """Return why a server does not take the certificate, checked here as the server does it."""
    if not credentials.tls_cert:
        return "it asks for a certificate, and was shown none: give --tls-cert and --tls-key"
    try:
        message = _fault_of_own(credentials)
    except (OSError, ssl.SSLError):
        message = ""
    if message:
        return f"it does not take the certificate {credentials.tls_cert}: {message}"
    return f"it does not take the certificate {credentials.tls_cert}{said}"


def _fault_of_own(credentials: Credentials) -> str:
    """Return the error of a server that trusts ``tls_ca`` about our certificate; empty if none."""
    server, client = (ssl.SSLContext(side) for side in _SIDES)
    server.verify_mode = ssl.CERT_REQUIRED
    if credentials.tls_ca:
        server.load_verify_locations(cafile=credentials.tls_ca)
    else:
        server.load_default_certs(ssl.Purpose.CLIENT_AUTH)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    for context in (server, client):
        context.load_cert_chain(credentials.tls_cert, credentials.tls_key)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(_MAX_FLIGHTS):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return str(error.verify_message)
    return ""
