"""Answers are right, or fail: dtypes, rounding and odd inputs."""

import copy
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import assert_close, z_score
from problems import (
    PSD,
    Problem,
    as_operator,
    complex_dtype,
    float_dtype,
    gaussian,
    is_x64,
    matrix,
    points,
)

import traceax as tx

N = 16


#
# Products decide the dtype
#


def _complex_multiples():
    """Operators with real structure, and their complex matrices."""
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=(N, N)), float_dtype()) for _ in range(2))
    d = jnp.asarray(rng.uniform(0.5, 1.5, N), float_dtype())
    A, D = lx.MatrixLinearOperator(a), lx.DiagonalLinearOperator(d)
    function = lx.FunctionLinearOperator(lambda v: b @ v, A.in_structure())
    identity = lx.IdentityLinearOperator(A.in_structure())
    a, b, d = np.asarray(a), np.asarray(b), np.diag(d)
    mean = tx.MeanLinearOperator(lambda c: A * (1j * c), jnp.ones(3, float_dtype()))
    return {
        "matrix": (A * 2j, 2j * a),
        "quotient": (A / 2j, a / 2j),
        "function": (function * (1 + 1j), b * (1 + 1j)),
        "shifted": (A + 0.5j * identity, a + 0.5j * np.eye(N)),
        "sum": (A + function * -1j, a - 1j * b),
        "diagonal": (-(D * 1j), -1j * d),
        "product": ((D @ A) * 1j, 1j * (d @ a)),
        "array scalar": (A * jnp.asarray(1j, complex_dtype()), 1j * a),
        "mean": (mean, 1j * a),
    }


@pytest.fixture
def _standard_promotion():
    # Strict promotion refuses to multiply a real array by a complex number.
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_complex_vectors_keep_their_imaginary_part():
    x = jnp.linspace(0, 1, N, dtype=float_dtype())
    v = jnp.asarray(np.random.default_rng(0).normal(size=(2, N)), float_dtype())
    kernel = tx.KernelLinearOperator(lambda a, b: jnp.exp(-((a - b) ** 2)), x)
    square = tx.MatrixFunctionLinearOperator(kernel, jnp.square, N)
    for operator in (kernel, square):
        parts = [operator.mv(x) for x in v]
        product = operator.mv(jax.lax.complex(*v))
        assert_close(product, jax.lax.complex(*parts), rtol=1e-5)


#
# Tags on expressions
#


def _tagged_expressions():
    """Diagonal expressions in function operators, and the exact diagonal of each."""
    d = jnp.asarray(np.random.default_rng(0).uniform(1, 2, 60), float_dtype())
    space = jax.eval_shape(lambda: d)
    D = lx.FunctionLinearOperator(lambda v: d * v, space)
    other = lx.FunctionLinearOperator(lambda v: v[::-1], space)
    stored = lx.MatrixLinearOperator(jnp.diag(d))
    return {
        "multiple": (2.0 * D, 2 * d),
        "quotient": (D / 2.0, d / 2),
        "negative": (-D * -1.0, d),
        "sum": (D + 3.0 * stored, 4 * d),
        "composed": (D @ D, d**2),
        "cancelling": (other @ other, jnp.ones_like(d)),
        "of tags": (lx.TaggedLinearOperator(D + D, lx.symmetric_tag) / 4.0, d / 2),
    }


@pytest.mark.parametrize("name", list(_tagged_expressions()))
def test_tags_on_expressions_are_used(name, key):
    expression, d = _tagged_expressions()[name]
    tags = lx.diagonal_tag, PSD
    operator = lx.TaggedLinearOperator(expression, tags)
    estimate = tx.diagonal(key, operator, 4)
    assert_close(estimate.value, d, rtol=1e-5)
    assert estimate.stats["num_matvecs"] <= 1
    if name != "multiple":
        return
    total = operator + lx.TaggedLinearOperator(2.0 * expression, tags)
    assert_close(tx.trace(key, total, 4).value, 3 * jnp.sum(d), rtol=1e-5)
    estimate = tx.logdet(key, 3.0 * operator, 4, shift=0.5)
    assert_close(estimate.value, jnp.sum(jnp.log(3 * d + 0.5)), rtol=1e-5)


