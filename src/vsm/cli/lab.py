"""Commands of the lab, the experiment tooling: a clone of the repository has it."""

import importlib
import importlib.util
from types import ModuleType

from vsm.errors import SettingsError

COMMANDS = ("demo", "reproduce", "study", "bench")
MODEL_ACTIONS = ("ship", "calibrate")
"""Actions of ``vsm models``."""


def is_installed() -> bool:
    """Whether the lab can be imported."""
    return importlib.util.find_spec("vsm_lab") is not None


def lab_module(name: str) -> ModuleType:
    """Import the module of a lab command, or say how to install the lab."""
    if not is_installed():
        raise SettingsError(
            "the experiment tooling is not installed; clone the repository and install it with: "
            "pip install --editable '.[plots]'"
        )
    return importlib.import_module(f"vsm_lab.cli.{name}")
