"""The shell part of the batch script: start one task per node, handle signals, requeue the job.

The shell does only what has to happen on the host, outside any container: it turns signals into a stop
file, waits for the commit, and asks SLURM to requeue the job.  A job that its user canceled is no longer
RUNNING by then, and is not requeued.  If SLURM may not requeue the job, a successor job is queued from the
start, so that the run continues even after its first node has lost power.  SLURM's controller may be down
for minutes, so the queries that decide about the requeue are retried.
"""

from __future__ import annotations

BODY = r"""
#   sbatch [--nodes N] slurm/train.sbatch [CONFIG] [key=value ...]
# `python -m orhpc.launch` renders this script (see --dry-run); options on the command line take precedence.
# Every further start resumes from the run directory.

set -u
# A signal would otherwise end this shell before the traps below are set, and nothing would requeue the job.
early=
trap 'early=USR2' USR2
trap 'early=TERM' TERM
cd "${SLURM_SUBMIT_DIR:?start this script with sbatch}" || exit 2
@MODULES@
python=@PYTHON@
if [ -z "$python" ]; then
  python=${ORHPC_PYTHON:-python3}
  [ -n "${ORHPC_PYTHON:-}" ] || [ ! -x .venv/bin/python ] || python=.venv/bin/python
fi
@CHECK@

# An element of a job array is ARRAY_INDEX to SLURM's commands.  SLURM_JOB_ID would not do: that of the last
# element is the array's own id, which stands for all elements.
job=$SLURM_JOB_ID
[ -z "${SLURM_ARRAY_TASK_ID:-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
@ELEMENTS@

# Spare nodes take the places of lost ones, so the loss of a node ends neither job nor step.  This needs
# sbatch's --no-kill too, which `python -m orhpc.launch` requests.
spares=@SPARES@
for word in "$@"; do
  case $word in slurm.spares=*) spares=${word#*=} ;; esac
done
survive=(--kill-on-bad-exit=1)
[ "$spares" = 0 ] || survive=(--kill-on-bad-exit=0 --no-kill)
export ORHPC_SPARES=$spares

job_folder=$(mktemp -d "/tmp/orhpc-$job-XXXXXX") || exit 1
trap 'rm -rf "$job_folder"' EXIT
export ORHPC_JOB_FOLDER=$job_folder ORHPC_CHAIN=${ORHPC_CHAIN:-$job} ORHPC_STARTED=$(date +%s.%N)
ORHPC_OUTPUT=$(readlink -f "/proc/$$/fd/2")
export ORHPC_OUTPUT

# A heterogeneous job has a component for each kind of node, and one step spans them all.  SLURM's commands
# know it by the id of the first component, whose line comes first.
step=(--nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1)
empty_step=(--nodes=1 --ntasks=1)
if [ "${SLURM_HET_SIZE:-1}" -gt 1 ]; then
  step=(--het-group="0-$((SLURM_HET_SIZE - 1))" --ntasks-per-node=1)
  empty_step=("${step[@]}")
fi

first_line() { echo "${1%%$'\n'JobId=*}"; }
show_job() {
  local shown
  shown=$(timeout 20 scontrol show job --oneliner "$job" 2>/dev/null) && first_line "$shown"
}
field() { sed -n "s/.* $1=\([^ ]*\) .*/\1/p" <<<"$job_info"; }

# The driver polls the stop file, commits, and exits with code 75.
# SLURM's job description at the first signal is kept: a preempted job may be canceled before it commits.
# The query runs in the background: bash loses signals that arrive while a trap waits for a program.
stop() {
  local note=first
  if [ -e "$job_folder/stop" ]; then
    note=again
    rm -f "$job_folder/again"
    : >"$job_folder/several"
  else
    : >"$job_folder/stop"
  fi
  printf 'orhpc: SIG%s %(%FT%T)T, committing\n' "$1" -1
  (
    trap '' TERM USR2
    show_job >"$job_folder/$note.$BASHPID" && mv "$job_folder/$note.$BASHPID" "$job_folder/$note"
  ) &
}
trap 'stop USR2' USR2
trap 'stop TERM' TERM
[ -z "$early" ] || stop "$early"

# Runs a SLURM command and retries while the controller is down: its restart may take minutes.
# Stores the command's output in $output; fails if SLURM refuses, or does not answer for too long.
controller_limit=1800
with_retries() {
  local end=$((SECONDS + controller_limit)) reported=
  until output=$(timeout 60 "$@" 2>&1); do
    case $output in
      "" | *"Unable to contact slurm"* | *"timed out"* | *"standby mode"* | *"Zero Bytes"*) ;;
      *) return 1 ;;
    esac
    [ "$SECONDS" -lt "$end" ] || return 1
    [ -n "$reported" ] ||
      echo "orhpc: SLURM's controller does not answer; waiting for up to $controller_limit s"
    reported=1
    sleep 3
  done
}

# If SLURM may not requeue the job: submit the script as a new job, which starts after this one has failed.
successor=
submit_successor() {
  when=$1
  shift
  with_retries scontrol show job --oneliner "$job"
  job_info=" $(first_line "$output") "
  if [ "${SLURM_HET_SIZE:-1}" -gt 1 ]; then
    output="a heterogeneous job has no successor, so SLURM must be allowed to requeue it"
    echo "orhpc: $output" && return 1
  fi
  options=(--parsable --export=ALL --dependency="$when:$job" --chdir="$PWD")
  options+=(--nodes="$SLURM_JOB_NUM_NODES")
  options+=(--job-name="$SLURM_JOB_NAME" --partition="$SLURM_JOB_PARTITION")
  local written excluded
  written=$(readlink -f "/proc/$$/fd/1") # SLURM's description of the job ends at the first blank of a path
  [ -f "$written" ] || written=$(field StdOut)
  options+=(--time="$(field TimeLimit)" --output="${written//%/%%}")
  excluded=$(field ExcNodeList)
  case $excluded in "" | "(null)") ;; *) options+=(--exclude="$excluded") ;; esac
  # The successor of an array's element is an array of that one element, so that it finds its arguments.
  [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || options+=(--array="$SLURM_ARRAY_TASK_ID")
  [ "$spares" = 0 ] || options+=(--no-kill)
  [ -z "${SLURM_JOB_ACCOUNT:-}" ] || options+=(--account="$SLURM_JOB_ACCOUNT")
  [ -z "${SLURM_JOB_QOS:-}" ] || options+=(--qos="$SLURM_JOB_QOS")
  [ -z "${SLURM_GPUS_PER_NODE:-}" ] || options+=(--gpus-per-node="$SLURM_GPUS_PER_NODE")
  with_retries env -u SLURM_RESTART_COUNT sbatch "${options[@]}" "$0" "$@" || { echo "$output" && return 1; }
  successor=$(sed -n 's/^\([0-9][0-9]*\)\(;.*\)*$/\1/p' <<<"$output")
  [ -z "${SLURM_ARRAY_TASK_ID:-}" ] || successor=${successor}_$SLURM_ARRAY_TASK_ID
  echo "$successor" >"$job_folder/successor"
  [ -z "${attempt:-}" ] || echo "$successor" >"$attempt/successor"
  echo "orhpc: job $successor continues this run"
}
# After a failure, SLURM holds a job with --requeue=expedite for a requeue instead of ending it.
leave() {
  if [ -n "$expedited" ] && [ "$1" != 0 ]; then
    trap '' TERM USR2
    echo "orhpc: exit $1; canceling the job, which SLURM would hold (--requeue=expedite)"
    with_retries scancel "$job"
  fi
  exit "$1"
}
exit_job() {
  [ -z "$successor" ] || with_retries scancel "$successor"
  leave "$1"
}
expedited=
job_info=" $(show_job) "
# SLURM sets SLURM_RESTART_COUNT only in a requeued job: another inherits that of the job that submitted it.
restarts=$(field Restarts)
export SLURM_RESTART_COUNT=${restarts:-${SLURM_RESTART_COUNT:-0}}
case $job_info in
  *" Requeue=0 "*) submit_successor afternotok "$@" ;;
  *" ExpeditedRequeue=Yes "*) expedited=1 ;;
esac

# The controller ends a step by its number, and repeats the request after a minute if a node was slow.
# A requeued job numbers its steps from 0 again, so the repeated request would end the new start.  Therefore
# every second start uses number 0 for an empty step.
if [ $((SLURM_RESTART_COUNT % 2)) = 1 ]; then
  timeout 60 srun "${empty_step[@]}" --mpi=none --export=ALL true
fi

# srun may wait forever: to start tasks (fetching an image takes long too), or for a node that has lost power
# and rebooted.  It is then killed, and the job is requeued.
start_limit=1800
exit_limit=120
limit_srun() {
  local end=$((SECONDS + start_limit))
  trap '' TERM USR2
  until [ -s "$job_folder/code" ] || { [ -e "$job_folder/held" ] && flock -n "$job_folder/held" true; }; do
    if [ ! -e "$job_folder/held" ] && [ "$SECONDS" -ge "$end" ]; then
      echo "orhpc: srun has not started the first node's task within $start_limit s: killed, to be requeued"
      echo 75 >"$job_folder/code"
      echo 120 >"$job_folder/delay"
      kill -KILL "$1"
      return
    fi
    sleep 2 >/dev/null 2>&1
  done
  # With spares, srun does not end the step when the first node's launcher fails or is killed.
  [ "$spares" = 0 ] || exit_limit=30
  [ "$spares" = 0 ] || [ -s "$job_folder/code" ] || exit_limit=5
  sleep "$exit_limit" >/dev/null 2>&1
  echo "orhpc: srun is still running $exit_limit s after the first node has exited: killed"
  kill -KILL "$1"
}

for retries_left in 2 1 0; do
  rm -f "$job_folder/held" # of a task that has ended
  srun "${survive[@]}" "${step[@]}" --cpu-bind=none --mpi=none --export=ALL@SRUN_ARGS@ \
    @INSIDE@"$python" -m orhpc.launch.node "$@" &
  task=$!
  limit_srun "$task" &
  watchdog=$!
  while true; do
    wait "$task"
    code=$?
    kill -0 "$task" 2>/dev/null || break
  done
  wait "$task"
  code=$?
  { kill -KILL "$watchdog" && wait "$watchdog"; } 2>/dev/null
  wait # for the queries to SLURM at a signal
  # The first node writes its exit code; srun returns 1 for each step in which the memory limit killed a
  # process, and may return 0 for a step that it has lost.
  if [ -s "$job_folder/code" ]; then code=$(cat "$job_folder/code"); elif [ "$code" = 0 ]; then code=75; fi
  # Finished, wrong config, failed preflight, crash loop, busy run directory: a requeue would not help.
  case $code in 0 | 2 | 3 | 4 | 5) exit_job "$code" ;; esac
  # Without an attempt, a stop file or an exit code, the launcher has not started: srun started no task.
  [ ! -e "$job_folder/attempt" ] && [ ! -e "$job_folder/stop" ] && [ ! -s "$job_folder/code" ] || break
  if [ "$retries_left" = 0 ]; then
    echo "orhpc: srun failed three times to start a task: giving up"
    exit_job "$code"
  fi
  sleep 5
done
attempt=$(cat "$job_folder/attempt" 2>/dev/null) && echo "$code" >"$attempt/srun_exit"

# A start that SLURM considered dead finds a newer start running, which it must not requeue.
# While SLURM delivers a signal, it shows a running job as SIGNALING.
with_retries scontrol show job --oneliner "$job"
job_info=" $(first_line "$output") "
case ${job_info/ JobState=SIGNALING / JobState=RUNNING } in
  *" JobState=RUNNING "*" Restarts=$SLURM_RESTART_COUNT "*) ;;
  *" JobState="* | *"Invalid job id"*)
    echo "orhpc: exit $code, and the job is canceled, ending or restarted: not requeued"
    [ -z "$attempt" ] || grep -qs '"reason": "cancelled"' "$attempt/outcome.json" || exit "$code"
    exit_job "$code" ;;
  *) echo "orhpc: exit $code, and SLURM does not describe the job ($output): trying a requeue" ;;
esac
trap '' TERM USR2
exclude=$(cat "$job_folder/exclude" 2>/dev/null)
readmit=$(cat "$job_folder/readmit" 2>/dev/null)
delay=$(cat "$job_folder/delay" 2>/dev/null)
# A busy controller may requeue the job although its answer is lost; it then refuses the repeated request.
was_requeued() {
  local refused=$output shown=
  with_retries scontrol show job --oneliner "$job" && shown=" $(first_line "$output") "
  output=$refused
  case ${shown/ JobState=SIGNALING / JobState=RUNNING } in
    *" JobState=RUNNING "*" Restarts=$SLURM_RESTART_COUNT "*) return 1 ;;
    *" JobState="*) return 0 ;;
    *) return 1 ;;
  esac
}
if [ -z "$successor" ] && { with_retries scontrol requeue "$job" || was_requeued; }; then
  # SLURM ends this shell in a moment; the job can be changed only while it is pending.
  next_job=$job code=0
else
  [ -n "$successor" ] || echo "orhpc: not requeued: $output"
  [ -n "$successor" ] || submit_successor afterany "$@"
  next_job=$successor
fi
update_job() {
  for _ in 1 2 3 4 5 6 7 8 9 10; do
    timeout 5 scontrol update JobId="$next_job" "$1" && return
    sleep 0.5
  done
}
if [ -n "$next_job" ]; then
  # SLURM keeps a start time that is in the future, and otherwise sets its own.
  [ -z "$delay" ] || update_job "StartTime=now+$delay"
  if [ -n "$exclude$readmit" ]; then
    excluded=$(field ExcNodeList)
    [ "$excluded" != "(null)" ] || excluded=
    # Nodes that were lost before the current start: SLURM knows by now which of them work.
    if [ -n "$readmit" ] && [ -n "$excluded" ] &&
      names=$(timeout 20 scontrol show hostnames "$excluded"); then
      excluded=$(grep -vxF -- "$readmit" <<<"$names" | paste -sd ,)
    fi
    [ -z "$excluded" ] || exclude=$excluded${exclude:+,$exclude}
    update_job "ExcNodeList=$exclude"
  fi
fi
leave "$code"
"""

CHECK = r"""
if ! "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("orhpc") is None)'; then
  echo "orhpc: $python has no package orhpc: submit from the folder of its .venv, or set ORHPC_PYTHON" >&2
  exit 2
fi
"""
"""Runs on the host, so it cannot check the interpreter of a container."""
