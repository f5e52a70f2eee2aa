"""Linear operators from matrices, sparse matrices, SciPy operators and functions."""

import contextlib
import functools as ft
import sys
from typing import Any

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, ArrayLike, Inexact, Int, PyTree

from .._arguments import inexact, kind_of, require
from .._linalg.types import axes_of, widened
from .solvers import solver_tags
from .space import ByProducts, linear_function

_WHERE = "traceax.as_operator"
_SCIPY = "scipy.sparse.linalg", "LinearOperator"
_KINDS = "sparray", "spmatrix"
# Methods that make a matrix, in pydata sparse, JAX, quspin and QuTiP, the best first.
_TO_MATRIX = "build_sparse_matrix", "to_scipy_sparse", "toarray", "todense", "full"


def as_operator(
    x: object, like: PyTree[Any] = None, *, tags: object = ()
) -> lx.AbstractLinearOperator:
    """Converts a matrix, a SciPy operator or a linear function to a lineax operator.

    ```python
    traceax.as_operator(matrix)  # from NumPy, JAX or SciPy, dense or sparse
    traceax.as_operator(matrix, tags=lineax.positive_semidefinite_tag)
    traceax.as_operator(lambda v: 2 * v, jnp.zeros(10))
    ```

    | `x` | a product is | differentiable |
    |---|---|---|
    | JAX or NumPy array with shape `(m, n)` | a dense product | yes |
    | `BCOO` or `BCSR` from `jax.experimental.sparse` | O(nse), gather and scatter | with respect to the entries |
    | SciPy sparse matrix or array | the same, with its entries on the device | no |
    | SciPy `LinearOperator`, or a similar object | its `matmat`, or `matvec` for each `(n,)`, on the host | in forward mode |
    | linear function of inputs like `like` | a call | if the function is |
    | lineax operator | its own product | if the operator is |

    A similar object has `shape`, `dtype` and `matvec`, as in PyLops. Operators with
    equal shapes and dtypes compile once; each function or SciPy operator compiles anew.
    Integers become floating-point numbers; without 64-bit mode, 64 bits become 32.

    **Arguments:**

    - `x`: the object to convert.
    - `like`: an example input for a function, with arrays or `jax.ShapeDtypeStruct`s.
    - `tags`: known properties, such as `lineax.symmetric_tag`. They aren't checked.

    **Returns:** a `lineax.AbstractLinearOperator`; without tags, `x` itself if it is
    one.

    **Raises:** `TypeError` for any other `x` or `like`; `ValueError` for arrays that
    aren't 2-dimensional, or sparse arrays with batch or dense dimensions.
    """
    operator = _convert(x, like)
    return lx.TaggedLinearOperator(operator, tags) if tags != () else operator


def _convert(x: Any, like: PyTree[Any]) -> lx.AbstractLinearOperator:
    if isinstance(x, lx.AbstractLinearOperator):
        return x
    x = x.to_bcoo() if is_a(x, "jax.experimental.sparse", "BCSR") else x
    is_bcoo = is_a(x, "jax.experimental.sparse", "BCOO")
    if is_bcoo:
        received = x.n_batch, x.n_dense
        what = "x must have no batch and no dense dimensions"
        hint = "use jax.vmap over batches, and bcoo_update_layout for dense ones"
        require(received == (0, 0), _WHERE, what, "{} and {}".format(*received), hint)
    if is_bcoo or eqx.is_array(x) or any(is_a(x, "scipy.sparse", y) for y in _KINDS):
        what, received = "x must be a 2-dimensional array", f"one of shape {x.shape}"
        hint = (
            "use jax.vmap over stacks of matrices, lineax.DiagonalLinearOperator for a "
            "diagonal"
        )
        require(x.ndim == 2, _WHERE, what, received, hint)
        if eqx.is_array(x):
            return lx.MatrixLinearOperator(inexact(x))
        x = x if is_bcoo else x.tocoo()
        if not is_bcoo:
            rows, columns = x.row, x.col
        elif isinstance(x.indices, jax.core.Tracer):
            rows, columns = x.indices.T
        else:
            rows, columns = np.asarray(x.indices).T
        return SparseLinearOperator(inexact(x.data), rows, columns, x.shape)
    shape = getattr(x, "shape", None)
    is_matrix = isinstance(shape, tuple) and len(shape) == 2
    known = is_matrix and callable(getattr(x, "matvec", None))
    if is_a(x, *_SCIPY) or (known and (like is None or not callable(x))):
        what, hint = "x must have no batch", "use jax.vmap over stacks of matrices"
        require(is_matrix, _WHERE, what, f"an operator of shape {shape}", hint)
        return SciPyLinearOperator(x)
    # We refuse matrices that can be called, such as quspin's: a call need not multiply.
    valid = callable(x) and not isinstance(x, type) and not (is_matrix and like is None)
    what = "x must be a dense or sparse matrix, a linear function, or an operator from "
    hint = (
        "" if valid else f"{_conversion(x)}, or write a function that multiplies by it"
    )
    require(valid, _WHERE, f"{what}lineax or SciPy", x, hint, TypeError)
    return linear_function(x, _structure(like), solver_tags(x))


