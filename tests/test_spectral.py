"""Traces of functions: entry points against eigenvalue sums, edges, errors, transforms."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import (
    NSD,
    PSD,
    as_operator,
    assert_close,
    float_dtype,
    hidden,
    is_x64,
    matrix,
    spectrum,
)
from spectral_helpers import (
    SPECTRAL,
    as_array,
    eps,
    hermitian,
    relaxed,  # noqa: F401
    wide,
)

import traceax as tx
from traceax._spectral.base import probes_and_steps
from traceax._spectral.krylov_aware import best_probes

N = 30
BOTH = pytest.mark.parametrize("estimator", list(SPECTRAL))
# Of what depends on the estimator by its result alone.
ONE = pytest.mark.parametrize("estimator", ["krylov-aware"])
KRYLOV = tx.KrylovAwareEstimator()
# Of small programs, for what no estimator has to do with.
QUADRATURE = tx.LanczosQuadratureEstimator()


@eqx.filter_jit
def _estimate(key, fn, operator, k, estimator):
    estimator = SPECTRAL.get(estimator, estimator)
    e = tx.trace_function(key, fn, operator, k, estimator, throw=False)
    return e.value, e.standard_error, e.result, e.stats


@functools.partial(eqx.filter_jit, donate="none")
def _call(entry, key, operator, k, estimator, options):
    e = entry(key, operator, k, SPECTRAL[estimator], throw=False, **options)
    return e.value, e.standard_error, e.result, e.stats


def _values(fn, operator, k, estimator, num_keys=5, seed=0):
    run = eqx.filter_vmap(lambda key: _estimate(key, fn, operator, k, estimator)[:2])
    return jax.tree.map(np.asarray, run(jr.split(jr.key(seed), num_keys)))


#
# Promotion
#


def _half(key):
    a = jnp.asarray(matrix("flat", N), jnp.bfloat16)
    return tx.logdet(key, lx.MatrixLinearOperator(a), 12).value


def _complex_gradient(key):
    a = as_array(hermitian("flat", N, True))

    def value(s):
        operator = lx.MatrixLinearOperator(a * s.astype(a.dtype))
        return tx.logdet(key, operator, 12, throw=False).value

    return jax.grad(value)(as_array(1.0))


def _complex_root(key):
    inner = as_operator(hermitian("flat", N, True), psd=True)
    return tx.MatrixFunctionLinearOperator(inner, jnp.sqrt, 5).mv(
        jnp.diag(inner.matrix)
    )


def _complex(key, **options):
    operator = as_operator(hermitian("flat", N, True))
    return tx.logdet(key, operator, 12, **options).value


PROMOTING = {
    "complex quadrature": lambda key: _complex(key, estimator=SPECTRAL["quadrature"]),
    "complex with a shift": lambda key: _complex(key, shift=0.1),
    "gradient, complex": _complex_gradient,
    "complex function": lambda key: (
        tx.trace_function(
            key, lambda x: jax.lax.complex(x, x), as_operator(matrix("flat", N)), 12
        ).value
    ),
    "function of a complex operator": _complex_root,
    "bfloat16": _half,
}


@pytest.mark.x64
@pytest.mark.parametrize("case", list(PROMOTING))
def test_strict_promotion(key, case):
    # What is refused is refused while it is traced.
    with jax.numpy_dtype_promotion("strict"):
        jax.jit(PROMOTING[case]).lower(key)


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
    ("estimator", "complex", "k"),
    [("krylov-aware", True, 13), ("quadrature", False, 12)],
)
def test_enough_products_are_exact(estimator, complex, k):
    a = hermitian("flat", 12, complex)
    values = np.linalg.eigvalsh(a)
    operator = as_operator(a)
    everything = {name: np.sum(f(values)) for name, f in FUNCTIONS.items()}
    value, error, result, stats = _estimate(
        jr.key(0),
        lambda x: {name: f(x) for name, f in FUNCTIONS.items()},
        operator,
        k,
        estimator,
    )
    assert result == tx.RESULTS.successful
    assert int(stats["num_matvecs"]) == 12
    for name, exact in everything.items():
        assert_close(value[name], exact, rtol=100 * eps(), atol=100 * eps())
        assert value[name].dtype == float_dtype()
        assert error[name] <= 1e3 * eps() * abs(exact)
    assert_close(stats["ritz_values"], values, rtol=100 * eps())
    assert_close(stats["ritz_weights"], np.ones(12), rtol=100 * eps())


@pytest.mark.x64
@pytest.mark.parametrize(
    ("estimator", "complex"), [("krylov-aware", True), ("quadrature", False)]
)
def test_converged_spaces_reach_rounding_of_the_exact_trace(estimator, complex):
    # Of three eigenvalues, so that three steps are a whole Krylov space.
    n = N
    a = hermitian("repeated", n, complex) + 2 * np.eye(n)
    values = np.linalg.eigvalsh(a)
    operator = as_operator(a)
    k = 15  # three probes, five steps
    assert probes_and_steps(None, k, 3.0) == (3, 5)
    got, errors = _values(_positive, operator, k, estimator, 400)
    truths = {"log": np.sum(np.log(values)), "sqrt": np.sum(np.sqrt(values))}
    for name, truth in truths.items():
        x, error = got[name], np.sqrt(np.mean(errors[name] ** 2))
        assert abs(x.mean() - truth) < 4 * x.std() / np.sqrt(400)
        assert 0.6 < error / x.std() < 4


def _positive(x):
    return {"log": jnp.log(x), "sqrt": jnp.sqrt(x)}


@pytest.mark.parametrize("factor", [1.0, 1e-3, -2.0])
def test_multiples_of_the_identity_are_exact(factor):
    a = factor * hermitian("identity", N, True)
    exact = {"affine": 3 * factor + 0.5, "exp": np.exp(factor)}
    values, errors = _values(_entire, as_operator(a), 9, "krylov-aware")
    for name, each in exact.items():
        atol = 100 * eps() * N * (1 + 4 * abs(factor) + np.exp(factor))
        assert_close(values[name], N * each * np.ones(5), rtol=0, atol=atol)
        assert np.all(errors[name] < 2 * atol)
        # Exact up to rounding, and known to be.
        assert np.all(errors[name] > 0)


def _entire(x):
    return {"affine": 3.0 * x + 0.5, "exp": jnp.exp(x)}


def test_signs_make_multiples_of_the_identity_exact_by_quadrature():
    values, _ = _values(jnp.exp, as_operator(0.5 * np.eye(N)), 15, "quadrature")
    assert_close(values, N * np.exp(0.5) * np.ones(5), rtol=100 * eps())


@pytest.mark.parametrize("kind", ["rank 5", "small projector"])
def test_low_rank_is_exact_once_the_range_is_found(kind):
    # Probes but one, and their products, span range and the probes.
    a = hermitian(kind, 60, True) / 10
    values = np.maximum(np.linalg.eigvalsh(a), 0)
    positive = values[values > 1e-9]
    operator = as_operator(a, psd=True)
    truths = {
        "sqrt": np.sum(np.sqrt(positive)),
        "entropy": -np.sum(positive * np.log(positive)),
        "expm1": np.sum(np.expm1(positive)),
    }
    # Five probes, four others of which find the range.
    five = tx.KrylovAwareEstimator(5)
    values_of, errors_of = _values(_semidefinite, operator, 24, five, 20)
    for name, truth in truths.items():
        got, errors = values_of[name], errors_of[name]
        # An eigenvalue that is 0 is known to rounding, so is its root to the root
        # of rounding.
        unit = (10 * eps()) ** 0.5 if name == "sqrt" else 500 * eps()
        tolerance = 60 * unit * np.max(values) ** 0.5
        assert np.max(np.abs(got - truth)) < tolerance
        if kind == "rank 5":
            assert np.max(errors) < tolerance


def _semidefinite(x):
    return {
        "sqrt": jnp.sqrt(x),
        "entropy": jax.scipy.special.entr(x),
        "expm1": jnp.expm1(x),
    }


@pytest.mark.parametrize(("estimator", "k"), [("krylov-aware", 5), ("quadrature", 5)])
def test_zero(estimator, k):
    operator = as_operator(np.zeros((20, 20)))
    value, _, result, _ = _estimate(
        jr.key(0), lambda x: (x, jnp.sqrt(x), jnp.exp(x)), operator, k, estimator
    )
    assert result == tx.RESULTS.successful
    assert value[0] == value[1] == 0
    assert_close(value[2], 20, rtol=100 * eps())


@pytest.mark.x64
@pytest.mark.parametrize(
    ("estimator", "n", "ks"),
    [("krylov-aware", 1, (1,)), ("krylov-aware", 3, (2,)), ("quadrature", 3, (2,))],
)
def test_smallest_operators(estimator, n, ks):
    a = matrix("flat", n)
    truth = np.sum(np.exp(np.linalg.eigvalsh(a)))
    for k in ks:
        value, error, result, _ = _estimate(
            jr.key(0), jnp.exp, as_operator(a), k, estimator
        )
        assert result == tx.RESULTS.successful
        if k >= n:
            assert_close(value, truth, rtol=100 * eps())
            assert error <= 100 * eps() * truth
        else:
            assert abs(value - truth) < truth


#
# Budgets
#


@pytest.mark.x64
def test_budgets_are_used():
    for k in range(1, 61):
        m, steps = probes_and_steps(None, k, best_probes(k))
        assert k - 2 <= m * steps <= k
        assert m >= 1
        assert steps >= 1
        if k >= 20:
            assert m >= 3
            assert steps >= 3
        for num_probes in (1, 2, 7):
            m, steps = probes_and_steps(num_probes, k, 3.0)
            assert m == min(num_probes, k)
            assert k - m < m * steps <= k


@pytest.mark.x64
@pytest.mark.parametrize(
    ("estimator", "ks"), [("krylov-aware", (1,)), ("quadrature", (2, 7))]
)
def test_every_budget(estimator, ks):
    a = matrix("flat", 70)
    operator = as_operator(a)
    for k in ks:
        value, error, result, stats = _estimate(
            jr.key(1), jnp.sqrt, operator, k, estimator
        )
        krylov = estimator == "krylov-aware"
        target = best_probes(k) if krylov else max(0.9 * math.sqrt(k), 2.0)
        m, steps = probes_and_steps(None, k, target)
        assert int(stats["num_matvecs"]) == m * steps
        assert result == tx.RESULTS.successful
        truth = np.sum(np.sqrt(spectrum("flat", 70)))
        # Nothing is known of the error from a single probe or step.
        assert np.isnan(error) == (m == 1 or steps == 1)
        assert abs(value - truth) < 0.25 * truth
        assert_close(
            np.sum(stats["ritz_weights"] * np.sqrt(stats["ritz_values"])),
            value,
            rtol=200 * eps(),
        )


#
# Equivariance
#


@pytest.mark.x64
def test_a_shift_is_the_shift_of_the_function():
    estimator, k = "krylov-aware", 6
    a = hermitian("poly", N, True)
    operator = as_operator(a)
    identity = lx.IdentityLinearOperator(operator.in_structure())
    shift = 0.1
    one, error, *_ = _call(
        tx.logdet, jr.key(0), operator, k, estimator, {"shift": shift}
    )
    dtype = operator.matrix.dtype
    total = operator + identity * jnp.asarray(shift, dtype)
    two, of_sum, *_ = _call(tx.logdet, jr.key(0), total, k, estimator, {})
    # The condition is 11.
    assert_close(one, two, rtol=0, atol=100 * eps() * N * np.log(10))
    assert_close(error, of_sum, rtol=1e-6)


@BOTH
@pytest.mark.parametrize("factor", [1e-12, 1e12, 1e-20, 1e18])
def test_scale_equivariance(estimator, factor):
    for name in ("poly", "flat"):
        a = matrix(name, N)
        value, error, *_ = _estimate(jr.key(1), jnp.sqrt, as_operator(a), 12, estimator)
        scaled, scaled_error, result, _ = _estimate(
            jr.key(1), jnp.sqrt, as_operator(a * factor), 12, estimator
        )
        assert result == tx.RESULTS.successful
        root = np.sqrt(factor)
        rtol = 1e-9 if is_x64() else 5e-4
        assert_close(scaled / root, value, rtol=rtol)
        assert_close(scaled_error / root, error, rtol=100 * rtol)


@BOTH
def test_rotations_of_a_diagonal_matrix(estimator):
    # The trace of x is that of the front door's exact sum: linear functions are known
    # to the variance of the form alone; here all the Ritz values are exact.
    values = np.array([1.0, 2.0, 3.0, 4.0])
    operator = as_operator(np.diag(np.repeat(values, (8, 8, 7, 7))))
    _, _, _, stats = _estimate(jr.key(2), jnp.sqrt, operator, 12, estimator)
    ritz = np.sort(np.asarray(stats["ritz_values"]))
    apart = np.min(np.abs(ritz[:, None] - values[None]), axis=1)
    steps = probes_and_steps(None, 12, 3.0)[1]
    assert steps == 4
    assert np.max(apart) < 1e3 * eps()


@pytest.mark.x64
def test_operators_over_pytrees(key):
    n = 12
    a = as_array(hermitian("flat", n, True))
    structure = {
        "u": jax.ShapeDtypeStruct((3,), a.dtype),
        "w": jax.ShapeDtypeStruct((3, 3), a.dtype),
    }

    def product(v):
        flat = jnp.concatenate([v["u"], v["w"].reshape(-1)])
        out = a @ flat
        return {"u": out[:3], "w": out[3:].reshape(3, 3)}

    # Of the whole space, though of one probe: 12 steps from it are exact.
    tree = lx.FunctionLinearOperator(product, structure)
    estimate = tx.logdet(key, tree, n, KRYLOV)
    assert_close(estimate.value, np.sum(np.log(spectrum("flat", n))), rtol=1e-9)


@pytest.mark.x64
def test_several_functions_at_once(key):
    operator = hidden(as_operator(hermitian("flat", N, True)))

    def functions(x):
        log = jnp.log(x)
        return {"log": log, "rest": (2 * log, jax.lax.complex(-log, 3 * log))}

    e = tx.trace_function(key, functions, operator, 6, KRYLOV, throw=False)
    value, error, stats = e.value, e.standard_error, e.stats
    log, log_error = value["log"], error["log"]
    expected = np.sum(stats["ritz_weights"] * np.log(stats["ritz_values"]))
    assert_close(log, expected, rtol=1e3 * eps())
    assert_close(value["rest"][0], 2 * log, rtol=100 * eps())
    both = value["rest"][1]
    assert both.dtype == as_array(1j).dtype
    assert_close(both, log * (-1 + 3j), rtol=100 * eps())
    assert_close(error["rest"][0], 2 * log_error, rtol=1e4 * eps())
    freedom = stats["degrees_of_freedom"]
    assert jax.tree.structure(freedom) == jax.tree.structure(value)
    low, high = e.confidence_interval()
    assert low["log"] < value["log"] < high["log"]
    assert low["rest"][1].imag < both.imag < high["rest"][1].imag


@pytest.mark.x64
@pytest.mark.parametrize(
    ("estimator", "dtype", "k"),
    [
        ("krylov-aware", jnp.bfloat16, 10),
        ("quadrature", jnp.float16, 10),
    ],
)
def test_half_precision(key, estimator, dtype, k):
    a = matrix("flat", N)
    operator = lx.MatrixLinearOperator(jnp.asarray(a, dtype))
    estimate = tx.trace_function(key, jnp.log, operator, k, SPECTRAL[estimator])
    assert estimate.value.dtype == jnp.float32
    truth = np.sum(np.log(spectrum("flat", N)))
    low, high = estimate.confidence_interval(0.999)
    slack = 0.02 * N
    assert low - slack < truth < high + slack


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
def test_wrappers_are_exact_for_enough_products():
    n, estimator, complex = 14, "krylov-aware", True
    a = hermitian("signed", n, complex)
    values = np.linalg.eigvalsh(a)
    for p in (1, 2, 3, 0.5):
        value, error, *_ = _call(
            tx.schatten_norm,
            jr.key(0),
            as_operator(a),
            n,
            estimator,
            {"p": as_array(p)},
        )
        assert_close(value, np.sum(np.abs(values) ** p) ** (1 / p), rtol=300 * eps())
        assert error <= 300 * eps() * value
    shifted = {"shift": 1.5}
    inverse, *_ = _call(
        tx.trace_inverse, jr.key(0), as_operator(a), n, estimator, shifted
    )
    assert_close(inverse, np.sum(1 / (values + 1.5)), rtol=100 * eps())
    logdet, *_ = _call(tx.logdet, jr.key(0), as_operator(a), n, estimator, shifted)
    assert_close(logdet, np.sum(np.log(values + 1.5)), rtol=100 * eps())


@pytest.mark.x64
def test_schatten_norms():
    def norm(a, p):
        call = tx.schatten_norm, jr.key(3), as_operator(a), 9, "krylov-aware"
        return _call(*call, {"p": as_array(p)})

    a, p = matrix("signed", N), 3.0
    total, total_error, *_ = _estimate(
        jr.key(3), lambda x: jnp.abs(x) ** p, as_operator(a), 9, "krylov-aware"
    )
    value, error, *_ = norm(a, p)
    assert_close(value, total ** (1 / p), rtol=1e3 * eps())
    assert_close(error, total ** (1 / p - 1) / p * total_error, rtol=1e5 * eps())
    value, error, result, _ = norm(np.zeros((N, N)), 2.0)
    assert result == tx.RESULTS.successful
    assert value == 0
    assert error == 0 or error < 1e-30


@pytest.mark.x64
def test_spectral_density_is_exact_for_enough_products():
    a = matrix("signed", N)
    values = np.sort(np.linalg.eigvalsh(a))
    density = tx.spectral_density(jr.key(0), as_operator(a), N)
    assert_close(density.points, values, rtol=1e3 * eps(), atol=1e3 * eps())
    between = (values[1:] + values[:-1]) / 2
    assert_close(density.count(as_array(between)), np.arange(1, N), rtol=100 * eps())
    assert_close(density.integrate(jnp.exp), np.sum(np.exp(values)), rtol=100 * eps())
    at = np.linspace(-2, 3, 7)
    bells = np.exp(-(((at[:, None] - values) / 0.3) ** 2) / 2)
    expected = bells.sum(axis=1) / (0.3 * np.sqrt(2 * np.pi))
    assert_close(density.density(as_array(at), 0.3), expected, rtol=1e3 * eps())
    assert density.count(as_array(0.5)).shape == ()


@pytest.mark.x64
@BOTH
def test_spectral_density(key, estimator):
    a = matrix("signed", N)
    operator = as_operator(a)
    density = tx.spectral_density(key, operator, 15, SPECTRAL[estimator])
    assert_close(jnp.sum(density.weights), N, rtol=1e3 * eps())
    assert_close(density.count(as_array(10.0)), N, rtol=1e3 * eps())
    assert density.count(as_array(-10.0)) == 0
    if estimator == "quadrature":
        value, *_ = _estimate(key, jnp.cos, operator, 15, estimator)
        assert_close(density.integrate(jnp.cos), value, rtol=1e3 * eps())
    # The density integrates to n: the trapezoidal rule is exact for normal densities.
    at = np.linspace(-4, 5, 400)
    total = np.sum(wide(density.density(as_array(at), 0.2))) * (at[1] - at[0])
    assert_close(total, N, rtol=1e-5)
    # Counts are within a few of those of the operator.
    values = np.linalg.eigvalsh(a)
    for upper in (-0.5, 0.5, 1.5):
        count = float(density.count(as_array(upper)))
        assert abs(count - np.sum(values <= upper)) < 8


@pytest.mark.x64
def test_spectral_density_is_not_differentiable(key):
    a = as_operator(matrix("signed", N)).matrix

    def count(a):
        operator = lx.MatrixLinearOperator(a)
        density = tx.spectral_density(key, operator, 4, QUADRATURE)
        return density.integrate(lambda x: x**2)

    assert not np.any(jax.grad(count)(a))


#
# Failures
#


CALLS = pytest.mark.parametrize(
    ("estimator", "k"), [("krylov-aware", 12), ("quadrature", 12), ("krylov-aware", N)]
)


def _raises(match, estimate):
    with pytest.raises(Exception, match=match):
        jax.block_until_ready(estimate().value)


@pytest.mark.x64
@CALLS
def test_functions_outside_of_their_domain(key, estimator, k):
    low_rank = as_operator(hermitian("rank 5", N))
    outside = [as_operator(matrix("signed", N)), as_operator(-matrix("flat", N))]
    # Four steps from a probe don't reach the eigenvalue 0 of six.
    if k == N or estimator == "krylov-aware":
        outside.append(low_rank)
    for operator in outside:
        _, _, result, _ = _call(tx.logdet, key, operator, k, estimator, {})
        assert result == tx.RESULTS.outside_domain
    if estimator != "quadrature":
        return
    # A shift is the mend that the message gives.
    _, _, result, _ = _call(tx.logdet, key, low_rank, k, estimator, {"shift": 0.1})
    assert result == tx.RESULTS.successful


@pytest.mark.x64
def test_functions_outside_of_their_domain_raise(key):
    a, b = as_operator(matrix("signed", N)), as_operator(matrix("flat", N))
    outside = r"(?s)not finite at an eigenvalue.*Shift the operator"
    _raises(outside, lambda: tx.logdet(key, a, 12))
    nan = lx.MatrixLinearOperator(b.matrix.at[2, 5].set(jnp.nan))
    _raises("parameters hold NaN", lambda: tx.logdet(key, nan, 12))
    # Results that others test.
    R = tx.RESULTS
    assert "not symmetric" in R[R.not_hermitian]
    assert "Remove the tag" in R[R.not_semidefinite]


@pytest.mark.x64
@CALLS
def test_tags(key, estimator, k):
    R = tx.RESULTS
    for a, tag, expected in (
        (matrix("signed", N), PSD, R.not_semidefinite),
        (matrix("exp", N), PSD, R.successful),
        (hermitian("small projector", N), PSD, R.successful),
        (hermitian("zero", N), PSD, R.successful),
        *([(-matrix("flat", N), NSD, R.successful)] if k == N else []),
    ):
        operator = lx.MatrixLinearOperator(as_array(a), tag)
        _, _, result, _ = _estimate(key, jnp.cos, operator, k, estimator)
        assert result == expected


@pytest.mark.x64
@pytest.mark.parametrize(("k", "complex"), [(12, True), (N, False)])
def test_operators_that_are_not_hermitian(key, k, complex):
    operators = [matrix("nonsymmetric", N, complex)]
    if complex:
        operators.append(matrix("flat", N) * (1 + 1j))  # symmetric
    for a in operators:
        _, _, result, _ = _estimate(key, jnp.exp, as_operator(a), k, "krylov-aware")
        assert result == tx.RESULTS.not_hermitian


@pytest.mark.x64
@CALLS
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_parameters_that_are_not_finite(key, estimator, k, bad):
    a = matrix("flat", N)
    a[2, 5] = bad
    value, error, result, _ = _call(tx.logdet, key, as_operator(a), k, estimator, {})
    assert result == tx.RESULTS.nonfinite
    assert not np.isfinite(value)
    assert np.isnan(error)


@pytest.mark.x64
@ONE
def test_lanes_fail_alone(estimator):
    lanes = np.stack([matrix("flat", N)] * 4)
    lanes[1, 0, 0] = np.nan
    lanes[2] = matrix("signed", N)

    @jax.jit
    @jax.vmap
    def run(a):
        operator = lx.MatrixLinearOperator(a)
        est = SPECTRAL[estimator]
        return tx.trace_function(jr.key(0), jnp.log, operator, 6, est, throw=False)

    estimates = run(as_array(lanes))
    R = tx.RESULTS
    expected = [R.successful, R.nonfinite, R.outside_domain, R.successful]
    for i, result in enumerate(expected):
        assert jax.tree.map(lambda x, i=i: x[i], estimates.result) == result
    assert estimates.value[0] == estimates.value[3]
    assert np.isfinite(np.asarray(estimates.value))[[0, 3]].all()


@pytest.mark.x64
def test_failures_are_raised_from_derivatives(key):
    def value(a):
        return tx.logdet(key, lx.MatrixLinearOperator(a), 4).value

    a = as_array(matrix("signed", N))
    with pytest.raises(Exception, match="not finite at an eigenvalue"):
        jax.block_until_ready(jax.jit(jax.grad(value))(a))


#
# Errors
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
        (lambda x: jnp.stack([x, x]), ValueError, r"scalars.*shapes \[\(2,\)\]"),
        (lambda x: {"a": x, "b": x[None]}, ValueError, r"\[\(\), \(1,\)\]"),
        (lambda x: None, ValueError, r"shapes \[\]"),
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
def test_swapped_arguments(key):
    with pytest.raises(TypeError, match="lineax linear operator"):
        tx.trace_function(key, _operator(), jnp.log, 4)
    with pytest.raises(TypeError, match="lineax linear operator"):
        tx.logdet(key, jnp.eye(3), 4)
    with pytest.raises(TypeError, match="lineax linear operator"):
        tx.logdet(key, jnp.eye(3), 4, shift=1.0)
    with pytest.raises(TypeError, match="lineax linear operator"):
        tx.trace_inverse(_operator(), key, 4)


@pytest.mark.wrong_types
@pytest.mark.x64
@pytest.mark.parametrize(
    "entry",
    [
        tx.logdet,
        tx.trace_inverse,
        tx.schatten_norm,
        tx.spectral_density,
    ],
)
def test_wrong_estimators_budgets_and_keys(key, entry):
    name = f"traceax.{entry.__name__}: "
    cases = [
        (TypeError, "SpectralEstimator", (key, _operator(), 4, tx.XTraceEstimator())),
        (TypeError, "pass an instance", (key, _operator(), 4, type(KRYLOV))),
        (ValueError, "at least 1, got 0", (key, _operator(), 0)),
        (TypeError, "got 2.0 of type float", (key, _operator(), 2.0)),
        (TypeError, "single key", (0, _operator(), 2)),
        (TypeError, "start", (_operator(), key, 2)),
    ]
    for kind, match, arguments in cases:
        with pytest.raises(kind, match=match) as error:
            entry(*arguments)
        assert str(error.value).startswith(name)
    rectangular = lx.MatrixLinearOperator(jnp.ones((3, 4)))
    with pytest.raises(ValueError, match=r"shape \(4,\).*to shape \(3,\)"):
        entry(key, rectangular, 2)


@pytest.mark.wrong_types
@pytest.mark.x64
def test_wrong_shifts(key):
    for entry in (tx.logdet, tx.trace_inverse):
        for shift in (jnp.ones(2), 1j, np.ones((1, 1))):
            with pytest.raises(
                ValueError, match=r"shift must be (a real scalar|real and)"
            ):
                entry(key, _operator(), 4, shift=shift)
        for shift in (None, "1", True):
            with pytest.raises(TypeError, match="shift must be a real scalar, got"):
                entry(key, _operator(), 4, shift=shift)


@pytest.mark.wrong_types
@pytest.mark.x64
def test_wrong_powers(key):
    for p in (0, -1.0, np.float32(-1), jnp.asarray(-1.0), np.array(0), math.nan):
        with pytest.raises(ValueError, match="p must be positive and finite, got"):
            tx.schatten_norm(key, _operator(), 4, p=p)
    with pytest.raises(
        TypeError, match="p must be a real scalar, got 'nuc' of type str; write p="
    ):
        tx.schatten_norm(key, _operator(), 4, p="nuc")
    for k in (4, N):
        of_traced = jax.jit(
            lambda p, k=k: tx.schatten_norm(key, _operator(), k, p=p, throw=False)
        )
        estimate = of_traced(-1.0)
        assert estimate.result == tx.RESULTS.outside_domain
        assert np.isnan(estimate.value)
        assert of_traced(2.0).result == tx.RESULTS.successful


@pytest.mark.wrong_types
@pytest.mark.x64
def test_wrong_lower_ends(key):
    for kind, lower in ((TypeError, "0"), (ValueError, jnp.ones(2))):
        with pytest.raises(kind, match="lower must be a real scalar, got"):
            tx.trace_function(key, jnp.log, _operator(), 4, lower=lower)


@pytest.mark.wrong_types
@pytest.mark.x64
def test_wrong_order_of_arguments(key):
    with pytest.raises(TypeError, match=r"start \(key, fn, operator, k\)"):
        tx.trace_function(key, _operator(), jnp.log, 4)


@pytest.mark.wrong_types
@pytest.mark.x64
def test_wrong_widths(key):
    density = tx.spectral_density(key, _operator(), N)
    for kind, width in ((ValueError, 0.0), (ValueError, -1), (TypeError, None)):
        with pytest.raises(kind, match="width must be"):
            density.density(jnp.ones(2), width)


@pytest.mark.x64
def test_nothing(key):
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
@pytest.mark.parametrize("kind", [type(KRYLOV), tx.LanczosQuadratureEstimator])
def test_wrong_estimator_options(kind):
    with pytest.raises(ValueError, match="num_probes must be at least 1, got 0"):
        kind(0)
    for bad in (2.0, True, "3"):
        with pytest.raises(TypeError, match="num_probes must be an int or None"):
            kind(bad)
    with pytest.raises(TypeError, match="pass an instance"):
        kind(sampler=tx.NormalSampler)
    assert kind(np.int64(3)).num_probes == 3


@pytest.mark.x64
def test_samplers_that_are_not_rotation_invariant():
    with pytest.raises(ValueError, match="rotation-invariant"):
        tx.KrylovAwareEstimator(sampler=tx.RademacherSampler())


#
# Transforms
#


def _parametric(theta, seed=0):
    a = as_array(matrix("flat", N, seed=seed))
    b = as_array(matrix("signed", N, seed=seed + 5))
    return lx.MatrixLinearOperator(a + theta[0] * b + theta[1] * b @ b)


def _logdet(theta, key):
    operator, shift = _parametric(theta), theta[0] ** 2
    return tx.logdet(key, operator, 6, KRYLOV, shift=shift, throw=False).value


@pytest.mark.x64
def test_transforms_agree_with_single_calls():
    thetas = as_array([[0.1, 0.2], [0.3, 0.1], [0.0, 0.5]])
    keys = jr.split(jr.key(1), 3)
    single = jax.jit(jax.value_and_grad(_logdet))
    lanes = [np.stack(x) for x in zip(*map(single, thetas, keys), strict=True)]

    batched = jax.jit(jax.vmap(jax.value_and_grad(_logdet)))
    for got, expected in zip(batched(thetas, keys), lanes, strict=True):
        assert_close(got, expected, rtol=1e4 * eps())
    assert len(np.unique(lanes[0])) == 3


@pytest.mark.x64
def test_the_whole_estimate_passes_through_jit():
    @jax.jit
    def run(theta, key):
        return tx.trace_function(key, jnp.log, _parametric(theta), 12, QUADRATURE)

    estimate = run(as_array([0.1, 0.2]), jr.key(0))
    low, high = estimate.confidence_interval()
    assert low < estimate.value < high
    again = QUADRATURE.estimate(estimate.state, 12)
    assert_close(again.value, estimate.value, rtol=100 * eps())


@pytest.mark.x64
def test_error_bars_are_not_differentiated(key):
    def error(theta):
        e = tx.trace_function(key, jnp.log, _parametric(theta), 6, KRYLOV)
        return e.standard_error

    assert not np.any(jax.jit(jax.grad(error))(as_array([0.1, 0.2])))


#
# What functions read
#


class _Counter:
    """A function with a state, equal to all others of its class."""

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


def _of_global(x):
    return _FACTORS["factor"] * x


def _mutable(kind):
    """A function of eigenvalues, `c x`, and how to set c."""
    counter = _Counter(1.0)
    # Of the working precision: JAX itself keeps what it converts.
    array = np.ones(2, float_dtype())
    match kind:
        case "object":
            return counter, lambda c: setattr(counter, "factor", c)
        case "bound method":
            return counter.times, lambda c: setattr(counter, "factor", c)
        case "array":
            return lambda x: jnp.dot(array, array) * x / 2, lambda c: array.fill(c**0.5)
        case "global":
            return _of_global, lambda c: _FACTORS.__setitem__("factor", c)
    raise ValueError(kind)


@pytest.mark.x64
@pytest.mark.parametrize("kind", ["object", "bound method", "array", "global"])
def test_what_a_function_reads_may_change(key, kind):
    operator = as_operator(matrix("flat", 4), psd=True)
    fn, set_factor = _mutable(kind)
    for c in (1.0, 3.0):
        set_factor(c)
        estimate = tx.trace_function(key, fn, operator, 4)
        assert_close(estimate.value, c * np.trace(matrix("flat", 4)))


@pytest.mark.x64
def test_equal_objects_are_different_functions(key):
    operator = as_operator(matrix("flat", 4))
    values = [
        tx.trace_function(key, _Counter(c), operator, 4).value for c in (1.0, 2.0)
    ]
    assert_close(values[1], 2 * values[0])


@pytest.mark.x64
def test_jitted_functions_that_close_over_tracers(key):
    operator, eigenvalues = as_operator(matrix("flat", N)), spectrum("flat", N)

    def value(s, k):
        fn = jax.jit(lambda x: jnp.log(x + s))
        return tx.trace_function(key, fn, operator, k, throw=False).value

    @jax.jit
    def both(s):
        lanes = jax.vmap(lambda s: value(s, N))(jnp.stack([s, 2 * s]))
        return jax.grad(value)(s, N), lanes

    slope, lanes = both(0.5)
    assert_close(slope, np.sum(1 / (eigenvalues + 0.5)))
    assert_close(lanes[1], np.sum(np.log(eigenvalues + 1)))


@pytest.mark.x64
def test_functions_of_the_library_compile_once(key):
    dense = as_operator(matrix("flat", N))
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


#
# Diagonals, constants, arguments
#


@pytest.mark.x64
def test_diagonals_are_summed(key):
    diagonal = jnp.linspace(1, 3, N, dtype=float_dtype())
    estimate = tx.logdet(key, lx.DiagonalLinearOperator(diagonal), 3, shift=0.5)
    assert_close(estimate.value, np.sum(np.log(np.asarray(diagonal) + 0.5)))
    assert estimate.standard_error == 0
    assert estimate.stats["num_matvecs"] == 0

    def value(diagonal):
        return tx.logdet(key, lx.DiagonalLinearOperator(diagonal), 3).value

    assert_close(jax.grad(value)(diagonal), 1 / diagonal)
    tagged = lx.MatrixLinearOperator(jnp.diag(diagonal), lx.diagonal_tag)
    assert_close(tx.logdet(key, tagged, 3).value, value(diagonal))
    # An estimator that is given is used.
    given = tx.logdet(key, tagged, 4, QUADRATURE)
    assert given.stats["num_matvecs"] > 2


@pytest.mark.x64
@pytest.mark.parametrize(
    ("diagonal", "result"),
    [
        (np.linspace(-1, 1, N), tx.RESULTS.outside_domain),
        (np.linspace(0, 1, N), tx.RESULTS.outside_domain),
        (np.full(N, 1 + 1j), tx.RESULTS.not_hermitian),
        (np.full(N, np.nan), tx.RESULTS.nonfinite),
    ],
)
def test_diagonals_fail_as_others_do(key, diagonal, result):
    operator = lx.DiagonalLinearOperator(jnp.asarray(diagonal))
    estimate = tx.logdet(key, operator, 3, throw=False)
    assert estimate.result == result


@pytest.mark.x64
def test_arguments_of_partial_functions_are_data(key):
    operator = as_operator(matrix("flat", N))

    def value(p, k):
        power = functools.partial(lambda q, x: x**q, p)
        return tx.trace_function(key, power, operator, k).value

    eigenvalues = spectrum("flat", N)
    found = jax.jit(jax.value_and_grad(value), static_argnums=1)(1.5, N)
    total = np.sum(eigenvalues**1.5)
    slope = np.sum(eigenvalues**1.5 * np.log(eigenvalues))
    assert_close(found, (total, slope))


@pytest.mark.x64
def test_functions_that_overflow(key):
    operator = as_operator(matrix("flat", N) * 1e3)
    _, _, result, _ = _estimate(key, jnp.exp, operator, 4, "krylov-aware")
    assert result == tx.RESULTS.nonfinite
