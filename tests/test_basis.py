"""Orthonormal bases that grow."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import complex_dtype, float_dtype, haar

from traceax._basis import extend_at_once, growing_basis

KINDS = [
    *("random", "decaying", "rank 3", "zero"),
    *("tiny", "almost too large", "coordinates", "graded"),
]


def block(kind, n, k, complex):
    rng = np.random.default_rng(n + k)
    x = rng.normal(size=(n, k))
    if complex:
        x = x + 1j * rng.normal(size=(n, k))
    match kind:
        case "decaying":
            u = haar(n, 1)
            x = (u * 0.5 ** np.arange(n)) @ (u.T @ x)
        case "rank 3":
            x = rng.normal(size=(n, 3)) @ x[:3]
        case "zero":
            x = 0 * x
        case "tiny":
            x = 1e-25 * x
        case "almost too large":
            x = 1e36 * x
        case "coordinates":
            x = np.eye(n, k) + 0 * x
            x[:, 3:5] = x[:, :2]
        case "graded":
            x = x * 10.0 ** -np.arange(k)
    return jnp.asarray(x, complex_dtype() if complex else float_dtype())


def check(Q, R, given, tolerance=200):
    Q, R, given = (np.asarray(x) for x in (Q, R, given))
    eps = np.finfo(Q.dtype).eps
    k = Q.shape[1]
    assert np.abs(Q.conj().T @ Q - np.eye(k)).max() < tolerance * eps
    # Backward error of each column on its own scale.
    unit = np.abs(given).max(axis=0)
    unit = np.where(unit == 0, 1, unit)
    residual = np.linalg.norm(given / unit - Q @ (R / unit), axis=0)
    assert np.all(residual <= tolerance * eps * np.linalg.norm(given / unit, axis=0))
    assert np.abs(np.tril(R, -1)).max(initial=0) == 0


@pytest.mark.parametrize("complex", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [12, 300])
def test_factors_are_right_and_keep_every_bit(n, kind, complex):
    k = min(n // 2, 22)
    whole = block(kind, n, k, complex)
    factors = jax.jit(growing_basis)
    Q, R = (np.asarray(x) for x in factors(whole))
    check(Q, R, whole)
    # Within a tile, at its end, and beyond it.
    for width in {1, 3, min(8, k), min(13, k), min(16, k)}:
        q, r = factors(whole[:, :width])
        np.testing.assert_array_equal(q, Q[:, :width])
        np.testing.assert_array_equal(r, R[:width, :width])


def test_zeros_at_the_end_of_a_tile_keep_every_bit():
    # Reflections of the first tile, columns 0 to 15, could leave its zeros out.
    whole = block("random", 44, 22, False).at[:, 10:19].set(0)
    factors = jax.jit(growing_basis)
    Q, R = (np.asarray(x) for x in factors(whole))
    check(Q, R, whole)
    for width in (8, 12, 20):
        q, r = factors(whole[:, :width])
        np.testing.assert_array_equal(q, Q[:, :width])
        np.testing.assert_array_equal(r, R[:width, :width])


@pytest.mark.parametrize("kind", KINDS)
def test_extending_at_once(kind):
    n, width = 60, 4
    whole = block(kind, n, 3 * width, False)

    @jax.jit
    def factors(whole):
        def step(i, carry):
            basis, R = carry
            start = i * width
            given = jax.lax.dynamic_slice_in_dim(whole.T, start, width)
            Q, columns = extend_at_once(basis, given, start)
            basis = jax.lax.dynamic_update_slice_in_dim(basis, Q, start, 0)
            return basis, jax.lax.dynamic_update_slice_in_dim(R, columns, start, 1)

        empty = jnp.zeros((3 * width, 3 * width), whole.dtype)
        return jax.lax.fori_loop(0, 3, step, (jnp.zeros_like(whole.T), empty))

    basis, R = factors(whole)
    check(basis.T, R, whole)


def test_no_columns():
    Q, R = growing_basis(jnp.zeros((5, 0), float_dtype()))
    assert Q.shape == (5, 0)
    assert R.shape == (0, 0)
