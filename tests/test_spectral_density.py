"""A density answers further questions from its Krylov space."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from problems import as_array, as_operator
from spectral_helpers import eps, to_double

import traceax as tx

N, K = 60, 24


def _functions(x):
    many = jnp.exp(-x) * jnp.arange(1.0, 4.0)
    return {"array": many, "log": jnp.log(x + 0.1), "root": jnp.sqrt(jnp.abs(x))}


def _matrix():
    # Away from 0, where the root has no derivative.
    eigenvalues = np.linspace(0.3, 3, N) ** 2
    Q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(N, N)))
    return as_array(Q * eigenvalues @ Q.T)


def _answers(estimate):
    return estimate.value, estimate.standard_error, estimate.confidence_interval()


@pytest.mark.x64
@pytest.mark.parametrize("k", [K, N])
def test_answers_equal_a_fresh_run(k):
    def operator(a):
        return lx.MatrixLinearOperator(a, lx.positive_semidefinite_tag)

    def fresh(key, a):
        return tx.trace_function(key, _functions, operator(a), k)

    def kept(key, a):
        return tx.spectral_density(key, operator(a), k).trace(_functions)

    def all_of(run):
        def values(a, key):
            estimate = run(key, a)
            total = sum(map(jnp.sum, jax.tree.leaves(estimate.value)))
            return total, _answers(estimate)

        program = jax.value_and_grad(values, has_aux=True)
        keys = jr.split(jr.key(0), 2)
        arrays = jax.tree.leaves(jax.jit(jax.vmap(program, (None, 0)))(_matrix(), keys))
        return map(to_double, arrays)

    # XLA rounds both programs differently.
    for x, y in zip(all_of(fresh), all_of(kept), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-9 * np.max(np.abs(y)))


def test_questions_take_no_product():
    a, calls = _matrix(), []

    def product(v):
        jax.debug.callback(lambda: calls.append(1))
        return a @ v

    operator = as_operator(a)
    operator = lx.FunctionLinearOperator(
        product, operator.in_structure(), lx.symmetric_tag
    )
    spectrum = eqx.filter_jit(tx.spectral_density)(jr.key(0), operator, K)
    jax.effects_barrier()
    before = len(calls)
    assert before > 0
    estimate = spectrum.trace(jnp.exp)
    assert estimate.stats["num_matvecs"] == K
    jax.block_until_ready(spectrum.count(0, 1))
    jax.effects_barrier()
    assert len(calls) == before


def test_counts_cover_the_truth():
    # A gap, the middle of a band, and the whole.
    eigenvalues = np.r_[np.linspace(0, 1, 40), np.linspace(2, 3, 20)]
    rng = np.random.default_rng(1)
    Q, _ = np.linalg.qr(rng.normal(size=(N, N)))
    operator = as_operator(Q * eigenvalues @ Q.T)
    lower, upper = jnp.array([1.5, -jnp.inf, -5.0]), jnp.array([jnp.inf, 0.51, 5.0])
    truths = [20, np.sum(eigenvalues <= 0.51), N]

    @jax.jit
    @jax.vmap
    def intervals(key):
        estimate = tx.spectral_density(key, operator, 20).count(lower, upper)
        return *estimate.confidence_interval(), estimate.standard_error

    low, high, errors = map(to_double, intervals(jr.split(jr.key(2), 100)))
    slack = 1e3 * eps() * N
    covered = (low - slack <= truths) & (truths <= high + slack)
    assert np.all(np.mean(covered, axis=0) >= 0.93)
    assert np.all(np.mean(errors, axis=0)[:2] < [5, 20])


def test_exact_counts_know_what_rounding_may_move():
    # A Laplacian's smallest eigenvalue is 0 up to rounding.
    L = 2 * np.eye(N) - np.eye(N, k=1) - np.eye(N, k=-1)
    L[0, 0] = L[-1, -1] = 1
    spectrum = tx.spectral_density(jr.key(0), as_operator(L), N)
    count = spectrum.count(jnp.array([0.0, 0.55]), jnp.array([1.1, 5.0]))
    truths = np.linalg.eigvalsh(L)
    truths = np.array([np.sum(truths < 1.1), np.sum(truths > 0.55)])
    errors = np.abs(to_double(count.value) - truths)
    assert np.all(errors <= to_double(count.standard_error))
    np.testing.assert_array_equal(count.standard_error, [1, 0])


def test_a_density_passes_through_jit_and_answers_many_counts():
    a = _matrix()
    like = as_operator(a).in_structure()

    @jax.jit
    def density(a):
        operator = lx.FunctionLinearOperator(lambda v: a @ v, like, lx.symmetric_tag)
        return tx.spectral_density(jr.key(0), operator, 12)

    @jax.jit
    def counts(spectrum, middle):
        first, second = spectrum.count(0, middle), spectrum.count(middle, jnp.inf)
        return first.value + second.value

    with pytest.raises(Exception, match=r"not finite|[Nn]a[Nn]"):
        jax.block_until_ready(density(a).count(jnp.nan, 1.0))
    for middle in (1.0, 2.0):
        total = jax.vmap(counts, (None, 0))(density(a), jnp.full(2, middle))
        np.testing.assert_allclose(to_double(total), N, rtol=1e3 * eps())


@pytest.mark.wrong_types
@pytest.mark.parametrize("end", [1j, True, "0"])
def test_ends_must_be_real(end):
    spectrum = tx.spectral_density(jr.key(0), lx.DiagonalLinearOperator(jnp.ones(N)), 4)
    with pytest.raises(TypeError, match=r"count: ends must be real"):
        spectrum.count(end, 2)


def test_exact_structures_and_numpy_arrays_stay():
    eigenvalues = jnp.linspace(0.5, 5, N)
    diagonal = tx.spectral_density(
        jr.key(0), lx.DiagonalLinearOperator(eigenvalues), 10
    )
    truth, square = np.sum(to_double(eigenvalues) ** 2), diagonal.trace(jnp.square)
    assert square.stats["num_matvecs"] == 0
    assert abs(square.value - truth) <= 10 * square.standard_error
    assert jnp.allclose(diagonal.integrate(jnp.square), truth)
    a = np.array(_matrix())
    spectrum = tx.spectral_density(
        jr.key(0), lx.MatrixLinearOperator(a, lx.symmetric_tag), 20
    )
    before = spectrum.trace(jnp.exp).value
    a += np.eye(N, dtype=a.dtype)
    np.testing.assert_array_equal(spectrum.trace(jnp.exp).value, before)


@pytest.mark.x64
def test_counts_at_a_multiple_eigenvalue_cover_the_truth():
    # The Hamming graph H(3, 4) has the eigenvalues 9, 5, 1 and -3.
    one, J = np.eye(4), np.ones((4, 4)) - np.eye(4)
    A = sum(np.kron(np.kron(*x[:2]), x[2]) for x in ((J, one, one), (one, J, one)))
    operator = as_operator(A + np.kron(np.kron(one, one), J))

    @jax.jit
    @jax.vmap
    def intervals(key):
        count = tx.spectral_density(key, operator, 24).count(5, 5)
        return count.confidence_interval()

    low, high = map(to_double, intervals(jr.split(jr.key(0), 100)))
    assert np.mean((low <= 9) & (high >= 9)) >= 0.93
