"""The names of targets, and what a program's text says of its operations."""

import pytest

from browser import CHROMIUM, Browser
from jaxdp.errors import UsageError
from jaxdp.plan import chips, timeline
from jaxdp.plan.hardware import HARDWARE
from jaxdp.plan.hlo import collectives
from jaxdp.plan.hlo.compiled_program import CompiledProgram

H100 = HARDWARE["h100-nvlink-ib400"]


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("h100:8", (1, 8)),
        ("h200:8x8", (8, 8)),
        ("l4:1", (1, 1)),
        ("v5e:16x16", (16, 16)),
        ("v5p:8x8x8", (8, 8, 8)),
    ],
)
def test_a_target_is_read(text, shape):
    target = chips.read_target(text)
    assert target.shape == shape and target.hardware.name == target.chip.hardware


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("h10:8", "did you mean 'h100'"),
        ("gtx:8", "known: h100"),
        ("h100", "has no shape"),
        ("h100:0", "has no shape"),
        ("h100:8x", "has no shape"),
        ("h100:16", "at most 8 devices; write hosts x devices, such as h100:2x8"),
        ("h100:2x2x2", "at most 8 devices"),
        ("v5e:4x4x4", "a torus of 2 dims"),
        ("v5e:64x64", "at most 256 devices"),
        ("v5p:4x4", "a torus of 3 dims"),
    ],
)
def test_a_wrong_target_is_refused(text, part):
    with pytest.raises(UsageError, match="--target") as refused:
        chips.read_target(text)
    assert part in str(refused.value)


PROGRAM = """
HloModule jit_f, is_scheduled=true, num_partitions=8

%fused (p.0: f32[4,256,512], p.1: s32[]) -> f32[256,512] {
  %p.0 = f32[4,256,512]{2,1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,256,512]{2,1,0} dynamic-slice(%p.0, %p.1, %zero, %zero), dynamic_slice_sizes={1,256,512}
  ROOT %flat = f32[256,512]{1,0} bitcast(%slice)
}

%product (q.0: bf16[128,256], q.1: bf16[256,512]) -> f32[128,512] {
  %q.0 = bf16[128,256]{1,0} parameter(0)
  %q.1 = bf16[256,512]{1,0} parameter(1)
  ROOT %dot = f32[128,512]{1,0} dot(%q.0, %q.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (state: (s32[], f32[4194304])) -> (s32[], f32[4194304]) {
  %state = (s32[], f32[4194304]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[4194304]{0} get-tuple-element(%state), index=1
  %all-reduce-start = f32[4194304]{0} all-reduce-start(%x), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %busy = f32[WORK]{0} negate(%x)
  %all-reduce-done = f32[4194304]{0} all-reduce-done(%all-reduce-start)
  ROOT %next = (s32[], f32[4194304]{0}) tuple(%i, %all-reduce-done)
}

ENTRY %main (a: f32[4,256,512], b: bf16[128,256], c: bf16[256,512], s: (s32[], f32[4194304])) -> f32[128,512] {
  %a = f32[4,256,512]{2,1,0} parameter(0)
  %b = bf16[128,256]{1,0} parameter(1)
  %c = bf16[256,512]{1,0} parameter(2)
  %s = (s32[], f32[4194304]{0}) parameter(3)
  %n = s32[] constant(2)
  %slice_fusion = f32[256,512]{1,0} fusion(%a, %n), kind=kLoop, calls=%fused
  %loop = (s32[], f32[4194304]{0}) while(%s), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %gemm = f32[128,512]{1,0} fusion(%b, %c), kind=kCustom, calls=%product
}
"""


def played(work, trips=3):
    text = PROGRAM.replace("WORK", str(work)).replace('"n":"3"', f'"n":"{trips}"')
    return timeline.play(text, H100)


def test_what_operations_compute_and_move():
    program = CompiledProgram(PROGRAM.replace("WORK", "8"))
    main = program.computations["main"]
    assert program.devices == 8 and program.flops("main", main["gemm"]) == {
        "bfloat16": 2 * 128 * 256 * 512
    }
    assert program.traffic("main", main["gemm"]) == 2 * (128 * 256 + 256 * 512) + 4 * 128 * 512
    # A block of the stack is read, not all of it.
    assert program.traffic("main", main["slice_fusion"]) == 2 * 4 * 256 * 512 + 4


