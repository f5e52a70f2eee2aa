"""Traces of functions: eigenvalue sums, edge cases, errors and transforms."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import assert_close, products_only
from problems import (
    NSD,
    PSD,
    Problem,
    as_array,
    as_operator,
    float_dtype,
    hermitian,
    is_x64,
    matrix,
    spectrum,
)
from spectral_helpers import (
    SPECTRAL,
    eps,
    first_failure,
    relaxed,  # noqa: F401
    to_double,
)

import traceax as tx
from traceax._spectral.function import rounding_errors, spectral_function

N, K = 30, 12
BOTH = pytest.mark.parametrize("estimator", list(SPECTRAL))
KRYLOV = tx.KrylovAwareEstimator()
# We take this one, for its small programs, if the estimator doesn't matter.
QUADRATURE = tx.LanczosQuadratureEstimator()


# We share these functions, so that JAX compiles them once per matrix shape.


def _positive(x):
    return {"log": jnp.log(x), "sqrt": jnp.sqrt(x), "cube": x**3}


def _entire(x):
    return {"affine": 3.0 * x + 0.5, "exp": jnp.exp(x), "cos": jnp.cos(x)}


def _semidefinite(x):
    return {
        "sqrt": jnp.sqrt(x),
        "entropy": jax.scipy.special.entr(x),
        "expm1": jnp.expm1(x),
    }


@eqx.filter_jit
def _estimate(key, fn, operator, k, estimator):
    estimator = SPECTRAL.get(estimator, estimator)
    e = tx.trace_function(key, fn, operator, k, estimator, throw=False)
    return e.value, e.standard_error, e.result, e.stats


@eqx.filter_jit
def _call(entry, key, operator, k, estimator, options):
    e = entry(key, operator, k, SPECTRAL[estimator], throw=False, **options)
    return e.value, e.standard_error, e.result, e.stats


def _values(fn, operator, k, estimator, num_keys=5):
    keys = jr.split(jr.key(0), num_keys)
    results = [_estimate(key, fn, operator, k, estimator)[:2] for key in keys]
    return jax.tree.map(lambda *x: np.stack(x), *results)


#
# Promotion
#


def _slope(key, a):
    def value(s):
        operator = lx.MatrixLinearOperator(a.matrix * s.astype(a.matrix.dtype))
        return tx.logdet(key, operator, K, throw=False).value

    return jax.grad(value)(as_array(1.0))


def _half(key, a):
    a = jnp.real(a.matrix).astype(jnp.bfloat16)
    return tx.logdet(key, lx.MatrixLinearOperator(a), K).value


def _complex(x):
    return jax.lax.complex(x, x)


PROMOTING = {
    "complex quadrature": lambda key, a: tx.logdet(key, a, K, QUADRATURE).value,
    "complex with a shift": lambda key, a: tx.logdet(key, a, K, shift=0.1).value,
    "gradient, complex": _slope,
    "complex function": lambda key, a: tx.trace_function(key, _complex, a, K).value,
    "function of a complex operator": lambda key, a: tx.MatrixFunctionLinearOperator(
        a, jnp.sqrt, 5
    ).mv(a.matrix[0]),
    "bfloat16": _half,
}


@pytest.mark.x64
@pytest.mark.parametrize("case", list(PROMOTING))
def test_strict_promotion(key, case):
    # Strict promotion refuses while JAX traces, so we only trace.
    operator = Problem("flat", N, True).operator(psd=True)
    with jax.numpy_dtype_promotion("strict"):
        jax.jit(PROMOTING[case]).trace(key, operator)


#
# Exact answers
#


FUNCTIONS = {
    "log": jnp.log,
    "sqrt": jnp.sqrt,
    "exp": jnp.exp,
    "cube": lambda x: x**3,
    "reciprocal": lambda x: 1 / x,
    "entropy": jax.scipy.special.entr,
    "cosine": jnp.cos,
}


@pytest.mark.parametrize(
    ("estimator", "complex", "n", "k"),
    [
        ("krylov-aware", True, 12, 13),
        ("krylov-aware", False, 1, 1),
        ("quadrature", False, 12, 12),
    ],
)
def test_enough_products_are_exact(estimator, complex, n, k):
    problem = Problem("flat", n, complex)
    value, error, result, stats = _estimate(
        jr.key(0),
        lambda x: {name: f(x) for name, f in FUNCTIONS.items()},
        problem.operator(),
        k,
        estimator,
    )
    assert first_failure(result) == tx.RESULTS.successful
    assert int(stats["num_matvecs"]) == n
    for name, f in FUNCTIONS.items():
        exact = problem.total(f)
        assert_close(value[name], exact, rtol=100 * eps(), atol=100 * eps())
        assert value[name].dtype == float_dtype()
        assert error[name] <= 1e3 * eps() * max(abs(exact), 1)
    assert_close(stats["ritz_values"], problem.eigenvalues, rtol=100 * eps())
    assert_close(stats["ritz_weights"], np.ones(n), rtol=100 * eps())


@pytest.mark.parametrize(
    ("estimator", "complex"), [("krylov-aware", True), ("quadrature", False)]
)
def test_multiples_of_the_identity_are_exact(estimator, complex):
    for factor in (1.0, 1e-3, -2.0, 0.0):
        problem = Problem("identity", N, complex, scale=factor)
        values, errors = _values(_entire, problem.operator(), K, estimator)
        exact = jax.tree.map(lambda x: N * float(x), _entire(factor))
        for name, truth in exact.items():
            atol = 100 * eps() * N * (1 + 4 * abs(factor) + np.exp(factor))
            assert_close(values[name], truth * np.ones(5), rtol=0, atol=atol)
            if estimator == "krylov-aware":
                # The answer is exact up to rounding, and we know it.
                assert np.all(errors[name] < 2 * atol)
                assert np.all(errors[name] > 0) or factor == 0


@pytest.mark.parametrize("kind", ["rank 5", "small projector", "zero"])
def test_low_rank_is_exact(kind):
    # If we leave out one probe, the other four and their products span the range.
    problem = Problem(kind, 60, True, scale=0.1)
    largest = np.max(problem.eigenvalues)
    five = tx.KrylovAwareEstimator(5)
    values, errors = _values(_semidefinite, problem.operator(psd=True), 24, five, 20)
    for name, actual in values.items():
        truth = problem.total(lambda x, name=name: _semidefinite(x)[name])
        # A zero eigenvalue is accurate up to rounding, and its root up to the root of
        # rounding.
        unit = (10 * eps()) ** 0.5 if name == "sqrt" else 500 * eps()
        tolerance = 60 * unit * largest**0.5
        assert np.max(np.abs(actual - truth)) <= tolerance
        if kind == "rank 5":
            assert np.max(errors[name]) < tolerance


#
# Budgets
#


@pytest.mark.x64
@pytest.mark.parametrize(
    ("estimator", "k"), [("krylov-aware", 1), ("quadrature", 2), ("quadrature", K)]
)
def test_every_budget(estimator, k):
    problem = Problem("flat", N)
    value, error, result, stats = _estimate(
        jr.key(1), _positive, problem.operator(), k, estimator
    )
    assert k - 2 <= int(stats["num_matvecs"]) <= k
    assert first_failure(result) == tx.RESULTS.successful
    weights, nodes = stats["ritz_weights"], stats["ritz_values"]
    for name in ("log", "sqrt"):
        truth = problem.total(getattr(np, name))
        # A single probe or step leaves the error unknown.
        assert np.isnan(error[name]) == (k < 3)
        assert abs(value[name] - truth) < 0.25 * truth
        total = np.sum(weights * getattr(np, name)(nodes))
        assert_close(total, value[name], rtol=200 * eps())


#
# Equivariance
#


@pytest.mark.x64
def test_shifts_equal_shifted_operators(key):
    problem, shift = Problem("poly", N), 0.1
    options = {"shift": as_array(shift)}
    one, error, *_ = _call(
        tx.logdet, key, problem.operator(), K, "krylov-aware", options
    )
    total = as_operator(problem.dense + shift * np.eye(N))
    two, total_error, *_ = _estimate(key, _positive, total, K, "krylov-aware")
    # The condition number is 11.
    assert_close(one, two["log"], rtol=0, atol=100 * eps() * N * np.log(10))
    assert_close(error, total_error["log"], rtol=1e-6)


@BOTH
def test_scale_equivariance(estimator):
    rtol = 1e-9 if is_x64() else 5e-4
    for name in ("poly", "flat"):

        def scaled_back(scale, name=name):
            operator = Problem(name, N, scale=scale).operator()
            value, error, *_ = _estimate(jr.key(1), jnp.sqrt, operator, K, estimator)
            return [x / scale**0.5 for x in (value, error)]

        value, error = scaled_back(1.0)
        for scale in (1e-12, 1e12, 1e-20, 1e18):
            scaled, scaled_error = scaled_back(scale)
            assert_close(scaled, value, rtol=rtol)
            assert_close(scaled_error, error, rtol=100 * rtol)


@pytest.mark.x64
def test_operators_over_pytrees(key):
    problem = Problem("flat", 12, True)
    a = problem.array
    structure = {
        "u": jax.ShapeDtypeStruct((3,), a.dtype),
        "w": jax.ShapeDtypeStruct((3, 3), a.dtype),
    }

    def product(v):
        out = a @ jnp.concatenate([v["u"], v["w"].reshape(-1)])
        return {"u": out[:3], "w": out[3:].reshape(3, 3)}

    # One probe's 12 steps span the whole space, so the answer is exact.
    tree = lx.FunctionLinearOperator(product, structure)
    assert_close(tx.logdet(key, tree, 12, KRYLOV).value, problem.logdet(), rtol=1e-9)


@pytest.mark.x64
def test_several_functions_at_once(key):
    operator = products_only(Problem("flat", N, True).operator())

    def functions(x):
        log = jnp.log(x)
        return {"log": log, "rest": (2 * log, jax.lax.complex(-log, 3 * log))}

    e = tx.trace_function(key, functions, operator, 6, KRYLOV, throw=False)
    value, error, stats = e.value, e.standard_error, e.stats
    log, log_error = value["log"], error["log"]
    expected = np.sum(stats["ritz_weights"] * np.log(stats["ritz_values"]))
    assert_close(log, expected, rtol=1e3 * eps())
    assert_close(value["rest"][0], 2 * log, rtol=100 * eps())
    complex_value = value["rest"][1]
    assert complex_value.dtype == as_array(1j).dtype
    assert_close(complex_value, log * (-1 + 3j), rtol=100 * eps())
    assert_close(error["rest"][0], 2 * log_error, rtol=1e4 * eps())
    assert jax.tree.structure(stats["degrees_of_freedom"]) == jax.tree.structure(value)
    low, high = e.confidence_interval()
    assert low["log"] < value["log"] < high["log"]
    assert low["rest"][1].imag < complex_value.imag < high["rest"][1].imag


@pytest.mark.x64
def test_half_precision(key):
    problem = Problem("flat", N)
    operator = lx.MatrixLinearOperator(jnp.asarray(problem.dense, jnp.bfloat16))
    estimate = tx.logdet(key, operator, 10, KRYLOV)
    assert estimate.value.dtype == jnp.float32
    low, high = estimate.confidence_interval(0.999)
    slack = 0.02 * N
    assert low - slack < problem.logdet() < high + slack


@pytest.mark.x64
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.complex64])
def test_single_precision_in_64_bit_mode(key, dtype):
    operator = lx.MatrixLinearOperator(jnp.asarray(matrix("flat", N), dtype))

    def logdet(shift):
        e = tx.logdet(key, operator, 12, KRYLOV, shift=shift, throw=False)
        return e.value, (e.standard_error, e.stats)

    differentiate = jax.value_and_grad(logdet, has_aux=True)
    (value, (error, stats)), slope = jax.eval_shape(differentiate, jnp.float32(0.5))
    for x in (value, error, stats["ritz_values"], stats["ritz_weights"], slope):
        assert x.dtype == jnp.float32


#
# The other entry points
#


@pytest.mark.x64
def test_wrappers_are_exact_for_enough_products(key):
    problem = Problem("signed", 14, True)

    def call(entry, **options):
        operator, options = problem.operator(), jax.tree.map(as_array, options)
        return _call(entry, key, operator, 14, "krylov-aware", options)

    for p in (1, 2, 3, 0.5):
        value, error, *_ = call(tx.schatten_norm, p=p)
        truth = problem.total(lambda x, p=p: np.abs(x) ** p) ** (1 / p)
        assert_close(value, truth, rtol=300 * eps())
        assert error <= 300 * eps() * value
    inverse, *_ = call(tx.trace_inverse, shift=1.5)
    assert_close(inverse, problem.trace_inverse(1.5), rtol=100 * eps())
    logdet, *_ = call(tx.logdet, shift=1.5)
    assert_close(logdet, problem.logdet(1.5), rtol=100 * eps())


@pytest.mark.x64
def test_schatten_norms(key):
    def norm(problem):
        call = tx.schatten_norm, key, problem.operator(), K, "krylov-aware"
        return _call(*call, {"p": as_array(3.0)})

    problem = Problem("flat", N)
    value, error, *_ = norm(problem)
    total, total_error, *_ = _estimate(
        key, _positive, problem.operator(), K, "krylov-aware"
    )
    total, total_error = total["cube"], total_error["cube"]
    assert_close(value, total ** (1 / 3), rtol=1e3 * eps())
    assert_close(error, total ** (1 / 3 - 1) / 3 * total_error, rtol=1e5 * eps())
    value, error, result, _ = norm(Problem("zero", N))
    assert first_failure(result) == tx.RESULTS.successful
    assert value == 0
    assert error == 0 or error < 1e-30


@pytest.mark.x64
def test_spectral_density_is_exact_for_enough_products(key):
    problem = Problem("signed", N)
    values = problem.eigenvalues
    density = tx.spectral_density(key, problem.operator(), N)
    assert_close(density.points, values, rtol=1e3 * eps(), atol=1e3 * eps())
    between = (values[1:] + values[:-1]) / 2
    counts = density.count(-jnp.inf, as_array(between))
    assert_close(counts.value, np.arange(1, N), rtol=100 * eps())
    assert_close(density.integrate(jnp.exp), problem.total(np.exp), rtol=100 * eps())
    at = np.linspace(-2, 3, 7)
    bells = np.exp(-(((at[:, None] - values) / 0.3) ** 2) / 2)
    expected = bells.sum(axis=1) / (0.3 * np.sqrt(2 * np.pi))
    assert_close(density.density(as_array(at), 0.3), expected, rtol=1e3 * eps())
    assert density.count(0, as_array(0.5)).value.shape == ()


@pytest.mark.x64
def test_spectral_density(key):
    problem = Problem("signed", N)
    operator = problem.operator()
    density = tx.spectral_density(key, operator, K, QUADRATURE)
    assert_close(jnp.sum(density.weights), N, rtol=1e3 * eps())
    assert_close(density.integrate(lambda x: x <= 10.0), N, rtol=1e3 * eps())
    assert density.integrate(lambda x: x <= -10.0) == 0
    with pytest.raises(TypeError, match="trace: the density must have a Krylov space"):
        density.trace(jnp.exp)
    value, *_ = _estimate(key, _entire, operator, K, "quadrature")
    assert_close(density.integrate(jnp.cos), value["cos"], rtol=1e3 * eps())
    # The density integrates to n: the trapezoidal rule is exact for normal densities.
    at = np.linspace(-4, 5, 400)
    total = np.sum(to_double(density.density(as_array(at), 0.2))) * (at[1] - at[0])
    assert_close(total, N, rtol=1e-5)

    def integral(a):
        density = tx.spectral_density(key, lx.MatrixLinearOperator(a), K, QUADRATURE)
        return density.integrate(lambda x: x**2)

    # We don't differentiate densities.
    assert not np.any(jax.grad(integral)(operator.matrix))


#
# Failures
#


CALLS = pytest.mark.parametrize(
    ("estimator", "k"), [("krylov-aware", K), ("quadrature", K), ("krylov-aware", N)]
)


def _with(bad):
    a = matrix("flat", N)
    a[2, 5] = bad
    return a


@pytest.mark.x64
@CALLS
def test_failures_are_results(key, estimator, k):
    R = tx.RESULTS
    cases = [
        (matrix("signed", N), R.outside_domain),
        (-matrix("flat", N), R.outside_domain),
        (_with(np.nan), R.nonfinite),
        (_with(np.inf), R.nonfinite),
    ]
    if estimator == "krylov-aware":
        # Quadrature's four steps from a probe don't reach the eigenvalue 0 among six.
        cases.append((matrix("rank 5", N), R.outside_domain))
    for a, expected in cases:
        value, error, result, _ = _estimate(
            key, _positive, as_operator(a), k, estimator
        )
        assert first_failure(result) == expected
        if expected == R.nonfinite:
            assert not np.isfinite(value["log"])
            assert np.isnan(error["log"])


@pytest.mark.x64
@CALLS
def test_tags(key, estimator, k):
    R = tx.RESULTS
    for a, tag, expected in (
        (matrix("signed", N), PSD, R.not_semidefinite),
        (matrix("exp", N), PSD, R.successful),
        (matrix("small projector", N), PSD, R.successful),
        (matrix("zero", N), PSD, R.successful),
        *([(-matrix("flat", N), NSD, R.successful)] if k == N else []),
    ):
        operator = lx.MatrixLinearOperator(as_array(a), tag)
        _, _, result, _ = _estimate(key, _entire, operator, k, estimator)
        assert first_failure(result) == expected


@pytest.mark.x64
def test_operators_that_are_not_hermitian(key):
    R = tx.RESULTS
    for a, k, expected in (
        (matrix("nonsymmetric", N, True), K, R.not_hermitian),
        (matrix("flat", N) * (1 + 1j), K, R.not_hermitian),  # symmetric
        (matrix("nonsymmetric", N), N, R.not_hermitian),
        (hermitian("flat", N, True) * 1e3, K, R.nonfinite),  # exp overflows
    ):
        _, _, result, _ = _estimate(key, _entire, as_operator(a), k, "krylov-aware")
        assert first_failure(result) == expected


def _raises(match, call):
    with pytest.raises(Exception, match=match):
        jax.block_until_ready(call().value)


@pytest.mark.x64
def test_failures_raise(key):
    a, b = as_operator(matrix("signed", N)), as_operator(matrix("flat", N))
    outside = r"(?s)not finite at an eigenvalue.*Shift the operator"
    _raises(outside, lambda: tx.logdet(key, a, K, QUADRATURE))
    # This is the remedy.
    options = {"shift": as_array(1.5)}
    _, _, result, _ = _call(tx.logdet, key, a, K, "krylov-aware", options)
    assert first_failure(result) == tx.RESULTS.successful
    nan = lx.MatrixLinearOperator(b.matrix.at[2, 5].set(jnp.nan))
    _raises("parameters hold NaN", lambda: tx.logdet(key, nan, K, QUADRATURE))
    # Other tests check these results, so we check the messages only.
    R = tx.RESULTS
    assert "not symmetric" in R[R.not_hermitian]
    assert "Remove the tag" in R[R.not_semidefinite]

    def value(a):
        return tx.logdet(key, lx.MatrixLinearOperator(a), 4, QUADRATURE).value

    with pytest.raises(Exception, match="not finite at an eigenvalue"):
        jax.block_until_ready(jax.jit(jax.grad(value))(a.matrix))


@pytest.mark.x64
def test_batch_elements_fail_independently(key):
    batch = np.stack([matrix("flat", N)] * 4)
    batch[1, 0, 0] = np.nan
    batch[2] = matrix("signed", N)

    @jax.jit
    @jax.vmap
    def run(a):
        operator = lx.MatrixLinearOperator(a)
        return tx.logdet(key, operator, 6, QUADRATURE, throw=False)

    estimates = run(as_array(batch))
    R = tx.RESULTS
    expected = [R.successful, R.nonfinite, R.outside_domain, R.successful]
    for i, result in enumerate(expected):
        assert jax.tree.map(lambda x, i=i: x[i], estimates.result) == result
    assert estimates.value[0] == estimates.value[3]
    assert np.isfinite(np.asarray(estimates.value))[[0, 3]].all()


#
# Wrong arguments
#


def _operator():
    return as_operator(matrix("flat", N))


@pytest.mark.wrong_types
@pytest.mark.x64
@pytest.mark.parametrize(
    ("fn", "kind", "match"),
    [
        (3.0, TypeError, "function of a real scalar, got 3.0 of type float"),
        (None, TypeError, "NoneType"),
        (lambda x: None, ValueError, "a result without arrays"),
    ],
)
def test_wrong_functions(key, fn, kind, match):
    with pytest.raises(kind, match=match):
        tx.trace_function(key, fn, _operator(), 4)
    with pytest.raises(kind, match=match):
        tx.MatrixFunctionLinearOperator(as_operator(np.eye(4), psd=True), fn, 4)


@pytest.mark.x64
@pytest.mark.parametrize(
    "fn", [math.log, np.log, lambda x: jnp.log(x) if x > 0 else 0.0]
)
def test_functions_that_need_numbers(key, fn):
    with pytest.raises(jax.errors.JAXTypeError) as error:
        tx.trace_function(key, fn, lx.MatrixLinearOperator(jnp.eye(3)), 2)
    assert any("jnp.where for if" in note for note in error.value.__notes__)


@pytest.mark.wrong_types
@pytest.mark.x64
@pytest.mark.parametrize(
    "entry", [tx.logdet, tx.trace_inverse, tx.schatten_norm, tx.spectral_density]
)
def test_wrong_estimators_budgets_and_keys(key, entry):
    rectangular = lx.MatrixLinearOperator(jnp.ones((3, 4)))
    for kind, match, arguments in (
        (TypeError, "SpectralEstimator", (key, _operator(), 4, tx.XTraceEstimator())),
        (TypeError, "pass an instance", (key, _operator(), 4, type(KRYLOV))),
        (ValueError, "at least 1, got 0", (key, _operator(), 0)),
        (TypeError, "got 2.0 of type float", (key, _operator(), 2.0)),
        (TypeError, "single key", (0, _operator(), 2)),
        (TypeError, "start", (_operator(), key, 2)),
        (TypeError, "lineax linear operator", (key, jnp.eye(3), 4)),
        (ValueError, r"shape \(4,\).*to shape \(3,\)", (key, rectangular, 2)),
    ):
        with pytest.raises(kind, match=match) as error:
            entry(*arguments)
        assert str(error.value).startswith(f"traceax.{entry.__name__}: ")


@pytest.mark.wrong_types
@pytest.mark.x64
def test_wrong_numbers(key):
    def refused(kind, match, entry, *arguments, **options):
        with pytest.raises(kind, match=match):
            entry(*arguments, **options)

    for entry in (tx.logdet, tx.trace_inverse):
        call = entry, key, _operator(), 4
        for shift in (jnp.ones(2), 1j, np.ones((1, 1))):
            match = "shift must be real and of shape"
            refused(ValueError, match, *call, shift=shift)
        for shift in (None, "1", True):
            match = "shift must be a real number or array, got"
            refused(TypeError, match, *call, shift=shift)
    call = tx.schatten_norm, key, _operator(), 4
    for p in (0, -1.0, np.float32(-1), jnp.asarray(-1.0), np.array(0), math.nan):
        refused(ValueError, "p must be positive and finite, got", *call, p=p)
    match = "p must be a real scalar, got 'nuc' of type str; write p="
    refused(TypeError, match, *call, p="nuc")
    call = tx.trace_function, key, jnp.log, _operator(), 4
    for kind, lower in ((TypeError, "0"), (ValueError, jnp.ones(2))):
        refused(kind, "lower must be a real scalar, got", *call, lower=lower)
    call = tx.trace_function, key, _operator(), jnp.log, 4
    refused(TypeError, r"lineax linear operator.*start \(key, fn, operator, k\)", *call)
    density = tx.spectral_density(key, _operator(), N)
    for kind, width in ((ValueError, 0.0), (ValueError, -1), (TypeError, None)):
        refused(kind, "width must be", density.density, jnp.ones(2), width)


@pytest.mark.x64
def test_traced_powers_that_are_wrong(key):
    for k in (4, N):
        norm = jax.jit(
            lambda p, k=k: tx.schatten_norm(
                key, _operator(), k, QUADRATURE, p=p, throw=False
            )
        )
        estimate = norm(-1.0)
        assert estimate.result == tx.RESULTS.outside_domain
        assert np.isnan(estimate.value)
        assert norm(2.0).result == tx.RESULTS.successful


@pytest.mark.x64
def test_empty_operators(key):
    dtype, estimator = float_dtype(), KRYLOV
    structure = jax.ShapeDtypeStruct((0,), dtype)
    for empty in (
        lx.MatrixLinearOperator(jnp.zeros((0, 0), dtype), PSD),
        lx.FunctionLinearOperator(lambda v: v, structure, PSD),
    ):
        for entry in (tx.logdet, tx.trace_inverse, tx.schatten_norm):
            estimate = entry(key, empty, 3, estimator)
            assert (estimate.value, estimate.standard_error) == (0, 0)

        def value(shift, empty=empty):
            return tx.logdet(key, empty, 3, estimator, shift=shift).value

        assert jax.grad(value)(jnp.ones((), dtype)) == 0
        assert tx.spectral_density(key, empty, 3, estimator).points.shape == (0,)


@pytest.mark.wrong_types
@pytest.mark.x64
@pytest.mark.parametrize("kind", [type(KRYLOV), type(QUADRATURE)])
def test_wrong_estimator_options(kind):
    with pytest.raises(ValueError, match="num_probes must be at least 1, got 0"):
        kind(0)
    for bad in (2.0, True, "3"):
        with pytest.raises(TypeError, match="num_probes must be an int or None"):
            kind(bad)
    with pytest.raises(TypeError, match="pass an instance"):
        kind(sampler=tx.NormalSampler)
    assert kind(np.int64(3)).num_probes == 3
    if kind is type(KRYLOV):
        with pytest.raises(ValueError, match="rotation-invariant"):
            kind(sampler=tx.RademacherSampler())


#
# Transforms
#


def _parametric(theta):
    a, b = Problem("flat", N).array, Problem("signed", N, seed=5).array
    return lx.MatrixLinearOperator(a + theta[0] * b + theta[1] * b @ b)


@pytest.mark.x64
def test_transforms_agree_with_single_calls():
    def logdet(theta, key):
        operator, shift = _parametric(theta), theta[0] ** 2
        e = tx.logdet(key, operator, 6, QUADRATURE, shift=shift, throw=False)
        return jnp.stack([e.value, e.standard_error]), e.value

    thetas = as_array([[0.1, 0.2], [0.3, 0.1], [0.0, 0.5]])
    keys = jr.split(jr.key(1), 3)
    run = jax.jacrev(logdet, has_aux=True)
    single = jax.jit(run)
    stacked = [np.stack(x) for x in zip(*map(single, thetas, keys), strict=True)]
    for actual, expected in zip(
        jax.jit(jax.vmap(run))(thetas, keys), stacked, strict=True
    ):
        assert_close(actual, expected, rtol=1e4 * eps())
    slopes, values = stacked
    assert len(np.unique(values)) == 3
    # We don't differentiate error bars.
    assert np.all(slopes[:, 0] != 0)
    assert not np.any(slopes[:, 1])


@pytest.mark.x64
def test_the_whole_estimate_passes_through_jit():
    @jax.jit
    def run(theta, key):
        return tx.trace_function(key, jnp.log, _parametric(theta), K, QUADRATURE)

    estimate = run(as_array([0.1, 0.2]), jr.key(0))
    low, high = estimate.confidence_interval()
    assert low < estimate.value < high
    again = QUADRATURE.estimate(estimate.state, K)
    assert_close(again.value, estimate.value, rtol=100 * eps())


#
# Values that functions read
#


class _Counter:
    """A function with state, equal to every other instance."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return self.factor * x

    def times(self, x):
        return self.factor * x

    def __eq__(self, other):
        return isinstance(other, _Counter)

    def __hash__(self):
        return 0


