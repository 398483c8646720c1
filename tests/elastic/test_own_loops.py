"""States of a loop of one's own that is elastic: what is refused, and the bytes of it."""

import jax
import numpy as np
import pytest

import jaxdp
from jaxdp.elastic import own_loop as elastic
from jaxdp.split import WHOLE
from launch import port, processes, ranks

WRONG = {
    "elastic: 'layer/w' of the state is a complex": lambda: jaxdp.elastic.run(
        lambda *_: 0, {"layer": {"w": 1j}}
    ),
    "elastic: 'key' of the state is a .*; give arrays .of a key its jax.random.key_data., and": lambda: (
        jaxdp.elastic.run(lambda state, commit: state, {"key": jax.random.key(0)})
    ),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_cannot_work_is_refused_in_a_line(words):
    with pytest.raises(jaxdp.UsageError, match=words) as error:
        WRONG[words]()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            {"best": 0.5, "w": np.ones((2, 3))},
            r"commit: 'best' is float64\[\], but jaxdp.elastic.run got int64\[\]",
        ),
        (
            {"b": 1, "w": np.ones((2, 3))},
            r"commit: 'best' is None, but jaxdp.elastic.run got int64\[\]",
        ),
        (
            {"best": 1, "w": np.ones((3, 2))},
            r"commit: 'w' is float64\[3,2\], but jaxdp.elastic.run got float64\[2,3\]",
        ),
    ],
    ids=["type", "name", "shape"],
)
def test_a_committed_state_is_like_the_first_one(other, words):
    """Its bytes are what another generation gets."""

    def train(state, commit):
        return (commit({"best": 1, "w": state["w"]}), commit(other))

    with pytest.raises(jaxdp.UsageError, match=words):
        jaxdp.elastic.run(train, {"best": 0, "w": np.ones((2, 3))})


def test_the_bytes_of_a_state_ignore_its_byte_order():
    swapped, own = np.arange(3, dtype=">f4"), np.arange(3, dtype=np.float32)
    for committed in (swapped, own):
        (data,) = elastic.snapshot_of(1, [elastic.native(committed)]).parts[WHOLE]
        np.testing.assert_array_equal(elastic.restore(data, elastic.native(swapped), swapped), own)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("w", "words"),
    [
        ("numpy.full(2, rank == 1, 'float32')", "has w=checksum 17e"),
        ("numpy.zeros(2 + (rank == 1))", "has w=float64[3]"),
    ],
    ids=["values", "shapes"],
)
def test_first_states_that_differ_are_refused(w, words):
    script = f"""
import numpy, jaxdp
rank = jaxdp.init(group=jaxdp.elastic.Options()).rank
jaxdp.elastic.run(lambda state, commit: None, {{"step": 0, "w": {w}}})
"""
    jobs = processes(["-c", script], ranks(3, f"127.0.0.1:{port()}"))
    errors = "".join(job.stderr for job in jobs)
    assert [job.returncode for job in jobs] == [2, 2, 2], errors
    assert errors.count("elastic: the state: rank 1 ") == 1 and words in errors, errors
