#!/usr/bin/env bash
# Run a command with a number that no other claimant has: claim.sh FOLDER COUNT COMMAND...
# The number, 0 to COUNT - 1, is appended to the command. It is held by a lock on a file in
# FOLDER, which the kernel releases when the last process of the command ends, however it ends.
# A claimant that comes back under the same host name gets the number it had, if it is free.
set -euo pipefail
folder=$1 count=$2 owner=${CLAIMANT:-$(hostname)}
shift 2

try() { # leaves descriptor 9 open, and with it the lock, for the command
  exec 9>>"$folder/$1"
  flock --nonblock 9 || return 1
  echo "$owner" >"$folder/$1"
}

mine() { [ "$(cat "$folder/$1" 2>/dev/null)" = "$owner" ]; }

while true; do
  for index in $(seq 0 $((count - 1))); do
    if mine "$index" && try "$index"; then exec "$@" "$index"; fi
  done
  for index in $(seq 0 $((count - 1))); do
    if try "$index"; then exec "$@" "$index"; fi
  done
  echo "claim: all $count numbers are taken; looking again in 5 s"
  sleep 5
done
