"""Readers of images give what plain independent ones read from odd files, or name the file."""

import contextlib
import io
import json
import math
import os
import struct
import unicodedata
import xml.etree.ElementTree as ElementTree
import zlib
from collections import Counter
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import numpy as np
import pyarrow as pa
import samewise_datasets_drawn as drawn
from PIL import Image
from pyarrow import parquet
from pycocotools.coco import COCO as Published
from samewise_datasets_drawn import Case, Near, Refused, cell, judge, of_split, refuse, text_of

from samewise.datasets.coco import COCO
from samewise.datasets.hugging_face import HuggingFaceImages
from samewise.datasets.image_folder import ImageFolder
from samewise.datasets.image_table import ImageTable
from samewise.datasets.parts.channels import read_channels
from samewise.datasets.parts.decode import read_image
from samewise.datasets.parts.upright import read_upright
from samewise.datasets.pascal_voc import PascalVOC

KNOWN = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".jfif")
KNOWN += (".jpe", ".gif", ".dib", ".pnm", ".pbm")
RUBBISH = ("__MACOSX", "@eaDir", ".hidden", "Thumbs.db", "._a.jpg", "$RECYCLE.BIN")


def write_images(case: Case, folder: Path, stems: list[str], *, upright: bool = True) -> list[str]:
    """Write an image for each stem; return the files' names."""
    names = list[str]()
    folder.mkdir(parents=True, exist_ok=True)
    for stem in stems:
        raw, ending = drawn.draw_image(case, 5, 4, upright=upright)
        name = stem + case.pick([ending, ending, ending.upper(), ".jpg", ".Png", ".JPEG"])
        (folder / name).write_bytes(raw)
        names.append(name)
    return names


def bytes_of(path: Path) -> bytes:
    with drawn.refusing(OSError):
        return path.read_bytes()


def samples_of(data: Any) -> list[dict[str, Any]]:
    return [
        {**sample, "class": data.classes[sample["label"]], "file": str(data.path(index))}
        for index, sample in ((index, data[index]) for index in range(len(data)))
    ]


def class_folders(case: Case) -> bool:
    root = case.folder / "images"
    listed = list[tuple[str, str]]()
    rubbish = 0
    folders = case.pick([case.words(2), case.words(3)])
    for name in folders:
        count = case.pick([2, 3, 1, 4])
        stems = [f"{word} {number}" for number, word in enumerate(case.words(count))]
        below = case.pick(["", "", "", "sub", "sub/a b"])
        files = write_images(case, root / name / below, stems)
        listed += [(name, f"{below}/{file}".removeprefix("/")) for file in files]
        if not case.random.randrange(6):
            (root / name / case.pick(["notes.txt", "README", "a.heic"])).write_text("x")
            rubbish += 1
        if not case.random.randrange(6):
            (root / name / case.pick(RUBBISH)).write_text("x")
        if not case.random.randrange(6):
            listed.append((name, "link.jpg"))
            target = case.pick([root / "/".join(listed[0])], [Path("nowhere"), root], share=0.1)
            (root / name / "link.jpg").symlink_to(target)
    if not case.random.randrange(3):
        (root / (name := case.pick([*RUBBISH, "#recycle", ".ipynb_checkpoints"]))).mkdir()
        (root / name / "0.jpg").write_bytes(drawn.draw_image(case, 5, 4)[0])
    elif not case.random.randrange(6):
        (root / unicodedata.normalize(case.pick(["NFD", "NFC"]), case.pick(folders))).mkdir(exist_ok=True)
        case.sound = False
    split_up = case.pick([True, False])
    case.sound = case.sound and not split_up
    mode = case.pick(["rgb", "rgb", "gray"])

    def read() -> Any:
        place = case.spell(root)
        options: Any = {"shares": drawn.SHARES} if split_up else {}
        data = [ImageFolder(root=place, folder="", mode=mode, split=split, **options) for split in (drawn.SPLITS if split_up else drawn.SPLITS[:1])]
        assert data[0].fingerprint() == ImageFolder(root=str(root), folder="", mode=mode, split="train", **options).fingerprint()
        counts = [int(text.split()[0]) for text in data[0].left_out.split(", ") if text]
        return {
            "classes": data[0].classes,
            "left out": sum(counts),
            "splits": [sorted((x["class"], os.path.basename(x["file"]), x["image"]) for x in samples_of(split)) for split in data],
        }

    def reference() -> Any:
        classes = sorted(x for x in os.listdir(root) if not x.startswith(".") and x not in (*RUBBISH, "#recycle"))
        forms = Counter(" ".join(unicodedata.normalize("NFC", x).split()) for x in classes)
        refuse(max(forms.values()) > 1, "two classes look the same")
        names = [f"{name}/{file}" for name, file in listed]
        chosen = drawn.splits_of(names) if split_up else {"train": names}
        mode_of_pillow = "RGB" if mode == "rgb" else "L"
        return {
            "classes": classes,
            "left out": rubbish,
            "splits": [
                [
                    [name.partition("/")[0], os.path.basename(name), image]
                    for name in sorted(names, key=lambda x: (x.partition("/")[0], os.path.basename(x)))
                    for image in [drawn.pixels_of(bytes_of(root / name), mode_of_pillow)]
                ]
                for names in chosen.values()
            ],
        }

    return judge(case, read, reference)


