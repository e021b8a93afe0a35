"""A data set with careless randomness, whose samples and batches test_keyed.py and test_loading.py make."""

import random

import numpy as np
import torch

from samewise.runner.errors import DataError, Problem


class Noisy:
    """Draws from all three generators for each sample, as careless data sets do."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 63:
            raise DataError(Problem("sample 63", "is broken"))
        return {"value": torch.tensor([index, random.random(), np.random.rand(), torch.rand(()).item(), torch.get_num_threads()], dtype=torch.float64)}


class Batches(Noisy):
    """Makes whole batches, with noise."""

    def batch(self, indices):
        return {"value": torch.tensor(indices) + torch.rand(len(indices)) + random.random() + np.random.rand()}
