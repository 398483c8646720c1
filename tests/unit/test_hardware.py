"""The model of links and peaks gives what its formulas say, and a file of figures is checked."""

import math
import pathlib

import pytest
import yaml

from benchmarks import published
from jaxdp.errors import UsageError
from jaxdp.parallel.layout import Share
from jaxdp.plan import hardware
from jaxdp.plan.hardware import (
    HARDWARE,
    Hardware,
    collective_seconds,
    load_hardware,
    seconds_sent,
)
from jaxdp.plan.hlo import WIRE, Collective
from jaxdp.plan.prediction import Memory, Plan, predict

HW = Hardware(
    "toy", {"float32": 1e12}, 1e9, 1e10, 8, 100.0, 0.5, 10.0, 3.0, 0.5, "made up"
)  # bytes/s and s by hand


def seconds(kind, size, n, g=None):
    return collective_seconds(HW, kind, size, n, g or n)


@pytest.mark.parametrize(
    "kind, n, want",
    [
        ("reduce-scatter", 4, 3 * 0.5 + 3 / 4 * 800 / 100),
        ("all-gather", 8, 7 * 0.5 + 7 / 8 * 800 / 100),
        ("all-reduce", 2, 2 * 0.5 + 800 / 100),  # log2(2) = 1 = n - 1
        ("all-reduce", 8, 6 * 0.5 + 14 / 8 * 800 / 100),  # 6 steps of the trees, not 14 of the ring
        ("all-reduce", 5, 6 * 0.5 + 8 / 5 * 800 / 100),
        ("all-to-all", 4, 3 * (0.5 + 200 / 100)),
        ("collective-permute", 8, 0.5 + 800 / 100),
        ("collective-broadcast", 8, 3 * 0.5 + 800 / 100),
    ],
)
def test_inside_a_host(kind, n, want):
    assert seconds(kind, 800, n) == pytest.approx(want)


@pytest.mark.parametrize(
    "kind, n, g, want",
    [
        ("reduce-scatter", 16, 8, 7 * 0.5 + 7 / 8 * 8 + 3.0 + 1 / 2 * 100 / 10),
        ("all-gather", 16, 4, 3 * 0.5 + 3 / 4 * 8 + 3 * 3.0 + 3 / 4 * 200 / 10),
        ("all-gather", 2, 1, 3.0 + 1 / 2 * 800 / 10),
        ("all-reduce", 16, 8, 6 * 0.5 + 14 / 8 * 8 + 2 * 3.0 + 2 / 2 * 100 / 10),
        ("all-reduce", 32, 8, 6 * 0.5 + 14 / 8 * 8 + 4 * 3.0 + 6 / 4 * 100 / 10),
        ("all-to-all", 16, 8, 7 * (0.5 + 50 / 100) + 8 * (3.0 + 50 / 10)),
        ("collective-permute", 2, 1, 3.0 + 800 / 10),
        ("collective-broadcast", 16, 8, 3 * 0.5 + 3.0 + 800 / 10),
    ],
)
def test_across_hosts(kind, n, g, want):
    assert seconds(kind, 800, n, g) == pytest.approx(want)


@pytest.mark.parametrize("kind", WIRE)
def test_every_kind_has_a_cost_and_alone_it_is_free(kind):
    assert seconds(kind, 800, 1) == 0
    assert 0 < seconds(kind, 800, 8) < seconds(kind, 1600, 8)
    assert seconds(kind, 800, 8, 8) < seconds(kind, 800, 8, 4)  # the network is slower


def test_an_all_reduce_costs_a_scatter_and_a_gather():
    still = HW._replace(intra_latency=0.0, inter_latency=0.0)
    parts = [
        collective_seconds(still, kind, 800, 16, 8) for kind in ("reduce-scatter", "all-gather")
    ]
    assert collective_seconds(still, "all-reduce", 800, 16, 8) == pytest.approx(sum(parts))