_FACTORS = {"factor": 1.0}


def _times_global(x):
    return _FACTORS["factor"] * x


@pytest.mark.x64
def test_functions_read_current_values(key):
    problem, counter = Problem("flat", 4), _Counter(1.0)
    # We use the working precision, because JAX keeps arrays that it converts.
    array = np.ones(2, float_dtype())

    def value(fn):
        return tx.trace_function(key, fn, problem.operator(psd=True), 4).value

    def times_array(x):
        return jnp.dot(array, array) * x / 2

    for fn in (counter, counter.times, times_array, _times_global):
        for c in (1.0, 3.0):
            counter.factor = _FACTORS["factor"] = c
            array.fill(c**0.5)
            assert_close(value(fn), c * problem.trace)
    # Equal objects are different functions.
    assert_close(value(_Counter(2.0)), 2 * value(_Counter(1.0)))


@pytest.mark.x64
def test_jitted_functions_that_close_over_tracers(key):
    problem = Problem("flat", N)

    def value(s, k):
        fn = jax.jit(lambda x: jnp.log(x + s))
        return tx.trace_function(key, fn, problem.operator(), k, throw=False).value

    @jax.jit
    def slope_and_batch(s):
        batch = jax.vmap(lambda s: value(s, N))(jnp.stack([s, 2 * s]))
        return jax.grad(value)(s, N), batch

    slope, batch = slope_and_batch(0.5)
    assert_close(slope, problem.trace_inverse(0.5))
    assert_close(batch, [problem.logdet(0.5), problem.logdet(1.0)])