def test_other_tags_on_expressions(key):
    n = 30
    rng = np.random.default_rng(1)
    a = jnp.asarray(rng.normal(size=(n, n)), float_dtype())
    bands = jnp.triu(jnp.tril(a, 1), -1)
    function = lx.FunctionLinearOperator(
        lambda v: bands @ v, jax.eval_shape(lambda: a[0])
    )
    tridiagonal = lx.TaggedLinearOperator(2.0 * function, lx.tridiagonal_tag)
    estimate = tx.trace(key, tridiagonal, 4)
    assert_close(estimate.value, 2 * jnp.trace(a), rtol=1e-4)
    assert estimate.stats["num_matvecs"] == 2
    lower = lx.MatrixLinearOperator(jnp.tril(a)) * 2.0 + lx.MatrixLinearOperator(a * 0)
    lower = lx.TaggedLinearOperator(lower, lx.lower_triangular_tag)
    estimate = tx.trace(key, lower, 4)
    assert_close(estimate.value, 2 * jnp.trace(a), rtol=1e-4)
    assert estimate.stats["num_matvecs"] == 0
    unit = 2.0 * lx.TaggedLinearOperator(function + function, lx.unit_diagonal_tag)
    assert tx.trace(key, unit, 4).value == 2 * n


@pytest.mark.usefixtures("_standard_promotion")
def test_a_tag_on_a_complex_expression(key):
    d = jnp.linspace(1, 2, 40, dtype=float_dtype())
    function = lx.FunctionLinearOperator(lambda v: d * v, jax.eval_shape(lambda: d))
    operator = lx.TaggedLinearOperator(function * (1 + 2j), lx.diagonal_tag)
    for x in (operator, operator * 1j):
        factor = (1 + 2j) * (1 if x is operator else 1j)
        assert_close(tx.diagonal(key, x, 4).value, factor * d, rtol=1e-5)


@pytest.mark.x64
@pytest.mark.usefixtures("_standard_promotion")
def test_complex_multiples_of_real_operators(key):
    multiples = _complex_multiples()

    @eqx.filter_jit
    def estimates(operator):
        signs = tx.trace(key, operator, 9, tx.HutchinsonEstimator())
        exact = tx.trace(key, operator, N).value, tx.diagonal(key, operator, N).value
        return exact, (signs.value, signs.standard_error)

    for operator, dense in multiples.values():
        (trace, diagonal), (value, error) = estimates(operator)
        assert jnp.iscomplexobj(trace)
        assert_close(trace, np.trace(dense), rtol=1e-5)
        assert_close(diagonal, np.diag(dense), 1e-5, 1e-6)
        assert abs(value - np.trace(dense)) <= 6 * error + 1e-6
    operator, dense = multiples["shifted"]
    estimate = tx.trace(key, operator, 9)
    assert abs(estimate.value - np.trace(dense)) <= 6 * estimate.standard_error
    norm = tx.frobenius_norm_squared(key, operator, 10)
    assert jnp.isrealobj(norm.value)
    deviation = abs(norm.value - np.sum(np.abs(dense) ** 2))
    assert deviation <= 6 * norm.standard_error + 1e-4 * norm.value
    for k in (N, 12):
        logdet = tx.logdet(key, operator, k, throw=False)
        assert logdet.result == tx.RESULTS.not_hermitian


