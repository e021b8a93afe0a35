"""Updates MLflow to the content of a run's folder.

A pass may be interrupted and repeated: what is sent twice is stored once. Imports mlflow.
"""

from __future__ import annotations

import hashlib
import logging
import math
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from omegaconf import OmegaConf
from sqlalchemy.exc import SQLAlchemyError

from samewise.runner.records import header, shapes, trust
from samewise.runner.records.files import read_json, read_text
from samewise.runner.records.folder import RunFolder
from samewise.runner.records.found import chosen_checkpoint
from samewise.runner.secrets import redact_file, redact_values
from samewise.runner.tracking import best, describing, journal, progress, store
from samewise.runner.tracking.address import remove_password
from samewise.runner.tracking.backends import RunGone, Sent

_LOG = logging.getLogger("samewise.tracking")
_BATCH = 1000
_MOST = {"metrics": _BATCH, "params": 100, "tags": 100}
"""The most entries that MLflow takes in a request."""
_BULK = 20_000
"""Metrics of a transaction, if the store is a database."""
SIGNATURE = "config.signature"
"""Artifact by which users recognise a config of their own: an HMAC, useless without their key."""
_FILES_EVERY_S = 5.0
_STILL_BEING_WRITTEN_S = 2.0
_LATE_S = 1.0
"""Seconds to wait for the arrival of a request that was abandoned."""
_INTENT = "samewise.intent"
"""Tag by which an MLflow run is recognised; see `TrackingState.intent`."""


