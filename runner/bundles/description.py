"""Describes a bundle for other tools: RO-Crate 1.1 for the whole (https://w3id.org/ro/crate/1.1), Croissant 1.0 for the data set."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from samewise.runner.bundles.archive import OWN, Part
from samewise.runner.records.folder import RunFolder
from samewise.runner.tracking import journal

CRATE, CROISSANT = "ro-crate-metadata.json", "croissant.json"
_MOST = 1000
"""Files of data that Croissant lists one by one."""
_FORMATS = {
    "json": "application/json",
    "jsonl": "application/jsonl",
    "yaml": "application/yaml",
    "py": "text/x-python",
    "txt": "text/plain",
    "toml": "application/toml",
}
_ROLES = {
    "bundle.json": "What the run was, and its result: fingerprint, level, digests of weights and trace",
    "requirements.txt": "The environment: exact versions of all packages",
    "data.json": "The data: names, sizes and SHA-256 of all files, and fingerprints of the splits",
    "croissant.json": "The data set, described in Croissant",
    "run/config.yaml": "The resolved config",
    "run/environment.json": "Versions, hardware, threads and variables of the training",
    "run/sources.json": "Digests of the functions and classes of the user's code",
    "run/summary.json": "The result",
    "run/metrics.jsonl": "All metrics that were logged",
    "run/trace.jsonl": "Digests of each step's batch, gradients and weights, and its exact loss, chained",
}


def describe(facts: Mapping[str, Any], data: Mapping[str, Any], folder: RunFolder, parts: Mapping[str, Part]) -> dict[str, Any]:
    """Make both descriptions, by file name."""
    return {CROISSANT: _croissant(facts, data), CRATE: _crate(facts, _end_time(folder), sorted([*parts, CROISSANT]))}


def _end_time(folder: RunFolder) -> str:
    """When the run ended, which is the same in every bundle of it."""
    last = max((entry.time_ms for entry, _ in journal.read_entries(folder.metrics)), default=0)
    return datetime.fromtimestamp(last // 1000 or folder.summary.stat().st_mtime // 1, UTC).isoformat()


def _crate(facts: Mapping[str, Any], ended: str, names: list[str]) -> dict[str, Any]:
    files = [{"@id": name, "@type": _kind(name), "name": name, **_format(name), **({"description": _ROLES[name]} if name in _ROLES else {})} for name in names]
    root = {
        "@id": "./",
        "@type": "Dataset",
        "name": f"{facts['name']} {facts['fingerprint'][:12]}",
        "description": f"A training run of samewise ({facts['label'] or facts['name']}): {facts['steps']} steps, level {facts['level']}, "
        f"weights SHA-256 {facts['weights_sha256']}. `samewise reproduce` trains it again and compares every step.",
        "datePublished": ended,
        "license": "The code of samewise is under Apache-2.0; whoever shares the bundle states the terms of the rest",
        "hasPart": [{"@id": name} for name in names],
        "mentions": {"@id": "#training"},
    }
    training = {
        "@id": "#training",
        "@type": "CreateAction",
        "name": "The training",
        "endTime": ended,
        "instrument": {"@id": "#samewise"},
        "object": [{"@id": "run/config.yaml"}, {"@id": "data.json"}],
        "result": [{"@id": "run/summary.json"}, {"@id": "run/trace.jsonl"}],
    }
    software = {"@id": "#samewise", "@type": "SoftwareApplication", "name": "samewise", "softwareRequirements": f"Python {facts['python']}"}
    about = {"@id": CRATE, "@type": "CreativeWork", "conformsTo": {"@id": "https://w3id.org/ro/crate/1.1"}, "about": {"@id": "./"}}
    return {"@context": "https://w3id.org/ro/crate/1.1/context", "@graph": [about, root, training, software, *files]}


def _kind(name: str) -> str | list[str]:
    return ["File", "SoftwareSourceCode"] if name.startswith(f"{OWN}/") or name.endswith(".py") else "File"


def _format(name: str) -> dict[str, str]:
    known = _FORMATS.get(name.rpartition(".")[2])
    return {"encodingFormat": known} if known else {}


def _croissant(facts: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    splits = "; ".join(
        f"{split}: {about.get('name')}, {about.get('size')} samples, fingerprint {about.get('fingerprint')}" for split, about in data["splits"].items()
    )
    distribution = list[dict[str, Any]]()
    for key, files in data["files"].items():
        if len(files) > _MOST or any("sha256" not in about for about in files.values()):
            told = f"{len(files)} files below {key}; data.json lists them"
            root = {
                "@type": "cr:FileObject",
                "@id": key,
                "name": key,
                "contentUrl": key,
                "encodingFormat": "application/octet-stream",
                "sha256": "see data.json",
            }
            more = {"@type": "cr:FileSet", "@id": f"{key}-files", "name": key, "description": told, "containedIn": {"@id": key}, "includes": "**"}
            distribution += [root, {**more, "encodingFormat": "application/octet-stream"}]
            continue
        distribution += [
            {
                "@type": "cr:FileObject",
                "@id": f"{key}/{name}",
                "name": name,
                "contentUrl": name,
                "contentSize": f"{about['bytes']} B",
                "encodingFormat": "application/octet-stream",
                "sha256": about["sha256"],
            }
            for name, about in files.items()
        ]
    return {
        "@context": dict(sorted(_CONTEXT.items())),
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.0",
        "name": f"data-of-{facts['name']}",
        "description": f"What {facts['name']} was trained on. {splits}",
        "distribution": distribution,
    }


_TERMS = (
    "citeAs column extract field fileObject fileProperty fileSet format includes isLiveDataset jsonPath key md5 parentField path recordSet references regex "
    "repeated replace separator source subField transform"
)
_CONTEXT: dict[str, Any] = {term: f"cr:{term}" for term in _TERMS.split()} | {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "sc": "https://schema.org/",
}
"""All of Croissant 1.0, since mlcroissant warns of any other."""
