"""AdaptiveXTrace's split budget: compared with loops, tested for bias and at its edges."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import (
    assert_close,
    rounding,
    z_score,
)
from problems import as_operator, haar, matrix

import traceax as tx
from traceax._linalg import adaptive
from traceax.testing._checks import Subject, failures

N = 40
ADAPTIVE = tx.AdaptiveXTraceEstimator()


def _probes(key, start, number, a):
    block = ADAPTIVE.sampler.sample(key, len(a), start + number, jnp.asarray(a).dtype)
    return np.asarray(block)[:, start:]


def _sample(b, p, w, shift_probes, rank):
    """One probe's sample of tr(b): projector p, probe w, and a shift from other probes."""

    def quadratic(b, v):
        g = v - p @ v
        return np.vdot(g, b @ g)

    length = sum(quadratic(np.eye(len(b)), v) for v in shift_probes)
    c = sum(quadratic(b, v) for v in shift_probes) / length
    excess = quadratic(np.eye(len(b)), w) - len(b) + rank
    return np.trace(p @ b) + quadratic(b, w) - c * excess


def _basis(y, *left_out):
    """Projector onto the products without the last and `left_out`, and its rank."""
    kept = [j for j in range(y.shape[1] - 1) if j not in left_out]
    q, _ = np.linalg.qr(y[:, kept])
    return q @ q.conj().T, len(kept)


def _naive(a, w, fresh, b, uses_basis):
    """The value for matrix b, with the choices made for a."""
    h, y = w.shape[1], a @ w
    r, width = h - 1, fresh.shape[1]
    fresh = fresh[:, r:] if any(uses_basis) else fresh
    zero = np.zeros((len(b), len(b)))
    samples = []
    for i, uses in enumerate(uses_basis):
        shift_probes = [w[:, j] for j in ([r] if uses else range(h)) if j != i]
        p, rank = _basis(y, i) if uses else (zero, 0)
        samples.append(_sample(b, p, w[:, i], [*shift_probes, fresh[:, -1]], rank))
    p, rank = _basis(y) if any(uses_basis) else (zero, 0)
    shift_probes = list(w.T[r:]) if any(uses_basis) else list(w.T)
    fresh_mean = np.mean([_sample(b, p, v, shift_probes, rank) for v in fresh.T])
    fresh_number = width - r * uses_basis
    share = fresh_number / (h + fresh_number)
    return np.mean((1 - share) * samples + share * fresh_mean)


@pytest.mark.x64
@pytest.mark.parametrize(("k", "complex"), [(10, True), (17, False)])
def test_formulas_against_loops(complex, k):
    b = matrix("nonsymmetric", N, complex, seed=3)
    h = k // 2

    @jax.jit
    def run(a, key):
        return ADAPTIVE.compute(tx.init_state(key, lx.MatrixLinearOperator(a)), k)

    @jax.jit
    def choose(a, w):
        q, r = jnp.linalg.qr(a @ w)
        return adaptive.choose_basis(adaptive.dual_basis(r), r, q.conj().T @ w, N, k)[0]

    choices = set()
    for seed, name in enumerate(["flat", "exp", "nonsymmetric", "poly", "exp", "step"]):
        key, a = jr.key(seed), matrix(name, N, complex)
        w, fresh = _probes(key, 0, h, a), _probes(key, h, k - h, a)
        uses_basis = np.asarray(choose(jnp.asarray(a), w))
        choices.add((bool(np.any(uses_basis)), bool(np.all(uses_basis))))
        estimate, _, stats, (V, Z) = run(jnp.asarray(a), key)
        assert stats["basis"] == (h - 1 if any(uses_basis) else 0)
        value = _naive(a, w, fresh, a, uses_basis)
        assert_close(estimate, value)
        assert_close(jnp.sum(Z.conj() * (a @ V)), value)
        assert_close(jnp.sum(Z.conj() * (b @ V)), _naive(a, w, fresh, b, uses_basis))
    assert {(False, False), (True, True)} <= choices


def _one_choice_for_all(*args):
    """A biased choice: the majority decides, so each probe influences its own test."""
    uses_basis, energies = _choose(*args)
    majority = jnp.sum(uses_basis) > len(uses_basis) // 2
    return jnp.broadcast_to(majority, uses_basis.shape), energies


_choose = adaptive.choose_basis