@pytest.mark.x64
@pytest.mark.usefixtures("_standard_promotion")
def test_complex_multiples_are_unbiased_and_differentiable():
    a = jnp.asarray(matrix("nonsymmetric", N))

    def value(key, scale):
        estimate = tx.trace(key, lx.MatrixLinearOperator(a * scale) * 1j, 9)
        return jnp.imag(estimate.value)

    value_and_slope = jax.value_and_grad(value, 1)
    run = jax.jit(lambda keys: jax.lax.map(lambda key: value_and_slope(key, 1.0), keys))
    for samples in run(jr.split(jr.key(1), 2000)):
        assert z_score(samples, np.trace(a)) < 5
        assert z_score(1.02 * samples, np.trace(a)) > 5


@pytest.mark.x64
@pytest.mark.usefixtures("_standard_promotion")
def test_a_multiple_that_is_hermitian_again(key):
    a = matrix("flat", N)
    estimate = tx.logdet(key, (as_operator(a) * 1j) * -1j, N)
    assert_close(estimate.value, np.linalg.slogdet(a)[1])


def test_operators_below_32_bits_answer_in_32(key):
    def identity(n, dtype=jnp.bfloat16):
        structure = jax.ShapeDtypeStruct((n,), dtype)
        return lx.FunctionLinearOperator(lambda v: v, structure)

    for dtype in (jnp.float16, jnp.bfloat16):
        estimate = tx.trace(key, identity(80_000, dtype), 4)
        assert estimate.value.dtype == estimate.standard_error.dtype == jnp.float32
        assert_close(estimate.value, 80_000, rtol=1e-5)
    assert tx.diagonal(key, identity(8), 4).value.dtype == jnp.float32
    assert tx.logdet(key, identity(8) * 2, 8).value.dtype == jnp.float32


@pytest.mark.parametrize(
    ("dtype", "estimator"),
    [
        (jnp.bfloat16, tx.HutchPlusPlusEstimator()),
        (jnp.float16, tx.XTraceEstimator()),
        (jnp.bfloat16, tx.XNysTraceEstimator()),
    ],
)
def test_error_bars_below_32_bits(dtype, estimator):
    a = jnp.asarray(matrix("poly", 100), dtype)
    operator = lx.MatrixLinearOperator(a, PSD)

    def run_once(key):
        estimate = tx.trace(key, operator, 50, estimator, throw=False)
        return estimate.value, estimate.standard_error, estimate.confidence_interval()

    keys = jr.split(jr.key(0), 100)
    results = jax.jit(lambda keys: jax.lax.map(run_once, keys))(keys)
    values, errors, (low, high) = jax.tree.map(np.asarray, results)
    truth = np.trace(np.asarray(a, np.float64))
    assert np.mean((low <= truth) & (truth <= high)) > 0.85
    rms = np.sqrt(np.mean((values - truth) ** 2))
    assert 0.6 < np.sqrt(np.mean(errors**2)) / rms < 1.7


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_exact_answers_below_32_bits_have_the_rounding_of_products(key, dtype):
    x = jnp.linspace(0.2, 0.9, 40).astype(dtype)
    exact = np.asarray(x, np.float64)
    terms = 4 * np.cos(2 * exact) - 4 * exact * np.sin(2 * exact)
    truth, size = np.sum(terms), np.sum(np.abs(terms))
    whole = tx.laplacian(key, lambda x: jnp.sum(jnp.sin(2 * x) * x), x, 40)[2]
    colours = tx.ColouredSampler(np.zeros(40, int), exact=True)
    field = jax.grad(lambda x: jnp.sum(jnp.sin(2 * x) * x))
    one = tx.divergence(key, field, x, colours=colours)[1]
    for estimate in (whole, one):
        error = abs(float(estimate.value) - truth)
        assert 0 < error <= float(estimate.standard_error) < 0.05 * size


#
# Exact up to rounding, and functions near the end of their domain
#


