"""One estimate on one device, on four, and on two processes, with the same result.

The operators come from scikit-learn's digits: a kernel matrix, split by rows; a network's
Hessian, split by images (data-parallel) or by the columns of a layer (model-parallel); and a
Gram matrix, with the probes split over devices.

    python examples/many_devices.py

runs everything on this machine: on one device, on four simulated ones, and as two processes.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.sharding import AxisType, NamedSharding
from sklearn.datasets import load_digits

import traceax as tx

NUMBER = 1792  # images: a multiple of every device count here


def main():
    if sys.argv[1:]:  # in a process that `start` launched
        process, processes, coordinator, results = sys.argv[1:]
        values = work(int(process), int(processes), coordinator)
        Path(results).write_text(json.dumps(values))
        return
    [one], [four] = start(devices=1), start(devices=4)
    first, second = start(devices=2, processes=2)
    names = ("1 device", "4 devices", "process 1 of 2", "process 2 of 2")
    print(" " * 30, *(f"{name:>14}" for name in names))
    for quantity, expected in one.items():
        row = [results[quantity] for results in (one, four, first, second)]
        print(f"{quantity:30}", *(f"{value:14.6g}" for value in row))
        assert all(abs(value - expected) < 1e-3 * abs(expected) for value in row)
    print("The results agree.")


def start(devices, processes=1):
    """Run this file in processes with simulated devices, and return their results."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    count = f" --xla_force_host_platform_device_count={devices}"
    flags = os.environ.get("XLA_FLAGS", "") + count
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.json" for i in range(processes)]
        running = []
        for i, file in enumerate(files):
            arguments = (str(i), str(processes), coordinator, str(file))
            command = [sys.executable, __file__, *arguments]
            quiet = subprocess.DEVNULL
            running.append(subprocess.Popen(command, env=environment, stdout=quiet))
        for process in running:
            assert process.wait(timeout=500) == 0, "a process failed"
        return [json.loads(file.read_text()) for file in files]


def work(process, processes, coordinator):
    """The program that every process runs. Each process gets every result."""
    results = {}
    # --8<-- [start:initialize]
    if processes > 1:
        # On GPUs and TPUs `jax.distributed.initialize()` is enough.
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, processes, process)
    # --8<-- [end:initialize]

    # --8<-- [start:spread]
    mesh = jax.make_mesh((jax.device_count(),), ("d",), axis_types=(AxisType.Auto,))

    def spread(x, *spec):
        """Spread `x` over the mesh. Each process provides its own part."""
        sharding = NamedSharding(mesh, jax.P(*spec))
        return jax.make_array_from_callback(x.shape, sharding, lambda part: x[part])

    # --8<-- [end:spread]

    images, labels = load_digits(return_X_y=True)
    images = (images[:NUMBER] / 16).astype(np.float32)
    labels = labels[:NUMBER].astype(np.int32)
    points, classes = spread(images, "d", None), spread(labels, "d")

    # A kernel matrix by rows: each device has the rows of its images.
    def squared_kernel(length, points, key):
        def product(vector):
            squares = jnp.sum(points**2, axis=1)
            distances = squares[:, None] + squares[None, :] - 2 * points @ points.T
            kernel = jnp.exp(-distances / (2 * length**2))
            return kernel @ (kernel @ vector)

        like, tag = points[:, 0], lx.positive_semidefinite_tag
        estimate = tx.trace(key, tx.as_operator(product, like, tags=tag), 40)
        return estimate.value, estimate.standard_error

    differentiate = jax.jit(jax.value_and_grad(squared_kernel, has_aux=True))
    key = jax.random.key(0)
    (value, error), gradient = differentiate(jnp.float32(2.0), points, key)
    results |= {"tr K^2": float(value), "its error bar": float(error)}
    results["d tr K^2 / d length"] = float(gradient)

    # A network's Hessian: we spread images over devices, then a layer.
    generator = np.random.default_rng(0)
    shapes = (64, 64), (64, 10)
    layers = [generator.normal(size=s).astype(np.float32) / 8 for s in shapes]

    def loss(layers, batch):
        images, classes = batch
        logits = jax.nn.log_softmax(jnp.tanh(images @ layers[0]) @ layers[1])
        return -jnp.mean(jnp.take_along_axis(logits, classes[:, None], axis=1))

    @jax.jit
    def curvature(layers, batch, key):
        hessian = tx.HessianLinearOperator(loss, layers, batch)
        return tx.trace(key, hessian, 16, tx.HutchinsonEstimator(chunk_size=4)).value

    everywhere = [spread(x, None, None) for x in layers]
    by_columns = [spread(layers[0], None, "d"), spread(layers[1], None, None)]
    all_images, all_classes = spread(images, None, None), spread(labels, None)
    by_images = curvature(everywhere, (points, classes), key)
    by_layer = curvature(by_columns, (all_images, all_classes), key)
    results["tr H, images over devices"] = float(by_images)
    results["tr H, a layer over devices"] = float(by_layer)

    # Probes over devices: each device has the operator, and takes a part of the products.
    class SpreadSampler(tx.IndexedSampler):
        rotation_invariant = False

        def probes(self, key, start, n, k, dtype):
            signs = tx.RademacherSampler().probes(key, start, n, k, dtype)
            layout = NamedSharding(mesh, jax.P(None, "d"))
            return jax.lax.with_sharding_constraint(signs, layout)

    estimator = tx.HutchinsonEstimator(SpreadSampler())

    @jax.jit
    def kernel_trace(points, key):
        features = tx.as_operator(points)
        return tx.trace(key, features @ features.T, 40, estimator).value

    results["tr X X^T, probes over devices"] = float(kernel_trace(all_images, key))
    return results


if __name__ == "__main__":
    main()
