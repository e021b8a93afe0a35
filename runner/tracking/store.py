"""Opens the MLflow store; an SQLite file is created once and atomically, by any of many processes.

Imports mlflow.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, ViewType
from mlflow.exceptions import MlflowException
from mlflow.store.db.db_types import DATABASE_ENGINES
from mlflow.store.db.utils import create_sqlalchemy_engine
from mlflow.store.tracking.dbmodels.models import SqlMetric
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore
from sqlalchemy import Engine, insert, select

from samewise.runner.errors import ConfigError, Problem, SamewiseError, summarise_error
from samewise.runner.records.locks import hold
from samewise.runner.tracking.address import describe_failure, sqlite_file

_LOG = logging.getLogger("samewise.tracking")


def open_client(uri: str) -> MlflowClient:
    """Return a client of the store.

    An SQLite file is created, or migrated to this MLflow's schema, if needed.
    """
    file = sqlite_file(uri)
    if file is None:
        return MlflowClient(tracking_uri=uri)
    _create(file)
    try:
        return MlflowClient(tracking_uri=uri)
    except MlflowException as error:
        if "out-of-date" not in str(error):
            raise
    _migrate(file, uri)
    return MlflowClient(tracking_uri=uri)


@contextlib.contextmanager
def open_reader(uri: str, problem: Callable[[str], Problem]) -> Generator[MlflowClient]:
    """Open a client that reads a store; errors of the store become a ConfigError.

    Args:
        uri: The store's address.
        problem: Makes the problem from a reason.
    """
    try:
        client = MlflowClient(tracking_uri=uri)
        # Every store begins with the experiment `Default`; MLflow's client takes a gateway's
        # plain "OK" for an empty answer
        if not client.search_experiments(ViewType.ALL, max_results=1):
            raise ConfigError(problem("it has no experiment, so it is no MLflow server"))
        yield client
    except SamewiseError:
        raise
    except (MlflowException, OSError) as error:
        raise ConfigError(problem(describe_failure(str(error)))) from None
    except Exception as error:
        reason = describe_failure(summarise_error(error))
        if sqlite_file(uri) is None:
            reason = f"its answer cannot be understood: {reason}"
        raise ConfigError(problem(reason)) from None


@cache
def database(uri: str) -> Engine | None:
    """Return the store's database; None if the store is a server."""
    is_database = uri.partition("://")[0].partition("+")[0] in DATABASE_ENGINES
    return create_sqlalchemy_engine(uri) if is_database else None


def insert_metrics(database: Engine, run_id: str, metrics: Sequence[Metric]) -> None:
    """Insert finite values in one transaction, without updating the latest ones.

    MLflow's client makes an ORM object for each value, which takes ten times as long.

    Raises:
        SQLAlchemyError: The database has some of them, or cannot be written.
    """
    rows = [
        {
            "run_uuid": run_id,
            "key": metric.key,
            "timestamp": metric.timestamp,
            "step": metric.step,
            "value": metric.value,
            "is_nan": False,
        }
        for metric in metrics
    ]
    with database.begin() as connection:
        connection.execute(insert(SqlMetric), rows)


def logged_values(
    database: Engine, run_ids: Sequence[str], names: Sequence[str]
) -> Iterator[tuple[str, str, int, float]]:
    """Yield the id, the metric, the step and the value of all that runs logged, the latest last.

    MLflow's client asks for each metric of each run by itself.
    """
    query = (
        select(SqlMetric.run_uuid, SqlMetric.key, SqlMetric.step, SqlMetric.value, SqlMetric.is_nan)
        .where(SqlMetric.run_uuid.in_(run_ids), SqlMetric.key.in_(names))
        .order_by(SqlMetric.timestamp, SqlMetric.step, SqlMetric.value)
    )
    with database.connect() as connection:
        for run_id, name, step, value, is_nan in connection.execute(query):
            yield run_id, name, step, math.nan if is_nan else value


def experiment_id(client: MlflowClient, name: str, settings: Mapping[str, Any]) -> str:
    """Return the id of the MLflow experiment with that name, created or restored if necessary."""
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        try:
            return client.create_experiment(
                name, artifact_location(str(settings["uri"]), settings.get("artifact_location"))
            )
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            # Another process has created it meanwhile
            experiment = client.get_experiment_by_name(name)
            assert experiment is not None
    if experiment.lifecycle_stage == "deleted":
        _LOG.warning("the MLflow experiment '%s' had been deleted; restoring it", name)
        client.restore_experiment(experiment.experiment_id)
    return experiment.experiment_id


def artifact_location(uri: str, chosen: str | None) -> str | None:
    """Return the artifact location of a new experiment; None if the server decides."""
    file = sqlite_file(uri)
    if chosen is not None or file is None:
        return chosen
    return str(file.absolute().parent / "mlartifacts")


def _create(file: Path) -> None:
    """Create the store under another name and rename it, so that no process sees half of it."""
    if file.exists() and file.stat().st_size:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with hold(_lock(file), wait=True):
        if file.exists() and file.stat().st_size:
            return
        temporary = file.with_name(f".{file.name}.new")
        # An attempt that failed, or was killed, has left them. Emptied, since MLflow still has
        # connections to the file: in a new one they would hide why the first attempt failed.
        for leftover in file.parent.glob(f"{temporary.name}*"):
            os.truncate(leftover, 0)
        uri = f"sqlite:///{temporary.absolute()}"
        place = str(artifact_location(f"sqlite:///{file.absolute()}", None))
        # As a URI, which has no quotes: MLflow writes its repr into SQL
        store = SqlAlchemyStore(uri, Path(place).as_uri())
        with store.engine.begin() as connection:
            connection.exec_driver_sql(
                "UPDATE experiments SET artifact_location = ?", (f"{place}/0",)
            )
        store.engine.dispose()
        os.replace(temporary, file)


def _migrate(file: Path, uri: str) -> None:
    """Migrate an older MLflow's store to this one's schema, after making a copy."""
    with hold(_lock(file), wait=True):
        backup = file.with_name(f"{file.name}.before-upgrade")
        if not backup.exists():
            shutil.copy2(file, backup)
        _LOG.warning(
            "%s was made by an older MLflow; upgrading it, with a backup in %s", file, backup.name
        )
        subprocess.run(
            [sys.executable, "-P", "-m", "mlflow", "db", "upgrade", uri],
            check=True,
            stdout=subprocess.DEVNULL,
        )


def _lock(file: Path) -> Path:
    return file.with_name(f".{file.name}.lock")
