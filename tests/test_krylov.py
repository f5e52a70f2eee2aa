"""Krylov spaces, with starting vectors left out, and divided differences."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close
from problems import SPECTRA, as_array, float_dtype, hermitian, is_x64, matrix
from spectral_helpers import eps, normal, to_double

from traceax._linalg.dense import eigh
from traceax._linalg.krylov import arnoldi, arnoldi_factor, block_lanczos, lanczos
from traceax._linalg.left_out_krylov import (
    coupling_of,
    leave_probes_out,
    sample_weights,
)
from traceax._spectral.function import divided_differences

# We orthonormalise up to 8,192 rows by Householder reflections, and more by products.
SHAPES = pytest.mark.parametrize(
    ("n", "m", "steps", "complex"),
    [(40, 4, 5, False), (40, 4, 10, True), (40, 1, 7, True), (40, 6, 1, False)],
)


class Space(NamedTuple):
    basis: Any
    T: Any
    omega: Any
    asymmetry: Any


@functools.partial(jax.jit, static_argnums=2)
def _arnoldi(a, start, steps):
    run = arnoldi(lambda X: a @ X, start, steps)
    return run.basis, arnoldi_factor(run, steps)[0]


@functools.partial(jax.jit, static_argnums=2)
def _block_lanczos(a, start, steps):
    run = arnoldi(lambda X: a @ X, start, steps)
    basis, factor = run.basis, arnoldi_factor(run, steps)[0]
    return Space(basis, *block_lanczos(factor))


@functools.partial(jax.jit, static_argnums=2)
def _lanczos(a, start, steps):
    return lanczos(lambda X: a @ X, start, steps)


def _assert_orthonormal(K):
    gram = K.conj().T @ K
    assert np.max(np.abs(gram - np.eye(K.shape[1]))) < (1e-13 if is_x64() else 1e-5)


def _norm(a):
    return max(np.linalg.norm(a, 2), 1e-300)


def _check_powers(a, start, basis, T, omega, degrees):
    """Assert `A^d X = K T^d omega` for `d < degrees`; return the next power's error."""
    size = _norm(a)
    exact, projected = start, omega
    for degree in range(degrees):
        deviation = np.max(np.abs(exact - basis @ projected))
        assert deviation < 200 * eps() * _norm(start), degree
        exact, projected = a @ exact / size, T @ projected / size
    return np.max(np.abs(exact - basis @ projected))


@SHAPES
@pytest.mark.parametrize("kind", SPECTRA)
def test_block_lanczos(kind, n, m, steps, complex):
    a, start = (
        as_array(x) for x in (hermitian(kind, n, complex), normal((n, m), complex))
    )
    space = jax.tree.map(to_double, _block_lanczos(a, start, steps))
    a, start = to_double(a), to_double(start)
    K, T = space.basis, space.T
    assert K.shape == (n, m * steps)
    _assert_orthonormal(K)
    rounding = 100 * eps() * _norm(a)
    assert np.max(np.abs(K.conj().T @ a @ K - T)) <= rounding
    assert np.array_equal(T, T.conj().T)
    assert space.asymmetry < 100 * eps()
    # T is block tridiagonal.
    block = np.arange(m * steps) // m
    far = np.abs(block[:, None] - block[None]) > 1
    assert np.max(np.abs(T[far]), initial=0) <= rounding
    deviation = _check_powers(a, start, K, T, space.omega, steps)
    # A space that grows can't reproduce one degree more.
    assert deviation > 1e-4 or kind != "signed" or m * steps == n


def test_dependent_starting_vectors():
    start = normal((40, 4))
    for columns in ([0, 1, 0, 2], [0, 0, 0, 0]):
        dependent = as_array(start[:, columns])
        a = as_array(matrix("signed", 40))
        space = jax.tree.map(to_double, _block_lanczos(a, dependent, 5))
        _assert_orthonormal(space.basis)
        assert space.asymmetry < 100 * eps()
        _check_powers(to_double(a), to_double(dependent), *space[:3], 5)


def test_asymmetry_detects_operators_that_are_not_hermitian():
    start = as_array(normal((40, 4)))
    a = matrix("nonsymmetric", 40)
    for steps in (1, 2, 5):
        assert _block_lanczos(as_array(a), start, steps).asymmetry > 0.05
    # The measure is proportional to the antisymmetric part.
    skew = a - a.T
    small = hermitian("flat", 40) + 1e-3 * skew
    ratio = _block_lanczos(as_array(small), start, 5).asymmetry
    assert 1e-5 < ratio < 1e-2


