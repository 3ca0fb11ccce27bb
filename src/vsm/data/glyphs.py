"""Glyphs: handwriting of alphabets that do not exist, drawn from a seed.

An alphabet owns a few stroke primitives and a style; a character composes one to four of those
primitives; a drawing is a character seen through motor noise; ink is a drawing on a 28×28 grid.
The file reads in that order. Lengths are in units of a character's height, y points down.
"""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vsm.data import prepared
from vsm.data.dataset import (
    SPLITS,
    ClassLists,
    ImageDataset,
    PixelNormalization,
    Pixels,
    Split,
    all_classes,
)
from vsm.seeding import derive_seed

Floats = npt.NDArray[np.float64]

GENERATOR_VERSION = 1  # raise with any change to the pixels, so that old caches are not read
SEED = 0  # the seed of the dataset that is called glyphs
NORMALIZATION = PixelNormalization(mean=(0.1141,), std=(0.2666,))  # of the train pixels

# What there is.
NUM_ALPHABETS: dict[Split, int] = {"train": 28, "validation": 6, "test": 10}
NUM_CHARACTERS = (18, 30)  # fewest and most characters of an alphabet
NUM_DRAWINGS = 20  # of every character
NUM_CONTROLS = 7  # control points of a stroke, which its curve passes through
NUM_SAMPLES = 48  # points at which a stroke's curve is inked

# The kinds of strokes: by how many degrees the pen turns between its six equal steps.
TURNS: dict[str, tuple[int, int, int, int, int]] = {
    "line": (0, 0, 0, 0, 0),
    "bow": (14, 14, 14, 14, 14),
    "arc": (38, 38, 38, 38, 38),
    "bowl": (50, 50, 50, 50, 50),
    "loop": (60, 60, 60, 60, 60),
    "hook": (0, 0, 10, 75, 75),
    "cane": (75, 70, 25, 0, 0),
    "wave": (70, 70, -10, -70, -70),
    "corner": (0, 0, 105, 0, 0),
    "zigzag": (0, 125, 0, -125, 0),
    "curl": (15, 30, 60, 85, 95),
    "twist": (10, 85, 95, 85, 10),
    "flick": (50, 60, 60, -80, -10),
    "cusp": (75, 75, -160, 75, 75),
}

