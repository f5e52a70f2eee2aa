"""Every operation of every class of operators, against the dense matrix."""

import functools as ft
import itertools
import operator as op

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from operator_catalogue import (
    CATALOGUE,
    COMPLEX,
    OVER_PYTREES,
    SQUARE,
    WIDE,
    N,
    arrays,
    flat,
    known_of,
    near,
)
from problems import complex_dtype

from traceax._operators.check import as_complex
from traceax._operators.entries import columns_of, diagonal_of, has_known_entries

INDICES = np.asarray([3, 0, 3, 6], np.int32)

each = pytest.mark.parametrize("name", CATALOGUE)


def _vectors(size, dtype, seed):
    rng = np.random.default_rng(seed)
    real, imaginary = rng.normal(size=(2, 3, size))
    complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return jnp.asarray(real + 1j * imaginary if complex else real, dtype)


#
# Operations: of an operator A, and of its matrix M. Right and left vectors are v and w.
#


def _pullback(A, v, w):
    return jax.vjp(flat(A), v[0])[1](w[0])[0]


def _mixed(v):
    return v[0].astype(complex_dtype()) + 1j * v[1]


OPERATIONS = {
    "product and its derivative": (
        lambda A, v, w: jax.jvp(flat(A), (v[0],), (v[1],)),
        lambda M, v, w: (M @ v[0], M @ v[1]),
    ),
    "several": (lambda A, v, w: jax.vmap(flat(A))(v), lambda M, v, w: v @ M.T),
    "transpose": (lambda A, v, w: flat(A.T)(w[0]), lambda M, v, w: w[0] @ M),
    "adjoint": (
        lambda A, v, w: flat(lx.conj(A.T))(w[0]),
        lambda M, v, w: w[0] @ M.conj(),
    ),
    "matrix": (lambda A, v, w: A.as_matrix(), lambda M, v, w: M),
    "expression": (
        lambda A, v, w: flat((lx.materialise(A) - 3.0 * lx.linearise(A)) / 4.0)(v[0]),
        lambda M, v, w: M @ v[0] / -2,
    ),
}
OF_SQUARE = {
    "diagonal": (lambda A, v, w: lx.diagonal(A), lambda M, v, w: jnp.diagonal(M)),
}
OF_REAL = {
    "complex multiple": (
        lambda A, v, w: flat(as_complex((1 + 2j) * A))(_mixed(v)),
        lambda M, v, w: (1 + 2j) * (M @ _mixed(v)),
    ),
}
IN_REVERSE = {"pullback": (_pullback, lambda M, v, w: w[0] @ M)}
READ = {
    "columns": (
        lambda A, v, w: columns_of(A, jnp.asarray(INDICES)),
        lambda M, v, w: M[:, INDICES],
    ),
    "entries": (lambda A, v, w: diagonal_of(A), lambda M, v, w: jnp.diagonal(M)),
}


@each
def test_operations(name):
    entry, p = CATALOGUE[name], arrays()
    M = np.asarray(entry.dense(p))
    v, w = (_vectors(size, M.dtype, seed) for seed, size in enumerate(M.shape[::-1]))
    operations = OPERATIONS | (READ if entry.read else {})
    operations |= {} if name in WIDE else OF_SQUARE
    operations |= {} if name in WIDE | COMPLEX else OF_REAL
    operations |= {} if entry.on_host else IN_REVERSE

    @jax.jit
    def found(p, v, w):
        A = entry.make(p)
        assert has_known_entries(A) == entry.read or name in WIDE
        return {what: of(A, v, w) for what, (of, _) in operations.items()}

    # lineax multiplies a real operator by a complex number so.
    with jax.numpy_dtype_promotion("standard"):
        results = found(p, v, w)
        for what, (_, of_matrix) in operations.items():
            expected = of_matrix(M, v, w)
            jax.tree.map(ft.partial(near, what=what), results[what], expected)


@pytest.mark.x64
@pytest.mark.parametrize("name", [x for x, entry in CATALOGUE.items() if entry.order])
def test_derivatives_with_respect_to_arrays(name):
    entry, p = CATALOGUE[name], arrays()
    M = entry.dense(p)
    v, w = (_vectors(size, M.dtype, seed) for seed, size in enumerate(M.shape[::-1]))
    tangent = jax.tree.map(jnp.cos, p)

    def derivatives(product):
        def of(p):
            return jnp.real(jnp.vdot(w[0], product(p)))

        @jax.jit
        def run(p):
            slope = jax.jvp(of, (p,), (tangent,))
            if entry.order == 1:
                return slope, jax.grad(of)(p)
            return slope, jax.jvp(jax.grad(of), (p,), (tangent,))

        return run(p)

    found = derivatives(lambda p: flat(entry.make(p))(v[0]))
    expected = derivatives(lambda p: entry.dense(p) @ v[0])
    jax.tree.map(near, found, expected)


@each
def test_what_is_known(name):
    entry = CATALOGUE[name]
    A = entry.make(arrays())
    assert known_of(A) == known_of(A.T) == known_of(lx.conj(A)) == entry.known
    structures = A.in_structure(), A.out_structure()
    assert (A.T.out_structure(), A.T.in_structure()) == structures
    assert (jax.eval_shape(A.mv, structures[0])) == structures[1]


@pytest.mark.parametrize("kind", [SQUARE, COMPLEX, OVER_PYTREES])
def test_sums_and_products_over_all_pairs(kind):
    p = arrays()
    operators = {name: entry.make(p) for name, entry in kind.items()}
    for (one, A), (other, B) in itertools.product(operators.items(), repeat=2):
        total = A + B
        known = kind[one].known & kind[other].known
        assert known_of(total) == known
        assert known_of(lx.conj(total.T)) == known
        assert has_known_entries(total) == (kind[one].read and kind[other].read)
        assert (A @ B.T).in_structure() == total.out_structure()

    v = _vectors(N, ravel_pytree(p["c" if kind is COMPLEX else "a"])[0].dtype, 0)

    @jax.jit
    def found(p):
        whole = ft.reduce(op.add, [entry.make(p) for entry in kind.values()])
        chain = [2.0 * entry.make(p) for entry in kind.values() if entry.read]
        read = ft.reduce(op.add, chain) if chain else None
        entries = read and (columns_of(read, jnp.asarray(INDICES)), diagonal_of(read))
        return flat(whole)(v[0]), flat(whole.T)(v[0]), entries

    whole = sum(entry.dense(p) for entry in kind.values())
    read = 2 * sum(entry.dense(p) for entry in kind.values() if entry.read)
    product, transposed, entries = found(p)
    near(product, whole @ v[0])
    near(transposed, v[0] @ whole)
    if entries:
        jax.tree.map(near, entries, (read[:, INDICES], jnp.diagonal(read)))
