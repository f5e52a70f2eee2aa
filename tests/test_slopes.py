"""Directional derivatives as estimates: `traceax.jvp`."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import (
    assert_close,
)
from problems import PSD, float_dtype, is_x64
from scipy import stats

import traceax as tx

N, KEYS = 60, 1000
ESTIMATORS = {
    "hutchinson": tx.HutchinsonEstimator(),
    "hutch++": tx.HutchPlusPlusEstimator(),
    "xtrace": tx.XTraceEstimator(),
    "xtrace-signs": tx.XTraceEstimator(tx.RademacherSampler(), resphere=False),
    "xnystrace": tx.XNysTraceEstimator(),
    "adaptive": tx.AdaptiveXTraceEstimator(),
}


def family(decay, commutes, complex=False):
    """`A`, `dA` and the trace of dA."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((N, N)) + 1j * complex * rng.standard_normal((N, N))
    q = np.linalg.qr(q)[0]
    values = decay ** np.arange(N)
    a = (q * values) @ q.conj().T
    b = (q * (values * np.cos(np.arange(N)))) @ q.conj().T
    if not commutes:
        b = rng.standard_normal((N, N)) / N**0.5 + 1j * complex * np.eye(N)
        b = (b + b.conj().T) / 4
    dtype = np.result_type(float_dtype(), np.complex64) if complex else float_dtype()
    a, b = (x if complex else x.real for x in (a, b))
    return jnp.asarray(a, dtype), jnp.asarray(b, dtype), np.trace(b).real


def check_bars(values, errors, low, high, truth, lowest_coverage=0.93, unbiased=True):
    deviation = np.asarray(values) - truth
    rms = np.sqrt(np.mean(deviation**2))
    if unbiased:
        assert abs(np.mean(deviation)) < 4 * rms / len(deviation) ** 0.5
    assert lowest_coverage <= np.mean((low <= truth) & (truth <= high)) <= 0.995
    assert 0.8 <= np.mean(errors) / rms <= 1.3


@pytest.mark.parametrize("name", ESTIMATORS)
def test_slopes_of_traces_have_bars(name):
    estimator = ESTIMATORS[name]

    @jax.jit
    def run(a, b):
        def run_once(key):
            def fn(t):
                operator = lx.MatrixLinearOperator(a + t * b, PSD)
                return tx.trace(key, operator, 16, estimator, throw=False)

            value, slope = tx.jvp(fn, (0.0,), (1.0,))
            _, plain = jax.jvp(lambda t: fn(t).value, (0.0,), (1.0,))
            same = value.value - fn(0.0).value
            parts = slope.value, slope.standard_error, *slope.confidence_interval()
            return parts, plain, same

        return jax.lax.map(run_once, jr.split(jr.key(1), KEYS), batch_size=100)

    for decay, commutes in ((0.9, True), (0.99, False)):
        a, b, truth = family(decay, commutes)
        parts, plain, same = run(a, b)
        check_bars(*parts, truth)
        assert_close(parts[0], plain, rtol=1e-5, atol=1e-6)
        assert np.max(np.abs(same)) < 1e-5


@pytest.mark.x64
def test_slopes_of_complex_and_factored_operators():
    a, b, truth = family(0.9, False, complex=True)

    @jax.jit
    def run(keys):
        def run_once(key):
            def fn(t, scale):
                with jax.numpy_dtype_promotion("standard"):
                    matrix = lx.MatrixLinearOperator(a + t * b)
                    operator = scale * lx.TaggedLinearOperator(matrix, PSD)
                # We take the factor out of the operator, and its derivative comes from
                # the value.
                return tx.trace(key, operator, 16, throw=False)

            slopes = [
                tx.jvp(fn, (0.0, 3.0), tangent)[1]
                for tangent in ((1.0, 0.0), (0.0, 1.0))
            ]
            return [
                (x.value, x.standard_error, *x.confidence_interval()) for x in slopes
            ]

        return jax.lax.map(run_once, keys, batch_size=100)

    # A traced factor may have any sign, so the operator loses its tag and values are
    # complex.
    first, second = jax.tree.map(jnp.real, run(jr.split(jr.key(2), KEYS)))
    check_bars(*first, 3 * truth)
    check_bars(*second, np.trace(a).real)


