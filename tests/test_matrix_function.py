"""f(A) as an operator: its functions, steps, derivatives and roots."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import (
    assert_close,
    z_score,
)
from jax.test_util import check_grads
from problems import NSD, PSD, as_array, as_operator, hermitian, is_x64, matrix
from spectral_helpers import (
    dense_function,
    eps,
    normal,
    relaxed,  # noqa: F401
    to_double,
)

import traceax as tx

# In 32-bit mode, we test the kernels and the entry points only.
pytestmark = pytest.mark.x64

N = 12
COMPLEX = pytest.mark.parametrize("complex", [False, True])


def _function(a, fn, steps=N, tags=PSD, function_tags=()):
    a = as_array(a) if isinstance(a, np.ndarray) else a
    operator = lx.MatrixLinearOperator(a, tags)
    return tx.MatrixFunctionLinearOperator(operator, fn, steps, function_tags)


@COMPLEX
def test_spaces_that_stop_growing(complex):
    vector = normal(N, complex)
    products = jax.jit(lambda a, v: _function(a, jnp.exp).mv(v))
    for kind in ("flat", "rank 5", "small projector", "twice the identity", "zero"):
        a = hermitian(kind, N, complex)
        product = products(as_array(a), as_array(vector))
        dense = dense_function(a, np.exp)
        scale = np.linalg.norm(dense, 2) * np.linalg.norm(vector)
        assert_close(product, dense @ vector, rtol=0, atol=100 * eps() * scale)


def test_products_are_exact_for_polynomials():
    # s steps are exact up to degree s - 1, and no further.
    a, vector = matrix("signed", 40), normal(40)

    @jax.jit
    def products(vector):
        def product(steps, degree):
            fn = functools.partial(_power, degree)
            return _function(a, fn, steps, lx.symmetric_tag).mv(vector)

        return {(s, d): product(s, d) for s in (1, 3) for d in (s - 1, s)}

    for (steps, degree), actual in products(vector).items():
        expected = np.linalg.matrix_power(a, degree) @ vector
        deviation = np.linalg.norm(to_double(actual) - expected) / np.linalg.norm(
            vector
        )
        assert deviation < 1e3 * eps() if degree < steps else deviation > 0.01


def _power(degree, x):
    return x**degree if degree else jnp.ones_like(x)


def test_derivatives_with_respect_to_the_vector():
    a = hermitian("flat", N)
    operator, dense = _function(a, jnp.exp), dense_function(a, np.exp)

    @jax.jit
    def derivatives(x):
        product, pullback = jax.vjp(operator.mv, x * 0)
        hessian = jax.hessian(lambda x: x @ operator.mv(x))(x)
        return product, *pullback(jnp.ones(N)), hessian

    # We differentiate at the zero vector, too.
    product, gradient, hessian = derivatives(normal(N))
    assert not np.any(product)
    assert_close(gradient, dense.sum(axis=0), rtol=1e4 * eps())
    assert_close(hessian, 2 * dense, rtol=0, atol=1e4 * eps())


def test_first_derivatives_before_the_space_is_complete():
    # After 20 out of 60 steps, the truncation error of exp on [1, 3] is below rounding.
    a, b = (as_array(hermitian("flat", 60, True, seed)) for seed in (0, 1))
    x = as_array(normal(60, True))

    def product(t, p):
        operator = lx.MatrixLinearOperator(a + t * b, PSD)
        fn = tx.MatrixFunctionLinearOperator(operator, lambda z: jnp.exp(p * z), 20)
        y = fn.mv(x)
        return jnp.concatenate([y.real, y.imag])

    point = as_array(0.1), as_array(0.7)
    check_grads(jax.jit(product), point, order=1, modes=("fwd", "rev"), rtol=1e-6)
    with pytest.raises(NotImplementedError, match=r"f\(A\) as an operator"):
        jax.jit(jax.hessian(lambda t: jnp.sum(product(t, point[1]))))(point[0])


def test_traces():
    n, complex = 20, True
    a = as_array(hermitian("flat", n, complex))
    b = as_array(hermitian("signed", n, complex, 4))

    def value(t, key):
        inner = lx.MatrixLinearOperator(a + t * b, PSD)
        root = tx.MatrixFunctionLinearOperator(inner, jnp.sqrt, 14, PSD)
        return tx.trace(key, root, 8, tx.HutchinsonEstimator(), throw=False).value

    def exact(t):
        return jnp.sum(jnp.sqrt(jnp.linalg.eigvalsh(a + t * b)))

    run = jax.jit(jax.vmap(jax.value_and_grad(value), (None, 0)))
    t = as_array(0.2)
    truth, slope = jax.jit(jax.value_and_grad(exact))(t)
    values, gradients = run(t, jr.split(jr.key(0), 500))
    # The truncation error after 14 steps is 1e-8.
    floor = 1e-7 if is_x64() else 1e-5
    assert z_score(values, truth, floor) < 4
    assert z_score(gradients, slope, floor) < 4
    assert z_score(values * 1.02, truth) > 5


def test_known_properties():
    a, hermitian_a = hermitian("flat", N), hermitian("flat", N, True)
    assert lx.is_positive_semidefinite(_function(a, jnp.sqrt, function_tags=PSD))
    assert not lx.is_positive_semidefinite(_function(a, jnp.sqrt))
    negative = _function(a, jnp.exp, tags=NSD)
    assert not lx.is_negative_semidefinite(negative)
    assert lx.is_symmetric(negative)
    assert not lx.is_symmetric(_function(hermitian_a, jnp.exp))
    assert _function(a, jnp.sqrt, 100).num_steps == N
    for x, tags in ((a, ()), (hermitian_a, ()), (hermitian_a, lx.symmetric_tag)):
        with pytest.raises(ValueError, match=r"known to be Hermitian, got.*give it"):
            _function(x, jnp.exp, tags=tags)


@pytest.mark.wrong_types
def test_wrong_steps_and_functions():
    operator = as_operator(hermitian("flat", N), psd=True)
    make = tx.MatrixFunctionLinearOperator
    for steps in (2.0, True, None):
        with pytest.raises(TypeError, match="num_steps must be a positive int, got"):
            make(operator, jnp.exp, steps)
    with pytest.raises(ValueError, match="num_steps must be a positive int, got 0"):
        make(operator, jnp.exp, 0)
    with pytest.raises(ValueError, match="one scalar, not several"):
        make(operator, lambda x: (x, x), 3)
    with pytest.raises(TypeError, match="function of a real scalar"):
        make(operator, 3, 3)
    with pytest.raises(TypeError, match="lineax linear operator"):
        make(jnp.exp, operator, 3)


@pytest.mark.parametrize(
    ("complex", "end", "dtype"),
    [(False, 0.0, np.float32), (True, 1.0, np.float32), (False, 1.0, np.float64)],
)
def test_roots_of_singular_operators(complex, end, dtype):
    # Rounding moves Ritz values below 0, or below the declared end of the spectrum.
    b, vector = normal((50, 5), complex), normal(50, complex, seed=8)
    left, sizes, _ = np.linalg.svd(b, full_matrices=False)
    kind = np.result_type(dtype, np.complex64) if complex else dtype
    a = jnp.asarray(b @ b.conj().T + end * np.eye(50), kind)

    @jax.jit
    def root(a, power):
        operator = lx.MatrixLinearOperator(a, PSD)
        root = tx.MatrixFunctionLinearOperator(
            operator, lambda t: (t - end) ** power, 30, lower=end or None
        )
        return root.mv(jnp.asarray(vector, kind))

    for order in (2, 3, 8):
        truth = left @ (sizes ** (2 / order) * (left.conj().T @ vector))
        actual = to_double(root(a, jnp.asarray(1 / order, dtype)))
        deviation = np.linalg.norm(actual - truth) / np.linalg.norm(truth)
        assert deviation < 100 * eps(dtype)


def test_complex_functions_of_real_operators():
    a, vector = hermitian("flat", N), normal(N)
    dense = dense_function(a, lambda x: np.exp(1j * x))

    @jax.jit
    def run(a, vector):
        operator = _function(a, lambda x: jnp.exp(1j * x))
        transposed = operator.transpose().mv(vector.astype(complex))
        trace = tx.trace(jr.key(0), operator, N)
        return operator.mv(vector), transposed, operator.as_matrix(), trace.value

    actual = run(as_array(a), as_array(vector))
    expected = dense @ vector, dense.T @ vector, dense, np.trace(dense)
    for x, y in zip(actual, expected, strict=True):
        assert_close(x, y, rtol=0, atol=1e3 * eps())


@COMPLEX
def test_complex_functions(complex):
    # Here 14 out of 40 steps are enough for values, transposes, conjugates and first
    # derivatives.
    n = 40
    a, b = (hermitian("flat", n, complex, seed) for seed in (0, 1))
    x, y = normal(n, True), normal(n, True, seed=8)
    values, vectors = np.linalg.eigh(a)

    def operator(a):
        return _function(a, lambda t: jnp.exp(1j * t), 14)

    @jax.jit
    def run(a, b, x, y):
        f = operator(a)
        product, tangent = jax.jvp(lambda a: operator(a).mv(x), (a,), (b,))
        _, pullback = jax.vjp(lambda t: operator(a + t * b).mv(x), jnp.ones(()) * 0)
        transposed, conjugate = f.transpose().mv(x), lx.conj(f).mv(x)
        (pulled,) = jax.linear_transpose(f.mv, x)(x)
        return (product, transposed, pulled, conjugate, tangent), pullback(y)[0]

    results, gradient = run(*map(as_array, (a, b, x, y)))
    dense = dense_function(a, lambda t: np.exp(1j * t))
    middle, half = (values[:, None] + values) / 2, (values[:, None] - values) / 2
    differences = 1j * np.exp(1j * middle) * np.sinc(half / np.pi)
    projected = differences * (vectors.conj().T @ b @ vectors)
    slope = vectors @ (projected @ (vectors.conj().T @ x))
    expected = dense @ x, dense.T @ x, dense.T @ x, dense.conj() @ x, slope
    for actual, truth in zip(results, expected, strict=True):
        assert_close(actual, truth, rtol=0, atol=1e4 * eps())
    # JAX's pairing has no conjugate.
    assert_close(gradient, np.real(slope @ y), rtol=1e4 * eps())


@COMPLEX
def test_derivatives_where_the_space_stops_growing(complex):
    # A keeps the Krylov space from x within 6 dimensions, and dA leads out of it.
    n, steps = 40, 12
    b, x, y = hermitian("signed", n, complex, 3), normal(n, complex), normal(n)

    @jax.jit
    def derivatives(a, b, x, y):
        def product(a):
            return _function(a, jnp.log, steps).mv(x)

        _, pullback = jax.vjp(lambda t: product(a + t * b), jnp.zeros(()))
        return jax.jvp(product, (a,), (b,))[1], pullback(y.astype(x.dtype))[0]

    for kind in ("rank 5", "identity", "zero"):
        a = hermitian(kind, n, complex) + 2 * np.eye(n)
        values, vectors = np.linalg.eigh(a)
        X, Y = values[:, None], values[None, :]
        equal = np.abs(X - Y) < 1e-6
        quotient = np.log(X / Y) / np.where(equal, 1, X - Y)
        differences = np.where(equal, 2 / (X + Y), quotient)
        slope = vectors @ (
            (differences * (vectors.conj().T @ b @ vectors)) @ vectors.conj().T @ x
        )
        tangent, gradient = derivatives(*map(as_array, (a, b, x, y)))
        scale = np.linalg.norm(slope)
        assert_close(tangent, slope, rtol=0, atol=1e3 * eps() * scale)
        bound = 1e3 * eps() * scale * np.linalg.norm(y)
        assert_close(gradient, np.real(slope @ y), rtol=0, atol=bound)


#
# Zero vectors, and singular operators
#

INFINITE_AT_ZERO = {
    "log": (jnp.log, np.log, np.reciprocal),
    "inverse root": (jax.lax.rsqrt, lambda t: t**-0.5, lambda t: -0.5 * t**-1.5),
    "reciprocal": (jnp.reciprocal, np.reciprocal, lambda t: -(t**-2.0)),
}


def _pseudo_function(a, fn, slope):
    """f(A) on A's range, and the derivative of `f(A) x` for changes inside the range."""
    values, vectors = np.linalg.eigh(a)
    inside = values > 1e-6 * values[-1]
    values, vectors = values[inside], vectors[:, inside]
    X, Y = values[:, None], values[None, :]
    equal = np.abs(X - Y) < 1e-9
    quotient = (fn(X) - fn(Y)) / np.where(equal, 1, X - Y)
    differences = np.where(equal, slope((X + Y) / 2), quotient)

    def derivative(b, x):
        projected = differences * (vectors.T @ b @ vectors)
        return vectors @ (projected @ (vectors.T @ x))

    return vectors @ (fn(values)[:, None] * vectors.T), derivative, vectors


