"""Linear operators from matrices, sparse matrices, SciPy's operators and functions."""

import contextlib
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
import numpy as np
from jaxtyping import Array, Inexact, Int, PyTree

from .._arguments import inexact, kind_of, require
from .._linalg.types import axes_of, widened
from .solvers import solver_tags
from .space import ByProducts, linear_function

_WHERE = "traceax.as_operator"
_SCIPY = "scipy.sparse.linalg", "LinearOperator"


def as_operator(
    x: object, like: PyTree[Any] = None, *, tags: object = ()
) -> lx.AbstractLinearOperator:
    """A lineax operator from whatever stands for one.

    ```python
    traceax.as_operator(matrix)  # of NumPy, JAX or SciPy, dense or sparse
    traceax.as_operator(matrix, tags=lineax.positive_semidefinite_tag)
    traceax.as_operator(lambda v: 2 * v, jnp.zeros(10))
    ```

    | `x` | a product is | differentiable |
    |---|---|---|
    | 2-dimensional JAX or NumPy array, of shape `(m, n)` | a dense product | yes |
    | `BCOO` or `BCSR` of `jax.experimental.sparse` | O(nse), gather and scatter | with respect to the entries |
    | sparse matrix or array of SciPy | the same, of its entries on the device | no |
    | `LinearOperator` of SciPy, or an object like it | its `matmat`, or `matvec` for each `(n,)`, on the host | in forward mode |
    | linear function of what is like `like` | a call of it | as the function is |
    | lineax operator | its own | as it is |

    An object is like one of SciPy's if it has `shape`, `dtype` and `matvec`, as in PyLops.
    Operators of one shape and dtype compile once, whatever their entries. Functions, and
    SciPy's operators, compile for each operator. Integers become floating-point numbers;
    without 64-bit mode, 64 bits become 32.

    **Arguments:**

    - `x`: what to make an operator from.
    - `like`: of functions only, an example of their input: a PyTree of arrays or of
        `jax.ShapeDtypeStruct`s.
    - `tags`: what is known of it, such as `lineax.symmetric_tag`. It isn't checked.

    **Returns:** a `lineax.AbstractLinearOperator`; `x` itself if it is one without tags.

    **Raises:** `TypeError` for any other `x` or `like`; `ValueError` for arrays that aren't
    2-dimensional, or sparse ones with batch or dense dimensions.
    """
    operator = _convert(x, like)
    return lx.TaggedLinearOperator(operator, tags) if tags != () else operator


def _convert(x: Any, like: PyTree[Any]) -> lx.AbstractLinearOperator:
    if isinstance(x, lx.AbstractLinearOperator):
        return x
    x = x.to_bcoo() if is_a(x, "jax.experimental.sparse", "BCSR") else x
    is_bcoo = is_a(x, "jax.experimental.sparse", "BCOO")
    kinds = "sparray", "spmatrix"
    if is_bcoo:
        got = x.n_batch, x.n_dense
        what = "x must have no batch and no dense dimensions"
        hint = "use jax.vmap over batches, and bcoo_update_layout for dense ones"
        require(got == (0, 0), _WHERE, what, "{} and {}".format(*got), hint)
    if is_bcoo or eqx.is_array(x) or any(is_a(x, "scipy.sparse", y) for y in kinds):
        what, got = "x must be a 2-dimensional array", f"one of shape {x.shape}"
        hint = (
            "use jax.vmap over stacks of matrices, lineax.DiagonalLinearOperator for a "
            "diagonal"
        )
        require(x.ndim == 2, _WHERE, what, got, hint)
        if eqx.is_array(x):
            return lx.MatrixLinearOperator(inexact(x))
        x = x if is_bcoo else x.tocoo()
        rows, columns = x.indices.T if is_bcoo else (x.row, x.col)
        indices = jnp.asarray(rows, jnp.int32), jnp.asarray(columns, jnp.int32)
        return SparseLinearOperator(inexact(x.data), *indices, x.shape)
    shape = getattr(x, "shape", None)
    is_matrix = isinstance(shape, tuple) and len(shape) == 2
    known = is_matrix and callable(getattr(x, "matvec", None))
    if is_a(x, *_SCIPY) or (known and (like is None or not callable(x))):
        return SciPyLinearOperator(x)
    what = "x must be a matrix, dense or sparse, a linear function, or an operator of "
    hint = "turn it into an array by jax.numpy.asarray, or write a function that multiplies"
    right = callable(x) and not isinstance(x, type)
    if right and is_matrix and like is None:
        # A call need not be a product: a `hamiltonian` of quspin evaluates itself.
        right, way = False, "x.toarray() or x.full()"
        hint = f"pass its array, such as {way}, or a function that multiplies"
    require(right, _WHERE, f"{what}lineax or SciPy", x, f"{hint} by it", TypeError)
    return linear_function(x, _structure(like), solver_tags(x))


