"""Every script of `benchmarks` at its smallest: it runs, and what it prints has the values that it
must have.
"""

import json
import re
import subprocess

import pytest

from benchmarks import gpu, job, record, run, seeds
from launch import ROOT
from scripts import FOLDER, HIDDEN, MLP, run_script, runs, scripts_with_a_test

TORCH = ROOT / ".venv-torch/bin/python"
# Files without a command: the script that runs them.
PARTS = {
    "cases": "run", "data": "run", "harness": "run", "job": "run", "contender": "run", "plain.common": "plain.jit_loop",
    "elastic_faults": "elastic_soak", "waiting": "elastic_soak", "gpu_bench": "gpu", "published_runs": "published",
    "soak_job": "soak", "torch_ddp.models": "torch_ddp.train",
}  # fmt: skip


def test_no_script_is_left_out():
    files = {
        ".".join(file.relative_to(FOLDER).with_suffix("").parts): file
        for file in FOLDER.rglob("*.py")
    }
    scripts = {name for name, file in files.items() if "__main__" in file.read_text()}
    assert scripts <= scripts_with_a_test() | {"contender"}, "give each script a test"
    assert files.keys() == scripts_with_a_test() | PARTS.keys() and PARTS.keys().isdisjoint(
        scripts_with_a_test()
    )
    assert {*PARTS.values()} <= scripts_with_a_test(), "name a tested script that runs the file"


@pytest.fixture
def script():
    return run_script


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
def test_published(script, tmp_path):
    report = "\n".join(map(str, script("published")))
    assert report.startswith("Before: median error ") and report.count("| judged |") > 20
    efficiency, network, overlap, products, slowed, traffic, *table = script(
        "published", "--fit", "--coarse", 20
    )
    assert (
        efficiency.startswith("EFFICIENCY = {'a100'")
        and network == "NETWORK = 0.3"
        and "OVERLAP = " in overlap
    )
    assert products.startswith("PRODUCTS = {'a100'") and slowed == "SLOWED = 0.0"
    assert traffic == "traffic = 40"
    assert len([row for row in table if row.startswith("| ")]) == 1 + 9
    file = tmp_path / "splits.json"
    head, _, rule, seed, medians = script("published", "--splits", 1, "--coarse", 20, "--out", file)
    assert rule.startswith("| by rule | 31 |") and seed.startswith("| seed 0 | 31 |")
    assert medians.startswith("| median of 1 seeds | 31 |") and head.count("|") == 10
    kept = json.loads(file.read_text())
    assert all(
        0 < x["after"]["median"] < x["after"]["second"] <= x["after"]["largest"] for x in kept
    )


@runs("record")
def test_record(script):
    pages = script("record")
    assert pages == [f"{name}: as it was" for name in record.PAGES]


@runs("targets")
def test_targets(script, tmp_path):
    """A program is compiled, or refused since its compiler is missing or of another JAX."""
    words = ["--only", "h100:8 digits .*pjit", "--out", tmp_path / "results.jsonl"]
    header, rule, row = script("targets", *words)
    assert header.startswith("| compiled 2") and rule.count("|") == header.count("|") == 10
    assert row.startswith("| digits | h100:8 | ") and row.endswith(" | - | not compiled |")
    assert re.search(r"\| \d+ s \(\d+\) \| .*%|no: .* (is not installed|must be the same)", row)
    assert script("targets", *words) == [header, rule, row]
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 1
    scale = script("targets", "--scale", "--only", "nothing of this kind")
    assert len(scale) == 2 and scale[0].count("|") == 9


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