def test_zero_vectors():
    a, b = hermitian("flat", N), hermitian("signed", N, seed=3)
    x, y = normal(N), normal(N, seed=2)

    @jax.jit
    def run(a, b, x, y):
        results = {}
        for name, (fn, *_) in INFINITE_AT_ZERO.items():

            def product(a, x, fn=fn):
                return _function(a, fn).mv(x)

            zero, tangent = jax.jvp(product, (a, 0 * x), (b, x))
            (on_a, on_x) = jax.vjp(product, a, 0 * x)[1](y)
            results[name] = zero, tangent, on_a, on_x
        return results

    results = run(*map(as_array, (a, b, x, y)))
    for name, (_, fn, _) in INFINITE_AT_ZERO.items():
        dense = dense_function(a, fn)
        zero, tangent, on_a, on_x = results[name]
        assert not np.any(zero)
        assert not np.any(on_a)
        assert_close(tangent, dense @ x, rtol=1e4 * eps())
        assert_close(on_x, dense @ y, rtol=1e4 * eps())


def test_solvers_multiply_by_zero_vectors():
    a = hermitian("flat", N)
    root = _function(a, jax.lax.rsqrt, function_tags=PSD)
    inverse = tx.InverseLinearOperator(root, lx.CG(1e-6, 1e-6))
    truth = np.sum(np.sqrt(np.linalg.eigvalsh(a)))
    estimate = jax.jit(lambda: tx.trace(jr.key(0), inverse, 6, throw=False))()
    assert abs(estimate.value - truth) <= 4 * estimate.standard_error < truth


