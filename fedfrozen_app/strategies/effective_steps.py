"""||a||_1, by how many plain gradient steps local SGD really moved (arXiv:2007.07481, Sec. 3).

After tau steps y - x = -eta sum_k a_k g_k. The weight a_k of step k's gradient is what an
impulse at step k has grown to by the end:

- plain SGD: a_k = 1, so ||a||_1 = tau;
- momentum rho: ||a||_1 = [tau - rho (1 - rho^tau) / (1 - rho)] / (1 - rho);
- proximal mu: ||a||_1 = (1 - (1 - eta mu)^tau) / (eta mu);
- both together: no closed form in the paper, so with mu the recursion itself is followed.
"""


def effective_steps(
    steps: int, *, lr: float = 0.0, momentum: float = 0.0, proximal_mu: float = 0.0
) -> float:
    """Return ||a||_1 of ``steps`` optimiser steps.

    Parameters
    ----------
    steps : int
        tau, optimiser steps, not epochs.
    lr : float
        eta, which matters only with ``proximal_mu``.
    momentum : float
        rho of SGD with momentum that starts at zero.
    proximal_mu : float
        mu of FedProx.
    """
    if proximal_mu == 0:
        return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)
    moved, velocity, total = 0.0, 1.0, 0.0  # (y - x) / -eta after an impulse of 1
    for _ in range(steps):
        moved += velocity
        total += abs(moved)
        velocity = momentum * velocity - lr * proximal_mu * moved
    return total
