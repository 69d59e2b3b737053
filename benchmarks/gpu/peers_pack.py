"""``peers.py pack``: verl with what it needs, for a GPU machine without a network, as one archive."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

MOST_BYTES = 60_000_000
PINS = (
    "verl==0.9.1", "TransferQueue==0.1.11", "tensordict==0.10.0", "pyvers==0.1.0", "torchdata==0.11.0",
    "hydra-core==1.3.8", "omegaconf==2.3.1", "codetiming==1.4.0", "peft==0.21.2", "cachetools==8.0.2",
    "cloudpickle==3.1.3",
)  # fmt: skip
"""What verl imports with these settings, less torch, transformers, SGLang, Ray and their needs."""
FROM_SOURCE = ("antlr4-python3-runtime==4.9.3",)
"""Has no wheel; pure Python."""
FALLBACKS = {
    "pyarrow": ("pyarrow==26.0.1",),
    "pandas": ("pandas==3.1.1",),
    "dateutil": ("python-dateutil==2.9.0.post0",),
    "six": ("six==1.17.0",),
    "xxhash": ("xxhash==3.6.0",),
    "prometheus_client": ("prometheus_client==0.26.0",),
}
"""By import name; each gets a separate folder, which is used only where the machine has no such package."""
FALLBACK_FOLDER = "peers_fallback"
DROP = re.compile(
    r"^(scripts|tutorial|recipe|pydevd_plugins)/|(^|/)(tests?|__pycache__|include|includes)/|\.pyc$|\.pyx$|\.pxd$|\.pxi$|\.h$"
    r"|pyarrow/(libarrow_flight|libarrow_substrait|libarrow_s3|_flight|_s3fs|_substrait|src/)"
)
"""Not imported: examples, tests, headers, and the parts of Arrow for servers and object stores."""


def pack(folder: Path) -> Path:
    """Download, unpack and compress; returns ``folder/peers.tar.xz``.

    Raises:
        subprocess.CalledProcessError: pip could not get a package.
        ValueError: the archive is larger than :data:`MOST_BYTES`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / "peers.tar.xz"
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        site = Path(temporary, "site")
        _unpack(_download(PINS, Path(temporary, "wheels")), site)
        _unpack(_build(FROM_SOURCE, Path(temporary, "built")), site)
        for name, pins in FALLBACKS.items():
            _unpack(_download(pins, Path(temporary, name)), site / FALLBACK_FOLDER / name)
        for library in site.rglob("*.so*"):
            subprocess.run(["strip", "--strip-unneeded", str(library)], check=False)
        with tarfile.open(archive, "w:xz", preset=6) as tar:
            tar.add(site, arcname=".")
    size = archive.stat().st_size
    print(f"{archive}: {size / 1e6:.1f} MB")
    if size > MOST_BYTES:
        raise ValueError(
            f"{archive.name} has {size / 1e6:.1f} MB; at most {MOST_BYTES / 1e6:.0f} may be sent"
        )
    return archive


def _download(pins: Iterable[str], into: Path) -> list[Path]:
    """Wheels for Python 3.12 on Linux, without their dependencies."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", "3.12", "--implementation", "cp", "-d", str(into)]
    for abi in ("cp312", "abi3", "none"):
        command += ["--abi", abi]
    for tag in ("manylinux2014", *(f"manylinux_2_{minor}" for minor in range(17, 36))):
        command += ["--platform", f"{tag}_x86_64"]
    subprocess.run([*command, "--platform", "any", *pins], check=True)
    return sorted(into.glob("*.whl"))


def _build(pins: Iterable[str], into: Path) -> list[Path]:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(into)]
    subprocess.run([*command, *pins], check=True)
    return sorted(into.glob("*.whl"))


def _unpack(wheels: Iterable[Path], site: Path) -> None:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as members:
            for member in members.namelist():
                into = re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", member)
                if member.endswith("/") or re.match(r"^[^/]+\.data/", into) or DROP.search(into):
                    continue
                target = site / into
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(members.read(member))
