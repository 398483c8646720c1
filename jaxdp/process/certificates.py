"""Mutual TLS for JAX's coordination service, where JAX has it (0.12): only processes with the job's
secret connect.

Every process derives the same private key from the secret, so no certificate has to be sent: a peer
is accepted if its certificate was signed with that key. The peer's host name does not matter, since
its certificate names a URI instead (RFC 5280, section 4.2.1.6).
"""

from __future__ import annotations

import contextlib
import datetime
import hmac
import pathlib
import tempfile
from collections.abc import Iterator

ISSUER = "jaxdp job"
SUBJECT = "jaxdp process"
URI = "jaxdp://job/"
SLACK = datetime.timedelta(days=2)  # clocks of two hosts may differ by this much
LIFE = datetime.timedelta(days=3650)


@contextlib.contextmanager
def files(secret: str) -> Iterator[dict[str, str]]:
    """Yield the options of JAX's service and of its clients: the names of files, which exist inside
    this context.
    """
    with tempfile.TemporaryDirectory(prefix="jaxdp-") as folder:  # readable by this user alone
        paths = {name: pathlib.Path(folder) / f"{name}.pem" for name in ("ca", "cert", "key")}
        for name, data in pem(secret).items():
            paths[name].write_bytes(data)
        yield {
            **{f"mtls_{name}_file": str(path) for name, path in paths.items()},
            "mtls_peer_uri_prefix": URI,
        }


def pem(secret: str) -> dict[str, bytes]:
    """Return the certificate authority of a job, and the certificate and key of a process, in PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    number = int.from_bytes(hmac.digest(secret.encode(), b"jaxdp TLS key", "sha256"), "big")
    key = ec.derive_private_key(
        (number >> 1) + 1, ec.SECP256R1()
    )  # 255 bits are less than the order of the group

    def name(text):
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    now = datetime.datetime.now(datetime.UTC)

    def signed(subject: str, extension: x509.ExtensionType, critical: bool) -> bytes:
        builder = x509.CertificateBuilder(
            name(ISSUER), name(subject), key.public_key(), x509.random_serial_number()
        )
        builder = builder.not_valid_before(now - SLACK).not_valid_after(now + LIFE)
        certificate = builder.add_extension(extension, critical).sign(key, hashes.SHA256())
        return certificate.public_bytes(serialization.Encoding.PEM)

    unencrypted = serialization.NoEncryption()
    return {
        "ca": signed(ISSUER, x509.BasicConstraints(ca=True, path_length=None), True),
        "cert": signed(
            SUBJECT,
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(f"{URI}process")]),
            False,
        ),
        "key": key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, unencrypted
        ),
    }
