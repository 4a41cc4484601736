"""The pixels, labels and minibatches of an archive, and their order."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from cudafuture.data import TgzImages, classes_of
from data.archives import PACKINGS, SIDE, compress, images, numbers, pixels_of, png, tar, write_archive

WAYS = [(packing, index) for packing in PACKINGS for index in ("auto", False)]
several_ways = pytest.mark.parametrize(("packing", "index"), WAYS)


@several_ways
def test_pixels_and_labels_follow_archive_order(tmp_path: Path, packing: str, index: Any) -> None:
    archive = write_archive(tmp_path, images(7), packing)
    dataset = TgzImages(archive, index=index)
    assert dataset.classes == ["x", "y", "z"]
    items = list(dataset)
    assert numbers(items) == list(range(7))
    for i, (pixels, label) in enumerate(items):
        assert pixels.dtype == torch.uint8
        assert pixels.is_contiguous()
        assert torch.equal(pixels, pixels_of(i))
        assert label.dtype == torch.int64
        assert dataset.classes[label] == "zyx"[i % 3]


@several_ways
def test_minibatches_keep_order_and_partial_last(tmp_path: Path, packing: str, index: Any) -> None:
    batches = list(TgzImages(write_archive(tmp_path, images(7), packing), index=index, batch=3))
    assert [tuple(pixels.shape) for pixels, _ in batches] == [(n, 3, SIDE, SIDE) for n in (3, 3, 1)]
    assert [labels.tolist() for _, labels in batches] == [[2, 1, 0], [2, 1, 0], [2]]
    assert numbers(batches) == list(range(7))


@several_ways
def test_archive_classes_are_sorted(tmp_path: Path, packing: str, index: Any) -> None:
    archive = write_archive(tmp_path, images(7), packing)
    assert classes_of(archive) == ["x", "y", "z"]
    TgzImages(archive, index=index)
    assert classes_of(str(archive)) == ["x", "y", "z"]


@several_ways
def test_given_classes_set_labels(tmp_path: Path, packing: str, index: Any) -> None:
    dataset = TgzImages(write_archive(tmp_path, images(3), packing), index=index, classes=["y", "unused", "z", "x"])
    assert [int(label) for _, label in dataset] == [2, 0, 3]


def test_empty_archive_has_no_images(tmp_path: Path) -> None:
    for packing in PACKINGS:
        archive = write_archive(tmp_path, [], packing)
        assert classes_of(archive) == []
        assert list(TgzImages(archive)) == list(TgzImages(archive, batch=2, shuffle=True, index=False)) == []


@pytest.mark.parametrize("size", [4, (4, 9)])
def test_images_are_resized_exactly(tmp_path: Path, size: int | tuple[int, int]) -> None:
    height, width = (4, 4) if size == 4 else (4, 9)
    ((pixels, _),) = TgzImages(write_archive(tmp_path, images(1)), size=size)
    image = Image.open(io.BytesIO(png(pixels_of(0)))).resize((width, height), Image.Resampling.BILINEAR)
    assert tuple(pixels.shape) == (3, height, width)
    assert bytes(pixels.permute(1, 2, 0).flatten().tolist()) == image.tobytes()


def test_images_are_converted_to_mode(tmp_path: Path) -> None:
    ((pixels, _),) = TgzImages(write_archive(tmp_path, images(1)), mode="L")
    assert tuple(pixels.shape) == (1, SIDE, SIDE)
    assert bytes(pixels.flatten().tolist()) == Image.open(io.BytesIO(png(pixels_of(0)))).convert("L").tobytes()


@pytest.mark.parametrize("batch", [None, 2])
def test_transform_gets_uint8_tensor(tmp_path: Path, batch: int | None) -> None:
    seen: list[torch.Tensor] = []

    def halve(pixels: torch.Tensor) -> torch.Tensor:
        seen.append(pixels)
        return pixels[:, :2, :2].float() / 2

    items = list(TgzImages(write_archive(tmp_path, images(3)), batch=batch, transform=halve))
    assert all(torch.equal(pixels, pixels_of(i)) for i, pixels in enumerate(seen))
    results = torch.cat([pixels.view(-1, 3, 2, 2) for pixels, _ in items])
    assert torch.equal(results, torch.stack([pixels_of(i)[:, :2, :2].float() / 2 for i in range(3)]))


def test_different_sizes_ask_for_size(tmp_path: Path) -> None:
    archive = write_archive(tmp_path, [*images(1), ("a/wide.png", png(torch.zeros(3, 2, 9, dtype=torch.uint8)))])
    with pytest.raises(ValueError, match=r"6 x 6 and 2 x 9 pixels .* size="):
        list(TgzImages(archive, batch=2))
    assert numbers(TgzImages(archive, batch=2, size=SIDE))[:1] == [0]


@several_ways
def test_directories_are_skipped_and_parent_is_label(tmp_path: Path, packing: str, index: Any) -> None:
    names = ["../../up/a.png", "/etc/abs/b.png", "./here/c.png", "deep/er/than/d.png", "x/../odd/e.png", "two//f.png"]
    folder = tarfile.TarInfo("here")
    folder.type = tarfile.DIRTYPE
    entries: list[tuple[str, bytes | tarfile.TarInfo]]
    entries = [("here", folder), *((name, png(pixels_of(i))) for i, name in enumerate(names))]
    dataset = TgzImages(write_archive(tmp_path, entries, packing), index=index)
    found = [dataset.classes[label] for _, label in dataset]
    assert found == ["up", "abs", "here", "than", "odd", "two"]
    assert {path.name for path in tmp_path.iterdir()} <= {f"images.{packing}", f"images.{packing}.index"}


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
@pytest.mark.parametrize("index", ["auto", False])
def test_long_and_non_ascii_names_are_read(tmp_path: Path, format: int, index: Any) -> None:
    long = "d" * 90 if format == tarfile.USTAR_FORMAT else "é" * 300
    entries = [(f"{long}/{'f' * 80}.png", png(pixels_of(0))), *images(1)]
    archive = tmp_path / "images.tar"
    archive.write_bytes(tar(entries, format))
    assert TgzImages(archive, index=index).classes == sorted([long, "z"])
    assert numbers(TgzImages(archive, index=index)) == [0, 0]


def test_concatenated_gzip_is_one_archive(tmp_path: Path) -> None:
    data = tar(images(5))
    archive = tmp_path / "images.tgz"
    archive.write_bytes(compress(data[:1000], "tgz") + compress(data[1000:], "tgz") + bytes(600))
    assert numbers(TgzImages(archive, index=False)) == list(range(5))
    archive.write_bytes(compress(data[:1000], "tgz") + compress(data[1000:], "tgz"))
    assert numbers(TgzImages(archive, index=True)) == list(range(5))


@several_ways
def test_shuffle_depends_on_seed_and_epoch(tmp_path: Path, packing: str, index: Any) -> None:
    archive = write_archive(tmp_path, images(40), packing)
    dataset = TgzImages(archive, index=index, shuffle=30, seed=1)
    orders = []
    for epoch in (0, 1, 0):
        dataset.set_epoch(epoch)
        orders.append(numbers(dataset))
        assert sorted(orders[-1]) == list(range(40))
    assert orders[0] == orders[2] != orders[1]
    assert orders[0] != list(range(40))
    assert numbers(TgzImages(archive, index=index, shuffle=30, seed=2)) == orders[1]  # seed + epoch


def test_index_shuffles_whole_archive(tmp_path: Path) -> None:
    archive = write_archive(tmp_path, images(60))
    assert max(numbers(TgzImages(archive, shuffle=1))[:10]) > 40
    assert max(numbers(TgzImages(archive, shuffle=4, index=False))[:10]) < 14
    assert numbers(TgzImages(archive, shuffle=True, index=False)) != list(range(60))


@pytest.mark.parametrize(
    "arguments",
    [
        {"index": "never"},
        {"on_error": "ignore"},
        {"batch": 0},
        {"shuffle": -1},
        {"size": 0},
        {"size": (3, -1)},
        {"mode": "F"},
        {"mode": "nonsense"},
        {"mode": "P"},
        {"shard": (2, 2)},
        {"classes": ["a", "a"]},
        {"classes": "names"},
    ],
    ids=str,
)
def test_arguments_out_of_range_are_refused(tmp_path: Path, arguments: dict[str, Any]) -> None:
    archive = write_archive(tmp_path, images(1))
    with pytest.raises(ValueError, match=str(next(iter(arguments)))):
        TgzImages(archive, **arguments)


def test_missing_archive_is_oserror(tmp_path: Path) -> None:
    for call in (TgzImages, classes_of):
        with pytest.raises(FileNotFoundError):
            call(tmp_path / "none.tgz")


@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("PIL.Image", lambda archive: TgzImages(archive)),
        ("rapidgzip", lambda archive: TgzImages(archive, index=True)),
        ("zstandard", lambda archive: classes_of(archive.with_suffix(".zst"))),
    ],
)
def test_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, call: Callable[[Path], object]
) -> None:
    archive = write_archive(tmp_path, images(1))
    archive.with_suffix(".zst").write_bytes(compress(tar(images(1)), "tar.zst"))
    monkeypatch.setitem(sys.modules, module, None)
    package = "pillow" if module.startswith("PIL") else module
    with pytest.raises(ImportError, match=f"run `pip install {package}`"):
        call(archive)


@pytest.mark.slow
def test_import_skips_optional_packages() -> None:
    code = "import sys, cudafuture, cudafuture.data; print({'PIL', 'rapidgzip', 'zstandard'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
