"""Keys 400 words in Morse code as recordings, and lists them with their transcripts."""

import csv
import random
import wave
from pathlib import Path

import numpy

RATE = 8000
CODE = {"a": ".-", "e": ".", "i": "..", "m": "--", "n": "-.", "o": "---", "s": "...", "t": "-"}

draw, noise = random.Random(0), numpy.random.default_rng(0)
Path("morse").mkdir(exist_ok=True)
rows = []
for number in range(400):
    word = "".join(draw.choices(list(CODE), k=draw.randrange(2, 5)))
    pitch, unit = draw.uniform(500, 900), int(RATE * draw.uniform(0.025, 0.035))
    levels = [0] * unit
    for letter in word:
        for sign in CODE[letter]:
            levels += [1] * (unit if sign == "." else 3 * unit) + [0] * unit
        levels += [0] * (2 * unit)
    tone = numpy.sin(2 * numpy.pi * pitch * numpy.arange(len(levels)) / RATE)
    samples = 0.4 * numpy.array(levels) * tone + noise.normal(0, 0.02, len(levels))
    with wave.open(f"morse/{number:03}.wav", "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes((32767 * samples).astype("<i2").tobytes())
    rows.append((f"morse/{number:03}.wav", word))
for name, part in (("train", rows[:320]), ("valid", rows[320:])):
    with open(f"{name}.csv", "w", newline="") as file:
        csv.writer(file).writerows([("audio", "text"), *part])
print("train.csv, valid.csv: 320 and 80 recordings")