def test_a_collective_hides_behind_work_beside_it():
    """8 bytes a number that is negated, at 85 % of 3.35 TB/s."""
    short, long = played(8), played(10**9)
    assert (
        short.kernels
        == long.kernels
        == {
            "all-reduce": 3,
            "negate": 3,
            "fusion loop": 1,
            "product": 1,
        }
    )
    assert short.communication == long.communication > 3e-5
    assert short.hidden_share < 0.2 and long.hidden_share == 1
    assert long.seconds > long.communication and short.exposed > 0
    assert len(long.events) == 8 and long.largest[0][0] == "f32[1000000000]"


@pytest.mark.parametrize(("name", "products"), [("Softmax", 2), ("SoftmaxBackward", 5)])
def test_attention_by_cudnn_counts_its_products(name, products):
    """The scores are [4, 12, 1024, 1024], and a head is 64 wide."""
    text = (
        "%a = (bf16[4,12,1024,64]{3,1,2,0}, u8[0]{0}) custom-call(%q, %k, %v), "
        f'custom_call_target="__cudnn$fmha{name}", backend_config={{"cudnn_fmha_backend_config": '
        '{"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["4", "12", "1024", "1024"], '
        '"tuple_shapes": []}}}'
    )
    program = CompiledProgram(f"ENTRY %main (a: f32[]) -> f32[] {{\n  {text}\n}}")
    flops = program.flops("main", program.computations["main"]["a"])
    assert flops == {"bfloat16": products * 2 * 4 * 12 * 1024 * 1024 * 64}


def test_a_collective_slows_what_is_computed_beside_it():
    long = played(10**9)
    busy = sum(end - begin for stream, _, begin, end in long.events if stream == timeline.COMPUTE)
    launches = 5 * timeline.LAUNCH
    slowed = timeline.SLOWED * long.communication
    assert long.seconds == pytest.approx(busy + launches + slowed, rel=1e-6)


@pytest.mark.parametrize("work", [8, 10**7])
def test_every_iteration_of_a_long_loop_counts(work):
    """Each adds the same, also those that are not played one by one."""
    short, shorter = played(work, timeline.PLAYED), played(work, timeline.PLAYED - 1)
    long = played(work, 1000)
    others = 1000 - timeline.PLAYED
    for name in ("seconds", "communication", "exposed"):
        last, before = getattr(short, name), getattr(shorter, name)
        assert getattr(long, name) == pytest.approx(last + others * (last - before)), name
    assert long.hidden_share == pytest.approx(short.hidden_share, rel=0.02)
    assert long.kernels == short.kernels | {"all-reduce": 1000, "negate": 1000}
    counts = {name: count for name, _, count in long.longest}
    seconds = {name: seconds for name, seconds, _ in long.longest}
    assert counts["all-reduce"] == counts["negate"] == 1000
    assert seconds["all-reduce"] == pytest.approx(long.communication)


def test_a_loop_that_never_runs_counts_nothing():
    schedule = played(8, 0)
    assert schedule.kernels == {"fusion loop": 1, "product": 1} and schedule.communication == 0
    assert collectives(PROGRAM.replace("WORK", "8").replace('"n":"3"', '"n":"0"')) == []


LOOP = """
%inner (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[], f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%p), index=1
  ROOT %r = f32[4]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add
}

%cond (p: (s32[], f32[4])) -> pred[] {
  %p = (s32[], f32[4]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %end = s32[] constant(7)
  ROOT %more = pred[] compare(%i, %end), direction=LT
}

ENTRY %main (a: s32[], p: f32[4]) -> f32[4] {
  %a = s32[] parameter(0)
  %p = f32[4]{0} parameter(1)
  %first = s32[] constant(2)
  %i = s32[] copy(%first)
  %start = (s32[], f32[4]{0}) tuple(%i, %p)
  ROOT %w = f32[4]{0} while(%start), condition=%cond, body=%inner, metadata={op_name="jit(update)/while"}
}
"""


