"""A real S3 server, SeaweedFS, for tests: one process, data in a temporary folder, only on the loopback interface."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta

from obstore.exceptions import BaseError
from obstore.store import S3Store

BUCKET = "braid"
KEY, SECRET = "braid-test", "braid-test-secret"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
_SERVICES = ("master", "volume", "filer", "s3", "admin")
_GRPC_OFFSET = 10_000
"""Parts of the server reach each other at their HTTP port + this, whatever their own option says."""
_START_SECONDS = 30
_ATTEMPTS = 5


class S3Server:
    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port
        self.endpoint = f"http://127.0.0.1:{port}"

    def url(self, prefix: str, *, bucket: str = BUCKET) -> str:
        return f"s3://{bucket}/{prefix}?region=us-east-1&endpoint={self.endpoint}"

    def answers(self) -> bool:
        """Whether it is up and has made the bucket, which it does last."""
        store = S3Store(
            BUCKET,
            config={
                "endpoint": self.endpoint,
                "region": "us-east-1",
                "access_key_id": KEY,
                "secret_access_key": SECRET,
            },
            client_options={"allow_http": True, "timeout": timedelta(seconds=5)},
            retry_config={"max_retries": 0},
        )
        try:
            store.list().collect()
        except BaseError:
            return False
        return True

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def running_s3_server() -> Iterator[S3Server]:
    folder = tempfile.mkdtemp(prefix="braid-s3-")
    ports: dict[str, int] = {}
    server = None
    try:
        for _ in range(_ATTEMPTS):
            ports = _free_ports()
            server = S3Server(_start(folder, ports), ports["s3"])
            if _wait(server):
                break
            server.stop()  # Somebody took one of the ports between our look and the server's.
        else:
            with open(f"{folder}/log") as log:
                raise RuntimeError(f"the S3 server did not start; its log ends with:\n{log.read()[-3_000:]}")
        yield server
    finally:
        if server is not None:
            server.stop()
        shutil.rmtree(folder)
        for port in (*ports.values(), *(port + _GRPC_OFFSET for port in ports.values())):
            for path in glob.glob(f"/tmp/seaweedfs-*-{port}.sock"):
                os.unlink(path)


def _start(folder: str, ports: dict[str, int]) -> subprocess.Popen[bytes]:
    command = [f"{sysconfig.get_path('scripts')}/weed", "mini", f"-dir={folder}", f"-bucket={BUCKET}"]
    command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-volume.max=0", "-master.telemetry=false"]
    command += ["-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
    command += ["-s3.autoCreateBucket=false"]
    command += [f"-{service}.port={port}" for service, port in ports.items()]
    command += [f"-{service}.port.grpc={port + _GRPC_OFFSET}" for service, port in ports.items()]
    environment = {**os.environ, **CREDENTIALS}
    with open(f"{folder}/log", "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment)


def _wait(server: S3Server) -> bool:
    deadline = time.monotonic() + _START_SECONDS
    while server.process.poll() is None and time.monotonic() < deadline:
        if server.answers():
            return True
        time.sleep(0.02)
    return False


def _free_ports() -> dict[str, int]:
    """Five ports that are free, each with its neighbour 10,000 above; all held until all are found."""
    with contextlib.ExitStack() as held:
        ports: dict[str, int] = {}
        while len(ports) < len(_SERVICES):
            with contextlib.suppress(OSError, OverflowError):
                low = held.enter_context(socket.create_server(("127.0.0.1", 0)))
                port = low.getsockname()[1]
                held.enter_context(socket.create_server(("127.0.0.1", port + _GRPC_OFFSET)))
                ports[_SERVICES[len(ports)]] = port
        return ports


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        return int(holder.getsockname()[1])
