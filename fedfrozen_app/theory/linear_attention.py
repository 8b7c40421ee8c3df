"""Linear attention, its loss and exact gradients, and the profile objective (arXiv:2605.06446).

With Q = phi(H W_Q), R = phi(H W_K), both [n, d_k], and phi a positive, bounded, smooth map by row:

    A = Q R^T / n            the kernel; the paper's has no 1/n, which only rescales W_V
    Z = A H                  attention features, [n, d]
    O = Z W_V

    f_k(Phi, theta) = 1/(2 m n) sum_j ||Z_j W_V - Y_j||_F^2 + (lambda / 2) ||W_V||_F^2
    f = mean_k f_k           all clients hold m examples

In theta each f_k is a quadratic, (1/2) tr theta^T (S_k + lambda) theta - tr C_k^T theta + c_k with
S_k = mean Z^T Z, C_k = mean Z^T Y, c_k = mean ||Y||^2 / 2, means over the m n tokens. So

    h_lambda(Phi) = min_theta f(Phi, theta) = c - (1/2) tr C^T (S + lambda)^-1 C

with S, C, c the means over clients. Everything is batched: [S, K, ...], S seeds and K clients;
tensors of the server have K = 1.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedfrozen_app.theory.problem import Data, FeatureMap, Weights


@dataclass(frozen=True)
class Attention:
    """O = phi(H W_Q) phi(H W_K)^T H W_V / n under the squared loss.

    Attributes
    ----------
    phi : {"sigmoid", "softmax"}
        Feature map.
    value_l2 : float
        lambda.
    """

    phi: FeatureMap = "sigmoid"
    value_l2: float = 1e-3

    def map(self, pre: Tensor) -> Tensor:
        """Return phi of [..., 2, d_k], the queries' and the keys' rows."""
        return pre.sigmoid() if self.phi == "sigmoid" else pre.softmax(dim=-1)

    def map_backward(self, out: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient before phi, from phi's output and the gradient after it."""
        if self.phi == "sigmoid":
            return grad * out * (1 - out)
        return out * (grad - (grad * out).sum(dim=-1, keepdim=True))

    def features(self, data: Data, kernel: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return Q, R [S, K, m, n, d_k], G = R^T H / n [S, K, m, d_k, d] and Z = Q G."""
        s, k, m, n, d = data.inputs.shape
        pre = data.inputs.reshape(s, k, m * n, d) @ kernel
        both = self.map(pre.view(s, k, m, n, 2, -1))
        query, key = both.unbind(dim=-2)
        gathered = key.mT @ data.inputs / n
        return query, key, gathered, query @ gathered

    def gradient(self, data: Data, weights: Weights, *, frozen: bool = False) -> Weights:
        """Return the gradients of each client's f_k at that client's (or the server's) weights.

        With ``frozen`` the kernel's gradient is zero.
        """
        kernel, value = weights.each()
        s, k, m, n, d = data.inputs.shape
        query, key, gathered, z = self.features(data, kernel)
        flat = z.reshape(s, k, m * n, d)
        residual = (flat @ value - data.targets.reshape(s, k, m * n, -1)) / (m * n)
        value_grad = flat.mT @ residual + self.value_l2 * value
        if frozen:
            zero = torch.zeros_like(kernel).expand(s, k, d, -1)
            return Weights(zero, value_grad)
        z_grad = (residual @ value.mT).view(s, k, m, n, d)
        query_grad = z_grad @ gathered.mT
        key_grad = data.inputs @ (query.mT @ z_grad).mT / n
        out, grad = torch.stack([query, key], -2), torch.stack([query_grad, key_grad], -2)
        pre_grad = self.map_backward(out, grad).view(s, k, m * n, -1)
        return Weights(data.inputs.reshape(s, k, m * n, d).mT @ pre_grad, value_grad)

    def quadratic(self, data: Data, kernel: Tensor) -> "Quadratic":
        """Return every client's f_k as a function of theta at a kernel."""
        s, k, m, n, d = data.inputs.shape
        z = self.features(data, kernel)[-1].reshape(s, k, m * n, d)
        y = data.targets.reshape(s, k, m * n, -1)
        eye = self.value_l2 * torch.eye(d, dtype=z.dtype, device=z.device)
        return Quadratic(
            z.mT @ z / (m * n) + eye, z.mT @ y / (m * n), y.square().sum((-2, -1)) / (2 * m * n)
        )


@dataclass(frozen=True)
class Quadratic:
    """Clients' losses with the kernel held: (1/2) tr theta^T A theta - tr C^T theta + c.

    Attributes
    ----------
    curvature : Tensor
        A_k = S_k + lambda I, [..., K, d, d].
    linear : Tensor
        C_k, [..., K, d, d].
    constant : Tensor
        c_k, [..., K].
    """

    curvature: Tensor
    linear: Tensor
    constant: Tensor

    def loss(self, value: Tensor) -> Tensor:
        """Return f, the mean over clients, at the server's theta [..., 1, d, d]; [...]."""
        mean = self.mean()
        product = 0.5 * (mean.curvature @ value) - mean.linear
        return ((value * product).sum((-2, -1)) + mean.constant)[..., 0]

    def mean(self) -> "Quadratic":
        """Return the global quadratic, K = 1."""
        return Quadratic(
            self.curvature.mean(-3, keepdim=True),
            self.linear.mean(-3, keepdim=True),
            self.constant.mean(-1, keepdim=True),
        )

    def minimizer(self) -> Tensor:
        """Return theta*(Phi), the ridge solution over all clients, [..., 1, d, d]."""
        mean = self.mean()
        solution: Tensor = torch.linalg.solve(mean.curvature, mean.linear)
        return solution

    def profile(self) -> Tensor:
        """Return h_lambda(Phi), [...]."""
        mean = self.mean()
        return (mean.constant - 0.5 * (mean.linear * self.minimizer()).sum((-2, -1)))[..., 0]

    def round_map(self, lr: Tensor, local_steps: int) -> tuple[Tensor, Tensor]:
        """Return (M, b) of one frozen round of FedAvg, theta <- M theta + b, [..., 1, d, d].

        A local step is theta <- (I - lr A_k) theta + lr C_k; E of them are
        B^E theta + (I + B + ... + B^(E-1)) lr C_k with B = I - lr A_k, and the server takes
        the mean over clients.
        """
        eye = torch.eye(self.curvature.shape[-1], dtype=self.curvature.dtype)
        step, shift = eye - lr * self.curvature, lr * self.linear
        power, total = step, shift
        for _ in range(local_steps - 1):
            total = step @ total + shift
            power = step @ power
        return power.mean(-3, keepdim=True), total.mean(-3, keepdim=True)
