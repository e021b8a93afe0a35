"""The smallest training that most tests need: some steps on handwritten digits, recorded in the run's folder and nowhere else."""

QUIET = ["debug=tiny", "tracking=none", "evaluate.pictures=false", "callbacks=none"]
DIGITS = ["experiment=resnet18_digits", *QUIET]