def is_a(x: object, module: str, name: str) -> bool:
    """Whether x is of a class, whose module is imported where there is such an object."""
    loaded = sys.modules.get(module)
    return loaded is not None and isinstance(x, getattr(loaded, name))


class SparseLinearOperator(ByProducts):
    """A matrix by its entries, of which those at one place add up, and others are padding."""

    data: Inexact[Array, " nse"]
    rows: Int[Array, " nse"]
    columns: Int[Array, " nse"]
    shape: tuple[int, int] = eqx.field(static=True)

    def mv(self, vector: Inexact[Array, " n"]) -> Inexact[Array, " m"]:
        terms = self.data * vector.at[self.columns].get(mode="fill", fill_value=0)
        zeros = jnp.zeros(self.shape[0], terms.dtype)
        return zeros.at[self.rows].add(terms, mode="drop")

    def as_matrix(self) -> Inexact[Array, "m n"]:
        zeros = jnp.zeros(self.shape, self.data.dtype)
        return zeros.at[self.rows, self.columns].add(self.data, mode="drop")

    def columns_at(self, indices: Int[Array, " r"]) -> Inexact[Array, "m r"]:
        """Columns of the matrix, in O(nse + m r)."""
        r = indices.shape[0]
        place = jnp.full(self.shape[1], r).at[indices].set(jnp.arange(r))
        places = place.at[self.columns].get(mode="fill", fill_value=r)
        zeros = jnp.zeros((self.shape[0], r), self.data.dtype)
        found = zeros.at[self.rows, places].add(self.data, mode="drop")
        # Of an index that is repeated one place has the column.
        return found.T[place[indices]].T

    def transpose(self):
        m, n = self.shape
        return SparseLinearOperator(self.data, self.columns, self.rows, (n, m))

    def _conj(self):
        return eqx.tree_at(lambda x: x.data, self, self.data.conj())

    def in_structure(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape[1:], self.data.dtype)

    def out_structure(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape[:1], self.data.dtype)


class SciPyLinearOperator(ByProducts):
    """A `scipy.sparse.linalg.LinearOperator`, or what is like one, applied on the host."""

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
            products = np.asarray(products, out.dtype)
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

    def _conj(self):
        return SciPyLinearOperator(self.operator.H.T)

    def in_structure(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.operator.shape[1:], self._dtype())

    def out_structure(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.operator.shape[:1], self._dtype())

    def _dtype(self) -> np.dtype:
        given = self.operator.dtype
        dtype = np.result_type(float if given is None else given, np.float32)
        return jax.dtypes.canonicalize_dtype(dtype)


def _takes_blocks(operator: Any) -> bool:
    """Whether a SciPy operator has a `matmat` of its own: others call `matvec` of `(n, 1)`."""
    if not is_a(operator, *_SCIPY):
        return callable(getattr(operator, "matmat", None))
    base = sys.modules["scipy.sparse.linalg"].LinearOperator
    cls = type(operator)
    if cls.__module__ != base.__module__:
        return cls._matmat is not base._matmat or cls.matmat is not base.matmat
    # SciPy's own: of a matrix, of functions, or made of other operators.
    given = vars(operator).get("_CustomLinearOperator__matmat_impl")
    return given is not None or cls.__name__ == "MatrixLinearOperator"


@lx.diagonal.register(SparseLinearOperator)
def _(operator: SparseLinearOperator) -> Inexact[Array, " n"]:
    on_diagonal = jnp.where(operator.rows == operator.columns, operator.data, 0)
    zeros = jnp.zeros(min(operator.shape), operator.data.dtype)
    return zeros.at[operator.rows].add(on_diagonal, mode="drop")


def _structure(like: PyTree[Any]) -> PyTree[jax.ShapeDtypeStruct]:
    what = "of a function, like must be an example of its input"
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
    kept = False
    with contextlib.suppress(Exception):  # of a class that converts its leaves
        held = jtu.tree_leaves(treedef.unflatten(structs))
        kept = all(x is y for x, y in zip(held, structs, strict=True))
    what = "like must be a PyTree that keeps its leaves as they are"
    hint = "pass a function of the flat vector of jax.flatten_util.ravel_pytree(like)"
    require(kept, _WHERE, what, like, hint, TypeError)
    return treedef.unflatten(structs)