@pytest.mark.x64
def test_functions_of_the_library_compile_once(key):
    dense = _operator()
    traces = []

    def product(a, v):
        traces.append(None)
        return a @ v

    operator = lx.FunctionLinearOperator(
        jax.tree_util.Partial(product, dense.matrix), dense.in_structure(), PSD
    )
    fn = jax.jit(jnp.cbrt)
    calls = (
        lambda shift: tx.logdet(key, operator, 4, QUADRATURE, shift=shift),
        lambda p: tx.schatten_norm(key, operator, 4, QUADRATURE, p=p),
        lambda _: tx.trace_function(key, fn, operator, 4, QUADRATURE),
    )
    for call in calls:
        call(as_array(1.0))
        count = len(traces)
        call(as_array(2.0))
        assert len(traces) == count


@pytest.mark.x64
def test_arguments_of_partial_functions_are_data(key):
    problem = Problem("flat", N)

    def value(p):
        power = functools.partial(lambda q, x: x**q, p)
        return tx.trace_function(key, power, problem.operator(), N).value

    actual = jax.jit(jax.value_and_grad(value))(1.5)
    slope = problem.total(lambda x: x**1.5 * np.log(x))
    assert_close(actual, (problem.total(lambda x: x**1.5), slope))


#
# Diagonals
#


