#!/usr/bin/env bash
# Prints the number of GPUs that CUDA shows here.
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c .
else
    nvidia-smi --list-gpus | wc -l
fi
