"""Small artifacts, and places for them: a folder, and a bucket of an S3 server in this process."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import boto3
from moto.server import ThreadedMotoServer

from nxpipe.artifact_store import Published, Store
from nxpipe.artifact_store.backends.local import LocalFolder
from nxpipe.artifact_store.backends.protocol import Backend, ListedObject, Payload, Sent, ignore_progress
from nxpipe.artifact_store.backends.s3 import connect
from nxpipe.artifact_store.canonical import canonical_json, sha256_hex
from nxpipe.artifact_store.documents import Blob
from nxpipe.artifact_store.evidence import DEVICE, EMULATED, Compared, Evidence, Figures, Limits, Timing
from nxpipe.artifact_store.manifest import DeviceProgram, Executable, File, Manifest, ModelRef, Tensor
from tests.localaws.moto_patches import creations

T = TypeVar("T")
R = TypeVar("R")

MODEL = "acme/tiny-bert"


def contents(seed: str = "a", request: object = 1, *, tensors: int = 2, size: int = 100) -> list[bytes]:
    """A request document, a program, tensors and a file, in this order; equal seeds give equal bytes."""
    request_document = canonical_json({"request": request})
    names = ["program", *(f"tensor {number}" for number in range(tensors)), "file"]
    return [request_document, *(f"{seed} {name} ".encode().ljust(size, b".") for name in names)]


def manifest(blobs: list[Blob], *, model: str = MODEL, graph: str = "graph") -> Manifest:
    """An artifact of these blobs; the first, what was asked for, alone decides its key. Another graph is another
    answer to that."""
    asked, program, *tensors, file = blobs
    return Manifest(
        model=ModelRef(id=model, revision=None, task="fill-mask"),
        target="inf2",
        backend="emulator",
        key_inputs=asked,
        executables=(
            Executable(
                name="forward-b1-s128",
                phase="forward",
                batch=1,
                sequence=128,
                tensor_parallel=1,
                graph_key=sha256_hex(graph.encode()),
                outputs=("logits",),
                blob=program,
            ),
        ),
        weights=tuple(
            Tensor(name=f"layer.{number}", dtype="uint8", shape=(blob.size,), blob=blob, pack=None)
            for number, blob in enumerate(tensors)
        ),
        files=(File(path="tokenizer/config.json", blob=file),),
    )


def put(store: Store, seed: str = "a", *, request: object = 1, model: str = MODEL, graph: str = "graph") -> Manifest:
    """Store and return the blobs of a sample; nothing is published."""
    return manifest([store.put_blob(data) for data in contents(seed, request)], model=model, graph=graph)


def with_device_programs(store: Store, made: Manifest) -> Manifest:
    """The artifact as backend neuronx builds it: a NEFF beside each program, and files that only the emulator needs."""
    executables = [
        executable.model_copy(
            update={
                "device": DeviceProgram(
                    **{
                        kind: store.put_blob(f"{kind} of {executable.name}".encode())
                        for kind in DeviceProgram.model_fields
                    }
                )
            }
        )
        for executable in made.executables
    ]
    graphs = [File(path=f"graphs/{each.name}", blob=store.put_blob(b"graph")) for each in executables]
    return made.model_copy(
        update={"backend": "neuronx", "executables": tuple(executables), "files": (*made.files, *graphs)}
    )


def evidence(store: Store, made: Manifest, kind: str = EMULATED, **figures: float | None) -> Evidence:
    """Evidence that each output of each program has these errors; its blobs are stored."""
    near = {"max_absolute": 0.001, "mean_absolute": 0.0001, "max_relative": 0.001, "cosine": 0.9999999}
    result: dict[str, Any] = near | {"kl": 0.0001, "top1": 1.0} | figures
    programs = [
        Compared(
            program=executable.name,
            yardstick="PyTorch fp32",
            outputs=tuple(Figures(output=output, **result) for output in executable.outputs),
            inputs=store.put_blob(b"fed to " + executable.name.encode()),
            answers=store.put_blob(b"answered by " + executable.name.encode()),
            surroundings={"processor": "a sample's"},
            timing=Timing(clock="device", runs=100, p50_ms=2.5, p99_ms=3.0) if kind == DEVICE else None,
        )
        for executable in made.executables
    ]
    limits = Limits(min_cosine=0.999, max_relative_error=0.05, max_kl=None, min_top1=None)
    return Evidence(manifest=made.digest, kind=kind, programs=tuple(programs), limits=limits)


def publish_verified(store: Store, made: Manifest, **figures: float | None) -> Published:
    """Publish as a build does."""
    store.attest(evidence(store, made, EMULATED, **figures))
    return store.publish(made)


def publish_proven(store: Store, made: Manifest, **figures: float | None) -> Published:
    """Publish as a build and `nxpipe prove` do, with these errors on devices."""
    store.attest(evidence(store, made, DEVICE, **figures))
    return publish_verified(store, made)


class Place(Protocol):
    """The location of a store's objects, for tests that damage them directly."""

    @property
    def store(self) -> Store: ...

    @property
    def backend(self) -> Backend: ...

    def elsewhere(self) -> Store:
        """The same store, opened as by a new process."""
        ...

    def objects(self) -> dict[str, bytes]: ...

    def write(self, path: str, data: bytes) -> None: ...

    def remove(self, path: str) -> None: ...


