"""Cuts the two photographs that scikit-learn ships into tiles, and keeps them in tiles.npz."""

import numpy
from sklearn.datasets import load_sample_images

SIZE = 32

photographs = load_sample_images()
images, labels, columns = [], [], []
for label, photograph in enumerate(photographs.images):
    for top in range(0, photograph.shape[0] - SIZE + 1, SIZE):
        for left in range(0, photograph.shape[1] - SIZE + 1, SIZE):
            images.append(photograph[top : top + SIZE, left : left + SIZE].transpose(2, 0, 1))
            labels.append(label)
            columns.append(left // SIZE)
numpy.savez("tiles.npz", images=numpy.stack(images), labels=labels, columns=columns)
print(f"tiles.npz: {len(images)} tiles of {SIZE}x{SIZE} pixels")
