"""A sweep's report in MLflow: a run with page and tables as artifacts, in an experiment beside that of the runs, whose charts stay theirs. Imports mlflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow.exceptions import MlflowException

from samewise.runner.tracking.address import checked
from samewise.runner.tracking.store import artifact_location, open_client

_TAG = "samewise.report_of"


def log_report(sweep: str, files: Sequence[Path], settings: Mapping[str, Any]) -> str:
    """Log the files of a sweep's report; a later report of the same sweep takes the place of an earlier one.

    Args:
        sweep: The sweep's id.
        files: The page and the tables.
        settings: The sweep's `tracking`.

    Returns:
        The MLflow run's id.

    Raises:
        Exception: whatever the client raises when the store cannot be reached.
    """
    uri = checked(str(settings["uri"]))
    client = open_client(uri)
    name = f"{settings['experiment']} reports"
    known = client.get_experiment_by_name(name)
    if known is None:
        try:
            experiment = client.create_experiment(name, artifact_location(uri, settings.get("artifact_location")))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            known = client.get_experiment_by_name(name)  # another process was faster
            assert known is not None
            experiment = known.experiment_id
    else:
        experiment = known.experiment_id
    found = client.search_runs([experiment], f"tags.`{_TAG}` = '{sweep}'", max_results=1)
    run = found[0] if found else client.create_run(experiment, tags={_TAG: sweep, "sweep": sweep}, run_name=sweep)
    for file in files:
        client.log_artifact(run.info.run_id, str(file))
    client.set_terminated(run.info.run_id, "FINISHED")
    return run.info.run_id
