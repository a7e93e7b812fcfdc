"""Certificates for a server on 127.0.0.1, made for the moment."""

import datetime as dt
import ipaddress
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def certified(folder: Path, name: str = "127.0.0.1") -> tuple[ssl.SSLContext, str]:
    """A server's context, and the path of the authority that vouches for it (itself).

    Args:
        folder: for its files.
        name: for whom the certificate is: an address, or a host's name.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kube-apiserver")])
    try:
        of: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        of = x509.DNSName(name)
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([of]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    authority = folder / f"{name}.crt"
    authority.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    secret = folder / f"{name}.key"
    secret.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority, secret)
    return context, str(authority)
