"""Authorities that sign certificates for tests of TLS."""

from __future__ import annotations

import datetime
from pathlib import Path

import trustme

from unisono.transports.tcp.tls import TlsPolicy


class Authority:
    """An authority that signs certificates of ranks, in files."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._directory = directory
        self._authority = trustme.CA()
        self.path = directory / "authority.pem"
        self._authority.cert_pem.write_to_path(self.path)

    def policy(
        self, name: str, *, trusts: Authority | None = None, not_after: datetime.datetime | None = None
    ) -> TlsPolicy:
        """Return the policy of a rank with a certificate of this authority, which trusts this one or another."""
        certificate, key = self._issue(name, not_after)
        return TlsPolicy("on", str(certificate), str(key), str((trusts or self).path))

    def variables(self, name: str) -> dict[str, str]:
        """Return the environment variables of a rank with a certificate of this authority."""
        certificate, key = self._issue(name, None)
        return {
            "UNISONO_TLS_CERTIFICATE": str(certificate),
            "UNISONO_TLS_KEY": str(key),
            "UNISONO_TLS_AUTHORITY": str(self.path),
        }

    def _issue(self, name: str, not_after: datetime.datetime | None) -> tuple[Path, Path]:
        issued = self._authority.issue_cert(f"{name}.example.org", not_after=not_after)
        certificate, key = (self._directory / f"{name}-{part}.pem" for part in ("certificate", "key"))
        for number, part in enumerate(issued.cert_chain_pems):
            part.write_to_path(certificate, append=number > 0)
        key.touch(mode=0o600)
        issued.private_key_pem.write_to_path(key)
        return certificate, key