def test_a_wrong_kind_or_group():
    with pytest.raises(ValueError, match="kind: 'psum' is no collective; known: all-reduce"):
        seconds("psum", 1, 8)
    for g in (0, 9):
        with pytest.raises(ValueError, match=f"devices_in_group_per_host: {g} of a group of 8"):
            collective_seconds(HW, "all-reduce", 1, 8, g)


def test_an_update_lies_between_two_bounds():
    group = (tuple(range(8)),)
    moved = (
        Collective("all-reduce", 1, 800, "float32", 8, group),
        Collective("collective-permute", 3, 100, "float32", 8, group),
    )
    # State is read and written, gradients are read: 20 GB.
    memory = Memory(4e9, 4e9, 4e9, 0.0, 0.0, activations=0.0, peak=12e9)
    plan = Plan(0, 8, 1, memory, Share(0, 8, 0, 0), False, moved, 5e12, [], [])
    communication = 6 * 0.5 + 14 + 3 * (0.5 + 1)
    got = predict(plan, HW, "float32")
    sent = communication / hardware.NETWORK
    assert got.pop("expected") == pytest.approx(12 + sent - hardware.OVERLAP * 12)
    assert got == pytest.approx(
        {
            "compute": 12,
            "communication": communication,
            "no_overlap": 12 + communication,
            "full_overlap": communication,
            "efficiency": 12 / (12 + communication),
            "efficiency_overlap": 12 / communication,
        }
    )
    assert predict(plan._replace(collectives=()), HW, "float32")["full_overlap"] == 12
    with pytest.raises(
        UsageError, match=r"hardware.flops.bfloat16: 'toy' has no peak for it; it has: float32"
    ):
        predict(plan, HW, "bfloat16")


def test_groups_spread_unevenly_use_the_network():
    """The group with the fewest devices on a host has the least bandwidth."""
    uneven = Collective("all-gather", 2, 800, "float32", 4, ((0, 1, 2, 3), (5, 6, 7, 8)))
    assert seconds_sent(HW, [uneven]) == 2 * seconds("all-gather", 800, 4, 1)


@pytest.mark.parametrize("name", HARDWARE)
def test_the_table_is_sane(name):
    hw = load_hardware(name)
    assert hw.name == name and hw.source
    if "data sheet" in hw.source:
        assert hw.flops["bfloat16"] > hw.flops["tensorfloat32"] > hw.flops["float32"] > 1e13
    assert hw.intra_bandwidth > hw.inter_bandwidth and hw.intra_latency < hw.inter_latency
    assert min(hw.flops.values()) > 5e12 and hw.memory_bandwidth > hw.intra_bandwidth
    assert 0 < hw.efficiency <= 1


def test_published_figures():
    h100 = HARDWARE["h100-nvlink-ib400"]
    assert (h100.flops["bfloat16"], h100.memory, h100.intra_bandwidth, h100.inter_bandwidth) == (
        pytest.approx(989.4e12),
        80e9,
        450e9,
        50e9,
    )
    # A gigabyte of gradients over two hosts: 3.9 ms on NVLink, 2.5 ms on the network, a few
    # microseconds of steps.
    assert collective_seconds(h100, "all-reduce", 1e9, 16, 8) == pytest.approx(
        6.39e-3 + 19.4e-6, rel=1e-3
    )


def test_constants_fit_half_of_the_published_runs():
    fitted, judged = published.halves()
    assert len(fitted) + len(judged) == len(published.RUNS) and len(judged) >= len(fitted) > 20
    shares = {r.family: HARDWARE[r.hardware].efficiency for r in fitted if not r.alone}
    assert published.fit(fitted) == (shares, hardware.NETWORK, hardware.OVERLAP)
    assert published.median_error(judged) <= 0.10


def test_schedule_constants_fit_the_same_half():
    fitted, judged = published.halves()
    constants = published.fit_schedule(fitted)
    assert constants == published.TODAY
    assert published.median_error(judged, published.off) <= 0.06
    above = [run for run in judged if abs(published.off(run)) > 0.25]
    # The source's own rate is 36 % higher on twice the devices, with twice the sequences.
    assert [(run.name, run.devices) for run in above] == [("MPT 70b, A100", 64)]


