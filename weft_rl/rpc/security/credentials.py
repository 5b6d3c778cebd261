"""Credentials of a process: certificates that it shows and trusts, in files, and a token.

Files are named, never read ahead. Each handshake of a server, and each new connection of a
client, uses what they hold then. So certificates can be rotated under a running process.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import ssl
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

import grpc

from weft_rl.contract.errors import InvalidRequestError, WeftError
from weft_rl.contract.options import shown_value
from weft_rl.descriptors import is_short

_log = logging.getLogger(__name__)

#: Where each field is read from where nothing is said: a worker process of an engine gets
#: the paths so, never in its arguments.
VARIABLES: Final = {
    "tls_cert": "WEFT_TLS_CERT",
    "tls_key": "WEFT_TLS_KEY",
    "tls_ca": "WEFT_TLS_CA",
    "token_file": "WEFT_TOKEN_FILE",
}
_READS: Final = 6
_REREAD_SECONDS: Final = 0.02
_MAX_TOKEN_CHARS: Final = 4096
_Stamp = tuple[int, int, int]
_V = TypeVar("_V")
#: Largest file of certificates, tokens or rules.
MAX_FILE_BYTES: Final = 1 << 20


class UnusedFiles:
    """Files of this process that changed and are not used, with reasons; thread-safe.

    Their former content stays in force. Servers and channels share one instance, as they do the
    environment.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reasons: dict[str, str] = {}

    def put(self, path: str, reason: str) -> None:
        """Note that a file is not used; logged once for each reason."""
        with self._lock:
            is_known = self._reasons.get(path) == reason
            self._reasons[path] = reason
        if not is_known:
            _log.error("%s is not used; its former content stays in force: %s", path, reason)

    def drop(self, path: str) -> None:
        """Note that a file is used as it stands."""
        with self._lock:
            was_there = self._reasons.pop(path, None) is not None
        if was_there:
            _log.info("%s is used again", path)

    def list(self) -> list[str]:
        """Return lines for messages, one a file."""
        with self._lock:
            return [f"{path}: {reason}" for path, reason in sorted(self._reasons.items())]


UNUSED_FILES: Final = UnusedFiles()