@pytest.mark.x64
@pytest.mark.parametrize("name", ["hutchinson", "hutch++", "xtrace", "adaptive"])
def test_slopes_are_the_same_in_chunks(name, key, monkeypatch):
    a, b, _ = family(0.9, False)

    def slope():
        jax.clear_caches()

        def fn(t):
            operator = lx.MatrixLinearOperator(a + t * b)
            return tx.trace(key, operator, 40, ESTIMATORS[name])

        estimate = tx.jvp(fn, (0.0,), (1.0,))[1]
        return (
            estimate.value,
            estimate.standard_error,
            estimate.stats["degrees_of_freedom"],
        )

    whole = slope()
    monkeypatch.setattr("traceax._operators.space._CACHED", 5 * N)
    assert_close(slope(), whole, rtol=1e-9)


def _kernel(x):
    def make(length):
        def kernel(p, q):
            r = jnp.sqrt(5 * jnp.sum((p - q) ** 2) / length**2 + 1e-12)
            return (1 + r + r**2 / 3) * jnp.exp(-r)

        return tx.KernelLinearOperator(kernel, x)

    return make


@pytest.mark.x64
@pytest.mark.parametrize("columns", [0, 20])
def test_slopes_of_likelihoods_have_bars(columns):
    n, keys = 250, 300
    x = jr.uniform(jr.key(3), (n, 2))
    y, make = jnp.sin(5 * x[:, 0]), _kernel(x)
    point = jnp.array([0.5, 0.05])
    pivots = None
    if columns:
        pivots = tx.choose_pivots(jr.key(0), make(0.5), columns, shift=0.05)

    def exact(p):
        matrix = make(p[0]).as_matrix() + p[1] * jnp.eye(n)
        solved = jnp.linalg.solve(matrix, y)
        return -(y @ solved + jnp.linalg.slogdet(matrix)[1]) / 2

    truth = jax.grad(exact)(point)

    @jax.jit
    def run(keys):
        def run_once(key):
            def fn(p):
                return tx.gaussian_log_likelihood(
                    key,
                    make(p[0]),
                    y,
                    60,
                    shift=p[1],
                    preconditioner=pivots,
                    throw=False,
                )

            def slope_along(tangent):
                slope = tx.jvp(fn, (point,), (tangent,))[1]
                interval = slope.confidence_interval()
                return slope.value, slope.standard_error, *interval

            plain = jax.grad(lambda p: fn(p).value)(point)
            return jax.vmap(slope_along)(jnp.eye(2)), plain

        return jax.lax.map(run_once, keys)

    parts, plain = run(jr.split(jr.key(1), keys))
    assert_close(parts[0], plain, rtol=1e-9, atol=1e-9)
    for i in range(2):
        check_bars(*(x[:, i] for x in parts), truth[i])


@pytest.mark.x64
def test_slopes_along_data_have_their_own_bars():
    # The last step's change in `u^* db` may be 0 by accident.
    n = 100
    x = jnp.linspace(0.0, 1.0, n)
    matrix = jnp.exp(-jnp.abs(x[:, None] - x[None]) / 0.1)
    whole = matrix + 0.01 * jnp.eye(n)
    factor, shape = jnp.linalg.cholesky(whole), jnp.sin(6 * x)

    @jax.jit
    def run(keys):
        def run_once(key):
            y = factor @ jr.normal(jr.fold_in(key, 7), (n,))

            def fn(m):
                return tx.gaussian_log_likelihood(
                    key,
                    lx.MatrixLinearOperator(matrix, PSD),
                    y - m * shape,
                    40,
                    shift=0.01,
                    preconditioner=20,
                    throw=False,
                )

            slope = tx.jvp(fn, (0.0,), (1.0,))[1]
            deviation = slope.value - shape @ jnp.linalg.solve(whole, y)
            low, high = slope.confidence_interval()
            return (
                deviation,
                slope.standard_error,
                low - slope.value,
                high - slope.value,
            )

        return jax.lax.map(run_once, keys)

    deviation, error, low, high = run(jr.split(jr.key(0), 200))
    assert np.mean((low <= deviation) & (deviation <= high)) >= 0.93
    assert 0.8 <= np.mean(error) / np.sqrt(np.mean(deviation**2)) <= 1.5