@pytest.mark.skipif(is_x64(), reason="tests 32-bit mode")
def test_exact_answers_have_the_error_bar_of_rounding(key):
    for seed in range(6):
        a = np.random.default_rng(seed).normal(size=(120, 120)).astype(np.float32)
        double = a.astype(np.float64)
        gram = as_operator(a @ a.T)
        logdet = tx.logdet(key, gram, 120, throw=False)
        truth = np.linalg.slogdet(double @ double.T)[1]
        is_refused = logdet.result == tx.RESULTS.outside_domain
        assert is_refused or abs(logdet.value - truth) < 2 * logdet.standard_error
        thin = a[:, :3]
        root = tx.trace_function(key, jnp.sqrt, as_operator(thin @ thin.T), 120)
        truth = np.linalg.norm(double[:, :3], "nuc")
        assert 0 < abs(root.value - truth) < 2 * root.standard_error < 0.1 * truth
        trace = tx.trace(key, as_operator(a), 120)
        assert abs(trace.value - np.trace(double)) <= trace.standard_error < 1e-3


@pytest.mark.parametrize("n", [9, 150])
def test_logarithms_and_inverses_of_singular_matrices_fail(key, n):
    @eqx.filter_jit
    def estimates(laplacian):
        failed = [
            tx.logdet(key, laplacian, n, throw=False),
            tx.trace_inverse(key, laplacian, n, throw=False),
            tx.trace_function(
                key, lambda x: jnp.abs(x) ** -0.5, laplacian, n, throw=False
            ),
        ]
        root = tx.trace_function(key, jnp.sqrt, laplacian, n, throw=False)
        return [x.result for x in failed], root

    rng = np.random.default_rng(n)
    for weighted in (False, True):
        w = np.triu(rng.random((n, n)) < 6 / n, 1) * (rng.random((n, n)) ** weighted)
        w = w + w.T + np.diag(np.ones(n - 1), 1) + np.diag(np.ones(n - 1), -1)
        laplacian = as_operator(np.diag(w.sum(1)) - w)
        results, root = estimates(laplacian)
        assert all(result == tx.RESULTS.outside_domain for result in results)
        # The root is finite there, and right.
        assert root.result == tx.RESULTS.successful
        values = np.linalg.eigvalsh(np.asarray(laplacian.matrix, np.float64))
        truth = np.sum(np.sqrt(np.maximum(values, 0)))
        assert abs(root.value - truth) < 2 * root.standard_error
    diagonal = lx.DiagonalLinearOperator(jnp.asarray([0.5, 1e-12, 2.0], float_dtype()))
    estimate = tx.logdet(key, diagonal, 3)
    assert 0 < estimate.standard_error < 1e-5
    assert abs(estimate.value - np.log(1e-12)) < 2 * estimate.standard_error


def test_a_domain_that_ends_elsewhere(key):
    a = Problem("flat", 20, scale=0.5, shift=0.5).operator()

    def log_above_one(x):
        return jnp.log(x - 1)

    failed = tx.trace_function(key, log_above_one, a, 20, throw=False)
    assert failed.result == tx.RESULTS.outside_domain
    bounded = tx.trace_function(key, lambda x: jnp.sqrt(jnp.abs(x - 1)), a, 20)
    truth = np.sum(np.sqrt(np.linspace(0, 1, 20)))
    assert abs(bounded.value - truth) < 2 * bounded.standard_error + 1e-7


@pytest.mark.skipif(is_x64(), reason="tests 32-bit mode")
def test_shifts_below_rounding_are_reported(key):
    kernel = as_operator(gaussian(points(150), 0.1**0.5), psd=True)
    for k in (60, 150):
        estimate = tx.logdet(key, kernel, k, shift=3e-7, throw=False)
        assert estimate.result == tx.RESULTS.outside_domain
        message = tx.RESULTS[estimate.result]
        assert "1e-6" in message
        assert "jax_enable_x64" in message
    visible = tx.logdet(key, kernel, 150, shift=1e-3)
    double = np.asarray(kernel.matrix, np.float64) + 1e-3 * np.eye(150)
    assert (
        abs(visible.value - np.linalg.slogdet(double)[1]) < 2 * visible.standard_error
    )


