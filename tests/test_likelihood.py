"""Compare Gaussian likelihoods with Cholesky factorisations."""

import functools as ft
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
import scipy.stats
from helpers import assert_close, counting_operator, z_score
from problems import (
    PSD,
    Process,
    as_array,
    as_operator,
    float_dtype,
    gaussian,
    is_x64,
    observations,
    points,
    process,
)

import traceax as tx

N = 120
NOISE = 1e-2


def likelihood(p, x, y, k, key=None, **options):
    key = jr.key(3) if key is None else key
    return tx.gaussian_log_likelihood(key, p.kernel(x), y, k, shift=p.noise, **options)


def test_likelihood_with_derivatives():
    # The Krylov space has converged, so only the probes cause errors.
    x, y = observations(columns=(2,))
    p = process()

    @jax.jit
    def run(p, x, y):
        pivots = tx.choose_pivots(jr.key(0), p.kernel(x), 60, shift=p.noise)

        def value(p, x, y):
            return likelihood(p, x, y, 72, preconditioner=pivots).value

        terms = tx.inv_quad_logdet(
            jr.key(3), p.kernel(x), y, 72, shift=p.noise, preconditioner=pivots
        )
        return terms, jax.value_and_grad(value, (0, 1, 2))(p, x, y)

    terms, (value, slopes) = run(p, x, y)
    logdet, inv_quad, solution = p.exact_terms(x, y)
    tolerance = 1e-8 if is_x64() else 2e-3
    assert_close(terms.inv_quad.value, inv_quad, tolerance)
    assert_close(
        terms.solution, solution, tolerance, tolerance * jnp.abs(solution).max()
    )
    assert abs(terms.logdet.value - logdet) < 4 * terms.logdet.standard_error
    assert abs(value - p.exact_likelihood(x, y)) < 4 * terms.logdet.standard_error
    assert terms.logdet.standard_error < 1e-2 * abs(logdet)
    expected = jax.grad(Process.exact_likelihood, (0, 1, 2))(p, x, y)
    for a, b in zip(*map(jax.tree.leaves, (slopes, expected)), strict=True):
        assert jnp.linalg.norm(a - b) < 0.05 * jnp.linalg.norm(b)
    assert_close(slopes[2], expected[2], tolerance, tolerance * jnp.abs(solution).max())


@pytest.mark.x64
def test_exact_answers():
    x, y = observations(30)
    p = process()

    def value(p, y, k, columns):
        return likelihood(p, x, y, k, preconditioner=columns).value

    @eqx.filter_jit
    def run(p, y, k, columns):
        return jax.value_and_grad(value, (0, 1))(p, y, k, columns)

    f = p.exact_likelihood(x, y)
    gradient = jax.grad(Process.exact_likelihood, (0, 2))(p, x, y)
    for columns in (None, 10):
        actual, slopes = run(p, y, 30, columns)
        assert_close(actual, f)
        for a, b in zip(*map(jax.tree.leaves, (slopes, gradient)), strict=True):
            assert_close(a, b, 1e-8, 1e-8)


@pytest.mark.x64
@pytest.mark.parametrize("columns", [None, 25])
def test_intervals_and_derivatives_over_keys(columns):
    # The space is far from converged, so brackets must contain its truncation error.
    x, y = observations(200)
    p = process(1e-3)
    pivots = None
    if columns is not None:
        pivots = tx.choose_pivots(jr.key(9), p.kernel(x), columns, shift=p.noise)

    def run(key):
        terms = tx.inv_quad_logdet(
            key, p.kernel(x), y, 24, shift=p.noise, preconditioner=pivots
        )
        intervals = [e.confidence_interval() for e in (terms.logdet, terms.inv_quad)]
        return intervals, terms.inv_quad.stats["bracket"]

    keys = jr.split(jr.key(0), 100)
    intervals, (low, high) = jax.jit(lambda keys: jax.lax.map(run, keys))(keys)
    logdet, inv_quad, _ = p.exact_terms(x, y)
    for (lower, upper), truth in zip(intervals, (logdet, inv_quad), strict=True):
        assert np.mean((lower <= truth) & (truth <= upper)) >= 0.9
    assert jnp.all(low <= inv_quad * (1 + 1e-9))
    assert jnp.all(high >= inv_quad * (1 - 1e-9))
    assert np.std(intervals[0][0]) > 0
    if columns is None:
        return

    def slope(key):
        def value(p):
            return likelihood(p, x, 0 * y, 72, key, preconditioner=pivots).value

        return jax.grad(value)(p)

    # The space with 72 products has converged, so the remaining error is unbiased.
    slopes = jax.jit(lambda keys: jax.lax.map(slope, keys))(keys)
    expected = jax.grad(Process.exact_likelihood)(p, x, 0 * y)
    for a, b in zip(*map(jax.tree.leaves, (slopes, expected)), strict=True):
        assert z_score(a, b) < 4.5
        assert z_score(a + np.std(a, axis=0)[None], b) > 5


