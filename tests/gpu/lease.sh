#!/bin/bash
# The GPU checks that belong together, each on GPUs of its own, within a number of seconds:
#
#   [KERNELS=FILE] tests/gpu/lease.sh PLAN SECONDS OUT [GGUF]   # GGUF: SmolLM2-135M-Instruct, for the suite
#
# OUT gets results.tgz (results and ends of logs, no weights, no keys; packed anew every 15 s and at the end),
# table.txt (what ended when, and how) and kernels.tar.xz: what Triton and SGLang compiled, which as KERNELS
# spares the next machine of the same kind up to 75 s a server.  PYTHONPATH is the caller's.
#
# Plans, in the order of what they tell for their time; a command may take 600 s, so SECONDS is 560 at most.
# Servers need 75 s to start on a machine that has compiled their kernels, 130 s on a fresh one.
#
#   plan      GPUs  s    what it answers
#   four      4     280  beside each other: mixed, experts divided by four in trainer and engine (200 s), a drafter
#                        on 2 (200 s), FP8 and the speed of experts on 3 (90 s), one GPU's experts on 0 (80 s), and
#                        against these EP 4 (40 s)
#   one       1     560  sleep and wake of small and large tensors (15 s, quiet); sync, sleep and wake of 6 GB
#                        of experts (moe: 250 s at most); rollouts against SGLang's benchmark, FP8 against
#                        bf16 (200 s); if a minute is left, sync in FP8
#   mismatch  1     560  mixture of experts in engine and trainer, replay off and on (300 s); exact mode (250 s)
#   two       2     400  where four are not to be had: mismatch on GPU 0 (250 s); on GPU 1 the suite on SmolLM2
#                        beside the families (150 s), then one GPU's experts and replay (70 s) and EP 4 by four
#                        processes on it (80 s)
#   suite     2     250  the suite on tiny experts, on GPU 1: needs no archive but the engine's
#   pair      2     300  split, deltas, mixed, experts divided in trainer and engine, and DP attention (or SECTIONS), of a
#                        small model, beside each other on both (or GPUS=0,1,2,3); servers are up after 150 s on
#                        a fresh machine
#   unified   2     480  mismatch on GPU 0 (280 s); on GPU 1 sleep and wake (30 s), FP8 and the speed of experts
#                        (90 s), one_node.py's restart of two layers (250 s)
#   checks    1     280  sleep and wake (30 s); one product for all experts, FP8 asleep, and the optimiser with
#                        moments in bfloat16 and in host memory (200 s)
#   tails     2     560  benchmarks/gpu/heavy_tails.py on GPU 0 (SHARE=60 s a variant after a start of 130 to
#                        200 s); benchmarks/gpu/recovery.py, faults and replay, on 1
#   faults    2     420  benchmarks/gpu/recovery.py, faults and replay, on GPU 0; models that see images on 1
#   loading   2     560  GPU 0: weights copied directly into SGLang's parameters, and loaded by SGLang (two
#                        starts; DEADLINE=240 s each); GPU 1: models that see images
#   ranks     2     580  on both: experts divided in trainer and engine, of a small model, compared bit for bit: each
#                        rank sent its own, and all copied directly, at the same time (200 s); then the seconds of
#                        syncs of 30B layers by SGLang, of each rank's own, and of these by direct copies (350 s)
#   moves     1     250  a trainer's update and gathering of weights while its state moves, and while nothing does; 63 GB
#                        of host memory
#   sleeps    2     330  an engine releases its memory while it generates, with what waits for its GPUs and without
#   recovery2 2     420  on both: failures of one GPU (benchmarks/gpu/recovery_two_gpus.py)
#   update    1-2   500  benchmarks/gpu/moe_update.py: updates of a mixture by recomputation, micro-batches, counts
#                        and overlap, on GPUS=0,1 (or one: 0); UPDATE: more of its words, as --layers 6
#
# Where bytecode is not kept, every process compiles what it imports: run tests/gpu/warm.sh first.
#   node      2-8   560  benchmarks/gpu/one_node.py, one case a command: CASES="bf16" (540 s: model, kernels and
#                        host memory are new), then "split", "fp8" (380 s each); "restart plain" as LAYERS=8;
#                        on two GPUs LAYERS=8, and more words of it in NODE
#
# 1800 s of device time, of which one GPU counts 67 %, with 120 s to start and fill a machine:
#   A  four GPUs: node on all layers, bf16, 10 steps (85 + 500), split on half of them and the restart of eight
#      (2 x 300): NODE="--host-gib 460"
#      two GPUs: pair, two (120 + 250 + 400 = 770), one GPU: one
#      two GPUs: pair, unified, node (120 + 300 + 480 + 560 = 1460)
#   B  eight GPUs: node bf16, split, fp8 and restart (120 + 540 + 3 x 380 = 1800): shorten by STEPS
set -u
PLAN=$1 OUT=$3 GGUF=${4:-}
END=$((SECONDS + $2))
ROOT=$(cd "$(dirname "$0")/../.." && pwd)
W=${LEASE_WORK:-/tmp/lease} L=$W/logs R=$W/results
mkdir -p "$L" "$R" "$OUT" "$W/home"
export HOME=$W/home # where compiled kernels go
[ -n "${KERNELS:-}" ] && tar -C "$HOME" -xJf "$KERNELS"
cd "$ROOT" || exit 2
# Runs share GPUs here, where SGLang would not start beside another's memory.
export SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK=0
# Multicast over NVLink has put shared hosts out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 PYTHONUNBUFFERED=1
PY=${PYTHON:-python3} MARGIN=${MARGIN:-45} CHECK="tests/gpu/sglang_check.py --out $R"

