"""Files that are loaded later come only from folders that no other user can change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orhpc.errors import PreflightError
from orhpc.launch.node.compiled_caches import kept_caches
from orhpc.process.own_folders import require_own

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's folder")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "folder"
    made.mkdir(mode=0o700)
    return made


def test_a_folder_of_this_user_is_accepted(folder: Path) -> None:
    require_own(folder, "it")


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777, 0o1777])
def test_a_folder_that_others_can_write_to_is_refused_with_a_remedy(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    with pytest.raises(PreflightError, match=f"chmod go-w {folder}"):
        require_own(folder, "it")


def test_a_symbolic_link_is_followed_once(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert require_own(tmp_path / "link", "it") == folder
    folder.chmod(0o777)
    with pytest.raises(PreflightError, match=f"chmod go-w {folder}"):
        require_own(tmp_path / "link", "it")


def test_a_folder_that_others_can_replace_is_refused(folder: Path) -> None:
    folder.parent.chmod(0o777)
    with pytest.raises(PreflightError, match="may replace"):
        require_own(folder, "it")
    folder.parent.chmod(0o1777)  # like /tmp: only its owner can rename the folder
    require_own(folder, "it")


@needs_root
def test_another_users_folder_is_refused(folder: Path) -> None:
    os.chown(folder, 12345, 12345)
    with pytest.raises(PreflightError, match="belongs to another user"):
        require_own(folder, "it")


@needs_root
def test_compiled_code_is_never_read_from_a_folder_of_another_user(tmp_path: Path) -> None:
    planted = tmp_path / "torchinductor"
    planted.mkdir(mode=0o755)
    os.chown(planted, 12345, 12345)
    with pytest.raises(PreflightError, match=r"TORCHINDUCTOR_CACHE_DIR: .* belongs to another user"):
        kept_caches({"HOME": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(planted)})


def test_caches_are_private_folders_in_the_users_home(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    kept = kept_caches({"HOME": str(tmp_path)})
    assert set(kept) == {"TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"}
    for folder in map(Path, kept.values()):
        assert folder.is_relative_to(tmp_path / ".cache" / "orhpc")
        assert folder.stat().st_mode & 0o777 == 0o700
    assert kept_caches({"HOME": str(tmp_path)}) == kept


def test_nothing_is_cached_without_a_home_folder() -> None:
    assert kept_caches({"HOME": "/proc/nowhere"}) == {}
