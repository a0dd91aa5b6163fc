"""LeNet as MXNet's image-classification example builds it, in NumPy or CuPy.

convolution 5x5, 20 filters, tanh, 2x2 max pooling; convolution 5x5, 50 filters, tanh, 2x2 max
pooling; 500 units, tanh; 10 units, softmax (example/image-classification/symbols/lenet.py of the
original; Y. LeCun et al., 1998). A network keeps no parameters and no state: it gets the
parameters and returns gradients, so all devices and threads can use one object. Read next:
``layers.py``, and ``kvstore/mxnet/model.py`` for what calls it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from layers import (
    Array,
    array_module,
    glorot_uniform,
    max_pool,
    max_pool_backward,
    patches,
    softmax,
    softmax_cross_entropy,
    unpatches,
)
from numpy.typing import NDArray

Parameters = dict[str, Any]  # name -> array, all on one device and of one dtype


@dataclass(frozen=True)
class LeNet:
    """The network of this file; see ``kvstore.model.Network`` for what its methods must do."""

    num_classes: int = 10
    filters: tuple[int, int] = (20, 50)
    hidden: int = 500
    kernel: int = 5

    def init_params(
        self, input_shape: tuple[int, ...], rng: np.random.Generator
    ) -> dict[str, NDArray[Any]]:
        """Float32 parameters for samples of ``input_shape``, (C, H, W) or (H, W)."""
        channels, height, width = (1, *input_shape)[-3:]
        area = self.kernel * self.kernel
        flat = (
            self.filters[1] * self._pooled(self._pooled(height)) * self._pooled(self._pooled(width))
        )
        sizes = {
            "conv1": (self.filters[0], channels * area),
            "conv2": (self.filters[1], self.filters[0] * area),
            "fc1": (self.hidden, flat),
            "fc2": (self.num_classes, self.hidden),
        }
        params: dict[str, NDArray[Any]] = {}
        for name, (outputs, inputs) in sizes.items():
            # A filter's output goes to a whole window of the next layer, so count the area.
            fan_out = outputs * area if name.startswith("conv") else outputs
            params[f"{name}_weight"] = glorot_uniform(rng, (outputs, inputs), inputs, fan_out)
            params[f"{name}_bias"] = np.zeros(outputs, np.float32)
        return params

    def loss_and_gradients(
        self, params: Parameters, x: Array, y: Array
    ) -> tuple[float, int, Parameters]:
        """Sum of the losses over the samples, right answers, and the gradients of that sum."""
        images = self._to_layout(x)
        columns1, pooled1, choice1 = self._convolve(params, "conv1", images)
        columns2, pooled2, choice2 = self._convolve(params, "conv2", pooled1)
        features = pooled2.reshape(-1, pooled2.shape[-1])
        hidden = self._hidden(params, features)
        scores = params["fc2_weight"] @ hidden + params["fc2_bias"][:, None]
        loss_sum, correct_count, at_scores = softmax_cross_entropy(scores, y)

        at_hidden = through_tanh(params["fc2_weight"].T @ at_scores, hidden)
        at_pooled2 = (params["fc1_weight"].T @ at_hidden).reshape(pooled2.shape)
        at_sums2 = self._back_to_sums(at_pooled2, pooled2, choice2)
        at_pooled1 = unpatches(params["conv2_weight"].T @ at_sums2, pooled1.shape, self.kernel)
        at_sums1 = self._back_to_sums(at_pooled1, pooled1, choice1)
        gradients: Parameters = {}
        for name, at_output, inputs in (
            ("conv1", at_sums1, columns1),
            ("conv2", at_sums2, columns2),
            ("fc1", at_hidden, features),
            ("fc2", at_scores, hidden),
        ):
            gradients[f"{name}_weight"] = at_output @ inputs.T
            gradients[f"{name}_bias"] = at_output.sum(axis=1)
        return loss_sum, correct_count, gradients

    def predict(self, params: Parameters, x: Array) -> Array:
        """Class probabilities, (N, classes), on the device of ``x``."""
        pooled1 = self._convolve(params, "conv1", self._to_layout(x))[1]
        pooled2 = self._convolve(params, "conv2", pooled1)[1]
        hidden = self._hidden(params, pooled2.reshape(-1, pooled2.shape[-1]))
        return softmax(params["fc2_weight"] @ hidden + params["fc2_bias"][:, None]).T

    def _pooled(self, size: int) -> int:
        return (size - self.kernel + 1) // 2

    def _to_layout(self, x: Array) -> Array:
        """(N, H, W) or (N, C, H, W) to (C, H, W, N), the samples last in memory."""
        images = x if x.ndim == 4 else x[:, None]
        return array_module(x).ascontiguousarray(images.transpose(1, 2, 3, 0))

    def _convolve(
        self, params: Parameters, name: str, images: Array
    ) -> tuple[Array, Array, tuple[Array, Array, Array]]:
        """Patches of the input, tanh of the pooled sums, and which pixel each maximum was.

        tanh grows with its argument, so pooling first gives the same numbers as pooling last
        and takes a quarter of the work.
        """
        weight = params[f"{name}_weight"]
        columns = patches(images, self.kernel)
        _, height, width, samples = images.shape
        sums = (weight @ columns).reshape(
            weight.shape[0], height - self.kernel + 1, width - self.kernel + 1, samples
        )
        largest, choice = max_pool(sums)
        # The bias is the same for all four pixels of a square: it too can wait until here.
        largest += params[f"{name}_bias"][:, None, None, None]
        return columns, array_module(images).tanh(largest, out=largest), choice

    def _hidden(self, params: Parameters, features: Array) -> Array:
        sums = params["fc1_weight"] @ features
        sums += params["fc1_bias"][:, None]
        return array_module(sums).tanh(sums, out=sums)

    def _back_to_sums(
        self, gradient: Array, pooled: Array, choice: tuple[Array, Array, Array]
    ) -> Array:
        """Back through tanh and pooling; one row per filter, one column per patch."""
        at_sums = max_pool_backward(through_tanh(gradient, pooled), choice)
        return at_sums.reshape(at_sums.shape[0], -1)


def through_tanh(gradient: Array, output: Array) -> Array:
    """The gradient at the input of tanh; its derivative is 1 - tanh^2."""
    return gradient * (1 - output * output)
