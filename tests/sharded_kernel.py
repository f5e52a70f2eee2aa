"""Kernel matrices with rows on four simulated devices, for test_kernel_operator.py."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kernels import Matern

import traceax as tx
from traceax._operators.space import apply_block

jax.config.update("jax_enable_x64", True)

N, K = 96, 5
rng = np.random.default_rng(0)
X, V = rng.normal(size=(N, 2)), rng.normal(size=(N, K))
LENGTH = jnp.asarray([0.7, 1.1])


def agree(actual, expected):
    for a, b in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-9, atol=1e-9)


@jax.jit
def rows(length, x, block):
    def value(length, x):
        # We take 7 tiles; the last one is padded.
        operator = tx.KernelLinearOperator(Matern(length), x, tile=14)
        return jnp.sum(jnp.sin(apply_block(operator, block)))

    return jax.value_and_grad(value, (0, 1))(length, x)


@jax.jit
def columns(length, x, block):
    del block
    operator = tx.KernelLinearOperator(Matern(length), x, tile=14)
    return operator.columns(jnp.asarray([3, 95, 40])), operator.diagonal()


@jax.jit
def lanes(length, x, block):
    def product(v):
        return tx.KernelLinearOperator(Matern(length), x, tile=14).mv(v)

    return jax.vmap(product)(block.T)


def main():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    by_rows = NamedSharding(mesh, P("x"))
    distributed = jax.device_put(X, by_rows), jax.device_put(V, by_rows)
    for case in (rows, columns, lanes):
        expected = case(LENGTH, jnp.asarray(X), jnp.asarray(V))
        agree(case(LENGTH, *distributed), expected)
        print(case.__name__, flush=True)


if __name__ == "__main__":
    main()