@pytest.mark.x64
def test_diagonals_are_summed(key):
    diagonal = as_array(spectrum("flat", N))
    estimate = tx.logdet(key, lx.DiagonalLinearOperator(diagonal), 3, shift=0.5)
    assert_close(estimate.value, Problem("flat", N).logdet(0.5))
    assert 0 < estimate.standard_error < 1e-12
    assert estimate.stats["num_matvecs"] == 0

    def value(diagonal):
        return tx.logdet(key, lx.DiagonalLinearOperator(diagonal), 3).value

    assert_close(jax.grad(value)(diagonal), 1 / diagonal)
    tagged = lx.MatrixLinearOperator(jnp.diag(diagonal), lx.diagonal_tag)
    assert_close(tx.logdet(key, tagged, 3).value, value(diagonal))
    # We use an explicit estimator even here.
    explicit = tx.logdet(key, tagged, 4, QUADRATURE)
    assert explicit.stats["num_matvecs"] > 2
    R = tx.RESULTS
    for bad, result in (
        (np.linspace(-1, 1, N), R.outside_domain),
        (np.linspace(0, 1, N), R.outside_domain),
        (np.full(N, np.nan), R.nonfinite),
    ):
        operator = lx.DiagonalLinearOperator(jnp.asarray(bad))
        assert tx.logdet(key, operator, 3, throw=False).result == result


