"""Estimates of the mean of operators that come one at a time."""

import io

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import NSD, PSD, as_operator, assert_close, matrix

import traceax as tx
from traceax import StreamedMean, _streamed_mean

N, WEIGHTS = 30, (3, 1, 4)
ESTIMATORS = {
    "hutchinson": tx.HutchinsonEstimator(),
    "hutchinson-chunks": tx.HutchinsonEstimator(chunk_size=4),
    "hutch++": tx.HutchPlusPlusEstimator(),
    "xtrace": tx.XTraceEstimator(),
    "xnystrace": tx.XNysTraceEstimator(),
}


def matrices(name="poly", complex=False, n=N):
    found = [matrix(name, n, complex, seed) for seed in range(len(WEIGHTS))]
    return found, np.average(found, axis=0, weights=WEIGHTS)


def run(stream, state, operators, weights=WEIGHTS):
    for _ in range(state.passes_left):
        for operator, weight in zip(operators, weights, strict=True):
            state = stream.update(state, operator, weight)
        state = stream.end_pass(state)
    return state


def streamed(estimator, k, key, found, psd=True, **kwargs):
    operators = [as_operator(a, psd) for a in found]
    stream = StreamedMean(estimator, k)
    state = run(stream, stream.init(key, operators[0]), operators)
    estimate = stream.estimate(state, **kwargs)
    # As many vectors were multiplied.
    assert sum(x.shape[1] for x in state.products) == estimate.stats["num_matvecs"]
    return estimate


def assert_like(got, wanted):
    assert got.value.dtype == wanted.value.dtype
    assert_close(got.value, wanted.value)
    assert_close(got.standard_error, wanted.standard_error, rtol=1e-7, atol=1e-5)
    assert jax.tree.structure(got.stats) == jax.tree.structure(wanted.stats)
    assert got.stats["num_matvecs"] == wanted.stats["num_matvecs"]


#
# Values
#


COMPLEX = [
    pytest.param(name, True, marks=pytest.mark.x64, id=f"{name}-complex")
    for name in ("hutchinson-chunks", "hutch++", "xnystrace")
]


@pytest.mark.parametrize(
    ("name", "complex"), [*((name, False) for name in ESTIMATORS), *COMPLEX]
)
def test_the_estimate_is_that_of_the_mean(key, name, complex):
    estimator, psd = ESTIMATORS[name], name == "xnystrace"
    found, mean = matrices("poly" if psd else "nonsymmetric", complex)
    few = name in ("hutch++", "xtrace") and not complex
    for k in (10, 3) if few else (10,):
        state = estimator.init(key, as_operator(mean, psd))
        got = streamed(estimator, k, key, found, psd)
        assert_like(got, estimator.estimate(state, k))


@pytest.mark.parametrize("k", [6, 9])
def test_enough_products_are_exact(key, k):
    found, mean = matrices("nonsymmetric", complex=True, n=6)
    estimate = streamed(tx.XTraceEstimator(), k, key, found, psd=False)
    assert_close(estimate.value, np.trace(mean))
    assert estimate.standard_error == 0
    assert estimate.stats["num_matvecs"] == 6


def test_negative_semidefinite(key):
    found, mean = matrices()
    operators = [-as_operator(a, psd=True) for a in found]
    estimator = tx.XNysTraceEstimator()
    stream = StreamedMean(estimator, 8)
    state = run(stream, stream.init(key, operators[0]), operators)
    wanted = estimator.init(key, -as_operator(mean, psd=True))
    assert_like(stream.estimate(state), estimator.estimate(wanted, 8))


def test_the_mean_so_far(key):
    operators = [as_operator(a) for a in matrices()[0]]
    stream = StreamedMean(tx.HutchinsonEstimator(), 10)
    first = stream.update(stream.init(key, operators[0]), operators[0])
    second = stream.update(first, operators[1])
    values = [stream.estimate(state).value for state in (first, second)]
    other = stream.update(stream.init(key, operators[0]), operators[1])
    assert_close(sum(values[:1], stream.estimate(other).value) / 2, values[1])


#
# Hessians over PyTrees, and programs
#


def hessian(parameters, batch):
    def gradient(p, _):
        def loss(p):
            x, y = batch
            return jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"] - y) ** 2)

        return jax.grad(loss)(p)

    tags = lx.symmetric_tag
    return lx.JacobianLinearOperator(gradient, parameters, tags=tags)


def data(batches=4):
    dtype = jnp.float32
    return jr.normal(jr.key(1), (batches, 7, 2), dtype), jnp.ones((batches, 7), dtype)


PARAMETERS = {"w": np.ones((2, 5), np.float32) / 3, "v": np.ones(5, np.float32) / 5}