def table(case: Case) -> bool:
    folder = case.folder / "data"
    stems = [f"{word}-{number}" for number, word in enumerate(case.words(5) + case.words(3))]
    below = case.pick(["", "sub/", "a b/"])
    names = [below + name for name in write_images(case, folder / below, stems)]
    kind = case.pick(["words", "integers", "floats"])
    labels = case.words(3) if kind == "words" else [3, 20, 100] if kind == "integers" else [0.5, 7]
    parts = case.pick([True, False])
    rows = list[dict[str, Any]]()
    for number, name in enumerate(names):
        label = case.pick(labels, [None, "", float("nan"), "nan", [1], " ", 10**400], share=0.004)
        row = {"image": drawn.path_in_list(case, folder, name), "label": label, "note": case.pick(WIDE)}
        part = "valid" if number == 0 else "train" if number == 1 else case.pick(PARTS, ["x", ""])
        rows.append(row | ({"part": part} if parts else {}))
    if case.pick([False], [True], share=0.05):
        again = dict(case.pick(rows))
        rows.append({**again, "image": case.pick([again["image"], f"./{again['image']}"])})
    case.random.shuffle(rows)
    opening = drawn.write_table(case, folder / "list", rows)
    case.sound = case.sound and parts

    def read() -> Any:
        options: Any = {"shares": drawn.SHARES, "split_column": "part" if parts else None}
        place = case.spell(opening["path"])
        data = [ImageTable(table_path=place, split=split, **options) for split in drawn.SPLITS]
        assert data[0].fingerprint() == ImageTable(table_path=str(opening["path"]), split="train", **options).fingerprint()
        return [samples_of(split) for split in data] + [data[0].classes]

    def reference() -> Any:
        listed = dict[str, tuple[str, str]]()
        for row in drawn.table_rows(**opening):
            name = drawn.resolved(folder, cell(row, "image"))
            refuse(name in listed, "lists an image twice")
            split = MEANT.get(cell(row, "part").strip().lower()) if parts else ""
            refuse(split is None, "unknown split")
            listed[name] = (cell(row, "label"), split)
        splits = drawn.splits_of(list(listed)) if not parts else {}
        samples = [
            [
                {"class": listed[name][0], "image": drawn.pixels_of((folder / drawn.identity(folder, name)).read_bytes())}
                for name in splits.get(split, [x for x in listed if listed[x][1] == split])
            ]
            for split in drawn.SPLITS
        ]
        classes = {label for label, _ in listed.values()}
        refuse(len({unicodedata.normalize("NFC", x) for x in classes}) < len(classes), "two labels look the same")
        return [*samples, in_order(classes)]

    return judge(case, read, reference)


