"""Dense linear algebra of small matrices, of the order of a number of probes.

They are factorised by LAPACK. Calls batched by `vmap` can block each other's threads in
XLA's CPU scheduler, so that a program hangs. Here a batch is a sequence of calls; the
products around them stay batched.
"""

import functools as ft
import itertools
import math
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import sequential_vmap
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Inexact

from ._sharding import explicit_sharding, on_one_cpu
from ._staging import inlined, outlined

# On a CPU XLA reduces a longer axis in several loops, each a kernel of its own, and
# arrays of so many entries in another way.
_SHORT_AXIS = 32
REDUCED_OTHERWISE = 4096

P = ParamSpec("P")
T = TypeVar("T")


def _in_turn(fn: Callable[P, T]) -> Callable[P, T]:
    """Under `vmap` one call after the other, in a loop."""
    in_turn = sequential_vmap(inlined(fn))

    @ft.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with outlined():
            return in_turn(*args, **kwargs)

    return call


@inlined
def matmul(x: Inexact[Array, "n k"], y: Inexact[Array, "k m"]) -> Inexact[Array, "n m"]:
    """`X Y` in full precision, also where an accelerator's default is lower."""
    sharding = None
    for spread, axis in ((x, 0), (y, 1)):
        # Of a block and a small matrix, laid out as the block is.
        given = explicit_sharding(spread)
        if given is not None:
            spec = [None, None]
            spec[axis] = given.spec[axis]
            sharding = NamedSharding(given.mesh, PartitionSpec(*spec))
    precision = jax.lax.Precision.HIGHEST
    return jnp.matmul(x, y, precision=precision, out_sharding=sharding)


def identity(k: int, dtype: DTypeLike) -> Inexact[Array, "k k"]:
    """The identity matrix, in fewer operations than `jax.numpy.eye` traces."""
    rows, columns = (jax.lax.broadcasted_iota(np.int32, (k, k), i) for i in (0, 1))
    return jax.lax.eq(rows, columns).astype(dtype)


def divisor(x: Inexact[Array, "*s"]) -> Inexact[Array, "*s"]:
    """`x` with 1 for 0."""
    return jax.lax.select(x == 0, jax.lax.full_like(x, 1), x)


@inlined
def diagonal(matrix: Inexact[Array, "*s k k"]) -> Inexact[Array, "*s k"]:
    """The diagonal of a small matrix, or of several, without indices to gather by."""
    k = matrix.shape[-1]
    return matrix.reshape(*matrix.shape[:-2], k * k)[..., :: k + 1]


def in_one_loop(
    reduce: Callable[..., Array],
    of: Callable[..., Array],
    *arrays: Inexact[Array, "*s"],
    axis: int | None = None,
) -> Array:
    """`reduce(of(*arrays), axis=axis)`, for sums and maxima in which zeros don't count.

    Axes that are reduced are split into short ones, where that makes a difference.
    """
    shape = arrays[0].shape
    split = range(len(shape)) if axis is None else (axis,)
    short = [_short_axes(n) if i in split else [n] for i, n in enumerate(shape)]
    if (
        not all(short)
        or max(map(len, short), default=1) == 1
        or math.prod(shape) >= REDUCED_OTHERWISE
        or not on_one_cpu()
        or any(explicit_sharding(x) is not None for x in arrays)
    ):
        return reduce(of(*arrays), axis=axis)
    more = [(0, math.prod(axes) - n) for axes, n in zip(short, shape, strict=True)]
    if max(more) > (0, 0):
        arrays = tuple(jnp.pad(x, more) for x in arrays)
    ends = list(itertools.accumulate(map(len, short), initial=0))
    # The barrier, or they would be put together again.
    parts = [
        jax.lax.optimization_barrier(x.reshape(list(itertools.chain(*short))))
        for x in arrays
    ]
    axes = [j for i in split for j in range(ends[i], ends[i + 1])]
    return reduce(of(*parts), axis=tuple(axes))


