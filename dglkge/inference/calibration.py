"""The file of calibrated probabilities beside a checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dglkge.errors import InputError
from dglkge.evaluation.calibration import METHODS, Curve


@dataclass(frozen=True)
class Calibration:
    """Probabilities of a run's scores.

    Attributes
    ----------
    method : str
        A key of :data:`dglkge.evaluation.calibration.METHODS`.
    curve : Platt or Isotonic
        Returns the probability of a score.
    positive_rate : float
        Share of true triples that was assumed.
    corruptions : int
        False triples drawn for each side of a true one.
    seed : int
        Of these draws.
    num_true, num_false : int
        Scores that it was fitted on.
    run_id, version
        The checkpoint whose scores these are.
    """

    method: str
    curve: Curve
    positive_rate: float
    corruptions: int
    seed: int
    num_true: int
    num_false: int
    run_id: str
    version: int

    def to_dict(self) -> dict[str, Any]:
        """Return everything, ready for JSON."""
        return {**vars(self), "curve": self.curve.to_dict()}

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Read a file with the JSON of :meth:`to_dict`.

        Raises
        ------
        InputError
            If it is missing or damaged.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            fields = {name: content[name] for name in cls.__dataclass_fields__}
            curve = METHODS[fields.pop("method")].from_dict(fields.pop("curve"))
            return cls(method=content["method"], curve=curve, **fields)
        except FileNotFoundError:
            raise InputError(
                f"{path} does not exist: fit probabilities first, with dglkge evaluate {path.parent} "
                "--calibrate isotonic"
            ) from None
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path} is damaged ({error!r}); fit probabilities again, with dglkge evaluate --calibrate"
            ) from None
