"""Custom classes that register columns and a diagonal, with an example's class."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from helpers import assert_close, load_example
from problems import as_array, float_dtype

import traceax as tx
from traceax.testing import check_entries

GRID, N = (12, 10), 100
PRODUCTS = []


EXAMPLE = load_example("kronecker_with_holes")


class Counting(EXAMPLE.MaskedKronecker):
    """The example's class, which counts products. Subclasses inherit registrations."""

    def mv(self, vector):
        jax.debug.callback(lambda _: PRODUCTS.append(1), vector[0])
        return super().mv(vector)


def count_products(result):
    jax.block_until_ready(result)
    jax.effects_barrier()
    number = len(PRODUCTS)
    PRODUCTS.clear()
    return number


def problem():
    rng = np.random.default_rng(0)
    cells = np.sort(rng.choice(GRID[0] * GRID[1], N, replace=False))
    y, noise = rng.normal(size=N), 0.3 * np.exp(0.5 * rng.normal(size=N))
    log = jax.tree.map(lambda x: x.astype(float_dtype()), EXAMPLE.TRUTH)
    return log, jnp.asarray(cells, jnp.int32), as_array(y), as_array(noise)


def dense(log, cells):
    """The whole grid's matrix, without rows and columns of missing cells."""
    K = EXAMPLE.covariance(log, GRID, cells)
    return jnp.kron(K.left, K.right)[cells][:, cells]


@jax.jit
def exact(log, cells, y, noise):
    matrix = dense(log, cells) + jnp.diag(noise)
    return jax.scipy.stats.multivariate_normal.logpdf(y, jnp.zeros_like(y), matrix)


def test_entries_and_products_match_the_matrix():
    log, cells, y, _ = problem()
    K, truth = EXAMPLE.covariance(log, GRID, cells), dense(log, cells)
    indices = jnp.array([3, 0, 99, 3])
    assert_close(tx.columns(K, indices), truth[:, indices])
    assert_close(tx.diagonal_entries(K), jnp.diagonal(truth))
    assert_close(K.as_matrix(), truth)
    assert_close(K.mv(y), truth @ y, 1e-5)


def test_columns_and_diagonals_take_no_products():
    log, cells, y, noise = problem()
    K = EXAMPLE.covariance(log, GRID, cells)
    counted = Counting(K.left, K.right, cells)
    key = jr.key(0)
    pivots = tx.choose_pivots(key, 0.5 * counted, 30, shift=noise)
    assert count_products(pivots) == 0
    estimate = tx.gaussian_log_likelihood(
        key, counted, y, 24, shift=noise, preconditioner=pivots
    )
    assert count_products(estimate.value) == estimate.stats["num_matvecs"] <= 24
    error = abs(estimate.value - exact(log, cells, y, noise))
    assert error < 0.2  # the root mean square error is 0.1
    # We read the trace, too.
    estimate = tx.trace_function(key, jnp.sqrt, counted, 24)
    assert count_products(estimate.value) == estimate.stats["num_matvecs"] <= 24
    assert "known_trace" in estimate.stats


def test_likelihood_and_gradient_against_cholesky():
    log, cells, y, noise = problem()
    pivots = jnp.arange(0, N, 3, dtype=jnp.int32)
    relative = noise / jnp.exp(log["noise"])
    (value, _), gradient = EXAMPLE.value_and_grad(
        log, GRID, cells, y, relative, jr.key(1), pivots
    )

    def by_cholesky(log):
        return exact(log, cells, y, jnp.exp(log["noise"]) * relative)

    truth, slopes = jax.value_and_grad(by_cholesky)(log)
    assert abs(value - truth) < 0.3
    for name, slope in slopes.items():
        assert_close(gradient[name], slope, 0.02, atol=0.02)


def test_without_a_registration_nothing_is_read():
    operator = lx.FunctionLinearOperator(
        lambda x: 2 * x, jax.eval_shape(lambda: jnp.ones(3)), lx.symmetric_tag
    )
    for fn in (tx.diagonal_entries, lambda A: tx.columns(A, jnp.arange(2))):
        with pytest.raises(NotImplementedError, match="FunctionLinearOperator"):
            fn(operator)