def test_vectors_in_the_range_of_a_singular_operator():
    # Rounding gives the vectors and the changes a small part in the null space.
    n, rng = 20, np.random.default_rng(0)
    b = rng.normal(size=(n, 6))
    path = 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)
    path[0, 0] = path[-1, -1] = 1
    matrices = b @ b.T, path, np.diag(np.maximum(np.arange(n) - n + 4.0, 0))

    @jax.jit
    def run(a, change, x, y):
        results = {}
        for name, (fn, *_) in INFINITE_AT_ZERO.items():

            def product(a, x, fn=fn):
                return _function(a, fn, n).mv(x)

            value, tangent = jax.jvp(product, (a, x), (change, 0 * x))
            (on_a,) = jax.vjp(lambda a, p=product: p(a, x), a)[1](y)
            results[name] = value, tangent, jnp.vdot(on_a, change)
        return results

    for a in matrices:
        results = None
        for name, (_, fn, slope) in INFINITE_AT_ZERO.items():
            dense, derivative, vectors = _pseudo_function(a, fn, slope)
            project = vectors @ vectors.T
            change = project @ matrix("signed", n) @ project
            change = (change + change.T) / 2
            x, y = project @ normal(n), project @ normal(n, seed=2)
            if results is None:
                results = run(*map(as_array, (a, change, x, y)))
            value, tangent, slope_of_form = results[name]
            expected = derivative(change, x)
            scale = np.linalg.norm(expected)
            assert_close(value, dense @ x, rtol=0, atol=1e5 * eps() * np.max(dense))
            assert_close(tangent, expected, rtol=0, atol=1e6 * eps() * scale)
            bound = 1e6 * eps() * scale * np.linalg.norm(y)
            assert_close(slope_of_form, expected @ y, rtol=0, atol=bound)


