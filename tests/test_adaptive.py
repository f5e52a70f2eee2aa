"""The split budget: against loops with a projector a test, for bias, and at its edges."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import as_operator, assert_close, haar, matrix, rounding, z_score

import traceax as tx
from traceax._linalg import adaptive
from traceax.testing._checks import Subject, failures

N = 40
ADAPTIVE = tx.AdaptiveXTraceEstimator()
both = pytest.mark.parametrize("complex", [False, True])


def _probes(key, start, number, a):
    block = ADAPTIVE.sampler.sample(key, len(a), start + number, jnp.asarray(a).dtype)
    return np.asarray(block)[:, start:]


def _sample(b, p, w, shift_probes, rank):
    """The sample by test w of matrix b beside the projector p, with the shift by others."""

    def quadratic(b, v):
        g = v - p @ v
        return np.vdot(g, b @ g)

    length = sum(quadratic(np.eye(len(b)), v) for v in shift_probes)
    c = sum(quadratic(b, v) for v in shift_probes) / length
    excess = quadratic(np.eye(len(b)), w) - len(b) + rank
    return np.trace(p @ b) + quadratic(b, w) - c * excess


def _basis(y, *left_out):
    """The projector on the products but the last and those left out, and its rank."""
    kept = [j for j in range(y.shape[1] - 1) if j not in left_out]
    q, _ = np.linalg.qr(y[:, kept])
    return q @ q.conj().T, len(kept)


def _naive_choice(y, w, k):
    """Whether each test uses the basis, each product left out of what it is measured by."""
    n, h = w.shape
    r, uses_basis = h - 1, []
    for i in range(h):
        others = set(range(h)) - {i}
        energies = []
        for uses in (False, True):
            residuals = []
            for j in others:
                p = _basis(y, i, j)[0] if uses else np.zeros((n, n))
                residuals.append((w[:, j], y[:, j] - p @ y[:, j]))
            energy = np.mean([np.vdot(e, e).real for _, e in residuals])
            mean = np.mean([np.vdot(v, e) for v, e in residuals])
            dimension = n - uses * (r - (i < r))
            energies.append(max(energy - abs(mean) ** 2 / dimension, energy / 1000))
        samples = [np.vdot(w[:, j], y[:, j]) for j in others]
        v_0, v_r = energies
        v_0 = min(v_0, (1 + 30 / h) * np.var(samples, ddof=1) / 2)
        direction = v_r * (max(v_0 / v_r, 1) ** (1 / r) - 1)
        error = v_r / (k - r) + r * (r - 1) / (k - r) ** 2 * direction / 4
        uses_basis.append(error < v_0 / k)
    return np.array(uses_basis)


def _naive(a, w, fresh, b, uses_basis):
    """Samples of the first tests and the value, of matrix b for choices from a."""
    h, y = w.shape[1], a @ w
    r, width = h - 1, fresh.shape[1]
    fresh = fresh[:, r:] if any(uses_basis) else fresh
    zero = np.zeros((len(b), len(b)))
    samples = []
    for i, uses in enumerate(uses_basis):
        outside = [w[:, j] for j in ([r] if uses else range(h)) if j != i]
        p, rank = _basis(y, i) if uses else (zero, 0)
        samples.append(_sample(b, p, w[:, i], [*outside, fresh[:, -1]], rank))
    p, rank = _basis(y) if any(uses_basis) else (zero, 0)
    outside = list(w.T[r:]) if any(uses_basis) else list(w.T)
    fresh_mean = np.mean([_sample(b, p, v, outside, rank) for v in fresh.T])
    fresh_number = width - r * uses_basis
    share = fresh_number / (h + fresh_number)
    return samples, np.mean((1 - share) * samples + share * fresh_mean)


@pytest.mark.x64
@pytest.mark.parametrize("k", [10, 17])
@both
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
        uses_basis = _naive_choice(a @ w, w, k)
        np.testing.assert_array_equal(choose(jnp.asarray(a), w), uses_basis)
        choices.add((bool(np.any(uses_basis)), bool(np.all(uses_basis))))
        estimate, _, stats, (V, Z) = run(jnp.asarray(a), key)
        assert stats["basis"] == (h - 1 if any(uses_basis) else 0)
        _, value = _naive(a, w, fresh, a, uses_basis)
        assert_close(estimate, value)
        assert_close(jnp.sum(Z.conj() * (a @ V)), value)
        assert_close(jnp.sum(Z.conj() * (b @ V)), _naive(a, w, fresh, b, uses_basis)[1])
    assert {(False, False), (True, True)} <= choices


@pytest.mark.x64
@both
def test_samples_and_their_covariance_against_loops(complex):
    a, h, r = matrix("exp", N, complex), 8, 7
    key = jr.key(2)
    w, fresh = _probes(key, 0, h, a), _probes(key, h, h, a)
    y = a @ w
    uses_basis = np.asarray([True, False, True, True, False, True, True, True])

    @jax.jit
    def run(a, w, fresh):
        q, factor = jnp.linalg.qr(a @ w)
        plan = adaptive.plan_tests(
            adaptive.dual_basis(factor), jnp.asarray(uses_basis), h
        )
        x = jnp.where(plan.in_basis[None, :], q, fresh)
        v = jnp.concatenate([w, x], axis=1)
        form, gram = v.conj().T @ a @ v, v.conj().T @ v
        samples, shifts = adaptive.test_samples(form, gram, N, plan)
        weights = adaptive.sample_weights(plan)
        covariance = adaptive.covariance(form, gram, N, plan, shifts, weights)
        return samples, shifts, weights, covariance

    samples, shifts, weights, covariance = map(np.asarray, run(a, w, fresh))
    naive, value = _naive(a, w, fresh, a, uses_basis)
    assert_close(np.sum(weights), 1.0)
    assert_close(samples[:h], naive)
    assert_close(np.sum(weights * samples), value)

    def sample(i, *left_out):
        p, rank = _basis(y, i, *left_out)
        g = w[:, i] - p @ w[:, i]
        shift = shifts[i] * (np.vdot(g, g) - N + rank)
        return np.trace(p @ a) + np.vdot(g, a @ g) - shift

    expected = 0.0
    users = [i for i in range(r) if uses_basis[i]]
    for i in users:
        for j in set(users) - {i}:
            change = np.vdot(sample(j, i) - sample(j), sample(i, j) - sample(i))
            expected += weights[i] * weights[j] * change.real
    assert expected > 0
    assert_close(covariance, expected, rtol=1e-6)


def _one_choice_for_all(*args):
    """A choice in which each test has a say: it sees its own probe."""
    uses_basis, energies = _choose(*args)
    majority = jnp.sum(uses_basis) > len(uses_basis) // 2
    return jnp.broadcast_to(majority, uses_basis.shape), energies


_choose = adaptive.choose_basis


@pytest.mark.x64
@pytest.mark.parametrize(
    ("name", "k", "complex"),
    [
        ("step", 16, False),
        ("step", 24, True),
        ("nonsymmetric", 24, False),
        ("parallel", 12, False),
    ],
)
def test_bias(name, k, complex, monkeypatch):
    n, number = 80, 4_000
    a = matrix("nonsymmetric", n, complex)
    if name == "parallel":  # products are, but for their signs, one of three vectors
        a = np.where(np.arange(n * n).reshape(n, n) < 2, 1.0, 1e-10 * a)
    if name == "step":  # for which tests choose differently
        u = haar(n, 1, complex)
        a = (u * np.where(np.arange(n) < 8, 1.0, 0.05)) @ u.conj().T
    b = matrix("nonsymmetric", n, complex, seed=5)

    def run():
        def one(key):
            state = tx.init_state(key, lx.MatrixLinearOperator(jnp.asarray(a)))
            value, _, _, (V, Z) = ADAPTIVE.compute(state, k)
            return value, jnp.sum(Z.conj() * (b @ V))

        keys = jr.split(jr.key(1), number)
        return jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=100))(keys)

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
        # Not of integers, whose products with signs may be 0.
        "rank one": np.outer(np.ones(n), np.sqrt(i + 1.0)),
        "identity": np.eye(n),
        "diagonal": np.diag(1.0 + i),
        "low rank": np.where(i < 3, 1.0, 0.0)[:, None] * matrix("flat", n),
    }


@pytest.mark.parametrize(("n", "k"), [(2, 1), (9, 8), (20, 9), (20, 19), (40, 16)])
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
@pytest.mark.parametrize("check", ["budget", "exact", "failure"])
def test_conformance(check):
    assert not failures(Subject(ADAPTIVE, 0), check)


def test_an_estimate_is_not_gone_on_from(key):
    operator = as_operator(matrix("exp", N))
    first = tx.trace(key, operator, 12)
    with pytest.raises(TypeError, match="can't go on from an earlier one"):
        ADAPTIVE.estimate(first.state, 12)
    with pytest.raises(TypeError, match="products of another estimator"):
        tx.XTraceEstimator().estimate(first.state, 12)


@pytest.mark.x64
def test_a_diagonal_is_not_seen():
    i = np.arange(1, 101.0)
    a = np.diag(1 / i) + 1e-3 * matrix("nonsymmetric", 100)

    def error(estimator):
        def one(key):
            return tx.trace(key, as_operator(a), 24, estimator).value

        values = jax.jit(jax.vmap(one))(jr.split(jr.key(0), 200))
        return np.sqrt(np.mean((values - np.trace(a)) ** 2))

    assert error(ADAPTIVE) < 1.3 * error(tx.HutchinsonEstimator())


def test_stats_say_how_products_were_split(key):
    def basis(name):
        estimate = tx.trace(key, as_operator(matrix(name, N)), 24, ADAPTIVE)
        return int(estimate.stats["basis"])

    assert basis("exp") == 11
    few = tx.trace(key, as_operator(matrix("exp", N)), 7, ADAPTIVE)
    same = tx.trace(key, as_operator(matrix("exp", N)), 7, tx.HutchinsonEstimator())
    assert_close(few.value, same.value)


@pytest.mark.x64
def test_tests_that_lie_in_the_basis():
    # What the basis leaves of the probes of a shift is rounding: no shift is made of that.
    key = jr.split(jr.key(5), 20_000)[16_459]
    a = as_operator(np.kron(np.eye(3), np.ones((3, 3))))
    estimate = tx.trace(key, a, 8, ADAPTIVE)
    assert abs(estimate.value - 9) < 20
