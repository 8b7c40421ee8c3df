import argparse
import datetime
import os
import shutil
import socket
import ssl
import stat
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.cli.supernode.register import try_load_public_key
from flwr.supercore.auth import load_superexec_auth_secret
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.cli.flower_supernode import _try_setup_client_authentication
from typer.testing import CliRunner

from fedfrozen_app.cli import app
from fedfrozen_app.config import ConfigError
from fedfrozen_app.deploy.keys import KeyRequest, make_keys

HOSTS = ("superlink", "fl.example.org", "127.0.0.1", "::1")
FILES = {
    "ca.crt": 0o644,
    "ca.key": 0o600,
    "nodes/node-0": 0o600,
    "nodes/node-0.pub": 0o644,
    "nodes/node-1": 0o600,
    "nodes/node-1.pub": 0o644,
    "server/server.key": 0o600,
    "server/server.pem": 0o644,
    "server/superexec.secret": 0o600,
}


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    folder = tmp_path / "some" / "keys"
    make_keys(KeyRequest(folder, 2, HOSTS))
    return folder


def test_every_file_is_made_with_its_mode_whatever_the_umask(tmp_path: Path) -> None:
    for umask in (0, 0o077):
        previous = os.umask(umask)
        try:
            made = make_keys(KeyRequest(tmp_path / str(umask), 2, HOSTS))
        finally:
            os.umask(previous)
        folder = tmp_path / str(umask)
        modes = {str(p.relative_to(folder)): stat.S_IMODE(p.stat().st_mode) for p in made}
        assert modes == FILES
        for part in (folder, folder / "server", folder / "nodes"):
            assert stat.S_IMODE(part.stat().st_mode) == 0o700


def test_no_file_is_open_to_others_before_it_has_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[int] = []
    opened = os.open

    def spy(path: Path, flags: int, mode: int = 0o777, **rest: int) -> int:
        assert flags & os.O_EXCL
        created.append(mode)
        return opened(path, flags, mode, **rest)

    monkeypatch.setattr(os, "open", spy)
    make_keys(KeyRequest(tmp_path / "keys", 2, HOSTS))
    assert created == [0o600] * len(FILES)


def test_lifetimes_names_and_uses_are_those_asked_for(keys: Path) -> None:
    ca, server = certificate(keys / "ca.crt"), certificate(keys / "server" / "server.pem")
    now = datetime.datetime.now(datetime.UTC)
    for cert, days in ((ca, 5 * 365), (server, 365)):
        assert abs((cert.not_valid_after_utc - now).total_seconds() - days * 86400) < 60
        assert 0 < (now - cert.not_valid_before_utc).total_seconds() < 600
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["superlink", "fl.example.org"]
    assert names.get_values_for_type(x509.IPAddress) == [ip_address("127.0.0.1"), ip_address("::1")]
    for cert, is_ca in ((ca, True), (server, False)):
        basic = cert.extensions.get_extension_for_class(x509.BasicConstraints)
        assert basic.critical and basic.value.ca is is_ca
        assert isinstance(cert.public_key(), ec.EllipticCurvePublicKey)
        assert cert.public_key().curve.name == "secp384r1"