def test_operators_without_unknowns():
    for like in ((), {"a": jnp.zeros(0), "b": jnp.zeros((0, 3))}):
        empty = tx.as_operator(lambda v: v, like, tags=PSD)
        function = tx.MatrixFunctionLinearOperator(empty, jnp.log, 3)
        zeros = jax.tree.map(jnp.zeros_like, like)
        product = function.mv(zeros)
        assert jax.tree.structure(product) == jax.tree.structure(zeros)
        assert all(x.size == 0 for x in jax.tree.leaves(product))
        assert function.as_matrix().shape == (0, 0)
        assert tx.trace(jr.key(0), function, 2).value == 0
        assert tx.logdet(jr.key(0), function, 2).value == 0
        for operator in (empty, function):
            by_leaf, total = tx.leaf_traces(jr.key(0), operator, 2)
            assert jax.tree.structure(by_leaf.value) == jax.tree.structure(like)
            assert total.value == 0
            assert not any(jax.tree.leaves(by_leaf.value))


#
# Few steps
#

FAMILY = {
    "log": (jnp.log, np.log),
    "sqrt": (jnp.sqrt, np.sqrt),
    "reciprocal": (jnp.reciprocal, np.reciprocal),
    "inverse root": (jax.lax.rsqrt, lambda t: t**-0.5),
    "exp": (jnp.exp, np.exp),
}


def _spectra(n):
    rng, i = np.random.default_rng(1), np.arange(1, n + 1)
    x = np.sort(rng.uniform(size=n))
    kernel = np.exp(-((x[:, None] - x) ** 2) / 0.02)
    values = np.linalg.eigvalsh(kernel).clip(0) + 0.01
    return [10 ** rng.uniform(-3, 0, n), i / n, 1 / i, values]


