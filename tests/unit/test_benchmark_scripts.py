"""Every script of `benchmarks` at its smallest: it runs, and what it prints has the values that it
must have.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from benchmarks import gpu, job, run, seeds

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
TORCH = ROOT / ".venv-torch/bin/python"
HIDDEN = ["--model.args.hidden", "[8]"]
MLP = ["--config", str(FOLDER / "configs/digits_mlp.yaml"), *HIDDEN]
# Files without a command: the script that runs them.
PARTS = {
    "cases": "run", "data": "run", "harness": "run", "job": "run", "contender": "run", "plain.common": "plain.jit_loop",
    "elastic_faults": "elastic_soak", "waiting": "elastic_soak", "gpu_bench": "gpu", "published_runs": "published",
    "soak_job": "soak", "torch_ddp.models": "torch_ddp.train",
}  # fmt: skip
TESTED: set[str] = set()


def runs(*scripts):
    """Mark the test of a script."""

    def mark(test):
        TESTED.update(scripts)
        return test

    return mark


@pytest.fixture
def script():
    def run(name, *words, code=0, env=None):
        """Run a script on one device; return the lines that it printed, each as JSON where it is.
        With another code: its errors. None: whatever its code.
        """
        ended = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", *map(str, words)],
            cwd=ROOT,
            env=job.environment(**{"XLA_FLAGS": "", **(env or {})}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert code is None or ended.returncode == code, ended.stdout + ended.stderr
        lines = ended.stdout.splitlines()
        return (
            ended.stderr
            if code
            else [json.loads(line) if line.startswith(("{", "[")) else line for line in lines]
        )

    return run


def test_no_script_is_left_out():
    files = {
        ".".join(file.relative_to(FOLDER).with_suffix("").parts): file
        for file in FOLDER.rglob("*.py")
    }
    scripts = {name for name, file in files.items() if "__main__" in file.read_text()}
    assert scripts <= TESTED | {"contender"}, "give each script a test in this file"
    assert files.keys() == TESTED | PARTS.keys() and PARTS.keys().isdisjoint(TESTED)
    assert {*PARTS.values()} <= TESTED, "name a tested script that runs the file"


@runs("backends")
def test_backends(script):
    [result] = script("backends", "--tiny", "--repeats", "2", *HIDDEN)
    [own] = result["configs"].values()
    low, high = own["quartiles"]
    assert 0 < low <= own["pmap by pjit"] <= high and result["difference"] == abs(
        1 - own["pmap by pjit"]
    )


@runs("ceilings")
def test_ceilings(script):
    [result] = script("ceilings", "--tiny")
    assert (
        result["device"] == "cpu"
        and result["bf16_matmul_flops"] > 1e6
        and result["copy_bytes_per_s"] > 1e6
    )
    assert result["attention"].startswith("not cudnn: ")


@runs("checkpoint_stall")
def test_checkpoint_stall(script, tmp_path):
    [result] = script(
        "checkpoint_stall", "--millions", 1, "--repeats", 1, "--width", 100, "--directory", tmp_path
    )
    parameters, adam = result["states"].values()
    assert (parameters["megabytes"], adam["megabytes"]) == (0.2, 0.6) and not list(
        tmp_path.iterdir()
    )
    for own in (parameters, adam):
        times = own["ms"]
        assert (
            times["call"]["median"] <= times["until durable"]["least"]
            and times["sync"]["least"] > 0
        )
        assert own["stall_ms"] >= times["call"]["median"] and own["slowdown"] > 0


@runs("clients")
def test_clients(script):
    lines = script("clients", 6, "--workers", 2, "--idle", 0.1)
    exchanges = [f"exchange {size}" for size in (0, 8, 1024)]
    assert [line["what"] for line in lines] == ["join", *exchanges, "heartbeats", "death"]
    assert all(
        line["clients"] == 6 and line["mb"] > 0 and line["s"] >= line.get("first_s", 0) >= 0
        for line in lines
    )


@runs("elastic_cost")
def test_elastic_cost(script):
    words = ["--processes", 1, "--repeats", 1, "--steps", 3, "--log.every", 1]
    [result] = script("elastic_cost", *MLP, *words)
    assert result["ratio"] == pytest.approx(result["with_ms"] / result["without_ms"], rel=0.1)
    assert result["standard_error_us"] is None and result["without_ms"] > 0


@runs("exact")
def test_exact(script):
    words = ["--ways", "bucket,exact8", "--repeats", 1, "--devices", 2, "--microbatches", 2]
    [result] = script("exact", *MLP, *words)
    assert (
        result["devices"] == 2
        and result["over_bucket"]["bucket"] == 1.0
        and result["median_ms"]["exact8"] > 0
    )
    assert result["loss"]["exact8"] == pytest.approx(result["loss"]["bucket"], rel=1e-5)
    elements = 64 * 8 + 8 + 8 * 10 + 10
    assert 4 * elements <= result["sent_bytes"]["bucket"] < 5 * elements


@runs("exact_curves")
def test_exact_curves(script):
    words = ["--microbatches", 4, "--steps", 3, "--seeds", 1, "--reductions", "bucket,exact"]
    [result] = script("exact_curves", *MLP, *words)
    bucket, exact = (result["reductions"][name] for name in ("bucket", "exact"))
    assert bucket["updates"] == exact["updates"] == 3 and bucket["first_50_apart"] == [0.0]
    assert exact["first_50_apart"][0] < 1e-5 and exact["last_losses"] == pytest.approx(
        bucket["last_losses"], abs=2e-5
    )


@runs("feeding")
def test_feeding(script):
    model = ["--model", '{"target": "MLP", "args": {"hidden": [8]}}']
    [result] = script(
        "feeding", "--updates", 12, "--repeats", 1, "--data.args.examples", 128, *model
    )
    supply, demand = result["pipeline_examples_per_s"], result["training_examples_per_s"]
    assert result["times"] == supply / demand > 0 and 0 <= result["waiting_share"] <= 1


@runs("flops")
def test_flops(script):
    [products] = script("flops", *MLP)
    assert int(products) == 64 * 2 * (64 * 8 * 2 + 8 * 10 * 3)  # no gradient of the inputs


@runs("manifest")
def test_manifest(script):
    *phases, last = script(
        "manifest", "--processes", 4, env={"PATH": ""}
    )  # without strace, which takes seconds
    assert {phase["processes"] for phase in phases} == {4} and [phase["what"] for phase in phases] == [
        "list, by root", "digest and flush, by each", "write, by root", "read, by root", "read and check, by each",
    ]  # fmt: skip
    assert last["files"] == 3 * 4 + 4


@runs("audit")
def test_audit(script):
    words = [*HIDDEN, "--data.args.augment", "false", "--microbatches", 4, "--every", 2]
    result = script("audit", "flips", "--flips", 1, "--part", 1, *words)[-1]
    verdicts = [name for name in result if re.match(r"(grads|output|params|opt_state): ", name)]
    assert result["mode"] == "flips" and [result[name] for name in verdicts] == [1]


@pytest.mark.slow
def test_the_cost_of_an_audit(script):
    words = [*HIDDEN, "--data.args.augment", "false", "--microbatches", 4, "--every", 2]
    [result] = script("audit", "cost", "--updates", 4, *words)
    assert result["audit_ms"] > 0 and result["update_ms"] > 0 and result["every"] == 2


@pytest.mark.slow
def test_audit_of_an_undisturbed_run(script):
    words = [*HIDDEN, "--data.args.augment", "false", "--microbatches", 4, "--every", 2]
    [result] = script("audit", "alarms", "--updates", 4, *words)
    assert (
        result["audits"] == 2
        and [event["kind"] for event in result["named"]].count("audit_failed") == 0
    )


@runs("elastic_recovery")
def test_elastic_recovery(script):
    words = [
        "--data.target",
        "benchmarks.data.SlowDigits",
        "--data.args.sleep",
        0.02,
        "--parallel.reduction",
        "bucket",
    ]
    one, last = script(
        "elastic_recovery", *MLP, *words, "--processes", 1, "--kills", 1, "--warm", 0
    )
    assert 0 < one["update"] <= one["complete"] and last["median"] == one and last["kills"] == 1


@runs("elastic_soak")
def test_elastic_soak(script):
    model = [*HIDDEN, "--data.args.augment", "false", "--model.args.dropout", 0]
    times = ["--minutes", 0.01, "--every", 0.5, "--healthy", 0.3, "--steps", 100]
    [result] = script("elastic_soak", "--processes", 1, "--ways", "elastic", *times, *model)
    assert result["number"] >= 1 and result["generations"] >= 2 and result["longest"]["kill"][0] > 0
    assert result["code"] == 0 and result["every_update_once"] and result["equal_to_one_device"]


@runs("elastic_hosts")
def test_elastic_hosts(script):
    if os.geteuid() != 0 or shutil.which("ip") is None:
        assert "no network namespaces here" in script("elastic_hosts", "--hosts", 2, code=1)
        return
    model = [*HIDDEN, "--data.args.augment", "false", "--model.args.dropout", 0]
    words = ["--hosts", 2, "--minutes", 0.06, "--pause", 0.1, "--faults", "kill"]
    # A process that comes back after the end waits for this long; one that gives up too early
    # starts again.
    *faults, result = script("elastic_hosts", *words, *model, env={"JAXDP_TIMEOUT": "20"})
    assert all(result["checks"].values()) and {fault["fault"] for fault in faults} == {"kill"}
    assert result["codes"]["0"] >= 1  # a process that comes back after the last update finds no job
    assert result["generations"][0] == 2 and len(result["generations"]) >= 2


@runs("gpu")
def test_the_gpu_set_without_a_gpu(script, tmp_path):
    errors = script("gpu", "--out", tmp_path, code=1)
    assert (
        "JAX finds no NVIDIA GPU here (see `ceilings` above); --tiny runs everything small on CPU"
        in errors
    )
    assert json.loads((tmp_path / "gpu.json").read_text())["ceilings"]["failed"].startswith(
        "Failed: "
    )


@runs("outer")
def test_outer(script):
    words = [*MLP, "--microbatches", 2, "--steps", 6, "--log.every", 2, "--every", 3]
    words += ["--launcher", ""]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    bucket, outer = script("outer", *words, env=flags)
    assert (bucket["way"], bucket["speed"], bucket["loss_vs"]) == ("bucket", 1.0, 0.0) and outer[
        "way"
    ] == "every 3"
    assert (
        outer["loss_vs"] == pytest.approx(outer["loss"] / bucket["loss"] - 1, abs=1e-4)
        and outer["ms"] > 0
    )


@pytest.mark.slow
def test_the_speed_of_outer_steps(script):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    words = [*MLP, "--microbatches", 2, "--every", 2, "--speed", 2, "--bucket_ms", 1000]
    words += ["--launcher", ""]
    [fast] = script("outer", *words, env=flags)
    assert "loss" not in fast and fast["speed"] == pytest.approx(1000 / fast["ms"], rel=0.05)


@runs("plots")
def test_plots(script, tmp_path):
    pytest.importorskip("matplotlib")
    curves = {
        "curves": {
            "batch": {"1": [0.1, 0.2], "2": [0.2, 0.3]},
            "microbatches, vmap": {"1": [0.1, 0.1]},
        }
    }
    (tmp_path / "scaling.json").write_text(json.dumps(curves))
    script("plots", tmp_path / "scaling.json", tmp_path / "plots")
    drawn = {file.name: file.read_text() for file in (tmp_path / "plots").iterdir()}
    assert drawn.keys() == {"batch.svg", "microbatches_vmap.svg"} and all(
        "<svg" in text for text in drawn.values()
    )


@runs("published")
def test_published(script):
    report = "\n".join(map(str, script("published")))
    assert report.startswith("Median error: ") and report.count("| judged |") > 20
    efficiency, network, overlap, *table = script("published", "--fit", "--coarse", 20)
    assert (
        efficiency.startswith("EFFICIENCY = {'a100'")
        and network == "NETWORK = 0.3"
        and "OVERLAP = " in overlap
    )
    assert len([row for row in table if row.startswith("| ")]) == 1 + 9


@runs(
    "run",
    "material",
    "jaxdp_loop",
    "plain.jit_loop",
    "plain.nnx_loop",
    "plain.shard_map_loop",
    "collectives",
)
def test_run(script, tmp_path):
    """All loops, and a job of two processes, which as root finds Open MPI's permission itself."""
    env = dict.fromkeys(job.AS_ROOT, "")
    words = ["--smallest", "--repeats", 3, "--out", tmp_path, "--markdown", tmp_path / "table.md"]
    lines = script("run", *words, code=None, env=env)
    found, processes = (
        json.loads((tmp_path / f"smallest{end}.json").read_text()) for end in ("", "_processes")
    )
    torch = ["torch"] * TORCH.exists()
    assert [*found["contenders"]] == [
        "jaxdp",
        "plain jit",
        "flax nnx",
        "plain shard_map, leaves",
        *torch,
    ]
    for own in found["contenders"].values():
        assert (
            own["relative_loss_error"] < 1e-5
            and len(own["losses"]) == 3
            and len(own["seconds_per_update"]) == 3
        )
    assert processes["processes"] == 2 and processes["bytes"] == 64 and processes["mpi_ms"] > 0
    if not torch:
        assert lines[-2:] == [
            "missing:",
            f"  smallest: torch: there is no PyTorch; {run.TORCH} names its Python",
        ]
    else:
        assert lines[-1] == "all of 2 cases were measured"
    table = (tmp_path / "table.md").read_text()
    first, _, head, rule, *rows = table.splitlines()
    assert (
        re.match(r"20\d\d-.*; .*, \d+ cores, .*jax 0\.", first)
        and head.count("|") == rule.count("|") == 8
    )
    assert all(row.count("|") == 8 for row in rows) and len(rows) == 5 + 1 + len(torch) + 1
    assert re.search(
        r"\| smallest \| jaxdp \| [\d.]+ ms \| [\d.]+ to [\d.]+ \| [\d,]+ updates \| [\d.]+ s \|  \|",
        table,
    )
    assert re.search(
        r"\| smallest_processes \| ratio \| [\d.]+ \|  \|  \|  \| asked: at least 0.0: holds \|",
        table,
    )


