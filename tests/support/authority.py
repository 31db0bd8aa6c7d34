"""Authorities that sign certificates for tests of TLS."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

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
        return self._variables(*self._issue(name, None))

    def renewed(self, name: str) -> dict[str, str]:
        """Return the variables of a rank whose certificate is signed again for the same key."""
        return self._variables(*self._renew(name))

    def renewed_policy(self, name: str, certificates: Sequence[str]) -> TlsPolicy:
        """Return the policy of such a rank, which knows the certificates of all ranks."""
        certificate, key = self._renew(name)
        return TlsPolicy("on", str(certificate), str(key), str(self.path), certificates)

    def _renew(self, name: str) -> tuple[Path, Path]:
        certificate, key = self._paths(name)
        old = x509.load_pem_x509_certificate(certificate.read_bytes())
        builder = (
            x509.CertificateBuilder(extensions=list(old.extensions))
            .subject_name(old.subject)
            .issuer_name(old.issuer)
            .public_key(old.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(old.not_valid_before_utc)
            .not_valid_after(old.not_valid_after_utc)
        )
        renewed = builder.sign(self._authority._private_key, hashes.SHA256())
        certificate.write_bytes(renewed.public_bytes(serialization.Encoding.PEM))
        return certificate, key

    def _variables(self, certificate: Path, key: Path) -> dict[str, str]:
        return {
            "UNISONO_TLS_CERTIFICATE": str(certificate),
            "UNISONO_TLS_KEY": str(key),
            "UNISONO_TLS_AUTHORITY": str(self.path),
        }

    def _paths(self, name: str) -> tuple[Path, Path]:
        return self._directory / f"{name}-certificate.pem", self._directory / f"{name}-key.pem"

    def _issue(self, name: str, not_after: datetime.datetime | None) -> tuple[Path, Path]:
        issued = self._authority.issue_cert(f"{name}.example.org", not_after=not_after)
        certificate, key = self._paths(name)
        for number, part in enumerate(issued.cert_chain_pems):
            part.write_to_path(certificate, append=number > 0)
        key.touch(mode=0o600)
        issued.private_key_pem.write_to_path(key)
        return certificate, key