def test_a_precision_matrix_needs_no_noise():
    # The space has converged, so only the probes cause errors.
    y = jr.normal(jr.key(1), (144, 2))
    path = 2 * jnp.eye(12) - jnp.eye(12, k=1) - jnp.eye(12, k=-1)
    laplacian = jnp.kron(path, jnp.eye(12)) + jnp.kron(jnp.eye(12), path)

    def matrix(log_scale):
        return jnp.exp(log_scale) * laplacian + jnp.eye(144)

    def log_density(log_scale, y):
        Q = matrix(log_scale)
        constant = y.size * math.log(2 * math.pi)
        quadratic = jnp.sum(y * jnp.linalg.solve(Q, y))
        return -(2 * jnp.linalg.slogdet(Q)[1] + quadratic + constant) / 2

    def value(log_scale, y, key, read):
        Q = matrix(log_scale)
        K = (
            lx.MatrixLinearOperator(Q)
            if read
            else tx.as_operator(lambda v: Q @ v, y[:, 0])
        )
        estimate = tx.gaussian_log_likelihood(key, K, y, 110, shift=0)
        return estimate.value, estimate.confidence_interval()

    point, keys = jnp.zeros((), float_dtype()), jr.split(jr.key(0), 50)
    truth, slopes = jax.value_and_grad(log_density, (0, 1))(point, y)
    spreads = []
    for read in (True, False):

        @jax.jit
        def run(keys, read=read):
            differentiated = jax.value_and_grad(value, (0, 1), has_aux=True)
            return jax.lax.map(lambda key: differentiated(point, y, key, read), keys)

        (values, (low, high)), (in_scale, in_y) = run(keys)
        assert np.mean((low <= truth) & (truth <= high)) >= 0.9
        assert z_score(values, truth) < 4.5
        assert z_score(values * 1.02, truth) > 5
        assert z_score(in_scale, slopes[0]) < 4.5
        assert_close(in_y[0], slopes[1], 1e-6 if is_x64() else 1e-3, 1e-3)
        spreads.append(np.std(values))
    # A readable diagonal gives the trace, which removes part of the sampling error.
    assert spreads[0] < spreads[1]
    terms = tx.inv_quad_logdet(
        jr.key(0), lx.MatrixLinearOperator(matrix(0.0)), y, shift=0
    )
    assert terms.logdet.stats["num_matvecs"] == 0
    assert_close(terms.logdet.value, jnp.linalg.slogdet(matrix(0.0))[1], 1e-5)
    assert_close(matrix(0.0) @ terms.solution, y, 0, 1e-4)


def test_noise_of_every_observation():
    x, y = observations()
    noise = jnp.asarray(np.linspace(0.01, 0.1, N), float_dtype())
    p = eqx.tree_at(lambda p: p.noise, process(), noise)

    @eqx.filter_jit
    def run(p, y, columns):
        options = {"shift": p.noise, "preconditioner": columns}
        return tx.inv_quad_logdet(jr.key(1), p.kernel(x), y, 100, **options)

    exact, inv_quad, solution = p.exact_terms(x, y)
    for columns in (None, 40):
        terms = run(p, y, columns)
        e = terms.logdet
        assert abs(e.value - exact) < 4 * e.standard_error
        low, high = e.stats["bracket"]
        assert low <= high
        assert e.stats["bracket_is_proven"]
        assert_close(terms.inv_quad.value, inv_quad, 1e-8 if is_x64() else 1e-3)
        deviation = jnp.linalg.norm(terms.solution - solution)
        assert deviation < 1e-3 * jnp.linalg.norm(solution)


def test_one_program_for_keys_and_parameters():
    x, y = observations(60)
    keys = jr.split(jr.key(0), 3)
    lengths = jnp.asarray([[0.3, 0.5], [0.4, 0.4], [0.8, 0.6]], float_dtype())

    def value(key, length):
        p = eqx.tree_at(lambda p: p.length, process(), length)
        return likelihood(p, x, y, 24, key, preconditioner=20).value

    together = jax.jit(jax.vmap(jax.value_and_grad(value, 1)))(keys, lengths)
    one = jax.jit(jax.value_and_grad(value, 1))
    for i in range(3):
        for a, b in zip(together, one(keys[i], lengths[i]), strict=True):
            assert_close(a[i], b, 1e-7 if is_x64() else 2e-2)