@runs("torch_ddp.train", "torch_ddp.updates", "torch_ddp.restarted")
def test_torch(script, tmp_path):
    """Each in one process; `test_run` trains with `torch_ddp.train`."""
    if not TORCH.exists():
        pytest.skip("no PyTorch: make .venv-torch/.done")
    script("material", tmp_path / "material", 4, *MLP, "--data.args.examples", 128)
    port = str(job.free_port())
    env = job.environment(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
        OMPI_COMM_WORLD_SIZE="1",
        WORLD_SIZE="1",
        RANK="0",
    )
    text = job.output(
        [str(TORCH), "-m", "benchmarks.torch_ddp.updates", str(tmp_path / "material"), "4"],
        120.0,
        env,
    )
    result = json.loads(text)
    assert result["way"] == "PyTorch DDP" and result["ms"] > 0
    for steps in (100, 110):  # the second resumes
        words = [str(TORCH), str(FOLDER / "torch_ddp/restarted.py"), str(steps)]
        subprocess.run(words, check=True, env=env, cwd=tmp_path)
    records = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert [record["step"] for record in records] == [*range(10, 120, 10)]


@runs("scaling")
def test_scaling(script, tmp_path):
    words = ["--tiny", "--repeats", 2, "--updates", 1, "--curves", "devices", "--out", tmp_path]
    [line] = script("scaling", *words, "--model.args.dim", 8, "--model.args.layers", 1)
    assert re.match(r"devices +1: [\d.]+ ms  2: [\d.]+ ms$", line)
    curves = json.loads((tmp_path / "scaling.json").read_text())["curves"]
    assert [*curves["devices"]] == ["1", "2"] and all(
        len(samples) == 2 for samples in curves["devices"].values()
    )


