"""The folder of keys of a deployment; :func:`make_keys` makes what is missing in it.

The folder has one part for each kind of host, so that none is given what it does not need:

``ca.crt``  on every host, to check the SuperLink's certificate
``ca.key``  on no host; whoever has it can pretend to be the SuperLink
``server/`` on the SuperLink's host: ``server.pem``, ``server.key`` and ``superexec.secret``, by
which the SuperLink knows the process that runs server apps
``nodes/``  a pair ``node-K`` and ``node-K.pub`` for each SuperNode: the public half is registered
at the SuperLink, the private half goes to the node
"""

import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedfrozen_app.config import ConfigError
from fedfrozen_app.deploy.certificates import (
    Key,
    ca_certificate,
    general_name,
    pem,
    server_certificate,
    server_problem,
)

CURVE = ec.SECP384R1()  # the one of Flower's own examples
PRIVATE, PUBLIC = 0o600, 0o644
LONGEST = 36500  # days


@dataclass(frozen=True)
class KeyRequest:
    """What :func:`make_keys` is to make.

    Attributes
    ----------
    folder
        The folder of the keys; made with mode 0700 if missing.
    nodes
        SuperNodes, numbered from 0.
    hosts
        DNS names and IP addresses by which the SuperLink is reached.
    days, ca_days
        Lifetimes of the server certificate and of the CA, in days.
    """

    folder: Path
    nodes: int
    hosts: Sequence[str]
    days: int = 365
    ca_days: int = 5 * 365

    def __post_init__(self) -> None:
        """Check every value.

        Raises
        ------
        ConfigError
            Naming the value, the rule and the remedy.
        """
        if self.nodes < 1:
            raise ConfigError(f"nodes must be >= 1, got {self.nodes}; every node has its key")
        if not self.hosts:
            raise ConfigError(
                "hosts must not be empty; give the SuperLink's names or addresses, for example "
                "superlink,localhost,127.0.0.1"
            )
        for host in self.hosts:
            general_name(host)
        for name, days in (("days", self.days), ("ca-days", self.ca_days)):
            if not 1 <= days <= LONGEST:
                raise ConfigError(f"{name} must be in 1..{LONGEST}, got {days}; try 365")
        if self.days > self.ca_days:
            raise ConfigError(
                f"days must be <= ca-days={self.ca_days}, got {self.days}; a certificate does "
                "not outlive the CA that signed it"
            )


def make_keys(request: KeyRequest) -> list[Path]:
    """Make what is missing in a folder of keys; overwrite nothing.

    ``ca.key`` may have been taken away once the server's certificate is there, and so may a
    node's private half; neither is made again then.

    Returns
    -------
    list[Path]
        The files made, none if all were there.

    Raises
    ------
    ConfigError
        If the folder cannot be written, a pair is there by half, or the server's certificate is
        for other hosts, by another CA or too old.
    """
    try:
        for part in (".", "server", "nodes"):
            _make_folder(request.folder / part)
        made = _make_authority(request)
        made += _make_server(request)
        for index in range(request.nodes):
            made += _make_node(request.folder / "nodes" / f"node-{index}")
        return made
    except OSError as error:
        raise ConfigError(
            f"{str(error.filename or request.folder)!r}: {error.strerror}; choose another --out or "
            "mend that path"
        ) from None


def _make_authority(request: KeyRequest) -> list[Path]:
    key, certificate = request.folder / "ca.key", request.folder / "ca.crt"
    signed = (request.folder / "server" / "server.pem").exists()
    if certificate.exists() and signed and not key.exists():  # kept elsewhere, as it should be
        return []
    return _make_pair(key, certificate, lambda key: ca_certificate(key, request.ca_days))


def _make_server(request: KeyRequest) -> list[Path]:
    folder, ca = request.folder / "server", request.folder / "ca.crt"
    certificate, secret = folder / "server.pem", folder / "superexec.secret"

    def certify(key: Key) -> bytes:
        ca_key = (request.folder / "ca.key").read_bytes()
        return server_certificate(key, ca.read_bytes(), ca_key, request.hosts, request.days)

    made = _make_pair(folder / "server.key", certificate, certify)
    if problem := server_problem(certificate.read_bytes(), ca.read_bytes(), request.hosts):
        raise ConfigError(
            f"{certificate} {problem}; remove it and server.key to have both made again"
        )
    if not secret.exists():
        made.append(_write(secret, secrets.token_bytes(32), PRIVATE))
    return made


def _make_node(private: Path) -> list[Path]:
    """Make a node's pair in OpenSSH's formats, as ``ssh-keygen -t ecdsa -b 384`` does."""
    public = private.with_name(private.name + ".pub")
    if public.exists():  # the private half may have gone to its node
        return []
    made = []
    if not private.exists():
        content = ec.generate_private_key(CURVE).private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
        made.append(_write(private, content, PRIVATE))
    try:
        key = serialization.load_ssh_private_key(private.read_bytes(), None).public_key()
    except ValueError as error:
        raise ConfigError(
            f"{private} is no OpenSSH private key ({error}); remove it to have it made again"
        ) from None
    content = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return [*made, _write(public, content + b"\n", PUBLIC)]


def _make_pair(private: Path, public: Path, certify: Callable[[Key], bytes]) -> list[Path]:
    """Make a private key and its certificate, unless both are there."""
    if private.exists() and public.exists():
        return []
    if private.exists() or public.exists():
        there, missing = (private, public) if private.exists() else (public, private)
        raise ConfigError(
            f"{there} is there and {missing.name} is not; put it back, or remove {there.name} to "
            "have both made again"
        )
    key = ec.generate_private_key(CURVE)
    content = certify(key)
    return [_write(private, pem(key), PRIVATE), _write(public, content, PUBLIC)]


def _make_folder(path: Path) -> None:
    """Make a folder that only its owner may enter; leave one that is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def _write(path: Path, content: bytes, mode: int) -> Path:
    """Write a new file, closed to others from its first byte on."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        os.fchmod(handle, mode)  # whatever the umask
    return path