left() { echo $((END - SECONDS - 10 > 1 ? END - SECONDS - 10 : 1)); }
least() { echo $(($1 < $2 ? $1 : $2)); }

job() { # NAME GPUS SECONDS WORDS...: in the foreground; {} becomes MARGIN s less than it may take, so that
  # a run ends what it started before it is killed itself
  local name=$1 gpus=$2 seconds began=$SECONDS code
  seconds=$(least "$3" "$(left)")
  shift 3
  [ "$seconds" -lt 60 ] && { echo "$name: no time left" | tee -a "$OUT/table.txt"; return 1; }
  CUDA_VISIBLE_DEVICES=$gpus timeout -k 10 "$seconds" "$PY" ${@//\{\}/$((seconds - MARGIN))} >"$L/$name.log" 2>&1
  code=$?
  echo "$name: exit $code after $((SECONDS - began)) s, at $((SECONDS))" | tee -a "$OUT/table.txt"
  grep -E '^(ok  |FAIL)' "$L/$name.log" | cut -c1-300 | tee -a "$OUT/table.txt"
  return $code
}

pack() {
  local log name
  for log in "$L"/*.log /tmp/{sglang,megatron}_check/*.log /tmp/sglang_check/*/*/attempts/*/*.log; do
    name=${log#/tmp/}
    [ -f "$log" ] && tail -c 100000 "$log" >"$R/${name//\//_}.txt"
  done
  cp /tmp/megatron_check/results.jsonl "$R/" 2>/dev/null
  tar -C "$W" -czf "$OUT/results.part" --exclude='*key*' --exclude='*.safetensors' results &&
    mv "$OUT/results.part" "$OUT/results.tgz"
}

smollm2() { [ -z "$GGUF" ] || job suite-smollm2 "$1" 280 $CHECK protocol --gguf "$GGUF" --only smollm2 --deadline 240; }
tiny_moe() { job suite-tiny-moe "$1" 280 $CHECK protocol --only moe --deadline 240; }
suites() { smollm2 "$1"; tiny_moe "$1"; } # GPU: one model at a time
moe() { job moe "$1" 295 $CHECK moe --deadline {}; }
split() { job split "$1" 325 $CHECK split --deadline {}; }
megatron() { job "$1" "$2" "$3" tests/gpu/megatron_check.py --seconds {} "${@:4}"; }

four() {
  small 0,1,2,3 mixed experts & local all=$!
  small 2 speculative & local drafter=$!
  megatron speed 3 150 fp8 moe_speed & local speed=$!
  megatron one 0 150 moe
  megatron ep4 0,1,2,3 100 several --cases 9 10
  wait $all $drafter $speed
}
one() {
  job residence 0 60 tests/gpu/residence_check.py
  moe 0
  job rollout 0 300 benchmarks/gpu/sglang_rollout.py
  job fp8 0 295 $CHECK fp8 --deadline {}
}
mismatch() {
  job mismatch 0 310 benchmarks/gpu/moe_mismatch.py --out "$R"
  job exact 0 260 tests/gpu/exact_mode.py --out "$R"
}
two() {
  job mismatch 0 360 benchmarks/gpu/moe_mismatch.py --out "$R" & local mismatch=$!
  smollm2 1 & local suite=$!
  megatron families 1 250 families0 families1
  wait $suite # what is timed is timed alone
  megatron experts 1 150 moe
  megatron ep4 1 150 several --cases 9 10 --share
  wait $mismatch
}
suite() { tiny_moe 1; }
moves() { job moves 0 240 tests/gpu/background_check.py; }
small() { # GPUS SECTIONS...: of a small model, beside each other
  local each gpus=$1 waiting=()
  for each in "${@:2}"; do
    job "$each-${gpus//,/}" "$gpus" 300 $CHECK $each --deadline {} --size small \
      --set engine.extra.disable_decode_cuda_graph=true &
    waiting+=($!)
  done
  wait "${waiting[@]}"
}
pair() { small "${GPUS:-0,1}" ${SECTIONS:-split deltas mixed experts dp}; }
unified() {
  job mismatch 0 360 benchmarks/gpu/moe_mismatch.py --out "$R" & local mismatch=$!
  job residence 1 90 tests/gpu/residence_check.py
  megatron speed 1 150 fp8 moe_speed
  job restart 1 320 benchmarks/gpu/one_node.py --out "$R/restart" --seconds {} --cases restart --gpus 1 \
    --layers 2 --cut-layers 2 --steps 4 --groups 8 --response 128 --host-gib 150 --set engine.memory_fraction=0.8 \
    --set engine.extra.max_total_tokens=131072
  wait $mismatch
}
checks() {
  job residence 0 90 tests/gpu/residence_check.py
  megatron checks 0 220 moe_speed fp8 optimiser
}
tails() {
  job heavy-tails 0 600 benchmarks/gpu/heavy_tails.py --out "$R" --share "${SHARE:-60}" --seconds {} & local all=$!
  job recovery 1 600 benchmarks/gpu/recovery.py --out "$R" --only faults replay --seconds {} ${GGUF:+--gguf "$GGUF"}
  wait $all
}
faults() {
  job images 1 400 tests/gpu/images.py --out "$R" --seconds {} & local images=$!
  job recovery 0 410 benchmarks/gpu/recovery.py --out "$R" --only faults replay --seconds {} ${GGUF:+--gguf "$GGUF"}
  wait $images
}
loading() {
  job images 1 300 tests/gpu/images.py --out "$R" --seconds {} & local images=$!
  job loading 0 500 $CHECK loading loading-speed --deadline "${DEADLINE:-240}"
  wait $images
}
ranks() {
  job own-experts 0,1 260 $CHECK own-experts --deadline {} & local own=$!
  sleep 20 # both write the same model's folder
  job loading 0,1 260 $CHECK loading --deadline {}
  wait $own
  job own-experts-speed 0,1 500 $CHECK own-experts-speed --deadline "${DEADLINE:-180}"
}
sleeps() { job sleep 0,1 400 tests/gpu/sleep_race.py --seconds "${SHARE:-100}"; }
recovery2() {
  job recovery-two 0,1 420 benchmarks/gpu/recovery_two_gpus.py --out "$R" --seconds {} ${GGUF:+--gguf "$GGUF"}
}
update() {
  local gpus=${GPUS:-0,1} count
  count=$(tr -cd , <<<"$gpus" | wc -c)
  job moe-update "$gpus" 590 benchmarks/gpu/moe_update.py --out "$R" --gpus $((count + 1)) --seconds {} ${UPDATE:-}
  cat "$R/moe_update.md"
}
node() {
  local gpus=${GPUS:-8} cases=${CASES:-bf16}
  job "node-${cases// /-}" "$(seq -s, 0 $((gpus - 1)))" 600 benchmarks/gpu/one_node.py --out "$R" --seconds {} \
    --cases $cases --gpus "$gpus" --layers "${LAYERS:-48}" --steps "${STEPS:-10}" ${NODE:-}
}

case $PLAN in
  four | one | mismatch | two | suite | pair | unified | checks | tails | faults | loading | moves | ranks | sleeps | recovery2 | update | node) ;;
  *) echo "no plan $PLAN" >&2; exit 2 ;;
esac
(while sleep 15; do pack; done) & PACKER=$!
# The driver's own cache is large, and soon filled again.
keep_kernels() { XZ_OPT=-T0 tar -C "$HOME" -cJf "$OUT/kernels.tar.xz" --exclude=./.nv .; }
trap 'kill $PACKER; pack; keep_kernels; cat "$OUT/table.txt"' EXIT
"$PLAN"
