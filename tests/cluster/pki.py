"""The cluster's certificates and kubeconfigs. They live and die with one run of the cluster."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_LIFETIME: Final = datetime.timedelta(days=365)


@dataclass(frozen=True)
class Identity:
    """Who a certificate speaks for: a user name, its groups, and the addresses it serves on."""

    common_name: str
    organization: str | None = None
    addresses: tuple[str, ...] = ()


class Authority:
    """A certificate authority that writes PEM files into one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "vllmsnapshot-test-ca")])
        certificate = (
            self._builder(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = certificate.public_bytes(serialization.Encoding.PEM)
        (directory / "ca.crt").write_bytes(self.certificate)
        _write_key(directory / "ca.key", self._key)

    def issue(self, file_name: str, identity: Identity) -> None:
        """Write ``FILE_NAME.crt`` and ``FILE_NAME.key`` for *identity*."""
        key = ec.generate_private_key(ec.SECP256R1())
        attributes = [x509.NameAttribute(NameOID.COMMON_NAME, identity.common_name)]
        if identity.organization:
            attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, identity.organization))
        builder = self._builder(x509.Name(attributes), key.public_key()).add_extension(
            x509.BasicConstraints(ca=False, path_length=None), critical=True
        )
        if identity.addresses:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_alternative_name(address) for address in identity.addresses]),
                critical=False,
            )
        certificate = builder.sign(self._key, hashes.SHA256())
        path = self._directory / f"{file_name}.crt"
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        _write_key(self._directory / f"{file_name}.key", key)

    def key_pair(self, file_name: str) -> None:
        """Write a bare key pair, ``FILE_NAME.key`` and ``FILE_NAME.pub``, as service account tokens need it."""
        key = ec.generate_private_key(ec.SECP256R1())
        _write_key(self._directory / f"{file_name}.key", key)
        (self._directory / f"{file_name}.pub").write_bytes(
            key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        )

    def kubeconfig(self, path: Path, certificate: str, server: str) -> None:
        """Write a kubeconfig that embeds its certificates, so that it can be copied or mounted anywhere."""
        files = {
            "certificate-authority-data": self._directory / "ca.crt",
            "client-certificate-data": self._directory / f"{certificate}.crt",
            "client-key-data": self._directory / f"{certificate}.key",
        }
        data = {name: base64.b64encode(file.read_bytes()).decode() for name, file in files.items()}
        authority = data.pop("certificate-authority-data")
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "local",
            "contexts": [{"name": "local", "context": {"cluster": "local", "user": certificate}}],
            "clusters": [{"name": "local", "cluster": {"server": server, "certificate-authority-data": authority}}],
            "users": [{"name": certificate, "user": data}],
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(config))

    def _builder(self, subject: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            # A clock that is set back a little must not make a fresh certificate "not yet valid".
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + _LIFETIME)
        )


def _alternative_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.touch(mode=0o600)
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def issue_all(directory: Path, kubeconfigs: Path, *, address: str, service_address: str, node: str) -> None:
    """Write every certificate, key and kubeconfig that the cluster's parts use."""
    authority = Authority(directory)
    names: Sequence[str] = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
    authority.issue(
        "apiserver",
        Identity("kube-apiserver", addresses=(address, "127.0.0.1", service_address, *names)),
    )
    authority.issue("kubelet-client", Identity("kube-apiserver-kubelet-client", "system:masters"))
    authority.issue("aggregator", Identity("aggregator"))
    authority.issue("node", Identity(f"system:node:{node}", "system:nodes", addresses=(address, node)))
    authority.issue("admin", Identity("admin", "system:masters"))
    authority.issue("controller-manager", Identity("system:kube-controller-manager"))
    authority.issue("scheduler", Identity("system:kube-scheduler"))
    authority.issue("proxy", Identity("system:kube-proxy"))
    authority.key_pair("service-account")
    for certificate in ("admin", "node", "controller-manager", "scheduler", "proxy"):
        authority.kubeconfig(kubeconfigs / f"{certificate}.kubeconfig", certificate, f"https://{address}:6443")
