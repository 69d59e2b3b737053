"""The shell part of the batch script: start one task a node, pass signals on, come back.

The shell does only what has to happen on the host itself, outside any container: it turns signals
into a stop file, waits for the commit, and asks SLURM to run the job again.  A job that its user
cancelled is no longer RUNNING by then, and never returns.
"""

from __future__ import annotations

BODY = r"""
#   sbatch [--nodes N] slurm/train.sbatch [CONFIG] [key=value ...]
# This is what `python -m orhpc.launch` renders (see --dry-run); options on the command line come first.
# A second start is always a resume; the run directory says where it stands.

set -u
cd "${SLURM_SUBMIT_DIR:?start this script with sbatch}" || exit 2
@MODULES@
python=@PYTHON@
if [ -z "$python" ]; then
  python=${ORHPC_PYTHON:-python3}
  [ -n "${ORHPC_PYTHON:-}" ] || [ ! -x .venv/bin/python ] || python=.venv/bin/python
fi

job_folder=$(mktemp -d "/tmp/orhpc-$SLURM_JOB_ID-XXXXXX") || exit 1
trap 'rm -rf "$job_folder"' EXIT
export ORHPC_JOB_FOLDER=$job_folder ORHPC_CHAIN=${ORHPC_CHAIN:-$SLURM_JOB_ID}

about_job() { timeout 20 scontrol show job --oneliner "$SLURM_JOB_ID" 2>/dev/null; }

# The driver polls the stop file, commits, and leaves with exit code 75.
stop() {
  echo "orhpc: SIG$1 $(date +%FT%T), committing"
  : >"$job_folder/stop"
  about_job >"$job_folder/job.part" && mv "$job_folder/job.part" "$job_folder/job"
}
trap 'stop USR2' USR2
trap 'stop TERM' TERM

srun --kill-on-bad-exit=1 --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpu-bind=none \
  --mpi=none@SRUN_ARGS@ \
  @INSIDE@"$python" -m orhpc.launch.node "$@" &
while true; do
  wait $!
  code=$?
  kill -0 $! 2>/dev/null || break
done
wait $!
code=$?
attempt=$(cat "$job_folder/attempt" 2>/dev/null) && echo "$code" >"$attempt/srun_exit"

# Finished, a wrong config, a failed preflight, a crash loop, a busy run directory: no use in coming back.
case $code in 0 | 2 | 3 | 4 | 5) exit "$code" ;; esac

about=" $(about_job) "
case $about in
  *" JobState=RUNNING "*) ;;
  *) echo "orhpc: exit $code, and the job is cancelled or ending: not requeued"; exit "$code" ;;
esac
trap '' TERM USR2
exclude=$(cat "$job_folder/exclude" 2>/dev/null)
if timeout 20 scontrol requeue "$SLURM_JOB_ID"; then
  # SLURM ends this shell in a moment; nodes can be excluded only while the job is pending.
  if [ -n "$exclude" ]; then
    for _ in 1 2 3 4 5 6 7 8 9 10; do
      timeout 5 scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$exclude" && break
      sleep 0.5
    done
  fi
  exit 0
fi
# This site forbids requeue: the same script as a new job that starts once this one has ended.
field() { sed -n "s/.* $1=\([^ ]*\) .*/\1/p" <<<"$about"; }
successor=(--dependency="afterany:$SLURM_JOB_ID" --nodes="$SLURM_JOB_NUM_NODES")
successor+=(--job-name="$SLURM_JOB_NAME" --partition="$SLURM_JOB_PARTITION" --chdir="$PWD")
successor+=(--time="$(field TimeLimit)" --output="$(field StdOut)")
[ -z "${SLURM_JOB_ACCOUNT:-}" ] || successor+=(--account="$SLURM_JOB_ACCOUNT")
[ -z "${SLURM_JOB_QOS:-}" ] || successor+=(--qos="$SLURM_JOB_QOS")
[ -z "$exclude" ] || successor+=(--exclude="$exclude")
timeout 60 sbatch "${successor[@]}" "$0" "$@" && exit 0
exit "$code"
"""
