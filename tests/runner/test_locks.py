import os
import shutil
import signal
import time

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


def test_a_lock_ends_with_its_process_even_if_a_child_lives_on(tmp_path):
    path, says = tmp_path / ".lock", os.pipe()
    pid = os.fork()
    if pid == 0:
        with hold(path):
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            os.write(says[1], str(child).encode())
            time.sleep(60)
            os._exit(0)
    child = int(os.read(says[0], 16))
    try:
        assert f"process {pid} on " in str(holder(path))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert holder(path) is None
        os.kill(child, 0)  # it is still there
    finally:
        os.kill(child, signal.SIGKILL)
        for end in says:
            os.close(end)


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