@runs("seeds")
def test_seeds(script, tmp_path):
    for name, words in (("train", 2100), ("valid", 60), ("test", 60)):
        (tmp_path / f"ptb.{name}.txt").write_text(" a b c d e f g h i \n" * (words // 10))
    assert seeds.batches("lstm", str(tmp_path), 20) == 3  # of 60 or 59 windows of 35
    model = [
        "--model",
        '{"target": "MLP", "args": {"hidden": [8]}}',
        "--data.args.augment",
        "false",
    ]
    root = gpu.noise(tmp_path / "images")
    [result] = script("seeds", "resnet9", "--root", root, "--processes", 1, "--epochs", 2, *model)
    assert (
        result["processes"] == 1
        and result["updates_per_epoch"] == 3
        and len(result["params_sha256"]) == 16
    )
    assert result["epoch_s"] >= 0 and len(result["accuracy"]) >= 2 and max(result["accuracy"]) <= 1


@runs("small_tensors")
def test_small_tensors(script):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    [result] = script("small_tensors", "--tensors", 3, "--repeats", 1, env=flags)
    assert (
        result["all_reduce_operands"]["bucket"] == [1]
        and sum(result["all_reduce_operands"]["xla"]) == 3
    )
    assert result["processes"] == 1 and result["ratio"] >= 0


@runs("soak")
def test_soak(script, tmp_path):
    words = ["--kills", 1, "--steps", 100, "--save_every", 10, "--processes", 1, "--sleep_ms", 20]
    # With this seed the kill comes while it trains.
    *_, result = script(
        "soak", *words, "--seed", 4, "--work", tmp_path / "work", "--json", tmp_path / "result.json"
    )
    assert result["kills"] == 1 and result["problems"] == [] and len(result["params_sha256"]) == 64
    assert json.loads((tmp_path / "result.json").read_text()) == result


@runs("start")
def test_start(script):
    [result] = script("start", "--repeats", 1, "--configs", "digits", *HIDDEN)
    own = result["median"]["digits"]
    assert (
        own["first"] > 0
        and result["share"] == result["shares"]["digits"] == own["second"] / own["first"]
    )


@runs("sweep")
def test_sweep(script):
    words = [
        "--epochs",
        "null",
        "--steps",
        1,
        "--optimizer.warmup_steps",
        0,
        "--eval.every",
        "null",
    ]
    assert "a sweep has at least 2" in script("sweep", 1, code=2)
    [line] = script("sweep", 2, *HIDDEN, *words)
    assert re.match(
        r"2 runs on \d+ cores: train.py in a loop [\d.]+ s, a sweep with one at a time [\d.]+ s",
        line,
    )


@runs("token_file")
def test_token_file(script, tmp_path):
    words = ["--length", 8, "--batch", 2, "--windows", 4, "--repeats", 1]
    [result] = script("token_file", "--gb", 0.001, *words)
    (tmp_path / "train.bin").write_bytes(bytes(2000))
    [other] = script("token_file", "--file", tmp_path / "train.bin", *words)
    for own in (result, other):
        assert own["length"] == 8 and all(
            rate > 0 for rate in own["read"]["ratio_to_copy"].values()
        )


@runs("versions")
def test_versions(script, tmp_path):
    """The other version is a stand-in that writes a metrics file."""
    (tmp_path / "train.py").write_text(OTHER)
    words = ["--cases", "digits", "--updates", 20, "--repeats", 1, "--processes", "1", *HIDDEN]
    [result] = script("versions", "--other", tmp_path, *words)
    assert result["case"] == "digits" and result["processes"] == 1 and result["update_ms"][1] == 4.0
    assert result["update"] == pytest.approx(result["update_ms"][0] / 4.0, abs=2e-3)
    assert result["start"] == pytest.approx(result["start_s"][0] / result["start_s"][1], rel=1)


OTHER = """
import pathlib, sys
folder = pathlib.Path(sys.argv[sys.argv.index("--run_dir") + 1])
folder.mkdir()
(folder / "metrics.jsonl").write_text('{"split": "train", "step_time_ms": 4.0}\\n' * 3)
"""


@runs("workers")
def test_workers(script):
    [result] = script("workers", "--workers", 1, "--images", 8, "--batch", 1, "--repeats", 1)
    rates = result["images_per_s"]
    assert (
        result["workers"] == 1
        and rates["thread"] > 0
        and rates["workers"] > 0
        and result["ratio"] > 0
    )
