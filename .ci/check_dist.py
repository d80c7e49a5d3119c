"""Check that wheel and sdist hold every file of the three packages."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path


def main(folder: str) -> None:
    """Compare what git tracks with what was built."""
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split("\n")  # noqa: S607
    packages = [path for path in tracked if path.startswith(("cli/", "packer/", "gpu/"))]
    (wheel,), (sdist,) = Path(folder).glob("*.whl"), Path(folder).glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = set(archive.namelist())
    with tarfile.open(sdist) as tar:
        in_sdist = {name.partition("/")[2] for name in tar.getnames()}
    missing = [f"wheel: {path}" for path in packages if path.partition("/")[2] not in in_wheel]
    missing += [f"sdist: {path}" for path in tracked if path and not path.startswith(".git") and path not in in_sdist]
    if missing:
        sys.exit("missing from " + "\nmissing from ".join(missing))
    sys.stdout.write(f"{wheel.name} and {sdist.name} are complete: {len(packages)} files\n")


if __name__ == "__main__":
    main(sys.argv[1])
