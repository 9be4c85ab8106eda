"""Certificates of the server and keys of the nodes, made with few words; an organisation's own will do as well.

    ca.crt, ca.key            the authority of this federation; ca.crt goes to every site, ca.key belongs on a machine
                              that is neither the server nor a site
    server.crt, server.key    what the SuperLink shows
    NAME, NAME.pub            a node's key; the site keeps the first, the server registers the second

Private files, and the folders that are made for them, can be read by their owner alone.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from .config import FederationError

CA, CA_KEY, SERVER, SERVER_KEY = "ca.crt", "ca.key", "server.crt", "server.key"
_SHOWN = {"ca-certfile": CA, "certfile": SERVER, "keyfile": SERVER_KEY}
_AUTHORITY_DAYS = 3650
_EARLY = datetime.timedelta(minutes=5)
"""Clocks of two sites differ."""


def certificates(folder: Path, hosts: Sequence[str], *, authority: Path | None = None, days: int = 825) -> None:
    """Make the server's certificate for these names and addresses in a folder, signed by an authority in its own.

    An authority that is not there yet is made, so that a second call renews the server's certificate alone. Without a
    folder for it, it lies in the server's. With one, the server's folder gets `ca.crt` and never `ca.key`.
    """
    own = authority or folder
    if not hosts:
        raise FederationError("a certificate needs the names or addresses by which sites reach the server; name one")
    if (own / CA).exists() != (own / CA_KEY).exists():
        raise FederationError(
            f"{own} has one of {CA} and {CA_KEY}, but needs both or none; where is the authority (--ca-dir)?"
        )
    for each in (own, folder):
        each.mkdir(parents=True, exist_ok=True, mode=0o700)
    signer, signing = _authority(own) if not (own / CA).exists() else _known(own)
    key = ec.generate_private_key(ec.SECP256R1())
    names = [_general(host) for host in hosts]
    builder = _builder(hosts[0], signer.subject, key, days)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key())
    builder = builder.add_extension(identifier, critical=False)
    certificate = builder.sign(signing, hashes.SHA256())
    _write(folder / SERVER_KEY, _pem(key), private=True)
    _write(folder / SERVER, certificate.public_bytes(serialization.Encoding.PEM))
    if own != folder:
        _write(folder / CA, signer.public_bytes(serialization.Encoding.PEM))


def link_arguments(folder: Path) -> list[str]:
    """Return what a SuperLink is told of the certificates in a folder: TLS, and for registered nodes only."""
    arguments = []
    for option, name in _SHOWN.items():
        if not (folder / name).exists():
            raise FederationError(f"{folder / name} is not there; make it with metavd federate certificates")
        arguments += [f"--ssl-{option}", str(folder / name)]
    return [*arguments, "--enable-supernode-auth"]


def node_key(path: Path) -> Path:
    """Make a node's key, PATH and PATH.pub, and return the public one."""
    public = path.with_name(f"{path.name}.pub")
    for each in (path, public):
        if each.exists():
            raise FederationError(f"{each} is there already; name another file, or remove it to make a new key")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    _write(path, private, private=True)
    ssh = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write(public, ssh + f" {path.name}\n".encode())
    return public


def fingerprint(public: Path) -> str:
    """Return how a server knows the node with this public key again."""
    try:
        key = serialization.load_ssh_public_key(public.read_bytes())
    except (OSError, ValueError) as error:
        raise FederationError(f"{public} is no public key of a node ({error}); name the .pub of a key") from None
    pem = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(pem).hexdigest()


def _authority(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "metavd federation")])
    builder = _builder("metavd federation", name, key, _AUTHORITY_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    usage = dict.fromkeys(
        ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
         "encipher_only", "decipher_only"), False
    )  # fmt: skip
    builder = builder.add_extension(x509.KeyUsage(**usage, key_cert_sign=True, crl_sign=True), critical=True)
    builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    certificate = builder.sign(key, hashes.SHA256())
    _write(folder / CA_KEY, _pem(key), private=True)
    _write(folder / CA, certificate.public_bytes(serialization.Encoding.PEM))
    return certificate, key


def _known(folder: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        certificate = x509.load_pem_x509_certificate((folder / CA).read_bytes())
        key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
    except ValueError as error:
        raise FederationError(f"the authority in {folder} cannot be read ({error}); put back your copy of it") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise FederationError(f"{folder / CA_KEY} is not a key that metavd made; use your own tools to sign with it")
    return certificate, key


def _builder(name: str, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _general(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes, *, private: bool = False) -> None:
    """Write a file that is private from its first byte on."""
    scratch = path.with_name(f".{path.name}.partial")
    scratch.unlink(missing_ok=True)
    with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o644), "wb") as file:
        file.write(data)
    scratch.replace(path)