def test_tolerances_apply_to_the_whole_likelihood():
    x, y = observations(400)
    p = process()

    @jax.jit
    def run(rtol):
        return likelihood(p, x, y, 200, preconditioner=60, rtol=rtol, throw=False)

    exact = p.exact_likelihood(x, y)
    used = []
    for rtol in (0.3, 0.01):
        estimate = run(rtol)
        assert estimate.result == tx.RESULTS.successful
        assert abs(estimate.value - exact) < 2 * rtol * abs(exact)
        low, high = estimate.confidence_interval()
        assert (high - low) / 2 <= 1.01 * rtol * abs(estimate.value)
        used.append(int(estimate.stats["num_matvecs"]))
    assert used[0] < used[1]


def test_useless_columns_are_dropped():
    identity = as_operator(np.eye(200), psd=True)
    estimate = tx.logdet(jr.key(0), identity, 12, shift=0.5, preconditioner=50)
    assert estimate.stats["num_columns"] == 0
    assert_close(estimate.value, 200 * math.log(1.5), 1e-5)


def test_columns_never_take_products():
    # Without entries, a column would cost one product, and the diagonal n.
    x, y = observations()
    operator, count_products = counting_operator(process().kernel(x).as_matrix())
    key, pivots = jr.key(0), jnp.arange(8)
    for columns in (8, pivots):
        options = {"shift": NOISE, "preconditioner": columns}
        for fn in (
            lambda **o: tx.logdet(key, 2.0 * operator, 16, **o),
            lambda **o: tx.inv_quad_logdet(key, operator, y, 16, **o),
            lambda **o: tx.gaussian_log_likelihood(key, operator, y, 16, **o),
            lambda **_: tx.choose_pivots(key, operator, 8, shift=NOISE),
        ):
            with pytest.raises(
                TypeError, match=r"entries .* leave preconditioner= out"
            ):
                fn(**options)
    estimate = tx.logdet(key, operator, 16, shift=jnp.full(N, NOISE))
    assert count_products(estimate) == estimate.stats["num_matvecs"] <= 16


def test_pivots_with_zero_residuals_are_inactive():
    x, y = observations()
    x = x.at[60:].set(x[:60])
    key, p = jr.key(0), process()
    start, smooth, rough = (
        eqx.tree_at(lambda p: p.length, p, p.length * factor) for factor in (8, 40, 0.2)
    )

    @jax.jit
    def run(p, pivots):
        e = likelihood(p, x, y, 64, preconditioner=pivots)
        residual = e.stats["residual"]
        return e.value, e.standard_error, e.stats["num_columns"], residual

    chosen = tx.choose_pivots(key, start.kernel(x), 100, shift=NOISE)
    assert jnp.sum(chosen >= 0) == 60
    for pivots in (chosen, jnp.arange(20, 120)):
        numbers = []
        for q in (smooth, rough):
            value, error, number, residual = run(q, pivots)
            exact = q.exact_likelihood(x, y)
            rounding = (1e-8 if is_x64() else 1e-4) * abs(exact)
            assert abs(value - exact) < 4 * error + rounding
            assert residual < 0.01
            numbers.append(int(number))
        assert 5 < numbers[0] < 45 < numbers[1] <= 60


MUST = r"(preconditioner|pivots) must be"
# Each case has the wrong arguments, the error and words from its message.
BAD = {
    "length of y": ({"y": np.ones(N - 1)}, ValueError, "shape"),
    "axes of y": ({"y": np.ones((N, 1, 1))}, ValueError, "shape"),
    "list": ({"y": [1.0]}, TypeError, "array"),
    "no noise": ({"shift": 0.0, "preconditioner": 20}, ValueError, "positive"),
    "negative noise": ({"shift": -NOISE, "preconditioner": 20}, ValueError, "positive"),
    "length of noise": ({"shift": np.ones(3)}, ValueError, "shape"),
    "no columns": (
        {"preconditioner": 0},
        ValueError,
        MUST,
    ),
    "columns": ({"preconditioner": N + 1}, ValueError, "from 1 to n"),
    "truth": ({"preconditioner": True}, TypeError, MUST),
    "words": ({"preconditioner": "many"}, TypeError, "int"),
    "floats": (
        {"preconditioner": np.ones(3)},
        TypeError,
        MUST,
    ),
    "axes": (
        {"preconditioner": np.ones((3, 2), int)},
        ValueError,
        MUST,
    ),
    "pivots": ({"preconditioner": np.array([0, N])}, ValueError, "below n"),
    "negative": (
        {"preconditioner": np.array([-2, 3])},
        ValueError,
        MUST,
    ),
}


