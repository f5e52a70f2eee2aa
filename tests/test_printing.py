"""Printed estimates, and the warning for a missed tolerance."""

import inspect
import re
import warnings

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest

import traceax as tx

pytestmark = pytest.mark.x64

KEY = jr.key(0)
RNG = np.random.default_rng(0)
U = np.linalg.qr(RNG.normal(size=(60, 60)))[0]
A = jnp.asarray((U * (1 + RNG.uniform(size=60))) @ U.T)
FLAT = lx.MatrixLinearOperator(A)
LINE = r"(-?[\d.]+) \+- ([\d.]+) \(95 %: (-?[\d.]+) to (-?[\d.]+)\), 20 products, (\w+)"


def test_a_line():
    estimate = tx.trace(KEY, FLAT, 20, tx.XTraceEstimator())
    fields = re.fullmatch(LINE, str(estimate))
    assert fields
    value, error, low, high = map(float, fields.groups()[:4])
    assert fields[5] == "XTrace"
    assert abs(value - estimate.value) < 0.1 * error
    assert abs(error - estimate.standard_error) < 0.1 * error
    for x, y in zip(estimate.confidence_interval(), (low, high), strict=True):
        assert abs(x - y) < 0.1 * error


@pytest.mark.parametrize(
    ("scale", "start"),
    [
        (1e12, r"8\.\d+e\+13 \+- "),
        (1e-9, r"8\.\d+e-08 \+- "),
        (-1.0, r"-8\d\.\d\d \+- "),
    ],
)
def test_sizes(scale, start):
    estimate = tx.trace(KEY, FLAT * scale, 20, tx.XTraceEstimator())
    assert re.match(start, str(estimate)), str(estimate)


def test_exact_unknown_and_failed_estimates():
    whole = tx.trace(KEY, FLAT, 60)  # exact up to rounding
    assert str(whole).startswith(f"{float(jnp.trace(A)):.6g}"[:5])
    assert f" +- {float(whole.standard_error):.2g} (95 %" in str(whole)
    semidefinite = lx.TaggedLinearOperator(FLAT, lx.positive_semidefinite_tag)
    for exact in (
        whole,
        tx.trace(KEY, FLAT, 60, tx.XTraceEstimator()),
        tx.logdet(KEY, semidefinite, 60),
    ):
        assert str(exact).endswith("), 60 products, exact")
    identity = lx.IdentityLinearOperator(jax.ShapeDtypeStruct((5,), jnp.float32))
    assert str(tx.trace(KEY, identity, 1)) == "5 (exact), 0 products"
    one = str(tx.trace(KEY, FLAT, 1))
    assert "+- unknown, 1 product, Hutchinson" in one
    broken = lx.MatrixLinearOperator(A.at[0].set(jnp.nan))
    failed = str(tx.trace(KEY, broken, 20, throw=False))
    assert tx.RESULTS[tx.RESULTS.nonfinite] in failed


def test_leaves_batches_arrays_and_complex_numbers():
    def fn(x):
        return {"a": x, "b": x**2}

    a, b, total = str(tx.trace_function(KEY, fn, FLAT, 20)).splitlines()
    assert a.startswith("['a']: ")
    assert b.startswith("['b']: ")
    assert total == "in all, 18 products, KrylovAware"
    batch = str(jax.vmap(lambda key: tx.trace(key, FLAT, 20))(jr.split(KEY, 10)))
    first, *rest = batch.splitlines()
    assert first == "10 estimates, shape (10,):"
    assert len(rest) == 9
    assert rest[-1] == "  ..."
    diagonal = tx.diagonal(KEY, FLAT, 20)
    fields = re.fullmatch(
        r"array of shape .60,. \+- [\d.]+ \(root mean square\): "
        r"\[([\d. -]+) \.\.\.\], 20 products, XTrace",
        str(diagonal),
    )
    assert fields
    printed = [float(x) for x in fields[1].split()]
    np.testing.assert_allclose(printed, diagonal.value[:8], rtol=1e-3)
    complex_estimate = str(
        tx.trace(KEY, lx.MatrixLinearOperator(jax.lax.complex(A, A)), 20)
    )
    assert re.match(
        r"[89][\d.]+\+[89][\d.]+j \+- [\d.]+, 20 products", complex_estimate
    )


