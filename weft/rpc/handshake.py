"""Why a server that listens does not answer: one TLS handshake, made to learn what fails in it.

gRPC says of a handshake that fails only that the connection was lost.
"""

from __future__ import annotations

import socket
import ssl
from typing import Final

from weft.rpc.channel import split_target
from weft.rpc.security.credentials import Credentials

_NOT_TAKEN: Final = "it does not take the certificate that it was shown, or was shown none"


def why_refused(target: str, credentials: Credentials, seconds: float = 2.0) -> str:
    """Why a channel to HOST:PORT cannot be made with ``credentials``; empty if nothing in
    the handshake says so.

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
    """Whether the server would have TLS, of which its caller knows nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        context.wrap_socket(plain, server_hostname=host).close()
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
        with context.wrap_socket(plain, server_hostname=host) as secured:
            # A server that speaks TLS 1.3 refuses a certificate after the handshake.
            secured.settimeout(min(0.5, seconds))
            if secured.recv(1):
                return ""  # its settings: it takes us
            return _NOT_TAKEN
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not trusted here: {error.verify_message}"
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).replace("_", " ").lower()
        if "alert" in reason:
            return f"{_NOT_TAKEN} ({reason})"
        return f"it does not speak TLS ({reason}): is it started with --tls-cert?"
    except TimeoutError:
        return ""
    except OSError:  # some servers close without saying why
        return _NOT_TAKEN
