"""Colourings: what is near has different colours. NumPy alone, outside of `jax.jit`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from ._arguments import kind_of, require
from ._operators.convert import is_a

# Nodes whose neighbours are Python lists at once.
_AT_ONCE = 2**12
# Passes of first fit. A second one took a 3-D grid of 1e6 nodes from 13 colours to 12 at
# distance 2, and its shuffled nodes from 16 to 14; a third one nothing.
_PASSES = 2
_APART = "it is how far apart colours repeat"


class Colours(NamedTuple):
    """Colours of n unknowns, as [`traceax.ColouredSampler`][] takes them.

    **Attributes:**

    - `labels`: an integer array of shape `(n,)`, the colour of each, from 0 on.
    - `number`: p, how many colours there are.
    - `exact`: whether a round of p products is known to give an exact trace, at distance 1.
    """

    labels: Int[np.ndarray, " n"]
    number: int
    exact: bool


def colour(pattern: Any, distance: int = 1, *, size: int | None = None) -> Colours:
    r"""Colours for a sparsity pattern: nodes within a distance have different ones.

    ```python
    colours = traceax.colour(matrix)
    estimator = traceax.HutchinsonEstimator(traceax.ColouredSampler(colours))
    traceax.trace(key, operator, colours.number, estimator)  # exact
    ```

    Nodes are the n unknowns, edges the entries off the diagonal, in either direction. At
    distance 1 the trace and the diagonal of an operator of that pattern are exact in p
    products, at distance d those of polynomials of degree d. The error of other functions,
    and of the inverse, falls with d as their entries do: there `exact` is `False`.

    First fit in the order of the nodes, and once more with the classes in reverse order,
    which never takes more colours. Number the nodes so that neighbours are near.

    Not under `jax.jit`. O(n b) time and memory for b nodes within `distance / 2`: 1e6 nodes
    of a grid in three dimensions take 4 s at distance 1, and 5 s at distance 2.

    **Arguments:**

    - `pattern`: a square `BCOO` or `BCSR` array of JAX, a sparse matrix or array of SciPy,
        or an integer array of shape `(m, 2)`, a pair of coupled indices a row. Stored
        entries count, whatever their value. Of a dense mask: `numpy.argwhere(mask)`.
    - `distance`: a positive int, the number of edges up to which colours differ.
    - `size`: n, for pairs of indices; by default one more than the largest index.

    **Returns:** [`traceax.Colours`][].

    **Reference:** Curtis, Powell and Reid, "On the Estimation of Sparse Jacobian Matrices",
    IMA J. Appl. Math. 13 (1974), doi:10.1093/imamat/13.1.117; Gebremedhin, Manne and Pothen,
    "What Color Is Your Jacobian?", SIAM Rev. 47 (2005), doi:10.1137/S0036144504444711;
    Culberson, "Iterated Greedy Graph Coloring and the Difficulty Landscape", University of
    Alberta TR 92-07 (1992), for the second pass.
    """
    where = "traceax.colour"
    distance = _positive(distance, "distance", where, _APART)
    pairs, n = _entries(pattern, size, where)
    rows, columns = pairs.T
    diagonal = np.arange(n, dtype=np.int64) * (n + 1)
    one = _graph(np.concatenate([rows * n + columns, columns * n + rows, diagonal]), n)
    # Nodes are within a distance if balls of half of it about them meet.
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
    r"""Colours for a lattice, in blocks that repeat.

    A block has `distance + 1` points along each axis, `(distance + 1)^d` colours in d
    dimensions. Blocks lie as bricks do, a row half of a block further than the one before.
    On a periodic lattice whose sizes are not multiples some blocks are longer, and there
    are more colours.

    *Use for* functions of stencils, `log A` and `A^-1`, whose entries are small beyond some
    distance. For the trace of a stencil itself [`traceax.colour`][] takes fewer colours.

    **Arguments:**

    - `shape`: of the lattice; an operator on arrays of that shape, flattened.
    - `distance`: a positive int; points at most so far apart along every axis differ.
    - `periodic`: whether the lattice is a torus.

    **Returns:** [`traceax.Colours`][], not known to be exact: pass `exact=True` to
    [`traceax.ColouredSampler`][] for a stencil of at most that reach.

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
            which = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
            place = np.arange(size) - ends[which]
        else:
            which, place = np.divmod(np.arange(size + block // 2), block)
        # Of (Laplacian + 1) in two and three dimensions bricks have 0.6 to 0.8 times the
        # error of blocks in line.
        points = (along + block // 2 * (blocks % 2)) % len(place)
        labels = labels * (int(place.max()) + 1) + place[points]
        blocks = blocks + which[points]
    # A lattice smaller than a block hasn't all colours.
    labels = np.unique(labels.reshape(-1), return_inverse=True)[1].astype(np.int32)
    return Colours(labels, int(labels.max()) + 1, False)


def _positive(x: Any, name: str, where: str, hint: str) -> int:
    right = isinstance(x, int | np.integer) and x is not True and x >= 1
    require(right, where, f"{name} must be a positive int", x, hint)
    return int(x)


def _entries(pattern: Any, size: int | None, where: str):
    """Pairs of rows and columns of entries, and the order n."""
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
    right = pairs.ndim == 2 and pairs.shape[1] == 2 and pairs.dtype.kind in "iu"
    what = "pattern must be a sparse matrix, or an integer array of shape (m, 2)"
    hint = "pass numpy.argwhere(mask) of a dense mask"
    require(right, where, what, kind_of(pattern), hint, TypeError)
    if shape is not None:
        square, got = len(shape) == 2 and shape[0] == shape[1], f"one of shape {shape}"
        hint = "a trace is of square ones"
        require(square, where, "pattern must be square", got, hint)
        n = shape[0]
        # What pads BCOO arrays lies outside.
        pairs = pairs[(pairs < n).all(axis=1)]
    else:
        least, largest = int(pairs.min(initial=0)), int(pairs.max(initial=-1))
        n = largest + 1 if size is None else _positive(size, "size", where, "it is n")
        got = f"{least if least < 0 else largest}"
        inside, what = (
            least >= 0 and largest < n,
            f"indices must lie between 0 and {n - 1}",
        )
        require(inside, where, what, got, "pass size=n")
    return pairs.astype(np.int64), n


# For each of n nodes those next to it, and itself: `nodes[starts[i] : starts[i + 1]]`.
_Graph = tuple[Int[np.ndarray, " _"], Int[np.ndarray, " _"]]


def _graph(keys: Int[np.ndarray, " m"], n: int) -> _Graph:
    """Nodes joined by `row * n + column`, which may occur more than once."""
    keys = np.sort(keys)
    keys = keys[np.diff(keys, prepend=-1) > 0]
    starts = np.searchsorted(keys, np.arange(n + 1, dtype=np.int64) * n)
    return starts, keys - np.repeat(np.arange(n) * n, np.diff(starts))


def _rows(graph: _Graph, nodes: Int[np.ndarray, " m"]) -> _Graph:
    """The neighbours of some nodes, as a graph of so many rows."""
    starts, columns = graph
    counts = np.diff(starts)[nodes]
    ends = np.concatenate([[0], np.cumsum(counts)])
    shift = np.repeat(starts[nodes] - ends[:-1], counts)
    return ends, columns[np.arange(ends[-1]) + shift]


def _ball(graph: _Graph, radius: int) -> _Graph:
    """The nodes within a radius of each."""
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
    """To each node the first colour that none has whose far ball meets its near one.

    Sets of colours are bits: `seen` those in the far ball about a node.
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
