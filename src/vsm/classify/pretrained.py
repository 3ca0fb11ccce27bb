"""What a classifier begins with: a trained model, its memory, and how its inputs are prepared."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from vsm.classify.inputs import as_features
from vsm.classify.pictures import PictureFormat, as_list
from vsm.data import open_dataset
from vsm.errors import ClassifierError, RunError
from vsm.evaluation.evaluator import EMBEDDING_BATCH, evaluation_mode
from vsm.evaluation.rejection import Thresholds, calibrate_on_validation
from vsm.memory import Memory
from vsm.model import FewShotModel
from vsm.runs.configuration import settings_from_dict, settings_to_dict
from vsm.runs.memory_files import EncoderIdentity, NamedMemory, read_memory, trained_memory
from vsm.runs.shipped import find_run, temperature_for
from vsm.runs.tensor_files import load_weights, strip_prefix
from vsm.runs.trained_model import RunDirectory, load_model, require_consent
from vsm.system.devices import ON_CPU, Placement


@dataclass(frozen=True)
class Pretrained:
    """A trained model, ready to be given examples. Nothing in it is ever changed.

    Attributes:
        name: what the user called it.
        model: in evaluation mode.
        memory: with the names of its slots; nothing for methods without one.
        pictures: how pictures are prepared; nothing if the model takes features.
        temperatures: of calibrated probabilities, by the number of examples a class; as a card has
            them, nothing where none were fitted.
        known_thresholds: when to answer "none of these", where it was measured before.
        find_thresholds: measures that otherwise; nothing if it cannot be.
    """

    name: str
    model: FewShotModel
    memory: NamedMemory | None
    pictures: PictureFormat | None
    temperatures: Mapping[str, float] | None = None
    known_thresholds: Thresholds | None = None
    find_thresholds: Callable[["Pretrained"], Thresholds] | None = None
    _found: list[Thresholds] = field(default_factory=list, init=False, repr=False, compare=False)

    def __deepcopy__(self, _: dict[int, object]) -> Self:
        return self  # read-only, so that copies of estimators can share it

    @property
    def identity(self) -> EncoderIdentity:
        """What makes the features."""
        return EncoderIdentity.of(self.model.settings, self.model.state_dict())

    def temperature(self, shot: float) -> float:
        """Return T of the calibrated probabilities p^(1/T); 1 where none was fitted."""
        fitted = temperature_for({"temperatures": self.temperatures}, shot)
        return 1.0 if fitted is None else fitted

    def with_memory(self, memory: NamedMemory, source: object) -> "Pretrained":
        """Return the same model with another memory of its encoder.

        When to answer "none of these" stays known if the memory has only grown.
        """
        if self.memory is None:
            raise ClassifierError(
                f"memory: the method {self.model.settings.method} of {self.name} has none; leave "
                "it out"
            )
        memory.require_encoder(self.identity, source)
        if type(memory.memory) is not type(self.memory.memory):
            raise ClassifierError(
                f"memory: {source} holds a memory of the method {memory.facts.get('method')}, but "
                f"{self.name} was trained with {self.model.settings.method}"
            )
        on_device = replace(memory, memory=memory.memory.to(self.model.device))
        grown = bool(memory.names) and set(self.memory.names) <= set(memory.names)
        return replace(
            self, memory=on_device, known_thresholds=self.known_thresholds if grown else None
        )

    def thresholds(self) -> Thresholds:
        """Return when to answer "none of these": what is stored with the model, or measured.

        Measuring needs the data, and embeds all pictures of the validation classes once.
        """
        if self.known_thresholds is not None:
            return self.known_thresholds
        if self.find_thresholds is None:
            raise ClassifierError(
                f"reject: {self.name} has no validation classes to choose a threshold by; use a "
                "run directory, or learn_memory over features"
            )
        if not self._found:
            self._found.append(self.find_thresholds(self))
        return self._found[0]

    @torch.no_grad()
    def embed(self, inputs: Any, advance: Callable[[int], object] = bool) -> Tensor:
        """Map pictures, or rows of features, to features ``[n, D]`` where the model is."""
        if self.pictures is None:
            samples = as_features(inputs, self.model.num_features)
        else:
            listed = as_list(inputs)
            if not listed:
                return torch.zeros(0, self.model.num_features, device=self.model.device)
            samples = self.pictures.pixels(listed, advance)
        parts = []
        with evaluation_mode(self.model):
            for part in samples.split(EMBEDDING_BATCH):
                given = part.to(self.model.device)
                if self.pictures is not None:
                    given = self.pictures.normalize(given)
                parts.append(self.model.embed(given))
        return torch.cat(parts)

    def tensors(self) -> dict[str, Tensor]:
        """Return the weights, as a file stores them; the memory is stored by its own name."""
        return {f"model.{name}": value for name, value in self.model.state_dict().items()}

    def facts(self) -> dict[str, Any]:
        """Return what a file must say besides its tensors."""
        known = self.known_thresholds or (self._found[0] if self._found else None)
        return {
            "name": self.name,
            "settings": settings_to_dict(self.model.settings),
            "num_features": self.model.num_features,
            "pictures": None if self.pictures is None else asdict(self.pictures),
            "encoder": self.identity._asdict(),
            "temperatures": self.temperatures,
            "thresholds": known and known.by_shot,
        }

    @staticmethod
    def restored(
        tensors: dict[str, Tensor],
        facts: dict[str, Any],
        source: Path,
        backbone: str | None,
        placement: Placement,
    ) -> "Pretrained":
        """Make again what :meth:`tensors` and :meth:`facts` describe, without its memory."""
        settings = settings_from_dict(facts["settings"], source)
        require_consent(source, settings, backbone)
        stored = facts["pictures"]
        pictures = None
        if stored is not None:
            constants = {name: tuple(stored[name]) for name in ("mean", "std")}
            pictures = PictureFormat(**(stored | constants))
        shape = (facts["num_features"],) if pictures is None else pictures.input_shape
        model = FewShotModel(settings, shape).place(placement)
        load_weights(model, strip_prefix(tensors, "model"), source)
        model.eval()
        found = facts.get("thresholds")
        known = found and Thresholds.of(found)
        restored = Pretrained(facts["name"], model, None, pictures, facts["temperatures"], known)
        own, named = restored.identity, EncoderIdentity(**facts["encoder"])
        if own.fingerprint != named.fingerprint:
            raise RunError(f"{source} says that its encoder is {named}, but it holds {own}")
        return restored


def open_pretrained(
    source: str | Path,
    memory: str | Path | None = None,
    backbone: str | None = None,
    placement: Placement = ON_CPU,
) -> Pretrained:
    """Open a trained model for use; the only place that knows where trained models are found.

    Args:
        source: a run directory, or the name of a shipped model.
        memory: a memory file in place of the model's own.
        backbone: the run's own code ``module:attribute``, named again to allow that it is imported.
        placement: where to compute.
    """
    path = find_run(source)
    if path.is_file():
        raise RunError(
            f"model: {source} is a file; open a saved classifier with FewShotClassifier.load, or "
            "name a run directory"
        )
    if not RunDirectory(path).exists():
        raise RunError(f"model: {source} is not a run directory; make one with vsm train")
    model, remembered, facts = load_model(path, backbone=backbone, placement=placement)
    own = None if remembered is None else replace(read_memory(path), memory=remembered)
    opened = Pretrained(
        str(source),
        model,
        own,
        PictureFormat.from_facts(facts),
        temperatures=facts["temperatures"],
        find_thresholds=partial(_on_validation, facts["data"]),
    )
    if own is None or own.is_whole:
        known = Thresholds.read(path, opened.identity.fingerprint)
        opened = replace(opened, known_thresholds=known)
    return opened if memory is None else opened.with_memory(read_memory(Path(memory)), memory)


def _on_validation(data: str, used: Pretrained) -> Thresholds:
    memory = None
    if used.memory is not None:  # what people added counts neither for nor against a picture
        memory = used.memory.without(sorted(used.memory.added)).memory
    return calibrate_on_validation(used.model, memory, open_dataset(data))


def from_parts(
    model: FewShotModel,
    memory: Memory | None,
    names: tuple[str, ...],
    thresholds: Thresholds | None = None,
) -> Pretrained:
    """Make a pre-trained model over features out of a model and the memory it was given."""
    named = None
    if memory is not None:
        named = trained_memory(model.settings, model.state_dict(), memory, names, 0)
    return Pretrained(model.settings.data, model.eval(), named, None, None, thresholds)
