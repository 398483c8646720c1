"""The checks of the tests of training, the config and the commands, with exact sums."""

import re

import jax
import numpy as np
import optax
import pytest

import guarding
import toys
from checks import (
    check_averaged_statistics,
    check_figures,
    check_padding,
    check_refused,
    check_shared_programs,
)
from cli_runs import DIGITS
from covering import cover, name, product
from guarding import check_halt, check_no_trace, check_overflow, check_spike
from jaxdp.cli import load
from jaxdp.errors import UsageError
from jaxdp.exact.formats import FORMATS
from jaxdp.losses import Contrastive
from jaxdp.optim.optimizers import with_master
from jaxdp.run.components import make_reduction
from jaxdp.run.fitted import settings
from jaxdp.verify.problem import Configuration, choose_configurations, is_meaningful
from judging import (
    STAGES,
    STRATEGIES,
    THINNED,
    allowed,
    check_stage,
    check_strategy,
    smallest,
    thinned,
)
from layouts import LAYOUTS, assert_same_bits, contents
from masked import check_excluded, check_state, check_weights_of_0, excluded, heights
from sequences import check_evaluation, check_skipped, check_training_in_order
from starts import check_second_start
from texts import check_sample
from verifying import CONFIG, PLANTED, command
from weighing import check_means

# --- training
# -------------------------------------------------------------------------------------------------------

ONE_BY_ONE = {"reduction": ("exact",), "accumulate": ("scan",)}  # microbatches, whatever it says


@pytest.mark.slow
@pytest.mark.parametrize("row", sorted(cover(**STRATEGIES | ONE_BY_ONE), key=smallest), ids=name)
def test_every_strategy_agrees_with_the_oracle(row):
    check_strategy(**row)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", sorted(cover(allowed, **STAGES | ONE_BY_ONE), key=smallest), ids=name
)
def test_every_stage_agrees_with_the_oracle(row):
    check_stage(**row)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("row", product(thinned, **THINNED | ONE_BY_ONE), ids=name)
def test_all_combinations_of_stages_agree_with_oracle(row):
    check_stage(**row)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (guarding.NAN, "pmap-0"),
        (guarding.NAN, "pjit-3"),
        (guarding.INFINITE, "pmap-0"),
        (guarding.STEEP, "pmap-0"),
    ],
)
def test_an_update_that_is_not_finite_leaves_no_trace(kind, layout):
    check_no_trace(kind, layout, reduction="exact")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pmap-0", "pjit-3"])
def test_a_nonfinite_parameter_halts_the_run_for_good(layout):
    check_halt(layout, reduction="exact")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["pmap-0", "pjit-3"])
def test_a_spike_is_skipped_and_moves_the_mean_by_rule(layout):
    check_spike(layout, reduction="exact")


@pytest.mark.slow
def test_an_overflow_of_the_loss_scale_is_not_counted():
    check_overflow("pjit-3", reduction="exact")


@pytest.mark.quick(1)
@pytest.mark.parametrize("size", [53, 5])
@pytest.mark.parametrize("reduction", ["exact", "exact8"])
def test_states_of_any_size_are_averaged_by_element(reduction, size):
    states = check_state(reduction, size)
    if reduction == "exact":
        jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", ["vmap", "scan"])
def test_a_state_of_weight_0_does_not_count(accumulate):
    check_weights_of_0("exact", accumulate)


@pytest.mark.slow
def test_contents_that_the_mask_excludes_do_not_count():
    examples = excluded(np.inf, height=-np.inf)
    check_excluded("mlp", heights, examples, reduction="exact", devices=3)


@pytest.mark.slow
def test_an_evaluation_goes_on_from_batch_to_batch():
    check_evaluation({"reduction": "exact", "devices": 2})


@pytest.mark.slow
def test_training_in_order_is_the_same_on_any_devices():
    check_training_in_order(("pjit", 4, "exact"))


@pytest.mark.slow
@pytest.mark.parametrize("way", [("pmap", 2, "exact"), ("pjit", 4, "exact")], ids=str)
@pytest.mark.parametrize("own", [False, True])
def test_a_skipped_update_begins_anew_all_the_same(way, own):
    check_skipped(way, own)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", [{"devices": 4, "backend": "pjit", "layout": {"zero": 2}}, {"devices": 2}], ids=str
)
def test_each_metric_is_divided_by_its_own_weight(way):
    check_means(reduction="exact", **way)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["exact", "exact8"])
def test_exact_mode_refuses_what_couples_examples(reduction):
    message = rf"parallel\.reduction: {reduction} computes each microbatch separately"
    strategy, step, batch = toys.build(
        toys.two_towers(), toys.data(20), loss=Contrastive(), reduction=reduction
    )
    with pytest.raises(UsageError, match=message):
        strategy.compile(step).update(strategy.init(), batch(0))


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["exact", "exact16"])
def test_the_master_copy_has_equal_bits_in_exact_mode(reduction):
    tx = (with_master(optax.adamw(1e-4, weight_decay=0.1)), 1.0)
    one, four = (
        toys.train(
            toys.MODELS["blocks"](), toys.data(), policy=toys.uniform("bfloat16"), optimizer=tx, steps=10,
            reduction=reduction, devices=n, **LAYOUTS["pjit-3"],
        )[1]
        for n in (1, 4)
    )  # fmt: skip
    assert_same_bits(contents(four), contents(one))


