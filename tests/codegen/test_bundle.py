"""Folders of compiled kernels: what is written is read back whole, or refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from maskc.codegen import nvrtc
from maskc.codegen.bundle import MANIFEST, Bundle, load_bundle, write_bundle
from maskc.codegen.kernels import KERNELS, Kernel, Request
from maskc.codegen.nvrtc import Cubin
from maskc.diagnostics import MaskcError
from tests.codegen.suite import suite


def built(name: str) -> list[tuple[Kernel, Cubin]]:
    (kernel,) = KERNELS["prep"](Request(*suite()[name]))
    return [(kernel, kernel.compile())]


def write(folder: Path, name: str = "doc_prefix", version: str = "1.0") -> Path:
    return write_bundle(folder, *suite()[name], built(name), version)


def refusal(folder: Path) -> str:
    with pytest.raises(MaskcError) as caught:
        load_bundle(folder, "1.0")
    assert caught.value.code == "M608"
    return str(caught.value)


def test_round_trip(tmp_path: Path) -> None:
    path = write(tmp_path / "out")
    bundle = load_bundle(tmp_path / "out", "1.0")
    (kernel, cubin), (read,) = built("doc_prefix")[0], bundle.kernels
    assert path == tmp_path / "out" / MANIFEST
    assert (bundle.fn, bundle.program) == suite()["doc_prefix"]
    assert (read.name, read.entry, read.spec, read.dynamic_shared) == ("prep", "prep", kernel.spec.as_json(), 0)
    assert read.cubin == Cubin("prep", *(getattr(cubin, f) for f in Cubin.__dataclass_fields__ if f != "name"))


def test_the_manifest_says_what_the_kernels_need(tmp_path: Path) -> None:
    manifest = json.loads(write(tmp_path).read_text())
    (kernel,) = manifest["kernels"]
    assert manifest["mask"] == "doc_prefix"
    assert kernel["spec"]["vectors"] == ["lts", "ute"]
    assert kernel["registers"] > 0
    assert (kernel["spill_stores"], kernel["spill_loads"], kernel["stack"], kernel["notes"]) == (0, 0, 0, [])
    assert kernel["shared"] == {"static": 64, "dynamic": 0}
    assert kernel["instructions"]["HGMMA"] == 0
    assert (kernel["arch"], kernel["key"]) == ("sm_90a", built("doc_prefix")[0][1].key)
    source = (tmp_path / kernel["source"]["file"]).read_text()
    assert "mask_column" in source
    assert "#include" not in source


def test_a_bundle_needs_no_nvrtc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    code = """
import sys
sys.modules["cuda.bindings"] = None
from pathlib import Path
from maskc.codegen.bundle import load_bundle
from maskc.codegen.kernels import KERNELS, Request
bundle = load_bundle(Path(sys.argv[1]), "1.0")
bundle.install()
(kernel,) = KERNELS["prep"](Request(bundle.fn, bundle.program))
assert kernel.compile() is bundle.kernels[0].cubin
print("ran")
"""
    environment = {**os.environ, "MASKC_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=environment)
    assert done.stdout == "ran\n", done.stderr


def test_an_undecided_mask_has_no_intervals(tmp_path: Path) -> None:
    fn, _ = suite()["doc_prefix"]
    write_bundle(tmp_path, fn, None, [], "1.0")
    assert load_bundle(tmp_path, "1.0") == Bundle(tmp_path, fn, None, ())


def test_writing_again_leaves_one_bundle_and_the_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    write(tmp_path)
    first = set(os.listdir(tmp_path))
    write(tmp_path)
    assert set(os.listdir(tmp_path)) == first
    write(tmp_path, "doc_causal")
    assert load_bundle(tmp_path, "1.0").fn.name == "doc_causal"
    assert len(os.listdir(tmp_path)) == len(first)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_reader_sees_the_old_bundle_or_the_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer is stopped before every step that a reader could notice, and a reader looks."""
    write(tmp_path)
    replace, seen = os.replace, []

    def look_first(source: str, target: Path) -> None:
        seen.append(load_bundle(tmp_path, "1.0").fn.name)
        replace(source, target)

    monkeypatch.setattr(os, "replace", look_first)
    write(tmp_path, "doc_causal")
    assert set(seen) == {"doc_prefix"}
    assert load_bundle(tmp_path, "1.0").fn.name == "doc_causal"


@pytest.mark.parametrize("suffix", ["cubin", "ir", "intervals", "log"])
def test_a_changed_or_missing_file_is_refused(tmp_path: Path, suffix: str) -> None:
    write(tmp_path)
    (path,) = tmp_path.glob(f"*.{suffix}")
    path.write_bytes(path.read_bytes() + b"x")
    assert f"{path.name} was changed" in refusal(tmp_path)
    path.unlink()
    assert f"{path.name}: no such file" in refusal(tmp_path)


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    assert f"{MANIFEST}: no such file" in refusal(tmp_path)
    manifest = json.loads(write(tmp_path).read_text())

    def with_manifest(value: object) -> str:
        (tmp_path / MANIFEST).write_text(json.dumps(value))
        return refusal(tmp_path)

    assert "made by maskc 0.9, this is 1.0" in with_manifest(manifest | {"maskc": "0.9"})
    assert "not what maskc writes" in with_manifest([])
    assert "not what maskc writes" in with_manifest({k: v for k, v in manifest.items() if k != "kernels"})
    assert "is not a file of the folder" in with_manifest(manifest | {"ir": {"file": "../secret", "sha256": ""}})


def test_without_nvdisasm_the_counts_are_null(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maskc.codegen.disasm.count", lambda *_: None)
    assert json.loads(write(tmp_path).read_text())["kernels"][0]["instructions"] is None


def test_installed_cubins_are_those_of_the_last_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_installed", {})
    write(tmp_path)
    load_bundle(tmp_path, "1.0").install()
    again = load_bundle(tmp_path, "1.0")
    again.install()
    assert built("doc_prefix")[0][1] is again.kernels[0].cubin
