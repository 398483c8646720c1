"""The mirror: copies of finished checkpoints, from which an empty directory continues."""

import json
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from cli_runs import jaxdp as train
from cli_runs import records
from jaxdp.checkpoint.folders import complete
from jaxdp.mirror.storage import Storage
from launch import ROOT, environment

DIGITS = ["--config", str(ROOT / "configs" / "digits.yaml"), "--steps", "60"]


def run(directory, store, *more, code=0):
    """Train in a directory that is mirrored to a folder of this machine, or to a URL."""
    words = ["--run_dir", str(directory), "--checkpoint.every", "20", *more]
    return train(*DIGITS, *words, "--checkpoint.mirror", str(store), code=code)


def wait_until(happens, what, seconds=60):
    deadline = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory):
    """A run of 60 updates, and its mirror."""
    top = tmp_path_factory.mktemp("mirrored")
    run(top / "here" / "run", top / "store")
    return top


def copied(mirrored, folder):
    shutil.copytree(mirrored / "store", folder / "store")
    return folder / "store" / "run" / "checkpoints"


def test_an_empty_directory_resumes_from_its_mirror(mirrored, tmp_path):
    checkpoints = copied(mirrored, tmp_path)
    shutil.rmtree(checkpoints / "60")  # as if the host had been lost after update 40
    result = run(tmp_path / "there" / "run", tmp_path / "store")
    assert "mirror: steps up to 40 were copied" in result.stdout
    assert f"mirror: {tmp_path / 'store' / 'run'} has step 60" in result.stdout
    here, there = (records(x / "run") for x in (mirrored / "here", tmp_path / "there"))
    assert here[-1]["params_sha256"] == there[-1]["params_sha256"]
    assert [r["step"] for r in here] == [r["step"] for r in there]
    assert complete(checkpoints) == complete(mirrored / "here" / "run" / "checkpoints")


def test_what_is_copied_is_what_the_directory_has(mirrored):
    here, there = mirrored / "here" / "run", mirrored / "store" / "run"
    for file in (here / "checkpoints").rglob("*"):
        if file.is_file():
            assert (there / file.relative_to(here)).read_bytes() == file.read_bytes()
    assert (there / "metrics.jsonl").read_bytes() == (here / "metrics.jsonl").read_bytes()
    assert not (there / "git.diff").exists() and not (there / ".nonce").exists()


def test_a_damaged_checkpoint_of_the_mirror_is_named(mirrored, tmp_path):
    checkpoints = copied(mirrored, tmp_path)
    file = max((checkpoints / "60").rglob("*"), key=lambda x: x.stat().st_size * x.is_file())
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    result = run(tmp_path / "there" / "run", tmp_path / "store")
    name = file.relative_to(checkpoints / "60")
    assert f"checkpoint 60 of {tmp_path / 'store' / 'run'} is damaged: {name}" in result.stderr
    assert "steps up to 40 were copied" in result.stdout


def test_a_manifest_cannot_name_a_file_outside(mirrored, tmp_path, capfd):
    checkpoints = copied(mirrored, tmp_path)
    outside = tmp_path / "outside"
    outside.write_text("secret")
    for step in complete(checkpoints):
        manifest = checkpoints / str(step) / "manifest.json"
        content = json.loads(manifest.read_text())
        content["files"]["../../../../outside"] = content["files"].popitem()[1]
        manifest.write_text(json.dumps(content))
    storage = Storage(str(tmp_path / "store"), tmp_path / "run")
    storage.download()
    assert capfd.readouterr().err.count(" is damaged: ") == 3 and outside.read_text() == "secret"
    assert complete(storage.local) == []
    result = run(tmp_path / "there" / "run", tmp_path / "store", code=2)
    assert "no checkpoint of" in result.stderr


def test_a_mirror_ahead_of_the_run_is_not_overwritten(mirrored, tmp_path):
    copied(mirrored, tmp_path)
    shutil.copytree(mirrored / "here" / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "60")
    result = run(tmp_path / "run", tmp_path / "store", code=2)
    assert "is at step 60, but" in result.stderr and "remove the directory" in result.stderr
    assert complete(tmp_path / "store" / "run" / "checkpoints") == [20, 40, 60]


