"""`samewise.datasets` is ours and `datasets` is Hugging Face's, in whatever environment and folder these tests run."""

from __future__ import annotations

from pathlib import Path

from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

import samewise


def test_hydra_finds_every_choice_of_every_group_in_the_package() -> None:
    folder = Path(str(samewise.__file__)).parent / "configs"
    expected = {group.name: sorted(path.stem for path in group.glob("*.yaml")) for group in folder.iterdir() if group.is_dir() and any(group.glob("*.yaml"))}
    assert "recipe" in expected
    with initialize_config_module(config_module="samewise.configs", version_base="1.3"):
        loader = GlobalHydra.instance().config_loader()
        loader.ensure_main_config_source_available()
        sources = {source.path for source in loader.get_sources() if source.provider == "main"}
        found = {group: sorted(loader.get_group_options(group)) for group in expected}
    for resolver in ("hydra", "now", "python_version"):  # which Hydra leaves behind in this process
        OmegaConf.clear_resolver(resolver)
    assert sources == {"samewise.configs"}
    assert found == expected