@pytest.mark.x64
def test_a_function_outside_its_domain_leaves_others_alone(key):
    a = hermitian("signed", N)
    eigenvalues = np.linalg.eigvalsh(a)
    largest = np.max(eigenvalues)

    def functions(x):
        near, far = (1 - x * (rho / largest) for rho in (0.5, 1.3))
        return {"near": jnp.log(near), "far": jnp.log(far)}

    def alone(x):
        return functions(x)["near"]

    def run(fn, k, estimator, name, scale):
        operator = lx.MatrixLinearOperator(scale * as_array(a), lx.symmetric_tag)
        e = tx.trace_function(key, fn, operator, k, estimator, throw=False)
        return e.value if name is None else e.value[name], e

    for k, estimator in ((12, KRYLOV), (12, SPECTRAL["quadrature"]), (N, KRYLOV)):
        gradient = jax.jit(jax.grad(run, 4, has_aux=True), static_argnums=(0, 1, 2, 3))
        slope, e = gradient(functions, k, estimator, "near", as_array(1.0))
        expected_slope, expected = gradient(alone, k, estimator, None, as_array(1.0))
        assert_close(e.value["near"], expected.value, rtol=1e3 * eps())
        assert_close(slope, expected_slope, rtol=1e4 * eps())
        assert jnp.isnan(e.value["far"]) & jnp.isnan(e.standard_error["far"])
        assert e.result["near"] == tx.RESULTS.successful
        assert e.result["far"] == tx.RESULTS.outside_domain
    operator = lx.MatrixLinearOperator(as_array(a))
    with pytest.raises(RuntimeError, match="not finite at an eigenvalue"):
        tx.trace_function(key, functions, operator, N)