def test_the_mirror_of_another_run_is_not_overwritten(mirrored, tmp_path):
    checkpoints = copied(mirrored, tmp_path)
    other = tmp_path / "other" / "run"
    words = [*DIGITS, "--seed", "7", "--checkpoint.every", "20", "--run_dir", str(other)]
    train(*words)
    before = (checkpoints / "60" / "manifest.json").read_bytes()
    result = run(other, tmp_path / "store", "--seed", "7", code=2)
    assert "or they are of two runs" in result.stderr
    assert (checkpoints / "60" / "manifest.json").read_bytes() == before


def test_another_config_fills_no_empty_directory(mirrored, tmp_path):
    copied(mirrored, tmp_path)
    result = run(tmp_path / "run", tmp_path / "store", "--seed", "7", code=2)
    assert "has other values: seed: 0 -> 7" in result.stderr
    assert not (tmp_path / "run").exists()


def test_a_download_that_is_interrupted_is_made_again(mirrored, tmp_path, monkeypatch):
    """No checkpoint has its name before all are there: the mirror would be ahead of the directory."""
    copied(mirrored, tmp_path)
    storage = Storage(str(tmp_path / "store"), tmp_path / "run")
    get, count = storage.files.get_file, []

    def cut(source, target):
        count.append(source)
        if len(count) > 15:  # in the second checkpoint
            raise ConnectionResetError("cut")
        get(source, target)

    monkeypatch.setattr(storage.files, "get_file", cut)
    with pytest.raises(ConnectionResetError):
        storage.download()
    monkeypatch.undo()
    assert complete(storage.local) == [] and [*storage.local.glob("*.mirror")]
    Storage(str(tmp_path / "store"), tmp_path / "run").download()
    assert complete(storage.local) == [20, 40, 60] and not [*storage.local.glob("*.mirror")]


def test_one_of_two_runs_of_a_name_is_copied(mirrored, tmp_path):
    """The other one says so, and copies nothing."""
    copied(mirrored, tmp_path)
    there = tmp_path / "store" / "run" / "checkpoints"
    shutil.copytree(mirrored / "here" / "run", tmp_path / "two" / "run")
    shutil.rmtree(tmp_path / "two" / "run" / "checkpoints" / "20")
    Storage(str(tmp_path / "store"), mirrored / "here" / "run").upload(True)
    with pytest.raises(PermissionError, match="another run has copied there since"):
        Storage(str(tmp_path / "store"), tmp_path / "two" / "run").upload(True)
    assert complete(there) == [20, 40, 60]


def test_a_start_leaves_a_run_its_mirror(mirrored, tmp_path):
    """Also if its nonce is written after the first copy."""
    shutil.copytree(mirrored / "here" / "run", tmp_path / "run")
    storage = Storage(str(tmp_path / "store"), tmp_path / "run")
    storage.check()
    for nonce in ("of the last start", "of this start"):
        (tmp_path / "run" / ".nonce").write_text(nonce)
        storage.upload(True)
    assert storage.steps() == [20, 40, 60]


