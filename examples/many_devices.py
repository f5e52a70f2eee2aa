"""One estimate on one device, on four, and on two processes, with the same result.

The operators are made of the digits of scikit-learn:

- a kernel matrix of 1,792 images that is never formed, each device holding the rows of its
  images: `tr K^2`, and its derivative with respect to the length scale;
- the Hessian of a network's loss, over its parameters, with the images spread over devices
  (data-parallel), or a layer (model-parallel);
- the Gram matrix of the images, with the probes spread over devices.

    python examples/many_devices.py

runs everything on this machine: once on one device, once on four simulated ones, and once
as two processes that talk over the network, as on two machines.
"""

import argparse
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
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

import traceax as tx

NUMBER = 1792  # images: a multiple of every number of devices here


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("figure", nargs="?", help="not used: there is none")
    parser.add_argument("--process", type=int)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--coordinator")
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    if arguments.process is not None:
        results = work(arguments.process, arguments.processes, arguments.coordinator)
        arguments.results.write_text(json.dumps(results))
        return
    [one] = start(devices=1)
    [four] = start(devices=4)
    first, second = start(devices=2, processes=2)
    columns = {
        "1 device": one,
        "4 devices": four,
        "process 1 of 2": first,
        "process 2 of 2": second,
    }
    print(" " * 30, *(f"{name:>14}" for name in columns))
    for quantity, expected in one.items():
        row = [results[quantity] for results in columns.values()]
        print(f"{quantity:30}", *(f"{value:14.6g}" for value in row))
        assert all(abs(value - expected) < 1e-3 * abs(expected) for value in row)
    print("The results agree.")


def start(devices, processes=1):
    """Runs this file in processes of so many simulated devices each.

    Returns the results of every process. They are passed in files: what the network's
    threads print may come between the lines of a process's own output.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")
        + f" --xla_force_host_platform_device_count={devices}",
    }
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{i}.json" for i in range(processes)]
        running = [
            subprocess.Popen(
                [
                    *(sys.executable, __file__),
                    *("--process", str(i), "--processes", str(processes)),
                    *("--coordinator", coordinator, "--results", str(file)),
                ],
                env=environment,
                stdout=subprocess.DEVNULL,
            )
            for i, file in enumerate(files)
        ]
        for process in running:
            if process.wait(timeout=500):
                raise RuntimeError(f"a process failed with code {process.returncode}")
        return [json.loads(file.read_text()) for file in files]


def work(process, processes, coordinator):
    """What runs on every process, the same program on all of them.

    Every process gets every result.
    """
    results = {}
    # --8<-- [start:initialize]
    if processes > 1:
        # On GPUs and TPUs `jax.distributed.initialize()` is enough.
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(coordinator, processes, process)
    # --8<-- [end:initialize]

    # --8<-- [start:spread]
    mesh = jax.make_mesh(
        (jax.device_count(),), ("d",), axis_types=(jax.sharding.AxisType.Auto,)
    )

    def spread(x, *spec):
        """Each process gives its own part of `x`."""
        sharding = NamedSharding(mesh, P(*spec))
        return jax.make_array_from_callback(x.shape, sharding, lambda part: x[part])

    # --8<-- [end:spread]

    images, labels = load_digits(return_X_y=True)
    images = (images[:NUMBER] / 16).astype(np.float32)
    labels = labels[:NUMBER].astype(np.int32)
    points, classes = spread(images, "d", None), spread(labels, "d")

    #
    # A kernel matrix, by rows.
    #

    def squared_kernel(length, points, key):
        def rows(vector):
            # Each device has its rows of K, and all of `points @ points.T` only there.
            squares = jnp.sum(points**2, axis=1)
            distances = squares[:, None] + squares[None, :] - 2 * points @ points.T
            kernel = jnp.exp(-distances / (2 * length**2))
            return kernel @ (kernel @ vector)

        operator = lx.FunctionLinearOperator(
            rows,
            jax.ShapeDtypeStruct((NUMBER,), jnp.float32),
            lx.positive_semidefinite_tag,
        )
        estimate = tx.trace(key, operator, 40)
        return estimate.value, estimate.standard_error

    differentiate = jax.jit(jax.value_and_grad(squared_kernel, has_aux=True))
    key = jax.random.key(0)
    (value, error), gradient = differentiate(jnp.float32(2.0), points, key)
    results["tr K^2"] = float(value)
    results["its error bar"] = float(error)
    results["d tr K^2 / d length"] = float(gradient)

    #
    # The Hessian of a network: images over devices, then a layer over devices.
    #

    generator = np.random.default_rng(0)
    layers = [
        generator.normal(size=(64, 64)).astype(np.float32) / 8,
        generator.normal(size=(64, 10)).astype(np.float32) / 8,
    ]

    def loss(layers, images, classes):
        hidden = jnp.tanh(images @ layers[0])
        logits = jax.nn.log_softmax(hidden @ layers[1])
        return -jnp.mean(jnp.take_along_axis(logits, classes[:, None], axis=1))

    @jax.jit
    def curvature(layers, images, classes, key):
        gradient = jax.grad(loss)
        operator = lx.JacobianLinearOperator(
            lambda layers, _: gradient(layers, images, classes),
            layers,
            tags=lx.symmetric_tag,
        )
        return tx.trace(key, operator, 16, tx.HutchinsonEstimator(chunk_size=4)).value

    everywhere = [spread(x, None, None) for x in layers]
    by_columns = [spread(layers[0], None, "d"), spread(layers[1], None, None)]
    all_images = spread(images, None, None)
    all_classes = spread(labels, None)
    value = curvature(everywhere, points, classes, key)
    results["tr H, images over devices"] = float(value)
    value = curvature(by_columns, all_images, all_classes, key)
    results["tr H, a layer over devices"] = float(value)

    #
    # Probes over devices: each has the operator, and a part of the products.
    #

    layout = NamedSharding(mesh, P(None, "d"))
    estimator = tx.HutchinsonEstimator(tx.ShardedSampler(sharding=layout))

    @jax.jit
    def kernel_trace(points, key):
        features = lx.MatrixLinearOperator(points)
        gram = features @ features.T
        return tx.trace(key, gram, 40, estimator).value

    value = kernel_trace(all_images, key)
    results["tr X X^T, probes over devices"] = float(value)
    return results


if __name__ == "__main__":
    main()