class Sending:
    """Sends one run as configured by `tracking`, with an absolute `uri`.

    Used only by the process that holds `RunFolder.sending`.
    """

    def __init__(
        self, folder: RunFolder, settings: Mapping[str, Any], client: MlflowClient
    ) -> None:
        self.folder = folder
        self.settings = settings
        self.client = client
        self._database = store.database(settings["uri"])
        self.sent = Sent()
        self._is_run_checked = False
        # Whether the server may still carry out a request that sets RUNNING: that of a killed
        # sender, or one that nothing answered
        self._may_be_late = False
        self._files_at = 0.0
        self._left_out = set[Path]()
        self._best: list[best.Best] | None = None
        self._keys = dict[Path, describing.MetricKeys]()
        self.progress = progress.load(folder).at(remove_password(settings["uri"]))

    def synchronise(self, *, alive: bool) -> Sent:
        """Send everything that has not been sent.

        After an error of the client or of the connection, a later pass continues where this one
        stopped.

        Args:
            alive: Whether the trainer is running; if not, the run's status becomes the journal's,
                or KILLED.

        Raises:
            RunGone: The MLflow run was deleted: the next pass makes another.
            FileNotFoundError: The folder of a run that has ended has disappeared meanwhile.
        """
        had_metrics = not alive and self.folder.metrics.exists()
        self._ensure_run()
        if alive and self.progress.status != "RUNNING":
            # Until the server answers, it may carry out the request at any time
            self._may_be_late = True
            self.client.update_run(self._run_id, status="RUNNING")
            self._may_be_late = False
            self._note_progress(status="RUNNING")
        self._describe()
        self._send_journal(self.folder.metrics)
        self._send_journal(self.folder.system)
        failure = self._send_files(complete=not alive)
        # Without the journal's last status, the run would be shown as KILLED
        if had_metrics and not self.folder.metrics.exists():
            raise FileNotFoundError(f"the run's folder is gone: {self.folder.path}")
        if not alive:
            self._terminate()
        if failure is not None:
            raise failure
        if (
            not alive
            and self.progress.ended == "FINISHED"
            and (self.settings.get("log_model") or self.settings.get("register_model"))
        ):
            self._send_model()
        return self.sent

    @property
    def _run_id(self) -> str:
        assert self.progress.run_id is not None
        return self.progress.run_id

    def _note_progress(self, **changes: Any) -> None:
        """Record that something was received."""
        for name, value in changes.items():
            setattr(self.progress, name, value)
        progress.save(self.folder, self.progress)
        self.sent.moved = time.monotonic()

    # -- the MLflow run

    def _ensure_run(self) -> None:
        if self.progress.run_id is not None:
            # A delayed request may have set another status since the last sender
            if not self._is_run_checked:
                self._note_progress(status=self._require_run().info.status)
                self._may_be_late = self.progress.status == "RUNNING"
            return
        experiment = store.experiment_id(self.client, self.settings["experiment"], self.settings)
        run = None
        if self.progress.intent is None:
            # Before the run is created, so that it is found again if this process is killed in
            # between
            self._note_progress(experiment_id=experiment, intent=uuid.uuid4().hex)
        else:
            runs = self.client.search_runs(
                [experiment], f"tags.`{_INTENT}` = '{self.progress.intent}'", max_results=1
            )
            run = runs[0] if runs else None
        if run is None:
            started = next(
                (entry.time_ms for entry, _ in journal.read_entries(self.folder.metrics)), None
            )
            run = self.client.create_run(
                experiment,
                start_time=started,
                tags={_INTENT: self.progress.intent},
                run_name=describing.run_name(self.folder, self.settings),
            )
        self._is_run_checked = True
        # A new run is RUNNING, without a request that could arrive late
        self._note_progress(run_id=run.info.run_id, status=run.info.status)

    def _require_run(self) -> Run:
        """Return the MLflow run; raise `RunGone` if it was deleted."""
        try:
            run = self.client.get_run(self._run_id)
            is_deleted = run.info.lifecycle_stage == "deleted"
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            # Raises unless an MLflow server responded
            self.client.search_experiments(max_results=1)
            run, is_deleted = None, True
        if is_deleted or run is None:
            run_id = self._run_id
            self.progress = progress.TrackingState(
                store=self.progress.store, others=self.progress.others
            )
            progress.save(self.folder, self.progress)
            raise RunGone(
                f"the MLflow run {run_id} was deleted; creating a new one and sending "
                "everything to it"
            )
        self._is_run_checked = True
        return run

    def _terminate(self) -> None:
        status = self.progress.ended if self.progress.ended in ("FINISHED", "FAILED") else "KILLED"
        if self.progress.status == status:
            return
        previous = self.progress.status
        self.client.set_terminated(self._run_id, status, self.progress.last_ms or None)
        # A late "RUNNING" of another sender or of this one would overwrite the status
        if self._may_be_late:
            time.sleep(_LATE_S)
        run = self._require_run()
        self.progress.status = run.info.status
        if self.progress.status != status:
            raise RuntimeError(
                f"the run is shown as {self.progress.status}, though it was set to "
                f"{status}: a late request changed it"
            )
        keys = {key for keys in self._keys.values() for key in keys.taken}
        # A server may accept what it does not store: then everything is sent again
        if not self.sent.refused and keys - run.data.metrics.keys():
            self._note_progress(sent={}, status=previous)
            raise RuntimeError("the server accepted metrics that it does not have")
        self._note_progress(status=status)
        self.sent.status = f"{previous} to {status}"

    def _send_model(self) -> None:
        """Log the best checkpoint as a model, once everything else is sent, and register it."""
        from samewise.runner.tracking import logged_model

        if self.progress.model is None:
            config = cast(
                dict[str, Any], OmegaConf.to_container(OmegaConf.load(self.folder.config))
            )
            steps = int((read_json(self.folder.summary, shapes.SUMMARY) or {}).get("steps", 0))
            model = logged_model.log(
                self.client,
                self.folder,
                run_id=self._run_id,
                experiment_id=str(
                    self.progress.experiment_id or self._require_run().info.experiment_id
                ),
                config=config,
                step=steps,
            )
            self._note_progress(model=model)
        name = self.settings.get("register_model")
        if name and name not in self.progress.registered:
            version = logged_model.register(
                self.client, str(name), model_id=str(self.progress.model), run_id=self._run_id
            )
            self._note_progress(registered={**self.progress.registered, str(name): version})

    # -- params, tags, inputs

    def _describe(self) -> None:
        texts = [
            read_text(path) or ""
            for path in (
                self.folder.config,
                self.folder.environment,
                self.folder.tags,
                self.folder.notes,
                self.folder.summary,
            )
        ]
        digest = hashlib.blake2b(
            "\0".join([*texts, str(self.folder.path.absolute())]).encode(), digest_size=16
        ).hexdigest()
        if self.progress.described == digest:
            return
        config = (
            cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(self.folder.config)))
            if texts[0]
            else {}
        )
        environment: dict[str, Any] = read_json(self.folder.environment, shapes.ENVIRONMENT) or {}
        # MLflow refuses another value for a param that it has
        data = self._require_run().data
        stored = data.params
        choices = describing.choices(texts[0])
        params = describing.params(redact_values(config)) | choices
        params |= describing.params(header.read_sources(texts[0]))
        for name in (name for name, value in params.items() if stored.get(name, value) != value):
            _LOG.info(
                "param %s was %s and is %s; MLflow keeps the first value; the artifact "
                "config.yaml has the last",
                name,
                stored[name],
                params[name],
            )
        own = describing.own_tags(self.folder, self.settings)
        # Only then, so that a name that was given in MLflow's pages stays
        if own[describing.NAME] != data.tags.get(describing.NAME):
            self.client.update_run(
                self._run_id, name=describing.run_name(self.folder, self.settings)
            )
        removed = {describing.key(name) for name, value in own.items() if value is None}
        for name in removed & data.tags.keys():
            self.client.delete_tag(self._run_id, name)
        self._log(
            "params", [Param(name, value) for name, value in params.items() if name not in stored]
        )
        described = redact_values(describing.tags(self.folder, config, environment, own=own))
        self._log(
            "tags",
            [
                RunTag(name, value)
                for name, value in described.items()
                # A description that was written in MLflow's pages stays
                if name != describing.DESCRIPTION or name in own or name not in data.tags
            ],
        )
        summary = read_json(self.folder.summary, shapes.SUMMARY) or {}
        self._log(
            "metrics",
            # What is sent again has the same time, and is stored once
            [
                Metric(describing.key(name), value, evaluation["time_ms"], evaluation["step"])
                for evaluation in summary.get("evaluations", {}).values()
                for name, value in evaluation["metrics"].items()
            ],
        )
        if datasets := describing.inputs(redact_values(config), redact_values(environment)):
            self.client.log_inputs(self._run_id, datasets)
        self._note_progress(described=digest)

    # -- metrics

    def _send_journal(self, path: Path) -> None:
        size = path.stat().st_size if path.exists() else 0
        offset = self.progress.sent.get(path.name, 0)
        # A shorter journal is another one, which is sent from its beginning
        if offset > size:
            offset = 0
        if offset == size:
            return
        metrics: list[Metric] = []
        ended, last = self.progress.ended, self.progress.last_ms

        if path not in self._keys:
            earlier_entries = journal.read_entries(path, end=offset) if offset else ()
            self._keys[path] = describing.MetricKeys(
                name for entry, _ in earlier_entries for name in entry.metrics
            )
        keys = self._keys[path]
        monitored = self._best_values(offset) if path == self.folder.metrics else []
        if monitored and not offset:
            started = next((entry.time_ms for entry, _ in journal.read_entries(path)), 0)
            # Before all other metrics: MLflow's compare page colours by the first
            metrics.extend(Metric(x.name, x.value, started, 0) for x in monitored)

        def flush() -> None:
            self._log_metrics(metrics)
            metrics.clear()
            if offset != self.progress.sent.get(path.name, 0):
                self._note_progress(
                    sent={**self.progress.sent, path.name: offset}, ended=ended, last_ms=last
                )

        for entry, next_offset in journal.read_entries(path, offset=offset, end=size):
            ended = entry.status or ended
            last = max(last, entry.time_ms)
            metrics.extend(
                Metric(keys.of(name), value, entry.time_ms, entry.step)
                for name, value in entry.metrics.items()
            )
            metrics.extend(
                Metric(x.name, x.value, entry.time_ms, entry.step)
                for x in monitored
                if x.take(entry.metrics)
            )
            offset = next_offset
            if len(metrics) >= (_BATCH if self._database is None else _BULK):
                flush()
        flush()

    def _log_metrics(self, metrics: list[Metric]) -> None:
        """Send metrics; to a database, most of a large number in bulk."""
        if self._database is None or len(metrics) <= _BATCH:
            self._log("metrics", metrics)
            return
        # MLflow's client updates the latest values, and stores what is not finite in its own way
        latest = {x.key: x for x in sorted(metrics, key=lambda x: (x.step, x.timestamp))}
        history = [x for x in metrics if latest[x.key] is not x and math.isfinite(x.value)]
        self._log(
            "metrics", [x for x in metrics if latest[x.key] is x or not math.isfinite(x.value)]
        )
        try:
            store.insert_metrics(self._database, self._run_id, history)
            self.sent.metrics += len(history)
        except SQLAlchemyError:
            # Some were sent before, or MLflow's client says what is wrong with the database
            self._log("metrics", history)

    def _best_values(self, offset: int) -> list[best.Best]:
        """Return the best values of the monitored metrics up to an offset of the journal.

        That of `evaluate.monitor` is the first. Empty if the config monitors no metric.
        """
        if self._best is None and (config := read_text(self.folder.config)):
            evaluate = (
                cast(dict[str, Any], OmegaConf.to_container(OmegaConf.create(config))).get(
                    "evaluate"
                )
                or {}
            )
            if evaluate.get("monitor"):
                modes = {str(evaluate["monitor"]): evaluate.get("mode")} | (
                    evaluate.get("also") or {}
                )
                self._best = [best.Best(name, mode=str(mode)) for name, mode in modes.items()]
                for entry, _ in (
                    journal.read_entries(self.folder.metrics, end=offset) if offset else ()
                ):
                    for value in self._best:
                        value.take(entry.metrics)
        return self._best or []

    def _log(self, kind: str, entries: list[Any]) -> None:
        """Send metrics, params or tags, in as few requests as MLflow takes."""
        for start in range(0, len(entries), _MOST[kind]):
            self._log_batch(kind, entries[start : start + _MOST[kind]])

    def _log_batch(self, kind: str, batch: list[Any]) -> None:
        try:
            log: Any = self.client.log_batch
            log(self._run_id, **{kind: batch})
            self.sent.metrics += len(batch) if kind == "metrics" else 0
        except MlflowException as error:
            if error.error_code not in ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST"):
                raise
            self._require_run()
            if len(batch) == 1:
                _LOG.warning("MLflow refuses %s: %s", batch[0], error)
                self.sent.refused += 1
                return
            # Halves, down to single entries, so that one bad entry does not block the others
            self._log_batch(kind, batch[: len(batch) // 2])
            self._log_batch(kind, batch[len(batch) // 2 :])

    # -- files

    def _send_files(self, *, complete: bool) -> Exception | None:
        """Upload new and changed files; return a failure.

        It is not raised, since metrics and status do not wait for files.
        """
        now = time.monotonic()
        if not complete and now < self._files_at:
            return None
        self._files_at = now + _FILES_EVERY_S
        failure: Exception | None = None
        for name, path in self._files(complete=complete):
            try:
                self._send_file(name, path, complete=complete)
            except FileNotFoundError:
                # The file was replaced or removed meanwhile
                continue
            except Exception as error:
                failure = error
        return failure

    def _files(self, *, complete: bool) -> list[tuple[str, Path]]:
        files = [
            ("config.yaml", self.folder.config),
            ("environment.json", self.folder.environment),
            ("sources.json", self.folder.sources),
            (SIGNATURE, self.folder.config.with_name(trust.SIGNATURE)),
        ]
        # The other files change until the run has ended
        if complete:
            files += [
                ("summary.json", self.folder.summary),
                *(
                    [("trace.jsonl", self.folder.trace)]
                    if self.settings.get("log_checkpoint")
                    else []
                ),
            ]
        root = self.folder.artifacts
        files += [
            (path.relative_to(root).as_posix(), path)
            for path in sorted(root.rglob("*"))
            if not path.name.startswith(".") and path.is_file()
        ]
        folder = self.folder.path.resolve()
        is_logged = self.settings.get("log_checkpoint") and self.progress.ended == "FINISHED"
        if is_logged and (checkpoint := chosen_checkpoint(self.folder, "best")):
            files += [
                (f"checkpoint/{path.relative_to(checkpoint).as_posix()}", path)
                for path in sorted(checkpoint.rglob("*"))
                if path.is_file()
            ]
        return [
            (name, path) for name, path in files if path.exists() and self._is_inside(path, folder)
        ]

    def _is_inside(self, path: Path, folder: Path) -> bool:
        """Whether the file is inside the folder: a link could lead to any file of the user's."""
        is_inside = not path.is_symlink() and path.resolve().is_relative_to(folder)
        if not is_inside and path not in self._left_out:
            self._left_out.add(path)
            _LOG.warning(
                "%s is not sent: it is a link, which may lead to any file; put a copy there", path
            )
        return is_inside

    def _send_file(self, name: str, path: Path, *, complete: bool) -> None:
        stat = path.stat()
        state = [stat.st_size, stat.st_mtime_ns]
        if self.progress.files.get(name) == state or (
            not complete and time.time() - stat.st_mtime < _STILL_BEING_WRITTEN_S
        ):
            return
        if name in ("config.yaml", "environment.json", "sources.json", "summary.json", SIGNATURE):
            self.client.log_text(self._run_id, redact_file(name, read_text(path) or ""), name)
        else:
            self.client.log_artifact(
                self._run_id, str(path), Path(name).parent.as_posix() if "/" in name else None
            )
        self.sent.files += 1
        self._note_progress(files={**self.progress.files, name: state})