def test_a_killed_run_has_its_last_save_in_the_mirror(tmp_path):
    words = [*DIGITS[:-1], "100000", "--run_dir", str(tmp_path / "run"), "--checkpoint.every", "50"]
    words += ["--checkpoint.mirror", str(tmp_path / "store"), "--epochs", "null"]
    job = subprocess.Popen(
        [sys.executable, "-m", "jaxdp", "train", *words],
        env=environment({"PYTHONPATH": str(ROOT)}, 1),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    here, there = tmp_path / "run" / "checkpoints", tmp_path / "store" / "run" / "checkpoints"
    try:
        wait_until(lambda: complete(there), "nothing was copied")
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()
    wait_until(lambda: complete(there) == complete(here), "the last copy is missing")
    metrics = (here.parent / "metrics.jsonl").read_bytes()
    copy = there.parent / "metrics.jsonl"  # it is copied after the checkpoints
    wait_until(lambda: copy.read_bytes() == metrics, "the last metrics are missing")


def test_what_cannot_be_copied_is_tried_again(mirrored, tmp_path):
    store = tmp_path / "store" / "run"
    store.mkdir(parents=True)
    (store / ".mirror").touch()  # as a start does
    (store / "checkpoints").write_text("a file in the place of a folder")
    words = [tmp_path / "store", mirrored / "here" / "run"]
    copier = subprocess.Popen(
        [sys.executable, "-m", "jaxdp.mirror.copier", *map(str, words)],
        env=environment({"PYTHONPATH": str(ROOT)}, 1),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    line = copier.stderr.readline()
    assert line.startswith(f"checkpoint.mirror: {store}: ") and line.endswith("trying again\n")
    (store / "checkpoints").unlink()
    wait_until(lambda: complete(store / "checkpoints") == [20, 40, 60], "it was not tried again")
    assert copier.communicate(timeout=60) == (f"mirror: {store} has step 60", "")


def test_what_was_never_copied_is_said_at_the_end(tmp_path):
    store = tmp_path / "store" / "run"
    store.mkdir(parents=True)
    (store / "checkpoints").write_text("a file in the place of a folder")
    result = run(tmp_path / "run", tmp_path / "store")
    assert "all is in" in result.stderr and "the same command copies it" in result.stderr
    (store / "checkpoints").unlink()
    assert "has step 60" in run(tmp_path / "run", tmp_path / "store").stdout
    assert complete(store / "checkpoints") == [20, 40, 60]


@pytest.mark.parametrize(
    ("url", "more", "reason"),
    [
        (
            "s4://bucket",
            (),
            "checkpoint.mirror: 's4://bucket': Protocol not known: s4",
        ),
        ("/dev/null", (), "checkpoint.mirror: '/dev/null': "),
        ("memory://store", (), "it is in the run directory, or in the memory of a process"),
        ("{top}", (), "it is in the run directory, or in the memory of a process"),
        ("{top}/run", (), "it is in the run directory, or in the memory of a process"),
        ("store", ("--checkpoint.local", "true"), "checkpoint.mirror: with checkpoint.local: true"),
    ],
)
def test_a_mirror_that_cannot_be_used_is_refused(tmp_path, url, more, reason):
    result = run(tmp_path / "run", url.format(top=tmp_path), *more, code=2)
    assert reason in result.stderr, result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_a_server_of_s3_and_one_that_does_not_answer(tmp_path, monkeypatch):
    server_of = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    import boto3

    server = server_of.ThreadedMotoServer(port=0)
    server.start()
    _, port = server.get_host_and_port()
    url = f"http://127.0.0.1:{port}"
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "x"}
    for name, value in {**keys, "AWS_ENDPOINT_URL": url}.items():
        monkeypatch.setenv(name, value)
    try:
        missing = run(tmp_path / "run", "s3://bucket/runs", code=2)
        assert "checkpoint.mirror: 's3://bucket/runs': Not Found" in missing.stderr
        client = boto3.client("s3", endpoint_url=url)
        client.create_bucket(Bucket="bucket", CreateBucketConfiguration={"LocationConstraint": "x"})
        run(tmp_path / "run", "s3://bucket/runs")
        digest = records(tmp_path / "run")[-1]["params_sha256"]
        found = client.list_objects_v2(Bucket="bucket", Prefix="runs/run/checkpoints/60/")
        assert any(x["Key"].endswith("manifest.json") for x in found["Contents"])
        shutil.rmtree(tmp_path / "run")
        run(tmp_path / "run", "s3://bucket/runs")
        assert records(tmp_path / "run")[-1]["params_sha256"] == digest
    finally:
        server.stop()
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and says nothing
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", address)
        result = run(tmp_path / "other", "s3://bucket/runs", code=2)
    assert "checkpoint.mirror: 's3://bucket/runs': " in result.stderr
    assert not pathlib.Path(tmp_path / "other" / "metrics.jsonl").exists()