@pytest.mark.skipif(is_x64(), reason="tests rounding in 32-bit mode")
def test_bars_of_exact_slopes_include_rounding():
    n = 30
    rng = np.random.default_rng(0)
    a = rng.standard_normal((n, n))
    a = (a @ a.T + np.eye(n)).astype(np.float32)
    b = rng.standard_normal((100, n, n)).astype(np.float32)
    b = (b + b.transpose(0, 2, 1)) / 2
    y = jnp.asarray(rng.standard_normal(n), jnp.float32)

    @jax.jit
    def run(b):
        def run_once(b):
            def make(t):
                return lx.MatrixLinearOperator(jnp.asarray(a) + t * b, PSD)

            functions = (
                lambda t: tx.logdet(jr.key(0), make(t), n),
                lambda t: tx.trace_inverse(jr.key(0), make(t), n),
                lambda t: (
                    tx.inv_quad_logdet(jr.key(0), make(t), y, n, shift=0.5).inv_quad
                ),
            )
            slopes = [tx.jvp(fn, (0.0,), (1.0,))[1] for fn in functions]
            return [(x.value, *x.confidence_interval()) for x in slopes]

        return jax.lax.map(run_once, b)

    exact, shifted = (np.linalg.inv(a + s * np.eye(n)) for s in (np.float64(0), 0.5))
    truths = (
        np.einsum("ij,kij->k", exact, b),
        -np.einsum("ij,kij->k", exact @ exact, b),
        -np.einsum("i,kij,j->k", shifted @ np.asarray(y), b, shifted @ np.asarray(y)),
    )
    for (value, low, high), truth in zip(run(jnp.asarray(b)), truths, strict=True):
        assert np.mean((low <= truth) & (truth <= high)) >= 0.93
        assert np.all(high - low < 0.05 * np.max(np.abs(value)))


def test_bars_for_slopes_of_norms_include_the_root(key):
    values = jnp.repeat(jnp.array([0.3, 1.0, 3.0]), 30)

    def fn(t):
        # The slope of tr |A|^3 is the same for every probe.
        operator = lx.DiagonalLinearOperator(values + t / values**2)
        function = lx.FunctionLinearOperator(
            operator.mv, operator.in_structure(), lx.symmetric_tag
        )
        return tx.schatten_norm(key, function, 12, p=3.0)

    _, slope = tx.jvp(fn, (0.0,), (1.0,))
    truth = len(values) * jnp.sum(values**3) ** (-2 / 3)
    assert abs(slope.value - truth) < 4 * slope.standard_error
    assert slope.standard_error < 0.2 * truth


@pytest.mark.x64
def test_slopes_of_nearly_converged_spaces_have_bars():
    x = jr.uniform(jr.key(3), (200, 1))
    point = jnp.array([0.05, 0.01])

    def make(length):
        def kernel(p, q):
            return jnp.exp(-jnp.sum((p - q) ** 2) / (2 * length**2))

        return lx.TaggedLinearOperator(tx.KernelLinearOperator(kernel, x), PSD)

    def exact(p):
        return jnp.linalg.slogdet(make(p[0]).as_matrix() + p[1] * jnp.eye(len(x)))[1]

    truth = jax.grad(exact)(point)

    @jax.jit
    def run(keys):
        def run_once(key):
            def fn(p):
                krylov = tx.KrylovAwareEstimator()
                return tx.logdet(key, make(p[0]), None, krylov, shift=p[1], throw=False)

            def slope_along(tangent):
                slope = tx.jvp(fn, (point,), (tangent,))[1]
                interval = slope.confidence_interval()
                return slope.value, slope.standard_error, *interval

            return jax.vmap(slope_along)(jnp.eye(2))

        return jax.lax.map(run_once, keys)

    parts = run(jr.split(jr.key(1), 300))
    for i in range(2):
        # The derivative's truncation error has a sign, so we don't test for a bias.
        check_bars(*(x[:, i] for x in parts), truth[i], unbiased=False)