def _conversion(x: Any) -> str:
    """Advice on how to make a matrix from another library's object."""
    if any(is_a(getattr(x, "sparse", None), "scipy.sparse", y) for y in _KINDS):
        return "pass x.sparse"  # libpysal
    own = [name for name in _TO_MATRIX if callable(getattr(x, name, None))]
    if own and not isinstance(x, type):
        return f"pass x.{own[0]}()"
    return "turn it into an array by jax.numpy.asarray"


def is_a(x: object, module: str, name: str) -> bool:
    """Whether x is an instance of a class, whose module any instance has imported."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(x, getattr(loaded, name))


class SparseLinearOperator(ByProducts):
    """A sparse matrix: entries at one place add up, and entries outside are padding.

    If indices are known, `slots[i]` has the numbers of the first few entries in row i,
    and `rest` of all others: CPUs gather numbers much faster than they scatter them.
    """

    data: Inexact[Array, " nse"]
    rows: Int[Array, " nse"]
    columns: Int[Array, " nse"]
    shape: tuple[int, int] = eqx.field(static=True)
    slots: Int[Array, "m w"] | None
    rest: Int[Array, " r"] | None

    def __init__(
        self,
        data: Inexact[Array, " nse"],
        rows: Int[ArrayLike, " nse"],
        columns: Int[ArrayLike, " nse"],
        shape: tuple[int, int],
    ):
        self.data, self.shape = data, shape
        known = not isinstance(rows, jax.core.Tracer)
        # Inside of `jax.jit`, known indices stay known.
        with jax.ensure_compile_time_eval() if known else contextlib.nullcontext():
            self.rows, self.columns = (
                jnp.asarray(x, jnp.int32) for x in (rows, columns)
            )
            found = _slots(np.asarray(rows), shape[0]) if known else (None, None)
            self.slots, self.rest = found

    def mv(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " m"]:
        data, rows, columns = self.data, self.rows, self.columns
        zeros = jnp.zeros(self.shape[0], np.result_type(data.dtype, vector.dtype))

        def entries(data, columns):
            return data * vector.at[columns].get(mode="fill", fill_value=0)

        if self.slots is not None and self.rest is not None:
            read = ft.partial(jnp.take, mode="fill", fill_value=0)
            own = entries(
                read(data, self.slots), columns.at[self.slots].get(mode="clip")
            )
            zeros = zeros + jnp.sum(own, axis=1)
            if not self.rest.size:
                return zeros
            data, rows, columns = data[self.rest], rows[self.rest], columns[self.rest]
        return zeros.at[rows].add(entries(data, columns), mode="drop")

    def as_matrix(self) -> Inexact[Array, "m n"]:
        zeros = jnp.zeros(self.shape, self.data.dtype)
        return zeros.at[self.rows, self.columns].add(self.data, mode="drop")

    def columns_at(self, indices: Int[Array, " r"]) -> Inexact[Array, "m r"]:
        """Reads matrix columns in O(nse + m r) time."""
        r = indices.shape[0]
        place = jnp.full(self.shape[1], r).at[indices].set(jnp.arange(r))
        places = place.at[self.columns].get(mode="fill", fill_value=r)
        zeros = jnp.zeros((self.shape[0], r), self.data.dtype)
        distinct = zeros.at[self.rows, places].add(self.data, mode="drop")
        # We copy, because only one place has the column if an index repeats.
        return distinct.T[place[indices]].T

    def transpose(self):
        m, n = self.shape
        return SparseLinearOperator(self.data, self.columns, self.rows, (n, m))

    def conj(self):
        return eqx.tree_at(lambda x: x.data, self, self.data.conj())

    def in_structure(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape[1:], self.data.dtype)

    def out_structure(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape[:1], self.data.dtype)


def _slots(
    rows: Int[np.ndarray, " nse"], m: int
) -> tuple[Int[Array, "m w"], Int[Array, " r"]]:
    """`slots` and `rest`. The number of slots is at most twice the number of entries."""
    nse, order = len(rows), np.argsort(rows, kind="stable")
    order = order[(rows[order] >= 0) & (rows[order] < m)]
    own = rows[order]
    counts = np.bincount(own, minlength=m)
    place = np.arange(len(own)) - (np.cumsum(counts) - counts)[own]
    width = min(int(counts.max(initial=0)), 2 * nse // max(m, 1) + 1)
    slots, inside = np.full((m, width), nse, np.int32), place < width
    slots[own[inside], place[inside]] = order[inside]
    return jnp.asarray(slots), jnp.asarray(order[~inside], jnp.int32)


class SciPyLinearOperator(ByProducts):
    """A SciPy `LinearOperator`, or a similar object, applied on the host."""

    operator: Any = eqx.field(static=True)

    def mv(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " m"]:
        out = self.out_structure()

        def on_host(vectors):
            vectors = np.asarray(vectors)
            rows = vectors.reshape(-1, vectors.shape[-1])
            if _takes_blocks(self.operator):
                products = self.operator.matmat(rows.T).T
            else:
                products = [self.operator.matvec(row) for row in rows]
            products = np.asarray(products)
            takes_complex = jnp.issubdtype(out.dtype, jnp.complexfloating)
            fits = takes_complex or not np.iscomplexobj(products)
            what, hint = "products must be real, as x.dtype is", "give x its true dtype"
            require(fits, _WHERE, what, f"{products.dtype}", hint, TypeError)
            products = products.astype(out.dtype)
            return products.reshape(*vectors.shape[:-1], *out.shape)

        @jax.custom_jvp
        def product(vector):
            return jax.pure_callback(on_host, out, vector, vmap_method="broadcast_all")

        product.defjvp(lambda v, t: (product(*v), product(*t)))
        return product(vector)

    def as_matrix(self) -> Inexact[Array, "m n"]:
        structure = self.in_structure()
        return jax.vmap(self.mv)(jnp.eye(*structure.shape, dtype=structure.dtype)).T

    def transpose(self):
        return SciPyLinearOperator(self.operator.T)

    def conj(self):
        return SciPyLinearOperator(self.operator.H.T)

    def in_structure(self) -> jax.ShapeDtypeStruct:
        return self._structure(1)

    def out_structure(self) -> jax.ShapeDtypeStruct:
        return self._structure(0)

    def _structure(self, axis: int) -> jax.ShapeDtypeStruct:
        own = self.operator.dtype
        dtype = np.result_type(float if own is None else own, np.float32)
        # JAX would trace a NumPy integer, such as a product of grid sizes.
        size = int(self.operator.shape[axis])
        return jax.ShapeDtypeStruct((size,), jax.dtypes.canonicalize_dtype(dtype))


def _takes_blocks(operator: Any) -> bool:
    """Whether a SciPy operator has its own `matmat`, which doesn't call `matvec`."""
    if not is_a(operator, *_SCIPY):
        return callable(getattr(operator, "matmat", None))
    base = sys.modules["scipy.sparse.linalg"].LinearOperator
    cls = type(operator)
    if cls.__module__ != base.__module__:
        return cls._matmat is not base._matmat or cls.matmat is not base.matmat
    # We inspect SciPy's own classes: they hold a matrix, functions, or other operators.
    matmat = vars(operator).get("_CustomLinearOperator__matmat_impl")
    return matmat is not None or cls.__name__ == "MatrixLinearOperator"


