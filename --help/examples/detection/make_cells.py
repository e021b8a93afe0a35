"""Draws 80 images of round and long cells, with their boxes in COCO's format."""

import json
import math
import random
from pathlib import Path

from PIL import Image, ImageDraw, ImageFilter

KINDS = {"round": (9, 9), "long": (18, 7)}  # half of the length and of the width, in pixels
SIZE = 96

draw = random.Random(0)
folder = Path("cells/images")
folder.mkdir(parents=True, exist_ok=True)
images, annotations = [], []
for number in range(80):
    image = Image.new("RGB", (SIZE, SIZE), (225, 215, 225))
    for place in draw.sample(range(4), draw.randrange(1, 4)):  # in different quarters of the image
        category, (kind, (length, width)) = draw.choice(list(enumerate(KINDS.items(), 1)))
        x, y = (24 + 48 * quarter + draw.uniform(-4, 4) for quarter in divmod(place, 2))
        turn, scale = draw.uniform(0, math.pi), draw.uniform(0.8, 1.1)
        outline = []
        for step in range(40):
            angle = math.tau * step / 40
            along, across = scale * length * math.cos(angle), scale * width * math.sin(angle)
            outline.append(
                (
                    x + along * math.cos(turn) - across * math.sin(turn),
                    y + along * math.sin(turn) + across * math.cos(turn),
                )
            )
        colour = tuple(level + draw.randrange(-20, 20) for level in (170, 90, 140))
        ImageDraw.Draw(image).polygon(outline, fill=colour)
        left, top = (min(point[axis] for point in outline) for axis in (0, 1))
        right, bottom = (max(point[axis] for point in outline) for axis in (0, 1))
        annotations.append(
            {
                "id": len(annotations) + 1,
                "image_id": number,
                "category_id": category,
                "bbox": [left, top, right - left, bottom - top],
                "area": (right - left) * (bottom - top),
                "iscrowd": 0,
            }
        )
    image.filter(ImageFilter.GaussianBlur(1)).save(folder / f"{number:03}.png")
    images.append({"id": number, "file_name": f"{number:03}.png", "width": SIZE, "height": SIZE})
categories = [{"id": number, "name": kind} for number, kind in enumerate(KINDS, 1)]
found = {"images": images, "annotations": annotations, "categories": categories}
Path("cells/annotations.json").write_text(json.dumps(found))
print(f"cells: {len(images)} images, {len(annotations)} boxes")