@pytest.mark.parametrize("steps", [3, 12])
def test_error_bars_include_the_error_of_few_steps(steps):
    n, spectra, matrices = 40, _spectra(40), []
    for values in spectra:
        u = np.linalg.qr(normal((n, n), seed=len(matrices)))[0]
        a = (u * values) @ u.T
        matrices.append((a + a.T) / 2)
    branches = [fn for fn, _ in FAMILY.values()]

    @functools.partial(jax.jit, static_argnums=2)
    def run(matrices, cases, k):
        def trace(case):
            fn = functools.partial(_selected, branches, case[1])
            operator = _function(matrices[case[0]], fn, steps)
            estimate = tx.trace(jr.key(case[2]), operator, k, throw=False)
            return estimate.value, estimate.standard_error

        return jax.lax.map(trace, cases)

    pairs = [(i, j) for i in range(len(spectra)) for j in range(len(FAMILY))]
    values = [fn(values) for values in spectra for _, fn in FAMILY.values()]
    truths, sizes = np.sum(values, axis=1), np.sum(np.abs(values), axis=1)
    rounding = 100 * eps() * sizes
    matrices = as_array(np.stack(matrices))

    def results(k, key):
        cases = jnp.asarray([(*pair, key) for pair in pairs], jnp.int32)
        value, error = run(matrices, cases, k)
        return np.abs(np.asarray(value) - truths), np.asarray(error)

    errors, bars = results(n, 0)
    assert np.all(errors <= 4 * bars + rounding)
    assert np.mean(errors <= 2 * bars + rounding) >= 0.75
    # Bars aren't much longer than errors, and converged functions keep their bars.
    assert np.mean(bars <= 30 * errors + rounding) >= 0.9
    assert np.mean(bars <= 5 * errors + rounding) >= 0.4
    for key in range(3):
        errors, bars = results(20, key)
        assert np.all(errors <= 5 * bars + rounding)


def test_the_error_of_one_step_is_unknown():
    # The mean eigenvalue is 1, where both functions are 0.
    a = np.eye(20) + 0.3 * np.eye(20, k=1) + 0.3 * np.eye(20, k=-1)
    for fn in (jnp.log, lambda t: (t - 1) ** 2):
        for k in (8, 20):
            estimate = tx.trace(jr.key(0), _function(as_array(a), fn, 1), k)
            assert jnp.isnan(estimate.standard_error)


def _selected(branches, index, t):
    return jnp.stack([fn(t) for fn in branches])[index]


def test_every_quantity_includes_the_error_of_few_steps():
    # jnp.log is a jitted function, which an estimate must not turn into a plain one.
    n, steps, key = 24, 8, jr.key(0)
    values = np.geomspace(0.01, 1, n)
    u = np.linalg.qr(normal((n, n)))[0]
    a = (u * values) @ u.T
    a = (a + a.T) / 2
    log, other = (u * np.log(values)) @ u.T, matrix("signed", n)
    B = lx.MatrixLinearOperator(as_array(other))

    @jax.jit
    def run(a):
        def scaled(t, **tolerance):
            return tx.trace(key, _function(t * a, jnp.log, steps), n, **tolerance)

        f = _function(a, jnp.log, steps)
        mean = tx.MeanLinearOperator(
            lambda s: s * _function(a, jnp.log, steps), jnp.ones(2)
        )
        estimates = {
            "multiple": tx.trace(key, 2.0 * f + B, n),
            "product": tx.trace(key, B @ f @ B.T, n, throw=False),
            "diagonal": tx.diagonal(key, f, n),
            "norm": tx.frobenius_norm_squared(key, f, n),
            "exponential": tx.trace_function(key, jnp.exp, f, n, throw=False),
            "slope": tx.jvp(scaled, (jnp.ones(()),), (jnp.ones(()),))[1],
            "mean": tx.trace(key, mean, n),
            "tolerance": scaled(1.0, rtol=1e-4, throw=False),
            "loose": scaled(1.0, rtol=0.5, throw=False),
        }
        return {
            name: (x.value, x.standard_error, x.result) for name, x in estimates.items()
        }

    results = run(as_array(a))
    truths = {
        "multiple": np.trace(2 * log + other),
        "product": np.trace(other @ log @ other.T),
        "diagonal": np.diag(log),
        "norm": np.sum(log**2),
        "exponential": np.sum(values),
        "slope": n,
    }
    for name, truth in truths.items():
        value, error, _ = results[name]
        assert np.all(np.abs(value - truth) <= 4 * error)
        assert np.all(error <= 2 * np.max(np.abs(truth)))
    assert np.isnan(results["mean"][1])
    assert results["tolerance"][2] == tx.RESULTS.tolerance_not_met
    assert results["loose"][2] == tx.RESULTS.successful
