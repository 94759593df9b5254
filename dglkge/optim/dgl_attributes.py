"""The attributes of ``dgl.distributed.optim`` that programs and DGL's own tests read."""

from __future__ import annotations

from typing import Any


class DglAttributes:
    """Names of DGL's optimizers for what is kept in parameter groups here."""

    param_groups: list[dict[str, Any]]
    _states: dict[str, Any]

    def finish(self) -> None:
        """Wait for a step in the background."""
        raise NotImplementedError

    @property
    def _state(self) -> dict[str, Any]:
        """State of each embedding by name: a ``DistTensor``, or a tuple of them."""
        self.finish()
        return self._states

    @property
    def _defaults(self) -> dict[str, float]:
        """Hyper-parameters of the first group under DGL's names."""
        first = self.param_groups[0]
        named = {"_lr": float(first["lr"]), "_eps": float(first["eps"])}
        if "betas" in first:
            named["_beta1"], named["_beta2"] = first["betas"]
        return named

    @property
    def _lr(self) -> float:
        """Learning rate of the first group; set, of all groups."""
        return self._defaults["_lr"]

    @_lr.setter
    def _lr(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr

    @property
    def _eps(self) -> float:
        """Epsilon of the first group; set, of all groups."""
        return self._defaults["_eps"]

    @_eps.setter
    def _eps(self, eps: float) -> None:
        for group in self.param_groups:
            group["eps"] = eps

    @property
    def _beta1(self) -> float:
        """Decay of the first moment, of the first group."""
        return self._defaults["_beta1"]

    @property
    def _beta2(self) -> float:
        """Decay of the second moment, of the first group."""
        return self._defaults["_beta2"]
