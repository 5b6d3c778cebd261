"""Expiry of certificates."""

from __future__ import annotations

import re
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509

from weft_rl.cli.doctor.finding import Finding, fail, ok, warn

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
        return warn(check, f"{what} cannot be read: {error}", "look at it with openssl x509")
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    until = f"{end:%Y-%m-%d %H:%M} UTC"
    if now < begin:
        begins = f"{what} is valid from {begin:%Y-%m-%d %H:%M} UTC on"
        return fail(check, begins, "wait, or look at this machine's clock")
    left = end - now
    if left <= timedelta():
        return fail(check, f"{what} has expired on {until}", renew)
    says = f"{what} expires on {until}, in {_shown(left)}"
    soon = min(_SOON, (end - begin) / 5)
    return warn(check, says, renew) if left < soon else ok(check, says)


def _shown(left: timedelta) -> str:
    return f"{left.days} days" if left.days > 1 else f"{left.total_seconds() / 3600:.1f} h"