WIDE = ["", "x", "a,b", 'a "b"', "1,5", "\u00e9"]
PARTS = ["train", "Train", "training", "val", "valid", "dev", "test", "unused"]
MEANT = {"train": "train", "training": "train", "test": "test", "unused": "unused"} | dict.fromkeys(("val", "valid", "dev"), "valid")


def in_order(labels: set[str]) -> list[str]:
    """Return labels sorted by number if all are finite numbers, else as texts."""
    with contextlib.suppress(ValueError):
        numbers = {label: float(label) for label in labels}
        if all(math.isfinite(number) for number in numbers.values()):
            return sorted(labels, key=lambda label: (numbers[label], label))
    return sorted(labels)


def coco(case: Case) -> bool:
    folder = case.folder / "data"
    stems = [f"{word}-{number}" for number, word in enumerate(case.words(4))]
    names = write_images(case, folder / "images", stems, upright=False)
    start = case.pick([1, 1, 50, 2**40, 0], [2**63, -5])
    ids = [start + 3 * number for number in range(len(names))]
    categories = [{"id": case.number(number), "name": word} for number, word in zip([7, 2, 90], case.words(3), strict=False)]
    if case.pick([False], [True], share=0.05):
        categories.append({**case.pick(categories), "id": case.pick([5, 2, None])})
    split = case.pick([None], drawn.SPLITS, share=0.3)
    images = [
        {
            "id": case.number(number),
            "file_name": drawn.path_in_list(case, folder / "images", name) + case.pick([""], ["" if split else "\ud800"], share=0.004),
            "width": case.number(5),
            "height": case.number(4),
        }
        for number, name in zip(ids, names, strict=True)
    ]
    if case.pick([False], [True], share=0.05):
        images.append({**case.pick(images), **case.pick([{}, {"id": 77}])})
    annotations = list[dict[str, Any]]()
    for number in range(case.pick([3, 6, 1])):
        box = [case.pick([0, 0.5, 1.25, 2]), case.pick([0, 1, 1.5]), case.pick([2, 1.75, 2.5])]
        box = [case.number(x) for x in (*box, case.pick([1, 2.25, 0]))]
        annotations.append(
            {
                "id": case.pick([number], [0, None, "a"], share=0.02),
                "image_id": case.number(case.pick(ids)),
                "category_id": case.number(case.pick([7, 2, 90][: len(categories)])),
                "bbox": case.pick([box], [box[:3], [*box, 1], None, "0 0 1 1", {}], share=0.004),
                "area": case.pick([3, 2.5, 0, -3], [None, "3", float("nan"), 1e400, [1]], share=0.02),
                "iscrowd": case.pick([0, 0, 0, 1], [True, False, "1", 2, None, "true"], share=0.02),
            }
        )
    if case.pick([False], [True], share=0.05):
        case.pick(case.pick([annotations, images, categories])).popitem()
    content = {"images": images, "annotations": annotations, "categories": categories}
    path = folder / "list.json"
    is_ascii = case.pick([True, False]) or "\ud800" in "".join(x["file_name"] for x in images)
    case.write(path, json.dumps(content, ensure_ascii=is_ascii))
    training, dense = case.pick([True, False]), case.pick([True, False])

    def read() -> Any:
        options: Any = {"category_ids": "dense" if dense else "keep", "training": training}
        options |= {"split": split, "shares": drawn.SHARES} if split else {}
        root = case.spell(folder)
        data = COCO(root=root, images="images", annotations="list.json", **options)
        assert data.fingerprint() == COCO(root=str(folder), images="images", annotations="list.json", **options).fingerprint()
        return boxed_samples(data)

    def reference() -> Any:
        text = text_of(path)
        with drawn.refusing(ValueError, KeyError, TypeError, RecursionError):
            content = json.loads(text)
            (plain := case.folder / "plain.json").write_text(json.dumps(content))
            with contextlib.redirect_stdout(io.StringIO()):
                published = Published(plain)
        samples = coco_samples(published, folder / "images", dense=dense, training=training)
        if split:
            chosen = of_split([sample["name"] for sample in samples], split)
            samples = [sample for sample in samples if sample["name"] in chosen]
        return with_boxes(samples, training=training)

    return judge(case, read, reference)


