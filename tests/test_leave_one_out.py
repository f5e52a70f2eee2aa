"""Compare fast leave-one-out formulas with loops that leave probes out."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import (
    assert_close,
    draw,
    rounding,
)
from problems import as_operator, matrix

import traceax as tx
from traceax._error_bar import gram_squared_skewness, leave_one_out_bar
from traceax._linalg.dense import column_dots, inner, orthonormalise
from traceax._linalg.leave_one_out import (
    ProbeSet,
    all_pairs,
    leave_one_out,
    leave_one_out_traces,
    stand_in,
)
from traceax._linalg.nystrom import nystrom_factor, nystrom_traces
from traceax._linalg.nystrom import stand_in as nystrom_stand_in
from traceax._operators.space import apply_block

N, M = 20, 5


def _probes(key, a, m=M):
    return np.asarray(draw(tx.NormalSampler(), key, N, m, as_operator(a).matrix.dtype))


def _projector(y):
    q, _ = np.linalg.qr(y)
    return q @ q.conj().T


def _naive_trace(a, omega, i, left_out, resphere):
    """Leave `left_out` out of the range, and test on probe i."""
    others = [j for j in range(omega.shape[1]) if j not in left_out]
    p = _projector(a @ omega[:, others]) if others else np.zeros((N, N))
    g = omega[:, i] - p @ omega[:, i]
    weight = (N - len(others)) / np.linalg.norm(g) ** 2 if resphere else 1.0
    return np.trace(p @ a) + weight * np.vdot(g, a @ g), p, g, weight


def _pad(x, columns, rows=None):
    """Pad an array with zeros, to leave room for more columns."""
    x = jnp.asarray(x)
    more = [rows - x.shape[0] if rows else 0, columns - x.shape[1]]
    return jnp.pad(x, [(0, number) for number in more])


# With room M all columns are filled, and with M + 3 three stay empty.


@pytest.mark.x64
@pytest.mark.parametrize(
    ("name", "complex", "room", "resphere"),
    [
        ("flat", False, M, True),
        ("exp", False, M + 3, False),
        ("nonsymmetric", True, M + 3, True),
    ],
)
def test_xtrace_formulas_against_a_loop(key, name, complex, room, resphere):
    a = matrix(name, N, complex)
    omega = _probes(key, a)
    operator = as_operator(a)
    Y = apply_block(operator, jnp.asarray(omega))
    Q, R = orthonormalise(Y)
    Omega, Q, Y = (_pad(x, room) for x in (omega, Q, Y))
    R = _pad(R, room, room)
    active = None if room == M else jnp.arange(room) < M
    AQ, squares = apply_block(operator, Q), jnp.real(column_dots(Omega, Omega))
    T = inner(AQ, Omega) if name == "nonsymmetric" else R
    probes = ProbeSet(N, room, active, resphere)
    loo = leave_one_out(inner(Q, Omega), squares, R, probes)
    paired = leave_one_out_traces(inner(Q, AQ), T, column_dots(Omega, Y), loo)
    samples, pairs = paired.samples, paired.without
    average = np.zeros((N, N), omega.dtype)
    for i in range(M):
        expected, p, g, weight = _naive_trace(a, omega, i, {i}, resphere)
        assert_close(samples[i], expected)
        average += (p + weight * np.outer(g, g.conj())) / M
        for j in set(range(M)) - {i}:
            expected, *_ = _naive_trace(a, omega, i, {i, j}, resphere)
            assert_close(pairs[i, j], expected)
    stand_ins = stand_in(Omega, Q, loo)
    assert_close(sum(V @ Z.conj().T for V, Z in stand_ins), average, atol=1e-10)
    assert all(jnp.all(x[:, M:] == 0) for pair in stand_ins for x in pair)


@pytest.mark.x64
@pytest.mark.parametrize(
    ("complex", "room", "resphere"),
    [(False, M, True), (True, M + 3, True), (False, M + 3, False)],
)
def test_nystrom_formulas_against_a_loop(key, complex, room, resphere):
    a = matrix("flat", N, complex)
    omega = _probes(key, a)
    u, t = np.linalg.qr(omega)
    columns = u if resphere else omega
    U, AU = (_pad(x, room) for x in (u, a @ u))
    T = _pad(t, room, room)
    active = None if room == M else jnp.arange(room) < M
    probes = ProbeSet(N, room, active, resphere)
    factor = nystrom_factor(U, T, -AU, -1, probes)
    assert not factor.is_invalid
    paired = nystrom_traces(factor)
    samples, pairs, mu = (
        x * abs(factor.scale) for x in (paired.samples, paired.without, factor.mu)
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
    # XTrace has the same blocks for the same probes.
    average = np.zeros((N, N), omega.dtype)
    for i in range(M):
        _, p, g, weight = _naive_trace(a, omega, i, {i}, resphere)
        average += (p + weight * np.outer(g, g.conj())) / M
    stand_ins, _ = nystrom_stand_in(U, T, AU, probes)
    assert_close(sum(V @ Z.conj().T for V, Z in stand_ins), average, atol=1e-10)
    assert all(jnp.all(x[:, M:] == 0) for pair in stand_ins for x in pair)


@pytest.mark.x64
def test_wrong_tags_are_detected(key):
    u, t = np.linalg.qr(_probes(key, matrix("signed", N)))
    for a, sign in ((matrix("signed", N), 1), (matrix("flat", N), -1)):
        probes = ProbeSet(*u.shape, None, True)
        factor = nystrom_factor(*map(jnp.asarray, (u, t, a @ u)), sign, probes)
        assert factor.is_invalid


class _OfAnyLength(tx.IndexedSampler):
    """Normal probes, some a million times as long as others."""

    rotation_invariant = True

    def probes(self, key, start, n, k, dtype):
        normal = tx.NormalSampler().probes(key, start, n, k, dtype)
        powers = (3 * jnp.arange(k) + start) % 11
        return normal * jnp.exp2(2 * powers.astype(dtype))[None, :]


@pytest.mark.parametrize(("name", "k"), [("xtrace", 12), ("xnystrace", 8)])
def test_resphering_takes_probes_of_any_length(key, name, k):
    make = {"xtrace": tx.XTraceEstimator, "xnystrace": tx.XNysTraceEstimator}[name]
    operator = as_operator(matrix("exp", 70), psd=True)
    plain, scaled = (
        tx.trace(key, operator, k, make(sampler))
        for sampler in (tx.NormalSampler(), _OfAnyLength())
    )
    assert_close(plain.value, scaled.value, rtol=rounding())
    assert_close(plain.standard_error, scaled.standard_error, rtol=100 * rounding())


@pytest.mark.x64
def test_the_bar_ignores_empty_room(key):
    m, d = 6, jr.normal(key, (6, 6))
    t = d[0]
    p = t[:, None] - 0.2 * (d + d.T)
    alone = leave_one_out_bar(all_pairs(t, p, jnp.zeros(())))
    mean, error, freedom = alone
    shares = (t - t.mean()) ** 2 / (m * (m - 1))
    change = (t[:, None] - p) * (t[None, :] - p.T) * (1 - jnp.eye(m)) / (m * (m - 1))
    variance = jnp.maximum(jnp.sum(shares) + jnp.sum(change), jnp.sum(shares) / 2)
    assert_close(mean, t.mean())
    assert_close(error, jnp.sqrt(variance) * (1 + 1 / freedom / 4))
    # Empty room must not change the error bar.
    longer = jnp.pad(t, (0, 2), constant_values=7.0)
    wider = jnp.pad(p, ((0, 2), (0, 2)), constant_values=jnp.inf)
    active = jnp.arange(m + 2) < m
    among = leave_one_out_bar(all_pairs(longer, wider, jnp.zeros(()), active), active)
    for x, y in zip(among, alone, strict=True):
        assert_close(x, y)


@pytest.mark.x64
def test_skewness_from_a_gram_matrix():
    # We draw many probes for a spectrum with skewed samples.
    spectrum = jnp.asarray(np.arange(1, 31.0) ** -1.5)
    probes = draw(tx.NormalSampler(), jr.key(0), 30, 2000, jnp.float64)
    gram = probes.T @ (spectrum[:, None] * probes)
    exact = 8 * jnp.sum(spectrum**3) ** 2 / jnp.sum(spectrum**2) ** 3
    assert_close(gram_squared_skewness(gram), exact, rtol=0.1)
    # Zeros stand for missing probes.
    active, padded = jnp.arange(2100) < 2000, jnp.pad(gram, (0, 100))
    assert_close(gram_squared_skewness(padded, active), gram_squared_skewness(gram))


def test_ties_ignore_multiples_of_the_identity():
    # Signs are exact on the identity, so only the small remainder has a variance.
    n, keys = 40, jr.split(jr.key(1), 300)
    rest = jr.normal(jr.key(0), (n, n))
    operator = lx.MatrixLinearOperator(
        jnp.eye(n) + 1e-3 * (rest - jnp.diag(jnp.diag(rest)))
    )

    def run_once(key, k):
        estimate = tx.trace(key, operator, k, tx.HutchinsonEstimator())
        return estimate.value, estimate.standard_error

    truth = jnp.trace(operator.as_matrix())
    for k in (4, 8):
        values, errors = jax.vmap(lambda key, k=k: run_once(key, k))(keys)
        spread = jnp.sqrt(jnp.mean((values - truth) ** 2))
        assert_close(jnp.median(errors), spread, rtol=0.3)