def test_a_small_array_is_printed_whole():
    def multiples(x):
        return jnp.asarray([[1.0], [-2.0]]) * x

    diagonal = lx.DiagonalLinearOperator(jnp.asarray([0.25, 1000.1]))
    estimate = tx.trace_function(KEY, multiples, diagonal, 2)
    line = str(estimate)
    assert line.startswith("array of shape (2, 1) ")
    assert ": [1000 -2001], 0 products" in line


def test_64_bits_after_their_block_has_ended():
    def estimates():
        keys = jr.split(KEY, 2)
        return (
            tx.trace(KEY, FLAT, 20),
            tx.trace(KEY, FLAT, 60),
            tx.diagonal(KEY, FLAT, 20),
            jax.vmap(lambda key: tx.trace(key, FLAT, 20))(keys),
        )

    def read(estimate):
        return str(estimate), estimate.standard_error, estimate.confidence_interval()

    for estimate in estimates():
        words, error, interval = read(estimate)
        with jax.enable_x64(False):
            after = read(estimate)
        assert after[0] == words
        np.testing.assert_array_equal(after[1], error)
        np.testing.assert_array_equal(after[2], interval)
    # An estimate from 32 bits keeps them.
    with jax.enable_x64(False):
        matrix = lx.MatrixLinearOperator(jnp.asarray(np.asarray(A)))
        estimate = tx.trace(KEY, matrix, 20)
        words, error, interval = read(estimate)
    after = read(estimate)
    assert (after[0], after[1].dtype, after[2][0].dtype) == (
        words,
        "float32",
        "float32",
    )


def test_numbers_from_estimates():
    def raises(estimate, use, received):
        rule = r"value must be one number, and a real one for float\(\)"
        match = rf"^traceax.Estimate: {rule}, got .*{received}.*; .* estimate\.value\.$"
        with pytest.raises(TypeError, match=match):
            use(estimate)

    estimate = tx.trace(KEY, FLAT, 20)
    assert float(estimate) == estimate.value
    assert f"{estimate:.3f}" == f"{estimate.value.item():.3f}"
    diagonal = tx.diagonal(KEY, FLAT, 20)
    batch = jax.vmap(lambda key: tx.trace(key, FLAT, 20))(jr.split(KEY, 2))
    tree = tx.trace_function(KEY, lambda x: {"a": x}, FLAT, 20)
    for many, received in (
        (diagonal, r"array of shape \(60,\)"),
        (batch, r"array of shape \(2,\)"),
        (tree, "of type dict"),
    ):
        raises(many, float, received)
        raises(many, "{:.3f}".format, received)
    rotated = tx.trace(KEY, lx.MatrixLinearOperator(jax.lax.complex(A, A)), 60)
    raises(rotated, float, r"shape \(\) and dtype complex128")
    assert f"{rotated:.3f}" == f"{rotated.value.item():.3f}"


def test_inside_of_a_program():
    printed = []

    @jax.jit
    def run(matrix):
        estimate = tx.trace(KEY, lx.MatrixLinearOperator(matrix), 20)
        printed.append(str(estimate))
        return estimate.value

    run(A)
    assert printed[0].startswith("Estimate(")


def test_a_missed_tolerance_keeps_the_value_and_forecasts():
    estimator = tx.HutchinsonEstimator()
    with pytest.warns(UserWarning, match="it would take about [0-9]+ products"):
        estimate = tx.trace(KEY, FLAT, 40, estimator, rtol=1e-3)
    assert estimate.result == tx.RESULTS.tolerance_not_met
    truth = float(jnp.trace(A))
    assert abs(estimate.value - truth) < 5 * estimate.standard_error
    used, needed = (int(estimate.stats[x]) for x in ("num_matvecs", "products_needed"))
    assert used >= 38
    # Hutchinson's errors fall with the root of the number of products.
    half = (estimate.confidence_interval()[1] - estimate.value) / (1e-3 * truth)
    assert needed > used
    assert needed == len(A) < used * float(half) ** 2
    assert str(estimate).endswith(f"about {needed} products")