def composites(x):
    """Sums and products with a kernel, and their matrices."""
    rng = np.random.default_rng(1)
    n = len(x)
    factor, d = as_array(rng.normal(size=(n, 4))), as_array(rng.uniform(1, 2, n))
    kernel = tx.KernelLinearOperator(lambda a, b: jnp.exp(-jnp.sum((a - b) ** 2)), x)
    K, D = kernel.as_matrix(), lx.DiagonalLinearOperator(d)
    low_rank = lx.MatrixLinearOperator(factor) @ lx.MatrixLinearOperator(factor.T)
    function = tx.as_operator(lambda v: 2 * v, d)
    readable = {
        "twice": (kernel + as_array(2.0) * kernel, 3 * K),
        "scaled": (D @ kernel @ D, d[:, None] * K * d[None]),
        "scaled sum": (D @ (kernel + D) @ D, d[:, None] * (K + jnp.diag(d)) * d[None]),
        "rows": (-(D @ kernel) / as_array(2.0), -d[:, None] * K / 2),
    }
    others = {
        "low rank": (low_rank, factor @ factor.T),
        "with a function": (kernel + function, K + 2 * jnp.eye(n, dtype=K.dtype)),
        "with low rank": (kernel + low_rank, K + factor @ factor.T),
        "scaled with low rank": (
            D @ (kernel + low_rank) @ D,
            d[:, None] * (K + factor @ factor.T) * d[None],
        ),
    }
    return readable, others


def test_entries_of_sums_and_scaled_operators():
    x = as_array(np.random.default_rng(0).normal(size=(20, 2)))
    readable, others = composites(x)
    indices = jnp.array([3, 1, 1])
    for operator, matrix in readable.values():
        check_entries(operator)
        assert_close(tx.columns(operator, indices), matrix[:, indices], rtol=1e-5)
        assert_close(tx.diagonal_entries(operator), jnp.diagonal(matrix), rtol=1e-5)
    with pytest.raises(NotImplementedError, match="got another product; multiply"):
        tx.diagonal_entries(others["with low rank"][0])


def test_likelihoods_need_no_entries():
    x = as_array(np.random.default_rng(0).normal(size=(36, 2)))
    y, noise = as_array(np.sin(3 * x[:, 0])), 0.2
    readable, others = composites(x)
    del readable["rows"]
    for name, (operator, matrix) in {**readable, **others}.items():
        estimate = tx.gaussian_log_likelihood(jr.key(0), operator, y, shift=noise)
        A = np.asarray(matrix, float) + noise * np.eye(len(y))
        form, (_, logdet) = y @ np.linalg.solve(A, y), np.linalg.slogdet(A)
        truth = -(form + logdet + len(y) * np.log(2 * np.pi)) / 2
        low, high = estimate.confidence_interval(0.999)
        slack = 1e-4 * abs(truth)
        assert low - slack <= truth <= high + slack, name
        assert (estimate.stats["num_matvecs"] == 0) == (name in readable)


class Wrong(lx.MatrixLinearOperator):
    """A matrix with wrongly registered entries."""


@pytest.mark.parametrize(
    ("scale", "shape"), [(1.0, (-1,)), (1.2, (-1,)), (1.0, (-1, 1))]
)
def test_wrong_entries_are_refused(key, scale, shape):
    operator = Wrong(as_array(np.diag(np.arange(1.0, 7.0)) + 0.1))

    @tx.diagonal_entries.register
    def _(operator: Wrong):
        return scale * jnp.diagonal(operator.matrix).reshape(shape)

    if scale == 1 and len(shape) == 1:
        check_entries(operator)
    elif len(shape) == 1:
        with pytest.raises(AssertionError, match="checks:\n- diagonal_entries"):
            check_entries(operator)
    else:
        with pytest.raises(ValueError, match=r"diagonal_entries: the result for Wrong"):
            tx.choose_pivots(key, operator, 3, shift=0.1)
