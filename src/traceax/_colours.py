"""Colourings for graphs and lattices, and probes on one colour at a time."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Int

from ._arguments import kind_of, require
from ._linalg.types import fold
from ._operators.convert import is_a
from ._operators.space import Dense, apply_block, columns_at_once, parts_of
from ._samplers import RademacherSampler, Sampler

# We convert the neighbours of this many nodes to Python lists at once.
_AT_ONCE = 2**12
# We run first fit twice. At distance 2, a 3-D grid with 1e6 nodes went from 13 colours
# to 12, and with shuffled nodes from 16 to 14. A third pass saved nothing.
_PASSES = 2
_APART = "it is how far apart colours repeat"


class Colours(NamedTuple):
    """Colours for n unknowns, as [`traceax.ColouredSampler`][] takes them.

    **Attributes:**

    - `labels`: an integer array with shape `(n,)`: each unknown's colour, from 0 on.
    - `number`: p, the number of colours.
    - `exact`: whether p products are known to give the exact trace (at distance 1).
    """

    labels: Int[np.ndarray, " n"]
    number: int
    exact: bool


def colour(pattern: object, distance: int = 1, *, size: int | None = None) -> Colours:
    r"""Colours a sparsity pattern: nodes within a distance get different colours.

    ```python
    colours = traceax.colour(matrix)
    estimator = traceax.HutchinsonEstimator(traceax.ColouredSampler(colours))
    traceax.trace(key, operator, colours.number, estimator)  # exact
    ```

    Nodes are the n unknowns; edges are off-diagonal entries, in either direction. At
    distance 1, p products give the exact trace and diagonal of operators with that
    pattern. At distance d, they do so for polynomials of degree d. The error for other
    functions and inverses falls with d as their entries do: there `exact` is `False`.

    We use first fit in node order, and once more with the colour classes in reverse
    order, which never takes more colours. Number the nodes so that neighbours are near.

    Call it outside `jax.jit`. With b nodes within `distance / 2`, it takes O(n b) time
    and memory: 4 s at distance 1, and 5 s at distance 2, for a 3-D grid with 1e6 nodes.

    **Arguments:**

    - `pattern`: a square JAX `BCOO` or `BCSR` array, a SciPy sparse matrix or array, or
        an integer array with shape `(m, 2)`, with a pair of coupled indices in each
        row, such as `numpy.argwhere(mask)`. Stored entries count, whatever their value.
    - `distance`: a positive int, the number of edges up to which colours differ.
    - `size`: n, if you pass index pairs; by default, the largest index plus one.

    **Returns:** [`traceax.Colours`][].

    **Reference:** Curtis, Powell and Reid, "On the Estimation of Sparse Jacobian
    Matrices", IMA J. Appl. Math. 13 (1974), doi:10.1093/imamat/13.1.117; Gebremedhin,
    Manne and Pothen, "What Color Is Your Jacobian?", SIAM Rev. 47 (2005),
    doi:10.1137/S0036144504444711; Culberson, "Iterated Greedy Graph Coloring and the
    Difficulty Landscape", University of Alberta TR 92-07 (1992), for the second pass.
    """
    where = "traceax.colour"
    distance = _positive(distance, "distance", where, _APART)
    pairs, n = _entries(pattern, size, where)
    rows, columns = pairs.T
    diagonal = np.arange(n, dtype=np.int64) * (n + 1)
    one = _graph(np.concatenate([rows * n + columns, columns * n + rows, diagonal]), n)
    # We use that nodes are within a distance if balls with half that radius meet.
    far = _ball(one, (distance + 1) // 2)
    near = far if distance % 2 == 0 else _ball(one, distance // 2)
    order, index = np.arange(n), np.zeros(n, np.int32)
    for _ in range(_PASSES):
        index = _greedy(near, far, order)
        order = np.argsort(-index, kind="stable")
    return Colours(index, int(index.max(initial=-1)) + 1, distance == 1)


def lattice_colours(
    shape: int | Sequence[int], distance: int, periodic: bool = True
) -> Colours:
    r"""Colours a lattice, in blocks that repeat.

    A block has `distance + 1` points along each axis, so `(distance + 1)^d` colours in
    d dimensions. Blocks lie like bricks: each row is shifted by half a block. Periodic
    lattices whose sizes aren't multiples have longer blocks, and take more colours.

    *Use for* functions of stencils, such as `log A` and `A^-1`, whose entries are small
    beyond some distance. For the stencil, [`traceax.colour`][] takes fewer colours.

    **Arguments:**

    - `shape`: the lattice shape; the operator acts on flattened arrays of this shape.
    - `distance`: a positive int; points this close along every axis differ in colour.
    - `periodic`: whether the lattice is a torus.

    **Returns:** [`traceax.Colours`][] with `exact=False`. If the stencil reaches no
    further than `distance`, pass `exact=True` to [`traceax.ColouredSampler`][].

    **Reference:** Stathopoulos, Laeuchli and Orginos, SIAM J. Sci. Comput. 35 (2013),
    doi:10.1137/120881452; and see [`traceax.ColouredSampler`][].
    """
    where = "traceax.lattice_colours"
    sizes = shape if isinstance(shape, Sequence) else (shape,)
    sizes = [_positive(x, "shape", where, "it is the size of an axis") for x in sizes]
    block = _positive(distance, "distance", where, _APART) + 1
    labels = blocks = np.zeros((1,) * len(sizes), np.int32)
    for axis, size in enumerate(sizes):
        along = np.arange(size).reshape([-1] + [1] * (len(sizes) - 1 - axis))
        if periodic:  # no block is shorter
            ends = np.arange(max(size // block, 1) + 1) * size // max(size // block, 1)
            number = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
            place = np.arange(size) - ends[number]
        else:
            number, place = np.divmod(np.arange(size + block // 2), block)
        # We lay bricks: for (Laplacian + 1) in two and three dimensions, their error is
        # 0.6 to 0.8 times the error with aligned blocks.
        points = (along + block // 2 * (blocks % 2)) % len(place)
        labels = labels * (int(place.max()) + 1) + place[points]
        blocks = blocks + number[points]
    # We renumber, because a lattice smaller than a block lacks some colours.
    labels = np.unique(labels.reshape(-1), return_inverse=True)[1].astype(np.int32)
    return Colours(labels, int(labels.max()) + 1, False)


def _positive(x: Any, name: str, where: str, hint: str) -> int:
    is_valid = isinstance(x, int | np.integer) and x is not True and x >= 1
    require(is_valid, where, f"{name} must be a positive int", x, hint)
    return int(x)


def _entries(pattern: Any, size: int | None, where: str):
    """The entries' (row, column) pairs, and the order n."""
    if is_a(pattern, "jax.experimental.sparse", "BCSR"):
        pattern = pattern.to_bcoo()
    shape = None
    if is_a(pattern, "jax.experimental.sparse", "BCOO"):
        pairs, shape = np.asarray(pattern.indices), pattern.shape
    elif any(is_a(pattern, "scipy.sparse", x) for x in ("sparray", "spmatrix")):
        pattern = pattern.tocoo()
        pairs, shape = np.stack([pattern.row, pattern.col], axis=1), pattern.shape
    else:
        pairs = np.asarray(pattern)
    valid = pairs.ndim == 2 and pairs.shape[1] == 2 and pairs.dtype.kind in "iu"
    what = "pattern must be a sparse matrix, or an integer array of shape (m, 2)"
    hint = "pass numpy.argwhere(mask) for a dense mask"
    require(valid, where, what, kind_of(pattern), hint, TypeError)
    if shape is not None:
        valid, received = len(shape) == 2 and shape[0] == shape[1], f"shape {shape}"
        hint = "only square matrices have a trace"
        require(valid, where, "pattern must be square", received, hint)
        n = shape[0]
        # We drop BCOO padding, which lies outside.
        pairs = pairs[(pairs < n).all(axis=1)]
    else:
        least, largest = int(pairs.min(initial=0)), int(pairs.max(initial=-1))
        n = largest + 1 if size is None else _positive(size, "size", where, "it is n")
        received = f"{least if least < 0 else largest}"
        inside, what = (
            least >= 0 and largest < n,
            f"pattern must have indices between 0 and {n - 1}",
        )
        require(inside, where, what, received, "pass size=n")
    return pairs.astype(np.int64), n