def test_forecasts_are_rounded_up():
    estimate = tx.trace(KEY, FLAT, 20, tx.XTraceEstimator())
    unmet = tx.RESULTS.tolerance_not_met
    for needed, printed in ((144.0, 144), (143.2, 144), (1001.0, 1001)):
        stats = {**estimate.stats, "products_needed": jnp.asarray(needed)}
        parts = estimate.value, estimate.standard_error, unmet, stats, None
        assert str(tx.Estimate(*parts)).endswith(f"would take about {printed} products")


def test_a_loop_that_ended_with_the_exact_answer():
    estimator = tx.HutchinsonEstimator()
    met, exact = (tx.trace(KEY, FLAT, 120, estimator, rtol=x) for x in (0.3, 1e-9))
    assert met.stats["num_matvecs"] < 60 < exact.stats["num_matvecs"]
    assert str(met).endswith(" products, Hutchinson")
    assert str(exact).endswith(" products, exact")
    assert abs(exact.value - jnp.trace(A)) <= 4 * exact.standard_error


@pytest.mark.parametrize("throw", [True, False])
def test_warnings_point_at_the_users_line(throw):
    matrix = lx.MatrixLinearOperator(A, lx.positive_semidefinite_tag)
    y, options = jnp.ones(60), {"rtol": 1e-12, "throw": throw}
    state = tx.HutchinsonEstimator().init(KEY, FLAT)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lines = [inspect.currentframe().f_lineno + 1]  # pyright: ignore
        tx.HutchinsonEstimator().estimate(state, 9, **options)
        tx.inv_quad_logdet(KEY, matrix, y, 9, shift=0.1, **options)
        tx.gaussian_log_likelihood(KEY, matrix, y, 9, shift=0.1, **options)
        tx.schatten_norm(KEY, matrix, 9, p=3.0, rtol=1e-12, throw=throw)
    lines = [lines[0] + i for i in range(4)] if throw else []
    assert [(x.filename, x.lineno) for x in caught] == [(__file__, x) for x in lines]


def test_a_missed_tolerance_of_few_products():
    with pytest.warns(
        UserWarning, match="how many products it would take is not known"
    ):
        estimate = tx.trace(KEY, FLAT, 3, rtol=1e-3)
    assert estimate.stats["products_needed"] == jnp.inf


def test_failures_in_a_batch():
    scales = jnp.asarray([1.0, jnp.nan])
    batch = jax.vmap(lambda s: tx.trace(KEY, FLAT * s, 20, throw=False))(scales)
    assert tx.RESULTS[tx.RESULTS.nonfinite] in str(batch)


def test_estimates_without_a_budget():
    n = 300
    d = jnp.arange(1, n + 1.0) ** -2
    V = jnp.asarray(np.linalg.qr(RNG.normal(size=(n, n)))[0])
    operator = lx.MatrixLinearOperator(
        V @ jnp.diag(d) @ V.T, lx.positive_semidefinite_tag
    )
    krylov = tx.KrylovAwareEstimator()
    for estimate in (
        tx.trace(KEY, operator, rtol=1e-2),
        tx.diagonal(KEY, operator, rtol=0.2),
        tx.logdet(KEY, operator, None, krylov, shift=0.1, rtol=3e-2),
    ):
        assert estimate.result == tx.RESULTS.successful
        assert 8 <= int(estimate.stats["num_matvecs"]) < 200
    rule = "k must be a Python int unless rtol or atol is given"
    hint = (
        "pass the number of allowed matrix-vector products, or a tolerance such as "
        "rtol=0.01"
    )
    estimator, none = tx.HutchinsonEstimator(), ", got None of type NoneType; "
    for call in (
        lambda: tx.trace(KEY, operator),
        lambda: tx.diagonal(KEY, operator),
        lambda: estimator.estimate(estimator.init(KEY, operator)),
    ):
        with pytest.raises(TypeError, match=f": {rule}{none}{hint}\\.$"):
            call()
    for call in (
        lambda: tx.trace_function(KEY, jnp.exp, operator),
        lambda: krylov.estimate(krylov.init(KEY, operator, jnp.exp)),
    ):
        match = f": {rule}, or KrylovAware .*has lower={none}{hint}, or add the tag"
        with pytest.raises(TypeError, match=match):
            call()