# What alphabets differ in.
NUM_PRIMITIVES = (5, 8)  # fewest and most primitives
BEND = 0.15  # relative standard deviation of a primitive's turns about its kind's
HEADINGS = (0, 45, 90, 90, 135)  # degrees at which a primitive sets off; 90 is downwards
SIZES = (0.6, 0.8, 1.0)  # of strokes after the first
STROKE_COUNTS = (0.8, 2.4, 1.5, 0.4)  # Dirichlet weights of 1, 2, 3 and 4 strokes
LAYOUTS = (5.0, 1.0, 1.0)  # Dirichlet weights of strokes joined, strokes beside, and marks
ROUNDNESS = (0.25, 1.0)  # 0 draws polygons, 1 smooth curves
SLANT = 0.12  # standard deviation of an alphabet's own shear
ASPECT = 0.15  # standard deviation of an alphabet's log(width / height)
JOINTS = (0, NUM_CONTROLS // 2, NUM_CONTROLS - 1)  # control points where strokes join
PEN = (0.5, 0.65)  # thinnest and thickest pen of an alphabet, in pixels

# What makes characters legible and distinct.
GAP = 0.14  # space between strokes that stand beside each other
MARK = 0.16  # size of a dot or tick
CROWDED = 0.12  # points nearer than this to an older stroke are crowded
MAX_CROWDING = 0.25  # largest crowded fraction of a new stroke
LENGTH = (1.5, 4.2)  # shortest and longest pen path of a character
MAX_EXTENT = 1.5  # widest and highest that strokes may grow together before being shrunk to 1
ATTEMPTS = 5  # to find room for a stroke, before it is left out
MAX_SIMILARITY = 0.85  # largest cosine between two blurred characters of an alphabet
TIMEOUT = 0.001  # how far each refusal moves that limit to 1, so that a poor alphabet ends
BLUR = 1.8  # pen of that comparison, in pixels

# Motor noise: standard deviations, of one drawing unless it says otherwise.
SLOPPINESS = 0.25  # of log(noise level) between drawings
JITTER = 0.042  # of every control point, smooth along the stroke
JITTER_REACH = 1.2  # control points over which the jitter is smooth
SHIFT = 0.055  # of every stroke
STROKE_TURN = 0.13  # of every stroke, in radians
STROKE_SCALE = 0.1  # of every stroke's log(size)
TURN = 0.15  # in radians
SHEAR = 0.17
STRETCH = 0.15  # of log(size), for width and height alike
WOBBLE = 0.05  # amplitude of a smooth warp of the page
WOBBLE_FREQUENCY = 0.8  # most waves per character height
PEN_NOISE = 0.1  # of log(pen)
OFF_CENTER = 2.0  # largest shift along either axis, in pixels

# Paper and ink.
SIDE = 28  # pixels
HEIGHT = 19.5  # pixels to a character's height, before noise
MAX_HEIGHT = 21.0  # no drawing is larger, so none reaches the border
GAIN = 4.0  # how black a single pass of the pen is


class Alphabet(NamedTuple):
    """A style and its primitives."""

    primitives: Floats  # in all their turns [F, NUM_CONTROLS, 2]; centered, longer side is 1
    frequencies: Floats  # how often each is used [F]
    stroke_counts: Floats  # probabilities of one to four strokes [4]
    layouts: Floats  # probabilities that a stroke is joined, beside, or a mark [3]
    mark_side: int  # -1 if marks stand above, 1 if below
    basis: Floats  # takes control points to points of the curve [NUM_SAMPLES, NUM_CONTROLS]
    page: Floats  # shear and aspect of the alphabet, applied to row vectors [2, 2]
    pen: float  # standard deviation of the pen's profile in pixels


def _design_alphabet(random: np.random.Generator) -> Alphabet:
    """Draw a style: few kinds of strokes, used unequally, arranged in a preferred way."""
    kinds = np.array(list(TURNS.values()), dtype=float)
    chosen = random.permutation(kinds)[: random.integers(*NUM_PRIMITIVES, endpoint=True)]
    upright = np.stack([_primitive(turns, random) for turns in chosen])  # [num_primitives, M, 2]
    quarters = np.arange(0, 4, random.choice([1, 2, 4]))  # right angles it turns them by
    turned = upright @ _rotation(np.pi / 2 * quarters)[:, None]  # [Q, num_primitives, M, 2]
    frequencies = random.dirichlet(np.full(len(upright), 3.0)) / len(quarters)
    aspect = np.exp(0.5 * ASPECT * random.standard_normal())
    return Alphabet(
        primitives=turned.reshape(-1, NUM_CONTROLS, 2),
        frequencies=np.tile(frequencies, len(quarters)),
        stroke_counts=random.dirichlet(STROKE_COUNTS),
        layouts=random.dirichlet(LAYOUTS),
        mark_side=int(random.choice([-1, 1])),
        basis=_curve_basis(random.uniform(*ROUNDNESS)),
        page=np.array([[aspect, 0.0], [SLANT * random.standard_normal(), 1 / aspect]]),
        pen=random.uniform(*PEN),
    )


def _primitive(turns: Floats, random: np.random.Generator) -> Floats:
    """Walk six equal steps, turning by ``turns`` degrees ``[5]``; return points ``[M, 2]``."""
    bent = turns * (1 + BEND * random.standard_normal(len(turns)))
    headings = np.deg2rad(random.choice(HEADINGS) + np.concatenate([[0.0], np.cumsum(bent)]))
    steps = np.stack([np.cos(headings), np.sin(headings)], axis=-1)
    points = np.concatenate([np.zeros((1, 2)), np.cumsum(steps, axis=0)])
    if random.random() < 0.5:
        points[:, 0] *= -1
    low, high = points.min(axis=0), points.max(axis=0)
    return np.asarray((points - (low + high) / 2) / (high - low).max())


def _curve_basis(roundness: float) -> Floats:
    """Blend linear (0) and Catmull-Rom (1) interpolation into one matrix ``[P, M]``."""
    identity = np.eye(NUM_CONTROLS)
    ends = 2 * identity[[0, -1]] - identity[[1, -2]]
    knots = np.concatenate([ends[:1], identity, ends[1:]])  # [M + 2, M]
    time = np.linspace(0, NUM_CONTROLS - 1, NUM_SAMPLES)
    start = np.minimum(time.astype(int), NUM_CONTROLS - 2)
    before, left, right, after = (knots[start + offset] for offset in range(4))
    u = (time - start)[:, None]
    smooth = left + 0.5 * u * (
        (right - before)
        + u * (2 * before - 5 * left + 4 * right - after)
        + u**2 * (3 * (left - right) + after - before)
    )
    return np.asarray(roundness * smooth + (1 - roundness) * (left + u * (right - left)))


def _design_characters(alphabet: Alphabet, count: int, random: np.random.Generator) -> list[Floats]:
    """Compose ``count`` characters ``[S, M, 2]`` that differ from each other."""
    characters: list[Floats] = []
    looks = np.zeros((count, SIDE * SIDE))
    limit = MAX_SIMILARITY
    while len(characters) < count:
        character = _compose(alphabet, random)
        length = np.sqrt((np.diff(character, axis=1) ** 2).sum(axis=-1)).sum()
        if not LENGTH[0] <= length <= LENGTH[1]:  # too little to see, or too much for the pixels
            continue
        look = _look(alphabet, character)
        if (looks @ look).max() < limit:
            looks[len(characters)] = look
            characters.append(character)
        else:
            limit += TIMEOUT * (1 - limit)
    return characters


def _compose(alphabet: Alphabet, random: np.random.Generator) -> Floats:
    """Put one to four strokes together as far as there is room; ``[S, M, 2]``, centered."""
    strokes = random.choice(alphabet.primitives, 1, p=alphabet.frequencies)  # [1, M, 2]
    for _ in range(random.choice(len(STROKE_COUNTS), p=alphabet.stroke_counts)):
        attempts = (_place(alphabet, strokes, random) for _ in range(ATTEMPTS))
        fitting = (stroke for stroke in attempts if _has_room(alphabet, strokes, stroke))
        if (stroke := next(fitting, None)) is not None:
            strokes = np.concatenate([strokes, stroke[None]])
    low, high = strokes.min(axis=(0, 1)), strokes.max(axis=(0, 1))
    return np.asarray((strokes - (low + high) / 2) / max((high - low).max(), 1.0))


def _place(alphabet: Alphabet, strokes: Floats, random: np.random.Generator) -> Floats:
    """Add a stroke to ``strokes`` ``[S, M, 2]``: joined, beside, or as a mark; ``[M, 2]``."""
    stroke = random.choice(alphabet.primitives, p=alphabet.frequencies)
    stroke = stroke * SIZES[random.integers(len(SIZES))]
    low, high = strokes.min(axis=(0, 1)), strokes.max(axis=(0, 1))
    layout = ("joined", "beside", "mark")[random.choice(3, p=alphabet.layouts)]
    if layout == "joined":
        anchor = strokes[random.integers(len(strokes)), JOINTS[random.integers(len(JOINTS))]]
        return np.asarray(stroke + anchor - stroke[JOINTS[random.integers(len(JOINTS))]])
    center = (low + high) / 2
    if layout == "beside":
        axis = random.integers(2)
        center[axis] = high[axis] + GAP - stroke[:, axis].min()
        return np.asarray(stroke + center)
    center[0] = random.uniform(low[0], high[0])
    center[1] = high[1] + GAP if alphabet.mark_side > 0 else low[1] - GAP
    return np.asarray(center + stroke * MARK / np.ptp(stroke, axis=0).max())


def _has_room(alphabet: Alphabet, strokes: Floats, stroke: Floats) -> bool:
    """Whether ``stroke`` ``[M, 2]`` stays near ``strokes`` without running along them."""
    together = np.concatenate([*strokes, stroke])
    if np.ptp(together, axis=0).max() > MAX_EXTENT:
        return False
    old = (alphabet.basis @ strokes).reshape(-1, 1, 2)
    new = alphabet.basis[:: NUM_SAMPLES // 12] @ stroke  # every fourth point tells enough
    distance = np.sqrt(((old - new) ** 2).sum(axis=-1))  # [S * P, 12]
    return bool((distance.min(axis=0) < CROWDED).mean() <= MAX_CROWDING)


def _look(alphabet: Alphabet, character: Floats) -> Floats:
    """Return the blurred, noiseless image of a character as a unit vector ``[SIDE²]``."""
    curves = (alphabet.basis @ character @ alphabet.page)[None]
    image = _ink(_fit(curves), np.array([BLUR])).ravel()
    return np.asarray(image / np.linalg.norm(image))


def _rotation(angle: Floats) -> Floats:
    """Return matrices ``[*angle.shape, 2, 2]`` that turn row vectors by ``angle`` radians."""
    cosine, sine = np.cos(angle), np.sin(angle)
    return np.stack([np.stack([cosine, sine], -1), np.stack([-sine, cosine], -1)], -2)


def _draw(alphabet: Alphabet, character: Floats, random: np.random.Generator) -> Floats:
    """Draw a character ``[S, M, 2]`` with motor noise: curves ``[NUM_DRAWINGS, S, P, 2]``."""
    num_strokes = len(character)
    sloppiness = np.exp(SLOPPINESS * random.standard_normal(NUM_DRAWINGS))

    def noise(*shape: int) -> Floats:
        level = sloppiness.reshape(-1, *[1] * len(shape))
        return np.asarray(level * random.standard_normal((NUM_DRAWINGS, *shape)))

    middle = character.mean(axis=1, keepdims=True)
    scale = np.exp(STROKE_SCALE * noise(num_strokes, 1, 1))
    strokes = (character - middle) @ _rotation(STROKE_TURN * noise(num_strokes)) * scale
    strokes += middle + SHIFT * noise(num_strokes, 1, 2)
    apart = np.subtract.outer(np.arange(NUM_CONTROLS), np.arange(NUM_CONTROLS))
    smoothing = np.exp(-0.5 * (apart / JITTER_REACH) ** 2)  # correlates neighboring points [M, M]
    smoothing /= np.linalg.norm(smoothing, axis=1, keepdims=True)
    strokes += JITTER * smoothing @ noise(num_strokes, NUM_CONTROLS, 2)
    curves = alphabet.basis @ strokes
    # Bend the page by one slow wave along each axis.
    amplitudes = noise(2)[:, None, None]
    frequency = 2 * np.pi * WOBBLE_FREQUENCY * random.uniform(-1, 1, (NUM_DRAWINGS, 1, 2, 2))
    phase = random.uniform(0, 2 * np.pi, (NUM_DRAWINGS, 1, 1, 2))
    curves = curves + WOBBLE * amplitudes * np.sin(curves @ frequency + phase)
    hand = np.exp(STRETCH * noise(2, 1)) * _rotation(TURN * noise())  # [NUM_DRAWINGS, 2, 2]
    hand[:, 1] += SHEAR * noise(1) * hand[:, 0]
    return np.asarray(curves @ (alphabet.page @ hand)[:, None])


def _fit(curves: Floats) -> Floats:
    """Center curves ``[B, S, P, 2]`` on the paper, shrunk where too large, in pixels."""
    low = curves.min(axis=(1, 2), keepdims=True)
    high = curves.max(axis=(1, 2), keepdims=True)
    extent = (high - low).max(axis=-1, keepdims=True)
    scale = np.minimum(HEIGHT, MAX_HEIGHT / extent)
    return np.asarray((curves - (low + high) / 2) * scale + (SIDE - 1) / 2)


def _ink(points: Floats, pen: Floats) -> npt.NDArray[np.float32]:
    """Ink curves ``[B, S, P, 2]``, in pixels, with Gaussian pens ``[B]``; ``[B, H, W]`` in [0, 1].

    A Gaussian is a product of one in x and one in y, so summing them over all points of all
    strokes is a matrix product. Every point carries ink for the piece of path it stands for.
    """
    width = pen.astype(np.float32)[:, None, None]
    pieces = np.diff(points.astype(np.float32), axis=2)
    middles = points[:, :, :-1].astype(np.float32) + pieces / 2  # [B, S, P - 1, 2]
    path = np.sqrt((pieces**2).sum(axis=-1)).reshape(len(points), -1, 1)  # [B, S * (P - 1), 1]
    x, y = np.moveaxis(middles.reshape(len(points), -1, 2, 1), 2, 0)  # [B, S * (P - 1), 1] each
    pixels = np.arange(SIDE, dtype=np.float32)
    across = np.exp(-0.5 * ((x - pixels) / width) ** 2)  # [B, S * (P - 1), W]
    down = np.exp(-0.5 * ((y - pixels) / width) ** 2) * path  # [B, S * (P - 1), H]
    density = down.swapaxes(1, 2) @ across / (2 * np.pi * width**2)  # [B, H, W]
    return np.asarray(1 - np.exp(-GAIN * density))


def draw_alphabet(seed: int, number: int) -> Pixels:
    """Draw all of alphabet ``number``: uint8 ``[num_characters, NUM_DRAWINGS, H, W, 1]``."""
    design, motor = (
        np.random.Generator(np.random.PCG64(derive_seed(seed, "glyphs", purpose, number)))
        for purpose in ("alphabet", "drawings")
    )
    alphabet = _design_alphabet(design)
    num_characters = int(design.integers(*NUM_CHARACTERS, endpoint=True))
    drawings = []
    for character in _design_characters(alphabet, num_characters, design):
        points = _fit(_draw(alphabet, character, motor))
        points += motor.uniform(-OFF_CENTER, OFF_CENTER, (NUM_DRAWINGS, 1, 1, 2))
        pen = alphabet.pen * np.exp(PEN_NOISE * motor.standard_normal(NUM_DRAWINGS))
        drawings.append(np.rint(255 * _ink(points, pen)[..., None]).astype(np.uint8))
    return np.stack(drawings)


def open_glyphs() -> ImageDataset:
    """Open glyphs from the cache; draw and cache it first if it is not there."""
    cached = f"glyphs-v{GENERATOR_VERSION}-{prepared.FORMAT}"
    if not prepared.is_prepared(cached):
        prepared.write(cached, _draw_all(), NORMALIZATION)
    return replace(prepared.read(cached), name="glyphs")


def _draw_all() -> prepared.Preparation:
    """Draw every alphabet of every split; train alphabets come first, test alphabets last."""
    images: list[Pixels] = []
    lists: ClassLists = {split: [] for split in SPLITS}
    alphabets = [split for split in SPLITS for _ in range(NUM_ALPHABETS[split])]
    for number, split in enumerate(alphabets):
        drawings = draw_alphabet(SEED, number)
        images.append(drawings.reshape(-1, SIDE, SIDE, 1))
        lists[split] += [f"alphabet{number:02}/character{n:02}" for n in range(len(drawings))]
    sizes = dict.fromkeys(all_classes(lists), NUM_DRAWINGS)
    origin = f"drawn by vsm.data.glyphs, generator version {GENERATOR_VERSION}, seed {SEED}"
    return prepared.Preparation((SIDE, SIDE, 1), lists, sizes, images, origin)
