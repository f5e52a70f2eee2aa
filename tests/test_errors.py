"""Errors name the argument, the value received and the remedy."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import (
    ESTIMATORS,
    FAMILIES,
    products_only,
)
from problems import as_operator, matrix

import traceax as tx

# These tests don't depend on the mode, so we run them in 64 bits only.
pytestmark = [pytest.mark.x64, pytest.mark.wrong_types]

N = 8


def _operator():
    return as_operator(matrix("flat", N))


def _raises(kind, match, *args, **kwargs):
    with pytest.raises(kind, match=match) as info:
        tx.trace(*args, **kwargs)
    assert str(info.value).startswith(("traceax.trace: ", "XNysTraceEstimator"))


@pytest.mark.parametrize(
    ("k", "kind", "match"),
    [
        (0, ValueError, "at least 1, got 0"),
        (-3, ValueError, "at least 1, got -3"),
        (2.0, TypeError, "got 2.0 of type float"),
        (True, TypeError, "boolean True"),
        (np.bool_(True), TypeError, "boolean"),
        (None, TypeError, "NoneType"),
        ("3", TypeError, "type str"),
        (jnp.asarray(3), TypeError, r"int\(k\)"),
    ],
)
def test_budgets(k, kind, match):
    _raises(kind, match, jr.key(0), _operator(), k)
    est = tx.XTraceEstimator()
    state = est.init(jr.key(0), _operator())
    with pytest.raises(kind, match=match):
        est.estimate(state, k)


def test_traced_budget():
    with pytest.raises(TypeError, match="traced value; pass it as a static argument"):
        jax.jit(lambda k: tx.trace(jr.key(0), _operator(), k).value)(3)


def test_numpy_integer_budget():
    estimate = tx.trace(jr.key(0), _operator(), np.int64(5))
    assert int(estimate.stats["num_matvecs"]) <= 5


def test_operators():
    a = jnp.ones((3, 3))
    _raises(TypeError, r"shape \(3, 3\).*traceax.as_operator\(x\)", jr.key(0), a, 2)
    _raises(TypeError, "type function", jr.key(0), lambda v: v, 2)
    _raises(TypeError, r"start\s+\(key, operator\)", _operator(), jr.key(0), 2)
    rectangular = lx.MatrixLinearOperator(jnp.ones((3, 4)))
    _raises(ValueError, r"shape \(4,\).*to shape \(3,\)", jr.key(0), rectangular, 2)
    structure = jax.ShapeDtypeStruct((4,), jnp.float32)
    reshape = lx.FunctionLinearOperator(lambda v: v.reshape(2, 2), structure)
    _raises(ValueError, r"shape \(4,\).*shape \(2, 2\)", jr.key(0), reshape, 2)
    halve = lx.FunctionLinearOperator(lambda v: v.astype(jnp.float16), structure)
    _raises(ValueError, "float32 to .*float16", jr.key(0), halve, 2)
    mixed = lx.IdentityLinearOperator(
        (structure, jax.ShapeDtypeStruct((2,), jnp.complex64))
    )
    _raises(ValueError, "all real or all complex", jr.key(0), mixed, 2)
    for estimator in ESTIMATORS.values():
        with pytest.raises(TypeError, match="lineax linear operator"):
            estimator.init(jr.key(0), a)


@pytest.mark.parametrize(
    "key",
    [0, None, jnp.zeros(2), jnp.zeros((2, 2), jnp.uint32), jnp.zeros(3, jnp.uint32)],
)
def test_keys(key):
    match = "key must be a single key, got .*jax.random.key"
    _raises(TypeError, match, key, _operator(), 2)
    for estimator in FAMILIES:
        with pytest.raises(TypeError, match="single key"):
            ESTIMATORS[estimator].init(key, as_operator(np.eye(3), psd=True))


def test_a_batch_of_keys():
    _raises(TypeError, "shape .2,.*jax.vmap", jr.split(jr.key(0)), _operator(), 2)


def test_estimators():
    match = "pass an instance"
    _raises(TypeError, match, jr.key(0), _operator(), 2, tx.XTraceEstimator)
    for kind in (tx.XTraceEstimator, tx.XNysTraceEstimator):
        with pytest.raises(ValueError, match=r"rotation-invariant.*SphereSampler"):
            kind(tx.RademacherSampler())
    with pytest.raises(TypeError, match=match):
        tx.HutchinsonEstimator(jnp.float32)


def test_untagged_operator_for_nystrom():
    match = "TaggedLinearOperator.*XTraceEstimator"
    _raises(ValueError, match, jr.key(0), _operator(), 2, tx.XNysTraceEstimator())


def test_a_wrong_tag():
    estimate = tx.trace(
        jr.key(0), as_operator(matrix("signed", 30), psd=True), 12, throw=False
    )
    assert estimate.result == tx.RESULTS.not_semidefinite
    with pytest.raises(Exception, match="Remove the tag"):
        tx.trace(jr.key(0), as_operator(-matrix("flat", 30), psd=True), 12)


def test_confidence_levels():
    estimate = tx.trace(jr.key(0), _operator(), 5)
    for level in (0, 1, 95, -0.5, np.float32(95), math.nan):
        with pytest.raises(ValueError, match=r"strictly between .*write 0\.95"):
            estimate.confidence_interval(level)
    for level in ("0.95", None, [0.95], jnp.asarray(0.95), 0.95 + 0j, True):
        with pytest.raises(TypeError, match=r"Python number, got .*write 0\.95"):
            estimate.confidence_interval(level)
    half = estimate.confidence_interval(0.5)
    assert estimate.confidence_interval(np.float32(0.5)) == half


def test_unknown_options():
    key, operator, vector = jr.key(0), _operator(), jnp.ones(N)
    for fn, *arguments in (
        (tx.logdet, key, operator),
        (tx.trace_inverse, key, operator),
        (tx.schatten_norm, key, operator),
        (tx.inv_quad_logdet, key, operator, vector),
        (tx.gaussian_log_likelihood, key, operator, vector),
    ):
        for option in ("lower", "monotone", "preconditoner", "where"):
            match = rf"^{fn.__name__}\(\) got an unexpected keyword argument '{option}'"
            with pytest.raises(TypeError, match=match):
                fn(*arguments, 4, **{option: 0.5})


def test_unused_trace_arguments_are_checked():
    key, operator = jr.key(0), _operator()
    for options in ({"preconditioner": 2, "shift": 1.0}, {"shift": jnp.ones(N)}):
        with pytest.raises(
            TypeError, match="logdet: trace must be a real scalar, got 'no"
        ):
            tx.logdet(key, operator, 4, trace="nonsense", **options)


def test_default_budgets_for_many_right_hand_sides():
    operator = as_operator(matrix("flat", 40))
    for columns in (39, 45):
        y = jnp.ones((40, columns))
        with pytest.raises(
            ValueError, match=f"k must be at least {columns + 1}, .*none"
        ):
            tx.inv_quad_logdet(jr.key(0), products_only(operator), y, shift=1.0)
        # We read the entries for an exact answer.
        terms = tx.inv_quad_logdet(jr.key(0), operator, y, shift=1.0)
        assert terms.solution.shape == y.shape


class _Wrong(tx.TraceEstimator):
    columns: int
    stats: dict = eqx.field(static=True, default_factory=dict)

    def compute(self, state, k):
        V = jnp.ones((8, k))
        return jnp.sum(V), jnp.ones(()), self.stats, (V, V[:, : self.columns])


def test_blocks_and_stats_of_custom_estimators():
    known = {"num_matvecs": 3}
    for estimator, match in (
        (
            _Wrong(1, known),
            r"_Wrong.compute: blocks V and Z must have one shape \(8, p\), got .*\(8, 1\)",
        ),
        (_Wrong(3), r"_Wrong.compute: stats must contain \"num_matvecs\""),
    ):
        with pytest.raises(ValueError, match=match):
            tx.trace(jr.key(0), _operator(), 3, estimator)


def test_the_remedies_for_log_determinants_of_other_matrices():
    message = tx.RESULTS[tx.RESULTS.not_hermitian]
    assert "I - rho D^-1/2 B D^-1/2" in message
    assert "A.T @ A" in message
    n, rho, key = 40, 0.8, jr.key(0)
    rng = np.random.default_rng(0)
    B = np.triu(rng.random((n, n)) < 0.3, 1) * rng.random((n, n))
    B = B + B.T
    D, one = B.sum(axis=1), np.eye(n)
    A = one - rho * B / D[:, None]
    exact = np.linalg.slogdet(A)[1]

    def logdet(matrix, k=None):
        operator = tx.as_operator(matrix, tags=lx.positive_semidefinite_tag)
        return tx.logdet(key, operator, k)

    with pytest.raises(RuntimeError, match=r"A\.T @ A"):
        logdet(A)
    similar = one - rho * B / np.sqrt(D[:, None] * D[None])
    for k in (None, 25):
        for remedy, factor in ((similar, 1.0), (A.T @ A, 0.5)):
            estimate = logdet(remedy, k)
            bound = factor * 4 * estimate.standard_error + 1e-10
            assert abs(factor * estimate.value - exact) <= bound
            assert bound < abs(exact)
    # A complex matrix needs its adjoint.
    A = A * np.exp(1j * rng.random((1, n)))
    estimate = logdet(A.conj().T @ A)
    assert abs(estimate.value / 2 - exact) < 1e-10
