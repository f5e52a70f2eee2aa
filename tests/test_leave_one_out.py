"""The fast leave-one-out formulas against loops that leave probes out."""

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import as_operator, assert_close, matrix

import traceax as tx
from traceax._estimators.xnystrace import _leave_one_out_traces as nystrom_traces
from traceax._leave_one_out import leave_one_out, leave_one_out_traces, stand_in
from traceax._operator import apply_block
from traceax._orthogonal import qr
from traceax._standard_error import leave_one_out_samples

N, M = 20, 5


def _probes(key, a, m=M):
    return np.asarray(tx.NormalSampler().sample(key, N, m, as_operator(a).matrix.dtype))


def _projector(y):
    q, _ = np.linalg.qr(y)
    return q @ q.conj().T


def _naive_trace(a, omega, i, left_out, resphere):
    """Leave `left_out` out of the range, test on probe i."""
    others = [j for j in range(omega.shape[1]) if j not in left_out]
    p = _projector(a @ omega[:, others]) if others else np.zeros((N, N))
    g = omega[:, i] - p @ omega[:, i]
    weight = (N - len(others)) / np.linalg.norm(g) ** 2 if resphere else 1.0
    return np.trace(p @ a) + weight * np.vdot(g, a @ g), p, g, weight


@pytest.mark.x64
@pytest.mark.parametrize("resphere", [True, False])
@pytest.mark.parametrize("complex", [False, True])
@pytest.mark.parametrize("name", ["flat", "exp", "nonsymmetric"])
def test_xtrace_formulas_against_a_loop(key, name, complex, resphere):
    a = matrix(name, N, complex)
    omega = _probes(key, a)
    operator = as_operator(a)
    Y = apply_block(operator, jnp.asarray(omega))
    Q, R = qr(Y)
    loo = leave_one_out(jnp.asarray(omega), Q, R, resphere=resphere)
    samples, pairs = leave_one_out_traces(
        jnp.asarray(omega), Y, apply_block(operator, loo.Q), loo, resphere=resphere
    )
    average = np.zeros((N, N), omega.dtype)
    for i in range(M):
        expected, p, g, weight = _naive_trace(a, omega, i, {i}, resphere)
        assert_close(samples[i], expected)
        average += (p + weight * np.outer(g, g.conj())) / M
        for j in set(range(M)) - {i}:
            expected, *_ = _naive_trace(a, omega, i, {i, j}, resphere)
            assert_close(pairs[i, j], expected)
    V, Z = stand_in(jnp.asarray(omega), loo)
    assert_close(V @ Z.conj().T, average, atol=1e-10)


@pytest.mark.x64
@pytest.mark.parametrize("complex", [False, True])
@pytest.mark.parametrize("resphere", [True, False])
def test_nystrom_formulas_against_a_loop(key, complex, resphere):
    a = matrix("flat", N, complex)
    omega = _probes(key, a)
    u, t = np.linalg.qr(omega)
    columns = u if resphere else omega
    samples, pairs, mu, _ = nystrom_traces(
        jnp.asarray(u), jnp.asarray(t), jnp.asarray(a @ u), resphere=resphere
    )
    shifted = a + float(mu) * np.eye(N)

    def naive(i, left_out):
        others = [j for j in range(M) if j not in left_out]
        c = columns[:, others]
        y = shifted @ c
        nystrom = y @ np.linalg.solve(c.conj().T @ y, y.conj().T)
        v = columns[:, i]
        weight = N - len(others) if resphere else 1
        return (np.trace(nystrom) + weight * np.vdot(v, (shifted - nystrom) @ v)).real

    for i in range(M):
        assert_close(samples[i], naive(i, {i}))
        for j in set(range(M)) - {i}:
            assert_close(pairs[i, j], naive(i, {i, j}))


@pytest.mark.x64
def test_the_standard_error_is_its_formula(key):
    rng = np.random.default_rng(0)
    m = 6
    t, p = rng.normal(size=m), rng.normal(size=(m, m)) * 0.1
    _, error = leave_one_out_samples(jnp.asarray(t), jnp.asarray(p))
    _, orthogonal = leave_one_out_samples(jnp.asarray(t), jnp.asarray(p), 9)
    covariance = 0.0
    for i in range(m):
        for j in set(range(m)) - {i}:
            covariance += (t[i] - p[i, j]) * (t[j] - p[j, i]) / (m * (m - 1))
    variance = t.var(ddof=1)
    assert_close(error**2, variance / m + max(covariance, 0))
    assert_close(orthogonal**2, variance / m + max(covariance + variance / 8, 0))