@pytest.mark.wrong_types
@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name):
    other, error, words = BAD[name]
    x, y = observations()
    options = {"y": y, "shift": NOISE, "preconditioner": None} | other
    y = options.pop("y")
    for fn in (tx.gaussian_log_likelihood, tx.inv_quad_logdet):
        with pytest.raises(error, match=words):
            fn(jr.key(0), process().kernel(x), y, 20, **options)


def test_other_bad_arguments():
    x, y = observations()
    kernel = process().kernel(x)
    with pytest.raises(TypeError, match="KrylovAwareEstimator"):
        tx.gaussian_log_likelihood(
            jr.key(0), kernel, y, 20, tx.LanczosQuadratureEstimator(), shift=1.0
        )
    with pytest.raises(ValueError, match="k must be at least 2"):
        tx.gaussian_log_likelihood(jr.key(0), kernel, y, 1, shift=1.0)


def test_failures_are_reported():
    x, y = observations()
    p = process()

    def indefinite(a, b):
        return jnp.cos(3 * jnp.sum(a * b)) - 0.5

    indefinite_kernel = tx.KernelLinearOperator(indefinite, x)

    @eqx.filter_jit
    def run(kernel, y, noise, columns):
        return tx.gaussian_log_likelihood(
            jr.key(0), kernel, y, 40, shift=noise, preconditioner=columns, throw=False
        ).result

    noise = jnp.asarray(NOISE, float_dtype())
    for columns in (None, 30):
        result = run(p.kernel(x.at[3, 0].set(jnp.nan)), y, noise, columns)
        assert result == tx.RESULTS.nonfinite
        result = run(p.kernel(x), y.at[0].set(jnp.nan), noise, columns)
        assert result == tx.RESULTS.y_not_finite
        result = run(p.kernel(x), y, -noise, columns)
        assert result == tx.RESULTS.noise_not_positive
        result = run(indefinite_kernel, y, noise, columns)
        assert result in (tx.RESULTS.not_semidefinite, tx.RESULTS.below_lower)


@pytest.mark.parametrize(
    ("door", "bad", "k", "columns"),
    [
        (tx.gaussian_log_likelihood, np.nan, 20, 30),
        (tx.inv_quad_logdet, np.inf, N, None),
    ],
)
def test_missing_observations_are_named(door, bad, k, columns):
    x, y = observations(columns=(2,))
    call = jr.key(0), process().kernel(x), y.at[3, 1].set(bad), k
    options = {"shift": NOISE, "preconditioner": columns}
    result = door(*call, **options, throw=False)
    single = isinstance(result, tx.Estimate)
    for e in [result] if single else [result.logdet, result.inv_quad]:
        assert e.result == tx.RESULTS.y_not_finite
        assert {"bracket", "bracket_is_proven"} <= set(e.stats)
        assert jnp.isnan(e.value).all()
        assert jnp.isnan(e.standard_error).all()
    with pytest.raises(Exception, match=r"y, the observations.*Leave these rows"):
        jax.block_until_ready(door(*call, **options))


def test_missing_observations_with_large_noise():
    x, y = observations()
    missing = np.arange(N) % 7 == 0
    noise = jnp.where(missing, 1e10, NOISE).astype(float_dtype())

    def value(length, x, y, noise):
        p = eqx.tree_at(lambda p: p.length, process(), length)
        e = tx.gaussian_log_likelihood(jr.key(0), p.kernel(x), y, N, shift=noise)
        return e.value

    value_and_slope = jax.jit(jax.value_and_grad(value))
    length = process().length
    full, slope = value_and_slope(length, x, jnp.where(missing, 0, y), noise)
    reduced, reduced_slope = value_and_slope(
        length, x[~missing], y[~missing], noise[~missing]
    )
    constant = -missing.sum() / 2 * math.log(2 * math.pi * 1e10)
    assert_close(full - constant, reduced, rtol=1e-9 if is_x64() else 1e-3)
    assert_close(slope, reduced_slope, rtol=1e-7 if is_x64() else 1e-2)


