"""What OCR does to the text of a drawing: boxes side by side on a line, confused shapes, lost blanks.

Each kind of damage is one that a real page shows. The text in must be clean: one box per block.
"""

import re
from random import Random

_ROW = 3  # boxes that a line of the page may cut through


def read_by_ocr(text: str, random: Random) -> str:
    """`text` as OCR would give it back."""
    blocks = _side_by_side(text.rstrip("\n").split("\n\n"), random)
    return (
        "\n\n".join("\n".join(_misread(line, random) for line in block.split("\n")) for block in blocks)
        + "\n"
    )


def _side_by_side(blocks: list[str], random: Random) -> list[str]:
    """Runs of neighbouring tensors drawn in one row: their lines are read across."""
    rows: list[list[str]] = []
    for block in blocks:
        fits = rows and _is_tensor(block) and _is_tensor(rows[-1][-1]) and len(rows[-1]) < _ROW
        if fits and random.random() < 0.7:
            rows[-1].append(block)
        else:
            rows.append([block])
    return ["\n".join(map(" ".join, zip(*(block.split("\n") for block in row), strict=True))) for row in rows]


def _is_tensor(block: str) -> bool:
    return "\ndim=" in block


def _misread(line: str, random: Random) -> str:
    if line.endswith(".set_zero"):
        return _torn(line, random)
    line = re.sub(r"\b(?:update_)?L\d+\.\S+|classifier\.\S+", lambda m: _confused(m[0], random), line)
    line = re.sub(r"(?<=dim=\[)[^]]*", lambda m: _run_together(m[0], random), line)
    line = re.sub(r"(?<=array\(\[)[^]]*", lambda m: _lost_blanks(_confused(m[0], random), random), line)
    return _without_head(line, random) if "->" in line else line


def _confused(text: str, random: Random) -> str:
    """O for 0 and l for 1, now and then."""
    shapes = {"0": "O", "1": "l"}
    return "".join(shapes.get(char, char) if random.random() < 0.3 else char for char in text)


def _run_together(dims: str, random: Random) -> str:
    """Digits of neighbouring sizes without the blank between them."""
    return "".join(char for char in dims if char != " " or random.random() > 0.15)


def _lost_blanks(numbers: str, random: Random) -> str:
    return "".join(char for char in numbers if char != " " or random.random() > 0.3)


def _torn(name: str, random: Random) -> str:
    """The name in an ellipse: whole, with blanks for dots, without its layer, or with its ends unreadable."""
    choice = random.randrange(4 if name.startswith("L") else 2)
    if choice == 0:
        return _confused(name, random)
    if choice == 1:
        return name.replace("_", " ").replace(".grad.", " grad ")
    if choice == 2:
        return name[name.index(".") :].replace("set_zero", "set zero")
    return f"<:::::::§§{name[name.index('.') :].removesuffix('ro')}%§:::::::>"


def _without_head(line: str, random: Random) -> str:
    """Labels that lost the first character or two: `utput->`, `>input`."""
    words = (word[1:] if random.random() < 0.1 and len(word) > 5 else word for word in line.split())
    return " ".join(words)
