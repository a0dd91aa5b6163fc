"""A perceptron with two hidden layers as in MXNet's image-classification example.

128 units, relu; 64 units, relu; 10 units, softmax (example/image-classification/symbols/mlp.py
of the original), in NumPy or CuPy. The smallest complete network: start here to write your own.
It keeps no parameters and no state, so all devices and threads can use one object. Read next:
``lenet.py``, and ``kvstore/mxnet/model.py`` for what calls it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from layers import Array, array_module, glorot_uniform, softmax, softmax_cross_entropy
from numpy.typing import NDArray

Parameters = dict[str, Any]  # name -> array, all on one device and of one dtype


@dataclass(frozen=True)
class MLP:
    """The network of this file; see ``kvstore.model.Network`` for what its methods must do."""

    num_classes: int = 10
    hidden: tuple[int, ...] = (128, 64)

    def init_params(
        self, input_shape: tuple[int, ...], rng: np.random.Generator
    ) -> dict[str, NDArray[Any]]:
        """Float32 parameters for samples of ``input_shape``, which is flattened."""
        sizes = (int(np.prod(input_shape)), *self.hidden, self.num_classes)
        params: dict[str, NDArray[Any]] = {}
        for layer, (inputs, outputs) in enumerate(pairwise(sizes), start=1):
            params[f"fc{layer}_weight"] = glorot_uniform(rng, (outputs, inputs), inputs, outputs)
            params[f"fc{layer}_bias"] = np.zeros(outputs, np.float32)
        return params

    def loss_and_gradients(
        self, params: Parameters, x: Array, y: Array
    ) -> tuple[float, int, Parameters]:
        """Sum of the losses over the samples, right answers, and the gradients of that sum."""
        inputs, scores = self._forward(params, x)
        loss_sum, correct_count, gradient = softmax_cross_entropy(scores, y)
        gradients: Parameters = {}
        for layer in range(len(inputs), 0, -1):
            value = inputs[layer - 1]
            gradients[f"fc{layer}_weight"] = gradient @ value.T
            gradients[f"fc{layer}_bias"] = gradient.sum(axis=1)
            if layer > 1:
                gradient = (params[f"fc{layer}_weight"].T @ gradient) * (value > 0)
        return loss_sum, correct_count, gradients

    def predict(self, params: Parameters, x: Array) -> Array:
        """Class probabilities, (N, classes), on the device of ``x``."""
        return softmax(self._forward(params, x)[1]).T

    def _forward(self, params: Parameters, x: Array) -> tuple[list[Array], Array]:
        """The input of every layer, one sample per column, and the scores of the last layer."""
        module = array_module(x)
        value = module.ascontiguousarray(x.reshape(x.shape[0], -1).T)
        inputs: list[Array] = []
        num_layers = len(self.hidden) + 1
        for layer in range(1, num_layers + 1):
            inputs.append(value)
            value = params[f"fc{layer}_weight"] @ value + params[f"fc{layer}_bias"][:, None]
            if layer < num_layers:
                value = module.maximum(value, 0)
        return inputs, value