# We store node i's neighbours and i itself in `nodes[starts[i] : starts[i + 1]]`.
_Graph = tuple[Int[np.ndarray, " _"], Int[np.ndarray, " _"]]


def _graph(keys: Int[np.ndarray, " m"], n: int) -> _Graph:
    """The graph with edges `row * n + column`, which may repeat."""
    keys = np.sort(keys)
    keys = keys[np.diff(keys, prepend=-1) > 0]
    starts = np.searchsorted(keys, np.arange(n + 1, dtype=np.int64) * n)
    return starts, keys - np.repeat(np.arange(n) * n, np.diff(starts))


def _rows(graph: _Graph, nodes: Int[np.ndarray, " m"]) -> _Graph:
    """The neighbours of some nodes, as a graph with one row per node."""
    starts, columns = graph
    counts = np.diff(starts)[nodes]
    ends = np.concatenate([[0], np.cumsum(counts)])
    shift = np.repeat(starts[nodes] - ends[:-1], counts)
    return ends, columns[np.arange(ends[-1]) + shift]


def _ball(graph: _Graph, radius: int) -> _Graph:
    """Each node's neighbours within a radius."""
    n = len(graph[0]) - 1
    if radius == 0:
        return np.arange(n + 1), np.arange(n)
    starts, nodes = graph
    for _ in range(radius - 1):
        ends, reached = _rows(graph, nodes)
        origin = np.repeat(np.arange(n), np.diff(starts))
        starts, nodes = _graph(np.repeat(origin, np.diff(ends)) * n + reached, n)
    return starts, nodes


