"""A certificate authority for tests, and files of what it signs."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import ClassVar

import trustme

from weft_rl.rpc.security.credentials import Credentials


class Authority:
    """One CA; ``credentials`` writes what a process names in its options."""

    _made: ClassVar[dict[str, Authority]] = {}

    @classmethod
    def of(cls, path: str) -> Authority:
        """The authority whose certificate is in this file."""
        return cls._made[path]

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ca = trustme.CA()
        self.path = str(folder / f"ca-{id(self)}.pem")
        self._ca.cert_pem.write_to_path(self.path)
        self._made[self.path] = self

    def credentials(
        self, *names: str, file: str = "", not_after: datetime | None = None
    ) -> Credentials:
        """The credentials of a process whose certificate has these names."""
        stem = self._folder / (file or names[0].replace("/", "-").replace("*", "any"))
        cert, key = f"{stem}.pem", f"{stem}.key"
        self.issue(cert, key, *names, not_after=not_after)
        return Credentials(tls_cert=cert, tls_key=key, tls_ca=self.path)

    def issue(self, cert: str, key: str, *names: str, not_after: datetime | None = None) -> None:
        """Write a certificate over the one in these files, as a rotation does."""
        issued = self._ca.issue_cert(*names, not_after=not_after)
        Path(key).write_bytes(issued.private_key_pem.bytes())
        Path(cert).write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