@pytest.mark.x64
def test_slopes_of_functions_to_tolerances_and_of_exact_answers(key):
    a, b, _ = family(0.9, False)
    a = a + 0.1 * jnp.eye(N)

    def fn(t, k, **arguments):
        operator = lx.MatrixLinearOperator(a + t * b, PSD)
        return tx.trace_function(
            key,
            lambda x: {"log": jnp.log(x), "root": jnp.sqrt(x)},
            operator,
            k,
            **arguments,
        )

    inverse = jnp.linalg.inv(a)
    truth = jnp.trace(inverse @ b)
    for arguments in ({"k": 40}, {"k": 50, "rtol": 0.05}, {"k": N}):
        _, slope = tx.jvp(
            lambda t, arguments=arguments: fn(t, **arguments), (0.0,), (1.0,)
        )
        _, plain = jax.jvp(lambda t, x=arguments: fn(t, **x).value, (0.0,), (1.0,))
        assert_close(slope.value["log"], plain["log"], rtol=1e-10)
        assert abs(slope.value["log"] - truth) < 5 * slope.standard_error["log"] + 1e-9
        assert (slope.standard_error["log"] < 1e-9) == (arguments["k"] == N)


def test_constant_and_exact_slopes(key):
    operator = lx.DiagonalLinearOperator(jnp.arange(1.0, 5.0))
    _, slope = tx.jvp(lambda t: tx.trace(key, t * operator, 2), (2.0,), (1.0,))
    assert slope.value == 10
    assert slope.standard_error == 0
    a = lx.MatrixLinearOperator(jnp.ones((5, 5)))
    _, slope = tx.jvp(lambda t: tx.trace(key, a, 3), (2.0,), (1.0,))
    assert slope.value == 0
    matrix = jnp.asarray(np.random.default_rng(0).standard_normal((5, 5)))
    _, slope = tx.jvp(
        lambda t: tx.trace(key, lx.MatrixLinearOperator(t * matrix), 5), (2.0,), (1.0,)
    )
    assert_close(slope.value, jnp.trace(matrix), rtol=1e-5)
    assert 0 < slope.standard_error < 1e-4


def test_slopes_are_differentiable_and_jitted_functions_are_traced_again(key):
    matrix = jnp.asarray(np.random.default_rng(0).standard_normal((20, 20)))

    @jax.jit
    def fn(t):
        return tx.trace(key, lx.MatrixLinearOperator(t**3 * matrix), 8)

    fn(2.0)
    value, slope = tx.jvp(fn, (2.0,), (1.0,))
    assert slope.standard_error > 0
    assert_close(slope.value, 1.5 * value.value, rtol=1e-5)
    assert_close(slope.standard_error, 1.5 * value.standard_error, rtol=1e-3)
    second = jax.grad(lambda t: tx.jvp(fn, (t,), (1.0,))[1].value)(2.0)
    assert_close(second, 1.5 * value.value, rtol=1e-5)
    assert_close(fn(2.0).value, value.value, rtol=1e-6)


