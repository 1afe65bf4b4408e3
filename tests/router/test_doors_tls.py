"""TLS: the router's own, and a certificate that is replaced while it serves."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.harness.processes import Child
from tests.router.conftest import refused, router_options, wait_until

pytestmark = pytest.mark.slow
ADMIN_KEY = "an admin key of some length"


class Authority:
    """Signs certificates for 127.0.0.1 and trusts itself."""

    def __init__(self, directory: Path) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "an authority")])
        self.file = directory / "authority.pem"
        own = self._sign(self._name, self._key.public_key(), authority=True)
        self.file.write_bytes(own.public_bytes(serialization.Encoding.PEM))

    def issue(self, directory: Path) -> int:
        """Write cert.pem and key.pem. Returns the certificate's serial number."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "a router")])
        certificate = self._sign(name, key.public_key(), authority=False)
        (directory / "key.pem").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        (directory / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return certificate.serial_number

    def _sign(self, name: x509.Name, key: ec.EllipticCurvePublicKey, authority: bool) -> x509.Certificate:
        now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
        here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(here, critical=False)
            .sign(self._key, hashes.SHA256())
        )


class Served(NamedTuple):
    """A running router: what it has said, who signs for it, and where its files are."""

    ready: dict[str, Any]
    authority: Authority
    directory: Path
    trusting: ssl.SSLContext

    def serial(self) -> int:
        """Of the certificate that a new connection gets."""
        at = urlsplit(self.ready["http"])
        assert at.port is not None
        with (
            socket.create_connection(("127.0.0.1", at.port), timeout=10.0) as plain,
            self.trusting.wrap_socket(plain, server_hostname="127.0.0.1") as secure,
        ):
            found = secure.getpeercert(binary_form=True)
        assert found is not None
        return x509.load_der_x509_certificate(found).serial_number


def options(directory: Path, model: Path, **changes: object) -> dict[str, object]:
    certificate = {"tls_cert": str(directory / "cert.pem"), "tls_key": str(directory / "key.pem")}
    return router_options(model, **{**certificate, **changes})


@pytest.fixture(params=[1, 2])
def served(tmp_path: Path, model: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """A router with a certificate, in one process and in two, whose admin listener is on all addresses."""
    authority = Authority(tmp_path)
    authority.issue(tmp_path)
    (tmp_path / "admin-key").write_text(ADMIN_KEY)
    given = options(tmp_path, model, admin_host="0.0.0.0", admin_key_file=str(tmp_path / "admin-key"))
    with Child("router", given, tmp_path, arguments=("--processes", str(request.param))) as child:
        ready = child.wait_ready()
        yield Served(ready, authority, tmp_path, ssl.create_default_context(cafile=str(authority.file)))
    assert child.process.poll() == 0


def test_both_listeners_speak_tls_and_nothing_else(served: Served) -> None:
    http, admin = served.ready["http"], served.ready["admin"]
    assert (http[:18], admin[:18]) == ("https://127.0.0.1:", "https://127.0.0.1:")
    with httpx.Client(verify=served.trusting, timeout=20.0) as client:
        assert client.get(f"{http}/health").json() == {"status": "ok"}
        authorization = {"Authorization": f"Bearer {ADMIN_KEY}"}
        wait_until(lambda: client.get(f"{admin}/metrics", headers=authorization).status_code == 200)
        assert client.get(f"{admin}/metrics").status_code == 401
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{http}/health")  # an authority that is not trusted
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http{http.removeprefix('https')}/health", timeout=5.0)


def test_a_new_certificate_is_used_without_a_restart(served: Served) -> None:
    """Connections that are there go on. A key that does not belong to the certificate changes nothing."""
    first = served.serial()
    with httpx.Client(base_url=served.ready["http"], verify=served.trusting, timeout=20.0) as client:
        assert client.get("/health").status_code == 200
        certificate = (served.directory / "cert.pem").read_bytes()
        second = served.authority.issue(served.directory)
        (served.directory / "cert.pem").write_bytes(certificate)  # the new key, the old certificate
        time.sleep(2.0)  # longer than between two looks
        assert served.serial() in (first, second)  # a look may have come between the files
        third = served.authority.issue(served.directory)
        wait_until(lambda: {served.serial() for _ in range(8)} == {third})
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("tls", ["neither", "no key"])
def test_a_certificate_that_cannot_be_used_ends_with_code_2(tmp_path: Path, model: Path, tls: str) -> None:
    if tls == "neither":
        given, words = options(tmp_path, model), "tls_cert: "
    else:
        given, words = options(tmp_path, model, tls_key=None), "tls_cert and tls_key are given together"
    assert words in refused(tmp_path, given)