@pytest.mark.slow
def test_runs_that_differ_in_seed_share_their_programs(tmp_path):
    check_shared_programs("pjit", 2, "exact8", 3, tmp_path)


@pytest.mark.slow
def test_the_statistics_are_averaged_by_the_formula():
    check_averaged_statistics(backend="pjit", reduction="exact")


@pytest.mark.slow
def test_padding_is_always_there():
    check_padding(["--steps", "22", "--parallel.reduction", "exact"], 1, 0, True)


def test_how_jax_lowers_products_changes_in_a_run_only():
    def text():
        return (
            jax.jit(lambda x: jax.lax.dot_general(x, x, (((0,), (0,)), ((), ()))))
            .lower(np.ones((90, 4), np.float32))
            .as_text()
        )

    before = text()
    with settings(load(DIGITS)[0]):
        make_reduction("exact")
        assert text() != before
    assert text() == before


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["--parallel.reduction", "exact", "--parallel.accumulate", "vmap"],
            ["parallel.accumulate: vmap with reduction: exact", "leave it auto"],
        ),
        (
            ["--parallel.reduction", "exact", "--precision.reduce", "bfloat16"],
            ["precision.reduce: bfloat16 with reduction: exact", "leave it null"],
        ),
        (
            ["--parallel.reduction", "exact8", "--microbatches", "32"],
            [
                "microbatches: 32 with reduction: exact8 leave too few bits",
                "use at most 18, or 2 in each",
            ],
        ),
        (
            ["--parallel.reduction", "exact16", "--microbatches", "8192"],
            [
                "microbatches: 8192 with reduction: exact16 leave too few bits",
                "at most 4681",
                "or reduction: exact",
            ],
        ),
        (
            ["--parallel.reduction", "exact", "--parallel.exact_group", "3"],
            ["parallel.exact_group: 3 does not divide microbatches: 8"],
        ),
        (
            ["--parallel.reduction", "exact", "--parallel.exact_group", "0"],
            ["parallel.exact_group: 0"],
        ),
        (
            ["--parallel.reduction", "exact8", "--parallel.accumulate", "vmap"],
            ["parallel.accumulate: vmap with reduction: exact8", "set exact_group"],
        ),
    ],
)
def test_bad_arguments_are_one_clear_line(argv, words):
    check_refused(argv, words)


@pytest.mark.slow
def test_a_second_start_compiles_nothing_equal_bits(tmp_path):
    check_second_start(tmp_path, "--parallel.reduction", "exact")


@pytest.mark.slow
def test_flops_and_bytes_do_not_depend_on_the_sums():
    check_figures("--parallel.reduction", "exact")


@pytest.mark.slow
def test_exact_prints_digests_and_a_verdict(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    (tmp_path / "config.yaml").write_text(CONFIG)
    argv = ["--config", "config.yaml", "--exact", "--devices", 2, "--updates", 2]
    done = command(*argv, "--optimizer.clip_norm", 1, cwd=tmp_path, code=0)
    rows = re.findall(r"^devices (\d) .*zero (\d) .* ([0-9a-f]{64})$", done.stdout, re.MULTILINE)
    assert {row[:2] for row in rows} >= {("1", "0"), *(("2", str(zero)) for zero in range(4))}
    (digest,) = {row[2] for row in rows}
    last = done.stdout.splitlines()[-1]
    assert last.startswith(
        f"exact: {len(rows)} configurations give the same bits; params_sha256 {digest}"
    )

    done = command(
        *argv, "--model.args.fault", "device", "--optimizer.target", "lamb", cwd=tmp_path, code=1
    )
    refused = [line for line in done.stdout.splitlines() if " refused " in line]
    assert sum("optimizer.target: lamb: it is not elementwise" in line for line in refused) == 6
    assert re.search("FAILED +update 1/.* differs", done.stdout)
    assert re.match(
        r"not exact: 2 of 3 configurations differ \(6 more refused\): "
        r"devices 2 .*: update 1/.* differs",
        done.stdout.splitlines()[-1],
    )
    said = command(
        *argv[:3], "--microbatches", 12, "--precision.reduce", "bfloat16", cwd=tmp_path, code=2
    ).stderr
    assert (
        said.startswith("jaxdp: precision.reduce: bfloat16 with reduction: exact")
        and said.count("\n") == 1
    )


@pytest.mark.parametrize("reduction", FORMATS)
def test_configurations_have_the_configured_reduction(reduction):
    devices = jax.devices()[:8]
    own = Configuration(8, "pjit", 3, reduction)
    rows = choose_configurations(own, devices)
    assert rows[1] == own and all(map(is_meaningful, rows)) and 3 in {row.devices for row in rows}
    assert {row.reduction for row in rows} == {"xla", "bucket", reduction}
    assert all(row.accumulate == "vmap" for row in rows if row.reduction == reduction)


@pytest.mark.slow
def test_a_sample_goes_on_as_the_text_does(tmp_path):
    """Training needs flags of XLA that sampling does without."""
    check_sample(tmp_path, "--parallel.reduction", "exact")