def boxed_samples(data: Any) -> list[dict[str, Any]]:
    return [
        {
            **{key: sample[key] for key in ("image", "boxes")},
            "classes": [data.classes[label] for label in sample["labels"].tolist()],
            "labels": sample["labels"].tolist(),
            "id": sample["image_id"],
            **({"crowd": sample["crowd"].tolist(), "area": sample["area"]} if "area" in sample else {}),
        }
        for sample in (data[index] for index in range(len(data)))
    ]


def coco_samples(published: Published, folder: Path, *, dense: bool, training: bool) -> list[dict[str, Any]]:
    data = published.dataset
    numbers = [drawn.number_of(x.get("id"), whole=True) for x in data["categories"]]
    image_ids = [drawn.number_of(x.get("id"), whole=True) for x in data["images"]]
    names = [str(x["name"]) for x in data["categories"] if x.get("name") is not None]
    files = [drawn.resolved(folder, str(x["file_name"])) for x in data["images"] if x.get("file_name") is not None]
    refuse(len(files) < len(image_ids), "an image without a file")
    if len(names) < len(numbers) or len({unicodedata.normalize("NFC", x) for x in names}) < len(names):
        raise Refused("names of categories")
    refuse(any(len(set(x)) < len(x) for x in (numbers, image_ids, files)) or not numbers, "twice the same")
    refuse(not all(abs(x) < 2**63 for x in (*numbers, *image_ids)), "a huge id")
    label = {x: sorted(numbers).index(x) + 1 if dense else x for x in numbers}
    refuse(min(label.values()) < 1, "label 0 is the background")
    samples = dict[float, dict[str, Any]]()
    for number, name, entry in zip(image_ids, files, data["images"], strict=True):
        size = [drawn.number_of(entry.get(x), whole=True) for x in ("height", "width")]
        refuse(not all(0 < side < 2**63 for side in size), "no size")
        samples[number] = sample_of(folder / name, number, size)
    for entry in data["annotations"]:
        box, area, crowd = entry.get("bbox"), entry.get("area"), entry.get("iscrowd")
        number = drawn.number_of(entry.get("image_id"), whole=True)
        category = drawn.number_of(entry.get("category_id"), whole=True)
        if number not in samples or category not in label or not isinstance(box, list):
            raise Refused("an unknown id, or no box")
        x, y, width, height = (*map(drawn.number_of, box), *[-1] * 4)[:4]
        refuse(len(box) != 4 or min(width, height) < 0 or crowd not in (0, 1, None), "no box")
        sample = samples[number]
        high, wide = sample["size"]
        refuse(min(x, y) < -1 or x + width > wide + 1.001 or y + height > high + 1.001, "beyond the image")
        corners = [max(x, 0), max(y, 0), min(x + width, wide), min(y + height, high)]
        refuse(area is not None and (isinstance(area, str | list) or not abs(area) < math.inf), "no area")
        if corners[0] < corners[2] and corners[1] < corners[3] and not (training and crowd):
            sample["boxes"].append(corners)
            sample["labels"].append(label[category])
            sample["classes"].append(names[numbers.index(category)])
            sample["crowd"].append(bool(crowd))
            own = (corners[2] - corners[0]) * (corners[3] - corners[1])
            sample["area"].append(own if area is None else abs(area))
    return [samples[x] for x in sorted(samples)]


def sample_of(path: Path, number: float, size: list[float]) -> dict[str, Any]:
    lists = {"boxes": [], "labels": [], "classes": [], "crowd": [], "area": []}
    return {"name": path.name, "path": path, "size": size, "id": number, **lists}


def image_of(sample: dict[str, Any]) -> Near:
    """Return a sample's pixels, which have the size that the annotation says."""
    refuse(not sample["path"].is_file(), f"no file {sample['path']}")
    image = drawn.pixels_of(sample["path"].read_bytes())
    refuse(list(image.array.shape[1:]) != sample["size"], "another size")
    return image


