"""`check_operator` accepts correct operators and names the faults of wrong ones."""

import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from operator_catalogue import CATALOGUE, arrays
from problems import PSD

import traceax as tx
from traceax.testing import check_operator

N = 12
RNG = np.random.default_rng(3)
A = RNG.normal(size=(N, N))
SEMIDEFINITE = A @ A.T / N + np.eye(N)
HERMITIAN = A + A.T + 1j * (A - A.T)
NEGATIVE_TAG = lx.negative_semidefinite_tag


def _function(matrix, *tags, transposed=None):
    """A function operator for the matrix, optionally with a wrong transpose."""
    matrix = jnp.asarray(matrix)

    def product(v):
        if transposed is None:
            return matrix @ v
        other = jnp.asarray(transposed)
        solve, back = (lambda _, b, m=m: m @ b for m in (matrix, other))
        return jax.lax.custom_linear_solve(lambda x: x, v, solve, back)

    return tx.as_operator(product, jax.eval_shape(lambda: matrix[0]), tags=tags)


def _operator(fn, dtype=float):
    return tx.as_operator(fn, jnp.zeros(N, dtype))


def _faults(operator, seed=0):
    """Names of failing checks."""
    try:
        check_operator(jr.key(seed), operator)
    except AssertionError as error:
        title, *lines = str(error).split("\n- ")
        assert title.endswith(f"fails {len(lines)} of traceax's checks:")
        return [line.partition(": off by ")[0] for line in lines]
    return []


def _solve(tolerance):
    solver = lx.CG(tolerance, tolerance)
    matrix = lx.MatrixLinearOperator(jnp.asarray(SEMIDEFINITE), PSD)
    return lambda v: lx.linear_solve(matrix, v, solver, throw=False).value


@pytest.mark.x64
@pytest.mark.parametrize("name", [x for x in CATALOGUE if x != "complex function"])
def test_correct_operators_pass(name):
    assert not _faults(CATALOGUE[name].make(arrays()))


CORRECT = {
    "tiny": lambda: _function(1e-30 * SEMIDEFINITE, PSD),
    "huge": lambda: _function(-1e30 * SEMIDEFINITE, NEGATIVE_TAG),
    "zero": lambda: _function(np.zeros((N, N)), PSD, lx.diagonal_tag),
    "rank one": lambda: _function(np.ones((N, N)), PSD, lx.unit_diagonal_tag),
    "one": lambda: _function(np.ones((1, 1)), PSD, lx.unit_diagonal_tag),
    "no unknowns": lambda: lx.IdentityLinearOperator(()),
    "16 bits": lambda: _function(SEMIDEFINITE.astype(jnp.bfloat16), PSD),
    "lower": lambda: _function(np.tril(A), lx.lower_triangular_tag),
    "upper": lambda: _function(np.triu(A), lx.upper_triangular_tag),
    "tridiagonal": lambda: _function(np.triu(np.tril(A, 1), -1), lx.tridiagonal_tag),
    "solver": lambda: _operator(_solve(1e-5)),
    "loose solver": lambda: tx.InverseLinearOperator(
        lx.MatrixLinearOperator(jnp.asarray(SEMIDEFINITE), PSD), lx.CG(0.1, 0.1)
    ),
    "no transpose": lambda: _operator(
        lambda v: jax.lax.while_loop(
            lambda x: x[0] < 1, lambda x: (1 + x[0], 2 * x[1]), (0, v)
        )[1]
    ),
    "wide, of two leaves": lambda: lx.JacobianLinearOperator(
        lambda x, _: x["a"][0] * x["b"], {"a": jnp.ones(3), "b": jnp.ones(2)}
    ),
}


@pytest.mark.parametrize("name", CORRECT)
def test_hard_correct_operators_pass(name):
    assert not _faults(CORRECT[name]())