def test_zero_observations_and_repeated_points():
    x, y = observations()
    x = x.at[7].set(x[8])
    p = process(1e-3)

    @jax.jit
    def run(y):
        e = likelihood(p, x, y, 100, preconditioner=60, throw=False)
        return e.value, e.standard_error, e.result

    for factor in (1, 0, 1e3):
        value, error, result = run(factor * y)
        assert result == tx.RESULTS.successful
        exact = p.exact_likelihood(x, factor * y)
        assert abs(value - exact) < 4 * error + (1e-9 if is_x64() else 1e-3) * abs(
            exact
        )


@pytest.mark.x64
def test_the_column_control_is_unbiased():
    # We use 40 points, 20 columns and 2 probes, and converge, so that only probes cause
    # errors.
    x, _ = observations(40)
    p = process(1e-3)
    pivots = tx.choose_pivots(jr.key(5), p.kernel(x), 20, shift=p.noise)
    A = p.dense(x)

    def value(noise, key):
        K = lx.MatrixLinearOperator(A - p.noise * jnp.eye(40), PSD)
        two = tx.KrylovAwareEstimator(num_probes=2)
        return tx.logdet(key, K, 30, two, shift=noise, preconditioner=pivots).value

    value_and_slope = ft.partial(jax.value_and_grad(value), p.noise)
    run = jax.jit(lambda keys: jax.lax.map(value_and_slope, keys))
    results = run(jr.split(jr.key(1), 4000))
    truths = jnp.linalg.slogdet(A)[1], jnp.trace(jnp.linalg.inv(A))
    # We reject biases as large as earlier ones. By chance, these keys' slopes are 0.05
    # too small.
    for samples, truth, bias in zip(results, truths, (0.1, -0.1), strict=True):
        assert z_score(samples, truth) < 5
        assert z_score(samples + bias * jnp.std(samples), truth) > 5


@pytest.mark.x64
def test_columns_control_the_derivative():
    # Columns leave residuals above the noise. Without the control, the errors are three
    # times as large.
    x = as_array(points(300, 8))
    p = Process(jnp.ones(8), jnp.ones(()), as_array(0.01))

    def with_length(length):
        return eqx.tree_at(lambda p: p.length, p, jnp.full(8, length))

    def value(length, key):
        K = with_length(length).dense(x) - 0.01 * jnp.eye(300)
        options = {"shift": 0.01, "preconditioner": 100}
        return tx.logdet(key, lx.MatrixLinearOperator(K, PSD), 120, **options).value

    def exact(length):
        return with_length(length).exact_terms(x, jnp.zeros(300))[0]

    slope = ft.partial(jax.grad(value), 1.0)
    slopes = jax.jit(lambda keys: jax.lax.map(slope, keys))(jr.split(jr.key(0), 16))
    truth = jax.grad(exact)(1.0)
    assert jnp.sqrt(jnp.mean((slopes - truth) ** 2)) < 0.006 * jnp.abs(truth)


@pytest.mark.x64
def test_the_column_control_vanishes_after_convergence():
    # Points on a line have a decaying spectrum, which 60 products find.
    rng = np.random.default_rng(0)
    K = 0.8 * gaussian(np.sort(rng.uniform(0, 2, (200, 1)), axis=0), 0.25)
    operator = as_operator(K, psd=True)

    @jax.jit
    def values(noise, keys):
        def value(key):
            return tx.logdet(key, operator, 60, shift=noise, preconditioner=60).value

        return jax.lax.map(value, keys)

    varied = np.exp(rng.uniform(np.log(1e-3), 0, 200)) ** 2
    for noise in (varied, np.full(200, 1e-4)):
        truth = np.linalg.slogdet(K + np.diag(noise))[1]
        assert_close(values(noise, jr.split(jr.key(2), 4)), truth, 0, 1e-5)


@jax.jit
def _at_extremes(logs):
    x, y = observations(n=24)

    def value(logs):
        length, scale, noise = jnp.exp(logs)
        p = Process(jnp.full(2, length), scale, noise)
        estimate = tx.gaussian_log_likelihood(
            jr.key(0), p.kernel(x), y, 16, shift=noise, preconditioner=6, throw=False
        )
        return estimate.value, estimate.result

    return jax.value_and_grad(value, has_aux=True)(logs)