@dataclass(frozen=True)
class Folder:
    store: Store
    backend: Backend
    root: Path

    def elsewhere(self) -> Store:
        return Store(LocalFolder(self.root))

    def objects(self) -> dict[str, bytes]:
        files = (path for path in self.root.rglob("*") if path.is_file())
        return {path.relative_to(self.root).as_posix(): path.read_bytes() for path in files}

    def write(self, path: str, data: bytes) -> None:
        (self.root / path).write_bytes(data)

    def remove(self, path: str) -> None:
        (self.root / path).unlink()


@dataclass(frozen=True)
class S3:
    store: Store
    backend: Backend
    client: Any
    bucket: str
    prefix: str

    def elsewhere(self) -> Store:
        return Store(connect(self.bucket, self.prefix.rstrip("/")))

    def objects(self) -> dict[str, bytes]:
        objects = self.client.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix).get("Contents", ())
        return {
            entry["Key"].removeprefix(self.prefix): self.client.get_object(Bucket=self.bucket, Key=entry["Key"])[
                "Body"
            ].read()
            for entry in objects
        }

    def write(self, path: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=self.prefix + path, Body=data)

    def remove(self, path: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=self.prefix + path)


def folder(root: Path) -> Folder:
    backend = LocalFolder(root)
    return Folder(Store(backend), backend, root)


def bucket(name: str, prefix: str = "team/nxpipe/") -> S3:
    """A new bucket on the server at AWS_ENDPOINT_URL."""
    client = boto3.client("s3")
    client.create_bucket(Bucket=name)
    backend = connect(name, prefix.rstrip("/"))
    return S3(Store(backend), backend, client, name, prefix)


def watched(inner: Backend, announce: Callable[[str, str], None]) -> Backend:
    """A backend that announces each write before it happens."""
    return cast(Backend, _Watched(inner, announce))


class _Watched:
    def __init__(self, inner: Backend, announce: Callable[[str, str], None]) -> None:
        self._inner = inner
        self._announce = announce
        self.url = inner.url
        self.scratch_folder = inner.scratch_folder

    def create(self, path: str, payload: Payload, *, durable: bool = False, sent: Sent = ignore_progress) -> bool:
        self._announce("create durably" if durable else "create", path)
        return self._inner.create(path, payload, durable=durable, sent=sent)

    def replace(self, path: str, payload: Payload, *, sent: Sent = ignore_progress) -> None:
        self._announce("replace", path)
        self._inner.replace(path, payload, sent=sent)

    def touch(self, path: str) -> bool:
        self._announce("touch", path)
        return self._inner.touch(path)

    def remove(self, item: ListedObject) -> bool:
        self._announce("remove", item.path)
        return self._inner.remove(item)

    def make_durable(self, paths: Iterable[str]) -> None:
        paths = list(paths)
        for path in paths:
            self._announce("make durable", path)
        self._inner.make_durable(paths)

    def __getattr__(self, name: str) -> Any:
        """Reads are not announced."""
        return getattr(self._inner, name)


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """An S3 server in this process; yields the environment for its clients."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    creations.apply()
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
    finally:
        server.stop()


def tree(root: Path) -> set[str]:
    """Every file below a folder, by its relative path."""
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir()}