#
# Arnoldi
#


def _nonsymmetric(kind, n, complex):
    match kind:
        case "general":
            return matrix("nonsymmetric", n, complex)
        case "shift":  # nilpotent
            return np.eye(n, k=1) * (1 + 0j if complex else 1)
        case "rank 3":
            return normal((n, 3), complex, 1) @ normal((3, n), complex, 2)
        case "oblique projector":
            x, y = normal((n, 3), complex, 1), normal((3, n), complex, 2)
            return x @ np.linalg.solve(y @ x, y)
        case "rotation":
            a = normal((n, n), complex, 3)
            return (a - a.conj().T) / np.sqrt(n)
    raise ValueError(kind)


@SHAPES
def test_arnoldi(n, m, steps, complex):
    for kind in ("general", "shift", "rank 3", "oblique projector", "rotation"):
        a = as_array(_nonsymmetric(kind, n, complex))
        start = as_array(normal((n, m), complex))
        K, H = jax.tree.map(to_double, _arnoldi(a, start, steps))
        omega, H = H[:, :m], H[:, m:]
        a, start = to_double(a), to_double(start)
        _assert_orthonormal(K)
        assert np.max(np.abs(K.conj().T @ a @ K - H)) < 100 * eps() * _norm(a), kind
        block = np.arange(m * steps) // m
        assert np.all(H[block[:, None] > block[None] + 1] == 0), kind
        _check_powers(a, start, K, H, omega, steps)


#
# Lanczos from many vectors
#


@pytest.mark.parametrize(
    ("n", "steps", "complex"), [(40, 6, False), (40, 1, True), (300, 6, True)]
)
def test_lanczos(n, steps, complex):
    m = 3
    for kind in SPECTRA:
        a = as_array(hermitian(kind, n, complex))
        start = as_array(normal((n, m), complex))
        spaces = jax.tree.map(to_double, _lanczos(a, start, steps))
        a, start = to_double(a), to_double(start)
        size = _norm(a)
        assert_close(spaces.norms, np.linalg.norm(start, axis=0), rtol=100 * eps())
        for i in range(m):
            V, T, w = spaces.basis[i].T, spaces.projected[i], start[:, i]
            filled = np.linalg.norm(V, axis=0) > 0
            assert filled[0]
            assert not np.any(np.diff(filled.astype(int)) > 0)
            assert np.all(V[:, ~filled] == 0)
            _assert_orthonormal(V[:, filled])
            projected = V.conj().T @ a @ V
            block = np.ix_(filled, filled)
            assert np.max(np.abs((projected - T)[block])) < 100 * eps() * size, kind
            # Padding is decoupled, and stays within the numerical range.
            assert np.all(T[np.ix_(filled, ~filled)] == 0)
            padding = T[np.ix_(~filled, ~filled)]
            assert np.array_equal(padding, T[0, 0] * np.eye(len(padding)))
            # Vectors are exact up to degree s - 1, and quadratic forms to degree 2 s -
            # 1.
            norm, first = spaces.norms[i], np.eye(steps)[0]
            _check_powers(a, w[:, None], V, T, norm * first[:, None], steps)
            exact, coordinates = w, norm * first
            for degree in range(2 * steps):
                deviation = np.vdot(w, exact) - norm * first @ coordinates
                assert abs(deviation) < 200 * eps() * norm**2, (kind, degree)
                exact, coordinates = a @ exact / size, T @ coordinates / size


#
# Leaving probes out
#


def _krylov_projector(a, probes, steps):
    """Projector, rank and condition number, by one SVD for all products."""
    blocks, block = [], probes
    for _ in range(steps):
        blocks.append(block)
        block = a @ block
    u, values, _ = np.linalg.svd(np.concatenate(blocks, axis=1), full_matrices=False)
    rank = int(np.sum(values > 1e-9 * max(np.max(values, initial=0), 1e-300)))
    condition = values[0] / values[rank - 1] if rank else 1.0
    return u[:, :rank] @ u[:, :rank].conj().T, rank, condition


def _left_out_sets(m):
    for i in range(m):
        yield [i]
    for i in range(m):
        yield [i, (i + 1) % m]


