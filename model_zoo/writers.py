"""Where the figures of a run go besides its own files: TensorBoard, if asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trainer import TrainConfig


class Scalars:
    """Writes every number of a record as a scalar over the step; without a writer it does nothing."""

    def __init__(self, writer: Any = None) -> None:
        self._writer = writer

    @classmethod
    def open(cls, config: TrainConfig) -> Scalars:
        """For a run. ImportError says what to install if TensorBoard is wanted and missing."""
        if not config.tensorboard:
            return cls()
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("tensorboard: not installed; pip install 'gemopt[data]'") from error
        return cls(SummaryWriter(str(Path(config.out) / "tensorboard")))

    def write(self, record: dict[str, float]) -> None:
        if self._writer is not None:
            for name, value in record.items():
                if name != "step":
                    group, _, rest = name.partition("_")
                    tag = f"valid/{rest}" if group == "valid" else f"train/{name}"
                    self._writer.add_scalar(tag, value, int(record["step"]))

    def __enter__(self) -> Scalars:
        return self

    def __exit__(self, *_: Any) -> None:
        if self._writer is not None:
            self._writer.close()