def stamp_of(path: str | Path) -> tuple[int, int, int]:
    """Return a stamp that changes when a file is replaced; cheap. Zeros where there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (status.st_mtime_ns, status.st_ino, status.st_size)


def read_file(path: str | Path) -> bytes:
    """Read a regular file of at most ``MAX_FILE_BYTES``.

    Raises:
        InvalidRequestError: It cannot be read, is no regular file (a device or a pipe has no
            end), or is larger.
    """
    try:
        # A pipe that nobody writes to would not be opened without this.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InvalidRequestError("it is no regular file")
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidRequestError(error.strerror or str(error)) from None
    if len(data) > MAX_FILE_BYTES:
        raise InvalidRequestError(f"it has more than {MAX_FILE_BYTES} bytes")
    return data


class _PemFiles(NamedTuple):
    """Content of one state of the files."""

    ca: bytes
    key: bytes
    cert: bytes


class UsableFiles(Generic[_V]):
    """Last usable content of files, which are read again when they change; thread-safe.

    A file that is removed, or spoilt, must not end what runs.

    Args:
        name: File that is named in messages.
        paths: All files that the content is of.
        read: Returns their content, or raises a ``WeftError``.
    """

    def __init__(self, name: str, paths: Sequence[str], read: Callable[[], _V]) -> None:
        self._name, self._paths, self._read = name, paths, read
        self._lock = threading.Lock()
        self._stamps: tuple[_Stamp, ...] | None = None
        self._known: list[_V] = []

    def get(self) -> _V:
        """Return the content to use now.

        Raises:
            WeftError: It cannot be used, and never could.
        """
        with self._lock:
            # Stamps of before the reading: what is replaced meanwhile is read again.
            stamps = tuple(map(stamp_of, self._paths))
            if stamps != self._stamps:
                try:
                    self._known = [self._read()]
                except WeftError as error:
                    if not self._known:
                        raise
                    if is_short():  # the files may be as they should
                        return self._known[0]
                    UNUSED_FILES.put(self._name, error.message)
                else:
                    UNUSED_FILES.drop(self._name)
                self._stamps = stamps
            return self._known[0]

    def look_again(self) -> None:
        """Read the files at the next use, changed or not; what they held stays known."""
        with self._lock:
            self._stamps = None


class _LoadedCredentials:
    """Last usable content of the files of this process; thread-safe."""

    def __init__(self) -> None:
        self._files: dict[tuple[str, ...], UsableFiles[Any]] = {}

    def certificates(self, shown: Credentials) -> _PemFiles:
        name, key = shown.tls_cert or shown.tls_ca, (shown.tls_cert, shown.tls_key, shown.tls_ca)
        made = UsableFiles(name, shown.paths(), shown.read_certificates)
        found: _PemFiles = self._files.setdefault(key, made).get()
        return found

    def token(self, path: str) -> str:
        """Return the token to send now; empty where no file is named."""
        made = UsableFiles(path, (path,), lambda: _token_of(path))
        return str(self._files.setdefault((path,), made).get()) if path else ""

    def look_again(self) -> None:
        for files in [*self._files.values()]:
            files.look_again()


_IN_FORCE: Final = _LoadedCredentials()


def look_again() -> None:
    """Read the files of certificates and tokens at their next use, whether they changed or not."""
    _IN_FORCE.look_again()


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Paths of PEM files, and a bearer token; all may be empty.

    Raises:
        InvalidRequestError: A certificate without its key, or the reverse.
    """

    tls_cert: str = ""
    """This process's certificate chain: a server's, and what a client shows."""
    tls_key: str = ""
    """Private key of that certificate."""
    tls_ca: str = ""
    """Authorities that it trusts, as a client and as a server that asks for certificates."""
    token_file: str = ""
    """File with the bearer token that it sends; read again when it changes."""
    token: str = field(default="", repr=False)
    """The token itself, for callers that have it in memory."""

    def __post_init__(self) -> None:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise InvalidRequestError(
                "a certificate needs its key: give --tls-cert and --tls-key together"
            )
        if self.token and self.token_file:
            raise InvalidRequestError("give a token or a file that holds it, not both")
        if len(self.token) > _MAX_TOKEN_CHARS or not self.token.isprintable():
            raise InvalidRequestError("the token is too long, or not printable text")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Credentials:
        """Return the credentials of an environment's ``VARIABLES``, by default this process's."""
        known = os.environ if environment is None else environment
        return cls(**{name: known.get(variable, "") for name, variable in VARIABLES.items()})

    def to_environment(self) -> dict[str, str]:
        """Return the variables for a child process; a token in memory is in none."""
        found = {variable: getattr(self, name) for name, variable in VARIABLES.items()}
        return {name: value for name, value in found.items() if value}

    @property
    def has_tls(self) -> bool:
        """True if channels are encrypted."""
        return bool(self.tls_ca or self.tls_cert)

    def paths(self) -> tuple[str, ...]:
        """Return the files that connections are made of; the token's is not among them."""
        return tuple(path for path in (self.tls_cert, self.tls_key, self.tls_ca) if path)

    def stamps(self) -> tuple[tuple[int, int, int], ...]:
        """Return stamps of ``paths``, which change when one is replaced; cheap."""
        return tuple(stamp_of(path) for path in self.paths())

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Return the credentials that a new connection is made with.

        They hold the files as they are, or as they were last, where these cannot be used now.

        Raises:
            InvalidRequestError: They cannot be used, and never could.
        """
        ca, key, cert = _IN_FORCE.certificates(self)
        return grpc.ssl_channel_credentials(ca or None, key or None, cert or None)

    def read_certificates(self) -> _PemFiles:
        """Read authority, key and certificate, of one state of the files.

        Files that are just being replaced are read again, for a tenth of a second at most.

        Raises:
            InvalidRequestError: One cannot be read, or the key is another certificate's.
        """
        for _ in range(_READS - 1):
            try:
                return self._read_now()
            except InvalidRequestError:
                time.sleep(_REREAD_SECONDS)
        return self._read_now()

    def _read_now(self) -> _PemFiles:
        stamps = self.stamps()
        ca = _read(self.tls_ca, "--tls-ca")
        key = _read(self.tls_key, "--tls-key")
        cert = _read(self.tls_cert, "--tls-cert")
        if cert:
            try:  # gRPC would take a pair that does not match, and fail every handshake
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.tls_cert, self.tls_key)
            except (OSError, ssl.SSLError) as error:
                raise InvalidRequestError(
                    f"--tls-cert {self.tls_cert} and --tls-key {self.tls_key} cannot be used "
                    f"together: {error}"
                ) from None
        if stamps != self.stamps():
            raise InvalidRequestError("the files of the certificates are just being replaced")
        return _PemFiles(ca, key, cert)

    def metadata(self, target: str) -> tuple[tuple[str, str], ...]:
        """Return the metadata of each call: the token, where there is one.

        Raises:
            InvalidRequestError: The token would be readable on its way, or cannot be read.
        """
        token = self.token or _IN_FORCE.token(self.token_file)
        if not token:
            return ()
        if not self.has_tls and not is_loopback(target):
            raise InvalidRequestError(
                f"a token is sent over TLS only, and to {target} there is none: give --tls-ca, the "
                "certificate of who signed the server's"
            )
        return (("authorization", f"Bearer {token}"),)

    def server_credentials(self, *, ask: bool) -> grpc.ServerCredentials:
        """Return the credentials of a server; with ``ask`` it asks clients for certificates.

        Raises:
            InvalidRequestError: A file cannot be read, or nobody says whom to trust.
        """
        if ask and not self.tls_ca:
            raise InvalidRequestError(
                "the access file names certificates: give --tls-ca, whose certificates are trusted"
            )
        current = _IN_FORCE.certificates(self)

        def fetch() -> Any:  # None where nothing has changed
            nonlocal current
            if (now := _IN_FORCE.certificates(self)) == current:
                return None
            current = now
            _log.info("new certificates are used from now on")
            return _configuration(now)

        return grpc.dynamic_ssl_server_credentials(_configuration(current), fetch, ask)


def _configuration(pem: _PemFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(pem.key, pem.cert)], root_certificates=pem.ca or None
    )


#: Of a process that shows nothing.
NO_CREDENTIALS: Final = Credentials()


@dataclass(frozen=True, kw_only=True)
class Tls:
    """Paths of PEM files, as a trainer names them."""

    ca: str | os.PathLike[str]
    """Certificates of the authority that signs the coordinator's."""
    cert: str | os.PathLike[str] = ""
    """The trainer's own certificate chain, where the coordinator asks for it."""
    key: str | os.PathLike[str] = ""
    """Private key of that certificate."""


