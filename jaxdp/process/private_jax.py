"""The private parts of JAX that jaxdp uses, all of them, each with its reason.

- `_jax.get_distributed_runtime_service`: JAX starts its coordination service inside rank 0, whose
  death then aborts all other ranks. jaxdp runs it in the coordinator's process.
- `_jax.get_distributed_runtime_client`, `distributed.global_state`: `jax.distributed.initialize` on
  rank 0 starts that service too, so the client is created here. `verify` sets the number of a
  process that is not connected at all.
- `_jax.make_gloo_tcp_collectives`: Gloo listens on the address that the host's name resolves to,
  and JAX has no option for another one. Without this, a job on one host could be reached from the
  network.
- `lax._dot_general_lower`: an extra changes how products are lowered for CPU, then calls this.
- `mlir._platform_specific_lowerings`: the table that this changes, to restore it; JAX has no
  function for that.
- `xla_bridge.backends_are_initialized`: whether it is too late to join other processes; there is no
  public function.

Mutual TLS for JAX's coordination service, where JAX has it (0.12): only processes with the job's secret
connect. Every process derives the same private key from the secret, so no certificate has to be sent: a
peer is accepted if its certificate was signed with that key. The peer's host name does not matter, since
its certificate names a URI instead (RFC 5280, section 4.2.1.6).
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hmac
import importlib.util
import pathlib
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

ISSUER = "jaxdp job"
SUBJECT = "jaxdp process"
URI = "jaxdp://job/"
SLACK = datetime.timedelta(days=2)  # clocks of two hosts may differ by this much
LIFE = datetime.timedelta(days=3650)


@contextlib.contextmanager
def certificate_files(secret: str) -> Iterator[dict[str, str]]:
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
    # 255 bits are less than the order of the group.
    key = ec.derive_private_key((number >> 1) + 1, ec.SECP256R1())

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


# Seconds. The coordinator detects processes that die or are cut off; JAX would abort all of a job
# that was suspended.
HEARTBEAT = 7 * 86_400


def load() -> None:
    """Import the library of the coordination service."""
    from jaxlib import _jax  # noqa: F401


def service_has_tls() -> bool:
    """Return whether JAX's coordination service uses mutual TLS: from JAX 0.12 on, with the package
    cryptography.
    """
    from jaxlib import _jax

    installed = importlib.util.find_spec("cryptography") is not None
    return installed and "mtls_cert_file" in (_jax.get_distributed_runtime_service.__doc__ or "")


def tls(secret: str) -> contextlib.AbstractContextManager[dict[str, str]]:
    """Return a context with the options of the service and its clients; without TLS there are none."""
    return certificate_files(secret) if service_has_tls() else contextlib.nullcontext({})


def start_service(address: str, size: int, secret: str, shutdown_timeout: int) -> Any:
    """Start JAX's coordination service at "host:port"; it ends when the object is deleted. Timeout
    in seconds.

    secret: clients prove that they have it, if JAX supports it. The coordinator detects processes
    that die. To JAX that is no error (`recoverable`): a process that ends would wait 20 s for the
    others, and then abort them."""
    from jaxlib import _jax

    with tls(secret) as options:
        return _jax.get_distributed_runtime_service(
            address,
            size,
            heartbeat_timeout=HEARTBEAT,
            shutdown_timeout=shutdown_timeout,
            recoverable=True,
            **options,
        )


def make_client(address: str, rank: int, secret: str, timeout: float, survives: bool = True) -> Any:
    """Return a client of JAX's coordination service; `connect` waits for those of all other ranks.

    survives: if that takes longer than `timeout` seconds and the 5 that JAX adds, it raises
    RuntimeError. JAX would abort the process, and its state would be lost; it does not if it has a
    callback, which it then fails to call."""
    from jaxlib import _jax

    with tls(secret) as options:
        return _jax.get_distributed_runtime_client(
            address,
            rank,
            init_timeout=max(1, round(timeout)),
            use_compression=True,
            heartbeat_timeout=HEARTBEAT,
            shutdown_on_destruction=not survives,
            **({"missed_heartbeat_callback": print} if survives else {}),
            **options,
        )


def use_client(
    client: Any, address: str, rank: int, size: int, devices: Sequence[int] | None
) -> None:
    """Make this process one of `size`, as `jax.distributed.initialize` does on ranks above 0.

    Args:
        client: of JAX's coordination service at `address` ("host:port"); it is connected. None: JAX
            knows no other process.
        devices: the local GPUs of this process; None for all.

    Devices that are open are closed: all arrays and compiled programs become invalid. They are
    closed last, so that a thread that still uses JAX cannot open them for this process alone.
    """
    import jax
    from jax._src.distributed import global_state
    from jax.extend import backend

    settings: dict[str, Any] = {"jax_cpu_collectives_implementation": "gloo"}
    if devices is not None:
        visible = ",".join(map(str, devices))
        settings |= {"jax_cuda_visible_devices": visible, "jax_rocm_visible_devices": visible}
    for option, value in settings.items():
        with contextlib.suppress(AttributeError):  # an option of another release
            jax.config.update(option, value)
    global_state.client = client
    global_state.coordinator_address = address
    if client is not None:
        number_process(rank, size)
    if backends_initialized():
        backend.clear_backends()


def number_process(rank: int, size: int) -> None:
    """Let JAX open its devices as process `rank` of `size`, without a connection to others:
    `verify` asks how numbers depend on it. Programs of one device work as usual."""
    from jax._src.distributed import global_state

    global_state.process_id = rank
    global_state.num_processes = size


def is_connected() -> bool:
    """Return whether this process is a client of a coordination service, started by jaxdp or by the
    program.
    """
    from jax._src.distributed import global_state

    return global_state.client is not None


@contextlib.contextmanager
def store_programs() -> Iterator[None]:
    """Let this process write what it compiles for CPU inside this context to the compilation cache.

    JAX lets process 0 alone write, but on CPU the keys differ by process, so the others would
    always compile again. Nothing else may read the number of this process meanwhile, as Orbax does
    while it saves."""
    import jax
    from jax._src.distributed import global_state

    number = global_state.process_id
    global_state.process_id = 0 if jax.default_backend() == "cpu" else number
    try:
        yield
    finally:
        global_state.process_id = number


def backends_initialized() -> bool:
    """Return whether JAX has opened its devices, after which it cannot join other processes."""
    from jax._src import xla_bridge

    return xla_bridge.backends_are_initialized()


def bind_gloo(hostname: str) -> None:
    """Make Gloo's collectives listen on this address only."""
    from jax._src.lib import _jax

    _jax.make_gloo_tcp_collectives = functools.partial(
        _jax.make_gloo_tcp_collectives, hostname=hostname
    )


def lower_dot(ctx: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
    """Lower `jax.lax.dot_general` for CPU as JAX does."""
    from jax._src.lax.lax import _dot_general_lower

    return _dot_general_lower(ctx, lhs, rhs, platform="cpu", **params)


@contextlib.contextmanager
def usual_lowerings() -> Iterator[None]:
    """Restore at the end how JAX lowers products and sums for CPU: an extra may change it."""
    from jax import lax
    from jax._src.interpreters import mlir

    table = mlir._platform_specific_lowerings["cpu"]
    changed = lax.dot_general_p, lax.conv_general_dilated_p, lax.reduce_sum_p
    before = {p: table[p] for p in changed if p in table}
    try:
        yield
    finally:
        for p in changed:
            table.pop(p, None)
        table.update(before)
