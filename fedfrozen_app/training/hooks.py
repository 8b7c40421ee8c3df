"""What an algorithm adds to the local loop: a term in the loss or a correction of gradients.

A hook sees the trainable parameters by state-dict name, the key that server-side state is
kept by. FedProx and SCAFFOLD keep theirs beside their server's half, in
:mod:`fedfrozen_app.strategies.fedprox` and :mod:`fedfrozen_app.strategies.scaffold`; the one
here belongs to the freeze.
"""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from fedfrozen_app.models.attention import HasShape
from fedfrozen_app.models.selection import Selection, value_rows

Parameters = Mapping[str, nn.Parameter]


class Hook(Protocol):
    """Three moments of local training; a subclass overrides the ones that it needs."""

    def begin(self, params: Parameters) -> None:
        """See the parameters as received, before the first step."""

    def extra_loss(self, params: Parameters) -> Tensor | None:
        """Return a scalar to add to the batch's loss, or None. It is not reported."""
        return None

    def correct(self, params: Parameters) -> None:
        """Change ``.grad`` in place, after the backward pass and before clipping.

        ``.grad`` is None for a parameter that the forward pass did not use.
        """


class ValueL2(Hook):
    """(lambda/2) ||W_V||^2 on the value rows of every attention layer (arXiv:2605.06446).

    Its gradient lambda W_V is added to the gradients, which costs no graph and stays fp32
    under autocast. Biases, and value rows that are frozen, are left alone.

    Parameters
    ----------
    value_l2 : float
        lambda.
    entries : Mapping[str, HasShape]
        The whole state dict.
    selection : Selection | None
        What the model is frozen by; None where nothing is. It says which rows of a fused
        weight the trainable parameter covers.

    Raises
    ------
    ValueError
        When no value rows are found or all of them are frozen, and from ``begin`` when the
        model is frozen by another selection.
    """

    def __init__(
        self,
        value_l2: float,
        entries: Mapping[str, HasShape],
        selection: Selection | None = None,
    ) -> None:
        self.value_l2 = value_l2
        rows = value_rows(entries)
        self.rows = rows if selection is None else selection.locate(rows)
        if not self.rows:
            raise ValueError(
                f"value-l2={value_l2} has no effect: all value rows are frozen; set value-l2=0 "
                "or freeze something else, for example frozen=query-key"
            )

    def begin(self, params: Parameters) -> None:
        """Check that the rows are those of the parameters that train."""
        for name, (dim, _, stop) in self.rows.items():
            size = params[name].shape[dim] if name in params else 0
            if stop > size:
                raise ValueError(
                    f"value-l2: {name!r} has {size} trainable rows, but its value rows end at "
                    f"{stop}; build ValueL2 with the selection the model is frozen by"
                )

    def correct(self, params: Parameters) -> None:
        """Add lambda W_V to the gradients of W_V."""
        for name, (dim, start, stop) in self.rows.items():
            if (gradient := params[name].grad) is not None:
                values = params[name].detach().narrow(dim, start, stop - start)
                gradient.narrow(dim, start, stop - start).add_(values, alpha=self.value_l2)
