"""Models that ship with the package: their names, their cards, and where they are.

A shipped model is a folder with those files of a run directory that using it needs, and a card: one
JSON object that says what it is, how good it was measured to be, and how it was made. Whatever
takes a run directory therefore takes a shipped model. Nothing here imports torch.
"""

from pathlib import Path
from typing import Any

from vsm.errors import DocumentError, RunError
from vsm.runs.directory import CONFIG_NAME
from vsm.system.documents import read_json

MODELS = Path(__file__).parents[1] / "models"
CARD_NAME = "card.json"
NEEDED = {"name": str, "way": int, "shot": int, "encoder": dict}
"""What code reads of a card; the rest is for people."""

Card = dict[str, Any]


def shipped_names() -> list[str]:
    """Return the names of all models that ship with the package."""
    return sorted(card.parent.name for card in MODELS.glob(f"[!.]*/{CARD_NAME}"))


def shipped_folder(name: str) -> Path:
    """Return the folder of a shipped model, or say which there are."""
    if name not in shipped_names():
        raise RunError(f"model: unknown model {name!r}; known: {_known()}")
    return MODELS / name


def is_shipped(source: str | Path) -> bool:
    """Whether a shipped model is meant: there is one of that name, and nothing at that path."""
    return str(source) in shipped_names() and not Path(source).exists()


def find_run(source: str | Path) -> Path:
    """Return the folder of a run directory or of a shipped model's name.

    A folder that exists is meant before a model of the same name.
    """
    path = Path(source)
    if is_shipped(source):
        return MODELS / path
    if path.name == str(source) and not path.exists():
        raise RunError(
            f"{source} is not a run directory: it has no {CONFIG_NAME}; and no model of that name "
            f"ships with vsm; known: {_known()}"
        )
    return path


def read_card(folder: Path) -> Card | None:
    """Return the card in ``folder``; a plain run directory has none."""
    path = folder / CARD_NAME
    if not path.is_file():
        return None
    try:
        card = read_json(path)
    except DocumentError as error:
        raise RunError(f"{path} is damaged: {error.reason}") from error
    missing = [key for key in NEEDED if not isinstance(card, dict) or key not in card]
    if missing:
        raise RunError(f"{path} is not a model's card: it lacks {', '.join(missing)}")
    wrong = [key for key, kind in NEEDED.items() if type(card[key]) is not kind]
    if wrong:
        raise RunError(f"{path} is damaged: {wrong[0]} is no {NEEDED[wrong[0]].__name__}")
    found: Card = card
    return found


def shipped_card(name: str) -> Card:
    """Return the card of a shipped model, or say which there are."""
    card = read_card(shipped_folder(name))
    assert card is not None
    return card


def _known() -> str:
    return ", ".join(shipped_names()) or "none"
