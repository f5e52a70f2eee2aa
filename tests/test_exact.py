"""Exact answers: by one Cholesky factorisation without k, and by structure."""

import functools as ft
import math
import textwrap
from collections.abc import Callable

import equinox as eqx
import jax
import jax.flatten_util
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import assert_close, printed_by, products_only
from problems import PSD, Process, as_array, as_operator, float_dtype, observations
from spectral_helpers import normal

import traceax as tx
from traceax._exact import cholesky

N = 60


def _process(noise=1e-2):
    length = jnp.array([0.3, 0.4], float_dtype())
    return Process(length, jnp.asarray(1.3, float_dtype()), as_array(noise))


def _likelihood(p, x, y, **options):
    return tx.gaussian_log_likelihood(
        jr.key(0), p.kernel(x), y, shift=p.noise, **options
    )


@pytest.mark.x64
def test_values_and_derivatives_match_dense_algebra():
    x, y = observations(N, (3,))
    p = _process()

    def value(p, y):
        return _likelihood(p, x, y).value

    def exact(p, y):
        return p.exact_likelihood(x, y)

    @jax.jit
    def run(p, y):
        gradients = [jax.grad(fn, (0, 1))(p, y) for fn in (value, exact)]
        hessians = [jax.hessian(fn)(p, y) for fn in (value, exact)]
        forward = [jax.jacfwd(fn)(p, y) for fn in (value, exact)]
        return (value(p, y), exact(p, y)), gradients, hessians, forward

    values, *derivatives = run(p, y)
    assert_close(*values, 1e-12)
    for actual, expected in derivatives:
        scale = max(jnp.abs(e).max() for e in jax.tree.leaves(expected))
        for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
            assert_close(a, b, 1e-9, 1e-9 * scale)


@pytest.mark.x64
def test_batches_with_a_nan_element():
    x, y = observations(N)
    noises = jnp.array([1e-2, jnp.nan, 1.0, 1e-1])

    def likelihoods(noise):
        p = eqx.tree_at(lambda p: p.noise, _process(), noise)
        estimate = _likelihood(p, x, y, throw=False)
        return estimate.value, estimate.result, p.exact_likelihood(x, y)

    values, results, expected = jax.jit(jax.vmap(likelihoods))(noises)
    assert jnp.isnan(values[1])
    assert list(results == tx.RESULTS.successful) == [True, False, True, True]
    good = jnp.array([0, 2, 3])
    assert_close(values[good], expected[good], 1e-12)


@pytest.mark.x64
@pytest.mark.parametrize("complex", [False, True])
def test_log_determinants_inverses_and_forms_of_matrices(complex):
    root, y = normal((N, N), complex), normal((N, 2), complex, seed=3)
    A = root @ root.conj().T / N
    K, dense = as_operator(A, psd=True), A + 0.1 * np.eye(N)
    terms = tx.inv_quad_logdet(jr.key(0), K, jnp.asarray(y), shift=0.1)
    truth = np.linalg.slogdet(dense)[1]
    assert_close(terms.logdet.value, truth, 1e-12)
    assert_close(terms.solution, np.linalg.solve(dense, y), 1e-9)
    forms = np.sum(y.conj() * np.linalg.solve(dense, y), axis=0).real
    assert_close(terms.inv_quad.value, forms, 1e-10)
    assert terms.logdet.stats["num_matvecs"] == 0
    assert "exact" in str(terms.logdet)
    inverse = np.trace(np.linalg.inv(dense)).real
    for shift in (0.1, jnp.full(N, 0.1)):
        assert_close(tx.logdet(jr.key(0), K, shift=shift).value, truth, 1e-12)
        estimate = tx.trace_inverse(jr.key(0), K, shift=shift)
        assert_close(estimate.value, inverse, 1e-10)
        assert 0 < estimate.standard_error < 1e-9 * inverse
    # An exact answer needs no preconditioner, so it takes no columns.
    columns = tx.logdet(jr.key(0), K, shift=0.1, preconditioner=20)
    assert_close(columns.value, truth, 1e-12)
    assert columns.stats["num_columns"] == 0

    # A complex y is circular: its real and imaginary parts are independent.
    half = 1.0 if complex else 0.5

    def likelihoods(A):
        total = A + 0.1 * jnp.eye(N, dtype=A.dtype)
        u = jnp.linalg.solve(total, y)
        forms = jnp.sum(jnp.real(y.conj() * u))
        exact = -half * (2 * jnp.linalg.slogdet(total)[1] + forms)
        likelihood = tx.gaussian_log_likelihood(
            jr.key(0), lx.MatrixLinearOperator(A), jnp.asarray(y), shift=0.1
        )
        return likelihood.value, exact - 2 * half * N * np.log(np.pi / half)

    gradients = jax.jit(jax.jacrev(likelihoods))(jnp.asarray(A))
    assert_close(*gradients, 1e-8, 1e-8 * np.abs(gradients[1]).max())


@pytest.mark.x64
@pytest.mark.parametrize("complex", [False, True])
def test_inverses_from_blocks(complex):
    n = 1_100  # blocks have up to 512 rows, and 275 here
    root = normal((n, n), complex)
    A = root @ root.conj().T / n + np.eye(n)

    @jax.jit
    @jax.grad
    def inverse(A):  # d log det A = tr A^-1 dA
        return tx.logdet(
            jr.key(0), lx.MatrixLinearOperator(A, lx.positive_semidefinite_tag)
        ).value

    expected = np.linalg.inv(A).T
    assert_close(inverse(jnp.asarray(A)), expected, 0, 1e-12 * np.abs(expected).max())