@pytest.mark.parametrize("far", [-90, -60, 60, 90, 300])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_extreme_parameters_do_not_blame_the_kernel(which, far):
    far = far if not is_x64() or abs(far) < 90 else 8 * far
    logs = jnp.zeros(3, float_dtype()).at[which].set(far)
    (value, result), gradient = _at_extremes(logs)
    R = tx.RESULTS
    blameless = R.successful, R.nonfinite, R.noise_not_positive, R.outside_domain
    assert any(bool(result == x) for x in blameless)
    assert jnp.isnan(value) == (result != R.successful)
    if jnp.isnan(value):
        assert jnp.all(jnp.isnan(gradient) | (gradient == 0))


@pytest.mark.parametrize("shift", [np.zeros(()), -1.0, np.nan])
def test_nonpositive_noise_is_reported(shift):
    x, y = observations(n=12)
    K, options = process().kernel(x), {"shift": shift, "throw": False}
    for estimate in (
        tx.gaussian_log_likelihood(jr.key(0), K, y, 6, **options),
        tx.inv_quad_logdet(jr.key(0), K, y, 6, **options).inv_quad,
        tx.logdet(jr.key(0), K, 6, preconditioner=3, **options),
    ):
        assert estimate.result == tx.RESULTS.noise_not_positive
        assert jnp.isnan(estimate.value)
    assert jnp.all(tx.choose_pivots(jr.key(0), K, 3, **options) < 12)
    with pytest.raises(ValueError, match="shift must be positive"):
        tx.gaussian_log_likelihood(jr.key(0), K, y, 6, shift=shift)
    with pytest.raises(ValueError, match="shift must be positive"):
        tx.logdet(jr.key(0), K, 6, shift=0.0, preconditioner=3)


@pytest.mark.parametrize("door", [tx.gaussian_log_likelihood, tx.inv_quad_logdet])
def test_complex_observations_of_a_real_kernel_are_refused(door):
    x, y = observations(n=12)
    with pytest.raises(TypeError, match=r"y must be real.*got an array.*two columns"):
        door(jr.key(0), process().kernel(x), jax.lax.complex(y, y), 12, shift=NOISE)


def test_real_observations_of_a_complex_kernel():
    x, y = observations(n=12)
    K = np.asarray(process(0.0).dense(x))
    K = K * np.exp(1j * np.subtract.outer(x[:, 0], x[:, 0]))
    operator = as_operator(K, psd=True)
    actual = tx.inv_quad_logdet(jr.key(0), operator, y, 12, shift=NOISE).inv_quad.value
    truth = np.vdot(y, np.linalg.solve(K + NOISE * np.eye(12), y)).real
    assert_close(actual, truth, rtol=1e-9 if is_x64() else 1e-3)


@pytest.mark.parametrize("k", [None, 20])
def test_complex_observations_have_a_circular_density(k):
    # Their density in C^n equals the density of 2n real and imaginary parts.
    n, rng = 9, np.random.default_rng(0)
    B = rng.normal(size=(n, n)) + 1j * rng.normal(size=(n, n))
    y = rng.normal(size=(n, 2)) + 1j * rng.normal(size=(n, 2))
    K = B @ B.conj().T / n
    A = K + 0.3 * np.eye(n)
    covariance = np.block([[A.real, -A.imag], [A.imag, A.real]]) / 2
    parts = np.concatenate([y.real, y.imag])
    truth = scipy.stats.multivariate_normal(cov=covariance).logpdf(parts.T).sum()
    operator, y = as_operator(K, psd=True), as_array(y)
    estimate = tx.gaussian_log_likelihood(jr.key(0), operator, y, k, shift=0.3)
    assert_close(estimate.value, truth, rtol=1e-9 if is_x64() else 1e-4)
    for end in estimate.stats["bracket"]:
        assert_close(end, truth, rtol=1e-9 if is_x64() else 1e-4)


@pytest.mark.x64
def test_error_bars_include_eigenvalues_repeated_by_rounding():
    # The kernel contains white noise. With these columns it has 100 equal eigenvalues,
    # far from the others, that the space finds again and again.
    K = gaussian(points(400, seed=3), 0.05**0.5) + 0.1 * np.eye(400)
    truth = np.linalg.slogdet(K + 1e-6 * np.eye(400))[1]
    operator = as_operator(K, psd=True)

    def run(key):
        options = {"shift": 1e-6, "preconditioner": 80, "throw": False}
        e = tx.logdet(key, operator, 128, **options)
        return e.value, e.standard_error

    keys = jr.split(jr.key(0), 3)
    value, error = jax.jit(lambda keys: jax.lax.map(run, keys))(keys)
    assert jnp.all(jnp.abs(value - truth) < 4 * error)


