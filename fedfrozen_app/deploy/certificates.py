"""The two certificates of a deployment: a CA of its own, and the SuperLink's signed by it."""

import datetime
import ipaddress
from collections.abc import Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedfrozen_app.config import ConfigError

CLOCK_SKEW = datetime.timedelta(minutes=5)  # a host may be that far behind
HASH = hashes.SHA384()

Key = ec.EllipticCurvePrivateKey


def general_name(host: str) -> x509.GeneralName:
    """Return a host as an entry of a certificate's subject alternative names.

    Raises
    ------
    ConfigError
        If it is neither an IP address nor a DNS name.
    """
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    labels = host.split(".")
    if len(host) > 253 or not all(map(_is_label, labels)) or labels[-1].isdigit():
        raise ConfigError(
            f"host {host!r} is neither a DNS name nor an IP address; write names without scheme "
            "or port, separated by commas"
        )
    return x509.DNSName(host)


def _is_label(label: str) -> bool:
    """Whether a text is one part of a DNS name."""
    letters = label.replace("-", "").replace("_", "")
    return (
        len(label) <= 63 and letters.isascii() and letters.isalnum() and label.strip("-") == label
    )


def ca_certificate(key: Key, days: int) -> bytes:
    """Return a self-signed certificate (PEM) that may sign others; those may sign none."""
    name = _name("fedfrozen CA")
    return (
        _builder(name, name, key, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(ca=True), critical=True)
        .sign(key, HASH)
        .public_bytes(serialization.Encoding.PEM)
    )


def server_certificate(
    key: Key, ca_pem: bytes, ca_key_pem: bytes, hosts: Sequence[str], days: int
) -> bytes:
    """Return a certificate (PEM) for a server that is reached by any of ``hosts``.

    Raises
    ------
    ConfigError
        If the CA's key is not that of its certificate, or the CA ends before ``days``.
    """
    ca = x509.load_pem_x509_certificate(ca_pem)
    ca_key = serialization.load_pem_private_key(ca_key_pem, None)
    if not isinstance(ca_key, Key) or ca_key.public_key() != ca.public_key():
        raise ConfigError("ca.key does not belong to ca.crt; put the right one back")
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key())
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    return (
        _builder(_name(hosts[0][:64]), ca.subject, key, days, ca.not_valid_after_utc)
        .add_extension(x509.SubjectAlternativeName(map(general_name, hosts)), critical=False)
        .add_extension(authority, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(ca=False), critical=True)
        .add_extension(usage, critical=False)
        .sign(ca_key, HASH)
        .public_bytes(serialization.Encoding.PEM)
    )


def server_problem(server_pem: bytes, ca_pem: bytes, hosts: Sequence[str]) -> str | None:
    """Return why a certificate does not serve ``hosts`` today, None if it does."""
    server = x509.load_pem_x509_certificate(server_pem)
    try:
        server.verify_directly_issued_by(x509.load_pem_x509_certificate(ca_pem))
    except (InvalidSignature, ValueError, TypeError):
        return "is not signed by ca.crt"
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    if missing := [host for host in hosts if general_name(host) not in names]:
        return f"is not for host {missing[0]!r}"
    if server.not_valid_after_utc <= datetime.datetime.now(datetime.UTC):
        return f"expired on {server.not_valid_after_utc:%Y-%m-%d}"
    return None


def pem(key: Key) -> bytes:
    """Return a private key as PEM, without a password."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: Key,
    days: int,
    limit: datetime.datetime | None = None,
) -> x509.CertificateBuilder:
    """Return what both certificates share; neither outlives ``limit``."""
    now = datetime.datetime.now(datetime.UTC)
    end = now + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(end if limit is None else min(end, limit))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