@lx.diagonal.register(SparseLinearOperator)
def _(operator: SparseLinearOperator) -> Inexact[Array, " n"]:
    on_diagonal = jnp.where(operator.rows == operator.columns, operator.data, 0)
    zeros = jnp.zeros(min(operator.shape), operator.data.dtype)
    return zeros.at[operator.rows].add(on_diagonal, mode="drop")


def _structure(like: PyTree[Any]) -> PyTree[jax.ShapeDtypeStruct]:
    what = "like must be given for a function, as an example of its input"
    hint = "pass as_operator(fn, jax.numpy.zeros(n)), or a jax.ShapeDtypeStruct"
    require(like is not None, _WHERE, what, "None", hint, TypeError)

    def struct(leaf):
        array = eqx.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
        require(array, _WHERE, what, f"{kind_of(leaf)} in it", hint, TypeError)
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.eval_shape(
            lambda: widened(jnp.zeros(leaf.shape, dtype), axes_of(leaf))
        )

    leaves, treedef = jtu.tree_flatten(like)
    structs = [struct(leaf) for leaf in leaves]
    is_kept = False
    with contextlib.suppress(Exception):  # a class may convert its leaves
        held = jtu.tree_leaves(treedef.unflatten(structs))
        is_kept = all(x is y for x, y in zip(held, structs, strict=True))
    what = "like must be a PyTree that keeps its leaves as they are"
    hint = "pass a function of the flat vector from jax.flatten_util.ravel_pytree(like)"
    require(is_kept, _WHERE, what, like, hint, TypeError)
    return treedef.unflatten(structs)