def test_a_client_that_trusts_the_ca_reaches_the_server_by_its_names_alone(keys: Path) -> None:
    class Silent(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(keys / "server" / "server.pem", keys / "server" / "server.key")
    server = HTTPServer(("127.0.0.1", 0), Silent)
    server.socket = serving.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    trusting = ssl.create_default_context(cafile=keys / "ca.crt")
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT

    def connect(context: ssl.SSLContext, name: str) -> None:
        with socket.create_connection(server.server_address) as plain:
            with context.wrap_socket(plain, server_hostname=name):
                pass

    try:
        for name in ("superlink", "fl.example.org", "127.0.0.1"):
            connect(trusting, name)
        with pytest.raises(ssl.SSLCertVerificationError, match="other.example.org"):
            connect(trusting, "other.example.org")
        with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer"):
            connect(ssl.create_default_context(), "superlink")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_flower_reads_the_keys_and_both_halves_belong_together(keys: Path) -> None:
    node = keys / "nodes" / "node-1"
    arguments = argparse.Namespace(
        auth_supernode_private_key=str(node), auth_supernode_public_key=None
    )
    pair = _try_setup_client_authentication(arguments)
    assert pair is not None
    registered = try_load_public_key(node.with_name("node-1.pub"))
    assert public_key_to_bytes(pair[1]) == registered
    assert registered != try_load_public_key(node.with_name("node-0.pub"))
    secret = load_superexec_auth_secret(str(keys / "server" / "superexec.secret"))
    assert secret is not None and len(secret) == 32


def test_a_second_call_changes_nothing_and_a_further_node_is_added(keys: Path) -> None:
    before = contents(keys)
    assert make_keys(KeyRequest(keys, 2, HOSTS)) == []
    assert make_keys(KeyRequest(keys, 1, HOSTS[:1])) == []
    assert contents(keys) == before
    made = make_keys(KeyRequest(keys, 3, HOSTS))
    assert [path.name for path in made] == ["node-2", "node-2.pub"]
    assert {name: contents(keys)[name] for name in before} == before


def test_what_has_gone_to_its_host_is_not_made_again(keys: Path) -> None:
    (keys / "ca.key").unlink()
    (keys / "nodes" / "node-0").unlink()
    before = contents(keys)
    assert make_keys(KeyRequest(keys, 2, HOSTS)) == []
    assert contents(keys) == before
    public = keys / "nodes" / "node-1.pub"
    public.unlink()
    assert make_keys(KeyRequest(keys, 2, HOSTS)) == [public]
    assert contents(keys) == before  # it follows from the private half


@pytest.mark.parametrize("gone", ["ca.crt", "server/server.key", "server/server.pem"])
def test_half_a_pair_is_an_error_that_names_it(keys: Path, gone: str) -> None:
    (keys / gone).unlink()
    before = contents(keys)
    with pytest.raises(ConfigError, match=f"is there and {Path(gone).name} is not"):
        make_keys(KeyRequest(keys, 2, HOSTS))
    assert contents(keys) == before


def test_a_certificate_that_does_not_serve_is_an_error_with_the_remedy(
    keys: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"server.pem is not for host 'new.example.org'; remove"):
        make_keys(KeyRequest(keys, 2, [*HOSTS, "new.example.org"]))
    make_keys(KeyRequest(tmp_path / "other", 1, HOSTS))
    for name in ("ca.crt", "ca.key"):
        shutil.copy(tmp_path / "other" / name, keys / name)
    with pytest.raises(ConfigError, match="server.pem is not signed by ca.crt; remove it"):
        make_keys(KeyRequest(keys, 2, HOSTS))
    for name in ("server.pem", "server.key"):
        (keys / "server" / name).unlink()
    assert len(make_keys(KeyRequest(keys, 2, HOSTS))) == 2
    shutil.copy(tmp_path / "other" / "server" / "server.key", keys / "ca.key")
    (keys / "server" / "server.pem").unlink()
    (keys / "server" / "server.key").unlink()
    with pytest.raises(ConfigError, match="ca.key does not belong to ca.crt"):
        make_keys(KeyRequest(keys, 2, HOSTS))


def test_an_expired_certificate_is_an_error(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedfrozen_app.deploy import certificates

    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=366)

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return later

    monkeypatch.setattr(certificates.datetime, "datetime", Later)
    with pytest.raises(ConfigError, match="server.pem expired on 20"):
        make_keys(KeyRequest(keys, 2, HOSTS))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes": 0}, "nodes must be >= 1, got 0"),
        ({"hosts": []}, "hosts must not be empty"),
        ({"hosts": ["https://x"]}, "'https://x' is neither"),
        ({"hosts": ["x:8000"]}, "'x:8000' is neither"),
        ({"hosts": ["1.2.3"]}, "'1.2.3' is neither"),
        ({"hosts": ["-a"]}, "'-a' is neither"),
        ({"days": 0}, "days must be in 1..36500, got 0"),
        ({"days": 7, "ca_days": 6}, "days must be <= ca-days=6, got 7"),
    ],
)
def test_a_wrong_request_is_refused(changes: dict, words: str, tmp_path: Path) -> None:
    values = {"nodes": 1, "hosts": ["localhost"], **changes}
    with pytest.raises(ConfigError, match=words):
        KeyRequest(tmp_path / "keys", **values)
    assert not (tmp_path / "keys").exists()


def test_the_command_says_what_it_made_and_ends_with_2_where_it_cannot(tmp_path: Path) -> None:
    command = ["keys", "--out", str(tmp_path / "keys"), "--nodes", "1", "--hosts", "a.b, 127.0.0.1"]
    first = CliRunner().invoke(app, command)
    assert first.exit_code == 0 and first.stdout.count("made ") == 7
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 0
    assert again.stdout == f"nothing is missing in {tmp_path / 'keys'}\n"
    (tmp_path / "file").touch()
    wrong = CliRunner().invoke(app, [*command[:2], str(tmp_path / "file"), *command[3:]])
    assert wrong.exit_code == 2 and "choose another --out" in wrong.stderr
