import os
import shutil

import pytest

from samewise.runner.records.locks import LockHeld, hold, holder


def test_a_lock_names_the_process_that_holds_it(tmp_path):
    path = tmp_path / ".lock"
    assert holder(path) is None
    with hold(path), pytest.raises(LockHeld, match=f"process {os.getpid()} on "), hold(path):
        pass
    assert holder(path) is None
    with hold(path):
        pass


@pytest.mark.parametrize("again", [False, True])
def test_a_holder_learns_that_its_folder_was_deleted(tmp_path, again):
    folder = tmp_path / "run"
    folder.mkdir()
    with hold(folder / ".lock") as is_gone:
        assert not is_gone()
        shutil.rmtree(folder)
        if again:
            folder.mkdir()
            (folder / ".lock").touch()
        assert is_gone()