def test_asymmetry_is_refused_or_in_the_error_bar(key):
    truth = np.log(500.0)
    for large, result in ((500.0, tx.RESULTS.not_hermitian), (3e8, None)):
        a = np.diag([large, 1.0, 1.0])
        a[1, 2] = 1.9
        estimate = tx.logdet(key, as_operator(a), 3, throw=False)
        bad = estimate.result != tx.RESULTS.successful
        truth = np.log(large)
        assert bad or abs(estimate.value - truth) < 2 * estimate.standard_error
        assert result is None or estimate.result == result
    lengths = 0.2 + 0.1 * np.random.default_rng(1).random((150, 1))
    even = gaussian(points(150), 0.2 / 2**0.5)
    uneven = even ** (0.04 / lengths**2) + 0.1 * np.eye(150)
    even = even + 0.1 * np.eye(150)
    refused = tx.logdet(key, as_operator(uneven), 40, throw=False)
    assert refused.result == tx.RESULTS.not_hermitian
    assert tx.logdet(key, as_operator(even), 40).result == tx.RESULTS.successful


@pytest.mark.skipif(is_x64(), reason="tests the range of 32-bit numbers")
def test_scales_come_from_products(key):
    scores = jnp.asarray(np.random.default_rng(1).normal(size=(5, 7)), float_dtype())
    mask = jnp.asarray([0.0, -1e30, 0, 0, 0], float_dtype())

    def energy(v):
        return jnp.sum(jax.nn.softmax(scores @ v + mask) ** 2)

    hessian = tx.HessianLinearOperator(energy, jnp.ones(7, float_dtype()))
    dense = np.asarray(hessian.as_matrix(), np.float64)
    values = np.linalg.eigvalsh(dense)
    assert_close(tx.schatten_norm(key, hessian, 7).value, np.abs(values).sum(), 1e-4)
    exact = tx.frobenius_norm_squared(key, hessian, 7)
    assert_close(exact.value, np.sum(dense**2), 1e-5)
    norm = tx.frobenius_norm_squared(key, hessian, 6)
    assert abs(norm.value - exact.value) < 6 * norm.standard_error


@pytest.mark.skipif(is_x64(), reason="tests the range of 32-bit numbers")
def test_norms_at_the_ends_of_the_range(key):
    a = np.random.default_rng(0).normal(size=(30, 30))
    symmetric = a + a.T
    values = np.abs(np.linalg.eigvalsh(symmetric))
    for k in (20, 30):
        small = tx.frobenius_norm_squared(key, as_operator(a * 1e-20), k)
        deviation = abs(float(small.value) - np.sum(a**2) * 1e-40)
        assert deviation <= 6 * small.standard_error + 2e-3 * np.sum(a**2) * 1e-40
        for norm, scale, options in (
            (tx.frobenius_norm_squared, 1e25, {}),
            (tx.schatten_norm, 1.5e37, {"p": 0.5}),
            (tx.schatten_norm, 5e37, {"p": 2.0}),
        ):
            large = as_operator(symmetric * scale)
            estimate = norm(key, large, k, throw=False, **options)
            assert estimate.result == tx.RESULTS.nonfinite
        large = tx.schatten_norm(key, as_operator(symmetric * 1e30), k, p=3.0)
        truth = 1e30 * np.sum(values**3) ** (1 / 3)
        assert abs(large.value - truth) < 8 * large.standard_error + 1e-4 * truth
        # An overflowing bound on rounding once set all negative eigenvalues to zero.
        near = as_operator(symmetric * 5e36)
        roots = tx.trace_function(key, lambda x: jnp.sqrt(jnp.abs(x)), near, k)
        truth = np.sum(np.sqrt(values * 5e36))
        assert abs(roots.value - truth) < 8 * roots.standard_error + 1e-3 * truth