def with_boxes(samples: list[dict[str, Any]], *, training: bool) -> list[dict[str, Any]]:
    """Return the samples, with arrays; in training without areas, and without empty images."""
    keys = ["id", "labels", "classes"] + ([] if training else ["crowd"])
    return [
        {
            **{key: sample[key] for key in keys},
            "image": image_of(sample),
            "boxes": Near(np.reshape(sample["boxes"], (-1, 4)), 1e-5),
            **({} if training else {"area": Near(sample["area"], 1e-6 * max(1, *sample["area"], 1))}),
        }
        for sample in samples
        if sample["boxes"] or not training
    ]


DIFFICULT = {"0": False, "1": True, "": False, "no": False, "yes": True} | {"true": True, "false": False}


def voc(case: Case) -> bool:
    folder = case.folder / "data"
    stems = [f"{word}-{number}" for number, word in enumerate(case.words(4))]
    names = write_images(case, folder / "JPEGImages", stems, upright=False)
    kinds = case.words(3)
    with_lists = case.pick([True, False])
    (folder / "Annotations").mkdir()
    for stem, name in zip(stems, names, strict=True):
        objects = "".join(voc_object(case, kinds) for _ in range(case.pick([1, 2, 3])))
        listed = case.pick([name], [f"{stem}.jpg", "", f"other/{name}", stem])
        text = (
            f"<annotation><filename>{escape(listed)}</filename><size><width>{case.number(5)}"
            f"</width><height>{case.number(4)}</height></size>{objects}</annotation>"
        )
        file = folder / "Annotations" / f"{stem}.xml"
        write_xml(case, file, text)
        if not case.random.randrange(8):
            file.rename(file.with_suffix(".XML"))
    if with_lists:
        (folder / "ImageSets" / "Main").mkdir(parents=True)
        lines = [stem + case.pick([""] * 6 + [" ", "  1", " -1", "\t"], [".xml", " 2"], share=0.008) for stem in stems[: case.pick([4, 4, 3])]]
        lines += case.pick([[]], [lines[:1], ["none"], [f"./{stems[0]}"]], share=0.05)
        case.write(folder / "ImageSets" / "Main" / "train.txt", "\n".join(lines))
    training, first_pixel = case.pick([True, False]), case.pick([0, 1])
    options: Any = {"training": training, "first_pixel": first_pixel, "empty_boxes": "drop"}
    options |= {"difficult": case.pick([True, False])}
    split = "train" if with_lists else case.pick(["all"], drawn.SPLITS, share=0.3)
    options |= {} if with_lists else {"shares": {} if split == "all" else drawn.SHARES}
    options |= {"split": "train" if split == "all" else split}

    def read() -> Any:
        data = PascalVOC(root=case.spell(folder), **options)
        assert data.fingerprint() == PascalVOC(root=str(folder), **options).fingerprint()
        return {"classes": data.classes[1:], "samples": boxed_samples(data)}

    return judge(case, read, lambda: voc_samples(folder, names, options, with_lists=with_lists))


def voc_object(case: Case, kinds: list[str]) -> str:
    corners = [case.pick([1, 1.5, 2]), case.pick([1, 2]), case.pick([3, 3.5, 5]), case.pick([3, 4])]
    sides = zip(("xmin", "ymin", "xmax", "ymax"), corners, strict=True)
    box = "".join(f"<{side}>{case.number(corner)}</{side}>" for side, corner in sides)
    boxes = case.pick([f"<bndbox>{box}</bndbox>"], [f"<bndbox>{box}</bndbox>" * 2, ""], share=0.008)
    name = case.pick(kinds, ["", " ", unicodedata.normalize("NFD", kinds[0])], share=0.01)
    answers = ["0", "0", "1", "", "True", "false", " 1 ", "yes", "NO"]
    difficult = case.pick(answers, ["2", "x", "0.0"], share=0.01)
    part = "<part><name>head</name><bndbox><xmin>1</xmin></bndbox></part>"
    return f"<object><name>{case.pick(['', ' '])}{escape(name)}</name>{case.pick(['', '', part])}<difficult>{difficult}</difficult>{boxes}</object>"