@functools.partial(jax.jit, static_argnums=2)
def _leave_out(a, start, steps):
    krylov = _block_lanczos(a, start, steps)
    left_out = leave_probes_out(krylov.T, krylov.omega, a.shape[0], steps)
    values, vectors = eigh(krylov.T)
    return (
        krylov,
        left_out,
        vectors.conj().T @ coupling_of(left_out) @ vectors,
        sample_weights(left_out, vectors),
        (values, vectors),
    )


LEFT_OUT = [
    ("flat", 4, 3, True),
    ("signed", 4, 2, False),
    ("flat", 2, 3, False),
    ("flat", 4, 1, True),
    ("rank 5", 4, 3, True),
    ("rank 5, indefinite", 5, 3, False),
    ("small projector", 5, 3, False),
    ("small projector", 3, 4, True),
    ("repeated", 3, 4, True),
    ("identity", 4, 3, True),
    ("zero", 4, 3, True),
]


@pytest.mark.parametrize(("kind", "m", "steps", "complex"), LEFT_OUT)
def test_leaving_probes_out_against_a_loop(kind, m, steps, complex):
    n = 24
    a = hermitian(kind, n, complex)
    start = as_array(normal((n, m), complex, 5))
    krylov, left_out, coupling, weights, (_, S) = jax.tree.map(
        to_double, _leave_out(as_array(a), start, steps)
    )
    start = to_double(start)
    V = krylov.basis @ S
    naive_weights, mean = [], 0
    for case, removed in enumerate(_left_out_sets(m)):
        kept = [i for i in range(m) if i not in removed]
        P, rank, condition = _krylov_projector(a, start[:, kept], steps)
        atol = 50 * eps() * condition
        assert atol < 0.02
        spanned = (
            krylov.basis
            @ left_out.spaces.reshape(2 * m, *left_out.spaces.shape[2:])[case].T
        )
        assert np.max(np.abs(spanned @ spanned.conj().T - P)) < atol
        assert left_out.dimensions.reshape(-1)[case] == n - rank
        lengths = np.linalg.norm(spanned, axis=0)
        assert np.all((lengths == 0) | (np.abs(lengths - 1) < 10 * eps()))
        for position, probe in enumerate(removed):
            g = start[:, probe] - P @ start[:, probe]
            g = g / np.linalg.norm(g)
            test = left_out.tests.reshape(3 * m, -1)[case + m * position]
            assert np.max(np.abs(krylov.basis @ test - g)) < 4 * atol
            C = P + (n - rank) * np.outer(g, g.conj())
            naive = np.real(np.sum(V.conj() * (C @ V), axis=0))
            test_weights = weights[len(removed) - 1 + position]
            assert np.max(np.abs(test_weights[case % m] - naive)) < 8 * n * atol
            naive_weights.append(naive)
            if len(removed) == 1:
                mean = mean + C / m
    assert np.max(np.abs(coupling - V.conj().T @ mean @ V)) < 8 * n * atol
    # Each sample is a sum over n dimensions.
    for x in weights:
        assert_close(np.sum(x, axis=1), n * np.ones(m), rtol=1e3 * eps())
    assert_close(np.trace(coupling), n, rtol=1e3 * eps())


#
# Divided differences
#


def _exact_differences(name, x, y):
    x, y = x.astype(np.longdouble), y.astype(np.longdouble)
    h = (x - y) / 2
    safe = np.where(h == 0, 1, h)
    match name:
        case "exp":
            return np.exp((x + y) / 2) * np.where(h == 0, 1, np.sinh(safe) / safe)
        case "log":
            t = 2 * safe / y
            return np.where(h == 0, 1 / y, np.log1p(t) / (2 * safe))
        case "sqrt":
            return 1 / (np.sqrt(x) + np.sqrt(y))
        case "cube":
            return x**2 + x * y + y**2
        case "reciprocal":
            return -1 / (x * y)
    raise ValueError(name)


FUNCTIONS = {
    "exp": jnp.exp,
    "log": jnp.log,
    "sqrt": jnp.sqrt,
    "cube": lambda x: x**3,
    "reciprocal": lambda x: 1 / x,
}


@functools.partial(jax.jit, static_argnums=0)
def _compiled_differences(functions, x, y):
    return divided_differences(lambda z: [f(z) for f in functions], x, y)


