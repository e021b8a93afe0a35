"""The diabetes data in scikit-learn: 442 patients, ten measurements, without a download."""

from typing import Literal, final

import numpy as np
import torch

from samewise.datasets.digits import scikit_learn_file
from samewise.datasets.parts.in_memory import NumberRows


@final
class Diabetes(NumberRows):
    """Samples `{"features": float32[10], "label": float32[1]}` of 442 patients.

    The features are age, sex, body mass index, blood pressure and six values of blood serum, as
    they were measured; the target is the progression of the disease within a year. Source: Efron,
    Hastie, Johnstone and Tibshirani 2004, Least Angle Regression,
    https://doi.org/10.1214/009053604000000067.

    Args:
        split: "train" or "valid".
        held_out: Number of patients, the last ones, that are for validation.
    """

    def __init__(self, *, split: Literal["train", "valid"], held_out: int = 20) -> None:
        rows = slice(-held_out, None) if split == "valid" else slice(-held_out)
        features, progression = (
            torch.from_numpy(np.loadtxt(scikit_learn_file(name), dtype=np.float32))[rows]
            for name in ("diabetes_data_raw.csv.gz", "diabetes_target.csv.gz")
        )
        super().__init__(["progression"], features=features, label=progression[:, None])