def test_a_published_run_waits_for_what_it_cannot_hide():
    constants = published.TODAY
    run = published.pick("MaxText", "Llama 2 7B", 128)
    late = run._replace(bucket=math.inf)
    slow = run._replace(inter=run.inter / 100)
    seconds = [published.play(x, constants) for x in (run._replace(devices=8), run, late, slow)]
    assert seconds == sorted(seconds) and seconds[0] < seconds[2] < seconds[3] / 10
    free = published.play(run, constants._replace(slowed=0.0))
    assert free < published.play(run, constants)


def test_microbatches_take_equally_long_played_or_not():
    run = published.pick("llm-foundry", "MPT 13b, H100", 8)
    few, more, many = (published.play(run._replace(microbatches=n)) for n in (3, 4, 21))
    assert many - more == pytest.approx(17 * (more - few))


def test_the_page_shows_the_predictions_of_today():
    page = pathlib.Path(__file__).parents[2] / "docs/plan.md"
    assert published.report() in page.read_text(), (
        "copy the output of `python -m benchmarks.published` into docs/plan.md"
    )


def written(tmp_path, **fields):
    file = tmp_path / "hw.yaml"
    given = {**HW._asdict(), **fields}
    file.write_text(yaml.safe_dump({k: v for k, v in given.items() if v != "left out"}))
    return str(file)


def test_a_file_is_what_it_says(tmp_path):
    assert load_hardware(written(tmp_path)) == HW
    assert (
        load_hardware(written(tmp_path, memory="80e9", inter_latency=0)).memory == 80e9
    )  # YAML's 80e9 is a text
    assert isinstance(load_hardware(written(tmp_path, devices_per_host=4.0)).devices_per_host, int)


@pytest.mark.parametrize(
    "field, value, says",
    [
        ("memory", "left out", "required: memory"),
        ("flops", "left out", "required: flops"),
        ("intra_bandwith", 1.0, "'intra_bandwith' is not accepted"),
        ("memory", "lots", "\"memory\": Not of type PositiveFloat: .* 'lots'"),
        ("memory", 0, '"memory": Not of type PositiveFloat: 0 does not conform to restriction v>0'),
        ("memory", True, '"memory": Not of type PositiveFloat: True not a number'),
        ("inter_latency", -1e-6, '"inter_latency": Not of type NonNegativeFloat: -1e-06'),
        ("flops", 1e12, '"flops": Expected a .*dict'),
        ("flops", {"bfloat16": "fast"}, "\"flops\": Not of type PositiveFloat: .* 'fast'"),
        (
            "efficiency",
            50,
            '"efficiency": Not of type Share: 50 does not conform to restriction v>0 and v<=1',
        ),
        (
            "devices_per_host",
            2.5,
            '"devices_per_host": Not of type PositiveInt: 2.5 not an integer',
        ),
        ("source", 7, '"source": Expected a .*str'),
    ],
)
def test_a_wrong_field_is_named(tmp_path, field, value, says):
    with pytest.raises(UsageError, match=f"^hardware: .* does not fit: .*{says}") as error:
        load_hardware(written(tmp_path, **{field: value}))
    assert "\n" not in str(error.value)


def test_an_unknown_name_suggests_the_nearest(tmp_path):
    with pytest.raises(
        UsageError,
        match=r"hardware: 'h200' is neither a file nor known; did you mean 'h200-nvlink-ib400'",
    ):
        load_hardware("h200")
    with pytest.raises(UsageError, match="known: h100-nvlink-ib400, h200"):
        load_hardware(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "flops: [1, 2\n"])
def test_a_file_that_is_no_mapping(tmp_path, text):
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(
        UsageError, match=r"hardware: '.*bad.yaml' (has no fields|cannot be read)"
    ) as error:
        load_hardware(str(file))
    assert "\n" not in str(error.value)
