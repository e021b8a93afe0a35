"""Imports torchaudio even where its compiled library does not fit the installed torch.

torchaudio 2.11 gets no new features, and goes on with newer releases of torch. But it refuses to be
imported where its library does not load, or where the CUDA version that it was compiled for is not
exactly torch's. All that samewise needs of it is Python.

`samewise` itself imports this module, so that every process of it has the finder before anything
imports torchaudio. It costs a comparison for each import.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

_NAME = "torchaudio._extension"

reason = ""
"""Why torchaudio's library is not used, in a process that has imported torchaudio; empty if it is.
"""


class _Finder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _NAME:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec and spec.origin:
            spec.loader = _Loader(name, spec.origin)
        return spec


class _Loader(SourceFileLoader):
    """Executes the module.

    If that fails, leaves it as torchaudio leaves it where no library was built.
    """

    def exec_module(self, module: ModuleType) -> None:
        try:
            super().exec_module(module)
        except (ImportError, OSError, RuntimeError) as error:
            _complete(module, error)


def _complete(module: ModuleType, error: Exception) -> None:
    global reason
    import torch
    from torchaudio._internal.module_utils import fail_with_message, no_op

    from samewise.runner.errors import first_line

    # Versions of CUDA with the same major number are compatible: torchaudio's sources accept them
    # since its pull request 4226, which no release has.
    compiled_for, cuda = (
        getattr(torch.ops._torchaudio, "cuda_version", lambda: None)(),
        torch.version.cuda,
    )
    if compiled_for and cuda and compiled_for // 1000 == int(cuda.partition(".")[0]):
        vars(module).update(_IS_ALIGN_AVAILABLE=True, fail_if_no_align=no_op)
        return
    reason = first_line(error.__cause__ or error)
    message = (
        "needs torchaudio's compiled library, which does not work with torch "
        f"{torch.__version__}: {reason}"
    )

    def fail(*_: object) -> None:
        raise RuntimeError(f"torchaudio.functional.rnnt_loss {message}")

    vars(torch.ops.torchaudio).update(rnnt_loss_forward=fail)
    vars(module).update(
        _IS_TORCHAUDIO_EXT_AVAILABLE=False,
        _IS_ALIGN_AVAILABLE=False,
        fail_if_no_align=fail_with_message(message),
    )


# Before Python's own finders, which would find the module too
sys.meta_path.insert(0, _Finder)
