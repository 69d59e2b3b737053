#!/usr/bin/env bash
# tests/slurm/newest.sh [-d SUITE] [-r ROOT] [--] [pytest's arguments]
#
# Run tests/slurm, the long rehearsals included, on the release of SLURM that another Debian has (by default
# forky: 26.05), in namespaces with that Debian's files.  It needs root on Debian, mmdebstrap (it is installed if it
# is missing), and a Python of .venv that is not the system's own.  ROOT keeps the files for the next time.
set -euo pipefail
cd "$(dirname "$0")/../.."

suite=forky root=
while getopts d:r: option; do
  case $option in
    d) suite=$OPTARG ;;
    r) root=$OPTARG ;;
    *) exit 2 ;;
  esac
done
shift $((OPTIND - 1))
[ "$(id -u)" = 0 ] || { echo "newest.sh: needs root" >&2; exit 2; }
python=$(.venv/bin/python -c 'import sys; print(sys.base_prefix)')
[ "$python" != /usr ] || { echo "newest.sh: .venv uses the system's Python; build it with another" >&2; exit 2; }
command -v mmdebstrap >/dev/null ||
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends mmdebstrap; } >/dev/null

if [ -z "$root" ]; then
  root=$(mktemp -d /tmp/orhpc-debian-XXXXXX)
  trap 'rm -rf --one-file-system "$root"' EXIT
fi
mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null | grep -oE -m1 'https?://[^ ]+/debian/?( |$)') || true
# A mirror that is a snapshot may be older than its index allows.
[ -x "$root/usr/sbin/slurmctld" ] || mmdebstrap --quiet --variant=minbase \
  --aptopt='Acquire::Check-Valid-Until "false"' \
  --include=slurm-wlm,munge,iproute2,procps,ca-certificates,libssl3,libffi8,libbz2-1.0,liblzma5,libsqlite3-0 \
  "$suite" "$root" ${mirror:+"$mirror"}

# nsenter, with which the test cluster enters its nodes, changes to the root of the namespace's mounts.  A chroot
# would not do, so this Debian's files become that root.
unshare --mount --propagation private bash -euc '
  repository=$PWD root=$1 python=$2
  shift 2
  mount --bind "$root" "$root"
  cd "$root"
  for folder in "$repository" "$python" /sys /dev; do
    mkdir -p ".$folder"
    mount --rbind "$folder" ".$folder"
  done
  mkdir -p old
  mount -t proc proc proc
  cp -L /etc/hosts /etc/hostname /etc/resolv.conf etc/
  pivot_root . old
  umount -l /old
  cd "$repository"
  slurmctld -V
  export OMP_WAIT_POLICY=passive
  [ $# -gt 0 ] || set -- tests/slurm
  .venv/bin/python -m pytest -rfEs "$@"
' - "$root" "$python" "$@"
