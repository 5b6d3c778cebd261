"""Expiry of certificates: read from their DER, for which the standard library has nothing."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from weft_rl.cli.doctor.finding import Finding, fail, ok, warn

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_SEQUENCE, _UTC_TIME, _VERSION = 0x30, 0x17, 0xA0
#: Of what is left, at most so much is worth a warning; of short-lived ones, a fifth.
_SOON = timedelta(days=14)


@dataclass(frozen=True)
class Validity:
    """Time from when to when a certificate is valid."""

    begin: datetime
    end: datetime


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


def validity_of(der: bytes) -> Validity:
    """Read the validity of an X.509 certificate.

    Raises:
        ValueError: It is none.
    """
    tag, certificate, _ = _element(der)
    tag, rest, _ = _element(certificate)  # TBSCertificate
    if tag != _SEQUENCE:
        raise ValueError("it is no certificate")
    tag, _, after = _element(rest)
    if tag == _VERSION:
        rest = after
    for _ in range(3):  # serial number, signature, issuer
        _, _, rest = _element(rest)
    _, validity, _ = _element(rest)
    tag, begin, rest = _element(validity)
    end_tag, end, _ = _element(rest)
    return Validity(_time(tag, begin), _time(end_tag, end))


def _element(der: bytes) -> tuple[int, bytes, bytes]:
    """Return the tag and content of the first element, and what follows it."""
    if len(der) < 2:
        raise ValueError("it ends too early")
    length, begin = der[1], 2
    if length & 0x80:
        begin += length & 0x7F
        length = int.from_bytes(der[2:begin], "big")
    end = begin + length
    if end > len(der):
        raise ValueError("it ends too early")
    return der[0], der[begin:end], der[end:]


def _time(tag: int, content: bytes) -> datetime:
    """Parse a UTCTime (years 1950 to 2049) or a GeneralizedTime, both in UTC."""
    text = content.decode("ascii")
    if tag == _UTC_TIME:
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def expiry(check: str, what: str, der: bytes, *, now: datetime | None = None) -> Finding:
    """Check whether a certificate is valid now, and for how long."""
    now = now or datetime.now(UTC)
    renew = "renew it: its file is read again at the next handshake, nothing is restarted"
    try:
        validity = validity_of(der)
    except (ValueError, UnicodeDecodeError) as error:
        return warn(check, f"{what} cannot be read: {error}", "look at it with openssl x509")
    until = f"{validity.end:%Y-%m-%d %H:%M} UTC"
    if now < validity.begin:
        begins = f"{what} is valid from {validity.begin:%Y-%m-%d %H:%M} UTC on"
        return fail(check, begins, "wait, or look at this machine's clock")
    left = validity.end - now
    if left <= timedelta():
        return fail(check, f"{what} has expired on {until}", renew)
    says = f"{what} expires on {until}, in {_shown(left)}"
    soon = min(_SOON, (validity.end - validity.begin) / 5)
    return warn(check, says, renew) if left < soon else ok(check, says)


def _shown(left: timedelta) -> str:
    return f"{left.days} days" if left.days > 1 else f"{left.total_seconds() / 3600:.1f} h"
