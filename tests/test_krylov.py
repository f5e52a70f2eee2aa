"""Krylov spaces, leaving starting vectors out of them, and divided differences."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, float_dtype, is_x64, matrix
from spectral_helpers import (
    as_array,
    eps,
    hermitian,
    normal,
    wide,
)

from traceax._linalg.krylov import arnoldi, block_lanczos, lanczos
from traceax._linalg.left_out_krylov import (
    coupling_of,
    leave_probes_out,
    sample_weights,
)
from traceax._linalg.small import eigh
from traceax._spectral.function import divided_differences

GROWING = ["flat", "poly", "exp", "signed"]
BREAKING = [
    "identity",
    "twice the identity",
    "projector",
    "small projector",
    "repeated",
    "rank 5",
    "rank 5, indefinite",
]
# Householder reflections orthonormalise up to 2048 rows, products above.
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
    return arnoldi(lambda X: a @ X, start, steps)[:2]


@functools.partial(jax.jit, static_argnums=2)
def _block_lanczos(a, start, steps):
    basis, factor, _ = arnoldi(lambda X: a @ X, start, steps)
    return Space(basis, *block_lanczos(factor))


@functools.partial(jax.jit, static_argnums=2)
def _lanczos(a, start, steps):
    return lanczos(lambda X: a @ X, start, steps)


def _orthonormal(K, atol=None):
    tolerance = 1e-13 if is_x64() else 1e-5
    gram = K.conj().T @ K
    assert np.max(np.abs(gram - np.eye(K.shape[1]))) < (atol or tolerance)


def _norm(a):
    return np.linalg.norm(a, 2)


@SHAPES
def test_block_lanczos_is_a_projection(n, m, steps, complex):
    for kind in GROWING + BREAKING:
        a = hermitian(kind, n, complex)
        start = as_array(normal((n, m), complex))
        space = jax.tree.map(wide, _block_lanczos(as_array(a), start, steps))
        a, start = wide(as_array(a)), wide(start)
        K, T = space.basis, space.T
        assert K.shape == (n, m * steps)
        _orthonormal(K)
        rounding = 100 * eps() * max(_norm(a), 1e-300)
        assert np.max(np.abs(K.conj().T @ a @ K - T)) <= rounding, kind
        assert np.array_equal(T, T.conj().T)
        assert space.asymmetry < 100 * eps(), kind
        # Block tridiagonal.
        block = np.arange(m * steps) // m
        far = np.abs(block[:, None] - block[None]) > 1
        assert np.max(np.abs(T[far]), initial=0) <= rounding, kind
        assert_close(K @ space.omega, start, rtol=0, atol=100 * eps() * _norm(start))


@SHAPES
def test_block_lanczos_reproduces_polynomials(n, m, steps, complex):
    for kind in GROWING + BREAKING:
        a = hermitian(kind, n, complex)
        start = as_array(normal((n, m), complex))
        space = jax.tree.map(wide, _block_lanczos(as_array(a), start, steps))
        a, start = wide(as_array(a)), wide(start)
        size = max(_norm(a), 1e-300)
        exact, projected = start, space.omega
        for degree in range(steps):
            atol = 200 * eps() * _norm(start)
            off = np.max(np.abs(exact - space.basis @ projected))
            assert off < atol, (kind, degree)
            exact, projected = a @ exact / size, space.T @ projected / size
        # One degree more is out of reach for a space that grows.
        if kind == "signed" and m * steps < n:
            assert np.max(np.abs(exact - space.basis @ projected)) > 1e-4


@SHAPES
def test_the_basis_of_a_zero_operator(n, m, steps, complex):
    a = as_array(hermitian("zero", n, complex))
    start = as_array(normal((n, m), complex))
    _orthonormal(wide(_block_lanczos(a, start, steps).basis))


@pytest.mark.parametrize("factor", [1e-20, 1e18])
@pytest.mark.parametrize("n", [40, 300])
def test_block_lanczos_knows_no_scale(factor, n):
    for kind in ("flat", "projector", "rank 5"):
        a, start = hermitian(kind, n), as_array(normal((n, 4)))
        space = jax.tree.map(wide, _block_lanczos(as_array(a * factor), start, 5))
        a = wide(as_array(a * factor)) / factor
        _orthonormal(space.basis)
        projected = space.basis.T @ a @ space.basis
        rounding = 100 * eps() * _norm(a)
        assert np.max(np.abs(space.T / factor - projected)) < rounding
        assert space.asymmetry < 100 * eps()
        exact = a @ a @ a @ wide(start)
        T = space.T / factor
        off = exact - space.basis @ (T @ (T @ (T @ space.omega)))
        assert np.max(np.abs(off)) < rounding * _norm(a) ** 2 * _norm(wide(start))


def test_dependent_starting_vectors():
    start = normal((40, 4))
    for columns in ([0, 1, 0, 2], [0, 0, 0, 0]):
        dependent = as_array(start[:, columns])
        a = as_array(matrix("signed", 40))
        space = jax.tree.map(wide, _block_lanczos(a, dependent, 5))
        a = wide(a)
        _orthonormal(space.basis)
        assert space.asymmetry < 100 * eps()
        power = np.linalg.matrix_power
        for degree in range(5):
            exact = power(a, degree) @ wide(dependent)
            got = space.basis @ power(space.T, degree) @ space.omega
            atol = 200 * eps() * _norm(wide(dependent)) * _norm(a) ** degree
            assert_close(got, exact, rtol=0, atol=atol)


def test_asymmetry_tells_of_operators_that_are_not_hermitian():
    start = as_array(normal((40, 4)))
    a = matrix("nonsymmetric", 40)
    for steps in (1, 2, 5):
        assert _block_lanczos(as_array(a), start, steps).asymmetry > 0.05
    # In proportion to the antisymmetric part.
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
    return hermitian(kind, n, complex)


@SHAPES
def test_arnoldi(n, m, steps, complex):
    for kind in ("general", "shift", "rank 3", "oblique projector", "rotation"):
        a = as_array(_nonsymmetric(kind, n, complex))
        start = as_array(normal((n, m), complex))
        K, H = jax.tree.map(wide, _arnoldi(a, start, steps))
        omega, H = H[:, :m], H[:, m:]
        a, start = wide(a), wide(start)
        _orthonormal(K)
        size = max(_norm(a), 1e-300)
        rounding = 100 * eps() * size
        assert np.max(np.abs(K.conj().T @ a @ K - H)) < rounding, kind
        block = np.arange(m * steps) // m
        assert np.all(H[block[:, None] > block[None] + 1] == 0), kind
        exact, projected = start, omega
        for degree in range(steps):
            off = np.max(np.abs(exact - K @ projected))
            assert off < 200 * eps() * _norm(start), (kind, degree)
            exact, projected = a @ exact / size, H @ projected / size


#
# Lanczos of many vectors
#


@pytest.mark.parametrize(
    ("n", "steps", "complex"), [(40, 6, False), (40, 1, True), (300, 6, True)]
)
def test_lanczos(n, steps, complex):
    m = 3
    for kind in GROWING + BREAKING:
        a = as_array(hermitian(kind, n, complex))
        start = as_array(normal((n, m), complex))
        spaces = jax.tree.map(wide, _lanczos(a, start, steps))
        a, start = wide(a), wide(start)
        size = max(_norm(a), 1e-300)
        assert_close(spaces.norms, np.linalg.norm(start, axis=0), rtol=100 * eps())
        for i in range(m):
            V, T = spaces.basis[:, i].T, spaces.projected[i]
            w = start[:, i]
            lengths = np.linalg.norm(V, axis=0)
            alive = lengths > 0
            assert alive[0]
            assert not np.any(np.diff(alive.astype(int)) > 0)
            assert np.all(V[:, ~alive] == 0)
            _orthonormal(V[:, alive])
            projected = V.conj().T @ a @ V
            rounding = 100 * eps() * size
            inside = np.ix_(alive, alive)
            assert np.max(np.abs((projected - T)[inside])) < rounding, kind
            # What pads a space is decoupled, and within the range of A.
            assert np.all(T[np.ix_(alive, ~alive)] == 0)
            padding = T[np.ix_(~alive, ~alive)]
            assert np.array_equal(padding, T[0, 0] * np.eye(len(padding)))
            # Vectors of degree s - 1, forms of degree 2 s - 1.
            norm, scaled = spaces.norms[i], T / size
            first = np.eye(steps)[0]
            exact, coordinates = w, norm * first
            for degree in range(2 * steps):
                form = np.vdot(w, exact)
                got = norm * first @ coordinates
                assert abs(form - got) < 200 * eps() * norm**2, (kind, degree)
                if degree < steps:
                    off = np.max(np.abs(V @ coordinates - exact))
                    assert off < 200 * eps() * norm, (kind, degree)
                exact, coordinates = a @ exact / size, scaled @ coordinates


@pytest.mark.parametrize("factor", [1.0, 1e-20, 1e18])
def test_lanczos_ends_with_the_space(factor):
    # Starting vector i is a sum of i eigenvectors, of a diagonal matrix: i dimensions.
    n, steps = 30, 6
    values = np.arange(1.0, n + 1)
    start = np.tril(np.ones((n, 5))) - np.tril(np.ones((n, 5)), -1)
    start = np.cumsum(start, axis=1)
    start = np.concatenate([np.zeros((n, 1)), start], axis=1)
    a = as_array(np.diag(values * factor))
    spaces = jax.tree.map(wide, _lanczos(a, as_array(start), steps))
    for i in range(6):
        lengths = np.linalg.norm(spaces.basis[:, i], axis=1)
        assert np.sum(lengths > 0) == i
        T = spaces.projected[i] / factor
        found = np.linalg.eigvalsh(T[:i, :i])
        assert_close(found, values[:i], rtol=100 * eps())
        assert np.all(T[i:, :i] == 0)
    assert np.all(spaces.projected[0] == 0)


#
# Leaving probes out
#


def _krylov_projector(a, probes, steps):
    """By an SVD of all products at once: the projector, and the rank."""
    blocks, block = [], probes
    for _ in range(steps):
        blocks.append(block)
        block = a @ block
    u, values, _ = np.linalg.svd(np.concatenate(blocks, axis=1), full_matrices=False)
    rank = int(np.sum(values > 1e-9 * max(np.max(values, initial=0), 1e-300)))
    condition = values[0] / values[rank - 1] if rank else 1.0
    return u[:, :rank] @ u[:, :rank].conj().T, rank, condition


def _lanes(m):
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
        coupling_of(left_out, vectors, start.shape[1]),
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
    ("twice the identity", 4, 3, True),
    ("zero", 4, 3, True),
]


@pytest.mark.parametrize(("kind", "m", "steps", "complex"), LEFT_OUT)
def test_leaving_probes_out_against_a_loop(kind, m, steps, complex):
    n = 24
    a = hermitian(kind, n, complex)
    start = as_array(normal((n, m), complex, 5))
    krylov, left_out, coupling, weights, (_, S) = jax.tree.map(
        wide, _leave_out(as_array(a), start, steps)
    )
    start = wide(start)
    V = krylov.basis @ S
    naive_weights, mean = [], 0
    for lane, left in enumerate(_lanes(m)):
        kept = [i for i in range(m) if i not in left]
        P, rank, condition = _krylov_projector(a, start[:, kept], steps)
        atol = 50 * eps() * condition
        assert atol < 0.02
        spanned = krylov.basis @ left_out.spaces[lane].T
        assert np.max(np.abs(spanned @ spanned.conj().T - P)) < atol
        assert left_out.dimensions[lane] == n - rank
        lengths = np.linalg.norm(spanned, axis=0)
        assert np.all((lengths == 0) | (np.abs(lengths - 1) < 10 * eps()))
        for which, probe in enumerate(left):
            g = start[:, probe] - P @ start[:, probe]
            g = g / np.linalg.norm(g)
            got = (left_out.own, left_out.following)[which][lane]
            assert np.max(np.abs(krylov.basis @ got - g)) < 4 * atol
            C = P + (n - rank) * np.outer(g, g.conj())
            naive = np.real(np.sum(V.conj() * (C @ V), axis=0))
            which_weights = (weights.samples, weights.pairs_first)[len(left) - 1]
            if which == 1:
                which_weights = weights.pairs_second
            assert np.max(np.abs(which_weights[lane % m] - naive)) < 8 * n * atol
            naive_weights.append(naive)
            if len(left) == 1:
                mean = mean + C / m
    assert np.max(np.abs(coupling - V.conj().T @ mean @ V)) < 8 * n * atol
    # Each sample is a sum over n dimensions.
    for x in weights:
        assert_close(np.sum(x, axis=1), n * np.ones(m), rtol=1e3 * eps())
    assert_close(np.trace(coupling), n, rtol=1e3 * eps())


def test_what_a_left_out_probe_can_not_change():
    # Space i is the same whatever probe i is.
    n, m, steps = 24, 4, 3
    a, start = as_array(hermitian("signed", n)), normal((n, m), seed=5)
    first = _leave_out(a, as_array(start), steps)
    start = start.copy()  # the first computation may still read it
    start[:, 1] = normal(n, seed=6)
    second = _leave_out(a, as_array(start), steps)

    def projector(result, lane):
        spanned = wide(result[0].basis) @ wide(result[1].spaces[lane]).T
        return spanned @ spanned.T

    atol = 1e-11 if is_x64() else 1e-3
    assert_close(projector(first, 1), projector(second, 1), rtol=0, atol=atol)
    for lane in (0, 2, 3):
        apart = np.max(np.abs(projector(first, lane) - projector(second, lane)))
        assert apart > 0.05
    # Lanes without probe 1: its own, that of the pair (0, 1), and of (1, 2).
    for lane in (m, m + 1):
        assert_close(projector(first, lane), projector(second, lane), rtol=0, atol=atol)


#
# Divided differences
#


def _exactly(name, x, y):
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


def _differences(function, x, y, dtype):
    x, y = jnp.asarray(x, dtype), jnp.asarray(y, dtype)
    (got,) = jax.jit(lambda x, y: divided_differences(lambda z: [function(z)], x, y))(
        x, y
    )
    assert got.dtype == dtype
    X, Y = np.broadcast_arrays(np.asarray(x)[:, None], np.asarray(y)[None])
    return np.asarray(got, np.longdouble), X, Y


@pytest.mark.parametrize(
    "dtype", [jnp.float32, pytest.param(jnp.float64, marks=pytest.mark.x64)]
)
@pytest.mark.parametrize("name", list(FUNCTIONS))
def test_divided_differences(name, dtype):
    base = np.array([0.3, 0.9, 2.0, 3.7])
    gaps = np.concatenate([[0.0], np.geomspace(1e-16, 0.5, 60)])
    x = base
    y = np.concatenate([base * (1 + g) for g in gaps] + [base * (1 - g) for g in gaps])
    got, X, Y = _differences(FUNCTIONS[name], x, y, dtype)
    exact = _exactly(name, X, Y)
    # Where the two branches meet, at a relative distance of eps^(1/5), a secant
    # cancels to eps^(4/5), and so does the mean of f' by its fourth power.
    values = np.abs(FUNCTIONS[name](X.astype(np.float64))) / X
    tolerance = 4 * eps(dtype) ** 0.8 * (np.abs(exact) + np.asarray(values))
    assert np.all(np.abs(got - exact) < tolerance)
    # Equal points: the derivative itself.
    same = X == Y
    assert_close(got[same], exact[same], rtol=4 * eps(dtype))


@pytest.mark.parametrize("scale", [1e-30, 1e-8, 1e8, 1e30])
@pytest.mark.parametrize("name", ["sqrt", "log"])
def test_divided_differences_know_no_scale(name, scale):
    x = scale * np.array([1.0, 1 + 1e-9, 1.001, 1.2, 50.0, 3e4])
    got, X, Y = _differences(FUNCTIONS[name], x, x, float_dtype())
    values = np.abs(FUNCTIONS[name](X.astype(np.float64))) / X
    exact = _exactly(name, X, Y)
    tolerance = 4 * eps() ** 0.8 * (np.abs(exact) + np.asarray(values))
    assert np.all(np.abs(got - exact) < tolerance)


def test_divided_differences_of_a_root_at_zero():
    x = np.array([0.0, 1e-12, 0.25, 1.0])
    got, X, Y = _differences(jnp.sqrt, x, x, float_dtype())
    exact = np.where((X == 0) & (Y == 0), 0, np.sqrt(X) + np.sqrt(Y))
    assert np.all(np.isfinite(got))
    apart = (X != 0) | (Y != 0)
    assert_close(got[apart], 1 / exact[apart], rtol=4 * eps() ** 0.8)
    # Zero is known to rounding of the largest point.
    assert_close(got[0, 0], eps() ** -0.5, rtol=100 * eps())
    got, *_ = _differences(jnp.sqrt, np.zeros(2), np.zeros(2), float_dtype())
    assert_close(got, np.full((2, 2), eps() ** -0.5), rtol=100 * eps())


def test_divided_differences_of_the_modulus():
    x = np.array([-2.0, -1.0, 0.5, 3.0])
    got, X, Y = _differences(jnp.abs, x, x, float_dtype())
    exact = (np.abs(X) - np.abs(Y)) / np.where(X == Y, 1, X - Y)
    exact = np.where(X == Y, np.sign(X), exact)
    assert_close(got, exact, rtol=10 * eps())


def test_divided_differences_of_points_near_zero():
    # Eigenvalues that are 0 come out as anything of rounding size.
    x = np.array([0.0, 1e-3, 0.2, 1.5]) * eps()
    x = np.concatenate([x, [0.7, 1.0]])
    got, X, Y = _differences(jnp.exp, x, x, float_dtype())
    assert np.max(np.abs(got - _exactly("exp", X, Y))) < 1e-3


def test_several_functions_and_complex_ones():
    x, y = np.array([0.1, 0.5, 0.50001]), np.array([0.5, 2.0])

    def functions(z):
        return [z**2, jax.lax.complex(z, jnp.exp(z)), jnp.exp(z)]

    x, y = as_array(x), as_array(y)
    square, both, exponential = divided_differences(functions, x, y)
    X, Y = wide(x)[:, None], wide(y)[None]
    rtol = 10 * eps() ** 0.8
    assert_close(square, X + Y, rtol=rtol)
    assert_close(exponential, _exactly("exp", X, Y), rtol=4 * rtol)
    assert_close(np.real(both), np.ones((3, 2)), rtol=rtol)
    assert_close(np.imag(both), wide(exponential), rtol=rtol)
