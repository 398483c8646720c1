"""Memory in use, as far as known: that of the devices, or that of this process."""

import contextlib
import os


def memory() -> str:
    """Return the use of the fullest device, such as "12.3 of 141.0 GB (most 14.0)", else of the process, else ""."""
    import jax

    stats = [s for s in (device.memory_stats() for device in jax.local_devices()) if s]
    if stats:
        fullest = max(stats, key=lambda s: s.get("peak_bytes_in_use", 0))
        now, most = fullest.get("bytes_in_use", 0), fullest.get("peak_bytes_in_use", 0)
        limit = f" of {fullest['bytes_limit'] / 1e9:.1f}" if "bytes_limit" in fullest else ""
        return f"{now / 1e9:.1f}{limit} GB (most {most / 1e9:.1f})"
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return f"{resident / 1e9:.1f} GB of the host, by this process"
    return ""