@pytest.mark.x64
@pytest.mark.parametrize("jit", [False, True])
def test_hessians_compile_once(key, jit, monkeypatch):
    parameters, batches = jax.tree.map(jnp.asarray, PARAMETERS), data()
    estimator, traces = tx.XTraceEstimator(), []

    def counted(*args):
        traces.append(1)
        return apply_block(*args)

    apply_block = _streamed_mean.apply_block
    monkeypatch.setattr(_streamed_mean, "apply_block", counted)
    jax.clear_caches()
    stream = StreamedMean(estimator, 8)

    def update(state, batch, weight):
        return stream.update(state, hessian(parameters, batch), weight)

    update = eqx.filter_jit(update) if jit else update
    state = stream.init(key, parameters)
    for _ in range(state.passes_left):
        for i, batch in enumerate(zip(*batches, strict=True)):
            weight = jnp.asarray(i + 1) if jit else i + 1
            state = update(state, batch, weight)
        state = stream.end_pass(state)
    # In both passes the block has the same shape, but not the state.
    assert len(traces) == 1

    weights = jnp.arange(1, 5)
    mean = tx.MeanLinearOperator(
        lambda batch: hessian(parameters, batch), batches, weights=weights
    )
    wanted = estimator.estimate(estimator.init(key, mean), 8)
    got = stream.estimate(state)
    assert_close(got.value, wanted.value, rtol=1e-4)
    assert_close(got.standard_error, wanted.standard_error, rtol=1e-3)


def saved_and_loaded(state, like):
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, state)
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, like)


def test_states_can_be_saved_in_the_middle_of_a_pass(key):
    found, _ = matrices()
    operators = [as_operator(a) for a in found]
    stream = StreamedMean(tx.XTraceEstimator(), 8)
    begun = stream.init(key, operators[0])
    whole = run(stream, begun, operators)
    state = begun
    for operator, weight in zip(operators, WEIGHTS, strict=True):
        state = stream.update(state, operator, weight)
    state = stream.update(stream.end_pass(state), operators[0], WEIGHTS[0])
    fresh = stream.init(jr.key(3), jax.ShapeDtypeStruct((N,), begun.block.dtype))
    state = saved_and_loaded(state, stream.end_pass(fresh))
    for operator, weight in zip(operators[1:], WEIGHTS[1:], strict=True):
        state = stream.update(state, operator, weight)
    state = stream.end_pass(state)
    assert eqx.tree_equal(state, whole)
    assert stream.estimate(state).value == stream.estimate(whole).value


def test_low_precision_is_accumulated_in_32_bits(key):
    stream = StreamedMean(tx.HutchinsonEstimator(), 3)
    state = stream.init(key, jax.ShapeDtypeStruct((4,), jnp.bfloat16))
    for _ in range(300):  # 256 + 1 = 256 in bfloat16
        operator = lx.MatrixLinearOperator(jnp.eye(4, dtype=jnp.bfloat16))
        state = stream.update(state, operator)
    estimate = stream.estimate(state)
    assert estimate.value.dtype == jnp.bfloat16
    assert estimate.value == 4


#
# What is refused, and what fails
#


def test_arguments_are_checked(key):
    with pytest.raises(TypeError, match="use traceax"):
        StreamedMean(tx.LanczosQuadratureEstimator(), 4)  # pyright: ignore
    with pytest.raises(TypeError, match="Python int"):
        StreamedMean(tx.XTraceEstimator(), 4.0)  # pyright: ignore
    with pytest.raises(ValueError, match="at least 1"):
        StreamedMean(tx.XTraceEstimator(), 0)
    stream = StreamedMean(tx.XTraceEstimator(), 4)
    with pytest.raises(TypeError, match="like must be an operator, or a PyTree"):
        stream.init(key, {"a": "text"})
    with pytest.raises(TypeError, match="single key"):
        stream.init(jnp.ones(()), jnp.ones(5))
    operator = as_operator(matrix("flat", 5))
    state = stream.init(key, operator)
    with pytest.raises(TypeError, match="lineax linear operator"):
        stream.update(operator, state)  # pyright: ignore
    with pytest.raises(TypeError, match="lineax linear operator"):
        stream.update(state, matrix("flat", 5))  # pyright: ignore
    with pytest.raises(ValueError, match="act on one structure"):
        stream.update(state, as_operator(matrix("flat", 6)))
    with pytest.raises(ValueError, match="act on one structure"):
        stream.update(state, as_operator(matrix("flat", 5, complex=True)))
    for weight in (True, 1j, jnp.ones(1), np.ones((), bool), "1", None):
        with pytest.raises(TypeError, match="weight must be a real scalar"):
            stream.update(state, operator, weight)


def test_operators_must_be_semidefinite_if_one_is(key):
    stream = StreamedMean(tx.XNysTraceEstimator(), 4)
    plain, tagged = (as_operator(matrix("flat", 5), psd) for psd in (False, True))
    with pytest.raises(ValueError, match="must be tagged positive or negative"):
        stream.init(key, plain)
    state = stream.init(key, jax.eval_shape(lambda: tagged.as_matrix()[0]), tags=PSD)
    for operator in (plain, -tagged):
        with pytest.raises(ValueError, match="must be tagged positive"):
            stream.update(state, operator)
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        stream.update(state, tagged, -1)
    state = stream.init(key, plain.in_structure(), tags=NSD)
    with pytest.raises(ValueError, match="must be tagged negative"):
        stream.update(state, tagged)


