"""Jobs of two processes that end one after the other."""

import os
import subprocess
import sys

from launch import ROOT


def check_end(tmp_path, codes, code, first=""):
    """Launch two processes that end with these codes, rank 0 first: the launcher ends with `code`.

    first: a line of Python that each of them begins with."""
    script = tmp_path / "end.py"
    script.write_text(
        "import os, pathlib, sys, time\n"
        f"{first}\n"
        "pid, code = pathlib.Path('pid'), int(sys.argv[1][int(os.environ['JAXDP_PROCESS_ID'])])\n"
        "if os.environ['JAXDP_PROCESS_ID'] == '0':\n"
        "    pathlib.Path('new').write_text(str(os.getpid()))\n"
        "    pathlib.Path('new').rename(pid)\n"
        "    sys.exit(code)\n"
        "while not pid.exists() or pathlib.Path(f'/proc/{pid.read_text()}').exists():\n"
        "    time.sleep(0.01)\n"
        "sys.exit(code)\n"
    )
    words = [
        sys.executable,
        "-m",
        "jaxdp",
        "launch",
        "-n",
        "2",
        sys.executable,
        str(script),
        codes,
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=env, text=True, capture_output=True, timeout=60)
    assert done.returncode == code, done.stderr