@pytest.mark.x64
@pytest.mark.parametrize(
    ("n", "right"), [(5, "first"), (30, "first"), (30, "smooth"), (30, "white")]
)
def test_error_bars_of_quadratic_forms_include_rounding(n, right):
    # We draw points sixty times, in 32 bits, and request exact answers: only rounding
    # remains.
    rng, single = np.random.default_rng(n), np.float32
    x = np.sort(rng.random((60, n)), axis=1).astype(single)
    K = np.exp(-((x[:, :, None] - x[:, None, :]) ** 2) / 2).astype(single)
    y = {
        "first": np.broadcast_to(np.eye(n)[0], x.shape),
        "smooth": np.sin(5 * x) + 0.1 * rng.normal(size=x.shape),
        "white": rng.normal(size=x.shape),
    }[right].astype(single)
    noise = single(0.01)

    def run_once(arguments):
        K, y = arguments
        operator = lx.MatrixLinearOperator(K, PSD)
        terms = tx.inv_quad_logdet(jr.key(0), operator, y, n, shift=noise, throw=False)
        return terms.inv_quad.confidence_interval()

    run = jax.jit(lambda *x: jax.lax.map(run_once, x))
    low, high = map(np.asarray, run(jnp.asarray(K), jnp.asarray(y)))
    A, y = K.astype(np.float64) + np.float64(noise) * np.eye(n), y.astype(np.float64)
    truth = np.sum(y * np.linalg.solve(A, y[..., None])[..., 0], axis=1)
    assert np.mean((low <= truth) & (truth <= high)) >= 0.93
    assert np.median((high - low) / truth) < 0.05


@pytest.mark.x64
def test_bars_of_a_loop_are_widened():
    # A loop tends to stop when its bar is short by chance.
    x, y = observations()
    p, estimator = process(), tx.KrylovAwareEstimator(3)

    @jax.jit
    def run(rtol):
        stopped = likelihood(p, x, y, 80, estimator=estimator, rtol=rtol, throw=False)
        logdet = tx.logdet(
            jr.key(3), p.kernel(x), 60, estimator, shift=p.noise, rtol=rtol, throw=False
        )
        return stopped, logdet

    stopped, logdet = run(0.3)
    used = int(stopped.stats["num_matvecs"]), int(logdet.stats["num_matvecs"])
    fixed = likelihood(p, x, y, used[0], estimator=estimator)
    assert_close(stopped.value, fixed.value, 1e-9)
    assert_close(stopped.standard_error / fixed.standard_error, 5 / 3, 1e-6)
    fixed = tx.logdet(jr.key(3), p.kernel(x), used[1], estimator, shift=p.noise)
    assert_close(logdet.standard_error / fixed.standard_error, 5 / 3, 1e-6)


@pytest.mark.parametrize(("shift", "k"), [(0, 60), (0, 120), (1e-2, 60), (1e-2, 120)])
def test_slopes_of_forms_have_bars_before_convergence(shift, k):
    # An autoregression's precision matrix has the condition 4e4.
    n, eye = 200, np.eye(200)
    Q = np.diag(np.r_[1, np.full(n - 2, 1 + 0.99**2), 1])
    Q = Q - 0.99 * (np.eye(n, k=1) + np.eye(n, k=-1))
    y = np.linalg.solve(
        np.linalg.cholesky(Q).T, np.random.default_rng(0).normal(size=n)
    )
    u = np.linalg.solve(Q + shift * eye, y)
    matrix, y = as_array(Q), as_array(y)

    def inv_quad(scale):
        K = tx.as_operator(lambda v: scale * (matrix @ v), y)
        terms = tx.inv_quad_logdet(jr.key(1), K, y, k, shift=shift, throw=False)
        return terms.inv_quad

    one = jnp.ones((), float_dtype())
    _, slope = jax.jit(lambda x: tx.jvp(inv_quad, (x,), (x,)))(one)
    low, high = slope.confidence_interval()
    assert low <= -u @ Q @ u <= high


#
# Eliminated rows
#

MANY, ELIMINATED = 250, 200  # above 12 sqrt(n)
BUDGET = 48  # with 24 products, half the bracket exceeds the mean's standard error