def _short_axes(size: int) -> list[int]:
    """One or two short axes of at least so many entries; none if there are too many."""
    if size <= _SHORT_AXIS:
        return [size]
    for padded in range(size, _SHORT_AXIS**2 + 1):
        for factor in range(_SHORT_AXIS, 1, -1):
            if padded % factor == 0 and padded // factor <= _SHORT_AXIS:
                return [padded // factor, factor]
    return []


def squares(x: Inexact[Array, "*s"]) -> Float[Array, "*s"]:
    """`|x|^2`."""
    return jnp.real(x * x.conj())


def summed(x: Inexact[Array, "*s"]) -> Inexact[Array, ""]:
    """The sum of a small array's entries."""
    return in_one_loop(jnp.sum, lambda x: x, x)


@inlined
def frobenius(small: Inexact[Array, "k m"]) -> Float[Array, ""]:
    """`|X|_F`."""
    return jnp.sqrt(in_one_loop(jnp.sum, squares, small))


@_in_turn
def householder(block: Inexact[Array, "n k"]) -> tuple[Array, Array]:
    """The thin QR factorisation by reflections, of columns that are not near overflow."""
    q, r = jnp.linalg.qr(block)
    return q, r


@_in_turn
def cholesky(gram: Inexact[Array, "k k"]) -> tuple[Array, Array]:
    """`L` and its inverse, with `gram = L L^*`, from the lower triangle of that."""
    lower = jax.lax.linalg.cholesky(gram, symmetrize_input=False)
    eye = identity(gram.shape[0], gram.dtype)
    return lower, jax.scipy.linalg.solve_triangular(lower, eye, lower=True)


@_in_turn
def eigh(
    matrix: Inexact[Array, "k k"],
) -> tuple[Float[Array, " k"], Inexact[Array, "k k"]]:
    """Eigenvalues, ascending, and eigenvectors of a Hermitian matrix, from its lower
    triangle."""
    vectors, values = jax.lax.linalg.eigh(matrix, symmetrize_input=False)
    return values, vectors


@_in_turn
def svd(matrix: Inexact[Array, "k k"]) -> tuple[Array, Float[Array, " k"], Array]:
    """`U`, singular values, descending, and `V^*`."""
    u, values, vh = jnp.linalg.svd(matrix)
    return u, values, vh


@_in_turn
def inverse_conjugate_transpose(upper: Inexact[Array, "k k"]) -> Inexact[Array, "k k"]:
    """`R^-*` of an upper triangular `R` with a nonzero diagonal."""
    k, dtype = upper.shape[0], upper.dtype
    # Nothing to compute, where that isn't large.
    eye = jnp.asarray(np.eye(k, dtype=dtype)) if k <= 128 else identity(k, dtype)
    return jax.scipy.linalg.solve_triangular(upper, eye, trans="C")


@inlined
def inverse_root(
    hermitian: Inexact[Array, "k k"], floor: Float[Array, ""]
) -> tuple[Inexact[Array, "k k"], Float[Array, ""]]:
    """`C` with `C^* C = H^-1`, and the least eigenvalue of H, or 0 if it is positive.

    `C = L^-1` of a Cholesky factorisation, several times faster, where H is far from
    singular; else from eigenvalues, none of which is taken for less than the floor.
    """
    _, inverse = cholesky(hermitian)
    # At least that of H^-1; NaN where H isn't positive.
    norm = frobenius(inverse) ** 2
    eps = float(jnp.finfo(hermitian.dtype).eps)
    lowest = jnp.maximum(floor, eps ** (2 / 3) * frobenius(hermitian))

    def from_eigenvalues():
        values, vectors = eigh(hermitian)
        scales = 1 / jnp.sqrt(jnp.maximum(values, floor))
        least = jnp.minimum(jnp.min(values), 0)
        return scales[:, None].astype(hermitian.dtype) * vectors.conj().T, least

    def from_cholesky():
        return inverse, jnp.zeros_like(floor)

    with outlined():
        return jax.lax.cond(norm * lowest < 1, from_cholesky, from_eigenvalues)