def credentials_of(tls: Tls | None, token: str | None) -> Credentials:
    """Return the credentials that a program names; the environment's for what it does not.

    Raises:
        InvalidRequestError: They cannot be used.
    """
    if tls is not None and not isinstance(tls, Tls):  # handed over by a user's program
        raise InvalidRequestError(f"tls={shown_value(tls)}: give Tls(ca=..., cert=..., key=...)")
    if token is not None and not (isinstance(token, str) and token):
        raise InvalidRequestError("token must be a string that is not empty")
    if token is not None and not (token.isascii() and token.isprintable()):
        raise InvalidRequestError("token must be of printable ASCII characters, as a header is")
    known = Credentials.from_environment()
    if tls is not None:
        given = (tls.ca, tls.cert, tls.key)
        if not all(isinstance(path, str | os.PathLike) for path in given):
            raise InvalidRequestError(f"tls={shown_value(tls)}: ca, cert and key are paths")
        paths = (os.fspath(path) for path in given)
        ca, cert, key = (str(path) for path in paths)
        known = Credentials(tls_ca=ca, tls_cert=cert, tls_key=key, token_file=known.token_file)
    if token is not None:
        known = replace(known, token=token, token_file="")
    return known


def is_loopback(target: str) -> bool:
    """Return whether HOST:PORT, or a host, is this machine by its loopback interface."""
    host = target.rpartition(":")[0] if target.rpartition(":")[2].isdigit() else target
    host = host.strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _read(path: str, option: str) -> bytes:
    """Read a PEM file; empty where none is named."""
    if not path:
        return b""
    try:
        data = read_file(path)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{option} {path}: {error.message}") from None
    if b"-----BEGIN " not in data:
        raise InvalidRequestError(f"{option} {path} is no PEM file: it has no BEGIN line")
    return data


def _token_of(path: str) -> str:
    """Read the token of a file."""
    try:
        token = read_file(path).decode("ascii").strip()
    except InvalidRequestError as error:
        raise InvalidRequestError(f"--token-file {path}: {error.message}") from None
    except UnicodeDecodeError:
        raise InvalidRequestError(f"--token-file {path}: it is not ASCII text") from None
    if not token or len(token) > _MAX_TOKEN_CHARS or not token.isprintable() or " " in token:
        raise InvalidRequestError(f"--token-file {path} holds no token: one line of printable text")
    return token
