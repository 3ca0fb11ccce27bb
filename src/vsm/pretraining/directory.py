"""The files of a pre-training."""

from pathlib import Path

from vsm.runs.checkpoints import BACKBONE_NAME
from vsm.runs.directory import Directory
from vsm.settings import PretrainSettings


class PretrainingDirectory(Directory):
    """The files of one pre-training, by name.

    Attributes:
        backbone: the best backbone by validation.
    """

    command = "pretrain"
    results = (BACKBONE_NAME,)

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.backbone = path / BACKBONE_NAME

    def settings(self) -> PretrainSettings:
        """Read the pre-training's settings, or say that there is none."""
        return self.read_settings(PretrainSettings)