def _greedy(near: _Graph, far: _Graph, order: Int[np.ndarray, " n"]) -> np.ndarray:
    """Gives each node the first colour that `seen` lacks on the node's near ball.

    Integers are colour sets: `seen[i]` has the colours of nodes whose far ball has i.
    """
    seen, index = [0] * len(order), np.empty(len(order), np.int32)
    for first in range(0, len(order), _AT_ONCE):
        nodes = order[first : first + _AT_ONCE]
        starts, read = (x.tolist() for x in _rows(near, nodes))
        far_starts, write = (x.tolist() for x in _rows(far, nodes))
        for i, own in enumerate(nodes):
            taken = 0
            for node in read[starts[i] : starts[i + 1]]:
                taken |= seen[node]
            bit = ~taken & (taken + 1)
            for node in write[far_starts[i] : far_starts[i + 1]]:
                seen[node] |= bit
            index[own] = bit.bit_length() - 1
    return index


_WHERE = "ColouredSampler"
_SIGNS = RademacherSampler()


class ColouredSampler(Sampler):
    r"""Signs on one colour and zeros elsewhere, colour after colour: probing.

    Round r splits a vector `s_r` over the p colours. If `P_c` projects on colour c, the
    round's sample,

        sum_c s_r^* P_c A P_c s_r = s_r^* B s_r,    B = sum_c P_c A P_c,

    is Hutchinson's sample for B, which has the same trace and diagonal. It is unbiased
    for any A. With signs, it is exact if A couples no unknowns with the same colour.

    *Use when* distant unknowns couple weakly or not at all: sparse matrices, Jacobians
    of block-hollow networks, functions and inverses of stencils.

    | | |
    |---|---|
    | taken by | [`traceax.HutchinsonEstimator`][], for traces and diagonals; [`traceax.LanczosQuadratureEstimator`][] |
    | budget k | a multiple of p; with Lanczos quadrature, p products per step |
    | beyond the products | O(n p) time per round, and memory for a few vectors |
    | bias | none |
    | variance | for m rounds with signs and real symmetric A: `2 (|B|_F^2 - sum_i A_ii^2) / m` |
    | error bar | from m rounds, with m - 1 degrees of freedom, or more by quadrature; unknown (NaN) for one inexact round |

    Other estimators need probes that are isotropic one by one, and refuse this sampler.

    **Arguments:**

    - `colours`: [`traceax.Colours`][] from [`traceax.colour`][] or
        [`traceax.lattice_colours`][]; or an integer array with shape `(n,)`, in the
        order of the flattened operator input, with every colour from 0 to p - 1.
    - `exact`: whether the operator couples no unknowns with the same colour; if so, the
        error bar is the rounding error, unless rounds differ. By default, `Colours`
        decide, and arrays count as `False`. Colours for A at distance 1 aren't exact
        for its inverse: pass `exact=False`. Lanczos quadrature never counts as exact.
    - `sampler`: draws the `s_r`. `exact` needs [`traceax.RademacherSampler`][].
    - `num_colours`: p, an attribute.

    **Reference:** Tang and Saad, "A probing method for computing the diagonal of a
    matrix inverse", Numer. Linear Algebra Appl. 19 (2012), doi:10.1002/nla.779;
    Frommer, Rinelli and Schweitzer, "Analysis of Stochastic Probing Methods for
    Estimating the Trace of Functions of Sparse Symmetric Matrices", Math. Comp. 94
    (2025), doi:10.1090/mcom/3984.
    """

    colours: Int[ArrayLike, " n"]
    exact: bool = eqx.field(static=True)
    sampler: Sampler
    num_colours: int = eqx.field(static=True)
    _of_pattern: bool = eqx.field(static=True)  # whether `Colours` claim exactness

    def __init__(
        self,
        colours: Colours | Int[ArrayLike, " n"],
        exact: bool | None = None,
        sampler: Sampler = _SIGNS,
    ):
        known = isinstance(colours, Colours) and colours.exact
        self.colours = _checked(
            colours.labels if isinstance(colours, Colours) else colours
        )
        self.num_colours = int(self.colours.max()) + 1
        self.exact = known if exact is None else exact
        self._of_pattern = known and exact is None
        self.sampler = sampler
        what, hint = (
            "exact must be True, False or None",
            "it is a claim about the operator",
        )
        require(isinstance(self.exact, bool), _WHERE, what, exact, hint, TypeError)
        what = "sampler must be a traceax.Sampler of single probes"
        single = isinstance(sampler, Sampler) and sampler.round_size == 1
        hint = "pass an instance, such as traceax.NormalSampler()"
        require(single, _WHERE, what, sampler, hint, TypeError)
        signs = isinstance(sampler, RademacherSampler) or not self.exact
        what, hint = "sampler must draw signs", "leave it out, or pass exact=False"
        require(signs, _WHERE, what, type(sampler).__name__, hint)

    rotation_invariant = False

    @property
    def independent(self) -> bool:  # pyright: ignore
        return self.sampler.independent

    @property
    def round_size(self) -> int:  # pyright: ignore
        return self.num_colours

    @property
    def is_exact(self) -> bool:
        return self.exact

    def check(self, operator, where):
        what = "colours must match the operator's own pattern"
        hint = (
            "pass traceax.ColouredSampler(colours, exact=False), or exact=True if the "
            "colours separate coupled unknowns"
        )
        received = "an inverse or a function of an operator"
        wrong = self._of_pattern and parts_of(operator, Dense)
        require(not wrong, where, what, received, hint)

    def sample(self, key, n, k, dtype):
        # We put probe j on colour `j mod p`, and scale it by `sqrt(p)`.
        self._check_length(n)
        p = self.num_colours
        rounds = self.sampler.sample(key, n, -(-k // p), dtype)
        parts = jnp.repeat(rounds.T, p, axis=0)[:k]
        return jnp.where(self._mask(0, k), math.sqrt(p) * parts, 0).T

    def draw_range(self, key, start, width, most, space):
        self._check_length(space.size)
        return self.sampler.draw_range(key, start, width, most, space)

    def drawn(self, key, most, space):
        drawn = self.sampler.drawn(key, most, space)
        return eqx.tree_at(lambda x: x.sampler, self, drawn)

    def multiply(self, operator, block):
        rows, p = block.T, self.num_colours
        m, n = rows.shape
        width = min(max(columns_at_once(n) // m, 1), p)

        def add(total, start, width: int):
            mask = self._mask(start, width)[:, None, :]
            parts = jnp.where(mask, rows[None], 0).reshape(width * m, n)
            products = apply_block(operator, parts.T).T.reshape(width, m, n)
            return total + jnp.sum(jnp.where(mask, products, 0), axis=0)

        total, rest = jnp.zeros_like(rows), p % width
        if width == p:
            return add(total, 0, p).T
        # We limit colours at once, because each keeps a block in memory and a derivative.
        step = jax.checkpoint(lambda total, start: add(total, start, width))
        starts = jnp.arange(0, p - rest, width, dtype=jnp.int32)
        total = fold(step, total, starts)
        return (add(total, p - rest, rest) if rest else total).T

    def _mask(self, start: int | Array, width: int) -> Bool[Array, "{width} n"]:
        """Masks the unknowns on the colours for probes `start, start + 1, ...`."""
        active = (jnp.arange(width, dtype=jnp.int32) + start) % self.num_colours
        return jnp.asarray(self.colours)[None, :] == active[:, None]

    def _check_length(self, n: int) -> None:
        what = f"colours must have an entry for each of the operator's {n} unknowns"
        hint = "use the flattened order of its input, and size=n with index pairs"
        is_valid = np.shape(self.colours) == (n,)
        require(is_valid, _WHERE, what, self.colours, hint)


def _checked(colours: object) -> Int[np.ndarray, " n"]:
    what = "colours must be an array of integers known at trace time"
    hint = "make them outside jax.jit, with traceax.colour for example"
    known = not isinstance(colours, jax.core.Tracer)
    require(known, _WHERE, what, "a traced array", hint, TypeError)
    index = np.asarray(colours)
    valid = index.ndim == 1 and index.dtype.kind in "iu" and index.size > 0
    require(valid, _WHERE, what, kind_of(colours), hint, TypeError)
    number = int(index.max()) + 1
    all_occur = index.min() >= 0 and (np.bincount(index) > 0).all()
    hint = "renumber them with numpy.unique(colours, return_inverse=True)[1]"
    received = f"colours from {index.min()} to {number - 1}, some of which don't"
    what = "colours from 0 to the largest must occur"
    require(all_occur, _WHERE, what, received, hint)
    return index.astype(np.int32)
