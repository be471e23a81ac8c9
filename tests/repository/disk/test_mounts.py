"""Which file system a path is on, by the kernel's list of mounts."""

from __future__ import annotations

import pytest

from edge_server.repository.disk.mounts import file_system, is_layered, is_remote, read_mounts

MOUNTS = """\
22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
30 22 0:26 / /mnt/nas rw,relatime - nfs4 nas:/models rw,vers=4.2
31 22 0:27 / /mnt/with\\040space rw - cifs //box/share rw
32 22 0:28 / /mnt/stick rw - vfat /dev/sda1 rw
33 32 0:29 / /mnt/stick rw - fuseblk /dev/sda2 rw
34 22 0:30 / /mnt/ssh rw shared:2 master:1 - fuse.sshfs robot:/ rw
a line that is none
35 22 0:31 / /var/lib/docker/merged rw - overlay overlay rw
"""


def test_the_longest_mount_point_above_a_path_decides_and_of_several_the_last() -> None:
    table = [
        ("/models", "ext4"),
        ("/mnt/nas", "nfs4"),
        ("/mnt/nas/models/m", "nfs4"),
        ("/mnt/nas2/models", "ext4"),
        ("/mnt/with space/m", "cifs"),
        ("/mnt/stick/m", "fuseblk"),
        ("/mnt/ssh", "fuse.sshfs"),
        ("/var/lib/docker/merged/models", "overlay"),
    ]
    assert [(path, file_system(path, MOUNTS)) for path, _ in table] == table


def test_without_a_list_nothing_is_known() -> None:
    assert file_system("/models", "") == ""


@pytest.mark.parametrize(
    ("kind", "remote", "layered"),
    [
        ("ext4", False, False),
        ("tmpfs", False, False),
        ("fuseblk", False, False),
        ("", False, False),
        ("overlay", False, True),
        ("nfs4", True, False),
        ("fuse.sshfs", True, False),
        ("9p", True, False),
        ("vboxsf", True, False),
    ],
)
def test_what_the_kernel_cannot_tell_of(kind: str, remote: bool, layered: bool) -> None:
    assert (is_remote(kind), is_layered(kind)) == (remote, layered)


def test_this_machine_says_what_its_root_is() -> None:
    assert file_system("/", read_mounts()) or not read_mounts()
