"""Every kind of image becomes one size and color; bad ones are named."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_layouts import color_image, encoded
from vsm.data.images import (
    ImageFormat,
    Preprocessing,
    decode,
    decode_all,
    form_image,
    is_image_name,
    read_header,
    refuse_bombs,
)
from vsm.errors import DataError

COLOR = ImageFormat(side=8, channels=3)
GRAY = ImageFormat(side=8, channels=1)


def saved(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_an_image_of_the_right_size_comes_through_unchanged() -> None:
    image = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    assert np.array_equal(decode(encoded(image), "x.png", COLOR), image)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM"])
def test_every_format_and_size_is_brought_to_one_size(kind: str) -> None:
    image = np.full((200, 300, 3), (200, 100, 50), dtype=np.uint8)
    decoded = decode(encoded(image, kind), "x", COLOR)
    assert decoded.shape == (8, 8, 3)
    assert np.abs(decoded.astype(int) - (200, 100, 50)).max() <= 6


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_every_mode_becomes_gray_or_color(mode: str) -> None:
    white = Image.new(mode, (16, 16), {"I;16": 65535, "CMYK": 0}.get(mode, "white"))
    data = saved(white, "TIFF")
    assert decode(data, "x", GRAY).min() >= 250
    assert decode(data, "x", COLOR).min() >= 250


def test_sixteen_bits_are_scaled_and_not_clipped() -> None:
    image = Image.fromarray(np.full((8, 8), 257 * 100, dtype=np.uint16))
    assert np.unique(decode(saved(image), "x", GRAY)).tolist() == [100]


def test_transparent_parts_are_white() -> None:
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    palette = Image.new("P", (8, 8), 0)
    for data in (saved(clear), saved(clear.convert("LA")), saved(palette, transparency=0)):
        assert decode(data, "x", COLOR).min() == 255


def test_ink_is_high_and_paper_is_zero() -> None:
    drawing = Image.new("1", (105, 105), 1)
    drawing.paste(0, (0, 0, 52, 105))
    decoded = decode(saved(drawing), "x", ImageFormat(side=28, channels=1, ink=True))
    assert decoded[:, :12].min() >= 250
    assert decoded[:, 16:].max() <= 5


@pytest.mark.parametrize("ink", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
def test_many_arrays_become_what_images_of_them_do(channels: int, ink: bool) -> None:
    form = Preprocessing(28, channels, ink, mean=(0.0,), std=(1.0,))
    shape = (28, 28) if channels == 1 else (28, 28, 3)
    random = np.random.default_rng(0)
    pixels = [random.integers(top // 4, top, shape, np.uint8) for top in (100, 256, 180)]
    expected = [form_image(Image.fromarray(one), "x", form) for one in pixels]
    found = form.pixels(pixels).permute(0, 2, 3, 1).numpy()
    np.testing.assert_array_equal(found, np.stack(expected))


def test_photographs_are_turned_upright() -> None:
    image = Image.fromarray(np.zeros((8, 8, 3), dtype=np.uint8))
    image.paste((255, 255, 255), (0, 0, 8, 2))  # white on top
    exif = Image.Exif()
    exif[0x0112] = 3  # taken upside down
    data = saved(image, exif=exif)
    upright = decode(data, "x", COLOR)
    assert upright[-1].min() == 255
    assert upright[0].max() == 0


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"])
@pytest.mark.parametrize("kept", [0.0, 0.05, 0.5, 0.9])
def test_a_truncated_image_is_named(kind: str, kept: float) -> None:
    image = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = encoded(image, kind)
    with pytest.raises(
        DataError, match=r"^cut\.png: unreadable or truncated image .*replace or remove"
    ):
        decode(data[: int(kept * len(data))], "cut.png", COLOR)


def test_a_text_file_is_not_an_image() -> None:
    with pytest.raises(DataError, match=r"^notes\.png: unreadable"):
        decode(b"These are notes.", "notes.png", COLOR)


def test_formats_that_could_run_programs_are_not_images() -> None:
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
    with pytest.raises(DataError, match=r"^drawing\.png: unreadable"):
        decode(script, "drawing.png", COLOR)


@pytest.mark.parametrize("limit", [3000, 100])  # where Pillow warns, and where it refuses itself
def test_a_decompression_bomb_is_refused_by_name(
    limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    data = encoded(color_image(0, 64))
    (tmp_path / "huge.png").write_bytes(data)
    with (
        pytest.raises(DataError, match=r"huge\.png: refused as a decompression bomb"),
        refuse_bombs(),
    ):
        read_header(tmp_path / "huge.png", "huge.png")
    with pytest.raises(DataError, match=r"huge\.png: refused as a decompression bomb"):
        list(decode_all(["huge.png"], lambda _: data, COLOR, label=str))


def test_many_images_keep_their_order() -> None:
    batches = list(decode_all(range(600), lambda i: encoded(color_image(i, 8)), COLOR, label=str))
    assert np.concatenate(batches)[:, 0, 0, 0].tolist() == [i % 256 for i in range(600)]


def test_one_bad_image_among_many_is_named() -> None:
    def read(number: int) -> bytes:
        return b"" if number == 300 else encoded(color_image(number, 8))

    with pytest.raises(DataError, match=r"^image 300: unreadable"):
        list(decode_all(range(400), read, COLOR, label=lambda number: f"image {number}"))


def test_headers_tell_gray_from_color(tmp_path: Path) -> None:
    (tmp_path / "gray.png").write_bytes(encoded(np.zeros((5, 7), dtype=np.uint8)))
    (tmp_path / "color.png").write_bytes(encoded(np.zeros((5, 7, 3), dtype=np.uint8)))
    assert read_header(tmp_path / "gray.png", "gray.png") == (True, 5, 7)
    assert read_header(tmp_path / "color.png", "color.png") == (False, 5, 7)


def test_litter_is_not_taken_for_images() -> None:
    assert is_image_name("a/b.JPEG")
    assert not is_image_name("a/b.txt")
    assert not is_image_name("a/._b.png")
    assert not is_image_name("__MACOSX/a/b.png")
