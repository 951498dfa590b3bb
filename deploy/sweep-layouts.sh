#!/usr/bin/env bash
# Runs `damask sweep` for every parallel layout of up to as many GPUs as are here, and `damask plan` over the results. Builds nothing.
# usage: deploy/sweep-layouts.sh [--binary FILE] [--shapes "20b 120b"] [--out DIR] [--gpu-hour-usd N] [--max-gpus N] [--quick]
#   --out DIR       default sweeps; gets NAME.md, NAME.csv and NAME.json of each layout, and plan-SHAPE.md
#   --gpu-hour-usd  for the plan; default 4
#   --quick         prompts of 1k and 8k, batches 1, 8, 32, 128, context 1k: about 20 s a layout
# A layout that does not run on this build is told and left out; the exit code is 1 then.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

binary=target/release/damask shapes='20b 120b' out=sweeps usd=4 max_gpus=
prompts=1024,2048,4096,8192,16384,32768 batches=1,2,4,8,16,32,64,128 contexts=1024,8192,32768
while [ $# -gt 0 ]; do
    case $1 in
        --binary) binary=$2; shift ;;
        --shapes) shapes=$2; shift ;;
        --out) out=$2; shift ;;
        --gpu-hour-usd) usd=$2; shift ;;
        --max-gpus) max_gpus=$2; shift ;;
        --quick) prompts=1024,8192 batches=1,8,32,128 contexts=1024 ;;
        *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
    esac
    shift
done

gpus=$(deploy/count-gpus.sh)
[ -z "$max_gpus" ] || [ "$gpus" -le "$max_gpus" ] || gpus=$max_gpus

# TP EP DP: experts split as attention is, or whole on their ranks, or spread over groups that work on different sequences.
layouts=('1 1 1')
[ "$gpus" -lt 2 ] || layouts+=('2 1 1' '2 2 1' '1 2 2')
[ "$gpus" -lt 4 ] || layouts+=('4 1 1' '4 2 1' '4 4 1' '2 4 2' '1 4 4')
[ "$gpus" -lt 8 ] || layouts+=('8 1 1' '8 8 1' '4 8 2')

failed=0
mkdir -p "$out"
for shape in $shapes; do
    files=()
    for layout in "${layouts[@]}"; do
        read -r tp ep dp <<<"$layout"
        name=$shape-tp$tp-ep$ep-dp$dp
        # Prefill is tensor-parallel alone: its latency is measured where experts are split as attention is.
        lengths=$prompts
        [ "$ep" = 1 ] || lengths=none
        if "$binary" sweep --shape "$shape" --tp "$tp" --ep "$ep" --dp "$dp" --prompts "$lengths" --batches "$batches" --contexts "$contexts" \
            --out "$out" --name "$name" 2>"$out/$name.log"; then
            files+=("$out/$name.json")
        else
            echo "left out: $name: $(tail -n 1 "$out/$name.log")"
            failed=1
        fi
    done
    [ ${#files[@]} = 0 ] || "$binary" plan --gpu-hour-usd "$usd" "${files[@]}" | tee "$out/plan-$shape.md"
done
exit $failed