@pytest.mark.usefixtures("_standard_promotion")
def test_the_norm_of_a_map_from_real_to_complex_vectors(key):
    structure = jax.ShapeDtypeStruct((12,), float_dtype())
    transform = lx.FunctionLinearOperator(jnp.fft.rfft, structure)
    norm = tx.frobenius_norm_squared(key, transform, 6)
    assert abs(norm.value - 12 * 7) <= 6 * norm.standard_error + 1e-3
    turned = lx.FunctionLinearOperator(lambda v: 2j * v, structure)
    assert_close(tx.frobenius_norm_squared(key, turned, 12).value, 48.0)


#
# Odd inputs
#


def test_a_leaf_of_size_0(key):
    def total(scale):
        def fn(x):
            return scale * jnp.sum(x["a"] ** 2) + jnp.sum(x["b"]) + jnp.sum(x["c"] ** 4)

        x = {"a": jnp.ones(30), "b": jnp.ones((0, 3)), "c": jnp.ones(2)}
        hessian = tx.HessianLinearOperator(
            fn, jax.tree.map(lambda y: y.astype(float_dtype()), x)
        )
        return tx.leaf_traces(key, hessian, 12, probes="blocks", throw=False)

    @jax.jit
    def values_and_slopes(scale):
        def values(scale):
            by_leaf, whole = total(scale)
            return by_leaf.value, whole.value

        return values(scale), jax.jacrev(lambda scale: values(scale)[0])(scale)

    (by_leaf, whole), slopes = values_and_slopes(1.0)
    assert_close(jax.tree.leaves(by_leaf), [60, 0, 24], 1e-5)
    assert_close(whole, 84, 1e-5)
    assert_close(jax.tree.leaves(slopes), [60, 0, 0], 1e-5)


@pytest.mark.x64
def test_estimates_and_states_are_pickled_and_copied(key):
    operator = as_operator(matrix("flat", N), psd=True)
    # We add diagonal operators for their small programs. Pickling handles the same
    # types.
    diagonal = lx.DiagonalLinearOperator(jnp.linspace(1.0, 2.0, N))
    for estimate in (
        tx.logdet(key, operator, 8, shift=0.1),
        tx.trace_inverse(key, diagonal, 8),
        tx.schatten_norm(key, diagonal, 8),
        tx.trace(key, operator, 8, tx.XTraceEstimator()),
    ):
        for other in (pickle.loads(pickle.dumps(estimate)), copy.deepcopy(estimate)):
            assert other.value == estimate.value
            assert eqx.tree_equal(other.stats, estimate.stats)
            assert type(other.state) is type(estimate.state)


class _Scaled(tx.Sampler):
    rotation_invariant = False
    scale: jax.Array

    def sample(self, key, n, k, dtype):
        return self.scale * tx.RademacherSampler().sample(key, n, k, dtype)


@pytest.mark.x64
def test_a_state_of_an_estimator_with_other_arrays_is_refused(key):
    def estimator(scale):
        return tx.HutchinsonEstimator(_Scaled(jnp.asarray(scale)))

    operator = as_operator(matrix("flat", N))
    state = estimator(1.0).estimate(estimator(1.0).init(key, operator), 4).state
    assert estimator(1.0).estimate(state, 4).stats["num_matvecs"] == 8
    with pytest.raises(TypeError, match="another estimator or configuration"):
        estimator(2.0).estimate(state, 4)


@pytest.mark.x64
@pytest.mark.parametrize("dtype", [np.dtype(float).newbyteorder(), np.longdouble])
def test_arrays_that_jax_lacks_are_refused(key, dtype):
    a = matrix("flat", N).astype(dtype)
    if a.dtype == np.float64:
        pytest.skip("a long double is a double here")
    for refused in (
        lambda: tx.as_operator(a),
        lambda: tx.trace(key, lx.MatrixLinearOperator(a), 3),
        lambda: tx.trace(key, lx.DiagonalLinearOperator(a[0]), 3),
        lambda: tx.divergence(key, lambda x: x, a[0], 1),
        lambda: tx.HessianLinearOperator(lambda x, b: b @ x @ x, jnp.ones(N), a),
    ):
        with pytest.raises(TypeError, match="JAX"):
            refused()