@pytest.mark.x64
def test_stats_do_not_depend_on_the_path(key):
    eigenvalues = as_array(np.linspace(1, 3, 40))
    diagonal = lx.TaggedLinearOperator(lx.DiagonalLinearOperator(eigenvalues), PSD)
    matrix = lx.MatrixLinearOperator(diagonal.as_matrix(), PSD)

    def stats_keys(entry, operator, *arguments, **options):
        actual = eqx.filter_eval_shape(
            lambda: entry(key, operator, *arguments, throw=False, **options)
        )
        return set(actual.stats)

    for entry in (tx.logdet, tx.schatten_norm):
        expected = stats_keys(entry, matrix, 10)
        assert {"bracket", "bracket_is_proven", "bottom", "known_trace"} <= expected
        for operator, k in ((matrix, 40), (matrix, None), (diagonal, 10)):
            assert stats_keys(entry, operator, k) == expected, (entry, k)
    for entry in (tx.logdet, tx.trace):
        looped = stats_keys(entry, matrix, 20, rtol=0.1)
        assert "products_needed" in looped
        for operator, k in ((matrix, 40), (matrix, 60), (matrix, None), (diagonal, 20)):
            assert stats_keys(entry, operator, k, rtol=0.1) == looped, (entry, k)
    quadrature = SPECTRAL["quadrature"]
    quadrature_keys = [stats_keys(tx.logdet, matrix, k, quadrature) for k in (10, 40)]
    assert quadrature_keys[0] == quadrature_keys[1]
    y = eigenvalues
    expected = stats_keys(tx.gaussian_log_likelihood, matrix, y, 10, shift=0.1)
    for k in (40, None):
        actual = stats_keys(tx.gaussian_log_likelihood, matrix, y, k, shift=0.1)
        assert actual == expected, k


def test_rounding_hides_eigenvalues_on_both_sides(key):
    # An eigenvalue computed as 0 may be positive, by rounding relative to the largest.
    dtype = float_dtype()
    eps = float(jnp.finfo(dtype).eps)
    values, ones = jnp.zeros(11, dtype).at[-1].set(1), jnp.ones(11, dtype)
    root = spectral_function(jnp.sqrt, dtype, "", monotone=True)
    (error,), _ = rounding_errors(root, values, ones, jnp.asarray(eps, dtype), None)
    assert error > 10 * eps**0.5
    # Under the tag, a slightly negative eigenvalue passes as 0. With the bound 0 it
    # must pass as well.
    n = 40
    Q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(n, n)))
    spectrum = np.append(np.linspace(0.1, 1, n - 1), -300 * eps)
    matrix = jnp.asarray((Q * spectrum) @ Q.T, dtype)
    operator = lx.MatrixLinearOperator((matrix + matrix.T) / 2, PSD)
    alone, bounded = (
        tx.trace_function(key, jnp.sqrt, operator, 30, lower=lower, monotone=True)
        for lower in (None, 0.0)
    )
    assert_close(bounded.value, alone.value, rtol=1e-5)