@pytest.mark.parametrize(
    ("before", "after", "trips"),
    [
        ("", "", 5),
        ("tuple(%i, %p)", "tuple(%a, %p)", None),
        ("direction=LT", "direction=GT", None),
        ("s32[]", "f32[]", None),
        ("%end = s32[] constant(7)", "%end = s32[] parameter(1)", None),
        ("%end = s32[] constant(7)", "%end = f32[] constant(1e+03)", None),
        ("s32[] get-tuple-element(%p), index=0", "f32[4] get-tuple-element(%p), index=1", None),
        ("constant(7)", "constant(2)", 0),
    ],
)
def test_a_loop_of_unknown_length_is_named(before, after, trips):
    """A counter runs from a constant to another; anything else only a run knows."""
    text = LOOP.replace(before, after)
    program = CompiledProgram(text)
    assert program.trips("main", program.computations["main"]["w"]) == trips
    assert program.unknown_loops() == ([] if trips is not None else ["jit(update)/while"])
    times = 1 if trips is None else trips
    assert [(c.count, c.exact) for c in collectives(text)] == [(times, trips is not None)] * (
        times > 0
    )
    assert timeline.play(text, H100).kernels.get("all-reduce", 0) == times


def test_a_convolution_of_stacks_counts_as_a_product():
    """The form that products with two batch dims have on TPUs."""
    text = """ENTRY %main (a: f32[]) -> f32[] {
      %a = f32[2,4,128,64]{3,2,1,0} parameter(0)
      %b = f32[2,4,128,64]{3,2,1,0} parameter(1)
      ROOT %c = f32[2,4,128,128]{3,2,1,0} convolution(%a, %b), window={size=2x4 stride=1x3 lhs_dilate=2x4}, \
dim_labels=01bf_01oi->01bf
    }"""
    program = CompiledProgram(text)
    flops = program.flops("main", program.computations["main"]["c"])
    assert flops == {"tensorfloat32": 2 * 2 * 4 * 128 * 128 * 64}


def test_a_convolution_sums_over_window_and_features():
    text = """ENTRY %main (a: bf16[]) -> bf16[] {
      %a = bf16[2,8,8,3]{3,2,1,0} parameter(0)
      %b = bf16[3,3,3,5]{3,2,1,0} parameter(1)
      ROOT %c = bf16[2,8,8,5]{3,2,1,0} convolution(%a, %b), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f
    }"""
    program = CompiledProgram(text)
    flops = program.flops("main", program.computations["main"]["c"])
    assert flops == {"bfloat16": 2 * (2 * 8 * 8 * 5) * (3 * 3 * 3)}


@pytest.mark.parametrize(("name", "peak"), [("h100", 66.9e12), ("v5e", 197e12 / 6)])
def test_full_precision_has_a_peak_of_its_own(name, peak):
    """On a TPU, six products of bfloat16."""
    text = """ENTRY %main (a: f32[]) -> f32[] {
      %a = f32[4096,4096]{1,0} parameter(0)
      ROOT %c = f32[4096,4096]{1,0} dot(%a, %a), lhs_contracting_dims={1}, operand_precision={highest,highest}
    }"""
    hardware = chips.read_target(f"{name}:1x1").hardware
    schedule = timeline.play(text, hardware)
    assert schedule.longest[0][1] == pytest.approx(2 * 4096**3 / (hardware.products * peak))


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_a_page_draws_every_stream(tmp_path):
    schedules = {0: played(8), 3: played(10**7)}
    timeline.write_page(str(tmp_path / "plan.html"), schedules, "A < B")
    with Browser() as page:
        page.open(tmp_path / "plan.html")
        assert page("document.title") == page("document.querySelector('h1').innerText") == "A < B"
        heads = page("[...document.querySelectorAll('h2')].map((x) => x.innerText)")
        for (zero, schedule), head in zip(schedules.items(), heads, strict=True):
            hidden = f"{schedule.hidden_share:.0%} of {1e3 * schedule.communication:.3g} ms hidden"
            assert head.startswith(f"zero {zero}: ") and head.endswith(hidden)
        rows = "[...document.querySelectorAll('tr')].map((x) => x.innerText)"
        assert len(page(rows)) == sum(len(x.longest) for x in schedules.values())
        names = page("[...document.querySelectorAll('rect title')].map((x) => x.textContent)")
        assert any(name.startswith("all-reduce, ") and name.endswith(" us") for name in names)
        # In the first, three all-reduces without work between them are one shape.
        widths = page("[...document.querySelectorAll('rect')].map((x) => x.width.baseVal.value)")
        assert len(widths) == len(names) and max(widths) <= 4000 and page.errors == []