COMPLEX = "complex, though linear over the real numbers"
LONG = "linear, for long vectors"
WRONG = {
    "square": (["linear"], lambda: _operator(lambda v: v**2)),
    "affine": (["linear"], lambda: _operator(lambda v: 2 * v + 0.1)),
    "homogeneous": (["linear"], lambda: _operator(jax.nn.relu)),
    "nearly linear": ([LONG], lambda: _operator(lambda v: v + 1e-4 * v**2)),
    "NaN": (["linear"], lambda: _function(np.full((N, N), np.nan))),
    "conjugate": (
        [COMPLEX],
        lambda: _operator(lambda v: 2 * v + 0.5 * jnp.conj(v), complex),
    ),
    "real part": (
        [COMPLEX],
        lambda: _operator(lambda v: v.real.astype(v.dtype), complex),
    ),
    "one entry": (
        ["symmetric"],
        lambda: _function(np.eye(N) + 0.5 * np.eye(N, k=N - 1), lx.symmetric_tag),
    ),
    "not Hermitian": (
        ["Hermitian"],
        lambda: _function(9 * np.eye(N) + A + 0j, lx.positive_semidefinite_tag),
    ),
    "negative": (["semidefinite"], lambda: _function(SEMIDEFINITE, NEGATIVE_TAG)),
    "indefinite": (
        ["semidefinite"],
        lambda: _function(np.diag([-0.5] + [1.0] * (N - 1)), PSD),
    ),
    "diagonal": (
        ["diagonal"],
        lambda: _function(
            2 * np.eye(N) + np.eye(N, k=1) + np.eye(N, k=-1), lx.diagonal_tag
        ),
    ),
    "tridiagonal": (
        ["tridiagonal"],
        lambda: _function(np.eye(N) + np.eye(N, k=2), lx.tridiagonal_tag),
    ),
    "lower": (["lower triangular"], lambda: _function(A, lx.lower_triangular_tag)),
    "upper": (["upper triangular"], lambda: _function(A, lx.upper_triangular_tag)),
    "unit": (
        ["unit diagonal"],
        lambda: _function(1.1 * np.eye(N), lx.unit_diagonal_tag),
    ),
    "transpose": (["transpose"], lambda: _function(A, transposed=A)),
    "adjoint": (
        ["transpose", "adjoint"],
        lambda: _function(HERMITIAN, transposed=HERMITIAN),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_faults_are_named(name):
    names, make = WRONG[name]
    assert _faults(make()) == names


@pytest.mark.wrong_types
@pytest.mark.x64
def test_other_arguments():
    for arguments in ((A, jr.key(0)), (jr.key(0), A)):
        with pytest.raises(TypeError, match="operator must be a lineax operator, got"):
            check_operator(*arguments)
    with pytest.raises(TypeError, match="check_operator: key must be a single key"):
        check_operator(0, _function(A))


@jax.custom_jvp
def _wrong_twice(x):
    return jnp.sum(jnp.exp(x))


@_wrong_twice.defjvp
def _wrong_twice_jvp(primals, tangents):
    slopes = jax.lax.stop_gradient(jnp.exp(primals[0]))  # right once only
    return _wrong_twice(*primals), jnp.vdot(slopes, tangents[0])


def test_hessians_equal_differences_of_gradients():
    x = jnp.linspace(0.0, 1.0, 10)
    key = jax.random.key(0)
    for fn in (lambda x: jnp.sum(jnp.exp(x)), lambda x: jnp.sum(jnp.abs(x - 0.3))):
        check_operator(key, tx.HessianLinearOperator(fn, x))
    wrong = tx.HessianLinearOperator(lambda x: _wrong_twice(x) + jnp.sum(x**2), x)
    for operator in (wrong, lx.TaggedLinearOperator(wrong, lx.symmetric_tag)):
        with pytest.raises(AssertionError, match=r"Hessian: off by 0\.[345]"):
            check_operator(key, operator)


def _wrong_at_scale(x):
    return 1e-6 * _wrong_twice(1e3 * x)


def test_hessians_are_checked_at_any_scale():
    key, shifts = jax.random.key(0), jnp.linspace(1.0, 2.0, 80)

    def wave(x):
        return jnp.sum(jnp.sin(x) ** 2) + jnp.sum(x**2)

    for far in (0.0, 100.0, 1000.0):
        check_operator(key, tx.HessianLinearOperator(wave, far + shifts))
    wrong = tx.HessianLinearOperator(_wrong_at_scale, 1e-3 * shifts)
    with pytest.raises(AssertionError, match="Hessian: off by 1"):
        check_operator(key, wrong)


def test_hessians_that_are_not_finite_are_reported():
    nan = tx.HessianLinearOperator(lambda x: jnp.sum(jnp.nan * x**2), jnp.ones(4))
    with pytest.raises(AssertionError, match="Hessian: off by nan"):
        check_operator(jax.random.key(0), nan)


def test_long_vectors_stay_within_16_bits():
    def matrix(size):
        return jnp.asarray(size * SEMIDEFINITE, jnp.float16)

    for size in (1.0, 100.0, 3000.0):
        assert not _faults(_function(matrix(size), PSD))
    # Only long vectors show that a product saturates.
    for A in (matrix(1.0), matrix(100.0)):
        saturated = _operator(lambda v, A=A: A @ jnp.clip(v, -6, 6), jnp.float16)
        assert _faults(saturated) == [LONG]


def test_products_with_the_zero_vector_are_checked():
    def unit(v):
        return v * (jnp.sum(v**2) / jnp.sum(v**2))

    assert _faults(_operator(unit)) == ["zero"]
    safe = _operator(lambda v: jnp.where(jnp.any(v), unit(v), 0))
    assert not _faults(safe)
    # The error of few steps explains why products aren't linear.
    few = tx.MatrixFunctionLinearOperator(_function(SEMIDEFINITE, PSD), jnp.sqrt, 5)
    assert not _faults(few)