@ft.cache
def _eliminating():
    """Terms, slopes and intervals over keys, with eliminated rows."""
    x, y = observations(MANY, (2,))
    p = process(1e-2)
    pivots = tx.choose_pivots(jr.key(9), p.kernel(x), ELIMINATED, shift=p.noise)
    # We may repeat pivots, and leave some out.
    pivots = pivots.at[:3].set(jnp.asarray([-1, pivots[5], -1], pivots.dtype))

    def run(key):
        def value(p, x, y):
            estimate = likelihood(p, x, y, BUDGET, key, preconditioner=pivots)
            return estimate.value, estimate

        differentiated = jax.value_and_grad(value, (0, 1, 2), has_aux=True)
        (_, estimate), slopes = differentiated(p, x, y)
        terms = tx.inv_quad_logdet(
            key, p.kernel(x), y, BUDGET, shift=p.noise, preconditioner=pivots
        )
        return estimate, estimate.confidence_interval(), slopes, terms

    keys = jr.split(jr.key(0), 100)
    return p, x, y, jax.jit(lambda keys: jax.lax.map(run, keys))(keys)


def test_eliminated_rows_give_unbiased_values_and_slopes():
    p, x, y, (estimate, (low, high), slopes, _) = _eliminating()
    truth, exact = jax.value_and_grad(Process.exact_likelihood, (0, 1, 2))(p, x, y)
    assert np.mean((low <= truth) & (truth <= high)) >= 0.93
    rounding = 1e-6 if is_x64() else 1e-3
    assert z_score(estimate.value, truth, rounding) < 4.5
    assert z_score(estimate.value * 1.02, truth, rounding) > 5
    for a, b in zip(*map(jax.tree.leaves, (slopes[0], exact[0])), strict=True):
        assert z_score(a, b, 1e-4) < 4.5
    assert_close(
        np.mean(slopes[1], axis=0), exact[1], 0.05, 0.05 * np.abs(exact[1]).max()
    )
    assert_close(slopes[2][0], exact[2], 0.01, 0.01 * np.abs(exact[2]).max())
    assert np.all(estimate.stats["num_columns"] == ELIMINATED)
    assert np.all(estimate.stats["num_matvecs"] <= BUDGET)


def test_eliminated_rows_keep_terms_and_solution():
    p, x, y, (_, _, _, terms) = _eliminating()
    logdet, inv_quad, solution = p.exact_terms(x, y)
    tolerance = 1e-3 if is_x64() else 5e-3
    assert_close(terms.inv_quad.value[0], inv_quad, tolerance)
    assert_close(terms.solution[0], solution, 0, 0.02 * np.abs(solution).max())
    low, high = terms.inv_quad.stats["bracket"]
    slack = 1e-9 if is_x64() else 1e-3
    assert np.all(low <= inv_quad[None] * (1 + slack))
    assert np.all(high >= inv_quad[None] * (1 - slack))
    assert z_score(terms.logdet.value, logdet, 1e-6 if is_x64() else 1e-3) < 4.5


def test_eliminated_rows_of_complex_and_indefinite_matrices():
    n = 160
    rng = np.random.default_rng(0)
    U = rng.normal(size=(n, n)) + 1j * rng.normal(size=(n, n))
    K = (U * 0.9 ** np.arange(n)) @ U.conj().T
    operator, y = as_operator(K), as_operator(U).matrix[:, 0]
    options = {
        "shift": 0.1,
        "preconditioner": 155,
        "estimator": tx.KrylovAwareEstimator(),
    }
    terms = tx.inv_quad_logdet(jr.key(0), operator, y, 30, **options)
    A = K + 0.1 * np.eye(n)
    tolerance = 1e-8 if is_x64() else 1e-3
    assert_close(terms.logdet.value, np.linalg.slogdet(A)[1], tolerance)
    assert_close(terms.solution, np.linalg.solve(A, U[:, 0]), 10 * tolerance, tolerance)
    indefinite = as_operator(K - 5 * np.eye(n))
    pivots = jnp.arange(155)
    options = {**options, "preconditioner": pivots, "throw": False}
    failed = tx.logdet(jr.key(0), indefinite, 30, **options)
    assert failed.result == tx.RESULTS.not_semidefinite
    assert jnp.isnan(failed.value)


def test_columns_are_chosen_by_their_costs():
    x = as_array(points(400))

    def kernel(length):
        return tx.KernelLinearOperator(
            lambda a, b: jnp.exp(-jnp.sum((a - b) ** 2) / (2 * length**2)), x
        )

    for length, kept in ((0.5, 64), (0.05, 300)):
        pivots = tx.choose_pivots(jr.key(0), kernel(length), shift=0.1)
        assert len(np.unique(pivots[pivots >= 0])) == len(pivots) == kept
    run = jax.jit(lambda: tx.choose_pivots(jr.key(0), kernel(0.5), shift=0.1))
    assert len(run()) == 300