def test_a_page_that_cannot_be_written(tmp_path):
    with pytest.raises(UsageError, match=r"--output: '.*' cannot be written"):
        timeline.write_page(str(tmp_path / "none" / "plan.html"), {}, "A")


def test_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        CompiledProgram("HloModule x")


CHAIN = """HloModule f, num_partitions=16

%start (p: bf16[128,2048]) -> (bf16[2048,2048], u32[]) {
  %p = bf16[128,2048]{1,0} parameter(0)
  %gathered = bf16[2048,2048]{1,0} all-gather(%p), replica_groups=[1,16]<=[16], frontend_attributes={chain_id="7"}
  ROOT %c = (bf16[2048,2048]{1,0}, u32[]) custom-call(%p, %gathered), custom_call_target="AsyncCollectiveStart"
}

%beside (p: bf16[128,2048], a: bf16[ROWS,2048], b: bf16[2048,2048]) -> bf16[ROWS,2048] {
  %p = bf16[128,2048]{1,0} parameter(0)
  %a = bf16[ROWS,2048]{1,0} parameter(1)
  %b = bf16[2048,2048]{1,0} parameter(2)
  %gathered = bf16[2048,2048]{1,0} all-gather(%p), replica_groups=[1,16]<=[16], frontend_attributes={chain_id="7"}
  ROOT %y = bf16[ROWS,2048]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%done (p: bf16[128,2048], u: u32[]) -> bf16[2048,2048] {
  %p = bf16[128,2048]{1,0} parameter(0)
  %u = u32[] parameter(1)
  %gathered = bf16[2048,2048]{1,0} all-gather(%p), replica_groups=[1,16]<=[16], frontend_attributes={chain_id="7"}
  ROOT %c = bf16[2048,2048]{1,0} custom-call(%p, %gathered, %u), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (p: bf16[128,2048], a: bf16[ROWS,2048], b: bf16[2048,2048]) -> bf16[2048,2048] {
  %p = bf16[128,2048]{1,0} parameter(0)
  %a = bf16[ROWS,2048]{1,0} parameter(1)
  %b = bf16[2048,2048]{1,0} parameter(2)
  %begun = (bf16[2048,2048]{1,0}, u32[]) fusion(%p), kind=kCustom, calls=%start
  %u = u32[] get-tuple-element(%begun), index=1
  %y = bf16[ROWS,2048]{1,0} fusion(%p, %a, %b), kind=kOutput, calls=%beside
  ROOT %end = bf16[2048,2048]{1,0} fusion(%p, %u), kind=kCustom, calls=%done
}
"""


@pytest.mark.parametrize(("rows", "hidden"), [(8192, 1.0), (8, 0.5)])
def test_a_chain_of_fusions_is_one_collective(rows, hidden):
    """A TPU's program repeats the collective in each fusion of the chain."""
    text = CHAIN.replace("ROWS", str(rows))
    [one] = collectives(text)
    assert (one.kind, one.count, one.bytes) == ("all-gather", 1, 2 * 2048 * 2048)
    schedule = timeline.play(text, chips.read_target("v5e:4x4").hardware)
    assert schedule.kernels == {"all-gather": 1, "product": 1}
    shares = schedule.hidden_share, schedule.exposed / schedule.communication
    assert shares == (1.0, 0.0) if hidden == 1.0 else 0 < shares[0] < hidden
    assert schedule.seconds >= schedule.communication > 0
