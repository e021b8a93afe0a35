"""A stand-in for a trainer, run as a script: it logs known values, keeps a checkpoint every ten steps, and resumes from it when it is restarted.

python tracking_trainer.py RUNFOLDER URI STEPS SECONDS_PER_STEP [STATUS]
"""

import json
import sys
import time
from pathlib import Path

from omegaconf import OmegaConf

from samewise.runner.config.schema import Tracking
from samewise.runner.records import trust
from samewise.runner.records.files import write_atomically, write_json
from samewise.runner.records.folder import RunFolder
from samewise.runner.tracking.tracker import open_tracker


def main() -> None:
    folder, uri, steps, pause = RunFolder(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    status = sys.argv[5] if len(sys.argv) > 5 else "FINISHED"
    folder.create()
    settings = OmegaConf.structured(Tracking(uri=uri, send_every_s=0.1, flush_timeout_s=60.0, experiment="tried", tags={"who": "a test"}))
    config = {
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
        "reproducibility": {"level": "strict"},
        "dataset": {"root": "somewhere"},
        "tracking": settings,
    }
    write_atomically(folder.config, "# choices: " + json.dumps({"model": "resnet18"}) + "\n" + OmegaConf.to_yaml(OmegaConf.create(config)))
    trust.sign(folder.config)
    data = {"train": {"name": "digits", "size": 1000, "fingerprint": "a" * 64}}
    write_json(
        folder.environment,
        {
            "fingerprint": "f" * 64,
            "level": "R1",
            "title": "What the settings are for",
            "versions": {"torch": "2"},
            "code": {"samewise/a.py": "1", "samewise/b.py": "2"},
            "code_state": "3",
            "git": {"commit": "c" * 40},
            "data": data,
        },
    )
    checkpoint = folder.checkpoints / "step"
    resume = int(checkpoint.read_text()) if checkpoint.exists() else None
    tracker = open_tracker(folder, settings, resume_step=resume)
    tracker.start()
    for step in range((resume or 0) + 1, steps + 1):
        tracker.log({"train/loss": 1 / step, "train/step": float(step)}, step)
        if step % 10 == 0:
            tracker.before_checkpoint(step)
            write_atomically(checkpoint, str(step))
        time.sleep(pause)
    (folder.artifacts / "pictures").mkdir(exist_ok=True)
    (folder.artifacts / "pictures" / "confusion.txt").write_text("a picture")
    tracker.finish(status)
    assert "mlflow" not in sys.modules
    assert "torch" not in sys.modules
    print(tracker.run_id())


if __name__ == "__main__":
    main()
