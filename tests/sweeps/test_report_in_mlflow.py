"""A sweep's report in a real MLflow store."""

from __future__ import annotations

from pathlib import Path


def test_a_report_restores_its_deleted_experiment(tmp_path: Path) -> None:
    from samewise.runner.tracking.store import log_report, open_client

    settings = {"uri": f"sqlite:///{tmp_path / 'mlflow.db'}", "experiment": "digits"}
    (page := tmp_path / "report.html").write_text("first")
    run = log_report("sweep", [page], settings)
    client = open_client(settings["uri"])
    client.delete_experiment(client.get_run(run).info.experiment_id)
    page.write_text("second")
    later = log_report("sweep", [page], settings)
    found = client.get_experiment_by_name("digits reports")
    assert found.lifecycle_stage == "active"
    assert [one.info.run_id for one in client.search_runs([found.experiment_id])] == [later]
    assert Path(client.download_artifacts(later, "report.html")).read_text() == "second"
