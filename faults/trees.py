"""Strange folders: links in circles, deep nesting, hostile names."""

import os
import shutil
from pathlib import Path
from random import Random

from faults.mutations import Mutation

NAMES = (
    b"\x1b[31mred\x1b[0m\x07",
    b"<script>alert(1)</script>".replace(b"/", b"-"),
    b"=cmd|' -C calc'!A0",
    b"@SUM(1)",
    b"-rf",
    b"caf\xe9",
    b"\xff\xfe",
    b"a\nb",
    b"a\tb",
    b"\xe2\x80\xae",
    b"..png",
    b"x" * 250,
    b"[bold]name[/bold]".replace(b"/", b"-"),
    b"{seed}",
    b"%s%n",
)
DEPTH = 900


def in_folder(path: Path, random: Random) -> Mutation:
    """Change the folder of examples at ``path``."""
    change = random.choice([_rename, _rename, _rename_picture, _loop, _nest, _empty, _odd_files])
    return Mutation(change(path, random), may_differ=True)


def _rename(path: Path, random: Random) -> str:
    folder, name = random.choice(sorted(path.iterdir())), random.choice(NAMES)
    os.rename(os.fsencode(folder), os.path.join(os.fsencode(path), name))  # noqa: PTH104, PTH118 - bytes
    return f"class {name!r}"


def _rename_picture(path: Path, random: Random) -> str:
    file, name = random.choice(sorted(path.glob("*/*"))), random.choice(NAMES)[:200] + b".png"
    os.rename(os.fsencode(file), os.path.join(os.fsencode(file.parent), name))  # noqa: PTH104, PTH118 - bytes
    return f"picture {name!r}"


def _loop(path: Path, random: Random) -> str:
    folder = random.choice(sorted(path.iterdir()))
    (folder / "again").symlink_to(random.choice([path, folder, Path("again")]))
    (path / "again").symlink_to(random.choice([path.parent, path, folder]))
    return "links in circles"


def _nest(path: Path, random: Random) -> str:
    inside = random.choice(sorted(path.iterdir()))
    picture = next(inside.iterdir())
    here = os.getcwd()  # noqa: PTH109 - the path grows longer than a path may be
    try:
        os.chdir(inside)
        for _ in range(DEPTH):
            os.mkdir("d")  # noqa: PTH102 - as above
            os.chdir("d")
        shutil.copy(picture, "deep.png")
    finally:
        os.chdir(here)
    return f"{DEPTH} nested folders"


def _empty(path: Path, random: Random) -> str:
    folder = random.choice(sorted(path.iterdir()))
    shutil.rmtree(folder)
    if random.random() < 0.5:
        folder.mkdir()
    return f"{folder.name} is empty or gone"


def _odd_files(path: Path, random: Random) -> str:
    folder = random.choice(sorted(path.iterdir()))
    kind = random.choice(["pipe", "large", "folder", "text"])
    odd = folder / "odd.png"
    if kind == "pipe":
        os.mkfifo(odd)
    elif kind == "folder":
        odd.mkdir()
    else:
        odd.write_text("no picture")
    if kind == "large":
        os.truncate(odd, 6 << 30)
    return f"a {kind} among the pictures"