@pytest.mark.x64
def test_indefinite_operators_have_traces_of_inverses():
    a = normal((N, N))
    a = a + a.T
    assert_close(
        tx.trace_inverse(jr.key(0), as_operator(a)).value,
        np.trace(np.linalg.inv(a)),
        1e-9,
    )


@pytest.mark.x64
def test_entries_of_sums_and_multiples_are_read():
    x, _ = observations(N)
    K = _process().kernel(x)
    diagonal = lx.DiagonalLinearOperator(jnp.linspace(1, 2, N))
    total = 2.0 * K + diagonal
    dense = total.as_matrix() + 0.1 * jnp.eye(N)
    assert_close(
        tx.logdet(jr.key(0), total, shift=0.1).value, jnp.linalg.slogdet(dense)[1]
    )
    # We can't read entries from products alone.
    with pytest.raises(TypeError, match="k must be a Python int"):
        tx.logdet(jr.key(0), products_only(as_operator(dense)))


@pytest.mark.x64
def test_explicit_budgets_and_many_points_are_estimated(monkeypatch):
    n = 400
    x, y = observations(n)
    krylov, many = tx.KrylovAwareEstimator(), 3 * n // 4
    explicit = _likelihood(_process(), x, y, k=12)
    assert explicit.stats["num_matvecs"] == 12
    # Without numbers, up to three quarters of the columns are chosen.
    estimated = _likelihood(_process(), x, y, estimator=krylov, preconditioner=many)
    monkeypatch.setattr(cholesky, "LARGEST", n - 1)
    # These columns eliminate rows, and fewer are a preconditioner.
    few, pivots = jnp.arange(20), jnp.arange(many)
    for preconditioner, is_exact in ((None, True), (pivots, True), (few, False)):
        estimate = _likelihood(_process(), x, y, preconditioner=preconditioner)
        assert (estimate.stats["num_matvecs"] == 0) == is_exact
    monkeypatch.setattr(cholesky, "LARGEST_HARD", n - 1)
    above_limit = _likelihood(_process(), x, y)
    assert above_limit.value == estimated.value
    assert above_limit.standard_error == estimated.standard_error > 1e-6


def test_intervals_contain_the_truth_in_32_bits():
    rng, contained = np.random.default_rng(0), []

    @eqx.filter_jit
    def run(p, x, y):
        terms = tx.inv_quad_logdet(jr.key(0), p.kernel(x), y, shift=p.noise)
        inverse = tx.trace_inverse(jr.key(0), p.kernel(x), shift=p.noise)
        likelihood = _likelihood(p, x, y)
        return terms.logdet, terms.inv_quad, inverse, likelihood

    for _ in range(40):
        x, y = rng.uniform(size=(200, 2)), rng.normal(size=200)
        parameters = 10 ** rng.uniform([-1, -1, 0, -4], [0.5, 0.5, 1, 0])
        x, y, parameters = (a.astype(np.float32) for a in (x, y, parameters))
        with jax.enable_x64(False):
            p = (parameters[:2], parameters[2], parameters[3])
            estimates = run(
                Process(*map(jnp.asarray, p)), jnp.asarray(x), jnp.asarray(y)
            )
            ends = [estimate.confidence_interval() for estimate in estimates]
        with jax.enable_x64(True):
            doubles = [jnp.asarray(a, float) for a in (x, y, parameters)]
            q = Process(doubles[2][:2], doubles[2][2], doubles[2][3])
            logdet, form, _ = q.exact_terms(*doubles[:2])
            inverse = np.trace(np.linalg.inv(q.dense(doubles[0])))
            truths = logdet, form, inverse, q.exact_likelihood(*doubles[:2])
        for (low, high), truth in zip(ends, truths, strict=True):
            contained.append(float(low) <= float(truth) <= float(high))
    contained = np.reshape(contained, (-1, 4))
    assert np.all(contained.mean(axis=0) > 0.9), contained.mean(axis=0)


def test_bars_of_noise_near_rounding_errors():
    rng, n = np.random.default_rng(0), 600

    @eqx.filter_jit
    def run(K, y):
        K = lx.MatrixLinearOperator(K, lx.positive_semidefinite_tag)
        options = {"shift": 1e-5, "throw": False}
        likelihood = tx.gaussian_log_likelihood(jr.key(0), K, y, **options)
        return likelihood, tx.trace_inverse(jr.key(0), K, **options)

    distances = [
        np.sqrt(np.sum((x[:, None] - x) ** 2, axis=-1))
        for x in (rng.random((n, 1)), rng.random((n, 2)))
    ]
    matern = (1 + 12**0.5 * distances[0]) * np.exp(-(12**0.5) * distances[0])
    for S in (
        matern,
        np.exp(-2 * distances[1] ** 2),
        np.exp(-(distances[1] ** 2) / 18),
    ):
        A, y = S + 1e-5 * np.eye(n), rng.normal(size=n).astype(np.float32)
        logdet, form = np.linalg.slogdet(A)[1], y @ np.linalg.solve(A, y)
        likelihood = -(logdet + form + n * np.log(2 * np.pi)) / 2
        with jax.enable_x64(False):
            estimates = run(*(jnp.asarray(a, jnp.float32) for a in (S, y)))
            intervals = [e.confidence_interval() for e in estimates]
        truths = likelihood, np.trace(np.linalg.inv(A))
        for estimate, (low, high), truth in zip(
            estimates, intervals, truths, strict=True
        ):
            failed = estimate.result == tx.RESULTS.outside_domain
            assert failed or float(low) <= truth <= float(high)
            assert not failed or S[0].min() > 0.8