def write_xml(case: Case, path: Path, text: str) -> None:
    encoding = case.pick(["utf-8"] * 4 + ["utf-8-sig", "utf-16"], ["latin-1", "gbk", "shift_jis", "none"], share=0.05)
    declared = case.pick([encoding.removesuffix("-sig").upper()], ["utf-8", "x-none"], share=0.008)
    head = case.pick([f'<?xml version="1.0" encoding="{declared}"?>\n'] * 2 + [""])
    case.sound = case.sound and encoding not in ("latin-1", "gbk", "shift_jis", "none")
    raw = (head + text).encode("utf-8" if encoding == "none" else encoding, "xmlcharrefreplace")
    path.write_bytes(raw if case.pick([True], [False], share=0.004) else raw[: len(raw) // 2])


def voc_annotation(path: Path) -> ElementTree.Element:
    raw = path.read_bytes()
    try:
        return ElementTree.fromstring(raw)
    except (ElementTree.ParseError, LookupError) as error:
        raise Refused(str(error)) from None
    except ValueError:
        with drawn.refusing(ElementTree.ParseError, ValueError, LookupError):
            return ElementTree.fromstring(raw.decode(raw.decode("latin-1").split('"')[3]))


def voc_samples(folder: Path, names: list[str], options: dict[str, Any], *, with_lists: bool) -> Any:
    trees = {file.stem: voc_annotation(file) for file in sorted((folder / "Annotations").iterdir())}
    stems = of_split(sorted(trees), options["split"]) if options.get("shares") else sorted(trees)
    if with_lists:
        lines = text_of(folder / "ImageSets" / "Main" / "train.txt").split("\n")
        stems = [line.strip() for line in lines if line.strip()]
        stems = [stem if stem in trees else stem.rsplit(None, 1)[0] for stem in stems]
        if len(set(stems)) < len(stems) or not set(stems) <= set(trees) or not stems:
            raise Refused("a name is unknown, or listed twice")
    samples = list[dict[str, Any]]()
    objects = {stem: [voc_parsed(node) for node in tree.iter("object")] for stem, tree in trees.items()}
    kinds = sorted({kind for entries in objects.values() for kind, _, _ in entries})
    if not kinds or len({unicodedata.normalize("NFC", x) for x in kinds}) < len(kinds):
        raise Refused("no objects, or two classes look the same")
    for number, stem in enumerate(stems):
        high, wide = (int(drawn.number_of(trees[stem].findtext(f"size/{x}"))) for x in ("height", "width"))
        listed = (trees[stem].findtext("filename") or "").strip()
        is_image = os.path.splitext(listed)[0] == stem and listed.lower().endswith(KNOWN)
        file = listed if is_image else f"{stem}.jpg"
        if not with_lists:
            file = next(name for name in names if os.path.splitext(name)[0] == stem)
        sample = sample_of(folder / "JPEGImages" / file, number, [high, wide])
        for kind, (x1, y1, x2, y2), is_difficult in objects[stem]:
            x1, y1 = x1 - options["first_pixel"], y1 - options["first_pixel"]
            refuse(not (0 <= x1 <= x2 <= wide and 0 <= y1 <= y2 <= high), "beyond the image")
            crowd = is_difficult and not options["difficult"]
            if x1 < x2 and y1 < y2 and not (options["training"] and crowd):
                sample["boxes"].append([x1, y1, x2, y2])
                sample["labels"].append(kinds.index(kind) + 1)
                sample["classes"].append(kind)
                sample["crowd"].append(crowd)
                sample["area"].append((x2 - x1) * (y2 - y1))
        samples.append(sample)
    return {"classes": kinds, "samples": with_boxes(samples, training=options["training"])}


def voc_parsed(node: ElementTree.Element) -> tuple[str, list[float], bool]:
    boxes, kind = node.findall("bndbox"), (node.findtext("name") or "").strip()
    answer = (node.findtext("difficult") or "").strip().lower()
    refuse(len(boxes) != 1 or not kind or answer not in DIFFICULT, "no box, name or answer")
    with drawn.refusing(ValueError):
        corners = [float(boxes[0].findtext(x) or "") for x in ("xmin", "ymin", "xmax", "ymax")]
    return kind, corners, DIFFICULT[answer]


def hugging_face(case: Case) -> bool:
    root = case.folder / "rows"
    root.mkdir()
    kinds = case.words(3)
    upright, form = case.pick([True, False]), case.pick(["parquet", "arrow"])
    files = dict[str, list[Path]]()
    kind_of_label = case.pick(["text", "class", "class", "number"])
    labels = (kinds, [None]) if kind_of_label == "text" else (range(len(kinds)), [-1, 7, None])
    for split in case.pick([["train"], ["train", "test"], ["train", "validation", "test"]]):
        for shard in range(case.pick([1, 2])):
            rows = [{"image": hf_image(case), "label": case.pick(*labels, share=0.004)} for _ in range(3)]
            images = pa.array([row["image"] for row in rows], pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
            features = {"label": {"_type": "ClassLabel", "names": case.pick([kinds], [kinds[::-1], [*kinds, kinds[0]]], share=0.01)}}
            metadata = {"huggingface": json.dumps({"info": {"features": features}})}
            rows_of_file = pa.table({"image": images, "label": pa.array([row["label"] for row in rows])})
            if kind_of_label == "class":
                rows_of_file = rows_of_file.replace_schema_metadata(metadata)
            name = case.pick([f"{split}-{shard:05}-of-00002", f"{split}_{shard}"])
            path = root / f"{name}.{form}"
            if form == "parquet":
                parquet.write_table(rows_of_file, path)
            else:
                with pa.ipc.new_stream(path, rows_of_file.schema) as stream:
                    stream.write_table(rows_of_file)
            path.write_bytes(drawn.damage(case, path.read_bytes(), share=0.004))
            files.setdefault(HF[split], []).append(path)

    def read() -> Any:
        place = case.spell(root)
        data = {split: HuggingFaceImages(root=place, split=split, upright=upright, shares={}) for split in files}
        return {split: [{**x, "class": data[split].classes[x["label"]]} for x in map(data[split].__getitem__, range(len(data[split])))] for split in files}

    return judge(case, read, lambda: hf_samples(files, upright=upright))


HF = {"train": "train", "validation": "valid", "test": "test"}


def hf_image(case: Case) -> Any:
    raw, _ = drawn.draw_image(case, 5, 4)
    return case.pick(
        [{"bytes": raw, "path": "a.png"}, {"bytes": raw, "path": None}], [None, {"bytes": None, "path": "a.png"}, {"bytes": None, "path": None}], share=0.004
    )


def hf_samples(files: dict[str, list[Path]], *, upright: bool) -> Any:
    tables = {split: [hf_table(path) for path in sorted(paths)] for split, paths in files.items()}
    named = dict[str, list[str]]()
    for split, parts in tables.items():
        lists = [
            json.loads(part.schema.metadata[b"huggingface"])["info"]["features"]["label"]["names"]
            for part in parts
            if b"huggingface" in (part.schema.metadata or {})
        ]
        refuse(any(len({*x}) < len(x) or x != lists[0] for x in lists), "classes")
        named |= {split: lists[0]} if lists else {}
        labels = [x for part in parts for x in part["label"].to_pylist()]
        refuse(split == "test" and {*labels} in ({-1}, {None}), "no labels")
        refuse(any(x is None or (named and not 0 <= x < len(lists[0])) for x in labels), "labels")
    return {
        split: [
            {
                "class": named[split][row["label"]] if split in named else str(row["label"]),
                "image": drawn.pixels_of((row["image"] or {}).get("bytes") or b"", upright=upright),
            }
            for part in parts
            for row in part.to_pylist()
        ]
        for split, parts in tables.items()
    }


def hf_table(path: Path) -> pa.Table:
    with drawn.refusing(pa.ArrowException, OSError):
        if path.suffix == ".parquet":
            return parquet.read_table(path)
        with pa.memory_map(str(path)) as file:
            return pa.ipc.open_stream(file).read_all()


def image_file(case: Case) -> bool:
    raw, ending = drawn.draw_image(case, case.pick([1, 3, 8, 17]), case.pick([1, 2, 9]))
    path = case.folder / f"a{ending}"
    raw = declare(case, raw) if case.pick([True] + [False] * 9) else drawn.damage(case, raw, share=0.3)
    path.write_bytes(raw)
    mode = case.pick([("rgb", "RGB"), ("rgb", "RGB"), ("gray", "L")])
    upright = case.pick([True, False])
    read = read_upright if upright else read_image
    return judge(case, lambda: read(path, mode=mode[0]), lambda: drawn.pixels_of(path.read_bytes(), mode[1], upright=upright))


def channels(case: Case) -> bool:
    """Arrays, and images with numbers of 16 bits, as they are stored."""
    numbers = np.random.default_rng(case.random.randrange(1 << 16))
    count = case.pick([1, 2, 3])
    shape = case.pick([(count, 4, 5), (4, 5, count)], [(4, 5), (count,), (0, 4, 5), (1, count, 4, 5)])
    kind = case.pick(["u1", "<u2", ">u2", "<f4", "f8", "?"], ["<i2", "c8", "U1", "O"])
    array = (numbers.uniform(0, 200, shape)).astype(kind)
    if array.dtype.kind == "f" and array.size and case.pick([False], [True], share=0.1):
        array.flat[0] = case.pick([np.nan, np.inf])
    path = case.folder / case.pick(["a.npy", "a.png", "a.tif"])
    if path.suffix == ".npy" or array.dtype not in ("u1", "u2") or array.ndim != 3 or not array.size:
        (path := path.with_suffix(".npy")).write_bytes(npy_of(array))
    else:
        array = array[:1] if shape[1:] == (4, 5) else array[:, :, :1].transpose(2, 0, 1)
        Image.fromarray(array[0].astype(array.dtype.newbyteorder("="))).save(path)
        count = 1
    path.write_bytes(drawn.damage(case, path.read_bytes()))

    def reference() -> Any:
        raw = path.read_bytes()
        with drawn.refusing(Exception):
            if path.suffix == ".npy":
                stored = np.load(io.BytesIO(raw), allow_pickle=False)
            else:
                with Image.open(io.BytesIO(raw)) as image:
                    stored = np.asarray(image)
        stored = stored[None] if stored.ndim == 2 else stored
        if stored.ndim == 3 and len(stored) != count and stored.shape[2] == count:
            stored = stored.transpose(2, 0, 1)
        refuse(stored.ndim != 3 or len(stored) != count or not stored.size, "another shape")
        if stored.dtype.kind not in "uf?b" or stored.dtype.kind + str(stored.itemsize) in ("u4", "u8"):
            raise Refused("another type")
        refuse(not np.isfinite(stored).all(), "no numbers")
        scale = {"b": 255, "u": 1 if stored.itemsize == 1 else 1 / 65535}.get(stored.dtype.kind, 1)
        return Near(stored.astype(np.float64) * scale, 1e-4)

    return judge(case, lambda: read_channels(path, count), reference)


def npy_of(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def declare(case: Case, raw: bytes) -> bytes:
    """Return an image whose header says another size."""
    case.sound = False
    width, height = case.pick([0, 1, 2, 40, 60_000]), case.pick([0, 1, 7, 60_000])
    if raw.startswith(b"\x89PNG"):
        header = b"IHDR" + struct.pack(">II", width, height) + raw[24:29]
        return raw[:12] + header + zlib.crc32(header).to_bytes(4, "big") + raw[33:]
    start = max(raw.find(b"\xff\xc0"), raw.find(b"\xff\xc2")) if raw[:2] == b"\xff\xd8" else -1
    if start < 0:
        return raw[: len(raw) // 2]
    return raw[: start + 5] + struct.pack(">HH", height, width) + raw[start + 9 :]


def test_images(tmp_path: Path) -> None:
    shares = {class_folders: 0.08, table: 0.2, coco: 0.15, voc: 0.15, hugging_face: 0.06, image_file: 0.1, channels: 0.08}
    for test, share in shares.items():
        drawn.try_cases(tmp_path, test, share=share)