def test_states_of_other_streams_are_refused(key):
    operator = as_operator(matrix("flat", 5))
    state = StreamedMean(tx.XTraceEstimator(), 4).init(key, operator)
    message = (
        r"of a StreamedMean with XTraceEstimator\(.*\) and k = 3, got .* and k = 4"
    )
    other = StreamedMean(tx.XTraceEstimator(), 3)
    with pytest.raises(ValueError, match=message):
        other.update(state, operator)
    with pytest.raises(ValueError, match=message):
        other.end_pass(state)
    with pytest.raises(
        ValueError, match=r"with HutchinsonEstimator\(.*\) and k = 4, got that"
    ):
        StreamedMean(tx.HutchinsonEstimator(), 4).estimate(state)


def test_passes_are_counted(key):
    operator = as_operator(matrix("flat", 5))
    stream = StreamedMean(tx.XTraceEstimator(), 4)
    state = stream.update(stream.init(key, operator), operator)
    with pytest.raises(ValueError, match="2 passes over the data are left"):
        stream.estimate(state)
    state = stream.update(stream.end_pass(state), operator)
    value = stream.estimate(state).value  # which ends the last pass
    state = stream.end_pass(state)
    assert stream.estimate(state).value == value
    with pytest.raises(ValueError, match="ask for the estimate"):
        stream.update(state, operator)
    with pytest.raises(ValueError, match="all 2 passes have ended"):
        stream.end_pass(state)


@pytest.mark.parametrize("k", [4, 9])
def test_sums_of_weights_that_are_zero_or_not_finite(key, k):
    operator = as_operator(matrix("flat", 5))
    stream = StreamedMean(tx.HutchinsonEstimator(), k)
    for weights in ((), (1, -1), (jnp.nan,)):
        state = stream.init(key, operator)
        for weight in weights:
            state = stream.update(state, operator, weight)
        estimate = stream.estimate(state, throw=False)
        assert jnp.isnan(estimate.value)
        assert estimate.result == tx.RESULTS.wrong_weights
        with pytest.raises(RuntimeError, match="weights of a streamed mean"):
            jax.block_until_ready(stream.estimate(state).value)


def test_passes_over_other_data(key):
    # The second time an iterator has nothing left, or not all.
    operator = as_operator(matrix("flat", 5))
    stream = StreamedMean(tx.XTraceEstimator(), 4)
    for number in (0, 2, 3, 4):
        state = stream.init(key, operator)
        for times in (3, number):
            for _ in range(times):
                state = stream.update(state, operator)
            state = stream.end_pass(state)
        result = stream.estimate(state, throw=False).result
        assert (result == tx.RESULTS.wrong_weights) == (number != 3)


def test_operators_that_are_not_finite_or_not_semidefinite(key):
    nan = as_operator(np.full((5, 5), np.nan))
    estimate = streamed(tx.XTraceEstimator(), 4, key, [nan.matrix] * 3, throw=False)
    assert estimate.result == tx.RESULTS.nonfinite
    estimate = streamed(
        tx.XNysTraceEstimator(), 8, key, [-matrix("flat", N)] * 3, throw=False
    )
    assert estimate.result == tx.RESULTS.not_semidefinite


#
# Products that can't be taken any more
#


def value_of(scale, weight, key):
    operator = lx.MatrixLinearOperator(scale * jnp.eye(8))
    stream = StreamedMean(tx.XTraceEstimator(), 4)
    return stream.estimate(
        run(stream, stream.init(key, operator), [operator], [weight])
    )


@pytest.mark.parametrize("jit", [False, True])
def test_derivatives_are_refused(key, jit):
    def value(scale, weight):
        return value_of(scale, weight, key).value

    value = jax.jit(value) if jit else value
    one = jnp.ones(())
    for argnum in (0, 1):
        with pytest.raises(RuntimeError, match="use traceax"):
            jax.grad(value, argnum)(one, one)
    with pytest.raises(RuntimeError, match="use traceax"):
        jax.jvp(value, (one, one), (one, one))
    stopped = jax.grad(lambda x: x * value(jax.lax.stop_gradient(x), one))
    assert_close(stopped(one), value(one, one))


@pytest.mark.x64
@pytest.mark.parametrize("name", ["hutchinson-chunks", "hutch++"])
def test_going_on_needs_an_operator(key, name):
    estimator, (found, mean) = ESTIMATORS[name], matrices()
    state = streamed(estimator, 9, key, found).state
    with pytest.raises(RuntimeError, match="have gone by"):
        estimator.estimate(state, 5)
    operator = as_operator(mean, psd=True)
    state = eqx.tree_at(lambda s: s.operator, state, operator)
    whole = estimator.estimate(estimator.init(key, operator), 14)
    assert_like(estimator.estimate(state, 5), whole)