@pytest.mark.x64
def test_failures():
    root, y = normal((N, N)), jnp.ones(N)
    A = root @ root.T / N
    singular = root[:, : N // 2] @ root[:, : N // 2].T

    def check(expected, entry, operator, *y, **options):
        estimate = jax.jit(
            lambda: entry(jr.key(0), operator, *y, throw=False, **options)
        )()
        assert estimate.result == expected, tx.RESULTS[estimate.result]
        assert jnp.isnan(estimate.value)

    likelihood = tx.gaussian_log_likelihood
    check(tx.RESULTS.not_semidefinite, likelihood, as_operator(-A), y, shift=0.1)
    check(
        tx.RESULTS.noise_not_positive,
        likelihood,
        as_operator(A),
        y,
        shift=jnp.zeros(()),
    )
    check(
        tx.RESULTS.y_not_finite,
        likelihood,
        as_operator(A),
        y.at[3].set(np.nan),
        shift=0.1,
    )
    # XLA's maxima skip NaN at this size, though not at 8.
    nan = as_operator(np.where(np.eye(N) * np.arange(N) == 2, np.nan, A))
    check(tx.RESULTS.nonfinite, likelihood, nan, y, shift=0.1)
    check(tx.RESULTS.not_hermitian, likelihood, as_operator(root), y, shift=0.1)
    for psd in (False, True):
        check(tx.RESULTS.outside_domain, tx.logdet, as_operator(singular, psd=psd))
    indefinite = singular - np.eye(N)
    check(tx.RESULTS.outside_domain, tx.logdet, as_operator(indefinite))
    check(tx.RESULTS.not_semidefinite, tx.logdet, as_operator(indefinite, psd=True))
    singular = as_operator(singular, psd=True)
    check(tx.RESULTS.outside_domain, tx.trace_inverse, singular)
    # With noise, this kernel is no failure.
    assert jnp.isfinite(likelihood(jr.key(0), singular, y, shift=0.1).value)


@pytest.mark.x64
def test_slopes_have_error_bars():
    x, y = observations(N)
    p = _process()
    one = jax.tree.map(jnp.ones_like, p)

    def estimates(p):
        K = p.kernel(x)
        likelihood = _likelihood(p, x, y)
        logdet = tx.logdet(jr.key(0), K, shift=p.noise)
        return likelihood, logdet, tx.trace_inverse(jr.key(0), K, shift=p.noise)

    def exact(p):
        values = p.exact_likelihood(x, y), p.exact_terms(x, y)[0]
        return (*values, jnp.trace(jnp.linalg.inv(p.dense(x))))

    _, truths = jax.jvp(exact, (p,), (one,))
    for i, truth in enumerate(truths):
        _, slope = tx.jvp(lambda p, i=i: estimates(p)[i], (p,), (one,))
        assert_close(slope.value, truth, 1e-9)
        assert 1e-16 * abs(truth) < slope.standard_error < 1e-8 * abs(truth)


def test_a_first_call_compiles_few_programs():
    code = """
        import logging
        import jax, jax.numpy as jnp, lineax as lx, equinox as eqx
        import traceax as tx

        class Kernel(eqx.Module):
            length: jax.Array
            def __call__(self, a, b):
                return jnp.exp(-jnp.sum((a - b) ** 2) / self.length)

        names = []
        class Handler(logging.Handler):
            def emit(self, record):
                if record.getMessage().startswith("Finished XLA compilation"):
                    names.append(record.getMessage())

        key = jax.random.key(0)
        x = [jax.random.normal(jax.random.key(i), (20, 2)) for i in (1, 2)]
        K = [tx.KernelLinearOperator(Kernel(jnp.asarray(s)), a) for s, a in zip((1.0, 2.0), x)]
        matrices = [
            lx.MatrixLinearOperator(k.as_matrix(), lx.positive_semidefinite_tag) for k in K
        ]
        jax.config.update("jax_log_compiles", True)
        logging.getLogger("jax._src.dispatch").addHandler(Handler())
        for k in (None, 10):
            for i in (0, 1):
                tx.logdet(key, matrices[i], k, shift=0.1 * (1 + i))
                print(len(names), end=" ")
                tx.gaussian_log_likelihood(key, K[i], x[i][:, 0], k, shift=0.1 * (1 + i))
                print(len(names), end=" ")
        ones = jnp.ones(8)
        chains = [lx.TridiagonalLinearOperator(jnp.full(9, s), ones, ones) for s in (3.0, 4.0)]
        for chain in chains:
            for operator in (chain, chain @ chain):
                tx.logdet(key, operator)
                print(len(names), end=" ")
    """
    counts = np.array(printed_by(textwrap.dedent(code)).split(), int)
    assert counts[9] > counts[8]
    assert counts[9] == counts[11]
    first, second, third, fourth = np.diff(counts[[0, 1, 1, 3, 4, 5, 5, 7]])[
        [0, 2, 4, 6]
    ]
    assert 1 <= counts[0] <= 3
    assert first <= 3
    assert second == 0
    assert third <= 2
    assert fourth == 0


#
# Structure
#


def _tridiagonal(n, complex=False):
    d, lower, upper = (normal((n - i,), complex, seed=i) for i in (0, 1, 1))
    lower = 2 * lower
    dense = np.diag(d) + np.diag(lower, -1) + np.diag(upper, 1)
    return lx.TridiagonalLinearOperator(*map(as_array, (d, lower, upper))), dense


@pytest.mark.x64
@pytest.mark.parametrize("complex", [False, True])
@pytest.mark.parametrize("n", [2, 3, 40])
def test_tridiagonal_operators(n, complex):
    operator, dense = _tridiagonal(n, complex)
    like = operator.in_structure()
    tagged = lx.FunctionLinearOperator(operator.mv, like, lx.tridiagonal_tag)
    for tridiagonal in (operator, tagged):
        for shift in (0.0, 0.3, jnp.linspace(0.1, 0.5, n)):
            total = dense + np.diag(np.broadcast_to(shift, n))
            sign, modulus = np.linalg.slogdet(total)
            actual = tx.logdet(jr.key(0), tridiagonal, shift=shift)
            assert_close(actual.value, modulus, 1e-9, 1e-9)
            assert_close(actual.stats["sign"], sign, 1e-9)
            inverse = np.trace(np.linalg.inv(total))
            actual = tx.trace_inverse(jr.key(0), tridiagonal, shift=shift)
            assert_close(actual.value, inverse, 1e-8)

    def value(d):
        changed = lx.TridiagonalLinearOperator(d, *lx.tridiagonal(operator)[1:])
        actual = tx.trace_inverse(jr.key(0), changed).value
        return jnp.real(actual)

    if not complex:
        square = np.linalg.inv(dense) @ np.linalg.inv(dense)
        actual = jax.grad(value)(lx.diagonal(operator))
        assert_close(actual, -np.diag(square), 1e-7)


@pytest.mark.x64
def test_products_of_factors_with_structure():
    chain, dense = _tridiagonal(N, complex=True)
    d, lower = normal((N,), complex=True, seed=4), np.tril(normal((N, N), seed=5))
    triangular = lx.MatrixLinearOperator(as_array(lower), lx.lower_triangular_tag)
    diagonal = lx.DiagonalLinearOperator(as_array(d))
    sign, modulus = np.linalg.slogdet(np.diag(d) @ dense @ np.diag(d))
    estimate = tx.logdet(jr.key(0), diagonal @ chain @ diagonal)
    assert_close(estimate.value, modulus, 1e-9)
    assert_close(estimate.stats["sign"], sign, 1e-9)
    assert estimate.stats["num_matvecs"] == 3

    def value(lower):
        L = lx.MatrixLinearOperator(lower, lx.lower_triangular_tag)
        return tx.logdet(jr.key(0), lx.TaggedLinearOperator(L @ L.T, PSD))

    lower = as_array(lower)
    estimate, slope = tx.jvp(value, (lower,), (jnp.eye(N),))
    expected = 2 * np.sum(np.log(np.abs(np.diag(lower))))
    assert_close(estimate.value, expected, 1e-9)
    assert_close(slope.value, np.sum(2 / np.diag(lower)), 1e-9)
    assert estimate.stats["num_matvecs"] == 0
    assert estimate.standard_error < 1e-11
    assert slope.standard_error < 1e-9 * np.sum(2 / np.abs(np.diag(lower)))
    negative = lx.TaggedLinearOperator(
        triangular
        @ lx.DiagonalLinearOperator(jnp.ones(N).at[0].set(-1))
        @ triangular.T,
        PSD,
    )
    estimate = tx.logdet(jr.key(0), negative, throw=False)
    assert estimate.result == tx.RESULTS.outside_domain


@pytest.mark.x64
def test_definite_and_singular_tridiagonal_operators():
    n = 300
    ones = jnp.ones(n - 1)
    laplacian = lx.TridiagonalLinearOperator(2 * jnp.ones(n), -ones, -ones)
    tagged = lx.TaggedLinearOperator(laplacian, PSD)
    assert_close(tx.logdet(jr.key(0), tagged).value, np.log(n + 1), 1e-11)
    long = lx.TridiagonalLinearOperator(jnp.full(5000, 2.5), *[-jnp.ones(4999)] * 2)
    estimate = tx.logdet(jr.key(0), lx.TaggedLinearOperator(long, PSD))
    assert_close(estimate.value, 5000 * np.log(2) + np.log(4 / 3), 1e-12)
    assert "sign" not in estimate.stats
    path = lx.TridiagonalLinearOperator(
        (2 * jnp.ones(n)).at[jnp.array([0, -1])].set(1), -ones, -ones
    )
    for operator in (
        lx.TaggedLinearOperator(path, PSD),  # singular
        lx.TaggedLinearOperator(-1.0 * laplacian, PSD),  # negative definite
    ):
        estimate = tx.logdet(jr.key(0), operator, throw=False)
        assert estimate.result == tx.RESULTS.outside_domain
    # We accept leading minors that are 0.
    swap = lx.TridiagonalLinearOperator(jnp.zeros(2), jnp.ones(1), jnp.ones(1))
    estimate = tx.logdet(jr.key(0), swap)
    assert_close(estimate.value, 0.0, 0.0, 1e-15)
    assert estimate.stats["sign"] == -1


@pytest.mark.x64
@pytest.mark.parametrize("complex", [False, True])
def test_triangular_operators(complex):
    dense = np.tril(normal((12, 12), complex)) + 2 * np.eye(12)
    lower = lx.MatrixLinearOperator(jnp.asarray(dense), lx.lower_triangular_tag)
    for operator, a in ((lower, dense), (lower.T, dense.T)):
        sign, modulus = np.linalg.slogdet(a)
        estimate = tx.logdet(jr.key(0), operator)
        assert_close(estimate.value, modulus, 1e-10, 1e-10)
        assert_close(estimate.stats["sign"], sign, 1e-10)
        estimate = tx.trace_inverse(jr.key(0), operator)
        assert_close(estimate.value, np.trace(np.linalg.inv(a)), 1e-9)
    unit = np.tril(dense, -1) + np.eye(12)
    tags = lx.lower_triangular_tag, lx.unit_diagonal_tag
    function = products_only(lx.MatrixLinearOperator(jnp.asarray(unit), tags))
    assert tx.logdet(jr.key(0), function).value == 0
    assert tx.trace_inverse(jr.key(0), function).value == 12


@pytest.mark.x64
def test_shifts_of_every_leaf():
    like = {"bias": jnp.zeros(3), "weights": jnp.zeros((2, 4))}
    root = normal((11, 11))
    A = jnp.asarray(root @ root.T)

    def product(v):
        flat, rebuild = jax.flatten_util.ravel_pytree(v)
        return rebuild(A @ flat)

    operator = tx.as_operator(product, like, tags=PSD)
    for bias in (0.5, jnp.linspace(0.1, 1, 3)):
        shift = {"bias": bias, "weights": jnp.asarray(2.0)}
        added = np.concatenate([np.broadcast_to(bias, 3), np.full(8, 2.0)])
        total = np.asarray(A) + np.diag(added)
        estimate = tx.logdet(jr.key(0), operator, 11, shift=shift)
        assert_close(estimate.value, np.linalg.slogdet(total)[1], 1e-10)
        estimate = tx.trace_inverse(jr.key(0), operator, 11, shift=shift)
        assert_close(estimate.value, np.trace(np.linalg.inv(total)), 1e-9)
        y = jnp.ones(11)
        estimate = tx.inv_quad_logdet(jr.key(0), operator, y, 11, shift=shift)
        assert_close(estimate.inv_quad.value, y @ np.linalg.solve(total, y), 1e-9)

    @jax.jit
    @jax.grad
    def slope(precision):
        shift = {"bias": 0.5, "weights": precision}
        return tx.logdet(jr.key(0), operator, 11, shift=shift).value

    total = np.asarray(A) + np.diag([0.5] * 3 + [2.0] * 8)
    assert_close(slope(2.0), np.sum(np.diag(np.linalg.inv(total))[3:]), 1e-9)
    for wrong in (
        {"bias": 0.5},
        {"bias": jnp.ones(2), "weights": 1.0},
        jnp.ones((2, 4)),
    ):
        with pytest.raises(
            ValueError, match="or a PyTree with the operator's structure"
        ):
            tx.logdet(jr.key(0), operator, 11, shift=wrong)


def test_hard_problems_in_32_bits():
    # Errors in the factor are coherent: without refinement, the form is off by 15 here.
    x = np.random.default_rng(2).uniform(size=(600, 1)).astype(np.float32)
    K = np.exp(-((x - x.T).astype(float) ** 2) / 2).astype(np.float32)
    y, noise = np.sin(5 * x[:, 0]).astype(np.float32), np.float32(1e-3)
    A = K.astype(float) + float(noise) * np.eye(600)
    truths = np.linalg.slogdet(A)[1], y @ np.linalg.solve(A, y.astype(float))
    with jax.enable_x64(False):
        operator = lx.MatrixLinearOperator(jnp.asarray(K), PSD)
        terms = tx.inv_quad_logdet(jr.key(0), operator, jnp.asarray(y), shift=noise)
        ends = [e.confidence_interval() for e in (terms.logdet, terms.inv_quad)]
    for (low, high), truth in zip(ends, truths, strict=True):
        assert float(low) <= float(truth) <= float(high)
        assert float(high) - float(low) < 2


class Opaque(lx.AbstractLinearOperator):
    """Entries, and a Python function that no compiled program can keep."""

    fn: Callable
    matrix: jax.Array

    def mv(self, vector):
        return self.matrix @ vector

    def as_matrix(self):
        raise NotImplementedError

    def transpose(self):
        return self

    def in_structure(self):
        return jax.ShapeDtypeStruct((len(self.matrix),), self.matrix.dtype)

    def out_structure(self):
        return self.in_structure()


for check in (lx.is_symmetric, lx.is_positive_semidefinite):
    check.register(Opaque, lambda operator: True)
tx.columns.register(Opaque, lambda operator, i: operator.matrix[:, i])
tx.diagonal_entries.register(Opaque, lambda operator: jnp.diag(operator.matrix))


@pytest.mark.x64
def test_entries_of_classes_with_functions_are_read():
    root = normal((N, N))
    operator = Opaque(lambda x: 2 * x, jnp.asarray(root @ root.T / N))
    dense = np.asarray(operator.matrix) + 0.1 * np.eye(N)
    truth, y = np.linalg.slogdet(dense)[1], jnp.ones(N)
    for run in (lambda f: f(), lambda f: jax.jit(f)()):
        actual = run(lambda: tx.logdet(jr.key(0), operator, shift=0.1).value)
        assert_close(actual, truth, 1e-11)
    actual = tx.trace_inverse(jr.key(0), operator, shift=0.1).value
    assert_close(actual, np.trace(np.linalg.inv(dense)), 1e-9)
    actual = tx.inv_quad_logdet(jr.key(0), operator, y, shift=0.1)
    assert_close(actual.inv_quad.value, y @ np.linalg.solve(dense, y), 1e-9)
    assert actual.logdet.stats["num_matvecs"] == 0


@pytest.mark.x64
def test_inverses_with_a_negative_shift():
    root = normal((N, N))
    A = root @ root.T / N
    estimate = tx.trace_inverse(jr.key(0), as_operator(A, psd=True), shift=-0.5)
    assert_close(estimate.value, np.trace(np.linalg.inv(A - 0.5 * np.eye(N))), 1e-8)


def test_tridiagonal_operators_of_any_scale():
    n = 30
    dense = 2.01 * np.eye(n) + np.eye(n, k=1) + np.eye(n, k=-1)
    inverse, logdet = np.trace(np.linalg.inv(dense)), np.linalg.slogdet(dense)[1]
    with jax.enable_x64(False):
        for s in (1e-30, 1e-19, 1e30):
            bands = (np.full(n - abs(i), c * s) for i, c in ((0, 2.01), (1, 1), (1, 1)))
            operator = lx.TridiagonalLinearOperator(
                *(jnp.asarray(b, jnp.float32) for b in bands)
            )
            estimate = tx.logdet(jr.key(0), operator)
            assert (
                abs(estimate.value - logdet - n * np.log(s))
                < 4 * estimate.standard_error
            )
            estimate = tx.trace_inverse(jr.key(0), operator)
            assert abs(estimate.value * s - inverse) < 4 * s * estimate.standard_error
            assert estimate.standard_error < 1e-4 * estimate.value
        skew = lx.TridiagonalLinearOperator(3 * jnp.ones(n), *[jnp.ones(n - 1)] * 2)
        skew = eqx.tree_at(lambda x: x.lower_diagonal, skew, -jnp.ones(n - 1))
        tagged = lx.TaggedLinearOperator(skew, PSD)
        estimate = tx.logdet(jr.key(0), tagged, throw=False)
        assert estimate.result == tx.RESULTS.not_hermitian


#
# Accuracy of structure
#


def _dense(d, upper, lower):
    """A tridiagonal matrix, in 64 bits."""
    return np.diag(np.asarray(d) + 0.0) + np.diag(upper, 1) + np.diag(lower, -1)


def _numbers(*estimates):
    """Values and standard errors, side by side."""
    return jnp.stack([jnp.stack([x.value, x.standard_error]) for x in estimates])


def test_errors_of_tridiagonal_operators_in_32_bits():
    n, rng = 500, np.random.default_rng(0)
    ones, symmetric = np.ones(n - 1), rng.normal(size=n - 1)
    chains = [
        (np.full(n, 3.5), ones / 2, ones / 2),
        (np.full(n, 2.01), -ones, -ones),
        (np.full(n, 0.3), 0.7 * ones, 0.7 * ones),
        (np.full(n, 1.3), 0.7 * ones, -0.7 * ones),
        (rng.normal(size=n), symmetric, symmetric),
        (rng.normal(size=n), *rng.normal(size=(2, n - 1))),
    ]
    bands = [np.stack(x).astype(np.float32) for x in zip(*chains, strict=True)]
    along = np.ones((n, 1)), np.ones((n - 1, 1))
    # We differentiate along all diagonal entries, and along all entries above them.
    along = [along[0] * [1, 0], along[1] * [0, 1], along[1] * [0, 0]]
    along = [x.T.astype(np.float32) for x in along]

    @jax.jit
    @ft.partial(jax.vmap, in_axes=(0, None))
    @ft.partial(jax.vmap, in_axes=(None, 0))
    def run(bands, change):
        def estimate(entry, bands):
            d, upper, lower = bands
            operator = lx.TridiagonalLinearOperator(d, lower, upper)
            return entry(jr.key(0), operator, shift=0.1)

        def numbers(entry):
            return tx.jvp(ft.partial(estimate, entry), (bands,), (change,))

        return _numbers(*numbers(tx.logdet), *numbers(tx.trace_inverse))

    with jax.enable_x64(False):
        results = np.asarray(run(*jax.tree.map(jnp.asarray, (bands, along))), float)
    identity, eps = np.eye(n), np.finfo(np.float32).eps
    for chain, rows in zip(zip(*bands, strict=True), results, strict=True):
        A = _dense(*chain) + np.float32(0.1) * identity
        B = np.linalg.inv(A)
        for change, numbers in zip(zip(*along, strict=True), rows, strict=True):
            dA = _dense(*change)
            truths = [np.linalg.slogdet(A)[1], np.trace(B @ dA)]
            truths += [np.trace(B), -np.trace(B @ dA @ B)]
            values, errors = numbers.T
            assert np.all(np.abs(values - truths) <= 3 * errors), (truths, numbers)
            if np.all(chain[0] == 3.5):
                assert np.all(errors < 10 * eps * np.abs(truths))


def test_second_derivatives_of_long_chains_in_32_bits():
    n = 20_000

    @jax.jit
    def run(diagonal):
        def value(diagonal, entry):
            other = jnp.full(n - 1, 0.5)
            bands = jnp.full(n, diagonal), other, other
            return entry(jr.key(0), lx.TridiagonalLinearOperator(*bands)).value

        def derivatives(entry):
            first = jax.grad(ft.partial(value, entry=entry))
            return first(diagonal), jax.grad(first)(diagonal)

        return derivatives(tx.logdet), derivatives(tx.trace_inverse)

    with jax.enable_x64(False):
        results = run(jnp.float32(3.5))
    eigenvalues = 3.5 + np.cos(np.pi * np.arange(1, n + 1) / (n + 1))
    first, second, third = (np.sum(eigenvalues**-p) for p in (1.0, 2.0, 3.0))
    assert_close(results, ((first, -second), (-second, 2 * third)), 3e-6)


def test_graded_tridiagonal_operators_in_32_bits():
    # Products of two small entries are below the smallest 32-bit number.
    n = 40
    scales = 2.0 ** np.linspace(-60, 60, n).round()
    # With S for the matrix of scales, the operator is S C S.
    C = _dense(np.full(n, 1.3), *[np.full(n - 1, 0.6)] * 2).astype(np.float32)
    rows, inverse = np.arange(n - 1), np.linalg.inv(C.astype(float))

    @jax.jit
    def run(d, other):
        def estimate(entry, d):
            operator = lx.TridiagonalLinearOperator(d, other, other)
            return entry(jr.key(0), operator)

        change = (d,), (d,)
        pairs = [
            tx.jvp(ft.partial(estimate, x), *change)
            for x in (tx.logdet, tx.trace_inverse)
        ]
        return _numbers(*pairs[0], *pairs[1])

    with jax.enable_x64(False):
        A = (scales[:, None] * C * scales).astype(np.float32)
        bands = np.diag(A), A[rows, rows + 1]
        values, errors = np.asarray(run(*map(jnp.asarray, bands)), float).T
    moved = np.diag(inverse @ np.diag(np.diag(C)) @ inverse)
    truths = np.linalg.slogdet(C)[1] + 2 * np.sum(np.log(scales))
    truths = [truths, np.sum(np.diag(inverse) * np.diag(C))]
    truths += [np.sum(np.diag(inverse) / scales**2), -np.sum(moved / scales**2)]
    assert np.all(np.abs(values - truths) <= 3 * errors), (truths, values, errors)
    assert np.all(errors < 1e-4 * np.abs(truths))


@pytest.mark.x64
def test_hessians_of_tridiagonal_operators():
    n, rng = 6, np.random.default_rng(0)
    # The first matrix has pivots 0 and infinity.
    upper = rng.uniform(0.5, 1, n - 1)
    chains = np.concatenate([np.zeros(n), upper, upper]), rng.normal(size=3 * n - 2)
    splits = n, 2 * n - 1

    def value(bands, entry):
        d, upper, lower = jnp.split(bands, splits)
        operator = lx.TridiagonalLinearOperator(d, lower, upper)
        return entry(jr.key(0), operator).value

    @jax.jit
    @jax.vmap
    def run(bands):
        hessians = [jax.hessian(value)(bands, x) for x in (tx.logdet, tx.trace_inverse)]
        third = jax.jvp(lambda x: jax.grad(value)(x, tx.trace_inverse), *[(bands,)] * 2)
        return hessians, third[1]

    (logdets, inverses), changes = run(jnp.stack(chains))
    units = [_dense(*np.split(x, splits)) for x in np.eye(3 * n - 2)]
    for bands, logdet, inverse, change in zip(
        chains, logdets, inverses, changes, strict=True
    ):
        A = _dense(*np.split(bands, splits))
        B = np.linalg.inv(A)
        expected = [[-np.sum(E.T * (B @ F @ B)) for F in units] for E in units]
        assert_close(logdet, expected, 1e-9, 1e-9)
        expected = [
            [np.trace(B @ (E @ B @ F + F @ B @ E) @ B) for F in units] for E in units
        ]
        assert_close(inverse, expected, 1e-9, 1e-9)
        # `tr A^-1` is homogeneous, and its gradient is a multiple of A^-2.
        assert_close(change, [2 * np.trace(B @ E @ B) for E in units], 1e-9, 1e-9)


@pytest.mark.x64
def test_hermitian_tridiagonal_operators_have_real_answers():
    n = 30
    d, upper = 4 + normal((n,)), normal((n - 1,), True)
    A = _dense(d, upper, upper.conj())
    inverse = np.linalg.inv(A)

    @jax.jit
    def run(d, upper):
        def values(d, upper):
            operator = lx.TridiagonalLinearOperator(
                d.astype(complex), upper.conj(), upper
            )
            tagged = lx.TaggedLinearOperator(operator, PSD)
            entries = tx.logdet, tx.trace_inverse
            return jnp.stack([entry(jr.key(0), tagged).value for entry in entries])

        return values(d, upper), jax.jacrev(values)(d, upper)

    values, slopes = run(jnp.asarray(d), jnp.asarray(upper))
    assert values.dtype == slopes.dtype == float
    assert_close(values, (np.linalg.slogdet(A)[1], np.trace(inverse).real), 1e-10)
    squares = np.diag(inverse @ inverse).real
    assert_close(slopes, (np.diag(inverse).real, -squares), 1e-9)


@pytest.mark.x64
@pytest.mark.parametrize("complex", [False, True])
def test_classes_and_tags_agree_about_negative_entries(complex):
    d = np.array([1.5, -2.0, 3.0]) * (1 + 0.5j if complex else 1)
    entries, zeros = jnp.asarray(d), jnp.zeros(2, d.dtype)
    matrix = lx.MatrixLinearOperator(jnp.diag(entries))
    diagonal = [
        lx.DiagonalLinearOperator(entries),
        lx.DiagonalLinearOperator(2 * entries) / 2.0,
        lx.MatrixLinearOperator(jnp.diag(entries), lx.diagonal_tag),
        lx.TaggedLinearOperator(matrix, lx.diagonal_tag),
        lx.FunctionLinearOperator(matrix.mv, matrix.in_structure(), lx.diagonal_tag),
    ]
    others = [
        lx.TridiagonalLinearOperator(entries, zeros, zeros),
        *[
            lx.TaggedLinearOperator(matrix, tag)
            for tag in (lx.tridiagonal_tag, lx.lower_triangular_tag)
        ],
    ]
    for operator in diagonal + others:
        estimate = tx.trace_inverse(jr.key(0), operator)
        assert_close(estimate.value, np.sum(1 / d), 1e-14)
        estimate = tx.logdet(jr.key(0), operator, throw=False)
        # A real diagonal is symmetric, so that its entries must be positive.
        if not complex and any(operator is x for x in diagonal):
            assert estimate.result == tx.RESULTS.outside_domain
        else:
            assert_close(estimate.value, np.sum(np.log(np.abs(d))), 1e-14)
            assert_close(estimate.stats["sign"], np.prod(d / np.abs(d)), 1e-14)


def test_errors_of_diagonal_operators_in_32_bits():
    rng, n = np.random.default_rng(0), 100_000
    signed = (rng.normal(size=n) * 1e4).astype(np.float32)
    # The sum is much smaller than its rounding errors.
    signed[n // 2 :] = -signed[: n // 2] * np.float32(1 + 1e-6)
    near_one = (1 + 1e-3 * rng.normal(size=n)).astype(np.float32)
    equal = np.full(n, 0.7, np.float32)

    def spectral(d, shift):
        operator, key = lx.DiagonalLinearOperator(d), jr.key(0)
        options = {"shift": shift} if shift is not None else {}
        root = tx.trace_function(key, jnp.sqrt, operator)
        return (
            tx.logdet(key, operator, **options),
            tx.trace_inverse(key, operator, **options),
            root,
        )

    def slope(fn, d):
        return tx.jvp(fn, (d,), (jnp.ones_like(d),))[1]

    @jax.jit
    def run(signed, d):
        def trace(d):
            return tx.trace(jr.key(0), lx.DiagonalLinearOperator(d), 1)

        rows = [spectral(d, None), spectral(d, 0.3)]
        slopes = [slope(lambda d, i=i: spectral(d, 0.3)[i], d) for i in (0, 1)]
        return _numbers(trace(signed), slope(trace, d), *rows[0], *rows[1][:2], *slopes)

    for d in (near_one, equal):
        with jax.enable_x64(False):
            results = run(jnp.asarray(signed), jnp.asarray(d))
        wide = d.astype(float)
        moved = wide + np.float32(0.3)
        truths = [math.fsum(signed.tolist()), n, np.sum(np.log(wide)), np.sum(1 / wide)]
        truths += [np.sum(np.sqrt(wide)), np.sum(np.log(moved)), np.sum(1 / moved)]
        truths += [np.sum(1 / moved), -np.sum(moved**-2.0)]
        values, errors = np.asarray(results, float).T
        assert np.all(np.abs(values - truths) <= 3 * errors), (truths, results)
        eps, sizes = np.finfo(np.float32).eps, np.abs(truths)
        # These terms are added up without a rounding error.
        assert errors[1] == 0
        assert errors[0] < eps * np.sum(np.abs(signed))
        assert np.all(errors[3:5] < 5 * eps * sizes[3:5])
        assert np.all(errors[7:] < 10 * eps * sizes[7:])


def test_sums_without_rounding_are_exact():
    dtype = float_dtype()
    like = jax.ShapeDtypeStruct((5,), dtype)
    identity = lx.IdentityLinearOperator(like)
    integers = lx.DiagonalLinearOperator(jnp.arange(1, 6, dtype=dtype))
    large = lx.DiagonalLinearOperator(jnp.full(5, 8 / jnp.finfo(dtype).eps, dtype))
    key = jr.key(0)
    for operator, truth, is_exact in (
        (identity, 5, True),
        (2.0 * identity, 10, True),
        (integers - 3.0 * identity, 0, True),
        (identity / 3.0, 5 / 3, False),
        # Large numbers have a distance above 1.5.
        (large + 1.5 * identity - large, 7.5, False),
    ):
        estimate = tx.trace(key, operator, 1)
        value, error = float(estimate.value), float(estimate.standard_error)
        assert abs(value - truth) <= 3 * error
        assert (error == 0) == is_exact
    for estimate, truth in (
        (tx.logdet(key, identity), 0),
        (tx.trace_inverse(key, identity), 5),
        (tx.trace_function(key, lambda x: x**2, integers), 55),
        # These round to whole numbers.
        (tx.trace_inverse(key, 0.1 * identity), 5 / float(jnp.asarray(0.1, dtype))),
        (tx.logdet(key, np.e * identity), 5 * np.log(float(jnp.asarray(np.e, dtype)))),
    ):
        eps, error = jnp.finfo(dtype).eps, float(estimate.standard_error)
        assert abs(float(estimate.value) - truth) <= error <= 10 * eps * truth
    # A diagonal is not a sum, unless terms are added.
    entries = lx.DiagonalLinearOperator(jnp.full(5, 0.1, dtype))
    estimate = tx.diagonal(key, entries, 1)
    assert jnp.all(estimate.value == entries.diagonal)
    assert jnp.all(estimate.standard_error == 0)
    assert jnp.all(tx.diagonal(key, entries + identity, 1).standard_error > 0)