@pytest.mark.x64
def test_functions_without_forward_mode_say_what_to_do(key):
    def field(x):
        return jnp.sin(x) * jnp.sum(x)

    hidden = jax.custom_vjp(field)
    hidden.defvjp(lambda x: jax.vjp(field, x), lambda pullback, g: pullback(g))
    x = jnp.arange(4.0)
    for call in (
        lambda: tx.divergence(key, hidden, x, 2),
        lambda: tx.trace(key, lx.JacobianLinearOperator(lambda x, _: hidden(x), x), 2),
        lambda: tx.trace(
            key, tx.GaussNewtonLinearOperator(hidden, lambda y: jnp.sum(y**2), x), 2
        ),
    ):
        with pytest.raises(TypeError, match=r"DirectAdjoint\(\).*pullback\(v\)\[0\]"):
            call()
    _, pullback = jax.vjp(hidden, x)
    transposed = tx.as_operator(lambda v: pullback(v)[0], x)
    assert_close(tx.trace(key, transposed, 4).value, jnp.trace(jax.jacfwd(field)(x)))


@pytest.mark.skipif(is_x64(), reason="tests 32-bit mode")
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")
def test_64_bits_within_a_program(key):
    a = jnp.asarray(matrix("flat", N), jnp.float32)

    def value(a):
        with jax.enable_x64(True):
            operator = lx.MatrixLinearOperator(a.astype(jnp.float64), PSD)
            return tx.logdet(key, operator, 8, throw=False).value

    with pytest.raises(RuntimeError, match=r"jax\.enable_x64 was changed inside"):
        jax.jit(value)(a)
    with jax.enable_x64(True):
        assert jax.jit(value)(a).dtype == jnp.float64


@pytest.mark.x64
def test_estimates_convert_to_float_and_refuse_arithmetic(key):
    estimate = tx.trace(key, as_operator(matrix("flat", N)), N)
    value = float(estimate.value)
    assert float(estimate) == value
    assert f"{estimate:.3f} {estimate:>9.2e}" == f"{value:.3f} {value:>9.2e}"
    assert f"{estimate}" == str(estimate)
    for wrong in (
        lambda: estimate + 1,
        lambda: 2 * estimate,
        lambda: estimate / jnp.ones(3),
        lambda: np.ones(3) - estimate,
        lambda: -estimate,
        lambda: estimate < 3,
        lambda: np.asarray(estimate),
        lambda: np.log(estimate),
        lambda: sum([estimate, estimate]),
    ):
        with pytest.raises(TypeError, match=r"with estimate\.value|'Estimate'"):
            wrong()


def test_functions_with_conjugates_have_no_trace(key):
    # `v + 2 conj(v)` is linear over the real numbers, and multiplies 1 by 3, 1j by -1.
    n = 4
    vector = jnp.zeros(n, complex_dtype())
    turned = jax.random.normal(key, (n, n), vector.dtype)
    slightly = tx.as_operator(lambda v: turned @ v + 1e-3 * v.conj(), vector)
    estimate = tx.trace(key, slightly, n, throw=False)
    assert estimate.result == tx.RESULTS.not_linear
    for k in (2, n, 3 * n):
        wrong = tx.as_operator(lambda v: v + 2 * v.conj(), vector)
        estimate = tx.trace(key, wrong, k, throw=False)
        assert estimate.result == tx.RESULTS.not_linear
        assert jnp.isnan(estimate.value)
        right = tx.as_operator(lambda v: turned @ v, vector)
        assert tx.trace(key, right, k).result == tx.RESULTS.successful
    assert jnp.allclose(tx.trace(key, right, n).value, jnp.trace(turned))
    # On real and imaginary parts it has the trace 3 n - n.
    parts = tx.as_operator(lambda v: (3 * v[0], -v[1]), (vector.real, vector.real))
    assert tx.trace(key, parts, 2 * n).value == 2 * n
