"""Runs a command on a disk of its own: `own_disk.py MOUNT DISK0 DISK1 ... -- ARGV` mounts this
rank's DISK at MOUNT.
"""

import os
import sys

from jaxdp.process.launchers import discover

end = sys.argv.index("--")
mount, *disks = sys.argv[1:end]
script = 'mount --bind "$0" "$1" && shift && exec "$@"'
words = [
    "unshare",
    "--mount",
    "sh",
    "-c",
    script,
    disks[discover().rank],
    mount,
    sys.executable,
    *sys.argv[end + 1 :],
]
os.execvp("unshare", words)