@pytest.mark.x64
@pytest.mark.parametrize(
    ("name", "k", "complex"),
    [
        ("step", 16, False),
        ("nonsymmetric", 24, True),
        ("parallel", 12, False),
    ],
)
def test_bias(name, k, complex, monkeypatch):
    n, number = 80, 4_000
    a = matrix("nonsymmetric", n, complex)
    if name == "parallel":  # up to sign, all products equal one of three vectors
        a = np.where(np.arange(n * n).reshape(n, n) < 2, 1.0, 1e-10 * a)
    if name == "step":  # here tests choose differently
        u = haar(n, 1, complex)
        a = (u * np.where(np.arange(n) < 8, 1.0, 0.05)) @ u.conj().T
    b = matrix("nonsymmetric", n, complex, seed=5)

    def run():
        def run_once(key):
            state = tx.init_state(key, lx.MatrixLinearOperator(jnp.asarray(a)))
            value, _, _, (V, Z) = ADAPTIVE.compute(state, k)
            return value, jnp.sum(Z.conj() * (b @ V))

        keys = jr.split(jr.key(1), number)
        return jax.jit(lambda keys: jax.lax.map(run_once, keys, batch_size=100))(keys)

    value, derivative = run()
    assert z_score(value, np.trace(a)) < 4
    assert z_score(derivative, np.trace(b)) < 4
    if (name, complex) == ("step", False):
        monkeypatch.setattr(adaptive, "choose_basis", _one_choice_for_all)
        value, _ = run()
        assert z_score(value, np.trace(a)) > 5


def _edges(n):
    i = np.arange(n)
    return {
        "zero": np.zeros((n, n)),
        # We avoid integers, whose products with signs may be 0.
        "rank one": np.outer(np.ones(n), np.sqrt(i + 1.0)),
        "identity": np.eye(n),
        "diagonal": np.diag(1.0 + i),
        "low rank": np.where(i < 3, 1.0, 0.0)[:, None] * matrix("flat", n),
    }


@pytest.mark.parametrize(("n", "k"), [(2, 1), (9, 8), (20, 19)])
def test_edges(n, k):
    def run(a, key):
        estimate = ADAPTIVE.estimate(
            ADAPTIVE.init(key, lx.MatrixLinearOperator(a)), k, throw=False
        )
        return estimate.value, estimate._standard_error

    keys = jr.split(jr.key(0), 20)
    run = jax.jit(jax.vmap(jax.value_and_grad(run, has_aux=True), (None, 0)))
    for name, a in _edges(n).items():
        (values, errors), gradient = run(as_operator(a).matrix, keys)
        assert jnp.all(jnp.isfinite(values)), name
        assert jnp.all(jnp.isfinite(gradient)), name
        if k > 1:
            assert jnp.all(jnp.isfinite(errors)), name
        exact = {"zero", "identity"} | ({"rank one"} if k > 8 else set())
        if name in exact:
            truth = jnp.full(20, np.trace(a))
            assert_close(values, truth, atol=100 * rounding() * max(np.trace(a), 1.0))


@pytest.mark.x64
@pytest.mark.parametrize("check", ["bar", "budget"])
def test_conformance(check):
    assert not failures(Subject(ADAPTIVE, 0), check)


def test_estimates_cannot_be_resumed(key):
    operator = as_operator(matrix("exp", N))
    first = tx.trace(key, operator, 12)
    with pytest.raises(TypeError, match="can't resume from an earlier one"):
        ADAPTIVE.estimate(first.state, 12)
    with pytest.raises(TypeError, match="products of another estimator"):
        tx.XTraceEstimator().estimate(first.state, 12)


@pytest.mark.x64
def test_a_dominant_diagonal_costs_no_accuracy():
    i = np.arange(1, 101.0)
    a = np.diag(1 / i) + 1e-3 * matrix("nonsymmetric", 100)

    def error(estimator):
        def run_once(key):
            return tx.trace(key, as_operator(a), 24, estimator).value

        values = jax.jit(jax.vmap(run_once))(jr.split(jr.key(0), 200))
        return np.sqrt(np.mean((values - np.trace(a)) ** 2))

    assert error(ADAPTIVE) < 1.3 * error(tx.HutchinsonEstimator())


def test_stats_report_the_split(key):
    operator = as_operator(matrix("exp", N))
    assert tx.trace(key, operator, 24, ADAPTIVE).stats["basis"] == 11
    few = tx.trace(key, operator, 7, ADAPTIVE)
    same = tx.trace(key, operator, 7, tx.HutchinsonEstimator())
    assert_close(few.value, same.value)


@pytest.mark.x64
def test_probes_inside_the_basis():
    # The shift's probes lie in the basis up to rounding, so we must not estimate a
    # shift from their residuals.
    key = jr.split(jr.key(5), 20_000)[16_459]
    a = as_operator(np.kron(np.eye(3), np.ones((3, 3))))
    estimate = tx.trace(key, a, 8, ADAPTIVE)
    assert abs(estimate.value - 9) < 20
