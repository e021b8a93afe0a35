"""Logs a run to Weights & Biases, online or, with WANDB_MODE=offline, as files in the run's folder.

`wandb sync` uploads those files. A value's step is a value of its own, `step`, by which all curves
are drawn: W&B's own counter refuses values that come late. wandb.json has the number of the
journal's bytes that W&B has. wandb says what it has written only as it ends, so the lines of a
killed sender are logged again, in the same W&B run at the same `step`. Imports wandb.
"""

import contextlib
import os
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import wandb
from wandb import Image, Settings

from samewise.runner.config.yaml_files import read_yaml
from samewise.runner.records import shapes
from samewise.runner.records.files import read_mapping, read_text, require_no_link, write_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.secrets import redact_values
from samewise.runner.tracking import describing, journal
from samewise.runner.tracking.backends import Sent


def set_up() -> None:
    """Make wandb load its settings, except the current folder's (`wandb/settings`)."""
    # The current folder's may be someone else's, with an address that gets the user's key
    with contextlib.chdir(os.sep):
        wandb.setup()


class WeightsAndBiases:
    """A W&B run: metrics, the config, tags and pictures.

    Checkpoints stay in the run's folder. `tracking.experiment` is its project.
    """

    def __init__(self, folder: RunFolder, settings: Mapping[str, Any]) -> None:
        self.folder = folder
        self.sent = Sent()
        self._settings = settings
        self._file = folder.path / "wandb.json"
        saved = read_mapping(self._file, shapes.WANDB)
        self._id: str = saved.get("id") or uuid.uuid4().hex
        self._read: dict[str, int] = saved.get("sent") or {}
        self._status: str | None = saved.get("status")
        self._run: Any = None

    def synchronise(self, *, alive: bool) -> Sent:
        """Log what is new; end the W&B run when the trainer has ended."""
        journals = [self.folder.metrics, self.folder.system]
        is_sent = all(
            self._read.get(path.name, 0) >= path.stat().st_size
            for path in journals
            if path.exists()
        )
        if is_sent and self._status in ("FINISHED", "FAILED") and not alive:
            return self.sent
        if self._run is None:
            self._run = self._begin()
        for path in journals:
            self._metrics(path)
        if not alive:
            for name, path in describing.pictures(self.folder):
                self._run.log({name: Image(str(path))})
                self.sent.files += 1
            self._run.finish(exit_code=0 if self._status == "FINISHED" else 1)
            self._run = None
            write_json(self._file, {"id": self._id, "sent": self._read, "status": self._status})
        return self.sent

    def _begin(self) -> Any:
        require_no_link(self.folder.path / "wandb")
        quiet = {"WANDB_SILENT": "true", "WANDB_CONSOLE": "off"}
        os.environ.update({name: x for name, x in quiet.items() if name not in os.environ})
        config = cast(
            dict[str, Any], redact_values(read_yaml(read_text(self.folder.config) or "") or {})
        )
        set_up()
        run = wandb.init(
            project=self._settings["experiment"],
            name=describing.run_name(self.folder, self._settings),
            id=self._id,
            resume="allow",
            group=self.folder.path.absolute().parent.name,
            dir=str(self.folder.path.absolute()),
            config={**config, "fingerprint": self.folder.path.name},
            tags=describing.wandb_tags(
                redact_values(describing.own_tags(self.folder, self._settings))
            ),
            settings=Settings(
                # system.jsonl has the machine's metrics
                x_disable_stats=True,
                x_disable_meta=True,
                disable_git=True,
                disable_code=True,
                save_code=False,
            ),
        )
        run.define_metric("step", hidden=True)
        run.define_metric("*", step_metric="step")
        # The id leads to the same W&B run if this process is killed and restarted
        write_json(self._file, {"id": self._id, "sent": self._read, "status": self._status})
        return run

    def _metrics(self, path: Path) -> None:
        for entry, next_offset in journal.read_entries(path, offset=self._read.get(path.name, 0)):
            self._status = entry.status or self._status
            if entry.metrics:
                self._run.log({**entry.metrics, "step": entry.step})
                self.sent.metrics += len(entry.metrics)
            self._read[path.name] = next_offset
            self.sent.moved = time.monotonic()
