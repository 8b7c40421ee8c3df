#!/usr/bin/env bash
# One SuperNode and, as its children, the client apps; started again whenever it ends.
#   supernode.sh INDEX      the node's number, from 0: its key and its partition
#   KEYS       folder with ca.crt and nodes/node-INDEX                                keys
#   SUPERLINK  host:port of the SuperLink                                    127.0.0.1:8000
#   NUM_NODES  nodes of the federation, the num-clients of its runs                       3
#   STATE      folder of what this node keeps: cache, whether it runs  STATES/node-INDEX
#   STATES     folder of such folders                                                state
#   DATA       folder of data; of DATA/node-INDEX, if there is one                    none
#   DEVICE     cpu, cuda or cuda:N                                                  the run's
#   THREADS    torch threads                                                        the run's
#   PORT       of the client apps on this machine's loopback                9100 + INDEX
#
# Flower believes a SuperNode online for 60 s after its last sign of life and refuses it until
# then. And only once the server has seen it offline does it stop waiting for the reply that the
# node took along. So a node that was killed comes back later than that, one that said goodbye
# sooner.
set -euo pipefail
here=$(dirname "$(readlink -f "$0")")
index=${1:?"the node's number"}
keys=${KEYS:-keys} state=${STATE:-${STATES:-state}/node-$index} nodes=${NUM_NODES:-3}
after_goodbye=${RESTART_SECONDS:-10} after_kill=${KILLED_SECONDS:-75}
mkdir -p "$state/cache"
state=$(cd "$state" && pwd)
running=$state/running # there while the SuperLink may believe the node online

config="partition-id=$index num-partitions=$nodes cache-dir=\"$state/cache\""
if [ -n "${DATA:-}" ] && [ -n "$(ls -A "$DATA")" ]; then
  data=$(cd "$DATA" && pwd)
  if [ -d "$data/node-$index" ]; then data=$data/node-$index; fi
  config+=" data-dir=\"$data\""
fi
config+="${DEVICE:+ device=\"$DEVICE\"}${THREADS:+ threads=$THREADS}"

# shellcheck source=deploy/keep.bash
. "$here/keep.bash"

if [ -e "$running" ]; then pause "supernode $index was killed" "$after_kill"; fi
while [ -z "$stopped" ]; do
  touch "$running"
  run python "$here/supernode.py" \
    --root-certificates "$keys/ca.crt" \
    --superlink "${SUPERLINK:-127.0.0.1:8000}" \
    --auth-supernode-private-key "$keys/nodes/node-$index" \
    --node-config "$config" \
    --host 127.0.0.1 --port "${PORT:-$((9100 + index))}"
  if [ "$code" -ge 128 ]; then # a signal, or WITHOUT_GOODBYE of supernode.py
    wait_for=$after_kill
  else # it said goodbye, or was never let in
    rm -f "$running"
    wait_for=$after_goodbye
  fi
  if [ -z "$stopped" ]; then pause "supernode $index ended with code $code" "$wait_for"; fi
done
