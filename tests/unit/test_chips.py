"""The names of targets, and what a program's text says of its operations."""

import pytest

from jaxdp.errors import UsageError
from jaxdp.plan import chips, timeline
from jaxdp.plan.hardware import HARDWARE
from jaxdp.plan.hlo import collectives, compiled_program
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


def played(work):
    return timeline.play(PROGRAM.replace("WORK", str(work)), H100)


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


def test_a_convolution_of_stacks_counts_as_a_product():
    """The form that products with two batch dims have on TPUs."""
    text = (
        "%c = f32[2,4,128,128]{3,2,1,0} convolution(%a, %b), window={size=2x4 stride=1x3 lhs_dilate=2x4}, "
        "dim_labels=01bf_01oi->01bf"
    )
    x = CompiledProgram(f"ENTRY %main (a: f32[]) -> f32[] {{\n  {text}\n}}").computations["main"][
        "c"
    ]
    left, right = "f32[2,4,128,64]{3,2,1,0}", "f32[2,4,128,64]{3,2,1,0}"
    flops = compiled_program.convolution_flops(x, left, right)
    assert flops == 2 * 2 * 4 * 128 * 128 * 64


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
