# shellcheck shell=sh
set -e
export SIMGPU_DIR=/run/gpu
simgpu --dir "$SIMGPU_DIR" --memory 16GiB >/tmp/simgpu.out 2>&1 &
server=$!
tries=0
until grep -qx ready /tmp/simgpu.out; do
    tries=$((tries + 1))
    if [ "$tries" -gt 100 ]; then
        echo "simgpu is not ready:"
        cat /tmp/simgpu.out
        exit 1
    fi
    sleep 0.1
done

# What fits is given, what does not is refused, and what was freed can be had again.
rc=0
simtenant --cuda /opt/simgpu/libcuda.so.1 script 'alloc 8GiB; alloc 10GiB; free; alloc 10GiB' || rc=$?
echo "with libcuda: $rc"
rc=0
simtenant --raw script 'alloc 8GiB; alloc 10GiB; free; alloc 10GiB' || rc=$?
echo "without libcuda: $rc"

kill "$server"
wait "$server"
