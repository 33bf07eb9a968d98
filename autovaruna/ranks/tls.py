"""Connections between processes of one job on any hosts: TLS, both sides with a certificate that was made for the job.

The job's `Authority` is known to its manager alone, each host has `Credentials` of its own, and whoever connects says
which host it means: what is heard or taken on the way is of no use. JSON and bytes follow, never pickles. Nothing here
needs torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from autovaruna.ranks.system import memory_file

MOST_BYTES = 8 << 20  # of one answer
_CONNECT_SECONDS = 10.0
_SILENT_SECONDS = 10  # after so long without a sign of life of the other host, whoever reads or writes gets an error
_STRANGER_SECONDS = 5.0
_MOST_STRANGERS = 64  # connections that have not proved anything yet; one more, and the oldest of them is closed
_SMALL_BYTES = 16 << 10
_LENGTH = struct.Struct("<Q")
_JOB = "job"  # what an authority is called


@dataclass(frozen=True)
class Credentials:
    """What a process of a job shows to others, and knows them by, as PEM."""

    authority: str  # the certificate of the job, which has signed all others
    certificate: str
    key: str
    is_open: bool = False  # once both sides are known, what they send is neither encrypted nor signed


class Authority:
    """Makes the credentials of one job; whoever has its `key` can. Without a key it makes one."""

    def __init__(self, key: str = "") -> None:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        known: Any = serialization.load_pem_private_key(key.encode(), None) if key else None
        self._key: Any = known or ec.generate_private_key(ec.SECP256R1())
        self.key = _pem_of(self._key)
        self._certificate = self._sign(self._key, _JOB, is_authority=True)

    def credentials(self, name: str, is_open: bool = False) -> Credentials:
        """Returns new credentials of a host, or of whoever else has a name in the job."""
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        return Credentials(self._certificate, self._sign(key, _identity(name)), _pem_of(key), is_open)

    def _sign(self, key: Any, identity: str, is_authority: bool = False) -> str:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization

        names = [x509.NameAttribute(x509.NameOID.COMMON_NAME, each) for each in (_JOB, identity)]
        issuer, subject = (x509.Name([name]) for name in names)
        certificate = (
            x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
            .not_valid_before(datetime(1970, 1, 1))  # whatever the clocks of hosts say: it ends with the job
            .not_valid_after(datetime(9999, 1, 1))
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(identity)]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _pem_of(key: Any) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return str(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode())


def _identity(name: str) -> str:
    """Returns what a certificate says for a name: names and addresses of machines are not all names of the DNS."""
    return "h" + hashlib.sha256(name.encode()).hexdigest()[:40]


@lru_cache(maxsize=8)
def _context(own: Credentials, is_server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=own.authority)
    if is_server:
        context.num_tickets = 0  # nothing is resumed, and nothing comes behind the handshake
    file = memory_file("credentials")  # the module takes files alone
    try:
        os.write(file, (own.key + own.certificate).encode())
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return context


class Connection:
    """Sends and receives messages, each as its length and its bytes."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._stream.close()

    def send_bytes(self, data: bytes | memoryview) -> None:
        header = _LENGTH.pack(len(data))
        if len(data) <= _SMALL_BYTES:  # in one packet
            self._stream.sendall(header + data)
        else:
            self._stream.sendall(header)
            self._stream.sendall(data)

    def recv_bytes(self, most: int = MOST_BYTES) -> bytearray:
        """Returns the next message; EOFError if the other side has closed, OSError if it is longer than `most`."""
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if size > most:
            raise OSError(f"a message of {size} bytes; expected {most} at most")
        return self._read(size)

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        left = memoryview(data)
        while left:
            count = self._stream.recv_into(left)
            if not count:
                raise EOFError("the other side has closed the connection")
            left = left[count:]
        return data


def connect(host: str, port: int, own: Credentials, name: str, seconds: float = _CONNECT_SECONDS) -> Connection:
    """Returns a connection to the `Server` of a job's host of a `name`, whatever its address.

    Raises OSError if nobody is there, or it is another, with why.
    """
    try:
        stream = socket.create_connection((host, port), timeout=seconds)
        try:
            _expect_signs_of_life(stream)
            secure = _context(own, False).wrap_socket(stream, server_hostname=_identity(name))
            stream = secure.unwrap() if own.is_open else secure
        except BaseException:
            stream.close()
            raise
    except OSError as error:
        raise OSError(f"{host}:{port}: {error.strerror or error}") from error
    stream.settimeout(None)
    return Connection(stream)


def _expect_signs_of_life(end: socket.socket) -> None:
    """Has the system end a connection to a host without power, which sends no word of its end."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
        if hasattr(socket, option):  # on Linux
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_SECONDS * 1000)


class Server:
    """Answers JSON requests on a port of its own, each connection in a thread, of whoever has credentials of the job.

    Strangers get nothing, and cost nothing but a closed connection.
    """

    def __init__(self, own: Credentials, answer: Callable[[Connection, Mapping[str, Any]], None]) -> None:
        self._own, self._answer = own, answer
        self._strangers: deque[socket.socket] = deque()
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        self._listener = socket.create_server(("", 0), family=family, backlog=1024, dualstack_ipv6=is_dual)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except OSError:
                continue
            self._strangers.append(watched := accepted.dup())
            if len(self._strangers) > _MOST_STRANGERS:
                _shut(self._strangers.popleft())
            threading.Thread(target=self._attend, args=(accepted, watched), daemon=True).start()

    def _attend(self, accepted: socket.socket, watched: socket.socket) -> None:
        watch = threading.Timer(_STRANGER_SECONDS, _shut, [watched])
        watch.daemon = True
        watch.start()
        try:
            with accepted:  # which is closed by then, if it has become a secure one
                secure = _context(self._own, True).wrap_socket(accepted, server_side=True)
            with Connection(secure.unwrap() if self._own.is_open else secure) as connection:
                watch.cancel()
                self._admit(watched)
                while True:
                    self._answer(connection, json.loads(connection.recv_bytes()))
        except Exception:  # whatever a stranger sends, it ends with the connection
            pass
        finally:
            watch.cancel()
            self._admit(watched)
            watched.close()

    def _admit(self, watched: socket.socket) -> None:
        """Counts a connection as a stranger's no more."""
        with suppress(ValueError):
            self._strangers.remove(watched)


def _shut(watched: socket.socket) -> None:
    with suppress(OSError):
        watched.shutdown(socket.SHUT_RDWR)
