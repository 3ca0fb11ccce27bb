"""The images of "How the memory works": python -m website.plots [FOLDER].

They show what the shipped model of glyphs computes.
"""

import io
import sys
from pathlib import Path

import matplotlib as mpl
from PIL import Image

import vsm
from vsm.data import ImageDataset
from vsm.evaluation.evaluator import EpisodeProtocol
from vsm_lab.episode_plots import memory_figures, recall_sheet
from vsm_lab.measures import look_at_episodes

FOLDER = Path(__file__).parents[1] / "docs" / "images"
EPISODE = 3  # of the list that evaluation uses
EPISODES = 1000
NUM_COLORS = 64  # of a PNG


def main(folder: Path = FOLDER) -> None:
    """Draw all images as small PNGs."""
    protocol = EpisodeProtocol("glyphs", "test", 5, shot=1, queries=15, episodes=EPISODES, seed=0)
    run = vsm.load("glyphs-5w1s").on(protocol)
    measured, dataset, memory = run.measure(protocol), run.dataset, run.trained.memory
    assert isinstance(dataset, ImageDataset)
    assert memory is not None
    *_, episode = look_at_episodes(measured, dataset, EPISODE + 1, queries=1)
    ids = {name: number for number, name in enumerate(dataset.class_names)}
    recall = recall_sheet(episode, dataset, [ids[name] for name in memory.names])
    figures = {"recall": recall, **memory_figures(measured, dataset, (1, 5))}
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        buffer = io.BytesIO()
        with mpl.rc_context({"savefig.facecolor": "white"}):
            figure.savefig(buffer, format="png", dpi=90)
        image = Image.open(buffer).convert("RGB").quantize(NUM_COLORS)
        image.save(folder / f"memory-{name}.png", optimize=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
