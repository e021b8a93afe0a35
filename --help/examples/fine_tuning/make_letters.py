"""Draws the letters A to J in the fonts that matplotlib ships, 8x8 pixels each, in folders."""

from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

WITH_LETTERS = ("DejaVu", "STIXGeneral", "cmr", "cmb", "cmss", "cmtt")

files = sorted(Path(matplotlib.get_data_path(), "fonts", "ttf").glob("*.ttf"))
fonts = [file for file in files if file.name.startswith(WITH_LETTERS)]
for letter in "ABCDEFGHIJ":
    folder = Path("letters", letter)
    folder.mkdir(parents=True, exist_ok=True)
    for font in fonts:
        image = Image.new("L", (96, 96))
        drawing = ImageDraw.Draw(image)
        drawing.text((48, 48), letter, fill=255, font=ImageFont.truetype(font, 80), anchor="mm")
        small = image.crop(image.getbbox()).resize((8, 8), Image.Resampling.BOX)
        small.save(folder / f"{font.stem}.png")
print(f"letters: 10 letters in {len(fonts)} fonts")
