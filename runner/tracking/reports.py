"""Logs a sweep's report, or a profile, as an MLflow run with files, in an experiment beside that of
the runs. Imports mlflow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow import MlflowClient

from samewise.runner.tracking.address import check_uri
from samewise.runner.tracking.store import experiment_id, open_client

_TAG = "samewise.report_of"


def log_report(sweep: str, files: Sequence[Path], settings: Mapping[str, Any]) -> str:
    """Log the files of a sweep's report.

    Return the MLflow run's id. A later report of the same sweep replaces an earlier one.
    """
    uri = check_uri(str(settings["uri"]))
    client = open_client(uri)
    experiment = experiment_id(client, f"{settings['experiment']} reports", settings)
    found = client.search_runs([experiment], f"tags.`{_TAG}` = '{sweep}'", max_results=1)
    run = (
        found[0]
        if found
        else client.create_run(experiment, tags={_TAG: sweep, "sweep": sweep}, run_name=sweep)
    )
    return _log_files(client, run.info.run_id, files, settings)


def log_profile(
    name: str,
    fingerprint: str,
    files: Sequence[Path],
    metrics: Mapping[str, float],
    settings: Mapping[str, Any],
) -> str:
    """Log a profile of an experiment as a new run; return the MLflow run's id."""
    client = open_client(check_uri(str(settings["uri"])))
    experiment = experiment_id(client, f"{settings['experiment']} profiles", settings)
    run = client.create_run(
        experiment, tags={"samewise.profile_of": fingerprint}, run_name=f"{name} {fingerprint[:12]}"
    )
    for key, value in metrics.items():
        client.log_metric(run.info.run_id, key, value)
    return _log_files(client, run.info.run_id, files, settings)


def _log_files(
    client: MlflowClient, run_id: str, files: Sequence[Path], settings: Mapping[str, Any]
) -> str:
    for file in files:
        client.log_artifact(run_id, str(file))
    client.set_terminated(run_id, "FINISHED")
    return run_id