@pytest.mark.x64  # here jaxtyping checks no annotations
def test_wrong_arguments_and_missing_bars(key):
    operator = lx.MatrixLinearOperator(jnp.eye(5))

    def fn(t):
        return tx.trace(key, t * operator, 3)

    for arguments, error, message in (
        ((lambda t: fn(t).value, (1.0,), (1.0,)), TypeError, "must return a traceax"),
        ((fn, 1.0, 1.0), TypeError, "must be a tuple"),
        ((fn, (1.0,), (1.0, 2.0)), TypeError, "structure of primals"),
        ((fn, (1.0,), (jnp.ones(2),)), TypeError, "must match primals"),
        ((fn, (1.0,), (1j,)), TypeError, "must match primals"),
        ((fn, (1,), (1,)), TypeError, "floating-point"),
    ):
        with pytest.raises(error, match=message):
            tx.jvp(*arguments)

    with pytest.raises(ValueError, match=r"jax.vmap around traceax.jvp"):
        tx.jvp(lambda t: jax.vmap(fn)(jnp.stack([t, t])), (1.0,), (1.0,))

    for one in (1, np.float32(1)):
        assert_close(tx.jvp(fn, (1.0,), (one,))[1].value, 5.0)

    with pytest.raises(NotImplementedError, match="slope of a slope"):
        tx.jvp(lambda t: tx.jvp(fn, (t,), (1.0,))[1], (1.0,), (1.0,))

    def blocks(t):
        pair = [jnp.ones(10), jnp.ones(10)]
        return tx.as_operator(lambda x: jax.tree.map(lambda y: t * y, x), pair)

    identity = lx.IdentityLinearOperator(jax.eval_shape(lambda: jnp.ones(5)))
    signs = tx.HutchinsonEstimator()
    for refused in (
        lambda t: tx.diagonal(key, t * operator, 3, signs),
        lambda t: tx.diagonal(key, t * operator, 5),
        lambda t: tx.diagonal(key, t * identity, 5),
        lambda t: tx.leaf_traces(key, t * operator, 3, signs)[1],
        lambda t: tx.leaf_traces(key, t * operator, 5)[0],
        lambda t: tx.leaf_traces(key, blocks(t), 18, probes="blocks")[1],
    ):
        with pytest.raises(NotImplementedError, match="no error bar"):
            tx.jvp(refused, (1.0,), (1.0,))


@pytest.mark.x64
@pytest.mark.parametrize("coloured", [False, True])
def test_slopes_of_quadratures(coloured):
    # The operator is a Laplacian on a 16 x 16 grid plus 0.3, and the slope is along a
    # diagonal matrix.
    path = 2 * np.eye(16) - np.eye(16, k=1) - np.eye(16, k=-1)
    A = np.kron(path, np.eye(16)) + np.kron(np.eye(16), path) + 0.3 * np.eye(256)
    d = np.random.default_rng(0).uniform(size=256)
    pairs = np.argwhere(A)
    sampler, m = tx.RademacherSampler(), 12
    if coloured:
        colours = tx.colour(pairs, 2)
        sampler, m = tx.ColouredSampler(colours, exact=False), 3 * colours.number
    estimator = tx.LanczosQuadratureEstimator(m, sampler)

    def both(key):
        def logdet(t):
            operator = lx.MatrixLinearOperator(jnp.asarray(A) + t * jnp.diag(d), PSD)
            return tx.logdet(key, operator, 12 * m, estimator)

        return [
            (x.value, x.standard_error, x.stats["degrees_of_freedom"])
            for x in tx.jvp(logdet, (0.0,), (1.0,))
        ]

    truth = np.linalg.slogdet(A)[1], np.linalg.inv(A).diagonal() @ d
    results = jax.jit(jax.vmap(both))(jr.split(jr.key(0), 200))
    for (value, error, freedom), expected in zip(results, truth, strict=True):
        radius = error * stats.t.ppf(0.975, freedom)
        assert 0.92 <= np.mean(np.abs(value - expected) < radius) <= 0.99
        spread = np.std(value)
        assert 0.8 < np.sqrt(np.mean(error**2)) / spread < 1.3
        assert abs(np.mean(value) - expected) < 4 * spread / np.sqrt(200)
        assert np.mean(freedom) > 6


@pytest.mark.skipif(is_x64(), reason="one mode is enough")
def test_a_bias_of_two_percent_is_seen():
    values = jr.normal(jr.key(0), (KEYS,)) * 0.1 + 1
    bars = jnp.full(KEYS, 0.1)
    check_bars(values, bars, values - 0.2, values + 0.2, 1.0)
    with pytest.raises(AssertionError):
        check_bars(1.02 * values, bars, values - 0.2, values + 0.2, 1.0)
