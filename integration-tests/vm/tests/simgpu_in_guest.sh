set -e
simgpu --dir /run/gpu >/tmp/simgpu.out 2>&1 &
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
ls -la /run/gpu
kill "$server"
wait "$server"
