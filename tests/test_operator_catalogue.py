"""Compare every operation for every operator class with the dense matrix."""

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
    assert_near,
    flat_product,
    known_properties,
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
# Operations on an operator A and its matrix M, with right vectors v and left vectors w
#


def _pullback(A, v, w):
    return jax.vjp(flat_product(A), v[0])[1](w[0])[0]


def _mixed(v):
    return v[0].astype(complex_dtype()) + 1j * v[1]


OPERATIONS = {
    "product and its derivative": (
        lambda A, v, w: jax.jvp(flat_product(A), (v[0],), (v[1],)),
        lambda M, v, w: (M @ v[0], M @ v[1]),
    ),
    "several": (lambda A, v, w: jax.vmap(flat_product(A))(v), lambda M, v, w: v @ M.T),
    "transpose": (lambda A, v, w: flat_product(A.T)(w[0]), lambda M, v, w: w[0] @ M),
    "adjoint": (
        lambda A, v, w: flat_product(lx.conj(A.T))(w[0]),
        lambda M, v, w: w[0] @ M.conj(),
    ),
    "matrix": (lambda A, v, w: A.as_matrix(), lambda M, v, w: M),
    "expression": (
        lambda A, v, w: flat_product((lx.materialise(A) - 3.0 * lx.linearise(A)) / 4.0)(
            v[0]
        ),
        lambda M, v, w: M @ v[0] / -2,
    ),
}
FOR_SQUARE = {
    "diagonal": (lambda A, v, w: lx.diagonal(A), lambda M, v, w: jnp.diagonal(M)),
}
FOR_REAL = {
    "complex multiple": (
        lambda A, v, w: flat_product(as_complex((1 + 2j) * A))(_mixed(v)),
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
    operations |= {} if name in WIDE else FOR_SQUARE
    operations |= {} if name in WIDE | COMPLEX else FOR_REAL
    operations |= {} if entry.on_host else IN_REVERSE

    @jax.jit
    def evaluate_all(p, v, w):
        A = entry.make(p)
        assert has_known_entries(A) == entry.read or name in WIDE
        return {label: evaluate(A, v, w) for label, (evaluate, _) in operations.items()}

    # lineax needs this to multiply a real operator by a complex number.
    with jax.numpy_dtype_promotion("standard"):
        results = evaluate_all(p, v, w)
        for label, (_, evaluate_dense) in operations.items():
            expected = evaluate_dense(M, v, w)
            jax.tree.map(ft.partial(assert_near, label=label), results[label], expected)


@pytest.mark.x64
@pytest.mark.parametrize("name", [x for x, entry in CATALOGUE.items() if entry.order])
def test_derivatives_with_respect_to_arrays(name):
    entry, p = CATALOGUE[name], arrays()
    M = entry.dense(p)
    v, w = (_vectors(size, M.dtype, seed) for seed, size in enumerate(M.shape[::-1]))
    tangent = jax.tree.map(jnp.cos, p)

    def derivatives(product):
        def form(p):
            return jnp.real(jnp.vdot(w[0], product(p)))

        @jax.jit
        def run(p):
            slope = jax.jvp(form, (p,), (tangent,))
            if entry.order == 1:
                return slope, jax.grad(form)(p)
            return slope, jax.jvp(jax.grad(form), (p,), (tangent,))

        return run(p)

    actual = derivatives(lambda p: flat_product(entry.make(p))(v[0]))
    expected = derivatives(lambda p: entry.dense(p) @ v[0])
    jax.tree.map(assert_near, actual, expected)


@each
def test_known_properties(name):
    entry = CATALOGUE[name]
    A = entry.make(arrays())
    assert (
        known_properties(A)
        == known_properties(A.T)
        == known_properties(lx.conj(A))
        == entry.known
    )
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
        assert known_properties(total) == known
        assert known_properties(lx.conj(total.T)) == known
        assert has_known_entries(total) == (kind[one].read and kind[other].read)
        assert (A @ B.T).in_structure() == total.out_structure()

    v = _vectors(N, ravel_pytree(p["c" if kind is COMPLEX else "a"])[0].dtype, 0)

    @jax.jit
    def products(p):
        whole = ft.reduce(op.add, [entry.make(p) for entry in kind.values()])
        chain = [2.0 * entry.make(p) for entry in kind.values() if entry.read]
        read = ft.reduce(op.add, chain) if chain else None
        entries = read and (columns_of(read, jnp.asarray(INDICES)), diagonal_of(read))
        return flat_product(whole)(v[0]), flat_product(whole.T)(v[0]), entries

    whole = sum(entry.dense(p) for entry in kind.values())
    read = 2 * sum(entry.dense(p) for entry in kind.values() if entry.read)
    product, transposed, entries = products(p)
    assert_near(product, whole @ v[0])
    assert_near(transposed, v[0] @ whole)
    if entries:
        jax.tree.map(assert_near, entries, (read[:, INDICES], jnp.diagonal(read)))
