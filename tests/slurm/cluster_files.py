"""The SLURM configuration and the boot script of the test cluster's nodes."""

from __future__ import annotations

CONF = """\
ClusterName=orhpc
SlurmctldHost={host}({net}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge.sock,cred_expire=5
SlurmctldPort=16827
SlurmdPort=16828
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd.%n.log
MailProg=/bin/true
ProctrackType={proctrack}
TaskPlugin={task}
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerNode=1000
GresTypes=gpu
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{parameters}
JobRequeue=1
KillWait=30
SlurmdTimeout=15
SlurmctldTimeout=30
UnkillableStepTimeout=60
InactiveLimit=0
MessageTimeout=10
TCPTimeout=2
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=5
AccountingStorageType=accounting_storage/none
NodeName=n[0-{last}] NodeAddr={net}.1[0-{last}] CPUs=16 RealMemory=20000 Gres=gpu:8 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=abrupt Nodes=ALL State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=0
PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""

INIT = """\
set -e
hostname $1
mount --make-rprivate /
mount -t proc proc /proc
mount --bind {root}/hosts /etc/hosts
mount --bind {root}/resolv.conf /etc/resolv.conf
mount -t tmpfs -o size=1g,mode=1777 tmpfs /dev/shm
# /tmp is private to the node, as on real nodes, except for the folders that all nodes share.
for path in {root} {visible}; do
  case $path in /tmp/*)
    mkdir -p "{root}/tmp/$1/${{path#/tmp/}}"
    mount --bind "$path" "{root}/tmp/$1/${{path#/tmp/}}" ;;
  esac
done
mount --rbind {root}/tmp/$1 /tmp
ip link set lo up
while ! ip -4 addr show dev eth0 2>/dev/null | grep -q inet; do sleep 0.02; done
export SLURM_CONF={root}/slurm.conf
set +e
trap 'kill -TERM $(cat {root}/slurmd.$1.inner)' TERM
# Like a real node, it survives when only slurmd is killed; USR1 restarts slurmd.  Not HUP: a shell cannot
# trap a signal that was ignored at its start, as under nohup.
slurm() {{
  slurmd -D -N $1 >>{root}/log/slurmd.$1.out 2>&1 &
  echo $! >{root}/slurmd.$1.inner
}}
trap "slurm $1" USR1
slurm $1
while :; do sleep 0.5 & wait $!; done
"""