def _differences(functions, x, y, dtype=None):
    """Divided differences of each function, and the points of every pair."""
    x, y = (jnp.asarray(z, dtype or float_dtype()) for z in (x, y))
    differences = _compiled_differences(tuple(functions), x, y)
    assert all(each.dtype == x.dtype for each in differences)
    X, Y = np.broadcast_arrays(np.asarray(x)[:, None], np.asarray(y)[None])
    return [np.asarray(each, np.longdouble) for each in differences], X, Y


def _tolerance(name, X, exact, dtype):
    # The two branches meet at a relative distance of eps^(1/5). There the secant
    # cancels to eps^(4/5), and the mean of f' errs by the distance's fourth power,
    # which is the same.
    values = np.abs(FUNCTIONS[name](X.astype(np.float64))) / X
    return 4 * eps(dtype) ** 0.8 * (np.abs(exact) + np.asarray(values))


@pytest.mark.parametrize(
    "dtype", [jnp.float32, pytest.param(jnp.float64, marks=pytest.mark.x64)]
)
def test_divided_differences(dtype):
    x = np.array([0.3, 0.9, 2.0, 3.7])
    gaps = np.concatenate([[0.0], np.geomspace(1e-16, 0.5, 60)])
    y = np.concatenate([x * (1 + g) for g in gaps] + [x * (1 - g) for g in gaps])
    all_differences, X, Y = _differences(FUNCTIONS.values(), x, y, dtype)
    for name, actual in zip(FUNCTIONS, all_differences, strict=True):
        exact = _exact_differences(name, X, Y)
        assert np.all(np.abs(actual - exact) < _tolerance(name, X, exact, dtype)), name
        # Equal points give the derivative itself.
        same = X == Y
        assert_close(actual[same], exact[same], rtol=4 * eps(dtype))


def test_divided_differences_at_any_scale():
    for scale in (1e-30, 1e-8, 1e8, 1e30):
        x = scale * np.array([1.0, 1 + 1e-9, 1.001, 1.2, 50.0, 3e4])
        all_differences, X, Y = _differences((jnp.sqrt, jnp.log), x, x)
        for name, actual in zip(("sqrt", "log"), all_differences, strict=True):
            exact = _exact_differences(name, X, Y)
            deviation = np.abs(actual - exact)
            assert np.all(deviation < _tolerance(name, X, exact, None)), (name, scale)


def test_divided_differences_of_a_root_at_zero():
    x = np.array([0.0, 1e-12, 0.25, 1.0])
    (actual,), X, Y = _differences((jnp.sqrt,), x, x)
    exact = np.where((X == 0) & (Y == 0), 0, np.sqrt(X) + np.sqrt(Y))
    assert np.all(np.isfinite(actual))
    apart = (X != 0) | (Y != 0)
    assert_close(actual[apart], 1 / exact[apart], rtol=4 * eps() ** 0.8)
    # At zero, rounding of the largest point limits the slope.
    assert_close(actual[0, 0], eps() ** -0.5, rtol=100 * eps())
    (actual,), *_ = _differences((jnp.sqrt,), np.zeros(2), np.zeros(2))
    assert_close(actual, np.full((2, 2), eps() ** -0.5), rtol=100 * eps())


def test_divided_differences_of_the_modulus():
    x = np.array([-2.0, -1.0, 0.5, 3.0])
    (actual,), X, Y = _differences((jnp.abs,), x, x)
    exact = (np.abs(X) - np.abs(Y)) / np.where(X == Y, 1, X - Y)
    exact = np.where(X == Y, np.sign(X), exact)
    assert_close(actual, exact, rtol=10 * eps())


def test_divided_differences_of_points_near_zero():
    # An eigenvalue solver returns zeros as numbers of rounding size.
    x = np.array([0.0, 1e-3, 0.2, 1.5]) * eps()
    x = np.concatenate([x, [0.7, 1.0]])
    (actual,), X, Y = _differences((jnp.exp,), x, x)
    assert np.max(np.abs(actual - _exact_differences("exp", X, Y))) < 1e-3


def test_divided_differences_of_complex_functions():
    x, y = as_array([0.1, 0.5, 0.50001]), as_array([0.5, 2.0])

    def complex_function(z):
        return jax.lax.complex(z, jnp.exp(z))

    (actual,) = _compiled_differences((complex_function,), x, y)
    rtol = 10 * eps() ** 0.8
    assert_close(np.real(actual), np.ones((3, 2)), rtol=rtol)
    expected = _exact_differences("exp", to_double(x)[:, None], to_double(y)[None])
    assert_close(np.imag(actual), expected, rtol=4 * rtol)
