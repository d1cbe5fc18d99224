#!/bin/sh
# What a container on Vertex AI runs: sh vertex_worker.sh python -m trainers.image_classification --strategy=multi_worker
# All workers end together when one fails, so each starts its command again, and they meet again. Vertex AI itself ends
# the job if a container ends with a code above 0; with 134, which this script makes of 75, it starts the job again.
told=0 restart=0
while :; do
    "$@" --model_dir="$AIP_CHECKPOINT_DIR" &
    worker=$!
    trap 'told=1; kill -TERM "$worker" 2>/dev/null' TERM  # to save
    while :; do
        wait "$worker"
        code=$?
        kill -0 "$worker" 2>/dev/null || break  # else a signal has ended the wait
    done
    case $code in
        0 | 2 | 126 | 127) exit "$code" ;;  # done, or the command is wrong
        75) [ "$told" -eq 0 ] || exit 134 ;;  # saved; another worker was told
        *) restart=$((restart + 1)) ;;
    esac
    echo "the worker ended with code $code" >&2
    [ "$told" -eq 0 ] && [ "$restart" -le "${RESTARTS:-5}" ] || exit 134
    sleep "${RESTART_PAUSE:-5}"
    [ "$told" -eq 0 ] || exit 134
done
